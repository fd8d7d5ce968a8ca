"""Sections that say whether results are right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mha_deploy.report.alike import named, together, without_numbers
from mha_deploy.report.figures import NOTHING, error, short, sizes_text, times, yes_no
from mha_deploy.report.heatmap import has_gaps, heat_legend, heat_scale, heatmap
from mha_deploy.report.markup import Html, join, tag
from mha_deploy.report.tables import (
    Cell,
    Group,
    Row,
    code,
    data_table,
    number,
    passed,
    section,
    sentence,
    share_bar,
    status,
)

Data = Mapping[str, Any]

LAYERS = "layers"
"""The word for results of single attentions, beside those of a whole model."""

_FIGURES = ("#budget used", "#rel. L2", "#worst row", "#max", "#gain", "#1 − cos")
_PARITY_COLUMNS = ("case", "verdict", "sizes", "output", *_FIGURES)
_LAYER_COLUMNS = ("attention", "verdict", *_FIGURES)
_LEVELS = {"conforms": "good", "wrong": "bad", "refused": "doubt", "absent": "none"}
_RANGES = {"ok": "good", "near": "doubt", "overflows": "bad"}
_ORDER = ("wrong", "refused", "conforms", "absent")
_RANGE_COLUMNS = (
    "node", "status", "#largest |q·k|", "#scaled", "#softmax sum", "#keys at most", "#headroom",
)  # fmt: skip


def parity(data: Data) -> Html:
    """A row for every backend, case and output, and one for every attention that was judged by itself."""
    if not data["parity"]:
        return section("parity", "Parity", sentence(_why_nothing_ran(data)))
    runs = [run for run in data["parity"] if run["cases"] != LAYERS]
    inside = [run for run in data["parity"] if run["cases"] == LAYERS]
    groups = [
        Group(
            title=f"{run['backend']}, {run['cases']} cases",
            rows=[row for verdict in run["verdicts"] for row in _parity_rows(verdict)],
        )
        for run in runs
    ]
    note = "Errors are taken against the FP64 oracle. A budget is a multiple of eager PyTorch's own error."
    table = data_table("Error of every output, and its share of the budget", _PARITY_COLUMNS, groups)
    return section(
        "parity", "Parity", sentence(note, css="lead"), table if runs else None, _layers_table(inside)
    )


def _layers_table(runs: Sequence[Data]) -> Html | None:
    """A row for every attention of a user's module."""
    if not runs:
        return None
    groups = [
        Group(
            title=f"{run['backend']} at {sizes_text(run['verdicts'][0]['sizes'])}",
            rows=[row for verdict in run["verdicts"] for row in _layer_rows(verdict)],
        )
        for run in runs
        if run["verdicts"]
    ]
    return data_table("Every attention by itself, against its own oracle", _LAYER_COLUMNS, groups)


def _why_nothing_ran(data: Data) -> str:
    reasons = [engine["why_not"] for engine in data["engines"] if engine["why_not"]]
    return f"No result was compared: {reasons[0]}." if reasons else "No result was compared in this run."


def _parity_rows(verdict: Data) -> list[Row]:
    row: Row = [
        verdict["case"],
        passed(verdict["passed"]),
        sizes_text(verdict["sizes"]),
        verdict["output"],
        *_figures(verdict),
    ]
    return [row] if verdict["passed"] else [row, [_problem(verdict, len(_PARITY_COLUMNS))]]


def _layer_rows(verdict: Data) -> list[Row]:
    row: Row = [code(verdict["output"]), passed(verdict["passed"]), *_figures(verdict)]
    return [row] if verdict["passed"] else [row, [_problem(verdict, len(_LAYER_COLUMNS))]]


def _figures(verdict: Data) -> list[Cell]:
    deviation = verdict["deviation"] or {}
    keys = ("relative_l2", "worst_row", "max_abs", "gain")
    cosine = deviation.get("cosine")
    rest = None if cosine is None else 1.0 - cosine
    return [
        share_bar(verdict["share"], failed=not verdict["passed"]),
        *(_measure(deviation.get(key), (verdict["budget"] or {}).get(key)) for key in keys),
        number(rest, error(rest)),
    ]


def _measure(value: float | None, limit: float | None) -> Cell:
    """An error, marked where it is the one that is over its budget."""
    over = value is not None and limit is not None and value > limit
    words = tag("strong", error(value), class_="problem") if over else error(value)
    hover = None if limit is None else f"budget {error(limit)}"
    return Cell(content=tag("span", words, title=hover), order=value, numeric=True)


def _problem(verdict: Data, span: int) -> Cell:
    words, worst = verdict["problem"] or "failed", verdict["deviation"]
    if worst is not None:
        place = ", ".join(map(str, worst["worst_index"]))
        got, want = _exact(worst["worst_got"]), _exact(worst["worst_want"])
        words += f"; worst at [{place}]: got {got}, oracle {want}"
    return Cell(content=tag("span", words, class_="problem"), span=span)


def _exact(value: float | None) -> str:
    return "no finite number" if value is None else f"{value:.6g}"


def heatmaps(data: Data) -> Html | None:
    """The maps under one scale."""
    maps = data["heatmaps"]
    if not maps:
        return None
    scale = heat_scale(maps)
    drawn = [_figure(each, chart) for each in maps if (chart := heatmap(each, scale)) is not None]
    if not drawn:
        return section("maps", "Where the errors lie", sentence("The maps have no cells."))
    lead = sentence("All maps share one scale. Numbers appear under the pointer.", css="lead")
    legend = heat_legend(scale, has_gaps=has_gaps(maps))
    return section("maps", "Where the errors lie", lead, legend, tag("div", *drawn, class_="charts"))


def _figure(data: Data, chart: Html) -> Html:
    note = f". {data['note'][:1].upper()}{data['note'][1:]}" if data["note"] else ""
    words = f"{data['case']}, {data['output']}{note}"
    return tag("figure", tag("figcaption", tag("strong", data["backend"]), " ", words), chart)


def invariance(data: Data) -> Html | None:
    """What must not matter, and whether it does."""
    if not data["invariance"]:
        return None
    columns = ("what must not matter", "verdict", "compared", "backend", "case", "bitwise", "#budget used")
    rows: list[Row] = []
    for check in data["invariance"]:
        share = share_bar(check["share"], failed=not check["passed"])
        same = yes_no(check["bitwise"])
        place = (check["detail"], check["backend"], check["case"] or NOTHING)
        if check["passed"] and not check["case"]:  # there was nothing to compare, and the detail says why
            rows.append([check["check"], status("not checked", "none"), *place, NOTHING, NOTHING])
            continue
        rows.append([check["check"], passed(check["passed"]), *place, same, share])
        if check["problem"]:
            rows.append([Cell(content=tag("span", check["problem"], class_="problem"), span=len(columns))])
    table = data_table("Results that must not hang on their neighbours", columns, [Group(rows=rows)])
    return section("invariance", "Invariance", table)


def conformance(data: Data) -> Html | None:
    """Masks by runtimes, and below the table why a cell is not good."""
    found = data["conformance"]
    if found is None:
        return None
    counted: list[Row] = [_mask_row(found, row) for row in found["rows"] if not row["diagnostic"]]
    diagnostic: list[Row] = [_mask_row(found, row) for row in found["rows"] if row["diagnostic"]]
    groups = [Group(rows=counted)]
    if diagnostic:
        groups.append(Group(rows=diagnostic, title="What runtimes do by themselves; not part of the verdict"))
    caption = (
        f"Masks as ONNX defines them, {found['precision']}, seed {found['seed']}; the numbers are relative L2"
    )
    table = data_table(caption, ("mask", *found["columns"]), groups, css="matrix")
    return section("conformance", "Mask conformance", table, _conformance_reasons(found))


def _mask_row(found: Data, row: Data) -> Row:
    name = join([code(row["case"]), tag("div", row["about"], class_="muted") if row["about"] else None])
    return [name, *(_conformance_cell(row["cells"][column]) for column in found["columns"])]


def _conformance_cell(cell: Data) -> Html:
    figure = None if cell["error"] is None else tag("span", f" {error(cell['error'])}", class_="muted")
    return join([status(cell["status"], _LEVELS[cell["status"]]), figure])


def _conformance_reasons(found: Data) -> Html | None:
    """One line for every reason, with the masks it holds for."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in found["rows"]:
        for name in found["columns"]:
            cell = row["cells"][name]
            if cell["detail"]:
                reasons.setdefault((name, cell["status"], cell["detail"]), []).append(row["case"])
    lines = []
    for (name, word, detail), masks in sorted(reasons.items(), key=lambda item: _ORDER.index(item[0][1])):
        where = "every mask" if len(masks) == len(found["rows"]) else ", ".join(masks)
        lines.append(tag("li", tag("strong", f"{name}, {word}"), f" ({where}): {detail}"))
    return tag("ul", *lines, class_="reasons") if lines else None


def fp16_range(data: Data) -> Html | None:
    """Whether FP16 can hold the numbers, with advice."""
    found = data["range"]
    if found is None:
        return None
    if not found["nodes"]:
        return section("range", "FP16 range", sentence("The graph has no attention node to measure."))
    rows: list[Row] = [_range_row(node) for node in found["nodes"]]
    caption = "Largest numbers of every attention on golden data; FP16 ends at 65,504"
    table = data_table(caption, _RANGE_COLUMNS, [Group(rows=rows)])
    return section("range", "FP16 range", table, _range_reasons(found["nodes"]))


def _range_row(node: Data) -> Row:
    keys = ("largest_score_raw", "largest_score", "largest_softmax_sum", "max_keys")
    return [
        code(node["node"]),
        status(node["status"], _RANGES[node["status"]]),
        *(number(node[key], short(node[key])) for key in keys),
        number(node["headroom"], times(node["headroom"])),
    ]


def _range_reasons(nodes: Sequence[Data]) -> Html | None:
    """What was found and what can be done, once for all attentions of which the same is true."""
    lines = []
    for alike in together(nodes, lambda node: without_numbers(_range_words(node))):
        if len(set(map(_range_words, alike))) > 1:  # the numbers that are told are those of the worst
            alike.sort(key=_room)
        if words := _range_words(alike[0]):
            lines.append(tag("li", tag("strong", named([node["node"] for node in alike])), f": {words}"))
    return tag("ul", *lines, class_="reasons") if lines else None


def _room(node: Data) -> float:
    return float("inf") if node["headroom"] is None else float(node["headroom"])


def _range_words(node: Data) -> str:
    parts = ["; ".join(finding["what"] for finding in node["findings"]), "; ".join(node["advice"])]
    return ". Advice: ".join(part for part in parts if part)


def blame(data: Data) -> Html | None:
    """What a failure comes from, and the trials that tell."""
    found = data["blame"]
    if found is None:
        return None
    at_fault = tag(
        "p", "At fault: ", tag("strong", found["at_fault"]), f". {found['explanation']}", class_="lead"
    )
    rows: list[Row] = [
        [trial["name"], passed(trial["passed"]), share_bar(trial["share"], failed=not trial["passed"])]
        for trial in found["trials"]
    ]
    columns = ("what was run instead", "verdict", "#budget used")
    table = data_table("Trials", columns, [Group(rows=rows)], css="compact") if rows else None
    return section("blame", "What is at fault", at_fault, table)
