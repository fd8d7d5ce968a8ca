"""A copy of a model whose outputs are the inputs of every attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from mha_deploy.errors import DeployError
from mha_deploy.graph.attention_node import (
    AttentionNode,
    attention_nodes,
    inputs_by_role,
    is_attention,
    read_attention,
)
from mha_deploy.graph.ir import constant, graph_of_node


@dataclass(frozen=True, kw_only=True)
class ProbedAttention:
    """Which outputs of a probe are the inputs of one attention.

    Args:
        node: Its attributes and shapes.
        outputs: The probe's output for each of `Q`, `K`, `V` and, where there are, `mask`, `past` (keys),
            `past_values` and `lengths` (of the valid keys).
        tensors: The names that the same tensors have in the model.
        lowest_mask_constant: The lowest finite number among the constants that the mask is computed from. A
            Cast may change it before it reaches the mask.
    """

    node: AttentionNode
    outputs: Mapping[str, str]
    tensors: Mapping[str, str]
    lowest_mask_constant: float | None


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A model whose outputs are the inputs of the attentions, and which is which."""

    model: ir.Model
    attentions: tuple[ProbedAttention, ...]


def attention_probe(model: ir.Model) -> Probe:
    """A copy of the model with the inputs of every attention as its only outputs.

    Unused nodes are removed. The graph inputs stay, so the copy takes the same arrays; weights are shared.

    Raises:
        DeployError: There is no attention, or one is in a function or a branch.
    """
    copy = model.clone()
    nodes = [node for node in copy.graph if is_attention(node)]
    everywhere = attention_nodes(model)
    if not everywhere:
        raise DeployError("The graph has no Attention node.", got=model.graph.name)
    if len(nodes) != len(everywhere):
        raise DeployError(
            "An attention is inside a function or a branch, where its inputs cannot be outputs.",
            got=", ".join(f"{node.name} in {node.graph}" for node in everywhere),
            hint="inline the functions of the graph",
        )
    outputs: list[ir.Value] = []
    attentions = [_probe_one(node, index, outputs) for index, node in enumerate(nodes)]
    copy.graph.outputs[:] = outputs
    RemoveUnusedNodesPass()(copy)
    return Probe(model=copy, attentions=tuple(attentions))


def _probe_one(node: ir.Node, index: int, outputs: list[ir.Value]) -> ProbedAttention:
    present = inputs_by_role(node)
    shown = {role: _show(node, value, f"probe_{index}/{role}") for role, value in present.items()}
    outputs.extend(shown.values())
    return ProbedAttention(
        node=read_attention(node),
        outputs={role: str(value.name) for role, value in shown.items()},
        tensors={role: str(value.name) for role, value in present.items()},
        lowest_mask_constant=_lowest_constant(present.get("mask")),
    )


def _show(attention: ir.Node, value: ir.Value, name: str) -> ir.Value:
    """The value after an Identity: it may be a graph input, a weight, or an input twice."""
    identity = ir.node("Identity", inputs=[value], name=name)
    shown = identity.outputs[0]
    shown.name, shown.type, shown.shape = name, value.type, value.shape
    graph_of_node(attention).insert_before(attention, identity)
    return shown


def _lowest_constant(value: ir.Value | None) -> float | None:
    """The lowest finite number of the floating-point constants that a value is computed from."""
    found: list[float] = []
    pending, seen = [value], set[int]()
    while pending:
        value = pending.pop()
        if value is None or id(value) in seen:
            continue
        seen.add(id(value))
        tensor, node = constant(value), value.producer()
        if tensor is not None and tensor.dtype.is_floating_point():
            array = tensor.numpy().astype(np.float64)
            found += [float(array.min(initial=np.inf, where=np.isfinite(array)))]
        if node is not None:
            pending.extend(node.inputs)
    return min((number for number in found if number < np.inf), default=None)
