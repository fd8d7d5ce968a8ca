"""From an ONNX model to an engine, with everything that is needed to judge it."""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
from google.protobuf.message import DecodeError

from mha_deploy.errors import BackendUnavailable, DeployError, nearest
from mha_deploy.options import EngineOptions, OnStep
from mha_deploy.runtime.tensorrt import kernels as reported
from mha_deploy.runtime.tensorrt.engine_runner import Profile, TensorRTRunner, load_engine
from mha_deploy.runtime.tensorrt.kernels import EngineTensor, Kernel, LargeTensor, dtype_of
from mha_deploy.runtime.tensorrt.versions import (
    EngineError,
    GraphRefusedError,
    Message,
    NotFusedError,
    TensorRT,
    collect,
    errors,
    lean_runtime_hint,
    logger_for,
)
from mha_deploy.status import EvidenceSource

# -- The request for a build, and its result -------------------------------------------------------

_RECORDED = (
    *("allow_decomposed", "optimization_level", "workspace_mib", "version_compatible"),
    *("hardware_compatible", "weight_streaming", "refit", "gqa"),
)
HARDWARE_LEVELS = {"ampere-plus": "AMPERE_PLUS", "same-compute-capability": "SAME_COMPUTE_CAPABILITY"}


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """One engine to build, with the options of a user."""

    onnx: Path  # the model, with its external data beside it
    precision: str = "fp16"  # of the graph: `fp16`, `bf16` or `fp32`
    profiles: Sequence[Profile] = ()  # ranges of the input shapes, one mapping per optimization profile
    options: EngineOptions = field(default_factory=EngineOptions)
    timing_cache: bytes | None = field(default=None, repr=False)  # of earlier builds on this GPU
    # Constrain every layer to the graph's types where TensorRT chooses types by itself (8.6; later networks
    # are strongly typed).
    precision_constraints: bool = False
    has_int8: bool = False  # whether the graph has Q/DQ in INT8, which such a TensorRT must be allowed to use

    def __post_init__(self) -> None:
        hardware = self.options.hardware_compatible
        for name, what, value, known in (
            ("precision", "precision", self.precision, ("fp16", "bf16", "fp32")),
            ("hardware_compatible", "hardware compatibility", hardware, tuple(HARDWARE_LEVELS)),
            ("refit", "refit mode", self.options.refit, ("all", "identical")),
        ):
            if value is not None and value not in known:
                hint = nearest(value, known)
                raise EngineError(f"No such {what}.", got=value, hint=hint, options=(name,))
        level = self.options.optimization_level
        if level is not None and not 0 <= level <= 5:
            what, option = "The optimization level is out of range.", "optimization_level"
            raise EngineError(what, got=level, hint="0-5", options=(option,))

    @property
    def target_names(self) -> tuple[str, ...]:
        """The targets as TensorRT-RTX calls them: `SM89`, `SM120`, `CURRENT`."""
        return parse_targets(self.options.targets)

    def record(self) -> dict[str, Any]:
        """What the builder was given, as plain data for a manifest."""
        return {
            "precision": self.precision,
            "precision_constraints": self.precision_constraints,
            "has_int8": self.has_int8,
            "profiles": [
                {name: list(map(list, shapes)) for name, shapes in p.items()} for p in self.profiles
            ],
            **{name: getattr(self.options, name) for name in _RECORDED},
            "targets": list(self.target_names),
        }


@dataclass(frozen=True, kw_only=True)
class BuiltEngine:
    """An engine, and what the build reported."""

    plan: bytes = field(repr=False)
    seconds: float
    strongly_typed: bool  # whether its types are those of the graph
    kernels: Mapping[EvidenceSource, tuple[Kernel, ...]]  # as each source reports them
    warnings: tuple[str, ...] = ()  # TensorRT's
    notes: tuple[str, ...] = ()  # for the user: a stale timing cache, a source without kernels
    large_tensors: tuple[LargeTensor, ...] = ()
    timing_cache: bytes | None = field(default=None, repr=False)  # for the next build; None: no effect


def parse_targets(targets: str | Sequence[str]) -> tuple[str, ...]:
    """Compute capabilities as people write them, `"8.9,12.0"` or `("sm_89", "120")`, by names like `SM89`."""
    names = []
    for text in re.split(r"[,;\s]+", targets) if isinstance(targets, str) else targets:
        match = re.fullmatch(r"(?:sm_?)?(?:(\d{1,2})\.(\d)|(\d{2,3}))", text.strip(), re.IGNORECASE)
        if match is not None:
            names.append(f"SM{match[3]}" if match[3] else f"SM{match[1]}{match[2]}")
        elif text.upper() == "CURRENT":
            names.append("CURRENT")
        elif text:
            what, hint = "This is not a compute capability.", "write it as 8.9 or 89"
            raise EngineError(what, got=text, hint=hint, options=("targets",))
    return tuple(dict.fromkeys(names))


def capabilities_of(targets: str | Sequence[str]) -> list[str]:
    """The targets that name a GPU, as compute capabilities: `8.9`, `12.0`."""
    names = [name for name in parse_targets(targets) if name != "CURRENT"]
    return [f"{name[2:-1]}.{name[-1]}" for name in names]


# -- TensorRT's names for the nodes of an ONNX file ------------------------------------------------

_SEPARATORS = re.compile(r"[\s\[\]{}()\"',;=]+")


@dataclass(frozen=True, kw_only=True)
class NodeNames:
    """The nodes of a graph by TensorRT's names for them, in file order, each with its operator."""

    nodes: tuple[tuple[str, str], ...]
    readers: Mapping[str, Sequence[str]]  # for each tensor, the nodes that read it
    axes: dict[str, tuple[str, int]]  # for each named dimension, an input of the graph and its place there
    unread: frozenset[str]  # inputs of the graph that no node reads

    def mentioned(self, text: str) -> list[str]:
        """The nodes that a message mentions, by name or by a tensor they read."""
        known, words = {name for name, _ in self.nodes}, [w.strip(".:") for w in _SEPARATORS.split(text)]
        readers = (node for word in words for node in self.readers.get(word, ()))
        return list(dict.fromkeys([word for word in words if word in known] or readers))

    def located(self, text: str) -> str:
        """A message in one line, behind the nodes that it mentions: `node a, b: text`."""
        return _with_nodes(self.mentioned(text), " ".join(text.split()))


def _with_nodes(nodes: Sequence[str], text: str) -> str:
    return f"node {', '.join(nodes)}: {text}" if nodes else text


def read_names(path: Path) -> NodeNames:
    """Read the node names of an ONNX model, without its weights; refuse what is none, or an empty one."""
    graph = _load(path).graph
    if not graph.node:
        # TensorRT's parser accepts zero bytes as a valid, empty model.
        raise EngineError("The ONNX model has no nodes.", got=path, hint="export it again")
    # The parser names a node without a name for its first output.
    nodes = tuple((node.name or f"node_of_{node.output[0]}", node.op_type) for node in graph.node)
    readers: dict[str, list[str]] = defaultdict(list)
    for (name, _), node in zip(nodes, graph.node, strict=True):
        for tensor in dict.fromkeys(_read_by(node)):
            readers[tensor].append(name)
    axes = {
        dim.dim_param: (value.name, place)
        for value in graph.input
        for place, dim in enumerate(value.type.tensor_type.shape.dim)
        if dim.dim_param
    }
    unread = frozenset(value.name for value in graph.input) - readers.keys()
    return NodeNames(nodes=nodes, readers=readers, axes=axes, unread=unread)


def _read_by(node: onnx.NodeProto) -> Iterator[str]:
    """The tensors that a node reads, and those that its branches do."""
    yield from filter(None, node.input)
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from _read_by(inner)


def _load(path: Path) -> onnx.ModelProto:
    try:
        return onnx.load(str(path), load_external_data=False)
    except (DecodeError, UnicodeDecodeError) as cause:
        hint = "give the model.onnx of a bundle"
        raise EngineError("This is not an ONNX model.", got=path, hint=hint) from cause
    except OSError as cause:
        raise EngineError("The ONNX model cannot be read.", got=cause, hint="check the path") from cause


# -- From an ONNX file to a TensorRT network -------------------------------------------------------


def parse_into(rt: TensorRT, parser: Any, path: Path, names: NodeNames) -> None:
    """Parse the model into the network of the parser, or report which node is refused and why."""
    if parser.parse_from_file(os.fspath(path)):
        return
    found, said = [], ""
    for parser_error in map(parser.get_error, range(parser.num_errors)):
        place = parser_error.node()  # in the file, which is all that 8.6 reports
        node, operator = names.nodes[place] if 0 <= place < len(names.nodes) else ("", "")
        if rt.can.parser_node_names:
            node, operator = parser_error.node_name() or node, parser_error.node_operator()
        text = f"{operator}: {parser_error.desc()}" if operator else str(parser_error.desc())
        said += f"{text}\n"
        found.append(_with_nodes([node] if node else [], text))
    got = "; ".join(dict.fromkeys(found)) or "no reason reported"
    hint = "write that part of the model with other operators, or another version of TensorRT"
    if "NonZero" in said:  # not in a name of the user's
        hint = "write x[mask] with torch.where, or use the backend tensorrt"
    if "zero point" in said.lower():
        hint = "quantize symmetrically: of ONNX Runtime's quantize_static, extra_options="
        hint += '{"ActivationSymmetric": True, "WeightSymmetric": True} with QInt8 for both'
    raise GraphRefusedError(f"The ONNX parser of {rt.title} refuses the graph.", got=got, hint=hint)


def constrain_types(rt: TensorRT, network: Any, types: Mapping[str, str], precision: str) -> None:
    """Constrain each layer of a weakly typed network to the types of the graph, else to the `precision`.

    The network reports FP32 for every real number. Layers that the parser adds (it reshapes weights, for
    one) keep the widest type among their inputs: weights in FP32 would otherwise be rounded on their way.
    """
    trt = rt.module
    dtypes = {"fp16": trt.DataType.HALF, "fp32": trt.DataType.FLOAT}
    wide: set[str] = set()  # tensors that are FP32
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        outputs = [_tensor(layer.get_output(place)) for place in range(layer.num_outputs)]
        if not outputs or not all(output.dtype in dtypes for output in outputs):
            continue  # indices, shapes and truth values have one type only
        is_constant = layer.type == trt.LayerType.CONSTANT
        if is_constant:
            layer.__class__ = trt.IConstantLayer  # how TensorRT's Python API casts down
            constant_layer = layer
            usual = dtype_of(str(getattr(constant_layer.weights, "dtype", "unknown")))
        else:
            inputs = [layer.get_input(place) for place in range(layer.num_inputs)]
            widest = any(tensor is not None and tensor.name in wide for tensor in inputs)
            usual = "fp32" if widest else precision
        wanted = [types.get(output.name, usual) for output in outputs]
        wide.update(output.name for output, dtype in zip(outputs, wanted, strict=True) if dtype == "fp32")
        if is_constant and wanted != ["fp32"]:
            continue  # the layers that read it decide its type
        constraints = [dtypes.get(dtype) for dtype in wanted]
        if None not in constraints:
            if not layer.type.name.startswith("PLUGIN"):  # it may read scales in FP32, whatever it writes
                layer.precision = constraints[0]
            for place, dtype in enumerate(constraints):
                layer.set_output_type(place, dtype)


def _tensor(trt_tensor: Any) -> EngineTensor:
    try:
        shape = tuple(int(size) for size in trt_tensor.shape)
    except ValueError:  # an unknown rank is a shape of negative length, which Python cannot represent
        shape = ()
    return EngineTensor(name=trt_tensor.name, dtype=dtype_of(trt_tensor.dtype.name), shape=shape)


# -- The builder's options: each one is set, or refused with the version that does not support it --


def _refuse_unsupported(rt: TensorRT, request: BuildRequest) -> None:
    """Refuse an option that this TensorRT does not support."""
    can, options, names = rt.can, request.options, request.target_names
    level = options.hardware_compatible
    known = ", ".join(capabilities_of(can.compute_capabilities))
    named = f"name the targets instead: {known}" if known else "leave it out"
    typed = "a strongly typed network keeps the graph's types by itself: leave it out"
    weakly = can.precision_constraints and not can.strongly_typed_flag
    fits = HARDWARE_LEVELS.get(level or "") in can.hardware_compatibility
    has_cache = request.timing_cache is not None
    compatible = "--backend tensorrt" if can.builds_without_gpu else "build on each version"
    for option, requested, supported, hint in (
        ("precision='bf16'", request.precision == "bf16", can.bf16_type, "export in fp16"),
        ("precision_constraints", request.precision_constraints, weakly, typed),
        ("timing_cache", has_cache, can.timing_cache, "it has no effect: leave it out"),
        ("version_compatible", options.version_compatible, can.version_compatible, compatible),
        ("weight_streaming", options.weight_streaming, can.weight_streaming, "use TensorRT 10 or later"),
        ("refit='all'", options.refit == "all", can.refit, "build again with the new weights"),
        ("refit='identical'", options.refit == "identical", can.refit_identical, "use TensorRT 10 or later"),
        (f"hardware_compatible={level!r}", level is not None, fits, named),
    ):
        if requested and not supported:
            raise EngineError(f"{rt.title} does not support this option.", got=option, hint=hint)
    if names and not can.builds_without_gpu:
        problem = f"{rt.title} builds for the GPU of this machine, and for no other."
        hint = "leave the targets out, or use the backend tensorrt-rtx"
        raise EngineError(problem, got=f"targets {', '.join(names)}", hint=hint)
    unknown = [name for name in names if name not in can.compute_capabilities]
    if unknown:
        problem = f"{rt.title} cannot compile for this compute capability."
        hint = f"one of {known}; for any other GPU use the backend tensorrt on that GPU"
        raise EngineError(problem, got=", ".join(unknown), hint=hint)


def _fill_config(rt: TensorRT, config: Any, request: BuildRequest) -> list[str]:
    """Set every option but the profiles; returns notes for the manifest."""
    trt, options = rt.module, request.options
    # Without details, no source reports the kernels' names and types.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.workspace_mib is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mib << 20)
    # A flag is an attribute that some versions lack: it is not touched unless it is set.
    if request.precision == "fp16" and not rt.can.strongly_typed_flag:
        # A strongly typed network refuses it: its types are the graph's. BF16 came with such networks.
        config.set_flag(trt.BuilderFlag.FP16)
        if request.has_int8 and rt.can.int8_flag:
            config.set_flag(trt.BuilderFlag.INT8)
    if request.precision_constraints:
        config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    if options.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    if options.weight_streaming:
        config.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)
    if options.refit == "all":
        config.set_flag(trt.BuilderFlag.REFIT)
    elif options.refit == "identical":
        config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)
    if rt.can.tf32_flag:  # FP32 matmuls keep their inputs as they are
        config.clear_flag(trt.BuilderFlag.TF32)
    if options.hardware_compatible is not None:
        level = HARDWARE_LEVELS[options.hardware_compatible]
        config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, level)
    if request.target_names:
        config.num_compute_capabilities = len(request.target_names)
        for index, name in enumerate(request.target_names):
            config.set_compute_capability(getattr(trt.ComputeCapability, name), index)
    if rt.can.external_tactic_sources:
        # A machine may have these libraries only as stubs.
        sources = int(config.get_tactic_sources())
        for name in rt.can.external_tactic_sources:
            sources &= ~(1 << int(getattr(trt.TacticSource, name)))
        config.set_tactic_sources(sources)
    if rt.can.timing_cache:
        cache = config.create_timing_cache(request.timing_cache or b"")
        if cache is None or not config.set_timing_cache(cache, False):
            config.set_timing_cache(config.create_timing_cache(b""), False)
            return ["the timing cache was made on another GPU or version, and was not used"]
    return []


def _add_profiles(
    builder: Any, config: Any, inputs: Sequence[EngineTensor], profiles: Sequence[Profile]
) -> None:
    """Check the profiles against the inputs, and add them: TensorRT silently accepts a misspelt name."""
    dynamic = [tensor.name for tensor in inputs if -1 in tensor.shape]
    if dynamic and not profiles:
        problem = "The graph has dynamic inputs, so the engine needs a profile."
        raise EngineError(problem, got=", ".join(dynamic), hint="give min, opt and max shapes for them")
    known = {tensor.name: tensor for tensor in inputs}
    for index, profile in enumerate(profiles):
        unknown = [name for name in profile if name not in known]
        missing = [name for name in dynamic if name not in profile]
        if unknown or missing:
            problem = f"Profile {index} does not name the inputs of the graph."
            got, hint = f"unknown {unknown}, missing {missing}", f"the inputs are {', '.join(known)}"
            raise EngineError(problem, got=got, hint=hint)
        trt_profile = builder.create_optimization_profile()
        for name, shapes in profile.items():
            what, fixed = f"Profile {index} does not fit the input {name!r}.", known[name].shape
            if len(shapes) != 3 or any(len(shape) != len(fixed) for shape in shapes):
                raise EngineError(what, got=shapes, hint=f"min, opt and max with {len(fixed)} sizes each")
            for size, low, opt, high in zip(fixed, *shapes, strict=True):
                got = f"{low}, {opt}, {high}"
                if not 0 <= low <= opt <= high:
                    raise EngineError(what, got=got, hint="min <= opt <= max is required")
                if size != -1 and (low, high) != (size, size):
                    raise EngineError(what, got=f"{got} for a fixed size", hint=f"it is always {size}")
            trt_profile.set_shape(name, *map(tuple, shapes))
        if config.add_optimization_profile(trt_profile) < 0:
            raise EngineError(
                f"TensorRT refuses profile {index}.",
                got=dict(profile),
                hint="sizes within the axes that `mha-deploy inspect` shows",
            )


# -- What a failed build means: the builder's errors in words a user can act on --------------------

_NOT_FUSED = re.compile(r"is_decomposable\(\)|not supported by a dedicated kernel|no fused kernel")
_RUNS_A_KERNEL = re.compile(r"graph_jit\.cpp.*CUDA_SUCCESS")
_KNOWN = {
    r"HW-specific datatypes": (
        "A target has no hardware for a type in the graph",
        "leave that target out, or export in fp16",
    ),
    r"element type \(\w+\) differs": (
        "Two tensors of different types meet in one operator",
        "give the mask in the type of the queries",
    ),
    r"Build canceled": ("The build was canceled", "start it again"),
    r"[Oo]ut of memory|OutOfMemory": (
        "The GPU has not enough memory for this build",
        "set a smaller workspace, or smaller max shapes",
    ),
}


def _build_failure(rt: TensorRT, messages: Sequence[Message], names: NodeNames) -> DeployError:
    """The error of a build that returned nothing, from the messages of the builder."""
    found = errors(messages)
    text, said = "; ".join(dict.fromkeys(map(names.located, found))), "; ".join(found)
    text = text or "the builder reported no reason"
    if _NOT_FUSED.search(said):
        # Where the builder does not report which, it is one of those that are attention in one operator.
        nodes = list(dict.fromkeys(node for each in found for node in names.mentioned(each)))
        nodes = nodes or [name for name, operator in names.nodes if operator.endswith("Attention")]
        return NotFusedError(
            f"Attention has no fused kernel for this target, and may not be decomposed ({rt.title}).",
            # The builder's own message is long, and has no more information.
            got=f"{'one of' if len(nodes) > 1 else 'node'} {', '.join(nodes)}",
            hint="use fp16 or bf16 and a head size of 16 to 256; or --allow-decomposed, and lose speed",
        )
    if lean := lean_runtime_hint(rt, said):
        problem = f"A version-compatible engine needs the lean runtime, which is not found ({rt.title})."
        return EngineError(problem, got=text, hint=lean)
    if _RUNS_A_KERNEL.search(said):
        problem = "The builder has to run a kernel to prepare weights that stay replaceable"
        hint = "build without refit, or on a machine with a GPU"
        return BackendUnavailable(f"{problem}, and finds no GPU ({rt.title}).", got=text, hint=hint)
    for sign, (what, hint) in _KNOWN.items():
        if re.search(sign, said):
            return EngineError(f"{what} ({rt.title}).", got=text, hint=hint)
    return EngineError(
        f"{rt.title} could not build the engine.",
        got=text,
        hint="--allow-decomposed, another --profile, or another version of TensorRT",
    )


# -- The progress of the builder (`IProgressMonitor`; 8.6 has none) --------------------------------


def _make_monitor(trt: Any, on_progress: OnStep) -> Any:
    """Wrap a callback for `IBuilderConfig.progress_monitor`.

    What it raises, Ctrl-C among them, cancels the build; `failure` is raised when the builder has returned.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}
            self.failure: BaseException | None = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.steps[phase_name] = num_steps
            self.report(phase_name, 0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self.report(phase_name, step + 1)
            return self.failure is None

        def phase_finish(self, phase_name: str) -> None:
            self.report(phase_name, self.steps.get(phase_name, 0))

        def report(self, phase: str, done: int) -> None:
            if self.failure is not None:
                return
            try:
                on_progress(phase, done, self.steps.get(phase, 0))
            except BaseException as failure:  # noqa: BLE001  raised again by the caller
                self.failure = failure

    return Monitor()


# The parser reports of every INT64 input that it is one, which the engine's manifest lists.
_UNINFORMATIVE = re.compile(r"Make sure input \S+ has Int64 binding")

# -- The build -------------------------------------------------------------------------------------


def build_engine(rt: TensorRT, request: BuildRequest, on_progress: OnStep | None = None) -> BuiltEngine:
    """Build an engine. An exception that `on_progress` raises cancels the build and is raised here."""
    trt = rt.module
    names = read_names(request.onnx)
    _refuse_unsupported(rt, request)
    started = time.perf_counter()
    with collect(rt) as messages:
        # The parser owns the weights that the network points to: all three live until the plan is there.
        builder = _start_builder(rt)
        network = builder.create_network(_network_flags(rt))
        parser = trt.OnnxParser(network, logger_for(rt))
        parse_into(rt, parser, request.onnx, names)
        if request.precision_constraints:
            constrain_types(rt, network, _types_in_file(request.onnx), request.precision)
        config = builder.create_builder_config()
        notes = _fill_config(rt, config, request)
        _configure_layers(rt, network, config, allow_decomposed=request.options.allow_decomposed)
        inputs = tuple(_tensor(network.get_input(index)) for index in range(network.num_inputs))
        _add_profiles(builder, config, inputs, request.profiles)
        monitor = None
        if on_progress is not None and rt.can.progress_monitor:
            monitor = config.progress_monitor = _make_monitor(trt, on_progress)
        serialized = builder.build_serialized_network(network, config)
        if monitor is not None and monitor.failure is not None:
            raise monitor.failure
        if serialized is None:
            raise _build_failure(rt, messages, names)
        plan, seconds = bytes(serialized), time.perf_counter() - started
        _refuse_ignored_inputs(rt, messages, names)
        kernels, problems = _kernels_by_source(rt, plan, messages, request)
        warnings = tuple(
            message.text
            for message in messages
            if message.severity == "WARNING" and not _UNINFORMATIVE.search(message.text)
        )
        cache = config.get_timing_cache() if rt.can.timing_cache else None
        return BuiltEngine(
            plan=plan,
            seconds=seconds,
            strongly_typed=rt.can.strongly_typed_flag,
            kernels=kernels,
            warnings=warnings,
            notes=(*notes, *problems),
            large_tensors=reported.large_tensors(warnings, names.axes),
            timing_cache=None if cache is None else bytes(cache.serialize()),
        )


def refit_engine(rt: TensorRT, plan: bytes, path: Path, *, host_code: bool = False) -> bytes:
    """The plan of a refittable engine with the weights of a graph in place of its own.

    The graph, a file, must be the one that the engine was built from in everything but its weights.
    """
    trt = rt.module
    engine, _runtime = load_engine(rt, plan, host_code=host_code)  # which must outlive the engine
    if not engine.refittable:
        problem = "The weights of this engine cannot be replaced."
        raise EngineError(problem, got="it was not built to be refitted", hint=REFITTABLE)
    with collect(rt) as messages:
        refitter = trt.Refitter(engine, logger_for(rt))
        kept = []  # TensorRT reads them when it refits
        if rt.can.parser_refitter:
            parser_refitter = trt.OnnxParserRefitter(refitter, logger_for(rt))
            is_read = bool(parser_refitter.refit_from_file(str(path)))
        else:
            weights, is_read = _weights_in_file(path), True
            for name in refitter.get_all_weights():
                if name in weights:
                    kept.append(weights[name])
                    is_read = is_read and bool(refitter.set_named_weights(name, trt.Weights(weights[name])))
        missing = list(refitter.get_missing_weights())
        if not is_read or missing or not refitter.refit_cuda_engine():
            got = f"no weights for {', '.join(missing[:4])}" if missing else "; ".join(errors(messages))
            hint = "build the engine again: mha-deploy build-engine BUNDLE"
            problem = f"{rt.title} could not replace the weights."
            raise EngineError(problem, got=got or "no reason was reported", hint=hint)
        return bytes(engine.serialize())


REFITTABLE = "build it with --refit all, on a machine with its GPU"


def _weights_in_file(path: Path) -> dict[str, np.ndarray]:
    """The weights and constants of an ONNX file, by the names that the parser gives them."""
    graph = _load(path).graph
    constants = {
        node.output[0]: attribute.t
        for node in graph.node
        for attribute in node.attribute
        if node.op_type == "Constant" and attribute.name == "value"
    }
    found = {**constants, **{tensor.name: tensor for tensor in graph.initializer}}
    arrays = {name: onnx.numpy_helper.to_array(tensor, str(path.parent)) for name, tensor in found.items()}
    # A TensorRT without a parser that refits has no INT64: its parser made them INT32.
    return {
        name: np.ascontiguousarray(array.astype(np.int32) if array.dtype == np.int64 else array)
        for name, array in arrays.items()
    }


def _start_builder(rt: TensorRT) -> Any:
    trt = rt.module
    try:
        return trt.Builder(logger_for(rt))
    except (TypeError, RuntimeError) as cause:
        # The binding makes a TypeError of a null pointer: TensorRT proper finds no GPU.
        problem = f"{rt.title} cannot start its builder here."
        hint = "use a machine with an NVIDIA GPU, or the backend tensorrt-rtx, which needs none"
        raise BackendUnavailable(problem, got=cause, hint=hint) from cause


def _network_flags(rt: TensorRT) -> int:
    trt, flags = rt.module, 0
    if rt.can.strongly_typed_flag:
        flags |= 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    if rt.can.explicit_batch_flag:
        flags |= 1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH)
    return flags


def _types_in_file(path: Path) -> dict[str, str]:
    """The type of every tensor of an ONNX file, by its name."""
    graph = onnx.shape_inference.infer_shapes(_load(path)).graph
    return {
        value.name: dtype_of(onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type))
        for value in (*graph.input, *graph.value_info, *graph.output)
    }


def _configure_layers(rt: TensorRT, network: Any, config: Any, *, allow_decomposed: bool) -> None:
    """Allow what single layers need: plugins that write in place, attention without a fused kernel."""
    trt = rt.module
    for layer in map(network.get_layer, range(network.num_layers)):
        if rt.can.aliased_plugin_io and layer.type == trt.LayerType.PLUGIN_V3:
            config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
        if allow_decomposed and rt.can.attention and layer.type == trt.LayerType.ATTENTION_INPUT:
            # `get_layer` returns the base class; this is how TensorRT's Python API casts down.
            layer.__class__ = trt.IAttentionInputLayer
            input_layer = layer
            attention = input_layer.attention
            attention.decomposable = True


def _refuse_ignored_inputs(rt: TensorRT, messages: Sequence[Message], names: NodeNames) -> None:
    """Refuse an engine that ignores an input of a node: it would compute something else.

    It is the builder that reports this, not the parser. What no node reads, the graph ignores itself.
    """
    reported = (message.text for message in messages if message.text.startswith("Unused Input"))
    unused = [text for text in reported if text.partition(":")[2].strip() not in names.unread]
    if unused:
        problem = f"{rt.title} would ignore a part of the graph, and compute something else."
        hint = "lower the node to a form that this version reads, without that input"
        raise EngineError(problem, got="; ".join(dict.fromkeys(map(names.located, unused))), hint=hint)


def _kernels_by_source(
    rt: TensorRT, plan: bytes, messages: Sequence[Message], request: BuildRequest
) -> tuple[dict[EvidenceSource, tuple[Kernel, ...]], list[str]]:
    """The kernels as log, plan and inspector report them, and which source could not be read."""
    kernels = {
        EvidenceSource.LOG: tuple(reported.kernels_from_log(message.text for message in messages)),
        EvidenceSource.PLAN: tuple(reported.kernels_from_plan(plan)),
    }
    if rt.can.builds_without_gpu:  # there is no other source
        return kernels, [f"the {source} reports no kernels" for source, found in kernels.items() if not found]
    if rt.can.inspector:
        try:
            found = inspect_kernels(rt, plan, host_code=request.options.version_compatible)
        except EngineError as failure:
            # The engine is built: that it cannot be inspected only makes the verdict unknown.
            return kernels, [f"the engine could not be inspected: {failure.got}"]
        kernels[EvidenceSource.INSPECTOR] = tuple(found)
    return kernels, []


def inspect_kernels(rt: TensorRT, plan: bytes, *, host_code: bool = False) -> list[Kernel]:
    """Load an engine on the GPU it was built for, and read its kernels from TensorRT's inspector."""
    engine, _runtime = load_engine(rt, plan, host_code=host_code)  # which must outlive the engine
    return _inspected(rt, engine)


def inspect_runner(runner: TensorRTRunner) -> tuple[list[Kernel], int]:
    """The kernels of an engine that is loaded, and its number of profiles; runs where the engine is."""
    rt, engine = runner.rt, runner.loaded[0]
    return _inspected(rt, engine) if rt.can.inspector else [], int(engine.num_optimization_profiles)


def _inspected(rt: TensorRT, engine: Any) -> list[Kernel]:
    inspector = engine.create_engine_inspector()
    text = str(inspector.get_engine_information(rt.module.LayerInformationFormat.JSON))
    return reported.kernels_from_inspector(text)
