"""Prove that a tensor is the causal triangle, from the nodes that compute it.

A `Triangle` is a matrix that has one value up to the diagonal and another above it, whatever its size. Nodes
that make or keep such a matrix are followed; anything else gives None, and the tensor stays an ordinary mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mha_deploy.graph.fuse.facts import array_of, dims_of, ints_of, same_dims, same_or_cut, scalar_of

_MAX_DEPTH = 24  # more than any spelling needs; bounds the walk in a hostile file


@dataclass(frozen=True, kw_only=True)
class Triangle:
    """A matrix of two values.

    Args:
        seen: Where the key is not after the query.
        hidden: Where the key is after the query.
    """

    seen: float
    hidden: float


@dataclass(frozen=True, kw_only=True)
class _Index:
    """The numbers 0, 1, 2 …, along the queries (`down`), along the keys, or as a plain list (None)."""

    down: bool | None


_Found = Triangle | _Index | None
_ELEMENTWISE: dict[str, Callable[..., float]] = {
    "Equal": lambda x, y: float(x == y),
    "Greater": lambda x, y: float(x > y),
    "GreaterOrEqual": lambda x, y: float(x >= y),
    "Less": lambda x, y: float(x < y),
    "LessOrEqual": lambda x, y: float(x <= y),
    "Not": lambda x: float(not x),
    "And": lambda x, y: float(bool(x) and bool(y)),
    "Or": lambda x, y: float(bool(x) or bool(y)),
    "Neg": lambda x: -x,
    "Add": lambda x, y: x + y,
    "Sub": lambda x, y: x - y,
    "Mul": lambda x, y: x * y,
    "Where": lambda condition, x, y: x if condition else y,
}
_COMPARISONS = frozenset({"Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
_LAYOUT = frozenset({"Identity", "Unsqueeze", "Reshape", "Squeeze", "Expand"})


def triangle_of(value: ir.Value | None) -> Triangle | None:
    """The triangle that a value certainly is in its last two axes, the others being 1; else None."""
    found = _follow(value, 0)
    return found if isinstance(found, Triangle) else None


def _follow(value: ir.Value | None, depth: int) -> _Found:
    if value is None or depth > _MAX_DEPTH:
        return None
    array = array_of(value)
    if array is not None:
        return _from_array(array)
    node = value.producer()
    if node is None or node.domain != "":
        return None
    if node.op_type == "Range":
        return _from_range(node)
    if node.op_type == "Trilu":
        return _from_trilu(node, depth)
    if node.op_type == "Cast":
        return _from_cast(node, depth)
    if node.op_type == "Slice":
        return _from_slice(node, depth)
    if node.op_type in _LAYOUT:
        return _from_layout(node, depth)
    return _from_elementwise(node, depth) if node.op_type in _ELEMENTWISE else None


def _from_array(array: np.ndarray) -> _Found:
    if array.size == 0 or (array != array).any():
        return None  # nothing, or NaN, which no comparison tells anything of
    if (array == array.ravel()[0]).all():
        number = float(array.ravel()[0])
        return Triangle(seen=number, hidden=number)
    if array.size == max(array.shape) and np.array_equal(array.ravel(), np.arange(array.size)):
        return _index_of(array.shape)
    if array.ndim < 2 or array.shape[-1] != array.shape[-2] or array.size != array.shape[-1] ** 2:
        return None
    matrix = array.reshape(array.shape[-2:])
    found = Triangle(seen=float(matrix[0, 0]), hidden=float(matrix[0, 1]))
    lower = np.tri(len(matrix), dtype=bool)
    return found if np.array_equal(matrix, np.where(lower, matrix[0, 0], matrix[0, 1])) else None


def _index_of(shape: tuple[int | ir.SymbolicDim, ...]) -> _Found:
    """Counting along the one long axis of a shape, if that is the last or the one before it."""
    if len(shape) < 2:
        return _Index(down=None)
    if shape[-1] != 1:
        return _Index(down=False)
    return _Index(down=True) if shape[-2] != 1 else None


def _from_range(node: ir.Node) -> _Found:
    start, _, step = (scalar_of(value) for value in node.inputs)
    return _Index(down=None) if start == 0 and step == 1 else None


def _from_trilu(node: ir.Node, depth: int) -> _Found:
    found = _follow(node.inputs[0], depth + 1)
    offset = 0.0 if len(node.inputs) < 2 or node.inputs[1] is None else scalar_of(node.inputs[1])
    if not isinstance(found, Triangle):
        return None
    if node.attributes.get_int("upper", 1) == 0:
        return Triangle(seen=found.seen, hidden=0.0) if offset == 0 else None
    return Triangle(seen=0.0, hidden=found.hidden) if offset == 1 else None


def _from_cast(node: ir.Node, depth: int) -> _Found:
    found = _follow(node.inputs[0], depth + 1)
    dtype = ir.DataType(node.attributes.get_int("to", 0))
    if not isinstance(found, Triangle):
        # Counting stays counting in whole numbers only: float16 cannot hold a long row.
        return found if dtype in (ir.DataType.INT32, ir.DataType.INT64) else None
    if dtype == ir.DataType.BOOL:
        return Triangle(seen=float(bool(found.seen)), hidden=float(bool(found.hidden)))
    kept = {0.0, 1.0, -np.inf} if dtype.is_floating_point() else {0.0, 1.0}
    return found if {found.seen, found.hidden} <= kept else None


def _from_slice(node: ir.Node, depth: int) -> _Found:
    """A piece that begins at the corner is a triangle as well, whatever its end."""
    found = _follow(node.inputs[0], depth + 1)
    if not isinstance(found, Triangle):
        return None
    starts = ints_of(node.inputs[1])
    steps = ints_of(node.inputs[4]) if len(node.inputs) > 4 else [1]
    corner = starts is not None and steps is not None and set(starts) <= {0} and set(steps) <= {1}
    return found if corner or found.seen == found.hidden else None


def _from_layout(node: ir.Node, depth: int) -> _Found:
    source, result = node.inputs[0], dims_of(node.outputs[0])
    found = _follow(source, depth + 1)
    before = dims_of(source) if source is not None else None
    if found is None or result is None or before is None:
        return None
    if isinstance(found, _Index):
        long = [size for size in result if size != 1]
        kept = len(long) == 1 and long == [size for size in before if size != 1]
        return _index_of(result) if kept else None
    if found.seen == found.hidden:
        return found
    # The matrix must stay the last two axes, and the axes before it must stay 1.
    same = len(before) >= 2 and len(result) >= 2 and same_dims(result[-2:], before[-2:])
    return found if same and all(size == 1 for size in result[:-2]) else None


def _from_elementwise(node: ir.Node, depth: int) -> _Found:
    parts = [_follow(value, depth + 1) for value in node.inputs]
    if any(part is None for part in parts):
        return None
    if any(isinstance(part, _Index) for part in parts):
        return _compare(node.op_type, parts)
    triangles = [part for part in parts if isinstance(part, Triangle)]
    if not all(_keeps_size(*pair, node.outputs[0]) for pair in zip(triangles, node.inputs, strict=True)):
        return None
    compute = _ELEMENTWISE[node.op_type]
    return Triangle(
        seen=compute(*(part.seen for part in triangles)), hidden=compute(*(part.hidden for part in triangles))
    )


def _keeps_size(part: Triangle, value: ir.Value | None, result: ir.Value) -> bool:
    """Whether a part has all rows and columns of the result.

    A piece of a triangle may have one row, which broadcasting copies: that is no triangle any more.
    """
    if part.seen == part.hidden:
        return True
    before, after = None if value is None else dims_of(value), dims_of(result)
    if before is None or after is None or len(before) < 2:
        return False
    return all(map(same_or_cut, before[-2:], after[-2:]))


def _compare(op_type: str, parts: list[_Found]) -> _Found:
    """Positions of keys beside positions of queries: `key <= query` and its kin."""
    if len(parts) != 2:
        return None
    if not all(isinstance(part, _Index) for part in parts):
        return _compare_with_number(op_type, parts)
    first, second = (part.down is True for part in parts if isinstance(part, _Index))
    if first == second or op_type not in _COMPARISONS:
        return None
    # Before the diagonal, on it, and after it.
    before, at, after = (_ELEMENTWISE[op_type](*((0, key) if first else (key, 0))) for key in (-1, 0, 1))
    return Triangle(seen=before, hidden=after) if before == at else None


def _compare_with_number(op_type: str, parts: list[_Found]) -> _Found:
    """`position >= 0` and its kin, which hold for all positions."""
    always = {"GreaterOrEqual": 0.0, "Greater": -1.0}
    if not isinstance(parts[0], _Index) or not isinstance(parts[1], Triangle) or op_type not in always:
        return None
    highest = max(parts[1].seen, parts[1].hidden)
    return Triangle(seen=1.0, hidden=1.0) if highest <= always[op_type] else None
