"""Which shapes to try: the corners of every optimisation profile, and a grid for latencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mha_deploy.analyze.sizes import SizeLimit, odd_sizes, shrunk, sizes_name
from mha_deploy.spec import AttentionSpec, Axis, Sizes

# A grid has at most this many batches and as many lengths.
_MOST_STEPS = 6


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
    spec: AttentionSpec, profiles: Sequence[Mapping[str, Axis]] = (), *, limit: SizeLimit | None = None
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
    """One point for two corners of the same sizes; what was shrunk to get there stays told."""
    told = f"{same.name}: {same.note}" if same.note else ""
    return replace(first, note="; ".join(filter(None, (first.note, told))))


def _corners(
    spec: AttentionSpec, axes: Mapping[str, Axis], limit: SizeLimit
) -> dict[str, tuple[Sizes, Sizes]]:
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
    corners = {name: (sizes, shrunk(spec, sizes, smallest, limit)) for name, sizes in wanted.items()}
    largest_odd = _odd_below(axes, corners["small-batch-long"][1])
    usually = {"min": (smallest, smallest), "opt": (usual, usual)}
    return {**usually, **corners, "largest-odd": (largest_odd, largest_odd)}


def _at(axes: Mapping[str, Axis], bound: str) -> dict[str, int]:
    return {name: getattr(axis, bound) for name, axis in axes.items()}


def _odd_below(axes: Mapping[str, Axis], sizes: Sizes) -> Sizes:
    """The same with odd lengths: one element is missing from the last tile."""
    odd = {name: max(axis.min, (sizes[name] - 1) | 1) for name, axis in axes.items()}
    return {**odd, "B": sizes["B"]}


def _note(spec: AttentionSpec, wanted: Sizes, sizes: Sizes, limit: SizeLimit) -> str:
    if not limit.allows(spec, sizes):
        return f"costs more than {limit}"
    return f"{_text(wanted)} was shrunk to stay within {limit}" if sizes != wanted else ""


def _text(sizes: Sizes) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())


# -- latencies -------------------------------------------------------------------------------------


def bench_points(
    spec: AttentionSpec, *, batches: Sequence[int] | None = None, lengths: Sequence[int] | None = None
) -> tuple[SweepPoint, ...]:
    """A grid of batches and lengths to time, with the usual sizes always in it.

    Args:
        spec: The layer.
        batches: Batches to time; powers of two between the smallest and the largest unless given.
        lengths: Lengths to time, alike. Cross attention has S and T of the same length where both vary.

    Raises:
        SpecError: A given batch or length is outside the axes.
    """
    wanted = {
        tuple(_grid_sizes(spec, B, length, clip=lengths is None).items())
        for B in (_powers(spec.axes["B"]) if batches is None else batches)
        for length in (_powers(_length_range(spec)) if lengths is None else lengths)
    }
    usual = spec.sizes("opt")
    found = [dict(pairs) for pairs in wanted | {tuple(usual.items())}]
    found.sort(key=lambda sizes: ([sizes[name] for name in _length_axes(spec)], sizes["B"]))
    return tuple(
        SweepPoint(name="opt" if sizes == usual else sizes_name(sizes), sizes=sizes) for sizes in found
    )


def _length_axes(spec: AttentionSpec) -> list[str]:
    """The axes that a length is for: those that vary, or all where none does."""
    lengths = [name for name in spec.axes if name != "B"]
    return [name for name in lengths if spec.axes[name].is_dynamic] or lengths


def _length_range(spec: AttentionSpec) -> Axis:
    axes = [spec.axes[name] for name in _length_axes(spec)]
    smallest, largest = min(axis.min for axis in axes), max(axis.max for axis in axes)
    return Axis(min=smallest, opt=axes[0].opt, max=largest)


def _grid_sizes(spec: AttentionSpec, B: int, length: int, *, clip: bool) -> dict[str, int]:
    sizes = {**spec.sizes("opt"), "B": B}
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
