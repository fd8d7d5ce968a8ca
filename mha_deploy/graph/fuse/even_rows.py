"""Rows in which every key is filled with one finite number, where no number of the type stands for it.

A softmax over equal scores weighs its keys alike, and the result is the mean of V. In float32 and bfloat16
one number added to any score leaves only itself, so a float mask says it. In float16 none does, and beside an
added tensor, which may be a mask itself, there is none in any type. There a row that sees a key hides the
others, as a boolean mask would: the weight of a fill far below the scores is 0. A row that sees none gets a
query of zeros, and sees all keys that are filled: its scores are equal again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import ml_dtypes
import onnx_ir as ir

from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.fuse.masks import Masking, negated, scaled_bias, visible_keys
from mha_deploy.graph.fuse.scores import Bias, Fill, Term

LayOut = Callable[[ir.Value, int], ir.Value]
"""Brings a tensor that has the last axes of the scores, so many of them, into the layout of the mask."""


def even_mask(
    masking: Masking, builder: NodeBuilder, dtype: ir.DataType, lay_out: LayOut
) -> tuple[ir.Value, ir.Value]:
    """The mask, and `[·, ·, ·, 1]`: True for each query that sees no key, which must become zero.

    Args:
        masking: What the masks become. Nothing is added to scores that are filled.
        builder: Holds the new nodes.
        dtype: Type of Q, K and V.
        lay_out: Brings tensors into the layout of the mask.
    """
    fills = tuple(term for term in masking.terms if isinstance(term, Fill))
    added = [term for term in masking.terms if isinstance(term, Bias)]
    seen = lay_out(visible_keys(fills, builder), rank_of(fills))
    if not added and not any(term.hides for term in fills):
        empty = _sees_nothing(seen, builder)
        return builder.op("Or", seen, empty, name="mask"), empty
    filled = lay_out(_filled_keys(fills, builder), rank_of(fills))
    if not added:
        empty = _sees_nothing(seen, builder)
        return builder.op("Or", seen, builder.op("And", filled, empty), name="mask"), empty
    bias = lay_out(_sum_of(added, builder, dtype), rank_of(added))
    fill = next(term.fill for term in fills if not term.hides)
    return _with_bias(builder, dtype, fill, (seen, filled, bias))


def rank_of(terms: Sequence[Term]) -> int:
    """How many axes of the scores the masks have together."""
    return max(0 if term.tensor.shape is None else len(term.tensor.shape) for term in terms)


def _with_bias(
    builder: NodeBuilder, dtype: ir.DataType, fill: float, keys: tuple[ir.Value, ir.Value, ir.Value]
) -> tuple[ir.Value, ir.Value]:
    """The mask of numbers. A key that they push down to the fill is not seen: it counts as filled itself."""
    seen, filled, bias = keys
    in_range = fill >= float(ml_dtypes.finfo(dtype.numpy()).min)
    number = builder.constant(fill if in_range else -math.inf, dtype)
    if in_range:
        filled = builder.op("Or", filled, builder.op("And", seen, builder.op("Equal", bias, number)))
    seen = builder.op("And", seen, builder.op("Greater", bias, number))
    empty = _sees_nothing(seen, builder)
    mask = builder.op("Where", seen, bias, builder.constant(-math.inf, dtype))
    alike = builder.op("And", filled, empty)
    return builder.op("Where", alike, builder.constant(0.0, dtype), mask, name="mask"), empty


def _filled_keys(fills: tuple[Fill, ...], builder: NodeBuilder) -> ir.Value:
    """True where the score is the finite number: the fill nearest to the softmax decides."""
    total: ir.Value | None = None
    for term in reversed(fills):
        if not term.hides:
            hidden = negated(term.condition, builder) if term.shown else term.condition
            total = hidden if total is None else builder.op("Or", total, hidden)
        elif total is not None:
            shown = term.condition if term.shown else negated(term.condition, builder)
            total = builder.op("And", total, shown)
    if total is None:
        raise ValueError("Even rows need a finite fill.")
    return total


def _sum_of(added: list[Bias], builder: NodeBuilder, dtype: ir.DataType) -> ir.Value:
    total: ir.Value | None = None
    for term in reversed(added):
        bias = scaled_bias(term, builder, dtype)
        total = bias if total is None else builder.op("Add", total, bias, name="bias")
    if total is None:
        raise ValueError("A sum needs a term.")
    return total


def _sees_nothing(seen: ir.Value, builder: NodeBuilder) -> ir.Value:
    # Maximum over booleans came with opset 20 only, so it is taken over numbers.
    numbers = builder.op("Cast", seen, to=int(ir.DataType.FLOAT))
    most = builder.op("ReduceMax", numbers, builder.ints(-1), keepdims=1)
    some = builder.op("Cast", most, to=int(ir.DataType.BOOL))
    return builder.op("Not", some, name="sees_nothing")
