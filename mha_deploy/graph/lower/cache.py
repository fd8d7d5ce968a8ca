"""KV caches: recognise them in a graph, and write them for runtimes without a cache update."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from mha_deploy.graph import attention_node as an
from mha_deploy.graph.attention_node import Y, is_attention
from mha_deploy.graph.ir import (
    Dim,
    NodeBuilder,
    Size,
    constant,
    dim,
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
from mha_deploy.graph.lower.call import (
    AttentionCall,
    as_input_rank,
    copy_of,
    key_length,
    query_length,
    read_call,
    split_heads,
    take_mask_before_expand,
)
from mha_deploy.graph.lower.groups import (
    GroupForm,
    group_form,
    scale_query,
    softcap,
    softmax,
    turned_scores_of,
    weighted_values,
)
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
from mha_deploy.graph.lower.operators import Obstacle

if TYPE_CHECKING:
    from mha_deploy.graph.lower.to_primitives import PrimitivesOptions


# -- Which form the cache has in a lowered model: what goes in, what comes out, and who writes  ----

ROWS_NOTE = "mha_deploy.cache_rows"
"""Key of the note of a model whose outputs are rows: JSON, from each output to its cache."""

IN_PLACE_NOTE = "mha_deploy.cache_in_place"
"""Key of the note of a model that writes caches in place: JSON, from each output to its cache."""

TOTAL_LENGTH = "total_length"
"""The input that ONNX Runtime's `GroupQueryAttention` needs besides: an int32 scalar.

T for single tokens, so that one captured call serves every step, and S for a prompt into an empty cache.
Several tokens behind a past are taken for a single batch row only, with T again. S behind a past is taken,
too, and wrong: the operator then writes a first prompt over the cache.
"""


@dataclass(frozen=True, kw_only=True)
class CacheForm:
    """How the cache of a lowered model is to be served.

    Args:
        rows: From each output that holds new rows to the input they belong into; empty where the outputs
            are the caches themselves, or where there is none.
        in_place: From each output that is a whole cache to the input whose memory it is to have.
        takes_total_length: Whether there is an input `total_length`.
    """

    rows: dict[str, str] = field(default_factory=dict)
    in_place: dict[str, str] = field(default_factory=dict)
    takes_total_length: bool = False


def cache_form(model: ir.Model) -> CacheForm:
    """Read the form from a lowered model."""
    rows, in_place = (json.loads(model.metadata_props.get(note, "{}")) for note in (ROWS_NOTE, IN_PLACE_NOTE))
    inputs = {value.name for value in model.graph.inputs}
    return CacheForm(rows=rows, in_place=in_place, takes_total_length=TOTAL_LENGTH in inputs)


def note_rows(model: ir.Model, rows: dict[str, str]) -> None:
    """Say in the model that outputs hold rows, besides those it says already."""
    model.metadata_props[ROWS_NOTE] = json.dumps({**cache_form(model).rows, **rows})


def note_in_place(model: ir.Model, caches: dict[str, str]) -> None:
    """Say in the model which outputs are caches written in place, besides those it says already."""
    model.metadata_props[IN_PLACE_NOTE] = json.dumps({**cache_form(model).in_place, **caches})


def rows_name(output: str) -> str:
    """The name of an output of rows, from that of the output of the whole cache."""
    if "_cache_out" in output:
        return output.replace("_cache_out", "_rows")
    return f"{output.removeprefix('present_')}_rows"


# -- An attention with its cache around it, recognised as a whole ----------------------------------

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
    return [made_by(input_at(node, at), scatter.SCATTER) for at in (an.K, an.V)]


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
    S = dim(new_key, 2)
    if _origin(starts[0]) is not _origin(starts[1]) or not _ends_behind(node, starts[0], S):
        return Obstacle("cache whose valid rows do not end with the new ones", key_update.name)
    if not all(same_size(S, dim(value, 2)) for value in (new_value, input_at(node, an.Q))):
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
    add = made_by(_origin(input_at(node, an.NONPAD_KV_SEQLEN)), "Add")
    if add is None:
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
    tensor = constant(value)
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
    return [dim(x, axis) for axis in range(len(x.shape))[start:end]]


# -- What dialects that serve a cache in a form of their own share: finding the attentions, and ----

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
        replace_value(old, new)
    replace_node(call.node, b, {Y: y}, keep=states)
    for update in cache.updates:
        model.graph.remove(update, safe=True)
    import_domains(model, b)


# -- Attention that reads a cache where it is and gives out only the new rows ----------------------

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


# -- the matmuls --------------------------------------------------------------------------------


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
    query = form.query(b, call, scale_query(b, call, q))
    scores = [_part_scores(b, call, form, query, part) for part in (past, new)]
    weights = softmax(b, call, b.op("Concat", *scores, axis=-1, name="all_scores"))
    halves = zip(_cut_columns(b, weights, T), (past, new), strict=True)
    sums = [weighted_values(b, call, form, half, part.v) for half, part in halves]
    y = form.restore(b, call, b.op("Add", *sums, name="summed_values"), call.Dv)
    # Without a mask nobody is without keys: a query sees at least itself.
    y = zero_closed_rows(b, call, rows_to_keep(b, call, mask), y)
    return as_input_rank(b, call, y)


def _part_scores(
    b: NodeBuilder,
    call: AttentionCall,
    form: GroupForm,
    query: ir.Value,
    part: Part,
) -> ir.Value:
    """The scores of one part, bounded, and low where a key is hidden."""
    scores = softcap(b, call, turned_scores_of(b, call, form, query, part.k))
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
