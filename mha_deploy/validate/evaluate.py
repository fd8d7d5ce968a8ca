"""Run one runtime through everything it is to be judged on, with its runner opened once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mha_deploy.bundle.cases import GoldenCase
from mha_deploy.bundle.traces import DecodeTrace
from mha_deploy.errors import DeployError
from mha_deploy.metrics import (
    OutputVerdict,
    ParityReport,
    failed_to_run,
    judge_case,
    new_entries,
    parity_from_verdicts,
)
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import ModelSpec
from mha_deploy.runtime.child import RuntimeCrash
from mha_deploy.runtime.runner import Runner
from mha_deploy.runtime.timing import KernelTime, TimingPlan
from mha_deploy.validate.decode import DecodeReport, admits, evaluate_trace
from mha_deploy.validate.error_map import MAPPED_RANKS, Heatmap, Projection, heatmap
from mha_deploy.validate.invariance import InvarianceCheck, invariance_from_runner
from mha_deploy.validate.latency import WRONG_ANSWER, LatencyRow, time_case
from mha_deploy.validate.runtimes import TENSORRT, Runtime

OnStep = Callable[[str], None]

_STEPS_REPORTED = 64  # progress is reported every so many steps
_MAPPED = ("opt", "prefill")  # the usual cases, which are mapped also where they are right


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """What a runtime is to be judged on."""

    spec: ModelSpec  # the layer
    precision: Precision  # its precision, which sets the budgets
    cases: Mapping[str, Sequence[GoldenCase]]  # cases by kind: `golden`, `sweep`, `fresh`
    timed: Sequence[GoldenCase] = ()  # the cases to time it on
    invariance: bool = False  # whether batch elements must not depend on their place; on golden cases
    timing: TimingPlan = field(default_factory=TimingPlan)
    traces: Sequence[DecodeTrace] = ()  # tokens to decode, for a layer with a cache
    # Reports which kernels take the time; None where not requested
    kernels: Callable[[Runner, GoldenCase], tuple[KernelTime, ...]] | None = None
    # The output projection, which the map of errors is pulled back through
    projection: Projection | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What came out for one runtime."""

    runtime: Runtime  # what was run
    backend: str  # the runner's own name, with its version
    # The cases it was judged on, by kind
    cases: Mapping[str, Sequence[GoldenCase]] = field(default_factory=dict, repr=False)
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
        return self.backend if self.backend.startswith(name) else f"{name} ({self.backend})"

    @property
    def share(self) -> float | None:
        """The largest share of a budget that was used, where there is a number."""
        shares = [verdict.share for report in self.parity for verdict in report.verdicts]
        shares += [report.share for report in self.decode_reports]
        return max((share for share in shares if share is not None), default=None)

    @property
    def is_right(self) -> bool:
        """Whether everything that it was judged on is right."""
        return not self.failed_cases and all(report.passed for report in self.decode_reports)

    @property
    def failed_cases(self) -> list[str]:
        """Names of the cases with a wrong output, or with none."""
        return list(dict.fromkeys(v.case for report in self.parity for v in report.verdicts if not v.passed))

    @property
    def wrong_cases(self) -> list[str]:
        """Names of the cases that were run and have a wrong output."""
        failed = (v for report in self.parity for v in report.verdicts if not v.passed)
        return list(dict.fromkeys(verdict.case for verdict in failed if verdict.was_run))


def evaluate(runtime: Runtime, plan: EvaluationPlan, on_step: OnStep = lambda name: None) -> Evaluation:
    """Open a runtime, judge it, and time it where its answers are right.

    One that is wrong in any case has no time at the sizes of that case, and one that decodes wrongly none for
    single tokens.
    """
    with runtime.open() as runner:
        kind, _ = accumulation = runtime.accumulation(plan.precision)
        plan = replace(plan, precision=replace(plan.precision, accumulate=kind))
        heatmaps: list[Heatmap] = []
        cases, outside, parity = dict[str, list[GoldenCase]](), list[str](), list[ParityReport]()
        for kind, given in plan.cases.items():
            # The profiles of an engine may be narrower than the layer's axes.
            cases[kind], verdicts = [], list[OutputVerdict]()
            for case in given:
                if not admits(runner, case.inputs):
                    outside.append(case.name)
                    continue
                on_step(f"{runtime.name}: {case.name}")
                cases[kind].append(case)
                verdicts += _judged(runtime, runner, case, plan, heatmaps)
            if verdicts:
                report = parity_from_verdicts(
                    verdicts,
                    model=plan.spec.name,
                    precision=plan.precision,
                    backend=runner.name,
                    cases=kind,
                    accumulation=accumulation,
                )
                parity.append(report)
        checks: tuple[InvarianceCheck, ...] = ()
        if plan.invariance and runtime.family == TENSORRT:
            on_step(f"{runtime.name}: batch elements in other places")
            checks = invariance_from_runner(runner, cases.get("golden", ()), plan.spec, plan.precision)
        decoded: list[DecodeReport] = []
        for trace in plan.traces:

            def progress(step: int, trace: DecodeTrace = trace) -> None:
                if step % _STEPS_REPORTED == 0:
                    on_step(f"{runtime.name}: {trace.name}, step {step} of {trace.steps}")

            if found := evaluate_trace(runner, trace, plan.spec, plan.precision, progress):
                decoded.append(found)
            else:  # its calls are outside the engine's profiles
                outside.append(trace.name)
        why_not = None
        if not decoded and plan.spec.kv_cache is not None and plan.cases:  # else it is only timed
            why_not = "its profiles take no trace" if plan.traces else "the bundle has no trace"
        sizes = {case.name: case.sizes for given in cases.values() for case in given}
        failures = [(sizes[v.case], v) for report in parity for v in report.verdicts if v.is_wrong]
        if plan.spec.kv_cache is not None:
            token = {plan.spec.kv_cache.new: 1}
            failures += [(token, failure) for report in decoded for failure in report.failures]
        return Evaluation(
            runtime=runtime,
            backend=runner.name,
            cases=cases,
            outside=tuple(outside),
            parity=tuple(parity),
            invariance=checks,
            heatmaps=tuple(heatmaps),
            decode_reports=tuple(decoded),
            not_decoded_because=why_not,
            rows={case.name: _timed(runtime, runner, case, plan, failures, on_step) for case in plan.timed},
        )


def _judged(
    runtime: Runtime, runner: Runner, case: GoldenCase, plan: EvaluationPlan, heatmaps: list[Heatmap]
) -> list[OutputVerdict]:
    """The verdicts on a case, and a map of the usual case and of whatever is wrong."""
    try:
        got = runner.run(case.inputs)
    except DeployError as error:
        if runtime.engine is None and not isinstance(error, RuntimeCrash):
            raise
        # The engine was built for these shapes: not to run them is a verdict on it. So is a crash.
        return failed_to_run(case, error.in_one_line)
    to_heads = None if plan.projection is None else plan.projection.to_heads
    verdicts = judge_case(case, got, plan.precision, to_heads=to_heads)
    # A cache may be wrong by its old entries alone: then there is no error to map.
    mapped = [v for v in verdicts if v.deviation and case.oracle[v.output].ndim in MAPPED_RANKS]
    names = [v.output for v in mapped if v.deviation and v.budget and v.budget.exceeded_by(v.deviation)]
    if not names and case.name in _MAPPED:
        names = [v.output for v in mapped if v.output == "output" and v.passed]
    entries = new_entries(case, got)
    for name in names:
        found = heatmap(runner.name, entries.case, name, entries.got[name], plan.projection)
        note = "the entries of the cache that the call wrote" if name in case.cached else found.note
        heatmaps.append(replace(found, note=note))
    return verdicts


def _timed(
    runtime: Runtime,
    runner: Runner,
    case: GoldenCase,
    plan: EvaluationPlan,
    failures: Sequence[tuple[Mapping[str, int], OutputVerdict]],
    on_step: OnStep,
) -> LatencyRow:
    """The time of a case; none at sizes that a failure has."""
    on_step(f"latency of {runtime.name}: {case.name}")
    row = LatencyRow(name=runtime.name, backend=runner.name, family=runtime.family)
    for sizes, wrong in failures:
        if sizes.items() <= case.sizes.items():
            return replace(row, refused=f"{WRONG_ANSWER}: {wrong.case}/{wrong.output}: {wrong.problem}")
    row = time_case(runner, case, plan.precision, row, timing=plan.timing, kernels=plan.kernels)
    if row.timing is not None:  # reported at once: a later crash does not lose it
        on_step(f"latency of {runtime.name}: {case.name} takes {row.timing.p50:.1f} µs")
    return row


def refused_rows(runtime: Runtime, reason: str, cases: Sequence[GoldenCase]) -> dict[str, LatencyRow]:
    """Rows for a runtime that could not be opened."""
    row = LatencyRow(name=runtime.name, backend=runtime.name, family=runtime.family, refused=reason)
    return {case.name: row for case in cases}
