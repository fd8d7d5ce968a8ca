"""Plans of any origin on a GPU: judged like the bundle's own engines, with what their kernels show."""

import shutil
from importlib.util import find_spec

import numpy as np
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
from mha_deploy.runtime.tensorrt.versions import LEAN, load

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
    graph = mutated(load_graph(bundle.model_path), "scale missing", bundle.manifest.spec)
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


def test_every_sample_of_ones_own_data_is_judged_in_the_engine(bundle, plan, tmp_path):
    """Also after a run that stopped: what is missing is computed, and nothing else."""
    random = np.random.default_rng(0)
    samples = [{"x": random.standard_normal((2, length, 64))} for length in (1, 7, 16, 33, 64)]

    def stops():
        yield from samples[:3]
        raise RuntimeError("stopped")

    options = {"latency": False, "sweep": False, "resume": tmp_path / "data.jsonl"}
    with pytest.raises(md.DeployError):
        md.validate(bundle, data=stops(), **options)
    report = md.validate(bundle, data=samples, metric=lambda outputs, sample: 1.0, **options)
    assert report.passed, report.headline
    assert report.record.data.samples == 5
    for runtime in report.record.data.runtimes:
        assert (runtime.samples, runtime.failed) == (5, 0)
        assert runtime.share.max < 1
        assert runtime.metric.value == 1.0
    assert any(each.name == plan[1].path.stem for each in report.record.data.runtimes)


def test_a_version_compatible_engine_runs_in_the_lean_runtime(bundles, tmp_path):
    """Where the lean runtime is installed: right, and timed beside the full one."""
    pytest.importorskip("tensorrt", reason="TensorRT is not installed")
    if all(find_spec(name) is None for name in LEAN["tensorrt-lean"]):
        pytest.skip("the lean runtime is not installed")
    opened = open_bundle(copy_of(bundles("tiny-gqa"), tmp_path / "bundle"))
    engine = md.build_engine(opened, backend="tensorrt", version_compatible=True, name="vc")
    report = md.validate(opened, runtimes=["vc", "tensorrt-lean"], samples=100, sweep=False)
    assert report.passed, report.headline
    (point,) = report.to_dict()["latency"]["points"]
    timed = {row["name"]: row["runtime"] for row in point["rows"] if row["timing"]}
    assert set(timed) == {"vc", "vc in tensorrt-lean"}
    assert timed["vc in tensorrt-lean"].startswith("tensorrt-lean ")
    assert engine.manifest.options["version_compatible"]
