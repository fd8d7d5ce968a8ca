"""Find attention that no node stands for, whatever lies between its two matmuls."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import onnx_ir as ir

from mha_deploy.bundle.manifest import UnfusedRecord
from mha_deploy.graph.attention_node import is_attention
from mha_deploy.graph.fuse.pattern import softmax_at
from mha_deploy.graph.fuse.values import NotExpressible, NotFused, module_of, sizes_of
from mha_deploy.graph.ir import inner_graphs, is_op, made_by, node_name, nodes_behind, rank, weight_behind
from mha_deploy.graph.roles import NORMS

_CHOICES = ("Gather", "GatherND", "GatherElements", "Slice")
# Activations that some models have in the place of the softmax.
_ACTIVATIONS = frozenset(
    {"Sigmoid", "Relu", "Softplus", "HardSigmoid", "Exp", "Elu", "Gelu", "Tanh", "Pow", "Softmax"}
    | {"LogSoftmax", "Hardmax", "LpNormalization", "ThresholdedRelu", "LeakyRelu", "Celu", "Selu", "Softsign"}
    | {"HardSwish", "Erf", "Mish"}
)
# What may stand between the two matmuls of an attention without softmax; a norm or a projection may not.
_BETWEEN = _ACTIVATIONS | frozenset(
    {"Add", "Sub", "Mul", "Div", "Neg", "Abs", "Max", "Min", "Clip", "Where", "Sqrt", "Reciprocal", "Trilu"}
    | {"Cast", "Identity", "Dropout", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Expand", "CumSum"}
    | {"Slice", "Split", "Concat", "Pad", "Log", "ScatterElements", "Sign"}
)
# Steps that are not linear, so that the attention is not, as in sparsemax.
_NOT_LINEAR = frozenset({"Abs", "Clip", "Max", "Min", "Sqrt", "Log", "Sign"})
# What changes the number of keys that scores are about.
_LONGER = ("Concat", "Pad", "Slice", "Split")
_OTHER_SUMS = ("ReduceMax", "ReduceMin", "ReduceMean", "ReduceL2", "ReduceLogSumExp", "ReduceProd")
_NO_SOFTMAX = "Attention always has one."


class _Nodes:
    """A set of nodes that grows along a graph: a node, and the sets that it was joined with.

    Copies of sets would be quadratic in a chain.
    """

    __slots__ = ("node", "parts", "unfit", "witness")

    def __init__(self, node: ir.Node | None, *parts: _Nodes) -> None:
        self.node, self.parts = node, parts
        self.witness: ir.Node | None = None  # one that was found here
        self.unfit = -1  # when none was found

    def new(self, seen: set[_Nodes]) -> Iterator[ir.Node]:
        """The nodes that are not in sets seen before."""
        pending = [self]
        while pending:
            each = pending.pop()
            if each not in seen:
                seen.add(each)
                pending += each.parts
                if each.node is not None:
                    yield each.node


def _union(parts: Iterable[_Nodes | None]) -> _Nodes | None:
    some = list(dict.fromkeys(each for each in parts if each is not None))
    return some[0] if len(some) == 1 else _Nodes(None, *some) if some else None


@dataclass(frozen=True, kw_only=True)
class Core:
    """What computes an attention that is no node of the graph."""

    weights: ir.Node  # its softmax, what stands in its place, or an operator that is all of it
    scores: ir.Node | None = None  # the matmul of queries and keys
    heads: ir.Node | None = None  # the matmul of the weights and the values
    values: int = 1  # which of its operands are the values

    @property
    def result(self) -> ir.Value:
        """The heads, or what the operator gives that is all of it."""
        return (self.heads or self.weights).outputs[0]


_MOST_STEPS = 64  # from the weights to a matmul of their attention


def _core(weights: ir.Value) -> Core | None:
    """The attention whose weights are a value; matmuls with a constant beside them are not of its core."""
    node = weights.producer()
    if node is None:
        return None
    if "Attention" in node.op_type:
        return Core(weights=node)
    before = next(filter(_multiplies, islice(nodes_behind(node.inputs), _MOST_STEPS)), None)
    if _multiplies(node):  # an attention without softmax
        return Core(weights=node, scores=before)
    pending, seen = [weights], {weights}
    while pending and len(seen) < _MOST_STEPS:
        value = pending.pop(0)
        for user, at in value.uses():
            if _multiplies(user):
                return Core(weights=node, scores=before, heads=user, values=1 - at)
            pending += [each for each in user.outputs if each not in seen]
            seen.update(user.outputs)
    return Core(weights=node, scores=before)


def cores_of(model: ir.Model, unfused: Sequence[UnfusedRecord]) -> dict[str, Core]:
    """By name, what computes the attentions that are no node; those without their weights are left out."""
    nodes = model.graph.all_nodes() if unfused else ()
    made = {value.name: value for node in nodes for value in node.outputs}
    known = {each.name: _core(made[each.value]) for each in unfused if each.value in made}
    return {name: core for name, core in known.items() if core is not None}


def _multiplies(node: ir.Node) -> bool:
    """Whether a node is a matmul of two tensors that are computed."""
    is_matmul = is_op(node, "Einsum") or (node.op_type.endswith("MatMul") and len(node.inputs) == 2)
    return is_matmul and len(node.inputs) == 2 and not any(map(weight_behind, node.inputs))


@dataclass(frozen=True, kw_only=True)
class _Carried:
    """What a value depends on."""

    computed: bool = False  # whether it depends on an input of the graph; else it is a weight
    scores: bool = False  # whether a GEMM of two computed tensors stands behind it, and no softmax between
    normed: bool = False  # whether a normalization layer stands behind it
    sizes: frozenset[int] = frozenset()  # the fixed sizes of those GEMMs' axes
    # the softmaxes of such scores that stand behind it, and no matmul with V between
    softmaxes: _Nodes | None = None
    # the GEMMs of two computed tensors behind it, with only small steps between
    matmuls: _Nodes | None = None
    activation: ir.Node | None = None  # of the activations among those steps, the first by name
    bend: ir.Node | None = None  # the same of other steps that are not linear
    # softmaxes of something else than scores behind it, and behind those GEMMs
    features: _Nodes | None = None

    def behind_projection(self, **changed: Any) -> _Carried:
        """The same without what only small steps carry on."""
        return replace(self, matmuls=None, activation=None, bend=None, features=None, **changed)


_NOTHING = _Carried()
_COMPUTED = _Carried(computed=True)


class Leftovers:
    """The nodes of a graph, and of the graphs in it, that are part of an attention."""

    def __init__(self, graph: ir.Graph) -> None:
        # Softmaxes, and what stands in their place, with why they are not expressible; None where that is
        # not known.
        self.found: dict[ir.Node, NotFused | None] = {}
        self.features: set[ir.Node] = set()  # softmaxes that only make features of Q and K
        # The second matmul of an attention without softmax, and what stands between the two.
        self._linear: dict[ir.Node, ir.Node | None] = {}
        self._bends: dict[ir.Node, ir.Node | None] = {}  # by the same matmul, a step that is not linear
        # The same of those that a softmax follows, by the softmax.
        self._followed: dict[ir.Node, dict[ir.Node, ir.Node | None]] = {}
        self._popped = 0  # how many were taken out of it
        # The sets whose nodes were taken in already, by what for.
        self._seen: dict[str, set[_Nodes]] = {"scores": set(), "found": set(), "features": set()}
        self._carried = {value: _COMPUTED for value in graph.inputs if not value.is_initializer()}
        self._follow(graph)
        for softmax, matmuls in self._followed.items():
            if softmax not in self.found:  # no matmul with V follows: its numbers are no scores
                self._linear |= matmuls
        modules = set[str]()
        for matmul, activation in self._linear.items():  # once for each module
            node = activation or matmul
            if module_of(node) not in modules:
                modules.add(module_of(node))
                more = ", and nothing proves that its numbers are only divided by their sum"
                more = more if is_op(node, "Exp") else ""
                what = f"{node.op_type} stands in the place of the softmax{more}; {_NO_SOFTMAX}"
                if activation is None and (bend := self._bends.get(matmul)) is not None:
                    what = f"{bend.op_type} and no softmax stands between its matmuls; {_NO_SOFTMAX}"
                elif activation is None:
                    what = f"No softmax stands between its matmuls (linear attention); {_NO_SOFTMAX}"
                self.found[node] = NotExpressible(what)

    def _follow(self, graph: ir.Graph) -> None:
        for node in graph:
            if inner := inner_graphs(node):
                self._branches(node, inner)
            else:
                after = self._after(node)
                for value in node.outputs:
                    self._carried[value] = after

    def _of(self, values: Iterable[ir.Value | None]) -> list[_Carried]:
        return [_NOTHING if value is None else self._carried.get(value, _NOTHING) for value in values]

    def _after(self, node: ir.Node) -> _Carried:
        given = self._of(node.inputs)
        joined = _joined(given)
        if not joined.computed:
            return _NOTHING
        if "Attention" in node.op_type:
            if not is_attention(node):
                what = f"{node.domain or 'ONNX'}'s {node.op_type} is not ONNX's Attention."
                self.found[node] = NotExpressible(what)
            return _COMPUTED
        if is_op(node, "Shape", "Size"):
            return _COMPUTED
        if is_op(node, *_CHOICES) and not given[0].computed and (rank(node.inputs[0]) or 0) > 2:
            return _NOTHING  # the weights of chosen experts
        here = _Nodes(node)
        if node.domain != "" and "Softmax" in node.op_type and joined.scores:
            return replace(_COMPUTED, softmaxes=here)
        if (softmax := softmax_at(node)) is not None:
            # The router of a mixture of experts depends on scores as well, over many layers, but runs over
            # the experts: a fixed size that the scores do not have.
            dims, axis = sizes_of(softmax.source), softmax.axis
            size = dims[axis] if dims is not None and -len(dims) <= axis < len(dims) else None
            if not joined.scores or (isinstance(size, int) and size not in joined.sizes):
                return replace(_COMPUTED, features=here)
            for matmul in self._new(joined.matmuls, "scores"):
                if matmul in self._linear:  # it computes the scores of this softmax
                    self._followed.setdefault(node, {})[matmul] = self._linear.pop(matmul)
                    self._popped += 1
            return replace(_COMPUTED, softmaxes=here)
        expanded = _expanded_matmul(node, of_weights=joined.softmaxes is not None)
        if expanded is not None:
            given = self._of(expanded.inputs)
        elif not is_op(node, "Gemm", "Einsum") and "MatMul" not in node.op_type:
            if node.domain != "" or node.op_type not in _BETWEEN:
                return joined.behind_projection(normed=joined.normed or node.op_type in NORMS)
            if joined.scores and is_op(node, *_LONGER):  # a sink, or padding, beside the keys
                joined = replace(joined, sizes=joined.sizes | _fixed_sizes(node))
            if joined.matmuls and node.op_type in _ACTIVATIONS:
                return replace(joined, activation=_first(joined.activation, node))
            if joined.matmuls and node.op_type in _NOT_LINEAR:
                return replace(joined, bend=_first(joined.bend, node))
            return joined
        for each in self._new(joined.softmaxes, "found"):
            self.found.setdefault(each)
        if is_op(node, "QLinearMatMul"):
            given = given[::3]  # each operand has a scale and a zero point
        constants = [value for value, each in zip(node.inputs, given, strict=False) if not each.computed]
        operands = [each for each in (given if is_op(node, "Einsum") else given[:2]) if each.computed]
        if len(operands) < 2:
            if (
                not joined.softmaxes
                and is_op(node, "MatMul")
                and max((rank(each) or 0 for each in constants), default=0) > 2
            ):
                # Learned keys of each head; a projection has a weight of two axes.
                return joined.behind_projection(scores=True, sizes=joined.sizes | _fixed_sizes(node))
            # Scores are not normalized and then projected: behind both is the next layer.
            return joined.behind_projection(scores=joined.scores and not joined.normed)
        if is_op(node, "MatMul") and node.inputs[0] is node.inputs[1]:
            return joined.behind_projection()  # a power of a matrix, as of who is reached from whom
        weights = [each.softmaxes is not None for each in operands]
        if any(weights) and not all(weights):
            return _COMPUTED  # the matmul with V
        if not any(weights) and self._has_other(joined.matmuls):
            self._linear[node], self._bends[node] = joined.activation, joined.bend
            self.features.update(self._new(joined.features, "features"))
        return replace(
            _COMPUTED, scores=True, sizes=_fixed_sizes(node), matmuls=here, features=joined.features
        )

    def _new(self, nodes: _Nodes | None, what: str) -> Iterable[ir.Node]:
        """The nodes of a set that were not taken in for this yet."""
        return () if nodes is None else nodes.new(self._seen[what])

    def _has_other(self, matmuls: _Nodes | None) -> bool:
        """Whether one of these matmuls does not end an attention without softmax itself."""
        pending, seen = [] if matmuls is None else [matmuls], set[_Nodes]()
        while pending:
            each = pending.pop()
            known = each.node if each.witness is None else each.witness
            if known is not None and known not in self._linear:
                matmuls.witness = known  # type: ignore[union-attr]  # pending began with it
                return True
            if each not in seen and each.unfit != self._popped:
                seen.add(each)
                pending += each.parts
        for each in seen:
            each.unfit = self._popped
        return False

    def _branches(self, node: ir.Node, graphs: Sequence[ir.Graph]) -> None:
        """Follow If, Loop and Scan; the values of a loop are followed a second time around it."""
        given, rounds = self._of(node.inputs), 2 if node.op_type in ("Loop", "Scan") else 1
        # The first result of a Loop's body is its condition, which is no output.
        skipped = int(node.op_type == "Loop")
        for graph in graphs:
            for around in range(rounds):
                for seen in self._seen.values():
                    seen.clear()
                results = self._of(graph.outputs)
                for at, value in enumerate(graph.inputs):
                    again = results[at - skipped : at - skipped + 1] if around and at >= skipped else []
                    self._carried[value] = _joined([*given[at : at + 1], *again, _COMPUTED])
                self._follow(graph)
        for at, value in enumerate(node.outputs, skipped):
            ends = self._of(graph.outputs[at] for graph in graphs if at < len(graph.outputs))
            self._carried[value] = _joined([*ends, _COMPUTED])


def _fixed_sizes(node: ir.Node) -> frozenset[int]:
    """The sizes of a result that are numbers."""
    return frozenset(size for size in sizes_of(node.outputs[0]) or () if isinstance(size, int))


def _expanded_matmul(node: ir.Node, *, of_weights: bool) -> ir.Node | None:
    """The Mul of `ReduceSum(Mul(x, y))`, where each is copied along an axis of the other: a GEMM.

    The same for a sum over all positions up to each, the state of a linear attention; with weights, for what
    else may stand in the place of the sum.
    """
    sums = ("ReduceSum", "CumSum", *(_OTHER_SUMS if of_weights else ()))
    inner = made_by(node.inputs[0], "Mul") if is_op(node, *sums) else None
    if inner is None or None in inner.inputs:
        return None
    one, other = (sizes_of(value) for value in inner.inputs)
    if one is None or other is None or len(one) != len(other):
        return None
    pairs = list(zip(one, other, strict=True))
    return inner if any(x == 1 != y for x, y in pairs) and any(y == 1 != x for x, y in pairs) else None


def _first(one: ir.Node | None, other: ir.Node | None) -> ir.Node | None:
    """Of two nodes the first by name."""
    return min((each for each in (one, other) if each is not None), key=node_name, default=None)


def _joined(given: list[_Carried]) -> _Carried:
    kept = [each for each in given if each is not _NOTHING]
    if len(kept) < 2:
        return kept[0] if kept else _NOTHING
    if all(each is kept[0] for each in kept):
        return kept[0]
    return _Carried(
        computed=any(each.computed for each in kept),
        scores=any(each.scores for each in kept),
        normed=any(each.normed for each in kept),
        sizes=frozenset().union(*(each.sizes for each in kept)),
        softmaxes=_union(each.softmaxes for each in kept),
        matmuls=_union(each.matmuls for each in kept),
        activation=functools.reduce(_first, (each.activation for each in kept)),
        bend=functools.reduce(_first, (each.bend for each in kept)),
        features=_union(each.features for each in kept),
    )
