"""Fusion and precision in one phrase each: what no source reports is neither a pass nor a failure."""

import re

import pytest
from msgspec import to_builtins

from mha_deploy.engine.engine import fusion_summary, precision_summary
from mha_deploy.runtime.tensorrt.engine_verdict import EngineReason
from mha_deploy.status import ReasonKind
from mha_deploy.text import engine_reason_text


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
    nodes = [{"node": node, "status": status, "reasons": []} for node, status in verdicts]
    assert fusion_summary(fused, 2, nodes) == summary


def test_scores_that_are_computed_twice_are_in_the_summary():
    again = {"kind": "scores computed again", "place": "softmax", "got": "", "wanted": ""}
    nodes = [{"node": "a", "status": "fused", "reasons": [again]}]
    assert fusion_summary(1, 1, nodes) != fusion_summary(1, 1, [{**nodes[0], "reasons": []}])


def test_every_kind_of_reason_has_words():
    for kind in ReasonKind:
        reason = to_builtins(EngineReason(kind=kind, place="place", got="fused", wanted="mixed"))
        assert engine_reason_text(reason)
        assert engine_reason_text(reason) in precision_summary("unknown", "fp16", reasons=[reason])


def test_a_summary_counts_every_gemm():
    gemms = {
        "kernels": 4, "quantized": {"fp8": 5}, "other_types": {"up": "fp16"}, "unknown": ["gate"],
        "unquantized": ["scores", "weighted"],
    }  # fmt: skip
    _, *parts = precision_summary("mixed", "fp8/fp16", gemms=gemms).split("; ")
    assert "5/9 GEMMs" in parts[0]
    assert sum(int(re.search(r"\b\d+\b", part)[0]) for part in parts) == 9
    assert "scores" in parts[-1]


@pytest.mark.parametrize(
    ("status", "summary"),
    [
        ("verified", "precision: fp16 (verified)"),
        ("selected at load", "precision: fp16 (I/O types verified, kernels selected at load time)"),
        ("mixed", "precision: mixed (requested: fp16)"),
        ("unknown", "precision: unknown (requested: fp16)"),
    ],
)
def test_a_precision_is_verified_or_what_was_requested_is_named(status, summary):
    assert precision_summary(status, "fp16") == summary
