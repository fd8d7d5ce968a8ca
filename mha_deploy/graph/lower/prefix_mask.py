"""Masks that show the first keys of a batch row, as many as that row has: key lengths in disguise.

    t < lengths[b]     in any usual spelling, of which Expand(Less(Range(0, T), Unsqueeze(lengths))) is one

Only what is certain is taken: the counted side is 0, 1, 2 … along the last axis, the other has one whole
number for each batch row, and nothing between the comparison and the attention moves the batch or the keys.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from mha_deploy.graph.attention_node import Dim
from mha_deploy.graph.lower.call import same_size
from mha_deploy.graph.lower.plugin_operands import dims, made_by

# Operators that hand on the numbers of their first input in their order.
_LAYOUT = frozenset({"Identity", "Reshape", "Squeeze", "Unsqueeze"})
_WHOLE = frozenset({ir.DataType.INT32, ir.DataType.INT64})
_LESS, _GREATER = "Less", "Greater"
_OPPOSITE = {"GreaterOrEqual": _LESS, "LessOrEqual": _GREATER}


def prefix_lengths(mask: ir.Value, *, batch: Dim) -> ir.Value | None:
    """The lengths, whole numbers `[B]`, of a mask that hides just the keys behind them; None for another.

    Args:
        mask: The mask of an attention, boolean or additive.
        batch: The batch of the attention.
    """
    if len(dims(mask)) != 4:
        return None  # of another rank, the first axis is not the batch
    compared = _comparison(_before_layout(mask))
    if compared is None:
        return None
    counted, lengths = compared
    shape = dims(lengths)
    if lengths.dtype not in _WHOLE or not shape or any(size != 1 for size in shape[1:]):
        return None
    if len(shape) < len(dims(counted)) or not same_size(shape[0], batch) or len(shape) < 2:
        return None
    return _one_axis(lengths) if _counts_up(counted) else None


def _before_layout(mask: ir.Value) -> ir.Value:
    """What a mask was before it was spread out: `[B, 1 …, T]`, in the same order."""
    value, may_expand = mask, True
    while True:
        node = value.producer()
        source = node.inputs[0] if node is not None and node.domain == "" and node.inputs else None
        if node is None or source is None:
            return value
        before, after = dims(source), dims(value)
        ends = len(before) > 1 and same_size(before[0], after[0]) and same_size(before[-1], after[-1])
        plain = all(size == 1 for size in before[1:-1])
        aligned = len(before) == len(after)  # Expand counts axes from the last: a shorter mask has no batch
        if node.op_type == "Expand" and may_expand and ends and plain and aligned:
            value = source
        elif node.op_type in _LAYOUT and ends and plain and all(size == 1 for size in after[1:-1]):
            value, may_expand = source, False
        else:
            return value


def _comparison(mask: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """The two sides of "counted < lengths" behind a mask, however it is written."""
    where = made_by(mask, "Where")
    if where is not None:
        condition, numbers = where.inputs[0], _numbers(where)
        if numbers == (0.0, -math.inf):
            return _compared(condition)
        return _compared(condition, inverted=True) if numbers == (-math.inf, 0.0) else None
    return _compared(mask)


def _compared(value: ir.Value | None, *, inverted: bool = False) -> tuple[ir.Value, ir.Value] | None:
    node = None if value is None else value.producer()
    if node is None or node.domain != "":
        return None
    if node.op_type == "Not":
        return _compared(node.inputs[0], inverted=not inverted)
    # What is not ≥ is <, and what is not ≤ is >.
    kind = _OPPOSITE.get(node.op_type) if inverted else node.op_type
    if kind not in (_LESS, _GREATER):
        return None
    one, other = node.inputs
    if one is None or other is None:
        return None
    return (one, other) if kind == _LESS else (other, one)


def _numbers(where: ir.Node) -> tuple[float | None, float | None]:
    return _number(where.inputs[1]), _number(where.inputs[2])


def _number(value: ir.Value | None) -> float | None:
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None or tensor.size != 1 else float(tensor.numpy().reshape(-1)[0])


def _counts_up(value: ir.Value) -> bool:
    """Whether a value is 0, 1, 2 … along its last axis, and has no other."""
    shape = dims(value)
    if not shape or any(size != 1 for size in shape[:-1]):
        return False
    node = value.producer()
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is not None:
        return bool(np.array_equal(tensor.numpy().reshape(-1), np.arange(tensor.size)))
    if node is None or node.domain != "":
        return False
    if node.op_type == "Range":
        return _number(node.inputs[0]) == 0.0 and _number(node.inputs[2]) == 1.0
    source = node.inputs[0] if node.op_type in _LAYOUT or _keeps_whole(node) else None
    return source is not None and _counts_up(source)


def _one_axis(lengths: ir.Value) -> ir.Value | None:
    """The value of one axis that lengths were before axes of one were added."""
    value: ir.Value | None = lengths
    while value is not None and value.dtype in _WHOLE:
        if len(dims(value)) == 1:
            return value
        node = value.producer()
        if node is None or node.domain != "" or not (node.op_type in _LAYOUT or _keeps_whole(node)):
            return None
        value = node.inputs[0]
    return None


def _keeps_whole(node: ir.Node) -> bool:
    """Whether a node casts whole numbers to whole numbers."""
    source = node.inputs[0] if node.op_type == "Cast" else None
    return source is not None and source.dtype in _WHOLE and node.outputs[0].dtype in _WHOLE
