"""The charts of the latency section: bars for one point, curves over several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mha_deploy.report.figures import short, sizes_text
from mha_deploy.report.markup import Html, join, tag
from mha_deploy.report.palette import Series
from mha_deploy.report.svg import (
    LETTER,
    Scale,
    bottom_axis,
    chart,
    cut,
    left_axis,
    line,
    linear_scale,
    log_scale,
    mark,
    polyline,
    spread,
    text,
)

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
    """The p50 of every timed row, whiskers to p90 and p99, and the floor; None where nothing was timed."""
    rows = [row for row in point["rows"] if row["timing"]]
    if not rows:
        return None
    floor = point["roofline"]["floor_us"] if point["roofline"] else None
    start, end, top = _NAME_WIDTH, _BARS_WIDTH - _VALUE_WIDTH, 18.0
    bottom = top + _BAR_STEP * len(rows)
    scale = _bars_scale(rows, floor, start, end, log=log)
    parts = [bottom_axis(scale, top, bottom)]
    parts += [_bar(row, scale, top + _BAR_STEP * (i + 0.5), look) for i, row in enumerate(rows)]
    if floor is not None:
        x = scale.place(floor)
        parts += [line(x, top - 4, x, bottom, "floor"), _floor_label(x, top - 11, floor, start)]
    unit = "µs, log scale" if scale.log else "µs"
    parts.append(text(end, bottom + 28, unit, anchor="end", css="muted"))
    label = f"Latency at {sizes_text(point['sizes'])}: " + ", ".join(
        f"{row['name']} {short(row['timing']['p50_us'])} µs" for row in rows
    )
    return chart(_BARS_WIDTH, bottom + 36, *parts, label=label, css="bars")


def _bars_scale(
    rows: Sequence[Mapping[str, Any]], floor: float | None, start: float, end: float, *, log: bool
) -> Scale:
    shown = [row["timing"][key] for row in rows for key in ("p50_us", "p99_us")]
    if floor is not None and floor > 0:
        shown.append(floor)
    return log_scale(shown, start, end) if log else linear_scale(shown, start, end)


def _floor_label(x: float, y: float, floor: float, start: float) -> Html:
    words = f"floor {short(floor)}"
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

    Points of a static cache are on one line where it was filled alike. A past of nothing is on no line: the
    axes are logarithmic.
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
    """What must be alike along a line, by the name that a reader is told."""
    past = {} if point["past"] is None else {"rows cached": point["past"]}
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
