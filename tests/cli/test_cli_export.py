"""`export` writes what was asked for, shows progress on stderr, and refuses the rest before it writes."""

import json
import resource

import numpy as np
import onnx
import onnx.parser
import pytest
from bundle_edit import small_bundle

from mha_deploy.bundle.cases import golden_cases
from mha_deploy.bundle.folder import open_bundle, sha256


def test_every_option_reaches_the_bundle(run_cli, tmp_path):
    target, own = tmp_path / "deep" / "bundle", tmp_path / "mine.toml"
    own.write_text("Hq = 4\nHkv = 2\nE = 64\naxes = { B = 3, S = 64 }\n")
    done = run_cli(
        *("export", own, "-o", target, "--precision", "fp32", "--projections", "packed"),
        *("--axis", "S=2:8:32", "--axis", "B=3", "--golden", "min", "--golden", "B=3,S=5"),
        *("--seed", "7", "--opset", "24", "--json"),
    )
    assert done.code == 0, done.err
    bundle = open_bundle(target)
    manifest, spec = bundle.manifest, bundle.manifest.spec
    assert json.loads(done.out) == {"bundle": str(target), **manifest.to_dict()}
    assert (spec.name, spec.projections, manifest.precision.name) == ("mine", "packed", "fp32")
    assert {name: str(axis) for name, axis in spec.axes.items()} == {"B": "3:3:3", "S": "2:8:32"}
    assert manifest.opset == manifest.attention[0]["opset"] == 24
    assert manifest.weights == "random, seed 7"
    assert [case.name for case in golden_cases(bundle)] == ["min", "B3-S5"]
    assert [case.inputs["x"].shape for case in golden_cases(bundle)] == [(3, 2, 64), (3, 5, 64)]


def test_a_bundle_is_replaced_only_on_request_and_without_files_of_others(run_cli, refused, tmp_path):
    target = small_bundle(tmp_path / "bundle", "tiny-mqa").path
    refused("export", "tiny-mha", "-o", target, what="folder exists", got=str(target), hint="--overwrite")
    assert open_bundle(target).manifest.spec.name == "tiny-mqa"
    (target / "notes.txt").write_text("mine")
    command = ("export", "tiny-mha", "-o", target, "--golden", "min", "--overwrite")
    refused(*command, what="did not write", got="notes.txt", hint="another -o")
    assert (target / "notes.txt").read_text() == "mine"
    (target / "notes.txt").unlink()
    (target / "report.json").write_text('{"tool": {"name": "mha-deploy"}}')
    done = run_cli(*command)
    assert done.code == 0, done.err
    first, *progress, removed = done.err.splitlines()
    assert first.startswith("export tiny-mha: "), "a word before PyTorch is imported"
    assert "report.json" in removed  # nothing goes without a word
    names = ("weights", "ONNX graph", "run at two shapes", "FP64 oracle", "golden case min")
    names += ("what the outputs show", "hashes")
    wanted = [f"export tiny-mha: {number}/7 {step}" for number, step in enumerate(names, 1)]
    assert [line.partition(" (")[0] for line in progress] == wanted
    assert "export tiny-mha" not in done.out
    assert "tiny-mha: MHA 4/4 heads of 16, width 64" in done.out
    assert "fp16, opset 23, axes B 1:2:4  S 1:16:64" in done.out
    assert "1/1 attention, one ONNX Attention node" in done.out
    assert "min B=1,S=1" in done.out
    assert not (target / "report.json").exists()
    assert open_bundle(target).manifest.spec.name == "tiny-mha"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_a_folder_that_appears_during_an_export_is_kept(refused, tmp_path, monkeypatch):
    from mha_deploy.exporter import flow

    target, versions = tmp_path / "bundle", flow.versions

    def late():
        target.mkdir()
        (target / "thesis.tex").write_text("years of work")
        return versions()

    monkeypatch.setattr(flow, "versions", late)
    refused(
        "export", "tiny-mha", "-o", target, "--golden", "min", what="", got=str(target), hint="another -o"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    assert (target / "thesis.tex").read_text() == "years of work"


@pytest.mark.slow
def test_weights_come_from_a_file(run_cli, tmp_path):
    import torch
    from safetensors.torch import save_file

    from mha_deploy.model.catalog import find_spec
    from mha_deploy.reference import build_module

    weights = tmp_path / "mine.safetensors"
    save_file(build_module(find_spec("tiny-mha"), seed=3, dtype=torch.float16).state_dict(), weights)
    by_file, by_seed = tmp_path / "by-file", tmp_path / "by-seed"
    common = ("--golden", "min", "--json")
    done = run_cli("export", "tiny-mha", "-o", by_file, "--weights", weights, *common)
    assert done.code == 0, done.err
    assert json.loads(done.out)["weights"] == f"mine.safetensors, sha256 {sha256(weights)}"
    assert run_cli("export", "tiny-mha", "-o", by_seed, "--seed", "3", *common).code == 0
    assert (by_file / "model.onnx").read_bytes() == (by_seed / "model.onnx").read_bytes()


# -- refusals ------------------------------------------------------------------------------------

REFUSALS = {
    "unknown model": (["bert-bse"], "No model of that name", "bert-bse", "did you mean 'bert-base'?"),
    "unknown axis": (["tiny-mha", "--axis", "T=1:2:3"], "has no axis 'T'", "T", "B, S"),
    "axis without range": (["tiny-mha", "--axis", "S"], "--axis", "S", "--axis S=min:opt:max"),
    "axis of letters": (["tiny-mha", "--axis", "S=a:b:c"], "not made of numbers", "a:b:c", "min:opt:max"),
    "axis of two": (["tiny-mha", "--axis", "S=1:2"], "wrong number of parts", "1:2", "min:opt:max"),
    "axis upside down": (["tiny-mha", "--axis", "S=9:2:1"], "min <= opt <= max", "9:2:1", "1:2:9"),
    "axis of zero": (["tiny-mha", "--axis", "S=0:2:3"], "at least 1", "0:2:3", "1:128:512"),
    "precision": (["tiny-mha", "--precision", "fp7"], "No such precision", "fp7", "fp"),
    "projections": (["tiny-mha", "--projections", "pakced"], "projections", "pakced", "'packed'"),
    "packed cross attention": (["tiny-cross", "--projections", "packed"], "", "", ""),
    "golden name": (["tiny-mha", "--golden", "rugged"], "No such golden case", "rugged", "'ragged'"),
    "golden out of range": (["tiny-mha", "--golden", "B=1,S=99"], "does not allow", "S=99", "from 1 to 64"),
    "golden without an axis": (["tiny-mha", "--golden", "B=1"], "a size for each", "{'B': 1}", ""),
    "golden that does not apply": (
        ["tiny-mha", "--golden", "ragged"],
        "No golden case is left",
        "ragged",
        "opt",
    ),
    "opset": (["tiny-mha", "--opset", "17"], "operator set with Attention", "17", "(23, 24)"),
    "weights": (["tiny-mha", "--weights", "absent.safetensors"], "no such weight file", "absent", ""),
    "weights of another kind": (["tiny-mha", "--weights", "pyproject.toml"], "not a safetensors", "", ""),
    "device": (["tiny-mha", "--device", "tpu"], "device", "tpu", "cpu"),
    "weights of a file": (["net.onnx", "--weights", "w.safetensors"], "ONNX", "--weights w.", "refit"),
    "prefix of a file": (["net.onnx", "--prefix", "foo"], "ONNX", "--prefix foo", "--weights"),
    "opset of a file": (["net.onnx", "--opset", "24"], "ONNX", "--opset 24", ""),
    "device of a file": (["net.onnx", "--device", "cuda"], "ONNX", "--device cuda", ""),
    "prefix without weights": (["tiny-mha", "--prefix", "foo"], "--prefix", "foo", "--weights"),
    "layer without a checkpoint": (["tiny-mha", "--layer", "3"], "--layer", "3", "--hf"),
    "input of a layer": (["tiny-mha", "--input", "x=x.npy"], "--input", "x", ".onnx"),
}


@pytest.mark.parametrize(("arguments", "what", "got", "hint"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    refused, tmp_path, monkeypatch, arguments, what, got, hint
):
    (tmp_path / "pyproject.toml").write_text("[project]\n" * 100)
    text = '<ir_version: 10, opset_import: ["" : 23]> g (float[2, 4] x) => (float[2, 4] y) { y = Relu (x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "net.onnx")
    monkeypatch.chdir(tmp_path)
    refused("export", *arguments, "-o", "out/bundle", what=what, got=got, hint=hint)
    out = tmp_path / "out"
    assert not out.exists() or list(out.iterdir()) == []


def test_a_seed_beyond_what_pytorch_takes_is_refused(run_cli, tmp_path):
    done = run_cli("export", "tiny-mha", "-o", tmp_path / "b", "--seed", str(2**70))
    assert done.code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_not_here_is_refused(refused, tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    refused("export", "tiny-mha", "-o", tmp_path / "b", "--device", "cuda", what="no CUDA device", hint="cpu")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused(refused, tmp_path):
    (tmp_path / "file").write_text("a file")
    refused("export", "tiny-mha", "-o", tmp_path / "file" / "b", what="cannot be written", got="file")


def test_a_full_disk_leaves_nothing(run_cli, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        done = run_cli("export", "tiny-mha", "-o", tmp_path / "out" / "bundle", "--golden", "min")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.code == 2
    assert "File too large" in done.err
    assert "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []


# -- caches ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("cache", "axis", "axes", "opset"),
    [
        ("dynamic", "P=0:4:20", {"B": "1:2:4", "S": "1:16:64", "P": "0:4:20"}, 23),
        ("preallocated", "T=96", {"B": "1:2:4", "S": "1:16:64", "T": "96:96:96"}, 24),
    ],
)
def test_a_cache_can_be_added_to_a_layer(run_cli, tmp_path, cache, axis, axes, opset):
    target = tmp_path / "bundle"
    arguments = ("--cache", cache, "--axis", axis, "--golden", "min", "--golden", "decode")
    done = run_cli("export", "tiny-rope", "-o", target, *arguments)
    assert done.code == 0, done.err
    bundle = open_bundle(target)
    spec = bundle.manifest.spec
    assert (spec.name, spec.cache, bundle.manifest.opset) == ("tiny-rope", cache, opset)
    assert {name: str(found) for name, found in spec.axes.items()} == axes
    assert [case.name for case in golden_cases(bundle)] == ["min", "decode"]
    assert f"opset {opset}" in done.out


@pytest.mark.slow
def test_a_cache_can_be_removed_from_a_layer(run_cli, tmp_path):
    target = tmp_path / "bundle"
    done = run_cli("export", "tiny-dynamic", "-o", target, "--cache", "none", "--golden", "min")
    assert done.code == 0, done.err
    spec = open_bundle(target).manifest.spec
    assert (spec.cache, spec.longest, [tensor.name for tensor in spec.inputs]) == ("none", 64, ["x"])


@pytest.mark.parametrize(
    ("arguments", "what", "got", "hint"),
    [
        (["tiny-gqa", "--cache", "grown"], "unknown value", "grown", "dynamic"),
        (["tiny-mha", "--cache", "dynamic"], "does not go with this causal", "causal = false", "true"),
        (["tiny-causal-padding", "--cache", "preallocated"], "does not go with this mask", "padding", "none"),
        (["tiny-cross", "--cache", "dynamic"], "does not go with this attends", "cross", "self"),
        (["tiny-dynamic", "--axis", "P=-1:0:3"], "only P, the past, may be 0", "-1:0:3", "1:128:512"),
        (["tiny-gqa", "--axis", "P=0:1:2"], "has no axis 'P'", "P", "B, S"),
        (["tiny-dynamic", "--axis", "S=0:1:2"], "whole numbers of at least 1", "S = 0:1:2", "1:128:512"),
        (
            ["tiny-preallocated", "--opset", "23"],
            "needs an operator set with TensorScatter",
            "23",
            "--opset 24",
        ),
        (
            ["tiny-preallocated", "--axis", "T=32"],
            "more tokens than the cache has entries",
            "T = 32",
            "S up to 32",
        ),
        (["tiny-gqa", "--golden", "prefill"], "No such golden case", "prefill", "min"),
    ],
)
def test_a_cache_that_the_layer_cannot_have_is_refused(refused, tmp_path, arguments, what, got, hint):
    refused("export", *arguments, "-o", tmp_path / "bundle", what=what, got=got, hint=hint)
    assert not (tmp_path / "bundle").exists()


# -- ONNX files ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_onnx_file_is_exported_with_values_of_an_input(run_cli, bundles, tmp_path):
    np.save(tmp_path / "x.npy", np.ones((2, 8, 64), np.float32))
    source = bundles("tiny-mha", "fp32").model_path
    options = ("--precision", "fp32", "--input", f"x={tmp_path / 'x.npy'}", "--axis", "S=1:4:8", "--json")
    done = run_cli("export", source, "-o", tmp_path / "bundle", *options)
    assert done.code == 0, done.err
    bundle = open_bundle(tmp_path / "bundle")
    assert (len(bundle.manifest.attention), str(bundle.manifest.spec.axes["S"])) == (1, "1:4:8")
    cases = {case.name: case for case in golden_cases(bundle)}
    assert (cases["opt"].inputs["x"] == 1).all()


@pytest.mark.parametrize(
    ("value", "what", "hint"),
    [("x=x.npy", "Only an export of an ONNX file takes", ""), ("x", "--input", "--input input_ids=ids.npy")],
)
def test_values_of_inputs_are_refused(refused, tmp_path, value, what, hint):
    refused("export", "tiny-mha", "-o", tmp_path / "bundle", "--input", value, what=what, hint=hint)
    assert not (tmp_path / "bundle").exists()
