"""A Polygraphy runner behind the interface of every other runtime, so that its outputs can be judged."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import ml_dtypes
import numpy as np

from mha_deploy.errors import DeployError
from mha_deploy.runtime.runner import Arrays, Runner, TensorInfo, foreign_errors

_INTERFACE = ("activate", "deactivate", "infer", "get_input_metadata")


def is_polygraphy_runner(model: object) -> bool:
    """Whether an object has the interface of Polygraphy's `BaseRunner`; Polygraphy itself is not imported."""
    return all(callable(getattr(model, name, None)) for name in _INTERFACE)


class PolygraphyRunner(Runner):
    """Any Polygraphy runner: `OnnxrtRunner`, `TrtRunner`, or one of the user's own.

    It is activated here unless it is active already, and only what was activated here is deactivated.
    """

    device = "unknown"
    untimed = "does not measure device time, but wall-clock time of single calls, copies included."
    timed_by = "open the engine or the bundle itself to time it"
    outputs: dict[str, TensorInfo]  # known after the first call: Polygraphy describes inputs only

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._is_own = not getattr(runner, "is_active", False)
        self.name = f"polygraphy {getattr(runner, 'name', type(runner).__name__)}"
        self.outputs = {}
        with foreign_errors(f"{self.name} cannot be activated."), ExitStack() as owned:
            if self._is_own:
                runner.activate()
            owned.callback(self.close)
            try:
                inputs = runner.get_input_metadata(use_numpy_dtypes=False)
            except TypeError:  # older versions have NumPy types only
                inputs = runner.get_input_metadata()
            self.inputs = {
                name: TensorInfo(
                    dtype=_dtype(name, entry.dtype),
                    dims=tuple(None if isinstance(dim, int) and dim < 0 else dim for dim in entry.shape),
                )
                for name, entry in inputs.items()
            }
            owned.pop_all()

    def _run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        with foreign_errors(f"{self.name} failed on these inputs."):
            got = self._runner.infer(dict(feeds))
            # A runner may reuse its buffers in the next call.
            arrays = {name: np.array(_on_host(value)) for name, value in got.items()}
        self.outputs = {
            name: TensorInfo(dtype=array.dtype, dims=(None,) * array.ndim) for name, array in arrays.items()
        }
        return arrays

    def close(self) -> None:
        """Deactivate the runner, where it was activated here."""
        if self._is_own and getattr(self._runner, "is_active", True):
            self._runner.deactivate()


def _dtype(name: str, dtype: Any) -> np.dtype:
    if str(dtype).lower().endswith("bfloat16"):
        return np.dtype(ml_dtypes.bfloat16)
    try:
        return np.dtype(dtype.numpy() if callable(getattr(dtype, "numpy", None)) else dtype)
    except Exception as error:
        raise DeployError(
            f"Input {name} has a type without a NumPy equivalent.",
            got=dtype,
            hint="FP32, FP16 or BF16 for this input",
        ) from error


def _on_host(value: Any) -> Any:
    """An array of NumPy, from one, from a tensor of PyTorch, or from memory of the device."""
    if hasattr(value, "detach"):
        return value.detach().cpu().numpy()
    return value.numpy() if hasattr(value, "numpy") else value
