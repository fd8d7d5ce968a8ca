"""Find attention that no node stands for: a GEMM of two computed tensors, then a softmax, then a GEMM.

The recogniser starts from softmaxes whose weights come to V over few steps. Where more stands between (a GEMM
that mixes the heads, a branch, a loop), nothing would be reported, and the rest would count as everything. So
the whole graph is walked once, in order, with what each value depends on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import onnx_ir as ir

from mha_deploy.graph.fuse.facts import dims_of, is_op

_LOOPS = frozenset({"Loop", "Scan"})


@dataclass(frozen=True, kw_only=True)
class _Carried:
    """What a value depends on.

    Args:
        computed: Whether it depends on an input of the graph; else it is a weight.
        scores: Whether a GEMM of two computed tensors stands behind it, and no softmax between.
        sizes: The fixed sizes of those GEMMs' axes.
        softmaxes: The softmaxes of such scores that stand behind it, and no product with V between.
    """

    computed: bool = False
    scores: bool = False
    sizes: frozenset[int] = frozenset()
    softmaxes: frozenset[ir.Node] = frozenset()


_NOTHING = _Carried()
_COMPUTED = _Carried(computed=True)


def leftover_attentions(graph: ir.Graph) -> list[ir.Node]:
    """The softmaxes of a graph, and of the graphs in it, that are part of an attention.

    Args:
        graph: The graph after fusion: behind an `Attention` node nothing is followed.
    """
    walk = _Walk()
    for value in graph.inputs:
        if not value.is_initializer():
            walk.carried[value] = _COMPUTED
    walk.follow(graph)
    return [node for node in graph.all_nodes() if node in walk.found]


class _Walk:
    """The values so far, and the softmaxes that were found."""

    def __init__(self) -> None:
        self.carried: dict[ir.Value, _Carried] = {}
        self.found: set[ir.Node] = set()

    def follow(self, graph: ir.Graph) -> None:
        """Take in the nodes of a graph, in their order."""
        for node in graph:
            inner = [each.as_graph() for each in node.attributes.values() if _is_graph(each)]
            if inner:
                self._branches(node, inner)
                continue
            carried = self._after(node)
            for value in node.outputs:
                self.carried[value] = carried

    def _of(self, values: Iterable[ir.Value | None]) -> list[_Carried]:
        return [_NOTHING if value is None else self.carried.get(value, _NOTHING) for value in values]

    def _after(self, node: ir.Node) -> _Carried:
        given = self._of(node.inputs)
        joined = _joined(given)
        if not joined.computed:
            return _NOTHING
        if "Attention" in node.op_type or is_op(node, "Shape", "Size"):
            return _COMPUTED
        if is_op(node, "Softmax"):
            begins = joined.scores and _runs_over_keys(node, joined)
            return replace(_COMPUTED, softmaxes=frozenset({node} if begins else ()))
        if not is_op(node, "MatMul", "Gemm", "Einsum"):
            return joined
        self.found |= joined.softmaxes
        operands = [each for each in (given if is_op(node, "Einsum") else given[:2]) if each.computed]
        if len(operands) < 2:
            return joined  # a projection
        weights = [bool(each.softmaxes) for each in operands]
        if any(weights) and not all(weights):
            return _COMPUTED  # the product with V
        sizes = frozenset(size for size in dims_of(node.outputs[0]) or () if isinstance(size, int))
        return replace(_COMPUTED, scores=True, sizes=sizes)

    def _branches(self, node: ir.Node, graphs: list[ir.Graph]) -> None:
        """Follow If, Loop and Scan; the values of a loop are followed a second time around it."""
        given, loops = self._of(node.inputs), node.op_type in _LOOPS
        # The first result of a Loop's body is its condition, which is no output.
        skipped = int(node.op_type == "Loop")
        for graph in graphs:
            for turn in range(1 + loops):
                results = self._of(graph.outputs)
                for at, value in enumerate(graph.inputs):
                    again = results[at - skipped : at - skipped + 1] if turn and at >= skipped else []
                    self.carried[value] = _joined([*given[at : at + 1], *again, _COMPUTED])
                self.follow(graph)
        for at, value in enumerate(node.outputs, skipped):
            ends = self._of(graph.outputs[at] for graph in graphs if at < len(graph.outputs))
            self.carried[value] = _joined([*ends, _COMPUTED])


def _joined(given: list[_Carried]) -> _Carried:
    kept = [each for each in given if each is not _NOTHING]
    if len(kept) < 2:
        return kept[0] if kept else _NOTHING
    return _Carried(
        computed=any(each.computed for each in kept),
        scores=any(each.scores for each in kept),
        sizes=frozenset().union(*(each.sizes for each in kept)),
        softmaxes=frozenset().union(*(each.softmaxes for each in kept)),
    )


def _runs_over_keys(softmax: ir.Node, carried: _Carried) -> bool:
    """Whether the softmax may run over an axis of the scores.

    The router of a mixture of experts depends on scores as well, over many layers, but runs over the experts:
    a fixed size that the scores do not have.
    """
    source = softmax.inputs[0]
    dims = None if source is None else dims_of(source)
    axis = softmax.attributes.get_int("axis", -1)
    if dims is None or not -len(dims) <= axis < len(dims):
        return True
    size = dims[axis]
    return not isinstance(size, int) or size in carried.sizes


def _is_graph(attribute: ir.Attr) -> bool:
    return attribute.type == ir.AttributeType.GRAPH
