"""Which inputs and outputs of a model are made of rows, one for every member of the batch."""

from __future__ import annotations

import numpy as np

from mha_deploy.model_spec import ModelSpec
from mha_deploy.module_spec import LARGEST_ACTIVATION
from mha_deploy.spec_parts import TensorSpec


def has_rows(spec: ModelSpec) -> bool:
    """Whether the batch is made of rows that do not know of each other; of a module, its axis B says so."""
    return "B" in spec.axes and all(batch_axis(tensor, spec) == 0 for tensor in spec.outputs)


def hides_something(array: np.ndarray) -> bool:
    """Whether numbers are so large that they can only be meant to hide something."""
    return bool(array.size) and not float(np.abs(array).max()) <= LARGEST_ACTIVATION


def batch_axis(tensor: TensorSpec, spec: ModelSpec) -> int | None:
    """The batch is the first axis of what has one; a fixed batch stands there as its number."""
    batch = spec.axes["B"]
    return 0 if tensor.dims and tensor.dims[0] == ("B" if batch.is_dynamic else batch.min) else None
