"""Run one runtime through everything it is to be judged on, with its runner opened once, and time it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from msgspec import structs

from mha_deploy import judge
from mha_deploy.analysis.roofline import find_peaks, roofline_bound
from mha_deploy.bundle.cases import DecodeTrace, GoldenCase, plan_trace
from mha_deploy.bundle.folder import Bundle
from mha_deploy.errors import DeployError
from mha_deploy.judge import OutputVerdict, ParityReport
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import LayerCost, ModelSpec
from mha_deploy.options import OnName, Step, silent
from mha_deploy.runtime.child import RuntimeCrash
from mha_deploy.runtime.runner import Runner
from mha_deploy.runtime.timing import KernelTime, Timing, TimingPlan
from mha_deploy.status import CaseKind, Kind, Outcome, Reason
from mha_deploy.text import reason_text
from mha_deploy.threads import on_a_thread
from mha_deploy.validation.decode import DecodeReport, admits, evaluate_trace
from mha_deploy.validation.error_map import MAPPED_RANKS, Heatmap, OutputProjection, heatmap
from mha_deploy.validation.invariance import InvarianceCheck, invariance_from_runner
from mha_deploy.validation.records import LatencyPointRecord, LatencyRowRecord, RooflineRecord
from mha_deploy.validation.runtimes import PYTORCH, TENSORRT, Family, Runtime, kernel_times

# -- Latency: one time for every right answer, beside the roofline bound ----------------------------

EAGER = "eager"
WRONG = frozenset({Kind.WRONG_RESULT, Kind.WRONG_WHEN_TIMED, Kind.WRONG_ON_STREAMS})
"""Why there is no time: the results are wrong."""


@dataclass(frozen=True, kw_only=True)
class LatencyRow:
    """The time of one runtime at one point, or why it has none."""

    name: str  # the runtime
    runtime: str  # the runner's own name, with its version
    family: Family  # whose it is
    timing: Timing | None = None  # the time
    refused: Reason | None = None  # why there is no time
    kernels: tuple[KernelTime, ...] = ()  # the kernels that take the time, longest first, where requested


@dataclass(frozen=True, kw_only=True)
class LatencyPoint:
    """Every runtime at one set of sizes."""

    case: str  # name of the case that was timed
    sizes: Mapping[str, int]  # its axis sizes
    flops: int  # work of one call
    bytes: int  # least traffic of one call
    roofline: RooflineRecord | None  # None for a GPU without figures
    rows: tuple[LatencyRow, ...]  # one for every runtime
    # The most entries of a preallocated KV cache that are valid before the call; None for other layers
    past: int | None = None
    # Tokens that one decode step brings, one for every batch element; None for other calls
    decoded: int | None = None

    @property
    def best_pytorch(self) -> LatencyRow | None:
        """The fastest of PyTorch's baselines."""
        timed = [row for row in self.rows if row.family == PYTORCH and row.timing]
        return min(timed, key=lambda row: row.timing.p50 if row.timing else 0.0, default=None)

    @property
    def record(self) -> LatencyPointRecord:
        """What a report stores."""
        rows = (
            LatencyRowRecord(
                name=row.name,
                runtime=row.runtime,
                family=row.family,
                refused=None if row.refused is None else reason_text(row.refused),
                reason=row.refused,
                timing=None if row.timing is None else row.timing.record,
                **self.figures(row),
                kernels=row.kernels,
            )
            for row in self.rows
        )
        names = ("past", "flops", "bytes", "roofline", "case")
        about: dict[str, Any] = {name: getattr(self, name) for name in names}
        return LatencyPointRecord(sizes=dict(self.sizes), rows=tuple(rows), **about)

    def figures(self, row: LatencyRow) -> dict[str, float | None]:
        """What the time of a row means: speed-ups, rates, and its share of the roofline."""
        time = None if row.timing is None else row.timing.p50
        eager = next((each for each in self.rows if each.name == EAGER), None)

        def speedup_over(other: LatencyRow | None) -> float | None:
            """How many times faster it is than another, if both were timed on one device."""
            if other is None or other.timing is None or row.timing is None:
                return None
            return other.timing.p50 / row.timing.p50 if other.timing.gpu == row.timing.gpu else None

        return {
            "speedup_over_eager": speedup_over(eager),
            "speedup_over_best_pytorch": speedup_over(self.best_pytorch),
            "tflops": time and self.flops / time / 1e6,
            "gb_per_s": time and self.bytes / time / 1e3,
            "tokens_per_s": time and self.decoded and self.decoded / time * 1e6,
            "roofline_share": self.roofline.bound_us / time if time and self.roofline else None,
        }


def latency_points(
    cases: Sequence[GoldenCase], rows: Sequence[Mapping[str, LatencyRow]], bundle: Bundle
) -> tuple[LatencyPoint, ...]:
    """One point for every case: the rows of all runtimes."""
    spec, precision = bundle.manifest.spec, bundle.manifest.precision
    return tuple(latency_point(case, [each[case.name] for each in rows], spec, precision) for case in cases)


def latency_point(
    case: GoldenCase, rows: Sequence[LatencyRow], spec: ModelSpec, precision: Precision
) -> LatencyPoint:
    """Put the rows of one case together with what the work needs at least.

    The work behind a preallocated cache is that of the case's own lengths.
    """
    lengths = case.inputs["lengths"].tolist() if spec.cache == "preallocated" else None
    moved = sum(each.nbytes for each in (*case.inputs.values(), *case.eager.values()))
    cost = spec.call_cost(case.sizes, precision.bytes, lengths=lengths, flops=case.flops, moved=moved)
    gpus = {row.timing.gpu for row in rows if row.timing}
    return LatencyPoint(
        case=case.name,
        sizes=case.sizes,
        flops=cost.flops,
        bytes=cost.bytes,
        roofline=_roofline(cost, precision, gpus.pop()) if len(gpus) == 1 else None,
        rows=tuple(rows),
        past=None if lengths is None else max(lengths),
        decoded=case.sizes["B"] if spec.cache != "none" and case.sizes["S"] == 1 else None,
    )


def _roofline(cost: LayerCost, precision: Precision, gpu: str) -> RooflineRecord | None:
    """The least time that the work needs on this GPU, from its datasheet, and what sets most of it."""
    try:
        peaks = find_peaks(gpu)
    except DeployError:  # its datasheet is not known
        return None
    least, shares = roofline_bound(cost, peaks, precision.name), defaultdict[str, float](float)
    for stage in least:
        shares[stage.bound_by] += stage.seconds
    return RooflineRecord(
        gpu=peaks.name,
        bound_us=sum(stage.seconds for stage in least) * 1e6,
        bound="compute" if shares["compute"] >= shares["memory"] else "memory",
        tflops_peak=peaks.peak_flops(precision.name) / 1e12,
        gb_per_s_peak=peaks.memory_gb_per_s,
    )


def time_case(runner: Runner, case: GoldenCase, row: LatencyRow, plan: EvaluationPlan) -> LatencyRow:
    """Time a runner on a case, if its answer is right before and after."""
    try:
        first = runner.run(case.inputs)
        if problem := problem_of(case, [first], plan.precision):
            return replace(row, refused=Reason(kind=Kind.WRONG_RESULT, got=problem))
        timed = runner.time(case.inputs, plan.timing)
        # Most kernels repeat their results, and judging gigabytes of cache takes long.
        others = [result for result in timed.results if not judge.same_bits(result, first)]
        if problem := problem_of(case, others, plan.precision):
            return replace(row, refused=Reason(kind=Kind.WRONG_WHEN_TIMED, got=problem))
    except DeployError as error:
        return replace(row, refused=Reason(kind=Kind.NOT_TIMED, got=error.in_one_line))
    row = replace(row, timing=replace(timed, results=()))  # judged: caches among them may be gigabytes
    try:
        return replace(row, kernels=kernel_times(runner, case)) if plan.kernels else row
    except DeployError:  # no profiler here: the time stands without its kernels
        return row


def problem_of(case: GoldenCase, results: Sequence[Mapping[str, Any]], precision: Precision) -> str | None:
    """The first wrong output among several results of a case."""
    verdicts = (verdict for result in results for verdict in judge.judge_case(case, result, precision))
    return next((f"{each.output}: {each.problem}" for each in verdicts if each.is_wrong), None)


# -- Evaluation: a runtime is judged, then timed -----------------------------------------------------


_STEPS_REPORTED = 64  # progress is reported every so many steps
_MAPPED = ("opt", "prefill")  # the usual cases, which are mapped also where they are right


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """What a runtime is to be judged on."""

    spec: ModelSpec  # the layer
    precision: Precision  # its precision, which sets the budgets
    cases: Mapping[CaseKind, Sequence[GoldenCase]]  # cases by kind: `golden`, `sweep`, `fresh`
    timed: Sequence[GoldenCase] = ()  # the cases to time it on
    invariance: bool = False  # whether batch elements must not depend on their place; on golden cases
    timing: TimingPlan = field(default_factory=TimingPlan)
    traces: Sequence[DecodeTrace] = ()  # tokens to decode, for a layer with a cache
    kernels: bool = False  # whether to report which kernels take the time
    projection: OutputProjection | None = None  # which the map of errors is pulled back through
    # Adds the cases and traces that are drawn only while the others are judged
    complete: Callable[[EvaluationPlan], EvaluationPlan] | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What came out for one runtime."""

    runtime: Runtime  # what was run
    runner: str  # the runner's own name, with its version
    # What has verdicts, such as the runner, by name: the same without its version
    titles: Mapping[str, str] = field(default_factory=dict)
    # The cases it was judged on, by kind
    cases: Mapping[CaseKind, Sequence[GoldenCase]] = field(default_factory=dict, repr=False)
    outside: tuple[str, ...] = ()  # names of the cases and traces that its profiles do not admit
    parity: tuple[ParityReport, ...] = ()  # the verdicts, one report for each kind of cases
    invariance: tuple[InvarianceCheck, ...] = ()  # whether batch elements depend on their place
    heatmaps: tuple[Heatmap, ...] = ()  # where the errors lie
    decode_reports: tuple[DecodeReport, ...] = ()  # whether it decodes rightly, one report for each trace
    # Why decoding is not verified, for a model with a KV cache; else None
    not_decoded_because: str | None = None
    rows: dict[str, LatencyRow] = field(default_factory=dict)  # its times, by the name of the case

    @property
    def label(self) -> str:
        """The runtime, for people: two engines of one TensorRT differ by name only."""
        name = self.runtime.name
        return self.runner if self.runner.startswith(name) else f"{name} ({self.runner})"

    @property
    def verdicts(self) -> list[OutputVerdict]:
        """The verdicts on cases and on traces."""
        decoded = [verdict for report in self.decode_reports for verdict in report.verdicts]
        return [*(verdict for report in self.parity for verdict in report.verdicts), *decoded]

    @property
    def share(self) -> float | None:
        """The largest share of a budget that was used; None where an output had no number."""
        return judge.largest_share(self.verdicts)

    @property
    def outcome(self) -> Outcome:
        """That of all cases, traces and checks."""
        parts = [*(each.outcome for each in self.parity), *(each.outcome for each in self.decode_reports)]
        return Outcome.of([*parts, *(each.outcome for each in self.invariance if each.case)])

    @property
    def is_right(self) -> bool:
        """Whether it was judged, and everything is right: cases, decode steps, batch elements elsewhere."""
        return self.outcome is Outcome.PASSED

    @property
    def wrong_cases(self) -> list[str]:
        """Names of the cases that were run and have a wrong output."""
        verdicts = (verdict for report in self.parity for verdict in report.verdicts)
        return list(dict.fromkeys(v.case for v in verdicts if v.is_wrong and v.ran))


def evaluate(runtime: Runtime, plan: EvaluationPlan, on_step: OnName = silent) -> Evaluation:
    """Open a runtime, judge it, and time it where its answers are right.

    One that is wrong anywhere has no time at all: in a case, a decode step, or where a batch element stands.
    """
    accumulation = runtime.accumulation(plan.precision)  # before it occupies the child that measures this
    engine = runtime.engine_name
    with runtime.open() as runner:
        plan = replace(plan, precision=replace(plan.precision, accumulate=accumulation.type))
        heatmaps: list[Heatmap] = []
        cases, outside, parity = dict[CaseKind, list[GoldenCase]](), list[str](), list[ParityReport]()
        judged = dict[CaseKind, list[Future[list[OutputVerdict]]]]()

        def by_kind() -> Iterator[tuple[CaseKind, Sequence[GoldenCase]]]:
            nonlocal plan
            yield from (first := plan.cases).items()
            if plan.complete is not None:
                plan = plan.complete(plan)
                yield from ((kind, drawn) for kind, drawn in plan.cases.items() if kind not in first)

        last: Future[list[OutputVerdict]] | None = None
        for kind, given in by_kind():
            # The profiles of an engine may be narrower than the layer's axes.
            cases[kind], judged[kind] = [], []
            for case in given:
                if not admits(runner, case.inputs):
                    outside.append(case.name)
                    continue
                on_step(Step(runtime.name, case.name))
                cases[kind].append(case)
                # A case is judged while the next one is drawn, or runs.
                last = on_a_thread(_run(runtime, runner, case, plan, heatmaps), after=last)
                judged[kind].append(last)
                if kind is not CaseKind.GOLDEN or plan.complete is None:  # those are small
                    wait(judged[kind][:-1])  # no more than two cases are held
        for kind, futures in judged.items():
            verdicts = [verdict for each in futures for verdict in each.result()]
            if verdicts:
                about: dict[str, Any] = {"runtime": runner.name, "engine": engine, "cases": kind}
                about |= {"model": plan.spec.name, "precision": plan.precision, "accumulation": accumulation}
                parity.append(judge.parity_from_verdicts(verdicts, **about))
        checks: tuple[InvarianceCheck, ...] = ()
        if plan.invariance and runtime.family == TENSORRT:
            on_step(Step(runtime.name, "batch elements in other slots"))
            golden = cases.get(CaseKind.GOLDEN, ())
            found = invariance_from_runner(runner, golden, plan.spec, plan.precision)
            checks = tuple(structs.replace(check, engine=engine) for check in found)
        decoded: list[DecodeReport] = []

        def progress(trace: DecodeTrace, step: int) -> None:
            if step % _STEPS_REPORTED == 0:
                on_step(Step(runtime.name, f"{trace.name}, step {step} of {trace.steps}"))

        for trace in plan.traces:
            report = evaluate_trace(runner, trace, plan.spec, plan.precision, partial(progress, trace))
            if report is not None:
                decoded.append(replace(report, engine=engine))
            else:  # its calls are outside the engine's profiles
                outside.append(trace.name)
        why_not = None
        if not decoded and plan.spec.kv_cache is not None and plan.cases:  # else it is only timed
            planned = plan_trace(plan.spec)
            none = planned if isinstance(planned, str) else "the bundle has no trace"
            why_not = "its profiles take no trace" if plan.traces else none
        wrong = [verdict for report in parity for verdict in report.verdicts if verdict.is_wrong]
        wrong += [failure for report in decoded for failure in report.failures if failure.is_wrong]
        failures = [f"{each.case}/{each.output}: {each.problem}" for each in wrong]
        broken = [check for check in checks if check.outcome is Outcome.FAILED]
        failures += [f"{check.case}: {check.check}: {check.problem}" for check in broken]
        return Evaluation(
            runtime=runtime,
            runner=runner.name,
            titles={runner.name: runner.title or runner.name},
            cases=cases,
            outside=tuple(outside),
            parity=tuple(parity),
            invariance=checks,
            heatmaps=tuple(heatmaps),
            decode_reports=tuple(decoded),
            not_decoded_because=why_not,
            rows=(
                refused_rows(runtime, runner.name, plan.timed, failures[0])
                if failures
                else {case.name: _time(runtime, runner, case, plan, on_step) for case in plan.timed}
            ),
        )


def refused_rows(
    runtime: Runtime, runner: str, cases: Sequence[GoldenCase], problem: str
) -> dict[str, LatencyRow]:
    """The rows of a runtime that is wrong: how long a wrong answer takes is of no interest."""
    row = LatencyRow(name=runtime.name, runtime=runner, family=runtime.family)
    row = replace(row, refused=Reason(kind=Kind.WRONG_RESULT, got=problem))
    return {case.name: row for case in cases}


def _run(
    runtime: Runtime, runner: Runner, case: GoldenCase, plan: EvaluationPlan, heatmaps: list[Heatmap]
) -> Callable[[], list[OutputVerdict]]:
    """Run a case; what judges its results is returned."""
    try:
        got = runner.run(case.inputs)
    except DeployError as error:
        given = runtime.engine is not None or runtime.is_subject
        if not given and not isinstance(error, RuntimeCrash):
            raise
        # The engine was built for these shapes: not to run them is a verdict on it. So is a crash.
        return partial(judge.failed_to_run, case, error.in_one_line)
    case.baseline(plan.precision.accumulate)  # samples of it are drawn here
    about = {"runtime": runner.name, "engine": runtime.engine_name}
    return partial(_judge, about, case, got, plan, heatmaps)


def _judge(
    about: Mapping[str, Any],
    case: GoldenCase,
    got: Mapping[str, Any],
    plan: EvaluationPlan,
    heatmaps: list[Heatmap],
) -> list[OutputVerdict]:
    """The verdicts on a case, and a map of the usual case and of whatever is wrong; `about` whose it is."""
    to_heads = None if plan.projection is None else plan.projection.to_heads
    verdicts = judge.judge_case(case, got, plan.precision, to_heads=to_heads)
    # A cache may be wrong by its old entries alone: then there is no error to map.
    mapped = [v for v in verdicts if v.deviation and case.oracle[v.output].ndim in MAPPED_RANKS]
    names = [v.output for v in mapped if v.reason and v.reason.kind is Kind.OUT_OF_BUDGET]
    if not names and case.name in _MAPPED:
        names = [v.output for v in mapped if v.output == "output" and v.passed]
    entries, results, _ = judge.new_entries(case, got)
    for name in names:
        found = heatmap(about["runtime"], entries, name, results[name], plan.projection)
        note = "the entries of the cache that the call wrote" if name in case.cached else found.note
        heatmaps.append(structs.replace(found, note=note, engine=about["engine"]))
    return verdicts


def _time(
    runtime: Runtime, runner: Runner, case: GoldenCase, plan: EvaluationPlan, on_step: OnName
) -> LatencyRow:
    """The time of a case."""
    stage = f"latency of {runtime.name}"
    on_step(Step(stage, case.name))
    row = LatencyRow(name=runtime.name, runtime=runner.name, family=runtime.family)
    row = time_case(runner, case, row, plan)
    if row.timing is not None:  # reported at once: a later crash does not lose it
        on_step(Step(stage, f"{case.name} takes {row.timing.p50:.1f} µs"))
    return row


def evaluate_all(
    runtimes: Iterable[Runtime], plan: EvaluationPlan, on_step: OnName, *, strict: bool = False
) -> tuple[list[Evaluation], list[Mapping[str, LatencyRow]]]:
    """Evaluate runtimes, and their rows; of one that could not be opened they say why, unless `strict`."""
    evaluated, rows = list[Evaluation](), list[Mapping[str, LatencyRow]]()
    for runtime in runtimes:
        try:
            evaluated.append(evaluate(runtime, plan, on_step))
            rows.append(evaluated[-1].rows)
        except DeployError as error:
            if strict:
                raise
            row = LatencyRow(name=runtime.name, runtime=runtime.name, family=runtime.family)
            row = replace(row, refused=Reason(kind=Kind.NOT_TIMED, got=error.in_one_line))
            rows.append({case.name: row for case in plan.timed})
    return evaluated, rows
