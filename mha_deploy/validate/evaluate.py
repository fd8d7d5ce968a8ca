"""Run one runtime through everything it is to be judged on, with its runner opened once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

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
from mha_deploy.runtime.timing import KernelTime
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
    """What a runtime is to be judged on.

    Args:
        spec: The layer.
        precision: Its precision, which sets the budgets.
        cases: Cases by kind: `golden`, `sweep`, `fresh`.
        timed: The cases to time it on.
        invariance: Whether rows must not care about their place; on golden cases.
        samples: Samples of each timing.
        traces: Tokens to step through, for a layer with a cache.
        kernels: Reports which kernels take the time; None where not requested.
        projection: The output projection, which the map of errors is pulled back through.
    """

    spec: ModelSpec
    precision: Precision
    cases: Mapping[str, Sequence[GoldenCase]]
    timed: Sequence[GoldenCase] = ()
    invariance: bool = False
    samples: int = 200
    traces: Sequence[DecodeTrace] = ()
    kernels: Callable[[Runner, GoldenCase], tuple[KernelTime, ...]] | None = None
    projection: Projection | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What came out for one runtime.

    Args:
        runtime: Who it was.
        backend: The runner's own name, with its version.
        cases: The cases it was judged on, by kind.
        outside: Names of the cases and traces that its profiles do not admit.
        parity: The verdicts, one report for each kind of cases.
        invariance: Whether rows cared about their place.
        heatmaps: Where the errors lie.
        decode_reports: Whether it decodes rightly, one report for each trace.
        not_decoded_because: Why decoding is not verified, for a model with a KV cache; else None.
        rows: Its times, by the name of the case.
    """

    runtime: Runtime
    backend: str
    cases: Mapping[str, Sequence[GoldenCase]] = field(default_factory=dict, repr=False)
    outside: tuple[str, ...] = ()
    parity: tuple[ParityReport, ...] = ()
    invariance: tuple[InvarianceCheck, ...] = ()
    heatmaps: tuple[Heatmap, ...] = ()
    decode_reports: tuple[DecodeReport, ...] = ()
    not_decoded_because: str | None = None
    rows: dict[str, LatencyRow] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Who it was, for people: two engines of one TensorRT differ by name only."""
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
        return list(dict.fromkeys(verdict.case for verdict in self._failures))

    @property
    def wrong_cases(self) -> list[str]:
        """Names of the cases that were run and have a wrong output."""
        return list(dict.fromkeys(verdict.case for verdict in self._failures if verdict.was_run))

    @property
    def _failures(self) -> list[OutputVerdict]:
        return [verdict for report in self.parity for verdict in report.verdicts if not verdict.passed]


def evaluate(runtime: Runtime, plan: EvaluationPlan, on_step: OnStep = lambda name: None) -> Evaluation:
    """Open a runtime, judge it, and time it where its answers are right.

    One that decodes wrongly has no time for single tokens.
    """
    kind, _ = runtime.accumulation(plan.precision)
    plan = replace(plan, precision=replace(plan.precision, accumulate=kind))
    with runtime.open() as runner:
        return _EvaluationRun(runtime, runner, plan, on_step).evaluation()


class _EvaluationRun:
    """One runtime in one plan, its runner opened."""

    def __init__(self, runtime: Runtime, runner: Runner, plan: EvaluationPlan, on_step: OnStep) -> None:
        self.runtime, self.runner, self.plan, self.on_step = runtime, runner, plan, on_step
        self.heatmaps: list[Heatmap] = []
        self.outside: list[str] = []

    def evaluation(self) -> Evaluation:
        plan = self.plan
        cases = {kind: self._admitted(given) for kind, given in plan.cases.items()}
        parity = [self._parity(kind, given) for kind, given in cases.items() if given]
        checks: tuple[InvarianceCheck, ...] = ()
        if plan.invariance and self.runtime.family == TENSORRT:
            self.on_step(f"{self.runtime.name}: rows in other places")
            golden = cases.get("golden", ())
            checks = invariance_from_runner(self.runner, golden, plan.spec, plan.precision)
        decode_reports = [report for trace in plan.traces if (report := self._stepped(trace))]
        return Evaluation(
            runtime=self.runtime,
            backend=self.runner.name,
            cases=cases,
            outside=tuple(self.outside),
            parity=tuple(parity),
            invariance=checks,
            heatmaps=tuple(self.heatmaps),
            decode_reports=tuple(decode_reports),
            not_decoded_because=None if decode_reports else self._why_unstepped(),
            rows={case.name: self._row(case, decode_reports) for case in plan.timed},
        )

    def _admitted(self, cases: Sequence[GoldenCase]) -> list[GoldenCase]:
        """The cases that the engine was built for: its profiles may be narrower than the layer's axes."""
        admitted = [case for case in cases if admits(self.runner, case.inputs)]
        self.outside += [case.name for case in cases if all(case is not other for other in admitted)]
        return admitted

    def _parity(self, kind: str, cases: Sequence[GoldenCase]) -> ParityReport:
        plan = self.plan
        return parity_from_verdicts(
            [verdict for case in cases for verdict in self._judged(case)],
            model=plan.spec.name,
            precision=plan.precision,
            backend=self.runner.name,
            cases=kind,
            accumulation=self.runtime.accumulation(plan.precision),
        )

    def _judged(self, case: GoldenCase) -> list[OutputVerdict]:
        self.on_step(f"{self.runtime.name}: {case.name}")
        try:
            got = self.runner.run(case.inputs)
        except DeployError as error:
            if self.runtime.engine is None and not isinstance(error, RuntimeCrash):
                raise
            # The engine was built for these shapes: not to run them is a verdict on it. So is a crash.
            return failed_to_run(case, error.in_one_line)
        verdicts = judge_case(case, got, self.plan.precision)
        self._map(case, got, verdicts)
        return verdicts

    def _map(self, case: GoldenCase, got: Mapping[str, np.ndarray], verdicts: list[OutputVerdict]) -> None:
        """A map of the usual case, and of whatever is wrong; of a cache, the rows that the call wrote."""
        names = [verdict.output for verdict in verdicts if _is_out_of_budget(verdict)]
        names = [name for name in names if case.oracle[name].ndim in MAPPED_RANKS]
        if not names and case.name in _MAPPED:
            names = [each.output for each in verdicts if each.output == "output" and each.passed]
            names = [name for name in names if case.oracle[name].ndim in MAPPED_RANKS]
        if not names:
            return
        rows = new_entries(case, got)
        for name in names:
            found = heatmap(self.runner.name, rows.case, name, rows.got[name], self.plan.projection)
            note = "the rows of the cache that the call wrote" if name in case.cached else found.note
            self.heatmaps.append(replace(found, note=note))

    def _stepped(self, trace: DecodeTrace) -> DecodeReport | None:
        """Prefill and single tokens; None where they are outside the engine's profiles."""
        plan = self.plan

        def report(step: int) -> None:
            if step % _STEPS_REPORTED == 0:
                self.on_step(f"{self.runtime.name}: {trace.name}, step {step} of {trace.steps}")

        found = evaluate_trace(self.runner, trace, plan.spec, plan.precision, report)
        if found is None:
            self.outside.append(trace.name)
        return found

    def _why_unstepped(self) -> str | None:
        """Why there is no verdict on decoding; None for a layer that does not, or that is only timed."""
        if self.plan.spec.kv_cache is None or not self.plan.cases:
            return None
        return "its profiles take no trace" if self.plan.traces else "the bundle has no trace"

    def _row(self, case: GoldenCase, decode_reports: Sequence[DecodeReport]) -> LatencyRow:
        runtime, plan = self.runtime, self.plan
        self.on_step(f"latency of {runtime.name}: {case.name}")
        row = LatencyRow(name=runtime.name, backend=self.runner.name, family=runtime.family)
        wrong = [failure for report in decode_reports for failure in report.failures]
        cache = plan.spec.kv_cache
        if wrong and cache is not None and case.sizes[cache.new] == 1:
            first = wrong[0]
            return replace(row, refused=f"{WRONG_ANSWER}: {first.case}/{first.output}: {first.problem}")
        row = time_case(self.runner, case, plan.precision, row, samples=plan.samples, kernels=plan.kernels)
        if row.timing is not None:  # reported at once: a later crash does not lose it
            self.on_step(f"latency of {runtime.name}: {case.name} takes {row.timing.p50:.1f} µs")
        return row


def _is_out_of_budget(verdict: OutputVerdict) -> bool:
    """Whether there is an error to map; a cache may be wrong by its old rows alone."""
    deviation, budget = verdict.deviation, verdict.budget
    return deviation is not None and budget is not None and bool(budget.exceeded_by(deviation))


def refused_rows(runtime: Runtime, reason: str, cases: Sequence[GoldenCase]) -> dict[str, LatencyRow]:
    """Rows for a runtime that could not be opened."""
    row = LatencyRow(name=runtime.name, backend=runtime.name, family=runtime.family, refused=reason)
    return {case.name: row for case in cases}
