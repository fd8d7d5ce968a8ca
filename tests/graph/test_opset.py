from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from attention_models import attention, random_feeds
from conformance import run_in_ort
from onnx import TensorProto, helper

from mha_deploy.graph.lower import lower, opset
from mha_deploy.graph.lower.call import LoweringError


def to_opset(model: ir.Model, version: int) -> ir.Model:
    copy = model.clone()
    opset.to_opset(copy, version)
    return copy


def one_node(node: onnx.NodeProto, opset: int, outputs: int = 1, **constants: list[int]) -> ir.Model:
    """A graph of one node on x: [2, 6, 4]."""
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 6, 4])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output[:outputs]],
        [helper.make_tensor(name, TensorProto.INT64, [len(v)], v) for name, v in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return ir.from_proto(onnx.shape_inference.infer_shapes(model))


def same_results(one: ir.Model, other: ir.Model) -> None:
    feeds = random_feeds(one, {})
    for got, wanted in zip(*(run_in_ort(ir.to_proto(model), feeds) for model in (one, other)), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_primitives_reach_opset_17() -> None:
    model = attention(("B", 4, "S", 8), ("B", 2, "S", 8), mask=("bool", ("B", 1, 1, "S")), is_causal=1)
    lowered = lower(model, "primitives")
    assert lowered.opset_imports[""] == 17
    assert lowered.ir_version == 8
    onnx.checker.check_model(ir.to_proto(lowered), full_check=True)


def test_primitives_can_keep_the_opset() -> None:
    lowered = lower(attention((1, 4, 3, 8), (1, 4, 3, 8)), "primitives", opset=None)
    assert lowered.opset_imports[""] == 24


def test_axes_of_a_reduction_become_an_attribute() -> None:
    node = helper.make_node("ReduceMax", ["x", "axes"], ["y"], keepdims=0)
    model = one_node(node, 23, axes=[-1])
    old = to_opset(model, 17)
    (reduced,) = list(old.graph)
    assert list(reduced.attributes["axes"].as_ints()) == [-1]
    same_results(model, old)


def test_even_split_loses_its_count() -> None:
    node = helper.make_node("Split", ["x"], ["a", "b", "c"], axis=1, num_outputs=3)
    model = one_node(node, 23, outputs=3)
    old = to_opset(model, 17)
    onnx.checker.check_model(ir.to_proto(old))
    same_results(model, old)


def test_default_of_a_newer_attribute_is_dropped() -> None:
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT, saturate=1)
    (cast,) = list(to_opset(one_node(node, 23), 17).graph)
    assert "saturate" not in cast.attributes


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (helper.make_node("BitwiseNot", ["x"], ["y"], name="late_7"), "it is newer"),
        (
            helper.make_node("Split", ["x"], ["a", "b", "c"], name="late_7", axis=2, num_outputs=3),
            "num_outputs",
        ),
        (helper.make_node("ReduceMax", ["x", "x"], ["y"], name="late_7"), "2 inputs"),
    ],
)
def test_a_node_that_cannot_go_down_is_named(node: onnx.NodeProto, reason: str) -> None:
    model = one_node(node, 24, outputs=len(node.output))
    with pytest.raises(LoweringError, match=reason) as caught:
        to_opset(model, 17)
    assert caught.value.node == "late_7"
    assert caught.value.feature == f"{node.op_type} in opset 17"
    assert "opset=None" in str(caught.value)


def test_an_old_model_stays_as_it_is() -> None:
    model = one_node(helper.make_node("Relu", ["x"], ["y"]), 15)
    assert to_opset(model, 17).opset_imports[""] == 15


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_becomes_primitives(approximate: str) -> None:
    model = one_node(helper.make_node("Gelu", ["x"], ["y"], name="act", approximate=approximate), 23)
    old = to_opset(model, 17)
    assert all(node.op_type != "Gelu" and node.name.startswith("act/") for node in old.graph)
    feeds = random_feeds(model, {})
    got, wanted = (run_in_ort(ir.to_proto(m), feeds)[0] for m in (old, model))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
