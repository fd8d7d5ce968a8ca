"""Decoding is judged at every step and in the cache: right layers pass, mistakes are caught and placed."""

import functools
import json
from dataclasses import replace

import decode_mistakes as wrong
import msgspec
import numpy as np
import pytest
from decode_mistakes import LosesCount, Meddled, ModuleRunner, SwappedRows, cached, module_of
from golden_made import made_case

from mha_deploy.bundle.cases import PlannedTrace
from mha_deploy.errors import DeployError
from mha_deploy.exporter.exporter import canonical_from_module
from mha_deploy.exporter.golden import LayerCapture
from mha_deploy.metrics import budget_from_samples
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.model.spec import Axis
from mha_deploy.runtime import open_runner
from mha_deploy.validation.decode import DecodeReport, HostDecodeLoop, growth, run_decode_loop, step_budgets

B, STEPS = 3, 8
PROMPTS = {"dynamic": (5, 5, 5), "preallocated": (5, 2, 7)}
CACHES = tuple(PROMPTS)


@functools.cache
def captured(cache, precision="fp16"):
    """A layer and a trace of it, shared by the tests."""
    module = module_of(cached(cache), precision)
    return module, trace_of(module, PRECISIONS[precision])


def trace_of(module, precision, prompt=None, steps=STEPS):
    """The decode trace of a layer."""
    planned = PlannedTrace(name="decode", prompt=prompt or PROMPTS[module.spec.cache], steps=steps)
    return LayerCapture(module, precision, 0).trace(module.spec, planned)


def judged(runner, cache, precision="fp16", loop=HostDecodeLoop, **options):
    module, trace = captured(cache, precision)
    return run_decode_loop(loop(runner, module.spec, B), trace, module.spec, PRECISIONS[precision], **options)


def wrong_in_cache(report):
    return [verdict.output for verdict in report.failures if verdict.case == "decode cache"]


# -- what is right passes ------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("path", ["sdpa", "plain"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("cache", CACHES)
def test_the_layer_passes(cache, precision, path):
    module = module_of(cached(cache), precision)
    module.path = path
    report = judged(ModuleRunner(module), cache, precision)
    assert report.passed, report.failures
    assert report.first_failed is None
    assert [verdict.case for verdict in report.verdicts] == [
        "decode prefill",
        *(f"decode step {step}" for step in range(1, STEPS + 1)),
        "decode all steps",
        "decode cache",
        "decode cache",
    ]
    assert {verdict.output for verdict in report.verdicts[-2:]} == {"key", "value"}
    assert len(report.errors) == len(report.eager_errors) == STEPS
    if path == "sdpa":  # as the eager module was decoded
        assert report.errors == report.eager_errors


@pytest.mark.slow  # that of a bundle: test_decode_evaluation.py
@pytest.mark.parametrize(
    ("cache", "precision"),
    [
        pytest.param(cache, each, marks=() if each == "fp16" or cache == "preallocated" else pytest.mark.slow)
        for cache in CACHES
        for each in PRECISIONS
    ],
)
def test_the_exported_graph_passes(cache, precision):
    module, _ = captured(cache, precision)
    runtime = "onnx-reference" if precision == "bf16" else "ort-cpu"
    with open_runner(runtime, canonical_from_module(module)) as runner:
        report = judged(runner, cache, precision)
    assert report.passed, report.failures
    assert report.runtime.startswith(runtime)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("option", [{"rope": None}, {"window": 3}, {"softcap": 1.5}], ids=str)
@pytest.mark.parametrize("cache", CACHES)
def test_other_layers_pass(cache, option):
    spec, precision = cached(cache, **option), PRECISIONS["fp16"]
    module = module_of(spec, "fp16")
    trace = trace_of(module, precision)
    assert run_decode_loop(HostDecodeLoop(ModuleRunner(module), spec, B), trace, spec, precision).passed


@pytest.mark.parametrize("cache", CACHES)
def test_a_layer_that_gives_only_zeros_is_not_verified(cache):
    spec, precision = cached(cache), PRECISIONS["fp16"]
    module = module_of(spec, "fp16")
    for projection in (module.v, module.o):
        for parameter in projection.parameters():
            parameter.zero_()
    trace = trace_of(module, precision)
    report = run_decode_loop(HostDecodeLoop(ModuleRunner(module), spec, B), trace, spec, precision)
    assert not report.passed
    assert not any(failure.is_wrong for failure in report.failures)
    assert {failure.output for failure in report.failures} == {"output", "value"}  # not the keys


def test_what_padding_gives_and_what_is_behind_the_valid_rows_is_not_judged():
    def after(call, feeds, results):
        if call == 0:  # row 1 has two tokens, and five of padding
            results["output"][1, 2:] = np.nan
        return results

    class SpoilsTheRest(HostDecodeLoop):
        def cache(self):
            held = {name: entries.copy() for name, entries in super().cache().items()}
            for entries in held.values():
                entries[1, :, 2 + STEPS :] = np.nan
            return held

    runner = Meddled(ModuleRunner(captured("preallocated")[0]), after=after)
    assert judged(runner, "preallocated", loop=SpoilsTheRest).passed


# -- what is wrong is caught, and placed -----------------------------------------------------------

MISTAKES = {  # the step that must fail first, and what must be wrong in the cache
    wrong.upper_left: (1, []),
    wrong.shifted_in_steps: (1, ["key"]),
    wrong.shifted_keys: (0, ["key"]),
    wrong.positions_from_zero: (1, ["key"]),
    wrong.shifted_alike: (None, ["key"]),  # no output shows it
    wrong.not_written: (wrong.AT + 1, ["key", "value"]),
    wrong.one_early: (wrong.AT + 1, ["key", "value"]),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("cache", CACHES)
def test_a_mistake_is_caught_where_it_shows_first(cache, precision, mistake):
    report = judged(mistake(captured(cache, precision)[0]), cache, precision)
    first, in_cache = MISTAKES[mistake]
    assert not report.passed
    assert report.first_failed == first
    assert wrong_in_cache(report) == in_cache
    assert len(report.errors) == STEPS  # a wrong step does not end the walk


@pytest.mark.sweep(2)
@pytest.mark.parametrize("only", ["key", "value"])
@pytest.mark.parametrize("cache", CACHES)
def test_a_row_that_the_last_step_did_not_write_shows_in_the_cache(cache, only):
    report = judged(wrong.not_written(captured(cache)[0], at=STEPS, only=only), cache)
    assert report.first_failed is None
    assert wrong_in_cache(report) == [only]
    row = report.failures[0].deviation.worst_index[0]
    last = captured(cache)[1].prompt[row] + STEPS - 1
    assert f"worst at batch element {row}, head " in report.failures[0].problem
    assert report.failures[0].problem.endswith(f"position {last}")


def test_a_row_that_keeps_what_padding_wrote_is_caught():
    report = judged(wrong.not_written(captured("preallocated")[0], at=1), "preallocated")
    assert report.first_failed == 2
    assert wrong_in_cache(report) == ["key", "value"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("cache", CACHES)
def test_swapped_rows_of_the_batch_are_caught(cache, precision):
    runner = ModuleRunner(captured(cache, precision)[0])
    report = judged(runner, cache, precision, loop=SwappedRows)
    assert report.first_failed == 1
    assert report.failures[0].deviation.worst_index[0] in (0, 1)
    assert wrong_in_cache(report) == ["key", "value"]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_length_that_is_not_advanced_is_caught_at_its_step(precision):
    runner = ModuleRunner(captured("preallocated", precision)[0])
    report = judged(runner, "preallocated", precision, loop=LosesCount)
    lost, step = report.failures[:2]
    assert (lost.case, lost.output, lost.problem) == (
        "decode step 3",
        "lengths",
        "[8, 4, 10] tokens, not [8, 5, 10]",
    )
    assert (step.case, step.output) == ("decode step 4", "output")
    assert step.problem.endswith("worst at batch element 1, token 0")


def test_a_value_that_is_not_finite_is_placed():
    def after(call, feeds, results):
        if call == 2:
            results["output"][1, 0, 5] = np.inf
        return results

    report = judged(Meddled(ModuleRunner(captured("preallocated")[0]), after=after), "preallocated")
    assert [(v.case, v.problem) for v in report.failures] == [
        ("decode step 2", "1 values are NaN or infinite, the first at (1, 0, 5)")
    ]
    assert report.errors[1] is None
    assert (report.first_failed, report.passed) == (2, False)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda y: y.astype(np.float32), "type float32, not float16"),
        (lambda y: y[:, :-1], "shape"),
        (lambda y: y[:2], "shape"),
        (lambda y: y.reshape(-1), "shape"),
    ],
)
def test_outputs_of_another_type_or_shape_fail(change, problem):
    runner = Meddled(
        ModuleRunner(captured("preallocated")[0]),
        after=lambda call, feeds, results: {**results, "output": change(results["output"])},
    )
    report = judged(runner, "preallocated")
    assert problem in report.failures[0].problem
    assert report.first_failed == 0


# -- runtimes that give up -------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "error", [DeployError("No memory.", got="8 GB", hint="another"), RuntimeError("No memory. 8 GB")]
)
@pytest.mark.parametrize("at", [0, 3, STEPS])
def test_a_runtime_that_raises_has_failed_with_its_reason(at, error):
    def before(call, feeds):
        if call == at:
            raise error
        return feeds

    report = judged(Meddled(ModuleRunner(captured("dynamic")[0]), before=before), "dynamic")
    (failure,) = report.failures
    assert failure.problem.startswith("could not be run: ")
    assert "No memory. 8 GB" in failure.problem
    assert report.first_failed == at
    assert len(report.errors) == at  # and nothing behind it was tried
    assert not wrong_in_cache(report)
    assert not report.passed


def longer(rows):
    """One row more behind the right ones."""
    return np.concatenate([rows, rows[:, :, -1:]], axis=2)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("cache", "problem"),
    [
        (lambda held: 1 / 0, "could not be run: The cache cannot be read. ZeroDivisionError"),
        (lambda held: held[:1], "could not be run: The cache cannot be read. ValueError"),
        (lambda held: tuple(rows.reshape(-1) for rows in held), "shape (1248,), not (3, 2, 13, 16)"),
        (lambda held: tuple(rows.repeat(2, 2) for rows in held), "shape (3, 2, 26, 16), not (3, 2, 13, 16)"),
        (lambda held: tuple(longer(rows) for rows in held), "shape (3, 2, 14, 16), not (3, 2, 13, 16)"),
        (lambda held: tuple(rows[:, :, :9] for rows in held), "shape (3, 2, 9, 16), not (3, 2, 13, 16)"),
        (lambda held: tuple(rows[:, :1] for rows in held), "shape (3, 1, 13, 16), not (3, 2, 13, 16)"),
        (lambda held: tuple(rows.astype(np.float32) for rows in held), "type float32, not float16"),
    ],
)
def test_a_cache_that_cannot_be_compared_has_failed(cache, problem):
    class Odd(HostDecodeLoop):
        def cache(self):
            keys, values = cache(tuple(super().cache().values()))
            return {"key": keys, "value": values}

    report = judged(ModuleRunner(captured("dynamic")[0]), "dynamic", loop=Odd)
    assert wrong_in_cache(report) == ["key", "value"]
    assert report.failures[0].problem.startswith(problem)
    assert report.first_failed is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda results: {"output": results["output"]}, "did not return present_key, present_value"),
        (lambda results: {**results, "present_key": results["present_key"][:, :, 1:]}, "the next call"),
        (
            lambda results: {**results, "present_value": results["present_value"].astype(np.float32)},
            "the next call",
        ),
    ],
)
def test_a_cache_that_cannot_go_into_the_next_call_is_a_failure(change, reason):
    runner = Meddled(
        ModuleRunner(captured("dynamic")[0]),
        after=lambda call, feeds, results: change(results) if call == 2 else results,
    )
    report = judged(runner, "dynamic")
    assert reason in report.failures[0].problem
    assert report.first_failed == 2


# -- what is refused -------------------------------------------------------------------------------


def refused(match, loop, trace, spec, precision="fp16"):
    with pytest.raises(DeployError, match=match):
        run_decode_loop(loop, trace, spec, PRECISIONS[precision])


def test_a_trace_that_does_not_fit_is_refused():
    module, trace = captured("preallocated")
    loop = HostDecodeLoop(ModuleRunner(module), module.spec, B)
    small = module.spec.with_axes({"S": Axis.parse("1:8:14"), "T": Axis.parse("14")})
    refused("does not hold oracle/key as", loop, trace, replace(module.spec, Hkv=4))
    refused("does not hold inputs/tokens/x as", loop, trace, module.spec, "bf16")
    refused("do not fit into the cache", loop, trace, small)
    refused("one length", loop, trace, cached("dynamic"))
    refused("no KV cache", loop, trace, find_spec("tiny-rope"))
    assert not loop.lengths.any()  # nothing was fed


def test_a_decode_loop_must_be_empty_and_have_the_rows_of_the_trace():
    module, trace = captured("preallocated")
    loop = HostDecodeLoop(ModuleRunner(module), module.spec, B)
    loop.feed(trace.prefill(), trace.prompt)
    refused("empty cache", loop, trace, module.spec)
    refused("empty cache", HostDecodeLoop(ModuleRunner(module), module.spec, B - 1), trace, module.spec)


def test_a_runner_of_another_layer_is_refused():
    for spec in (cached("preallocated"), find_spec("tiny-rope")):
        with pytest.raises(DeployError, match="with a KV cache"):
            HostDecodeLoop(ModuleRunner(captured("dynamic")[0]), spec, B)


def test_a_dynamic_cache_takes_no_counts():
    module, trace = captured("dynamic")
    with pytest.raises(DeployError, match="one length"):
        HostDecodeLoop(ModuleRunner(module), module.spec, B).feed(trace.prefill(), trace.prompt)


# -- the report ------------------------------------------------------------------------------------


def test_the_report_is_plain_data_and_shows_only_the_first_failures():
    report = judged(wrong.upper_left(captured("preallocated")[0]), "preallocated")
    data = json.loads(msgspec.json.encode(report.record))
    assert (data["outcome"], data["first_failed"], data["steps"]) == ("failed", 1, STEPS)
    assert (data["model"], data["trace"], data["prompt"]) == ("tiny-rope", "decode", [5, 2, 7])
    assert (data["judged"], data["failed"], len(data["failures"])) == (STEPS + 4, STEPS + 1, STEPS)
    assert data["table"] == [[step, data["errors"][step - 1]] for step in (1, 2, 4, 8)]
    assert data["share"] > 1


def test_every_step_is_reported_before_it_is_run():
    reported = []
    judged(ModuleRunner(captured("dynamic")[0]), "dynamic", on_step=reported.append)
    assert reported == list(range(STEPS + 1))


def report_of(errors):
    return DecodeReport(
        model="m",
        precision="fp16",
        runtime="b",
        trace="t",
        prompt=(1,),
        steps=len(errors),
        verdicts=(),
        of_prefill=0,
        first_failed=None,
        errors=tuple(errors),
        eager_errors=(),
    )


def growth_of(errors):
    return report_of(errors).record.growth


def test_growth_is_the_last_tenth_over_the_first():
    assert growth_of([1.0] * 10 + [9.0] * 80 + [2.0] * 10) == 2.0
    assert growth_of([1.0, 5.0, 1.0] + [0.0] * 24 + [3.0, 2.0, 3.0]) == 3.0
    assert growth_of([2.0, 3.0]) == 1.5
    assert growth_of([None, 2.0, 4.0] + [0.0] * 27 + [6.0, None, None]) == 2.0
    assert growth_of([1.0] + [9.0] * 17 + [4.0]) == 4.0, "a tenth of fewer than 20 steps is one of them"
    for unknown in ([], [1.0], [None, 1.0], [1.0, None], [0.0, 1.0]):
        assert growth_of(unknown) is None


def test_the_table_doubles_its_steps_and_ends_with_the_last():
    shown = report_of([0.5] * 1000).record.table
    assert [step for step, _ in shown] == [2**k for k in range(10)] + [1000]
    assert report_of([0.1, None, 0.3, 0.4]).record.table == ((1, 0.1), (2, None), (4, 0.4))
    assert report_of([]).record.table == ()


def test_a_step_may_use_the_budgets_around_it_and_no_others():
    rng, precision = np.random.default_rng(0), PRECISIONS["bf16"]
    cases = []
    for step in range(40):
        oracle, level = {"output": rng.standard_normal((1, 1, 64))}, 50.0 if step == 20 else 1.0
        cases.append(made_case(oracle, precision="bf16", level=level))
    budgets = step_budgets(cases, precision, {}, {})
    samples = cases[20].baselines["fp32"].samples["output"]
    loose = budget_from_samples(samples, cases[20].oracle["output"], precision)
    found = [budget["output"].relative_l2 == loose.relative_l2 for budget in budgets]
    assert found == [abs(step - 20) <= 8 for step in range(40)]


def test_a_report_that_lacks_steps_has_not_passed():
    report = judged(ModuleRunner(captured("dynamic")[0]), "dynamic")
    assert report.passed
    assert not replace(report, errors=report.errors[:-1]).passed
    assert not replace(report, verdicts=(), errors=()).passed


# -- a thousand steps --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "spoiled_at"), [(100, 70), (1000, 700)])
def test_many_steps_of_the_exported_graph(steps, spoiled_at):
    spec, precision = cached("dynamic", rows=steps + 24), PRECISIONS["fp16"]
    module = module_of(spec, "fp16")
    trace = trace_of(module, precision, (16, 16), steps)
    with open_runner("ort-cpu", canonical_from_module(module)) as runner:
        report = run_decode_loop(HostDecodeLoop(runner, spec, 2), trace, spec, precision)
        assert report.passed, report.failures
        assert len(report.errors) == steps
        assert growth(report.errors) < 2 * growth(report.eager_errors)
        # One value among many keys: whatever the outputs show, the cache names it.
        spoiled = wrong.not_written_by(runner, "dynamic", at=spoiled_at, only="value")
        report = run_decode_loop(HostDecodeLoop(spoiled, spec, 2), trace, spec, precision)
    assert [verdict.output for verdict in report.failures if verdict.case.endswith(" cache")] == ["value"]
    assert report.failures[-1].problem.endswith(f"position {spoiled_at + 15}")
