"""What became of attention in the engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mha_deploy.engine.record import fusion_told
from mha_deploy.report.figures import NOTHING, plural, short, size
from mha_deploy.report.markup import Html, join, tag
from mha_deploy.report.tables import Cell, Group, Row, code, data_table, section, sentence, status

Data = Mapping[str, Any]

_LEVELS = {"fused": "good", "decomposed": "bad", "unknown": "doubt"}
_COLUMNS = ("node", "profile", "status", "kernels", "evidence", "reason")


def fusion(engines: Sequence[Data], findings: Sequence[Data], *, name: str = "fusion") -> Html:
    """A row for every attention node and profile of every engine."""
    if not engines:
        told = [finding["text"] for finding in findings if finding["section"] == "engine"]
        why = f"No engine was built: {told[0]}." if told else "The bundle has no engine."
        return section(name, "Engines and fusion", sentence(why))
    groups = [Group(title=_title(engine), rows=_rows(engine)) for engine in engines]
    table = data_table("What every attention became, and who says so", _COLUMNS, groups)
    return section(name, "Engines and fusion", table, _not_run(engines))


def _title(engine: Data) -> Html:
    built = f"built {engine['built']}"
    if engine["seconds"] is not None:
        built += f" in {short(engine['seconds'])} s"
    figures = [
        fusion_of(engine),
        f"{engine['precision_status']} (asked for {engine['precision']})",
        f"attention: {engine['attention']}",
        *(f"needs {library}" for library in engine["plugins"]),
        built,
        size(engine["engine_bytes"]) if engine["engine_bytes"] is not None else None,
        *(_profile(engine, index) for index in range(len(engine["profiles"]))),
    ]
    words = " · ".join(figure for figure in figures if figure)
    named = engine["name"] if engine["name"] != engine["backend"] else ""
    head = f"{named} {engine['backend']} {engine['version']}".strip()
    return join([tag("span", head), tag("span", f" {words}", class_="about-group")])


def _profile(engine: Data, index: int) -> str:
    ranges = " ".join(f"{axis} {bounds}" for axis, bounds in engine["profiles"][index].items())
    return f"profile {_profile_name(engine, index)}: {ranges}"


def _profile_name(engine: Data, index: int | None) -> str:
    """What a profile is called; its number where it has no name."""
    if index is None:
        return NOTHING
    names = engine["profile_names"]
    return names[index] if 0 <= index < len(names) else str(index)


def _rows(engine: Data) -> list[Row]:
    return [
        [
            code(node["node"]),
            Cell(content=_profile_name(engine, node["profile"]), order=node["profile"]),
            status(node["status"], _LEVELS[node["status"]]),
            join(tag("div", code(kernel)) for kernel in node["kernels"]) or NOTHING,
            node["source"] or NOTHING,
            node["reason"] or NOTHING,
        ]
        for node in engine["nodes"]
    ]


def _not_run(engines: Sequence[Data]) -> Html | None:
    idle = [engine for engine in engines if not engine["ran"]]
    if not idle:
        return None
    lines = [
        tag("p", f"{engine['name']} was not run here: {engine['why_not'] or 'no reason was given'}.")
        for engine in idle
    ]
    return join(lines)


def fusion_of(engine: Data) -> str:
    """How many attentions of an engine are fused, in words."""
    fused, count = [*engine["fused"], 0, 0][:2]
    return fusion_told(fused, count, engine["nodes"])


def engine_line(engines: Sequence[Data]) -> str:
    """The engines in one sentence, for a benchmark."""
    parts = []
    for engine in engines:
        told = f"{fusion_of(engine)}, {engine['precision_status']}"
        parts.append(f"{engine['name']} {engine['version']}: {told}")
    return "; ".join(parts) or f"{plural(0, 'engine')}"
