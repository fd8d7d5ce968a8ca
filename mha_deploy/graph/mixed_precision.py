"""Write a float32 graph in FP16, and keep in float32 only what exceeds FP16.

    ranges = measure_ranges(model, cases)        # mha_deploy.runtime: runs the graph
    plan = plan_precision(model, ranges)         # which nodes stay in float32, and why
    mixed = apply_plan(model, plan)              # the graph, with Casts at the borders only

Attention stays one `Attention` node, whatever its type.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, RemoveUnusedNodesPass

from mha_deploy.errors import DeployError, nearest
from mha_deploy.graph import attention_node as an
from mha_deploy.graph.attention_node import AttentionNode, is_attention, read_attention, short_dtype
from mha_deploy.graph.ir import (
    NodeBuilder,
    constant,
    constant_ints,
    graphs_in,
    infer_shapes,
    input_at,
    is_op,
    is_tensor,
    long_axes,
    made_by,
    name_nodes,
    names_in,
    new_initializer,
    nodes_behind,
)
from mha_deploy.graph.roles import MATMULS, NORMS, SOFTMAXES, TO_BOOLEAN
from mha_deploy.graph.upcast import in_type, retype, retype_attributes
from mha_deploy.model.masking import ABSORBS_ANY, ABSORBS_FLOAT32, MODEL_NUMBER, model_number
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.status import Word
from mha_deploy.text import group_by, summarize_names

# -- Records: measured ranges, and the plan --------------------------------------------------------

FP16_MAX = 65504.0
FLUSHED_BELOW = 2.0**-25
"""Half of FP16's smallest subnormal: smaller magnitudes are flushed to 0."""

SENTINEL_FROM = -ABSORBS_ANY
"""No activation of a float32 model is this large: such a number is a mask value or the absence of a bound."""


_COARSE_STEP = 16.0  # half of it, which rounding may cost, is a factor of 3,000 between two weights


def step_at(size: float, precision: str) -> float:
    """The distance between neighboring numbers of a precision at a magnitude."""
    bits = PRECISIONS.get(precision, PRECISIONS["fp32"]).significand_bits - 1
    return math.ldexp(1.0, math.frexp(size)[1] - 1 - bits) if size else 0.0


def is_coarse(score: float, precision: str) -> bool:
    """Whether a score is so large that rounding it, and not its value, decides about the softmax."""
    return step_at(score, precision) >= _COARSE_STEP


@dataclass(frozen=True, kw_only=True)
class ValueRange:
    """The range of one tensor over all cases; NaN and infinities are in none of its numbers.

    Sentinels (1e30 and beyond, as in masks) count apart: `sentinel` is the one of largest magnitude, with its
    sign, or 0. `largest` and `smallest` are magnitudes, `smallest` without 0, and `highest` is the largest
    number.
    """

    largest: float = 0.0
    highest: float = -math.inf
    smallest: float = math.inf
    sentinel: float = 0.0

    def joined(self, other: ValueRange) -> ValueRange:
        """The range of both."""
        return ValueRange(
            largest=max(self.largest, other.largest),
            highest=max(self.highest, other.highest),
            smallest=min(self.smallest, other.smallest),
            sentinel=max(self.sentinel, other.sentinel, key=abs),
        )


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """The ranges that were measured on a float32 graph."""

    values: Mapping[str, ValueRange]  # of every float32 tensor that is an input or computed, by its name
    # The largest intermediate magnitude of operators that accumulate (reductions, norms, softmax, and the
    # scores Q·Kᵀ·scale of attention), by the node's name
    inner: Mapping[str, float]


class KeptKind(Word):
    """What keeps something wider than FP16."""

    OVERFLOW = "overflow"  # it is beyond the largest number of FP16
    FLUSHED = "flushed"  # FP16 makes zeros of it
    EXACT = "exact"  # whole numbers that FP16 cannot count to
    MASK = "mask"  # a number that masks, beyond FP16
    OPERATOR = "operator"  # it does not take FP16, or is not measured
    ROUNDING = "rounding"  # the outputs lose too much
    BETWEEN = "between"  # all around it is wide


class KeptReason(NamedTuple):
    """Why something is not written in FP16."""

    kind: KeptKind
    figure: float | None  # the number that decided
    text: str  # a sentence


@dataclass(frozen=True)
class KeptNode:
    """A node that is not written in FP16 but in `precision`, `fp32` or `bf16`, and why."""

    name: str
    op_type: str
    precision: str
    kind: KeptKind
    figure: float | None
    reason: str


@dataclass(frozen=True)
class KeptTensor:
    """A graph input or output that stays in float32, and why."""

    name: str
    figure: float
    reason: str


@dataclass(frozen=True)
class Clamped:
    """A sentinel beyond a `precision`, and the lowest or highest number that replaces it there."""

    name: str
    found: float
    written: float
    reason: str
    precision: str = "fp16"


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """Which parts of a graph are not written in FP16."""

    kept: tuple[KeptNode, ...]  # in the order of the graph
    inputs: tuple[KeptTensor, ...]  # graph inputs that stay in float32
    outputs: tuple[KeptTensor, ...]  # graph outputs that stay in float32
    clamped: tuple[Clamped, ...]  # sentinels that are read in a type which cannot hold them
    nodes: int  # how many nodes of the graph compute with float32 numbers
    attentions: int  # how many of them are `Attention`
    margin: float  # how far below FP16's largest number everything else was
    # Attentions in FP16 whose masks have a sentinel, with that number: their fully masked queries give what
    # they give in float32
    fully_masked: Mapping[str, float]
    # The largest score Q·Kᵀ·scale of every attention that is kept
    scores: Mapping[str, float] = field(default_factory=dict)
    # What the mixed graph loses: of every output the largest relative L2 error on the measured inputs
    loss: Mapping[str, float] = field(default_factory=dict)
    limit: float | None = None  # what it may lose; None where that was not measured
    reference: str | None = None  # the precision of what it was compared with, `fp64` or `fp32`

    @property
    def worst_loss(self) -> float | None:
        """The loss of the worst output; None where it was not measured."""
        return max(self.loss.values(), default=None)

    def lines(self) -> list[str]:
        """The plan as text, one sentence a line."""
        kept = group_by(self.kept, lambda each: (each.precision, each.reason))
        return [
            *(
                f"{summarize_names([f'{each.name} ({each.op_type})' for each in alike])} "
                f"{'stays' if len(alike) == 1 else 'stay'} {alike[0].precision}: {alike[0].reason}"
                for alike in kept
            ),
            *(f"input {each.name} stays fp32: {each.reason}" for each in self.inputs),
            *(f"output {each.name} stays fp32: {each.reason}" for each in self.outputs),
            *(
                f"{each.found:.6g} of {each.name} is beyond {each.precision.upper()}, and is written as its "
                f"{'lowest' if each.written < 0 else 'highest'} number, {each.written:.6g}: {each.reason}"
                for each in self.clamped
            ),
        ]


# -- The form of a graph that measuring, planning and writing share --------------------------------

FLOAT, HALF, BF16 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16

TYPE_BLIND = frozenset({"Shape", "Size"})
"""Operators that read only the shape of a tensor."""


def prepare(model: ir.Model) -> ir.Model:
    """A copy: functions inlined, types known, float32 constants as initializers, each node with its own name.

    The operation is idempotent, so a plan for one copy fits another. Weights are shared.
    """
    copy = model.clone()
    if copy.functions:
        InlinePass()(copy)
    graph = copy.graph
    defaults = [str(value.name) for value in graph.inputs if value.is_initializer()]
    if defaults:
        hint = "remove the initializers of graph inputs, or choose --precision fp32 or bf16"
        what = "A graph input has a default, which would need two types."
        raise DeployError(what, got=", ".join(defaults), hint=hint)
    infer_shapes(copy)
    retype(copy, (BF16,), FLOAT)  # the numbers of BF16 are numbers of float32
    for node in [node for node in graph if is_op(node, "Constant")]:
        old, tensor = node.outputs[0], constant(node.outputs[0])
        if tensor is not None and tensor.dtype == FLOAT and not old.is_graph_output():
            new = ir.val(old.name, const_value=tensor)
            new.meta[MODEL_NUMBER] = model_number(node.metadata_props)
            old.replace_all_uses_with(new)
            graph.remove(node, safe=True)
            graph.register_initializer(new)
    name_nodes(graph)
    for node in graph:
        for value in node.outputs:
            if value.name and value.dtype is None and value.uses():
                got = f"{value.name}, made by {node.domain or 'onnx'}.{node.op_type} {node.name}"
                hint = "write its type into the graph (value_info)"
                raise DeployError("The type of a tensor does not follow from the graph.", got=got, hint=hint)
    return copy


def float_inputs(node: ir.Node) -> Iterator[tuple[int, ir.Value]]:
    """The float32 inputs whose numbers a node reads, with their positions."""
    if not is_op(node, *TYPE_BLIND):
        for position, value in enumerate(node.inputs):
            if value is not None and value.dtype == FLOAT and is_tensor(value):
                yield position, value


def float_outputs(node: ir.Node) -> Iterator[tuple[int, ir.Value]]:
    """The float32 outputs of a node, with their positions."""
    for position, value in enumerate(node.outputs):
        if value.name and value.dtype == FLOAT and is_tensor(value):
            yield position, value


def constant_of(value: ir.Value) -> np.ndarray | None:
    """The numbers of an initializer; None for every other value."""
    tensor = constant(value) if value.is_initializer() else None
    return None if tensor is None else tensor.numpy()


def accepted_type(
    opsets: Mapping[str, int], node: ir.Node, side: str, position: int, wanted: ir.DataType
) -> ir.DataType:
    """The wanted type, or float32 where the operator does not accept it; `side` is inputs or outputs."""
    try:
        schema = onnx.defs.get_schema(node.op_type, opsets.get(node.domain, 1), node.domain)
    except onnx.defs.SchemaError:  # the operator is not ONNX's
        return FLOAT
    slots = getattr(schema, side)[: position + 1]  # the last one may be variadic
    return wanted if slots and f"tensor({wanted.name.lower()})" in slots[-1].types else FLOAT


# -- The largest intermediate number of an operator that accumulates -------------------------------

_SCORE_ROLES = ("Q", "K", "V", "past_key", "lengths")
_SUMS = ("ReduceSum", "ReduceMean", "ReduceL1", "GlobalAveragePool")
_SQUARES = ("ReduceSumSquare", "ReduceL2", "LpNormalization")

WORDS = {
    **dict.fromkeys((*_SUMS, *SOFTMAXES, "ReduceLogSumExp"), "its accumulated values reach"),
    **dict.fromkeys(_SQUARES, "its accumulated squares reach"),
    **dict.fromkeys(NORMS, "the squares that it averages reach"),
    "Attention": "its scores Q·Kᵀ·scale reach",
}
"""What the largest intermediate number of an operator is, as text."""

Read = Callable[[ir.Value], np.ndarray]
"""Gives the array of a value of a graph."""


def intermediate_inputs(node: ir.Node) -> dict[str, ir.Value]:
    """The inputs that determine the largest intermediate number of a node; empty for other operators."""
    if is_attention(node):
        return {role: value for role, value in an.inputs_by_role(node).items() if role in _SCORE_ROLES}
    first = input_at(node, 0)
    return {"X": first} if first is not None and first.dtype == FLOAT and is_op(node, *WORDS) else {}


def largest_intermediate(node: ir.Node, inputs: Mapping[str, np.ndarray]) -> float:
    """The largest intermediate number of a node that has these `intermediate_inputs`."""
    with np.errstate(all="ignore"):  # an overflow of float32 is reported as infinity
        if is_attention(node):
            # Masked pairs included: a kernel multiplies them all, and masks afterwards.
            attention = read_attention(node)
            q, k = queries_and_keys(attention, an.valid_only(attention, inputs))
            scale = attention.softmax_scale if attention.softmax_scale is not None else q.shape[-1] ** -0.5
            largest = (float(np.abs(matmul).max()) for *_, matmul in matmul_blocks(q, k) if matmul.size)
            return max(largest, default=0.0) * abs(scale)
        x = inputs["X"]
        if not x.size:
            return 0.0
        size = np.abs(x, dtype=np.float32)
        if node.op_type in NORMS:
            return float(size.max()) ** 2
        if node.op_type == "GlobalAveragePool":
            axes: tuple[int, ...] = tuple(range(2, x.ndim))
        elif node.op_type in (*SOFTMAXES, "LpNormalization"):
            axes = (node.attributes.get_int("axis", -1),)
        else:  # all of them where the graph states none, or computes them
            stated = node.attributes.get_ints("axes", None) or constant_ints(node, 1)
            is_noop = node.attributes.get_int("noop_with_empty_axes", 0) == 1
            if is_noop and (stated == () or input_at(node, 1) is None):
                axes = ()
            else:
                axes = tuple(stated or range(x.ndim))
        if node.op_type in SOFTMAXES:
            size = np.exp(x - np.maximum(x.max(axis=axes, keepdims=True), np.finfo(np.float32).min))
        elif node.op_type == "ReduceLogSumExp":
            size = np.exp(x)
        elif node.op_type in _SQUARES:
            size = size * size
        return float(size.sum(axis=axes).max())


def queries_and_keys(
    attention: AttentionNode, inputs: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Queries [B, Hq, S, D] and all keys [B, Hkv, T, D], in a type that holds their matmul."""
    keys = [inputs[role] for role in ("K", "past_key") if role in inputs]
    sizes = [float(np.abs(array).max(initial=0.0)) for array in (inputs["Q"], *keys)]
    bound = sizes[0] * max(sizes[1:]) * inputs["Q"].shape[-1]
    # BF16 and FP32 tensors may be so large that their matmul does not fit float32.
    kind = np.dtype(np.float32 if bound < float(np.finfo(np.float32).max) else np.float64)
    k = an.by_head(inputs["K"], attention.Hkv).astype(kind)
    if attention.has_past:
        k = np.concatenate((inputs["past_key"].astype(kind), k), axis=2)
    return an.by_head(inputs["Q"], attention.Hq).astype(kind), k


_BLOCK = 1 << 20  # pairs at a time: four megabytes


def matmul_blocks(q: np.ndarray, k: np.ndarray) -> Iterator[tuple[slice, int, slice, np.ndarray]]:
    """Q·Kᵀ of some queries of one head at a time: batch elements, head, queries, and their matmul."""
    (B, Hq, S, _), T = q.shape, k.shape[2]
    elements, queries, group = max(1, _BLOCK // max(S * T, 1)), max(1, _BLOCK // max(T, 1)), Hq // k.shape[1]
    for element, head, query in product(range(0, B, elements), range(Hq), range(0, S, queries)):
        which, rows = slice(element, min(element + elements, B)), slice(query, min(query + queries, S))
        yield which, head, rows, q[which, head, rows] @ k[which, head // group].swapaxes(-1, -2)


# -- Measure ranges --------------------------------------------------------------------------------

Cases = Mapping[str, Mapping[str, np.ndarray]]
Run = Callable[[ir.Model, Cases], Iterator[Mapping[str, np.ndarray]]]
"""Runs a graph on every case in turn, and yields the outputs of each."""

_SLICE_BYTES = 512 << 20


def measure_ranges_with(run: Run, model: ir.Model, cases: Cases) -> Ranges:
    """Measure the ranges of a float32 graph on named cases; each run outputs about `_SLICE_BYTES`."""
    return measure_prepared(run, prepare(model), cases)


def measure_prepared(run: Run, model: ir.Model, cases: Cases) -> Ranges:
    """The same of a graph that is prepared."""
    if not cases:
        raise DeployError(
            "Ranges need at least one case of inputs.", got="none", hint="at least one case of inputs"
        )
    values: dict[str, ValueRange] = defaultdict(ValueRange)
    inner: dict[str, float] = defaultdict(float)

    def add(value: ir.Value, array: np.ndarray) -> None:
        values[str(value.name)] = values[str(value.name)].joined(range_of(array))

    inputs = [value for value in model.graph.inputs if value.dtype == FLOAT]
    for value, feeds in product(inputs, cases.values()):
        add(value, feeds[str(value.name)])
    for nodes in slices(model.graph, cases, _values_to_measure):
        values_needed = [value for node in nodes for value in _values_to_measure(node)]
        for read in read_values(run, model, values_needed, cases):
            for node in nodes:
                for _, value in float_outputs(node):
                    add(value, read(value))
                if arrays := {role: read(value) for role, value in intermediate_inputs(node).items()}:
                    inner[str(node.name)] = max(inner[str(node.name)], largest_intermediate(node, arrays))
    return Ranges(values=dict(values), inner=dict(inner))


def read_values(run: Run, model: ir.Model, values: Iterable[ir.Value], cases: Cases) -> Iterator[Read]:
    """Run a graph on every case in turn, and yield what reads these values: inputs, constants and results.

    Nothing else is computed; weights are shared.
    """
    names = {value.name for value in values if value.producer() is not None}
    probe = model.clone()
    probe.graph.outputs[:] = [value for node in probe.graph for value in node.outputs if value.name in names]
    RemoveUnusedNodesPass()(probe)
    results = run(probe, cases) if names else ({} for _ in cases)
    for feeds, found in zip(cases.values(), results, strict=True):
        arrays = {**feeds, **found}

        def read(value: ir.Value, arrays: Mapping[str, np.ndarray] = arrays) -> np.ndarray:
            array = constant_of(value)
            return arrays[str(value.name)] if array is None else array

        yield read


def slices(
    graph: ir.Graph, cases: Cases, tensors: Callable[[ir.Node], list[ir.Value]]
) -> Iterator[list[ir.Node]]:
    """The nodes to measure, so many at a time that their tensors have about `_SLICE_BYTES`."""
    # The largest size of every named axis of the inputs; under the empty name the largest of all.
    sizes: dict[str, int] = {"": 1}
    for value, feeds in product(graph.inputs, cases.values()):
        for dim, size in zip(value.shape or (), feeds[str(value.name)].shape, strict=False):
            for name in ("", "" if isinstance(dim, int) else str(dim.value)):
                sizes[name] = max(sizes.get(name, 1), size)

    def count(value: ir.Value) -> int:
        if value.shape is None:
            return 4 * sizes[""] ** 2
        named = (d if isinstance(d, int) else sizes.get(str(d.value), sizes[""]) for d in value.shape)
        return 4 * math.prod(named)

    some, total = list[ir.Node](), 0
    for node in graph:
        needed = tensors(node)
        if needed:
            some.append(node)
            total += sum(map(count, needed))
        if total >= _SLICE_BYTES:
            yield some
            some, total = [], 0
    if some:
        yield some


def _values_to_measure(node: ir.Node) -> list[ir.Value]:
    """The tensors that a node is measured by: its results, and what its intermediates need."""
    outputs = [value for _, value in float_outputs(node)]
    return outputs and [*outputs, *intermediate_inputs(node).values()]


def range_of(array: np.ndarray) -> ValueRange:
    """The range of one array."""
    size = np.abs(array)
    usual = size < SENTINEL_FROM  # not NaN, nor infinite, nor a sentinel
    return ValueRange(
        largest=float(size.max(initial=0.0, where=usual)),
        highest=float(array.max(initial=-np.inf, where=usual)),
        smallest=float(size.min(initial=np.inf, where=usual & (size > 0))),
        sentinel=_farthest(array, ~usual),
    )


def _farthest(array: np.ndarray, chosen: np.ndarray) -> float:
    """The finite number of largest magnitude among the chosen ones; 0 where there is none."""
    numbers = array[chosen & np.isfinite(array)]
    return float(numbers[np.abs(numbers).argmax()]) if numbers.size else 0.0


# -- The role of a tensor: data, a mask, or positions that must be exact ---------------------------

# Operators between a mask and its attention.
_MASK_OPERATORS = (
    *("Where", "Add", "Sub", "Mul", "Neg", "Min", "Max", "Clip", "Cast", "Identity", "Trilu", "Pad"),
    *("Expand", "Unsqueeze", "Squeeze", "Reshape", "Slice", "Concat", "Transpose", "Tile", "Gather"),
    *("ConstantOfShape", "ScatterND", "GatherND"),
)


def data_values(graph: ir.Graph) -> set[ir.Value]:
    """The float32 values that depend on float32 inputs, on matrices or on tables.

    The others are computed from shapes, integers and scalars: positions and masks.
    """
    data = {value for value in graph.inputs if value.dtype == FLOAT}
    data |= {v for v in graph.initializers.values() if v.dtype == FLOAT and long_axes(v) > 1}
    for node in graph:
        if any(value in data for _, value in float_inputs(node)):
            data.update(value for _, value in float_outputs(node))
    return data


def mask_values(graph: ir.Graph, data: set[ir.Value]) -> set[ir.Value]:
    """The float32 values that are used only for masks of attention, inputs and constants among them."""
    masks: set[ir.Value] = set()

    def masks_by(node: ir.Node, position: int, value: ir.Value) -> bool:
        """Whether a node uses a value as a mask, or to compute one."""
        if is_attention(node):
            return position == an.MASK
        if is_op(node, "Add") and value not in data:
            scores, uses = node.outputs[0], node.outputs[0].uses()
            if uses and not scores.is_graph_output() and all(is_op(use.node, "Softmax") for use in uses):
                return True
        if is_op(node, *TO_BOOLEAN):  # which numbers hide keys
            users = [use.node for use in node.outputs[0].uses()]
            return bool(users) and all(map(makes_mask, users)) and not node.outputs[0].is_graph_output()
        return makes_mask(node)

    def makes_mask(node: ir.Node) -> bool:
        outputs = [output for _, output in float_outputs(node)]
        return is_op(node, *_MASK_OPERATORS) and bool(outputs) and masks.issuperset(outputs)

    made = (value for node in reversed(graph) for value in node.outputs)
    for value in (*made, *graph.inputs, *graph.initializers.values()):
        uses = [] if value.dtype != FLOAT or value.is_graph_output() else value.uses()
        if uses and all(masks_by(use.node, use.idx, value) for use in uses):
            masks.add(value)
    return masks


def numbers_in_masks(graph: ir.Graph, masks: set[ir.Value]) -> dict[ir.Value, ValueRange]:
    """The numbers beyond FP16 that constants may put into a mask, also where no case masks a key."""
    found = dict[ir.Value, float]()
    for node in graph:
        outputs = [value for _, value in float_outputs(node) if value in masks]
        if not outputs or not is_op(node, *_MASK_OPERATORS):
            continue
        for _, value in float_inputs(node):
            array = None if is_op(node, "Clip", "Min", "Max") else constant_of(value)  # a bound is no mask
            number = found.get(value, 0.0) if array is None else _farthest(array, np.abs(array) > FP16_MAX)
            if number:
                found |= {each: max(abs(number), found.get(each, 0.0)) for each in outputs}
    return {value: range_of(np.array([-number])) for value, number in found.items()}


def producers_within(
    value: ir.Value, within: set[ir.Value], seen: set[ir.Node] | None = None
) -> Iterator[ir.Node]:
    """The nodes that compute a value through values of a set, its own producer first; `seen` ones are not."""
    done = set() if seen is None else seen

    def inside(node: ir.Node) -> list[ir.Value]:
        done.add(node)
        return [each for _, each in float_inputs(node) if each in within and each.producer() not in done]

    start = [value] if value in within and value.producer() not in done else []
    return nodes_behind(start, inside)


# -- Cheap nodes between float32 nodes: in FP16 they would only add Casts --------------------------


def enclosed_nodes(graph: ir.Graph, kept: set[ir.Node], float32_inputs: set[str]) -> list[ir.Node]:
    """The cheap nodes whose neighbors are all kept in float32, or such nodes themselves.

    A part of the graph that no kept node is connected to has no reason to be in float32.
    """

    def is_cheap(node: ir.Node) -> bool:  # no matmul, and no large weights
        if not _computes(node) or is_attention(node) or is_op(node, *MATMULS) or node.domain != "":
            return False
        return not any(value.is_initializer() and long_axes(value) > 1 for _, value in float_inputs(node))

    def is_within(node: ir.Node, inside: set[ir.Node]) -> bool:
        read = (v for _, v in float_inputs(node) if not v.is_initializer() and v.name not in float32_inputs)
        if any(value.producer() not in inside for value in read):
            return False
        results = [value for _, value in float_outputs(node)]
        return not any(value.is_graph_output() or not inside.issuperset(readers(value)) for value in results)

    def readers(value: ir.Value) -> list[ir.Node]:
        return [use.node for use in value.uses() if not is_op(use.node, *TYPE_BLIND)]

    def around(node: ir.Node) -> Iterator[ir.Node]:
        for _, value in float_inputs(node):
            if value.name not in float32_inputs and (producer := value.producer()) is not None:
                yield producer
        for _, value in float_outputs(node):
            yield from readers(value)

    enclosed = {node for node in graph if node not in kept and is_cheap(node)}
    inside = kept | enclosed
    # What is next to a node that is not enclosed is not enclosed either.
    leaving = [node for node in enclosed if not is_within(node, inside)]
    enclosed.difference_update(leaving)
    while leaving:
        for other in around(leaving.pop()):
            if other in enclosed:
                enclosed.remove(other)
                leaving.append(other)
    near, pending = set[ir.Node](), list(kept)
    while pending:
        for other in around(pending.pop()):
            if other in enclosed and other not in near:
                near.add(other)
                pending.append(other)
    return [node for node in graph if node in near]


# -- Plan: which nodes stay in float32 -------------------------------------------------------------

# Random weights have some numbers that FP16 flushes to 0, one in a million. More of them carry information.
_FEW = 0.01
_DIVIDERS = {"Div": 1, "Reciprocal": 0, "Log": 0}
_BOUNDS = {"Clip": (1, 2), "Min": (0, 1), "Max": (0, 1)}
# Operators between an epsilon and the division that it guards.
_TO_DIVISION = ("Sqrt", "Expand", "Unsqueeze", "Identity")


MARGIN = 4.0
"""How far below FP16's largest number measured ones must stay: other inputs may have larger ones."""

WIDE = {"fp32": FLOAT, "bf16": BF16}


def plan_precision(
    model: ir.Model, ranges: Ranges, *, margin: float = MARGIN, wide: str = "fp32"
) -> PrecisionPlan:
    """Decide what is not written in FP16.

    Args:
        model: The graph, in float32; it is not changed.
        ranges: What was measured on it.
        margin: How many times larger than measured a number may become before FP16 overflows.
        wide: What attention is kept in: `fp32`, or `bf16` where the target has it. Other nodes stay in fp32.
    """
    return Planner(prepare(model), ranges, margin).plan(wide)


def tensor_key(value: ir.Value) -> str:
    """The key of an input or output among `lossy` things, beside names of nodes."""
    return f"tensor {value.name}"


class Planner:
    """Judges the tensors and nodes of a prepared graph by their measured ranges."""

    def __init__(self, work: ir.Model, ranges: Ranges, margin: float) -> None:
        if not 1.0 <= margin <= FP16_MAX:
            raise DeployError("The margin is a factor of 1 or more.", got=margin, hint="1 or more")
        self._graph, self._ranges, self._margin = work.graph, ranges, margin
        self._opsets = work.opset_imports
        self._limit = FP16_MAX / margin
        self._end = f"and FP16 ends at {FP16_MAX:,.0f} (kept in FP32 from {self._limit:,.0f} on)"
        self._data = data_values(work.graph)
        self._masks = mask_values(work.graph, self._data)
        self._numbers = numbers_in_masks(work.graph, self._masks)
        self._kept: dict[ir.Node, KeptReason] = {}
        self._fully_masked: dict[str, float] = {}
        self._constants: dict[ir.Value, ValueRange] = {}
        # The nodes that compute, and why each of them cannot be in FP16.
        self._by_range = {node: next(self._reasons(node), None) for node in self._graph if _computes(node)}

    def plan(self, wide: str, lossy: Mapping[str, KeptReason] | None = None) -> PrecisionPlan:
        """Find the nodes, then what follows for inputs, outputs and constants.

        `lossy` are nodes, inputs and outputs that are kept as well, by their names.
        """
        if wide not in WIDE:
            raise DeployError("Attention is kept in fp32 or bf16.", got=wide, hint=nearest(wide, WIDE))
        self._kept, self._fully_masked, self._lossy = {}, {}, lossy or {}
        nodes = list(self._by_range)
        for node, found in self._by_range.items():
            reason = found or self._lossy.get(str(node.name))
            if reason is not None:
                self._kept[node] = reason
        for finds in (self._exact, self._guarded, self._masks_of_attentions):
            for node, reason in finds():
                self._kept.setdefault(node, reason)
        inputs = tuple(self._tensors(self._graph.inputs))
        float32_inputs = {each.name for each in inputs}
        between = KeptReason(KeptKind.BETWEEN, None, "between nodes in FP32, where FP16 would only add Casts")
        self._kept |= dict.fromkeys(enclosed_nodes(self._graph, set(self._kept), float32_inputs), between)
        types = dict.fromkeys(nodes, "fp16")
        for node in (node for node in nodes if node in self._kept):
            is_wide = is_attention(node) and self._kept[node].kind is not KeptKind.ROUNDING
            types[node] = wide if is_wide else "fp32"
        kept = [node for node in nodes if node in self._kept]
        results = [value for value in dict.fromkeys(self._graph.outputs) if value.producer() is not None]
        outputs = tuple(self._tensors(results))
        return PrecisionPlan(
            kept=tuple(KeptNode(str(n.name), n.op_type, types[n], *self._kept[n]) for n in kept),
            inputs=inputs,
            outputs=outputs,
            clamped=tuple(self._clamped(types, {each.name for each in (*inputs, *outputs)})),
            nodes=len(nodes),
            attentions=sum(is_attention(node) for node in nodes),
            margin=self._margin,
            fully_masked=self._fully_masked,
            scores={str(n.name): self._ranges.inner.get(str(n.name), 0.0) for n in kept if is_attention(n)},
        )

    def _tensors(self, values: Iterable[ir.Value]) -> Iterator[KeptTensor]:
        """The graph inputs or outputs that stay in float32."""
        for value in values:
            reason = self._value(value) or self._lossy.get(tensor_key(value))
            sentinel = self._sentinel(value) if value.is_graph_input() and value.dtype == FLOAT else 0.0
            if reason is None and sentinel:
                # Cast to FP16 by the caller, it would be infinite.
                text = f"it masks with {sentinel:,.6g}, which is clamped to FP16 inside"
                reason = KeptReason(KeptKind.MASK, sentinel, text)
            if reason is not None and reason.figure is not None:
                yield KeptTensor(str(value.name), reason.figure, reason.text)

    def _value(self, value: ir.Value) -> KeptReason | None:
        """Why an input or a computed tensor cannot be FP16."""
        if value.dtype != FLOAT or value.is_initializer():
            return None
        measured = self._range(value)
        size = measured.highest if value in self._masks else measured.largest
        if size > self._limit:
            return KeptReason(KeptKind.OVERFLOW, size, f"{value.name} reaches {size:,.6g}, {self._end}")
        size = measured.largest
        if 0 < size < FLUSHED_BELOW * self._margin and not measured.sentinel:
            text = f"{value.name} is {size:.3g} at most, which FP16 flushes to 0"
            return KeptReason(KeptKind.FLUSHED, size, text)
        return None

    def _range(self, value: ir.Value) -> ValueRange:
        """The range of a constant or a measured value."""
        if value in self._constants:
            return self._constants[value]
        if (array := constant_of(value)) is not None:
            return self._constants.setdefault(value, range_of(array))
        measured = self._ranges.values.get(str(value.name))
        if measured is None:
            what, hint = "The ranges were not measured on this graph.", "measure_ranges(model, cases)"
            raise DeployError(what, got=value.name, hint=hint)
        return measured.joined(self._numbers[value]) if value in self._numbers else measured

    def _sentinel(self, value: ir.Value) -> float:
        """The number beyond FP16 that may be clamped, since it is a mask value or a bound; 0 for none."""
        if (array := constant_of(value)) is not None:
            return _farthest(array, np.abs(array) > FP16_MAX)
        measured = self._range(value)
        is_low = value in self._masks and measured.largest > FP16_MAX
        return measured.sentinel or (-measured.largest if is_low else 0.0)

    def _clamped(self, types: Mapping[ir.Node, str], float32_ends: set[str]) -> Iterator[Clamped]:
        """The sentinels that something reads in a type which cannot hold them."""
        found = [value for value in self._graph.initializers.values() if value.dtype == FLOAT]
        for node in self._graph:
            if node in self._kept or node.op_type == "ConstantOfShape":
                found += [value for _, value in float_outputs(node)]
        found += [value for value in self._graph.inputs if value.name in float32_ends]
        for value in found:
            if not (number := self._sentinel(value)):
                continue
            # A new constant is written in the type of its node; what else is kept is cast for its readers.
            users = [use.node for use in value.uses() if not is_op(use.node, *TYPE_BLIND)]
            written = {types[node] for node in users if node in types}
            maker = value.producer()
            if maker is not None and types.get(maker) == "fp16":
                written.add("fp16")
            if value.is_graph_output() and value.name not in float32_ends:
                written.add("fp16")
            # Mask numbers that absorb any score are one number after `fuse`.
            known = value.meta.get(MODEL_NUMBER)
            own = number if known is None else known
            if not math.isfinite(own):
                continue  # the model has no such number: `fuse` wrote it
            reason = (
                "a mask value, which hides keys as before" if value in self._masks else "it means no bound"
            )
            for precision in sorted(written - {"fp32"}):
                most = FP16_MAX if precision == "fp16" else float(BF16.max)
                if abs(number) > most:
                    yield Clamped(str(value.name), own, math.copysign(most, number), reason, precision)

    def _reasons(self, node: ir.Node) -> Iterator[KeptReason]:
        """Why a node cannot be written in FP16, by the numbers around and inside it; the first one counts."""
        if graphs_in(node):
            yield KeptReason(KeptKind.OPERATOR, None, "what is inside a branch or loop is not measured")
        if not all(is_tensor(value) for value in (*node.inputs, *node.outputs) if value is not None):
            yield KeptReason(KeptKind.OPERATOR, None, "sequences and optionals stay in float32")
        if is_op(node, "MeanVarianceNormalization"):
            text = "its definition by other operators has constants in float32"
            yield KeptReason(KeptKind.OPERATOR, None, text)
        inputs, outputs = list(float_inputs(node)), list(float_outputs(node))
        yield from filter(None, (self._value(value) for _, value in (*outputs, *inputs)))
        figure = self._ranges.inner.get(str(node.name), 0.0)
        if figure > self._limit and node.op_type in WORDS:
            yield KeptReason(KeptKind.OVERFLOW, figure, f"{WORDS[node.op_type]} {figure:,.6g}, {self._end}")
        divisor = input_at(node, _DIVIDERS[node.op_type]) if is_op(node, *_DIVIDERS) else None
        if divisor is not None and divisor.dtype == FLOAT and not divisor.is_initializer():
            figure = self._range(divisor).smallest
            if figure < FLUSHED_BELOW * self._margin:
                text = f"its divisor {divisor.name} is as small as {figure:.3g}, which FP16 flushes to 0"
                yield KeptReason(KeptKind.FLUSHED, figure, text)
        for position, value in inputs:
            if (array := constant_of(value)) is None:
                continue
            is_bound = value in self._masks or position in _BOUNDS.get(node.op_type, ())
            size = np.abs(array)
            figure = float(size.max(initial=0.0, where=size < SENTINEL_FROM))
            if figure > FP16_MAX and not is_bound:
                text = f"its constant {value.name} holds {figure:,.6g}, and FP16 ends at {FP16_MAX:,.0f}"
                yield KeptReason(KeptKind.OVERFLOW, figure, text)
            lost = size[(size > 0) & (size < FLUSHED_BELOW)]
            if lost.size > _FEW * int(np.count_nonzero(size)) and not self._is_rounding(node, lost, size):
                figure = float(lost.max())
                text = f"its constant {value.name} holds {figure:.3g}, which FP16 flushes to 0"
                yield KeptReason(KeptKind.FLUSHED, figure, text)
        slots = [("inputs", at) for at, _ in inputs] + [("outputs", at) for at, _ in outputs]
        if not any(accepted_type(self._opsets, node, *slot, HALF) == HALF for slot in slots):
            yield KeptReason(KeptKind.OPERATOR, None, f"{node.op_type} is not known to take FP16")

    def _is_rounding(self, node: ir.Node, lost: np.ndarray, size: np.ndarray) -> bool:
        """Whether the smallest numbers of a bias are less than the rounding of the sum, as in key biases.

        An epsilon is small as a whole, and guards a division.
        """
        is_bias = is_op(node, "Add", "Sub") and 2 * lost.size <= int(np.count_nonzero(size))
        return is_bias and float(lost.max()) < self._range(node.outputs[0]).largest * 2.0**-11

    def _exact(self) -> Iterator[tuple[ir.Node, KeptReason]]:
        """Positions that become angles or indices, from the integers on."""
        free = {value for node in self._graph for _, value in float_outputs(node) if value not in self._data}
        seen = set[ir.Node]()
        for node in self._graph:
            value, to = input_at(node, 0), node.outputs[0].dtype
            if value is None or value.dtype != FLOAT:
                continue
            to_integer = is_op(node, "Cast") and to is not None and to.is_integer()
            to_index = value in free and (to_integer or is_op(node, "Floor", "Ceil", "Round", "Mod"))
            if not to_index and not is_op(node, "Sin", "Cos"):
                continue
            figure, what = self._range(value).largest, "an index" if to_index else "an angle"
            # Beyond π, rounding the angle costs more than rounding its sine.
            if not to_index and figure <= math.pi:
                continue
            text = f"{value.name} reaches {figure:,.6g} and becomes {what}, which FP16 would round"
            reason = KeptReason(KeptKind.EXACT, figure, text)
            yield node, reason
            if value in free:
                yield from ((maker, reason) for maker in producers_within(value, free, seen))
            elif (maker := value.producer()) is not None:
                yield maker, reason

    def _guarded(self) -> Iterator[tuple[ir.Node, KeptReason]]:
        """The nodes between an epsilon that FP16 would flush to 0 and the division that it guards."""
        for node, reason in list(self._kept.items()):
            pending = [node] if reason.kind is KeptKind.FLUSHED and is_op(node, "Add", "Max", "Clip") else []
            while pending:
                for use in pending.pop().outputs[0].uses():
                    if is_op(use.node, *_TO_DIVISION):
                        pending.append(use.node)
                    if is_op(use.node, *_TO_DIVISION, *_DIVIDERS, "Pow"):
                        yield use.node, reason

    def _masks_of_attentions(self) -> Iterator[tuple[ir.Node, KeptReason]]:
        """The masks that FP16 cannot hold.

        Scores beyond FP16 are not masked by a number within it. And within FP16 a sentinel plus another
        number overflows, and two sentinels are the same number.
        """
        found: dict[ir.Value, tuple[list[ir.Node], bool]] = {}
        for node in filter(is_attention, self._graph):
            mask = input_at(node, an.MASK)
            if mask is None or mask.dtype != FLOAT or not (sentinel := self._sentinel(mask)):
                continue
            if mask not in found:
                nodes = list(producers_within(mask, self._masks))
                found[mask] = nodes, any(map(self._joins_sentinels, nodes))
            (makers, joined), text = found[mask], f"it computes the mask of {node.name}"
            if node in self._kept:
                text += f", whose scores need {sentinel:,.6g}"
            else:
                self._fully_masked[str(node.name)] = sentinel
                text += f" from several terms, one of them {sentinel:,.6g}"
            if node in self._kept or joined:
                yield from ((maker, KeptReason(KeptKind.MASK, sentinel, text)) for maker in makers)

    def _joins_sentinels(self, node: ir.Node) -> bool:
        """Whether a node adds a number to a sentinel, or chooses among two of them."""
        ranges = [self._range(value) for _, value in float_inputs(node)]
        if not is_op(node, "Add", "Sub", "Where", "Min", "Max") or len(ranges) < 2:
            return False
        sizes = [-each.sentinel if each.sentinel else each.largest for each in ranges]
        if is_op(node, "Add", "Sub"):
            return max(sizes) > FP16_MAX and min(sizes) > 0
        return len({size for size in sizes if size > FP16_MAX}) > 1


def _computes(node: ir.Node) -> bool:
    """Whether a node reads or writes float32 numbers."""
    return bool(graphs_in(node) or next(float_inputs(node), None) or next(float_outputs(node), None))


# -- Write the graph -------------------------------------------------------------------------------


def apply_plan(model: ir.Model, plan: PrecisionPlan) -> ir.Model:
    """A copy in FP16 of the float32 graph that a plan was made for, except what the plan keeps wider.

    Inputs and outputs are FP16, except those that the plan names. Integers and booleans are not changed.
    A constant that nodes of two types read is stored once in each.
    """
    return write_plan(prepare(model), plan)


def write_plan(work: ir.Model, plan: PrecisionPlan) -> ir.Model:
    """Write a plan into a graph that is prepared, which is changed and returned."""
    _Writer(work, plan).write()
    return work


class _Writer:
    """Rewrites one graph in place."""

    def __init__(self, work: ir.Model, plan: PrecisionPlan) -> None:
        self._graph, self._opsets = work.graph, work.opset_imports
        self._kept = {each.name: WIDE[each.precision] for each in plan.kept}
        self._float32_ends = {each.name for each in (*plan.inputs, *plan.outputs)}
        self._clamped = {each.name: each.written for each in plan.clamped}
        self._fully_masked = plan.fully_masked
        self._opened: dict[tuple[ir.Value, bool], tuple[ir.Value, ir.Value]] = {}
        self._made: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self._taken = names_in(work) | {str(value.name) for value in work.graph.inputs}
        self._taken |= set(work.graph.initializers)
        unknown = self._kept.keys() - {str(node.name) for node in work.graph}
        if unknown:
            raise DeployError(
                "The plan was made for another graph.",
                got=", ".join(sorted(unknown)),
                hint="make the plan again",
            )

    def write(self) -> None:
        """Set the type of every value, then insert Casts where a node reads another type."""
        nodes = list(self._graph)
        reads = [(node, *read) for node in nodes for read in float_inputs(node)]
        captured = list(self._captured(nodes))
        constants = [value for value in self._graph.initializers.values() if value.dtype == FLOAT]
        outputs = [value for value in dict.fromkeys(self._graph.outputs) if value.dtype == FLOAT]
        for value in self._graph.inputs:
            if value.dtype == FLOAT:
                value.type = ir.TensorType(FLOAT if value.name in self._float32_ends else HALF)
        for node in nodes:
            for position, value in list(float_outputs(node)):
                dtype = self._accepted(node, "outputs", position)
                value.type = ir.TensorType(dtype)  # a new one: copies of a model share their types
                retype_attributes(node, (FLOAT,), dtype)
        for node, position, value in reads:
            is_mask = position == an.MASK and str(node.name) in self._fully_masked
            if not is_mask or not self._open_queries(node, value):
                node.replace_input_with(position, self._as(value, self._accepted(node, "inputs", position)))
        for node, position, value in captured:
            node.replace_input_with(position, self._as(value, FLOAT))
        for value in outputs:  # under their own names
            wanted = FLOAT if value.name in self._float32_ends else HALF
            if value.producer() is not None and value.dtype != wanted:
                name, result = str(value.name), self._as(value, wanted)
                value.name = self._free(f"{name}/{short_dtype(value.dtype)}")
                result.name = name
                self._graph.outputs[:] = [result if each is value else each for each in self._graph.outputs]
        for value in constants:
            if value.uses() or value.is_graph_output():
                continue
            self._graph.initializers.pop(str(value.name))
            heirs = [
                new for each in (FLOAT, HALF, BF16) if (new := self._made.get((value, each))) is not None
            ]
            if len(heirs) == 1:  # a single replacement takes over the name
                self._graph.initializers.pop(str(heirs[0].name))
                heirs[0].name = value.name
                self._graph.register_initializer(heirs[0])

    def _accepted(self, node: ir.Node, side: str, position: int) -> ir.DataType:
        return accepted_type(self._opsets, node, side, position, self._kept.get(str(node.name), HALF))

    def _captured(self, nodes: list[ir.Node]) -> Iterator[tuple[ir.Node, int, ir.Value]]:
        """What nodes of branches and loops read of the main graph; there they stay in float32."""
        own = {value for node in nodes for value in node.outputs} | set(self._graph.inputs)
        pending = [graph for node in nodes for graph in graphs_in(node)]
        for graph in pending:
            for position, output in enumerate(graph.outputs):
                if output in own:  # so that a Cast can come before it
                    graph.append(node := ir.node("Identity", [output]))
                    inner = graph.outputs[position] = node.outputs[0]
                    inner.name, inner.type = self._free(f"{output.name}/inner"), output.type
            for node in graph:
                pending += graphs_in(node)
                yield from ((node, at, value) for at, value in float_inputs(node) if value in own)

    def _open_queries(self, node: ir.Node, mask: ir.Value) -> bool:
        """Let a fully masked query give what it gives in float32.

        Softmax does not change when a number is added to all scores of a query, so the mask of such a query
        is moved up to 0. Where float32 absorbs the scores in the sentinel, the query becomes zero as well.
        False where this cannot be, or no query is fully masked.
        """
        attention, q, array = read_attention(node), input_at(node, an.Q), constant_of(mask)
        if q is None or attention.has_past or attention.has_nonpad_kv_seqlen:
            return False
        if array is not None and not attention.is_causal and (array.max(axis=-1) > -FP16_MAX / 2).all():
            return False
        builder, key = NodeBuilder(self._free(f"{node.name}/masks")), (mask, attention.is_causal)
        if key not in self._opened:
            self._opened[key] = _opened_mask(builder, mask, q, attention)
        opened, masked = self._opened[key]
        node.replace_input_with(an.MASK, opened)
        if self._fully_masked[str(node.name)] <= ABSORBS_FLOAT32:
            # Attention in eight bits reads its queries from Q/DQ: they become zero before that.
            up = made_by(q, "DequantizeLinear")
            down = made_by(input_at(up, 0), "QuantizeLinear")
            x = q if down is None or down.inputs[0] is None else down.inputs[0]
            zero = builder.constant(0.0, x.dtype or HALF)
            if attention.rank == 3:
                four = builder.op("Expand", masked, builder.ints(1, 1, 1, 1))  # a mask may have fewer axes
                masked = builder.transpose(four, 0, 2, 1, 3)
                by_head = builder.op("Reshape", x, builder.ints(0, 0, int(attention.Hq or 1), -1))
                flat = builder.ints(0, 0, -1)
                opened_q = builder.op("Reshape", builder.op("Where", masked, zero, by_head), flat)
            else:
                opened_q = builder.op("Where", masked, zero, x)
            opened_q.shape, opened_q.type = q.shape, ir.TensorType(x.dtype or HALF)
            if up is not None and down is not None:
                opened_q = an.requantized(builder, up, opened_q)
            node.replace_input_with(an.Q, opened_q)
        self._graph.insert_before(node, builder.nodes)
        return True

    def _as(self, value: ir.Value, wanted: ir.DataType) -> ir.Value:
        """The value in a type: itself, or one Cast for all consumers."""
        if value.dtype == wanted:
            return value
        key, short = (value, wanted), str(short_dtype(wanted))
        if key in self._made:
            return self._made[key]
        if (array := constant_of(value)) is not None:
            name = self._free(f"{value.name}/{short}")
            made = new_initializer(self._graph, name, in_type(array, wanted), wanted)
        else:
            source = value
            if value.name in self._clamped and wanted != FLOAT:
                ends = [("Max", "lowest", wanted.min)]
                if self._clamped[str(value.name)] > 0:  # another one may be low
                    ends.append(("Min", "highest", wanted.max))
                for op_type, end, number in ends:
                    name = self._free(f"{value.name}/{end}_{short}")
                    bound = new_initializer(self._graph, name, np.array(number, np.float32), FLOAT)
                    source = self._behind(source, op_type, [source, bound], FLOAT, f"held_{short}")
            made = self._behind(source, "Cast", [source], wanted, short)
        self._made[key] = made
        return made

    def _behind(
        self, place: ir.Value, op_type: str, inputs: list[ir.Value], dtype: ir.DataType, name: str
    ) -> ir.Value:
        """A new node right after the producer of a value."""
        node = ir.node(op_type, inputs, {"to": int(dtype)} if op_type == "Cast" else {})
        result = node.outputs[0]
        node.name = result.name = self._free(f"{place.name}/{name}")
        result.shape, result.type = place.shape, ir.TensorType(dtype)
        if (producer := place.producer()) is None:
            self._graph.insert_before(self._graph[0], node)
        else:
            self._graph.insert_after(producer, node)
        return result

    def _free(self, name: str) -> str:
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


def _opened_mask(
    builder: NodeBuilder, mask: ir.Value, q: ir.Value, attention: AttentionNode
) -> tuple[ir.Value, ir.Value]:
    """The mask in FP16 with fully masked queries moved up to 0, and True for those queries. [.., S, 1]."""
    total = mask if mask.dtype == FLOAT else builder.op("Cast", mask, to=int(FLOAT))
    visible, infinite = total, builder.constant(-math.inf, FLOAT)
    if attention.is_causal:
        length = 2 if attention.rank == 4 else 1
        queries = builder.reshape(builder.count_up(builder.size(q, length)), -1, 1)
        keys = builder.count_up(builder.size(mask, -1))
        visible = builder.op("Where", builder.op("LessOrEqual", keys, queries), total, infinite)
    best = builder.op("ReduceMax", visible, builder.ints(-1), keepdims=1)
    low = builder.op("LessOrEqual", best, builder.constant(-FP16_MAX / 2, FLOAT))
    masked = builder.op("And", low, builder.op("Greater", best, infinite), name="fully_masked")
    moved = builder.op("Where", masked, builder.op("Sub", total, best), total)
    # A key that is masked by -inf stays so; others stay finite, also with a score added to them in FP16.
    finite = builder.op("Max", moved, builder.constant(-FP16_MAX / 2, FLOAT))
    kept = builder.op("Where", builder.op("Greater", total, infinite), finite, infinite)
    opened = builder.op("Cast", kept, name="mask", to=int(HALF))
    opened.type = ir.TensorType(HALF)
    opened.shape = mask.shape if not attention.is_causal else None
    return opened, masked
