"""Charts as SVG: axes, marks, colours."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape as _escape
from typing import Any

from mha_deploy.text import tick

# -- HTML and SVG as text in which everything is escaped unless it was made here -------------------

# Control characters cannot be read, and those that reverse the direction of text could disguise a name.
_UNREADABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufffe\uffff]")

_VOID = frozenset({"meta", "link", "br", "hr", "col"})


class Html(str):
    """Text that is markup already."""

    def __html__(self) -> str:
        """Itself, for templates."""
        return self


def readable(words: str) -> str:
    """Text without control characters."""
    return _UNREADABLE.sub("\ufffd", words)


def escaped(value: object) -> Html:
    """The value as markup: itself if it is markup, else its text, harmless in elements and attributes."""
    if isinstance(value, Html):
        return value
    if isinstance(value, float):
        value = f"{value:.2f}".rstrip("0").rstrip(".")
    return Html(_escape(readable(str(value)), quote=True))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """One element.

    Args:
        name: Its name.
        children: What is in it; None is nothing.
        attributes: `class_` is written `class`, `data_x` `data-x`. None and False are left out, True stands
            without a value.
    """
    opening = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Html(f"<{name}{opening}>")
    return Html(f"<{name}{opening}>{join(children)}</{name}>")


def join(children: Iterable[object]) -> Html:
    """Everything one after the other; None is nothing."""
    return Html("".join(escaped(child) for child in children if child is not None))


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    # Markup has been escaped for elements; in an attribute it is text like any other.
    return (
        f" {name}"
        if value is True
        else f' {name}="{escaped(str(value) if isinstance(value, str) else value)}"'
    )


# -- Colours and marks. A row has the same of both in every chart of a page ------------------------

LIGHT_PAGE, DARK_PAGE = "#ffffff", "#14161a"
LIGHT = ("#0b64b4", "#e46711", "#505600", "#b00076", "#191058", "#578fed", "#669b92", "#580c0d")
DARK = ("#4d94e8", "#ffb827", "#78b099", "#c6c3ff", "#5668d8", "#bdf0ea", "#7d7b8c", "#e2432a")

HEAT_LIGHT = ("#eef4fc", "#bed7f4", "#8ebaeb", "#5d9ce1", "#367ec9", "#1d62a6", "#024782", "#012e58")
HEAT_DARK = ("#182839", "#214061", "#2b5a8c", "#3375b9", "#5092d9", "#7bafea", "#a6cdfa", "#d8eaff")

FAMILIES = {"pytorch": "circle", "onnxruntime": "square", "tensorrt": "diamond", "onnx": "square"}


@dataclass(frozen=True, kw_only=True)
class Series:
    """How one row looks.

    Args:
        colour: Number of its colour, from 0.
        mark: `circle`, `square` or `diamond`.
        hollow: Whether its mark is empty: a second round through the colours.
    """

    colour: int
    mark: str
    hollow: bool

    @property
    def css(self) -> str:
        """Its class in the style sheet."""
        return f"s{self.colour}{' hollow' if self.hollow else ''}"


def series_of(latencies: Iterable[Mapping[str, Any] | None]) -> dict[str, Series]:
    """A look for every row name, in the order in which they are first met."""
    found: dict[str, Series] = {}
    for latency in latencies:
        for point in latency["points"] if latency else ():
            for row in point["rows"]:
                if row["name"] not in found:
                    turn, colour = divmod(len(found), len(LIGHT))
                    mark = FAMILIES[row["family"]]
                    found[row["name"]] = Series(colour=colour, mark=mark, hollow=turn % 2 == 1)
    return found


def palette_css() -> str:
    """The colours as custom properties of the style sheet."""
    light, dark = _properties(LIGHT, HEAT_LIGHT), _properties(DARK, HEAT_DARK)
    used = [f".s{i}{{--c:var(--s{i})}}" for i in range(len(LIGHT))]
    used += [f".q{i}{{fill:var(--q{i});background:var(--q{i})}}" for i in range(len(HEAT_LIGHT))]
    dark_rule = f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return "\n".join([f":root{{{light}}}", dark_rule, "".join(used)])


def _properties(series: Iterable[str], heat: Iterable[str]) -> str:
    named = [f"--s{i}:{colour}" for i, colour in enumerate(series)]
    named += [f"--q{i}:{colour}" for i, colour in enumerate(heat)]
    return ";".join(named)


# -- Scales, axes and marks: what the charts are drawn with. All lengths are CSS pixels ------------

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
