"""A user's module to a bundle: program, fused graph, golden cases, mixed precision."""

from __future__ import annotations

import gc
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mha_deploy.analyze.cost import odd_sizes, sizes_name
from mha_deploy.bundle.cases import GoldenCase, refuse_polygraphy, write_arrays, write_case, write_polygraphy
from mha_deploy.bundle.folder import MODEL, Bundle, BundleWriter
from mha_deploy.bundle.manifest import GoldenEntry, LayersEntry, Manifest, TraceEntry
from mha_deploy.bundle.traces import DecodeTrace, check_steps
from mha_deploy.environment import versions
from mha_deploy.errors import ExportError, SpecError, exit_as_error, place_of_error
from mha_deploy.export.axes import ExportedModule
from mha_deploy.export.canonical import choose_opset_of, drop_exporter_metadata
from mha_deploy.export.decode_trace import PlannedTrace, plan_trace
from mha_deploy.export.eager import Float32Accumulation, tensors_in
from mha_deploy.export.explain import constant_error
from mha_deploy.export.exporter import OnStep, Steps, write_trace_into
from mha_deploy.export.golden import refuse_overflow
from mha_deploy.export.options import AUTO, OPSETS, ExportOptions, large_sizes, reduction_note
from mha_deploy.export.oracle import run_program
from mha_deploy.export.own_model import UserModule, drawn_inputs, open_user_module
from mha_deploy.export.program import attention_values, export_program
from mha_deploy.graph.attention_node import attention_nodes, is_attention, short_dtype
from mha_deploy.graph.canonical import check_module
from mha_deploy.graph.file import load_graph, save_graph, with_outputs
from mha_deploy.graph.fuse import fuse_attention
from mha_deploy.graph.fuse.repair import share_tied_weights
from mha_deploy.graph.fuse.values import FuseReport, place_of
from mha_deploy.graph.precision import PrecisionPlan, apply_plan, plan_precision
from mha_deploy.model.deployable import Deployable, ModuleSpec
from mha_deploy.model.precision import Precision, find_precision, smallest_normal
from mha_deploy.model.spec import FLOAT, Axis, Sizes, TensorSpec
from mha_deploy.reference.inputs import tensor_from_numpy, to_numpy
from mha_deploy.runtime import open_runner
from mha_deploy.runtime.ranges import measure_ranges
from mha_deploy.runtime.runner import Runner

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
        return drawn_inputs(self.user, name, sizes, self.seed)

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


def relative_error(got: np.ndarray, oracle: np.ndarray) -> float:
    """The size of the error over that of the oracle, which counts at least as the smallest normal numbers.

    Numbers below those lose their digits, whatever program computes them.
    """
    smallest = 1e-30 if got.dtype.kind in "iub" else smallest_normal(got.dtype)
    error = float(np.linalg.norm(got.astype(np.float64) - oracle))
    return error / max(float(np.linalg.norm(oracle)), smallest * math.sqrt(max(got.size, 1)))


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
            hint="a module whose way does not depend on sizes or values",
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


def _refuse_far(case: GoldenCase) -> None:
    for name, oracle in case.oracle.items():
        off = relative_error(case.eager[name], oracle)
        if not off <= _LARGEST_ERROR:
            raise ExportError(
                "The mixed graph is too far from the module.",
                got=f"output {name} of golden case {case.name}: off by {off:.2g} of its size",
                hint="--precision bf16 or fp32",
            )


# -- From a user's factory to a bundle: export, recognise attention, capture golden cases, writ ----

_CASES = ("opt", "min", "odd", "large")  # opt first: it tells what the others may cost
_LAYERS_BYTES = 1 << 30
_FP16, _FP32 = "fp16", "fp32"
_SHOWN = 12  # lines of a precision plan


@exit_as_error()
def bundle_from_factory(
    reference: str | Deployable,
    target: Path,
    options: ExportOptions | None = None,
    *,
    axes: Mapping[str, Axis] | None = None,
    on_step: OnStep = lambda name, number, count: None,
) -> Bundle:
    """Export a user's own module and everything needed to check it elsewhere.

    Nothing is left at `target` if anything fails.

    Args:
        reference: `path/to/file.py:factory`, `package.module:factory`, or a `Deployable`. The manifest of a
            `Deployable` names no factory: its module cannot be made again from the bundle.
        target: The folder to write.
        options: How to export.
        axes: Axis ranges in place of the factory's.
        on_step: Called as each step begins, with its name, its number from 0, and how many there are.
    """
    options = _checked(options or ExportOptions())
    auto, opset = options.precision == AUTO, choose_opset_of(options.opset)
    precision = find_precision(_FP16 if auto else options.precision)
    if options.polygraphy:
        refuse_polygraphy(ModuleSpec.cache, precision)
    step = Steps(on_step, 5 + auto + len(options.golden or _CASES))
    with BundleWriter(target, overwrite=options.overwrite) as writer:
        step("factory")
        user = open_user_module(
            reference,
            find_precision(_FP32) if auto else precision,
            seed=options.seed,
            weights=options.weights,
            axes=axes,
        )
        step.count += bool(user.loaded.kv_cache)
        step("ONNX graph")
        exported = exported_program(user, opset=opset)
        step("attention")
        model, fused = fuse_attention(exported.model)
        share_tied_weights(model)
        capture, plan = ModuleCapture(user, exported, options.seed), None
        if auto:
            step("ranges")
            model, plan = mixed_graph(model, capture, writer.path)
            capture = MixedCapture(user, exported, options.seed, model)
        work = _Work(capture, model, precision, options, writer.path, step)
        values = attention_values(model, exported)
        places = {str(node.name): place_of(node) for node in model.graph.all_nodes() if is_attention(node)}
        _write_model(model, writer.path / MODEL)
        cases, spec, notes = work.golden(_attention_count(fused))
        layers = work.layers(cases, values)
        traces, missing = work.decode_trace(spec)
        step("hashes")
        return writer.finish(
            Manifest(
                spec=spec,
                precision=precision,
                opset=opset,
                weights=_origin(user),
                attention=_described(writer.path / MODEL, places),
                golden=[
                    GoldenEntry(
                        name=c.name, file=f"golden/{c.name}.safetensors", sizes=dict(c.sizes), flops=c.flops
                    )
                    for c in cases
                ],
                checks={
                    "graph": check_module(writer.path / MODEL, spec, precision),
                    **({} if plan is None else {"mixed precision": plan.describe()}),
                },
                versions=versions(),
                notes=[*_unfused_notes(fused), *_plan_notes(plan), *notes, *missing],
                traces=traces,
                layers=layers,
            )
        )


def _checked(options: ExportOptions) -> ExportOptions:
    if options.device != "cpu":
        raise ExportError("Your own model is exported on the CPU.", got=f"--device {options.device}")
    return options


@exit_as_error()
def exported_program(user: UserModule, *, opset: int = OPSETS[0]) -> ExportedModule:
    """A module as PyTorch exports it: its graph, and the program that tells what is true of it."""
    loaded = user.loaded
    examples = {name: example.tensor for name, example in loaded.inputs.items()}
    return export_program(
        user.module,
        user.rounded(examples),
        loaded.dims,
        loaded.axes,
        opset=opset,
        output_names=loaded.outputs,
        draw=lambda sizes: drawn_inputs(user, "check", sizes, seed=1),
    )


def _attention_count(fused: FuseReport) -> int:
    return len(fused.fused) + len(fused.already) + len(fused.unfused)


def _unfused_notes(fused: FuseReport) -> list[str]:
    return [
        f"{each.name} is not fused: {each.reason}" + (f" ({each.place})" if each.place else "")
        for each in fused.unfused
    ]


def _plan_notes(plan: PrecisionPlan | None) -> list[str]:
    if plan is None:
        return []
    lines = plan.lines()
    head = f"mixed precision: {len(plan.kept)} of {plan.nodes} nodes are wider than fp16"
    more = [f"and {len(lines) - _SHOWN} more: see the manifest"] if len(lines) > _SHOWN else []
    return [head, *lines[:_SHOWN], *more]


def _write_model(model: ir.Model, path: Path) -> None:
    drop_exporter_metadata(model)
    save_graph(model, path)
    gc.collect()  # the exporter's program holds weights in reference cycles


def _described(path: Path, places: Mapping[str, str | None]) -> list[dict[str, Any]]:
    nodes = attention_nodes(load_graph(path))
    return [{**node.describe(), "place": places.get(node.name)} for node in nodes]


def _origin(user: UserModule) -> str:
    if user.weights_file is None and not user.loaded.factory:
        return f"of the exported object, state SHA-256 {user.state_sha256}"
    if user.weights_file is None:
        return f"from the factory, seed {user.seed}"
    return f"{Path(user.weights_file).name}, state SHA-256 {user.state_sha256}"


class _Work:
    """The golden part of one export."""

    def __init__(
        self,
        capture: ModuleCapture,
        graph: ir.Model,
        precision: Precision,
        options: ExportOptions,
        folder: Path,
        step: Steps,
    ) -> None:
        self.capture, self.graph, self.precision = capture, graph, precision
        self.user, self.exported = capture.user, capture.exported
        self.options, self.folder, self.step = options, folder, step

    def golden(self, attentions: int) -> tuple[list[GoldenCase], ModuleSpec, list[str]]:
        """Capture and write the golden cases; the spec is complete once the first has told its work."""
        spec, notes, cases = self._spec(attentions, flops=0), list[str](), list[GoldenCase]()
        (self.folder / "golden").mkdir()
        for name in self.options.golden or _CASES:
            self.step(f"golden {name}")
            sizes = self._sizes(name, spec)
            if isinstance(sizes, str):
                notes.append(sizes)
                continue
            if any(case.sizes == sizes for case in cases):
                notes.append(f"no {name} case: its sizes are those of another")
                continue
            label = name if "=" not in name else sizes_name(sizes)
            case = self.capture.capture(label, sizes)
            cases.append(case)
            write_case(self.folder / "golden" / f"{label}.safetensors", case)
            if name == "large":
                notes += reduction_note(spec, sizes, self.options.budget)
            if name == "opt":
                spec = self._spec(attentions, flops=case.flops)
        if not cases:
            raise ExportError("No golden case is left.", got="; ".join(notes), hint="--golden opt")
        if self.options.polygraphy:
            write_polygraphy(self.folder / "golden" / "polygraphy", cases)
        return cases, spec, notes

    def _spec(self, attentions: int, flops: int) -> ModuleSpec:
        loaded, user = self.user.loaded, self.user
        return ModuleSpec(
            name=loaded.name,
            factory=loaded.factory,
            axes=loaded.axes,
            tensors_in=tuple(self._tensor(value) for value in self.graph.graph.inputs),
            tensors_out=tuple(self._tensor(value) for value in self.graph.graph.outputs),
            attentions=attentions,
            flops=flops,
            weight_bytes=user.weight_bytes,
            state_sha256=user.state_sha256,
            seed=user.seed,
            weights_file=user.weights_file,
            mixed=self.options.precision == AUTO,
            cached=loaded.kv_cache,
            summary=loaded.summary,
        )

    def _tensor(self, value: ir.Value) -> TensorSpec:
        name, kind = str(value.name), short_dtype(value.dtype)
        dims = self.exported.outputs.get(name)
        if dims is None and value.shape is not None:
            dims = tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)
        if dims is None or any(dim is None for dim in dims):
            raise ExportError(
                f"A size of output {name} is not a sum of axes and numbers.",
                got=dims,
                hint="give it out in a shape that follows the axes",
            )
        own = kind == self.precision.name
        return TensorSpec(name=name, kind=FLOAT if own else _KINDS.get(kind, kind), dims=tuple(dims))  # type: ignore[arg-type]

    def _sizes(self, name: str, spec: ModuleSpec) -> dict[str, int] | str:
        if name in ("min", "opt"):
            return spec.sizes(name)
        if name == "odd":
            return odd_sizes(spec.axes)
        if "=" in name:
            return spec.parse_sizes(name)
        if name != "large":
            raise SpecError("No such golden case.", got=name, hint=f"{', '.join(_CASES)}, or sizes")
        if not spec.flops:
            return "no large case: without opt before it nobody knows what it costs"
        sizes = large_sizes(spec, self.options.budget)
        return sizes or f"no large case: nothing larger than opt fits {self.options.budget}"

    def decode_trace(self, spec: ModuleSpec) -> tuple[list[TraceEntry], list[str]]:
        """Capture and write the decode trace of a module with a KV cache; else notes that say why not."""
        if not spec.cached:
            return [], []
        self.step("decode trace")
        planned = plan_trace(spec)
        if isinstance(planned, str):
            return [], [planned]
        return [write_trace_into(self.folder, self.capture.trace(spec, planned))], []

    def layers(self, cases: list[GoldenCase], values: Mapping[str, str]) -> LayersEntry | None:
        """Look inside the first case whose attentions do not take too much room."""
        self.step("look inside")
        if not values:
            return None
        for case in cases:
            insight = self.capture.look_inside(case, set(values.values()))
            arrays = {
                **{f"oracle/{name}": array for name, array in insight.oracle.items()},
                **{f"eager/{name}": array for name, array in insight.eager.items()},
            }
            if sum(array.nbytes for array in arrays.values()) <= _LAYERS_BYTES:
                (self.folder / "layers").mkdir()
                write_arrays(self.folder / "layers" / f"{case.name}.safetensors", arrays)
                return LayersEntry(
                    case=case.name, file=f"layers/{case.name}.safetensors", values=dict(values)
                )
        return None


_KINDS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
