"""`validate`: the verdict is the exit code, and the report says where and by how much."""

import json
import re
from xml.etree import ElementTree

import onnx
import onnxruntime
import pytest
from bundle_edit import copy_of, edit_manifest, rehash

from mha_deploy.bundle.folder import open_bundle
from mha_deploy.runtime.cuda import find_gpu
from mha_deploy.status import Kind
from mha_deploy.validation.records import check_report

VERDICT = {"outcome", "case", "sizes", "output", "reason", "deviation", "budget", "share"}
MEASURES = {"relative_l2", "worst_vector", "max_abs"}
on_cpu = pytest.mark.skipif(find_gpu() is not None, reason="with a GPU, others take part")


@pytest.fixture
def folder(bundles, tmp_path):
    """A bundle of its own, to alter."""
    return copy_of(bundles("tiny-gqa"), tmp_path / "bundle")


def replace_model(folder, change):
    """Change the graph and hide it, so that only the numbers can tell."""
    model = onnx.load(folder / "model.onnx")
    change(model)
    onnx.save(model, folder / "model.onnx")
    rehash(folder)


def wrong_scale(model):
    """Larger queries; a changed attribute would not fit the manifest."""
    for tensor in model.graph.initializer:
        if tensor.name.startswith("q."):
            values = onnx.numpy_helper.to_array(tensor)
            tensor.CopyFrom(onnx.numpy_helper.from_array((values * 1.02).astype(values.dtype), tensor.name))


def rename_output(model):
    (node,) = [node for node in model.graph.node if "output" in node.output]
    node.output[list(node.output).index("output")] = "result"
    model.graph.output[0].name = "result"


def written(folder):
    """What was reported, as data."""
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert check_report(report) == []
    return report


def test_junit_has_a_case_for_each_output_and_the_verdict(run_cli, folder, tmp_path):
    path, command = tmp_path / "out.xml", ["validate", folder, "--no-probe", "--runtime", "onnx-reference"]
    for broken in (False, True):
        if broken:
            replace_model(folder, wrong_scale)
        done = run_cli(*command, "--junit", path)
        assert done.code == int(broken)
        suite = ElementTree.parse(path).getroot()
        report = json.loads((folder / "report.json").read_text())
        rows = [verdict for each in report["parity"] for verdict in each["verdicts"]]
        wrong = [each for each in rows if each["outcome"] == "failed"]
        assert len(suite) == len(rows) + 1
        assert int(suite.get("failures")) == len(suite.findall(".//failure")) == len(wrong) + broken
    path.write_text("mine")
    assert run_cli(*command, "--junit", path).code == 2
    assert path.read_text() == "mine"


@on_cpu
def test_a_right_bundle_passes_and_the_report_beside_it_has_every_figure(run_cli, folder):
    done = run_cli("validate", folder, "-v")
    assert done.code == 0, done.err
    assert "PASSED  4/4 outputs within budget" in done.out
    version = re.escape(onnxruntime.__version__)
    assert re.search(rf"^ort-cpu {version}, golden cases", done.out, re.MULTILINE)
    assert done.err.count("validate tiny-gqa: ort-cpu (") == 1, "a line for a stage"
    for name in ("min", "opt", "odd", "large"):
        assert name in done.out
    verdict, *_, place = done.out.strip().splitlines()
    assert re.match(rf"PASSED  .*graph.*ort-cpu {version}: (\d+)/\1 outputs within budget", verdict)
    assert place == f"report: {folder / 'report.html'}"
    assert 'data-verdict="passed"' in (folder / "report.html").read_text(encoding="utf-8")
    bundle, report = open_bundle(folder), written(folder)  # a report beside it does not change a bundle
    assert report["verdict"]["outcome"] == "passed"
    assert (report["model"]["name"], report["model"]["precision"]) == ("tiny-gqa", "fp16")
    parity, probe, fresh = report["parity"]
    assert (probe["cases"], fresh["cases"]) == ("probe", "fresh")
    assert [row["case"] for row in parity["verdicts"]] == [entry.name for entry in bundle.manifest.golden]
    for row, entry in zip(parity["verdicts"], bundle.manifest.golden, strict=True):
        assert set(row) == VERDICT
        assert (row["outcome"], row["reason"], row["output"]) == ("passed", None, "output")
        assert row["sizes"] == entry.sizes
        assert set(row["budget"]) >= MEASURES
        assert set(row["deviation"]) >= {*row["budget"], "cosine", "worst_index", "worst_got", "worst_want"}
        assert all(0 <= row["deviation"][name] <= row["budget"][name] for name in row["budget"])
        assert len(row["deviation"]["worst_index"]) == 3


def test_the_report_is_written_elsewhere_or_not_at_all(run_cli, folder, tmp_path):
    """And what passed is a line for each group, or with -q the verdict alone."""
    done = run_cli("validate", folder, "--no-probe", "--no-report")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].startswith("PASSED  ")
    assert sum("4 outputs of golden cases ≤ " in line for line in lines) == 1
    assert [line for line in lines if line != line.rstrip()] == []
    done = run_cli("validate", folder, "--no-probe", "-q", "-o", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("PASSED  ")
    assert "golden cases" not in done.out
    assert written(tmp_path / "out")["verdict"]["outcome"] == "passed"
    assert not (folder / "report.json").exists()


def test_a_wrong_model_fails_though_every_hash_matches(run_cli, folder):
    replace_model(folder, wrong_scale)
    open_bundle(folder)  # nothing to see from outside
    done = run_cli("validate", folder)
    assert done.code == 1
    assert "over budget" in done.out
    assert "worst element [" in done.out
    assert any(line.startswith("FAILED  ort-c") for line in done.out.splitlines())
    assert "error" not in done.err, "a wrong result is a verdict"
    assert 'data-verdict="failed"' in (folder / "report.html").read_text(encoding="utf-8")
    report = written(folder)
    levels = [finding["level"] for finding in report["verdict"]["findings"]]
    assert levels == sorted(levels, key=("failure", "warning", "note").index)
    assert levels[0] == "failure"
    printed = " ".join(done.out.split())
    assert printed.count(report["verdict"]["findings"][0]["text"]) == 1, "the headline is not repeated"
    assert printed.count("worst element [") <= 4 * len(report["parity"])
    assert report["fault"]["at_fault"] == "graph"
    failed = [row for row in report["parity"][0]["verdicts"] if row["outcome"] == "failed"]
    assert {row["case"] for row in failed} >= {"opt", "odd", "large"}, "one key leaves nothing to scale"
    for row in failed:
        over = row["reason"]["names"]
        assert row["reason"]["kind"] == "out of budget"
        assert over
        assert all(row["deviation"][name] > row["budget"][name] for name in over)


def test_a_renamed_output_is_refused(refused, folder):
    replace_model(folder, rename_output)
    refused("validate", folder, what="does not describe the graph", got="result")


def test_a_bundle_without_golden_cases_is_refused(run_cli, folder):
    edit_manifest(folder, lambda data: data.update(golden=[]))
    for options in ((), ("--self-test",)):
        done = run_cli("validate", folder, *options)
        assert done.code == 2
        assert "golden" in done.err


def test_a_changed_file_is_bad_input_not_a_verdict(refused, folder):
    with (folder / "model.onnx").open("ab") as file:
        file.write(b"\0")
    refused("validate", folder, what="changed after export", got="model.onnx", hint="export again")


def test_a_file_that_is_no_graph_is_bad_input(refused, folder):
    (folder / "model.onnx").write_bytes(b"garbage")
    rehash(folder)
    refused("validate", folder, what="not an ONNX model", got="model.onnx")


@pytest.mark.slow
@on_cpu
def test_bf16_is_validated_by_the_runtime_that_has_it(run_cli, refused, bundles):
    path = bundles("tiny-padding", "bf16").path
    done = run_cli("validate", path, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["parity"][0]["runtime"].startswith("onnx-reference ")
    refused("validate", path, "--runtime", "ort-cpu", what="no CPU kernel", hint="onnx-reference", code=3)


def test_a_runtime_is_chosen_by_name(run_cli, refused, bundles):
    path = bundles("tiny-gqa").path
    done = run_cli("validate", path, "--runtime", "onnx-reference", "--no-probe", "--json")
    assert done.code == 0, done.out
    assert json.loads(done.out)["parity"][0]["runtime"].startswith("onnx-reference ")
    refused("validate", path, "--runtime", "ort-gpu", what="No such runtime", got="ort-gpu", hint="'ort-cpu'")


def test_what_is_no_bundle_is_refused(refused, tmp_path):
    refused("validate", tmp_path, what="no bundle here", got=str(tmp_path), hint="mha-deploy export MODEL")


def test_the_self_test_detects_every_mutation(run_cli, bundles):
    done = run_cli("validate", bundles("tiny-gqa").path, "--self-test", "--json")
    result = json.loads(done.out)
    assert (done.code, result["outcome"], result["right"]["outcome"]) == (0, "passed", "passed")
    assert len(result["mistakes"]) >= 7
    assert all(row["caught"] for row in result["mistakes"])


@pytest.mark.parametrize(
    ("options", "what", "hint"),
    [
        (["--prompt", "5"], "no effect without --steps", "--steps 64"),
        (["--batch", "2"], "no effect without --steps", "--steps 64"),
        (["--steps", "0", "--prompt", "5", "--batch", "2"], "no effect without --steps", "--steps 64"),
    ],
)
def test_options_of_decode_steps_without_steps_are_refused(refused, bundles, options, what, hint):
    given = " ".join(part for part in options if part not in ("--steps", "0"))
    refused("validate", bundles("tiny-dynamic").path, *options, what=what, got=given, hint=hint)


@pytest.mark.parametrize(
    "options",
    [
        "--steps 5", "--batch 2", "--graph nonexist.onnx", "--engine-file e.engine", "--data d.npz",
        "--map a=b", "--require-run", "--require-coverage", "--require-fused", "--require-precision",
        "--fresh 3", "--source s.onnx", "--metric m.py:f", "--no-latency", "--conformance", "--seed 3",
        "--requirements r.toml", "--engine e", "--samples 300", "--clients 1,2", "--url grpc://h:1",
        "-o out", "--overwrite",
    ],
)  # fmt: skip
def test_options_that_the_self_test_does_not_use_are_refused(refused, bundles, options):
    folder = bundles("tiny-gqa").path
    refused("validate", folder, "--self-test", *options.split(), what="self-test", got=options)


def test_options_of_a_file_are_for_other_calls_than_the_self_test(run_cli, tmp_path, monkeypatch):
    (tmp_path / "mha-deploy.toml").write_text("[validate]\nrequire_run = true\nrequests = 5\n")
    monkeypatch.chdir(tmp_path)
    for options in (["--self-test"], []):
        done = run_cli("validate", "absent", *options)
        assert "no bundle" in done.err


@pytest.mark.parametrize("options", ["--clients 1,2", "--requests 7", "--timeout 3.0"])
def test_options_of_a_server_without_one_are_refused(refused, bundles, options):
    refused("validate", bundles("tiny-gqa").path, *options.split(), what="server", got=options, hint="--url")


@pytest.mark.slow
def test_the_self_test_of_a_wrong_model_fails(run_cli, folder):
    replace_model(folder, wrong_scale)
    done = run_cli("validate", folder, "--self-test")
    assert done.code == 1
    assert "FAILED" in done.out


# -- bisect --------------------------------------------------------------------------------------


def test_bisect_of_a_right_bundle_passes(run_cli, bundles):
    done = run_cli("bisect", bundles("tiny-gqa").path)
    assert done.code == 0, done.err
    assert done.out.startswith("PASSED")


def test_bisect_of_a_wrong_bundle_fails_and_names_its_reference(run_cli, folder):
    replace_model(folder, wrong_scale)
    done = run_cli("bisect", folder, "--runtime", "ort-cpu", "--json")
    assert done.code == 1, done.err
    found = json.loads(done.out)
    assert (found["wrong"]["case"], found["wrong"]["output"]) == ("opt", "output")
    assert found["wrong"]["reason"]["kind"] == Kind.OUT_OF_BUDGET
    assert found["reference"] == "the graph in onnx-reference"


def test_bisect_refuses_a_baseline(refused, bundles):
    refused("bisect", bundles("tiny-gqa").path, "--runtime", "eager", what="can be bisected", got="eager")
