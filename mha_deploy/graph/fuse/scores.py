"""Recognise the two matmuls of attention: scores back to Q and K, weights on to V, and what lies between."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from mha_deploy.graph.fuse.values import (
    NoScores,
    NotFused,
    array_of,
    dims_of,
    holds,
    is_constant,
    is_op,
    perm_of,
    place_of,
    same_dim,
    same_dims,
    scalar_of,
)

# -- The two matmuls of attention, in the letters of an einsum whichever way they are spelled -----


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """A matmul of two tensors, each axis named by a letter.

    Args:
        node: The MatMul or Einsum.
        values: Its two operands.
        letters: The letters of their axes.
        out: The letters of the result.
    """

    node: ir.Node
    values: tuple[ir.Value, ir.Value]
    letters: tuple[str, str]
    out: str

    @property
    def summed(self) -> set[str]:
        """The letters that are summed over."""
        return (set(self.letters[0]) & set(self.letters[1])) - set(self.out)

    def renamed(self, names: dict[str, str]) -> Matmul:
        """The same matmul with other letters."""
        left, right, out = (
            "".join(names.get(letter, letter) for letter in text) for text in (*self.letters, self.out)
        )
        return Matmul(node=self.node, values=self.values, letters=(left, right), out=out)


def is_product(node: ir.Node | None) -> bool:
    """Whether a node multiplies two tensors that are both computed: a weight makes it a projection."""
    return is_op(node, "MatMul", "Einsum") and node is not None and _is_computed(node)


def _is_computed(node: ir.Node) -> bool:
    if len(node.inputs) != 2:
        return False
    # A constant of three or more axes is a learned query, of two a weight.
    return all(
        value is not None and (not is_constant(value) or len(dims_of(value) or ()) > 2)
        for value in node.inputs
    )


def read_product(node: ir.Node) -> Matmul:
    """Read a MatMul or an Einsum."""
    left, right = node.inputs
    if left is None or right is None:
        raise NotFused(f"The matmul {node.name} lacks an operand.")
    ranks = [len(dims_of(value) or ()) for value in (left, right)]
    if is_op(node, "MatMul"):
        if ranks[0] != ranks[1] or ranks[0] not in (3, 4):
            raise NotFused(
                f"The matmul {node.name} is of tensors with {ranks[0]} and {ranks[1]} axes, not 4."
            )
        batch = "bh" if ranks[0] == 4 else "b"
        return Matmul(node=node, values=(left, right), letters=(f"{batch}sd", f"{batch}dt"), out=f"{batch}st")
    letters, out = _read_equation(node, ranks)
    if any(len(set(text)) != len(text) for text in (*letters, out)):
        raise NotFused(f"The einsum {node.name} takes a diagonal.")
    return Matmul(node=node, values=(left, right), letters=letters, out=out)


def _read_equation(node: ir.Node, ranks: list[int]) -> tuple[tuple[str, str], str]:
    equation = (node.attributes.get_string("equation") or "").replace(" ", "")
    inputs, arrow, out = equation.partition("->")
    left, comma, right = inputs.partition(",")
    if not arrow or not comma or "," in right:
        raise NotFused(f"The einsum {node.name} is not a matmul of two tensors with a named result.")
    free = [letter for letter in string.ascii_letters if letter not in equation]
    hidden = max(ranks[0] - len(left.replace("...", "")), ranks[1] - len(right.replace("...", "")), 0)
    dots = "".join(free[:hidden])
    texts = []
    for text, rank in ((left, ranks[0]), (right, ranks[1]), (out, None)):
        here = hidden if rank is None else rank - len(text.replace("...", ""))
        texts.append(text.replace("...", dots[len(dots) - here :] if here else ""))
    return (texts[0], texts[1]), texts[2]


# -- Q, K and V as they were before scaling, turning and repeating for the matmul -----------------


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One side of a matmul.

    Args:
        value: The tensor.
        letters: The letters of its axes.
        factor: The constant that it was multiplied by.
        group: How often each of its heads was repeated.
    """

    value: ir.Value
    letters: str
    factor: float = 1.0
    group: int = 1

    def dim(self, letter: str) -> int | ir.SymbolicDim:
        """The size of an axis; 1 for an axis that the tensor does not have."""
        dims = dims_of(self.value) or ()
        at = self.letters.find(letter)
        return dims[at] if 0 <= at < len(dims) else 1


def unwrap(operand: Operand, *, wanted: str, head: str | None, scaled: bool = True) -> Operand:
    """Walk back over layout, constant factors and repeated heads.

    Args:
        operand: The side of a matmul.
        wanted: The order of axes in which Attention takes it. A tensor that has it already is taken there.
        head: The letter of the heads, if there is one.
        scaled: Whether a constant factor may be taken off.
    """
    ready = operand if operand.letters == wanted else None
    while True:
        turned = _before_transpose(operand)
        if turned is not None:
            operand = turned
            if ready is None and operand.letters == wanted:
                ready = operand
            continue
        inner = _before_factor(operand) if scaled else None
        if head:
            inner = inner or _before_interleave(operand, head) or _before_expand(operand, head)
        if inner is None:
            return ready or operand
        operand = inner
        ready = operand if operand.letters == wanted else None


def _before_transpose(operand: Operand) -> Operand | None:
    node = operand.value.producer()
    if is_op(node, "Identity") and node is not None and node.inputs[0] is not None:
        return replace(operand, value=node.inputs[0])
    if is_op(node, "Transpose") and node is not None and node.inputs[0] is not None:
        letters = [""] * len(operand.letters)
        for at, axis in enumerate(perm_of(node)):
            letters[axis] = operand.letters[at]
        return replace(operand, value=node.inputs[0], letters="".join(letters))
    source = _before_flat_turn(operand.value)
    if source is None:
        return None
    order = operand.letters
    return replace(operand, value=source, letters=order[:-2] + order[-1] + order[-2])


def _before_flat_turn(value: ir.Value) -> ir.Value | None:
    """What `Reshape(Transpose(Reshape(x)))` turned, where it only swaps the last two axes of x.

    The exporter writes scaled_dot_product_attention so. The shapes prove it: the first reshape keeps the last
    two axes and joins the others, the second takes them apart again.
    """
    chain = [value]
    for op_type in ("Reshape", "Transpose", "Reshape"):
        node = chain[-1].producer()
        if node is None or not is_op(node, op_type) or node.inputs[0] is None:
            return None
        chain.append(node.inputs[0])
    turn = chain[1].producer()
    if turn is None or perm_of(turn) != [0, 2, 1]:
        return None
    result, _, flat, source = (dims_of(each) for each in chain)
    if result is None or flat is None or source is None or len(source) != len(result) or len(flat) != 3:
        return None
    swapped = (*source[:-2], source[-1], source[-2])
    return chain[-1] if same_dims(result, swapped) and same_dims(flat[1:], source[-2:]) else None


def _before_factor(operand: Operand) -> Operand | None:
    node = operand.value.producer()
    if node is None or not is_op(node, "Mul", "Div"):
        return None
    first, second = node.inputs
    factor = scalar_of(second)
    if factor is None and node.op_type == "Mul":
        first, second, factor = second, first, scalar_of(first)
    if factor is None or not _keeps_shape(first, second, operand.value):
        return None
    if first is None or not factor or len(dims_of(first) or ()) != len(operand.letters):
        return None
    factor = 1.0 / factor if node.op_type == "Div" else factor
    return replace(operand, value=first, factor=operand.factor * factor)


def _keeps_shape(value: ir.Value | None, factor: ir.Value | None, result: ir.Value) -> bool:
    """Whether multiplying by a factor does not copy a value over a larger batch or more heads."""
    sizes = dims_of(factor) if factor is not None else None
    if sizes is not None and all(size == 1 for size in sizes):
        return True
    return value is not None and same_dims(dims_of(value) or (), dims_of(result) or ())


def _before_interleave(operand: Operand, head: str) -> Operand | None:
    """The heads before `x[:, :, None].expand(…).reshape(…)`, which repeats each of them in place."""
    chain = [operand.value]
    for op_types in (("Reshape",), ("Expand", "Tile"), ("Unsqueeze", "Reshape")):
        node = chain[-1].producer()
        if node is None or not is_op(node, *op_types) or node.inputs[0] is None:
            return None
        chain.append(node.inputs[0])
    result, wide, thin, source = (dims_of(each) for each in chain)
    if result is None or wide is None or thin is None or source is None:
        return None
    at = operand.letters.index(head) if head in operand.letters else -1
    if at < 0 or len(source) != len(operand.letters) or len(wide) != len(source) + 1:
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
    node = operand.value.producer()
    if node is None or not is_op(node, "Expand") or node.inputs[0] is None:
        return None
    result, source = dims_of(operand.value), dims_of(node.inputs[0])
    at = operand.letters.find(head)
    if result is None or source is None or len(source) != len(result) or at < 0 or source[at] != 1:
        return None
    copies = result[at]
    others = all(same_dim(a, b) for axis, (a, b) in enumerate(zip(result, source, strict=True)) if axis != at)
    if not others or not isinstance(copies, int):
        return None
    return replace(operand, value=node.inputs[0], group=operand.group * copies)


# -- What stands between the matmul of Q and K and the softmax: scale, masks, softcap, precisi ----

_MAX_STEPS = 32


@dataclass(frozen=True, kw_only=True)
class Fill:
    """Scores that are set to one number.

    Args:
        condition: A boolean tensor.
        shown: The value of the condition where the score stays.
        fill: The number elsewhere.
        added: Whether it was added to the score, which it is far larger than, and not put in its place.
    """

    condition: ir.Value
    shown: bool
    fill: float
    added: bool = False

    @property
    def tensor(self) -> ir.Value:
        """The tensor that says where."""
        return self.condition

    @property
    def hides(self) -> bool:
        """Whether the key has no weight at all, whatever the others are."""
        return self.fill == -math.inf


@dataclass(frozen=True, kw_only=True)
class Bias:
    """A tensor that is added to the scores, times a constant."""

    value: ir.Value
    factor: float

    @property
    def tensor(self) -> ir.Value:
        """The tensor that is added."""
        return self.value


Term = Fill | Bias


@dataclass(kw_only=True)
class Scores:
    """The way from the matmul to the softmax.

    Args:
        matmul: The matmul of queries and keys.
        factor: The constant the matmul is multiplied by.
        terms: The masks, the one nearest to the softmax first.
        softcap: Bound by a tanh; 0 for none.
        softmax_dtype: Type of the softmax where it is not that of the matmul.
    """

    matmul: Matmul | None = None
    factor: float = 1.0
    terms: list[Term] = field(default_factory=list)
    softcap: float = 0.0
    softmax_dtype: ir.DataType | None = None


def read_scores(softmax: ir.Node) -> Scores:
    """Walk back from a softmax to the matmul of its scores.

    Raises:
        NotFused: Something stands there that Attention cannot say.
    """
    scores, value = Scores(), softmax.inputs[0]
    for _ in range(_MAX_STEPS):
        node = value.producer() if value is not None else None
        if value is None or node is None or not _reaches_product(value):
            raise NoScores(
                "Its input is not a matmul of two computed tensors, so it is not dot-matmul attention."
            )
        if value.is_graph_output() or len(value.uses()) != 1:
            raise NotFused("The scores before the softmax are used elsewhere too.", got=_users(value))
        if is_product(node):
            scores.matmul = read_product(node)
            return scores
        value = _step(node, scores)
    raise NotFused("The way from the scores to the softmax is too long.")


def _step(node: ir.Node, scores: Scores) -> ir.Value | None:
    """Take in one node, and return the scores before it."""
    if node.domain == "" and node.op_type in _STEPS:
        return _STEPS[node.op_type](node, scores)
    raise NotFused(f"{node.op_type} stands between the scores and the softmax.")


def _identity(node: ir.Node, scores: Scores) -> ir.Value | None:
    return node.inputs[0]


def _cast(node: ir.Node, scores: Scores) -> ir.Value | None:
    source, to = node.inputs[0], node.outputs[0].dtype
    if source is None or not holds(to, source.dtype):
        got = f"{None if source is None else source.dtype} to {to}"
        raise NotFused("The scores are rounded before the softmax.", got=got)
    if to != source.dtype:
        scores.softmax_dtype = scores.softmax_dtype or to
    return source


def _scale(node: ir.Node, scores: Scores) -> ir.Value | None:
    inner, other = _split(node)
    factor = scalar_of(other)
    if factor is None or (node.op_type == "Div" and inner is not node.inputs[0]):
        raise NotFused("The scores are scaled by something that is not one constant.", got=_name(other))
    scores.factor *= 1.0 / factor if node.op_type == "Div" else factor
    if not scores.factor > 0:
        raise NotFused("The scores are scaled by a number that is not positive.", got=factor)
    return inner


def _add(node: ir.Node, scores: Scores) -> ir.Value | None:
    inner, other = _split(node)
    if node.op_type == "Sub" and inner is not node.inputs[0]:
        raise NotFused("The scores are subtracted from something.")
    _refuse_before_cap(scores)
    sign = -1.0 if node.op_type == "Sub" else 1.0
    scores.terms.append(Bias(value=other, factor=sign * scores.factor))
    return inner


def _where(node: ir.Node, scores: Scores) -> ir.Value | None:
    condition, first, second = node.inputs
    if condition is None or first is None or second is None:
        raise NotFused("A Where of the scores lacks an input.")
    shown = _reaches_product(first)
    inner, other = (first, second) if shown else (second, first)
    fill = scalar_of(other)
    if fill is None:
        raise NotFused("Masked scores are set to something that is not one constant.", got=_name(other))
    _refuse_before_cap(scores)
    scores.terms.append(Fill(condition=condition, shown=shown, fill=fill * scores.factor))
    return inner


def _tanh(node: ir.Node, scores: Scores) -> ir.Value | None:
    if scores.softcap:
        raise NotFused("The scores pass two tanh.")
    # softcap · tanh(x / softcap): the factors so far are the softcap, those before it the scale over it.
    scores.softcap = scores.factor
    return node.inputs[0]


_STEPS = {
    "Identity": _identity,
    "Cast": _cast,
    "Mul": _scale,
    "Div": _scale,
    "Add": _add,
    "Sub": _add,
    "Where": _where,
    "Tanh": _tanh,
}
_PASSED = frozenset(
    {*_STEPS, "Reshape", "Transpose", "Slice", "Concat", "Max", "Min", "Clip", "Unsqueeze", "Squeeze"}
)


def _refuse_before_cap(scores: Scores) -> None:
    if scores.softcap:
        raise NotFused("A mask is applied before the softcap; Attention applies it after.")


def _split(node: ir.Node) -> tuple[ir.Value, ir.Value]:
    """The input that carries the scores, and the other."""
    first, second = node.inputs
    if first is None or second is None:
        raise NotFused(f"A {node.op_type} of the scores lacks an input.")
    carries = (_reaches_product(first), _reaches_product(second))
    if carries == (True, True):
        raise NotFused(f"The scores are made of two matmuls ({node.op_type}).")
    return (first, second) if carries[0] else (second, first)


def _reaches_product(value: ir.Value | None) -> bool:
    """Whether a matmul of two computed tensors stands behind a value, with only small steps between."""
    pending, seen = [value], set[int]()
    while pending and len(seen) < 200:
        node = None if (each := pending.pop()) is None else each.producer()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if is_product(node):
            return True
        if node.domain == "" and node.op_type in _PASSED:
            pending.extend(node.inputs)
    return False


def _users(value: ir.Value) -> str:
    names: Sequence[str] = [f"{node.op_type} {node.name}" for node, _ in value.uses()]
    return ", ".join([*names, *(["an output of the graph"] if value.is_graph_output() else [])])


def _name(value: ir.Value | None) -> str:
    return "nothing" if value is None else str(value.name)


# -- What stands between the softmax and the matmul with V ----------------------------------------

# What a candidate's weights may pass on the way to the matmul: more than can be fused, so that it is named.
_PASSED_WEIGHTS = frozenset(
    {"Cast", "Identity", "Dropout", "Where", "Mul", "Div", "Transpose", "Reshape", "Slice", "Squeeze"}
    | {"Unsqueeze", "Expand", "Gather"}
)
_MAX_STEPS_WEIGHTS = 8


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The way from the softmax to the matmul with V.

    Args:
        value: The weights as the matmul takes them.
        matmul: The node of the matmul.
        position: Which of its operands they are.
        guarded: Whether NaN is replaced by 0, as PyTorch's own attention does for rows without keys.
    """

    value: ir.Value
    matmul: ir.Node
    position: int
    guarded: bool


def is_candidate(softmax: ir.Node) -> bool:
    """Whether the result of a softmax comes to a matmul of two computed tensors."""
    pending = [(softmax.outputs[0], 0)]
    while pending:
        value, steps = pending.pop()
        for node, _ in value.uses():
            if is_product(node):
                return True
            if node.domain == "" and node.op_type in _PASSED_WEIGHTS and steps < _MAX_STEPS_WEIGHTS:
                pending.append((node.outputs[0], steps + 1))
    return False


def read_weights(softmax: ir.Node) -> Weights:
    """Walk from a softmax to the matmul with V.

    Raises:
        NotFused: The weights are used elsewhere too, or changed on the way.
    """
    value, guarded = softmax.outputs[0], False
    passed = list[ir.Value]()
    for _ in range(_MAX_STEPS_WEIGHTS):
        after = _after_guard(value)
        if after is not None:
            value, guarded = after, True
            continue
        node, position = _only_use(value)
        if is_product(node):
            _check_casts(value, passed)
            return Weights(value=value, matmul=node, position=position, guarded=guarded)
        _check_passed(node)
        passed.append(value)
        value = node.outputs[0]
    raise NotFused("The way from the softmax to the matmul with V is too long.")


def _only_use(value: ir.Value) -> tuple[ir.Node, int]:
    if value.is_graph_output():
        raise NotFused("The attention weights are an output of the graph.", got=value.name)
    uses = list(value.uses())
    if len(uses) != 1:
        others = [node for node, _ in uses if not is_product(node)]
        named = ", ".join(f"{node.op_type} at {place_of(node) or node.name}" for node in others)
        raise NotFused("The attention weights are used elsewhere too.", got=named or f"{len(uses)} matmuls")
    return uses[0].node, uses[0].idx


def _check_passed(node: ir.Node) -> None:
    if is_op(node, "Dropout"):
        training = array_of(node.inputs[2]) if len(node.inputs) > 2 else None
        if len(node.inputs) > 2 and node.inputs[2] is not None and (training is None or bool(training.any())):
            raise NotFused("Dropout of the weights is active: export the module in eval mode.", got=node.name)
    elif not is_op(node, "Cast", "Identity"):
        raise NotFused(f"{node.op_type} stands between the softmax and the matmul with V.", got=node.name)


def _check_casts(value: ir.Value, passed: list[ir.Value]) -> None:
    """The weights may be rounded once, to the type that the matmul takes: so does Attention."""
    lossy = [each.dtype for each in passed if not holds(each.dtype, value.dtype)]
    if lossy:
        raise NotFused("The attention weights are rounded on the way to V.", got=", ".join(map(str, lossy)))


def _after_guard(value: ir.Value) -> ir.Value | None:
    """The result of `Where(IsNaN(weights), 0, weights)`, if that is what becomes of the weights."""
    uses = [node for node, _ in value.uses()]
    if len(uses) != 2 or value.is_graph_output():
        return None
    check = next((node for node in uses if is_op(node, "IsNaN")), None)
    choice = next((node for node in uses if is_op(node, "Where")), None)
    if check is None or choice is None or len(check.outputs[0].uses()) != 1:
        return None
    right = choice.inputs[0] is check.outputs[0] and scalar_of(choice.inputs[1]) == 0.0
    return choice.outputs[0] if right and choice.inputs[2] is value else None
