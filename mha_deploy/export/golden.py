"""Golden cases and decode traces, captured from a model and its FP64 oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mha_deploy.analyze.cost import odd_sizes
from mha_deploy.bundle.cases import GoldenCase, cached_outputs
from mha_deploy.bundle.traces import (
    DecodeTrace,
    PlannedTrace,
    check_steps,
    prefill_calls,
    prefill_positions,
)
from mha_deploy.errors import DeployError, ExportError, place_of_error
from mha_deploy.export.axes import ExportedModule
from mha_deploy.export.eager import Float32Accumulation, run_module, tensors_in
from mha_deploy.export.explain import constant_error, overflow_error
from mha_deploy.export.options import PlannedCase
from mha_deploy.export.oracle import run_program
from mha_deploy.export.own_model import UserModule, drawn_inputs
from mha_deploy.graph.file import load_graph, save_graph, with_outputs
from mha_deploy.graph.precision import PrecisionPlan, apply_plan, plan_precision
from mha_deploy.metrics import relative_error
from mha_deploy.model.deployable import ModuleSpec
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import Sizes
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

# -- Golden cases of a catalog layer ---------------------------------------------------------------

# In units of the precision's roundoff: a gate is a sum of E matmuls of size one over √E, and engines that
# accumulate in half precision lose several bits of it.
_DECISION_MARGIN = 16.0


class GoldenCapture:
    """Runs planned cases through a module and through its FP64 twin.

    Args:
        module: The layer with its weights rounded to the target precision.
        precision: That precision.
        seed: Seed of the inputs.
        oracle: The FP64 twin, where there is one already.
        run_oracle: Runs the twin; another than `run_module` where memory is short.
        change: Changes the inputs that were drawn.
    """

    def __init__(
        self,
        module: Attention,
        precision: Precision,
        seed: int,
        *,
        oracle: Attention | None = None,
        run_oracle: Callable[[Attention, dict[str, Tensor]], tuple[Tensor, ...]] = run_module,
        change: Callable[[Feeds], Feeds] = lambda feeds: feeds,
    ) -> None:
        self.module = module
        self.precision = precision
        self.seed = seed
        self.oracle = oracle or fp64_twin(module)
        self._run_oracle, self._change = run_oracle, change

    def capture(self, case: PlannedCase) -> GoldenCase:
        """Run one case."""
        spec, feeds = self.module.spec, self._inputs(case)
        exact = {name: _widen(tensor) for name, tensor in feeds.items()}
        eager = run_module(self.module, call_arguments(spec, feeds))
        oracle = self._run_oracle(self.oracle, call_arguments(spec, exact))
        names = [tensor.name for tensor in spec.outputs]
        return GoldenCase(
            name=case.name,
            sizes=case.sizes,
            inputs={name: to_numpy(tensor) for name, tensor in feeds.items()},
            oracle={name: to_numpy(tensor) for name, tensor in zip(names, oracle, strict=True)},
            eager={name: to_numpy(tensor) for name, tensor in zip(names, eager, strict=True)},
            cached=cached_outputs(spec),
        )

    def _inputs(self, case: PlannedCase) -> Feeds:
        feeds = random_inputs(
            self.module.spec, case.sizes, self.seed, label=case.name, ragged=case.ragged, past=case.past
        )
        margin = _DECISION_MARGIN * self.precision.roundoff
        return clear_decisions(
            self.oracle, fed_to(self.module, self._change(feeds)), self.seed, margin=margin
        )


def fp64_twin(module: Attention) -> Attention:
    """The oracle of a layer. It has the rounded weights: rounding them is the user's choice, not an error."""
    device = str(next(module.parameters()).device)
    return build_module(module.spec, weights=module.state_dict(), dtype=torch.float64, device=device)


def refuse_overflow(
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


def _widen(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


# -- Capture the trace of a catalog layer ----------------------------------------------------------

_RESULTS = ("output", "key", "value")


class TraceCapture:
    """Draws tokens, and finds out what is true of them.

    Args:
        module: The layer with its cache, its weights rounded to the target precision.
        precision: That precision.
        seed: Seed of the tokens.
        oracle: The layer in FP64 without a cache, where there is one already; see `whole_twin`.
        run_oracle: Runs it; another than `run_module` where memory is short.
        most_tokens: How many tokens of the prompt the module takes in one call, where memory is short.
    """

    def __init__(
        self,
        module: Attention,
        precision: Precision,
        seed: int,
        oracle: Attention | None = None,
        *,
        run_oracle: Callable[[Attention, dict[str, Tensor]], tuple[Tensor, ...]] = run_module,
        most_tokens: int | None = None,
    ) -> None:
        self.module = module
        self.precision = precision
        self.seed = seed
        self.oracle = oracle or whole_twin(module)
        self._run_oracle, self._most_tokens = run_oracle, most_tokens

    def capture(self, name: str, B: int, prompt: Sequence[int] | int, steps: int) -> DecodeTrace:
        """Capture one trace.

        Args:
            name: Its name; other names draw other tokens.
            B: The batch size.
            prompt: Length of the prompt, of each batch element or of all.
            steps: How many single tokens follow.

        Raises:
            DeployError: The layer's axes or its cache do not allow it.
            ExportError: The module itself overflows on these tokens.
        """
        spec = self.module.spec
        lengths = np.array([prompt] * B if isinstance(prompt, int) else prompt, np.int32)
        if lengths.shape != (B,):
            raise DeployError("Every batch element needs a prompt.", got=f"{lengths.size} of {B}")
        cache = check_steps(spec, lengths, steps)
        sizes = {"B": B, "S": int(lengths.max()) + steps}
        drawn = random_inputs(spec.without_cache(), sizes, self.seed, label=name)
        x = fed_to(self.module, drawn)["x"]
        eager = self._stepped(x, lengths, steps)
        oracle = self._whole(x.double())
        case = GoldenCase(name=name, sizes={}, inputs={}, oracle=oracle, eager=eager)
        refuse_overflow(case, self.precision, self.module)
        inputs = {"x": to_numpy(x)}
        return DecodeTrace(
            name=name, cache=cache, inputs=inputs, prompt=lengths, steps=steps, oracle=oracle, eager=eager
        )

    def _whole(self, x: Tensor) -> dict[str, np.ndarray]:
        """The whole sequence in one call, which no mistake in a cache can touch."""
        twin = self.oracle
        (output,) = self._run_oracle(twin, {"query": x})
        with torch.inference_mode():
            q, k, v = twin.project(x, None, None)
            _, k = twin.rotate(q, k, torch.arange(x.shape[1], device=x.device))
        return _by_name(output, split_heads(k, twin.spec.Hkv), split_heads(v, twin.spec.Hkv))

    def _stepped(self, x: Tensor, prompt: np.ndarray, steps: int) -> dict[str, np.ndarray]:
        """The module in its own precision: the prefill in one call, then one token a call."""
        B, L, _ = x.shape
        rows = torch.arange(B, device=x.device)
        first = torch.from_numpy(prompt).to(x.device)
        padded = torch.from_numpy(prefill_positions(prompt, steps)).to(x.device)
        decoder, output = Decoder(self.module, B), torch.zeros_like(x)
        with torch.inference_mode(), Float32Accumulation():
            for part, counts in prefill_calls(prompt, self._most_tokens):
                real = None if counts is None else torch.from_numpy(counts).to(x.device)
                output[:, part] = decoder.feed(x[rows[:, None], padded[:, part]], real)
            for step in range(steps):
                output[rows, first + step] = decoder.feed(x[rows, first + step][:, None])[:, 0]
        return _by_name(output, decoder.keys[:, :, :L], decoder.values[:, :, :L])


def whole_twin(module: Attention) -> Attention:
    """The layer in FP64 over whole sequences: the oracle of its decoding. It has the rounded weights."""
    device = str(next(module.parameters()).device)
    spec = module.spec.without_cache()
    return build_module(spec, weights=module.state_dict(), dtype=torch.float64, device=device)


def _by_name(*results: Tensor) -> dict[str, np.ndarray]:
    return {name: to_numpy(tensor.contiguous()) for name, tensor in zip(_RESULTS, results, strict=True)}


# -- Golden cases of a user's module: the module as it is, and its exported program in FP64 --------

# Rounding alone does not come near: the program would have to be another than the module.
_SAME_PROGRAM = 0.25


def _attention_flops(query: list[int], key: list[int], value: list[int], *_: object, **__: object) -> int:
    """The work of fused attention, from the shapes of its inputs: two matmuls of each query and key."""
    B, Hq, S, D = query
    return 2 * B * Hq * S * key[2] * (D + value[3])


# PyTorch itself counts it for its GPU kernels only.
_ON_CPU = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}


@dataclass(frozen=True, kw_only=True)
class Insight:
    """Values from inside a module: what is true of them, and what its own precision makes of them."""

    oracle: Mapping[str, np.ndarray]
    eager: Mapping[str, np.ndarray]


class ModuleCapture:
    """Runs a user's module and its program on the same numbers.

    Args:
        user: The module.
        exported: Its program.
        seed: Seed of the inputs.
    """

    def __init__(self, user: UserModule, exported: ExportedModule, seed: int) -> None:
        self.user, self.exported, self.seed = user, exported, seed
        self.change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda inputs: inputs

    def __enter__(self) -> ModuleCapture:
        return self

    def __exit__(self, *_: object) -> None:
        """Close what runs the model, where that is not the module itself."""

    def capture(self, name: str, sizes: Mapping[str, int]) -> GoldenCase:
        """Run one case.

        Raises:
            ExportError: The module overflows, fails at these sizes, or is not what was exported.
        """
        inputs = self.inputs(name, sizes)
        eager, flops = self._eager(inputs, f"golden case {name}")
        oracle, _ = run_program(self.exported, inputs)
        case = GoldenCase(
            name=name,
            sizes=dict(sizes),
            inputs={key: to_numpy(tensor) for key, tensor in inputs.items()},
            oracle={key: _as_float64(to_numpy(tensor)) for key, tensor in oracle.items()},
            eager={key: to_numpy(tensor) for key, tensor in eager.items()},
            flops=flops,
        )
        refuse_overflow(
            case,
            self.user.precision,
            self.user.module,
            run=lambda: self.user.module(**inputs),
            hint="--precision auto, bf16 or fp32",
        )
        _refuse_another_program(case)
        return case

    def trace(self, spec: ModuleSpec, planned: PlannedTrace) -> DecodeTrace:
        """Decode with the module, and compute the whole sequence with its program in FP64, in one call.

        Raises:
            ExportError: The module fails, or decoding gives something else than that call.
        """
        prompt = np.array(planned.prompt, np.int32)
        cache = check_steps(spec, prompt, planned.steps)
        sizes = cache.call_sizes(spec, len(prompt), planned.prompt[0] + planned.steps, 0)
        whole = self.inputs(planned.name, sizes)
        oracle, _ = run_program(self.exported, whole)
        exact = {name: _as_float64(to_numpy(tensor)) for name, tensor in oracle.items()}
        held = {each.input: whole.pop(each.input) for each in cache.tensors}
        trace = DecodeTrace(
            name=planned.name,
            cache=cache,
            inputs={name: to_numpy(tensor) for name, tensor in whole.items()},
            prompt=prompt,
            steps=planned.steps,
            oracle={
                **{name: exact[name] for name in cache.outputs},
                **{each.name: exact[each.output] for each in cache.tensors},
            },
            eager={},
        )
        parts: dict[str, list[np.ndarray]] = {name: [] for name in cache.outputs}
        for step in range(planned.steps + 1):
            tokens = trace.tokens(step) if step else trace.prefill()
            feeds = {name: tensor_from_numpy(array) for name, array in tokens.items()}
            got = self._call({**feeds, **held}, f"{planned.name}, step {step}")
            held = {each.input: got[each.output] for each in cache.tensors}
            for name, arrays in parts.items():
                arrays.append(to_numpy(got[name]))
        eager = {name: np.concatenate(arrays, cache.outputs[name]) for name, arrays in parts.items()}
        trace = replace(
            trace, eager=eager | {each.name: to_numpy(held[each.input]) for each in cache.tensors}
        )
        _refuse_another_decoding(trace)
        return trace

    def _call(self, inputs: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
        """One call of what the budgets come from: the module as the user runs it."""
        return self._eager(inputs, name)[0]

    def look_inside(self, case: GoldenCase, values: Collection[str]) -> Insight:
        """Values of the graph in a case that was captured, by their names."""
        # Not drawn again: a user's draw may give other numbers the second time.
        given = {key: tensor_from_numpy(array) for key, array in case.inputs.items()}
        inputs = self.user.rounded(given)
        _, oracle = run_program(self.exported, inputs, keep=values)
        _, eager = run_program(self.exported, inputs, dtype="own", keep=values)
        return Insight(
            oracle={key: _as_float64(to_numpy(tensor)) for key, tensor in oracle.items()},
            eager={key: to_numpy(tensor) for key, tensor in eager.items()},
        )

    def inputs(self, name: str, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """The inputs of a case: drawn by the user's own function, or after the example."""
        return self.change(drawn_inputs(self.user, name, sizes, self.seed))

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


def _as_float64(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if array.dtype.kind == "f" else array


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


def _refuse_another_decoding(trace: DecodeTrace) -> None:
    for name, oracle in trace.oracle.items():
        eager = trace.eager[name]
        off = relative_error(eager, oracle) if eager.shape == oracle.shape else math.inf
        if not off <= _SAME_PROGRAM:
            raise ExportError(
                "Decoding token by token gives something else than one call with all tokens.",
                got=f"{name} is off by {off:.2g} of its size after {trace.steps} steps",
                hint="let new tokens attend to cached ones and none behind them, at positions that continue"
                " the cached ones; without kv_cache= decoding is not validated",
            )


# -- `--precision auto`: a user's module in FP16, but for what FP16 cannot hold --------------------

# Rounding to FP16 costs less than this many layers deep; more is a mistake, not rounding.
_LARGEST_ERROR = 0.05


def mixed_graph(model: ir.Model, capture: ModuleCapture, folder: Path) -> tuple[ir.Model, PrecisionPlan]:
    """Write a float32 graph in FP16 where that holds its numbers.

    Args:
        model: The graph, its attentions fused.
        capture: Draws the inputs on which it is looked at.
        folder: Where the float32 graph may lie while it is run.

    Raises:
        DeployError: ONNX Runtime cannot run the graph, or it has branches.
    """
    path = folder / "float32.onnx"
    save_graph(model, path)
    try:
        wide = load_graph(path)  # large weights are read from disk, slice by slice
        cases = {
            name: {key: to_numpy(tensor) for key, tensor in capture.inputs(name, sizes).items()}
            for name, sizes in _looked_at(capture.user).items()
        }
        plan = plan_precision(wide, measure_ranges(wide, cases))
        mixed = apply_plan(model, plan)
    finally:
        for part in folder.glob("float32.onnx*"):
            part.unlink()
    return mixed, plan


def _looked_at(user: UserModule) -> dict[str, Sizes]:
    axes = user.loaded.axes
    return {
        "opt": {name: axis.opt for name, axis in axes.items()},
        "min": {name: axis.min for name, axis in axes.items()},
        "odd": odd_sizes(axes),
    }


class MixedCapture(ModuleCapture):
    """Golden cases of a mixed graph.

    Args:
        user: The module in float32.
        exported: Its program.
        seed: Seed of the inputs.
        graph: The mixed graph.
    """

    def __init__(self, user: UserModule, exported: ExportedModule, seed: int, graph: ir.Model) -> None:
        super().__init__(user, exported, seed)
        self._graph = graph
        self._types = {str(value.name): value.dtype for value in graph.graph.inputs}

    def inputs(self, name: str, sizes: Sizes) -> dict[str, Tensor]:
        """The inputs as the graph takes them, in float32 again."""
        drawn = super().inputs(name, sizes)
        return {
            key: torch.from_numpy(self._given(key, to_numpy(tensor))).to(tensor.dtype)
            for key, tensor in drawn.items()
        }

    def capture(self, name: str, sizes: Sizes) -> GoldenCase:
        """Run one case: the truth in FP64, and the mixed graph in ONNX Runtime."""
        case = super().capture(name, sizes)
        given = {key: self._given(key, array) for key, array in case.inputs.items()}
        got = self._runner.run(given)
        case = replace(case, inputs=given, eager={key: got[key] for key in case.oracle})
        refuse_overflow(case, self.user.precision, self.user.module, hint="--precision bf16 or fp32")
        _refuse_far(case)
        return case

    def look_inside(self, case: GoldenCase, values: Collection[str]) -> Insight:
        """Values of the graph in a case that was captured, by their names."""
        insight = super().look_inside(case, values)
        with open_runner("ort-cpu", with_outputs(self._graph, values)) as runner:
            got = runner.run(case.inputs)
        return replace(insight, eager={name: got[name] for name in values})

    def _call(self, inputs: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
        """One call of the mixed graph."""
        got = self._runner.run({key: self._given(key, to_numpy(tensor)) for key, tensor in inputs.items()})
        return {key: tensor_from_numpy(array) for key, array in got.items()}

    def _given(self, name: str, array: np.ndarray) -> np.ndarray:
        dtype = self._types[name]
        return array if dtype is None else array.astype(dtype.numpy())

    @cached_property
    def _runner(self) -> Runner:
        """The mixed graph, loaded once for all cases."""
        return open_runner("ort-cpu", self._graph)

    def __exit__(self, *_: object) -> None:
        """Close the session of the graph."""
        if "_runner" in vars(self):
            self._runner.close()


def _refuse_far(case: GoldenCase) -> None:
    for name, oracle in case.oracle.items():
        off = relative_error(case.eager[name], oracle)
        if not off <= _LARGEST_ERROR:
            raise ExportError(
                "The mixed graph is too far from the module.",
                got=f"output {name} of golden case {case.name}: off by {off:.2g} of its size",
                hint="--precision bf16 or fp32",
            )
