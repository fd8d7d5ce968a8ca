"""Which keys a query sees, in the plugin's words: diagonal, window, key lengths, and a bias for the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import onnx_ir as ir

from mha_deploy.graph.build import NodeBuilder, Size
from mha_deploy.graph.lower.call import AttentionCall, same_size
from mha_deploy.graph.lower.masks import Mask, bias_of, given_mask, may_be_short, rows_to_keep, with_geometry
from mha_deploy.graph.lower.prefix_mask import prefix_lengths
from mha_deploy.graph.plugin_node import BOTTOM_RIGHT, NO_WINDOW, NONE, TOP_LEFT


class Diagonal(NamedTuple):
    """The attributes `causal`, `left_window` and `right_window` of the node."""

    causal: int = NONE
    left: int = NO_WINDOW
    right: int = NO_WINDOW


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What hides keys from queries.

    Args:
        diagonal: Causal and window.
        key_lengths: Valid keys of each batch row, int32 `[B]`.
        bias: Added to the scores, `[B or 1, Hq or 1, S, T]`.
        open_rows: `[·, ·, ·, 1]`, False for queries that the bias leaves no key; the plugin itself cares for
            those of diagonal and lengths.
        heads: Size of the second axis of `open_rows`.
    """

    diagonal: Diagonal
    key_lengths: ir.Value | None = None
    bias: ir.Value | None = None
    open_rows: ir.Value | None = None
    heads: int = 1


def read_sight(
    b: NodeBuilder,
    call: AttentionCall,
    S: Size,
    T: Size,
    *,
    empty_rows: str,
    in_cache: bool = False,
) -> Sight:
    """Say in the plugin's words what an attention sees.

    Args:
        b: Builder of the new nodes.
        call: The attention.
        S: Number of queries.
        T: Number of keys, past included.
        empty_rows: `zero` or `ignore`, the option that every dialect has.
        in_cache: Whether the plugin writes the cache, and so knows the key lengths without being told.
    """
    diagonal = diagonal_of(call)
    if diagonal is None or _has_no_kernel(call, diagonal):
        return _all_in_bias(b, call, S, T, empty_rows)
    counted = None if in_cache else call.lengths
    prefix = _prefix(call, diagonal, T)
    mask = None if prefix is not None else given_mask(b, call, T)
    if prefix is not None:
        counted = prefix
    key_lengths = None if counted is None else as_int32(b, before_casts(counted), name="key_lengths")
    if mask is None:
        return Sight(diagonal=diagonal, key_lengths=key_lengths)
    whole = with_geometry(b, call, mask, S, T)
    return Sight(
        diagonal=diagonal,
        key_lengths=key_lengths,
        bias=_bias(b, call, mask, S),
        open_rows=rows_to_keep(b, call, whole, empty_rows),
        heads=mask.heads,
    )


def _has_no_kernel(call: AttentionCall, diagonal: Diagonal) -> bool:
    """Whether cuDNN would have to end a diagonal at the last counted key and add a bias: it cannot."""
    return diagonal.causal == BOTTOM_RIGHT and call.lengths is not None and call.mask is not None


def diagonal_of(call: AttentionCall) -> Diagonal | None:
    """Causal and window as attributes; None where the plugin aligns them otherwise than ONNX."""
    facts = call.facts
    # A window that ends with the query's own key is causal, by whatever name.
    causal = facts.is_causal or facts.right_window == 0
    if not causal and not facts.has_window:
        return Diagonal()
    left, right = facts.left_window, NO_WINDOW if causal else facts.right_window
    if call.past_key is None and call.lengths is None:
        return Diagonal(TOP_LEFT if causal else NONE, left, right)
    # Behind a past, or up to the last valid key: the lower right corner, if every query has its own key.
    aligned = call.lengths is not None or call.is_square
    return Diagonal(BOTTOM_RIGHT, left, right) if causal and aligned else None


def _prefix(call: AttentionCall, diagonal: Diagonal, T: Size) -> ir.Value | None:
    """The lengths behind a mask that says "keys before lengths[b]" and nothing else."""
    columns = (call.facts.mask_dims or (None,))[-1]
    if call.mask is None or call.lengths is not None or may_be_short(call, columns, T):
        return None
    # In the lower right corner the diagonal would end at the last valid key; ONNX lets it end at the last.
    return None if diagonal.causal == BOTTOM_RIGHT else prefix_lengths(call.mask, batch=call.facts.B)


def _all_in_bias(b: NodeBuilder, call: AttentionCall, S: Size, T: Size, empty_rows: str) -> Sight:
    mask = with_geometry(b, call, given_mask(b, call, T), S, T)
    if mask is None:
        return Sight(diagonal=Diagonal())
    return Sight(
        diagonal=Diagonal(),
        bias=_bias(b, call, mask, S),
        open_rows=rows_to_keep(b, call, mask, empty_rows),
        heads=mask.heads,
    )


def _bias(b: NodeBuilder, call: AttentionCall, mask: Mask, S: Size) -> ir.Value:
    """The bias with a row for each query: the kernels do not broadcast over queries."""
    bias = bias_of(b, call, mask)
    rows = (call.facts.mask_dims or ())[-2:-1]
    certain = not mask.one_row and (call.mask is None or same_size(call.facts.S, rows[0] if rows else None))
    return bias if certain else b.expand(bias, 1, 1, S, 1, name="bias_of_each_query")


def as_int32(b: NodeBuilder, value: ir.Value, *, name: str) -> ir.Value:
    """Whole numbers as int32, with their shape."""
    narrow = b.cast(value, ir.DataType.INT32, name=name)
    narrow.dtype, narrow.shape = ir.DataType.INT32, value.shape
    return narrow


def before_casts(value: ir.Value) -> ir.Value:
    """The int32 that a value was widened from, where it was; else the value itself."""
    node = value.producer()
    source = node.inputs[0] if node is not None and node.op_type == "Cast" and node.domain == "" else None
    return source if source is not None and source.dtype == ir.DataType.INT32 else value
