"""Faults are planted one at a time, and each is found where it is."""

import shutil

import msgspec
import numpy as np
import onnx_ir as ir
import pytest
from golden_made import made_case

from mha_deploy.bundle.cases import golden_cases
from mha_deploy.bundle.folder import open_bundle
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.graph.attention_node import is_attention
from mha_deploy.graph.file import load_graph, save_graph
from mha_deploy.graph.lower import lower
from mha_deploy.graph.mutate import mutated
from mha_deploy.judge import judge_case
from mha_deploy.report.table import trials_table
from mha_deploy.runtime import open_runner
from mha_deploy.runtime.runner import Runner
from mha_deploy.status import Kind, Reason
from mha_deploy.validation.fault import attribute_fault

# A runner in a child process that is not closed costs the next test a new process.
pytestmark = pytest.mark.usefixtures("in_process")
HQ, D, E = 4, 16, 64


def in_ort(model):
    return open_runner("ort-cpu", model)


class Corrupted(Runner):
    """A runner whose output is off by one per cent."""

    def __init__(self, inner):
        self.inner, self.name, self.inputs, self.outputs = inner, "corrupted", inner.inputs, inner.outputs

    def _run(self, feeds):
        got = self.inner.run(feeds)
        return {**got, "output": got["output"] * np.float16(1.01)}


def is_fused(model):
    """What a backend could fuse: nothing of the inside of attention is given out."""
    return len(model.graph.outputs) == 1


def is_float32(model):
    return model.graph.outputs[-1].dtype == ir.DataType.FLOAT


def corrupting(when):
    """A runtime that is wrong on some graphs."""
    return lambda model: Corrupted(in_ort(model)) if when(model) else in_ort(model)


def failing(bundle, runner):
    """The cases that a runner is wrong on."""
    precision = bundle.manifest.precision
    with runner:
        return [
            case
            for case in golden_cases(bundle)
            if not all(verdict.passed for verdict in judge_case(case, runner.run(case.inputs), precision))
        ]


def names(found):
    return [(trial.name, trial.outcome == "passed") for trial in found.trials]


@pytest.fixture
def with_graph(bundles, tmp_path):
    """A copy of a bundle with another graph in it."""

    def make(name, model):
        shutil.copytree(bundles(name).path, tmp_path / "bundle", ignore=shutil.ignore_patterns("engines"))
        save_graph(model, tmp_path / "bundle" / "model.onnx")
        return open_bundle(tmp_path / "bundle", verify=False)

    return make


# -- one fault at a time -----------------------------------------------------------------------


def test_a_wrong_graph_is_at_fault_whatever_the_runtime(bundles, with_graph):
    wrong = mutated(load_graph(bundles("tiny-gqa").model_path), "KV heads swapped")
    bundle = with_graph("tiny-gqa", wrong)
    found = attribute_fault(bundle, failing(bundle, in_ort(wrong)), in_ort)
    assert found.at_fault == "graph"
    assert names(found) == [("the graph in ort-cpu", False)]
    assert found.trials[0].share > 1


def test_a_wrong_fused_kernel_is_at_fault_where_the_unfused_twin_is_right(bundles):
    bundle = bundles("tiny-gqa")
    runtime = corrupting(is_fused)
    cases = failing(bundle, runtime(lower(load_graph(bundle.model_path), "primitives")))
    assert cases
    found = attribute_fault(bundle, cases, runtime)
    assert found.at_fault == "fusion"
    assert names(found) == [("the graph in ort-cpu", True), ("unfused engine, fp16", True)]
    assert all(trial.share < 1 for trial in found.trials)


def test_a_runtime_that_is_always_wrong_is_at_fault_with_the_lowering(bundles):
    bundle = bundles("tiny-gqa")
    found = attribute_fault(bundle, list(golden_cases(bundle)), corrupting(lambda model: True))
    assert found.at_fault == "lowering"
    assert names(found) == [
        ("the graph in ort-cpu", True),
        ("unfused engine, fp16", False),
        ("unfused engine, fp32", False),
    ]


def test_scores_that_overflow_in_half_precision_are_at_fault(bundles, with_graph):
    model, case = overflowing(load_graph(bundles("tiny-mha").model_path))
    found = attribute_fault(with_graph("tiny-mha", model), [case], in_ort)
    assert found.at_fault == "precision"
    assert names(found) == [
        ("the graph in ort-cpu", True),
        ("unfused engine, fp16", False),
        ("unfused engine, fp32", True),
    ]
    assert found.trials[1].share is None, "NaN or infinite"


def overflowing(model):
    """A layer whose scores are beyond FP16, and exact in float32; and a case of it.

    Queries and keys are small whole numbers, so nothing but the scores rounds before the softmax.
    """
    rng = np.random.default_rng(0)
    copy = model.clone()
    weights = {}
    for name, value in copy.graph.initializers.items():
        array = value.const_value.numpy()
        if name in ("q.weight.T", "k.weight.T"):
            array = rng.integers(-1, 2, array.shape).astype(np.float16)
        elif name in ("q.bias", "k.bias"):
            array = np.zeros_like(array)
        value.const_value = ir.Tensor(array, name=name)
        weights[name] = array.astype(np.float64)
    (attention,) = (node for node in copy.graph if is_attention(node))
    attention.attributes["scale"] = ir.AttrFloat32("scale", 1024.0)

    x = rng.integers(-1, 2, (2, 16, E)).astype(np.float16)
    linear = {n: x.astype(np.float64) @ weights[f"{n}.weight.T"] + weights[f"{n}.bias"] for n in "qkv"}
    q, k, v = (linear[n].reshape(2, 16, HQ, D).transpose(0, 2, 1, 3) for n in "qkv")
    scores = 1024.0 * q @ k.transpose(0, 1, 3, 2)
    assert np.abs(scores).max() > 65504
    exp = np.exp(scores - scores.max(axis=-1, keepdims=True))
    heads = (exp / exp.sum(axis=-1, keepdims=True)) @ v
    y = heads.transpose(0, 2, 1, 3).reshape(2, 16, E) @ weights["o.weight.T"] + weights["o.bias"]
    return copy, made_case({"output": y}, name="overflow", sizes={"B": 2, "S": 16}, inputs={"x": x})


# -- every combination -------------------------------------------------------------------------

RIGHT, WRONG, ABSENT = "right", "wrong", "absent"


def behaving(how):
    """A runtime that is right, wrong or absent."""

    def open_(model):
        if how == ABSENT:
            raise BackendUnavailable("No builder.", got="nothing", hint="install it")
        return Corrupted(in_ort(model)) if how == WRONG else in_ort(model)

    return open_


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("graph", "unfused", "float32", "at_fault"),
    [
        (WRONG, RIGHT, RIGHT, "graph"),
        (RIGHT, RIGHT, WRONG, "fusion"),
        (ABSENT, RIGHT, WRONG, "fusion"),  # a twin that is right has a graph that is right
        (RIGHT, WRONG, RIGHT, "precision"),
        (ABSENT, WRONG, RIGHT, "precision"),
        (RIGHT, WRONG, WRONG, "lowering"),
        (RIGHT, ABSENT, WRONG, "lowering"),
        (ABSENT, WRONG, WRONG, "unknown"),
        (RIGHT, WRONG, ABSENT, "unknown"),
        (RIGHT, ABSENT, RIGHT, "unknown"),
        (RIGHT, ABSENT, ABSENT, "unknown"),
    ],
)
def test_what_is_known_follows_from_what_could_be_tried(
    bundles, monkeypatch, graph, unfused, float32, at_fault
):
    bundle = bundles("tiny-mha")
    monkeypatch.setattr("mha_deploy.validation.fault.open_runner", lambda name, model: behaving(graph)(model))
    cases = [case for case in golden_cases(bundle) if case.name == "odd"]
    found = attribute_fault(
        bundle, cases, lambda model: behaving(float32 if is_float32(model) else unfused)(model)
    )
    assert found.at_fault == at_fault
    assert ("could not be built" in found.explanation) == (at_fault == "unknown")


def test_in_float32_there_is_one_twin(bundles):
    bundle = bundles("tiny-mha", "fp32")

    class Off(Corrupted):
        def _run(self, feeds):
            got = self.inner.run(feeds)
            return {**got, "output": got["output"] * np.float32(1.01)}

    found = attribute_fault(bundle, list(golden_cases(bundle)), lambda model: Off(in_ort(model)))
    assert found.at_fault == "lowering"
    assert names(found) == [("the graph in ort-cpu", True), ("unfused engine, fp32", False)]


@pytest.mark.slow
def test_a_twin_that_stops_at_run_time_is_recorded(bundles):
    bundle = bundles("tiny-mha")

    class Stops(Corrupted):
        closed = 0

        def _run(self, feeds):
            raise DeployError("Out of memory.", hint="another")

        def close(self):
            Stops.closed += 1

    found = attribute_fault(bundle, list(golden_cases(bundle)), lambda model: Stops(in_ort(model)))
    assert found.at_fault == "unknown"
    assert [trial.name for trial in found.trials[1:]] == ["unfused engine, fp16", "unfused engine, fp32"]
    stopped = Reason(kind=Kind.DID_NOT_RUN, got="Out of memory.")
    assert [trial.reason for trial in found.trials] == [None, stopped, stopped]
    assert Stops.closed == 2


def test_fault_is_plain_json_with_the_fields_of_the_report(bundles):
    bundle = bundles("tiny-mha")
    cases = list(golden_cases(bundle))[:1]
    data = msgspec.to_builtins(attribute_fault(bundle, cases, behaving(ABSENT)))
    assert list(data) == ["at_fault", "explanation", "trials"]
    assert (data["trials"][0]["outcome"], data["trials"][0]["reason"]) == ("passed", None)
    assert data["trials"][1] == {
        "name": "unfused engine, fp16",
        "outcome": "not verified",
        "share": None,
        "reason": {"kind": "did not build", "got": "No builder. nothing"},
    }
    assert not [text for text in (str(data), trials_table(data["trials"])) if "install it" in str(text)]
    assert "No builder." in str(trials_table(data["trials"])), "a reader is told why"
