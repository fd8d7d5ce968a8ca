"""What the verbs print of decoding, step after step."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from rich.console import Group, RenderableType
from rich.text import Text

from mha_deploy.cli.table_parts import table
from mha_deploy.report.decode import prompts_text
from mha_deploy.report.figures import budget_share
from mha_deploy.validate.growth import SteppingReport
from mha_deploy.validate.parity import OutputVerdict

_SHOWN_FAILURES = 4


def stepping_renderable(report: SteppingReport) -> RenderableType:
    """Errors at steps 1, 2, 4, … beside those of the module itself, then what is wrong, then the verdict."""
    rows = table()
    for column in ("step", "error", "eager", "× eager"):
        rows.add_column(column, justify="right", no_wrap=True)
    for step, error in report.table:
        own = report.eager_errors[step - 1]
        ratio = f"{error / own:,.2f}" if error is not None and own else "-"
        rows.add_row(f"{step:,}", _error(error), _error(own), ratio)
    title = Text(f"trace {report.trace}, relative L2 by step")
    return Group(*((title, rows) if report.table else ()), *_problems(report), _head(report), _growth(report))


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _problems(report: SteppingReport) -> Iterator[Text]:
    failures = report.failures
    for verdict in failures[:_SHOWN_FAILURES]:
        yield Text(_problem(verdict), style="red")
    if len(failures) > _SHOWN_FAILURES:
        yield Text(f"and {len(failures) - _SHOWN_FAILURES:,} more", style="red")


def _problem(verdict: OutputVerdict) -> str:
    """Why a step failed; the sentence has the place already."""
    words, worst = f"{verdict.case}/{verdict.output}: {verdict.problem}", verdict.deviation
    if worst is None or not verdict.is_wrong:
        return words
    return f"{words}: got {worst.worst_got:.6g}, oracle {worst.worst_want:.6g}"


def _head(report: SteppingReport) -> Text:
    who = f"{report.backend}, {prompts_text(report.prompt)}"
    if report.passed:
        return Text(f"PASSED  {report.steps:,} decode steps on {who}", style="bold green")
    place = f"at step {report.first_failed} of {report.steps:,}"
    if not report.first_failed:
        side = "in the cache after" if report.first_failed is None else "at the prefill before"
        place = f"{side} {report.steps:,} steps"
    return Text(f"FAILED  {place} on {who}", style="bold red")


def _growth(report: SteppingReport) -> Text:
    """How near the budget it came, and whether the error grows from step to step more than it must."""
    share = "no error was measured"
    if report.share is not None:
        used = budget_share(report.share) if isfinite(report.share) else "an infinite share"
        share = f"{used} of the budget at most"
    grown = [
        "unknown" if growth is None else f"{growth:,.2f}" for growth in (report.growth, report.eager_growth)
    ]
    return Text(f"{share}; growth of the error {grown[0]}, of eager's own {grown[1]}")
