"""Attention in eight bits: TensorRT's own operator for it, or matmuls with Q/DQ behind the softmax.

In the canonical graph its weights are an output, which is quantized and multiplied with the values
(`QuantizedAttention`). Both forms below take the place of all of that.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from mha_deploy.graph.attention_node import QuantizedAttention, requantized
from mha_deploy.graph.ir import NodeBuilder, constant, input_at, made_by
from mha_deploy.graph.lower import masks
from mha_deploy.graph.lower.call import AttentionCall, QueryKeyValue, split_heads
from mha_deploy.graph.quantize import OPERATOR

DOMAIN = "trt"
_LEAST_NORMAL = float(np.finfo(np.float16).smallest_normal)


def quantized_heads(call: AttentionCall, b: NodeBuilder, found: QuantizedAttention) -> QueryKeyValue:
    """Q, K and V in 4-D, quantized and dequantized there; the queries times the scale, if FP16 holds it."""
    sizes = ((call.Hq, call.D), (call.Hkv, call.D), (call.Hkv, call.Dv))
    made = []
    for up, (heads, size), factor in zip(
        found.inputs, sizes, (folded_scale(call, found), 1.0, 1.0), strict=True
    ):
        quantize = made_by(input_at(up, 0), "QuantizeLinear")
        x = None if quantize is None else quantize.inputs[0]
        if x is not None and call.attention.rank == 3:
            x = split_heads(b, x, heads, size)
        made.append(requantized(b, up, x, factor))
    return QueryKeyValue(*made)


def folded_scale(call: AttentionCall, found: QuantizedAttention) -> float:
    """The factor on the scores, if the dequantized queries can have it, else 1."""
    held = constant(found.inputs[0].inputs[1])
    fits = held is not None and float(held.numpy().min()) * call.scale >= _LEAST_NORMAL
    return call.scale if fits else 1.0


def write_operator(call: AttentionCall, b: NodeBuilder, found: QuantizedAttention) -> ir.Value:
    """TensorRT's operator, whose inputs are dequantized tensors in 4-D; the heads in 4-D."""
    attention, weights = call.attention, found.weights
    unscaled = replace(call, attention=replace(attention, scale=1.0))  # it has its own scale
    q, k, v = quantized_heads(unscaled, b, found)
    causal = attention.is_causal and attention.mask == "none" and call.is_square and not attention.has_window
    mask = None if causal else masks.read_mask(b, call, call.query_length(b), call.key_length(b))
    rows = masks.attending_queries(b, call, mask)
    bias = None if mask is None else masks.bias_of(b, call, mask)
    scale = None if weights is None else weights.inputs[1]
    stored = None if weights is None or weights.inputs[0] is None else weights.inputs[0].dtype
    attributes = {
        "scale": call.scale,
        "is_causal": 1 if causal else None,
        "normalization_quantize_to_type": int(stored or ir.DataType.FLOAT8E4M3FN),
    }
    inputs = [q, k, v, bias, scale]
    (y,) = b.node(OPERATOR, inputs, domain=DOMAIN, name=b.prefix, attributes=attributes)
    y.type, y.shape = ir.TensorType(call.dtype), _shape_of(found)
    return masks.zero_masked_queries(b, call, rows, y)


def _shape_of(found: QuantizedAttention) -> ir.Shape | None:
    """The shape of the heads, which no inference knows of TensorRT's operator."""
    return None if found.matmul is None else found.matmul.outputs[0].shape
