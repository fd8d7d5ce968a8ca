"""What engines do to a verdict, with stand-ins for engines: this machine may have no GPU to run one on."""

import numpy as np
import pytest
from bundle_edit import copy_of

from mha_deploy.bundle.cases import golden_cases
from mha_deploy.bundle.folder import open_bundle
from mha_deploy.engine.build import engine_from_bundle
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.options import EngineOptions, ValidateOptions
from mha_deploy.runtime.runner import Runner
from mha_deploy.validate.run import validate_bundle
from mha_deploy.validate.runtimes import RuntimeFinder


class Stand(Runner):
    """Answers with the eager result of a golden case, times a factor; profiles up to some length."""

    def __init__(self, bundle, *, factor=1.0, longest=1000, name="tensorrt-rtx 1.7"):
        self.cases = list(golden_cases(bundle))
        self.factor, self.longest, self.name = factor, longest, name
        self.inputs, self.outputs = {}, {}

    def run(self, feeds):
        for case in self.cases:
            if case.inputs["x"].shape == feeds["x"].shape and np.array_equal(case.inputs["x"], feeds["x"]):
                return {
                    name: (array.astype(np.float64) * self.factor).astype(array.dtype)
                    for name, array in case.eager.items()
                }
        raise DeployError("A stand-in knows golden cases only.")

    _run = run

    def profiles_for(self, feeds):
        return [0] if feeds["x"].shape[1] <= self.longest else []

    def run_in_profile(self, feeds, profile):
        return self.run(feeds)


@pytest.fixture(scope="module")
def bundle(bundles, tmp_path_factory):
    """A bundle with an engine in it."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    opened = open_bundle(copy_of(bundles("tiny-gqa"), tmp_path_factory.mktemp("engines") / "bundle"))
    engine_from_bundle(opened, EngineOptions(backend="tensorrt-rtx", targets="8.9"))
    return opened


@pytest.fixture
def running(bundle, monkeypatch):
    """Let the engine run, as the given stand-in does; `open_` raises or gives a runner."""

    def let(open_):
        monkeypatch.setattr("mha_deploy.validate.runtimes.reasons_not_to_run", lambda engine: [])
        monkeypatch.setattr("mha_deploy.validate.runtimes.open_engine_runner", lambda engine: open_())
        monkeypatch.setattr("mha_deploy.validate.evaluate.invariance_from_runner", lambda *given: ())
        return validate_bundle(bundle, ValidateOptions(sweep=False, latency=False, probe=False))

    return let


def levels(report):
    return [(finding.level, finding.section) for finding in report.findings]


def test_a_right_engine_passes_and_speaks_in_the_headline(running, bundle):
    report = running(lambda: Stand(bundle))
    assert report.passed, report.findings
    start = "tensorrt-rtx 1.7: 4/4 outputs within budget, 1/1 fused, precision: fp16 (verified)"
    assert report.headline.startswith(start)
    (engine,) = report.to_dict()["engines"]
    assert (engine["ran"], engine["why_not"]) == (True, None)


def test_a_wrong_engine_fails_and_somebody_is_blamed(running, bundle, monkeypatch):
    monkeypatch.setattr("mha_deploy.validate.run.lowered_opener", lambda *given: pytest.fail)
    monkeypatch.setattr(
        "mha_deploy.validate.run.attribute_fault", lambda bundle, cases, opener, accumulate: attributed(cases)
    )
    seen = []

    def attributed(cases):
        from mha_deploy.validate.fault import FaultReport

        seen.extend(case.name for case in cases)
        return FaultReport(at_fault="fusion", explanation="It is.", trials=())

    report = running(lambda: Stand(bundle, factor=1.5))
    assert not report.passed
    assert report.headline.startswith("tensorrt-rtx 1.7 is wrong on 4 of 4 outputs (golden; ")
    assert seen == [case.name for case in golden_cases(bundle)]
    assert any(finding.text.startswith("at fault: fusion") for finding in report.findings)


def test_an_engine_that_was_compared_with_nothing_fails(running, bundle):
    report = running(lambda: Stand(bundle, longest=0))
    assert not report.passed
    assert levels(report)[0] == ("failure", "engine")
    assert "was compared with nothing" in report.headline


def test_cases_outside_the_profiles_are_told_and_do_not_fail(running, bundle):
    report = running(lambda: Stand(bundle, longest=16))
    assert report.passed
    assert ("note", "engine") in levels(report)


def test_an_engine_that_cannot_be_loaded_fails_and_the_report_is_there(running):
    def broken():
        raise DeployError("TensorRT cannot load this engine.", got="out of memory")

    report = running(broken)
    assert not report.passed
    assert levels(report)[0] == ("failure", "engine")
    assert "TensorRT cannot load this engine. out of memory" in report.headline
    assert report.to_dict()["engines"][0]["ran"] is False


def test_a_runtime_that_is_missing_after_all_is_absence_and_no_failure(running):
    def missing():
        raise BackendUnavailable("NVIDIA's cuda-bindings are not installed.")

    report = running(missing)
    assert report.passed
    assert any("cuda-bindings are not installed" in finding.text for finding in report.findings)


def test_an_engine_of_other_inputs_has_failed(running, bundle):
    class Foreign(Stand):
        def profiles_for(self, feeds):
            raise DeployError("The inputs have other names.")

        def run(self, feeds):
            raise DeployError("The inputs have other names.")

    report = running(lambda: Foreign(bundle))
    assert not report.passed
    assert "could not be run: The inputs have other names." in report.headline


def test_somebody_who_is_asked_for_by_name_and_wrong_fails(bundle, monkeypatch):
    """A PyTorch baseline too: that it is only a baseline elsewhere is no excuse here."""
    wrong = Stand(bundle, factor=1.5, name="torch eager")
    monkeypatch.setattr(RuntimeFinder, "_open_torch", lambda self, name: wrong)
    report = validate_bundle(bundle, ValidateOptions(backends=("eager",), latency=False, probe=False))
    assert not report.passed
    assert "wrong on 4 of 4 outputs" in report.headline


def test_a_graph_that_the_gpu_runtime_refuses_is_judged_on_the_cpu(bundle, monkeypatch):
    from mha_deploy.validate import runtimes as runtimes

    def refuses():
        raise DeployError("ONNX Runtime would run nodes on the CPU.", got="TopK gate")

    def graphs(self):
        cuda = runtimes.Runtime(name="ort-cuda", family="onnxruntime", open=refuses)
        return [cuda, self._graph("ort-cpu")]

    monkeypatch.setattr(RuntimeFinder, "graphs", graphs)
    report = validate_bundle(bundle)
    assert report.passed
    assert [each.runtime.name for each in report.evaluations] == ["ort-cpu"]
    notes = report.to_dict()["notes"]
    assert any("ort-cuda did not take part: ONNX Runtime would run" in note for note in notes)


def test_an_engine_named_with_an_option_must_run(bundle):
    from mha_deploy.runtime.cuda import find_gpu

    if find_gpu() is not None:
        pytest.skip("there is a GPU")
    with pytest.raises(BackendUnavailable, match="cannot run here"):
        validate_bundle(bundle, ValidateOptions(engine="tensorrt-rtx"))
    with pytest.raises(BackendUnavailable, match="no CUDA GPU"):
        validate_bundle(bundle, ValidateOptions(latency=True))


@pytest.mark.parametrize("wrong", [False, True])
def test_only_wrong_numbers_are_blamed_on_somebody(running, bundle, monkeypatch, wrong):
    """What could not be run says why itself, and twins take minutes to build."""
    asked = []

    class GivesUp(Stand):
        def run(self, feeds):
            if wrong and feeds["x"].shape == self.cases[1].inputs["x"].shape:
                return super().run(feeds)
            raise DeployError("TensorRT cannot prepare profile 0.", got="no execution context: Myelin")

    def attributed(bundle, cases, opener, accumulate):
        asked.append([case.name for case in cases])

    monkeypatch.setattr("mha_deploy.validate.run.lowered_opener", lambda *given: None)
    monkeypatch.setattr("mha_deploy.validate.run.attribute_fault", attributed)
    report = running(lambda: GivesUp(bundle, factor=1.5))
    assert not report.passed
    assert "is wrong on 4 of 4 outputs (golden; " in report.headline
    assert "no execution context: Myelin" in report.headline
    assert asked == ([[list(golden_cases(bundle))[1].name]] if wrong else [])
