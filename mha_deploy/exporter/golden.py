"""Golden cases and decode traces: the same numbers through a module in its precision, and in FP64."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, count, pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mha_deploy.bundle.cases import (
    Arrays,
    Baseline,
    DecodeTrace,
    GoldenCase,
    PlannedTrace,
    Reference,
    cached_outputs,
    check_steps,
    entries_from,
    first_new_entries,
    position_inputs,
    prefill_calls,
    run_calls,
    take_tokens,
)
from mha_deploy.bundle.manifest import Source
from mha_deploy.bundle.sizes import MaskFill, PlannedCase
from mha_deploy.errors import ExportError
from mha_deploy.exporter.axes import ExportedModule
from mha_deploy.exporter.explain import overflow_error, refuse_full_mask, run_explained
from mha_deploy.exporter.flow import refuse_large_error
from mha_deploy.exporter.oracle import (
    Float32Accumulation,
    Float64,
    RandomRounding,
    run_in_float64,
    run_program,
)
from mha_deploy.exporter.own_model import UserModule, draw_user_inputs
from mha_deploy.exporter.samples import sample_case
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import CACHE_TENSORS, KVCache, ModelSpec
from mha_deploy.reference.attention import Attention, split_heads
from mha_deploy.reference.inputs import (
    Feeds,
    call_arguments,
    clear_decisions,
    fed_to,
    random_inputs,
    seeded_generator,
    tensor_from_numpy,
    to_numpy,
)

Evaluate = Callable[[Float64], Arrays]
"""Computes results in FP64, or in a mode of it."""

# Rounding alone does not come near: the program would have to be another than the module.
_ONE_FLOW = "a module whose control flow does not depend on sizes or values"
_NO_WIDER = "inputs on which it is finite, as Example(draw=...) draws them; no other precision helps"
_SAME_PROGRAM = 0.25
_SAME_CALLS = 1e-5  # in FP64
_DIFFERENT_CALLS = "Decoding token by token gives something else than one call with all tokens."


def arrays_of(tensors: Mapping[str, Tensor], *, exact: bool = False) -> Arrays:
    """Tensors as arrays; what is exact is kept in float64."""
    arrays = {name: to_numpy(tensor) for name, tensor in tensors.items()}
    return {n: a.astype(np.float64) if exact and a.dtype.kind == "f" else a for n, a in arrays.items()}


def _attention_flops(query: list[int], key: list[int], value: list[int], *_: object, **__: object) -> int:
    """The work of fused attention, from the shapes of its inputs: two matmuls of each query and key."""
    B, Hq, S, D = query
    return 2 * B * Hq * S * key[2] * (D + value[3])


# PyTorch itself counts it for its GPU kernels only.
_ON_CPU = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}


class Capture(ABC):
    """Captures a model: its inputs are drawn, run in its own precision, and evaluated in FP64."""

    source: Source  # what the references come from
    remedy: str  # what helps where the module overflows
    most_tokens: int | None = None  # of a prompt that the module takes in one call, where memory is short
    counts_work = False  # that of a catalog layer follows from its spec

    def __init__(self, module: nn.Module, precision: Precision, seed: int, outputs: Iterable[str]) -> None:
        self.module, self.precision, self.seed, self._outputs = module, precision, seed, tuple(outputs)
        self.change: Callable[[Feeds], Feeds] = dict  # of what was drawn
        self.batch = "B"  # the axis of the batch
        self.cached: Mapping[str, str] = {}  # KV caches of which a golden case keeps the new entries only
        self.notes: list[str] = []  # what a reader should know of what was captured

    @abstractmethod
    def draw(self, planned: PlannedCase) -> Feeds:
        """The inputs of a case, as the module takes them."""

    @abstractmethod
    def evaluate_in_fp64(self, feeds: Feeds, mode: Float64 | None = None) -> Feeds:
        """The outputs in FP64, or in a mode of it."""

    @abstractmethod
    def evaluate_sequence(
        self, spec: ModelSpec, cache: KVCache, planned: PlannedTrace
    ) -> tuple[Feeds, Evaluate]:
        """All tokens of a trace in one call: its inputs with an empty KV cache, and what computes it."""

    def arguments(self, feeds: Feeds) -> Feeds:
        """Inputs by the parameters of `forward`."""
        return feeds

    def run_eager(self, feeds: Feeds, where: str, counter: FlopCounterMode | None = None) -> Feeds:
        """The outputs of the module as its user runs it; its work is counted where there is a counter."""
        where, hint = f"the sizes of {where}", "axes that it takes, or a draw= for its inputs"
        with counter or nullcontext():
            tensors = run_explained(self.module, self.arguments(feeds), where, hint=hint)
        return dict(zip(self._outputs, tensors, strict=True))

    def as_taken(self, feeds: Feeds) -> Feeds:
        """Inputs in the types of the module."""
        return feeds

    @abstractmethod
    def given(self, feeds: Feeds) -> Feeds:
        """Inputs of a user's own, as the module takes them."""

    def capture(self, planned: PlannedCase, given: Feeds | None = None) -> GoldenCase:
        """Run one case, on inputs that are given or drawn."""
        if planned.given is not None:
            given = {name: tensor_from_numpy(array) for name, array in planned.given.items()}
        feeds = self.draw(planned) if given is None else self.given(given)
        counter = FlopCounterMode(display=False, custom_mapping=_ON_CPU) if self.counts_work else None
        eager = self.run_eager(feeds, f"golden case {planned.name}", counter)
        inputs = arrays_of(feeds)
        starts = {name: first_new_entries(inputs, taken) for name, taken in self.cached.items()}

        def compute(mode: Float64) -> Arrays:
            return arrays_of(self.evaluate_in_fp64(feeds, mode), exact=True)

        def kept(outputs: Arrays) -> Arrays:
            """Of a KV cache, the entries that the call wrote."""
            S = inputs["x"].shape[1] if starts else 0
            new = {name: entries_from(outputs[name], at, S) for name, at in starts.items()}
            return {name: new.get(name, array) for name, array in outputs.items()}

        oracle, baselines, _ = sample_case(RandomRounding, self.precision, compute, kept)
        case = GoldenCase(
            name=planned.name,
            sizes=dict(planned.sizes),
            inputs=inputs,
            oracle=Reference(oracle, self.source),
            eager=self.as_stored(arrays_of(eager)),
            baselines=baselines,
            batch=self.batch,
            flops=0 if counter is None else counter.get_total_flops(),
            cached=self.cached,
        )
        self.refuse_overflow(case, lambda: self.module(**self.arguments(feeds)))
        return case

    def as_stored(self, results: Arrays) -> Arrays:
        """The results of the module in the types of the graph."""
        return results

    def refuse_overflow(self, case: GoldenCase, run: Callable[[], object] | None = None) -> None:
        """Refuse a case on which the module or its oracle is not finite: nothing can be compared with it."""
        for name in case.eager:
            # Some kernels of PyTorch give zeros where a weight is NaN; the oracle shows it.
            results = (case.eager[name], case.oracle[name])
            if not all(np.isfinite(array.astype(np.float64)).all() for array in results):
                where, short = f"output {name} of golden case {case.name}", self.module_precision
                # Not even the oracle is finite, or nothing wider is exported.
                is_last = not np.isfinite(results[1]).all() or self.precision.name == "fp32"
                hint = _NO_WIDER if short == "fp32" and is_last else self.remedy
                raise overflow_error(where, short, module=self.module, run=run, hint=hint)

    @property
    def module_precision(self) -> str:
        """The precision that the module runs in."""
        return self.precision.name

    def trace(self, spec: ModelSpec, planned: PlannedTrace) -> DecodeTrace:
        """Draw tokens, decode them with the module, and compute the whole sequence in FP64, in one call."""
        name, steps, prompt = planned.name, planned.steps, np.array(planned.prompt, np.int32)
        cache = check_steps(spec, prompt, steps)
        feeds, compute = self.evaluate_sequence(spec, cache, planned)
        oracle, baselines, _ = sample_case(RandomRounding, self.precision, compute)
        held = {each.input: feeds.pop(each.input) for each in cache.tensors}
        for each in cache.positions:
            feeds.pop(each.name, None)  # they follow from the lengths
        trace = DecodeTrace(
            name=name,
            cache=cache,
            inputs=self.as_stored(arrays_of(feeds)),
            prompt=prompt,
            steps=steps,
            oracle=Reference(oracle, self.source),
            eager={},
            baselines=dict(baselines),
        )
        eager = self._decode(trace, held)
        self.refuse_overflow(
            GoldenCase(name=name, sizes={}, inputs={}, oracle=trace.oracle, eager=eager, baselines={})
        )
        same = all(eager[name].shape == array.shape for name, array in oracle.items())
        got, true = (trace.defined(each) if same else each for each in (eager, oracle))
        where, hint = f"{name}, after {steps} steps", _decoding_hint(cache)
        refuse_large_error(where, got, true, _SAME_PROGRAM, _DIFFERENT_CALLS, hint)
        return replace(trace, eager=eager)

    def _decode(self, trace: DecodeTrace, held: Feeds) -> Arrays:
        """The module in its own precision: the prefill in as few calls as it takes, then one token a call."""
        cache, number = trace.cache, count()

        def calls() -> Iterator[Feeds]:
            lengths, prefill = np.zeros(trace.B, np.int32), prefill_calls(trace.prompt, self.most_tokens)
            several = ((trace.prefill(part), counts, part.stop - part.start) for part, counts in prefill)
            single = ((trace.tokens(step), None, 1) for step in range(1, trace.steps + 1))
            for tokens, counts, S in chain(several, single):
                given = tokens | position_inputs(cache, lengths, S)
                yield self.as_taken({name: tensor_from_numpy(array) for name, array in given.items()})
                lengths = lengths + (np.int32(S) if counts is None else counts)

        def run(feeds: Feeds) -> Feeds:
            return self.run_eager(feeds, f"{trace.name}, call {next(number)}")

        parts, held = run_calls(cache, held, calls(), run)
        joined = {
            name: np.concatenate(list(map(to_numpy, tensors)), cache.outputs[name])
            for name, tensors in parts.items()
        }
        eager = self.as_stored(joined | {each.name: to_numpy(held[each.input]) for each in cache.tensors})
        if not cache.is_preallocated:
            return eager
        # By call, the padding of shorter prompts comes before their steps.
        at, prompt = np.arange(trace.length), trace.prompt[:, None]
        order = np.where(at < prompt, at, np.minimum(at + trace.longest_prompt - prompt, trace.length - 1))
        entries = {
            each.name: np.take(eager[each.name], at, each.axis) if each.in_order else eager[each.name]
            for each in cache.tensors
        }
        return {n: take_tokens(eager[n], axis, order) for n, axis in cache.outputs.items()} | entries


def _decoding_hint(cache: KVCache) -> str:
    """What to try where decoding depends on which tokens come in one call."""
    hint = "let new tokens attend to cached ones and none after them, at positions that continue theirs"
    hint += ", and to no entry that no token wrote" if cache.is_preallocated else ""
    hint += "; name every cached input in kv_cache, each with its own output"
    return f"{hint}; without kv_cache= decoding is not validated"


def _refuse_difference(got: Arrays, name: str, cache: KVCache, true: Arrays, what: str, hint: str) -> None:
    """Refuse outputs by token that other calls change: in FP64, where no rounding explains it."""
    outputs, wanted = ({key: each[key] for key in cache.outputs} for each in (got, true))
    refuse_large_error(name, outputs, wanted, _SAME_CALLS, what, hint)


def _whole_masks(cache: KVCache, feeds: Feeds) -> list[str]:
    """The masks of whole numbers or booleans over all tokens so far, by batch element."""
    return [name for name, axis in cache.by_context.items() if axis and not feeds[name].is_floating_point()]


def _where_seen(got: Arrays, true: Arrays, cache: KVCache, feeds: Feeds) -> Arrays:
    """Results that are those of `true` for tokens that a mask hides from all queries, such as padding.

    The query of such a token may have no key that it sees, and then attends to all keys of its call alike.
    """
    found = dict(got)
    for mask in _whole_masks(cache, feeds):
        seen = feeds[mask].ne(0).movedim(cache.by_context[mask], -1)
        hidden = ~(seen if seen.dim() == 2 else seen.flatten(1, -2).any(1)).numpy()
        for name, axis in cache.outputs.items():
            tokens = np.moveaxis(found[name], axis, 1) if axis else found[name]
            if tokens.shape[:2] == hidden.shape:
                part = tokens.copy()
                part[hidden] = np.moveaxis(true[name], axis, 1)[hidden]
                found[name] = np.moveaxis(part, 1, axis)
    return found


# -- Of a catalog layer, which runs in FP64 itself -------------------------------------------------

# In units of the precision's roundoff: a gate adds E numbers of size one over √E, and engines that
# accumulate in half precision lose several bits of it.
_DECISION_MARGIN = 16.0

RunOracle = Callable[..., tuple[Tensor, ...]]
"""Computes a layer on arguments in FP64, or in a `mode` of it."""


class LayerCapture(Capture):
    """Captures a catalog layer; `run_oracle` runs it in FP64, within a bound on memory if need be.

    The oracle has the rounded weights: rounding them is the user's choice, not an error.
    """

    module: Attention
    source = Source.LAYER
    remedy = "--precision bf16 or fp32"

    def __init__(
        self, module: Attention, precision: Precision, seed: int, *, run_oracle: RunOracle = run_in_float64
    ) -> None:
        super().__init__(module, precision, seed, [tensor.name for tensor in module.spec.outputs])
        self._run_oracle, self.oracle = run_oracle, module.variation(path="sdpa")
        self.cached = cached_outputs(module.spec)

    def draw(self, planned: PlannedCase) -> Feeds:
        """Drawn from the seed, without tokens at which rounding decides."""
        spec, margin = self.module.spec, _DECISION_MARGIN * self.precision.roundoff
        drawn = random_inputs(
            spec, planned.sizes, self.seed, label=planned.name, ragged=planned.ragged, past=planned.past
        )
        return clear_decisions(self.module, fed_to(self.module, self.change(drawn)), self.seed, margin=margin)

    def given(self, feeds: Feeds) -> Feeds:
        """Inputs of a user's own, on the device; what rounding decides stays as it is."""
        return fed_to(self.module, feeds)

    def arguments(self, feeds: Feeds) -> Feeds:
        """Inputs by the parameters of `Attention.forward`, on the device."""
        return call_arguments(self.module.spec, fed_to(self.module, feeds))

    def evaluate_in_fp64(self, feeds: Feeds, mode: Float64 | None = None) -> Feeds:
        """The outputs of the layer in FP64."""
        return dict(
            zip(self._outputs, self._run_oracle(self.oracle, self.arguments(feeds), mode=mode), strict=True)
        )

    def evaluate_sequence(
        self, spec: ModelSpec, cache: KVCache, planned: PlannedTrace
    ) -> tuple[Feeds, Evaluate]:
        """The tokens through the layer without a KV cache: no mistake in a cache can touch it."""
        layer = self.module.spec
        oracle = self.oracle.variation(spec=layer.without_cache())
        sizes = {"B": len(planned.prompt), "S": max(planned.prompt) + planned.steps}
        drawn = self.change(random_inputs(oracle.spec, sizes, self.seed, label=planned.name))
        x = fed_to(self.module, drawn)["x"]

        def compute(mode: Float64) -> Arrays:
            (output,) = self._run_oracle(oracle, {"query": x}, mode=mode)
            with torch.inference_mode(), mode:
                q, k, v = oracle.project(x, None, None)
                _, k = oracle.rotate(q, k, torch.arange(x.shape[1], device=x.device))
            key, value = (split_heads(each, layer.Hkv).contiguous() for each in (k, v))
            return arrays_of({"output": output, "key": key, "value": value})

        entries = layer.axes["T"].max if cache.is_preallocated else 0
        empty = x.new_zeros(len(x), layer.Hkv, entries, layer.D)
        return {"x": x} | dict.fromkeys(CACHE_TENSORS[layer.cache][0], empty), compute


# -- Of a user's module: the FP64 oracle is its exported program -----------------------------------


class ModuleCapture(Capture):
    """Runs a user's module and its program.

    With `--precision auto` the module is in float32, and `types` are those of the mixed graph's inputs and
    outputs: cases are stored in them. Nothing else of the graph is used.
    """

    source = Source.PROGRAM
    counts_work = True

    def __init__(
        self,
        user: UserModule,
        exported: ExportedModule,
        precision: Precision,
        seed: int,
        types: Mapping[str, np.dtype] | None = None,
    ) -> None:
        super().__init__(user.module, precision, seed, exported.outputs)
        self.user, self.exported, self._types = user, exported, types or {}
        self.remedy = f"--precision {'' if self._types else 'auto, '}bf16 or fp32"

    @property
    def module_precision(self) -> str:
        """With `auto`, float32."""
        return "fp32" if self._types else self.precision.name

    def draw(self, planned: PlannedCase) -> Feeds:
        """Drawn by the user's own function, or after the example: the numbers that a mixed graph takes."""
        draw = partial(draw_user_inputs, self.user, past=planned.past, ragged=planned.ragged)
        drawn = draw(planned.name, planned.sizes, self.seed)
        # Any row of a table may be chosen; what repeats the example would make batch elements equal.
        for key, rows in self.exported.tables.items():
            if self.user.inputs[key].draw is None and key not in self.user.positions:
                random = seeded_generator(self.seed, f"{planned.name}/{key}")
                chosen = torch.randint(rows, drawn[key].shape, generator=random)
                drawn[key] = chosen.to(drawn[key].device, drawn[key].dtype)
        drawn = self.change(drawn)
        taken = {
            key: array if self.user.inputs[key].draw else planned.change(key, array, self.user.dims[key])
            for key, array in self.as_stored(arrays_of(drawn)).items()
        }
        feeds = {key: tensor_from_numpy(taken[key]).to(tensor.dtype) for key, tensor in drawn.items()}
        if MaskFill.ALL in planned.masks:
            refuse_full_mask(self.module, self.arguments(feeds), f"golden case {planned.name}")
        return feeds

    def as_stored(self, results: Arrays) -> Arrays:
        """Arrays in the types of the mixed graph."""
        return {key: array.astype(self._types.get(key, array.dtype)) for key, array in results.items()}

    def as_taken(self, feeds: Feeds) -> Feeds:
        """Inputs in the types of the module."""
        known = {name: example.dtype for name, example in self.user.examples.items()}
        return {name: each.to(known.get(name, each.dtype)) for name, each in feeds.items()}

    def evaluate_in_fp64(self, feeds: Feeds, mode: Float64 | None = None) -> Feeds:
        """The outputs of the program in FP64, where the module runs."""
        try:
            return run_program(self.exported, feeds, mode=mode)[0]
        except (RuntimeError, IndexError) as error:
            what = "The exported program fails where the module runs."
            raise ExportError(what, got=str(error).splitlines()[0], hint=_ONE_FLOW) from error

    def given(self, feeds: Feeds) -> Feeds:
        """Inputs of a user's own, in the types of the module: the numbers that a mixed graph takes."""
        return self.as_taken(
            {key: tensor_from_numpy(x) for key, x in self.as_stored(arrays_of(feeds)).items()}
        )

    def capture(self, planned: PlannedCase, given: Feeds | None = None) -> GoldenCase:
        """Run one case: the program must be the module."""
        case = super().capture(planned, given)
        case = replace(case, inputs=self.as_stored(case.inputs))
        # Tracing may have settled a choice for the example's sizes or values: the program then differs.
        where, what = f"golden case {case.name}", "The exported program is not what the module computes."
        refuse_large_error(where, case.eager, case.oracle, _SAME_PROGRAM, what, _ONE_FLOW)
        return case

    def evaluate_sequence(
        self, spec: ModelSpec, cache: KVCache, planned: PlannedTrace
    ) -> tuple[Feeds, Evaluate]:
        """The tokens through the program, behind an empty past: as many in a call as their axis allows.

        Where a preallocated cache does not keep all of them in order, as a ring buffer, they come as in
        decoding: results may depend on it.
        """
        L = max(planned.prompt) + planned.steps
        sizes = cache.call_sizes(spec, len(planned.prompt), L, 0)
        feeds = self.draw(PlannedCase(name=planned.name, sizes=sizes, past=0))
        most, prompt = spec.axes[cache.new].max, int(max(planned.prompt))
        whole, other = [*range(0, L, most), L], [*range(0, prompt, most), *range(prompt + 1, L, most), L]
        other = sorted({*other, prompt})  # a token by itself behind the prompt
        held = {each.input: feeds[each.input] for each in cache.tensors}
        empty = {name: torch.zeros_like(tensor) for name, tensor in held.items()}
        if not cache.is_in_order:
            whole = other = [*range(0, prompt, most), *range(prompt, L + 1)]
            feeds |= empty
        run, mode = partial(self._run_calls, cache, feeds), Float64()
        true, where = run(empty, whole, mode), planned.name
        decoding = (where, cache, true, _DIFFERENT_CALLS, _decoding_hint(cache))
        if not cache.is_preallocated:
            if all(np.isfinite(true[name]).all() for name in cache.outputs):  # else refused with its cause
                got = run(empty, other, mode)
                try:
                    _refuse_difference(got, *decoding)
                except ExportError:  # which it stays unless only hidden tokens differ
                    _refuse_difference(_where_seen(got, true, cache, feeds), *decoding)
                    feeds |= {name: torch.ones_like(feeds[name]) for name in _whole_masks(cache, feeds)}
                    true = run(empty, whole, mode)
                    _refuse_difference(run(empty, other, mode), where, cache, true, *decoding[3:])
                    self.notes.append(
                        f"trace {where}: without padding; what a padded token gives depends on which tokens "
                        "come in one call"
                    )
        else:
            what = "A KV cache that holds other numbers where no token wrote changes the outputs."
            hint = "let tokens attend only to entries that were written, up to their own position"
            hint += "; an empty cache is all zeros"
            try:  # both mistakes at once
                _refuse_difference(run(held, other, mode), *decoding)
            except ExportError:
                _refuse_difference(run(held, whole, mode), where, cache, true, what, hint)
                raise
        return dict(feeds), lambda mode: run(empty, whole, mode)

    def _run_calls(
        self, cache: KVCache, feeds: Feeds, held: Feeds, bounds: Sequence[int], mode: Float64
    ) -> Arrays:
        """The results of calls with the tokens from each of the bounds to the next, in FP64."""
        B, cached = next(iter(held.values())).shape[0], {*held}

        def call(start: int, stop: int) -> Feeds:
            part = {name: each for name, each in feeds.items() if name not in cached}
            for name, axis in cache.by_token.items():
                part[name] = part[name].narrow(axis, start, stop - start)
            for name, axis in cache.by_context.items():
                part[name] = part[name].narrow(axis, 0, stop)
            made = position_inputs(cache, np.full(B, start), stop - start)
            return part | {name: torch.from_numpy(array) for name, array in made.items()}

        calls = (call(*ends) for ends in pairwise(bounds))
        parts, held = run_calls(cache, held, calls, lambda part: self.evaluate_in_fp64(part, mode))
        joined = {name: torch.cat(tensors, cache.outputs[name]) for name, tensors in parts.items()}
        for each in cache.tensors:
            whole = held[each.input]
            joined[each.name] = whole.narrow(each.axis, 0, bounds[-1]) if each.in_order else whole
        return arrays_of(joined, exact=True)

    def look_inside(
        self, case: GoldenCase, values: Collection[str]
    ) -> tuple[Reference, Arrays, dict[str, Baseline]]:
        """Values of the graph in a captured case, by name: what is right, the module's own, and samples."""
        # Not drawn again: a user's draw may give other numbers the second time.
        given = self.as_taken({key: tensor_from_numpy(array) for key, array in case.inputs.items()})
        inputs = self.user.rounded(given)

        def compute(mode: Float64) -> Arrays:
            return arrays_of(run_program(self.exported, inputs, mode=mode, keep=values)[1], exact=True)

        oracle, baselines, _ = sample_case(RandomRounding, self.precision, compute)
        own = arrays_of(run_program(self.exported, inputs, mode=Float32Accumulation(), keep=values)[1])
        return Reference(oracle, self.source), self.as_stored(own), dict(baselines)
