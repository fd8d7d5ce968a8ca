"""Nodes whose form changed after opset 17, written as they were before."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from mha_deploy.graph.lower.opset_operators import (
    builder_for,
    gelu_to_primitives,
    mish_to_primitives,
    swish_to_primitives,
)
from mha_deploy.graph.lower.rewrite import replace_node


def rewrite_for(node: ir.Node, version: int) -> None:
    """Write a node in an older form, where one is known and the target version needs it."""
    for since, names, rewrite in _REWRITES:
        if version < since and node.op_type in names:
            rewrite(node)


def _axes_to_attribute(node: ir.Node) -> None:
    """Axes became an input in opset 18; without any, all are reduced, unless the node says otherwise."""
    given = len(node.inputs) > 1 and node.inputs[1] is not None
    axes = _constant_ints(node, 1)
    if given and axes is None:
        return
    keeps = node.attributes.get_int("noop_with_empty_axes", 0)
    if not axes and keeps:
        return
    if axes:
        node.attributes.add(ir.AttrInt64s("axes", axes))
    node.attributes.pop("noop_with_empty_axes", None)  # it speaks of nodes without axes only
    node.resize_inputs(1)


def _reduce_numbers(node: ir.Node) -> None:
    """The largest of booleans came with opset 20: before, it is taken over numbers."""
    x = node.inputs[0]
    if x is None or x.dtype != ir.DataType.BOOL:
        return
    b = builder_for(node)
    numbers = b.op("Cast", x, to=int(ir.DataType.FLOAT))
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    reduced = b.op(node.op_type, numbers, *node.inputs[1:], **attributes)
    replace_node(node, b, {0: b.op("Cast", reduced, to=int(ir.DataType.BOOL), name="as_bool")})


def _infinity_of_float32(node: ir.Node) -> None:
    """Infinities of half-precision numbers could be asked for from opset 20 on."""
    x = node.inputs[0]
    if x is None or x.dtype not in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        return
    b = builder_for(node)
    wide = b.op("Cast", x, to=int(ir.DataType.FLOAT))
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    replace_node(node, b, {0: b.op(node.op_type, wide, **attributes)})


def _pad_every_axis(node: ir.Node) -> None:
    """Padding could name its axes from opset 18 on; before, it speaks of all."""
    x = node.inputs[0]
    pads, axes = _constant_ints(node, 1), _constant_ints(node, 3)
    if axes is None or pads is None or x is None or x.shape is None:
        return
    rank = len(x.shape)
    spelled = [0] * (2 * rank)
    for at, axis in enumerate(axes):
        spelled[axis % rank], spelled[rank + axis % rank] = pads[at], pads[at + len(axes)]
    b = builder_for(node)
    mode = node.attributes.get_string("mode", "constant")
    y = b.op("Pad", x, b.ints(*spelled), node.inputs[2], mode=mode, name="padded")
    replace_node(node, b, {0: y})


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


def _shape_in_full(node: ir.Node) -> None:
    """Shape could take a range from opset 15 on; TensorRT 8.6 crashed on graphs with it."""
    x = node.inputs[0]
    rank = None if x is None or x.shape is None else len(x.shape)
    if x is None or rank is None or not {"start", "end"} & set(node.attributes):
        return
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", rank)
    wanted = range(rank)[start:end]
    b = builder_for(node)
    replace_node(node, b, {0: b.op("Gather", b.op("Shape", x), b.ints(*wanted), axis=0, name="range")})


def _squeeze_by_name(node: ir.Node) -> None:
    """Say which axis goes; TensorRT 8.6 crashed on graphs that left it to be found out."""
    x = node.inputs[0]
    if len(node.inputs) > 1 or x is None or x.shape is None or len(x.shape) != 1:
        return
    b = builder_for(node)
    replace_node(node, b, {0: b.op("Squeeze", x, b.ints(0))})


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
    (18, frozenset({"Pad"}), _pad_every_axis),
    (18, frozenset({"Mish"}), mish_to_primitives),
    (20, frozenset({"ReduceMax", "ReduceMin"}), _reduce_numbers),
    (20, frozenset({"IsInf"}), _infinity_of_float32),
    (20, frozenset({"Gelu"}), gelu_to_primitives),
    (24, frozenset({"Swish"}), swish_to_primitives),
)
