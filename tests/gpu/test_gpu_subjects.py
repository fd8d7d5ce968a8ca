"""Plans of any origin on a GPU: judged like the bundle's own engines, with what their kernels show."""

import shutil

import pytest
from bundle_edit import copy_of

import mha_deploy as md
from mha_deploy.bundle.folder import open_bundle
from mha_deploy.engine.engine import default_profiles, profile_shapes
from mha_deploy.engine.lowered import lower_for
from mha_deploy.graph.file import load_graph, save_graph
from mha_deploy.graph.mutate import mutated
from mha_deploy.options import EngineOptions
from mha_deploy.runtime.tensorrt.builder import BuildRequest, build_engine
from mha_deploy.runtime.tensorrt.versions import load

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def bundle(bundles, tmp_path_factory):
    pytest.importorskip("tensorrt", reason="TensorRT is not installed")
    return open_bundle(copy_of(bundles("tiny-gqa"), tmp_path_factory.mktemp("subjects") / "bundle"))


@pytest.fixture(scope="module")
def plan(bundle, tmp_path_factory):
    """The plan of an engine, without its manifest, as if anybody had built it."""
    engine = md.build_engine(bundle, backend="tensorrt")
    path = tmp_path_factory.mktemp("plans") / "theirs.engine"
    shutil.copyfile(engine.path, path)
    return path, engine


def test_a_plan_of_any_origin_is_run_judged_and_timed(bundle, plan):
    path, engine = plan
    report = md.validate(bundle, engine_files=[path], samples=100)
    assert report.passed, report.headline
    data = report.to_dict()
    (subject,) = data["subjects"]
    assert subject["kind"] == "engine"
    assert subject["plan"]["fused_kernels"] >= (1 if engine.manifest.all_fused else 0)
    assert data["invariance"]
    (point,) = data["latency"]["points"]
    assert [row["name"] for row in point["rows"] if row["timing"]] == ["theirs.engine"]


def test_a_plan_of_a_wrong_graph_fails(bundle, tmp_path):
    graph = mutated(load_graph(bundle.model_path), "scale off by 4 %", bundle.manifest.spec.layer)
    assert graph is not None
    rt, spec = load("tensorrt"), bundle.manifest.spec
    lowered, _ = lower_for(rt, graph, EngineOptions(backend="tensorrt", allow_decomposed=True))
    save_graph(lowered, tmp_path / "wrong.onnx")
    profiles = [profile_shapes(spec, each) for each in default_profiles(spec)]
    options = EngineOptions(allow_decomposed=True)
    request = BuildRequest(onnx=tmp_path / "wrong.onnx", precision="fp16", profiles=profiles, options=options)
    (tmp_path / "wrong.engine").write_bytes(build_engine(rt, request).plan)
    report = md.validate(bundle, engine_files=[tmp_path / "wrong.engine"], latency=False)
    assert report.outcome == "failed"
