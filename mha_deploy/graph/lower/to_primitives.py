"""Attention as MatMul, Softmax, MatMul: the pattern that TensorRT 8.6 to 10.13 recognises and fuses.

With a KV cache there is a second form, which reads the cache in place and outputs only the new entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import onnx_ir as ir

from mha_deploy.graph.attention_node import PRESENT_KEY, PRESENT_VALUE, QK_OUTPUT, Y
from mha_deploy.graph.ir import NodeBuilder, Size, replace_node
from mha_deploy.graph.lower.cache import (
    DYNAMIC,
    CachedAttention,
    note_entries,
    read_cache,
    rewrite_caches,
    rows_name,
)
from mha_deploy.graph.lower.call import (
    AttentionCall,
    as_input_rank,
    key_length,
    query_length,
    read_call,
    split_heads,
    split_inputs,
)
from mha_deploy.graph.lower.masks import (
    NEG_INF,
    Mask,
    attending_queries,
    bias_of,
    plain_bias,
    positions_along,
    read_mask,
    without_lost_queries,
    zero_masked_queries,
)
from mha_deploy.graph.lower.operators import (
    Obstacle,
    rms_norm_to_primitives,
    rotary_to_primitives,
    scatter_to_primitives,
)

AUTO = "auto"
ROWS, COPY = "rows", "copy"

OPERATOR_RULES = {
    "RotaryEmbedding": rotary_to_primitives,
    "TensorScatter": scatter_to_primitives,
    "RMSNormalization": rms_norm_to_primitives,
}
"""How the operators around attention are written."""

# -- Groups of query heads that share a key/value head, in plain matmuls ---------------------------


GROUP_FORMS = ("fold", "broadcast", "repeat")
"""How the query heads that share a key/value head are written."""


class GroupForm(NamedTuple):
    """The layout of queries, keys and bias for the matmuls.

    `fold` takes the query heads of a group as more queries of one head, `broadcast` gives the group an axis
    of its own, `repeat` copies keys and values for each query head; with `own` each has its own key head.
    """

    b: NodeBuilder
    call: AttentionCall
    kind: str

    def query(self, q: ir.Value) -> ir.Value:
        """`[B, Hq, S, D]` to the layout; heads of a group are adjacent, so no data moves."""
        b, Hkv, D = self.b, self.call.Hkv, self.call.D
        if self.kind == "fold":  # [B, Hkv, G·S, D]
            return b.reshape(q, 0, Hkv, -1, D, name="q_folded")
        if self.kind == "broadcast":  # [B, Hkv, G, S, D]
            return b.reshape(q, 0, Hkv, self.call.group, -1, D, name="q_grouped")
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


# -- The steps of attention ------------------------------------------------------------------------


def scale_query(b: NodeBuilder, call: AttentionCall, q: ir.Value) -> ir.Value:
    """The queries multiplied by the scale."""
    return q if call.scale == 1.0 else b.op("Mul", q, b.constant(call.scale, call.dtype), name="q_scaled")


def scores_of(b: NodeBuilder, call: AttentionCall, form: GroupForm, q: ir.Value, k: ir.Value) -> ir.Value:
    """Q·Kᵀ, from scaled queries in the layout of the form and keys `[B, Hkv, ·, D]`."""
    keys = b.transpose(k, 0, 1, 3, 2, name="k_transposed")
    return b.op("MatMul", q, form.keys(keys, call.D, None), name="scores")


def transposed_scores_of(
    b: NodeBuilder, call: AttentionCall, form: GroupForm, q: ir.Value, k: ir.Value
) -> ir.Value:
    """The same scores as (K·Qᵀ)ᵀ, which reads the keys of a cache without a transpose.

    TensorRT-RTX 1.7.1 writes a transposed copy of a whole cache before Q·Kᵀ, and none here.
    """
    perm = (0, 1, 2, 4, 3) if form.kind == "broadcast" else (0, 1, 3, 2)
    query = b.transpose(q, *perm, name="q_transposed")
    matmul = b.op("MatMul", form.keys(k, None, call.D), query, name="scores")
    return b.transpose(matmul, *perm, name="scores_turned")


def softcap(b: NodeBuilder, call: AttentionCall, scores: ir.Value) -> ir.Value:
    """Bound the scores: softcap · tanh(scores / softcap)."""
    if call.attention.softcap <= 0:
        return scores
    cap = b.constant(call.attention.softcap, call.dtype)
    return b.op("Mul", b.op("Tanh", b.op("Div", scores, cap)), cap, name="scores_capped")


def softmax(b: NodeBuilder, call: AttentionCall, scores: ir.Value) -> ir.Value:
    """Softmax over the keys, in the `softmax_precision` of the node."""
    precision = call.node.attributes.get_int("softmax_precision", None)
    if precision is None or precision == call.dtype:
        return b.op("Softmax", scores, axis=-1, name="weights")
    wide = b.op("Cast", scores, to=precision)
    return b.op("Cast", b.op("Softmax", wide, axis=-1), to=int(call.dtype), name="weights")


def weighted_values(
    b: NodeBuilder, call: AttentionCall, form: GroupForm, weights: ir.Value, v: ir.Value
) -> ir.Value:
    """The weights times values `[B, Hkv, ·, Dv]`."""
    return b.op("MatMul", weights, form.keys(v, None, call.Dv), name="weighted_values")


# -- The dialect -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PrimitivesOptions:
    """How to write the matmuls.

    Args:
        gqa: `auto`, `fold`, `broadcast` or `repeat`: the form of grouped heads.
        cache: `copy` outputs whole caches with the new entries in them; `rows` outputs only the new entries
            and reads the caches in place; `auto` is `rows` for a preallocated cache whose pattern is
            recognised, else `copy`.
        shift_masks: Subtract the largest number of an FP16 mask where it is large. That is exact, but it
            computes the mask, and TensorRT 8.6 fuses attention only under a mask that is an input. Otherwise
            a query whose keys all have about the lowest number of FP16 averages their values.
        opset: The highest opset the result may need; None keeps the model's own.
    """

    gqa: str = AUTO
    cache: str = AUTO
    shift_masks: bool = True
    opset: int | None = 17

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "gqa": (AUTO, *GROUP_FORMS),
        "cache": (AUTO, ROWS, COPY),
    }


def lower_to_primitives(
    call: AttentionCall, b: NodeBuilder, options: PrimitivesOptions
) -> dict[int, ir.Value]:
    """Write one attention as matmuls around a softmax; the outputs by position."""
    heads = split_inputs(b, call)
    form = group_form(b, call, options.gqa)
    S, T = query_length(b, call), key_length(b, call)
    mask = read_mask(b, call, S, T)
    rows = attending_queries(b, call, mask)
    mode = call.attention.qk_output_mode
    # A mask that is combined with others or whose scores are an output is computed in any case.
    as_it_is = not options.shift_masks and mask is not None and mask.visible is None and mode is None

    q = without_lost_queries(b, call, mask, heads.q) if as_it_is and mask is not None else heads.q
    query = form.query(scale_query(b, call, q))
    raw = scores_of(b, call, form, query, heads.k)
    capped = biased = softcap(b, call, raw)
    if mask is not None:
        bias = bias_of(b, call, mask, in_score_type=not as_it_is)
        biased = b.op("Add", capped, form.bias(mask, bias, S, T), name="scores_biased")
    weights = softmax(b, call, biased)
    if mode == 2 and mask is not None:
        biased = b.op("Add", capped, form.bias(mask, plain_bias(b, call, mask), S, T), name="scores_masked")
    matmul = weighted_values(b, call, form, weights, heads.v)

    y = zero_masked_queries(b, call, rows, form.restore(matmul, call.Dv))
    outputs = {Y: as_input_rank(b, call, y), PRESENT_KEY: heads.k, PRESENT_VALUE: heads.v}
    if mode is not None:
        stage = form.restore((raw, capped, biased, weights)[mode], T)
        outputs[QK_OUTPUT] = zero_masked_queries(b, call, rows, stage) if mode == 3 else stage
    return outputs


# -- With a KV cache that is read in place ---------------------------------------------------------

_TO_THE_END = 2**63 - 1


def give_rows_out(model: ir.Model, options: PrimitivesOptions, *, dialect: str) -> None:
    """Write every attention with a cache in this form, if the option `cache` allows it; changes the model.

    Raises:
        LoweringError: `cache` is `rows`, and a cache cannot be read in place.
    """

    def wanted(node: ir.Node) -> CachedAttention | None:
        cache = read_cache(node)
        if isinstance(cache, Obstacle):
            if options.cache == ROWS:
                call = read_call(node, opset=None, dialect=dialect)
                raise call.refuse(cache.feature, got=cache.got, hint="cache=copy writes whole caches")
            return None
        # The outputs of a dynamic cache are the whole present, so it is only changed on request.
        return None if cache is None or (cache.kind == DYNAMIC and options.cache != ROWS) else cache

    def write(call: AttentionCall, b: NodeBuilder, cache: CachedAttention) -> None:
        new_key, new_value = cache.new_key, cache.new_value
        if call.attention.rank == 3:
            new_key = split_heads(b, new_key, call.Hkv, call.D, name="k_heads")
            new_value = split_heads(b, new_value, call.Hkv, call.Dv, name="v_heads")
        y = _cached_attention(b, call, cache, new_key, new_value, options)
        rows = {}
        for old, new, past in (
            (cache.key_out, new_key, cache.past_key),
            (cache.value_out, new_value, cache.past_value),
        ):
            # A node of its own: the rules for other operators may replace the producer.
            row, name = b.op("Identity", new), rows_name(str(old.name))
            for value in (value for node in model.graph.all_nodes() for value in node.outputs):
                value.name = f"{name}_inner" if value.name == name else value.name
            row.name, row.type = name, old.type
            model.graph.outputs[:] = [row if each is old else each for each in model.graph.outputs]
            rows[row] = str(past.name)
        replace_node(call.node, b, {Y: y}, keep=rows)
        for update in cache.updates:
            model.graph.remove(update, safe=True)
        note_entries(model, {str(row.name): past for row, past in rows.items()})

    if options.cache != COPY:
        rewrite_caches(model, wanted, write, dialect=dialect)


def _cached_attention(
    b: NodeBuilder,
    call: AttentionCall,
    cache: CachedAttention,
    new_key: ir.Value,
    new_value: ir.Value,
    options: PrimitivesOptions,
) -> ir.Value:
    """Scores of the past and of the new tokens apart, one softmax over both, and two matmuls with V."""
    form = group_form(b, call, options.gqa)
    S, T = query_length(b, call), b.size(cache.past_key, 2)
    hides_more = call.mask is not None or call.attention.has_window
    mask = read_mask(b, call, S, key_length(b, call)) if hides_more else None
    geometry = Geometry(b, call, cache, form, S, T)
    biases = geometry.plain() if mask is None else geometry.cut(mask)
    keys, values = (cache.past_key, new_key), (cache.past_value, new_value)

    q = call.q if call.attention.rank == 4 else split_heads(b, call.q, call.Hq, call.D, name="q_heads")
    query = form.query(scale_query(b, call, q))
    scores = []
    for k, bias in zip(keys, biases, strict=True):
        capped = softcap(b, call, transposed_scores_of(b, call, form, query, k))
        scores.append(capped if bias is None else b.op("Add", capped, bias, name="scores_biased"))
    weights = softmax(b, call, b.op("Concat", *scores, axis=-1, name="all_scores"))
    halves = zip(_cut_columns(b, weights, T), values, strict=True)
    sums = [weighted_values(b, call, form, half, v) for half, v in halves]
    y = form.restore(b.op("Add", *sums, name="summed_values"), call.Dv)
    # Without a mask no query is fully masked: it attends at least to itself.
    y = zero_masked_queries(b, call, attending_queries(b, call, mask), y)
    return as_input_rank(b, call, y)


def _cut_columns(b: NodeBuilder, x: ir.Value, T: Size) -> tuple[ir.Value, ir.Value]:
    """The key columns of the past and of the new tokens: slices, as T may be dynamic."""
    cut, last = b.as_tensor(T), b.ints(-1)
    past = b.op("Slice", x, b.ints(0), cut, last, name="of_past")
    return past, b.op("Slice", x, cut, b.ints(_TO_THE_END), last, name="of_new")


class Geometry(NamedTuple):
    """The bias on the scores of the past and of the S new tokens, for a cache of T entries."""

    b: NodeBuilder
    call: AttentionCall
    cache: CachedAttention
    form: GroupForm
    S: Size
    T: Size

    def plain(self) -> tuple[ir.Value | None, ir.Value | None]:
        """Mask entries that are not valid yet, and the future among the new tokens."""
        b, past, new = self.b, None, None
        if self.cache.starts is not None:
            past = self._bias(self._valid(self.cache.starts), self.T, one_row=True)
        if self.call.attention.is_causal and self.call.attention.S != 1:
            key, query = (positions_along(b, self.S, axis=axis) for axis in (3, 2))
            visible = b.op("Less", key, b.op("Add", query, b.ints(1)))
            new = self._bias(visible, self.S, one_row=False)
        return past, new

    def cut(self, mask: Mask) -> tuple[ir.Value, ir.Value]:
        """Split a mask over all keys into those of the past and of the new tokens."""
        b, call, starts = self.b, self.call, self.cache.starts
        bias = bias_of(b, call, mask, in_score_type=True)
        if starts is None:
            # Laid out before the split: with an empty past, a reshape could not infer its size.
            laid_out = self.form.bias(mask, bias, self.S, key_length(b, call))
            return _cut_columns(b, laid_out, self.T)
        hidden = b.constant(NEG_INF, call.dtype)
        past = b.op("Where", self._valid(starts), bias, hidden, name="bias_past")
        # The new entries are at another position in each batch element: their columns are gathered.
        columns = b.op("Add", b.reshape(starts, -1, 1, 1, 1), positions_along(b, self.S, axis=3))
        sizes: tuple[Size, ...] = (b.size(call.q, 0), mask.heads, self.S, 1)
        spread, columns = (b.expand(x, *sizes) for x in (bias, columns))
        new = b.op("GatherElements", spread, columns, axis=3, name="bias_new")
        every_row = replace(mask, one_row=False)
        return (
            self.form.bias(mask, past, self.S, self.T),
            self.form.bias(every_row, new, self.S, self.S),
        )

    def _bias(self, visible: ir.Value, columns: Size, *, one_row: bool) -> ir.Value:
        mask = Mask(visible=visible, additive=None, heads=1, one_row=one_row)
        numbers = bias_of(self.b, self.call, mask)
        return self.form.bias(mask, numbers, self.S, columns)

    def _valid(self, starts: ir.Value) -> ir.Value:
        """`[B, 1, 1, T]`, True for the entries that were valid before the call."""
        b = self.b
        return b.op("Less", positions_along(b, self.T, axis=3), b.reshape(starts, -1, 1, 1, 1))
