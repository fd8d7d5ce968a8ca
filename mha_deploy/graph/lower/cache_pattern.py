"""An attention with its cache around it, recognised as a whole.

    static    TensorScatter(cache, new rows, starts) twice, and Attention(…, nonpad_kv_seqlen = starts + S)
    growing   Attention with past_key, past_value, present_key and present_value

Only here may a dialect treat the cache otherwise than the nodes say, so the pattern is read strictly: the
caches are graph inputs, the results are graph outputs that nobody else reads, and keys and values go to the
same rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from mha_deploy.graph import attention_node as an
from mha_deploy.graph.attention_node import Dim, input_at, output_at
from mha_deploy.graph.lower import scatter
from mha_deploy.graph.lower.call import same_size
from mha_deploy.graph.lower.scatter import Obstacle

STATIC, GROWING = "static", "growing"

# Operators that hand on the numbers of their first input.
_SAME_NUMBERS = frozenset({"Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape"})


@dataclass(frozen=True, kw_only=True)
class CachedAttention:
    """One attention and its cache.

    Args:
        kind: `static` or `growing`.
        node: The attention.
        past_key: Keys of earlier calls, a graph input: `[B, Hkv, T, D]`, or `[B, Hkv, P, D]` if growing.
        past_value: Values of earlier calls.
        new_key: Keys of the S new tokens, in the rank of the node's inputs.
        new_value: Values of the S new tokens.
        key_out: The graph output with the new keys in it.
        value_out: The graph output with the new values in it.
        starts: How many rows of each batch row are valid before the call; None where growing.
        updates: The nodes that write the rows; none where growing.
    """

    kind: str
    node: ir.Node
    past_key: ir.Value
    past_value: ir.Value
    new_key: ir.Value
    new_value: ir.Value
    key_out: ir.Value
    value_out: ir.Value
    starts: ir.Value | None = None
    updates: tuple[ir.Node, ...] = ()


def read_cache(node: ir.Node) -> CachedAttention | Obstacle | None:
    """The cache of an attention; None where it has none, and why where it is not of a known form."""
    if output_at(node, an.QK_OUTPUT) is not None:
        return Obstacle("cache beside scores as an output", "qk_matmul_output") if _has_cache(node) else None
    if input_at(node, an.PAST_KEY) is not None:
        return _read_growing(node)
    return _read_static(node) if any(_updates(node)) else None


def _has_cache(node: ir.Node) -> bool:
    return input_at(node, an.PAST_KEY) is not None or any(_updates(node))


def _updates(node: ir.Node) -> list[ir.Node | None]:
    """The nodes that write keys and values into a cache."""
    producers = [None if value is None else value.producer() for value in node.inputs[an.K : an.V + 1]]
    return [
        p if p is not None and (p.domain, p.op_type) == ("", scatter.OP_TYPE) else None for p in producers
    ]


# -- growing -------------------------------------------------------------------------------------


def _read_growing(node: ir.Node) -> CachedAttention | Obstacle:
    k, v, past_key, past_value = (input_at(node, at) for at in (an.K, an.V, an.PAST_KEY, an.PAST_VALUE))
    outs = [output_at(node, at) for at in (an.PRESENT_KEY, an.PRESENT_VALUE)]
    if k is None or v is None or past_key is None or past_value is None:
        return Obstacle("cache of only keys or only values", node.name)
    if not (past_key.is_graph_input() and past_value.is_graph_input()):
        return Obstacle("past that is no graph input", past_key.name)
    key_out, value_out = outs
    if (
        key_out is None
        or value_out is None
        or not all(_only_given_out(out, 0) for out in (key_out, value_out))
    ):
        return Obstacle("present that is not just a graph output", [out and out.name for out in outs])
    return CachedAttention(
        kind=GROWING,
        node=node,
        past_key=past_key,
        past_value=past_value,
        new_key=k,
        new_value=v,
        key_out=key_out,
        value_out=value_out,
    )


def _only_given_out(value: ir.Value, readers: int) -> bool:
    """Whether a value is one graph output, and read by so many nodes."""
    outputs = [] if value.graph is None else [out for out in value.graph.outputs if out is value]
    return len(outputs) == 1 and len(value.uses()) == readers


# -- static --------------------------------------------------------------------------------------


def _read_static(node: ir.Node) -> CachedAttention | Obstacle:
    key_update, value_update = _updates(node)
    if key_update is None or value_update is None:
        return Obstacle("cache of only keys or only values", node.name)
    updates = (key_update, value_update)
    obstacle = next(filter(None, map(scatter.obstacle_to_update_in_place, updates)), None)
    if obstacle is not None:
        return obstacle
    if not all(_only_given_out(update.outputs[0], 1) for update in updates):
        return Obstacle("cache that others read, too", [update.outputs[0].name for update in updates])
    (past_key, new_key), (past_value, new_value) = (update.inputs[:2] for update in updates)
    starts = [input_at(update, 2) for update in updates]
    if past_key is None or past_value is None or new_key is None or new_value is None or starts[0] is None:
        return Obstacle("cache without the places of its new rows", key_update.name)
    S = _dim(new_key, 2)
    if _origin(starts[0]) is not _origin(starts[1]) or not _ends_behind(node, starts[0], S):
        return Obstacle("cache whose valid rows do not end with the new ones", key_update.name)
    if not all(same_size(S, _dim(value, 2)) for value in (new_value, input_at(node, an.Q))):
        return Obstacle("cache with other new rows than queries", f"{S} new keys")
    return CachedAttention(
        kind=STATIC,
        node=node,
        past_key=past_key,
        past_value=past_value,
        new_key=new_key,
        new_value=new_value,
        key_out=key_update.outputs[0],
        value_out=value_update.outputs[0],
        starts=starts[0],
        updates=updates,
    )


def _ends_behind(node: ir.Node, starts: ir.Value, S: Dim) -> bool:
    """Whether the valid keys of the attention are those before the call and the S new ones."""
    ends = _origin(input_at(node, an.NONPAD_KV_SEQLEN))
    add = None if ends is None else ends.producer()
    if add is None or add.op_type != "Add":
        return False
    one, other = add.inputs
    for before, new in ((one, other), (other, one)):
        if _origin(before) is _origin(starts) and same_size(S, _number(new)):
            return True
    return False


def _origin(value: ir.Value | None) -> ir.Value | None:
    """The value that the same numbers first stood in."""
    while value is not None:
        node = value.producer()
        if node is None or node.domain != "" or node.op_type not in _SAME_NUMBERS:
            return value
        value = node.inputs[0]
    return None


def _number(value: ir.Value | None) -> Dim:
    """The single number a value holds: itself, or the name of the axis whose size it is."""
    value = _origin(value)
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is not None:
        numbers = tensor.numpy().reshape(-1)
        return int(numbers[0]) if numbers.size == 1 else None
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Gather":
        sizes = _sizes_read_by(node)
        return sizes[0] if len(sizes) == 1 else None
    shape, at = _origin(node.inputs[0]), _number(node.inputs[1])
    sizes = _sizes_read_by(None if shape is None else shape.producer())
    return sizes[at] if isinstance(at, int) and -len(sizes) <= at < len(sizes) else None


def _sizes_read_by(node: ir.Node | None) -> list[Dim]:
    """The sizes that a Shape node reads."""
    x = None if node is None or node.op_type != "Shape" else node.inputs[0]
    if node is None or x is None or x.shape is None:
        return []
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", None)
    return [_dim(x, axis) for axis in range(len(x.shape))[start:end]]


def _dim(value: ir.Value | None, axis: int) -> Dim:
    if value is None or value.shape is None or len(value.shape) <= axis:
        return None
    size = value.shape[axis]
    return size if isinstance(size, int) else size.value
