"""KV caches: recognize them in a graph, and write them for runtimes without a cache update."""

from __future__ import annotations

import json
from collections.abc import Callable
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
    infer_shapes,
    input_at,
    made_by,
    origin,
    output_at,
    prefix_within,
    prefixes_in,
    replace_node,
    replace_value,
    same_size,
)
from mha_deploy.graph.lower.call import AttentionCall, read_call, take_mask_before_expand
from mha_deploy.graph.lower.operators import SCATTER, obstacle_to_update_in_place

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


def noted_caches(model: ir.Model, note: str) -> dict[str, str]:
    """From each output that one of the notes of a lowered model is about to its cache."""
    caches: dict[str, str] = json.loads(model.metadata_props.get(note, "{}"))
    return caches


def note_caches(model: ir.Model, note: str, caches: dict[str, str]) -> None:
    """Add outputs and their caches to the metadata of the model, under one of the notes."""
    model.metadata_props[note] = json.dumps(noted_caches(model, note) | caches)


def entries_name(output: str) -> str:
    """The name of an output of new entries, from that of the output of the whole cache."""
    if "_cache_out" in output:
        return output.replace("_cache_out", "_entries")
    return f"{output.removeprefix('present_')}_entries"


# -- Recognize an attention with its cache ---------------------------------------------------------


class CachedAttention(NamedTuple):
    """One attention, and the preallocated cache that it updates."""

    past_key: ir.Value  # the entries of earlier calls, a graph input: `[B, Hkv, T, D]`
    past_value: ir.Value
    new_key: ir.Value  # those of the S new tokens: `[B, Hkv, S, D]`
    new_value: ir.Value
    key_out: ir.Value  # the graph output with the new keys in it
    value_out: ir.Value
    starts: ir.Value  # valid entries of each batch element before the call
    updates: tuple[ir.Node, ir.Node]  # the nodes that write the new entries


def read_cache(node: ir.Node) -> CachedAttention | None:
    """The preallocated cache of an attention; None where it has none, or one of another pattern."""
    key_update, value_update = (made_by(input_at(node, at), SCATTER) for at in (an.K, an.V))
    if key_update is None or value_update is None or output_at(node, an.QK_OUTPUT) is not None:
        return None
    updates = (key_update, value_update)
    if any(map(obstacle_to_update_in_place, updates)) or not all(map(_is_read_once, updates)):
        return None
    (past_key, new_key), (past_value, new_value) = (update.inputs[:2] for update in updates)
    starts, value_starts = (input_at(update, 2) for update in updates)
    if past_key is None or past_value is None or new_key is None or new_value is None or starts is None:
        return None
    # The valid entries end with the new ones, and there is one for each query.
    S = dim(new_key, 2)
    if origin(starts) is not origin(value_starts) or not _ends_behind(node, starts, S):
        return None
    if not all(same_size(S, dim(value, 2)) for value in (new_value, input_at(node, an.Q))):
        return None
    outs = (key_update.outputs[0], value_update.outputs[0])
    return CachedAttention(past_key, past_value, new_key, new_value, *outs, starts, updates)


def _is_read_once(update: ir.Node) -> bool:
    """Whether the updated cache is one graph output, and only read by the attention."""
    value = update.outputs[0]
    outputs = () if value.graph is None else value.graph.outputs
    return sum(out is value for out in outputs) == 1 and len(value.uses()) == 1


def _ends_behind(node: ir.Node, starts: ir.Value, S: Dim) -> bool:
    """Whether the valid keys of the attention are those before the call and the S new ones."""
    add = made_by(origin(input_at(node, an.NONPAD_KV_SEQLEN)), "Add")
    if add is None:
        return False
    pairs = (add.inputs, add.inputs[::-1])
    return any(origin(before) is origin(starts) and same_size(S, number_of(new)) for before, new in pairs)


def number_of(value: ir.Value | None) -> Dim:
    """The single number of a value, or the name of the axis whose size it is; None where neither is known."""
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
    at = number_of(input_at(gather, 1)) if gather is not None else 0 if len(sizes) == 1 else None
    return sizes[at] if isinstance(at, int) and -len(sizes) <= at < len(sizes) else None


# -- Replace attentions together with their caches -------------------------------------------------


def rewrite_caches(
    model: ir.Model,
    write: Callable[[AttentionCall, NodeBuilder, CachedAttention], None],
    wanted: Callable[[AttentionCall], bool] = lambda call: True,
) -> None:
    """Write the attentions with a preallocated cache that are wanted; the model is changed."""
    taken, written = prefixes_in(model), False
    for node in [node for node in model.graph.all_nodes() if is_attention(node)]:
        cache = read_cache(node)
        if cache is not None and wanted(read_call(node)):
            take_mask_before_expand(node)
            call = read_call(node, opset=model.opset_imports.get(""))
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
