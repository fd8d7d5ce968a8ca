"""Keep a weight once that an embedding and an output projection share.

PyTorch's exporter writes a projection with the turned weight as a constant of its own, so that a tied
embedding is in the file twice: half a gigabyte more for a model of a billion weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from mha_deploy.graph.fuse.facts import is_op


def share_tied_weights(model: ir.Model) -> tuple[str, ...]:
    """Replace every turned copy of an embedding table by a Transpose of the table, in the model itself.

    Only constants with the turned shape of a table are read, and compared number by number.

    Args:
        model: The model; it is changed.

    Returns:
        The names of the constants that are gone.
    """
    gone = []
    for table in list(_tables(model.graph)):
        for copy in _turned_copies(model.graph, table):
            _replace(model.graph, table, copy)
            gone.append(str(copy.name))
    return tuple(gone)


def _tables(graph: ir.Graph) -> Iterator[ir.Value]:
    for value in graph.initializers.values():
        looked_up = any(is_op(use.node, "Gather") and use.idx == 0 for use in value.uses())
        if looked_up and value.const_value is not None and len(value.const_value.shape) == 2:
            yield value


def _turned_copies(graph: ir.Graph, table: ir.Value) -> list[ir.Value]:
    shape, dtype = tuple(reversed(_shape_of(table))), table.dtype
    return [
        value
        for value in graph.initializers.values()
        if value is not table
        and value.dtype == dtype
        and _shape_of(value) == shape
        and not value.is_graph_output()
        and not value.is_graph_input()
        and _is_turned(value, table)
    ]


def _shape_of(value: ir.Value) -> tuple[object, ...]:
    return () if value.const_value is None else tuple(value.const_value.shape)


def _is_turned(value: ir.Value, table: ir.Value) -> bool:
    if value.const_value is None or table.const_value is None:
        return False
    one, other = value.const_value.numpy(), table.const_value.numpy().T
    # A row tells most others apart, without going through all of them.
    return np.array_equal(one[:1], other[:1]) and np.array_equal(one, other)


def _replace(graph: ir.Graph, table: ir.Value, copy: ir.Value) -> None:
    node = ir.node("Transpose", [table], {"perm": [1, 0]}, name=f"{copy.name}/turned")
    turned = node.outputs[0]
    turned.name, turned.type, turned.shape = f"{copy.name}/turned", copy.type, copy.shape
    copy.replace_all_uses_with(turned)
    graph.insert_before(graph[0], node)
    del graph.initializers[str(copy.name)]
