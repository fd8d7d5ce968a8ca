import dataclasses
import math

import numpy as np
import pytest

from mha_deploy.bundle.cases import GoldenCase
from mha_deploy.judge import judge_case
from mha_deploy.metrics import FACTORS, budget_from_eager, measure
from mha_deploy.model.precision import PRECISIONS

FP16 = PRECISIONS["fp16"]


@pytest.fixture
def oracle():
    return np.random.default_rng(0).standard_normal((3, 5, 64))


def test_an_exact_result_deviates_by_nothing(oracle):
    deviation = measure(oracle, oracle)
    assert (deviation.relative_l2, deviation.worst_vector, deviation.max_abs, deviation.gain) == (0, 0, 0, 0)
    assert deviation.cosine == pytest.approx(1.0)


def test_each_measure_is_what_its_name_says(oracle):
    wrong = oracle.copy()
    wrong[1, 2, 7] += 3.0
    size = np.sqrt(np.mean(oracle**2))
    deviation = measure(wrong, oracle)
    assert deviation.worst_index == (1, 2, 7)
    assert deviation.worst_got == pytest.approx(oracle[1, 2, 7] + 3.0)
    assert deviation.worst_want == oracle[1, 2, 7]
    assert deviation.max_abs == pytest.approx(3.0 / size)
    assert deviation.relative_l2 == pytest.approx(3.0 / np.linalg.norm(oracle))
    assert deviation.worst_vector == pytest.approx(3.0 / np.linalg.norm(oracle[1, 2]))


def test_gain_sees_a_common_factor_and_not_noise(oracle):
    noise = np.random.default_rng(1).standard_normal(oracle.shape) * 0.01
    assert measure(oracle * 1.01, oracle).gain == pytest.approx(0.01)
    assert measure(oracle + noise, oracle).gain < 0.002
    assert measure(oracle + noise, oracle).relative_l2 == pytest.approx(0.01, rel=0.2)


def test_a_row_of_zeros_is_judged_by_the_size_of_the_tensor(oracle):
    oracle[0, 0] = 0.0
    wrong = oracle.copy()
    wrong[0, 0] = 0.5
    assert np.isfinite(measure(wrong, oracle).worst_vector)
    assert measure(wrong, oracle).worst_vector > 1.0


def test_an_oracle_of_zeros_is_judged_absolutely():
    zeros = np.zeros((2, 4))
    assert measure(zeros, zeros).relative_l2 == 0
    assert measure(zeros + 0.5, zeros).relative_l2 == pytest.approx(0.5)


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=lambda each: each.name)
def test_the_budget_is_a_multiple_of_the_modules_own_error(oracle, precision):
    eager = (oracle * (1 + 20 * precision.roundoff)).astype(np.float64)
    own, budget = measure(eager, oracle), budget_from_eager(eager, oracle, precision)
    factor = FACTORS[precision.name, "fp32"]
    for name in ("relative_l2", "worst_vector", "max_abs", "gain"):
        assert factor <= getattr(budget, name) / getattr(own, name) * 1.001 < 1.6 * factor
    assert budget.share_used(measure(eager, oracle, budget.noise)) < 0.5


def test_only_accumulation_in_fp16_has_the_large_budget(oracle):
    eager = oracle.astype(np.float16)
    usual, wide = (
        budget_from_eager(eager, oracle, dataclasses.replace(FP16, accumulate=kind)).limits
        for kind in ("fp32", "fp16")
    )
    ratios = {name: wide[name] / limit for name, limit in usual.items()}
    assert all(4 <= round(ratio, 6) < 5 for ratio in ratios.values()), ratios


def test_accumulation_in_fp16_may_err_with_the_root_of_its_terms(oracle):
    width = 4096
    oracle = np.random.default_rng(0).standard_normal((1, 32, width))
    eager = oracle.astype(np.float16)
    error = 0.2 * math.sqrt(width) * FP16.roundoff * np.random.default_rng(1).standard_normal(oracle.shape)
    for kind, low, high in (("fp16", 0.2, 0.5), ("fp32", 4, 100)):
        budget = budget_from_eager(eager, oracle, dataclasses.replace(FP16, accumulate=kind))
        assert low < budget.share_used(measure(oracle + error, oracle, budget.noise)) < high


def test_an_exact_module_still_leaves_room_for_rounding(oracle):
    budget = budget_from_eager(oracle, oracle, FP16)
    rounded = measure(oracle.astype(np.float16), oracle, budget.noise)
    assert budget.share_used(rounded) < 0.5
    assert budget.relative_l2 < 3 * FP16.roundoff


@pytest.mark.parametrize("name", ["relative_l2", "worst_vector", "max_abs", "gain", "local", "local_gain"])
def test_each_measure_alone_can_exceed_the_budget(oracle, name):
    budget = budget_from_eager(oracle, oracle, FP16)
    inside = measure(oracle, oracle, budget.noise)
    outside = dataclasses.replace(inside, **{name: getattr(budget, name) * 1.001})
    assert budget.exceeded_by(outside) == [name]
    assert budget.share_used(outside) == pytest.approx(1.001)


def test_a_deviation_that_is_not_a_number_exceeds_the_budget(oracle):
    budget = budget_from_eager(oracle, oracle, FP16)
    lost = dataclasses.replace(measure(oracle, oracle), relative_l2=float("nan"))
    assert budget.exceeded_by(lost) == ["relative_l2"]


# -- What a measure over everything does not show --------------------------------------------------


def layer_output(B=4, S=32, E=64, heads=8):
    """Heads through a projection, in FP64 and rounded like an FP16 layer; and the projection."""
    rng = np.random.default_rng(0)
    hidden, weight = rng.standard_normal((B, S, E)), rng.standard_normal((E, E)) / math.sqrt(E)
    rounded = hidden * (1 + FP16.roundoff * rng.uniform(-1, 1, hidden.shape))
    return hidden, rounded, weight


def judged(oracle, eager, got):
    case = GoldenCase(name="c", sizes={}, inputs={}, oracle={"y": oracle}, eager={"y": eager})
    (verdict,) = judge_case(case, {"y": got}, FP16)
    return verdict


def channel_of(scale, bias):
    """One channel of another size, or with a bias, beside 63 usual ones."""
    hidden, rounded, weight = layer_output()
    weight[:, 7] *= scale
    shift = np.zeros(weight.shape[1])
    shift[7] = bias
    return hidden, weight, shift, hidden @ weight + shift, (rounded @ weight + shift).astype(np.float16)


def zeroed(hidden):
    hidden = hidden.copy()
    hidden[..., :8] = 0
    return hidden


MISTAKES = {
    "a head is zero": zeroed,
    "scale off by 20 %": lambda hidden: hidden * 1.2,
    "the last batch element is off by 0.5 %": lambda h: h * np.array([1, 1, 1, 1.005])[:, None, None],
    "one query is another's": lambda h: np.where(np.arange(32)[:, None] == 30, h[:, 29:30], h),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize(("scale", "bias"), [(1, 0), (1, 1e3), (1, 1e4), (100, 0), (1e-3, 0)])
def test_a_large_channel_hides_nothing(scale, bias, mistake):
    hidden, weight, shift, oracle, eager = channel_of(scale, bias)
    right = (hidden.astype(np.float16).astype(np.float64) @ weight + shift).astype(np.float16)
    assert judged(oracle, eager, right).share < 0.5
    wrong = (MISTAKES[mistake](hidden) @ weight + shift).astype(np.float16)
    assert judged(oracle, eager, wrong).is_wrong


@pytest.mark.parametrize("scale", [1e-1, 1e-2, 1e-3])
def test_a_channel_near_zero_is_judged_by_itself(scale):
    *_, oracle, eager = channel_of(scale, 0)
    for wrong in (-1, 0):
        got = eager.copy()
        got[..., 7] *= wrong
        verdict = judged(oracle, eager, got)
        assert verdict.is_wrong
        assert "channel 7" in verdict.problem


def test_one_massive_element_hides_nothing_in_its_token_and_channel():
    hidden, rounded, weight = layer_output()
    outlier = np.zeros((4, 32, 64))
    outlier[0, 0, 7] = 1e4
    oracle, eager = hidden @ weight + outlier, (rounded @ weight + outlier).astype(np.float16)
    for place in (np.s_[0, 0, 20:40], np.s_[1, :, 7]):
        got = eager.copy()
        got[place] *= np.float16(1.05)
        assert judged(oracle, eager, got).is_wrong, place


@pytest.mark.parametrize("shape", [(1000, 1024), (2, 3, 8), (1, 1, 64), (1, 64), (64,), (2, 4, 16, 8)])
def test_one_wrong_element_is_found_in_any_shape(shape):
    oracle = np.random.default_rng(3).standard_normal(shape)
    eager = oracle.astype(np.float16)
    assert judged(oracle, eager, eager).share < 0.5
    at = tuple(size - 1 for size in shape)
    got = eager.copy()
    got[at] += np.float16(0.05)
    verdict = judged(oracle, eager, got)
    assert verdict.is_wrong
    assert f"channel {at[-1]}" in verdict.problem


def test_a_small_vector_is_judged_by_itself():
    oracle = np.random.default_rng(4).standard_normal((64, 256))
    oracle[3] *= 5e-4
    eager = oracle.astype(np.float16)
    for wrong in (-1, 0):
        got = eager.copy()
        got[3] *= wrong
        assert judged(oracle, eager, got).is_wrong


def test_as_many_integers_may_differ_as_in_the_module_times_the_factor():
    oracle = np.arange(1000)
    eager, got = oracle.copy(), oracle.copy()
    eager[0] = 5
    got[1:5] = 0
    assert judged(oracle, eager, got).passed
    got[1:6] = 0
    assert "5 of 1000 differ" in judged(oracle, eager, got).problem
    assert judged(oracle, oracle, eager).is_wrong


def test_queries_with_the_same_answer_have_one_error():
    """Half of the queries are padding or see one key: whatever rounding leaves there, it leaves in all."""
    rng = np.random.default_rng(0)
    oracle = rng.standard_normal((4, 24, 768))
    oracle[:2] = oracle[:2, :1]
    rounding = 6e-4 * rng.standard_normal((2, *oracle.shape))
    rounding[:, :2] = rounding[:, :2, :1]
    eager, got = ((oracle + each).astype(np.float16) for each in rounding)
    assert judged(oracle, eager, got).share < 0.6
    wrong = got.copy()
    wrong[1, 7] += np.float16(0.02)
    assert "batch element 1, query 7" in judged(oracle, eager, wrong).problem


def test_errors_that_all_positions_share_are_no_wrong_channel():
    """Nearly the same answer everywhere: a rounded value moves its channel at every position."""
    rng = np.random.default_rng(0)
    oracle = rng.standard_normal((1, 1, 64)) + 0.05 * rng.standard_normal((2, 32, 64))
    common, own = 5e-4 * rng.standard_normal((2, 1, 1, 64)), 3e-4 * rng.standard_normal((2, *oracle.shape))
    eager, got = ((oracle + each).astype(np.float16) for each in common + own)
    assert judged(oracle, eager, got).share < 0.6
    wrong = got.copy()
    wrong[:, 5, 3] += np.float16(0.05)
    assert judged(oracle, eager, wrong).is_wrong
