"""`analyze` of own models, ONNX files and bundles, from their graphs; and profiles from the sizes of data."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import mha_deploy as md
from mha_deploy.analysis.profiles import propose_profiles
from mha_deploy.errors import DeployError


def attention_file(path, heads=2, size=8, width=16):
    """Attention written as two matmuls and a softmax, behind a projection of weights."""
    rng = np.random.default_rng(0)
    weights = [
        onnx.numpy_helper.from_array(rng.standard_normal((width, width)).astype(np.float32), name)
        for name in ("wq", "wk", "wv")
    ]
    shape = onnx.numpy_helper.from_array(np.array([0, 0, heads, size], np.int64), "split")
    scale = onnx.numpy_helper.from_array(np.float32(size**-0.5), "scale")
    nodes = []
    for name in "qkv":
        nodes += [
            helper.make_node("MatMul", ["x", f"w{name}"], [f"{name}0"], name=f"project_{name}"),
            helper.make_node("Reshape", [f"{name}0", "split"], [f"{name}1"]),
            helper.make_node("Transpose", [f"{name}1"], [name], perm=[0, 2, 1, 3]),
        ]
    nodes += [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "kt"], ["scores"]),
        helper.make_node("Mul", ["scores", "scale"], ["scaled"]),
        helper.make_node("Softmax", ["scaled"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "v"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", "S", width])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", heads, "S", size])
    graph = helper.make_graph(nodes, "g", [x], [y], [*weights, shape, scale])
    opset = helper.make_opsetid("", 18)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=10), path)
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return attention_file(tmp_path_factory.mktemp("analyze") / "model.onnx")


def test_the_work_of_a_file_is_that_of_its_matmuls(file):
    B, S, E = 3, 10, 16
    found = md.analyze(file, at=f"B={B},S={S}", precision="fp16", gpu="l4").to_dict()
    projections = [each for each in found["stages"] if each["growth"] == "MatMul"]
    assert [each["flops"] for each in projections] == [2 * B * S * E * E] * 3
    assert [each["parameters"] for each in projections] == [E * E] * 3
    assert [each["bytes"] for each in projections] == [2 * (2 * B * S * E + E * E)] * 3
    (attention,) = [each for each in found["stages"] if each["growth"] == "attention"]
    assert attention["flops"] == 4 * B * S * S * E
    assert found["total"]["flops"] == sum(each["flops"] for each in found["stages"])
    assert found["unknown_nodes"] == []


def test_sizes_that_the_file_computes_are_followed(tmp_path):
    """As older exporters write `chunk`: where a half ends is computed from the shape, at run time."""
    text = """<ir_version: 8, opset_import: ["" : 18]> g (float[B,S,16] x) => (float[B,S,4] z)
    <int64 two = {2}, int64[1] none = {0}, int64[1] last = {2}> {
        shape = Shape (x) wide = Gather (shape, two) half = Div (wide, two) end = Unsqueeze (half, none)
        y = Slice (x, none, end, last) z = MatMul (y, w)
    }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((8, 4), np.float32), "w"))
    onnx.save(model, tmp_path / "computed.onnx")
    found = md.analyze(tmp_path / "computed.onnx", at="B=3,S=10", gpu="l4").to_dict()
    assert [each["flops"] for each in found["stages"]] == [2 * 3 * 10 * 8 * 4]
    assert found["unknown_nodes"] == []


def test_a_bundle_is_counted_without_its_source(bundles):
    """The graph of a catalog layer does the work that its spec says."""
    from mha_deploy.analysis.graph import analyze_graph
    from mha_deploy.graph.file import load_graph

    bundle, sizes = bundles("tiny-gqa"), {"B": 2, "S": 7}
    by_spec = md.analyze(bundle, at="B=2,S=7").cost
    by_graph = analyze_graph("tiny-gqa", load_graph(bundle.model_path), sizes, "fp16", "h200").cost
    linear = [each.flops for each in by_spec.stages if each.name != "attention"]
    assert sum(each.flops for each in by_graph.stages if each.growth != "attention") == sum(linear)


def test_sizes_that_are_missing_are_named(file):
    with pytest.raises(DeployError, match="axes"):
        md.analyze(file, at="B=1")


def test_two_profiles_are_proposed_where_they_gain(file):
    sizes = ((1, 7), (2, 8), (4, 9), (3, 60), (3, 64))
    samples = [{"x": np.zeros((B, n, 16))} for B, n in sizes]
    found = md.propose_profiles(file, samples, peak="1:100000")
    assert found.split == ("S", 9)
    assert found.exact_seconds < found.two_seconds < found.one_seconds
    assert [str(each["S"]) for each in found.profiles] == ["7:8:9", "10:64:64"], "none in between is left out"
    assert [str(each["B"]) for each in found.profiles] == ["1:2:4", "1:3:3"]


def test_one_profile_is_proposed_where_all_samples_are_alike():
    found = propose_profiles([{"B": 1, "S": 8}] * 3, lambda sizes: float(sizes["S"]))
    assert found.split is None
    assert found.options == ["--profile B=1:1:1,S=8:8:8"]


@pytest.mark.slow
def test_an_own_module_is_exported_to_be_counted():
    import own_models

    found = md.analyze(own_models.decoder(), at="B=1,S=8,P=8")
    assert {each.growth for each in found.cost.stages} >= {"attention"}
    assert found.cost.parameters > 0
