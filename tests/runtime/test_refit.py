"""Other weights in a built engine, with the API of every version: by name, or by the parser."""

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
import tensorrt_fake
from extract_trt_surfaces import EXTRACT
from onnx import TensorProto, helper

from mha_deploy.runtime.tensorrt.builder import refit_engine
from mha_deploy.runtime.tensorrt.versions import EngineError, wrap

KEPT = json.loads(EXTRACT.read_text())


def fake(version):
    """TensorRT with the names of a version."""
    backend = "tensorrt-rtx" if version.startswith("rtx") else "tensorrt"
    return wrap(tensorrt_fake.make_module(KEPT[version]), backend)


def write_graph(path, **weights):
    """A graph with these weights, on disk."""
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT16, [2]) for name in "xy")
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [x], [y], tensors)), path)
    return path


@pytest.fixture
def weights():
    return {"first": np.arange(3, dtype=np.float16), "second": np.ones(2, np.float16)}


@pytest.mark.parametrize("version", sorted(KEPT))
def test_an_engine_takes_the_weights_of_a_graph(version, weights, tmp_path):
    rt = fake(version)
    assert rt.can.parser_refitter == (not version.startswith("8"))
    plan = refit_engine(rt, b"ftrt plan", write_graph(tmp_path / "g.onnx", **weights))
    assert plan == b"ftrt " + b"".join(each.tobytes() for each in weights.values())


@pytest.mark.parametrize("version", ["8.6.1", "11.4.0"])
def test_weights_that_are_not_given_are_named(version, weights, tmp_path):
    del weights["second"]
    with pytest.raises(EngineError, match="second"):
        refit_engine(fake(version), b"ftrt plan", write_graph(tmp_path / "g.onnx", **weights))


def test_an_engine_that_cannot_be_refitted_says_how_to_build_one(weights, tmp_path, monkeypatch):
    fixed = replace(tensorrt_fake.COPY, refittable=False)
    monkeypatch.setitem(tensorrt_fake.ENGINES, b"ftrt fixed", fixed)
    with pytest.raises(EngineError, match="cannot be replaced") as caught:
        refit_engine(fake("8.6.1"), b"ftrt fixed", write_graph(tmp_path / "g.onnx", **weights))
    assert 'refit="all"' in caught.value.hint
