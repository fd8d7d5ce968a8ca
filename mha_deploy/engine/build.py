"""From a bundle to an engine: check, lower, build, judge, write; choose among candidates; compare builds."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import onnx_ir as ir

from mha_deploy.bundle.cases import GoldenCase, golden_cases
from mha_deploy.bundle.folder import MANIFEST, Bundle, sha256
from mha_deploy.bundle.sizes import TIMED_CASES
from mha_deploy.engine import engine as engines
from mha_deploy.engine import lowered as lowering
from mha_deploy.engine.engine import Engine, build_command, first_gpu, open_engine_runner, reasons_not_to_run
from mha_deploy.engine.lowered import FP16, FP32, NATIVE, PLUGIN, Candidate
from mha_deploy.engine.plugins import find_plugins, fp8_attentions, load_needed
from mha_deploy.errors import BackendUnavailable, BundleError, DeployError
from mha_deploy.graph import plugin_node
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.file import load_graph, save_graph
from mha_deploy.graph.lower.cache import IN_PLACE_NOTE, noted_caches
from mha_deploy.graph.quantize import quantized_gemms
from mha_deploy.judge import judge_case
from mha_deploy.model.precision import Precision
from mha_deploy.options import EngineOptions, OnStep, Step
from mha_deploy.output import (
    check_folder,
    make_folder,
    read_timings,
    scratch_folder,
    temporary_folder,
    write_timings,
)
from mha_deploy.runtime.child import RuntimeCrash, call_isolated, isolation, open_isolated, send_to_parent
from mha_deploy.runtime.cuda import open_gpu
from mha_deploy.runtime.runner import Runner
from mha_deploy.runtime.tensorrt import kernels as layers
from mha_deploy.runtime.tensorrt.builder import (
    REFITTABLE,
    BuildRequest,
    BuiltEngine,
    build_engine,
    refit_engine,
)
from mha_deploy.runtime.tensorrt.engine_runner import Profile, TensorRTRunner
from mha_deploy.runtime.tensorrt.engine_verdict import (
    EngineVerdict,
    engine_verdict,
    group_by_attention,
    written_types,
)
from mha_deploy.runtime.tensorrt.versions import EngineError, TensorRT, load
from mha_deploy.status import EvidenceSource

T = TypeVar("T")
Plugins = Sequence[Mapping[str, Any]]  # the libraries that an engine needs, as its manifest records them

_LARGEST_WORKSPACE_MIB = 1 << 20  # 1 TiB


BUILDING = "lower, parse and build"
"""The step of a build, whose details are the phases of TensorRT's builder."""


def engine_from_bundle(
    bundle: Bundle,
    options: EngineOptions | None = None,
    on_progress: OnStep | None = None,
    *,
    path: Path | None = None,
) -> Engine:
    """Build an engine and judge it; it is written only when it is complete, by default into its bundle."""
    options, model = options or EngineOptions(), load_graph(bundle.model_path)
    lowering.refuse_foreign_operators(model)  # before a library of theirs is loaded
    rt = load(options.backend or engines.default_backend())
    mib = options.workspace_mib
    if mib is not None and not 0 < mib <= _LARGEST_WORKSPACE_MIB:
        hint = f"--workspace-mib from 1 to {_LARGEST_WORKSPACE_MIB}, or leave it out"
        raise EngineError("No GPU has a workspace of that size.", got=f"{mib} MiB", hint=hint)
    path = path or _free_path(bundle, rt, options)
    candidates = lowering.candidates_for(rt, options, bundle.manifest.precision.name)
    if any(candidate.attention == PLUGIN for candidate in candidates):
        find_plugins(rt)  # report a missing library before a long build
    requested = options.attention
    if len(candidates) > 1:

        def build(path: Path, options: EngineOptions) -> Engine:
            return _EngineBuild(bundle, model, rt, options, on_progress).write(path, requested=requested)

        return build_fastest_engine(bundle, options, path, candidates, build)
    chosen = candidates[0].applied_to(options)
    return _EngineBuild(bundle, model, rt, chosen, on_progress).write(path, requested=requested)


def lowered_graph(bundle: Bundle, engine: Engine) -> ir.Model:
    """The graph that an engine of a bundle was built from, as TensorRT got it."""
    rt, model = load(engine.manifest.backend), load_graph(bundle.model_path)
    return lowering.lower_for(rt, model, _lowered_with(engine), engine.manifest.ranges)[0]


def _lowered_with(engine: Engine) -> EngineOptions:
    """The options of an engine that decide how its graph was lowered."""
    manifest, given = engine.manifest, engine.manifest.options
    options = EngineOptions(
        backend=manifest.backend,
        targets=",".join(given.get("targets") or ()),
        allow_decomposed=bool(given.get("allow_decomposed")),
        gqa=given.get("gqa"),
    )
    return Candidate.of(manifest.attention).applied_to(options)


def _free_path(bundle: Bundle, rt: TensorRT, options: EngineOptions) -> Path:
    """Where the engine goes in its bundle; refused where there is one that may not be overwritten."""
    path = engines.engine_path(bundle.path, options.name or rt.backend)
    if path.exists() and not options.overwrite:
        raise BundleError("The engine already exists.", got=path, hint="another --name, or --overwrite")
    check_folder(path.parent, within=bundle.path)  # before a long build
    engines.refuse_foreign(path)
    return path


class _EngineBuild:
    """The build of the one engine that some options request."""

    def __init__(
        self,
        bundle: Bundle,
        model: ir.Model,
        rt: TensorRT,
        options: EngineOptions,
        on_progress: OnStep | None,
    ) -> None:
        self.bundle, self.model, self.rt = bundle, model, rt
        self.options, self.on_progress = options, on_progress
        self.spec, self.precision = bundle.manifest.spec, bundle.manifest.precision.name
        self.plugins: list[Any] = [find_plugins(rt).record()] if options.attention == PLUGIN else []
        default = engines.default_profiles(self.spec, one=not rt.can.shared_profiles)
        self.ranges = list(options.profiles) or default
        self.timings = bundle.path / engines.FOLDER / f"timing-{rt.backend}-{rt.version}.cache"

    def write(self, path: Path, *, requested: str) -> Engine:
        """Lower, build and judge the engine, and write it with its manifest; `requested` is the attention."""
        rt, options, profiles = self.rt, self.options, len(self.ranges)
        with lowering.not_fused(options):
            lowered, answers = lowering.lower_for(rt, self.model, options, self.ranges)
        answers = lowering.explained(answers, self.bundle.manifest, options)
        # As a file: weights that do not fit in memory twice are read from disk.
        with temporary_folder(self.bundle.path.resolve() / "lowered") as folder:
            save_graph(lowered, folder / "model.onnx")
            request = self._request(folder / "model.onnx", lowered)
            with lowering.unfused_for(answers):
                built, first = self._build_running(request)
        built = with_plugin_roles(built, lowered, first.attends_in_fp8)
        verdict = judge_engine(built, lowered, self.model, self.precision, profiles)
        findings = dict.fromkeys(finding for answer in answers for finding in answer.findings)
        names = engines.profile_names(self.spec, self.ranges)
        in_place = noted_caches(lowered, IN_PLACE_NOTE) if self.plugins else {}
        manifest = engines.EngineManifest(
            backend=rt.backend,
            version=rt.version,
            gpu=None if rt.can.builds_without_gpu and "CURRENT" not in request.target_names else first_gpu(),
            targets=list(request.target_names),
            model=self.spec.name,
            precision=self.precision,
            dialect=lowering.dialect_for(rt, options),
            profiles=[{name: str(axis) for name, axis in each.items()} for each in self.ranges],
            profile_names=names,
            bundle_sha256=sha256(self.bundle.path / MANIFEST),
            engine_sha256=hashlib.sha256(built.plan).hexdigest(),
            engine_bytes=len(built.plan),
            seconds=round(built.seconds, 3),
            strongly_typed=built.strongly_typed,
            verdict=engines.with_unrecognized(verdict, self.bundle.manifest, profiles=profiles),
            kernels=_kernel_records(built),
            options=request.record(),
            findings=[asdict(finding) for finding in findings],
            notes=self._notes(built, first, in_place),
            attention={"requested": requested, "chosen": options.attention, "accumulate": options.accumulate},
            plugins=self.plugins,
            in_place=in_place,
            large_tensors=list(built.large_tensors),
        )
        engine = engines.write_engine(path, built.plan, manifest, overwrite=options.overwrite)
        if built.timing_cache:
            with contextlib.suppress(
                OSError, DeployError
            ):  # the engine is there: the next build is only slower
                write_timings(self.timings, built.timing_cache, within=self.bundle.path)
        return engine

    def _request(self, onnx_path: Path, lowered: ir.Model) -> BuildRequest:
        """What is requested of the builder, with the kernel timings of earlier builds."""
        can, checks = self.rt.can, self.bundle.manifest.checks
        is_cached = can.timing_cache and self.options.timing_cache
        # With `--precision auto` most graphs are FP16 throughout, and need no constraints.
        is_mixed = self.spec.mixed and bool(checks.get("mixed precision", {}).get("kept"))
        return BuildRequest(
            onnx=onnx_path,
            precision=self.precision,
            profiles=[engines.profile_shapes(self.spec, each) for each in self.ranges],
            options=self.options,
            timing_cache=read_timings(self.timings) if is_cached else None,
            # A TensorRT that chooses types by itself would narrow what the export kept in a wider type.
            precision_constraints=is_mixed and not can.strongly_typed_flag,
            has_int8="int8" in dict(quantized_gemms(lowered)).values() and not can.strongly_typed_flag,
        )

    def _build_running(self, request: BuildRequest) -> tuple[BuiltEngine, FirstRun]:
        """Build until the engine runs, where that can be tried: one that cannot is not done."""
        rt, names, last, report = self.rt, engines.profile_names(self.spec, self.ranges), "", self.on_progress
        # The builder's own phases nest, and each has its own count: they are details of one step.
        on_progress = None if report is None else lambda name, *count: report(Step(BUILDING, name), *count)
        on_message = None if on_progress is None else lambda progress: on_progress(*progress)
        places: dict[str, Any] = {"title": rt.title, "step": "building the engine", "on_message": on_message}
        for count in range(1, _MOST_BUILDS + 1):
            if isolation.enabled:  # in a child process: parsers and builders can crash
                built = call_isolated(rt.backend, _build, rt, request, self.plugins, _report, **places)
            else:
                built = _build(rt, request, self.plugins, on_progress)
            large = built.large_tensors
            loaded: dict[str, Any] = {"host_code": self.options.version_compatible, "large_tensors": large}
            first = run_first(self.rt, built.plan, names, **loaded)
            if not first.is_useless:
                again = (f"it was built {count} times: before, {last}",) if count > 1 else ()
                return replace(built, notes=(*built.notes, *again)), first
            last = next(iter(first.failed.values()))
            # The timings of kernels that do not run are of no use to the next build.
            request = replace(request, timing_cache=None)
        problem = f"{self.rt.title} built the engine {_MOST_BUILDS} times, and it cannot be run."
        raise EngineError(problem, got=last, hint=_BUILD_AGAIN)

    def _notes(self, built: BuiltEngine, first: FirstRun, in_place: Mapping[str, str]) -> list[str]:
        """What a reader of the manifest should know: limits of the engine, warnings, caches in place."""
        return [
            *first.notes,
            *built.notes,
            *(each.advice for each in built.large_tensors),
            *built.warnings,
            *(f"caches in place: bind {out} to the memory of {at}" for out, at in in_place.items()),
        ]


def _kernel_records(built: BuiltEngine) -> list[engines.KernelRecord]:
    """The kernels of an engine as the source with the best information reports them."""
    best_first = (EvidenceSource.INSPECTOR, EvidenceSource.PLAN, EvidenceSource.LOG)
    kernels = next(filter(None, map(built.kernels.get, best_first)), ())
    return [
        {
            "name": kernel.name,
            "type": kernel.layer_type,
            "tactic": kernel.tactic,
            "nodes": list(kernel.onnx_nodes),
            "dtypes": sorted({tensor.dtype for tensor in kernel.tensors}),
            "profile": kernel.profile,
            "fused_attention": kernel.is_fused_attention,
        }
        for kernel in kernels
    ]


def _build(
    rt: TensorRT, request: BuildRequest, plugins: Plugins, on_progress: OnStep | None = None
) -> BuiltEngine:
    load_needed(rt, plugins)
    return build_engine(rt, request, on_progress)


def _report(*progress: Any) -> None:
    """The progress of a build in a child process."""
    send_to_parent(progress)


def judge_engine(
    built: BuiltEngine,
    lowered: ir.Model,
    canonical: ir.Model,
    precision: str,
    profiles: int,
) -> EngineVerdict:
    """Was every attention fused, and is the engine in the requested precision?"""
    names = [node.name or "" for node in lowered.graph.all_nodes()]
    attention = group_by_attention(names, [node.name for node in attention_nodes(canonical)])
    return engine_verdict(
        built.kernels, attention, precision, profiles=profiles, written=written_types(lowered)
    )


_PLUGIN_ROLES = {
    plugin_node.OP_TYPE: layers.ATTENTION,
    plugin_node.LINEAR: layers.MATMUL,
    plugin_node.NORM_ACTIVATION: layers.ELEMENTWISE,
}


def with_plugin_roles(built: BuiltEngine, lowered: ir.Model, attends_in_fp8: bool = False) -> BuiltEngine:
    """An engine whose plugin layers have types and a purpose, of which TensorRT reports only their names.

    A node of the plugin rounds its queries, keys and values to FP8 itself. Whether its kernel then reads FP8
    is known once it ran: `attends_in_fp8`.
    """
    nodes = {
        node.name or "": node
        for node in lowered.graph.all_nodes()
        if node.domain == plugin_node.DOMAIN and node.op_type in _PLUGIN_ROLES
    }

    def marked(kernel: layers.Kernel) -> layers.Kernel:
        node = next((nodes[name] for name in kernel.onnx_nodes if name in nodes), None)
        if not kernel.is_plugin or node is None:
            return kernel
        values, words = [each for each in (*node.inputs, *node.outputs) if each], plugin_node.fp8_values(node)
        rounded = plugin_node.operands_in_fp8(node) if attends_in_fp8 else set()
        types = {value.name or "": layers.dtype_of(value.dtype.name) for value in values if value.dtype}
        types |= {value.name or "": "fp8" for value in words}
        usual = next((dtype for dtype in types.values() if dtype in layers.FLOATING), layers.UNKNOWN)

        def typed(tensor: layers.EngineTensor, value: ir.Value | None) -> layers.EngineTensor:
            # 8.6 does not report the types of dynamic sizes, and the library takes no others.
            name = tensor.name if value is None or value.name is None else value.name
            if value in rounded or (tensor.dtype == "int32" and (value in words or (words and not value))):
                return replace(tensor, dtype="fp8")
            known = tensor.dtype != layers.UNKNOWN
            return tensor if known else replace(tensor, dtype=types.get(name, usual))

        # Constants have names of TensorRT's own, at the same places.
        places = ((kernel.inputs, node.inputs), (kernel.outputs, node.outputs))
        inputs, outputs = (
            tuple(map(typed, tensors, values if len(values) == len(tensors) else [None] * len(tensors)))
            for tensors, values in places
        )
        role, multiplies = _PLUGIN_ROLES[node.op_type], "fp8" if rounded else layers.UNKNOWN
        return replace(kernel, plugin_role=role, inputs=inputs, outputs=outputs, multiplies_in=multiplies)

    return replace(built, kernels={source: tuple(map(marked, ks)) for source, ks in built.kernels.items()})


# -- Can a new engine be run? A build is done when an execution context exists and ran once --------

# Observed with TensorRT 8.6: an engine that was built on a busy GPU has no execution context in any process.
# The same graph, built once more, has one.
_MOST_BUILDS = 3
_BUILD_AGAIN = "build it again while nothing else uses the GPU"


@dataclass(frozen=True, kw_only=True)
class FirstRun:
    """What became of the first call of each profile of a new engine: nothing where it could not be tried."""

    ran: tuple[str, ...] = ()  # the profiles, by name
    failed: Mapping[str, str] = field(default_factory=dict)  # why the others did not
    skipped: Mapping[str, str] = field(default_factory=dict)  # not tried at a size that TensorRT cannot hold
    attends_in_fp8: bool = False  # whether the plugin's kernels of all attentions in FP8 did

    @property
    def is_useless(self) -> bool:
        """Whether the engine can run nothing that was tried."""
        return bool(self.failed) and not self.ran

    @property
    def notes(self) -> list[str]:
        """A line for each profile that cannot be run."""
        found = {**self.failed, **self.skipped}
        return [f"engine built, but profile {name} cannot be prepared: {why}" for name, why in found.items()]


def run_first(rt: TensorRT, plan: bytes, names: Sequence[str], **options: Any) -> FirstRun:
    """Run each profile of a new engine once, at its usual sizes, in a child process.

    Nothing is tried for engines for other GPUs, or without cuda-bindings. The `options` are those of the
    runner.
    """
    if rt.can.builds_without_gpu:
        return FirstRun()
    step = "running the new engine"
    try:
        return call_isolated(rt.backend, _run_profiles, rt, plan, names, options, title=rt.title, step=step)
    except RuntimeCrash as crash:
        return FirstRun(failed=dict.fromkeys(names, crash.in_one_line))


def _run_profiles(rt: TensorRT, plan: bytes, names: Sequence[str], options: Mapping[str, Any]) -> FirstRun:
    try:
        # A runner keeps the contexts of two calls, so a context must be possible beside another one.
        runner = TensorRTRunner(rt, plan, cuda_graph=False, **options)
    except BackendUnavailable:
        return FirstRun()
    except DeployError as error:
        return FirstRun(failed=dict.fromkeys(names, error.in_one_line))
    ran, failed, skipped = list[str](), dict[str, str](), dict[str, str]()
    before = fp8_attentions(rt)
    with runner:
        for name, (index, profile) in zip(names, enumerate(runner.profiles), strict=False):
            usual = {tensor: shapes[1] for tensor, shapes in profile.items()}
            try:
                layers.refuse_large(runner.large_tensors, usual)
            except DeployError as error:
                skipped[name] = f"{error.got or error.what} try: {error.hint}"
                continue
            feeds = {tensor: np.zeros(shape, runner.inputs[tensor].dtype) for tensor, shape in usual.items()}
            try:
                runner.run_in_profile(feeds, index)
                ran.append(name)
            except DeployError as error:
                failed[name] = f"{error.got or error.what} try: {error.hint or _BUILD_AGAIN}"
    narrow, others = (now - then for now, then in zip(fp8_attentions(rt), before, strict=True))
    in_fp8 = narrow > 0 and not others
    return FirstRun(ran=tuple(ran), failed=failed, skipped=skipped, attends_in_fp8=in_fp8)


# -- The trial loop: options → engine → judged → chosen ---------------------------------------------

_ROUNDS = 2

FP32_SLOWDOWN = 1.05
"""How much more time FP32 accumulation may take before TensorRT's own matmuls are used instead."""


@dataclass(kw_only=True)
class Trial:
    """One thing that is tried: the options of an engine, the engine where it can be built, what it gave."""

    name: str
    options: EngineOptions
    engine: Engine | None = None
    refused: str = ""  # why it is not kept
    times: dict[str, float] = field(default_factory=dict)  # µs of each case that was timed
    judged: Any = None  # what the judge made of it besides

    @property
    def built(self) -> Engine:
        """Its engine, of a trial that is judged or kept."""
        if self.engine is None:
            raise EngineError(
                "There is no engine.", got=f"{self.name}: {self.refused}", hint="build it again"
            )
        return self.engine

    @property
    def is_right(self) -> bool:
        """Whether it was built, and its outputs were right in every case."""
        return not self.refused and bool(self.times)

    @property
    def microseconds(self) -> float:
        """The geometric mean over the cases: each has the same weight, however long it is."""
        return math.exp(sum(math.log(time) for time in self.times.values()) / len(self.times))

    def attempt(self, work: Callable[..., T], *arguments: Any, raises: Any = BackendUnavailable) -> T | None:
        """Do a part of the work; what fails for this trial alone is the reason to refuse it.

        What is of the kind `raises` is not specific to it, and to be fixed by the user.
        """
        try:
            return work(*arguments)
        except DeployError as error:
            if isinstance(error, raises):
                raise
            self.refused = error.in_one_line
            return None


Judge = Callable[[Sequence[Trial]], None]
"""Runs the engines of trials, and writes down what each gave."""


def run_trials(
    trials: Sequence[Trial],
    build: Callable[[Trial], Engine],
    judge: Judge,
    *,
    raises: Any = BackendUnavailable,
) -> None:
    """Build the engine of every trial, and judge those that could be built."""
    for trial in trials:
        trial.engine = trial.attempt(build, trial, raises=raises)
    if built := [trial for trial in trials if trial.engine is not None]:
        judge(built)


# -- Several candidates: the faster right one is kept -----------------------------------------------


def build_fastest_engine(
    bundle: Bundle,
    options: EngineOptions,
    path: Path,
    candidates: Sequence[Candidate],
    build: Callable[[Path, EngineOptions], Engine],
) -> Engine:
    """Build every candidate in a temporary folder, time them, and keep one at the path.

    A candidate that cannot be built or whose outputs are wrong is refused, and the manifest records why.
    """
    try:
        open_gpu()
    except BackendUnavailable as error:
        problem = "The faster candidate has to be measured, and there is no GPU to measure on."
        got = f"--attention {options.attention} --accumulate {options.accumulate}: {error.in_one_line}"
        hint = "name one candidate: --attention plugin --accumulate fp32, or --attention native"
        about = ("attention", "accumulate")
        raise BackendUnavailable(problem, got=got, hint=hint, options=about) from error
    make_folder(path.parent, within=bundle.path)
    with temporary_folder(path.parent / "trying") as folder:
        trials = [Trial(name=each.name, options=each.applied_to(options)) for each in candidates]

        def build_one(trial: Trial) -> Engine:
            return build(folder / "engines" / f"{trial.name}.engine", trial.options)

        run_trials(trials, build_one, lambda built: _race(built, bundle))
        best = choose_trial(trials)
        record = attention_record(trials, best, options)
        manifest, plan = best.built.manifest, best.built.path.read_bytes()
        manifest = msgspec.structs.replace(manifest, attention=record)
        return engines.write_engine(path, plan, manifest, overwrite=options.overwrite)


def _race(trials: Sequence[Trial], bundle: Bundle) -> None:
    """Time engines on the usual cases, and refuse those that are wrong.

    They are loaded together and timed alternately, twice, so that a change of the clocks affects all of them;
    the better of both times counts.
    """
    with ExitStack() as owned:
        running: list[tuple[Trial, Runner]] = []
        for trial in trials:
            runner = trial.attempt(open_engine_runner, trial.engine)
            if runner is not None:
                owned.callback(runner.close)
                running.append((trial, runner))
        for case in timed_cases(golden_cases(bundle), [each for _, each in running]) if running else ():
            for trial, runner in running * _ROUNDS:
                if not trial.refused:
                    _time(trial, runner, case, bundle.manifest.precision)


def _judged_as(engine: Engine, precision: Precision) -> Precision:
    return replace(precision, accumulate=engine.accumulation(precision).type)


def _time(trial: Trial, runner: Runner, case: GoldenCase, precision: Precision) -> None:
    """Time a trial on one case, judged with the type that its GEMMs accumulate in."""
    precision = _judged_as(trial.built, precision)
    try:
        once, timing = runner.run(case.inputs), runner.time(case.inputs)
    except DeployError as error:
        trial.refused = f"{case.name}: {error.in_one_line}"
        return
    for result in (once, *timing.results):
        for verdict in judge_case(case, result, precision):
            if verdict.is_wrong:
                trial.refused = f"wrong output in {case.name}, {verdict.output}: {verdict.problem}"
                return
    trial.times[case.name] = min(timing.p50, trial.times.get(case.name, math.inf))


def choose_trial(trials: Sequence[Trial]) -> Trial:
    """The trial to keep.

    Of the plugin's, the one that accumulates in FP32 unless it takes more than `FP32_SLOWDOWN` times the
    other's time; of that one and the native one, the faster.
    """
    right = {trial.name: trial for trial in trials if trial.is_right}
    wide = right.get(Candidate(attention=PLUGIN, accumulate=FP32).name)
    narrow = right.get(Candidate(attention=PLUGIN, accumulate=FP16).name)
    plugin = wide or narrow
    if wide and narrow and wide.microseconds > FP32_SLOWDOWN * narrow.microseconds:
        plugin = narrow
    found = [trial for trial in (right.get(NATIVE), plugin) if trial is not None]
    if not found:
        got = "; ".join(f"{trial.name}: {trial.refused}" for trial in trials)
        hint = "see the reason of each; --attention native builds without timing"
        raise EngineError("No candidate for this engine is right.", got=got, hint=hint)
    return min(found, key=lambda trial: trial.microseconds)


def attention_record(trials: Sequence[Trial], best: Trial, options: EngineOptions) -> engines.AttentionChoice:
    """The choice as the manifest records it. The plugin's time is that of its better candidate."""

    def fastest(kind: str) -> float | None:
        found = [best] if best.options.attention == kind else trials
        right = [each for each in found if each.is_right and each.options.attention == kind]
        return min((each.microseconds for each in right), default=None)

    native, plugin = fastest(NATIVE), fastest(PLUGIN)
    return {
        "requested": options.attention,
        "chosen": best.options.attention,
        "accumulate": best.options.accumulate,
        "native_us": native and round(native, 3),
        "plugin_us": plugin and round(plugin, 3),
        "ratio": round(native / plugin, 3) if native and plugin else None,
        "tried": [
            {
                "attention": trial.options.attention,
                "accumulate": trial.options.accumulate,
                "us": round(trial.microseconds, 3) if trial.is_right else None,
                "cases": {name: round(time, 3) for name, time in trial.times.items()},
                "refused": trial.refused,
            }
            for trial in trials
        ],
    }


def timed_cases(cases: Iterable[GoldenCase], runners: Sequence[Any]) -> list[GoldenCase]:
    """The usual cases that all engines admit, or else the first case that they do."""
    admitted = [case for case in cases if all(runner.profiles_for(case.inputs) for runner in runners)]
    if not admitted:
        problem = "No golden case of the bundle is within the profiles, so nothing can be timed."
        hint = "wider profiles, or name one candidate with --attention and --accumulate"
        raise EngineError(problem, hint=hint)
    return [case for case in admitted if case.name in TIMED_CASES] or admitted[:1]


# -- Other weights in a built engine ---------------------------------------------------------------


def refuse_fixed_weights(engine: Engine) -> None:
    """Refuse an engine whose weights cannot be replaced, or not on this machine."""
    if engine.manifest.options.get("refit") != "all":
        refit = engine.manifest.options.get("refit")
        got = f"{engine.path.name}, built {f'with --refit {refit}' if refit else 'without --refit'}"
        raise EngineError("The weights of this engine cannot be replaced.", got=got, hint=REFITTABLE)
    if reasons := reasons_not_to_run(engine):
        problem, hint = "The engine cannot be loaded here, so it cannot be refitted.", "mha-deploy doctor"
        raise BackendUnavailable(problem, got="; ".join(reasons), hint=hint)


def refitted_engine(engine: Engine, old: Bundle, new: Bundle) -> Engine:
    """The engine of a bundle with the weights of another one that has the same graph, written there."""
    refuse_fixed_weights(engine)
    manifest = engine.manifest
    rt = load(manifest.backend)
    before, after = (lowered_graph(each, engine) for each in (old, new))
    if differs := differing_part(before, after):
        problem = "The graph with the new weights differs, so the engine cannot take them."
        hint = f"build an engine of it: {build_command(new.path)}"
        raise EngineError(problem, got=differs, hint=hint)
    plan, host_code = engine.path.read_bytes(), bool(manifest.options.get("version_compatible"))
    if host_code:
        isolation.refuse_untrusted(manifest.engine_sha256)
    with scratch_folder() as folder:
        save_graph(after, folder / "model.onnx")
        given = (rt, plan, folder / "model.onnx", host_code, manifest.plugins)
        step = "replacing the weights of the engine"
        made = call_isolated(rt.backend, _refit, *given, title=rt.title, step=step)
    large = manifest.large_tensors
    first = run_first(rt, made, manifest.profile_names, host_code=host_code, large_tensors=large)
    if first.is_useless:
        got = next(iter(first.failed.values()))
        raise EngineError("The refitted engine cannot be run.", got=got, hint=_BUILD_AGAIN)
    changed = msgspec.structs.replace(
        manifest,
        model=new.manifest.spec.name,
        bundle_sha256=sha256(new.path / MANIFEST),
        engine_sha256=hashlib.sha256(made).hexdigest(),
        engine_bytes=len(made),
        notes=[*manifest.notes, f"refitted: kernels of {engine.path.name} with other weights", *first.notes],
    )
    return engines.write_engine(engines.engine_path(new.path, engine.path.stem), made, changed)


def _refit(rt: TensorRT, plan: bytes, path: Path, host_code: bool, plugins: Plugins) -> bytes:
    load_needed(rt, plugins)
    return refit_engine(rt, plan, path, host_code=host_code)


def differing_part(before: ir.Model, after: ir.Model) -> str | None:
    """The first thing in which two graphs differ besides the numbers of their weights; None where in none."""

    def weights(model: ir.Model) -> dict[str, tuple[Any, ...]]:
        return {name: (value.dtype, str(value.shape)) for name, value in model.graph.initializers.items()}

    def nodes(model: ir.Model) -> list[tuple[Any, ...]]:
        return [
            (
                *(node.name, node.domain, node.op_type),
                tuple(None if value is None else value.name for value in node.inputs),
                tuple(value.name for value in node.outputs),
                tuple((name, *_described(attribute)) for name, attribute in sorted(node.attributes.items())),
            )
            for node in model.graph.all_nodes()
        ]

    others = weights(after)
    for name, kind in weights(before).items():
        if others.get(name) != kind:
            return f"weight {name}: {kind}, and {others.get(name, 'nothing')}"
    for one, other in zip_longest(nodes(before), nodes(after)):
        if one != other:
            return f"node {(one or other or [''])[0]}"
    return None


def _described(attribute: ir.Attr) -> tuple[Any, ...]:
    """An attribute without the numbers of a tensor."""
    value = attribute.value
    if isinstance(value, ir.TensorProtocol):
        return str(value.dtype), str(value.shape)
    return (type(value).__name__,) if isinstance(value, ir.Graph) else (str(value),)


# -- How much an engine differs from build to build: TensorRT chooses kernels by timing them -------


def rebuild_engine(
    bundle: Bundle, options: EngineOptions, builds: int, on_progress: OnStep | None = None
) -> Engine:
    """Build an engine at least twice; the last one is kept, and its manifest records how much they differ.

    Every build starts without the timings of earlier ones. The last one is then built once more from its own
    timings: with them a build is to be reproducible.
    """
    if builds < 2:
        raise DeployError("A comparison needs at least two builds.", got=builds, hint="--repeat 3")
    rt = load(options.backend or engines.default_backend())
    path = _free_path(bundle, rt, options)
    make_folder(path.parent, within=bundle.path)
    fresh = replace(options, timing_cache=False, overwrite=True)
    trials = [Trial(name=f"{number + 1} of {builds}", options=fresh) for number in range(builds)]
    last = Trial(name="from the timing cache", options=replace(fresh, timing_cache=True))
    with temporary_folder(path.parent / "trying") as folder:

        def build(trial: Trial) -> Engine:
            if on_progress is not None:
                on_progress(f"build {trial.name}", 0, 0)
            place = folder / "engines" / f"{trial.name}.engine"
            return engine_from_bundle(bundle, trial.options, on_progress, path=place)

        run_trials(
            [*trials, *([last] if rt.can.timing_cache else [])],
            build,
            lambda _: measure_builds(trials, bundle, on_progress),
            raises=DeployError,
        )
        built = [trial.built for trial in trials]
        manifests = [each.manifest for each in built]
        rebuilds = engines.RebuildRecord(
            builds=builds,
            identical=len({each.engine_sha256 for each in manifests}) == 1,
            differing=differing_kernels(built),
            fused=[each.fused_count for each in manifests],
            seconds=[each.seconds for each in manifests],
            engine_bytes=[each.engine_bytes for each in manifests],
            errors={
                case: _by_build(trial.judged[case] for trial in trials if case in trial.judged)
                for case in dict.fromkeys(case for trial in trials for case in trial.judged or ())
            },
            times_us=_by_build(trial.times for trial in trials),
            timing_cache=None if last.engine is None else not differing_kernels([built[-1], last.engine]),
        )
        manifest = msgspec.structs.replace(manifests[-1], rebuilds=rebuilds)
        plan = built[-1].path.read_bytes()
        return engines.write_engine(path, plan, manifest, overwrite=options.overwrite)


def differing_kernels(built: Sequence[Engine]) -> list[engines.DifferingKernels]:
    """The ONNX nodes whose kernels are not the same in every build, with the kernels of each build."""
    found = defaultdict[tuple[int, tuple[str, ...]], list[list[str]]](lambda: [[] for _ in built])
    for index, engine in enumerate(built):
        for kernel in engine.manifest.kernels:
            nodes = tuple(sorted(kernel["nodes"])) or (kernel["name"],)
            found[kernel["profile"], nodes][index].append(kernel["tactic"] or kernel["name"])
    return [
        engines.DifferingKernels(nodes=list(nodes), profile=profile, kernels=builds)
        for (profile, nodes), builds in found.items()
        if any(each != builds[0] for each in builds)
    ]


def measure_builds(trials: Sequence[Trial], bundle: Bundle, on_progress: OnStep | None = None) -> None:
    """Shares of the error budget, and times, of every build; nothing where the engines cannot run here."""
    for number, trial in enumerate(trials):
        if reasons_not_to_run(trial.built):
            continue
        if on_progress is not None:
            on_progress("run and time", number, len(trials))
        trial.judged, precision = {}, _judged_as(trial.built, bundle.manifest.precision)
        with open_engine_runner(trial.built) as runner:
            timed = [case.name for case in timed_cases(golden_cases(bundle), [runner])]
            for case in golden_cases(bundle):
                if not runner.profiles_for(case.inputs):  # type: ignore[attr-defined]
                    continue
                for verdict in judge_case(case, runner.run(case.inputs), precision):
                    trial.judged.setdefault(case.name, {})[verdict.output] = verdict.share
                if case.name in timed:
                    trial.times[case.name] = runner.time(case.inputs).p50


def _by_build(found: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The figures of every build, by what was measured."""
    figures = defaultdict[str, list[Any]](list)
    for each in found:
        for name, figure in each.items():
            figures[name].append(figure)
    return dict(figures)


# -- Temporary engines: variations of a graph for comparison, and mask cases -----------------------


def engine_opener(
    rt: TensorRT, precision: str, profiles: Sequence[Profile] = (), plugins: Plugins = ()
) -> Callable[[ir.Model], Runner]:
    """A function that builds a lowered graph on this machine's GPU and loads it, in a child process."""

    def open_model(model: ir.Model) -> Runner:
        with scratch_folder() as folder:
            path = folder / "model.onnx"
            save_graph(model, path)
            # A graph with float32 outputs computes in float32; a weakly typed build could use less otherwise.
            wide = any(value.dtype == ir.DataType.FLOAT for value in model.graph.outputs)
            request = BuildRequest(
                onnx=path,
                precision="fp32" if wide else precision,
                profiles=profiles,
                # These engines are not timed, and a shorter search builds them sooner.
                options=EngineOptions(allow_decomposed=True, optimization_level=1),
            )
            return open_isolated(rt.backend, rt.title, _build_and_load, rt, request, plugins)

    return open_model


def _build_and_load(rt: TensorRT, request: BuildRequest, plugins: Plugins) -> TensorRTRunner:
    built = _build(rt, request, plugins)
    return TensorRTRunner(rt, built.plan, large_tensors=built.large_tensors)


def lowered_opener(engine: Engine, bundle: Bundle) -> Callable[[ir.Model], Runner]:
    """A function that builds a lowered graph with the profiles of an engine, and loads it."""
    rt, manifest = load(engine.manifest.backend), bundle.manifest
    profiles = [engines.profile_shapes(manifest.spec, ranges) for ranges in engine.manifest.ranges]
    return engine_opener(rt, manifest.precision.name, profiles, engine.manifest.plugins)


def twin_opener(engine: Engine, bundle: Bundle) -> Callable[[ir.Model], Runner]:
    """A function that builds a variation of a bundle's graph as an engine of it was built, and loads it."""
    rt, open_lowered = load(engine.manifest.backend), lowered_opener(engine, bundle)
    options, ranges = replace(_lowered_with(engine), allow_decomposed=True), engine.manifest.ranges
    return lambda model: open_lowered(lowering.lower_for(rt, model, options, ranges)[0])
