"""Load the plugin library into a TensorRT: once a process, before a graph is parsed or an engine loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mha_deploy.backends.tensorrt.registry import load_library
from mha_deploy.backends.tensorrt.versions import TensorRT
from mha_deploy.plugins.library import PluginError, PluginLibrary
from mha_deploy.plugins.search import library_for, library_needed

# The registry belongs to the module of a TensorRT, and lives as long as the process.
_loaded: dict[str, PluginLibrary] = {}


def find_plugins(rt: TensorRT) -> PluginLibrary:
    """The library for a TensorRT, which the process that builds or runs an engine then loads.

    Raises:
        PluginError: There is none, or this TensorRT takes no plugins.
    """
    refuse_plugins(rt)
    return library_for(rt.version)


def load_plugins(rt: TensorRT) -> PluginLibrary:
    """Find the library for a TensorRT, and load it.

    Raises:
        PluginError: There is none, it cannot be loaded, or this TensorRT takes no plugins.
    """
    return _load(rt, find_plugins(rt))


def load_needed(rt: TensorRT, records: Sequence[Mapping[str, Any]]) -> list[PluginLibrary]:
    """Load what an engine needs, as its manifest tells.

    Raises:
        PluginError: It is not here, or here in another version.
    """
    return [_load(rt, library_needed(record, rt.version)) for record in records]


def refuse_plugins(rt: TensorRT) -> None:
    """Refuse a TensorRT that cannot take the plugin.

    Raises:
        PluginError: It cannot; the error says why.
    """
    if not rt.can.plugins:
        raise PluginError(
            f"{rt.title} does not take the attention plugin.",
            got="its Python API has no plugin layers, and its parser can end the process at one",
            hint="--attention native, or --backend tensorrt",
        )


def _load(rt: TensorRT, library: PluginLibrary) -> PluginLibrary:
    earlier = _loaded.get(rt.module.__name__)
    if earlier is not None and _same(earlier.path, library.path):
        return earlier
    if earlier is not None:
        raise PluginError(
            "This process has loaded another plugin library already.",
            got=f"{earlier.path}, then {library.path}",
            hint="use one library in a process",
        )
    load_library(rt, library.path)
    _loaded[rt.module.__name__] = library
    return library


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()
