"""Where a mistake is put into a graph: before an attention, behind it, or on the way to it."""

from __future__ import annotations

import onnx_ir as ir

from mha_deploy.graph.attention_node import Y, input_at
from mha_deploy.graph.build import NodeBuilder

_NEW_ROWS = 1  # where TensorScatter takes them
_LAYOUT = ("Transpose", "Reshape")


def feed(node: ir.Node, position: int, build: NodeBuilder, value: ir.Value) -> None:
    """Put new nodes before a node and one of its inputs behind them."""
    old = input_at(node, position)
    value.type = old.type if old is not None else ir.TensorType(ir.DataType.BOOL)
    value.shape = old.shape if old is not None else None
    if node.graph is None:
        raise ValueError(f"Node {node.name!r} belongs to no graph.")
    node.graph.insert_before(node, build.nodes)
    if position >= len(node.inputs):
        node.resize_inputs(position + 1)
    node.replace_input_with(position, value)


def feed_one_less(node: ir.Node, position: int, build: NodeBuilder, value: ir.Value) -> None:
    """Let a node take whole numbers that are one too small, but not below 0."""
    feed(node, position, build, build.op("Max", build.op("Sub", value, build.ints(1)), build.ints(0)))


def follow(node: ir.Node, build: NodeBuilder, wrong: ir.Value) -> None:
    """Put new nodes behind an attention, the last one in the place of its output."""
    output = node.outputs[Y]
    takers = [(new, at) for new in build.nodes for at, value in enumerate(new.inputs) if value is output]
    wrong.type, wrong.shape = output.type, output.shape
    output.replace_all_uses_with(wrong, replace_graph_outputs=True)
    for new, at in takers:
        new.replace_input_with(at, output)
    if node.graph is None:
        raise ValueError(f"Node {node.name!r} belongs to no graph.")
    node.graph.insert_after(node, build.nodes)


def new_rows(node: ir.Node, position: int) -> ir.Value | None:
    """What the projections bring to K or V: the input itself, or what is written into a static cache."""
    value = input_at(node, position)
    scatter = value.producer() if value is not None else None
    if scatter is None or scatter.op_type != "TensorScatter":
        return value
    value = scatter.inputs[_NEW_ROWS]
    while value is not None and (layout := value.producer()) is not None and layout.op_type in _LAYOUT:
        value = layout.inputs[0]
    return value


def scatter_of(node: ir.Node, position: int) -> ir.Node | None:
    """The node that writes new rows into the static cache that an attention reads, if there is one."""
    value = input_at(node, position)
    producer = value.producer() if value is not None else None
    return producer if producer is not None and producer.op_type == "TensorScatter" else None
