"""Mistakes about which keys a query sees, without a cache and behind one."""

from __future__ import annotations

import onnx_ir as ir

from mha_deploy.graph.attention_node import (
    MASK,
    NONPAD_KV_SEQLEN,
    PAST_KEY,
    PAST_VALUE,
    AttentionNode,
    K,
    Q,
    V,
    input_at,
)
from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.sabotage_wiring import feed, feed_one_less, scatter_of

_WRITE_INDICES = 2  # where TensorScatter takes them


def mask_dropped(node: ir.Node, facts: AttentionNode) -> bool:
    """Every query sees every key that the mask hides."""
    if facts.mask == "none":
        return False
    node.replace_input_with(MASK, None)
    return True


def mask_off_by_one(node: ir.Node, facts: AttentionNode) -> bool:
    """The mask is shifted by a key: every query sees the first one that it should not."""
    mask = input_at(node, MASK)
    if mask is None or facts.mask != "bool":
        return False
    build = NodeBuilder(f"{node.name}/sabotage")
    first, rest = build.ints(0), build.ints(1)
    axis = build.ints(3)
    head = build.op("Slice", mask, first, rest, axis)
    tail = build.op("Slice", mask, first, build.ints(-1), axis)
    feed(node, MASK, build, build.op("Concat", head, tail, axis=3))
    return True


def causal_dropped(node: ir.Node, facts: AttentionNode) -> bool:
    """Every query sees the future."""
    if not facts.is_causal:
        return False
    node.attributes["is_causal"] = ir.AttrInt64("is_causal", 0)
    return True


def causal_off_by_one(node: ir.Node, facts: AttentionNode) -> bool:
    """Every query sees one key of the future."""
    return _other_diagonal(node, facts, ahead=1, behind_cache=True)


def past_forgotten(node: ir.Node, facts: AttentionNode) -> bool:
    """The diagonal of a layer with a cache starts at its first key, as if the cache were empty."""
    cached = facts.has_past or facts.has_nonpad_kv_seqlen
    return cached and _other_diagonal(node, facts, ahead=0, behind_cache=False)


def cache_off_by_one(node: ir.Node, facts: AttentionNode) -> bool:
    """The past comes in one row late, or the new rows are written one row early."""
    if facts.has_past:
        return all(_shift_past(node, at) for at in (PAST_KEY, PAST_VALUE))
    for scatter in (scatter_of(node, at) for at in (K, V)):
        starts = input_at(scatter, _WRITE_INDICES) if scatter is not None else None
        if scatter is None or starts is None:
            return False
        feed_one_less(scatter, _WRITE_INDICES, NodeBuilder(f"{scatter.name}/sabotage"), starts)
    return True


def _shift_past(node: ir.Node, position: int) -> bool:
    past = input_at(node, position)
    if past is None:
        return False
    build = NodeBuilder(f"{node.name}/sabotage_{position}")
    axis, first = build.ints(2), build.ints(0)
    head = build.op("Slice", past, first, build.ints(1), axis)
    tail = build.op("Slice", past, first, build.ints(-1), axis)
    feed(node, position, build, build.op("Concat", head, tail, axis=2))
    return True


def _other_diagonal(node: ir.Node, facts: AttentionNode, *, ahead: int, behind_cache: bool) -> bool:
    """Write causality as a mask whose diagonal stands elsewhere.

    Args:
        node: The attention.
        facts: What it says.
        ahead: How many keys of the future a query sees.
        behind_cache: Whether the first query stands behind what the cache holds.
    """
    q, k, mask = input_at(node, Q), input_at(node, K), input_at(node, MASK)
    if not causal_dropped(node, facts) or q is None or k is None or q.dtype is None:
        return False
    build = NodeBuilder(f"{node.name}/sabotage")
    axis = 1 if facts.rank == 3 else 2
    S, T = (build.op("Shape", value, start=axis, end=axis + 1) for value in (q, k))
    start, T = _start(build, node, S, T)
    rows = build.unsqueeze(_count(build, S), 1)
    rows = build.op("Add", rows, build.ints(ahead))
    if behind_cache and start is not None:
        rows = build.op("Add", build.reshape(start, -1, 1, 1, 1), rows)
    else:
        rows = build.unsqueeze(rows, 0, 1)
    seen = build.op("LessOrEqual", _count(build, T), rows)
    if mask is not None and facts.mask == "bool":
        seen = build.op("And", seen, mask)
    elif mask is not None:
        seen = build.op("Where", seen, mask, build.constant(float("-inf"), q.dtype))
    feed(node, MASK, build, seen)
    return True


def _start(build: NodeBuilder, node: ir.Node, S: ir.Value, T: ir.Value) -> tuple[ir.Value | None, ir.Value]:
    """Where the first query of every row stands, None without a cache, and how many keys there are."""
    past, ends = input_at(node, PAST_KEY), input_at(node, NONPAD_KV_SEQLEN)
    if past is not None:
        P = build.op("Shape", past, start=2, end=3)
        return P, build.op("Add", P, T)
    return (None if ends is None else build.op("Sub", ends, S)), T


def _count(build: NodeBuilder, length: ir.Value) -> ir.Value:
    zero, one = (build.constant(number, ir.DataType.INT64) for number in (0, 1))
    return build.op("Range", zero, build.op("Squeeze", length), one)
