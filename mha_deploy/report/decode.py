"""The section that says whether a runtime decodes rightly, step after step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mha_deploy.report.charts import Look
from mha_deploy.report.decode_chart import decode_chart, decode_curves, decode_look, is_pooled
from mha_deploy.report.figures import NOTHING, error, grouped, plural, times
from mha_deploy.report.markup import Html, join, tag
from mha_deploy.report.tables import (
    Cell,
    Group,
    Row,
    data_table,
    number,
    passed,
    section,
    sentence,
    share_bar,
)

Data = Mapping[str, Any]

_COLUMNS = (
    "runtime", "verdict", "trace", "prompts", "#steps", "first wrong", "#budget used",
    "#growth", "#eager's growth",
)  # fmt: skip
_LEAD = (
    "A prompt, then single tokens. Every step is judged against the FP64 oracle, which has no cache, and "
    "so are the keys and values that the runtime holds in the end. Growth is the median error of the last "
    "tenth of the steps over that of the first; it should be about that of eager PyTorch."
)
_LISTED_PROMPTS = 4


def decode(data: Data, look: Look) -> Html | None:
    """The verdict on every runtime and trace, and the errors of the steps; None without a cache."""
    reports = data["decode"]
    if not reports:
        return None
    rows = [row for report in reports for row in _rows(report)]
    verdicts = data_table("Decoding, by runtime and trace", _COLUMNS, [Group(rows=rows)])
    traces = list(dict.fromkeys(report["trace"] for report in reports))
    parts = [_trace([each for each in reports if each["trace"] == name], data, look) for name in traces]
    return section("decode", "Decode", sentence(_LEAD, css="lead"), verdicts, *parts)


def prompts_text(prompt: Sequence[int]) -> str:
    """The lengths of the prompts in a few words."""
    if len(prompt) == 1:
        return f"a prompt of {prompt[0]}"
    if len(set(prompt)) == 1:
        return f"{len(prompt)} prompts of {prompt[0]}"
    if 0 < len(prompt) <= _LISTED_PROMPTS:
        return f"prompts of {', '.join(map(str, prompt[:-1]))} and {prompt[-1]}"
    return f"{len(prompt)} prompts of {min(prompt)} to {max(prompt)}" if prompt else "no prompt"


def place_text(first_failed: int | None, failed: int) -> str:
    """Where decoding went wrong first."""
    if first_failed is None:
        return "cache" if failed else NOTHING
    return f"step {first_failed}" if first_failed else "prefill"


def _rows(report: Data) -> list[Row]:
    steps = grouped(report["steps"])
    if len(report["errors"]) < report["steps"]:
        steps = f"{len(report['errors']):,} of {steps}"
    row: Row = [
        report["backend"],
        passed(report["passed"]),
        report["trace"],
        prompts_text(report["prompt"]),
        number(report["steps"], steps),
        place_text(report["first_failed"], report["failed"]),
        share_bar(report["share"], failed=not report["passed"]),
        *(number(report[key], times(report[key])) for key in ("growth", "eager_growth")),
    ]
    problems = [_problem(failure) for failure in report["failures"]]
    more = report["failed"] - len(problems)
    if more > 0:
        problems.append(f"and {more:,} more of {plural(report['judged'], 'check')}")
    lines = tag("div", *(tag("div", words) for words in problems), class_="problem")
    return [row, [Cell(content=lines, span=len(_COLUMNS))]] if problems else [row]


def _problem(failure: Data) -> str:
    """What is wrong; the sentence has the place already."""
    words, worst = f"{failure['case']}/{failure['output']}: {failure['problem']}", failure["deviation"]
    if worst is None or worst["worst_got"] is None or worst["worst_want"] is None:
        return words
    return f"{words}: got {worst['worst_got']:.6g}, oracle {worst['worst_want']:.6g}"


def _trace(reports: Sequence[Data], data: Data, look: Look) -> Html:
    """The curves of one trace, and a table of some of their points."""
    curves = decode_curves(reports)
    wrong = [report["first_failed"] for report in reports if report["first_failed"]]
    drawn = decode_chart(curves, wrong, decode_look(list(curves), data["latency"], look))
    name, steps = reports[0]["trace"], max(map(len, curves.values()))
    words = "Relative L2 by step"
    words += "; thin lines are single steps, thick ones medians" if is_pooled(steps) else ""
    words += "; a dashed line is the first wrong step" if wrong else ""
    figure = tag("figure", tag("figcaption", words), drawn or sentence("No step gave anything to measure."))
    return join([tag("h3", f"Trace {name}"), figure, _table(name, curves)])


def _table(name: str, curves: Mapping[str, Sequence[float | None]]) -> Html | None:
    last = max(map(len, curves.values()))
    steps = sorted({*(2**k for k in range(last.bit_length())), last} - {0})
    rows = [
        [number(step, grouped(step)), *(_at(errors, step) for errors in curves.values())] for step in steps
    ]
    if not rows:
        return None
    columns = ("#step", *(f"#{each}" for each in curves))
    return data_table(
        f"Relative L2 at some steps of trace {name}", columns, [Group(rows=rows)], css="compact"
    )


def _at(errors: Sequence[float | None], step: int) -> Cell:
    value = errors[step - 1] if step <= len(errors) else None
    return number(value, error(value))
