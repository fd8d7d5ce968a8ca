"""The first wrong attention and the first wrong node are found, in few runs."""

import importlib
import json
import shutil
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from bundle_edit import rehash
from onnx import numpy_helper
from small_transformers import in_float32
from torch import nn

import mha_deploy as md
from mha_deploy.bundle.folder import open_bundle
from mha_deploy.graph.file import load_graph, with_outputs
from mha_deploy.graph.lower import lower
from mha_deploy.runtime import open_runner
from mha_deploy.runtime.child import isolation
from mha_deploy.status import Kind
from mha_deploy.validation.fault import bisect_bundle, case_to_bisect, reference_for

pytestmark = pytest.mark.usefixtures("in_process")  # quicker than a child process
ATTENTIONS = [f"blocks.{i}.attention" for i in range(3)]


@pytest.fixture
def broken(own_bundles, tmp_path):
    """A function that gives a copy of the bundle with its graph changed."""

    def make(change, name="copy"):
        path = Path(shutil.copytree(own_bundles().path, tmp_path / name))
        model = onnx.load(path / "model.onnx")
        change(model.graph)
        onnx.save(model, path / "model.onnx")
        rehash(path)
        return open_bundle(path)

    return make


@pytest.fixture(scope="module")
def program(own_bundles):
    """What is true inside the right module; a broken graph does not change that.

    It is traced again, as by a user who bisects in another process: the values must have the same names.
    """
    bundle, fresh = own_bundles(), importlib.import_module("mha_deploy.baselines.fresh")
    getattr(fresh.export_user_module, "forget", dict)()  # tests/conftest.py
    trusted = reference_for(bundle, case_to_bisect(bundle), "ort-cpu")
    assert trusted.title == "the module's program in FP64"
    assert trusted.module_unused is None
    return trusted


def bisected(bundle, reference, runtime="ort-cpu"):
    return bisect_bundle(bundle, runtime, partial(open_runner, runtime), lambda case: reference)


def scale_off(name):
    def change(graph):
        node = next(node for node in graph.node if node.name == name)
        for attribute in node.attribute:
            if attribute.name == "scale":
                attribute.f *= 2

    return change


def matmul_off(block):
    """Change the weight of the first matmul behind an attention."""

    def change(graph):
        weights = {tensor.name: tensor for tensor in graph.initializer}
        node = behind(graph, ATTENTIONS[block], "MatMul")
        name = next(name for name in node.input if name in weights)
        larger = numpy_helper.to_array(weights[name]) * np.float16(1.5)
        weights[name].CopyFrom(numpy_helper.from_array(larger, name))
        change.node = node.name

    return change


def behind(graph, name, operator):
    """The nearest node of an operator that takes what a node gives."""
    pending = [node for node in graph.node if node.name == name]
    while pending:
        node = pending.pop(0)
        if node.op_type == operator:
            return node
        pending += [user for user in graph.node if set(user.input) & set(node.output)]
    raise LookupError(operator)


def test_a_right_model_has_nothing_to_look_for(own_bundles, program):
    found = bisected(own_bundles(), program)
    assert found.wrong is None
    assert found.first_node is None
    assert found.runs == 2  # its outputs, and its attentions by themselves


class Attends(nn.Module):
    def __init__(self, E=32):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(E, E) for _ in range(3))

    def forward(self, x, to):
        parts = (self.q(x), self.k(to), self.v(to))
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in parts)
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + heads.transpose(1, 2).flatten(2)


def plant(path, name):
    """Give an attention of a bundle another scale."""
    model = onnx.load(path / "model.onnx")
    node = next(node for node in model.graph.node if node.name == name)
    node.attribute.append(onnx.helper.make_attribute("scale", 1.0))
    onnx.save(model, path / "model.onnx")
    rehash(path)


def test_what_the_program_does_not_compute_comes_from_a_right_graph(own_bundles, broken, program):
    """A matmul without its bias is a value of the graph alone: another export has it as well."""
    graph = load_graph(own_bundles().model_path).graph
    names = [str(node.outputs[0].name) for node in graph if node.op_type == "MatMul"]
    assert program.values(names).keys() == set(names)
    wrong = reference_for(broken(scale_off(ATTENTIONS[0])), case_to_bisect(own_bundles()), "ort-cpu")
    assert wrong.title == program.title
    assert wrong.values(names).keys() < set(names)  # a fault of the graph would be in its values, too


@pytest.mark.sweep(1)
@pytest.mark.parametrize("block", range(3))
def test_a_wrong_attention_is_found(broken, program, block):
    found = bisected(broken(scale_off(ATTENTIONS[block])), program)
    assert found.first_wrong == ATTENTIONS[block]
    assert found.last_right == (ATTENTIONS[block - 1] if block else None)
    assert found.first_node.node == ATTENTIONS[block]
    assert found.runs <= 10


@pytest.mark.sweep(1)
@pytest.mark.parametrize("block", range(3))
def test_a_wrong_node_between_two_attentions_is_found(broken, program, block):
    change = matmul_off(block)
    found = bisected(broken(change), program)
    assert found.last_right == ATTENTIONS[block]
    assert found.first_wrong == (ATTENTIONS[block + 1] if block < 2 else None)
    # A matmul whose bias is added apart: what the program knows is their sum.
    assert change.node in (found.first_node.node, *found.unseen)
    assert len(found.unseen) <= 1
    assert found.runs <= 12


def test_nodes_that_cannot_be_compared_begin_with_the_nearest(broken, program):
    bundle = broken(scale_off(ATTENTIONS[1]))
    found = bisected(bundle, program._replace(values=lambda names: {}))  # of nothing but attentions
    assert found.first_wrong == ATTENTIONS[1]
    graph = load_graph(bundle.model_path).graph
    node = next(node for node in graph if node.name == ATTENTIONS[1])
    makers = [value.producer().name for value in node.inputs[:3]]
    assert set(found.unseen[: len(makers)]) == set(makers)


def behind_movers(graph):
    """Change the last matmul, and let nodes that only move numbers stand before the output `hidden`."""
    weights = {tensor.name: tensor for tensor in graph.initializer}
    node = [node for node in graph.node if node.op_type == "MatMul"][-1]
    name = next(name for name in node.input if name in weights)
    larger = numpy_helper.to_array(weights[name]) * np.float16(1.5)
    weights[name].CopyFrom(numpy_helper.from_array(larger, name))
    last = next(node for node in graph.node if "hidden" in node.output)
    last.output[0], behind_movers.node = "hidden_inside", last.name
    moved = [
        onnx.helper.make_node("Transpose", ["hidden_inside"], ["moved"], "there", perm=[1, 0, 2]),
        onnx.helper.make_node("Concat", ["moved"], ["joined"], "joined", axis=0),
        onnx.helper.make_node("Transpose", ["joined"], ["hidden"], "back", perm=[1, 0, 2]),
    ]
    at = list(graph.node).index(last) + 1
    nodes = [*graph.node[:at], *moved, *graph.node[at:]]
    del graph.node[:]
    graph.node.extend(nodes)


def test_a_node_that_only_moves_numbers_is_not_named_for_the_one_that_computes_them(broken, program):
    """What lies before the output is not known to the program, so the difference shows behind the movers."""
    bundle = broken(behind_movers)
    known = {"hidden"}  # as of a graph whose other values have no counterpart in the program
    some = program._replace(values=lambda names: program.values([name for name in names if name in known]))
    found = bisected(bundle, some)
    assert found.first_node.node == behind_movers.node
    assert found.first_node.operator == "Add"
    assert found.first_node.shown_at == "back"
    assert not {"there", "joined", "back", found.first_node.node} & set(found.unseen)


def test_a_transpose_that_is_wrong_itself_is_named(broken, program):
    def change(graph):
        node = next(n for n in graph.node if n.op_type == "Transpose" and n.output[0] == "transpose")
        node.attribute[0].ints[:] = [2, 0, 1, 3]  # there are as many heads as batch elements
        change.node = node.name

    found = bisected(broken(change), program)
    assert found.first_node.node == change.node
    assert found.first_node.shown_at is None


def test_without_the_factory_the_graph_in_another_runtime_tells(broken, monkeypatch):
    bundle = broken(lambda graph: None)
    monkeypatch.setattr("mha_deploy.validation.fault.can_import", lambda name: False)
    other = reference_for(bundle, case_to_bisect(bundle), "ort-cpu")
    assert other.title == "the graph in onnx-reference"
    assert other.module_unused.kind is Kind.MODULE_NOT_USED  # PyTorch is not there
    assert reference_for(bundle, case_to_bisect(bundle), "tensorrt").title == "the graph in ort-cpu"


def test_without_permission_for_the_module_no_node_of_a_wrong_graph_is_named(broken, monkeypatch, run_cli):
    """The graph that is wrong cannot be its own reference; its attentions are judged by what is stored."""
    steps, bundle = [], broken(matmul_off(0))
    monkeypatch.setattr(isolation, "trust_code", False)
    monkeypatch.setattr(isolation, "own", set())
    found = md.bisect(bundle, "ort-cpu", on_step=lambda name, *_: steps.append(name))
    assert (found.last_right, found.first_wrong) == (ATTENTIONS[0], ATTENTIONS[1])
    assert found.first_node is None
    assert found.doubt.kind is Kind.REFERENCE_IS_SUBJECT
    assert found.module_unused.kind is Kind.MODULE_NOT_USED
    assert bundle.manifest.spec.factory in found.module_unused.got
    assert "trust_code=True" in found.module_unused.wanted
    # It is said before the search, too, and the runtime is opened for whole and attentions alone.
    assert any("trust" in step for step in steps[:3])
    assert found.runs <= 3
    done = run_cli("bisect", bundle.path, "--runtime", "ort-cpu")
    assert "--trust-code" in done.out
    assert ATTENTIONS[1] in done.out


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.own, self.cross, self.last, self.faint = (Attends() for _ in range(6))

    def forward(self, image, text):
        image = self.first(image, image)
        image = self.second(image, image)
        text = self.cross(self.own(text, text), image)
        text = self.last(text, text)
        return text + 1e-5 * (self.faint(text, text) - text)


@pytest.mark.parametrize("planted", ["first", "second", "own"])
def test_what_does_not_read_a_wrong_attention_says_nothing_of_it(branched, tmp_path, planted):
    """A decoder's own attention comes after the encoder, and is right whatever the encoder is."""
    path = Path(shutil.copytree(branched.path, tmp_path / "bundle"))
    plant(path, planted)
    assert md.bisect(path, "ort-cpu").first_wrong == planted


def test_an_attention_that_no_output_shows_is_found(branched, tmp_path):
    assert md.bisect(branched, "ort-cpu").outcome == "passed"
    path = Path(shutil.copytree(branched.path, tmp_path / "bundle"))
    plant(path, "faint")
    found = md.bisect(path, "ort-cpu")
    assert (found.outcome, found.first_wrong, found.last_right) == ("failed", "faint", "last")


@pytest.fixture(scope="module")
def branched(tmp_path_factory):
    torch.manual_seed(0)
    inputs = {name: md.Example(4 * torch.randn(2, 6, 32), "B", "S") for name in ("image", "text")}
    model = md.Deployable(module=EncoderDecoder(), inputs=inputs, axes={"B": "1:2:4", "S": "1:6:8"})
    return md.export(model, tmp_path_factory.mktemp("branched") / "bundle", precision="fp16", golden=("opt",))


def test_a_runtime_that_is_wrong_where_the_graph_is_right(own_bundles, broken, monkeypatch):
    """A runtime that computes another graph than it is given, as a faulty lowering would."""
    bundle = own_bundles()
    monkeypatch.setattr("mha_deploy.validation.fault.can_import", lambda name: False)

    def faulty(model):
        copy = model.clone()
        node = next(node for node in copy.graph if node.name == ATTENTIONS[1])
        scale = node.attributes["scale"].as_float()
        node.attributes["scale"] = type(node.attributes["scale"])(
            "scale", node.attributes["scale"].type, scale * 2
        )
        return open_runner("ort-cpu", copy)

    reference = reference_for(bundle, case_to_bisect(bundle), "faulty")
    found = bisect_bundle(bundle, "faulty", faulty, lambda case: reference)
    assert found.first_node.node == ATTENTIONS[1]


def test_the_first_case_that_is_wrong_is_looked_into(bundles):
    bundle = bundles("tiny-mha")
    usual = case_to_bisect(bundle)

    @contextmanager
    def faulty(model):
        with open_runner("ort-cpu", model) as runner:
            yield SimpleNamespace(run=lambda feeds: off_elsewhere(runner, feeds))

    def off_elsewhere(runner, feeds):
        right = all(feeds[name].shape == array.shape for name, array in usual.inputs.items())
        return {name: array if right else 2 * array for name, array in runner.run(feeds).items()}

    found = bisect_bundle(bundle, "faulty", faulty, lambda case: reference_for(bundle, case, "faulty"))
    assert (found.outcome, found.case == usual.name) == ("failed", False)


@pytest.mark.slow
def test_attentions_are_judged_on_the_case_that_is_wrong(own_bundles, broken, monkeypatch):
    """As with a window that only long contexts show: the attentions of the usual case are right."""
    bundle = own_bundles()
    usual, wrong_graph = case_to_bisect(bundle), load_graph(broken(scale_off(ATTENTIONS[1])).model_path)
    monkeypatch.setattr("mha_deploy.validation.fault.can_import", lambda name: False)

    @contextmanager
    def faulty(model):
        wrong = with_outputs(wrong_graph, [value.name for value in model.graph.outputs])
        with open_runner("ort-cpu", model) as right, open_runner("ort-cpu", wrong) as other:
            yield SimpleNamespace(run=lambda feeds: (right if is_usual(feeds) else other).run(feeds))

    def is_usual(feeds):
        return all(feeds[name].shape == array.shape for name, array in usual.inputs.items())

    found = bisect_bundle(bundle, "faulty", faulty, lambda case: reference_for(bundle, case, "faulty"))
    assert found.case != usual.name
    assert (found.last_right, found.first_wrong) == (ATTENTIONS[0], ATTENTIONS[1])
    assert found.first_node.node == ATTENTIONS[1]


def test_one_of_our_own_layers(bundles, tmp_path):
    path = Path(shutil.copytree(bundles("tiny-mha").path, tmp_path / "copy"))
    model = onnx.load(path / "model.onnx")
    scale_off("attention")(model.graph)
    onnx.save(model, path / "model.onnx")
    rehash(path)
    bundle = open_bundle(path)
    reference = reference_for(bundles("tiny-mha"), case_to_bisect(bundle), "ort-cpu")
    found = bisect_bundle(bundle, "ort-cpu", partial(open_runner, "ort-cpu"), lambda case: reference)
    assert found.attentions == 0
    assert found.first_node.node == "attention"


@pytest.mark.slow
def test_values_that_a_lowered_graph_does_not_have_are_left_out(tmp_path):
    """As of an engine with the plugin, whose GEMMs read FP8: no operand of theirs can be an output."""
    bundle = md.export("tiny-gqa", tmp_path / "fp8", precision="fp8", weight_scales="tensor", golden=("opt",))
    wrong = load_graph(bundle.model_path)
    node = next(node for node in wrong.graph if node.op_type == "Attention")
    refused = []

    def open_lowered(model):
        try:
            lower(model, "plugin", linear=True)
        except md.DeployError:
            refused.append(model)
            raise
        copy = model.clone()
        attention = next(each for each in copy.graph if each.name == node.name)
        attention.attributes["scale"] = ir.AttrFloat32("scale", 0.5)
        return open_runner("ort-cpu", copy)

    reference = reference_for(bundle, case_to_bisect(bundle), "faulty")
    found = bisect_bundle(bundle, "faulty", open_lowered, lambda case: reference)
    assert refused
    assert found.first_node.node == node.name
    assert all("quantize" in name for name in found.unseen)


def test_the_command(run_cli, broken, own_bundles, program, monkeypatch):
    inside = SimpleNamespace(at=lambda case, names: program.values(names))
    monkeypatch.setattr("mha_deploy.baselines.fresh.ProgramValues", lambda bundle: inside)
    right = run_cli("bisect", own_bundles().path)
    assert right.code == 0
    assert "PASSED" in right.out
    wrong = run_cli("bisect", broken(scale_off(ATTENTIONS[1])).path, "--runtime", "ort-cpu")
    assert wrong.code == 1
    assert f"FAILED  first at {ATTENTIONS[1]}" in wrong.out
    reported = run_cli("bisect", broken(scale_off(ATTENTIONS[2]), "other").path, "--json")
    assert json.loads(reported.out)["first_wrong"] == ATTENTIONS[2]


def test_what_cannot_be_looked_into_is_refused(refused, own_bundles):
    refused("bisect", own_bundles().path, "--runtime", "eager", what="can be bisected")


def test_another_graph_of_the_model_is_bisected(own_bundles, broken, run_cli):
    other = broken(scale_off(ATTENTIONS[1])).model_path
    found = md.bisect(own_bundles(), "ort-cpu", graph=other)
    assert (found.last_right, found.first_wrong) == (ATTENTIONS[0], ATTENTIONS[1])
    assert found.first_node.node == ATTENTIONS[1]
    ir.save(in_float32(load_graph(other)), other)  # inputs and results are converted
    found = md.bisect(own_bundles(), "ort-cpu", graph=other)
    assert (found.last_right, found.first_wrong) == (ATTENTIONS[0], ATTENTIONS[1])
    assert found.first_node.node == ATTENTIONS[1]
    done = run_cli("bisect", own_bundles().path, "--graph", own_bundles().model_path, "--json")
    assert json.loads(done.out)["wrong"] is None
    with pytest.raises(md.DeployError, match="engine"):
        md.bisect(own_bundles(), "tensorrt-rtx", graph=other)


def test_another_graph_is_bisected_under_its_own_names(own_bundles, broken, run_cli, refused):
    other = broken(scale_off(ATTENTIONS[1])).model_path
    model = load_graph(other)
    inputs = {f"their_{value.name}": str(value.name) for value in model.graph.inputs}
    outputs = {f"their_{value.name}": str(value.name) for value in model.graph.outputs}
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.name = f"their_{value.name}"
    ir.save(model, other)
    found = md.bisect(own_bundles(), "ort-cpu", graph=other, names=inputs | outputs)
    assert (found.first_wrong, found.first_node.node) == (ATTENTIONS[1], ATTENTIONS[1])
    options = [part for pair in (inputs | outputs).items() for part in ("--map", "=".join(pair))]
    assert run_cli("bisect", own_bundles().path, "--graph", other, *options).code == 1
    refused("bisect", own_bundles().path, *options, what="mapped", hint="--graph")


@pytest.mark.parametrize("hidden", ["-1e9", "-inf"])
def test_numbers_that_hide_keys_do_not_hide_a_wrong_number_of_a_mask(tmp_path, run_cli, hidden):
    """Next to -1e9 or -inf, a difference in the bias that is added to it is small."""
    text = """<ir_version: 10, opset_import: ["": 23]>
    g (float[B, 2, 4, 8] x) => (float[B, 2, 4, 8] y) <float[1, 2, 4, 4] mask, float[B, 2, 4, 8] attended> {
        mask = Add(bias, hides)
        attended = Attention(x, x, x, mask)
        y = Relu(attended)
    }"""
    model = onnx.parser.parse_model(text)
    bias = np.random.default_rng(0).standard_normal((1, 2, 4, 4)).astype(np.float32)
    hides = np.triu(np.full((1, 1, 4, 4), float(hidden), np.float32), 1)
    model.graph.initializer.extend(map(numpy_helper.from_array, (bias, hides), ("bias", "hides")))
    onnx.save(model, tmp_path / "model.onnx")
    bundle = md.export(tmp_path / "model.onnx", tmp_path / "bundle", precision="fp32", golden=("opt",))
    other, bias[0, 0, 2, 1] = onnx.load(bundle.model_path), bias[0, 0, 2, 1] + 0.05
    (changed,) = (each for each in other.graph.initializer if each.name == "bias")
    changed.CopyFrom(numpy_helper.from_array(bias, "bias"))
    onnx.save(other, tmp_path / "other.onnx")
    found = md.bisect(bundle, "ort-cpu", graph=tmp_path / "other.onnx")
    assert (found.first_node.operator, found.first_node.value) == ("Add", "mask")
    assert found.first_node.constants == ("bias",)
    assert "bias" in run_cli("bisect", bundle.path, "--graph", tmp_path / "other.onnx").out


def test_a_right_value_that_has_its_size_from_a_wrong_one_does_not_clear_it(tmp_path):
    text = """<ir_version: 10, opset_import: ["": 23]>
    g (float[B, 2, 4, 8] x, float[B, 2, 4, 8] text) => (float[B, 2, 4, 8] y) {
        values = MatMul(x, weight)
        sizes = Shape(values)
        keys = Reshape(text, sizes)
        more = Relu(keys)
        attended = Attention(values, more, more)
        y = Relu(attended)
    }"""
    model = onnx.parser.parse_model(text)
    weight = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "weight"))
    onnx.save(model, tmp_path / "model.onnx")
    bundle = md.export(tmp_path / "model.onnx", tmp_path / "bundle", precision="fp32", golden=("opt",))
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight[::-1].copy(), "weight"))
    onnx.save(model, tmp_path / "other.onnx")
    found = md.bisect(bundle, "ort-cpu", graph=tmp_path / "other.onnx")

    assert found.first_node.value == "values"


def test_a_file_that_states_no_types_and_names_no_nodes_is_bisected(tmp_path, run_cli):
    text = """<ir_version: 10, opset_import: ["": 23]>
    g (float[B, 4, 16] x) => (float[B, 4, 16] y) {
        values = MatMul(x, weight)
        attended = Attention<q_num_heads = 2, kv_num_heads = 2>(x, x, values)
        y = Relu(attended)
    }"""
    model = onnx.parser.parse_model(text)
    weight = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32) / 4
    model.graph.initializer.append(numpy_helper.from_array(weight, "weight"))
    onnx.save(model, tmp_path / "model.onnx")
    bundle = md.export(tmp_path / "model.onnx", tmp_path / "bundle", golden=("opt",))
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(1.02 * weight, "weight"))
    onnx.save(model, tmp_path / "other.onnx")
    found = md.bisect(bundle, "ort-cpu", graph=tmp_path / "other.onnx")
    assert (found.first_node.node, found.first_node.value) == ("MatMul values", "values")
    assert found.first_node.constants == ("weight",)  # in another precision than the bundle's
    assert not found.unseen
    model.graph.node[0].output[0] = model.graph.node[1].input[2] = "elsewhere"
    onnx.save(model, tmp_path / "other.onnx")
    found = md.bisect(bundle, "ort-cpu", graph=tmp_path / "other.onnx")
    assert found.first_node.value == "elsewhere", "values are known by their numbers"
    assert "MatMul elsewhere" in run_cli("bisect", bundle.path, "--graph", tmp_path / "other.onnx").out


class Written(nn.Module):
    """Attention as it is written by hand, with a factor of the query, or of the scores."""

    def __init__(self, *, on_query):
        super().__init__()
        self.on_query = on_query
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (4, 16)).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = (q * 0.25) @ k.transpose(2, 3) if self.on_query else q @ k.transpose(2, 3) * 0.25
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)).relu()


@pytest.mark.slow
def test_another_export_is_bisected_by_numbers_whatever_its_values_are_called(tmp_path):
    """Neither names nor steps need be those of the bundle: what has its numbers is right."""
    module = Written(on_query=False).eval()
    example = {"x": md.Example(torch.randn(2, 8, 64), "B", "S")}
    bundle = md.export(module, tmp_path / "b", example_inputs=example, axes={"B": "1:2:4", "S": "4:8:16"})
    other = Written(on_query=True).eval()
    other.load_state_dict(module.state_dict())

    def bisected(name):
        path = tmp_path / name
        axes = {"x": {0: "B", 1: "S"}, "relu": {0: "B", 1: "S"}}
        names = {"input_names": ["x"], "output_names": ["relu"], "dynamic_axes": axes}
        torch.onnx.export(other, (torch.randn(2, 8, 64),), path, dynamo=False, **names)
        (output,) = (each.name for each in bundle.manifest.spec.outputs)
        return md.bisect(bundle, graph=path, names={"relu": output})

    assert bisected("right.onnx").wrong is None
    bias, other.o.bias = other.o.bias, None
    found = bisected("dropped.onnx")
    assert found.missing_weights == ("o.bias",)
    assert found.first_node.operator == "Relu", "the query, which is scaled, reaches it through right values"
    other.o.bias = bias
    with torch.no_grad():
        other.v.weight *= 1.5
    found = bisected("larger.onnx")
    assert found.first_node.is_start
    assert any("/v/" in each for each in (found.first_node.node, *found.first_node.others))
