"""The user's axes in PyTorch's words, and PyTorch's sizes in the user's: `s15 + s70` is `P+S`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor
from torch.export import Dim

from mha_deploy.export.drawn import NamedDims
from mha_deploy.spec_parts import Axis
from mha_deploy.spec_parts import Dim as NamedDim

TORCH_NAME = "axis_"
"""How the names of axes begin for PyTorch: it takes a bare S or N for something of SymPy's."""

_LEAST = 2  # PyTorch takes sizes of 0 and 1 for constants
_EASY = 5  # half of it, or one less, is not 1 either
_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31)  # seldom a number of heads, and never a multiple of one
_SYMBOL = re.compile(r"\b[su]\d+\b")


def trace_sizes(example: Mapping[str, Tensor], dims: NamedDims, axes: Mapping[str, Axis]) -> dict[str, int]:
    """A size for every axis to trace with, at least 2 and different for each where it varies.

    Equal sizes could be taken for one. The example's own sizes are known to work, so they come first. A
    narrow range may be left: tracing computes no numbers.
    """
    shown = _shown_sizes(example, dims)
    sizes = {name: axis.min for name, axis in axes.items() if not axis.is_dynamic}
    taken = set(sizes.values()) | _fixed_sizes(example, dims)
    for name, axis in sorted(axes.items(), key=lambda item: item[1].max):
        if axis.is_dynamic:
            sizes[name] = _free_size(axis, shown.get(name), taken)
            taken.add(sizes[name])
    return {name: sizes[name] for name in axes}


def inside(axes: Mapping[str, Axis], sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes, moved into the ranges of their axes."""
    return {name: min(max(sizes[name], axis.min), axis.max) for name, axis in axes.items()}


def _free_size(axis: Axis, shown: int | None, taken: set[int]) -> int:
    least = max(axis.min, _LEAST)
    liked = [size for size in (shown, *_PRIMES) if size is not None and size >= _EASY]
    every = [*liked, *range(_EASY, _EASY + 64), *range(least, least + 64)]
    inside = [size for size in every if least <= size <= axis.max]
    size = next((size for size in inside if size not in taken), least)
    while size in taken:  # a fixed size may be anything, another axis never the same
        size += 1
    return size


def _shown_sizes(example: Mapping[str, Tensor], dims: NamedDims) -> dict[str, int]:
    return {
        dim: size
        for name, tensor in example.items()
        for dim, size in zip(dims.get(name, ()), tensor.shape, strict=False)
        if isinstance(dim, str)
    }


def _fixed_sizes(example: Mapping[str, Tensor], dims: NamedDims) -> set[int]:
    fixed = set()
    for name, tensor in example.items():
        named = [*dims.get(name, ()), *[None] * tensor.dim()]
        fixed |= {size for dim, size in zip(named, tensor.shape, strict=False) if not isinstance(dim, str)}
    return fixed


def dynamic_shapes(
    dims: NamedDims, names: Sequence[str], axes: Mapping[str, Axis], sizes: Mapping[str, int], *, small: bool
) -> dict[str, dict[int, Any]]:
    """What may vary in every input, for `torch.export`. The relation of a sum to its axes follows by itself.

    Args:
        dims: Names of the dimensions.
        names: The inputs.
        axes: The axes.
        sizes: What they are traced at.
        small: Whether PyTorch shall vouch for sizes smaller than those.
    """
    torch_dims = {
        name: Dim(
            f"{TORCH_NAME}{name}", min=axis.min if small else sizes[name], max=max(axis.max, sizes[name])
        )
        for name, axis in axes.items()
        if axis.is_dynamic
    }
    return {
        name: {
            index: _torch_dim(dim, torch_dims, sizes)
            for index, dim in enumerate(dims.get(name, ()))
            if isinstance(dim, str) and any(part in torch_dims for part in dim.split("+"))
        }
        for name in names
    }


def _torch_dim(dim: str, torch_dims: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    """A sum of one varying axis and numbers; PyTorch has no words for a sum of several."""
    parts = dim.split("+")
    varying = [part for part in parts if part in torch_dims]
    if len(set(varying)) > 1:
        return Dim.DYNAMIC
    fixed = sum(int(part) if part.isdigit() else sizes[part] for part in parts if part not in torch_dims)
    found = torch_dims[varying[0]]
    found = found if len(varying) == 1 else len(varying) * found
    return found + fixed if fixed else found


class AxisNames:
    """Translates PyTorch's symbols to the names of the user's axes."""

    def __init__(self, dims: NamedDims, axes: Mapping[str, Axis], values: Mapping[str, Tensor]) -> None:
        """Learn the symbols from the inputs of a program.

        Args:
            dims: The names that the user gave.
            axes: The axes in their order, which is that of sums which the user did not write.
            values: Every input as PyTorch traced it, with symbols in its shape.
        """
        self._order = list(axes)
        self._names: dict[str, str] = {}
        sums = [dim for each in dims.values() for dim in each if isinstance(dim, str)]
        self._spelled = {tuple(sorted(dim.split("+"))): dim for dim in sums}
        for name, value in values.items():
            for dim, size in zip(dims.get(name, ()), value.shape, strict=False):
                symbol = str(size)
                if isinstance(dim, str) and _SYMBOL.fullmatch(symbol):
                    self._names.setdefault(symbol, dim)

    def dims_of(self, shape: Sequence[int | torch.SymInt]) -> tuple[NamedDim | None, ...]:
        """A shape in names and numbers; None where a size is no sum of them."""
        return tuple(size if isinstance(size, int) else self._sum(str(size)) for size in shape)

    def rename(self, model: ir.Model) -> None:
        """Write the names on every shape of a graph."""
        for value in _values_in(model):
            if value.shape is not None:
                value.shape = ir.Shape([self._onnx_dim(dim) for dim in value.shape])

    def _onnx_dim(self, dim: int | ir.SymbolicDim) -> int | str | None:
        if isinstance(dim, int):
            return dim
        if dim.value is None:
            return None
        name = self._sum(dim.value)
        return self._replaced(dim.value) if name is None else name

    def _sum(self, text: str) -> NamedDim | None:
        """An expression as a sum of axes and numbers, in the order of the axes; None if it is none."""
        count, parts = 0, []
        for term in text.split(" + "):
            times, _, symbol = term.rpartition("*")
            if term.isdigit():
                count += int(term)
            elif symbol in self._names and (not times or times.isdigit()):
                parts += self._names[symbol].split("+") * int(times or 1)
            else:
                return None
        count += sum(int(part) for part in parts if part.isdigit())
        names = sorted((part for part in parts if not part.isdigit()), key=self._order.index)
        if not names:
            return count
        parts = [*names, str(count)] if count else names
        return self._spelled.get(tuple(sorted(parts)), "+".join(parts))

    def _replaced(self, text: str) -> str:
        def named(match: re.Match[str]) -> str:
            name = self._names.get(match[0], match[0])
            return f"({name})" if "+" in name else name

        return _SYMBOL.sub(named, text)


def _values_in(model: ir.Model) -> list[ir.Value]:
    outputs = [value for node in model.graph.all_nodes() for value in node.outputs]
    return [*model.graph.inputs, *outputs]
