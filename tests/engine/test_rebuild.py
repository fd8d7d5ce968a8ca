"""How much an engine differs from build to build."""

import shutil
from types import SimpleNamespace

import pytest

import mha_deploy as md
from mha_deploy.engine.rebuild import differing_kernels, rebuild_summary


def built(*tactics):
    kernels = [
        {"name": f"kernel {number}", "tactic": tactic, "nodes": [f"node {number}"], "profile": 0}
        for number, tactic in enumerate(tactics)
    ]
    return SimpleNamespace(manifest=SimpleNamespace(kernels=kernels))


def test_kernels_that_differ_are_listed_by_node():
    assert differing_kernels([built("a", "b"), built("a", "b")]) == []
    (found,) = differing_kernels([built("a", "b"), built("a", "c"), built("a", "b")])
    assert (found["nodes"], found["kernels"]) == ("node 1", [["b"], ["c"], ["b"]])
    (gone,) = differing_kernels([built("a", "b"), built("a")])
    assert gone["kernels"] == [["b"], []]


def test_builds_of_tensorrt_rtx_are_identical(bundles, tmp_path, run_cli):
    pytest.importorskip("tensorrt_rtx")
    bundle = shutil.copytree(bundles("tiny-gqa").path, tmp_path / "bundle")
    done = run_cli("build-engine", bundle, "--backend", "tensorrt-rtx", "--repeat", "2")
    assert done.code == 0, done.err
    assert "2 builds: identical plans" in done.out
    (path,) = (bundle / "engines").glob("*.engine")
    record = md.open_engine(path).manifest.rebuilds
    assert (record["builds"], record["identical"], record["differing"]) == (2, True, [])
    assert len(record["seconds"]) == len(record["engine_bytes"]) == 2
    assert record["timing_cache"] is None  # it has no effect there
    assert record["errors"] == record["times_us"] == {} or md.doctor()["gpus"]
    assert [each.name for each in (bundle / "engines").iterdir() if each.name.startswith(".")] == []
    assert md.compare(path, path).passed
    with pytest.raises(md.DeployError, match="engine of that name"):
        md.build_engine(bundle, backend="tensorrt-rtx", repeat=2)
    with pytest.raises(md.DeployError, match="from two on"):
        md.build_engine(bundle, backend="tensorrt-rtx", repeat=0, overwrite=True)


def test_what_differs_is_said_in_sentences():
    record = {
        "builds": 2, "identical": False,
        "differing": [{"nodes": "q", "profile": 0, "kernels": [["a"], ["b"]]}],
        "fused": [[1, 1], [0, 1]], "seconds": [1.0, 2.0], "engine_bytes": [5, 5],
        "errors": {"opt/output": [0.4, None, 0.5]}, "times_us": {"opt": [10.0, 12.0]}, "timing_cache": False,
    }  # fmt: skip
    text = "\n".join(rebuild_summary(record))
    for part in ("plans differ", "q: a / b", "1/1, 0/1", "10 to 12 µs", "40% to 50%", "other kernels"):
        assert part in text
