"""What others made of the model is judged like the bundle's own: graphs, plans and runners of any origin."""

import json
import shutil

import numpy as np
import onnx
import pytest
from bundle_edit import copy_of
from onnx import TensorProto, helper, numpy_helper

import mha_deploy as md
from mha_deploy.bundle.folder import LEDGER, NO_ENGINES
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.graph.file import graph_from_proto
from mha_deploy.graph.weights import search_weights
from mha_deploy.runtime.cuda import find_gpu
from mha_deploy.runtime.runner import Runner, TensorInfo
from mha_deploy.runtime.tensorrt.kernels import Kernel, kernels_from_plan
from mha_deploy.status import Kind
from mha_deploy.validation.records import check_report
from mha_deploy.validation.subjects import plan_verdict

QUICK = {"probe": False, "latency": False}


@pytest.fixture(scope="module")
def bundle(bundles):
    return bundles("tiny-gqa")


@pytest.fixture
def other(bundle, tmp_path):
    """A function that writes another export of the model: its graph, changed by a function."""

    def write(change=lambda model: None, name="other.onnx"):
        model = onnx.load(bundle.model_path)
        change(model)
        onnx.save(model, tmp_path / name)
        return tmp_path / name

    return write


def rename(model, names):
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


def in_float32(model):
    """The same graph with float32 inputs and outputs, as most exporters write it."""
    rename(model, {"x": "x16", "output": "output16"})
    (x,), (y,) = model.graph.input, model.graph.output
    x.name, y.name = "x", "output"
    for value in (x, y):
        value.type.tensor_type.elem_type = TensorProto.FLOAT
    model.graph.node.insert(0, helper.make_node("Cast", ["x"], ["x16"], to=TensorProto.FLOAT16))
    model.graph.node.append(helper.make_node("Cast", ["output16"], ["output"], to=TensorProto.FLOAT))


def wrong_scale(model):
    for tensor in model.graph.initializer:
        if tensor.name.startswith("q."):
            values = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array((values * 1.03).astype(values.dtype), tensor.name))


def fixed_sizes(model):
    """For two batch elements and 16 tokens alone."""
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 2
        value.type.tensor_type.shape.dim[1].dim_value = 16


def further_output(model):
    (node,) = [node for node in model.graph.node if node.op_type == "Attention"]
    model.graph.output.append(helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT16, None))


@pytest.mark.parametrize(
    ("change", "options", "renamed", "types"),
    [
        (lambda model: None, {}, {}, []),
        (lambda model: rename(model, {"x": "hidden", "output": "y"}), {}, {"hidden": "x", "y": "output"}, []),
        (in_float32, {}, {}, ["x", "output"]),
    ],
)
def test_another_right_export_passes_under_its_own_names_and_types(
    bundle, other, change, options, renamed, types
):
    report = md.validate(bundle, graphs=[other(change)], **QUICK, **options)
    assert report.passed, report.headline
    (subject,) = report.to_dict()["subjects"]
    assert (subject["kind"], subject["name"], subject["names"]) == ("graph", "other.onnx", renamed)
    assert [each["tensor"] for each in subject["converted"]] == types
    assert subject["attention"] == []
    assert len(report.to_dict()["parity"][0]["verdicts"]) == len(bundle.manifest.golden)


@pytest.mark.parametrize("change", [wrong_scale, lambda model: (wrong_scale(model), in_float32(model))])
def test_another_export_that_is_wrong_fails_with_exit_1(bundle, other, run_cli, change):
    done = run_cli("validate", bundle.path, "--graph", other(change), "--no-probe", "--no-report", "--json")
    assert done.code == 1, done.err
    data = json.loads(done.out)
    assert check_report(data) == []
    assert data["verdict"]["outcome"] == "failed"
    assert data["verdict"]["findings"][0]["kind"] == Kind.WRONG_OUTPUTS
    (subject,) = data["subjects"]
    assert subject["missing_weights"] == ["q.weight.T", "q.bias"], "that it is another model is said"
    assert Kind.OTHER_WEIGHTS in [each["kind"] for each in data["verdict"]["findings"]]


def changed(name, at):
    """One row, or one number, of a tensor is larger."""

    def change(model):
        (tensor,) = [each for each in model.graph.initializer if each.name == name]
        values = numpy_helper.to_array(tensor).copy()
        values[at] *= values.dtype.type(1.5)
        tensor.CopyFrom(numpy_helper.from_array(values, name))

    return change


def test_weights_that_changed_in_part_are_listed(bundle, other):
    def change(model):
        changed("o.weight.T", np.s_[:, 3])(model)
        changed("q.bias", 2)(model)

    report = md.validate(bundle, graphs=[other(change)], **QUICK)
    (subject,) = report.record.subjects
    assert (subject.missing_weights, set(subject.changed_weights)) == ((), {"o.weight.T", "q.bias"})
    assert Kind.WEIGHTS_CHANGED in [each.kind for each in report.findings]


def test_a_bias_that_is_gone_is_missed_among_many():
    """In FP16, the biases of a large model have most numbers of any one between them."""
    dice = np.random.default_rng(0)
    biases = {f"bias_{i}": dice.normal(0, 0.02, 96).astype(np.float16) for i in range(150)}

    def graph_with(names):
        x, values = [f"x_{i}" for i in range(len(names))], list(names)
        nodes = [
            helper.make_node("Add", [each, name], [f"y_{each}"]) for each, name in zip(x, values, strict=True)
        ]
        ends = (
            [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [96]) for name in each]
            for each in (x, [f"y_{each}" for each in x])
        )
        held = [numpy_helper.from_array(biases[name], name) for name in values]
        graph = helper.make_graph(nodes, "g", *ends, held)
        return graph_from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]))

    names = list(biases)
    found = search_weights(graph_with(names), graph_with([name for name in names if name != "bias_7"]))
    assert (found.searched, found.missing, found.changed) == (150, ("bias_7",), ())


@pytest.mark.parametrize("op_type", ["FusedMatMul", "TransposeMatMul"])
def test_weights_of_fused_matmuls_are_searched_for(op_type):
    def graph_of(seed):
        node = helper.make_node(op_type, ["x", "weight"], ["y"], domain="com.microsoft", transB=1)
        ends = ([helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 96])] for name in "xy")
        held = np.random.default_rng(seed).standard_normal((96, 96)).astype(np.float32)
        graph = helper.make_graph([node], "g", *ends, [numpy_helper.from_array(held, "weight")])
        opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
        return graph_from_proto(helper.make_model(graph, opset_imports=opsets))

    assert search_weights(graph_of(0), graph_of(0)).missing == ()
    assert search_weights(graph_of(0), graph_of(1)).missing == ("weight",)


def in_another_layout(model):
    """The projections of keys and values as one, in float32, with the columns of the input reversed."""
    tensors = {each.name: each for each in model.graph.initializer}
    key, value = (numpy_helper.to_array(tensors[f"{name}.weight.T"]) for name in "kv")
    packed = np.concatenate([key, value], axis=1)[::-1].astype(np.float32)
    tensors["k.weight.T"].CopyFrom(numpy_helper.from_array(packed[:, :32].astype(np.float16), "k.weight.T"))
    tensors["v.weight.T"].CopyFrom(numpy_helper.from_array(packed.T.copy(), "packed"))
    nodes = [node for node in model.graph.node if "v.weight.T" in node.input]
    nodes[0].input[1] = "k.weight.T"


def test_a_wrong_graph_with_the_same_weights_in_another_layout_is_not_another_model(bundle, other):
    report = md.validate(bundle, graphs=[other(in_another_layout)], **QUICK)
    assert not report.passed
    (subject,) = report.record.subjects
    assert (subject.weights, subject.missing_weights, subject.changed_weights) == (8, (), ())
    assert not {Kind.OTHER_WEIGHTS, Kind.WEIGHTS_CHANGED} & {each.kind for each in report.findings}


def test_an_attention_without_its_causal_mask_is_named(bundles, tmp_path):
    bundle = bundles("tiny-gqa")
    model = onnx.load(bundle.model_path)
    (node,) = [node for node in model.graph.node if node.op_type == "Attention"]
    kept = [each for each in node.attribute if each.name != "is_causal"]
    assert len(kept) < len(node.attribute)
    del node.attribute[:]
    node.attribute.extend(kept)
    onnx.save(model, tmp_path / "other.onnx")
    report = md.validate(bundle, graphs=[tmp_path / "other.onnx"], **QUICK)
    assert not report.passed
    (found,) = [each for each in report.findings if each.kind is Kind.ATTENTION_CHANGED]
    assert found.names == (node.name,)
    (subject,) = report.to_dict()["subjects"]
    (difference,) = subject["attention"]
    assert (difference["attribute"], difference["bundle"], difference["subject"]) == (
        "is_causal",
        "True",
        "False",
    )


def test_the_report_of_another_graph_is_beside_that_of_the_bundle(bundle, other, run_cli, tmp_path):
    folder = copy_of(bundle, tmp_path / "bundle")
    np.savez(tmp_path / "val.npz", x=np.ones((1, 3, 64), np.float16))
    data = ("--data", tmp_path / "val.npz")
    assert run_cli("validate", folder, "--no-probe", *data).code == 0

    def own():
        files = [file for file in folder.rglob("*") if file.is_file() and "reports" not in file.parts]
        return {file: file.read_bytes() for file in files}

    before = own()
    done = run_cli("validate", folder, "--no-probe", *data, "--graph", other(wrong_scale, "a b.onnx"))
    assert done.code == 1, done.err
    assert own() == before
    page = folder / "reports" / "a-b" / "report.html"
    assert done.out.splitlines()[-1] == f"report: {page}"
    assert json.loads(page.with_suffix(".json").read_text())["verdict"]["outcome"] == "failed"
    assert {file.name for file in page.parent.iterdir()} >= {"data.jsonl", "worst"}
    exported = run_cli("export", "tiny-gqa", "-o", folder, "--overwrite", "--golden", "opt")
    assert exported.code == 0, "reports are the tool's own: " + exported.err


def test_the_budget_of_another_graph_is_that_of_the_runtime(bundle, other):
    own, theirs = (
        md.validate(bundle, **more, **QUICK).to_dict()["parity"][0]
        for more in ({"runtimes": ["ort-cpu"]}, {"graphs": [other()], "runtimes": ["ort-cpu"]})
    )
    assert [v["budget"] for v in theirs["verdicts"]] == [v["budget"] for v in own["verdicts"]]


def test_fixed_sizes_are_judged_where_they_fit_and_the_rest_is_not_covered(bundle, other):
    report = md.validate(bundle, graphs=[other(fixed_sizes)], **QUICK)
    assert report.outcome != "failed", report.headline
    verdicts = report.to_dict()["parity"][0]["verdicts"]
    assert {json.dumps(each["sizes"]) for each in verdicts} == {'{"B": 2, "S": 16}'}
    assert Kind.OUTSIDE_PROFILES in [each.kind for each in report.findings]
    assert report.record.verdict.not_verified


def test_further_outputs_are_named_and_not_judged(bundle, other):
    report = md.validate(bundle, graphs=[other(further_output)], **QUICK)
    assert report.passed
    (finding,) = [each for each in report.findings if each.kind is Kind.OUTPUTS_NOT_JUDGED]
    assert len(finding.names) == 1
    assert Kind.OUTPUTS_NOT_JUDGED in [gap.kind for gap in report.record.verdict.not_verified]


def test_names_that_do_not_fit_are_refused_until_they_are_mapped(bundles, tmp_path, run_cli, refused):
    bundle = bundles("tiny-padding")
    model = onnx.load(bundle.model_path)
    rename(model, {"x": "a", "key_lengths": "b"})
    path = tmp_path / "theirs.onnx"
    onnx.save(model, path)
    judge = ("validate", bundle.path, "--no-probe", "--no-report", "--graph", path)
    refused(*judge, what="lacks inputs", got="x, key_lengths", hint="--map a=x --map b=key_lengths")
    refused(*judge, "--map", "a=x", "--map", "nothing=key_lengths", what="is unknown", hint="a, b")
    refused(*judge, "--map", "a=output", "--map", "b=x", what="joins an input and an output")
    refused(*judge, "--map", "a", what="--map needs a name and a value")
    assert run_cli(*judge, "--map", "a=x", "--map", "b=key_lengths").code == 0
    refused("validate", bundle.path, "--map", "a=x", what="mapped")


def test_inputs_that_would_be_rounded_are_refused(bundles, tmp_path):
    bundle = bundles("tiny-gqa", "fp32")
    narrow = bundles("tiny-gqa").model_path
    with pytest.raises(DeployError, match="hold") as caught:
        md.validate(bundle, graphs=[narrow], **QUICK)
    assert "float16" in str(caught.value.got)
    assert "precision" in caught.value.hint


def test_requirements_on_fusion_fail_where_no_plan_shows_it(bundle, other):
    report = md.validate(bundle, graphs=[other()], require_fused=True, require_precision=True, **QUICK)
    kinds = {each.kind for each in report.findings if each.level == "failure"}
    assert kinds == {Kind.ENGINE_NOT_FUSED, Kind.ENGINE_PRECISION}
    assert report.outcome == "failed"


# -- runners of any kind ---------------------------------------------------------------------------


class Own(Runner):
    """A runtime of the user's own."""

    name = "mine 1.0"

    def __init__(self, bundle, change=lambda results: results):
        self._graph, self._change = md.open_runner(bundle), change
        self.inputs = {"tokens": TensorInfo(dtype=np.dtype(np.float32), dims=(None, None, 64))}
        self.outputs = {}
        self.closed = False

    def _run(self, feeds):
        (x,) = feeds.values()
        return self._change(self._graph.run({"x": x.astype(np.float16)}))

    def close(self):
        self._graph.close()
        self.closed = True


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (lambda results: {"y": results["output"].astype(np.float64)}, "passed"),
        (lambda results: {"y": results["output"] * np.float16(1.05)}, "failed"),
        (lambda results: {"y": results["output"][:, :1]}, "failed"),
        (lambda results: {"y": results["output"].tolist()}, "failed"),
        (lambda results: {}, "failed"),
        (lambda results: 1 / 0, "failed"),
    ],
)
def test_a_runner_of_ones_own_is_judged_and_stays_open(bundle, change, outcome):
    with Own(bundle, change) as runner:
        report = md.validate(bundle, runners=[runner], **QUICK)
        assert not runner.closed
    assert report.outcome == outcome, report.headline
    (subject,) = report.to_dict()["subjects"]
    assert (subject["kind"], subject["name"], subject["sha256"]) == ("runner", "mine 1.0", None)


@pytest.mark.parametrize("answers", [0, 1])
def test_outputs_that_were_not_computed_are_not_called_wrong(bundle, answers):
    """As of a graph with sizes in it, which runs at one size only."""
    calls = iter(range(100))

    def change(results):
        if next(calls) >= answers:
            raise DeployError("One size only.", hint="none")
        return {"y": results["output"] * np.float16(1.05)}

    with Own(bundle, change) as runner:
        report = md.validate(bundle, runners=[runner], **QUICK)
    assert report.outcome == "failed"
    found = [each for each in report.findings if each.kind is Kind.WRONG_OUTPUTS]
    failed, absent = (sum(each.numbers.get(key, 0) for each in found) for key in ("failed", "not_run"))
    assert failed - absent == answers
    assert absent > 0
    assert any("wrong" in each.text for each in found) == bool(answers)


def test_a_polygraphy_runner_is_judged(bundle):
    onnxrt = pytest.importorskip("polygraphy.backend.onnxrt")
    load = onnxrt.SessionFromOnnx(str(bundle.model_path), providers=["cpu"])
    report = md.validate(bundle, runners=[onnxrt.OnnxrtRunner(load)], **QUICK)
    assert report.passed, report.headline


# -- plans -----------------------------------------------------------------------------------------


def test_a_file_that_is_no_plan_and_a_plan_without_a_gpu_are_refused(bundle, tmp_path, refused):
    wrong, missing = tmp_path / "wrong.engine", tmp_path / "missing.engine"
    wrong.write_bytes(b"\x08\x0a\x12\x07pytorch")
    options = ("--no-probe", "--no-report", "--engine-file")
    refused("validate", bundle.path, *options, wrong, what="plan", hint="--graph")
    refused("validate", bundle.path, *options, missing, what="cannot be read")
    if find_gpu() is None:
        pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
        (tmp_path / "rtx.engine").write_bytes(b"vtrt plan")
        with pytest.raises(BackendUnavailable, match="cannot run here"):
            md.validate(bundle, engine_files=[tmp_path / "rtx.engine"], **QUICK)


def test_a_foreign_plan_among_the_engines_is_named_and_skipped(bundle, tmp_path, run_cli):
    folder = copy_of(bundle, tmp_path / "bundle")
    shutil.rmtree(folder / "engines", ignore_errors=True)
    (folder / LEDGER).write_bytes(NO_ENGINES)
    (folder / "engines").mkdir()
    (folder / "engines" / "theirs.engine").write_bytes(b"ftrt by trtexec")
    report = md.validate(folder, **QUICK)
    (finding,) = [each for each in report.findings if each.kind is Kind.FOREIGN_ENGINE]
    assert finding.place.engine == "theirs"
    assert report.outcome == "not verified", "an engine that was not run"
    assert run_cli("inspect", folder).code == 0


def test_what_a_plan_shows_of_fusion_and_precision(bundle):
    fused = Kernel(name="__mha", layer_type="kgen", tactic="_gemm_mha_v2_0x1", source="inspector")
    apart = Kernel(name="softmax", layer_type="SoftMax", tactic="softmax_kernel", source="inspector")
    assert fused.is_fused_attention
    assert apart.is_softmax
    decomposed = plan_verdict({"inspector": [apart]}, bundle)
    assert (decomposed.fusion, decomposed.softmax_kernels) == ("decomposed", 1)
    assert plan_verdict({}, bundle).fusion == "unknown"
    both = plan_verdict({"inspector": [fused, apart]}, bundle)
    assert (both.fusion, both.fused_kernels) == ("unknown", 1)
    one = plan_verdict({"inspector": [fused]}, bundle)
    assert one.fusion == "fused"
    assert one.precision != "verified", "no matmul was reported"
    two = plan_verdict({"inspector": [fused]}, bundle, profiles=2)
    assert two.fusion == "unknown", "nothing is known of the second profile"
    assert kernels_from_plan(b"ftrt") == []
