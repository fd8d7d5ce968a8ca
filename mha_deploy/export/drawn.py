"""Inputs at other sizes, drawn after an example that the user gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mha_deploy.errors import ExportError
from mha_deploy.export.inputs import seeded_generator
from mha_deploy.module_spec import LARGEST_ACTIVATION
from mha_deploy.spec_parts import TensorSpec

NamedDims = Mapping[str, Sequence[str | int | None]]
"""For every input a name for each dimension: an axis, a sum of axes, a number, or None for a fixed one."""


def draw_inputs(
    example: Mapping[str, Tensor], dims: NamedDims, sizes: Mapping[str, int], seed: int
) -> dict[str, Tensor]:
    """Draw inputs that look like the example.

    Floats are normal with the example's mean and deviation. Integers, booleans and masks (floats with
    infinities or very large numbers) are cut from the example, or repeat it: only values that were shown
    appear.

    Args:
        example: A tensor for every input.
        dims: Names of its dimensions.
        sizes: A size for every axis that they name.
        seed: Seed of the draw; inputs of different names get different numbers.

    Raises:
        ExportError: An axis has no size, or there is nothing to repeat.
    """
    return {
        name: draw_one(name, tensor, shape_of(name, tensor, dims.get(name, ()), sizes), seed)
        for name, tensor in example.items()
    }


def draw_one(name: str, example: Tensor, shape: Sequence[int], seed: int) -> Tensor:
    """Draw one input of a given shape; see `draw_inputs`."""
    if example.is_floating_point() and not _is_mask(example):
        return _normal(example, shape, seeded_generator(seed, name))
    return _repeated(name, example, shape)


def shape_of(
    name: str, example: Tensor, dims: Sequence[str | int | None], sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """The shape of an input at other sizes; dimensions without a name stay as they are."""
    if len(dims) > example.dim():
        raise ExportError(
            f"Input {name} has more names than dimensions.", got=f"{tuple(dims)} for {tuple(example.shape)}"
        )
    named = [*dims, *[None] * (example.dim() - len(dims))]
    full = [size if dim is None else dim for dim, size in zip(named, example.shape, strict=True)]
    try:
        return TensorSpec(name=name, kind="float", dims=tuple(full)).shape(sizes)
    except KeyError as error:
        raise ExportError(f"Input {name} names an axis that has no size.", got=error.args[0]) from error


def _is_mask(example: Tensor) -> bool:
    if example.numel() == 0:
        return False
    return bool(example.isinf().any()) or float(example.abs().max()) > LARGEST_ACTIVATION


def _normal(example: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Normal numbers like the example's; standard ones where it has none."""
    numbers = example.detach().double().cpu()
    mean, deviation = (0.0, 1.0) if not numbers.numel() else (numbers.mean(), numbers.std(correction=0))
    drawn = torch.randn(tuple(shape), generator=generator, dtype=torch.float64) * deviation + mean
    return drawn.to(example.device, example.dtype)


def _repeated(name: str, example: Tensor, shape: Sequence[int]) -> Tensor:
    """The example cut or repeated along each dimension."""
    result = example.detach()
    for dim, (have, want) in enumerate(zip(example.shape, shape, strict=True)):
        if have == want:
            continue
        if have == 0:
            raise ExportError(
                f"The example of input {name} is empty: there is nothing to repeat.",
                got=tuple(example.shape),
                hint="an example with at least one element in each dimension",
            )
        result = result.index_select(dim, torch.arange(want, device=example.device) % have)
    return result.clone()
