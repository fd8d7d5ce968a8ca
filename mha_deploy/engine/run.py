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
from mha_deploy.runtime.tensorrt.run import BoundContext, TensorRTRunner
from mha_deploy.runtime.tensorrt.versions import TensorRT, load

# -- From an engine on disk to a runner, on the machine that it fits, in a process of its own ------


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


# -- Engines that are built to be run once and forgotten: twins for comparison, and mask cases -----

# Nobody times these engines, and a shorter search builds them sooner.
_LITTLE_EFFORT = 1


def engine_opener(
    rt: TensorRT,
    precision: str,
    profiles: Sequence[Profile] = (),
    plugins: Sequence[Mapping[str, Any]] = (),
) -> Callable[[ir.Model], Runner]:
    """A function that builds a lowered graph on this machine's GPU and loads it, in a child process.

    Args:
        rt: The TensorRT.
        precision: The precision the graphs are written in.
        profiles: Ranges of the inputs; none for graphs of fixed shapes.
        plugins: The plugin libraries that it needs, as an engine's manifest records them.
    """

    def open_model(model: ir.Model) -> Runner:
        with tempfile.TemporaryDirectory(prefix="mha-deploy-") as folder:
            path = Path(folder) / "model.onnx"
            save_graph(model, path)
            request = BuildRequest(
                onnx=path,
                backend=rt.backend,
                precision=_precision_of(model, precision),
                profiles=profiles,
                allow_decomposed=True,
                optimization_level=_LITTLE_EFFORT,
            )
            if not rt.in_every_process:
                return _built_and_loaded(rt, request, plugins)
            return open_isolated(rt.backend, rt.title, _in_child, request, plugins)

    return open_model


def _in_child(request: BuildRequest, plugins: Sequence[Mapping[str, Any]]) -> TensorRTRunner:
    return _built_and_loaded(load(request.backend), request, plugins)


def _built_and_loaded(
    rt: TensorRT, request: BuildRequest, plugins: Sequence[Mapping[str, Any]]
) -> TensorRTRunner:
    load_needed(rt, plugins)
    built = build_with(rt, request)
    return TensorRTRunner(rt, built.plan, large_tensors=built.large_tensors)


def _precision_of(model: ir.Model, precision: str) -> str:
    """A graph that gives out float32 computes in it, and a builder that is allowed less would take less."""
    return "fp32" if any(value.dtype == ir.DataType.FLOAT for value in model.graph.outputs) else precision


# -- A new engine is tried on the GPU that built it: has every profile an execution context? -------


def unprepared_profiles(
    rt: TensorRT,
    plan: bytes,
    names: Sequence[str],
    *,
    host_code: bool = False,
    large_tensors: Sequence[LargeTensor] = (),
) -> list[str]:
    """What a new engine cannot do on this machine's GPU, a line for each profile without a context.

    Empty where all is well, and where nothing can be tried: engines for other GPUs, or no cuda-bindings.

    Args:
        rt: The TensorRT that built it.
        plan: The serialised engine.
        names: What its profiles are called.
        host_code: Whether it carries runtime code of its own.
        large_tensors: What TensorRT cannot hold at the largest sizes.
    """
    if rt.can.builds_without_gpu:
        return []
    given = (plan, names, host_code, tuple(large_tensors))
    if not (isolation.enabled and rt.in_every_process):
        return _unprepared(rt, *given)
    try:
        return call_isolated(
            rt.backend,
            _in_child_of_trial,
            rt.backend,
            *given,
            title=rt.title,
            step="preparing the new engine",
        )
    except RuntimeCrash as crash:
        return [f"engine built, but it cannot be run: {crash.in_one_line}"]


def _in_child_of_trial(backend: str, *given: Any) -> list[str]:
    return _unprepared(load(backend), *given)


def _unprepared(
    rt: TensorRT, plan: bytes, names: Sequence[str], host_code: bool, large_tensors: Sequence[LargeTensor]
) -> list[str]:
    try:
        runner = TensorRTRunner(rt, plan, host_code=host_code, cuda_graph=False, large_tensors=large_tensors)
    except BackendUnavailable:
        return []
    except DeployError as error:
        return [f"engine built, but it cannot be loaded: {error.in_one_line}"]
    with runner:
        return _tried(runner, names)


def _tried(runner: TensorRTRunner, names: Sequence[str]) -> list[str]:
    problems = []
    # A runner keeps the contexts of two calls, so one that cannot be made beside another is no use to it.
    with ExitStack() as owned:
        for index, profile in enumerate(runner.profiles):
            usual = {name: shapes[1] for name, shapes in profile.items()}
            try:
                bound: BoundContext = runner.bind(usual, index)
            except DeployError as error:
                problems.append(
                    f"engine built, but profile {names[index]} cannot be prepared: {error.got or error.what}"
                )
                continue
            owned.close()
            owned.callback(bound.close)
    return problems
