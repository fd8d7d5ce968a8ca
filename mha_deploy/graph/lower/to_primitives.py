"""Attention as MatMul, Softmax, MatMul: the pattern that TensorRT 8.6 to 10.13 recognizes and fuses.

With a KV cache there is a second form, which reads the cache in place and outputs only the new entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import onnx_ir as ir

from mha_deploy.graph.attention_node import (
    OF_WEIGHTS,
    PRESENT_KEY,
    PRESENT_VALUE,
    QK_OUTPUT,
    QuantizedAttention,
    Y,
    requantized,
)
from mha_deploy.graph.ir import NodeBuilder, Size, replace_node
from mha_deploy.graph.lower import cache as kv
from mha_deploy.graph.lower import masks
from mha_deploy.graph.lower.call import AttentionCall, Outputs
from mha_deploy.graph.lower.masks import Mask
from mha_deploy.graph.lower.operators import (
    INDEXING_RULES,
    rms_norm_to_primitives,
    rotary_to_primitives,
    scatter_to_primitives,
)
from mha_deploy.graph.lower.quantized import folded_scale, quantized_heads

AUTO, COPY = "auto", "copy"

OPERATOR_RULES = {
    "RotaryEmbedding": rotary_to_primitives,
    "TensorScatter": scatter_to_primitives,
    "RMSNormalization": rms_norm_to_primitives,
    **INDEXING_RULES,
}
"""How the operators around attention are written."""


@dataclass(frozen=True, kw_only=True)
class PrimitivesOptions:
    """How to write the matmuls."""

    gqa: str = AUTO  # how the query heads that share a key/value head are written
    # `copy` outputs whole caches with the new entries in them; `auto` reads a preallocated cache in place and
    # outputs only the new entries, where its pattern is recognized
    cache: str = AUTO
    # Subtract the largest number of an FP16 mask where it is large. That is exact, but it computes the mask,
    # and TensorRT 8.6 fuses attention only under a mask that is an input. Otherwise a query whose keys all
    # have about the lowest number of FP16 averages their values.
    shift_masks: bool = True
    opset: int | None = 17  # the highest opset the result may need; None keeps the model's own

    CHOICES: ClassVar = {"gqa": (AUTO, "fold", "broadcast", "repeat"), "cache": (AUTO, COPY)}


# -- The steps of attention in plain matmuls, for groups of query heads that share a key/value head --


class GroupForm(NamedTuple):
    """The layout of queries, keys and bias for the matmuls.

    `fold` takes the query heads of a group as more queries of one head, `broadcast` gives the group an axis
    of its own, `repeat` copies keys and values for each query head; with `own` each has its own key head.
    """

    b: NodeBuilder
    call: AttentionCall
    kind: str

    def query(self, q: ir.Value) -> ir.Value:
        """`[B, Hq, S, D]`, times the scale, in the layout; heads of a group are adjacent: no data moves."""
        b, call = self.b, self.call
        if call.scale != 1.0:
            q = b.op("Mul", q, b.constant(call.scale, call.dtype), name="q_scaled")
        if self.kind == "fold":  # [B, Hkv, G·S, D]
            return b.reshape(q, 0, call.Hkv, -1, call.D, name="q_folded")
        if self.kind == "broadcast":  # [B, Hkv, G, S, D]
            return b.reshape(q, 0, call.Hkv, call.group, -1, call.D, name="q_grouped")
        return q

    def keys(self, x: ir.Value, rows: int | None, columns: int | None) -> ir.Value:
        """`[B, Hkv, rows, columns]`, transposed keys or values, to the layout; None is the size T."""
        if self.kind == "broadcast":
            return self.b.unsqueeze(x, 2)
        if self.kind == "repeat":
            copies = self.b.expand(self.b.unsqueeze(x, 2), 1, 1, self.call.group, 1, 1)
            return self.b.reshape(copies, 0, self.call.Hq, rows or -1, columns or -1, name="repeated")
        return x

    def bias(self, mask: Mask, bias: ir.Value, S: Size, T: Size) -> ir.Value:
        """`[1|B, 1|Hq, 1|S, T]` to the layout."""
        b, call = self.b, self.call
        if self.kind == "fold" and not (mask.heads == 1 and mask.one_row):
            copies, heads = (call.group, 1) if mask.heads == 1 else (call.Hq, call.Hkv)
            return b.reshape(b.expand(bias, 1, copies, S, 1), 0, heads, -1, T, name="bias_folded")
        if self.kind == "broadcast" and mask.heads == 1:
            return b.unsqueeze(bias, 1)
        if self.kind == "broadcast":
            return b.reshape(bias, 0, call.Hkv, call.group, -1, T, name="bias_grouped")
        return bias

    def restore(self, x: ir.Value, last: Size) -> ir.Value:
        """A result, whose last axis has size `last`, back to `[B, Hq, S, last]`."""
        if self.kind in ("own", "repeat"):
            return x
        name = "unfolded" if self.kind == "fold" else "ungrouped"
        return self.b.reshape(x, 0, self.call.Hq, -1, last, name=name)

    def transposed_scores(self, q: ir.Value, k: ir.Value) -> ir.Value:
        """Q·Kᵀ as (K·Qᵀ)ᵀ, which reads the keys of a cache without a transpose.

        TensorRT-RTX 1.7.1 writes a transposed copy of a whole cache before Q·Kᵀ, and none here.
        """
        perm = (0, 1, 2, 4, 3) if self.kind == "broadcast" else (0, 1, 3, 2)
        query = self.b.transpose(q, *perm, name="q_transposed")
        matmul = self.b.op("MatMul", self.keys(k, None, self.call.D), query, name="scores")
        return self.b.transpose(matmul, *perm, name="scores_transposed")

    def softcap(self, scores: ir.Value) -> ir.Value:
        """Bound the scores: softcap · tanh(scores / softcap)."""
        b, softcap = self.b, self.call.attention.softcap
        if softcap <= 0:
            return scores
        cap = b.constant(softcap, self.call.dtype)
        return b.op("Mul", b.op("Tanh", b.op("Div", scores, cap)), cap, name="scores_capped")

    def softmax(self, scores: ir.Value) -> ir.Value:
        """Softmax over the keys, in the `softmax_precision` of the node."""
        precision = self.call.node.attributes.get_int("softmax_precision", None)
        if precision is None or precision == self.call.dtype:
            return self.b.op("Softmax", scores, axis=-1, name="weights")
        wide = self.b.op("Softmax", self.b.op("Cast", scores, to=precision), axis=-1)
        return self.b.op("Cast", wide, to=int(self.call.dtype), name="weights")

    def weighted(self, weights: ir.Value, v: ir.Value) -> ir.Value:
        """The weights times values `[B, Hkv, ·, Dv]`."""
        return self.b.op("MatMul", weights, self.keys(v, None, self.call.Dv), name="weighted_values")


def group_form(b: NodeBuilder, call: AttentionCall, name: str) -> GroupForm:
    """The form for this attention; `auto` folds.

    A single key/value head is repeated instead: TensorRT 8.6 builds the folded form of it, and the engine
    fails at some sizes and is wrong at others.
    """
    if call.group == 1:
        name = "own"
    elif name == AUTO:
        name = "repeat" if call.Hkv == 1 else "fold"
    return GroupForm(b, call, name)


# -- The dialect -----------------------------------------------------------------------------------


def lower_to_primitives(call: AttentionCall, b: NodeBuilder, options: PrimitivesOptions) -> Outputs:
    """Write one attention as matmuls around a softmax; the outputs by position."""
    heads, form = call.heads(b), group_form(b, call, options.gqa)
    S, T = call.query_length(b), call.key_length(b)
    mask = masks.read_mask(b, call, S, T)
    rows = masks.attending_queries(b, call, mask)
    q, mode = heads.q, call.attention.qk_output_mode
    # A mask that is combined with others or whose scores are an output is computed in any case.
    as_it_is = not options.shift_masks and mask is not None and mask.visible is None and mode is None
    if mask is not None and (as_it_is or masks.narrows(call, mask)):
        q = masks.without_lost_queries(b, call, mask, q)
    keys = form.keys(b.transpose(heads.k, 0, 1, 3, 2, name="k_transposed"), call.D, None)
    raw = b.op("MatMul", form.query(q), keys, name="scores")
    capped = biased = form.softcap(raw)
    if mask is not None:
        bias = masks.bias_of(b, call, mask, in_score_type=not as_it_is)
        biased = b.op("Add", capped, form.bias(mask, bias, S, T), name="scores_biased")
    weights = form.softmax(biased)
    if mode in (0, 1, 2) and q is not heads.q:  # the scores that are an output are those of every query
        raw = b.op("MatMul", form.query(heads.q), keys, name="scores_of_all")
        capped = form.softcap(raw)
    if mode == 2 and mask is not None and mask.additive is not None and masks.narrows(call, mask):
        # The sum may be within the range of the scores where the mask is not.
        bias, dtype = masks.wide_bias(b, mask, mask.additive), mask.additive.dtype or ir.DataType.FLOAT
        wide = b.op("Add", b.op("Cast", capped, to=int(dtype)), form.bias(mask, bias, S, T))
        biased = b.op("Cast", wide, to=int(call.dtype), name="scores_masked")
    elif mode == 2 and mask is not None:
        bias = masks.plain_bias(b, call, mask)
        biased = b.op("Add", capped, form.bias(mask, bias, S, T), name="scores_masked")
    y = form.restore(form.weighted(weights, heads.v), call.Dv)
    y = masks.zero_masked_queries(b, call, rows, y)
    outputs = {Y: call.as_input_rank(b, y), PRESENT_KEY: heads.k, PRESENT_VALUE: heads.v}
    if mode is not None:
        stage = form.restore((raw, capped, biased, weights)[mode], T)
        outputs[QK_OUTPUT] = masks.zero_masked_queries(b, call, rows, stage) if mode == OF_WEIGHTS else stage
    return outputs


def quantized_to_primitives(
    call: AttentionCall, b: NodeBuilder, found: QuantizedAttention, options: PrimitivesOptions
) -> ir.Value:
    """The heads of an attention in eight bits, in 4-D: Q/DQ before both matmuls and behind the softmax."""
    heads = quantized_heads(call, b, found)
    attention = replace(call.attention, scale=call.scale / folded_scale(call, found))
    call = replace(call, attention=attention)
    form, S, T = group_form(b, call, options.gqa), call.query_length(b), call.key_length(b)
    mask = masks.read_mask(b, call, S, T)
    rows = masks.attending_queries(b, call, mask)
    keys = form.keys(b.transpose(heads.k, 0, 1, 3, 2, name="k_transposed"), call.D, None)
    scores = form.softcap(b.op("MatMul", form.query(heads.q), keys, name="scores"))
    if mask is not None:
        bias = form.bias(mask, masks.bias_of(b, call, mask, in_score_type=True), S, T)
        scores = b.op("Add", scores, bias, name="scores_biased")
    weights = form.softmax(scores)
    if found.weights is not None:
        if rows is not None:  # what is not a number has no place on a grid
            weights = b.op("Where", _in_form(form, rows, S), weights, b.constant(0.0, call.dtype))
        weights = requantized(b, found.weights, weights)
    y = form.restore(form.weighted(weights, heads.v), call.Dv)
    return masks.zero_masked_queries(b, call, rows, y)


def _in_form(form: GroupForm, rows: ir.Value, S: Size) -> ir.Value:
    """`[·, ·, ·, 1]`, whether a query attends to a key, in the layout of the scores."""
    mask = Mask(visible=rows, additive=None, heads=1, one_row=False)
    return form.bias(mask, rows, S, 1)


# -- With a KV cache that is read in place ---------------------------------------------------------


def read_caches_in_place(model: ir.Model, options: PrimitivesOptions) -> None:
    """Write every attention with a preallocated cache in this form, but for `copy`; changes the model."""

    def write(call: AttentionCall, b: NodeBuilder, cache: kv.CachedAttention) -> None:
        y = _cached_attention(group_form(b, call, options.gqa), cache)
        of_keys = (cache.key_out, cache.new_key, cache.past_key)
        rows = {}
        for old, entries, past in (of_keys, (cache.value_out, cache.new_value, cache.past_value)):
            # A node of its own: the rules for other operators may replace the producer.
            row, name = b.op("Identity", entries), kv.entries_name(str(old.name))
            for value in (value for node in model.graph.all_nodes() for value in node.outputs):
                value.name = f"{name}_inner" if value.name == name else value.name
            row.name, row.type = name, old.type
            model.graph.outputs[:] = [row if each is old else each for each in model.graph.outputs]
            rows[row] = str(past.name)
        replace_node(call.node, b, {Y: y}, keep=rows)
        for update in cache.updates:
            model.graph.remove(update, safe=True)
        kv.note_caches(model, kv.ENTRIES_NOTE, {str(row.name): past for row, past in rows.items()})

    if options.cache != COPY:
        kv.rewrite_caches(model, write)


def _cached_attention(form: GroupForm, cache: kv.CachedAttention) -> ir.Value:
    """Scores of the past and of the new tokens apart, one softmax over both, and two matmuls with V."""
    b, call = form.b, form.call
    S, T, starts = call.query_length(b), b.size(cache.past_key, 2), cache.starts
    hides_more = call.mask is not None or call.attention.has_window
    mask = masks.read_mask(b, call, S, call.key_length(b)) if hides_more else None
    biases = _plain_biases(form, starts, S, T) if mask is None else _split_bias(form, starts, mask, S, T)
    narrows = mask is not None and masks.narrows(call, mask)
    q = masks.without_lost_queries(b, call, mask, call.q) if narrows else call.q
    query, scores = form.query(q), []
    for k, bias in zip((cache.past_key, cache.new_key), biases, strict=True):
        capped = form.softcap(form.transposed_scores(query, k))
        scores.append(capped if bias is None else b.op("Add", capped, bias, name="scores_biased"))
    weights = form.softmax(b.op("Concat", *scores, axis=-1, name="all_scores"))
    cut, last = b.as_tensor(T), b.ints(-1)
    past = b.op("Slice", weights, b.ints(0), cut, last, name="of_past")
    new = b.op("Slice", weights, cut, b.ints(2**63 - 1), last, name="of_new")
    parts = (form.weighted(past, cache.past_value), form.weighted(new, cache.new_value))
    y = form.restore(b.op("Add", *parts, name="summed_values"), call.Dv)
    # Without a mask no query is fully masked: it attends at least to itself.
    return masks.zero_masked_queries(b, call, masks.attending_queries(b, call, mask), y)


def _plain_biases(form: GroupForm, starts: ir.Value, S: Size, T: Size) -> tuple[ir.Value, ir.Value | None]:
    """Mask the entries of a cache of T that are not valid yet, and the future among the S new tokens."""
    b, call = form.b, form.call

    def bias(visible: ir.Value, columns: Size, *, one_row: bool) -> ir.Value:
        mask = Mask(visible=visible, additive=None, heads=1, one_row=one_row)
        return form.bias(mask, masks.bias_of(b, call, mask), S, columns)

    past, new = bias(_valid(b, starts, T), T, one_row=True), None
    if call.attention.is_causal and call.attention.S != 1:
        key, query = (masks.positions_along(b, S, axis=axis) for axis in (3, 2))
        new = bias(b.op("Less", key, b.op("Add", query, b.ints(1))), S, one_row=False)
    return past, new


def _split_bias(form: GroupForm, starts: ir.Value, mask: Mask, S: Size, T: Size) -> tuple[ir.Value, ir.Value]:
    """Split the bias over all keys into those of the past and of the new tokens."""
    b, call = form.b, form.call
    bias = masks.bias_of(b, call, mask, in_score_type=True)
    hidden = b.constant(masks.NEG_INF, call.dtype)
    past = b.op("Where", _valid(b, starts, T), bias, hidden, name="bias_past")
    # The new entries are at another position in each batch element: their columns are gathered.
    columns = b.op("Add", b.reshape(starts, -1, 1, 1, 1), masks.positions_along(b, S, axis=3))
    sizes: tuple[Size, ...] = (b.size(call.q, 0), mask.heads, S, 1)
    spread, columns = (b.expand(x, *sizes) for x in (bias, columns))
    new = b.op("GatherElements", spread, columns, axis=3, name="bias_new")
    return form.bias(mask, past, S, T), form.bias(replace(mask, one_row=False), new, S, S)


def _valid(b: NodeBuilder, starts: ir.Value, T: Size) -> ir.Value:
    """`[B, 1, 1, T]`, True for the entries that were valid before the call."""
    return b.op("Less", masks.positions_along(b, T, axis=3), b.reshape(starts, -1, 1, 1, 1))
