"""A static cache that the plugin's attention node writes itself: nothing is copied, nobody else writes rows.

The node takes the caches and gives them out, with the new rows at starts[b] … starts[b] + S − 1. Whoever runs
the engine binds input and output to the same memory; otherwise the node copies the whole cache first.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import onnx_ir as ir

from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.lower.cache_form import note_in_place
from mha_deploy.graph.lower.cache_pattern import STATIC, CachedAttention, read_cache
from mha_deploy.graph.lower.cache_rewrite import rewrite_caches, take_over
from mha_deploy.graph.lower.call import AttentionCall, read_call
from mha_deploy.graph.lower.pack import pack_projections
from mha_deploy.graph.lower.plugin_limits import refuse_what_is_missing
from mha_deploy.graph.lower.plugin_operands import operands_of, place_of
from mha_deploy.graph.lower.plugin_sight import as_int32, before_casts, diagonal_of, read_sight
from mha_deploy.graph.lower.plugin_write import WrittenCache, finished, write_attention
from mha_deploy.graph.lower.rewrite import (
    copy_of,
    infer_shapes,
)
from mha_deploy.graph.lower.scatter import Obstacle

if TYPE_CHECKING:
    from mha_deploy.graph.lower.to_plugin import PluginOptions

APPEND, COPY = "append", "copy"


def prepare(model: ir.Model, options: PluginOptions, *, dialect: str) -> ir.Model:
    """Pack projections, and write every attention behind a static cache as one node that appends to it.

    Args:
        model: The model; it is not changed.
        options: Options of the lowering; `pack` and `cache` decide.
        dialect: Name used in messages.

    Raises:
        LoweringError: `cache` is `append`, and a static cache is not of a form that can be served so.
    """
    lowered = pack_projections(model) if options.pack else copy_of(model)
    if options.pack:
        infer_shapes(lowered)
    if options.cache == COPY:
        return lowered
    wanted = partial(_wanted, options=options, dialect=dialect)
    return rewrite_caches(lowered, wanted, partial(_rewrite, lowered, options=options), dialect=dialect)


def _wanted(node: ir.Node, options: PluginOptions, dialect: str) -> CachedAttention | None:
    """The cache of an attention, if the node is to write it."""
    cache = read_cache(node)
    obstacle = cache if isinstance(cache, Obstacle) else None
    if isinstance(cache, CachedAttention) and cache.kind == STATIC:
        call = read_call(node, opset=None, dialect=dialect)
        if diagonal_of(call) is not None:
            return cache
        obstacle = Obstacle("window around the last key of a cache", call.facts.right_window)
    if obstacle is not None and options.cache == APPEND:
        call = read_call(node, opset=None, dialect=dialect)
        raise call.refuse(obstacle.feature, got=obstacle.got, hint="cache=copy writes whole caches")
    return None


def _rewrite(
    model: ir.Model, call: AttentionCall, b: NodeBuilder, cache: CachedAttention, options: PluginOptions
) -> None:
    refuse_what_is_missing(call, limits=options.limits)
    if cache.starts is None:
        raise call.refuse("static cache without lengths", hint="cache=copy")
    places = (
        place_of(call.q, call.Hq, call.D),
        place_of(cache.new_key, call.Hkv, call.D),
        place_of(cache.new_value, call.Hkv, call.Dv),
    )
    S, T = places[0].length(b), b.size(cache.past_key, 2)
    sight = read_sight(b, call, S, T, empty_rows=options.empty_rows, in_cache=True)
    starts = as_int32(b, before_casts(cache.starts), name="starts")
    written = WrittenCache(cache.past_key, cache.past_value, starts)
    y, *states = write_attention(b, call, operands_of(places), sight, written)
    take_over(model, call, b, cache, finished(b, call, sight, y), states)
    inputs = (cache.past_key, cache.past_value)
    note_in_place(model, {str(new.name): str(past.name) for new, past in zip(states, inputs, strict=True)})
