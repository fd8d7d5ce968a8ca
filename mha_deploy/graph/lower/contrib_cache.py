"""A static cache for ONNX Runtime: com.microsoft `GroupQueryAttention` writes the new rows itself.

Its past and present are one buffer of T rows where input and output are bound to the same memory; otherwise
the cache is copied, and what stands behind the valid rows is not kept. `seqlens_k` is the index of the last
valid row of each batch row, lengths + S − 1. With prompts of different lengths, padded on the right, that is
the padded length: a causal query does not see the padding behind it, and the next tokens are written over it.

`total_sequence_length` is a number in host memory, from which the operator tells a prompt from a token. It
becomes the graph input `total_length`; see `cache_form.TOTAL_LENGTH`.

ONNX Runtime has the operator in fp16 and bf16 on CUDA, and in fp32 and fp16 on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from mha_deploy.graph.attention_node import is_attention
from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.lower.cache_form import TOTAL_LENGTH
from mha_deploy.graph.lower.cache_pattern import STATIC, CachedAttention, read_cache
from mha_deploy.graph.lower.cache_rewrite import take_over
from mha_deploy.graph.lower.call import AttentionCall, read_call
from mha_deploy.graph.lower.heads import merge_heads, query_length, split_heads
from mha_deploy.graph.lower.rewrite import (
    copy_of,
    infer_shapes,
    names_in,
    prefix_within,
)

if TYPE_CHECKING:
    from mha_deploy.graph.lower.to_contrib import ContribOptions

OP_TYPE, DOMAIN = "GroupQueryAttention", "com.microsoft"

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
