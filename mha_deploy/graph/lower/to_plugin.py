"""Attention as one node of our TensorRT plugin (`plugin_node`), which reads projections where they lie.

What stands between the projections and the node in other dialects is gone here: heads are neither split nor
merged, keys and values are not repeated for groups, causal masks and windows are attributes, padding is one
number for each batch row, and a static cache is written by the node itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from mha_deploy.graph.attention_node import PRESENT_KEY, PRESENT_VALUE, Y
from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.lower.call import AttentionCall
from mha_deploy.graph.lower.heads import key_length, split_inputs
from mha_deploy.graph.lower.plugin_limits import refuse_what_is_missing
from mha_deploy.graph.lower.plugin_operands import Place, operands_of, place_of
from mha_deploy.graph.lower.plugin_sight import read_sight
from mha_deploy.graph.lower.plugin_write import finished, write_attention
from mha_deploy.graph.lower.to_primitives import OPERATOR_RULES

DIALECT = "plugin"

__all__ = ["DIALECT", "OPERATOR_RULES", "PluginOptions", "lower_to_plugin"]


@dataclass(frozen=True, kw_only=True)
class PluginOptions:
    """What goes into the plugin's nodes.

    Args:
        pack: Pack the projections that read the same input into one product first; the node reads its parts.
        linear: Write projections as nodes of the plugin, which sum in FP32.
        linear_scope: Which ones: those around an `attention`, or `all` products with constant weights.
        empty_rows: `zero` for what ONNX asks of a query that sees no key; `ignore` where no mask leaves one.
        cache: `append` lets the node write the new rows of a static cache; `copy` writes them with ScatterND
            before the attention; `auto` is `append` where the pattern is found, else `copy`.
        limits: Refuse the types and head sizes that the plugin has no kernels for. Without, the node is
            written all the same: for the reference operator (`plugin_reference`), which takes them all.
        opset: The highest opset the result may need; None keeps the model's own.
    """

    pack: bool = True
    linear: bool = False
    linear_scope: str = "attention"
    empty_rows: str = "zero"
    cache: str = "auto"
    limits: bool = True
    opset: int | None = 17

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "linear_scope": ("attention", "all"),
        "empty_rows": ("zero", "ignore"),
        "cache": ("auto", "append", "copy"),
    }


def lower_to_plugin(call: AttentionCall, b: NodeBuilder, options: PluginOptions) -> dict[int, ir.Value]:
    """Write one attention as a node of the plugin; the outputs by position."""
    refuse_what_is_missing(call, limits=options.limits)
    # The rows of a past are joined to the new ones first; without a past these heads serve `present` only.
    heads = split_inputs(b, call)
    query = place_of(call.q, call.Hq, call.D)
    if call.past_key is None:
        key, value = place_of(call.k, call.Hkv, call.D), place_of(call.v, call.Hkv, call.Dv)
        T = key.length(b)
    else:
        key, value, T = Place(heads.k, 0), Place(heads.v, 0), key_length(b, call)
    S = query.length(b)
    sight = read_sight(b, call, S, T, empty_rows=options.empty_rows)
    y = write_attention(b, call, operands_of((query, key, value)), sight)[0]
    return {Y: finished(b, call, sight, y), PRESENT_KEY: heads.k, PRESENT_VALUE: heads.v}
