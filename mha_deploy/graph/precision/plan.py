"""Which nodes FP16 can hold, and which stay in float32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mha_deploy.errors import DeployError, nearest
from mha_deploy.graph.attention_node import MASK, input_at, is_attention
from mha_deploy.graph.precision.ranges import (
    FLOAT,
    FLUSHED_BELOW,
    FP16_MAX,
    TYPE_BLIND,
    WORDS,
    Clamped,
    KeptNode,
    KeptTensor,
    PrecisionPlan,
    Ranges,
    Slots,
    ValueRange,
    clamped_of,
    constant_of,
    float_inputs,
    float_outputs,
    flushed_of,
    is_float,
    is_op,
    name_of,
    overflow_of,
    prepared,
    range_of,
)

# -- What a tensor is there for: data, a mask, or positions that must be exact ---------------------

# Operators through which a mask comes to its attention.
_MASK_MAKERS = (
    *("Where", "Add", "Sub", "Mul", "Neg", "Min", "Max", "Clip", "Cast", "Identity", "Trilu", "Pad"),
    *("Expand", "Unsqueeze", "Squeeze", "Reshape", "Slice", "Concat", "Transpose", "Tile", "Gather"),
    *("ConstantOfShape", "ScatterND", "GatherND"),
)
_WAVES = ("Sin", "Cos")
_STEPS = ("Floor", "Ceil", "Round", "Mod")


def long_axes(value: ir.Value) -> int:
    """How many axes of an initializer are longer than 1: two and more are a table or a matrix."""
    return sum(dim != 1 for dim in value.shape or ())


def data_values(graph: ir.Graph) -> set[ir.Value]:
    """The float32 values that depend on float32 inputs, on matrices or on tables.

    What is left is made of shapes, integers and single numbers: positions, masks and the like.
    """
    data = {value for value in graph.inputs if is_float(value)}
    data |= {value for value in graph.initializers.values() if is_float(value) and long_axes(value) > 1}
    for node in graph:
        if any(value in data for _, value in float_inputs(node)):
            data.update(value for _, value in float_outputs(node))
    return data


def mask_values(graph: ir.Graph, data: set[ir.Value]) -> set[ir.Value]:
    """The float32 values that lead only to masks of attention; inputs and constants are among them."""
    masks: set[ir.Value] = set()
    made = (value for node in reversed(graph) for value in node.outputs)
    for value in (*made, *graph.inputs, *graph.initializers.values()):
        uses = value.uses()
        if not is_float(value) or not uses or value.is_graph_output():
            continue
        if all(_is_mask_use(use.node, use.idx, value, masks, data) for use in uses):
            masks.add(value)
    return masks


def _is_mask_use(
    node: ir.Node, position: int, value: ir.Value, masks: set[ir.Value], data: set[ir.Value]
) -> bool:
    if is_attention(node):
        return position == MASK
    if is_op(node, "Add") and value not in data and _goes_to_softmax(node.outputs[0]):
        return True
    outputs = [output for _, output in float_outputs(node)]
    return is_op(node, *_MASK_MAKERS) and bool(outputs) and all(output in masks for output in outputs)


def _goes_to_softmax(value: ir.Value) -> bool:
    uses = value.uses()
    return bool(uses) and not value.is_graph_output() and all(is_op(use.node, "Softmax") for use in uses)


def makers_of(value: ir.Value, within: set[ir.Value]) -> Iterator[ir.Node]:
    """The nodes that a value comes from through values of a set, its own producer first."""
    pending, seen = [value], set[ir.Value]()
    while pending:
        value = pending.pop()
        node = value.producer()
        if value in seen or value not in within or node is None:
            continue
        seen.add(value)
        yield node
        pending.extend(each for _, each in float_inputs(node))


def exact_uses(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Value, str]]:
    """The nodes that turn a small error of their input into a large one, that input, and how."""
    for node in graph:
        value = node.inputs[0] if node.inputs else None
        if value is None or value.dtype != FLOAT:
            continue
        if is_op(node, *_WAVES):
            yield node, value, "wave"
        elif is_op(node, *_STEPS) or (is_op(node, "Cast") and _becomes_integer(node)):
            yield node, value, "step"


def _becomes_integer(node: ir.Node) -> bool:
    dtype = node.outputs[0].dtype
    return dtype is not None and dtype.is_integer()


# -- Find the nodes between wide ones: cast down before them and up behind them, nothing would  ----

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
    """Whether a node costs about nothing in float32: no matmul, and no large weights."""
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


# -- Judge one tensor or node of a graph by what was measured: does FP16 hold it? ------------------

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


# -- Decide which nodes of a float32 graph FP16 cannot hold ----------------------------------------

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
