"""Fold the softmax scale into the weights of the query projection.

Q·Kᵀ·s = (Q·s)·Kᵀ, and Q·s = x·(Wq·s) + bq·s. A scale that is a power of two (D = 64, 256) rounds no
weight, unless it becomes subnormal; any other rounds each weight once, in the weights' own type. The node's
`metadata_props` say which it was. Fold before packing: a packed product has no query weights of its own.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from mha_deploy.graph.attention_node import Q, is_attention, read_attention
from mha_deploy.graph.lower.pack import Projection, drop_if_unused, new_initializer, projection_at
from mha_deploy.graph.lower.rewrite import copy_of

NOTE = "mha_deploy.folded_scale"
"""Key of the note that a folded attention carries: the scale, and whether folding was exact."""

# Operators for which f(a·x) = a·f(x), looking through their first input.
_LINEAR = frozenset({"Reshape", "Transpose", "Identity", "Squeeze", "Unsqueeze", "RotaryEmbedding"})


def fold_scale(model: ir.Model, *, exact_only: bool = False) -> ir.Model:
    """Multiply the query weights by the scale, and set the scale of the attention to 1.

    An attention whose queries do not come from a projection of their own is left as it is.

    Args:
        model: A model with ONNX `Attention` nodes. It is not changed.
        exact_only: Fold only where no weight is rounded.

    Returns:
        A new model that computes the same up to one rounding of each query weight.
    """
    folded = copy_of(model)
    for node in [node for node in folded.graph.all_nodes() if is_attention(node)]:
        scale = read_attention(node).softmax_scale
        projection = _query_projection(node)
        if scale is not None and scale != 1.0 and projection is not None:
            _fold(node, projection, scale, exact_only=exact_only)
    return folded


def _query_projection(attention: ir.Node) -> Projection | None:
    """The projection behind Q, if nothing else reads it on the way."""
    value = attention.inputs[Q]
    while value is not None and len(value.uses()) == 1 and not value.is_graph_output():
        node = value.producer()
        if node is None:
            return None
        if node.domain == "" and node.op_type in _LINEAR:
            value = node.inputs[0]
            continue
        matmul = _matmul_of(node)
        projection = None if matmul is None else projection_at(matmul)
        return projection if projection is not None and projection.y is value else None
    return None


def _matmul_of(node: ir.Node) -> ir.Node | None:
    """The node itself, or the MatMul whose bias it adds."""
    if node.op_type != "Add":
        return node if node.op_type == "MatMul" else None
    producers = [value.producer() for value in node.inputs if value is not None]
    return next((p for p in producers if p is not None and p.op_type == "MatMul"), None)


def _fold(attention: ir.Node, projection: Projection, scale: float, *, exact_only: bool) -> None:
    graph = projection.matmul.graph
    if not isinstance(graph, ir.Graph):
        return
    weight, weight_exact = _times(projection.weight_array, scale)
    bias, bias_exact = _times(projection.bias_array, scale)
    if exact_only and not (weight_exact and bias_exact):
        return
    _replace_constant(graph, projection.matmul, projection.weight, weight)
    if projection.add is not None and projection.bias is not None:
        _replace_constant(graph, projection.add, projection.bias, bias)
    attention.attributes.add(ir.AttrFloat32("scale", 1.0))
    how = "exact" if weight_exact and bias_exact else "query weights rounded once"
    attention.metadata_props[NOTE] = f"{scale!r}, {how}"


def _times(array: np.ndarray, scale: float) -> tuple[np.ndarray, bool]:
    """The product in the array's type, and whether it is the exact one."""
    product = array.astype(np.float64) * scale
    rounded = product.astype(array.dtype)
    return rounded, bool(np.array_equal(rounded.astype(np.float64), product))


def _replace_constant(graph: ir.Graph, node: ir.Node, old: ir.Value, array: np.ndarray) -> None:
    """Give a node a constant of its own: others may read the old one."""
    name = f"{old.name}_scaled"
    while name in graph.initializers:
        name += "_again"
    new = new_initializer(graph, name, array)
    node.replace_input_with(next(i for i, value in enumerate(node.inputs) if value is old), new)
    drop_if_unused(graph, old)
