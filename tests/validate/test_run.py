"""A whole validation without a GPU: the graph is run; engines are built, inspected and reported."""

import shutil

import onnx
import pytest
from bundle_edit import copy_of, edit_manifest, rehash

from mha_deploy.bundle.folder import open_bundle
from mha_deploy.engine.build import engine_from_bundle
from mha_deploy.errors import BackendUnavailable, BundleError, DeployError
from mha_deploy.files import as_plain
from mha_deploy.options import EngineOptions, ValidateOptions
from mha_deploy.runtime.cuda import find_gpu
from mha_deploy.status import Kind, Reason
from mha_deploy.validation.records import check_report
from mha_deploy.validation.run import validate_bundle
from mha_deploy.validation.runtimes import TORCH_BASELINES, RuntimeFinder

pytestmark = pytest.mark.skipif(find_gpu() is not None, reason="with a GPU, others take part")


@pytest.fixture
def folder(bundles, tmp_path):
    return copy_of(bundles("tiny-gqa"), tmp_path / "bundle")


@pytest.fixture
def bare(bundles, tmp_path):
    """Bundles of our own, without the engines that others built into theirs."""
    return lambda name: open_bundle(copy_of(bundles(name), tmp_path / name))


@pytest.fixture(scope="module")
def with_engine(bundles, tmp_path_factory):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    bundle = open_bundle(copy_of(bundles("tiny-gqa"), tmp_path_factory.mktemp("engine") / "bundle"))
    engine_from_bundle(bundle, EngineOptions(backend="tensorrt-rtx", targets="8.9"))
    return bundle


def names(report):
    return [each.runtime.name for each in report.evaluations]


def test_the_graph_is_run_and_the_report_keeps_its_schema(bare):
    report = validate_bundle(bare("tiny-padding"))
    assert report.passed
    assert names(report) == ["ort-cpu"]
    assert (report.points, report.engines, report.conformance, report.fault) == ((), (), None, None)
    assert report.ranges.nodes[0].node == "attention"
    data = as_plain(report.record)
    assert check_report(data) == []
    assert data["latency"] is None
    assert data["environment"]["gpu"] is None
    assert [heat["case"] for heat in data["heatmaps"]] == ["opt"]


def test_an_engine_that_cannot_run_here_is_reported_and_does_not_fail(with_engine):
    report = validate_bundle(with_engine)
    assert not report.passed
    assert names(report) == ["ort-cpu"]
    (engine,) = as_plain(report.record)["engines"]
    assert (engine["name"], engine["ran"], engine["fused"]) == ("tensorrt-rtx", False, [1, 1])
    assert engine["why_not"] == "there is no NVIDIA GPU here"
    assert {each.level for each in report.findings} == {"note"}
    kinds = [each.kind for each in report.findings]
    assert kinds == [Kind.ENGINE_PRECISION, Kind.ENGINE_NOT_RUN, Kind.NOT_RUN, Kind.NOT_COVERED]
    assert report.findings[-2].names == ("engine tensorrt-rtx",)
    assert report.outcome == "not verified"
    assert report.headline.startswith("the graph is right (ort-cpu ")
    reported = "), engine tensorrt-rtx built and inspected, NOT RUN, 1/1 fused, precision: fp16 ("
    assert reported in report.headline


def test_an_engine_that_is_asked_for_by_name_must_run(with_engine):
    with pytest.raises(BackendUnavailable, match="cannot run here"):
        validate_bundle(with_engine, ValidateOptions(runtimes=("tensorrt-rtx",)))


def test_an_engine_of_another_bundle_is_refused(with_engine, tmp_path):
    folder = shutil.copytree(with_engine.path, tmp_path / "bundle")
    edit_manifest(folder, lambda data: data["notes"].append("changed"))
    with pytest.raises(BundleError, match="another bundle"):
        validate_bundle(open_bundle(folder))


def test_an_engine_that_is_not_fused_fails_only_where_that_is_required(bundles, tmp_path):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    bundle = open_bundle(copy_of(bundles("tiny-gqa", "fp32"), tmp_path / "bundle"))
    engine_from_bundle(bundle, EngineOptions(backend="tensorrt-rtx", allow_decomposed=True))
    report = validate_bundle(bundle)
    assert report.outcome == "not verified"
    assert [finding.level for finding in report.findings if finding.section == "fusion"] == ["warning"]
    report = validate_bundle(bundle, ValidateOptions(require_fused=True))
    assert not report.passed
    assert report.headline == "engine tensorrt-rtx: 0/1 fused"


@pytest.mark.parametrize("required", ["require_fused", "require_run"])
def test_what_is_required_of_engines_fails_where_there_is_none(bare, required):
    report = validate_bundle(bare("tiny-mha"), ValidateOptions(**{required: True}))
    assert not report.passed
    assert [each.kind for each in report.findings if each.level == "failure"] == [Kind.NO_ENGINE]
    assert f"--{required.replace('_', '-')}" in report.headline


def test_a_builder_without_an_engine_here_says_how_to_build_one(bare):
    bundle = bare("tiny-mha")
    with pytest.raises(BackendUnavailable, match="no engine of that name") as caught:
        validate_bundle(bundle, ValidateOptions(runtimes=("tensorrt",)))
    assert "build-engine" in caught.value.hint


def test_an_engine_is_built_once_the_graph_is_right(folder):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    bundle, seen = open_bundle(folder), []

    def build(graph):
        seen.append(graph.is_right)
        engine_from_bundle(bundle, EngineOptions(backend="tensorrt-rtx"))

    report = validate_bundle(bundle, build=build)
    assert seen == [True]
    assert [engine.path.stem for engine in report.engines] == ["tensorrt-rtx"]


def test_an_engine_is_built_of_a_graph_of_which_nothing_is_shown(bare, monkeypatch):
    shows_nothing = Reason(kind=Kind.ORACLE_REPEATS)
    monkeypatch.setattr("mha_deploy.judge._shows_nothing", lambda oracle, eager: shows_nothing)
    built, options = [], ValidateOptions(probe=False)
    report = validate_bundle(bare("tiny-mha"), options, build=lambda graph: built.append(str(graph.outcome)))
    assert (built, report.outcome) == (["not verified"], "not verified")
    assert report.findings[0].kind is Kind.UNVERIFIED_OUTPUTS
    assert report.findings[0].in_headline


def test_no_engine_is_built_of_a_wrong_graph(folder):
    model = onnx.load(folder / "model.onnx")
    (scale,) = [a for node in model.graph.node for a in node.attribute if a.name == "scale"]
    scale.f *= 1.02
    onnx.save(model, folder / "model.onnx")
    rehash(folder)
    required = ValidateOptions(require_fused=True)  # as of `deploy`
    report = validate_bundle(open_bundle(folder), required, build=lambda graph: pytest.fail("built"))
    assert not report.passed
    failures = [each.kind for each in report.findings if each.level == "failure"]
    assert set(failures) == {Kind.WRONG_OUTPUTS, Kind.ENGINE_NOT_BUILT}
    assert "is wrong on 3 of 4 outputs" in report.headline
    assert report.fault.at_fault == "graph"
    wrong = {heat.case for each in report.evaluations for heat in each.heatmaps}
    assert {"opt", "odd", "large"} <= wrong, "a map of every wrong case"


def test_fresh_cases_and_a_sweep_are_judged_on_request(bare):
    report = validate_bundle(bare("tiny-padding"), ValidateOptions(fresh=2, sweep=True))
    assert report.passed, report.findings
    (evaluation,) = report.evaluations
    kinds = {parity.cases: [verdict.case for verdict in parity.verdicts] for parity in evaluation.parity}
    assert list(kinds) == ["golden", "sweep", "probe", "fresh"]
    assert {"sweep-min", "sweep-opt", "sweep-max", "sweep-odd"} <= set(kinds["sweep"])
    assert len(kinds["fresh"]) == 2


@pytest.mark.slow
def test_the_table_of_masks_is_put_together_on_request(bare):
    report = validate_bundle(bare("tiny-mha"), ValidateOptions(conformance=True))
    table = report.conformance
    assert {"eager", "sdpa", "onnx-reference", "ort-cpu", "ort-cuda", "tensorrt"} == set(table.columns)
    statuses = {column: {row.cells[column].status for row in table.rows} for column in table.columns}
    assert statuses["tensorrt"] == statuses["ort-cuda"] == {"absent"}
    assert statuses["eager"] == {"conforms"}
    assert check_report(as_plain(report.record)) == []


def test_a_name_that_nobody_has_is_refused_with_the_nearest(bare):
    bundle = bare("tiny-mha")
    with pytest.raises(DeployError, match="No such runtime") as caught:
        validate_bundle(bundle, ValidateOptions(runtimes=("sdpa-cudn",)))
    assert caught.value.hint == "did you mean 'sdpa-cudnn'?"
    with pytest.raises(DeployError, match="no engine of that name"):
        validate_bundle(bundle, ValidateOptions(engine="mine"))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["ort-cuda", "eager", "sdpa-cudnn", "compile"])
def test_what_needs_a_gpu_says_so(bare, in_process, name):
    with pytest.raises(BackendUnavailable):
        validate_bundle(bare("tiny-mha"), ValidateOptions(runtimes=(name,)))


def test_the_names_of_pytorch_are_those_of_the_baselines():
    from mha_deploy.baselines.torch import BASELINES

    assert tuple(BASELINES) == TORCH_BASELINES


def test_without_a_gpu_there_are_no_baselines(bundles):
    assert RuntimeFinder(bundles("tiny-mha")).baselines() == []
