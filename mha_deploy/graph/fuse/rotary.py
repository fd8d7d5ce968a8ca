"""Recognize rotary embedding that is written out before queries and keys, and write it as one node.

There are many spellings: halves or neighbors are rotated, by Slice, Split, Gather or Reshape, with tables of
one or both halves. So each column of a head is followed through the nodes as a sum of terms. A column of
queries may be in one, times a column of a table. What the columns are in the end decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mha_deploy.graph.fuse.values import Size, array_of, same_dims, sizes_of
from mha_deploy.graph.fuse.verify import Boundary
from mha_deploy.graph.ir import (
    NodeBuilder,
    constant_ints,
    graph_of_node,
    input_at,
    input_with,
    is_op,
    made_by,
    nodes_behind,
    perm,
    rank,
    same_size,
)

_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)  # which RotaryEmbedding has
_ENDS = ("Add", "Concat", "Reshape")  # what the last node of the spellings is
_MOST_COLUMNS, _MOST_NUMBERS, _MOST_NODES, _MOST_DEPTH, _MOST_TERMS = 512, 2**24, 256, 32, 2
_ONE_HEAD, _HEADS_FIRST, _LENGTH_FIRST = 0, 1, 2  # which axis of x has the heads

Term = tuple[int, ...]
"""The columns that are multiplied with each other, by their numbers."""
Sum = frozenset[tuple[Term, int]]
"""Terms, each with how often it is added."""


@dataclass(frozen=True, kw_only=True)
class WrittenRotary:
    """A rotary embedding that is written out."""

    y: ir.Value
    x: ir.Value
    # The cosines and the sines, and which columns of them `RotaryEmbedding` takes: each angle once
    tables: tuple[tuple[ir.Value, slice], tuple[ir.Value, slice]]
    rotated: int  # how many columns are, from the first on
    interleaved: bool  # whether neighbors are a pair, not a column of each half
    heads: int  # the axis of x that has them; 0 where x is one head, `[B, S, D]`
    border: Boundary  # what is drawn to compare it with the node


class Columns:
    """The columns of values: what the numbers along the last axis are, the same for all the other axes."""

    def __init__(self) -> None:
        self._found: dict[ir.Value, np.ndarray | None] = {}
        self._numbers: dict[Hashable, int] = {}
        self._ends = set[ir.Value]()  # values that are not followed further

    def rotary_at(self, y: ir.Value) -> WrittenRotary | None:
        """The rotary embedding that ends in a value, if one does."""
        shape, node = sizes_of(y) or [], y.producer()
        if not is_op(node, *_ENDS) or len(shape) not in (3, 4) or y.dtype not in _TYPES:
            return None
        if not any(is_op(each, "Mul") for each in self._behind(y)):
            return None
        form = self.of(y)
        if form is None or form.ndim != 1:
            return None
        behind = self._behind(y)
        given = dict.fromkeys(each for node in behind for each in node.inputs if each is not None)
        factors = dict.fromkeys(
            each for node in behind if is_op(node, "Mul") for each in node.inputs if each is not None
        )
        for x in given:
            own = self._found.get(x)
            if own is None or own.shape != form.shape or not same_dims(sizes_of(x) or [], shape):
                continue
            for interleaved in (False, True):
                tables = _tables(form, own, interleaved)
                if tables is None:
                    continue
                cos, sin = (self._cut(factors, table, len(shape)) for table in tables)
                if cos is None or sin is None:
                    continue
                heads = {_heads_axis(table, shape) for table, _ in (cos, sin)}
                if len(heads) == 1 and (axis := heads.pop()) is not None:
                    return WrittenRotary(
                        y=y,
                        x=x,
                        tables=(cos, sin),
                        rotated=2 * len(tables[0]),
                        interleaved=interleaved,
                        heads=axis,
                        border=self._border(y),
                    )
        return None

    def _behind(self, y: ir.Value) -> list[ir.Node]:
        return list(itertools.islice(nodes_behind([y], self._followed), _MOST_NODES))

    def _cut(
        self, factors: Iterable[ir.Value], table: Sequence[Sum], most_axes: int
    ) -> tuple[ir.Value, slice] | None:
        """The factor that has the columns of a table, next to each other or every second, and which."""
        for value in factors:
            own = self._found.get(value)
            if own is None or own.ndim != 1 or (rank(value) or most_axes + 1) > most_axes:
                continue
            held = list(own)
            begins = [at for at, each in enumerate(held) if each == table[0]]
            for begin, step in itertools.product(begins, (1, 2)):
                if held[begin : begin + step * len(table) : step] == list(table):
                    return value, slice(begin, begin + step * len(table), step)
        return None

    def _border(self, y: ir.Value) -> Boundary:
        """Drawn is what a value is computed from, where nothing is known of its columns."""
        given = (each for node in self._behind(y) for each in self._followed(node))
        ends = [each for each in given if each is not None and each in self._ends]
        return Boundary(drawn={each: 1.0 for each in ends if array_of(each) is None}, dims={})

    def _followed(self, node: ir.Node) -> list[ir.Value | None]:
        """The inputs of a node whose columns are those of its result."""
        if node.outputs[0] in self._ends or node.domain != "" or node.op_type not in _RULES:
            return []
        return list(node.inputs) if node.op_type in _SEVERAL else list(node.inputs[:1])

    # -- Follow the columns

    def of(self, value: ir.Value | None, depth: int = 0) -> np.ndarray | None:
        """The columns of a value along its last axis, or its last two; None where their number is unknown."""
        if value is None:
            return None
        if value not in self._found:
            node = value.producer()
            rule = _RULES.get(node.op_type) if node is not None and node.domain == "" else None
            made = None
            if rule is not None and node is not None and depth < _MOST_DEPTH and array_of(value) is None:
                made = rule(self, node, value, depth + 1)
            if made is None:
                self._ends.add(value)
                made = self._new(value)
            self._found[value] = made
        return self._found[value]

    def _new(self, value: ir.Value) -> np.ndarray | None:
        """Columns of which nothing is known, but that those of a constant may be equal."""
        shape = sizes_of(value) or []
        count = 2 if len(shape) > 2 and shape[-1] == 2 else 1  # pairs, as of complex numbers
        sizes = [each for each in shape[-count:] if isinstance(each, int)]
        if not shape or len(sizes) < count or int(np.prod(sizes)) > _MOST_COLUMNS:
            return None
        keys: list[Hashable] = [(value, at) for at in range(int(np.prod(sizes)))]
        array = array_of(value)
        if array is not None and array.size <= _MOST_NUMBERS:
            columns = np.ascontiguousarray(array.reshape(-1, len(keys)).T)
            keys = [(array.shape, str(array.dtype), each.tobytes()) for each in columns]
        return _array([self.single(key) for key in keys], sizes)

    def single(self, key: Hashable) -> Sum:
        """A column that nothing else is known of than what it comes from."""
        return frozenset({((self._numbers.setdefault(key, len(self._numbers)),), 1)})

    def mapped(self, node: ir.Node, columns: np.ndarray | None, *more: Hashable) -> np.ndarray | None:
        """What an operator makes of columns that it treats alike."""
        if columns is None:
            return None
        others = tuple(_identity(each) for each in node.inputs[1:])
        attributes = sorted((name, str(each.value)) for name, each in node.attributes.items())
        key = (node.op_type, *map(tuple, attributes), others, *more)
        is_rounding = is_op(node, "Cast") and node.outputs[0].dtype in _TYPES
        made = list[Sum]()
        for each in columns.reshape(-1):
            ((term, count), *rest) = each or [((), 0)]
            if is_rounding and not rest and count == -1:  # it is the same on both sides of zero
                made.append(_negative(self.single((key, frozenset({(term, 1)})))))
            else:
                made.append(self.single((key, each)))
        return _array(made, columns.shape)


def _array(sums: Sequence[Sum], shape: Sequence[int]) -> np.ndarray:
    made = np.empty(len(sums), object)
    made[:] = sums
    return made.reshape(shape)


def _identity(value: ir.Value | None) -> Hashable:
    """What two values have in common that are certainly equal."""
    array = array_of(value)
    return value if array is None else (array.shape, str(array.dtype), array.tobytes())


def _negative(each: Sum) -> Sum:
    return frozenset((term, -count) for term, count in each)


def _added(one: Sum, other: Sum) -> Sum:
    found = dict(one)
    for term, count in other:
        found[term] = found.get(term, 0) + count
    return frozenset((term, count) for term, count in found.items() if count)


def _multiplied(one: Sum, other: Sum) -> Sum | None:
    """The product of two columns; None where it has more than a column of each."""
    if any(len(each) != 1 for each in (one, other)):
        return None
    ((term, count),), ((second, times),) = one, other
    return frozenset({(tuple(sorted((*term, *second))), count * times)})


def _tables(form: np.ndarray, x: np.ndarray, interleaved: bool) -> tuple[list[Sum], list[Sum]] | None:
    """The cosines and sines, one for each pair, where columns are those of x rotated, then those of x."""
    whole = len(form)
    rest = next((at for at in range(whole) if form[at] == x[at]), whole)
    if rest < 2 or rest % 2 or any(form[at] != x[at] for at in range(rest, whole)):
        return None
    half, cosines, sines = rest // 2, list[Sum](), list[Sum]()
    for pair in range(half):
        one, other = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        cos, sin = _factor(form[one], x[one], 1), _factor(form[one], x[other], -1)
        if cos is None or sin is None:
            return None
        parts = [(x[one], cos, 1), (x[other], sin, -1)], [(x[other], cos, 1), (x[one], sin, 1)]
        for at, terms in zip((one, other), parts, strict=True):
            total: Sum = frozenset()
            for column, factor, sign in terms:
                made = _multiplied(column, factor)
                total = total if made is None else _added(total, made if sign > 0 else _negative(made))
            if total != form[at]:
                return None
        cosines.append(cos)
        sines.append(sin)
    return cosines, sines


def _factor(each: Sum, column: Sum, sign: int) -> Sum | None:
    """What a column is multiplied with in a sum of two terms."""
    if len(each) != _MOST_TERMS or len(column) != 1:
        return None
    ((own, count),) = column
    for term, times in each:
        if count == 1 and len(own) == 1 and len(term) == 2 and own[0] in term and times == sign:
            return frozenset({((term[1 - term.index(own[0])],), 1)})
    return None


def _heads_axis(table: ir.Value, shape: Sequence[Size]) -> int | None:
    """The axis of x along which a table is the same, which has the heads; None where there is none."""
    sizes = sizes_of(table) or []
    sizes = [*[1] * (len(shape) - len(sizes)), *sizes]
    if sizes[0] != 1 and not same_size(sizes[0], shape[0]):
        return None
    if len(shape) == 3:
        return _ONE_HEAD if same_size(sizes[1], shape[1]) else None
    for heads, length in ((_HEADS_FIRST, _LENGTH_FIRST), (_LENGTH_FIRST, _HEADS_FIRST)):
        if sizes[heads] == 1 and same_size(sizes[length], shape[length]) and isinstance(shape[heads], int):
            return heads
    return None


# -- What each operator makes of the columns; None where nothing is known of them ----------------------

_Rule = Callable[[Columns, ir.Node, ir.Value, int], np.ndarray | None]


def _axes_inside(columns: np.ndarray, axes: Iterable[int], axes_of: int) -> list[int] | None:
    """Axes, counted from the last, that all are among those of the columns; empty where none is."""
    from_last = [axis if axis < 0 else axis - axes_of for axis in axes]
    inside = [axis for axis in from_last if axis >= -columns.ndim]
    return inside if len(inside) in (0, len(from_last)) else None


def _unchanged(self: Columns, node: ir.Node, value: ir.Value, depth: int) -> np.ndarray | None:
    return self.of(node.inputs[0], depth)


def _each(self: Columns, node: ir.Node, value: ir.Value, depth: int) -> np.ndarray | None:
    return self.mapped(node, self.of(node.inputs[0], depth))


def _negated(self: Columns, node: ir.Node, value: ir.Value, depth: int) -> np.ndarray | None:
    columns = self.of(node.inputs[0], depth)
    return None if columns is None else _array(list(map(_negative, columns.reshape(-1))), columns.shape)


def _combined(self: Columns, node: ir.Node, value: ir.Value, depth: int) -> np.ndarray | None:
    """Add, Sub and Mul; with one number, columns that are equal stay so."""
    arrays = [array_of(each) for each in node.inputs]
    for at, array in enumerate(arrays):
        if array is not None and array.size == 1 and array.ndim <= (rank(node.inputs[1 - at]) or 0):
            columns = self.of(node.inputs[1 - at], depth)
            return self.mapped(node, columns, at, _identity(node.inputs[at]))
    first, second = (self.of(each, depth) for each in node.inputs)
    if first is None or second is None or first.shape != second.shape:
        return None
    made = list[Sum]()
    for one, other in zip(first.reshape(-1), second.reshape(-1), strict=True):
        if node.op_type == "Mul":
            found = _multiplied(one, other)
        else:
            found = _added(one, other if node.op_type == "Add" else _negative(other))
        if found is None or len(found) > _MOST_TERMS:
            return None
        made.append(found)
    return _array(made, first.shape)


def _joined(self: Columns, node: ir.Node, value: ir.Value, depth: int) -> np.ndarray | None:
    parts = [found for each in node.inputs if (found := self.of(each, depth)) is not None]
    if len(parts) < len(node.inputs) or len({each.ndim for each in parts}) != 1:
        return None
    axes = _axes_inside(parts[0], [node.attributes.get_int("axis", 0)], rank(value) or 0)
    others = {each.shape[:-1] if axes == [-1] else each.shape[1:] for each in parts}
    return np.concatenate(parts, axis=axes[0]) if axes and len(others) == 1 else None


def _split(self: Columns, node: ir.Node, value: ir.Value, depth: int) -> np.ndarray | None:
    columns, axis = self.of(node.inputs[0], depth), node.attributes.get_int("axis", 0)
    if columns is None:
        return None
    axes = _axes_inside(columns, [axis], rank(value) or 0)
    if not axes:
        return self.mapped(node, columns, node.outputs.index(value))
    sizes = [(sizes_of(each) or [None])[axes[0]] for each in node.outputs]
    counts = [each for each in sizes if isinstance(each, int)]
    if len(counts) < len(sizes) or sum(counts) != columns.shape[axes[0]]:
        return None
    at = node.outputs.index(value)
    return np.take(columns, range(sum(counts[:at]), sum(counts[: at + 1])), axes[0])


def _sliced(self: Columns, node: ir.Node, value: ir.Value, depth: int) -> np.ndarray | None:
    columns, axes_of = self.of(node.inputs[0], depth), rank(value) or 0
    begins, ends, axes, steps = (constant_ints(node, at) for at in range(1, 5))
    if columns is None or axes is None:
        return None
    inside = _axes_inside(columns, axes, axes_of)
    if inside is None or not inside:
        return None if inside is None else self.mapped(node, columns)
    if begins is None or ends is None or (steps is None and input_at(node, 4) is not None):
        return None
    slices = [slice(None)] * columns.ndim
    for axis, begin, end, step in zip(inside, begins, ends, steps or [1] * len(inside), strict=True):
        if step < 1:
            return None
        slices[axis] = slice(begin, end, step)
    return columns[tuple(slices)]


def _gathered(self: Columns, node: ir.Node, value: ir.Value, depth: int) -> np.ndarray | None:
    columns, data = self.of(node.inputs[0], depth), rank(node.inputs[0]) or 0
    if columns is None:
        return None
    axes, index = _axes_inside(columns, [node.attributes.get_int("axis", 0)], data), array_of(node.inputs[1])
    if not axes:
        return self.mapped(node, columns)
    if index is None or index.ndim > 1 or index.ndim + columns.ndim < 2:
        return None
    return np.take(columns, index, axes[0]) if np.all(np.abs(index) < columns.shape[axes[0]]) else None


def _with_axes(self: Columns, node: ir.Node, value: ir.Value, depth: int) -> np.ndarray | None:
    """Squeeze and Unsqueeze."""
    columns, axes = self.of(node.inputs[0], depth), constant_ints(node, 1)
    if columns is None or axes is None:
        return None
    before, after = rank(node.inputs[0]) or 0, rank(value) or 0
    inside = _axes_inside(columns, axes, max(before, after))
    if not inside:
        return None if inside is None else self.mapped(node, columns)
    if is_op(node, "Squeeze"):
        return np.squeeze(columns, tuple(inside)) if len(inside) < columns.ndim else None
    return np.expand_dims(columns, inside[0]) if len(inside) == 1 else None


def _reshaped(self: Columns, node: ir.Node, value: ir.Value, depth: int) -> np.ndarray | None:
    """The same columns as pairs or one behind the other, or with other axes before them."""
    columns = self.of(node.inputs[0], depth)
    before, after = sizes_of(node.inputs[0]) or [], sizes_of(value) or []
    if columns is None or not after:
        return None
    count = columns.ndim + len(after) - len(before)
    inner = after[len(after) - count :] if 0 < count <= len(after) else []
    sizes = [each for each in inner if isinstance(each, int)]
    whole = bool(sizes) and len(sizes) == count and int(np.prod(sizes)) == columns.size
    # A reshape keeps the number of elements: where all sizes but one are equal, so is that one.
    outer = list(map(same_size, before[: -columns.ndim], after[: len(after) - count]))
    is_view = columns.ndim > 1 or count == 1 or (len(before) == 4 and 2 in sizes)
    if whole and is_view and outer.count(False) < 2 and count < 3:
        return columns.reshape(sizes)
    same = after[-columns.ndim :] == list(columns.shape) and len(after) > columns.ndim
    return self.mapped(node, columns) if same else None


def _expanded(self: Columns, node: ir.Node, value: ir.Value, depth: int) -> np.ndarray | None:
    """Columns are copied to several, and so are the other axes."""
    columns, before, after = self.of(node.inputs[0], depth), sizes_of(node.inputs[0]), sizes_of(value)
    if columns is None or before is None or after is None:
        return None
    sizes = [each for each in after[-columns.ndim :] if isinstance(each, int)]
    if len(sizes) < columns.ndim:
        return None
    wide = np.array(np.broadcast_to(columns, sizes))
    return wide if same_dims(before[: -columns.ndim], after[: -columns.ndim]) else self.mapped(node, wide)


def _transposed(self: Columns, node: ir.Node, value: ir.Value, depth: int) -> np.ndarray | None:
    columns, order = self.of(node.inputs[0], depth), perm(node)
    kept = columns is not None and order[-columns.ndim :] == tuple(range(len(order)))[-columns.ndim :]
    return self.mapped(node, columns) if kept else None


_SEVERAL = ("Add", "Sub", "Mul", "Concat")
_RULES: dict[str, _Rule] = {
    "Identity": _unchanged,
    **dict.fromkeys(("Cast", "Cos", "Sin"), _each),
    "Neg": _negated,
    **dict.fromkeys(("Add", "Sub", "Mul"), _combined),
    "Concat": _joined,
    "Split": _split,
    "Slice": _sliced,
    "Gather": _gathered,
    **dict.fromkeys(("Squeeze", "Unsqueeze"), _with_axes),
    "Reshape": _reshaped,
    "Expand": _expanded,
    "Transpose": _transposed,
}


# -- Write the node --------------------------------------------------------------------------------

Tables = dict[tuple[Hashable, ...], ir.Value]
"""The tables that were written, and the batch sizes for them: the layers of a model share both."""


def write_rotary(found: WrittenRotary, builder: NodeBuilder, tables: Tables) -> tuple[ir.Value, Tables]:
    """Build the `RotaryEmbedding` beside the graph: what it gives, and the tables, those given included."""
    x, shape, graph, tables = found.x, sizes_of(found.x) or [], _graph_of(found.y), dict(tables)
    inputs = list[ir.Value]()
    for table, columns in found.tables:
        key = (id(graph), table, columns.start, columns.stop, columns.step, found.heads, shape[0])
        if key not in tables:
            tables[key] = _table(found, table, columns, builder, tables)
        inputs.append(tables[key])
    heads, size = 1 if found.heads == _ONE_HEAD else int(shape[found.heads] or 0), int(shape[-1] or 0)
    apart = found.heads == _LENGTH_FIRST
    merged: list[Size] = [*shape[:2], heads * size]
    if apart:
        before = input_at(made_by(x, "Reshape"), 0)
        is_view = before is not None and same_dims(sizes_of(before) or [], merged)
        x = before if is_view and before is not None else builder.reshape(x, 0, 0, heads * size)
    attributes = {
        "interleaved": 1 if found.interleaved else None,
        "rotary_embedding_dim": found.rotated if found.rotated != size else None,
        "num_heads": None if found.heads == _HEADS_FIRST else heads,
    }
    y = builder.node("RotaryEmbedding", [x, *inputs], name=builder.prefix, attributes=attributes)[0]
    if apart:
        y = builder.reshape(_typed(y, found.y, merged), 0, 0, heads, size)
    return y, tables


def _table(
    found: WrittenRotary, table: ir.Value, columns: slice, builder: NodeBuilder, tables: Tables
) -> ir.Value:
    """A table as `[B, S, R/2]`: each angle once, without an axis for the heads, for all batch elements."""
    made, shape, whole = table, sizes_of(table) or [], sizes_of(found.x) or []
    heads = found.heads - len(whole) + len(shape)
    if found.heads != _ONE_HEAD and heads > 0:  # a first axis of size 1 is as good for the batch
        unsqueeze, shape = made_by(table, "Unsqueeze"), [*shape[:heads], *shape[heads + 1 :]]
        before = input_at(unsqueeze, 0)
        axes = None if unsqueeze is None else constant_ints(unsqueeze, 1)
        if before is not None and axes in ((heads,), (heads - len(shape) - 1,)):
            made = before
        else:
            made = _typed(builder.op("Squeeze", table, builder.ints(heads)), table, shape)
    count = len(range(columns.start, columns.stop, columns.step))
    if shape[-1] != count:
        numbers = (columns.start, columns.stop, -1, columns.step)
        made = builder.op("Slice", made, *(builder.ints(each) for each in numbers), name="table")
        shape = [*shape[:-1], count]
        _typed(made, table, shape)
    if len(shape) == 2:
        shape = [1, *shape]
        made = _typed(builder.unsqueeze(made, 0), table, shape)
    if shape[0] == 1 and whole[0] != 1:
        made = builder.expand(made, _batch_size(found, builder, tables), 1, 1, name="table")
        _typed(made, table, [whole[0], *shape[1:]])
    return made


def _typed(value: ir.Value, like: ir.Value, sizes: Iterable[Size]) -> ir.Value:
    value.type, value.shape = like.type, ir.Shape(list(sizes))
    return value


def _graph_of(value: ir.Value) -> ir.Graph | ir.Function:
    node = value.producer()
    if node is None:
        raise ValueError(f"{value.name} is not computed.")
    return graph_of_node(node)


def _batch_size(found: WrittenRotary, builder: NodeBuilder, tables: Tables) -> int | ir.Value:
    """The batch from an input of the graph that has it by name, else from x; read once for all tables."""
    batch, graph = (sizes_of(found.x) or [None])[0], _graph_of(found.y)
    if isinstance(batch, int):
        return batch
    key = (id(graph), batch or found.x)
    if key not in tables:
        value, axis = input_with(graph, batch) or (found.x, 0)
        tables[key] = builder.as_tensor(builder.size(value, axis))
    return tables[key]
