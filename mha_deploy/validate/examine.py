"""Run one participant through everything it is to be judged on, with its runner opened once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mha_deploy.backends.runner import Runner
from mha_deploy.errors import DeployError
from mha_deploy.golden import GoldenCase
from mha_deploy.precision import Precision
from mha_deploy.spec import AttentionSpec
from mha_deploy.validate.heatmap import Heatmap, Projection, heatmap
from mha_deploy.validate.invariance import InvarianceCheck, invariance_from_runner
from mha_deploy.validate.latency import KernelTime, LatencyRow, time_case
from mha_deploy.validate.parity import ParityReport, failed_to_run, judge_case, parity_from_verdicts
from mha_deploy.validate.participants import TENSORRT, Participant

OnStep = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Exam:
    """What a participant is to be judged on.

    Args:
        spec: The layer.
        precision: Its precision, which sets the budgets.
        cases: Cases by kind: `golden`, `sweep`, `fresh`.
        timed: The cases to time it on.
        invariance: Whether rows must not care about their place; on golden cases.
        samples: Samples of each timing.
        kernels: Says which kernels take the time; None where nobody asked.
        projection: The output projection, which the map of errors is pulled back through.
    """

    spec: AttentionSpec
    precision: Precision
    cases: Mapping[str, Sequence[GoldenCase]]
    timed: Sequence[GoldenCase] = ()
    invariance: bool = False
    samples: int = 200
    kernels: Callable[[Runner, GoldenCase], tuple[KernelTime, ...]] | None = None
    projection: Projection | None = None


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What came out for one participant."""

    participant: Participant
    backend: str
    device: str
    cases: Mapping[str, Sequence[GoldenCase]] = field(default_factory=dict, repr=False)
    parity: tuple[ParityReport, ...] = ()
    invariance: tuple[InvarianceCheck, ...] = ()
    heatmaps: tuple[Heatmap, ...] = ()
    rows: dict[str, LatencyRow] = field(default_factory=dict)

    @property
    def failed_cases(self) -> list[str]:
        """Names of the cases with a wrong output."""
        failed = [verdict.case for report in self.parity for verdict in report.verdicts if not verdict.passed]
        return list(dict.fromkeys(failed))


def examine(participant: Participant, exam: Exam, on_step: OnStep = lambda name: None) -> Examination:
    """Open a participant, judge it, and time it where its answers are right."""
    with participant.open() as runner:
        reports, maps = [], []
        for kind, cases in exam.cases.items():
            report, heat = _parity(participant, runner, kind, cases, exam, on_step)
            reports.append(report)
            maps += heat
        checks: tuple[InvarianceCheck, ...] = ()
        if exam.invariance and participant.family == TENSORRT:
            on_step(f"{participant.name}: rows in other places")
            checks = invariance_from_runner(runner, exam.cases.get("golden", ()), exam.spec, exam.precision)
        rows = {case.name: _row(participant, runner, case, exam, on_step) for case in exam.timed}
        return Examination(
            participant=participant,
            backend=runner.name,
            device=runner.device,
            cases=exam.cases,
            parity=tuple(reports),
            invariance=checks,
            heatmaps=tuple(maps),
            rows=rows,
        )


def _parity(
    participant: Participant,
    runner: Runner,
    kind: str,
    cases: Sequence[GoldenCase],
    exam: Exam,
    on_step: OnStep,
) -> tuple[ParityReport, list[Heatmap]]:
    verdicts, maps = [], []
    for case in cases:
        on_step(f"{participant.name}: {case.name}")
        try:
            got = runner.run(case.inputs)
        except DeployError as error:
            if participant.engine is None:
                raise
            # An engine was built for these shapes: that it cannot run them is a verdict on it.
            verdicts += failed_to_run(case, error.in_one_line)
            continue
        judged = judge_case(case, got, exam.precision)
        verdicts += judged
        wrong = [verdict for verdict in judged if not verdict.passed and verdict.deviation is not None]
        # A map of the usual case, and of whatever is wrong.
        for name in ["output"] if case.name == "opt" and not wrong else [verdict.output for verdict in wrong]:
            if name in got and name in case.oracle:
                maps.append(heatmap(runner.name, case, name, got[name], exam.projection))
    report = parity_from_verdicts(
        verdicts, model=exam.spec.name, precision=exam.precision, backend=runner.name, cases=kind
    )
    return report, maps


def _row(
    participant: Participant, runner: Runner, case: GoldenCase, exam: Exam, on_step: OnStep
) -> LatencyRow:
    on_step(f"{participant.name}: time {case.name}")
    row = LatencyRow(name=participant.name, backend=runner.name, family=participant.family)
    return time_case(runner, case, exam.precision, row, samples=exam.samples, kernels=exam.kernels)


def refused_rows(participant: Participant, reason: str, cases: Sequence[GoldenCase]) -> dict[str, LatencyRow]:
    """Rows for somebody who could not be opened."""
    row = LatencyRow(
        name=participant.name, backend=participant.name, family=participant.family, refused=reason
    )
    return {case.name: row for case in cases}
