"""Random rounding: the samples that show what a precision costs.

A model is computed several times in FP64, and each time every number that a kernel writes goes to one of its
two neighbors in the precision, with a probability that makes the mean exact (Monte Carlo arithmetic). The
spread of the results is what rounding costs this model at these inputs, whatever kernel computes it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mha_deploy.model.precision import Precision

_SAMPLES, _LEAST_SAMPLES = 8, 4
# A number that goes to the next level of a grid changes a vector by more than rounding does. That is rare:
# few samples of a small output may have none of it (`benchmarks/quantized_sensitivity.py`).
_ON_GRID, _GRID_NUMBERS, _GRID_FLOPS = 32, 1 << 19, 1 << 36
_FEWER_FROM = 1 << 18  # numbers of an output: above it, each sample shows more by itself
_SIGNIFICAND = 53  # bits of FP64
_CHUNK = 1 << 15  # numbers at a time
# A decision is changed where its margin is below so many standard deviations of what rounding does to it.
MARGIN = 6.0
# GEMMs that accumulate K terms in a type, two at a time, err by 0.22 √K of its roundoffs of partial sums;
# measured by `benchmarks/judge_constants.py`.
ACCUMULATED = 0.22
ROUNDOFFS = {"fp16": 2.0**-11, "fp32": 2.0**-24}
MIX = (0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85)  # odd, as in hashes of integers


def accumulations(precision: Precision) -> tuple[str, ...]:
    """The types that GEMMs of a precision may accumulate in; see `Precision.accumulate`."""
    return ("fp32", "fp16") if precision.name == "fp16" else ("fp32",)


def accumulation_roundoff(precision: Precision | None) -> float:
    """The roundoff of partial sums; 0 where their type has far more bits than the result."""
    roundoff = ROUNDOFFS[precision.accumulate] if precision else 0.0
    return roundoff if precision and roundoff > precision.roundoff / 64 else 0.0


def sample_count(numbers: int, accumulate: str = "fp32", grid_flops: int = 0) -> int:
    """How many samples a case of so many numbers gets; `grid_flops` is the work of a quantized model."""
    count = max(_LEAST_SAMPLES, min(_SAMPLES, _SAMPLES * _FEWER_FROM // max(numbers, 1)))
    if grid_flops:
        count = max(count, min(_ON_GRID, _GRID_NUMBERS // max(numbers, 1), _GRID_FLOPS // grid_flops))
    return count if accumulate == "fp32" else max(_LEAST_SAMPLES, count * 2 // 3)


def hashed(bits: np.ndarray, seed: int) -> np.ndarray:
    """Random bits that depend on a number alone: equal numbers are rounded alike, as a GPU does."""
    mixed = bits ^ np.int64(seed * MIX[0] & 0x7FFFFFFFFFFFFFFF)
    between = np.empty_like(mixed)
    with np.errstate(over="ignore"):
        mixed *= np.int64(MIX[1])
        mixed ^= np.right_shift(mixed, 29, out=between)
        mixed *= np.int64(MIX[2])
        mixed ^= np.right_shift(mixed, 32, out=between)
    return mixed


def _by_chunks(values: np.ndarray, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """FP64 numbers, changed by their bits: so many at once that what is between stays in a cache."""
    whole, result = np.ascontiguousarray(values).reshape(-1).view(np.int64), np.empty(values.shape)
    flat = result.reshape(-1)
    for start in range(0, whole.size, _CHUNK):
        flat[start : start + _CHUNK] = change(whole[start : start + _CHUNK])
    return result


def rounded(values: np.ndarray, bits: int, seed: int) -> np.ndarray:
    """FP64 numbers, each rounded at random to so many bits of significand; others stay as they are."""
    if values.dtype != np.float64:
        return values
    mask = np.int64((1 << (_SIGNIFICAND - bits)) - 1)

    def change(whole: np.ndarray) -> np.ndarray:
        mixed = hashed(whole, seed)
        mixed &= mask
        mixed += whole
        mixed &= ~mask
        return mixed.view(np.float64)

    return _by_chunks(values, change)


def nearest(values: np.ndarray, bits: int) -> np.ndarray:
    """FP64 numbers, each as the nearest one with so many bits of significand; others stay as they are."""
    if not isinstance(values, np.ndarray) or values.dtype != np.float64:
        return values
    dropped = _SIGNIFICAND - bits
    half, mask = np.int64(1 << (dropped - 1)), np.int64((1 << dropped) - 1)

    def change(whole: np.ndarray) -> np.ndarray:
        near = whole + half
        near &= ~mask
        return near.view(np.float64)

    return _by_chunks(values, change)


def normal(values: np.ndarray, seed: int) -> np.ndarray:
    """Numbers that are nearly normal, and depend on FP64 numbers alone."""

    def draw(whole: np.ndarray) -> np.ndarray:
        bits = hashed(whole, seed ^ 0x5DEECE66D)
        total = bits & 0xFF
        for _ in range(2):
            bits >>= 8
            total += bits & 0xFF
        return total * (2.0 / 0xFF) - 3.0

    return _by_chunks(values, draw)
