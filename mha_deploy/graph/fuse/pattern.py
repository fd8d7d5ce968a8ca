"""Recognize one attention: from the softmax back to Q and K, on to V, and what lies between."""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import onnx_ir as ir

from mha_deploy.bundle.manifest import GENERATED
from mha_deploy.graph.fuse.mask_pattern import (
    Axes,
    Behind,
    Bias,
    Fill,
    Multiplier,
    Sources,
    Term,
    decide_masking,
    hide_behind,
    settled,
)
from mha_deploy.graph.fuse.values import (
    NoScores,
    NotExpressible,
    NotFused,
    Size,
    array_of,
    equation_of,
    factors_of,
    holds,
    inverse_of,
    product,
    quotient,
    same_dims,
    scalar_of,
    sizes_of,
    softmax_type_of,
)
from mha_deploy.graph.ir import (
    constant,
    constant_ints,
    input_at,
    is_op,
    made_by,
    node_name,
    nodes_behind,
    perm,
    rank,
    same_size,
)
from mha_deploy.graph.roles import MOVES

# -- Axes: letters as in an einsum, several for an axis that joins others --------------------------


class Alphabet:
    """The letters of an attention's axes and their sizes. A Reshape that splits an axis splits its letter."""

    def __init__(self) -> None:
        self.sizes: dict[str, Size] = {}
        self._parts: dict[str, str] = {}
        self._ones: list[str] = []
        self._other: dict[Size, Size] = {}  # by the size of scores with a mask, that without it

    def new(self, size: Size) -> str:
        """A letter that is not used yet."""
        if len(self.sizes) == len(string.ascii_letters):
            raise NotFused("The tensors of the attention have too many axes.")
        letter = string.ascii_letters[len(self.sizes)]
        self.sizes[letter] = size
        return letter

    def resolved(self, axes: Axes) -> Axes:
        """The same axes in letters that were not split."""
        if not any(letter in self._parts for axis in axes for letter in axis):
            return axes
        return self.resolved(tuple("".join(self._parts.get(each, each) for each in axis) for axis in axes))

    def split(self, letter: str, *sizes: Size) -> None:
        """Take an axis apart into two of these sizes."""
        self._parts[letter] = "".join(self.new(size) for size in sizes)

    def regrouped(self, axes: Axes, dims: Sequence[Size] | None) -> Axes | None:
        """The axes of the same numbers in another shape; None where the sizes do not prove it."""
        if dims is None:
            return None
        dims = [self._other.get(size, size) for size in dims]
        return self._from_the_left(axes, dims) or self._from_both_sides(axes, dims)

    def take_for(self, size: Size, other: Size) -> None:
        """Let an axis of one size have another: it is as large, or one of the two is 1."""
        self._other[size] = other
        self.sizes = {letter: other if own == size else own for letter, own in self.sizes.items()}

    def _from_both_sides(self, axes: Axes, dims: Sequence[Size]) -> Axes | None:
        """The same where a size is not known: what lies between equal axes is as large before as after."""
        left, right = list("".join(self.resolved(axes))), list(dims)
        ends = list[list[str]]()
        for at in (0, -1):
            ends.append([])
            while left and right and right[at] is not None and self.sizes[left[at]] == right[at]:
                ends[-1].append(left.pop(at))
                right.pop(at)
        if len(right) == 1 and left:
            middle = ["".join(left)]
        elif len(left) == 1 and len(right) > 1 and right.count(None) < 2:
            self._parts[left[0]] = "".join(middle := [self.new(size) for size in right])
        else:
            return None
        return (*ends[0], *middle, *reversed(ends[1]))

    def _from_the_left(self, axes: Axes, dims: Sequence[Size]) -> Axes | None:
        left, result = list("".join(self.resolved(axes))), list[str]()
        joined = "".join(axis for axis in self.resolved(axes) if len(axis) > 1)
        absorbed = list[tuple[int, str]]()  # axes of size 1, and what they were joined with
        for at, size in enumerate(dims):
            rest, taken = size, ""
            if rest == 1 and left and self.sizes[left[0]] == 1:
                taken = left.pop(0)
            while rest != 1:
                if rest is None or not left:
                    return None
                letter = left.pop(0)
                if self.sizes[letter] == 1 and result and not taken:  # one head is part of the batch
                    result[-1] += letter
                    absorbed.append((len(result) - 1, letter))
                    continue
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
            if not taken and absorbed:  # it was moved
                place, taken = absorbed.pop()
                result[place] = result[place].replace(taken, "")
            elif not taken and 1 not in dims[at + 1 :]:  # one that is joined with others may stand anywhere
                taken = next((each for each in left if each in joined and self.sizes[each] == 1), "")
                left = [each for each in left if each != taken]
            result.append(taken or self._one("".join((*axes, *result))))
        while left and self.sizes[left[0]] == 1 and result:
            result[-1] += left.pop(0)
        return None if left else tuple(result)

    def _one(self, taken: str) -> str:
        """A letter for an axis of size 1 that a Reshape adds: if there is one, that which another dropped."""
        free = [letter for letter in self._ones if letter not in taken]
        if not free:
            free = [self.new(1)]
            self._ones += free
        return free[0]


# -- The two matmuls of attention, in the letters of an einsum however they are spelled ------------

_MAX_RANK = 8


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

    def resolved(self, alphabet: Alphabet) -> Matmul:
        """The same matmul in letters that were not split."""
        left, right, out = (alphabet.resolved(axes) for axes in (*self.axes, self.out))
        return replace(self, axes=(left, right), out=out)


def is_matmul(node: ir.Node | None) -> bool:
    """Whether a node multiplies two tensors that are both computed: a weight makes it a projection."""
    if node is None or not is_op(node, "MatMul", "Einsum") or len(node.inputs) != 2:
        return False
    # A constant of three or more axes is a learned query, of two a weight.
    return all(each is not None and (constant(each) is None or (rank(each) or 0) > 2) for each in node.inputs)


def read_matmul(node: ir.Node, alphabet: Alphabet, at: int, axes: Axes) -> Matmul:
    """Read a MatMul or an Einsum of which an operand (`at` 0 or 1) or the result (2) has these axes."""
    left, right = filter(None, node.inputs)
    name = node_name(node)
    ranks = [(rank(value) or 0) for value in (left, right)]
    if 0 in ranks:
        raise NotFused("The file does not state the shapes of Q, K and V.", got=f"operands of {name}")
    if is_op(node, "MatMul"):
        if ranks[0] != ranks[1] or not 3 <= ranks[0] <= _MAX_RANK:
            raise NotFused(f"The matmul {name} is of tensors with {ranks[0]} and {ranks[1]} axes.")
        batch = string.ascii_uppercase[: ranks[0] - 2]
        texts = [f"{batch}sd", f"{batch}dt", f"{batch}st"]
    else:
        inputs, out = equation_of(node)
        texts = [*inputs, out]
        if len(texts) != 3:
            raise NotFused(f"The einsum {name} is not a matmul of two tensors.")
        # The axes that an ellipsis stands for.
        hidden = [count - len(text.replace("...", "")) for text, count in zip(texts, ranks, strict=False)]
        hidden.append(max(*hidden, 0))
        named = {*itertools.chain(*texts)}
        dots = "".join(letter for letter in string.ascii_letters if letter not in named)[: hidden[-1]]
        pairs = zip(texts, hidden, strict=True)
        texts = [text.replace("...", dots[len(dots) - here :] if here else "") for text, here in pairs]
    if any(len(set(text)) != len(text) for text in texts):
        raise NotFused(f"The einsum {name} takes a diagonal.")
    if len(texts[at]) != len(axes):
        raise NotFused(f"The matmul {name} has another number of axes than the scores.")
    names = dict(zip(texts[at], axes, strict=True))
    for value, text in zip((left, right), texts, strict=False):
        for letter, size in zip(text, sizes_of(value) or (), strict=False):
            if letter not in names:
                names[letter] = alphabet.new(size)
    first, second, result = (tuple(names.get(letter, letter) for letter in text) for text in texts)
    return Matmul(node=node, values=(left, right), axes=(first, second), out=result)


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

    def dim(self, letters: str) -> Size:
        """The size of an axis, or of some that are joined; 1 for an axis that the tensor does not have."""
        dims = sizes_of(self.value) or ()
        if letters in self.axes and self.axes.index(letters) < len(dims):
            return dims[self.axes.index(letters)]
        if len(letters) > 1:
            return product(map(self.dim, letters))
        return self.sizes.get(letters) if letters in "".join(self.axes) else 1


def unwrap(
    operand: Operand, *, wanted: Axes, head: str | None, scaled: bool = True, dtype: ir.DataType | None = None
) -> Operand:
    """Walk back over layout, constant factors (`scaled`), upcasts of a `dtype`, and repeated heads.

    A tensor that has the `wanted` order of axes, in which Attention takes it, is taken there.
    """
    ready: Operand | None = None
    while True:
        if ready is None and operand.axes == wanted:
            ready = operand
        if (before := _before_transpose(operand) or _before_join(operand)) is None:
            before = (_before_factor(operand) if scaled else None) or _before_cast(operand, dtype)
            if head:
                before = before or _before_interleave(operand, head) or _before_expand(operand, head)
                before = before or _before_choice(operand, head)
            if before is None:
                return ready or operand
            ready = None
        operand = before


def _before_transpose(operand: Operand) -> Operand | None:
    node, order = made_by(operand.value, "Identity", "Transpose"), operand.axes
    if node is not None and (source := node.inputs[0]) is not None:
        return replace(operand, value=source, axes=before_transpose(node, order))
    # `Reshape(Transpose(Reshape(x)))`, as the exporter writes scaled_dot_product_attention. The shapes prove
    # that it only swaps the last two axes of x: the first reshape keeps them and joins the others, the second
    # takes those apart again.
    chain = _chain(operand.value, ("Reshape",), ("Transpose",), ("Reshape",))
    swap = chain[1].producer() if chain else None
    if swap is None or perm(swap) != (0, 2, 1):
        return None
    result, _, flat, dims = (sizes_of(each) or () for each in chain)
    if len(flat) != 3 or len(dims) < 2 or not same_dims(flat[1:], dims[-2:]):
        return None
    if not same_dims(result, (*dims[:-2], dims[-1], dims[-2])):
        return None
    return replace(operand, value=chain[-1], axes=(*order[:-2], order[-1], order[-2]))


def before_transpose(node: ir.Node, axes: Axes) -> Axes:
    """The axes of what a Transpose or an Identity takes, from those that it gives."""
    before = list(axes)
    for at, axis in enumerate(perm(node) if is_op(node, "Transpose") else ()):
        before[axis] = axes[at]
    return tuple(before)


def _before_join(operand: Operand) -> Operand | None:
    """A tensor before a Reshape joined axes that the attention has apart."""
    source = input_at(made_by(operand.value, "Reshape"), 0)
    apart, dims = tuple("".join(operand.axes)), sizes_of(source)
    if source is None or dims is None or apart == operand.axes or None in dims:
        return None
    own = dict(zip(operand.axes, sizes_of(operand.value) or (), strict=False))
    known = [own.get(letter, operand.sizes.get(letter)) for letter in apart]
    return replace(operand, value=source, axes=apart) if dims == known else None


def _before_cast(operand: Operand, dtype: ir.DataType | None) -> Operand | None:
    """A tensor before it was cast to a type that has all its values."""
    source = input_at(made_by(operand.value, "Cast"), 0)
    if dtype is None or source is None or operand.value.dtype == dtype or source.dtype != dtype:
        return None
    return replace(operand, value=source) if holds(operand.value.dtype, source.dtype) else None


def _chain(value: ir.Value, *steps: tuple[str, ...]) -> list[ir.Value]:
    """A value and what it was made from, by nodes of these operators, the last one first; else nothing."""
    chain = [value]
    for op_types in steps:
        if (source := input_at(made_by(chain[-1], *op_types), 0)) is None:
            return []
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
    copied, axes = input_at(made_by(operand.value, "Reshape"), 0), operand.axes
    result, swap = sizes_of(operand.value), made_by(copied, "Transpose")
    if result is None or len(result) != len(axes):
        return None
    if swap is not None and perm(swap) == (0, 2, 1):  # one Reshape joins the heads, and them with the batch
        flat = sizes_of(swap.inputs[0]) or []
        copied = input_at(made_by(swap.inputs[0], "Reshape"), 0)
        if not same_dims(flat[1:], (sizes_of(copied) or ())[-2:]) or head in axes[-2:]:
            return None
        axes, result = (*axes[:-2], axes[-1], axes[-2]), [*result[:-2], result[-1], result[-2]]
    single, wide = _source_of_copies(copied), sizes_of(copied)
    if single is None or wide is None or len(wide) != len(result) + 1 or head not in axes:
        return None
    at = axes.index(head)
    heads, group = wide[at : at + 2]
    joined = [*wide[:at], product((heads, group)), *wide[at + 2 :]]
    one = [*wide[: at + 1], 1, *wide[at + 2 :]]
    if not isinstance(heads, int) or not isinstance(group, int) or not same_dims(result, joined):
        return None
    if not same_dims(sizes_of(single) or (), one):
        return None
    axes = (*axes[: at + 1], "", *axes[at + 1 :])
    while (node := made_by(single, "Transpose")) is not None and node.inputs[0] is not None:
        single, axes = node.inputs[0], before_transpose(node, axes)
    source, sizes = input_at(made_by(single, "Unsqueeze", "Reshape"), 0), sizes_of(single) or []
    place = axes.index("")
    if source is None or not same_dims(sizes_of(source) or (), sizes[:place] + sizes[place + 1 :]):
        return None
    return replace(operand, value=source, axes=tuple(filter(None, axes)), group=operand.group * group)


def _source_of_copies(value: ir.Value | None) -> ir.Value | None:
    """What Expand or Tile copies, or Concat joins with itself."""
    node = made_by(value, "Expand", "Tile", "Concat")
    first = input_at(node, 0)
    if node is None or first is None or not is_op(node, "Concat"):
        return first
    source, sizes = input_at(made_by(first, "Unsqueeze", "Reshape"), 0), sizes_of(first)
    for other in node.inputs[1:]:
        before = input_at(made_by(other, "Unsqueeze", "Reshape"), 0)
        same = before is not None and before is source and same_dims(sizes_of(other) or (), sizes or ())
        if other is not first and not same:
            return None
    return first


def _before_expand(operand: Operand, head: str) -> Operand | None:
    """One head, before it was copied to all of them."""
    inner = _source_of_copies(operand.value)
    result, source = sizes_of(operand.value), sizes_of(inner)
    if inner is None or result is None or source is None or head not in operand.axes:
        return None
    at = operand.axes.index(head)
    copies = result[at]
    if not isinstance(copies, int) or not same_dims(source, (*result[:at], 1, *result[at + 1 :])):
        return None
    return replace(operand, value=inner, group=operand.group * copies)


def _before_choice(operand: Operand, head: str) -> Operand | None:
    """The heads before a Gather that takes each of them several times in turn."""
    node = made_by(operand.value, "Gather")
    sizes, chosen = sizes_of(input_at(node, 0)), array_of(input_at(node, 1))
    if node is None or sizes is None or chosen is None or chosen.ndim != 1 or head not in operand.axes:
        return None
    at = operand.axes.index(head)
    heads, source = (sizes[at] if len(sizes) == len(operand.axes) else None), node.inputs[0]
    if source is None or not isinstance(heads, int) or node.attributes.get_int("axis", 0) % len(sizes) != at:
        return None
    group = max(chosen.size // max(heads, 1), 1)
    if chosen.tolist() != [each for each in range(heads) for _ in range(group)] or group == 1:
        return None
    return replace(operand, value=source, group=operand.group * group)


# -- The softmax: the operator, or an exponential over its sum -------------------------------------


@dataclass(frozen=True, kw_only=True)
class Normalisation:
    """A softmax."""

    node: ir.Node  # its last node, whose output are the weights
    source: ir.Value  # what it normalizes
    axis: int  # the axis of the keys


_ENDS_SOFTMAX = frozenset({"Softmax", "Exp", "Div", "Mul"})


def softmax_at(node: ir.Node) -> Normalisation | None:
    """The softmax that ends in a node: a Softmax, `exp(log_softmax(x))`, or `exp(x) / sum(exp(x))`."""
    source = node.inputs[0] if node.op_type in _ENDS_SOFTMAX and node.inputs else None
    if source is None:
        return None
    if is_op(node, "Softmax"):
        return Normalisation(node=node, source=source, axis=node.attributes.get_int("axis", -1))
    inner = made_by(source, "LogSoftmax")
    if is_op(node, "Exp") and inner is not None and inner.inputs[0] is not None and _is_used_once(source):
        return Normalisation(node=node, source=inner.inputs[0], axis=inner.attributes.get_int("axis", -1))
    if not is_op(node, "Div", "Mul") or len(node.inputs) != 2:
        return None
    # `Div(Exp(x), ReduceSum(Exp(x)))` or `Mul(Exp(x), Reciprocal(ReduceSum(Exp(x))))`.
    for powers, divisor in (node.inputs, node.inputs[::-1]) if is_op(node, "Mul") else (node.inputs,):
        if is_op(node, "Mul"):
            divisor = input_at(inverse_of(divisor), 0)
        power, total = made_by(powers, "Exp"), made_by(divisor, "ReduceSum")
        if powers is None or power is None or total is None or total.inputs[0] is not powers:
            continue
        axis, before = _reduced_axis(total), power.inputs[0]
        own = not powers.is_graph_output() and {user for user, _ in powers.uses()} == {node, total}
        if axis is not None and before is not None and own:
            return Normalisation(node=node, source=before, axis=axis)
    return None


def _is_used_once(value: ir.Value) -> bool:
    return len(value.uses()) == 1 and not value.is_graph_output()


def _reduced_axis(node: ir.Node) -> int | None:
    """The one axis that a reduction runs over, and keeps; counted from the end."""
    axes = constant_ints(node, 1) if len(node.inputs) > 1 else node.attributes.get_ints("axes") or ()
    count = rank(node.inputs[0])
    if axes is None or len(axes) != 1 or count is None or node.attributes.get_int("keepdims", 1) != 1:
        return None
    return axes[0] - count if axes[0] >= 0 else axes[0]


# -- What stands between the matmul of Q and K and the softmax -------------------------------------

_MAX_STEPS = 32
_MAX_BIASES = 4  # matmuls that are tried as that of Q and K
_MAX_BETWEEN = 200  # nodes that are searched for other paths from the scores to the softmax
MAX_NEAR = 64  # nodes that are searched for what a message names


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
    """What lies between the matmul and the softmax."""

    alphabet: Alphabet  # the letters of the axes
    axes: Axes  # the axes where the walk is; at its end, those of the matmul
    key: str  # the axis of the keys among them
    factor: float = 1.0  # the constant the matmul is multiplied by
    terms: list[Term] = field(default_factory=list)  # the masks, the one nearest to the softmax first
    softcap: float = 0.0  # bound by a tanh; 0 for none
    softmax_dtype: ir.DataType | None = None  # type of the softmax where it is not that of the matmul
    multipliers: list[Multiplier] = field(default_factory=list)  # tensors that the scores are multiplied with
    # axes of masks and multipliers that may be larger than those of the scores
    wider: list[Wider] = field(default_factory=list)
    sink: Sink | None = None  # scores that are appended
    shifts: list[ir.Value] = field(default_factory=list)  # what was added to all keys alike, and cancels
    elsewhere: bool = False  # whether the file uses them, or what they are before a mask, for something else
    clipped: ir.DataType | None = None  # the type whose lowest number bounds the masked scores, if one does
    overflows: bool = False  # whether the number of a mask may be infinite in a run
    bound: float = math.inf  # of scores that none is expected to reach
    biases: set[ir.Node] = field(default_factory=set)  # matmuls that are added to those of Q and K
    chosen: list[ir.Node] = field(
        default_factory=list
    )  # matmuls that were taken for it, where others are added

    @property
    def ignore_shifts(self) -> bool:
        """Whether what is added to all keys of a query alike cancels in the softmax.

        Between the two there must be no softcap, no bound, no appended scores, no factors of single keys, and
        no masked scores that are set to a number near to others: they are not shifted.
        """
        filled = any(isinstance(term, Fill) and term.nearest > _FAR for term in self.terms)
        uneven = any(each.of_keys for each in self.multipliers)
        return not (filled or uneven or self.softcap or self.clipped is not None or self.sink)

    def resolved(self) -> Scores:
        """The same in letters that were not split."""
        whole = self.alphabet.resolved
        return replace(
            self,
            terms=[
                replace(
                    each,
                    axes=whole(each.axes),
                    times=tuple(replace(factor, axes=whole(factor.axes)) for factor in each.times),
                )
                for each in self.terms
            ],
            multipliers=[replace(each, axes=whole(each.axes)) for each in self.multipliers],
            wider=[each._replace(axis=whole((each.axis,))[0]) for each in self.wider],
            sink=self.sink and replace(self.sink, axes=whole(self.sink.axes)),
        )


def read_scores(softmax: Normalisation, scores: Scores) -> Matmul:
    """Walk back from a softmax to the matmul of its scores."""
    alphabet, key = scores.alphabet, scores.key
    value: ir.Value | None = softmax.source
    maximum = set[ir.Node]()  # what else uses the scores, for the maximum that is subtracted from them
    for _ in range(_MAX_STEPS):
        node = value.producer() if value is not None else None
        if value is None or node is None or not _matmul_behind(value, scores.biases):
            what = "Its input is not a matmul of two computed tensors, so it is not dot-product attention."
            raise NoScores(what)
        users = [user for user, _ in value.uses() if not is_op(user, "Shape") and user not in maximum]
        if value.is_graph_output() or len(users) > 1:
            biases = {each.value for each in scores.terms if isinstance(each, Bias) or each.nearest <= _FAR}
            if len(set(users).intersection(_nodes_between(value, softmax.source, biases))) > 1:
                names = ", ".join(f"{user.op_type} {node_name(user)}" for user in users)
                raise NotExpressible("The scores come to the softmax on several paths.", got=names)
            scores.elsewhere = True
        if not key or len(scores.axes) != (rank(value) or 0):
            raise NotFused("The file does not state the shape of the scores.")
        if is_matmul(node):
            scores.overflows = any(
                isinstance(each, Fill) and each.may_overflow(value.dtype) for each in scores.terms
            )
            scores.terms = settled(scores.terms, value.dtype)
            return read_matmul(node, alphabet, 2, scores.axes)
        if node.domain != "" or node.op_type not in _STEPS:
            raise NotFused(f"{node.op_type} stands between the scores and the softmax.")
        found = _subtracted_maximum(node, scores)
        maximum = set() if found is None else found[0]
        value = _STEPS[node.op_type](node, scores) if found is None else found[1]
    raise NotFused("Too many nodes lie between the scores and the softmax.")


def _nodes_between(first: ir.Value, last: ir.Value, biases: set[ir.Value]) -> Iterator[ir.Node]:
    """The nodes that a value is computed by, those behind another value left out, as far as they are near.

    A bias may be computed from the scores, as contextual positions are, and so may a mask, as that of the
    largest ones: it is a mask like any other.
    """
    ends = {first, *biases}
    behind = nodes_behind([last], lambda node: [each for each in node.inputs if each not in ends])
    return itertools.islice(behind, _MAX_BETWEEN)


_FAR_OUT = 1e4  # no score is expected to be as large
_FAR = -1e8  # scores that are set to it stay far below others that are shifted
_CANCELLED = ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceLogSumExp", "TopK")
# What may stand between those and the difference: bounds, and another number for one that is not finite.
_SHIFTING = frozenset(
    {*_CANCELLED, "Max", "Min", "Clip", "Where", "IsInf", "IsNaN", "Not", "Or", "And", "Abs"}
)
_SHIFTING |= {*MOVES, "Cast", "Identity", "Constant", "Equal", "Less", "Greater", "Shape"}


def _subtracted_maximum(node: ir.Node, scores: Scores) -> tuple[set[ir.Node], ir.Value] | None:
    """The nodes that take the scores for their maximum over the keys, where this node subtracts it from them.

    Then the scores, which may as well be subtracted from it. The same goes for their mean.
    """
    if not is_op(node, "Sub") or not scores.ignore_shifts:
        return None
    axis = scores.axes.index(scores.key) - len(scores.axes) if scores.key in scores.axes else None
    for inner, top in (node.inputs, node.inputs[::-1]):
        if inner is not None and (takers := _takers_of(inner, top, axis)):
            scores.factor *= 1.0 if inner is node.inputs[0] else -1.0
            return takers, inner
    return None


def _takers_of(inner: ir.Value, top: ir.Value | None, axis: int | None) -> set[ir.Node]:
    """The nodes that take scores for what `top` is computed from, the same for all keys; else nothing."""
    if (copied := made_by(top, "Expand")) is not None:
        top = copied.inputs[0]
    dims = sizes_of(top)
    if axis is None or dims is None or top is None or (len(dims) >= -axis and dims[axis] != 1):
        return set()

    def given(node: ir.Node) -> Sequence[ir.Value | None]:
        return () if inner in node.inputs else node.inputs[:1] if is_op(node, *MOVES) else node.inputs

    behind = nodes_behind([top], given)
    nodes = list(itertools.islice(behind, _MAX_STEPS))
    takers = {node for node in nodes if inner in node.inputs}
    reductions = [node for node in nodes if is_op(node, *_CANCELLED)]
    if not takers or not reductions or not all(is_op(node, *_SHIFTING) for node in nodes):
        return set()
    return takers


def _transpose(node: ir.Node, scores: Scores) -> ir.Value | None:
    scores.axes = before_transpose(node, scores.axes)
    return node.inputs[0]


def _reshape(node: ir.Node, scores: Scores) -> ir.Value | None:
    before, after = sizes_of(node.inputs[0]), sizes_of(node.outputs[0])
    axes = scores.alphabet.regrouped(scores.axes, before)
    if axes is None:
        what = f"{node.op_type} stands between the scores and the softmax, of unknown sizes."
        raise NotFused(what, got=f"{before} to {after}")
    scores.axes = axes
    return node.inputs[0]


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
    if is_op(node, "Neg"):
        scores.factor = -scores.factor
        return node.inputs[0]
    inner, other = _split(node, scores)
    factor, divides = scalar_of(other), node.op_type == "Div"
    if divides and inner is not node.inputs[0]:
        raise NotFused("Something is divided by the scores.", got=other.name)
    _check_spread(node, inner, other, scores)
    if factor is None:
        dims = sizes_of(other)
        places = [at for at, axis in enumerate(scores.axes, -len(scores.axes)) if scores.key in axis]
        if dims is None or len(places) != 1 or other.dtype != inner.dtype:
            raise NotFused(
                "The scores are scaled by a tensor of another type, or of unknown sizes.", got=other.name
            )
        same = len(dims) < -places[0] or dims[places[0]] == 1
        scores.multipliers.append(
            Multiplier(value=other, axes=scores.axes, divides=divides, of_keys=not same)
        )
        return inner
    scores.factor *= factor if not divides else 1.0 / factor if factor else math.inf
    if not 0 < abs(scores.factor) < math.inf:
        what = "The scores are scaled by zero, or by a number that is not finite."
        raise NotExpressible(what, got=factor)
    return inner


def _check_spread(node: ir.Node, inner: ir.Value | None, other: ir.Value, scores: Scores) -> None:
    """Attention has the batch and the heads of Q, whatever the mask has."""
    before, after = sizes_of(inner), sizes_of(node.outputs[0])
    if before is None or after is None or len(before) != len(after):
        raise NotFused("The file does not state the shape of the scores.")
    if any(size == 1 and result != 1 for size, result in zip(before, after, strict=True)):
        raise NotFused("A mask makes the scores larger than the matmul of Q and K.", got=list(after))
    dims = sizes_of(other) or []
    for at, size in enumerate(dims, len(before) - len(dims)):
        if size not in (1, before[at]) and not isinstance(before[at], int):
            if not _holds_heads(before, at):
                scores.wider.append(Wider(scores.axes[at], other, at - len(before) + len(dims)))
            if before[at] != after[at] and None not in (before[at], after[at]):
                scores.alphabet.take_for(after[at], before[at])


def _holds_heads(sizes: Sequence[Size], at: int) -> bool:
    """Whether an axis of scores is a batch such as `8*B`, which is never 1: no mask is larger there."""
    return at < len(sizes) - 2 and isinstance(size := sizes[at], str) and factors_of(size)[0] > 1


def _add(node: ir.Node, scores: Scores) -> ir.Value | None:
    inner, other = _split(node, scores)
    factor = scores.factor
    if node.op_type == "Sub" and inner is node.inputs[0]:
        factor = -factor
    elif node.op_type == "Sub":  # the scores are subtracted
        scores.factor = -factor
    dims, at = (
        sizes_of(other),
        len(scores.axes) - scores.axes.index(scores.key) if scores.key in scores.axes else 0,
    )
    alike = dims is not None and at and (len(dims) < at or dims[-at] == 1) and scalar_of(other) is None
    if alike and scores.ignore_shifts:
        _check_spread(node, inner, other, scores)
        scores.shifts.append(other)
        return inner
    return _mask(node, inner, Bias(value=other, factor=factor, axes=scores.axes), scores)


def _where(node: ir.Node, scores: Scores) -> ir.Value | None:
    condition, first, second = filter(None, node.inputs)
    shown = _matmul_behind(first, scores.biases) is not None
    inner, other = (first, second) if shown else (second, first)
    fill = scalar_of(other)
    if fill is None:
        raise NotFused("Masked scores are set to something that is not one constant.", got=other.name)
    term = Fill(value=condition, shown=shown, fill=fill * scores.factor, axes=scores.axes)
    return _mask(node, inner, term, scores)


def _mask(node: ir.Node, inner: ir.Value, term: Term, scores: Scores) -> ir.Value:
    _check_spread(node, inner, term.value, scores)
    if scores.softcap:
        raise NotExpressible("A mask is applied before the softcap; Attention applies it after.")
    if scores.bound < math.inf:
        raise NotFused("A mask is applied before the scores are bounded.", got=term.value.name)
    if scores.multipliers:
        term = replace(term, times=tuple(scores.multipliers))
    if isinstance(term, Fill) and inner.dtype is not None and term.fill < float(inner.dtype.min):
        term = replace(term, fill=-math.inf)  # what the lowest number is, times more than 1
    if scores.clipped is not None:
        if scores.terms or (isinstance(term, Bias) and term.value.dtype != scores.clipped):
            raise NotFused("Several masks are applied, or one of another type, before their sum is bounded.")
        if isinstance(term, Bias):
            term = replace(term, clipped=True)
        elif any(each.bounds() is None for each in term.times):
            raise NotFused("Masked scores are multiplied by a tensor of unknown sign, and bounded.")
        else:
            term = replace(term, fill=max(term.nearest, float(scores.clipped.min)), times=())
    scores.terms.append(term)
    return inner


def _clip(node: ir.Node, scores: Scores) -> ir.Value | None:
    """`Max(scores, lowest)`, so that masked ones are not -inf; bounds that no score is expected to reach."""
    inner, bounds = node.inputs[0], [-math.inf, math.inf]
    # One that is not constant counts as 0, which scores do reach: it is refused.
    if is_op(node, "Clip"):
        for at, each in enumerate(node.inputs[1:]):
            bounds[at] = bounds[at] if each is None else scalar_of(each) or 0.0
    elif len(node.inputs) == 2:
        inner, other = _split(node, scores)
        bounds[is_op(node, "Min")] = scalar_of(other) or 0.0
    what = f"{node.op_type} stands between the scores and the softmax."
    dtype, (low, high) = None if inner is None else inner.dtype, bounds
    if dtype is None or sizes_of(inner) != sizes_of(node.outputs[0]):
        raise NotFused(what)
    plain = scores.factor == 1.0 and not (scores.terms or scores.multipliers or scores.softcap)
    if plain and (low, high) == (float(dtype.min), math.inf):
        scores.clipped = dtype
        return inner
    reach = min(-low, high) * abs(scores.factor)
    if reach < _FAR_OUT or scores.multipliers or scores.softcap:
        raise NotFused(what, got=node_name(node))
    scores.bound = min(scores.bound, reach)
    return inner


def _concat(node: ir.Node, scores: Scores) -> ir.Value | None:
    given = list(filter(None, node.inputs))
    inner = [value for value in given if _matmul_behind(value, scores.biases)]
    others = [value for value in given if value not in inner]
    axis = node.attributes.get_int("axis", -1)
    if len(inner) != 1 or len(others) != 1 or scores.sink:
        what = "Concat of several parts stands between the scores and the softmax."
        raise NotFused(what, got=node_name(node))
    count, keys = (sizes_of(value) or [None] for value in (others[0], inner[0]))
    size = count[axis] if -len(count) <= axis < len(count) else None
    plain = scores.factor == 1.0 and not (scores.terms or scores.multipliers or scores.softcap)
    outer = scores.axes[axis]
    if not plain or not isinstance(size, int) or len(outer) != 1 or len(keys) != len(scores.axes):
        what = "The scores are changed after others were appended to them."
        raise NotExpressible(what, got=node_name(node))
    letter = scores.alphabet.new(keys[axis])
    scores.axes, scores.key = tuple(letter if each == outer else each for each in scores.axes), letter
    first = node.inputs[0] is others[0]
    scores.sink = Sink(value=others[0], axes=scores.axes, outer=outer, inner=letter, count=size, first=first)
    return inner[0]


def _log_softmax(node: ir.Node, scores: Scores) -> ir.Value | None:
    """The scores without the logarithm of a sum that is the same for all keys."""
    axis, count = node.attributes.get_int("axis", -1), len(scores.axes)
    if not scores.ignore_shifts or scores.axes[axis % count] != scores.key:
        raise NotFused("LogSoftmax stands between the scores and the softmax.", got=node_name(node))
    return node.inputs[0]


def _tanh(node: ir.Node, scores: Scores) -> ir.Value | None:
    if scores.softcap or scores.multipliers:
        raise NotExpressible("The scores pass two tanh, or are scaled by a tensor after one.")
    # softcap · tanh(x / softcap): the factors so far are the softcap, those before it the scale over it. A
    # sign may stand on either side.
    scores.softcap = abs(scores.factor)
    return node.inputs[0]


_STEPS = {"Cast": _cast, "Where": _where, "Tanh": _tanh, "Concat": _concat, "LogSoftmax": _log_softmax}
_STEPS |= dict.fromkeys(("Clip", "Max", "Min"), _clip)
_STEPS |= dict.fromkeys(("Mul", "Div", "Neg"), _scale) | dict.fromkeys(("Add", "Sub"), _add)
_STEPS |= dict.fromkeys(("Identity", "Transpose"), _transpose)
_STEPS |= dict.fromkeys(("Reshape", "Squeeze", "Unsqueeze", "Flatten"), _reshape)
_PASSED = frozenset({*_STEPS, "Slice"})


def _split(node: ir.Node, scores: Scores) -> tuple[ir.Value, ir.Value]:
    """The input that carries the scores, and the other."""
    first, second = filter(None, node.inputs)
    one, other = (_matmul_behind(each, scores.biases) for each in (first, second))
    if one and other and not is_op(node, "Add", "Sub"):
        raise NotFused(f"The scores are made of two matmuls ({node.op_type}).")
    # Of two that are added, the nearer is that of Q and K, and the other a bias, as in relative attention.
    left = bool(one) and (not other or one[:2] <= other[:2] or is_op(node, "Sub"))  # type: ignore[index]
    if one and other:
        scores.chosen.append(one[2] if left else other[2])
    return (first, second) if left else (second, first)


def _matmul_behind(
    value: ir.Value | None, biases: Collection[ir.Node] = ()
) -> tuple[bool, int, ir.Node] | None:
    """Whether a matmul of two computed tensors, none of the biases, is behind a value, by small steps.

    If so, whether its operands differ in rank, as with a table of positions, how many nodes were passed, and
    the matmul.
    """
    behind = nodes_behind([value], lambda node: node.inputs if is_op(node, *_PASSED) else ())
    for passed, node in enumerate(itertools.islice(behind, 200)):
        if is_matmul(node) and node not in biases:
            return rank(node.inputs[0]) != rank(node.inputs[1]), passed, node
    return None


def unknown_step(softmax: Normalisation) -> ir.Node | None:
    """What stands nearest to a softmax between it and a matmul, and cannot be passed."""
    near = nodes_behind([softmax.source], lambda node: node.inputs if is_op(node, *_PASSED) else ())
    others = itertools.islice((node for node in near if not is_op(node, *_PASSED)), _MAX_STEPS)
    return next((node for node in others if _is_behind_matmul(node)), None)


def _is_behind_matmul(node: ir.Node) -> bool:
    """Whether a node depends on a matmul of two computed tensors that is near enough."""
    return any(map(is_matmul, itertools.islice(nodes_behind(node.inputs), MAX_NEAR)))


# -- What stands between the softmax and the matmul with V -----------------------------------------

# What a candidate's weights may pass before the matmul: more than can be fused, so that it is named.
_PASSED_WEIGHTS = frozenset(
    {"Cast", "Identity", "Dropout", "Where", "Mul", "Div", "Pow", "Transpose", "Reshape", "Slice", "Squeeze"}
    | {"Unsqueeze", "Flatten", "Expand", "Gather"}
)
_MAX_STEPS_WEIGHTS = 12


def comes_to_matmul(weights: ir.Value) -> bool:
    """Whether the result of a softmax comes to a matmul of two computed tensors."""
    pending, seen = [(weights, 0)], set[ir.Node]()
    while pending:
        value, steps = pending.pop(0)
        for node, _ in value.uses():
            if is_matmul(node):
                return True
            if is_op(node, *_PASSED_WEIGHTS) and steps < _MAX_STEPS_WEIGHTS and node not in seen:
                seen.add(node)
                pending.append((node.outputs[0], steps + 1))
    return False


def _read_weights(
    softmax: Normalisation, axes: Axes, alphabet: Alphabet, sink: Sink | None
) -> tuple[Matmul, int, bool, Operand | None, Behind | None]:
    """Walk from a softmax to the matmul with V: the matmul, and which operand of it the weights are.

    Then whether NaN is replaced by 0, as PyTorch's attention does for fully masked queries, the weights
    where they are used elsewhere too, and what masks them.
    """
    value, guarded = softmax.node.outputs[0], False
    behind: Behind | None = None
    used: Operand | None = None
    passed = list[ir.Value]()
    for _ in range(_MAX_STEPS_WEIGHTS):
        if (after := _after_guard(value)) is not None:
            value, guarded = after, True
            continue
        uses = [use for use in value.uses() if not is_op(use.node, "Shape")]
        on = [use for use in uses if is_matmul(use.node) or is_op(use.node, *_PASSED_WEIGHTS)]
        on = [use for use in on if is_matmul(use.node) or comes_to_matmul(use.node.outputs[0])]
        if not on:
            what = "What stands between the softmax and the matmul with V is not recognized."
            got = ", ".join(f"{each.node.op_type} {node_name(each.node)}" for each in uses)
            raise NotFused(what, got=got)
        node, position = on[0]
        if len(uses) > 1 or value.is_graph_output():
            if used is not None:
                what = "The attention weights are used elsewhere too, in two places."
                raise NotExpressible(what, got=value.name)
            if node.graph is not softmax.node.graph:
                what = "The attention weights are used outside of the branch or loop with the matmul with V."
                raise NotExpressible(what, got=value.name)
            used = Operand(value=value, axes=axes)
        if is_matmul(node):
            if None in (value.dtype, *(each.dtype for each in passed)):
                raise NotFused("The file does not state the type of the attention weights.", got=value.name)
            # They may be rounded once, to the type that the matmul takes: so does Attention.
            if lossy := [str(each.dtype) for each in passed if not holds(each.dtype, value.dtype)]:
                what = "The attention weights are rounded before the matmul with V."
                raise NotExpressible(what, got=", ".join(lossy))
            if sink is not None and (used is not None or sink.outer in "".join(axes)):
                raise NotExpressible("The weights of appended scores are used.", got=value.name)
            others = {use.node for use in used.value.uses() if use.node is not node} if used else set()
            values = [each for at, each in enumerate(node.inputs) if at != position]
            if value in values or (others and softmax.node in nodes_behind(values)):
                raise NotExpressible("V is computed from the attention weights.", got=node_name(node))
            return read_matmul(node, alphabet, position, axes), position, guarded, used, behind
        if is_op(node, "Transpose"):
            axes = tuple(axes[axis] for axis in perm(node))
        elif is_op(node, "Reshape", "Squeeze", "Unsqueeze", "Flatten") and position == 0:
            moved = alphabet.regrouped(axes, sizes_of(node.outputs[0]))
            if moved is None:
                what = f"{node.op_type} stands between the softmax and the matmul with V, of unknown sizes."
                raise NotFused(what, got=node_name(node))
            axes = moved
        elif sink is not None and is_op(node, "Slice") and position == 0:
            axes = _without_sink(node, axes, sink)
        elif is_op(node, "Dropout"):
            training = input_at(node, 2)
            if training is not None and ((numbers := array_of(training)) is None or bool(numbers.any())):
                what = "Dropout of the weights is active: export the module in eval mode."
                raise NotFused(what, got=node_name(node))
        elif is_op(node, "Where") and behind is None and used is None and (hidden := _hidden(node, position)):
            behind = Behind(value=hidden, shown=position == 1, axes=axes)
        elif not is_op(node, "Cast", "Identity"):
            what = f"{node.op_type} stands between the softmax and the matmul with V."
            raise NotFused(what, got=node_name(node))
        passed.append(value)
        value = node.outputs[0]
    raise NotFused("Too many nodes lie between the softmax and the matmul with V.")


def _hidden(node: ir.Node, position: int) -> ir.Value | None:
    """The condition of a Where that sets some of the weights to 0."""
    zero = position in (1, 2) and scalar_of(node.inputs[3 - position]) == 0.0
    same = sizes_of(node.inputs[position]) == sizes_of(node.outputs[0])
    return node.inputs[0] if zero and same else None


def _without_sink(node: ir.Node, axes: Axes, sink: Sink) -> Axes:
    """The axes of the weights behind a Slice that drops those of appended scores, and nothing else."""
    starts, ends, at, steps = (_bounds(node, place) for place in (1, 2, 3, 4))
    key = axes.index(sink.outer) if sink.outer in axes else -1
    here = at is not None and [each % len(axes) for each in at] == [key] and (steps or (1,)) == (1,)
    begins = starts == ((sink.count,) if sink.first else (0,))
    ended = ends is not None and (ends[0] >= 2**31 - 1 if sink.first else ends == (-sink.count,))
    if not ended:  # the end may be the number of keys itself
        found, size = sizes_of(node.outputs[0]), (sizes_of(node.inputs[0]) or [None])[key]
        ended = found is not None and isinstance(size, int) and found[key] == size - sink.count
    if not here or not begins or not ended:
        raise NotFused("Slice stands between the softmax and the matmul with V.", got=node_name(node))
    return tuple(sink.inner if each == sink.outer else each for each in axes)


def _bounds(node: ir.Node, place: int) -> tuple[int, ...] | None:
    """The numbers of a bound of a Slice, which may be computed where it is a single one."""
    number = scalar_of(input_at(node, place))
    return constant_ints(node, place) if number is None else (int(number),)


def _after_guard(value: ir.Value) -> ir.Value | None:
    """What becomes of weights whose NaN are replaced by 0, by a `Where` or by PyTorch's `nan_to_num`.

    The latter replaces infinite weights as well, of which there are none.
    """
    chain, nodes, zeroed = [value], set[ir.Node](), False
    while True:
        choice = next((node for node, at in chain[-1].uses() if at == 2 and is_op(node, "Where")), None)
        tests = set() if choice is None else _tests_of(choice.inputs[0], chain)
        is_nan = any(is_op(each, "IsNaN") for each in tests)
        if choice is None or not tests or (is_nan and scalar_of(choice.inputs[1]) != 0.0):
            break
        zeroed = zeroed or is_nan
        nodes |= {choice, *tests}
        chain.append(choice.outputs[0])
    replaced = chain[:-1]
    users = {node for each in replaced for node, _ in each.uses() if not is_op(node, "Shape")}
    alone = users <= nodes and not any(each.is_graph_output() for each in replaced)
    return chain[-1] if zeroed and alone else None


def _tests_of(condition: ir.Value | None, weights: Sequence[ir.Value]) -> set[ir.Node]:
    """The nodes of a condition that holds for NaN only, or for infinite weights only; else nothing."""
    node = made_by(condition, "IsNaN", "IsInf", "Cast", "And")
    source = input_at(node, 0)
    if node is None or source is None:
        return set()
    if is_op(node, "Cast"):
        tests = _tests_of(source, weights)
        return {node, *tests} if tests else set()
    if is_op(node, "And"):  # infinite, and of one sign
        tests = _tests_of(node.inputs[0], weights) | _tests_of(node.inputs[1], weights)
        infinite = any(is_op(each, "IsInf") for each in tests)
        return {node, *tests, *_signs_of(node, weights)} if infinite else set()
    wider = made_by(source, "Cast")
    if wider is not None and wider.inputs[0] in weights:
        return {node, wider}
    return {node} if source in weights else set()


def _signs_of(condition: ir.Node, weights: Sequence[ir.Value]) -> set[ir.Node]:
    """Comparisons of the weights among the parts of a condition."""
    near = nodes_behind(condition.inputs, lambda node: node.inputs if is_op(node, "Cast") else ())
    return {node for node in near if is_op(node, "Less", "Greater") and node.inputs[0] in weights}


# -- The whole attention ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Letters:
    """The letters of the axes of one attention."""

    batch: str  # one or more letters: Attention takes them as one axis
    head: str | None  # none where the heads are part of the batch
    query: str  # the queries; several letters where a Reshape takes their axis apart, as for a map of them
    key: str  # the keys; the same
    # the size of a head of Q and K; several letters where rows of an alignment are summed as well
    size: str
    value_size: str  # the size of a head of V; the same

    def order(self, rows: str, columns: str) -> Axes:
        """The axes of a tensor as Attention wants them."""
        return (self.batch, *([self.head] if self.head else []), rows, columns)


def read_attention(softmax: Normalisation) -> Pattern:
    """The attention around a softmax; a NotFused where it is not recognized.

    Of several matmuls that are added, those of biases may be as near as that of Q and K.
    """
    biases, refusal = set[ir.Node](), None
    for _ in range(_MAX_BIASES):
        chosen = list[ir.Node]()
        try:
            return Pattern(softmax, biases, chosen)
        except NotFused as error:
            refusal = refusal or error
            if not chosen:
                break
            biases.add(chosen[-1])
    raise refusal or NotFused("It was not recognized.")


class Pattern:
    """The attention around a softmax, read."""

    def __init__(self, softmax: Normalisation, biases: set[ir.Node], chosen: list[ir.Node]) -> None:
        self.softmax, alphabet = softmax.node, Alphabet()
        axes = tuple(alphabet.new(size) for size in sizes_of(softmax.source) or ())
        key = axes[softmax.axis] if -len(axes) <= softmax.axis < len(axes) else ""
        scores = Scores(alphabet=alphabet, axes=axes, key=key, biases=biases, chosen=chosen)
        first = read_scores(softmax, scores)
        axes = tuple(string.ascii_letters[: (rank(softmax.source) or 0)])  # the first letters, in order
        second, at, guarded, used, behind = _read_weights(softmax, axes, alphabet, scores.sink)
        if guarded and scores.overflows:
            what = "Weights that are NaN become 0, and only a run knows whether a masked score is infinite."
            raise NotExpressible(what, got="a mask number times a tensor")
        if scores.sink is not None:
            axes = tuple(scores.sink.inner if each == scores.sink.outer else each for each in axes)
        first, second = first.resolved(alphabet), second.resolved(alphabet)
        letters = _letters(alphabet.resolved(axes), softmax.axis, first, second, at, alphabet.sizes)
        q, k, v = _operands(first, second, letters, at, alphabet.sizes)
        if not scores.wider and (folded := _folded_heads(q, k, v, letters)) is not None:
            alphabet.split(letters.batch, *folded)
            first, second = first.resolved(alphabet), second.resolved(alphabet)
            letters = _letters(alphabet.resolved(axes), softmax.axis, first, second, at, alphabet.sizes)
            q, k, v = _operands(first, second, letters, at, alphabet.sizes)
        if letters.head is None and (apart := _heads_in_rows(q, letters)) is not None:
            letters = apart
            q, k, v = _operands(first, second, letters, at, alphabet.sizes)
        if letters.head is not None and not all(
            isinstance(each.dim(letters.head), int) for each in (q, k, v)
        ):
            # Heads of an unknown number are part of the batch.
            letters = replace(letters, batch=letters.batch + letters.head, head=None)
            q, k, v = _operands(first, second, letters, at, alphabet.sizes)
        if behind is not None:
            if scores.sink is not None:
                raise NotExpressible("The weights next to appended scores are masked.", got=behind.value.name)
            axes, guarded = alphabet.resolved(behind.axes), True
            scores = scores.resolved()
            scores.terms = hide_behind(scores.terms, replace(behind, axes=axes), softmax.source.dtype)
        self.scores = scores.resolved()  # what lies between the first matmul and the softmax
        self.first = first  # the matmul of Q and K
        self.last = second  # the matmul with V, whose result is the result of attention
        self.letters = letters  # the names of the axes
        self.q, self.k, self.v = q, k, v  # as they were before scaling, transposing and repeating
        self.sources = Sources((each.value, each.axes) for each in (q, k, v))  # where sizes are read from
        # Whether Q, K and V may have different batches, of which some are 1, and whether K may have a single
        # key where V and a mask have more.
        contracted = is_op(second.node, "MatMul")
        self.batches, self.lengths = _check_sizes(q, k, v, letters, self.scores.wider, contracted)
        dtype = q.value.dtype
        types = [dtype, k.value.dtype, v.value.dtype, second.values[at].dtype]
        if len(set(types)) != 1 or dtype is None:
            raise NotFused("Q, K, V and the weights have different types.", got=", ".join(map(str, types)))
        if used is not None and used.value.dtype != dtype:  # as outputs of Attention they have the type of Q
            what = "The attention weights are used elsewhere too, in another type than Q."
            raise NotExpressible(what, got=f"{used.value.dtype}, Q is {dtype}")
        # The weights, where they are used elsewhere too.
        self.weights = used and replace(used, axes=alphabet.resolved(used.axes))
        softmax_types = (scores.softmax_dtype, softmax_type_of(softmax.node), first.node.outputs[0].dtype)
        wider = (each for each in softmax_types if each is not None and each.itemsize > dtype.itemsize)
        self.softmax_dtype = next(wider, None)  # the type of the softmax where it is not that of Q
        self.sizes = q.dim(letters.query), k.dim(letters.key)  # how many queries and keys there are
        self.guarded = guarded  # whether NaN weights become 0
        self.masking = decide_masking(
            self.scores.terms,
            dtype=dtype,
            sizes=self.sizes,
            guarded=guarded,
            order=(letters.query, letters.key),
            head=letters.head,
            softcap=scores.softcap,
            sink=scores.sink is not None,
        )
        self.scale = scores.factor * q.factor * k.factor
        if not 0 < abs(self.scale) < math.inf:
            what = "The scores are scaled by zero, or by a number that is not finite."
            raise NotExpressible(what, got=self.scale)
        self.heads = _heads(q, k, v, letters.head)  # query heads, and key/value heads
        for whose, size in (("Q and K", q.dim(letters.size)), ("V", v.dim(letters.value_size))):
            if not isinstance(size, int):
                is_axis = size is not None and GENERATED not in size
                what = f"it follows from the axis {size}" if is_axis else "the file does not state it"
                raise NotExpressible(f"The head size of {whose} is not a fixed number: {what}.")
        shared = {*letters.query, *(letters.head or "")} if len(set(self.heads)) > 1 else set(letters.query)
        for each in self.scores.multipliers:  # what differs between keys is applied to K
            sizes = sizes_of(each.value) or []
            large = {axis for axis, size in zip(each.axes[-len(sizes) :], sizes, strict=False) if size != 1}
            if each.of_keys and shared & set("".join(large)):
                what = "The scores are scaled by something that is not the same for all keys"
                what += ", nor for all queries."
                raise NotFused(what, got=each.value.name)

    def size(self, axis: str) -> int | str:
        """The size of an axis of the scores, as Q and K have it; its own letters where that is not known."""

        def known(letter: str) -> int | str:
            own = [each.dim(letter) for each in (self.q, self.k) if letter in "".join(each.axes)]
            sizes = (self.q.sizes.get(letter), *own)
            return next((size for size in sizes if size and GENERATED not in str(size)), letter)

        return product(map(known, axis)) or axis


def _letters(
    axes: Axes, axis: int, first: Matmul, second: Matmul, position: int, sizes: Mapping[str, Size]
) -> Letters:
    """What each letter is."""
    left, right, out = ("".join(each) for each in (*first.axes, first.out))
    values, result = "".join(second.axes[1 - position]), "".join(second.out)
    keys = set(axes[axis])
    summed = {letter for letter in values if letter in "".join(axes) and letter not in result}
    keys |= {letter for letter in summed if sizes.get(letter) == 1}  # a Reshape may have joined them
    sides = [keys <= set(each) for each in (left, right)]
    if sides[0] == sides[1] or keys & (set(left) & set(right)) or summed != keys:
        raise NotExpressible(f"The softmax runs over axis {axis}, the matmul with V sums over another.")
    shared = set(left) & set(right)
    batches = [letter for letter in out if letter in shared]
    # Axes of queries; those that are one axis of Q stay together.
    apart = [letter for letter in out if letter not in shared and letter not in keys]
    queries = [axis for axis in first.axes[0 if sides[1] else 1] if set(axis) <= set(apart)]
    queries.sort(key=lambda axis: out.index(axis[0]))
    # An einsum may leave out the axis of the heads where K and V have one: like another axis of queries.
    fixed = [isinstance(product(sizes.get(each) for each in axis), int) for axis in queries]
    at = fixed.index(False) if fixed.count(False) == 1 else len(queries) - 1
    alone = queries[:at] + queries[at + 1 :]
    if not batches:
        batches, queries, alone = list("".join(queries[:-1])), queries[-1:], []
    elif all(isinstance(sizes.get(letter), int) for axis in alone for letter in axis):
        queries = [axis for axis in queries if axis not in alone]
    else:  # as many queries
        queries, alone = ["".join(queries)], []
    heads = "".join(alone)
    depths = "".join(dict.fromkeys(letter for letter in left + right if letter not in out))
    sizes_v = "".join(letter for letter in values if letter not in out)
    if set(depths) - shared or not depths or not sizes_v or len(queries) != 1:
        raise NotFused("The two matmuls are not those of attention.", got=f"{first} and {second}")
    if not batches or not set(apart) <= {*batches, *queries[0], *heads}:
        raise NotFused("The two matmuls are not those of attention.", got=f"{first} and {second}")
    wanted, missing = {*batches, *heads, *queries[0], *sizes_v}, set(batches) & set(apart)
    single = {letter for letter in batches if sizes.get(letter) == 1}  # V may have such an axis or not
    copied = {letter for letter in batches if letter in result and letter not in values}  # V is, along these
    found = {*values, *missing, *heads, *single, *copied}
    if found != {*batches, *heads, *keys, *sizes_v} or {*result, *single} != wanted:
        raise NotFused("The matmul with V is not that of attention.", got=str(second))
    own = [letter for letter in batches if isinstance(sizes.get(letter), int)]
    own = [letter for letter in own if letter not in single] or own
    head = heads or (None if len(batches) == 1 else own[-1] if own else batches[-1])
    batch = "".join(letter for letter in batches if letter != head)
    key = next((each for each in second.axes[1 - position] if set(each) == keys), axes[axis])
    return Letters(batch=batch, head=head, query=queries[0], key=key, size=depths, value_size=sizes_v)


def _operands(
    first: Matmul, second: Matmul, letters: Letters, position: int, sizes: Mapping[str, Size]
) -> tuple[Operand, Operand, Operand]:
    at = 0 if letters.query[0] in "".join(first.axes[0]) else 1
    sides = ((first, at), (first, 1 - at), (second, 1 - position))
    raw = [Operand(value=each.values[side], axes=each.axes[side], sizes=sizes) for each, side in sides]
    if any(sizes_of(each.value) is None for each in raw):
        raise NotFused("The file does not state the shapes of Q, K and V.")
    key_order = letters.order(letters.key, letters.size)
    value_order = letters.order(letters.key, letters.value_size)
    dtype, q = raw[2].value.dtype, raw[0]  # Q and K may have been upcast for the scores alone
    q = unwrap(q, wanted=letters.order(letters.query, letters.size), head=None, dtype=dtype)
    for head in (letters.head, None):
        k = unwrap(raw[1], wanted=key_order, head=head, dtype=dtype)
        v = unwrap(raw[2], wanted=value_order, head=head, scaled=False)
        if head is None or same_size(k.dim(head), v.dim(head)):
            break  # else only one of the two was repeated, or differently: take both as they come
    return q, k, v


_MOST_HEADS = 256  # that are taken out of a batch


def _folded_heads(q: Operand, k: Operand, v: Operand, letters: Letters) -> tuple[Size, int] | None:
    """The size of the batch without heads, and their number, where the heads are part of it.

    That they are is seen by a batch such as `8*B`, or by a Reshape before: any number that divides the batch
    may be that of the heads.
    """
    size, sizes = letters.batch, {str(each.dim(letters.batch)) for each in (q, k, v)}
    whole = q.dim(size)
    if letters.head is not None or len(size) != 1 or len(sizes) != 1 or whole in (None, 1):
        return None
    if isinstance(whole, str):
        heads = factors_of(whole)[0]
    else:
        before, depth = _before_reshape(q.value), q.dim(letters.size)
        heads = next((each for each in (_heads_in(dims, whole, depth) for dims in before) if each), 1)
    rest = quotient(whole, heads)
    return (rest, heads) if rest is not None and 1 < heads <= _MOST_HEADS else None


def _heads_in_rows(q: Operand, letters: Letters) -> Letters | None:
    """The letters with heads, where the rows of Q are queries and their heads: all share one head of K."""
    if len(letters.query) != 2:
        return None
    rows, head = letters.query[0], letters.query[1]
    count, depth = q.sizes.get(head), q.dim(letters.size)
    if not isinstance(count, int) or not 1 < count <= _MOST_HEADS:
        return None
    ends = [[product((count, depth))], [count, depth]]
    shown = any(dims[-len(end) :] == end for dims in _before_reshape(q.value) for end in ends)
    return replace(letters, query=rows, head=head) if shown and depth is not None else None


def _before_reshape(value: ir.Value) -> Iterator[list[Size]]:
    """The sizes of a tensor before it was reshaped, as it was before any of the last steps."""
    source: ir.Value | None = value
    for _ in range(_MAX_STEPS_WEIGHTS):
        node = made_by(
            source, "Reshape", "Transpose", "Identity", "Mul", "Div", "Squeeze", "Unsqueeze", "Cast"
        )
        source = input_at(node, 0)
        if node is None or source is None:
            return
        if is_op(node, "Reshape"):
            yield sizes_of(source) or []


def _heads_in(dims: list[Size], batch: int, depth: Size) -> int:
    """The number of heads that a tensor shows which is reshaped to this batch; 0 where it shows none."""
    if len(dims) > 3 and all(isinstance(each, int) for each in dims[:2]):
        return int(dims[1] or 0) if product(dims[:2]) == batch else 0
    heads = quotient(dims[-1], depth) if dims else None
    return heads if isinstance(heads, int) and heads > 1 and batch % heads == 0 else 0


def _check_sizes(
    q: Operand, k: Operand, v: Operand, letters: Letters, wider: Sequence[Wider], contracted: bool
) -> tuple[bool, bool]:
    """Whether Q, K and V may differ in their batches, and K and V in their lengths."""
    lengths = [each.dim(letters.key) for each in (k, v)]
    if not same_size(*lengths) and (all(isinstance(each, int) for each in lengths) or not contracted):
        got = f"{lengths[0]} and {lengths[1]}"
        raise NotFused("K and V have different lengths, or lengths that are not known to be equal.", got=got)
    single = not same_size(*lengths) and any(each.axis == letters.key for each in wider)
    sizes = {letter: [each.dim(letter) for each in (q, k, v)] for letter in letters.batch}
    apart = not all(same_size(each[0], other) for each in sizes.values() for other in each[1:])
    # One axis of the batch can be broadcast: that is what the matmuls do. Of several, those that are 1 can.
    unequal = any(
        not same_size(one, other) and 1 not in (one, other)
        for each in sizes.values()
        for one, other in itertools.combinations(each, 2)
    )
    if (unequal or any(each.axis in letters.batch for each in wider)) and len(letters.batch) > 1:
        got = "; ".join(", ".join(map(str, each)) for each in sizes.values())
        raise NotFused("Q, K, V and the mask have different batches.", got=got)
    if any(each.axis not in (*letters.batch, letters.query, letters.key) for each in wider):
        raise NotFused("A mask may have more heads than Q.", got=[str(each.value.name) for each in wider])
    return apart, single


def _heads(q: Operand, k: Operand, v: Operand, head: str | None) -> tuple[int, int]:
    if head is None:
        return 1, 1
    Hq, Hk, Hv = (each.dim(head) for each in (q, k, v))
    # One head is copied to all of the others.
    Hk, Hv = (Hv if Hk == 1 else Hk), (Hk if Hv == 1 else Hv)
    Hq = Hk * k.group if Hq == 1 and isinstance(Hk, int) else Hq
    if not isinstance(Hq, int) or not isinstance(Hk, int) or Hk != Hv:
        raise NotFused("The number of heads is not known, or K and V differ in it.", got=f"{Hq}, {Hk}, {Hv}")
    if Hq % Hk or (Hk > 1 and k.group * Hk != Hq):
        raise NotFused("The heads of K do not divide those of Q.", got=f"{Hq} and {Hk}")
    return Hq, Hk
