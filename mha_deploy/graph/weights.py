"""Which weights of one graph another one lacks, whatever their layout, order and type are there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from mha_deploy.graph.ir import HALVES, constant, graphs_of, nodes_in, weight_behind
from mha_deploy.graph.roles import FUSED_GEMMS, MATMULS, NORMS

_FEWEST = 8  # numbers by which a row is known
_FLOATS = (*HALVES, ir.DataType.FLOAT, ir.DataType.DOUBLE)
_OTHERS = (ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64)  # masks, indices and sizes


class WeightSearch(NamedTuple):
    """How the weights of another graph differ from ours."""

    searched: int = 0  # how many of ours
    missing: tuple[str, ...] = ()  # those of which it does not have at least half
    changed: tuple[str, ...] = ()  # those of its own of which we do not have some numbers


def search_weights(ours: ir.Model, theirs: ir.Model) -> WeightSearch:
    """Search another graph for the weights of our GEMMs and norms, and ours for its own; biases, too.

    A matrix is known by its rows or columns, in any order, in any tensor: another export may transpose it,
    split it by heads, or pack it with others. A vector is known by its numbers. None is searched for where
    types do not allow it: in a quantized graph, and between FP16 and BF16.
    """
    own, other = dict(_weights(ours)), dict(_weights(theirs))
    tensors = [list(_constants(model)) for model in (ours, theirs)]
    types = {tensor.dtype for tensor in chain(own.values(), *tensors)}
    narrow = types.intersection(HALVES)
    if not all(tensors) or not types.issubset(_FLOATS) or len(narrow) > 1:
        return WeightSearch()
    common = (narrow.pop() if narrow else ir.DataType.FLOAT).numpy()
    lost, new = _lacking(own, tensors[1], common), _lacking(other, tensors[0], common)
    missing = tuple(name for name, share in lost.items() if share >= 0.5)
    # What is new as a whole takes the place of what is missing; equal layers may hide that something is.
    changed = tuple(name for name, share in new.items() if share and (share < 0.5 or not missing))
    return WeightSearch(len(own), missing, changed)


def _lacking(
    wanted: Mapping[str, ir.TensorProtocol], there: Sequence[ir.TensorProtocol], dtype: np.dtype
) -> dict[str, float]:
    """The share of each weight that is in none of these tensors."""
    rows = {row for tensor in there for each in _rows(tensor, dtype) for row in each}
    vectors = [_numbers(tensor, dtype) for tensor in there if _is_vector(tensor)]

    def share(tensor: ir.TensorProtocol) -> float:
        least = min(len(each - rows) / len(each) for each in map(set, _rows(tensor, dtype)))
        if not least or not _is_vector(tensor):
            return least
        numbers, size = _numbers(tensor, dtype), tensor.size
        alike = min(((numbers - each).total() for each in vectors if each.total() == size), default=size)
        del numbers[0]  # a bias of zeros may be left out
        packed = min(((numbers - each).total() for each in vectors if each.total() > size), default=size)
        # It may be taken apart as well. In FP16, some numbers of all tensors together are its own by chance.
        parts = (each for each in vectors if each.total() < size and not each - numbers)
        apart = (numbers - sum(parts, Counter())).total()
        return min(alike, packed, apart) / size

    return {name: share(tensor) for name, tensor in wanted.items()}


def _weights(model: ir.Model) -> Iterator[tuple[str, ir.TensorProtocol]]:
    """The matrices of GEMMs, and the vectors of biases and norms."""
    for node in nodes_in(model.graph):
        gemm = 2 if node.op_type in (*MATMULS, *FUSED_GEMMS) else 0  # operands, and then the bias
        if gemm or node.op_type in (*NORMS, "Add"):
            for index, value in enumerate(map(weight_behind, node.inputs)):
                tensor = constant(value)
                if value is None or tensor is None or not _is_known(tensor):
                    continue
                if _is_vector(tensor) is (index >= gemm):
                    yield value.name or "", tensor


def _constants(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """Everything constant that may hold weights."""
    for graph in graphs_of(model):
        held = [value.const_value for value in graph.initializers.values()]
        held += [constant(node.outputs[0]) for node in graph if node.op_type == "Constant"]
        yield from (each for each in held if each is not None and _is_known(each))


def _is_known(tensor: ir.TensorProtocol) -> bool:
    return max(tensor.shape.numpy(), default=0) >= _FEWEST and tensor.dtype not in _OTHERS


def _is_vector(tensor: ir.TensorProtocol) -> bool:
    return tensor.size == max(tensor.shape.numpy())


def _bits(tensor: ir.TensorProtocol, dtype: np.dtype) -> np.ndarray:
    """All numbers in a common type, by their bits."""
    with np.errstate(over="ignore"):
        numbers = tensor.numpy().astype(dtype) + dtype.type(0)  # there is no -0 then
    return numbers.view(f"uint{8 * dtype.itemsize}")


def _numbers(tensor: ir.TensorProtocol, dtype: np.dtype) -> Counter[int]:
    return Counter(_bits(tensor, dtype).ravel().tolist())


def _rows(tensor: ir.TensorProtocol, dtype: np.dtype) -> Iterator[list[tuple[int, ...]]]:
    """What all rows along each axis are known by: their size, and two sums over their bits, in any order."""
    bits = _bits(tensor, dtype)
    mixed = (bits ^ (bits >> 5)) * bits.dtype.type(40503)
    for axis, size in enumerate(bits.shape):
        if size >= _FEWEST:
            sums = [each.sum(axis=axis, dtype=np.uint64).ravel().tolist() for each in (bits, mixed)]
            yield [(size, *row) for row in zip(*sums, strict=True)]
