"""The ways in which PyTorch runs one layer, by name, on one set of weights.

eager            matmul, softmax, matmul, as the module is written; launched from Python
eager+graph      the same in a CUDA graph
sdpa             PyTorch's fused attention, the kernel its own choice; launched from Python
sdpa-cudnn …     one kernel of the fused attention and no other, in a CUDA graph
sdpa-cudnn-packed  the same with one matrix product for queries, keys and values
compile          torch.compile of the fused attention, in a CUDA graph

A layer with a cache is run as a decoder in service would run it; see `baselines.decode`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from mha_deploy.backends.cache_rows import refuse_overflow
from mha_deploy.backends.runner import Arrays
from mha_deploy.baselines.decode import DecodeLayer, side_by_side
from mha_deploy.baselines.module import attention_spec, module_from_bundle
from mha_deploy.bundle import Bundle
from mha_deploy.errors import DeployError, nearest
from mha_deploy.export.inputs import call_arguments, tensor_from_numpy
from mha_deploy.reference import build_module
from mha_deploy.reference.attention import Attention
from mha_deploy.spec import AttentionSpec
from mha_deploy.spec_parts import CACHES, PAST


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run a layer.

    Args:
        path: How attention is computed; see `reference.core`.
        graph: Whether a timed call is the launch of a CUDA graph.
        kernel: The one kernel that PyTorch's fused attention may use; None leaves it the choice.
        compiled: Whether the module goes through torch.compile.
        packed: Whether one matrix product makes queries, keys and values, whatever the layer has.
    """

    path: str
    graph: bool
    kernel: SDPBackend | None = None
    compiled: bool = False
    packed: bool = False


_WAYS = {
    "eager": Way(path="plain", graph=False),
    "eager+graph": Way(path="plain", graph=True),
    "sdpa": Way(path="sdpa", graph=False),
    "sdpa-cudnn": Way(path="sdpa", graph=True, kernel=SDPBackend.CUDNN_ATTENTION),
    "sdpa-cudnn-packed": Way(path="sdpa", graph=True, kernel=SDPBackend.CUDNN_ATTENTION, packed=True),
    "sdpa-flash": Way(path="sdpa", graph=True, kernel=SDPBackend.FLASH_ATTENTION),
    "sdpa-efficient": Way(path="sdpa", graph=True, kernel=SDPBackend.EFFICIENT_ATTENTION),
    "sdpa-math": Way(path="sdpa", graph=True, kernel=SDPBackend.MATH),
    "compile": Way(path="sdpa", graph=True, compiled=True),
}
WAYS = tuple(_WAYS)


def find_way(name: str) -> Way:
    """Look a way up by name."""
    if name not in _WAYS:
        raise DeployError("PyTorch is not run in such a way.", got=name, hint=nearest(name, WAYS))
    return _WAYS[name]


class TorchModels:
    """The layer of a bundle on one device, its weights there once for all the ways to run it.

    Args:
        bundle: The bundle.
        device: Where the weights are.
    """

    def __init__(self, bundle: Bundle, device: str = "cuda") -> None:
        self.spec, self.precision = attention_spec(bundle), bundle.manifest.precision
        self.device = device
        self._first = module_from_bundle(bundle, path="plain", device=device)
        self._built = {("plain", False): self._first}

    def module(self, path: str, *, packed: bool = False) -> Attention:
        """The layer with its attention computed along a path.

        Args:
            path: See `reference.core`.
            packed: Whether its projections are one matrix instead of three.
        """
        if (path, packed) not in self._built:
            spec = self._packed_spec() if packed else self.spec
            dtype = getattr(torch, self.precision.torch_name)
            # Weights that are of this type on this device already are not copied.
            self._built[path, packed] = build_module(
                spec, weights=self._first.state_dict(), dtype=dtype, device=self.device, path=path
            )
        return self._built[path, packed]

    def _packed_spec(self) -> AttentionSpec:
        if self.spec.is_cross or self.spec.projections == "packed":
            raise DeployError(
                "The layer has no three projections of one input to pack.",
                got="cross attention" if self.spec.is_cross else "packed projections",
                hint="the way sdpa-cudnn",
            )
        return replace(self.spec, projections="packed")

    def in_service(self, way: Way) -> nn.Module:
        """The layer as it is run and timed: one with a cache steps without needless copies of it."""
        layer = self.module(way.path, packed=way.packed)
        return layer if self.spec.cache == "none" else DecodeLayer(layer)

    def arguments(self, feeds: Arrays) -> dict[str, Tensor]:
        """Inputs on the device, by the names that `in_service` calls them; each call has copies of its own.

        Raises:
            DeployError: The new tokens do not fit into a static cache.
        """
        if self.spec.cache == "static":  # on the device, nobody looks at the lengths any more
            refuse_overflow(feeds["lengths"], feeds["x"].shape[1], feeds["key_cache"].shape[2])
        tensors = {name: tensor_from_numpy(array).to(self.device) for name, array in feeds.items()}
        laid_out = {name: side_by_side(tensors[name]) for name in (*PAST, *CACHES) if name in tensors}
        return call_arguments(self.spec, {**tensors, **laid_out})

    @property
    def parameter_bytes(self) -> int:
        """Memory of the weights."""
        return sum(parameter.nbytes for parameter in self._first.parameters())
