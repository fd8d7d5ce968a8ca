"""Which shapes to try: the corners of every optimisation profile, and a grid for latencies."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mha_deploy.analyze.cost import (
    SizeLimit,
    TimedPoint,
    odd_sizes,
    oracle_cache_bytes,
    shrunk,
    sizes_name,
    usual_points,
    with_full_cache,
)
from mha_deploy.model.spec import Axis, ModelSpec, Sizes

# A grid has at most this many batches and as many lengths.
_MOST_STEPS = 6
# What the cache of a grid's point may take in the memory of an FP64 oracle.
_ORACLE_CACHE_BYTES = 16 << 30


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One set of sizes to try."""

    name: str  # what is special about it
    sizes: Mapping[str, int]  # the size of every axis
    profile: int | None = None  # the optimisation profile it was made for; None where there are none
    note: str = ""  # what had to be made smaller


def sweep_points(
    spec: ModelSpec, profiles: Sequence[Mapping[str, Axis]] = (), *, limit: SizeLimit | None = None
) -> tuple[SweepPoint, ...]:
    """Choose the corners of every profile, or of the spec's axes, each set of sizes once.

    What costs more than the limit is shrunk, down to the usual sizes, and a note says so.
    """
    limit = limit or SizeLimit()
    points: dict[tuple[int, ...], SweepPoint] = {}
    for index, axes in enumerate(profiles or [spec.axes]):
        prefix = f"profile-{index}-" if len(profiles) > 1 else ""
        for corner, (wanted, sizes) in _corners(spec, axes, limit).items():
            text = ",".join(f"{name}={size}" for name, size in wanted.items())
            note = f"{text} was shrunk to stay within {limit}" if sizes != wanted else ""
            if not limit.allows(spec, sizes):
                shrunken = ",".join(f"{name}={size}" for name, size in sizes.items())
                note = f"{text} was shrunk to {shrunken}, which " if sizes != wanted else ""
                note += f"costs more than {limit}"
            key = tuple(sizes[axis] for axis in spec.axes)
            if key not in points:
                profile = index if profiles else None
                points[key] = SweepPoint(name=prefix + corner, sizes=sizes, profile=profile, note=note)
            elif note:  # another corner of the same sizes: what was shrunk to get there stays noted
                notes = [points[key].note, f"{prefix}{corner}: {note}"]
                points[key] = replace(points[key], note="; ".join(filter(None, notes)))
    return tuple(points.values())


def _corners(spec: ModelSpec, axes: Mapping[str, Axis], limit: SizeLimit) -> dict[str, tuple[Sizes, Sizes]]:
    """The sizes wanted at each corner, and those that the limit leaves of them."""
    smallest, usual, largest = (
        {name: getattr(axis, bound) for name, axis in axes.items()} for bound in ("min", "opt", "max")
    )
    wanted: dict[str, Sizes] = {
        "max": largest,
        "odd": odd_sizes(axes),
        "small-batch-long": {**largest, "B": smallest["B"]},
        "large-batch-short": {**smallest, "B": largest["B"]},
    }
    if "T" in axes:
        wanted["few-queries-many-keys"] = {**usual, "S": smallest["S"], "T": largest["T"]}
        wanted["many-queries-few-keys"] = {**usual, "S": largest["S"], "T": smallest["T"]}
    # The usual sizes are run anyway: nothing is shrunk below them, or the largest would be the smaller.
    corners: dict[str, tuple[Sizes, Sizes]] = {"min": (smallest, smallest), "opt": (usual, usual)}
    for name, sizes in wanted.items():
        least = {axis: min(size, usual[axis]) for axis, size in sizes.items()}
        corners[name] = (sizes, shrunk(spec, sizes, least, limit))
    # Odd lengths: one element is missing from the last tile.
    long = corners["small-batch-long"][1]
    odd = {name: max(axis.min, (long[name] - 1) | 1) for name, axis in axes.items()}
    odd["B"] = long["B"]
    return {**corners, "largest-odd": (odd, odd)}


# -- latencies -------------------------------------------------------------------------------------


def bench_points(spec: ModelSpec) -> tuple[TimedPoint, ...]:
    """A grid of batches and lengths to time, powers of two, with the usual points always in it.

    A layer with a cache is timed at its decode step: over batches and past lengths of a dynamic cache, over
    batches alone of a preallocated one, which is full. Cross attention has S and T of the same length where
    both vary. Points whose cache an FP64 oracle has no room for are left out.
    """
    usual = usual_points(spec)
    found = {(point.past, *point.sizes.items()): point for point in usual}
    # The axes that a length is for: those that vary, or all where none does; for a step, the cache's own.
    names = [name for name in spec.axes if name != "B"]
    names = [name for name in names if spec.axes[name].is_dynamic] or names
    if spec.cache != "none":
        names = ["P"] if spec.cache == "dynamic" else ["T"]
    axes = [spec.axes[name] for name in names]
    smallest, largest = min(axis.min for axis in axes), max(axis.max for axis in axes)
    for B in _powers(spec.axes["B"]):
        for length in _powers(Axis(min=smallest, opt=axes[0].opt, max=largest)):
            clipped = {name: max(spec.axes[name].min, min(length, spec.axes[name].max)) for name in names}
            sizes = {**usual[-1].sizes, "B": B, **clipped}
            spec.check_sizes(sizes)
            if oracle_cache_bytes(spec, sizes) <= _ORACLE_CACHE_BYTES:
                point = with_full_cache(spec, sizes_name(sizes), sizes)
                found.setdefault((point.past, *point.sizes.items()), point)

    def short_first(point: TimedPoint) -> tuple[list[int], int]:
        return [point.sizes[name] for name in spec.axes if name != "B"], point.sizes["B"]

    return tuple(sorted(found.values(), key=short_first))


def _powers(axis: Axis) -> list[int]:
    """Powers of two in a range, thinned to a few; the usual size where there is none."""
    powers = [2**k for k in range(axis.max.bit_length()) if axis.min <= 2**k <= axis.max] or [axis.opt]
    last = len(powers) - 1
    thinned = [powers[round(i * last / (_MOST_STEPS - 1))] for i in range(_MOST_STEPS)]
    return powers if last < _MOST_STEPS else thinned


def random_sizes(spec: ModelSpec, seed: int) -> dict[str, int]:
    """Sizes from anywhere in the axes, halved until an oracle can be afforded."""
    draw = random.Random(seed)
    sizes = {name: draw.randint(axis.min, axis.max) for name, axis in spec.axes.items()}
    return shrunk(spec, sizes, spec.sizes("min"), SizeLimit())
