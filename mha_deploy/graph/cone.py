"""What a value of a graph is computed from."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir


def cone(values: Iterable[ir.Value | None]) -> set[ir.Node]:
    """The nodes that these values are computed from, those that compute them included."""
    found: set[ir.Node] = set()
    pending = [value.producer() for value in values if value is not None]
    while pending:
        node = pending.pop()
        if node is None or node in found:
            continue
        found.add(node)
        pending += [value.producer() for value in node.inputs if value is not None]
    return found


def value_named(graph: ir.Graph, name: str) -> ir.Value | None:
    """A value that the graph computes, by its name."""
    return next((value for node in graph for value in node.outputs if value.name == name), None)
