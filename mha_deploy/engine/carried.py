"""What an engine carries of the plugin library: which of its layers, which library, which memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir

from mha_deploy.backends.tensorrt import BuiltEngine, Kernel
from mha_deploy.backends.tensorrt.kernels import ATTENTION, PRODUCT
from mha_deploy.engine.record import EngineManifest
from mha_deploy.graph.lower import cache_form
from mha_deploy.graph.plugin_node import DOMAIN, LINEAR, OP_TYPE
from mha_deploy.plugins.library import PluginLibrary

_CARRIES = {OP_TYPE: ATTENTION, LINEAR: PRODUCT}


def with_carried(built: BuiltEngine, lowered: ir.Model) -> BuiltEngine:
    """An engine whose plugin layers say what they compute; TensorRT itself knows no more than their names.

    Args:
        built: The engine.
        lowered: The graph that it was built from.
    """
    carried = {
        node.name or "": _CARRIES[node.op_type]
        for node in lowered.graph.all_nodes()
        if node.domain == DOMAIN and node.op_type in _CARRIES
    }
    if not carried:
        return built
    kernels = {
        source: tuple(_marked(kernel, carried) for kernel in told) for source, told in built.kernels.items()
    }
    return replace(built, kernels=kernels)


def _marked(kernel: Kernel, carried: Mapping[str, str]) -> Kernel:
    if not kernel.is_plugin:
        return kernel
    found = next((carried[name] for name in kernel.onnx_nodes if name in carried), "")
    return replace(kernel, carries=found)


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
