"""How far an output is from the FP64 oracle, and how far it may be."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from mha_deploy.model.precision import Precision, smallest_normal

# -- How far a result is from the oracle -----------------------------------------------------------

# A vector whose true values are almost zero is judged against the size of the whole tensor instead.
_SMALLEST_VECTOR = 0.1


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """The error of one tensor against the FP64 oracle."""

    relative_l2: float  # ‖y − o‖ / ‖o‖ over the whole tensor
    worst_vector: float  # the same for the worst vector along the last axis: one token, or a query's weights
    max_abs: float  # largest absolute error, in units of the root mean square of the oracle
    # |⟨y, o⟩ / ⟨o, o⟩ − 1|: how much larger or smaller the result is as a whole. Rounding goes both ways
    # and cancels here, a wrong scale does not.
    gain: float
    # The largest error of any slice, over the error expected there; see `Noise`. A slice is one index of
    # one axis (batch element, query, channel), one head, one vector, one element, or everything.
    local: float = 0.0
    local_gain: float = 0.0  # the largest gain of any slice, over what rounding leaves there
    local_at: str = ""  # where these are, the worse one of both: `batch element 7`
    cosine: float  # cosine between result and oracle
    worst_index: tuple[int, ...]  # where the largest absolute error is
    worst_got: float  # the value there
    worst_want: float  # the oracle there


def measure(
    got: np.ndarray,
    oracle: np.ndarray,
    noise: Noise | None = None,
    suspects: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> Deviation:
    """Compare a finite result with the oracle, in float64; slice by slice where their noise is known.

    `suspects` is what known mistakes would add to the oracle.
    """
    result, oracle = np.atleast_1d(got.astype(np.float64)), np.atleast_1d(oracle)  # a loss is one number
    if not oracle.size:
        nothing: dict[str, Any] = dict.fromkeys(Deviation.__annotations__, 0.0)
        return Deviation(**nothing | {"cosine": 1.0, "worst_index": (), "local_at": ""})
    error = result - oracle
    size = _rms(oracle) or 1.0  # an oracle of zeros: errors are then absolute
    vector_sizes = np.maximum(_rms(oracle, axis=-1), _SMALLEST_VECTOR * size)
    worst = np.unravel_index(int(np.argmax(np.abs(error))), error.shape)
    local, local_gain, local_at = (0.0, 0.0, "") if noise is None else noise.worst_slice(error, suspects)
    norms = float(np.linalg.norm(result) * np.linalg.norm(oracle))
    return Deviation(
        relative_l2=float(_rms(error) / size),
        worst_vector=float(np.max(_rms(error, axis=-1) / vector_sizes)),
        max_abs=float(np.abs(error[worst]) / size),
        gain=abs(float(np.vdot(error, oracle))) / (oracle.size * float(size) ** 2),
        local=local,
        local_gain=local_gain,
        local_at=local_at,
        cosine=float(np.vdot(result, oracle)) / norms if norms else float(np.array_equal(result, oracle)),
        worst_index=tuple(int(i) for i in worst),
        worst_got=float(result[worst]),
        worst_want=float(oracle[worst]),
    )


def _rms(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    return np.sqrt(np.mean(np.square(values), axis=axis))


# -- The error that is expected of every element ---------------------------------------------------

_AXES = {
    1: ("channel",),
    2: ("batch element", "channel"),
    3: ("batch element", "query", "channel"),
    4: ("batch element", "head", "query", "channel"),
}
EVERYWHERE = "everywhere"

# Rounding a result costs this many roundoffs of it on average, and what it was computed from at least so many
# roundoffs of the usual numbers of its vector and its channel.
_RESULT_ROUNDING, _LEAST_NOISE = 0.4, 0.3
# A slice of n elements may exceed the expected error by chance: by this much, more where n is small, and by a
# share of what eager's worst slice does.
_OF_MANY, _OF_FEW, _OF_EAGER = 0.57, 4.0, 0.6
# The elements of a vector do not err by themselves: a rounded weight moves its whole head, and a narrow one
# has few heads. So n counts less, and gains cancel less, by these widths over that of the vector.
_NARROW, _NARROW_GAIN, _FEW = 1024, 192, 24
# A GEMM that accumulates K terms in FP16 errs by 0.2 √K roundoffs: engines of TensorRT 8.6 do, and partial
# sums that are rounded every 16 terms. The factor times this many roundoffs is allowed, K as the width.
_FP16_SUM = 0.075
_FEW_VECTORS, _FEW_LARGE = 8, 32  # fewer do not show the mean of a channel, or the error of large values
# So many elements are needed to believe one channel, or one vector, more than all of them.
_CHANNEL_PRIOR, _VECTOR_PRIOR = 32, 128
# An error may have this share of a known mistake in it, where chance leaves a fraction of that.
_SUSPECT, _SUSPECT_CHANCE = 0.25, 0.02
_OUTSTANDING = 3.0  # a head with so many times the error of the usual head is named

ToHeads = Callable[[np.ndarray], np.ndarray]
"""Undoes an output projection: [B, S, E] to [B, Hq, S, D]."""


def _common(values: np.ndarray, axis: int) -> float:
    """The share of a channel that is the same along an axis: 1 where all is, 1/n of n independent numbers."""
    rest = tuple(range(values.ndim - 1))
    power = np.square(values).mean(rest)
    return float(np.median(np.square(values.mean(axis)).mean(rest[:-1]) / np.maximum(power, 1e-300)))


def _distinct_vectors(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first of each group of equal vectors, and the weight of every vector: 1 over the size of its group.

    Queries with the same answer (padding, a single key) have the same error: it counts once.
    """
    hashes = (vectors @ np.cos(np.arange(vectors.shape[1]))).astype(np.float32)
    _, distinct, group, sizes = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
    return distinct, 1.0 / sizes[group]


def _usual_sizes(o: np.ndarray, distinct: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every element less the usual value of its channel, and the size that its vector and channel suggest.

    Medians: one massive element makes neither its vector nor its channel large.
    """
    n_vectors, n_channels = len(distinct), o.shape[1]
    centre = np.median(o[distinct], axis=0) if n_vectors >= _FEW_VECTORS else np.zeros(n_channels)
    centred = o - centre
    spread = np.square(1.5 * np.median(np.abs(centred[distinct]), axis=0))
    spread = np.where(spread > 0, spread, np.square(centred[distinct]).mean(0))
    # Where all queries have nearly the same answer, it is the answer that is rounded, not its spread.
    common = np.square(centre)
    spread += np.minimum(common, np.median(spread + common))
    usual = float(np.median(spread)) or float(spread.mean()) or 1.0
    channels = np.sqrt((n_vectors * spread + 4 * usual) / (n_vectors + 4) if n_vectors > 1 else usual)
    channels = np.broadcast_to(np.maximum(channels, 1e-12 * math.sqrt(usual)), n_channels)
    vectors = 1.5 * np.median(np.maximum(np.abs(o), np.abs(centred)) / channels, axis=1)
    middle = float(np.median(vectors)) or 1.0
    vectors = np.sqrt((n_channels * np.square(vectors) + 4 * middle**2) / (n_channels + 4))
    vectors = np.maximum(vectors, 1e-3 * middle)
    return centred, np.outer(vectors, channels)


def _error_by_value(o: np.ndarray, error: np.ndarray, scale: np.ndarray, rounding: float) -> np.ndarray:
    """The squared error that grows with a value itself, as that of softmax weights: large ones show it."""
    large = np.abs(o) > 3 * scale
    relative = 1.5 * np.median(np.abs(error[large] / o[large])) if large.sum() >= _FEW_LARGE else 0.0
    return np.square(np.clip(relative, _RESULT_ROUNDING * rounding, 2 * rounding) * o)


def _error_by_vector_and_channel(
    error: np.ndarray, by_value: np.ndarray, scale: np.ndarray, distinct: np.ndarray, rounding: float
) -> tuple[float, np.ndarray]:
    """Eager's error over the scale, and the squared error that it shows in the vector and channel of each."""
    (n_vectors, n_channels), least = (len(distinct), scale.shape[1]), _LEAST_NOISE * rounding
    level = max(least, 1.5 * float(np.median((np.abs(error) / scale)[distinct])))
    typical = np.square(level * scale)
    # Of an element whose own rounding is all its error, nothing is learned about its neighbours.
    ratio = np.square(error) / (typical + by_value) * (typical / np.square(scale))
    level = max(least, math.sqrt(float(ratio[distinct].mean())))
    ratio /= level**2
    by_vector = (n_channels * ratio.mean(1) + _VECTOR_PRIOR) / (n_channels + _VECTOR_PRIOR)
    ratio /= by_vector[:, None]
    # The queries of a channel share the rounding of keys and values: a small error there is chance.
    by_channel = (n_vectors * ratio[distinct].mean(0) + _CHANNEL_PRIOR) / (n_vectors + _CHANNEL_PRIOR)
    learned = np.square(level * scale) * np.outer(by_vector, np.maximum(by_channel, 1.0))
    return level, np.maximum(learned, np.square(least * scale))


class Noise:
    """The error that rounding is expected to leave in every element of a tensor.

    A large channel (a bias of 10,000) or a large token must not hide the others. So the expected error of an
    element is the rounding of its own value, and eager's error in its vector times that in its channel.

    `tiny` is the rounding of the smallest normal number. `to_heads` brings an error back to the heads that an
    output projection mixes: each is judged, too, and there `widening` is how much more than eager a correct
    result of the whole output may err.
    """

    def __init__(
        self,
        error: np.ndarray,
        oracle: np.ndarray,
        precision: Precision,
        tiny: float,
        to_heads: ToHeads | None = None,
        widening: float | None = None,
    ) -> None:
        shape = np.atleast_1d(oracle).shape
        o, rounding = oracle.reshape(-1, shape[-1]).astype(np.float64), precision.roundoff
        error = error.reshape(o.shape)
        distinct, weight = _distinct_vectors(o)
        centred, scale = _usual_sizes(o, distinct)
        by_value = _error_by_value(o, error, scale, rounding)
        level, learned = _error_by_vector_and_channel(error, by_value, scale, distinct, rounding)
        self._expected = np.sqrt(learned + by_value + tiny**2).reshape(shape)
        accumulated = fp16_accumulation(shape[-1], precision)
        self.widening = widening or max(1.0, accumulated / math.hypot(level, _RESULT_ROUNDING * rounding))
        self._signal = (centred.reshape(shape) / self._expected).astype(np.float32)
        self._weight = weight.reshape(*shape[:-1], 1)
        self._precision = precision
        # What is common to all queries (or batch elements, heads, windows) of eager's error, or of the
        # answers themselves, has one error, which counts once and not once for each.
        both = error.reshape(shape) / self._expected, o.reshape(shape)
        self._shared = [max(_common(each, axis) for each in both) for axis in range(len(shape) - 1)]
        everything = tuple(range(len(shape)))
        self._slices = [(), *((axis,) for axis in everything)]
        self._slices += [everything[:-1], everything] if len(shape) > 1 else []
        if widening is not None:
            self._slices = [(1,), (0, 1), (1, 2), (0, 1, 2)]
        self._to_heads, self._heads, self._own = to_heads, None, (1.0, 1.0)
        if to_heads is not None:
            heads = to_heads(oracle.astype(np.float64))
            self._heads = Noise(to_heads(error.reshape(shape)), heads, precision, tiny, None, self.widening)
        # Eager's worst slice shows what chance leaves here.
        local, gain, _ = self._worst(error.reshape(shape))
        self._own = max(1.0, _OF_EAGER * local), max(1.0, _OF_EAGER * gain)

    def repeats(self, axes: Iterable[int]) -> float:
        """How often one and the same error is counted along axes."""
        sizes = self._expected.shape
        return math.prod(
            max(1.0, sizes[axis] * self._shared[axis]) for axis in axes if axis < len(self._shared)
        )

    def cut(self, part: Callable[[np.ndarray], np.ndarray]) -> Noise:
        """The same of a part of the tensor."""
        found = copy(self)
        for name in ("_expected", "_signal", "_weight"):
            setattr(found, name, part(getattr(self, name)))
        return found

    def worst_slice(
        self, error: np.ndarray, suspects: Mapping[str, np.ndarray] = MappingProxyType({})
    ) -> tuple[float, float, str]:
        """The largest error and gain of a slice, in units of what is expected, and where the worse is.

        A head whose error is several times the usual one of a head is named beside a worse slice.
        """
        local, gain, place = self._worst(error)
        if self._heads is not None and self._to_heads is not None:
            by_head = self._to_heads(error)
            head_local, head_gain, head_place = self._heads._worst(by_head)
            sizes = np.sqrt(np.square(by_head / self._heads._expected).mean((0, 2, 3)))
            if max(head_local, head_gain) > max(local, gain):
                place = head_place
            elif sizes.max() > _OUTSTANDING * np.median(sizes):
                place = f"{place}; head {int(np.argmax(sizes))}"
            local, gain = max(local, head_local), max(gain, head_gain)
        for name, change in suspects.items():
            along = change / self._expected
            power = float(np.square(along).sum())
            if self.widening**2 * self.repeats(range(error.ndim)) <= _SUSPECT_CHANCE**2 * power:
                share = abs(float((along * error / self._expected).sum())) / power / _SUSPECT
                found = share * FACTORS[self._precision.name, self._precision.accumulate]
                place = f"an error as from {name}" if found > max(local, gain) else place
                gain = max(gain, found)
        return local, gain, place

    def _worst(self, error: np.ndarray) -> tuple[float, float, str]:
        z, weight = error / self._expected, np.broadcast_to(self._weight, error.shape)
        z = z / self.widening
        squares, along = np.square(z) * weight, z * self._signal
        power, width = np.square(self._signal), z.shape[-1]
        found: list[tuple[float, float, str]] = []
        names = _AXES.get(z.ndim, tuple(f"axis {axis}" for axis in range(z.ndim)))
        for kept in self._slices:
            away = tuple(axis for axis in range(z.ndim) if axis not in kept)
            sizes, gains, count = np.abs(z), np.zeros(()), np.ones(())
            whole_vectors = z.ndim - 1 in away
            if away:
                weights = weight.sum(away)
                repeats = self.repeats(away)
                count = np.maximum(weights / repeats, width if whole_vectors else 1)
                sizes = np.sqrt(squares.sum(away) / weights)
                strength = np.maximum(power.sum(away), 1e-30)
                least = _FLOOR_GAIN * self._precision.roundoff / self.widening
                noise = np.maximum(_GAIN_NOISE / np.sqrt(strength), least)
                noise = noise * np.sqrt(repeats * (1 + _NARROW_GAIN / (width if whole_vectors else count)))
                gains = np.abs(along.sum(away)) / strength / np.maximum(noise, _FAST_EXPONENTIAL)
            alike = 1 + (_NARROW / width if whole_vectors else _FEW / count if away else 0.0)
            allowed = _OF_MANY + _OF_FEW * np.sqrt(alike / count)
            for values, own, is_gain in ((sizes / allowed, self._own[0], 0), (gains, self._own[1], 1)):
                at = np.unravel_index(int(np.argmax(values)), np.shape(values))
                place = ", ".join(f"{names[axis]} {int(i)}" for axis, i in zip(kept, at, strict=False))
                worst = float(values[at]) / own
                found.append((0.0 if is_gain else worst, worst if is_gain else 0.0, place or EVERYWHERE))
        local, gain = max(each[0] for each in found), max(each[1] for each in found)
        return local, gain, max(found, key=lambda each: max(each[:2]))[2]


def fp16_accumulation(terms: int, precision: Precision) -> float:
    """The error that accumulating so many terms in FP16 is expected to add, over the budget's factor."""
    if (precision.name, precision.accumulate) != ("fp16", "fp16"):
        return 0.0
    return _FP16_SUM * math.sqrt(terms) * precision.roundoff


# -- How far a result may be from the oracle: as far as the module itself is, times a factor -------

FACTORS = {("fp16", "fp16"): 16.0, ("fp16", "fp32"): 4.0, ("bf16", "fp32"): 4.0, ("fp32", "fp32"): 16.0}
"""By the precision and the type that GEMMs accumulate in.

Accumulation in FP16 (TensorRT 8.6) costs several times eager's error; no tensor core accumulates in BF16. In
float32 the order of accumulation costs more than storing its result.
"""

# What rounding alone costs, in units of the precision's roundoff. Where the module happens to be exact (one
# key: the weights are 1) the budget must still allow for a runtime that rounds.
_FLOOR_L2, _FLOOR_VECTOR, _FLOOR_MAX, _FLOOR_GAIN = 0.5, 0.75, 3.0, 0.1

# A GPU's exponential is an approximation, good to about two ulps of float32, and errs to one side.
_FAST_EXPONENTIAL = 2.0**-23

# Random errors leave a gain of their size over √N, and more where neighbouring elements err alike.
_GAIN_NOISE = 4.0


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The largest deviation that passes, measure by measure; see `Deviation`."""

    relative_l2: float
    worst_vector: float
    max_abs: float
    gain: float
    local: float = math.inf
    local_gain: float = math.inf
    noise: Noise | None = field(default=None, repr=False, compare=False)

    @property
    def limits(self) -> dict[str, float]:
        """The limits by the name of the measure."""
        return {name: limit for name, limit in vars(self).items() if name != "noise"}

    def exceeded_by(self, deviation: Deviation) -> list[str]:
        """The measures that are over the budget."""
        return [name for name, limit in self.limits.items() if not getattr(deviation, name) <= limit]

    def share_used(self, deviation: Deviation) -> float:
        """The largest share of the budget that a deviation uses; over 1 is out of budget."""
        return max(getattr(deviation, name) / limit for name, limit in self.limits.items())


# A case is judged many times, in other batches and while it is timed: its last budgets are kept.
_RECENT: deque[tuple[np.ndarray, np.ndarray, Precision, ToHeads | None, Budget]] = deque(maxlen=4)


def budget_from_eager(
    eager: np.ndarray, oracle: np.ndarray, precision: Precision, to_heads: ToHeads | None = None
) -> Budget:
    """Derive the budget of one tensor from the module's own error."""
    for known in tuple(_RECENT):
        if known[0] is eager and known[1] is oracle and known[2:4] == (precision, to_heads):
            return known[4]
    noise, roundoff, width = None, precision.roundoff, oracle.shape[-1] if oracle.ndim else 1
    if oracle.size and eager.dtype.kind not in "iub":
        tiny = smallest_normal(eager.dtype) * roundoff
        heads = to_heads if oracle.ndim == 3 else None
        noise = Noise(eager.astype(np.float64) - oracle, oracle, precision, tiny, heads)
    own, factor = measure(eager, oracle), FACTORS[precision.name, precision.accumulate]
    l2 = max(own.relative_l2, _FLOOR_L2 * roundoff)
    wider = max(1.0, fp16_accumulation(width, precision) / l2)
    repeats = noise.repeats(range(oracle.ndim)) if noise else 1.0
    cancelled = _GAIN_NOISE * wider * l2 * math.sqrt(repeats / max(oracle.size, 1))
    few, few_channels = (1 + _OF_FEW / math.sqrt(max(count, 1)) for count in (oracle.size, width))
    budget = Budget(
        relative_l2=factor * wider * l2 * few,
        worst_vector=factor * wider * max(own.worst_vector, _FLOOR_VECTOR * roundoff) * few_channels,
        max_abs=factor * wider * max(own.max_abs, _FLOOR_MAX * roundoff),
        gain=factor * max(own.gain, _FLOOR_GAIN * roundoff, cancelled, _FAST_EXPONENTIAL),
        local=factor,
        local_gain=factor,
        noise=noise,
    )
    _RECENT.append((eager, oracle, precision, to_heads, budget))
    return budget


def relative_error(got: np.ndarray, oracle: np.ndarray) -> float:
    """The size of the error over that of the oracle, which counts at least as the smallest normal numbers.

    Numbers below those lose their digits, whatever program computes them.
    """
    smallest = 1e-30 if got.dtype.kind in "iub" else smallest_normal(got.dtype)
    error = float(np.linalg.norm(got.astype(np.float64) - oracle))
    return error / max(float(np.linalg.norm(oracle)), smallest * math.sqrt(max(got.size, 1)))
