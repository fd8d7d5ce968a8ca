"""The verdict on every output of a case: names, types, shapes, values, and the error within its budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from mha_deploy.bundle.cases import GoldenCase, entries_from, first_new_entries
from mha_deploy.metrics import EVERYWHERE, FACTORS, Budget, Deviation, ToHeads, budget_from_eager, measure
from mha_deploy.model.precision import Precision, smallest_normal

# -- A cache is judged by its new entries; those that were valid before must come out as they were --


def new_entries(
    case: GoldenCase, got: Mapping[str, np.ndarray]
) -> tuple[GoldenCase, dict[str, np.ndarray], dict[str, str]]:
    """A case and its results with the new entries [B, Hkv, S, D] in place of whole caches.

    And for each cache whose old entries came out changed, which. Results of another type or shape than the
    case's stay whole: the judge will say what is wrong with them.
    """
    oracle, eager, results, spoiled = dict(case.oracle), dict(case.eager), dict(got), {}
    for name, given in case.cached.items():
        after, own = got.get(name), case.eager.get(name)
        if name not in oracle or given not in case.inputs or after is None or own is None:
            continue
        if after.shape != own.shape or after.dtype != own.dtype:
            continue
        starts, S = first_new_entries(case.inputs, given), case.inputs["x"].shape[1]
        for b, start in enumerate(starts):
            same = case.inputs[given][b, :, :start] == after[b, :, :start]
            if name not in spoiled and not same.all():
                head, position, _ = (int(i) for i in np.unravel_index(int(np.argmin(same)), same.shape))
                place = f"batch element {b}, head {head}, position {position}"
                spoiled[name] = f"old entries were changed, the first in {place}"
        oracle[name], eager[name], results[name] = (
            entries_from(each, starts, S) for each in (oracle[name], own, after)
        )
    return replace(case, oracle=oracle, eager=eager), results, spoiled


# -- Is the result right? A verdict for every output of every golden case --------------------------

# How the problem of a case begins that gave no numbers to judge.
NOT_RUN = "could not be run"

# How the problem of an output begins that any result of zeros would match.
NOT_VERIFIED = "not verified"
_ALL_ZERO, _CONSTANT = "the oracle is zero everywhere", "the oracle is constant"
_REMEDY = "give real weights (--weights), or scale those that the factory makes"


@dataclass(frozen=True, kw_only=True)
class OutputVerdict:
    """The verdict on one output of one case."""

    case: str  # name of the golden case
    sizes: Mapping[str, int]  # its axis sizes
    output: str  # name of the output
    problem: str | None  # why it failed; None if it passed
    deviation: Deviation | None = None  # its error, where names, types, shapes and values allow measuring one
    budget: Budget | None = None  # what the error may be

    @property
    def passed(self) -> bool:
        """Whether the output is right."""
        return self.problem is None

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
        return {
            **{name: getattr(self, name) for name in ("passed", "case", "sizes", "output", "problem")},
            "deviation": self.deviation and asdict(self.deviation),
            "budget": self.budget and self.budget.limits,
            "share": self.share,
        }


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """The verdict on a model in one runtime."""

    model: str  # name of the model
    precision: str  # its precision
    backend: str  # the runtime, with its version
    verdicts: tuple[OutputVerdict, ...]  # one for every output of every case
    cases: str = "golden"  # where the cases came from: `golden`, `sweep`, `fresh`, `probe` or `layers`
    # The type that GEMMs are assumed to accumulate in, which sets the budget, and why
    accumulation: tuple[str, str] = ("fp32", "")

    @property
    def passed(self) -> bool:
        """Whether there was something to check and all of it is right."""
        return bool(self.verdicts) and all(verdict.passed for verdict in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; see docs/report.md."""
        return {
            **{name: getattr(self, name) for name in ("model", "precision", "backend", "cases", "passed")},
            "accumulation": dict(zip(("type", "why"), self.accumulation, strict=True)),
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
        }


def parity_from_verdicts(
    verdicts: Iterable[OutputVerdict], *, precision: Precision, **about: Any
) -> ParityReport:
    """Put verdicts together that were reached one by one; `about` are further fields of the report.

    An oracle of zeros is right where every query of a case is masked: such a case passes if another one
    verifies the output.
    """
    judged = list(verdicts)
    verified = {verdict.output for verdict in judged if verdict.passed}
    empty = tuple(f"{NOT_VERIFIED}: {reason}" for reason in (_ALL_ZERO, _CONSTANT))
    for index, each in enumerate(judged):
        if each.output in verified and (each.problem or "").startswith(empty):
            judged[index] = replace(each, problem=None)
    return ParityReport(verdicts=tuple(judged), precision=precision.name, **about)


def failed_to_run(case: GoldenCase, reason: str) -> list[OutputVerdict]:
    """The verdicts on a case that a runtime gave up on."""
    about: dict[str, Any] = {"case": case.name, "sizes": case.sizes, "problem": f"{NOT_RUN}: {reason}"}
    return [OutputVerdict(output=name, **about) for name in case.oracle]


def largest_share(verdicts: Iterable[OutputVerdict]) -> float | None:
    """The largest share of a budget that was used; None where an output had no number to compare."""
    shares = [verdict.share for verdict in verdicts]
    return max((share for share in shares if share is not None), default=None) if None not in shares else None


def same_bits(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    """Whether all outputs of one result are bit by bit those of another."""
    return all(array.tobytes() == other[name].tobytes() for name, array in one.items())


def judge_case(
    case: GoldenCase,
    got: Mapping[str, np.ndarray],
    precision: Precision,
    budgets: Mapping[str, Budget] | None = None,
    to_heads: Mapping[str, ToHeads] | None = None,
) -> list[OutputVerdict]:
    """Judge the outputs of one case: names, then types, shapes, finite values, and error.

    A cache is judged by its new entries, and the old ones must be as they were. `budgets` are given where
    they are not to come from the case alone; with `to_heads`, by output, every head is judged, too.
    """
    entries, results, spoiled = new_entries(case, got)
    # The factor for accumulation in FP16 has room for half of what an allowance is for.
    is_narrow = (precision.name, precision.accumulate) == ("fp16", "fp16")
    allowance, verdicts = max(1.0, case.allowance / (2 if is_narrow else 1)), []
    for name in sorted(set(case.oracle) | set(got)):
        verdict = OutputVerdict(case=case.name, sizes=case.sizes, output=name, problem=None)
        result = results.get(name)
        problem = _problem_before_error(entries, name, result)
        if problem is not None or result is None:
            verdicts.append(replace(verdict, problem=spoiled.get(name, problem)))
            continue
        oracle, eager = entries.oracle[name], entries.eager[name]
        budget = (budgets or {}).get(name)
        budget = budget or budget_from_eager(eager, oracle, precision, (to_heads or {}).get(name))
        if allowance != 1:
            limits = {key: allowance * limit for key, limit in budget.limits.items()}
            budget = Budget(**limits, noise=budget.noise)
        suspects = {mistake: changes[name] for mistake, changes in case.suspects.items() if name in changes}
        deviation = measure(result, oracle, budget.noise, suspects)
        if result.dtype.kind in "iub":
            # Integers and booleans are right or wrong: the next token is not nearly the right one. Where
            # rounding decides, as in an argmax, the module errs at times. As many times more may be wrong.
            wrong, own = int((result != oracle).sum()), int((eager != oracle).sum())
            if wrong > FACTORS[precision.name, precision.accumulate] * own:
                problem = f"{wrong} of {result.size} differ, and {own} do in the module itself"
        elif exceeded := budget.exceeded_by(deviation):
            problem = f"out of budget: {', '.join(exceeded)}"
            if deviation.local_at not in ("", EVERYWHERE):
                problem += f"; largest in: {deviation.local_at}"
        elif reason := _shows_nothing(oracle, eager):
            problem = f"{NOT_VERIFIED}: {reason}; {_REMEDY}"
        problem = spoiled.get(name, problem)
        verdicts.append(replace(verdict, problem=problem, deviation=deviation, budget=budget))
    return verdicts


def _shows_nothing(oracle: np.ndarray, eager: np.ndarray) -> str | None:
    """Why a comparison would show nothing: it is between zeros, or of numbers that the type does not have."""
    largest, smallest = float(np.abs(oracle).max(initial=0.0)), smallest_normal(eager.dtype)
    if not oracle.size:
        return None
    if largest == 0:
        return _ALL_ZERO
    if largest < smallest:
        least = f"the smallest normal number of {eager.dtype} is {smallest:.2g}"
        return f"the oracle is at most {largest:.2g}, and {least}"
    if not eager.any():
        return f"the module itself gives zeros where the oracle reaches {largest:.2g}"
    roundoff = float(ml_dtypes.finfo(eager.dtype).eps) / 2
    vectors = oracle.reshape(-1, oracle.shape[-1]) if oracle.ndim else oracle.reshape(1, 1)
    if vectors.size > 1 and np.ptp(vectors) <= roundoff * largest:
        return f"{_CONSTANT}, {largest:.2g} everywhere"
    if len(vectors) > 1 and vectors.shape[1] > 1 and (np.ptp(vectors, axis=0) <= roundoff * largest).all():
        return "the oracle is the same vector at every position"
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
