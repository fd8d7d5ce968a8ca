"""Where queries, keys and values lie in memory, so that the plugin reads them there.

The heads of a projection stand side by side in a row, `[B, L, H·D]`, and several projections may share one
row. A Split, a Slice, or a Reshape with a Transpose in front of an attention only copies what the plugin can
find by itself: with the tensor that was cut, and the place of the first number in a row of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import onnx_ir as ir

from mha_deploy.graph.attention_node import Dim
from mha_deploy.graph.build import NodeBuilder, Size
from mha_deploy.graph.lower.call import same_size

# Kernels load 16 bytes at a time, eight numbers of two bytes.
_ALIGNED = 8

TURN = (0, 2, 1, 3)
_TURN_OF_PACKED = (2, 0, 3, 1, 4)  # [B, L, 3, H, D] to [3, B, H, L, D]


class Place(NamedTuple):
    """A tensor of rank 3 or 4, and where in a row of it the heads begin (0 for rank 4)."""

    tensor: ir.Value
    offset: int

    def length(self, b: NodeBuilder) -> Size:
        """The number of queries or keys. Asked here, it keeps nobody alive who cut the tensor."""
        return b.size(self.tensor, 1 if rank(self.tensor) == 3 else 2)


class Operands(NamedTuple):
    """The distinct tensors that hold Q, K and V; for each of the three which one, and where in its rows."""

    tensors: tuple[ir.Value, ...]
    sources: tuple[int, ...]
    offsets: tuple[int, ...]


def operands_of(places: Sequence[Place]) -> Operands:
    """Q, K and V as the plugin takes them: every tensor once, in the order in which they are met."""
    tensors = list(dict.fromkeys(place.tensor for place in places))
    return Operands(
        tuple(tensors),
        tuple(tensors.index(place.tensor) for place in places),
        tuple(place.offset for place in places),
    )


def place_of(value: ir.Value, heads: int, size: int) -> Place:
    """Where the heads of a query, key or value input first stood in rows; the input itself where they do not.

    Args:
        value: `[B, L, H·D]` or `[B, H, L, D]`.
        heads: H.
        size: D.
    """
    rows = value
    if rank(value) == 4:
        packed = _before_unbinding(value, heads, size)
        if packed is not None:
            return packed
        before = rows_before_turn(value, heads, size)
        if before is None:
            return Place(value, 0)
        rows = before
    place = _before_cuts(rows)
    return place if _is_aligned(place) else Place(rows, 0)


def rows_before_turn(value: ir.Value, heads: int, size: int) -> ir.Value | None:
    """The `[B, L, H·D]` that a Reshape and a Transpose made `[B, H, L, D]` of; None where they did not."""
    turn = made_by(value, "Transpose")
    split = None if turn is None or perm(turn) != TURN else made_by(turn.inputs[0], "Reshape")
    rows = None if split is None else split.inputs[0]
    if rows is None or split is None or rank(rows) != 3:
        return None
    before, after = dims(rows), dims(split.outputs[0])
    if len(after) != 4 or after[2:] != (heads, size) or before[2] != heads * size:
        return None
    # As many numbers before and after: where one of the two leading sizes is the same, so is the other.
    return rows if any(same_size(before[at], after[at]) for at in (0, 1)) else None


def _before_cuts(value: ir.Value) -> Place:
    """The tensor that Splits and Slices cut a value out of."""
    place = Place(value, 0)
    while True:
        node = place.tensor.producer()
        begin = None if node is None else _begin_of_cut(node, place.tensor, axis=2)
        whole = None if node is None else node.inputs[0]
        if begin is None or whole is None or rank(whole) != 3:
            return place
        place = Place(whole, place.offset + begin)


def _begin_of_cut(node: ir.Node, part: ir.Value, *, axis: int) -> int | None:
    """Where along an axis of its input a Split or Slice begins a part; None where it cuts elsewhere."""
    axes_meant = (axis, axis - len(dims(part)))
    if node.domain != "":
        return None
    if node.op_type == "Split" and (node.attributes.get_int("axis", 0) or 0) in axes_meant:
        sizes = [dims(output)[axis] if dims(output) else None for output in node.outputs]
        before = sizes[: list(node.outputs).index(part)]
        known = [size for size in before if isinstance(size, int)]
        return sum(known) if len(known) == len(before) else None
    if node.op_type == "Slice":
        starts, axes, steps = (constant_ints(node, at) for at in (1, 3, 4))
        one_step = len(node.inputs) < 5 or node.inputs[4] is None or steps == (1,)
        along = axes is not None and len(axes) == 1 and axes[0] in axes_meant
        if starts is not None and len(starts) == 1 and along and one_step:
            return starts[0] if starts[0] >= 0 else None
    return None


def _is_aligned(place: Place) -> bool:
    shape = dims(place.tensor)
    width = shape[-1] if shape else None
    return isinstance(width, int) and width % _ALIGNED == 0 and place.offset % _ALIGNED == 0


def _before_unbinding(value: ir.Value, heads: int, size: int) -> Place | None:
    """The `[B, L, 3·H·D]` of a model that reshapes to [B, L, 3, H, D], turns that, and takes it apart."""
    taken = _taken_from_first_axis(value)
    turn = None if taken is None else made_by(taken[0], "Transpose")
    split = None if turn is None or perm(turn) != _TURN_OF_PACKED else made_by(turn.inputs[0], "Reshape")
    rows = None if split is None else split.inputs[0]
    if taken is None or split is None or rows is None or rank(rows) != 3:
        return None
    before, after = dims(rows), dims(split.outputs[0])
    if len(after) != 5 or after[3:] != (heads, size) or not isinstance(after[2], int):
        return None
    whole = before[2] == after[2] * heads * size
    if not whole or not any(same_size(before[at], after[at]) for at in (0, 1)):
        return None
    place = Place(rows, taken[1] % after[2] * heads * size)
    return place if _is_aligned(place) else None


def _taken_from_first_axis(value: ir.Value) -> tuple[ir.Value, int] | None:
    """The tensor and the index, where a value is one entry of its first axis."""
    node = value.producer()
    if node is None or node.domain != "":
        return None
    if node.op_type == "Gather" and (node.attributes.get_int("axis", 0) or 0) == 0:
        index, whole = constant_ints(node, 1), node.inputs[0]
        scalar = node.inputs[1] is not None and rank(node.inputs[1]) == 0
        return (whole, index[0]) if whole is not None and index is not None and scalar else None
    part = node.inputs[0] if node.op_type == "Squeeze" and constant_ints(node, 1) == (0,) else None
    cut = None if part is None else part.producer()
    if part is None or cut is None or dims(part)[:1] != (1,):
        return None
    begin, whole = _begin_of_cut(cut, part, axis=0), cut.inputs[0]
    return (whole, begin) if whole is not None and begin is not None else None


# -- reading the graph ---------------------------------------------------------------------------


def made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node of ONNX's own operator set that makes a value, if it is of that type."""
    node = None if value is None else value.producer()
    return node if node is not None and (node.domain, node.op_type) == ("", op_type) else None


def dims(value: ir.Value | None) -> tuple[Dim, ...]:
    """The sizes of a value; empty where the rank is not known."""
    if value is None or value.shape is None:
        return ()
    return tuple(size if isinstance(size, int) else size.value for size in value.shape)


def rank(value: ir.Value | None) -> int | None:
    """The number of axes; None where the graph does not say."""
    return None if value is None or value.shape is None else len(value.shape)


def perm(node: ir.Node) -> tuple[int, ...]:
    """How a Transpose permutes the axes; empty where it just reverses them."""
    return tuple(node.attributes.get_ints("perm", ()) or ())


def constant_ints(node: ir.Node, position: int) -> tuple[int, ...] | None:
    """An input of whole numbers, where it is a constant."""
    value = node.inputs[position] if position < len(node.inputs) else None
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tuple(int(number) for number in tensor.numpy().reshape(-1))
