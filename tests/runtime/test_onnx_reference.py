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


def test_the_two_runtimes_agree(bundles):
    bundle = bundles("tiny-gqa")
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
        small = [case for case in golden_cases(bundle) if case.inputs["x"].size <= 8192]
        assert any((case.inputs["key_lengths"] == 0).any() for case in small), "one has a query without keys"
        for case in small:
            output = runner.run(case.inputs)["output"]
            assert output.dtype == ml_dtypes.bfloat16
            assert np.isfinite(output.astype(np.float64)).all()


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
    with pytest.raises(DeployError) as caught:
        OnnxReferenceRunner(path)
    assert "NoSuchOperator" in caught.value.got


def test_a_tensor_of_a_type_that_is_not_ours_is_refused(tmp_path):
    value = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("Identity", ["a"], ["b"])
    sides = [[value(name, onnx.TensorProto.DOUBLE, [1])] for name in "ab"]
    path = tmp_path / "model.onnx"
    path.write_bytes(onnx.helper.make_model(onnx.helper.make_graph([node], "g", *sides)).SerializeToString())
    with pytest.raises(DeployError, match="tensor a has a type that is not supported"):
        OnnxReferenceRunner(path)


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


def test_a_graph_that_never_ends_is_ended_alone(tmp_path, monkeypatch):
    value, node = onnx.helper.make_tensor_value_info, onnx.helper.make_node
    INT64, BOOL = onnx.TensorProto.INT64, onnx.TensorProto.BOOL
    body = onnx.helper.make_graph(
        [node("Identity", ["go"], ["goes_on"]), node("Identity", ["x"], ["same"])],
        "body",
        [value("i", INT64, []), value("go", BOOL, []), value("x", INT64, [])],
        [value("goes_on", BOOL, []), value("same", INT64, [])],
    )
    graph = onnx.helper.make_graph(
        [node("Loop", ["trips", "yes", "trips"], ["y"], body=body)],
        "g",
        [value("trips", INT64, []), value("yes", BOOL, [])],
        [value("y", INT64, [])],
    )
    path = tmp_path / "model.onnx"
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())
    with md.open_runner(path, runtime="onnx-reference") as runner:
        assert runner.run({"trips": np.array(3), "yes": np.array(True)})["y"] == 3
        monkeypatch.setattr(isolation, "limit_s", 0.25)
        with pytest.raises(DeployError, match=r"did not answer within 0\.25 s"):
            runner.run({"trips": np.array(10**6), "yes": np.array(True)})


@pytest.mark.parametrize("axis", [-1, 1, 0])
def test_gathered_elements_are_those_of_torch(axis, tmp_path):
    data = np.arange(24, dtype=np.float32).reshape(4, 6)
    indices = np.array([[1, 0, 3], [2, 2, 1]], np.int64)  # smaller than the data on both axes
    node = onnx.helper.make_node("GatherElements", ["data", "indices"], ["got"], axis=axis)
    value = onnx.helper.make_tensor_value_info
    inputs = [value("data", onnx.TensorProto.FLOAT, [4, 6]), value("indices", onnx.TensorProto.INT64, [2, 3])]
    graph = onnx.helper.make_graph([node], "g", inputs, [value("got", onnx.TensorProto.FLOAT, [2, 3])])
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)]), tmp_path / "g.onnx"
    )
    got = OnnxReferenceRunner(tmp_path / "g.onnx").run({"data": data, "indices": indices})["got"]
    rows, columns = np.indices(indices.shape)
    want = data[indices, columns] if axis == 0 else data[rows, indices]
    np.testing.assert_array_equal(got, want)
