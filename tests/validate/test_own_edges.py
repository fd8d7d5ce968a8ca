"""Verdicts on modules at the edge of the contract."""

import dataclasses
from pathlib import Path

import edge_models
import msgspec
import numpy as np
import pytest
from golden_made import made_case

import mha_deploy as md
from mha_deploy.bundle.cases import Baseline, golden_cases
from mha_deploy.bundle.folder import open_bundle
from mha_deploy.errors import BundleError
from mha_deploy.judge import judge_case
from mha_deploy.model.precision import find_precision
from mha_deploy.options import ValidateOptions
from mha_deploy.status import EMPTY_ORACLE, Kind, Outcome
from mha_deploy.validation.fault import case_to_bisect, reference_for
from mha_deploy.validation.run import validate_bundle

FILE = edge_models.__file__
FP16 = find_precision("fp16")
QUICK = ValidateOptions(probe=False)


@pytest.fixture(scope="module")
def edge_bundles(tmp_path_factory):
    """The bundle of a factory."""
    folder = tmp_path_factory.mktemp("edges")
    options = {"precision": "fp16", "golden": ("opt", "min")}

    def made(name):
        if not (folder / name).exists():
            md.export(f"{FILE}:{name}", folder / name, **options)
        return open_bundle(folder / name)

    return made


def test_outputs_of_every_kind_and_rank_and_operands_by_keyword(edge_bundles):
    bundle = edge_bundles("many_outputs")
    assert {tensor.name: (tensor.kind, tensor.dims) for tensor in bundle.manifest.spec.outputs} == {
        "output": ("float", ("B", "S", 50)),
        "logits": ("float32", ("B", "S", 32)),
        "sums": ("float", ("B", "S")),
        "loss": ("float", ()),
        "best": ("int64", ("B", "S")),
        "weight": ("float", (32, 500)),
    }
    report = validate_bundle(bundle, QUICK)
    assert report.passed, report.headline
    assert "1/1 attention right" in report.headline
    assert all(case.oracle["logits"].dtype == np.float64 for case in golden_cases(bundle))


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("factory", "outputs", "attentions"),
    [
        ("zero_head", False, True),
        ("constant_head", False, True),
        ("shrinking", False, True),
        ("zero_attention", True, False),
    ],
)
def test_zeros_verify_nothing(tmp_path, factory, outputs, attentions):
    options = {"precision": "fp16", "golden": ("opt", "min")}
    bundle = md.export(f"{FILE}:{factory}", tmp_path / "bundle", **options)
    report = validate_bundle(bundle, QUICK)
    assert not report.passed
    assert "not verified" in report.headline
    assert "wrong" not in report.headline
    found = md.bisect(bundle, "ort-cpu")  # which compares outputs alone, and is no kinder
    assert (found.outcome is Outcome.NOT_VERIFIED) is not outputs
    assert bool(found.unverified) is not outputs
    proves_nothing = EMPTY_ORACLE | {Kind.ORACLE_SUBNORMAL, Kind.ORACLE_REPEATS}
    assert {each.reason.kind for each in found.unverified} <= proves_nothing
    assert {(each.case, each.output) for each in found.unverified} <= {
        (verdict.case, verdict.output) for each in report.evaluations for verdict in each.verdicts
    }
    parity = {each.cases: each for each in next(each.parity for each in report.evaluations if each.parity)}
    assert (parity["golden"].passed, parity["layers"].passed) == (outputs, attentions)
    assert report.fault is None


@pytest.mark.slow
def test_draws_of_the_user_and_an_empty_past(edge_bundles):
    # The draw gives other numbers each time: what lies inside must belong to the inputs that were kept.
    report = validate_bundle(edge_bundles("picks"), QUICK)
    assert report.passed, report.headline
    assert "1/1 attention right" in report.headline


@pytest.mark.slow
def test_a_mixed_graph_is_fed_what_was_drawn_first(tmp_path):
    bundle = md.export(f"{FILE}:picks", tmp_path / "bundle", golden=("opt",))
    assert validate_bundle(bundle, QUICK).passed


@pytest.mark.slow
def test_a_factory_that_computes_something_else_is_no_oracle(edge_bundles, tmp_path):
    # The weights are the same: their hash does not tell.
    md.configure(trust_code=True)
    bundle = edge_bundles("picks")
    other = tmp_path / "edge_models.py"
    other.write_text(Path(FILE).read_text().replace("self.a(x) * SCALE", "self.a(x) * 1.1"))
    spec = dataclasses.replace(bundle.manifest.spec, factory=f"{other}:picks")
    moved = dataclasses.replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, spec=spec))
    with pytest.raises(BundleError, match="no longer computes"):
        validate_bundle(moved, ValidateOptions(fresh=1))
    assert "no longer computes" in reference_for(moved, case_to_bisect(moved), "ort-cpu").module_unused.got


def tokens(wrong, undecided):
    """A case with 1,000 tokens of which rounding decides the first ones, and what a runtime gives."""
    oracle = np.arange(20_000, 21_000)
    samples, got = np.stack([oracle] * 4), oracle.copy()
    samples[2, :undecided] += 1
    got[:wrong] += 1
    baselines = dict.fromkeys(("fp32", "fp16"), Baseline({"y": samples}))
    eager = {"y": oracle + 1}  # what the module itself gives is no excuse
    return judge_case(made_case({"y": oracle}, eager, baselines=baselines), {"y": got}, FP16)[0]


def test_the_next_token_is_not_nearly_right():
    assert tokens(wrong=0, undecided=0).passed
    verdict = tokens(wrong=1, undecided=0)
    assert not verdict.passed
    assert verdict.reason.numbers == {"wrong": 1, "of": 1000, "samples": 4}
    assert tokens(wrong=1, undecided=1).passed  # where rounding decides, both are right
    assert tokens(wrong=0, undecided=1).passed
    assert not tokens(wrong=2, undecided=1).passed
