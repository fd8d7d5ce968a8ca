"""Which TensorRT is installed, and its capabilities, probed by attribute name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mha_deploy.errors import EXIT_VERDICT_FAILED, BackendUnavailable, DeployError, nearest


class EngineError(DeployError):
    """TensorRT refused the graph, the options or the plan; `nodes` are the ONNX nodes in question."""

    def __init__(
        self, what: str, *, got: object = None, hint: str | None = None, nodes: Sequence[str] = ()
    ) -> None:
        super().__init__(what, got=got, hint=hint)
        self.nodes = tuple(nodes)


class NotFusedError(EngineError):
    """No fused kernel, and no other is allowed: a verdict, since the graph is valid."""

    exit_code = EXIT_VERDICT_FAILED


MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
INSTALL = {"tensorrt": "pip install tensorrt", "tensorrt-rtx": "pip install tensorrt-rtx-cu13"}

# Libraries that a machine may have only as stubs.
EXTERNAL_TACTIC_SOURCES = ("CUBLAS", "CUBLAS_LT", "CUDNN")

# A version has a capability where it has all of its names.
PROBES: dict[str, tuple[str, ...]] = {
    "explicit_batch_flag": ("NetworkDefinitionCreationFlag.EXPLICIT_BATCH",),
    "strongly_typed_flag": ("NetworkDefinitionCreationFlag.STRONGLY_TYPED",),
    "fp16_flag": ("BuilderFlag.FP16",),
    "bf16_type": ("DataType.BF16",),
    "precision_constraints": (
        "BuilderFlag.OBEY_PRECISION_CONSTRAINTS",
        "ILayer.precision",
        "ILayer.set_output_type",
    ),
    "tf32_flag": ("BuilderFlag.TF32",),
    "progress_monitor": ("IProgressMonitor", "IBuilderConfig.progress_monitor"),
    "attention": (
        "INetworkDefinition.add_attention",
        "LayerType.ATTENTION_INPUT",
        "IAttentionInputLayer.attention",
        "IAttention.decomposable",
    ),
    "timing_cache": ("IBuilderConfig.create_timing_cache", "IBuilderConfig.set_timing_cache"),
    "version_compatible": ("BuilderFlag.VERSION_COMPATIBLE", "Runtime.engine_host_code_allowed"),
    "weight_streaming": ("BuilderFlag.WEIGHT_STREAMING",),
    "refit": ("BuilderFlag.REFIT",),
    "refit_identical": ("BuilderFlag.REFIT_IDENTICAL",),
    "parser_node_names": ("ParserError.node_name", "ParserError.node_operator"),
    "inspector": (
        "ICudaEngine.create_engine_inspector",
        "EngineInspector.get_engine_information",
        "LayerInformationFormat.JSON",
    ),
    # The choice of an allocation strategy and the sharing of profiles came with the same version.
    "shared_profiles": ("ExecutionContextAllocationStrategy.STATIC",),
    "aliased_outputs": ("ICudaEngine.get_aliased_input_tensor",),
    "device_memory_v1": ("ICudaEngine.device_memory_size",),
    "device_memory_v2": ("ICudaEngine.device_memory_size_v2",),
    "kernel_specialization": (
        "ICudaEngine.create_runtime_config",
        "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy",
        "DynamicShapesKernelSpecializationStrategy.EAGER",
    ),
}

# TensorRT-RTX has these names, but the setter only logs, the build fails, or nothing happens.
_HOLLOW_ON_RTX = ("timing_cache", "version_compatible")

# Plugins are layers of a network: V2 up to 11, V3 from 10 on, none in RTX, whose parser ends the process at a
# plugin's node where its library has its full name only.
_PLUGIN_LAYERS = ("INetworkDefinition.add_plugin_v2", "INetworkDefinition.add_plugin_v3")


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The capabilities of one TensorRT.

    Args:
        explicit_batch_flag: An explicit batch has to be requested (8.6).
        strongly_typed_flag: A network can take its types from the graph.
        fp16_flag: FP16 can be allowed for a weakly typed network.
        bf16_type: There are BF16 tensors.
        precision_constraints: Layers can be constrained to a type in a weakly typed network.
        tf32_flag: TF32 can be switched off.
        progress_monitor: The builder reports its progress.
        attention: Attention is a layer of its own, with a `decomposable` switch.
        timing_cache: Timings can be kept from one build to the next, with effect.
        version_compatible: Engines for later versions can be built.
        weight_streaming: Weights can stay on the host.
        refit: All weights can be made replaceable.
        refit_identical: Weights can be stripped and put back, if they are the same.
        parser_node_names: The parser reports the name of the node it failed on.
        inspector: The layers of a deserialised engine can be inspected.
        shared_profiles: Several execution contexts can use one optimisation profile at the same time.
        aliased_outputs: An engine reports which outputs it writes in place of an input.
        device_memory_v1: An engine reports its scratch memory by 8.6's name.
        device_memory_v2: An engine reports its scratch memory by 10's name.
        kernel_specialization: Kernels are compiled for the current shapes, at a chosen time (RTX).
        plugins: Networks take plugins, which libraries add to a registry.
        compute_capabilities: Targets that can be named; empty where the local GPU is the target.
        hardware_compatibility: Levels of compatibility with other GPUs.
        external_tactic_sources: Other libraries with kernels for the builder.
    """

    explicit_batch_flag: bool
    strongly_typed_flag: bool
    fp16_flag: bool
    bf16_type: bool
    precision_constraints: bool
    tf32_flag: bool
    progress_monitor: bool
    attention: bool
    timing_cache: bool
    version_compatible: bool
    weight_streaming: bool
    refit: bool
    refit_identical: bool
    parser_node_names: bool
    inspector: bool
    shared_profiles: bool
    aliased_outputs: bool
    device_memory_v1: bool
    device_memory_v2: bool
    kernel_specialization: bool
    plugins: bool
    compute_capabilities: tuple[str, ...]
    hardware_compatibility: tuple[str, ...]
    external_tactic_sources: tuple[str, ...]

    @property
    def builds_without_gpu(self) -> bool:
        """Whether engines are compiled for named targets, so that no GPU is needed."""
        return bool(self.compute_capabilities)

    @property
    def int64(self) -> bool:
        """Whether tensors can be INT64; it came with BF16. Before, the parser converts it to INT32."""
        return self.bf16_type

    @property
    def prepare_second_profile(self) -> bool:
        """Whether prompts and single tokens behind one cache can have a profile each.

        TensorRT 8.6 builds such an engine, and then has no execution context for the second profile
        ("Myelin", after "missing offset in id2offset"); engines without a cache have two there. No attribute
        shows it. The next version, 10.0, has shared profiles.
        """
        return self.shared_profiles


@dataclass(frozen=True, kw_only=True)
class TensorRT:
    """One imported TensorRT: its module, backend (`tensorrt` or `tensorrt-rtx`), version and capabilities."""

    module: Any
    backend: str
    version: str
    can: Capabilities

    @property
    def title(self) -> str:
        """Its name and version, for messages."""
        name = "TensorRT-RTX" if self.backend == "tensorrt-rtx" else "TensorRT"
        return f"{name} {self.version}"

    @property
    def in_every_process(self) -> bool:
        """Whether another process that imports the package gets the same: not so for a fake in a test."""
        return sys.modules.get(self.module.__name__) is self.module


def load(backend: str) -> TensorRT:
    """Import a TensorRT, and probe its capabilities.

    Raises:
        DeployError: No such backend.
        BackendUnavailable: Its package cannot be imported.
    """
    if backend not in MODULES:
        raise DeployError("No such TensorRT backend.", got=backend, hint=nearest(backend, MODULES))
    try:
        module = importlib.import_module(MODULES[backend])
    except (ImportError, OSError) as cause:
        # A wheel whose CUDA libraries are missing fails with OSError, not ImportError.
        raise BackendUnavailable(
            f"The Python package {MODULES[backend]!r} cannot be imported.", got=cause, hint=INSTALL[backend]
        ) from cause
    return wrap(module, backend)


def wrap(module: Any, backend: str) -> TensorRT:
    """An imported module with its capabilities."""
    version = str(getattr(module, "__version__", "of unknown version"))
    return TensorRT(module=module, backend=backend, version=version, can=probe(module))


def probe(module: Any) -> Capabilities:
    """The capabilities of a TensorRT module."""
    found = {field: all(has(module, name) for name in names) for field, names in PROBES.items()}
    targets = _members(module, "ComputeCapability", without=("NONE",))
    levels = _members(module, "HardwareCompatibilityLevel", without=("NONE",))
    sources = _members(module, "TacticSource")
    if targets:
        found.update(dict.fromkeys(_HOLLOW_ON_RTX, False))
        levels = ()
    return Capabilities(
        **found,
        plugins=any(has(module, name) for name in _PLUGIN_LAYERS),
        compute_capabilities=targets,
        hardware_compatibility=levels,
        external_tactic_sources=tuple(name for name in EXTERNAL_TACTIC_SOURCES if name in sources),
    )


def has(module: Any, dotted: str) -> bool:
    """Whether a dotted name can be reached from a module."""
    missing = object()
    value = module
    for part in dotted.split("."):
        value = getattr(value, part, missing)
        if value is missing:
            return False
    return True


def _members(module: Any, enum: str, without: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Names of an enum's members; none where there is no such enum."""
    members = getattr(getattr(module, enum, None), "__members__", {})
    return tuple(name for name in members if name not in without)
