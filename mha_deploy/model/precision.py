"""The precisions a graph can be exported in, by the names people use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mha_deploy.errors import DeployError, nearest

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class Precision:
    """One floating-point format."""

    name: str  # `fp16`, `bf16` or `fp32`
    torch_name: str  # its name in PyTorch, for `getattr(torch, ...)`, and in NumPy with ml_dtypes
    bytes: int  # size of one number
    significand_bits: int  # bits of the significand, the hidden one included
    accumulate: str = "fp32"  # the type that GEMMs accumulate in

    @property
    def roundoff(self) -> float:
        """The largest relative error of rounding one number."""
        return 2.0**-self.significand_bits

    @property
    def numpy(self) -> np.dtype:
        """Its NumPy type."""
        import ml_dtypes  # here, so that `--help` need not wait for NumPy
        import numpy as np

        return np.dtype(ml_dtypes.bfloat16 if self.name == "bf16" else self.torch_name)

    def numpy_of(self, kind: str) -> np.dtype:
        """The NumPy type of a tensor of some kind, in this precision."""
        import numpy as np

        return self.numpy if kind == "float" else np.dtype(kind)


PRECISIONS = {
    "fp16": Precision(name="fp16", torch_name="float16", bytes=2, significand_bits=11),
    "bf16": Precision(name="bf16", torch_name="bfloat16", bytes=2, significand_bits=8),
    "fp32": Precision(name="fp32", torch_name="float32", bytes=4, significand_bits=24),
}


EIGHT_BITS = ("int8", "fp8")
"""Precisions in which the GEMMs of a model are quantized."""


def smallest_normal(dtype: np.dtype) -> float:
    """The smallest positive number of a floating-point type that still has all its digits."""
    import ml_dtypes  # here, so that `--help` need not wait for NumPy

    return float(ml_dtypes.finfo(dtype).smallest_normal)


def find_precision(name: str) -> Precision:
    """Look a precision up by name."""
    if name not in PRECISIONS:
        hint = nearest(name, ("auto", *PRECISIONS, *EIGHT_BITS))
        raise DeployError("No such precision.", got=name, hint=hint, options=("precision",))
    return PRECISIONS[name]
