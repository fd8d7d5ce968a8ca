"""What stands between the product of Q and K and the softmax: scale, masks, softcap, precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from mha_deploy.graph.fuse.facts import holds, scalar_of
from mha_deploy.graph.fuse.products import Product, is_product, read_product
from mha_deploy.graph.fuse.records import NoScores, NotFused

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
    """The way from the product to the softmax.

    Args:
        product: The product of queries and keys.
        factor: The constant the product is multiplied by.
        terms: The masks, the one nearest to the softmax first.
        softcap: Bound by a tanh; 0 for none.
        softmax_dtype: Type of the softmax where it is not that of the product.
    """

    product: Product | None = None
    factor: float = 1.0
    terms: list[Term] = field(default_factory=list)
    softcap: float = 0.0
    softmax_dtype: ir.DataType | None = None


def read_scores(softmax: ir.Node) -> Scores:
    """Walk back from a softmax to the product of its scores.

    Raises:
        NotFused: Something stands there that Attention cannot say.
    """
    scores, value = Scores(), softmax.inputs[0]
    for _ in range(_MAX_STEPS):
        node = value.producer() if value is not None else None
        if value is None or node is None or not _reaches_product(value):
            raise NoScores(
                "Its input is not a product of two computed tensors, so it is not dot-product attention."
            )
        if value.is_graph_output() or len(value.uses()) != 1:
            raise NotFused("The scores before the softmax are used elsewhere too.", got=_users(value))
        if is_product(node):
            scores.product = read_product(node)
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
        raise NotFused(f"The scores are made of two products ({node.op_type}).")
    return (first, second) if carries[0] else (second, first)


def _reaches_product(value: ir.Value | None) -> bool:
    """Whether a product of two computed tensors stands behind a value, with only small steps between."""
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
