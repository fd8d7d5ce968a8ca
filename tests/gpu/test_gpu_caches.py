"""Preallocated caches of a user's own decoders on a GPU: an engine and ONNX Runtime decode them."""

import cached_models
import pytest

import mha_deploy as md
from mha_deploy.errors import DeployError
from mha_deploy.status import Outcome

pytestmark = pytest.mark.gpu

FEW = ("opt", "min", "long-past")


@pytest.mark.parametrize("form", cached_models.FORMS)
def test_an_engine_decodes_a_cache_of_an_own_decoder(form, tmp_path):
    pytest.importorskip("tensorrt", reason="TensorRT is not installed")
    bundle = md.export(cached_models.FORMS[form](), tmp_path / form, precision="fp16", golden=FEW)
    try:
        md.build_engine(bundle, backend="tensorrt", allow_decomposed=True)
    except DeployError as error:
        pytest.skip(f"TensorRT builds no engine of it: {error.in_one_line}")
    report = md.validate(bundle, latency=False)
    decoded = {each.runtime: each for each in report.record.decode}
    assert any(name.startswith("tensorrt") for name in decoded), decoded
    wrong = [name for name, each in decoded.items() if each.outcome is not Outcome.PASSED]
    assert not wrong, report.headline
    assert report.outcome is not Outcome.FAILED, report.headline


@pytest.mark.parametrize("form", cached_models.FORMS)
def test_onnx_runtime_decodes_a_cache_of_an_own_decoder_on_the_gpu(form, tmp_path):
    bundle = md.export(cached_models.FORMS[form](), tmp_path / form, precision="fp16", golden=FEW)
    report = md.validate(bundle, runtimes=["ort-cuda"], latency=False)
    assert report.outcome is not Outcome.FAILED, report.headline
    (decoded,) = report.record.decode
    assert decoded.outcome is Outcome.PASSED
