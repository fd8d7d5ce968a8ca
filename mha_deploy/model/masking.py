"""What the numbers of an additive mask mean: which of them leave nothing of a score, and what follows.

A mask number *absorbs* a score where their sum, rounded to its type, is the number again. A key whose number
does that counts by the number alone. A query all of whose keys have one is *fully masked*, and attends to
them alike: it gives the mean of their values. With -inf for all keys, PyTorch gives NaN and ONNX's Attention
zeros.

`graph/fuse/` reads masks by these rules, `graph/lower/` and `graph/mixed_precision.py` write them in other
types, and the FP64 oracles (`exporter/oracle.py`, `exporter/file_program.py`) apply them, since in FP64
nothing is absorbed by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

ABSORBS_ANY = -1e30
"""Leaves only itself of any score in a type with the range of float32, and is below every score. It is far
from the lowest number of these types: a kernel may multiply it by log2(e) without reaching -inf."""

ABSORBS_FLOAT32 = -(2.0**26)
"""From here on, a sum in float32 is a multiple of 8: scores that are less than 4 apart do not count."""

ABSORBS_HALF = -65472.0
"""The same in float16, for scores below 16: beyond it a sum is -inf, and up to it the number again."""

WRITTEN_HALF = -32768.0
"""What stands for such a number in float16: half the range, so that adding a score cannot reach -inf."""

MODEL_NUMBER = "mha_deploy.mask_number"
"""The metadata of a constant that `fuse` wrote: the mask number of the model, or NaN where it has none."""


def absorbs(number: float, *, in_half: bool) -> bool:
    """Whether a mask number leaves nothing of any usual score that it is added to, in the type of the sum."""
    return number == -math.inf or number <= (ABSORBS_HALF if in_half else ABSORBS_ANY)


def absorbs_all_scores(largest: Any) -> Any:
    """Where the largest mask number of a query, an array or a tensor, leaves nothing of scores in float32.

    Of -inf it is not asked: that is another result.
    """
    return (largest <= ABSORBS_FLOAT32) & (largest > -math.inf)


def model_number(metadata: Mapping[str, str]) -> float | None:
    """The mask number of the model that a constant stands for; None where its metadata says nothing of it."""
    try:
        return float(metadata.get(MODEL_NUMBER, ""))
    except ValueError:  # a file may have anything there
        return None
