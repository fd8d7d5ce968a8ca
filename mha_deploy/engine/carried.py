"""What an engine carries of the plugin library: which of its layers, which library, which memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from mha_deploy.backends.tensorrt import BuiltEngine, Kernel
from mha_deploy.backends.tensorrt.kernels import (
    ATTENTION,
    FLOATING,
    PRODUCT,
    UNKNOWN,
    EngineTensor,
    dtype_of,
)
from mha_deploy.engine.record import EngineManifest
from mha_deploy.graph.lower import cache_form
from mha_deploy.graph.plugin_node import DOMAIN, LINEAR, OP_TYPE
from mha_deploy.plugins.library import PluginLibrary

_CARRIES = {OP_TYPE: ATTENTION, LINEAR: PRODUCT}


@dataclass(frozen=True, kw_only=True)
class _Carried:
    """A node of the library in the graph.

    Args:
        what: `attention` or `product`.
        types: The type of each value that it reads and writes.
        usual: The one type of all its numbers that are no lengths.
    """

    what: str
    types: Mapping[str, str]
    usual: str


def with_carried(built: BuiltEngine, lowered: ir.Model) -> BuiltEngine:
    """An engine whose plugin layers say what they compute; TensorRT itself knows no more than their names.

    Args:
        built: The engine.
        lowered: The graph that it was built from.
    """
    carried = {
        node.name or "": _carried(node)
        for node in lowered.graph.all_nodes()
        if node.domain == DOMAIN and node.op_type in _CARRIES
    }
    if not carried:
        return built
    kernels = {
        source: tuple(_marked(kernel, carried) for kernel in told) for source, told in built.kernels.items()
    }
    return replace(built, kernels=kernels)


def _carried(node: ir.Node) -> _Carried:
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    types = {value.name or "": dtype_of(value.dtype.name) for value in values if value.dtype is not None}
    usual = next((dtype for dtype in types.values() if dtype in FLOATING), UNKNOWN)
    return _Carried(what=_CARRIES[node.op_type], types=types, usual=usual)


def _marked(kernel: Kernel, carried: Mapping[str, _Carried]) -> Kernel:
    if not kernel.is_plugin:
        return kernel
    found = next((carried[name] for name in kernel.onnx_nodes if name in carried), None)
    if found is None:
        return kernel
    return replace(
        kernel,
        carries=found.what,
        inputs=_told(kernel.inputs, found),
        outputs=_told(kernel.outputs, found),
    )


def _told(tensors: Sequence[EngineTensor], found: _Carried) -> tuple[EngineTensor, ...]:
    """With their types: for dynamic sizes 8.6 does not tell them, and the library takes no others."""
    return tuple(
        replace(tensor, dtype=found.types.get(tensor.name, found.usual))
        if tensor.dtype == UNKNOWN
        else tensor
        for tensor in tensors
    )


def with_library(
    manifest: EngineManifest, library: PluginLibrary, lowered: ir.Model, *, asked: str, accumulate: str
) -> EngineManifest:
    """A manifest that says which library the engine needs, and which caches it writes in place.

    Args:
        manifest: What it says already.
        library: The library.
        lowered: The graph that the engine was built from.
        asked: What `--attention` was asked for.
        accumulate: How the projections sum up.
    """
    in_place = cache_form(lowered).in_place
    told = [f"caches in place: bind {out} to the memory of {source}" for out, source in in_place.items()]
    return replace(
        manifest,
        attention={"asked": asked, "chosen": "plugin", "accumulate": accumulate},
        plugins=[library.record()],
        in_place=in_place,
        notes=[*manifest.notes, *told],
    )
