"""Weights from a safetensors file."""

from __future__ import annotations

from pathlib import Path

from mha_deploy.errors import DeployError
from mha_deploy.reference.weights import StateDict


def read_weights(path: Path) -> StateDict:
    """Read a safetensors file; names and shapes are checked where the weights meet their module."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = load_file(path)
    except FileNotFoundError as error:
        raise DeployError("There is no such weight file.", got=path) from error
    except (SafetensorError, OSError) as error:
        raise DeployError("The weights are not a safetensors file.", got=f"{path}: {error}") from error
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            raise DeployError("A weight is not floating point.", got=f"{name}: {tensor.dtype}")
    return state
