"""`.ci/nightly` runs every shard, slow tests among them, and goes on where an earlier run stopped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

QUICK = "-p no:hypothesispytest -p no:anyio"  # neither is used, and to import them takes seconds
SCRIPT = Path(__file__).parents[1] / ".ci" / "nightly"
RIGHT = """
import pytest

@pytest.mark.slow
def test_slow():
    with open({ran!r}, "a") as file:
        file.write("x")
"""
SELECTS_SLOW = """
def pytest_collection_modifyitems(config, items):
    if "slow" not in config.option.markexpr:
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
"""
WRONG = """
import os

def test_other():
    assert os.path.exists({mended!r})
"""


@pytest.mark.slow
def test_shards_are_run_and_only_what_is_not_done_again(tmp_path):
    tests, out, ran, mended = (tmp_path / name for name in ("tests", "out", "ran", "mended"))
    for folder, text in (("", RIGHT), ("inner", WRONG)):
        (tests / folder).mkdir(parents=True, exist_ok=True)
        file = tests / folder / f"test_{folder or 'top'}_shard.py"
        file.write_text(text.format(ran=str(ran), mended=str(mended)))

    (tests / "conftest.py").write_text(SELECTS_SLOW)  # as the one of these tests does

    def run(*options):
        environment = {**os.environ, "MHA_DEPLOY_PYTHON": sys.executable, "PYTEST_ADDOPTS": QUICK}
        environment.pop("PYTEST_XDIST_WORKER", None)
        command = [sys.executable, SCRIPT, "--tests", tests, "--out", out, "--workers", "0", *options]
        done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
        return done.returncode, json.loads((out / "summary.json").read_text()), done

    code, found, done = run()
    assert code == 1, done.stdout + done.stderr
    assert {name: each["done"] for name, each in found.items()} == {"top": True, "inner": False}
    assert found["top"]["passed"] == 1
    assert any("test_other" in name for name in found["inner"]["failures"])
    mended.touch()
    code, found, done = run()
    assert code == 0, done.stdout + done.stderr
    assert all(each["done"] for each in found.values())
    assert ran.read_text() == "x", "a shard that passed was run again"
