"""Attention that reads a cache where it is and gives out only the new rows.

For a TensorRT without cache updates (8.6 to 10.13), the update of a cache is a copy of it at every step.
Here nothing is copied: the scores of the cache and those of the new tokens are computed apart and joined
before the softmax, the weights are cut apart again, and the two sums of values are added.

    scores   Q·past_keyᵀ, rows behind the valid ones hidden  |  Q·new_keyᵀ, causal among the new
    output   weights_past · past_value  +  weights_new · new_value

The graph outputs are the new rows, `[B, Hkv, S, D]`, in place of the caches; whoever runs the model writes
them at lengths[b] … lengths[b] + S − 1, or joins them to a growing past. `cache_form` says so.

What stands behind the valid rows of a cache may be any numbers of usual size. They are hidden, not skipped:
their scores must not overflow, and a weight of zero times NaN is NaN, as in every dialect. A cache begins
with zeros.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import onnx_ir as ir

from mha_deploy.graph.attention_node import Y
from mha_deploy.graph.build import NodeBuilder, Size
from mha_deploy.graph.lower.cache_form import note_rows, rows_name
from mha_deploy.graph.lower.cache_pattern import GROWING, CachedAttention, read_cache
from mha_deploy.graph.lower.cache_rewrite import rewrite_caches
from mha_deploy.graph.lower.call import AttentionCall, read_call
from mha_deploy.graph.lower.groups import GroupForm, group_form
from mha_deploy.graph.lower.heads import as_input_rank, key_length, query_length, split_heads
from mha_deploy.graph.lower.masks import (
    NEG_INF,
    Mask,
    bias_of,
    hidden_number,
    positions_along,
    read_mask,
    rows_to_keep,
    zero_closed_rows,
)
from mha_deploy.graph.lower.products import (
    scale_query,
    scores_of,
    softcap,
    softmax,
    turned_scores_of,
    weighted_values,
)
from mha_deploy.graph.lower.rewrite import (
    copy_of,
    replace_node,
)
from mha_deploy.graph.lower.scatter import Obstacle

if TYPE_CHECKING:
    from mha_deploy.graph.lower.to_primitives import PrimitivesOptions

ROWS, COPY = "rows", "copy"

_TO_THE_END = 2**63 - 1


class Part(NamedTuple):
    """Keys and values of one part, `[B, Hkv, ·, D]`, and what is added to its scores."""

    k: ir.Value
    v: ir.Value
    bias: ir.Value | None


def give_rows_out(model: ir.Model, options: PrimitivesOptions, *, dialect: str) -> ir.Model:
    """Write every attention with a cache in this form, where the options ask for it.

    Args:
        model: The model; it is not changed.
        options: Options of the lowering; `cache` decides.
        dialect: Name used in messages.

    Raises:
        LoweringError: `cache` is `rows`, and a cache is not of a form that can be served so.
    """
    if options.cache == COPY:
        return model
    lowered = copy_of(model)
    wanted = partial(_wanted, options=options, dialect=dialect)
    return rewrite_caches(lowered, wanted, partial(_rewrite, lowered, options=options), dialect=dialect)


def _wanted(node: ir.Node, options: PrimitivesOptions, dialect: str) -> CachedAttention | None:
    """The cache of an attention, if it is to be read in place."""
    cache = read_cache(node)
    if isinstance(cache, Obstacle):
        if options.cache == ROWS:
            call = read_call(node, opset=None, dialect=dialect)
            raise call.refuse(cache.feature, got=cache.got, hint="cache=copy writes whole caches")
        return None
    # A growing cache promises the whole present, so it is only changed on demand.
    return None if cache is None or (cache.kind == GROWING and options.cache != ROWS) else cache


def _rewrite(
    model: ir.Model, call: AttentionCall, b: NodeBuilder, cache: CachedAttention, options: PrimitivesOptions
) -> None:
    new_key, new_value = _new_rows(b, call, cache)
    y = _attention(b, call, cache, new_key, new_value, options)
    rows = []
    for old, new in ((cache.key_out, new_key), (cache.value_out, new_value)):
        # A node of its own: what is joined here may be replaced by the rules for other operators.
        rows.append(_give_out(model, old, b.op("Identity", new)))
    replace_node(call.node, b, {Y: y}, keep=rows)
    for update in cache.updates:
        model.graph.remove(update, safe=True)
    inputs = (cache.past_key, cache.past_value)
    note_rows(model, {str(row.name): str(past.name) for row, past in zip(rows, inputs, strict=True)})


def _give_out(model: ir.Model, old: ir.Value, rows: ir.Value) -> ir.Value:
    """Let rows be the graph output in place of a whole cache; nobody else may have that name."""
    name = rows_name(str(old.name))
    for node in model.graph.all_nodes():
        for value in node.outputs:
            value.name = f"{name}_inner" if value.name == name else value.name
    rows.name, rows.type = name, old.type
    outputs = model.graph.outputs
    outputs[next(at for at, output in enumerate(outputs) if output is old)] = rows
    return rows


def _new_rows(b: NodeBuilder, call: AttentionCall, cache: CachedAttention) -> tuple[ir.Value, ir.Value]:
    """Keys and values of the new tokens, `[B, Hkv, S, D]`."""
    if call.facts.rank == 4:
        return cache.new_key, cache.new_value
    k = split_heads(b, cache.new_key, call.Hkv, call.D, name="k_heads")
    return k, split_heads(b, cache.new_value, call.Hkv, call.Dv, name="v_heads")


# -- the products --------------------------------------------------------------------------------


def _attention(
    b: NodeBuilder,
    call: AttentionCall,
    cache: CachedAttention,
    new_key: ir.Value,
    new_value: ir.Value,
    options: PrimitivesOptions,
) -> ir.Value:
    form = group_form(call, options.gqa)
    S, T = query_length(b, call), b.size(cache.past_key, 2)
    hides_more = call.mask is not None or call.facts.has_window
    mask = read_mask(b, call, S, key_length(b, call)) if hides_more else None
    geometry = Geometry(b, call, cache, form, S, T)
    biases = geometry.plain() if mask is None else geometry.cut(mask)
    past = Part(cache.past_key, cache.past_value, biases[0])
    new = Part(new_key, new_value, biases[1])

    q = call.q if call.facts.rank == 4 else split_heads(b, call.q, call.Hq, call.D, name="q_heads")
    query = form.query(b, call, scale_query(b, call, q, options.scale))
    scores = [_part_scores(b, call, form, query, part, options) for part in (past, new)]
    weights = softmax(b, call, b.op("Concat", *scores, axis=-1, name="all_scores"))
    halves = zip(_cut_columns(b, weights, T), (past, new), strict=True)
    sums = [weighted_values(b, call, form, half, part.v) for half, part in halves]
    y = form.restore(b, call, b.op("Add", *sums, name="summed_values"), call.Dv)
    # Without a mask nobody is without keys: a query sees at least itself.
    y = zero_closed_rows(b, call, rows_to_keep(b, call, mask, options.empty_rows), y)
    return as_input_rank(b, call, y)


def _part_scores(
    b: NodeBuilder,
    call: AttentionCall,
    form: GroupForm,
    query: ir.Value,
    part: Part,
    options: PrimitivesOptions,
) -> ir.Value:
    """The scores of one part, bounded, and low where a key is hidden."""
    product = turned_scores_of if options.keys_first else scores_of
    scores = softcap(b, call, product(b, call, form, query, part.k, options.scale))
    return scores if part.bias is None else b.op("Add", scores, part.bias, name="scores_biased")


def _cut_columns(b: NodeBuilder, x: ir.Value, T: Size) -> tuple[ir.Value, ir.Value]:
    """The columns of the past and of the new tokens: slices, as T may be known only at run time."""
    cut, last = b.as_tensor(T), b.ints(-1)
    past = b.op("Slice", x, b.ints(0), cut, last, name="of_past")
    return past, b.op("Slice", x, cut, b.ints(_TO_THE_END), last, name="of_new")


# -- what hides keys -----------------------------------------------------------------------------


class Geometry(NamedTuple):
    """What decides which keys of either part a query sees.

    Args:
        b: Builder of the new nodes.
        call: The attention.
        cache: Its cache.
        form: How grouped heads are laid out.
        S: Number of new tokens.
        T: Number of rows of the cache.
    """

    b: NodeBuilder
    call: AttentionCall
    cache: CachedAttention
    form: GroupForm
    S: Size
    T: Size

    def plain(self) -> tuple[ir.Value | None, ir.Value | None]:
        """Hide rows that are not valid yet, and what is ahead among the new tokens."""
        b, past, new = self.b, None, None
        if self.cache.starts is not None:
            past = self._bias(self._valid(self.cache.starts), self.T, one_row=True)
        if self.call.facts.is_causal and self.call.facts.S != 1:
            key, query = (positions_along(b, self.S, axis=axis) for axis in (3, 2))
            seen = b.op("Less", key, b.op("Add", query, b.ints(1)))
            new = self._bias(seen, self.S, one_row=False)
        return past, new

    def cut(self, mask: Mask) -> tuple[ir.Value, ir.Value]:
        """Cut a mask over all keys into that of the past and that of the new tokens."""
        b, call, starts = self.b, self.call, self.cache.starts
        bias = bias_of(b, call, mask)
        if starts is None:
            # Laid out first: an empty past leaves nothing that a reshape could count.
            laid_out = self.form.bias(b, call, mask, bias, self.S, key_length(b, call))
            return _cut_columns(b, laid_out, self.T)
        hidden = hidden_number(b, call, None if mask.additive is None else NEG_INF)
        past = b.op("Where", self._valid(starts), bias, hidden, name="bias_past")
        # The new rows stand at another place of the cache in each batch row: their columns are found there.
        columns = b.op("Add", b.reshape(starts, -1, 1, 1, 1), positions_along(b, self.S, axis=3))
        sizes: tuple[Size, ...] = (b.size(call.q, 0), mask.heads, self.S, 1)
        spread, columns = (b.expand(x, *sizes) for x in (bias, columns))
        new = b.op("GatherElements", spread, columns, axis=3, name="bias_new")
        every_row = replace(mask, one_row=False)
        return (
            self.form.bias(b, call, mask, past, self.S, self.T),
            self.form.bias(b, call, every_row, new, self.S, self.S),
        )

    def _bias(self, visible: ir.Value, columns: Size, *, one_row: bool) -> ir.Value:
        mask = Mask(visible=visible, additive=None, heads=1, one_row=one_row)
        numbers = bias_of(self.b, self.call, mask)
        return self.form.bias(self.b, self.call, mask, numbers, self.S, columns)

    def _valid(self, starts: ir.Value) -> ir.Value:
        """`[B, 1, 1, T]`, True for the rows that were valid before the call."""
        b = self.b
        return b.op("Less", positions_along(b, self.T, axis=3), b.reshape(starts, -1, 1, 1, 1))
