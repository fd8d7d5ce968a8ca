"""Lean and dispatch runtimes: which plans they load, how they are found, and what is said without them."""

import sys
from types import SimpleNamespace

import msgspec
import pytest
from bundle_edit import copy_of

import mha_deploy as md
from mha_deploy.bundle.folder import MANIFEST, open_bundle, sha256
from mha_deploy.engine import engine as engines
from mha_deploy.engine.engine import misfits, open_engine_runner, reasons_not_to_run
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.runtime.tensorrt import versions
from mha_deploy.runtime.tensorrt.engine_verdict import (
    EngineVerdict,
    FusionStatus,
    NodeVerdict,
    PrecisionStatus,
    PrecisionVerdict,
)
from mha_deploy.runtime.tensorrt.versions import load, loads_plans_of

H200 = {"name": "NVIDIA H200", "compute_cap": "9.0"}


@pytest.mark.parametrize(
    ("here", "built", "loads"),
    [
        ("8.6.1", "8.6.1", True),
        ("10.16.1.11", "8.6.1", True),
        ("10.16.1.11", "10.3.0", True),
        ("11.4.0.106", "10.16.1.11", True),
        ("11.4.0.106", "8.6.1", False),
        ("8.6.1", "10.0.1", False),
        ("10.0.1", "10.16.1", False),
        ("9.0.0", "8.6.1", False),
    ],
)
def test_which_version_compatible_plans_a_version_loads(here, built, loads):
    assert (loads_plans_of(here, built, compatible=True, lean=True) is None) == loads
    same_major = here.partition(".")[0] == built.partition(".")[0]
    assert (loads_plans_of(here, built, compatible=True) is None) == (loads and same_major)
    assert (loads_plans_of(here, built, compatible=False) is None) == (here == built)


@pytest.fixture
def bundle(bundles, tmp_path):
    """A bundle with an engine of TensorRT 8.6 that claims to be version-compatible."""
    folder = copy_of(bundles("tiny-gqa"), tmp_path / "bundle")
    opened = open_bundle(folder)
    precision = PrecisionVerdict(requested="fp16", status=PrecisionStatus.UNKNOWN, counts={})
    nodes = (NodeVerdict(node="attention", profile=0, status=FusionStatus.UNKNOWN),)
    plan = b"ftrt by 8.6"
    manifest = engines.EngineManifest(
        backend="tensorrt", version="8.6.1", gpu=H200, targets=[], model="tiny-gqa", precision="fp16",
        dialect="primitives", profiles=[{n: str(a) for n, a in opened.manifest.spec.axes.items()}],
        bundle_sha256=sha256(folder / MANIFEST), engine_sha256=engines.hashlib.sha256(plan).hexdigest(),
        engine_bytes=len(plan), seconds=1.0, strongly_typed=False, kernels=[], findings=[], notes=[],
        verdict=EngineVerdict(nodes=nodes, precision=precision), options={"version_compatible": True},
    )  # fmt: skip
    engines.write_engine(engines.engine_path(folder, "vc"), plan, manifest)
    return opened


@pytest.fixture
def lean(monkeypatch, in_process):
    """A lean runtime of a version in the place of TensorRT itself."""

    def install(version, backend="tensorrt-lean"):
        module = SimpleNamespace(__name__="lean", __version__=version)
        monkeypatch.setitem(sys.modules, versions.LEAN[backend][-1], module)
        monkeypatch.setitem(sys.modules, "tensorrt", None)
        monkeypatch.setattr(engines, "first_gpu", lambda: H200)

    return install


@pytest.mark.parametrize("backend", ["tensorrt-lean", "tensorrt-dispatch"])
def test_a_lean_runtime_runs_compatible_engines_where_there_is_no_other(bundle, lean, backend):
    lean("10.16.1.11", backend)
    engine = md.open_engine(bundle.path / "engines" / "vc.engine")
    assert load(backend).title.endswith("10.16.1.11")
    assert reasons_not_to_run(engine) == []
    options = {**engine.manifest.options, "version_compatible": False}
    other = engines.Engine(
        path=engine.path, manifest=msgspec.structs.replace(engine.manifest, options=options)
    )
    assert reasons_not_to_run(other) == ["tensorrt is not installed here"]


def test_what_11_refuses_is_said(bundle, lean):
    lean("11.4.0.106")
    engine = md.open_engine(bundle.path / "engines" / "vc.engine")
    with pytest.raises(BackendUnavailable) as caught:
        open_engine_runner(engine, runtime="tensorrt-lean")
    assert "8.6.1" in caught.value.got
    assert "11.4.0.106" in caught.value.got
    assert "plans of 10 and 11" in caught.value.got
    assert misfits(engine, "10.16.1", H200, "tensorrt-lean") == []


def test_a_lean_runtime_that_is_requested_must_be_there_and_have_an_engine(
    bundle, bundles, monkeypatch, in_process
):
    for name in versions.LEAN["tensorrt-lean"]:
        monkeypatch.setitem(sys.modules, name, None)
    quick = {"probe": False, "runtimes": ["tensorrt-lean"]}
    begun = []
    with pytest.raises(BackendUnavailable, match="cannot run here"):
        md.validate(bundle, **quick, on_step=lambda name, *_: begun.append(name))
    assert begun == [], "it is refused before anything is computed"
    bare = open_bundle(copy_of(bundles("tiny-gqa"), bundle.path.parent / "bare"))
    with pytest.raises(DeployError, match="version-compatible engine") as caught:
        md.validate(bare, **quick)
    assert "--version-compatible" in caught.value.hint
