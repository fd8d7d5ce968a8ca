"""The PyTorch layer of a bundle, with the weights that are in its graph.

No seed and no file of weights is needed: the graph's initializers bear the names of the parameters. A matrix
is kept there as the second operand of its product, `q.weight.T`, the transpose of what PyTorch keeps.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
import torch
from torch import Tensor

from mha_deploy.bundle import Bundle
from mha_deploy.errors import BackendUnavailable, BundleError
from mha_deploy.export.inputs import tensor_from_numpy
from mha_deploy.graph.file import load_graph
from mha_deploy.reference import build_module
from mha_deploy.reference.attention import Attention
from mha_deploy.spec import AttentionSpec


def module_from_bundle(
    bundle: Bundle, *, path: str = "plain", device: str = "cpu", dtype: torch.dtype | None = None
) -> Attention:
    """Build the layer of a bundle.

    Args:
        bundle: The bundle.
        path: How attention is computed; see `reference.core`.
        device: Where the weights go.
        dtype: What they are converted to; the bundle's precision if not given.
    """
    check_device(device)
    manifest, spec = bundle.manifest, attention_spec(bundle)
    dtype = dtype or getattr(torch, manifest.precision.torch_name)
    initializers = load_graph(bundle.model_path).graph.initializers
    names = list(build_module(spec, device="meta").state_dict())
    # One at a time: the largest layers are gigabytes.
    state = {name: _read(initializers, name, device, dtype) for name in names}
    return build_module(spec, weights=state, dtype=dtype, device=device, path=path)


def attention_spec(bundle: Bundle) -> AttentionSpec:
    """The spec of a bundle of one of our own layers; a user's module has its own way, `user_models`."""
    spec = bundle.manifest.spec
    if not isinstance(spec, AttentionSpec):
        raise BundleError("The bundle is not one of a reference layer.", got=spec.name)
    return spec


def check_device(device: str) -> None:
    """Refuse a GPU that PyTorch does not see.

    Raises:
        BackendUnavailable: PyTorch was built without CUDA, or finds no GPU.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise BackendUnavailable(
            "PyTorch sees no CUDA GPU.", got=f"torch {torch.__version__}, {built}", hint="mha-deploy doctor"
        )


def _read(initializers: Mapping[str, ir.Value], name: str, device: str, dtype: torch.dtype) -> Tensor:
    if f"{name}.T" in initializers:
        return _tensor(initializers[f"{name}.T"]).to(device, dtype).T.contiguous()
    if name in initializers:
        return _tensor(initializers[name]).to(device, dtype)
    raise BundleError("The graph does not hold a weight of its layer.", got=name, hint="export again")


def _tensor(value: ir.Value) -> Tensor:
    stored = value.const_value
    if stored is None:
        raise BundleError("A weight of the graph has no value.", got=value.name, hint="export again")
    tensor = tensor_from_numpy(stored.numpy())
    if isinstance(stored, ir.ExternalTensor):
        stored.release()  # else the file stays mapped
    return tensor
