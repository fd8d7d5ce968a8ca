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
    """One set of sizes to try.

    Args:
        name: What is special about it.
        sizes: The size of every axis.
        profile: The optimisation profile it was made for; None where there are none.
        note: What had to be made smaller.
    """

    name: str
    sizes: Mapping[str, int]
    profile: int | None = None
    note: str = ""


def sweep_points(
    spec: ModelSpec, profiles: Sequence[Mapping[str, Axis]] = (), *, limit: SizeLimit | None = None
) -> tuple[SweepPoint, ...]:
    """Choose the corners of every profile, each set of sizes once.

    Args:
        spec: The layer.
        profiles: Ranges of the axes, one set per optimisation profile; none for the spec's own.
        limit: What a point beyond the usual sizes may cost. Larger ones are shrunk, and a note says so.
    """
    limit = limit or SizeLimit()
    points: dict[tuple[int, ...], SweepPoint] = {}
    for index, axes in enumerate(profiles or [spec.axes]):
        prefix = f"profile-{index}-" if len(profiles) > 1 else ""
        for corner, (wanted, sizes) in _corners(spec, axes, limit).items():
            note = _note(spec, wanted, sizes, limit)
            point = SweepPoint(
                name=prefix + corner, sizes=sizes, profile=index if profiles else None, note=note
            )
            key = tuple(sizes[axis] for axis in spec.axes)
            points[key] = _merged(points[key], point) if key in points else point
    return tuple(points.values())


def _merged(first: SweepPoint, same: SweepPoint) -> SweepPoint:
    """One point for two corners of the same sizes; what was shrunk to get there stays noted."""
    noted = f"{same.name}: {same.note}" if same.note else ""
    return replace(first, note="; ".join(filter(None, (first.note, noted))))


def _corners(spec: ModelSpec, axes: Mapping[str, Axis], limit: SizeLimit) -> dict[str, tuple[Sizes, Sizes]]:
    """The sizes wanted at each corner, and those that the limit leaves of them."""
    smallest, usual, largest = (_at(axes, bound) for bound in ("min", "opt", "max"))
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
    corners = {}
    for name, sizes in wanted.items():
        least = {axis: min(size, usual[axis]) for axis, size in sizes.items()}
        corners[name] = (sizes, shrunk(spec, sizes, least, limit))
    largest_odd = _odd_below(axes, corners["small-batch-long"][1])
    usually = {"min": (smallest, smallest), "opt": (usual, usual)}
    return {**usually, **corners, "largest-odd": (largest_odd, largest_odd)}


def _at(axes: Mapping[str, Axis], bound: str) -> dict[str, int]:
    return {name: getattr(axis, bound) for name, axis in axes.items()}


def _odd_below(axes: Mapping[str, Axis], sizes: Sizes) -> Sizes:
    """The same with odd lengths: one element is missing from the last tile."""
    odd = {name: max(axis.min, (sizes[name] - 1) | 1) for name, axis in axes.items()}
    return {**odd, "B": sizes["B"]}


def _note(spec: ModelSpec, wanted: Sizes, sizes: Sizes, limit: SizeLimit) -> str:
    if not limit.allows(spec, sizes):
        shrunken = f"{_text(wanted)} was shrunk to {_text(sizes)}, which " if sizes != wanted else ""
        return f"{shrunken}costs more than {limit}"
    return f"{_text(wanted)} was shrunk to stay within {limit}" if sizes != wanted else ""


def _text(sizes: Sizes) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())


# -- latencies -------------------------------------------------------------------------------------


def bench_points(
    spec: ModelSpec, *, batches: Sequence[int] | None = None, lengths: Sequence[int] | None = None
) -> tuple[TimedPoint, ...]:
    """A grid of batches and lengths to time, with the usual points always in it.

    A layer with a cache is timed at its decode step: over batches and past lengths of a dynamic cache, over
    batches alone of a preallocated one, which is full. Points whose cache an FP64 oracle has no room for are
    left out of the default grid.

    Args:
        spec: The layer.
        batches: Batches to time; default: powers of two between the smallest and the largest.
        lengths: Lengths to time, alike. Cross attention has S and T of the same length where both vary.

    Raises:
        SpecError: A given batch or length is outside the axes.
    """
    asked = batches is not None or lengths is not None
    found = {_key(point): point for point in usual_points(spec)}
    for B in _powers(spec.axes["B"]) if batches is None else batches:
        for length in _powers(_length_range(spec)) if lengths is None else lengths:
            sizes = _grid_sizes(spec, B, length, clip=lengths is None)
            if asked or oracle_cache_bytes(spec, sizes) <= _ORACLE_CACHE_BYTES:
                point = with_full_cache(spec, sizes_name(sizes), sizes)
                found.setdefault(_key(point), point)
    return tuple(sorted(found.values(), key=lambda point: _order(spec, point.sizes)))


def _key(point: TimedPoint) -> tuple[object, ...]:
    return point.past, *point.sizes.items()


def _order(spec: ModelSpec, sizes: Sizes) -> tuple[list[int], int]:
    """Short before long, then small batches before large ones."""
    return [sizes[name] for name in spec.axes if name != "B"], sizes["B"]


def _length_axes(spec: ModelSpec) -> list[str]:
    """The axes that a length is for: those that vary, or all where none does; for a step, the cache's own."""
    if spec.cache != "none":
        return ["P"] if spec.cache == "dynamic" else ["T"]
    lengths = [name for name in spec.axes if name != "B"]
    return [name for name in lengths if spec.axes[name].is_dynamic] or lengths


def _length_range(spec: ModelSpec) -> Axis:
    axes = [spec.axes[name] for name in _length_axes(spec)]
    smallest, largest = min(axis.min for axis in axes), max(axis.max for axis in axes)
    return Axis(min=smallest, opt=axes[0].opt, max=largest)


def _grid_sizes(spec: ModelSpec, B: int, length: int, *, clip: bool) -> dict[str, int]:
    sizes = {**usual_points(spec)[-1].sizes, "B": B}
    for name in _length_axes(spec):
        axis = spec.axes[name]
        sizes[name] = max(axis.min, min(length, axis.max)) if clip else length
    spec.check_sizes(sizes)
    return sizes


def _powers(axis: Axis) -> list[int]:
    """Powers of two in a range, thinned to a few; the usual size where there is none."""
    powers = [2**k for k in range(axis.max.bit_length()) if axis.min <= 2**k <= axis.max] or [axis.opt]
    last = len(powers) - 1
    return (
        powers
        if last < _MOST_STEPS
        else [powers[round(i * last / (_MOST_STEPS - 1))] for i in range(_MOST_STEPS)]
    )


def random_sizes(spec: ModelSpec, seed: int) -> dict[str, int]:
    """Sizes from anywhere in the axes, halved until an oracle can be afforded."""
    draw = random.Random(seed)
    sizes = {name: draw.randint(axis.min, axis.max) for name, axis in spec.axes.items()}
    return shrunk(spec, sizes, spec.sizes("min"), SizeLimit())
