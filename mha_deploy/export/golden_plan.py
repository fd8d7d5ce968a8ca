"""Which golden cases a bundle gets: the corners of the axes, within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mha_deploy.analyze.cost import layer_cost
from mha_deploy.errors import SpecError, nearest
from mha_deploy.spec import AttentionSpec

CASES = ("min", "opt", "odd", "ragged", "large")
_ODD_LENGTHS = (37, 13, 7, 5, 3)
_RAGGED_ROWS = 4
_RAGGED_LENGTH = 24


@dataclass(frozen=True, kw_only=True)
class PlannedCase:
    """One case to capture."""

    name: str
    sizes: dict[str, int]
    ragged: bool = False


@dataclass(frozen=True, kw_only=True)
class GoldenBudget:
    """What the large case may cost; the others are as large as the spec says.

    Args:
        gflop: Work in 10⁹ floating-point operations.
        gib: Memory for the oracle's scores and activations.
    """

    gflop: float = 100.0
    gib: float = 4.0


@dataclass(frozen=True, kw_only=True)
class GoldenPlan:
    """The cases to capture, and why others were left out."""

    cases: tuple[PlannedCase, ...]
    notes: tuple[str, ...] = ()


def plan_golden(
    spec: AttentionSpec, wanted: Sequence[str] = CASES, budget: GoldenBudget | None = None
) -> GoldenPlan:
    """Choose the cases.

    Args:
        spec: The layer.
        wanted: Names from `CASES`, or sizes such as `B=2,S=33`.
        budget: Limit of the large case.
    """
    cases: list[PlannedCase] = []
    notes: list[str] = []
    for name in wanted:
        found = _plan_one(spec, name, budget or GoldenBudget())
        if isinstance(found, str):
            notes.append(found)
        elif any(found.sizes == other.sizes and found.ragged == other.ragged for other in cases):
            notes.append(f"no {found.name} case: its sizes are those of another")
        else:
            cases.append(found)
    if not cases:
        raise SpecError(
            f"No golden case is left for {spec.name}.", got=", ".join(wanted), hint=", ".join(CASES)
        )
    return GoldenPlan(cases=tuple(cases), notes=tuple(notes))


def _plan_one(spec: AttentionSpec, name: str, budget: GoldenBudget) -> PlannedCase | str:
    if name in ("min", "opt"):
        return PlannedCase(name=name, sizes=spec.sizes(name))
    if name == "odd":
        return PlannedCase(name=name, sizes=_odd_sizes(spec))
    if name == "ragged":
        return _ragged_case(spec)
    if name == "large":
        return _large_case(spec, budget)
    if "=" not in name:
        raise SpecError(
            "No such golden case.", got=name, hint=f"{nearest(name, CASES)} Or sizes, such as B=2,S=33."
        )
    sizes = spec.parse_sizes(name)
    return PlannedCase(name="-".join(f"{axis}{size}" for axis, size in sizes.items()), sizes=sizes)


def _odd_sizes(spec: AttentionSpec) -> dict[str, int]:
    """Lengths that no kernel tiles evenly, and a batch of three where that is allowed."""
    sizes = {name: _first_allowed(spec, name, _ODD_LENGTHS) for name in spec.axes}
    return {**sizes, "B": _first_allowed(spec, "B", (3,))}


def _ragged_case(spec: AttentionSpec) -> PlannedCase | str:
    if spec.mask != "padding":
        return "no ragged case: the layer takes no key lengths"
    sizes = {name: _first_allowed(spec, name, (_RAGGED_LENGTH,)) for name in spec.axes}
    sizes["B"] = max(spec.axes["B"].min, min(_RAGGED_ROWS, spec.axes["B"].max))
    return PlannedCase(name="ragged", sizes=sizes, ragged=True)


def _first_allowed(spec: AttentionSpec, name: str, candidates: Sequence[int]) -> int:
    axis = spec.axes[name]
    return next((size for size in candidates if axis.min <= size <= axis.max), axis.opt)


def _large_case(spec: AttentionSpec, budget: GoldenBudget) -> PlannedCase | str:
    """Halve the batch, then the longest axis, from the largest sizes down to what the budget allows."""
    sizes, smallest = spec.sizes("max"), spec.sizes("min")
    while not _fits(spec, sizes, budget):
        shrinkable = [name for name in sizes if sizes[name] > smallest[name]]
        if not shrinkable:
            break
        name = "B" if "B" in shrinkable else max(shrinkable, key=lambda axis: sizes[axis])
        sizes[name] = max(smallest[name], sizes[name] // 2)
    if _flops(spec, sizes) <= _flops(spec, spec.sizes("opt")):
        return f"no large case: nothing larger than opt fits {budget.gflop:g} GFLOP and {budget.gib:g} GiB"
    return PlannedCase(name="large", sizes=sizes)


def _fits(spec: AttentionSpec, sizes: dict[str, int], budget: GoldenBudget) -> bool:
    return _flops(spec, sizes) <= budget.gflop * 1e9 and oracle_bytes(spec, sizes) <= budget.gib * 2**30


def _flops(spec: AttentionSpec, sizes: dict[str, int]) -> int:
    return layer_cost(spec, sizes, bytes_per_element=1).flops


def oracle_bytes(spec: AttentionSpec, sizes: dict[str, int]) -> int:
    """Memory of an FP64 run that keeps scores and weights: an upper bound, fused kernels need less."""
    T = sizes[spec.key_axis]
    scores = 2 * sizes["B"] * spec.Hq * sizes["S"] * T
    activations = 4 * sizes["B"] * max(sizes["S"], T) * max(spec.E, spec.Hq * spec.D)
    return 8 * (scores + activations)
