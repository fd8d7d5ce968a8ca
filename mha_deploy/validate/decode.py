"""Decode token by token and judge every step, and the cache at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any, Protocol, TypeVar

import numpy as np

from mha_deploy.bundle.cases import GoldenCase
from mha_deploy.bundle.folder import Bundle
from mha_deploy.bundle.manifest import TraceEntry
from mha_deploy.bundle.traces import DecodeTrace, call_sizes, check_trace, prefill_calls, read_trace
from mha_deploy.errors import BundleError, DeployError
from mha_deploy.metrics import Budget, OutputVerdict, budget_from_eager, failed_to_run, judge_case, measure
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import CACHE_TENSORS, FLOAT, LENGTHS, AttentionSpec, ModelSpec, Sizes
from mha_deploy.runtime.runner import Arrays, ProfiledRunner, Runner
from mha_deploy.validate.options import ValidateOptions
from mha_deploy.validate.runtimes import refuse_without_torch, torch_device

# -- The errors of single steps: what they may be, whether they grow, and what it all comes to -----

Errors = Sequence[float | None]

_SHARE = 10  # a tenth of the steps at either end
_SHOWN_FAILURES = 8
_NEIGHBOURS = 8  # steps on either side whose budgets a step may use


class StepBudgets:
    """What the error of each step may be.

    A step has one token a row. The module's own error there is one draw from few numbers, by chance a small
    one at some of a thousand steps. So a step may use the budgets of the steps around it.

    Args:
        cases: One for each step, in order.
        precision: Their precision.
    """

    def __init__(self, cases: Iterable[GoldenCase], precision: Precision) -> None:
        self._each = [
            budget_from_eager(case.eager["output"], case.oracle["output"], precision) for case in cases
        ]

    def around(self, step: int) -> Budget:
        """The largest budgets near a step, counted from 1, measure by measure."""
        near = self._each[max(0, step - 1 - _NEIGHBOURS) : step + _NEIGHBOURS]
        return Budget(**{name: max(getattr(budget, name) for budget in near) for name in vars(near[0])})


@dataclass(frozen=True, kw_only=True)
class DecodeReport:
    """The verdict on decoding in one runtime.

    Args:
        model: Name of the model.
        precision: Its precision.
        backend: The runtime, with its version.
        trace: Name of the trace.
        prompt: Length of the prompt of every row.
        steps: How many single tokens were to follow.
        verdicts: One for the prefill, one for every step that was run, and two for the cache at the end; more
            where the lengths went wrong.
        first_failed: The step that failed first, 0 for the prefill; None where none did. The cache may still
            be wrong.
        errors: Relative L2 of the output of every step, None where it could not be measured.
        eager_errors: The module's own.
    """

    model: str
    precision: str
    backend: str
    trace: str
    prompt: tuple[int, ...]
    steps: int
    verdicts: tuple[OutputVerdict, ...]
    first_failed: int | None
    errors: tuple[float | None, ...]
    eager_errors: tuple[float | None, ...]

    @property
    def passed(self) -> bool:
        """Whether every step was run, and all of it is right."""
        return len(self.errors) == self.steps and all(verdict.passed for verdict in self.verdicts)

    @property
    def failures(self) -> list[OutputVerdict]:
        """What is wrong, in the order of the steps."""
        return [verdict for verdict in self.verdicts if not verdict.passed]

    @property
    def share(self) -> float | None:
        """The largest share of a budget that an error used."""
        return max((verdict.share for verdict in self.verdicts if verdict.share is not None), default=None)

    @property
    def growth(self) -> float | None:
        """How much larger the error is in the last tenth of the steps than in the first."""
        return growth_of(self.errors)

    @property
    def eager_growth(self) -> float | None:
        """The same of the module itself: outputs that shrink from step to step make relative errors grow."""
        return growth_of(self.eager_errors)

    @property
    def table(self) -> list[tuple[int, float | None]]:
        """Steps 1, 2, 4, 8, … and the last one, with their errors."""
        return at_doublings(self.errors)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: of the verdicts only the first failures, there may be thousands."""
        plain = ("model", "precision", "backend", "trace", "passed", "prompt", "steps", "first_failed")
        figures = ("share", "errors", "eager_errors", "growth", "eager_growth", "table")
        return {
            **{name: getattr(self, name) for name in (*plain, *figures)},
            "judged": len(self.verdicts),
            "failed": len(self.failures),
            "failures": [verdict.to_dict() for verdict in self.failures[:_SHOWN_FAILURES]],
        }


def growth_of(errors: Errors) -> float | None:
    """The median error of the last tenth of the steps over that of the first; a tenth is at least one step.

    None for a single step, and where a tenth has nothing that could be measured, or the first one no error.
    """
    if len(errors) < 2:
        return None
    tenth = max(1, len(errors) // _SHARE)
    first, last = _median(errors[:tenth]), _median(errors[-tenth:])
    return last / first if first and last is not None else None


def _median(errors: Errors) -> float | None:
    known = [error for error in errors if error is not None]
    return median(known) if known else None


def at_doublings(errors: Errors) -> list[tuple[int, float | None]]:
    """The errors of steps 1, 2, 4, 8, … and of the last one, for a table."""
    steps = [2**k for k in range(len(errors).bit_length())]
    return [(step, errors[step - 1]) for step in sorted({*steps, len(errors)} - {0}) if step <= len(errors)]


# -- Step a layer through tokens: what a decode loop is, and the one that serves any runner ------------

# What stands behind the valid rows of a static cache is never to be read. Zeros would hide some of it.
_UNREAD = 8.0


class DecodeLoop(Protocol):
    """A layer with its cache, on the host or a device (`backends.stepper`): takes tokens, and remembers."""

    @property
    def name(self) -> str:
        """The runtime, with its version."""

    @property
    def lengths(self) -> np.ndarray:
        """How many tokens each row has seen, int32 [B]; zeros at first."""

    @property
    def most_tokens(self) -> int | None:
        """How many tokens of a row one call may bring; None where nothing but the cache bounds them."""

    def feed(self, x: np.ndarray, counts: np.ndarray | None) -> np.ndarray:
        """Run S new tokens of every row.

        Args:
            x: [B, S, E].
            counts: How many of them are real, int32 [B], padding behind; None if all are.

        Returns:
            The output [B, S, E]; at padding it means nothing.
        """

    def cache(self) -> tuple[np.ndarray, np.ndarray]:
        """The keys and the values that it holds, [B, Hkv, rows, D]; only the valid rows mean anything."""


class HostDecodeLoop:
    """Steps any runner, its cache kept on the host: it goes into every call and comes out of it.

    Args:
        runner: The layer; it stays the caller's to close.
        spec: What the layer is; it must have a cache.
        B: Rows of the batch.
    """

    most_tokens: int | None = None

    def __init__(self, runner: Runner, spec: AttentionSpec, B: int) -> None:
        wanted = sorted(tensor.name for tensor in spec.inputs)
        if spec.cache == "none" or sorted(runner.inputs) != wanted:
            raise DeployError(
                f"{runner.name} does not run {spec.name} with a cache.",
                got=f"cache = {spec.cache}, inputs {sorted(runner.inputs)}",
                hint=f"inputs {wanted}",
            )
        self._runner, self._spec = runner, spec
        self._takes, self._gives = CACHE_TENSORS[spec.cache]
        rows = spec.axes["T"].max if spec.cache == "static" else 0
        shape, dtype = (B, spec.Hkv, rows, spec.D), runner.inputs[self._takes[0]].dtype
        self._held = (np.full(shape, _UNREAD, dtype), np.full(shape, -_UNREAD, dtype))
        self.name = runner.name
        self.lengths = np.zeros(B, np.int32)

    def feed(self, x: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
        """Run S new tokens of every row; see `DecodeLoop`."""
        feeds = {"x": np.ascontiguousarray(x), **dict(zip(self._takes, self._held, strict=True))}
        if self._spec.cache == "static":
            feeds[LENGTHS] = self.lengths
        elif counts is not None:
            raise DeployError("The rows of a growing cache have one length.", got=f"counts {counts.tolist()}")
        results = self._runner.run(feeds)
        missing = [name for name in ("output", *self._gives) if name not in results]
        if missing:
            raise DeployError(f"{self.name} gave no {', '.join(missing)}.", got=sorted(results))
        self._keep(results, x.shape[1])
        self.lengths = (self.lengths + (x.shape[1] if counts is None else counts)).astype(np.int32)
        return results["output"]

    def _keep(self, results: dict[str, np.ndarray], S: int) -> None:
        B, Hkv, rows, D = self._held[0].shape
        shape = (B, Hkv, rows if self._spec.cache == "static" else rows + S, D)
        for name in self._gives:
            if results[name].shape != shape or results[name].dtype != self._held[0].dtype:
                raise DeployError(
                    f"{self.name} gave a {name} that cannot be the next call's.",
                    got=f"{results[name].dtype} {results[name].shape}",
                    hint=f"{self._held[0].dtype} {shape}",
                )
        self._held = (results[self._gives[0]], results[self._gives[1]])

    def cache(self) -> tuple[np.ndarray, np.ndarray]:
        """The keys and the values, [B, Hkv, rows, D]."""
        return self._held


def open_decode_loop(
    runner: Runner, spec: AttentionSpec, trace: DecodeTrace
) -> AbstractContextManager[DecodeLoop]:
    """A decode loop with room for a trace; its cache is on the device where the runner can keep it.

    Args:
        runner: The layer; it stays the caller's to close, behind the decode loop.
        spec: What the layer is.
        trace: The tokens that it is to be stepped through.
    """
    if runner.can_decode:
        keeper: Any = runner
        return keeper.decode_loop(B=trace.B, T=None if spec.cache == "static" else trace.length)  # type: ignore[no-any-return]
    return nullcontext(HostDecodeLoop(runner, spec, trace.B))


# -- Is decoding right? Prefill and single tokens through any runtime, judged at every step, an ----

_T = TypeVar("_T")
_PLACES = {3: ("row", "token"), 4: ("row", "head", "position")}  # the axes of an output and of a cache


def run_decode_loop(
    loop: DecodeLoop,
    trace: DecodeTrace,
    spec: AttentionSpec,
    precision: Precision,
    on_step: Callable[[int], None] | None = None,
) -> DecodeReport:
    """Feed a trace to a decode loop, and judge everything that comes out.

    Args:
        loop: The layer in some runtime, with an empty cache.
        trace: The tokens, and what is true of them.
        spec: The layer.
        precision: Its precision.
        on_step: Is told each step before it is run: 0 for the prefill, then 1 to `trace.steps`.

    Raises:
        DeployError: The trace is not one of this layer, or the decode loop has seen tokens before. What goes
            wrong later is a verdict.
    """
    check_trace(spec, trace, precision)
    before = np.asarray(loop.lengths)
    if before.shape != (trace.B,) or before.any():
        raise DeployError(
            "The decode loop must begin with an empty cache.",
            got=f"lengths {before.tolist()}",
            hint=f"{trace.B} zeros: open a new one",
        )
    walk = _Walk(loop.name, trace, spec, precision)
    walk.go(loop, on_step or (lambda step: None))
    return walk.report()


def not_decoded(
    backend: str, trace: DecodeTrace, spec: AttentionSpec, precision: Precision, reason: str
) -> DecodeReport:
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

    def go(self, loop: DecodeLoop, on_step: Callable[[int], None]) -> None:
        """Prefill, steps and cache, up to the first call that cannot be run."""
        for step in range(self.trace.steps + 1):
            on_step(step)
            case = self._case(step)
            verdicts, has_run = self._call(loop, step, case)
            self._note(step, case, verdicts)
            if not has_run:
                return
        self.verdicts += self._cache(loop)

    def _call(self, loop: DecodeLoop, step: int, case: GoldenCase) -> tuple[list[OutputVerdict], bool]:
        """The verdicts on one call, and whether it could be run."""
        trace = self.trace
        try:
            output = attempt(lambda: self._fed(loop, step))
            lengths = attempt(lambda: np.asarray(loop.lengths))
        except DeployError as error:
            return failed_to_run(case, error.in_one_line), False
        if step == 0:
            output = _without_padding(output, trace.prompt, axis=1)
        budgets = {"output": self._budgets.around(step)} if step else None
        verdicts = [_placed(v) for v in judge_case(case, {"output": output}, self.precision, budgets)]
        return verdicts + _lengths_verdict(case, lengths, trace.prompt + step), True

    def _fed(self, loop: DecodeLoop, step: int) -> np.ndarray:
        """The output of a step, or of the prompt in as many calls as the decode loop needs for it."""
        trace = self.trace
        if step:
            return np.asarray(loop.feed(trace.tokens(step), None))
        calls = prefill_calls(trace.prompt, loop.most_tokens)
        outputs = [np.asarray(loop.feed(trace.prefill[:, part], counts)) for part, counts in calls]
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

    def _cache(self, loop: DecodeLoop) -> list[OutputVerdict]:
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
            got = attempt(lambda: self._held(loop, ends))
        except DeployError as error:
            return failed_to_run(case, error.in_one_line)
        return [_placed(verdict) for verdict in judge_case(case, got, self.precision)]

    def _held(self, loop: DecodeLoop, ends: np.ndarray) -> dict[str, np.ndarray]:
        keys, values = (np.asarray(rows) for rows in loop.cache())
        if self.spec.cache == "static":  # a growing one has as many rows as there are tokens, and no more
            keys, values = (rows[:, :, : self.trace.length] for rows in (keys, values))
        return {
            "key": _without_padding(keys, ends, axis=2),
            "value": _without_padding(values, ends, axis=2),
        }

    def report(self) -> DecodeReport:
        """What was found."""
        return DecodeReport(
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


# -- One runner and one trace: what its profiles do not take is left out, what it cannot do is  ----


def evaluate_trace(
    runner: Runner,
    trace: DecodeTrace,
    spec: AttentionSpec,
    precision: Precision,
    on_step: Callable[[int], None] | None = None,
) -> DecodeReport | None:
    """Lead a runner through a trace, with the cache where the runtime keeps it best.

    Args:
        runner: The layer; it stays the caller's to close.
        trace: The tokens, and what is true of them.
        spec: The layer.
        precision: Its precision.
        on_step: Is told each step before it is run.

    Returns:
        The verdict, or None where the profiles of the runner's engine do not take a call of the trace.
    """
    walked: DecodeReport | None = None
    if not _takes(runner, spec, precision, _step_sizes(spec, trace)):
        return None
    try:
        with ExitStack() as owned:
            loop = attempt(lambda: owned.enter_context(open_decode_loop(runner, spec, trace)))
            # How a prompt is cut into calls is the decode loop's to say.
            if _takes(runner, spec, precision, _prefill_sizes(spec, trace, loop.most_tokens)):
                walked = run_decode_loop(loop, trace, spec, precision, on_step)
            attempt(owned.close)
    except DeployError as error:
        if walked is None:
            return not_decoded(runner.name, trace, spec, precision, error.in_one_line)
        return _badly_closed(walked, trace, error)
    return walked


def _badly_closed(walked: DecodeReport, trace: DecodeTrace, error: DeployError) -> DecodeReport:
    """What was seen, and that it did not end well: devices tell late of what went wrong on them."""
    failure = OutputVerdict(
        case=f"{trace.name} end",
        sizes=walked.verdicts[-1].sizes,
        output="cache",
        problem=f"could not be closed: {error.in_one_line}",
    )
    return replace(walked, verdicts=(*walked.verdicts, failure))


def admits(runner: Runner, feeds: Arrays) -> bool:
    """Whether a runner takes these inputs: an engine's profiles may be narrower than the layer's axes."""
    if not isinstance(runner, ProfiledRunner):
        return True
    try:
        return bool(runner.profiles_for(feeds))
    except DeployError:  # other names or types than the layer's: running it will tell
        return True


def _takes(runner: Runner, spec: AttentionSpec, precision: Precision, calls: Iterable[Sizes]) -> bool:
    return all(admits(runner, _feeds(spec, precision, sizes)) for sizes in calls)


def _feeds(spec: AttentionSpec, precision: Precision, sizes: Sizes) -> Arrays:
    """Inputs of these sizes that take no memory: a single zero each."""

    def zero(kind: str) -> np.ndarray:
        return np.zeros((), precision.numpy if kind == FLOAT else kind)

    return {t.name: np.broadcast_to(zero(t.kind), t.shape(sizes)) for t in spec.inputs}


def _step_sizes(spec: AttentionSpec, trace: DecodeTrace) -> Iterator[Sizes]:
    """The sizes of the calls with single tokens."""
    steps = trace.steps if spec.cache == "growing" else 1  # those behind a static cache are all alike
    for step in range(steps):
        yield call_sizes(spec, trace.B, 1, trace.longest_prompt + step)


def _prefill_sizes(spec: AttentionSpec, trace: DecodeTrace, most: int | None) -> Iterator[Sizes]:
    """The sizes of the calls that bring the prompts."""
    for part, _ in prefill_calls(trace.prompt, most):
        yield call_sizes(spec, trace.B, part.stop - part.start, part.start)


# -- The tokens that a layer with a cache is stepped through: the bundle's own, and fresh ones  ----


def traces_of(bundle: Bundle, options: ValidateOptions) -> list[DecodeTrace]:
    """The traces of a bundle, and one more where the options ask for steps.

    Raises:
        BundleError: A trace is not what the manifest says.
        DeployError: Steps were asked of a layer that has no cache, or no room for them.
        BackendUnavailable: They were asked for, and PyTorch is not here to tell what is true of them.
    """
    spec = bundle.manifest.spec
    if not isinstance(spec, AttentionSpec) or spec.cache == "none":
        _refuse_steps(spec, options)
        return []
    found = [_read(bundle, entry, spec) for entry in bundle.manifest.traces]
    return [*found, _fresh(bundle, options, spec)] if options.steps else found


def _refuse_steps(spec: ModelSpec, options: ValidateOptions) -> None:
    if options.steps:
        raise DeployError(
            f"{spec.name} has no cache to step through.",
            got=f"--steps {options.steps}",
            hint="export it with --cache growing or --cache static",
        )


def _read(bundle: Bundle, entry: TraceEntry, spec: AttentionSpec) -> DecodeTrace:
    trace = read_trace(bundle.file(entry.file))
    if trace.name != entry.name:
        raise BundleError(
            "A decode trace has another name than its file.",
            got=f"{entry.name} in {entry.file}",
            hint="export again",
        )
    check_trace(spec, trace, bundle.manifest.precision)
    return trace


def _fresh(bundle: Bundle, options: ValidateOptions, spec: AttentionSpec) -> DecodeTrace:
    prompt = _usual_prompt(spec, options.steps) if options.prompt is None else options.prompt
    refuse_without_torch("of fresh tokens")
    from mha_deploy.baselines.fresh import fresh_trace

    return fresh_trace(
        bundle,
        rows=spec.axes["B"].opt if options.batch is None else options.batch,
        prompt=prompt,
        steps=options.steps,
        seed=options.seed,
        device=torch_device(),
    )


def _usual_prompt(spec: AttentionSpec, steps: int) -> int:
    """A prompt of the usual length, or as much of it as leaves room for the steps."""
    prompt = min(spec.axes["S"].opt, spec.room - steps)
    if prompt < 1:
        raise DeployError(
            f"The cache of {spec.name} has no room for a prompt and so many steps.",
            got=f"--steps {steps}",
            hint=f"{spec.room - 1} steps at most" if spec.room > 1 else None,
        )
    return prompt
