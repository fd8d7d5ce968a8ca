"""Measure what a mixed graph loses, and upcast what loses it until the loss is below a limit.

    plan = plan_by_loss(run, model, cases)

The float32 graph is run on several inputs, and so is the mixed one, with every FP16 result rounded. Where an
output differs by more than rounding usually costs, each node is run once more with each of its inputs
rounded: how much a node amplifies the relative error of an input. From the outputs back, the amplifications
along a path multiply to what rounding a tensor to FP16 costs in the result. The tensors that cost most are
kept in float32, then more of them, until the measured loss is below the limit; then as few as suffice.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from mha_deploy.errors import DeployError
from mha_deploy.graph.ir import graphs_in, is_random, paused_collections
from mha_deploy.graph.mixed_precision import (
    FLOAT,
    FP16_MAX,
    HALF,
    MARGIN,
    SENTINEL_FROM,
    Cases,
    KeptKind,
    KeptReason,
    Planner,
    PrecisionPlan,
    Run,
    constant_of,
    float_inputs,
    float_outputs,
    measure_prepared,
    prepare,
    read_values,
    slices,
    tensor_key,
    write_plan,
)
from mha_deploy.graph.roles import LAYOUT
from mha_deploy.graph.upcast import with_float64_inside, with_rounded_results

ROUNDING = 2.0**-12
"""The relative L2 error of a tensor that is rounded to FP16, about: half of the largest error of a number."""

MULTIPLE = 4.0
"""The limit, as a multiple of what rounding inputs and results usually costs."""

_LEAST_LIMIT, _MOST_LIMIT = 2e-3, 2e-2  # on the inputs themselves, not on scaled ones
_COARSE = (
    8.0  # times `ROUNDING`: a tensor with this error was not just rounded, but is below FP16's normal range
)
_VECTOR = 8.0  # a single vector of an output may lose this many times what the whole may
_GAIN = 2 * ROUNDING  # how much larger or smaller an output may be as a whole, where it has many numbers
_SCALES = (1 / 16, 2.0)  # of the inputs of one case
_FIRST = 256  # the share of the nodes that is upcast first; then twice as many, and so on
_MOST_PRUNINGS = 12
_LARGE = 2048  # nodes; each further trial takes as long as one on every node, and larger graphs get fewer
_FAILED = 1e6  # the error of what is not finite


def plan_by_loss(
    run: Run,
    model: ir.Model,
    cases: Cases,
    *,
    margin: float = MARGIN,
    wide: str = "fp32",
    limit: float | None = None,
) -> PrecisionPlan:
    """Decide what is not written in FP16, by the ranges and by the loss that are measured on these cases.

    Args:
        run: Runs a graph on cases.
        model: The graph, in float32; it is not changed.
        cases: Named inputs.
        margin: How many times larger than measured a number may become before FP16 overflows.
        wide: What attention is kept in whose scores overflow: `fp32` or `bf16`.
        limit: The largest relative L2 error of an output; default: four times what rounding the inputs and
            the results of the nodes usually costs, between 0.002 and 0.02.
    """
    gc.collect()  # what an exporter left; from here on only what is new is searched
    with paused_collections():
        work = prepare(model)
        ranges = measure_prepared(run, work, cases)
        planner = Planner(work, ranges, margin)
        plan = planner.plan(wide)
        if any(map(is_random, work.graph.all_nodes())) or not work.graph.outputs:
            return plan  # two runs would differ anyway
        measured = _Measured(run, work, cases, limit)
        if not measured.limits:
            return plan
        found = measured.of(plan)
        if found.excess <= 1.0:
            return measured.noted(plan, found)
        return _LossSearch(measured, planner, wide, plan, found).best()


# -- The loss of a plan ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What a mixed graph loses."""

    outputs: Mapping[str, float]  # of every output the largest relative L2 error
    excess: float  # the largest share of a limit that it takes: beyond 1 it is too much
    badness: float  # of all shares together, so that one that cannot be reached does not hide the others


def relative_errors(got: np.ndarray, wanted: np.ndarray) -> tuple[float, float]:
    """The relative L2 error of an array, and of its worst vector relative to at least a usual one.

    What is not finite in both, or a sentinel in the wanted one, does not count.
    """
    one, other = got.astype(np.float64), wanted.astype(np.float64)
    with np.errstate(all="ignore"):
        counts = np.abs(other) < SENTINEL_FROM
        if not np.isfinite(one[counts]).all():
            return _FAILED, _FAILED
        error = np.where(counts, one - other, 0.0)
        size = np.where(counts, other, 0.0)
        if not size.any():
            return (0.0, 0.0) if not error.any() else (1.0, 1.0)
        if error.ndim < 2:
            error, size = error.reshape(1, -1), size.reshape(1, -1)
        scale = np.abs(size).max()  # so that squares neither overflow nor vanish
        errors, sizes = (np.sqrt(((each / scale) ** 2).sum(axis=-1)) for each in (error, size))
        usual = math.sqrt(float((sizes**2).mean()))
        whole = math.sqrt(float((errors**2).sum())) / math.sqrt(float((sizes**2).sum()))
        return min(whole, _FAILED), min(float((errors / np.maximum(sizes, usual)).max()), _FAILED)


def gain_of(got: np.ndarray, wanted: np.ndarray) -> float:
    """How much larger or smaller an array is as a whole: the part of its error that does not average out."""
    one, other = got.astype(np.float64), wanted.astype(np.float64)
    with np.errstate(all="ignore"):
        counts = (np.abs(other) < SENTINEL_FROM) & np.isfinite(one)
        one, other = one[counts], other[counts]
        scale = np.abs(other).max(initial=0.0)
        if not scale:
            return 0.0
        one, other = one / scale, other / scale
        return min(abs(float(np.vdot(one - other, other))) / float(np.vdot(other, other)), _FAILED)


class _Measured:
    """The exact results of a graph, in FP64 where ONNX Runtime has it, with which mixed ones are compared."""

    def __init__(self, run: Run, work: ir.Model, cases: Cases, limit: float | None) -> None:
        self._run, self.work, self.graph = run, work, work.graph
        self.outputs = [str(value.name) for value in self.graph.outputs if value.dtype == FLOAT]
        first, scaled = next(iter(cases)), _scaled(work.graph, cases)
        given: Cases = {**cases, **scaled}
        # The mixed graph is given FP16, and so is what it is compared with.
        exact, self.reference = self._exact({name: _taken(feeds) for name, feeds in given.items()})
        for name in [name for name in exact if name in scaled]:
            if first not in exact or not _are_comparable(exact[name][1], exact[first][1]):
                del exact[name]
        self.cases = {name: feeds for name, (feeds, _) in exact.items()}
        self._unscaled = [name for name in self.cases if name not in scaled]
        self._wanted = {name: results for name, (_, results) in exact.items()}
        self.limits: dict[str, dict[str, float]] = {}  # of every case and output
        if not self._unscaled or not self.outputs:
            return
        usual = ROUNDING * math.sqrt(1 + _depth(self.graph))
        for name, got in list(self._results(work, {name: given[name] for name in self.cases})):
            errors = {
                output: relative_errors(got[output], self._wanted[name][output])[0] for output in self.outputs
            }
            if name in scaled and max(errors.values()) >= 1.0:
                del self.cases[name]  # float32 itself fails there: nothing could be upcast against it
                continue
            self.limits[name] = {}
            for output, error in errors.items():
                allowed = max(MULTIPLE * (usual + min(error, 1.0)), _LEAST_LIMIT)
                allowed = allowed if name in scaled else min(allowed, _MOST_LIMIT)
                self.limits[name][output] = allowed if limit is None else limit
        self.limit = max(max(self.limits[name].values()) for name in self._unscaled)

    def _exact(
        self, cases: Cases
    ) -> tuple[dict[str, tuple[Mapping[str, np.ndarray], dict[str, np.ndarray]]], str]:
        """Inputs and results of every case whose results are finite, in FP64 where ONNX Runtime has it."""
        try:
            results, reference = dict(self._results(with_float64_inside(self.work), cases)), "fp64"
        except DeployError:
            results, reference = dict(self._results(self.work, cases)), "fp32"
        finite = {
            name: (cases[name], {output: got[output] for output in self.outputs})
            for name, got in results.items()
            if not any(np.isnan(got[output]).any() for output in self.outputs)
        }
        return finite, reference

    def _results(self, model: ir.Model, cases: Cases) -> Iterator[tuple[str, Mapping[str, np.ndarray]]]:
        yield from zip(cases, self._run(model, cases), strict=True)
        gc.collect()  # the graph, and with it weights of another type

    def of(self, plan: PrecisionPlan) -> Loss:
        """What a plan loses."""
        mixed = write_plan(self.work.clone(), plan)
        types = {str(value.name): value.dtype.numpy() for value in mixed.graph.inputs if value.dtype}
        cases = {
            name: {key: array.astype(types[key]) for key, array in feeds.items()}
            for name, feeds in self.cases.items()
        }
        outputs, shares = dict.fromkeys(self.outputs, 0.0), list[float]()
        for name, got in self._results(with_rounded_results(mixed), cases):
            for output in self.outputs:
                wanted, limit = self._wanted[name][output], self.limits[name][output]
                whole, vector = relative_errors(got[output], wanted)
                gain = gain_of(got[output], wanted)
                # Where most of an error is a gain, rounding did not average out: a constant is another.
                allowed = max(_GAIN, limit / math.sqrt(max(wanted.size, 1))) if gain > whole / 2 else math.inf
                shares.append(max(whole / limit, vector / (_VECTOR * limit), gain / allowed))
                if name in self._unscaled:
                    outputs[output] = max(outputs[output], whole)
        badness = sum(math.log1p(share) for share in shares)
        return Loss(outputs=outputs, excess=max(shares), badness=badness)

    def noted(self, plan: PrecisionPlan, found: Loss) -> PrecisionPlan:
        """A plan with what it loses."""
        return replace(plan, loss=dict(found.outputs), limit=self.limit, reference=self.reference)

    def amplifications(self) -> Amplifications:
        """What rounding costs at every node."""
        return Amplifications(self._run, self.work, self.cases)


def _scaled(graph: ir.Graph, cases: Cases) -> dict[str, dict[str, np.ndarray]]:
    """The first case with smaller and larger numbers."""
    floats = {str(value.name) for value in graph.inputs if value.dtype == FLOAT}
    name, feeds = next(iter(cases.items()))
    if not floats:
        return {}
    return {
        f"{name} × {scale:g}": {
            key: (array * scale).astype(array.dtype) if key in floats and is_plain(array) else array
            for key, array in feeds.items()
        }
        for scale in _SCALES
    }


def _are_comparable(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    """Whether results of scaled inputs are about as far from the others as the inputs are."""

    def size(array: np.ndarray) -> float:
        finite = np.abs(array[np.abs(array) < SENTINEL_FROM], dtype=np.float64)
        return float(finite.mean()) if finite.size else 0.0

    least, most = min(_SCALES) / 4, max(_SCALES) * 4
    return all(least * size(other[name]) <= size(one[name]) <= most * size(other[name]) for name in other)


def _taken(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Inputs as FP16 holds them, where it holds them no worse than others."""
    return {
        name: array if array.dtype != np.float32 or is_coarse(array) else rounded_to_half(array)
        for name, array in feeds.items()
    }


def is_plain(array: np.ndarray) -> bool:
    """Whether an array is numbers, and no mask."""
    return bool((np.abs(array) <= FP16_MAX).all()) and len(np.unique(array.ravel()[:1000])) > 2


def rounded_to_half(array: np.ndarray) -> np.ndarray:
    """An array as FP16 holds it; numbers beyond stay."""
    with np.errstate(all="ignore"):
        return np.where(np.abs(array) <= FP16_MAX, array.astype(np.float16).astype(np.float32), array)


def is_coarse(array: np.ndarray) -> bool:
    """Whether FP16 holds an array with a much larger error than usual."""
    return relative_errors(rounded_to_half(array), array)[0] > _COARSE * ROUNDING


def _depth(graph: ir.Graph) -> int:
    """How many nodes that compute lie on the longest path."""
    depths: dict[ir.Value, int] = {}
    for node in graph:
        before = max((depths.get(value, 0) for value in node.inputs if value is not None), default=0)
        after = before + (node.op_type not in LAYOUT and next(float_outputs(node), None) is not None)
        for value in node.outputs:
            depths[value] = after
    return max(depths.values(), default=0)


# -- What rounding a tensor costs in the result ------------------------------------------------------


class Amplifications:
    """How much nodes amplify the error of rounding, and what that costs in the outputs."""

    def __init__(self, run: Run, work: ir.Model, cases: Cases) -> None:
        self._graph = work.graph
        self.rounding: dict[ir.Value, float] = {}  # the relative error of a tensor in FP16
        # The relative error of a node's results where one of its inputs is rounded.
        self._errors: dict[tuple[ir.Node, int], float] = {}
        self._measure(run, work, cases)
        self.cost: dict[ir.Value, float] = {}  # of the results per relative error of a tensor
        self._follow()

    def _measure(self, run: Run, work: ir.Model, cases: Cases) -> None:
        copy = work.clone()
        twins = dict(zip(copy.graph, work.graph, strict=True))
        values = dict[str, ir.Value]()
        for own, other in twins.items():
            values |= {str(each.name): twin for each, twin in zip(own.outputs, other.outputs, strict=True)}
        rounded, again = dict[ir.Value, ir.Value](), dict[ir.Node, dict[int, ir.Value]]()
        for node in list(copy.graph):
            if not computes_new(node):
                continue
            again[node] = {}
            for position, value in float_inputs(node):
                if value not in rounded:
                    rounded[value] = _rounded_copy(copy.graph, node, value)
                inputs = [*node.inputs]
                inputs[position] = rounded[value]
                name = f"{node.name}/again_{position}"
                twin = ir.node(
                    node.op_type,
                    inputs,
                    node.attributes,
                    domain=node.domain,
                    num_outputs=len(node.outputs),
                    name=name,
                )
                for at, (one, result) in enumerate(zip(twin.outputs, node.outputs, strict=True)):
                    one.name = f"{name}:{at}" if result.name else ""
                    one.type, one.shape = result.type, result.shape
                first = next((at for at, _ in float_outputs(node)), None)
                if first is not None:
                    again[node][position] = twin.outputs[first]
                    copy.graph.insert_after(node, twin)
        for feeds in cases.values():
            for value in work.graph.inputs:
                if value.dtype == FLOAT:
                    self._take(value, feeds[str(value.name)])
        for value in work.graph.initializers.values():
            if value.dtype == FLOAT and (array := constant_of(value)) is not None:
                self._take(value, array)

        def needed(node: ir.Node) -> list[ir.Value]:
            outputs = [] if node not in twins else [value for _, value in float_outputs(node)]
            return outputs and [*outputs, *again.get(node, {}).values()]

        for nodes in slices(copy.graph, cases, needed):
            for read in read_values(run, copy, [value for node in nodes for value in needed(node)], cases):
                for node in nodes:
                    results = [value for _, value in float_outputs(node)]
                    for value in results:
                        self._take(values[str(value.name)], read(value))
                    for position, value in again.get(node, {}).items():
                        error = _one_error(read(value), read(results[0]))
                        key = twins[node], position
                        self._errors[key] = max(self._errors.get(key, 0.0), error)

    def _take(self, value: ir.Value, array: np.ndarray) -> None:
        error = _one_error(rounded_to_half(array), array)
        self.rounding[value] = max(self.rounding.get(value, 0.0), error)

    def _follow(self) -> None:
        """From the outputs back, multiply the amplifications."""
        self.cost = {value: 1.0 for value in self._graph.outputs}
        for node in reversed(self._graph):
            after = max((self.cost.get(value, 0.0) for value in node.outputs), default=0.0)
            for position, value in float_inputs(node) if after else ():
                cost = after * self.amplification(node, position, value)
                self.cost[value] = min(max(self.cost.get(value, 0.0), cost), _FAILED)

    def amplification(self, node: ir.Node, position: int, value: ir.Value) -> float:
        """The relative error of a result over that of an input."""
        rounding, error = self.rounding.get(value, 0.0), self._errors.get((node, position))
        return 1.0 if error is None or not rounding else min(error / rounding, _FAILED)

    def costs(self) -> tuple[dict[ir.Node, float], dict[ir.Value, float]]:
        """What FP16 costs at every node that reads or writes a tensor, and at inputs and outputs."""
        nodes, ends = dict[ir.Node, float](), dict[ir.Value, float]()
        for node in self._graph:
            after = max((self.cost.get(value, 0.0) for value in node.outputs), default=0.0)
            of_results = (self.cost.get(value, 0.0) * self.rounding.get(value, 0.0) for value in node.outputs)
            of_inputs = (
                after * self.amplification(node, position, value) * self.rounding.get(value, 0.0)
                for position, value in float_inputs(node)
                if not value.is_graph_input()
            )
            nodes[node] = max((*of_results, *of_inputs), default=0.0)
        for value in (*self._graph.inputs, *self._graph.outputs):
            # Inputs that FP16 holds as well as others are given in it.
            if value.is_graph_output() or self.rounding.get(value, 0.0) > _COARSE * ROUNDING:
                ends[value] = self.cost.get(value, 0.0) * self.rounding.get(value, 0.0)
        return nodes, ends


def computes_new(node: ir.Node) -> bool:
    """Whether a node computes other numbers than it reads, and can be run again."""
    return not graphs_in(node) and node.op_type not in LAYOUT and next(float_outputs(node), None) is not None


def _one_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """The relative L2 error, or that of the worst vector where it is far larger."""
    whole, vector = relative_errors(got, wanted)
    return max(whole, vector / _VECTOR)


def _rounded_copy(graph: ir.Graph, before: ir.Node, value: ir.Value) -> ir.Value:
    """A value as FP16 holds it; numbers beyond stay, as in `rounded_to_half`."""
    half = ir.node("Cast", [value], {"to": int(HALF)}, name=f"{value.name}/half")
    single = ir.node("Cast", [half.outputs[0]], {"to": int(FLOAT)}, name=f"{value.name}/rounded")
    for node, dtype in ((half, HALF), (single, FLOAT)):
        node.outputs[0].name, node.outputs[0].shape = node.name, value.shape
        node.outputs[0].type = ir.TensorType(dtype)
    graph.insert_before(before, [half, single])
    return single.outputs[0]


# -- Which nodes to upcast ---------------------------------------------------------------------------


class _LossSearch:
    """Upcasts what costs most, until the loss is below the limit."""

    def __init__(
        self, measured: _Measured, planner: Planner, wide: str, plan: PrecisionPlan, found: Loss
    ) -> None:
        self._measured, self._planner, self._wide = measured, planner, wide
        self._plan, self._found = plan, found
        nodes, ends = measured.amplifications().costs()
        already = {each.name for each in plan.kept}
        self._costs = {str(node.name): cost for node, cost in nodes.items() if node.name not in already}
        self._costs |= {tensor_key(value): cost for value, cost in ends.items()}

    def best(self) -> PrecisionPlan:
        """The plan with the fewest nodes found whose loss is below the limit, or the least loss."""
        names = sorted(self._costs, key=lambda name: -self._costs[name])
        count = max(1, len(names) // _FIRST)
        step = 2 if len(names) <= _LARGE else 4
        while count and not self._try(names[:count]):
            count = 0 if count >= len(names) else min(step * count, len(names))
        self._prune(names[:count])
        return self._measured.noted(self._plan, self._found)

    def _try(self, names: Iterable[str]) -> bool:
        """Whether the loss is below the limit with these upcast; the plan is kept if it is better."""
        lossy = {name: self._reason(name) for name in names}
        plan = self._planner.plan(self._wide, lossy)
        found = self._measured.of(plan)
        better = self._found.excess > 1.0 and found.badness < self._found.badness
        if found.excess <= 1.0 or better:
            self._plan, self._found = plan, found
        return found.excess <= 1.0

    def _prune(self, names: list[str]) -> None:
        """Leave out what is not needed, the cheapest first, in halves, then quarters."""
        left = sorted(names, key=lambda name: self._costs[name])
        size, tries = (len(left) + 1) // 2, 0
        most = min(_MOST_PRUNINGS, max(2, _MOST_PRUNINGS * _LARGE // max(len(self._costs), 1)))
        while size and tries < most:
            start = 0
            while start < len(left) and tries < most:
                tries += 1
                shorter = left[:start] + left[start + size :]
                if len(shorter) < len(left) and self._try(shorter):
                    left = shorter
                else:
                    start += size
            size //= 2

    def _reason(self, name: str) -> KeptReason:
        cost, limit = self._costs[name], self._measured.limit
        text = f"rounding to FP16 here costs about {cost:.2g} of the result, and {limit:.2g} may be lost"
        return KeptReason(KeptKind.ROUNDING, cost, text)
