"""A benchmark at a glance: one line for every model and size, one column for every row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mha_deploy.report.charts import Look
from mha_deploy.report.figures import NOTHING, short, sizes_product, sizes_text
from mha_deploy.report.markup import Html, join, tag
from mha_deploy.report.palette import series_of
from mha_deploy.report.schema import plain_bench
from mha_deploy.report.tables import Cell, Group, Row, data_table, number, sentence

Data = Mapping[str, Any]

_REFUSED = "refused"


def bench_markdown(data: Data) -> str:
    """A Markdown table of a benchmark: p50 in µs, the fastest of each line in bold, and the floor.

    What was timed without a CUDA graph has an asterisk, and a line below says who that is.

    Args:
        data: A benchmark as docs/report.md describes it.
    """
    plain = plain_bench(data)
    names = list(series_of(entry["latency"] for entry in plain["models"]))
    axes = _axes(plain)
    lines = [_line(["model", axes, *(_markdown(name) for name in names), "floor"])]
    lines.append("|---|---|" + "---:|" * (len(names) + 1))
    for model, point in _points(plain):
        cells = [_markdown(f"{model['name']} {model['precision']}"), _sizes(point, axes)]
        fastest = _fastest(point)
        for name in names:
            words = _cell_text(point, name)
            told = f"**{words}**" if name == fastest else words
            cells.append(f"{told}\\*" if _lacks_graph(point, name) else told)
        lines.append(_line([*cells, _floor(point)]))
    note = _without_graph(plain)
    lines += ["", f"\\* {_markdown(note)}"] if note else []
    return "\n".join(lines) + "\n"


def bench_overview(plain: Data, look: Look) -> Html:
    """The same as a table of the page."""
    axes = _axes(plain)
    columns = ("model", axes, *(f"#{name}" for name in look), "#floor")
    rows: list[Row] = []
    for model, point in _points(plain):
        fastest = _fastest(point)
        cells = [_overview_cell(point, name, is_best=name == fastest) for name in look]
        floor = point["roofline"]["floor_us"] if point["roofline"] else None
        name = f"{model['name']} {model['precision']}"
        rows.append([name, _sizes(point, axes), *cells, number(floor, short(floor))])
    if not rows:
        return sentence("Nothing was timed.")
    table = data_table("p50 in µs; the fastest of each line is bold", columns, [Group(rows=rows)])
    note = _without_graph(plain)
    return join([table, sentence(f"* {note}") if note else None])


def best_rows(plain: Data) -> Html | None:
    """How often each row is the fastest."""
    wins: dict[str, int] = {}
    for _, point in _points(plain):
        name = _fastest(point)
        if name is not None:
            wins[name] = wins.get(name, 0) + 1
    if not wins:
        return None
    total = sum(wins.values())
    told = [f"{name} {count}" for name, count in sorted(wins.items(), key=lambda item: -item[1])]
    return tag("p", f"Fastest, of {total} sizes: {', '.join(told)}.")


def _overview_cell(point: Data, name: str, *, is_best: bool) -> Cell:
    p50, words = _p50(point, name), _cell_text(point, name)
    told = tag("strong", words) if is_best else words
    content = join([told, "*"]) if _lacks_graph(point, name) else told
    return Cell(content=content, order=p50, numeric=True)


def _points(plain: Data) -> list[tuple[Data, Data]]:
    return [
        (entry["model"], point)
        for entry in plain["models"]
        if entry["latency"]
        for point in entry["latency"]["points"]
    ]


def _axes(plain: Data) -> str:
    """The heading of the sizes: the axes, where all points have the same."""
    found = {"×".join(point["sizes"]) for _, point in _points(plain)}
    return found.pop() if len(found) == 1 else "sizes"


def _sizes(point: Data, axes: str) -> str:
    """The sizes, with their names where the heading does not say them."""
    return sizes_text(point["sizes"]) if axes == "sizes" else sizes_product(point["sizes"])


def _row(point: Data, name: str) -> Data | None:
    return next((row for row in point["rows"] if row["name"] == name), None)


def _p50(point: Data, name: str) -> float | None:
    row = _row(point, name)
    return row["timing"]["p50_us"] if row and row["timing"] else None


def _fastest(point: Data) -> str | None:
    timed = [row for row in point["rows"] if row["timing"]]
    return min(timed, key=lambda row: row["timing"]["p50_us"])["name"] if timed else None


def _cell_text(point: Data, name: str) -> str:
    row = _row(point, name)
    if row is None:
        return NOTHING
    return short(row["timing"]["p50_us"]) if row["timing"] else _REFUSED


def _lacks_graph(point: Data, name: str) -> bool:
    row = _row(point, name)
    return bool(row and row["timing"] and not row["timing"]["graph"])


def _without_graph(plain: Data) -> str | None:
    """Who was timed without a CUDA graph, and why where there should have been one; None if nobody was."""
    reasons: dict[str, list[str]] = {}
    for row in (row for _, point in _points(plain) for row in point["rows"]):
        if row["timing"] and not row["timing"]["graph"]:
            told, why = reasons.setdefault(row["name"], []), row["timing"]["why_no_graph"]
            told.extend([why] if why and why not in told else [])
    names = [f"{name} ({'; '.join(told)})" if told else name for name, told in reasons.items()]
    return f"timed without a CUDA graph: {', '.join(names)}" if names else None


def _floor(point: Data) -> str:
    return short(point["roofline"]["floor_us"]) if point["roofline"] else NOTHING


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown(words: str) -> str:
    """A name that cannot break the table or become markup."""
    single = re.sub(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]+", " ", words)
    return re.sub(r"([\\`*_\[\]|~])", r"\\\1", single).replace("&", "&amp;").replace("<", "&lt;")
