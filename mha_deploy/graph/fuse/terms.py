"""Read the masks of an attention as plainly as they can be said, without changing a number.

Exported masks are made of pieces: a triangle and a padding mask joined, copied over the batch, turned into
numbers, added to a bias. Only the pieces show what is causal and what is not needed at all.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from mha_deploy.graph.fuse.conditions import conditions_of
from mha_deploy.graph.fuse.facts import adds_leading_ones, dims_of, is_op, same_dims, scalar_of
from mha_deploy.graph.fuse.scores import Bias, Fill, Term
from mha_deploy.graph.fuse.triangle import triangle_of

# A sum of two float16 beyond this is -inf; up to it, the sum with a score is this number again.
_LOWEST_HALF = -65472.0
_MAX_RESHAPES = 4
_ABSORBS = -1e30  # added to a score in float32, bfloat16 or float64, it leaves only itself


def plain_terms(terms: list[Term], dtype: ir.DataType) -> list[Term]:
    """The same masks in their simplest pieces, the one nearest to the softmax first.

    Args:
        terms: The masks, the one nearest to the softmax first.
        dtype: Type of Q, K and V.
    """
    pieces = [piece for term in terms for piece in _taken_apart(term, dtype)]
    added = [piece for piece in pieces if isinstance(piece, Fill) and piece.added and not piece.hides]
    # Two of them make -inf where both hide a key, and what is added later might be another.
    if added and (len(added) > 1 or pieces[0] is not added[0]):
        pieces = list(terms)
    return [piece for term in pieces for piece in _needed(term)]


def _taken_apart(term: Term, dtype: ir.DataType) -> list[Term]:
    """An added mask as what it hides and what it adds to the rest."""
    if isinstance(term, Fill):
        return [term]
    if scalar_of(term.value) == 0.0:
        return []
    node = term.value.producer()
    if node is None:
        return [term]
    first = _before_layout(term.value, node)
    if first is not None:
        return _taken_apart(Bias(value=first, factor=term.factor), dtype)
    if is_op(node, "Where"):
        return _from_where(term, node, dtype)
    if is_op(node, "Add"):
        sides = [Bias(value=each, factor=term.factor) for each in node.inputs if each is not None]
        parts = [part for side in reversed(sides) for part in _taken_apart(side, dtype)]
        return parts if len(parts) < 2 or any(isinstance(part, Fill) for part in parts) else [term]
    return [term]


def _before_layout(value: ir.Value, node: ir.Node) -> ir.Value | None:
    """A mask before it was copied or given more axes: broadcasting does the same."""
    if is_op(node, "Identity", "Expand") or adds_leading_ones(node):
        return node.inputs[0]
    return _before_reshapes(value)


def _before_reshapes(value: ir.Value) -> ir.Value | None:
    """What a chain of reshapes started from, where it ends in the shape that it started with."""
    shape, node = dims_of(value), value.producer()
    for _ in range(_MAX_RESHAPES):
        source = node.inputs[0] if node is not None and is_op(node, "Reshape") else None
        if source is None or shape is None:
            return None
        if same_dims(dims_of(source) or (), shape):
            return source
        node = source.producer()
    return None


def _from_where(term: Bias, node: ir.Node, dtype: ir.DataType) -> list[Term]:
    condition, first, second = node.inputs
    if condition is None or first is None or second is None or not term.factor > 0:
        return [term]
    for shown, kept, other in ((True, first, second), (False, second, first)):
        number = scalar_of(other)
        fill = None if number is None else number * term.factor
        if fill is None or not _absorbs(fill, dtype) or scalar_of(kept) == number:
            continue
        rest = _taken_apart(Bias(value=kept, factor=term.factor), dtype)
        # What -inf hides may be anything, NaN too: it must stay hidden by this very Where.
        return [term] if rest and fill == -math.inf else [_hidden(condition, shown, fill), *rest]
    return [term]


def _hidden(condition: ir.Value, shown: bool, fill: float) -> Fill:
    return Fill(condition=condition, shown=shown, fill=fill, added=True)


def _absorbs(number: float, dtype: ir.DataType) -> bool:
    if number == -math.inf:
        return True
    return number <= (_LOWEST_HALF if dtype == ir.DataType.FLOAT16 else _ABSORBS)


def _needed(term: Term) -> list[Term]:
    """A fill by the conditions that can hide a key; nothing where none can."""
    if isinstance(term, Bias):
        return [term]
    parts = conditions_of(term.condition, term.shown)
    if len(parts) > 1 and not (term.hides and any(triangle_of(value) is not None for value, _ in parts)):
        return [term]  # taking it apart would only make more nodes
    return [Fill(condition=value, shown=shown, fill=term.fill, added=term.added) for value, shown in parts]
