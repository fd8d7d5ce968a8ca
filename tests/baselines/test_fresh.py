"""Fresh golden cases: new inputs, and an oracle that needs no more memory than it is given."""

import numpy as np
import pytest
import torch

from mha_deploy.baselines import fresh as blocked
from mha_deploy.baselines.fresh import FreshCases, QueriesInBlocks, run_in_blocks
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.errors import ExportError, SpecError
from mha_deploy.exporter.oracle import run_in_float64
from mha_deploy.judge import judge_case
from mha_deploy.model.catalog import catalog_names, find_spec
from mha_deploy.model.spec import Axis
from mha_deploy.reference import build_module
from mha_deploy.reference.inputs import call_arguments, fed_to, random_inputs
from mha_deploy.runtime import cpu_runtime, open_runner

TINY = [name for name in catalog_names() if name.startswith("tiny-")]
SIZES = {"B": 4, "S": 37, "T": 24, "P": 21}


def sizes_of(spec):
    return {name: SIZES[name] if axis.is_dynamic else axis.min for name, axis in spec.axes.items()}


# -- cases ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sweep(4)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "name",
    [
        "tiny-gqa",
        "tiny-cross-padding",
        "tiny-sparse-heads",
        "tiny-weights",
        "tiny-dynamic",
        "tiny-preallocated",
        "tiny-window",
    ],
)
def test_a_fresh_case_is_passed_by_the_module_itself_and_by_a_runtime(bundles, name, precision):
    bundle = bundles(name, precision)
    kind, spec = bundle.manifest.precision, bundle.manifest.spec
    fresh = FreshCases(bundle, "cpu")
    with open_runner(cpu_runtime(kind), bundle.model_path) as runner:
        for seed, ragged in ((1, False), (2, True)):
            case = fresh.case(sizes_of(spec), seed=seed, ragged=ragged)
            for tensor in spec.outputs:
                assert case.oracle[tensor.name].dtype == np.float64
                assert case.oracle[tensor.name].shape == tensor.shape(case.sizes)
            for got in (case.eager, runner.run(case.inputs)):
                assert [verdict.problem for verdict in judge_case(case, got, kind)] == [None] * len(got)


def test_a_fresh_case_is_a_golden_case_of_another_draw(bundles):
    bundle = bundles("tiny-gqa")
    golden = next(case for case in golden_cases(bundle) if case.name == "odd")
    fresh = FreshCases(bundle, "cpu").case(golden.sizes, seed=1)
    assert fresh.name == "fresh-B3-S37-seed1"
    assert fresh.inputs["x"].shape == golden.inputs["x"].shape
    assert not np.array_equal(fresh.inputs["x"], golden.inputs["x"])
    problems = [v.problem for v in judge_case(fresh, golden.eager, bundle.manifest.precision)]
    assert problems != [None], "the result of other inputs"


@pytest.mark.slow
def test_a_seed_draws_one_case_and_another_seed_another(bundles):
    fresh, sizes = FreshCases(bundles("tiny-padding"), "cpu"), {"B": 2, "S": 16}
    first, again, other = (fresh.case(sizes, seed=seed) for seed in (3, 3, 4))
    for name in first.inputs:
        np.testing.assert_array_equal(first.inputs[name], again.inputs[name])
    np.testing.assert_array_equal(first.oracle["output"], again.oracle["output"])
    assert not np.array_equal(first.inputs["x"], other.inputs["x"])
    assert first.name != other.name
    ragged = fresh.case(sizes, seed=3, ragged=True)
    assert ragged.name != first.name
    assert ragged.inputs["key_lengths"].min() == 0


@pytest.mark.slow
def test_a_preallocated_cache_can_be_filled_to_one_length(bundles):
    fresh, sizes = FreshCases(bundles("tiny-preallocated"), "cpu"), {"B": 3, "S": 1, "T": 64}
    empty, full, drawn = (fresh.case(sizes, seed=3, past=past) for past in (0, 63, None))
    assert empty.inputs["lengths"].tolist() == [0] * 3
    assert full.inputs["lengths"].tolist() == [63] * 3
    assert full.inputs["lengths"].dtype == np.int32
    assert len(set(drawn.inputs["lengths"].tolist())) > 1
    for case, row in ((empty, 0), (full, 63)):
        np.testing.assert_array_equal(case.inputs["x"], drawn.inputs["x"])
        differ = case.oracle["key_cache_out"] != case.inputs["key_cache"]
        assert set(np.nonzero(differ)[2].tolist()) == {row}, "the only row that was written"


@pytest.mark.slow
def test_a_dynamic_cache_may_be_empty_and_takes_no_lengths(bundles):
    fresh = FreshCases(bundles("tiny-dynamic"), "cpu")
    case = fresh.case({"B": 2, "S": 5, "P": 0}, seed=1)
    assert case.inputs["past_key"].shape == (2, 2, 0, 16)
    assert case.oracle["present_key"].shape == (2, 2, 5, 16)
    with pytest.raises(SpecError, match="has lengths"):
        fresh.case({"B": 2, "S": 5, "P": 0}, seed=1, past=0)


@pytest.mark.slow
def test_a_cache_without_room_is_refused(bundles):
    with pytest.raises(SpecError, match="do not fit into"):
        FreshCases(bundles("tiny-preallocated"), "cpu").case({"B": 2, "S": 4, "T": 64}, seed=1, past=61)


def test_sizes_outside_the_axes_are_refused(bundles):
    with pytest.raises(SpecError):
        FreshCases(bundles("tiny-gqa"), "cpu").case({"B": 1, "S": 4096}, seed=0)


def test_a_module_that_overflows_gives_no_case(bundles):
    fresh = FreshCases(bundles("tiny-gqa"), "cpu")
    fresh._capture.module.o.weight.fill_(60000.0)
    with pytest.raises(ExportError, match="itself overflows in fp16"):
        fresh.case({"B": 1, "S": 4}, seed=0)


@pytest.mark.slow
def test_an_oracle_with_little_memory_gives_the_same_case(bundles):
    bundle = bundles("tiny-padding")
    whole, blocks = (FreshCases(bundle, "cpu", oracle_bytes=limit) for limit in (None, 1 << 12))
    one, other = (fresh.case({"B": 4, "S": 37}, seed=5, ragged=True) for fresh in (whole, blocks))
    np.testing.assert_array_equal(one.inputs["x"], other.inputs["x"])
    np.testing.assert_array_equal(one.eager["output"], other.eager["output"])
    np.testing.assert_allclose(other.oracle["output"], one.oracle["output"], rtol=1e-13, atol=1e-14)


# -- blocks --------------------------------------------------------------------------------------


@pytest.mark.sweep(5)
@pytest.mark.parametrize("limit", [1, 1 << 12, 1 << 30])
@pytest.mark.parametrize("name", TINY)
def test_blocks_change_nothing(name, limit):
    spec = find_spec(name)
    module = build_module(spec, dtype=torch.float64)
    arguments = call_arguments(spec, fed_to(module, random_inputs(spec, sizes_of(spec), seed=0, ragged=True)))
    whole = run_in_float64(module, arguments)
    parts = run_in_blocks(module, arguments, limit_bytes=limit)
    assert len(parts) == len(whole)
    for part, one in zip(parts, whole, strict=True):
        torch.testing.assert_close(part, one, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", ["tiny-gqa", "tiny-additive", "tiny-dynamic", "tiny-preallocated"])
def test_a_batch_of_fixed_size_is_split_too(name):
    """Its first dimension is a number in the spec, as that of a mask that all rows share."""
    spec = find_spec(name).with_axes({"B": Axis.parse("4")})
    module = build_module(spec, dtype=torch.float64)
    arguments = call_arguments(spec, fed_to(module, random_inputs(spec, sizes_of(spec), seed=0)))
    whole, parts = run_in_float64(module, arguments), run_in_blocks(module, arguments, limit_bytes=1)
    for part, one in zip(parts, whole, strict=True):
        torch.testing.assert_close(part, one, rtol=1e-13, atol=1e-14)


def test_what_fits_is_run_at_once(monkeypatch):
    spec = find_spec("tiny-gqa")
    module = build_module(spec, dtype=torch.float64)
    arguments = call_arguments(spec, fed_to(module, random_inputs(spec, sizes_of(spec), seed=0)))
    batches = []
    monkeypatch.setattr(
        blocked,
        "run_in_float64",
        lambda module, taken, mode: batches.append(taken["query"].shape[0]) or run_in_float64(module, taken),
    )
    run_in_blocks(module, arguments, limit_bytes=1 << 30)
    run_in_blocks(module, arguments, limit_bytes=1)
    assert batches == [4, 1, 1, 1, 1]


def test_attention_in_blocks_keeps_its_scores_within_the_bound(monkeypatch):
    """The largest call that reaches PyTorch has no more scores than the bound allows."""
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention

    def watched(q, k, v, **options):
        seen.append((q.shape[-2], 3 * 8 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]))
        return real(q, k, v, **options)

    q, k, v = (torch.randn(2, 4, 64, 16, dtype=torch.float64) for _ in range(3))
    whole = real(q, k, v, is_causal=True)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    got = QueriesInBlocks(100_000)._attention(q, k, v, is_causal=True)
    torch.testing.assert_close(got, whole, rtol=1e-13, atol=1e-14)
    assert sum(queries for queries, _ in seen) == 64
    assert max(scores for _, scores in seen) <= 100_000
