"""Judge one tensor or node of a graph by what was measured: does FP16 hold it?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mha_deploy.errors import DeployError
from mha_deploy.graph.attention_node import MASK, input_at, is_attention
from mha_deploy.graph.mixed.constants import clamped_of, flushed_of, overflow_of
from mha_deploy.graph.mixed.inner import WORDS
from mha_deploy.graph.mixed.measure import range_of
from mha_deploy.graph.mixed.prepare import FLOAT, constant_of, float_inputs, float_outputs, is_op, name_of
from mha_deploy.graph.mixed.records import FLUSHED_BELOW, FP16_MAX, Clamped, Ranges, ValueRange
from mha_deploy.graph.mixed.roles import data_values, exact_uses, makers_of, mask_values

# Half a turn: beyond it, rounding the angle costs more than rounding its sine.
_ANGLE = math.pi

_DIVIDERS = {"Div": 1, "Reciprocal": 0, "Log": 0}
_BOUNDS = {"Clip": (1, 2), "Min": (0, 1), "Max": (0, 1)}
# What a small number, added so that nothing is divided by 0, comes through before that division.
_TO_DIVISION = ("Sqrt", "Expand", "Unsqueeze", "Identity")


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why something stays wide: of what kind, the number that decided, and a sentence."""

    kind: str
    figure: float | None
    text: str


class Judge:
    """Judges a prepared graph.

    Args:
        graph: The graph.
        ranges: What was measured on it.
        margin: How far below FP16's largest number measured ones must stay.
    """

    def __init__(self, graph: ir.Graph, ranges: Ranges, margin: float) -> None:
        self._graph, self._ranges, self._margin = graph, ranges, margin
        self._limit = FP16_MAX / margin
        self._data = data_values(graph)
        self._masks = mask_values(graph, self._data)

    # -- tensors -------------------------------------------------------------------------------

    def value(self, value: ir.Value) -> Reason | None:
        """Why FP16 does not hold an input or a computed tensor."""
        if value.dtype != FLOAT or value.is_initializer():
            return None
        seen = self._range(value)
        size = seen.highest if value in self._masks else seen.largest
        if size > self._limit:
            text = f"{value.name} reaches {size:,.6g}, and FP16 ends at {FP16_MAX:,.0f}{self._with_margin()}"
            return Reason(kind="overflow", figure=size, text=text)
        if 0 < seen.largest < FLUSHED_BELOW * self._margin and seen.sentinel is None:
            text = f"{value.name} is {seen.largest:.3g} at most, which FP16 makes 0"
            return Reason(kind="flushed", figure=seen.largest, text=text)
        return None

    def sentinel(self, value: ir.Value) -> Reason | None:
        """Why a graph input that hides keys stays in float32: in FP16, callers would make it infinite."""
        found = self._sentinel_of(value) if value.dtype == FLOAT else None
        if found is None:
            return None
        text = f"it hides with {found:,.6g}, which is clamped to FP16 inside"
        return Reason(kind="mask", figure=found, text=text)

    def _with_margin(self) -> str:
        return "" if self._margin == 1 else f" (kept from {self._limit:,.0f} on)"

    def _range(self, value: ir.Value) -> ValueRange:
        if name_of(value) not in self._ranges.values:
            raise DeployError(
                "The ranges were not measured on this graph.",
                got=value.name,
                hint="measure_ranges(model, cases)",
            )
        return self._ranges.values[name_of(value)]

    def _largest(self, value: ir.Value) -> float:
        array = constant_of(value)
        return self._range(value).largest if array is None else range_of(array).largest

    def _sentinel_of(self, value: ir.Value) -> float | None:
        """The number beyond FP16 that may be clamped, since it hides or bounds."""
        seen = self._range(value)
        if seen.sentinel is not None:
            return seen.sentinel
        lowest = -seen.largest
        return lowest if value in self._masks and lowest < -FP16_MAX else None

    # -- nodes ---------------------------------------------------------------------------------

    def node(self, node: ir.Node) -> Reason | None:
        """Why a node cannot be written in FP16, by the numbers around and inside it."""
        for _, value in (*float_outputs(node), *float_inputs(node)):
            reason = self.value(value)
            if reason is not None:
                return reason
        return self._inside(node) or self._divisor(node) or self._constants(node)

    def _inside(self, node: ir.Node) -> Reason | None:
        figure = self._ranges.inner.get(str(node.name), 0.0)
        if not figure > self._limit or node.op_type not in WORDS:
            return None
        text = f"{WORDS[node.op_type]} {figure:,.6g}, and FP16 ends at {FP16_MAX:,.0f}{self._with_margin()}"
        return Reason(kind="overflow", figure=figure, text=text)

    def _divisor(self, node: ir.Node) -> Reason | None:
        position = _DIVIDERS.get(node.op_type)
        value = None if position is None or node.domain else input_at(node, position)
        if value is None or value.dtype != FLOAT or value.is_initializer():
            return None
        smallest = self._range(value).smallest
        if smallest is None or smallest >= FLUSHED_BELOW * self._margin:
            return None
        text = f"its divisor {value.name} comes down to {smallest:.3g}, which FP16 makes 0"
        return Reason(kind="flushed", figure=smallest, text=text)

    def _constants(self, node: ir.Node) -> Reason | None:
        for position, value in float_inputs(node):
            array = constant_of(value)
            if array is None:
                continue
            is_bound = value in self._masks or position in _BOUNDS.get(node.op_type, ())
            beyond, lost = overflow_of(array, is_bound=is_bound), flushed_of(array)
            if beyond is not None:
                text = f"its constant {value.name} holds {beyond:,.6g}, and FP16 ends at {FP16_MAX:,.0f}"
                return Reason(kind="overflow", figure=beyond, text=text)
            if lost is not None:
                text = f"its constant {value.name} holds {lost:.3g}, which FP16 makes 0"
                return Reason(kind="flushed", figure=lost, text=text)
        return None

    # -- what follows from nodes ---------------------------------------------------------------

    def exact(self, kept: Iterable[ir.Node]) -> Iterator[tuple[ir.Node, Reason]]:
        """Positions that become angles or indices, from the integers on."""
        free = {value for node in self._graph for _, value in float_outputs(node) if value not in self._data}
        for node, value, use in exact_uses(self._graph):
            figure = self._largest(value)
            if use == "wave" and figure <= _ANGLE:
                continue
            if use == "step" and value not in free:
                continue
            what = "an angle" if use == "wave" else "an index"
            text = f"{value.name} reaches {figure:,.6g} and becomes {what}, which FP16 would round"
            reason = Reason(kind="exact", figure=figure, text=text)
            yield node, reason
            makers = makers_of(value, free) if value in free else filter(None, [value.producer()])
            yield from ((maker, reason) for maker in makers)

    def guarded(self, kept: dict[ir.Node, Reason]) -> Iterator[tuple[ir.Node, Reason]]:
        """What stands between a number that FP16 would make 0 and the division that it guards."""
        for node, reason in list(kept.items()):
            if reason.kind == "flushed" and is_op(node, "Add", "Max", "Clip"):
                yield from ((each, reason) for each in _guarded_by(node))

    def masks_of(self, kept: dict[ir.Node, Reason]) -> Iterator[tuple[ir.Node, Reason]]:
        """The masks of wide attentions: scores beyond FP16 are not hidden by a number within it."""
        for node in [node for node in kept if is_attention(node)]:
            mask = input_at(node, MASK)
            if mask is None or mask.dtype != FLOAT or mask.is_initializer():
                continue
            sentinel = self._sentinel_of(mask)
            if sentinel is not None:
                text = f"it makes the mask of {node.name}, whose scores {sentinel:,.6g} must hide"
                reason = Reason(kind="mask", figure=sentinel, text=text)
                yield from ((maker, reason) for maker in makers_of(mask, self._masks))

    # -- sentinels -----------------------------------------------------------------------------

    def clamped_constant(self, value: ir.Value) -> Iterator[Clamped]:
        """What becomes of a constant beyond FP16, read by a node in FP16."""
        array = constant_of(value)
        found = None if array is None else clamped_of(array)
        if found is not None:
            yield self._clamp(value, found)

    def clamped_value(self, value: ir.Value) -> Iterator[Clamped]:
        """What becomes of sentinels that a wide value brings to nodes in FP16."""
        found = self._sentinel_of(value)
        if found is not None:
            yield self._clamp(value, found)

    def _clamp(self, value: ir.Value, found: float) -> Clamped:
        hides = "it hides keys, and hides them as well" if value in self._masks else "it means no bound"
        written = float(np.copysign(FP16_MAX, found))
        return Clamped(name=name_of(value), found=found, written=written, reason=hides)


def _guarded_by(node: ir.Node) -> Iterator[ir.Node]:
    pending = [node]
    while pending:
        for use in pending.pop().outputs[0].uses():
            if is_op(use.node, *_TO_DIVISION):
                pending.append(use.node)
                yield use.node
            elif is_op(use.node, *_DIVIDERS, "Pow"):
                yield use.node
