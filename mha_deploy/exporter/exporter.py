"""One exporter: a catalog layer or a user's module becomes a bundle."""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import torch

from mha_deploy.bundle.cases import Arrays, GoldenCase, pack_baselines, write_arrays
from mha_deploy.bundle.folder import sha256
from mha_deploy.bundle.manifest import LayersEntry, ShrunkRange
from mha_deploy.bundle.samples import as_taken, read_samples, samples_from
from mha_deploy.bundle.sizes import (
    MODULE_CASES,
    PlannedCase,
    golden_budget,
    golden_names,
    odd_sizes,
    plan_golden,
)
from mha_deploy.errors import DeployError, ExportError, nearest
from mha_deploy.exporter import flow
from mha_deploy.exporter.axes import LEAST_TRACED, ExportedModule
from mha_deploy.exporter.compress import Original
from mha_deploy.exporter.explain import first_cause, onnx_program
from mha_deploy.exporter.file_program import FileProgram
from mha_deploy.exporter.golden import LayerCapture, ModuleCapture, arrays_of
from mha_deploy.exporter.observe import attention_values
from mha_deploy.exporter.own_model import (
    UserModule,
    draw_user_inputs,
    open_user_module,
    refuse_wrong_cache,
    state_digest,
)
from mha_deploy.exporter.program import export_program
from mha_deploy.graph.file import move_weights
from mha_deploy.graph.fuse import share_tied_weights
from mha_deploy.graph.upcast import retype
from mha_deploy.model.deployable import Deployable
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.model.masking import MODEL_NUMBER
from mha_deploy.model.precision import find_precision
from mha_deploy.model.spec import Axes, ModelSpec, ModuleSpec
from mha_deploy.options import AUTO, ExportOptions, OnStep, silent
from mha_deploy.output import scratch_folder
from mha_deploy.reference import build_module
from mha_deploy.reference.attention import Attention
from mha_deploy.reference.inputs import call_arguments, fed_to, parameter_name, random_inputs, to_numpy
from mha_deploy.reference.weights import read_weights
from mha_deploy.runtime import available_cpu_runtime, open_runner
from mha_deploy.runtime.user_code import user_code, where_is

_OPSETS = (23, 24)
_MOST_SAMPLES = 16  # of a user's own that become golden cases
_DEVICES = ("cpu", "cuda")


def layer_graph(spec: AttentionSpec, options: ExportOptions) -> bytes:
    """The graph of a catalog layer with random weights."""
    source = LayerSource(spec, options)
    source.on_step = silent
    with scratch_folder() as folder:
        return ir.to_proto(source.graph(folder)).SerializeToString()


@contextmanager
def module_errors(precision: str) -> Iterator[None]:
    """Errors of a user's module name its line, and `auto` where types or ranges are at fault."""
    try:
        with user_code(timed=False, mixed=True):
            yield
    except ExportError as error:
        # Types and ranges are what `auto` is for: it exports the module in float32, as it is written.
        if error.about_types and precision in ("fp16", "bf16"):
            raise ExportError(error.what, got=error.got, hint=f"--precision auto, or {error.hint}") from error
        raise


def original_from_spec(
    spec: AttentionSpec, options: ExportOptions, folder: Path, on_step: OnStep
) -> Original:
    """A catalog layer in float32, to be compressed; `folder` is where large files may lie meanwhile."""
    source = LayerSource(spec, replace(options, precision="fp32", golden=("opt",)))

    def draw(planned: flow.PlannedCase) -> Arrays:
        drawn = arrays_of(source.capture.draw(planned))
        return {t.name: planned.change(t.name, drawn[t.name], t.dims) for t in source.spec.inputs}

    return _original(source, draw, folder, on_step, spec.name)


@user_code(timed=False, mixed=True)
def original_from_factory(
    reference: str | Deployable, options: ExportOptions, folder: Path, axes: Axes | None, on_step: OnStep
) -> Original:
    """A user's module in float32, to be compressed."""
    source = ModuleSource(reference, replace(options, precision="fp32", golden=("opt",)), axes)
    found = _original(source, source.draw, folder, on_step)
    samples = source.user.samples
    given = None if isinstance(samples, tuple) and not samples else samples
    return replace(found, samples=given)


# A graph in FP64 differs from its source by constants in float32.
_SAME_GRAPH = 1e-4
_CHECKED_SIZE = 8


def _original(
    source: LayerSource | ModuleSource,
    draw: Callable[[flow.PlannedCase], Arrays],
    folder: Path,
    on_step: OnStep,
    name: str = "",
) -> Original:
    """The graph of a source, once it is known to compute what the source does."""
    source.on_step = on_step
    model = source.graph(folder)
    move_weights(model, folder / "original.onnx")
    gc.collect()  # the exporter's program holds weights in reference cycles
    source.check(folder / "original.onnx")
    axes = source.spec.axes
    sizes = {key: max(axis.min, min(axis.opt, _CHECKED_SIZE)) for key, axis in axes.items()}
    feeds = source.capture.draw(flow.PlannedCase(name="opt", sizes=sizes))
    oracle = arrays_of(source.capture.evaluate_in_fp64(feeds), exact=True)
    got = FileProgram(model).run(arrays_of(feeds))
    flow.refuse_large_error(
        "the original",
        got,
        oracle,
        _SAME_GRAPH,
        "The graph of the original does not compute what its source does.",
        "--precision fp16, and report this",
    )
    return Original(
        name=name or source.spec.name,
        model=model,
        spec=source.spec,
        precision=source.precision,
        draw=draw,
        origin=source.origin(),
        chosen=frozenset(axes),
        shrunk=tuple(source.shrunk),
        notes=tuple(source.notes),
    )


def choose_opset(layer: AttentionSpec | None, wanted: int | None) -> int:
    """The operator set to export with: the first that has what a layer needs, or the wanted one."""
    needed = _OPSETS[-1] if layer is not None and layer.cache == "preallocated" else _OPSETS[0]
    if wanted is not None and wanted not in _OPSETS:
        what, hint = "The canonical graph needs an operator set with Attention.", f"one of {_OPSETS}"
        raise ExportError(what, got=wanted, hint=hint, options=("opset",))
    if wanted is not None and wanted < needed:
        what, hint = "A preallocated cache needs an operator set with TensorScatter.", f"--opset {needed}"
        raise ExportError(what, got=wanted, hint=hint, options=("opset",))
    return wanted or needed


# -- A catalog layer -------------------------------------------------------------------------------


class LayerSource(flow.ExportSource):
    """A catalog layer: its graph is canonical as the reference layer emits it.

    `traced` is what `layer_graph` gives, where another process computes it.
    """

    module: Attention
    spec: AttentionSpec

    def __init__(
        self, layer: AttentionSpec, options: ExportOptions, traced: Future[bytes] | None = None
    ) -> None:
        self.spec, self.options, self.cache, self._traced = layer, options, layer.cache, traced
        self.precision = find_precision("fp16" if options.precision == AUTO else options.precision)
        self.opset = choose_opset(layer, options.opset)
        self.notes, self.checks = [], {}
        # Refuses what cannot be.
        self._plan = plan_golden(layer, options.golden, golden_budget(options)).cases
        self._captured = dict[str, GoldenCase]()
        self.steps, self.planned = 6 + len(self._plan) + (layer.cache != "none"), golden_names(layer)
        self.is_counted = True

    def graph(self, folder: Path) -> ir.Model:
        """The graph that the reference layer is exported to, here or by another process meanwhile."""
        self.step("weights")
        options = self.options
        if options.device not in _DEVICES:
            hint = nearest(options.device, _DEVICES)
            raise ExportError("No such device.", got=options.device, hint=hint, options=("device",))
        if options.device == "cuda" and not torch.cuda.is_available():
            what, hint = "There is no CUDA device.", "--device cpu"
            raise ExportError(what, got=options.device, hint=hint, options=("device",))
        state = None
        if options.weights is not None:
            given = options.weights
            state, self.notes = read_weights(given, self.spec, prefix=options.prefix, layer=options.layer)
        dtype = getattr(torch, self.precision.torch_name)
        # The eager result is the textbook's: an engine that does not fuse rounds like it.
        self.module = build_module(
            self.spec, seed=options.seed, weights=state, dtype=dtype, device=options.device, path="plain"
        )
        self.capture = LayerCapture(self.module, self.precision, options.seed)
        self.step("ONNX graph")
        if (traced := self._traced) is not None:
            for planned in self._plan:
                if traced.done():
                    break
                self._captured[planned.name] = case = self.capture.capture(planned)
                dict(case.baselines)  # now, while the other process traces
            with suppress(Exception):  # whatever happened there: here, it is explained
                return ir.from_proto(onnx.ModelProto.FromString(traced.result()))
        return canonical_from_module(self.module, opset=self.opset)

    def capture_case(self, planned: PlannedCase) -> GoldenCase:
        """One golden case, which may have been captured already."""
        return self._captured.pop(planned.name, None) or super().capture_case(planned)

    def check(self, path: Path) -> None:
        """Check the graph, and that its dynamic axes are dynamic: run it at two sizes."""
        super().check(path)
        self.step("run at two shapes")
        every = [case.sizes for case in plan_golden(self.spec, ("min", "odd")).cases]
        with open_runner(available_cpu_runtime(self.precision), path) as runner:
            for sizes in every:
                feeds = fed_to(self.module, random_inputs(self.spec, sizes, seed=0))
                got = runner.run({name: to_numpy(tensor) for name, tensor in feeds.items()})
                for tensor in self.spec.outputs:
                    if (shape := got[tensor.name].shape) != tensor.shape(sizes):
                        what = f"Output {tensor.name} does not follow the axes."
                        raise ExportError(
                            what,
                            got=f"{shape} at {sizes}",
                            hint="another version of PyTorch; `mha-deploy doctor` lists those here",
                        )
            self.checks["dynamic axes"] = {"runtime": runner.name, "sizes": every}
        self.step("FP64 oracle")

    def origin(self) -> str:
        """A seed, or a file with its hash."""
        weights = self.options.weights
        if weights is None:
            return f"random, seed {self.options.seed}"
        if weights.suffix == ".safetensors" and not weights.is_dir():
            return f"{weights.name}, sha256 {sha256(weights)}"
        where = self.options.prefix or f"layer {self.options.layer}"
        return f"{weights.resolve().name}, {where}, state SHA-256 {state_digest(self.module)}"


def canonical_from_module(module: Attention, *, opset: int | None = None) -> ir.Model:
    """A reference layer as a graph of ONNX's own `Attention` nodes, through torch.onnx.export.

    The weights in the model share memory with the module's wherever they need no transposing.
    """
    spec, opset = module.spec, choose_opset(module.spec, opset)
    parameter = next(module.parameters())
    if parameter.device.type != "cpu":  # what is traced must not depend on where the golden cases run
        weights = {name: tensor.cpu() for name, tensor in module.state_dict().items()}
        module = build_module(spec, weights=weights, dtype=parameter.dtype)
    # No axis of 0 or 1 where it can vary: the exporter would take it for a constant. A past of one entry at
    # most is traced with more of them: tracing computes no numbers, so there is room.
    sizes, dims = spec.sizes("min"), {}
    for index, (name, axis) in enumerate(spec.axes.items()):
        if axis.is_dynamic:
            most = max(axis.max, LEAST_TRACED)
            sizes[name] = max(axis.min, min(most, LEAST_TRACED + index))
            dims[name] = torch.export.Dim(name, min=axis.min, max=most)
    shapes = {
        parameter_name(tensor): {i: dims[dim] for i, dim in enumerate(tensor.dims) if isinstance(dim, str)}
        for tensor in spec.inputs
    }
    model = onnx_program(
        module.variation(path="onnx"),
        lambda error: ExportError(
            f"PyTorch could not export {spec.name}.",
            got=first_cause(error),
            hint="another version of PyTorch; `mha-deploy doctor` lists those here",
        ),
        kwargs=call_arguments(spec, fed_to(module, random_inputs(spec, sizes, seed=0))),
        opset_version=opset,
        dynamic_shapes=shapes,
        input_names=[tensor.name for tensor in spec.inputs],
        output_names=[tensor.name for tensor in spec.outputs],
    ).model
    _name_by_module(model)
    # The spec's shapes on the outputs: PyTorch gives the weights of Attention a length of 0.
    for output, tensor in zip(model.graph.outputs, spec.outputs, strict=True):
        output.shape = ir.Shape(tensor.dims)
    _drop_exporter_metadata(model)
    return model


def _name_by_module(model: ir.Model) -> None:
    """Name projections and attentions after the module, instead of the exporter's running numbers."""
    attentions = 0
    for node in model.graph:
        if node.op_type == "Attention":
            node.name = f"attention_{attentions}" if attentions else "attention"
            attentions += 1
            # Without its unused outputs: TensorRT takes a node with one output.
            used = [output.is_graph_output() or bool(output.uses()) for output in node.outputs]
            node.resize_outputs(max(index for index, is_used in enumerate(used) if is_used) + 1)
            for output, is_used in zip(node.outputs, used, strict=False):
                output.name = output.name if is_used else ""
        elif node.op_type == "TensorScatter" and node.inputs[0] is not None:
            node.name = f"{node.inputs[0].name}.update"
        elif node.op_type == "MatMul":
            scope = ast.literal_eval(node.metadata_props["pkg.torch.onnx.name_scopes"])[-2]
            node.name, name, value = f"{scope}.matmul", f"{scope}.weight.T", _unshared(model, node, 1, scope)
            for use in node.outputs[0].uses():
                if use.node.op_type == "Add":
                    _unshared(model, use.node, 1 - use.idx, f"{scope}.bias")
            if value is not None and value.is_initializer() and value.const_value is not None:
                # The constant that the exporter folded `weight.T` into, laid out as it reads: a transposed
                # view would be written to disk number by number, which takes minutes for gigabytes.
                del model.graph.initializers[str(value.name)]
                value.name = name
                model.graph.initializers[name] = value
                array = np.ascontiguousarray(value.const_value.numpy())
                value.const_value = ir.Tensor(array, dtype=value.const_value.dtype, name=name)


def _unshared(model: ir.Model, node: ir.Node, index: int, name: str) -> ir.Value | None:
    """An input of a node; of a weight that others have as well, since it is equal to theirs, its own copy."""
    value = node.inputs[index]
    if value is None or not value.is_initializer() or value.const_value is None or len(value.uses()) == 1:
        return value
    if value.name == name:  # the others get copies
        return value
    tensor = ir.Tensor(value.const_value.numpy().copy(), dtype=value.const_value.dtype, name=name)
    own = ir.Value(name=name, shape=value.shape, type=value.type, const_value=tensor)
    model.graph.register_initializer(own)
    node.replace_input_with(index, own)
    return own


def _drop_exporter_metadata(model: ir.Model) -> None:
    """Forget stack traces and the like: they hold paths of the export machine."""
    graph = model.graph
    known = [(node, node.metadata_props.get(MODEL_NUMBER)) for node in graph]
    common_passes.ClearMetadataAndDocStringPass()(model)
    for node, number in known:  # a graph that is compressed is read once more
        if number is not None:
            node.metadata_props[MODEL_NUMBER] = number
    # The pass leaves what is written on inputs, outputs and weights
    for value in (*graph.inputs, *graph.outputs, *graph.initializers.values()):
        value.metadata_props.clear()


# -- A user's module -------------------------------------------------------------------------------


class ModuleSource(flow.ExportSource):
    """A user's module: its program is exported, and its attentions are recognized in the graph."""

    user: UserModule
    spec: ModuleSpec
    capture: ModuleCapture

    def __init__(self, reference: str | Deployable, options: ExportOptions, axes: Axes | None) -> None:
        self.reference, self.options, self.axes = reference, options, axes
        self.auto, self.opset = options.precision == AUTO, choose_opset(None, options.opset)
        self.precision = find_precision("fp16" if self.auto else options.precision)
        self.notes, self.checks = [], {}
        self.steps = 6 + self.auto + len(options.golden or MODULE_CASES)

    def graph(self, folder: Path) -> ir.Model:
        """The graph of the module's program, with its attention fused."""
        options, reference, axes = self.options, self.reference, self.axes
        self.step("factory")
        precision = find_precision("fp32") if self.auto else self.precision
        user = open_user_module(
            reference, precision, seed=options.seed, weights=options.weights, prefix=options.prefix, axes=axes
        )
        self.steps += bool(user.kv_cache)
        self.step("ONNX graph")
        exported = export_user_module(user, opset=self.opset)
        refuse_wrong_cache(user, exported)
        self.shrunk = [
            ShrunkRange(
                axis=name,
                requested_min=user.axes[name].min,
                requested_max=user.axes[name].max,
                min=left.min,
                max=left.max,
                reason="; ".join(exported.notes),
            )
            for name, left in exported.fixed.items()
            if user.axes[name] != left
        ]
        self.user = user = user.with_axes(exported.fixed)
        self.notes += [*user.notes, *exported.notes]
        self.step("attention")
        bf16, fp32 = ir.DataType.BFLOAT16, ir.DataType.FLOAT
        if self.precision.name != "bf16" and retype(exported.model, (bf16,), fp32):
            self.notes.append("what the module computes in BF16 is FP32 in the graph")
        model = self.fuse(exported.model)
        share_tied_weights(model)
        self.capture = ModuleCapture(user, exported, self.precision, options.seed)
        if self.auto:
            model = self.mixed(model, user.axes, folder)
            made = [value for node in model.graph for value in node.outputs]
            values = (*made, *model.graph.inputs)
            types = {str(each.name): each.dtype.numpy() for each in values if each.dtype is not None}
            self.capture = ModuleCapture(user, exported, self.precision, options.seed, types)
        self.values = attention_values(model, lambda name: exported.node_of(name) is not None, self.unfused)
        known = {f.name: getattr(user, f.name) for f in fields(ModuleSpec) if hasattr(user, f.name)}
        self.describe(model, exported.outputs, **known, cached=user.kv_cache)
        _ = self.spec.kv_cache  # raises where it is not one
        _drop_exporter_metadata(model)
        return model

    def mixed(self, model: ir.Model, axes: Axes, folder: Path) -> ir.Model:
        """As of every source; where it does not run, the module itself may say why."""
        try:
            return super().mixed(model, axes, folder)
        except DeployError:
            planned = PlannedCase(name="odd", sizes=odd_sizes(axes))
            self.capture.run_eager(self.capture.draw(planned), "golden case odd")
            raise

    def draw(self, planned: flow.PlannedCase) -> Arrays:
        """The inputs of a case."""
        return arrays_of(self.capture.draw(planned))

    def sample_cases(self) -> Iterator[flow.PlannedCase]:
        """The first samples of the user's own, each a golden case."""
        given, spec = self.user.samples, self.spec
        if isinstance(given, str | Path):
            found = read_samples(Path(given), spec)
        else:
            with user_code("the samples of the Deployable", "The samples cannot be read.", mixed=True):
                items = list(islice(given() if callable(given) else given, _MOST_SAMPLES + 1))
            found = samples_from(items, spec, "samples")
        for number, sample in enumerate(islice(found, _MOST_SAMPLES + 1)):
            if number == _MOST_SAMPLES:
                self.notes.append(
                    f"the first {_MOST_SAMPLES} samples are golden cases; more: validate --data"
                )
                return
            taken = as_taken(sample, spec, self.precision)
            spec.check_sizes(taken.sizes)
            yield flow.PlannedCase(name=f"sample-{number}", sizes=dict(taken.sizes), given=taken.inputs)

    def capture_case(self, planned: flow.PlannedCase) -> GoldenCase:
        """One golden case; the spec is complete once the work of the case opt is known."""
        case = super().capture_case(planned)
        if planned.name == "opt":
            self.spec = replace(self.spec, flops=case.flops)
        return case

    def layers(self, cases: list[GoldenCase], folder: Path) -> LayersEntry | None:
        """The values inside the first case whose attentions are finite and take little memory."""
        self.step("results of each attention")
        for case in cases if self.values else ():
            oracle, eager, baselines = self.capture.look_inside(case, sorted(set(self.values.values())))
            if not flow.are_finite(oracle):
                continue
            inside = {"oracle": oracle, "eager": eager}
            arrays = {f"{kind}/{name}": each for kind in inside for name, each in inside[kind].items()}
            arrays |= pack_baselines(baselines)
            if sum(array.nbytes for array in arrays.values()) <= flow.LAYERS_BYTES:
                file = f"layers/{case.name}.safetensors"
                write_arrays(folder / file, arrays)
                return LayersEntry(case=case.name, file=file, values=dict(self.values), source=oracle.source)
        return None

    def origin(self) -> str:
        """A file or the exported object with the hash of its state, or the factory."""
        user = self.user
        if user.weights_file is not None:
            return f"{Path(user.weights_file).name}, state SHA-256 {user.state_sha256}"
        if not user.factory:
            return f"of the exported object, state SHA-256 {user.state_sha256}"
        return f"as the factory makes them, seed {user.seed}"


@user_code(timed=False, mixed=True)
def open_graph(reference: str | Deployable, axes: Axes | None) -> tuple[ModelSpec, ir.Model]:
    """The graph of a module with its attention fused, to count its work; nothing is written."""
    source = ModuleSource(reference, ExportOptions(precision="fp32"), axes)
    source.on_step = silent
    with scratch_folder() as folder:
        model = source.graph(folder)
    return source.spec, model


def export_user_module(user: UserModule, *, opset: int = _OPSETS[0]) -> ExportedModule:
    """A module as PyTorch exports it: its graph, and the program that its FP64 oracle runs."""
    draw = partial(draw_user_inputs, user, "check", seed=1)
    given = (user.module, user.examples, user.dims, user.axes)
    with user_code(where_is(user.module.forward), mixed=True):
        return export_program(*given, opset=opset, output_names=user.outputs, draw=draw)
