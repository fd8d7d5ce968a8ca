"""Weights of a layer: random ones, and those of a file."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mha_deploy.errors import DeployError
from mha_deploy.model.spec import AttentionSpec

# -- Weights for the reference modules: drawn from a seed, or converted between the two project ----

# Standard deviation of the scores under random weights. Trained layers attend sharply; with scores much
# smaller than this the softmax is flat, and a wrong scale or mask hardly shows in the output.
SCORE_STD = 2.0
_BIAS_STD = 0.1

StateDict = Mapping[str, Tensor]


def random_state(spec: AttentionSpec, shapes: Mapping[str, torch.Size], seed: int) -> dict[str, Tensor]:
    """Draw every parameter of a layer in float32, in the separate form of the projections.

    Each parameter has its own generator, so that adding one does not change the others.
    """
    state = {}
    for index, (name, shape) in enumerate(sorted(shapes.items())):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        state[name] = torch.randn(shape, generator=generator) * _std(spec, name, shape)
    return state


def _std(spec: AttentionSpec, name: str, shape: torch.Size) -> float:
    if name.endswith("bias"):
        return _BIAS_STD
    std = 1.0 / math.sqrt(shape[-1])
    if name in ("q.weight", "k.weight"):
        std *= math.sqrt(SCORE_STD / (spec.softmax_scale * math.sqrt(spec.D)))
    return std


def pack_projections(state: StateDict) -> dict[str, Tensor]:
    """Stack q, k and v into one `qkv` matrix; what is packed already stays."""
    packed = dict(state)
    for suffix in ("weight", "bias"):
        parts = [f"{name}.{suffix}" for name in ("q", "k", "v")]
        if all(part in packed for part in parts):
            packed[f"qkv.{suffix}"] = torch.cat([packed.pop(part) for part in parts])
    return packed


def unpack_projections(state: StateDict, spec: AttentionSpec) -> dict[str, Tensor]:
    """Split a `qkv` matrix into q, k and v; what is separate already stays."""
    rows = [spec.Hq * spec.D, spec.Hkv * spec.D, spec.Hkv * spec.D]
    separate = {name: tensor for name, tensor in state.items() if not name.startswith("qkv.")}
    for suffix in ("weight", "bias"):
        stacked = state.get(f"qkv.{suffix}")
        if stacked is not None:
            parts = stacked.split(rows)
            separate.update({f"{name}.{suffix}": part for name, part in zip("qkv", parts, strict=True)})
    return separate


def in_form_of(spec: AttentionSpec, state: StateDict) -> dict[str, Tensor]:
    """The state in the projection form that the spec asks for."""
    return pack_projections(state) if spec.projections == "packed" else unpack_projections(state, spec)


# -- Weights from a safetensors file, or from a state dict that `torch.save` wrote -----------------

_PICKLED = (".pt", ".pth", ".bin")


def read_weights(path: Path) -> StateDict:
    """Read a safetensors file; names and shapes are checked where the weights meet their module."""
    state = _read_safetensors(path)
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            raise DeployError("A weight is not floating point.", got=f"{name}: {tensor.dtype}")
    return state


def read_state(path: Path) -> StateDict:
    """Read the whole state of a module, buffers included: by its ending, what `torch.save` wrote."""
    return _read_pickled(path) if path.suffix in _PICKLED else _read_safetensors(path)


def _read_safetensors(path: Path) -> StateDict:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise DeployError("There is no such weight file.", got=path) from error
    except (SafetensorError, OSError) as error:
        raise DeployError("The weights are not a safetensors file.", got=f"{path}: {error}") from error


def _read_pickled(path: Path) -> StateDict:
    """A state dict; nothing but tensors is unpickled."""
    hint = "torch.save(module.state_dict(), FILE)"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise DeployError("There is no such weight file.", got=path) from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DeployError("The file is no state dict.", got=f"{path}: {reason}", hint=hint) from error
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in state.items()
    ):
        raise DeployError("The file is no state dict.", got=path, hint=hint)
    return state
