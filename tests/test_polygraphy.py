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

pytestmark = pytest.mark.skipif(find_spec("polygraphy") is None, reason="Polygraphy is not installed")

# Polygraphy runs the graph in ONNX Runtime as it is, and that sums FP16 products in FP16 on most CPUs: these
# are bounds on such sums of 64 products of size one, not on the layer.
TOLERANCE = {"fp16": 0.05, "fp32": 1e-4}


def polygraphy(folder, precision):
    code = "import sys; from polygraphy.tools import main; sys.exit(main())"
    golden, tolerance = folder / "golden" / "polygraphy", str(TOLERANCE[precision])
    command = [sys.executable, "-c", code, "run", folder / "model.onnx", "--onnxrt"]
    command += ["--load-inputs", golden / "inputs.json", "--load-outputs", golden / "outputs.json"]
    command += ["--atol", tolerance, "--rtol", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


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
def test_polygraphy_passes_every_case(bundles, precision):
    bundle = bundles("tiny-gqa", precision)
    code, text = polygraphy(bundle.path, precision)
    assert code == 0, text
    count = len(bundle.manifest.golden)
    assert f"Passed: {count}/{count} iterations" in text


@pytest.mark.parametrize("precision", TOLERANCE)
def test_polygraphy_fails_where_one_number_was_altered(bundles, tmp_path, precision):
    bundle = bundles("tiny-gqa", precision)
    folder = copy_of(bundle, tmp_path / "altered")
    alter_last_element(folder, 4 * TOLERANCE[precision])
    code, text = polygraphy(folder, precision)
    assert code == 1, text
    count = len(bundle.manifest.golden)
    assert f"Passed: {count - 1}/{count} iterations" in text
