"""The sizes at which a model is run, judged and timed: planned here, whoever runs it.

Golden cases of an export, corners of profiles, points to time; each within a limit on its cost.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mha_deploy.bundle.cases import stored_bytes
from mha_deploy.errors import SpecError, nearest
from mha_deploy.model.spec import Axis, Dim, ModelSpec, Sizes
from mha_deploy.options import ExportOptions

# -- Sizes to test: lengths that no kernel tiles evenly, and the largest that a limit allows -------

_ODD_LENGTHS = (37, 13, 7, 5, 3)


@dataclass(frozen=True, kw_only=True)
class SizeLimit:
    """Cost limit of one run of a layer: its work, and the memory of the oracle, KV cache included."""

    gflop: float = 100.0
    gib: float = 4.0

    def __str__(self) -> str:
        return f"{self.gflop:g} GFLOP and {self.gib:g} GiB"

    def allows(self, spec: ModelSpec, sizes: Sizes) -> bool:
        """Whether a layer of these sizes stays below the limit."""
        return spec.flops_at(sizes) <= self.gflop * 1e9 and spec.oracle_bytes(sizes) <= self.gib * 2**30


_QUICK = SizeLimit(gflop=2.0, gib=0.5)


def shrunk(spec: ModelSpec, sizes: Sizes, smallest: Sizes, limit: SizeLimit) -> dict[str, int]:
    """Halve the batch, then the longest axis, until the limit allows the sizes or nothing can shrink."""
    found = dict(sizes)
    while not limit.allows(spec, found):
        shrinkable = [name for name in found if found[name] > smallest[name]]
        if not shrinkable:
            break
        longest = max(shrinkable, key=lambda axis: found[axis])
        name = longest if spec.batch not in shrinkable else spec.batch
        found[name] = max(smallest[name], found[name] // 2)
    return found


def random_sizes(
    spec: ModelSpec, axes: Mapping[str, Axis], dice: random.Random, limit: SizeLimit | None = None
) -> dict[str, int]:
    """Sizes from inside of axes, at random; one that runs in a moment."""
    limit = replace(limit or _QUICK, gflop=_QUICK.gflop, gib=_QUICK.gib)
    inside = {
        name: sorted((min(axis.min + 1, axis.max), max(axis.max - 1, axis.min)))
        for name, axis in axes.items()
    }
    drawn = {name: dice.randint(*ends) for name, ends in inside.items()}
    return shrunk(spec, drawn, {name: axis.min for name, axis in axes.items()}, limit)


def has_inside(axes: Mapping[str, Axis]) -> bool:
    """Whether an axis has sizes between its ends."""
    return any(axis.max - axis.min > 1 for axis in axes.values())


def sizes_name(sizes: Sizes) -> str:
    """Sizes as the name of a case or a file: `B2-S33`."""
    return "-".join(f"{axis}{size}" for axis, size in sizes.items())


def odd_sizes(axes: Mapping[str, Axis], batch: str = "B") -> dict[str, int]:
    """Lengths that no kernel tiles evenly, and a batch of three where that is allowed."""
    return {
        name: first_allowed(
            axis, (3,) if name == batch else (*_ODD_LENGTHS, (axis.min + 1) | 1, axis.min | 1)
        )
        for name, axis in axes.items()
    }


def first_allowed(axis: Axis, candidates: Sequence[int]) -> int:
    """The first size that an axis allows, or its optimum."""
    return next((size for size in candidates if axis.min <= size <= axis.max), axis.opt)


def spread(choices: Sequence[int], most: int) -> list[int]:
    """All of them, or some from the first to the last."""
    count, last = min(len(choices), most), len(choices) - 1
    return [choices[round(i * last / max(1, count - 1))] for i in range(count)]


# -- Where a layer is timed: its optimum, or prefill and decode step of one with a KV cache --------

PREFILL, DECODE, USUAL = TIMED_CASES = "prefill", "decode", "opt"
LONG_PAST = "long-past"
PROBE, MASKS = "probe", "masks"
_FEW = 8  # entries of a cache: nothing splits them


@dataclass(frozen=True, kw_only=True)
class TimedPoint:
    """One set of sizes to run or time a layer at: `opt`, `prefill`, `decode`, or named by its sizes.

    `past` are the valid entries of a preallocated KV cache before the call, of every batch element: they are
    data, not an axis. None for other layers.
    """

    name: str
    sizes: Mapping[str, int]
    past: int | None = None
    note: str = ""  # what had to be made smaller
    probed: bool = False  # whether large tokens are run there as well


def usual_points(spec: ModelSpec) -> tuple[TimedPoint, ...]:
    """The optimum of every axis; with a KV cache, a prefill and a decode step.

    `prefill` adds the optimal number of tokens to a KV cache that is as empty as the axes allow. `decode`
    adds the fewest tokens, usually one, behind the optimal past; a preallocated cache is full then, the worst
    case. Where the optimal number of tokens is the minimum, there is only `decode`.
    """
    usual, least = spec.sizes("opt"), spec.sizes("min")
    if spec.cache == "none":
        return (TimedPoint(name=USUAL, sizes=usual),)
    empty = {"P": least["P"]} if spec.cache == "dynamic" else {}
    past = 0 if spec.cache == "preallocated" else None
    prefill = TimedPoint(name=PREFILL, sizes={**usual, **empty}, past=past)
    decode = with_full_cache(spec, DECODE, {**usual, "S": least["S"]})
    return (prefill, decode) if usual["S"] > least["S"] else (decode,)


def with_full_cache(spec: ModelSpec, name: str, sizes: Mapping[str, int]) -> TimedPoint:
    """A point whose preallocated KV cache, if it has one, is full once the new tokens are in it."""
    past = sizes["T"] - sizes["S"] if spec.cache == "preallocated" else None
    return TimedPoint(name=name, sizes=dict(sizes), past=past)


def long_past(spec: ModelSpec, axes: Mapping[str, Axis], limit: SizeLimit) -> tuple[TimedPoint, ...]:
    """The fewest queries behind the longest past that a limit allows; none without a KV cache.

    Then behind pasts around the largest power of two below it, where kernels change how they split the keys.
    The past is not shrunk below its optimum; batch elements are left out first.
    """
    cache = spec.kv_cache
    if cache is None or (cache.is_preallocated and not cache.positions):
        return ()
    S = axes[cache.new].min
    wanted = {name: each.opt for name, each in axes.items()} | {cache.new: S}
    wanted |= {name: axes[name].max for name in (cache.entry_axes if cache.past is None else (cache.past,))}
    least = {name: min(size, axes[name].opt) for name, size in wanted.items()}
    least |= {name: each.min for name, each in axes.items() if name == spec.batch}
    sizes = shrunk(spec, wanted, least, limit)
    text = ",".join(f"{name}={size}" for name, size in wanted.items())
    note = f"{text} was shrunk to stay within {limit}" if sizes != wanted else ""
    note = note if limit.allows(spec, sizes) else f"{text} costs more than {limit}"
    # Once the new tokens are in, it is full.
    longest = cache.room_at(sizes) - S if cache.past is None else sizes[cache.past]
    power = 1 << max(0, (longest - 1).bit_length() - 1)  # the largest with a past behind it
    least_past = 0 if cache.past is None else axes[cache.past].min
    around = (power - 1, power, power + 1) if longest > _FEW else ()
    points = []
    for past in dict.fromkeys((longest, *(each for each in around if least_past <= each <= longest))):
        name = LONG_PAST if past == longest else f"past-{past}"
        if cache.past is None:
            point = TimedPoint(name=name, sizes=sizes, past=past, note=note)
        else:
            point = TimedPoint(name=name, sizes={**sizes, cache.past: past}, note=note)
        points.append(replace(point, probed=past == longest))
        note = ""
    return tuple(points)


def points_from_text(spec: ModelSpec, text: str) -> tuple[TimedPoint, ...]:
    """Read `opt`, for all of `usual_points`; `prefill` or `decode`; or sizes such as `B=8,S=1,P=2048`."""
    usual = usual_points(spec)
    if named := tuple(point for point in usual if text in (USUAL, point.name)):
        return named
    if "=" not in text and spec.cache != "none":
        names = (USUAL, *(point.name for point in usual))
        hint = nearest(text, names, "Or sizes, such as B=1,S=1.")
        raise SpecError(f"{spec.name} has no such sizes to time.", got=text, hint=hint, options=("at",))
    sizes = spec.parse_sizes(text)
    return (with_full_cache(spec, sizes_name(sizes), sizes),)


# -- Which golden cases an export gets: the corners of the axes, within a budget -------------------

MASK_OF_ONE = "mask-of-one"
RANDOM_SIZES = ("random-1", "random-2")
CASES = ("min", "opt", "odd", "ragged", "large")
CACHE_CASES = ("min", "prefill", "decode", "odd", "ragged", "large", LONG_PAST)
MODULE_CASES = ("opt", "min", "odd", "large")  # opt first: its work bounds that of the others
ALL_CASES = (*CASES, *CACHE_CASES, PROBE, *RANDOM_SIZES, MASKS, MASK_OF_ONE)
_RAGGED_BATCH = 4
_RAGGED_LENGTH = 24
# A key this many times as large dominates the heads in which it is attended: whether a query attends to it,
# and at which position, shows in the output at any length. Among random keys it is one of thousands.
LOUDNESS = 4.0
_CACHE_BYTES = 1 << 30  # of the FP64 oracle's
# What a golden case takes for each number of its largest tensor, as measured: some are held in FP64 and with
# random rounding at once.
_BYTES_OF_A_NUMBER = 72


@dataclass(frozen=True, kw_only=True)
class PlannedCase:
    """One case to capture."""

    name: str
    sizes: dict[str, int]
    ragged: bool = False  # whether the batch elements have lengths of their own, the extreme ones included
    past: int | None = None  # valid entries of a preallocated cache in every batch element; None: drawn
    probe: bool = False  # whether some tokens are large: what a mask hides wrongly shows then
    # What the boolean masks of a user's model are, by batch element, in turn
    masks: tuple[MaskFill, ...] = ()
    given: Mapping[str, np.ndarray] | None = None  # inputs of a user's own, where they are not drawn

    def change(self, name: str, array: np.ndarray, dims: Sequence[Dim]) -> np.ndarray:
        """An input of a user's model, as this case has it: with large tokens, or as a mask."""
        if self.masks and dims and is_mask(name, array.dtype.name):
            kept = [mask.of(array.shape[-1]) for mask in self.masks]
            if array.ndim == 1:
                return kept[0].astype(array.dtype)
            made = [np.broadcast_to(kept[b % len(kept)], row.shape) for b, row in enumerate(array)]
            return np.array(made, array.dtype).reshape(array.shape)
        at = {3: 1, 4: 2}.get(array.ndim)  # hidden states [B, S, E]; keys and values [B, Hkv, P, D]
        if not self.probe or array.dtype.kind not in "fV" or at is None or not isinstance(dims[at], str):
            return array
        loud, length = array.copy(), array.shape[at]
        edges = sorted({each for each in (0, (length - 1) // 2, length - 1) if each >= 0})
        loud[(slice(None),) * at + (edges,)] *= np.asarray(LOUDNESS, array.dtype)
        return loud


class MaskFill(enum.Enum):
    """A boolean mask over positions, whichever of its two values hides them."""

    TAIL = "the second half"
    HEAD = "the first half"
    NONE = "none"
    ALL = "all"

    def of(self, length: int) -> np.ndarray:
        """Whether each position is kept."""
        at = np.arange(length)
        kept = {MaskFill.TAIL: at < -(-length // 2), MaskFill.HEAD: at >= length // 2, MaskFill.NONE: at >= 0}
        return kept.get(self, at < 0)


def is_mask(name: str, kind: str) -> bool:
    """Whether an input of a user's model is a mask over positions: boolean, or integers of such a name."""
    return kind == "bool" or ("mask" in name.lower() and kind.startswith(("int", "uint")))


@dataclass(frozen=True, kw_only=True)
class GoldenBudget(SizeLimit):
    """What the large case may cost; the others are as large as the spec says."""

    mb: float = 25.0  # on disk, in 10⁶ bytes; as much as the opt case takes is always allowed
    # how many numbers the largest tensor of a module has at given sizes; of a layer that is known
    numbers: Callable[[Sizes], int] = lambda sizes: 0

    def __str__(self) -> str:
        return f"{self.gflop:g} GFLOP, {self.gib:g} GiB or {self.mb:g} MB on disk"

    def allows(self, spec: ModelSpec, sizes: Sizes) -> bool:
        """Whether a case of these sizes stays below the limit."""
        room = max(self.mb * 1e6, stored_bytes(spec, spec.sizes("opt")))
        fits = self.numbers(sizes) * _BYTES_OF_A_NUMBER <= self.gib * 2**30
        return fits and super().allows(spec, sizes) and stored_bytes(spec, sizes) <= room


def golden_budget(options: ExportOptions) -> GoldenBudget:
    """The limit of the large case that was requested."""
    return GoldenBudget(gflop=options.golden_gflop, gib=options.golden_gib, mb=options.golden_mb)


@dataclass(frozen=True, kw_only=True)
class GoldenPlan:
    """The cases to capture, and why others were left out."""

    cases: tuple[PlannedCase, ...]
    notes: tuple[str, ...] = ()


def plan_golden(
    spec: ModelSpec, wanted: Sequence[str] = (), budget: GoldenBudget | None = None
) -> GoldenPlan:
    """Choose the cases: those wanted by name, or by sizes such as `B=2,S=33`; default: all that suit."""
    notes: list[str] = []
    cases = tuple(planned_cases(lambda: spec, wanted or golden_names(spec), budget or GoldenBudget(), notes))
    if not cases:
        known = ", ".join(golden_names(spec))
        raise SpecError(f"No golden case is left for {spec.name}.", got=", ".join(wanted), hint=known)
    return GoldenPlan(cases=cases, notes=tuple(notes))


def golden_names(spec: ModelSpec) -> tuple[str, ...]:
    """The cases that a model may have, by name."""
    if spec.draws_probes:
        return CASES if spec.cache == "none" else CACHE_CASES
    cache, masked = spec.kv_cache, any(each.dims and is_mask(each.name, each.kind) for each in spec.inputs)
    return (
        *MODULE_CASES,
        PROBE,
        *(RANDOM_SIZES if has_inside(spec.axes) else ()),
        *((MASKS, MASK_OF_ONE) if masked else ()),
        *((LONG_PAST,) if cache is not None else ()),
        *(("ragged",) if cache is not None and cache.is_ragged else ()),
    )


def refuse_unknown_case(name: str, known: Sequence[str] = ALL_CASES) -> None:
    """Refuse a case that is neither known by name nor given by its sizes."""
    if "=" not in name and name not in known and name != "opt":
        hint = nearest(name, known, "Or sizes, such as B=2,S=33.")
        raise SpecError("No such golden case.", got=name, hint=hint, options=("golden",))


def planned_cases(
    model: Callable[[], ModelSpec], names: Sequence[str], budget: GoldenBudget, notes: list[str]
) -> Iterator[PlannedCase]:
    """Each case that suits a model, whose cost may be known only once others ran; notes get the others."""
    cases: list[PlannedCase] = []
    for name in names:
        spec = model()
        found = _plan_one(spec, name, budget)
        if isinstance(found, str):
            notes.append(f"no {name} case: {found}")
        elif any(replace(found, name=other.name) == other for other in cases):
            if name not in RANDOM_SIZES:  # which nobody chose
                notes.append(f"no {found.name} case: its sizes are those of another")
        else:
            cases.append(found)
            largest = spec.sizes("max")
            if name == LONG_PAST and spec.kv_cache is not None:
                lengths = (spec.kv_cache.past, *spec.kv_cache.entry_axes)
                largest = {axis: most for axis, most in largest.items() if axis in lengths}
            less = [f"{axis} = {most}" for axis, most in largest.items() if found.sizes[axis] < most]
            if name in ("large", LONG_PAST) and less:
                text = ",".join(f"{axis}={size}" for axis, size in found.sizes.items())
                notes.append(f"the {name} case has {text}: {', '.join(less)} would exceed {budget}")
            yield found


def _plan_one(spec: ModelSpec, name: str, budget: GoldenBudget) -> PlannedCase | str:
    """One case, or why there is none."""
    if "=" in name:
        sizes = spec.parse_sizes(name)
        return PlannedCase(name=sizes_name(sizes), sizes=sizes)
    refuse_unknown_case(name, (*golden_names(spec), PROBE))
    if name in RANDOM_SIZES:
        dice = random.Random(f"{spec.seed} {name}")
        return PlannedCase(name=name, sizes=random_sizes(spec, spec.axes, dice, budget))
    if name in (MASKS, MASK_OF_ONE):
        sizes = {axis: first_allowed(each, (_RAGGED_LENGTH,)) for axis, each in spec.axes.items()}
        batch = _RAGGED_BATCH if name == MASKS else 1
        first = {str(tensor.dims[0]) for tensor in spec.inputs if tensor.dims} & {*spec.axes}
        sizes |= {axis: first_allowed(spec.axes[axis], (batch,)) for axis in first}
        masks = tuple(MaskFill) if name == MASKS else (MaskFill.HEAD,)
        return PlannedCase(name=name, sizes=sizes, masks=masks)
    if name == PROBE:
        return PlannedCase(name=name, sizes=spec.sizes("opt"), probe=True)
    if name in ("min", "opt"):
        # The least that a dynamic cache holds is nothing, too.
        cache = spec.kv_cache if name == "min" else None
        past = 0 if cache is not None and cache.is_preallocated else None
        return PlannedCase(name=name, sizes=spec.sizes(name), past=past)
    if name == "odd":
        return PlannedCase(name=name, sizes=_with_small_batch(spec, odd_sizes(spec.axes, spec.batch_name)))
    if name == "ragged":
        return _ragged_case(spec)
    if name == "large":
        if not spec.has_known_cost:
            return "its cost is not known without the case opt before it"
        largest, usual = spec.sizes("max"), spec.sizes("opt")
        if largest == usual:
            return "opt has the largest sizes of all axes"
        sizes = shrunk(spec, largest, spec.sizes("min"), budget)
        if all(sizes[axis] <= usual[axis] for axis in sizes):
            return f"nothing larger than opt fits {budget}"
        return PlannedCase(name=name, sizes=sizes)
    if name == LONG_PAST:
        found = long_past(spec, spec.axes, budget)
        if not found:
            if spec.kv_cache is not None:
                return "no input places the tokens in the KV cache (positions=)"
            return "the model has no KV cache"
        if not budget.allows(spec, found[0].sizes):
            return f"no past as long as the optimum fits {budget}"
        return PlannedCase(name=name, sizes=dict(found[0].sizes), past=found[0].past)
    # A prompt into an empty cache, or the token that fills it: as timed.
    for point in usual_points(spec):
        if point.name == name:
            return PlannedCase(name=name, sizes=dict(point.sizes), past=point.past)
    single = "the layer takes single tokens only"
    return single if spec.axes["S"].max == 1 else "its usual call is the shortest"


def _ragged_case(spec: ModelSpec) -> PlannedCase | str:
    cache = spec.kv_cache
    if not spec.is_padded and (cache is None or not cache.is_ragged):
        return "the layer takes no lengths"
    sizes = {name: first_allowed(axis, (_RAGGED_LENGTH,)) for name, axis in spec.axes.items()}
    sizes["B"] = max(spec.axes["B"].min, min(_RAGGED_BATCH, spec.axes["B"].max))
    if cache is not None:  # lengths differ by what the new tokens leave free
        new = cache.new
        sizes[new] = max(spec.axes[new].min, min(sizes[new], cache.room // 2))
        if sizes[new] == cache.room:
            return "new tokens leave no room for lengths in the cache"
    return PlannedCase(name="ragged", sizes=_with_small_batch(spec, sizes), ragged=True)


def _with_small_batch(spec: ModelSpec, sizes: dict[str, int]) -> dict[str, int]:
    """A smaller batch where the caches would make up most of a bundle."""
    while spec.oracle_cache_bytes(sizes) > _CACHE_BYTES and sizes["B"] > spec.axes["B"].min:
        sizes = {**sizes, "B": sizes["B"] - 1}
    return sizes


# -- The corners of every optimization profile, or any sizes -----------------------------------------

_INTERIOR = 2  # random sizes of each profile
# The corners with the most keys or queries, which are run with large tokens as well.
_PROBED = {"max", "small-batch-long", "few-queries-many-keys", "many-queries-few-keys", "largest-odd"}


def sweep_points(
    spec: ModelSpec, profiles: Sequence[Mapping[str, Axis]] = (), *, limit: SizeLimit | None = None
) -> tuple[TimedPoint, ...]:
    """Choose the corners of every profile, or of the spec's axes, each set of sizes once.

    What costs more than the limit is shrunk, down to the usual sizes, and a note says so.
    """
    limit = limit or SizeLimit()
    points: dict[tuple[int | None, ...], TimedPoint] = {}
    for index, axes in enumerate(profiles or [spec.axes]):
        prefix = f"profile-{index}-" if len(profiles) > 1 else ""
        for corner, (wanted, sizes) in _corners(spec, axes, limit).items():
            text, left = (",".join(f"{name}={n}" for name, n in each.items()) for each in (wanted, sizes))
            note = f"{text} was shrunk to stay within {limit}" if sizes != wanted else ""
            if not limit.allows(spec, sizes):
                note = f"{text} was shrunk to {left}, which " if sizes != wanted else ""
                note += f"costs more than {limit}"
            key = (*(sizes[axis] for axis in spec.axes), None)
            if key not in points:
                probed = corner in _PROBED
                points[key] = TimedPoint(name=prefix + corner, sizes=sizes, note=note, probed=probed)
            elif note:  # another corner of the same sizes: what was shrunk to get there stays noted
                notes = [points[key].note, f"{prefix}{corner}: {note}"]
                points[key] = replace(points[key], note="; ".join(filter(None, notes)))
        for point in long_past(spec, axes, limit):
            key = (*(point.sizes[axis] for axis in spec.axes), point.past)
            points.setdefault(key, replace(point, name=prefix + point.name))
    return tuple(points.values())


def interior_sizes(
    spec: ModelSpec, profiles: Sequence[Mapping[str, Axis]] = (), *, seed: int = 0
) -> list[dict[str, int]]:
    """A few sizes from inside every profile, or the spec's axes, at random; none where nothing varies."""
    found: list[dict[str, int]] = []
    dice = random.Random(seed)
    for axes in profiles or [spec.axes]:
        for _ in range(_INTERIOR if has_inside(axes) else 0):
            sizes = random_sizes(spec, axes, dice)
            if sizes not in found:
                found.append(sizes)
    return found


def _corners(spec: ModelSpec, axes: Mapping[str, Axis], limit: SizeLimit) -> dict[str, tuple[Sizes, Sizes]]:
    """The sizes wanted at each corner, and those that the limit leaves of them."""
    smallest, usual, largest = (
        {name: getattr(axis, bound) for name, axis in axes.items()} for bound in ("min", "opt", "max")
    )
    batch = [name for name in axes if name == spec.batch]  # not every model of a user has one
    wanted: dict[str, Sizes] = {
        "max": largest,
        "odd": odd_sizes(axes, spec.batch_name),
        "small-batch-long": largest | {name: smallest[name] for name in batch},
        "large-batch-short": smallest | {name: largest[name] for name in batch},
    }
    if {"S", "T"} <= set(axes):
        wanted["few-queries-many-keys"] = {**usual, "S": smallest["S"], "T": largest["T"]}
        wanted["many-queries-few-keys"] = {**usual, "S": largest["S"], "T": smallest["T"]}
    if (cache := spec.kv_cache) is not None and cache.past is not None:
        new, past = cache.new, cache.past
        wanted["long-prompt"] = {**usual, new: largest[new], past: smallest[past]}
    # The usual sizes are run anyway: nothing is shrunk below them, or the largest would be the smaller.
    corners: dict[str, tuple[Sizes, Sizes]] = {"min": (smallest, smallest), "opt": (usual, usual)}
    for name, sizes in wanted.items():
        least = {axis: min(size, usual[axis]) for axis, size in sizes.items()}
        corners[name] = (sizes, shrunk(spec, sizes, least, limit))
    # Odd lengths: one element is missing from the last tile.
    long = corners["small-batch-long"][1]
    odd = {name: max(axis.min, (long[name] - 1) | 1) for name, axis in axes.items()}
    odd |= {name: long[name] for name in batch}
    return {**corners, "largest-odd": (odd, odd)}


# -- The grid of a benchmark -------------------------------------------------------------------------

_ORACLE_CACHE_BYTES = 16 << 30  # what the cache of a grid's point may take in the memory of an FP64 oracle
_MOST_STEPS = 6  # a grid has at most this many batches and as many lengths


def bench_points(spec: ModelSpec) -> tuple[TimedPoint, ...]:
    """A grid of batches and lengths to time, powers of two, with the usual points always in it.

    A layer with a cache is timed at its decode step: over batches and past lengths of a dynamic cache, over
    batches alone of a preallocated one, which is full. Cross attention has S and T of the same length where
    both vary. Points whose cache an FP64 oracle has no room for are left out.
    """
    usual = usual_points(spec)
    found = {(point.past, *point.sizes.items()): point for point in usual}
    # The axes that a length is for: those that vary, or all where none does; for a step, the cache's own.
    lengths = [name for name in spec.axes if name != spec.batch]
    names = [name for name in lengths if spec.axes[name].is_dynamic] or lengths
    names = {"none": names, "dynamic": ["P"]}.get(spec.cache, ["T"])
    axes = [spec.axes[name] for name in names] or [Axis(min=1, opt=1, max=1)]
    smallest, largest = min(axis.min for axis in axes), max(axis.max for axis in axes)
    batches = [{}] if spec.batch is None else [{spec.batch: B} for B in _powers(spec.axes[spec.batch])]
    for batch in batches:
        for length in _powers(Axis(min=smallest, opt=axes[0].opt, max=largest)):
            clipped = {name: max(spec.axes[name].min, min(length, spec.axes[name].max)) for name in names}
            sizes = {**usual[-1].sizes, **batch, **clipped}
            spec.check_sizes(sizes)
            if spec.oracle_cache_bytes(sizes) <= _ORACLE_CACHE_BYTES:
                point = with_full_cache(spec, sizes_name(sizes), sizes)
                found.setdefault((point.past, *point.sizes.items()), point)
    by_length = [*lengths, *batches[0]]
    return tuple(sorted(found.values(), key=lambda each: [each.sizes[name] for name in by_length]))


def _powers(axis: Axis) -> list[int]:
    """Powers of two in a range, thinned to a few; the usual size where there is none."""
    powers = [2**k for k in range(axis.max.bit_length()) if axis.min <= 2**k <= axis.max] or [axis.opt]
    return spread(powers, _MOST_STEPS)
