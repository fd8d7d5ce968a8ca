"""Write the masks of attentions, each once: the layers of a model share theirs."""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.fuse.even_rows import even_mask, rank_of
from mha_deploy.graph.fuse.masks import Masking, Size, build_mask, spans

_HEAD_AXIS = 1


class Written(NamedTuple):
    """A mask of the graph.

    Args:
        mask: `[B or 1, Hq or 1, S, T]`; None where nothing is masked.
        zero: `[B or 1, Hq or 1, S or 1, 1]`, True for queries that must become zero; None for none.
    """

    mask: ir.Value | None
    zero: ir.Value | None = None


class Masks:
    """The masks that were written so far. Attentions must come in the order of the graph."""

    def __init__(self) -> None:
        # The key holds the values themselves, so that no id is used again for another.
        self._written: dict[tuple[object, ...], Written] = {}

    def write(
        self,
        masking: Masking,
        builder: NodeBuilder,
        *,
        dtype: ir.DataType,
        layout: tuple[str, str],
        sizes: tuple[Size, Size],
        rows: tuple[ir.Value, ir.Value],
        graph: object,
    ) -> Written:
        """The mask, spelled out over queries and keys, and the queries that it wants to be zero.

        Args:
            masking: What the masks become.
            builder: Holds the new nodes; they must be inserted into the graph of the masks.
            dtype: Type of Q, K and V.
            layout: The letters of the scores, and those of the mask; without a head where they are 3-D.
            sizes: How many queries and keys there are.
            rows: Q and K in the layout of Attention, from which unknown sizes are read.
            graph: The graph that holds the attention. A mask of a subgraph is not seen outside of it.
        """
        if not masking.terms:
            return Written(mask=None)
        key = (masking.terms, masking.kind, masking.even, dtype, layout, *map(_size_key, sizes), id(graph))
        if key not in self._written:
            written = _spelled_out(masking, builder, dtype, layout, sizes, rows)
            if not all(_is_known(size) for size in sizes):
                return written
            self._written[key] = written
        return self._written[key]


def turned(value: ir.Value, letters: str, order: str, builder: NodeBuilder) -> ir.Value:
    """A value with its axes in another order."""
    if letters == order:
        return value
    result = builder.transpose(value, *(letters.index(letter) for letter in order))
    if value.shape is not None:
        result.shape = ir.Shape([value.shape[letters.index(letter)] for letter in order])
    if value.dtype is not None:
        result.dtype = value.dtype
    return result


def _spelled_out(
    masking: Masking,
    builder: NodeBuilder,
    dtype: ir.DataType,
    layout: tuple[str, str],
    sizes: tuple[Size, Size],
    rows: tuple[ir.Value, ir.Value],
) -> Written:
    scores, order = layout

    def lay_out(value: ir.Value, rank: int) -> ir.Value:
        if rank < len(scores):
            value = builder.unsqueeze(value, *range(len(scores) - rank))
        value = turned(value, scores, order, builder)
        return builder.unsqueeze(value, _HEAD_AXIS) if len(order) == 3 else value

    zero: ir.Value | None = None
    if masking.even:
        mask, zero = even_mask(masking, builder, dtype, lay_out)
    else:
        mask = lay_out(build_mask(masking, builder, dtype), rank_of(masking.terms))
    if scores != order or not spans(masking.terms, sizes):
        mask = builder.expand(mask, 1, 1, builder.size(rows[0], -2), builder.size(rows[1], -2))
    return Written(mask=mask, zero=zero)


def _is_known(size: Size) -> bool:
    return isinstance(size, int) or size.value is not None


def _size_key(size: Size) -> object:
    return size if isinstance(size, int) else str(size.value)
