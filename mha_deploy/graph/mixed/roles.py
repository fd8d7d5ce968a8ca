"""What a tensor is there for: data, a mask, or positions that must be exact.

Numbers of a mask may be clamped, since a key that is hidden by -65504 is as hidden as by -3.4e38. Positions
must not be rounded before their sine is taken, or before they become an index.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from mha_deploy.graph.attention_node import MASK, is_attention
from mha_deploy.graph.mixed.prepare import FLOAT, float_inputs, float_outputs, is_float, is_op

# Operators through which a mask comes to its attention.
_MASK_MAKERS = (
    *("Where", "Add", "Sub", "Mul", "Neg", "Min", "Max", "Clip", "Cast", "Identity", "Trilu", "Pad"),
    *("Expand", "Unsqueeze", "Squeeze", "Reshape", "Slice", "Concat", "Transpose", "Tile", "Gather"),
    *("ConstantOfShape", "ScatterND", "GatherND"),
)
_WAVES = ("Sin", "Cos")
_STEPS = ("Floor", "Ceil", "Round", "Mod")


def long_axes(value: ir.Value) -> int:
    """How many axes of an initializer are longer than 1: two and more are a table or a matrix."""
    return sum(dim != 1 for dim in value.shape or ())


def data_values(graph: ir.Graph) -> set[ir.Value]:
    """The float32 values that depend on float32 inputs, on matrices or on tables.

    What is left is made of shapes, integers and single numbers: positions, masks and the like.
    """
    data = {value for value in graph.inputs if is_float(value)}
    data |= {value for value in graph.initializers.values() if is_float(value) and long_axes(value) > 1}
    for node in graph:
        if any(value in data for _, value in float_inputs(node)):
            data.update(value for _, value in float_outputs(node))
    return data


def mask_values(graph: ir.Graph, data: set[ir.Value]) -> set[ir.Value]:
    """The float32 values that lead only to masks of attention; inputs and constants are among them."""
    masks: set[ir.Value] = set()
    made = (value for node in reversed(graph) for value in node.outputs)
    for value in (*made, *graph.inputs, *graph.initializers.values()):
        uses = value.uses()
        if not is_float(value) or not uses or value.is_graph_output():
            continue
        if all(_is_mask_use(use.node, use.idx, value, masks, data) for use in uses):
            masks.add(value)
    return masks


def _is_mask_use(
    node: ir.Node, position: int, value: ir.Value, masks: set[ir.Value], data: set[ir.Value]
) -> bool:
    if is_attention(node):
        return position == MASK
    if is_op(node, "Add") and value not in data and _goes_to_softmax(node.outputs[0]):
        return True
    outputs = [output for _, output in float_outputs(node)]
    return is_op(node, *_MASK_MAKERS) and bool(outputs) and all(output in masks for output in outputs)


def _goes_to_softmax(value: ir.Value) -> bool:
    uses = value.uses()
    return bool(uses) and not value.is_graph_output() and all(is_op(use.node, "Softmax") for use in uses)


def makers_of(value: ir.Value, within: set[ir.Value]) -> Iterator[ir.Node]:
    """The nodes that a value comes from through values of a set, its own producer first."""
    pending, seen = [value], set[ir.Value]()
    while pending:
        value = pending.pop()
        node = value.producer()
        if value in seen or value not in within or node is None:
            continue
        seen.add(value)
        yield node
        pending.extend(each for _, each in float_inputs(node))


def exact_uses(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Value, str]]:
    """The nodes that turn a small error of their input into a large one, that input, and how."""
    for node in graph:
        value = node.inputs[0] if node.inputs else None
        if value is None or value.dtype != FLOAT:
            continue
        if is_op(node, *_WAVES):
            yield node, value, "wave"
        elif is_op(node, *_STEPS) or (is_op(node, "Cast") and _becomes_integer(node)):
            yield node, value, "step"


def _becomes_integer(node: ir.Node) -> bool:
    dtype = node.outputs[0].dtype
    return dtype is not None and dtype.is_integer()
