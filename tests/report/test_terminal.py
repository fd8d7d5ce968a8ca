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


@pytest.mark.parametrize("told", [True, False])
def test_what_is_not_covered_is_listed_once(told):
    data = fresh("passing")
    note = finding("note", "range", f"not covered: {GAP}")
    data["verdict"]["headline"] = f"right, not covered: {GAP if told else '4 items'}"
    about = {"section": "coverage", "kind": "not covered", "names": [GAP], "in_headline": told}
    data["verdict"]["findings"].append(note | about)
    assert printed(data).count(GAP) == 1


def test_what_was_skipped_is_printed_with_its_reason():
    absent = [{"name": "probe inputs", "reason": "PyTorch is not installed"}]
    assert "note: probe inputs skipped: PyTorch is not installed" in printed(
        {**fresh("passing"), "absent": absent}
    )


def test_an_engine_that_was_not_run_is_reported_once():
    data = fresh("passing")
    data["absent"] = [{"name": "engine-a", "reason": "there is no GPU"}]
    note = finding("note", "engine", "engine engine-a was built and inspected, but not run: there is no GPU")
    place = {"engine": "engine-a"}
    data["verdict"]["findings"].append(note | {"kind": "engine not run", "place": place})
    data["notes"] = ["engine-a is the name of a file, too"]  # a sentence decides nothing
    assert printed(data).count("there is no GPU") == 1
    assert data["notes"][0] in printed(data)
