"""What a built library says of itself. It is asked in a process of its own: a broken one ends only that."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mha_deploy.bundle import sha256
from mha_deploy.errors import BackendUnavailable

PREFIX = "libmha_deploy_plugins_trt"

_REBUILD = "mha-deploy plugins build"
_SECONDS = 60
_ASK = """
import ctypes, sys
info = ctypes.CDLL(sys.argv[1]).mha_deploy_plugins_info
info.restype = ctypes.c_char_p
sys.stdout.buffer.write(info())
"""


class PluginError(BackendUnavailable):
    """A plugin library is missing, broken, or not the one that is needed."""


@dataclass(frozen=True, kw_only=True)
class PluginLibrary:
    """A library that can be loaded on this machine.

    Args:
        path: Where it lies.
        version: Its version; an engine needs the library of the version that it was built with.
        interface: How it talks to TensorRT: `IPluginV2DynamicExt` or `IPluginV3`.
        tensorrt: Version of the headers it was compiled against.
        cudnn_frontend: Version of the cudnn-frontend it was compiled against.
        plugins: What it brings: `name`, `version` and `namespace` of each.
        architectures: GPUs that its own kernels were compiled for.
        sha256: Hash of the file.
    """

    path: Path
    version: str
    interface: str
    tensorrt: str
    cudnn_frontend: str
    plugins: tuple[Mapping[str, str], ...]
    architectures: tuple[str, ...]
    sha256: str

    @property
    def tensorrt_major(self) -> str:
        """The TensorRT that can load it: `8`, `10`, `11`."""
        return major(self.tensorrt)

    def brings(self, name: str, version: str) -> bool:
        """Whether it has a plugin."""
        return any(each["name"] == name and each["version"] == version for each in self.plugins)

    def record(self) -> dict[str, Any]:
        """What an engine's manifest says of the library that it needs. The path is this machine's own."""
        return {
            "library": self.path.name,
            "version": self.version,
            "sha256": self.sha256,
            "tensorrt": self.tensorrt,
            "plugins": [dict(each) for each in self.plugins],
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {
            **self.record(),
            "path": str(self.path),
            "interface": self.interface,
            "cudnn_frontend": self.cudnn_frontend,
            "architectures": list(self.architectures),
        }


def major(version: str) -> str:
    """The first number of a version."""
    return version.split(".")[0]


def read_library(path: Path) -> PluginLibrary:
    """Ask a library what it is.

    Raises:
        PluginError: It cannot be loaded here, or is not one of ours.
    """
    if not path.is_file():
        raise PluginError("There is no plugin library here.", got=path, hint=_REBUILD)
    place = path.resolve()
    return _read(place, place.stat().st_mtime_ns)


@cache
def _read(path: Path, changed: int) -> PluginLibrary:
    """What the library says, asked once as long as the file does not change."""
    try:
        info = json.loads(_asked(path))
        return PluginLibrary(
            path=path,
            version=str(info["version"]),
            interface=str(info["interface"]),
            tensorrt=str(info["tensorrt"]),
            cudnn_frontend=str(info["cudnn_frontend"]),
            plugins=tuple(_plugin(each) for each in info["plugins"]),
            architectures=_words(info["architectures"]),
            sha256=sha256(path),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise PluginError(
            "The plugin library does not say what it is.",
            got=f"{path}: {error.__class__.__name__} {error}",
            hint=_REBUILD,
        ) from error


def _asked(path: Path) -> str:
    command = [sys.executable, "-I", "-c", _ASK, str(path)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False, encoding="utf-8"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PluginError(
            "The plugin library cannot be asked.", got=f"{path}: {error}", hint=_REBUILD
        ) from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise PluginError("The plugin library cannot be loaded here.", got=last, hint=_REBUILD)
    return done.stdout


def _plugin(data: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(data[key]) for key in ("name", "version", "namespace")}


def _words(data: Any) -> tuple[str, ...]:
    """A list, or a text with separators between the words, as CMake writes lists."""
    words = data.replace(";", " ").replace(",", " ").split() if isinstance(data, str) else data
    return tuple(str(word) for word in words)
