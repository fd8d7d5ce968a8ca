"""What the nodes of our TensorRT plugin are called: the lowering writes these names, engines look them up.

`MhaDeployAttention` is one whole attention, `MhaDeployLinear` one projection. TensorRT finds a plugin by the
node's type together with the attributes `plugin_version` and `plugin_namespace`.
"""

from __future__ import annotations

from typing import Any, Final

import onnx_ir as ir

OP_TYPE: Final = "MhaDeployAttention"
LINEAR: Final = "MhaDeployLinear"
DOMAIN: Final = "mha_deploy"
VERSION: Final = "1"
"""The version of both nodes: their attributes, inputs and meaning. Another meaning is another version."""

VERSION_ATTRIBUTE: Final = "plugin_version"
NAMESPACE_ATTRIBUTE: Final = "plugin_namespace"

NONE, TOP_LEFT, BOTTOM_RIGHT = range(3)
"""Values of the attribute `causal`: where the diagonal ends at which a query stops to see keys."""

NO_WINDOW: Final = -1
"""The value of `left_window` and `right_window` that leaves a side open."""


def is_plugin_attention(node: ir.Node) -> bool:
    """Whether a node is one whole attention of the plugin."""
    return (node.domain, node.op_type) == (DOMAIN, OP_TYPE)


def lookup_attributes() -> dict[str, Any]:
    """The attributes by which TensorRT finds the plugin of a node."""
    return {VERSION_ATTRIBUTE: VERSION, NAMESPACE_ATTRIBUTE: DOMAIN}
