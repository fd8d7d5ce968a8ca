"""Which value of the program tells what an `Attention` node of the graph must compute."""

from __future__ import annotations

import onnx_ir as ir

from mha_deploy.export.exported import ExportedModule
from mha_deploy.graph.attention_node import is_attention

# Operators behind an attention that only lay its numbers out in another way.
_LAYOUT = frozenset({"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Identity", "Cast"})


def attention_values(model: ir.Model, exported: ExportedModule) -> dict[str, str]:
    """For every `Attention` node the nearest value behind it that the program computes, too.

    It is the node's own result, or that in another layout: a fused node may have a Transpose behind it that
    the program did in one step with the product.

    Args:
        model: The graph, or what `fuse_attention` made of it.
        exported: The module that it was exported from.

    Returns:
        Names of values by node name, in the order of the graph. Nodes without such a value are left out.
    """
    found = {}
    for node in model.graph.all_nodes():
        if is_attention(node):
            value = _nearest(node.outputs[0], exported)
            if value is not None and node.name is not None:
                found[node.name] = value
    return found


def _nearest(value: ir.Value, exported: ExportedModule) -> str | None:
    """The value itself, or the first one behind it that only another layout parts from it."""
    pending = [value]
    while pending:
        each = pending.pop(0)
        if each.name is not None and exported.node_of(each.name) is not None:
            return each.name
        users = [use.node for use in each.uses()]
        pending += [user.outputs[0] for user in users if user.domain == "" and user.op_type in _LAYOUT]
    return None
