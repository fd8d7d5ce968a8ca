"""Projections as nodes of the plugin, which sum in FP32; TensorRT 8.6 picks kernels that sum in FP16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import onnx_ir as ir

from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.lower.pack import Projection, matmuls_behind, projection_at
from mha_deploy.graph.lower.plugin_operands import dims
from mha_deploy.graph.lower.rewrite import import_domains, names_in, prefix_within, replace_node
from mha_deploy.graph.plugin_node import DOMAIN, LINEAR, is_plugin_attention, lookup_attributes

ALL = "all"

_TYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

# What may stand between an attention and the projection of its result.
_BETWEEN = frozenset({"Cast", "Identity", "Mul", "Reshape", "Squeeze", "Transpose", "Unsqueeze", "Where"})


def write_linear(model: ir.Model, *, scope: str, limits: bool) -> None:
    """Write products with constant weights, and the sums with their biases, as nodes of the plugin.

    Args:
        model: The model, every attention of it lowered. It is changed.
        scope: `attention` for the products that feed or follow an attention, `all` for every one.
        limits: Whether only the types count that the plugin has.
    """
    nodes = list(model.graph.all_nodes())
    chosen = nodes if scope == ALL else _around_attention(nodes)
    taken = names_in(model)
    for matmul in dict.fromkeys(chosen):
        projection = projection_at(matmul) if matmul.op_type == "MatMul" and matmul.domain == "" else None
        if projection is not None and _fits(projection, limits=limits):
            b = NodeBuilder(prefix_within(matmul.name or projection.y.name or LINEAR, taken))
            _write(_with_whole_bias(projection), b)
            import_domains(model, b)


def _around_attention(nodes: list[ir.Node]) -> Iterator[ir.Node]:
    for attention in filter(is_plugin_attention, nodes):
        operands = 1 + max(attention.attributes["sources"].as_ints())
        for value in attention.inputs[:operands]:
            yield from matmuls_behind(value) if value is not None else ()
        yield from _products_of(attention.outputs[0])


def _products_of(rows: ir.Value) -> Iterator[ir.Node]:
    """The products that read the result of an attention."""
    pending = [rows]
    while pending:
        for use in pending.pop().uses():
            if use.node.op_type == "MatMul" and use.idx == 0:
                yield use.node
            elif use.node.op_type in _BETWEEN and use.node.domain == "":
                pending += use.node.outputs


def _fits(projection: Projection, *, limits: bool) -> bool:
    if not dims(projection.x):
        return False
    return not limits or (projection.x.dtype in _TYPES and projection.weight.dtype == projection.x.dtype)


def _with_whole_bias(projection: Projection) -> Projection:
    """The projection without a bias that is not one number for each column: that stays an Add."""
    columns = dims(projection.weight)[1:]
    whole = projection.bias is None or dims(projection.bias) == columns
    return projection if whole else replace(projection, add=None, bias=None)


def _write(projection: Projection, b: NodeBuilder) -> None:
    inputs = [projection.x, projection.weight, *([] if projection.bias is None else [projection.bias])]
    attributes = {"has_bias": int(projection.bias is not None), **lookup_attributes()}
    y = b.node(LINEAR, inputs, domain=DOMAIN, name=b.prefix, attributes=attributes)[0]
    graph = projection.matmul.graph
    replace_node(projection.add or projection.matmul, b, {0: y})
    if projection.add is not None and graph is not None:
        graph.remove(projection.matmul, safe=True)
