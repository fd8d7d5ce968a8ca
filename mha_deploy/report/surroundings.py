"""Where a run took place, and what it was about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mha_deploy.report.figures import NOTHING, size
from mha_deploy.report.markup import Html, join, tag
from mha_deploy.report.tables import code, facts, section

Data = Mapping[str, Any]


def environment(data: Data, *, model: Data | None) -> Html:
    """The machine, the versions, and the model with its bundle."""
    parts = [tag("h3", "Machine"), facts(_machine(data["environment"]), css="listing")]
    parts += [tag("h3", "Versions"), facts(_versions(data["environment"]), css="listing")]
    if model is not None:
        parts += [tag("h3", "Model"), facts(_model(model), css="listing")]
    return section("environment", "Environment", *parts)


def _machine(found: Data) -> list[tuple[str, object]]:
    gpu = found["gpu"]
    card: list[tuple[str, object]] = [("GPU", "none here")]
    if gpu:
        card = [
            ("GPU", gpu["name"]),
            ("compute capability", gpu["compute_capability"]),
            ("second-level cache", size(gpu["l2_bytes"])),
            ("memory", size(gpu["memory_bytes"])),
        ]
    return [*card, ("driver", found["driver"] or NOTHING), ("platform", found["platform"])]


def _versions(found: Data) -> list[tuple[str, object]]:
    others = [(name, version) for name, version in found["versions"].items() if name != "python"]
    return [("Python", found["python"]), *others]


def _model(model: Data) -> list[tuple[str, object]]:
    known: list[tuple[str, object]] = [
        ("bundle", code(model["bundle"])),
        ("manifest SHA-256", code(model["bundle_sha256"])),
        ("origin of weights", model["weights"]),
    ]
    return known + [
        (key, _value(value)) for key, value in model["spec"].items() if key not in ("name", "summary")
    ]


def _value(value: object) -> str:
    """A value of a spec on one line; the range of an axis as min:opt:max, a tensor with its dimensions."""
    if isinstance(value, Mapping):
        if set(value) == {"min", "opt", "max"}:
            return f"{value['min']}:{value['opt']}:{value['max']}"
        if set(value) == {"name", "kind", "dims"}:
            return f"{value['name']} {value['kind']} [{', '.join(map(str, value['dims']))}]"
        return ", ".join(f"{key} {_value(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return "; ".join(map(_value, value)) or NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return NOTHING if value is None or value == "" else str(value)


def notes(lines: Sequence[str]) -> Html | None:
    """What else a reader should know."""
    return section("notes", "Notes", tag("ul", *(tag("li", line) for line in lines))) if lines else None


def closing(data: Data, absent: Sequence[str]) -> Html:
    """What was not part of the run, and who wrote the page."""
    missing = tag("p", f"Not part of this run: {', '.join(absent)}.") if absent else None
    tool = data["tool"]
    made = tag("p", f"{tool['name']} {tool['version']}, {data['created']}")
    return tag("footer", join([missing, made]))
