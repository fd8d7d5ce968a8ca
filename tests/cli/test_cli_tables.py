"""`models`, `inspect`, `analyze` and `doctor` print the same results for people and for machines."""

import io
import json

import pytest
from bundle_edit import copy_of, edit_manifest, rehash
from rich.console import Console

from mha_deploy.bundle.folder import open_bundle
from mha_deploy.cli.tables import bisection_renderable
from mha_deploy.model.catalog import catalog_names, find_spec
from mha_deploy.model.layer import kv_cache_bytes_per_token, parameter_count
from mha_deploy.status import Kind, Reason
from mha_deploy.validation.fault import Bisection, OutputReason, Suspect

FULL_SIZE = [name for name in catalog_names() if not name.startswith("tiny-")]


# -- models --------------------------------------------------------------------------------------


def test_models_json_has_the_figures_of_every_spec(run_cli):
    done = run_cli("models", "--all", "--json")
    rows = json.loads(done.out)
    assert (done.code, done.err) == (0, "")
    assert [row["name"] for row in rows] == catalog_names()
    for row in rows:
        spec = find_spec(row["name"])
        assert row["parameters"] == parameter_count(spec)
        assert row["kv_bytes_per_token"] == kv_cache_bytes_per_token(spec, 2) == 4 * spec.Hkv * spec.D
        assert (row["Hq"], row["Hkv"], row["D"], row["E"]) == (spec.Hq, spec.Hkv, spec.D, spec.E)
        assert row["axes"] == {name: str(axis) for name, axis in spec.axes.items()}


def test_models_leaves_out_the_small_layers_of_the_tests(run_cli):
    assert [row["name"] for row in json.loads(run_cli("models", "--json").out)] == FULL_SIZE


def test_the_table_of_models_fits_a_terminal(run_cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = run_cli("models", "-v")
    assert done.code == 0
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 80
    for name in FULL_SIZE:
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert f"{parameter_count(find_spec(name)):,}" in line
        assert f"{kv_cache_bytes_per_token(find_spec(name), 2):,}" in line


# -- inspect -------------------------------------------------------------------------------------


def test_inspect_shows_what_a_bundle_holds(run_cli, bundles):
    bundle = bundles("tiny-gqa")
    done = run_cli("inspect", bundle.path)
    assert done.code == 0, done.err
    for text in (
        "tiny-gqa: GQA 4/2 heads of 16",
        "S 1:16:64",
        "hashes checked",
        "random, seed 0",
        "opset 23",
    ):
        assert text in done.out
    for name, entry in bundle.manifest.files.items():
        assert name in done.out
        assert entry.sha256[:16] in done.out


def test_inspect_shows_decode_traces(run_cli, bundles):
    dynamic, static, plain = (
        run_cli("inspect", bundles(name).path).out
        for name in ("tiny-dynamic", "tiny-preallocated", "tiny-gqa")
    )
    assert "trace    steps: 3 prompts of 24, then 40 single tokens" in dynamic
    assert "trace    steps: prompts of 24, 12 and 6, then 40 single tokens" in static
    assert "trace " not in plain


def test_inspect_json_is_the_manifest(run_cli, bundles):
    bundle = bundles("tiny-gqa")
    head = {"bundle": str(bundle.path), "hashes": "match"}
    for option, graph in (((), "not compared"), (("--verify",), "matches")):
        data = json.loads(run_cli("inspect", bundle.path, "--json", *option).out)
        assert data == {**head, "graph": graph, **bundle.manifest.to_dict()}


def test_inspect_reads_an_onnx_file(run_cli, bundles):
    path = bundles("tiny-gqa").model_path
    (node,) = json.loads(run_cli("inspect", path, "--json").out)["attention"]
    assert (node["kind"], node["Hq"], node["Hkv"], node["D"], node["is_causal"]) == ("GQA", 4, 2, 16, True)
    assert node["softmax_scale"] == pytest.approx(0.25)
    text = run_cli("inspect", path).out
    assert all(word in text for word in ("attention", "GQA", "fp16", "0.25", "causal"))


def test_inspect_detects_a_changed_file(refused, bundles, tmp_path):
    folder = copy_of(bundles("tiny-gqa"), tmp_path / "b")
    (folder / "golden" / "opt.safetensors").write_bytes(b"")
    refused("inspect", folder, what="changed after export", got="opt.safetensors", hint="export again")


def test_inspect_refuses_what_it_cannot_read(refused, tmp_path):
    garbage = tmp_path / "garbage.onnx"
    garbage.write_bytes(b"\x00\x01\x02 not a graph")
    refused("inspect", garbage, what="not an ONNX model", got=str(garbage))
    refused("inspect", tmp_path / "absent.onnx", what="no such ONNX file", got="absent.onnx")
    refused("inspect", tmp_path, what="no bundle here", got=str(tmp_path))
    (tmp_path / "folder.onnx").mkdir()
    refused("inspect", tmp_path / "folder.onnx", what="not an ONNX model", got="folder.onnx")


def test_names_in_a_bundle_are_shown_as_they_are(run_cli, bundles, tmp_path):
    """What looks like markup to the table printer is only a name."""
    folder = copy_of(bundles("tiny-gqa"), tmp_path / "b")
    edit_manifest(folder, lambda data: data["spec"].update(name="[/red] [bold]me"))
    edit_manifest(folder, lambda data: data["golden"][0].update(name="[red]"))
    rehash(folder)
    assert open_bundle(folder).manifest.spec.name == "[/red] [bold]me"
    for verb in ("inspect", "validate"):
        done = run_cli(verb, folder)
        assert done.code == 0
        assert "[/red] [bold]me" in done.out


# -- analyze -------------------------------------------------------------------------------------


def test_analyze_counts_at_the_optimal_sizes(run_cli):
    done = run_cli("analyze", "bert-base")
    assert (done.code, done.err) == (0, "")
    for text in ("bert-base", "B=8 S=128, fp16, H200", "projections", "attention", "output", "KV cache"):
        assert text in done.out


def test_analyze_json_has_the_figures(run_cli):
    done = run_cli(
        "analyze", "llama-3-8b", "--gpu", "a100", "--precision", "bf16", "--at", "B=2,S=16", "--json"
    )
    data = json.loads(done.out)
    assert done.code == 0
    assert data["sizes"] == {"B": 2, "S": 16}
    assert (data["gpu"]["name"], data["precision"]) == ("A100", "bf16")
    assert data["total"]["parameters"] == parameter_count(find_spec("llama-3-8b"))
    assert [stage["name"] for stage in data["stages"]] == ["projections", "attention", "output"]
    assert data["kv_cache"] == {"bytes_per_token": 4096, "bytes": 2 * 16 * 4096}
    assert "heads" not in data


def test_analyze_takes_sizes_beyond_the_spec_with_another_axis_range(run_cli, refused):
    refused("analyze", "tiny-mha", "--at", "B=1,S=4096", what="does not allow", got="S=4096", hint="--axis")
    done = run_cli("analyze", "tiny-mha", "--at", "B=1,S=4096", "--axis", "S=1:16:4096", "--json")
    assert json.loads(done.out)["sizes"]["S"] == 4096


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        (["--gpu", "h20"], "no peak figures for this GPU", "'h200'"),
        (["--precision", "fp64"], "No such precision", "fp"),
        (["--at", "S=1"], "a size for each", ""),
        (["--at", "many"], "cannot be read", "B=2,S=16"),
        (["--heads", "absent/folder/h.png"], "heatmap cannot be written", ""),
        (["--heads", "h.png", "--inputs", "absent.npz"], "no such .npz file", ""),
    ],
)
def test_analyze_refuses_with_what_to_try(refused, tmp_path, monkeypatch, arguments, what, hint):
    monkeypatch.chdir(tmp_path)
    refused("analyze", "tiny-mha", *arguments, what=what, hint=hint)
    assert list(tmp_path.iterdir()) == []


def test_analyze_compares_heads_and_writes_a_heatmap(run_cli, tmp_path):
    picture = tmp_path / "[b] heads.png"  # not markup, a name
    done = run_cli("analyze", "tiny-mha", "--heads", picture)
    assert done.code == 0, done.err
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert "Head redundancy" in done.out
    assert f"Heatmap: {picture}" in done.out
    done = run_cli("analyze", "tiny-mha", "--heads", picture, "--at", "B=1,S=5", "--json")
    heads = json.loads(done.out)["heads"]
    assert (heads["tokens"], len(heads["matrix"])) == (5, 4)
    assert 0 <= heads["redundancy"] <= 1


@pytest.mark.parametrize("option", ["--inputs", "--weights", "--prefix", "--attention", "--seed"])
def test_options_of_heads_without_heads_are_refused(refused, option):
    refused("analyze", "tiny-mha", option, "7", what="--heads", got=option, hint="--heads")


@pytest.mark.parametrize("options", [("--axis", "S=1:2:3"), ("--weights", "absent", "--heads", "h.png")])
def test_options_that_a_bundle_leaves_unused_are_refused(refused, bundles, tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    unused = options[0].removeprefix("--")
    refused("analyze", bundles("tiny-gqa").path, *options, what="bundle", got=unused, hint="")
    assert list(tmp_path.iterdir()) == []


# -- doctor --------------------------------------------------------------------------------------


def test_doctor_json(run_cli):
    done = run_cli("doctor", "--json")
    found = json.loads(done.out)
    assert done.code == 0
    assert found["can"]["export"]
    assert found["can"]["validate"]
    assert {row["name"] for row in found["runtimes"]} >= {"PyTorch", "ONNX", "ONNX Runtime", "matplotlib"}
    assert all(row["works"] for row in found["runtimes"] if row["name"] in ("PyTorch", "ONNX Runtime"))


def test_doctor_text(run_cli):
    done = run_cli("doctor")
    assert done.code == 0
    for text in ("mha-deploy", "PyTorch", "ONNX Runtime", "works", "GPU: ", "export: yes", "validate: yes"):
        assert text in done.out


def test_doctor_reports_how_to_install_what_is_missing(run_cli, monkeypatch):
    from mha_deploy import environment as doctor

    absent = doctor.RuntimePackage(
        name="Unavailable",
        module="surely_absent",
        packages=(),
        gives="export",
        verb="export",
        install='pip install "x[y]"',
    )
    monkeypatch.setattr(doctor.examine, "__defaults__", ((absent,),))
    done = run_cli("doctor")
    assert 'not installed: pip install "x[y]"' in done.out, "brackets are no markup"
    assert "export: no" in done.out


# -- bisect --------------------------------------------------------------------------------------


def test_a_node_that_could_not_be_compared_is_suspected_beside_the_first_wrong_one():
    node = Suspect(node="add", operator="Add", value="sum", problem="relative error 0.05")
    known = {"model": "m", "runtime": "b", "case": "opt", "attentions": 0, "runs": 1}
    reason = Reason(kind=Kind.SHAPE, got="(1,)", wanted="(2,)")
    known["wrong"] = OutputReason(case="opt", output="output", reason=reason)
    for unseen in ((), ("matmul",)):
        console = Console(width=200, record=True, file=io.StringIO())
        console.print(bisection_renderable(Bisection(**known, first_node=node, unseen=unseen)))
        (verdict,) = [line for line in console.export_text().splitlines() if line.startswith("FAILED")]
        assert "add" in verdict
        assert ("matmul" in verdict) == bool(unseen)
