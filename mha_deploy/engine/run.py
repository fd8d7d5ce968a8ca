"""From an engine on disk to a runner, on the machine that it fits, in a process of its own."""

from __future__ import annotations

from mha_deploy.backends.child import open_isolated
from mha_deploy.backends.runner import Runner
from mha_deploy.backends.tensorrt.run import TensorRTRunner
from mha_deploy.backends.tensorrt.versions import load
from mha_deploy.backends.tensorrt.volumes import LargeTensor
from mha_deploy.engine.machine import first_gpu, misfits
from mha_deploy.engine.record import Engine
from mha_deploy.errors import BackendUnavailable
from mha_deploy.plugins.load import load_needed
from mha_deploy.plugins.search import why_missing


def open_engine_runner(engine: Engine, *, cuda_graph: bool = True) -> Runner:
    """Load an engine into the TensorRT that built it.

    Args:
        engine: The engine, as `open_engine` checked it.
        cuda_graph: Whether calls are recorded once and launched as a CUDA graph.

    Raises:
        BackendUnavailable: The engine does not fit this machine; the error says in what.
        EngineError: It fits, and cannot be loaded.
        PluginError: It needs a plugin library that is not here, or not of its version.
    """
    manifest = engine.manifest
    reasons = misfits(engine, _module_version(manifest.backend), first_gpu())
    if reasons:
        raise BackendUnavailable(
            f"{engine.path.name} cannot run here.",
            got="; ".join(reasons),
            hint=_where_to_go(engine, first_gpu() is not None),
        )
    rt = load(manifest.backend)
    if not rt.in_every_process:
        return open_in_this_process(engine, cuda_graph)
    return open_isolated(rt.backend, rt.title, open_in_this_process, engine, cuda_graph)


def open_in_this_process(engine: Engine, cuda_graph: bool = True) -> TensorRTRunner:
    """Load an engine that fits this machine; see `open_engine_runner`."""
    manifest = engine.manifest
    # The runtime inside a version-compatible engine is code, and is run: only where it was asked for.
    host_code = bool(manifest.options.get("version_compatible"))
    plan, rt = engine.path.read_bytes(), load(manifest.backend)
    load_needed(rt, manifest.plugins or ())
    return TensorRTRunner(
        rt,
        plan,
        host_code=host_code,
        cuda_graph=cuda_graph,
        in_place=manifest.in_place or {},
        large_tensors=[LargeTensor.from_dict(each) for each in manifest.large_tensors or ()],
    )


def _where_to_go(engine: Engine, has_gpu: bool) -> str:
    if not has_gpu:
        return "run it on a machine with a GPU that it was built for"
    return f"build one here: mha-deploy build-engine BUNDLE --backend {engine.manifest.backend}"


def reasons_not_to_run(engine: Engine) -> list[str]:
    """Why an engine cannot run on this machine; empty where it can.

    Unlike `machine.misfits_here` this imports TensorRT, and asks the module itself for its version: that
    is what the manifest holds, and the installed package may call itself otherwise.
    """
    version = _module_version(engine.manifest.backend)
    reasons = misfits(engine, version, first_gpu())
    return reasons or why_missing(engine.manifest.plugins or (), version or engine.manifest.version)


def _module_version(backend: str) -> str | None:
    try:
        return load(backend).version
    except BackendUnavailable:
        return None
