"""Decide which nodes of a float32 graph FP16 cannot hold.

A node stays wider where a tensor that it reads or writes comes too near FP16's largest number, where a
number inside it does, where one of its constants does not survive, or where exact positions are computed.
What stands between two such nodes stays with them.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from mha_deploy.errors import DeployError, nearest
from mha_deploy.graph.attention_node import is_attention
from mha_deploy.graph.mixed.between import enclosed_nodes
from mha_deploy.graph.mixed.judge import Judge, Reason
from mha_deploy.graph.mixed.prepare import (
    FLOAT,
    float_inputs,
    float_outputs,
    name_of,
    prepared,
)
from mha_deploy.graph.mixed.records import FP16_MAX, Clamped, KeptNode, KeptTensor, PrecisionPlan, Ranges
from mha_deploy.graph.mixed.schema import Slots

MARGIN = 4.0
"""How far below FP16's largest number measured ones must stay: other inputs have larger ones."""

WIDE = ("fp32", "bf16")


def plan_precision(
    model: ir.Model, ranges: Ranges, *, margin: float = MARGIN, wide: str = "fp32"
) -> PrecisionPlan:
    """Decide what stays wider than FP16.

    Args:
        model: The graph, in float32; it is not changed.
        ranges: What was measured on it.
        margin: How many times larger than measured a number may become before FP16 overflows.
        wide: What attention is kept in: `fp32`, or `bf16` where the target has it. Other nodes stay in fp32.

    Raises:
        DeployError: The graph has branches, or the ranges are not of this graph.
    """
    if wide not in WIDE:
        raise DeployError("Attention is kept in fp32 or bf16.", got=wide, hint=nearest(wide, WIDE))
    if not 1.0 <= margin <= FP16_MAX:
        raise DeployError("The margin is a factor of 1 or more.", got=margin)
    work = prepared(model)
    return _Planner(work, ranges, margin, wide).plan()


class _Planner:
    """The steps to one plan."""

    def __init__(self, work: ir.Model, ranges: Ranges, margin: float, wide: str) -> None:
        self._graph, self._margin, self._wide = work.graph, margin, wide
        self._slots = Slots(work.opset_imports)
        self._judge = Judge(work.graph, ranges, margin)
        self._kept: dict[ir.Node, Reason] = {}

    def plan(self) -> PrecisionPlan:
        """Find the nodes, then what follows for inputs, outputs and constants."""
        nodes = [node for node in self._graph if _computes(node)]
        for node in nodes:
            reason = self._judge.node(node) or self._without_fp16(node)
            if reason is not None:
                self._kept[node] = reason
        for finds in (self._judge.exact, self._judge.guarded, self._judge.masks_of):
            for node, reason in finds(self._kept):
                self._kept.setdefault(node, reason)
        inputs = tuple(self._inputs())
        wide_inputs = {each.name for each in inputs}
        for node in enclosed_nodes(self._graph, set(self._kept), wide_inputs):
            self._kept[node] = Reason(
                kind="between", figure=None, text="it stands between nodes that stay wide, and would bounce"
            )
        return PrecisionPlan(
            kept=tuple(self._record(node) for node in nodes if node in self._kept),
            inputs=inputs,
            outputs=tuple(self._outputs()),
            clamped=tuple(self._clamped(wide_inputs)),
            nodes=len(nodes),
            attentions=sum(is_attention(node) for node in nodes),
            margin=self._margin,
        )

    def _record(self, node: ir.Node) -> KeptNode:
        reason = self._kept[node]
        return KeptNode(
            name=str(node.name),
            op_type=node.op_type,
            precision=self._wide if is_attention(node) else "fp32",
            kind=reason.kind,
            figure=reason.figure,
            reason=reason.text,
        )

    def _without_fp16(self, node: ir.Node) -> Reason | None:
        half = ir.DataType.FLOAT16
        types = [self._slots.input_type(node, at, half) for at, _ in float_inputs(node)]
        types += [self._slots.output_type(node, at, half) for at, _ in float_outputs(node)]
        if half in types:
            return None
        return Reason(kind="operator", figure=None, text=f"{node.op_type} is not known to take FP16")

    def _inputs(self) -> Iterator[KeptTensor]:
        for value in self._graph.inputs:
            reason = self._judge.value(value) or self._judge.sentinel(value)
            if value.dtype == FLOAT and reason is not None and reason.figure is not None:
                yield KeptTensor(name=name_of(value), figure=reason.figure, reason=reason.text)

    def _outputs(self) -> Iterator[KeptTensor]:
        for value in dict.fromkeys(self._graph.outputs):
            if value.dtype != FLOAT or value.producer() is None:
                continue
            reason = self._judge.value(value)
            if reason is not None and reason.figure is not None:
                yield KeptTensor(name=name_of(value), figure=reason.figure, reason=reason.text)

    def _clamped(self, wide_inputs: set[str]) -> Iterator[Clamped]:
        """Constants that nodes in FP16 read, and wide values that come to them with sentinels."""
        for value in self._graph.initializers.values():
            if value.dtype == FLOAT and any(use.node not in self._kept for use in value.uses()):
                yield from self._judge.clamped_constant(value)
        for node in self._graph:
            for _, value in float_outputs(node):
                if node in self._kept or node.op_type == "ConstantOfShape":
                    yield from self._judge.clamped_value(value)
        for value in self._graph.inputs:
            if value.name in wide_inputs:
                yield from self._judge.clamped_value(value)


def _computes(node: ir.Node) -> bool:
    """Whether a node reads or writes float32 numbers."""
    return any(True for _ in float_inputs(node)) or any(True for _ in float_outputs(node))
