"""Golden cases and decode traces, captured from a model and its FP64 oracle."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cached_property
from math import inf
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mha_deploy.bundle.cases import GoldenCase, cached_outputs
from mha_deploy.bundle.traces import (
    DecodeTrace,
    PlannedTrace,
    check_steps,
    prefill_calls,
    prefill_positions,
)
from mha_deploy.errors import ExportError, place_of_error
from mha_deploy.export.axes import ExportedModule
from mha_deploy.export.eager import Float32Accumulation, run_module, tensors_in
from mha_deploy.export.explain import constant_error, overflow_error
from mha_deploy.export.oracle import run_program
from mha_deploy.export.own_model import UserModule, drawn_inputs
from mha_deploy.export.plan import PlannedCase, looked_at
from mha_deploy.graph.file import load_graph, save_graph, with_outputs
from mha_deploy.graph.precision import PrecisionPlan, apply_plan, plan_precision
from mha_deploy.metrics import relative_error
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import ModelSpec, Sizes
from mha_deploy.reference import build_module
from mha_deploy.reference.attention import Attention, Decoder, split_heads
from mha_deploy.reference.inputs import (
    Feeds,
    call_arguments,
    clear_decisions,
    fed_to,
    random_inputs,
    tensor_from_numpy,
    to_numpy,
)
from mha_deploy.runtime import measure_ranges, open_runner
from mha_deploy.runtime.runner import Runner

Arrays = dict[str, np.ndarray]


def _arrays(tensors: Mapping[str, Tensor], *, exact: bool = False) -> Arrays:
    """Tensors as arrays; what is exact is kept in float64."""
    arrays = {name: to_numpy(tensor) for name, tensor in tensors.items()}
    return {n: a.astype(np.float64) if exact and a.dtype.kind == "f" else a for n, a in arrays.items()}


def _refuse_overflow(
    case: GoldenCase,
    precision: Precision,
    module: nn.Module,
    *,
    run: Callable[[], object] | None = None,
    hint: str = "--precision bf16 or fp32",
) -> None:
    """Refuse a case on which the module itself overflows: its budget would be infinite.

    Args:
        case: The case.
        precision: The precision of the module.
        module: The module; its weights may be at fault.
        run: Runs the module on the case again, to find the call that overflows.
        hint: What helps against an overflow.
    """
    for name in case.eager:
        # Some kernels of PyTorch give zeros where a weight is NaN; the oracle shows it.
        results = (case.eager[name], case.oracle[name])
        if not all(np.isfinite(array.astype(np.float64)).all() for array in results):
            where = f"output {name} of golden case {case.name}"
            raise overflow_error(where, precision.name, module=module, run=run, hint=hint)


# -- Of a catalog layer: the module in its precision, and its twin in FP64 -------------------------

# In units of the precision's roundoff: a gate is a sum of E matmuls of size one over √E, and engines that
# accumulate in half precision lose several bits of it.
_DECISION_MARGIN = 16.0

RunOracle = Callable[[Attention, dict[str, Tensor]], tuple[Tensor, ...]]


def fp64_twin(module: Attention, *, whole: bool = False) -> Attention:
    """The oracle of a layer. It has the rounded weights: rounding them is the user's choice, not an error.

    Args:
        module: The layer.
        whole: Whether it takes whole sequences without a KV cache: the oracle of decoding.
    """
    spec = module.spec.without_cache() if whole else module.spec
    device = str(next(module.parameters()).device)
    return build_module(spec, weights=module.state_dict(), dtype=torch.float64, device=device)


class LayerCapture:
    """Runs a catalog layer and its FP64 twin on the same numbers.

    Args:
        module: The layer with its weights rounded to the target precision.
        precision: That precision.
        seed: Seed of the inputs.
        run_oracle: Runs the twin; another than `run_module` where memory is short.
        most_tokens: How many tokens of a prompt the module takes in one call, where memory is short.

    Attributes:
        change: Changes the inputs that were drawn.
    """

    def __init__(
        self,
        module: Attention,
        precision: Precision,
        seed: int,
        *,
        run_oracle: RunOracle = run_module,
        most_tokens: int | None = None,
    ) -> None:
        self.module, self.precision, self.seed = module, precision, seed
        self.change: Callable[[Feeds], Feeds] = dict
        self._run_oracle, self._most_tokens = run_oracle, most_tokens

    @cached_property
    def oracle(self) -> Attention:
        """The layer in FP64."""
        return fp64_twin(self.module)

    def capture(self, planned: PlannedCase) -> GoldenCase:
        """Run one case.

        Raises:
            ExportError: The module overflows.
        """
        spec = self.module.spec
        drawn = random_inputs(
            spec, planned.sizes, self.seed, label=planned.name, ragged=planned.ragged, past=planned.past
        )
        margin = _DECISION_MARGIN * self.precision.roundoff
        feeds = clear_decisions(
            self.oracle, fed_to(self.module, self.change(drawn)), self.seed, margin=margin
        )
        exact = {name: each.double() if each.is_floating_point() else each for name, each in feeds.items()}
        eager = run_module(self.module, call_arguments(spec, feeds))
        oracle = self._run_oracle(self.oracle, call_arguments(spec, exact))
        names = [tensor.name for tensor in spec.outputs]
        case = GoldenCase(
            name=planned.name,
            sizes=planned.sizes,
            inputs=_arrays(feeds),
            oracle=_arrays(dict(zip(names, oracle, strict=True))),
            eager=_arrays(dict(zip(names, eager, strict=True))),
            cached=cached_outputs(spec.model),
        )
        _refuse_overflow(case, self.precision, self.module)
        return case

    def close(self) -> None:
        """Nothing is open."""

    def trace(self, model: ModelSpec, planned: PlannedTrace) -> DecodeTrace:
        """Draw tokens, decode them with the module, and compute the whole sequence in FP64, without a cache.

        Raises:
            DeployError: The layer's axes or its cache do not allow it.
            ExportError: The module itself overflows on these tokens.
        """
        spec, steps = self.module.spec, planned.steps
        prompt = np.array(planned.prompt, np.int32)
        cache = check_steps(model, prompt, steps)
        sizes = {"B": len(prompt), "S": int(prompt.max()) + steps}
        drawn = random_inputs(spec.without_cache(), sizes, self.seed, label=planned.name)
        x = fed_to(self.module, drawn)["x"]
        eager, oracle = self._decoded(x, prompt, steps), self._whole(x.double())
        case = GoldenCase(name=planned.name, sizes={}, inputs={}, oracle=oracle, eager=eager)
        _refuse_overflow(case, self.precision, self.module)
        return DecodeTrace(
            name=planned.name,
            cache=cache,
            inputs={"x": to_numpy(x)},
            prompt=prompt,
            steps=steps,
            oracle=oracle,
            eager=eager,
        )

    def _whole(self, x: Tensor) -> Arrays:
        """The whole sequence in one call, which no mistake in a cache can touch."""
        twin = fp64_twin(self.module, whole=True)
        (output,) = self._run_oracle(twin, {"query": x})
        with torch.inference_mode():
            q, k, v = twin.project(x, None, None)
            _, k = twin.rotate(q, k, torch.arange(x.shape[1], device=x.device))
        key, value = (split_heads(each, twin.spec.Hkv).contiguous() for each in (k, v))
        return _arrays({"output": output, "key": key, "value": value})

    def _decoded(self, x: Tensor, prompt: np.ndarray, steps: int) -> Arrays:
        """The module in its own precision: the prefill in one call, then one token a call."""
        B, L, _ = x.shape
        batch = torch.arange(B, device=x.device)
        first = torch.from_numpy(prompt).to(x.device)
        padded = torch.from_numpy(prefill_positions(prompt, steps)).to(x.device)
        decoder, output = Decoder(self.module, B), torch.zeros_like(x)
        with torch.inference_mode(), Float32Accumulation():
            for part, counts in prefill_calls(prompt, self._most_tokens):
                real = None if counts is None else torch.from_numpy(counts).to(x.device)
                output[:, part] = decoder.feed(x[batch[:, None], padded[:, part]], real)
            for step in range(steps):
                output[batch, first + step] = decoder.feed(x[batch, first + step][:, None])[:, 0]
        key, value = (each[:, :, :L].contiguous() for each in (decoder.keys, decoder.values))
        return _arrays({"output": output, "key": key, "value": value})


# -- Of a user's module: the module as it is, and its exported program in FP64 ---------------------

# Rounding alone does not come near: the program would have to be another than the module.
_SAME_PROGRAM = 0.25
# Rounding to FP16 costs less than this many layers deep; more is a mistake, not rounding.
_LARGEST_ERROR = 0.05


def _attention_flops(query: list[int], key: list[int], value: list[int], *_: object, **__: object) -> int:
    """The work of fused attention, from the shapes of its inputs: two matmuls of each query and key."""
    B, Hq, S, D = query
    return 2 * B * Hq * S * key[2] * (D + value[3])


# PyTorch itself counts it for its GPU kernels only.
_ON_CPU = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}


class ModuleCapture:
    """Runs a user's module and its program on the same numbers.

    Args:
        user: The module; in float32 where there is a mixed graph.
        exported: Its program.
        seed: Seed of the inputs.
        mixed: The graph of `--precision auto`, which stands for the module where budgets come from: PyTorch
            does not compute in its mixture of types.

    Attributes:
        change: Changes the inputs that were drawn.
    """

    def __init__(
        self, user: UserModule, exported: ExportedModule, seed: int, mixed: ir.Model | None = None
    ) -> None:
        self.user, self.exported, self.seed, self._mixed = user, exported, seed, mixed
        self.change: Callable[[Feeds], Feeds] = dict
        inputs = [] if mixed is None else mixed.graph.inputs
        self._types = {str(value.name): value.dtype.numpy() for value in inputs if value.dtype is not None}

    @cached_property
    def _runner(self) -> Runner:
        """The mixed graph, loaded once for all cases."""
        if self._mixed is None:
            raise ExportError("The module has no mixed graph.", got=self.user.loaded.name)
        return open_runner("ort-cpu", self._mixed)

    def close(self) -> None:
        """Close the session of the mixed graph; the next case opens another."""
        if "_runner" in vars(self):
            vars(self).pop("_runner").close()

    def inputs(self, name: str, sizes: Sizes) -> Feeds:
        """The inputs of a case: drawn by the user's own function, or after the example.

        They have the numbers that a mixed graph takes, in the types of the module.
        """
        drawn = self.change(drawn_inputs(self.user, name, sizes, self.seed))
        if self._mixed is None:
            return drawn
        taken = self._as_taken(_arrays(drawn))
        return {key: torch.from_numpy(taken[key]).to(tensor.dtype) for key, tensor in drawn.items()}

    def _as_taken(self, arrays: Arrays) -> Arrays:
        """Arrays in the types of the mixed graph."""
        return {key: array.astype(self._types.get(key, array.dtype)) for key, array in arrays.items()}

    def capture(self, planned: PlannedCase) -> GoldenCase:
        """Run one case.

        Raises:
            ExportError: The module overflows, fails at these sizes, or is not what was exported.
        """
        inputs = self.inputs(planned.name, planned.sizes)
        eager, flops = self._eager(inputs, f"golden case {planned.name}")
        oracle, _ = run_program(self.exported, inputs)
        case = GoldenCase(
            name=planned.name,
            sizes=dict(planned.sizes),
            inputs=_arrays(inputs),
            oracle=_arrays(oracle, exact=True),
            eager=_arrays(eager),
            flops=flops,
        )
        module, precision = self.user.module, self.user.precision
        hint = "--precision auto, bf16 or fp32"
        _refuse_overflow(case, precision, module, run=lambda: module(**inputs), hint=hint)
        _refuse_another_program(case)
        if self._mixed is None:
            return case
        taken = self._as_taken(dict(case.inputs))
        got = self._runner.run(taken)
        case = replace(case, inputs=taken, eager={key: got[key] for key in case.oracle})
        _refuse_overflow(case, precision, module)
        for name, expected in case.oracle.items():
            off = relative_error(case.eager[name], expected)
            if not off <= _LARGEST_ERROR:
                raise ExportError(
                    "The mixed graph is too far from the module.",
                    got=f"output {name} of golden case {case.name}: off by {off:.2g} of its size",
                    hint="--precision bf16 or fp32",
                )
        return case

    def trace(self, spec: ModelSpec, planned: PlannedTrace) -> DecodeTrace:
        """Decode with the module, and compute the whole sequence with its program in FP64, in one call.

        Raises:
            ExportError: The module fails, or decoding gives something else than that call.
        """
        prompt = np.array(planned.prompt, np.int32)
        cache = check_steps(spec, prompt, planned.steps)
        sizes = cache.call_sizes(spec, len(prompt), planned.prompt[0] + planned.steps, 0)
        whole = self.inputs(planned.name, sizes)
        exact = _arrays(run_program(self.exported, whole)[0], exact=True)
        held = {each.input: whole.pop(each.input) for each in cache.tensors}
        results = {name: name for name in cache.outputs} | {each.name: each.output for each in cache.tensors}
        trace = DecodeTrace(
            name=planned.name,
            cache=cache,
            inputs=_arrays(whole),
            prompt=prompt,
            steps=planned.steps,
            oracle={name: exact[output] for name, output in results.items()},
            eager={},
        )
        parts: dict[str, list[np.ndarray]] = {name: [] for name in cache.outputs}
        for step in range(planned.steps + 1):
            tokens = trace.tokens(step) if step else trace.prefill()
            feeds = {name: tensor_from_numpy(array) for name, array in tokens.items()} | held
            if self._mixed is None:
                got = self._eager(feeds, f"{planned.name}, step {step}")[0]
            else:
                returned = self._runner.run(self._as_taken(_arrays(feeds)))
                got = {name: tensor_from_numpy(array) for name, array in returned.items()}
            held = {each.input: got[each.output] for each in cache.tensors}
            for name, arrays in parts.items():
                arrays.append(to_numpy(got[name]))
        eager = {name: np.concatenate(arrays, cache.outputs[name]) for name, arrays in parts.items()}
        eager |= {each.name: to_numpy(held[each.input]) for each in cache.tensors}
        for name, expected in trace.oracle.items():
            off = relative_error(eager[name], expected) if eager[name].shape == expected.shape else inf
            if not off <= _SAME_PROGRAM:
                raise ExportError(
                    "Decoding token by token gives something else than one call with all tokens.",
                    got=f"{name} is off by {off:.2g} of its size after {trace.steps} steps",
                    hint="let new tokens attend to cached ones and none behind them, at positions that "
                    "continue the cached ones; without kv_cache= decoding is not validated",
                )
        return replace(trace, eager=eager)

    def look_inside(self, case: GoldenCase, values: Collection[str]) -> dict[str, Arrays]:
        """Values of the graph in a case that was captured, by name: `oracle` and `eager`."""
        # Not drawn again: a user's draw may give other numbers the second time.
        inputs = self.user.rounded({key: tensor_from_numpy(array) for key, array in case.inputs.items()})
        oracle = _arrays(run_program(self.exported, inputs, keep=values)[1], exact=True)
        if self._mixed is None:
            eager = _arrays(run_program(self.exported, inputs, dtype="own", keep=values)[1])
        else:
            with open_runner("ort-cpu", with_outputs(self._mixed, values)) as runner:
                got = runner.run(case.inputs)
            eager = {name: got[name] for name in values}
        return {"oracle": oracle, "eager": eager}

    def _eager(self, inputs: Mapping[str, Tensor], name: str) -> tuple[dict[str, Tensor], int]:
        """The module as the user runs it, and its work."""
        counter = FlopCounterMode(display=False, custom_mapping=_ON_CPU)
        try:
            with torch.inference_mode(), Float32Accumulation(), counter:
                tensors = tensors_in(self.user.module(**inputs))
        except (Exception, SystemExit) as error:  # whatever the user's code raises, sys.exit() included
            constant = constant_error(error, self.user.module, lambda: self.user.module(**inputs))
            if constant is not None:
                raise constant from error
            raise ExportError(
                f"The module fails at the sizes of {name}.",
                got=f"{place_of_error(error)}: {type(error).__name__}: {error}",
                hint="axes that it takes, or a draw= for its inputs",
            ) from error
        return dict(zip(self.exported.outputs, tensors, strict=True)), counter.get_total_flops()


def _refuse_another_program(case: GoldenCase) -> None:
    """Tracing may have settled a choice for the example's sizes or values, and the program then differs."""
    for name, oracle in case.oracle.items():
        eager = case.eager[name]
        if eager.shape != oracle.shape:
            far = f"shape {oracle.shape}, not {eager.shape}"
        else:
            off = relative_error(eager, oracle)
            if off <= _SAME_PROGRAM:
                continue
            far = f"off by {off:.2g} of its size"
        raise ExportError(
            "The exported program does not compute what the module does.",
            got=f"output {name} of golden case {case.name}: {far}",
            hint="a module whose control flow does not depend on sizes or values",
        )


def mixed_graph(model: ir.Model, capture: ModuleCapture, folder: Path) -> tuple[ir.Model, PrecisionPlan]:
    """Write a float32 graph in FP16 where that holds its numbers.

    Args:
        model: The graph, its attentions fused.
        capture: Draws the inputs on which its numbers are measured.
        folder: Where the float32 graph may lie while it is run.

    Raises:
        DeployError: ONNX Runtime cannot run the graph, or it has branches.
    """
    path = folder / "float32.onnx"
    save_graph(model, path)
    try:
        wide = load_graph(path)  # large weights are read from disk, slice by slice
        measured = looked_at(capture.user.loaded.axes)
        cases = {name: _arrays(capture.inputs(name, sizes)) for name, sizes in measured.items()}
        plan = plan_precision(wide, measure_ranges(wide, cases))
        return apply_plan(model, plan), plan
    finally:
        for part in folder.glob("float32.onnx*"):
            part.unlink()
