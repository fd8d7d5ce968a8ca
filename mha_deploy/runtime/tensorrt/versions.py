"""Which TensorRT is installed, its capabilities, probed by attribute name, and its messages."""

from __future__ import annotations

import importlib
import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from mha_deploy.errors import EXIT_VERDICT_FAILED, BackendUnavailable, DeployError, nearest
from mha_deploy.runtime.child import is_child


class EngineError(DeployError):
    """TensorRT refused the graph, the options or the plan."""


class NotFusedError(EngineError):
    """No fused kernel, and no other is allowed: a verdict, since the graph is valid."""

    exit_code = EXIT_VERDICT_FAILED


class GraphRefusedError(EngineError):
    """The parser takes no such node: a verdict, since the graph is valid."""

    exit_code = EXIT_VERDICT_FAILED


# -- The module and its capabilities ---------------------------------------------------------------

MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
LEAN = {
    "tensorrt-lean": ("tensorrt_lean", "tensorrt_lean_bindings"),
    "tensorrt-dispatch": ("tensorrt_dispatch", "tensorrt_dispatch_bindings"),
}
"""Runtimes without a builder, for version-compatible engines; each by the names of its module.

The lean one has 43 MB, the dispatch one loads the lean runtime that an engine holds.
"""
INSTALL = {
    "tensorrt": 'pip install "mha-deploy[trt]"',
    "tensorrt-rtx": 'pip install "mha-deploy[rtx]"',
    "tensorrt-lean": 'pip install "mha-deploy[lean]"',
    "tensorrt-dispatch": "pip install tensorrt-dispatch-cu13-bindings tensorrt-dispatch-cu13-libs",
}
_TITLES = {
    "tensorrt-rtx": "TensorRT-RTX", "tensorrt-lean": "TensorRT lean", "tensorrt-dispatch": "TensorRT dispatch"
}  # fmt: skip


def _names(*names: str) -> bool:
    """A capability that a version has where it has all of these names."""
    return field(metadata={"names": names})  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The capabilities of one TensorRT: the names that show each, and what it is."""

    # An explicit batch has to be requested (8.6).
    explicit_batch_flag: bool = _names("NetworkDefinitionCreationFlag.EXPLICIT_BATCH")
    # A network can take its types from the graph.
    strongly_typed_flag: bool = _names("NetworkDefinitionCreationFlag.STRONGLY_TYPED")
    fp16_flag: bool = _names("BuilderFlag.FP16")  # FP16 can be allowed for a weakly typed network
    int8_flag: bool = _names("BuilderFlag.INT8")  # and so can INT8, for a graph with Q/DQ
    # There are BF16 tensors, and INT64 ones, which came with them: before, the parser converts to INT32.
    bf16_type: bool = _names("DataType.BF16")
    # Layers can be constrained to a type in a weakly typed network.
    precision_constraints: bool = _names(
        "BuilderFlag.OBEY_PRECISION_CONSTRAINTS", "ILayer.precision", "ILayer.set_output_type"
    )
    tf32_flag: bool = _names("BuilderFlag.TF32")  # TF32 can be switched off
    progress_monitor: bool = _names("IProgressMonitor", "IBuilderConfig.progress_monitor")
    # Attention is a layer of its own, with a `decomposable` switch.
    attention: bool = _names(
        *("INetworkDefinition.add_attention", "LayerType.ATTENTION_INPUT"),
        *("IAttentionInputLayer.attention", "IAttention.decomposable"),
    )
    # Timings can be kept from one build to the next, with effect.
    timing_cache: bool = _names("IBuilderConfig.create_timing_cache", "IBuilderConfig.set_timing_cache")
    # Engines for later versions can be built.
    version_compatible: bool = _names("BuilderFlag.VERSION_COMPATIBLE", "Runtime.engine_host_code_allowed")
    weight_streaming: bool = _names("BuilderFlag.WEIGHT_STREAMING")  # weights can stay on the host
    refit: bool = _names("BuilderFlag.REFIT")  # all weights can be made replaceable
    # Weights can be stripped and put back, if they are the same.
    refit_identical: bool = _names("BuilderFlag.REFIT_IDENTICAL")
    # The parser puts the weights of a graph into a built engine; without it, they are named one by one.
    parser_refitter: bool = _names("OnnxParserRefitter.refit_from_file")
    # The parser reports the name of the node it failed on.
    parser_node_names: bool = _names("ParserError.node_name", "ParserError.node_operator")
    # The layers of a deserialized engine can be inspected.
    inspector: bool = _names(
        *("ICudaEngine.create_engine_inspector", "EngineInspector.get_engine_information"),
        "LayerInformationFormat.JSON",
    )
    # Several execution contexts can use one optimization profile at the same time; it came with that name.
    # Without it (8.6), prompts and single tokens behind one cache cannot have a profile each: the engine is
    # built, but has no execution context for the second one (after "missing offset in id2offset").
    shared_profiles: bool = _names("ExecutionContextAllocationStrategy.STATIC")
    # An engine reports which outputs it writes in place of an input.
    aliased_outputs: bool = _names("ICudaEngine.get_aliased_input_tensor")
    # Plugins are asked which outputs are the memory of an input, where a preview feature is on (10.3).
    aliased_plugin_io: bool = _names(
        *("PreviewFeature.ALIASED_PLUGIN_IO_10_03", "IBuilderConfig.set_preview_feature"),
        "LayerType.PLUGIN_V3",
    )
    # An engine reports its scratch memory by 8.6's name, and by 10's.
    device_memory_v1: bool = _names("ICudaEngine.device_memory_size")
    device_memory_v2: bool = _names("ICudaEngine.device_memory_size_v2")
    # Kernels are compiled for the current shapes, at a chosen time (RTX).
    kernel_specialization: bool = _names(
        *("ICudaEngine.create_runtime_config", "DynamicShapesKernelSpecializationStrategy.EAGER"),
        "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy",
    )
    # Networks take plugins, which libraries add to a registry: V2 up to 11, V3 from 10 on, none in RTX. The
    # parser of RTX ends the process at a plugin's node where its library has its full name only.
    plugins: bool
    compute_capabilities: tuple[str, ...]  # targets that can be named; none where the local GPU is the target
    hardware_compatibility: tuple[str, ...]  # levels of compatibility with other GPUs
    external_tactic_sources: tuple[str, ...]  # libraries with kernels, which a machine may have as stubs only

    @property
    def builds_without_gpu(self) -> bool:
        """Whether engines are compiled for named targets, so that no GPU is needed."""
        return bool(self.compute_capabilities)


PROBES: dict[str, tuple[str, ...]] = {
    each.name: each.metadata["names"] for each in fields(Capabilities) if "names" in each.metadata
}
EXTERNAL_LIBRARIES = ("CUBLAS", "CUBLAS_LT", "CUDNN")
"""Libraries with kernels, which this tool switches off: a machine may have them only as stubs."""
# TensorRT-RTX has these names, but the setter only logs, the build fails, or nothing happens.
_HOLLOW_ON_RTX = ("timing_cache", "version_compatible")


@dataclass(frozen=True, kw_only=True)
class TensorRT:
    """One imported TensorRT: its module, backend (`tensorrt` or `tensorrt-rtx`), version and capabilities."""

    module: Any
    backend: str
    version: str
    can: Capabilities

    def __reduce__(self) -> tuple[Any, ...]:
        return load, (self.backend,)  # a child process imports it by itself

    @property
    def title(self) -> str:
        """Its name and version, for messages."""
        return f"{_TITLES.get(self.backend, 'TensorRT')} {self.version}"


def load(backend: str) -> TensorRT:
    """Import a TensorRT, and probe its capabilities."""
    if backend not in MODULES and backend not in LEAN:
        hint = nearest(backend, (*MODULES, *LEAN))
        raise DeployError("No such TensorRT backend.", got=backend, hint=hint, options=("backend",))
    *others, last = names = LEAN.get(backend) or (MODULES[backend],)
    for name in others:
        with suppress(ImportError, OSError):
            return wrap(importlib.import_module(name), backend)
    try:
        return wrap(importlib.import_module(last), backend)
    except (ImportError, OSError) as cause:
        # A wheel whose CUDA libraries are missing fails with OSError, not ImportError.
        problem = f"The Python package {names[0]!r} cannot be imported."
        raise BackendUnavailable(problem, got=cause, hint=INSTALL[backend]) from cause


def wrap(module: Any, backend: str) -> TensorRT:
    """An imported module with its capabilities."""
    version = str(getattr(module, "__version__", "of unknown version"))
    return TensorRT(module=module, backend=backend, version=version, can=probe(module))


def probe(module: Any) -> Capabilities:
    """The capabilities of a TensorRT module."""

    def members(enum: str) -> tuple[str, ...]:
        names = getattr(getattr(module, enum, None), "__members__", {})
        return tuple(name for name in names if name != "NONE")

    found = {name: all(has(module, each) for each in names) for name, names in PROBES.items()}
    targets, sources = members("ComputeCapability"), members("TacticSource")
    if targets:
        found.update(dict.fromkeys(_HOLLOW_ON_RTX, False))
    return Capabilities(
        **found,
        plugins=any(has(module, f"INetworkDefinition.add_plugin_v{version}") for version in (2, 3)),
        compute_capabilities=targets,
        hardware_compatibility=() if targets else members("HardwareCompatibilityLevel"),
        external_tactic_sources=tuple(name for name in EXTERNAL_LIBRARIES if name in sources),
    )


def has(module: Any, dotted: str) -> bool:
    """Whether a dotted name can be reached from a module."""
    value, missing = module, object()
    for part in dotted.split("."):
        value = getattr(value, part, missing)
    return value is not missing


# Which later major versions load the version-compatible plans of one.
_LATER = {8: (10,), 10: (11,)}


def loads_plans_of(here: str, built: str, *, compatible: bool, lean: bool = False) -> str | None:
    """Why a version of TensorRT does not load the plans of another one; None where it does.

    A version-compatible plan of 8.6 is loaded by the lean runtimes of 8.6 and 10, one of 10 by those of 10
    and 11; never by an older one. Of the full runtimes only those of the same major version are known to.
    """
    if here == built:
        return None
    numbers = [[int(part) for part in each.split(".") if part.isdecimal()] for each in (here, built)]
    if not compatible or not all(numbers):
        return "the plan is not version-compatible: build-engine --version-compatible makes one that is"
    (own, *_), (its, *_) = numbers
    if own != its and not lean:
        return "another major version is known to load it only in its lean runtime: --runtime tensorrt-lean"
    if own != its and own not in _LATER.get(its, ()):
        least = next((old for old, later in _LATER.items() if own in later), own)
        return (
            f"TensorRT {own} loads version-compatible plans of {least} and {own}"
            if least != own
            else (f"TensorRT {own} loads version-compatible plans of {own} alone")
        )
    return None if numbers[0] >= numbers[1] else "an older TensorRT does not load the plans of a newer one"


# -- One logger per process, whose messages are collected ------------------------------------------

# On a machine without a driver every error has these besides; they are not the reason.
_NOISE = ("catchCudaError", "cudaError 35")

_loggers: dict[str, Any] = {}
_sinks: list[list[Message]] = []
_one_build_at_a_time = threading.RLock()


class Message(NamedTuple):
    """One message; its severity is INTERNAL_ERROR, ERROR, WARNING, INFO or VERBOSE."""

    severity: str
    text: str


@contextmanager
def collect(rt: TensorRT) -> Iterator[list[Message]]:
    """Collect the messages of one build in the list that it yields.

    A second thread waits: builds share one logger, and their messages could not be distinguished.
    """
    with _one_build_at_a_time:
        sink: list[Message] = []
        logger_for(rt)
        _sinks.append(sink)
        try:
            yield sink
        finally:
            _sinks.pop()  # they nest: the lock keeps other threads out


def logger_for(rt: TensorRT) -> Any:
    """The process's logger of this TensorRT, for its `Builder` and `Runtime`."""
    trt = rt.module
    if trt.__name__ in _loggers:
        return _loggers[trt.__name__]

    class Collector(trt.ILogger):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            # Called from C++ that cannot take an exception: nothing here may raise.
            message = Message(getattr(severity, "name", str(severity)), str(text))
            for sink in tuple(_sinks):
                sink.append(message)
            if is_child():  # after a crash, its parent reads here where it was
                os.write(2, f"{message.severity}: {message.text}\n".encode(errors="replace"))

    return _loggers.setdefault(trt.__name__, Collector())


def errors(messages: Iterable[Message]) -> list[str]:
    """The texts of the errors, without those that only report a missing GPU; all if no other is left."""
    found = [message.text for message in messages if message.severity in ("INTERNAL_ERROR", "ERROR")]
    return [text for text in found if not any(noise in text for noise in _NOISE)] or found


_LEAN = re.compile(r"libnvinfer_lean\.so[.\d]*")


def lean_runtime_hint(rt: TensorRT, text: str) -> str | None:
    """What to do where a version-compatible engine lacks the lean runtime; None where that is not it."""
    found = _LEAN.search(text)
    if found is None or not rt.can.version_compatible:
        return None
    name, release = found[0].rstrip("."), ".".join(rt.version.split(".")[:3])
    return (
        f"pip install tensorrt-lean=={release} (or the nearest release), and put its file libnvinfer_lean.so."
        f"{release.split('.')[0]} under the name {name} into a folder of LD_LIBRARY_PATH; or build without "
        "--version-compatible"
    )
