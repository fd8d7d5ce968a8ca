"""Golden cases of a user's module: the module as it is, and its exported program in FP64."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mha_deploy.errors import ExportError, place_of_error
from mha_deploy.export.eager import Float32Accumulation, tensors_in
from mha_deploy.export.golden import refuse_overflow
from mha_deploy.export.inputs import tensor_from_numpy, to_numpy
from mha_deploy.export.overflow import constant_error
from mha_deploy.export.program import ExportedModule
from mha_deploy.export.user_module import UserModule, drawn_inputs
from mha_deploy.export.widened import run_program
from mha_deploy.golden import GoldenCase
from mha_deploy.precision import smallest_normal

# Rounding alone does not come near: the program would have to be another than the module.
_SAME_PROGRAM = 0.25


def _attention_flops(query: list[int], key: list[int], value: list[int], *_: object, **__: object) -> int:
    """The work of fused attention, from the shapes of its inputs: two products of each query and key."""
    B, Hq, S, D = query
    return 2 * B * Hq * S * key[2] * (D + value[3])


# PyTorch itself counts it for its GPU kernels only.
_ON_CPU = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}


@dataclass(frozen=True, kw_only=True)
class Insight:
    """Values from inside a module: what is true of them, and what its own precision makes of them."""

    oracle: Mapping[str, np.ndarray]
    eager: Mapping[str, np.ndarray]


class ModuleCapture:
    """Runs a user's module and its program on the same numbers.

    Args:
        user: The module.
        exported: Its program.
        seed: Seed of the inputs.
    """

    def __init__(self, user: UserModule, exported: ExportedModule, seed: int) -> None:
        self.user, self.exported, self.seed = user, exported, seed

    def capture(self, name: str, sizes: Mapping[str, int]) -> GoldenCase:
        """Run one case.

        Raises:
            ExportError: The module overflows, fails at these sizes, or is not what was exported.
        """
        inputs = self.inputs(name, sizes)
        eager, flops = self._eager(inputs, name)
        oracle, _ = run_program(self.exported, inputs)
        case = GoldenCase(
            name=name,
            sizes=dict(sizes),
            inputs={key: to_numpy(tensor) for key, tensor in inputs.items()},
            oracle={key: _as_float64(to_numpy(tensor)) for key, tensor in oracle.items()},
            eager={key: to_numpy(tensor) for key, tensor in eager.items()},
            flops=flops,
        )
        refuse_overflow(
            case,
            self.user.precision,
            self.user.module,
            run=lambda: self.user.module(**inputs),
            hint="--precision auto, bf16 or fp32",
        )
        _refuse_another_program(case)
        return case

    def look_inside(self, case: GoldenCase, values: Collection[str]) -> Insight:
        """Values of the graph in a case that was captured, by their names."""
        # Not drawn again: a user's draw may give other numbers the second time.
        given = {key: tensor_from_numpy(array) for key, array in case.inputs.items()}
        inputs = self.user.rounded(given)
        _, oracle = run_program(self.exported, inputs, keep=values)
        _, eager = run_program(self.exported, inputs, dtype="own", keep=values)
        return Insight(
            oracle={key: _as_float64(to_numpy(tensor)) for key, tensor in oracle.items()},
            eager={key: to_numpy(tensor) for key, tensor in eager.items()},
        )

    def inputs(self, name: str, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """The inputs of a case: drawn by the user's own function, or after the example."""
        return drawn_inputs(self.user, name, sizes, self.seed)

    def _eager(self, inputs: Mapping[str, Tensor], name: str) -> tuple[dict[str, Tensor], int]:
        """The module as the user runs it, and its work."""
        counter = FlopCounterMode(display=False, custom_mapping=_ON_CPU)
        try:
            with torch.inference_mode(), Float32Accumulation(), counter:
                tensors = tensors_in(self.user.module(**inputs))
        except (Exception, SystemExit) as error:  # whatever the user's code raises, sys.exit() included
            constant = constant_error(error, self.user.module, lambda: self.user.module(**inputs))
            if constant is not None:
                raise constant from error
            raise ExportError(
                f"The module fails at the sizes of golden case {name}.",
                got=f"{place_of_error(error)}: {type(error).__name__}: {error}",
                hint="axes that it takes, or a draw= for its inputs",
            ) from error
        return dict(zip(self.exported.outputs, tensors, strict=True)), counter.get_total_flops()


def _as_float64(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def relative_error(got: np.ndarray, oracle: np.ndarray) -> float:
    """The size of the error over that of the oracle, which counts at least as the smallest normal numbers.

    Numbers below those lose their digits, whatever program computes them.
    """
    smallest = 1e-30 if got.dtype.kind in "iub" else smallest_normal(got.dtype)
    error = float(np.linalg.norm(got.astype(np.float64) - oracle))
    return error / max(float(np.linalg.norm(oracle)), smallest * math.sqrt(max(got.size, 1)))


def _refuse_another_program(case: GoldenCase) -> None:
    """Tracing may have settled a choice for the example's sizes or values, and the program then differs."""
    for name, oracle in case.oracle.items():
        eager = case.eager[name]
        if eager.shape != oracle.shape:
            far = f"shape {oracle.shape}, not {eager.shape}"
        else:
            off = relative_error(eager, oracle)
            if off <= _SAME_PROGRAM:
                continue
            far = f"off by {off:.2g} of its size"
        raise ExportError(
            "The exported program does not compute what the module does.",
            got=f"output {name} of golden case {case.name}: {far}",
            hint="a module whose way does not depend on sizes or values",
        )
