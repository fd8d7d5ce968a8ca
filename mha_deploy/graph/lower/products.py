"""The steps of attention in matrix products, shared by the forms with and without a cache beside them."""

from __future__ import annotations

import math

import onnx_ir as ir

from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.lower.call import AttentionCall
from mha_deploy.graph.lower.groups import Broadcast, GroupForm


def scale_query(b: NodeBuilder, call: AttentionCall, q: ir.Value, where: str) -> ir.Value:
    """The queries with the part of the scale that is theirs; `where` is `query`, `split` or `scores`."""
    factors = {"query": call.scale, "split": math.sqrt(call.scale)}
    return _times(b, call, q, factors.get(where, 1.0), name="q_scaled")


def scores_of(
    b: NodeBuilder, call: AttentionCall, form: GroupForm, q: ir.Value, k: ir.Value, where: str
) -> ir.Value:
    """Q·Kᵀ with the rest of the scale applied.

    Args:
        b: Builder of the new nodes.
        call: The attention.
        form: How grouped heads are laid out.
        q: Scaled queries in the layout of the form.
        k: Keys `[B, Hkv, ·, D]`.
        where: Where the scale goes: `query`, `split` or `scores`.
    """
    if where == "split":
        k = _times(b, call, k, math.sqrt(call.scale), name="k_scaled")
    keys = b.transpose(k, 0, 1, 3, 2, name="k_transposed")
    scores = b.op("MatMul", q, form.keys(b, call, keys, call.D, None), name="scores")
    return _times(b, call, scores, call.scale, name="scores_scaled") if where == "scores" else scores


def turned_scores_of(
    b: NodeBuilder, call: AttentionCall, form: GroupForm, q: ir.Value, k: ir.Value, where: str
) -> ir.Value:
    """The same scores as K·Qᵀ, turned: keys that come from memory are read as they lie there.

    TensorRT-RTX 1.7.1 writes a turned copy of a whole cache before Q·Kᵀ, and none here.
    """
    if where == "split":
        k = _times(b, call, k, math.sqrt(call.scale), name="k_scaled")
    perm = (0, 1, 2, 4, 3) if isinstance(form, Broadcast) else (0, 1, 3, 2)
    query = b.transpose(q, *perm, name="q_transposed")
    product = b.op("MatMul", form.keys(b, call, k, None, call.D), query, name="scores")
    scores = b.transpose(product, *perm, name="scores_turned")
    return _times(b, call, scores, call.scale, name="scores_scaled") if where == "scores" else scores


def softcap(b: NodeBuilder, call: AttentionCall, scores: ir.Value) -> ir.Value:
    """Bound the scores: softcap · tanh(scores / softcap)."""
    if call.facts.softcap <= 0:
        return scores
    cap = b.constant(call.facts.softcap, call.dtype)
    return b.op("Mul", b.op("Tanh", b.op("Div", scores, cap)), cap, name="scores_capped")


def softmax(b: NodeBuilder, call: AttentionCall, scores: ir.Value) -> ir.Value:
    """Softmax over the keys, in the precision the node asks for."""
    precision = call.node.attributes.get_int("softmax_precision", None)
    if precision is None or precision == call.dtype:
        return b.op("Softmax", scores, axis=-1, name="weights")
    wide = b.op("Cast", scores, to=precision)
    return b.op("Cast", b.op("Softmax", wide, axis=-1), to=int(call.dtype), name="weights")


def weighted_values(
    b: NodeBuilder, call: AttentionCall, form: GroupForm, weights: ir.Value, v: ir.Value
) -> ir.Value:
    """The weights times values `[B, Hkv, ·, Dv]`."""
    return b.op("MatMul", weights, form.keys(b, call, v, None, call.Dv), name="weighted_values")


def _times(b: NodeBuilder, call: AttentionCall, x: ir.Value, factor: float, name: str) -> ir.Value:
    return x if factor == 1.0 else b.op("Mul", x, b.constant(factor, call.dtype), name=name)
