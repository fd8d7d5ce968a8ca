"""The wrong models: each must be caught in every precision in which it can be seen."""

from dataclasses import replace

import msgspec
import pytest
from graph_parity import graph_parity
from quantized_models import MISTAKES

import mha_deploy as md
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.cli.tables import self_test_verdict
from mha_deploy.graph.file import load_graph
from mha_deploy.graph.mutate import mutated, mutations
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.spec import Axis
from mha_deploy.runtime import cpu_runtime, open_runner
from mha_deploy.status import Kind, Outcome
from mha_deploy.validation.self_test import MutationTrial, RightVerdict, SelfTest, self_test

pytestmark = pytest.mark.usefixtures("in_process")  # quicker than a child process

CACHED = {
    "causal dropped",
    "causal off by one",
    "past forgotten",
    "cache off by one",
    "KV heads swapped",
    "groups interleaved",
    "heads transposed",
    "bias dropped",
}
# Between them, these layers have everything that can be got wrong.
LAYERS = {
    "tiny-gqa": {
        "causal dropped",
        "causal off by one",
        "causal leak in one query",
        "KV heads swapped",
        "groups interleaved",
    },
    "tiny-causal-padding": {"mask dropped", "mask off by one", "causal off by one"},
    "tiny-additive-causal": {"mask dropped", "causal off by one"},
    "tiny-packed": {"bias dropped", "groups interleaved"},
    "tiny-cross-padding": {"mask dropped", "KV heads swapped"},
    "tiny-mqa": {"heads transposed"},
    "tiny-weights": {"mask dropped"},
    "tiny-head-mix": {"bias dropped"},
    "tiny-sparse-heads": {"heads transposed"},
    "tiny-grouped-mlp": {"KV heads swapped"},
    "tiny-rope": {"rotary dropped", "rotary off by one", "rotary off by one on the last key"},
    "tiny-softcap": {"softcap dropped", "causal off by one"},
    "tiny-dynamic": {*CACHED, "rotary dropped", "rotary off by one"},
    "tiny-preallocated": {
        *CACHED,
        "rotary dropped",
        "rotary off by one",
        "entry one slot late",
        "stale entries",
    },
    "tiny-window": {"mask dropped", "mask off by one", "cache off by one", "heads transposed"},
}
FIRST = ("tiny-preallocated", "fp16")
ALWAYS = {"scale missing", "NaN", "newest entry zero", "values beyond a length", "one head zero"}
SLIGHTLY = {  # what rounding leaves visible
    share: {f"scale off by {share}", f"last batch element off by {share}"} for share in ("0.5 %", "4 %")
}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        # The first has the most mistakes, and other tests have its bundle, too.
        pytest.param(name, each, marks=() if (name, each) == FIRST else pytest.mark.slow)
        for name in LAYERS
        for each in ("fp16", "bf16", "fp32")
    ],
)
def test_every_wrong_model_is_caught_and_the_right_one_passes(bundles, name, precision):
    result = self_test(bundles(name, precision))
    assert result.right.passed
    assert [each.mistake for each in result.mutations if not each.caught] == []
    made = ALWAYS | SLIGHTLY["4 %" if precision == "bf16" else "0.5 %"] | LAYERS[name]
    assert {each.mistake for each in result.mutations} >= made
    # A wrong model that does not even run would be no proof.
    assert [each.mistake for each in result.mutations if each.share is None] == ["NaN"]
    assert result.passed


RIGHT = RightVerdict(outcome=Outcome.PASSED, share=0.3)


@pytest.mark.parametrize(
    ("trials", "outcome", "kind"),
    [
        ([(True, 9.0), (True, None)], "passed", None),
        ([(True, 9.0), (False, 0.31), (False, 0.2)], "failed", Kind.HIDDEN_BY_ROUNDING),
        ([(True, 9.0), (False, None)], "failed", None),  # nothing was measured
        ([], "not verified", Kind.NOTHING_TO_MUTATE),
    ],
)
def test_what_was_not_detected_or_tried_has_a_reason_in_the_verdict(trials, outcome, kind):
    trials = [MutationTrial(mistake=f"mistake {i}", caught=c, share=s) for i, (c, s) in enumerate(trials)]
    result = SelfTest(right=RIGHT, mutations=tuple(trials))
    assert result.outcome == outcome
    assert (result.reason and result.reason.kind) == kind
    shown = self_test_verdict(result).plain
    assert ("; " in shown) == (kind is not None), "what to try"
    if kind is Kind.HIDDEN_BY_ROUNDING:
        assert result.reason.numbers == {"missed": 2, "of": 3, "share": 0.31}
        assert "31%" in shown


# What cannot show within the axes: the future of a single token, a past that is always empty, the share of a
# key that is seen alone.
ALONE = {"scale off by 0.5 %", "scale off by 4 %", "scale missing", "groups interleaved"}
AHEAD = {"causal dropped", "causal off by one", "causal leak in one query"}
NARROW = {
    "token by token": ("tiny-dynamic", {"S": "1"}, {}, AHEAD),
    "static token by token": ("tiny-preallocated", {"S": "1"}, {}, AHEAD),
    "no past": ("tiny-dynamic", {"P": "0"}, {}, {"past forgotten", "cache off by one"}),
    "a past of one": ("tiny-dynamic", {"P": "0:1:1"}, {}, {"cache off by one"}),
    "filled by every call": (
        "tiny-preallocated",
        {"S": "64"},
        {},
        {"past forgotten", "cache off by one", "entry one slot late"},
    ),
    "window of one": ("tiny-dynamic", {}, {"window": 1}, ALONE),
    "idle window": ("tiny-preallocated", {"S": "1"}, {"window": 99}, {"mask dropped", "mask off by one"}),
    "one additive key": ("tiny-additive", {"S": "1"}, {}, {*ALONE, "mask dropped"}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("layer", NARROW)
def test_only_a_mistake_that_cannot_show_is_left_out(tmp_path, layer, monkeypatch):
    # Golden cases have every size that matters here.
    monkeypatch.setattr("mha_deploy.validation.self_test.draw_cases", lambda *given: ({}, ()))
    monkeypatch.setattr("mha_deploy.validation.self_test.traces_of", lambda *given: [])
    name, ranges, changes, hidden = NARROW[layer]
    spec = replace(find_spec(name), **changes)
    spec = spec.with_axes({axis: Axis.parse(text, name=axis) for axis, text in ranges.items()})
    bundle = md.export(spec, tmp_path / "bundle", precision="fp32")
    result = self_test(bundle)
    assert result.passed
    model, cases = load_graph(bundle.model_path), list(golden_cases(bundle))
    made = {mistake for mistake in mutations() if mutated(model, mistake) is not None}
    left_out = made - {each.mistake for each in result.mutations}
    assert left_out == hidden & made
    for mistake in left_out:
        assert graph_parity(bundle, model=mutated(model, mistake), cases=cases).passed, mistake


def test_the_layers_above_make_every_mistake():
    of_quantization = {*MISTAKES, "E5M2 for E4M3"}  # of trained models, in tests/export
    assert set(mutations()) == ALWAYS.union(of_quantization, *SLIGHTLY.values(), *LAYERS.values())


@pytest.mark.slow
def test_right_and_wrong_are_far_apart_in_fp16(bundles):
    result = self_test(bundles("tiny-gqa"))
    assert result.right.share < 0.5
    assert min(each.share for each in result.mutations if each.share is not None) > 2


def test_a_mistake_that_is_missed_fails_the_self_test(bundles, monkeypatch):
    monkeypatch.setattr("mha_deploy.graph.mutate._MUTATIONS", {"nothing at all": lambda site: None})
    result = self_test(bundles("tiny-mha"))
    assert result.right.passed
    assert not result.passed
    assert msgspec.to_builtins(result)["mistakes"][0]["caught"] is False


@pytest.mark.parametrize("name", ["tiny-padding", "tiny-preallocated"])
def test_a_mistake_is_made_in_a_copy(bundles, name):
    bundle = bundles(name)
    model = load_graph(bundle.model_path)
    names = [node.name for node in model.graph]
    for mistake in mutations():
        mutated(model, mistake)
    case = next(golden_cases(bundle))
    with open_runner(cpu_runtime(bundle.manifest.precision), model) as after:
        again = after.run(case.inputs)["output"]
    with open_runner(cpu_runtime(bundle.manifest.precision), bundle.model_path) as before:
        assert (before.run(case.inputs)["output"] == again).all()
    assert [node.name for node in model.graph] == names
