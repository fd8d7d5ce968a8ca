"""Attention as TensorRT's parser accepts it (10.14 and later, and TensorRT-RTX).

The parser accepts one output, and either one mask (boolean or of the query's type) or `is_causal`. It refuses
past, present, softcap and softmax_precision, and it *ignores* key lengths and windows. So the past becomes a
Concat, and everything that masks keys becomes one explicit mask.

`RotaryEmbedding`, `TensorScatter` and `RMSNormalization` stay: the parser has them from 10.15 on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from mha_deploy.graph.attention_node import (
    PRESENT_KEY,
    PRESENT_VALUE,
    QK_OUTPUT,
    QuantizedAttention,
    Y,
    is_attention,
    read_attention,
    upcast_of,
)
from mha_deploy.graph.ir import (
    SCORES_SUFFIX,
    NodeBuilder,
    constant,
    input_at,
    is_op,
    node_name,
    prefix_within,
    prefixes_in,
)
from mha_deploy.graph.lower import masks
from mha_deploy.graph.lower.call import AttentionCall, LoweringError, OperatorRules, Outputs
from mha_deploy.graph.lower.operators import INDEXING_RULES, keep_scatter, reshape_to_known_sizes
from mha_deploy.graph.lower.quantized import write_operator
from mha_deploy.graph.lower.to_primitives import (
    OPERATOR_RULES,
    PrimitivesOptions,
    lower_to_primitives,
    quantized_to_primitives,
)
from mha_deploy.graph.roles import MATMULS

LEAST_HEADS = 4
"""So many, over all batch elements, TensorRT-RTX's kernel for a single query needs."""


@dataclass(frozen=True, kw_only=True)
class TrtOptions:
    """Which rewrites are allowed."""

    # Write a node that the fused operator cannot express as matmuls, which are slower, instead of refusing it
    decompose: bool = False
    pad_heads: bool = False  # where V's head size differs from K's, pad the smaller: exact, and fused
    # Write `is_causal` as a mask, too, unless there are certainly as many keys as queries; for a target whose
    # causal alignment is not documented
    explicit_causal: bool = False
    # Write the operators around attention in primitive ones: for TensorRT 10.14, which has none of them, and
    # for a cache that cannot be updated in place
    decode_primitives: bool = False
    # Write attention in FP8 as matmuls with Q/DQ, too: for sizes of which TensorRT's operator has no kernel
    quantized_primitives: bool = False
    # Compute the heads of a single query several times, up to `LEAST_HEADS`: exact, and fused
    repeat_heads: bool = False


def quantized_to_trt(
    call: AttentionCall, b: NodeBuilder, found: QuantizedAttention, options: TrtOptions
) -> ir.Value:
    """The heads of an attention in eight bits, in 4-D."""
    plain = not call.attention.softcap and call.Dv == call.D
    if found.type == "fp8" and plain and not options.quantized_primitives:
        return write_operator(call, b, found)
    return quantized_to_primitives(call, b, found, PrimitivesOptions())


def operator_rules(options: TrtOptions) -> OperatorRules:
    """The rules for the operators around attention."""
    if options.decode_primitives:
        return OPERATOR_RULES
    return {"Reshape": reshape_to_known_sizes, "TensorScatter": keep_scatter, **INDEXING_RULES}


def lower_to_trt(call: AttentionCall, b: NodeBuilder, options: TrtOptions) -> Outputs | None:
    """Write one attention for TensorRT; None where it can stay as it is."""
    refusal = _refusal(call, options)
    if refusal is not None:
        if not options.decompose:
            raise refusal
        return lower_to_primitives(call, b, PrimitivesOptions())
    attention, causal_as_mask = call.attention, options.explicit_causal and not call.is_square
    changes = len(call.node.inputs) > 3 or len(call.node.outputs) > 1 or call.Dv != call.D
    attributes = ("softmax_precision", "left_window_size", "right_window_size")
    changes = changes or any(name in call.node.attributes for name in attributes)
    changes = changes or _copies(call, options) > 1
    return _rebuild(call, b, options) if changes or (attention.is_causal and causal_as_mask) else None


def _refusal(call: AttentionCall, options: TrtOptions) -> LoweringError | None:
    """The error for what the fused operator cannot express."""
    decompose = "--allow-decomposed writes it as matmuls: slower, not fused"
    if call.attention.softcap:
        return call.refuse("softcap", got=call.attention.softcap, hint=decompose)
    if call.Dv != call.D and not options.pad_heads:
        hint = f"pad the smaller with zeros, or {decompose}"
        return call.refuse("V head size other than K's", got=f"K {call.D}, V {call.Dv}", hint=hint)
    return call.refuse("fp64", got="fp64", hint="export in fp16, bf16 or fp32") if call.has_fp64 else None


def _copies(call: AttentionCall, options: TrtOptions) -> int:
    """How often each query head is computed."""
    is_few = options.repeat_heads and call.attention.S == 1
    return math.ceil(LEAST_HEADS / call.Hq) if is_few else 1


def _repeated(b: NodeBuilder, x: ir.Value, heads: int, copies: int) -> ir.Value:
    """`[·, H, 1, ·]` to `[·, H·n, 1, ·]`: n copies of each head, which share its keys and values."""
    return b.reshape(b.expand(x, 1, 1, copies, 1), 0, heads * copies, 1, -1, name="repeated")


def _rebuild(call: AttentionCall, b: NodeBuilder, options: TrtOptions) -> Outputs:
    """The Attention node with 4-D inputs, one output and at most one mask.

    The mask is additive, which the fused kernel takes; a boolean one costs small kernels before it. The
    precision of the softmax is left to TensorRT, which computes it in FP32.
    """
    attention, heads = call.attention, call.heads(b)
    # `is_causal` alone means the same in TensorRT where the diagonal starts at the first key.
    cached = attention.has_past or attention.has_nonpad_kv_seqlen
    alone = attention.mask == "none" and not cached and not attention.has_window
    causal = attention.is_causal and alone and (call.is_square or not options.explicit_causal)
    mask = None if causal else masks.read_mask(b, call, call.query_length(b), call.key_length(b))
    rows = masks.attending_queries(b, call, mask)
    # The smaller head size is padded with zeros: they add nothing to a score, and are sliced off the output.
    padded = () if call.Dv == call.D else ("v",) if call.Dv < call.D else ("q", "k")
    tensors = heads._asdict()
    if mask is not None and masks.narrows(call, mask):
        tensors["q"] = masks.without_lost_queries(b, call, mask, heads.q)
    for name in padded:
        pads = b.ints(0, 0, 0, 0, 0, 0, 0, abs(call.D - call.Dv))
        tensors[name] = b.op("Pad", tensors[name], pads, b.constant(0.0, call.dtype), name="padded")
    if mask is not None:
        tensors["mask"] = masks.bias_of(b, call, mask)
    if (copies := _copies(call, options)) > 1:
        of_heads = ("q", "mask") if mask is not None and mask.heads > 1 else ("q",)
        tensors |= {name: _repeated(b, tensors[name], call.Hq, copies) for name in of_heads}
    causality = 1 if causal else None
    y = b.op("Attention", *tensors.values(), name=b.prefix, scale=call.scale, is_causal=causality)
    if copies > 1:
        y = b.reshape(y, 0, call.Hq, copies, -1)
        y = b.op("Slice", y, b.ints(0), b.ints(1), b.ints(2), name="once")
    if call.Dv < call.D:
        y = b.op("Slice", y, b.ints(0), b.ints(call.Dv), b.ints(3), name="unpadded")
    y = masks.zero_masked_queries(b, call, rows, y)
    outputs = {Y: call.as_input_rank(b, y), PRESENT_KEY: heads.k, PRESENT_VALUE: heads.v}
    if attention.has_qk_output:
        # The scores are computed a second time: a fused kernel does not output its own. Their nodes have
        # another prefix, so that fusion verdicts do not count them as parts of the attention.
        side = NodeBuilder(f"{attention.name}{SCORES_SUFFIX}{b.prefix.removeprefix(attention.name)}")
        scores = lower_to_primitives(call, side, PrimitivesOptions())[QK_OUTPUT]
        b.nodes += side.live_nodes([scores])
        outputs[QK_OUTPUT] = scores
    return outputs


def keep_fp32(model: ir.Model, options: TrtOptions) -> bool:
    """Let what the graph computes in FP32 from upcast operands stay in FP32; whether that changed the model.

    TensorRT-RTX 1.7 multiplies in FP16 what it finds between two Casts, and rounds the weights, too: one
    beyond FP16 becomes infinite. It keeps a matmul that reads the result of arithmetic. So -0.0 is added to
    what was upcast: it changes no number, and is part of the kernel of the Cast. It also moves the Casts of
    an attention into it: it fuses one with all operands upcast in FP16, and crashes where another is FP32.
    """
    taken, changed = prefixes_in(model), False
    for node in [each for each in model.graph.all_nodes() if is_op(each, *MATMULS) or is_attention(each)]:
        operands = node.inputs if node.op_type == "Einsum" else node.inputs[: 3 if is_attention(node) else 2]
        casts = {value: upcast_of(value) for value in operands if constant(value) is None}
        is_narrowed = read_attention(node).upcasts > 0 if is_attention(node) else None not in casts.values()
        if not is_narrowed or node.graph is None:
            continue
        b = NodeBuilder(prefix_within(f"{node_name(node)}_in_fp32", taken))
        for value, cast in casts.items():
            # A weight in FP16 that was upcast stays as it is.
            if value is None or cast is None or constant(input_at(cast, 0)) is not None:
                continue
            kept = b.op("Add", value, b.constant(-0.0, ir.DataType.FLOAT), name="kept")
            kept.dtype, kept.shape = ir.DataType.FLOAT, value.shape
            for at, operand in enumerate(node.inputs):
                if operand is value:
                    node.replace_input_with(at, kept)
        node.graph.insert_before(node, b.nodes)
        changed = changed or bool(b.nodes)
    return changed
