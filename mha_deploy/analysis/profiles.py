"""Optimization profiles from the sizes that occur in data, and what two of them would gain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mha_deploy.model.spec import Axis, Sizes

_MOST_SPLITS = 12  # places at which a range is tried to be split
_LEAST_GAIN = 0.02  # below it, a second profile is not worth its memory


@dataclass(frozen=True, kw_only=True)
class ProfileProposal:
    """The ranges of sizes that occur, and the best split of them into two profiles.

    The times are roofline bounds of all samples, each padded to the largest sizes of its profile: what fixed
    shapes cost, and at most what a profile can lose by kernels that are chosen for another size.
    """

    samples: int
    ranges: Mapping[str, Axis]  # of the axes: the smallest, the median and the largest size
    sizes: Mapping[str, Mapping[int, int]]  # of each axis: how many samples have each size
    exact_seconds: float  # of all samples at their own sizes
    one_seconds: float  # with one profile
    split: tuple[str, int] | None = None  # the axis, and the largest size of the first of two profiles
    two_seconds: float | None = None  # with two
    profiles: tuple[Mapping[str, Axis], ...] = ()  # the proposed ones

    @property
    def gain(self) -> float:
        """The share of the time that the second profile saves."""
        return 0.0 if self.two_seconds is None else 1 - self.two_seconds / self.one_seconds

    @property
    def options(self) -> list[str]:
        """The profiles as options of `build-engine`."""
        made = (",".join(f"{name}={axis}" for name, axis in each.items()) for each in self.profiles)
        return [f"--profile {text}" for text in made]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "samples": self.samples,
            "ranges": {name: str(axis) for name, axis in self.ranges.items()},
            "sizes": {
                name: {str(n): count for n, count in each.items()} for name, each in self.sizes.items()
            },
            "exact_seconds": self.exact_seconds,
            "one_seconds": self.one_seconds,
            "two_seconds": self.two_seconds,
            "split": None if self.split is None else {"axis": self.split[0], "up_to": self.split[1]},
            "gain": self.gain,
            "profiles": self.options,
        }


def propose_profiles(found: Sequence[Sizes], seconds: Callable[[Sizes], float]) -> ProfileProposal:
    """Profiles for the sizes of samples; `seconds` is the bound of one call at some sizes."""
    known: dict[tuple[tuple[str, int], ...], float] = {}

    def bound(sizes: Sizes) -> float:
        key = tuple(sorted(sizes.items()))
        if key not in known:
            known[key] = seconds(sizes)
        return known[key]

    def padded(group: Sequence[Sizes]) -> float:
        return len(group) * bound({name: axis.max for name, axis in ranges_of(group).items()})

    one, ranges = padded(found), ranges_of(found)
    counts = {name: dict(sorted(Counter(sizes[name] for sizes in found).items())) for name in ranges}
    best: tuple[float, str, int] | None = None
    for name, axis in ranges.items():
        splits = [size for size in counts[name] if size < axis.max]
        for split in splits[:: max(1, -(-len(splits) // _MOST_SPLITS))]:
            groups = ([s for s in found if s[name] <= split], [s for s in found if s[name] > split])
            both = sum(map(padded, groups))
            if best is None or both < best[0]:
                best = both, name, split
    exact = sum(count * bound(dict(key)) for key, count in Counter(map(_key, found)).items())
    about: dict[str, Any] = {"samples": len(found), "ranges": ranges, "sizes": counts}
    about |= {"exact_seconds": exact, "one_seconds": one}
    if best is None or best[0] > (1 - _LEAST_GAIN) * one:
        return ProfileProposal(**about, profiles=(ranges,))
    both, name, split = best
    groups = ([s for s in found if s[name] <= split], [s for s in found if s[name] > split])
    # Smaller sizes cost a profile nothing, and those between the two groups may come another time.
    least = [{each: axis.min for each, axis in ranges.items()} for _ in groups]
    least[1][name] = split + 1
    profiles = tuple(
        {each: replace(axis, min=low[each]) for each, axis in ranges_of(group).items()}
        for group, low in zip(groups, least, strict=True)
    )
    return ProfileProposal(**about, split=(name, split), two_seconds=both, profiles=profiles)


def _key(sizes: Sizes) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(sizes.items()))


def ranges_of(found: Sequence[Sizes]) -> dict[str, Axis]:
    """The smallest, the median and the largest size of every axis."""
    by_axis = {name: sorted(sizes[name] for sizes in found) for name in found[0]}
    return {
        name: Axis(min=sizes[0], opt=sizes[len(sizes) // 2], max=sizes[-1]) for name, sizes in by_axis.items()
    }
