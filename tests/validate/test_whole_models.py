"""Whole models from their factory to an engine: every attention fused and right, and so is the whole."""

from pathlib import Path

import pytest
from deployable_models import CASES, factory
from whole_models import ATTENTIONS

import mha_deploy as md
from mha_deploy.engine.build import engine_from_bundle
from mha_deploy.options import EngineOptions, ValidateOptions
from mha_deploy.status import Outcome
from mha_deploy.validation.run import validate_bundle

pytest.importorskip("transformers")
rtx = pytest.importorskip("tensorrt_rtx")

MODELS = Path(__file__).parents[1] / "deployable_models.py"


@pytest.mark.slow  # one whole model is deployed by tests/test_examples.py
@pytest.mark.parametrize(("name", "attention"), CASES)
def test_a_whole_model(tmp_path, monkeypatch, name, attention):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    reference = f"{MODELS}:{factory(name, attention)}"
    bundle = md.export(reference, tmp_path / "bundle", golden=("opt", "min", "odd"))
    assert len(bundle.manifest.attention) == bundle.manifest.spec.attention_count == ATTENTIONS[name]
    assert all(node["place"] for node in bundle.manifest.attention)
    engine = engine_from_bundle(bundle, EngineOptions(backend="tensorrt-rtx", targets="89"))
    assert engine.manifest.fused_count == (ATTENTIONS[name], ATTENTIONS[name])
    assert engine.manifest.has_requested_types
    report = validate_bundle(bundle, ValidateOptions(require_fused=True, require_precision=True))
    assert report.outcome is not Outcome.FAILED, report.headline  # without a GPU, the engine did not run
    assert f"{ATTENTIONS[name]}/{ATTENTIONS[name]} attention" in report.headline
    decoded = [each for evaluation in report.evaluations for each in evaluation.decode_reports]
    assert bool(decoded) is (name == "llama-step")
