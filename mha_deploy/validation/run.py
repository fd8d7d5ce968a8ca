"""Validate a bundle: run every available runtime, judge and time it, and collect one report."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from mha_deploy.bundle.cases import DecodeTrace, GoldenCase, golden_cases, plan_trace
from mha_deploy.bundle.folder import Bundle
from mha_deploy.bundle.sizes import (
    PROBE,
    TIMED_CASES,
    SizeLimit,
    interior_sizes,
    shrunk,
    sweep_points,
    usual_points,
)
from mha_deploy.engine.build import lowered_opener, twin_opener
from mha_deploy.engine.engine import foreign_engines, gone_engines, reasons_not_to_run
from mha_deploy.environment import can_import
from mha_deploy.errors import EXIT_VERDICT_FAILED, BackendUnavailable, BundleError, DeployError
from mha_deploy.graph.file import load_graph
from mha_deploy.graph.lower.call import LoweringError
from mha_deploy.judge import ParityReport
from mha_deploy.model.spec import Axis, ModelSpec, ModuleSpec, Sizes, are_within
from mha_deploy.options import OnName, OnStep, Step, ValidateOptions, given_of, silent
from mha_deploy.runtime import CPU_RUNNERS, RUNNERS, open_runner
from mha_deploy.runtime.child import RuntimeCrash, isolation
from mha_deploy.runtime.cuda import find_gpu, open_gpu
from mha_deploy.runtime.runner import Runner
from mha_deploy.runtime.timing import TimingPlan
from mha_deploy.runtime.user_code import refuse_without_factory
from mha_deploy.status import CaseKind, Outcome
from mha_deploy.text import summarize_names
from mha_deploy.threads import on_a_thread
from mha_deploy.validation import evaluate, runtimes
from mha_deploy.validation.conformance import conformance_table, mask_columns
from mha_deploy.validation.data import DataPass, UserData, is_imported, open_data, validate_data
from mha_deploy.validation.decode import traces_of
from mha_deploy.validation.error_map import output_projection
from mha_deploy.validation.evaluate import Evaluation, EvaluationPlan, LatencyRow
from mha_deploy.validation.fault import FaultReport, OpenModel, attribute_fault, graph_at_fault, layer_parity
from mha_deploy.validation.fp16_range import RangeReport, fp16_range
from mha_deploy.validation.runtimes import Runtime, RuntimeFinder, Unavailable
from mha_deploy.validation.subjects import subjects_of
from mha_deploy.validation.verdict import Validation, conclude

if TYPE_CHECKING:
    from mha_deploy.baselines.fresh import FreshCases


Build = Callable[[Evaluation], None]

ONNX_REFERENCE = "onnx-reference"

_COARSE_NUMBERS = 1 << 14  # of an output: enough to tell a part in BF16 from chance
_PROBE_STEPS = 8  # the decode steps with large tokens among them


def validate_bundle(
    bundle: Bundle,
    options: ValidateOptions | None = None,
    *,
    build: Build | None = None,
    on_step: OnName = silent,
    runners: Sequence[Runner] = (),
    on_sample: OnStep = silent,
) -> Validation:
    """Run every available runtime on the golden cases, judge the results, and time them.

    `build` is called unless the graph failed, to build an engine that is judged next. A runtime that was
    requested by name and cannot run here is an error. So is a bundle that was replaced meanwhile: its graph
    and its cases may not belong together. `runners`, and graphs and engine files of the options, are judged
    in place of the bundle's own.
    """
    before = bundle.state()
    validation = _Validator(bundle, options or ValidateOptions(), on_step, runners)
    validation.on_sample = on_sample
    report = validation.report(build)
    if bundle.state() != before:
        problem = "The bundle was replaced while it was validated."
        raise BundleError(problem, got=bundle.path, hint="validate it again")
    return report


def draw_cases(
    bundle: Bundle, options: ValidateOptions, on_step: OnName
) -> tuple[dict[CaseKind, Sequence[GoldenCase]], tuple[Unavailable, ...]]:
    """The cases that are drawn besides the golden ones, by kind; and what could not be drawn."""
    validation = _Validator(bundle, options, on_step)
    manifest = bundle.manifest
    plan = EvaluationPlan(spec=manifest.spec, precision=manifest.precision, cases={})
    return dict(validation._with_drawn_cases(plan, ()).cases), tuple(validation.finder.absent)


class _Validator:
    """One validation, step by step."""

    def __init__(
        self, bundle: Bundle, options: ValidateOptions, on_step: OnName, runners: Sequence[Runner] = ()
    ) -> None:
        self.bundle, self.options, self.on_step = bundle, options, on_step
        self.finder = RuntimeFinder(bundle, engine=options.engine)
        self.on_sample: OnStep = silent
        self.subjects = subjects_of(bundle, options, runners)
        self.golden = list(golden_cases(bundle))
        self.rows: list[Mapping[str, LatencyRow]] = []
        self.notes: list[str] = []
        self.broken: list[Unavailable] = []
        self.not_built: DeployError | None = None
        self._ranges: Future[RangeReport] | None = None
        self._no_fresh: DeployError | None = None
        self._undrawn: list[DeployError] = []

    def report(self, build: Build | None) -> Validation:
        """Everything, in the order in which it is needed; what cannot be done is refused first."""
        given = None if self.options.data is None else open_data(self.bundle, self.options)
        runtimes = () if self.subjects else dict.fromkeys(self.options.runtimes)
        named = [self.finder.named(name) for name in runtimes]
        for each in named:
            if each.engine is not None and reasons_not_to_run(each.engine):
                each.open().close()  # its own error says why not
        plan, options, manifest = self._plan(), self.options, self.bundle.manifest
        if self.subjects:
            judged, baselines = self._evaluate_subjects(plan), list[Runtime]()
        elif options.runtimes:
            judged, baselines = self._evaluate_named(named, plan), list[Runtime]()
        else:
            judged = self._evaluate_graph_and_engines(plan, build)
            baselines = self.finder.baselines() if plan.timed else []
        # PyTorch's baselines are judged on the case that they are timed on, and no more.
        only_timed = replace(plan, cases={}, traces=())
        compared, rows = evaluate.evaluate_all(baselines, only_timed, self.on_step)
        data = self._run_data(given, judged)
        rows += self.rows  # what is compared against comes first in a table
        ranges, fault, table = self._measure_ranges(), self._attribute_fault(judged), None
        if options.conformance:
            table = conformance_table(
                mask_columns(manifest.precision),
                manifest.precision,
                on_column=lambda name: self.on_step(Step("masks", name)),
            )
        if options.layers and not any(each.runtime.engine is not None for each in judged):
            self.notes.append("attentions are judged one by one in the graph only: no engine was run")
        own = not self.subjects  # the bundle's own engines are not what was judged
        if own and (others := manifest.judged_by_outputs):
            self.notes.append(
                f"judged by the outputs only, without results of its own: {summarize_names(others)}"
            )
        report = Validation(
            bundle=self.bundle,
            evaluations=(*compared, *judged),
            absent=(*self.finder.absent, *self.broken),
            engines=tuple(self.finder.engines) if own else (),
            gone=gone_engines(self.bundle) if own else (),
            not_built=self.not_built,
            foreign=tuple(path.stem for path in foreign_engines(self.bundle.path)) if own else (),
            subjects=tuple(each.record for each in self.subjects if each.record is not None),
            points=evaluate.latency_points(plan.timed, rows, self.bundle) if rows else (),
            ranges=ranges,
            conformance=table,
            fault=fault,
            notes=tuple(self.notes),
            data=None if data is None else data.record,
            kept={} if data is None else data.kept,
        )
        return conclude(report, judged, options, self.broken)

    def _run_data(self, given: UserData | None, judged: Sequence[Evaluation]) -> DataPass | None:
        """The user's own samples, in every runtime that was judged."""
        if given is None:
            return None
        self.on_step("data")
        runtimes = [each.runtime for each in judged]
        return validate_data(self.bundle, given, runtimes, self.options, self.on_sample)

    # -- what is evaluated ----------------------------------------------------------------------

    def _plan(self) -> EvaluationPlan:
        manifest, options = self.bundle.manifest, self.options
        if options.latency:
            open_gpu()  # times were requested: raises where there is no GPU
        timing = find_gpu() is not None if options.latency is None else options.latency
        usual = [case for case in self.golden if case.name in TIMED_CASES] or self.golden[:1]
        if options.steps:
            self.on_step("tokens to decode, and their FP64 oracle")
        return EvaluationPlan(
            spec=manifest.spec,
            precision=manifest.precision,
            cases={CaseKind.GOLDEN: self.golden},
            timed=usual if timing else [],
            invariance=True,
            timing=TimingPlan(samples=options.samples),
            kernels=options.kernels,
            projection=output_projection(load_graph(self.bundle.model_path)),
            traces=traces_of(self.bundle, options),
        )

    def _draw_sweep(self, profiles: Sequence[Mapping[str, Axis]]) -> list[GoldenCase]:
        """Every profile at its corners, with inputs that no golden case has."""
        self.on_step(Step("sweep", "inputs and their FP64 oracle"))
        points = sweep_points(self.bundle.manifest.spec, profiles, limit=self._oracle_limit)
        self.notes += [f"sweep-{point.name}: {point.note}" for point in points if point.note]
        draw = partial(self._fresh.case, seed=self.options.seed)
        return [replace(draw(each.sizes, past=each.past), name=f"sweep-{each.name}") for each in points]

    @cached_property
    def _random_cases(self) -> list[GoldenCase]:
        """As many cases as were requested, with sizes from anywhere in the axes that an oracle can afford."""
        spec, cases = self.bundle.manifest.spec, list[GoldenCase]()
        self.on_step("random sizes and their FP64 oracle")
        if is_imported(self.bundle):
            from mha_deploy.baselines.imported import FileCases

            draw: Callable[..., GoldenCase] = FileCases(self.bundle, self.options.source).fresh
        else:
            draw = self._fresh.case
        for seed in range(self.options.seed, self.options.seed + self.options.fresh):
            dice = random.Random(seed)
            sizes = {name: dice.randint(axis.min, axis.max) for name, axis in spec.axes.items()}
            cases.append(draw(shrunk(spec, sizes, spec.sizes("min"), SizeLimit()), seed=seed))
        return cases

    def _draw_random(self, profiles: Sequence[Mapping[str, Axis]]) -> list[GoldenCase]:
        """As many cases as were requested; by default a few small ones, of sizes that nobody chose."""
        if self.options.fresh:
            return self._random_cases
        self.on_step("random sizes and their FP64 oracle")
        seed = self.options.seed
        return [
            self._fresh.case(sizes, seed=seed)
            for sizes in interior_sizes(self.bundle.manifest.spec, profiles, seed=seed)
        ]

    @property
    def _fresh(self) -> FreshCases:
        """What draws cases; where there is none, the same error whatever is drawn."""
        if self._no_fresh is not None:
            raise self._no_fresh
        try:
            return self._opened_fresh
        except DeployError as error:
            self._no_fresh = error
            raise

    @cached_property
    def _opened_fresh(self) -> FreshCases:
        if isinstance(self.bundle.manifest.spec, ModuleSpec):
            try:
                refuse_without_factory(self.bundle.manifest.spec)
            except BundleError as error:
                given = given_of(self.options, ("fresh", "sweep", "probe", "steps"))
                got = f"{error.got}, for {', '.join(given.values())}" if given else error.got
                raise BundleError(error.what, got=got, hint=error.hint, options=given) from error
        runtimes.refuse_without_torch("of fresh inputs")
        from mha_deploy.baselines.fresh import FreshCases

        return FreshCases(self.bundle, device=runtimes.torch_device())

    def _with_drawn_cases(self, plan: EvaluationPlan, engines: Sequence[Runtime]) -> EvaluationPlan:
        """Add fresh cases: those requested; by default probes, a few sizes, and a sweep of the profiles."""
        cases, options = dict(plan.cases), self.options
        profiles = [ranges for each in engines if each.engine for ranges in each.engine.manifest.ranges]
        drawn = bool(profiles) or not self._has_probe  # else the bundle holds them
        any_size = None if options.probe is not False else False  # like probes, unless they are not wanted
        # Whoever lets the factory of a model run wants what only it can make.
        may_draw = drawn or (isolation.trust_code and bool(self.bundle.manifest.spec.factory))
        may_sweep = bool(engines) and can_import("torch")
        kinds = (
            (CaseKind.SWEEP, "the sweep", self._draw_sweep, options.sweep, may_sweep),
            (CaseKind.PROBE, "probe inputs", self._draw_probes, options.probe, drawn),
            (CaseKind.FRESH, "fresh inputs", self._draw_random, options.fresh > 0 or any_size, may_draw),
        )
        for kind, title, draw, requested, by_default in kinds:
            if not requested and not (requested is None and by_default):
                continue
            try:
                cases[kind] = draw(profiles)
            except DeployError as error:
                if requested:
                    raise
                found = Unavailable(name=title, reason=error.in_one_line)
                if error not in self._undrawn and found not in self.finder.absent:
                    self.finder.absent.append(found)
                self._undrawn.append(error)
        return replace(
            plan, cases=cases, traces=[*plan.traces, *(self._probe_trace if CaseKind.PROBE in cases else ())]
        )

    def _draw_probes(self, profiles: Sequence[Mapping[str, Axis]]) -> list[GoldenCase]:
        """Large tokens at the edges of masks, windows and caches, at the usual sizes and profile corners.

        At the usual sizes also random inputs, of which it is known what parts in BF16 would change.
        """
        self.on_step("probe inputs and their FP64 oracle")
        manifest, limit, spec = self.bundle.manifest, self._oracle_limit, self.bundle.manifest.spec
        fresh = self._fresh
        usual, cases = () if self._has_probe else usual_points(spec), list[GoldenCase]()
        corners = sweep_points(spec, profiles, limit=limit) if profiles else ()
        for point in (*usual, *(corner for corner in corners if corner.probed)):
            sizes = shrunk(spec, point.sizes, spec.sizes("min"), limit)
            draw = partial(fresh.case, seed=self.options.seed, past=point.past)
            cases.append(replace(draw(sizes, probe="edges"), name=f"probe-{point.name}"))
            if "coarse" in fresh.probes and point in usual and manifest.precision.name == "fp16":
                more = {**sizes, "B": _batch_for_coarse(spec, sizes, profiles)}
                cases.append(replace(draw(more, probe="coarse"), name=f"coarse-{point.name}"))
        return cases

    @property
    def _has_probe(self) -> bool:
        """Whether the bundle of a user's model holds probe inputs, and others were not requested."""
        manifest = self.bundle.manifest
        stored = any(entry.name == PROBE for entry in manifest.golden)
        return not manifest.spec.draws_probes and stored and not self.options.probe

    @cached_property
    def _probe_trace(self) -> list[DecodeTrace]:
        """Large tokens among those that a layer with a KV cache decodes."""
        spec = self.bundle.manifest.spec
        planned = plan_trace(spec, _PROBE_STEPS)
        if isinstance(planned, str) or "steps" not in self._fresh.probes:
            return []
        return [
            self._fresh.trace(replace(planned, name="probe-steps"), seed=self.options.seed, probe="steps")
        ]

    @property
    def _oracle_limit(self) -> SizeLimit:
        """What an oracle may cost: on the GPU where there is one; a user's module is computed on the CPU."""
        gpu = find_gpu() if self._fresh.device != "cpu" else None
        if gpu is None:
            return SizeLimit(gflop=250.0)
        # The module itself keeps all scores; the oracle is computed in blocks.
        return SizeLimit(gflop=5000.0, gib=max(24.0, 0.35 * gpu.memory_bytes / 2**30))

    # -- which runtimes are evaluated -----------------------------------------------------------

    def _evaluate_subjects(self, plan: EvaluationPlan) -> list[Evaluation]:
        """What was given to be judged; one that does not fit the model, or cannot run, is an error."""
        plan, judged = self._with_drawn_cases(plan, ()), list[Evaluation]()
        for subject in self.subjects:
            if (found := self._evaluate(subject.runtime, plan)) is not None:
                judged.append(found)
                if not found.is_right:
                    subject.compare_weights()
        return judged

    def _evaluate_named(self, named: Sequence[Runtime], plan: EvaluationPlan) -> list[Evaluation]:
        """The runtimes that were requested; one that cannot run is an error."""
        plan = self._with_drawn_cases(plan, [each for each in named if each.engine is not None])
        return list(filter(None, [self._evaluate(runtime, plan) for runtime in named]))

    def _evaluate_graph_and_engines(self, plan: EvaluationPlan, build: Build | None) -> list[Evaluation]:
        """The graph in a runtime that can be trusted, then the engines that were built from it."""
        draw, options = partial(self._with_drawn_cases, engines=()), self.options
        # What was requested is refused first, where it cannot be drawn.
        is_requested = options.sweep or options.probe or options.fresh
        graph = self._evaluate_graph(draw(plan) if is_requested else replace(plan, complete=draw))
        if build is not None and (graph is None or graph.outcome is Outcome.FAILED):
            hint = f"mha-deploy bisect {self.bundle.path}"
            self.not_built = DeployError("The graph failed.", hint=hint)  # an engine of it only distracts
        elif build is not None and graph is not None:
            # While another process builds; where it times kernels, it is left alone.
            if isolation.enabled and self.bundle.manifest.attention and find_gpu() is None:
                self._ranges = on_a_thread(partial(fp16_range, self.bundle, self.golden))
            try:
                build(graph)
            except DeployError as error:
                if error.exit_code != EXIT_VERDICT_FAILED and not isinstance(error, LoweringError):
                    raise
                self.not_built = error  # it crashed, or TensorRT, the plugin or its kernels lack something
            self.finder.look_for_engines()
        engines = self.finder.running_engines()
        plan = self._with_drawn_cases(plan, engines) if engines else plan
        return list(filter(None, [graph, *(self._evaluate(engine, plan) for engine in engines)]))

    def _evaluate_graph(self, plan: EvaluationPlan) -> Evaluation | None:
        """The graph in the first runtime that loads it; None where all of them crash."""
        candidates = self.finder.graphs()
        for runtime in candidates:
            try:
                if (evaluated := self._evaluate(runtime, plan)) is not None:
                    return evaluated
            except DeployError as error:
                if runtime is candidates[-1] and not self.broken:
                    raise
                self.finder.absent.append(Unavailable(name=runtime.name, reason=error.in_one_line))
        # ONNX's evaluator is slow, and it is Python: it does not crash.
        known = [runtime.name for runtime in candidates]
        return None if ONNX_REFERENCE in known else self._evaluate(self.finder.named(ONNX_REFERENCE), plan)

    def _evaluate(self, runtime: Runtime, plan: EvaluationPlan) -> Evaluation | None:
        """Evaluate a runtime; one that crashes while it loads the model has failed, and the others go on.

        So has an engine that fits this machine and cannot be loaded, unless it was requested by name.
        """
        # A graph on the CPU is checked there, not timed.
        on_cpu = (runtime.graph_runtime or runtime.name) in CPU_RUNNERS
        plan = replace(plan, timed=()) if on_cpu else plan
        try:
            evaluation = evaluate.evaluate(runtime, plan, self.on_step)
            layers = self._layer_parity(runtime) if plan.cases else None
        except DeployError as error:
            may_fail = runtime.engine is not None and not self.options.runtimes
            if not may_fail and not isinstance(error, RuntimeCrash):
                raise
            found = Unavailable(name=runtime.name, reason=error.in_one_line)
            (self.finder.absent if isinstance(error, BackendUnavailable) else self.broken).append(found)
            return None
        if layers is not None:
            evaluation = replace(evaluation, parity=(*evaluation.parity, layers))
            if wrong := next((verdict for verdict in layers.verdicts if verdict.is_wrong), None):
                problem = f"{wrong.case}/{wrong.output}: {wrong.problem}"
                rows = evaluate.refused_rows(runtime, evaluation.runner, plan.timed, problem)
                evaluation = replace(evaluation, rows=rows)
        if plan.timed:
            self.rows.append(evaluation.rows)
        return evaluation

    def _layer_parity(self, runtime: Runtime) -> ParityReport | None:
        """Judge every attention of a module: in ONNX Runtime, and on request in an engine's twin."""
        opener: OpenModel | None = None
        if runtime.name in RUNNERS:
            opener = partial(open_runner, runtime.name)
        elif runtime.engine is not None and (self.options.layers or self._hides(runtime)):
            opener = twin_opener(runtime.engine, self.bundle)
        if opener is None or self.bundle.manifest.layers is None:
            return None
        what = "every attention by itself"
        self.on_step(Step(runtime.name, what))
        try:
            kind = runtime.accumulation(self.bundle.manifest.precision)
            return layer_parity(self.bundle, opener, kind, engine=runtime.engine_name)
        except RuntimeCrash as crash:
            self.broken.append(Unavailable(name=f"{runtime.name}, {what}", reason=crash.in_one_line))
            return None
        except LoweringError as error:  # a result in FP8, which no output of the engine's twin can be
            self.notes.append(f"{runtime.name}: attentions are not judged by themselves: {error.in_one_line}")
            return None

    def _hides(self, runtime: Runtime) -> bool:
        """Whether there are attentions that the outputs do not show: their own results must be judged."""
        manifest = self.bundle.manifest
        kind = runtime.accumulation(manifest.precision).type
        return any(each.is_hidden(kind) for each in manifest.observed)

    # -- further checks ------------------------------------------------------------------------

    def _measure_ranges(self) -> RangeReport | None:
        """How near FP16's limit attention comes; None for a module without any attention node."""
        if not self.bundle.manifest.attention or self.subjects:  # which need not compute it in these types
            return None
        self.on_step("range of attention")
        try:
            return fp16_range(self.bundle, self.golden) if self._ranges is None else self._ranges.result()
        except DeployError as error:  # a crash, or attention in a branch: judged by the model's outputs alone
            self.notes.append(f"the FP16 range was not measured: {error.in_one_line}")
            return None

    def _attribute_fault(self, judged: Sequence[Evaluation]) -> FaultReport | None:
        """Who is at fault where an answer is wrong; the first that is speaks for all.

        What could not be run has no numbers to explain: its own message says why, and twins take minutes.
        """
        for each in judged:
            engine, wrong = each.runtime.engine, each.wrong_cases
            if engine is None and wrong and each.runtime.name in CPU_RUNNERS:
                return graph_at_fault(each.runtime.name, each.share)
            # An attention inside may be wrong alone: then no case shows what its engine does.
            cases = [case for kind in each.cases.values() for case in kind if case.name in wrong]
            if engine is not None and cases:
                self.on_step("fault attribution")
                kind = each.runtime.accumulation(self.bundle.manifest.precision).type
                return attribute_fault(self.bundle, cases, lowered_opener(engine, self.bundle), kind)
        return None


def _batch_for_coarse(spec: ModelSpec, sizes: Sizes, profiles: Sequence[Mapping[str, Axis]]) -> int:
    """So many batch elements that chance hides no part in BF16, where axes and profiles admit them."""
    most = max((axes["B"].max for axes in profiles if are_within(sizes, axes)), default=spec.axes["B"].max)
    in_one = math.prod(spec.outputs[0].shape({**sizes, "B": 1}))
    return max(sizes["B"], min(most, math.ceil(_COARSE_NUMBERS / in_one)))
