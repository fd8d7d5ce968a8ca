"""Which weights of one graph another one lacks, whatever their layout, order and type are there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from mha_deploy.graph.ir import HALVES, constant, graphs_of, nodes_in, weight_behind
from mha_deploy.graph.roles import FUSED_MATMULS, MATMULS

_FEWEST = 8  # numbers by which a row is known
_FLOATS = (*HALVES, ir.DataType.FLOAT, ir.DataType.DOUBLE)
_OTHERS = (ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64)  # masks, indices and sizes


def missing_weights(ours: ir.Model, theirs: ir.Model) -> tuple[list[str], int]:
    """The weights of our GEMMs that are not in another graph, and how many were looked for.

    A weight is there if most of its rows or columns are, in any order, in any tensor: another export may
    transpose it, split it by heads, or pack it with others. None is looked for where types do not allow it:
    in a quantized graph, and between FP16 and BF16.
    """
    wanted, there = dict(_weights_of_gemms(ours)), list(_matrices(theirs))
    types = {tensor.dtype for tensor in (*wanted.values(), *there)}
    narrow = types.intersection(HALVES)
    if not there or not types.issubset(_FLOATS) or len(narrow) > 1:
        return [], 0
    common = (narrow.pop() if narrow else ir.DataType.FLOAT).numpy()
    known = {row for tensor in there for rows in _rows(tensor, common) for row in rows}

    def is_there(tensor: ir.TensorProtocol) -> bool:
        return any(2 * len(known.intersection(rows)) > len(set(rows)) for rows in _rows(tensor, common))

    return [name for name, tensor in wanted.items() if not is_there(tensor)], len(wanted)


def _weights_of_gemms(model: ir.Model) -> Iterator[tuple[str, ir.TensorProtocol]]:
    for node in nodes_in(model.graph):
        if node.op_type in (*MATMULS, *FUSED_MATMULS):
            for value in map(weight_behind, node.inputs[:2]):
                tensor = constant(value)
                if value is not None and tensor is not None and _is_matrix(tensor):
                    yield value.name or "", tensor


def _matrices(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """Everything constant that may hold weights."""
    for graph in graphs_of(model):
        held = [value.const_value for value in graph.initializers.values()]
        held += [constant(node.outputs[0]) for node in graph if node.op_type == "Constant"]
        yield from (each for each in held if each is not None and _is_matrix(each))


def _is_matrix(tensor: ir.TensorProtocol) -> bool:
    sizes = [size for size in tensor.shape.numpy() if size > 1]
    return len(sizes) > 1 and max(sizes) >= _FEWEST and tensor.dtype not in _OTHERS


def _rows(tensor: ir.TensorProtocol, dtype: np.dtype) -> Iterator[list[tuple[int, ...]]]:
    """What all rows along each axis are known by: their size, and two sums over their bits, in any order."""
    with np.errstate(over="ignore"):
        numbers = tensor.numpy().astype(dtype) + dtype.type(0)  # there is no -0 then
    bits = numbers.view(f"uint{8 * dtype.itemsize}")
    mixed = (bits ^ (bits >> 5)) * bits.dtype.type(40503)
    for axis, size in enumerate(numbers.shape):
        if size >= _FEWEST:
            sums = [each.sum(axis=axis, dtype=np.uint64).ravel().tolist() for each in (bits, mixed)]
            yield [(size, *row) for row in zip(*sums, strict=True)]
