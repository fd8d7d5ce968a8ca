"""The nodes of the plugin library: their names, and the values of their attributes."""

from __future__ import annotations

from typing import Any, Final

import onnx_ir as ir

OP_TYPE: Final = "MhaDeployAttention"
LINEAR: Final = "MhaDeployLinear"
NORM_ACTIVATION: Final = "MhaDeployNormActivation"
DOMAIN: Final = "mha_deploy"
VERSION: Final = "1"
"""The version of both nodes: their attributes, inputs and meaning. Another meaning is another version."""

LAYER_NORM, RMS_NORM, GELU, GELU_TANH, SILU = range(5)
"""Values of the attribute `operation` of a node of norm or activation."""

NONE, TOP_LEFT, BOTTOM_RIGHT = range(3)
"""Values of the attribute `causal`: no diagonal, or the corner that the causal diagonal is aligned to."""

FROM_ZERO, FROM_STARTS, PER_TOKEN, GIVEN = range(4)
"""Values of `rotary_positions`, the table row of query s: s, starts[b] + s, b · S + s, or an input."""

NO_WINDOW: Final = -1
"""The value of `left_window` and `right_window` without a limit."""


def is_plugin_attention(node: ir.Node) -> bool:
    """Whether a node is one whole attention of the plugin."""
    return (node.domain, node.op_type) == (DOMAIN, OP_TYPE)


def lookup_attributes() -> dict[str, Any]:
    """The attributes by which TensorRT finds the plugin of a node."""
    return {"plugin_version": VERSION, "plugin_namespace": DOMAIN}
