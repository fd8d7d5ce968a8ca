"""`.ci/gpu` runs a suite, writes failures as they happen, ends in time, and continues with the rest."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

QUICK = "-p no:hypothesispytest -p no:anyio"  # neither is used, and to import them takes seconds
SCRIPT = Path(__file__).parents[1] / ".ci" / "gpu"
TESTS = """
import os, time
import pytest

pytestmark = pytest.mark.gpu

def test_right():
    pass

def test_skipped():
    pytest.skip("not here")

def test_wrong():
    assert os.path.exists("{mended}"), "not mended yet"

def test_ends_the_process():
    {ending}
"""


@pytest.fixture
def suite(tmp_path):
    """A function that runs the script on four small tests, and gives its exit code and its results."""
    mended, out = tmp_path / "mended", tmp_path / "out"
    file = tmp_path / "test_small.py"

    def run(ending, *options):
        file.write_text(TESTS.format(mended=mended, ending=ending))
        environment = {**os.environ, "MHA_DEPLOY_PYTHON": sys.executable, "PYTEST_ADDOPTS": QUICK}
        environment.pop("PYTEST_XDIST_WORKER", None)
        command = [sys.executable, SCRIPT, "--out", out, "--workers", "1", *options, file]
        done = subprocess.run(
            list(map(str, command)), env=environment, capture_output=True, text=True, check=False
        )
        return done.returncode, json.loads((out / "summary.json").read_text()), done

    return run, mended, out


def outcomes(out):
    cases = ElementTree.parse(out / "junit.xml").getroot().iter("testcase")
    return {case.get("name"): [child.tag for child in case] for case in cases}


@pytest.mark.slow
def test_a_suite_is_run_to_its_end_and_what_failed_again(suite):
    run, mended, out = suite
    code, summary, done = run("os._exit(3)")
    assert code == 1, done.stderr
    assert (summary["passed"], summary["skipped"], summary["did_not_end"]) == (1, 1, [])
    assert summary["failed"] + summary["error"] == 2
    assert "not mended yet" in (out / "failures.txt").read_text()
    assert outcomes(out)["test_wrong"] == ["failure"]
    mended.touch()
    code, summary, done = run("pass", "--rest")
    assert (code, summary["passed"], summary["planned"]) == (0, 3, 4), done.stdout
    ran = [json.loads(line)["test"] for line in (out / "results.jsonl").read_text().splitlines()]
    assert sum(name.endswith("test_right") for name in ran) == 1
    assert outcomes(out)["test_wrong"] == []


@pytest.mark.slow
def test_what_hangs_is_ended_and_named(suite):
    run, mended, out = suite
    mended.touch()
    code, summary, _ = run("time.sleep(600)", "--limit", "15")
    assert (code, summary["timed_out"], summary["passed"]) == (1, True, 2)
    assert [name.partition("::")[2] for name in summary["did_not_end"]] == ["test_ends_the_process"]
    assert outcomes(out)["test_ends_the_process"] == ["error"]
    code, summary, _ = run("pass", "--rest")
    assert (code, summary["passed"]) == (0, 3)
