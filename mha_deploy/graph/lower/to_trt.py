"""Attention as TensorRT's parser accepts it (10.14 and later, and TensorRT-RTX).

The parser accepts one output, and either one mask (boolean or of the query's type) or `is_causal`. It refuses
past, present, softcap and softmax_precision, and it *ignores* key lengths and windows. So the past becomes a
Concat, and everything that masks keys becomes one explicit mask.

`RotaryEmbedding`, `TensorScatter` and `RMSNormalization` stay: the parser has them from 10.15 on.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from mha_deploy.graph.attention_node import PRESENT_KEY, PRESENT_VALUE, QK_OUTPUT, Y
from mha_deploy.graph.ir import NodeBuilder
from mha_deploy.graph.lower.call import (
    AttentionCall,
    Heads,
    LoweringError,
    OperatorRules,
    as_input_rank,
    key_length,
    query_length,
    split_inputs,
)
from mha_deploy.graph.lower.masks import attending_queries, bias_of, read_mask, zero_masked_queries
from mha_deploy.graph.lower.operators import keep_scatter
from mha_deploy.graph.lower.to_primitives import OPERATOR_RULES, PrimitivesOptions, lower_to_primitives


@dataclass(frozen=True, kw_only=True)
class TrtOptions:
    """Which rewrites are allowed.

    Args:
        decompose: Write a node that the fused operator cannot express as matmuls instead of
            refusing it. It will be slower.
        pad_heads: Where V's head size differs from K's, pad the smaller with zeros: exact, and fused.
        explicit_causal: Write `is_causal` as a mask, too, unless there are certainly as many keys as
            queries; for a target whose causal alignment is not documented.
        decode_primitives: Write `RotaryEmbedding`, `TensorScatter` and `RMSNormalization` in primitive
            operators: for TensorRT 10.14, which has none, and for a cache that cannot be updated in place.
    """

    decompose: bool = False
    pad_heads: bool = False
    explicit_causal: bool = False
    decode_primitives: bool = False


def operator_rules(options: TrtOptions) -> OperatorRules:
    """The rules for the operators around attention."""
    return OPERATOR_RULES if options.decode_primitives else {"TensorScatter": keep_scatter}


def lower_to_trt(call: AttentionCall, b: NodeBuilder, options: TrtOptions) -> dict[int, ir.Value] | None:
    """Write one attention for TensorRT; None where it can stay as it is."""
    refusal = _refusal(call, options)
    if refusal is not None and not options.decompose:
        raise refusal
    if refusal is not None:
        return lower_to_primitives(call, b, PrimitivesOptions(opset=None))
    return _rebuild(call, b, options) if _needs_change(call, options) else None


def _refusal(call: AttentionCall, options: TrtOptions) -> LoweringError | None:
    """The error for what the fused operator cannot express."""
    attention = call.attention
    decompose = "--allow-decomposed (decompose=True) writes it as matmuls: slower, not fused"
    if attention.softcap:
        return call.refuse("softcap", got=attention.softcap, hint=decompose)
    if call.Dv != call.D and not options.pad_heads:
        hint = f"pad_heads=True pads with zeros, or {decompose}"
        return call.refuse("V head size other than K's", got=f"K {call.D}, V {call.Dv}", hint=hint)
    if "fp64" in (attention.dtype, attention.softmax_precision):
        got = attention.softmax_precision or attention.dtype
        return call.refuse("fp64", got=got, hint="export in fp16, bf16 or fp32")
    return None


def _needs_change(call: AttentionCall, options: TrtOptions) -> bool:
    attention = call.attention
    return (
        attention.mask != "none"
        or attention.has_past
        or len(call.node.outputs) > 1
        or len(call.node.inputs) > 3
        or attention.softmax_precision is not None
        or "left_window_size" in call.node.attributes
        or "right_window_size" in call.node.attributes
        or call.Dv != call.D
        or (attention.is_causal and options.explicit_causal and not call.is_square)
    )


def _rebuild(call: AttentionCall, b: NodeBuilder, options: TrtOptions) -> dict[int, ir.Value]:
    """The Attention node with 4-D inputs, one output and at most one mask.

    The mask is additive, which the fused kernel takes; a boolean one costs small kernels before it. The
    precision of the softmax is left to TensorRT, which computes it in FP32.
    """
    attention, heads = call.attention, split_inputs(b, call)
    # `is_causal` alone means the same in TensorRT where the diagonal starts at the first key.
    cached = attention.has_past or attention.has_nonpad_kv_seqlen
    alone = attention.mask == "none" and not cached and not attention.has_window
    causal = attention.is_causal and alone and (call.is_square or not options.explicit_causal)
    mask = None if causal else read_mask(b, call, query_length(b, call), key_length(b, call))
    rows = attending_queries(b, call, mask)
    tensors = [*_same_head_size(b, call, heads)]
    if mask is not None:
        tensors.append(bias_of(b, call, mask))
    y = b.op("Attention", *tensors, name=b.prefix, scale=call.scale, is_causal=1 if causal else None)
    if call.Dv < call.D:
        y = b.op("Slice", y, b.ints(0), b.ints(call.Dv), b.ints(3), name="unpadded")
    y = zero_masked_queries(b, call, rows, y)
    outputs = {Y: as_input_rank(b, call, y), PRESENT_KEY: heads.k, PRESENT_VALUE: heads.v}
    return outputs if not attention.has_qk_output else outputs | _scores_beside(call, b)


def _scores_beside(call: AttentionCall, b: NodeBuilder) -> dict[int, ir.Value]:
    """The scores or weights, computed a second time: a fused kernel does not output its own.

    Their nodes have another prefix, so that fusion verdicts do not count them as parts of the attention.
    """
    own = call.attention.name
    side = NodeBuilder(f"{own}_scores{b.prefix.removeprefix(own)}")
    written = lower_to_primitives(call, side, PrimitivesOptions(opset=None))
    b.nodes += side.live_nodes([written[QK_OUTPUT]])
    return {QK_OUTPUT: written[QK_OUTPUT]}


def _same_head_size(b: NodeBuilder, call: AttentionCall, heads: Heads) -> Heads:
    """Pad the smaller head size with zeros: they add nothing to a score, and are sliced off the output."""

    def padded(x: ir.Value) -> ir.Value:
        pads = b.ints(0, 0, 0, 0, 0, 0, 0, abs(call.D - call.Dv))
        return b.op("Pad", x, pads, b.constant(0.0, call.dtype), name="padded")

    if call.Dv < call.D:
        return heads._replace(v=padded(heads.v))
    return heads if call.Dv == call.D else heads._replace(q=padded(heads.q), k=padded(heads.k))
