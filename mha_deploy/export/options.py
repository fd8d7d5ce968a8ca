"""Which golden cases an export gets; without PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mha_deploy.analyze.cost import (
    SizeLimit,
    first_allowed,
    odd_sizes,
    oracle_cache_bytes,
    shrunk,
    sizes_name,
    usual_points,
)
from mha_deploy.errors import SpecError, nearest
from mha_deploy.model.spec import AttentionSpec, ModelSpec, Sizes
from mha_deploy.options import ExportOptions

# -- Which golden cases a bundle gets: the corners of the axes, within a budget --------------------

CASES = ("min", "opt", "odd", "ragged", "large")
CACHE_CASES = ("min", "prefill", "decode", "odd", "ragged", "large")
_RAGGED_ROWS = 4
_RAGGED_LENGTH = 24
_CACHE_BYTES = 1 << 30  # of the FP64 oracle's


@dataclass(frozen=True, kw_only=True)
class PlannedCase:
    """One case to capture.

    Args:
        name: Its name.
        sizes: A size for every axis.
        ragged: Whether the rows of the batch have lengths of their own, the extreme ones included.
        past: Valid entries of a preallocated cache in every batch element; default: drawn.
    """

    name: str
    sizes: dict[str, int]
    ragged: bool = False
    past: int | None = None


@dataclass(frozen=True, kw_only=True)
class GoldenBudget(SizeLimit):
    """What the large case may cost; the others are as large as the spec says.

    Args:
        gflop: Work in 10⁹ floating-point operations.
        gib: Memory for the oracle's scores, activations and cache.
        mb: Room on disk in 10⁶ bytes; as much as the opt case takes is always allowed.
    """

    mb: float = 25.0

    def __str__(self) -> str:
        return f"{self.gflop:g} GFLOP, {self.gib:g} GiB and {self.mb:g} MB on disk"

    def allows(self, spec: ModelSpec, sizes: Sizes) -> bool:
        """Whether a case of these sizes stays below the limit."""
        from mha_deploy.bundle.cases import stored_bytes

        room = max(self.mb * 1e6, stored_bytes(spec, spec.sizes("opt")))
        return super().allows(spec, sizes) and stored_bytes(spec, sizes) <= room


def golden_budget(options: ExportOptions) -> GoldenBudget:
    """The limit of the large case that was requested."""
    return GoldenBudget(gflop=options.golden_gflop, gib=options.golden_gib, mb=options.golden_mb)


def large_sizes(spec: ModelSpec, budget: GoldenBudget) -> dict[str, int] | None:
    """The largest sizes that the budget allows; None where no axis is longer than usual then."""
    sizes, usual = shrunk(spec, spec.sizes("max"), spec.sizes("min"), budget), spec.sizes("opt")
    return sizes if any(sizes[name] > usual[name] for name in sizes) else None


def reduction_note(spec: ModelSpec, sizes: Sizes, budget: GoldenBudget) -> list[str]:
    """What of the largest sizes that the axes allow is in no golden case, in one line, or none."""
    text = ",".join(f"{name}={size}" for name, size in sizes.items())
    less = [f"{name} = {size}" for name, size in spec.sizes("max").items() if sizes[name] < size]
    return [f"the large case has {text}: the axes allow {', '.join(less)}, beyond {budget}"] if less else []


@dataclass(frozen=True, kw_only=True)
class GoldenPlan:
    """The cases to capture, and why others were left out."""

    cases: tuple[PlannedCase, ...]
    notes: tuple[str, ...] = ()


def plan_golden(
    spec: AttentionSpec, wanted: Sequence[str] = (), budget: GoldenBudget | None = None
) -> GoldenPlan:
    """Choose the cases.

    Args:
        spec: The layer.
        wanted: Names from `CASES` or `CACHE_CASES`, or sizes such as `B=2,S=33`; all that suit the layer
            unless given.
        budget: Limit of the large case.
    """
    cases: list[PlannedCase] = []
    notes: list[str] = []
    budget = budget or GoldenBudget()
    known = CASES if spec.cache == "none" else CACHE_CASES
    for name in wanted or known:
        found = _plan_one(spec, name, budget)
        if isinstance(found, str):
            notes.append(found)
        elif any(replace(found, name=other.name) == other for other in cases):
            notes.append(f"no {found.name} case: its sizes are those of another")
        else:
            cases.append(found)
            if name == "large":
                notes += reduction_note(spec, found.sizes, budget)
    if not cases:
        raise SpecError(
            f"No golden case is left for {spec.name}.", got=", ".join(wanted), hint=", ".join(known)
        )
    return GoldenPlan(cases=tuple(cases), notes=tuple(notes))


def _plan_one(spec: AttentionSpec, name: str, budget: GoldenBudget) -> PlannedCase | str:
    if name in ("min", "opt"):
        # The least that a dynamic cache holds is nothing, too.
        past = 0 if name == "min" and spec.cache == "preallocated" else None
        return PlannedCase(name=name, sizes=spec.sizes(name), past=past)
    if name in ("prefill", "decode") and spec.cache != "none":
        return _step_case(spec, name)
    if name == "odd":
        return PlannedCase(name=name, sizes=_with_small_batch(spec, odd_sizes(spec.axes)))
    if name == "ragged":
        return _ragged_case(spec)
    if name == "large":
        return _large_case(spec, budget)
    if "=" not in name:
        known = CASES if spec.cache == "none" else CACHE_CASES
        raise SpecError(
            "No such golden case.", got=name, hint=f"{nearest(name, known)} Or sizes, such as B=2,S=33."
        )
    sizes = spec.parse_sizes(name)
    return PlannedCase(name=sizes_name(sizes), sizes=sizes)


def _step_case(spec: AttentionSpec, name: str) -> PlannedCase | str:
    """A prompt into an empty cache, or the token that fills it: what is timed by default."""
    point = next((point for point in usual_points(spec) if point.name == name), None)
    if point is None:
        single = "the layer takes single tokens only"
        return f"no {name} case: " + (single if spec.axes["S"].max == 1 else "its usual call is the shortest")
    return PlannedCase(name=name, sizes=dict(point.sizes), past=point.past)


def _ragged_case(spec: AttentionSpec) -> PlannedCase | str:
    if spec.mask != "padding" and spec.cache != "preallocated":
        return "no ragged case: the layer takes no lengths"
    sizes = {name: first_allowed(axis, (_RAGGED_LENGTH,)) for name, axis in spec.axes.items()}
    sizes["B"] = max(spec.axes["B"].min, min(_RAGGED_ROWS, spec.axes["B"].max))
    if spec.cache == "preallocated":  # lengths differ by what the new tokens leave free
        sizes["S"] = max(spec.axes["S"].min, min(sizes["S"], sizes["T"] // 2))
        if sizes["S"] == sizes["T"]:
            return "no ragged case: new tokens leave no room for lengths in the cache"
    return PlannedCase(name="ragged", sizes=_with_small_batch(spec, sizes), ragged=True)


def _with_small_batch(spec: AttentionSpec, sizes: dict[str, int]) -> dict[str, int]:
    """Fewer rows of a batch whose caches would make up most of a bundle."""
    while oracle_cache_bytes(spec, sizes) > _CACHE_BYTES and sizes["B"] > spec.axes["B"].min:
        sizes = {**sizes, "B": sizes["B"] - 1}
    return sizes


def _large_case(spec: AttentionSpec, budget: GoldenBudget) -> PlannedCase | str:
    sizes = large_sizes(spec, budget)
    if sizes is None:
        return f"no large case: nothing larger than opt fits {budget}"
    return PlannedCase(name="large", sizes=sizes)


OPSETS = (23, 24)
DEVICES = ("cpu", "cuda")
