"""Compression of models that were trained, where loss is accuracy."""

from functools import cache

import pytest
from quantized_models import HEADS, MISTAKES, transformer
from trained_models import accuracy, labelled, train, with_twin

import mha_deploy as md
from mha_deploy.errors import LossExceeded

pytestmark = pytest.mark.usefixtures("in_process")
OPTIONS = {"golden": ("opt",), "axes": {"B": "1:2:16", "S": "1:8:8"}}
IDLE, NEEDED, TWIN = 1, 2, 3  # heads of the model that recalls
LEAST = {"recall": 0.99, "classify": 0.9}  # accuracy before compression
IN_EIGHT_BITS = [("recall", "int8"), ("recall", "fp8"), ("classify", "int8")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function that gives the trained model of a task.

    In that which recalls, one head does nothing and one is there twice.
    """
    folder = tmp_path_factory.mktemp("trained")

    @cache
    def make(task):
        idle = {"idle": (IDLE, TWIN)} if task == "recall" else {}
        found = train(task, **idle)
        changed = with_twin(found, NEEDED, TWIN) if task == "recall" else found
        return transformer(folder / f"{task}.onnx", changed=changed)

    return make


@pytest.fixture(scope="module")
def quantized(models, tmp_path_factory):
    """A function that gives the bundle of a task in eight bits."""
    folder = tmp_path_factory.mktemp("quantized")

    @cache
    def make(task, name):
        options = {"precision": name, "data": labelled(task), "metric": accuracy, **OPTIONS}
        return md.export(models(task), folder / f"{task}-{name}", **options)

    return make


@pytest.mark.parametrize(
    ("task", "name"),
    [pytest.param(*each, marks=pytest.mark.slow if each[0] == "classify" else ()) for each in IN_EIGHT_BITS],
)
def test_eight_bits_keep_the_accuracy(quantized, task, name):
    """Within one percent, on samples that nothing was chosen by."""
    loss = quantized(task, name).manifest.loss
    assert loss.held_out
    assert loss.metric.original > LEAST[task]
    assert abs(loss.metric.compressed - loss.metric.original) <= 0.01
    assert 0 < loss.worst < 0.1


@pytest.mark.parametrize("name", [pytest.param("int8", marks=pytest.mark.slow), "fp8"])
def test_every_mistake_of_quantization_is_caught(quantized, name):
    result = md.self_test(quantized("recall", name))
    assert result.right.passed
    made = {each.mistake: each.caught for each in result.mutations}
    assert set(made) >= MISTAKES | ({"E5M2 for E4M3"} if name == "fp8" else set())
    assert all(made.values()), made


def test_a_head_that_is_there_twice_goes_and_a_needed_one_does_not(models, tmp_path):
    limits = {"data": labelled("recall"), "metric": accuracy, **OPTIONS}
    bundle = md.prune(models("recall"), tmp_path / "without", heads="auto", max_loss=1e-3, **limits)
    loss = bundle.manifest.loss
    gone = {each.heads[0] for each in loss.layers if each.is_compressed}
    assert gone in ({IDLE, NEEDED}, {IDLE, TWIN})
    assert loss.metric.compressed == loss.metric.original
    assert bundle.manifest.attention[0]["Hq"] == HEADS - len(gone)
    with pytest.raises(LossExceeded):  # of the others none can go
        md.prune(bundle.path / "source.onnx", tmp_path / "less", heads="auto", max_loss=1e-3, **limits)
