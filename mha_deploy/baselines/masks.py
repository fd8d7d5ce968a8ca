"""PyTorch's answers to the mask cases: a column of the table of masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mha_deploy.baselines.fresh import check_device
from mha_deploy.errors import DeployError, nearest
from mha_deploy.reference.attention import Heads, attend
from mha_deploy.reference.inputs import tensor_from_numpy, to_numpy
from mha_deploy.validate.conformance import Answer, Column, RunColumn, Trial

_NAMES = {"plain": "eager", "sdpa": "sdpa"}


def torch_column(path: str, device: str = "cpu") -> Column:
    """One path of `reference.core.attend`, on one device.

    Args:
        path: `plain` for matmul, softmax, matmul; `sdpa` for PyTorch's own kernel.
        device: `cpu`, or `cuda` where there is one.

    Raises:
        DeployError: There is no such path.
    """
    if path not in _NAMES:
        raise DeployError("No such way to compute attention.", got=path, hint=nearest(path, _NAMES))

    def run(trials: Sequence[Trial]) -> Mapping[str, Answer]:
        check_device(device)
        return {trial.case.name: _answer(trial, path, device) for trial in trials}

    name = _NAMES[path]
    return RunColumn(name=name if device == "cpu" else f"{name} {device}", run=run)


def _answer(trial: Trial, path: str, device: str) -> Answer:
    case = trial.case
    tensors = {role: tensor_from_numpy(array).to(device) for role, array in trial.arrays.items()}
    heads = Heads(Hq=case.Hq, Hkv=case.Hkv, scale=case.scale, causal=case.is_causal)
    try:
        with torch.inference_mode():
            y, _ = attend(tensors["q"], tensors["k"], tensors["v"], tensors.get("mask"), heads, path)
    except (RuntimeError, NotImplementedError) as error:
        return DeployError("PyTorch refuses the case.", got=str(error).splitlines()[0])
    return to_numpy(y)
