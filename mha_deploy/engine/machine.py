"""What this machine can build with and run on."""

from __future__ import annotations

import importlib.util

from mha_deploy.backends.tensorrt.versions import MODULES
from mha_deploy.doctor import gpus
from mha_deploy.engine.record import Engine
from mha_deploy.errors import BackendUnavailable
from mha_deploy.versions import installed_version

PACKAGES = {
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "tensorrt-rtx": ("tensorrt-rtx-cu13", "tensorrt-rtx-cu12"),
}
"""The names that each TensorRT is installed under."""


def default_backend() -> str:
    """TensorRT where there is a GPU for it, else TensorRT-RTX, which compiles without one."""
    installed = [name for name, module in MODULES.items() if importlib.util.find_spec(module) is not None]
    if "tensorrt" in installed and gpus():
        return "tensorrt"
    if "tensorrt-rtx" in installed:
        return "tensorrt-rtx"
    raise BackendUnavailable(
        "No TensorRT is here that can build on this machine.",
        got=f"installed: {', '.join(installed) or 'none'}; GPUs: {len(gpus())}",
        hint='pip install "mha-deploy[rtx]", which builds without a GPU',
    )


def first_gpu() -> dict[str, str] | None:
    """The GPU that an engine is built on and for."""
    found = gpus()
    return found[0] if found else None


def misfits_here(engine: Engine) -> list[str]:
    """Why an engine cannot run on this machine; empty where it can."""
    packages = PACKAGES[engine.manifest.backend]
    found = [version for version in map(installed_version, packages) if version is not None]
    return misfits(engine, found[0] if found else None, first_gpu())


def misfits(engine: Engine, backend_version: str | None, gpu: dict[str, str] | None) -> list[str]:
    """Why an engine cannot run here; empty where it can.

    Args:
        engine: The engine.
        backend_version: Version of its TensorRT on this machine; None where it is not installed.
        gpu: The GPU of this machine; None where there is none.
    """
    manifest, reasons = engine.manifest, []
    if backend_version is None:
        reasons.append(f"{manifest.backend} is not installed here")
    elif backend_version != manifest.version and not manifest.options.get("version_compatible"):
        reasons.append(f"it was built by {manifest.backend} {manifest.version}, here is {backend_version}")
    if gpu is None:
        reasons.append("there is no NVIDIA GPU here")
    elif manifest.targets and f"SM{gpu['compute_cap'].replace('.', '')}" not in manifest.targets:
        reasons.append(f"it was compiled for {', '.join(manifest.targets)}, here is {gpu['name']}")
    elif (
        manifest.gpu
        and manifest.gpu["name"] != gpu["name"]
        and not manifest.options.get("hardware_compatible")
    ):
        reasons.append(f"it was built on {manifest.gpu['name']}, here is {gpu['name']}")
    return reasons
