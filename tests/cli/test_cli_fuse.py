"""`mha-deploy fuse`: the table, the exit code, and the file it writes."""

import json

import onnx
import pytest
from onnx import TensorProto, helper


def attention(path, *, axis=-1):
    """A small unfused attention; over another axis it is not one."""
    nodes = [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "kt"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"], axis=axis, name="weights"),
        helper.make_node("MatMul", ["p", "v"], ["y"]),
    ]
    shape = ["B", 4, "S", 8]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "qkv"]
    graph = helper.make_graph(
        nodes, "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


@pytest.fixture
def source(tmp_path):
    return attention(tmp_path / "in.onnx")


def test_it_writes_one_node_and_says_so(source, tmp_path, run_cli):
    done = run_cli("fuse", source, "-o", tmp_path / "out.onnx")
    assert done.code == 0, done.err
    assert "1 fused, 0 not" in done.out
    assert "4/4×8" in done.out
    written = onnx.load(tmp_path / "out.onnx")
    onnx.checker.check_model(written, full_check=True)
    assert [node.op_type for node in written.graph.node] == ["Attention"]
    assert {path.name for path in tmp_path.iterdir()} == {"in.onnx", "out.onnx"}


def test_what_stays_is_named_and_is_the_exit_code(tmp_path, run_cli):
    source = attention(tmp_path / "in.onnx", axis=-2)
    done = run_cli("fuse", source, "-o", tmp_path / "out.onnx")
    assert done.code == 1
    assert "not fused: The softmax runs over axis -2" in " ".join(done.out.split())
    assert (tmp_path / "out.onnx").is_file()


def test_json(source, tmp_path, run_cli):
    done = run_cli("fuse", source, "-o", tmp_path / "out.onnx", "--json")
    told = json.loads(done.out)
    assert (told["complete"], told["unfused"]) == (True, [])
    assert told["file"] == str(tmp_path / "out.onnx")
    assert told["fused"][0] | {"name": "weights", "Hq": 4, "Hkv": 4, "mask": "none"} == told["fused"][0]


def test_nothing_is_overwritten_unasked(source, tmp_path, run_cli, refused):
    output = tmp_path / "out.onnx"
    output.write_text("mine")
    refused("fuse", source, "-o", output, what="there already", got="out.onnx", hint="--overwrite")
    assert output.read_text() == "mine"
    assert run_cli("fuse", source, "-o", output, "--overwrite").code == 0
    assert onnx.load(output).graph.node[0].op_type == "Attention"


def test_weights_beside_the_output_are_not_lost(source, tmp_path, refused):
    beside = tmp_path / "out.onnx.data"
    beside.write_bytes(b"weights")
    refused("fuse", source, "-o", tmp_path / "out.onnx", what="file for the weights is there already")
    assert beside.read_bytes() == b"weights"


def test_files_that_cannot_be_used(source, tmp_path, refused):
    output = tmp_path / "out.onnx"
    broken = tmp_path / "broken.onnx"
    broken.write_text("not a graph")
    refused("fuse", tmp_path / "no.onnx", "-o", output, what="no such ONNX file")
    refused("fuse", broken, "-o", output, what="not an ONNX model")
    refused("fuse", source, "-o", source, "--overwrite", what="The output is the input")
    refused("fuse", source, "-o", tmp_path, "--overwrite", what="not a file")
    refused("fuse", source, "-o", tmp_path / "no" / "out.onnx", what="folder of the output does not exist")
    assert not output.exists()


def test_a_write_that_fails_leaves_the_old_file(source, tmp_path, run_cli, monkeypatch):
    output = tmp_path / "out.onnx"
    output.write_text("mine")

    def fail(model, path):
        path.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr("mha_deploy.graph.file.save_graph", fail)
    done = run_cli("fuse", source, "-o", output, "--overwrite")
    assert (done.code, output.read_text()) == (2, "mine")
    assert {path.name for path in tmp_path.iterdir()} == {"in.onnx", "out.onnx"}


REPEATED = """
<ir_version: 10, opset_import: ["" : 23]>
g (float[B,4,S,8] q, float[B,2,S,8] k, float[B,2,S,8] v) => (float[B,4,S,8] y)
<int64[1] at = {2}, int64[5] five = {1, 1, 2, 1, 1}, int64[4] four = {0, 4, -1, 8},
 float[B,4,S,8] k3, float[B,4,S,8] v3, float[B,4,S,8] k4, float[B,4,S,8] v4, float[B,4,S,8] y0> {
   k1 = Unsqueeze (k, at)
   k2 = Expand (k1, five)
   k3 = Reshape (k2, four)
   v1 = Unsqueeze (v, at)
   v2 = Expand (v1, five)
   v3 = Reshape (v2, four)
   y0 = Attention (q, k3, v3)
   k4 = Reshape (k2, four)
   v4 = Reshape (v2, four)
   y = Attention (y0, k4, v4)
}"""


def test_what_was_changed_about_attention_nodes_is_said_once(tmp_path, run_cli):
    model = onnx.parser.parse_model(REPEATED)
    attentions = [node for node in model.graph.node if node.op_type == "Attention"]
    for index, node in enumerate(attentions):
        node.name = f"layers.{index}.attention"
    onnx.save(model, tmp_path / "in.onnx")
    done = run_cli("fuse", tmp_path / "in.onnx", "-o", tmp_path / "out.onnx")
    assert done.code == 0, done.err
    text = " ".join(done.out.split())
    assert text.count("K and V are not repeated: 2 heads for 4") == 1
    assert "changed: layers.0.attention and 1 more: K and V are not repeated" in text
    assert "0 fused, 0 not, 2 were Attention already" in text
