"""Weights from a safetensors file, or from a state dict that `torch.save` wrote."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from mha_deploy.errors import DeployError
from mha_deploy.reference.weights import StateDict

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
