"""`mha-deploy fuse`: the table, the exit code, and the file it writes."""

import json
import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import mha_deploy as md


def attention(path, *, axis=-1, axes=(), size=8):
    """A small unfused attention; over another axis it is not one. With `axes`, more of them behind it."""
    heads = f"float[B,4,S,{size}]"
    text = f"""
    <ir_version: 10, opset_import: ["" : 18]>
    g ({heads} q, {heads} k, {heads} v) => ({heads} y) {{
       kt = Transpose <perm = [0, 1, 3, 2]> (k)
    """
    x, chain = "q", (axis, *axes)
    for number, each in enumerate(chain, 1):
        own = "" if number == len(chain) else str(number)
        text += f"s{own} = MatMul ({x}, kt) p{own} = Softmax <axis = {each}> (s{own})"
        x = f"y{own}"
        text += f" {x} = MatMul (p{own}, v) "
    text += "}"
    onnx.save(onnx.parser.parse_model(text), path)
    return path


@pytest.fixture
def source(tmp_path):
    return attention(tmp_path / "in.onnx")


def test_it_writes_one_node_and_says_so(source, tmp_path, run_cli):
    output = tmp_path / "out.onnx"
    done = run_cli("fuse", source, "-o", output)
    assert done.code == 0, done.err
    text = " ".join(done.out.split())
    assert "1 fused, 0 recognized but not expressible, 0 not recognized" in text
    assert "1 of 1 verified" in text
    assert "4/4×8" in text
    written = onnx.load(output)
    onnx.checker.check_model(written, full_check=True)
    assert [node.op_type for node in written.graph.node] == ["Attention"]
    assert {path.name for path in tmp_path.iterdir()} == {"in.onnx", "out.onnx"}


def test_nothing_is_overwritten_unasked(source, tmp_path, run_cli, refused):
    output = tmp_path / "out.onnx"
    output.write_text("mine")
    refused("fuse", source, "-o", output, what="already exists", got="out.onnx", hint="--overwrite")
    assert output.read_text() == "mine"
    done = run_cli("fuse", source, "-o", output, "--overwrite", "--no-verify", "--json")
    assert (done.code, onnx.load(output).graph.node[0].op_type) == (0, "Attention")
    reported = json.loads(done.out)
    assert (reported["complete"], reported["unfused"], reported["file"]) == (True, [], str(output))
    wanted = {"name": "p", "Hq": 4, "Hkv": 4, "mask": "none", "verified": False}
    assert {name: reported["fused"][0][name] for name in wanted} == wanted


def test_what_stays_is_named_and_is_the_exit_code(tmp_path, run_cli):
    source = attention(tmp_path / "in.onnx", axis=-2)
    done = run_cli("fuse", source, "-o", tmp_path / "out.onnx")
    assert done.code == 1
    assert "not fused, not expressible: The softmax runs over axis -2" in " ".join(done.out.split())
    assert (tmp_path / "out.onnx").is_file()


TALKING = """
<ir_version: 10, opset_import: ["" : 18]>
g (float[B,4,S,8] q, float[B,4,S,8] k, float[B,4,S,8] v) => (float[B,4,S,8] y)
<float[4,4] mix = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}> {
   kt = Transpose <perm = [0, 1, 3, 2]> (k)
   s0 = MatMul (q, kt)
   p0 = Softmax (s0)
   q1 = MatMul (p0, v)
   s = MatMul (q1, kt)
   p = Softmax (s)
   p1 = Transpose <perm = [0, 2, 3, 1]> (p)
   p2 = MatMul (p1, mix)
   p3 = Transpose <perm = [0, 3, 1, 2]> (p2)
   y = MatMul (p3, v)
}"""


def test_talking_heads_beside_a_plain_attention_are_the_exit_code(tmp_path, run_cli):
    onnx.save(onnx.parser.parse_model(TALKING), tmp_path / "in.onnx")
    done = run_cli("fuse", tmp_path / "in.onnx", "-o", tmp_path / "out.onnx", "--json")
    reported = json.loads(done.out)
    assert done.code == 1
    assert (reported["complete"], len(reported["fused"])) == (False, 1)
    assert [each["name"] for each in reported["unfused"]] == ["p"]


def test_every_command_names_the_same_reason_for_talking_heads(tmp_path, run_cli):
    path, bundle = tmp_path / "in.onnx", tmp_path / "bundle"
    onnx.save(onnx.parser.parse_model(TALKING), path)
    exported = md.export(path, bundle, axes={"B": "1:2:3", "S": "1:4:6"}, golden=("opt",), precision="fp32")
    (left,) = exported.manifest.unfused
    assert "heads" in left.reason
    found = json.loads(run_cli("inspect", path, "--json").out)
    assert len(found["fusible"]) == 1
    assert [each["reason"] for each in found["unfused"]] == [left.reason]
    for command in ("inspect", "check"):
        done = run_cli(command, path)
        assert " ".join(left.reason.split()) in " ".join((done.out + done.err).split())


def test_weights_beside_the_output_are_not_lost(source, tmp_path, refused):
    beside = tmp_path / "out.onnx.data"
    beside.write_bytes(b"weights")
    refused("fuse", source, "-o", tmp_path / "out.onnx", what="file for the weights already exists")
    assert beside.read_bytes() == b"weights"


def test_files_that_cannot_be_used(source, tmp_path, refused):
    output = tmp_path / "out.onnx"
    broken = tmp_path / "broken.onnx"
    broken.write_text("not a graph")
    refused("fuse", tmp_path / "no.onnx", "-o", output, what="no such ONNX file")
    refused("fuse", tmp_path / "brokn.onnx", "-o", output, what="no such ONNX file", hint="broken.onnx")
    refused("fuse", broken, "-o", output, what="not an ONNX model")
    refused("fuse", source, "-o", source, "--overwrite", what="Output and input are the same")
    refused("fuse", source, "-o", tmp_path, "--overwrite", what="not a regular file")
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
    assert "0 not recognized, 2 were Attention already" in text


# -- weights in other files ----------------------------------------------------------------------------


def with_weights(path, *, data="weights.bin", inside_if=False):
    """An attention whose Q is multiplied by a weight in another file."""
    projection = helper.make_node("MatMul", ["x", "w"], ["q"])
    weight = onnx.numpy_helper.from_array(np.arange(1024, dtype=np.float32).reshape(32, 32) / 1024, "w")
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 5, 32])]
    inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4, 5, 32]) for name in "kv"]
    nodes, weights = [projection], [weight]
    if inside_if:
        branch = helper.make_graph(
            [projection], "b", [], [helper.make_tensor_value_info("q", TensorProto.FLOAT, None)], [weight]
        )
        inputs.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
        nodes, weights = [helper.make_node("If", ["c"], ["q"], then_branch=branch, else_branch=branch)], []
    nodes += [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "kt"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"], name="weights"),
        helper.make_node("MatMul", ["p", "v"], ["y"]),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 5, 32])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    for tensor in [each for each in graph_weights(model.graph) if each.name == "w"]:
        offset = (path.parent / data).stat().st_size if (path.parent / data).exists() else 0
        with (path.parent / data).open("ab") as file:
            file.write(tensor.raw_data)
        onnx.external_data_helper.set_external_data(tensor, data, offset, len(tensor.raw_data))
        tensor.ClearField("raw_data")
    path.write_bytes(model.SerializeToString())
    return path


def graph_weights(graph):
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from graph_weights(attribute.g)


def results(path):
    """What ONNX Runtime computes from a file, its external data read from the file's own folder."""
    session = onnxruntime.InferenceSession(path)
    random = np.random.default_rng(0)
    feeds = {each.name: random.standard_normal(each.shape, np.float32) for each in session.get_inputs()}
    return session.run(None, feeds | ({"c": np.array(True)} if "c" in feeds else {}))[0]


@pytest.mark.parametrize(
    ("elsewhere", "inside_if", "large"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_the_weights_of_another_folder_come_along(
    elsewhere, inside_if, large, tmp_path, run_cli, monkeypatch
):
    if large:
        monkeypatch.setattr("mha_deploy.graph.file.EXTERNAL_DATA_FROM", 1024)
    home = tmp_path / "in"
    home.mkdir()
    source = with_weights(home / "in.onnx", inside_if=inside_if)
    before = {path.name: path.read_bytes() for path in home.iterdir()}
    output = (tmp_path / "out" if elsewhere else home) / "out.onnx"
    output.parent.mkdir(exist_ok=True)
    want = results(source)
    for more in ([], ["--overwrite"]):
        done = run_cli("fuse", source, "-o", output, *more)
        assert done.code == 0, done.err
        assert {name: (home / name).read_bytes() for name in before} == before
        assert "Attention" in [node.op_type for node in onnx.load(output).graph.node]
        np.testing.assert_allclose(results(output), want, atol=1e-5)
    made = {path.name for path in output.parent.iterdir()} - set(before)
    assert made == {"out.onnx", "out.onnx.data"} if large else {"out.onnx"}


def test_the_input_s_weights_are_never_replaced(tmp_path, refused):
    source = with_weights(tmp_path / "in.onnx", data="out.onnx.data")
    before = (tmp_path / "out.onnx.data").read_bytes()
    for output in ("out.onnx", "out.onnx.data"):
        refused("fuse", source, "-o", tmp_path / output, "--overwrite", what="weights of the input")
    assert (tmp_path / "out.onnx.data").read_bytes() == before


@pytest.mark.parametrize("broken", ["missing", "short"])
def test_weights_that_cannot_be_read(broken, tmp_path, run_cli):
    source = with_weights(tmp_path / "in.onnx")
    (tmp_path / "weights.bin").unlink()
    if broken == "short":
        (tmp_path / "weights.bin").write_bytes(b"1234")
    output = tmp_path / "out.onnx"
    output.write_text("mine")
    done = run_cli("fuse", source, "-o", output, "--overwrite")
    assert (done.code, output.read_text()) == (2, "mine"), done.err
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("failing", [b"my weights", None])
def test_a_rename_that_fails_leaves_the_old_pair(failing, tmp_path, run_cli, monkeypatch):
    """The old weights cannot be moved, or the new graph, which comes last."""
    monkeypatch.setattr("mha_deploy.graph.file.EXTERNAL_DATA_FROM", 1024)
    home, output = tmp_path / "out", tmp_path / "out" / "out.onnx"
    home.mkdir()
    source = with_weights(tmp_path / "in.onnx")
    output.write_text("my graph")
    (home / "out.onnx.data").write_text("my weights")
    before = {path.name: path.read_bytes() for path in home.iterdir()}
    right = os.replace

    def fails(path, target):
        new = Path(target) == output and Path(path).read_bytes() != b"my graph"
        if new if failing is None else Path(path).read_bytes() == failing:
            raise OSError("the disk is gone")
        return right(path, target)

    monkeypatch.setattr(os, "replace", fails)
    assert run_cli("fuse", source, "-o", output, "--overwrite").code == 2
    assert {path.name: path.read_bytes() for path in home.iterdir()} == before


@pytest.mark.parametrize("opset", [13, 17])
def test_files_of_old_opsets_are_converted(opset, tmp_path, run_cli):
    """The axes of ReduceMax and ReduceSum moved between attributes and inputs; weights stay in their file."""
    source = with_weights(tmp_path / "in.onnx")
    model = onnx.load(source, load_external_data=False)
    del model.graph.node[3]
    axis = onnx.numpy_helper.from_array(np.array([-1]), "axis")
    model.graph.initializer.append(axis)
    nodes = [
        helper.make_node("ReduceMax", ["s"], ["top"], axes=[-1]),
        helper.make_node("Sub", ["s", "top"], ["shifted"]),
        helper.make_node("Exp", ["shifted"], ["powers"]),
        helper.make_node("ReduceSum", ["powers", "axis"], ["total"]),
        helper.make_node("Div", ["powers", "total"], ["p"], name="weights"),
    ]
    last = model.graph.node.pop()
    model.graph.node.extend([*nodes, last])
    model.opset_import[0].version = opset
    source.write_bytes(model.SerializeToString())
    output = tmp_path / "elsewhere" / "out.onnx"
    output.parent.mkdir()
    assert run_cli("fuse", source, "-o", output).code == 0
    assert "Attention" in {node.op_type for node in onnx.load(output).graph.node}
    np.testing.assert_allclose(results(output), results(source), atol=1e-5)


def test_attention_of_a_file_that_is_not_fused_is_counted_by_check_and_inspect(run_cli, tmp_path):
    path = tmp_path / "raw.onnx"
    names = "bhsd,bhtd->bhst"
    scores = helper.make_node("Einsum", ["q", "k"], ["s"], equation=names)
    softmax = helper.make_node("Softmax", ["s"], ["p"], axis=-1)
    values = helper.make_node("MatMul", ["p", "v"], ["y"])
    shape = ["B", 2, "S", 16]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "qkv"]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)]
    graph = helper.make_graph([scores, softmax, values], "raw", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    done = run_cli("check", path)
    assert done.code == 1
    assert "1 attention" in done.err
    assert "mha-deploy fuse" in done.err
    done = run_cli("inspect", path)
    assert done.code == 0
    assert "1 attention not fused" in done.out
    assert done.out.count("[B, 2, S, 16]") == 4, "the axes that --axis takes"
    found = json.loads(run_cli("inspect", path, "--json").out)
    assert found["inputs"][0] == {"name": "q", "type": "float32", "shape": ["B", 2, "S", 16]}
    assert found["opset"] == 18


@pytest.mark.slow
def test_a_bundle_whose_attention_could_not_be_fused_is_told_why(run_cli, tmp_path):
    pytest.importorskip("tensorrt_rtx")
    path, bundle = attention(tmp_path / "odd.onnx", axes=(-2,), size=16), tmp_path / "bundle"
    command = ("deploy", path, "-o", bundle, "--backend", "tensorrt-rtx", "--golden", "opt")
    done = run_cli(*command)
    assert done.code == 1
    assert "--allow-decomposed" in done.out
    built = run_cli("build-engine", bundle, "--backend", "tensorrt-rtx", "--name", "again")
    assert built.code == 0, "an engine was built, and its verdict is reported"
    assert "1/2 fused" in built.out
    checked = run_cli("check", bundle)
    assert checked.code == 1
    assert "1 attention" in checked.err
    assert "axis -2" in checked.err
    done = run_cli(*command, "--allow-decomposed", "--overwrite")
    assert "--allow-decomposed" not in done.out
