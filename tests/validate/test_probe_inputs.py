"""Probe inputs: a mistake at the edge of a mask, a window, a rotation or a cache shows at any length."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from golden_made import made_case

import mha_deploy as md
from mha_deploy.baselines.fresh import FreshCases, layer_probe
from mha_deploy.bundle.cases import Baseline, KnownMistake
from mha_deploy.bundle.sizes import interior_sizes, usual_points
from mha_deploy.judge import judge_case
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.reference.inputs import tensor_from_numpy
from mha_deploy.runtime import cpu_runtime, open_runner


def probes(bundle, probe="edges"):
    maker = FreshCases(bundle, "cpu")
    for point in usual_points(bundle.manifest.spec):
        yield maker.case(point.sizes, seed=1, past=point.past, probe=probe)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "name", ["tiny-gqa", "tiny-rope", "tiny-window", "tiny-preallocated", "tiny-causal-padding"]
)
def test_a_right_graph_is_well_within_a_probe_budget(bundles, name):
    bundle = bundles(name)
    precision = bundle.manifest.precision
    with open_runner(cpu_runtime(precision), bundle.model_path) as runner:
        for probe in ("edges", "coarse"):
            for case in probes(bundle, probe):
                assert max(v.share for v in judge_case(case, runner.run(case.inputs), precision)) < 0.6


def test_validate_runs_probes_and_random_sizes_by_default_and_names_them(bundles):
    report = md.validate(bundles("tiny-gqa"), latency=False, seed=5).to_dict()
    assert [run["cases"] for run in report["parity"]] == ["golden", "probe", "fresh"]
    assert [each["case"] for each in report["parity"][1]["verdicts"]] == ["probe-opt", "coarse-opt"]
    wanted = interior_sizes(bundles("tiny-gqa").manifest.spec, seed=5)
    assert [each["sizes"] for each in report["parity"][2]["verdicts"]] == wanted
    without = md.validate(bundles("tiny-gqa"), latency=False, probe=False).to_dict()
    assert [run["cases"] for run in without["parity"]] == ["golden"]


def attention(x, *, heads, last_key=True, leak_at=None, shift_last=0.0, weights_in=np.float64):
    """Causal attention over x [S, E] with keys, queries and values of random projections, in FP64."""
    S, E = x.shape
    rng = np.random.default_rng(0)
    q, k, v = (x @ (rng.standard_normal((E, E)) / np.sqrt(E)) for _ in range(3))
    D = E // heads
    q, k, v = (t.reshape(S, heads, D).swapaxes(0, 1) for t in (q, k, v))
    position = np.arange(S, dtype=float)
    position[-1] += shift_last
    q, k = rotated(q, np.arange(S, dtype=float)), rotated(k, position)
    visible = np.tril(np.ones((S, S), bool))
    visible[-1, -1] = last_key
    if leak_at is not None:
        visible[leak_at, leak_at + 1] = True
    scores = np.where(visible, q @ k.swapaxes(1, 2) / np.sqrt(D), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = (weights / weights.sum(-1, keepdims=True)).astype(weights_in).astype(np.float64) @ v
    return out.swapaxes(0, 1).reshape(1, S, E) @ (rng.standard_normal((E, E)) / np.sqrt(E))


def rotated(x, positions):
    D = x.shape[-1]
    angles = positions[:, None] / 10000 ** (np.arange(D // 2) / (D // 2))
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
    )


def test_a_mistake_at_one_position_of_thousands_is_caught():
    S, E, heads = 256, 128, 8
    drawn = np.random.default_rng(1).standard_normal((1, S, E)).astype(np.float32)
    loud = layer_probe(find_spec("tiny-rope"), {"x": tensor_from_numpy(drawn)})["x"].numpy()[0]
    x = loud.astype(np.float16).astype(np.float64)
    oracle = attention(x, heads=heads)
    case = made_case({"output": oracle}, level=6.0)
    (right,) = judge_case(case, {"output": oracle.astype(np.float16)}, PRECISIONS["fp16"])
    assert right.passed
    for mistake, query in (
        ({"last_key": False}, S - 1),
        ({"leak_at": S - 2}, S - 2),
        ({"shift_last": 1.0}, S - 1),
    ):
        wrong = attention(x, heads=heads, **mistake).astype(np.float16)
        (verdict,) = judge_case(case, {"output": wrong}, PRECISIONS["fp16"])
        assert verdict.is_wrong
        assert f"query {query}" in verdict.problem


@pytest.mark.parametrize("accumulate", ["fp32", "fp16"])
def test_coarse_softmax_weights_are_named(accumulate):
    S, E, heads = 48, 256, 8
    x = np.random.default_rng(1).standard_normal((S, E)).astype(np.float16).astype(np.float64)
    oracle, coarse = (attention(x, heads=heads, weights_in=kind) for kind in (np.float64, ml_dtypes.bfloat16))
    # GEMMs that accumulate in FP16 err by several times what coarse weights change.
    size = {"fp32": 4e-4, "fp16": 2e-3}[accumulate] * oracle.std()
    rounding, *others = size * np.random.default_rng(2).standard_normal((13, *oracle.shape))
    case = made_case(
        {"output": oracle},
        baselines={accumulate: Baseline({"output": np.stack(others).astype(np.float32)})},
        suspects={"softmax weights in BF16": KnownMistake({"output": coarse - oracle})},
    )
    precision = replace(PRECISIONS["fp16"], accumulate=accumulate)
    for weights_in, passes in ((np.float16, True), (ml_dtypes.bfloat16, False)):
        got = (attention(x, heads=heads, weights_in=weights_in) + rounding).astype(np.float16)
        (verdict,) = judge_case(case, {"output": got}, precision)
        assert verdict.passed is passes, verdict.share
        assert passes or "softmax weights in BF16" in verdict.problem


def test_without_pytorch_there_are_no_probes_and_the_report_says_so(bundles, monkeypatch):
    """What is judged is never its own oracle."""
    monkeypatch.setattr("mha_deploy.validation.runtimes.can_import", lambda name: name != "torch")
    report = md.validate(bundles("tiny-gqa"), latency=False).to_dict()
    assert [run["cases"] for run in report["parity"]] == ["golden"]
    assert "probe inputs" in [each["name"] for each in report["absent"]]
