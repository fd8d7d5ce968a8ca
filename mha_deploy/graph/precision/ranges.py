"""How large the tensors of a float32 graph become, and what operators hold inside."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, RemoveUnusedNodesPass

from mha_deploy.errors import DeployError
from mha_deploy.graph.attention_node import (
    NONPAD_KV_SEQLEN,
    PAST_KEY,
    AttentionNode,
    K,
    Q,
    V,
    all_keys,
    by_head,
    input_at,
    is_attention,
    read_attention,
    valid_only,
)
from mha_deploy.graph.lower.rewrite import infer_shapes

# -- The records of mixed precision: what was measured, and what follows from it -------------------

FP16_MAX = 65504.0
FLUSHED_BELOW = 2.0**-25
"""Half of FP16's smallest number: what is smaller becomes 0."""

SENTINEL_FROM = 1e30
"""No activation of a float32 model is this large: such a number means `never` or `no bound`."""


@dataclass(frozen=True, kw_only=True)
class ValueRange:
    """The numbers that one tensor held, over all cases.

    NaN, infinities and sentinels (1e30 and beyond, as in masks) are not in `largest`, `highest`, `smallest`.

    Args:
        largest: Largest magnitude.
        highest: Largest number; -inf where there was none.
        smallest: Smallest magnitude that is not 0; None where there was none.
        sentinel: The sentinel of largest magnitude, with its sign; None where there was none.
    """

    largest: float = 0.0
    highest: float = float("-inf")
    smallest: float | None = None
    sentinel: float | None = None


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """What was measured when a float32 graph ran.

    Args:
        cases: The names of the cases.
        values: The range of every float32 tensor that is an input or computed, by its name.
        inner: The largest number inside the operators that sum, square or multiply before their result is
            there: reductions, norms, softmax, and the scores Q·Kᵀ·scale of attention; by the node's name.
    """

    cases: tuple[str, ...]
    values: Mapping[str, ValueRange]
    inner: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class KeptNode:
    """A node that is not written in FP16.

    Args:
        name: Its name.
        op_type: Its operator.
        precision: `fp32` or `bf16`.
        kind: `overflow`, `flushed`, `exact`, `mask`, `operator` or `between`.
        figure: The number that decided, where one did.
        reason: Why, in a sentence.
    """

    name: str
    op_type: str
    precision: str
    kind: str
    figure: float | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class KeptTensor:
    """A graph input or output that stays in float32, and why."""

    name: str
    figure: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Clamped:
    """A number that FP16 has not, and that means the same when FP16's own largest stands for it."""

    name: str
    found: float
    written: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """Which parts of a graph stay wider than FP16.

    Args:
        kept: The nodes, in the order of the graph.
        inputs: Graph inputs that stay in float32.
        outputs: Graph outputs that stay in float32.
        clamped: Sentinels that are written as FP16's lowest or highest number.
        nodes: How many nodes of the graph compute with float32 numbers.
        attentions: How many of them are `Attention`.
        margin: How far below FP16's largest number everything else was.
    """

    kept: tuple[KeptNode, ...]
    inputs: tuple[KeptTensor, ...]
    outputs: tuple[KeptTensor, ...]
    clamped: tuple[Clamped, ...]
    nodes: int
    attentions: int
    margin: float

    @property
    def is_plain_fp16(self) -> bool:
        """Whether everything is written in FP16."""
        return not (self.kept or self.inputs or self.outputs)

    def lines(self) -> list[str]:
        """The plan for people, one sentence a line."""
        nodes = [f"{each.name} ({each.op_type}) stays {each.precision}: {each.reason}" for each in self.kept]
        inputs = [f"input {each.name} stays fp32: {each.reason}" for each in self.inputs]
        outputs = [f"output {each.name} stays fp32: {each.reason}" for each in self.outputs]
        clamped = [
            f"{each.name}: {each.found:.6g} is written as {each.written:.6g}: {each.reason}"
            for each in self.clamped
        ]
        return nodes + inputs + outputs + clamped

    def describe(self) -> dict[str, Any]:
        """The record as plain data for JSON."""
        return asdict(self)


# -- Which types an operator takes and gives, by ONNX's own description of it ----------------------

FLOAT = ir.DataType.FLOAT
_ONNX_NAMES = {
    ir.DataType.FLOAT16: "tensor(float16)",
    ir.DataType.BFLOAT16: "tensor(bfloat16)",
    FLOAT: "tensor(float)",
}


class Slots:
    """What type each float32 input and output of a node takes when the node is to compute in another type.

    Args:
        opsets: The operator sets of the model.
    """

    def __init__(self, opsets: Mapping[str, int]) -> None:
        self._opsets = opsets

    def input_type(self, node: ir.Node, position: int, wanted: ir.DataType) -> ir.DataType:
        """The wanted type, or float32 where the operator does not take it there."""
        return self._type_at(node, "inputs", position, wanted)

    def output_type(self, node: ir.Node, position: int, wanted: ir.DataType) -> ir.DataType:
        """The wanted type, or float32 where the operator does not give it there."""
        return self._type_at(node, "outputs", position, wanted)

    def _type_at(self, node: ir.Node, side: str, position: int, wanted: ir.DataType) -> ir.DataType:
        schema = _schema(node.op_type, node.domain, self._opsets.get(node.domain, 1))
        slots = () if schema is None else getattr(schema, side)
        if not slots:
            return FLOAT
        slot = slots[min(position, len(slots) - 1)]  # the last one may stand for any number of tensors
        return wanted if _ONNX_NAMES[wanted] in slot.types else FLOAT


@cache
def _schema(op_type: str, domain: str, version: int) -> Any:
    """ONNX's description of an operator; None for one that is not ONNX's."""
    try:
        return onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None


# -- What FP16 would make of a constant: nothing to speak of, an infinity, zeros, or a clamped  ----

# Random weights have some numbers that FP16 makes 0, one in a million. Where more do, they meant something.
_FEW = 0.01


def overflow_of(array: np.ndarray, *, is_bound: bool) -> float | None:
    """The largest number that FP16 would make infinite; None where there is none.

    Args:
        array: The constant, in float32.
        is_bound: Whether it bounds or hides: its numbers may then be clamped, whatever they are.
    """
    if is_bound:
        return None
    size = np.abs(array)
    largest = float(size.max(initial=0.0, where=size < SENTINEL_FROM))
    return largest if largest > FP16_MAX else None


def flushed_of(array: np.ndarray) -> float | None:
    """The largest of the numbers that FP16 would make 0, where they are more than a few."""
    size = np.abs(array)
    lost = size[(size > 0) & (size < FLUSHED_BELOW)]
    few = _FEW * int(np.count_nonzero(size))
    return float(lost.max()) if lost.size > few else None


def clamped_of(array: np.ndarray) -> float | None:
    """The finite number beyond FP16 that is written as FP16's lowest or highest; None where there is none."""
    beyond = array[np.isfinite(array) & (np.abs(array) > FP16_MAX)]
    return float(beyond[np.abs(beyond).argmax()]) if beyond.size else None


def clamp(array: np.ndarray, dtype: np.dtype, limit: float) -> np.ndarray:
    """The array in another type, its finite numbers held within the limits of that type."""
    held = np.where(np.isfinite(array), np.clip(array, -limit, limit), array)
    return held.astype(dtype)


# -- Bring a graph into the one form that measuring, planning and writing agree on -----------------

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


# -- The largest number inside an operator that sums, squares or multiplies before its result i ----

_SUMS = ("ReduceSum", "ReduceMean", "ReduceL1", "GlobalAveragePool")
_SUMS_OF_SQUARES = ("ReduceSumSquare", "ReduceL2", "LpNormalization")
_SUMS_OF_POWERS = ("ReduceLogSumExp",)
_SOFTMAX = ("Softmax", "LogSoftmax")
_NORMS = ("LayerNormalization", "RMSNormalization", "InstanceNormalization", "GroupNormalization")

WORDS = (
    {name: "what it sums reaches" for name in (*_SUMS, *_SUMS_OF_POWERS, *_SOFTMAX)}
    | {name: "the squares that it sums reach" for name in _SUMS_OF_SQUARES}
    | {name: "the squares that it averages reach" for name in _NORMS}
    | {"Attention": "its scores Q·Kᵀ·scale reach"}
)
"""How to say what the figure of an operator is."""

Read = Callable[[ir.Value], np.ndarray]


def inputs_to_see(node: ir.Node) -> list[ir.Value]:
    """The inputs from which the inner figure of a node is computed; none where it has no such figure."""
    if is_attention(node):
        at = (Q, K, V, PAST_KEY, NONPAD_KV_SEQLEN)
        return [value for value in (input_at(node, position) for position in at) if value is not None]
    first = input_at(node, 0)
    return [first] if first is not None and is_float(first) and is_op(node, *WORDS) else []


def inner_figure(node: ir.Node, read: Read) -> float:
    """The largest number inside a node for which `inputs_to_see` names inputs."""
    with np.errstate(all="ignore"):  # what overflows float32 is infinite, and says so
        if is_attention(node):
            return _largest_score(node, read)
        x = read(node.inputs[0]) if node.inputs[0] is not None else np.zeros(0, np.float32)
        if not x.size:
            return 0.0
        size = np.abs(x, dtype=np.float32)
        if node.op_type in _NORMS:
            return float(size.max()) ** 2
        axes = _axes(node, x.ndim)
        if node.op_type in _SOFTMAX:
            top = np.maximum(x.max(axis=axes, keepdims=True), np.finfo(np.float32).min)
            return float(np.exp(x - top).sum(axis=axes).max())
        if node.op_type in _SUMS_OF_POWERS:
            return float(np.exp(x).sum(axis=axes).max())
        return float((size if node.op_type in _SUMS else size * size).sum(axis=axes).max())


def _axes(node: ir.Node, rank: int) -> tuple[int, ...]:
    """The axes that a node sums over; all of them where the graph does not say."""
    if node.op_type == "GlobalAveragePool":
        return tuple(range(2, rank))
    if node.op_type in (*_SOFTMAX, "LpNormalization"):
        axis = node.attributes.get("axis")
        return (-1 if axis is None else axis.as_int(),)
    given = node.attributes.get("axes")
    if given is not None:
        return tuple(given.as_ints())
    value = input_at(node, 1)
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return tuple(range(rank)) if tensor is None else tuple(int(axis) for axis in tensor.numpy().reshape(-1))


def _largest_score(node: ir.Node, read: Read) -> float:
    """The largest |Q·Kᵀ·scale|, hidden pairs included: a kernel multiplies them all, and masks afterwards."""
    facts = read_attention(node)
    q, k = _queries_and_keys(node, facts, read)
    if not q.size or not k.size:
        return 0.0
    scale = facts.softmax_scale if facts.softmax_scale is not None else q.shape[-1] ** -0.5
    group = q.shape[1] // k.shape[1]
    return max(
        float(np.abs(q[row, head] @ k[row, head // group].T).max()) * abs(scale)
        for row in range(q.shape[0])
        for head in range(q.shape[1])
    )


def _queries_and_keys(node: ir.Node, facts: AttentionNode, read: Read) -> tuple[np.ndarray, np.ndarray]:
    """[B, Hq, S, D] and [B, Hkv, T, D], past keys included, and zeros for keys that are not valid."""
    roles: Mapping[str, int] = {"Q": Q, "K": K, "V": V, "past": PAST_KEY, "lengths": NONPAD_KV_SEQLEN}
    inputs = {role: input_at(node, position) for role, position in roles.items()}
    given = {role: read(value) for role, value in inputs.items() if value is not None}
    given = valid_only(facts, given)
    q, k = by_head(given["Q"], facts.Hq), by_head(given["K"], facts.Hkv)
    return q.astype(np.float32), all_keys(facts, given, k.astype(np.float32))


# -- Measure the numbers of a float32 graph, given somebody who runs it ----------------------------

Cases = Mapping[str, Mapping[str, np.ndarray]]
Run = Callable[[ir.Model, Cases], Iterator[Mapping[str, np.ndarray]]]
"""Runs a graph on every case in turn, and gives the outputs of each."""

SLICE_BYTES = 512 << 20


class RangeMeter:
    """Gathers the ranges of one graph.

    Args:
        model: The graph, in float32; it is not changed.
        cases: Inputs by name, for each named case.
        slice_bytes: About how many bytes of tensors may be looked at in one run.
    """

    def __init__(self, model: ir.Model, cases: Cases, *, slice_bytes: int = SLICE_BYTES) -> None:
        if not cases:
            raise DeployError("Ranges need at least one case of inputs.", got="none")
        self._model, self._cases, self._slice_bytes = prepared(model), cases, slice_bytes
        self._values: dict[str, ValueRange] = {}
        self._inner: dict[str, float] = {}

    def measure(self, run: Run) -> Ranges:
        """Run the graph, slice by slice, and give what was measured."""
        for value in self._model.graph.inputs:
            if value.dtype == FLOAT:
                for feeds in self._cases.values():
                    self._see_value(name_of(value), feeds[name_of(value)])
        for nodes in self._slices():
            probe = self._probe(nodes)
            for feeds, arrays in zip(self._cases.values(), run(probe, self._cases), strict=True):
                self._see(nodes, {**feeds, **arrays})
        return Ranges(cases=tuple(self._cases), values=dict(self._values), inner=dict(self._inner))

    def _slices(self) -> Iterator[list[ir.Node]]:
        sizes, some, total = self._axis_sizes(), list[ir.Node](), 0
        for node in self._model.graph:
            wanted = list(_wanted(node))
            if not wanted:
                continue
            some.append(node)
            total += sum(_bytes_of(value, sizes) for value in wanted)
            if total >= self._slice_bytes:
                yield some
                some, total = [], 0
        if some:
            yield some

    def _axis_sizes(self) -> dict[str, int]:
        """The largest size of every named axis of the inputs; of the others, the largest of all."""
        found: dict[str, int] = {"": 1}
        for value in self._model.graph.inputs:
            for feeds in self._cases.values():
                for dim, size in zip(value.shape or (), feeds[name_of(value)].shape, strict=False):
                    for name in ("", "" if isinstance(dim, int) else str(dim.value)):
                        found[name] = max(found.get(name, 1), size)
        return found

    def _probe(self, nodes: list[ir.Node]) -> ir.Model:
        names = {name_of(value) for node in nodes for value in _wanted(node)}
        copy = self._model.clone()
        values = [value for node in copy.graph for value in node.outputs if value.name in names]
        copy.graph.outputs[:] = values
        RemoveUnusedNodesPass()(copy)
        return copy

    def _see(self, nodes: list[ir.Node], arrays: Mapping[str, np.ndarray]) -> None:
        def read(value: ir.Value) -> np.ndarray:
            constant = constant_of(value)
            return arrays[name_of(value)] if constant is None else constant

        for node in nodes:
            for _, value in float_outputs(node):
                self._see_value(name_of(value), arrays[name_of(value)])
            if inputs_to_see(node):
                name = str(node.name)
                self._inner[name] = max(self._inner.get(name, 0.0), inner_figure(node, read))

    def _see_value(self, name: str, array: np.ndarray) -> None:
        seen = range_of(array)
        before = self._values.get(name)
        self._values[name] = seen if before is None else _joined(before, seen)


def range_of(array: np.ndarray) -> ValueRange:
    """The range of one array."""
    size = np.abs(array)
    usual = size < SENTINEL_FROM  # not NaN, nor infinite, nor a sentinel
    nonzero = usual & (size > 0)
    strange = array[np.isfinite(array) & ~usual]
    return ValueRange(
        largest=float(size.max(initial=0.0, where=usual)),
        highest=float(array.max(initial=-np.inf, where=usual)),
        smallest=float(size.min(initial=np.inf, where=nonzero)) if nonzero.any() else None,
        sentinel=float(strange[np.abs(strange).argmax()]) if strange.size else None,
    )


def _joined(one: ValueRange, other: ValueRange) -> ValueRange:
    smallest = [each.smallest for each in (one, other) if each.smallest is not None]
    sentinels = [each.sentinel for each in (one, other) if each.sentinel is not None]
    return ValueRange(
        largest=max(one.largest, other.largest),
        highest=max(one.highest, other.highest),
        smallest=min(smallest, default=None),
        sentinel=max(sentinels, key=abs, default=None),
    )


def _wanted(node: ir.Node) -> Iterator[ir.Value]:
    """The tensors that a run must show to measure a node; its inputs, too, where it has an inner figure."""
    outputs = [value for _, value in float_outputs(node)]
    yield from outputs
    if outputs:
        yield from (value for value in inputs_to_see(node) if value.producer() is not None)


def _bytes_of(value: ir.Value, sizes: Mapping[str, int]) -> int:
    if value.shape is None:
        return 4 * sizes[""] ** 2
    return 4 * math.prod(
        dim if isinstance(dim, int) else sizes.get(str(dim.value), sizes[""]) for dim in value.shape
    )
