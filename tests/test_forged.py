"""Bundles that were changed by somebody who also wrote new hashes: none of them passes."""

import json

import numpy as np
import onnx
import pytest
from bundle_edit import copy_of, edit_arrays, rehash

import mha_deploy as md
from mha_deploy.bundle.cases import read_arrays
from mha_deploy.bundle.folder import MANIFEST, MODEL


@pytest.fixture(params=["tiny-mha", pytest.param("tiny-gqa", marks=pytest.mark.slow)])
def folder(request, bundles, tmp_path):
    """A bundle of its own, to forge."""
    return copy_of(bundles(request.param), tmp_path / "bundle")


def cases(folder):
    return [entry["name"] for entry in json.loads((folder / MANIFEST).read_text())["golden"]]


def other_weights(folder, share):
    """Change every weight by a share of itself, and write down what the model gives now as its own result."""
    rng, proto = np.random.default_rng(0), onnx.load(folder / MODEL)
    for weight in proto.graph.initializer:
        array = onnx.numpy_helper.to_array(weight)
        if array.dtype.kind == "f" and array.ndim == 2:
            changed = array * (1 + share * rng.standard_normal(array.shape))
            weight.CopyFrom(onnx.numpy_helper.from_array(changed.astype(array.dtype), weight.name))
    (folder / MODEL).write_bytes(proto.SerializeToString())
    rehash(folder)
    with md.open_runner(folder / MODEL, "onnx-reference") as runner:
        for name in cases(folder):
            arrays = read_arrays(folder / "golden" / f"{name}.safetensors")
            given = {key.partition("/")[2]: each for key, each in arrays.items() if key.startswith("inputs/")}
            results = runner.run(given)
            edit_arrays(
                folder, lambda found, results=results: found.update(
                    {f"eager/{key}": each for key, each in results.items()}
                ), name,
            )  # fmt: skip


def noisy_oracle(folder, share):
    """Add noise to every oracle, a share of its own size."""

    def change(arrays):
        rng = np.random.default_rng(0)
        for key, array in arrays.items():
            if key.startswith("oracle/"):
                size = np.sqrt(np.mean(array**2))
                arrays[key] = array + share * size * rng.standard_normal(array.shape)

    for name in cases(folder):
        edit_arrays(folder, change, name)


def passes(folder):
    try:
        return md.validate(folder, runtimes=["onnx-reference"], latency=False, probe=False).passed
    except md.DeployError as error:
        assert error.exit_code == 2  # noqa: PT017 (a refusal is as good as a failed verdict)
        return False


def test_a_bundle_that_was_not_changed_passes(folder):
    """What was done here to forge one, with nothing to forge."""
    other_weights(folder, 0.0)
    noisy_oracle(folder, 0.0)
    assert passes(folder)


@pytest.mark.parametrize("share", [0.05, pytest.param(0.02, marks=pytest.mark.slow)])
def test_other_weights_with_their_own_results_do_not_pass(folder, share):
    other_weights(folder, share)
    assert not passes(folder)


@pytest.mark.parametrize("share", [0.1, pytest.param(0.03, marks=pytest.mark.slow)])
def test_an_oracle_with_noise_does_not_pass(folder, share):
    noisy_oracle(folder, share)
    assert not passes(folder)
