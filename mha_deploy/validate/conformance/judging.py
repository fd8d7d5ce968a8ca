"""Is an answer what ONNX means, and if not, what was misread?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from mha_deploy.errors import DeployError
from mha_deploy.validate.budget import Budget, budget_from_eager
from mha_deploy.validate.conformance import oracle
from mha_deploy.validate.conformance.oracle import FIRST_ROW, LOWER_RIGHT, NOWHERE, Reading
from mha_deploy.validate.conformance.trial import Trial
from mha_deploy.validate.deviation import measure

Answer = np.ndarray | DeployError
"""What a runtime says to a trial: the output [B, S, Hq·D], or the error with which it refused."""

CONFORMS, WRONG, REFUSED, ABSENT = "conforms", "wrong", "refused", "absent"
_UNSEEN = "where no key is seen"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """How one runtime treats one case.

    Args:
        status: `conforms`, `wrong`, `refused`, or `absent` where the runtime is not here.
        detail: What is wrong, why it was refused, or what else is worth saying.
        error: ‖y − o‖ / ‖o‖ against the oracle, where there are finite numbers to compare.
        share: The largest share of the error budget that was used; over 1 is wrong.
    """

    status: str
    detail: str = ""
    error: float | None = None
    share: float | None = None

    def __str__(self) -> str:
        error = "" if self.status != WRONG or self.error is None else f" ({self.error:.2g})"
        return f"{self.status}{error}" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True, kw_only=True)
class _Right:
    """A result that ONNX allows, and what it shows of the runtime that gives it."""

    result: np.ndarray
    shows: str = ""


def judge_answer(trial: Trial, answer: Answer) -> Cell:
    """Compare an answer with the oracle, within the budget of a plain implementation's own error."""
    if isinstance(answer, DeployError):
        return Cell(status=REFUSED, detail=answer.in_one_line)
    problem = _problem_of_form(trial, answer)
    if problem is not None:
        return Cell(status=WRONG, detail=problem)
    got = oracle.split_heads(trial, answer.astype(np.float64))
    if not np.isfinite(got).all():
        return Cell(status=WRONG, detail=_not_finite(trial, got))
    rights, budget = _allowed(trial)
    for right in rights:
        deviation = measure(got, right.result)
        if not budget.exceeded_by(deviation):
            share = budget.share_used(deviation)
            return Cell(status=CONFORMS, detail=right.shows, error=deviation.relative_l2, share=share)
    deviation = measure(got, rights[0].result)
    share = budget.share_used(deviation)
    return Cell(status=WRONG, detail=_misread(trial, got, budget), error=deviation.relative_l2, share=share)


def _problem_of_form(trial: Trial, answer: np.ndarray) -> str | None:
    case, dtype = trial.case, trial.precision.numpy
    shape = (case.B, case.S, case.Hq * case.D)
    if answer.shape != shape:
        return f"shape {answer.shape}, not {shape}"
    return f"type {answer.dtype}, not {dtype}" if answer.dtype != dtype else None


# -- what is allowed -------------------------------------------------------------------------------


def _allowed(trial: Trial) -> tuple[list[_Right], Budget]:
    """The results that are right, the exact one first, and how far an answer may be from one."""
    exact, plain = oracle.exact(trial), oracle.rounded(trial)
    rights = [_Right(result=exact, shows=oracle.UPPER_LEFT if trial.case.diagnostic else "")]
    nearest = exact
    shifted = oracle.shifted_rows(trial)
    if shifted.any():
        rights = [_Right(result=exact, shows="keeps the scores under -1e4")]
        swallowed = np.where(shifted[..., None], oracle.average(trial), exact)
        if measure(plain, swallowed).relative_l2 < measure(plain, exact).relative_l2:
            # The formula itself, computed in this precision, adds the scores to -1e4 and loses them.
            rights.append(_Right(result=swallowed, shows="averages all keys under -1e4, by rounding"))
            nearest = swallowed
    return rights, budget_from_eager(plain, nearest, trial.precision)


# -- what went wrong -------------------------------------------------------------------------------


def _not_finite(trial: Trial, got: np.ndarray) -> str:
    bad = ~np.isfinite(got).all(axis=-1)
    word = "NaN" if np.isnan(got).any() else "infinity"
    if not (bad & ~oracle.closed_rows(trial)).any():
        return f"gives {word} {_UNSEEN}"
    return f"gives {word} in {int(bad.sum())} of {bad.size} rows"


def _misread(trial: Trial, got: np.ndarray, budget: Budget) -> str:
    """The misreading that explains the answer, else which measures are over the budget."""
    for words, result in _misreadings(trial, got):
        if not budget.exceeded_by(measure(got, result)):
            return words
    return f"out of budget: {', '.join(budget.exceeded_by(measure(got, oracle.exact(trial))))}"


def _misreadings(trial: Trial, got: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Results of the mistakes that runtimes make, in words."""
    exact, closed, shifted = oracle.exact(trial), oracle.closed_rows(trial), oracle.shifted_rows(trial)
    if closed.any():
        yield f"averages all keys {_UNSEEN}", np.where(closed[..., None], oracle.average(trial), exact)
        yield f"not zeros {_UNSEEN}", np.where(closed[..., None], got, exact)
    if shifted.any():
        yield "gives zeros under -1e4", np.where(shifted[..., None], 0.0, exact)
        yield "averages all keys under -1e4", np.where(shifted[..., None], oracle.average(trial), exact)
    for words, reading in _wrong_readings(trial):
        yield words, oracle.exact(trial, reading)


def _wrong_readings(trial: Trial) -> Iterator[tuple[str, Reading]]:
    case, right, mask = trial.case, oracle.as_written(trial), trial.arrays.get("mask")
    if case.is_causal:
        yield "causal starts in the lower right corner", replace(right, causal=LOWER_RIGHT)
        yield "causal is ignored", replace(right, causal=NOWHERE)
        yield "every query sees what the first one sees", replace(right, causal=FIRST_ROW)
    if mask is not None:
        yield "the mask is ignored", replace(right, mask=None)
    if mask is not None and mask.dtype == bool:
        yield "the mask is read upside down", replace(right, mask=~mask)
        yield "the boolean mask is added as 0 and 1", replace(right, mask=mask.astype(np.float64))
    elif mask is not None:
        yield "the additive mask is read as boolean", replace(right, mask=mask != 0)
        yield "only whether the mask is 0 counts", replace(right, mask=mask == 0)
    if case.Hq != case.Hkv:
        yield "query heads use the wrong key heads", replace(right, interleaved=True)
