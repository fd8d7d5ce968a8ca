"""The search for a form that a runtime computes wrongly, rehearsed without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "wrong_forms.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "spoiled"), [("perceiver", "Softmax"), ("cross-padded", "Where"), ("gpt2-cache", "Softmax")]
)
def test_the_spoiled_operator_is_found_by_itself(tmp_path, model, spoiled):
    command = [sys.executable, SCRIPT, "--out", tmp_path, "--only", model, "--rehearse", spoiled]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / f"{model}.json").read_text())
    assert (found["wrong"], found["form"]) == (True, [spoiled])
    assert set(found["variants"].values()) == {"wrong"}
    assert (tmp_path / f"{model}.onnx").is_file()


@pytest.mark.slow
def test_a_runtime_that_is_right_has_no_wrong_form(tmp_path):
    command = [
        sys.executable,
        SCRIPT,
        "--out",
        tmp_path,
        "--only",
        "perceiver",
        "--rehearse",
        "NoSuchOperator",
    ]
    subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    assert json.loads((tmp_path / "perceiver.json").read_text())["wrong"] is False
