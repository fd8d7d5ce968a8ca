"""Recognize masks (padding, fills, triangles, fully masked queries), decide what they become, write them."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from mha_deploy.graph.fuse.values import (
    NotExpressible,
    NotFused,
    Size,
    adds_leading_ones,
    array_of,
    equation_of,
    holds,
    product,
    same_dims,
    same_or_sliced,
    scalar_of,
    sizes_of,
    walk,
)
from mha_deploy.graph.ir import NodeBuilder, constant_ints, input_at, is_op, made_by, same_size
from mha_deploy.graph.roles import IN_ORDER, MOVES, RANDOM
from mha_deploy.model.masking import (
    ABSORBS_ANY,
    ABSORBS_FLOAT32,
    MODEL_NUMBER,
    WRITTEN_HALF,
    absorbs,
    model_number,
)

Axes = tuple[str, ...]
"""The axes of a tensor: each a letter as in an einsum, or several where a Reshape joined them."""


@dataclass(frozen=True, kw_only=True)
class Multiplier:
    """A tensor that the scores are multiplied with, the same for all keys, or for all queries."""

    value: ir.Value  # the tensor
    axes: Axes  # the axes of the scores there; the tensor is aligned to the last of them
    divides: bool  # whether the scores are divided by it
    of_keys: bool = False  # whether it has a number for each key

    def bounds(self) -> tuple[float, float] | None:
        """The smallest and the largest number that it multiplies with, where it is certainly positive."""
        array = array_of(self.value)
        if array is None:
            return (1.0, 1.0) if _is_positive(self.value) else None
        low, high = float(array.min(initial=math.inf)), float(array.max(initial=0.0))
        if not 0.0 < low <= high < math.inf:
            return None
        return (1.0 / high, 1.0 / low) if self.divides else (low, high)


@walk
def _is_positive(value: ir.Value, depth: int) -> bool:
    """Whether all numbers of a tensor are certainly positive."""
    array, node = array_of(value), value.producer()
    if array is not None:
        return bool((array > 0).all())
    if node is None or node.domain != "":
        return False
    if node.op_type in ("Exp", "Softplus", "Sigmoid"):
        return True
    if node.op_type in ("Max", "Clip"):
        return any(_is_positive(each, depth + 1) for each in node.inputs[:2])
    if node.op_type in ("Mul", "Div", "Add", "Sqrt", "Reciprocal"):
        return all(_is_positive(each, depth + 1) for each in node.inputs)
    if node.op_type in (*_LAYOUT, "Cast", "Transpose", "Slice", "Gather"):
        return bool(_is_positive(node.inputs[0], depth + 1))
    return False


@walk
def is_not_negative(value: ir.Value, depth: int) -> bool:
    """Whether certainly no number of a tensor is negative."""
    array, node = array_of(value), value.producer()
    if array is not None:
        return bool((array >= 0).all())
    if node is None or node.domain != "":
        return False
    if node.op_type in ("Relu", "Abs", "Softmax", "Sqrt", "HardSigmoid", "ReduceL1", "ReduceL2") or (
        node.op_type == "Mul" and node.inputs[0] is node.inputs[1]
    ):
        return True
    if node.op_type in ("Max", "Clip"):
        return any(is_not_negative(each, depth + 1) for each in node.inputs[:2])
    if node.op_type == "Cast" and node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.BOOL:
        return True
    if node.op_type in ("Mul", "Add", "ReduceSum", "ReduceMean"):
        given = node.inputs if node.op_type in ("Mul", "Add") else node.inputs[:1]
        return all(is_not_negative(each, depth + 1) for each in given)
    if node.op_type in (*_LAYOUT, "Cast", "Transpose", "Slice", "Gather"):
        return bool(is_not_negative(node.inputs[0], depth + 1))
    return bool(_is_positive(value))


_LARGE_FACTOR = 1e-8  # of a type's lowest number: what is nearer to 0 stays finite, times any usual factor


@dataclass(frozen=True, kw_only=True)
class Fill:
    """Scores that are set to one number."""

    value: ir.Value  # a boolean tensor
    shown: bool  # the value of the condition where the score stays
    fill: float  # the number elsewhere
    axes: Axes  # the axes of the scores there; the condition is aligned to the last of them
    # whether it was added to the score, which it is far larger than, and not put in its place
    added: bool = False
    times: tuple[Multiplier, ...] = ()  # what the number was multiplied with
    # the model's number, where an earlier `fuse` wrote this one in its place
    own: float | None = field(default=None, compare=False)

    @property
    def nearest(self) -> float:
        """The number with the smallest factors that are known."""
        bounds = (each.bounds() for each in self.times)
        return self.fill * math.prod(each[0] for each in bounds if each is not None)

    @property
    def hides(self) -> bool:
        """Whether the key has no weight at all, whatever the others are."""
        return self.fill == -math.inf

    @property
    def is_put(self) -> bool:
        """Whether masked scores are set to a finite number."""
        return not self.hides and not self.added

    def may_overflow(self, dtype: ir.DataType | None) -> bool:
        """Whether a factor that only a run knows could make it infinite."""
        lowest = -math.inf if dtype is None else float(dtype.min)
        return bool(self.times) and not self.hides and self.fill <= _LARGE_FACTOR * lowest

    def number(self, builder: NodeBuilder, dtype: ir.DataType, fill: float) -> ir.Value:
        """The number, or another in its place, as a tensor."""
        number = builder.constant(fill, dtype)
        own = self.fill if self.own is None or self.hides else self.own
        if fill != own and (node := number.producer()) is not None:
            node.metadata_props.setdefault(MODEL_NUMBER, repr(own))
        return multiplied(number, self.times, builder)

    def keys(self, builder: NodeBuilder, *, shown: bool = True) -> ir.Value:
        """True for the keys that it shows, or for those that it hides."""
        if self.shown == shown:
            return self.value
        inner = input_at(made_by(self.value, "Not"), 0)
        return builder.op("Not", self.value, name="visible") if inner is None else inner

    def applied(self, scores: ir.Value, number: ir.Value, builder: NodeBuilder) -> ir.Value:
        """The scores with a number in the place of those that it hides."""
        pair = (scores, number) if self.shown else (number, scores)
        return builder.op("Where", self.value, *pair, name="mask")


@dataclass(frozen=True, kw_only=True)
class Bias:
    """A tensor that is added to the scores, times a constant."""

    value: ir.Value  # the tensor
    factor: float  # the constant
    axes: Axes  # the axes of the scores there; the tensor is aligned to the last of them
    clipped: bool = False  # whether the lowest number of its type stands for all below it, -inf too
    times: tuple[Multiplier, ...] = ()  # what it was multiplied with

    def scaled(self, builder: NodeBuilder, dtype: ir.DataType) -> ir.Value:
        """What it adds to the scores."""
        value = self.value
        if self.factor != 1.0:
            value = builder.op("Mul", value, builder.constant(self.factor, value.dtype or dtype), name="bias")
        if self.value.dtype != dtype:
            value = builder.op("Cast", value, to=int(dtype), name="bias")
        if not self.clipped:
            return value
        return builder.op("Max", value, _of_no_model(float(dtype.min), builder, dtype))


Term = Fill | Bias


def settled(terms: list[Term], dtype: ir.DataType | None) -> list[Term]:
    """The same masks, without the positive factors of their numbers where these decide nothing.

    A number that is far below any score stays so. Only beside another finite one, in the keys of a fully
    masked query, it matters how large it is. Below all of the type of the scores, it is -inf.
    """
    lowest = -math.inf if dtype is None else float(dtype.min)
    fills = [each for each in terms if isinstance(each, Fill) and not each.hides]
    alone = len(fills) == sum(isinstance(each, Bias) or not each.hides for each in terms)
    alike = alone and all(each.times == fills[0].times for each in fills)

    def simple(term: Term) -> Term:
        if isinstance(term, Bias) or not term.times or any(each.bounds() is None for each in term.times):
            return term
        fill = -math.inf if term.nearest < lowest else term.nearest
        return replace(term, fill=fill, times=()) if alike or term.hides else term

    return [simple(each) for each in terms]


def multiplied(value: ir.Value, factors: Iterable[Multiplier], builder: NodeBuilder) -> ir.Value:
    """A tensor times factors that are aligned to it."""
    for each in factors:
        kind = value.dtype or ir.DataType.FLOAT
        value = builder.op(
            "Div" if each.divides else "Mul", value, builder.cast(each.value, kind), name="bias"
        )
        value.dtype = kind
    return value


# -- Prove that a tensor is the causal triangle, from the nodes that compute it --------------------


class Triangle(NamedTuple):
    """A matrix of two values: where the key is not after the query, and where it is."""

    visible: float
    hidden: float


class _Index(NamedTuple):
    """The numbers 0, 1, 2 …, along the queries (`down`), along the keys, or as a plain list (None)."""

    down: bool | None


_Found = Triangle | _Index | None
_COMPARISONS: dict[str, Callable[..., float]] = {"Greater": operator.gt, "GreaterOrEqual": operator.ge}
_COMPARISONS |= {"Less": operator.lt, "LessOrEqual": operator.le}
_ELEMENTWISE = _COMPARISONS | {"Add": operator.add, "Sub": operator.sub, "Mul": operator.mul}
_ELEMENTWISE |= {"Neg": operator.neg, "Not": operator.not_, "Equal": operator.eq}
_ELEMENTWISE |= {"And": lambda x, y: bool(x and y), "Or": lambda x, y: bool(x or y)}
_ELEMENTWISE |= {"Where": lambda condition, x, y: x if condition else y}
_LAYOUT = frozenset({*IN_ORDER, "Expand"})


def triangle_of(value: ir.Value | None) -> Triangle | None:
    """The triangle that a value certainly is in its last two axes, the others being 1; else None."""
    found = _follow(value)
    return found if isinstance(found, Triangle) else None


@walk
def _follow(value: ir.Value, depth: int) -> _Found:
    array = array_of(value)
    if array is not None:
        return _from_array(array)
    node = value.producer()
    if node is None or node.domain != "":
        return None
    if node.op_type == "ConstantOfShape":
        fill = node.attributes.get("value")
        return _from_array(np.zeros(1) if fill is None else fill.as_tensor().numpy())
    if node.op_type == "Range":
        start, _, step = (scalar_of(each) for each in node.inputs)
        return _Index(down=None) if start == 0 and step == 1 else None
    if node.op_type in _ELEMENTWISE:
        return _from_elementwise(node, [_follow(each, depth + 1) for each in node.inputs])
    if node.op_type not in (*_LAYOUT, "Cast", "Slice", "Trilu"):
        return None
    found = _follow(node.inputs[0], depth + 1)
    if found is None or node.op_type in _LAYOUT:
        return _laid_out(found, sizes_of(node.inputs[0]), sizes_of(value))
    to = ir.DataType(node.attributes.get_int("to", 0))
    if isinstance(found, _Index):
        # Counting stays counting in whole numbers only: float16 cannot hold a long row.
        return found if to in (ir.DataType.INT32, ir.DataType.INT64) else None
    if node.op_type == "Trilu":
        offset = 0.0 if input_at(node, 1) is None else scalar_of(node.inputs[1])
        upper = node.attributes.get_int("upper", 1)
        kept = found._replace(visible=0.0) if upper else found._replace(hidden=0.0)
        return kept if offset == upper else None
    if node.op_type == "Slice":  # a piece that begins at the corner is a triangle as well, whatever its end
        steps = constant_ints(node, 4) if len(node.inputs) > 4 else (1,)
        corner = steps is not None and set(steps) <= {1} and _is_zero(node.inputs[1])
        return found if corner or found.visible == found.hidden else None
    if to == ir.DataType.BOOL:
        return Triangle(float(bool(found.visible)), float(bool(found.hidden)))
    return found if set(found) <= ({0.0, 1.0, -np.inf} if to.is_floating_point() else {0.0, 1.0}) else None


@walk
def _is_zero(value: ir.Value, depth: int) -> bool:
    """Whether a tensor certainly is 0: a constant, or the difference of a number and itself."""
    array, node = array_of(value), value.producer()
    if array is not None:
        return not array.any()
    if is_op(node, "Sub") and node is not None:
        return same_value(node.inputs[0], node.inputs[1])
    return is_op(node, *_LAYOUT, "Cast") and node is not None and bool(_is_zero(node.inputs[0], depth + 1))


def _from_array(array: np.ndarray) -> _Found:
    if array.size == 0 or (array != array).any():
        return None  # nothing, or NaN, which no comparison tells anything of
    if (array == array.ravel()[0]).all():
        return Triangle(float(array.ravel()[0]), float(array.ravel()[0]))
    if array.size == max(array.shape) and np.array_equal(array.ravel(), np.arange(array.size)):
        return _index_of(array.shape)
    if array.ndim < 2 or array.shape[-1] != array.shape[-2] or array.size != array.shape[-1] ** 2:
        return None
    matrix = array.reshape(array.shape[-2:])
    found = np.where(np.tri(len(matrix), dtype=bool), matrix[0, 0], matrix[0, 1])
    return Triangle(float(matrix[0, 0]), float(matrix[0, 1])) if np.array_equal(matrix, found) else None


def _index_of(shape: Sequence[Size]) -> _Found:
    """Counting along the one long axis of a shape, if that is the last or the one before it."""
    if len(shape) < 2:
        return _Index(down=None)
    if shape[-1] != 1:
        return _Index(down=False)
    return _Index(down=True) if shape[-2] != 1 else None


def _laid_out(found: _Found, before: list[Size] | None, after: list[Size] | None) -> _Found:
    if found is None or after is None or before is None:
        return None
    if isinstance(found, _Index):
        long = [size for size in after if size != 1]
        kept = len(long) == 1 and long == [size for size in before if size != 1]
        return _index_of(after) if kept else None
    # The matrix must stay the last two axes, and the axes before it must stay 1.
    same = len(before) >= 2 and len(after) >= 2 and same_dims(after[-2:], before[-2:])
    alone = same and all(size == 1 for size in after[:-2])
    return found if alone or found.visible == found.hidden else None


def _from_elementwise(node: ir.Node, parts: list[_Found]) -> _Found:
    compute, triangles = _ELEMENTWISE[node.op_type], [each for each in parts if isinstance(each, Triangle)]
    if len(triangles) == len(parts):
        after = sizes_of(node.outputs[0])
        for part, value in zip(triangles, node.inputs, strict=True):
            before = sizes_of(value) or ()
            # A piece of a triangle may have one row, which broadcasting copies: it is no triangle any more.
            whole = after and len(before) >= 2 and all(map(same_or_sliced, before[-2:], after[-2:]))
            if part.visible != part.hidden and not whole:
                return None
        return Triangle(*(float(compute(*numbers)) for numbers in zip(*triangles, strict=True)))
    # Positions of keys beside positions of queries: `key <= query` and its kin.
    first, second = parts if len(parts) == 2 else (None, None)
    if not isinstance(first, _Index) or second is None:
        return None
    if isinstance(second, Triangle):  # `position >= 0` holds for all positions
        highest = {"GreaterOrEqual": 0.0, "Greater": -1.0}.get(node.op_type, math.nan)
        return Triangle(1.0, 1.0) if max(second) <= highest else None
    if (first.down is True) == (second.down is True) or node.op_type not in _COMPARISONS:
        return None
    # Before the diagonal, on it, and after it.
    past, same, future = (compute(*((0, key) if first.down else (key, 0))) for key in (-1, 0, 1))
    return Triangle(past, future) if past == same else None


_MAX_ALIKE = 8  # nodes that are compared one behind the other
_LARGE = 2**16  # numbers of a constant that are compared


def same_value(one: ir.Value | None, other: ir.Value | None, depth: int = 0) -> bool:
    """Whether two values are certainly equal: the same one, or computed in the same way from the same."""
    if one is other:
        return True
    if one is None or other is None or depth > _MAX_ALIKE or one.dtype != other.dtype:
        return False
    left, right = array_of(one), array_of(other)
    if left is not None and right is not None:
        return left.size <= _LARGE and np.array_equal(left, right)
    first, second = one.producer(), other.producer()
    if first is None or second is None or first.domain != "" or first.op_type in RANDOM:
        return False
    if (first.op_type, first.domain, one.index()) != (second.op_type, second.domain, other.index()):
        return False
    if len(first.inputs) != len(second.inputs) or set(first.attributes) != set(second.attributes):
        return False
    plain = (ir.AttributeType.INT, ir.AttributeType.INTS, ir.AttributeType.FLOAT, ir.AttributeType.STRING)
    for name, attribute in first.attributes.items():
        if attribute.type not in plain or attribute.value != second.attributes[name].value:
            return False
    pairs = zip(first.inputs, second.inputs, strict=True)
    return all(same_value(*pair, depth + 1) for pair in pairs)


# -- Take a boolean mask apart: the conditions that all must hold, without those that always do ----

_MAX_PARTS = 64  # more than any model needs; bounds the walk in a hostile file


def _conditions_of(condition: ir.Value, shown: bool) -> list[tuple[ir.Value, bool]]:
    """The conditions that together show a key, each with the value that shows it.

    Those that always hold are left out. A copy over more rows (Expand) is taken before copying: a mask is
    broadcast anyway.
    """
    found, pending = list[tuple[ir.Value, bool]](), [(condition, shown)]
    seen = set[tuple[ir.Value, bool]]()
    while pending and len(found) + len(pending) < _MAX_PARTS:
        value, shown = pending.pop()
        if (value, shown) in seen:
            continue
        seen.add((value, shown))
        node = value.producer()
        inputs = [] if node is None else list(filter(None, node.inputs))
        if is_op(node, "Not"):
            shown = not shown
        elif node is not None and (is_op(node, "Identity", "Expand") or adds_leading_ones(node)):
            inputs = inputs[:1]
        elif not is_op(node, "And" if shown else "Or"):
            inputs = []
        pending.extend((each, shown) for each in reversed(inputs))
        if not inputs:
            constant = triangle_of(value)
            if constant is None or {bool(each) for each in constant} != {shown}:
                found.append((value, shown))
    return found + pending


# -- Read the masks of an attention as plainly as they can be expressed, without changing a number ------

_MAX_RESHAPES, _MAX_SUMS = 4, 6


def _plain_terms(terms: list[Term], dtype: ir.DataType) -> list[Term]:
    """The same masks in their simplest pieces, the one nearest to the softmax first."""
    pieces = [piece for term in terms for piece in _taken_apart(term, dtype)]
    added = [piece for piece in pieces if isinstance(piece, Fill) and piece.added and not piece.hides]
    # Two of them make -inf where both hide a key, and what is added later might be another.
    if added and (len(added) > 1 or pieces[0] is not added[0]):
        pieces = list(terms)
    found = list[Term]()
    for term in pieces:
        parts = _conditions_of(term.value, term.shown) if isinstance(term, Fill) else []
        split = isinstance(term, Fill) and term.hides and any(triangle_of(value) for value, _ in parts)
        if isinstance(term, Bias) or (len(parts) > 1 and not split):  # more nodes, and nothing gained
            found.append(term)
        else:
            found += [replace(term, value=value, shown=shown) for value, shown in parts]
    return found


def _taken_apart(term: Term, dtype: ir.DataType, sums: int = 0) -> list[Term]:
    """An added mask, inside so many sums, as what it hides and what it adds to the rest."""
    if isinstance(term, Fill) or term.clipped or any(each.bounds() is None for each in term.times):
        return [term]
    if scalar_of(term.value) == 0.0:
        return []
    node = term.value.producer()
    if node is None:
        return [term]
    # A mask before it was copied or given more axes: broadcasting does the same.
    spread = is_op(node, "Identity", "Expand") or adds_leading_ones(node)
    first = node.inputs[0] if spread else _before_reshapes(term.value)
    if first is not None:
        return _taken_apart(replace(term, value=first), dtype, sums)
    if is_op(node, "Where") and term.factor > 0:
        return _from_where(term, node, dtype, sums)
    if (choice := _choice(term.value)) is not None and term.factor > 0:
        for shown, (kept, other) in ((True, choice[1:]), (False, choice[:0:-1])):
            fill = other * term.factor
            if kept == 0.0 and math.isfinite(other) and _absorbs(fill, term, dtype):
                return [Fill(value=choice[0], shown=shown, fill=fill, axes=term.axes, added=True)]
    if is_op(node, "Add") and sums < _MAX_SUMS:
        sides = [replace(term, value=each) for each in node.inputs if each is not None]
        parts = [part for side in reversed(sides) for part in _taken_apart(side, dtype, sums + 1)]
        return parts if len(parts) < 2 or any(isinstance(part, Fill) for part in parts) else [term]
    return [term]


@walk
def _choice(value: ir.Value, depth: int) -> tuple[ir.Value, float, float] | None:
    """A condition, and the numbers of a tensor where it is true and where not, as in `(1 - m) * x`."""
    node = value.producer()
    if node is None or value.dtype is None:
        return None
    if not is_op(node, "Cast", "Add", "Sub", "Mul") or not value.dtype.is_floating_point():
        return None
    if is_op(node, "Cast"):
        source = node.inputs[0]
        if source is not None and source.dtype == ir.DataType.BOOL:
            return source, 1.0, 0.0
        kept = source is not None and holds(value.dtype, source.dtype)
        return _choice(source, depth + 1) if kept else None
    for at in (0, 1):
        found, number = _choice(node.inputs[at], depth + 1), scalar_of(node.inputs[1 - at])
        if found is None or number is None or len(sizes_of(node.inputs[1 - at] or value) or ()) > 1:
            continue
        kind, compute = value.dtype.numpy().type, _ELEMENTWISE[node.op_type]
        sides = ((each, number) if at == 0 else (number, each) for each in found[1:])
        with np.errstate(all="ignore"):
            true, false = (float(compute(*(kind(each) for each in pair))) for pair in sides)
        return found[0], true, false
    return None


def _before_reshapes(value: ir.Value) -> ir.Value | None:
    """What a chain of reshapes started from, where it ends in the shape that it started with."""
    shape, source = sizes_of(value), input_at(made_by(value, "Reshape"), 0)
    for _ in range(_MAX_RESHAPES):
        if source is None or shape is None or same_dims(sizes_of(source) or (), shape):
            return source
        source = input_at(made_by(source, "Reshape"), 0)
    return None


def _from_where(term: Bias, node: ir.Node, dtype: ir.DataType, sums: int) -> list[Term]:
    condition, first, second = node.inputs
    if condition is None or first is None or second is None:
        return [term]
    for shown, kept, other in ((True, first, second), (False, second, first)):
        number = scalar_of(other)
        fill = None if number is None else number * term.factor
        if fill is None or not _absorbs(fill, term, dtype) or scalar_of(kept) == number:
            continue
        rest = _taken_apart(replace(term, value=kept), dtype, sums)
        # What -inf hides may be anything, NaN too: it must stay hidden by this very Where.
        if rest and fill == -math.inf:
            return [term]
        maker = made_by(other, "Constant")
        own = None if maker is None else model_number(maker.metadata_props)
        return [Fill(value=condition, shown=shown, fill=fill, axes=term.axes, added=True, own=own), *rest]
    return [term]


def _absorbs(number: float, term: Bias, dtype: ir.DataType) -> bool:
    """Whether a number leaves nothing of a score that it is added to, in the type of the sum."""
    return absorbs(number, in_half=dtype == (term.value.dtype or dtype) == ir.DataType.FLOAT16)


# -- Decide what the masks of an attention become --------------------------------------------------

# A weaker fill could be above the score of a key that is not masked.
WEAKEST_FILL = -1e5
_FAR_BELOW = 100.0  # the weight of a score that far below another is 0
_LARGEST_BIAS = 1e4
_BOUNDED = (*MOVES, "Cast", "Expand", "Slice", "Gather")

FULLY_MASKED = "fully masked queries: NaN in PyTorch, 0 in ONNX's Attention"
FULLY_MASKED_HALF = "fully masked queries: the mean of V where scores stay below 16, as in PyTorch"
TWICE = "keys and values stand there twice: masked scores are {:g}, which others could be below; use -inf"
GUARDED = "NaN in Q or K gives NaN; the file replaces NaN weights by 0"


@dataclass(frozen=True, kw_only=True)
class Masking:
    """What the masks become."""

    causal: bool  # whether the triangle is the attribute
    terms: tuple[Term, ...]  # what remains of the masks, the one nearest to the softmax first
    kind: str  # `none`, `bool` or `float`
    notes: tuple[str, ...]  # what a user should know
    even: bool = False  # whether queries whose keys are all filled must become zero, see `_even_mask`
    exact: bool = False  # whether the masks are applied one after the other as in the file, see `_exact_mask`
    # how keys get a number for their score which others could be below: keys of `zeros`, or keys `twice`
    filled: str = ""


def decide_masking(
    terms: list[Term],  # the one nearest to the softmax first
    *,
    dtype: ir.DataType,  # of Q, K and V
    sizes: tuple[Size, Size],  # how many queries and keys there are
    guarded: bool,  # whether NaN weights become 0
    # The axes of queries and keys. Where they are not the last two of the scores, a triangle in the last two
    # axes of a mask is not the causal one, and stays a mask.
    order: Axes,
    head: str | None = None,  # the axis of heads, if there is one
    softcap: float = 0.0,  # bound of the scores; 0 for none
    sink: bool = False,  # whether every query has a score that nothing masks: it is never fully masked
) -> Masking:
    """Choose the strongest form that is certainly the same."""
    lowest = float(dtype.min)
    plain = _plain_terms(terms, dtype)
    weakest = -softcap - _FAR_BELOW if softcap else max(WEAKEST_FILL, 0.99 * lowest)
    at = _causal_at(plain, (lowest, weakest), sizes[0], order) if same_size(*sizes) else None
    rest = [term for index, term in enumerate(plain) if index != at]
    put = [each.nearest for each in plain if isinstance(each, Fill) and each.is_put]
    highest = max(put, default=-math.inf)
    notes = (GUARDED,) if guarded else ()
    if not highest <= weakest:
        return _filled_masking(terms, highest, dtype, {*order[0], *(head or "")}, notes)
    if sink:
        hidden = [_hiding(each) for each in plain]
        _check_types(hidden, dtype)
        return Masking(causal=False, terms=tuple(hidden), kind="float", notes=notes)
    if not rest:
        return Masking(causal=at is not None, terms=(), kind="none", notes=notes)
    if _needs_exact(plain, dtype):
        return Masking(causal=False, terms=tuple(terms), kind="float", notes=notes, exact=True)
    # No float16 absorbs any score. A query may be fully masked only because of the triangle.
    even = dtype == ir.DataType.FLOAT16 and any(isinstance(term, Fill) and not term.hides for term in rest)
    if even:
        at, rest = None, plain
    hides = all(isinstance(term, Fill) and term.hides for term in rest)
    if hides and not guarded:
        notes = (FULLY_MASKED,)
    elif any(
        term.clipped and dtype == ir.DataType.FLOAT16
        if isinstance(term, Bias)
        else term.added and term.fill > ABSORBS_ANY
        for term in rest
    ):
        notes = (FULLY_MASKED_HALF, *notes)
    _check_types(rest, dtype)
    kind = "bool" if hides or even else "float"
    return Masking(causal=at is not None, terms=tuple(rest), kind=kind, notes=notes, even=even)


def _filled_masking(
    terms: list[Term], highest: float, dtype: ir.DataType, rows: set[str], notes: tuple[str, ...]
) -> Masking:
    """Masked scores that are set to a number which others could be below.

    A key of zeros has a score of 0, to which the mask adds the number. Where the same keys are masked for all
    rows (queries and heads), they become zeros. Else there are as many more, of zeros, with the same values:
    for each query, either a key or the one of zeros in its place is hidden.
    """
    last = max(at for at, each in enumerate(terms) if isinstance(each, Fill))
    if dtype == ir.DataType.FLOAT16 and any(isinstance(each, Bias) for each in terms[:last]):
        what = "Masked scores are set to a number that others could be below, and a tensor is added to it."
        raise NotExpressible(what, got=f"{highest:g}", hint=f"fill with the lowest number, {dtype.min:g}")
    _check_types(terms, dtype)
    alike = all(
        size == 1 or not rows & set(axis)
        for each in terms
        if isinstance(each, Fill)
        for axis, size in zip(reversed(each.axes), reversed(sizes_of(each.value) or [None]), strict=False)
    )
    more = () if alike else (TWICE.format(highest),)
    filled = "zeros" if alike else "twice"
    return Masking(causal=False, terms=tuple(terms), kind="float", notes=(*notes, *more), filled=filled)


@dataclass(frozen=True, kw_only=True)
class Behind:
    """Weights that are set to 0 behind the softmax."""

    value: ir.Value  # a boolean tensor
    shown: bool  # the value of the condition where the weight stays
    axes: Axes  # the axes of the weights there; the condition is aligned to the last of them


def _two_numbers(mask: ir.Value) -> tuple[ir.Value, float, float] | None:
    """The same as `_choice`, of a Where as well."""
    node = made_by(mask, "Where")
    condition = input_at(node, 0)
    one, other = (None, None) if node is None else map(scalar_of, node.inputs[1:])
    return _choice(mask) if condition is None or one is None or other is None else (condition, one, other)


def hide_behind(terms: list[Term], behind: Behind, dtype: ir.DataType | None) -> list[Term]:
    """The masks of scores whose weights are masked once more by one of them.

    Where a query has another key, its weight was 0 already. A fully masked query becomes 0: the mask hides
    its keys. What else masks scores must not reach the number of this one.
    """
    for term in terms:
        mask = term
        choice = _two_numbers(term.value) if isinstance(term, Bias) and not term.times else None
        if isinstance(term, Bias) and choice is not None:
            for shown, (kept, other) in ((True, choice[1:]), (False, choice[:0:-1])):
                if kept == 0.0 and term.factor > 0:
                    fill = other * term.factor
                    mask = Fill(value=choice[0], shown=shown, fill=fill, axes=term.axes, added=True)
        if isinstance(mask, Bias) or mask.times or mask.axes != behind.axes or dtype is None:
            continue
        if not same_condition((mask.value, mask.shown), (behind.value, behind.shown)):
            continue
        others = [each for each in terms if each is not term]
        apart = all(
            (each.hides or each.fill > mask.fill / 2)
            if isinstance(each, Fill)
            else mask.hides or _is_bounded(each.value) or is_score(each.value)
            for each in others
        )
        if apart and mask.fill <= max(WEAKEST_FILL, 0.99 * float(dtype.min)):
            hidden = replace(mask, fill=-math.inf, added=False)
            return [hidden if each is term else each for each in terms]
        what = "The weights are masked after the softmax, but masked scores may count in it: their number is "
        what += "not low enough, or a tensor is added to it."
        raise NotExpressible(what, got=f"{mask.value.name}, {mask.fill:g}", hint="mask the scores with -inf")
    what = "The weights are masked after the softmax, and the scores do not have the same mask."
    raise NotExpressible(what, got=behind.value.name)


def same_condition(one: tuple[ir.Value, bool], other: tuple[ir.Value, bool]) -> bool:
    """Whether two conditions certainly have given values in the same places."""
    (first, second), (third, fourth) = map(_without_not, (one, other))
    return second == fourth and same_value(first, third)


def _without_not(condition: tuple[ir.Value, bool]) -> tuple[ir.Value, bool]:
    value, shown = condition
    for _ in range(_MAX_PARTS):
        node = made_by(value, "Not", "Identity", "Cast")
        inner = input_at(node, 0)
        if node is None or inner is None or inner.dtype != ir.DataType.BOOL:
            break
        value, shown = inner, shown != is_op(node, "Not")
    return value, shown


def _needs_exact(terms: list[Term], dtype: ir.DataType) -> bool:
    """Whether fully masked queries depend on more than one finite number, so that none can stand for all."""
    finite = [term for term in terms if isinstance(term, Fill) and not term.hides]
    if any(isinstance(term, Fill) and term.times for term in terms):
        return True
    added = [term for term in finite if term.added]
    biases = [term for term in terms if isinstance(term, Bias)]
    if len({term.fill for term in finite}) > 1 or (added and len(finite) > 1):
        return True
    if any(term.is_put or dtype == ir.DataType.FLOAT16 for term in finite):
        return bool(biases)
    # A number that is lowest in a wider type would be -inf in that of Q.
    if any(term.value.dtype != dtype and not _is_bounded(term.value) for term in biases):
        return True
    return bool(added) and not all(_is_bounded(term.value) for term in biases)


@walk
def _is_bounded(value: ir.Value, depth: int) -> bool:
    """Whether a tensor is made of constants far from the lowest number, such as a table of biases."""
    array, number = array_of(value), scalar_of(value)
    if array is not None or number is not None:
        numbers = np.asarray(number if array is None else array, np.float64)
        return bool(np.abs(numbers).max(initial=0.0) < _LARGEST_BIAS)
    node = value.producer()
    if node is None or not is_op(node, "Add", *_BOUNDED):
        return False
    parts = node.inputs if is_op(node, "Add") else node.inputs[:1]
    return all(_is_bounded(each, depth + 1) for each in parts)


@walk
def is_score(value: ir.Value, depth: int) -> bool:
    """Whether a tensor is a matmul that was only moved and scaled: as large as scores are, and no mask.

    So are sums of such tensors, and what is shifted beside zeros, as relative positions are. With a number
    that could hide keys, before the matmul or behind it, it may be a mask, such as -1e9 · (1 - m·mᵀ).
    """
    node = value.producer()
    if node is None or node.domain != "":
        return False
    if node.op_type in ("MatMul", "Einsum", "Gemm"):
        added = node.inputs[2:] if node.op_type == "Gemm" else ()
        factors = (node.attributes.get_float(name, 1.0) for name in ("alpha", "beta"))
        if _is_outer(node) or any(map(_may_hide, node.inputs)) or max(map(abs, factors)) >= _LARGEST_BIAS:
            return False
        return all(is_score(each, depth + 1) or _is_bounded(each) for each in added)
    if node.op_type in ("Add", "Sub", "Concat"):
        return all(is_score(each, depth + 1) or _is_bounded(each) for each in node.inputs)
    if node.op_type in ("Mul", "Div"):
        factor = abs(scalar_of(node.inputs[1]) or math.nan)
        factor = 1.0 / factor if node.op_type == "Div" else factor
        return factor < _LARGEST_BIAS and bool(is_score(node.inputs[0], depth + 1))
    if node.op_type == "Pad" and input_at(node, 2) is not None and not _is_bounded(node.inputs[2]):
        return False
    return node.op_type in (*_BOUNDED, "GatherElements", "Pad") and bool(is_score(node.inputs[0], depth + 1))


def _is_outer(node: ir.Node) -> bool:
    """Whether a matmul sums nothing up: it copies a tensor that is multiplied by ones, as a mask may be."""
    if node.op_type == "Einsum":
        operands, result = equation_of(node)
        return {*"".join(operands)} <= {*result}
    axis = -2 if node.attributes.get_int("transA", 0) else -1
    return (sizes_of(node.inputs[0]) or (None,))[axis:][:1] == [1]


@walk
def _may_hide(value: ir.Value, depth: int) -> bool:
    """Whether a constant that could hide keys comes into a tensor, as the number of a `Where` may."""
    array, number = array_of(value), scalar_of(value)
    if array is not None or number is not None:
        return not _is_bounded(value)
    node = value.producer()
    if node is None or not is_op(node, "Where", "Add", "Sub", "Mul", "Concat", *_BOUNDED):
        return False
    parts = node.inputs[1:] if is_op(node, "Where") else node.inputs
    parts = parts[:1] if is_op(node, *_BOUNDED) else parts
    return any(_may_hide(each, depth + 1) for each in parts)


@walk
def has_lowest(value: ir.Value, depth: int) -> bool:
    """Whether a mask is written with the lowest number of its type, which ONNX Runtime takes for -inf."""
    if value.dtype is None or not value.dtype.is_floating_point():
        return False
    if scalar_of(value) == float(value.dtype.min):
        return True
    node = value.producer()
    if node is None or not is_op(node, "Where", "Add", "Mul", *_BOUNDED):
        return False
    return any(has_lowest(each, depth + 1) for each in node.inputs)


def _causal_at(terms: list[Term], enough: tuple[float, float], size: Size, order: Axes) -> int | None:
    """The position of a mask that is the causal triangle and can be the attribute.

    `enough` are the largest numbers that leave a key no weight: added to its score, and in its place.
    """
    for index, term in enumerate(terms):
        dims = () if term.times else sizes_of(term.value) or ()
        square = len(dims) >= 2 and all(same_or_sliced(each, size) for each in dims[-2:])
        found = triangle_of(term.value) if square and term.axes[-2:] == order else None
        if found is None:
            continue
        # The number on the future keys; the others must be left alone.
        if isinstance(term, Fill):
            hidden = term.fill if bool(found.visible) == term.shown != bool(found.hidden) else math.nan
        else:
            hidden = found.hidden * term.factor if found.visible == 0 else math.nan
        filled_after = any(isinstance(outer, Fill) and not outer.hides for outer in terms[:index])
        if hidden == -math.inf and not filled_after:
            return index
        # A finite number hides future keys only as long as each row has a visible one: nothing else may mask.
        if hidden <= enough[isinstance(term, Fill) and term.is_put] and len(terms) == 1:
            return index
    return None


def _check_types(terms: list[Term], dtype: ir.DataType) -> None:
    for term in terms:
        if isinstance(term, Bias) and term.value.dtype != dtype and not holds(term.value.dtype, dtype):
            got = f"{term.value.dtype}, Q is {dtype}"
            raise NotFused("The tensor that is added to the scores has another type than Q.", got=got)


# -- Write the masks as one tensor -----------------------------------------------------------------


def _float_mask(terms: Sequence[Term], builder: NodeBuilder, dtype: ir.DataType) -> ir.Value:
    """What the masks add to the scores."""
    zero = total = builder.constant(0.0, dtype)
    for term in reversed(terms):
        if isinstance(term, Fill):
            number = term.number(builder, dtype, -math.inf if term.hides else ABSORBS_ANY)
            if term.added and total is not zero:  # what is -inf stays so
                total = builder.op("Add", total, term.applied(zero, number, builder), name="mask")
            else:
                total = term.applied(total, number, builder)
        else:
            bias = _above_lowest(term.scaled(builder, dtype), term, builder, dtype)
            total = bias if total is zero else builder.op("Add", total, bias, name="mask")
    return total


def _applied(
    terms: Sequence[Term], builder: NodeBuilder, dtype: ir.DataType, score: float, *, raised: bool = False
) -> ir.Value:
    """What the masks make of a score, one after the other as in the file.

    With `raised`, another number stands for the lowest, which ONNX Runtime takes for -inf.
    """
    total = first = builder.constant(score, dtype)
    # Beside a bias, which may have the lowest number as well, the two must stay alike.
    near = dtype == ir.DataType.FLOAT16 or any(isinstance(each, Bias) for each in terms)
    low = _next_to_lowest(dtype) if near else ABSORBS_ANY
    for term in reversed(terms):
        if isinstance(term, Fill):
            fill = max(term.fill, low) if raised and not term.hides else term.fill
            total = term.applied(total, term.number(builder, dtype, fill), builder)
        else:
            bias = term.scaled(builder, dtype)
            bias = _above_lowest(bias, term, builder, dtype) if raised else bias
            total = bias if total is first else builder.op("Add", total, bias, name="mask")
    return total


def _visible_keys(terms: Iterable[Term], builder: NodeBuilder) -> ir.Value:
    """True where no condition masks the key; there must be one."""
    shown = [term.keys(builder) for term in terms if isinstance(term, Fill)]
    return functools.reduce(lambda one, other: builder.op("And", one, other, name="visible"), shown)


def _next_to_lowest(dtype: ir.DataType) -> float:
    """The number after the lowest of a type."""
    kind = dtype.numpy().type
    return float(np.nextafter(kind(dtype.min), kind(0)))


def _above_lowest(bias: ir.Value, term: Bias, builder: NodeBuilder, dtype: ir.DataType) -> ir.Value:
    """A mask with the next number in the place of the lowest, which ONNX Runtime takes for -inf.

    A query with nothing else would be 0 there. Beside a score the two are the same; in float16, beside one
    below 16.
    """
    if _is_bounded(term.value) or is_score(term.value):
        return bias
    lowest, above = float(dtype.min), _next_to_lowest(dtype)
    node = made_by(bias, "Mul")
    if node is not None and bias is term.value:
        for value, other in (node.inputs, node.inputs[::-1]):
            if value is not None and scalar_of(value) == lowest and not sizes_of(value):
                return builder.op("Mul", other, builder.constant(above, dtype), name="bias")
    is_lowest = builder.op("Equal", bias, _of_no_model(lowest, builder, dtype))
    return builder.op("Where", is_lowest, _of_no_model(above, builder, dtype), bias, name="bias")


def _of_no_model(number: float, builder: NodeBuilder, dtype: ir.DataType) -> ir.Value:
    """A constant that stands for no number of the model."""
    value = builder.constant(number, dtype)
    if (node := value.producer()) is not None:
        node.metadata_props[MODEL_NUMBER] = repr(math.nan)
    return value


def spans(terms: tuple[Term, ...], sizes: tuple[Size, Size]) -> bool:
    """Whether some mask has the full size of queries and keys already, so that their sum has it too."""
    shapes = [sizes_of(term.value) or () for term in terms]
    return any(len(shape) >= 2 and same_dims(shape[-2:], sizes) for shape in shapes)


# Fully masked queries, where no number in a float mask gives them the right result:


def _even_mask(terms: Sequence[Term], builder: NodeBuilder) -> tuple[ir.Value, ir.Value]:
    """The mask, and `[·, ·, ·, 1]`: True for each fully masked query, which must become zero."""
    fills = [term for term in terms if isinstance(term, Fill)]
    visible = _visible_keys(fills, builder)
    # Maximum over booleans came with opset 20 only, so it is taken over numbers.
    numbers = builder.op("Cast", visible, to=int(ir.DataType.FLOAT))
    most = builder.op("ReduceMax", numbers, builder.ints(-1), keepdims=1)
    empty = builder.op("Not", builder.op("Cast", most, to=int(ir.DataType.BOOL)), name="fully_masked")
    if not any(term.hides for term in fills):
        return builder.op("Or", visible, empty, name="mask"), empty
    # The fill nearest to the softmax decides whether a score is the finite number. Some fill hides each key.
    # One that is added leaves -inf as it is.
    filled = empty
    for term in reversed([each for each in fills if each.hides or not each.added]):
        other = term.keys(builder, shown=term.hides)
        filled = builder.op("And" if term.hides else "Or", filled, other)
    return builder.op("Or", visible, builder.op("And", filled, empty), name="mask"), empty


def _exact_mask(terms: Sequence[Term], builder: NodeBuilder, dtype: ir.DataType) -> tuple[ir.Value, ir.Value]:
    """The masks applied to scores of 0, and True for each query that must become zero.

    With a query of zeros the scores are what the masks make of 0. That is exact where filled keys outweigh
    the others, since their scores do not depend on the query. Elsewhere filled keys weigh nothing.

    Scores may be computed in a wider type than Q, where float16's lowest number does not absorb them: a query
    whose keys all have it attends to them by their scores. The softmax does not see the number, so it is
    subtracted before the mask is rounded to the type of Q.
    """
    # The masks are applied in the widest type, and one that holds the fills.
    types = [term.value.dtype for term in terms if isinstance(term, Bias) and term.value.dtype is not None]
    wide = max([dtype, *types], key=lambda each: each.itemsize)
    fills = [term for term in reversed(terms) if isinstance(term, Fill)]
    if any(term.fill < float(wide.min) for term in fills if not term.hides):
        wide = ir.DataType.FLOAT
    total = _applied(terms, builder, wide, 0.0)
    # Reductions of float16 and bfloat16 are missing in some runtimes.
    reduced = wide if wide == ir.DataType.DOUBLE else ir.DataType.FLOAT
    total = builder.op("Cast", total, to=int(reduced))

    def best_of(numbers: ir.Value) -> ir.Value:
        return builder.op("ReduceMax", numbers, builder.ints(-1), keepdims=1)

    best = best_of(total)
    # Such a number absorbs any score; runtimes take the lowest numbers for -inf.
    narrowed = wide.itemsize > dtype.itemsize
    absorbing = ABSORBS_FLOAT32 if narrowed else ABSORBS_ANY
    absorbing = WRITTEN_HALF if wide == ir.DataType.FLOAT16 else absorbing
    zero = builder.op("LessOrEqual", best, builder.constant(absorbing, reduced))
    infinite = builder.constant(-math.inf, reduced)
    if fills:
        shown = _visible_keys(fills, builder)
        best_shown = best_of(builder.op("Where", shown, total, infinite))
        best_filled = best_of(builder.op("Where", shown, infinite, total))
        zero = builder.op("Or", zero, builder.op("GreaterOrEqual", best_filled, best_shown))
    some = builder.op("Greater", best, infinite)
    zero = builder.op("And", zero, some, name="masked_query")
    mask = builder.op("Where", some if narrowed else zero, builder.op("Sub", total, best), total)
    return builder.op("Cast", mask, name="mask", to=int(dtype)), zero


# -- Write the masks of attentions, each once: the layers of a model share theirs ------------------

HEAD_AXIS = 1


class WrittenMask(NamedTuple):
    """The masks of an attention as one tensor."""

    value: ir.Value | None = None  # `[B or 1, Hq or 1, S, T]`
    zero: ir.Value | None = None  # `[B or 1, Hq or 1, S or 1, 1]`: True for queries that must become zero
    shown: ir.Value | None = None  # `[B or 1, 1, 1, T or 1]`: False for keys that must


class Masks:
    """The masks that were written so far. Attentions must come in the order of the graph."""

    def __init__(self) -> None:
        # The key holds the values themselves, so that no id is used again for another.
        self._written: dict[tuple[object, ...], tuple[WrittenMask, NodeBuilder]] = {}

    def forget(self, builder: NodeBuilder) -> None:
        """Drop the masks of a builder whose nodes do not come into the graph."""
        self._written = {key: each for key, each in self._written.items() if each[-1] is not builder}

    def write(
        self, masking: Masking, place: ScorePlace, dtype: ir.DataType, sizes: tuple[Size, Size], graph: object
    ) -> WrittenMask:
        """The masks as one tensor.

        `graph` holds the attention: a mask of a subgraph is unknown outside of it.
        """
        if not masking.terms:
            return WrittenMask()
        how = (masking.kind, masking.even, masking.exact, masking.filled)
        key = (masking.terms, *how, dtype, place.order, sizes, id(graph))
        if key in self._written:
            return self._written[key][0]
        builder, zero, shown = place.builder, None, None
        terms = [_aligned(each, place) for each in masking.terms]
        if masking.even:
            mask, zero = _even_mask(terms, builder)
        elif masking.exact:
            mask, zero = _exact_mask(terms, builder, dtype)
        elif masking.kind == "bool":
            mask = _visible_keys(terms, builder)
        elif masking.filled == "zeros":
            mask = _applied(terms, builder, dtype, 0.0, raised=True)
            shown = _visible_keys(terms, builder)
        else:
            plain = [_hiding(each) for each in terms] if masking.filled else terms
            mask = _float_mask(plain, builder, dtype)
        if any(each.axes != place.order for each in masking.terms) or not spans(masking.terms, sizes):
            q, k = place.rows
            mask = builder.expand(mask, 1, 1, builder.size(q, -2), builder.size(k, -2))
        if masking.filled == "twice":
            last = max(at for at, each in enumerate(terms) if isinstance(each, Fill))
            filled = _applied(terms[: last + 1], builder, dtype, -math.inf, raised=True)
            filled = builder.op("Expand", filled, builder.op("Shape", mask))
            mask = builder.op("Concat", mask, filled, axis=-1, name="mask")
        found = WrittenMask(mask, zero, shown)
        # An axis that is joined from others has the batch of one attention.
        if None not in sizes and len(place.order[0]) == 1:
            self._written[key] = found, builder
        return found


def _hiding(term: Term) -> Term:
    """A mask whose keys have no weight."""
    return replace(term, fill=-math.inf, times=()) if isinstance(term, Fill) else term


def _aligned(term: Term, place: ScorePlace) -> Term:
    """A mask in the axes of Attention."""
    value = place.aligned(term.value, term.axes)
    times = tuple(replace(each, value=place.aligned(each.value, each.axes)) for each in term.times)
    if isinstance(term, Bias) and times:
        value, times = multiplied(value, times, place.builder), ()
    return replace(term, value=value, times=times)


@dataclass(frozen=True, kw_only=True)
class ScorePlace:
    """Where tensors of the scores go."""

    order: Axes  # the axes that Attention wants; without a head where the heads are part of the batch
    sizes: Mapping[str, Size]  # the sizes of the letters of axes
    rows: tuple[ir.Value, ir.Value]  # Q and K in the layout of Attention, from which unknown sizes are read
    builder: NodeBuilder  # holds the new nodes
    sources: Sources  # where the sizes of single letters are read from

    def aligned(self, value: ir.Value, axes: Axes) -> ir.Value:
        """A tensor that is aligned to the last axes of scores, as `[B or 1, H or 1, S or 1, T or 1]`."""
        kind, own = value.type, axes[len(axes) - len(sizes_of(value) or ()) :]
        value = self._expand_joined(value, own)
        if set(axes) == set(self.order):
            value = rejoined(value, own, self.order, self.sizes, self.builder, self.sources)
        else:
            value = self._regrouped(value, own, "".join(axes))
        value = self.builder.unsqueeze(value, HEAD_AXIS) if len(self.order) == 3 else value
        value.type = kind
        return value

    def _expand_joined(self, value: ir.Value, axes: Axes) -> ir.Value:
        """A tensor with each joined axis expanded to all that it joins: a size of another name may be 1."""
        dims = sizes_of(value) or []
        whole = {
            at: product(self.sizes[letter] for letter in axis)
            for at, (axis, size) in enumerate(zip(axes, dims, strict=True))
            if len(axis) > 1 and axis not in self.order and not isinstance(size, int)
        }
        short = {at: size for at, size in whole.items() if dims[at] != size}
        if not short:
            return value
        counts = [
            _at_run_time([self._size(each, {}) for each in axis], self.builder) if at in short else 1
            for at, axis in enumerate(axes)
        ]
        result = self.builder.expand(value, *counts)
        result.type = value.type
        result.shape = ir.Shape([short.get(at, size) for at, size in enumerate(dims)])
        return result

    def _regrouped(self, value: ir.Value, axes: Axes, letters: str) -> ir.Value:
        """The same for a tensor of scores, of these letters, whose axes are joined in another way."""
        builder = self.builder
        apart: dict[str, Size] = dict.fromkeys(letters, 1)
        for axis, size in zip(axes, sizes_of(value) or (), strict=True):
            whole = len(axis) == 1 or size == 1
            apart |= {letter: size if whole else self.sizes[letter] for letter in axis}
        value = reshaped(value, axes, tuple(apart), apart, builder, self.sources)
        # What is joined with a larger axis must be copied along it before.
        large = {letter for letter, size in apart.items() if size != 1}
        full = "".join(axis for axis in self.order if len(axis) > 1 and large & set(axis))
        full = "".join(letter for letter in full if letter in apart)
        if any(apart[each] == 1 != self.sizes[each] for each in full):
            broadcast = {each for each in full if apart[each] == 1}
            held = {letter: (value, at) for at, letter in enumerate(apart) if letter not in broadcast}
            kind = value.type
            value = builder.expand(
                value, *(self._size(each, held) if each in broadcast else 1 for each in apart)
            )
            value.type = kind
            apart |= {letter: self.sizes[letter] for letter in full}
        return rejoined(value, tuple(apart), self.order, apart, builder, self.sources)

    def _size(self, letter: str, held: Mapping[str, tuple[ir.Value, int]]) -> int | ir.Value:
        """The size of a letter, at run time if need be; `held`: where others are an axis."""
        size = self.sizes[letter]
        if isinstance(size, int):
            return size
        if (found := self.sources.size(letter, self.builder)) is not None:
            return found
        at, axis = next((at, axis) for at, axis in enumerate(self.order) if letter in axis)
        others = [each for each in axis if each != letter]
        sizes = {
            each: self.builder.size(*held[each]) if each in held else self.sizes[each] for each in others
        }
        known = [each for each in sizes.values() if isinstance(each, int | ir.Value)]
        if len(known) < len(others):
            raise NotFused("The mask has an axis of several sizes that are not known.", got=size)
        # The batch of Q, or the rows of Q or of K.
        places = {0: (self.rows[0], 0), len(self.order) - 2: (self.rows[0], -2)}
        whole = self.builder.as_tensor(self.builder.size(*places.get(at, (self.rows[1], -2))))
        for each in map(self.builder.as_tensor, known):
            whole = self.builder.op("Div", whole, each, name="size")
        return whole


class Sources:
    """Tensors from which the sizes of letters are read at run time."""

    def __init__(self, tensors: Iterable[tuple[ir.Value, Axes]] = ()) -> None:
        self._places = {
            axis: (value, at)
            for value, axes in tensors
            for at, (axis, size) in enumerate(zip(axes, sizes_of(value) or (), strict=False))
            if len(axis) == 1 and size != 1
        }

    def size(self, letters: str, builder: NodeBuilder) -> int | ir.Value | None:
        """The size of an axis, or of some that are joined; None where nothing has them apart."""
        if not set(letters) <= set(self._places):
            return None
        return _at_run_time([builder.size(*self._places[letter]) for letter in letters], builder)


def _at_run_time(sizes: Sequence[int | ir.Value], builder: NodeBuilder) -> int | ir.Value:
    """The product of sizes."""
    if len(sizes) == 1:
        return sizes[0]
    tensors = map(builder.as_tensor, sizes)
    return functools.reduce(lambda one, other: builder.op("Mul", one, other, name="size"), tensors)


def rejoined(
    value: ir.Value,
    axes: Axes,
    order: Axes,
    sizes: Mapping[str, Size],
    builder: NodeBuilder,
    sources: Sources,
) -> ir.Value:
    """A value with its axes joined in another way and in another order."""
    # An axis of size 1 that is joined with others is none, and one that is not wanted is dropped.
    gone = {letter for axis in axes for letter in axis if sizes.get(letter) == 1} - set("".join(order))
    if dropped := [at for at, axis in enumerate(axes) if set(axis) <= gone]:
        kind, dims = value.type, sizes_of(value) or []
        value = builder.op("Squeeze", value, builder.ints(*dropped))
        value.type = kind
        value.shape = ir.Shape([size for at, size in enumerate(dims) if at not in dropped]) if dims else None
    axes = tuple(each for axis in axes if (each := "".join(letter for letter in axis if letter not in gone)))
    own = dict(zip(axes, sizes_of(value) or (), strict=False))
    if missing := [letter for letter in "".join(order) if letter not in "".join(axes)]:
        axes, kind = (*missing, *axes), value.type
        own |= dict.fromkeys(missing, 1)
        value = builder.unsqueeze(value, *range(len(missing)))
        value.type, value.shape = kind, ir.Shape([own.get(axis) for axis in axes])
    if set(axes) == set(order):
        return transposed(value, axes, order, builder)
    known = {letter: own.get(letter, sizes.get(letter)) for letter in "".join(axes)}
    apart, letters = tuple("".join(axes)), tuple("".join(order))
    value = reshaped(value, axes, apart, known, builder, sources)
    return reshaped(transposed(value, apart, letters, builder), letters, order, known, builder, sources)


def reshaped(
    value: ir.Value,
    axes: Axes,
    wanted: Axes,
    sizes: Mapping[str, Size],
    builder: NodeBuilder,
    sources: Sources,
) -> ir.Value:
    """A value with its axes taken apart or joined; their order stays."""
    if axes == wanted:
        return value
    dims = [product(sizes[letter] for letter in axis) for axis in wanted]
    given = list[int | ir.Value]()
    for axis, size in zip(wanted, dims, strict=True):
        if isinstance(size, int):
            given.append(size)
        elif sum(not isinstance(each, int) for each in dims) == 1 or (axis not in axes and -1 not in given):
            given.append(-1)
        elif axis in axes:
            given.append(builder.op("Shape", value, start=axes.index(axis), end=axes.index(axis) + 1))
        elif (found := sources.size(axis, builder)) is not None:
            given.append(found)
        else:
            raise NotFused("Several sizes of Q, K, V or a mask are not known.", got=dims)
    result = builder.reshape(value, *given)
    result.shape = ir.Shape(dims)
    result.type = value.type
    return result


def transposed(value: ir.Value, axes: Axes, order: Axes, builder: NodeBuilder) -> ir.Value:
    """A value with its axes in another order."""
    if axes == order:
        return value
    result = builder.transpose(value, *(axes.index(axis) for axis in order))
    if value.shape is not None and len(value.shape) == len(axes):
        result.shape = ir.Shape([value.shape[axes.index(axis)] for axis in order])
    result.type = value.type
    return result
