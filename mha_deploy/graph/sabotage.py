"""Deliberately wrong models: what a validator must never pass.

Each sabotage is a mistake that deployments really make. It alters the first attention of a copy of the model,
or answers None where the model has nothing to get wrong that way: no mask to drop, no second head to swap.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from mha_deploy.graph.attention_node import (
    MASK,
    AttentionNode,
    K,
    Q,
    V,
    Y,
    input_at,
    is_attention,
    read_attention,
)
from mha_deploy.graph.build import NodeBuilder

Sabotage = Callable[[ir.Node, AttentionNode], bool]
_POSITIONS = 3  # where RotaryEmbedding takes them


def sabotages() -> list[str]:
    """The names of all mistakes."""
    return list(_SABOTAGES)


def sabotaged(model: ir.Model, mistake: str) -> ir.Model | None:
    """A copy of the model with one mistake made, or None where it cannot be made."""
    copy = model.clone()
    node = next((node for node in copy.graph if is_attention(node)), None)
    if node is None:
        return None
    return copy if _SABOTAGES[mistake](node, read_attention(node)) else None


# -- scores ----------------------------------------------------------------------------------------


def _scale_off(node: ir.Node, facts: AttentionNode) -> bool:
    return _set_scale(node, facts, 1.005)


def _scale_missing(node: ir.Node, facts: AttentionNode) -> bool:
    return facts.softmax_scale not in (None, 1.0) and _set_scale(
        node, facts, 1.0 / (facts.softmax_scale or 1.0)
    )


def _set_scale(node: ir.Node, facts: AttentionNode, factor: float) -> bool:
    if facts.softmax_scale is None:
        return False
    node.attributes["scale"] = ir.AttrFloat32("scale", facts.softmax_scale * factor)
    return True


# -- masks -----------------------------------------------------------------------------------------


def _mask_dropped(node: ir.Node, facts: AttentionNode) -> bool:
    if facts.mask == "none":
        return False
    node.replace_input_with(MASK, None)
    return True


def _mask_off_by_one(node: ir.Node, facts: AttentionNode) -> bool:
    """The mask is shifted by a key: every query sees the first one that it should not."""
    mask = input_at(node, MASK)
    if mask is None or facts.mask != "bool":
        return False
    build = NodeBuilder(f"{node.name}/sabotage")
    first, rest = build.ints(0), build.ints(1)
    axis = build.ints(3)
    head = build.op("Slice", mask, first, rest, axis)
    tail = build.op("Slice", mask, first, build.ints(-1), axis)
    _feed(node, MASK, build, build.op("Concat", head, tail, axis=3))
    return True


def _causal_dropped(node: ir.Node, facts: AttentionNode) -> bool:
    if not facts.is_causal:
        return False
    node.attributes["is_causal"] = ir.AttrInt64("is_causal", 0)
    return True


def _causal_off_by_one(node: ir.Node, facts: AttentionNode) -> bool:
    """Every query sees one key of the future."""
    q, k, mask = input_at(node, Q), input_at(node, K), input_at(node, MASK)
    if not _causal_dropped(node, facts) or q is None or k is None or q.dtype is None:
        return False
    build = NodeBuilder(f"{node.name}/sabotage")
    length_axis = 1 if facts.rank == 3 else 2
    rows = build.unsqueeze(_positions(build, q, length_axis), 1)
    columns = build.unsqueeze(_positions(build, k, length_axis), 0)
    shifted = build.op("Add", rows, build.ints(1))
    seen = build.unsqueeze(build.op("LessOrEqual", columns, shifted), 0, 1)
    if mask is not None and facts.mask == "bool":
        seen = build.op("And", seen, mask)
    elif mask is not None:
        seen = build.op("Where", seen, mask, build.constant(float("-inf"), q.dtype))
    _feed(node, MASK, build, seen)
    return True


def _positions(build: NodeBuilder, value: ir.Value, axis: int) -> ir.Value:
    length = build.op("Squeeze", build.op("Shape", value, start=axis, end=axis + 1))
    zero, one = (build.constant(number, ir.DataType.INT64) for number in (0, 1))
    return build.op("Range", zero, length, one)


# -- heads -----------------------------------------------------------------------------------------


def _kv_heads_swapped(node: ir.Node, facts: AttentionNode) -> bool:
    """The first two key/value heads change places."""
    if not isinstance(facts.Hkv, int) or facts.Hkv < 2:
        return False
    order = [1, 0, *range(2, facts.Hkv)]
    return all(_reorder_heads(node, position, order, facts) for position in (K, V))


def _groups_interleaved(node: ir.Node, facts: AttentionNode) -> bool:
    """Query heads take key/value heads in turn, instead of neighbours sharing one: repeat, not interleave."""
    if not isinstance(facts.Hkv, int) or facts.Hkv < 2 or not facts.group or facts.group < 2:
        return False
    order = np.arange(facts.Hkv * facts.group).reshape(facts.Hkv, facts.group).T.reshape(-1)
    return _reorder_heads(node, Q, order.tolist(), facts)


def _heads_transposed(node: ir.Node, facts: AttentionNode) -> bool:
    """The output is laid out D by Hq, not Hq by D."""
    if facts.rank != 3 or not isinstance(facts.Hq, int) or not isinstance(facts.Dv, int) or facts.Hq < 2:
        return False
    order = np.arange(facts.Hq * facts.Dv).reshape(facts.Hq, facts.Dv).T.reshape(-1)
    build = NodeBuilder(f"{node.name}/sabotage")
    _follow(node, build, build.op("Gather", node.outputs[Y], build.ints(*order.tolist()), axis=2))
    return True


def _reorder_heads(node: ir.Node, position: int, order: list[int], facts: AttentionNode) -> bool:
    value = input_at(node, position)
    size = facts.Dv if position == V else facts.D
    if value is None or not isinstance(size, int):
        return False
    build = NodeBuilder(f"{node.name}/sabotage_{position}")
    if facts.rank == 4:
        _feed(node, position, build, build.op("Gather", value, build.ints(*order), axis=1))
        return True
    columns = [head * size + column for head in order for column in range(size)]
    _feed(node, position, build, build.op("Gather", value, build.ints(*columns), axis=2))
    return True


# -- projections -----------------------------------------------------------------------------------


def _rotary_dropped(node: ir.Node, facts: AttentionNode) -> bool:
    """The keys are not turned."""
    rotary = _rotary_of(node, K)
    if rotary is None:
        return False
    node.replace_input_with(K, rotary.inputs[0])
    return True


def _rotary_off_by_one(node: ir.Node, facts: AttentionNode) -> bool:
    """The keys are turned as if they stood one place before; turning queries alike would change nothing."""
    rotary = _rotary_of(node, K)
    positions = input_at(rotary, _POSITIONS) if rotary is not None else None
    if rotary is None or positions is None:
        return False
    build = NodeBuilder(f"{node.name}/sabotage")
    earlier = build.op("Sub", positions, build.ints(1))
    _feed(rotary, _POSITIONS, build, build.op("Max", earlier, build.ints(0)))
    return True


def _rotary_of(node: ir.Node, position: int) -> ir.Node | None:
    value = input_at(node, position)
    producer = value.producer() if value is not None else None
    return producer if producer is not None and producer.op_type == "RotaryEmbedding" else None


def _bias_dropped(node: ir.Node, facts: AttentionNode) -> bool:
    """The values lose their bias, and packed projections all of it.

    A key bias alone would not be missed: softmax takes it out again.
    """
    value = input_at(node, V)
    producer = value.producer() if value is not None else None
    if producer is not None and producer.op_type == "Split":
        value = producer.inputs[0]
        producer = value.producer() if value is not None else None
    if value is None or producer is None or producer.op_type != "Add":
        return False
    bare = next(x for x in producer.inputs if x is not None and not x.is_initializer())
    value.replace_all_uses_with(bare)
    return True


def _not_a_number(node: ir.Node, facts: AttentionNode) -> bool:
    """One channel of the heads is not a number."""
    output = node.outputs[Y]
    if output.dtype is None or not isinstance(facts.Dv, int):
        return False
    width = facts.Dv * facts.Hq if facts.rank == 3 and isinstance(facts.Hq, int) else facts.Dv
    build = NodeBuilder(f"{node.name}/sabotage")
    broken = build.constant([1, *[0] * (width - 1)], ir.DataType.BOOL)
    _follow(node, build, build.op("Where", broken, build.constant(float("nan"), output.dtype), output))
    return True


def _follow(node: ir.Node, build: NodeBuilder, wrong: ir.Value) -> None:
    """Put new nodes behind an attention, the last one in the place of its output."""
    output, last = node.outputs[Y], build.nodes[-1]
    position = list(last.inputs).index(output)
    wrong.type, wrong.shape = output.type, output.shape
    output.replace_all_uses_with(wrong, replace_graph_outputs=True)
    last.replace_input_with(position, output)
    if node.graph is None:
        raise ValueError(f"Node {node.name!r} belongs to no graph.")
    node.graph.insert_after(node, build.nodes)


def _feed(node: ir.Node, position: int, build: NodeBuilder, value: ir.Value) -> None:
    """Put new nodes before an attention and one of its inputs behind them."""
    old = input_at(node, position)
    value.type = old.type if old is not None else ir.TensorType(ir.DataType.BOOL)
    value.shape = old.shape if old is not None else None
    if node.graph is None:
        raise ValueError(f"Node {node.name!r} belongs to no graph.")
    node.graph.insert_before(node, build.nodes)
    if position >= len(node.inputs):
        node.resize_inputs(position + 1)
    node.replace_input_with(position, value)


_SABOTAGES: dict[str, Sabotage] = {
    "scale off by 0.5 %": _scale_off,
    "scale missing": _scale_missing,
    "mask dropped": _mask_dropped,
    "mask off by one": _mask_off_by_one,
    "causal dropped": _causal_dropped,
    "causal off by one": _causal_off_by_one,
    "KV heads swapped": _kv_heads_swapped,
    "groups interleaved": _groups_interleaved,
    "heads transposed": _heads_transposed,
    "rotary dropped": _rotary_dropped,
    "rotary off by one": _rotary_off_by_one,
    "bias dropped": _bias_dropped,
    "NaN": _not_a_number,
}
