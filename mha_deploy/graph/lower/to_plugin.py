"""Attention as one node of the plugin: operands read in place, masks as lengths, caches written in place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from mha_deploy.graph.attention_node import PRESENT_KEY, PRESENT_VALUE, Y
from mha_deploy.graph.ir import (
    Dim,
    NodeBuilder,
    Size,
    constant,
    constant_ints,
    constant_number,
    dims,
    import_domains,
    infer_shapes,
    input_at,
    is_op,
    made_by,
    names_in,
    perm,
    prefix_within,
    rank,
    replace_node,
    same_size,
)
from mha_deploy.graph.lower.cache import (
    STATIC,
    CachedAttention,
    note_in_place,
    read_cache,
    rewrite_caches,
    take_over,
)
from mha_deploy.graph.lower.call import AttentionCall, key_length, read_call, split_heads, split_inputs
from mha_deploy.graph.lower.masks import (
    Mask,
    attending_queries,
    bias_of,
    given_mask,
    may_be_short,
    with_geometry,
    zero_masked_queries,
)
from mha_deploy.graph.lower.pack import Projection, matmuls_behind, pack_projections, projection_at
from mha_deploy.graph.plugin_node import (
    BOTTOM_RIGHT,
    DOMAIN,
    LINEAR,
    NO_WINDOW,
    NONE,
    OP_TYPE,
    TOP_LEFT,
    is_plugin_attention,
    lookup_attributes,
)

# -- What the plugin's attention node has no words or no kernels for -------------------------------

_LARGEST_HEAD = 256
_TYPES = ("fp16", "bf16")


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
    if call.attention.dtype not in _TYPES:
        feature = "fp64" if call.attention.dtype == "fp64" else "type but fp16 and bf16"
        raise call.refuse(feature, got=call.attention.dtype, hint="export in fp16 or bf16")
    for name, size in (("D", call.D), ("Dv", call.Dv)):
        if size % 8:
            hint = "pad the heads in the model, or dialect primitives"
            raise call.refuse("head size no multiple of 8", got=f"{name}={size}", hint=hint)
        if size > _LARGEST_HEAD:
            raise call.refuse(
                f"head size above {_LARGEST_HEAD}", got=f"{name}={size}", hint="dialect primitives"
            )


# -- Where queries, keys and values lie in memory, so that the plugin reads them there -------------

# Kernels load 16 bytes at a time, eight numbers of two bytes.
_ALIGNED = 8

TURN = (0, 2, 1, 3)
_TURN_OF_PACKED = (2, 0, 3, 1, 4)  # [B, L, 3, H, D] to [3, B, H, L, D]


class Place(NamedTuple):
    """A tensor of rank 3 or 4, and where in a row of it the heads begin (0 for rank 4)."""

    tensor: ir.Value
    offset: int

    def length(self, b: NodeBuilder) -> Size:
        """The number of queries or keys. Asked here, it keeps nobody alive who cut the tensor."""
        return b.size(self.tensor, 1 if rank(self.tensor) == 3 else 2)


class Operands(NamedTuple):
    """The distinct tensors that hold Q, K and V; for each of the three which one, and where in its rows."""

    tensors: tuple[ir.Value, ...]
    sources: tuple[int, ...]
    offsets: tuple[int, ...]


def operands_of(places: Sequence[Place]) -> Operands:
    """Q, K and V as the plugin takes them: every tensor once, in the order in which they are met."""
    tensors = list(dict.fromkeys(place.tensor for place in places))
    return Operands(
        tuple(tensors),
        tuple(tensors.index(place.tensor) for place in places),
        tuple(place.offset for place in places),
    )


def place_of(value: ir.Value, heads: int, size: int) -> Place:
    """Where the heads of a query, key or value input first stood in rows; the input itself where they do not.

    Args:
        value: `[B, L, H·D]` or `[B, H, L, D]`.
        heads: H.
        size: D.
    """
    rows = value
    if rank(value) == 4:
        packed = _before_unbinding(value, heads, size)
        if packed is not None:
            return packed
        before = rows_before_turn(value, heads, size)
        if before is None:
            return Place(value, 0)
        rows = before
    place = _before_cuts(rows)
    return place if _is_aligned(place) else Place(rows, 0)


def rows_before_turn(value: ir.Value, heads: int, size: int) -> ir.Value | None:
    """The `[B, L, H·D]` that a Reshape and a Transpose made `[B, H, L, D]` of; None where they did not."""
    turn = made_by(value, "Transpose")
    split = None if turn is None or perm(turn) != TURN else made_by(turn.inputs[0], "Reshape")
    rows = None if split is None else split.inputs[0]
    if rows is None or split is None or rank(rows) != 3:
        return None
    before, after = dims(rows), dims(split.outputs[0])
    if len(after) != 4 or after[2:] != (heads, size) or before[2] != heads * size:
        return None
    # As many numbers before and after: where one of the two leading sizes is the same, so is the other.
    return rows if any(same_size(before[at], after[at]) for at in (0, 1)) else None


def _before_cuts(value: ir.Value) -> Place:
    """The tensor that Splits and Slices cut a value out of."""
    place = Place(value, 0)
    while True:
        node = place.tensor.producer()
        begin = None if node is None else _begin_of_cut(node, place.tensor, axis=2)
        whole = None if node is None else node.inputs[0]
        if begin is None or whole is None or rank(whole) != 3:
            return place
        place = Place(whole, place.offset + begin)


def _begin_of_cut(node: ir.Node, part: ir.Value, *, axis: int) -> int | None:
    """Where along an axis of its input a Split or Slice begins a part; None where it cuts elsewhere."""
    axes_meant = (axis, axis - len(dims(part)))
    if node.domain != "":
        return None
    if node.op_type == "Split" and (node.attributes.get_int("axis", 0) or 0) in axes_meant:
        sizes = [dims(output)[axis] if dims(output) else None for output in node.outputs]
        before = sizes[: list(node.outputs).index(part)]
        known = [size for size in before if isinstance(size, int)]
        return sum(known) if len(known) == len(before) else None
    if node.op_type == "Slice":
        starts, axes, steps = (constant_ints(node, at) for at in (1, 3, 4))
        one_step = len(node.inputs) < 5 or node.inputs[4] is None or steps == (1,)
        along = axes is not None and len(axes) == 1 and axes[0] in axes_meant
        if starts is not None and len(starts) == 1 and along and one_step:
            return starts[0] if starts[0] >= 0 else None
    return None


def _is_aligned(place: Place) -> bool:
    shape = dims(place.tensor)
    width = shape[-1] if shape else None
    return isinstance(width, int) and width % _ALIGNED == 0 and place.offset % _ALIGNED == 0


def _before_unbinding(value: ir.Value, heads: int, size: int) -> Place | None:
    """The `[B, L, 3·H·D]` of a model that reshapes to [B, L, 3, H, D], turns that, and takes it apart."""
    taken = _taken_from_first_axis(value)
    turn = None if taken is None else made_by(taken[0], "Transpose")
    split = None if turn is None or perm(turn) != _TURN_OF_PACKED else made_by(turn.inputs[0], "Reshape")
    rows = None if split is None else split.inputs[0]
    if taken is None or split is None or rows is None or rank(rows) != 3:
        return None
    before, after = dims(rows), dims(split.outputs[0])
    if len(after) != 5 or after[3:] != (heads, size) or not isinstance(after[2], int):
        return None
    whole = before[2] == after[2] * heads * size
    if not whole or not any(same_size(before[at], after[at]) for at in (0, 1)):
        return None
    place = Place(rows, taken[1] % after[2] * heads * size)
    return place if _is_aligned(place) else None


def _taken_from_first_axis(value: ir.Value) -> tuple[ir.Value, int] | None:
    """The tensor and the index, where a value is one entry of its first axis."""
    node = value.producer()
    if node is None or node.domain != "":
        return None
    if node.op_type == "Gather" and (node.attributes.get_int("axis", 0) or 0) == 0:
        index, whole = constant_ints(node, 1), node.inputs[0]
        scalar = node.inputs[1] is not None and rank(node.inputs[1]) == 0
        return (whole, index[0]) if whole is not None and index is not None and scalar else None
    part = node.inputs[0] if node.op_type == "Squeeze" and constant_ints(node, 1) == (0,) else None
    cut = None if part is None else part.producer()
    if part is None or cut is None or dims(part)[:1] != (1,):
        return None
    begin, whole = _begin_of_cut(cut, part, axis=0), cut.inputs[0]
    return (whole, begin) if whole is not None and begin is not None else None


# -- Masks that show the first keys of a batch row, as many as that row has: key lengths in dis ----

# Operators that hand on the numbers of their first input in their order.
_LAYOUT = frozenset({"Identity", "Reshape", "Squeeze", "Unsqueeze"})
_WHOLE = frozenset({ir.DataType.INT32, ir.DataType.INT64})
_LESS, _GREATER = "Less", "Greater"
_OPPOSITE = {"GreaterOrEqual": _LESS, "LessOrEqual": _GREATER}


def prefix_lengths(mask: ir.Value, *, batch: Dim) -> ir.Value | None:
    """The lengths, whole numbers `[B]`, of a mask that hides just the keys behind them; None for another.

    Args:
        mask: The mask of an attention, boolean or additive.
        batch: The batch of the attention.
    """
    if len(dims(mask)) != 4:
        return None  # of another rank, the first axis is not the batch
    compared = _comparison(_before_layout(mask))
    if compared is None:
        return None
    counted, lengths = compared
    shape = dims(lengths)
    if lengths.dtype not in _WHOLE or not shape or any(size != 1 for size in shape[1:]):
        return None
    if len(shape) < len(dims(counted)) or not same_size(shape[0], batch) or len(shape) < 2:
        return None
    return _one_axis(lengths) if _counts_up(counted) else None


def _before_layout(mask: ir.Value) -> ir.Value:
    """What a mask was before it was spread out: `[B, 1 …, T]`, in the same order."""
    value, may_expand = mask, True
    while True:
        node = value.producer()
        source = node.inputs[0] if node is not None and node.domain == "" and node.inputs else None
        if node is None or source is None:
            return value
        before, after = dims(source), dims(value)
        ends = len(before) > 1 and same_size(before[0], after[0]) and same_size(before[-1], after[-1])
        plain = all(size == 1 for size in before[1:-1])
        aligned = len(before) == len(after)  # Expand counts axes from the last: a shorter mask has no batch
        if node.op_type == "Expand" and may_expand and ends and plain and aligned:
            value = source
        elif node.op_type in _LAYOUT and ends and plain and all(size == 1 for size in after[1:-1]):
            value, may_expand = source, False
        else:
            return value


def _comparison(mask: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """The two sides of "counted < lengths" behind a mask, however it is written."""
    where = made_by(mask, "Where")
    if where is not None:
        condition, numbers = (
            where.inputs[0],
            (constant_number(where.inputs[1]), constant_number(where.inputs[2])),
        )
        if numbers == (0.0, -math.inf):
            return _compared(condition)
        return _compared(condition, inverted=True) if numbers == (-math.inf, 0.0) else None
    return _compared(mask)


def _compared(value: ir.Value | None, *, inverted: bool = False) -> tuple[ir.Value, ir.Value] | None:
    node = None if value is None else value.producer()
    if node is None or node.domain != "":
        return None
    if node.op_type == "Not":
        return _compared(node.inputs[0], inverted=not inverted)
    # What is not ≥ is <, and what is not ≤ is >.
    kind = _OPPOSITE.get(node.op_type) if inverted else node.op_type
    if kind not in (_LESS, _GREATER):
        return None
    one, other = node.inputs
    if one is None or other is None:
        return None
    return (one, other) if kind == _LESS else (other, one)


def _counts_up(value: ir.Value) -> bool:
    """Whether a value is 0, 1, 2 … along its last axis, and has no other."""
    shape = dims(value)
    if not shape or any(size != 1 for size in shape[:-1]):
        return False
    node = value.producer()
    tensor = constant(value)
    if tensor is not None:
        return bool(np.array_equal(tensor.numpy().reshape(-1), np.arange(tensor.size)))
    if node is None or node.domain != "":
        return False
    if node.op_type == "Range":
        return constant_number(node.inputs[0]) == 0.0 and constant_number(node.inputs[2]) == 1.0
    source = node.inputs[0] if node.op_type in _LAYOUT or _keeps_whole(node) else None
    return source is not None and _counts_up(source)


def _one_axis(lengths: ir.Value) -> ir.Value | None:
    """The value of one axis that lengths were before axes of one were added."""
    value: ir.Value | None = lengths
    while value is not None and value.dtype in _WHOLE:
        if len(dims(value)) == 1:
            return value
        node = value.producer()
        if node is None or node.domain != "" or not (node.op_type in _LAYOUT or _keeps_whole(node)):
            return None
        value = node.inputs[0]
    return None


def _keeps_whole(node: ir.Node) -> bool:
    """Whether a node casts whole numbers to whole numbers."""
    source = node.inputs[0] if node.op_type == "Cast" else None
    return source is not None and source.dtype in _WHOLE and node.outputs[0].dtype in _WHOLE


# -- Which keys a query sees, in the plugin's words: diagonal, window, key lengths, and a bias  ----


class Diagonal(NamedTuple):
    """The attributes `causal`, `left_window` and `right_window` of the node."""

    causal: int = NONE
    left: int = NO_WINDOW
    right: int = NO_WINDOW


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What hides keys from queries.

    Args:
        diagonal: Causal and window.
        key_lengths: Valid keys of each batch row, int32 `[B]`.
        bias: Added to the scores, `[B or 1, Hq or 1, S, T]`.
        open_rows: `[·, ·, ·, 1]`, False for queries that the bias leaves no key; the plugin itself cares for
            those of diagonal and lengths.
        heads: Size of the second axis of `open_rows`.
    """

    diagonal: Diagonal
    key_lengths: ir.Value | None = None
    bias: ir.Value | None = None
    open_rows: ir.Value | None = None
    heads: int = 1


def read_sight(
    b: NodeBuilder,
    call: AttentionCall,
    S: Size,
    T: Size,
    *,
    in_cache: bool = False,
) -> Sight:
    """Say in the plugin's words what an attention sees.

    Args:
        b: Builder of the new nodes.
        call: The attention.
        S: Number of queries.
        T: Number of keys, past included.
        in_cache: Whether the plugin writes the cache, and so knows the key lengths without being told.
    """
    diagonal = diagonal_of(call)
    if diagonal is None or _has_no_kernel(call, diagonal):
        return _all_in_bias(b, call, S, T)
    counted = None if in_cache else call.lengths
    prefix = _prefix(call, diagonal, T)
    mask = None if prefix is not None else given_mask(b, call, T)
    if prefix is not None:
        counted = prefix
    key_lengths = None if counted is None else as_int32(b, before_casts(counted), name="key_lengths")
    if mask is None:
        return Sight(diagonal=diagonal, key_lengths=key_lengths)
    whole = with_geometry(b, call, mask, S, T)
    return Sight(
        diagonal=diagonal,
        key_lengths=key_lengths,
        bias=_bias(b, call, mask, S),
        open_rows=attending_queries(b, call, whole),
        heads=mask.heads,
    )


def _has_no_kernel(call: AttentionCall, diagonal: Diagonal) -> bool:
    """Whether cuDNN would have to end a diagonal at the last counted key and add a bias: it cannot."""
    return diagonal.causal == BOTTOM_RIGHT and call.lengths is not None and call.mask is not None


def diagonal_of(call: AttentionCall) -> Diagonal | None:
    """Causal and window as attributes; None where the plugin aligns them otherwise than ONNX."""
    attention = call.attention
    # A window that ends with the query's own key is causal, by whatever name.
    causal = attention.is_causal or attention.right_window == 0
    if not causal and not attention.has_window:
        return Diagonal()
    left, right = attention.left_window, NO_WINDOW if causal else attention.right_window
    if call.past_key is None and call.lengths is None:
        return Diagonal(TOP_LEFT if causal else NONE, left, right)
    # Behind a past, or up to the last valid key: the lower right corner, if every query has its own key.
    aligned = call.lengths is not None or call.is_square
    return Diagonal(BOTTOM_RIGHT, left, right) if causal and aligned else None


def _prefix(call: AttentionCall, diagonal: Diagonal, T: Size) -> ir.Value | None:
    """The lengths behind a mask that says "keys before lengths[b]" and nothing else."""
    columns = (call.attention.mask_dims or (None,))[-1]
    if call.mask is None or call.lengths is not None or may_be_short(call, columns, T):
        return None
    # In the lower right corner the diagonal would end at the last valid key; ONNX lets it end at the last.
    return None if diagonal.causal == BOTTOM_RIGHT else prefix_lengths(call.mask, batch=call.attention.B)


def _all_in_bias(b: NodeBuilder, call: AttentionCall, S: Size, T: Size) -> Sight:
    mask = with_geometry(b, call, given_mask(b, call, T), S, T)
    if mask is None:
        return Sight(diagonal=Diagonal())
    return Sight(
        diagonal=Diagonal(),
        bias=_bias(b, call, mask, S),
        open_rows=attending_queries(b, call, mask),
        heads=mask.heads,
    )


def _bias(b: NodeBuilder, call: AttentionCall, mask: Mask, S: Size) -> ir.Value:
    """The bias with a row for each query: the kernels do not broadcast over queries."""
    bias = bias_of(b, call, mask)
    rows = (call.attention.mask_dims or ())[-2:-1]
    certain = not mask.one_row and (
        call.mask is None or same_size(call.attention.S, rows[0] if rows else None)
    )
    return bias if certain else b.expand(bias, 1, 1, S, 1, name="bias_of_each_query")


def as_int32(b: NodeBuilder, value: ir.Value, *, name: str) -> ir.Value:
    """Whole numbers as int32, with their shape."""
    narrow = b.cast(value, ir.DataType.INT32, name=name)
    narrow.dtype, narrow.shape = ir.DataType.INT32, value.shape
    return narrow


def before_casts(value: ir.Value) -> ir.Value:
    """The int32 that a value was widened from, where it was; else the value itself."""
    source = input_at(made_by(value, "Cast"), 0)
    return source if source is not None and source.dtype == ir.DataType.INT32 else value


# -- The plugin's attention node itself, and what follows it ---------------------------------------


class WrittenCache(NamedTuple):
    """A static cache that the node writes: `[B, Hkv, T, D]` twice, and int32 `[B]`: rows before the call."""

    key: ir.Value
    value: ir.Value
    starts: ir.Value


def write_attention(
    b: NodeBuilder,
    call: AttentionCall,
    operands: Operands,
    sight: Sight,
    cache: WrittenCache | None = None,
) -> Sequence[ir.Value]:
    """Write the node; its outputs, the first of them `[B, S, Hq·Dv]`.

    Args:
        b: Builder of the new nodes.
        call: The attention.
        operands: Where its queries, keys and values lie.
        sight: What hides keys.
        cache: The cache that it writes, where it does.
    """
    optional = [sight.bias, sight.key_lengths, *(cache or ())]
    attributes = {
        "query_heads": call.Hq,
        "key_heads": call.Hkv,
        "head_size": call.D,
        "value_size": call.Dv,
        "scale": float(call.scale),
        "causal": sight.diagonal.causal,
        "left_window": sight.diagonal.left,
        "right_window": sight.diagonal.right,
        "sources": list(operands.sources),
        "offsets": list(operands.offsets),
        "has_bias": int(sight.bias is not None),
        "has_key_lengths": int(sight.key_lengths is not None),
        "has_gates": 0,
        "has_cache": int(cache is not None),
        **lookup_attributes(),
    }
    outputs = b.node(
        OP_TYPE,
        [*operands.tensors, *(value for value in optional if value is not None)],
        outputs=1 if cache is None else 3,
        domain=DOMAIN,
        name=b.prefix,
        attributes=attributes,
    )
    y = outputs[0]
    y.dtype, y.shape = call.dtype, ir.Shape([call.attention.B, call.attention.S, call.Hq * call.Dv])
    return outputs


def finished(b: NodeBuilder, call: AttentionCall, sight: Sight, y: ir.Value) -> ir.Value:
    """Zero the rows that the bias leaves no key, and bring the result to the rank the node was written in."""
    y = _zero_masked_queries(b, call, sight, y)
    return y if call.attention.rank == 3 else split_heads(b, y, call.Hq, call.Dv)


def _zero_masked_queries(b: NodeBuilder, call: AttentionCall, sight: Sight, y: ir.Value) -> ir.Value:
    rows = sight.open_rows
    if rows is None:
        return y
    if sight.heads == 1:
        kept = zero_masked_queries(b, call, b.op("Squeeze", rows, b.ints(1)), y)
    else:
        # Where heads differ, they get an axis of their own; the numbers stay where they are.
        apart = b.reshape(y, 0, 0, call.Hq, call.Dv)
        kept = zero_masked_queries(b, call, b.transpose(rows, 0, 2, 1, 3), apart)
        kept = b.reshape(kept, 0, 0, call.Hq * call.Dv, name="closed_rows_merged")
    kept.dtype, kept.shape = call.dtype, y.shape
    return kept


# -- Attention as one node of our TensorRT plugin (`plugin_node`), which reads projections wher ----


@dataclass(frozen=True, kw_only=True)
class PluginOptions:
    """What goes into the plugin's nodes.

    Args:
        linear: Write the projections around an attention as nodes of the plugin, which accumulate in FP32.
        opset: The highest opset the result may need; None keeps the model's own.
    """

    linear: bool = False
    opset: int | None = 17

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {}


def lower_to_plugin(call: AttentionCall, b: NodeBuilder, options: PluginOptions) -> dict[int, ir.Value]:
    """Write one attention as a node of the plugin; the outputs by position."""
    refuse_what_is_missing(call)
    # The rows of a past are joined to the new ones first; without a past these heads serve `present` only.
    heads = split_inputs(b, call)
    query = place_of(call.q, call.Hq, call.D)
    if call.past_key is None:
        key, value = place_of(call.k, call.Hkv, call.D), place_of(call.v, call.Hkv, call.Dv)
        T = key.length(b)
    else:
        key, value, T = Place(heads.k, 0), Place(heads.v, 0), key_length(b, call)
    S = query.length(b)
    sight = read_sight(b, call, S, T)
    y = write_attention(b, call, operands_of((query, key, value)), sight)[0]
    return {Y: finished(b, call, sight, y), PRESENT_KEY: heads.k, PRESENT_VALUE: heads.v}


# -- A static cache that the plugin's attention node writes itself: nothing is copied, nobody e ----


def prepare(model: ir.Model, options: PluginOptions, *, dialect: str) -> ir.Model:
    """Pack projections, and write every attention with a preallocated cache as one node that appends to it.

    A cache of another pattern is updated with ScatterND before the attention. The model is not changed.
    """
    lowered = infer_shapes(pack_projections(model))

    def wanted(node: ir.Node) -> CachedAttention | None:
        cache = read_cache(node)
        if not isinstance(cache, CachedAttention) or cache.kind != STATIC:
            return None
        return None if diagonal_of(read_call(node, opset=None, dialect=dialect)) is None else cache

    def write(call: AttentionCall, b: NodeBuilder, cache: CachedAttention) -> None:
        refuse_what_is_missing(call)
        if cache.starts is None:
            raise call.refuse("static cache without lengths", hint="dialect primitives")
        places = (
            place_of(call.q, call.Hq, call.D),
            place_of(cache.new_key, call.Hkv, call.D),
            place_of(cache.new_value, call.Hkv, call.Dv),
        )
        S, T = places[0].length(b), b.size(cache.past_key, 2)
        sight = read_sight(b, call, S, T, in_cache=True)
        starts = as_int32(b, before_casts(cache.starts), name="starts")
        written = WrittenCache(cache.past_key, cache.past_value, starts)
        y, *states = write_attention(b, call, operands_of(places), sight, written)
        take_over(lowered, call, b, cache, finished(b, call, sight, y), states)
        inputs = (cache.past_key, cache.past_value)
        in_place = {str(new.name): str(past.name) for new, past in zip(states, inputs, strict=True)}
        note_in_place(lowered, in_place)

    return rewrite_caches(lowered, wanted, write, dialect=dialect)


# -- Factors on the heads of each token behind an attention, taken into the node: heads with 0  ----

_HEAD_SIZES = (32, 64, 96, 128)
_OTHERS = ("has_bias", "has_cache", "has_gates")


def take_gates(attention: ir.Node) -> bool:
    """Give the gates after an attention to the plugin's node, which is changed; whether there were any."""
    own = attention.attributes
    windows = [own.get_int(name, NO_WINDOW) for name in ("left_window", "right_window")]
    plain = not any(own.get_int(name, 0) for name in _OTHERS) and windows == [NO_WINDOW, NO_WINDOW]
    found = _gated(attention) if plain and has_gate_kernel(attention) else None
    if found is None:
        return False
    split, matmul, factor = found
    count = len(attention.inputs)
    gates = _without_last_axis(attention, factor, matmul)
    attention.resize_inputs(count + 1)
    attention.replace_input_with(count, gates)
    attention.attributes.add(ir.AttrInt64("has_gates", 1))
    matmul.outputs[0].replace_all_uses_with(split.outputs[0])
    if attention.graph is not None:
        attention.graph.sort()  # what computes the gates may stand behind the attention
    return True


def has_gate_kernel(attention: ir.Node) -> bool:
    """Whether there is a kernel with gates for the head sizes of an attention."""
    own = attention.attributes
    size = own.get_int("head_size", 0)
    return size in _HEAD_SIZES and own.get_int("value_size", 0) == size and own.get_float("scale", 0.0) > 0.0


def _gated(attention: ir.Node) -> tuple[ir.Node, ir.Node, ir.Value] | None:
    """The Reshape, the Mul and the factor `[B, S, Hq, 1]`, where nobody else reads the heads.

    So the factor cannot hang on the attention, and can be an input of it.
    """
    rows = attention.outputs[0]
    split = _only_reader(rows)
    matmul = None if split is None or split.op_type != "Reshape" else _only_reader(split.outputs[0])
    if split is None or matmul is None or matmul.op_type != "Mul" or matmul.outputs[0].is_graph_output():
        return None
    heads, size = (attention.attributes.get_int(name, 0) for name in ("query_heads", "value_size"))
    B, S, _ = dims(rows)
    if dims(split.outputs[0])[2:] != (heads, size):
        return None
    for factor in matmul.inputs:
        shape = dims(factor)
        if factor is None or factor is split.outputs[0] or shape[2:] != (heads, 1):
            continue
        if same_size(shape[0], B) and same_size(shape[1], S):
            return split, matmul, factor
    return None


def _only_reader(value: ir.Value) -> ir.Node | None:
    uses = list(value.uses())
    alone = len(uses) == 1 and not value.is_graph_output() and uses[0].node.domain == ""
    return uses[0].node if alone else None


def _without_last_axis(attention: ir.Node, factor: ir.Value, matmul: ir.Node) -> ir.Value:
    """The gates `[B, S, Hq]`: as they were before the last axis was added, else with it taken off."""
    widened = made_by(factor, "Unsqueeze")
    if widened is not None and constant_ints(widened, 1) in ((-1,), (3,)) and widened.inputs[0] is not None:
        return widened.inputs[0]
    b = NodeBuilder(f"{attention.name}_gates")
    heads = attention.attributes.get_int("query_heads", 0) or 0
    gates = b.reshape(factor, 0, 0, heads)
    gates.type, gates.shape = factor.type, ir.Shape(dims(factor)[:3])
    if matmul.graph is not None:
        matmul.graph.insert_before(matmul, b.nodes)
    return gates


# -- Projections as nodes of the plugin, which sum in FP32; TensorRT 8.6 picks kernels that sum ----


# What may stand between an attention and the projection of its result.
_BETWEEN = frozenset({"Cast", "Identity", "Mul", "Reshape", "Squeeze", "Transpose", "Unsqueeze", "Where"})


def write_linear(model: ir.Model) -> None:
    """Write matmuls with constant weights around an attention, biases included, as nodes of the plugin."""
    taken = names_in(model)
    for matmul in dict.fromkeys(_around_attention(list(model.graph.all_nodes()))):
        projection = projection_at(matmul)
        if projection is not None and dims(projection.x) and has_linear_kernel(projection):
            b = NodeBuilder(prefix_within(matmul.name or projection.y.name or LINEAR, taken))
            _write(_with_whole_bias(projection), b)
            import_domains(model, b)


def _around_attention(nodes: list[ir.Node]) -> Iterator[ir.Node]:
    for attention in filter(is_plugin_attention, nodes):
        operands = 1 + max(attention.attributes["sources"].as_ints())
        for value in attention.inputs[:operands]:
            yield from matmuls_behind(value) if value is not None else ()
        yield from _products_of(attention.outputs[0])


def _products_of(rows: ir.Value) -> Iterator[ir.Node]:
    """The matmuls that read the result of an attention."""
    pending = [rows]
    while pending:
        for use in pending.pop().uses():
            if use.node.op_type == "MatMul" and use.idx == 0:
                yield use.node
            elif use.node.op_type in _BETWEEN and use.node.domain == "":
                pending += use.node.outputs


def has_linear_kernel(projection: Projection) -> bool:
    """Whether the plugin has a GEMM for the types of a projection."""
    types = {projection.x.dtype, projection.weight.dtype}
    return types in ({ir.DataType.FLOAT16}, {ir.DataType.BFLOAT16})


def _with_whole_bias(projection: Projection) -> Projection:
    """The projection without a bias that is not one number for each column: that stays an Add."""
    columns = dims(projection.weight)[1:]
    whole = projection.bias is None or dims(projection.bias) == columns
    return projection if whole else replace(projection, add=None, bias=None)


def _write(projection: Projection, b: NodeBuilder) -> None:
    inputs = [projection.x, projection.weight, *([] if projection.bias is None else [projection.bias])]
    attributes = {"has_bias": int(projection.bias is not None), **lookup_attributes()}
    y = b.node(LINEAR, inputs, domain=DOMAIN, name=b.prefix, attributes=attributes)[0]
    graph = projection.matmul.graph
    replace_node(projection.add or projection.matmul, b, {0: y})
    if projection.add is not None and graph is not None:
        graph.remove(projection.matmul, safe=True)


# -- Reshapes and transposes behind the plugin's attention that undo each other --------------------


def cancel_turns(attention: ir.Node) -> None:
    """Let readers of the attention that turn its heads back read what there was before."""
    for rows in _rows_of(attention):
        _cancel_behind(rows)


def _rows_of(attention: ir.Node) -> list[ir.Value]:
    """The rows that the node gives out, and those rows with the empty ones set to zero."""
    rows = attention.outputs[0]
    found, pending = [rows], [rows]
    while pending:
        for use in pending.pop().uses():
            same = use.node.outputs[0]
            if use.node.op_type == "Where" or (use.node.op_type == "Reshape" and use.idx == 0):
                pending.append(same)
                found += [same] if _is_whole_again(rows, same) else []
    return found


def _cancel_behind(rows: ir.Value) -> None:
    for split in _readers(rows, "Reshape"):
        for turn in _readers(split.outputs[0], "Transpose"):
            if perm(turn) != TURN:
                continue
            for back in _readers(turn.outputs[0], "Transpose"):
                if perm(back) == TURN:
                    _take_over(back.outputs[0], split.outputs[0])
        for merge in _readers(split.outputs[0], "Reshape"):
            if _is_whole_again(rows, merge.outputs[0]):
                _take_over(merge.outputs[0], rows)


def _readers(value: ir.Value, op_type: str) -> list[ir.Node]:
    nodes = (use.node for use in value.uses() if use.idx == 0)
    return [node for node in nodes if is_op(node, op_type)]


def _is_whole_again(rows: ir.Value, merged: ir.Value) -> bool:
    """Whether a reshape of rows gives the rows back: same width, and the same batch or the same length."""
    before, after = dims(rows), dims(merged)
    if rank(merged) != 3 or not same_size(before[2], after[2]):
        return False
    return any(same_size(before[at], after[at]) for at in (0, 1))


def _take_over(old: ir.Value, new: ir.Value) -> None:
    """Let everybody read another value; a graph output keeps its own name, and its own node."""
    if old.is_graph_output():
        return
    old.replace_all_uses_with(new)


# -- What is left to do when every attention is a node of the plugin: turns that cancel, gates, ----


def finish(model: ir.Model, options: PluginOptions) -> None:
    """Take away what the attention nodes make superfluous, and write projections as the options ask.

    Args:
        model: The model, every attention of it lowered. It is changed.
        options: Options of the lowering.
    """
    attentions = [node for node in model.graph.all_nodes() if is_plugin_attention(node)]
    for node in attentions:
        cancel_turns(node)
    RemoveUnusedNodesPass()(model)  # gates are taken only where nobody else reads the heads
    for node in attentions:
        if take_gates(node):
            cancel_turns(node)
    if options.linear:
        write_linear(model)
    RemoveUnusedNodesPass()(model)
