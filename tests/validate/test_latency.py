"""No latency for a wrong answer, no ratio across devices, and figures that follow from the time."""

import json
from dataclasses import replace

import numpy as np
import pytest

from mha_deploy.analyze.cost import layer_cost
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.errors import DeployError
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.precision import find_precision
from mha_deploy.runtime.cuda import Conditions
from mha_deploy.runtime.runner import Runner, TensorInfo
from mha_deploy.runtime.timing import Timing, TimingPlan
from mha_deploy.validate.latency import LatencyRow, latency_point, time_case

FP16 = find_precision("fp16")


def timing(microseconds, gpu="NVIDIA H200", **changes):
    facts = {
        "samples_us": (microseconds,) * 100,
        "calls_per_sample": 1,
        "slots": 2,
        "graph": True,
        "stable": True,
        "host_us": 2.0,
        "gpu": gpu,
        "conditions": Conditions(),
    }
    return Timing(**{**facts, **changes})


def row(name, microseconds=None, family="pytorch", **changes):
    timed = None if microseconds is None else timing(microseconds, **changes)
    return LatencyRow(name=name, backend=name, family=family, timing=timed)


@pytest.fixture(scope="module")
def opt(bundles):
    return next(case for case in golden_cases(bundles("tiny-gqa")) if case.name == "opt")


def point(opt, *rows):
    return latency_point(opt, rows, find_spec("tiny-gqa"), FP16)


# -- figures ---------------------------------------------------------------------------------------


def test_speed_ups_are_over_eager_and_over_the_best_of_pytorch(opt):
    engine = row("tensorrt", 20.0, family="tensorrt")
    at = point(opt, row("eager", 240.0), row("sdpa-cudnn", 30.0), row("sdpa-flash", 40.0), engine)
    assert at.best_pytorch.name == "sdpa-cudnn"
    assert at.figures(engine)["speedup_over_eager"] == 12.0
    assert at.figures(engine)["speedup_over_best_pytorch"] == 1.5


def test_rates_follow_from_the_work_and_the_time(opt):
    engine = row("tensorrt", 2.0, family="tensorrt")
    at, cost = point(opt, engine), layer_cost(find_spec("tiny-gqa"), opt.sizes, FP16.bytes)
    figures = at.figures(engine)
    assert figures["tflops"] == pytest.approx(cost.flops / 2e-6 / 1e12)
    assert figures["gb_per_s"] == pytest.approx(cost.bytes / 2e-6 / 1e9)
    assert figures["roofline_share"] == pytest.approx(at.roofline.bound_us / 2.0)
    assert (at.roofline.gpu, at.roofline.tflops_peak, at.roofline.gb_per_s_peak) == ("H200", 989.5, 4800.0)


def test_there_is_no_ratio_across_devices(opt):
    engine = row("tensorrt", 20.0, family="tensorrt", gpu="NVIDIA L4")
    at = point(opt, row("eager", 240.0), engine)
    assert at.figures(engine)["speedup_over_eager"] is None
    assert at.figures(engine)["speedup_over_best_pytorch"] is None
    assert at.roofline is None, "two devices have no common roof"


def test_a_gpu_without_figures_has_no_roofline(opt):
    engine = row("tensorrt", 20.0, family="tensorrt", gpu="Some card of next year")
    at = point(opt, engine)
    assert at.roofline is None
    assert at.figures(engine)["roofline_share"] is None


def test_what_was_refused_has_no_figures_and_is_nobodys_best(opt):
    refused = LatencyRow(name="sdpa-flash", backend="torch", family="pytorch", refused="no kernel")
    at = point(opt, refused, row("eager", 240.0))
    assert set(at.figures(refused).values()) == {None}
    assert at.best_pytorch.name == "eager"
    data = json.loads(json.dumps(at.to_dict()))
    assert [each["refused"] for each in data["rows"]] == ["no kernel", None]
    assert data["rows"][0]["timing"] is None
    assert data["rows"][1]["timing"]["p50_us"] == 240.0


# -- right before it is timed, and while it is timed ----------------------------------------------


class Answers(Runner):
    """Gives the eager result, times some factor; and counts how often it is timed."""

    def __init__(self, case, *, factor=1.0, timed_factor=1.0):
        self.case, self.factor, self.timed_factor = case, factor, timed_factor
        self.name, self.timed = "answers", 0
        self.inputs = {name: TensorInfo(dtype=a.dtype, dims=a.shape) for name, a in case.inputs.items()}
        self.outputs = {}

    def _result(self, factor):
        return {
            name: (array.astype(np.float64) * factor).astype(array.dtype)
            for name, array in self.case.eager.items()
        }

    def _run(self, feeds):
        return self._result(self.factor)

    def time(self, feeds, plan=None):
        self.timed += 1
        results = (self._result(1.0), self._result(self.timed_factor))
        return replace(timing(10.0), samples_us=(10.0,) * plan.samples, results=results)


def timed(case, **options):
    runner = Answers(case, **options)
    blank = LatencyRow(name="answers", backend="answers", family="tensorrt")
    return runner, time_case(runner, case, FP16, blank, timing=TimingPlan(samples=150))


def test_a_right_answer_is_timed(opt):
    runner, result = timed(opt)
    assert (runner.timed, result.refused) == (1, None)
    assert len(result.timing.samples_us) == 150


def test_a_wrong_answer_is_never_timed(opt):
    runner, result = timed(opt, factor=1.02)
    assert (runner.timed, result.timing) == (0, None)
    assert result.refused.startswith("wrong answer: output: out of budget")


def test_an_answer_that_is_wrong_only_while_it_is_timed_has_no_time(opt):
    _, result = timed(opt, timed_factor=1.02)
    assert result.timing is None
    assert result.refused.startswith("wrong answer while it was timed")


def test_a_runner_on_the_cpu_has_no_time(opt):
    class OnCpu(Answers):
        time = Runner.time

    runner = OnCpu(opt)
    blank = LatencyRow(name="answers", backend="answers", family="onnxruntime")
    result = time_case(runner, opt, FP16, blank, timing=TimingPlan(samples=100))
    assert result.timing is None
    assert "would say nothing about a GPU" in result.refused


def test_a_refusal_is_one_line(opt):
    class Refuses(Answers):
        def _run(self, feeds):
            raise DeployError("No kernel.", got="this\nand that", hint="another")

    blank = LatencyRow(name="answers", backend="answers", family="pytorch")
    result = time_case(Refuses(opt), opt, FP16, blank, timing=TimingPlan(samples=100))
    assert result.refused == "No kernel. this and that"


def test_a_profiler_that_fails_costs_no_time(opt):
    def no_profiler(runner, case):
        raise DeployError("The profiler saw no kernel.")

    blank = LatencyRow(name="answers", backend="answers", family="tensorrt")
    result = time_case(Answers(opt), opt, FP16, blank, timing=TimingPlan(samples=100), kernels=no_profiler)
    assert (result.refused, result.kernels) == (None, ())
    assert result.timing is not None
