import dataclasses

import numpy as np
import pytest

from mha_deploy.metrics import FACTORS, budget_from_eager, measure
from mha_deploy.model.precision import PRECISIONS

FP16 = PRECISIONS["fp16"]


@pytest.fixture
def oracle():
    return np.random.default_rng(0).standard_normal((3, 5, 64))


def test_an_exact_result_deviates_by_nothing(oracle):
    deviation = measure(oracle, oracle)
    assert (deviation.relative_l2, deviation.worst_row, deviation.max_abs, deviation.gain) == (0, 0, 0, 0)
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
    assert deviation.worst_row == pytest.approx(3.0 / np.linalg.norm(oracle[1, 2]))


def test_gain_sees_a_common_factor_and_not_noise(oracle):
    noise = np.random.default_rng(1).standard_normal(oracle.shape) * 0.01
    assert measure(oracle * 1.01, oracle).gain == pytest.approx(0.01)
    assert measure(oracle + noise, oracle).gain < 0.002
    assert measure(oracle + noise, oracle).relative_l2 == pytest.approx(0.01, rel=0.2)


def test_a_row_of_zeros_is_judged_by_the_size_of_the_tensor(oracle):
    oracle[0, 0] = 0.0
    wrong = oracle.copy()
    wrong[0, 0] = 0.5
    assert np.isfinite(measure(wrong, oracle).worst_row)
    assert measure(wrong, oracle).worst_row > 1.0


def test_an_oracle_of_zeros_is_judged_absolutely():
    zeros = np.zeros((2, 4))
    assert measure(zeros, zeros).relative_l2 == 0
    assert measure(zeros + 0.5, zeros).relative_l2 == pytest.approx(0.5)


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=str)
def test_the_budget_is_a_multiple_of_the_modules_own_error(oracle, precision):
    eager = (oracle * (1 + 20 * precision.roundoff)).astype(np.float64)
    own, budget = measure(eager, oracle), budget_from_eager(eager, oracle, precision)
    for name in vars(budget):
        assert getattr(budget, name) == pytest.approx(FACTORS[precision.name] * getattr(own, name))


def test_an_exact_module_still_leaves_room_for_rounding(oracle):
    budget = budget_from_eager(oracle, oracle, FP16)
    assert not budget.exceeded_by(measure(oracle.astype(np.float16), oracle))
    assert budget.relative_l2 < 2 * FACTORS["fp16"] * FP16.roundoff


@pytest.mark.parametrize("name", ["relative_l2", "worst_row", "max_abs", "gain"])
def test_each_measure_alone_can_exceed_the_budget(oracle, name):
    budget = budget_from_eager(oracle, oracle, FP16)
    inside = measure(oracle, oracle)
    outside = dataclasses.replace(inside, **{name: getattr(budget, name) * 1.001})
    assert budget.exceeded_by(outside) == [name]
    assert budget.share_used(outside) == pytest.approx(1.001)


def test_a_deviation_that_is_not_a_number_exceeds_the_budget(oracle):
    budget = budget_from_eager(oracle, oracle, FP16)
    lost = dataclasses.replace(measure(oracle, oracle), relative_l2=float("nan"))
    assert budget.exceeded_by(lost) == ["relative_l2"]
