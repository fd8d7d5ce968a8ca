"""Inputs of a catalog layer: drawn, and as tensors or arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from mha_deploy.errors import ExportError
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.model.spec import TensorSpec
from mha_deploy.reference.attention import Attention, alibi_bias
from mha_deploy.reference.variants import SparseHeadAttention

Feeds = dict[str, Tensor]

_REDRAWS = 64


def random_inputs(
    spec: AttentionSpec,
    sizes: Mapping[str, int],
    seed: int,
    *,
    label: str = "",
    ragged: bool = False,
    past: int | None = None,
) -> Feeds:
    """Draw one set of inputs in float32: normal activations and caches, ALiBi biases, and lengths.

    Labels make draws of one seed differ. Ragged lengths go down to 1 and 0; others are at least half. `past`
    is how many entries of a preallocated cache are valid in every batch element; default: drawn.
    """
    generator, B = seeded_generator(seed, label), sizes["B"]

    def draw(tensor: TensorSpec) -> Tensor:
        shape = tensor.shape(sizes)
        if tensor.name == "lengths" and past is not None:
            return torch.full((B,), past, dtype=torch.int32)
        if tensor.name == "lengths":
            return draw_lengths(B, sizes["T"] - sizes["S"], generator, ragged)
        if tensor.name == "key_lengths":
            return draw_lengths(B, sizes[spec.key_axis], generator, ragged)
        if tensor.name == "attention_bias":
            return alibi_bias(spec.Hq, shape[-2], shape[-1]).float()
        return torch.randn(shape, generator=generator)

    return {tensor.name: draw(tensor) for tensor in spec.inputs}


def fed_to(module: Attention, feeds: Mapping[str, Tensor]) -> Feeds:
    """The inputs on the module's device, floating-point ones rounded to its precision."""
    parameter = next(module.parameters())
    return rounded(feeds, parameter.device, parameter.dtype)


def rounded(feeds: Mapping[str, Tensor], device: torch.device | str, dtype: torch.dtype) -> Feeds:
    """Tensors on a device, floating-point ones rounded to a type."""
    types = {name: dtype if tensor.is_floating_point() else tensor.dtype for name, tensor in feeds.items()}
    return {name: tensor.to(device, types[name]) for name, tensor in feeds.items()}


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The same numbers as a NumPy array."""
    tensor = tensor.cpu()
    if tensor.dtype == torch.bfloat16:  # NumPy has no such type of its own
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def tensor_from_numpy(array: np.ndarray) -> Tensor:
    """The same numbers as a tensor of its own memory; the inverse is `to_numpy`."""
    if array.dtype.name == "bfloat16":  # PyTorch does not know the type under NumPy's roof
        return torch.tensor(array.view(np.uint16)).view(torch.bfloat16)
    return torch.tensor(array)


def call_arguments(spec: AttentionSpec, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs under the parameter names of `Attention.forward`."""
    return {parameter_name(tensor): feeds[tensor.name] for tensor in spec.inputs}


def parameter_name(tensor: TensorSpec) -> str:
    """The parameter of `Attention.forward` that takes this input."""
    return "query" if tensor.name == "x" else tensor.name


def clear_decisions(module: Attention, feeds: Feeds, seed: int, *, margin: float) -> Feeds:
    """Redraw the tokens at which the layer's discrete choice hangs on rounding.

    A sparse-head layer picks heads by comparing gates. Where two gates differ by less than the rounding
    of the precision under test, two correct implementations may pick different heads; such tokens say
    nothing about either.
    """
    if not isinstance(module, SparseHeadAttention):
        return feeds
    name = module.spec.inputs[0].name
    query = feeds[name].clone()
    generator = seeded_generator(seed, "clear decisions")
    for _ in range(_REDRAWS):
        unclear = module.decision_margin(query) < margin
        if not unclear.any():
            break
        fresh = torch.randn(query.shape, generator=generator).to(query)
        query = torch.where(unclear[..., None], fresh, query)
    else:
        what = f"The gate of {module.spec.name} leaves no clear choice of heads."
        got = f"tokens whose gates differ by less than {margin:.2g}, after {_REDRAWS} draws"
        raise ExportError(what, got=got, hint="a higher precision, or weights with a gate that decides")
    return {**feeds, name: query}


def seeded_generator(seed: int, label: str) -> torch.Generator:
    """Random numbers that hang on the seed and the label alone."""
    digest = hashlib.sha256(f"{seed}/{label}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))


def draw_lengths(B: int, T: int, generator: torch.Generator, ragged: bool) -> Tensor:
    """How many of T entries are valid in each batch element."""
    if not ragged:
        lengths = torch.randint((T + 1) // 2, T + 1, (B,), generator=generator)
        lengths[0] = T if B > 1 else lengths[0]
        return lengths.to(torch.int32)
    # One with no key at all, one with a single key, one full, the rest anything.
    lengths = torch.randint(0, T + 1, (B,), generator=generator)
    corners = torch.tensor([0, 1, T, T // 2])[:B] if B > 1 else torch.tensor([T // 2])
    lengths[: len(corners)] = corners.clamp(max=T)  # where T is 0, there is no single key
    return lengths.to(torch.int32)
