"""Sections that say how fast everything is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mha_deploy.report.charts import Look, Panel, latency_bars, needs_log, sweep_chart, sweep_panels
from mha_deploy.report.figures import (
    NOTHING,
    percent,
    point_name,
    short,
    size,
    sizes_text,
    times,
    yes_no,
)
from mha_deploy.report.markup import Html, join, tag
from mha_deploy.report.roofline import roofline_plots, roofline_summary
from mha_deploy.report.svg import mark
from mha_deploy.report.tables import Cell, Group, Row, code, data_table, number, section, sentence, status

Data = Mapping[str, Any]

_TOKENS = "#tokens/s"
_COLUMNS = (
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
    columns = [name for name in _COLUMNS if decodes or name != _TOKENS]
    groups = [
        Group(title=_point_title(point), rows=[_row(row, look, columns) for row in point["rows"]])
        for point in points
    ]
    return join([tag("h3", "All figures"), data_table("Latency of every row at every size", columns, groups)])


def _point_title(point: Data) -> Html:
    roof = point["roofline"]
    floor = f" · floor {short(roof['floor_us'])} µs, {roof['bound']}-bound" if roof else ""
    work = f"{short(point['flops'] / 1e9)} GFLOP · {size(int(point['bytes']))}{floor}"
    return join([*_named(point), tag("span", f" {work}", class_="about-group")])


def _row(row: Data, look: Look, columns: Sequence[str]) -> Row:
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
