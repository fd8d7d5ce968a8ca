"""How far an output is from the FP64 oracle, and how far it may be."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
from msgspec import Struct

from mha_deploy.model.precision import Precision, smallest_normal
from mha_deploy.status import means

# -- How far a result is from the oracle -----------------------------------------------------------

# A vector whose true values are almost zero is judged against the size of the whole tensor instead.
_SMALLEST_VECTOR = 0.1


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """The error of one tensor y against the FP64 oracle o; see docs/parity.md."""

    relative_l2: Annotated[float, means("‖y − o‖ / ‖o‖ over the whole tensor")]
    worst_vector: Annotated[
        float, means("the same for the worst vector along the last axis: one token, or a query's weights")
    ]
    max_abs: Annotated[float, means("largest absolute error, in units of the oracle's root mean square")]
    # Rounding goes up and down and cancels here, a wrong scale does not.
    gain: Annotated[
        float, means("abs(⟨y, o⟩ / ⟨o, o⟩ − 1): by how much the whole result is too large or too small")
    ]
    # A slice: an index of an axis (batch element, query, channel), a head, a vector, an element, everything.
    local: Annotated[
        float, means("largest error of a slice, divided by the largest rounding error there")
    ] = 0.0
    local_gain: Annotated[float, means("largest gain of a slice, divided by the gain of rounding there")] = (
        0.0
    )
    local_at: Annotated[
        str, means("the slice with the larger of both: a batch element, query, channel, …")
    ] = ""
    cosine: Annotated[float, means("cosine between result and oracle")]
    worst_index: Annotated[tuple[int, ...], means("where the largest absolute error is")]
    worst_got: Annotated[float, means("the value there")]
    worst_want: Annotated[float, means("the oracle there")]


def measure(
    got: np.ndarray,
    oracle: np.ndarray,
    spread: Spread | None = None,
    suspects: Suspects = MappingProxyType({}),
) -> Deviation:
    """Compare a finite result with the oracle, in float64; slice by slice where their spread is known.

    `suspects` is what known mistakes would add to the oracle; where it is known, how much of that chance
    leaves in a right result; and of a factor, how far it is from 1.
    """
    result, oracle = np.atleast_1d(got.astype(np.float64)), np.atleast_1d(oracle)  # a loss is one number
    if not oracle.size:
        nothing: dict[str, Any] = dict.fromkeys(Deviation.__annotations__, 0.0)
        return Deviation(**nothing | {"cosine": 1.0, "worst_index": (), "local_at": ""})
    error = result - oracle
    size = _rms(oracle) or 1.0  # an oracle of zeros: errors are then absolute
    vector_sizes = np.maximum(_rms(oracle, axis=-1), _SMALLEST_VECTOR * size)
    worst = np.unravel_index(int(np.argmax(np.abs(error))), error.shape)
    local, local_gain, local_at = (0.0, 0.0, "") if spread is None else spread.worst_slice(error, suspects)
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


# -- What rounding costs: measured on random roundings of the model ---------------------------------

_AXES = {
    1: ("channel",),
    2: ("batch element", "channel"),
    3: ("batch element", "query", "channel"),
    4: ("batch element", "head", "query", "channel"),
}
EVERYWHERE = "everywhere"
_MOST_LINEAR = 0.1  # up to here, a factor that is so far off shows about in proportion

# Where no other benchmark is named, `benchmarks/judge_constants.py` measures a constant, or counts what
# another number would cost: right results that fail, and wrong ones that pass.

# Rounding a number at random to p bits of significand costs between 0.41 and 0.82 of its roundoff 2^-p.
_RESULT_ROUNDING = 0.6
_MASSIVE = 25.0  # so many times the usual mean square is that of a massive element
# So many further samples of the usual kind are added to those of one channel or vector.
_PRIOR = 8.0
# A vector whose error in one sample is so many times the usual one took another branch there.
_BRANCH = 6.0
# Such a vector must be near one of the samples: nearer than this share of how far they are apart.
_BETWEEN = 0.6
_OF_OPEN = 1.25  # of the error that a decision costs a vector, where that is less than a branch
_OF_BRANCH = 2.0  # times the largest error of a branch as a whole
# A GPU's exponential is good to about two ulps of float32 and errs to one side, as does rounding of the scale
# or of the softmax weights: a gain of this share of the roundoff is no mistake of a kernel. The exponential
# of a GPU is judged by `benchmarks/sensitivity.py --tensorrt`.
_FAST_EXPONENTIAL, _ONE_SIDED = 2.0**-23, 0.1
# Of few samples the largest is not the largest of many: the 1e-4 quantile of Student's t over that of 8. One
# and two samples, which no export makes, have a number by hand.
_FEW_SAMPLES = {1: 60.0, 2: 15.0, 3: 3.5, 4: 2.1, 5: 1.5, 6: 1.25, 7: 1.1}
# An error has the direction of a known mistake where chance leaves at most so much of one.
_SUSPECT_CHANCE = 0.7
# A kernel rounds to nearest, not at random: of the error of the same number in BF16, its error in FP16 holds
# half the square of the ratio of their roundoffs, however many numbers there are. Twice that is allowed.
_TO_NEAREST = (2.0**-11 / 2.0**-8) ** 2
# Of many mistakes that are looked for, chance leaves so many standard deviations of one in some sample: right
# runtimes in `benchmarks/own_sensitivity.py --alarms`.
_DEVIATIONS = 2.5
_ALIKE = (0.25, 2.0)  # an error that holds a known mistake so many times is named after it
_SOME, _MOST = 0.1, 0.5  # if it is that much of the error: of one that holds it so many times, and of others
_OUTSTANDING = 3.0  # a head with so many times the error of the usual head is named

Suspects = Mapping[str, tuple[np.ndarray, float | None, float | None]]
"""By known mistake, what it would add, the share of it that chance leaves (None: as in the samples), and of a
factor how far it is from 1."""


def _off_by(excess: float) -> str:
    """How far a factor is from 1, in words; what a large one adds is no multiple of what a small one does."""
    side, size = "small" if excess < 0 else "large", abs(excess)
    return f"{'about' if size <= _MOST_LINEAR else 'over'} {100 * min(size, _MOST_LINEAR):.2g} % too {side}"


ToHeads = Callable[[np.ndarray], np.ndarray]
"""Undoes an output projection: [B, S, E] to [B, Hq, S, D]."""


def is_telling(chance: float) -> bool:
    """Whether a known mistake is distinct from chance, which leaves this share of it in a right result."""
    return chance <= _SUSPECT_CHANCE / FACTOR


def _separated(power: np.ndarray, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean squares [V, C] as a number for each vector times one for each channel.

    A massive element makes neither its vector nor its channel large: it counts as a large usual one. Vectors
    that no sample changes, such as cached keys, say nothing of the others.
    """
    changed = power.any(1)
    if changed.any() and not changed.all():
        vectors = np.zeros(len(power))
        vectors[changed], channels = _separated(power[changed], samples)
        return vectors, channels
    n_vectors, n_channels = power.shape

    def usual(values: np.ndarray) -> float:
        found = values[values > 0]
        return float(np.median(found)) if found.size else 1e-300

    channels = np.maximum(np.median(power, axis=0), 1e-3 * power.mean(0) + 1e-300)
    vectors = np.maximum(np.median(power / channels, axis=1), 1e-3 * (power / channels).mean(1))
    power = np.minimum(power, _MASSIVE * np.outer(np.maximum(vectors, 1e-3 * usual(vectors)), channels))
    for _ in range(3):
        vectors, weight = (power / channels).mean(1), n_channels * samples
        vectors = (weight * vectors + _PRIOR * usual(vectors)) / (weight + _PRIOR)
        channels, weight = (power / vectors[:, None]).mean(0), n_vectors * samples
        channels = np.maximum((weight * channels + _PRIOR * usual(channels)) / (weight + _PRIOR), 1e-300)
    return vectors, channels


class Spread:
    """The error that rounding leaves in every element of a tensor, and in slices of it.

    Measured on samples: the model computed several times, each time rounded at random. A large channel (a
    bias of 10,000) or a large token must not hide the others, so an error is judged in units of what the
    samples have in its vector and its channel. The level of a family of slices is the largest error of any
    slice of it in any sample.

    `errors` [N, ...] has the samples less the oracle; in the last `branches` of them, decisions that rounding
    could change were changed. `tiny` is the rounding of the smallest normal number. `to_heads` brings an
    error back to the heads that an output projection mixes: each of them is judged, too.
    """

    def __init__(
        self,
        errors: np.ndarray,
        oracle: np.ndarray,
        precision: Precision,
        tiny: float,
        *,
        branches: int = 0,
        to_heads: ToHeads | None = None,
        by_head: bool = False,
    ) -> None:
        shape = np.atleast_1d(oracle).shape
        o = oracle.reshape(-1, shape[-1]).astype(np.float64)
        samples = errors.reshape(len(errors), *o.shape)
        plain = samples[: len(samples) - branches] if branches else samples
        self._roundoff, self.samples = precision.roundoff, len(plain)
        self._samples, self._chances = plain.reshape(len(plain), *shape), dict[str, float]()
        self._branches = samples.reshape(len(samples), *shape)
        power = np.mean(np.square(plain, dtype=np.float64), axis=0)
        by_value = np.square(_RESULT_ROUNDING * self._roundoff * o)
        undecided = is_open = np.zeros(len(o), bool)
        if branches:
            sizes = np.sqrt(np.square(samples, dtype=np.float64).mean(2))  # [N, V]
            usual = np.maximum(np.median(sizes[: len(plain)], axis=0), np.median(sizes))
            undecided = sizes.max(0) > _BRANCH * usual
            # Less than that, and more than the other samples allow: none of them took the decision so.
            is_open = ~undecided & (sizes[len(plain) :].max(0) > FACTOR * sizes[: len(plain)].max(0))
        if undecided.any() and not undecided.all():  # which say nothing of a channel, nor of rounding
            own, channels = _separated(power[~undecided], len(plain))
            vectors = np.full(len(o), float(np.median(own)))
            vectors[~undecided] = own
        else:
            vectors, channels = _separated(power, len(plain))
        expected = np.sqrt(np.outer(vectors, channels))
        if branches:
            # Several decisions upstream may be taken in any combination: the samples have some of them.
            share = np.where(undecided, _BETWEEN, np.where(is_open, _OF_OPEN, 0.0))
            expected = np.maximum(expected, (share / FACTOR * sizes.max(0))[:, None])
        self._expected = np.sqrt(np.maximum(np.square(expected), by_value) + tiny**2).reshape(shape)
        self._decided = (~undecided).reshape(*shape[:-1], 1)
        self.undecided = float(undecided.mean()) if len(undecided) else 0.0
        centre = np.median(o, axis=0) if len(o) >= 8 else np.zeros(o.shape[1])
        # A zero among large numbers is exact: it must not outweigh them.
        most = 1 / (_RESULT_ROUNDING * self._roundoff)
        signal = ((o - centre).reshape(shape) / self._expected).clip(-most, most)
        self._signal = signal.astype(np.float32)
        everything = tuple(range(len(shape)))
        self._slices = [(), *((axis,) for axis in everything)]
        self._slices += [everything[:-1], everything] if len(shape) > 1 else []
        if by_head:
            self._slices = [(1,), (0, 1), (1, 2), (0, 1, 2)]
        self._heads, self._to_heads = None, to_heads
        if to_heads is not None:
            pulled = np.stack([to_heads(each.reshape(shape)) for each in samples])
            heads = to_heads(oracle.astype(np.float64))
            self._heads = Spread(pulled, heads, precision, tiny, branches=branches, by_head=True)
        self._levels = self._measure_levels()

    def slices(self, parts: Sequence[Callable[[np.ndarray], np.ndarray]]) -> list[Spread]:
        """The same of parts of the tensor that are alike; their levels are the largest in any of them."""
        found = []
        for part in parts:
            piece = copy(self)
            for name in ("_expected", "_signal"):
                setattr(piece, name, part(getattr(self, name)))
            # Of vectors; the parts may lie along the last axis, as one number for each token does.
            piece._decided = part(np.broadcast_to(self._decided, self._signal.shape))[..., :1]
            piece._samples = np.stack([part(each) for each in self._samples])
            piece._branches = np.stack([part(each) for each in self._branches])
            piece._heads = None
            piece._levels = piece._measure_levels()
            found.append(piece)
        families = zip(*(piece._levels for piece in found), strict=True)
        largest = [tuple(map(max, zip(*levels, strict=True))) for levels in families]
        for piece in found:
            piece._levels = largest
        return found

    def _measure_levels(self) -> list[tuple[float, ...]]:
        """By family of slices: the largest error and gain of any slice in any sample."""
        few = _FEW_SAMPLES.get(self.samples, 1.0)
        shape = self._signal.shape
        # What took another branch is judged vector by vector only; mostly there is none.
        self._weight = (
            None if self._decided.all() else np.broadcast_to(self._decided, shape).astype(np.float64)
        )
        power = self._weighted(np.square(self._signal))
        least = max(_FAST_EXPONENTIAL, _ONE_SIDED * self._roundoff)
        self._families: list[tuple[Any, ...]] = []
        for kept in self._slices:
            away = tuple(axis for axis in range(len(shape)) if axis not in kept)
            by_vector = away == (len(shape) - 1,)
            count: Any = max(1, math.prod(shape[axis] for axis in away))
            if self._weight is not None and not by_vector:
                count = np.maximum(self._weight.sum(away), 1.0)
            strength = np.maximum(power.sum(away, dtype=np.float64), 1e-30)
            noise = np.hypot(1 / np.sqrt(strength), least)
            self._families.append((kept, away, by_vector, count, strength, noise))
        found = [
            [(float(sizes.max()), float(gains.max())) for _, sizes, gains in self._of_slices(each)]
            for each in self._samples
        ]
        return [
            (max(1.0, *(each[k][0] for each in found)), few * max(1.0, *(each[k][1] for each in found)))
            for k in range(len(self._slices))
        ]

    def _weighted(self, values: np.ndarray) -> np.ndarray:
        return values if self._weight is None else values * self._weight

    def _share(self, change: np.ndarray, error: np.ndarray) -> float:
        along = change / self._expected * self._decided
        return float((along * (error / self._expected)).sum()) / max(float(np.square(along).sum()), 1e-300)

    def _part_of(self, change: np.ndarray, error: np.ndarray) -> float:
        """How much of an error a known mistake is, in any amount: of its squares."""
        whole = np.square(error / self._expected * self._decided).sum()
        part = self._share(change, error) ** 2 * np.square(change / self._expected * self._decided).sum()
        return float(part) / max(float(whole), 1e-300)

    def worst_slice(
        self, error: np.ndarray, suspects: Suspects = MappingProxyType({})
    ) -> tuple[float, float, str]:
        """The largest error and gain of a slice, in units of the samples' largest, and where the worse is.

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
        for name, (change, known, excess) in suspects.items():
            if is_telling(chance := self._chance_in_samples(name, change) if known is None else known):
                part = self._share(change, error)
                amount = abs(part)
                share = amount / chance
                # Of a large error that is something else, a known mistake may be a small part by chance.
                least = _SOME if _ALIKE[0] < amount < _ALIKE[1] else _MOST
                if share > max(local, gain) and self._part_of(change, error) > least:
                    place = f"as with {name}" + ("" if excess is None else f", {_off_by(part * excess)}")
                gain = max(gain, share)
        return local, gain, place

    def _chance_in_samples(self, name: str, change: np.ndarray) -> float:
        """The largest share of a known mistake that chance leaves in a sample."""
        if name not in self._chances:
            shares = [abs(self._share(change, each)) for each in self._samples]
            self._chances[name] = max(max(shares) * _FEW_SAMPLES.get(self.samples, 1.0), _TO_NEAREST)
        return self._chances[name]

    def chance_of(self, change: np.ndarray, errors: Sequence[np.ndarray]) -> float:
        """The share of a known mistake that chance leaves in a right result; with further samples."""
        shares = np.array([self._share(change, each) for each in (*self._samples, *errors)])
        largest = float(np.abs(shares[: len(self._samples)]).max())
        return max(largest, _DEVIATIONS * float(np.sqrt(np.square(shares).mean())), _TO_NEAREST)

    def _worst(self, error: np.ndarray) -> tuple[float, float, str]:
        found = []
        for (size, gain, *places), levels in zip(self._statistics(error), self._levels, strict=True):
            found += [(size / levels[0], 0.0, places[0]), (0.0, gain / levels[1], places[1])]
        local, gain = max(each[0] for each in found), max(each[1] for each in found)
        found.sort(key=lambda each: max(each[:2]), reverse=True)
        # Where everything is wrong, the worst place is still reported, if it is wrong by itself.
        exact = (each[2] for each in found if each[2] != EVERYWHERE and max(each[:2]) > FACTOR)
        return local, gain, next(exact, found[0][2])

    def _from_nearest_branch(self, error: np.ndarray) -> np.ndarray:
        """An error, where decisions are open less that of the nearest sample."""
        open_ = ~np.broadcast_to(self._decided, error.shape)[..., 0]
        if not open_.any():
            return error
        found, rows = error.copy(), error[open_]
        candidates = [np.zeros_like(rows), *(each[open_] for each in self._branches)]
        rest = np.stack([rows - each for each in candidates])  # [N, V, C]
        nearest = np.square(rest).mean(-1).argmin(0)
        found[open_] = rest[nearest, np.arange(len(rows))]
        return found

    def _of_slices(self, error: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray, np.ndarray]]:
        """By family of slices: which axes they keep, the error of each, and its gain."""
        z = self._from_nearest_branch(error) / self._expected
        squares, along = np.square(z), self._weighted(z * self._signal)
        weighted = self._weighted(squares)
        for kept, away, by_vector, count, strength, noise in self._families:
            if away:
                sizes = np.sqrt((squares if by_vector else weighted).sum(away) / count)
                gains = np.abs(along.sum(away)) / strength / noise
            else:
                sizes, gains = np.sqrt(weighted), np.zeros(())
            yield kept, sizes, gains

    def _statistics(self, error: np.ndarray) -> list[tuple[float, float, str, str]]:
        """By family of slices: the largest error, the largest gain, and where they are."""
        rank = self._expected.ndim
        names = _AXES.get(rank, tuple(f"axis {axis}" for axis in range(rank)))
        found = []
        for kept, *both in self._of_slices(error):
            row: list[Any] = []
            places = []
            for values in both:
                at = np.unravel_index(int(np.argmax(values)), np.shape(values))
                place = ", ".join(f"{names[axis]} {int(i)}" for axis, i in zip(kept, at, strict=False))
                row.append(float(values[at]))
                places.append(place or EVERYWHERE)
            found.append((*row, *places))
        return found


# -- How far a result may be from the oracle: as far as random roundings are, times a factor --------

FACTOR = 3.0
"""The budget is this many times the largest error of any sample, measure by measure."""

_FLOAT32 = 4.0  # the factor of float32 over that of other precisions


def factor_of(precision: Precision) -> float:
    """The factor of a precision.

    In float32 the order of accumulation and the approximations of a GPU's functions cost more than rounding.
    """
    return FACTOR * _FLOAT32 if precision.name == "fp32" else FACTOR


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The largest deviation that passes, measure by measure; see `Deviation`."""

    relative_l2: float
    worst_vector: float
    max_abs: float
    gain: float
    local: float = math.inf
    local_gain: float = math.inf
    spread: Spread | None = field(default=None, repr=False, compare=False)

    @property
    def limits(self) -> dict[str, float]:
        """The limits by the name of the measure."""
        return {name: limit for name, limit in vars(self).items() if name != "spread"}

    def exceeded_by(self, deviation: Deviation) -> list[str]:
        """The measures that are over the budget."""
        return [name for name, limit in self.limits.items() if not getattr(deviation, name) <= limit]

    def share_used(self, deviation: Deviation) -> float:
        """The largest share of the budget that a deviation uses; over 1 is out of budget."""
        return max(getattr(deviation, name) / limit for name, limit in self.limits.items())


# A case is judged many times, in other batches and while it is timed: its last budgets are kept.
_RECENT: deque[tuple[np.ndarray, np.ndarray, Precision, ToHeads | None, Budget]] = deque(maxlen=8)


def budget_from_samples(
    samples: np.ndarray,
    oracle: np.ndarray,
    precision: Precision,
    branches: int = 0,
    to_heads: ToHeads | None = None,
) -> Budget:
    """Derive the budget of one tensor from the errors of random roundings, [N, ...]."""
    for known in tuple(_RECENT):
        if known[0] is samples and known[1] is oracle and known[2:4] == (precision, to_heads):
            return known[4]
    if not oracle.size or samples.dtype.kind in "iub":  # right or wrong: there is nothing to measure
        return Budget(relative_l2=math.inf, worst_vector=math.inf, max_abs=math.inf, gain=math.inf)
    tiny = smallest_normal(precision.numpy) * precision.roundoff
    heads = to_heads if oracle.ndim == 3 else None
    spread = Spread(samples, oracle, precision, tiny, branches=branches, to_heads=heads)
    every = [measure(oracle + each.astype(np.float64), oracle) for each in samples]
    plain = every[: len(every) - branches]
    # Where the samples happen to be exact, a result may still be rounded, to subnormal numbers as well.
    size, u = float(_rms(oracle)) or 1.0, precision.roundoff
    # A factor of a whole vector, such as its length, is rounded once: of a few vectors, samples draw too few.
    vectors = oracle.size / (oracle.shape[-1] if oracle.ndim else 1)
    least = max(_FAST_EXPONENTIAL, _ONE_SIDED * u, u / 2 / math.sqrt(vectors))
    rounding, largest = u / 2 + tiny / size, float(np.abs(oracle).max())
    of_vector = u / 2 + tiny / size / _SMALLEST_VECTOR
    few, factor = _FEW_SAMPLES.get(len(plain), 1.0), factor_of(precision)

    def limit(name: str, least: float, more: float = 1.0) -> float:
        """The factor times the samples'; another branch may be taken, and no more than that."""
        own = factor * more * max(least, *(getattr(each, name) for each in plain))
        others = (getattr(each, name) for each in every[len(plain) :])
        return max(own, *(_OF_BRANCH * each for each in others), 0.0)

    budget = Budget(
        # Other branches of a decision are judged vector by vector, and by their largest errors as a whole.
        relative_l2=limit("relative_l2", rounding),
        worst_vector=limit("worst_vector", of_vector),
        max_abs=limit("max_abs", (u * largest + 2 * tiny) / size),
        gain=limit("gain", least + tiny / size, few),
        local=factor,
        local_gain=factor,
        spread=spread,
    )
    _RECENT.append((samples, oracle, precision, to_heads, budget))
    return budget


def relative_error(got: np.ndarray, oracle: np.ndarray) -> float:
    """The size of the error over that of the oracle, which counts at least as the smallest normal numbers.

    Numbers below those lose their digits, whatever program computes them.
    """
    smallest = 1e-30 if got.dtype.kind in "iub" else smallest_normal(got.dtype)
    error = float(np.linalg.norm(got.astype(np.float64) - oracle))
    return error / max(float(np.linalg.norm(oracle)), smallest * math.sqrt(max(got.size, 1)))


# -- How logits agree ------------------------------------------------------------------------------

_TOP = 5


class Agreement(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How logits agree with the reference, over all positions."""

    positions: Annotated[int, means("positions that were compared")]
    top1: Annotated[float, means("share of positions with the same largest logit as the reference")]
    top5: Annotated[
        float, means("share of the reference's five largest logits that are among the five largest here")
    ]
    kl: Annotated[
        float | None,
        means("mean Kullback-Leibler divergence from the reference, nats; null if a logit is not finite"),
    ]
    kl_max: Annotated[float | None, means("the largest; null as above")]


class AgreementCounts(Struct, frozen=True, kw_only=True):
    """How logits agree, as sums over positions."""

    positions: int = 0
    top1: int = 0
    top5: float = 0.0
    kl: float | None = 0.0  # None where a logit is not finite
    kl_max: float | None = 0.0


def count_agreement(true: np.ndarray, got: np.ndarray) -> AgreementCounts:
    """Compare logits along the last axis with the reference."""
    if true.shape != got.shape or true.ndim < 1 or true.shape[-1] < 2 or not true.size:
        return AgreementCounts()
    a, b = (each.reshape(-1, each.shape[-1]).astype(np.float64) for each in (true, got))
    if not np.isfinite(b).all():
        return AgreementCounts(positions=len(a), kl=None, kl_max=None)
    many = min(_TOP, a.shape[1])
    best, others = (np.argpartition(-each, many - 1, axis=-1)[:, :many] for each in (a, b))
    shared = (best[:, :, None] == others[:, None, :]).any(-1).mean(-1)
    p, q = (each - _log_sum(each) for each in (a, b))
    kl = np.maximum((np.exp(p) * (p - q)).sum(-1), 0.0)
    same = a.argmax(-1) == b.argmax(-1)
    return AgreementCounts(
        positions=len(a), top1=int(same.sum()), top5=float(shared.sum()), kl=float(kl.sum()),
        kl_max=float(kl.max()),
    )  # fmt: skip


def _log_sum(logits: np.ndarray) -> np.ndarray:
    top = logits.max(-1, keepdims=True)
    return np.asarray(top + np.log(np.exp(logits - top).sum(-1, keepdims=True)))


def joined_agreement(parts: Iterable[AgreementCounts]) -> Agreement | None:
    """How logits agree over all positions of several parts; None where there are none."""
    found = [each for each in parts if each.positions]
    total = sum(each.positions for each in found)
    if not total:
        return None
    sums, largest = [each.kl for each in found], [each.kl_max for each in found]
    return Agreement(
        positions=total,
        top1=sum(each.top1 for each in found) / total,
        top5=sum(each.top5 for each in found) / total,
        kl=None if None in sums else sum(each or 0.0 for each in sums) / total,
        kl_max=None if None in largest else max(each or 0.0 for each in largest),
    )
