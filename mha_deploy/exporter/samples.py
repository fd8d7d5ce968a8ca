"""Samples of what a precision costs a model: it is computed several times, each time rounded at random."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np

from mha_deploy.bundle.cases import Arrays, Baseline
from mha_deploy.model.precision import Precision
from mha_deploy.rounding import accumulation_roundoff, accumulations, nearest, rounded, sample_count

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_LONG_S = 0.02  # of a run: several short ones at once would wait for Python's lock

T = TypeVar("T")
Operands = list[np.ndarray | None]
"""The operands of the decisions of one run, in their order; None for one that is too large to keep."""


DECISION_ELEMENTS = 1 << 22  # of the operand of a decision that is followed


class RoundingMode:
    """How a model is computed: in FP64, or rounded at random where kernels round.

    Without a precision nothing is rounded; the operands of decisions are noted. `changes` are added to these
    operands, with a sign, so that decisions within rounding are taken otherwise.
    """

    def __init__(
        self,
        precision: Precision | None = None,
        seed: int = 0,
        changes: Sequence[np.ndarray | None] = (),
        sign: int = 1,
    ) -> None:
        self._bits = precision.significand_bits if precision else None
        self._accumulated = accumulation_roundoff(precision)
        self._seed, self._changes, self._sign = seed, changes, sign
        # A factor that the precision does not have is rounded once for all numbers that it scales, and their
        # mean is off: a constant, the weight of a norm, or the length that a vector is divided by. Some
        # runtimes keep it in float32, so every other sample has it as it is.
        self._factor_bits = self._bits if seed % 2 == 0 else None
        self.decisions: Operands = []
        self.changed = False  # whether a decision was taken otherwise
        self.repeated: Any = None  # what other runs on the same inputs have computed

    @staticmethod
    def remember() -> Any:
        """What runs on the same inputs share, so that none computes again what all have in common."""

    def run_all(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """The results of several runs in modes like this one."""
        return [work() for work in works]

    @property
    def grid_flops(self) -> int:
        """The work of a model that rounds to a grid; 0 of others."""
        return 0

    def rounded_array(self, array: Any) -> Any:
        """FP64 numbers, rounded; others as they are."""
        if self._bits is None or not isinstance(array, np.ndarray):
            return array
        return rounded(array, self._bits, self._seed)

    def factor(self, numbers: np.ndarray) -> np.ndarray:
        """Constant factors of what was rounded, in FP64, as this sample has them."""
        if self._factor_bits is None:
            return numbers
        near = nearest(numbers, self._factor_bits)
        return np.where(np.abs(near) <= _FLOAT32_MAX, near, numbers)  # the lowest number, which hides keys


Mode = TypeVar("Mode", bound=RoundingMode)


class Baselines(Mapping[str, Baseline]):
    """Baselines by the type of accumulation, each computed when it is first asked for: few need all."""

    def __init__(self, kinds: Sequence[str], make: Callable[[str], Baseline]) -> None:
        self._kinds, self._make, self._made = tuple(kinds), make, dict[str, Baseline]()

    def __getitem__(self, kind: str) -> Baseline:
        if kind not in self._kinds:
            raise KeyError(kind)
        if kind not in self._made:
            self._made[kind] = self._make(kind)
        return self._made[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)


def sample_case(
    make_mode: type[Mode],
    precision: Precision,
    compute: Callable[[Mode], Arrays],
    kept: Callable[[Arrays], Arrays] = dict,
) -> tuple[Arrays, Baselines, Mode]:
    """What is right, by the type of accumulation what random rounding makes of it, and the exact mode.

    `kept` is the part of the results that samples are taken of.
    """
    oracle, (baselines,), exact = sample_parts(make_mode, precision, compute, [kept])
    return oracle, baselines, exact


def sample_parts(
    make_mode: type[Mode],
    precision: Precision,
    compute: Callable[[Mode], Arrays],
    parts: Sequence[Callable[[Arrays], Arrays]],
) -> tuple[Arrays, list[Baselines], Mode]:
    """The same of several parts of the results, each with its own number of samples: none runs twice."""
    exact, began = make_mode(None), time.perf_counter()
    oracle = compute(exact)
    is_long = time.perf_counter() - began > _LONG_S
    wanted = [kept(oracle) for kept in parts]
    numbers = [sum(array.size for array in true.values()) for true in wanted]

    def errors(mode: Mode) -> list[Arrays]:
        results, found = compute(mode), list[Arrays]()
        for kept, true in zip(parts, wanted, strict=True):
            got = kept(results)
            floats = {
                name: mode.rounded_array(got[name]) - x for name, x in true.items() if x.dtype == np.float64
            }
            found.append({**got, **{name: error.astype(np.float32) for name, error in floats.items()}})
        return found

    @cache
    def sampled(kind: str) -> list[Baseline]:
        rounding, shared = replace(precision, accumulate=kind), make_mode.remember()
        counts = [sample_count(each, kind, exact.grid_flops) for each in numbers]
        modes = [make_mode(rounding, seed) for seed in range(1, max(counts) + 1)]
        for mode in modes:
            mode.repeated = shared
        run_all = modes[0].run_all if is_long else RoundingMode().run_all
        found, stacked = run_all([partial(errors, mode) for mode in modes]), dict[int, Baseline]()
        for count in dict.fromkeys(counts):
            changes = decision_spread(exact.decisions, [mode.decisions for mode in modes[:count]])
            pair = [make_mode(rounding, count + 1, changes, sign) for sign in (1, -1)] if changes else []
            taken = run_all([partial(errors, mode) for mode in pair])
            # Where no decision was near enough to change, the two say nothing new.
            others = [each for each, mode in zip(taken, pair, strict=True) if mode.changed]
            for at in (at for at, each in enumerate(counts) if each == count):
                every = [each[at] for each in (*found[:count], *others)]
                samples = {name: np.stack([each[name] for each in every]) for name in wanted[at]}
                stacked[at] = Baseline(samples, len(others))
        return [stacked[at] for at in range(len(parts))]

    def baselines(at: int) -> Baselines:
        return Baselines(accumulations(precision), lambda kind: sampled(kind)[at])

    return oracle, [baselines(at) for at in range(len(parts))], exact


def decision_spread(exact: Operands, samples: Sequence[Operands]) -> Operands:
    """What rounding does to the operand of every decision; empty where it touches none of them."""
    found: Operands = []
    for index, true in enumerate(exact):
        near = [each[index] for each in samples if index < len(each)]
        alike = [x - true for x in near if x is not None and true is not None and x.shape == true.shape]
        power = np.square(alike).mean(0) if alike else np.zeros(())
        if not power.size or not np.isfinite(power).all() or not power.any():
            found.append(None)
            continue
        # By chance the error of an element is small in all samples: it has at least the usual one of its row.
        usual = power.mean(-1, keepdims=True) if power.ndim else power
        found.append(np.sqrt(np.maximum(power, usual)))
    return found if any(each is not None for each in found) else []
