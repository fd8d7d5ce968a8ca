"""Which versions of everything are here."""

from __future__ import annotations

import importlib.util
import platform
from importlib import metadata

from mha_deploy import __version__

EXPORT_PACKAGES = ("torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "numpy")
RUN_PACKAGES = (
    *EXPORT_PACKAGES,
    "onnxruntime-gpu",
    "tensorrt",
    "tensorrt-rtx-cu13",
    "cuda-bindings",
    "triton",
)


def installed_version(package: str) -> str | None:
    """The version of an installed package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def can_import(module: str) -> bool:
    """Whether a module is there to be imported; nothing is imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # somebody forbids it, or made it by hand
        return False


def versions(packages: tuple[str, ...] = EXPORT_PACKAGES) -> dict[str, str]:
    """This tool, Python, and those of the packages that are installed."""
    found = {package: installed_version(package) for package in packages}
    own = {"mha-deploy": __version__, "python": platform.python_version()}
    return own | {package: version for package, version in found.items() if version is not None}
