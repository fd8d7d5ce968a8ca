"""The ONNX formula in NumPy: exactly, in the precision under test, and as it could be misread.

    Y = softmax(Q Kᵀ · scale + bias) V

The bias is the additive mask; -inf where a boolean mask or `is_causal` hides a key. A query for which every
bias is -inf sees no key and gives zeros: so says the specification of ONNX Attention, and so do ONNX's
reference evaluator, this project's PyTorch layers and its lowerings. Numbers that are only far below hide
nothing by themselves: -1e4 for every key of a query is a shift, and softmax takes a shift out again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mha_deploy.graph.conformance import SENTINEL
from mha_deploy.validate.conformance.trial import Trial

UPPER_LEFT, LOWER_RIGHT, FIRST_ROW, NOWHERE = "upper-left", "lower-right", "first-row", "nowhere"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a runtime may take a trial for.

    Args:
        mask: The mask it reads; None for none.
        causal: The corner that causal starts from, `upper-left` or `lower-right`; `first-row` where all
            queries are taken for the first one; `nowhere`.
        interleaved: Whether query head h shares key head h mod Hkv, instead of its neighbours' one.
    """

    mask: np.ndarray | None
    causal: str
    interleaved: bool = False


def as_written(trial: Trial) -> Reading:
    """What ONNX says."""
    return Reading(mask=trial.arrays.get("mask"), causal=UPPER_LEFT if trial.case.is_causal else NOWHERE)


def exact(trial: Trial, reading: Reading | None = None) -> np.ndarray:
    """The result in float64, heads apart: [B, Hq, S, D]."""
    return _formula(trial, reading or as_written(trial), np.dtype(np.float64), lambda x: x)


def rounded(trial: Trial) -> np.ndarray:
    """The result of a plain implementation in the trial's precision: float32 sums, every step rounded."""
    half = trial.precision.numpy
    result = _formula(
        trial, as_written(trial), np.dtype(np.float32), lambda x: x.astype(half).astype(x.dtype)
    )
    return result.astype(half)


def average(trial: Trial) -> np.ndarray:
    """What every query gets where no key counts more than another: [B, Hq, 1, D], in float64."""
    return _heads(trial, "v", np.dtype(np.float64), interleaved=False).mean(axis=2, keepdims=True)


def closed_rows(trial: Trial) -> np.ndarray:
    """Which queries see no key: [B, Hq, S]."""
    return np.all(np.isneginf(_bias(trial, as_written(trial))), axis=-1)


def shifted_rows(trial: Trial) -> np.ndarray:
    """Which queries have the sentinel for every key: [B, Hq, S]."""
    sentinel = float(np.asarray(SENTINEL, trial.precision.numpy))  # bfloat16 has no -10000, but -9984
    return np.all(_bias(trial, as_written(trial)) == sentinel, axis=-1)


def split_heads(trial: Trial, y: np.ndarray) -> np.ndarray:
    """[B, S, Hq·D] to [B, Hq, S, D]."""
    return y.reshape(*y.shape[:2], -1, trial.case.D).transpose(0, 2, 1, 3)


def _formula(
    trial: Trial, reading: Reading, working: np.dtype, step: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    q = split_heads(trial, trial.arrays["q"].astype(working))
    k, v = (_heads(trial, role, working, reading.interleaved) for role in "kv")
    scores = step(step(q @ k.swapaxes(-1, -2)) * working.type(trial.case.scale))
    biased = step(scores + _bias(trial, reading).astype(working))
    return step(step(_softmax(biased)) @ v)


def _heads(trial: Trial, role: str, working: np.dtype, interleaved: bool) -> np.ndarray:
    """Keys or values for each query head."""
    heads, group = split_heads(trial, trial.arrays[role].astype(working)), trial.case.Hq // trial.case.Hkv
    return np.concatenate([heads] * group, axis=1) if interleaved else np.repeat(heads, group, axis=1)


def _bias(trial: Trial, reading: Reading) -> np.ndarray:
    """What is added to the scores, as float64 [B, Hq, S, T]."""
    case, mask = trial.case, reading.mask
    if mask is None:
        mask = np.zeros(1)
    bias = np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask.astype(np.float64)
    bias = np.broadcast_to(bias, (case.B, case.Hq, case.S, case.T))
    if reading.causal == NOWHERE:
        return bias
    last = np.arange(case.S)[:, None]
    if reading.causal == LOWER_RIGHT:
        last = last + case.T - case.S
    elif reading.causal == FIRST_ROW:
        last = np.zeros_like(last)
    return np.where(np.arange(case.T) <= last, bias, -np.inf)


def _softmax(scores: np.ndarray) -> np.ndarray:
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(top), 0.0, top))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total == 0.0, 1.0, total)
