"""One GEMM instead of three: pack the projections that read the same input.

Packing changes no number: each output column is the same dot product as before. Do it before lowering, while
the Attention nodes still show which matmuls are projections.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, count
from typing import cast

import numpy as np
import onnx_ir as ir

from mha_deploy.graph.attention_node import K, Q, V, is_attention
from mha_deploy.graph.ir import NodeBuilder, constant, is_op, new_initializer, nodes_behind, replace_value


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A MatMul with constant weights, and the Add of its bias where it has one."""

    matmul: ir.Node
    add: ir.Node | None
    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None

    @property
    def y(self) -> ir.Value:
        """The output of the projection, bias included."""
        return (self.add or self.matmul).outputs[0]


def pack_in_place(model: ir.Model) -> bool:
    """Pack the projections of each attention that read the same input into one MatMul and a Split.

    Self attention has three of them, cross attention two (keys and values). A missing bias becomes zeros. The
    model is changed; whether there were any.
    """
    done: set[ir.Node] = set()
    for attention in [node for node in model.graph.all_nodes() if is_attention(node)]:
        for group in _groups(attention):
            if done.isdisjoint(projection.matmul for projection in group):
                done.update(projection.matmul for projection in group)
                _pack(group, attention)
    return bool(done)


def projection_at(matmul: ir.Node) -> Projection | None:
    """Read a MatMul as a projection; None where its weights are not constant."""
    x, weight = matmul.inputs if is_op(matmul, "MatMul") else (None, None)
    if x is None or weight is None or not _is_constant(weight, 2):
        return None
    uses, add, bias = list(matmul.outputs[0].uses()), None, None
    if len(uses) == 1 and uses[0].node.op_type == "Add" and not matmul.outputs[0].is_graph_output():
        added = uses[0].node.inputs[1 - uses[0].idx]
        if added is not None and _is_constant(added, 1):
            add, bias = uses[0].node, added
    return Projection(matmul=matmul, add=add, x=x, weight=weight, bias=bias)


def _groups(attention: ir.Node) -> list[list[Projection]]:
    """The projections of Q, K and V that share an input, two or more together."""
    groups: dict[tuple[ir.Value, ir.Graph | ir.Function | None], list[Projection]] = {}
    seen: set[ir.Node] = set()
    for position in (Q, K, V):
        up_to_matmuls = nodes_behind(
            [attention.inputs[position]], lambda node: () if is_op(node, "MatMul") else node.inputs
        )
        for node in up_to_matmuls:
            projection = None if node in seen else projection_at(node)
            seen.add(node)
            if projection is not None:
                groups.setdefault((projection.x, node.graph), []).append(projection)
    types = {
        key: {each.dtype for p in group for each in (p.weight, p.bias) if each is not None}
        for key, group in groups.items()
    }
    return [group for key, group in groups.items() if len(group) > 1 and len(types[key]) == 1]


def _pack(group: list[Projection], attention: ir.Node) -> None:
    """Replace a group by one matmul; the values that were its outputs keep their names."""
    graph = group[0].matmul.graph
    if not isinstance(graph, ir.Graph):
        return
    # No slash after the attention's own name: that prefix is reserved for its lowering.
    name = f"{attention.name or attention.outputs[0].name}_qkv"
    names = chain([name], (f"{name}{number}" for number in count(2)))
    b = NodeBuilder(next(each for each in names if f"{each}_weight" not in graph.initializers))
    weights = [_numbers(projection.weight) for projection in group]
    biases = [
        np.zeros(weight.shape[1], weight.dtype) if each.bias is None else _numbers(each.bias)
        for each, weight in zip(group, weights, strict=True)
    ]
    packed = new_initializer(graph, f"{b.prefix}_weight", np.concatenate(weights, axis=1))
    y = b.op("MatMul", group[0].x, packed)
    if any(projection.bias is not None for projection in group):
        y = b.op("Add", y, new_initializer(graph, f"{b.prefix}_bias", np.concatenate(biases)))
    sizes = b.ints(*(weight.shape[1] for weight in weights))
    parts = b.node("Split", [y, sizes], outputs=len(group), attributes={"axis": -1})
    members = {projection.matmul for projection in group}
    graph.insert_before(next(node for node in graph if node in members), b.nodes)
    for projection, part in zip(group, parts, strict=True):
        replace_value(projection.y, part)
        graph.remove([node for node in (projection.add, projection.matmul) if node is not None], safe=True)
        for value in (projection.weight, projection.bias):
            if value is not None and value.is_initializer() and not value.uses() and value.name:
                graph.initializers.pop(value.name)


def _is_constant(value: ir.Value, rank: int) -> bool:
    tensor = constant(value)
    return tensor is not None and len(tensor.shape) == rank


def _numbers(value: ir.Value) -> np.ndarray:
    return cast(ir.TensorProtocol, constant(value)).numpy()
