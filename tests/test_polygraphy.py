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

from mha_deploy.export.exporter import bundle_from_spec
from mha_deploy.model.catalog import find_spec as find_model
from mha_deploy.options import ExportOptions

pytestmark = pytest.mark.skipif(find_spec("polygraphy") is None, reason="Polygraphy is not installed")

# Polygraphy runs the graph in ONNX Runtime as it is, and that sums FP16 matmuls in FP16 on most CPUs: these
# are bounds on such sums of 64 matmuls of size one, not on the layer.
TOLERANCE = {"fp16": 0.05, "fp32": 1e-4}


# One interpreter for all runs: importing Polygraphy's tools takes longer than they do.
RUN_ALL = """
import contextlib, io, json, sys
from polygraphy.tools import main
told = []
for arguments in json.loads(sys.argv[1]):
    sys.argv, text = ["polygraphy", *arguments], io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            code = main()
        except SystemExit as stop:
            code = stop.code
    told.append([code or 0, text.getvalue()])
print(json.dumps(told))
"""


def arguments(folder, precision):
    golden, tolerance = folder / "golden" / "polygraphy", str(TOLERANCE[precision])
    command = ["run", folder / "model.onnx", "--onnxrt"]
    command += ["--load-inputs", golden / "inputs.json", "--load-outputs", golden / "outputs.json"]
    return [*map(str, command), "--atol", tolerance, "--rtol", "0"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Bundles that were asked for the files, by precision."""
    return {
        precision: bundle_from_spec(
            find_model("tiny-gqa"),
            tmp_path_factory.mktemp(precision) / "bundle",
            ExportOptions(precision=precision, polygraphy=True, golden=("min", "odd")),
        )
        for precision in TOLERANCE
    }


@pytest.fixture(scope="module")
def polygraphy(made, tmp_path_factory):
    """What Polygraphy's command line says of every bundle, and of a copy in which one number was altered."""
    folders = {}
    for precision, tolerance in TOLERANCE.items():
        bundle = made[precision]
        altered = copy_of(bundle, tmp_path_factory.mktemp("altered") / precision)
        alter_last_element(altered, 4 * tolerance)
        folders |= {(precision, "right"): bundle.path, (precision, "altered"): altered}
    commands = json.dumps([arguments(folder, precision) for (precision, _), folder in folders.items()])
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, commands], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(folders, json.loads(done.stdout.splitlines()[-1]), strict=True))


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


@pytest.mark.parametrize("precision", TOLERANCE)
def test_polygraphy_passes_every_case(made, polygraphy, precision):
    code, text = polygraphy[precision, "right"]
    assert code == 0, text
    count = len(made[precision].manifest.golden)
    assert f"Passed: {count}/{count} iterations" in text


@pytest.mark.parametrize("precision", TOLERANCE)
def test_polygraphy_fails_where_one_number_was_altered(made, polygraphy, precision):
    code, text = polygraphy[precision, "altered"]
    assert code == 1, text
    count = len(made[precision].manifest.golden)
    assert f"Passed: {count - 1}/{count} iterations" in text
