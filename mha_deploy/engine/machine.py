"""What this machine can build with and run on."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from mha_deploy.backends.cuda import find_gpu
from mha_deploy.backends.tensorrt.versions import MODULES
from mha_deploy.doctor import RUNTIMES, gpus
from mha_deploy.engine.record import Engine, EngineManifest
from mha_deploy.errors import BackendUnavailable
from mha_deploy.graph.eligibility.records import is_rtx_gpu
from mha_deploy.plugins.search import why_missing
from mha_deploy.versions import installed_version


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
    """The GPU that an engine is built on and for: the first that CUDA shows, as all runners take it.

    Where CUDA cannot be asked, the first that the driver lists.
    """
    gpu = find_gpu()
    if gpu is not None:
        return {"name": gpu.name, "compute_cap": gpu.compute_capability}
    found = gpus()
    return found[0] if found else None


def misfits_here(engine: Engine) -> list[str]:
    """Why an engine cannot run on this machine; empty where it can."""
    module = MODULES[engine.manifest.backend]
    packages = next(runtime.packages for runtime in RUNTIMES if runtime.module == module)
    found = [version for version in map(installed_version, packages) if version is not None]
    version = found[0] if found else None
    missing = why_missing(engine.manifest.plugins, version or engine.manifest.version)
    return [*misfits(engine, version, first_gpu()), *missing]


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
    elif not _version_fits(manifest, backend_version):
        reasons.append(f"it was built by {manifest.backend} {manifest.version}, here is {backend_version}")
    if gpu is None:
        reasons.append("there is no NVIDIA GPU here")
    elif not _gpu_fits(manifest, gpu):
        reasons.append(f"it was built {where_built(manifest)}, here is {gpu['name']} ({gpu['compute_cap']})")
    return reasons


def where_built(manifest: EngineManifest) -> str:
    """The GPU or the compute capabilities that an engine was built for."""
    if manifest.gpu is not None:
        return f"on {manifest.gpu['name']}"
    return (
        f"for {', '.join(manifest.targets)}"
        if manifest.targets
        else "for RTX GPUs from compute capability 8.0 on"
    )


def _version_fits(manifest: EngineManifest, here: str) -> bool:
    if manifest.options.get("version_compatible"):
        built, found = _release(manifest.version), _release(here)
        return built[:1] == found[:1] and found >= built
    return here == manifest.version


def _release(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def _gpu_fits(manifest: EngineManifest, gpu: Mapping[str, str]) -> bool:
    major, minor = (int(part) for part in gpu["compute_cap"].split("."))
    level = manifest.options.get("hardware_compatible")
    if manifest.gpu is None:
        named = f"SM{major}{minor}" in manifest.targets
        return is_rtx_gpu((major, minor)) and (named if manifest.targets else (major, minor) >= (8, 0))
    if level == "ampere-plus":
        return (major, minor) >= (8, 0)
    if level == "same-compute-capability":
        return manifest.gpu["compute_cap"] == gpu["compute_cap"]
    return manifest.gpu["name"] == gpu["name"]
