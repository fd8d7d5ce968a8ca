"""The builder's options: each one is set, or refused with the version that cannot do it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mha_deploy.backends.tensorrt.errors import EngineError
from mha_deploy.backends.tensorrt.kernels import EngineTensor
from mha_deploy.backends.tensorrt.network import is_strongly_typed
from mha_deploy.backends.tensorrt.request import HARDWARE_LEVELS, BuildRequest, Profile
from mha_deploy.backends.tensorrt.versions import TensorRT


def refuse_unsupported(rt: TensorRT, request: BuildRequest) -> None:
    """Check that this TensorRT can do all that is asked for.

    Raises:
        EngineError: It cannot; the error names the version and the option.
    """
    for option, asked, able, hint in _wishes(rt, request):
        if asked and not able:
            raise EngineError(f"{rt.title} cannot do this.", got=option, hint=hint)
    _check_targets(rt, request)
    level = request.hardware_compatible
    if level and HARDWARE_LEVELS[level] not in rt.can.hardware_compatibility:
        raise EngineError(
            f"{rt.title} cannot do this.",
            got=f"hardware_compatible={level!r}",
            hint=f"name the targets instead: {_known_targets(rt)}" if rt.can.builds_without_gpu else None,
        )


def _wishes(rt: TensorRT, request: BuildRequest) -> list[tuple[str, bool, bool, str]]:
    """Every option as it is written, whether it is asked for, whether it can be had, what else to do."""
    can = rt.can
    weak = not is_strongly_typed(rt, request)
    replaceable = request.refit if isinstance(request.refit, str) else None
    named = request.refit is not None and replaceable is None
    return [
        ("precision='bf16'", request.precision == "bf16", can.bf16_type, "export in fp16"),
        ("weak_typing", request.weak_typing, can.fp16_flag, "types come from the graph: leave it out"),
        ("precision='bf16'", weak and request.precision == "bf16", can.bf16_flag, "export in fp16"),
        (
            f"precision_constraints={request.precision_constraints!r}",
            request.precision_constraints is not None,
            can.precision_constraints and weak,
            "a strongly typed network keeps the graph's types by itself: leave it out",
        ),
        ("tf32=False", not request.tf32, can.tf32_flag, "allow tf32"),
        (
            "timing_cache",
            request.timing_cache is not None,
            can.timing_cache,
            "it has no effect: leave it out",
        ),
        ("version_compatible", request.version_compatible, can.version_compatible, "build on each version"),
        ("weight_streaming", request.weight_streaming, can.weight_streaming, "use TensorRT 10 or later"),
        ("weight_streaming", request.weight_streaming, not weak, "leave weak_typing out"),
        ("refit='all'", replaceable == "all", can.refit, "build again with the new weights"),
        ("refit='identical'", replaceable == "identical", can.refit_identical, "use TensorRT 10 or later"),
        ("refit of named weights", named, can.refit_individual, "use refit='all'"),
        ("strip_weights", request.strip_weights, can.strip_plan, "use TensorRT 10 or later"),
        (
            "external_tactics",
            request.external_tactics,
            bool(can.external_tactic_sources),
            "this version brings all of its kernels itself: leave it out",
        ),
    ]


def _check_targets(rt: TensorRT, request: BuildRequest) -> None:
    names = request.target_names
    if names and not rt.can.builds_without_gpu:
        raise EngineError(
            f"{rt.title} builds for the GPU of this machine, and for no other.",
            got=f"targets {', '.join(names)}",
            hint="leave the targets out, or use the backend tensorrt-rtx",
        )
    unknown = [name for name in names if name not in rt.can.compute_capabilities]
    if unknown:
        raise EngineError(
            f"{rt.title} cannot compile for this compute capability.",
            got=", ".join(unknown),
            hint=f"one of {_known_targets(rt)}; for any other GPU use the backend tensorrt on that GPU",
        )


def _known_targets(rt: TensorRT) -> str:
    numbers = [name.removeprefix("SM") for name in rt.can.compute_capabilities if name.startswith("SM")]
    return ", ".join(f"{number[:-1]}.{number[-1]}" for number in numbers)


def fill_config(rt: TensorRT, config: Any, request: BuildRequest) -> list[str]:
    """Set everything that was asked for, except the profiles.

    Args:
        rt: The TensorRT, already checked to be able to.
        config: The builder's configuration.
        request: What is asked for.

    Returns:
        What the caller should know.
    """
    trt = rt.module
    # Without details, no source tells the kernels' names and types.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if request.optimization_level is not None:
        config.builder_optimization_level = request.optimization_level
    if request.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, request.workspace)
    for flag in _flags(rt, request):
        config.set_flag(flag)
    if rt.can.tf32_flag and not request.tf32:
        config.clear_flag(trt.BuilderFlag.TF32)
    if request.hardware_compatible is not None:
        level = HARDWARE_LEVELS[request.hardware_compatible]
        config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, level)
    _set_targets(rt, config, request.target_names)
    _set_tactic_sources(rt, config, request)
    return _set_timing_cache(rt, config, request.timing_cache)


def _flags(rt: TensorRT, request: BuildRequest) -> list[Any]:
    """The builder flags to raise. Flags that a version lacks are never reached for."""
    trt = rt.module
    flags = []
    if not is_strongly_typed(rt, request):
        # A strongly typed network refuses these: its types are the graph's.
        if request.precision == "fp16":
            flags.append(trt.BuilderFlag.FP16)
        if request.precision == "bf16":
            flags.append(trt.BuilderFlag.BF16)
    if request.precision_constraints == "obey":
        flags.append(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    if request.precision_constraints == "prefer":
        flags.append(trt.BuilderFlag.PREFER_PRECISION_CONSTRAINTS)
    if request.version_compatible:
        flags.append(trt.BuilderFlag.VERSION_COMPATIBLE)
    if request.weight_streaming:
        flags.append(trt.BuilderFlag.WEIGHT_STREAMING)
    if request.refit == "all":
        flags.append(trt.BuilderFlag.REFIT)
    elif request.refit == "identical":
        flags.append(trt.BuilderFlag.REFIT_IDENTICAL)
    elif request.refit is not None:
        flags.append(trt.BuilderFlag.REFIT_INDIVIDUAL)
    if request.strip_weights:
        flags.append(trt.BuilderFlag.STRIP_PLAN)
    return flags


def _set_targets(rt: TensorRT, config: Any, names: Sequence[str]) -> None:
    if not names:
        return
    trt = rt.module
    config.num_compute_capabilities = len(names)
    for index, name in enumerate(names):
        config.set_compute_capability(getattr(trt.ComputeCapability, name), index)


def _set_tactic_sources(rt: TensorRT, config: Any, request: BuildRequest) -> None:
    """Keep the builder from outside libraries, which a machine may have only as stubs."""
    if request.external_tactics or not rt.can.external_tactic_sources:
        return
    trt = rt.module
    sources = int(config.get_tactic_sources())
    for name in rt.can.external_tactic_sources:
        sources &= ~(1 << int(getattr(trt.TacticSource, name)))
    config.set_tactic_sources(sources)


def _set_timing_cache(rt: TensorRT, config: Any, earlier: bytes | None) -> list[str]:
    if not rt.can.timing_cache:
        return []
    cache = config.create_timing_cache(earlier or b"")
    if cache is not None and config.set_timing_cache(cache, False):
        return []
    # A cache of another GPU or version: start a new one, and say so.
    config.set_timing_cache(config.create_timing_cache(b""), False)
    return ["the timing cache was made on another GPU or version, and was not used"]


def mark_refittable(network: Any, request: BuildRequest) -> None:
    """Mark the named weights as replaceable.

    Raises:
        EngineError: The network has no weights of such a name.
    """
    if request.refit is None or isinstance(request.refit, str):
        return
    unknown = [name for name in request.refit if not network.mark_weights_refittable(name)]
    if unknown:
        raise EngineError(
            "The network has no such weights to refit.", got=", ".join(unknown), hint="use initializer names"
        )


def check_profiles(inputs: Sequence[EngineTensor], profiles: Sequence[Profile]) -> None:
    """Check the profiles against the inputs: TensorRT accepts a misspelt name without a word.

    Raises:
        EngineError: A profile does not fit the inputs.
    """
    dynamic = [tensor.name for tensor in inputs if -1 in tensor.shape]
    if dynamic and not profiles:
        raise EngineError(
            "The graph has dynamic inputs, so the engine needs a profile.",
            got=", ".join(dynamic),
            hint="give min, opt and max shapes for them",
        )
    known = {tensor.name: tensor for tensor in inputs}
    for index, profile in enumerate(profiles):
        unknown = [name for name in profile if name not in known]
        missing = [name for name in dynamic if name not in profile]
        if unknown or missing:
            raise EngineError(
                f"Profile {index} does not name the inputs of the graph.",
                got=f"unknown {unknown}, missing {missing}",
                hint=f"the inputs are {', '.join(known)}",
            )
        for name, shapes in profile.items():
            _check_shapes(index, known[name], shapes)


def _check_shapes(index: int, tensor: EngineTensor, shapes: Sequence[Sequence[int]]) -> None:
    what = f"Profile {index} does not fit the input {tensor.name!r}."
    if len(shapes) != 3 or any(len(shape) != len(tensor.shape) for shape in shapes):
        raise EngineError(what, got=shapes, hint=f"min, opt and max with {len(tensor.shape)} sizes each")
    for size, low, opt, high in zip(tensor.shape, *shapes, strict=True):
        if not 0 <= low <= opt <= high:
            raise EngineError(what, got=f"{low}, {opt}, {high}", hint="min <= opt <= max must hold")
        if size not in (-1, low) or size not in (-1, high):
            raise EngineError(what, got=f"{low}, {opt}, {high} for a fixed size", hint=f"it is always {size}")


def add_profiles(builder: Any, config: Any, profiles: Sequence[Profile]) -> None:
    """Add the optimisation profiles to the configuration.

    Raises:
        EngineError: TensorRT refuses one.
    """
    for index, profile in enumerate(profiles):
        trt_profile = builder.create_optimization_profile()
        for name, (low, opt, high) in profile.items():
            trt_profile.set_shape(name, tuple(low), tuple(opt), tuple(high))
        if config.add_optimization_profile(trt_profile) < 0:
            raise EngineError(f"TensorRT refuses profile {index}.", got=dict(profile))
