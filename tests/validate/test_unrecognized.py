"""Attentions that are no node of the graph count in every verdict, and a graph without one is still built."""

import shutil

import pytest

from mha_deploy.bundle.folder import open_bundle
from mha_deploy.options import ValidateOptions
from mha_deploy.validation.run import validate_bundle
from mha_deploy.validation.verdict import unfused_findings


@pytest.fixture
def copied(own_bundles, tmp_path):
    """A function that copies the bundle of a factory, and gives its folder."""
    return lambda name: shutil.copytree(own_bundles(name, golden=("opt",)).path, tmp_path / name)


MODELS = pytest.mark.parametrize(
    ("name", "fused"), [("talking", 1), pytest.param("only_talking", 0, marks=pytest.mark.slow)]
)


@MODELS
def test_the_manifest_and_a_validation_count_talking_heads(name, fused, own_bundles):
    manifest = own_bundles(name, golden=("opt",)).manifest
    assert (len(manifest.attention), manifest.spec.attention_count) == (fused, 2)
    assert sum("blocks.1.attention" in note for note in manifest.notes) == 1
    report = validate_bundle(own_bundles(name, golden=("opt",)), ValidateOptions(probe=False))
    assert report.passed, report.headline
    assert f"{fused} of 2" in report.headline
    (required,) = unfused_findings(manifest, ValidateOptions(require_fused=True))
    assert required.level == "failure"


@MODELS
def test_an_engine_counts_them(name, fused, copied, run_cli):
    pytest.importorskip("tensorrt_rtx")
    folder = copied(name)
    done = run_cli("build-engine", folder, "--backend", "tensorrt-rtx", "--sm", "89", "--require-fused")
    assert done.code == 1, done.err
    assert f"{fused}/2 fused" in done.out
    report = validate_bundle(open_bundle(folder), ValidateOptions(probe=False))
    assert f"{fused}/2 fused" in report.headline
    (engine,) = report.engines
    assert engine.manifest.fused_count == (fused, 2)
    unfused = [node for node in engine.manifest.verdict.nodes if node.status != "fused"]
    assert len(unfused) == 2 - fused
    assert all("blocks." in node.node and node.reasons for node in unfused)
