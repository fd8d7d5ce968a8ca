"""Attention as MatMul, Softmax, MatMul: the shape that TensorRT 8.6 to 10.13 recognises and fuses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from mha_deploy.graph.attention_node import PRESENT_KEY, PRESENT_VALUE, QK_OUTPUT, Y
from mha_deploy.graph.build import NodeBuilder, Size
from mha_deploy.graph.lower.call import AttentionCall
from mha_deploy.graph.lower.groups import AUTO, GROUP_CHOICES, GroupForm, group_form
from mha_deploy.graph.lower.heads import Heads, as_input_rank, key_length, query_length, split_inputs
from mha_deploy.graph.lower.masks import NEG_INF, Mask, bias_of, read_mask, rows_to_keep, zero_closed_rows
from mha_deploy.graph.lower.rotary import rotary_to_primitives
from mha_deploy.graph.lower.scatter import scatter_to_primitives

DIALECT = "primitives"

OPERATOR_RULES = {"RotaryEmbedding": rotary_to_primitives, "TensorScatter": scatter_to_primitives}
"""What becomes of the operators around attention."""


@dataclass(frozen=True, kw_only=True)
class PrimitivesOptions:
    """How to write the products.

    Args:
        gqa: `auto`, `fold`, `broadcast` or `repeat`: see `groups`.
        scale: Where the factor goes: on the `query`, on the `scores`, or its square root on query and
            key (`split`), as the ONNX specification writes it.
        empty_rows: `zero` for what ONNX asks of a query that sees no key; `ignore` where none exists.
        opset: The highest opset the result may need; None keeps the model's own.
    """

    gqa: str = AUTO
    scale: str = "query"
    empty_rows: str = "zero"
    opset: int | None = 17

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "gqa": GROUP_CHOICES,
        "scale": ("query", "scores", "split"),
        "empty_rows": ("zero", "ignore"),
    }


def lower_to_primitives(
    call: AttentionCall, b: NodeBuilder, options: PrimitivesOptions
) -> dict[int, ir.Value]:
    """Write one attention as matrix products around a softmax; the outputs by position."""
    heads = split_inputs(b, call)
    form = group_form(call, options.gqa)
    S, T = query_length(b, call), key_length(b, call)
    mask = read_mask(b, call, S, T)
    rows = rows_to_keep(b, call, mask, options.empty_rows)

    raw = _scores(b, call, form, heads, options.scale)
    capped = _softcap(b, call, raw)
    biased = _add_bias(b, call, form, mask, capped, S, T)
    weights = _softmax(b, call, biased)
    product = b.op("MatMul", weights, form.keys(b, call, heads.v, None, call.Dv), name="weighted_values")

    y = zero_closed_rows(b, call, rows, form.restore(b, call, product, call.Dv))
    outputs = {Y: as_input_rank(b, call, y), PRESENT_KEY: heads.k, PRESENT_VALUE: heads.v}
    mode = call.facts.qk_output_mode
    if mode is not None:
        stage = form.restore(b, call, (raw, capped, biased, weights)[mode], T)
        outputs[QK_OUTPUT] = zero_closed_rows(b, call, rows, stage) if mode == 3 else stage
    return outputs


def _scores(b: NodeBuilder, call: AttentionCall, form: GroupForm, heads: Heads, where: str) -> ir.Value:
    """Q·Kᵀ with the scale applied."""
    q, k = heads.q, heads.k
    if where == "query":
        q = _times(b, call, q, call.scale, name="q_scaled")
    elif where == "split":
        q = _times(b, call, q, math.sqrt(call.scale), name="q_scaled")
        k = _times(b, call, k, math.sqrt(call.scale), name="k_scaled")
    keys = b.transpose(k, 0, 1, 3, 2, name="k_transposed")
    scores = b.op("MatMul", form.query(b, call, q), form.keys(b, call, keys, call.D, None), name="scores")
    return _times(b, call, scores, call.scale, name="scores_scaled") if where == "scores" else scores


def _times(b: NodeBuilder, call: AttentionCall, x: ir.Value, factor: float, name: str) -> ir.Value:
    return x if factor == 1.0 else b.op("Mul", x, b.constant(factor, call.dtype), name=name)


def _softcap(b: NodeBuilder, call: AttentionCall, scores: ir.Value) -> ir.Value:
    """Bound the scores: softcap · tanh(scores / softcap)."""
    if call.facts.softcap <= 0:
        return scores
    cap = b.constant(call.facts.softcap, call.dtype)
    return b.op("Mul", b.op("Tanh", b.op("Div", scores, cap)), cap, name="scores_capped")


def _add_bias(
    b: NodeBuilder,
    call: AttentionCall,
    form: GroupForm,
    mask: Mask | None,
    scores: ir.Value,
    S: Size,
    T: Size,
) -> ir.Value:
    if mask is None:
        return scores
    # Whoever asks for the masked scores expects -inf in them.
    bias = bias_of(b, call, mask, hidden=NEG_INF if call.facts.qk_output_mode == 2 else None)
    return b.op("Add", scores, form.bias(b, call, mask, bias, S, T), name="scores_biased")


def _softmax(b: NodeBuilder, call: AttentionCall, scores: ir.Value) -> ir.Value:
    """Softmax over the keys, in the precision the node asks for."""
    precision = call.node.attributes.get_int("softmax_precision", None)
    if precision is None or precision == call.dtype:
        return b.op("Softmax", scores, axis=-1, name="weights")
    wide = b.op("Cast", scores, to=precision)
    return b.op("Cast", b.op("Softmax", wide, axis=-1), to=int(call.dtype), name="weights")
