"""Attention as ONNX Runtime's own operators: MultiHeadAttention and GroupQueryAttention of com.microsoft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from mha_deploy.graph.attention_node import PRESENT_KEY, PRESENT_VALUE, Y
from mha_deploy.graph.ir import NodeBuilder
from mha_deploy.graph.lower import cache as kv
from mha_deploy.graph.lower import masks
from mha_deploy.graph.lower.call import AttentionCall, Outputs, merge_heads, split_heads
from mha_deploy.graph.lower.operators import rotary_to_contrib, scatter_to_primitives
from mha_deploy.graph.lower.to_primitives import group_form
from mha_deploy.graph.roles import ORT_DOMAIN

MULTI_HEAD, GROUP_QUERY = "MultiHeadAttention", "GroupQueryAttention"

OPERATOR_RULES = {"RotaryEmbedding": rotary_to_contrib, "TensorScatter": scatter_to_primitives}
"""How the operators around attention are written; ONNX Runtime has no cache update of its own."""


def lower_to_contrib(call: AttentionCall, b: NodeBuilder, options: object) -> Outputs:
    """Write one attention as MultiHeadAttention or GroupQueryAttention."""
    attention = call.attention
    if call.has_fp64:
        raise call.refuse("fp64", got="fp64", hint="dialect onnx")
    if attention.has_qk_output:
        mode = f"qk_matmul_output_mode={attention.qk_output_mode}"
        raise call.refuse("attention weights as output", got=mode, hint="dialect onnx or primitives")
    if attention.scale == 0:
        raise call.refuse("scale of 0", got=0, hint="dialect onnx: in this one, 0 means the default scale")
    problem = _why_not_group_query(call)
    if not attention.softcap and (call.group == 1 or problem is not None):
        return _multi_head(call, b)
    if problem is None:
        return _group_query(call, b)
    got = f"S={attention.S}, T={attention.T}, D={call.D}, Dv={call.Dv}, Hq={call.Hq}, Hkv={call.Hkv}"
    hint = "dialect onnx: ONNX Runtime's Attention has softcap"
    raise call.refuse(f"softcap with {problem}", got=got, hint=hint)


def _why_not_group_query(call: AttentionCall) -> str | None:
    several = call.past_key is not None and call.attention.S != 1 and call.attention.B != 1
    problems = {
        "other key than query length": not call.is_square,
        "nonpad_kv_seqlen": call.lengths is not None,
        "V head size other than K's": call.Dv != call.D,
        "head size that is not a multiple of 8": call.D % 8,
        "several tokens after a past in several batch elements": several,
    }
    return next((problem for problem, applies in problems.items() if applies), None)


def _multi_head(call: AttentionCall, b: NodeBuilder) -> Outputs:
    """MultiHeadAttention; keys and values of grouped heads are repeated."""
    attention, T = call.attention, call.key_length(b)
    # Otherwise the past is concatenated before it.
    joins_past = call.past_key is not None and call.is_square and call.Dv == call.D and call.group == 1
    # The operator's own causal mask is right where it receives as many new keys as queries, and the past
    # apart from them. With unequal lengths it follows neither corner: the mask is made explicit. A past that
    # is concatenated before the operator makes them unequal.
    own_causal = call.is_square and (call.past_key is None or joins_past)
    hides = call.mask is not None or call.lengths is not None or attention.has_window
    explicit = hides or (attention.is_causal and not own_causal)
    mask = masks.read_mask(b, call, call.query_length(b), T) if explicit else None
    attributes = {"num_heads": call.Hq, "scale": call.scale}
    attributes["unidirectional"] = int(attention.is_causal and not explicit)
    if joins_past:
        tensors = [*_merged(b, call, mask), None, None, _bias(b, call, mask), call.past_key, call.past_value]
        y, key, value = _contrib(b, MULTI_HEAD, tensors, 3, attributes)
        return {Y: _finish(b, call, mask, y), PRESENT_KEY: key, PRESENT_VALUE: value}
    heads = call.heads(b)
    tensors = [*_merged(b, call, mask)]
    if call.past_key is not None or call.group > 1:
        form = group_form(b, call, "repeat")
        sizes = (heads.k, call.D), (heads.v, call.Dv)
        tensors[1:] = [merge_heads(b, form.keys(x, None, size), call.Hq * size) for x, size in sizes]
    y = _contrib(b, MULTI_HEAD, [*tensors, None, None, _bias(b, call, mask)], 1, attributes)[0]
    return {Y: _finish(b, call, mask, y), PRESENT_KEY: heads.k, PRESENT_VALUE: heads.v}


def _group_query(call: AttentionCall, b: NodeBuilder) -> Outputs:
    attention = call.attention
    # The operator's own window looks back only, and only when causal; any other becomes a bias.
    own_window = attention.is_causal and attention.has_window and call.mask is None
    explicit = call.mask is not None or (attention.has_window and not own_window)
    T = call.key_length(b)
    mask = masks.read_mask(b, call, call.query_length(b), T) if explicit else None
    # The index of the last key for each batch element, and the number of keys.
    total = b.op("Cast", b.as_tensor(T), to=int(ir.DataType.INT32))
    last = b.op("Sub", total, b.constant([1], ir.DataType.INT32))
    lengths = [b.expand(last, b.size(call.q, 0), name="last_key"), b.op("Squeeze", total, name="key_count")]
    tensors = [*_merged(b, call, mask), call.past_key, call.past_value, *lengths]
    tensors += [None, None, None, _above_lowest(b, call, _bias(b, call, mask))]
    attributes = _group_query_attributes(call, attention.left_window if own_window else -1)
    if call.dtype == ir.DataType.FLOAT16 and call.scale < 1:
        # The CPU's kernel multiplies before it scales, and overflows. By a power of two it is exact.
        exponent = math.floor(math.log2(call.scale))
        tensors[0] = b.op("Mul", tensors[0], b.constant(2.0**exponent, call.dtype), name="q_scaled")
        attributes["scale"] = call.scale * 2.0**-exponent
    # Omitted when causal: the attribute is newer than the operator.
    attributes["causal"] = None if attention.is_causal else 0
    y, key, value = _contrib(b, GROUP_QUERY, tensors, 3, attributes)
    return {Y: _finish(b, call, mask, y), PRESENT_KEY: key, PRESENT_VALUE: value}


def _group_query_attributes(call: AttentionCall, left_window: int) -> dict[str, Any]:
    return {
        "num_heads": call.Hq,
        "kv_num_heads": call.Hkv,
        "scale": call.scale,
        "softcap": call.attention.softcap or None,
        # ONNX counts the keys before the query's own, ONNX Runtime the own one too.
        "local_window_size": left_window + 1 if left_window >= 0 else None,
    }


def _merged(b: NodeBuilder, call: AttentionCall, mask: masks.Mask | None) -> list[ir.Value]:
    """Queries, new keys and new values as `[B, ·, H·D]`."""
    q, is_merged = call.q, call.attention.rank == 3
    if lost := mask is not None and masks.narrows(call, mask):
        apart = split_heads(b, q, call.Hq, call.D) if is_merged else q
        q = masks.without_lost_queries(b, call, mask, apart)
    widths = (q, call.Hq * call.D), (call.k, call.Hkv * call.D), (call.v, call.Hkv * call.Dv)
    merged = [is_merged and not (x is q and lost) for x, _ in widths]
    return [x if done else merge_heads(b, x, width) for (x, width), done in zip(widths, merged, strict=True)]


def _contrib(
    b: NodeBuilder, op_type: str, tensors: list[ir.Value | None], outputs: int, attributes: dict[str, Any]
) -> Sequence[ir.Value]:
    while tensors[-1] is None:
        tensors = tensors[:-1]
    return b.node(op_type, tensors, outputs=outputs, domain=ORT_DOMAIN, name=b.prefix, attributes=attributes)


def _bias(b: NodeBuilder, call: AttentionCall, mask: masks.Mask | None) -> ir.Value | None:
    """The bias of every query."""
    if mask is None:
        return None
    bias = masks.bias_of(b, call, mask, in_score_type=True)
    return masks.of_each_query(b, call, mask, bias, call.query_length(b))


def _above_lowest(b: NodeBuilder, call: AttentionCall, bias: ir.Value | None) -> ir.Value | None:
    """The bias with the next number in place of the lowest, which this operator takes for -inf."""
    if bias is None or call.attention.mask in ("bool", "none") or call.dtype == ir.DataType.FLOAT16:
        return bias
    lowest = ml_dtypes.finfo(call.dtype.numpy()).min
    above = b.constant(float(np.nextafter(lowest, call.dtype.numpy().type(0))), call.dtype)
    return b.op("Where", b.op("Equal", bias, b.constant(float(lowest), call.dtype)), above, bias)


def _finish(b: NodeBuilder, call: AttentionCall, mask: masks.Mask | None, y: ir.Value) -> ir.Value:
    """Zero fully masked queries, and bring the result to the rank the node was written in."""
    rows = masks.attending_queries(b, call, mask)
    if mask is None or rows is None:
        return y if call.attention.rank == 3 else split_heads(b, y, call.Hq, call.Dv)
    if call.attention.rank == 3 and mask.heads == 1:
        return masks.zero_masked_queries(b, call, b.op("Squeeze", rows, b.ints(1)), y)
    y = masks.zero_masked_queries(b, call, rows, split_heads(b, y, call.Hq, call.Dv))
    return call.as_input_rank(b, y)


# -- A preallocated KV cache, which GroupQueryAttention updates in place ---------------------------


def append_to_caches(model: ir.Model, options: object) -> None:
    """Write every attention with a preallocated cache as one operator that appends to it; changes the model.

    What the operator does not have (a mask, a bidirectional layer) is left to the other rules, but for head
    sizes, which are refused.
    """

    def wanted(call: AttentionCall) -> bool:
        if not call.attention.is_causal or call.mask is not None or call.has_fp64:
            return False
        what, sizes = "preallocated cache of", f"K {call.D}, V {call.Dv}"
        if call.D % 8:
            what = f"{what} a head size that is not a multiple of 8"
            raise call.refuse(what, got=call.D, hint="dialect onnx")
        if call.Dv != call.D:
            raise call.refuse(f"{what} V head size other than K's", got=sizes, hint="dialect onnx")
        return True

    def write(call: AttentionCall, b: NodeBuilder, cache: kv.CachedAttention) -> None:
        new = (call.q, call.Hq), (cache.new_key, call.Hkv), (cache.new_value, call.Hkv)
        tensors = [merge_heads(b, x, heads * call.D) for x, heads in new]
        total = next((value for value in model.graph.inputs if value.name == kv.TOTAL_LENGTH), None)
        if total is None:  # one for all attentions
            total = ir.val(kv.TOTAL_LENGTH, ir.DataType.INT32, [])
            model.graph.inputs.append(total)
        tensors += [cache.past_key, cache.past_value, _last_entries(b, call, cache.starts), total]
        attributes = _group_query_attributes(call, call.attention.left_window)
        y, *states = _contrib(b, GROUP_QUERY, [*tensors], 3, attributes)
        kv.take_over(model, call.node, b, cache, split_heads(b, y, call.Hq, call.D), *states)

    kv.rewrite_caches(model, write, wanted)


def _last_entries(b: NodeBuilder, call: AttentionCall, starts: ir.Value) -> ir.Value:
    """Index of the last valid entry of each batch element after the call: lengths + S − 1, int32 [B]."""
    S = call.query_length(b)
    first = b.op("Cast", starts, to=int(ir.DataType.INT32), name="first_new_row")
    if S == 1:
        return first
    if isinstance(S, int):
        return b.op("Add", first, b.constant([S - 1], ir.DataType.INT32), name="last_row")
    # Counted on the device: a size is a number in host memory, and its transfer would forbid CUDA graphs.
    ones = ir.tensor([1], dtype=ir.DataType.INT32)
    each = b.op("ConstantOfShape", b.shape_of(b.size(call.q, 0), S), value=ones)
    tokens = b.op("ReduceSum", each, b.ints(1), keepdims=0, name="new_tokens")
    last_of_new = b.op("Sub", tokens, b.constant([1], ir.DataType.INT32))
    return b.op("Add", first, last_of_new, name="last_row")
