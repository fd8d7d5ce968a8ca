"""Other weights in a built engine, on the GPU: it computes what they say, and nothing else."""

import pytest
from safetensors.torch import save_file

import mha_deploy as md
from mha_deploy.model.catalog import find_spec
from mha_deploy.reference import random_weights
from mha_deploy.runtime.tensorrt.versions import EngineError

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    pytest.importorskip("tensorrt", reason="TensorRT is not installed")
    return md.export("tiny-mha", tmp_path_factory.mktemp("refit") / "bundle", golden=("opt", "min"))


def test_an_engine_computes_its_new_weights(bundle, tmp_path):
    engine = md.build_engine(bundle, backend="tensorrt", refit="all", name="refittable")
    weights = tmp_path / "new.safetensors"
    save_file(dict(random_weights(find_spec("tiny-mha"), seed=7)), weights)
    done = md.refit(engine, weights, tmp_path / "new", latency=False)
    assert done.report.passed, done.report.headline
    assert any(
        "refittable" in each.runtime or "tensorrt" in each.runtime for each in done.report.record.parity
    )
    assert done.engine.manifest.engine_sha256 != engine.manifest.engine_sha256


def test_an_engine_of_fixed_weights_is_refused_before_the_export(bundle, tmp_path):
    engine = md.build_engine(bundle, backend="tensorrt", name="fixed")
    with pytest.raises(EngineError, match="cannot be replaced"):
        md.refit(engine, tmp_path / "none.safetensors", tmp_path / "new")
    assert not (tmp_path / "new").exists()
