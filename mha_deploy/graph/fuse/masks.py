"""Decide what the masks of an attention become: the causal attribute, a boolean mask or a float mask.

The numbers are kept. A row without keys shows the difference between the spellings: scores filled with a
finite number give the mean of V, so they stay a float mask, or such rows are written apart (`even_rows`, for
float16); `-inf` gives NaN in PyTorch and 0 in ONNX.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import onnx_ir as ir

from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.fuse.facts import dims_of, is_op, same_dim, same_dims, same_or_cut, scalar_of
from mha_deploy.graph.fuse.records import NotFused
from mha_deploy.graph.fuse.scores import Bias, Fill, Term
from mha_deploy.graph.fuse.terms import plain_terms
from mha_deploy.graph.fuse.triangle import triangle_of

Size = int | ir.SymbolicDim
"""The size of an axis."""

# Added to a score of any size, it leaves only itself, as the fill would: all masked keys weigh the same. It
# is far from the smallest float, so that a kernel may multiply it by log2(e) without reaching -inf.
ABSORBING = -1e30
# The same in float16, added to scores below 16. One step above the lowest number, which ONNX Runtime takes
# for -inf: rows without keys would be 0.
ABSORBING_HALF = -65472.0
# Weaker fills could meet real scores. A file holds it as its type rounds it.
_WEAKEST_FILL = -1e4

ROWS_WITHOUT_KEYS = "rows without keys: NaN in PyTorch, 0 in ONNX's Attention"
HALF_ROWS = "rows without keys: the mean of V where scores stay below 16, as in PyTorch"
SAFE_SOFTMAX = "rows without keys: 0, as in PyTorch; the unfused file gives the mean of V"


@dataclass(frozen=True, kw_only=True)
class Masking:
    """What the masks become.

    Args:
        causal: Whether the triangle is the attribute.
        terms: What remains of the masks, the one nearest to the softmax first.
        kind: `none`, `bool` or `float`.
        notes: What a user should know.
        even: Whether rows in which every key is filled need a query of zeros, see `even_rows`.
    """

    causal: bool
    terms: tuple[Term, ...]
    kind: str
    notes: tuple[str, ...]
    even: bool = False


def decide_masking(
    terms: list[Term], *, dtype: ir.DataType, sizes: tuple[Size, Size], guarded: bool, in_order: bool = True
) -> Masking:
    """Choose the strongest form that is certainly the same.

    Args:
        terms: The masks, the one nearest to the softmax first.
        dtype: Type of Q, K and V.
        sizes: How many queries and keys there are.
        guarded: Whether NaN weights become 0.
        in_order: Whether the last two axes of the scores are queries and keys. Elsewhere a triangle in the
            last two axes of a mask is not the causal one, and stays a mask.
    """
    lowest = float(ml_dtypes.finfo(dtype.numpy()).min)
    plain = plain_terms([_as_fill(term, lowest, guarded) for term in terms], dtype)
    weakest = float(dtype.numpy().type(_WEAKEST_FILL))
    at = _causal_at(plain, (lowest, weakest), sizes[0]) if in_order and same_dim(*sizes) else None
    rest = [term for index, term in enumerate(plain) if index != at]
    if not rest:
        return Masking(causal=at is not None, terms=(), kind="none", notes=())
    even = _needs_even_rows(rest, None if at is None else plain[at], dtype)
    if even:
        at, rest = None, plain  # a row may be without keys only because of the triangle
    hides = all(isinstance(term, Fill) and term.hides for term in rest)
    _check_fills(rest, weakest, even)
    _check_types(rest, dtype)
    filled = even and all(isinstance(term, Fill) for term in rest)
    return Masking(
        causal=at is not None,
        terms=tuple(rest),
        kind="bool" if hides or filled else "float",
        notes=_notes(terms, rest, hides=hides, guarded=guarded),
        even=even,
    )


def _needs_even_rows(terms: list[Term], causal: Term | None, dtype: ir.DataType) -> bool:
    """Whether no number of a float mask gives the mean of V in rows without keys."""
    if not any(_is_put(term) for term in terms):
        return False
    if dtype == ir.DataType.FLOAT16:
        return True
    # What is added may hold numbers as low as the fill, or lower ones. With an added triangle over the fill
    # there is no other form.
    return any(isinstance(term, Bias) for term in terms) and not isinstance(causal, Bias)


def _is_put(term: Term) -> bool:
    """Whether masked scores are set to a finite number."""
    return isinstance(term, Fill) and not term.hides and not term.added


def _notes(before: list[Term], after: list[Term], *, hides: bool, guarded: bool) -> tuple[str, ...]:
    if hides and guarded:
        return (SAFE_SOFTMAX,) if _finite_bias(before) else ()
    if hides:
        return (ROWS_WITHOUT_KEYS,)
    added = any(isinstance(term, Fill) and term.added and term.fill > ABSORBING for term in after)
    return (HALF_ROWS,) if added else ()


def _causal_at(terms: list[Term], enough: tuple[float, float], size: Size) -> int | None:
    """The position of a mask that is the causal triangle and can be said by the attribute.

    Args:
        terms: The masks.
        enough: The largest numbers that leave a key no weight: added to its score, and in its place.
        size: How many queries and keys there are.
    """
    for index, term in enumerate(terms):
        hidden = _hidden_by_triangle(term) if _spans_square(term.tensor, size) else None
        filled_after = any(isinstance(outer, Fill) and not outer.hides for outer in terms[:index])
        if hidden == -math.inf and not filled_after:
            return index
        # A finite number hides future keys only as long as each row has a visible one: nothing else may mask.
        if hidden is not None and hidden <= enough[_is_put(term)] and len(terms) == 1:
            return index
    return None


def _spans_square(mask: ir.Value, size: Size) -> bool:
    """Whether a mask has a row for each query and a column for each key."""
    dims = dims_of(mask) or ()
    return len(dims) >= 2 and all(same_or_cut(each, size) for each in dims[-2:])


def _hidden_by_triangle(term: Term) -> float | None:
    """The number on the future keys, where a mask is the triangle and leaves the others alone."""
    found = triangle_of(term.condition if isinstance(term, Fill) else term.value)
    if found is None:
        return None
    if isinstance(term, Fill):
        return term.fill if (bool(found.seen), bool(found.hidden)) == (term.shown, not term.shown) else None
    hidden = found.hidden * term.factor
    return hidden if found.seen == 0 and hidden < 0 else None


def _as_fill(term: Term, lowest: float, guarded: bool) -> Term:
    """An added `Where(mask, 0, -inf)` as the boolean mask that it is."""
    node = term.value.producer() if isinstance(term, Bias) else None
    if node is None or not is_op(node, "Where") or node.inputs[0] is None or not isinstance(term, Bias):
        return term
    numbers = [scalar_of(node.inputs[1]), scalar_of(node.inputs[2])]
    if 0.0 not in numbers or None in numbers:
        return term
    shown = numbers[0] == 0.0
    fill = (numbers[1] if shown else numbers[0]) or 0.0
    # PyTorch's exporter writes the boolean mask of scaled_dot_product_attention with the lowest float, and
    # the zero rows with a guard against NaN that never comes. What PyTorch computes is the boolean mask.
    if term.factor > 0 and (fill == -math.inf or (guarded and fill <= lowest)):
        return Fill(condition=node.inputs[0], shown=shown, fill=-math.inf)
    return term


def _finite_bias(terms: list[Term]) -> bool:
    """Whether an added mask holds a finite number in the place of -inf."""
    for term in terms:
        node = term.value.producer() if isinstance(term, Bias) else None
        if node is None or not is_op(node, "Where"):
            continue
        if -math.inf not in (scalar_of(node.inputs[1]), scalar_of(node.inputs[2])):
            return True
    return False


def _check_fills(terms: list[Term], weakest: float, even: bool) -> None:
    at = [index for index, term in enumerate(terms) if isinstance(term, Fill) and not term.hides]
    fills = {term.fill for term in terms if isinstance(term, Fill) and not term.hides}
    if not fills:
        return
    if len(fills) > 1:
        raise NotFused("Masked scores are set to several finite numbers.", got=sorted(fills))
    fill = fills.pop()
    if not fill <= weakest:
        raise NotFused("Masked scores are set to a number that real scores could have.", got=fill)
    if even and not all(_is_put(terms[index]) for index in at):
        what = "A finite number is added to some scores and others are set to it: their sum is -inf in fp16."
        raise NotFused(what, got=fill, hint="fill with -inf")
    if any(isinstance(term, Bias) for term in terms[: max(at)]):
        raise NotFused("A tensor is added to scores that are masked already.", got=fill)


def _check_types(terms: list[Term], dtype: ir.DataType) -> None:
    for term in terms:
        if isinstance(term, Bias) and term.value.dtype != dtype:
            got = f"{term.value.dtype}, Q is {dtype}"
            raise NotFused("The tensor that is added to the scores has another type than Q.", got=got)


def build_mask(masking: Masking, builder: NodeBuilder, dtype: ir.DataType) -> ir.Value:
    """Write the remaining masks, of which there must be one, as one tensor in the layout of the scores."""
    if masking.kind == "bool":
        return visible_keys(masking.terms, builder)
    zero = builder.constant(0.0, dtype)
    absorbing = ABSORBING_HALF if dtype == ir.DataType.FLOAT16 else ABSORBING
    total: ir.Value | None = None
    for term in reversed(masking.terms):
        if isinstance(term, Fill):
            number = builder.constant(-math.inf if term.hides else absorbing, dtype)
            kept = zero if total is None else total
            pair = (kept, number) if term.shown else (number, kept)
            total = builder.op("Where", term.condition, *pair, name="mask")
        else:
            bias = scaled_bias(term, builder, dtype)
            total = bias if total is None else builder.op("Add", total, bias, name="mask")
    if total is None:
        raise ValueError("A mask needs a term.")
    return total


def visible_keys(terms: tuple[Term, ...], builder: NodeBuilder) -> ir.Value:
    """True where no condition masks the key; there must be one."""
    total: ir.Value | None = None
    for term in terms:
        if isinstance(term, Fill):
            shown = term.condition if term.shown else negated(term.condition, builder)
            total = shown if total is None else builder.op("And", total, shown, name="visible")
    if total is None:
        raise ValueError("A boolean mask needs a condition.")
    return total


def negated(condition: ir.Value, builder: NodeBuilder) -> ir.Value:
    """The opposite of a condition, without a second `Not`."""
    node = condition.producer()
    if node is not None and is_op(node, "Not") and node.inputs[0] is not None:
        return node.inputs[0]
    return builder.op("Not", condition, name="visible")


def scaled_bias(term: Bias, builder: NodeBuilder, dtype: ir.DataType) -> ir.Value:
    """What an added tensor adds to the scores."""
    if term.factor == 1.0:
        return term.value
    return builder.op("Mul", term.value, builder.constant(term.factor, dtype), name="bias")


def spans(terms: tuple[Term, ...], sizes: tuple[Size, Size]) -> bool:
    """Whether some mask has the full size of queries and keys already, so that their sum has it too."""
    shapes = [dims_of(term.tensor) or () for term in terms]
    return any(len(shape) >= 2 and same_dims(shape[-2:], sizes) for shape in shapes)
