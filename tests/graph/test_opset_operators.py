"""Operators that whole models hold, in the words of opset 17."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from conformance import run_in_ort
from onnx import TensorProto, helper, numpy_helper

from mha_deploy.graph.lower import lower, opset
from mha_deploy.graph.lower.call import LoweringError
from mha_deploy.graph.rules import check_operators, target_from

SHAPE = (2, 3, 8)
X = np.random.default_rng(5).standard_normal(SHAPE).astype(np.float32)


def to_opset(model: ir.Model, version: int) -> ir.Model:
    copy = model.clone()
    opset.to_opset(copy, version)
    return copy


def graph_of(*nodes, opset=23, kind=TensorProto.FLOAT, shape=SHAPE, **constants):
    """A graph from x to y."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, shape)],
        [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return ir.from_proto(onnx.shape_inference.infer_shapes(model))


def outputs_of(model, x):
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return run_in_ort(proto, {"x": x})[0]


def agree(model, old, x, tolerance=0.0):
    assert old.opset_imports[""] == 17
    got, wanted = outputs_of(old, x), outputs_of(model, x)
    assert got.dtype == wanted.dtype
    if got.dtype == bool:
        np.testing.assert_array_equal(got, wanted)
    else:
        np.testing.assert_allclose(
            got.astype(np.float32), wanted.astype(np.float32), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("axis", [-1, 2, 1, -2])
@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_rms_norm_is_written_out(axis, kind) -> None:
    node = helper.make_node("RMSNormalization", ["x", "s"], ["y"], name="norm", axis=axis, epsilon=1e-3)
    scale = np.linspace(0.5, 2.0, int(np.prod(SHAPE[axis:])), dtype=kind).reshape(SHAPE[axis:])
    model = graph_of(node, kind=helper.np_dtype_to_tensor_dtype(np.dtype(kind)), s=scale)
    old = lower(model, "primitives")
    assert all(node.name.startswith("norm/") for node in old.graph)
    agree(model, old, X.astype(kind), tolerance=1e-6 if kind is np.float32 else 2e-3)


def test_rms_norm_of_large_halves_does_not_overflow() -> None:
    """Squares of 400 are beyond FP16: the mean is taken in float32, as the operator does."""
    node = helper.make_node("RMSNormalization", ["x", "s"], ["y"], name="norm")
    model = graph_of(node, kind=TensorProto.FLOAT16, s=np.ones(8, np.float16))
    agree(model, lower(model, "primitives"), np.full(SHAPE, 400, np.float16), tolerance=1e-3)


def test_rms_norm_stays_where_the_parser_has_it_and_goes_where_it_has_not() -> None:
    model = graph_of(helper.make_node("RMSNormalization", ["x", "s"], ["y"]), s=np.ones(8, np.float32))
    assert [node.op_type for node in lower(model, "trt").graph] == ["RMSNormalization"]
    written = lower(model, "trt", decode_primitives=True)
    assert "RMSNormalization" not in [node.op_type for node in written.graph]
    assert written.opset_imports[""] == 23
    np.testing.assert_allclose(outputs_of(written, X), outputs_of(model, X), rtol=1e-6, atol=1e-6)


def test_infinities_of_halves_are_found() -> None:
    x = X.astype(np.float16)
    x[0, 0, :3] = np.inf, -np.inf, np.nan
    for attributes in ({}, {"detect_negative": 0}):
        model = graph_of(helper.make_node("IsInf", ["x"], ["y"], **attributes), kind=TensorProto.FLOAT16)
        old = to_opset(model, 17)
        got = outputs_of(old, x)
        wanted = np.isposinf(x) if attributes else np.isinf(x)
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("operator", ["ReduceMax", "ReduceMin"])
def test_booleans_are_reduced_as_numbers(operator) -> None:
    node = helper.make_node(operator, ["x", "axes"], ["y"], keepdims=0)
    model = graph_of(node, kind=TensorProto.BOOL, axes=np.array([-1]))
    got = outputs_of(to_opset(model, 17), X > 1)
    np.testing.assert_array_equal(got, (X > 1).max(-1) if operator == "ReduceMax" else (X > 1).min(-1))


def test_booleans_are_reduced_as_numbers_where_axes_are_inputs() -> None:
    node = helper.make_node("ReduceMax", ["x", "axes"], ["y"], keepdims=0)
    old = to_opset(graph_of(node, kind=TensorProto.BOOL, axes=np.array([-1])), 18)
    np.testing.assert_array_equal(outputs_of(old, X > 1), (X > 1).max(-1))


def test_a_reduction_without_axes_takes_all() -> None:
    model = graph_of(helper.make_node("ReduceMean", ["x"], ["y"], keepdims=0, noop_with_empty_axes=0))
    agree(model, to_opset(model, 17), X, tolerance=1e-6)


def test_a_reduction_that_does_nothing_is_refused() -> None:
    node = helper.make_node("ReduceMean", ["x"], ["y"], name="idle", noop_with_empty_axes=1)
    with pytest.raises(LoweringError, match="noop_with_empty_axes"):
        to_opset(graph_of(node), 17)


def test_padding_of_some_axes_is_spelled_out() -> None:
    node = helper.make_node("Pad", ["x", "pads", "zero", "axes"], ["y"])
    pads, axes = np.array([1, 0, 2, 3]), np.array([-1, 1])
    model = graph_of(node, pads=pads, zero=np.float32(7), axes=axes)
    agree(model, to_opset(model, 17), X)


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("Mish", ["x"], ["y"]),
        helper.make_node("Gelu", ["x"], ["y"]),
        helper.make_node("Gelu", ["x"], ["y"], approximate="tanh"),
    ],
)
def test_activations_are_written_out(node) -> None:
    model = graph_of(node)
    agree(model, to_opset(model, 17), X, tolerance=1e-5)


def test_swish_is_written_out() -> None:
    model = graph_of(helper.make_node("Swish", ["x"], ["y"], alpha=1.5), opset=24)
    got = outputs_of(to_opset(model, 17), X)
    np.testing.assert_allclose(got, X / (1 + np.exp(-1.5 * X)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("corner", ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"])
def test_images_are_resized_alike(mode, corner) -> None:
    """Positions of an image model are interpolated; only attributes that came later keep a node up."""
    x = np.random.default_rng(2).standard_normal((1, 2, 5, 7)).astype(np.float32)
    attributes = {"mode": mode, "coordinate_transformation_mode": corner, "antialias": 0}
    node = helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], **attributes)
    model = graph_of(node, shape=x.shape, sizes=np.array([1, 2, 8, 10]))
    agree(model, to_opset(model, 17), x, tolerance=1e-6)


@pytest.mark.parametrize(
    ("node", "constants", "reason"),
    [
        (
            helper.make_node("Resize", ["x", "", "s"], ["y"], name="n", antialias=1, mode="linear"),
            {"s": np.ones(3, np.float32)},
            "antialias",
        ),
        (
            helper.make_node("Pad", ["x", "pads"], ["y"], name="n", mode="wrap"),
            {"pads": np.array([0, 0, 1, 0, 0, 1])},
            "mode=wrap",
        ),
        (
            helper.make_node("ScatterElements", ["x", "i", "u"], ["y"], name="n", reduction="max"),
            {"i": np.zeros((1, 1, 1), np.int64), "u": np.zeros((1, 1, 1), np.float32)},
            "reduction=max",
        ),
        (
            helper.make_node("Cast", ["x"], ["y"], name="n", to=TensorProto.FLOAT8E4M3FN),
            {},
            "output output is FLOAT8E4M3FN",
        ),
    ],
)
def test_what_opset_17_cannot_express_is_refused_by_name(node, constants, reason) -> None:
    with pytest.raises(LoweringError, match=reason) as caught:
        to_opset(graph_of(node, **constants), 17)
    assert caught.value.node == "n"
    assert node.op_type in caught.value.feature


def test_integer_cumsum_is_noted_for_8_6_only() -> None:
    def findings(kind, matmul="tensorrt", version="8.6.1"):
        model = graph_of(helper.make_node("CumSum", ["x", "axis"], ["y"]), kind=kind, axis=np.array(-1))
        return [finding.rule for finding in check_operators(model, target_from(matmul, version))]

    assert findings(TensorProto.INT64) == ["integer-cumsum"]
    assert findings(TensorProto.FLOAT) == []
    assert findings(TensorProto.INT64, "tensorrt-rtx", "1.7.1") == []


def test_nodes_of_one_name_are_kept_apart() -> None:
    def twice(*names):
        tensors = ("x", "h", "y")
        return graph_of(
            *(helper.make_node("Gelu", [tensors[i]], [tensors[i + 1]], name=names[i]) for i in (0, 1))
        )

    agree(twice("one", "two"), to_opset(twice("act", "act"), 17), X, tolerance=1e-5)


@pytest.mark.parametrize("number", [np.float32(-2.0), np.arange(8, dtype=np.float32)])
def test_one_number_where_a_mask_is_true_is_a_selection(number) -> None:
    nodes = [
        helper.make_node("Greater", ["x", "zero"], ["mask"]),
        helper.make_node("NonZero", ["mask"], ["found"]),
        helper.make_node("Transpose", ["found"], ["places"], perm=[1, 0]),
        helper.make_node("ReduceSum", ["ones", "none"], ["count"], keepdims=0),
        helper.make_node("Cast", ["mask"], ["ones"], to=TensorProto.INT64),
        helper.make_node("Reshape", ["count", "last"], ["length"]),
        helper.make_node("Expand", ["number", "length"], ["numbers"]),
        helper.make_node("ScatterND", ["x", "places", "numbers"], ["y"]),
    ]
    nodes[3], nodes[4] = nodes[4], nodes[3]
    if number.ndim:  # one for each place
        nodes[6] = helper.make_node("Slice", ["number", "first", "length"], ["numbers"])
    few = np.where(np.arange(X.size).reshape(SHAPE) % 10 == 0, 1, -1).astype(np.float32)
    constants = {"zero": np.float32(0), "none": np.int64([0, 1, 2]), "last": np.int64([-1])}
    model = graph_of(*nodes, number=number, first=np.int64([0]), **constants)
    written = lower(model, "trt")
    assert ("NonZero" in {node.op_type for node in written.graph}) == bool(number.ndim)
    assert len(check_operators(model, target_from("tensorrt-rtx", "1.7.1"))) == bool(number.ndim)
    np.testing.assert_array_equal(outputs_of(written, few), outputs_of(model, few))


def test_sizes_that_follow_are_numbers_in_a_reshape() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "last"], ["width"]),
        helper.make_node("Div", ["width", "heads"], ["size"]),
        helper.make_node("Slice", ["shape", "first", "last"], ["outer"]),
        helper.make_node("Concat", ["outer", "heads", "size"], ["sizes"], axis=0),
        helper.make_node("Reshape", ["x", "sizes"], ["y"]),
    ]
    model = graph_of(
        *nodes, shape=("B", "S", 8), last=np.int64([2]), heads=np.int64([4]), first=np.int64([0])
    )
    model.graph.outputs[0].shape = ir.Shape(["B", "S", 4, 2])
    written = lower(model, "trt")
    assert [node.op_type for node in written.graph if node.op_type != "Constant"] == ["Reshape"]
    np.testing.assert_array_equal(outputs_of(written, X), outputs_of(model, X))
