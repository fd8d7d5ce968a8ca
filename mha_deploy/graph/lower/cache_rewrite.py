"""What dialects that serve a cache in a form of their own share: finding the attentions, and taking over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from mha_deploy.graph.attention_node import Y, is_attention
from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.lower.cache_pattern import CachedAttention
from mha_deploy.graph.lower.call import AttentionCall, read_call
from mha_deploy.graph.lower.rewrite import (
    import_domains,
    infer_shapes,
    names_in,
    prefix_within,
    replace_node,
    take_mask_before_expand,
)

Wanted = Callable[[ir.Node], CachedAttention | None]
"""The cache of an attention, if the dialect is to write both as one."""

Write = Callable[[AttentionCall, NodeBuilder, CachedAttention], None]
"""Puts new nodes in the place of an attention and its cache."""


def rewrite_caches(model: ir.Model, wanted: Wanted, write: Write, *, dialect: str) -> ir.Model:
    """Write the attentions that are wanted, each with its cache.

    Args:
        model: The model; it is changed.
        wanted: Which attentions.
        write: How.
        dialect: Name used in messages.

    Returns:
        The model.
    """
    taken = names_in(model)
    for node in [node for node in model.graph.all_nodes() if is_attention(node)]:
        cache = wanted(node)
        if cache is not None:
            take_mask_before_expand(node)
            call = read_call(node, opset=model.opset_imports.get(""), dialect=dialect)
            write(call, NodeBuilder(prefix_within(call.facts.name, taken)), cache)
    RemoveUnusedNodesPass()(model)
    return infer_shapes(model)


def take_over(
    model: ir.Model,
    call: AttentionCall,
    b: NodeBuilder,
    cache: CachedAttention,
    y: ir.Value,
    states: Sequence[ir.Value],
) -> None:
    """Let one operator stand for an attention and the updates of its static cache.

    Args:
        model: The model; it is changed.
        call: The attention; its node is removed.
        b: Holds the new nodes.
        cache: The cache; its updates are removed.
        y: What stands for the output of the attention.
        states: What stands for the caches that go out.
    """
    for old, new in zip((cache.key_out, cache.value_out), states, strict=True):
        new.name, new.type, new.shape = old.name, old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    replace_node(call.node, b, {Y: y}, keep=states)
    for update in cache.updates:
        model.graph.remove(update, safe=True)
    import_domains(model, b)
