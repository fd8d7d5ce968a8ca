"""What somebody else made of the model: a graph, a plan or a runner, judged against the cases of a bundle.

Its names and types may be others than the bundle's. Names are mapped by the user, or where only one is left
on either side. Types are converted where nothing is lost: inputs exactly, results to the type of the bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Struct, structs

from mha_deploy.bundle.folder import Bundle, sha256
from mha_deploy.engine.engine import open_plan
from mha_deploy.errors import DeployError
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.file import load_graph
from mha_deploy.graph.weights import search_weights
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import ModelSpec
from mha_deploy.options import ValidateOptions
from mha_deploy.runtime import GPU_RUNNERS, RUNNERS, available_cpu_runtime, open_runner
from mha_deploy.runtime.cuda import find_gpu
from mha_deploy.runtime.runner import Arrays, ProfiledRunner, Runner, TensorInfo, foreign_errors
from mha_deploy.runtime.tensorrt.builder import inspect_runner
from mha_deploy.runtime.tensorrt.engine_verdict import (
    EngineReason,
    EngineVerdict,
    FusionStatus,
    PrecisionStatus,
    engine_verdict,
    written_types,
)
from mha_deploy.runtime.tensorrt.kernels import Kernel, kernels_from_plan
from mha_deploy.runtime.tensorrt.versions import LEAN, MODULES
from mha_deploy.runtime.timing import Timing, TimingPlan
from mha_deploy.status import EvidenceSource, ReasonKind, Word, means
from mha_deploy.validation.runtimes import ONNX, ONNX_RUNTIME, TENSORRT, Runtime

# -- What the report says of it --------------------------------------------------------------------


class SubjectKind(Word):
    """What was given to be judged."""

    GRAPH = "graph"
    ENGINE = "engine"
    RUNNER = "runner"


class Conversion(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor whose type in the subject differs from that in the bundle."""

    tensor: Annotated[str, means("name of the input or output in the bundle")]
    bundle: Annotated[str, means("its type there")]
    subject: Annotated[str, means("its type in what was judged")]


class AttentionDifference(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An attribute in which attentions of a graph differ from those of the same names in the bundle."""

    attribute: Annotated[str, means("`is_causal`, `softmax_scale`, `mask`, …")]
    bundle: Annotated[str, means("its value in the bundle")]
    subject: Annotated[str, means("its value in what was judged")]
    nodes: Annotated[tuple[str, ...], means("the attentions")]


class PlanVerdict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the kernels of a foreign plan show, as far as TensorRT reports them."""

    fusion: Annotated[
        FusionStatus, means("`fused` if every attention of the model is one kernel in every profile")
    ]
    precision: Annotated[PrecisionStatus, means("see `engines[].precision_status`")]
    attentions: Annotated[int, means("attentions of the model")]
    fused_kernels: Annotated[int, means("kernels that compute a whole attention")]
    softmax_kernels: Annotated[int, means("kernels that compute a softmax by itself")]
    reasons: Annotated[
        tuple[EngineReason, ...],
        means("why fusion or precision is unknown, or how it is known; see `engines[].nodes[].reasons[]`"),
    ] = ()
    precision_reasons: Annotated[
        tuple[EngineReason, ...], means("the reasons for the precision; see `engines[].precision_reasons`")
    ] = ()


class SubjectRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was judged in place of the bundle's own graph and engines."""

    name: Annotated[str, means("name of the file or the runner")]
    kind: Annotated[SubjectKind, means("what it is")]
    runtime: Annotated[str, means("what ran it, with its version")]
    sha256: Annotated[str | None, means("hash of the file; null for a runner")]
    names: Annotated[
        dict[str, str], means("its names of inputs and outputs, and those of the bundle, where they differ")
    ]
    converted: Annotated[tuple[Conversion, ...], means("tensors of another type")]
    not_judged: Annotated[tuple[str, ...], means("outputs that the bundle does not have")]
    plan: Annotated[
        PlanVerdict | None, means("what the kernels of an engine show; null for a graph or a runner")
    ]
    attention: Annotated[
        tuple[AttentionDifference, ...], means("attributes of its attentions that differ from the bundle")
    ] = ()
    weights: Annotated[
        int,
        means("for a wrong graph: how many weights and biases of the bundle were searched for in it"),
    ] = 0
    missing_weights: Annotated[
        tuple[str, ...], means("those that it does not have in any layout: at least half of each")
    ] = ()
    changed_weights: Annotated[
        tuple[str, ...], means("its own weights and biases with numbers that the bundle does not have")
    ] = ()


_MEANING = ("is_causal", "softmax_scale", "softcap", "left_window", "right_window", "mask", "Hq", "Hkv")
"""The attributes of an attention that decide what it computes."""

# -- Names and types -------------------------------------------------------------------------------

Names = Mapping[str, str]
"""From the names of a subject to those of the bundle."""

_FLOATS = ("float16", "bfloat16", "float32", "float64")
# What every number of a type can be converted to without a change.
_EXACT = {
    "float16": {"float32", "float64"},
    "bfloat16": {"float32", "float64"},
    "float32": {"float64"},
    "bool": {"int32", "int64", "uint8", "int8", *_FLOATS},
    "int32": {"int64", "float64"},
    "int64": {"int32"},  # where the numbers fit, which is looked at
}


def _pair(kind: str, name: str, ours: Iterable[str], theirs: Iterable[str], names: Names) -> dict[str, str]:
    """For each tensor of the bundle that the subject has, the subject's name for it."""
    known, taken = list(ours), list(theirs)
    found = {to: by for by, to in names.items() if by in taken and to in known}
    found |= {each: each for each in known if each in taken and each not in found and each not in names}
    left = [each for each in known if each not in found]
    free = [each for each in taken if each not in found.values()]
    if len(left) == 1 and len(free) == 1:
        return {**found, left[0]: free[0]}
    if left and (kind == "input" or free):
        others = chain(free, repeat("THEIRS"))
        hint = " ".join(f"--map {other}={each}" for other, each in zip(others, left, strict=False))
        got = f"{', '.join(left)}; its {kind}s are {', '.join(taken) or 'none'}"
        raise DeployError(f"{name} lacks {kind}s of the bundle.", got=got, hint=hint)
    return found


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How a subject takes the place of the model of a bundle."""

    inputs: Mapping[str, str]  # from the bundle's names to the subject's
    outputs: Mapping[str, str]
    types: Mapping[str, np.dtype]  # of the bundle's inputs and outputs
    converted: tuple[Conversion, ...]
    not_judged: tuple[str, ...]

    @property
    def is_plain(self) -> bool:
        """Whether no name and no type has to be changed."""
        renamed = any(a != b for a, b in (*self.inputs.items(), *self.outputs.items()))
        return not (renamed or self.converted or self.not_judged)


def fit(runner: Runner, name: str, spec: ModelSpec, precision: Precision, names: Names) -> Fit:
    """Find how a runner fits the model; refused where an input is missing, or would be rounded."""
    types = {tensor.name: precision.numpy_of(tensor.kind) for tensor in (*spec.inputs, *spec.outputs)}
    ours = [tensor.name for tensor in spec.inputs], [tensor.name for tensor in spec.outputs]
    for by, to in names.items():
        if to not in types or (runner.outputs and by not in {*runner.inputs, *runner.outputs}):
            known = ", ".join(types) if to not in types else ", ".join({**runner.inputs, **runner.outputs})
            raise DeployError("A name in the mapping is unknown.", got=f"{by}={to}", hint=f"one of {known}")
        groups = (runner.inputs, ours[0]), (runner.outputs, ours[1])
        if runner.outputs and not any(by in theirs and to in mine for theirs, mine in groups):
            problem, hint = (
                "The mapping joins an input and an output.",
                "inputs to inputs, outputs to outputs",
            )
            raise DeployError(problem, got=f"{by}={to}", hint=hint)
    inputs = _pair("input", name, ours[0], runner.inputs, names)
    if more := [each for each in runner.inputs if each not in inputs.values()]:
        what, hint = f"{name} has inputs that the bundle has no numbers for.", f"give it {', '.join(ours[0])}"
        raise DeployError(what, got=", ".join(more), hint=hint)
    # Some runners describe their outputs only once they ran.
    outputs = _pair("output", name, ours[1], runner.outputs, names) if runner.outputs else {}
    converted = list[Conversion]()
    for own, by, infos in (
        *((own, by, runner.inputs) for own, by in inputs.items()),
        *((own, by, runner.outputs) for own, by in outputs.items()),
    ):
        wanted, got = str(types[own]), str(infos[by].dtype)
        if wanted == got:
            continue
        if infos is runner.inputs and got not in _EXACT.get(wanted, ()):
            what = f"Input {by} of {name} has another type, which cannot hold the bundle's numbers."
            hint = f"export the bundle in that precision, or give {name} inputs of {wanted}"
            raise DeployError(what, got=f"{got}, and the bundle has {wanted}", hint=hint)
        converted.append(Conversion(tensor=own, bundle=wanted, subject=got))
    extra = tuple(each for each in runner.outputs if each not in outputs.values())
    return Fit(inputs=inputs, outputs=outputs, types=types, converted=tuple(converted), not_judged=extra)


def _cast(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """An array in another type; integers that do not fit are refused."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow is infinite, which the judge reports
        cast = array.astype(dtype)
    if array.dtype.kind in "iu" and not np.array_equal(cast.astype(array.dtype), array):
        got = f"{array.min()} to {array.max()}"
        raise DeployError(f"The numbers of {name} do not fit {dtype}.", got=got, hint="smaller numbers")
    return cast


class FittedRunner(Runner):
    """A runner under the names and in the types of a bundle."""

    def __init__(self, runner: Runner, name: str, how: Fit, names: Names, *, keep_open: bool = False) -> None:
        self.runner, self.how, self.device, self._names = runner, how, runner.device, names
        self.name, self.title = runner.name, runner.title
        self._title, self._keep_open = name, keep_open
        self.untimed, self.timed_by = runner.untimed, runner.timed_by
        self.inputs = {own: self._info(runner.inputs[by], own) for own, by in how.inputs.items()}
        self.outputs = {own: self._info(runner.outputs[by], own) for own, by in how.outputs.items()}

    def _info(self, info: TensorInfo, own: str) -> TensorInfo:
        return replace(info, dtype=self.how.types[own])

    def _theirs(self, feeds: Arrays) -> dict[str, np.ndarray]:
        how = self.how
        return {by: _cast(by, feeds[own], self.runner.inputs[by].dtype) for own, by in how.inputs.items()}

    def _ours(self, results: Mapping[str, Any]) -> dict[str, np.ndarray]:
        how = self.how
        if strange := [key for key, value in results.items() if not isinstance(value, np.ndarray)]:
            got = ", ".join(f"{key}: {type(results[key]).__name__}" for key in strange)
            raise DeployError(f"{self._title} returned no arrays.", got=got, hint="NumPy arrays by name")
        ours = [name for name in how.types if name not in how.inputs]
        outputs = how.outputs or _pair("output", self._title, ours, results, self._names)
        return {own: self._in_our_type(own, results[by]) for own, by in outputs.items() if by in results}

    def _in_our_type(self, own: str, array: np.ndarray) -> np.ndarray:
        wanted = self.how.types[own]
        both_float = str(array.dtype) in _FLOATS and str(wanted) in _FLOATS
        both_whole = array.dtype.kind in "iu" and wanted.kind in "iu"
        return _cast(own, array, wanted) if both_float or both_whole else array

    def run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """Run it on inputs of the bundle."""
        with foreign_errors(f"{self._title} failed on these inputs."):
            return self._ours(self.runner.run(self._theirs(feeds)))

    _run = run

    def time(self, feeds: Arrays, plan: TimingPlan | None = None) -> Timing:
        """See `Runner`."""
        with foreign_errors(f"{self._title} could not be timed."):
            timed = self.runner.time(self._theirs(feeds), plan)
            return replace(timed, results=tuple(map(self._ours, timed.results)))

    def apply(self, function: Callable[..., Any], *arguments: Any, step: str = "") -> Any:
        """See `Runner`."""
        return self.runner.apply(function, *arguments, step=step)

    def close(self) -> None:
        """Close it, unless it was given open."""
        if not self._keep_open:
            self.runner.close()


class FittedProfiledRunner(FittedRunner):
    """The same of an engine with optimization profiles."""

    runner: Any

    def profiles_for(self, feeds: Arrays) -> list[int]:
        """The profiles that admit these inputs."""
        return list(self.runner.profiles_for(self._theirs(feeds)))

    def run_in_profile(self, feeds: Arrays, profile: int) -> dict[str, np.ndarray]:
        """Run under one of them."""
        return self._ours(self.runner.run_in_profile(self._theirs(feeds), profile))


class FixedSizesRunner(FittedRunner):
    """The same of a graph some of whose sizes are fixed: that is its only profile."""

    def profiles_for(self, feeds: Arrays) -> list[int]:
        """The only one, where its sizes are those."""
        dims = ((feeds[own].shape, self.inputs[own].dims) for own in self.inputs)
        fits = all(
            len(shape) == len(wanted)
            and all(size == dim for size, dim in zip(shape, wanted, strict=True) if isinstance(dim, int))
            for shape, wanted in dims
        )
        return [0] if fits else []

    def run_in_profile(self, feeds: Arrays, profile: int) -> dict[str, np.ndarray]:
        """Run under it."""
        return self.run(feeds)


# -- Subjects --------------------------------------------------------------------------------------


class Subject:
    """Something to be judged in place of the bundle's own; what it is is known once it was opened."""

    def __init__(
        self,
        bundle: Bundle,
        kind: SubjectKind,
        name: str,
        open_: Callable[[], Runner],
        names: Names,
        *,
        file: Path | None = None,
        runtime: str = "",
        keep_open: bool = False,
        accumulate: str | None = None,
    ) -> None:
        self.bundle, self.kind, self.name, self.names = bundle, kind, name, names
        self._open, self._file, self._keep_open = open_, file, keep_open
        family = {SubjectKind.ENGINE: TENSORRT, SubjectKind.GRAPH: ONNX_RUNTIME}.get(kind, ONNX)
        self.runtime = Runtime(
            name=name, family=ONNX if runtime == "onnx-reference" else family, open=self.open,
            graph_runtime=runtime, is_subject=True, accumulate=accumulate,
            digest=sha256(file) if file is not None and file.is_file() else "",
        )  # fmt: skip
        self.record: SubjectRecord | None = None

    def open(self) -> Runner:
        """Load it, under the names and in the types of the bundle."""
        manifest = self.bundle.manifest
        with ExitStack() as owned:
            runner = self._open()
            if not self._keep_open:
                owned.callback(runner.close)
            how = fit(runner, self.name, manifest.spec, manifest.precision, self.names)
            plan = self._plan_verdict(runner) if self.kind is SubjectKind.ENGINE else None
            owned.pop_all()
        mapped = {by: own for own, by in (*how.inputs.items(), *how.outputs.items()) if by != own}
        self.record = SubjectRecord(
            name=self.name, kind=self.kind, runtime=runner.name,
            sha256=None if self._file is None else sha256(self._file),
            names=mapped, converted=how.converted, not_judged=how.not_judged, plan=plan,
            attention=self._attention_differences(),
        )  # fmt: skip
        # A graph may have fixed sizes where the model has ranges: it is judged where it can be.
        is_fixed = any(
            isinstance(dim, int) and isinstance(own, str)
            for tensor in manifest.spec.inputs
            for dim, own in zip(runner.inputs[how.inputs[tensor.name]].dims, tensor.dims, strict=False)
        )
        if how.is_plain and not self._keep_open and (isinstance(runner, ProfiledRunner) or not is_fixed):
            return runner
        kind = FittedProfiledRunner if isinstance(runner, ProfiledRunner) else FittedRunner
        if kind is FittedRunner and is_fixed:
            kind = FixedSizesRunner
        return kind(runner, self.name, how, self.names, keep_open=self._keep_open)

    def _attention_differences(self) -> tuple[AttentionDifference, ...]:
        """What changes the meaning of an attention, for those of a graph that kept their names."""
        if self.kind is not SubjectKind.GRAPH or self._file is None:
            return ()
        own = {each["name"]: each for each in self.bundle.manifest.attention}
        found = dict[tuple[str, str, str], list[str]]()
        for node in attention_nodes(load_graph(self._file)):
            theirs, ours = node.describe(), own.get(node.name, {})
            for name in _MEANING:
                if name in ours and theirs[name] != ours[name]:
                    found.setdefault((name, str(ours[name]), str(theirs[name])), []).append(node.name)
        return tuple(
            AttentionDifference(attribute=name, bundle=ours, subject=theirs, nodes=tuple(nodes))
            for (name, ours, theirs), nodes in found.items()
        )

    def compare_weights(self) -> None:
        """Add to its record which weights of the bundle a graph does not have, and which it changed."""
        if self.kind is SubjectKind.GRAPH and self._file is not None and self.record is not None:
            found = search_weights(load_graph(self.bundle.model_path), load_graph(self._file))
            about = {"missing_weights": found.missing, "changed_weights": found.changed}
            self.record = structs.replace(self.record, weights=found.searched, **about)

    def _plan_verdict(self, runner: Runner) -> PlanVerdict:
        """What its kernels show, by TensorRT's inspector and by the plan itself."""
        plan = self._file.read_bytes() if self._file is not None else b""
        in_plan = kernels_from_plan(plan)
        inspected, profiles = runner.apply(inspect_runner, step="inspecting the engine")
        sources = {EvidenceSource.PLAN: in_plan, EvidenceSource.INSPECTOR: inspected}
        return plan_verdict(sources, self.bundle, profiles=profiles)


def plan_verdict(
    sources: Mapping[EvidenceSource, Sequence[Kernel]], bundle: Bundle, *, profiles: int = 1
) -> PlanVerdict:
    """Fusion and precision of a plan that was built from another graph of the same model.

    Its kernels name the nodes of that graph. Where they name none of the bundle's, they are counted.
    """
    manifest, graph = bundle.manifest, load_graph(bundle.model_path)
    names = [node.name for node in attention_nodes(graph)]
    known = {name for kernels in sources.values() for kernel in kernels for name in kernel.onnx_nodes}
    if not any(name == each or name.startswith(f"{each}/") for name in known for each in names):
        sources = {
            source: [replace(kernel, onnx_nodes=()) for kernel in kernels]
            for source, kernels in sources.items()
        }
    found = engine_verdict(
        sources, names, manifest.precision.name, profiles=profiles, written=written_types(graph)
    )
    best_first = (EvidenceSource.INSPECTOR, EvidenceSource.PLAN)
    best = next(filter(None, map(sources.get, best_first)), ())
    return PlanVerdict(
        fusion=_fusion(found, manifest.spec.attention_count),
        precision=found.precision.status,
        attentions=manifest.spec.attention_count,
        fused_kernels=sum(kernel.is_fused_attention for kernel in best),
        softmax_kernels=sum(kernel.is_softmax for kernel in best),
        reasons=tuple(
            dict.fromkeys((*(r for node in found.nodes for r in node.reasons), *found.precision.reasons))
        )
        or (EngineReason(kind=ReasonKind.COUNTED),),
        precision_reasons=found.precision.reasons,
    )


def _fusion(verdict: EngineVerdict, attentions: int) -> FusionStatus:
    if verdict.all_fused and verdict.fused_count[0] == attentions:
        return FusionStatus.FUSED
    is_decomposed = any(node.status == FusionStatus.DECOMPOSED for node in verdict.nodes)
    return FusionStatus.DECOMPOSED if is_decomposed else FusionStatus.UNKNOWN


def subjects_of(bundle: Bundle, options: ValidateOptions, runners: Sequence[Runner] = ()) -> list[Subject]:
    """What was given to be judged: graphs, engine files and runners, each under a name of its own."""
    wrong = [name for name in options.runtimes if name not in (*RUNNERS, *MODULES, *LEAN)]
    if wrong and (options.graphs or options.engine_files or runners):
        what = "A graph or an engine file is run by a runtime, not by an engine or a baseline."
        raise DeployError(what, got=", ".join(wrong), hint=f"one of {', '.join((*RUNNERS, *MODULES, *LEAN))}")
    graphs = [name for name in options.runtimes if name in RUNNERS]
    engines = next((name for name in options.runtimes if name in MODULES or name in LEAN), None)
    found, taken = list[Subject](), list[str]()

    def named(name: str) -> str:
        taken.append(name)
        return name if taken.count(name) == 1 else f"{name} ({taken.count(name)})"

    names = options.names if isinstance(options.names, Mapping) else {}
    for path in options.graphs:
        load_graph(path)  # what is wrong with it is reported before a runtime has to
        for runtime in graphs or [_graph_runtime(bundle)]:
            title = named(path.name if len(graphs) < 2 else f"{path.name} in {runtime}")
            open_ = partial(open_runner, runtime, path)
            found.append(Subject(bundle, SubjectKind.GRAPH, title, open_, names, file=path, runtime=runtime))
    for path in options.engine_files:
        open_ = partial(open_plan, path, engines)
        found.append(Subject(bundle, SubjectKind.ENGINE, named(path.name), open_, names, file=path))
    for runner in runners:
        kept = partial(_given, runner)
        found.append(
            Subject(
                bundle,
                SubjectKind.RUNNER,
                named(runner.name),
                kept,
                names,
                keep_open=True,
                accumulate=runner.accumulate,
            )
        )
    return found


def _given(runner: Runner) -> Runner:
    return runner


def _graph_runtime(bundle: Bundle) -> str:
    cpu = available_cpu_runtime(bundle.manifest.precision)
    return cpu if find_gpu() is None or cpu == "onnx-reference" else GPU_RUNNERS[0]
