"""The verdict on every output of a case: names, types, shapes, values, and the error within its budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import astuple, replace
from typing import Annotated, Any

import ml_dtypes
import numpy as np
from msgspec import Meta, Struct, structs

from mha_deploy.bundle.cases import GoldenCase, entries_from, first_new_entries
from mha_deploy.bundle.sizes import is_mask
from mha_deploy.metrics import EVERYWHERE, Budget, Deviation, ToHeads, budget_from_samples, measure
from mha_deploy.model.precision import Precision, smallest_normal
from mha_deploy.status import EMPTY_ORACLE, CaseKind, Kind, Outcome, Reason, derive, means
from mha_deploy.text import reason_text

# -- A cache is judged by its new entries; those that were valid before must come out as they were --


def new_entries(
    case: GoldenCase, got: Mapping[str, np.ndarray]
) -> tuple[GoldenCase, dict[str, np.ndarray], dict[str, Reason]]:
    """A case and its results with the new entries [B, Hkv, S, D] in place of whole caches.

    And for each cache whose old entries came out changed, which. Results of another type or shape than the
    case's stay whole: the judge will say what is wrong with them.
    """
    oracle, eager, results = dict(case.oracle), dict(case.eager), dict(got)
    spoiled: dict[str, Reason] = {}
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
                spoiled[name] = Reason(kind=Kind.OLD_ENTRIES, where=place, index=(b, head, position))
        oracle[name], eager[name], results[name] = (
            entries_from(each, starts, S) for each in (oracle[name], own, after)
        )
    return replace(case, oracle=case.oracle.map(lambda _: oracle), eager=eager), results, spoiled


# -- Is the result right? A verdict for every output of every golden case --------------------------


Share = Annotated[float, Meta(ge=0)]


class OutputVerdict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The verdict on one output of one case."""

    case: Annotated[str, means("name of the case")]
    sizes: Annotated[dict[str, int], means("axis sizes")]
    output: Annotated[str, means("name of the output")]
    outcome: Annotated[Outcome, means("whether it is right")]
    reason: Annotated[
        Reason | None,
        means("why it failed or is not verified, as in `verdict.findings[]`; null if it passed"),
    ] = None
    deviation: Annotated[
        Deviation | None,
        means("the error; null if none was measured (name, type, shape, values that are not finite)"),
    ] = None
    budget: Annotated[
        dict[str, float | None] | None,
        means(
            "what the error may be, by the measures of `deviation`; null if nothing was "
            "measured, and for a measure that is not judged"
        ),
    ] = None
    share: Annotated[
        Share | None, means("largest share of the budget used, above 1 is too much; null if not finite")
    ] = None

    def __post_init__(self) -> None:
        if self.passed is not (self.reason is None) or (self.passed and (self.share or 0.0) > 1):
            raise ValueError(f"{self.case}/{self.output}: the outcome contradicts its reason or its error")

    @property
    def passed(self) -> bool:
        """Whether the output is right."""
        return self.outcome is Outcome.PASSED

    @property
    def is_wrong(self) -> bool:
        """Whether the output failed; one that is not verified has neither failed nor passed."""
        return self.outcome is Outcome.FAILED

    @property
    def ran(self) -> bool:
        """Whether the runtime gave a result at all."""
        return self.reason is None or self.reason.kind is not Kind.DID_NOT_RUN

    @property
    def problem(self) -> str | None:
        """Why it failed or is not verified, for people; None if it passed."""
        return None if self.reason is None else reason_text(self.reason)


class Accumulation(Struct, frozen=True, forbid_unknown_fields=True):
    """The type that GEMMs are assumed to accumulate in, which sets the budget, and why."""

    type: Annotated[str, means("`fp16` or `fp32`: what GEMMs are assumed to accumulate in")] = "fp32"
    why: Annotated[str, means("how that is known; may be empty")] = ""

    @classmethod
    def of_wide(cls, precision: Precision) -> Accumulation:
        """That of any precision but FP16."""
        return cls("fp32", f"no kernel accumulates {precision.name} in fewer bits")


class ParityReport(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The verdict on a model in one runtime."""

    model: Annotated[str, means("name of the model")]
    precision: Annotated[str, means("precision of the graph")]
    runtime: Annotated[str, means("the runtime with its version")]
    engine: Annotated[
        str | None, means("name of the engine in the bundle, as in `engines`; null for anything else")
    ] = None
    cases: Annotated[
        CaseKind,
        means(
            "which inputs; `probe`: large tokens at the edges of masks, windows and caches; "
            "`layers`: every attention by itself; `served`: golden cases or prompts under load"
        ),
    ] = CaseKind.GOLDEN
    outcome: Annotated[Outcome, means("the outcome of all verdicts together")] = Outcome.NOT_VERIFIED
    accumulation: Annotated[Accumulation, means("what the budget assumes")] = Accumulation()
    verdicts: Annotated[tuple[OutputVerdict, ...], means("one for every output of every case")]
    clients: Annotated[
        int | None, means("clients that sent requests at the same time; null without a server")
    ] = None

    def __post_init__(self) -> None:
        derive(self, outcome=Outcome.of(verdict.outcome for verdict in self.verdicts))

    def __repr__(self) -> str:
        right = sum(each.outcome is Outcome.PASSED for each in self.verdicts)
        return f"<ParityReport {self.outcome}: {right}/{len(self.verdicts)} outputs in {self.runtime}>"

    @property
    def passed(self) -> bool:
        """Whether there was something to check and all of it is right."""
        return self.outcome is Outcome.PASSED


def parity_from_verdicts(
    verdicts: Iterable[OutputVerdict], *, precision: Precision, **about: Any
) -> ParityReport:
    """Put verdicts together that were reached one by one; `about` are further fields of the report.

    An oracle of zeros is right where every query of a case is masked, and one that repeats where there is one
    key: such a case passes if another one verifies the output, with more keys in place of one.
    """
    judged = list(verdicts)
    verified = [verdict for verdict in judged if verdict.passed]
    for index, each in enumerate(judged):
        if each.reason is None or each.reason.kind not in EMPTY_ORACLE:
            continue
        others = [other.sizes for other in verified if other.output == each.output]
        if each.reason.kind is Kind.ORACLE_OF_ONE_KEY:
            single = each.reason.names
            others = [sizes for sizes in others if any(sizes.get(axis, 1) > 1 for axis in single)]
        if others:
            judged[index] = structs.replace(each, outcome=Outcome.PASSED, reason=None)
    return ParityReport(verdicts=tuple(judged), precision=precision.name, **about)


def failed_to_run(case: GoldenCase, message: str) -> list[OutputVerdict]:
    """The verdicts on a case that a runtime gave up on."""
    reason = Reason(kind=Kind.DID_NOT_RUN, got=message)
    return [
        OutputVerdict(
            output=name, outcome=Outcome.FAILED, case=case.name, sizes=dict(case.sizes), reason=reason
        )
        for name in case.oracle
    ]


def largest_share(verdicts: Iterable[OutputVerdict]) -> float | None:
    """The largest share of a budget that was used; None where an output had no number to compare."""
    return largest_number(verdict.share for verdict in verdicts)


def largest_number(shares: Iterable[float | None]) -> float | None:
    """The largest of the shares of several outputs; None where one of them has no number."""
    known = list(shares)
    return max((share for share in known if share is not None), default=None) if None not in known else None


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
    baseline, verdicts = case.baseline(precision.accumulate), list[OutputVerdict]()
    for name in sorted(set(case.oracle) | set(got)):
        about: dict[str, Any] = {"case": case.name, "sizes": dict(case.sizes), "output": name}
        result = results.get(name)
        reason = _wrong_before_error(entries, name, result)
        if reason is not None or result is None:
            reason = spoiled.get(name, reason)
            verdicts.append(OutputVerdict(outcome=Outcome.FAILED, reason=reason, **about))
            continue
        oracle, eager = entries.oracle[name], entries.eager[name]
        budget, samples = (budgets or {}).get(name), baseline.samples[name]
        if budget is None:
            heads = (to_heads or {}).get(name)
            budget = budget_from_samples(samples, oracle, precision, baseline.branches, heads)
        suspects = {
            mistake: (each.changes[name], each.chances.get(precision.accumulate, {}).get(name), each.excess)
            for mistake, each in case.suspects.items()
            if name in each.changes
        }
        deviation = measure(result, oracle, budget.spread, suspects)
        limits: dict[str, float | None] | None = None
        if is_discrete := result.dtype.kind in "iub":
            # Integers and booleans are right or wrong: the next token is not nearly the right one. Where
            # rounding decides, as in an argmax, what the samples have is right as well.
            wrong = int(((result != oracle) & (result != samples).all(0)).sum())
            share = math.inf if wrong else 0.0
            if wrong:
                counts = {"wrong": wrong, "of": result.size, "samples": len(samples)}
                reason = Reason(kind=Kind.DIFFERENT_VALUES, numbers=counts)
        else:
            share = budget.share_used(deviation)
            limits = {key: each if math.isfinite(each) else None for key, each in budget.limits.items()}
            if exceeded := budget.exceeded_by(deviation):
                place = deviation.local_at if deviation.local_at not in ("", EVERYWHERE) else None
                reason = Reason(kind=Kind.OUT_OF_BUDGET, names=tuple(exceeded), where=place)
        reason, outcome = spoiled.get(name, reason), Outcome.PASSED
        if reason is not None:
            outcome = Outcome.FAILED
        elif not is_discrete and (reason := _shows_nothing(oracle, eager)) is not None:
            outcome = Outcome.NOT_VERIFIED
            if reason.kind is Kind.ORACLE_REPEATS and (single := _single(case)):
                counted = ", ".join(f"{axis} = 1" for axis in single)
                reason = Reason(kind=Kind.ORACLE_OF_ONE_KEY, got=counted, names=single)
        verdicts.append(
            OutputVerdict(
                outcome=outcome,
                reason=reason,
                deviation=deviation if all(map(_is_finite, astuple(deviation))) else None,
                budget=limits,
                share=share if math.isfinite(share) else None,
                **about,
            )
        )
    return verdicts


def _single(case: GoldenCase) -> tuple[str, ...]:
    """The axes of one entry, any of which may count the keys: every query of a single key has its value."""
    return tuple(axis for axis, size in case.sizes.items() if size == 1 and axis != case.batch)


def _is_finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _shows_nothing(oracle: np.ndarray, eager: np.ndarray) -> Reason | None:
    """Why a comparison would show nothing: it is between zeros, or of numbers that the type does not have."""
    largest, smallest = float(np.abs(oracle).max(initial=0.0)), smallest_normal(eager.dtype)
    numbers = {"largest": largest}
    if not oracle.size:
        return None
    if largest == 0:
        return Reason(kind=Kind.ORACLE_ZERO)
    if largest < smallest:
        numbers["smallest_normal"] = smallest
        return Reason(kind=Kind.ORACLE_SUBNORMAL, got=str(eager.dtype), numbers=numbers)
    if not eager.any():
        return Reason(kind=Kind.MODULE_ZERO, numbers=numbers)
    roundoff = float(ml_dtypes.finfo(eager.dtype).eps) / 2
    vectors = oracle.reshape(-1, oracle.shape[-1]) if oracle.ndim else oracle.reshape(1, 1)
    if vectors.size > 1 and np.ptp(vectors) <= roundoff * largest:
        return Reason(kind=Kind.ORACLE_CONSTANT, numbers=numbers)
    if len(vectors) > 1 and vectors.shape[1] > 1 and (np.ptp(vectors, axis=0) <= roundoff * largest).all():
        return Reason(kind=Kind.ORACLE_REPEATS)
    return None


def _wrong_before_error(case: GoldenCase, name: str, got: np.ndarray | None) -> Reason | None:
    if got is None:
        return Reason(kind=Kind.MISSING)
    if name not in case.oracle:
        return Reason(kind=Kind.UNEXPECTED)
    eager = case.eager[name]
    if got.dtype != eager.dtype:
        return Reason(kind=Kind.TYPE, got=str(got.dtype), wanted=str(eager.dtype))
    if got.shape != eager.shape:
        return Reason(kind=Kind.SHAPE, got=str(got.shape), wanted=str(eager.shape))
    finite = np.isfinite(got.astype(np.float64))
    if not finite.all():
        first, count = tuple(int(i) for i in np.argwhere(~finite)[0]), int((~finite).sum())
        masks, value = _masks_where(~finite, case.inputs)
        return Reason(kind=Kind.NOT_FINITE, index=first, numbers={"count": count}, names=masks, got=value)
    return None


def _masks_where(wrong: np.ndarray, inputs: Mapping[str, np.ndarray]) -> tuple[tuple[str, ...], str | None]:
    """The first mask that is of one value in the batch elements with wrong numbers only, and that value."""
    if not wrong.ndim or (elements := wrong.reshape(len(wrong), -1).any(1)).all():
        return (), None
    for name, array in inputs.items():
        if is_mask(name, array.dtype.name) and array.ndim > 1 and len(array) == len(wrong):
            held = array.reshape(len(array), -1) != 0
            for value, throughout in (("true", held.all(1)), ("false", ~held.any(1))):
                if np.array_equal(throughout, elements):
                    return (name,), value
    return (), None
