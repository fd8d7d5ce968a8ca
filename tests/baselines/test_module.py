"""The PyTorch layer of a bundle: its own weights, and the baselines to run it."""

import numpy as np
import onnx_ir as ir
import pytest
import torch

from mha_deploy.baselines.fresh import module_from_bundle
from mha_deploy.baselines.torch import BASELINES, TorchModels, find_baseline
from mha_deploy.bundle.folder import Bundle
from mha_deploy.errors import BackendUnavailable, BundleError, DeployError
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.reference.inputs import tensor_from_numpy, to_numpy


def test_weights_in_a_file_of_their_own_are_read(bundles, tmp_path):
    bundle = bundles("tiny-gqa")
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
    with pytest.raises(BackendUnavailable, match="PyTorch finds no CUDA GPU") as caught:
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


# -- the baselines to run it --------------------------------------------------------------------------


def test_the_paths_of_one_layer_share_its_weights(bundles):
    models = TorchModels(bundles("tiny-gqa"), device="cpu")
    plain, fused = models.module("plain"), models.module("sdpa")
    assert (plain.path, fused.path) == ("plain", "sdpa")
    for first, second in zip(plain.parameters(), fused.parameters(), strict=True):
        assert first.data_ptr() == second.data_ptr()
    assert models.parameter_bytes == sum(p.numel() for p in plain.parameters()) * 2


def test_packed_projections_give_the_same_with_one_matmul(bundles):
    models = TorchModels(bundles("tiny-gqa"), device="cpu")
    packed = models.in_service(find_baseline("sdpa-cudnn-packed"))
    assert "qkv.weight" in dict(packed.named_parameters())
    x = torch.randn(2, 5, models.spec.E, generator=torch.Generator().manual_seed(0)).half()
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), models.module("sdpa")(x), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["tiny-packed", pytest.param("tiny-cross", marks=pytest.mark.slow)])
def test_where_there_is_nothing_to_pack_the_packed_baseline_is_refused(bundles, name):
    with pytest.raises(DeployError, match="three projections"):
        TorchModels(bundles(name), device="cpu").in_service(find_baseline("sdpa-cudnn-packed"))


def test_an_unknown_baseline_is_refused_with_the_nearest():
    with pytest.raises(DeployError, match="No such PyTorch baseline") as caught:
        find_baseline("sdpa-cudn")
    assert caught.value.hint == "did you mean 'sdpa-cudnn'?"


def test_every_baseline_names_a_path_and_only_those_launched_from_python_have_no_graph():
    assert {
        baseline: find_baseline(baseline).path
        for baseline in BASELINES
        if find_baseline(baseline).path != "sdpa"
    } == {
        "eager": "plain",
        "eager+graph": "plain",
    }
    assert [baseline for baseline in BASELINES if not find_baseline(baseline).graph] == ["eager", "sdpa"]
    kernels = [
        (find_baseline(baseline).kernel, find_baseline(baseline).packed, find_baseline(baseline).compiled)
        for baseline in BASELINES
        if find_baseline(baseline).kernel is not None
    ]
    assert len(set(kernels)) == len(kernels) == 7
