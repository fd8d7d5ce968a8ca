"""ONNX Runtime on the CPU: right where it has kernels, and plain about where it has none."""

import platform
import sys

import numpy as np
import onnx
import onnxruntime
import pytest

from mha_deploy.bundle.cases import golden_cases
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.metrics import measure
from mha_deploy.runtime import open_runner
from mha_deploy.runtime.child import RuntimeCrash, open_isolated
from mha_deploy.runtime.ort import OrtCpuRunner


def graph(nodes, inputs, outputs, opset=23):
    """A model of one graph in float32 tensors of shape (N,)."""

    def values(names):
        return [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["N"]) for n in names]

    body = onnx.helper.make_graph(nodes, "graph", values(inputs), values(outputs))
    opsets = [onnx.helper.make_opsetid("", opset)]
    return onnx.helper.make_model(body, opset_imports=opsets, ir_version=11)


def saved(model, folder):
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_results_are_as_close_to_the_oracle_as_rounding_allows(bundles, precision):
    bundle = bundles("tiny-gqa", precision)
    roundoff = bundle.manifest.precision.roundoff
    with OrtCpuRunner(bundle.model_path) as runner:
        assert runner.name == f"ort-cpu {onnxruntime.__version__}"
        for case in golden_cases(bundle):
            output = runner.run(case.inputs)["output"]
            assert output.dtype == bundle.manifest.precision.numpy
            assert measure(output, case.oracle["output"]).relative_l2 < 8 * roundoff


def test_inputs_are_checked(bundles):
    bundle = bundles("tiny-gqa")
    with OrtCpuRunner(bundle.model_path) as runner:
        for bad in ({}, {"x": np.zeros((1, 1, 64), np.float32)}, {"x": np.zeros((1, 1, 63), np.float16)}):
            with pytest.raises(DeployError):
                runner.run(bad)


def test_bfloat16_is_refused_with_the_runtime_that_has_it(bundles):
    with pytest.raises(BackendUnavailable, match="no CPU kernel") as caught:
        OrtCpuRunner(bundles("tiny-padding", "bf16").model_path)
    assert 'runtime="onnx-reference"' in caught.value.hint
    assert "NOT_IMPLEMENTED" in caught.value.got
    assert caught.value.exit_code == 3


def test_without_onnx_runtime_its_installation_is_the_advice(bundles, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # as an import that fails
    with pytest.raises(BackendUnavailable, match="ONNX Runtime is not installed") as caught:
        open_runner("ort-cpu", bundles("tiny-gqa").model_path)
    assert caught.value.hint == 'pip install "mha-deploy[ort]"'


def test_a_graph_with_an_unknown_node_is_refused_in_one_line(tmp_path):
    node = onnx.helper.make_node("NoSuchOperator", ["a"], ["b"], domain="no.such")
    path = saved(graph([node], ["a"], ["b"]), tmp_path)
    with pytest.raises(DeployError, match="ONNX Runtime cannot load the graph") as caught:
        OrtCpuRunner(path)
    assert "NoSuchOperator" in caught.value.got
    assert "\n" not in caught.value.got


def test_a_graph_that_fails_while_it_runs_is_an_error_not_a_trace(tmp_path):
    two = onnx.helper.make_node("Constant", [], ["two"], value_ints=[2])
    node = onnx.helper.make_node("Reshape", ["a", "two"], ["c"])
    with OrtCpuRunner(saved(graph([two, node], ["a"], ["c"]), tmp_path)) as runner:
        fine = runner.run({"a": np.ones(2, np.float32)})
        np.testing.assert_array_equal(fine["c"], [1, 1])
        with pytest.raises(DeployError, match="failed on these inputs"):
            runner.run({"a": np.ones(3, np.float32)})


def test_an_output_that_is_quantized_on_its_way_elsewhere_is_given_as_it_is(tmp_path):
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 23]>
    quantized (float[2, 3] x) => (float[2, 3] y, float[3, 2] z)
    <float scale = {0.5}, int8 zero = {0}> {
        y = Sin(x)
        turned = Transpose(y)
        levels = QuantizeLinear(turned, scale, zero)
        z = DequantizeLinear(levels, scale, zero)
    }""")
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    with OrtCpuRunner(saved(model, tmp_path)) as runner:
        got = runner.run({"x": x})
    np.testing.assert_allclose(got["y"], np.sin(x), rtol=1e-5)
    np.testing.assert_array_equal(got["z"], np.rint(np.sin(x).T * 2) / 2)


def test_a_tensor_of_a_type_that_is_not_ours_is_refused(tmp_path):
    model = graph([onnx.helper.make_node("Identity", ["a"], ["b"])], ["a"], ["b"])
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.elem_type = onnx.TensorProto.STRING
    with pytest.raises(DeployError, match="type that is not supported"):
        OrtCpuRunner(saved(model, tmp_path))


def test_a_closed_runner_holds_no_session(bundles):
    runner = OrtCpuRunner(bundles("tiny-gqa").model_path)
    runner.close()
    assert not any(isinstance(value, onnxruntime.InferenceSession) for value in vars(runner).values())


# -- level ALL crashes on x86-64 -------------------------------------------------------------------


def transpose_before_matmul():
    """The smallest graph whose session at level ALL ends the process (ONNX Runtime 1.24 to 1.31, x86-64).

    MatmulTransposeFusion swaps Transpose and the Cast that FP16 kernels need, then gives up because the
    operands differ in rank, and leaves nodes without a schema; NchwcTransformer dereferences the schema.
    """
    nodes = [
        onnx.helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
        onnx.helper.make_node("MatMul", ["t", "w"], ["y"]),
    ]
    half = onnx.TensorProto.FLOAT16
    weight = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float16)
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", half, [2, 3, 4])],
        [onnx.helper.make_tensor_value_info("y", half, [3, 2, 5])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)], ir_version=10)


def check_transpose_before_matmul(runner):
    x = np.random.default_rng(1).standard_normal((2, 3, 4)).astype(np.float16)
    weight = onnx.numpy_helper.to_array(transpose_before_matmul().graph.initializer[0]).astype(np.float64)
    exact = x.transpose(1, 0, 2).astype(np.float64) @ weight
    np.testing.assert_allclose(runner.run({"x": x})["y"], exact, atol=0.01)


def open_at_level_all(path):
    """A runner whose session has every optimization, as ONNX Runtime has it by default."""
    runner = OrtCpuRunner(path)
    runner._session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return runner


def test_a_graph_that_crashes_level_all_on_x86_is_checked(tmp_path):
    path = saved(transpose_before_matmul(), tmp_path)
    with open_runner("ort-cpu", path) as runner:
        check_transpose_before_matmul(runner)


@pytest.mark.slow
def test_level_all_is_right_or_a_crash_with_its_signal(tmp_path):
    path = saved(transpose_before_matmul(), tmp_path)
    ended = ""
    try:
        with open_isolated("test", "ONNX Runtime", open_at_level_all, path) as runner:
            check_transpose_before_matmul(runner)
    except RuntimeCrash as crash:
        ended = crash.what
    assert not ended or (platform.machine() == "x86_64" and "SIGSEGV" in ended)


def test_a_norm_in_two_types_can_be_loaded(tmp_path):
    """ONNX Runtime would make one node of it, with a scale of another type."""
    text = """<ir_version: 10, opset_import: ["": 18]>
    g (float[B, 8] x) => (float16[B, 8] y)
        <float two = {2.0}, float eps = {0.00001}, int64[1] last = {-1}> {
        wide = Mul(x, two)
        mean = ReduceMean(wide, last)
        off = Sub(wide, mean)
        square = Pow(off, two)
        variance = ReduceMean(square, last)
        guarded = Add(variance, eps)
        deviation = Sqrt(guarded)
        normal = Div(off, deviation)
        narrow = Cast<to = 10>(normal)
        scaled = Mul(narrow, scale)
        y = Add(scaled, bias)
    }"""
    model = onnx.parser.parse_model(text)
    for name, values in (("scale", np.arange(1, 9)), ("bias", np.ones(8))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(values.astype(np.float16), name))
    onnx.save(model, tmp_path / "norm.onnx")
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    with open_runner("ort-cpu", tmp_path / "norm.onnx") as runner:
        got = runner.run({"x": x})["y"]
    wide = 2.0 * x.astype(np.float64)
    normal = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(got, normal * np.arange(1, 9) + 1, rtol=5e-3, atol=5e-3)
