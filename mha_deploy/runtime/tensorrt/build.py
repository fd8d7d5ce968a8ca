"""From an ONNX model to an engine, with everything that is needed to judge it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mha_deploy.errors import BackendUnavailable
from mha_deploy.runtime.tensorrt.kernels import (
    EngineTensor,
    Kernel,
    dtype_of,
    kernels_from_inspector,
    kernels_from_log,
    kernels_from_plan,
)
from mha_deploy.runtime.tensorrt.log import (
    Message,
    NodeNames,
    collect,
    errors,
    logger_for,
    read_names,
    tensor_types,
    warnings,
)
from mha_deploy.runtime.tensorrt.request import (
    HARDWARE_LEVELS,
    BuildRequest,
    BuiltEngine,
    Profile,
    large_tensors,
)
from mha_deploy.runtime.tensorrt.run import load_engine
from mha_deploy.runtime.tensorrt.versions import EngineError, NotFusedError, TensorRT, load

# -- From an ONNX file to a TensorRT network, with every complaint of the parser linked to its  ----

_UNUSED = "Unused Input"


def create_network(rt: TensorRT, builder: Any) -> Any:
    """An empty network, strongly typed wherever the version can."""
    trt = rt.module
    flags = 0
    if rt.can.strongly_typed_flag:
        flags |= 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    if rt.can.explicit_batch_flag:
        flags |= 1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH)
    return builder.create_network(flags)


def parse_into(rt: TensorRT, parser: Any, source: bytes | str | Path, names: NodeNames) -> None:
    """Parse the model, or say which node cannot be taken and why.

    Args:
        rt: The TensorRT.
        parser: Its `OnnxParser`, made for the network to fill.
        source: The model.
        names: The model's nodes.

    Raises:
        EngineError: The parser refuses the model.
    """
    # Only from its path does the parser find weights that lie in another file.
    in_memory = isinstance(source, bytes)
    if not (parser.parse(source) if in_memory else parser.parse_from_file(os.fspath(source))):
        raise _refused(rt, parser, names)


def refuse_unused(rt: TensorRT, messages: Sequence[Message], names: NodeNames) -> None:
    """Turn an input that TensorRT ignores into an error: the engine would compute something else.

    It is the builder that says so, not the parser: ask when the plan is there.

    Raises:
        EngineError: TensorRT said that an input is unused.
    """
    # Linking reads every word of a message, and a verbose log has thousands of them.
    unused = names.link(message for message in messages if message.text.startswith(_UNUSED))
    if not unused:
        return
    nodes = tuple(dict.fromkeys(node for message in unused for node in message.nodes))
    raise EngineError(
        f"{rt.title} would ignore a part of the graph, and compute something else.",
        got="; ".join(dict.fromkeys(_with_nodes(message.text, message.nodes) for message in unused)),
        hint="lower the node to a form that this version reads, without that input",
        nodes=nodes,
    )


def allow_decomposition(rt: TensorRT, network: Any) -> int:
    """Let every attention layer be built from several kernels where there is no fused one.

    Returns:
        How many attention layers there are; none where attention is written in primitive operators.
    """
    if not rt.can.attention:
        return 0
    trt = rt.module
    found = 0
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            # `get_layer` gives the base class; this is how TensorRT's Python API casts down.
            layer.__class__ = trt.IAttentionInputLayer
            input_layer = layer
            attention = input_layer.attention
            attention.decomposable = True
            found += 1
    return found


def hold_types(rt: TensorRT, network: Any, types: Mapping[str, str], precision: str) -> None:
    """Hold each layer of a weakly typed network to the types of the graph.

    The network itself cannot be asked: under weak typing it reports FP32 for every real number. What the
    parser put in between (it reshapes weights, for one) keeps the widest type that goes into it: weights that
    the export kept in FP32 would be rounded to FP16 on their way otherwise.

    Args:
        rt: The TensorRT.
        network: The network.
        types: Type of each tensor of the ONNX graph, by its short name.
        precision: The type of everything that is not known to be wider.
    """
    trt = rt.module
    dtypes = {"fp16": trt.DataType.HALF, "fp32": trt.DataType.FLOAT}
    wide: set[str] = set()  # tensors that are FP32
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        outputs = [_tensor(layer.get_output(place)) for place in range(layer.num_outputs)]
        if not outputs or not all(output.dtype in dtypes for output in outputs):
            # Indices, shapes and truth values have one type only.
            continue
        if layer.type == trt.LayerType.CONSTANT:
            usual = _weights_type(trt, layer)
        else:
            usual = "fp32" if any(name in wide for name in _input_names(layer)) else precision
        told = [types.get(output.name, usual) for output in outputs]
        wide.update(output.name for output, dtype in zip(outputs, told, strict=True) if dtype == "fp32")
        if layer.type == trt.LayerType.CONSTANT and told != ["fp32"]:
            continue  # its users say what becomes of it
        held = [dtypes.get(dtype) for dtype in told]
        if None not in held:
            layer.precision = held[0]
            for place, dtype in enumerate(held):
                layer.set_output_type(place, dtype)


def _weights_type(trt: Any, layer: Any) -> str:
    """The type that the weights of a constant have in the graph."""
    layer.__class__ = trt.IConstantLayer  # how TensorRT's Python API casts down
    constant_layer = layer
    weights = constant_layer.weights
    return dtype_of(str(getattr(weights, "dtype", "unknown")))


def _input_names(layer: Any) -> list[str]:
    inputs = (layer.get_input(place) for place in range(layer.num_inputs))
    return [tensor.name for tensor in inputs if tensor is not None]


def network_inputs(network: Any) -> tuple[EngineTensor, ...]:
    """The inputs of a network."""
    return tuple(_tensor(network.get_input(index)) for index in range(network.num_inputs))


def network_outputs(network: Any) -> tuple[EngineTensor, ...]:
    """The outputs of a network."""
    return tuple(_tensor(network.get_output(index)) for index in range(network.num_outputs))


def _tensor(trt_tensor: Any) -> EngineTensor:
    try:
        shape = tuple(int(size) for size in trt_tensor.shape)
    except ValueError:
        # A rank that is not known is a shape of negative length, which Python cannot take.
        shape = ()
    return EngineTensor(name=trt_tensor.name, dtype=dtype_of(trt_tensor.dtype.name), shape=shape)


def _refused(rt: TensorRT, parser: Any, names: NodeNames) -> EngineError:
    found = [_complaint(rt, parser.get_error(index), names) for index in range(parser.num_errors)]
    told = [_with_nodes(text, (node,) if node else ()) for node, text in found]
    return EngineError(
        f"The ONNX parser of {rt.title} refuses the graph.",
        got="; ".join(dict.fromkeys(told)) or "no reason given",
        hint="lower the graph for this target, or check which of its nodes the target takes",
        nodes=tuple(dict.fromkeys(node for node, _ in found if node)),
    )


def _complaint(rt: TensorRT, parser_error: Any, names: NodeNames) -> tuple[str | None, str]:
    """The node and the text of one parser error; 8.6 tells only the node's place in the file."""
    text = str(parser_error.desc())
    node = names.at(parser_error.node())
    if rt.can.parser_node_names:
        node = parser_error.node_name() or node
        operator = parser_error.node_operator()
    else:
        operator = names.operators[parser_error.node()] if node else ""
    return node, f"{operator}: {text}" if operator else text


def _with_nodes(text: str, nodes: Sequence[str]) -> str:
    return f"node {', '.join(nodes)}: {text}" if nodes else text


# -- The builder's options: each one is set, or refused with the version that cannot do it ---------


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
    return [
        ("precision='bf16'", request.precision == "bf16", can.bf16_type, "export in fp16"),
        (
            "precision_constraints",
            request.precision_constraints,
            can.precision_constraints and not can.strongly_typed_flag,
            "a strongly typed network keeps the graph's types by itself: leave it out",
        ),
        (
            "timing_cache",
            request.timing_cache is not None,
            can.timing_cache,
            "it has no effect: leave it out",
        ),
        ("version_compatible", request.version_compatible, can.version_compatible, "build on each version"),
        ("weight_streaming", request.weight_streaming, can.weight_streaming, "use TensorRT 10 or later"),
        ("refit='all'", request.refit == "all", can.refit, "build again with the new weights"),
        ("refit='identical'", request.refit == "identical", can.refit_identical, "use TensorRT 10 or later"),
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
    if rt.can.tf32_flag:  # FP32 matmuls keep their inputs as they are
        config.clear_flag(trt.BuilderFlag.TF32)
    if request.hardware_compatible is not None:
        level = HARDWARE_LEVELS[request.hardware_compatible]
        config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, level)
    _set_targets(rt, config, request.target_names)
    _set_tactic_sources(rt, config)
    return _set_timing_cache(rt, config, request.timing_cache)


def _flags(rt: TensorRT, request: BuildRequest) -> list[Any]:
    """The builder flags to raise. Flags that a version lacks are never reached for."""
    trt = rt.module
    flags = []
    if request.precision == "fp16" and not rt.can.strongly_typed_flag:
        # A strongly typed network refuses it: its types are the graph's. BF16 came with such networks.
        flags.append(trt.BuilderFlag.FP16)
    if request.precision_constraints:
        flags.append(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    if request.version_compatible:
        flags.append(trt.BuilderFlag.VERSION_COMPATIBLE)
    if request.weight_streaming:
        flags.append(trt.BuilderFlag.WEIGHT_STREAMING)
    if request.refit == "all":
        flags.append(trt.BuilderFlag.REFIT)
    elif request.refit == "identical":
        flags.append(trt.BuilderFlag.REFIT_IDENTICAL)
    return flags


def _set_targets(rt: TensorRT, config: Any, names: Sequence[str]) -> None:
    if not names:
        return
    trt = rt.module
    config.num_compute_capabilities = len(names)
    for index, name in enumerate(names):
        config.set_compute_capability(getattr(trt.ComputeCapability, name), index)


def _set_tactic_sources(rt: TensorRT, config: Any) -> None:
    """Keep the builder from outside libraries, which a machine may have only as stubs."""
    if not rt.can.external_tactic_sources:
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


# -- What a failed build means: the builder's errors in words a user can act on --------------------


@dataclass(frozen=True, kw_only=True)
class _Known:
    sign: re.Pattern[str]
    what: str
    hint: str
    is_attention: bool = False


_KNOWN = (
    _Known(
        sign=re.compile(r"is_decomposable\(\)|not supported by a dedicated kernel|no fused kernel"),
        what="Attention has no fused kernel for this target, and may not be decomposed",
        hint="use fp16 or bf16 and a head size of 16 to 256; or --allow-decomposed, and lose speed",
        is_attention=True,
    ),
    _Known(
        sign=re.compile(r"graph_jit\.cpp.*CUDA_SUCCESS"),
        what="The builder has to run a kernel to prepare weights that stay replaceable, and finds no GPU",
        hint="build without refit, or on a machine with a GPU",
    ),
    _Known(
        sign=re.compile(r"HW-specific datatypes"),
        what="A target has no hardware for a type in the graph",
        hint="leave that target out, or export in fp16",
    ),
    _Known(
        sign=re.compile(r"element type \(\w+\) differs"),
        what="Two tensors of different types meet in one operator",
        hint="give the mask in the type of the queries",
    ),
    _Known(
        sign=re.compile(r"Build canceled"),
        what="The build was cancelled",
        hint="start it again",
    ),
    _Known(
        sign=re.compile(r"[Oo]ut of memory|OutOfMemory"),
        what="The GPU has not enough memory for this build",
        hint="set a smaller workspace, or smaller max shapes",
    ),
)


def build_failure(rt: TensorRT, messages: Sequence[Message], names: NodeNames) -> EngineError:
    """Make the error of a build that returned nothing.

    Args:
        rt: The TensorRT that was building.
        messages: What it said.
        names: The nodes of the graph.
    """
    found = names.link(errors(messages))
    text = "; ".join(dict.fromkeys(_line(message) for message in found)) or "the builder gave no reason"
    known = next((entry for entry in _KNOWN if entry.sign.search(text)), None)
    nodes = tuple(dict.fromkeys(node for message in found for node in message.nodes))
    if known and known.is_attention and not nodes:
        # The builder does not say which: it is one of these.
        nodes = names.attention
    what = f"{known.what} ({rt.title})." if known else f"{rt.title} could not build the engine."
    if known and known.is_attention:
        # What the builder says of it is long and tells no more.
        among = "one of " if len(nodes) > 1 else "node "
        return NotFusedError(what, got=f"{among}{', '.join(nodes)}", hint=known.hint, nodes=nodes)
    return EngineError(what, got=text, hint=known.hint if known else None, nodes=nodes)


def _line(message: Message) -> str:
    text = " ".join(message.text.split())
    return f"node {', '.join(message.nodes)}: {text}" if message.nodes else text


# -- How far the builder is, where it tells (`IProgressMonitor`; 8.6 has none) ---------------------

OnProgress = Callable[[str, int, int], None]
"""Called with a phase, how many of its steps are done, and how many it has. Phases nest."""


def make_monitor(trt: Any, on_progress: OnProgress) -> Any:
    """Wrap a callback for `IBuilderConfig.progress_monitor`.

    An exception of the callback, Ctrl-C among them, cannot pass through the builder: it cancels the
    build and is kept in `failure`, to be raised when the builder has returned.

    Args:
        trt: The TensorRT module, one that has the class.
        on_progress: The callback.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}
            self.failure: BaseException | None = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.steps[phase_name] = num_steps
            self.tell(phase_name, 0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self.tell(phase_name, step + 1)
            return self.failure is None

        def phase_finish(self, phase_name: str) -> None:
            self.tell(phase_name, self.steps.get(phase_name, 0))

        def tell(self, phase: str, done: int) -> None:
            if self.failure is not None:
                return
            try:
                on_progress(phase, done, self.steps.get(phase, 0))
            except BaseException as failure:  # noqa: BLE001  raised again by the caller
                self.failure = failure

    return Monitor()


# -- What an engine says of itself when it is loaded: needs the GPU it was built for ---------------


def inspect_kernels(rt: TensorRT, plan: bytes, *, host_code: bool = False) -> list[Kernel]:
    """Load an engine and read its kernels from TensorRT's inspector.

    Args:
        rt: The TensorRT that built it.
        plan: The serialised engine.
        host_code: Allow the runtime code that a version-compatible engine carries. Only for plans of
            one's own: it is executed.

    Raises:
        EngineError: The engine cannot be loaded here.
    """
    return kernels_from_inspector(inspector_json(rt, plan, host_code=host_code))


def inspector_json(rt: TensorRT, plan: bytes, *, host_code: bool = False) -> str:
    """Load an engine and return the inspector's JSON as it is."""
    trt = rt.module
    engine, _runtime = load_engine(rt, plan, host_code=host_code)  # which must outlive the engine
    inspector = engine.create_engine_inspector()
    return str(inspector.get_engine_information(trt.LayerInformationFormat.JSON))


# -- From an ONNX model to an engine, with everything that is needed to judge it -------------------


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
        network = create_network(rt, builder)
        parser = rt.module.OnnxParser(network, logger_for(rt))
        parse_into(rt, parser, request.onnx, names)
        if request.allow_decomposed:
            allow_decomposition(rt, network)
        if request.precision_constraints:
            hold_types(rt, network, tensor_types(request.onnx), request.precision)
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
            strongly_typed=rt.can.strongly_typed_flag,
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
