"""The public API: what `import mha_deploy as md` offers, and that it is loaded only when it is used."""

import doctest
import importlib
import inspect
import json
import pydoc
import shutil
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import click
import numpy as np
import onnx
import onnx_ir as ir
import own_models
import pytest
import torch
from torch import nn

import mha_deploy as md
from mha_deploy import api, options
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.cli import verbs
from mha_deploy.errors import BackendUnavailable, BundleError, ExportError, SpecError
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.model.spec import Axis


class Small(nn.Module):
    """An attention of two heads, as somebody writes it in a notebook."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        weights = (q @ k.transpose(-2, -1) / 8**0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(-2)


EXAMPLES = {"x": md.Example(torch.randn(2, 5, 16), "B", "S")}
AXES = {"B": "1:2:4", "S": (1, 8, 16)}


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory):
    """The bundle of a module that was exported as an object, and the module."""
    module = Small().train()
    out = tmp_path_factory.mktemp("in-memory") / "bundle"
    return md.export(module, out, example_inputs=EXAMPLES, axes=AXES, golden=("opt", "min")), module


@pytest.fixture(scope="module")
def tiny(bundles):
    return bundles("tiny-mha")


# -- what is there -------------------------------------------------------------------------------


def test_every_public_name_is_there_and_documented():
    assert set(api.__all__) < set(md.__all__)
    assert dir(md) == sorted(md.__all__)
    for name in api.__all__:
        assert getattr(api, name).__doc__, name
        assert callable(getattr(md, name)), name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = md.nonsense


def test_a_verb_is_its_function_whatever_was_imported():
    for package in ("analysis", "exporter", "validation"):
        importlib.import_module(f"mha_deploy.{package}")
    for name in ("analyze", "export", "validate"):
        assert inspect.isfunction(getattr(md, name))
        assert name in pydoc.render_doc(getattr(md, name), renderer=pydoc.plaintext)


RECORDS = [
    (api.export, options.ExportOptions),
    (api.build_engine, options.EngineOptions),
    (api.validate, options.ValidateOptions),
    (api.bench, options.BenchOptions),
    (api.package, options.PackageOptions),
    (api.compare, options.Limits),
]


@pytest.mark.parametrize(("function", "record"), RECORDS)
def test_a_record_of_options_is_the_help_of_its_function_and_of_its_verb(function, record):
    """The function takes its fields and names it; `help` of the record lists them; the verb has them all."""
    keywords = [
        each for each in inspect.signature(function).parameters.values() if each.kind is each.VAR_KEYWORD
    ]
    assert keywords
    assert record.__name__ in function.__doc__
    chosen = {each.name for each in fields(record) if each.metadata}  # others are no options
    shown = pydoc.render_doc(record, renderer=pydoc.plaintext)
    assert all(f"{name}: " in shown for name in chosen)
    verb = getattr(verbs, function.__name__)
    assert chosen <= {each.name for each in verb.get_params(click.Context(verb))}


def test_options_that_a_function_does_not_have_are_refused(tmp_path):
    for call in (md.export, md.deploy):
        with pytest.raises(TypeError, match="nonsense"):
            call("tiny-mha", tmp_path / "x", nonsense=1)
        with pytest.raises(TypeError, match="did you mean 'precision'"):
            call("tiny-mha", tmp_path / "x", precison="fp16")
        with pytest.raises(TypeError, match="configure"):
            call("tiny-mha", tmp_path / "x", trust_code=True)


WRONG_VALUES = [
    (lambda b, out: md.check(b, target="tensorrt", version=8.6), 'version="8.6"'),
    (lambda b, out: md.check(b, sm=90), 'sm="90"'),
    (lambda b, out: md.export("tiny-mha", out, precision=None), 'precision="auto"'),
    (lambda b, out: md.export("tiny-mha", out, precision=16), 'precision="auto"'),
    (lambda b, out: md.export("tiny-mha", out, precision="int8", max_loss="x"), "max_loss="),
    (lambda b, out: md.export("tiny-mha", out, max_loss=float("nan")), "max_loss="),
    (lambda b, out: md.export("tiny-mha", out, seed="a"), "seed=0"),
    (lambda b, out: md.export("tiny-mha", out, seed=-1), "from 0 to"),
    (lambda b, out: md.export("tiny-mha", out, weights=5), "weights="),
    (lambda b, out: md.export("tiny-mha", out, axes={5: 5}), "axes="),
    (lambda b, out: md.export("tiny-mha", out, golden=[5]), "golden="),
    (lambda b, out: md.deploy("tiny-mha", out, backend=5), "backend="),
    (lambda b, out: md.deploy("tiny-mha", out, engine="no"), "engine=False"),
    (lambda b, out: md.prune("tiny-mha", out, heads=3, seed="a"), "seed=0"),
    (lambda b, out: md.build_engine(b, profiles=5), "profiles="),
    (lambda b, out: md.build_engine(b, profiles=[5]), "profiles="),
    (lambda b, out: md.build_engine(b, repeat="2"), "repeat=2"),
    (lambda b, out: md.validate(b, fresh="x"), "fresh="),
    (lambda b, out: md.validate(b, fresh=-1), "from 0 to"),
    (lambda b, out: md.validate(b, fresh=True), "fresh="),
    (lambda b, out: md.validate(b, samples=10**5000), "from 100 to"),
    (lambda b, out: md.validate(b, runtimes=[5]), "runtimes="),
    (lambda b, out: md.validate(b, require_run="yes"), "require_run=True"),
    (lambda b, out: md.validate(b, runners=5), "runners="),
    (lambda b, out: md.validate(b, requirements=5), "TOML"),
    (lambda b, out: md.validate(b, data=5), "samples"),
    (lambda b, out: md.validate(b, data=[{}], metric=5), "function"),
    (lambda b, out: md.package(b, out, instances="x"), "instances="),
    (lambda b, out: md.compare(b, b, error="x"), "error="),
    (lambda b, out: md.configure(time_limit="x"), "time_limit="),
    (lambda b, out: md.matrix({**PLAN, "options": {"a": {"workspace_mib": "x"}}}, out), "workspace_mib="),
]
PLAN = {"models": ["tiny-mha"], "runtimes": [{"name": "rtx", "backend": "tensorrt-rtx"}]}


@pytest.mark.parametrize(("call", "hint"), WRONG_VALUES)
def test_a_value_of_the_wrong_type_or_size_is_an_error_that_says_what_is_right(call, hint, tiny, tmp_path):
    with pytest.raises(md.DeployError) as caught:
        call(tiny, tmp_path / "out")
    assert hint in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_numbers_of_numpy_paths_and_single_items_are_what_they_stand_for(tmp_path):
    given = {"seed": np.int64(3), "golden_gflop": np.float32(1), "overwrite": np.bool_(True), "golden": "opt"}
    read = options.read_options(options.ExportOptions, {**given, "weights": "w.pt", "max_loss": 1})
    assert (read.seed, read.golden_gflop, read.overwrite, read.golden) == (3, 1.0, True, ("opt",))
    assert (type(read.seed), type(read.max_loss)) == (int, float)
    assert read.weights == Path("w.pt")


def test_what_is_returned_prints_as_a_line(tiny):
    results = (
        md.compare(tiny.path, tiny.path),
        md.check_parity(tiny, tiny.model_path),
        md.analyze("bert-base"),
        md.analyze(tiny),
        *md.check(tiny),
    )
    for each in (tiny, md.load_model("bert-base"), md.load_model(own_models.one_layer()), *results):
        assert len(repr(each)) < 300
        assert type(each).__name__ in repr(each)
    assert str(tiny.path) in repr(tiny)


def test_an_axis_with_two_sizes_is_named_where_the_run_fails(bundles):
    with md.open_runner(bundles("tiny-padding"), "ort-cpu") as runner:
        inputs = {name: np.ones([{"B": 2, "S": 8}.get(d, d) for d in each.dims], each.dtype)
                  for name, each in runner.inputs.items()}  # fmt: skip
        assert runner.run(inputs)["output"].shape[:2] == (2, 8)
        with pytest.raises(md.DeployError, match="Axis B has two sizes"):
            runner.run({**inputs, "key_lengths": inputs["key_lengths"].repeat(2)[:3]})
        for lengths in ([8, 9], [-1, 8]):
            with pytest.raises(md.DeployError) as caught:
                runner.run({**inputs, "key_lengths": np.array(lengths, inputs["key_lengths"].dtype)})
            assert "0 to 8" in caught.value.hint


# -- models and export ---------------------------------------------------------------------------


def test_a_catalog_layer_is_loaded_by_name_and_by_path(tmp_path):
    model = md.load_model("tiny-dynamic", axes={"S": "1:4:8"}, projections="packed", cache="preallocated")
    found = (model.name, model.source.cache, model.source.projections)
    assert found == ("tiny-dynamic", "preallocated", "packed")
    own = tmp_path / "own.toml"
    own.write_text(
        "Hq = 2\nE = 32\n[axes]\nB = {min = 1, opt = 2, max = 4}\nS = {min = 1, opt = 8, max = 16}\n"
    )
    assert md.load_model(own).source.E == 32
    assert md.load_model(md.load_model(str(own)), axes={"B": (1, 1, 1)}).source.axes["B"].max == 1


def test_own_models_are_loaded_as_factory_deployable_and_module():
    factory = md.load_model(f"{own_models.__file__}:one_layer", axes={"S": "1:2:3"})
    assert (factory.name, factory.axes["S"]) == ("one-layer", Axis(min=1, opt=2, max=3))
    assert md.load_model(own_models.one_layer()).name == "Encoder"
    module = md.load_model(Small(), example_inputs={"x": torch.zeros(1, 3, 16)}, name="mine")
    assert (module.name, module.source.inputs["x"].axes) == ("mine", ())


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("bert-bas", {}, "did you mean 'bert-base'"),
        (Small(), {}, "needs example inputs"),
        (Small(), {"example_inputs": (torch.zeros(1, 3, 16),)}, "not a dictionary"),
        (7, {}, "This is not a model"),
        ("a.py:b", {"cache": "preallocated"}, "Only a catalog layer"),
        ("tiny-mha", {"example_inputs": EXAMPLES}, "Only an nn.Module"),
    ],
)
def test_what_is_no_model_is_refused(model, options, words):
    with pytest.raises(md.DeployError, match=words):
        md.load_model(model, **options)


@pytest.mark.parametrize("given", [None, 3])
def test_what_is_no_path_is_refused(given):
    """As what another function returned for nothing: every function says what it needs."""
    needed = {}
    for name in api.__all__:
        parameters = list(inspect.signature(getattr(md, name)).parameters.values())
        required = [each.name for each in parameters if each.default is each.empty and each.kind <= 1]
        if required and not isinstance(getattr(md, name), type):
            needed[name] = dict.fromkeys(required[1:], "elsewhere")
    assert {"inspect", "validate", "build_engine", "package", "bisect", "check", "fuse_file"} <= set(needed)
    for name, others in needed.items():
        with pytest.raises(md.DeployError):
            getattr(md, name)(given, *others.values())


def test_a_factory_that_is_not_in_its_file_is_refused_before_anything_is_imported(tmp_path):
    file = tmp_path / "models.py"
    file.write_text("import sys\nsys.exit()\ndef encoder():\n    return 1\n")
    with pytest.raises(ExportError) as refused:
        md.load_model(f"{file}:encodr")
    assert "'encoder'" in refused.value.hint
    with pytest.raises(ExportError, match="no such file"):
        md.load_model(f"{tmp_path / 'absent.py'}:encoder")
    assert md.load_model(f"{file}:encoder").name == "encoder"
    file.write_text("from elsewhere import *\n")
    assert md.load_model(f"{file}:encodr").name == "encodr", "it may be there"


@pytest.mark.slow
def test_the_heads_of_a_module_are_compared(in_memory):
    bundle, _ = in_memory
    found = md.compare_heads(bundle)
    assert found.matrix.shape == (2, 2)
    assert found.attention == bundle.manifest.attention[0]["name"]
    with pytest.raises(md.DeployError, match="no such attention"):
        md.compare_heads(bundle, attention="nothing")


@pytest.mark.slow
def test_the_heads_of_a_module_are_compared_without_a_bundle(in_memory):
    found = md.compare_heads(in_memory[1], example_inputs=EXAMPLES, axes=AXES)
    assert np.allclose(found.matrix, md.compare_heads(in_memory[0]).matrix, atol=5e-3)


def test_a_module_in_memory_is_exported_and_not_changed(in_memory):
    bundle, module = in_memory
    assert module.training
    assert module.qkv.weight.dtype == torch.float32
    assert module.qkv.weight.requires_grad
    spec = bundle.manifest.spec
    assert (spec.name, spec.factory, spec.attention_count) == ("Small", "", 1)
    assert md.open_bundle(str(bundle.path)).manifest == bundle.manifest


def test_a_module_in_memory_is_validated_but_not_made_again(in_memory):
    bundle, _ = in_memory
    report = md.validate(bundle.path, latency=False)
    assert report.passed, report.headline
    for asked in ({"fresh": 1}, {"data": [{"x": np.ones((1, 4, 16), np.float32)}]}, {"sweep": True}):
        steps = []
        with pytest.raises(BundleError) as refused:
            md.validate(bundle, on_step=lambda name, *_, steps=steps: steps.append(name), **asked)
        assert "file.py:factory" in refused.value.hint
        assert not any(name.startswith("ort-cpu") for name in steps), "refused after the work"


def test_a_module_that_cannot_be_copied_is_refused(tmp_path):
    module = Small()
    module.scale = module.qkv.weight * 2  # computed, and so without a copy
    with pytest.raises(ExportError, match="cannot be copied"):
        md.export(module, tmp_path / "out", example_inputs=EXAMPLES, axes=AXES)
    assert list(tmp_path.iterdir()) == []


def test_what_can_be_refused_at_once_is_refused_before_anything_is_computed(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BundleError):
        md.export("tiny-mha", tmp_path, on_step=lambda *given: pytest.fail("began"))
    with pytest.raises(md.DeployError, match="fp12"):
        md.export("tiny-mha", tmp_path / "new", precision="fp12", on_step=lambda *given: pytest.fail("began"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# -- graphs --------------------------------------------------------------------------------------


UNFUSED = """
<ir_version: 10, opset_import: ["" : 18]>
g (float[B,4,S,8] q, float[B,4,S,8] k, float[B,4,S,8] v) => (float[B,4,S,8] y) {
   kt = Transpose <perm = [0, 1, 3, 2]> (k)
   s = MatMul (q, kt)
   p = Softmax (s)
   y = MatMul (p, v)
}"""


def test_fusion_gives_the_type_that_it_got():
    unfused = onnx.parser.parse_model(UNFUSED)
    before = unfused.SerializeToString()
    proto, report = md.fuse(unfused)
    assert isinstance(proto, onnx.ModelProto)
    assert [node.op_type for node in proto.graph.node].count("Attention") == 1
    assert (len(report.fused), report.complete) == (1, True)
    assert unfused.SerializeToString() == before
    graph, _ = md.fuse(ir.from_proto(unfused))
    assert isinstance(graph, ir.Model)
    assert len(attention_nodes(graph)) == 1
    with pytest.raises(md.DeployError, match="not an ONNX model"):
        md.fuse("model.onnx")


@pytest.mark.parametrize("kind", ["bundle", "folder", "file"])
def test_eligibility_is_checked(tiny, kind):
    given = {"bundle": tiny, "folder": str(tiny.path), "file": tiny.model_path}[kind]
    (old,) = md.check(given, target="tensorrt", version="10.3")
    assert not old.supported
    assert old.supported_after_lowering
    assert len(md.check(given, "tensorrt-rtx", sm="89,120")) == 2


def test_a_bundle_is_inspected_as_its_folder_is(tiny):
    assert md.inspect(tiny, verify=True) == md.inspect(str(tiny.path), verify=True)


# -- engines and runners -------------------------------------------------------------------------


def test_an_engine_that_is_not_there_is_an_error(tiny, tmp_path):
    with pytest.raises(BundleError, match="no engine"):
        md.open_engine(tmp_path / "none.engine")
    with pytest.raises(BundleError, match="no engine"):
        md.open_runner(str(tmp_path / "none.engine"))
    with pytest.raises(md.DeployError, match="exported for B"):
        md.build_engine(tiny, profiles=[{"B": "1:2:4000"}])
    for one in ("B=1:2:4000", {"B": "1:2:4000"}):
        with pytest.raises(md.DeployError, match="exported for B"):
            md.build_engine(tiny, profiles=one)


def test_one_string_is_a_list_of_one(tiny, tmp_path):
    """It is not read letter by letter."""
    out = tmp_path / "out"
    for call in (
        lambda: md.export("tiny-mha", out, golden="strange"),
        lambda: md.prune("tiny-mha", out, heads=3, golden="strange"),
        lambda: md.validate(tiny, runtimes="strange"),
        lambda: md.package(tiny, out, runtimes="strange"),
    ):
        with pytest.raises(md.DeployError) as refused:
            call()
        assert "strange" in str(refused.value)


def test_a_string_is_a_path(tiny):
    record = options.ValidateOptions
    one = options.read_options(record, {"source": "m.onnx", "resume": "r.jsonl", "graphs": "g.onnx"})
    assert (one.source, one.resume) == (Path("m.onnx"), Path("r.jsonl"))
    assert one.graphs == (Path("g.onnx"),)
    several = options.read_options(record, {"graphs": ["a.onnx", Path("b.onnx")], "engine_files": Path("c")})
    assert several.graphs == (Path("a.onnx"), Path("b.onnx"))
    assert several.engine_files == (Path("c"),)
    with pytest.raises(md.DeployError, match=r"model\.onnx"):
        md.validate(tiny.path, graphs="no/model.onnx")


@pytest.mark.skipif(find_spec("tensorrt_rtx") is None, reason="TensorRT-RTX is not installed")
def test_an_engine_is_built_and_opened(tiny, tmp_path):
    folder = shutil.copytree(tiny.path, tmp_path / "bundle")
    steps = []
    engine = md.build_engine(
        str(folder),
        backend="tensorrt-rtx",
        name="mine",
        targets="89",
        profiles=[{"B": (1, 2, 2)}],
        on_step=lambda *step: steps.append(step),
    )
    assert md.open_engine(engine.path).manifest.engine_sha256 == engine.manifest.engine_sha256
    assert [each.path for each in md.inspect(engine).engines] == [engine.path]
    assert steps
    assert engine.manifest.ranges[0]["B"] == Axis(min=1, opt=2, max=2)
    with pytest.raises(md.DeployError, match="cannot be chosen"):
        md.open_runner(engine, runtime="ort-cpu")


@pytest.mark.parametrize("kind", ["bundle", "folder", "file", "proto", "graph"])
def test_a_runner_is_opened_on_whatever_can_run(tiny, kind):
    given = {
        "bundle": lambda: tiny,
        "folder": lambda: str(tiny.path),
        "file": lambda: tiny.model_path,
        "proto": lambda: onnx.load(tiny.model_path),
        "graph": lambda: ir.load(tiny.model_path),
    }[kind]()
    case = next(iter(golden_cases(tiny)))
    runtime = "onnx-reference" if kind == "graph" else None
    with md.open_runner(given, runtime) as runner:
        outputs = runner.run(case.inputs)
        with pytest.raises(md.DeployError, match="its time would say nothing"):
            runner.time(case.inputs)
    np.testing.assert_allclose(outputs["output"], case.oracle["output"], atol=0.02)


@pytest.mark.parametrize("isolated", [True, False], ids=["child", "in-process"])
def test_a_size_beyond_its_axis_is_refused_with_the_range(tiny, isolated, monkeypatch):
    monkeypatch.setattr("mha_deploy.runtime.child.isolation.enabled", isolated)
    limit = tiny.manifest.spec.axes["S"].max
    with md.open_runner(tiny, "onnx-reference") as runner:
        ((name, each),) = runner.inputs.items()
        feeds = {name: np.ones([{"B": 1, "S": limit + 1}.get(d, d) for d in each.dims], each.dtype)}
        with pytest.raises(md.DeployError) as caught:
            runner.run(feeds)
        assert "Axis S" in caught.value.what
        assert f"S={limit + 1}" in caught.value.got
        assert str(limit) in caught.value.hint
        fitting = {name: feeds[name][:, :limit]}
        assert runner.run(fitting)
        for wrong in ([*fitting.values()], None, {**fitting, "strange": 1}, {name: [[1.0], [2.0, 3.0]]}):
            with pytest.raises(md.DeployError) as caught:
                runner.run(wrong)
            assert name in f"{caught.value.what} {caught.value.hint}"


def test_what_cannot_run_is_refused(tiny, tmp_path):
    with pytest.raises(md.DeployError, match="This cannot be run"):
        md.open_runner(7)
    with pytest.raises(BundleError, match="no bundle"):
        md.open_runner(tmp_path)
    with pytest.raises(md.DeployError, match="No such runtime"):
        md.open_runner(tiny, runtime="nonsense")
    with pytest.raises(BackendUnavailable, match="no engine of that name"):
        md.open_runner(tiny, runtime="tensorrt")


# -- Polygraphy ----------------------------------------------------------------------------------


@pytest.fixture
def polygraphy_runner(bundles):
    runners = pytest.importorskip("polygraphy.backend.onnxrt")
    bundle = bundles("tiny-mha", "fp32")
    return bundle, runners.OnnxrtRunner(runners.SessionFromOnnx(str(bundle.model_path)), name="theirs")


def test_a_polygraphy_runner_is_judged_like_ours(polygraphy_runner):
    bundle, theirs = polygraphy_runner
    with md.open_runner(theirs) as runner:
        assert runner.name == "polygraphy theirs"
        assert runner.inputs["x"].dtype == np.float32
        assert runner.inputs["x"].dims == ("B", "S", 64)
        with pytest.raises(md.DeployError, match="does not measure device time"):
            runner.time({})
        report = md.check_parity(bundle, runner)
        assert report.passed
        assert set(runner.outputs) == {"output"}
        assert theirs.is_active  # given open, left open
    assert not theirs.is_active
    assert [verdict.share < 1 for verdict in report.verdicts] == [True] * 4


def test_a_polygraphy_runner_of_other_weights_fails(polygraphy_runner, tmp_path):
    bundle, _ = polygraphy_runner
    runners = pytest.importorskip("polygraphy.backend.onnxrt")
    changed = ir.load(bundle.model_path)
    weight = max(changed.graph.initializers.values(), key=lambda value: value.const_value.nbytes)
    weight.const_value = ir.tensor(weight.const_value.numpy() * 1.1)
    ir.save(changed, tmp_path / "changed.onnx")
    theirs = runners.OnnxrtRunner(runners.SessionFromOnnx(str(tmp_path / "changed.onnx")))
    assert not md.check_parity(bundle, theirs).passed
    assert not theirs.is_active


def test_a_polygraphy_runner_that_is_active_stays_so(polygraphy_runner):
    bundle, theirs = polygraphy_runner
    with theirs:
        assert md.check_parity(bundle.path, theirs).passed
        assert theirs.is_active


def test_errors_of_a_polygraphy_runner_are_ours(polygraphy_runner, tmp_path):
    _, theirs = polygraphy_runner
    runners = pytest.importorskip("polygraphy.backend.onnxrt")
    with md.open_runner(theirs) as runner, pytest.raises(md.DeployError, match="wrong shape"):
        runner.run({"x": np.zeros((1, 3, 5), np.float32)})
    broken = runners.OnnxrtRunner(runners.SessionFromOnnx(str(tmp_path / "none.onnx")))
    with pytest.raises(md.DeployError, match="cannot be activated"):
        md.open_runner(broken)


# -- validation ----------------------------------------------------------------------------------


def test_a_report_is_text_data_and_a_page(tiny, tmp_path):
    steps = []
    report = md.validate(tiny, latency=False, on_step=lambda *step: steps.append(step))
    runtimes = {run.runtime for run in report.record.parity}
    assert report.record.runtimes == {name: name.rpartition(" ")[0] for name in runtimes}
    assert report.passed
    assert "outputs within budget" in report.headline
    assert report.headline in repr(report)
    data = json.loads(report.to_json())
    assert data == json.loads(json.dumps(report.to_dict()))
    assert data["verdict"]["headline"] == report.headline
    page = report.save_html(tmp_path / "pages" / "report.html")
    assert page.read_text().startswith("<!doctype html>")
    shown = report._repr_html_()
    assert shown.startswith("<iframe srcdoc=")
    assert "<!doctype html>" not in shown  # escaped
    assert steps


def test_a_runtime_that_is_not_there_is_an_error(tiny):
    with pytest.raises(md.DeployError, match="No such runtime"):
        md.validate(tiny, runtimes=["nonsense"])
    with pytest.raises(SpecError):
        md.load_model("tiny-mha", axes={"S": "1:2"})


# -- the examples in the docstrings --------------------------------------------------------------


def test_the_docstrings_do_what_they_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tests = {test.name: test for test in doctest.DocTestFinder().find(api, "api", globs={"md": md})}
    first = tests.pop("api.export")  # writes the bundle of all others
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    reported = []
    for test in (first, *tests.values()):
        runner.run(test, out=reported.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(reported)
    without = [name for name in api.__all__ if name[0].islower() and not _examples(tests, first, name)]
    assert without == []


def _examples(tests, first, name):
    return (first if name == "export" else tests[f"api.{name}"]).examples


def test_a_model_that_cannot_be_analyzed_is_named():
    with pytest.raises(md.DeployError) as caught:
        md.analyze(md.load_model("file.py:my_encoder"))
    assert caught.value.got == "file.py"
