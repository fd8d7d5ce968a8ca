"""The precisions a graph can be exported in, by the names people use."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from mha_deploy.errors import DeployError, nearest


@dataclass(frozen=True, kw_only=True)
class Precision:
    """One floating-point format.

    Args:
        name: `fp16`, `bf16` or `fp32`.
        numpy: Its NumPy type.
        torch_name: Its name in PyTorch, for `getattr(torch, ...)`.
        significand_bits: Bits of the significand, the hidden one included.
    """

    name: str
    numpy: np.dtype
    torch_name: str
    significand_bits: int

    @property
    def roundoff(self) -> float:
        """The largest relative error of rounding one number."""
        return 2.0**-self.significand_bits

    @property
    def bytes(self) -> int:
        """Size of one number."""
        return self.numpy.itemsize


PRECISIONS = {
    "fp16": Precision(name="fp16", numpy=np.dtype(np.float16), torch_name="float16", significand_bits=11),
    "bf16": Precision(
        name="bf16", numpy=np.dtype(ml_dtypes.bfloat16), torch_name="bfloat16", significand_bits=8
    ),
    "fp32": Precision(name="fp32", numpy=np.dtype(np.float32), torch_name="float32", significand_bits=24),
}


def find_precision(name: str) -> Precision:
    """Look a precision up by name."""
    if name not in PRECISIONS:
        raise DeployError("No such precision.", got=name, hint=nearest(name, PRECISIONS))
    return PRECISIONS[name]
