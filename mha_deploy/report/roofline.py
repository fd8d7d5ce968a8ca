"""The roofline plot: what the GPU allows at most, and what every row reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mha_deploy.report.charts import Look
from mha_deploy.report.figures import short, sizes_product, sizes_text
from mha_deploy.report.markup import Html, join, tag
from mha_deploy.report.svg import (
    LETTER,
    LINE,
    Scale,
    bottom_axis,
    chart,
    left_axis,
    line,
    log_scale,
    mark,
    polyline,
    text,
)

_WIDTH, _HEIGHT, _LEFT, _RIGHT_MARGIN = 1080.0, 360.0, 56.0, 16.0

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
    top, bottom = 10.0 + LINE * (tiers + 1), _HEIGHT - 40
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
    return chart(_WIDTH, _HEIGHT, *parts, label=label, css="roofline")


def _across(points: Sequence[Point], ridge: float) -> Scale:
    intensities = [point["flops"] / point["bytes"] for point in points]
    return log_scale([*intensities, ridge], _LEFT, _WIDTH - _RIGHT_MARGIN, margin=1.9)


def _roof(across: Scale, up: Scale, tflops: float, gb_per_s: float, ridge: float) -> Html:
    lowest = max(across.low, up.low * 1e3 / gb_per_s)
    slope = (across.place(lowest), up.place(lowest * gb_per_s / 1e3))
    corner, end = (across.place(ridge), up.place(tflops)), (across.end, up.place(tflops))
    peak = text(across.end - 4, up.place(tflops) + 11, f"{short(tflops)} TFLOP/s", anchor="end", css="muted")
    memory = text(slope[0] + 16, slope[1] + 10, f"{short(gb_per_s)} GB/s", anchor="start", css="muted")
    return join([polyline([slope, corner, end], "roof"), peak, memory])


def _column(point: Point, across: Scale, up: Scale, top: float, look: Look) -> Html:
    """The rows of one point above each other, and a bar where the sum of the stages' floors lies."""
    roof = point["roofline"]
    x, limit = across.place(point["flops"] / point["bytes"]), point["flops"] / roof["floor_us"] / 1e6
    y = up.place(limit)
    bar = tag(
        "g", tag("title", f"floor of the stages: {short(limit)} TFLOP/s"), line(x - 8, y, x + 8, y, "limit")
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
    return f"Nearest to its floor: {name} at {sizes_text(point['sizes'])}, {share:.0%}."
