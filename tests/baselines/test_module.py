"""The PyTorch layer of a bundle: its own weights, the same function to the last bit."""

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch

from mha_deploy.baselines.module import module_from_bundle
from mha_deploy.baselines.ways import WAYS, TorchModels, find_way
from mha_deploy.bundle import Bundle
from mha_deploy.catalog import catalog_names
from mha_deploy.errors import BackendUnavailable, BundleError, DeployError
from mha_deploy.export.eager import run_module
from mha_deploy.export.inputs import call_arguments, tensor_from_numpy, to_numpy
from mha_deploy.golden import golden_cases
from mha_deploy.precision import PRECISIONS

TINY = [name for name in catalog_names() if name.startswith("tiny-")]


def outputs(module, case):
    dtype = next(module.parameters()).dtype
    feeds = {name: tensor_from_numpy(array) for name, array in case.inputs.items()}
    feeds = {name: t.to(dtype) if t.is_floating_point() else t for name, t in feeds.items()}
    results = run_module(module, call_arguments(module.spec, feeds))
    return {t.name: to_numpy(result) for t, result in zip(module.spec.outputs, results, strict=True)}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", TINY)
def test_the_layer_of_a_bundle_gives_the_golden_results(bundles, name, precision):
    # But for the order of sums: on a CPU without bfloat16, PyTorch gives oneDNN up for the process at the
    # first such product, which another test may have computed since the bundle was made.
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


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_in_a_file_of_their_own_are_read(bundles, tmp_path, precision):
    bundle = bundles("tiny-packed", precision)
    ir.save(ir.load(bundle.model_path), tmp_path / "model.onnx", external_data="model.onnx.data")
    assert (tmp_path / "model.onnx.data").stat().st_size > 0
    moved = module_from_bundle(Bundle(path=tmp_path, manifest=bundle.manifest))
    for (name, got), wanted in zip(
        moved.state_dict().items(), module_from_bundle(bundle).state_dict().values(), strict=True
    ):
        assert torch.equal(got, wanted), name


def test_a_graph_without_one_of_the_weights_is_refused(bundles, tmp_path):
    bundle = bundles("tiny-gqa")
    model = ir.load(bundle.model_path)
    value = model.graph.initializers.pop("o.weight.T")
    value.name = "o.weight.renamed"
    model.graph.initializers["o.weight.renamed"] = value
    ir.save(model, tmp_path / "model.onnx")
    with pytest.raises(BundleError, match="does not hold a weight") as caught:
        module_from_bundle(Bundle(path=tmp_path, manifest=bundle.manifest))
    assert caught.value.got == "o.weight"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(bundles):
    with pytest.raises(BackendUnavailable, match="PyTorch sees no CUDA GPU") as caught:
        module_from_bundle(bundles("tiny-gqa"), device="cuda")
    assert torch.__version__ in caught.value.got
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("dtype", [np.float16, "bfloat16", np.float32, np.int32])
def test_arrays_come_through_pytorch_unchanged(dtype):
    kind = PRECISIONS["bf16"].numpy if dtype == "bfloat16" else np.dtype(dtype)
    array = np.arange(6).reshape(2, 3).astype(kind)
    array.flags.writeable = False
    back = to_numpy(tensor_from_numpy(array))
    assert back.dtype == kind
    np.testing.assert_array_equal(back, array)


# -- the ways to run it --------------------------------------------------------------------------


def test_the_paths_of_one_layer_share_its_weights(bundles):
    models = TorchModels(bundles("tiny-packed"), device="cpu")
    plain, fused = models.module("plain"), models.module("sdpa")
    assert (plain.path, fused.path) == ("plain", "sdpa")
    assert models.module("sdpa") is fused
    for first, second in zip(plain.parameters(), fused.parameters(), strict=True):
        assert first.data_ptr() == second.data_ptr()
    assert models.parameter_bytes == sum(p.numel() for p in plain.parameters()) * 2


def test_packed_projections_give_the_same_with_one_product(bundles):
    models = TorchModels(bundles("tiny-gqa"), device="cpu")
    packed = models.in_service(find_way("sdpa-cudnn-packed"))
    assert "qkv.weight" in dict(packed.named_parameters())
    x = torch.randn(2, 5, models.spec.E, generator=torch.Generator().manual_seed(0)).half()
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), models.module("sdpa")(x), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["tiny-packed", "tiny-cross"])
def test_where_there_is_nothing_to_pack_the_packed_way_is_refused(bundles, name):
    with pytest.raises(DeployError, match="no three projections"):
        TorchModels(bundles(name), device="cpu").in_service(find_way("sdpa-cudnn-packed"))


def test_an_unknown_way_is_refused_with_the_nearest():
    with pytest.raises(DeployError, match="such a way") as caught:
        find_way("sdpa-cudn")
    assert caught.value.hint == "did you mean 'sdpa-cudnn'?"


def test_every_way_names_a_path_and_only_the_ways_from_python_have_no_graph():
    assert {way: find_way(way).path for way in WAYS if find_way(way).path != "sdpa"} == {
        "eager": "plain",
        "eager+graph": "plain",
    }
    assert [way for way in WAYS if not find_way(way).graph] == ["eager", "sdpa"]
    kernels = [
        (find_way(way).kernel, find_way(way).packed) for way in WAYS if find_way(way).kernel is not None
    ]
    assert len(set(kernels)) == len(kernels) == 5
