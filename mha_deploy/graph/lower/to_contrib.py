"""Attention as com.microsoft operators, for ONNX Runtime.

`MultiHeadAttention` takes one key/value head for each query head, and any bias on the scores.
`GroupQueryAttention` shares heads, caps scores and has a window, but wants as many new keys as queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import onnx_ir as ir

from mha_deploy.graph.attention_node import PRESENT_KEY, PRESENT_VALUE, Y
from mha_deploy.graph.build import NodeBuilder, Size
from mha_deploy.graph.lower.call import AttentionCall
from mha_deploy.graph.lower.groups import Repeat
from mha_deploy.graph.lower.heads import (
    Heads,
    as_input_rank,
    key_length,
    merge_heads,
    query_length,
    split_heads,
    split_inputs,
)
from mha_deploy.graph.lower.masks import Mask, bias_of, read_mask, rows_to_keep, zero_closed_rows
from mha_deploy.graph.lower.rotary import rotary_to_contrib
from mha_deploy.graph.lower.scatter import scatter_to_primitives

DIALECT = "contrib"
DOMAIN = "com.microsoft"

OPERATOR_RULES = {"RotaryEmbedding": rotary_to_contrib, "TensorScatter": scatter_to_primitives}
"""What becomes of the operators around attention; ONNX Runtime has no cache update of its own."""


@dataclass(frozen=True, kw_only=True)
class ContribOptions:
    """What may be done to fit ONNX Runtime's own operators.

    Args:
        repeat_kv: Copy keys and values for each query head where `GroupQueryAttention` cannot be used.
        empty_rows: `zero` for what ONNX asks of a query that sees no key; `ignore` where none exists.
        cache: `append` lets `GroupQueryAttention` write the new rows of a static cache, which brings an input
            `total_length` (see `contrib_cache`); `copy` writes them with ScatterND before an attention.
    """

    repeat_kv: bool = False
    empty_rows: str = "zero"
    cache: str = "append"

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "empty_rows": ("zero", "ignore"),
        "cache": ("append", "copy"),
    }


def lower_to_contrib(call: AttentionCall, b: NodeBuilder, options: ContribOptions) -> dict[int, ir.Value]:
    """Write one attention as MultiHeadAttention or GroupQueryAttention."""
    _refuse_what_neither_has(call)
    if call.group == 1 and not call.facts.softcap:
        return _multi_head(call, b, options)
    problem = _why_not_group_query(call)
    if problem is None:
        return _group_query(call, b, options)
    if call.facts.softcap:
        raise call.refuse(f"softcap with {problem}", got=_lengths_and_sizes(call), hint="dialect onnx")
    if not options.repeat_kv:
        raise call.refuse(
            f"grouped heads with {problem}",
            got=_lengths_and_sizes(call),
            hint="dialect onnx (ONNX Runtime's Attention shares heads itself), or repeat_kv=True",
        )
    return _multi_head(call, b, options)


def _refuse_what_neither_has(call: AttentionCall) -> None:
    facts = call.facts
    if "fp64" in (facts.dtype, facts.softmax_precision):
        raise call.refuse("fp64", got=facts.softmax_precision or facts.dtype, hint="dialect onnx")
    if facts.has_qk_output:
        mode = f"qk_matmul_output_mode={facts.qk_output_mode}"
        raise call.refuse("attention weights as output", got=mode, hint="dialect onnx or primitives")


def _why_not_group_query(call: AttentionCall) -> str | None:
    if not call.is_square:
        return "other key than query length"
    if call.lengths is not None:
        return "nonpad_kv_seqlen"
    if call.Dv != call.D:
        return "V head size other than K's"
    if call.D % 8:
        return "head size no multiple of 8"
    return None


def _lengths_and_sizes(call: AttentionCall) -> str:
    facts = call.facts
    return f"S={facts.S}, T={facts.T}, D={call.D}, Dv={call.Dv}, Hq={call.Hq}, Hkv={call.Hkv}"


# -- MultiHeadAttention ------------------------------------------------------------------------


def _multi_head(call: AttentionCall, b: NodeBuilder, options: ContribOptions) -> dict[int, ir.Value]:
    facts = call.facts
    joins_past = _joins_past(call)
    # The operator's own causal mask is right where it receives as many new keys as queries, and the past
    # apart from them. With unequal lengths it follows neither corner: the mask is made explicit. A past that
    # is concatenated before the operator makes them unequal.
    own_causal = call.is_square and (call.past_key is None or joins_past)
    hides = call.mask is not None or call.lengths is not None or facts.has_window
    explicit = hides or (facts.is_causal and not own_causal)
    mask = read_mask(b, call, query_length(b, call), key_length(b, call)) if explicit else None
    attributes = {
        "num_heads": call.Hq,
        "scale": call.scale,
        "unidirectional": int(facts.is_causal and not explicit),
    }
    if joins_past:
        return _multi_head_with_past(call, b, options, mask, attributes)
    heads = split_inputs(b, call)
    tensors = _widths(b, call, heads)
    y = _contrib(b, "MultiHeadAttention", [*tensors, None, None, _bias(b, call, mask)], 1, attributes)[0]
    return {Y: _finish(b, call, options, mask, y), PRESENT_KEY: heads.k, PRESENT_VALUE: heads.v}


def _joins_past(call: AttentionCall) -> bool:
    """Whether MultiHeadAttention takes the past as an input; otherwise it is concatenated before it."""
    return call.past_key is not None and call.is_square and call.Dv == call.D and call.group == 1


def _multi_head_with_past(
    call: AttentionCall,
    b: NodeBuilder,
    options: ContribOptions,
    mask: Mask | None,
    attributes: dict[str, Any],
) -> dict[int, ir.Value]:
    """The operator joins the past itself."""
    tensors = [*_new_widths(b, call), None, None, _bias(b, call, mask), call.past_key, call.past_value]
    y, key, value = _contrib(b, "MultiHeadAttention", tensors, 3, attributes)
    return {Y: _finish(b, call, options, mask, y), PRESENT_KEY: key, PRESENT_VALUE: value}


def _widths(b: NodeBuilder, call: AttentionCall, heads: Heads) -> list[ir.Value]:
    """Queries, keys and values as `[B, ·, Hq·D]`, past included."""
    if call.group == 1 and call.past_key is None:
        return _new_widths(b, call)
    k, v = heads.k, heads.v
    if call.group > 1:
        k = Repeat().keys(b, call, k, None, call.D)
        v = Repeat().keys(b, call, v, None, call.Dv)
    q = call.q if call.facts.rank == 3 else merge_heads(b, call.q, call.Hq * call.D)
    return [q, merge_heads(b, k, call.Hq * call.D), merge_heads(b, v, call.Hq * call.Dv)]


def _new_widths(b: NodeBuilder, call: AttentionCall) -> list[ir.Value]:
    """Queries, new keys and new values as `[B, ·, H·D]`."""
    if call.facts.rank == 3:
        return [call.q, call.k, call.v]
    widths = (call.Hq * call.D, call.Hkv * call.D, call.Hkv * call.Dv)
    tensors = (call.q, call.k, call.v)
    return [merge_heads(b, x, width) for x, width in zip(tensors, widths, strict=True)]


# -- GroupQueryAttention -----------------------------------------------------------------------


def _group_query(call: AttentionCall, b: NodeBuilder, options: ContribOptions) -> dict[int, ir.Value]:
    facts = call.facts
    # The operator's own window looks back only, and only when causal; any other becomes a bias.
    own_window = facts.is_causal and facts.has_window and call.mask is None
    explicit = call.mask is not None or (facts.has_window and not own_window)
    T = key_length(b, call)
    mask = read_mask(b, call, query_length(b, call), T) if explicit else None
    attributes = {
        "num_heads": call.Hq,
        "kv_num_heads": call.Hkv,
        "scale": call.scale,
        "softcap": facts.softcap or None,
        # ONNX counts the keys before the query's own, ONNX Runtime the own one too.
        "local_window_size": facts.left_window + 1 if own_window and facts.left_window >= 0 else None,
        # Left out when causal: the attribute is newer than the operator.
        "causal": None if facts.is_causal else 0,
    }
    lengths = _key_lengths(b, call, T)
    tensors = [*_new_widths(b, call), call.past_key, call.past_value, *lengths]
    tensors += [None, None, None, _bias(b, call, mask)]
    y, key, value = _contrib(b, "GroupQueryAttention", tensors, 3, attributes)
    return {Y: _finish(b, call, options, mask, y), PRESENT_KEY: key, PRESENT_VALUE: value}


def _key_lengths(b: NodeBuilder, call: AttentionCall, T: Size) -> list[ir.Value]:
    """Index of the last key for each batch row, and the number of keys."""
    total = b.op("Cast", b.as_tensor(T), to=int(ir.DataType.INT32))
    last = b.op("Sub", total, b.constant([1], ir.DataType.INT32))
    rows = b.expand(last, b.size(call.q, 0), name="last_key")
    return [rows, b.op("Squeeze", total, name="key_count")]


# -- shared ------------------------------------------------------------------------------------


def _contrib(
    b: NodeBuilder, op_type: str, tensors: list[ir.Value | None], outputs: int, attributes: dict[str, Any]
) -> list[ir.Value]:
    while tensors[-1] is None:
        tensors = tensors[:-1]
    return list(
        b.node(op_type, tensors, outputs=outputs, domain=DOMAIN, name=b.prefix, attributes=attributes)
    )


def _bias(b: NodeBuilder, call: AttentionCall, mask: Mask | None) -> ir.Value | None:
    """The bias with a row for each query: these operators do not broadcast over queries."""
    if mask is None:
        return None
    bias = bias_of(b, call, mask)
    return b.expand(bias, 1, 1, query_length(b, call), 1) if mask.one_row else bias


def _finish(
    b: NodeBuilder, call: AttentionCall, options: ContribOptions, mask: Mask | None, y: ir.Value
) -> ir.Value:
    """Zero the rows that see no key, and bring the result to the rank the node was written in."""
    rows = rows_to_keep(b, call, mask, options.empty_rows)
    if mask is None or rows is None:
        return y if call.facts.rank == 3 else split_heads(b, y, call.Hq, call.Dv)
    if call.facts.rank == 3 and mask.heads == 1:
        return zero_closed_rows(b, call, b.op("Squeeze", rows, b.ints(1)), y)
    return as_input_rank(b, call, zero_closed_rows(b, call, rows, split_heads(b, y, call.Hq, call.Dv)))
