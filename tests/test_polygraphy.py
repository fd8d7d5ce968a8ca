"""The golden cases of a bundle are usable by Polygraphy's own command line."""

import base64
import io
import json
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from bundle_edit import copy_of

import mha_deploy as md

pytestmark = pytest.mark.skipif(find_spec("polygraphy") is None, reason="Polygraphy is not installed")

# Polygraphy runs the graph in ONNX Runtime as it is, and that accumulates FP16 matmuls in FP16 on most CPUs:
# this is a bound on such sums of 64 terms of size one, not on the layer.
TOLERANCE = 0.05


# One interpreter for all runs: importing Polygraphy's tools takes longer than they do.
RUN_ALL = """
import contextlib, io, json, sys
from polygraphy.tools import main
reported = []
for arguments in json.loads(sys.argv[1]):
    sys.argv, text = ["polygraphy", *arguments], io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            code = main()
        except SystemExit as stop:
            code = stop.code
    reported.append([code or 0, text.getvalue()])
print(json.dumps(reported))
"""


def arguments(folder):
    golden = folder / "golden" / "polygraphy"
    command = ["run", folder / "model.onnx", "--onnxrt"]
    command += ["--load-inputs", golden / "inputs.json", "--load-outputs", golden / "outputs.json"]
    return [*map(str, command), "--atol", str(TOLERANCE), "--rtol", "0"]


@pytest.fixture(scope="module")
def polygraphy(tmp_path_factory):
    """What Polygraphy's command line says of a bundle, and of a copy in which one number was altered."""
    folder = tmp_path_factory.mktemp("polygraphy")
    bundle = md.export("tiny-gqa", folder / "bundle", polygraphy=True, golden=("min", "odd"))
    altered = copy_of(bundle, folder / "altered")
    alter_last_element(altered, 4 * TOLERANCE)
    commands = json.dumps([arguments(each) for each in (bundle.path, altered)])
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, commands], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def alter_last_element(folder, amount):
    """Change one number of the last case of the outputs, decoded and encoded as Polygraphy has them."""
    path = folder / "golden" / "polygraphy" / "outputs.json"
    data = json.loads(path.read_text())
    ((_, iterations),) = data["lst"]
    values = iterations[-1]["outputs"]["output"]["values"]
    array = np.load(io.BytesIO(base64.b64decode(values["array"])), allow_pickle=False)
    array[-1, -1, -1] += amount
    buffer = io.BytesIO()
    np.save(buffer, array)
    values["array"] = base64.b64encode(buffer.getvalue()).decode()
    path.write_text(json.dumps(data))


def test_polygraphy_passes_every_case_and_fails_where_one_number_was_altered(polygraphy):
    for (code, text), (wanted, passed) in zip(polygraphy, ((0, 2), (1, 1)), strict=True):
        assert code == wanted, text
        assert f"Passed: {passed}/2 iterations" in text
