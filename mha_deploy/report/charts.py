"""The charts of the report."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import median
from typing import Any

from mha_deploy.report.svg import (
    FAMILIES,
    HEAT_LIGHT,
    LETTER,
    LIGHT,
    LINE,
    Html,
    Scale,
    Series,
    bottom_axis,
    chart,
    cut,
    join,
    left_axis,
    line,
    linear_scale,
    log_scale,
    mark,
    polyline,
    spread,
    tag,
    text,
)
from mha_deploy.text import error, plural, short, sizes_product, sizes_text

# -- The charts of the latency section: bars for one point, curves over several --------------------

# Over this ratio the short bars of a linear scale cannot be told apart any more.
_LOG_FROM = 12.0

_BARS_WIDTH, _BAR_STEP, _NAME_WIDTH, _VALUE_WIDTH = 558.0, 22.0, 146.0, 52.0
_PANEL_WIDTH, _PANEL_HEIGHT, _LABEL_WIDTH = 360.0, 264.0, 140.0

Look = Mapping[str, Series]


def needs_log(points: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the rows of some point differ so much that all points need a log scale."""
    for point in points:
        timed = [row["timing"]["p50_us"] for row in point["rows"] if row["timing"]]
        if timed and max(timed) > _LOG_FROM * min(timed):
            return True
    return False


def latency_bars(point: Mapping[str, Any], look: Look, *, log: bool) -> Html | None:
    """Bars of p50, whiskers to p90 and p99, and the roofline bound; None where nothing was timed."""
    rows = [row for row in point["rows"] if row["timing"]]
    if not rows:
        return None
    bound = point["roofline"]["bound_us"] if point["roofline"] else None
    start, end, top = _NAME_WIDTH, _BARS_WIDTH - _VALUE_WIDTH, 18.0
    bottom = top + _BAR_STEP * len(rows)
    scale = _bars_scale(rows, bound, start, end, log=log)
    parts = [bottom_axis(scale, top, bottom)]
    parts += [_bar(row, scale, top + _BAR_STEP * (i + 0.5), look) for i, row in enumerate(rows)]
    if bound is not None:
        x = scale.place(bound)
        parts += [line(x, top - 4, x, bottom, "bound"), _bound_label(x, top - 11, bound, start)]
    unit = "µs, log scale" if scale.log else "µs"
    parts.append(text(end, bottom + 28, unit, anchor="end", css="muted"))
    label = f"Latency at {sizes_text(point['sizes'])}: " + ", ".join(
        f"{row['name']} {short(row['timing']['p50_us'])} µs" for row in rows
    )
    return chart(_BARS_WIDTH, bottom + 36, *parts, label=label, css="bars")


def _bars_scale(
    rows: Sequence[Mapping[str, Any]], bound: float | None, start: float, end: float, *, log: bool
) -> Scale:
    shown = [row["timing"][key] for row in rows for key in ("p50_us", "p99_us")]
    if bound is not None and bound > 0:
        shown.append(bound)
    return log_scale(shown, start, end) if log else linear_scale(shown, start, end)


def _bound_label(x: float, y: float, bound: float, start: float) -> Html:
    words = f"bound {short(bound)}"
    anchor = "start" if x - start < len(words) * LETTER / 2 else "middle"
    return text(x, y, words, anchor=anchor, css="muted")


def _bar(row: Mapping[str, Any], scale: Scale, y: float, look: Look) -> Html:
    timing, series = row["timing"], look[row["name"]]
    p50, p90, p99 = (scale.place(timing[key]) for key in ("p50_us", "p90_us", "p99_us"))
    # On a log scale a length means nothing, so the value is a mark on a thin stem.
    height = 3.0 if scale.log else 12.0
    shape = {"x": scale.start, "y": y - height / 2, "width": max(p50 - scale.start, 1.0), "height": height}
    whisker = [line(p50, y, p99, y, "whisker"), line(p90, y - 3, p90, y + 3, "whisker")]
    whisker.append(line(p99, y - 5, p99, y + 5, "whisker"))
    figures = ", ".join(f"{key} {short(timing[f'{key}_us'])} µs" for key in ("p50", "p90", "p99"))
    return tag(
        "g",
        tag("title", f"{row['name']} ({row['backend']}): {figures}"),
        text(scale.start - 20, y, cut(row["name"], _NAME_WIDTH - 20), anchor="end"),
        mark(series.mark, scale.start - 10, y, series.css),
        tag("rect", class_=f"bar {series.css}", **shape),
        *whisker,
        mark(series.mark, p50, y, series.css) if scale.log else None,
        text(scale.end + _VALUE_WIDTH, y, short(timing["p50_us"]), anchor="end", css="value"),
    )


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Points that differ in one axis alone.

    Args:
        axis: That axis.
        fixed: The sizes that stay the same.
        points: The points, by size.
    """

    axis: str
    fixed: Mapping[str, int]
    points: tuple[Mapping[str, Any], ...]


def sweep_panels(points: Sequence[Mapping[str, Any]]) -> Iterator[Panel]:
    """Every line of points along one axis: first those along a length, then those along the batch.

    Points of a preallocated KV cache are on one line where it was filled alike. An empty past is on no line:
    the axes are logarithmic.
    """
    axes = {axis: None for point in points for axis in point["sizes"]}
    for axis in sorted(axes, key=lambda name: name == "B"):
        groups: dict[tuple[tuple[str, int], ...], dict[int, Mapping[str, Any]]] = {}
        for point in points:
            rest = tuple(sorted((k, v) for k, v in _fixed(point).items() if k != axis))
            if point["sizes"].get(axis):
                groups.setdefault(rest, {})[point["sizes"][axis]] = point
        for rest, found in sorted(groups.items()):
            if len(found) > 1:
                yield Panel(axis=axis, fixed=dict(rest), points=tuple(found[size] for size in sorted(found)))


def _fixed(point: Mapping[str, Any]) -> dict[str, int]:
    """What must be alike along a line, by its name on the page."""
    past = {} if point["past"] is None else {"KV-cache entries": point["past"]}
    return {**point["sizes"], **past}


def sweep_chart(panel: Panel, look: Look) -> Html | None:
    """The p50 of every row along one axis, both axes logarithmic; None where no row has two points."""
    curves = {name: found for name in look if len(found := _curve(panel, name)) > 1}
    if not curves:
        return None
    left, top, bottom = 46.0, 12.0, _PANEL_HEIGHT - 36
    right = _PANEL_WIDTH + left
    sizes = [point["sizes"][panel.axis] for point in panel.points]
    across = log_scale(sizes, left, right, margin=1.12)
    up = log_scale([us for found in curves.values() for _, us in found], bottom, top)
    parts = [bottom_axis(across, top, bottom, sizes), left_axis(up, left, right)]
    parts += [_curve_parts(name, found, across, up, look) for name, found in curves.items()]
    parts.append(end_labels(curves, across, up, right, look))
    parts.append(text((left + right) / 2, bottom + 28, panel.axis, anchor="middle", css="muted"))
    label = f"p50 in µs along {panel.axis} at {sizes_text(panel.fixed)}, for {', '.join(curves)}"
    return chart(right + _LABEL_WIDTH, _PANEL_HEIGHT, *parts, label=label, css="sweep")


def _curve(panel: Panel, name: str) -> list[tuple[int, float]]:
    return [
        (point["sizes"][panel.axis], row["timing"]["p50_us"])
        for point in panel.points
        for row in point["rows"]
        if row["name"] == name and row["timing"]
    ]


def _curve_parts(name: str, found: Sequence[tuple[int, float]], across: Scale, up: Scale, look: Look) -> Html:
    series = look[name]
    places = [(across.place(size), up.place(us)) for size, us in found]
    marks = [
        mark(series.mark, x, y, series.css, title=f"{name} at {size}: {short(us)} µs", radius=3.2)
        for (x, y), (size, us) in zip(places, found, strict=True)
    ]
    return join([polyline(places, f"curve {series.css}"), *marks])


def end_labels(
    curves: Mapping[str, Sequence[tuple[float, float]]], across: Scale, up: Scale, right: float, look: Look
) -> Html:
    """The names at the ends of their curves, moved apart, with a hairline to where they belong."""
    ends = [found[-1] for found in curves.values()]
    wanted = [up.place(us) for _, us in ends]
    last = max(size for size, _ in ends)
    parts = []
    for name, (size, _), y, place in zip(curves, ends, wanted, spread(wanted, up.end, up.start), strict=True):
        css = f"leader {look[name].css}{' early' if size < last else ''}"
        parts.append(line(across.place(size) + 5, y, right + 5, place, css))
        parts.append(text(right + 8, place, cut(name, _LABEL_WIDTH - 8)))
    return join(parts)


# -- The chart of the decode section: the error of every step, beside that of the module itself ----

EAGER = "eager PyTorch"

_WIDTH, _HEIGHT, _LABEL_WIDTH_DECODE_CHART = 620.0, 264.0, 140.0
# The error of one token is a small sample, and hundreds of them hide each other: from so many steps on, the
# curve is the median of some of them, over a faint line through all.
_POOLED_FROM, _POOLS = 64, 24
_MARKS = 12  # of a curve at most, to tell it by without its colour, and to point at

Data = Mapping[str, Any]
Errors = Sequence[float | None]


@dataclass(frozen=True, kw_only=True)
class _Point:
    """The error of a step, or the median of several: from `first` to `last`."""

    first: int
    last: int
    error: float

    @property
    def middle(self) -> float:
        return (self.first + self.last) / 2

    @property
    def words(self) -> str:
        several = f"median of steps {self.first} to {self.last}"
        return f"{several if self.last > self.first else f'step {self.first}'}: {error(self.error)}"

    def place(self, across: Scale, up: Scale) -> tuple[float, float]:
        return across.place(self.middle), up.place(self.error)


def decode_curves(reports: Sequence[Data]) -> dict[str, Errors]:
    """The errors of every step by name: the module's own first, then each runtime's on the same trace."""
    curves: dict[str, Errors] = {
        EAGER: max((report["eager_errors"] for report in reports), key=len, default=[])
    }
    for report in reports:
        name, count = report["backend"], 1
        while name in curves:  # two engines of one TensorRT
            count += 1
            name = f"{report['backend']} ({count})"
        curves[name] = report["errors"]
    return curves


def decode_look(names: Sequence[str], latency: Data | None, look: Look) -> dict[str, Series]:
    """A look for every curve: that of its row in the charts of latency, else one that no row has."""
    points = latency["points"] if latency else []
    rows = {row["backend"]: look[row["name"]] for point in points for row in point["rows"]}
    known = {name: rows[name] for name in names if name in rows}
    if EAGER in names and "eager" in look:
        known[EAGER] = look["eager"]
    taken = {(series.hollow, series.colour) for series in look.values()}
    here = {series.colour for series in known.values()}
    free = [each for each in product((False, True), range(len(LIGHT))) if each not in taken]
    order = iter(sorted(free, key=lambda each: each[1] in here))
    return {name: known.get(name) or _unknown(name, *next(order, (True, 0))) for name in names}


def _unknown(name: str, hollow: bool, colour: int) -> Series:
    family = next((each for each in ("tensorrt", "onnx") if name.startswith(each)), "onnxruntime")
    shape = FAMILIES["pytorch" if name == EAGER or name.startswith("torch") else family]
    return Series(colour=colour, mark=shape, hollow=hollow)


def decode_chart(curves: Mapping[str, Errors], first_failed: Sequence[int], look: Look) -> Html | None:
    """The relative error over the steps; None where nothing was measured.

    Args:
        curves: The errors of steps 1, 2, …, by name.
        first_failed: Steps to mark: where a runtime went wrong first.
        look: How each curve looks.
    """
    known = {name: errors for name, errors in curves.items() if any(each is not None for each in errors)}
    if not known:
        return None
    steps = max(map(len, curves.values()))
    left, top, bottom = 56.0, 14.0, _HEIGHT - 36
    right = left + _WIDTH
    up = _up([each for errors in known.values() for each in errors if each is not None], bottom, top)
    across = linear_scale([steps], left, right)
    whole = [value for value in across.ticks() if value == int(value)]
    parts = [bottom_axis(across, top, bottom, whole), left_axis(up, left, right, error)]
    parts += [_failed_line(step, across, top, bottom) for step in sorted(set(first_failed)) if step]
    size = steps / _POOLS if is_pooled(steps) else 1.0
    shown = {name: list(_runs(errors, size)) for name, errors in known.items()}
    if is_pooled(steps):
        parts += [_lines(_runs(known[name]), across, up, f"each {look[name].css}") for name in known]
    parts += [_curve_of_decode_chart(name, found, across, up, look) for name, found in shown.items()]
    ends = {
        name: [(point.middle, point.error) for run in found for point in run] for name, found in shown.items()
    }
    parts.append(end_labels(ends, across, up, right, look))
    parts.append(text((left + right) / 2, bottom + 28, "step", anchor="middle", css="muted"))
    if up.log:
        parts.append(text(right, bottom + 28, "log scale", anchor="end", css="muted"))
    last = ", ".join(f"{name} {error(found[-1][1])}" for name, found in ends.items())
    label = f"Relative error over {plural(steps, 'step')}, at the end: {last}"
    return chart(right + _LABEL_WIDTH_DECODE_CHART, _HEIGHT, *parts, label=label, css="decode")


def is_pooled(steps: int) -> bool:
    """Whether the curves of so many steps are medians of some."""
    return steps >= _POOLED_FROM


def _runs(errors: Errors, size: float = 1.0) -> Iterator[list[_Point]]:
    """Medians of about `size` steps each, in runs without a gap: no line may hide what was not measured."""
    run: list[_Point] = []
    edges = [round(index * size) for index in range(math.ceil(len(errors) / size) + 1)]
    for start, end in pairwise(edges):
        found = [value for value in errors[start:end] if value is not None]
        if found:
            run.append(_Point(first=start + 1, last=min(end, len(errors)), error=median(found)))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _up(values: Sequence[float], bottom: float, top: float) -> Scale:
    low = min((value for value in values if value > 0), default=1.0)
    return (log_scale if max(values) > _LOG_FROM * low else linear_scale)(values, bottom, top)


def _failed_line(step: int, across: Scale, top: float, bottom: float) -> Html:
    x = across.place(step)
    return tag("g", tag("title", f"first wrong step: {step}"), line(x, top, x, bottom, "bound"))


def _lines(runs: Iterable[Sequence[_Point]], across: Scale, up: Scale, css: str) -> Html:
    long = (run for run in runs if len(run) > 1)
    return join(polyline([point.place(across, up) for point in run], f"curve {css}") for run in long)


def _curve_of_decode_chart(
    name: str, runs: Sequence[Sequence[_Point]], across: Scale, up: Scale, look: Look
) -> Html:
    """A line with some marks; what stands between two gaps has its mark, for it has no line."""
    series, points = look[name], [point for run in runs for point in run]
    every = math.ceil(len(points) / _MARKS)
    alone = {run[0] for run in runs if len(run) == 1}
    marked = [
        point
        for index, point in enumerate(points, 1)
        if index % every == 0 or point is points[-1] or point in alone
    ]
    marks = [
        mark(series.mark, *point.place(across, up), series.css, title=f"{name}, {point.words}", radius=3.2)
        for point in marked
    ]
    return join([_lines(runs, across, up, series.css), *marks])


# -- Where the errors are: a map of heads and positions --------------------------------------------

_STEPS = len(HEAT_LIGHT)
_MOST_COLUMNS, _MOST_ROWS = 128, 128
_MAP_WIDTH, _LEFT, _TOP = 500.0, 40.0, 6.0

# Over this ratio a linear scale would show one bad head and nothing else.
_LOG_FROM_HEATMAP = 20.0

Grid = Sequence[Sequence[float | None]]


@dataclass(frozen=True, kw_only=True)
class HeatScale:
    """Which step of the colour scale a value has.

    Args:
        edges: Smallest value of every step, then the largest value of all.
        log: Whether the steps are equal ratios.
    """

    edges: tuple[float, ...]
    log: bool

    def step(self, value: float) -> int:
        """The number of the step, from 0."""
        return min(max(bisect_right(self.edges, value) - 1, 0), _STEPS - 1)


def heat_scale(maps: Sequence[Mapping[str, Any]]) -> HeatScale:
    """One scale for all maps, so that they can be compared."""
    values = [value for each in maps for row in each["values"] for value in row if value is not None]
    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive), max(positive)
    if high > _LOG_FROM_HEATMAP * low:
        low = max(low, high * 1e-6)
        ratio = math.log(high / low)
        return HeatScale(edges=tuple(low * math.exp(ratio * i / _STEPS) for i in range(_STEPS + 1)), log=True)
    return HeatScale(edges=tuple(high * i / _STEPS for i in range(_STEPS + 1)), log=False)


def heat_legend(scale: HeatScale, *, has_gaps: bool) -> Html:
    """The steps with their numbers."""
    steps = [
        tag(
            "li",
            tag("span", class_=f"swatch q{i}"),
            f"{error(scale.edges[i])} to {error(scale.edges[i + 1])}",
        )
        for i in range(_STEPS)
    ]
    if has_gaps:
        steps.append(tag("li", tag("span", class_="swatch qn"), "no finite number"))
    kind = "equal ratios" if scale.log else "equal steps"
    return tag("div", tag("p", f"Relative RMS error, {kind}"), tag("ul", *steps), class_="heat-legend")


def has_gaps(maps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether some cell has no finite number."""
    return any(value is None for each in maps for row in each["values"] for value in row)


def heatmap(data: Mapping[str, Any], scale: HeatScale) -> Html | None:
    """One map; None where it has no cells."""
    values, down, merged = pooled(data["values"])
    columns = max((len(row) for row in values), default=0)
    if not columns:
        return None
    width, height = _MAP_WIDTH / columns, min(max(300.0 / len(values), 3.0), 16.0)
    each = data["bin"] * merged
    cells = [
        _cell(value, r, c, scale, (width, height), _name(data, r * down, c * each, each))
        for r, row in enumerate(values)
        for c, value in enumerate(row)
    ]
    bottom = _TOP + height * len(values)
    parts = [tag("g", *cells, class_="cells"), _row_numbers(len(values), down, height)]
    parts.append(_column_numbers(columns, each, width, bottom))
    parts.append(text(_LEFT + _MAP_WIDTH, bottom + 28, cut(data["columns"], 200), anchor="end", css="muted"))
    parts.append(text(0, bottom + 28, f"{cut(data['rows'], 200)} ↓", css="muted"))
    label = (
        f"Error per {data['rows']} and {data['columns']}: {data['backend']}, {data['case']}, {data['output']}"
    )
    return chart(_LEFT + _MAP_WIDTH + 16, bottom + 38, *parts, label=label, css="heatmap")


def pooled(values: Grid) -> tuple[list[list[float | None]], int, int]:
    """A grid of at most 128 × 128: the largest of every block, and how many rows and columns a block has."""
    columns = max((len(row) for row in values), default=0)
    down, across = math.ceil(len(values) / _MOST_ROWS) or 1, math.ceil(columns / _MOST_COLUMNS) or 1
    if down == across == 1:
        return [list(row) for row in values], 1, 1
    blocks = [
        [
            _worst([value for row in values[r : r + down] for value in row[c : c + across]])
            for c in range(0, columns, across)
        ]
        for r in range(0, len(values), down)
    ]
    return blocks, down, across


def _worst(block: Sequence[float | None]) -> float | None:
    finite = [value for value in block if value is not None]
    return max(finite) if len(finite) == len(block) and finite else None


def _name(data: Mapping[str, Any], row: int, first: int, count: int) -> str:
    last = f"–{first + count - 1}" if count > 1 else ""
    return f"{data['rows']} {row}, {data['columns']} {first}{last}"


def _cell(
    value: float | None, row: int, column: int, scale: HeatScale, size: tuple[float, float], name: str
) -> Html:
    css = "qn" if value is None else f"q{scale.step(value)}"
    words = "no finite number" if value is None else error(value)
    place = {"x": _LEFT + column * size[0], "y": _TOP + row * size[1]}
    return tag(
        "rect",
        tag("title", f"{name}: {words}"),
        **place,
        width=size[0],
        height=size[1],
        class_=css,
    )


def _row_numbers(count: int, down: int, height: float) -> Html:
    step = max(1, math.ceil(12 / height))
    rows = range(0, count, step)
    return join(text(_LEFT - 6, _TOP + (r + 0.5) * height, str(r * down), anchor="end") for r in rows)


def _column_numbers(count: int, each: int, width: float, bottom: float) -> Html:
    step = next(n for n in (1, 2, 4, 5, 8, 10, 16, 20, 32, 64) if n * width >= 40 or n == 64)
    return join(text(_LEFT + c * width, bottom + 12, str(c * each)) for c in range(0, count, step))


# -- The roofline plot: what the GPU allows at most, and what every row reached --------------------

_WIDTH_ROOFLINE, _HEIGHT_ROOFLINE, _LEFT_ROOFLINE, _RIGHT_MARGIN = 1080.0, 360.0, 56.0, 16.0

Point = Mapping[str, Any]


def roofline_plots(points: Sequence[Point], look: Look) -> list[Html]:
    """One plot for every roof: points of one GPU and precision share theirs."""
    roofs: dict[tuple[float, float], list[Point]] = {}
    for point in points:
        roof = point["roofline"]
        if roof and point["flops"] > 0 and point["bytes"] > 0 and any(row["tflops"] for row in point["rows"]):
            roofs.setdefault((roof["tflops_peak"], roof["gb_per_s_peak"]), []).append(point)
    return [_plot(found, *peaks, look) for peaks, found in roofs.items()]


def _plot(points: Sequence[Point], tflops: float, gb_per_s: float, look: Look) -> Html:
    ridge = tflops * 1e3 / gb_per_s  # FLOP per byte from which on arithmetic is the limit
    labels, tiers = _column_labels(points, ridge)
    top, bottom = 10.0 + LINE * (tiers + 1), _HEIGHT_ROOFLINE - 40
    across = _across(points, ridge)
    reached = [row["tflops"] for point in points for row in point["rows"] if row["tflops"]]
    up = log_scale([*reached, tflops], bottom, top, margin=1.4)
    parts = [bottom_axis(across, top, bottom), left_axis(up, across.start, across.end)]
    parts.append(_roof(across, up, tflops, gb_per_s, ridge))
    parts += [_column(point, across, up, top, look) for point in points]
    parts += [
        text(x, top - 8 - LINE * tier, words, anchor="middle", css="value") for x, tier, words in labels
    ]
    parts.append(text(across.end, bottom + 30, "FLOP per byte", anchor="end", css="muted"))
    parts.append(text(4, top - 8 - LINE * tiers, "TFLOP/s", css="muted"))
    label = f"Roofline of {points[0]['roofline']['gpu']}: {short(tflops)} TFLOP/s, {short(gb_per_s)} GB/s"
    return chart(_WIDTH_ROOFLINE, _HEIGHT_ROOFLINE, *parts, label=label, css="roofline")


def _across(points: Sequence[Point], ridge: float) -> Scale:
    intensities = [point["flops"] / point["bytes"] for point in points]
    return log_scale([*intensities, ridge], _LEFT_ROOFLINE, _WIDTH_ROOFLINE - _RIGHT_MARGIN, margin=1.9)


def _roof(across: Scale, up: Scale, tflops: float, gb_per_s: float, ridge: float) -> Html:
    lowest = max(across.low, up.low * 1e3 / gb_per_s)
    slope = (across.place(lowest), up.place(lowest * gb_per_s / 1e3))
    corner, end = (across.place(ridge), up.place(tflops)), (across.end, up.place(tflops))
    peak = text(across.end - 4, up.place(tflops) + 11, f"{short(tflops)} TFLOP/s", anchor="end", css="muted")
    memory = text(slope[0] + 16, slope[1] + 10, f"{short(gb_per_s)} GB/s", anchor="start", css="muted")
    return join([polyline([slope, corner, end], "roof"), peak, memory])


def _column(point: Point, across: Scale, up: Scale, top: float, look: Look) -> Html:
    """The rows of one point above each other, and a bar at the sum of the stages' roofline bounds."""
    roof = point["roofline"]
    x, limit = across.place(point["flops"] / point["bytes"]), point["flops"] / roof["bound_us"] / 1e6
    y = up.place(limit)
    bar = tag(
        "g", tag("title", f"bound of the stages: {short(limit)} TFLOP/s"), line(x - 8, y, x + 8, y, "limit")
    )
    return join(
        [line(x, top, x, up.start, "leader"), bar, *(_dot(row, x, up, look) for row in point["rows"])]
    )


def _dot(row: Mapping[str, Any], x: float, up: Scale, look: Look) -> Html | None:
    if not row["tflops"]:
        return None
    series = look[row["name"]]
    title = f"{row['name']}: {short(row['tflops'])} TFLOP/s, {short(row['gb_per_s'])} GB/s"
    return mark(series.mark, x, up.place(row["tflops"]), series.css, title=title)


def _column_labels(points: Sequence[Point], ridge: float) -> tuple[list[tuple[float, int, str]], int]:
    """The sizes over their columns, in as many tiers as keep them apart: place, tier, text."""
    across = _across(points, ridge)
    taken: list[float] = []
    labels = []
    for point in sorted(points, key=lambda point: point["flops"] / point["bytes"]):
        words, x = sizes_product(point["sizes"]), across.place(point["flops"] / point["bytes"])
        half = (len(words) + 2) * LETTER / 2
        tier = next((i for i, edge in enumerate(taken) if edge <= x - half), len(taken))
        taken[tier : tier + 1] = [x + half]
        labels.append((x, tier, words))
    return labels, len(taken)


def roofline_summary(points: Sequence[Point]) -> str:
    """The plot in one sentence, for whoever cannot see it."""
    best = max(
        (
            (row["roofline_share"], row["name"], point)
            for point in points
            for row in point["rows"]
            if row["roofline_share"]
        ),
        key=lambda found: found[0],
        default=None,
    )
    if best is None:
        return ""
    share, name, point = best
    return f"Nearest to its roofline bound: {name} at {sizes_text(point['sizes'])}, {share:.0%}."
