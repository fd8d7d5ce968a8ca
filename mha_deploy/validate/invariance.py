"""Which inputs and outputs of a model are made of rows, one for every member of the batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mha_deploy.analyze.cost import SizeLimit, shrunk
from mha_deploy.bundle.cases import GoldenCase
from mha_deploy.errors import DeployError
from mha_deploy.metrics import OutputVerdict, judge_case
from mha_deploy.model.deployable import LARGEST_ACTIVATION
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import FLOAT, ModelSpec, TensorSpec
from mha_deploy.runtime.runner import Arrays, ProfiledRunner, Runner

# -- Which inputs and outputs of a model are made of rows, one for every member of the batch -------


def has_batch(spec: ModelSpec) -> bool:
    """Whether the batch is made of rows that do not know of each other; of a module, its axis B says so."""
    return "B" in spec.axes and all(batch_axis(tensor, spec) == 0 for tensor in spec.outputs)


def hides_something(array: np.ndarray) -> bool:
    """Whether numbers are so large that they can only be meant to hide something."""
    return bool(array.size) and not float(np.abs(array).max()) <= LARGEST_ACTIVATION


def batch_axis(tensor: TensorSpec, spec: ModelSpec) -> int | None:
    """The batch is the first axis of what has one; a fixed batch stands there as its number."""
    batch = spec.axes["B"]
    return 0 if tensor.dims and tensor.dims[0] == ("B" if batch.is_dynamic else batch.min) else None


# -- Does a row of a batch get the same answer in every slot, batch size and profile, whatever  ----

SLOT, SIZE, PROFILE = "batch slot", "batch size", "profile"
CHECKS = (SLOT, SIZE, PROFILE)

# Enough to put a row into every part of a batch; more would only take longer.
_MOST_PLACES = 8


@dataclass(frozen=True, kw_only=True)
class InvarianceCheck:
    """One thing that must not matter, and whether it does.

    Args:
        backend: The runtime.
        case: Name of the golden case; empty where no case could be checked.
        check: One of `CHECKS`.
        detail: What was varied, or why nothing could be.
        passed: Whether every answer is within the case's budget.
        bitwise: Whether every answer is that of the plain run to the bit.
        share: The largest share of the budget that was used; None where there is no number.
        problem: Why it failed.
    """

    backend: str
    case: str
    check: str
    detail: str
    passed: bool
    bitwise: bool = False
    share: float | None = None
    problem: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def invariance_from_runner(
    runner: Runner,
    cases: Iterable[GoldenCase],
    spec: ModelSpec,
    precision: Precision,
    *,
    limit: SizeLimit | None = None,
) -> tuple[InvarianceCheck, ...]:
    """Run the rows of every case in other places, and judge what comes out.

    Args:
        runner: The model in a runtime; profiles are checked where it is a `ProfiledRunner`.
        cases: Golden cases.
        spec: The layer; its axes say which batches are allowed.
        precision: The precision of the model.
        limit: What a batch larger than the case's own may cost.
    """
    if not has_batch(spec):
        return tuple(_not_applicable(runner, check, spec) for check in CHECKS)
    found: list[InvarianceCheck] = []
    for case in cases:
        bench = _Bench(runner, case, spec, precision)
        for check, detail, trials in _planned(bench, limit or SizeLimit()):
            found.append(bench.check(check, detail, trials))
    missing = [check for check in CHECKS if all(other.check != check for other in found)]
    return (*found, *(_not_applicable(runner, check, spec) for check in missing))


def _not_applicable(runner: Runner, check: str, spec: ModelSpec) -> InvarianceCheck:
    if not has_batch(spec):
        why = "no axis B comes first in every output"
    elif check == PROFILE:
        profiled = isinstance(runner, ProfiledRunner)
        why = "no case fits two profiles" if profiled else "the runtime has no profiles"
    elif check == SLOT:
        why = "no case has two rows"
    elif not spec.axes["B"].is_dynamic:
        why = f"the batch is fixed at {spec.axes['B'].min}"
    else:
        why = "no other batch is allowed"
    return InvarianceCheck(
        backend=runner.name, case="", check=check, detail=f"not applicable: {why}", passed=True
    )


# -- what is run -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """One run: its inputs, and the row of the case that each slot answers for, None for no row."""

    feeds: Arrays
    rows: tuple[int | None, ...]
    profile: int | None = None


_Plan = tuple[str, str, Iterable[_Trial]]


def _planned(bench: _Bench, limit: SizeLimit) -> Iterator[_Plan]:
    case, spec = bench.case, bench.spec
    B = case.sizes["B"]
    if B > 1:
        shifts = _spread(range(1, B))
        moved = (bench.rearranged([(slot - shift) % B for slot in range(B)]) for shift in shifts)
        yield SLOT, f"slot 0..{B - 1}, {len(shifts)} arrangements", moved
        kept = _spread(range(B))
        alone = (_among_strangers(bench, row) for row in kept)
        yield SLOT, f"row {', '.join(map(str, kept))} among other neighbours", alone
    if spec.axes["B"].is_dynamic:
        for size in _other_batches(case, spec, limit):
            trials = [bench.rearranged(rows) for rows in _groups(B, size)]
            if all(bench.admits(trial.feeds) for trial in trials):
                yield SIZE, f"batch {size} instead of {B}", trials
    profiles = bench.profiles()
    if len(profiles) > 1:
        rows = tuple(range(case.sizes["B"]))
        under = [_Trial(feeds=case.inputs, rows=rows, profile=index) for index in profiles]
        yield PROFILE, f"profile {', '.join(map(str, profiles))}", under


def _spread(choices: range) -> list[int]:
    """All of them, or a few from the first to the last."""
    count, last = min(len(choices), _MOST_PLACES), len(choices) - 1
    return [choices[round(i * last / max(1, count - 1))] for i in range(count)]


def _other_batches(case: GoldenCase, spec: ModelSpec, limit: SizeLimit) -> list[int]:
    B, axis = case.sizes["B"], spec.axes["B"]
    largest = shrunk(spec, {**case.sizes, "B": axis.max}, case.sizes, limit)["B"]
    wanted = {1, 2, B - 1, B + 1, axis.min, axis.opt, largest} - {B}
    return sorted(size for size in wanted if axis.min <= size <= max(B, largest))


def _groups(B: int, size: int) -> list[list[int]]:
    """All rows in batches of one size: the last batch overlaps, and a larger one repeats rows."""
    starts = [*range(0, max(1, B - size), size), max(0, B - size)]
    return [[(start + slot) % B for slot in range(size)] for start in dict.fromkeys(starts)]


def _among_strangers(bench: _Bench, row: int) -> _Trial:
    """One row where it was, among neighbours that change places and sign."""
    B = bench.case.sizes["B"]
    order = np.roll(np.arange(B), 1)
    feeds = {}
    for tensor in bench.spec.inputs:
        array = bench.case.inputs[tensor.name]
        axis = batch_axis(tensor, bench.spec)
        if axis is not None:
            strange = np.take(array, order, axis=axis)
            strange = -strange if tensor.kind == FLOAT and not hides_something(array) else strange
            np.moveaxis(strange, axis, 0)[row] = np.moveaxis(array, axis, 0)[row]
            array = strange
        feeds[tensor.name] = array
    return _Trial(feeds=feeds, rows=tuple(row if slot == row else None for slot in range(B)))


# -- what comes out --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What one run said for one row of the case, and where the row was then."""

    row: int
    place: str
    values: Arrays


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    problem: str | None
    bitwise: bool
    share: float


class _Bench:
    """A case in a runtime: runs trials and judges their answers."""

    def __init__(self, runner: Runner, case: GoldenCase, spec: ModelSpec, precision: Precision) -> None:
        self.runner, self.case, self.spec, self.precision = runner, case, spec, precision
        self._plain: dict[str, np.ndarray] | None = None

    @property
    def plain(self) -> dict[str, np.ndarray]:
        """The case as it is, run once and only where something is compared with it."""
        if self._plain is None:
            self._plain = self.runner.run(self.case.inputs)
        return self._plain

    def profiles(self) -> list[int]:
        """The profiles that admit the case."""
        return self.runner.profiles_for(self.case.inputs) if isinstance(self.runner, ProfiledRunner) else []

    def admits(self, feeds: Arrays) -> bool:
        """Whether the engine can be asked: its profiles may be narrower than the layer's axes."""
        return not isinstance(self.runner, ProfiledRunner) or bool(self.runner.profiles_for(feeds))

    def rearranged(self, rows: list[int]) -> _Trial:
        """The given rows of the case, in that order."""
        feeds = {}
        for tensor in self.spec.inputs:
            array, axis = self.case.inputs[tensor.name], batch_axis(tensor, self.spec)
            feeds[tensor.name] = array if axis is None else np.take(array, rows, axis=axis)
        return _Trial(feeds=feeds, rows=tuple(rows))

    def check(self, check: str, detail: str, trials: Iterable[_Trial]) -> InvarianceCheck:
        """Run the trials of one check and judge all answers."""
        try:
            verdict = self._judge([answer for trial in trials for answer in self._answers(trial)])
        except DeployError as error:
            verdict = _Verdict(problem=" ".join(str(error).split()), bitwise=False, share=math.inf)
        return InvarianceCheck(
            backend=self.runner.name,
            case=self.case.name,
            check=check,
            detail=detail,
            passed=verdict.problem is None,
            bitwise=verdict.bitwise,
            share=verdict.share if math.isfinite(verdict.share) else None,
            problem=verdict.problem,
        )

    def _answers(self, trial: _Trial) -> Iterator[_Answer]:
        got = self._run(trial)
        for name, oracle in self.case.oracle.items():
            wanted = (len(trial.rows), *oracle.shape[1:])  # every output of a layer has its batch first
            if name not in got or got[name].shape != wanted:
                shape = got[name].shape if name in got else "nothing"
                raise DeployError(f"{name} has the wrong shape.", got=shape, hint=str(wanted))
        for slot, row in enumerate(trial.rows):
            if row is not None:
                values = {name: got[name][slot] for name in self.case.oracle}
                yield _Answer(row=row, place=f"slot {slot} of {len(trial.rows)}", values=values)

    def _run(self, trial: _Trial) -> dict[str, np.ndarray]:
        if trial.profile is not None and isinstance(self.runner, ProfiledRunner):
            return self.runner.run_in_profile(trial.feeds, trial.profile)
        return self.runner.run(trial.feeds)

    def _judge(self, answers: list[_Answer]) -> _Verdict:
        """Put the first answers of all rows together and judge them as the case, then the second ones."""
        rows = [[answer for answer in answers if answer.row == row] for row in range(self.case.sizes["B"])]
        problem, bitwise, share = None, True, 0.0
        for turn in range(max(map(len, rows))):
            chosen = [given[min(turn, len(given) - 1)] if given else None for given in rows]
            result = {name: self._together(name, chosen) for name in self.case.oracle}
            verdicts = judge_case(self.case, result, self.precision)
            problem = problem or next((_problem(v, chosen) for v in verdicts if v.is_wrong), None)
            share = max(share, *(math.inf if v.share is None else v.share for v in verdicts))
            bitwise = bitwise and all(_same(result[name], self.plain[name]) for name in result)
        return _Verdict(problem=problem, bitwise=bitwise, share=share)

    def _together(self, name: str, chosen: list[_Answer | None]) -> np.ndarray:
        return np.stack(
            [
                self.plain[name][row] if answer is None else answer.values[name]
                for row, answer in enumerate(chosen)
            ]
        )


def _problem(verdict: OutputVerdict, chosen: list[_Answer | None]) -> str:
    text = f"{verdict.output}: {verdict.problem}"
    answer = chosen[verdict.deviation.worst_index[0]] if verdict.deviation else None
    return text if answer is None else f"{text}; worst: row {answer.row} in {answer.place}"


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()
