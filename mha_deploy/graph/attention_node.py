"""ONNX's `Attention` node: read its attributes and inputs, and write one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

# -- What one ONNX `Attention` node says, read into a record ---------------------------------------

Dim = int | str | None
"""A size: a number, the name of a dynamic axis, or None where the file does not say."""

# The inputs and outputs of Attention, by position.
Q, K, V, MASK, PAST_KEY, PAST_VALUE, NONPAD_KV_SEQLEN = range(7)
Y, PRESENT_KEY, PRESENT_VALUE, QK_OUTPUT = range(4)

UNBOUNDED = -1
"""The window size that leaves a side open."""

_SHORT_NAMES = {
    ir.DataType.FLOAT16: "fp16",
    ir.DataType.BFLOAT16: "bf16",
    ir.DataType.FLOAT: "fp32",
    ir.DataType.DOUBLE: "fp64",
}


@dataclass(frozen=True, kw_only=True)
class AttentionNode:
    """One `Attention` node of an ONNX graph.

    Args:
        name: Name of the node; its first output's name where it has none.
        graph: Name of the graph or function that holds it.
        opset: Version of the ONNX operator set it is written in.
        rank: 3 for `[B, S, Hq·D]`, 4 for `[B, Hq, S, D]`.
        dtype: Type of Q, K and V: `fp16`, `bf16`, `fp32` or `fp64`.
        B: Batch.
        S: Query length.
        T: Length of the K input, without the past.
        Hq: Query heads.
        Hkv: Key/value heads.
        D: Head size of queries and keys.
        Dv: Head size of values.
        scale: Factor on the scores as written; None for the default.
        is_causal: Whether a query sees only keys up to its own position.
        mask: `none`, `bool`, `float`, `int`, or `unknown` where the file does not say.
        mask_dtype: Type of the mask, by its short name.
        mask_dims: Dimensions of the mask.
        has_past: Whether past keys and values come in.
        past_length: Length of the past.
        has_present: Whether the joined keys or values go out.
        has_nonpad_kv_seqlen: Whether each row of the batch has its own number of valid keys.
        qk_output_mode: What the fourth output holds, 0 to 3; None where it is not used.
        softcap: Bound of the scores; 0 for none.
        softmax_precision: Type the softmax is computed in; None for the default.
        left_window: How far back a query sees; -1 for all the way.
        right_window: How far ahead a query sees; -1 for all the way.
    """

    name: str
    graph: str
    opset: int | None
    rank: int | None
    dtype: str | None
    B: Dim
    S: Dim
    T: Dim
    Hq: Dim
    Hkv: Dim
    D: Dim
    Dv: Dim
    scale: float | None
    is_causal: bool
    mask: str
    mask_dtype: str | None
    mask_dims: tuple[Dim, ...] | None
    has_past: bool
    past_length: Dim
    has_present: bool
    has_nonpad_kv_seqlen: bool
    qk_output_mode: int | None
    softcap: float
    softmax_precision: str | None
    left_window: int
    right_window: int

    @property
    def kind(self) -> str | None:
        """The head layout by its usual name, where the heads are known."""
        if not isinstance(self.Hq, int) or not isinstance(self.Hkv, int):
            return None
        if self.Hq == self.Hkv:
            return "MHA"
        return "MQA" if self.Hkv == 1 else "GQA"

    @property
    def group(self) -> int | None:
        """How many query heads share one key/value head."""
        if not isinstance(self.Hq, int) or not isinstance(self.Hkv, int):
            return None
        return self.Hq // self.Hkv

    @property
    def softmax_scale(self) -> float | None:
        """The factor on the scores that is really used: the written one, else 1/sqrt(D)."""
        if self.scale is not None:
            return self.scale
        return 1.0 / math.sqrt(self.D) if isinstance(self.D, int) else None

    @property
    def has_qk_output(self) -> bool:
        """Whether the scores or weights are an output."""
        return self.qk_output_mode is not None

    @property
    def has_window(self) -> bool:
        """Whether a query sees only a window of keys."""
        return self.left_window >= 0 or self.right_window >= 0

    def describe(self) -> dict[str, Any]:
        """The record as plain data for JSON, with the derived facts."""
        derived = {"kind": self.kind, "softmax_scale": self.softmax_scale}
        return {**asdict(self), **derived}


def is_attention(node: ir.Node) -> bool:
    """Whether this is ONNX's own Attention operator."""
    return node.op_type == "Attention" and node.domain == ""


def attention_nodes(model: ir.Model) -> list[AttentionNode]:
    """Read every `Attention` node of a model: main graph, subgraphs and functions."""
    return [
        read_attention(node, opset=opset, graph=name)
        for name, opset, nodes in _scopes(model)
        for node in nodes
        if is_attention(node)
    ]


def read_attention(node: ir.Node, *, opset: int | None = None, graph: str = "") -> AttentionNode:
    """Read one `Attention` node.

    Args:
        node: The node, of the default domain.
        opset: Version of the operator set of its graph, used where the node has no own version.
        graph: Name of the graph that holds it.
    """
    mask = input_at(node, MASK)
    return AttentionNode(
        name=node.name or node.outputs[0].name or "Attention",
        graph=graph,
        opset=node.version or opset,
        dtype=_dtype_of(input_at(node, Q)),
        **_sizes(node),
        scale=_float(node, "scale", None),
        is_causal=_int(node, "is_causal", 0) == 1,
        mask=_mask_kind(mask),
        mask_dtype=_dtype_of(mask),
        mask_dims=_dims(mask),
        has_past=input_at(node, PAST_KEY) is not None,
        past_length=_dim(input_at(node, PAST_KEY), 2),
        has_present=any(output_at(node, at) is not None for at in (PRESENT_KEY, PRESENT_VALUE)),
        has_nonpad_kv_seqlen=input_at(node, NONPAD_KV_SEQLEN) is not None,
        qk_output_mode=None if output_at(node, QK_OUTPUT) is None else _int(node, "qk_matmul_output_mode", 0),
        softcap=_float(node, "softcap", 0.0) or 0.0,
        softmax_precision=_softmax_precision(node),
        left_window=_int(node, "left_window_size", UNBOUNDED),
        right_window=_int(node, "right_window_size", UNBOUNDED),
    )


def input_at(node: ir.Node, position: int) -> ir.Value | None:
    """The input at a position, or None where it is left out or left empty."""
    return node.inputs[position] if position < len(node.inputs) else None


def output_at(node: ir.Node, position: int) -> ir.Value | None:
    """The output at a position, or None where it is left out or has no name."""
    if position >= len(node.outputs):
        return None
    output = node.outputs[position]
    # An empty name is how ONNX leaves out an output in the middle of the list.
    return None if output.name == "" else output


def short_dtype(dtype: ir.DataType | None) -> str | None:
    """The short name of a type: fp16, bf16, fp32, fp64, else ONNX's own name in small letters."""
    return None if dtype is None else _SHORT_NAMES.get(dtype, dtype.name.lower())


def _scopes(model: ir.Model) -> Iterator[tuple[str, int | None, Iterator[ir.Node]]]:
    yield model.graph.name or "main", model.opset_imports.get(""), model.graph.all_nodes()
    for function in model.functions.values():
        yield function.name, function.opset_imports.get(""), function.all_nodes()


def _sizes(node: ir.Node) -> dict[str, Any]:
    q, k, v = (input_at(node, at) for at in (Q, K, V))
    rank = next((len(dims) for dims in map(_dims, (q, k, v)) if dims is not None), None)
    if rank == 4:
        return {
            "rank": 4,
            "B": _dim(q, 0),
            "S": _dim(q, 2),
            "T": _dim(k, 2),
            "Hq": _dim(q, 1),
            "Hkv": _dim(k, 1),
            "D": _dim(q, 3),
            "Dv": _dim(v, 3),
        }
    Hq, Hkv = _int(node, "q_num_heads", None), _int(node, "kv_num_heads", None)
    return {
        "rank": rank,
        "B": _dim(q, 0) if rank else None,
        "S": _dim(q, 1) if rank else None,
        "T": _dim(k, 1) if rank else None,
        "Hq": Hq,
        "Hkv": Hkv,
        "D": _split(_dim(q, 2), Hq),
        "Dv": _split(_dim(v, 2), Hkv),
    }


def _split(width: Dim, heads: int | None) -> int | None:
    return width // heads if isinstance(width, int) and heads else None


def _mask_kind(mask: ir.Value | None) -> str:
    if mask is None:
        return "none"
    if mask.dtype is None:
        return "unknown"
    if mask.dtype == ir.DataType.BOOL:
        return "bool"
    return "float" if mask.dtype.is_floating_point() else "int"


def _softmax_precision(node: ir.Node) -> str | None:
    code = _int(node, "softmax_precision", None)
    return None if code is None else short_dtype(ir.DataType(code))


def _dtype_of(value: ir.Value | None) -> str | None:
    return None if value is None else short_dtype(value.dtype)


def _dims(value: ir.Value | None) -> tuple[Dim, ...] | None:
    if value is None or value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)


def _dim(value: ir.Value | None, axis: int) -> Dim:
    dims = _dims(value)
    return dims[axis] if dims is not None and axis < len(dims) else None


def _int(node: ir.Node, name: str, default: Any) -> Any:
    attribute = _attribute(node, name)
    return default if attribute is None else attribute.as_int()


def _float(node: ir.Node, name: str, default: float | None) -> float | None:
    attribute = _attribute(node, name)
    return default if attribute is None else attribute.as_float()


def _attribute(node: ir.Node, name: str) -> ir.Attr | None:
    attribute = node.attributes.get(name)
    # Inside a function an attribute may only refer to the caller's: its value is not known here.
    return None if attribute is None or attribute.is_ref() else attribute


# -- The keys that queries behind a cache meet, and which of them they see -------------------------


def by_head(array: np.ndarray, heads: Dim) -> np.ndarray:
    """[B, length, heads·D] or [B, heads, length, D] -> [B, heads, length, D]."""
    if array.ndim == 4 or not isinstance(heads, int):
        return array
    return array.reshape(*array.shape[:2], heads, -1).swapaxes(1, 2)


def valid_only(facts: AttentionNode, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs with zeros behind the valid rows of K and V: what memory holds there means nothing."""
    if not facts.has_nonpad_kv_seqlen:
        return dict(given)
    found = dict(given)
    for role in ("K", "V"):
        rows = by_head(given[role], facts.Hkv)
        valid = np.arange(rows.shape[2]) < given["lengths"].reshape(-1, 1)
        found[role] = np.where(valid[:, None, :, None], rows, rows.dtype.type(0))
    return found


def all_keys(facts: AttentionNode, given: Mapping[str, np.ndarray], k: np.ndarray) -> np.ndarray:
    """The past, where there is one, and the keys of the call. [B, Hkv, T, D]."""
    return np.concatenate((given["past"].astype(k.dtype), k), axis=2) if facts.has_past else k


def visible_keys(facts: AttentionNode, given: Mapping[str, np.ndarray], S: int, T: int) -> np.ndarray | None:
    """What the given mask, causality and the number of valid keys leave to see, as one boolean mask.

    Args:
        facts: What the attention says.
        given: Its inputs as a probe shows them.
        S: Queries.
        T: Keys, past included.

    Returns:
        [1|B, 1, S, T], joined with a given boolean mask; None where there is no cache, so that the node's own
        mask and `is_causal` say everything.
    """
    if not facts.has_past and not facts.has_nonpad_kv_seqlen:
        return None
    ends = given["lengths"].reshape(-1, 1, 1, 1) if facts.has_nonpad_kv_seqlen else np.full((1, 1, 1, 1), T)
    keys, queries = np.arange(T), np.arange(S)[:, None]
    seen = (
        keys <= ends - S + queries if facts.is_causal else np.broadcast_to(keys < ends, (len(ends), 1, S, T))
    )
    mask = given.get("mask")
    return seen if mask is None else seen & mask
