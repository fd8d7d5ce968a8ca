"""Where the errors lie: a map of heads and positions."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mha_deploy.report.figures import error
from mha_deploy.report.markup import Html, join, tag
from mha_deploy.report.palette import HEAT_LIGHT
from mha_deploy.report.svg import chart, cut, text

_STEPS = len(HEAT_LIGHT)
_MOST_COLUMNS, _MOST_ROWS = 128, 128
_MAP_WIDTH, _LEFT, _TOP = 500.0, 40.0, 6.0

# Over this ratio a linear scale would show one bad head and nothing else.
_LOG_FROM = 20.0

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
    if high > _LOG_FROM * low:
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
