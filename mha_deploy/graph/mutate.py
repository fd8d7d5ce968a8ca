"""Deliberate mistakes in a graph, which a validation must catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
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
    Y,
    is_attention,
    read_attention,
)
from mha_deploy.graph.ir import NodeBuilder, graph_of_node, input_at, made_by
from mha_deploy.model.spec import AttentionSpec

# -- Where a mistake is put into a graph: before an attention, behind it, or on the way to it ------

_NEW_ROWS = 1  # where TensorScatter takes them


def feed(node: ir.Node, position: int, build: NodeBuilder, value: ir.Value) -> None:
    """Put new nodes before a node and one of its inputs behind them."""
    old = input_at(node, position)
    value.type = old.type if old is not None else ir.TensorType(ir.DataType.BOOL)
    value.shape = old.shape if old is not None else None
    graph_of_node(node).insert_before(node, build.nodes)
    if position >= len(node.inputs):
        node.resize_inputs(position + 1)
    node.replace_input_with(position, value)


def feed_one_less(node: ir.Node, position: int, build: NodeBuilder, value: ir.Value) -> None:
    """Let a node take whole numbers that are one too small, but not below 0."""
    feed(node, position, build, build.op("Max", build.op("Sub", value, build.ints(1)), build.ints(0)))


def follow(node: ir.Node, build: NodeBuilder, wrong: ir.Value) -> None:
    """Put new nodes behind an attention, the last one in the place of its output."""
    output = node.outputs[Y]
    takers = [(new, at) for new in build.nodes for at, value in enumerate(new.inputs) if value is output]
    wrong.type, wrong.shape = output.type, output.shape
    output.replace_all_uses_with(wrong, replace_graph_outputs=True)
    for new, at in takers:
        new.replace_input_with(at, output)
    graph_of_node(node).insert_after(node, build.nodes)


def new_rows(node: ir.Node, position: int) -> ir.Value | None:
    """What the projections bring to K or V: the input itself, or what is written into a static cache."""
    scatter = scatter_of(node, position)
    if scatter is None:
        return input_at(node, position)
    value = scatter.inputs[_NEW_ROWS]
    while (layout := made_by(value, "Transpose", "Reshape")) is not None:
        value = layout.inputs[0]
    return value


def scatter_of(node: ir.Node, position: int) -> ir.Node | None:
    """The node that writes new rows into the static cache that an attention reads, if there is one."""
    return made_by(input_at(node, position), "TensorScatter")


# -- Mistakes about which keys a query sees, without a cache and behind one ------------------------

_WRITE_INDICES = 2  # where TensorScatter takes them


def mask_dropped(node: ir.Node, attention: AttentionNode) -> bool:
    """Every query sees every key that the mask hides."""
    if attention.mask == "none":
        return False
    node.replace_input_with(MASK, None)
    return True


def mask_off_by_one(node: ir.Node, attention: AttentionNode) -> bool:
    """The mask is shifted by a key: every query sees the first one that it should not."""
    mask = input_at(node, MASK)
    if mask is None or attention.mask != "bool":
        return False
    build = NodeBuilder(f"{node.name}/sabotage")
    first, rest = build.ints(0), build.ints(1)
    axis = build.ints(3)
    head = build.op("Slice", mask, first, rest, axis)
    tail = build.op("Slice", mask, first, build.ints(-1), axis)
    feed(node, MASK, build, build.op("Concat", head, tail, axis=3))
    return True


def causal_dropped(node: ir.Node, attention: AttentionNode) -> bool:
    """Every query sees the future."""
    if not attention.is_causal:
        return False
    node.attributes["is_causal"] = ir.AttrInt64("is_causal", 0)
    return True


def causal_off_by_one(node: ir.Node, attention: AttentionNode) -> bool:
    """Every query sees one key of the future."""
    return _other_diagonal(node, attention, ahead=1, behind_cache=True)


def past_forgotten(node: ir.Node, attention: AttentionNode) -> bool:
    """The diagonal of a layer with a cache starts at its first key, as if the cache were empty."""
    cached = attention.has_past or attention.has_nonpad_kv_seqlen
    return cached and _other_diagonal(node, attention, ahead=0, behind_cache=False)


def cache_off_by_one(node: ir.Node, attention: AttentionNode) -> bool:
    """The past comes in one row late, or the new rows are written one row early."""
    if attention.has_past:
        return all(_shift_past(node, at) for at in (PAST_KEY, PAST_VALUE))
    for scatter in (scatter_of(node, at) for at in (K, V)):
        starts = input_at(scatter, _WRITE_INDICES)
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


def _other_diagonal(node: ir.Node, attention: AttentionNode, *, ahead: int, behind_cache: bool) -> bool:
    """Write causality as a mask whose diagonal stands elsewhere.

    Args:
        node: The attention.
        attention: What it says.
        ahead: How many keys of the future a query sees.
        behind_cache: Whether the first query stands behind what the cache holds.
    """
    q, k, mask = input_at(node, Q), input_at(node, K), input_at(node, MASK)
    if not causal_dropped(node, attention) or q is None or k is None or q.dtype is None:
        return False
    build = NodeBuilder(f"{node.name}/sabotage")
    axis = 1 if attention.rank == 3 else 2
    S, T = (build.op("Shape", value, start=axis, end=axis + 1) for value in (q, k))
    start, T = _start(build, node, S, T)
    rows = build.unsqueeze(build.count_up(S), 1)
    rows = build.op("Add", rows, build.ints(ahead))
    if behind_cache and start is not None:
        rows = build.op("Add", build.reshape(start, -1, 1, 1, 1), rows)
    else:
        rows = build.unsqueeze(rows, 0, 1)
    seen = build.op("LessOrEqual", build.count_up(T), rows)
    if mask is not None and attention.mask == "bool":
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


# -- Mistakes that change nothing within the axes of a layer: what no validator can catch, or n ----


def without_effect(spec: AttentionSpec) -> frozenset[str]:
    """The names of the mistakes that leave a layer right at every size that its axes allow."""
    reach = _reach(spec)
    needs = {
        # The softmax of one score is 1, whatever the score.
        "scale off by 0.5 %": reach.seen > 1,
        "scale missing": reach.seen > 1,
        "softcap dropped": reach.seen > 1,
        "groups interleaved": reach.seen > 1,
        "mask dropped": _mask_hides(spec, reach),
        "mask off by one": reach.keys > 1 and _mask_hides(spec, reach),
        # The last token of a call has no future.
        "causal dropped": reach.new > 1,
        "causal off by one": reach.new > 1,
        "past forgotten": reach.past > 0,
        "cache off by one": reach.past > (1 if spec.cache == "growing" else 0),
        # Keys are seen in the cache as well as in the scores. At position 0 nothing is turned.
        "rotary dropped": reach.keys > 1 and (reach.seen > 1 or spec.cache != "none"),
        "rotary off by one": reach.keys > 1 and (reach.seen > 1 or spec.cache != "none"),
    }
    return frozenset(mistake for mistake, shows in needs.items() if not shows)


@dataclass(frozen=True, kw_only=True)
class _Reach:
    """How far the calls of a layer reach.

    Args:
        new: The most tokens of one call.
        past: The most tokens before them.
        keys: The most keys that there are.
        seen: The most keys that one query sees.
    """

    new: int
    past: int
    keys: int
    seen: int


def _reach(spec: AttentionSpec) -> _Reach:
    most, least = spec.sizes("max"), spec.sizes("min")
    past, keys = 0, most["T"] if spec.is_cross else most["S"]
    if spec.cache == "growing":
        past, keys = most["P"], most["P"] + most["S"]
    if spec.cache == "static":
        past, keys = most["T"] - least["S"], most["T"]
    return _Reach(new=most["S"], past=past, keys=keys, seen=min(spec.window or keys, keys))


def _mask_hides(spec: AttentionSpec, reach: _Reach) -> bool:
    """Whether a mask hides a key of some query; one of a window hides the future, too."""
    if spec.mask == "padding":
        return True  # a row may have no key at all
    if spec.mask == "additive":
        return reach.seen > 1
    return reach.new > 1 or reach.seen < reach.keys


# -- Deliberately wrong models: what a validator must never pass -----------------------------------

Sabotage = Callable[[ir.Node, AttentionNode], bool]
_POSITIONS = 3  # where RotaryEmbedding takes them


def mutations() -> list[str]:
    """The names of all mistakes."""
    return list(_MUTATIONS)


def mutated(model: ir.Model, mistake: str, spec: AttentionSpec | None = None) -> ir.Model | None:
    """A copy of the model with one mistake made, or None where it cannot be made.

    Args:
        model: The model.
        mistake: One of `mutations()`.
        spec: The layer; where it is given, None also for a mistake that would change nothing within its axes.
    """
    if spec is not None and mistake in without_effect(spec):
        return None
    copy = model.clone()
    node = next((node for node in copy.graph if is_attention(node)), None)
    if node is None:
        return None
    return copy if _MUTATIONS[mistake](node, read_attention(node)) else None


# -- scores ----------------------------------------------------------------------------------------


def _scale_off(node: ir.Node, attention: AttentionNode) -> bool:
    return _set_scale(node, attention, 1.005)


def _scale_missing(node: ir.Node, attention: AttentionNode) -> bool:
    return attention.softmax_scale not in (None, 1.0) and _set_scale(
        node, attention, 1.0 / (attention.softmax_scale or 1.0)
    )


def _softcap_dropped(node: ir.Node, attention: AttentionNode) -> bool:
    return attention.softcap > 0 and node.attributes.pop("softcap", None) is not None


def _set_scale(node: ir.Node, attention: AttentionNode, factor: float) -> bool:
    if attention.softmax_scale is None:
        return False
    node.attributes["scale"] = ir.AttrFloat32("scale", attention.softmax_scale * factor)
    return True


# -- heads -----------------------------------------------------------------------------------------


def _kv_heads_swapped(node: ir.Node, attention: AttentionNode) -> bool:
    """The first two key/value heads change places."""
    if not isinstance(attention.Hkv, int) or attention.Hkv < 2:
        return False
    order = [1, 0, *range(2, attention.Hkv)]
    return all(_reorder_heads(node, position, order, attention) for position in (K, V))


def _groups_interleaved(node: ir.Node, attention: AttentionNode) -> bool:
    """Query heads take key/value heads in turn, instead of neighbours sharing one: repeat, not interleave."""
    if not isinstance(attention.Hkv, int) or attention.Hkv < 2 or not attention.group or attention.group < 2:
        return False
    order = np.arange(attention.Hkv * attention.group).reshape(attention.Hkv, attention.group).T.reshape(-1)
    return _reorder_heads(node, Q, order.tolist(), attention)


def _heads_transposed(node: ir.Node, attention: AttentionNode) -> bool:
    """The output is laid out D by Hq, not Hq by D."""
    if not isinstance(attention.Hq, int) or not isinstance(attention.Dv, int) or attention.Hq < 2:
        return False
    build = NodeBuilder(f"{node.name}/sabotage")
    if attention.rank == 4:
        turned = build.reshape(build.transpose(node.outputs[Y], 0, 2, 3, 1), 0, 0, attention.Hq, attention.Dv)
        follow(node, build, build.transpose(turned, 0, 2, 1, 3))
        return True
    order = np.arange(attention.Hq * attention.Dv).reshape(attention.Hq, attention.Dv).T.reshape(-1)
    follow(node, build, build.op("Gather", node.outputs[Y], build.ints(*order.tolist()), axis=2))
    return True


def _reorder_heads(node: ir.Node, position: int, order: list[int], attention: AttentionNode) -> bool:
    value = input_at(node, position)
    size = attention.Dv if position == V else attention.D
    if value is None or not isinstance(size, int):
        return False
    build = NodeBuilder(f"{node.name}/sabotage_{position}")
    if attention.rank == 4:
        feed(node, position, build, build.op("Gather", value, build.ints(*order), axis=1))
        return True
    columns = [head * size + column for head in order for column in range(size)]
    feed(node, position, build, build.op("Gather", value, build.ints(*columns), axis=2))
    return True


# -- projections -----------------------------------------------------------------------------------


def _rotary_dropped(node: ir.Node, attention: AttentionNode) -> bool:
    """The keys are not turned."""
    rotary = _rotary_of(node, K)
    if rotary is None or rotary.inputs[0] is None:
        return False
    rotary.outputs[0].replace_all_uses_with(rotary.inputs[0])
    return True


def _rotary_off_by_one(node: ir.Node, attention: AttentionNode) -> bool:
    """The keys are turned as if they stood one place before; turning queries alike would change nothing."""
    rotary = _rotary_of(node, K)
    positions = input_at(rotary, _POSITIONS)
    if rotary is None or positions is None:
        return False
    feed_one_less(rotary, _POSITIONS, NodeBuilder(f"{node.name}/sabotage"), positions)
    return True


def _rotary_of(node: ir.Node, position: int) -> ir.Node | None:
    return made_by(new_rows(node, position), "RotaryEmbedding")


def _bias_dropped(node: ir.Node, attention: AttentionNode) -> bool:
    """The values lose their bias, and packed projections all of it.

    A key bias alone would not be missed: softmax takes it out again.
    """
    value = new_rows(node, V)
    split = made_by(value, "Split")
    value = value if split is None else split.inputs[0]
    add = made_by(value, "Add")
    if value is None or add is None:
        return False
    value.replace_all_uses_with(next(x for x in add.inputs if x is not None and not x.is_initializer()))
    return True


def _not_a_number(node: ir.Node, attention: AttentionNode) -> bool:
    """One channel of the heads is not a number."""
    output = node.outputs[Y]
    if output.dtype is None or not isinstance(attention.Dv, int):
        return False
    width = (
        attention.Dv * attention.Hq if attention.rank == 3 and isinstance(attention.Hq, int) else attention.Dv
    )
    build = NodeBuilder(f"{node.name}/sabotage")
    broken = build.constant([1, *[0] * (width - 1)], ir.DataType.BOOL)
    follow(node, build, build.op("Where", broken, build.constant(float("nan"), output.dtype), output))
    return True


_MUTATIONS: dict[str, Sabotage] = {
    "scale off by 0.5 %": _scale_off,
    "scale missing": _scale_missing,
    "softcap dropped": _softcap_dropped,
    "mask dropped": mask_dropped,
    "mask off by one": mask_off_by_one,
    "causal dropped": causal_dropped,
    "causal off by one": causal_off_by_one,
    "past forgotten": past_forgotten,
    "cache off by one": cache_off_by_one,
    "KV heads swapped": _kv_heads_swapped,
    "groups interleaved": _groups_interleaved,
    "heads transposed": _heads_transposed,
    "rotary dropped": _rotary_dropped,
    "rotary off by one": _rotary_off_by_one,
    "bias dropped": _bias_dropped,
    "NaN": _not_a_number,
}
