"""What `validate`, `bench` and `deploy` print of a validation for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mha_deploy.cli.decode_tables import stepping_renderable
from mha_deploy.cli.table_parts import sizes_text, table
from mha_deploy.cli.tables import parity_renderable
from mha_deploy.validate.conformance import ConformanceTable
from mha_deploy.validate.examine import Examination
from mha_deploy.validate.invariance import CHECKS
from mha_deploy.validate.latency import LatencyPoint, LatencyRow
from mha_deploy.validate.report import Report

# What fits a terminal of 80 columns; the report has the rest.
_FIGURES = ("p50 µs", "p90", "p99", "× eager", "× best", "TFLOP/s", "roofline")
_DECODE_FIGURES = ("p50 µs", "p99", "× eager", "× best", "ktok/s", "GB/s", "roofline")
_SHOWN_KERNELS = 6
_NAME_WIDTH = 100
_LEVELS = {"failure": "red", "warning": "yellow", "note": "dim"}
_MARKS = {"conforms": "ok", "wrong": "WRONG", "refused": "refused", "absent": "-"}
_CELLS = {"conforms": "green", "wrong": "red", "refused": "yellow", "absent": "dim"}


def report_renderable(report: Report) -> RenderableType:
    """The evidence first, then what it means: the last line on the screen is the verdict."""
    return Group(*_blocks(report))


def _blocks(report: Report) -> Iterator[RenderableType]:
    for examination in report.examinations:
        for parity in examination.parity:
            yield parity_renderable(parity)
        yield from map(stepping_renderable, examination.stepping)
        if examination.invariance:
            yield _invariance(examination)
    if report.conformance is not None:
        yield conformance_renderable(report.conformance)
    yield from (point_renderable(point) for point in report.points)
    for finding in report.findings:
        yield Text(f"{finding.level}: {finding.text}", style=_LEVELS[finding.level])
    style = "bold green" if report.passed else "bold red"
    yield Text(f"{'PASSED' if report.passed else 'FAILED'}  {report.headline}", style=style)


def _invariance(examination: Examination) -> Text:
    """In one line: what was varied, how often, and whether every answer was even the same to the bit."""
    parts = []
    for name in CHECKS:
        checks = [check for check in examination.invariance if check.check == name and check.case]
        passed = sum(check.passed for check in checks)
        parts.append(f"{name} {passed}/{len(checks)}" if checks else f"{name}: not applicable")
    judged = [check for check in examination.invariance if check.case]
    same = ", bitwise the same" if judged and all(check.bitwise for check in judged) else ""
    return Text(f"{examination.backend}, rows in other places: {', '.join(parts)}{same}")


def point_renderable(point: LatencyPoint) -> RenderableType:
    """Everyone's time at one set of sizes."""
    filled = "" if point.past is None else f", {point.past:,} rows cached"
    floor = f", floor {point.roofline.floor_us:.1f} µs" if point.roofline else ""
    rows = table(f"latency at {sizes_text(point.sizes)}{filled}{floor}")
    rows.add_column("who", no_wrap=True)
    for column in _columns(point):
        rows.add_column(column, justify="right", no_wrap=True)
    for row in point.rows:
        _add_row(rows, point, row)
    refused = [Text(f"{row.name}: {row.refused}", style="yellow") for row in point.rows if row.refused]
    return Group(
        rows, *refused, *_without_graph(point), *(_kernels(row) for row in point.rows if row.kernels)
    )


def _without_graph(point: LatencyPoint) -> Iterator[Text]:
    names = [row.name for row in point.rows if row.timing and not row.timing.graph]
    if names:
        yield Text(f"launched from Python, without a CUDA graph: {', '.join(names)}", style="dim")


def _kernels(row: LatencyRow) -> Text:
    lines = [
        f"  {kernel.microseconds:8.1f} µs  {kernel.calls:4.0f} ×  {kernel.name[:_NAME_WIDTH]}"
        for kernel in row.kernels[:_SHOWN_KERNELS]
    ]
    return Text("\n".join([f"kernels of {row.name}", *lines]), style="dim")


def _columns(point: LatencyPoint) -> tuple[str, ...]:
    """Arithmetic is what a prefill is about; memory and tokens are what a decode step is."""
    return _FIGURES if point.decoded is None else _DECODE_FIGURES


def _add_row(rows: Table, point: LatencyPoint, row: LatencyRow) -> None:
    timing = row.timing
    if timing is None:
        rows.add_row(escape(row.name), *("-",) * len(_columns(point)))
        return
    figures = point.figures(row)
    rate = figures["tokens_per_s"]
    cells = {
        "p50 µs": f"{timing.p50:,.1f}",
        "p90": f"{timing.percentile(0.9):,.1f}",
        "p99": f"{timing.percentile(0.99):,.1f}",
        "× eager": _number(figures["speedup_over_eager"], ".2f"),
        "× best": _number(figures["speedup_over_best_pytorch"], ".2f"),
        "TFLOP/s": _number(figures["tflops"], ",.1f"),
        "ktok/s": _number(None if rate is None else rate / 1e3, ",.1f"),  # thousands of tokens a second
        "GB/s": _number(figures["gb_per_s"], ",.0f"),
        "roofline": _number(figures["roofline_share"], ".0%"),
    }
    rows.add_row(escape(row.name), *(cells[column] for column in _columns(point)))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def conformance_renderable(result: ConformanceTable) -> RenderableType:
    """How each runtime treats masks."""
    rows = table(f"masks, {result.precision}")
    rows.add_column("case", no_wrap=True)
    for name in result.columns:
        rows.add_column(name, overflow="fold")
    for case in result.rows:
        cells = [result.cells[case.name][name] for name in result.columns]
        rows.add_row(
            escape(case.name), *(Text(_MARKS[cell.status], style=_CELLS[cell.status]) for cell in cells)
        )
    return Group(rows, *_wrong_cells(result))


def _wrong_cells(result: ConformanceTable) -> Sequence[Text]:
    return [
        Text(f"{case.name} on {name}: {result.cells[case.name][name].detail}", style="red")
        for case in result.rows
        for name in result.columns
        if result.cells[case.name][name].status == "wrong"
    ]
