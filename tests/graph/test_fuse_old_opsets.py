"""Files of opset 7 to 12: their attention is one node, and the rest computes what it did."""

import numpy as np
import onnx
import pytest
from hand_graphs import run
from onnx import TensorProto, helper

import mha_deploy as md

ROWS = (2, 3, 5, 8)


def old_model(opset, nodes, outputs, scales=None):
    """A graph of q, k and v, as it was written then: weights are inputs as well."""
    constants = [] if scales is None else [helper.make_tensor("scales", TensorProto.FLOAT, [4], scales)]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", *ROWS[1:]]) for name in "qkv"]
    inputs += [helper.make_tensor_value_info(each.name, TensorProto.FLOAT, [4]) for each in constants]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, list("bhst")) for name in outputs]
    graph = helper.make_graph(nodes, "g", inputs, results, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=3)
    onnx.checker.check_model(model)
    return model


def attended(axis):
    return [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "kt"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=axis),
        helper.make_node("MatMul", ["weights", "v"], ["y"]),
    ]


def check_same(model):
    new, report = md.fuse(model)
    feeds = {
        name: np.random.default_rng(at).standard_normal(ROWS, np.float32) for at, name in enumerate("qkv")
    }
    before, after = run(model, feeds), run(new, feeds)
    for want, got in zip(before, after, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    return report


@pytest.mark.parametrize(("opset", "axis"), [(7, 3), (11, -1)])
def test_attention_is_one_node(opset, axis):
    report = check_same(old_model(opset, attended(axis), ["y"]))
    assert (len(report.fused), report.unfused) == (1, ())


def test_a_softmax_over_several_axes_is_none_of_attention():
    """Before opset 13 a softmax runs over all axes from the given one on."""
    report = check_same(old_model(12, attended(2), ["y"]))
    assert (report.fused, len(report.unfused)) == ((), 1)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(
    ("op_type", "opset", "scales"),
    [("Upsample", 9, (1, 1, 2, 1.5)), ("Resize", 10, (1, 1, 1.6, 2)), ("Resize", 10, (1, 1, 0.6, 0.7))],
)
def test_sampled_points_stay_the_same(op_type, opset, scales, mode):
    sampled = helper.make_node(op_type, ["q", "scales"], ["z"], mode=mode)
    report = check_same(old_model(opset, [*attended(3), sampled], ["y", "z"], scales))
    assert len(report.fused) == 1


@pytest.mark.parametrize(
    ("node", "opset"),
    [
        (helper.make_node("Hardmax", ["q"], ["z"], axis=1), 11),
        (helper.make_node("Resize", ["q", "scales"], ["z"], mode="nearest"), 10),
    ],
    ids=["over several axes", "larger and smaller"],
)
def test_what_cannot_be_converted_is_refused(node, opset):
    scales = (1, 1, 0.5, 2) if "scales" in node.input else None
    with pytest.raises(md.DeployError, match="since opset") as caught:
        md.fuse(old_model(opset, [*attended(3), node], ["y", "z"], scales))
    assert "newer opset" in caught.value.hint
