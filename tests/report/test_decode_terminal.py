"""What the terminal shows of a decode trace."""

import io
import json
import re
from dataclasses import replace

import pytest
from replayed import MEDDLERS, STEPS, decoded, stops_at, wrong_from
from rich.console import Console

from mha_deploy.cli.tables import decode_renderable
from mha_deploy.text import error


def printed(report, width=80):
    out = io.StringIO()
    Console(file=out, width=width).print(decode_renderable(report))
    return out.getvalue()


def test_the_terminal_shows_verdict_share_growth_and_errors():
    report = decoded()
    *_, head, growth = printed(report).strip().splitlines()
    assert head.strip() == f"PASSED  {STEPS} decode steps on replay 1.0, prompts of 5, 2 and 7"
    own = f"growth of the error {report.growth:.2f}, of eager's own {report.eager_growth:.2f}"
    assert growth.strip() == f"{report.share:.0%} of the budget at most; {own}"
    rows = [line.split() for line in printed(report).splitlines() if re.match(r"\s+\d", line)]
    assert [row[0] for row in rows] == ["1", "2", "4", "8", "16", "20"]
    assert rows[0][1:] == [error(report.eager_errors[0]), error(report.errors[0])]


def test_the_terminal_lists_the_first_failures_with_their_place():
    text = printed(decoded(wrong_from(3)), width=300)
    assert "steps step 3/output: out of budget" in text
    assert re.search(r"worst at [^:]*token 0: got", text)
    assert text.count("out of budget") == 4
    assert f"and {STEPS - 2 - 4 + 1} more" in text  # and the verdict over all steps
    assert f"FAILED  at step 3 of {STEPS} on replay 1.0, prompts of 5, 2 and 7\n" in text


def test_the_terminal_says_where_a_trace_stopped():
    text = printed(decoded(stops_at(4)), width=300)
    assert f"FAILED  at step 4 of {STEPS} on" in text
    assert "out of memory" in text
    assert "of the budget at most; growth of the error unknown" in text
    text = printed(decoded(stops_at(0)), width=300)
    assert f"FAILED  at the prefill before {STEPS} steps on" in text
    assert "no error was measured; growth of the error unknown, of eager's own unknown" in text


def test_the_terminal_shows_of_a_wrong_cache_behind_right_steps():
    report = decoded()
    *right, cache = report.verdicts
    broken = replace(report, verdicts=(*right, replace(cache, problem="out of budget: gain")))
    assert f"FAILED  in the cache after {STEPS} steps on" in printed(broken)
    assert "steps cache/value: out of budget: gain" in printed(broken)


@pytest.mark.parametrize("meddle", MEDDLERS)
def test_the_lines_fit_80_columns(meddle):
    assert max(map(len, printed(decoded(meddle)).splitlines())) <= 80


def test_long_traces_have_a_short_table():
    lines = printed(decoded(steps=50, prompt=(7, 7, 7))).splitlines()
    assert len(lines) <= 16


@pytest.mark.slow
def test_validate_steps_through_the_trace_of_a_bundle(run_cli, bundles, tmp_path):
    bundle, arguments = bundles("tiny-preallocated").path, ("--backend", "ort-cpu", "--out", tmp_path)
    done = run_cli("validate", bundle, *arguments)
    assert done.code == 0
    assert re.search(r"PASSED  \d+ decode steps on ort-cpu \S+, prompts of \d+, \d+ and \d+", done.out)
    data = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    decoded, loud = data["decode"]
    assert (decoded["trace"], loud["trace"]) == ("steps", "probe-steps")
    assert decoded["passed"]
    assert loud["passed"]
    assert len(decoded["errors"]) == decoded["steps"]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count('class="chart decode"') == 2
