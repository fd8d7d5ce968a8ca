"""Caches are judged by their new entries, and old entries must not change."""

from dataclasses import replace

import numpy as np
import pytest
from golden_made import made_baselines

from mha_deploy.bundle.cases import golden_cases
from mha_deploy.judge import judge_case, new_entries

OUT = {"tiny-dynamic": "present_key", "tiny-preallocated": "key_cache_out"}


@pytest.fixture(params=OUT)
def given(request, bundles):
    """A case with old rows, the name of its key cache, and its results, which are right."""
    bundle = bundles(request.param)
    case = next(case for case in golden_cases(bundle) if case.name == "odd")
    got = {name: array.copy() for name, array in case.eager.items()}
    return case, OUT[request.param], got, bundle.manifest.precision


def starts(case):
    if "lengths" in case.inputs:
        return case.inputs["lengths"]
    return np.full(case.sizes["B"], case.sizes["P"])


def verdict_on(case, got, name, precision):
    return next(verdict for verdict in judge_case(case, got, precision) if verdict.output == name)


def test_the_right_rows_pass(given):
    case, name, got, precision = given
    assert not [verdict.problem for verdict in judge_case(case, got, precision) if not verdict.passed]
    entries, results, spoiled = new_entries(case, got)
    assert entries.oracle[name].shape[2] == results[name].shape[2] == case.sizes["S"]
    assert entries.oracle["output"] is case.oracle["output"]
    assert not spoiled


def test_an_old_row_that_changed_by_a_bit_is_named(given):
    case, name, got, precision = given
    row = int(np.argmax(starts(case)))
    last = int(starts(case)[row]) - 1
    got[name][row, 1, last, 3] = np.nextafter(got[name][row, 1, last, 3], np.float16(9))
    verdict = verdict_on(case, got, name, precision)
    assert not verdict.passed
    assert f"batch element {row}, head 1, position {last}" in verdict.problem


def test_a_new_row_that_was_not_written_is_out_of_budget(given):
    case, name, got, precision = given
    for row, start in enumerate(starts(case)):
        got[name][row, :, start : start + 1] = 0
    verdict = verdict_on(case, got, name, precision)
    assert "out of budget" in verdict.problem


def test_what_stands_behind_the_new_rows_of_a_buffer_means_nothing(bundles):
    bundle = bundles("tiny-preallocated")
    case = next(case for case in golden_cases(bundle) if case.name == "ragged")
    got = {name: array.copy() for name, array in case.eager.items()}
    for row, start in enumerate(case.inputs["lengths"]):
        got["key_cache_out"][row, :, start + case.sizes["S"] :] = 5.0
    assert all(verdict.passed for verdict in judge_case(case, got, bundle.manifest.precision))


def test_a_cache_of_another_shape_or_type_is_said_to_be_one(given):
    case, name, got, precision = given
    shorter = {**got, name: got[name][:, :, 1:]}
    assert "shape" in verdict_on(case, shorter, name, precision).problem
    wider = {**got, name: got[name].astype(np.float32)}
    assert "type" in verdict_on(case, wider, name, precision).problem
    missing = {other: array for other, array in got.items() if other != name}
    assert "missing" in verdict_on(case, missing, name, precision).problem


def test_a_case_without_inputs_is_judged_whole(given):
    case, name, got, precision = given
    bare = replace(case, inputs={}, cached={}, baselines=made_baselines(case.oracle, level=8.0))
    assert all(verdict.passed for verdict in judge_case(bare, got, precision))
    got[name][0, 0, 0, 0] += 50
    assert "out of budget" in verdict_on(bare, got, name, precision).problem
