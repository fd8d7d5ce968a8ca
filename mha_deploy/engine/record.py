"""An engine on disk: the plan, and beside it a manifest that says what it is and what it fits."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mha_deploy.backends.tensorrt.volumes import LargeTensor
from mha_deploy.bundle import MANIFEST, Manifest, open_bundle, sha256
from mha_deploy.commit import write_atomically as write_atomically
from mha_deploy.commit import written
from mha_deploy.engine.options import BACKENDS, profile_shapes
from mha_deploy.engine.shown import RTX, is_plan, shown_verdict
from mha_deploy.engine.unrecognised import unrecognised
from mha_deploy.errors import BundleError, DeployError
from mha_deploy.spec_parts import Axis

FORMAT = 1
FOLDER = "engines"
NATIVE_ATTENTION = {"asked": "native", "chosen": "native", "accumulate": "fp16"}


@dataclass(frozen=True, kw_only=True)
class EngineManifest:
    """What an engine is.

    Args:
        backend: `tensorrt` or `tensorrt-rtx`.
        version: Version of the TensorRT that built it; another one cannot load it.
        gpu: The GPU it was built on, or None where it was compiled for named targets.
        targets: Compute capabilities it was compiled for, as SM89; none for all from 8.0 on (RTX).
        model: Name of the model.
        precision: The precision asked for.
        dialect: How attention was written for the parser.
        profiles: Axis ranges of each optimisation profile, as min:opt:max.
        profile_names: What each profile is called: its number, or `prefill` and `decode`.
        bundle_sha256: Hash of the manifest of the bundle it was built from.
        engine_sha256: Hash of the plan.
        engine_bytes: Size of the plan.
        seconds: How long the build took.
        strongly_typed: Whether its types are those of the graph.
        verdict: Fusion and precision, with their evidence.
        kernels: The kernels, as the best source tells them.
        options: What the builder was asked for.
        findings: What the check before the build found.
        notes: What a reader should know.
        attention: Who computes attention: `chosen` (`native` or `plugin`), how the projections sum up
            (`accumulate`), and where it was `asked` to be measured, what each way cost.
        plugins: The plugin libraries it needs: file name, version, hash, TensorRT and plugins of each.
        in_place: From each output that may lie in the memory of an input to that input: there the plugin
            writes only the new rows of a cache, elsewhere it copies the whole of it.
        large_tensors: Tensors that TensorRT said it cannot hold at the largest sizes; a call that needs one
            is refused.
    """

    backend: str
    version: str
    gpu: Mapping[str, str] | None
    targets: list[str]
    model: str
    precision: str
    dialect: str
    profiles: list[Mapping[str, str]]
    bundle_sha256: str
    engine_sha256: str
    engine_bytes: int
    seconds: float
    strongly_typed: bool
    verdict: Mapping[str, Any]
    kernels: list[Mapping[str, Any]]
    options: Mapping[str, Any]
    findings: Sequence[Mapping[str, Any]]
    notes: list[str]
    profile_names: list[str] = field(default_factory=list)
    attention: Mapping[str, Any] = field(default_factory=lambda: dict(NATIVE_ATTENTION))
    plugins: list[Mapping[str, Any]] = field(default_factory=list)
    in_place: Mapping[str, str] = field(default_factory=dict)
    large_tensors: list[Mapping[str, Any]] = field(default_factory=list)
    format: int = field(default=FORMAT)

    def profile_name(self, index: int) -> str:
        """What a profile is called."""
        return self.profile_names[index] if index < len(self.profile_names) else str(index)

    @property
    def ranges(self) -> list[dict[str, Axis]]:
        """The axis ranges of every optimisation profile."""
        return [
            {name: Axis.parse(text, name=name) for name, text in profile.items()} for profile in self.profiles
        ]

    @property
    def fused_count(self) -> tuple[int, int]:
        """How many attentions are one fused kernel in every profile, of how many."""
        names = {node["node"] for node in self.verdict["nodes"]}
        broken = {node["node"] for node in self.verdict["nodes"] if node["status"] != "fused"}
        return len(names - broken), len(names)

    @property
    def fusion_told(self) -> str:
        """How many attentions are fused, in words; what no source could tell is not called unfused."""
        fused, count = self.fused_count
        return fusion_told(fused, count, self.verdict["nodes"])

    @property
    def all_fused(self) -> bool:
        """Whether every attention is one fused kernel in every profile."""
        fused, count = self.fused_count
        return fused == count > 0

    @property
    def is_in_precision(self) -> bool:
        """Whether the engine was shown to be in the precision asked for."""
        return self.verdict["precision"]["status"] == f"really-{self.precision}"


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine whose manifest has been read.

    Args:
        path: The plan.
        manifest: What it is; as `open_engine` reads it, without the claims that its plan does not show.
        is_shown: Whether its plan, or the build, showed the verdict; else it counts once the engine runs.
    """

    path: Path
    manifest: EngineManifest
    is_shown: bool = True

    def check_bundle(self, bundle: Path) -> None:
        """Refuse an engine that was built from another bundle, or whose manifest does not fit it."""
        hint = f"mha-deploy build-engine {bundle} --backend {self.manifest.backend} --overwrite"
        if sha256(bundle / MANIFEST) != self.manifest.bundle_sha256:
            raise BundleError("The engine was built from another bundle.", got=self.path, hint=hint)
        wrong = _misfit(self.manifest, open_bundle(bundle, verify=False).manifest)
        if wrong is not None:
            raise BundleError(
                "The engine's manifest does not fit its bundle.", got=f"{self.path}: {wrong}", hint=hint
            )


def _misfit(engine: EngineManifest, bundle: Manifest) -> str | None:
    """What an engine's manifest says otherwise than the bundle that it was built from."""
    if (engine.model, engine.precision) != (bundle.spec.name, bundle.precision.name):
        return f"{engine.model} {engine.precision}, not {bundle.spec.name} {bundle.precision.name}"
    names = {*(str(node.get("name")) for node in bundle.attention), *unrecognised(bundle)}
    judged = [(node["node"], node["profile"]) for node in engine.verdict["nodes"]]
    if set(judged) != {(name, profile) for name in names for profile in range(len(engine.profiles))}:
        return f"a verdict on {len(set(judged))} attentions and profiles, not on {len(names)} attentions each"
    try:
        shapes = [profile_shapes(bundle.spec, ranges) for ranges in engine.ranges]
    except (DeployError, KeyError) as error:
        return f"profiles {engine.profiles}: {error}"
    recorded = engine.options.get("profiles")
    if recorded is not None and json.dumps(recorded) != json.dumps(shapes):
        return f"profiles {engine.profiles}, but inputs {recorded}"
    return None


def fusion_told(fused: int, count: int, nodes: Iterable[Mapping[str, Any]]) -> str:
    """`10/12 fused`, or `10/12 fused, 2 unknown`.

    Args:
        fused: Attentions that are one fused kernel in every profile.
        count: All attentions.
        nodes: The verdict on each attention in each profile.
    """
    statuses: dict[str, set[str]] = {}
    for node in nodes:
        statuses.setdefault(node["node"], set()).add(node["status"])
    unknown = sum("unknown" in found and "decomposed" not in found for found in statuses.values())
    return f"{fused}/{count} fused" + (f", {unknown} unknown" if unknown else "")


def engine_path(bundle: Path, name: str) -> Path:
    """Where the engine of that name lies in a bundle."""
    if not name or Path(name).name != name or name.startswith("."):
        raise BundleError(
            "This cannot be the name of an engine.", got=name, hint="letters, digits and dashes"
        )
    return bundle / FOLDER / f"{name}.engine"


def manifest_path(engine: Path) -> Path:
    """Where the manifest of an engine lies: beside it."""
    return engine.with_suffix(".json")


def open_engine(path: Path) -> Engine:
    """Read an engine's manifest, and check that the plan is the one it speaks of.

    What the plan does not show of its verdict is unknown in the manifest that is given back.
    """
    beside = manifest_path(path)
    try:
        data = json.loads(beside.read_text(encoding="utf-8"))
        if data.get("format") != FORMAT:
            raise BundleError(
                "The engine has another format.", got=f"format {data.get('format')!r}", hint="rebuild it"
            )
        manifest = EngineManifest(**data)
        _check_shape(manifest)
    except FileNotFoundError as error:
        raise BundleError(
            "There is no engine with a manifest here.", got=path, hint="mha-deploy build-engine BUNDLE"
        ) from error
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise BundleError(
            "The engine's manifest cannot be read.", got=f"{beside}: {error}", hint="rebuild it"
        ) from error
    if not path.is_file():
        raise BundleError("The engine is missing beside its manifest.", got=path, hint="rebuild it")
    plan = path.read_bytes()
    if len(plan) != manifest.engine_bytes or hashlib.sha256(plan).hexdigest() != manifest.engine_sha256:
        raise BundleError(
            "The engine was changed or cut short after it was built.", got=path, hint="rebuild it"
        )
    if not is_plan(plan):
        raise BundleError(
            "The engine is not a plan of TensorRT.",
            got=f"{path}, which begins with {plan[:8]!r}" if plan else f"{path}, which is empty",
            hint="rebuild it",
        )
    verdict = shown_verdict(
        plan,
        manifest.verdict,
        backend=manifest.backend,
        precision=manifest.precision,
        profiles=len(manifest.profiles),
        bundle=_bundle_of(path),
    )
    return Engine(path=path, manifest=replace(manifest, verdict=verdict), is_shown=manifest.backend == RTX)


def _bundle_of(engine: Path) -> Path | None:
    """The bundle that an engine lies in; None where it lies elsewhere."""
    folder = engine.resolve().parent
    return folder.parent if folder.name == FOLDER and (folder.parent / MANIFEST).is_file() else None


def engines_of(bundle: Path) -> list[Engine]:
    """The engines of a bundle, by name."""
    return [open_engine(path) for path in sorted((bundle / FOLDER).glob("*.engine"))]


def _check_shape(manifest: EngineManifest) -> None:
    """Touch what readers will use, so that a foreign manifest fails here and not in their hands."""
    if manifest.backend not in BACKENDS or not isinstance(manifest.options, Mapping):
        raise ValueError(f"backend {manifest.backend!r}")
    float(manifest.seconds), int(manifest.engine_bytes), [dict(each) for each in manifest.profiles]
    for node in manifest.verdict["nodes"]:
        if type(node["profile"]) is not int:
            raise ValueError(f"profile {node['profile']!r}")
        if node["status"] not in ("fused", "decomposed", "unknown"):
            raise ValueError(f"status {node['status']!r}")
        ", ".join([node["node"], node["reason"], node["source"], *node["kernels"]])
    for key in ("status", "reason", "offenders", "notes"):
        len(manifest.verdict["precision"][key])
    len(manifest.verdict["disagreements"])
    for library in manifest.plugins:
        ", ".join([library["library"], library["version"], library["sha256"], library["tensorrt"]])
        ", ".join(f"{each['name']} {each['version']}" for each in library["plugins"])
    ", ".join([*manifest.in_place, *manifest.in_place.values()])
    for tensor in manifest.large_tensors:
        LargeTensor.from_dict(tensor)
    ", ".join(manifest.attention[key] for key in NATIVE_ATTENTION)
    for kernel in manifest.kernels:
        ", ".join([kernel["name"], kernel["type"], *kernel["dtypes"], *kernel["nodes"]])


def write_engine(path: Path, plan: bytes, manifest: EngineManifest) -> Engine:
    """Write plan and manifest; the manifest comes last, so that half an engine is never taken for one."""
    path.parent.mkdir(exist_ok=True)
    beside = manifest_path(path)
    text = json.dumps(vars(manifest), indent=2) + "\n"
    with written(path, plan) as new_plan, written(beside, text.encode()) as new_manifest:
        # Both are on the disk. Between the two renames the old manifest must not vouch for the new plan.
        beside.unlink(missing_ok=True)
        os.replace(new_plan, path)
        os.replace(new_manifest, beside)
    return Engine(path=path, manifest=manifest)
