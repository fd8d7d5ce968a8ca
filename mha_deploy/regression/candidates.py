"""Candidates for the precision of an engine: which are right, how fast and how fused, and the best one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mha_deploy.engine.engine import Engine, reasons_not_to_run
from mha_deploy.errors import DeployError
from mha_deploy.report.table import Cell, RawRow, Table, number, share_cell, table
from mha_deploy.text import error as error_text
from mha_deploy.validation.verdict import Validation

NEAR = 1.05
"""Latencies within this factor of the fastest count as equal; the smaller error decides."""


@dataclass(frozen=True, kw_only=True)
class PrecisionTrial:
    """One candidate and its result."""

    name: str  # the precision, and the accumulation of the plugin where it is used
    precision: str
    refused: str = ""  # why; empty where it is right
    share: float | None = None  # largest share of its error budget
    error: float | None = None  # largest relative L2 error against the FP64 oracle
    p50: float | None = None  # of the first point that was timed, µs
    fused: tuple[int, int] | None = None  # attentions that are fused, of how many
    ran: bool = False  # else the errors are those of its graph

    @property
    def unfused(self) -> int:
        """How many attentions are not fused."""
        return 0 if self.fused is None else self.fused[1] - self.fused[0]

    def beats(self, other: PrecisionTrial) -> bool:
        """Whether it is nowhere worse than another candidate, and better in something."""
        mine, theirs = ((each.unfused, each.error or 0.0, each.p50 or 0.0) for each in (self, other))
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def judge_trial(name: str, precision: str, engine: Engine, report: Validation) -> PrecisionTrial:
    """The result of a candidate from the validation of its bundle."""
    stem, found = engine.path.stem, report.evaluations
    mine = [each for each in found if each.runtime.engine is not None and each.runtime.name == stem]
    judged, refused = mine or [each for each in found if each.runtime.engine is None], ""
    if not mine and not reasons_not_to_run(engine):
        refused = "the engine fits this machine and did not run"
    elif not judged or not all(each.is_right for each in judged):
        refused = "wrong results" if judged else "nothing was judged"
    rows = [row for point in report.points for row in point.rows if row.name == stem]
    verdicts = [verdict for each in judged for run in each.parity for verdict in run.verdicts]
    errors = [verdict.deviation.relative_l2 for verdict in verdicts if verdict.deviation is not None]
    return PrecisionTrial(
        name=name,
        precision=precision,
        refused=refused,
        share=max((each.share for each in judged if each.share is not None), default=None),
        error=max(errors, default=None),
        p50=next((row.timing.p50 for row in rows if row.timing is not None), None),
        fused=engine.manifest.fused_count,
        ran=bool(mine),
    )


def choose(trials: Sequence[PrecisionTrial]) -> tuple[PrecisionTrial, str]:
    """The candidate to keep, and why."""
    right = [trial for trial in trials if not trial.refused]
    if not right:
        got = "; ".join(f"{trial.name}: {trial.refused}" for trial in trials) or "no candidate"
        hint = "--precision fp32, or `mha-deploy bisect` on one of them"
        raise DeployError("No candidate is right.", got=got, hint=hint)
    quickest = min((trial.p50 for trial in right if trial.p50 is not None), default=None)
    near, why = right, "no latency was measured: the most fused, then the smallest error"
    if quickest is not None:
        near = [trial for trial in right if trial.p50 is not None and trial.p50 <= NEAR * quickest]
        alike = f"the smallest error of {len(near)} candidates within {NEAR - 1:.0%} of the fastest"
        why = alike if len(near) > 1 else "the fastest"
    return min(near, key=lambda trial: (trial.unfused, trial.error or 0.0)), why


def candidates_table(trials: Sequence[PrecisionTrial], chosen: PrecisionTrial) -> Table:
    """Every candidate: fusion, error and latency; which are on the Pareto front, and which was chosen."""
    right = [trial for trial in trials if not trial.refused]
    rows: list[RawRow] = []
    for trial in trials:
        front = not trial.refused and not any(other.beats(trial) for other in right)
        status = Cell(text="right", status="good")
        if trial.refused:
            status = Cell(text="refused", status="bad", note=trial.refused)
        elif not trial.ran:
            status = Cell(text="graph right, not run", status="doubt")
        name = Cell(text=trial.name, status="best" if trial == chosen else "")
        fused = None if trial.fused is None else f"{trial.fused[0]}/{trial.fused[1]}"
        error, share = number(trial.error, error_text), share_cell(trial.share, failed=bool(trial.refused))
        why = "yes" if trial == chosen else trial.refused
        rows.append((name, status, fused, error, share, number(trial.p50), "yes" if front else None, why))
    figures = ("fused", "#relative L2", "#budget used|used", "#p50 µs", "Pareto", "chosen")
    return table("Candidates for the precision", ("candidate", "verdict", *figures), rows)
