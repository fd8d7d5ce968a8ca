"""Variations of a graph that compute in float32, or without fusion."""

from __future__ import annotations

import onnx_ir as ir

_PRODUCTS = frozenset({"MatMul", "Gemm", "Attention"})
_WIDE_INSIDE = frozenset(
    {"LayerNormalization", "RMSNormalization", "ReduceMean", "ReduceSum", "Softmax", "Gelu", "Erf", "Tanh"}
)
_HALVES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def with_float32_products(model: ir.Model) -> ir.Model:
    """A copy of the model whose matmuls and attentions compute in float32; weights are shared."""
    return _widened(model, _PRODUCTS)


def with_float32_inside(model: ir.Model) -> ir.Model:
    """The same for all else that kernels compute in float32: normalisations, sums, softmax, activations."""
    return _widened(model, _PRODUCTS | _WIDE_INSIDE)


def _widened(model: ir.Model, operators: frozenset[str]) -> ir.Model:
    copy = model.clone()
    if any(value.dtype is None for node in copy.graph for value in node.outputs if value.name):
        from onnx_ir.passes.common import ShapeInferencePass

        copy = ShapeInferencePass()(copy).model  # other people's files often leave types out
    for node in list(copy.graph):
        if node.op_type in operators and node.domain == "":
            _widen(node)
    return copy


def _widen(node: ir.Node) -> None:
    graph = node.graph
    if graph is None:
        raise ValueError(f"Node {node.name!r} belongs to no graph.")
    for position, value in enumerate(node.inputs):
        if value is not None and value.dtype in _HALVES:
            cast = _cast(value, ir.DataType.FLOAT, f"{node.name}/input_{position}")
            graph.insert_before(node, cast)
            node.replace_input_with(position, cast.outputs[0])
    for output in node.outputs:
        if output.dtype in _HALVES and output.name:
            _round_again(graph, node, output)


def _round_again(graph: ir.Graph, node: ir.Node, output: ir.Value) -> None:
    half, name = output.dtype, output.name
    if half is None:
        raise ValueError(f"{name} has no type.")
    cast = _cast(output, half, f"{node.name}/{name}")
    rounded = cast.outputs[0]
    output.replace_all_uses_with(rounded, replace_graph_outputs=True)
    cast.replace_input_with(0, output)
    output.name, rounded.name = f"{name}/float32", name
    output.type = ir.TensorType(ir.DataType.FLOAT)  # a new one: copies of a model share their types
    graph.insert_after(node, cast)


def _cast(value: ir.Value, to: ir.DataType, name: str) -> ir.Node:
    cast = ir.node("Cast", inputs=[value], attributes={"to": to}, name=f"{name}/cast")
    result = cast.outputs[0]
    result.name, result.shape, result.type = f"{name}/{to.name.lower()}", value.shape, ir.TensorType(to)
    return cast
