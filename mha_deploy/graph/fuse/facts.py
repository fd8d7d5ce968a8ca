"""Small questions to a graph: is this a constant, are these two sizes the same, who uses this?"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

_SCALAR_OPS: dict[str, Callable[..., float]] = {
    "Sqrt": math.sqrt,
    "Reciprocal": lambda x: 1.0 / x,
    "Neg": lambda x: -x,
    "Mul": lambda x, y: x * y,
    "Div": lambda x, y: x / y,
    "Pow": lambda x, y: x**y,
}
_SAME_SCALAR = frozenset({"Cast", "Identity", "Expand", "Reshape", "Squeeze", "Unsqueeze"})


def array_of(value: ir.Value | None) -> np.ndarray | None:
    """The numbers of a constant; None for anything that is computed or given."""
    tensor = _tensor_of(value)
    return None if tensor is None else tensor.numpy()


def is_constant(value: ir.Value | None) -> bool:
    """Whether a value is a constant. Its numbers are not read: they may be gigabytes in another file."""
    return _tensor_of(value) is not None


def _tensor_of(value: ir.Value | None) -> ir.TensorProtocol | None:
    return None if value is None or value.is_graph_input() else ir.convenience.get_const_tensor(value)


def scalar_of(value: ir.Value | None) -> float | None:
    """The one number that a tensor holds everywhere, where that follows from constants alone."""
    tensor = _tensor_of(value)
    if tensor is not None:
        return float(tensor.numpy().ravel()[0]) if tensor.size == 1 else None
    node = value.producer() if value is not None else None
    if node is None or node.domain != "":
        return None
    if node.op_type in _SAME_SCALAR:
        return scalar_of(node.inputs[0])
    if node.op_type not in _SCALAR_OPS:
        return None
    numbers = [scalar_of(each) for each in node.inputs]
    try:
        return None if None in numbers else float(_SCALAR_OPS[node.op_type](*numbers))
    except (ArithmeticError, ValueError):
        return None


def ints_of(value: ir.Value | None) -> list[int] | None:
    """The integers of a constant, such as axes."""
    array = array_of(value)
    return None if array is None else [int(each) for each in array.ravel()]


def dims_of(value: ir.Value) -> tuple[int | ir.SymbolicDim, ...] | None:
    """The dimensions of a value, or None where the rank is not known."""
    return None if value.shape is None else tuple(value.shape)


def dtype_of(value: ir.Value) -> ir.DataType:
    """The type of a value; float32 where the file does not say."""
    return value.dtype or ir.DataType.FLOAT


def same_dim(first: int | ir.SymbolicDim, second: int | ir.SymbolicDim) -> bool:
    """Whether two dimensions are certainly equal: the same number or the same name."""
    if isinstance(first, int) or isinstance(second, int):
        return first == second
    return first.value is not None and first.value == second.value


def same_dims(first: tuple[int | ir.SymbolicDim, ...], second: tuple[int | ir.SymbolicDim, ...]) -> bool:
    """Whether two shapes are certainly equal."""
    return len(first) == len(second) and all(map(same_dim, first, second))


def is_op(node: ir.Node | None, *op_types: str) -> bool:
    """Whether a node is one of these operators of ONNX's own set."""
    return node is not None and node.domain == "" and node.op_type in op_types


def perm_of(node: ir.Node) -> list[int]:
    """The permutation of a Transpose; without one, the axes are reversed."""
    perm = node.attributes.get_ints("perm")
    dims = dims_of(node.inputs[0]) if node.inputs[0] is not None else None
    return list(perm) if perm is not None else list(reversed(range(len(dims or ()))))


def adds_leading_ones(node: ir.Node) -> bool:
    """Whether a node only puts axes of size 1 in front, which broadcasting would do as well."""
    source = node.inputs[0] if is_op(node, "Unsqueeze", "Reshape") else None
    before, after = None if source is None else dims_of(source), dims_of(node.outputs[0])
    if before is None or after is None or len(after) < len(before):
        return False
    more = len(after) - len(before)
    return all(size == 1 for size in after[:more]) and same_dims(after[more:], before)
