"""How far a result is from the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# A row whose true values are almost zero is judged against the size of the whole tensor instead.
_SMALLEST_ROW = 0.1


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """The error of one tensor against the FP64 oracle.

    Args:
        relative_l2: ‖y − o‖ / ‖o‖ over the whole tensor.
        worst_row: The same for the worst vector along the last axis: one token, or one query's weights.
        max_abs: Largest absolute error, in units of the root mean square of the oracle.
        gain: |⟨y, o⟩ / ⟨o, o⟩ − 1|: how much larger or smaller the result is as a whole. Rounding goes both
            ways and cancels here, a wrong scale does not.
        cosine: Cosine between result and oracle.
        worst_index: Where the largest absolute error is.
        worst_got: The value there.
        worst_want: The oracle there.
    """

    relative_l2: float
    worst_row: float
    max_abs: float
    gain: float
    cosine: float
    worst_index: tuple[int, ...]
    worst_got: float
    worst_want: float


_NOTHING = Deviation(
    relative_l2=0.0,
    worst_row=0.0,
    max_abs=0.0,
    gain=0.0,
    cosine=1.0,
    worst_index=(),
    worst_got=0.0,
    worst_want=0.0,
)


def measure(got: np.ndarray, oracle: np.ndarray) -> Deviation:
    """Compare a finite result with the oracle, in float64."""
    result, oracle = np.atleast_1d(got.astype(np.float64)), np.atleast_1d(oracle)  # a loss is one number
    if not oracle.size:
        return _NOTHING
    error = result - oracle
    size = _rms(oracle) or 1.0  # an oracle of zeros: errors are then absolute
    row_sizes = np.maximum(_rms(oracle, axis=-1), _SMALLEST_ROW * size)
    worst = np.unravel_index(int(np.argmax(np.abs(error))), error.shape)
    return Deviation(
        relative_l2=float(_rms(error) / size),
        worst_row=float(np.max(_rms(error, axis=-1) / row_sizes)),
        max_abs=float(np.abs(error[worst]) / size),
        gain=abs(float(np.vdot(error, oracle))) / (oracle.size * float(size) ** 2),
        cosine=_cosine(result, oracle),
        worst_index=tuple(int(i) for i in worst),
        worst_got=float(result[worst]),
        worst_want=float(oracle[worst]),
    )


def _rms(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    return np.sqrt(np.mean(np.square(values), axis=axis))


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.vdot(a, b)) / norms if norms else float(np.array_equal(a, b))
