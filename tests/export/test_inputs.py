"""Inputs to try a layer with: repeatable, in the spec's shapes, ragged where that is asked for."""

import ml_dtypes
import numpy as np
import pytest
import torch

from mha_deploy.bundle.cases import golden_cases
from mha_deploy.bundle.sizes import PlannedCase, plan_golden
from mha_deploy.exporter.axes import draw_inputs
from mha_deploy.exporter.golden import LayerCapture
from mha_deploy.model.catalog import catalog_names, find_spec
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.reference import build_module
from mha_deploy.reference.attention import alibi_bias
from mha_deploy.reference.inputs import call_arguments, fed_to, random_inputs, to_numpy

PADDING = find_spec("tiny-padding")
TINY = pytest.mark.parametrize("name", [name for name in catalog_names() if name.startswith("tiny-")])


def lengths(B, T, *, ragged, seed=0):
    return random_inputs(PADDING, {"B": B, "S": T}, seed, ragged=ragged)["key_lengths"]


@TINY
def test_inputs_have_the_names_shapes_and_kinds_of_the_spec(name):
    spec = find_spec(name)
    sizes = dict(zip(spec.axes, (3, 5, 7), strict=False))
    feeds = random_inputs(spec, sizes, seed=0)
    assert list(feeds) == [tensor.name for tensor in spec.inputs]
    for tensor in spec.inputs:
        assert tuple(feeds[tensor.name].shape) == tensor.shape(sizes)
        assert feeds[tensor.name].dtype == (torch.int32 if tensor.kind == "int32" else torch.float32)


def test_a_seed_and_a_label_repeat_a_draw_and_another_one_changes_it():
    def x(seed, label):
        return random_inputs(PADDING, {"B": 2, "S": 3}, seed, label=label)["x"]

    assert torch.equal(x(0, "opt"), x(0, "opt"))
    assert not torch.equal(x(0, "opt"), x(1, "opt"))
    assert not torch.equal(x(0, "opt"), x(0, "odd"))


def test_cross_attention_has_three_inputs_of_its_own():
    feeds = random_inputs(find_spec("tiny-cross"), {"B": 2, "S": 4, "T": 4}, seed=0)
    assert not torch.equal(feeds["query"], feeds["key"])
    assert not torch.equal(feeds["key"], feeds["value"])


@pytest.mark.parametrize("B", [4, 7])
@pytest.mark.parametrize("seed", range(5))
def test_ragged_lengths_have_a_batch_element_without_keys_one_with_one_and_a_full_one(B, seed):
    rows = lengths(B, 24, ragged=True, seed=seed).tolist()
    assert {0, 1, 24} <= set(rows)
    assert all(0 <= row <= 24 for row in rows)


def test_a_ragged_batch_of_one_is_cut_short_but_not_empty():
    assert lengths(1, 24, ragged=True).tolist() == [12]


@pytest.mark.parametrize("seed", range(5))
def test_other_lengths_are_at_least_half_and_one_is_full(seed):
    rows = lengths(4, 25, ragged=False, seed=seed).tolist()
    assert 25 in rows
    assert all(13 <= row <= 25 for row in rows)


def test_key_lengths_of_cross_attention_count_keys_and_not_queries():
    spec = find_spec("tiny-cross-padding")
    feeds = random_inputs(spec, {"B": 4, "S": 3, "T": 50}, seed=0, ragged=True)
    assert feeds["key_lengths"].max() == 50


def test_the_additive_bias_is_alibi():
    feeds = random_inputs(find_spec("tiny-additive"), {"B": 2, "S": 6}, seed=0)
    assert torch.equal(feeds["attention_bias"], alibi_bias(4, 6, 6).float())


def test_feeding_a_module_rounds_floats_and_keeps_whole_numbers():
    module = build_module(PADDING, dtype=torch.bfloat16)
    feeds = random_inputs(PADDING, {"B": 2, "S": 3}, seed=0)
    fed = fed_to(module, feeds)
    assert torch.equal(fed["x"], feeds["x"].bfloat16())
    assert fed["key_lengths"].dtype == torch.int32


def test_arguments_go_by_the_names_of_the_module():
    feeds = random_inputs(PADDING, {"B": 2, "S": 3}, seed=0)
    assert list(call_arguments(PADDING, feeds)) == ["query", "key_lengths"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_arrays_hold_the_same_numbers(dtype):
    tensor = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    array = to_numpy(tensor)
    assert array.dtype == (
        ml_dtypes.bfloat16 if dtype == torch.bfloat16 else str(dtype).removeprefix("torch.")
    )
    assert np.array_equal(array.astype(np.float64), tensor.double().numpy())


# -- golden capture ----------------------------------------------------------------------------


def capture(name, precision="fp16", seed=0, case=None):
    module = build_module(
        find_spec(name), dtype=getattr(torch, PRECISIONS[precision].torch_name), path="plain"
    )
    planned = case or PlannedCase(name="opt", sizes=find_spec(name).sizes("opt"))
    return LayerCapture(module, PRECISIONS[precision], seed).capture(planned)


@pytest.mark.parametrize("name", ["tiny-weights", "tiny-sparse-heads", "tiny-cross-padding"])
def test_the_same_seed_gives_the_same_golden_arrays(name):
    a, b = (capture(name) for _ in range(2))
    for group in ("inputs", "oracle", "eager"):
        for key, array in getattr(a, group).items():
            assert array.tobytes() == getattr(b, group)[key].tobytes()
    assert not np.array_equal(
        a.inputs[next(iter(a.inputs))], next(iter(capture(name, seed=1).inputs.values()))
    )


@pytest.mark.sweep(12)
@pytest.mark.parametrize("precision", PRECISIONS)
@TINY
def test_the_eager_result_is_the_oracle_to_a_few_roundoffs(name, precision):
    case = capture(name, precision)
    for key, exact in case.oracle.items():
        assert exact.dtype == np.float64
        assert case.eager[key].dtype == PRECISIONS[precision].numpy
        error = np.abs(case.eager[key].astype(np.float64) - exact).max() / np.abs(exact).max()
        # In float32 the sums round too.
        assert 0 < error < (32 if precision == "fp32" else 8) * PRECISIONS[precision].roundoff


def test_the_oracle_runs_on_the_rounded_weights_and_inputs():
    case = capture("tiny-mha")
    rounded = build_module(find_spec("tiny-mha"), dtype=torch.float16).double()
    wanted = rounded(torch.from_numpy(case.inputs["x"]).double())
    np.testing.assert_allclose(case.oracle["output"], wanted.numpy(), rtol=0, atol=1e-13)


def test_a_golden_token_chooses_its_heads_clearly():
    spec = find_spec("tiny-sparse-heads")
    for planned in plan_golden(spec).cases:
        case = capture("tiny-sparse-heads", "bf16", case=planned)
        module = build_module(spec, dtype=torch.bfloat16).double()
        x = torch.from_numpy(case.inputs["x"].astype(np.float64))
        assert module.decision_margin(x).min() >= 16 * PRECISIONS["bf16"].roundoff


def test_a_ragged_golden_case_holds_a_batch_element_without_keys():
    (planned,) = plan_golden(PADDING, ("ragged",)).cases
    case = capture("tiny-padding", case=planned)
    empty = case.inputs["key_lengths"] == 0
    assert empty.any()
    bias = build_module(PADDING, dtype=torch.float16).o.bias.double().numpy()
    assert (case.oracle["output"][empty] == bias).all()


def test_token_ids_are_drawn_from_the_whole_embedding_and_other_integers_from_the_example(own_bundles):
    case = {each.name: each for each in golden_cases(own_bundles())}["opt"]
    tokens, mask = case.inputs["tokens"], case.inputs["mask"]
    assert np.unique(tokens).size > 24  # those of the example
    assert set(tokens.ravel()) <= set(range(100))
    assert len(np.unique(tokens, axis=0)) == len(tokens)
    assert np.array_equal(mask[3], mask[0])


def test_floats_of_zeros_and_ones_are_repeated_and_others_are_drawn():
    examples = {"keep": torch.tensor([[1.0, 1.0, 0.0]]), "x": torch.tensor([[1.0, 0.5, 0.0]])}
    dims = dict.fromkeys(examples, ("B", "S"))
    drawn = draw_inputs(examples, dims, {"B": 2, "S": 5}, seed=0)
    assert drawn["keep"].tolist() == [[1.0, 1.0, 0.0, 1.0, 1.0]] * 2
    assert drawn["x"].unique().numel() == 10
