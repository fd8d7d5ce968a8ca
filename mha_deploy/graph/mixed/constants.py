"""What FP16 would make of a constant: nothing to speak of, an infinity, zeros, or a clamped sentinel."""

from __future__ import annotations

import numpy as np

from mha_deploy.graph.mixed.records import FLUSHED_BELOW, FP16_MAX, SENTINEL_FROM

# Random weights have some numbers that FP16 makes 0, one in a million. Where more do, they meant something.
_FEW = 0.01


def overflow_of(array: np.ndarray, *, is_bound: bool) -> float | None:
    """The largest number that FP16 would make infinite; None where there is none.

    Args:
        array: The constant, in float32.
        is_bound: Whether it bounds or hides: its numbers may then be clamped, whatever they are.
    """
    if is_bound:
        return None
    size = np.abs(array)
    largest = float(size.max(initial=0.0, where=size < SENTINEL_FROM))
    return largest if largest > FP16_MAX else None


def flushed_of(array: np.ndarray) -> float | None:
    """The largest of the numbers that FP16 would make 0, where they are more than a few."""
    size = np.abs(array)
    lost = size[(size > 0) & (size < FLUSHED_BELOW)]
    few = _FEW * int(np.count_nonzero(size))
    return float(lost.max()) if lost.size > few else None


def clamped_of(array: np.ndarray) -> float | None:
    """The finite number beyond FP16 that is written as FP16's lowest or highest; None where there is none."""
    beyond = array[np.isfinite(array) & (np.abs(array) > FP16_MAX)]
    return float(beyond[np.abs(beyond).argmax()]) if beyond.size else None


def clamp(array: np.ndarray, dtype: np.dtype, limit: float) -> np.ndarray:
    """The array in another type, its finite numbers held within the limits of that type."""
    held = np.where(np.isfinite(array), np.clip(array, -limit, limit), array)
    return held.astype(dtype)
