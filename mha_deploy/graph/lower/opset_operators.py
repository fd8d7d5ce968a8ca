"""Operators that came after opset 17, written in those that were there."""

from __future__ import annotations

import math

import onnx_ir as ir

from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.lower.rewrite import replace_node


def builder_for(node: ir.Node) -> NodeBuilder:
    """A builder whose nodes are named for the node that they stand for."""
    return NodeBuilder(node.name or node.outputs[0].name or node.op_type.lower())


def gelu_to_primitives(node: ir.Node) -> None:
    """Gelu (20): x/2 · (1 + erf(x/√2)), or its tanh form."""
    x = node.inputs[0]
    if x is None or x.dtype is None:
        return
    b = builder_for(node)
    half, one = (b.constant(number, x.dtype) for number in (0.5, 1.0))
    if node.attributes.get_string("approximate", "none") == "tanh":
        bend = _tanh_of_gelu(b, x)
    else:
        bend = b.op("Erf", b.op("Mul", x, b.constant(math.sqrt(0.5), x.dtype)))
    y = b.op("Mul", b.op("Mul", x, half), b.op("Add", bend, one), name="gelu")
    replace_node(node, b, {0: y})


def _tanh_of_gelu(b: NodeBuilder, x: ir.Value) -> ir.Value:
    """tanh(√(2/π) · (x + 0.044715 x³))."""
    dtype = x.dtype or ir.DataType.FLOAT
    cube = b.op("Mul", b.op("Mul", b.op("Mul", x, x), x), b.constant(0.044715, dtype))
    return b.op("Tanh", b.op("Mul", b.op("Add", x, cube), b.constant(math.sqrt(2 / math.pi), dtype)))


def swish_to_primitives(node: ir.Node) -> None:
    """Swish (24): x · sigmoid(αx)."""
    x, alpha = node.inputs[0], node.attributes.get_float("alpha", 1.0)
    if x is None or x.dtype is None:
        return
    b = builder_for(node)
    inner = x if alpha == 1.0 else b.op("Mul", x, b.constant(alpha, x.dtype))
    replace_node(node, b, {0: b.op("Mul", x, b.op("Sigmoid", inner), name="swish")})


def mish_to_primitives(node: ir.Node) -> None:
    """Mish (18): x · tanh(softplus(x))."""
    b, x = builder_for(node), node.inputs[0]
    replace_node(node, b, {0: b.op("Mul", x, b.op("Tanh", b.op("Softplus", x)), name="mish")})
