import json

import ml_dtypes
import msgspec
import numpy as np
import pytest
from golden_made import made_case
from graph_parity import graph_parity

from mha_deploy.judge import ParityReport, judge_case, parity_from_verdicts
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.status import Kind, Outcome
from mha_deploy.text import Language, hint_for

FP16 = PRECISIONS["fp16"]


@pytest.fixture
def case():
    rng = np.random.default_rng(0)
    oracle = {"output": rng.standard_normal((2, 3, 8)), "weights": rng.random((2, 4, 3, 3))}
    return made_case(oracle, name="opt", sizes={"B": 2, "S": 3})


def problems(case, got):
    return {verdict.output: verdict.problem for verdict in judge_case(case, got, FP16)}


def measures(case, got):
    """The measures of `output` that are out of budget."""
    verdict = next(each for each in judge_case(case, got, FP16) if each.output == "output")
    assert verdict.reason.kind is Kind.OUT_OF_BUDGET
    return verdict.reason.names


def test_a_missing_output_fails(case):
    assert problems(case, {"output": case.eager["output"]})["weights"] == "missing from the result"


def test_an_output_too_many_fails(case):
    assert problems(case, {**case.eager, "extra": np.zeros(3)})["extra"] == "not an output of the model"


def test_another_type_fails_even_with_the_right_numbers(case):
    got = {**case.eager, "output": case.eager["output"].astype(np.float32)}
    assert problems(case, got)["output"] == "type float32, not float16"
    got = {**case.eager, "output": case.eager["output"].astype(ml_dtypes.bfloat16)}
    assert problems(case, got)["output"] == "type bfloat16, not float16"


def test_another_shape_fails_even_with_the_right_numbers(case):
    got = {**case.eager, "output": case.eager["output"].reshape(3, 2, 8)}
    assert problems(case, got)["output"] == "shape (3, 2, 8), not (2, 3, 8)"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_fails_and_is_placed(case, bad):
    output = case.eager["output"].copy()
    output[1, 2, 3] = bad
    assert problems(case, {**case.eager, "output": output})["output"] == (
        "1 values are NaN or infinite, the first at (1, 2, 3)"
    )


def test_one_wrong_element_fails(case):
    output = case.eager["output"].copy()
    output[0, 1, 2] += np.float16(0.1)
    assert "max_abs" in measures(case, {**case.eager, "output": output})


def test_a_result_scaled_by_half_a_per_cent_fails(case):
    output = (case.oracle["output"] * 1.005).astype(np.float16)
    assert "gain" in measures(case, {**case.eager, "output": output})


def one_output(oracle, dtype=np.float16, name="opt"):
    return made_case({"y": oracle}, {"y": oracle.astype(dtype)}, name=name)


NOTHING_TO_SEE = {
    "zero": lambda o: one_output(0 * o),
    "below what fp16 has": lambda o: one_output(o * 1e-40),
    "subnormal": lambda o: one_output(o * 1e-6),
    "subnormal in fp32": lambda o: one_output(o * 1e-41, np.float32),
    "subnormal in bf16": lambda o: one_output(o * 1e-41, ml_dtypes.bfloat16),
    "one number": lambda o: one_output(np.zeros(())),
}


@pytest.mark.parametrize("make", NOTHING_TO_SEE.values(), ids=NOTHING_TO_SEE)
def test_an_output_of_nothing_but_zeros_verifies_nothing(make):
    case = make(np.random.default_rng(0).uniform(-1, 1, (2, 3, 8)))
    (verdict,) = judge_case(case, case.eager, FP16)
    assert not verdict.passed
    assert not verdict.is_wrong
    assert verdict.outcome is Outcome.NOT_VERIFIED
    hints = {language: hint_for(verdict.reason.kind, language) for language in Language}
    assert "--weights" in hints[Language.COMMAND_LINE]
    assert "weights=" in hints[Language.PYTHON]


def test_what_is_wrong_is_wrong_also_where_the_oracle_is_zero():
    case = one_output(np.zeros((2, 3)))
    (verdict,) = judge_case(case, {"y": np.ones((2, 3), np.float16)}, FP16)
    assert verdict.is_wrong
    assert verdict.reason.kind is Kind.OUT_OF_BUDGET


def test_zeros_among_other_numbers_are_judged(case):
    case.oracle["output"][1], case.eager["output"][1] = 0, 0  # a batch element without a key
    case.oracle["output"][0, :2], case.eager["output"][0, :2] = 1e-30, 0
    assert problems(case, case.eager) == {"output": None, "weights": None}


@pytest.mark.parametrize(
    "zeros", [np.zeros((2, 0, 8)), np.zeros(4, np.int64), np.zeros(4, bool)], ids=["empty", "int", "bool"]
)
def test_what_may_be_zero(zeros):
    case = one_output(zeros, zeros.dtype if zeros.dtype.kind in "ib" else np.float16)
    assert judge_case(case, case.eager, FP16)[0].passed


def report_on(*cases):
    verdicts = [verdict for case in cases for verdict in judge_case(case, case.eager, FP16)]
    return parity_from_verdicts(verdicts, model="m", precision=FP16, runtime="b")


def test_one_case_may_be_zero_where_another_verifies_the_output():
    """Every query of a small case may be masked."""
    numbers = np.arange(1.0, 7.0).reshape(2, 3)
    right, zero = one_output(numbers), one_output(np.zeros((1, 3)), name="min")
    assert report_on(right, zero).passed
    assert not report_on(zero, zero).passed
    assert not report_on(right, one_output(np.full((1, 3), 1e-9), name="min")).passed
    assert not report_on(right, made_case({"z": np.zeros((1, 3))}, zero.eager, name="min")).passed


def test_constants_verify_nothing():
    """Attention weights over one key are all 1; that is right where another case verifies them."""
    ones, numbers = one_output(np.ones((1, 3)), name="min"), one_output(np.arange(1.0, 7.0).reshape(2, 3))
    assert report_on(numbers, ones).passed
    assert not report_on(ones).passed
    same = one_output(np.tile([0.5, 1.0, 2.0], (4, 1)), name="same")  # only a bias arrives at the output
    for report in (report_on(same), report_on(numbers, same)):
        assert not report.passed
        assert not any(verdict.is_wrong for verdict in report.verdicts)
        assert report.outcome is Outcome.NOT_VERIFIED


def test_a_report_without_verdicts_has_not_passed():
    assert not ParityReport(model="m", precision="fp16", runtime="b", verdicts=()).passed


def test_the_report_is_plain_json_and_names_the_runtime(bundles):
    report = graph_parity(bundles("tiny-weights"))
    data = json.loads(msgspec.json.encode(report))
    assert data["outcome"] == "passed"
    assert data["runtime"].startswith("ort-cpu ")
    assert {verdict["output"] for verdict in data["verdicts"]} == {"output", "weights"}
    assert set(data["verdicts"][0]["budget"]) < set(data["verdicts"][0]["deviation"])
