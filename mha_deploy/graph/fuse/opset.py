"""Take a model up to the opset that has `Attention`."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from mha_deploy.errors import DeployError

ATTENTION_OPSET = 23
_OLDEST = 18
# The same node means something else since this version.
_CHANGED_SINCE = {"GridSample": 20, "DFT": 20, "GroupNormalization": 21}


def raise_opset(model: ir.Model) -> ir.Model:
    """Declare opset 23 for a model of an older one, where its nodes mean the same there.

    Raises:
        DeployError: The opset is too old, or a node has another meaning in the newer one.
    """
    current = model.opset_imports.get("", 1)
    if current >= ATTENTION_OPSET:
        return model
    hint = "export the module at opset 23"
    if current < _OLDEST:
        raise DeployError("The graph is older than opset 18.", got=f"opset {current}", hint=hint)
    for node in model.graph.all_nodes():
        if node.domain == "" and current < _CHANGED_SINCE.get(node.op_type, 0):
            raise DeployError(
                f"{node.op_type} means something else in opset {ATTENTION_OPSET}.", got=node.name, hint=hint
            )
        node.version = None
    model.graph.opset_imports[""] = ATTENTION_OPSET
    needed = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", ATTENTION_OPSET)], True)
    model.ir_version = max(model.ir_version, needed)
    return model
