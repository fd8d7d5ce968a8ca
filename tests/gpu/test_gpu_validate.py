"""The commands on a GPU: an engine is run, judged, timed beside PyTorch, and attributed where it is wrong."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest
from bundle_edit import copy_of

import mha_deploy as md
from mha_deploy.bundle.folder import MANIFEST, open_bundle, sha256
from mha_deploy.engine.build import engine_from_bundle
from mha_deploy.engine.engine import engine_path, manifest_path
from mha_deploy.graph.file import load_graph, save_graph
from mha_deploy.graph.mutate import mutated
from mha_deploy.options import EngineOptions, ValidateOptions
from mha_deploy.status import Kind, Outcome
from mha_deploy.validation.records import check_bench, check_report, plain_report
from mha_deploy.validation.run import validate_bundle

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def deployed(workshop, bundles):
    """A bundle with an engine of two profiles in it."""
    pytest.importorskip("tensorrt", reason="TensorRT is not installed")

    def build(folder):
        bundle = open_bundle(copy_of(bundles("tiny-gqa"), folder / "bundle"))
        axes = bundle.manifest.spec.axes
        narrow = {**axes, "S": type(axes["S"])(min=1, opt=16, max=24)}
        engine_from_bundle(bundle, EngineOptions(backend="tensorrt", profiles=[axes, narrow]))

    folder, _ = workshop.thing("deployed", build)
    return open_bundle(folder / "bundle")


@pytest.fixture(scope="module")
def report(deployed):
    return validate_bundle(deployed, ValidateOptions(fresh=2, samples=100, kernels=True))


def test_the_engine_is_right_on_golden_swept_and_random_cases(report):
    assert report.passed, report.findings
    engine = next(each for each in report.evaluations if each.runtime.engine is not None)
    assert {parity.cases for parity in engine.parity} == {"golden", "sweep", "probe", "fresh"}
    assert {
        verdict.case for verdict in next(each for each in engine.parity if each.cases == "sweep").verdicts
    } >= {
        "sweep-profile-0-max",
        "sweep-profile-1-max",
    }
    profile = [check for check in engine.invariance if check.check == "profile"]
    assert any(check.case for check in profile), "two profiles admit short cases"


def test_every_runtime_is_timed_on_one_device_and_the_report_keeps_its_schema(report):
    data = plain_report(report.record)
    assert check_report(json.loads(json.dumps(data))) == []
    (point,) = data["latency"]["points"]
    timed = {row["name"]: row["timing"] for row in point["rows"] if row["timing"]}
    assert {"eager", "eager+graph", "tensorrt"} <= set(timed)
    assert len({timing["gpu"] for timing in timed.values()}) == 1
    for timing in timed.values():
        assert timing["samples"] >= 100
        assert 0 < timing["p50_us"] <= timing["p90_us"] <= timing["p99_us"]
        assert timing["slots"] >= 2
    assert all(row["kernels"] for row in point["rows"] if row["timing"])


def test_bench_times_the_sizes_that_were_asked_for(deployed, run_cli, tmp_path):
    done = run_cli(
        *("bench", deployed.path, "--at", "B=2,S=33", "--at", "opt", "--runtime", "tensorrt"),
        *("--runtime", "eager", "--samples", 100, "-o", tmp_path, "--json"),
    )
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert check_bench(data) == []
    points = data["models"][0]["latency"]["points"]
    assert [point["sizes"] for point in points] == [{"B": 2, "S": 33}, deployed.manifest.spec.sizes("opt")]
    assert all(row["timing"] for point in points for row in point["rows"])
    assert (tmp_path / "bench.html").stat().st_size > 1000


def test_an_engine_of_another_graph_is_caught_without_latency_and_the_graph_is_not_at_fault(
    deployed, tmp_path
):
    """A wrong engine passed off as the bundle's own: the scale is off by half a per cent."""
    folder = copy_of(deployed, tmp_path / "right")
    wrong = mutated(load_graph(deployed.model_path), "scale off by 0.5 %")
    other = copy_of(deployed, tmp_path / "wrong")
    save_graph(wrong, other / "model.onnx")
    engine = engine_from_bundle(open_bundle(other, verify=False), EngineOptions(backend="tensorrt"))
    place = engine_path(folder, "tensorrt")
    place.parent.mkdir()
    shutil.copy(engine.path, place)
    manifest = {**msgspec.to_builtins(engine.manifest), "bundle_sha256": sha256(folder / MANIFEST)}
    manifest_path(place).write_text(json.dumps(manifest), encoding="utf-8")
    report = validate_bundle(open_bundle(folder), ValidateOptions(sweep=False))
    assert not report.passed
    (row,) = [row for row in report.points[0].rows if row.name == "tensorrt"]
    assert row.timing is None
    assert row.refused.kind is Kind.WRONG_RESULT
    assert report.fault.at_fault == "fusion", report.fault
    assert [trial.outcome for trial in report.fault.trials] == [Outcome.PASSED, Outcome.PASSED]


def test_a_decoder_of_a_user_decodes_in_an_engine(tmp_path):
    """Its KV cache goes in and out of every call, and each step is judged."""
    pytest.importorskip("tensorrt")
    bundle = md.export(f"{Path(__file__).parents[1] / 'own_models.py'}:decoder", tmp_path / "bundle")
    md.build_engine(bundle)
    report = md.validate(bundle, latency=False)
    assert report.passed, report.headline
    decoded = [each for each in report.to_dict()["decode"] if "tensorrt" in each["runtime"]]
    assert decoded
    assert all(each["outcome"] == "passed" for each in decoded)


def test_a_module_that_does_not_run_on_the_gpu_is_no_crash(tmp_path):
    """Its PyTorch rows are refused with the user's line; the graph is still judged."""
    source = tmp_path / "on_cpu.py"
    source.write_text(
        "import torch\n"
        "from torch import nn\n"
        "from mha_deploy import Deployable, Example\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.at, self.mix = nn.Embedding(64, 32), nn.Linear(32, 32)\n"
        "    def forward(self, x):\n"
        "        x = x + self.at(torch.arange(x.shape[1]))\n"
        "        x = x[:, None]\n"
        "        return self.mix(nn.functional.scaled_dot_product_attention(x, x, x)[:, 0])\n"
        "def model():\n"
        "    return Deployable(module=Model(), inputs={'x': Example(torch.randn(2, 8, 32), 'B', 'S')},\n"
        "                      axes={'B': '1:2:4', 'S': '1:8:32'})\n"
    )
    report = md.validate(md.export(f"{source}:model", tmp_path / "bundle"), latency=True)
    assert report.passed, report.headline
    assert "on_cpu.py" in report.to_json()
