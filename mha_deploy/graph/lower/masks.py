"""Which keys a query attends to, as explicit tensors.

In ONNX's Attention this follows from the mask, `is_causal`, the window and the key lengths. Here it becomes
at most two 4-D tensors that broadcast to `[B, Hq, S, T]`: `visible` (boolean) and `additive` (the numbers of
the mask). The bias on the scores and the fully masked queries follow from these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce

import ml_dtypes
import onnx_ir as ir

from mha_deploy.graph.ir import NodeBuilder, Size, same_size
from mha_deploy.graph.lower.call import AttentionCall
from mha_deploy.model.masking import ABSORBS_ANY, WRITTEN_HALF

NEG_INF = float("-inf")

_SMALL_BIAS = 256.0
"""A bias of at most this size is added to FP16 scores as it is."""


@dataclass(frozen=True, kw_only=True)
class Mask:
    """A mask: `visible` is True where the query attends to the key, `additive` is added to the scores.

    `heads` is 1, or Hq where heads differ; with `one_row` the mask is the same for all queries.
    """

    visible: ir.Value | None
    additive: ir.Value | None
    heads: int
    one_row: bool


def read_mask(b: NodeBuilder, call: AttentionCall, S: Size, T: Size) -> Mask | None:
    """The whole mask over T keys, past included; None where every query attends to every key."""
    return with_geometry(b, call, input_mask(b, call, T), S, T)


def input_mask(b: NodeBuilder, call: AttentionCall, T: Size) -> Mask | None:
    """The mask input alone, without causal, window and key lengths, with all four axes; None without one."""
    mask, dims, kind = call.mask, call.attention.mask_dims or (), call.attention.mask
    if mask is None:
        return None
    dtype, missing_axes = _dtype(mask), range(4 - len(dims))
    dims = (*(1 for _ in missing_axes), *dims)
    if missing_axes:
        mask = b.unsqueeze(mask, *missing_axes)
    if not isinstance(dims[1], int):
        mask = b.expand(mask, 1, call.Hq, 1, 1)
    if kind == "int":
        dtype = ir.DataType.FLOAT  # integers have no -inf, and FP16 has not all of them
        mask = b.op("Cast", mask, to=int(dtype))
    mask.dtype = dtype
    if call.attention.mask_may_be_short:  # from opset 24 on: the keys beyond it are masked
        if isinstance(dims[3], int) and isinstance(T, int):
            missing: Size = T - dims[3]
        else:
            missing = b.op("Sub", b.as_tensor(T), b.op("Gather", b.op("Shape", mask), b.ints(3)))
        pads = b.shape_of(0, 0, 0, 0, 0, 0, 0, missing)
        if kind == "bool":  # TensorRT pads numbers, not booleans
            numbers = b.op("Cast", mask, to=int(ir.DataType.FLOAT))
            padded = b.op("Pad", numbers, pads, b.constant(0.0, ir.DataType.FLOAT))
            mask = b.op("Cast", padded, to=int(ir.DataType.BOOL), name="mask_padded")
        else:
            mask = b.op("Pad", mask, pads, b.constant(NEG_INF, dtype), name="mask_padded")
            mask.dtype = dtype
    visible, additive = (mask, None) if kind == "bool" else (None, mask)
    heads = 1 if dims[1] == 1 else call.Hq
    return Mask(visible=visible, additive=additive, heads=heads, one_row=dims[2] == 1)


def with_geometry(b: NodeBuilder, call: AttentionCall, mask: Mask | None, S: Size, T: Size) -> Mask | None:
    """The mask input combined with causality, window and key lengths."""
    attention, back = call.attention, call.attention.left_window
    # How many keys after its own position a query attends to; None for all.
    ahead = attention.right_window if attention.right_window >= 0 else None
    if attention.is_causal:  # one new token: its own key is the last one
        ahead = None if attention.S == attention.T == 1 and call.lengths is None else 0
    alike = (ahead is None and back < 0) or call.attention.S == 1
    key, tests = None, list[ir.Value]()
    if ahead is not None or back >= 0 or call.lengths is not None:
        key = positions_along(b, T, axis=3)
    if ahead is not None or back >= 0:
        # The position of each query among the keys: after the past, or at the end of the valid keys.
        own = positions_along(b, S, axis=2)
        if call.past_key is not None:
            own = b.op("Add", own, b.as_tensor(b.size(call.past_key, 2)))
        elif call.lengths is not None:
            own = b.op("Add", own, b.op("Sub", b.reshape(call.lengths, -1, 1, 1, 1), b.as_tensor(S)))
        if ahead is not None:
            tests.append(b.op("Less", key, b.op("Add", own, b.ints(ahead + 1))))
        if back >= 0:
            tests.append(b.op("Greater", key, b.op("Add", own, b.ints(-back - 1))))
    # A causal query attends to keys up to (valid keys − S + i), never past the last valid one.
    if call.lengths is not None and ahead != 0:
        tests.append(b.op("Less", key, b.reshape(call.lengths, -1, 1, 1, 1)))
    geometry = reduce(lambda one, other: b.op("And", one, other), tests) if tests else None
    if mask is None:
        return None if geometry is None else Mask(visible=geometry, additive=None, heads=1, one_row=alike)
    return replace(mask, visible=_both(b, mask.visible, geometry), one_row=mask.one_row and alike)


def positions_along(b: NodeBuilder, size: Size, *, axis: int) -> ir.Value:
    """0, 1, 2 … along one axis of a 4-D tensor."""
    return b.reshape(b.count_up(size), *(-1 if at == axis else 1 for at in range(4)))


def _both(b: NodeBuilder, one: ir.Value | None, other: ir.Value | None) -> ir.Value | None:
    if one is None or other is None:
        return other if one is None else one
    return b.op("And", one, other, name="visible")


def bias_of(b: NodeBuilder, call: AttentionCall, mask: Mask, *, in_score_type: bool = False) -> ir.Value:
    """The bias on the scores before a softmax, in their type.

    The largest bias of a query is subtracted where it is large and would overflow, which a softmax cancels:
    in a wider type than the scores, and in FP16 if the sum is FP16 as well (`in_score_type`).
    """
    numbers, is_fp16 = mask.additive, call.dtype == ir.DataType.FLOAT16
    if numbers is None and is_fp16:
        # Any number of FP16 would let a masked key win over a visible one whose score is low enough. The
        # softmax of a fully masked query is then NaN, which `zero_masked_queries` replaces. TensorRT-RTX
        # 1.7.1 turns a Where of 0 and -inf into a list of blocks, with eight more kernels.
        return b.op("Log", b.op("Cast", mask.visible, to=int(call.dtype)), name="mask_bias")
    if numbers is None:
        return plain_bias(b, call, mask, masked=ABSORBS_ANY)  # a finite number keeps a softmax free of NaN
    if not (in_score_type and is_fp16) and not narrows(call, mask):
        return plain_bias(b, call, mask)
    return _to_score_type(b, call, _without_large_top(b, wide_bias(b, mask, numbers)))


def of_each_query(
    b: NodeBuilder, call: AttentionCall, mask: Mask, bias: ir.Value, S: Size, name: str | None = None
) -> ir.Value:
    """The bias with a row for each of S queries, for kernels that do not broadcast over queries."""
    shape = call.attention.mask_dims or ()
    has_rows = call.mask is None or (len(shape) > 1 and same_size(call.attention.S, shape[-2]))
    return bias if has_rows and not mask.one_row else b.expand(bias, 1, 1, S, 1, name=name)


def wide_bias(b: NodeBuilder, mask: Mask, numbers: ir.Value) -> ir.Value:
    """The numbers of a mask in their own type, and -inf for masked keys."""
    if mask.visible is None:
        return numbers
    dtype = _dtype(numbers)
    bias = b.op("Where", mask.visible, numbers, b.constant(NEG_INF, dtype))
    bias.dtype = dtype
    return bias


def without_lost_queries(b: NodeBuilder, call: AttentionCall, mask: Mask | None, q: ir.Value) -> ir.Value:
    """Queries `[B, Hq, S, D]`: zero where the largest number of the mask leaves nothing of the scores.

    That is below -1e30 in a mask wider than the scores: shifted into their type it would leave the scores,
    and the query, which averages all values, would attend by them. In an FP16 softmax that adds the mask as
    it is, it is near the lowest number of FP16: such a number plus a score may overflow, and the softmax of a
    query that has it for every key is NaN. With a query of zeros the result is finite.
    """
    if mask is None or mask.additive is None:
        return q
    dtype, wide = _dtype(mask.additive), narrows(call, mask)
    if call.attention.mask == "int" if wide else call.dtype != ir.DataType.FLOAT16:
        return q  # no integer is that low
    numbers = wide_bias(b, mask, mask.additive) if wide else mask.additive
    top = b.op("ReduceMax", numbers, b.ints(-1), keepdims=1)
    least = b.constant(ABSORBS_ANY if wide else _lowest(dtype) / 2, dtype)
    lost = b.op("Less", top, least, name="query_is_lost")
    return b.op("Where", lost, b.constant(0.0, call.dtype), q, name="q_kept")


def is_wider(call: AttentionCall) -> bool:
    """Whether the mask input is of a floating-point type with a larger range than the scores."""
    is_float = call.mask is not None and call.attention.mask == "float"
    return is_float and _lowest(_dtype(call.mask)) < _lowest(call.dtype)  # type: ignore[arg-type]


def narrows(call: AttentionCall, mask: Mask) -> bool:
    """Whether the numbers of a mask may be beyond the range of the scores."""
    return mask.additive is not None and _lowest(_dtype(mask.additive)) < _lowest(call.dtype)


def plain_bias(b: NodeBuilder, call: AttentionCall, mask: Mask, *, masked: float = NEG_INF) -> ir.Value:
    """The numbers of the mask in the type of the scores, and `masked` for masked keys."""
    numbers = b.constant(0.0, call.dtype)
    if mask.additive is not None:
        numbers = _to_score_type(b, call, mask.additive)
    if mask.visible is None:
        return numbers
    return b.op("Where", mask.visible, numbers, b.constant(masked, call.dtype), name="mask_bias")


def _without_large_top(b: NodeBuilder, numbers: ir.Value) -> ir.Value:
    """The numbers of each query minus their largest, if that is finite and large.

    A number that would swallow the scores in float32 does so in FP16 as well: the rest of it is -32768.
    """
    dtype = _dtype(numbers)
    top = b.op("ReduceMax", numbers, b.ints(-1), keepdims=1)
    top = b.op("Clip", top, b.constant(_lowest(dtype), dtype))
    small = b.op("Less", b.op("Abs", top), b.constant(_SMALL_BIAS, dtype))
    shifted = b.op("Sub", numbers, b.op("Where", small, b.constant(0.0, dtype), top), name="mask_shifted")
    if dtype != ir.DataType.FLOAT16:
        swallows = b.op("Less", top, b.constant(ABSORBS_ANY, dtype))
        rest = b.op("Where", swallows, b.constant(WRITTEN_HALF, dtype), b.constant(0.0, dtype))
        shifted = b.op("Add", shifted, rest)
    shifted.dtype = dtype
    return shifted


def attending_queries(b: NodeBuilder, call: AttentionCall, mask: Mask | None) -> ir.Value | None:
    """`[·, ·, ·, 1]`, False for fully masked queries; None where there are certainly none."""
    attention = call.attention
    # A window can be entirely beyond the last key, unless every query has a key of its own.
    beyond = attention.has_window and not call.is_square
    if mask is None or not (beyond or attention.mask != "none" or attention.has_nonpad_kv_seqlen):
        return None
    visible = mask.visible
    if mask.additive is not None:
        dtype = _dtype(mask.additive)
        # Less than the lowest finite number is -inf: this comparison exists in every opset and runtime.
        masked = b.op("Less", mask.additive, b.constant(_lowest(dtype), dtype))
        visible = _both(b, b.op("Not", masked), visible)
    # Maximum over booleans came with opset 20 only, so it is taken over numbers.
    count = b.op("ReduceMax", b.op("Cast", visible, to=int(ir.DataType.FLOAT)), b.ints(-1), keepdims=1)
    return b.op("Cast", count, to=int(ir.DataType.BOOL), name="query_attends")


def zero_masked_queries(b: NodeBuilder, call: AttentionCall, rows: ir.Value | None, x: ir.Value) -> ir.Value:
    """Set the output of fully masked queries to zero, whatever was computed for them."""
    if rows is None:
        return x
    return b.op("Where", rows, x, b.constant(0.0, call.dtype), name="fully_masked_to_zero")


def _to_score_type(b: NodeBuilder, call: AttentionCall, mask: ir.Value) -> ir.Value:
    """Cast a mask to the type of the scores; what is below its range becomes -inf.

    The largest bias of a query is near 0 then, and a saturated one would let a high score win over that key.
    """
    dtype = _dtype(mask)
    if dtype == call.dtype:
        return mask
    if _lowest(dtype) >= _lowest(call.dtype):
        return b.cast(mask, call.dtype, name="mask_cast")
    low, high = (b.constant(sign * _lowest(call.dtype), dtype) for sign in (1, -1))
    finite = b.cast(b.op("Clip", mask, low, high), call.dtype, name="mask_cast")
    masked = b.op("Less", mask, low)
    return b.op("Where", masked, b.constant(NEG_INF, call.dtype), finite, name="mask_cast")


def _dtype(value: ir.Value) -> ir.DataType:
    return ir.DataType.UNDEFINED if value.dtype is None else value.dtype


def _lowest(dtype: ir.DataType) -> float:
    return float(ml_dtypes.finfo(dtype.numpy()).min)
