"""ONNX's `Attention` node: read its attributes and inputs, and write one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_deploy.bundle.manifest import AttentionNode
from mha_deploy.graph.ir import (
    HALVES,
    Dim,
    NodeBuilder,
    constant,
    dim,
    dims,
    input_at,
    is_op,
    made_by,
    node_name,
    output_at,
    rank,
)
from mha_deploy.graph.roles import CARRIES, MOVES

# -- The attributes and inputs of one ONNX `Attention` node, read into a record --------------------

# The inputs and outputs of Attention, by position.
Q, K, V, MASK, PAST_KEY, PAST_VALUE, NONPAD_KV_SEQLEN = range(7)
Y, PRESENT_KEY, PRESENT_VALUE, QK_OUTPUT = range(4)

INPUT_ROLES = ("Q", "K", "V", "mask", "past_key", "past_value", "lengths")
"""What the inputs are called, in their order."""

OF_WEIGHTS = 3
"""The `qk_matmul_output_mode` whose output is the weights: the result of the softmax."""

UNBOUNDED = -1
"""The window size without a limit."""

_SHORT_NAMES = {ir.DataType.FLOAT16: "fp16", ir.DataType.BFLOAT16: "bf16"}
_SHORT_NAMES |= {ir.DataType.FLOAT: "fp32", ir.DataType.DOUBLE: "fp64"}


def is_attention(node: ir.Node) -> bool:
    """Whether this is ONNX's own Attention operator."""
    return is_op(node, "Attention")


def attention_nodes(model: ir.Model) -> list[AttentionNode]:
    """Read every `Attention` node of a model: main graph, subgraphs and functions."""
    main = (model.graph.name or "main", model.opset_imports, model.graph.all_nodes())
    functions = ((each.name, each.opset_imports, each.all_nodes()) for each in model.functions.values())
    return [
        read_attention(node, opset=opsets.get(""), graph=name)
        for name, opsets, nodes in (main, *functions)
        for node in nodes
        if is_attention(node)
    ]


def read_attention(node: ir.Node, *, opset: int | None = None, graph: str = "") -> AttentionNode:
    """Read one `Attention` node; `opset` is that of its graph, for a node without its own version."""
    q, mask, quantized = input_at(node, Q), input_at(node, MASK), read_quantized(node)
    precision = _attribute(node, "softmax_precision", None)
    return AttentionNode(
        name=node_name(node),
        graph=graph,
        opset=node.version or opset,
        dtype=None if q is None else short_dtype(q.dtype),
        **_sizes(node),
        scale=_attribute(node, "scale", None),
        is_causal=_attribute(node, "is_causal", 0) == 1,
        mask=_mask_kind(mask),
        mask_dtype=None if mask is None else short_dtype(mask.dtype),
        mask_dims=None if rank(mask) is None else dims(mask),
        has_past=input_at(node, PAST_KEY) is not None,
        past_length=dim(input_at(node, PAST_KEY), 2),
        has_present=any(output_at(node, at) is not None for at in (PRESENT_KEY, PRESENT_VALUE)),
        has_nonpad_kv_seqlen=input_at(node, NONPAD_KV_SEQLEN) is not None,
        qk_output_mode=_attribute(node, "qk_matmul_output_mode", 0) if output_at(node, QK_OUTPUT) else None,
        softcap=_attribute(node, "softcap", 0.0),
        softmax_precision=None if precision is None else short_dtype(ir.DataType(precision)),
        left_window=_attribute(node, "left_window_size", UNBOUNDED),
        right_window=_attribute(node, "right_window_size", UNBOUNDED),
        quantized=None if quantized is None else quantized.type,
        quantizes_weights=quantized is not None and quantized.matmul is not None,
        quantizes_output=_is_quantized(heads_of(node)),
        computes_mask=_is_computed(mask),
        upcasts=sum(upcast_of(input_at(node, at)) is not None for at in (Q, K, V)),
    )


# -- Attention in eight bits: Q/DQ before it, and between its weights and the values -----------------

_EIGHT_BITS = {ir.DataType.INT8: "int8", ir.DataType.FLOAT8E4M3FN: "fp8"}


@dataclass(frozen=True, kw_only=True)
class QuantizedAttention:
    """The Q/DQ of an attention.

    ONNX's operator cannot quantize its weights. So they are an output of it, which is quantized, dequantized
    and multiplied with the values; its own result is then unused.
    """

    type: str  # `int8` or `fp8`
    inputs: tuple[ir.Node, ...]  # what dequantizes Q, K and V
    weights: ir.Node | None = None  # what dequantizes the weights
    matmul: ir.Node | None = None  # what multiplies them with the values


def read_quantized(node: ir.Node) -> QuantizedAttention | None:
    """The Q/DQ of an attention; None where its queries and keys are not dequantized."""
    found = [made_by(input_at(node, at), "DequantizeLinear") for at in (Q, K, V)]
    kinds = {None if each is None else _stored_type(each) for each in found[:2]}
    if len(kinds) != 1 or (kind := kinds.pop()) is None:
        return None
    inputs = tuple(each for each in found if each is not None)
    up, matmul = _quantized_weights(node)
    if len(inputs) == 3 and _stored_type(inputs[2]) == kind and up is not None and _stored_type(up) == kind:
        return QuantizedAttention(type=kind, inputs=inputs, weights=up, matmul=matmul)
    return QuantizedAttention(type=kind, inputs=inputs)


def requantized(
    b: NodeBuilder, dequantize: ir.Node, x: ir.Value | None = None, factor: float = 1.0
) -> ir.Value:
    """Q/DQ like those of a tensor, on it or on `x`; what is dequantized is times a factor."""
    quantize = made_by(input_at(dequantize, 0), "QuantizeLinear")
    stored, scale, *zero = dequantize.inputs
    if quantize is not None and (x := x or quantize.inputs[0]) is not None:
        stored = b.op("QuantizeLinear", x, *quantize.inputs[1:])
        stored.shape, stored.type = x.shape, quantize.outputs[0].type
    if factor != 1.0 and (held := constant(scale)) is not None:
        numbers = held.numpy().astype(np.float64) * factor
        scale = b.constant(numbers.tolist(), held.dtype)
    result = b.op("DequantizeLinear", stored, scale, *zero)
    result.shape, result.type = None if stored is None else stored.shape, dequantize.outputs[0].type
    return result


def heads_of(node: ir.Node) -> ir.Value:
    """The heads that an attention gives: its result, or that of its quantized weights and the values."""
    matmul = _quantized_weights(node)[1]
    return node.outputs[Y] if matmul is None else matmul.outputs[0]


def _stored_type(dequantize: ir.Node) -> str | None:
    value = input_at(dequantize, 0)
    return None if value is None or value.dtype is None else _EIGHT_BITS.get(value.dtype)


def _quantized_weights(node: ir.Node) -> tuple[ir.Node | None, ir.Node | None]:
    """What dequantizes the weights, and the matmul with the values; nothing where the heads are used, too."""
    value, own = output_at(node, QK_OUTPUT), output_at(node, Y)
    if value is None or _attribute(node, "qk_matmul_output_mode", 0) != OF_WEIGHTS:
        return None, None
    if own is not None and (own.uses() or own.is_graph_output()):
        return None, None
    steps: list[ir.Node] = []
    for kind in ("QuantizeLinear", "DequantizeLinear", "MatMul"):
        users = [use.node for use in value.uses()]
        if len(users) != 1 or not is_op(users[0], kind) or users[0].inputs[0] is not value:
            return None, None
        if value.is_graph_output():
            return None, None
        steps, value = [*steps, users[0]], users[0].outputs[0]
    values = input_at(steps[-1], 1)
    while (layout := made_by(values, *MOVES, "Expand")) is not None and values is not input_at(node, V):
        values = layout.inputs[0]
    return (steps[1], steps[2]) if values is input_at(node, V) else (None, None)


def _is_quantized(value: ir.Value) -> bool:
    """Whether a value, in whatever layout, is quantized before it is used."""
    users = [use.node for use in value.uses()]
    while len(users) == 1 and is_op(users[0], "Reshape", "Transpose"):
        users = [use.node for use in users[0].outputs[0].uses()]
    return bool(users) and all(is_op(user, "QuantizeLinear") for user in users)


def inputs_by_role(node: ir.Node) -> dict[str, ir.Value]:
    """The inputs of an `Attention` node by their names in `INPUT_ROLES`, without those that are omitted."""
    return {role: value for role, value in zip(INPUT_ROLES, node.inputs, strict=False) if value is not None}


def short_dtype(dtype: ir.DataType | None) -> str | None:
    """The short name of a type: fp16, bf16, fp32, fp64, else ONNX's own name in small letters."""
    return None if dtype is None else _SHORT_NAMES.get(dtype, dtype.name.lower())


def _sizes(node: ir.Node) -> dict[str, Any]:
    q, k, v = (input_at(node, at) for at in (Q, K, V))
    found = next((r for r in map(rank, (q, k, v)) if r is not None), None)
    length = 2 if found == 4 else 1
    sizes = {"rank": found, "B": dim(q, 0), "S": dim(q, length), "T": dim(k, length)}
    if found == 4:
        return {**sizes, "Hq": dim(q, 1), "Hkv": dim(k, 1), "D": dim(q, 3), "Dv": dim(v, 3)}
    Hq, Hkv = _attribute(node, "q_num_heads", None), _attribute(node, "kv_num_heads", None)
    widths = {"D": (dim(q, 2), Hq), "Dv": (dim(v, 2), Hkv)}
    return {**sizes, "Hq": Hq, "Hkv": Hkv, **{name: _split(*each) for name, each in widths.items()}}


def _split(width: Dim, heads: int | None) -> Dim:
    if not heads or width is None:
        return None
    return width // heads if isinstance(width, int) else f"{width}/{heads}"


def _is_computed(mask: ir.Value | None) -> bool:
    """Whether nodes compute the numbers of a mask, and not only their layout or type."""
    while (node := None if mask is None else mask.producer()) is not None:
        if not is_op(node, *MOVES, "Expand", "Slice", "Cast"):
            return not is_op(node, "Constant")
        mask = node.inputs[0]
    return False


def upcast_of(value: ir.Value | None) -> ir.Node | None:
    """The Cast from FP16 or BF16 to FP32 whose numbers a value has, perhaps elsewhere; None for another."""
    while (node := made_by(value, *CARRIES)) is not None:
        value = input_at(node, 0)
    cast = made_by(value, "Cast")
    types = [None if each is None else each.dtype for each in (input_at(cast, 0), value)]
    return cast if types[0] in HALVES and types[1] == ir.DataType.FLOAT else None


def _mask_kind(mask: ir.Value | None) -> str:
    if mask is None or mask.dtype is None:
        return "none" if mask is None else "unknown"
    kind = "float" if mask.dtype.is_floating_point() else "int"
    return "bool" if mask.dtype == ir.DataType.BOOL else kind


def _attribute(node: ir.Node, name: str, default: Any) -> Any:
    """A number; inside a function it may refer to the caller's, and is not known here."""
    attribute = node.attributes.get(name)
    if attribute is None or attribute.is_ref():
        return default
    return attribute.as_float() if isinstance(attribute.value, float) else attribute.as_int()


# -- Arrays of one attention: its inputs by role, as a probe outputs them --------------------------


def by_head(array: np.ndarray, heads: Dim) -> np.ndarray:
    """[B, length, heads·D] or [B, heads, length, D] -> [B, heads, length, D]."""
    if array.ndim == 4 or not isinstance(heads, int):
        return array
    return array.reshape(*array.shape[:2], heads, -1).swapaxes(1, 2)


def valid_only(attention: AttentionNode, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs with K and V zero beyond the valid entries, where the memory is undefined."""
    found = dict(inputs)
    for role in ("K", "V") if attention.has_nonpad_kv_seqlen else ():
        heads = by_head(inputs[role], attention.Hkv)
        valid = np.arange(heads.shape[2]) < inputs["lengths"].reshape(-1, 1)
        found[role] = np.where(valid[:, None, :, None], heads, heads.dtype.type(0))
    return found


def visible_keys(
    attention: AttentionNode, inputs: Mapping[str, np.ndarray], S: int, T: int
) -> np.ndarray | None:
    """Which of T keys, past included, S queries attend to with a cache: [1|B, 1, S, T].

    It combines a boolean mask with causality and the number of valid keys. None without a cache, where the
    node's own mask and `is_causal` are the whole mask.
    """
    counted = attention.has_nonpad_kv_seqlen
    if not attention.has_past and not counted:
        return None
    ends = inputs["lengths"].reshape(-1, 1, 1, 1) if counted else np.full((1, 1, 1, 1), T)
    keys, queries = np.arange(T), np.arange(S)[:, None]
    if attention.is_causal:
        visible = keys <= ends - S + queries
    else:
        visible = np.broadcast_to(keys < ends, (len(ends), 1, S, T))
    mask = inputs.get("mask")
    return visible if mask is None else visible & mask
