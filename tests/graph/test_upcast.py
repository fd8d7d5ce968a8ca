"""Casts around every matmul: the same graph from outside, accumulated in float32."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from attention_models import attention
from conformance import run_in_ort
from onnx import helper, numpy_helper

from mha_deploy.graph.upcast import in_float64, with_float32_matmuls

NAMES = ["tiny-gqa", "tiny-weights", "tiny-head-mix", "tiny-sparse-heads", "tiny-grouped-mlp"]
MATMULS = ("MatMul", "Gemm", "Attention")


def interface(model):
    return [
        [(value.name, value.dtype, str(value.shape)) for value in values]
        for values in (model.graph.inputs, model.graph.outputs)
    ]


def float_types(values):
    return {value.dtype for value in values if value is not None and value.dtype.is_floating_point()}


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("name", "precision"), [*((name, "fp16") for name in NAMES), ("tiny-packed", "bf16")]
)
def test_names_types_and_shapes_stay_what_they_were(bundles, name, precision):
    model = ir.load(bundles(name, precision).model_path)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    wide = with_float32_matmuls(model)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
    assert interface(wide) == interface(model)
    assert wide.graph.initializers.keys() == model.graph.initializers.keys()
    onnx.checker.check_model(ir.to_proto(wide), full_check=True)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", NAMES)
def test_every_matmul_is_float32_and_nothing_else_changes_type(bundles, name):
    model = ir.load(bundles(name).model_path)
    before = {node.name: node for node in model.graph}
    for node in with_float32_matmuls(model).graph:
        if node.op_type in MATMULS:
            assert float_types((*node.inputs, *(o for o in node.outputs if o.name))) == {ir.DataType.FLOAT}
        elif node.name in before:
            assert float_types(node.inputs) == float_types(before[node.name].inputs)
            assert float_types(node.outputs) == float_types(before[node.name].outputs)
        else:
            assert node.op_type == "Cast"


def test_a_float32_graph_gets_no_casts():
    wide = with_float32_matmuls(attention(("B", 4, "S", 8), ("B", 2, "T", 8), dtype="fp32"))
    assert not any(node.op_type == "Cast" for node in wide.graph)


def test_operators_of_other_domains_are_not_touched():
    node = helper.make_node("MatMul", ["x", "w"], ["y"], domain="com.example")
    model = ir.from_proto(_model([node], np.eye(4, dtype=np.float16)))
    assert [n.op_type for n in with_float32_matmuls(model).graph] == ["MatMul"]


# -- in ONNX Runtime ---------------------------------------------------------------------------


def _model(nodes, weight):
    E = weight.shape[0]
    values = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT16, ["B", width])
        for name, width in (("x", E), ("y", weight.shape[1]))
    ]
    graph = helper.make_graph(nodes, "matmul", values[:1], values[1:], [numpy_helper.from_array(weight, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def relative_error(got, exact):
    return np.linalg.norm(got.astype(np.float64) - exact) / np.linalg.norm(exact)


@pytest.fixture(scope="module")
def matmul():
    """A MatMul over 2048 half-precision numbers: model, input, and the exact result."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 2048)).astype(np.float16)
    weight = rng.standard_normal((2048, 64)).astype(np.float16)
    model = _model([helper.make_node("MatMul", ["x", "w"], ["y"], name="matmul")], weight)
    return model, x, x.astype(np.float64) @ weight.astype(np.float64)


def widened(model):
    return ir.to_proto(with_float32_matmuls(ir.from_proto(model)))


def test_an_upcast_matmul_is_exact_except_for_its_rounding(matmul):
    model, x, exact = matmul
    got = run_in_ort(widened(model), {"x": x})[0]
    assert got.dtype == np.float16
    assert relative_error(got, exact) < 2.0**-11


def test_upcasting_pays_off_where_half_precision_accumulates(matmul):
    model, x, exact = matmul
    plain, wide = (relative_error(run_in_ort(each, {"x": x})[0], exact) for each in (model, widened(model)))
    if plain < 2.0**-10:
        pytest.skip(f"ONNX Runtime {ort.__version__} sums half-precision matmuls accurately on this CPU")
    assert plain > 5 * wide


def test_zeros_without_a_stated_type_are_in_float64_as_well():
    text = """
<ir_version: 10, opset_import: ["" : 23]>
g (int64[1] shape, float[N] x) => (float[N] y) {
   zeros = ConstantOfShape (shape)
   y = Add (zeros, x)
}"""
    model = in_float64(ir.from_proto(onnx.parser.parse_model(text)))
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert {value.dtype for node in model.graph for value in node.outputs} <= {ir.DataType.DOUBLE, None}
