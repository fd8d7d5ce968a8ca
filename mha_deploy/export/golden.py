"""Capture golden cases: the FP64 oracle and the module in its own precision, on the same numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from mha_deploy.export.eager import run_module
from mha_deploy.export.golden_plan import PlannedCase
from mha_deploy.export.inputs import Feeds, call_arguments, clear_decisions, fed_to, random_inputs, to_numpy
from mha_deploy.golden import GoldenCase
from mha_deploy.precision import Precision
from mha_deploy.reference import build_module
from mha_deploy.reference.attention import Attention

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
        # The oracle has the rounded weights: rounding them is the user's choice, not an error.
        device = str(next(module.parameters()).device)
        self.oracle = build_module(
            module.spec, weights=module.state_dict(), dtype=torch.float64, device=device
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
            inputs={name: to_numpy(tensor) for name, tensor in feeds.items()},
            oracle={name: to_numpy(tensor) for name, tensor in zip(names, oracle, strict=True)},
            eager={name: to_numpy(tensor) for name, tensor in zip(names, eager, strict=True)},
        )

    def _inputs(self, case: PlannedCase) -> Feeds:
        feeds = random_inputs(self.module.spec, case.sizes, self.seed, label=case.name, ragged=case.ragged)
        margin = _DECISION_MARGIN * self.precision.roundoff
        return clear_decisions(self.oracle, fed_to(self.module, feeds), self.seed, margin=margin)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
