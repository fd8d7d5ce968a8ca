"""What the terminal shows of a report: failures first, a line for what passed, nothing twice."""

import io

import pytest
from example_report import fresh
from example_results import finding
from rich.console import Console

from mha_deploy.cli.tables import report_renderable
from mha_deploy.validation.records import plain_report

GAP = "S = 4097–8192"


def printed(data, *, verbose=False):
    out = io.StringIO()
    Console(file=out, width=300).print(report_renderable(plain_report(data), verbose=verbose))
    return out.getvalue()


def test_failures_come_before_what_passed():
    lines = printed(fresh("failing")).splitlines()
    assert lines[0].startswith("FAILED")
    failed = next(i for i, line in enumerate(lines) if " FAILED " in line)
    passed = next(i for i, line in enumerate(lines) if line.startswith("passed"))
    assert failed < passed


def test_a_group_that_passed_is_one_line():
    data = fresh("passing")
    lines = [line for line in printed(data).splitlines() if line.startswith("passed  tensorrt 8.6.1")]
    assert len(lines) == 3  # outputs, decode steps, invariance
    assert "rel. L2" not in printed(data)
    assert "rel. L2" in printed(data, verbose=True)


@pytest.mark.parametrize("headline", [f"right, not covered: {GAP}", "right, not covered: 4 items"])
def test_what_is_not_covered_is_listed_once(headline):
    data = fresh("passing")
    note = finding("note", "range", f"not covered: {GAP}")
    data["verdict"]["headline"] = headline
    data["verdict"]["findings"].append(note | {"section": "coverage", "kind": "not covered", "names": [GAP]})
    assert printed(data).count(GAP) == 1


def test_what_was_skipped_is_printed_with_its_reason():
    reason = "probe inputs skipped: PyTorch is not installed"
    assert f"note: {reason}" in printed({**fresh("passing"), "notes": [reason]})
