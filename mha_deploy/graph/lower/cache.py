"""KV caches: recognise them in a graph, and write them for runtimes without a cache update."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from mha_deploy.graph import attention_node as an
from mha_deploy.graph.attention_node import Y, is_attention
from mha_deploy.graph.ir import (
    Dim,
    NodeBuilder,
    constant,
    dim,
    dims,
    import_domains,
    infer_shapes,
    input_at,
    made_by,
    names_in,
    output_at,
    prefix_within,
    replace_node,
    replace_value,
    same_size,
)
from mha_deploy.graph.lower import operators as scatter
from mha_deploy.graph.lower.call import AttentionCall, read_call, take_mask_before_expand
from mha_deploy.graph.lower.operators import Obstacle

# -- The form of the cache in a lowered model ------------------------------------------------------

ENTRIES_NOTE = "mha_deploy.cache_entries"
"""Metadata key of a model that outputs only new entries: JSON, from each output to its cache."""

IN_PLACE_NOTE = "mha_deploy.cache_in_place"
"""Metadata key of a model that updates caches in place: JSON, from each output to its cache."""

TOTAL_LENGTH = "total_length"
"""The additional input of ONNX Runtime's `GroupQueryAttention`: an int32 scalar.

T for single tokens, so that one captured graph serves every decode step, and S for a prompt into an empty
cache. Several tokens after a past are accepted for a batch of 1 only, with T again. S after a past is
accepted, too, and wrong: the operator then overwrites the cache with a first prompt.
"""


@dataclass(frozen=True, kw_only=True)
class CacheForm:
    """How the runtime must handle the KV cache of a lowered model.

    Args:
        rows: From each output of new entries to the cache input they belong to; empty where whole caches are
            outputs, or where there is none.
        in_place: From each output that is a whole cache to the input whose memory it must share.
    """

    rows: dict[str, str] = field(default_factory=dict)
    in_place: dict[str, str] = field(default_factory=dict)


def cache_form(model: ir.Model) -> CacheForm:
    """Read the form from a lowered model."""
    return CacheForm(rows=_noted(model, ENTRIES_NOTE), in_place=_noted(model, IN_PLACE_NOTE))


def _noted(model: ir.Model, note: str) -> dict[str, str]:
    caches: dict[str, str] = json.loads(model.metadata_props.get(note, "{}"))
    return caches


def note_caches(model: ir.Model, note: str, caches: dict[str, str]) -> None:
    """Add outputs and their caches to the metadata of the model, under one of the notes."""
    model.metadata_props[note] = json.dumps(_noted(model, note) | caches)


def rows_name(output: str) -> str:
    """The name of an output of new entries, from that of the output of the whole cache."""
    if "_cache_out" in output:
        return output.replace("_cache_out", "_entries")
    return f"{output.removeprefix('present_')}_entries"


# -- Recognise an attention with its cache ---------------------------------------------------------


class CachedAttention(NamedTuple):
    """One attention and its cache, dynamic or preallocated.

    Args:
        past_key: Keys of earlier calls, a graph input: `[B, Hkv, T, D]`, or `[B, Hkv, P, D]` if dynamic.
        past_value: Values of earlier calls.
        new_key: Keys of the S new tokens, in the rank of the node's inputs.
        new_value: Values of the new tokens.
        key_out: The graph output with the new keys in it.
        value_out: The graph output with the new values in it.
        starts: Valid entries of each batch element before the call; None if dynamic.
        updates: The nodes that write the new entries; none if dynamic.
    """

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
    has_past = input_at(node, an.PAST_KEY) is not None
    updates = [made_by(input_at(node, at), scatter.SCATTER) for at in (an.K, an.V)]
    if not has_past and not any(updates):
        return None
    if output_at(node, an.QK_OUTPUT) is not None:
        return Obstacle("cache beside scores as an output", "qk_matmul_output")
    return _read_dynamic(node) if has_past else _read_preallocated(node, *updates)


def _read_dynamic(node: ir.Node) -> CachedAttention | Obstacle:
    k, v, past_key, past_value = (input_at(node, at) for at in (an.K, an.V, an.PAST_KEY, an.PAST_VALUE))
    outs = key_out, value_out = [output_at(node, at) for at in (an.PRESENT_KEY, an.PRESENT_VALUE)]
    if k is None or v is None or past_key is None or past_value is None:
        return Obstacle("cache of only keys or only values", node.name)
    if not (past_key.is_graph_input() and past_value.is_graph_input()):
        return Obstacle("past that is no graph input", past_key.name)
    if key_out is None or value_out is None or not all(_is_only_output(out, 0) for out in outs):
        return Obstacle("present that is not just a graph output", [out and out.name for out in outs])
    return CachedAttention(past_key, past_value, k, v, key_out, value_out)


def _is_only_output(value: ir.Value | None, readers: int) -> bool:
    """Whether a value is exactly one graph output, and read by so many nodes."""
    outputs = () if value is None or value.graph is None else value.graph.outputs
    alone = sum(out is value for out in outputs) == 1
    return value is not None and alone and len(value.uses()) == readers


def _read_preallocated(
    node: ir.Node, key_update: ir.Node | None, value_update: ir.Node | None
) -> CachedAttention | Obstacle:
    if key_update is None or value_update is None:
        return Obstacle("cache of only keys or only values", node.name)
    updates = (key_update, value_update)
    obstacle = next(filter(None, map(scatter.obstacle_to_update_in_place, updates)), None)
    if obstacle is not None:
        return obstacle
    key_out, value_out = outs = [update.outputs[0] for update in updates]
    if not all(_is_only_output(out, 1) for out in outs):
        return Obstacle("cache with other readers", [out.name for out in outs])
    (past_key, new_key), (past_value, new_value) = (update.inputs[:2] for update in updates)
    starts = [input_at(update, 2) for update in updates]
    if past_key is None or past_value is None or new_key is None or new_value is None or starts[0] is None:
        return Obstacle("cache without the positions of its new entries", key_update.name)
    S = dim(new_key, 2)
    if origin(starts[0]) is not origin(starts[1]) or not _ends_behind(node, starts[0], S):
        return Obstacle("cache whose valid entries do not end with the new ones", key_update.name)
    if not all(same_size(S, dim(value, 2)) for value in (new_value, input_at(node, an.Q))):
        return Obstacle("cache with more or fewer new entries than queries", f"{S} new keys")
    return CachedAttention(past_key, past_value, new_key, new_value, key_out, value_out, starts[0], updates)


def _ends_behind(node: ir.Node, starts: ir.Value, S: Dim) -> bool:
    """Whether the valid keys of the attention are those before the call and the S new ones."""
    add = made_by(origin(input_at(node, an.NONPAD_KV_SEQLEN)), "Add")
    if add is None:
        return False
    pairs = (add.inputs, add.inputs[::-1])
    return any(origin(before) is origin(starts) and same_size(S, _number(new)) for before, new in pairs)


def origin(value: ir.Value | None) -> ir.Value | None:
    """The value that has the same numbers before casts and reshapes."""
    while (node := made_by(value, "Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape")) is not None:
        value = node.inputs[0]
    return value


def _number(value: ir.Value | None) -> Dim:
    """The single number of a value, or the name of the axis whose size it is."""
    value = origin(value)
    tensor = constant(value)
    if tensor is not None:
        numbers = tensor.numpy().reshape(-1)
        return int(numbers[0]) if numbers.size == 1 else None
    gather = made_by(value, "Gather")
    shape = made_by(origin(input_at(gather, 0)) if gather is not None else value, "Shape")
    x = input_at(shape, 0)
    if shape is None or x is None or x.shape is None:
        return None
    sizes = dims(x)[shape.attributes.get_int("start", 0) : shape.attributes.get_int("end", None)]
    at = _number(input_at(gather, 1)) if gather is not None else 0 if len(sizes) == 1 else None
    return sizes[at] if isinstance(at, int) and -len(sizes) <= at < len(sizes) else None


# -- Replace attentions together with their caches -------------------------------------------------


def rewrite_caches(
    model: ir.Model,
    wanted: Callable[[ir.Node], CachedAttention | None],
    write: Callable[[AttentionCall, NodeBuilder, CachedAttention], None],
    *,
    dialect: str,
) -> None:
    """Write the attentions that are wanted, each with its cache; the model is changed."""
    taken, written = names_in(model), False
    for node in [node for node in model.graph.all_nodes() if is_attention(node)]:
        if (cache := wanted(node)) is not None:
            take_mask_before_expand(node)
            call = read_call(node, opset=model.opset_imports.get(""), dialect=dialect)
            write(call, NodeBuilder(prefix_within(call.attention.name, taken)), cache)
            written = True
    if written:
        RemoveUnusedNodesPass()(model)
        infer_shapes(model)


def take_over(
    model: ir.Model, node: ir.Node, b: NodeBuilder, cache: CachedAttention, y: ir.Value, *states: ir.Value
) -> None:
    """Replace an attention and the updates of its preallocated cache by one operator.

    `y` replaces the output of the attention, `states` the caches that are graph outputs.
    """
    for old, new in zip((cache.key_out, cache.value_out), states, strict=True):
        replace_value(old, new)
    replace_node(node, b, {Y: y}, keep=states)
    for update in cache.updates:
        model.graph.remove(update, safe=True)
    import_domains(model, b)
