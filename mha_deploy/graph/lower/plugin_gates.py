"""Factors on the heads of each token behind an attention, taken into the node: heads with 0 are not computed.

    Attention -> Reshape [B, S, Hq, D] -> Mul [B, S, Hq, 1]
    becomes   Attention(…, gates [B, S, Hq]) -> Reshape

It means the same for any factors, as 0 times a finite number is 0.
"""

from __future__ import annotations

import onnx_ir as ir

from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.lower.call import same_size
from mha_deploy.graph.lower.plugin_operands import constant_ints, dims, made_by
from mha_deploy.graph.plugin_node import NO_WINDOW

_HEAD_SIZES = (32, 64, 96, 128)
_OTHERS = ("has_bias", "has_cache", "has_gates")


def take_gates(attention: ir.Node, *, limits: bool) -> bool:
    """Give the gates behind an attention to the node, if there are any; whether it took some.

    Args:
        attention: The plugin's node; it is changed.
        limits: Whether only the head sizes count that the kernel has.
    """
    found = _gated(attention) if _has_place(attention, limits=limits) else None
    if found is None:
        return False
    split, product, factor = found
    count = len(attention.inputs)
    gates = _without_last_axis(attention, factor, product)
    attention.resize_inputs(count + 1)
    attention.replace_input_with(count, gates)
    attention.attributes.add(ir.AttrInt64("has_gates", 1))
    product.outputs[0].replace_all_uses_with(split.outputs[0])
    if attention.graph is not None:
        attention.graph.sort()  # what computes the gates may stand behind the attention
    return True


def _has_place(attention: ir.Node, *, limits: bool) -> bool:
    """Whether the kernel for chosen heads has what this attention needs."""
    own = attention.attributes
    if any(own.get_int(name, 0) for name in _OTHERS):
        return False
    if any(own.get_int(name, NO_WINDOW) != NO_WINDOW for name in ("left_window", "right_window")):
        return False
    size = own.get_int("head_size", 0)
    same_sizes = size in _HEAD_SIZES and own.get_int("value_size", 0) == size
    return not limits or (same_sizes and own.get_float("scale", 0.0) > 0.0)


def _gated(attention: ir.Node) -> tuple[ir.Node, ir.Node, ir.Value] | None:
    """The Reshape, the Mul and the factor `[B, S, Hq, 1]`, where nobody else reads the heads.

    So the factor cannot hang on the attention, and can be an input of it.
    """
    rows = attention.outputs[0]
    split = _only_reader(rows)
    product = None if split is None or split.op_type != "Reshape" else _only_reader(split.outputs[0])
    if split is None or product is None or product.op_type != "Mul" or product.outputs[0].is_graph_output():
        return None
    heads, size = (attention.attributes.get_int(name, 0) for name in ("query_heads", "value_size"))
    B, S, _ = dims(rows)
    if dims(split.outputs[0])[2:] != (heads, size):
        return None
    for factor in product.inputs:
        shape = dims(factor)
        if factor is None or factor is split.outputs[0] or shape[2:] != (heads, 1):
            continue
        if same_size(shape[0], B) and same_size(shape[1], S):
            return split, product, factor
    return None


def _only_reader(value: ir.Value) -> ir.Node | None:
    uses = list(value.uses())
    alone = len(uses) == 1 and not value.is_graph_output() and uses[0].node.domain == ""
    return uses[0].node if alone else None


def _without_last_axis(attention: ir.Node, factor: ir.Value, product: ir.Node) -> ir.Value:
    """The gates `[B, S, Hq]`: as they were before the last axis was added, else with it taken off."""
    widened = made_by(factor, "Unsqueeze")
    if widened is not None and constant_ints(widened, 1) in ((-1,), (3,)) and widened.inputs[0] is not None:
        return widened.inputs[0]
    b = NodeBuilder(f"{attention.name}_gates")
    heads = attention.attributes.get_int("query_heads", 0) or 0
    gates = b.reshape(factor, 0, 0, heads)
    gates.type, gates.shape = factor.type, ir.Shape(dims(factor)[:3])
    if product.graph is not None:
        product.graph.insert_before(product, b.nodes)
    return gates
