"""A PyTorch module to ONNX's own `Attention` nodes, through torch.onnx.export."""

from __future__ import annotations

import ast

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import torch

from mha_deploy.errors import ExportError
from mha_deploy.export.explain import first_cause, quiet, was_interrupted
from mha_deploy.export.plan import OPSETS
from mha_deploy.model.spec import AttentionSpec
from mha_deploy.reference import build_module
from mha_deploy.reference.attention import Attention
from mha_deploy.reference.inputs import call_arguments, fed_to, parameter_name, random_inputs

_LEAST_TRACED = 2  # what PyTorch takes for a size that can vary


def choose_opset(layer: AttentionSpec | None, wanted: int | None) -> int:
    """The operator set to export with: the first that has what a layer needs, or the wanted one."""
    needed = OPSETS[-1] if layer is not None and layer.cache == "preallocated" else OPSETS[0]
    if wanted is not None and wanted not in OPSETS:
        raise ExportError(
            "The canonical graph needs an operator set with Attention.", got=wanted, hint=f"one of {OPSETS}"
        )
    if wanted is not None and wanted < needed:
        raise ExportError(
            "A preallocated cache needs an operator set with TensorScatter.",
            got=wanted,
            hint=f"--opset {needed}",
        )
    return wanted or needed


def canonical_from_module(module: Attention, *, opset: int | None = None) -> ir.Model:
    """Export a reference layer.

    The weights in the model share memory with the module's wherever they need no transposing.
    """
    opset = choose_opset(module.spec, opset)
    parameter = next(module.parameters())
    if parameter.device.type != "cpu":  # what is traced must not depend on where the golden cases run
        weights = {name: tensor.cpu() for name, tensor in module.state_dict().items()}
        module = build_module(module.spec, weights=weights, dtype=parameter.dtype)
    before, module.path = module.path, "onnx"
    try:
        model = _export(module, opset)
    finally:
        module.path = before
    _name_by_module(model)
    _drop_unused_outputs(model)
    # The spec's shapes on the outputs: PyTorch gives the weights of Attention a length of 0.
    for output, tensor in zip(model.graph.outputs, module.spec.outputs, strict=True):
        output.shape = ir.Shape(tensor.dims)
    drop_exporter_metadata(model)
    return model


def _export(module: Attention, opset: int) -> ir.Model:
    spec = module.spec
    try:
        with quiet():
            program = torch.onnx.export(
                module,
                args=(),
                kwargs=call_arguments(spec, _example(module)),
                dynamo=True,
                opset_version=opset,
                dynamic_shapes=_dynamic_shapes(spec),
                input_names=[tensor.name for tensor in spec.inputs],
                output_names=[tensor.name for tensor in spec.outputs],
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        if was_interrupted(error):  # which the exporter takes for a failure of its own
            raise KeyboardInterrupt from error
        raise ExportError(f"PyTorch could not export {spec.name}.", got=first_cause(error)) from error
    if program is None:
        raise ExportError(f"PyTorch gave no ONNX program for {spec.name}.")
    return program.model


def _example(module: Attention) -> dict[str, torch.Tensor]:
    """Inputs to trace with: no axis of 0 or 1 where it can vary, or the exporter takes it for a constant.

    A past of one entry at most is traced with more of them: tracing computes no numbers, so there is room.
    """
    spec = module.spec
    sizes = {
        name: max(axis.min, min(max(axis.max, _LEAST_TRACED), 2 + i)) if axis.is_dynamic else axis.min
        for i, (name, axis) in enumerate(spec.axes.items())
    }
    return fed_to(module, random_inputs(spec, sizes, seed=0))


def _dynamic_shapes(spec: AttentionSpec) -> dict[str, dict[int, torch.export.Dim]]:
    dims = {
        name: torch.export.Dim(name, min=axis.min, max=max(axis.max, _LEAST_TRACED))
        for name, axis in spec.axes.items()
        if axis.is_dynamic
    }
    return {
        parameter_name(tensor): {
            position: dims[dim] for position, dim in enumerate(tensor.dims) if isinstance(dim, str)
        }
        for tensor in spec.inputs
    }


def _name_by_module(model: ir.Model) -> None:
    """Name projections and attentions after the module, instead of the exporter's running numbers."""
    attentions = 0
    for node in model.graph:
        if node.op_type == "Attention":
            node.name = f"attention_{attentions}" if attentions else "attention"
            attentions += 1
        elif node.op_type == "TensorScatter" and node.inputs[0] is not None:
            node.name = f"{node.inputs[0].name}.update"
        elif node.op_type == "MatMul":
            scope = ast.literal_eval(node.metadata_props["pkg.torch.onnx.name_scopes"])[-2]
            node.name = f"{scope}.matmul"
            _settle_weight(model, node.inputs[1], f"{scope}.weight.T")


def _settle_weight(model: ir.Model, value: ir.Value | None, name: str) -> None:
    """Name the constant that the exporter folded `weight.T` into, and lay it out as it reads.

    As a transposed view it would be written to disk number by number, which takes minutes for gigabytes.
    """
    if value is not None and value.is_initializer() and value.name is not None:
        del model.graph.initializers[value.name]
        value.name = name
        model.graph.initializers[name] = value
        if value.const_value is not None:
            array = np.ascontiguousarray(value.const_value.numpy())
            value.const_value = ir.Tensor(array, dtype=value.const_value.dtype, name=name)


def _drop_unused_outputs(model: ir.Model) -> None:
    """Leave out the unused outputs of Attention: TensorRT takes a node with one output."""
    for node in model.graph:
        if node.op_type != "Attention":
            continue
        used = [output.is_graph_output() or bool(output.uses()) for output in node.outputs]
        node.resize_outputs(max(index for index, is_used in enumerate(used) if is_used) + 1)
        for output, is_used in zip(node.outputs, used, strict=False):
            output.name = output.name if is_used else ""


def drop_exporter_metadata(model: ir.Model) -> None:
    """Forget stack traces and the like: they hold paths of the export machine."""
    common_passes.ClearMetadataAndDocStringPass()(model)
    graph = model.graph  # the pass leaves what is written on inputs, outputs and weights
    for value in (*graph.inputs, *graph.outputs, *graph.initializers.values()):
        value.metadata_props.clear()
