"""Deliberately wrong models: what a validator must never pass.

Each sabotage is a mistake that deployments really make. It alters the first attention of a copy of the model,
or answers None where the model has nothing to get wrong that way: no mask to drop, no second head to swap, no
second token that could see the future.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from mha_deploy.graph.attention_node import (
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
from mha_deploy.graph.sabotage_effect import without_effect
from mha_deploy.graph.sabotage_masks import (
    cache_off_by_one,
    causal_dropped,
    causal_off_by_one,
    mask_dropped,
    mask_off_by_one,
    past_forgotten,
)
from mha_deploy.graph.sabotage_wiring import feed, feed_one_less, follow, new_rows
from mha_deploy.spec import AttentionSpec

Sabotage = Callable[[ir.Node, AttentionNode], bool]
_POSITIONS = 3  # where RotaryEmbedding takes them


def sabotages() -> list[str]:
    """The names of all mistakes."""
    return list(_SABOTAGES)


def sabotaged(model: ir.Model, mistake: str, spec: AttentionSpec | None = None) -> ir.Model | None:
    """A copy of the model with one mistake made, or None where it cannot be made.

    Args:
        model: The model.
        mistake: One of `sabotages()`.
        spec: The layer; where it is given, None also for a mistake that would change nothing within its axes.
    """
    if spec is not None and mistake in without_effect(spec):
        return None
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


def _softcap_dropped(node: ir.Node, facts: AttentionNode) -> bool:
    return facts.softcap > 0 and node.attributes.pop("softcap", None) is not None


def _set_scale(node: ir.Node, facts: AttentionNode, factor: float) -> bool:
    if facts.softmax_scale is None:
        return False
    node.attributes["scale"] = ir.AttrFloat32("scale", facts.softmax_scale * factor)
    return True


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
    if not isinstance(facts.Hq, int) or not isinstance(facts.Dv, int) or facts.Hq < 2:
        return False
    build = NodeBuilder(f"{node.name}/sabotage")
    if facts.rank == 4:
        turned = build.reshape(build.transpose(node.outputs[Y], 0, 2, 3, 1), 0, 0, facts.Hq, facts.Dv)
        follow(node, build, build.transpose(turned, 0, 2, 1, 3))
        return True
    order = np.arange(facts.Hq * facts.Dv).reshape(facts.Hq, facts.Dv).T.reshape(-1)
    follow(node, build, build.op("Gather", node.outputs[Y], build.ints(*order.tolist()), axis=2))
    return True


def _reorder_heads(node: ir.Node, position: int, order: list[int], facts: AttentionNode) -> bool:
    value = input_at(node, position)
    size = facts.Dv if position == V else facts.D
    if value is None or not isinstance(size, int):
        return False
    build = NodeBuilder(f"{node.name}/sabotage_{position}")
    if facts.rank == 4:
        feed(node, position, build, build.op("Gather", value, build.ints(*order), axis=1))
        return True
    columns = [head * size + column for head in order for column in range(size)]
    feed(node, position, build, build.op("Gather", value, build.ints(*columns), axis=2))
    return True


# -- projections -----------------------------------------------------------------------------------


def _rotary_dropped(node: ir.Node, facts: AttentionNode) -> bool:
    """The keys are not turned."""
    rotary = _rotary_of(node, K)
    if rotary is None or rotary.inputs[0] is None:
        return False
    rotary.outputs[0].replace_all_uses_with(rotary.inputs[0])
    return True


def _rotary_off_by_one(node: ir.Node, facts: AttentionNode) -> bool:
    """The keys are turned as if they stood one place before; turning queries alike would change nothing."""
    rotary = _rotary_of(node, K)
    positions = input_at(rotary, _POSITIONS) if rotary is not None else None
    if rotary is None or positions is None:
        return False
    feed_one_less(rotary, _POSITIONS, NodeBuilder(f"{node.name}/sabotage"), positions)
    return True


def _rotary_of(node: ir.Node, position: int) -> ir.Node | None:
    value = new_rows(node, position)
    producer = value.producer() if value is not None else None
    return producer if producer is not None and producer.op_type == "RotaryEmbedding" else None


def _bias_dropped(node: ir.Node, facts: AttentionNode) -> bool:
    """The values lose their bias, and packed projections all of it.

    A key bias alone would not be missed: softmax takes it out again.
    """
    value = new_rows(node, V)
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
    follow(node, build, build.op("Where", broken, build.constant(float("nan"), output.dtype), output))
    return True


_SABOTAGES: dict[str, Sabotage] = {
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
