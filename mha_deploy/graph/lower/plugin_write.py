"""The plugin's attention node itself, and what follows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import onnx_ir as ir

from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.lower.call import AttentionCall
from mha_deploy.graph.lower.heads import split_heads
from mha_deploy.graph.lower.masks import zero_closed_rows
from mha_deploy.graph.lower.plugin_operands import Operands
from mha_deploy.graph.lower.plugin_sight import Sight
from mha_deploy.graph.plugin_node import DOMAIN, OP_TYPE, lookup_attributes


class WrittenCache(NamedTuple):
    """A static cache that the node writes: `[B, Hkv, T, D]` twice, and int32 `[B]`: rows before the call."""

    key: ir.Value
    value: ir.Value
    starts: ir.Value


def write_attention(
    b: NodeBuilder,
    call: AttentionCall,
    operands: Operands,
    sight: Sight,
    cache: WrittenCache | None = None,
) -> Sequence[ir.Value]:
    """Write the node; its outputs, the first of them `[B, S, Hq·Dv]`.

    Args:
        b: Builder of the new nodes.
        call: The attention.
        operands: Where its queries, keys and values lie.
        sight: What hides keys.
        cache: The cache that it writes, where it does.
    """
    optional = [sight.bias, sight.key_lengths, *(cache or ())]
    attributes = {
        "query_heads": call.Hq,
        "key_heads": call.Hkv,
        "head_size": call.D,
        "value_size": call.Dv,
        "scale": float(call.scale),
        "causal": sight.diagonal.causal,
        "left_window": sight.diagonal.left,
        "right_window": sight.diagonal.right,
        "sources": list(operands.sources),
        "offsets": list(operands.offsets),
        "has_bias": int(sight.bias is not None),
        "has_key_lengths": int(sight.key_lengths is not None),
        "has_gates": 0,
        "has_cache": int(cache is not None),
        **lookup_attributes(),
    }
    outputs = b.node(
        OP_TYPE,
        [*operands.tensors, *(value for value in optional if value is not None)],
        outputs=1 if cache is None else 3,
        domain=DOMAIN,
        name=b.prefix,
        attributes=attributes,
    )
    y = outputs[0]
    y.dtype, y.shape = call.dtype, ir.Shape([call.facts.B, call.facts.S, call.Hq * call.Dv])
    return outputs


def finished(b: NodeBuilder, call: AttentionCall, sight: Sight, y: ir.Value) -> ir.Value:
    """Zero the rows that the bias leaves no key, and bring the result to the rank the node was written in."""
    y = _zero_closed_rows(b, call, sight, y)
    return y if call.facts.rank == 3 else split_heads(b, y, call.Hq, call.Dv)


def _zero_closed_rows(b: NodeBuilder, call: AttentionCall, sight: Sight, y: ir.Value) -> ir.Value:
    rows = sight.open_rows
    if rows is None:
        return y
    if sight.heads == 1:
        kept = zero_closed_rows(b, call, b.op("Squeeze", rows, b.ints(1)), y)
    else:
        # Where heads differ, they get an axis of their own; the numbers stay where they are.
        apart = b.reshape(y, 0, 0, call.Hq, call.Dv)
        kept = zero_closed_rows(b, call, b.transpose(rows, 0, 2, 1, 3), apart)
        kept = b.reshape(kept, 0, 0, call.Hq * call.Dv, name="closed_rows_merged")
    kept.dtype, kept.shape = call.dtype, y.shape
    return kept
