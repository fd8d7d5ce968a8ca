"""Is decoding right? Prefill and single tokens through any runtime, judged at every step, and the cache.

A step can go wrong without showing in its own output: a row that was written to the wrong place is read by
the next one, and a shift of all positions alike is never seen in the output of a rotary layer. So every step
is judged, and so are the keys and values that the runtime holds in the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from mha_deploy.errors import DeployError
from mha_deploy.golden import GoldenCase
from mha_deploy.precision import Precision
from mha_deploy.spec import AttentionSpec
from mha_deploy.trace import DecodeTrace, call_sizes, check_trace, prefill_calls
from mha_deploy.validate.deviation import measure
from mha_deploy.validate.growth import StepBudgets, SteppingReport
from mha_deploy.validate.host_stepper import HostStepper, Stepper, open_stepper
from mha_deploy.validate.parity import OutputVerdict, failed_to_run, judge_case

__all__ = [
    "HostStepper",
    "Stepper",
    "SteppingReport",
    "attempt",
    "not_stepped",
    "open_stepper",
    "step_through",
]

_T = TypeVar("_T")
_PLACES = {3: ("row", "token"), 4: ("row", "head", "position")}  # the axes of an output and of a cache


def step_through(
    stepper: Stepper,
    trace: DecodeTrace,
    spec: AttentionSpec,
    precision: Precision,
    on_step: Callable[[int], None] | None = None,
) -> SteppingReport:
    """Feed a trace to a stepper, and judge everything that comes out.

    Args:
        stepper: The layer in some runtime, with an empty cache.
        trace: The tokens, and what is true of them.
        spec: The layer.
        precision: Its precision.
        on_step: Is told each step before it is run: 0 for the prefill, then 1 to `trace.steps`.

    Raises:
        DeployError: The trace is not one of this layer, or the stepper has seen tokens before. What goes
            wrong later is a verdict.
    """
    check_trace(spec, trace, precision)
    before = np.asarray(stepper.lengths)
    if before.shape != (trace.B,) or before.any():
        raise DeployError(
            "The stepper must begin with an empty cache.",
            got=f"lengths {before.tolist()}",
            hint=f"{trace.B} zeros: open a new one",
        )
    walk = _Walk(stepper.name, trace, spec, precision)
    walk.go(stepper, on_step or (lambda step: None))
    return walk.report()


def not_stepped(
    backend: str, trace: DecodeTrace, spec: AttentionSpec, precision: Precision, reason: str
) -> SteppingReport:
    """The verdict on a runtime that could not begin: it has failed the prefill."""
    walk = _Walk(backend, trace, spec, precision)
    walk.give_up(reason)
    return walk.report()


class _Walk:
    """One way through a trace."""

    def __init__(self, backend: str, trace: DecodeTrace, spec: AttentionSpec, precision: Precision) -> None:
        self.backend, self.trace, self.spec, self.precision = backend, trace, spec, precision
        self.verdicts: list[OutputVerdict] = []
        self.errors: list[float | None] = []
        self.eager_errors: list[float | None] = []
        self.first_failed: int | None = None

    @cached_property
    def _budgets(self) -> StepBudgets:
        steps = (self._case(step) for step in range(1, self.trace.steps + 1))
        return StepBudgets(steps, self.precision)

    def give_up(self, reason: str) -> None:
        """Note that not even the prefill could be run."""
        case = self._case(0)
        self._note(0, case, failed_to_run(case, reason))

    def go(self, stepper: Stepper, on_step: Callable[[int], None]) -> None:
        """Prefill, steps and cache, up to the first call that cannot be run."""
        for step in range(self.trace.steps + 1):
            on_step(step)
            case = self._case(step)
            verdicts, has_run = self._call(stepper, step, case)
            self._note(step, case, verdicts)
            if not has_run:
                return
        self.verdicts += self._cache(stepper)

    def _call(self, stepper: Stepper, step: int, case: GoldenCase) -> tuple[list[OutputVerdict], bool]:
        """The verdicts on one call, and whether it could be run."""
        trace = self.trace
        try:
            output = attempt(lambda: self._fed(stepper, step))
            lengths = attempt(lambda: np.asarray(stepper.lengths))
        except DeployError as error:
            return failed_to_run(case, error.in_one_line), False
        if step == 0:
            output = _without_padding(output, trace.prompt, axis=1)
        budgets = {"output": self._budgets.around(step)} if step else None
        verdicts = [_placed(v) for v in judge_case(case, {"output": output}, self.precision, budgets)]
        return verdicts + _lengths_verdict(case, lengths, trace.prompt + step), True

    def _fed(self, stepper: Stepper, step: int) -> np.ndarray:
        """The output of a step, or of the prompt in as many calls as the stepper needs for it."""
        trace = self.trace
        if step:
            return np.asarray(stepper.feed(trace.tokens(step), None))
        calls = prefill_calls(trace.prompt, stepper.most_tokens)
        outputs = [np.asarray(stepper.feed(trace.prefill[:, part], counts)) for part, counts in calls]
        return np.concatenate(outputs, axis=1) if len(outputs) > 1 else outputs[0]

    def _case(self, step: int) -> GoldenCase:
        """What the output of one call must be."""
        trace, first = self.trace, self.trace.longest_prompt

        def cut(by_position: np.ndarray) -> np.ndarray:
            if step:
                return trace.at_step(by_position, step)
            return _without_padding(by_position[:, :first], trace.prompt, axis=1)

        return GoldenCase(
            name=f"{trace.name} step {step}" if step else f"{trace.name} prefill",
            sizes=self._sizes(1, first + step - 1) if step else self._sizes(first, 0),
            inputs={},
            oracle={"output": cut(trace.oracle["output"])},
            eager={"output": cut(trace.eager["output"])},
        )

    def _sizes(self, S: int, past: int) -> dict[str, int]:
        return call_sizes(self.spec, self.trace.B, S, past)

    def _note(self, step: int, case: GoldenCase, verdicts: list[OutputVerdict]) -> None:
        self.verdicts += verdicts
        if self.first_failed is None and not all(verdict.passed for verdict in verdicts):
            self.first_failed = step
        if step:
            deviation = verdicts[0].deviation
            self.errors.append(deviation.relative_l2 if deviation else None)
            self.eager_errors.append(measure(case.eager["output"], case.oracle["output"]).relative_l2)

    def _cache(self, stepper: Stepper) -> list[OutputVerdict]:
        """The verdicts on the keys and values of every token, once all were fed."""
        trace, ends = self.trace, self.trace.prompt + self.trace.steps
        names = ("key", "value")
        case = GoldenCase(
            name=f"{trace.name} cache",
            sizes=self._sizes(1, trace.length - 1),
            inputs={},
            oracle={name: _without_padding(trace.oracle[name], ends, axis=2) for name in names},
            eager={name: _without_padding(trace.eager[name], ends, axis=2) for name in names},
        )
        try:
            got = attempt(lambda: self._held(stepper, ends))
        except DeployError as error:
            return failed_to_run(case, error.in_one_line)
        return [_placed(verdict) for verdict in judge_case(case, got, self.precision)]

    def _held(self, stepper: Stepper, ends: np.ndarray) -> dict[str, np.ndarray]:
        keys, values = (np.asarray(rows) for rows in stepper.cache())
        if self.spec.cache == "static":  # a growing one has as many rows as there are tokens, and no more
            keys, values = (rows[:, :, : self.trace.length] for rows in (keys, values))
        return {
            "key": _without_padding(keys, ends, axis=2),
            "value": _without_padding(values, ends, axis=2),
        }

    def report(self) -> SteppingReport:
        """What was found."""
        return SteppingReport(
            model=self.spec.name,
            precision=self.precision.name,
            backend=self.backend,
            trace=self.trace.name,
            prompt=tuple(self.trace.prompt.tolist()),
            steps=self.trace.steps,
            verdicts=tuple(self.verdicts),
            first_failed=self.first_failed,
            errors=tuple(self.errors),
            eager_errors=tuple(self.eager_errors),
        )


def attempt(call: Callable[[], _T]) -> _T:
    """Call a runtime; whatever it raises is an error with a reason."""
    try:
        return call()
    except DeployError:
        raise
    except Exception as error:  # runtimes raise types that share no base
        raise DeployError(f"{type(error).__name__}:", got=error) from error


def _without_padding(array: np.ndarray, ends: np.ndarray, axis: int) -> np.ndarray:
    """Zeros from position `ends[b]` of row b on. An array of another shape stays: the judge will say so."""
    if array.ndim <= axis or len(array) != len(ends) or array.shape[axis] <= ends.min():
        return array
    seen = np.arange(array.shape[axis]) < ends[:, None]
    seen = seen.reshape(len(ends), *(1,) * (axis - 1), -1, *(1,) * (array.ndim - axis - 1))
    return np.where(seen, array, array.dtype.type(0))


def _lengths_verdict(case: GoldenCase, got: np.ndarray, want: np.ndarray) -> list[OutputVerdict]:
    """A failure if the runtime has lost count, or nothing."""
    if np.array_equal(got, want):
        return []
    problem = f"{got.tolist()} tokens, not {want.tolist()}"
    return [OutputVerdict(case=case.name, sizes=case.sizes, output="lengths", problem=problem)]


def _placed(verdict: OutputVerdict) -> OutputVerdict:
    """The same verdict; an error that is out of budget is said with its place."""
    if not verdict.is_wrong or verdict.deviation is None:
        return verdict
    index = verdict.deviation.worst_index
    places = ", ".join(f"{axis} {i}" for axis, i in zip(_PLACES[len(index)], index, strict=False))
    return replace(verdict, problem=f"{verdict.problem}; worst at {places}")
