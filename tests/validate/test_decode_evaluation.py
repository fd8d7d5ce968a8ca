"""Decoding as part of a plan: nothing is lost, nothing is judged outside its profiles, gaps are reported."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from bundle_edit import copy_of, edit_manifest

from mha_deploy.bundle.cases import golden_cases
from mha_deploy.bundle.folder import open_bundle
from mha_deploy.errors import DeployError
from mha_deploy.judge import Accumulation
from mha_deploy.options import ValidateOptions
from mha_deploy.runtime import open_runner
from mha_deploy.runtime.runner import Runner
from mha_deploy.runtime.timing import TimingPlan
from mha_deploy.status import Kind
from mha_deploy.validation import decode as decode_exam
from mha_deploy.validation.decode import HostDecodeLoop, evaluate_trace, traces_of
from mha_deploy.validation.evaluate import EvaluationPlan, evaluate
from mha_deploy.validation.run import validate_bundle
from mha_deploy.validation.runtimes import ONNX_RUNTIME, Runtime, RuntimeFinder

# A runner in a child process that is not closed costs the next test a new process.
pytestmark = pytest.mark.usefixtures("in_process")
OPTIONS = ValidateOptions(latency=False, sweep=False, probe=False)


class Through(Runner):
    """The graph in ONNX Runtime, with something done to what comes out."""

    def __init__(self, bundle, after=lambda feeds, results: results):
        self.inner, self.after, self.timed = open_runner("ort-cpu", bundle.model_path), after, []
        self.name, self.inputs, self.outputs = "stand 1.0", self.inner.inputs, self.inner.outputs

    def _run(self, feeds):
        return self.after(feeds, {name: array.copy() for name, array in self.inner.run(feeds).items()})

    def time(self, feeds, plan: TimingPlan | None = None):
        self.timed.append(feeds["x"].shape[1])
        raise DeployError("There is no clock here.", hint="another")


class Profiled(Through):
    """The same behind profiles: ranges of B, S and P, and nothing else is run."""

    def __init__(self, bundle, *profiles):
        super().__init__(bundle)
        self.profiles, self.refused = profiles, []

    def profiles_for(self, feeds):
        past = feeds["past_key"].shape[2] if "past_key" in feeds else 0
        sizes = {"B": feeds["x"].shape[0], "S": feeds["x"].shape[1], "P": past}
        return [
            index
            for index, ranges in enumerate(self.profiles)
            if all(low <= sizes[axis] <= high for axis, (low, high) in ranges.items())
        ]

    def run_in_profile(self, feeds, profile):
        return self.run(feeds)

    def _run(self, feeds):
        if not self.profiles_for(feeds):
            self.refused.append(feeds["x"].shape)
            raise DeployError("No profile takes these shapes.", got=feeds["x"].shape, hint="another")
        return super()._run(feeds)


def sit(bundle, runner, *, cases=None, timed=(), engine=None, **changes):
    """One runtime through the golden cases and the traces of a bundle."""
    manifest = bundle.manifest
    plan = EvaluationPlan(
        spec=manifest.spec,
        precision=manifest.precision,
        cases={"golden": list(golden_cases(bundle))} if cases is None else cases,
        traces=traces_of(bundle, ValidateOptions()),
        timed=timed,
    )
    who = Runtime(name="stand", family=ONNX_RUNTIME, open=lambda: runner, engine=engine)
    return evaluate(who, replace(plan, **changes))


def spoiled(feeds, results):
    return {**results, "output": results["output"] * 2}


def spoiled_at_single_tokens(feeds, results):
    return spoiled(feeds, results) if feeds["x"].shape[1] == 1 and feeds["x"].shape[0] == 3 else results


@pytest.fixture(params=["tiny-preallocated", "tiny-dynamic"])
def bundle(bundles, request, tmp_path):
    return open_bundle(copy_of(bundles(request.param), tmp_path / "bundle"))


@pytest.fixture(scope="module")
def static(bundles, tmp_path_factory):
    # Without the engines that other tests built into the shared one.
    return open_bundle(
        copy_of(bundles("tiny-preallocated"), tmp_path_factory.mktemp("preallocated") / "bundle")
    )


# -- a decode loop that cannot be opened or closed -----------------------------------------------------


@pytest.fixture
def loop(monkeypatch):
    """Let the decode loop raise as it is opened, or as it is closed."""

    def let(opening=None, closing=None):
        @contextmanager
        def opened(runner, spec, trace):
            if opening:
                raise opening
            yield HostDecodeLoop(runner, spec, trace.B)
            if closing:
                raise closing

        monkeypatch.setattr(decode_exam, "open_decode_loop", opened)

    return let


NO_MEMORY = [
    DeployError("cudaMalloc failed.", got="no memory", hint="another"),
    RuntimeError("cudaMalloc failed. no memory"),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
def test_a_decode_loop_that_cannot_be_opened_has_failed_the_prefill(static, loop, error):
    loop(opening=error)
    result = sit(static, Through(static))
    (report,) = result.decode_reports
    (failure,) = report.verdicts
    assert (failure.case, failure.output) == ("steps prefill", "output")
    assert failure.problem.startswith("could not be run: ")
    assert "cudaMalloc failed. no memory" in failure.problem
    assert (report.first_failed, report.passed, report.errors) == (0, False, ())
    assert (report.steps, report.runtime, report.record.growth) == (40, "stand 1.0", None)
    assert result.parity[0].passed, "what was judged before is kept"
    assert not result.is_right


def test_what_was_decoded_names_its_engine(static):
    engine = SimpleNamespace(path=Path("plugin.engine"), accumulation=lambda precision: Accumulation())
    (report,) = sit(static, Through(static), engine=engine).decode_reports
    assert (report.engine, report.record.engine) == ("plugin", "plugin")
    (plain,) = sit(static, Through(static)).decode_reports
    assert plain.record.engine is None


@pytest.mark.sweep(1)
@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
def test_a_decode_loop_that_cannot_be_closed_has_failed_and_its_steps_are_kept(static, loop, error):
    loop(closing=error)
    (report,) = sit(static, Through(static)).decode_reports
    (failure,) = report.failures
    assert "could not be closed: " in failure.problem
    assert "cudaMalloc failed. no memory" in failure.problem
    assert (len(report.errors), report.first_failed, report.passed) == (40, None, False)


def test_a_decode_loop_that_is_not_empty_is_a_verdict_too(static, monkeypatch):
    @contextmanager
    def used(runner, spec, trace):
        yield HostDecodeLoop(runner, spec, trace.B + 1)

    monkeypatch.setattr(decode_exam, "open_decode_loop", used)
    (report,) = sit(static, Through(static)).decode_reports
    assert "must begin with an empty cache" in report.failures[0].problem


# -- profiles --------------------------------------------------------------------------------------

ALL = {"B": (1, 4), "S": (1, 64), "P": (0, 63)}
NARROW = {
    "one row": [{**ALL, "B": (1, 1)}],
    "no single tokens": [{**ALL, "S": (2, 64)}],
    "short prompts": [{**ALL, "S": (1, 16)}],
    "prompts of other lengths": [{**ALL, "S": (4, 8)}, {**ALL, "S": (1, 1)}],
}
SHORT_PASTS = {
    "a past that ends too soon": [{**ALL, "P": (0, 62)}],
    "a past that begins too late": [{**ALL, "P": (1, 63)}],
    "a gap between pasts": [{**ALL, "P": (0, 40)}, {**ALL, "P": (42, 63)}],
}


def outside(bundle, profiles):
    runner = Profiled(bundle, *profiles)
    result = sit(bundle, runner)
    assert runner.refused == []
    assert result.decode_reports == ()
    assert "steps" in result.outside
    assert result.not_decoded_because == "its profiles take no trace"
    assert result.is_right
    return result


@pytest.mark.sweep(1)
@pytest.mark.parametrize("profiles", NARROW.values(), ids=NARROW)
def test_a_trace_outside_the_profiles_is_left_out_and_reported(bundle, profiles):
    outside(bundle, profiles)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("profiles", SHORT_PASTS.values(), ids=SHORT_PASTS)
def test_every_past_of_a_trace_must_be_in_a_profile(bundles, profiles):
    bundle = bundles("tiny-dynamic")
    (trace,) = traces_of(bundle, ValidateOptions())
    assert (trace.longest_prompt, trace.length) == (24, 64)
    outside(bundle, profiles)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("profiles", [[ALL], [{**ALL, "S": (2, 64)}, {**ALL, "S": (1, 1)}]], ids=len)
def test_a_trace_inside_the_profiles_is_decoded(bundle, profiles):
    result = sit(bundle, Profiled(bundle, *profiles))
    assert [report.passed for report in result.decode_reports] == [True]
    assert (result.outside, result.not_decoded_because) == ((), None)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("most", "taken"), [(8, True), (16, True), (11, False), (9, True)])
def test_a_prompt_is_cut_as_the_decode_loop_says_and_every_piece_must_fit(static, monkeypatch, most, taken):
    """24 tokens by 11 leave 2, which no profile takes; by 9 they leave 6."""

    @contextmanager
    def cutting(runner, spec, trace):
        loop = HostDecodeLoop(runner, spec, trace.B)
        loop.most_tokens = most
        yield loop

    monkeypatch.setattr(decode_exam, "open_decode_loop", cutting)
    result = sit(static, Profiled(static, {**ALL, "S": (4, 16)}, {**ALL, "S": (1, 1)}))
    assert [report.passed for report in result.decode_reports] == ([True] if taken else [])
    assert ("steps" in result.outside) is not taken


@pytest.mark.slow
def test_outputs_in_bf16_are_named_once_enough_tokens_are_decoded(static):
    """A single step has too few numbers, and a budget that rounding to BF16 stays within."""

    def coarse(feeds, results):
        return {**results, "output": results["output"].astype(ml_dtypes.bfloat16).astype(np.float16)}

    (trace,) = traces_of(static, ValidateOptions())
    spec, precision = static.manifest.spec, static.manifest.precision
    with Through(static) as runner:
        right = evaluate_trace(runner, trace, spec, precision)
    with Through(static, coarse) as runner:
        report = evaluate_trace(runner, trace, spec, precision)
    assert right.share < 0.5
    assert "outputs in BF16" in report.failures[0].problem


# -- nothing was decoded ----------------------------------------------------------------------------


def decode_findings(report):
    return [(finding.level, finding.text) for finding in report.findings if finding.section == "decode"]


def test_a_bundle_without_a_trace_is_reported(static, tmp_path):
    folder = copy_of(static, tmp_path / "bundle")
    edit_manifest(folder, lambda data: data.update(traces=[]))
    report = validate_bundle(open_bundle(folder), OPTIONS)
    assert report.passed
    ((level, text),) = decode_findings(report)
    assert level == "warning"
    assert text.endswith("decoded no tokens: the bundle has no trace")
    assert "within budget, not decoded" in report.headline
    assert "not covered: decode steps in " in report.headline


def test_profiles_that_take_no_trace_are_reported(static, monkeypatch):
    engine = Runtime(
        name="ort-cuda", family=ONNX_RUNTIME, open=lambda: Profiled(static, NARROW["one row"][0])
    )
    monkeypatch.setattr(RuntimeFinder, "graphs", lambda self: [engine])
    report = validate_bundle(static, OPTIONS)
    assert report.passed, report.findings
    ((level, text),) = decode_findings(report)
    assert (level, text) == ("warning", "ort-cuda (stand 1.0) decoded no tokens: its profiles take no trace")
    assert "not decoded" in report.headline


@pytest.mark.slow
def test_what_decoded_and_what_has_no_cache_is_not_warned_of(bundles, static, tmp_path):
    report = validate_bundle(open_bundle(copy_of(static, tmp_path / "bundle")), OPTIONS)
    assert decode_findings(report) == []
    assert "right at all 40 decode steps" in report.headline
    plain = validate_bundle(open_bundle(copy_of(bundles("tiny-gqa"), tmp_path / "plain")), OPTIONS)
    assert decode_findings(plain) == []
    assert "decode" not in plain.headline


# -- times and shares ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_wrong_decoder_has_no_time(static):
    timed = [case for case in golden_cases(static) if case.name in ("prefill", "decode")]
    assert [case.sizes["S"] for case in timed] == [16, 1]
    right, wrong = Through(static), Through(static, spoiled_at_single_tokens)
    rows = sit(static, right, timed=timed).rows
    assert right.timed == [16, 1]
    assert [row.refused.got for row in rows.values()] == ["There is no clock here."] * 2
    result = sit(static, wrong, timed=timed)
    assert result.wrong_cases == []
    assert wrong.timed == []
    for row in result.rows.values():
        assert row.refused.kind is Kind.WRONG_RESULT
        assert row.refused.got.startswith("steps step 1/output: ")


# -- maps of errors --------------------------------------------------------------------------------


def golden(bundle, *names):
    return {"golden": [case for case in golden_cases(bundle) if case.name in names]}


def maps(bundle, after, *names):
    found = sit(bundle, Through(bundle, after), cases=golden(bundle, *names), traces=()).heatmaps
    return {(heat.case, heat.output): heat for heat in found}


@pytest.mark.sweep(1)
def test_the_output_of_a_right_prefill_is_mapped(bundle):
    found = maps(bundle, lambda feeds, results: results, "opt", "prefill", "decode")
    assert ("prefill", "output") in found
    assert {output for _, output in found} == {"output"}
    assert {case for case, _ in found} <= {"opt", "prefill"}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("rest", [np.nan, 1000.0])
def test_a_wrong_cache_is_mapped_by_its_new_rows(static, rest):
    def after(feeds, results):
        for row, start in enumerate(feeds["lengths"]):
            results["key_cache_out"][row, 1, start + 2] *= 2
            results["key_cache_out"][row, :, start + 16 :] = rest  # means nothing
        return results

    ((place, heat),) = maps(static, after, "prefill").items()
    assert place == ("prefill", "key_cache_out")
    values = np.array(heat.values)
    assert values.shape == (static.manifest.spec.Hkv, 16)
    assert np.isfinite(values).all()
    assert np.unravel_index(np.argmax(values), values.shape) == (1, 2)
    assert heat.note == "the entries of the cache that the call wrote"


def test_old_rows_that_were_changed_are_no_error_to_map(bundles):
    bundle = bundles("tiny-dynamic")

    def after(feeds, results):
        if feeds["past_key"].shape[2]:
            results["present_key"][:, :, 0] += 1
        return results

    result = sit(bundle, Through(bundle, after), cases=golden(bundle, "decode"), traces=())
    assert result.wrong_cases == ["decode"]
    assert result.heatmaps == ()
