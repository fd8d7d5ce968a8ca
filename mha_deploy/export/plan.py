"""Which golden cases an export gets: the corners of the axes, within a budget; without PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from mha_deploy.bundle.cases import stored_bytes
from mha_deploy.errors import SpecError, nearest
from mha_deploy.model.spec import Axis, ModelSpec, Sizes
from mha_deploy.options import ExportOptions

CASES = ("min", "opt", "odd", "ragged", "large")
CACHE_CASES = ("min", "prefill", "decode", "odd", "ragged", "large")
MODULE_CASES = ("opt", "min", "odd", "large")  # opt first: its work bounds that of the others
_RAGGED_BATCH = 4
_RAGGED_LENGTH = 24
_CACHE_BYTES = 1 << 30  # of the FP64 oracle's


@dataclass(frozen=True, kw_only=True)
class PlannedCase:
    """One case to capture."""

    name: str
    sizes: dict[str, int]
    ragged: bool = False  # whether the batch elements have lengths of their own, the extreme ones included
    past: int | None = None  # valid entries of a preallocated cache in every batch element; None: drawn


@dataclass(frozen=True, kw_only=True)
class GoldenBudget(SizeLimit):
    """What the large case may cost; the others are as large as the spec says."""

    mb: float = 25.0  # on disk, in 10⁶ bytes; as much as the opt case takes is always allowed

    def __str__(self) -> str:
        return f"{self.gflop:g} GFLOP, {self.gib:g} GiB and {self.mb:g} MB on disk"

    def allows(self, spec: ModelSpec, sizes: Sizes) -> bool:
        """Whether a case of these sizes stays below the limit."""
        room = max(self.mb * 1e6, stored_bytes(spec, spec.sizes("opt")))
        return super().allows(spec, sizes) and stored_bytes(spec, sizes) <= room


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
    if spec.layer is None:
        return MODULE_CASES
    return CASES if spec.cache == "none" else CACHE_CASES


def refuse_unknown_case(name: str, known: Sequence[str] = (*CASES, *CACHE_CASES)) -> None:
    """Refuse a case that is neither known by name nor given by its sizes."""
    if "=" not in name and name not in known and name != "opt":
        hint = f"{nearest(name, known)} Or sizes, such as B=2,S=33."
        raise SpecError("No such golden case.", got=name, hint=hint)


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
            notes.append(f"no {found.name} case: its sizes are those of another")
        else:
            cases.append(found)
            less = [
                f"{axis} = {most}" for axis, most in spec.sizes("max").items() if found.sizes[axis] < most
            ]
            if name == "large" and less:
                text = ",".join(f"{axis}={size}" for axis, size in found.sizes.items())
                notes.append(f"the large case has {text}: the axes allow {', '.join(less)}, beyond {budget}")
            yield found


def _plan_one(spec: ModelSpec, name: str, budget: GoldenBudget) -> PlannedCase | str:
    """One case, or why there is none."""
    if "=" in name:
        sizes = spec.parse_sizes(name)
        return PlannedCase(name=sizes_name(sizes), sizes=sizes)
    refuse_unknown_case(name, golden_names(spec))
    if name in ("min", "opt"):
        # The least that a dynamic cache holds is nothing, too.
        past = 0 if name == "min" and spec.cache == "preallocated" else None
        return PlannedCase(name=name, sizes=spec.sizes(name), past=past)
    if name == "odd":
        return PlannedCase(name=name, sizes=_with_small_batch(spec, odd_sizes(spec.axes)))
    if name == "ragged":
        return _ragged_case(spec)
    if name == "large":
        if spec.layer is None and not spec.flops:
            return "its cost is not known without the case opt before it"
        sizes, usual = shrunk(spec, spec.sizes("max"), spec.sizes("min"), budget), spec.sizes("opt")
        if all(sizes[axis] <= usual[axis] for axis in sizes):
            return f"nothing larger than opt fits {budget}"
        return PlannedCase(name=name, sizes=sizes)
    for point in usual_points(spec):  # a prompt into an empty cache, or the token that fills it: as timed
        if point.name == name:
            return PlannedCase(name=name, sizes=dict(point.sizes), past=point.past)
    single = "the layer takes single tokens only"
    return single if spec.axes["S"].max == 1 else "its usual call is the shortest"


def _ragged_case(spec: ModelSpec) -> PlannedCase | str:
    if spec.layer is None or (spec.layer.mask != "padding" and spec.cache != "preallocated"):
        return "the layer takes no lengths"
    sizes = {name: first_allowed(axis, (_RAGGED_LENGTH,)) for name, axis in spec.axes.items()}
    sizes["B"] = max(spec.axes["B"].min, min(_RAGGED_BATCH, spec.axes["B"].max))
    if spec.cache == "preallocated":  # lengths differ by what the new tokens leave free
        sizes["S"] = max(spec.axes["S"].min, min(sizes["S"], sizes["T"] // 2))
        if sizes["S"] == sizes["T"]:
            return "new tokens leave no room for lengths in the cache"
    return PlannedCase(name="ragged", sizes=_with_small_batch(spec, sizes), ragged=True)


def _with_small_batch(spec: ModelSpec, sizes: dict[str, int]) -> dict[str, int]:
    """A smaller batch where the caches would make up most of a bundle."""
    while oracle_cache_bytes(spec, sizes) > _CACHE_BYTES and sizes["B"] > spec.axes["B"].min:
        sizes = {**sizes, "B": sizes["B"] - 1}
    return sizes


def looked_at(axes: Mapping[str, Axis]) -> dict[str, dict[str, int]]:
    """The sizes at which the numbers of a graph are measured, for mixed precision."""
    bounds = {bound: {name: getattr(axis, bound) for name, axis in axes.items()} for bound in ("opt", "min")}
    return {**bounds, "odd": odd_sizes(axes)}
