"""Scales, axes and marks: what the charts are drawn with. All lengths are CSS pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mha_deploy.report.figures import tick
from mha_deploy.report.markup import Html, join, tag

LETTER = 6.6  # width of an average letter at the size of chart labels, in the widest of the usual fonts
LINE = 14.0  # distance of two lines of labels


@dataclass(frozen=True, kw_only=True)
class Scale:
    """From values to places.

    Args:
        low: The value at `start`.
        high: The value at `end`.
        start: Where the axis starts.
        end: Where it ends; less than `start` for an axis that goes up.
        log: Whether equal ratios are equally far apart.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value lies; one that is off the axis lies at its end."""
        if self.log:
            part = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * min(max(part, 0.0), 1.0)

    def ticks(self) -> list[float]:
        """Round values that divide the axis, at most about eight."""
        return _log_ticks(self.low, self.high) if self.log else _linear_ticks(self.low, self.high)


def linear_scale(values: Sequence[float], start: float, end: float) -> Scale:
    """From zero to a little more than the largest value."""
    return Scale(low=0.0, high=(max(values, default=0.0) or 1.0) * 1.02, start=start, end=end)


def log_scale(values: Sequence[float], start: float, end: float, *, margin: float = 1.25) -> Scale:
    """From a little less than the smallest positive value to a little more than the largest."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive) / margin, max(positive) * margin
    return Scale(low=low, high=high, start=start, end=end, log=True)


def _linear_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1, 3), (1,)):
        found = [step * 10.0**decade for decade in decades for step in steps]
        found = [value for value in found if low <= value <= high]
        if len(found) <= 7:
            return found
    return found[:: math.ceil(len(found) / 7)]


def chart(width: float, height: float, *children: object, label: str, css: str = "") -> Html:
    """A drawing of a fixed size; its container scrolls where the screen is narrower.

    Args:
        width: Its width.
        height: Its height.
        children: What is drawn.
        label: What a screen reader says.
        css: Further classes.
    """
    box = f"0 0 {width:g} {height:g}"
    drawing = tag(
        "svg",
        *children,
        class_=f"chart {css}".strip(),
        viewBox=box,
        width=width,
        height=height,
        role="img",
        aria_label=label,
    )
    return tag("div", drawing, class_="scroll")


def text(x: float, y: float, content: str, *, anchor: str = "start", css: str | None = None) -> Html:
    """A label, vertically centred on `y`."""
    return tag("text", content, x=x, y=y + 4, text_anchor=None if anchor == "start" else anchor, class_=css)


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> Html:
    """A straight line."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=css)


def polyline(points: Sequence[tuple[float, float]], css: str) -> Html:
    """A line through several points."""
    return tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=css)


def mark(kind: str, x: float, y: float, css: str, *, title: str | None = None, radius: float = 4.0) -> Html:
    """A circle, a square or a diamond."""
    hover = tag("title", title) if title else None
    if kind == "square":
        side = radius * 1.75
        corner = {"x": x - side / 2, "y": y - side / 2}
        return tag("rect", hover, width=side, height=side, class_=f"mark {css}", **corner)
    if kind == "diamond":
        reach = radius * 1.35
        path = f"M{x:.1f},{y - reach:.1f} l{reach:g},{reach:g} l-{reach:g},{reach:g} l-{reach:g},-{reach:g}z"
        return tag("path", hover, d=path, class_=f"mark {css}")
    return tag("circle", hover, cx=x, cy=y, r=radius, class_=f"mark {css}")


def bottom_axis(scale: Scale, top: float, bottom: float, ticks: Sequence[float] | None = None) -> Html:
    """Ticks with numbers under the plot, and a hairline up from each."""
    values = scale.ticks() if ticks is None else ticks
    parts = []
    for value in values:
        x = scale.place(value)
        parts += [line(x, top, x, bottom, "grid"), text(x, bottom + 12, tick(value), anchor="middle")]
    return join([*parts, line(scale.start, bottom, scale.end, bottom, "axis")])


def left_axis(scale: Scale, left: float, right: float, words: Callable[[float], str] = tick) -> Html:
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


def cut(words: str, width: float) -> str:
    """The text, with an ellipsis where it is longer than that."""
    most = max(int(width / LETTER), 2)
    return words if len(words) <= most else f"{words[: most - 1]}…"
