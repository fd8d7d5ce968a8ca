"""How much an engine differs from build to build."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from bundle_edit import engine_manifest

import mha_deploy as md
from mha_deploy.engine import build as rebuild
from mha_deploy.engine.build import differing_kernels
from mha_deploy.engine.engine import DifferingKernels, Engine, RebuildRecord, rebuild_summary
from mha_deploy.options import EngineOptions
from mha_deploy.validation.runtimes import TENSORRT, Runtime


def built(*tactics):
    kernels = [
        {"name": f"kernel {number}", "tactic": tactic, "nodes": [f"node {number}"], "profile": 0}
        for number, tactic in enumerate(tactics)
    ]
    return SimpleNamespace(manifest=SimpleNamespace(kernels=kernels))


def test_kernels_that_differ_are_listed_by_node():
    assert differing_kernels([built("a", "b"), built("a", "b")]) == []
    (found,) = differing_kernels([built("a", "b"), built("a", "c"), built("a", "b")])
    assert (found.nodes, found.kernels) == (["node 1"], [["b"], ["c"], ["b"]])
    (gone,) = differing_kernels([built("a", "b"), built("a")])
    assert gone.kernels == [["b"], []]


def test_builds_of_tensorrt_rtx_are_identical(bundles, tmp_path, run_cli):
    pytest.importorskip("tensorrt_rtx")
    bundle = shutil.copytree(bundles("tiny-gqa").path, tmp_path / "bundle")
    done = run_cli("build-engine", bundle, "--backend", "tensorrt-rtx", "--repeat", "2")
    assert done.code == 0, done.err
    (path,) = (bundle / "engines").glob("*.engine")
    record = md.open_engine(path).manifest.rebuilds
    # RTX times no kernels at build time. If plans differ all the same, the record shows in what.
    assert (record.builds, record.identical, record.differing) == (2, True, []), record
    assert "2 builds: identical plans" in done.out
    assert len(record.seconds) == len(record.engine_bytes) == 2
    assert record.timing_cache is None  # it has no effect there
    assert record.errors == record.times_us == {} or md.doctor()["gpus"]
    assert [each.name for each in (bundle / "engines").iterdir() if each.name.startswith(".")] == []
    assert md.compare(path, path).passed
    with pytest.raises(md.DeployError, match="engine already exists"):
        md.build_engine(bundle, backend="tensorrt-rtx", repeat=2)
    with pytest.raises(md.DeployError, match="at least two builds"):
        md.build_engine(bundle, backend="tensorrt-rtx", repeat=0, overwrite=True)


def test_an_engine_that_another_program_built_meanwhile_stays(bundles, tmp_path, monkeypatch):
    pytest.importorskip("tensorrt_rtx")
    bundle = shutil.copytree(bundles("tiny-gqa").path, tmp_path / "bundle")
    others = []

    def meanwhile(trials, *_):
        folder = bundle / "engines"
        for source in trials[0].built.path.parent.glob("1 of 2.*"):
            others.append(Path(shutil.copy(source, folder / f"tensorrt-rtx{source.suffix}")))

    monkeypatch.setattr(rebuild, "measure_builds", meanwhile)
    with pytest.raises(md.DeployError, match="in the meantime"):
        md.build_engine(bundle, backend="tensorrt-rtx", repeat=2)
    assert sorted(path.suffix for path in others) == [".engine", ".json"]


class OnTheCpu:
    """A runner in place of an engine: the graph of the bundle, with a time that grows from build to build."""

    opened = 0

    def __init__(self, engine, bundle):
        OnTheCpu.opened += 1
        self.runner, self.p50 = md.open_runner(bundle), 10.0 * OnTheCpu.opened

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.runner.close()

    def profiles_for(self, inputs):
        return [0]

    def run(self, inputs):
        return self.runner.run(inputs)

    def time(self, inputs):
        return SimpleNamespace(p50=self.p50)


def test_errors_and_times_of_every_build_are_recorded(bundles, monkeypatch):
    bundle = bundles("tiny-gqa")
    monkeypatch.setattr(rebuild, "reasons_not_to_run", lambda engine: [])
    monkeypatch.setattr(rebuild, "open_engine_runner", lambda engine: OnTheCpu(engine, bundle))
    engines = [Engine(path=Path(name), manifest=engine_manifest()) for name in "ab"]
    trials = [rebuild.Trial(name=each.path.name, options=EngineOptions(), engine=each) for each in engines]
    rebuild.measure_builds(trials, bundle)
    assert [trial.times for trial in trials] == [{"opt": 10.0}, {"opt": 20.0}]
    cases = {case.name for case in bundle.manifest.golden}
    for trial in trials:
        assert set(trial.judged) == cases
        assert all(0 < found["output"] < 1 for found in trial.judged.values())


def test_what_differs_is_said_in_sentences():
    changed = DifferingKernels(nodes=["q", "k"], profile=0, kernels=[["a"], ["b"]])
    record = {
        "builds": 2, "identical": False,
        "differing": [changed],
        "fused": [[1, 1], [0, 1]], "seconds": [1.0, 2.0], "engine_bytes": [5, 5],
        "errors": {"opt": {"output": [0.4, None, 0.5]}}, "times_us": {"opt": [10.0, 12.0]},
        "timing_cache": False,
    }  # fmt: skip
    text = "\n".join(rebuild_summary(RebuildRecord(**record)))
    for part in ("plans differ", "q, k: a / b", "1/1, 0/1", "10 to 12 µs", "40% to 50%", "other kernels"):
        assert part in text


@pytest.mark.parametrize("version", ["8.6.1", "11.1.0"])
def test_builds_are_judged_with_the_accumulation_that_validate_assumes(version, bundles, monkeypatch):
    bundle, judged = bundles("tiny-gqa"), []
    monkeypatch.setattr(rebuild, "reasons_not_to_run", lambda engine: [])
    monkeypatch.setattr(rebuild, "open_engine_runner", lambda engine: OnTheCpu(engine, bundle))
    own = rebuild.judge_case
    monkeypatch.setattr(
        rebuild, "judge_case", lambda case, result, as_: judged.append(as_) or own(case, result, as_)
    )
    engine = Engine(path=Path("a"), manifest=engine_manifest(backend="tensorrt", version=version))
    rebuild.measure_builds([rebuild.Trial(name="a", options=EngineOptions(), engine=engine)], bundle)
    shown = Runtime(name="tensorrt", family=TENSORRT, open=lambda: None, engine=engine)
    assert judged
    assert {each.accumulate for each in judged} == {shown.accumulation(bundle.manifest.precision).type}
