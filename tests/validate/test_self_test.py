"""The wrong models: each must be caught in every precision in which it can be seen."""

import math

import pytest

from mha_deploy.backends import cpu_backend, open_runner
from mha_deploy.golden import golden_cases
from mha_deploy.graph.file import load_graph
from mha_deploy.graph.sabotage import sabotaged, sabotages
from mha_deploy.validate.self_test import budget_share, self_test

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
    "tiny-gqa": {"causal dropped", "causal off by one", "KV heads swapped", "groups interleaved"},
    "tiny-causal-padding": {"mask dropped", "mask off by one", "causal off by one"},
    "tiny-additive-causal": {"mask dropped", "causal off by one"},
    "tiny-packed": {"bias dropped", "groups interleaved"},
    "tiny-cross-padding": {"mask dropped", "KV heads swapped"},
    "tiny-mqa": {"heads transposed"},
    "tiny-weights": {"mask dropped"},
    "tiny-head-mix": {"bias dropped"},
    "tiny-sparse-heads": {"heads transposed"},
    "tiny-grouped-mlp": {"KV heads swapped"},
    "tiny-rope": {"rotary dropped", "rotary off by one"},
    "tiny-softcap": {"softcap dropped", "causal off by one"},
    "tiny-growing": {*CACHED, "rotary dropped", "rotary off by one"},
    "tiny-static": {*CACHED, "rotary dropped", "rotary off by one"},
    "tiny-window": {"mask dropped", "mask off by one", "cache off by one", "heads transposed"},
}
ALWAYS = {"scale off by 0.5 %", "scale missing", "NaN"}


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_wrong_model_is_caught_and_the_right_one_passes(bundles, name, precision):
    result = self_test(bundles(name, precision))
    assert result.right.passed
    assert [catch.mistake for catch in result.catches if not catch.caught] == []
    assert {catch.mistake for catch in result.catches} >= ALWAYS | LAYERS[name]
    # A wrong model that does not even run would be no proof.
    assert [catch.mistake for catch in result.catches if math.isinf(catch.share)] == ["NaN"]
    assert result.passed


def test_the_layers_above_make_every_mistake():
    assert set(sabotages()) == ALWAYS.union(*LAYERS.values())


def test_right_and_wrong_are_far_apart_in_fp16(bundles):
    result = self_test(bundles("tiny-gqa"))
    assert budget_share(result.right) < 0.25
    assert min(catch.share for catch in result.catches) > 2


def test_a_mistake_that_is_missed_fails_the_self_test(bundles, monkeypatch):
    monkeypatch.setattr("mha_deploy.graph.sabotage._SABOTAGES", {"nothing at all": lambda node, facts: True})
    result = self_test(bundles("tiny-mha"))
    assert result.right.passed
    assert not result.passed
    assert result.to_dict()["mistakes"][0]["caught"] is False


def test_a_mistake_is_made_in_a_copy(bundles):
    bundle = bundles("tiny-causal-padding")
    model = load_graph(bundle.model_path)
    names = [node.name for node in model.graph]
    for mistake in sabotages():
        sabotaged(model, mistake)
    case = next(golden_cases(bundle))
    with open_runner(cpu_backend(bundle.manifest.precision), model) as after:
        again = after.run(case.inputs)["output"]
    with open_runner(cpu_backend(bundle.manifest.precision), bundle.model_path) as before:
        assert (before.run(case.inputs)["output"] == again).all()
    assert [node.name for node in model.graph] == names


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("tiny-mha", "mask dropped"),
        ("tiny-mha", "causal off by one"),
        ("tiny-mqa", "KV heads swapped"),
        ("tiny-gqa", "past forgotten"),
        ("tiny-gqa", "cache off by one"),
        ("tiny-window", "past forgotten"),
        ("tiny-window", "causal off by one"),
        ("tiny-window", "rotary dropped"),
        ("tiny-static", "softcap dropped"),
    ],
)
def test_a_mistake_that_cannot_be_made_is_left_out(bundles, name, mistake):
    assert sabotaged(load_graph(bundles(name).model_path), mistake) is None
