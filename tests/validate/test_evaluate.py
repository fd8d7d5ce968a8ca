"""One runtime in a plan: what an engine is not built for is left out, what it fails on is a verdict."""

from types import SimpleNamespace

import numpy as np
import pytest

from mha_deploy.bundle.cases import golden_cases
from mha_deploy.errors import DeployError
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.runtime.runner import Runner, TensorInfo
from mha_deploy.validate import runtimes
from mha_deploy.validate.evaluate import EvaluationPlan, evaluate
from mha_deploy.validate.runtimes import ONNX_RUNTIME, TENSORRT, Runtime


def verdict(*notes):
    """What an engine's manifest says of its GEMMs."""
    return SimpleNamespace(precision=SimpleNamespace(notes=notes))


MANIFEST = SimpleNamespace(
    backend="tensorrt",
    version="11.4.0",
    verdict=verdict(),
    attention={"chosen": "native", "accumulate": "fp16"},
)


class EagerEngine(Runner):
    """Answers with the eager result, as an engine with one profile would: up to some length."""

    def __init__(self, cases, *, longest=1000, fails_at=None, spoils=None):
        self.cases, self.longest, self.fails_at, self.spoils = cases, longest, fails_at, spoils
        self.name, self.inputs, self.outputs = "engine 1.0", {}, {}
        self.asked = []

    def run(self, feeds):
        case = next(case for case in self.cases if case.inputs["x"] is feeds["x"])
        self.asked.append(case.name)
        if case.name == self.fails_at:
            raise DeployError("Myelin gave up.", got="cudaMemcpy2DAsync")
        return {
            name: (array * 2 if case.name == self.spoils else array).astype(array.dtype)
            for name, array in case.eager.items()
        }

    _run = run

    def profiles_for(self, feeds):
        return [0] if feeds["x"].shape[1] <= self.longest else []

    def run_in_profile(self, feeds, profile):
        return self.run(feeds)


@pytest.fixture(scope="module")
def cases(bundles):
    return list(golden_cases(bundles("tiny-gqa")))


def sit(bundles, cases, runner, *, engine=True):
    manifest = bundles("tiny-gqa").manifest
    runtime = Runtime(
        name="engine",
        family=TENSORRT if engine else ONNX_RUNTIME,
        open=lambda: runner,
        engine=SimpleNamespace(manifest=MANIFEST) if engine else None,
    )
    plan = EvaluationPlan(spec=manifest.spec, precision=manifest.precision, cases={"golden": cases})
    return evaluate(runtime, plan)


def test_cases_outside_the_profiles_are_left_out_and_told(bundles, cases):
    runner = EagerEngine(cases, longest=16)
    result = sit(bundles, cases, runner)
    longer = {case.name for case in cases if case.sizes["S"] > 16}
    assert longer
    assert set(result.outside) == longer
    assert set(runner.asked).isdisjoint(longer)
    assert result.parity[0].passed
    assert {verdict.case for verdict in result.parity[0].verdicts} == {c.name for c in cases} - longer


def test_an_engine_that_admits_nothing_is_judged_on_nothing(bundles, cases):
    result = sit(bundles, cases, EagerEngine(cases, longest=0))
    assert result.parity == ()
    assert len(result.outside) == len(cases)


def test_an_engine_that_gives_up_on_a_case_has_failed_it(bundles, cases):
    result = sit(bundles, cases, EagerEngine(cases, fails_at="odd"))
    (report,) = result.parity
    assert not report.passed
    assert result.failed_cases == ["odd"]
    (failed,) = [verdict for verdict in report.verdicts if not verdict.passed]
    assert failed.problem == "could not be run: Myelin gave up. cudaMemcpy2DAsync"
    assert (failed.deviation, failed.share) == (None, None)


def test_a_runtime_that_gives_up_is_an_error_and_no_verdict(bundles, cases):
    with pytest.raises(DeployError, match="Myelin gave up"):
        sit(bundles, cases, EagerEngine(cases, fails_at="odd"), engine=False)


def test_there_is_a_map_of_the_usual_case_or_of_what_is_wrong(bundles, cases):
    assert [heat.case for heat in sit(bundles, cases, EagerEngine(cases)).heatmaps] == ["opt"]
    wrong = sit(bundles, cases, EagerEngine(cases, spoils="odd"))
    assert {heat.case for heat in wrong.heatmaps} == {"odd", "opt"}
    (odd,) = [heat for heat in wrong.heatmaps if heat.case == "odd"]
    assert np.nanmax(odd.values) > 0.5


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
            "verdict": verdict("24 matmuls accumulate in FP16, the first is h16816gemm"),
        },
        "fp16",
    ),
    "a newer one": ({}, "fp32"),
    "a newer one whose kernels say FP16": (
        {"verdict": verdict("1 matmuls accumulate in FP16, the first is x")},
        "fp16",
    ),
    "kernels that are not known yet": (
        {"verdict": verdict("the kernels of 3 matmuls are chosen on the device")},
        "fp16",
    ),
}


@pytest.mark.parametrize("name", ASSUMED)
def test_the_budget_assumes_the_accumulation_of_the_kernels(name):
    changes, expected = ASSUMED[name]
    engine = SimpleNamespace(manifest=SimpleNamespace(**{**vars(MANIFEST), **changes}))
    runtime = Runtime(name="e", family="tensorrt", open=lambda: None, engine=engine)
    kind, why = runtime.accumulation(PRECISIONS["fp16"])
    assert kind == expected
    assert why
    assert runtime.accumulation(PRECISIONS["bf16"])[0] == "fp32"


@pytest.mark.parametrize("name", ["ort-cpu", "onnx-reference", "eager"])
def test_runtimes_that_accumulate_in_fp32_have_the_smaller_budget(name):
    runtime = Runtime(name=name, family="pytorch" if name == "eager" else "onnx", open=lambda: None)
    kind, why = runtime.accumulation(PRECISIONS["fp16"])
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
    kind, why = runtime.accumulation(PRECISIONS["fp16"])
    runtimes._measured_accumulation.cache_clear()
    assert kind == "fp16"
    assert why == "lossy 1.0 accumulates in FP16: 2048 and 4,095 ones are 2,048"
