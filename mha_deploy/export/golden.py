"""Golden cases and decode traces: the same numbers through a module in its precision, and in FP64."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from itertools import chain

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mha_deploy.bundle.cases import (
    DecodeTrace,
    GoldenCase,
    PlannedTrace,
    cached_outputs,
    check_steps,
    prefill_calls,
    take_tokens,
)
from mha_deploy.errors import ExportError
from mha_deploy.export.axes import ExportedModule
from mha_deploy.export.explain import overflow_error, run_explained
from mha_deploy.export.flow import PlannedCase, refuse_large_error
from mha_deploy.export.oracle import Float64, run_in_float64, run_program
from mha_deploy.export.own_model import UserModule, draw_user_inputs
from mha_deploy.graph.file import with_outputs
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import CACHE_TENSORS, LENGTHS, KVCache, ModelSpec
from mha_deploy.reference.attention import Attention, split_heads
from mha_deploy.reference.inputs import (
    Feeds,
    call_arguments,
    clear_decisions,
    fed_to,
    random_inputs,
    tensor_from_numpy,
    to_numpy,
)
from mha_deploy.runtime import open_runner
from mha_deploy.runtime.runner import Runner

Arrays = dict[str, np.ndarray]

# Rounding alone does not come near: the program would have to be another than the module.
_ONE_FLOW = "a module whose control flow does not depend on sizes or values"
_SAME_PROGRAM = 0.25
# Rounding to FP16 costs less than this many layers deep; more is a mistake, not rounding.
_LARGEST_ERROR = 0.05


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

    remedy: str  # what helps where the module overflows
    most_tokens: int | None = None  # of a prompt that the module takes in one call, where memory is short
    counts_work = False  # that of a catalog layer follows from its spec

    def __init__(self, module: nn.Module, precision: Precision, seed: int, outputs: Iterable[str]) -> None:
        self.module, self.precision, self.seed, self._outputs = module, precision, seed, tuple(outputs)
        self.change: Callable[[Feeds], Feeds] = dict  # of what was drawn
        self.cached: Mapping[str, str] = {}  # KV caches of which a golden case keeps the new entries only

    @abstractmethod
    def draw(self, planned: PlannedCase) -> Feeds:
        """The inputs of a case, as the module takes them."""

    @abstractmethod
    def evaluate_in_fp64(self, feeds: Feeds) -> Feeds:
        """The outputs in FP64."""

    @abstractmethod
    def evaluate_sequence(
        self, spec: ModelSpec, cache: KVCache, planned: PlannedTrace
    ) -> tuple[Feeds, Arrays]:
        """All tokens of a trace in one call: its inputs with an empty KV cache, and what it gives in FP64."""

    def arguments(self, feeds: Feeds) -> Feeds:
        """Inputs by the parameters of `forward`."""
        return feeds

    def run_eager(self, feeds: Feeds, where: str, counter: FlopCounterMode | None = None) -> Feeds:
        """The outputs of the module as its user runs it; its work is counted where there is a counter."""
        where, hint = f"the sizes of {where}", "axes that it takes, or a draw= for its inputs"
        with counter or nullcontext():
            tensors = run_explained(self.module, self.arguments(feeds), where, hint=hint)
        return dict(zip(self._outputs, tensors, strict=True))

    def run_step(self, feeds: Feeds, where: str) -> Feeds:
        """The outputs of one call of the decode loop."""
        return self.run_eager(feeds, where)

    def close(self) -> None:  # noqa: B027 (only some open any)
        """Close what was opened for the cases."""

    def capture(self, planned: PlannedCase) -> GoldenCase:
        """Run one case."""
        feeds = self.draw(planned)
        counter = FlopCounterMode(display=False, custom_mapping=_ON_CPU) if self.counts_work else None
        eager = self.run_eager(feeds, f"golden case {planned.name}", counter)
        case = GoldenCase(
            name=planned.name,
            sizes=dict(planned.sizes),
            inputs=arrays_of(feeds),
            oracle=arrays_of(self.evaluate_in_fp64(feeds), exact=True),
            eager=arrays_of(eager),
            flops=0 if counter is None else counter.get_total_flops(),
            cached=self.cached,
        )
        self.refuse_overflow(case, lambda: self.module(**self.arguments(feeds)))
        return case

    def refuse_overflow(self, case: GoldenCase, run: Callable[[], object] | None = None) -> None:
        """Refuse a case on which the module itself overflows: its budget would be infinite."""
        for name in case.eager:
            # Some kernels of PyTorch give zeros where a weight is NaN; the oracle shows it.
            results = (case.eager[name], case.oracle[name])
            if not all(np.isfinite(array.astype(np.float64)).all() for array in results):
                where, short = f"output {name} of golden case {case.name}", self.precision.name
                raise overflow_error(where, short, module=self.module, run=run, hint=self.remedy)

    def trace(self, spec: ModelSpec, planned: PlannedTrace) -> DecodeTrace:
        """Draw tokens, decode them with the module, and compute the whole sequence in FP64, in one call."""
        name, steps, prompt = planned.name, planned.steps, np.array(planned.prompt, np.int32)
        cache = check_steps(spec, prompt, steps)
        feeds, oracle = self.evaluate_sequence(spec, cache, planned)
        held = {each.input: feeds.pop(each.input) for each in cache.tensors}
        trace = DecodeTrace(
            name=name,
            cache=cache,
            inputs=arrays_of(feeds),
            prompt=prompt,
            steps=steps,
            oracle=oracle,
            eager={},
        )
        eager = self._decode(trace, held)
        self.refuse_overflow(GoldenCase(name=name, sizes={}, inputs={}, oracle=oracle, eager=eager))
        what = "Decoding token by token gives something else than one call with all tokens."
        hint = "let new tokens attend to cached ones and none behind them, at positions that continue theirs"
        hint += "; without kv_cache= decoding is not validated"
        same = all(eager[name].shape == array.shape for name, array in oracle.items())
        got, true = (trace.defined(each) if same else each for each in (eager, oracle))
        refuse_large_error(f"{name}, after {steps} steps", got, true, _SAME_PROGRAM, what, hint)
        return replace(trace, eager=eager)

    def _decode(self, trace: DecodeTrace, held: Feeds) -> Arrays:
        """The module in its own precision: the prefill in as few calls as it takes, then one token a call."""
        cache, lengths = trace.cache, np.zeros(trace.B, np.int32)
        parts: dict[str, list[np.ndarray]] = {name: [] for name in cache.outputs}
        prefill = prefill_calls(trace.prompt, self.most_tokens)
        calls = chain(
            ((trace.prefill(part), counts, part.stop - part.start) for part, counts in prefill),
            ((trace.tokens(step), None, 1) for step in range(1, trace.steps + 1)),
        )
        for number, (tokens, counts, S) in enumerate(calls):
            given = tokens | ({LENGTHS: lengths} if cache.is_preallocated else {})
            feeds = {name: tensor_from_numpy(array) for name, array in given.items()}
            got = self.run_step(feeds | held, f"{trace.name}, call {number}")
            held = {each.input: got[each.output] for each in cache.tensors}
            lengths = lengths + (np.int32(S) if counts is None else counts)
            for name, arrays in parts.items():
                arrays.append(to_numpy(got[name]))
        eager = {name: np.concatenate(arrays, cache.outputs[name]) for name, arrays in parts.items()}
        eager |= {each.name: to_numpy(held[each.input]) for each in cache.tensors}
        if not cache.is_preallocated:
            return eager
        # By call, the padding of shorter prompts comes before their steps.
        at, prompt = np.arange(trace.length), trace.prompt[:, None]
        order = np.where(at < prompt, at, np.minimum(at + trace.longest_prompt - prompt, trace.length - 1))
        entries = {each.name: np.take(eager[each.name], at, each.axis) for each in cache.tensors}
        return {n: take_tokens(eager[n], axis, order) for n, axis in cache.outputs.items()} | entries


# -- Of a catalog layer, which runs in FP64 itself -------------------------------------------------

# In units of the precision's roundoff: a gate is a sum of E matmuls of size one over √E, and engines that
# accumulate in half precision lose several bits of it.
_DECISION_MARGIN = 16.0

RunOracle = Callable[[Attention, dict[str, Tensor]], tuple[Tensor, ...]]


class LayerCapture(Capture):
    """Captures a catalog layer; `run_oracle` runs it in FP64, within a bound on memory if need be.

    The oracle has the rounded weights: rounding them is the user's choice, not an error.
    """

    module: Attention
    remedy = "--precision bf16 or fp32"

    def __init__(
        self, module: Attention, precision: Precision, seed: int, *, run_oracle: RunOracle = run_in_float64
    ) -> None:
        super().__init__(module, precision, seed, [tensor.name for tensor in module.spec.outputs])
        self._run_oracle, self.oracle = run_oracle, module.variation(path="sdpa")
        self.cached = cached_outputs(module.spec.model)

    def draw(self, planned: PlannedCase) -> Feeds:
        """Drawn from the seed, without tokens at which rounding decides."""
        spec, margin = self.module.spec, _DECISION_MARGIN * self.precision.roundoff
        drawn = random_inputs(
            spec, planned.sizes, self.seed, label=planned.name, ragged=planned.ragged, past=planned.past
        )
        return clear_decisions(self.module, fed_to(self.module, self.change(drawn)), self.seed, margin=margin)

    def arguments(self, feeds: Feeds) -> Feeds:
        """Inputs by the parameters of `Attention.forward`, on the device."""
        return call_arguments(self.module.spec, fed_to(self.module, feeds))

    def evaluate_in_fp64(self, feeds: Feeds) -> Feeds:
        """The outputs of the layer in FP64."""
        return dict(zip(self._outputs, self._run_oracle(self.oracle, self.arguments(feeds)), strict=True))

    def evaluate_sequence(
        self, spec: ModelSpec, cache: KVCache, planned: PlannedTrace
    ) -> tuple[Feeds, Arrays]:
        """The tokens through the layer without a KV cache: no mistake in a cache can touch it."""
        layer = self.module.spec
        oracle = self.oracle.variation(spec=layer.without_cache())
        sizes = {"B": len(planned.prompt), "S": max(planned.prompt) + planned.steps}
        drawn = self.change(random_inputs(oracle.spec, sizes, self.seed, label=planned.name))
        x = fed_to(self.module, drawn)["x"]
        (output,) = self._run_oracle(oracle, {"query": x})
        with torch.inference_mode(), Float64():
            q, k, v = oracle.project(x, None, None)
            _, k = oracle.rotate(q, k, torch.arange(x.shape[1], device=x.device))
        key, value = (split_heads(each, layer.Hkv).contiguous() for each in (k, v))
        entries = layer.axes["T"].max if cache.is_preallocated else 0
        empty = x.new_zeros(len(x), layer.Hkv, entries, layer.D)
        feeds = {"x": x} | dict.fromkeys(CACHE_TENSORS[layer.cache][0], empty)
        return feeds, arrays_of({"output": output, "key": key, "value": value})


# -- Of a user's module: the FP64 oracle is its exported program -----------------------------------


class ModuleCapture(Capture):
    """Runs a user's module and its program.

    `mixed` is the graph of `--precision auto`, which stands for the module where budgets come from: PyTorch
    does not compute in its mixture of types. The module is in float32 then.
    """

    remedy = "--precision auto, bf16 or fp32"
    counts_work = True

    def __init__(
        self, user: UserModule, exported: ExportedModule, seed: int, mixed: ir.Model | None = None
    ) -> None:
        super().__init__(user.module, user.precision, seed, exported.outputs)
        self.user, self.exported, self._mixed = user, exported, mixed
        inputs = [] if mixed is None else mixed.graph.inputs
        self._types = {str(value.name): value.dtype.numpy() for value in inputs if value.dtype is not None}

    @cached_property
    def _runner(self) -> Runner | None:
        """The mixed graph, if there is one, loaded once for all cases."""
        return None if self._mixed is None else open_runner("ort-cpu", self._mixed)

    def close(self) -> None:
        """Close the session of the mixed graph; the next case opens another."""
        if (runner := vars(self).pop("_runner", None)) is not None:
            runner.close()

    def draw(self, planned: PlannedCase) -> Feeds:
        """Drawn by the user's own function, or after the example: the numbers that a mixed graph takes."""
        drawn = self.change(draw_user_inputs(self.user, planned.name, planned.sizes, self.seed))
        if self._mixed is None:
            return drawn
        taken = self._as_taken(arrays_of(drawn))
        return {key: torch.from_numpy(taken[key]).to(tensor.dtype) for key, tensor in drawn.items()}

    def _as_taken(self, arrays: Mapping[str, np.ndarray]) -> Arrays:
        """Arrays in the types of the mixed graph."""
        return {key: array.astype(self._types.get(key, array.dtype)) for key, array in arrays.items()}

    def evaluate_in_fp64(self, feeds: Feeds) -> Feeds:
        """The outputs of the program in FP64, where the module runs."""
        try:
            return run_program(self.exported, feeds)[0]
        except (RuntimeError, IndexError) as error:
            what = "The exported program fails where the module runs."
            raise ExportError(what, got=str(error).splitlines()[0], hint=_ONE_FLOW) from error

    def capture(self, planned: PlannedCase) -> GoldenCase:
        """Run one case: the program must be the module, and near it the mixed graph."""
        case = super().capture(planned)
        # Tracing may have settled a choice for the example's sizes or values: the program then differs.
        where, what = f"golden case {case.name}", "The exported program is not what the module computes."
        refuse_large_error(where, case.eager, case.oracle, _SAME_PROGRAM, what, _ONE_FLOW)
        if self._runner is None:
            return case
        taken = self._as_taken(case.inputs)
        got = self._runner.run(taken)
        case = replace(case, inputs=taken, eager={key: got[key] for key in case.oracle})
        self.refuse_overflow(case)
        what, hint = "The mixed graph is too far from the module.", "--precision bf16 or fp32"
        refuse_large_error(where, case.eager, case.oracle, _LARGEST_ERROR, what, hint)
        return case

    def evaluate_sequence(
        self, spec: ModelSpec, cache: KVCache, planned: PlannedTrace
    ) -> tuple[Feeds, Arrays]:
        """The tokens through the program, behind an empty past."""
        sizes = cache.call_sizes(spec, len(planned.prompt), planned.prompt[0] + planned.steps, 0)
        feeds = self.draw(PlannedCase(name=planned.name, sizes=sizes))
        exact = arrays_of(self.evaluate_in_fp64(feeds), exact=True)
        results = {name: name for name in cache.outputs} | {each.name: each.output for each in cache.tensors}
        return feeds, {name: exact[output] for name, output in results.items()}

    def run_step(self, feeds: Feeds, where: str) -> Feeds:
        """One call of the module, or of the mixed graph in its place."""
        if self._runner is None:
            return super().run_step(feeds, where)
        returned = self._runner.run(self._as_taken(arrays_of(feeds)))
        return {name: tensor_from_numpy(array) for name, array in returned.items()}

    def look_inside(self, case: GoldenCase, values: Collection[str]) -> dict[str, Arrays]:
        """Values of the graph in a case that was captured, by name: `oracle` and `eager`."""
        # Not drawn again: a user's draw may give other numbers the second time.
        inputs = self.user.rounded({key: tensor_from_numpy(array) for key, array in case.inputs.items()})
        oracle = arrays_of(run_program(self.exported, inputs, keep=values)[1], exact=True)
        if self._mixed is None:
            got = arrays_of(run_program(self.exported, inputs, dtype="own", keep=values)[1])
        else:
            with open_runner("ort-cpu", with_outputs(self._mixed, values)) as runner:
                got = runner.run(case.inputs)
        return {"oracle": oracle, "eager": {name: got[name] for name in values}}
