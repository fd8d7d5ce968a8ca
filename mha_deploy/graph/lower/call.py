"""The frame of every lowering: read one attention, replace it, and refuse what a dialect cannot express."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import onnx_ir as ir

from mha_deploy.errors import DeployError
from mha_deploy.graph import attention_node as an
from mha_deploy.graph.attention_node import AttentionNode
from mha_deploy.graph.ir import (
    Dim,
    NodeBuilder,
    Size,
    dim,
    infer_shapes,
    input_at,
    is_op,
    made_by,
    node_name,
    rank,
    same_size,
)
from mha_deploy.graph.valid import inline_functions


class LoweringError(DeployError):
    """A node uses a feature that the dialect cannot express; `lower` adds which dialect it is."""

    usual_hint = "another target; `mha-deploy check` lists what each supports"

    def __init__(self, feature: str, node: ir.Node | str, *, got: object = None, hint: str = "") -> None:
        self.feature, self.node = feature, node if isinstance(node, str) else node_name(node)
        super().__init__(f"Not supported: {feature} (node {self.node!r}).", got=got, hint=hint)

    def name_dialect(self, dialect: str) -> None:
        """Name the dialect in the error."""
        self.what = f"The {dialect} dialect does not support {self.feature} (node {self.node!r})."


# -- An attention to be lowered, with its types and head sizes -------------------------------------


class QueryKeyValue(NamedTuple):
    """Queries `[B, Hq, S, D]`, keys `[B, Hkv, T, D]` and values `[B, Hkv, T, Dv]`, past included."""

    q: ir.Value
    k: ir.Value
    v: ir.Value


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """An `Attention` node whose types and head sizes are known.

    `attention` has its attributes and shapes, `lengths` the number of valid keys of each batch element
    (`nonpad_kv_seqlen`), and `dtype` is the type of q, k and v.
    """

    node: ir.Node
    attention: AttentionNode
    q: ir.Value
    k: ir.Value
    v: ir.Value
    mask: ir.Value | None
    past_key: ir.Value | None
    past_value: ir.Value | None
    lengths: ir.Value | None
    dtype: ir.DataType
    Hq: int
    Hkv: int
    D: int
    Dv: int

    @property
    def group(self) -> int:
        """How many query heads share one key/value head."""
        return self.Hq // self.Hkv

    @property
    def scale(self) -> float:
        """The factor on the scores, which is known where D is."""
        return cast(float, self.attention.softmax_scale)

    @property
    def is_square(self) -> bool:
        """Whether there are certainly as many new keys as queries: the same number or the same axis."""
        return same_size(self.attention.S, self.attention.T)

    @property
    def has_fp64(self) -> bool:
        """Whether the tensors or the softmax are in FP64."""
        return "fp64" in (self.attention.dtype, self.attention.softmax_precision)

    def refuse(self, feature: str, *, got: object = None, hint: str = "") -> LoweringError:
        """The error that names the feature of this node that the dialect cannot express."""
        return LoweringError(feature, self.node, got=got, hint=hint)

    def heads(self, b: NodeBuilder) -> QueryKeyValue:
        """The inputs in 4-D, with the past concatenated before the new keys and values."""
        q, k, v = self.q, self.k, self.v
        if self.attention.rank == 3:
            q = split_heads(b, q, self.Hq, self.D, name="q_heads")
            k = split_heads(b, k, self.Hkv, self.D, name="k_heads")
            v = split_heads(b, v, self.Hkv, self.Dv, name="v_heads")
        if self.past_key is not None:
            k = b.op("Concat", self.past_key, k, axis=2, name="present_key")
            v = b.op("Concat", self.past_value, v, axis=2, name="present_value")
        return QueryKeyValue(q, k, v)

    def query_length(self, b: NodeBuilder) -> Size:
        """S."""
        return b.size(self.q, 1 if self.attention.rank == 3 else 2)

    def key_length(self, b: NodeBuilder) -> Size:
        """T, past included."""
        new = b.size(self.k, 1 if self.attention.rank == 3 else 2)
        if self.past_key is None:
            return new
        past = b.size(self.past_key, 2)
        if isinstance(new, int) and isinstance(past, int):
            return past + new
        return b.op("Add", b.as_tensor(past), b.as_tensor(new), name="total_length")

    def as_input_rank(self, b: NodeBuilder, y: ir.Value) -> ir.Value:
        """Bring a 4-D result to the rank the node was written in."""
        return merge_heads(b, y, self.Hq * self.Dv, name="merged") if self.attention.rank == 3 else y


Outputs = dict[int, ir.Value]
"""What replaces the outputs of a node, by position."""


def read_call(node: ir.Node, *, opset: int | None = None) -> AttentionCall:
    """Read a node for lowering; refuse what ONNX does not allow or leaves open, and unknown head sizes."""
    attention, refuse = an.read_attention(node, opset=opset), partial(LoweringError, node=node)
    hint = "state the shapes of Q, K and V in the graph, and q_num_heads and kv_num_heads for 3-D inputs"
    inputs: dict[str, Any] = {role.lower(): input_at(node, at) for at, role in enumerate(an.INPUT_ROLES)}
    q, k, v, mask, past_key, past_value, lengths = inputs.values()
    if q is None or k is None or v is None or q.dtype is None or attention.rank not in (3, 4):
        raise refuse("query, key or value of unknown rank or type", got=f"rank {attention.rank}", hint=hint)
    sizes = {name: getattr(attention, name) for name in ("Hq", "Hkv", "D", "Dv")}
    for name, size in sizes.items():
        if not isinstance(size, int):
            of_axis = "fix that axis (--axis N=64 of an export), or " if isinstance(size, str) else ""
            raise refuse(f"head layout without a fixed {name}", got=size, hint=of_axis + hint)
    call = AttentionCall(node=node, attention=attention, dtype=q.dtype, **inputs, **sizes)
    if call.Hq % call.Hkv:
        raise refuse("uneven head groups", got=f"Hq={call.Hq}, Hkv={call.Hkv}", hint="Hq = n · Hkv")
    if call.scale < 0 or attention.softcap < 0:
        raise refuse("negative scale or softcap", got=f"{call.scale:g}, {attention.softcap:g}")
    if v.dtype is not None and v.dtype != q.dtype:
        raise refuse("V of another type than Q", got=v.dtype, hint="cast V")
    if (past_key is None) != (past_value is None):
        raise refuse("past of only keys or only values", hint="give past_key and past_value together")
    if past_key is not None and lengths is not None:
        raise refuse("nonpad_kv_seqlen together with past_key", hint="use one of the two kinds of cache")
    if mask is None:
        return call
    shape = attention.mask_dims
    if attention.mask == "unknown" or shape is None:
        raise refuse("mask of unknown type or rank", got=mask.name, hint="state it in the graph")
    if len(shape) > 4 or not shape:
        raise refuse("mask of this rank", got=shape, hint="a mask has 1 to 4 dimensions")
    heads = shape[-3] if len(shape) > 2 else 1
    if isinstance(heads, int) and heads not in (1, call.Hq):
        raise refuse("mask for another number of heads", got=shape, hint=f"1 or {call.Hq} heads")
    if shape[-1] == 1 and (attention.T != 1 or past_key is not None):
        # ONNX calls it broadcastable and also specifies that a short mask is padded: two different results.
        raise refuse("mask with a single key column", got=shape, hint="expand it to T columns")
    return call


# -- Split and merge heads ---------------------------------------------------------------------------


def split_heads(b: NodeBuilder, x: ir.Value, heads: int, size: int, name: str | None = None) -> ir.Value:
    """`[B, S, H·D]` to `[B, H, S, D]`."""
    rows = b.reshape(x, 0, 0, heads, size)
    return b.transpose(rows, 0, 2, 1, 3, name=name)


def merge_heads(b: NodeBuilder, x: ir.Value, width: int, name: str | None = None) -> ir.Value:
    """`[B, H, S, D]` to `[B, S, H·D]`."""
    return b.reshape(b.transpose(x, 0, 2, 1, 3), 0, 0, width, name=name)


# -- What every dialect does before its rules ------------------------------------------------------


OperatorRules = Mapping[str, Callable[[ir.Node, NodeBuilder], ir.Value | None]]
"""By operator, what builds the replacement of one node: its output, or None to keep the node."""

_LOWERED = ("Attention", "RotaryEmbedding", "TensorScatter", "RMSNormalization")


def copy_of(model: ir.Model) -> ir.Model:
    """A copy to work on: weights shared, functions with attention inlined, shapes inferred."""
    copy = model.clone()
    inner = (node for function in copy.functions.values() for node in function.all_nodes())
    if any(is_op(node, *_LOWERED) for node in inner):
        inline_functions(copy)
    return infer_shapes(copy)


def take_mask_before_expand(node: ir.Node) -> None:
    """Read a mask as it was before it was expanded over the queries: it takes less memory traffic.

    Only where it has certainly a column for each key already: one of a single column is repeated by the
    Expand, and padded by the attention. A size that has a name may be 1 at run time.
    """
    mask = input_at(node, an.MASK)
    source = input_at(made_by(mask, "Expand"), 0)
    columns = dim(source, 3)
    if source is None or rank(source) != 4 or columns == 1:
        return
    if isinstance(columns, int) or same_size(columns, dim(mask, 3)) or same_size(columns, _key_length(node)):
        node.replace_input_with(an.MASK, source)


def _key_length(node: ir.Node) -> Dim:
    """T, where there is no past."""
    return None if input_at(node, an.PAST_KEY) is not None else an.read_attention(node).T
