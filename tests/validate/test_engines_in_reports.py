"""What engines do to a verdict, with stand-ins for engines: this machine may have no GPU to run one on."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from bundle_edit import copy_of
from msgspec import structs

from mha_deploy.bundle.cases import golden_cases
from mha_deploy.bundle.folder import open_bundle
from mha_deploy.engine.build import engine_from_bundle
from mha_deploy.engine.engine import Engine, engines_of
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.files import as_plain
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.options import EngineOptions, ValidateOptions
from mha_deploy.report.page import report_page
from mha_deploy.runtime.cuda import find_gpu
from mha_deploy.runtime.runner import Runner, TensorInfo
from mha_deploy.runtime.tensorrt.engine_verdict import EngineReason, PrecisionStatus
from mha_deploy.status import Kind, ReasonKind
from mha_deploy.validation import runtimes
from mha_deploy.validation.evaluate import EvaluationPlan, evaluate
from mha_deploy.validation.fault import FaultReport
from mha_deploy.validation.run import validate_bundle
from mha_deploy.validation.runtimes import ONNX_RUNTIME, TENSORRT, Runtime, RuntimeFinder


class Stand(Runner):
    """Answers with the eager result of a golden case, times a factor; profiles up to some length."""

    def __init__(
        self, bundle, *, factor=1.0, only=None, fails_at=None, longest=1000, name="tensorrt-rtx 1.7"
    ):
        self.cases, self.asked = list(golden_cases(bundle)), []
        self.factor, self.only, self.fails_at = factor, only, fails_at
        self.longest, self.name, self.inputs, self.outputs = longest, name, {}, {}

    def run(self, feeds):
        for case in self.cases:
            if case.inputs["x"].shape == feeds["x"].shape and np.array_equal(case.inputs["x"], feeds["x"]):
                self.asked.append(case.name)
                if case.name == self.fails_at:
                    raise DeployError("Myelin gave up.", got="cudaMemcpy2DAsync", hint="another")
                factor = self.factor if self.only in (None, case.name) else 1.0
                return {
                    name: (array.astype(np.float64) * factor).astype(array.dtype)
                    for name, array in case.eager.items()
                }
        raise DeployError("A stand-in knows golden cases only.", hint="another")

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

    def let(open_, **options):
        monkeypatch.setattr("mha_deploy.validation.runtimes.reasons_not_to_run", lambda engine: [])
        monkeypatch.setattr("mha_deploy.validation.runtimes.open_engine_runner", lambda engine: open_())
        monkeypatch.setattr("mha_deploy.validation.evaluate.invariance_from_runner", lambda *given: ())
        return validate_bundle(bundle, ValidateOptions(sweep=False, latency=False, probe=False, **options))

    return let


def levels(report):
    return [(finding.level, finding.section) for finding in report.findings]


def test_a_right_engine_passes_and_speaks_in_the_headline(running, bundle):
    report = running(lambda: Stand(bundle))
    assert report.passed, report.findings
    start = "tensorrt-rtx 1.7: 4/4 outputs within budget, 1/1 fused, precision: fp16 (I/O types verified"
    assert report.headline.startswith(start)
    # What the headline says of precision and coverage is not told again.
    told = {finding.kind for finding in report.findings if finding.in_headline}
    assert told == {finding.kind for finding in report.findings if finding.level == "note"}
    assert "engine precision" in told
    (engine,) = as_plain(report.record)["engines"]
    assert (engine["ran"], engine["why_not"]) == (True, None)


OF_FP32 = EngineReason(kind=ReasonKind.COMPUTE_TYPE, place="this_kernel", wanted="fp32")
UNTYPED = EngineReason(kind=ReasonKind.UNTYPED, place="this_kernel", wanted="fp16")


def with_precision(engine, status, reason):
    """The engine with another verdict on its precision."""
    judged = structs.replace(
        engine.manifest.verdict.precision, status=PrecisionStatus(status), reasons=(reason,)
    )
    manifest = structs.replace(
        engine.manifest, verdict=structs.replace(engine.manifest.verdict, precision=judged)
    )
    return dataclasses.replace(engine, manifest=manifest)


@pytest.fixture
def judged_as(monkeypatch):
    """Let the engines of all bundles have a verdict on their precision."""

    def let(status, reason=UNTYPED):
        found = "mha_deploy.validation.runtimes.engines_of"
        monkeypatch.setattr(
            found, lambda path: [with_precision(each, status, reason) for each in engines_of(path)]
        )

    return let


def test_deploy_demands_the_precision_and_validate_where_it_is_told_to(bundle, judged_as, run_cli, tmp_path):
    """As the README's table of exit codes says."""
    quick = ("--no-report", "--no-latency", "--no-probe", "--no-sweep")
    validate = ("validate", bundle.path, "--runtime", "ort-cpu", *quick)
    for status, code in (("selected at load", 0), ("mixed", 1), ("unknown", 1)):
        judged_as(status)
        assert run_cli(*validate).code == 0
        assert run_cli(*validate, "--require-precision").code == code
    options = ("--backend", "tensorrt-rtx", "--golden", "opt", "--no-latency", "-o", tmp_path / "out")
    assert run_cli("deploy", "tiny-mha", *options).code == 1


@pytest.mark.parametrize(
    ("status", "reason", "fails"),
    [("unknown", OF_FP32, False), ("unknown", UNTYPED, True), ("mixed", OF_FP32, True)],
)
def test_what_kernels_of_fp32_do_not_record_fails_only_where_a_user_demands_it(
    running, bundle, judged_as, status, reason, fails
):
    judged_as(status, reason)
    for option, is_strict in (("require_recorded_types", False), ("require_precision", True)):
        report = running(lambda: Stand(bundle), **{option: True})
        (found,) = [each for each in report.findings if each.kind is Kind.ENGINE_PRECISION]
        assert (found.level == "failure") is (report.outcome == "failed") is (fails or is_strict)
        assert not found.required_by or found.required_by == ("require_precision",)
        assert ("--require-precision" in found.text) is (is_strict and not fails)


@pytest.mark.parametrize("status", ["unknown", "mixed"])
def test_why_a_precision_is_not_verified_is_shown_wherever_that_is(running, bundle, judged_as, status):
    judged_as(status)
    report = running(lambda: Stand(bundle))
    (found,) = [each for each in report.findings if each.kind is Kind.ENGINE_PRECISION]
    for text in (found.text, report.headline, report_page(as_plain(report.record)), str(found.detail)):
        assert "this_kernel" in text


def test_a_wrong_engine_fails_and_the_fault_is_attributed(running, bundle, monkeypatch):
    monkeypatch.setattr("mha_deploy.validation.run.lowered_opener", lambda *given: pytest.fail)
    monkeypatch.setattr(
        "mha_deploy.validation.run.attribute_fault", lambda bundle, cases, *_: attributed(cases)
    )
    seen = []

    def attributed(cases):
        seen.extend(case.name for case in cases)
        return FaultReport(at_fault="fusion", explanation="It is.", trials=())

    report = running(lambda: Stand(bundle, factor=1.5))
    assert not report.passed
    assert report.headline.startswith("tensorrt-rtx 1.7 is wrong on 4 of 4 outputs (golden; ")
    assert [finding.in_headline for finding in report.findings] == [True] + [False] * (
        len(report.findings) - 1
    )
    assert seen == [case.name for case in golden_cases(bundle)]
    assert any(finding.text.startswith("at fault: fusion") for finding in report.findings)


def test_an_engine_that_was_compared_with_nothing_fails(running, bundle):
    report = running(lambda: Stand(bundle, longest=0))
    assert not report.passed
    assert levels(report)[0] == ("failure", "engine")
    assert "was not compared" in report.headline


def test_cases_outside_the_profiles_are_reported_and_do_not_fail(running, bundle):
    report = running(lambda: Stand(bundle, longest=16))
    assert report.passed
    assert ("note", "engine") in levels(report)


def test_an_engine_that_cannot_be_loaded_fails_and_the_report_is_there(running):
    def broken():
        raise DeployError("TensorRT cannot load this engine.", got="out of memory", hint="another")

    report = running(broken)
    assert not report.passed
    assert levels(report)[0] == ("failure", "engine")
    assert "TensorRT cannot load this engine. out of memory" in report.headline
    assert as_plain(report.record)["engines"][0]["ran"] is False


def test_a_runtime_that_is_missing_after_all_is_absence_and_no_failure(running):
    def missing():
        raise BackendUnavailable("NVIDIA's cuda-bindings are not installed.")

    report = running(missing)
    assert report.outcome == "not verified"
    assert any("cuda-bindings are not installed" in finding.text for finding in report.findings)


def test_an_engine_of_other_inputs_has_failed(running, bundle):
    class Foreign(Stand):
        def profiles_for(self, feeds):
            raise DeployError("The names of the inputs do not match.", hint="another")

        def run(self, feeds):
            raise DeployError("The names of the inputs do not match.", hint="another")

    report = running(lambda: Foreign(bundle))
    assert not report.passed
    assert "could not be run: The names of the inputs do not match." in report.headline


def test_a_runtime_requested_by_name_and_wrong_fails(bundle, monkeypatch):
    """A PyTorch baseline too: that it is only a baseline elsewhere is no excuse here."""
    wrong = Stand(bundle, factor=1.5, name="torch eager")
    monkeypatch.setattr(RuntimeFinder, "_open_torch", lambda self, name: wrong)
    report = validate_bundle(bundle, ValidateOptions(runtimes=("eager",), latency=False, probe=False))
    assert not report.passed
    assert "wrong on 4 of 4 outputs" in report.headline


def test_a_graph_that_the_gpu_runtime_refuses_is_judged_on_the_cpu(bundle, monkeypatch):
    def refuses():
        raise DeployError("ONNX Runtime would run nodes on the CPU.", got="TopK gate", hint="another")

    def graphs(self):
        cuda = Runtime(name="ort-cuda", family="onnxruntime", open=refuses)
        return [cuda, self._graph("ort-cpu")]

    monkeypatch.setattr(RuntimeFinder, "graphs", graphs)
    report = validate_bundle(bundle)
    assert report.outcome == "not verified"
    assert [each.runtime.name for each in report.evaluations] == ["ort-cpu"]
    absent = {each["name"]: each["reason"] for each in as_plain(report.record)["absent"]}
    assert absent["ort-cuda"].startswith("ONNX Runtime would run")


def test_an_engine_named_with_an_option_must_run(bundle):
    if find_gpu() is not None:
        pytest.skip("there is a GPU")
    with pytest.raises(BackendUnavailable, match="cannot run here"):
        validate_bundle(bundle, ValidateOptions(engine="tensorrt-rtx"))
    with pytest.raises(BackendUnavailable, match="no CUDA GPU"):
        validate_bundle(bundle, ValidateOptions(latency=True))


@pytest.mark.parametrize("wrong", [False, True])
def test_only_wrong_numbers_are_attributed(running, bundle, monkeypatch, wrong):
    """What could not be run says why itself, and twins take minutes to build."""
    asked = []

    class GivesUp(Stand):
        def run(self, feeds):
            if wrong and feeds["x"].shape == self.cases[1].inputs["x"].shape:
                return super().run(feeds)
            raise DeployError(
                "TensorRT cannot prepare profile 0.", got="no execution context: Myelin", hint="another"
            )

    def attributed(bundle, cases, opener, accumulate):
        asked.append([case.name for case in cases])

    monkeypatch.setattr("mha_deploy.validation.run.lowered_opener", lambda *given: None)
    monkeypatch.setattr("mha_deploy.validation.run.attribute_fault", attributed)
    report = running(lambda: GivesUp(bundle, factor=1.5))
    assert not report.passed
    (found,) = [each for each in report.findings if each.kind is Kind.WRONG_OUTPUTS]
    assert (found.numbers["failed"], found.numbers["not_run"]) == (4, 3 if wrong else 4)
    assert "no execution context: Myelin" in report.headline
    assert asked == ([[list(golden_cases(bundle))[1].name]] if wrong else [])


# -- one runtime in a plan: what an engine is not built for is left out, what it fails on is a verdict --


def verdict(accumulate_in_fp16=(), selected_at_load=()):
    """What an engine's manifest says of its GEMMs."""
    names = {"accumulate_in_fp16": accumulate_in_fp16, "selected_at_load": selected_at_load}
    return SimpleNamespace(precision=SimpleNamespace(**names))


MANIFEST = SimpleNamespace(
    backend="tensorrt",
    version="11.4.0",
    verdict=verdict(),
    attention={"chosen": "native", "accumulate": "fp16"},
)


@pytest.fixture(scope="module")
def plain(bundles):
    return bundles("tiny-gqa")


def evaluated(plain, *, engine=True, invariance=False, **options):
    """What becomes of a stand-in on the golden cases, and the stand-in."""
    runner, manifest = Stand(plain, **options), plain.manifest
    runtime = Runtime(
        name="engine",
        family=TENSORRT if engine else ONNX_RUNTIME,
        open=lambda: runner,
        engine=Engine(path=Path("plugin.engine"), manifest=MANIFEST) if engine else None,
    )
    plan = EvaluationPlan(
        spec=manifest.spec,
        precision=manifest.precision,
        cases={"golden": runner.cases},
        invariance=invariance,
    )
    return evaluate(runtime, plan), runner


def test_cases_outside_the_profiles_are_left_out(plain):
    result, runner = evaluated(plain, longest=16)
    longer = {case.name for case in runner.cases if case.sizes["S"] > 16}
    assert longer
    assert set(result.outside) == longer
    assert set(runner.asked).isdisjoint(longer)
    assert result.parity[0].passed
    assert {each.case for each in result.parity[0].verdicts} == {c.name for c in runner.cases} - longer


def test_what_is_judged_names_its_engine(plain):
    """The runtime alone does not: two engines of one TensorRT share it."""
    result, _ = evaluated(plain, invariance=True)
    found = [*result.parity, *result.invariance, *result.heatmaps]
    assert {type(each).__name__ for each in found} == {"ParityReport", "InvarianceCheck", "Heatmap"}
    assert {each.engine for each in found} == {"plugin"}
    graph, _ = evaluated(plain, engine=False)
    assert {each.engine for each in (*graph.parity, *graph.heatmaps)} == {None}


def test_an_engine_that_gives_up_on_a_case_has_failed_it(plain):
    result, _ = evaluated(plain, fails_at="odd")
    (report,) = result.parity
    assert not report.passed
    assert not result.is_right
    (failed,) = [each for each in report.verdicts if not each.passed]
    assert failed.case == "odd"
    assert failed.problem == "could not be run: Myelin gave up. cudaMemcpy2DAsync"
    assert (failed.deviation, failed.share) == (None, None)


def test_a_runtime_that_gives_up_is_an_error_and_no_verdict(plain):
    with pytest.raises(DeployError, match="Myelin gave up"):
        evaluated(plain, fails_at="odd", engine=False)


def test_there_is_a_map_of_the_usual_case_or_of_what_is_wrong(plain):
    assert [heat.case for heat in evaluated(plain)[0].heatmaps] == ["opt"]
    wrong, _ = evaluated(plain, factor=2.0, only="odd")
    assert {heat.case for heat in wrong.heatmaps} == {"odd", "opt"}
    (odd,) = [heat for heat in wrong.heatmaps if heat.case == "odd"]
    assert np.nanmax(np.array(odd.values, float)) > 0.5


# -- the type that a runtime accumulates in -----------------------------------------------------------

ASSUMED = {
    "8.6": ({"version": "8.6.1"}, "fp16"),
    "8.6 with the plugin's projections": (
        {"version": "8.6.1", "attention": {"chosen": "plugin", "accumulate": "fp32"}},
        "fp32",
    ),
    "8.6 with the plugin beside TensorRT's matmuls": (
        {
            "version": "8.6.1",
            "attention": {"chosen": "plugin", "accumulate": "fp32"},
            "verdict": verdict(accumulate_in_fp16=("h16816gemm",) * 24),
        },
        "fp16",
    ),
    "a newer one": ({}, "fp32"),
    "a newer one whose kernels say FP16": (
        {"verdict": verdict(accumulate_in_fp16=("x",))},
        "fp16",
    ),
    "kernels that are not known yet": (
        {"verdict": verdict(selected_at_load=("q", "k", "v"))},
        "fp16",
    ),
}


@pytest.mark.parametrize("name", ASSUMED)
def test_the_budget_assumes_the_accumulation_of_the_kernels(name):
    changes, expected = ASSUMED[name]
    engine = Engine(path=Path("e.engine"), manifest=SimpleNamespace(**{**vars(MANIFEST), **changes}))
    runtime = Runtime(name="e", family="tensorrt", open=lambda: None, engine=engine)
    kind, why = structs.astuple(runtime.accumulation(PRECISIONS["fp16"]))
    assert kind == expected
    assert why
    assert runtime.accumulation(PRECISIONS["bf16"]).type == "fp32"


@pytest.mark.parametrize("name", ["ort-cpu", "onnx-reference", "eager"])
def test_runtimes_that_accumulate_in_fp32_have_the_smaller_budget(name):
    runtime = Runtime(name=name, family="pytorch" if name == "eager" else "onnx", open=lambda: None)
    kind, why = structs.astuple(runtime.accumulation(PRECISIONS["fp16"]))
    assert kind == "fp32"
    assert name == "eager" or "2048 and 4,095 ones are 6,144" in why


def test_a_runner_whose_kernels_lose_the_ones_accumulates_in_fp16(monkeypatch):
    class Lossy(Runner):
        def __init__(self):
            self.name, self.outputs = "lossy 1.0", {}
            self.inputs = {each: TensorInfo(dtype=np.dtype(np.float16), dims=("M", "N")) for each in "ab"}

        def _run(self, feeds):
            total = np.float16(0)
            for a, b in zip(feeds["a"][0], feeds["b"][:, 0], strict=True):
                total += a * b
            return {"y": np.full((1, 8), total)}

    runtimes._measured_accumulation.cache_clear()
    monkeypatch.setattr(runtimes, "open_runner", lambda *given: Lossy())
    runtime = Runtime(name="ort-cuda", family="onnxruntime", open=lambda: None)
    kind, why = structs.astuple(runtime.accumulation(PRECISIONS["fp16"]))
    runtimes._measured_accumulation.cache_clear()
    assert kind == "fp16"
    assert why == "lossy 1.0 accumulates in FP16: 2048 and 4,095 ones are 2,048"
