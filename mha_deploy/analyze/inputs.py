"""Given inputs for a layer: read from an .npz file and checked against the spec."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mha_deploy.errors import DeployError
from mha_deploy.npz import read_npz
from mha_deploy.spec import INT32, AttentionSpec, TensorSpec

Arrays = Mapping[str, np.ndarray]


def read_inputs(path: Path, spec: AttentionSpec) -> dict[str, np.ndarray]:
    """Read the inputs of a layer from an .npz file, one array per input.

    Args:
        path: The file, as `numpy.savez` writes it.
        spec: The layer; names, shapes, kinds and sizes must agree with it.

    Returns:
        The arrays by name: float32, and int32 where the spec says so.
    """
    arrays = read_npz(path, lambda names: _check_names(spec, names))
    check_inputs(spec, arrays)
    return {
        tensor.name: arrays[tensor.name].astype(np.int32 if tensor.kind == INT32 else np.float32)
        for tensor in spec.inputs
    }


def check_inputs(spec: AttentionSpec, arrays: Arrays) -> dict[str, int]:
    """Refuse inputs that do not belong to the layer; return the size of each axis.

    Args:
        spec: The layer.
        arrays: Arrays by name.
    """
    _check_names(spec, arrays)
    sizes = {name: axis.min for name, axis in spec.axes.items() if not axis.is_dynamic}
    for tensor in spec.inputs:
        _check_kind(tensor, arrays[tensor.name])
        _check_shape(tensor, arrays[tensor.name], sizes)
    spec.check_sizes(sizes)
    if spec.mask == "padding":
        _check_lengths(arrays["key_lengths"], sizes[spec.key_axis])
    return sizes


def _check_names(spec: AttentionSpec, names: Arrays | list[str]) -> None:
    wanted = [tensor.name for tensor in spec.inputs]
    if sorted(names) != sorted(wanted):
        raise DeployError(
            f"{spec.name} takes other inputs.",
            got=", ".join(sorted(names)) or "none",
            hint=f"exactly: {', '.join(wanted)}",
        )


def _check_kind(tensor: TensorSpec, array: np.ndarray) -> None:
    wanted = np.integer if tensor.kind == INT32 else np.floating
    if not np.issubdtype(array.dtype, wanted):
        raise DeployError(
            f"Input {tensor.name} has the wrong type.",
            got=array.dtype,
            hint="int32" if tensor.kind == INT32 else "float32 (BF16 has no .npz form)",
        )
    # A mask may hold -inf; +inf and NaN mean nothing anywhere.
    allowed = np.isfinite(array) if tensor.name != "attention_bias" else (array < np.inf)
    if not allowed.all():
        raise DeployError(f"Input {tensor.name} holds values that are not finite.", got="NaN or infinity")


def _check_shape(tensor: TensorSpec, array: np.ndarray, sizes: dict[str, int]) -> None:
    """Compare with the spec's dimensions; the first tensor that has an axis sets its size."""
    wanted = f"({', '.join(str(dim) for dim in tensor.dims)})"
    if array.ndim == len(tensor.dims):
        for dim, size in zip(tensor.dims, array.shape, strict=True):
            if isinstance(dim, str):
                sizes.setdefault(dim, size)
        if array.shape == tensor.shape(sizes):
            return
        known = ", ".join(f"{dim}={sizes[dim]}" for dim in tensor.dims if isinstance(dim, str))
        wanted += f" with {known}" if known else ""
    raise DeployError(f"Input {tensor.name} has the wrong shape.", got=array.shape, hint=wanted)


def _check_lengths(lengths: np.ndarray, longest: int) -> None:
    if lengths.min() < 0 or lengths.max() > longest:
        raise DeployError(
            "A row has more keys than there are, or fewer than none.",
            got=f"key_lengths from {lengths.min()} to {lengths.max()}",
            hint=f"0 to {longest}",
        )
