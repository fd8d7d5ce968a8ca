"""Find the nodes between wide ones: cast down before them and up behind them, nothing would be gained."""

from __future__ import annotations

import onnx_ir as ir

from mha_deploy.graph.attention_node import is_attention
from mha_deploy.graph.mixed.prepare import TYPE_BLIND, float_inputs, float_outputs, is_op
from mha_deploy.graph.mixed.roles import long_axes

_PRODUCTS = ("MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose")


def enclosed_nodes(graph: ir.Graph, kept: set[ir.Node], wide_inputs: set[str]) -> list[ir.Node]:
    """The cheap nodes that read from wide nodes and each other, and lead to wide nodes and each other only.

    Args:
        graph: The graph.
        kept: The nodes that stay wide.
        wide_inputs: The graph inputs that stay wide.
    """
    enclosed = {node for node in graph if node not in kept and _is_cheap(node)}
    while True:
        inside = kept | enclosed
        left = {node for node in enclosed if not _is_enclosed(node, inside, wide_inputs)}
        if not left:
            break
        enclosed -= left
    near = _connected(enclosed, kept)
    return [node for node in graph if node in near]


def _is_cheap(node: ir.Node) -> bool:
    """Whether a node costs about nothing in float32: no product, and no large weights."""
    inputs = [value for _, value in float_inputs(node)]
    if not inputs and not any(True for _ in float_outputs(node)):
        return False
    is_product = is_attention(node) or is_op(node, *_PRODUCTS) or node.domain != ""
    return not is_product and not any(value.is_initializer() and long_axes(value) > 1 for value in inputs)


def _is_enclosed(node: ir.Node, inside: set[ir.Node], wide_inputs: set[str]) -> bool:
    for _, value in float_inputs(node):
        producer = value.producer()
        if producer not in inside and not value.is_initializer() and value.name not in wide_inputs:
            return False
    return all(
        not value.is_graph_output() and all(use in inside for use in _readers(value))
        for _, value in float_outputs(node)
    )


def _readers(value: ir.Value) -> list[ir.Node]:
    return [use.node for use in value.uses() if not is_op(use.node, *TYPE_BLIND)]


def _connected(enclosed: set[ir.Node], kept: set[ir.Node]) -> set[ir.Node]:
    """Those that a wide node is reached from: a part of the graph on its own has no reason to be wide."""
    near: set[ir.Node] = set()
    pending = list(kept)
    while pending:
        node = pending.pop()
        producers = [value.producer() for _, value in float_inputs(node)]
        readers = [reader for _, value in float_outputs(node) for reader in _readers(value)]
        for other in (*producers, *readers):
            if other is not None and other in enclosed and other not in near:
                near.add(other)
                pending.append(other)
    return near
