"""Bring a graph into the one form that measuring, planning and writing agree on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from mha_deploy.errors import DeployError
from mha_deploy.graph.lower.rewrite import infer_shapes

FLOAT = ir.DataType.FLOAT

TYPE_BLIND = frozenset({"Shape", "Size"})
"""Operators that look at a tensor without reading its numbers."""

_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
_CONSTANTS = ("value", "value_float", "value_floats")


def prepared(model: ir.Model) -> ir.Model:
    """A copy: functions inlined, types known, float32 constants as initializers, each node with its own name.

    The copy of a copy is the same, so a plan made from one fits the other. Weights are shared.

    Raises:
        DeployError: The graph has branches or loops, defaults for its inputs, or a tensor of unknown type.
    """
    copy = model.clone()
    if copy.functions:
        InlinePass()(copy)
    _refuse_branches(copy.graph)
    infer_shapes(copy)
    _lift_constants(copy.graph)
    _name_nodes(copy.graph)
    _refuse_unknown(copy.graph)
    return copy


def is_float(value: ir.Value | None) -> bool:
    """Whether a value is there and of float32."""
    return value is not None and value.dtype == FLOAT


def float_inputs(node: ir.Node) -> Iterator[tuple[int, ir.Value]]:
    """The float32 inputs of a node whose numbers it reads, with their positions."""
    if node.op_type in TYPE_BLIND and node.domain == "":
        return
    for position, value in enumerate(node.inputs):
        if value is not None and value.dtype == FLOAT:
            yield position, value


def float_outputs(node: ir.Node) -> Iterator[tuple[int, ir.Value]]:
    """The float32 outputs of a node, with their positions."""
    for position, value in enumerate(node.outputs):
        if value.name and value.dtype == FLOAT:
            yield position, value


def is_op(node: ir.Node | None, *op_types: str) -> bool:
    """Whether a node is one of these operators of ONNX's own set."""
    return node is not None and node.domain == "" and node.op_type in op_types


def constant_of(value: ir.Value) -> np.ndarray | None:
    """The numbers of an initializer; None for every other value."""
    tensor = value.const_value if value.is_initializer() else None
    return None if tensor is None else tensor.numpy()


def name_of(value: ir.Value) -> str:
    """The name of a value, which every value of a prepared graph has."""
    return value.name or ""


def _refuse_branches(graph: ir.Graph) -> None:
    for node in graph:
        if any(attribute.type in _GRAPHS for attribute in node.attributes.values()):
            raise DeployError(
                "A graph with branches or loops is not written in mixed precision.",
                got=f"{node.op_type} {node.name or ''}".strip(),
                hint="export without control flow, or choose --precision fp32 or bf16",
            )
    both = [value.name for value in graph.inputs if value.is_initializer()]
    if both:
        raise DeployError(
            "A graph input has a default, which would need two types.", got=", ".join(map(str, both))
        )


def _lift_constants(graph: ir.Graph) -> None:
    for node in [node for node in graph if is_op(node, "Constant")]:
        tensor = _constant_tensor(node)
        old = node.outputs[0]
        if tensor is None or tensor.dtype != FLOAT or old.is_graph_output():
            continue
        new = ir.Value(name=old.name, type=ir.TensorType(FLOAT), const_value=tensor)
        new.shape = ir.Shape(tensor.numpy().shape)
        old.replace_all_uses_with(new)
        graph.remove(node, safe=True)
        graph.register_initializer(new)


def _constant_tensor(node: ir.Node) -> ir.TensorProtocol | None:
    for name in _CONSTANTS:
        attribute = node.attributes.get(name)
        if attribute is not None:
            value = attribute.value
            if isinstance(value, ir.TensorProtocol):
                return value
            return ir.Tensor(np.array(value, np.float32), dtype=FLOAT)
    return None


def _name_nodes(graph: ir.Graph) -> None:
    taken: set[str] = set()
    for node in graph:
        if not node.name or node.name in taken:
            node.name = next((str(value.name) for value in node.outputs if value.name), node.op_type)
        taken.add(node.name)


def _refuse_unknown(graph: ir.Graph) -> None:
    for node in graph:
        for value in node.outputs:
            if value.name and value.dtype is None and value.uses():
                raise DeployError(
                    "The type of a tensor does not follow from the graph.",
                    got=f"{value.name}, made by {node.domain or 'onnx'}.{node.op_type} {node.name}",
                    hint="write its type into the graph (value_info)",
                )
