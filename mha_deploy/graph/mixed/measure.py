"""Measure the numbers of a float32 graph, given somebody who runs it.

A graph cannot hold all its tensors at once where it is large: it is run in slices, copies whose outputs are
some of its tensors. What does not lead to them is gone, so early slices are cheap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from mha_deploy.errors import DeployError
from mha_deploy.graph.mixed.inner import inner_figure, inputs_to_see
from mha_deploy.graph.mixed.prepare import FLOAT, constant_of, float_outputs, name_of, prepared
from mha_deploy.graph.mixed.records import SENTINEL_FROM, Ranges, ValueRange

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
