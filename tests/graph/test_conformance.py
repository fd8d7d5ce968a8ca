"""Every lowering against ONNX's published cases for `Attention`, at each case's own tolerance."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from conformance import Outcome, cases, run_all
from oracle import attend

OPTIONS: dict[str, dict[str, Any]] = {
    "onnx": {},
    "trt": {},
    # The scale is not split over queries and keys as in the specification: matmuls round differently.
    "primitives": {"ulps": 2},
    "contrib": {},
    "plugin": {},
}

# Other forms of the same: what is taken must pass. Half-precision results may round differently.
VARIANTS = [
    ("primitives", {"gqa": "broadcast"}, 2),
    pytest.param("primitives", {"gqa": "repeat"}, 2, marks=pytest.mark.slow),
    ("trt", {"decompose": True}, 2),
    ("trt", {"pad_heads": True}, 0),
]


def refused(dialect: str) -> dict[str, frozenset[str]]:
    """The published cases that a dialect refuses, by the feature that it names. All others must pass."""

    def named(part: str) -> frozenset[str]:
        names = (case.name.removeprefix("test_attention_") for case in cases())
        return frozenset(name for name in names if part in name)

    fp64, weights = named("local_window_gqa_rank4_mask"), named("qk_matmul")
    softcap, wider_values = named("softcap") | fp64, named("diff_heads") | named("3d_local_window")
    table = {
        "trt": {"V head size other than K's": wider_values - softcap, "softcap": softcap},
        "contrib": {
            "softcap with other key than query length": softcap - weights - fp64,
            "attention weights as output": weights,
            "fp64": fp64,
        },
        "plugin": {"softcap": softcap, "attention weights as output": weights - softcap},
    }
    return table.get(dialect, {})


def by_feature(outcome: Outcome) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for name, feature in outcome.refused.items():
        found[feature].add(name.removeprefix("test_attention_"))
    return {feature: frozenset(names) for feature, names in found.items()}


def test_all_published_cases_are_here() -> None:
    opsets = {case.model.opset_import[0].version for case in cases()}
    assert len(cases()) >= 93
    assert {23, 24, 25} <= opsets


def test_oracle_of_the_other_tests_agrees_with_the_published_results() -> None:
    for case in cases():
        model, tolerance = ir.from_proto(case.model), 2e-2 if case.is_half else 1e-4
        for got, wanted in zip(attend(model, case.feeds), case.outputs, strict=True):
            wide = np.asarray(wanted, np.float64)
            np.testing.assert_allclose(got, wide, rtol=tolerance, atol=1e-6, err_msg=case.name)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dialect", OPTIONS)
def test_dialect(dialect: str, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_all(dialect, **OPTIONS[dialect])
    with capsys.disabled():
        total, count = len(cases()), len(outcome.refused)
        print(f"\n  {dialect}: {len(outcome.passed)}/{total} pass, {count} refused")
    assert outcome.failed == {}
    assert by_feature(outcome) == refused(dialect)


@pytest.mark.slow  # in CI: test_lower.py
@pytest.mark.parametrize(("dialect", "options", "ulps"), VARIANTS)
def test_variant(dialect: str, options: dict[str, Any], ulps: int) -> None:
    outcome = run_all(dialect, ulps=ulps, **options)
    assert outcome.failed == {}
    before = {name for names in refused(dialect).values() for name in names}
    assert {name.removeprefix("test_attention_") for name in outcome.refused} <= before


@pytest.mark.slow
def test_trt_takes_every_case_when_it_may_decompose() -> None:
    assert run_all("trt", ulps=2, decompose=True).refused == {}


def test_plugin_takes_the_cases_it_has_kernels_for() -> None:
    outcome = run_all("plugin", only_kernels=True)
    assert outcome.failed == {}
    assert len(outcome.passed) >= 10
    assert {feature: len(names) for feature, names in by_feature(outcome).items()} == {
        "types other than fp16 and bf16": 57,
        "softcap": 11,
        "attention weights as output": 15,
    }
