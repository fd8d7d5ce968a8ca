"""`deploy` goes from model to verdict, and `check` and `build-engine` are its last steps on their own."""

import importlib.util
import json
import re
from pathlib import Path

import onnx
import pytest
from bundle_edit import copy_of, edit_manifest

import mha_deploy as md
from mha_deploy.bundle.folder import open_bundle

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt_rtx is not installed"
)


@pytest.fixture
def folder(bundles, tmp_path):
    """A bundle of its own, to build in."""
    return copy_of(bundles("tiny-gqa"), tmp_path / "bundle")


# -- deploy --------------------------------------------------------------------------------------


def test_deploy_exports_and_validates(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mha-deploy.toml").write_text('[deploy]\nbackend = "tensorrt"\n')  # for other calls
    done = run_cli("deploy", "tiny-mqa", "--no-engine", "--golden", "min", "--golden", "opt")
    assert done.code == 0, done.err
    assert open_bundle(tmp_path / "bundles" / "tiny-mqa-fp16").manifest.spec.name == "tiny-mqa"
    assert re.match("PASSED|NOT VERIFIED", done.out), "the verdict comes first"
    assert done.out.index("1/1 attention, one ONNX Attention node") < done.out.index("2 outputs of golden")
    assert "deploy tiny-mqa: 1/8 weights" in done.err
    assert "deploy tiny-mqa: ort-c" in done.err
    assert "deploy tiny-mqa:" not in done.out
    assert "engine" not in done.out.replace("no engine", "")
    assert (tmp_path / "bundles" / "tiny-mqa-fp16" / "report.html").is_file()


@pytest.mark.parametrize(
    "options",
    [("--backend", "tensorrt"), ("--attention", "plugin"), ("--sm", "89"), ("--allow-decomposed",)],
)
def test_options_of_an_engine_that_is_not_built_are_refused(refused, tmp_path, options):
    command = ("deploy", "tiny-mqa", "-o", tmp_path / "b", "--no-engine", *options)
    refused(*command, what="engine", got=options[0], hint="--no-engine")
    assert not (tmp_path / "b").exists()


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("model", "cache", "folder"),
    [
        ("tiny-gqa", "dynamic", "tiny-gqa-dynamic-fp16"),
        ("tiny-gqa", "none", "tiny-gqa-fp16"),
        ("tiny-preallocated", "preallocated", "tiny-preallocated-fp16"),
        ("tiny-preallocated", "none", "tiny-preallocated-uncached-fp16"),
    ],
)
def test_a_layer_with_another_cache_has_another_default_folder(
    run_cli, tmp_path, monkeypatch, model, cache, folder
):
    monkeypatch.chdir(tmp_path)
    done = run_cli("deploy", model, "--cache", cache, "--axis", "S=1:4:9", "--no-engine")
    assert done.code == 0, done.err
    assert [path.name for path in (tmp_path / "bundles").iterdir()] == [folder]
    assert open_bundle(tmp_path / "bundles" / folder).manifest.spec.cache == cache


@pytest.mark.slow
def test_deploy_prints_one_json_document(run_cli, tmp_path):
    target = tmp_path / "b"
    options = ("--precision", "fp32", "--axis", "S=1:16:48", "--no-engine", "--json")
    done = run_cli("deploy", "tiny-padding", "-o", target, *options)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert (result["bundle"], result["engine"]) == (str(target), None)
    validation = result["validation"]
    assert validation["verdict"]["outcome"] == "passed"
    assert validation["model"]["precision"] == open_bundle(target).manifest.precision.name == "fp32"
    assert max(row["sizes"]["S"] for row in validation["parity"][0]["verdicts"]) == 48


@needs_rtx
def test_deploy_builds_a_fused_engine(run_cli, tmp_path):
    target = tmp_path / "b"
    options = ("--backend", "tensorrt-rtx", "--golden", "opt", "--json")
    done = run_cli("deploy", "tiny-gqa", "-o", target, *options)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    engine, (judged,) = result["engine"], result["validation"]["engines"]
    assert (judged["name"], judged["fused"], judged["ran"]) == ("tensorrt-rtx", [1, 1], False)
    assert judged["why_not"]
    assert [node["status"] for node in engine["verdict"]["nodes"]] == ["fused"]
    assert engine["backend"] == "tensorrt-rtx"
    assert (target / "engines" / "tensorrt-rtx.engine").stat().st_size == engine["engine_bytes"]
    open_bundle(target)  # an engine beside the bundle does not change it


@needs_rtx
def test_deploy_reports_the_graph_where_no_engine_can_be_built(run_cli, bundles, tmp_path):
    """There is no fused kernel for float32, and --allow-decomposed is missing: a verdict, with its report."""
    target, source = tmp_path / "b", bundles("tiny-gqa", "fp32").model_path
    axes = ("--axis", "B=1:2:4", "--axis", "S=1:16:64")
    done = run_cli("deploy", source, "-o", target, "--precision", "fp32", *axes)
    assert done.code == 1
    assert done.out.startswith("FAILED"), "the verdict comes first"
    assert "--allow-decomposed" in done.out
    (known,) = md.check(target, "tensorrt-rtx")
    assert known.findings[0].message in done.out, "the reason is that of the rules"
    assert "outputs of golden cases" in done.out
    report = json.loads((target / "report.json").read_text())
    verdict = report["verdict"]
    kinds = [each["kind"] for each in verdict["findings"] if each["level"] == "failure"]
    assert (verdict["outcome"], kinds) == ("failed", ["engine not built"])
    assert [each["outcome"] for run in report["parity"] for each in run["verdicts"]].count("passed") > 2
    assert "--allow-decomposed" in (target / "report.html").read_text()


REFUSED = """
<ir_version: 10, opset_import: ["" : 18]>
g (float[B,4,S,8] q, float[B,4,S,8] k, float[B,4,S,8] v) => (float[B,4,S,8] y)
<int64[2] axes = {0, 1}, float zero = {0.0}> {
   kt = Transpose <perm = [0, 1, 3, 2]> (k)
   s = MatMul (q, kt)
   p = Softmax <axis = -1> (s)
   h = MatMul (p, v)
   places = NonZero (v)
   numbers = Cast <to = 1> (places)
   sum = ReduceSum <keepdims = 0> (numbers, axes)
   none = Mul (sum, zero)
   y = Add (h, none)
}"""


@needs_rtx
def test_deploy_reports_a_graph_that_the_parser_refuses(run_cli, tmp_path):
    onnx.save(onnx.parser.parse_model(REFUSED), tmp_path / "in.onnx")
    options = ("--precision", "fp32", "--axis", "B=1:2:4", "--axis", "S=1:8:16", "--allow-decomposed")
    options += ("--golden", "opt")
    done = run_cli("deploy", tmp_path / "in.onnx", "-o", tmp_path / "b", *options)
    assert done.code == 1
    assert "NonZero" in done.out
    verdict = json.loads((tmp_path / "b" / "report.json").read_text())["verdict"]
    kinds = [each["kind"] for each in verdict["findings"] if each["level"] == "failure"]
    assert (verdict["outcome"], kinds) == ("failed", ["engine not built"])


@needs_rtx
@pytest.mark.parametrize(
    ("arguments", "named"), [(["tiny-softcap"], "softcap"), (["tiny-gqa", "--precision", "fp32"], "fp16")]
)
def test_deploy_refuses_what_no_kernel_supports_before_it_exports(run_cli, tmp_path, arguments, named):
    done = run_cli("deploy", *arguments, "-o", tmp_path / "b")
    assert done.code == 1
    assert named in done.err
    assert "--allow-decomposed" in done.err
    assert "ort-cpu" not in done.out + done.err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("two.py", "two.py:encoder or two.py:decoder"),
        ("none.py", "Deployable"),
        ("checkpoint", "--hf checkpoint"),
        ("checkpoint", "Deployable"),
        ("bundle", "mha-deploy validate bundle"),
        ("of-factory", "two.py:encoder"),
        ("of-file", "net.onnx"),
        ("of-layer", "bert-base"),
        ("hub/checkpoin", "hub/checkpoint"),
        ("weights.safetensors", "--weights"),
        ("meta-llama/Llama-3.1-8B", "hf download meta-llama/Llama-3.1-8B"),
    ],
)
def test_an_error_knows_what_was_meant(refused, tmp_path, monkeypatch, name, hint):
    monkeypatch.chdir(tmp_path)
    factory = "def {}() -> Deployable:\n    return Deployable()\n"
    Path("two.py").write_text(factory.format("encoder") + factory.format("decoder") + "def main(): pass\n")
    Path("none.py").write_text("print('not run')\n")
    for folder, file in (("checkpoint", "config.json"), ("bundle", "manifest.json")):
        Path(folder).mkdir()
        Path(folder, file).write_text("{}")
    Path("weights.safetensors").write_bytes(b"")
    Path("hub/checkpoint").mkdir(parents=True)
    Path("hub/checkpoint/config.json").write_text("{}")
    for folder, source, spec in (
        ("of-factory", "program", {"name": "net", "factory": "two.py:encoder"}),
        ("of-file", "file", {"name": "net", "factory": ""}),
        ("of-layer", "layer", {"name": "bert-base"}),
    ):
        Path(folder).mkdir()
        Path(folder, "manifest.json").write_text(json.dumps({"spec": spec, "golden": [{"source": source}]}))
    if not name.startswith("hub/"):
        refused("deploy", name, what="", hint=hint)
    if "/" in name:
        refused("deploy", "--hf", name, what="", hint=hint)
    if name.startswith("of-"):
        refused("prune", name, "--heads", "2", "-o", "pruned", what="", hint=hint)


def test_a_config_alone_is_told_that_weights_are_required(refused, tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused("deploy", "--hf", tmp_path, what="safetensors", got=tmp_path.name, hint="model.safetensors")
    refused("deploy", "--hf", tmp_path, what="safetensors", got="", hint="from_transformers")


def test_deploy_refuses_a_builder_before_it_exports(refused, tmp_path):
    command = ("deploy", "tiny-mha", "-o", tmp_path / "b", "--backend", "tensorrt-trx")
    refused(*command, what="No such TensorRT backend", hint="'tensorrt-rtx'")
    assert not (tmp_path / "b").exists()


def test_deploy_refuses_what_export_refuses(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused("deploy", "tiny-mask", what="No model", got="tiny-mask", hint="tiny-m")
    (tmp_path / "bundles" / "tiny-mha-fp16").mkdir(parents=True)
    refused("deploy", "tiny-mha", what="folder exists", got="bundles/tiny-mha-fp16", hint="--overwrite")


# -- check ---------------------------------------------------------------------------------------


def test_check_reports_before_a_build_whether_attention_can_be_fused(run_cli, bundles):
    done = run_cli("check", bundles("tiny-gqa").path, "--target", "tensorrt-rtx")
    assert (done.code, done.err) == (0, "")
    assert "can be fused" in done.out


def test_check_prints_json_for_every_node(run_cli, bundles):
    path = bundles("tiny-gqa", "fp32").path
    done = run_cli("check", path, "--target", "tensorrt-rtx", "--json")
    (answer,) = json.loads(done.out)
    assert answer["node"] == "attention"
    assert done.code == (0 if answer["fused_after_lowering"] else 1)
    assert not answer["fused"], "there is no fused kernel for float32"
    assert answer["findings"]
    assert all({"message", "remedy", "severity"} <= set(finding) for finding in answer["findings"])


def test_check_refuses_a_target_that_it_does_not_know(refused, bundles):
    path = bundles("tiny-gqa").path
    refused("check", path, "--target", "tensorflow", what="", got="tensorflow", hint="tensorrt")


# -- build-engine --------------------------------------------------------------------------------


@needs_rtx
def test_an_engine_is_built_and_can_be_inspected(run_cli, folder):
    done = run_cli(
        "build-engine", folder, "--backend", "tensorrt-rtx", "--require-fused", "--require-precision"
    )
    assert done.code == 0, done.err
    assert "1/1 fused" in done.out
    assert len(done.err.splitlines()) == 1, "the phases of the builder are details of one step"
    quiet = run_cli("build-engine", folder, "--backend", "tensorrt-rtx", "--overwrite", "-q")
    assert (quiet.out.strip(), quiet.err) == (done.out.splitlines()[-1], ""), "the verdict alone"
    engine = folder / "engines" / "tensorrt-rtx.engine"
    found = json.loads(run_cli("inspect", engine, "--json").out)
    assert (found["model"], found["precision"]) == ("tiny-gqa", "fp16")
    assert found["misfits"]
    assert "engine" in run_cli("inspect", folder).out
    edit_manifest(folder, lambda data: data["notes"].append("changed"))
    other = run_cli("inspect", engine)
    assert other.code == 2
    assert "another bundle" in other.err
    with engine.open("ab") as file:
        file.write(b"\0")
    changed = run_cli("inspect", engine)
    assert changed.code == 2
    assert "changed or truncated" in changed.err


@pytest.mark.slow
@needs_rtx
def test_progress_of_a_build_does_not_exceed_its_count(folder):
    steps = []
    md.build_engine(folder, backend="tensorrt-rtx", on_step=lambda *step: steps.append(step))
    assert [done for _, done, count in steps if count]
    assert [(done, count) for _, done, count in steps if done > count] == []


@needs_rtx
def test_an_engine_is_replaced_only_on_request(run_cli, refused, folder):
    (folder / "engines").mkdir()
    engine = folder / "engines" / "mine.engine"
    engine.write_bytes(b"old")
    arguments = ("build-engine", folder, "--backend", "tensorrt-rtx", "--name", "mine")
    refused(*arguments, what="The engine already exists", got=str(engine), hint="--overwrite")
    refused(*arguments, "--overwrite", what="did not write", got=str(engine))
    assert engine.read_bytes() == b"old"  # no engine
    engine.write_bytes(b"ftrt, an old engine")
    assert run_cli(*arguments, "--overwrite").code == 0
    assert engine.read_bytes() != b"ftrt, an old engine"


@needs_rtx
@pytest.mark.parametrize(("name", "precision"), [("tiny-gqa", "fp32"), ("tiny-softcap", "fp16")])
def test_attention_without_a_fused_kernel_is_a_verdict_and_no_engine(
    run_cli, bundles, tmp_path, name, precision
):
    folder = copy_of(bundles(name, precision), tmp_path / "bundle")
    done = run_cli("build-engine", folder, "--backend", "tensorrt-rtx")
    assert done.code == 1
    assert "--allow-decomposed" in done.err
    assert not list(folder.glob("engines/*.engine"))


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        (["--profile", "S=1:2:999"], "exported for S from 1 to 64", "--axis"),
        (["--profile", "T=1:2:3"], "has no axis 'T'", "B, S"),
        (["--profile", "S"], "no range", "B=1:8:32"),
    ],
)
def test_a_profile_beyond_the_graph_is_refused(refused, folder, arguments, what, hint):
    refused("build-engine", folder, "--backend", "tensorrt-rtx", *arguments, what=what, hint=hint)
    assert not (folder / "engines").exists()


@needs_rtx
@pytest.mark.parametrize("name", ["../outside", "/outside", ".hidden", "a/b"])
def test_an_engine_stays_in_its_bundle(refused, folder, name):
    refused(
        *("build-engine", folder, "--backend", "tensorrt-rtx", "--name", name),
        what="cannot be the name of an engine",
        got=name,
    )


def test_an_unknown_builder_is_refused(run_cli, folder):
    done = run_cli("build-engine", folder, "--backend", "tensorrt-trx")
    assert done.code in (2, 3)
    assert "got: tensorrt-trx\n  try: did you mean 'tensorrt-rtx'?" in done.err
    assert not (folder / "engines").exists()
