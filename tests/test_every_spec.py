"""Every spec that is shipped goes the whole way: exported, loaded into PyTorch, validated, built, fused.

All in one file, so that one worker exports them once.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from graph_parity import graph_parity
from tiny_specs import TINY, in_precisions

import mha_deploy as md
from mha_deploy.baselines.fresh import module_from_bundle
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.engine.build import engine_from_bundle
from mha_deploy.errors import DeployError
from mha_deploy.exporter.oracle import run_module
from mha_deploy.model.catalog import catalog_names, find_spec
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.options import EngineOptions
from mha_deploy.reference.inputs import call_arguments, tensor_from_numpy, to_numpy

# Their variants are those of the tiny specs: they are for `-m slow`, and some take gigabytes.
REAL = [name for name in catalog_names() if name not in TINY]


@pytest.fixture(scope="module", params=REAL)
def real_bundle(request, tmp_path_factory):
    """A bundle of a real model, without the golden cases that take long on a CPU."""
    folder = tmp_path_factory.mktemp("real") / request.param
    return md.export(request.param, folder, golden=("min", "odd", "ragged"))


def assert_validates(bundle):
    report = graph_parity(bundle)
    assert report.verdicts
    assert report.passed, report.to_dict()


def assert_builds_fused(bundle):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    options = EngineOptions(backend="tensorrt-rtx", targets="8.9,12.0", overwrite=True)
    manifest = engine_from_bundle(bundle, options).manifest
    spec = bundle.manifest.spec
    assert len(manifest.profiles) == (1 if spec.cache == "none" else 2)
    statuses = [node.status for node in manifest.verdict.nodes]
    assert statuses == ["fused"] * spec.attention_count * len(manifest.profiles)
    assert manifest.verdict.disagreements == ()
    assert manifest.has_requested_types, manifest.verdict.precision
    assert manifest.targets == ["SM89", "SM120"]


@pytest.mark.slow
def test_a_real_model_validates(real_bundle):
    assert_validates(real_bundle)


@pytest.mark.slow
def test_a_real_model_builds_fused_in_fp16(real_bundle):
    assert_builds_fused(real_bundle)


@pytest.mark.sweep(1)
@in_precisions("fp16", "bf16", "fp32", every=())
def test_a_tiny_model_validates_in_every_precision(bundles, name, precision):
    assert_validates(bundles(name, precision))


def outputs(module, case):
    dtype = next(module.parameters()).dtype
    feeds = {name: tensor_from_numpy(array) for name, array in case.inputs.items()}
    feeds = {name: t.to(dtype) if t.is_floating_point() else t for name, t in feeds.items()}
    results = run_module(module, call_arguments(module.spec, feeds))
    return {t.name: to_numpy(result) for t, result in zip(module.spec.outputs, results, strict=True)}


@pytest.mark.sweep(3)
@in_precisions(*PRECISIONS, every=("tiny-gqa", "tiny-padding"))  # others have these bundles, too
def test_the_layer_of_a_bundle_gives_the_golden_results(bundles, name, precision):
    # But for the order of sums: on a CPU without bfloat16, PyTorch gives oneDNN up for the process at the
    # first such matmul, which another test may have computed since the bundle was made.
    bundle = bundles(name, precision)
    module = module_from_bundle(bundle, path="plain", device="cpu")
    twin = module_from_bundle(bundle, path="sdpa", device="cpu", dtype=torch.float64)
    assert next(module.parameters()).dtype == getattr(torch, bundle.manifest.precision.torch_name)
    assert not module.training
    for case in golden_cases(bundle):
        for got, wanted in ((outputs(module, case), case.eager), (outputs(twin, case), case.oracle)):
            assert got.keys() == wanted.keys()
            for output, array in wanted.items():
                assert got[output].dtype == array.dtype
                few_ulps = 8 * float(ml_dtypes.finfo(array.dtype).eps) * float(np.abs(array).max(initial=0))
                np.testing.assert_allclose(
                    got[output].astype(np.float64), array.astype(np.float64), rtol=0, atol=few_ulps
                )


@pytest.mark.sweep(2)
@in_precisions("fp16", "bf16", names=[name for name in TINY if find_spec(name).softcap is None])
def test_a_tiny_model_builds_fused_in_its_precision(bundles, name, precision):
    assert_builds_fused(bundles(name, precision))


@in_precisions("fp16", "bf16", names=["tiny-softcap"])
def test_a_softcap_is_not_fused_and_built_only_where_that_is_allowed(bundles, name, precision):
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    options = EngineOptions(backend="tensorrt-rtx", targets="8.9,12.0", overwrite=True)
    with pytest.raises(DeployError, match="does not support softcap") as caught:
        engine_from_bundle(bundles(name, precision), options)
    assert "allow_decomposed=True" in caught.value.hint
    allowed = replace(options, allow_decomposed=True)
    manifest = engine_from_bundle(bundles(name, precision), allowed).manifest
    assert [node.status for node in manifest.verdict.nodes] == ["decomposed"]
    assert manifest.has_requested_types, manifest.verdict.precision
