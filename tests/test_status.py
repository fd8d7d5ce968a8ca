"""Outcomes are data: three values with one rule, and records that come back from JSON as they were."""

from itertools import product

import ml_dtypes
import msgspec
import numpy as np
import pytest
from golden_made import made_case

from mha_deploy import text
from mha_deploy.judge import OutputVerdict, ParityReport, failed_to_run, judge_case, parity_from_verdicts
from mha_deploy.model.precision import find_precision
from mha_deploy.status import Kind, Outcome, Reason
from mha_deploy.text import Language, hint_for, reason_text

FP16 = find_precision("fp16")
# From the worst to the best.
RANKS = (Outcome.FAILED, Outcome.NOT_VERIFIED, Outcome.PASSED)
FAILED, NOT_VERIFIED, PASSED = RANKS


@pytest.mark.parametrize("count", range(4))
def test_the_worst_of_several_outcomes_counts_and_none_at_all_is_not_verified(count):
    for parts in product(RANKS, repeat=count):
        expected = min(parts, key=RANKS.index, default=NOT_VERIFIED)
        assert Outcome.of(parts) is expected
        assert Outcome.of(iter(parts)).exit_code == (1 if FAILED in parts else 0)
        if expected is NOT_VERIFIED:  # what is not verified stays so, whatever part is left out
            for index, part in enumerate(parts):
                rest = parts[:index] + parts[index + 1 :]
                assert part is NOT_VERIFIED or Outcome.of(rest) is not PASSED


def test_an_outcome_is_written_as_its_value_everywhere():
    assert f"{NOT_VERIFIED}" == str(NOT_VERIFIED) == NOT_VERIFIED.value == "not verified"
    assert msgspec.json.encode(NOT_VERIFIED) == b'"not verified"'


def case_of(oracle):
    """A case with one output."""
    return made_case({"y": oracle}, name="opt", sizes={"B": 2})


ORACLE = np.random.default_rng(0).standard_normal((2, 3, 8))
INTEGERS = np.arange(6).reshape(2, 3)
RIGHT = case_of(ORACLE).eager["y"]
RESULTS = {
    Kind.MISSING: (case_of(ORACLE), {}),
    Kind.UNEXPECTED: (case_of(ORACLE), {"y": RIGHT, "z": RIGHT}),
    Kind.TYPE: (case_of(ORACLE), {"y": RIGHT.astype(ml_dtypes.bfloat16)}),
    Kind.SHAPE: (case_of(ORACLE), {"y": RIGHT[:1]}),
    Kind.NOT_FINITE: (case_of(ORACLE), {"y": np.where(RIGHT > 0, np.nan, RIGHT).astype(np.float16)}),
    Kind.OUT_OF_BUDGET: (case_of(ORACLE), {"y": RIGHT * np.float16(1.05)}),
    Kind.DIFFERENT_VALUES: (case_of(INTEGERS), {"y": INTEGERS + 1}),
    Kind.ORACLE_ZERO: (case_of(0 * ORACLE), {"y": 0 * RIGHT}),
    Kind.ORACLE_SUBNORMAL: (case_of(1e-6 * ORACLE), {"y": (1e-6 * ORACLE).astype(np.float16)}),
    Kind.ORACLE_CONSTANT: (case_of(0 * ORACLE + 1), {"y": 0 * RIGHT + 1}),
    None: (case_of(ORACLE), {"y": RIGHT}),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_every_verdict_has_a_kind_and_comes_back_from_json_as_it_was(kind):
    case, got = RESULTS[kind]
    verdicts = judge_case(case, got, FP16)
    assert [each.reason.kind for each in verdicts if each.reason] == ([kind] if kind else [])
    report = parity_from_verdicts(verdicts, model="m", precision=FP16, runtime="b")
    assert msgspec.json.decode(msgspec.json.encode(report), type=ParityReport) == report
    worst = min((each.outcome for each in verdicts), key=RANKS.index)
    assert report.outcome is worst


def of_one_vector(sizes):
    batch = "batch" if "batch" in sizes else "B"
    return made_case({"y": np.tile(ORACLE[:1, :1], (1, 3, 1))}, name="min", sizes=sizes, batch=batch)


@pytest.mark.parametrize(
    ("one", "many", "outcome"),
    [
        ({"B": 1, "T": 1}, {"B": 2, "T": 5}, PASSED),
        ({"B": 1, "T": 1}, {"B": 2, "T": 1}, NOT_VERIFIED),  # no case has more keys
        ({"B": 1, "T": 5}, {"B": 2, "T": 9}, NOT_VERIFIED),  # untrained, or its inputs are ignored
        ({"B": 1}, {"B": 2}, NOT_VERIFIED),
        ({"batch": 1, "T": 1}, {"batch": 2, "T": 5}, PASSED),
        ({"batch": 1, "T": 5}, {"batch": 2, "T": 9}, NOT_VERIFIED),  # no batch counts keys
    ],
)
def test_one_vector_at_every_position_is_right_where_there_is_one_key(one, many, outcome):
    case, other = of_one_vector(one), made_case({"y": ORACLE}, name="opt", sizes=many)

    def report(*pairs):
        verdicts = [each for case, got in pairs for each in judge_case(case, got, FP16)]
        return parity_from_verdicts(verdicts, model="m", precision=FP16, runtime="b")

    right = case.eager["y"]
    assert report((case, {"y": right})).outcome is NOT_VERIFIED
    assert report((case, {"y": right}), (other, {"y": other.eager["y"]})).outcome is outcome
    assert report((case, {"y": right[:, ::-1] * np.float16(1.05)}), (other, other.eager)).outcome is FAILED
    assert report((case, {"y": right}), (other, {"y": other.eager["y"][::-1]})).outcome is FAILED


@pytest.mark.parametrize(("value", "word"), [(True, "true"), (False, "false")])
def test_numbers_that_are_not_finite_where_a_mask_is_of_one_value_are_explained_by_it(value, word):
    pad = np.array([[value] * 3, [False, True, False]])
    case, wrong = made_case({"y": ORACLE}, inputs={"other": np.ones((2, 3), bool), "pad": pad}), RIGHT.copy()
    wrong[0, 1] = np.nan
    (verdict,) = judge_case(case, {"y": wrong}, FP16)
    assert (verdict.reason.names, verdict.reason.got, verdict.reason.index) == (("pad",), word, (0, 1, 0))
    wrong[1, 2] = np.inf
    (verdict,) = judge_case(case, {"y": wrong}, FP16)
    assert verdict.reason.names == ()


def test_a_case_that_did_not_run_is_a_failure_without_numbers():
    (verdict,) = failed_to_run(case_of(ORACLE), "no memory")
    assert (verdict.outcome, verdict.ran, verdict.share) == (FAILED, False, None)
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=OutputVerdict) == verdict


@pytest.mark.parametrize(
    "change",
    [
        {"outcome": "passed"},
        {"outcome": "passed", "reason": None, "share": 1.5},
        {"reason": None},
        {"outcome": "fine"},
    ],
)
def test_a_verdict_that_contradicts_itself_is_not_read(change):
    case, got = RESULTS[Kind.OUT_OF_BUDGET]
    (verdict,) = judge_case(case, got, FP16)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(msgspec.to_builtins(verdict) | change, OutputVerdict)


def test_the_outcome_of_a_report_follows_from_its_verdicts_whatever_a_file_claims():
    case, got = RESULTS[Kind.OUT_OF_BUDGET]
    report = parity_from_verdicts(judge_case(case, got, FP16), model="m", precision=FP16, runtime="b")
    forged = msgspec.convert(msgspec.to_builtins(report) | {"outcome": "passed"}, ParityReport)
    assert forged.outcome is FAILED


GAPS = (Kind.NOT_RUN, Kind.STEPS_NOT_COVERED, Kind.PROFILE_NOT_COVERED, Kind.SIZES_NOT_COVERED)
GAPS += (Kind.ATTENTION_NOT_OBSERVED, Kind.PROBES_NOT_RUN)


def test_every_kind_of_reason_has_words():
    figures = ("count", "largest", "smallest_normal", "wrong", "of", "samples", "streams")
    figures += ("limit", "missed", "share")
    numbers, reasons = dict.fromkeys(figures, 1.0), [kind for kind in Kind if kind in text._REASONS]
    assert set(reasons) | set(text._FINDINGS) | set(GAPS) == set(Kind)
    for kind in reasons:
        words = reason_text(Reason(kind=kind, got="this", wanted="that", where="here", numbers=numbers))
        assert words
        assert "None" not in words.replace("at None", "")
        hints = [hint_for(kind, language) for language in Language]
        assert all(hints) or not any(hints), "a hint is there in both languages"
