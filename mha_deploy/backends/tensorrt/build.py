"""From an ONNX model to an engine, with everything that is needed to judge it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mha_deploy.backends.tensorrt.config import (
    add_profiles,
    check_profiles,
    fill_config,
    mark_refittable,
    refuse_unsupported,
)
from mha_deploy.backends.tensorrt.errors import EngineError
from mha_deploy.backends.tensorrt.explain import build_failure
from mha_deploy.backends.tensorrt.inspection import inspect_kernels
from mha_deploy.backends.tensorrt.kernels import Kernel
from mha_deploy.backends.tensorrt.layers import kernels_from_log
from mha_deploy.backends.tensorrt.log import Message, collect, logger_for, warnings
from mha_deploy.backends.tensorrt.network import (
    allow_decomposition,
    create_network,
    hold_types,
    is_strongly_typed,
    network_inputs,
    network_outputs,
    parse_into,
    refuse_unused,
)
from mha_deploy.backends.tensorrt.onnx_names import NodeNames, read_names, tensor_types
from mha_deploy.backends.tensorrt.plan import kernels_from_plan
from mha_deploy.backends.tensorrt.progress import OnProgress, make_monitor
from mha_deploy.backends.tensorrt.request import BuildRequest, BuiltEngine
from mha_deploy.backends.tensorrt.versions import TensorRT, load
from mha_deploy.backends.tensorrt.volumes import large_tensors
from mha_deploy.errors import BackendUnavailable


def build_engine(request: BuildRequest, on_progress: OnProgress | None = None) -> BuiltEngine:
    """Build an engine.

    Args:
        request: What to build.
        on_progress: Called with (phase, steps done, steps) where the version tells its progress. An
            exception it raises cancels the build and comes out here.

    Raises:
        BackendUnavailable: This TensorRT is not installed, or finds no GPU and needs one.
        EngineError: The model or an option is refused, or the build fails.
    """
    return build_with(load(request.backend), request, on_progress)


def build_with(rt: TensorRT, request: BuildRequest, on_progress: OnProgress | None = None) -> BuiltEngine:
    """Build an engine with a TensorRT that is already loaded; see `build_engine`."""
    names = read_names(request.onnx)
    if names.has_external_data and isinstance(request.onnx, bytes):
        raise EngineError("The weights of this model lie in another file.", hint="give the model's path")
    refuse_unsupported(rt, request)
    started = time.perf_counter()
    with collect(rt) as messages:
        # The parser owns the weights that the network points to: all three live until the plan is there.
        builder = _builder(rt)
        network = create_network(rt, builder, request)
        parser = rt.module.OnnxParser(network, logger_for(rt))
        parse_into(rt, parser, request.onnx, names)
        _shape_network(rt, network, request)
        config = builder.create_builder_config()
        notes = fill_config(rt, config, request)
        check_profiles(network_inputs(network), request.profiles)
        add_profiles(builder, config, request.profiles)
        plan = _serialise(rt, builder, network, config, names, messages, on_progress)
        seconds = time.perf_counter() - started
        refuse_unused(rt, messages, names)
        kernels, silent = _kernels(rt, request, plan, messages)
        warned = tuple(names.link(warnings(messages)))
        return BuiltEngine(
            plan=plan,
            backend=rt.backend,
            version=rt.version,
            seconds=seconds,
            strongly_typed=is_strongly_typed(rt, request),
            inputs=network_inputs(network),
            outputs=network_outputs(network),
            kernels=kernels,
            warnings=warned,
            notes=(*notes, *silent),
            large_tensors=large_tensors((message.text for message in warned), names.axes),
            timing_cache=_timings(rt, config),
        )


def _builder(rt: TensorRT) -> Any:
    try:
        return rt.module.Builder(logger_for(rt))
    except (TypeError, RuntimeError) as cause:
        # The binding turns a null pointer into TypeError: TensorRT proper finds no GPU.
        raise BackendUnavailable(
            f"{rt.title} cannot start its builder here.",
            got=cause,
            hint="use a machine with an NVIDIA GPU, or the backend tensorrt-rtx, which needs none",
        ) from cause


def _shape_network(rt: TensorRT, network: Any, request: BuildRequest) -> None:
    if request.allow_decomposed:
        allow_decomposition(rt, network)
    if request.precision_constraints is not None:
        hold_types(rt, network, tensor_types(request.onnx), request.precision)
    mark_refittable(network, request)


def _serialise(
    rt: TensorRT,
    builder: Any,
    network: Any,
    config: Any,
    names: NodeNames,
    messages: Sequence[Message],
    on_progress: OnProgress | None,
) -> bytes:
    monitor = None
    if on_progress is not None and rt.can.progress_monitor:
        monitor = make_monitor(rt.module, on_progress)
        config.progress_monitor = monitor
    plan = builder.build_serialized_network(network, config)
    if monitor is not None and monitor.failure is not None:
        raise monitor.failure
    if plan is None:
        raise build_failure(rt, messages, names)
    return bytes(plan)


def _kernels(
    rt: TensorRT, request: BuildRequest, plan: bytes, messages: Sequence[Message]
) -> tuple[dict[str, tuple[Kernel, ...]], list[str]]:
    """The kernels by source, and which source had nothing to tell."""
    found = {
        "log": tuple(kernels_from_log(message.text for message in messages)),
        "plan": tuple(kernels_from_plan(plan)),
    }
    notes = []
    if rt.can.builds_without_gpu:  # nobody else can be asked
        notes = [f"the {source} tells of no kernels" for source, kernels in found.items() if not kernels]
    if rt.can.inspector and not rt.can.builds_without_gpu:
        try:
            found["inspector"] = tuple(inspect_kernels(rt, plan, host_code=request.version_compatible))
        except EngineError as failure:
            # The engine is built: that it cannot be inspected makes the verdict unknown, not the build void.
            notes.append(f"the inspector could not be asked: {failure.got}")
    return found, notes


def _timings(rt: TensorRT, config: Any) -> bytes | None:
    if not rt.can.timing_cache:
        return None
    cache = config.get_timing_cache()
    return bytes(cache.serialize()) if cache is not None else None
