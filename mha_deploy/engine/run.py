"""From an engine on disk, or a graph, to a runner on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import onnx_ir as ir

from mha_deploy.engine.manifest import Engine, first_gpu, misfits
from mha_deploy.engine.plugins import load_needed, why_missing
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.graph.file import save_graph
from mha_deploy.runtime.child import RuntimeCrash, call_isolated, isolation, open_isolated
from mha_deploy.runtime.runner import Runner
from mha_deploy.runtime.tensorrt.build import build_with
from mha_deploy.runtime.tensorrt.request import BuildRequest, LargeTensor, Profile
from mha_deploy.runtime.tensorrt.run import TensorRTRunner
from mha_deploy.runtime.tensorrt.versions import TensorRT, load

# -- From an engine on disk to a runner, in a child process ----------------------------------------


def open_engine_runner(engine: Engine, *, cuda_graph: bool = True) -> Runner:
    """Load an engine into the TensorRT that built it; one that does not fit this machine is refused."""
    backend, gpu = engine.manifest.backend, first_gpu()
    reasons = misfits(engine, _module_version(backend), gpu)
    if reasons:
        raise BackendUnavailable(
            f"{engine.path.name} cannot run here.",
            got="; ".join(reasons),
            hint="run it on a machine with a GPU that it was built for"
            if gpu is None
            else f"build one here: mha-deploy build-engine BUNDLE --backend {backend}",
        )
    rt = load(backend)
    if not rt.in_every_process:
        return open_in_this_process(engine, cuda_graph)
    return open_isolated(rt.backend, rt.title, open_in_this_process, engine, cuda_graph)


def open_in_this_process(engine: Engine, cuda_graph: bool = True) -> TensorRTRunner:
    """Load an engine that fits this machine; see `open_engine_runner`."""
    manifest = engine.manifest
    rt = load(manifest.backend)
    host_code = bool(manifest.options.get("version_compatible"))
    if host_code:
        isolation.refuse_untrusted(manifest.engine_sha256, f"{engine.path.name}, a version-compatible engine")
    load_needed(rt, manifest.plugins or ())
    return TensorRTRunner(
        rt,
        engine.path.read_bytes(),
        # The runtime inside a version-compatible engine is code, and is executed: only on request.
        host_code=host_code,
        cuda_graph=cuda_graph,
        in_place=manifest.in_place or {},
        large_tensors=manifest.large_tensors,
    )


def reasons_not_to_run(engine: Engine) -> list[str]:
    """Why an engine cannot run on this machine; empty where it can.

    Unlike `misfits_here` it imports TensorRT, whose version may not be that of the installed package.
    """
    version = _module_version(engine.manifest.backend)
    reasons = misfits(engine, version, first_gpu())
    return reasons or why_missing(engine.manifest.plugins or (), version or engine.manifest.version)


def _module_version(backend: str) -> str | None:
    try:
        return load(backend).version
    except BackendUnavailable:
        return None


# -- Temporary engines: variations of a graph for comparison, and mask cases -----------------------


def engine_opener(
    rt: TensorRT,
    precision: str,
    profiles: Sequence[Profile] = (),
    plugins: Sequence[Mapping[str, Any]] = (),
) -> Callable[[ir.Model], Runner]:
    """A function that builds a lowered graph on this machine's GPU and loads it, in a child process."""

    def open_model(model: ir.Model) -> Runner:
        with tempfile.TemporaryDirectory(prefix="mha-deploy-") as folder:
            path = Path(folder) / "model.onnx"
            save_graph(model, path)
            # A graph with float32 outputs computes in float32; a weakly typed build could use less otherwise.
            wide = any(value.dtype == ir.DataType.FLOAT for value in model.graph.outputs)
            request = BuildRequest(
                onnx=path,
                backend=rt.backend,
                precision="fp32" if wide else precision,
                profiles=profiles,
                allow_decomposed=True,
                optimization_level=1,  # these engines are not timed, and a shorter search builds them sooner
            )
            if not rt.in_every_process:
                return _built_and_loaded(rt, request, plugins)
            return open_isolated(rt.backend, rt.title, _built_and_loaded, None, request, plugins)

    return open_model


def _built_and_loaded(
    rt: TensorRT | None, request: BuildRequest, plugins: Sequence[Mapping[str, Any]]
) -> TensorRTRunner:
    rt = rt or load(request.backend)  # in a child
    load_needed(rt, plugins)
    built = build_with(rt, request)
    return TensorRTRunner(rt, built.plan, large_tensors=built.large_tensors)


# -- Does every profile of a new engine have an execution context? ---------------------------------


def unprepared_profiles(
    rt: TensorRT,
    plan: bytes,
    names: Sequence[str],
    *,
    host_code: bool = False,
    large_tensors: Sequence[LargeTensor] = (),
) -> list[str]:
    """A line for each profile of a new engine, by its name, that cannot be prepared on this machine's GPU.

    Also empty where it cannot be tested: engines for other GPUs, or no cuda-bindings.
    """
    if rt.can.builds_without_gpu:
        return []
    arguments = (plan, names, host_code, tuple(large_tensors))
    if not (isolation.enabled and rt.in_every_process):
        return _unprepared(rt, *arguments)
    step = "preparing the new engine"
    try:
        return call_isolated(rt.backend, _unprepared, rt.backend, *arguments, title=rt.title, step=step)
    except RuntimeCrash as crash:
        return [f"engine built, but it cannot be run: {crash.in_one_line}"]


def _unprepared(
    rt: TensorRT | str,
    plan: bytes,
    names: Sequence[str],
    host_code: bool,
    large_tensors: Sequence[LargeTensor],
) -> list[str]:
    rt = load(rt) if isinstance(rt, str) else rt  # in a child
    try:
        runner = TensorRTRunner(rt, plan, host_code=host_code, cuda_graph=False, large_tensors=large_tensors)
    except BackendUnavailable:
        return []
    except DeployError as error:
        return [f"engine built, but it cannot be loaded: {error.in_one_line}"]
    problems = []
    # A runner keeps the contexts of two calls, so a context must be possible beside another one.
    with runner, ExitStack() as owned:
        for index, profile in enumerate(runner.profiles):
            usual = {name: shapes[1] for name, shapes in profile.items()}
            try:
                bound = runner.bind(usual, index)
            except DeployError as error:
                problems.append(
                    f"engine built, but profile {names[index]} cannot be prepared: {error.got or error.what}"
                )
                continue
            owned.close()
            owned.callback(bound.close)
    return problems
