"""ONNX Runtime's own attention operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from mha_deploy.graph.attention_node import PRESENT_KEY, PRESENT_VALUE, Y, is_attention
from mha_deploy.graph.ir import NodeBuilder, Size, infer_shapes, names_in, prefix_within
from mha_deploy.graph.lower.cache import STATIC, TOTAL_LENGTH, CachedAttention, read_cache, take_over
from mha_deploy.graph.lower.call import (
    AttentionCall,
    Heads,
    as_input_rank,
    copy_of,
    key_length,
    merge_heads,
    query_length,
    read_call,
    split_heads,
    split_inputs,
)
from mha_deploy.graph.lower.groups import Repeat
from mha_deploy.graph.lower.masks import Mask, bias_of, read_mask, rows_to_keep, zero_closed_rows
from mha_deploy.graph.lower.operators import rotary_to_contrib, scatter_to_primitives

# -- Attention as com.microsoft operators, for ONNX Runtime ----------------------------------------

DIALECT = "contrib"
DOMAIN = "com.microsoft"

OPERATOR_RULES = {"RotaryEmbedding": rotary_to_contrib, "TensorScatter": scatter_to_primitives}
"""What becomes of the operators around attention; ONNX Runtime has no cache update of its own."""


@dataclass(frozen=True, kw_only=True)
class ContribOptions:
    """What may be done to fit ONNX Runtime's own operators.

    Args:
        repeat_kv: Copy keys and values for each query head where `GroupQueryAttention` cannot be used.
        cache: `append` lets `GroupQueryAttention` write the new rows of a static cache, which brings an input
            `total_length` (see `contrib_cache`); `copy` writes them with ScatterND before an attention.
    """

    repeat_kv: bool = False
    cache: str = "append"

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
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
    # Otherwise the past is concatenated before it.
    joins_past = call.past_key is not None and call.is_square and call.Dv == call.D and call.group == 1
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
    rows = rows_to_keep(b, call, mask)
    if mask is None or rows is None:
        return y if call.facts.rank == 3 else split_heads(b, y, call.Hq, call.Dv)
    if call.facts.rank == 3 and mask.heads == 1:
        return zero_closed_rows(b, call, b.op("Squeeze", rows, b.ints(1)), y)
    return as_input_rank(b, call, zero_closed_rows(b, call, rows, split_heads(b, y, call.Hq, call.Dv)))


# -- A static cache for ONNX Runtime: com.microsoft `GroupQueryAttention` writes the new rows i ----

OP_TYPE = "GroupQueryAttention"


APPEND, COPY = "append", "copy"


def append_to_caches(model: ir.Model, options: ContribOptions, *, dialect: str) -> ir.Model:
    """Write every attention behind a static cache as one operator that appends to it.

    What the operator does not have (a mask, a bidirectional layer, other pattern) is left to the other rules.

    Args:
        model: The model; it is not changed.
        options: Options of the lowering; `cache` decides.
        dialect: Name used in messages.

    Raises:
        LoweringError: A cache is static, and its head size is none that the operator has.
    """
    if options.cache == COPY:
        return model
    lowered = copy_of(model)
    taken = names_in(lowered)
    for node in [node for node in lowered.graph.all_nodes() if is_attention(node)]:
        cache = read_cache(node)
        if not isinstance(cache, CachedAttention) or cache.kind != STATIC:
            continue
        call = read_call(node, opset=lowered.opset_imports.get(""), dialect=dialect)
        if _has_place(call):
            builder = NodeBuilder(prefix_within(call.facts.name, taken))
            _rewrite(lowered, call, builder, cache)
    RemoveUnusedNodesPass()(lowered)
    return infer_shapes(lowered)


def _has_place(call: AttentionCall) -> bool:
    """Whether the operator can express the attention; refused where only its sizes forbid it."""
    facts = call.facts
    if not facts.is_causal or call.mask is not None or "fp64" in (facts.dtype, facts.softmax_precision):
        return False
    hint = "cache=copy with repeat_kv=True, or dialect onnx"
    if call.D % 8:
        raise call.refuse("static cache of a head size no multiple of 8", got=call.D, hint=hint)
    if call.Dv != call.D:
        raise call.refuse(
            "static cache of V head size other than K's", got=f"K {call.D}, V {call.Dv}", hint=hint
        )
    return True


def _rewrite(model: ir.Model, call: AttentionCall, b: NodeBuilder, cache: CachedAttention) -> None:
    widths = (
        (call.q, call.Hq * call.D),
        (cache.new_key, call.Hkv * call.D),
        (cache.new_value, call.Hkv * call.D),
    )
    tensors = [merge_heads(b, x, width) for x, width in widths]
    tensors += [cache.past_key, cache.past_value, _last_rows(b, call, cache), _total_length(model)]
    window = call.facts.left_window
    attributes = {
        "num_heads": call.Hq,
        "kv_num_heads": call.Hkv,
        "scale": call.scale,
        "softcap": call.facts.softcap or None,
        # ONNX counts the keys before the query's own, ONNX Runtime the own one too.
        "local_window_size": window + 1 if window >= 0 else None,
    }
    y, *states = b.node(OP_TYPE, tensors, outputs=3, domain=DOMAIN, name=b.prefix, attributes=attributes)
    take_over(model, call, b, cache, split_heads(b, y, call.Hq, call.D), states)


def _last_rows(b: NodeBuilder, call: AttentionCall, cache: CachedAttention) -> ir.Value:
    """Index of the last valid row of each batch row after the call: lengths + S − 1, int32 [B]."""
    if cache.starts is None:
        raise call.refuse("static cache without lengths")
    starts, S = cache.starts, query_length(b, call)
    first = b.op("Cast", starts, to=int(ir.DataType.INT32), name="first_new_row")
    if isinstance(S, int):
        return (
            first if S == 1 else b.op("Add", first, b.constant([S - 1], ir.DataType.INT32), name="last_row")
        )
    # Counted on the device: a size is a number in host memory, and its transfer would forbid CUDA graphs.
    ones = ir.tensor([1], dtype=ir.DataType.INT32)
    each = b.op("ConstantOfShape", b.shape_of(b.size(call.q, 0), S), value=ones)
    tokens = b.op("ReduceSum", each, b.ints(1), keepdims=0, name="new_tokens")
    last_of_new = b.op("Sub", tokens, b.constant([1], ir.DataType.INT32))
    return b.op("Add", first, last_of_new, name="last_row")


def _total_length(model: ir.Model) -> ir.Value:
    """The graph input, one for all attentions."""
    for value in model.graph.inputs:
        if value.name == TOTAL_LENGTH:
            return value
    total = ir.Value(name=TOTAL_LENGTH, type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape([]))
    model.graph.inputs.append(total)
    return total
