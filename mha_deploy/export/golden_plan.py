"""Which golden cases a bundle gets: the corners of the axes, within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mha_deploy.analyze.sizes import SizeLimit, first_allowed, layer_flops, odd_sizes, shrunk, sizes_name
from mha_deploy.errors import SpecError, nearest
from mha_deploy.spec import AttentionSpec

CASES = ("min", "opt", "odd", "ragged", "large")
_RAGGED_ROWS = 4
_RAGGED_LENGTH = 24


@dataclass(frozen=True, kw_only=True)
class PlannedCase:
    """One case to capture."""

    name: str
    sizes: dict[str, int]
    ragged: bool = False


@dataclass(frozen=True, kw_only=True)
class GoldenBudget(SizeLimit):
    """What the large case may cost; the others are as large as the spec says."""


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
        return PlannedCase(name=name, sizes=odd_sizes(spec.axes))
    if name == "ragged":
        return _ragged_case(spec)
    if name == "large":
        return _large_case(spec, budget)
    if "=" not in name:
        raise SpecError(
            "No such golden case.", got=name, hint=f"{nearest(name, CASES)} Or sizes, such as B=2,S=33."
        )
    sizes = spec.parse_sizes(name)
    return PlannedCase(name=sizes_name(sizes), sizes=sizes)


def _ragged_case(spec: AttentionSpec) -> PlannedCase | str:
    if spec.mask != "padding":
        return "no ragged case: the layer takes no key lengths"
    sizes = {name: first_allowed(axis, (_RAGGED_LENGTH,)) for name, axis in spec.axes.items()}
    sizes["B"] = max(spec.axes["B"].min, min(_RAGGED_ROWS, spec.axes["B"].max))
    return PlannedCase(name="ragged", sizes=sizes, ragged=True)


def _large_case(spec: AttentionSpec, budget: GoldenBudget) -> PlannedCase | str:
    sizes = shrunk(spec, spec.sizes("max"), spec.sizes("min"), budget)
    if layer_flops(spec, sizes) <= layer_flops(spec, spec.sizes("opt")):
        return f"no large case: nothing larger than opt fits {budget}"
    return PlannedCase(name="large", sizes=sizes)
