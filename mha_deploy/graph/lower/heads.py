"""Steps on queries, keys and values: split and merge heads, join the past, share heads in groups."""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from mha_deploy.graph.build import NodeBuilder, Size
from mha_deploy.graph.lower.call import AttentionCall


class Heads(NamedTuple):
    """Queries `[B, Hq, S, D]`, keys `[B, Hkv, T, D]` and values `[B, Hkv, T, Dv]`, past included."""

    q: ir.Value
    k: ir.Value
    v: ir.Value


def split_inputs(b: NodeBuilder, call: AttentionCall) -> Heads:
    """Bring the inputs to 4-D with the past joined in front."""
    q, k, v = call.q, call.k, call.v
    if call.facts.rank == 3:
        q = split_heads(b, q, call.Hq, call.D, name="q_heads")
        k = split_heads(b, k, call.Hkv, call.D, name="k_heads")
        v = split_heads(b, v, call.Hkv, call.Dv, name="v_heads")
    if call.past_key is not None:
        k = b.op("Concat", call.past_key, k, axis=2, name="present_key")
        v = b.op("Concat", call.past_value, v, axis=2, name="present_value")
    return Heads(q, k, v)


def query_length(b: NodeBuilder, call: AttentionCall) -> Size:
    """S."""
    return b.size(call.q, 1 if call.facts.rank == 3 else 2)


def key_length(b: NodeBuilder, call: AttentionCall) -> Size:
    """T, past included."""
    new = b.size(call.k, 1 if call.facts.rank == 3 else 2)
    if call.past_key is None:
        return new
    past = b.size(call.past_key, 2)
    if isinstance(new, int) and isinstance(past, int):
        return past + new
    return b.op("Add", b.as_tensor(past), b.as_tensor(new), name="total_length")


def split_heads(b: NodeBuilder, x: ir.Value, heads: int, size: int, name: str | None = None) -> ir.Value:
    """`[B, S, H·D]` to `[B, H, S, D]`."""
    rows = b.reshape(x, 0, 0, heads, size)
    return b.transpose(rows, 0, 2, 1, 3, name=name)


def merge_heads(b: NodeBuilder, x: ir.Value, width: int, name: str | None = None) -> ir.Value:
    """`[B, H, S, D]` to `[B, S, H·D]`."""
    return b.reshape(b.transpose(x, 0, 2, 1, 3), 0, 0, width, name=name)


def as_input_rank(b: NodeBuilder, call: AttentionCall, y: ir.Value) -> ir.Value:
    """Bring a 4-D result to the rank the node was written in."""
    return merge_heads(b, y, call.Hq * call.Dv, name="merged") if call.facts.rank == 3 else y
