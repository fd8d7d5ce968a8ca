"""Mutations of a graph: deliberate mistakes that a validation must catch."""

from __future__ import annotations

from collections.abc import Callable

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

# -- Insert nodes before or after an attention -----------------------------------------------------

# The inputs of TensorScatter and RotaryEmbedding by position.
_UPDATE, _WRITE_INDICES = 1, 2
_POSITIONS = 3


def feed(node: ir.Node, position: int, build: NodeBuilder, value: ir.Value) -> None:
    """Insert new nodes before a node, and let one of its inputs be their result."""
    old = input_at(node, position)
    value.type = old.type if old is not None else ir.TensorType(ir.DataType.BOOL)
    value.shape = old.shape if old is not None else None
    graph_of_node(node).insert_before(node, build.nodes)
    if position >= len(node.inputs):
        node.resize_inputs(position + 1)
    node.replace_input_with(position, value)


def feed_one_less(node: ir.Node, position: int, build: NodeBuilder, value: ir.Value) -> None:
    """Let a node read integers that are one too small, but not below 0."""
    feed(node, position, build, build.op("Max", build.op("Sub", value, build.ints(1)), build.ints(0)))


def follow(node: ir.Node, build: NodeBuilder, wrong: ir.Value) -> None:
    """Insert new nodes after an attention, and let the result replace its output."""
    output = node.outputs[Y]
    takers = [(new, at) for new in build.nodes for at, value in enumerate(new.inputs) if value is output]
    wrong.type, wrong.shape = output.type, output.shape
    output.replace_all_uses_with(wrong, replace_graph_outputs=True)
    for new, at in takers:
        new.replace_input_with(at, output)
    graph_of_node(node).insert_after(node, build.nodes)


def new_entries(node: ir.Node, position: int) -> ir.Value | None:
    """The new keys or values: the input itself, or the update of a preallocated cache."""
    scatter = scatter_of(node, position)
    if scatter is None:
        return input_at(node, position)
    value = scatter.inputs[_UPDATE]
    while (layout := made_by(value, "Transpose", "Reshape")) is not None:
        value = layout.inputs[0]
    return value


def scatter_of(node: ir.Node, position: int) -> ir.Node | None:
    """The node that updates the preallocated cache that an attention reads, if there is one."""
    return made_by(input_at(node, position), "TensorScatter")


# -- Masks, causality and caches -------------------------------------------------------------------


def mask_dropped(node: ir.Node, attention: AttentionNode) -> bool:
    """Every query attends to the masked keys."""
    if attention.mask == "none":
        return False
    node.replace_input_with(MASK, None)
    return True


def mask_off_by_one(node: ir.Node, attention: AttentionNode) -> bool:
    """The mask is shifted by a key: every query attends to the first one that it should not."""
    return attention.mask == "bool" and _shift(node, MASK, axis=3)


def causal_dropped(node: ir.Node, attention: AttentionNode) -> bool:
    """Every query attends to later keys."""
    if not attention.is_causal:
        return False
    node.attributes["is_causal"] = ir.AttrInt64("is_causal", 0)
    return True


def causal_off_by_one(node: ir.Node, attention: AttentionNode) -> bool:
    """Every query attends to one later key."""
    return _other_diagonal(node, attention, ahead=1, after_past=True)


def causal_leak(node: ir.Node, attention: AttentionNode) -> bool:
    """The last query but one attends to one later key, and no other does."""
    return _other_diagonal(node, attention, ahead=1, after_past=True, only_query=2)


def past_forgotten(node: ir.Node, attention: AttentionNode) -> bool:
    """The diagonal of a layer with a cache starts at its first key, as if the cache were empty."""
    cached = attention.has_past or attention.has_nonpad_kv_seqlen
    return cached and _other_diagonal(node, attention, ahead=0, after_past=False)


def cache_off_by_one(node: ir.Node, attention: AttentionNode) -> bool:
    """The past is shifted by one entry, or the new entries are written one position early."""
    if attention.has_past:
        return all(_shift(node, at, axis=2) for at in (PAST_KEY, PAST_VALUE))
    for scatter in (scatter_of(node, at) for at in (K, V)):
        starts = input_at(scatter, _WRITE_INDICES)
        if scatter is None or starts is None:
            return False
        feed_one_less(scatter, _WRITE_INDICES, NodeBuilder(f"{scatter.name}/mutation"), starts)
    return True


def newest_entry_zero(node: ir.Node, attention: AttentionNode) -> bool:
    """The last of the new keys and values is zero."""
    return all(
        _with_last(node, position, lambda build, last: build.op("Sub", last, last)) for position in (K, V)
    )


def entry_late(node: ir.Node, attention: AttentionNode) -> bool:
    """The new entries of a preallocated cache are written one slot late, where there is room."""
    for scatter in (scatter_of(node, at) for at in (K, V)):
        cache, update, starts = (input_at(scatter, at) for at in (0, _UPDATE, _WRITE_INDICES))
        if scatter is None or cache is None or update is None or starts is None:
            return False
        build = NodeBuilder(f"{scatter.name}/mutation")
        T, S = (build.op("Shape", value, start=2, end=3) for value in (cache, update))
        later = build.op("Add", starts, build.ints(1))
        feed(scatter, _WRITE_INDICES, build, build.op("Min", later, build.op("Sub", T, S)))
    return True


def entry_stale(node: ir.Node, attention: AttentionNode) -> bool:
    """Attention reads the preallocated cache as it was before the new entries were written."""
    for position in (K, V):
        scatter = scatter_of(node, position)
        if scatter is None:
            return False
        node.replace_input_with(position, scatter.inputs[0])
    return True


def values_beyond_a_length(node: ir.Node, attention: AttentionNode) -> bool:
    """The values of the last quarter of the keys are 5 % too large."""
    value = input_at(node, V)
    if value is None or value.dtype is None:
        return False
    build = NodeBuilder(f"{node.name}/mutation")
    axis = 1 if attention.rank == 3 else 2
    T = build.op("Shape", value, start=axis, end=axis + 1)
    first = build.op("Div", build.op("Mul", T, build.ints(3)), build.ints(4))
    late = build.op("GreaterOrEqual", build.count_up(T), first)
    factor = build.op("Where", late, build.constant(1.05, value.dtype), build.constant(1.0, value.dtype))
    factor = build.unsqueeze(factor, *((0, 2) if attention.rank == 3 else (0, 1, 3)))
    feed(node, V, build, build.op("Mul", value, factor))
    return True


def last_batch_element_off(node: ir.Node, attention: AttentionNode) -> bool:
    """The heads of the last batch element are 0.5 % too large."""
    output = node.outputs[Y]
    if output.dtype is None:
        return False
    build = NodeBuilder(f"{node.name}/mutation")
    B = build.op("Shape", output, start=0, end=1)
    is_last = build.op("Equal", build.count_up(B), build.op("Sub", B, build.ints(1)))
    factor = build.op(
        "Where", is_last, build.constant(1.005, output.dtype), build.constant(1.0, output.dtype)
    )
    factor = build.unsqueeze(factor, *range(1, 4 if attention.rank == 4 else 3))
    follow(node, build, build.op("Mul", output, factor))
    return True


def head_zero(node: ir.Node, attention: AttentionNode) -> bool:
    """The first head is zero."""
    output, heads, size = node.outputs[Y], attention.Hq, attention.Dv
    if output.dtype is None or not isinstance(heads, int) or not isinstance(size, int):
        return False
    build = NodeBuilder(f"{node.name}/mutation")
    keeps = np.arange(heads) > 0
    kept = np.repeat(keeps, size) if attention.rank == 3 else keeps[:, None, None]
    factor = build.constant(kept.astype(float).tolist(), output.dtype)
    follow(node, build, build.op("Mul", output, factor))
    return True


def _with_last(node: ir.Node, position: int, change: Callable[[NodeBuilder, ir.Value], ir.Value]) -> bool:
    """Change the last of the new keys or values; of a preallocated cache, what is written to it."""
    scatter = scatter_of(node, position)
    taker, at = (node, position) if scatter is None else (scatter, _UPDATE)
    value = input_at(taker, at)
    if value is None or value.shape is None:
        return False
    return _changed_last(taker, at, value, len(value.shape) // 2, change)


def _changed_last(
    node: ir.Node,
    position: int,
    value: ir.Value,
    axis: int,
    change: Callable[[NodeBuilder, ir.Value], ir.Value],
) -> bool:
    """Let a node read an input whose last element along an axis is changed."""
    build = NodeBuilder(f"{node.name}/mutation_{position}")
    axes, last = build.ints(axis), build.ints(-1)
    before = build.op("Slice", value, build.ints(0), last, axes)
    after = build.op("Slice", value, last, build.ints(np.iinfo(np.int64).max), axes)
    feed(node, position, build, build.op("Concat", before, change(build, after), axis=axis))
    return True


def _shift(node: ir.Node, position: int, *, axis: int) -> bool:
    """Shift an input by one along an axis, with its first element twice."""
    value = input_at(node, position)
    if value is None:
        return False
    build = NodeBuilder(f"{node.name}/mutation_{position}")
    axes, first = build.ints(axis), build.ints(0)
    head = build.op("Slice", value, first, build.ints(1), axes)
    tail = build.op("Slice", value, first, build.ints(-1), axes)
    feed(node, position, build, build.op("Concat", head, tail, axis=axis))
    return True


def _other_diagonal(
    node: ir.Node, attention: AttentionNode, *, ahead: int, after_past: bool, only_query: int | None = None
) -> bool:
    """Write causality as a mask with another diagonal: `ahead` keys later, and after the past or not.

    `only_query` is the one query with that diagonal, counted from the end.
    """
    q, k, mask = input_at(node, Q), input_at(node, K), input_at(node, MASK)
    if not causal_dropped(node, attention) or q is None or k is None or q.dtype is None:
        return False
    build = NodeBuilder(f"{node.name}/mutation")
    axis = 1 if attention.rank == 3 else 2
    S, T = (build.op("Shape", value, start=axis, end=axis + 1) for value in (q, k))
    past, ends = input_at(node, PAST_KEY), input_at(node, NONPAD_KV_SEQLEN)
    start = None  # the position of the first query of every batch element
    if past is not None:
        start = build.op("Shape", past, start=2, end=3)
        T = build.op("Add", start, T)
    elif ends is not None:
        start = build.op("Sub", ends, S)
    further = build.ints(ahead)
    if only_query is not None:
        is_it = build.op("Equal", build.count_up(S), build.op("Sub", S, build.ints(only_query)))
        further = build.unsqueeze(build.op("Where", is_it, further, build.ints(0)), 1)
    queries = build.op("Add", build.unsqueeze(build.count_up(S), 1), further)
    if after_past and start is not None:
        queries = build.op("Add", build.reshape(start, -1, 1, 1, 1), queries)
    else:
        queries = build.unsqueeze(queries, 0, 1)
    visible = build.op("LessOrEqual", build.count_up(T), queries)
    if mask is not None and attention.mask == "bool":
        visible = build.op("And", visible, mask)
    elif mask is not None:
        visible = build.op("Where", visible, mask, build.constant(float("-inf"), q.dtype))
    feed(node, MASK, build, visible)
    return True


# -- Mutations without effect at every size that the axes of a layer allow -------------------------


def without_effect(spec: AttentionSpec) -> frozenset[str]:
    """The names of the mutations that leave a layer correct at every size that its axes allow."""
    most, least = spec.sizes("max"), spec.sizes("min")
    # The most new tokens of one call, tokens before them, keys, and keys that one query attends to.
    new, past, keys = most["S"], 0, most["T"] if spec.is_cross else most["S"]
    if spec.cache == "dynamic":
        past, keys = most["P"], most["P"] + new
    if spec.cache == "preallocated":
        past, keys = most["T"] - least["S"], most["T"]
    visible = min(spec.window or keys, keys)
    # A padding mask may mask a query fully; the mask of a window is causal, too.
    mask_hides = new > 1 or visible < keys
    if spec.mask in ("padding", "additive"):
        mask_hides = spec.mask == "padding" or visible > 1
    needs = {
        # The softmax of one score is 1, whatever the score.
        "scale off by 0.5 %": visible > 1,
        "scale missing": visible > 1,
        "softcap dropped": visible > 1,
        "groups interleaved": visible > 1,
        "mask dropped": mask_hides,
        "mask off by one": keys > 1 and mask_hides,
        # The last token of a call has no later key.
        "causal dropped": new > 1,
        "causal off by one": new > 1,
        "causal leak in one query": new > 1,
        # Where every call fills the cache, nothing is later or was there before.
        "entry one slot late": past > 0,
        "past forgotten": past > 0,
        "cache off by one": past > (1 if spec.cache == "dynamic" else 0),
        # Keys are in the cache as well as in the scores. At position 0 nothing is rotated.
        "rotary dropped": keys > 1 and (visible > 1 or spec.cache != "none"),
        "rotary off by one": keys > 1 and (visible > 1 or spec.cache != "none"),
        "rotary off by one on the last key": keys > 1 and (visible > 1 or spec.cache != "none"),
    }
    return frozenset(mutation for mutation, shows in needs.items() if not shows)


# -- The mutations by name -------------------------------------------------------------------------

Mutation = Callable[[ir.Node, AttentionNode], bool]


def mutations() -> list[str]:
    """The names of all mutations."""
    return list(_MUTATIONS)


def mutated(model: ir.Model, mutation: str, spec: AttentionSpec | None = None) -> ir.Model | None:
    """A copy of the model with one of `mutations()`; None where it does not apply.

    With a spec, None also for a mutation that has no effect within the axes of that layer.
    """
    if spec is not None and mutation in without_effect(spec):
        return None
    copy = model.clone()
    node = next((node for node in copy.graph if is_attention(node)), None)
    if node is None:
        return None
    return copy if _MUTATIONS[mutation](node, read_attention(node)) else None


def _set_scale(node: ir.Node, attention: AttentionNode, factor: float) -> bool:
    if attention.softmax_scale is None or factor == 1.0:
        return False
    node.attributes["scale"] = ir.AttrFloat32("scale", attention.softmax_scale * factor)
    return True


def _kv_heads_swapped(node: ir.Node, attention: AttentionNode) -> bool:
    """The first two key/value heads are swapped."""
    if not isinstance(attention.Hkv, int) or attention.Hkv < 2:
        return False
    order = [1, 0, *range(2, attention.Hkv)]
    return all(_reorder_heads(node, position, order, attention) for position in (K, V))


def _groups_interleaved(node: ir.Node, attention: AttentionNode) -> bool:
    """Query heads share key/value heads in an interleaved order, instead of adjacent ones sharing one."""
    if not isinstance(attention.Hkv, int) or attention.Hkv < 2 or not attention.group or attention.group < 2:
        return False
    order = np.arange(attention.Hkv * attention.group).reshape(attention.Hkv, attention.group).T.reshape(-1)
    return _reorder_heads(node, Q, order.tolist(), attention)


def _heads_transposed(node: ir.Node, attention: AttentionNode) -> bool:
    """The output is laid out D by Hq, not Hq by D."""
    if not isinstance(attention.Hq, int) or not isinstance(attention.Dv, int) or attention.Hq < 2:
        return False
    build = NodeBuilder(f"{node.name}/mutation")
    if attention.rank == 4:
        transposed = build.reshape(
            build.transpose(node.outputs[Y], 0, 2, 3, 1), 0, 0, attention.Hq, attention.Dv
        )
        follow(node, build, build.transpose(transposed, 0, 2, 1, 3))
        return True
    order = np.arange(attention.Hq * attention.Dv).reshape(attention.Hq, attention.Dv).T.reshape(-1)
    follow(node, build, build.op("Gather", node.outputs[Y], build.ints(*order.tolist()), axis=2))
    return True


def _reorder_heads(node: ir.Node, position: int, order: list[int], attention: AttentionNode) -> bool:
    value = input_at(node, position)
    size = attention.Dv if position == V else attention.D
    if value is None or not isinstance(size, int):
        return False
    build = NodeBuilder(f"{node.name}/mutation_{position}")
    if attention.rank == 4:
        feed(node, position, build, build.op("Gather", value, build.ints(*order), axis=1))
        return True
    columns = [head * size + column for head in order for column in range(size)]
    feed(node, position, build, build.op("Gather", value, build.ints(*columns), axis=2))
    return True


def _rotary_dropped(node: ir.Node, attention: AttentionNode) -> bool:
    """The keys are not rotated."""
    rotary = _rotary_of(node, K)
    if rotary is None or rotary.inputs[0] is None:
        return False
    rotary.outputs[0].replace_all_uses_with(rotary.inputs[0])
    return True


def _rotary_off_by_one(node: ir.Node, attention: AttentionNode) -> bool:
    """The keys are rotated by the position before; rotating the queries alike would change nothing."""
    rotary = _rotary_of(node, K)
    positions = input_at(rotary, _POSITIONS)
    if rotary is None or positions is None:
        return False
    feed_one_less(rotary, _POSITIONS, NodeBuilder(f"{node.name}/mutation"), positions)
    return True


def _rotary_off_on_last(node: ir.Node, attention: AttentionNode) -> bool:
    """The last new key is rotated by the position before."""
    rotary = _rotary_of(node, K)
    positions = input_at(rotary, _POSITIONS)
    if rotary is None or positions is None or positions.shape is None:
        return False

    def earlier(build: NodeBuilder, last: ir.Value) -> ir.Value:
        return build.op("Max", build.op("Sub", last, build.ints(1)), build.ints(0))

    return _changed_last(rotary, _POSITIONS, positions, len(positions.shape) - 1, earlier)


def _rotary_of(node: ir.Node, position: int) -> ir.Node | None:
    return made_by(new_entries(node, position), "RotaryEmbedding")


def _bias_dropped(node: ir.Node, attention: AttentionNode) -> bool:
    """The values lose their bias, and packed projections all of it.

    Without a key bias alone nothing changes: softmax cancels it.
    """
    value = new_entries(node, V)
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
    build = NodeBuilder(f"{node.name}/mutation")
    broken = build.constant([1, *[0] * (width - 1)], ir.DataType.BOOL)
    follow(node, build, build.op("Where", broken, build.constant(float("nan"), output.dtype), output))
    return True


_MUTATIONS: dict[str, Mutation] = {
    "scale off by 0.5 %": lambda node, attention: _set_scale(node, attention, 1.005),
    "scale missing": lambda node, attention: _set_scale(
        node, attention, 1.0 / (attention.softmax_scale or 1.0)
    ),
    "softcap dropped": lambda node, attention: (
        attention.softcap > 0 and bool(node.attributes.pop("softcap", None))
    ),
    "mask dropped": mask_dropped,
    "mask off by one": mask_off_by_one,
    "causal dropped": causal_dropped,
    "causal off by one": causal_off_by_one,
    "causal leak in one query": causal_leak,
    "past forgotten": past_forgotten,
    "cache off by one": cache_off_by_one,
    "newest entry zero": newest_entry_zero,
    "entry one slot late": entry_late,
    "stale entries": entry_stale,
    "values beyond a length": values_beyond_a_length,
    "last batch element off by 0.5 %": last_batch_element_off,
    "one head zero": head_zero,
    "KV heads swapped": _kv_heads_swapped,
    "groups interleaved": _groups_interleaved,
    "heads transposed": _heads_transposed,
    "rotary dropped": _rotary_dropped,
    "rotary off by one": _rotary_off_by_one,
    "rotary off by one on the last key": _rotary_off_on_last,
    "bias dropped": _bias_dropped,
    "NaN": _not_a_number,
}
