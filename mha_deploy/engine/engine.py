"""An engine on disk: the plan, its manifest and profiles, the machines that it fits, and its runner."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import math
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import numpy as np
import onnx_ir as ir
from msgspec import Meta, Struct, field

from mha_deploy.bundle.folder import LEDGER, MANIFEST, MODEL, Bundle, open_bundle, sha256
from mha_deploy.bundle.manifest import Manifest
from mha_deploy.engine.plugins import load_needed, other_builds, why_missing
from mha_deploy.environment import RUNTIMES, gpus, installed_version
from mha_deploy.errors import BackendUnavailable, BundleError, DeployError, SpecError
from mha_deploy.files import PathPart, check_plain, hint_for_missing, open_regular, read_json, read_regular
from mha_deploy.graph.file import load_graph
from mha_deploy.graph.rules import LEAST_FP8, TENSORRT, TENSORRT_RTX, is_rtx_gpu
from mha_deploy.judge import Accumulation
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import Axis, ModelSpec
from mha_deploy.output import (
    PLAN_MAGIC,
    check_file,
    is_engine,
    is_engine_manifest,
    is_result,
    lock_folder,
    make_folder,
    partial_files,
    write_file,
    write_unit,
)
from mha_deploy.runtime.child import call_isolated, isolation, open_isolated
from mha_deploy.runtime.cuda import find_gpu
from mha_deploy.runtime.runner import Runner
from mha_deploy.runtime.tensorrt import engine_verdict as verdicts
from mha_deploy.runtime.tensorrt.engine_runner import Profile, TensorRTRunner
from mha_deploy.runtime.tensorrt.engine_verdict import (
    EngineReason,
    EngineVerdict,
    FusionStatus,
    NodeVerdict,
    PrecisionStatus,
)
from mha_deploy.runtime.tensorrt.kernels import Kernel, LargeTensor, kernels_from_plan
from mha_deploy.runtime.tensorrt.versions import (
    INSTALL,
    LEAN,
    MODULES,
    EngineError,
    load,
    loads_plans_of,
)
from mha_deploy.status import EvidenceSource, ReasonKind, means
from mha_deploy.text import engine_reason_text, plural

# -- The optimization profiles of an engine ---------------------------------------------------------

Ranges = Mapping[str, Axis]

_USUAL_BATCH = 8


def parse_ranges(text: str, spec: ModelSpec) -> Ranges:
    """Read one profile such as `B=1:8:32,S=1:128:512`; axes that are left out keep the spec's range."""
    ranges: dict[str, Axis] = {}
    for part in text.split(","):
        name, separator, sizes = part.strip().partition("=")
        if not separator:
            raise SpecError("A profile has no range for an axis.", got=part, hint="B=1:8:32,S=1:128:512")
        if name in ranges:
            raise SpecError(f"A profile gives axis {name} twice.", got=text, hint="one range for each axis")
        axis = ranges[name] = Axis.parse(sizes, name=name)
        allowed = spec.axes.get(name)
        if allowed is not None and not (allowed.min <= axis.min and axis.max <= allowed.max):
            problem = f"The graph was exported for {name} from {allowed.min} to {allowed.max}."
            hint = "a range inside it, or export again with --axis"
            raise SpecError(problem, got=f"{name}={axis}", hint=hint)
    return spec.with_axes(ranges).axes


def default_profiles(spec: ModelSpec, *, one: bool = False) -> list[Ranges]:
    """The spec's own ranges; a layer with a cache gets one profile for prompts and one for single tokens.

    Both share `one` profile where this TensorRT cannot prepare the second one.
    """
    if spec.cache == "none":
        return [spec.axes]
    if one:
        B = spec.axes["B"]
        # TensorRT 8.6 built a layer with a cache wrongly for every other batch when both its usual batch and
        # its usual number of tokens were 1.
        return [spec.axes if B.opt > 1 else {**spec.axes, "B": replace(B, opt=min(B.max, _USUAL_BATCH))}]
    S, P = spec.axes["S"], spec.axes.get("P")
    if S.min > 1 or S.max == 1:
        return [spec.axes]
    prompt = spec.axes if P is None else {**spec.axes, "P": replace(P, opt=P.min)}
    return [prompt, {**spec.axes, "S": Axis(min=1, opt=1, max=1)}]


def profile_names(spec: ModelSpec, profiles: Sequence[Ranges]) -> list[str]:
    """Names of the profiles: `prefill` and `decode` where one is for single tokens alone, else numbers."""
    names = ["decode" if spec.cache != "none" and each["S"].max == 1 else "prefill" for each in profiles]
    if "decode" not in names:
        return [str(index) for index in range(len(profiles))]
    return [
        name if names.count(name) == 1 else f"{name}-{names[:index].count(name)}"
        for index, name in enumerate(names)
    ]


def profile_shapes(spec: ModelSpec, ranges: Ranges) -> Profile:
    """The smallest, usual and largest shape of every input."""
    low, opt, high = (
        {name: getattr(axis, bound) for name, axis in ranges.items()} for bound in ("min", "opt", "max")
    )
    return {each.name: (each.shape(low), each.shape(opt), each.shape(high)) for each in spec.inputs}


# -- The manifest ----------------------------------------------------------------------------------

FORMAT = 2
FOLDER = "engines"


class KernelRecord(TypedDict):
    """One kernel of an engine."""

    name: str
    type: str
    tactic: str
    nodes: list[str]
    dtypes: list[str]
    profile: int
    fused_attention: bool


class LibraryRecord(TypedDict):
    """A plugin library that an engine needs."""

    library: str
    version: str
    sha256: str
    tensorrt: str
    plugins: list[dict[str, str]]


class _ChosenAttention(TypedDict):
    requested: str
    chosen: str
    accumulate: str


class AttentionChoice(_ChosenAttention, total=False):
    """The implementation of attention; where it was measured, the cost of each candidate."""

    native_us: float | None
    plugin_us: float | None
    ratio: float | None
    tried: list[dict[str, Any]]


class DifferingKernels(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What computes the same ONNX nodes by other kernels from build to build."""

    nodes: Annotated[list[str], means("the ONNX nodes; the kernel's own name where it names none")]
    profile: Annotated[int, means("the optimization profile, from 0 on")]
    kernels: Annotated[list[list[str]], means("the kernels of each build")]


class RebuildRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much an engine differs from build to build."""

    builds: Annotated[int, means("how many times it was built, each time without kernel timings")]
    identical: Annotated[bool, means("whether all plans are identical, byte for byte")]
    differing: Annotated[list[DifferingKernels], means("ONNX nodes whose kernels differ")]
    fused: Annotated[list[tuple[int, int]], means("for each build, fused attentions and all attentions")]
    seconds: Annotated[list[float], means("build times, seconds")]
    engine_bytes: Annotated[list[int], means("sizes of the plans, bytes")]
    errors: Annotated[
        dict[str, dict[str, list[float | None]]],
        means("share of the error budget in each build, by case and output"),
    ]
    times_us: Annotated[dict[str, list[float]], means("median time of each build, µs, by case")]
    timing_cache: Annotated[
        bool | None,
        means("whether a build from its own timings has the same kernels; null if timings have no effect"),
    ]


class EngineManifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine is."""

    backend: Annotated[str, Meta(pattern=f"^({'|'.join(MODULES)})$")]
    version: str  # of the TensorRT that built it; see `loads_plans_of` for which others load it
    gpu: dict[str, str] | None  # that it was built on; None where it was compiled for named targets
    targets: list[str]  # compute capabilities it was compiled for, as SM89; none for all that can (RTX)
    model: str
    precision: str  # the requested one
    dialect: str  # how attention was written for the parser
    profiles: list[dict[str, str]]  # axis ranges of each, as min:opt:max
    bundle_sha256: str  # of the manifest of the bundle it was built from
    engine_sha256: str
    engine_bytes: int
    seconds: float  # how long the build took
    strongly_typed: bool  # whether its types are those of the graph
    verdict: EngineVerdict
    kernels: list[KernelRecord]  # as the best source reports them
    options: dict[str, Any]  # of the builder
    findings: list[dict[str, Any]]  # of the check before the build
    notes: list[str]
    profile_names: list[str] = field(default_factory=list)  # numbers, or `prefill` and `decode`
    attention: AttentionChoice = field(
        default_factory=lambda: AttentionChoice(requested="native", chosen="native", accumulate="fp16")
    )
    plugins: list[LibraryRecord] = field(default_factory=list)
    in_place: dict[str, str] = field(default_factory=dict)
    """From each output that may share the memory of an input to that input: there the plugin writes only the
    new entries of a KV cache, elsewhere it copies the whole of it."""
    large_tensors: list[LargeTensor] = field(default_factory=list)
    """Tensors that TensorRT reported as too large at the largest sizes; a call that needs one is refused."""
    rebuilds: RebuildRecord | None = None
    format: int = FORMAT

    def profile_name(self, index: int) -> str:
        """What a profile is called."""
        return self.profile_names[index] if index < len(self.profile_names) else str(index)

    @property
    def ranges(self) -> list[dict[str, Axis]]:
        """The axis ranges of every optimization profile."""
        return [{name: Axis.parse(text, name=name) for name, text in each.items()} for each in self.profiles]

    @property
    def fused_count(self) -> tuple[int, int]:
        """How many attentions are one fused kernel in every profile, of how many."""
        return self.verdict.fused_count

    @property
    def all_fused(self) -> bool:
        """Whether every attention is one fused kernel in every profile."""
        return self.verdict.all_fused

    @property
    def has_requested_types(self) -> bool:
        """Whether all types are the requested ones, as far as that can be known before it is loaded."""
        return self.verdict.precision.has_requested_types

    @property
    def fusion_summary(self) -> str:
        """How many attentions are fused, in words; what no source reports is unknown, not unfused."""
        return fusion_summary(*self.fused_count, msgspec.to_builtins(self.verdict.nodes))

    @property
    def precision_summary(self) -> str:
        """The precision of the engine, in words."""
        found = self.verdict.precision
        return precision_summary(
            found.status,
            found.requested,
            gemms=msgspec.to_builtins(found.gemms),
            attentions=found.quantized_attentions,
            unquantized=found.unquantized_attentions,
            reasons=msgspec.to_builtins(found.reasons),
        )


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine whose manifest has been read."""

    path: Path  # the plan
    manifest: EngineManifest  # as `open_engine` reads it, without the claims that its plan does not confirm
    is_confirmed: bool = True  # else its verdict counts once it ran

    def __repr__(self) -> str:
        manifest = self.shown
        return f"<Engine {self.path}: {manifest.backend} {manifest.version}, {manifest.fusion_summary}>"

    @property
    def shown(self) -> EngineManifest:
        """The manifest without the claims for which there is no evidence but the manifest itself."""
        if self.is_confirmed:
            return self.manifest
        reason = EngineReason(kind=ReasonKind.PLAN_UNREADABLE, place=self.manifest.backend)
        verdict = _without_claims(self.manifest.verdict, reason)
        return msgspec.structs.replace(self.manifest, verdict=verdict)

    def accumulation(self, precision: Precision) -> Accumulation:
        """The type that its GEMMs may accumulate in, which sets the budget, and how that is known."""
        if precision.name != "fp16":
            return Accumulation.of_wide(precision)
        manifest, found = self.manifest, self.manifest.verdict.precision
        if narrow := found.accumulate_in_fp16:
            why = f"{plural(len(narrow), 'matmul kernel')} accumulate in FP16 (e.g. {narrow[0]})"
            return Accumulation("fp16", why)
        if later := found.selected_at_load:
            why = f"{plural(len(later), 'matmul kernel')} selected at load time (e.g. {later[0]})"
            return Accumulation("fp16", why)
        if manifest.attention["chosen"] == "plugin" and manifest.attention["accumulate"] == "fp32":
            return Accumulation("fp32", "the plugin's attention and projections accumulate in FP32")
        if manifest.backend == TENSORRT and int(manifest.version.partition(".")[0]) < 10:
            why = f"TensorRT {manifest.version} selects kernels that accumulate in FP16"
            return Accumulation("fp16", why)
        return Accumulation("fp32", "no kernel of the engine accumulates in FP16, by its name")

    def check_bundle(self, bundle: Path) -> None:
        """Refuse an engine that was built from another bundle, or whose manifest does not fit it."""
        hint = f"mha-deploy build-engine {bundle} --backend {self.manifest.backend} --overwrite"
        if sha256(bundle / MANIFEST) != self.manifest.bundle_sha256:
            raise BundleError("The engine was built from another bundle.", got=self.path, hint=hint)
        if wrong := _misfit(self.manifest, open_bundle(bundle, verify=False).manifest):
            problem = "The engine's manifest does not match its bundle."
            raise BundleError(problem, got=f"{self.path}: {wrong}", hint=hint)


def _misfit(engine: EngineManifest, bundle: Manifest) -> str | None:
    """Where an engine's manifest differs from the bundle that it was built from."""
    if (engine.model, engine.precision) != (bundle.spec.name, bundle.precision.name):
        return f"{engine.model} {engine.precision}, not {bundle.spec.name} {bundle.precision.name}"
    names = {*(str(node.get("name")) for node in bundle.attention), *_unrecognized(bundle)}
    judged = {(node.node, node.profile) for node in engine.verdict.nodes}
    if judged != {(name, profile) for name in names for profile in range(len(engine.profiles))}:
        return f"a verdict on {len(judged)} attentions and profiles, not on {len(names)} attentions each"
    try:
        shapes = [profile_shapes(bundle.spec, ranges) for ranges in engine.ranges]
    except (DeployError, KeyError) as error:
        return f"profiles {engine.profiles}: {error}"
    recorded = engine.options.get("profiles")
    if recorded is not None and json.dumps(recorded) != json.dumps(shapes):
        return f"profiles {engine.profiles}, but inputs {recorded}"
    return None


# -- The plan and the manifest beside it -----------------------------------------------------------

_LARGEST_PLAN = 1 << 40


def engine_path(bundle: Path, name: str) -> Path:
    """The path of the engine of that name in a bundle."""
    return bundle / FOLDER / f"{PathPart(name, 'an engine')}.engine"


def manifest_path(engine: Path) -> Path:
    """The path of the manifest of an engine, beside it."""
    return engine.with_suffix(".json")


def engines_of(bundle: Path) -> list[Engine]:
    """The engines of a bundle, by name."""
    if (folder := bundle / FOLDER).is_symlink():
        problem = "The folder of the engines is a link, and a bundle contains all of its files."
        raise BundleError(problem, got=folder, hint="remove the link, and build the engines again")
    foreign = foreign_engines(bundle)
    return [open_engine(path) for path in sorted(folder.glob("*.engine")) if path not in foreign]


def foreign_engines(bundle: Path) -> tuple[Path, ...]:
    """Plans in the folder of the engines that were not built from the bundle: they have no manifest.

    One whose manifest is missing, though the bundle's list has it, is not among them.
    """
    with suppress(OSError, ValueError, msgspec.DecodeError):
        built = _read_ledger(bundle).built
        plans = sorted((bundle / FOLDER).glob("*.engine"))
        return tuple(
            path
            for path in plans
            if path.stem not in built
            and not os.path.lexists(manifest_path(path))
            and not partial_files(manifest_path(path))
        )
    return ()


class Ledger(Struct, frozen=True, kw_only=True):
    """The engines that were built from a bundle, by name, with the hashes of their plans."""

    tool: dict[str, str] = field(default_factory=lambda: {"name": "mha-deploy"})
    built: dict[str, str] = {}


def gone_engines(opened: Bundle) -> tuple[str, ...]:
    """The engines that were built from a bundle and are not in it any more, by name.

    A ledger that is missing or cannot be read is an error: what it names is not known to be there.
    """
    opened.verify_ledger()
    bundle = opened.path
    here = {path.stem for path in (bundle / FOLDER).glob("*.engine")}
    left = {path.stem for path in (bundle / FOLDER).glob("*.json")}
    try:
        known = set(_read_ledger(bundle).built)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise BundleError(f"{LEDGER} cannot be read.", got=error, hint="export the bundle again") from error
    return tuple(sorted((known | left) - here))


def _read_ledger(bundle: Path) -> Ledger:
    path = bundle / LEDGER
    return msgspec.json.decode(read_regular(path), type=Ledger) if path.exists() else Ledger()


def _note_built(bundle: Path, name: str, digest: str) -> None:
    # The engine is there; a ledger that is broken, or not ours, stays as it is.
    with suppress(OSError, ValueError, msgspec.DecodeError, DeployError):
        built = {**_read_ledger(bundle).built, name: digest}
        data = msgspec.json.encode(Ledger(built=dict(sorted(built.items()))))
        write_file(bundle / LEDGER, msgspec.json.format(data, indent=2) + b"\n", is_result)


def build_command(bundle: Path, *flags: str) -> str:
    """The command that builds an engine of a bundle, to paste."""
    return " ".join(("mha-deploy build-engine", shlex.quote(str(bundle)), *flags))


def _place_of_bundle(path: Path) -> Path:
    """The bundle of an engine file or its manifest, for a command to paste."""
    return path.parent.parent if path.parent.name == FOLDER else Path("BUNDLE")


def open_engine(path: Path) -> Engine:
    """Read an engine's manifest, and check that the plan is the one it speaks of.

    What the plan does not confirm is unknown in the verdict that is returned.
    """
    beside = manifest_path(path)
    if not beside.exists() and not (path.is_file() and partial_files(beside)):
        problem = "There is no engine with a manifest here."
        hint = build_command(_place_of_bundle(path))
        hint = hint if path.exists() else hint_for_missing(path, hint, lambda each: each.suffix == ".engine")
        raise BundleError(problem, got=path, hint=hint)
    if not path.is_file():
        raise BundleError("The engine file is missing, but its manifest exists.", got=path, hint="rebuild it")
    plan = read_regular(path, _LARGEST_PLAN)
    manifest = _manifest_for(plan, beside)
    if plan[1:4] != PLAN_MAGIC:
        begin = f"begins with {plan[:8]!r}" if plan else "is empty"
        problem = "The engine is not a TensorRT plan."
        raise BundleError(problem, got=f"{path}, which {begin}", hint="rebuild it")
    if manifest.backend != TENSORRT_RTX:
        return Engine(path=path, manifest=manifest, is_confirmed=False)
    verdict = _derived_verdict(plan, manifest, _bundle_of(path))
    return Engine(path=path, manifest=msgspec.structs.replace(manifest, verdict=verdict))


def _manifest_for(plan: bytes, beside: Path) -> EngineManifest:
    """The manifest of a plan; under its temporary name where the process ended between two renames."""
    digest, failure = hashlib.sha256(plan).hexdigest(), None
    for path in (beside, *partial_files(beside)):
        try:
            manifest = _read_manifest(path)
        except BundleError as error:
            failure = failure or error
            continue
        if (manifest.engine_bytes, manifest.engine_sha256) == (len(plan), digest):
            return manifest
    problem = "The engine was changed or truncated after it was built."
    raise failure or BundleError(problem, got=beside.with_suffix(".engine"), hint="rebuild it")


def _read_manifest(path: Path) -> EngineManifest:
    try:
        data = read_json(path)
        check_plain(data)
        if isinstance(data, dict) and data.get("format") != FORMAT:
            found = data.get("format")
            problem, got = "The format of the engine is not supported.", f"{path}: format {found!r}"
            if type(found) is int and found < FORMAT:
                problem = "The engine was built by an older version of mha-deploy."
            hint = f"build it again: {build_command(_place_of_bundle(path), '--overwrite')}"
            raise BundleError(problem, got=got, hint=hint)
        manifest = msgspec.convert(data, EngineManifest)
        if manifest.gpu is not None and not manifest.gpu.keys() >= {"name", "compute_cap"}:
            raise ValueError("Object missing required field `compute_cap` - at `$.gpu`")
        if type(manifest.options.get("version_compatible", False)) is not bool:
            raise ValueError("Expected `bool` - at `$.options.version_compatible`")
        return manifest
    except (OSError, ValueError, msgspec.DecodeError, RecursionError) as error:
        problem = "The engine's manifest cannot be read."
        raise BundleError(problem, got=f"{path}: {error}", hint="rebuild it") from error


def _bundle_of(engine: Path) -> Path | None:
    """The bundle that contains an engine; None where it is elsewhere."""
    folder = engine.resolve().parent
    return folder.parent if folder.name == FOLDER and (folder.parent / MANIFEST).is_file() else None


def write_engine(path: Path, plan: bytes, manifest: EngineManifest, *, overwrite: bool = True) -> Engine:
    """Write plan and manifest as one unit, also where the process is killed on the way.

    Both are complete on the disk before the first of two renames. After it the new manifest is the one that
    fits the plan, under its temporary name as well: see `_manifest_for`. Refused where an engine of that name
    came meanwhile, or the bundle was replaced.
    """
    make_folder(path.parent, within=path.parent.parent)
    beside, bundle = manifest_path(path), _bundle_of(path)
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    with lock_folder(path.parent):
        if path.exists() and not overwrite:
            problem = "Another program built an engine of that name in the meantime."
            raise BundleError(problem, got=path, hint="another --name, or --overwrite")
        refuse_foreign(path)
        if bundle is not None and sha256(bundle / MANIFEST) != manifest.bundle_sha256:
            raise BundleError("The bundle was replaced in the meantime.", got=bundle, hint="build again")
        write_unit(path, plan, beside, text)
        if bundle is not None:
            _note_built(bundle, path.stem, manifest.engine_sha256)
    isolation.own.add(manifest.engine_sha256)
    return Engine(path=path, manifest=manifest)


def refuse_foreign(path: Path) -> None:
    """Refuse the place of an engine where there is anything but an engine and its manifest."""
    for each, is_ours in ((path, is_engine), (manifest_path(path), is_engine_manifest)):
        try:
            check_file(each, is_ours, within=path.parent)
        except DeployError as error:
            raise BundleError(
                error.what, got=error.got, hint="move it elsewhere, or another --name"
            ) from error


# -- Whether a plan confirms what the manifest beside it claims ------------------------------------

# Fewer numbers, or numbers that are alike, are found in any file.
_LEAST_NUMBERS, _LEAST_DIFFERENT = 16, 8
# A plan is long: how many matrices, and how many numbers in a row, are searched where none is there in one.
_LARGEST, _RUN = 4, 32


def _derived_verdict(plan: bytes, manifest: EngineManifest, bundle: Path | None) -> EngineVerdict:
    """The verdict that the plan of an engine itself shows; `bundle` is that of the engine.

    What a manifest claims beyond that is unknown.
    """
    claimed = manifest.verdict
    kernels = kernels_from_plan(plan)
    graph = load_graph(bundle / MODEL) if bundle is not None else None
    if graph is not None and not (_holds_weights(plan, graph) and _has_their_sizes(kernels, graph)):
        return _without_claims(claimed, EngineReason(kind=ReasonKind.OTHER_WEIGHTS))
    names = sorted({name for kernel in kernels for name in kernel.onnx_nodes})
    groups = verdicts.group_by_attention(names, {node.node: None for node in claimed.nodes})
    # Some of its nodes may be wider because the graph asks for it.
    written = None if graph is None else _written(graph, kernels, names)
    shown = {
        (each.node, each.profile): each
        for each in verdicts.fusion_verdict(kernels, groups, profiles=len(manifest.profiles), written=written)
    }

    def derived(node: NodeVerdict) -> NodeVerdict:
        found = shown.get((node.node, node.profile))
        is_shown = found is not None and found.status == node.status and {*found.kernels} >= {*node.kernels}
        if node.status != FusionStatus.FUSED or is_shown:
            return node
        got = FusionStatus.UNKNOWN if found is None else found.status
        return _unknown_node(node, EngineReason(kind=ReasonKind.PLAN_DIFFERS, place=node.node, got=got.value))

    precision = claimed.precision
    found = verdicts.precision_verdict(kernels, manifest.precision, written, groups)
    if precision.has_requested_types and found.status != precision.status:
        reason = EngineReason(
            kind=ReasonKind.PLAN_DIFFERS, got=found.status.value, wanted=precision.status.value
        )
        is_weaker = found.has_requested_types
        status = PrecisionStatus.SELECTED_AT_LOAD if is_weaker else PrecisionStatus.UNKNOWN
        reasons = () if is_weaker else (reason,)
        precision = msgspec.structs.replace(precision, status=status, reasons=reasons)
    # A budget depends on the last two, so a manifest may not leave them out.
    precision = msgspec.structs.replace(
        precision,
        gemms=found.gemms,
        selected_at_load=precision.selected_at_load or found.selected_at_load,
        accumulate_in_fp16=precision.accumulate_in_fp16 or found.accumulate_in_fp16,
    )
    return msgspec.structs.replace(claimed, nodes=tuple(map(derived, claimed.nodes)), precision=precision)


def _written(graph: ir.Model, kernels: Sequence[Kernel], names: Sequence[str]) -> verdicts.Written:
    """What the graph states of its nodes, without parts of attentions that were lowered to others.

    What multiplies in their place has the types of the attention.
    """
    types = verdicts.written_types(graph)
    attentions = [name for name, node in types.items() if node.is_attention]
    in_plan, parts = (verdicts.group_by_attention(each, attentions) for each in (names, list(types)))
    lowered = [name for name in attentions if in_plan[name] and name not in names]
    gone = {part for name in lowered for part in parts[name]} - set(names)
    multiplying = {name for kernel in kernels if kernel.is_heavy for name in kernel.onnx_nodes} - set(types)
    found = {name: node for name, node in types.items() if name not in gone}
    return found | {part: types[name] for name in lowered for part in multiplying.intersection(in_plan[name])}


def _without_claims(verdict: EngineVerdict, reason: EngineReason) -> EngineVerdict:
    """A verdict of which nothing is known but what a manifest claims."""
    nodes = tuple(_unknown_node(node, reason) for node in verdict.nodes)
    why = msgspec.structs.replace(reason, got=verdict.precision.status.value)
    precision = msgspec.structs.replace(
        verdict.precision, status=PrecisionStatus.UNKNOWN, reasons=(why,), gemms=None, quantized_attentions={}
    )
    return msgspec.structs.replace(verdict, nodes=nodes, precision=precision)


def _unknown_node(node: NodeVerdict, reason: EngineReason) -> NodeVerdict:
    reason = msgspec.structs.replace(reason, got=reason.got or node.status.value, wanted=node.status.value)
    return msgspec.structs.replace(node, status=FusionStatus.UNKNOWN, kernels=(), reasons=(reason,))


def _holds_weights(plan: bytes, graph: ir.Model) -> bool:
    """Whether any weight of the graph is in the plan; where all are packed together, parts of them are."""
    tensors = [each.const_value for each in graph.graph.initializers.values() if each.const_value is not None]
    searched = []
    for tensor in sorted(tensors, key=lambda tensor: tensor.nbytes):
        is_weight = tensor.dtype.is_floating_point() or tensor.dtype in (ir.DataType.INT8, ir.DataType.UINT8)
        if tensor.size < _LEAST_NUMBERS or not is_weight or not _is_distinct(data := tensor.tobytes()):
            continue
        searched.append(tensor)
        if data in plan or (len(tensor.shape) == 2 and tensor.numpy().T.tobytes() in plan):
            return True
    matrices = [tensor.numpy() for tensor in searched if len(tensor.shape) == 2][-_LARGEST:]
    return not searched or any(_holds_parts(plan, part) for each in matrices for part in (each, each.T))


def _is_distinct(data: bytes) -> bool:
    return len(np.unique(np.frombuffer(data, dtype=np.uint8))) >= _LEAST_DIFFERENT


def _holds_parts(plan: bytes, matrix: np.ndarray) -> bool:
    """Whether a quarter of the runs of numbers at places all over a matrix are in the plan."""
    rows, columns = (range(0, size, max(1, size // 4)) for size in matrix.shape)
    runs = [matrix[row, column : column + _RUN].tobytes() for row in rows for column in columns]
    runs = [each for each in runs if _is_distinct(each)]
    return len(runs) >= 4 and 4 * sum(each in plan for each in runs) >= len(runs)


def _has_their_sizes(kernels: Sequence[Kernel], graph: ir.Model) -> bool:
    """Whether most matmuls read as many weights as those nodes of the graph that they name.

    A kernel may compute several of them in one, and pad their weights. Of some, the plan names no weights.
    """
    sizes = {
        node.name: value.const_value.size
        for node in graph.graph.all_nodes()
        if node.op_type in ("MatMul", "Gemm")
        for value in node.inputs[1:2]
        if value is not None and value.const_value is not None
    }
    fitting = []
    for kernel in kernels:
        read = max((math.prod(each.shape) for each in kernel.constants), default=0)
        if kernel.is_gemm and kernel.onnx_nodes and sizes.keys() >= set(kernel.onnx_nodes) and read > 1:
            wanted = sum(sizes[name] for name in kernel.onnx_nodes)
            fitting.append(wanted <= read < 2 * wanted)
    return 2 * sum(fitting) >= len(fitting)


# -- The attentions of a bundle that are no node of its graph, in the verdict on an engine ---------


def _unrecognized(manifest: Manifest) -> dict[str, EngineReason]:
    """The attentions of a bundle that are no node of its graph, by names of their own, with the reasons."""
    found, taken = dict[str, EngineReason](), {str(node["name"]) for node in manifest.attention}
    for index in range(manifest.spec.attention_count - len(manifest.attention)):
        record = manifest.unfused[index] if index < len(manifest.unfused) else None
        name = "attention" if record is None else record.name
        names = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
        reason = EngineReason(kind=ReasonKind.NOT_ONE_NODE, place=name)
        if record is not None:
            reason = EngineReason(kind=ReasonKind.NOT_ONE_NODE, place=record.place or name, got=record.reason)
        found[next(each for each in names if each not in taken and each not in found)] = reason
    return found


def with_unrecognized(verdict: EngineVerdict, manifest: Manifest, *, profiles: int) -> EngineVerdict:
    """The verdict on all attentions of a bundle, from that on the attention nodes of its graph."""
    nodes = list(verdict.nodes)
    for name, reason in _unrecognized(manifest).items():
        decomposed = NodeVerdict(
            node=name,
            profile=0,
            status=FusionStatus.DECOMPOSED,
            reasons=(reason,),
            sources=(EvidenceSource.GRAPH,),
        )
        nodes += [msgspec.structs.replace(decomposed, profile=profile) for profile in range(profiles)]
    return msgspec.structs.replace(verdict, nodes=tuple(nodes))


# -- What this machine can build with and run on ---------------------------------------------------


def default_backend() -> str:
    """TensorRT where there is a GPU for it, else TensorRT-RTX, which compiles without one."""
    installed = [name for name, module in MODULES.items() if importlib.util.find_spec(module) is not None]
    if TENSORRT in installed and gpus():
        return TENSORRT
    if TENSORRT_RTX in installed:
        return TENSORRT_RTX
    got = f"installed: {', '.join(installed) or 'none'}; GPUs: {len(gpus())}"
    hint = 'pip install "mha-deploy[rtx]", which builds without a GPU'
    raise BackendUnavailable("No TensorRT that can build on this machine is installed.", got=got, hint=hint)


def first_gpu() -> dict[str, str] | None:
    """The GPU that an engine is built on and for: the first that CUDA shows, as all runners take it.

    Without CUDA, the first that the driver lists.
    """
    gpu = find_gpu()
    if gpu is not None:
        return {"name": gpu.name, "compute_cap": gpu.compute_capability}
    return next(iter(gpus()), None)


def reasons_not_to_run(engine: Engine, *, import_tensorrt: bool = True) -> list[str]:
    """Why an engine cannot run on this machine; empty where it can.

    The version of TensorRT is that of the module, which is imported, or else of the installed package.
    """
    backend = engine.manifest.backend
    if import_tensorrt and (lean := lean_runtime(engine)):
        return misfits(engine, _module_version(lean), first_gpu(), lean)
    if import_tensorrt:
        version = _module_version(backend)
    else:
        packages = next(runtime.packages for runtime in RUNTIMES if runtime.module == MODULES[backend])
        version = next(filter(None, map(installed_version, packages)), None)
    missing = why_missing(engine.manifest.plugins, version or engine.manifest.version)
    return [*misfits(engine, version, first_gpu()), *missing]


def lean_runtime(engine: Engine) -> str | None:
    """The lean runtime that runs a version-compatible engine where TensorRT itself is not installed."""
    manifest = engine.manifest
    if not manifest.options.get("version_compatible") or _module_version(manifest.backend) is not None:
        return None
    return next((name for name in LEAN if _module_version(name) is not None), None)


def _module_version(backend: str) -> str | None:
    with suppress(BackendUnavailable):
        if backend in LEAN:  # two TensorRTs in one process register the same types
            return call_isolated(backend, _version_here, backend, title=backend, step="importing it")
        return load(backend).version
    return None


def _version_here(backend: str) -> str:
    return load(backend).version


def misfits(engine: Engine, version: str | None, gpu: dict[str, str] | None, lean: str = "") -> list[str]:
    """Why an engine cannot run with this version of its TensorRT and this GPU; empty where it can.

    `lean` is a lean runtime in place of the TensorRT that built it.
    """
    manifest, reasons = engine.manifest, []
    compatible = bool(manifest.options.get("version_compatible"))
    if version is None:
        reasons.append(f"{lean or manifest.backend} is not installed here")
    elif why := loads_plans_of(version, manifest.version, compatible=compatible, lean=bool(lean)):
        here = f"{lean} {version}" if lean else version
        reason = f"it was built by {manifest.backend} {manifest.version}, here is {here}"
        reasons.append(f"{reason}: {why}" if compatible or lean else reason)
    if gpu is None:
        reasons.append("there is no NVIDIA GPU here")
    elif not _gpu_fits(manifest, gpu):
        reasons.append(f"it was built {where_built(manifest)}, here is {gpu['name']} ({gpu['compute_cap']})")
    return reasons


def where_built(manifest: EngineManifest) -> str:
    """The GPU or the compute capabilities that an engine was built for."""
    if manifest.gpu is not None:
        return f"on {manifest.gpu['name']}"
    major, minor = _least_rtx(manifest)
    return f"for {', '.join(manifest.targets) or f'RTX GPUs from compute capability {major}.{minor} on'}"


def _least_rtx(manifest: EngineManifest) -> tuple[int, int]:
    """The least compute capability of an engine of TensorRT-RTX that names no targets."""
    return LEAST_FP8 if "fp8" in manifest.verdict.precision.counts else (8, 0)


def _gpu_fits(manifest: EngineManifest, gpu: Mapping[str, str]) -> bool:
    major, minor = (int(part) for part in gpu["compute_cap"].split("."))
    level = manifest.options.get("hardware_compatible")
    if manifest.gpu is None:
        named = f"SM{major}{minor}" in manifest.targets
        return is_rtx_gpu((major, minor)) and (
            named if manifest.targets else (major, minor) >= _least_rtx(manifest)
        )
    if level == "ampere-plus":
        return (major, minor) >= (8, 0)
    key = "compute_cap" if level == "same-compute-capability" else "name"
    return manifest.gpu[key] == gpu[key]


# -- From an engine on disk to a runner, in a child process ----------------------------------------


def open_engine_runner(engine: Engine, *, cuda_graph: bool = True, runtime: str | None = None) -> Runner:
    """Load an engine into the TensorRT that built it; one that does not fit this machine is refused.

    A version-compatible one is loaded by a lean runtime where that is requested as the `runtime`, or where
    there is no other.
    """
    runtime, gpu = runtime or lean_runtime(engine) or engine.manifest.backend, first_gpu()
    lean = runtime if runtime in LEAN else ""
    if reasons := misfits(engine, _module_version(runtime), gpu, lean):
        hint = f"build one here: {build_command(_place_of_bundle(engine.path), '--backend', runtime)}"
        if gpu is None:
            hint = "run it on a machine with a GPU that it was built for"
        elif lean:
            hint = f"{INSTALL[lean]}, in a version that loads it; or build-engine --version-compatible"
        raise BackendUnavailable(f"{engine.path.name} cannot run here.", got="; ".join(reasons), hint=hint)
    title = runtime if lean else load(runtime).title
    return open_isolated(runtime, title, _open_here, engine, cuda_graph, runtime)


def _open_here(engine: Engine, cuda_graph: bool, runtime: str) -> TensorRTRunner:
    """Load an engine that fits this machine, in this process."""
    manifest = engine.manifest
    rt = load(runtime)
    # The runtime inside a version-compatible engine is code, and is executed: only on request.
    host_code = bool(manifest.options.get("version_compatible"))
    if host_code:
        isolation.refuse_untrusted(manifest.engine_sha256, f"{engine.path.name}, a version-compatible engine")
    load_needed(rt, manifest.plugins)
    return TensorRTRunner(
        rt,
        engine.path.read_bytes(),
        host_code=host_code,
        cuda_graph=cuda_graph,
        in_place=manifest.in_place,
        large_tensors=manifest.large_tensors,
    )


def backend_of_plan(path: Path) -> str | None:
    """The TensorRT whose plans begin like this file; None where it is no plan."""
    head = _beginning(path)
    return None if head[1:4] != PLAN_MAGIC else TENSORRT_RTX if head[:1] == b"v" else TENSORRT


def _beginning(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return bytes(file.read(8))
    except OSError as error:
        hint = hint_for_missing(path, "the path of a plan, as `trtexec --saveEngine` writes it")
        raise DeployError("The engine file cannot be read.", got=error, hint=hint) from error


def read_plan(path: Path) -> bytes:
    """The bytes of a plan."""
    try:
        return read_regular(path, _LARGEST_PLAN)
    except OSError as error:
        hint = "check that it is a file that you may read; `mha-deploy build-engine BUNDLE` writes one"
        raise DeployError("The engine file cannot be read.", got=error, hint=hint) from error


def open_plan(path: Path, runtime: str | None = None) -> Runner:
    """Load a plan that anything built; by default with the TensorRT whose plans begin like it."""
    found = backend_of_plan(path)
    if found is None:
        problem = "The file is not a TensorRT plan."
        hint = "a plan as `trtexec --saveEngine` writes it; an ONNX file with --graph"
        raise DeployError(problem, got=f"{path}, which begins with {_beginning(path)!r}", hint=hint)
    runtime = runtime or found
    title = runtime if runtime in LEAN else load(runtime).title
    if first_gpu() is None:
        hint = "validate on a machine with the GPU that it was built for"
        raise BackendUnavailable(f"{path.name} cannot run here.", got="there is no NVIDIA GPU", hint=hint)
    try:
        return open_isolated(runtime, title, _open_plan_here, runtime, path, isolation.trust_code)
    except EngineError as error:
        raise BackendUnavailable(error.what, got=error.got, hint=error.hint) from error


def _open_plan_here(runtime: str, path: Path, host_code: bool) -> TensorRTRunner:
    return TensorRTRunner(load(runtime), read_plan(path), host_code=host_code)


# -- An engine in words ----------------------------------------------------------------------------

_PROJECTIONS = {"fp32": "projections that accumulate in FP32", "fp16": "TensorRT's own projections"}


def fusion_summary(fused: int, count: int, nodes: Iterable[Mapping[str, Any]]) -> str:
    """`10/12 fused`, or `10/12 fused, 2 unknown`; `nodes` are the verdicts as plain data."""
    statuses: dict[str, set[FusionStatus]] = {}
    again: set[str] = set()
    for node in nodes:
        statuses.setdefault(node["node"], set()).add(FusionStatus(node["status"]))
        if any(reason["kind"] == ReasonKind.SCORES_AGAIN for reason in node["reasons"]):
            again.add(node["node"])
    unknown = sum(
        FusionStatus.UNKNOWN in found and FusionStatus.DECOMPOSED not in found for found in statuses.values()
    )
    parts = [f"{fused}/{count} fused"]
    parts += [f"{unknown} unknown"] if unknown else []
    parts += [f"scores of {len(again)} computed again for another output"] if again else []
    return ", ".join(parts)


def precision_summary(
    status: str,
    requested: str,
    *,
    gemms: Mapping[str, Any] | None = None,
    attentions: Mapping[str, int] | None = None,
    unquantized: Mapping[str, str] | None = None,
    reasons: Iterable[Mapping[str, str]] = (),
) -> str:
    """`precision: fp16 (verified)`, or `precision: mixed (requested: fp16)` with the reason.

    Of a graph that quantizes, also what is in eight bits. `gemms`, a `GemmTypes`, and the reasons are plain
    data; `attentions` are the quantized ones by type, `unquantized` are parts of others with their types.
    """
    known = {
        PrecisionStatus.VERIFIED: "verified",
        PrecisionStatus.SELECTED_AT_LOAD: "I/O types verified, kernels selected at load time",
    }
    found = PrecisionStatus(status)
    words = f"{requested} ({known[found]})" if found in known else f"{found.value} (requested: {requested})"
    why = "; ".join(map(engine_reason_text, reasons))
    parts = [f"precision: {words}" + (f": {why}" if why else "")]
    if gemms is not None:
        total = plural(gemm_count(gemms), "GEMM")
        parts += [
            f"{dtype} (verified) in {n}/{total}"
            for dtype, n in (gemms["quantized"] or {"eight bits": 0}).items()
        ]
        parts += _in_other_types(gemms["other_types"])
        for part, what in (("unknown", "not known"), ("unquantized", "not quantized in the graph")):
            parts += [f"{len(gemms[part])} {what} (e.g. {gemms[part][0]})"] if gemms[part] else []
    parts += [f"{dtype} (verified) in {plural(n, 'attention')}" for dtype, n in (attentions or {}).items()]
    return "; ".join([*parts, *_in_other_types(unquantized or {})])


def gemm_count(gemms: Mapping[str, Any]) -> int:
    """How many GEMMs the graph has outside attention."""
    return sum(gemms["quantized"].values()) + sum(
        len(gemms[part]) for part in ("other_types", "unknown", "unquantized")
    )


def _in_other_types(found: Mapping[str, str]) -> list[str]:
    """What the graph quantizes and the engine runs in another type, in words."""
    types: dict[str, list[str]] = {}
    for name, dtype in found.items():
        types.setdefault(dtype, []).append(name)
    return [
        f"{len(names)} in {dtype} although quantized ({', '.join(names[:3])}{', …' if names[3:] else ''})"
        for dtype, names in types.items()
    ]


def attention_summary(manifest: EngineManifest) -> str:
    """What computes attention and projections; where it was measured, the time of each candidate."""
    attention = manifest.attention
    parts = [f"{attention['chosen']}, {_PROJECTIONS.get(attention['accumulate'], attention['accumulate'])}"]
    ratio = attention.get("ratio")
    if ratio is not None:
        native, plugin = (f"{attention[key]:,.1f}" for key in ("native_us", "plugin_us"))
        faster = f"the plugin is {ratio:.2f}" if ratio >= 1 else f"native is {1 / ratio:.2f}"
        parts.append(f"plugin {plugin} µs, native {native} µs: {faster} times as fast")
    for trial in attention.get("tried", ()):
        name = f"{trial['attention']} with {_PROJECTIONS.get(trial['accumulate'], trial['accumulate'])}"
        if trial["refused"]:
            parts.append(f"{name} was not chosen: {trial['refused']}")
        elif ratio is None:
            parts.append(f"{name} {trial['us']:,.1f} µs")
    return "; ".join(parts)


def libraries_summary(manifest: EngineManifest) -> list[str]:
    """The libraries that an engine needs, and what to know of those of this machine."""
    needed = [
        f"{library['library']} {library['version']} (sha256 {library['sha256'][:12]}): "
        + ", ".join(each["name"] for each in library["plugins"])
        for library in manifest.plugins
    ]
    return [*needed, *other_builds(manifest.plugins, manifest.version)]


def rebuild_summary(record: RebuildRecord) -> list[str]:
    """How much the builds differ, in sentences."""
    lines = [f"{record.builds} builds: {'identical plans' if record.identical else 'plans differ'}"]
    lines += [
        f"{', '.join(each.nodes)}: " + " / ".join(dict.fromkeys(" + ".join(names) for names in each.kernels))
        for each in record.differing
    ]
    if len({tuple(each) for each in record.fused}) > 1:
        lines.append("fused: " + ", ".join(f"{fused}/{count}" for fused, count in record.fused))
    spans: list[tuple[str, str, Sequence[float]]] = [
        ("build time", "s", record.seconds),
        ("engine size", "bytes", record.engine_bytes),
        *((f"latency of {name}", "µs", times) for name, times in record.times_us.items()),
    ]
    lines += [f"{name}: {min(values):,.6g} to {max(values):,.6g} {unit}" for name, unit, values in spans]
    for case, outputs in record.errors.items():
        for output, shares in outputs.items():
            known = [share for share in shares if share is not None]
            if known:
                span = f"{min(known):.0%} to {max(known):.0%}"
                lines.append(f"error of {case}/{output}: {span} of the budget")
    if record.timing_cache is not None:
        same = "the same kernels" if record.timing_cache else "other kernels"
        lines.append(f"built again from the timing cache: {same}")
    return lines
