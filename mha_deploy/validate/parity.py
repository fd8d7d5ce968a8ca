"""Is the result right? A verdict for every output of every golden case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mha_deploy.backends.runner import Runner
from mha_deploy.golden import GoldenCase
from mha_deploy.precision import Precision, smallest_normal
from mha_deploy.validate.budget import FACTORS, Budget, budget_from_eager
from mha_deploy.validate.cache_parity import new_rows
from mha_deploy.validate.deviation import Deviation, measure

# How the problem of a case begins that gave no numbers to judge.
_NOT_RUN = "could not be run"

# How the problem of an output begins that any result of zeros would match.
NOT_VERIFIED = "not verified"
_ALL_ZERO = f"{NOT_VERIFIED}: the oracle is zero everywhere"
_REMEDY = "give real weights (--weights), or scale those that the factory makes"


@dataclass(frozen=True, kw_only=True)
class OutputVerdict:
    """The verdict on one output of one case.

    Args:
        case: Name of the golden case.
        sizes: Its axis sizes.
        output: Name of the output.
        problem: Why it failed; None if it passed.
        deviation: Its error, where names, types, shapes and values allow measuring one.
        budget: What the error may be.
    """

    case: str
    sizes: Mapping[str, int]
    output: str
    problem: str | None
    deviation: Deviation | None = None
    budget: Budget | None = None

    @property
    def passed(self) -> bool:
        """Whether the output is right."""
        return self.problem is None

    @property
    def was_run(self) -> bool:
        """Whether a result was judged: a runtime may give up on a case, and a case may verify nothing."""
        return self.problem is None or not self.problem.startswith((_NOT_RUN, NOT_VERIFIED))

    @property
    def is_wrong(self) -> bool:
        """Whether the output failed; one that is not verified has neither failed nor passed."""
        return self.problem is not None and not self.problem.startswith(NOT_VERIFIED)

    @property
    def share(self) -> float | None:
        """The largest share of its budget that the error uses; None where there is no number to compare."""
        return self.budget.share_used(self.deviation) if self.budget and self.deviation else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"passed": self.passed, **asdict(self), "share": self.share}


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """The verdict on a model in one runtime.

    Args:
        model: Name of the model.
        precision: Its precision.
        backend: The runtime, with its version.
        cases: Where the cases came from: `golden`, `sweep` or `fresh`.
        verdicts: One for every output of every case.
    """

    model: str
    precision: str
    backend: str
    verdicts: tuple[OutputVerdict, ...]
    cases: str = "golden"

    @property
    def passed(self) -> bool:
        """Whether there was something to check and all of it is right."""
        return bool(self.verdicts) and all(verdict.passed for verdict in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; see docs/report.md."""
        return {
            "model": self.model,
            "precision": self.precision,
            "backend": self.backend,
            "cases": self.cases,
            "passed": self.passed,
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
        }


def parity_from_runner(
    runner: Runner,
    cases: Iterable[GoldenCase],
    *,
    model: str,
    precision: Precision,
    on_case: Callable[[str], None] = lambda name: None,
) -> ParityReport:
    """Run every case and judge what comes out."""
    verdicts: list[OutputVerdict] = []
    for case in cases:
        on_case(case.name)
        verdicts += judge_case(case, runner.run(case.inputs), precision)
    return parity_from_verdicts(verdicts, model=model, precision=precision, backend=runner.name)


def parity_from_verdicts(
    verdicts: Iterable[OutputVerdict],
    *,
    model: str,
    precision: Precision,
    backend: str,
    cases: str = "golden",
) -> ParityReport:
    """Put verdicts together that were reached one by one.

    An oracle of zeros is right where every query of a case is masked: such a case passes if another one
    verifies the output.
    """
    verdicts = tuple(verdicts)
    verified = {verdict.output for verdict in verdicts if verdict.passed}
    judged = tuple(
        replace(each, problem=None) if each.output in verified and _is_all_zero(each) else each
        for each in verdicts
    )
    return ParityReport(model=model, precision=precision.name, backend=backend, verdicts=judged, cases=cases)


def _is_all_zero(verdict: OutputVerdict) -> bool:
    return verdict.problem is not None and verdict.problem.startswith(_ALL_ZERO)


def failed_to_run(case: GoldenCase, reason: str) -> list[OutputVerdict]:
    """The verdicts on a case that a runtime gave up on."""
    problem = f"{_NOT_RUN}: {reason}"
    return [
        OutputVerdict(case=case.name, sizes=case.sizes, output=name, problem=problem) for name in case.oracle
    ]


def judge_case(
    case: GoldenCase,
    got: Mapping[str, np.ndarray],
    precision: Precision,
    budgets: Mapping[str, Budget] | None = None,
) -> list[OutputVerdict]:
    """Judge the outputs of one case: names, then types, shapes, finite values, and error.

    A cache is judged by its new rows, and the old ones must be as they were.

    Args:
        case: What is true, and what the module gave.
        got: What is judged.
        precision: The precision of both.
        budgets: What the error of an output may be, where that is not to come from the case alone.
    """
    known, rows = budgets or {}, new_rows(case, got)
    verdicts = [
        _judge_output(rows.case, name, rows.got.get(name), precision, known.get(name))
        for name in sorted(set(case.oracle) | set(got))
    ]
    return [
        replace(verdict, problem=rows.spoiled[verdict.output]) if verdict.output in rows.spoiled else verdict
        for verdict in verdicts
    ]


def _judge_output(
    case: GoldenCase, name: str, got: np.ndarray | None, precision: Precision, budget: Budget | None
) -> OutputVerdict:
    problem = _problem_before_error(case, name, got)
    if problem is not None or got is None:
        return OutputVerdict(case=case.name, sizes=case.sizes, output=name, problem=problem)
    if got.dtype.kind in "iub":
        problem = _miscounted(case, name, got, precision)
    else:
        problem = _why_not_verified(case.oracle[name], case.eager[name])
    deviation = measure(got, case.oracle[name])
    budget = budget or budget_from_eager(case.eager[name], case.oracle[name], precision)
    exceeded = budget.exceeded_by(deviation) if got.dtype.kind not in "iub" else []
    return OutputVerdict(
        case=case.name,
        sizes=case.sizes,
        output=name,
        problem=f"out of budget: {', '.join(exceeded)}" if exceeded else problem,
        deviation=deviation,
        budget=budget,
    )


def _miscounted(case: GoldenCase, name: str, got: np.ndarray, precision: Precision) -> str | None:
    """Integers and booleans are right or wrong: the next token is not nearly the right one.

    Where rounding decides, as in an argmax, the module itself is wrong at times. As many times more may be.
    """
    oracle = case.oracle[name]
    wrong, own = int((got != oracle).sum()), int((case.eager[name] != oracle).sum())
    if wrong <= FACTORS[precision.name] * own:
        return None
    return f"{wrong} of {got.size} differ, and {own} do in the module itself"


def _why_not_verified(oracle: np.ndarray, eager: np.ndarray) -> str | None:
    """Why a comparison would show nothing: it is between zeros, or of numbers that the type does not have."""
    largest, smallest = float(np.abs(oracle).max(initial=0.0)), smallest_normal(eager.dtype)
    if not oracle.size:
        return None
    if largest == 0:
        return f"{_ALL_ZERO}; {_REMEDY}"
    if largest < smallest:
        return (
            f"{NOT_VERIFIED}: the oracle is at most {largest:.2g}, and the smallest normal number of "
            f"{eager.dtype} is {smallest:.2g}; {_REMEDY}"
        )
    if not eager.any():
        return (
            f"{NOT_VERIFIED}: the module itself gives zeros where the oracle reaches {largest:.2g}; {_REMEDY}"
        )
    return None


def _problem_before_error(case: GoldenCase, name: str, got: np.ndarray | None) -> str | None:
    if got is None:
        return "missing from the result"
    if name not in case.oracle:
        return "not an output of the model"
    eager = case.eager[name]
    if got.dtype != eager.dtype:
        return f"type {got.dtype}, not {eager.dtype}"
    if got.shape != eager.shape:
        return f"shape {got.shape}, not {eager.shape}"
    finite = np.isfinite(got.astype(np.float64))
    if not finite.all():
        first = tuple(int(i) for i in np.argwhere(~finite)[0])
        return f"{int((~finite).sum())} values are NaN or infinite, the first at {first}"
    return None
