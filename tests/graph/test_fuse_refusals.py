"""What is not fused stays as it is, and the report says where it stands and why."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from hand_graphs import Hand, S, fused, run
from onnx import TensorProto, helper

import mha_deploy as md
from mha_deploy.errors import DeployError
from mha_deploy.graph.fuse import fuse_attention

REFUSED = {
    "The softmax runs over axis -2, the matmul with V sums over another.": lambda g: g.op(
        "MatMul", g.op("Softmax", g.scores(), axis=-2), "v"
    ),
    "Slice stands between the softmax and the matmul with V.": lambda g: g.op(
        "MatMul",
        *(
            g.op("Slice", each, g.ints(0), g.ints(-1), g.ints(axis))
            for each, axis in ((g.op("Softmax", g.scores()), 3), ("v", 2))
        ),
    ),
    "Dropout of the weights is active: export the module in eval mode.": lambda g: g.op(
        "MatMul", g.op("Dropout", g.op("Softmax", g.scores()), g.const(0.5), g.const(True, bool)), "v"
    ),
    "The scores are scaled by something that is not the same for all keys, nor for all queries.": lambda g: (
        g.attend(g.op("Mul", g.scores(), g.input("temperature", [2, 1, S, S])))
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_it_stays_and_the_report_says_why(reason):
    g = Hand()
    model = g.model(REFUSED[reason](g))
    after, report = fused(model)
    assert (report.fused, report.complete, len(report.unfused)) == ((), False, 1)
    assert report.unfused[0].reason.startswith(reason)
    assert after.SerializeToString() == ir.to_proto(ir.from_proto(model)).SerializeToString()


# -- graphs written by hand: what no exporter said must not be guessed ----------------------------------


def by_hand(q=("B", 4, "S", 8), k=("B", 4, "S", 8), v=("B", 4, "S", 8), *, opset=18, extra=(), scores="s"):
    """Attention over given shapes; `extra` nodes may stand between the matmul "s" and the softmax."""
    nodes = [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "kt"], ["s"]),
        *extra,
        helper.make_node("Softmax", [scores], ["p"], axis=-1, name="the_softmax"),
        helper.make_node("MatMul", ["p", "v"], ["y"]),
    ]
    inputs = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, d) for n, d in zip("qkv", (q, k, v), strict=True)
    ]
    graph = helper.make_graph(
        nodes, "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    )
    return ir.from_proto(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    )


@pytest.mark.parametrize("names", ["qkv", "v"])
def test_heads_whose_size_is_a_dynamic_axis_stay_matmuls(names, tmp_path):
    """As in XCiT, where channels attend to channels: no kernel has heads of any size."""
    model = by_hand(**dict.fromkeys(names, ("B", 4, "S", "N")))
    _, report = fuse_attention(model)
    (left,) = report.unfused
    assert (report.fused, left.recognized) == ((), True)
    assert "axis N" in left.reason
    ir.save(model, tmp_path / "model.onnx")
    with pytest.raises(DeployError) as refused:
        md.check(tmp_path / "model.onnx")
    assert "axis N" in refused.value.got
    assert "allow_decomposed" in refused.value.hint
    _, report = fuse_attention(by_hand(**dict.fromkeys(names, ("B", 4, "S", 8))))
    assert (len(report.fused), report.unfused) == (1, ())


@pytest.mark.parametrize("fusible", [True, False])
def test_the_module_and_the_source_line_come_from_the_exporter(fusible):
    model = by_hand(extra=() if fusible else BOTH_WAYS, scores="s" if fusible else "s2")
    (softmax,) = (node for node in model.graph if node.op_type == "Softmax")
    frames = 'File "own.py", line 7, in forward\nFile "/x/site-packages/torch/nn.py", line 3, in softmax'
    softmax.metadata_props["pkg.torch.onnx.name_scopes"] = "['', 'layers.0.attn', 'softmax']"
    softmax.metadata_props["pkg.torch.onnx.stack_trace"] = frames
    new, report = fuse_attention(model)
    (found,) = report.fused if fusible else report.unfused
    assert (found.name, found.place) == ("layers.0.attn", "own.py:7")
    assert [frames] == [
        node.metadata_props["pkg.torch.onnx.stack_trace"]
        for node in new.graph
        if node.op_type == ("Attention" if fusible else "Softmax")
    ]


def test_without_metadata_the_name_is_that_of_the_softmax():
    new, report = fuse_attention(by_hand())
    assert (report.fused[0].name, report.fused[0].place) == ("the_softmax", None)
    random = np.random.default_rng(0)
    q, k, v = (torch.from_numpy(random.standard_normal((2, 4, 5, 8), np.float32)) for _ in range(3))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0)
    np.testing.assert_allclose(run(new, (q, k, v))[0], want.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({"k": ("B", 4, 5, 8), "v": ("B", 4, 6, 8)}, "K and V have different lengths"),
        ({"q": ("B", "H", "S", 8)}, "Q, K, V and the mask have different batches"),
        ({"v": None}, "The file does not state the shapes of Q, K and V."),
    ],
)
def test_shapes_that_do_not_prove_it(shapes, reason):
    _, report = fuse_attention(by_hand(**shapes))
    assert report.unfused[0].reason.startswith(reason)


BOTH_WAYS = [helper.make_node("Relu", ["s"], ["z"]), helper.make_node("Mul", ["s", "z"], ["s2"])]
SECOND = [helper.make_node("MatMul", ["q", "kt"], ["r"]), helper.make_node("Mul", ["s", "r"], ["s2"])]


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([helper.make_node("Relu", ["s"], ["s2"])], "Relu stands between the scores and the softmax. s2"),
        (
            [
                helper.make_node("Constant", [], ["low"], value_float=-5.0),
                helper.make_node("Clip", ["s", "low"], ["s2"]),
            ],
            "Clip stands between the scores and the softmax.",
        ),
        (
            [helper.make_node("Max", ["s", "q", "k"], ["s2"])],
            "Max stands between the scores and the softmax.",
        ),
        (BOTH_WAYS, "The scores come to the softmax on several paths. Relu z, Mul s2"),
        (SECOND, "The scores are made of two matmuls"),
    ],
)
def test_steps_that_attention_cannot_say(nodes, reason):
    _, report = fuse_attention(by_hand(extra=nodes, scores="s2"))
    assert report.unfused[0].reason.startswith(reason)


AXES = ["Slice (q, i9, i9, i9)", "Transpose <perm = [0, 1, 2, 9]> (q)", "Unsqueeze (q, twice)"]


@pytest.mark.parametrize("node", AXES)
def test_an_axis_that_a_tensor_lacks(node):
    """Such a file is not valid; it is not a failure of the tool."""
    text = f"""<ir_version: 10, opset_import: ["" : 18]>
    g (float[2,4,S,8] q, float[2,4,8,S] kt, float[2,4,S,8] v) => (float[2,4,S,8] y)
    <int64[1] i9 = {{9}}, int64[2] twice = {{0, 0}}>
    {{ q1 = {node} s = MatMul (q1, kt) p = Softmax (s) y = MatMul (p, v) }}"""
    _, report = md.fuse(onnx.parser.parse_model(text))
    assert [each.reason.startswith("The file does not state") for each in report.unfused] == [True]


@pytest.mark.parametrize("verify", [True, False])
def test_sums_of_products_and_gemms_of_unknown_shapes(verify):
    text = """<ir_version: 10, opset_import: ["" : 18]>
    g (float q, float k, float[8,"S"] kt, float[2,"S"] v) => (float y, float z)
    <int64[1] last = {-1}>
    { qk = Mul (q, k) s = ReduceSum (qk, last) p = Softmax (s) pv = Mul (p, v) y = ReduceSum (pv, last)
      t = Gemm <transA = 1> (q, kt) w = Softmax (t) z = Gemm <transB = 1> (w, v) }"""
    model = onnx.parser.parse_model(text)
    new, report = md.fuse(model, verify=verify)
    assert report.fused == ()
    assert [node.op_type for node in new.graph.node] == [node.op_type for node in model.graph.node]


def test_a_mask_that_makes_the_batch_larger_stays():
    """Attention has the batch of Q; the matmuls have that of the mask."""
    mask = helper.make_tensor("m", TensorProto.FLOAT, [3, 1, 1, 1], [0.0, 1.0, 2.0])
    nodes = [helper.make_node("Constant", [], ["m"], value=mask), helper.make_node("Add", ["s", "m"], ["s2"])]
    one = (1, 4, "S", 8)
    _, report = fuse_attention(by_hand(one, one, one, extra=nodes, scores="s2"))
    assert report.unfused[0].reason.startswith("A mask makes the scores larger")


def test_an_old_opset_is_refused():
    with pytest.raises(DeployError, match="older than opset 7") as caught:
        fuse_attention(by_hand(opset=6))
    assert caught.value.got == "opset 6"


@pytest.mark.parametrize("op_type", ["DFT", "RandomNormalLike", "Bernoulli", "GlobalLpPool"])
def test_a_node_that_opset_23_changes_or_onnx_runtime_loses_leaves_the_opset(op_type):
    model = by_hand()
    model.graph.append(ir.node(op_type, [model.graph.inputs[0]], name="other"))
    new, report = fuse_attention(model)
    assert (report.fused, len(report.unfused)) == ((), 1)
    assert op_type in report.unfused[0].reason
    assert new.opset_imports[""] == model.opset_imports[""]


@pytest.mark.parametrize(("old", "new"), [("bilinear", "linear"), ("nearest", "nearest"), (None, "linear")])
def test_the_modes_of_grid_sample_have_other_names_in_opset_23(old, new):
    model = by_hand()
    model.graph.append(ir.node("GridSample", model.graph.inputs[:2], {} if old is None else {"mode": old}))
    changed, report = fuse_attention(model)
    assert report.complete
    assert changed.graph[-1].attributes.get_string("mode") == new


def test_a_file_of_an_old_opset_without_attention_stays():
    weight = onnx.numpy_helper.from_array(np.ones((40, 40), np.float32), "w")
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 40]) for name in "xy"]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "g", value[:1], value[1:], [weight]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)
    new, report = md.fuse(model)
    assert (report.complete, [each.name for each in new.graph.initializer]) == (True, ["w"])
    assert [each.name for each in new.graph.input] == ["x"]
    assert new.opset_import[0].version == 15
