"""Fusion and precision in one phrase each: what no source reports is neither a pass nor a failure."""

import pytest

from mha_deploy.engine.engine import fusion_summary, precision_summary


@pytest.mark.parametrize(
    ("fused", "verdicts", "summary"),
    [
        (2, [("a", "fused"), ("b", "fused")], "2/2 fused"),
        (1, [("a", "fused"), ("b", "decomposed")], "1/2 fused"),
        (1, [("a", "fused"), ("b", "unknown")], "1/2 fused, 1 unknown"),
        (1, [("a", "fused"), ("b", "unknown"), ("b", "decomposed")], "1/2 fused"),
        (1, [("a", "fused"), ("b", "unknown"), ("b", "fused")], "1/2 fused, 1 unknown"),
    ],
)
def test_unknown_is_counted_by_itself(fused, verdicts, summary):
    assert fusion_summary(fused, 2, verdicts) == summary


@pytest.mark.parametrize(
    ("status", "summary"),
    [
        ("verified", "precision: fp16 (verified)"),
        ("mixed", "precision: mixed (requested: fp16)"),
        ("unknown", "precision: unknown (requested: fp16)"),
    ],
)
def test_a_precision_is_verified_or_what_was_requested_is_named(status, summary):
    assert precision_summary(status, "fp16") == summary
