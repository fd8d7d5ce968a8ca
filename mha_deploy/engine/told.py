"""Who computes attention in an engine, in words: for tables and reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mha_deploy.engine.record import EngineManifest
from mha_deploy.plugins.search import other_builds

_SUMS = {"fp32": "projections that sum up in FP32", "fp16": "TensorRT's own projections"}


def attention_told(manifest: EngineManifest) -> str:
    """Who computes attention and projections; where that was measured, what each way takes."""
    attention = manifest.attention
    parts = [f"{attention['chosen']}, {_SUMS.get(attention['accumulate'], attention['accumulate'])}"]
    ratio = attention.get("ratio")
    if ratio is not None:
        native, plugin = (f"{attention[key]:,.1f}" for key in ("native_us", "plugin_us"))
        parts.append(f"plugin {plugin} \N{MICRO SIGN}s, native {native} \N{MICRO SIGN}s: {_compared(ratio)}")
    for trial in attention.get("tried", ()):
        if trial["refused"]:
            parts.append(f"{_way(trial)} was not taken: {trial['refused']}")
        elif ratio is None:
            parts.append(f"{_way(trial)} {trial['us']:,.1f} \N{MICRO SIGN}s")
    return "; ".join(parts)


def _compared(ratio: float) -> str:
    if ratio >= 1:
        return f"the plugin is {ratio:.2f} times as fast"
    return f"native is {1 / ratio:.2f} times as fast"


def _way(trial: Mapping[str, Any]) -> str:
    return f"{trial['attention']} with {_SUMS.get(trial['accumulate'], trial['accumulate'])}"


def libraries_told(manifest: EngineManifest) -> list[str]:
    """The libraries that an engine needs, and what to know of those of this machine."""
    needed = [library_told(library) for library in manifest.plugins]
    return [*needed, *other_builds(manifest.plugins, manifest.version)]


def library_told(library: Mapping[str, Any]) -> str:
    """A library that an engine needs, in one line."""
    names = ", ".join(each["name"] for each in library["plugins"])
    return f"{library['library']} {library['version']} (sha256 {library['sha256'][:12]}): {names}"
