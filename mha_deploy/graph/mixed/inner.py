"""The largest number inside an operator that sums, squares or multiplies before its result is there.

The mean of a thousand squares may fit FP16 where a square, or their sum, does not. A sum is measured as the
sum of magnitudes: no order of adding can come beyond it. Matrix products are not looked at: they are taken
to be summed in float32, as `graph.widen` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from mha_deploy.graph.attention_keys import all_keys, by_head, valid_only
from mha_deploy.graph.attention_node import (
    NONPAD_KV_SEQLEN,
    PAST_KEY,
    AttentionNode,
    K,
    Q,
    V,
    input_at,
    is_attention,
    read_attention,
)
from mha_deploy.graph.mixed.prepare import is_float, is_op

_SUMS = ("ReduceSum", "ReduceMean", "ReduceL1", "GlobalAveragePool")
_SUMS_OF_SQUARES = ("ReduceSumSquare", "ReduceL2", "LpNormalization")
_SUMS_OF_POWERS = ("ReduceLogSumExp",)
_SOFTMAX = ("Softmax", "LogSoftmax")
_NORMS = ("LayerNormalization", "RMSNormalization", "InstanceNormalization", "GroupNormalization")

WORDS = (
    {name: "what it sums reaches" for name in (*_SUMS, *_SUMS_OF_POWERS, *_SOFTMAX)}
    | {name: "the squares that it sums reach" for name in _SUMS_OF_SQUARES}
    | {name: "the squares that it averages reach" for name in _NORMS}
    | {"Attention": "its scores Q·Kᵀ·scale reach"}
)
"""How to say what the figure of an operator is."""

Read = Callable[[ir.Value], np.ndarray]


def inputs_to_see(node: ir.Node) -> list[ir.Value]:
    """The inputs from which the inner figure of a node is computed; none where it has no such figure."""
    if is_attention(node):
        at = (Q, K, V, PAST_KEY, NONPAD_KV_SEQLEN)
        return [value for value in (input_at(node, position) for position in at) if value is not None]
    first = input_at(node, 0)
    return [first] if first is not None and is_float(first) and is_op(node, *WORDS) else []


def inner_figure(node: ir.Node, read: Read) -> float:
    """The largest number inside a node for which `inputs_to_see` names inputs."""
    with np.errstate(all="ignore"):  # what overflows float32 is infinite, and says so
        if is_attention(node):
            return _largest_score(node, read)
        x = read(node.inputs[0]) if node.inputs[0] is not None else np.zeros(0, np.float32)
        if not x.size:
            return 0.0
        size = np.abs(x, dtype=np.float32)
        if node.op_type in _NORMS:
            return float(size.max()) ** 2
        axes = _axes(node, x.ndim)
        if node.op_type in _SOFTMAX:
            top = np.maximum(x.max(axis=axes, keepdims=True), np.finfo(np.float32).min)
            return float(np.exp(x - top).sum(axis=axes).max())
        if node.op_type in _SUMS_OF_POWERS:
            return float(np.exp(x).sum(axis=axes).max())
        return float((size if node.op_type in _SUMS else size * size).sum(axis=axes).max())


def _axes(node: ir.Node, rank: int) -> tuple[int, ...]:
    """The axes that a node sums over; all of them where the graph does not say."""
    if node.op_type == "GlobalAveragePool":
        return tuple(range(2, rank))
    if node.op_type in (*_SOFTMAX, "LpNormalization"):
        axis = node.attributes.get("axis")
        return (-1 if axis is None else axis.as_int(),)
    given = node.attributes.get("axes")
    if given is not None:
        return tuple(given.as_ints())
    value = input_at(node, 1)
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return tuple(range(rank)) if tensor is None else tuple(int(axis) for axis in tensor.numpy().reshape(-1))


def _largest_score(node: ir.Node, read: Read) -> float:
    """The largest |Q·Kᵀ·scale|, hidden pairs included: a kernel multiplies them all, and masks afterwards."""
    facts = read_attention(node)
    q, k = _queries_and_keys(node, facts, read)
    if not q.size or not k.size:
        return 0.0
    scale = facts.softmax_scale if facts.softmax_scale is not None else q.shape[-1] ** -0.5
    group = q.shape[1] // k.shape[1]
    return max(
        float(np.abs(q[row, head] @ k[row, head // group].T).max()) * abs(scale)
        for row in range(q.shape[0])
        for head in range(q.shape[1])
    )


def _queries_and_keys(node: ir.Node, facts: AttentionNode, read: Read) -> tuple[np.ndarray, np.ndarray]:
    """[B, Hq, S, D] and [B, Hkv, T, D], past keys included, and zeros for keys that are not valid."""
    roles: Mapping[str, int] = {"Q": Q, "K": K, "V": V, "past": PAST_KEY, "lengths": NONPAD_KV_SEQLEN}
    inputs = {role: input_at(node, position) for role, position in roles.items()}
    given = {role: read(value) for role, value in inputs.items() if value is not None}
    given = valid_only(facts, given)
    q, k = by_head(given["Q"], facts.Hq), by_head(given["K"], facts.Hkv)
    return q.astype(np.float32), all_keys(facts, given, k.astype(np.float32))
