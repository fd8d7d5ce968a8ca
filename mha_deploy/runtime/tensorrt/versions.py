"""Which TensorRT is here, what it has, and which of its names are used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mha_deploy.errors import EXIT_VERDICT_FAILED, BackendUnavailable, DeployError, nearest

# -- The error of this backend: an engine that cannot be built, read or inspected ------------------


class EngineError(DeployError):
    """TensorRT refused the graph, the options or the plan.

    Args:
        what: What happened, in one sentence.
        got: What TensorRT said, or the option that was asked for.
        hint: What to do about it.
        nodes: Names of the ONNX nodes it speaks of, where they are known.
    """

    def __init__(
        self, what: str, *, got: object = None, hint: str | None = None, nodes: Sequence[str] = ()
    ) -> None:
        super().__init__(what, got=got, hint=hint)
        self.nodes = tuple(nodes)


class NotFusedError(EngineError):
    """No fused kernel, and nothing else allowed: a verdict, since the graph is as it should be."""

    exit_code = EXIT_VERDICT_FAILED


# -- Which TensorRT is here, and what it has: the one file that imports it -------------------------

MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
INSTALL = {"tensorrt": "pip install tensorrt", "tensorrt-rtx": "pip install tensorrt-rtx-cu13"}

# Libraries of their own that a machine may have only as stubs.
EXTERNAL_TACTIC_SOURCES = ("CUBLAS", "CUBLAS_LT", "CUDNN")

# A capability is there when every one of its names is.
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

# TensorRT-RTX keeps these names, but the setter only logs, the build fails, or nothing happens.
_HOLLOW_ON_RTX = ("timing_cache", "version_compatible")

# A network with plugins has a layer for them: that of V2 up to 11, that of V3 from 10 on, none in RTX, whose
# parser ends the process at a plugin's node where its library goes by its full name only.
_PLUGIN_LAYERS = ("INetworkDefinition.add_plugin_v2", "INetworkDefinition.add_plugin_v3")


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What one TensorRT has, by name.

    Args:
        explicit_batch_flag: Networks must be asked to have an explicit batch (8.6).
        strongly_typed_flag: A network can take its types from the graph.
        fp16_flag: FP16 can be allowed for a weakly typed network.
        bf16_type: BF16 tensors exist at all.
        precision_constraints: Layers can be held to a type in a weakly typed network.
        tf32_flag: TF32 can be switched off.
        progress_monitor: The builder reports its progress.
        attention: Attention is a layer of its own, with a `decomposable` switch.
        timing_cache: Timings can be kept from one build to the next, with effect.
        version_compatible: Engines for later versions can be built.
        weight_streaming: Weights can stay on the host.
        refit: All weights can be made replaceable.
        refit_identical: Weights can be stripped and put back, if they are the same.
        parser_node_names: The parser says which node it failed on, by name.
        inspector: A deserialised engine can be asked for its layers.
        shared_profiles: Several execution contexts can use one optimisation profile at the same time.
        aliased_outputs: An engine tells which outputs it writes in place of an input.
        device_memory_v1: An engine tells its scratch memory in 8.6's words.
        device_memory_v2: An engine tells its scratch memory in 10's words.
        kernel_specialization: Kernels are compiled for the shapes at hand, when the caller says (RTX).
        plugins: Networks take plugins, which libraries add to a registry.
        compute_capabilities: Targets that can be named; empty where the local GPU is the target.
        hardware_compatibility: Levels of compatibility with other GPUs that can be asked for.
        external_tactic_sources: Outside libraries the builder may take kernels from.
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
        """Whether tensors can be INT64; it came with BF16. Before, the parser makes INT32 of it."""
        return self.bf16_type

    @property
    def prepare_second_profile(self) -> bool:
        """Whether prompts and single tokens behind one cache can have a profile each.

        TensorRT 8.6 builds such an engine, and then has no execution context for the second profile
        ("Myelin", after "missing offset in id2offset"); engines without a cache have two there. No name
        tells of it. The next version, 10.0, has shared profiles.
        """
        return self.shared_profiles


@dataclass(frozen=True, kw_only=True)
class TensorRT:
    """One imported TensorRT.

    Args:
        module: The Python module.
        backend: `tensorrt` or `tensorrt-rtx`.
        version: What the module calls its version.
        can: What it has.
    """

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
        """Whether another process that imports the package gets the same: not so for a test's stand-in."""
        return sys.modules.get(self.module.__name__) is self.module


def load(backend: str) -> TensorRT:
    """Import a TensorRT and say what it has.

    Args:
        backend: `tensorrt` or `tensorrt-rtx`.

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
    """Put an imported module and its capabilities together."""
    version = str(getattr(module, "__version__", "of unknown version"))
    return TensorRT(module=module, backend=backend, version=version, can=probe(module))


def probe(module: Any) -> Capabilities:
    """Ask a TensorRT module, or anything shaped like one, what it has."""
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
