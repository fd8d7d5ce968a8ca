"""Packaged bundles behind a small server, and bundles with engines."""

import shutil
import sys
import time
from pathlib import Path

import msgspec
import pytest

sys.path.append(str(Path(__file__).parent))

from small_server import Kserve


@pytest.fixture
def served(bundles, tmp_path, monkeypatch):
    """A function that packages a bundle, loads it and serves it; closed at the end of the test."""
    pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
    import mha_deploy as md
    from mha_deploy.runtime.child import isolation
    from mha_deploy.serving.backend import ServedModel

    opened = []

    def serve(name, *, bundle=None, **handlers):
        monkeypatch.setattr(isolation, "enabled", isolation.enabled)  # loading a served model disables it
        package = md.package(
            bundle or bundles(name), tmp_path / "models", runtimes=["ort-cpu"], overwrite=True
        )
        model = ServedModel(
            package.path / "1", package.runtimes, batched=package.max_batch > 0, sequences=package.max_batch
        )
        server = Kserve(package.path, model, **handlers)
        opened.extend([server, model])
        return server

    yield serve
    for each in opened:
        if isinstance(each, Kserve):
            each.shutdown()
            each.server_close()
        else:
            each.close()


@pytest.fixture
def with_engines(bundles, tmp_path):
    """A function that gives a bundle with engines that nothing can run, one for each set of changes."""
    import hashlib

    from mha_deploy.bundle.folder import MANIFEST, open_bundle, sha256
    from mha_deploy.engine.engine import EngineManifest, default_profiles, write_engine

    def make(name, *changes, precision="fp16"):
        folder = Path(shutil.copytree(bundles(name, precision).path, tmp_path / f"with-engines-{name}"))
        manifest = open_bundle(folder, verify=False).manifest
        (folder / "engines").mkdir(exist_ok=True)
        for index, each in enumerate(changes):
            profiles = each.get("profiles") or [
                {axis: str(range_) for axis, range_ in ranges.items()}
                for ranges in default_profiles(manifest.spec)
            ]
            plan = b"ftrt" + bytes([index]) * 64
            nodes = [
                {"node": str(node["name"]), "profile": profile, "status": "unknown", "kernels": [],
                 "reasons": [], "sources": ["log"]}
                for node in manifest.attention
                for profile in range(len(profiles))
            ]  # fmt: skip
            known = {
                "requested": precision, "status": "unknown", "counts": {}, "offenders": [], "islands": [],
                "reasons": [], "has_untyped": False, "written": [],
            }  # fmt: skip
            record = EngineManifest(
                backend="tensorrt",
                version="10.3.0",
                gpu={"name": "NVIDIA H200", "compute_cap": "9.0"},
                targets=[],
                model=manifest.spec.name,
                precision=precision,
                dialect="trt",
                profiles=profiles,
                bundle_sha256=sha256(folder / MANIFEST),
                engine_sha256=hashlib.sha256(plan).hexdigest(),
                engine_bytes=len(plan),
                seconds=0.0,
                strongly_typed=True,
                verdict={"nodes": nodes, "precision": known, "disagreements": []},
                kernels=[],
                options={},
                findings=[],
                notes=[],
            )
            record = msgspec.structs.replace(record, **{k: v for k, v in each.items() if k != "profiles"})
            write_engine(folder / "engines" / f"engine-{index}.engine", plan, record)
        return folder

    return make


def wait_until(happened, seconds=10.0):
    """Wait for an event that a thread brings about."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)
