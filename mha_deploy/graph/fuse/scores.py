"""Recognise the two matmuls of attention: scores back to Q and K, weights on to V, and what lies between."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import onnx_ir as ir

from mha_deploy.graph.fuse.sizes import quotient
from mha_deploy.graph.fuse.values import (
    NoScores,
    NotExpressible,
    NotFused,
    Size,
    array_of,
    holds,
    ints_of,
    perm_of,
    same_dims,
    scalar_of,
    sizes_of,
    tensor_of,
)
from mha_deploy.graph.ir import input_at, is_op, made_by, rank

# -- Axes: letters as in an einsum, several for an axis that joins others --------------------------

Axes = tuple[str, ...]
"""The axes of a tensor: each a letter, or several where a Reshape joined them."""


class Alphabet:
    """The letters of an attention's axes and their sizes. A Reshape that splits an axis splits its letter."""

    def __init__(self) -> None:
        self.sizes: dict[str, Size] = {}
        self._parts: dict[str, str] = {}

    def new(self, size: Size) -> str:
        """A letter that is not used yet."""
        letter = string.ascii_letters[len(self.sizes) % len(string.ascii_letters)]
        if letter in self.sizes:
            raise NotFused("The tensors of the attention have too many axes.")
        self.sizes[letter] = size
        return letter

    def resolved(self, axes: Axes) -> Axes:
        """The same axes in letters that were not split."""
        return tuple("".join(map(self._whole, axis)) for axis in axes)

    def _whole(self, letter: str) -> str:
        return "".join(map(self._whole, self._parts[letter])) if letter in self._parts else letter

    def regrouped(self, axes: Axes, dims: Sequence[Size] | None) -> Axes | None:
        """The axes of the same numbers in another shape; None where the sizes do not prove it."""
        if dims is None:
            return None
        left, result = list("".join(self.resolved(axes))), list[str]()
        for size in dims:
            rest, taken = size, ""
            if rest == 1 and left and self.sizes[left[0]] == 1:
                taken = left.pop(0)
            while rest != 1:
                if rest is None or not left:
                    return None
                letter = left.pop(0)
                smaller = quotient(rest, self.sizes[letter])
                if smaller is None:  # the axis is larger than what is missing
                    more = quotient(self.sizes[letter], rest)
                    if more is None:
                        return None
                    first, second = self.new(rest), self.new(more)
                    self._parts[letter] = first + second
                    left.insert(0, second)
                    letter, smaller = first, 1
                taken, rest = taken + letter, smaller
            result.append(taken or self.new(1))
        while left and self.sizes[left[0]] == 1 and result:
            result[-1] += left.pop(0)
        return None if left else tuple(result)


# -- The two matmuls of attention, in the letters of an einsum however they are spelled ------------


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """A matmul of two tensors, each axis named."""

    node: ir.Node  # the MatMul or Einsum
    values: tuple[ir.Value, ir.Value]  # its two operands
    axes: tuple[Axes, Axes]  # the axes of the operands
    out: Axes  # the axes of the result

    def __str__(self) -> str:
        left, right, out = (".".join(each) for each in (*self.axes, self.out))
        return f"{left},{right}->{out}"

    def named(self, alphabet: Alphabet, known: Mapping[str, str]) -> Matmul:
        """The same matmul in the letters of an alphabet."""
        names = dict(known)
        for value, axes in zip(self.values, self.axes, strict=True):
            for axis, size in zip(axes, sizes_of(value) or (), strict=False):
                if axis not in names:
                    names[axis] = alphabet.new(size)
        left, right, out = (tuple(names.get(axis, axis) for axis in axes) for axes in (*self.axes, self.out))
        return replace(self, axes=(left, right), out=out)

    def resolved(self, alphabet: Alphabet) -> Matmul:
        """The same matmul in letters that were not split."""
        left, right, out = (alphabet.resolved(axes) for axes in (*self.axes, self.out))
        return replace(self, axes=(left, right), out=out)


def is_matmul(node: ir.Node | None) -> bool:
    """Whether a node multiplies two tensors that are both computed: a weight makes it a projection."""
    if node is None or not is_op(node, "MatMul", "Einsum") or len(node.inputs) != 2:
        return False
    # A constant of three or more axes is a learned query, of two a weight.
    return all(
        value is not None and (tensor_of(value) is None or (rank(value) or 0) > 2) for value in node.inputs
    )


_MAX_RANK = 8


def read_matmul(node: ir.Node) -> Matmul:
    """Read a MatMul or an Einsum."""
    left, right = node.inputs
    if left is None or right is None:
        raise NotFused(f"The matmul {node.name} lacks an operand.")
    ranks = [(rank(value) or 0) for value in (left, right)]
    if is_op(node, "MatMul"):
        if ranks[0] != ranks[1] or not 3 <= ranks[0] <= _MAX_RANK:
            raise NotFused(f"The matmul {node.name} is of tensors with {ranks[0]} and {ranks[1]} axes.")
        batch = string.ascii_uppercase[: ranks[0] - 2]
        texts = (f"{batch}sd", f"{batch}dt", f"{batch}st")
    else:
        texts = _read_equation(node, ranks)
    if any(len(set(text)) != len(text) for text in texts):
        raise NotFused(f"The einsum {node.name} takes a diagonal.")
    return Matmul(
        node=node, values=(left, right), axes=(tuple(texts[0]), tuple(texts[1])), out=tuple(texts[2])
    )


def _read_equation(node: ir.Node, ranks: list[int]) -> tuple[str, str, str]:
    equation = (node.attributes.get_string("equation") or "").replace(" ", "")
    inputs, arrow, out = equation.partition("->")
    left, comma, right = inputs.partition(",")
    if not arrow or not comma or "," in right:
        raise NotFused(f"The einsum {node.name} is not a matmul of two tensors with a named result.")
    free = [letter for letter in string.ascii_letters if letter not in equation]
    hidden = max(ranks[0] - len(left.replace("...", "")), ranks[1] - len(right.replace("...", "")), 0)
    dots = "".join(free[:hidden])
    texts = []
    for text, count in ((left, ranks[0]), (right, ranks[1]), (out, None)):
        here = hidden if count is None else count - len(text.replace("...", ""))
        texts.append(text.replace("...", dots[len(dots) - here :] if here else ""))
    return texts[0], texts[1], texts[2]


# -- Q, K and V as they were before scaling, transposing and repeating for the matmul --------------


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One side of a matmul."""

    value: ir.Value  # the tensor
    axes: Axes  # its axes
    # the sizes of the letters, for axes that are joined
    sizes: Mapping[str, Size] = field(default_factory=dict)
    factor: float = 1.0  # the constant that it was multiplied by
    group: int = 1  # how often each of its heads was repeated

    def dim(self, letter: str) -> Size:
        """The size of an axis; 1 for an axis that the tensor does not have."""
        dims = sizes_of(self.value) or ()
        if letter in self.axes and self.axes.index(letter) < len(dims):
            return dims[self.axes.index(letter)]
        return self.sizes.get(letter) if any(letter in axis for axis in self.axes) else 1


def unwrap(
    operand: Operand, *, wanted: Axes, head: str | None, scaled: bool = True, dtype: ir.DataType | None = None
) -> Operand:
    """Walk back over layout, constant factors, upcasts and repeated heads.

    Args:
        operand: The side of a matmul.
        wanted: The order of axes in which Attention takes it. A tensor that has it already is taken there.
        head: The letter of the heads, if there is one.
        scaled: Whether a constant factor may be taken off.
        dtype: The type that a cast may be undone to.
    """
    ready = operand if operand.axes == wanted else None
    while True:
        moved = _before_transpose(operand) or _before_join(operand)
        if moved is not None:
            operand = moved
            if ready is None and operand.axes == wanted:
                ready = operand
            continue
        inner = (_before_factor(operand) if scaled else None) or _before_cast(operand, dtype)
        if head:
            inner = inner or _before_interleave(operand, head) or _before_expand(operand, head)
        if inner is None:
            return ready or operand
        operand = inner
        ready = operand if operand.axes == wanted else None


def _before_transpose(operand: Operand) -> Operand | None:
    node, order = made_by(operand.value, "Identity", "Transpose"), operand.axes
    if (source := input_at(node, 0)) is not None and node is not None:
        return replace(operand, value=source, axes=before_transpose(node, order))
    if (source := _before_flat_transpose(operand.value)) is not None:
        return replace(operand, value=source, axes=(*order[:-2], order[-1], order[-2]))
    return None


def before_transpose(node: ir.Node, axes: Axes) -> Axes:
    """The axes of what a Transpose or an Identity takes, from those that it gives."""
    before = list(axes)
    for at, axis in enumerate(perm_of(node) if is_op(node, "Transpose") else ()):
        before[axis] = axes[at]
    return tuple(before)


def _before_join(operand: Operand) -> Operand | None:
    """A tensor before a Reshape joined axes that the attention has apart."""
    source = input_at(made_by(operand.value, "Reshape"), 0)
    apart, dims = tuple("".join(operand.axes)), sizes_of(source)
    if source is None or dims is None:
        return None
    known = [operand.sizes.get(letter) for letter in apart]
    for at, axis in enumerate(apart):
        if axis in operand.axes:
            known[at] = (sizes_of(operand.value) or [])[operand.axes.index(axis)]
    joined = len(apart) > len(operand.axes) and None not in dims and dims == known
    return replace(operand, value=source, axes=apart) if joined else None


def _before_cast(operand: Operand, dtype: ir.DataType | None) -> Operand | None:
    """A tensor before it was cast to a type that has all its values."""
    source = input_at(made_by(operand.value, "Cast"), 0)
    if dtype is None or source is None or operand.value.dtype == dtype or source.dtype != dtype:
        return None
    return replace(operand, value=source) if holds(operand.value.dtype, source.dtype) else None


def _before_flat_transpose(value: ir.Value) -> ir.Value | None:
    """What `Reshape(Transpose(Reshape(x)))` swaps, where it only swaps the last two axes of x.

    The exporter writes scaled_dot_product_attention so. The shapes prove it: the first reshape keeps the last
    two axes and joins the others, the second takes them apart again.
    """
    chain = _chain(value, ("Reshape",), ("Transpose",), ("Reshape",))
    swap = None if chain is None else chain[1].producer()
    if chain is None or swap is None or perm_of(swap) != [0, 2, 1]:
        return None
    result, _, flat, source = (sizes_of(each) for each in chain)
    if result is None or flat is None or source is None or len(source) != len(result) or len(flat) != 3:
        return None
    swapped = (*source[:-2], source[-1], source[-2])
    return chain[-1] if same_dims(result, swapped) and same_dims(flat[1:], source[-2:]) else None


def _chain(value: ir.Value, *steps: tuple[str, ...]) -> list[ir.Value] | None:
    """A value and what it was made from, by nodes of these operators, the last one first."""
    chain = [value]
    for op_types in steps:
        source = input_at(made_by(chain[-1], *op_types), 0)
        if source is None:
            return None
        chain.append(source)
    return chain


def _before_factor(operand: Operand) -> Operand | None:
    node = made_by(operand.value, "Mul", "Div")
    if node is None:
        return None
    first, second = node.inputs
    factor = scalar_of(second)
    if factor is None and node.op_type == "Mul":
        first, second, factor = second, first, scalar_of(first)
    if first is None or second is None or not factor or rank(first) != len(operand.axes):
        return None
    # It must not copy the value over a larger batch or more heads.
    sizes = sizes_of(second)
    single = sizes is not None and all(size == 1 for size in sizes)
    if not single and not same_dims(sizes_of(first) or (), sizes_of(operand.value) or ()):
        return None
    factor = 1.0 / factor if node.op_type == "Div" else factor
    return replace(operand, value=first, factor=operand.factor * factor)


def _before_interleave(operand: Operand, head: str) -> Operand | None:
    """The heads before `x[:, :, None].expand(…).reshape(…)`, which repeats each of them in place."""
    chain = _chain(operand.value, ("Reshape",), ("Expand", "Tile"), ("Unsqueeze", "Reshape"))
    if chain is None or any(each.shape is None for each in chain) or head not in operand.axes:
        return None
    result, wide, thin, source = (sizes_of(each) or () for each in chain)
    at = operand.axes.index(head)
    if len(source) != len(operand.axes) or len(wide) != len(source) + 1:
        return None
    heads, group = source[at], wide[at + 1]
    if not isinstance(heads, int) or not isinstance(group, int):
        return None
    proved = (
        same_dims(thin, (*source[: at + 1], 1, *source[at + 1 :]))
        and same_dims(wide, (*source[: at + 1], group, *source[at + 1 :]))
        and same_dims(result, (*source[:at], heads * group, *source[at + 1 :]))
    )
    return replace(operand, value=chain[-1], group=operand.group * group) if proved else None


def _before_expand(operand: Operand, head: str) -> Operand | None:
    """One head, before it was copied to all of them."""
    inner = input_at(made_by(operand.value, "Expand"), 0)
    result, source = sizes_of(operand.value), sizes_of(inner)
    if inner is None or result is None or source is None or head not in operand.axes:
        return None
    at = operand.axes.index(head)
    copies = result[at]
    if not isinstance(copies, int) or not same_dims(source, (*result[:at], 1, *result[at + 1 :])):
        return None
    return replace(operand, value=inner, group=operand.group * copies)


# -- The softmax: the operator, or an exponential over its sum -------------------------------------


@dataclass(frozen=True, kw_only=True)
class Normalisation:
    """A softmax."""

    node: ir.Node  # its last node
    source: ir.Value  # what it normalises
    result: ir.Value  # the weights
    axis: int  # the axis of the keys
    nodes: tuple[ir.Node, ...]  # those of its nodes that use the source


def softmax_at(node: ir.Node) -> Normalisation | None:
    """The softmax that ends in a node: a Softmax, `exp(log_softmax(x))`, or `exp(x) / sum(exp(x))`.

    The maximum may be subtracted before.
    """
    source = node.inputs[0] if node.inputs else None
    if source is None:
        return None
    if is_op(node, "Softmax"):
        return _shifted(node, source, node.attributes.get_int("axis", -1), (node,))
    inner = made_by(source, "LogSoftmax")
    if is_op(node, "Exp") and inner is not None and inner.inputs[0] is not None and _is_used_once(source):
        return _shifted(node, inner.inputs[0], inner.attributes.get_int("axis", -1), (inner,))
    if not is_op(node, "Div", "Mul") or len(node.inputs) != 2:
        return None
    # `Div(Exp(x), ReduceSum(Exp(x)))` or `Mul(Exp(x), Reciprocal(ReduceSum(Exp(x))))`.
    for powers, divisor in (node.inputs, node.inputs[::-1]) if is_op(node, "Mul") else (node.inputs,):
        if is_op(node, "Mul"):
            divisor = input_at(made_by(divisor, "Reciprocal"), 0)
        power, total = made_by(powers, "Exp"), made_by(divisor, "ReduceSum")
        if powers is None or power is None or total is None or total.inputs[0] is not powers:
            continue
        axis, before = _reduced_axis(total), power.inputs[0]
        own = not powers.is_graph_output() and {user for user, _ in powers.uses()} == {node, total}
        if axis is not None and before is not None and own:
            return _shifted(node, before, axis, (power,))
    return None


def _is_used_once(value: ir.Value) -> bool:
    return len(value.uses()) == 1 and not value.is_graph_output()


def _shifted(node: ir.Node, source: ir.Value, axis: int, nodes: tuple[ir.Node, ...]) -> Normalisation:
    """The softmax of a source from which its maximum may have been subtracted."""
    shift = made_by(source, "Sub")
    before, top = input_at(shift, 0), made_by(input_at(shift, 1), "ReduceMax")
    if shift is not None and before is not None and top is not None and _is_used_once(source):
        same = _reduced_axis(top) == (axis - (rank(source) or 0) if axis >= 0 else axis)
        if same and top.inputs[0] is before:
            source, nodes = before, (shift, top)
    return Normalisation(node=node, source=source, result=node.outputs[0], axis=axis, nodes=nodes)


def _reduced_axis(node: ir.Node) -> int | None:
    """The one axis that a reduction runs over and keeps; counted from the end where the rank is known."""
    axes = ints_of(node.inputs[1]) if len(node.inputs) > 1 else list(node.attributes.get_ints("axes") or ())
    count = rank(node.inputs[0])
    if axes is None or len(axes) != 1 or count is None or node.attributes.get_int("keepdims", 1) != 1:
        return None
    return axes[0] - count if axes[0] >= 0 else axes[0]


# -- What stands between the matmul of Q and K and the softmax -------------------------------------

_MAX_STEPS = 32


@dataclass(frozen=True, kw_only=True)
class Fill:
    """Scores that are set to one number."""

    value: ir.Value  # a boolean tensor
    shown: bool  # the value of the condition where the score stays
    fill: float  # the number elsewhere
    axes: Axes  # the axes of the scores there; the condition is aligned to the last of them
    # whether it was added to the score, which it is far larger than, and not put in its place
    added: bool = False

    @property
    def hides(self) -> bool:
        """Whether the key has no weight at all, whatever the others are."""
        return self.fill == -math.inf


@dataclass(frozen=True, kw_only=True)
class Bias:
    """A tensor that is added to the scores, times a constant."""

    value: ir.Value  # the tensor
    factor: float  # the constant
    axes: Axes  # the axes of the scores there; the tensor is aligned to the last of them


Term = Fill | Bias


@dataclass(frozen=True, kw_only=True)
class Multiplier:
    """A tensor that the scores are multiplied with, the same for all keys."""

    value: ir.Value  # the tensor
    axes: Axes  # the axes of the scores there; the tensor is aligned to the last of them
    divides: bool  # whether the scores are divided by it


class Wider(NamedTuple):
    """An axis of a mask that may be larger than that of the scores, which are then broadcast."""

    axis: str  # the axis of the scores
    value: ir.Value  # the mask
    at: int  # its axis


@dataclass(frozen=True, kw_only=True)
class Sink:
    """Scores that are appended to those of the keys, and whose weights are dropped."""

    value: ir.Value  # the scores
    axes: Axes  # their axes, that of the keys under the name it has without them
    outer: str  # the axis of the keys with them
    inner: str  # the same without them
    count: int  # how many there are
    first: bool  # whether they come first


@dataclass(kw_only=True)
class Scores:
    """The way from the matmul to the softmax."""

    alphabet: Alphabet  # the letters of the axes
    axes: Axes  # the axes where the walk is; at its end, those of the matmul
    matmul: Matmul | None = None  # the matmul of queries and keys
    factor: float = 1.0  # the constant the matmul is multiplied by
    terms: list[Term] = field(default_factory=list)  # the masks, the one nearest to the softmax first
    softcap: float = 0.0  # bound by a tanh; 0 for none
    softmax_dtype: ir.DataType | None = None  # type of the softmax where it is not that of the matmul
    multipliers: list[Multiplier] = field(default_factory=list)  # tensors that the scores are multiplied with
    # axes of masks and multipliers that may be larger than those of the scores
    wider: list[Wider] = field(default_factory=list)
    sink: Sink | None = None  # scores that are appended


def read_scores(softmax: Normalisation, alphabet: Alphabet) -> Scores:
    """Walk back from a softmax to the matmul of its scores.

    Raises:
        NotFused: Something stands there that Attention cannot express.
    """
    axes = tuple(alphabet.new(size) for size in sizes_of(softmax.source) or ())
    scores = Scores(alphabet=alphabet, axes=axes)
    value: ir.Value | None = softmax.source
    own = softmax.nodes
    for _ in range(_MAX_STEPS):
        node = value.producer() if value is not None else None
        if value is None or node is None or not _matmul_behind(value):
            what = "Its input is not a matmul of two computed tensors, so it is not dot-product attention."
            raise NoScores(what)
        # The nodes of a softmax count once.
        users = [user for user, _ in value.uses() if not is_op(user, "Shape") and user not in own[1:]]
        if value.is_graph_output() or len(users) > 1:
            names = [f"{user.op_type} {user.name}" for user, _ in value.uses()]
            names += ["an output of the graph"] if value.is_graph_output() else []
            what = "The scores before the softmax are used elsewhere too."
            raise NotExpressible(what, got=", ".join(names))
        if len(scores.axes) != (rank(value) or 0) or not scores.axes:
            raise NotFused("The file does not tell the shape of the scores.")
        if is_matmul(node):
            matmul = read_matmul(node)
            scores.matmul = matmul.named(alphabet, dict(zip(matmul.out, scores.axes, strict=True)))
            return scores
        if node.domain != "" or node.op_type not in _STEPS:
            raise NotFused(f"{node.op_type} stands between the scores and the softmax.")
        value, own = _STEPS[node.op_type](node, scores), ()
    raise NotFused("The way from the scores to the softmax is too long.")


def _transpose(node: ir.Node, scores: Scores) -> ir.Value | None:
    scores.axes = before_transpose(node, scores.axes)
    return node.inputs[0]


def _reshape(node: ir.Node, scores: Scores) -> ir.Value | None:
    source = node.inputs[0]
    axes = scores.alphabet.regrouped(scores.axes, sizes_of(source))
    if axes is None:
        got = f"{sizes_of(source)} to {sizes_of(node.outputs[0])}"
        what = f"{node.op_type} stands between the scores and the softmax, of unknown sizes."
        raise NotFused(what, got=got)
    scores.axes = axes
    return source


def _cast(node: ir.Node, scores: Scores) -> ir.Value | None:
    source, to = node.inputs[0], node.outputs[0].dtype
    first = input_at(made_by(source, "Cast"), 0)
    alone = source is not None and len(source.uses()) == 1 and holds(source.dtype, to)
    if alone and first is not None and first.dtype == to:
        return first  # there and back
    if source is None or not holds(to, source.dtype):
        got = f"{None if source is None else source.dtype} to {to}"
        raise NotExpressible("The scores are rounded before the softmax.", got=got)
    if to != source.dtype:
        scores.softmax_dtype = scores.softmax_dtype or to
    return source


def _scale(node: ir.Node, scores: Scores) -> ir.Value | None:
    inner, other = _split(node)
    factor = scalar_of(other)
    if node.op_type == "Div" and inner is not node.inputs[0]:
        raise NotFused("Something is divided by the scores.", got=other.name)
    _check_spread(node, inner, other, scores)
    if factor is None:
        dims = sizes_of(other)
        if dims is None or (dims and dims[-1] != 1) or other.dtype != inner.dtype:
            what = "The scores are scaled by something that is not the same for all keys."
            raise NotFused(what, got=other.name)
        scores.multipliers.append(Multiplier(value=other, axes=scores.axes, divides=node.op_type == "Div"))
        return inner
    scores.factor *= 1.0 / factor if node.op_type == "Div" else factor
    if not scores.factor > 0:
        raise NotExpressible("The scores are scaled by a number that is not positive.", got=factor)
    return inner


def _check_spread(node: ir.Node, inner: ir.Value | None, other: ir.Value, scores: Scores) -> None:
    """Attention has the batch and the heads of Q, whatever the mask has."""
    before, after = sizes_of(inner), sizes_of(node.outputs[0])
    if before is None or after is None or len(before) != len(after):
        raise NotFused("The file does not tell the shape of the scores.")
    if any(size == 1 and result != 1 for size, result in zip(before, after, strict=True)):
        raise NotFused("A mask makes the scores larger than the matmul of Q and K.", got=list(after))
    dims = sizes_of(other) or []
    for at, size in enumerate(dims, len(before) - len(dims)):
        if size not in (1, before[at]) and not isinstance(before[at], int):
            scores.wider.append(Wider(scores.axes[at], other, at - len(before) + len(dims)))


def _add(node: ir.Node, scores: Scores) -> ir.Value | None:
    inner, other = _split(node)
    if node.op_type == "Sub" and inner is not node.inputs[0]:
        raise NotFused("The scores are subtracted from something.")
    factor = -scores.factor if node.op_type == "Sub" else scores.factor
    return _mask(node, inner, Bias(value=other, factor=factor, axes=scores.axes), scores)


def _where(node: ir.Node, scores: Scores) -> ir.Value | None:
    condition, first, second = node.inputs
    if condition is None or first is None or second is None:
        raise NotFused("A Where of the scores lacks an input.")
    shown = _matmul_behind(first) is not None
    inner, other = (first, second) if shown else (second, first)
    fill = scalar_of(other)
    if fill is None:
        raise NotFused("Masked scores are set to something that is not one constant.", got=other.name)
    fill *= scores.factor
    return _mask(node, inner, Fill(value=condition, shown=shown, fill=fill, axes=scores.axes), scores)


def _mask(node: ir.Node, inner: ir.Value, term: Term, scores: Scores) -> ir.Value:
    _check_spread(node, inner, term.value, scores)
    if scores.softcap:
        raise NotExpressible("A mask is applied before the softcap; Attention applies it after.")
    if scores.multipliers:
        raise NotExpressible("A mask is applied before the scores are scaled by a tensor.")
    scores.terms.append(term)
    return inner


def _concat(node: ir.Node, scores: Scores) -> ir.Value | None:
    inner = [value for value in node.inputs if _matmul_behind(value)]
    others = [value for value in node.inputs if value not in inner]
    axis = node.attributes.get_int("axis", -1)
    if len(inner) != 1 or len(others) != 1 or inner[0] is None or others[0] is None or scores.sink:
        raise NotFused("Concat of several parts stands between the scores and the softmax.", got=node.name)
    count, keys = (sizes_of(value) or [None] for value in (others[0], inner[0]))
    size = count[axis] if -len(count) <= axis < len(count) else None
    plain = scores.factor == 1.0 and not (scores.terms or scores.multipliers or scores.softcap)
    outer = scores.axes[axis]
    if not plain or not isinstance(size, int) or len(outer) != 1 or len(keys) != len(scores.axes):
        raise NotExpressible("The scores are changed after others were appended to them.", got=node.name)
    letter = scores.alphabet.new(keys[axis])
    scores.axes = tuple(letter if each == outer else each for each in scores.axes)
    first = node.inputs[0] is others[0]
    scores.sink = Sink(value=others[0], axes=scores.axes, outer=outer, inner=letter, count=size, first=first)
    return inner[0]


def _tanh(node: ir.Node, scores: Scores) -> ir.Value | None:
    if scores.softcap or scores.multipliers:
        raise NotExpressible("The scores pass two tanh, or are scaled by a tensor after one.")
    # softcap · tanh(x / softcap): the factors so far are the softcap, those before it the scale over it.
    scores.softcap = scores.factor
    return node.inputs[0]


_STEPS = {"Cast": _cast, "Where": _where, "Tanh": _tanh, "Concat": _concat}
_STEPS |= dict.fromkeys(("Mul", "Div"), _scale) | dict.fromkeys(("Add", "Sub"), _add)
_STEPS |= dict.fromkeys(("Identity", "Transpose"), _transpose)
_STEPS |= dict.fromkeys(("Reshape", "Squeeze", "Unsqueeze"), _reshape)
_PASSED = frozenset({*_STEPS, "Slice", "Max", "Min", "Clip"})


def _split(node: ir.Node) -> tuple[ir.Value, ir.Value]:
    """The input that carries the scores, and the other."""
    first, second = node.inputs
    if first is None or second is None:
        raise NotFused(f"A {node.op_type} of the scores lacks an input.")
    one, other = _matmul_behind(first), _matmul_behind(second)
    if one and other and not is_op(node, "Add", "Sub"):
        raise NotFused(f"The scores are made of two matmuls ({node.op_type}).")
    # Of two that are added, the nearer is that of Q and K, and the other a bias, as in relative attention.
    return (first, second) if one and (not other or one <= other or is_op(node, "Sub")) else (second, first)


def _matmul_behind(value: ir.Value | None) -> tuple[bool, int] | None:
    """How a matmul of two computed tensors stands behind a value, with only small steps between.

    Returns:
        Whether its operands differ in the number of axes, as with a table of positions, and how many nodes
        were passed; None where there is no such matmul.
    """
    pending, passed = [value], set[ir.Node]()
    while pending and len(passed) < 200:
        node = None if (each := pending.pop(0)) is None else each.producer()
        if node is None or node in passed:
            continue
        if is_matmul(node):
            return rank(node.inputs[0]) != rank(node.inputs[1]), len(passed)
        passed.add(node)
        if node.domain == "" and node.op_type in _PASSED:
            pending.extend(node.inputs)
    return None


# -- What stands between the softmax and the matmul with V -----------------------------------------

# What a candidate's weights may pass on the way to the matmul: more than can be fused, so that it is named.
_PASSED_WEIGHTS = frozenset(
    {"Cast", "Identity", "Dropout", "Where", "Mul", "Div", "Pow", "Transpose", "Reshape", "Slice", "Squeeze"}
    | {"Unsqueeze", "Expand", "Gather"}
)
_MAX_STEPS_WEIGHTS = 8


class UsedWeights(NamedTuple):
    """Weights that something else than the matmul with V uses, and their axes."""

    value: ir.Value
    axes: Axes


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The way from the softmax to the matmul with V."""

    value: ir.Value  # the weights as the matmul takes them
    matmul: ir.Node  # the node of the matmul
    position: int  # which of its operands they are
    axes: Axes  # their axes there
    guarded: bool  # whether NaN is replaced by 0, as PyTorch's own attention does for fully masked queries
    used: UsedWeights | None  # the weights, where they are used elsewhere too


def comes_to_matmul(weights: ir.Value) -> bool:
    """Whether the result of a softmax comes to a matmul of two computed tensors."""
    pending = [(weights, 0)]
    while pending:
        value, steps = pending.pop()
        for node, _ in value.uses():
            if is_matmul(node):
                return True
            if node.domain == "" and node.op_type in _PASSED_WEIGHTS and steps < _MAX_STEPS_WEIGHTS:
                pending.append((node.outputs[0], steps + 1))
    return False


def read_weights(softmax: Normalisation, axes: Axes, alphabet: Alphabet, sink: Sink | None) -> Weights:
    """Walk from a softmax to the matmul with V.

    Raises:
        NotFused: The weights are changed on the way.
    """
    value, guarded = softmax.result, False
    used: UsedWeights | None = None
    passed = list[ir.Value]()
    for _ in range(_MAX_STEPS_WEIGHTS):
        after = _after_guard(value)
        if after is not None:
            value, guarded = after, True
            continue
        node, position, alone = _use(value)
        if not alone and used is not None:
            raise NotExpressible("The attention weights are used elsewhere too, in two ways.", got=value.name)
        used = used if alone else UsedWeights(value, axes)
        if is_matmul(node):
            # They may be rounded once, to the type that the matmul takes: so does Attention.
            if lossy := [str(each.dtype) for each in passed if not holds(each.dtype, value.dtype)]:
                what = "The attention weights are rounded on the way to V."
                raise NotExpressible(what, got=", ".join(lossy))
            if sink is not None and (used is not None or sink.outer in "".join(axes)):
                raise NotExpressible("The weights of appended scores are used.", got=value.name)
            return Weights(value=value, matmul=node, position=position, axes=axes, guarded=guarded, used=used)
        if is_op(node, "Transpose"):
            axes = tuple(axes[axis] for axis in perm_of(node))
        elif is_op(node, "Reshape", "Squeeze", "Unsqueeze") and position == 0:
            moved = alphabet.regrouped(axes, sizes_of(node.outputs[0]))
            if moved is None:
                what = f"{node.op_type} stands between the softmax and the matmul with V, of unknown sizes."
                raise NotFused(what, got=node.name)
            axes = moved
        elif sink is not None and is_op(node, "Slice") and position == 0:
            axes = _without_sink(node, axes, sink)
        elif is_op(node, "Dropout"):
            training = input_at(node, 2)
            if training is not None and ((numbers := array_of(training)) is None or bool(numbers.any())):
                what = "Dropout of the weights is active: export the module in eval mode."
                raise NotFused(what, got=node.name)
        elif not is_op(node, "Cast", "Identity"):
            raise NotFused(f"{node.op_type} stands between the softmax and the matmul with V.", got=node.name)
        passed.append(value)
        value = node.outputs[0]
    raise NotFused("The way from the softmax to the matmul with V is too long.")


def _without_sink(node: ir.Node, axes: Axes, sink: Sink) -> Axes:
    """The axes of the weights behind a Slice that drops those of appended scores, and nothing else."""
    starts, ends, at, steps = (ints_of(input_at(node, place)) for place in (1, 2, 3, 4))
    key = axes.index(sink.outer) if sink.outer in axes else -1
    here = at is not None and [each % len(axes) for each in at] == [key] and (steps or [1]) == [1]
    wanted = ([sink.count], None) if sink.first else ([0], [-sink.count])
    end = ends is not None and (ends[0] >= 2**31 - 1 if sink.first else ends == wanted[1])
    if sink.first or not end:  # the end may be the number of keys itself
        found = sizes_of(node.outputs[0])
        size = (sizes_of(node.inputs[0]) or [None])[key]
        kept = size - sink.count if isinstance(size, int) else None
        end = end or (found is not None and kept is not None and found[key] == kept)
    if not here or starts != wanted[0] or not end:
        raise NotFused("Slice stands between the softmax and the matmul with V.", got=node.name)
    return tuple(sink.inner if each == sink.outer else each for each in axes)


def _use(value: ir.Value) -> tuple[ir.Node, int, bool]:
    """The node on the way to the matmul with V, the position of the weights in it, whether it is alone."""
    uses = [use for use in value.uses() if not is_op(use.node, "Shape")]
    found = [
        use
        for use in uses
        if is_matmul(use.node)
        or (
            use.node.domain == ""
            and use.node.op_type in _PASSED_WEIGHTS
            and comes_to_matmul(use.node.outputs[0])
        )
    ]
    if not found:
        raise NotFused("The weights come to no matmul.", got=value.name)
    return found[0].node, found[0].idx, len(uses) == 1 and not value.is_graph_output()


def _after_guard(value: ir.Value) -> ir.Value | None:
    """The result of `Where(IsNaN(weights), 0, weights)`, if that is what becomes of the weights."""
    uses = [node for node, _ in value.uses() if not is_op(node, "Shape")]
    if len(uses) != 2 or value.is_graph_output():
        return None
    check = next((node for node in uses if is_op(node, "IsNaN")), None)
    choice = next((node for node in uses if is_op(node, "Where")), None)
    if check is None or choice is None or len(check.outputs[0].uses()) != 1:
        return None
    right = choice.inputs[0] is check.outputs[0] and scalar_of(choice.inputs[1]) == 0.0
    return choice.outputs[0] if right and choice.inputs[2] is value else None
