"""Of several candidates for an engine the faster right one is kept, and what each cost is recorded."""

import json
from types import SimpleNamespace

import pytest
from bundle_edit import copy_of, engine_manifest

from mha_deploy.bundle.cases import golden_cases
from mha_deploy.bundle.folder import MANIFEST, open_bundle, sha256
from mha_deploy.engine import build as choose
from mha_deploy.engine.build import Trial, attention_record, build_fastest_engine, choose_trial
from mha_deploy.engine.engine import Engine, attention_summary, engine_path, write_engine
from mha_deploy.engine.lowered import Candidate, candidates_for
from mha_deploy.engine.plugins import PluginError
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.options import EngineOptions

NATIVE = Candidate(attention="native")
NARROW = Candidate(attention="plugin")
WIDE = Candidate(attention="plugin", accumulate="fp32")
ALL = [NATIVE, WIDE, NARROW]
AUTO = EngineOptions(attention="auto")


def trial(candidate, *times, refused=""):
    measured = {str(n): time for n, time in enumerate(times)}
    return Trial(name=candidate.name, options=candidate.applied_to(AUTO), refused=refused, times=measured)


# -- which candidates are open -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attention", "accumulate", "precision", "expected"),
    [
        ("native", "auto", "fp16", [NATIVE]),
        ("native", "fp16", "fp32", [NATIVE]),
        ("plugin", "fp16", "fp16", [NARROW]),
        ("plugin", "fp32", "fp16", [WIDE]),
        ("plugin", "auto", "fp16", [WIDE, NARROW]),
        ("plugin", "auto", "bf16", [NARROW]),
        ("plugin", "fp32", "bf16", [WIDE]),
        ("auto", "auto", "fp16", ALL),
        ("auto", "fp16", "fp16", [NATIVE, NARROW]),
        ("auto", "fp32", "fp16", [WIDE]),
    ],
)
def test_the_options_leave_these_candidates_open(attention, accumulate, precision, expected):
    rt = SimpleNamespace(can=SimpleNamespace(plugins=True, bf16_type=True), title="TensorRT 10")
    options = EngineOptions(attention=attention, accumulate=accumulate)
    found = candidates_for(rt, options, precision)
    assert found == expected
    for candidate in found:
        assert candidates_for(rt, candidate.applied_to(options), precision) == [candidate]


@pytest.mark.parametrize(("mib", "fits"), [(None, True), (31, False), (32, True)])
def test_the_plugins_projections_need_room(mib, fits):
    rt = SimpleNamespace(can=SimpleNamespace(plugins=True, bf16_type=True), title="TensorRT 10")
    options = EngineOptions(attention="plugin", accumulate="fp32", workspace_mib=mib)
    if fits:
        assert candidates_for(rt, options, "fp16") == [WIDE]
        return
    with pytest.raises(DeployError, match="32 MiB") as caught:
        candidates_for(rt, options, "fp16")
    assert "31" in caught.value.got


# -- which one is kept -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("native", "wide", "narrow", "expected"),
    [
        (100.0, 50.0, 49.0, WIDE),  # FP32 within 5 % of the other
        (100.0, 52.0, 49.0, NARROW),  # and beyond
        (40.0, 50.0, 49.0, NATIVE),
        (49.5, 50.0, 49.0, NATIVE),  # native beats the FP32 that would be taken
    ],
)
def test_the_faster_is_kept_and_fp32_may_cost_five_percent(native, wide, narrow, expected):
    trials = [trial(NATIVE, native), trial(WIDE, wide), trial(NARROW, narrow)]
    assert choose_trial(trials).name == expected.name


def test_every_case_counts_alike_however_long_it_is():
    # Ten times faster in the short case, a third slower in the long one.
    assert choose_trial([trial(NATIVE, 10.0, 1000.0), trial(NARROW, 1.0, 1333.0)]).name == NARROW.name


def test_who_answers_wrongly_is_out_however_fast():
    kept = choose_trial([trial(NATIVE, 100.0), trial(NARROW, 1.0, refused="wrong output in opt")])
    assert kept.name == NATIVE.name


def test_where_no_candidate_is_right_all_reasons_are_reported():
    trials = [trial(NATIVE, refused="not fused"), trial(NARROW, refused="wrong answer")]
    with pytest.raises(DeployError, match="No candidate") as caught:
        choose_trial(trials)
    assert caught.value.got == "native: not fused; plugin: wrong answer"


def test_the_record_says_who_and_by_how_much():
    trials = [trial(NATIVE, 100.0), trial(WIDE, 40.0), trial(NARROW, 39.0)]
    reported = attention_record(trials, trials[1], AUTO)
    assert {key: reported[key] for key in ("requested", "chosen", "accumulate")} == {
        "requested": "auto",
        "chosen": "plugin",
        "accumulate": "fp32",
    }
    assert (reported["native_us"], reported["plugin_us"], reported["ratio"]) == (100.0, 40.0, 2.5)
    assert [each["us"] for each in reported["tried"]] == [100.0, 40.0, 39.0]
    assert json.loads(json.dumps(reported)) == reported
    manifest = SimpleNamespace(attention=reported)
    assert "the plugin is 2.50 times as fast" in attention_summary(manifest)


def test_the_record_of_a_choice_between_accumulations_has_no_ratio():
    trials = [trial(WIDE, 40.0), trial(NARROW, 30.0)]
    reported = attention_record(trials, trials[1], EngineOptions(attention="plugin"))
    assert (reported["native_us"], reported["plugin_us"], reported["ratio"]) == (None, 30.0, None)
    words = attention_summary(SimpleNamespace(attention=reported))
    assert words.startswith("plugin, TensorRT's own projections; plugin with projections that accumulate in")


def test_native_that_is_faster_is_reported():
    trials = [trial(NATIVE, 30.0), trial(NARROW, 60.0)]
    words = attention_summary(SimpleNamespace(attention=attention_record(trials, trials[0], AUTO)))
    assert "native is 2.00 times as fast" in words


def test_why_a_candidate_was_not_taken_is_reported():
    trials = [trial(NATIVE, 30.0), trial(NARROW, refused="No such head size.")]
    words = attention_summary(SimpleNamespace(attention=attention_record(trials, trials[0], AUTO)))
    assert "plugin with TensorRT's own projections was not chosen: No such head size." in words


# -- built, judged, timed ----------------------------------------------------------------------------


class Runner:
    """Gives the golden results, or others, in the time of its candidate."""

    def __init__(self, bundle, microseconds, *, wrong=False, narrow=False):
        self.cases = list(golden_cases(bundle))
        self.microseconds, self.wrong, self.narrow, self.closed = microseconds, wrong, narrow, False

    def profiles_for(self, feeds):
        usual = next(case for case in self.cases if case.name == "opt")
        return [] if self.narrow and feeds["x"].shape != usual.inputs["x"].shape else [0]

    def run(self, feeds):
        case = next(case for case in self.cases if case.inputs["x"].shape == feeds["x"].shape)
        return {name: array * (3 if self.wrong else 1) for name, array in case.eager.items()}

    def time(self, feeds):
        self.microseconds -= 1  # the second round is the better one
        return SimpleNamespace(p50=self.microseconds, results=(self.run(feeds),))

    def close(self):
        self.closed = True


@pytest.fixture
def workbench(bundles, tmp_path, monkeypatch):
    """Build and time engines that are nothing but their names."""
    bundle = open_bundle(copy_of(bundles("tiny-gqa"), tmp_path / "bundle"))
    runners = {}
    monkeypatch.setattr(choose, "open_gpu", lambda: None)
    monkeypatch.setattr(choose, "open_engine_runner", lambda engine: runners[engine.path.stem])

    def build(path, options):
        attention = {"requested": options.attention, "chosen": options.attention, "accumulate": "fp16"}
        bundle_sha256 = sha256(bundle.path / MANIFEST)
        manifest = engine_manifest(attention=attention, bundle_sha256=bundle_sha256, plugins=[], in_place={})
        return write_engine(path, path.stem.encode(), manifest)

    def choose_from(given, options=AUTO, build=build):
        runners.update({name: Runner(bundle, **facts) for name, facts in given.items()})
        path = engine_path(bundle.path, "mine")
        engine = build_fastest_engine(
            bundle, options, path, [candidate for candidate in ALL if candidate.name in given], build
        )
        return engine, runners

    return SimpleNamespace(choose=choose_from, bundle=bundle, build=build)


def test_the_faster_engine_is_kept_under_the_name_and_nothing_else_is_left(workbench):
    engine, runners = workbench.choose({"native": {"microseconds": 90}, "plugin": {"microseconds": 50}})
    assert isinstance(engine, Engine)
    assert engine.path.read_bytes() == b"plugin"
    assert sorted(path.name for path in engine.path.parent.iterdir()) == ["mine.engine", "mine.json"]
    reported = json.loads(engine.path.with_suffix(".json").read_text())["attention"]
    assert (reported["chosen"], reported["native_us"], reported["plugin_us"]) == ("plugin", 88, 48)
    assert [list(each["cases"]) for each in reported["tried"]] == [["opt"], ["opt"]]
    assert all(runner.closed for runner in runners.values())


def test_a_wrong_engine_is_not_kept(workbench):
    engine, _ = workbench.choose(
        {"native": {"microseconds": 90}, "plugin": {"microseconds": 50, "wrong": True}}
    )
    assert engine.path.read_bytes() == b"native"
    refused = engine.manifest.attention["tried"][1]["refused"]
    assert refused.startswith("wrong output in opt, output: ")


def test_what_cannot_be_built_is_reported_and_the_other_kept(workbench):
    def build(path, options):
        if options.attention == "plugin":
            raise DeployError("The plugin has no such head size.", got=512, hint="another")
        return workbench.build(path, options)

    given = {"native": {"microseconds": 90}, "plugin": {"microseconds": 50}}
    engine, _ = workbench.choose(given, build=build)
    assert engine.manifest.attention["tried"][1]["refused"] == "The plugin has no such head size. 512"


def test_what_cannot_be_loaded_is_reported_and_the_other_kept(workbench, monkeypatch):
    opened = choose.open_engine_runner

    def open_one(engine):
        if engine.path.stem == "plugin":
            raise DeployError("TensorRT cannot load the engine.", hint="another")
        return opened(engine)

    monkeypatch.setattr(choose, "open_engine_runner", open_one)
    engine, _ = workbench.choose({"native": {"microseconds": 90}, "plugin": {"microseconds": 50}})
    assert engine.path.read_bytes() == b"native"
    assert engine.manifest.attention["tried"][1]["refused"] == "TensorRT cannot load the engine."


def test_a_missing_library_is_no_reason_to_choose_the_other(workbench):
    def build(path, options):
        raise PluginError("There is no plugin library.", hint="another")

    with pytest.raises(PluginError):
        workbench.choose({"native": {"microseconds": 90}}, build=build)
    assert list((workbench.bundle.path / "engines").glob("*")) == []


def test_only_cases_that_the_profiles_admit_are_timed(workbench, monkeypatch):
    engine, _ = workbench.choose({"native": {"microseconds": 90, "narrow": True}})
    assert list(engine.manifest.attention["tried"][0]["cases"]) == ["opt"]
    monkeypatch.setattr(Runner, "profiles_for", lambda self, feeds: [])
    with pytest.raises(DeployError, match="No golden case of the bundle"):
        workbench.choose({"native": {"microseconds": 90}})


def test_without_a_gpu_it_says_that_it_has_to_be_measured(workbench, monkeypatch):
    def none():
        raise BackendUnavailable("There is no CUDA GPU to run on.", got="cudaErrorNoDevice")

    monkeypatch.setattr(choose, "open_gpu", none)
    with pytest.raises(BackendUnavailable, match="has to be measured") as caught:
        workbench.choose({"native": {"microseconds": 90}})
    assert 'attention="auto" accumulate="auto": There is no CUDA GPU' in caught.value.got
    assert not (workbench.bundle.path / "engines").exists()
