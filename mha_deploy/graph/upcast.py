"""Copies of a graph that compute in float32, or without fusion: for CPU runtimes and fault attribution.

A fused kernel does not expose scores and weights. A copy in which both are graph outputs cannot be fused, and
a copy whose attention is in float32 cannot overflow or round in half precision.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from mha_deploy.errors import DeployError
from mha_deploy.graph.attention_node import is_attention
from mha_deploy.graph.ir import HALVES, graphs_in, infer_shapes, is_op, long_axes, node_name
from mha_deploy.graph.lower import lower
from mha_deploy.graph.lower.call import copy_of
from mha_deploy.graph.roles import LAYOUT, MATMULS, NORMS, QUANTIZERS

_REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceL2", "AveragePool", "GlobalAveragePool", "Softmax")
_OTHERS_IN_FLOAT32 = (*NORMS, "BatchNormalization", *_REDUCTIONS, "Gelu", "Erf", "Tanh", "Sigmoid")


def with_float32_inside(model: ir.Model) -> ir.Model:
    """A copy with float32 where kernels have it: matmuls, norms, reductions, softmax, activations."""
    return with_float32_matmuls(model, *_OTHERS_IN_FLOAT32)


def with_float32_matmuls(model: ir.Model, *others: str) -> ir.Model:
    """A copy whose matmuls, convolutions, attentions and `others` are in float32; weights are shared."""
    copy = model.clone()
    if any(value.dtype is None for node in copy.graph for value in node.outputs if value.name):
        infer_shapes(copy)  # other people's files often omit types
    for node in [node for node in copy.graph if is_op(node, *MATMULS, "Attention", *others)]:
        for position, value in enumerate(node.inputs):
            if value is not None and value.dtype in HALVES:
                cast = _cast(value, ir.DataType.FLOAT, f"{node_name(node)}/input_{position}")
                copy.graph.insert_before(node, cast)
                node.replace_input_with(position, cast.outputs[0])
        _round_outputs(copy.graph, node)
    return copy


def with_rounded_results(model: ir.Model) -> ir.Model:
    """A copy that computes in float32 and rounds every FP16 result, on every processor; weights are shared.

    ONNX Runtime has FP16 kernels on some processors, and computes several nodes at once in float32 on others.
    """
    copy, wide = model.clone(), dict[ir.Value, ir.Value]()
    if any(value.dtype is None for node in copy.graph for value in node.outputs if value.name):
        infer_shapes(copy)
    for node in list(copy.graph):
        halves = [value for value in node.inputs if value is not None and value.dtype in HALVES]
        if not halves or graphs_in(node) or (node.domain == "" and node.op_type in LAYOUT):
            continue
        for position, value in enumerate(node.inputs):
            if value is None or value.dtype not in HALVES:
                continue
            if value not in wide:
                cast = _cast(value, ir.DataType.FLOAT, f"{value.name}/wide")
                copy.graph.insert_before(node, cast)
                wide[value] = cast.outputs[0]
            node.replace_input_with(position, wide[value])
        _round_outputs(copy.graph, node)
    return copy


def _round_outputs(graph: ir.Graph, node: ir.Node) -> None:
    """Let a node give float32, and a Cast what it gave."""
    for output in node.outputs:
        half, name = output.dtype, output.name
        if half is None or half not in HALVES or not name:
            continue
        cast = _cast(output, half, f"{node_name(node)}/{name}")
        rounded = cast.outputs[0]
        output.replace_all_uses_with(rounded, replace_graph_outputs=True)
        cast.replace_input_with(0, output)
        output.name, rounded.name = f"{name}/float32", name
        output.type = ir.TensorType(ir.DataType.FLOAT)  # a new one: copies of a model share their types
        graph.insert_after(node, cast)


def _cast(value: ir.Value, to: ir.DataType, name: str) -> ir.Node:
    cast = ir.node("Cast", inputs=[value], attributes={"to": to}, name=f"{name}/cast")
    result = cast.outputs[0]
    result.name, result.shape, result.type = f"{name}/{to.name.lower()}", value.shape, ir.TensorType(to)
    return cast


# -- Without fusion --------------------------------------------------------------------------------

_INNER = ("scores", "weights")
_SOFTMAX_PRECISION = "softmax_precision"


def unfused_twin(model: ir.Model) -> ir.Model:
    """A copy in primitive operators with the scores and weights of every attention as graph outputs.

    The model's own outputs come first. Matmuls, scores and weights have the types of the model; the softmax
    accumulates in float32, as in every fused kernel.
    """
    copy = copy_of(model)
    before = {node.name for node in copy.graph.all_nodes()}
    attentions = [node for node in copy.graph.all_nodes() if is_attention(node)]
    for node in attentions:
        if _SOFTMAX_PRECISION not in node.attributes:
            node.attributes[_SOFTMAX_PRECISION] = ir.AttrInt64(_SOFTMAX_PRECISION, int(ir.DataType.FLOAT))
    twin = lower(copy, "primitives", cache="copy")  # the outputs stay as they are
    added = (node for node in twin.graph if node.name not in before)
    inner = [node.outputs[0] for node in added if str(node.name).rpartition("/")[2] in _INNER]
    if not attentions or len(inner) != len(_INNER) * len(attentions):
        got = f"{len(attentions)} attentions, {len(inner)} of their tensors in the main graph"
        raise DeployError(
            "The scores of an attention cannot be graph outputs.",
            got=got,
            hint="a graph without the scores as outputs",
        )
    twin.graph.outputs.extend(value for value in inner if not value.is_graph_output())
    return twin


def float32_twin(model: ir.Model) -> ir.Model:
    """The unfused twin with matmuls and softmax in float32: same weights, inputs and outputs.

    Weights and the results of projections are rounded to the model's type. Between queries, keys and values
    and the output of the attention nothing is.
    """
    return unfused_twin(with_float32_matmuls(model))


# -- In another type -------------------------------------------------------------------------------

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "output_datatype")


def in_float64(model: ir.Model) -> ir.Model:
    """A copy in which every floating-point tensor is float64, explicit casts included: an FP64 reference."""
    copy = model.clone()
    _retype_to_float64(copy)
    return copy


def with_float64_inside(model: ir.Model) -> ir.Model:
    """A copy in FP64 without `Attention` nodes, whose float32 inputs and outputs stay float32."""
    copy = lower(model, "primitives", cache="copy")
    on_disk = {
        own: value.const_value
        for own, value in copy.graph.initializers.items()
        if isinstance(value.const_value, ir.ExternalTensor) and value.dtype in FLOATS
    }
    for own in on_disk:
        copy.graph.initializers[own].const_value = None
    _retype_to_float64(copy)
    graph, first = copy.graph, next(iter(copy.graph), None)
    for own, tensor in on_disk.items():  # they stay there, and are cast
        old = graph.initializers.pop(own)
        stored = ir.val(f"{own}/stored", const_value=tensor)
        graph.register_initializer(stored)
        cast = _cast(stored, ir.DataType.DOUBLE, own)
        old.replace_all_uses_with(cast.outputs[0], replace_graph_outputs=True)
        graph.insert_before(graph[0], cast)
    for value in graph.inputs:
        if first is not None and value.dtype == ir.DataType.DOUBLE:
            cast = _cast(value, ir.DataType.DOUBLE, f"{value.name}/input")
            value.replace_all_uses_with(cast.outputs[0])
            cast.replace_input_with(0, value)
            graph.insert_before(first, cast)
            value.type = ir.TensorType(ir.DataType.FLOAT)
    for position, value in enumerate(graph.outputs):
        producer = value.producer()
        if value.dtype == ir.DataType.DOUBLE and producer is not None:
            cast, name = _cast(value, ir.DataType.FLOAT, f"{value.name}/output"), value.name
            graph.insert_after(producer, cast)
            graph.outputs[position] = cast.outputs[0]
            value.name, cast.outputs[0].name = f"{name}/double", name
    return copy


def _retype_to_float64(model: ir.Model) -> None:
    """Give all floating-point tensors FP64 in place, but for those that integers come from."""
    own = {
        node: [None if value is None else value.dtype for value in node.inputs]
        for node in deciding_nodes(model.graph)
    }
    retype(model, FLOATS, ir.DataType.DOUBLE, keep=own.keys())
    for node, types in own.items():
        for at, (value, dtype) in enumerate(zip(node.inputs, types, strict=True)):
            if value is not None and dtype is not None and value.dtype != dtype:
                cast = _cast(value, dtype, f"{node_name(node)}/input_{at}")
                model.graph.insert_before(node, cast)
                node.replace_input_with(at, cast.outputs[0])
        for value in node.outputs:
            readers = [use for use in value.uses() if use.node not in own]
            if value.dtype not in FLOATS or not (readers or value.is_graph_output()):
                continue
            cast = _cast(value, ir.DataType.DOUBLE, f"{node_name(node)}/{value.name}")
            model.graph.insert_after(node, cast)
            for use in readers:
                use.node.replace_input_with(use.idx, cast.outputs[0])
            if value.is_graph_output():
                wide, name = cast.outputs[0], value.name
                model.graph.outputs[:] = [wide if each is value else each for each in model.graph.outputs]
                value.name, wide.name = f"{name}/own", name


def deciding_nodes(graph: ir.Graph) -> set[ir.Node]:
    """The nodes of floats that come from integers and constants alone, and that integers come from.

    They are part of what the file computes, as it is: a distance is in one bucket of positions, and FP64 may
    put it into the next. What depends on floating-point inputs, matrices or tables is not among them.
    """

    def is_float(value: ir.Value | None) -> bool:
        return value is not None and value.dtype in FLOATS

    def is_read_as_integer(node: ir.Node) -> bool:
        known = all(value.dtype is not None and not is_float(value) for value in node.outputs)
        return known and not is_op(node, "Shape", "Size", *QUANTIZERS)

    free = {
        value for value in graph.initializers.values() if not value.is_graph_input() and long_axes(value) < 2
    }
    computed = [node for node in graph if any(map(is_float, node.outputs)) and not graphs_in(node)]
    for node in computed:
        if not is_op(node, *QUANTIZERS) and all(value in free for value in node.inputs if is_float(value)):
            free.update(filter(is_float, node.outputs))
    found = set[ir.Node]()
    for node in reversed(computed):
        users = [use.node for value in node.outputs if value in free for use in value.uses()]
        if any(user in found or is_read_as_integer(user) for user in users):
            found.add(node)
    return found


def retype(
    model: ir.Model,
    before: Collection[ir.DataType],
    after: ir.DataType,
    *,
    keep: Collection[ir.Node] = (),
) -> bool:
    """Give all tensors of some types another type in place, explicit casts included; whether any had one.

    What the nodes of `keep` compute is left as it is.
    """
    values = [value for graph in model.graphs() for value in (*graph.inputs, *graph.initializers.values())]
    for node in model.graph.all_nodes():
        if node in keep:
            continue
        values += node.outputs
        retype_attributes(node, before, after, _SOFTMAX_PRECISION)
    found = [value for value in values if value.dtype in before]
    for value in found:
        value.type = _retyped(value.type, after)  # a new one: copies of a model share their types
        if (tensor := value.const_value) is not None:
            value.const_value = ir.tensor(in_type(tensor.numpy(), after), name=tensor.name)
    return bool(found)


def _retyped(kind: ir.TypeProtocol | None, dtype: ir.DataType) -> ir.TypeProtocol:
    """The same kind of value, of tensors of another type."""
    if isinstance(kind, ir.SequenceType | ir.OptionalType):
        return type(kind)(_retyped(kind.elem_type, dtype))
    return ir.TensorType(dtype)


def retype_attributes(node: ir.Node, before: Collection[ir.DataType], after: ir.DataType, *more: str) -> None:
    """Change types in the attributes of a node: of tensors, and those that the usual ones and `more` name."""
    if is_op(node, "ConstantOfShape") and ir.DataType.FLOAT in before and "value" not in node.attributes:
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.zeros(1, np.float32)))  # the default
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.INT and name in (*_TYPE_ATTRIBUTES, *more):
            if ir.DataType(attribute.as_int()) in before:
                node.attributes[name] = ir.AttrInt64(name, after.value)
        elif attribute.type == ir.AttributeType.TENSOR and (tensor := attribute.as_tensor()).dtype in before:
            new = ir.tensor(in_type(tensor.numpy(), after))
            node.attributes[name] = ir.AttrTensor(name, new)
        elif ir.DataType.FLOAT in before and name in ("value_float", "value_floats"):  # of a Constant
            number = attribute.as_float() if name == "value_float" else attribute.as_floats()
            node.attributes.pop(name)
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.array(number, after.numpy())))


def in_type(array: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    """The array in another type; finite numbers beyond a narrower one become its limits."""
    if dtype.itemsize < array.itemsize:
        clamped = np.clip(array, float(dtype.min), float(dtype.max))
        array = np.where(np.isfinite(array), clamped, array)
    return array.astype(dtype.numpy())
