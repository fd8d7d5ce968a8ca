"""Attention as one node of the plugin: operands and caches in place, masks as key lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, product
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass

from mha_deploy.graph import plugin_node as plugin
from mha_deploy.graph.attention_node import (
    PRESENT_KEY,
    PRESENT_VALUE,
    K,
    Q,
    QuantizedAttention,
    V,
    Y,
    is_attention,
)
from mha_deploy.graph.ir import (
    FP8,
    HALVES,
    INTEGERS,
    Dim,
    NodeBuilder,
    Size,
    constant,
    constant_ints,
    constant_number,
    counts_up,
    dim,
    dims,
    graph_of_node,
    infer_shapes,
    input_at,
    input_with,
    is_op,
    made_by,
    new_initializer,
    nodes_behind,
    origin,
    part_of,
    perm,
    prefix_within,
    prefixes_in,
    rank,
    reference_evaluator,
    replace_node,
    replace_value,
    same_size,
)
from mha_deploy.graph.lower import cache as kv
from mha_deploy.graph.lower import masks
from mha_deploy.graph.lower.call import AttentionCall, LoweringError, OperatorRules, Outputs, split_heads
from mha_deploy.graph.lower.operators import (
    RMS_NORM,
    ROTARY,
    Rotary,
    read_rotary,
    rms_norm_to_primitives,
    rotary_to_primitives,
)
from mha_deploy.graph.lower.to_primitives import OPERATOR_RULES as PRIMITIVE_RULES
from mha_deploy.graph.quantize import Fp8Gemm, read_fp8_gemm
from mha_deploy.graph.roles import IN_ORDER, MOVES

# -- What the node cannot express, or has no kernels for -------------------------------------------


def refuse_what_is_missing(call: AttentionCall) -> None:
    """Refuse what the node cannot express."""
    attention, other = call.attention, "dialect primitives"
    if attention.softcap:
        raise call.refuse("softcap", got=attention.softcap, hint=other)
    if attention.has_qk_output:
        mode = f"qk_matmul_output_mode={attention.qk_output_mode}"
        raise call.refuse("attention weights as output", got=mode, hint=other)
    # A softmax in FP32 is at least as precise as one that was requested in FP16 or BF16.
    if attention.softmax_precision == "fp64":
        raise call.refuse("fp64", got=attention.softmax_precision, hint="export in fp16 or bf16")
    refuse_without_kernel(call)


def refuse_without_kernel(call: AttentionCall) -> None:
    """Refuse types and head sizes for which the plugin has no kernel."""
    if call.attention.dtype not in ("fp16", "bf16"):
        feature = "fp64" if call.attention.dtype == "fp64" else "types other than fp16 and bf16"
        raise call.refuse(feature, got=call.attention.dtype, hint="export in fp16 or bf16")
    for name, size in (("D", call.D), ("Dv", call.Dv)):
        got, other = f"{name}={size}", "dialect primitives"
        if size % 8:
            hint = f"pad the heads in the model, or {other}"
            raise call.refuse("head size that is not a multiple of 8", got=got, hint=hint)
        if size > plugin.LARGEST_HEAD:
            raise call.refuse(f"head size above {plugin.LARGEST_HEAD}", got=got, hint=other)


# -- Where queries, keys and values are in memory, so that the plugin reads them without a copy ----

_HEADS_FIRST = (0, 2, 1, 3)  # [B, L, H, D] to [B, H, L, D]
_PACKED_FIRST = (2, 0, 3, 1, 4)  # [B, L, 3, H, D] to [3, B, H, L, D]


class HeadsPlace(NamedTuple):
    """A tensor of rank 3 or 4, and the offset of the heads on its last axis (0 for rank 4)."""

    tensor: ir.Value
    offset: int

    def length(self, b: NodeBuilder, call: AttentionCall) -> Size:
        """The number of queries or keys.

        From an input of the graph that has this size by name, so that all layers share what is computed from
        it; else from the whole tensor, so that Splits of it become unused.
        """
        axis = 1 if rank(self.tensor) == 3 else 2
        return b.size(*(input_with(graph_of_node(call.node), dim(self.tensor, axis)) or (self.tensor, axis)))


def place_of(value: ir.Value, heads: int, size: int) -> HeadsPlace:
    """The `[B, L, ·]` tensor that a `[B, L, H·D]` or `[B, H, L, D]` input was taken from; else the input."""
    rows = value
    if rank(value) == 4:
        # A model may reshape a packed projection to [B, L, 3, H, D], transpose, and unbind.
        part = _taken_from_first_axis(value)
        packed = None if part is None else _before_transpose(part.tensor, _PACKED_FIRST, heads, size)
        if part is not None and packed is not None:
            count = int(dim(packed, 2) or 0) // (heads * size)
            place = HeadsPlace(packed, part.offset % count * heads * size)
            if _is_aligned(place):
                return place
        before = _before_transpose(value, _HEADS_FIRST, heads, size)
        if before is None:
            return HeadsPlace(value, 0)
        rows = before
    place = HeadsPlace(rows, 0)
    while (whole := _part_from(place.tensor, axis=2)) is not None and rank(whole.tensor) == 3:
        place = HeadsPlace(whole.tensor, place.offset + whole.offset)
    return place if _is_aligned(place) else HeadsPlace(rows, 0)


def _before_transpose(
    value: ir.Value | None, order: tuple[int, ...], heads: int, size: int
) -> ir.Value | None:
    """The `[B, L, ·]` before a Reshape to `[B, L, …, H, D]` and a Transpose; None where there are none."""
    transpose = made_by(value, "Transpose")
    moved = transpose is not None and perm(transpose) == order
    split = made_by(input_at(transpose, 0), "Reshape") if moved else None
    rows = input_at(split, 0)
    if rows is None or split is None or rank(rows) != 3:
        return None
    before, after = dims(rows), dims(split.outputs[0])
    inner = [each for each in after[2:] if isinstance(each, int)]
    if len(after) != len(order) or after[-2:] != (heads, size) or len(inner) != len(after) - 2:
        return None
    # A reshape keeps the number of elements: where one of the two leading sizes is equal, so is the other.
    same = any(same_size(before[at], after[at]) for at in (0, 1))
    return rows if before[2] == math.prod(inner) and same else None


def _part_from(value: ir.Value, *, axis: int) -> HeadsPlace | None:
    """The whole that a Split or Slice takes a part of along this axis, and the offset; else None."""
    part = part_of(value)
    if part is None or part.axis != axis - len(dims(value)):
        return None
    return HeadsPlace(part.source, part.begin)


def _is_aligned(place: HeadsPlace) -> bool:
    width = dims(place.tensor)[-1] if dims(place.tensor) else None
    return isinstance(width, int) and width % plugin.ALIGNED == 0 and place.offset % plugin.ALIGNED == 0


def _taken_from_first_axis(value: ir.Value) -> HeadsPlace | None:
    """The tensor and the index, where a value is one element of its first axis."""
    node = made_by(value, "Gather", "Squeeze")
    whole, index = input_at(node, 0), None if node is None else constant_ints(node, 1)
    if node is None or whole is None or index is None:
        return None
    if node.op_type == "Squeeze":
        return _part_from(whole, axis=0) if index == (0,) and dims(whole)[:1] == (1,) else None
    is_one = rank(node.inputs[1]) == 0 and not node.attributes.get_int("axis", 0)
    return HeadsPlace(whole, index[0]) if is_one else None


# -- Padding masks: key lengths that were compared with positions ----------------------------------

# What is not ≥ is <, and what is not ≤ is >.
_OPPOSITE = {"GreaterOrEqual": "Less", "LessOrEqual": "Greater"}


def prefix_lengths(mask: ir.Value, *, batch: Dim) -> ir.Value | None:
    """The lengths, integers `[B]`, of a mask that is exactly `key < lengths[b]`; None for another mask."""
    condition, inverted = _condition_of(mask)
    node = made_by(condition, "Less", "Greater", *_OPPOSITE)
    kind = None if node is None else _OPPOSITE.get(node.op_type) if inverted else node.op_type
    if node is None or kind not in ("Less", "Greater"):
        return None
    counted, lengths = node.inputs if kind == "Less" else reversed(node.inputs)
    shape = dims(lengths)
    if counted is None or lengths is None or lengths.dtype not in INTEGERS or len(shape) < 2:
        return None
    of_batch = same_size(shape[0], batch) and all(size == 1 for size in shape[1:])
    is_prefix = of_batch and len(shape) >= len(dims(counted)) and counts_up(counted)
    return _one_axis(lengths) if is_prefix else None


def visible_keys(b: NodeBuilder, mask: ir.Value, *, batch: Dim) -> ir.Value | None:
    """A mask that is the same for all queries and heads as int32 `[B, T]`; None for another mask."""
    condition, inverted = _condition_of(mask)
    shape = dims(condition)
    by_key = len(shape) > 1 and same_size(shape[0], batch) and all(size == 1 for size in shape[1:-1])
    if condition is None or condition.dtype != ir.DataType.BOOL or not by_key:
        return None
    keys = b.op("Not", condition) if inverted else condition
    keys = b.cast(keys, ir.DataType.INT32)
    if len(shape) > 2:
        keys = b.op("Squeeze", keys, b.ints(*range(1, len(shape) - 1)), name="key_mask")
    keys.dtype, keys.shape = ir.DataType.INT32, ir.Shape([shape[0], shape[-1]])
    return keys


def _condition_of(mask: ir.Value) -> tuple[ir.Value | None, bool]:
    """What a mask depends on, before it was expanded, and whether keys are masked where that is true."""
    if len(dims(mask)) != 4:
        return None, False  # of another rank, the first axis is not the batch
    condition: ir.Value | None = _before_layout(mask)
    inverted, where = False, made_by(condition, "Where")
    if where is not None:  # 0 and -inf, added to the scores
        numbers = [constant_number(each) for each in where.inputs[1:]]
        if sorted(each if each is not None else math.nan for each in numbers) != [-math.inf, 0.0]:
            return None, False
        condition, inverted = where.inputs[0], numbers[0] != 0.0
    while (negation := made_by(condition, "Not")) is not None:
        condition, inverted = negation.inputs[0], not inverted
    return condition, inverted


def _before_layout(mask: ir.Value) -> ir.Value:
    """A mask before it was reshaped or expanded: `[B, 1 …, T]`, in the same order."""
    value, expanded = mask, True
    while True:
        node = made_by(value, *IN_ORDER, *(["Expand"] if expanded else []))
        source = input_at(node, 0)
        if node is None or source is None:
            return value
        before, after, expanded = dims(source), dims(value), node.op_type == "Expand"
        ends = len(before) > 1 and same_size(before[0], after[0]) and same_size(before[-1], after[-1])
        # Expand counts axes from the last: a shorter mask has no batch.
        same = len(before) == len(after) if expanded else all(size == 1 for size in after[1:-1])
        if not (ends and same and all(size == 1 for size in before[1:-1])):
            return value
        value = source


def _one_axis(lengths: ir.Value) -> ir.Value | None:
    """Lengths before axes of size 1 were added, and before a Cast between integer types."""
    value: ir.Value | None = lengths
    while value is not None and value.dtype in INTEGERS:
        if len(dims(value)) == 1:
            return value
        value = input_at(made_by(value, "Cast", *IN_ORDER), 0)
    return None


# -- The mask as attributes and inputs of the node: diagonal, window, key lengths, bias ------------


class Diagonal(NamedTuple):
    """The attributes `causal`, `left_window` and `right_window` of the node."""

    causal: int = plugin.NONE
    left_window: int = plugin.NO_WINDOW
    right_window: int = plugin.NO_WINDOW


class PluginMask(NamedTuple):
    """Which keys a query attends to.

    `key_lengths` are valid keys of each batch element, int32 `[B]`; `key_mask`, int32 `[B, T]`, is 0 for
    masked keys; `bias` is added to the scores, `[B or 1, Hq or 1, S, T]`. `attending`, `[·, heads, ·, 1]`, is
    False for queries that are fully masked by the bias; the plugin itself handles those of diagonal, lengths
    and key mask. `shifted` is the mask behind a bias that had to be brought into the range of the scores.
    """

    diagonal: Diagonal
    key_lengths: ir.Value | None = None
    key_mask: ir.Value | None = None
    bias: ir.Value | None = None
    attending: ir.Value | None = None
    heads: int = 1
    shifted: masks.Mask | None = None


def read_plugin_mask(b: NodeBuilder, call: AttentionCall, S: Size, T: Size, *, in_cache: bool) -> PluginMask:
    """The mask over T keys, past included; with `in_cache` the plugin derives the key lengths itself."""
    diagonal = diagonal_of(call)
    # cuDNN has no kernel with a bias and a diagonal that ends at the last valid key.
    no_kernel = call.lengths is not None and call.mask is not None
    if diagonal is None or (diagonal.causal == plugin.BOTTOM_RIGHT and no_kernel):
        mask = whole = masks.read_mask(b, call, S, T)
        diagonal, key_lengths = Diagonal(), None
    else:
        lengths, is_alone = None, call.lengths is None and not call.attention.mask_may_be_short
        # In the lower right corner the diagonal would end at the last valid key; in ONNX it ends at the last.
        if call.mask is not None and is_alone and diagonal.causal != plugin.BOTTOM_RIGHT:
            lengths = prefix_lengths(call.mask, batch=call.attention.B)
            # Its kernels skip what the diagonal masks. Without a diagonal a bias is as fast.
            fits = diagonal == Diagonal(plugin.TOP_LEFT) and plugin.takes_key_mask(call.D, float(call.scale))
            if lengths is None and fits:
                key_mask = visible_keys(b, call.mask, batch=call.attention.B)
                if key_mask is not None:
                    return PluginMask(diagonal, key_mask=key_mask)
        mask = masks.input_mask(b, call, T) if lengths is None else None
        if lengths is None and not in_cache:
            lengths = call.lengths
        key_lengths = None if lengths is None else as_int32(b, lengths, name="key_lengths")
        whole = None if mask is None else masks.with_geometry(b, call, mask, S, T)
    if mask is None:
        return PluginMask(diagonal, key_lengths)
    # What overflows is shifted by the largest number of the visible keys.
    shifted = whole if masks.narrows(call, mask) and call.attention.mask != "int" else None
    mask = whole if masks.narrows(call, mask) and whole is not None else mask
    bias = masks.of_each_query(b, call, mask, masks.bias_of(b, call, mask), S, name="bias_of_each_query")
    attending = masks.attending_queries(b, call, whole)
    by_batch = whole is not None and whole.one_row and whole.heads == 1 and diagonal == Diagonal()
    shape = call.attention.mask_dims or ()
    whole_batch = len(shape) == 4 and same_size(shape[0], call.attention.B)
    # A node with a preallocated cache has no key lengths: they follow from `starts`.
    if attending is not None and by_batch and whole_batch and key_lengths is None and not in_cache:
        # All queries of a batch element are masked, or none: without keys the plugin gives zeros. A Where
        # after each attention would read and write the whole output.
        rows = b.reshape(attending, -1)
        keys, none = b.cast(b.as_tensor(T), ir.DataType.INT32), b.constant(0, ir.DataType.INT32)
        key_lengths, attending = b.op("Where", rows, keys, none, name="key_lengths"), None
        key_lengths.dtype, key_lengths.shape = ir.DataType.INT32, ir.Shape([call.attention.B])
    return PluginMask(diagonal, key_lengths, None, bias, attending, mask.heads, shifted)


def diagonal_of(call: AttentionCall) -> Diagonal | None:
    """Causality and window as attributes; None where the plugin aligns them otherwise than ONNX."""
    attention = call.attention
    # A window that ends with the query's own key is causal.
    causal = attention.is_causal or attention.right_window == 0
    if not causal and not attention.has_window:
        return Diagonal()
    left, right = attention.left_window, plugin.NO_WINDOW if causal else attention.right_window
    if call.past_key is None and call.lengths is None:
        return Diagonal(plugin.TOP_LEFT if causal else plugin.NONE, left, right)
    # After a past, or up to the last valid key: the lower right corner, if every query has its own key.
    aligned = call.lengths is not None or call.is_square
    return Diagonal(plugin.BOTTOM_RIGHT, left, right) if causal and aligned else None


def as_int32(b: NodeBuilder, value: ir.Value, *, name: str) -> ir.Value:
    """Integers as int32: those before a cast to int64 where there is one, else a Cast."""
    source = input_at(made_by(value, "Cast"), 0)
    if source is not None and source.dtype == ir.DataType.INT32:
        return source
    narrow = b.cast(value, ir.DataType.INT32, name=name)
    narrow.dtype, narrow.shape = ir.DataType.INT32, value.shape
    return narrow


# -- Rotary embeddings before the attention, which the node computes itself ------------------------


def operator_rules(options: PluginOptions) -> OperatorRules:
    """The rules for the operators around attention, but those that nodes of the plugin may take in.

    `finish` writes what is left of them.
    """
    later = (ROTARY, RMS_NORM) if options.linear else (ROTARY,)
    return {name: rule for name, rule in PRIMITIVE_RULES.items() if name not in later}


def take_rotary(
    b: NodeBuilder, call: AttentionCall, query: HeadsPlace, key: HeadsPlace, starts: ir.Value | None
) -> tuple[Rotary, int, HeadsPlace, HeadsPlace] | None:
    """The rotary embedding of both queries and keys, how its table rows are found, and both before it."""
    nodes = [None if place.offset else made_by(place.tensor, ROTARY) for place in (query, key)]
    one, other = (None if node is None else read_rotary(node) for node in nodes)
    if one is None or other is None:
        return None
    mode, other_mode = (_positions(rotary, starts, batch=call.attention.B) for rotary in (one, other))
    if mode is None:
        return None
    tables = [(each.cos, each.sin, each.rotated, each.interleaved) for each in (one, other)]
    alike = tables[0] == tables[1] and mode == other_mode
    same = mode != plugin.GIVEN or one.positions is other.positions
    heads = (one.heads, one.size, other.heads, other.size) == (call.Hq, call.D, call.Hkv, call.D)
    whole = one.rotated % (plugin.ALIGNED if one.interleaved else 2 * plugin.ALIGNED) == 0
    wanted = (3, 3) if one.positions is None else (2, 2)
    ranks = (rank(one.cos), rank(one.sin)) == wanted
    typed = one.cos.dtype == one.sin.dtype == call.dtype
    if not (same and alike and heads and whole and ranks and typed):
        return None
    positions = None
    if mode == plugin.GIVEN and one.positions is not None:
        positions = as_int32(b, one.positions, name="positions")
    if one.positions is None and mode == plugin.FROM_ZERO:
        cos, sin = (_table_rows(b, table) for table in (one.cos, one.sin))
        one = replace(one, cos=cos, sin=sin)
    places = (place_of(one.x, one.heads, one.size), place_of(other.x, other.heads, other.size))
    return replace(one, positions=positions), mode, *places


def _table_rows(b: NodeBuilder, table: ir.Value) -> ir.Value:
    """`[1, S, R/2]` as `[S, R/2]`."""
    rows = b.op("Squeeze", table, b.ints(0), name="rows")
    rows.type, rows.shape = table.type, ir.Shape(dims(table)[1:])
    return rows


def _orders(node: ir.Node | None) -> list[tuple[ir.Value, ir.Value]]:
    """The two inputs of a node in both orders."""
    one, other = input_at(node, 0), input_at(node, 1)
    return [] if one is None or other is None else [(one, other), (other, one)]


def _positions(rotary: Rotary, starts: ir.Value | None, *, batch: Dim) -> int | None:
    """How the rows of the tables are found: `FROM_ZERO`, `FROM_STARTS`, `PER_TOKEN` or `GIVEN`."""
    value = rotary.positions
    if value is None:
        tokens = dim(rotary.cos, 0)
        return plugin.FROM_ZERO if tokens == 1 else plugin.PER_TOKEN if same_size(tokens, batch) else None
    if counts_up(value):
        return plugin.FROM_ZERO
    source = input_at(made_by(value, "Expand"), 0) or value
    for counted, begin in _orders(made_by(source, "Add")) if starts is not None else ():
        if counts_up(counted) and origin(begin) is origin(starts):
            return plugin.FROM_STARTS
    return plugin.GIVEN


_FOR_EACH_POSITION = {*MOVES, "Cast", "Concat", "Constant", "Cos", "Expand", "MatMul", "Mul", "Neg", "Sin"}


def fold_tables(model: ir.Model, attentions: Sequence[ir.Node], longest: Mapping[str, int]) -> None:
    """Make rotary tables of the positions 0, 1, 2 … constants, with rows for the longest input.

    In the graph they would be some kernels before the first layer, in every call.
    """
    folded = dict[ir.Value, ir.Value | None]()
    for node in attentions:
        own = node.attributes
        if not own.get_int("rotary") or own.get_int("rotary_positions") != plugin.FROM_ZERO:
            continue
        for at in (-2, -1):  # cos and sin are the last inputs where no positions are given
            rows = cast(ir.Value, node.inputs[at])
            table = input_at(made_by(rows, "Squeeze"), 0) or rows
            if table not in folded:
                folded[table] = _folded(model, table, longest.get(str(dim(rows, 0))))
            if (constant_rows := folded[table]) is not None:
                node.replace_input_with(len(node.inputs) + at, constant_rows)


def _folded(model: ir.Model, table: ir.Value, length: int | None) -> ir.Value | None:
    """The rows of a table for so many positions; None where it is not computed from positions alone."""
    behind = list(nodes_behind([table], lambda node: [] if is_op(node, "Range") else node.inputs))
    ranges = [node for node in behind if is_op(node, "Range")]
    known = all(is_op(node, *_FOR_EACH_POSITION) for node in behind if node not in ranges)
    if length is None or len(ranges) != 1 or not known or not counts_up(ranges[0].outputs[0]):
        return None
    positions = ranges[0].outputs[0]
    try:
        part = ir.convenience.extract(graph_of_node(ranges[0]), inputs=[positions], outputs=[table])
    except ValueError:  # it depends on an input
        return None
    run: Any = reference_evaluator(ir.to_proto(ir.Model(part, ir_version=model.ir_version))).run
    dtype = np.int64 if positions.dtype is None else positions.dtype.numpy()

    def rows_of(count: int) -> np.ndarray:
        found = np.asarray(run(None, {str(positions.name): np.arange(count, dtype=dtype)})[0])
        return found.reshape(-1, found.shape[-1])

    rows = rows_of(length)
    if any(not np.array_equal(rows[:count], rows_of(count)) for count in {1, 2, 3, length // 2, length}):
        return None
    return new_initializer(model.graph, f"{prefix_within(str(table.name), prefixes_in(model))}/rows", rows)


# -- The dialect -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PluginOptions:
    """Which nodes of the plugin are written."""

    opset: int | None = 17  # the highest opset the result may need; None keeps the model's own
    linear: bool = False  # the projections around an attention, too: these nodes accumulate in FP32
    longest: Mapping[str, int] = field(default_factory=dict)  # largest sizes of axes that are known


def lower_to_plugin(call: AttentionCall, b: NodeBuilder, options: PluginOptions) -> Outputs:
    """Write one attention as a node of the plugin; the outputs by position."""
    refuse_what_is_missing(call)
    # With a past these are the operands; without one they are used for `present` only.
    heads, past = call.heads(b), call.past_key is not None
    key = HeadsPlace(heads.k, 0) if past else place_of(call.k, call.Hkv, call.D)
    value = HeadsPlace(heads.v, 0) if past else place_of(call.v, call.Hkv, call.Dv)
    y = _write_attention(b, call, key, value)[0]
    return {Y: y, PRESENT_KEY: heads.k, PRESENT_VALUE: heads.v}


def quantized_to_plugin(
    call: AttentionCall, b: NodeBuilder, found: QuantizedAttention, options: PluginOptions
) -> ir.Value:
    """The heads of an attention in FP8, in 4-D; the node rounds queries, keys, values and weights itself."""
    leave = "leave this attention in FP16"
    if found.type != "fp8" or found.weights is None:
        raise call.refuse(
            f"attention in {found.type}", got=found.type, hint=f"dialect primitives, or {leave}"
        )
    scales, sources = list[float](), list[ir.Value]()
    for up in (*found.inputs, found.weights):
        down = made_by(input_at(up, 0), "QuantizeLinear")
        x, scale, zero = input_at(down, 0), constant_number(input_at(up, 1)), input_at(up, 2)
        if x is None or scale is None or (zero is not None and constant_number(zero) != 0.0):
            raise call.refuse("these scales of attention in FP8", got=up.name, hint=leave)
        scales, sources = [*scales, scale], [*sources, x]
    names = ("query_scale", "key_scale", "value_scale", "weights_scale")
    q, k, v, _ = sources
    call = replace(call, q=q, k=k, v=v, attention=replace(call.attention, qk_output_mode=None))
    refuse_what_is_missing(call)
    key, value = place_of(k, call.Hkv, call.D), place_of(v, call.Hkv, call.Dv)
    fp8 = {"fp8": 1, **dict(zip(names, scales, strict=True))}
    y = _write_attention(b, call, key, value, fp8=fp8)[0]
    return y if call.attention.rank == 4 else split_heads(b, y, call.Hq, call.Dv)


def prepare(model: ir.Model, options: PluginOptions) -> None:
    """Pack projections, and write every attention with a preallocated cache as one node that appends to it.

    A cache of another pattern is updated with ScatterND before the attention. The model is changed.
    """
    CommonSubexpressionEliminationPass()(model)  # tables of Q and of K are the same ones then
    if any([pack_in_place(model), pack_gates(model, fp8_only=not options.linear)]):
        infer_shapes(model)

    def write(call: AttentionCall, b: NodeBuilder, cache: kv.CachedAttention) -> None:
        refuse_what_is_missing(call)
        key = place_of(cache.new_key, call.Hkv, call.D)
        value = place_of(cache.new_value, call.Hkv, call.Dv)
        y, *states = _write_attention(b, call, key, value, cache)
        kv.take_over(model, call.node, b, cache, y, *states)
        pasts = zip(states, (cache.past_key, cache.past_value), strict=True)
        kv.note_caches(model, kv.IN_PLACE_NOTE, {str(state.name): str(past.name) for state, past in pasts})

    kv.rewrite_caches(model, write, wanted=lambda call: diagonal_of(call) is not None)


def _write_attention(
    b: NodeBuilder,
    call: AttentionCall,
    key: HeadsPlace,
    value: HeadsPlace,
    cache: kv.CachedAttention | None = None,
    fp8: Mapping[str, float] = MappingProxyType({}),
) -> list[ir.Value]:
    """Write the node; its outputs, the first one in the rank that the attention was written in.

    With a preallocated cache, which the node updates, K and V are its new entries; `fp8` has its scales.
    """
    query, rotary, mode = place_of(call.q, call.Hq, call.D), None, plugin.FROM_ZERO
    starts = None if cache is None else cache.starts
    if cache is not None or (call.past_key is None and call.is_square):
        taken = None if masks.is_wider(call) else take_rotary(b, call, query, key, starts)
        if taken is not None:
            rotary, mode, query, key = taken
    states_in: list[ir.Value] = []
    if cache is not None:
        T = b.size(cache.past_key, 2)
        states_in = [cache.past_key, cache.past_value, as_int32(b, cache.starts, name="starts")]
    else:
        T = key.length(b, call) if call.past_key is None else call.key_length(b)
    mask = read_plugin_mask(b, call, query.length(b, call), T, in_cache=bool(states_in))
    if mask.shifted is not None:
        apart = call.q if call.attention.rank == 4 else split_heads(b, call.q, call.Hq, call.D)
        query = HeadsPlace(masks.without_lost_queries(b, call, mask.shifted, apart), 0)
    places = (query, key, value)
    tensors = list(dict.fromkeys(place.tensor for place in places))
    tables = () if rotary is None else (rotary.cos, rotary.sin, rotary.positions)
    inputs = [*tensors, mask.bias, mask.key_lengths, mask.key_mask, *states_in, *tables]
    own = {
        "query_heads": call.Hq,
        "key_heads": call.Hkv,
        "head_size": call.D,
        "value_size": call.Dv,
        "scale": float(call.scale),
        **mask.diagonal._asdict(),
        "sources": [tensors.index(place.tensor) for place in places],
        "offsets": [place.offset for place in places],
        "has_bias": int(mask.bias is not None),
        "has_key_lengths": int(mask.key_lengths is not None),
        "has_key_mask": int(mask.key_mask is not None),
        "has_gates": 0,
        "has_cache": int(bool(states_in)),
        "rotary": 0 if rotary is None else 2 if rotary.interleaved else 1,
        "rotary_size": 0 if rotary is None else rotary.rotated,
        "rotary_positions": mode,
        **plugin.IN_FP16,
        **fp8,
    }
    _refuse_what_the_plugin_refuses(call, own)
    y, *states = b.node(
        plugin.OP_TYPE,
        [value for value in inputs if value is not None],
        outputs=3 if states_in else 1,
        domain=plugin.DOMAIN,
        name=b.prefix,
        attributes={**own, **plugin.lookup_attributes()},
    )
    y.dtype, y.shape = call.dtype, ir.Shape([call.attention.B, call.attention.S, call.Hq * call.Dv])
    kept = y
    if mask.attending is not None and mask.heads == 1:
        kept = masks.zero_masked_queries(b, call, b.op("Squeeze", mask.attending, b.ints(1)), y)
    elif mask.attending is not None:
        # Where heads differ, they get an axis of their own; no data moves.
        apart = b.reshape(y, 0, 0, call.Hq, call.Dv)
        kept = masks.zero_masked_queries(b, call, b.transpose(mask.attending, 0, 2, 1, 3), apart)
        kept = b.reshape(kept, 0, 0, call.Hq * call.Dv, name="heads_merged")
    kept.dtype, kept.shape = call.dtype, y.shape
    return [kept if call.attention.rank == 3 else split_heads(b, kept, call.Hq, call.Dv), *states]


def _refuse_what_the_plugin_refuses(call: AttentionCall, own: Mapping[str, Any]) -> None:
    """Refuse a node that the plugin would refuse: by its attributes, or at sizes that it may get."""
    S, T = (size if isinstance(size, int) else None for size in (call.attention.S, call.attention.T))
    is_cached = bool(own["has_cache"])
    for queries, keys in {(S or s, T or t) for s, t in product((1, 3, 5), repeat=2)}:
        if (is_cached or call.past_key is not None) and keys < queries:
            continue
        total = queries if call.is_square and call.past_key is None and not is_cached else keys
        new = queries if is_cached else total
        operands = ((2, call.Hq, queries, call.D), (2, call.Hkv, new, call.D), (2, call.Hkv, new, call.Dv))
        bias = (1, 1, queries, total) if own["has_bias"] else ()
        # Where the operands are in memory fits them, and head sizes are refused before.
        alone = {**own, "sources": [0, 1, 2], "offsets": [0, 0, 0]}
        sizes = plugin.NodeSizes(operands, bias, total if is_cached else 0, total)
        if (reason := plugin.why_refused(alone, sizes, aligned=1)) is not None:
            raise call.refuse(reason, got=f"S={queries}, T={total}", hint="dialect primitives")


def finish(model: ir.Model, options: PluginOptions) -> bool:
    """Remove transposes that cancel; write gates as inputs and projections as nodes of the plugin.

    Gives whether the model changed: it does whatever there is.
    """
    attentions = [node for node in model.graph.all_nodes() if plugin.is_plugin_attention(node)]
    fold_tables(model, attentions, options.longest)
    for node in attentions:
        cancel_transposes(node)
    RemoveUnusedNodesPass()(model)  # gates are taken only where they are the only consumer of the heads
    for node in attentions:
        if take_gates(node):
            cancel_transposes(node)
    has_fp8 = any(read_fp8_gemm(node) is not None for node in model.graph.all_nodes())
    if options.linear or has_fp8:
        write_linear(model, fp8_only=not options.linear)
        write_norms_and_activations(model)
    if has_fp8:
        RemoveUnusedNodesPass()(model)  # what was quantized is still read there
        write_fp8_with_what_computes_it(model)
    refuse_other_fp8(model)
    taken = prefixes_in(model)
    later = {ROTARY: rotary_to_primitives, RMS_NORM: rms_norm_to_primitives}
    for node in [each for each in model.graph.all_nodes() if is_op(each, *later)]:
        b = NodeBuilder(prefix_within(node.name or node.op_type, taken))
        replace_node(node, b, {0: later[node.op_type](node, b)})
    CommonSubexpressionEliminationPass()(model)  # a mask is computed once for all layers
    RemoveUnusedNodesPass()(model)
    return True


# -- One GEMM instead of three: pack the projections that read the same input ----------------------
#
# Packing changes no number: each output column is the same dot product as before. It comes before lowering,
# while the Attention nodes still show which matmuls are projections.


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A MatMul with constant weights, and the Add of its bias where it has one."""

    matmul: ir.Node
    add: ir.Node | None
    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    fp8: Fp8Gemm | None = None  # where the weight is dequantized from FP8, and x as well

    @property
    def columns(self) -> int:
        """The number of its outputs."""
        return int((_numbers(self.weight) if self.fp8 is None else self.fp8.weight).shape[1])

    @property
    def y(self) -> ir.Value:
        """The output of the projection, bias included."""
        return (self.add or self.matmul).outputs[0]

    @property
    def kind(self) -> tuple[ir.Value, ir.Graph | ir.Function | None, bool]:
        """What all projections have in common that become one GEMM."""
        return self.x, self.matmul.graph, self.fp8 is not None


def pack_in_place(model: ir.Model) -> bool:
    """Pack the projections of each attention that read the same input into one MatMul and a Split.

    Self attention has three of them, cross attention two (keys and values). A missing bias becomes zeros. The
    model is changed; whether there were any.
    """
    done: set[ir.Node] = set()
    for attention in [node for node in model.graph.all_nodes() if is_attention(node)]:
        for group in _groups(attention):
            if done.isdisjoint(projection.matmul for projection in group):
                done.update(projection.matmul for projection in group)
                # No slash after the attention's own name: that prefix is reserved for its lowering.
                _pack(group, f"{attention.name or attention.outputs[0].name}_qkv")
    return bool(done)


def pack_gates(model: ir.Model, *, fp8_only: bool = False) -> bool:
    """Pack both projections of `SiLU(gate) · up`, as `pack_in_place` does; or those in FP8."""
    packed = False
    for node in [each for each in model.graph.all_nodes() if is_op(each, "Mul")]:
        gate = None if node.graph is None else read_silu(node)
        group = [] if gate is None or gate.factor is None else _alike([gate.x, gate.factor])
        if gate is not None and group and not (fp8_only and group[0].fp8 is None):
            _pack(group, f"{gate.node.name or gate.y.name}_gate_up")
            packed = True
    return packed


def _alike(values: Sequence[ir.Value]) -> list[Projection]:
    """The projections that give these values, where they read the same input; else none."""
    found = []
    for value in values:
        add = made_by(value, "Add")
        makers = [made_by(each, "MatMul") for each in (value, *(() if add is None else add.inputs))]
        read = [projection_at(node) for node in makers if node is not None]
        found += [each for each in read if each is not None and each.y is value]
    return found if len(found) == len(values) and len({each.kind for each in found}) == 1 else []


def projection_at(matmul: ir.Node) -> Projection | None:
    """Read a MatMul as a projection; None where its weights are not constant."""
    x, weight = matmul.inputs if is_op(matmul, "MatMul") else (None, None)
    fp8 = read_fp8_gemm(matmul)
    if x is None or weight is None or (fp8 is None and not _is_constant(weight, 2)):
        return None
    uses, add, bias = list(matmul.outputs[0].uses()), None, None
    if len(uses) == 1 and uses[0].node.op_type == "Add" and not matmul.outputs[0].is_graph_output():
        added = uses[0].node.inputs[1 - uses[0].idx]
        if added is not None and _is_constant(added, 1):
            add, bias = uses[0].node, added
    return Projection(matmul=matmul, add=add, x=x, weight=weight, bias=bias, fp8=fp8)


def _groups(attention: ir.Node) -> list[list[Projection]]:
    """The projections of Q, K and V that share an input, two or more together."""
    groups, seen = dict[Any, list[Projection]](), set[ir.Node]()
    for position in (Q, K, V):
        up_to_matmuls = nodes_behind(
            [attention.inputs[position]], lambda node: () if is_op(node, "MatMul") else node.inputs
        )
        for node in up_to_matmuls:
            projection = None if node in seen else projection_at(node)
            seen.add(node)
            if projection is not None:
                groups.setdefault(projection.kind, []).append(projection)
    return [group for group in groups.values() if len(group) > 1]


def _pack(group: list[Projection], name: str) -> None:
    """Replace a group by one matmul of this name; the values that were its outputs keep their names."""
    graph = group[0].matmul.graph
    if not isinstance(graph, ir.Graph):
        return
    names = chain([name], (f"{name}{number}" for number in count(2)))
    b = NodeBuilder(next(each for each in names if f"{each}_weight" not in graph.initializers))
    columns = [projection.columns for projection in group]
    dtype = (group[0].weight.dtype or ir.DataType.FLOAT16).numpy()
    biases = [
        np.zeros(size, dtype) if each.bias is None else _numbers(each.bias)
        for each, size in zip(group, columns, strict=True)
    ]
    y = b.op("MatMul", group[0].x, _packed_weight(b, graph, group))
    if any(projection.bias is not None for projection in group):
        y = b.op("Add", y, new_initializer(graph, f"{b.prefix}_bias", np.concatenate(biases)))
    sizes = b.ints(*columns)
    parts = b.node("Split", [y, sizes], outputs=len(group), attributes={"axis": -1})
    members = {projection.matmul for projection in group}
    graph.insert_before(next(node for node in graph if node in members), b.nodes)
    for projection, part in zip(group, parts, strict=True):
        replace_value(projection.y, part)
        graph.remove([node for node in (projection.add, projection.matmul) if node is not None], safe=True)
        for value in (projection.weight, projection.bias):
            if value is not None and value.is_initializer() and not value.uses() and value.name:
                graph.initializers.pop(value.name)


def _packed_weight(b: NodeBuilder, graph: ir.Graph, group: Sequence[Projection]) -> ir.Value:
    """The weights side by side; those in FP8 with all of their scales."""
    name, parts = f"{b.prefix}_weight", [projection.fp8 for projection in group]
    stored = [part for part in parts if part is not None]
    if not stored:
        return new_initializer(graph, name, np.concatenate([_numbers(each.weight) for each in group], axis=1))
    dtype = group[0].weight.dtype or ir.DataType.FLOAT16
    numbers = np.concatenate([part.weight for part in stored], axis=1)
    scales = np.concatenate([np.broadcast_to(part.scales, part.weight.shape[1]) for part in stored])
    packed = new_initializer(graph, name, numbers, ir.DataType.FLOAT8E4M3FN)
    factor = new_initializer(graph, f"{name}_scale", scales.astype(dtype.numpy()))
    up = b.node("DequantizeLinear", [packed, factor], attributes={"axis": 1})[0]
    up.dtype, up.shape = dtype, ir.Shape(numbers.shape)
    return up


def _is_constant(value: ir.Value, rank: int) -> bool:
    tensor = constant(value)
    return tensor is not None and len(tensor.shape) == rank


def _numbers(value: ir.Value) -> np.ndarray:
    return cast(ir.TensorProtocol, constant(value)).numpy()


# -- Gates: factors on the heads of each token, as an input of the node; heads with 0 are skipped --


def take_gates(attention: ir.Node) -> bool:
    """Give the gates after an attention to the plugin's node, which is changed; whether there were any."""
    own = attention.attributes
    windows = {own.get_int(name, plugin.NO_WINDOW) for name in ("left_window", "right_window")}
    others = any(own.get_int(name, 0) for name in ("has_bias", "has_cache", "has_gates"))
    plain = not others and windows == {plugin.NO_WINDOW}
    found = _gated(attention) if plain and has_gate_kernel(attention) else None
    if found is None or not pays(attention, found[2]):
        return False
    split, gate, factor = found
    unsqueeze = made_by(factor, "Unsqueeze")
    if unsqueeze is not None and constant_ints(unsqueeze, 1) in ((-1,), (3,)):
        gates = unsqueeze.inputs[0]  # [B, S, Hq]
    else:
        b = NodeBuilder(f"{attention.name}_gates")
        gates = b.reshape(factor, 0, 0, own.get_int("query_heads", 0))
        gates.type, gates.shape = factor.type, ir.Shape(dims(factor)[:3])
        graph_of_node(gate).insert_before(gate, b.nodes)
    attention.resize_inputs(len(attention.inputs) + 1)
    attention.replace_input_with(len(attention.inputs) - 1, gates)
    own.add(ir.AttrInt64("has_gates", 1))
    gate.outputs[0].replace_all_uses_with(split.outputs[0])
    graph_of_node(attention).sort()  # the gates may be computed after the attention
    return True


def has_gate_kernel(attention: ir.Node) -> bool:
    """Whether there is a kernel with gates for the head sizes of an attention."""
    own = attention.attributes
    size, scale = own.get_int("head_size", 0), own.get_float("scale", 0.0)
    return size in plugin.GATED_SIZES and own.get_int("value_size", 0) == size and scale > 0.0


def pays(attention: ir.Node, factor: ir.Value) -> bool:
    """Whether the kernel for chosen heads was measured to be faster than all heads with a Mul behind them.

    On an H200, B 8, 16 heads, S 2048, in microseconds: heads of 64 all 314, three quarters 395, half 281,
    a quarter 176; heads of 128 all 479, half 520, a quarter 319. Where it is unknown how many heads a token
    chooses, they are all computed.
    """
    source: ir.Value | None = factor
    while (step := made_by(source, "Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape")) is not None:
        source = step.inputs[0]
    chosen = dims(input_at(made_by(source, "ScatterElements"), 1))[-1:] or (None,)
    heads, size = (attention.attributes.get_int(name, 0) for name in ("query_heads", "head_size"))
    return isinstance(chosen[0], int) and chosen[0] * (2 if size <= 64 else 4) <= heads


def _gated(attention: ir.Node) -> tuple[ir.Node, ir.Node, ir.Value] | None:
    """The Reshape, the Mul and the factor `[B, S, Hq, 1]`, where these are the only consumers of the heads.

    The factor then cannot depend on the attention, and can be an input of it.
    """
    y = attention.outputs[0]
    split = _only_reader(y, "Reshape")
    gate = None if split is None else _only_reader(split.outputs[0], "Mul")
    heads, size = (attention.attributes.get_int(name, 0) for name in ("query_heads", "value_size"))
    if split is None or gate is None or gate.outputs[0].is_graph_output():
        return None
    B, S, _ = dims(y)
    if dims(split.outputs[0])[2:] != (heads, size):
        return None
    for factor in gate.inputs:
        shape = dims(factor)
        per_head = factor is not split.outputs[0] and shape[2:] == (heads, 1)
        if factor is not None and per_head and same_size(shape[0], B) and same_size(shape[1], S):
            return split, gate, factor
    return None


def _only_reader(value: ir.Value, op_type: str) -> ir.Node | None:
    uses = list(value.uses())
    alone = len(uses) == 1 and not value.is_graph_output() and is_op(uses[0].node, op_type)
    return uses[0].node if alone else None


# -- Projections as nodes that accumulate in FP32; TensorRT 8.6 picks kernels that do so in FP16 ---


def write_linear(model: ir.Model, *, fp8_only: bool = False) -> None:
    """Write every matmul with constant weights, biases included, as a node of the plugin; or those in FP8.

    The weight is stored as PyTorch keeps it, `[N, K]`: on an H200 cuBLASLt's GEMMs took up to 7 % less, and
    in FP8 there are no others.
    """
    taken, weights = prefixes_in(model), dict[ir.Value, ir.Value]()
    words = dict[tuple[ir.Value, float], ir.Value]()
    for matmul in [node for node in model.graph.all_nodes() if is_op(node, "MatMul")]:
        projection = projection_at(matmul)
        if projection is None or not dims(projection.x) or not has_linear_kernel(projection):
            continue
        if fp8_only and projection.fp8 is None:
            continue
        b = NodeBuilder(prefix_within(matmul.name or projection.y.name or plugin.LINEAR, taken))
        weight, bias, add = projection.weight, projection.bias, projection.add
        if bias is not None and dims(bias) != dims(weight)[1:]:
            bias = add = None  # not one number for each column: it stays an Add
        fp8 = projection.fp8
        if weight not in weights:
            array = np.ascontiguousarray((_numbers(weight) if fp8 is None else fp8.weight).T)
            array = array if fp8 is None else array.view(np.int32)
            name = prefix_within(f"{weight.name}/transposed", taken)
            weights[weight] = new_initializer(model.graph, name, array, weight.dtype if fp8 is None else None)
        x, scales, quantized = projection.x, list[ir.Value](), plugin.UNQUANTIZED
        if fp8 is not None:
            key = (fp8.x, fp8.x_scale)
            if key not in words:
                words[key] = _write_words(matmul, taken, *key)
            same = len(set(fp8.scales)) == 1
            factor, quantized = (
                fp8.scales[: 1 if same else None],
                plugin.PER_TENSOR if same else plugin.PER_OUTPUT,
            )
            name = prefix_within(f"{weight.name}/scale_of_sums", taken)
            array = (factor * fp8.x_scale).astype(np.float32)
            x, scales = words[key], [new_initializer(model.graph, name, array)]
        inputs = [x, weights[weight], *([] if bias is None else [bias]), *scales]
        has_bias = int(bias is not None)
        attributes = {"has_bias": has_bias, "transposed": 1, "quantized": quantized}
        attributes |= plugin.lookup_attributes()
        y = b.node(plugin.LINEAR, inputs, domain=plugin.DOMAIN, name=b.prefix, attributes=attributes)[0]
        graph = graph_of_node(matmul)
        replace_node(add or matmul, b, {0: y})
        if add is not None:
            graph.remove(matmul, safe=True)


def has_linear_kernel(projection: Projection) -> bool:
    """Whether the plugin has a GEMM for the types and, in FP8, the sizes of a projection."""
    if (fp8 := projection.fp8) is not None:
        fits = all(size % plugin.FP8_STEP == 0 for size in fp8.weight.shape)
        return fits and fp8.x.dtype == ir.DataType.FLOAT16 and _has_kernel(fp8.x)
    return projection.x.dtype == projection.weight.dtype and projection.x.dtype in HALVES


# -- FP8: written by the kernel that computes a tensor, read by GEMMs -------------------------------


def _write_words(before: ir.Node, taken: set[str], x: ir.Value, scale: float) -> ir.Value:
    """A tensor in FP8 as words, by a node of its own that another one may take in."""
    b = NodeBuilder(prefix_within(f"{x.name}/fp8", taken))
    made = _new_node(b, [x], plugin.COPY, fp8=plugin.FP8_ONLY, fp8_scale=scale)[0]
    *leading, width = dims(x)
    made.dtype = ir.DataType.INT32
    made.shape = ir.Shape([*leading, int(width or 0) // plugin.FP8_OF_WORD])
    graph_of_node(before).insert_before(before, b.nodes)
    return made


def write_fp8_with_what_computes_it(model: ir.Model) -> None:
    """Let norms, activations and attention write FP8 themselves, where a copy does only that."""
    kind = plugin.NORM_ACTIVATION
    written = [node for node in model.graph.all_nodes() if node.op_type == kind]
    for copy in [node for node in written if node.attributes.get_int("operation", 0) == plugin.COPY]:
        y, words = copy.inputs[0], copy.outputs[0]
        source = None if y is None else y.producer()
        if y is None or source is None or y is not source.outputs[0]:
            continue
        own, scale = source.attributes, copy.attributes.get_float("fp8_scale", 1.0) or 1.0
        alone = len(list(y.uses())) == 1 and not y.is_graph_output()
        besides, is_fp8 = not alone, bool(plugin.fp8_values(source))
        if plugin.operands_in_fp8(source) and alone:
            own.add(ir.AttrFloat32("output_scale", scale))
        elif plugin.is_plugin_attention(source) and not (own.get_int("has_gates", 0) or is_fp8):
            # The result itself stays an output: it is what is judged.
            own.add(ir.AttrInt64("fp8_copy", 1))
            own.add(ir.AttrFloat32("output_scale", scale))
            besides = True
        elif source.op_type == kind and not is_fp8:
            own.add(ir.AttrInt64("fp8", plugin.FP8_ONLY if alone else plugin.FP8_BESIDES))
            own.add(ir.AttrFloat32("fp8_scale", scale))
        else:
            continue  # of another kind, or with another scale
        if besides:
            source.resize_outputs(len(source.outputs) + 1)
            source.outputs[-1].name = f"{words.name}/besides"
        made, shape = source.outputs[-1 if besides else 0], words.shape
        words.replace_all_uses_with(made)
        made.type, made.shape = ir.TensorType(ir.DataType.INT32), shape
        graph_of_node(copy).remove(copy, safe=True)


def refuse_other_fp8(model: ir.Model) -> None:
    """Refuse what is quantized to FP8 and not multiplied by the plugin, or given out in another type."""
    for node in model.graph.all_nodes():
        if plugin.operands_in_fp8(node) and node.outputs[0].dtype != ir.DataType.INT32:
            hint = "quantize the output projection as well, or leave this attention in FP16"
            got = "a result that is read in FP16"
            raise LoweringError("attention in FP8 without a GEMM in FP8 behind it", node, got=got, hint=hint)
        if is_op(node, "DequantizeLinear") and (x := node.inputs[0]) is not None and x.dtype in FP8:
            reader = next((use.node for use in node.outputs[0].uses()), node)
            sizes = ", ".join(str(list(dims(each))) for each in (node.outputs[0], *reader.outputs))
            hint = f"keep it in FP16: GEMMs in FP8 have FP16 around them and multiples of {plugin.FP8_STEP}"
            raise LoweringError("this GEMM in FP8", reader, got=sizes, hint=hint)


# -- What stands between the GEMMs: residual and normalization, activations ------------------------

_MOST_COLUMNS = 32768


def write_norms_and_activations(model: ir.Model) -> None:
    """Write normalizations, with the residual before them, and activations as nodes of the plugin."""
    taken = prefixes_in(model)
    for node in list(model.graph.all_nodes()):
        if node.graph is None or node.domain != "" or not node.inputs or not _has_kernel(node.inputs[0]):
            continue  # it went with an earlier one
        if is_op(node, "LayerNormalization", RMS_NORM):
            _write_norm(node, taken)
        elif is_op(node, "Gelu"):
            tanh = node.attributes.get_string("approximate", "none") == "tanh"
            _write_node(node, taken, node.inputs[:1], plugin.GELU_TANH if tanh else plugin.GELU)
        elif is_op(node, "Mul"):
            _write_silu(node, taken)
    model.graph.sort()


def _has_kernel(value: ir.Value | None) -> bool:
    shape = dims(value)
    width = shape[-1] if len(shape) > 1 else None
    typed = value is not None and value.dtype in HALVES
    return typed and isinstance(width, int) and width % plugin.ALIGNED == 0 and width <= _MOST_COLUMNS


def _write_norm(node: ir.Node, taken: set[str]) -> None:
    x, scale, bias = (input_at(node, at) for at in range(3))
    if x is None or scale is None or len(node.outputs) > 1:
        return
    vectors = [each for each in (scale, bias) if each is not None]
    shaped = all(each.dtype == x.dtype and dims(each) == dims(x)[-1:] for each in vectors)
    if not shaped or node.attributes.get_int("axis", -1) not in (-1, len(dims(x)) - 1):
        return
    add, keeps_sum, terms = made_by(x, "Add"), False, [x]
    if add is not None and not x.is_graph_output():
        parts = [each for each in add.inputs if each is not None and _same_shape(each, x)]
        if len(parts) == 2:
            keeps_sum, terms = len(list(x.uses())) > 1, parts
    outputs = _write_node(
        node,
        taken,
        [*terms, *vectors],
        plugin.RMS_NORM if is_op(node, RMS_NORM) else plugin.LAYER_NORM,
        has_second=len(terms) - 1,
        has_bias=int(bias is not None),
        keeps_sum=int(keeps_sum),
        epsilon=node.attributes.get_float("epsilon", 1e-5) or 0.0,
    )
    if add is not None and keeps_sum:
        add.outputs[0].replace_all_uses_with(outputs[1])


class Silu(NamedTuple):
    """`x · sigmoid(x)`, with a factor of the same shape behind it or None; `node` gives the result `y`."""

    node: ir.Node
    x: ir.Value
    factor: ir.Value | None

    @property
    def y(self) -> ir.Value:
        """The result."""
        return self.node.outputs[0]


def read_silu(node: ir.Node) -> Silu | None:
    """Read the Mul of a value and its sigmoid; None for another."""
    y = node.outputs[0]
    for x, sigmoid in _orders(node) if not y.is_graph_output() else ():
        if input_at(made_by(sigmoid, "Sigmoid"), 0) is not x:
            continue
        gate = _only_reader(y, "Mul")
        factors = [] if gate is None else [each for each in gate.inputs if each is not y]
        if gate is not None and factors and factors[0] is not None and _same_shape(factors[0], x):
            return Silu(gate, x, factors[0])
        return Silu(node, x, None)
    return None


def _write_silu(node: ir.Node, taken: set[str]) -> None:
    found = read_silu(node)
    if found is None:
        return
    parts = [None if each is None else part_of(each) for each in (found.x, found.factor)]
    halves = [(part.source, part.axis, part.begin) for part in parts if part is not None]
    width = dims(found.x)[-1]
    source = halves[0][0] if halves else None
    if halves == [(source, -1, 0), (source, -1, width)] and dims(source)[-1:] == (2 * int(width or 0),):
        _write_node(found.node, taken, [source], plugin.SILU, packed=1)
    elif found.factor is not None:
        _write_node(found.node, taken, [found.x, found.factor], plugin.SILU, has_second=1)
    else:
        _write_node(found.node, taken, [found.x], plugin.SILU)


def _same_shape(one: ir.Value, other: ir.Value) -> bool:
    shape, wanted = dims(one), dims(other)
    same = len(shape) == len(wanted) > 0 and all(map(same_size, shape, wanted))
    return same and one.dtype == other.dtype


def _write_node(
    node: ir.Node, taken: set[str], inputs: Sequence[ir.Value | None], operation: int, **own: float
) -> list[ir.Value]:
    """Replace a node; `own` are the attributes that are not those of a plain activation."""
    b = NodeBuilder(prefix_within(node.name or plugin.NORM_ACTIVATION, taken))
    outputs = _new_node(b, inputs, operation, **own)
    for output in outputs:
        output.type, output.shape = node.outputs[0].type, node.outputs[0].shape
    replace_node(node, b, {0: outputs[0]})
    return outputs


_PLAIN: Mapping[str, float] = {
    "has_second": 0, "packed": 0, "has_bias": 0, "keeps_sum": 0, "epsilon": 0.0, "fp8": plugin.NOT_FP8,
    "fp8_scale": 1.0,
}  # fmt: skip


def _new_node(
    b: NodeBuilder, inputs: Sequence[ir.Value | None], operation: int, **own: float
) -> list[ir.Value]:
    values = {"operation": operation, **_PLAIN, **own, **plugin.lookup_attributes()}
    count, op_type = 1 + int(own.get("keeps_sum", 0)), plugin.NORM_ACTIVATION
    made = b.node(op_type, inputs, outputs=count, domain=plugin.DOMAIN, name=b.prefix, attributes=values)
    return list(made)


# -- Reshapes and transposes after the node that cancel --------------------------------------------


def cancel_transposes(attention: ir.Node) -> None:
    """Let consumers that transpose the heads back read the value before the transposes."""
    y = attention.outputs[0]
    found, pending = [y], [y]  # the output, and the same with fully masked queries set to zero
    while pending:
        for use in pending.pop().uses():
            same = use.node.outputs[0]
            if use.node.op_type == "Where" or (use.node.op_type == "Reshape" and use.idx == 0):
                pending.append(same)
                found += [same] if _has_shape_of(y, same) else []
    for value in found:
        for split in _readers(value, "Reshape"):
            for transpose in _readers(split.outputs[0], "Transpose"):
                for back in _readers(transpose.outputs[0], "Transpose"):
                    same_order = perm(transpose) == perm(back) == _HEADS_FIRST
                    if same_order and not back.outputs[0].is_graph_output():
                        back.outputs[0].replace_all_uses_with(split.outputs[0])
            for merge in _readers(split.outputs[0], "Reshape"):
                if _has_shape_of(value, merge.outputs[0]) and not merge.outputs[0].is_graph_output():
                    merge.outputs[0].replace_all_uses_with(value)


def _readers(value: ir.Value, op_type: str) -> list[ir.Node]:
    return [use.node for use in value.uses() if use.idx == 0 and is_op(use.node, op_type)]


def _has_shape_of(value: ir.Value, reshaped: ir.Value) -> bool:
    """Whether a reshape has the original shape: same width, and the same batch or the same length."""
    before, after = dims(value), dims(reshaped)
    if len(after) != 3 or not same_size(before[2], after[2]):
        return False
    return any(same_size(before[at], after[at]) for at in (0, 1))
