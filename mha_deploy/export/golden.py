"""Capture the golden cases of a layer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from mha_deploy.bundle.cases import GoldenCase, cached_outputs
from mha_deploy.export.eager import run_module
from mha_deploy.export.explain import overflow_error
from mha_deploy.export.options import PlannedCase
from mha_deploy.model.precision import Precision
from mha_deploy.reference import build_module
from mha_deploy.reference.attention import Attention
from mha_deploy.reference.inputs import (
    Feeds,
    call_arguments,
    clear_decisions,
    fed_to,
    random_inputs,
    to_numpy,
)

# In units of the precision's roundoff: a gate is a sum of E matmuls of size one over √E, and engines that
# accumulate in half precision lose several bits of it.
_DECISION_MARGIN = 16.0


class GoldenCapture:
    """Runs planned cases through a module and through its FP64 twin.

    Args:
        module: The layer with its weights rounded to the target precision.
        precision: That precision.
        seed: Seed of the inputs.
        oracle: The FP64 twin, where there is one already.
        run_oracle: Runs the twin; another than `run_module` where memory is short.
    """

    def __init__(
        self,
        module: Attention,
        precision: Precision,
        seed: int,
        *,
        oracle: Attention | None = None,
        run_oracle: Callable[[Attention, dict[str, Tensor]], tuple[Tensor, ...]] = run_module,
    ) -> None:
        self.module = module
        self.precision = precision
        self.seed = seed
        self.oracle = oracle or fp64_twin(module)
        self._run_oracle = run_oracle

    def capture(self, case: PlannedCase) -> GoldenCase:
        """Run one case."""
        spec, feeds = self.module.spec, self._inputs(case)
        exact = {name: _widen(tensor) for name, tensor in feeds.items()}
        eager = run_module(self.module, call_arguments(spec, feeds))
        oracle = self._run_oracle(self.oracle, call_arguments(spec, exact))
        names = [tensor.name for tensor in spec.outputs]
        return GoldenCase(
            name=case.name,
            sizes=case.sizes,
            inputs={name: to_numpy(tensor) for name, tensor in feeds.items()},
            oracle={name: to_numpy(tensor) for name, tensor in zip(names, oracle, strict=True)},
            eager={name: to_numpy(tensor) for name, tensor in zip(names, eager, strict=True)},
            cached=cached_outputs(spec),
        )

    def _inputs(self, case: PlannedCase) -> Feeds:
        feeds = random_inputs(
            self.module.spec, case.sizes, self.seed, label=case.name, ragged=case.ragged, past=case.past
        )
        margin = _DECISION_MARGIN * self.precision.roundoff
        return clear_decisions(self.oracle, fed_to(self.module, feeds), self.seed, margin=margin)


def fp64_twin(module: Attention) -> Attention:
    """The oracle of a layer. It has the rounded weights: rounding them is the user's choice, not an error."""
    device = str(next(module.parameters()).device)
    return build_module(module.spec, weights=module.state_dict(), dtype=torch.float64, device=device)


def refuse_overflow(
    case: GoldenCase,
    precision: Precision,
    module: nn.Module,
    *,
    run: Callable[[], object] | None = None,
    hint: str = "--precision bf16 or fp32",
) -> None:
    """Refuse a case on which the module itself overflows: its budget would be infinite.

    Args:
        case: The case.
        precision: The precision of the module.
        module: The module; its weights may be at fault.
        run: Runs the module on the case again, to find the call that overflows.
        hint: What helps against an overflow.
    """
    for name in case.eager:
        # Some kernels of PyTorch give zeros where a weight is NaN; the oracle shows it.
        results = (case.eager[name], case.oracle[name])
        if not all(np.isfinite(array.astype(np.float64)).all() for array in results):
            where = f"output {name} of golden case {case.name}"
            raise overflow_error(where, precision.name, module=module, run=run, hint=hint)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
