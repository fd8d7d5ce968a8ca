"""Decode token by token and judge every step, and the cache at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Protocol

import ml_dtypes
import numpy as np
from msgspec import Struct, structs

from mha_deploy import judge, metrics
from mha_deploy.bundle.cases import (
    DecodeTrace,
    GoldenCase,
    KnownMistake,
    PlannedTrace,
    check_trace,
    join_baselines,
    position_inputs,
    prefill_calls,
    read_trace,
    refuse_steps,
    without_padding,
)
from mha_deploy.bundle.folder import Bundle
from mha_deploy.bundle.manifest import Source
from mha_deploy.errors import BundleError, DeployError
from mha_deploy.judge import OutputVerdict, Share
from mha_deploy.metrics import Budget, ToHeads
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import ModelSpec
from mha_deploy.options import ValidateOptions
from mha_deploy.runtime.runner import Arrays, ProfiledRunner, Runner, foreign_errors
from mha_deploy.status import Kind, Outcome, Reason, means
from mha_deploy.validation.runtimes import refuse_without_torch, torch_device

OnStep = Callable[[int], None]
"""Called before each step is run: with 0 for the prefill, then 1 to `trace.steps`."""

_SHARE = 10  # a tenth of the steps at either end
_SHOWN_FAILURES = 8


class DecodeRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The verdict on decoding in one runtime, as a report stores it."""

    model: Annotated[str, means("name of the model")]
    precision: Annotated[str, means("precision of the graph")]
    runtime: Annotated[str, means("the runtime with its version")]
    engine: Annotated[
        str | None, means("name of the engine in the bundle, as in `engines`; null for anything else")
    ] = None
    trace: Annotated[str, means("name of the trace: from the bundle, or drawn on request")]
    outcome: Annotated[Outcome, means("whether every step was run and is right")]
    prompt: Annotated[tuple[int, ...], means("tokens of the prompt of every batch element")]
    steps: Annotated[int, means("planned decode steps")]
    first_failed: Annotated[
        int | None,
        means("first wrong step, 0 for the prefill; null if no step is wrong (the cache may still be)"),
    ]
    share: Annotated[
        Share | None, means("largest share of a budget used, above 1 is too much; null if not finite")
    ]
    errors: Annotated[
        tuple[float | None, ...],
        means("relative L2 of every step that was run, from step 1; null if not measured"),
    ]
    eager_errors: Annotated[
        tuple[float | None, ...], means("the same for the PyTorch module, decoded in its own precision")
    ]
    growth: Annotated[
        float | None,
        means(
            "median error of the last tenth of the steps, at least one, over that of the first; "
            "null if unknown, or if there is only one step"
        ),
    ]
    eager_growth: Annotated[float | None, means("the same for the PyTorch module; null as above")]
    table: Annotated[
        tuple[tuple[int, float | None], ...],
        means("pairs of step and error, for steps 1, 2, 4, 8, … and the last one"),
    ]
    judged: Annotated[
        int, means("how many results were judged: prefill, every step, and the keys and values at the end")
    ]
    failed: Annotated[int, means("how many of them are wrong")]
    failures: Annotated[
        tuple[OutputVerdict, ...],
        means("the first of them, then of what is not verified; fields as in `parity[].verdicts[]`"),
    ]
    clients: Annotated[
        int | None, means("clients that sent requests at the same time; null without a server")
    ] = None


@dataclass(frozen=True, kw_only=True)
class DecodeReport:
    """The verdict on decoding in one runtime."""

    model: str  # name of the model
    precision: str  # its precision
    runtime: str  # the runtime, with its version
    engine: str | None = None  # name of the engine in the bundle; None for anything else
    trace: str  # name of the trace
    prompt: tuple[int, ...]  # length of the prompt of every batch element
    steps: int  # how many single tokens were to follow
    # One for each output of the prefill, of every step that was run and of all steps, and for each cached
    # tensor at the end; more where the lengths went wrong
    verdicts: tuple[OutputVerdict, ...]
    of_prefill: int  # how many of them, from the first, are on the prefill
    first_failed: int | None  # the step that failed first, 0 for the prefill; the cache may still be wrong
    errors: tuple[float | None, ...]  # relative L2 of every step; None where it could not be measured
    eager_errors: tuple[float | None, ...]  # the module's own
    clients: int | None = None  # that sent requests to a server at the same time; None without one

    @property
    def outcome(self) -> Outcome:
        """That of every step, and of the cache at the end; steps that were not run are not verified."""
        parts = [verdict.outcome for verdict in self.verdicts]
        return Outcome.of([*parts, *[Outcome.NOT_VERIFIED] * (len(self.errors) < self.steps)])

    @property
    def passed(self) -> bool:
        """Whether every step was run, and all of it is right."""
        return self.outcome is Outcome.PASSED

    @property
    def failures(self) -> list[OutputVerdict]:
        """What is wrong, in the order of the steps; then what is not verified."""
        doubtful = (verdict for verdict in self.verdicts if not (verdict.passed or verdict.is_wrong))
        return [*(verdict for verdict in self.verdicts if verdict.is_wrong), *doubtful]

    @property
    def share(self) -> float | None:
        """The largest share of a budget that an error used; None where an output had no number."""
        return judge.largest_share(self.verdicts)

    @property
    def record(self) -> DecodeRecord:
        """What a report stores: of the verdicts only the first failures, there may be thousands."""
        last = len(self.errors)
        shown = sorted({2**k for k in range(last.bit_length())} | {last} - {0})
        return DecodeRecord(
            model=self.model,
            precision=self.precision,
            runtime=self.runtime,
            engine=self.engine,
            trace=self.trace,
            outcome=self.outcome,
            steps=self.steps,
            judged=len(self.verdicts),
            failed=sum(verdict.is_wrong for verdict in self.verdicts),
            first_failed=self.first_failed,
            share=self.share,
            growth=growth(self.errors),
            # Outputs that shrink from step to step make relative errors grow in the module itself, too.
            eager_growth=growth(self.eager_errors),
            prompt=self.prompt,
            errors=self.errors,
            eager_errors=self.eager_errors,
            clients=self.clients,
            table=tuple((step, self.errors[step - 1]) for step in shown),
            failures=tuple(self.failures[:_SHOWN_FAILURES]),
        )


def growth(errors: Sequence[float | None]) -> float | None:
    """The median error of the last tenth of the steps over that of the first; a tenth is at least one step.

    None for a single step, and where a tenth has nothing that could be measured, or the first one no error.
    """
    tenth = max(1, len(errors) // _SHARE)
    known = [[error for error in part if error is not None] for part in (errors[:tenth], errors[-tenth:])]
    if len(errors) < 2 or not all(known):
        return None
    first, last = (float(np.median(part)) for part in known)
    return last / first if first else None


# -- What a decode loop is, and the one that serves any runner -------------------------------------

# What stands behind the valid entries of a preallocated cache is never to be read. Zeros would hide that.
_UNREAD = 8.0


class DecodeLoop(Protocol):
    """A model with its KV cache, on the host or on a device."""

    name: str  # the runtime, with its version
    # How many tokens of a batch element one call may bring; None where only the cache bounds them
    most_tokens: int | None

    @property
    def lengths(self) -> np.ndarray:
        """How many tokens of each batch element are in the cache, int32 [B]; zeros at first."""

    def feed(self, tokens: Arrays, counts: np.ndarray | None) -> Arrays:
        """Run S new tokens of every batch element, of which `counts` [B] are real, with padding behind them.

        Returns the outputs by token; at padding they are not defined.
        """

    def cache(self) -> Arrays:
        """The cached tensors by the names of `KVCache`; only the valid entries are defined."""


class HostDecodeLoop:
    """Decodes a batch of B with any runner; the cache is on the host, an input and an output of every call.

    The runner stays the caller's to close.
    """

    most_tokens: int | None = None

    def __init__(self, runner: Runner, spec: ModelSpec, B: int) -> None:
        wanted, cache = {tensor.name: tensor for tensor in spec.inputs}, spec.kv_cache
        if cache is None or sorted(runner.inputs) != sorted(wanted):
            problem, got = f"{runner.name} does not run {spec.name} with a KV cache.", sorted(runner.inputs)
            raise DeployError(problem, got=f"inputs {got}", hint=f"inputs {sorted(wanted)}")
        self._runner, self._cache, self.name = runner, cache, runner.name
        sizes, self._held = cache.call_sizes(spec, B, 1, 0), {}
        for i, each in enumerate(cache.tensors):
            shape, dtype = wanted[each.input].shape(sizes), runner.inputs[each.input].dtype
            unread = (_UNREAD if i % 2 else -_UNREAD) if each.in_order else 0.0  # a ring is judged whole
            self._held[each.input] = np.full(shape, unread, dtype)
        self.lengths = np.zeros(B, np.int32)

    def feed(self, tokens: Arrays, counts: np.ndarray | None = None) -> Arrays:
        """Run S new tokens of every batch element; see `DecodeLoop`."""
        cache, given = self._cache, {name: np.ascontiguousarray(array) for name, array in tokens.items()}
        if counts is not None and not cache.is_ragged:
            problem = "The batch elements of this KV cache have one length."
            raise DeployError(
                problem,
                got=f"counts {counts.tolist()}",
                hint="the same number of new tokens for each batch element",
            )
        name, axis = next(iter(cache.by_token.items()))
        S = tokens[name].shape[axis]
        given |= position_inputs(cache, self.lengths, S)
        results = self._runner.run({**given, **self._held})
        needed = [*cache.outputs, *(each.output for each in cache.tensors)]
        if missing := [name for name in needed if name not in results]:
            raise DeployError(
                f"{self.name} did not return {', '.join(missing)}.",
                got=sorted(results),
                hint="another --runtime, or bisect to see where",
            )
        for each in cache.tensors:
            before, after = self._held[each.input], results[each.output]
            shape = list(before.shape)
            shape[each.axis] += 0 if cache.is_preallocated else S
            if after.shape != tuple(shape) or after.dtype != before.dtype:
                problem = f"{self.name} gave a {each.output} that the next call cannot take."
                got, hint = f"{after.dtype} {after.shape}", f"{before.dtype} {tuple(shape)}"
                raise DeployError(problem, got=got, hint=hint)
            self._held[each.input] = after
        self.lengths = (self.lengths + (S if counts is None else counts)).astype(np.int32)
        return {name: results[name] for name in cache.outputs}

    def cache(self) -> dict[str, np.ndarray]:
        """The cached tensors by name."""
        return {each.name: self._held[each.input] for each in self._cache.tensors}


class DeviceDecodeLoop:
    """The decode loop of a runtime that keeps the cache of a layer on the device; see `DecodeLoop`."""

    def __init__(self, loop: Any) -> None:
        self._loop, self.name, self.most_tokens = loop, loop.name, loop.most_tokens

    @property
    def lengths(self) -> np.ndarray:
        """They may be set."""
        return np.asarray(self._loop.lengths)

    def feed(self, tokens: Arrays, counts: np.ndarray | None) -> Arrays:
        """Run the tokens on the device."""
        return {"output": np.asarray(self._loop.feed(tokens["x"], counts))}

    def cache(self) -> Arrays:
        """Keys and values, copied to the host."""
        return dict(zip(("key", "value"), map(np.asarray, self._loop.cache()), strict=True))


@contextmanager
def open_decode_loop(runner: Runner, spec: ModelSpec, trace: DecodeTrace) -> Iterator[DecodeLoop]:
    """A decode loop with room for a trace; its cache is on the device where the runner can keep it.

    The runner stays the caller's to close, after the decode loop.
    """
    if spec.cache == "none" or not runner.can_decode:
        yield HostDecodeLoop(runner, spec, trace.B)
        return
    keeper: Any = runner
    with keeper.decode_loop(B=trace.B, T=None if trace.cache.is_preallocated else trace.length) as loop:
        yield DeviceDecodeLoop(loop)


# -- Is decoding right? Prefill and decode steps through any runtime, judged at every step ---------

# The axes of an output and of a cached tensor.
_PLACES = {3: ("batch element", "token"), 4: ("batch element", "head", "position")}
_NEIGHBOURS = 8  # steps on either side whose budgets a step may use


def run_decode_loop(
    loop: DecodeLoop, trace: DecodeTrace, spec: ModelSpec, precision: Precision, on_step: OnStep | None = None
) -> DecodeReport:
    """Feed a trace to a decode loop with an empty cache, and judge everything that comes out.

    Raises:
        DeployError: The trace is not of this model, or the cache not empty; what fails later is a verdict.
    """
    check_trace(spec, trace, precision)
    before, hint = np.asarray(loop.lengths), f"{trace.B} zeros: open a new one"
    if before.shape != (trace.B,) or before.any():
        problem = "The decode loop must begin with an empty cache."
        raise DeployError(problem, got=f"lengths {before.tolist()}", hint=hint)
    run = _DecodeRun(loop.name, trace, spec, precision)
    run.feed_all(loop, on_step)
    return run.report()


class _DecodeRun:
    """One pass through a trace."""

    def __init__(self, runtime: str, trace: DecodeTrace, spec: ModelSpec, precision: Precision) -> None:
        self.runtime, self.trace, self.spec, self.precision = runtime, trace, spec, precision
        self.axes = trace.cache.outputs  # by output, the axis of its tokens
        self.calls = [self._call(step) for step in range(1 + trace.steps)]  # the prefill and the steps
        self.found: list[list[OutputVerdict]] = []  # the verdicts on those that were run
        self.afterwards: list[OutputVerdict] = []  # on all steps as one, and on the cache

    # -- what must come out -----------------------------------------------------------------------

    def _case(self, name: str, S: int, past: int, part: Callable[[Arrays], Arrays]) -> GoldenCase:
        """What some part of the trace must be."""
        trace = self.trace
        return GoldenCase(
            name=f"{trace.name} {name}",
            sizes=trace.cache.call_sizes(self.spec, trace.B, S, past),
            inputs={},
            oracle=trace.oracle.map(part),
            eager=part(trace.eager),
            baselines={name: each.map(part) for name, each in trace.baselines.items()},
            batch=self.spec.batch_name,
        )

    def _call(self, step: int) -> GoldenCase:
        """What the prompts must give, as step 0, or one of the steps behind them."""
        trace, axes, first = self.trace, self.axes, self.trace.longest_prompt

        def part(results: Arrays) -> Arrays:
            if step:
                return {name: trace.at_step(name, results[name], step) for name in axes}
            return self._prompts({x: np.take(results[x], np.arange(first), axes[x]) for x in axes})

        name, S, past = (f"step {step}", 1, first + step - 1) if step else ("prefill", first, 0)
        return self._case(name, S, past, part)

    def _prompts(self, outputs: Arrays) -> Arrays:
        return {name: without_padding(x, self.trace.prompt, self.axes[name]) for name, x in outputs.items()}

    def _join(self, parts: Sequence[Arrays]) -> Arrays:
        return {x: np.concatenate([part[x] for part in parts], axis) for x, axis in self.axes.items()}

    # -- what comes out ---------------------------------------------------------------------------

    def feed_all(self, loop: DecodeLoop, on_step: OnStep | None) -> None:
        """Prefill, steps and cache, up to the first call that cannot be run."""
        trace, steps = self.trace, self.calls[1:]
        # All steps as one case: what a single step hardly shows adds up.
        oracle, eager = (self._join([getattr(case, x) for case in steps]) for x in ("oracle", "eager"))
        baselines = {
            name: join_baselines([case.baselines[name] for case in steps], self.axes)
            for name in trace.baselines
        }
        name, reference = f"{trace.name} all steps", trace.oracle.map(lambda _: oracle)
        whole = replace(steps[-1], name=name, oracle=reference, eager=eager, baselines=baselines)
        if self.precision.name == "fp16":
            whole = replace(whole, suspects={"outputs in BF16": KnownMistake(_rounding_to_bf16(oracle))})
        together = case_budgets(whole, self.precision)
        budgets = [None, *step_budgets(steps, self.precision, together, self.axes)]
        fed: list[Arrays] = []
        for step, case in enumerate(self.calls):
            if on_step is not None:
                on_step(step)
            try:
                with foreign_errors("The decode loop failed."):
                    outputs, lengths = self._feed(loop, step), np.asarray(loop.lengths)
            except DeployError as error:
                self.found.append(judge.failed_to_run(case, error.in_one_line))
                return
            fed.append(outputs if step else self._prompts(outputs))
            verdicts, wanted = self._judge(case, fed[-1], budgets[step]), trace.prompt + step
            if not np.array_equal(lengths, wanted):
                values = str(lengths.tolist()), str(wanted.tolist())
                reason = Reason(kind=Kind.LENGTHS, got=values[0], wanted=values[1])
                verdicts.append(_failed(reason, case.sizes, case=case.name, output="lengths"))
            self.found.append(verdicts)
        if all(each.deviation is not None for verdicts in self.found for each in verdicts):
            self.afterwards += self._judge(whole, self._join(fed[1:]), together)
        if not getattr(loop, "hides_cache", False):  # a server may keep it to itself
            self.afterwards += self._judge_cache(loop)

    def _feed(self, loop: DecodeLoop, step: int) -> Arrays:
        """The outputs of a step, or of the prompt in as many calls as the decode loop needs for it."""
        if step:
            return loop.feed(self.trace.tokens(step), None)
        calls = prefill_calls(self.trace.prompt, loop.most_tokens)
        parts = [loop.feed(self.trace.prefill(part), counts) for part, counts in calls]
        return parts[0] if len(parts) == 1 else self._join(parts)

    def _judge(
        self, case: GoldenCase, got: Arrays, budgets: Mapping[str, Budget] | None = None
    ) -> list[OutputVerdict]:
        """The verdicts on a case; an error that is out of budget is reported with its place."""
        found = judge.judge_case(case, got, self.precision, budgets)
        for number, verdict in enumerate(found):
            if verdict.is_wrong and verdict.reason is not None and verdict.deviation is not None:
                index = verdict.deviation.worst_index
                axes = zip(_PLACES.get(len(index), ()), index, strict=False)
                places = ", ".join(f"{axis} {i}" for axis, i in axes)
                reason = structs.replace(verdict.reason, worst=places or str(index))
                found[number] = structs.replace(verdict, reason=reason)
        return found

    def _judge_cache(self, loop: DecodeLoop) -> list[OutputVerdict]:
        """The verdicts on the cached tensors, once all tokens were fed."""
        trace, ends = self.trace, self.trace.prompt + self.trace.steps

        def valid(results: Arrays) -> Arrays:
            found = {}
            for each in trace.cache.tensors:
                entries = np.asarray(results[each.name])
                # A dynamic cache has as many entries as there are tokens, and no more.
                if not each.in_order:
                    found[each.name] = entries
                    continue
                if trace.cache.is_preallocated and entries.ndim > each.axis:
                    count = min(trace.length, entries.shape[each.axis])
                    entries = np.take(entries, np.arange(count), each.axis)
                found[each.name] = without_padding(entries, ends, each.axis)
            return found

        case = self._case("cache", 1, trace.length - 1, valid)
        try:
            with foreign_errors("The cache cannot be read."):
                got = valid(loop.cache())
        except DeployError as error:
            return judge.failed_to_run(case, error.in_one_line)
        return self._judge(case, got)

    def report(self) -> DecodeReport:
        """What was found."""
        trace, steps, first = self.trace, self.calls[1 : len(self.found)], next(iter(self.axes))
        failed = (step for step, found in enumerate(self.found) if any(v.is_wrong for v in found))
        deviations = (found[0].deviation for found in self.found[1:])
        own = (metrics.measure(case.eager[first], case.oracle[first]).relative_l2 for case in steps)
        return DecodeReport(
            model=self.spec.name,
            precision=self.precision.name,
            runtime=self.runtime,
            trace=trace.name,
            prompt=tuple(trace.prompt.tolist()),
            steps=trace.steps,
            verdicts=(*(verdict for found in self.found for verdict in found), *self.afterwards),
            of_prefill=len(self.found[0]) if self.found else 0,
            first_failed=next(failed, None),
            errors=tuple(each.relative_l2 if each else None for each in deviations),
            eager_errors=tuple(own),
        )


def _rounding_to_bf16(arrays: Arrays) -> Arrays:
    """What rounding the floating-point ones to BF16 adds to them."""
    floats = {name: array for name, array in arrays.items() if np.issubdtype(array.dtype, np.floating)}
    return {name: x.astype(ml_dtypes.bfloat16).astype(np.float64) - x for name, x in floats.items()}


def case_budgets(
    case: GoldenCase, precision: Precision, to_heads: Mapping[str, ToHeads] | None = None
) -> dict[str, Budget]:
    """What the error of every output may be, from the case alone."""
    heads, baseline = to_heads or {}, case.baseline(precision.accumulate)
    return {
        name: metrics.budget_from_samples(
            baseline.samples[name], oracle, precision, baseline.branches, heads.get(name)
        )
        for name, oracle in case.oracle.items()
    }


def step_budgets(
    cases: Iterable[GoldenCase], precision: Precision, together: Mapping[str, Budget], axes: Mapping[str, int]
) -> list[dict[str, Budget]]:
    """What the error of every output may be at each step; `cases` has one for each, in order.

    A step has one token of each batch element. The module's own error there is one draw from few numbers, by
    chance a small one at some of a thousand steps. So a step may use the budgets of the steps around it,
    measure by measure, and the error that is expected of its slices is that of all steps `together`, which
    lie along `axes`.
    """
    each, found = [case_budgets(case, precision) for case in cases], []
    spreads = {
        name: whole.spread.slices([partial(np.take, indices=[i], axis=axes[name]) for i in range(len(each))])
        for name, whole in together.items()
        if whole.spread is not None
    }
    for index, own in enumerate(each):
        near, budgets = each[max(0, index - _NEIGHBOURS) : index + _NEIGHBOURS + 1], {}
        for name, budget in own.items():
            limits = {key: max(other[name].limits[key] for other in near) for key in budget.limits}
            spread = spreads[name][index] if name in spreads else budget.spread
            budgets[name] = Budget(**limits, spread=spread)
        found.append(budgets)
    return found


# -- One runner and one trace: what its profiles do not take is left out, what fails is a verdict --


def evaluate_trace(
    runner: Runner, trace: DecodeTrace, spec: ModelSpec, precision: Precision, on_step: OnStep | None = None
) -> DecodeReport | None:
    """Decode a trace with the cache where the runtime keeps it best; None where no profile takes a call."""

    def takes(S: int, past: int) -> bool:
        """Whether a profile admits a call of so many new tokens behind so many."""
        sizes = trace.cache.call_sizes(spec, trace.B, S, past)
        # A single zero for each input takes no memory.
        zeros = ((each, np.zeros((), precision.numpy_of(each.kind))) for each in spec.inputs)
        return admits(runner, {each.name: np.broadcast_to(zero, each.shape(sizes)) for each, zero in zeros})

    steps = 1 if trace.cache.is_preallocated else trace.steps  # with a preallocated cache all are alike
    if not all(takes(1, trace.longest_prompt + step) for step in range(steps)):
        return None
    report: DecodeReport | None = None
    try:
        with ExitStack() as owned:
            with foreign_errors("The decode loop cannot be opened."):
                loop = owned.enter_context(open_decode_loop(runner, spec, trace))
            # How a prompt is split into calls is the decode loop's to say.
            parts = [part for part, _ in prefill_calls(trace.prompt, loop.most_tokens)]
            if all(takes(part.stop - part.start, part.start) for part in parts):
                report = run_decode_loop(loop, trace, spec, precision, on_step)
            with foreign_errors("The decode loop failed at its end."):
                owned.close()
    except DeployError as error:
        if report is None:  # it has failed the prefill
            run = _DecodeRun(runner.name, trace, spec, precision)
            run.found.append(judge.failed_to_run(run.calls[0], error.in_one_line))
            return run.report()
        reason = Reason(kind=Kind.DID_NOT_CLOSE, got=error.in_one_line)
        failure = _failed(reason, report.verdicts[-1].sizes, case=f"{trace.name} end", output="cache")
        return replace(report, verdicts=(*report.verdicts, failure))  # devices report errors late
    return report


def _failed(reason: Reason, sizes: Mapping[str, int], *, case: str, output: str) -> OutputVerdict:
    return OutputVerdict(case=case, sizes=dict(sizes), output=output, outcome=Outcome.FAILED, reason=reason)


def admits(runner: Runner, feeds: Arrays) -> bool:
    """Whether a runner takes these inputs: an engine's profiles may be narrower than the layer's axes."""
    if not isinstance(runner, ProfiledRunner):
        return True
    try:
        return bool(runner.profiles_for(feeds))
    except DeployError:  # other names or types than the layer's: running it reports them
        return True


# -- The tokens that a model with a KV cache decodes: the bundle's own, and fresh ones -------------


def traces_of(bundle: Bundle, options: ValidateOptions) -> list[DecodeTrace]:
    """The traces of a bundle, and one more where the options ask for steps, which the source computes."""
    spec, steps, found = bundle.manifest.spec, options.steps, list[DecodeTrace]()
    if spec.kv_cache is None and not steps:
        return []
    for entry in bundle.manifest.traces:
        found.append(read_trace(bundle.file(entry.file), spec, bundle.manifest.precision, entry.source))
        if found[-1].name != entry.name:
            got = f"{entry.name} in {entry.file}"
            raise BundleError("A decode trace has another name than its file.", got=got, hint="export again")
    if not steps:
        return found
    prompt, batch = refuse_steps(spec, steps, options.prompt, options.batch)
    if any(entry.source is Source.FILE for entry in bundle.manifest.golden):
        from mha_deploy.baselines.imported import FileCases

        planned = PlannedTrace(name="drawn", prompt=(prompt,) * batch, steps=steps)
        return [*found, FileCases(bundle, options.source).trace(planned, options.seed)]
    refuse_without_torch("of fresh tokens")
    from mha_deploy.baselines.fresh import fresh_trace

    return [
        *found,
        fresh_trace(
            bundle, batch=batch, prompt=prompt, steps=steps, seed=options.seed, device=torch_device()
        ),
    ]
