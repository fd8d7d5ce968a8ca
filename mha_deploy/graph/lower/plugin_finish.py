"""What is left to do when every attention is a node of the plugin: turns that cancel, gates, products."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from mha_deploy.graph.lower.plugin_gates import take_gates
from mha_deploy.graph.lower.plugin_linear import write_linear
from mha_deploy.graph.lower.plugin_turns import cancel_turns
from mha_deploy.graph.plugin_node import is_plugin_attention

if TYPE_CHECKING:
    from mha_deploy.graph.lower.to_plugin import PluginOptions


def finish(model: ir.Model, options: PluginOptions) -> None:
    """Take away what the attention nodes make superfluous, and write projections as the options ask.

    Args:
        model: The model, every attention of it lowered. It is changed.
        options: Options of the lowering.
    """
    attentions = [node for node in model.graph.all_nodes() if is_plugin_attention(node)]
    for node in attentions:
        cancel_turns(node)
    RemoveUnusedNodesPass()(model)  # gates are taken only where nobody else reads the heads
    for node in attentions:
        if take_gates(node, limits=options.limits):
            cancel_turns(node)
    if options.linear:
        write_linear(model, scope=options.linear_scope, limits=options.limits)
    RemoveUnusedNodesPass()(model)
