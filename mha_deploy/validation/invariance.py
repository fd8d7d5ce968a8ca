"""Does a batch element get the same answer in every slot, batch size and profile, whatever its neighbors?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from msgspec import Struct, structs

from mha_deploy.bundle.cases import GoldenCase
from mha_deploy.bundle.sizes import SizeLimit, shrunk, spread
from mha_deploy.errors import DeployError
from mha_deploy.judge import OutputVerdict, judge_case, largest_share, same_bits
from mha_deploy.model.deployable import LARGEST_ACTIVATION
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import FLOAT, ModelSpec, TensorSpec
from mha_deploy.runtime.runner import Arrays, ProfiledRunner, Runner
from mha_deploy.status import Obstacle, Outcome, Variation, means
from mha_deploy.text import variation_text

Check = Literal["batch slot", "batch size", "profile"]
SLOT: Check = "batch slot"
SIZE: Check = "batch size"
PROFILE: Check = "profile"
CHECKS = SLOT, SIZE, PROFILE
# Enough to put a batch element into every part of a batch; more would only take longer.
_MOST_PLACES = 8


class InvarianceCheck(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that must not change a result, and whether it does."""

    runtime: Annotated[str, means("the runtime with its version")]
    engine: Annotated[
        str | None, means("name of the engine in the bundle, as in `engines`; null for anything else")
    ] = None
    case: Annotated[str, means("name of the case; empty if nothing could be varied")]
    check: Annotated[Check, means("what must not change a result")]
    variation: Annotated[
        Variation | None,
        means(
            "what was varied: where batch elements are, what the others are, how many there are, or the "
            "profile; null if nothing could be"
        ),
    ] = None
    obstacle: Annotated[Obstacle | None, means("why nothing could be varied; null if something was")] = None
    batch: Annotated[int | None, means("batch elements of the case, or of every case; null if not known")] = (
        None
    )
    other_batch: Annotated[
        int | None, means("how many were run together instead; null if that was not varied")
    ] = None
    arrangements: Annotated[
        int | None, means("in how many orders they were put into the slots; null if that was not varied")
    ] = None
    elements: Annotated[
        tuple[int, ...], means("the batch elements that had other neighbors; may be empty")
    ] = ()
    profiles: Annotated[tuple[int, ...], means("the profiles that it was run in; may be empty")] = ()
    outcome: Annotated[
        Outcome,
        means("whether every answer is within the budget; `not verified` if nothing could be varied"),
    ]
    bitwise: Annotated[bool, means("whether the results are bitwise equal")] = False
    share: Annotated[
        float | None, means("share of the budget that the difference uses; null if none was measured")
    ] = None
    problem: Annotated[str | None, means("why it failed; null if it passed")] = None

    def __post_init__(self) -> None:
        if (self.variation is None) is (self.obstacle is None):
            raise ValueError(f"{self.check}: something is varied, or nothing could be and it says why")

    @property
    def passed(self) -> bool:
        """Whether something was varied, and it does not matter."""
        return self.outcome is Outcome.PASSED

    @property
    def compared(self) -> str:
        """What was compared, or why nothing could be varied, for people."""
        return variation_text(structs.asdict(self))


def invariance_from_runner(
    runner: Runner,
    cases: Iterable[GoldenCase],
    spec: ModelSpec,
    precision: Precision,
    *,
    limit: SizeLimit | None = None,
    along: str | None = None,
) -> tuple[InvarianceCheck, ...]:
    """Run the batch elements of every case in other places, and judge what comes out.

    They are the elements `along` an axis; default: the one whose name says that they are independent.
    """
    name = along or spec.batch_name
    batch = spec.axes.get(name)
    has_batch = batch is not None and all(_is_batched(tensor, spec, name) for tensor in spec.outputs)
    found: list[InvarianceCheck] = []
    for case in cases if has_batch else ():
        moved = _MovedCase(runner, case, spec, precision, name)
        found += [moved.check(planned, trials) for planned, trials in moved.plan(limit or SizeLimit())]
    fixed = None if batch is None or batch.is_dynamic else batch.min
    profiled = isinstance(runner, ProfiledRunner)
    why = {
        SLOT: Obstacle.ONE_ELEMENT,
        SIZE: Obstacle.NO_OTHER_BATCH if fixed is None else Obstacle.FIXED_BATCH,
        PROFILE: Obstacle.ONE_PROFILE if profiled else Obstacle.NO_PROFILES,
    }
    about: dict[str, Any] = {"outcome": Outcome.NOT_VERIFIED, "runtime": runner.name, "case": ""}
    for check in (each for each in CHECKS if all(other.check != each for other in found)):
        obstacle = why[check] if has_batch else Obstacle.NO_BATCH_AXIS
        found.append(InvarianceCheck(check=check, obstacle=obstacle, batch=fixed, **about))
    return tuple(found)


def _is_batched(tensor: TensorSpec, spec: ModelSpec, name: str) -> bool:
    """Whether the batch is the first axis of a tensor; a fixed batch stands there as its number."""
    batch = spec.axes[name]
    return bool(tensor.dims) and tensor.dims[0] == (name if batch.is_dynamic else batch.min)


class _Arrangement(NamedTuple):
    """One run: its inputs, and the batch element of the case in each slot, None for a stranger."""

    feeds: Arrays
    elements: list[int | None]
    profile: int | None = None


class _Answer(NamedTuple):
    """What one run gave for one batch element of the case, and where it was then."""

    element: int
    place: str
    values: Arrays


class _MovedCase:
    """A case in a runtime: plans trials, runs them, and judges their answers."""

    def __init__(
        self, runner: Runner, case: GoldenCase, spec: ModelSpec, precision: Precision, batch: str
    ) -> None:
        self.runner, self.case, self.spec, self.precision = runner, case, spec, precision
        self.batch = batch

    @cached_property
    def plain(self) -> dict[str, np.ndarray]:
        """The case as it is, run only where something is compared with it."""
        return self.runner.run(self.case.inputs)

    def profiles(self, feeds: Arrays) -> list[int] | None:
        """The profiles that admit inputs; None for a runtime without profiles."""
        return self.runner.profiles_for(feeds) if isinstance(self.runner, ProfiledRunner) else None

    def plan(self, limit: SizeLimit) -> Iterator[tuple[dict[str, Any], Iterable[_Arrangement]]]:
        """Every check with what it varies, by field of the record, and its trials."""
        B, axis = self.case.sizes[self.batch], self.spec.axes[self.batch]
        if B > 1:
            shifts, kept = (spread(range(first, B), _MOST_PLACES) for first in (1, 0))
            moved = (self._rearranged([(slot - shift) % B for slot in range(B)]) for shift in shifts)
            yield {"check": SLOT, "variation": Variation.SLOTS, "arrangements": len(shifts)}, moved
            alone = (self._among_strangers(element) for element in kept)
            yield {"check": SLOT, "variation": Variation.NEIGHBORS, "elements": (*kept,)}, alone
        if axis.is_dynamic:
            wanted = {**self.case.sizes, self.batch: axis.max}
            largest = shrunk(self.spec, wanted, self.case.sizes, limit)[self.batch]
            for size in sorted({1, 2, B - 1, B + 1, axis.min, axis.opt, largest} - {B}):
                if not axis.min <= size <= max(B, largest):
                    continue
                # All elements in batches of one size: the last one overlaps, a larger one repeats elements.
                starts = dict.fromkeys([*range(0, max(1, B - size), size), max(0, B - size)])
                trials = [self._rearranged([(start + i) % B for i in range(size)]) for start in starts]
                if all(self.profiles(trial.feeds) != [] for trial in trials):
                    yield {"check": SIZE, "variation": Variation.BATCH, "other_batch": size}, trials
        profiles = self.profiles(self.case.inputs) or []
        if len(profiles) > 1:
            under = [_Arrangement(self.case.inputs, [*range(B)], profile) for profile in profiles]
            yield {"check": PROFILE, "variation": Variation.PROFILES, "profiles": (*profiles,)}, under

    def _batched(self) -> dict[str, TensorSpec]:
        return {
            tensor.name: tensor for tensor in self.spec.inputs if _is_batched(tensor, self.spec, self.batch)
        }

    def _rearranged(self, elements: list[int]) -> _Arrangement:
        """The given batch elements of the case, in that order."""
        inputs = self.case.inputs
        return _Arrangement(
            {**inputs, **{name: inputs[name][elements] for name in self._batched()}}, [*elements]
        )

    def _among_strangers(self, element: int) -> _Arrangement:
        """One batch element where it was, among neighbors that change places and sign."""
        feeds = dict(self.case.inputs)
        for name, tensor in self._batched().items():
            array, strange = feeds[name], np.roll(feeds[name], 1, axis=0)
            # Numbers beyond any activation are meant to mask something: they keep their sign.
            is_signed = tensor.kind == FLOAT and np.abs(array).max(initial=0.0) <= LARGEST_ACTIVATION
            feeds[name] = -strange if is_signed else strange
            feeds[name][element] = array[element]
        return _Arrangement(feeds, [i if i == element else None for i in range(self.case.sizes[self.batch])])

    def check(self, planned: Mapping[str, Any], trials: Iterable[_Arrangement]) -> InvarianceCheck:
        """Run the trials of one check and judge all answers."""
        about = {**planned, "case": self.case.name, "batch": self.case.sizes[self.batch]}
        found = InvarianceCheck(outcome=Outcome.FAILED, runtime=self.runner.name, **about)
        try:
            problem, bitwise, share = self._judge([each for trial in trials for each in self._answers(trial)])
        except DeployError as error:
            return structs.replace(found, problem=error.in_one_line)
        outcome = Outcome.passing(problem is None)
        return structs.replace(found, outcome=outcome, bitwise=bitwise, share=share, problem=problem)

    def _answers(self, trial: _Arrangement) -> Iterator[_Answer]:
        if trial.profile is not None and isinstance(self.runner, ProfiledRunner):
            got = self.runner.run_in_profile(trial.feeds, trial.profile)
        else:
            got = self.runner.run(trial.feeds)
        count = len(trial.elements)
        for name, oracle in self.case.oracle.items():
            wanted = (count, *oracle.shape[1:])  # every output of a layer has its batch first
            if name not in got or got[name].shape != wanted:
                shape = got[name].shape if name in got else "nothing"
                raise DeployError(f"{name} has the wrong shape.", got=shape, hint=str(wanted))
        for slot, element in enumerate(trial.elements):
            if element is not None:
                values = {name: got[name][slot] for name in self.case.oracle}
                yield _Answer(element, f"slot {slot} of {count}", values)

    def _judge(self, answers: list[_Answer]) -> tuple[str | None, bool, float | None]:
        """Judge the first answers of all batch elements as the case, then the second ones, and so on.

        Gives the first problem, whether all is the same to the bit, and the largest share of the budget.
        """
        given = [[each for each in answers if each.element == i] for i in range(self.case.sizes[self.batch])]
        problem, bitwise, verdicts = None, True, list[OutputVerdict]()
        for attempt in range(max(map(len, given))):
            chosen = [each[min(attempt, len(each) - 1)] if each else None for each in given]
            result = {name: self.plain[name].copy() for name in self.case.oracle}
            for answer in filter(None, chosen):
                for name, array in result.items():
                    array[answer.element] = answer.values[name]
            judged = judge_case(self.case, result, self.precision)
            verdicts += judged
            for verdict in judged:
                if verdict.is_wrong and problem is None:
                    problem = f"{verdict.output}: {verdict.problem}"
                    worst = chosen[verdict.deviation.worst_index[0]] if verdict.deviation else None
                    if worst is not None:
                        problem += f"; worst: batch element {worst.element} in {worst.place}"
            bitwise &= same_bits(result, self.plain)
        return problem, bitwise, largest_share(verdicts)
