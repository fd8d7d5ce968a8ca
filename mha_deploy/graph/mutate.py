"""Mutations of a graph: deliberate mistakes that a validation must catch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import singledispatch
from typing import TypeVar

import ml_dtypes
import numpy as np
import onnx_ir as ir

from mha_deploy.graph import attention_node as an
from mha_deploy.graph.attention_node import K, Q, V, heads_of, is_attention, read_attention
from mha_deploy.graph.ir import (
    NodeBuilder,
    constant,
    constant_ints,
    constant_number,
    dims,
    graph_of_node,
    input_at,
    is_op,
    made_by,
    new_initializer,
    perm,
    rank,
)
from mha_deploy.graph.roles import CARRIES, QUANTIZERS
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.model.spec import ModelSpec

# -- The attention that is mutated -----------------------------------------------------------------

_T = TypeVar("_T")

# The inputs of TensorScatter and RotaryEmbedding by position.
_UPDATE, _WRITE_INDICES = 1, 2
_POSITIONS = 3


class _DoesNotApply(Exception):
    """The attention is not such that it can have the mistake."""


def _need(*conditions: object) -> None:
    if not all(conditions):
        raise _DoesNotApply


def _known(value: _T | None) -> _T:
    """Something that must be there, or be known."""
    if value is None:
        raise _DoesNotApply
    return value


class _Site:
    """One attention node, and the nodes that are inserted around it."""

    def __init__(self, node: ir.Node) -> None:
        self.node, self.attention = node, read_attention(node)
        self.build, self._edits = NodeBuilder(f"{node.name}/mutation"), 0

    def input(self, position: int, node: ir.Node | None = None) -> ir.Value:
        """An input of the attention, or of another node, which must be there."""
        return _known(input_at(node or self.node, position))

    @property
    def output(self) -> tuple[ir.Value, ir.DataType]:
        """The heads, and their type."""
        value = heads_of(self.node)
        return value, _known(value.dtype)

    def off_by(self, percent: float) -> float:
        """A factor near 1: 4 % in BF16, whose rounding is eight times as coarse, and 0.5 % elsewhere."""
        _need((percent == 4) == (self.output[1] == ir.DataType.BFLOAT16))
        return 1 + percent / 100

    @property
    def heads(self) -> tuple[int, int]:
        """The number of query heads and the size of a value, which must be known."""
        return self.number(self.attention.Hq), self.number(self.attention.Dv)

    @property
    def heads_rank(self) -> int:
        """3 for heads side by side, 4 for an axis of theirs: as with Q, unless the weights are quantized."""
        return self.attention.rank if self.attention.rank and not self.attention.quantizes_weights else 4

    @property
    def length_axis(self) -> int:
        """The axis of the queries and keys."""
        return 1 if self.attention.rank == 3 else 2

    def number(self, size: object, least: int = 1) -> int:
        """A size that must be known, and not too small."""
        if not isinstance(size, int) or size < least:
            raise _DoesNotApply
        return size

    def size(self, value: ir.Value, axis: int) -> ir.Value:
        """The size of an axis, read at run time."""
        return self.build.op("Shape", value, start=axis, end=axis + 1)

    def own(self, position: int) -> tuple[ir.Node, int, int]:
        """Where the keys, the values or the mask of the model itself are read: a node, its input, their axis.

        An attention sink is keys and values of zeros behind those of the model, and columns of the mask: a
        mistake in them is none in the model. The same for keys of zeros that stand in for masked ones.
        """
        node, at = self.node, position
        axis = _known(rank(self.input(at))) - 1 if position == an.MASK else self.length_axis
        reader = node, at, axis
        while (before := input_at(node, at)) is not None and (maker := before.producer()) is not None:
            first = input_at(maker, 0)
            if is_op(maker, "Transpose") and rank(first) is not None:
                axis = perm(maker)[axis]
            elif is_op(maker, "Expand") and rank(first) is not None and rank(before) is not None:
                axis += len(dims(first)) - len(dims(before))
            elif _appends(maker, axis, position):
                reader = maker, 0, axis
            elif not is_op(maker, "Cast", "Identity", *QUANTIZERS):
                break
            if not 0 <= axis < (rank(first) or 0):
                break
            node, at = maker, 0
        return reader

    @property
    def has_sink(self) -> bool:
        """Whether keys of zeros stand behind those of the model."""
        return self.own(K)[0] is not self.node

    def scatter(self, position: int) -> ir.Node:
        """The node that updates the preallocated cache that an input reads, which must be there."""
        reader, at, _ = self.own(position)
        return _known(made_by(input_at(reader, at), "TensorScatter"))

    def new_entries(self, position: int) -> ir.Value | None:
        """The new keys or values: the input itself, or the update of a preallocated cache."""
        reader, at, _ = self.own(position)
        value = input_at(reader, at)
        if (scatter := made_by(value, "TensorScatter")) is not None:
            value = scatter.inputs[_UPDATE]
            while (layout := made_by(value, "Transpose", "Reshape")) is not None:
                value = layout.inputs[0]
        return value

    def key_rotation(self) -> ir.Node:
        """The rotary embedding of the new keys, which must be there."""
        return _known(made_by(self.new_entries(K), "RotaryEmbedding"))

    def feed(self, position: int, value: ir.Value, node: ir.Node | None = None) -> None:
        """Let the attention, or another node, read what was built instead of one of its inputs."""
        node = node or self.node
        old = input_at(node, position)
        value.type = old.type if old is not None else ir.TensorType(ir.DataType.BOOL)
        value.shape = old.shape if old is not None else None
        graph_of_node(node).insert_before(node, self.build.nodes)
        if node is self.node and position == V and self.attention.quantizes_weights and old is not None:
            for use in old.uses():  # the values come to their matmul by another path
                if use.node is not node and use.node not in self.build.nodes:
                    use.node.replace_input_with(use.idx, value)
        if position >= len(node.inputs):
            node.resize_inputs(position + 1)
        node.replace_input_with(position, value)
        self._edits += 1
        self.build = NodeBuilder(f"{self.node.name}/mutation_{self._edits}")

    def follow(self, wrong: ir.Value) -> None:
        """Let what was built from the heads replace them."""
        output, build = heads_of(self.node), self.build
        takers = [(new, at) for new in build.nodes for at, value in enumerate(new.inputs) if value is output]
        wrong.type, wrong.shape = output.type, output.shape
        # Who asks for the heads by name, as a judge of every attention does, gets the wrong ones.
        wrong.name, output.name = output.name, f"{output.name}_before"
        output.replace_all_uses_with(wrong, replace_graph_outputs=True)
        for new, at in takers:
            new.replace_input_with(at, output)
        graph_of_node(self.node).insert_after(output.producer() or self.node, build.nodes)

    def one_less(self, value: ir.Value) -> ir.Value:
        """Integers that are one too small, but not below 0."""
        return self.build.op("Max", self.build.op("Sub", value, self.build.ints(1)), self.build.ints(0))

    def feed_shifted(self, position: int, axis: int, node: ir.Node | None = None) -> None:
        """Shift an input by one along an axis, with its first element twice."""
        build, value = self.build, self.input(position, node)
        axes, first = build.ints(axis), build.ints(0)
        head = build.op("Slice", value, first, build.ints(1), axes)
        tail = build.op("Slice", value, first, build.ints(-1), axes)
        self.feed(position, build.op("Concat", head, tail, axis=axis), node)

    def feed_changed_last(
        self, node: ir.Node, position: int, axis: int, change: Callable[[ir.Value], ir.Value]
    ) -> None:
        """Let a node read an input whose last element along an axis is changed."""
        build, value = self.build, self.input(position, node)
        axes, last = build.ints(axis), build.ints(-1)
        before = build.op("Slice", value, build.ints(0), last, axes)
        after = build.op("Slice", value, last, build.ints(np.iinfo(np.int64).max), axes)
        self.feed(position, build.op("Concat", before, change(after), axis=axis), node)

    def feed_reordered(self, position: int, order: list[int]) -> None:
        """Let the attention read the heads of an input in another order."""
        size = self.number(self.attention.Dv if position == V else self.attention.D)
        axis = 1
        if self.attention.rank == 3:  # the heads lie side by side
            axis, order = 2, [head * size + i for head in order for i in range(size)]
        value = self.input(position)
        self.feed(position, self.build.op("Gather", value, self.build.ints(*order), axis=axis))

    def scaled_where(
        self, chosen: ir.Value, axis: int, value: ir.Value, factor: float, rank: int | None = None
    ) -> ir.Value:
        """A value times a factor, where a condition holds along an axis."""
        numbers = [self.build.constant(number, _known(value.dtype)) for number in (factor, 1.0)]
        others = (each for each in range(rank or self.attention.rank or 4) if each != axis)
        factors = self.build.unsqueeze(self.build.op("Where", chosen, *numbers), *others)
        return self.build.op("Mul", value, factors)


def _appends(node: ir.Node, axis: int, position: int) -> bool:
    """Whether a node appends to its first input what is not the model's: zeros, or columns of a mask."""
    first = input_at(node, 0)
    if is_op(node, "Concat") and first is not None:
        is_along = node.attributes.get_int("axis", 0) in (axis, axis - (rank(first) or 0))
        # Values stand there twice where masked keys have others of zeros in their place.
        return is_along and all(
            position == an.MASK or (position == V and other is first) or _is_zeros(other)
            for other in node.inputs[1:]
        )
    pads, count = constant_ints(node, 1), rank(first)
    if not is_op(node, "Pad") or pads is None or count is None or input_at(node, 3) is not None:
        return False
    is_zero = input_at(node, 2) is None or constant_number(input_at(node, 2)) == 0.0
    is_zero = is_zero and node.attributes.get_string("mode", "constant") == "constant"
    padded = [at for at, number in enumerate(pads) if number]
    return is_zero and padded == [count + axis] and pads[count + axis] > 0


def _is_zeros(value: ir.Value | None) -> bool:
    """Whether a value is certainly all zeros."""
    while (node := made_by(value, "Cast", *CARRIES)) is not None:
        if is_op(node, "Concat"):
            return all(map(_is_zeros, node.inputs))
        value = input_at(node, 0)
    if (node := made_by(value, "ConstantOfShape")) is not None:
        fill = node.attributes.get_tensor("value", None)
        return fill is None or not fill.numpy().any()
    tensor = constant(value)
    return tensor is not None and not tensor.numpy().any()


# -- Scores, masks and causality -------------------------------------------------------------------


def _scale(site: _Site, factor: float | None = None) -> None:
    """The scores are scaled by another factor; by none at all where it is not given."""
    scale = site.attention.softmax_scale
    wrong = 1.0 if factor is None else (scale or 0.0) * factor
    _need(scale is not None and scale != wrong)
    site.node.attributes["scale"] = ir.AttrFloat32("scale", wrong)


def _softcap_dropped(site: _Site) -> None:
    _need(site.attention.softcap > 0, site.node.attributes.pop("softcap", None))


def _mask_dropped(site: _Site) -> None:
    """Every query attends to the masked keys."""
    _need(site.attention.mask != "none")
    # Zeros hide nothing: a sink whose score is zero, behind keys of which none is masked.
    _need(site.attention.mask == "bool" or not _is_zeros(site.input(an.MASK)))
    site.node.replace_input_with(an.MASK, None)


def _mask_off_by_one(site: _Site) -> None:
    """The mask is shifted by a key: every query attends to the first one that it should not."""
    node, at, axis = site.node, an.MASK, _known(rank(site.input(an.MASK))) - 1
    if site.attention.mask != "bool":
        # With a sink, a mask is a number even where the model has a boolean one.
        _need(site.has_sink)
        node, at, axis = site.own(an.MASK)
        _need(_chooses_constants(input_at(node, at)))
    site.feed_shifted(at, axis, node)


def _chooses_constants(mask: ir.Value | None) -> bool:
    """Whether the numbers of a mask are constants, of which boolean masks choose one."""
    while (node := made_by(mask, "Cast", "Identity", "Expand")) is not None:
        mask = input_at(node, 0)
    where = made_by(mask, "Where")
    return where is not None and all(
        constant_number(each) is not None or _chooses_constants(each) for each in where.inputs[1:]
    )


def _causal_dropped(site: _Site) -> None:
    """Every query attends to later keys."""
    _need(site.attention.is_causal)
    site.node.attributes["is_causal"] = ir.AttrInt64("is_causal", 0)


def _other_diagonal(site: _Site, ahead: int, after_past: bool = True, only_query: int | None = None) -> None:
    """Write causality as a mask with another diagonal: `ahead` keys later, and after the past or not.

    `only_query` is the one query with that diagonal, counted from the end.
    """
    node, build = site.node, site.build
    _need(after_past or site.attention.has_past or site.attention.has_nonpad_kv_seqlen)
    _causal_dropped(site)
    q, mask = site.input(Q), input_at(node, an.MASK)
    S, T = (site.size(value, site.length_axis) for value in (q, site.input(K)))
    past, ends = input_at(node, an.PAST_KEY), input_at(node, an.NONPAD_KV_SEQLEN)
    start = None  # the position of the first query of every batch element
    if past is not None:
        start = site.size(past, 2)
        T = build.op("Add", start, T)
    elif ends is not None:
        start = build.op("Sub", ends, S)
    further = build.ints(ahead)
    if only_query is not None:
        is_it = build.op("Equal", build.count_up(S), build.op("Sub", S, build.ints(only_query)))
        further = build.unsqueeze(build.op("Where", is_it, further, build.ints(0)), 1)
    queries = build.op("Add", build.unsqueeze(build.count_up(S), 1), further)
    if after_past and start is not None:
        queries = build.op("Add", build.reshape(start, -1, 1, 1, 1), queries)
    else:
        queries = build.unsqueeze(queries, 0, 1)
    visible = build.op("LessOrEqual", build.count_up(T), queries)
    if mask is not None and site.attention.mask == "bool":
        visible = build.op("And", visible, mask)
    elif mask is not None:
        visible = build.op("Where", visible, mask, build.constant(float("-inf"), _known(q.dtype)))
    site.feed(an.MASK, visible)


# -- Keys, values and caches -----------------------------------------------------------------------


def _cache_off_by_one(site: _Site) -> None:
    """The past is shifted by one entry, or the new entries are written one position early."""
    for position, past in ((K, an.PAST_KEY), (V, an.PAST_VALUE)):
        if site.attention.has_past:
            site.feed_shifted(past, axis=2)
        else:
            scatter = site.scatter(position)
            site.feed(_WRITE_INDICES, site.one_less(site.input(_WRITE_INDICES, scatter)), scatter)


def _newest_entry_zero(site: _Site) -> None:
    """The last of the new keys and values is zero."""
    for position in (K, V):
        node, at, axis = site.own(position)
        if (scatter := made_by(input_at(node, at), "TensorScatter")) is not None:
            node, at, axis = scatter, _UPDATE, _known(rank(site.input(_UPDATE, scatter))) // 2
        site.feed_changed_last(node, at, axis, lambda last: site.build.op("Sub", last, last))


def _entry_late(site: _Site) -> None:
    """The new entries of a preallocated cache are written one slot late, where there is room."""
    for position in (K, V):
        scatter, build = site.scatter(position), site.build
        T, S = (site.size(site.input(at, scatter), 2) for at in (0, _UPDATE))
        later = build.op("Add", site.input(_WRITE_INDICES, scatter), build.ints(1))
        site.feed(_WRITE_INDICES, build.op("Min", later, build.op("Sub", T, S)), scatter)


def _entries_stale(site: _Site) -> None:
    """Attention reads the preallocated cache as it was before the new entries were written."""
    for position in (K, V):
        node, at, _ = site.own(position)
        node.replace_input_with(at, site.input(0, site.scatter(position)))


def _values_beyond_a_length(site: _Site) -> None:
    """The values of the last quarter of the keys are 5 % too large."""
    node, at, axis = site.own(V)
    build, value = site.build, site.input(at, node)
    T = site.size(value, axis)
    first = build.op("Div", build.op("Mul", T, build.ints(3)), build.ints(4))
    late = build.op("GreaterOrEqual", build.count_up(T), first)
    site.feed(at, site.scaled_where(late, axis, value, 1.05, rank(value)), node)


def _bias_dropped(site: _Site) -> None:
    """The values lose their bias, and packed projections all of it.

    Without a key bias alone nothing changes: softmax cancels it.
    """
    value = site.new_entries(V)
    value = _known(input_at(made_by(value, "Split"), 0) or value)
    add = _known(made_by(value, "Add"))
    value.replace_all_uses_with(next(x for x in add.inputs if x is not None and not x.is_initializer()))


# -- Heads and batch elements ----------------------------------------------------------------------


def _last_batch_element_off(site: _Site, factor: float) -> None:
    """The heads of the last batch element are too large by a factor."""
    build, (output, _) = site.build, site.output
    B = site.size(output, 0)
    is_last = build.op("Equal", build.count_up(B), build.op("Sub", B, build.ints(1)))
    site.follow(site.scaled_where(is_last, 0, output, factor, site.heads_rank))


def _head_zero(site: _Site) -> None:
    """The first head is zero."""
    (output, dtype), (Hq, Dv) = site.output, site.heads
    keeps = np.arange(Hq) > 0
    kept = np.repeat(keeps, Dv) if site.heads_rank == 3 else keeps[:, None, None]
    site.follow(site.build.op("Mul", output, site.build.constant(kept.astype(float).tolist(), dtype)))


def _kv_heads_swapped(site: _Site) -> None:
    """The first two key/value heads are swapped."""
    Hkv = site.number(site.attention.Hkv, least=2)
    for position in (K, V):
        site.feed_reordered(position, [1, 0, *range(2, Hkv)])


def _groups_interleaved(site: _Site) -> None:
    """Query heads share key/value heads in an interleaved order, instead of adjacent ones sharing one."""
    Hkv, group = (site.number(size, least=2) for size in (site.attention.Hkv, site.attention.group))
    site.feed_reordered(Q, np.arange(Hkv * group).reshape(Hkv, group).T.reshape(-1).tolist())


def _heads_transposed(site: _Site) -> None:
    """The output is laid out D by Hq, not Hq by D."""
    build, (output, _), (Hq, Dv) = site.build, site.output, site.heads
    _need(Hq > 1)
    if site.heads_rank == 4:
        transposed = build.reshape(build.transpose(output, 0, 2, 3, 1), 0, 0, Hq, Dv)
        site.follow(build.transpose(transposed, 0, 2, 1, 3))
    else:
        order = np.arange(Hq * Dv).reshape(Hq, Dv).T.reshape(-1)
        site.follow(build.op("Gather", output, build.ints(*order.tolist()), axis=2))


def _not_a_number(site: _Site) -> None:
    """One channel of the heads is not a number."""
    build, (output, dtype), (Hq, Dv) = site.build, site.output, site.heads
    width = Hq * Dv if site.heads_rank == 3 else Dv
    broken = build.constant([1, *[0] * (width - 1)], ir.DataType.BOOL)
    site.follow(build.op("Where", broken, build.constant(float("nan"), dtype), output))


# -- Rotary embedding ------------------------------------------------------------------------------


def _rotary_dropped(site: _Site) -> None:
    """The keys are not rotated."""
    rotary = site.key_rotation()
    rotary.outputs[0].replace_all_uses_with(site.input(0, rotary))


def _rotary_off_by_one(site: _Site, *, only_last: bool = False) -> None:
    """New keys are rotated by the position before; rotating the queries alike would change nothing."""
    rotary = site.key_rotation()
    positions = site.input(_POSITIONS, rotary)
    if only_last:
        site.feed_changed_last(rotary, _POSITIONS, _known(rank(positions)) - 1, site.one_less)
    else:
        site.feed(_POSITIONS, site.one_less(positions), rotary)


# -- Q/DQ: scales, grids and pairs -----------------------------------------------------------------

_OFF = 1.04  # a scale that is wrong at one end of a pair
_CLIPPED = 0.6  # of the calibrated range; no power of two, by which FP8 has the same grid
_DIFFERENT = 0.02  # scales that differ by less, up to a power of two, have nearly the same grid


class _Pair:
    """A tensor that is quantized and dequantized with constant scales: the two nodes."""

    def __init__(self, up: ir.Node, graph: ir.Graph) -> None:
        self.up, self.down = up, _known(made_by(input_at(up, 0), "QuantizeLinear"))
        self.graph, self.value = graph, _known(input_at(self.down, 0))
        self.scale = _known(constant(input_at(up, 1))).numpy()
        _need(np.array_equal(self.scale, _known(constant(input_at(self.down, 1))).numpy()))

    def rescale(self, scale: np.ndarray, *nodes: ir.Node) -> None:
        """Let nodes of the pair have another scale."""
        name = f"{self.up.name}/mutation"
        wrong = new_initializer(self.graph, name, np.asarray(scale).astype(self.scale.dtype))
        for node in nodes:
            node.replace_input_with(1, wrong)


def _scale_of_another(pair: _Pair, others: list[_Pair]) -> None:
    """The pair has the scale of another tensor."""
    for other in others:
        if other.scale.shape == pair.scale.shape == ():
            octaves = np.log2(float(other.scale) / float(pair.scale))
            if abs(octaves - round(octaves)) > _DIFFERENT:
                return pair.rescale(other.scale, pair.up, pair.down)
    raise _DoesNotApply


def _unquantized(pair: _Pair) -> None:
    """The tensor is read as it was before it was quantized."""
    _need(pair.value.dtype == pair.up.outputs[0].dtype)
    pair.up.outputs[0].replace_all_uses_with(pair.value)


def _as_e5m2(pair: _Pair) -> None:
    """The tensor is rounded to two bits of fraction, not to three."""
    zero, wide = _known(constant(input_at(pair.down, 2))), ir.DataType.FLOAT8E5M2
    _need(zero.dtype == ir.DataType.FLOAT8E4M3FN)
    numbers = zero.numpy().astype(np.float32).astype(ml_dtypes.float8_e5m2)
    wrong = new_initializer(pair.graph, f"{pair.up.name}/mutation_e5m2", numbers, wide)
    for node in (pair.down, pair.up):
        node.replace_input_with(2, wrong)
    pair.down.outputs[0].type = ir.TensorType(wide)


_OF_PAIRS: dict[str, Callable[[_Pair, list[_Pair]], None]] = {
    "quantization scale off by 4 %": lambda pair, others: pair.rescale(_OFF * pair.scale, pair.up),
    "quantization scale of another tensor": _scale_of_another,
    "calibration clipped": lambda pair, others: pair.rescale(_CLIPPED * pair.scale, pair.up, pair.down),
    "Q/DQ missing": lambda pair, others: _unquantized(pair),
    "E5M2 for E4M3": lambda pair, others: _as_e5m2(pair),
}


def mutated_pairs(model: ir.Model, mutation: str) -> Iterator[tuple[str, ir.Model]]:
    """Copies of the model with one of `OF_QUANTIZATION`, each in another pair of Q/DQ, and its name."""
    for index in range(len(_pairs(model))):
        copy = model.clone()
        pairs = _pairs(copy)
        with suppress(_DoesNotApply):
            _OF_PAIRS[mutation](pairs[index], pairs)
            yield str(pairs[index].value.name), copy


def _pairs(model: ir.Model) -> list[_Pair]:
    found = []
    for node in model.graph:
        with suppress(_DoesNotApply):
            _need(is_op(node, "DequantizeLinear"))
            found.append(_Pair(node, model.graph))
    return found


# -- The mutations by name, and those without effect -----------------------------------------------

_MUTATIONS: dict[str, Callable[[_Site], None]] = {
    "scale off by 0.5 %": lambda site: _scale(site, site.off_by(0.5)),
    "scale off by 4 %": lambda site: _scale(site, site.off_by(4)),
    "scale missing": _scale,
    "softcap dropped": _softcap_dropped,
    "mask dropped": _mask_dropped,
    "mask off by one": _mask_off_by_one,
    "causal dropped": _causal_dropped,
    "causal off by one": lambda site: _other_diagonal(site, ahead=1),
    "causal leak in one query": lambda site: _other_diagonal(site, ahead=1, only_query=2),
    # As if the cache were empty, the diagonal starts at its first key.
    "past forgotten": lambda site: _other_diagonal(site, ahead=0, after_past=False),
    "cache off by one": _cache_off_by_one,
    "newest entry zero": _newest_entry_zero,
    "entry one slot late": _entry_late,
    "stale entries": _entries_stale,
    "values beyond a length": _values_beyond_a_length,
    "last batch element off by 0.5 %": lambda site: _last_batch_element_off(site, site.off_by(0.5)),
    "last batch element off by 4 %": lambda site: _last_batch_element_off(site, site.off_by(4)),
    "one head zero": _head_zero,
    "KV heads swapped": _kv_heads_swapped,
    "groups interleaved": _groups_interleaved,
    "heads transposed": _heads_transposed,
    "rotary dropped": _rotary_dropped,
    "rotary off by one": _rotary_off_by_one,
    "rotary off by one on the last key": lambda site: _rotary_off_by_one(site, only_last=True),
    "bias dropped": _bias_dropped,
    "NaN": _not_a_number,
}

_OF_SCALE = "scale off by 0.5 %", "scale off by 4 %", "scale missing"
_OF_CAUSALITY = "causal dropped", "causal off by one", "causal leak in one query"
_OF_ROTARY = "rotary dropped", "rotary off by one", "rotary off by one on the last key"
IN_CACHES = "past forgotten", "cache off by one", "newest entry zero", "entry one slot late", "stale entries"
"""The mutations that show while tokens are decoded one by one."""

OF_QUANTIZATION = tuple(_OF_PAIRS)
"""The mutations of Q/DQ."""


def mutations() -> list[str]:
    """The names of all mutations."""
    return [*_MUTATIONS, *_OF_PAIRS]


def mutated(model: ir.Model, mutation: str, spec: ModelSpec | None = None) -> ir.Model | None:
    """A copy of the model with one of `mutations()`; None where it does not apply.

    With the spec of a catalog layer, None also for a mutation that has no effect within its axes.
    """
    if spec is not None and mutation in without_effect(spec):
        return None
    if mutation in _OF_PAIRS:
        return next((wrong for _, wrong in mutated_pairs(model, mutation)), None)
    copy = model.clone()
    node = next((node for node in copy.graph if is_attention(node)), None)
    try:
        _MUTATIONS[mutation](_Site(_known(node)))
    except _DoesNotApply:
        return None
    return copy


@singledispatch
def without_effect(spec: ModelSpec) -> frozenset[str]:
    """The names of the mutations that leave a model correct at every size that its axes allow."""
    return frozenset()  # of a module that is not known


@without_effect.register(AttentionSpec)
def _without_effect_on(spec: AttentionSpec) -> frozenset[str]:
    most, least = spec.sizes("max"), spec.sizes("min")
    # The most new tokens of one call, tokens before them, keys, and keys that one query attends to.
    new, past, keys = most["S"], 0, most["T"] if spec.is_cross else most["S"]
    if spec.cache == "dynamic":
        past, keys = most["P"], most["P"] + new
    if spec.cache == "preallocated":
        past, keys = most["T"] - least["S"], most["T"]
    visible = min(spec.window or keys, keys)
    # A padding mask may mask a query fully; the mask of a window is causal, too.
    mask_hides = new > 1 or visible < keys
    if spec.mask in ("padding", "additive"):
        mask_hides = spec.mask == "padding" or visible > 1
    in_rotated = keys > 1 and (visible > 1 or spec.cache != "none")
    needs = {
        # The softmax of one score is 1, whatever the score.
        **dict.fromkeys((*_OF_SCALE, "softcap dropped", "groups interleaved"), visible > 1),
        "mask dropped": mask_hides,
        "mask off by one": keys > 1 and mask_hides,
        # The last token of a call has no later key.
        **dict.fromkeys(_OF_CAUSALITY, new > 1),
        # Where every call fills the cache, nothing is later or was there before.
        "entry one slot late": past > 0,
        "past forgotten": past > 0,
        "cache off by one": past > (1 if spec.cache == "dynamic" else 0),
        # Keys are in the cache as well as in the scores. At position 0 nothing is rotated.
        **dict.fromkeys(_OF_ROTARY, in_rotated),
    }
    return frozenset(mutation for mutation, shows in needs.items() if not shows)
