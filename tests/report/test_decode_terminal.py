"""What the terminal shows of a decode trace."""

import io
import json
import re
from dataclasses import replace

import pytest
from msgspec import structs
from replayed import MEDDLERS, STEPS, decoded, stops_at, wrong_from
from rich.console import Console

from mha_deploy.cli.tables import decode_renderable
from mha_deploy.files import as_plain
from mha_deploy.status import Kind, Outcome, Reason
from mha_deploy.text import error, times


def printed(report, width=80):
    out = io.StringIO()
    Console(file=out, width=width).print(decode_renderable([as_plain(report.record)]))
    return out.getvalue()


def verdict_of(report):
    """The row of the verdict: its cells by their headings."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in printed(report, width=300).splitlines()]
    place = next(i for i, line in enumerate(lines) if line[0] == "runtime")
    return dict(zip(lines[place], lines[place + 2], strict=True))


def test_the_terminal_shows_verdict_share_growth_and_errors():
    report = decoded()
    found = verdict_of(report)
    assert (found["verdict"], found["steps"], found["wrong at"]) == ("passed", str(STEPS), "–")
    assert (found["runtime"], found["prompts"]) == ("replay 1.0", "5, 2 and 7")
    plain = as_plain(report.record)
    assert (found["growth"], found["eager's"]) == (times(plain["growth"]), times(plain["eager_growth"]))
    assert found["used"] == f"{report.share:.0%}"
    rows = [line.split() for line in printed(report).splitlines() if re.match(r"\s+\d+\s+\d", line)]
    assert [row[0] for row in rows] == ["1", "2", "4", "8", "16", "20"]
    assert rows[0][1:] == [error(report.eager_errors[0]), error(report.errors[0])]


def test_the_terminal_lists_the_first_failures_with_their_place():
    report = decoded(wrong_from(3))
    text = printed(report, width=300)
    assert re.search(r"steps step 3/output: \S+ over budget", text)
    assert re.search(r"worst at [^:]*token 0: got", text)
    assert text.count("over budget") == 4
    assert f"and {STEPS - 2 - 4 + 1} more" in text  # and the verdict over all steps
    found = verdict_of(report)
    assert (found["verdict"], found["wrong at"], found["steps"]) == ("FAILED", "step 3", str(STEPS))


@pytest.mark.parametrize(("last", "place"), [(4, "step 4"), (0, "prefill")])
def test_the_terminal_says_where_a_trace_stopped(last, place):
    report = decoded(stops_at(last))
    found = verdict_of(report)
    assert (found["verdict"], found["wrong at"], found["growth"]) == ("FAILED", place, "–")
    assert "out of memory" in printed(report, width=300)


def test_the_terminal_shows_of_a_wrong_cache_behind_right_steps():
    report = decoded()
    *right, cache = report.verdicts
    reason = Reason(kind=Kind.OUT_OF_BUDGET, names=("gain",))
    wrong = structs.replace(cache, outcome=Outcome.FAILED, reason=reason)
    broken = replace(report, verdicts=(*right, wrong))
    assert verdict_of(broken)["wrong at"] == "cache"
    assert "steps cache/value: out of budget: gain" in printed(broken)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("meddle", MEDDLERS)
def test_the_lines_fit_80_columns(meddle):
    assert max(map(len, printed(decoded(meddle)).splitlines())) <= 80


def test_long_traces_have_a_short_table():
    lines = printed(decoded(steps=50, prompt=(7, 7, 7))).splitlines()
    assert len(lines) <= 20


@pytest.mark.slow
def test_validate_steps_through_the_trace_of_a_bundle(run_cli, bundles, tmp_path):
    bundle, arguments = bundles("tiny-preallocated").path, ("--runtime", "ort-cpu", "--out", tmp_path)
    done = run_cli("validate", bundle, *arguments)
    assert done.code == 0
    assert "'steps'" in done.out
    data = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    decoded, loud = data["decode"]
    assert (decoded["trace"], loud["trace"]) == ("steps", "probe-steps")
    assert decoded["outcome"] == "passed"
    assert loud["outcome"] == "passed"
    assert len(decoded["errors"]) == decoded["steps"]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count('class="chart decode"') == 2
