"""PyTorch's answers to the mask cases: a column of the conformance table.

The table lies on the other side of the house, so its records are known here by their shape only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from mha_deploy.errors import BackendUnavailable, DeployError, nearest
from mha_deploy.reference.core import Heads, attend

_NAMES = {"plain": "eager", "sdpa": "sdpa"}


class CaseFacts(Protocol):
    """What has to be known of a case."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def Hq(self) -> int:
        """Query heads."""

    @property
    def Hkv(self) -> int:
        """Key/value heads."""

    @property
    def scale(self) -> float:
        """Factor on the scores."""

    @property
    def is_causal(self) -> bool:
        """Whether a query sees only keys up to its own position."""


class TrialFacts(Protocol):
    """A case, and its inputs `q`, `k`, `v` and perhaps `mask`."""

    @property
    def case(self) -> CaseFacts:
        """The case."""

    @property
    def arrays(self) -> Mapping[str, np.ndarray]:
        """The inputs."""


@dataclass(frozen=True, kw_only=True)
class TorchColumn:
    """PyTorch as a column of the table."""

    name: str
    run: Callable[[Sequence[TrialFacts]], Mapping[str, np.ndarray | DeployError]]


def torch_column(path: str, device: str = "cpu") -> TorchColumn:
    """One path of `reference.core.attend`, on one device.

    Args:
        path: `plain` for matmul, softmax, matmul; `sdpa` for PyTorch's own kernel.
        device: `cpu`, or `cuda` where there is one.
    """
    if path not in _NAMES:
        raise DeployError("No such way to compute attention.", got=path, hint=nearest(path, _NAMES))

    def run(trials: Sequence[TrialFacts]) -> Mapping[str, np.ndarray | DeployError]:
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise BackendUnavailable("PyTorch finds no CUDA GPU here.")
        return {trial.case.name: _answer(trial, path, device) for trial in trials}

    return TorchColumn(name=_NAMES[path] if device == "cpu" else f"{_NAMES[path]} {device}", run=run)


def _answer(trial: TrialFacts, path: str, device: str) -> np.ndarray | DeployError:
    case = trial.case
    tensors = {role: _to_torch(array).to(device) for role, array in trial.arrays.items()}
    heads = Heads(Hq=case.Hq, Hkv=case.Hkv, scale=case.scale, causal=case.is_causal)
    try:
        with torch.inference_mode():
            y, _ = attend(tensors["q"], tensors["k"], tensors["v"], tensors.get("mask"), heads, path)
    except (RuntimeError, NotImplementedError) as error:
        return DeployError("PyTorch refuses the case.", got=str(error).splitlines()[0])
    return _to_numpy(y)


def _to_torch(array: np.ndarray) -> Tensor:
    if array.dtype == ml_dtypes.bfloat16:  # NumPy has no such type of its own
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _to_numpy(tensor: Tensor) -> np.ndarray:
    tensor = tensor.cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
