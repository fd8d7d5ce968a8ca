"""Capture golden cases: the FP64 oracle and the module in its own precision, on the same numbers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mha_deploy.export.eager import run_module
from mha_deploy.export.golden_plan import PlannedCase
from mha_deploy.export.inputs import Feeds, call_arguments, clear_decisions, random_inputs
from mha_deploy.golden import GoldenCase
from mha_deploy.precision import Precision
from mha_deploy.reference import build_module
from mha_deploy.reference.attention import Attention
from mha_deploy.spec import FLOAT

# In units of the precision's roundoff: a gate is a sum of E products of size one over √E, and engines that
# accumulate in half precision lose several bits of it.
_DECISION_MARGIN = 16.0


class GoldenCapture:
    """Runs planned cases through a module and through its FP64 twin.

    Args:
        module: The layer with its weights rounded to the target precision.
        precision: That precision.
        seed: Seed of the inputs.
    """

    def __init__(self, module: Attention, precision: Precision, seed: int) -> None:
        self.module = module
        self.precision = precision
        self.seed = seed
        self.device = next(module.parameters()).device
        # The oracle has the rounded weights: rounding them is the user's choice, not an error.
        self.oracle = build_module(
            module.spec, weights=module.state_dict(), dtype=torch.float64, device=str(self.device)
        )

    def capture(self, case: PlannedCase) -> GoldenCase:
        """Run one case."""
        spec, feeds = self.module.spec, self._inputs(case)
        exact = {name: _widen(tensor) for name, tensor in feeds.items()}
        eager = run_module(self.module, call_arguments(spec, feeds))
        oracle = run_module(self.oracle, call_arguments(spec, exact))
        names = [tensor.name for tensor in spec.outputs]
        return GoldenCase(
            name=case.name,
            sizes=case.sizes,
            inputs={name: self._to_numpy(tensor) for name, tensor in feeds.items()},
            oracle={name: tensor.cpu().numpy() for name, tensor in zip(names, oracle, strict=True)},
            eager={name: self._to_numpy(tensor) for name, tensor in zip(names, eager, strict=True)},
        )

    def _inputs(self, case: PlannedCase) -> Feeds:
        spec = self.module.spec
        feeds = random_inputs(spec, case.sizes, self.seed, label=case.name, ragged=case.ragged)
        kinds = {tensor.name: tensor.kind for tensor in spec.inputs}
        dtype = next(self.module.parameters()).dtype
        feeds = {
            name: tensor.to(self.device, dtype if kinds[name] == FLOAT else tensor.dtype)
            for name, tensor in feeds.items()
        }
        margin = _DECISION_MARGIN * self.precision.roundoff
        return clear_decisions(self.oracle, feeds, self.seed, margin=margin)

    def _to_numpy(self, tensor: Tensor) -> np.ndarray:
        tensor = tensor.cpu()
        if tensor.dtype == torch.bfloat16:  # NumPy has no such type of its own
            return tensor.view(torch.uint16).numpy().view(self.precision.numpy)
        return tensor.numpy()


def _widen(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
