"""Nodes whose form changed after opset 17, written as they were before."""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir

from mha_deploy.graph.build import NodeBuilder


def rewrite_for(node: ir.Node, version: int) -> None:
    """Write a node in an older form, where one is known and the target version needs it."""
    for since, names, rewrite in _REWRITES:
        if version < since and node.op_type in names:
            rewrite(node)


def _axes_to_attribute(node: ir.Node) -> None:
    """Axes became an input in opset 18."""
    axes = _constant_ints(node, 1)
    if axes is not None:
        node.attributes.add(ir.AttrInt64s("axes", axes))
        node.resize_inputs(1)


def _drop_split_count(node: ir.Node) -> None:
    """The number of parts became an attribute in opset 18, where the last part may be smaller."""
    if _splits_evenly(node):
        node.attributes.pop("num_outputs", None)


def _splits_evenly(node: ir.Node) -> bool:
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        return True
    data, axis = node.inputs[0], node.attributes.get_int("axis", 0)
    size = data.shape[axis] if data is not None and data.shape is not None else None
    return isinstance(size, int) and size % len(node.outputs) == 0


def _gelu_to_primitives(node: ir.Node) -> None:
    """Gelu became an operator in opset 20: x/2 · (1 + erf(x/√2)), or its tanh form."""
    x = node.inputs[0]
    if x is None or x.dtype is None:
        return
    b = NodeBuilder(node.name or node.outputs[0].name or "gelu")
    half, one = (b.constant(number, x.dtype) for number in (0.5, 1.0))
    if node.attributes.get_string("approximate", "none") == "tanh":
        bend = _tanh_of_gelu(b, x)
    else:
        bend = b.op("Erf", b.op("Mul", x, b.constant(math.sqrt(0.5), x.dtype)))
    y = b.op("Mul", b.op("Mul", x, half), b.op("Add", bend, one), name="gelu")
    _replace_with(node, b, y)


def _tanh_of_gelu(b: NodeBuilder, x: ir.Value) -> ir.Value:
    """tanh(√(2/π) · (x + 0.044715 x³))."""
    dtype = x.dtype or ir.DataType.FLOAT
    cube = b.op("Mul", b.op("Mul", b.op("Mul", x, x), x), b.constant(0.044715, dtype))
    return b.op("Tanh", b.op("Mul", b.op("Add", x, cube), b.constant(math.sqrt(2 / math.pi), dtype)))


def _shape_in_full(node: ir.Node) -> None:
    """Shape could take a range from opset 15 on; TensorRT 8.6 crashed on graphs with it."""
    x = node.inputs[0]
    rank = None if x is None or x.shape is None else len(x.shape)
    if x is None or rank is None or not {"start", "end"} & set(node.attributes):
        return
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", rank)
    wanted = range(rank)[start:end]
    b = NodeBuilder(node.name or node.outputs[0].name or "shape")
    _replace_with(node, b, b.op("Gather", b.op("Shape", x), b.ints(*wanted), axis=0, name="range"))


def _squeeze_by_name(node: ir.Node) -> None:
    """Say which axis goes; TensorRT 8.6 crashed on graphs that left it to be found out."""
    x = node.inputs[0]
    if len(node.inputs) > 1 or x is None or x.shape is None or len(x.shape) != 1:
        return
    b = NodeBuilder(node.name or node.outputs[0].name or "squeeze")
    _replace_with(node, b, b.op("Squeeze", x, b.ints(0)))


def _replace_with(node: ir.Node, b: NodeBuilder, new: ir.Value) -> None:
    old, graph = node.outputs[0], node.graph
    if graph is None:
        return
    new.name, new.type, new.shape = old.name, old.type, old.shape
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.insert_before(node, b.nodes)
    graph.remove(node, safe=True)


def _constant_ints(node: ir.Node, position: int) -> list[int] | None:
    if position >= len(node.inputs):
        return None
    value = node.inputs[position]
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else [int(axis) for axis in tensor.numpy().reshape(-1)]


_REDUCTIONS = frozenset(
    f"Reduce{kind}" for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
)

# The opset that brought the newer form, the operators, and how to write them before it.
_REWRITES: tuple[tuple[int, frozenset[str], Callable[[ir.Node], None]], ...] = (
    (18, _REDUCTIONS, _axes_to_attribute),
    (18, frozenset({"Split"}), _drop_split_count),
    (18, frozenset({"Shape"}), _shape_in_full),
    (18, frozenset({"Squeeze"}), _squeeze_by_name),
    (20, frozenset({"Gelu"}), _gelu_to_primitives),
)
