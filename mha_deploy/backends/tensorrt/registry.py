"""Where TensorRT finds plugins: one registry a process, which libraries add theirs to."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from mha_deploy.backends.tensorrt.errors import EngineError
from mha_deploy.backends.tensorrt.versions import TensorRT


def load_library(rt: TensorRT, path: Path) -> None:
    """Add the plugins of a library. Its code runs in this process: only for libraries of one's own.

    The library registers itself. TensorRT's own way (`IPluginRegistry.load_library`) is not the same function
    in 8.6.0 and 8.6.1: where the Python package and the library differ, it does something else.

    Raises:
        EngineError: It cannot be loaded, or TensorRT refuses it.
    """
    why = register_itself(path)
    if why is not None:
        raise EngineError(
            f"{rt.title} cannot load the plugin library.",
            got=f"{path}: {why}",
            hint="build it for this TensorRT: mha-deploy plugins build",
        )


def register_itself(path: Path) -> str | None:
    """Let a library register its plugins with the TensorRT of this process; why it cannot, or None."""
    try:
        register = ctypes.CDLL(os.fspath(path)).mha_deploy_register_plugins
    except (OSError, AttributeError) as cause:
        return str(cause)
    register.restype = ctypes.c_char_p
    reason: bytes | None = register()
    return None if reason is None else reason.decode(errors="replace")
