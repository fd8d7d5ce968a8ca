"""The kernels that one source tells of, sorted by the attention nodes that they compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from mha_deploy.backends.tensorrt.kernels import Kernel


class Told:
    """What one source tells of one profile, read once however many nodes are asked for.

    Args:
        kernels: The kernels.
        groups: For each attention node, the names of the nodes it was lowered to.
    """

    def __init__(self, kernels: Sequence[Kernel], groups: Mapping[str, Sequence[str]]) -> None:
        self.kernels = kernels
        self.source = kernels[0].source if kernels else ""
        self.opaque = next((kernel.name for kernel in kernels if kernel.is_opaque), None)
        # A fused kernel that names no node: any attention node could be its own.
        self.nameless = next((k.label for k in kernels if k.is_fused_attention and not k.onnx_nodes), None)
        self._named: dict[str, list[Kernel]] = {}
        self._fused: dict[str, list[Kernel]] = {}
        owners = _owners(groups)
        for kernel in kernels:
            self._sort(kernel, Counter(node for name in kernel.onnx_nodes for node in owners.get(name, ())))

    def _sort(self, kernel: Kernel, parts: Counter[str]) -> None:
        """Note a kernel under the nodes of which it names parts; a fused one proves only the most named.

        Layers share what their masks are computed from, so a kernel may name a part of another attention.
        """
        most = max(parts.values(), default=0)
        for node, count in parts.items():
            self._named.setdefault(node, []).append(kernel)
            if count == most and kernel.is_fused_attention:
                self._fused.setdefault(node, []).append(kernel)

    def kernels_of(self, node: str) -> list[Kernel]:
        """The kernels that name a part of an attention node, in order."""
        return self._named.get(node, [])

    def fused_kernels_of(self, node: str) -> list[Kernel]:
        """The fused attention kernels that compute an attention node, in order."""
        return self._fused.get(node, [])


def _owners(groups: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """For each name that a kernel may give, the attention nodes it is a part of."""
    owners: dict[str, list[str]] = {}
    for node, names in groups.items():
        for name in names:
            # The parser names a node without a name for its first output.
            for spelling in (name, f"node_of_{name}"):
                owners.setdefault(spelling, []).append(node)
    return owners
