"""How far a result may be from the oracle: as far as the module itself is, times a calibrated factor.

Every correct implementation rounds differently, so each is allowed a multiple of the error that the eager
module makes in the same precision on the same numbers. The factor is not a taste: it lies between the
largest error of correct runtimes and the smallest error of a set of deliberately wrong models. The record of
that calibration is in docs/parity.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mha_deploy.precision import Precision
from mha_deploy.validate.deviation import Deviation, measure

# FP16 engines may sum their products in FP16 (TensorRT 8.6 does), which costs several times eager's error; no
# tensor core sums in BF16. In float32 the order of a sum costs more than storing its result.
FACTORS = {"fp16": 16.0, "bf16": 4.0, "fp32": 16.0}

# What rounding alone costs, in units of the precision's roundoff. Where the module happens to be exact (one
# key: the weights are 1) the budget must still allow for a runtime that rounds.
_FLOOR_L2, _FLOOR_ROW, _FLOOR_MAX, _FLOOR_GAIN = 0.5, 0.75, 3.0, 0.1

# A GPU's exponential is an approximation, good to about two ulps of float32, and errs to one side.
_FAST_EXPONENTIAL = 2.0**-23

# Random errors leave a gain of their size over √N, and more where neighbouring elements err alike.
_GAIN_NOISE = 4.0


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The largest deviation that passes, measure by measure; see `Deviation`."""

    relative_l2: float
    worst_row: float
    max_abs: float
    gain: float

    def exceeded_by(self, deviation: Deviation) -> list[str]:
        """The measures that are over the budget."""
        return [name for name, limit in vars(self).items() if not getattr(deviation, name) <= limit]

    def share_used(self, deviation: Deviation) -> float:
        """The largest share of the budget that a deviation uses; over 1 is out of budget."""
        return max(getattr(deviation, name) / limit for name, limit in vars(self).items())


def budget_from_eager(eager: np.ndarray, oracle: np.ndarray, precision: Precision) -> Budget:
    """Derive the budget of one tensor from the module's own error."""
    own, roundoff, factor = measure(eager, oracle), precision.roundoff, FACTORS[precision.name]
    l2 = max(own.relative_l2, _FLOOR_L2 * roundoff)
    noise = _GAIN_NOISE * l2 / math.sqrt(max(oracle.size, 1))
    return Budget(
        relative_l2=factor * l2,
        worst_row=factor * max(own.worst_row, _FLOOR_ROW * roundoff),
        max_abs=factor * max(own.max_abs, _FLOOR_MAX * roundoff),
        gain=factor * max(own.gain, _FLOOR_GAIN * roundoff, noise, _FAST_EXPONENTIAL),
    )
