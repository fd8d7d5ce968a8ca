"""ONNX's reference evaluator: agrees with ONNX Runtime, and has the bfloat16 that it lacks."""

import ml_dtypes
import numpy as np
import onnx
import pytest

import mha_deploy as md
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.errors import DeployError
from mha_deploy.metrics import measure
from mha_deploy.runtime.child import isolation
from mha_deploy.runtime.onnx_reference import OnnxReferenceRunner
from mha_deploy.runtime.ort import OrtCpuRunner


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_the_two_runtimes_agree(bundles, precision):
    bundle = bundles("tiny-gqa", precision)
    reference, ort = OnnxReferenceRunner(bundle.model_path), OrtCpuRunner(bundle.model_path)
    assert reference.inputs == ort.inputs
    assert reference.outputs == ort.outputs
    for case in golden_cases(bundle):
        ours, theirs = reference.run(case.inputs)["output"], ort.run(case.inputs)["output"]
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert measure(ours, theirs.astype(np.float64)).relative_l2 < 8 * bundle.manifest.precision.roundoff


def test_bfloat16_goes_in_and_comes_out(bundles):
    bundle = bundles("tiny-padding", "bf16")
    with OnnxReferenceRunner(bundle.model_path) as runner:
        assert runner.name == f"onnx-reference {onnx.__version__}"
        assert runner.inputs["x"].dtype == ml_dtypes.bfloat16
        assert runner.inputs["key_lengths"].dtype == np.int32
        for case in golden_cases(bundle):
            output = runner.run(case.inputs)["output"]
            assert output.dtype == ml_dtypes.bfloat16
            assert np.isfinite(output.astype(np.float64)).all(), "also the row that has no key"


def test_inputs_are_checked(bundles):
    runner = OnnxReferenceRunner(bundles("tiny-gqa").model_path)
    with pytest.raises(DeployError, match="wrong type"):
        runner.run({"x": np.zeros((1, 1, 64), np.float32)})


def test_a_graph_with_an_unknown_node_is_refused(tmp_path):
    value = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("NoSuchOperator", ["a"], ["b"])
    sides = [[value(name, onnx.TensorProto.FLOAT, [1])] for name in "ab"]
    path = tmp_path / "model.onnx"
    path.write_bytes(onnx.helper.make_model(onnx.helper.make_graph([node], "g", *sides)).SerializeToString())
    with pytest.raises(DeployError, match="cannot load the graph") as caught:
        OnnxReferenceRunner(path)
    assert "NoSuchOperator" in caught.value.got


def test_a_tensor_of_a_type_that_is_not_ours_is_refused(tmp_path):
    value = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("Identity", ["a"], ["b"])
    sides = [[value(name, onnx.TensorProto.DOUBLE, [1])] for name in "ab"]
    path = tmp_path / "model.onnx"
    path.write_bytes(onnx.helper.make_model(onnx.helper.make_graph([node], "g", *sides)).SerializeToString())
    with pytest.raises(DeployError, match="type that is not supported") as caught:
        OnnxReferenceRunner(path)
    assert caught.value.got == "a"


def test_a_graph_that_fails_while_it_runs_is_an_error_not_a_trace(tmp_path):
    value = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("Add", ["a", "b"], ["c"])
    inputs = [value(name, onnx.TensorProto.FLOAT, [None]) for name in "ab"]
    body = onnx.helper.make_graph([node], "g", inputs, [value("c", onnx.TensorProto.FLOAT, [None])])
    path = tmp_path / "model.onnx"
    path.write_bytes(onnx.helper.make_model(body).SerializeToString())
    runner = OnnxReferenceRunner(path)
    with pytest.raises(DeployError, match="failed on these inputs"):
        runner.run({"a": np.ones(2, np.float32), "b": np.ones(3, np.float32)})


def looping(path, trips):
    """A graph that doubles a vector as often as its input `trips` states."""
    value, node, FLOAT = onnx.helper.make_tensor_value_info, onnx.helper.make_node, onnx.TensorProto.FLOAT
    body = onnx.helper.make_graph(
        [node("Identity", ["go"], ["goes_on"]), node("Concat", ["x", "x"], ["twice"], axis=0)],
        "body",
        [
            value("i", onnx.TensorProto.INT64, []),
            value("go", onnx.TensorProto.BOOL, []),
            value("x", FLOAT, [None]),
        ],
        [value("goes_on", onnx.TensorProto.BOOL, []), value("twice", FLOAT, [None])],
    )
    graph = onnx.helper.make_graph(
        [node("Loop", ["trips", "", "start"], ["y"], body=body)],
        "g",
        [value("trips", onnx.TensorProto.INT64, []), value("start", FLOAT, [None])],
        [value("y", FLOAT, [None])],
    )
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())
    return {"trips": np.array(trips, np.int64), "start": np.ones(trips % 2, np.float32)}


@pytest.mark.parametrize("trips", [10**12, 61], ids=["time", "memory"])
def test_a_graph_that_takes_all_time_or_memory_ends_alone(tmp_path, monkeypatch, trips):
    path = tmp_path / "model.onnx"
    feeds = looping(path, trips)  # of nothing, for ever; and of 2 to the 61 numbers
    with md.open_runner(path, backend="onnx-reference") as runner:
        monkeypatch.setattr(isolation, "limit_s", 3.0 if not trips % 2 else 120.0)
        with pytest.raises(DeployError, match="did not answer within 3 s|failed on these inputs"):
            runner.run(feeds)
