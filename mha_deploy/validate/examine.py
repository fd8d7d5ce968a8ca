"""Run one participant through everything it is to be judged on, with its runner opened once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mha_deploy.backends.runner import ProfiledRunner, Runner
from mha_deploy.backends.timing import KernelTime
from mha_deploy.errors import DeployError
from mha_deploy.golden import GoldenCase
from mha_deploy.precision import Precision
from mha_deploy.spec import AttentionSpec
from mha_deploy.trace import DecodeTrace
from mha_deploy.validate.growth import SteppingReport
from mha_deploy.validate.heatmap import Heatmap, Projection, heatmap
from mha_deploy.validate.invariance import InvarianceCheck, invariance_from_runner
from mha_deploy.validate.latency import LatencyRow, time_case
from mha_deploy.validate.parity import (
    OutputVerdict,
    ParityReport,
    failed_to_run,
    judge_case,
    parity_from_verdicts,
)
from mha_deploy.validate.participants import TENSORRT, Participant
from mha_deploy.validate.stepping import open_stepper, step_through

OnStep = Callable[[str], None]

_STEPS_TOLD = 64  # how often progress is told


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
        traces: Tokens to step through, for a layer with a cache.
        kernels: Says which kernels take the time; None where nobody asked.
        projection: The output projection, which the map of errors is pulled back through.
    """

    spec: AttentionSpec
    precision: Precision
    cases: Mapping[str, Sequence[GoldenCase]]
    timed: Sequence[GoldenCase] = ()
    invariance: bool = False
    samples: int = 200
    traces: Sequence[DecodeTrace] = ()
    kernels: Callable[[Runner, GoldenCase], tuple[KernelTime, ...]] | None = None
    projection: Projection | None = None


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What came out for one participant.

    Args:
        participant: Who it was.
        backend: The runner's own name, with its version.
        cases: The cases it was judged on, by kind.
        outside: Names of the cases that its profiles do not admit.
        parity: The verdicts, one report for each kind of cases.
        invariance: Whether rows cared about their place.
        heatmaps: Where the errors lie.
        stepping: Whether it decodes rightly, one report for each trace.
        rows: Its times, by the name of the case.
    """

    participant: Participant
    backend: str
    cases: Mapping[str, Sequence[GoldenCase]] = field(default_factory=dict, repr=False)
    outside: tuple[str, ...] = ()
    parity: tuple[ParityReport, ...] = ()
    invariance: tuple[InvarianceCheck, ...] = ()
    heatmaps: tuple[Heatmap, ...] = ()
    stepping: tuple[SteppingReport, ...] = ()
    rows: dict[str, LatencyRow] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Who it was, for people: two engines of one TensorRT differ by name only."""
        name = self.participant.name
        return self.backend if self.backend.startswith(name) else f"{name} ({self.backend})"

    @property
    def share(self) -> float | None:
        """The largest share of a budget that was used, where there is a number."""
        verdicts = [verdict for report in self.parity for verdict in report.verdicts]
        return max((verdict.share for verdict in verdicts if verdict.share is not None), default=None)

    @property
    def is_right(self) -> bool:
        """Whether everything that it was judged on is right."""
        return not self.failed_cases and all(report.passed for report in self.stepping)

    @property
    def failed_cases(self) -> list[str]:
        """Names of the cases with a wrong output."""
        failed = [verdict.case for report in self.parity for verdict in report.verdicts if not verdict.passed]
        return list(dict.fromkeys(failed))


def examine(participant: Participant, exam: Exam, on_step: OnStep = lambda name: None) -> Examination:
    """Open a participant, judge it, and time it where its answers are right."""
    with participant.open() as runner:
        return _Sitting(participant, runner, exam, on_step).examination()


class _Sitting:
    """One participant in one exam, its runner opened."""

    def __init__(self, participant: Participant, runner: Runner, exam: Exam, on_step: OnStep) -> None:
        self.participant, self.runner, self.exam, self.on_step = participant, runner, exam, on_step
        self.heatmaps: list[Heatmap] = []
        self.outside: list[str] = []

    def examination(self) -> Examination:
        exam = self.exam
        cases = {kind: self._admitted(given) for kind, given in exam.cases.items()}
        parity = [self._parity(kind, given) for kind, given in cases.items() if given]
        checks: tuple[InvarianceCheck, ...] = ()
        if exam.invariance and self.participant.family == TENSORRT:
            self.on_step(f"{self.participant.name}: rows in other places")
            golden = cases.get("golden", ())
            checks = invariance_from_runner(self.runner, golden, exam.spec, exam.precision)
        return Examination(
            participant=self.participant,
            backend=self.runner.name,
            cases=cases,
            outside=tuple(self.outside),
            parity=tuple(parity),
            invariance=checks,
            heatmaps=tuple(self.heatmaps),
            stepping=tuple(self._stepped(trace) for trace in exam.traces),
            rows={case.name: self._row(case) for case in exam.timed},
        )

    def _admitted(self, cases: Sequence[GoldenCase]) -> list[GoldenCase]:
        """The cases that the engine was built for: its profiles may be narrower than the layer's axes."""
        if not isinstance(self.runner, ProfiledRunner):
            return list(cases)
        admitted = [case for case in cases if self._admits(self.runner, case)]
        self.outside += [case.name for case in cases if all(case is not other for other in admitted)]
        return admitted

    @staticmethod
    def _admits(runner: ProfiledRunner, case: GoldenCase) -> bool:
        try:
            return bool(runner.profiles_for(case.inputs))
        except DeployError:  # other names or types than the layer's: running it will tell
            return True

    def _parity(self, kind: str, cases: Sequence[GoldenCase]) -> ParityReport:
        exam = self.exam
        return parity_from_verdicts(
            [verdict for case in cases for verdict in self._judged(case)],
            model=exam.spec.name,
            precision=exam.precision,
            backend=self.runner.name,
            cases=kind,
        )

    def _judged(self, case: GoldenCase) -> list[OutputVerdict]:
        self.on_step(f"{self.participant.name}: {case.name}")
        try:
            got = self.runner.run(case.inputs)
        except DeployError as error:
            if self.participant.engine is None:
                raise
            # The engine was built for these shapes: that it cannot run them is a verdict on it.
            return failed_to_run(case, error.in_one_line)
        verdicts = judge_case(case, got, self.exam.precision)
        wrong = [
            verdict.output for verdict in verdicts if not verdict.passed and verdict.deviation is not None
        ]
        # A map of the usual case, and of whatever is wrong.
        usual = [verdicts[0].output] if case.name == "opt" and verdicts[0].passed else []
        for name in wrong or usual:
            self.heatmaps.append(heatmap(self.runner.name, case, name, got[name], self.exam.projection))
        return verdicts

    def _stepped(self, trace: DecodeTrace) -> SteppingReport:
        """Prefill and single tokens, with the cache where the runtime keeps it best."""
        exam = self.exam

        def report(step: int) -> None:
            if step % _STEPS_TOLD == 0:
                self.on_step(f"{self.participant.name}: {trace.name}, step {step} of {trace.steps}")

        with open_stepper(self.runner, exam.spec, trace) as stepper:
            return step_through(stepper, trace, exam.spec, exam.precision, report)

    def _row(self, case: GoldenCase) -> LatencyRow:
        who = self.participant
        self.on_step(f"{who.name}: time {case.name}")
        row = LatencyRow(name=who.name, backend=self.runner.name, family=who.family)
        exam = self.exam
        return time_case(self.runner, case, exam.precision, row, samples=exam.samples, kernels=exam.kernels)


def refused_rows(participant: Participant, reason: str, cases: Sequence[GoldenCase]) -> dict[str, LatencyRow]:
    """Rows for somebody who could not be opened."""
    row = LatencyRow(
        name=participant.name, backend=participant.name, family=participant.family, refused=reason
    )
    return {case.name: row for case in cases}
