"""TensorScatter, the update of a cache whose size is fixed: written in primitive operators, or kept.

TensorRT's parser makes it a KV cache update, which happens in place. So the cache has to be an input of the
graph and the result an output of it, and both are to be bound to the same memory.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from mha_deploy.graph.attention_node import input_at
from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.lower.masks import count_up
from mha_deploy.graph.lower.operator_node import OperatorCall, sizes_of

OP_TYPE = "TensorScatter"

_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


class Obstacle(NamedTuple):
    """Why TensorRT has no in-place update for a node: the feature, and what was found."""

    feature: str
    got: object


def obstacle_to_update_in_place(node: ir.Node) -> Obstacle | None:
    """What keeps a TensorScatter from being TensorRT's cache update; None where it can be."""
    cache, sizes = input_at(node, 0), sizes_of(input_at(node, 0))
    if _is_circular(node):
        return Obstacle("circular TensorScatter", "mode=circular")
    if cache is None or not cache.is_graph_input():
        return Obstacle("TensorScatter into a cache that is no graph input", cache and cache.name)
    if sizes is None or len(sizes) != 4 or _axis(node, 4) != 2:
        return Obstacle("TensorScatter other than along axis 2 of [B, H, T, D]", sizes)
    if cache.dtype not in _FLOATS:
        return Obstacle("TensorScatter of this type", cache.dtype)
    if sizes[2] is None:
        return Obstacle("TensorScatter into a cache of dynamic length", str(cache.shape))
    if not node.outputs[0].is_graph_output():
        return Obstacle("TensorScatter whose result is no graph output", node.outputs[0].name)
    return None


def keep_scatter(call: OperatorCall, b: NodeBuilder) -> None:
    """Leave the node to TensorRT's parser, or say why it would not take it."""
    obstacle = obstacle_to_update_in_place(call.node)
    if obstacle is not None:
        hint = "decode_primitives=True writes it with ScatterND: the cache is copied at every step"
        raise call.refuse(obstacle.feature, got=obstacle.got, hint=hint)


def scatter_to_primitives(call: OperatorCall, b: NodeBuilder) -> ir.Value:
    """Write a TensorScatter as a ScatterND whose indices are spelled out."""
    cache, update, starts = (input_at(call.node, at) for at in range(3))
    dims = sizes_of(update)
    if cache is None or update is None or dims is None:
        raise call.refuse("TensorScatter of unknown rank", hint="state the shape of the update")
    axis = _axis(call.node, len(dims))
    slots = _along(b, update, axis, axis)
    if starts is not None:
        slots = b.op("Add", slots, b.reshape(starts, -1, *[1] * (axis + 1)), name="slot")
    if _is_circular(call.node):
        slots = _wrap(b, slots, b.as_tensor(b.size(cache, axis)))
    # One index for each axis up to the sequence; whole rows follow, so there are few indices.
    lead = b.shape_of(*(b.size(update, at) for at in range(axis + 1)), 1)
    planes = [*(_along(b, update, at, axis) for at in range(axis)), slots]
    index = b.op("Concat", *(b.op("Expand", plane, lead) for plane in planes), axis=axis + 1, name="index")
    return b.op("ScatterND", cache, index, update, name="updated")


def _along(b: NodeBuilder, update: ir.Value, at: int, axis: int) -> ir.Value:
    """0, 1, 2 … along one axis of the indices, which have one more axis than lead to a row."""
    return b.reshape(count_up(b, b.size(update, at)), *(-1 if i == at else 1 for i in range(axis + 2)))


def _wrap(b: NodeBuilder, index: ir.Value, length: ir.Value) -> ir.Value:
    """The remainder, written with a whole-number division: Mod is not in every parser."""
    return b.op("Sub", index, b.op("Mul", b.op("Div", index, length), length), name="wrapped")


def _is_circular(node: ir.Node) -> bool:
    return node.attributes.get_string("mode", "linear") == "circular"


def _axis(node: ir.Node, rank: int) -> int:
    return (node.attributes.get_int("axis", -2) or 0) % rank
