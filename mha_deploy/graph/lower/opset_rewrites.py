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
    x, graph = node.inputs[0], node.graph
    if x is None or x.dtype is None or graph is None:
        return
    b = NodeBuilder(node.name or node.outputs[0].name or "gelu")
    half, one = (b.constant(number, x.dtype) for number in (0.5, 1.0))
    if node.attributes.get_string("approximate", "none") == "tanh":
        bend = _tanh_of_gelu(b, x)
    else:
        bend = b.op("Erf", b.op("Mul", x, b.constant(math.sqrt(0.5), x.dtype)))
    y = b.op("Mul", b.op("Mul", x, half), b.op("Add", bend, one), name="gelu")
    old = node.outputs[0]
    y.name, y.type, y.shape = old.name, old.type, old.shape
    old.replace_all_uses_with(y, replace_graph_outputs=True)
    graph.insert_before(node, b.nodes)
    graph.remove(node, safe=True)


def _tanh_of_gelu(b: NodeBuilder, x: ir.Value) -> ir.Value:
    """tanh(√(2/π) · (x + 0.044715 x³))."""
    dtype = x.dtype or ir.DataType.FLOAT
    cube = b.op("Mul", b.op("Mul", b.op("Mul", x, x), x), b.constant(0.044715, dtype))
    return b.op("Tanh", b.op("Mul", b.op("Add", x, cube), b.constant(math.sqrt(2 / math.pi), dtype)))


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
    (20, frozenset({"Gelu"}), _gelu_to_primitives),
)
