"""Named axes: inputs drawn at their sizes, and the same axes for torch.export."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import onnx_ir as ir
import torch
from torch import Tensor
from torch.export import Dim as TorchDim
from torch.export import ExportedProgram

from mha_deploy.errors import ExportError, SpecError
from mha_deploy.model.deployable import LARGEST_ACTIVATION
from mha_deploy.model.spec import Axes, Dim, Sizes, TensorSpec, axes_in, size_of, sum_of, terms_of
from mha_deploy.reference.inputs import seeded_generator

# -- Inputs at other sizes, drawn after an example that the user gave ------------------------------

NamedDims = Mapping[str, Sequence[str | int | None]]
"""For every input a name for each dimension: an axis, a sum of axes, a number, or None for a fixed one."""
NamedSizes = Sequence[tuple[str, Any]]
"""The name of a dimension, an axis or a sum of axes, and its size as PyTorch traced it."""


def draw_inputs(example: Mapping[str, Tensor], dims: NamedDims, sizes: Sizes, seed: int) -> dict[str, Tensor]:
    """Draw inputs that look like the example; those of different names get different numbers.

    Floats are normal with the example's mean and deviation. Integers, booleans and masks (floats with
    infinities or very large numbers, or of zeros and ones) are sliced from the example, or repeat it: only
    values that were shown appear.
    """
    shapes = {name: shape_of(tensor, dims.get(name, ()), sizes) for name, tensor in example.items()}
    return {name: draw_one(name, tensor, shapes[name], seed) for name, tensor in example.items()}


def draw_one(name: str, example: Tensor, shape: Sequence[int], seed: int) -> Tensor:
    """Draw one input of a given shape; see `draw_inputs`."""
    is_drawn = example.is_floating_point()
    if is_drawn and example.numel():  # no mask
        is_drawn = not example.isinf().any() and float(example.abs().max()) <= LARGEST_ACTIVATION
        is_drawn = is_drawn and not bool(((example == 0) | (example == 1)).all())
    if not is_drawn:
        result = example.detach()
        for dim, (have, want) in enumerate(zip(example.shape, shape, strict=True)):
            if have == 0 != want:
                what = f"The example of input {name} is empty: there is nothing to repeat."
                hint = "an example with at least one element in each dimension"
                raise ExportError(what, got=tuple(example.shape), hint=hint)
            if have != want:
                result = result.index_select(dim, torch.arange(want, device=example.device) % have)
        return result.clone()
    numbers = example.detach().double().cpu()
    mean, deviation = (numbers.mean(), numbers.std(correction=0)) if numbers.numel() else (0.0, 1.0)
    drawn = torch.randn(tuple(shape), generator=seeded_generator(seed, name), dtype=torch.float64)
    return (drawn * deviation + mean).to(example.device, example.dtype)


def shape_of(example: Tensor, dims: Sequence[str | int | None], sizes: Sizes) -> tuple[int, ...]:
    """The shape of an input at other sizes; dimensions without a name stay as they are."""
    named = [*dims, *[None] * (example.dim() - len(dims))]
    full = [size if dim is None else dim for dim, size in zip(named, example.shape, strict=True)]
    return TensorSpec(name="", kind="float", dims=tuple(full)).shape(sizes)


# -- A module that was exported: its graph, and the program that the graph was made from -----------


_ATEN = torch.ops.aten
_MOVES = frozenset({_ATEN.view.default, _ATEN.unsqueeze.default, _ATEN._to_copy.default, _ATEN.clone.default})


@dataclass(frozen=True, kw_only=True)
class ExportedModule:
    """A module as a graph and as a program."""

    model: ir.Model  # the graph, with the user's names of inputs, outputs and dimensions
    program: ExportedProgram  # the program, decomposed to what the graph was made from
    inputs: tuple[str, ...]  # names of the inputs, in the order of the graph
    # The dimensions of every output, in order; None for a size that is no expression of axes and numbers.
    outputs: Mapping[str, tuple[Dim | None, ...]]
    # FX node of every input and output by name, and of other values that could not keep the name of their
    # node; the rest has it.
    nodes: Mapping[str, str]
    unproven: tuple[str, ...] = ()  # axes whose smaller sizes were tried, as PyTorch did not prove them
    fixed: Axes = field(default_factory=dict)  # axes that could not vary, with their one size
    notes: tuple[str, ...] = ()  # what a reader should know, such as why

    def node_of(self, value: str) -> str | None:
        """The FX node that computes a value of the graph; None where there is none."""
        name = self.nodes.get(value, value)
        return name if name in self._computed else None

    @cached_property
    def tables(self) -> dict[str, int]:
        """The rows of the smallest table, by input that does nothing but choose such rows: token ids."""
        placed = {node.name: node for node in self.program.graph.nodes if node.op == "placeholder"}
        found = dict[str, int]()
        for name in self.inputs:
            pending, rows = [placed.get(self.nodes.get(name, name))], list[int]()
            while pending and (node := pending.pop()) is not None:
                for user in node.users:
                    if user.target in _MOVES:
                        pending.append(user)
                    elif user.target is not _ATEN.sym_size.int:  # which is the same for all values
                        is_table = user.target is _ATEN.embedding.default and user.args[1] is node
                        rows.append(int(user.args[0].meta["val"].shape[0]) if is_table else 0)
            if rows and all(rows):
                found[name] = min(rows)
        return found

    @cached_property
    def _computed(self) -> frozenset[str]:
        return frozenset(node.name for node in self.program.graph.nodes if node.op == "call_function")


# -- The user's axes in PyTorch's words, and PyTorch's `s15 + s70` as `P+S` -----------------------

TORCH_NAME = "axis_"
"""How the names of axes begin for PyTorch: it takes a bare S or N for something of SymPy's."""

LEAST_TRACED = 2  # PyTorch takes sizes of 0 and 1 for constants
_EASY = 5  # half of it, or one less, is not 1 either
_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31)  # seldom a number of heads, and never a multiple of one
_SYMBOL = re.compile(r"\b[su]\d+\b")
_SQUARE = re.compile(r"(\b\w+)\*\*2\b")


def trace_sizes(example: Mapping[str, Tensor], dims: NamedDims, axes: Axes) -> dict[str, int]:
    """A size for every axis to trace with, at least 2 and different for each where it varies.

    Equal sizes could be taken for one. The example's own sizes are known to work, so they come first. A
    narrow range may be left: tracing computes no numbers.
    """
    shown = dict(named_sizes(example, dims))
    sizes = {name: axis.min for name, axis in axes.items() if not axis.is_dynamic}
    taken = set(sizes.values())
    for key, tensor in example.items():
        named = [*dims.get(key, ()), *[None] * tensor.dim()]
        taken |= {size for dim, size in zip(named, tensor.shape, strict=False) if not isinstance(dim, str)}
    for name, axis in sorted(axes.items(), key=lambda item: item[1].max):
        if axis.is_dynamic:
            least = max(axis.min, LEAST_TRACED)
            liked = [size for size in (shown.get(name, 0), *_PRIMES) if size >= _EASY]
            every = [*liked, *range(_EASY, _EASY + 64), *range(least, least + 64)]
            size = next((s for s in every if least <= s <= axis.max and s not in taken), least)
            while size in taken:  # a fixed size may be anything, another axis never the same
                size += 1
            sizes[name] = size
            taken.add(size)
    return {name: sizes[name] for name in axes}


def clamp_to(axes: Axes, sizes: Sizes) -> dict[str, int]:
    """The sizes, moved into the ranges of their axes."""
    return {name: min(max(sizes[name], axis.min), axis.max) for name, axis in axes.items()}


def named_sizes(tensors: Mapping[str, Tensor], dims: NamedDims) -> NamedSizes:
    """Every dimension of some tensors that has a name, and its size."""
    pairs = [pair for name in tensors for pair in zip(dims.get(name, ()), tensors[name].shape, strict=False)]
    return [(dim, size) for dim, size in pairs if isinstance(dim, str)]


Kind = Literal["ranges", "from traced", "automatic"]
"""What PyTorch is to prove: whole ranges, ranges from the traced sizes on, or what it finds by itself."""


def dynamic_shapes(
    dims: NamedDims, names: Sequence[str], axes: Axes, sizes: Sizes, *, kind: Kind
) -> dict[str, dict[int, Any]]:
    """What may vary in every input, for `torch.export`; how a sum follows from its axes shows by itself."""
    least = {name: axis.min if kind == "ranges" else sizes[name] for name, axis in axes.items()}
    most = {name: max(axis.max, sizes[name], least[name] + 1) for name, axis in axes.items()}  # not one size
    torch_dims = {
        name: TorchDim(f"{TORCH_NAME}{name}", min=least[name], max=most[name])
        for name, axis in axes.items()
        if axis.is_dynamic
    }
    return {
        name: {
            index: TorchDim.AUTO if kind == "automatic" else _torch_dim(dim, torch_dims, sizes)
            for index, dim in enumerate(dims.get(name, ()))
            if isinstance(dim, str) and any(part in torch_dims for part in terms_of(dim))
        }
        for name in names
    }


def _torch_dim(dim: str, torch_dims: Mapping[str, Any], sizes: Sizes) -> Any:
    """A sum of one varying axis and numbers; PyTorch has no words for a sum of several."""
    parts = terms_of(dim)
    varying = [part for part in parts if part in torch_dims]
    if len(set(varying)) > 1:
        return TorchDim.DYNAMIC
    fixed = sum(int(part) if part.isdecimal() else sizes[part] for part in parts if part not in torch_dims)
    found = torch_dims[varying[0]]
    found = found if len(varying) == 1 else len(varying) * found
    return found + fixed if fixed else found


def _same_multiple(dim: str, size: object) -> Iterator[tuple[str, str]]:
    """The one symbol in a traced size and the axis that it stands for, where `2*s5` is the size of `2*h`."""
    symbols, axes = set(_SYMBOL.findall(str(size))), axes_in(dim)
    if len(symbols) == len(axes) == 1:
        (symbol,), (axis,) = symbols, axes
        with suppress(SpecError):
            if all(size_of(str(size), {symbol: n}) == size_of(dim, {axis: n}) for n in _PRIMES):
                yield symbol, axis


class AxisNames:
    """Translates PyTorch's symbols to the names of the user's axes."""

    def __init__(self, dims: NamedDims, axes: Axes, fed: NamedSizes) -> None:
        """Learn the symbols from the inputs as PyTorch traced them; sums have the order of the axes."""
        self._order = list(axes)
        # The first dimension of a symbol names it; where none is the symbol alone, one such as `2*s5`.
        multiples = [(symbol, axis) for pair in fed for symbol, axis in _same_multiple(*pair)]
        self._names = dict(reversed(multiples))
        self._names |= {str(size): dim for dim, size in reversed(fed) if _SYMBOL.fullmatch(str(size))}
        sums = [dim for each in dims.values() for dim in each if isinstance(dim, str)]
        self._spelled = {tuple(sorted(terms_of(dim))): dim for dim in sums}

    def dims_of(self, shape: Sequence[int | torch.SymInt]) -> tuple[Dim | None, ...]:
        """A shape in names and numbers; None where a size is no expression of them."""
        return tuple(size if isinstance(size, int) else self._dim(str(size)) for size in shape)

    def rename(self, model: ir.Model) -> None:
        """Write the names on every shape of a graph."""
        outputs = [value for node in model.graph.all_nodes() for value in node.outputs]
        for value in (*model.graph.inputs, *outputs):
            if value.shape is not None:
                value.shape = ir.Shape([self._onnx_dim(dim) for dim in value.shape])

    def _dim(self, text: str) -> Dim | None:
        if (found := self._sum(text)) is not None:
            return found
        found = _SQUARE.sub(r"\1*\1", self._replaced(text))
        try:
            size_of(found, dict.fromkeys(self._order, 64))
        except (KeyError, SpecError):
            return None
        return found

    def _onnx_dim(self, dim: int | ir.SymbolicDim) -> int | str | None:
        if isinstance(dim, int) or dim.value is None:
            return dim if isinstance(dim, int) else None
        name = self._sum(dim.value)
        return self._replaced(dim.value) if name is None else name

    def _sum(self, text: str) -> Dim | None:
        """An expression as a sum of axes and numbers, in the order of the axes; None if it is none."""
        count, parts = 0, []
        for term in text.split(" + "):
            times, _, symbol = term.rpartition("*")
            if term.isdecimal():
                count += int(term)
            elif symbol in self._names and (not times or times.isdecimal()):
                parts += terms_of(self._names[symbol]) * int(times or 1)
            else:
                return None
        count += sum(int(part) for part in parts if part.isdecimal())
        names = sorted((part for part in parts if not part.isdecimal()), key=self._order.index)
        if not names:
            return count
        parts = [*names, str(count)] if count else names
        return self._spelled.get(tuple(sorted(parts)), sum_of(parts))

    def _replaced(self, text: str) -> str:
        def named(match: re.Match[str]) -> str:
            name = self._names.get(match[0], match[0])
            return name if name.isidentifier() else f"({name})"

        return _SYMBOL.sub(named, text)
