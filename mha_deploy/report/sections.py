"""The sections of the page."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mha_deploy.engine.manifest import fusion_summary, precision_summary
from mha_deploy.report.charts import (
    Look,
    Panel,
    decode_chart,
    decode_curves,
    decode_look,
    has_gaps,
    heat_legend,
    heat_scale,
    heatmap,
    is_pooled,
    latency_bars,
    needs_log,
    roofline_plots,
    roofline_summary,
    sweep_chart,
    sweep_panels,
)
from mha_deploy.report.schema import plain_bench
from mha_deploy.report.svg import Html, join, mark, series_of, tag
from mha_deploy.text import (
    NOTHING,
    budget_share,
    error,
    grouped,
    named,
    percent,
    plural,
    point_name,
    short,
    size,
    sizes_product,
    sizes_text,
    times,
    together,
    without_numbers,
    yes_no,
)

# -- Tables, and the small things that stand in their cells ----------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The content of a cell.

    Args:
        content: Text or markup.
        order: What the column is sorted by, where that is not the text.
        numeric: Whether it is a number, set flush right.
        span: How many columns it takes.
    """

    content: object
    order: float | None = None
    numeric: bool = False
    span: int = 1


Row = Sequence[Cell | Html | str]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows that belong together, under a heading if they have one."""

    rows: Sequence[Row]
    title: str | Html | None = None


def number(value: float | None, words: str) -> Cell:
    """A number as it is shown, sorted by what it is."""
    return Cell(content=words, order=value, numeric=True)


def data_table(caption: str, columns: Sequence[str], groups: Sequence[Group], *, css: str = "") -> Html:
    """A table that scrolls inside its container.

    Args:
        caption: What it shows.
        columns: The headings; one that starts with `#` is over numbers.
        groups: The rows.
        css: Further classes.
    """
    head = tag("thead", tag("tr", *(_heading(name) for name in columns)))
    bodies = [_body(group, len(columns)) for group in groups]
    table = tag("table", tag("caption", caption), head, *bodies, class_=css or None)
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _heading(name: str) -> Html:
    return tag("th", name.removeprefix("#"), scope="col", class_="n" if name.startswith("#") else None)


def _body(group: Group, width: int) -> Html:
    title = tag("tr", tag("th", group.title, colspan=width, scope="rowgroup"), class_="group")
    return tag("tbody", title if group.title else None, *(_row(row) for row in group.rows))


def _row(row: Row) -> Html:
    return tag("tr", *(_cell(cell) for cell in row))


def _cell(cell: Cell | Html | str) -> Html:
    if not isinstance(cell, Cell):
        return tag("td", cell)
    order = None if cell.order is None else f"{cell.order:.6g}"
    return tag(
        "td",
        cell.content,
        class_="n" if cell.numeric else None,
        data_v=order,
        colspan=cell.span if cell.span > 1 else None,
    )


def status(words: str, level: str) -> Html:
    """A word with a sign beside it, so that colour is not needed: `good`, `bad`, `doubt` or `none`."""
    return tag("span", words, class_=f"status {level}")


def passed(value: bool) -> Html:
    """The verdict of one row."""
    return status("passed", "good") if value else status("FAILED", "bad")


def share_bar(share: float | None, *, failed: bool = False) -> Cell:
    """A share of the budget with a bar as long as the share; full and marked from one budget on."""
    if share is None:
        words = "no number" if failed else NOTHING
        return Cell(content=words, order=float("1e300") if failed else None, numeric=True)
    over = share > 1
    style = f"--w:{min(share, 1.0) * 100:.1f}%"
    bar = tag("span", class_=f"share{' over' if over else ''}", style=style, aria_hidden="true")
    words = tag("span", budget_share(share), class_="share-text")
    return Cell(content=tag("span", bar, words, class_="share-cell"), order=share, numeric=True)


def code(words: str) -> Html:
    """A name from a program; it may be broken anywhere."""
    return tag("code", words)


def facts(pairs: Sequence[tuple[str, object]], *, css: str = "facts") -> Html:
    """Names and what they are."""
    items = [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs]
    return tag("dl", *items, class_=css)


def section(name: str, title: str, *children: object) -> Html:
    """A section with a heading that can be linked to."""
    return tag(
        "section", tag("h2", title, id=f"{name}-title"), *children, id=name, aria_labelledby=f"{name}-title"
    )


def sentence(words: str, *, css: str | None = None) -> Html:
    """A paragraph."""
    return tag("p", words, class_=css)


# -- What became of attention in the engines -------------------------------------------------------

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
        precision_summary(engine["precision_status"], engine["precision"]),
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
    return fusion_summary(fused, count, engine["nodes"])


def engine_line(engines: Sequence[Data]) -> str:
    """The engines in one sentence, for a benchmark."""
    parts = []
    for engine in engines:
        precision = precision_summary(engine["precision_status"], engine["precision"])
        parts.append(f"{engine['name']} {engine['version']}: {fusion_of(engine)}, {precision}")
    return "; ".join(parts) or f"{plural(0, 'engine')}"


# -- Sections that say whether results are right ---------------------------------------------------

LAYERS = "layers"
"""The word for results of single attentions, beside those of a whole model."""

_FIGURES = ("#budget used", "#rel. L2", "#worst row", "#max", "#gain", "#1 − cos")
_PARITY_COLUMNS = ("case", "verdict", "sizes", "output", *_FIGURES)
_LAYER_COLUMNS = ("attention", "verdict", *_FIGURES)
_LEVELS_RESULTS = {"conforms": "good", "wrong": "bad", "refused": "doubt", "absent": "none"}
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
    return join([status(cell["status"], _LEVELS_RESULTS[cell["status"]]), figure])


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


def attribute_fault(data: Data) -> Html | None:
    """What a failure comes from, and the trials that tell."""
    found = data["fault"]
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
    return section("fault", "What is at fault", at_fault, table)


# -- Sections that say how fast everything is ------------------------------------------------------

_TOKENS = "#tokens/s"
_COLUMNS_LATENCY = (
    "row", "#p50 µs", "#p90 µs", "#p99 µs", "#× eager", "#× best PyTorch", "#TFLOP/s", "#GB/s", _TOKENS,
    "#of roofline", "#memory", "#host µs", "graph", "stable", "#SM MHz", "#°C",
)  # fmt: skip


def latency(data: Data, look: Look) -> Html:
    """Everything that was timed, or one sentence that says why nothing was."""
    found = data["latency"]
    if found is None or not found["points"]:
        return section("latency", "Latency", sentence(why_not_timed(data)))
    return section("latency", "Latency", *latency_parts(found, look))


def why_not_timed(data: Data) -> str:
    """Why there is no latency: as a finding says it, or as the engines do, or for lack of a GPU."""
    told = [finding["text"] for finding in data["verdict"]["findings"] if finding["section"] == "latency"]
    if data["environment"]["gpu"] is None:
        told.append("there is no NVIDIA GPU on this machine")
    told += [engine["why_not"] for engine in data["engines"] if engine["why_not"]]
    return f"Nothing was timed here: {told[0]}." if told else "Nothing was timed in this run."


def latency_parts(found: Data, look: Look) -> list[Html | None]:
    """The charts and tables of one model."""
    points = found["points"]
    timings = [row["timing"] for point in points for row in point["rows"] if row["timing"]]
    return [
        sentence(_lead(found, timings), css="lead"),
        _bars(points, look),
        _sweeps(points, look),
        _roofline(points, look),
        _table(points, look),
        _kernels(points, look),
    ]


def _lead(found: Data, timings: Sequence[Data]) -> str:
    where = f" on {found['gpu']}" if found["gpu"] else ""
    words = f"Device time of one call{where}. Bars end at p50, whiskers reach to p90 and p99."
    if timings:
        counts = [timing["samples"] for timing in timings]
        low, high = min(counts), max(counts)
        words += f" {low if low == high else f'{low} to {high}'} samples each."
    return f"{words} The floor is what the datasheet's peak rates allow; it is not a prediction."


def _bars(points: Sequence[Data], look: Look) -> Html:
    log = needs_log(points)
    figures = [_point_figure(point, look, log=log) for point in points]
    return join([tag("h3", "By size"), tag("div", *figures, class_="charts")])


def _point_figure(point: Data, look: Look, *, log: bool) -> Html:
    words = tag("figcaption", *_named(point))
    chart = latency_bars(point, look, log=log) or sentence("No row was timed at this size.")
    refused = [
        tag("li", tag("strong", row["name"]), f" not timed: {row['refused']}")
        for row in point["rows"]
        if row["refused"] is not None
    ]
    return tag("figure", words, chart, tag("ul", *refused, class_="refused") if refused else None)


def _named(point: Data) -> list[object]:
    """The name of a point and its sizes, the first of them in bold."""
    name, sizes = point_name(point["case"], point["sizes"]), _sizes(point)
    return [tag("strong", name), f" {sizes}"] if name else [tag("strong", sizes)]


def _sizes(point: Data) -> str:
    """The sizes, and how much of a static cache was filled, which no size tells."""
    filled = "" if point["past"] is None else f", {point['past']:,} rows cached"
    return f"{sizes_text(point['sizes'])}{filled}"


def _sweeps(points: Sequence[Data], look: Look) -> Html | None:
    if len(points) < 2:
        return None
    figures = [
        _panel_figure(panel, chart)
        for panel in sweep_panels(points)
        if (chart := sweep_chart(panel, look)) is not None
    ]
    if not figures:
        return None
    return join([tag("h3", "Over lengths and batches"), tag("div", *figures, class_="charts")])


def _panel_figure(panel: Panel, chart: Html) -> Html:
    fixed = f" at {sizes_text(panel.fixed)}" if panel.fixed else ""
    return tag("figure", tag("figcaption", tag("strong", f"p50 over {panel.axis}"), f"{fixed}, µs"), chart)


def _roofline(points: Sequence[Data], look: Look) -> Html | None:
    plots = roofline_plots(points, look)
    if not plots:
        return None
    words = (
        "Each column is one size. The line is the roof of the GPU; the short bar in a column is the floor of "
        f"this layer, whose stages run one after the other. {roofline_summary(points)}"
    )
    parts = [tag("h3", "Roofline"), sentence(words, css="lead"), legend(points, look)]
    return join([*parts, *(tag("figure", plot, class_="wide") for plot in plots)])


def legend(points: Sequence[Data], look: Look) -> Html:
    """The marks of all rows that were timed."""
    shown = {row["name"] for point in points for row in point["rows"] if row["timing"]}
    return tag("ul", *(tag("li", swatch(name, look)) for name in look if name in shown), class_="legend")


def swatch(name: str, look: Look) -> Html:
    """The mark of a row with its name."""
    series = look[name]
    sign = tag("svg", mark(series.mark, 6, 6, series.css), width="12", height="12", aria_hidden="true")
    # A mark must not stand alone at the end of a line, unless the name is too long for one.
    return tag("span", sign, " ", tag("span", name), class_="who" if len(name) <= 32 else None)


def _table(points: Sequence[Data], look: Look) -> Html:
    decodes = any(row["tokens_per_s"] is not None for point in points for row in point["rows"])
    columns = [name for name in _COLUMNS_LATENCY if decodes or name != _TOKENS]
    groups = [
        Group(title=_point_title(point), rows=[_row_of_latency(row, look, columns) for row in point["rows"]])
        for point in points
    ]
    return join([tag("h3", "All figures"), data_table("Latency of every row at every size", columns, groups)])


def _point_title(point: Data) -> Html:
    roof = point["roofline"]
    floor = f" · floor {short(roof['bound_us'])} µs, {roof['bound']}-bound" if roof else ""
    work = f"{short(point['flops'] / 1e9)} GFLOP · {size(int(point['bytes']))}{floor}"
    return join([*_named(point), tag("span", f" {work}", class_="about-group")])


def _row_of_latency(row: Data, look: Look, columns: Sequence[str]) -> Row:
    timing = row["timing"]
    if timing is None:
        reason = tag("span", f"not timed: {row['refused'] or 'no reason was given'}", class_="aside")
        return [swatch(row["name"], look), Cell(content=reason, span=len(columns) - 1)]
    conditions = timing["conditions"]
    tokens = [number(row["tokens_per_s"], short(row["tokens_per_s"]))] if _TOKENS in columns else []
    return [
        tag("span", swatch(row["name"], look), title=row["backend"]),
        *(number(timing[key], short(timing[key])) for key in ("p50_us", "p90_us", "p99_us")),
        number(row["speedup_over_eager"], times(row["speedup_over_eager"])),
        number(row["speedup_over_best_pytorch"], times(row["speedup_over_best_pytorch"])),
        number(row["tflops"], short(row["tflops"])),
        number(row["gb_per_s"], short(row["gb_per_s"])),
        *tokens,
        number(row["roofline_share"], percent(row["roofline_share"])),
        number(timing["memory_bytes"], size(timing["memory_bytes"])),
        number(timing["host_us"], short(timing["host_us"])),
        yes_no(timing["graph"]),
        "yes" if timing["stable"] else status("no", "doubt"),
        _clock(conditions),
        number(conditions["temperature_c"], short_whole(conditions["temperature_c"])),
    ]


def _clock(conditions: Data) -> Cell:
    clock, most = conditions["sm_mhz"], conditions["sm_mhz_max"]
    words = short_whole(clock)
    if clock is not None and most is not None and clock < most:
        words += f" of {short_whole(most)}"
    held = ", ".join(conditions["held_back"])
    note = tag("div", f"held back: {held}", class_="aside") if held else None
    return Cell(content=join([words, note]), order=clock, numeric=True)


def short_whole(value: float | None) -> str:
    """A number without digits after the point."""
    return NOTHING if value is None else f"{value:,.0f}"


def _kernels(points: Sequence[Data], look: Look) -> Html | None:
    """The longest kernels of every row, folded away but for the first size."""
    shown = [point for point in points if any(row["kernels"] for row in point["rows"])]
    if not shown:
        return None
    folds = [_kernel_fold(point, look, is_open=index == 0) for index, point in enumerate(shown)]
    return join([tag("h3", "Longest kernels"), *folds])


def _kernel_fold(point: Data, look: Look, *, is_open: bool) -> Html:
    rows = [_kernel_row(kernel, row, look) for row in point["rows"] for kernel in row["kernels"]]
    caption = f"Kernels at {_sizes(point)}"
    table = data_table(caption, ("row", "kernel", "#calls", "#µs", "#of p50"), [Group(rows=rows)])
    return tag("details", tag("summary", *_named(point)), table, open=is_open)


def _kernel_row(kernel: Data, row: Data, look: Look) -> Row:
    share = kernel["microseconds"] / row["timing"]["p50_us"] if row["timing"] else None
    return [
        swatch(row["name"], look),
        code(kernel["name"]),
        number(kernel["calls"], f"{kernel['calls']:g}"),
        number(kernel["microseconds"], short(kernel["microseconds"])),
        number(share, percent(share)),
    ]


# -- The section that says whether a runtime decodes rightly, step after step ----------------------

_COLUMNS_DECODE = (
    "runtime", "verdict", "trace", "prompts", "#steps", "first wrong", "#budget used",
    "#growth", "#eager's growth",
)  # fmt: skip
_LEAD = (
    "A prompt, then single tokens. Every step is judged against the FP64 oracle, which has no cache, and "
    "so are the keys and values that the runtime holds in the end. Growth is the median error of the last "
    "tenth of the steps over that of the first; it should be about that of eager PyTorch."
)
_LISTED_PROMPTS = 4


def decode(data: Data, look: Look) -> Html | None:
    """The verdict on every runtime and trace, and the errors of the steps; None without a cache."""
    reports = data["decode"]
    if not reports:
        return None
    rows = [row for report in reports for row in _rows_of_decode(report)]
    verdicts = data_table("Decoding, by runtime and trace", _COLUMNS_DECODE, [Group(rows=rows)])
    traces = list(dict.fromkeys(report["trace"] for report in reports))
    parts = [_trace([each for each in reports if each["trace"] == name], data, look) for name in traces]
    return section("decode", "Decode", sentence(_LEAD, css="lead"), verdicts, *parts)


def prompts_text(prompt: Sequence[int]) -> str:
    """The lengths of the prompts in a few words."""
    if len(prompt) == 1:
        return f"a prompt of {prompt[0]}"
    if len(set(prompt)) == 1:
        return f"{len(prompt)} prompts of {prompt[0]}"
    if 0 < len(prompt) <= _LISTED_PROMPTS:
        return f"prompts of {', '.join(map(str, prompt[:-1]))} and {prompt[-1]}"
    return f"{len(prompt)} prompts of {min(prompt)} to {max(prompt)}" if prompt else "no prompt"


def place_text(first_failed: int | None, failed: int) -> str:
    """Where decoding went wrong first."""
    if first_failed is None:
        return "cache" if failed else NOTHING
    return f"step {first_failed}" if first_failed else "prefill"


def _rows_of_decode(report: Data) -> list[Row]:
    steps = grouped(report["steps"])
    if len(report["errors"]) < report["steps"]:
        steps = f"{len(report['errors']):,} of {steps}"
    row: Row = [
        report["backend"],
        passed(report["passed"]),
        report["trace"],
        prompts_text(report["prompt"]),
        number(report["steps"], steps),
        place_text(report["first_failed"], report["failed"]),
        share_bar(report["share"], failed=not report["passed"]),
        *(number(report[key], times(report[key])) for key in ("growth", "eager_growth")),
    ]
    problems = [_problem_of_decode(failure) for failure in report["failures"]]
    more = report["failed"] - len(problems)
    if more > 0:
        problems.append(f"and {more:,} more of {plural(report['judged'], 'check')}")
    lines = tag("div", *(tag("div", words) for words in problems), class_="problem")
    return [row, [Cell(content=lines, span=len(_COLUMNS_DECODE))]] if problems else [row]


def _problem_of_decode(failure: Data) -> str:
    """What is wrong; the sentence has the place already."""
    words, worst = f"{failure['case']}/{failure['output']}: {failure['problem']}", failure["deviation"]
    if worst is None or worst["worst_got"] is None or worst["worst_want"] is None:
        return words
    return f"{words}: got {worst['worst_got']:.6g}, oracle {worst['worst_want']:.6g}"


def _trace(reports: Sequence[Data], data: Data, look: Look) -> Html:
    """The curves of one trace, and a table of some of their points."""
    curves = decode_curves(reports)
    wrong = [report["first_failed"] for report in reports if report["first_failed"]]
    drawn = decode_chart(curves, wrong, decode_look(list(curves), data["latency"], look))
    name, steps = reports[0]["trace"], max(map(len, curves.values()))
    words = "Relative L2 by step"
    words += "; thin lines are single steps, thick ones medians" if is_pooled(steps) else ""
    words += "; a dashed line is the first wrong step" if wrong else ""
    figure = tag("figure", tag("figcaption", words), drawn or sentence("No step gave anything to measure."))
    return join([tag("h3", f"Trace {name}"), figure, _table_of_decode(name, curves)])


def _table_of_decode(name: str, curves: Mapping[str, Sequence[float | None]]) -> Html | None:
    last = max(map(len, curves.values()))
    steps = sorted({*(2**k for k in range(last.bit_length())), last} - {0})
    rows = [
        [number(step, grouped(step)), *(_at(errors, step) for errors in curves.values())] for step in steps
    ]
    if not rows:
        return None
    columns = ("#step", *(f"#{each}" for each in curves))
    return data_table(
        f"Relative L2 at some steps of trace {name}", columns, [Group(rows=rows)], css="compact"
    )


def _at(errors: Sequence[float | None], step: int) -> Cell:
    value = errors[step - 1] if step <= len(errors) else None
    return number(value, error(value))


# -- A benchmark at a glance: one line for every model and size, one column for every row ----------

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
        cells = [_markdown(f"{model['name']} {model['precision']}"), _sizes_of_bench(point, axes)]
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
        floor = point["roofline"]["bound_us"] if point["roofline"] else None
        name = f"{model['name']} {model['precision']}"
        rows.append([name, _sizes_of_bench(point, axes), *cells, number(floor, short(floor))])
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


def _sizes_of_bench(point: Data, axes: str) -> str:
    """The sizes, with their names where the heading does not say them."""
    return sizes_text(point["sizes"]) if axes == "sizes" else sizes_product(point["sizes"])


def _row_of_bench(point: Data, name: str) -> Data | None:
    return next((row for row in point["rows"] if row["name"] == name), None)


def _p50(point: Data, name: str) -> float | None:
    row = _row_of_bench(point, name)
    return row["timing"]["p50_us"] if row and row["timing"] else None


def _fastest(point: Data) -> str | None:
    timed = [row for row in point["rows"] if row["timing"]]
    return min(timed, key=lambda row: row["timing"]["p50_us"])["name"] if timed else None


def _cell_text(point: Data, name: str) -> str:
    row = _row_of_bench(point, name)
    if row is None:
        return NOTHING
    return short(row["timing"]["p50_us"]) if row["timing"] else _REFUSED


def _lacks_graph(point: Data, name: str) -> bool:
    row = _row_of_bench(point, name)
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
    return short(point["roofline"]["bound_us"]) if point["roofline"] else NOTHING


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown(words: str) -> str:
    """A name that cannot break the table or become markup."""
    single = re.sub(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]+", " ", words)
    return re.sub(r"([\\`*_\[\]|~])", r"\\\1", single).replace("&", "&amp;").replace("<", "&lt;")


# -- Where a run took place, and what it was about -------------------------------------------------


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


# -- The top of the page: the verdict, what was found, and the run in a few facts ------------------

# The section of the page in which a finding is shown.
PLACES = {"precision": "fusion", "engine": "fusion"}

_LEVELS_VERDICT = ("failure", "warning", "note")


def verdict_block(data: Data, present: Collection[str]) -> Html:
    """The verdict with its findings and facts.

    Args:
        data: The report.
        present: The sections that the page has, for links.
    """
    verdict, model = data["verdict"], data["model"]
    word = "PASSED" if verdict["passed"] else "FAILED"
    title = tag(
        "h1",
        tag("span", f"{model['name']} ", class_="model"),
        tag("span", model["precision"], class_="muted"),
    )
    head = tag(
        "p",
        tag("strong", word),
        " ",
        tag("span", verdict["headline"], class_="headline"),
        id="verdict",
        class_="good" if verdict["passed"] else "bad",
    )
    summary = tag("p", model["summary"], class_="muted") if model["summary"] else None
    return tag(
        "header", title, summary, head, _findings(verdict["findings"], present), facts(_key_facts(data))
    )


def _findings(findings: list[Data], present: Collection[str]) -> Html | None:
    if not findings:
        return None
    ordered = sorted(findings, key=lambda finding: _LEVELS_VERDICT.index(finding["level"]))
    return tag("ul", *(_finding(finding, present) for finding in ordered), class_="findings")


def _finding(finding: Data, present: Collection[str]) -> Html:
    name, place = finding["section"], PLACES.get(finding["section"], finding["section"])
    about = tag("a", name, href=f"#{place}") if place in present else tag("span", name)
    return tag(
        "li",
        tag("span", finding["level"], class_=f"level {finding['level']}"),
        tag("span", about, class_="about"),
        tag("span", finding["text"]),
    )


def _key_facts(data: Data) -> list[tuple[str, object]]:
    gpu = data["environment"]["gpu"]
    return [
        ("attention", _attention(data["model"], data["parity"])),
        ("checked", _checked([run for run in data["parity"] if run["cases"] != LAYERS])),
        ("largest error", _largest(data["parity"])),
        ("fused", join(_fused(data["engines"]))),
        ("fastest engine", _fastest_of_verdict(data["latency"])),
        ("GPU", gpu["name"] if gpu else "none here"),
    ]


def _attention(model: Data, parity: list[Data]) -> str:
    """The heads of a layer; of a user's module, how many of its attentions are right."""
    spec = model["spec"]
    heads, shared, size = spec.get("Hq"), spec.get("Hkv"), spec.get("D")
    if heads and shared and size:
        return f"{model['kind']}, {heads}/{shared} heads of {size}"
    counts = [
        (sum(verdict["passed"] for verdict in run["verdicts"]), len(run["verdicts"]))
        for run in parity
        if run["cases"] == LAYERS
    ]
    if counts:
        right, of = min(counts)  # the runtime in which the fewest are
        return f"{model['kind']}, {right}/{of} attentions right"
    count = spec.get("attentions")
    return f"{model['kind']}, {plural(count, 'attention')}" if count else str(model["kind"])


def _checked(parity: list[Data]) -> str:
    verdicts = [verdict for run in parity for verdict in run["verdicts"]]
    good = sum(verdict["passed"] for verdict in verdicts)
    return f"{good} of {plural(len(verdicts), 'output')} right" if verdicts else "nothing was run"


def _largest(parity: list[Data]) -> str:
    verdicts = [verdict for run in parity for verdict in run["verdicts"]]
    if any(verdict["share"] is None and not verdict["passed"] for verdict in verdicts):
        return "not finite"
    shares = [verdict["share"] for verdict in verdicts if verdict["share"] is not None]
    return f"{budget_share(max(shares))} of its budget" if shares else NOTHING


def _fused(engines: list[Data]) -> list[object]:
    if not engines:
        return ["no engine"]
    return [
        tag(
            "div",
            f"{each['name']}: {fusion_of(each)}, "
            f"{precision_summary(each['precision_status'], each['precision'])}",
        )
        for each in engines
    ]


def _fastest_of_verdict(latency: Data | None) -> str:
    """The best engine at the usual sizes, or else at the first that it was timed at."""
    points = latency["points"] if latency else []
    for point in sorted(points, key=lambda point: point["case"] != "opt"):
        rows = [row for row in point["rows"] if row["family"] == "tensorrt" and row["timing"]]
        if rows:
            best = min(rows, key=lambda row: row["timing"]["p50_us"])
            gain = best["speedup_over_best_pytorch"]
            against = f", {times(gain)} the speed of the best PyTorch" if gain else ""
            return f"{short(best['timing']['p50_us'])} µs at {point['case']}{against}"
    return "not timed"
