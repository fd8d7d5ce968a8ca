"""The charts of the report as SVG: markup, scales, axes, marks and colors, and the charts made of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import median
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from mha_deploy.text import error, group_by, plural, runtime_text, short, sizes_joined, sizes_text, tick

Data = Mapping[str, Any]

# -- HTML and SVG as text in which everything is escaped unless it was made here -------------------

# Control characters cannot be read, and those that reverse the direction of text could disguise a name.
_UNREADABLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def readable(words: str) -> str:
    """Text without control characters."""
    return _UNREADABLE.sub("\ufffd", words)


def escaped(value: object) -> Markup:
    """The value as markup: itself if it is markup, else its text, harmless in elements and attributes."""
    if isinstance(value, Markup):
        return value
    text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return escape(readable(text))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """One element; what is None is left out. `class_` is written `class`, `data_x` `data-x`."""
    named = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    # Markup has been escaped for elements; in an attribute it is text like any other.
    opening = [
        f' {key}="{escaped(str(value) if isinstance(value, str) else value)}"'
        for key, value in named.items()
        if value is not None
    ]
    return Markup(f"<{name}{''.join(opening)}>{join(children)}</{name}>")


def join(children: Iterable[object]) -> Markup:
    """Everything one after the other; None is nothing."""
    return Markup("".join(escaped(child) for child in children if child is not None))


# -- Colors and marks. A row has the same of both in every chart of a page ------------------------

LIGHT_PAGE, DARK_PAGE = "#ffffff", "#14161a"
LIGHT = ("#0b64b4", "#e46711", "#505600", "#b00076", "#191058", "#578fed", "#669b92", "#580c0d")
DARK = ("#4d94e8", "#ffb827", "#78b099", "#c6c3ff", "#5668d8", "#bdf0ea", "#7d7b8c", "#e2432a")

HEAT_LIGHT = ("#eef4fc", "#bed7f4", "#8ebaeb", "#5d9ce1", "#367ec9", "#1d62a6", "#024782", "#012e58")
HEAT_DARK = ("#182839", "#214061", "#2b5a8c", "#3375b9", "#5092d9", "#7bafea", "#a6cdfa", "#d8eaff")

FAMILIES = {"pytorch": "circle", "onnxruntime": "square", "tensorrt": "diamond", "onnx": "square"}


class Series(NamedTuple):
    """How one row looks."""

    color: int  # number of its color, from 0
    mark: str  # `circle`, `square` or `diamond`
    hollow: bool  # whether its mark is empty: a second round through the colors

    @property
    def css(self) -> str:
        """Its class in the style sheet."""
        return f"s{self.color}{' hollow' if self.hollow else ''}"


def series_of(latencies: Iterable[Mapping[str, Any] | None]) -> dict[str, Series]:
    """A look for every row name, in the order in which they are first met."""
    points = [point for latency in latencies if latency for point in latency["points"]]
    families: dict[str, str] = {}
    for row in (row for point in points for row in point["rows"]):
        families.setdefault(row["name"], row["family"])
    return {
        name: Series(color=i % len(LIGHT), mark=FAMILIES[family], hollow=i // len(LIGHT) % 2 == 1)
        for i, (name, family) in enumerate(families.items())
    }


def palette_css() -> str:
    """The colors as custom properties of the style sheet."""
    light, dark = (
        ";".join(f"--{kind}{i}:{color}" for kind in palette for i, color in enumerate(palette[kind]))
        for palette in ({"s": LIGHT, "q": HEAT_LIGHT}, {"s": DARK, "q": HEAT_DARK})
    )
    used = [f".s{i}{{--c:var(--s{i})}}" for i in range(len(LIGHT))]
    used += [f".q{i}{{fill:var(--q{i});background:var(--q{i})}}" for i in range(len(HEAT_LIGHT))]
    dark_rule = f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return "\n".join([f":root{{{light}}}", dark_rule, "".join(used)])


# -- Scales, axes and marks: what the charts are drawn with. All lengths are CSS pixels ------------

LETTER = 6.6  # width of an average letter at the size of chart labels, in the widest of the usual fonts
LINE = 14.0  # distance of two lines of labels


@dataclass(frozen=True, kw_only=True)
class Scale:
    """From values to places."""

    low: float  # the value at `start`
    high: float  # the value at `end`
    start: float  # where the axis starts
    end: float  # where it ends; less than `start` for an axis that goes up
    log: bool = False  # whether equal ratios are equally far apart

    def place(self, value: float) -> float:
        """Where a value lies; one that is off the axis lies at its end."""
        if self.log:
            part = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * min(max(part, 0.0), 1.0)

    def value(self, place: float) -> float:
        """The value that lies at a place."""
        part = (place - self.start) / (self.end - self.start)
        if self.log:
            return self.low * (self.high / self.low) ** part
        return self.low + (self.high - self.low) * part

    def ticks(self) -> list[float]:
        """Round values that divide the axis, at most about eight."""
        low, high = self.low, self.high
        if not self.log:
            rough = (high - low) / 5
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
            first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
            return [index * step for index in range(first, last + 1)]
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for steps in ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1, 3), (1,)):
            found = [step * 10.0**decade for decade in decades for step in steps]
            found = [value for value in found if low <= value <= high]
            if len(found) <= 7:
                return found
        return found[:: math.ceil(len(found) / 7)]


def linear_scale(values: Sequence[float], start: float, end: float) -> Scale:
    """From zero to a little more than the largest value."""
    return Scale(low=0.0, high=(max(values, default=0.0) or 1.0) * 1.02, start=start, end=end)


def log_scale(values: Sequence[float], start: float, end: float, *, margin: float = 1.25) -> Scale:
    """From a little less than the smallest positive value to a little more than the largest."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive) / margin, max(positive) * margin
    return Scale(low=low, high=high, start=start, end=end, log=True)


def chart(width: float, height: float, *children: object, label: str, css: str) -> Markup:
    """A drawing of a fixed size, with its name for a screen reader; a narrow screen scrolls it."""
    size = {"viewBox": f"0 0 {width:g} {height:g}", "width": width, "height": height}
    drawing = tag("svg", *children, class_=f"chart {css}", **size, role="img", aria_label=label)
    return tag("div", drawing, class_="scroll")


def text(x: float, y: float, content: str, *, anchor: str = "start", css: str | None = None) -> Markup:
    """A label, vertically centered on `y`."""
    return tag("text", content, x=x, y=y + 4, text_anchor=None if anchor == "start" else anchor, class_=css)


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> Markup:
    """A straight line."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=css)


def titled(title: str, *children: object) -> Markup:
    """Something with text under the pointer."""
    return tag("g", tag("title", title), *children)


def polyline(points: Sequence[tuple[float, float]], css: str) -> Markup:
    """A line through several points."""
    return tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=css)


def mark(kind: str, x: float, y: float, css: str, *, title: str | None = None, radius: float = 4.0) -> Markup:
    """A circle, a square or a diamond."""
    hover, css = tag("title", title) if title else None, f"mark {css}"
    if kind == "square":
        side = radius * 1.75
        return tag("rect", hover, width=side, height=side, class_=css, x=x - side / 2, y=y - side / 2)
    if kind == "diamond":
        reach = radius * 1.35
        path = f"M{x:.1f},{y - reach:.1f} l{reach:g},{reach:g} l-{reach:g},{reach:g} l-{reach:g},-{reach:g}z"
        return tag("path", hover, d=path, class_=css)
    return tag("circle", hover, cx=x, cy=y, r=radius, class_=css)


def bottom_axis(scale: Scale, top: float, bottom: float, ticks: Sequence[float] | None = None) -> Markup:
    """Ticks with numbers under the plot, and a hairline up from each."""
    values = scale.ticks() if ticks is None else ticks
    parts = []
    for value in values:
        x = scale.place(value)
        parts += [line(x, top, x, bottom, "grid"), text(x, bottom + 12, tick(value), anchor="middle")]
    return join([*parts, line(scale.start, bottom, scale.end, bottom, "axis")])


def left_axis(scale: Scale, left: float, right: float, words: Callable[[float], str] = tick) -> Markup:
    """Ticks with numbers left of the plot, and a hairline from each."""
    parts = []
    for value in scale.ticks():
        y = scale.place(value)
        parts += [line(left, y, right, y, "grid"), text(left - 6, y, words(value), anchor="end")]
    return join(parts)


def spread(wanted: Sequence[float], low: float, high: float, gap: float = LINE) -> list[float]:
    """Places as near as possible to the wanted ones, in the same order, and at least `gap` apart."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    places = [0.0] * len(wanted)
    last = low - gap
    for index in order:
        last = places[index] = max(wanted[index], last + gap)
    limit = high
    for index in reversed(order):
        limit = places[index] = min(places[index], limit)
        limit -= gap
    return places


def truncated(words: str, width: float) -> str:
    """The text, with an ellipsis where it is longer than that."""
    most = max(int(width / LETTER), 2)
    return words if len(words) <= most else f"{words[: most - 1]}…"


# -- The charts of the latency section: bars for one point, curves over several --------------------

# Over this ratio the short bars of a linear scale all look alike.
_LOG_FROM = 12.0

_BARS_WIDTH, _BAR_STEP, _NAME_WIDTH, _VALUE_WIDTH = 558.0, 22.0, 146.0, 52.0
_PANEL_WIDTH, _PANEL_HEIGHT, _LABEL_WIDTH = 360.0, 264.0, 140.0

Look = Mapping[str, Series]


def needs_log(points: Sequence[Data]) -> bool:
    """Whether the rows of some point differ so much that all points need a log scale."""
    timed = [[row["timing"]["p50_us"] for row in point["rows"] if row["timing"]] for point in points]
    return any(found and max(found) > _LOG_FROM * min(found) for found in timed)


def latency_bars(point: Data, look: Look, *, log: bool) -> Markup | None:
    """Bars of p50, whiskers to p90 and p99, and the roofline bound; None where nothing was timed."""
    rows = [row for row in point["rows"] if row["timing"]]
    if not rows:
        return None
    bound = point["roofline"]["bound_us"] if point["roofline"] else None
    start, end, top = _NAME_WIDTH, _BARS_WIDTH - _VALUE_WIDTH, 18.0
    bottom = top + _BAR_STEP * len(rows)
    shown = [row["timing"][key] for row in rows for key in ("p50_us", "p99_us")]
    scale = (log_scale if log else linear_scale)([*shown, bound or 0.0], start, end)
    parts = [bottom_axis(scale, top, bottom)]
    parts += [_bar(row, scale, top + _BAR_STEP * (i + 0.5), look) for i, row in enumerate(rows)]
    if bound is not None:
        x, words = scale.place(bound), f"bound {short(bound)}"
        anchor = "start" if x - start < len(words) * LETTER / 2 else "middle"
        parts += [line(x, top - 4, x, bottom, "bound"), text(x, top - 11, words, anchor=anchor, css="muted")]
    unit = "µs, log scale" if scale.log else "µs"
    parts.append(text(end, bottom + 28, unit, anchor="end", css="muted"))
    label = f"Latency at {sizes_text(point['sizes'])}: " + ", ".join(
        f"{row['name']} {short(row['timing']['p50_us'])} µs" for row in rows
    )
    return chart(_BARS_WIDTH, bottom + 36, *parts, label=label, css="bars")


def _bar(row: Data, scale: Scale, y: float, look: Look) -> Markup:
    timing, series = row["timing"], look[row["name"]]
    p50, p90, p99 = (scale.place(timing[key]) for key in ("p50_us", "p90_us", "p99_us"))
    # On a log scale a length means nothing, so the value is a mark on a thin stem.
    height = 3.0 if scale.log else 12.0
    shape = {"x": scale.start, "y": y - height / 2, "width": max(p50 - scale.start, 1.0), "height": height}
    whiskers = ((p50, y, p99, y), (p90, y - 3, p90, y + 3), (p99, y - 5, p99, y + 5))
    figures = ", ".join(f"{key} {short(timing[f'{key}_us'])} µs" for key in ("p50", "p90", "p99"))
    return titled(
        f"{row['name']} ({row['runtime']}): {figures}",
        text(scale.start - 20, y, truncated(row["name"], _NAME_WIDTH - 20), anchor="end"),
        mark(series.mark, scale.start - 10, y, series.css),
        tag("rect", class_=f"bar {series.css}", **shape),
        *(line(*ends, "whisker") for ends in whiskers),
        mark(series.mark, p50, y, series.css) if scale.log else None,
        text(scale.end + _VALUE_WIDTH, y, short(timing["p50_us"]), anchor="end", css="value"),
    )


class Panel(NamedTuple):
    """Points that differ in one axis alone: the axis, the sizes that stay the same, the points by size."""

    axis: str
    fixed: Mapping[str, int]
    points: Sequence[Data]


def sweep_panels(points: Sequence[Data]) -> Iterator[Panel]:
    """Every line of points along one axis: first those along a length, then those along the batch.

    Points of a preallocated KV cache are on one line where it was filled alike. An empty past is on no line:
    the axes are logarithmic.
    """
    axes = {axis: None for point in points for axis in point["sizes"]}
    for axis in sorted(axes, key=lambda name: name == "B"):
        groups: dict[tuple[tuple[str, int], ...], dict[int, Mapping[str, Any]]] = {}
        for point in points:
            past = {} if point["past"] is None else {"KV-cache entries": point["past"]}
            alike = {**point["sizes"], **past}
            rest = tuple(sorted((name, size) for name, size in alike.items() if name != axis))
            if point["sizes"].get(axis):
                groups.setdefault(rest, {})[point["sizes"][axis]] = point
        for rest, found in sorted(groups.items()):
            if len(found) > 1:
                yield Panel(axis, dict(rest), [found[size] for size in sorted(found)])


def sweep_chart(panel: Panel, look: Look) -> Markup | None:
    """The p50 of every row along one axis, both axes logarithmic; None where no row has two points."""
    curves: dict[str, list[list[_Point]]] = {}
    for name in look:
        timed = {
            point["sizes"][panel.axis]: row["timing"]["p50_us"]
            for point in panel.points
            for row in point["rows"]
            if row["name"] == name and row["timing"]
        }
        if len(timed) > 1:
            found = [_Point(size, us, f"{name} at {size}: {short(us)} µs") for size, us in timed.items()]
            curves[name] = [found]
    if not curves:
        return None
    left, top, bottom = 46.0, 12.0, _PANEL_HEIGHT - 36
    right = _PANEL_WIDTH + left
    sizes = [point["sizes"][panel.axis] for point in panel.points]
    across = log_scale(sizes, left, right, margin=1.12)
    up = log_scale([point.y for (found,) in curves.values() for point in found], bottom, top)
    parts = [bottom_axis(across, top, bottom, sizes), left_axis(up, left, right)]
    name = text((left + right) / 2, bottom + 28, panel.axis, anchor="middle", css="muted")
    parts += [_curves(curves, across, up, look), name]
    label = f"p50 in µs along {panel.axis} at {sizes_text(panel.fixed)}, for {', '.join(curves)}"
    return chart(right + _LABEL_WIDTH, _PANEL_HEIGHT, *parts, label=label, css="sweep")


# -- Curves, and their names beside them -----------------------------------------------------------

_MARKS = 12  # of a curve at most, to recognize it without its color, and to point at


class _Point(NamedTuple):
    """A point of a curve, and the text under the pointer."""

    x: float
    y: float
    title: str


Runs = Sequence[Sequence[_Point]]
"""A curve: runs of points without a gap. No line may hide what was not measured."""


def _curves(curves: Mapping[str, Runs], across: Scale, up: Scale, look: Look) -> Markup:
    """A line through every run, some marks, and the names at the ends, moved apart, with a hairline to them.

    What stands alone between two gaps has its mark, for it has no line.
    """
    parts = []
    for name, runs in curves.items():
        series, points = look[name], [point for run in runs for point in run]
        every = math.ceil(len(points) / _MARKS)
        parts.append(_lines(runs, across, up, series.css))
        for index, point in enumerate(points, 1):
            if index % every == 0 or point is points[-1] or [point] in runs:
                place = across.place(point.x), up.place(point.y)
                parts.append(mark(series.mark, *place, series.css, title=point.title, radius=3.2))
    ends = [runs[-1][-1] for runs in curves.values()]
    wanted, last = [up.place(end.y) for end in ends], max(end.x for end in ends)
    for name, end, y, place_y in zip(curves, ends, wanted, spread(wanted, up.end, up.start), strict=True):
        css = f"leader {look[name].css}{' early' if end.x < last else ''}"
        parts.append(line(across.place(end.x) + 5, y, across.end + 5, place_y, css))
        parts.append(text(across.end + 8, place_y, truncated(name, _LABEL_WIDTH - 8)))
    return join(parts)


def _lines(runs: Runs, across: Scale, up: Scale, css: str) -> Markup:
    long = (run for run in runs if len(run) > 1)
    return join(polyline([(across.place(p.x), up.place(p.y)) for p in run], f"curve {css}") for run in long)


# -- The chart of the decode section: the error of every step, beside that of the module itself ----

EAGER = "eager PyTorch"

_WIDTH, _HEIGHT = 620.0, 264.0
# The error of one token is a small sample, and hundreds of them hide each other: from so many steps on, the
# curve is the median of some of them, over a faint line through all.
POOLED_FROM, _POOLS = 64, 24

Errors = Sequence[float | None]


def runtime_of(run: Data) -> str:
    """The runtime of a record of parity or decoding, with the clients of a server."""
    return runtime_text(run["runtime"], run["clients"])


def decode_curves(reports: Sequence[Data]) -> dict[str, Errors]:
    """The errors of every step by name: the module's own first, then each runtime's on the same trace."""
    curves: dict[str, Errors] = {
        EAGER: max((report["eager_errors"] for report in reports), key=len, default=[])
    }
    for report in reports:
        name, count = runtime_of(report), 1
        while name in curves:  # two engines of one TensorRT
            count += 1
            name = f"{runtime_of(report)} ({count})"
        curves[name] = report["errors"]
    return curves


def decode_look(names: Sequence[str], latency: Data | None, look: Look) -> dict[str, Series]:
    """A look for every curve: that of its row in the charts of latency, else one that no row has."""
    points = latency["points"] if latency else []
    rows = {row["runtime"]: look[row["name"]] for point in points for row in point["rows"]}
    known = {name: rows[name] for name in names if name in rows}
    if EAGER in names and "eager" in look:
        known[EAGER] = look["eager"]
    taken = {(series.hollow, series.color) for series in look.values()}
    here = {series.color for series in known.values()}
    free = [each for each in product((False, True), range(len(LIGHT))) if each not in taken]
    order = iter(sorted(free, key=lambda each: each[1] in here))
    families = {EAGER: "pytorch", "torch": "pytorch", "tensorrt": "tensorrt", "onnx": "onnx"}
    for name in (each for each in names if each not in known):
        hollow, color = next(order, (True, 0))
        family = next((families[each] for each in families if name.startswith(each)), "onnxruntime")
        known[name] = Series(color=color, mark=FAMILIES[family], hollow=hollow)
    return known


def decode_chart(curves: Mapping[str, Errors], first_failed: Sequence[int], look: Look) -> Markup | None:
    """The relative errors of steps 1, 2, … by name, and where a runtime failed first; None for no errors."""
    known = {name: errors for name, errors in curves.items() if any(each is not None for each in errors)}
    if not known:
        return None
    steps = max(map(len, curves.values()))
    left, top, bottom = 56.0, 14.0, _HEIGHT - 36
    right = left + _WIDTH
    values = [each for errors in known.values() for each in errors if each is not None]
    low = min((value for value in values if value > 0), default=1.0)
    up = (log_scale if max(values) > _LOG_FROM * low else linear_scale)(values, bottom, top)
    across = linear_scale([steps], left, right)
    whole = [value for value in across.ticks() if value == int(value)]
    parts = [bottom_axis(across, top, bottom, whole), left_axis(up, left, right, error)]
    for step in sorted(set(first_failed) - {0}):
        x = across.place(step)
        parts.append(titled(f"first wrong step: {step}", line(x, top, x, bottom, "bound")))
    size = 1.0
    if steps >= POOLED_FROM:
        parts += [_lines(_runs(name, known[name]), across, up, f"each {look[name].css}") for name in known]
        size = steps / _POOLS
    shown = {name: _runs(name, errors, size) for name, errors in known.items()}
    parts.append(_curves(shown, across, up, look))
    parts.append(text((left + right) / 2, bottom + 28, "step", anchor="middle", css="muted"))
    if up.log:
        parts.append(text(right, bottom + 28, "log scale", anchor="end", css="muted"))
    last = ", ".join(f"{name} {error(runs[-1][-1].y)}" for name, runs in shown.items())
    label = f"Relative error over {plural(steps, 'step')}, at the end: {last}"
    return chart(right + _LABEL_WIDTH, _HEIGHT, *parts, label=label, css="decode")


def _runs(name: str, errors: Errors, size: float = 1.0) -> Runs:
    """Medians of about `size` steps each."""
    runs: list[list[_Point]] = [[]]
    edges = [round(index * size) for index in range(math.ceil(len(errors) / size) + 1)]
    for start, end in pairwise(edges):
        found, last = [value for value in errors[start:end] if value is not None], min(end, len(errors))
        if found:
            several = f"median of steps {start + 1} to {last}"
            where, middle = several if last > start + 1 else f"step {last}", median(found)
            runs[-1].append(_Point((start + 1 + last) / 2, middle, f"{name}, {where}: {error(middle)}"))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


# -- Where the errors are: a map of heads and positions --------------------------------------------

_STEPS = len(HEAT_LIGHT)
_MAP_WIDTH, _LEFT, _TOP = 500.0, 40.0, 6.0

# Over this ratio a linear scale would show one bad head and nothing else.
_LOG_FROM_HEATMAP = 20.0


def heat_scale(maps: Sequence[Data]) -> Scale:
    """From values to steps of color; one scale for all maps, so that they can be compared."""
    values = (value for each in maps for row in each["values"] for value in row if value is not None)
    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive), max(positive)
    log = high > _LOG_FROM_HEATMAP * low
    return Scale(low=max(low, high * 1e-6) if log else 0.0, high=high, start=0, end=_STEPS, log=log)


# The cells of a heat map by what they hold: a share of the budget, or a multiple of the least of the row. The
# colors between them have too little contrast with text.
_HEATS = ("q0", "q1", "q2", "q3", "q5")
_SHARES, _RATIOS = (0.25, 0.5, 0.75, 0.9, 1.0), (1.1, 1.5, 2.0, 4.0, math.inf)


def share_heat(share: float) -> str:
    """The class of a share of the budget."""
    return next((css for css, most in zip(_HEATS, _SHARES, strict=True) if share <= most), "hot-bad")


def ratio_heat(value: float, least: float) -> str:
    """The class of a figure of which less is better, by the least of its row."""
    ratio = value / least if least > 0 else math.inf if value > 0 else 1.0
    return next((css for css, most in zip(_HEATS, _RATIOS, strict=True) if ratio < most), _HEATS[-1])


def heat_key(*, as_share: bool) -> Markup:
    """What the colors of a heat map mean."""
    if as_share:
        steps = {css: f"up to {most:.0%}" for css, most in zip(_HEATS, _SHARES, strict=True)}
        return _swatches("Share of the budget", {**steps, "hot-bad": "above: failed"})
    steps = {css: f"below {most:g}×" for css, most in zip(_HEATS[:-1], _RATIOS, strict=False)}
    return _swatches("Multiple of the least in the row", {**steps, _HEATS[-1]: f"{_RATIOS[-2]:g}× and above"})


def _swatches(title: str, steps: Mapping[str, str]) -> Markup:
    lines = [tag("li", tag("span", class_=f"swatch {css}"), words) for css, words in steps.items()]
    return tag("div", tag("p", title), tag("ul", *lines), class_="heat-legend")


def heat_legend(maps: Sequence[Data], scale: Scale) -> Markup:
    """The steps with their numbers."""
    steps = {f"q{i}": f"{error(scale.value(i))} to {error(scale.value(i + 1))}" for i in range(_STEPS)}
    if any(value is None for each in maps for row in each["values"] for value in row):
        steps["qn"] = "no finite number"
    return _swatches(f"Relative RMS error, {'equal ratios' if scale.log else 'equal steps'}", steps)


def heatmap(data: Data, scale: Scale) -> Markup | None:
    """One map; None where it has no cells."""
    values, each = data["values"], data["bin"]
    columns = max((len(row) for row in values), default=0)
    if not columns:
        return None
    width, height = _MAP_WIDTH / columns, min(max(300.0 / len(values), 3.0), 16.0)
    cells = []
    for r, row in enumerate(values):
        for c, value in enumerate(row):
            first, words = c * each, "no finite number" if value is None else error(value)
            last = f"–{first + each - 1}" if each > 1 else ""
            title = f"{data['rows']} {r}, {data['columns']} {first}{last}: {words}"
            css = "qn" if value is None else f"q{min(int(scale.place(value)), _STEPS - 1)}"
            place = {"x": _LEFT + c * width, "y": _TOP + r * height, "width": width, "height": height}
            cells.append(tag("rect", tag("title", title), **place, class_=css))
    bottom = _TOP + height * len(values)
    parts = [tag("g", *cells, class_="cells")]
    parts += [
        text(_LEFT - 6, _TOP + (r + 0.5) * height, str(r), anchor="end")
        for r in range(0, len(values), max(1, math.ceil(12 / height)))
    ]
    step = next(n for n in (1, 2, 4, 5, 8, 10, 16, 20, 32, 64) if n * width >= 40 or n == 64)
    parts += [text(_LEFT + c * width, bottom + 12, str(c * each)) for c in range(0, columns, step)]
    parts.append(
        text(_LEFT + _MAP_WIDTH, bottom + 28, truncated(data["columns"], 200), anchor="end", css="muted")
    )
    parts.append(text(0, bottom + 28, f"{truncated(data['rows'], 200)} ↓", css="muted"))
    what = f"{data['runtime']}, {data['case']}, {data['output']}"
    label = f"Error per {data['rows']} and {data['columns']}: {what}"
    return chart(_LEFT + _MAP_WIDTH + 16, bottom + 38, *parts, label=label, css="heatmap")


# -- The roofline plot: what the GPU allows at most, and what every row reached --------------------

_WIDTH_ROOFLINE, _HEIGHT_ROOFLINE, _LEFT_ROOFLINE, _RIGHT_MARGIN = 1080.0, 360.0, 56.0, 16.0


def roofline_plots(points: Sequence[Data], look: Look) -> list[Markup]:
    """One plot for every roof: points of one GPU and precision share theirs."""
    timed = [each for each in points if each["roofline"] and any(row["tflops"] for row in each["rows"])]
    counted = [point for point in timed if point["flops"] > 0 and point["bytes"] > 0]

    def peaks(point: Data) -> tuple[float, float]:
        return point["roofline"]["tflops_peak"], point["roofline"]["gb_per_s_peak"]

    return [_plot(alike, *peaks(alike[0]), look) for alike in group_by(counted, peaks)]


def _plot(points: Sequence[Data], tflops: float, gb_per_s: float, look: Look) -> Markup:
    ridge = tflops * 1e3 / gb_per_s  # FLOP per byte from which on arithmetic is the limit
    intensities = [point["flops"] / point["bytes"] for point in points]
    across = log_scale([*intensities, ridge], _LEFT_ROOFLINE, _WIDTH_ROOFLINE - _RIGHT_MARGIN, margin=1.9)
    labels, tiers = _column_labels(points, across)
    top, bottom = 10.0 + LINE * (tiers + 1), _HEIGHT_ROOFLINE - 40
    reached = [row["tflops"] for point in points for row in point["rows"] if row["tflops"]]
    up = log_scale([*reached, tflops], bottom, top, margin=1.4)
    lowest = max(across.low, up.low * 1e3 / gb_per_s)
    slope = (across.place(lowest), up.place(lowest * gb_per_s / 1e3))
    corner, end = (across.place(ridge), up.place(tflops)), (across.end, up.place(tflops))
    parts = [
        bottom_axis(across, top, bottom),
        left_axis(up, across.start, across.end),
        polyline([slope, corner, end], "roof"),
        text(end[0] - 4, end[1] + 11, f"{short(tflops)} TFLOP/s", anchor="end", css="muted"),
        text(slope[0] + 16, slope[1] + 10, f"{short(gb_per_s)} GB/s", anchor="start", css="muted"),
    ]
    parts += [_column(point, across, up, top, look) for point in points]
    parts += [
        text(x, top - 8 - LINE * tier, words, anchor="middle", css="value") for x, tier, words in labels
    ]
    parts.append(text(across.end, bottom + 30, "FLOP per byte", anchor="end", css="muted"))
    parts.append(text(4, top - 8 - LINE * tiers, "TFLOP/s", css="muted"))
    label = f"Roofline of {points[0]['roofline']['gpu']}: {short(tflops)} TFLOP/s, {short(gb_per_s)} GB/s"
    return chart(_WIDTH_ROOFLINE, _HEIGHT_ROOFLINE, *parts, label=label, css="roofline")


def _column(point: Data, across: Scale, up: Scale, top: float, look: Look) -> Markup:
    """The rows of one point above each other, and a bar at the sum of the stages' roofline bounds."""
    roof = point["roofline"]
    x, limit = across.place(point["flops"] / point["bytes"]), point["flops"] / roof["bound_us"] / 1e6
    y = up.place(limit)
    bar = titled(f"bound of the stages: {short(limit)} TFLOP/s", line(x - 8, y, x + 8, y, "limit"))
    parts = [line(x, top, x, up.start, "leader"), bar]
    for row in (each for each in point["rows"] if each["tflops"]):
        series = look[row["name"]]
        title = f"{row['name']}: {short(row['tflops'])} TFLOP/s, {short(row['gb_per_s'])} GB/s"
        parts.append(mark(series.mark, x, up.place(row["tflops"]), series.css, title=title))
    return join(parts)


def _column_labels(points: Sequence[Data], across: Scale) -> tuple[list[tuple[float, int, str]], int]:
    """The sizes over their columns, in as many tiers as keep them apart: place, tier, text."""
    taken: list[float] = []
    labels = []
    for point in sorted(points, key=lambda point: point["flops"] / point["bytes"]):
        words, x = sizes_joined(point["sizes"]), across.place(point["flops"] / point["bytes"])
        half = (len(words) + 2) * LETTER / 2
        tier = next((i for i, edge in enumerate(taken) if edge <= x - half), len(taken))
        taken[tier : tier + 1] = [x + half]
        labels.append((x, tier, words))
    return labels, len(taken)


def roofline_summary(points: Sequence[Data]) -> str:
    """The plot in one sentence, for readers who cannot see it."""
    rows = [(row, point) for point in points for row in point["rows"] if row["roofline_share"]]
    if not rows:
        return ""
    best, point = max(rows, key=lambda found: found[0]["roofline_share"])
    where = f"{best['name']} at {sizes_text(point['sizes'])}, {best['roofline_share']:.0%}"
    return f"Nearest to its roofline bound: {where}."
