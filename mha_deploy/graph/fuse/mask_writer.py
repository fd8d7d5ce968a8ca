"""Write the masks of attentions, each once: the layers of a model share theirs."""

from __future__ import annotations

import onnx_ir as ir

from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.fuse.masks import Masking, Size, build_mask, spans

_HEAD_AXIS = 1


class Masks:
    """The masks that were written so far. Attentions must come in the order of the graph."""

    def __init__(self) -> None:
        # The key holds the values themselves, so that no id is used again for another.
        self._written: dict[tuple[object, ...], ir.Value] = {}

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
    ) -> ir.Value | None:
        """The mask as `[B or 1, Hq or 1, S, T]`, spelled out over queries and keys; None without masks.

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
            return None
        key = (masking.terms, masking.kind, dtype, layout, *map(_size_key, sizes), id(graph))
        if key not in self._written:
            mask = _spelled_out(masking, builder, dtype, layout, sizes, rows)
            if not all(_is_known(size) for size in sizes):
                return mask
            self._written[key] = mask
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
) -> ir.Value:
    scores, order = layout
    mask = build_mask(masking, builder, dtype)
    rank = max(_rank(term.tensor) for term in masking.terms)
    if rank < len(scores):
        mask = builder.unsqueeze(mask, *range(len(scores) - rank))
    mask = turned(mask, scores, order, builder)
    if len(order) == 3:
        mask = builder.unsqueeze(mask, _HEAD_AXIS)
    if scores == order and spans(masking.terms, sizes):
        return mask
    return builder.expand(mask, 1, 1, builder.size(rows[0], -2), builder.size(rows[1], -2))


def _rank(value: ir.Value) -> int:
    return len(value.shape) if value.shape is not None else 0


def _is_known(size: Size) -> bool:
    return isinstance(size, int) or size.value is not None


def _size_key(size: Size) -> object:
    return size if isinstance(size, int) else str(size.value)
