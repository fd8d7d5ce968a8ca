"""The chart of the decode section: the error of every step, beside that of the module itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import median
from typing import Any

from mha_deploy.report.charts import Look, end_labels
from mha_deploy.report.figures import error, plural
from mha_deploy.report.markup import Html, join, tag
from mha_deploy.report.palette import FAMILIES, LIGHT, Series
from mha_deploy.report.svg import (
    Scale,
    bottom_axis,
    chart,
    left_axis,
    line,
    linear_scale,
    log_scale,
    mark,
    polyline,
    text,
)

EAGER = "eager PyTorch"

# Over this ratio the lower curves of a linear scale lie on its floor.
_LOG_FROM = 12.0
_WIDTH, _HEIGHT, _LABEL_WIDTH = 620.0, 264.0, 140.0
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
    parts += [_curve(name, found, across, up, look) for name, found in shown.items()]
    ends = {
        name: [(point.middle, point.error) for run in found for point in run] for name, found in shown.items()
    }
    parts.append(end_labels(ends, across, up, right, look))
    parts.append(text((left + right) / 2, bottom + 28, "step", anchor="middle", css="muted"))
    if up.log:
        parts.append(text(right, bottom + 28, "log scale", anchor="end", css="muted"))
    last = ", ".join(f"{name} {error(found[-1][1])}" for name, found in ends.items())
    label = f"Relative error over {plural(steps, 'step')}, at the end: {last}"
    return chart(right + _LABEL_WIDTH, _HEIGHT, *parts, label=label, css="decode")


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
    return tag("g", tag("title", f"first wrong step: {step}"), line(x, top, x, bottom, "floor"))


def _lines(runs: Iterable[Sequence[_Point]], across: Scale, up: Scale, css: str) -> Html:
    long = (run for run in runs if len(run) > 1)
    return join(polyline([point.place(across, up) for point in run], f"curve {css}") for run in long)


def _curve(name: str, runs: Sequence[Sequence[_Point]], across: Scale, up: Scale, look: Look) -> Html:
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
