"""No latency for a wrong answer, no ratio across devices, figures that follow from the time."""

import io
from dataclasses import replace

import numpy as np
import pytest
from golden_made import made_case
from rich.console import Console

from mha_deploy.bundle.cases import golden_cases
from mha_deploy.cli.tables import latency_renderable
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.files import as_plain
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.layer import layer_cost
from mha_deploy.model.precision import find_precision
from mha_deploy.runtime.cuda import Conditions
from mha_deploy.runtime.runner import Runner, TensorInfo
from mha_deploy.runtime.timing import Timing, TimingPlan
from mha_deploy.status import Kind, Reason
from mha_deploy.validation import bench
from mha_deploy.validation.bench import BenchOptions, ModelBench, bench_record
from mha_deploy.validation.evaluate import EvaluationPlan, LatencyRow, evaluate, latency_point, time_case
from mha_deploy.validation.records import check_bench
from mha_deploy.validation.runtimes import Runtime, Unavailable

FP16 = find_precision("fp16")
DYNAMIC, PREALLOCATED, WHOLE = (find_spec(f"tiny-{name}") for name in ("dynamic", "preallocated", "gqa"))

NO_KERNEL = Reason(kind=Kind.NOT_TIMED, got="no kernel")


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
    return LatencyRow(name=name, runtime=name, family=family, timing=timed)


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
    refused = LatencyRow(name="sdpa-flash", runtime="torch", family="pytorch", refused=NO_KERNEL)
    at = point(opt, refused, row("eager", 240.0))
    assert set(at.figures(refused).values()) == {None}
    assert at.best_pytorch.name == "eager"
    data = as_plain(at.record)
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


def timed_with(kernels=False, **timing):
    return EvaluationPlan(spec=WHOLE, precision=FP16, cases={}, timing=TimingPlan(**timing), kernels=kernels)


def timed(case, **options):
    runner = Answers(case, **options)
    blank = LatencyRow(name="answers", runtime="answers", family="tensorrt")
    return runner, time_case(runner, case, blank, timed_with(samples=150))


def test_a_right_answer_is_timed(opt):
    runner, result = timed(opt)
    assert (runner.timed, result.refused) == (1, None)
    assert len(result.timing.samples_us) == 150


def test_a_wrong_answer_is_never_timed(opt):
    runner, result = timed(opt, factor=1.02)
    assert (runner.timed, result.timing) == (0, None)
    assert result.refused.kind is Kind.WRONG_RESULT


def test_an_answer_that_is_wrong_only_while_it_is_timed_has_no_time(opt):
    _, result = timed(opt, timed_factor=1.02)
    assert result.timing is None
    assert result.refused.kind is Kind.WRONG_WHEN_TIMED


def test_a_runtime_that_is_wrong_on_other_inputs_or_at_other_sizes_has_no_time(opt):
    def scaled(arrays):
        return {name: (array * 1.02).astype(array.dtype) for name, array in arrays.items()}

    other = replace(opt, name="probe-opt", oracle=opt.oracle.map(scaled), eager=scaled(opt.eager))
    elsewhere = replace(other, name="odd", sizes={**opt.sizes, "S": opt.sizes["S"] + 1})
    right = replace(opt, name="right")
    for case, refused in ((other, True), (elsewhere, True), (right, False)):
        runner = Answers(opt)
        runtime = Runtime(name="answers", family="pytorch", open=lambda runner=runner: runner)
        plan = EvaluationPlan(spec=WHOLE, precision=FP16, cases={"probe": [case]}, timed=[opt])
        found = evaluate(runtime, plan).rows["opt"]
        assert (found.timing is None, runner.timed) == (refused, not refused)
        assert (found.refused is not None and found.refused.kind is Kind.WRONG_RESULT) is refused


def test_a_runner_on_the_cpu_has_no_time(opt):
    class OnCpu(Answers):
        time = Runner.time

    runner = OnCpu(opt)
    blank = LatencyRow(name="answers", runtime="answers", family="onnxruntime")
    result = time_case(runner, opt, blank, timed_with(samples=100))
    assert result.timing is None
    assert "would say nothing about a GPU" in result.refused.got


def test_a_refusal_is_one_line(opt):
    class Refuses(Answers):
        def _run(self, feeds):
            raise DeployError("No kernel.", got="this\nand that", hint="another")

    blank = LatencyRow(name="answers", runtime="answers", family="pytorch")
    result = time_case(Refuses(opt), opt, blank, timed_with(samples=100))
    assert result.refused.got == "No kernel. this and that"


def test_a_profiler_that_fails_costs_no_time(opt, monkeypatch):
    def no_profiler(runner, case):
        raise DeployError("The profiler saw no kernel.", hint="another")

    blank = LatencyRow(name="answers", runtime="answers", family="tensorrt")
    monkeypatch.setattr("mha_deploy.validation.evaluate.kernel_times", no_profiler)
    result = time_case(Answers(opt), opt, blank, timed_with(samples=100, kernels=True))
    assert (result.refused, result.kernels) == (None, ())
    assert result.timing is not None


# -- decode steps: tokens a second, and the work of the lengths they were timed at -----------------


def decode_point(spec, sizes, *rows, lengths=None):
    inputs = {} if lengths is None else {"lengths": np.array(lengths, np.int32)}
    case = made_case({}, name="decode", sizes=sizes, inputs=inputs)
    return latency_point(case, rows, spec, FP16)


def printed(at):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(latency_renderable([as_plain(at.record)]))
    return console.export_text()


def test_a_decode_step_has_tokens_a_second():
    engine, eager = row("tensorrt", 20.0, family="tensorrt"), row("eager", 40.0)
    refused = LatencyRow(name="sdpa-flash", runtime="torch", family="pytorch", refused=NO_KERNEL)
    at = decode_point(DYNAMIC, {"B": 4, "S": 1, "P": 63}, eager, refused, engine)
    assert [at.figures(each)["tokens_per_s"] for each in at.rows] == pytest.approx([1e5, None, 2e5])
    assert at.roofline.bound == "memory"
    share = at.figures(engine)["gb_per_s"] / at.roofline.gb_per_s_peak
    assert at.figures(engine)["roofline_share"] == pytest.approx(share), "all stages are bound by memory"
    data = as_plain(at.record)
    assert [each["tokens_per_s"] for each in data["rows"]] == pytest.approx([1e5, None, 2e5])
    assert data["past"] is None


@pytest.mark.parametrize(
    ("spec", "sizes", "lengths"),
    [
        (DYNAMIC, {"B": 4, "S": 2, "P": 10}, None),
        (PREALLOCATED, {"B": 1, "S": 16, "T": 64}, [0]),
        (WHOLE, {"B": 4, "S": 1}, None),
    ],
    ids=["two tokens", "prefill", "no cache"],
)
def test_other_calls_have_none(spec, sizes, lengths):
    engine = row("tensorrt", 20.0, family="tensorrt")
    at = decode_point(spec, sizes, engine, lengths=lengths)
    assert at.figures(engine)["tokens_per_s"] is None
    assert at.figures(engine)["gb_per_s"] > 0
    assert "TFLOP/s" in printed(at)
    assert "tok/s" not in printed(at)


def test_the_work_is_that_of_the_lengths_of_the_case():
    sizes = {"B": 3, "S": 1, "T": 64}
    full, half = (decode_point(PREALLOCATED, sizes, lengths=lengths) for lengths in ([63] * 3, [63, 30, 0]))
    assert (full.flops, full.bytes) == (
        layer_cost(PREALLOCATED, sizes, 2).flops,
        layer_cost(PREALLOCATED, sizes, 2).bytes,
    )
    assert half.flops < full.flops
    assert half.bytes < full.bytes
    assert (full.past, half.past) == (63, 63)


def test_the_table_of_a_decode_step_fits_a_terminal():
    rows = [row("sdpa-efficient", 1234.5), row("tensorrt-rtx-fp16", 2.0, family="tensorrt"), row("eager")]
    text = printed(decode_point(PREALLOCATED, {"B": 4, "S": 1, "T": 64}, *rows, lengths=[63] * 4))
    assert "B=4,S=1,T=64" in text.replace(" ", "")
    for words in ("63 KV-cache entries", "tokens/s", "2,000,000", "GB/s", "roofline"):
        assert words in text
    assert "…" not in text


def test_the_figures_keep_the_format_of_a_benchmark(bundles):
    bundle = bundles("tiny-preallocated")
    at = decode_point(PREALLOCATED, {"B": 2, "S": 1, "T": 64}, row("eager", 9.0), lengths=[63, 63])
    found = ModelBench(bundle=bundle, engines=(), evaluations=(), absent=(), points=(at,))
    assert check_bench(as_plain(bench_record([found]))) == []


def test_a_benchmark_records_what_was_skipped_as_data(bundles):
    skipped = (Unavailable(name="ort-cuda", reason="no CUDA: here"),)
    kept = {"bundle": bundles("tiny-gqa"), "engines": (), "evaluations": (), "points": ()}
    data = as_plain(bench_record([ModelBench(**kept, absent=skipped), ModelBench(**kept, absent=())]))
    assert [each["absent"] for each in data["models"]] == [
        [{"name": "ort-cuda", "reason": "no CUDA: here"}],
        [],
    ]
    assert check_bench(data) == []


# -- which cases are timed ---------------------------------------------------------------------


@pytest.fixture
def cases(monkeypatch):
    """The cases of a bench, their oracle on the CPU; samples of rounding do not decide which they are."""
    from mha_deploy.baselines import fresh

    monkeypatch.setattr("mha_deploy.exporter.samples.sample_count", lambda *about: 1)
    real = fresh.FreshCases
    monkeypatch.setattr(fresh, "FreshCases", lambda bundle, device: real(bundle, "cpu"))
    return lambda bundle, *at: bench._cases(bundle, BenchOptions(at=at))


def test_a_cached_layer_is_timed_at_prefill_and_decode(bundles, cases):
    prefill, decode = cases(bundles("tiny-dynamic"), "opt")
    assert (prefill.name, prefill.sizes) == ("prefill", {"B": 2, "S": 16, "P": 0})
    assert (decode.name, decode.sizes) == ("decode", {"B": 2, "S": 1, "P": 24})
    prefill, decode = cases(bundles("tiny-preallocated"), "opt")
    assert prefill.inputs["lengths"].tolist() == [0, 0]
    assert decode.inputs["lengths"].tolist() == [63, 63], "whatever lengths the golden case of that name has"


def test_a_golden_case_is_taken_only_where_its_lengths_are_wanted(bundles, cases, monkeypatch):
    def refuse(what, hint):
        raise BackendUnavailable("Only PyTorch can tell.")

    bundle = bundles("tiny-preallocated")
    monkeypatch.setattr(bench.runtimes, "refuse_without_torch", refuse)
    assert [case.name for case in cases(bundle, "prefill")] == ["prefill"]
    with pytest.raises(BackendUnavailable):
        cases(bundle, "B=3,S=2,T=64")


def test_a_sweep_has_every_point_once_under_a_name_of_its_own(bundles, cases):
    for name in ("tiny-dynamic", "tiny-preallocated", "tiny-gqa"):
        found = cases(bundles(name))
        assert len({case.name for case in found}) == len(found)
        full = [case for case in found if "lengths" in case.inputs and case.name != "prefill"]
        assert all((case.inputs["lengths"] == 63).all() for case in full)


def test_a_point_that_is_asked_for_twice_is_timed_once(bundles, cases):
    found = cases(bundles("tiny-dynamic"), "decode", "opt", "B=2,S=1,P=24")
    assert [case.name for case in found] == ["decode", "prefill"]
