"""Colours and marks. A row has the same of both in every chart of a page.

The eight colours stay apart for the common kinds of colour blindness, and stand out from the page; the
marks tell the families apart without any colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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
