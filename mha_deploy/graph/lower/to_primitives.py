"""Attention as MatMul, Softmax, MatMul: the shape that TensorRT 8.6 to 10.13 recognises and fuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from mha_deploy.graph.attention_node import PRESENT_KEY, PRESENT_VALUE, QK_OUTPUT, Y
from mha_deploy.graph.ir import NodeBuilder, Size
from mha_deploy.graph.lower.call import AttentionCall, as_input_rank, key_length, query_length, split_inputs
from mha_deploy.graph.lower.groups import (
    AUTO,
    GROUP_CHOICES,
    GroupForm,
    group_form,
    scale_query,
    scores_of,
    softcap,
    softmax,
    weighted_values,
)
from mha_deploy.graph.lower.masks import NEG_INF, Mask, bias_of, read_mask, rows_to_keep, zero_closed_rows
from mha_deploy.graph.lower.operators import (
    rms_norm_to_primitives,
    rotary_to_primitives,
    scatter_to_primitives,
)

DIALECT = "primitives"

OPERATOR_RULES = {
    "RotaryEmbedding": rotary_to_primitives,
    "TensorScatter": scatter_to_primitives,
    "RMSNormalization": rms_norm_to_primitives,
}
"""What becomes of the operators around attention."""


@dataclass(frozen=True, kw_only=True)
class PrimitivesOptions:
    """How to write the matmuls.

    Args:
        gqa: `auto`, `fold`, `broadcast` or `repeat`: see `groups`.
        cache: `copy` gives whole caches out, with the new rows in them; `rows` gives only the new rows out
            and reads the caches where they are (see `cache_rows`); `auto` is `rows` for a static cache
            whose pattern is found, else `copy`.
        opset: The highest opset the result may need; None keeps the model's own.
    """

    gqa: str = AUTO
    cache: str = AUTO
    opset: int | None = 17

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "gqa": GROUP_CHOICES,
        "cache": (AUTO, "rows", "copy"),
    }


def lower_to_primitives(
    call: AttentionCall, b: NodeBuilder, options: PrimitivesOptions
) -> dict[int, ir.Value]:
    """Write one attention as matmuls around a softmax; the outputs by position."""
    heads = split_inputs(b, call)
    form = group_form(call, options.gqa)
    S, T = query_length(b, call), key_length(b, call)
    mask = read_mask(b, call, S, T)
    rows = rows_to_keep(b, call, mask)

    query = form.query(b, call, scale_query(b, call, heads.q))
    raw = scores_of(b, call, form, query, heads.k)
    capped = softcap(b, call, raw)
    biased = _add_bias(b, call, form, mask, capped, S, T)
    weights = softmax(b, call, biased)
    matmul = weighted_values(b, call, form, weights, heads.v)

    y = zero_closed_rows(b, call, rows, form.restore(b, call, matmul, call.Dv))
    outputs = {Y: as_input_rank(b, call, y), PRESENT_KEY: heads.k, PRESENT_VALUE: heads.v}
    mode = call.facts.qk_output_mode
    if mode is not None:
        stage = form.restore(b, call, (raw, capped, biased, weights)[mode], T)
        outputs[QK_OUTPUT] = zero_closed_rows(b, call, rows, stage) if mode == 3 else stage
    return outputs


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
