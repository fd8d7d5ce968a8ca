"""Accuracy parity of engines whose attention is the plugin's: every variant and mask that it takes.

The library is found as the tool finds it (`mha-deploy plugins where`); without one these tests are skipped.
"""

import importlib.util
import shutil

import pytest
import small_transformers
import torch
from gpu_evaluations import TINY, assert_right, evaluated
from quantized_models import long_attention

import mha_deploy as md
from mha_deploy.bundle.folder import open_bundle
from mha_deploy.engine.build import engine_from_bundle
from mha_deploy.engine.engine import first_gpu
from mha_deploy.engine.plugins import PluginError, library_for
from mha_deploy.errors import DeployError
from mha_deploy.options import EngineOptions
from mha_deploy.runtime.tensorrt.versions import load
from mha_deploy.validation.runtimes import RuntimeFinder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("tensorrt") is None, reason="TensorRT is not installed"),
]

# What the plugin has no kernel for; everything else it must take.
REFUSED = {"tiny-softcap": "softcap", "tiny-weights": "output"}


@pytest.fixture(scope="module", autouse=True)
def library(workshop):
    """The library; builds in all processes of the session share what they measure."""
    rt = load("tensorrt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MHA_DEPLOY_GEMM_CACHE", str(workshop.root / "gemm.cache"))
        try:
            yield library_for(rt.version)
        except PluginError as error:
            pytest.skip(f"no plugin library: {error.in_one_line}")


def built(prepared, name, precision, tmp_path, **options):
    folder = shutil.copytree(prepared.bundle(name, precision).path, tmp_path / "bundle")
    bundle = open_bundle(folder)
    options = EngineOptions(
        backend="tensorrt", name="plugin", attention="plugin", optimization_level=1, **options
    )
    return bundle, engine_from_bundle(bundle, options)


@pytest.mark.parametrize("name", TINY)
def test_the_plugin_is_right(prepared, name, tmp_path):
    """In every slot of a batch, and token by token behind a cache that the plugin writes itself."""
    if name in REFUSED:
        with pytest.raises(DeployError, match=REFUSED[name]):
            built(prepared, name, "fp16", tmp_path, accumulate="fp32")
        return
    bundle, engine = built(prepared, name, "fp16", tmp_path, accumulate="fp32")
    assert engine.manifest.all_fused, engine.manifest.verdict
    assert_right(evaluated(RuntimeFinder(bundle), "plugin", invariance=True))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", [name for name in TINY if name not in REFUSED])
def test_the_plugin_is_right_between_projections_of_tensorrt(prepared, name, tmp_path):
    bundle, engine = built(prepared, name, "fp16", tmp_path, accumulate="fp16")
    assert engine.manifest.all_fused, engine.manifest.verdict
    assert_right(evaluated(RuntimeFinder(bundle), "plugin"))


@pytest.mark.parametrize("scales", ["channel", "tensor"])
def test_gemms_in_fp8_are_right_and_read_fp8(scales, tmp_path):
    """It is judged by the quantized model, as tightly as in FP16; its verdict names what is in FP8."""
    if first_gpu()["compute_cap"] < "8.9":
        pytest.skip("this GPU has no FP8")
    options = {"precision": "fp8", "weight_scales": scales, "golden": ("opt",)}
    bundle = md.export("tiny-gqa", tmp_path / "bundle", **options)
    chosen = {"attention": "plugin", "accumulate": "fp32", "optimization_level": 1}
    engine = engine_from_bundle(bundle, EngineOptions(backend="tensorrt", name="plugin", **chosen))
    assert engine.manifest.all_fused, engine.manifest.verdict
    assert engine.manifest.verdict.precision.quantized == {"fp8": 2}
    assert engine.manifest.verdict.precision.ok
    assert_right(evaluated(RuntimeFinder(bundle), "plugin"))


def test_a_model_that_is_partly_fp32_has_its_gemms_in_fp8(tmp_path):
    """Its angles stay in FP32, and TensorRT must keep the types of the graph; scales are in FP32, too."""
    if first_gpu()["compute_cap"] < "8.9":
        pytest.skip("this GPU has no FP8")
    module = small_transformers.module_of("llama", torch.float32)
    inputs = {"input_ids": md.Example(torch.arange(32).reshape(2, 16), "B", "S")}
    model = md.Deployable(module=module, inputs=inputs, axes={"B": "1:2:2", "S": "1:16:16"})
    options = {"precision": "fp8", "weight_scales": "tensor", "golden": ("opt",)}
    bundle = md.export(model, tmp_path / "bundle", **options)
    assert bundle.manifest.checks["mixed precision"]["kept"]
    chosen = {"attention": "plugin", "accumulate": "fp32", "optimization_level": 1}
    engine = engine_from_bundle(bundle, EngineOptions(backend="tensorrt", name="plugin", **chosen))
    assert engine.manifest.all_fused, engine.manifest.verdict
    # Q, K and V are one GEMM, gate and up another.
    assert engine.manifest.verdict.precision.quantized == {"fp8": 4 * small_transformers.DEPTH}
    assert_right(evaluated(RuntimeFinder(bundle), "plugin"))


def test_attention_in_fp8_is_right_and_reads_fp8(tmp_path):
    """Two heads of 128 over 1024 keys: there cuDNN's kernel in FP8 is the faster one."""
    if first_gpu()["compute_cap"] < "9.0":
        pytest.skip("this GPU has no attention in FP8")
    options = {"precision": "fp8", "weight_scales": "tensor", "quantize_attention": True, "golden": ("opt",)}
    bundle = md.export(long_attention(tmp_path / "long.onnx"), tmp_path / "bundle", **options)
    chosen = {"attention": "plugin", "accumulate": "fp32", "optimization_level": 1}
    engine = engine_from_bundle(bundle, EngineOptions(backend="tensorrt", name="plugin", **chosen))
    assert engine.manifest.all_fused, engine.manifest.verdict
    found = engine.manifest.verdict.precision
    assert (found.quantized, found.quantized_attentions) == ({"fp8": 2}, {"fp8": 1}), found
    assert_right(evaluated(RuntimeFinder(bundle), "plugin"))


def test_precisions_that_this_tensorrt_has_no_plugins_for_are_refused(prepared, tmp_path):
    if load("tensorrt").can.bf16_type:
        pytest.skip("this TensorRT has bfloat16")
    with pytest.raises(DeployError):
        built(prepared, "tiny-gqa", "bf16", tmp_path, accumulate="fp16")


def test_fp32_sums_are_nearer_to_the_truth(prepared, tmp_path):
    """Else the projections of the plugin would be for nothing. A wide layer: 768 matmuls to a sum."""
    errors = {}
    for accumulate in ("fp16", "fp32"):
        bundle, _ = built(prepared, "bert-base", "fp16", tmp_path / accumulate, accumulate=accumulate)
        (report,) = evaluated(RuntimeFinder(bundle), "plugin").parity
        assert report.passed
        errors[accumulate] = max(verdict.deviation.relative_l2 for verdict in report.verdicts)
    assert errors["fp32"] < errors["fp16"]
