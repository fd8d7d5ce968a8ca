"""Which attention an engine gets, native or the plugin's, and the graph written for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import onnx_ir as ir

from mha_deploy.engine.manifest import EngineManifest, first_gpu
from mha_deploy.engine.options import EngineOptions
from mha_deploy.engine.plugins import PluginLibrary, refuse_plugins
from mha_deploy.errors import nearest
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.lower import lower
from mha_deploy.graph.lower.cache import cache_form
from mha_deploy.graph.plugin_node import DOMAIN, LINEAR, OP_TYPE
from mha_deploy.graph.rules import (
    REFUSED,
    WRONG_ANSWER,
    Eligibility,
    Finding,
    Target,
    check_operators,
    judge,
    operator_options,
    target_from,
)
from mha_deploy.runtime.tensorrt.kernels import (
    ATTENTION,
    FLOATING,
    PRODUCT,
    UNKNOWN,
    EngineTensor,
    Kernel,
    dtype_of,
)
from mha_deploy.runtime.tensorrt.request import BuiltEngine, capabilities_of
from mha_deploy.runtime.tensorrt.versions import EngineError, TensorRT

# -- Who computes the attentions and the projections of an engine: TensorRT itself, or the plug ----

NATIVE, PLUGIN, AUTO = "native", "plugin", "auto"
FP32, FP16 = "fp32", "fp16"
ATTENTIONS = (NATIVE, PLUGIN, AUTO)
SUMS = (FP32, FP16, AUTO)
_SCRATCH_MIB = 32  # what every projection of the library asks for, plugins/src/linear_matmul.h


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One candidate to write an engine.

    Args:
        attention: `native` or `plugin`.
        accumulate: `fp32` where the projections are plugin layers, else `fp16`.
    """

    attention: str
    accumulate: str = FP16

    @property
    def name(self) -> str:
        """What to call it: `native`, `plugin`, `plugin-fp32`."""
        return f"{self.attention}-{FP32}" if self.accumulate == FP32 else self.attention

    def applied_to(self, options: EngineOptions) -> EngineOptions:
        """The options that ask for this candidate alone."""
        return replace(options, attention=self.attention, accumulate=self.accumulate)


def open_candidates(rt: TensorRT, options: EngineOptions, precision: str) -> list[Candidate]:
    """The candidates that the options leave open; where there are several, they have to be timed.

    Args:
        rt: The TensorRT that builds.
        options: What is asked for.
        precision: The precision of the graph.

    Raises:
        EngineError: The options contradict each other, or the plugin does not take this precision.
        PluginError: This TensorRT takes no plugins.
    """
    _refuse_unknown(options)
    if options.attention == NATIVE:
        return [Candidate(attention=NATIVE)]
    refuse_plugins(rt)
    _refuse_precision(rt, precision)
    sums = {FP32: [FP32], FP16: [FP16], AUTO: [FP32, FP16]}[options.accumulate]
    if options.accumulate == AUTO and precision != FP16:
        # Matmuls of BF16 sum up in FP32 whoever computes them.
        sums = [FP16]
    found = [Candidate(attention=PLUGIN, accumulate=each) for each in sums]
    # TensorRT's own matmuls promise no FP32 sums: who wants them has only one candidate.
    return [Candidate(attention=NATIVE), *found] if options.attention == AUTO and FP16 in sums else found


def _refuse_unknown(options: EngineOptions) -> None:
    for option, value, known in (
        ("attention", options.attention, ATTENTIONS),
        ("accumulate", options.accumulate, SUMS),
    ):
        if value not in known:
            raise EngineError(f"No such choice for --{option}.", got=value, hint=nearest(value, known))
    if options.attention == PLUGIN and options.allow_decomposed:
        raise EngineError(
            "An attention of the plugin is one fused layer.", got="--allow-decomposed", hint="leave it out"
        )
    if options.attention == NATIVE and options.accumulate == FP32:
        raise EngineError(
            "TensorRT chooses by itself how its own matmuls sum up.",
            got="--accumulate fp32 with --attention native",
            hint="--attention plugin or auto: the plugin library has matmuls that sum up in FP32",
        )
    if (
        options.accumulate == FP32
        and options.workspace_mib is not None
        and options.workspace_mib < _SCRATCH_MIB
    ):
        raise EngineError(
            f"The plugin's projections need {_SCRATCH_MIB} MiB of scratch memory.",
            got=f"--workspace-mib {options.workspace_mib} with --accumulate fp32",
            hint=f"--workspace-mib {_SCRATCH_MIB} or more, or --accumulate fp16",
        )


def _refuse_precision(rt: TensorRT, precision: str) -> None:
    if precision == "fp32":
        raise EngineError(
            "The attention plugin computes in FP16 and BF16.",
            got="a graph in fp32",
            hint="--attention native, or export in fp16",
        )
    if precision == "bf16" and not rt.can.bf16_type:
        raise EngineError(
            f"{rt.title} has no BF16 for the attention plugin.", got="a graph in bf16", hint="export in fp16"
        )


# -- A bundle's graph as a TensorRT takes it: which dialect, with what options, and what stands ----


def lowered_for(rt: TensorRT, model: ir.Model, options: EngineOptions) -> tuple[ir.Model, list[Eligibility]]:
    """The graph as a TensorRT takes it, and what is known of its attention there before the build.

    Raises:
        EngineError: It cannot take the graph.
    """
    dialect = dialect_for(rt, options)
    _refuse_ignored(rt, dialect, options)
    if dialect == PLUGIN:
        # What TensorRT's own kernels can fuse does not matter: the library brings its kernel along.
        _refuse_without_attention(model, hint="--attention native")
        return lower(model, dialect, linear=options.accumulate == "fp32"), []
    targets = targets_of(rt, options)
    # A graph without attention nodes is built as well; the verdict says that none was recognised.
    answers = [answer for target in targets for answer in judge(attention_nodes(model), target)]
    _refuse_hopeless(answers)
    operators = [finding for target in targets for finding in check_operators(model, target)]
    return lower(model, dialect, **_lowering_options(dialect, answers, operators, options)), answers


def targets_of(rt: TensorRT, options: EngineOptions) -> list[Target]:
    """What the engine is built for, as the check before the build wants it: one for each GPU."""
    release = ".".join(rt.version.split(".")[:3])
    named = capabilities_of(options.targets)
    if named:
        return [target_from(rt.backend, release, capability) for capability in named]
    gpu = None if rt.can.builds_without_gpu else first_gpu()
    return [target_from(rt.backend, release, gpu["compute_cap"] if gpu else None)]


def check_graph(model: ir.Model, target: Target) -> list[Eligibility]:
    """Can the target take and fuse every attention of a graph?"""
    _refuse_without_attention(model, hint="export it with mha-deploy")
    return judge(attention_nodes(model), target)


def dialect_of(rt: TensorRT) -> str:
    """How attention is written for this version's parser."""
    return "trt" if rt.can.attention else "primitives"


def dialect_for(rt: TensorRT, options: EngineOptions) -> str:
    """How attention is written as these options ask for it."""
    return PLUGIN if options.attention == PLUGIN else dialect_of(rt)


def _refuse_without_attention(model: ir.Model, *, hint: str) -> None:
    if not attention_nodes(model):
        raise EngineError("The graph has no attention node.", hint=hint)


def _refuse_ignored(rt: TensorRT, dialect: str, options: EngineOptions) -> None:
    if options.gqa is not None and dialect != "primitives":
        who = "The attention plugin" if dialect == PLUGIN else rt.title
        raise EngineError(
            f"{who} takes grouped heads as they are.", got=f"--gqa {options.gqa}", hint="leave it out"
        )


def _refuse_hopeless(answers: list[Eligibility]) -> None:
    """Say before a long build what its end would be."""
    for answer in answers:
        hopeless = [
            finding
            for finding in answer.findings
            if finding.cured_by is None and finding.severity in (REFUSED, WRONG_ANSWER)
        ]
        if hopeless:
            raise EngineError(
                f"{answer.target} cannot take the node {answer.node.name}.",
                got="; ".join(finding.message for finding in hopeless),
                hint="; ".join(finding.remedy for finding in hopeless),
            )


def _lowering_options(
    dialect: str, answers: list[Eligibility], operators: list[Finding], options: EngineOptions
) -> dict[str, Any]:
    if dialect == "primitives":
        return {} if options.gqa is None else {"gqa": options.gqa}
    chosen: dict[str, Any] = {"decompose": True} if options.allow_decomposed else {}
    chosen |= operator_options(operators)
    for answer in answers:
        chosen |= {name: value for name, value in answer.options.items() if name != "decompose"}
    return chosen


# -- What an engine carries of the plugin library: which of its layers, which library, which me ----

_CARRIES = {OP_TYPE: ATTENTION, LINEAR: PRODUCT}


@dataclass(frozen=True, kw_only=True)
class _Carried:
    """A node of the library in the graph.

    Args:
        what: `attention` or `matmul`.
        types: The type of each value that it reads and writes.
        usual: The one type of all its numbers that are no lengths.
    """

    what: str
    types: Mapping[str, str]
    usual: str


def with_carried(built: BuiltEngine, lowered: ir.Model) -> BuiltEngine:
    """An engine whose plugin layers say what they compute; TensorRT itself knows no more than their names.

    Args:
        built: The engine.
        lowered: The graph that it was built from.
    """
    carried = {
        node.name or "": _carried(node)
        for node in lowered.graph.all_nodes()
        if node.domain == DOMAIN and node.op_type in _CARRIES
    }
    if not carried:
        return built
    kernels = {
        source: tuple(_marked(kernel, carried) for kernel in told) for source, told in built.kernels.items()
    }
    return replace(built, kernels=kernels)


def _carried(node: ir.Node) -> _Carried:
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    types = {value.name or "": dtype_of(value.dtype.name) for value in values if value.dtype is not None}
    usual = next((dtype for dtype in types.values() if dtype in FLOATING), UNKNOWN)
    return _Carried(what=_CARRIES[node.op_type], types=types, usual=usual)


def _marked(kernel: Kernel, carried: Mapping[str, _Carried]) -> Kernel:
    if not kernel.is_plugin:
        return kernel
    found = next((carried[name] for name in kernel.onnx_nodes if name in carried), None)
    if found is None:
        return kernel
    return replace(
        kernel,
        carries=found.what,
        inputs=_told(kernel.inputs, found),
        outputs=_told(kernel.outputs, found),
    )


def _told(tensors: Sequence[EngineTensor], found: _Carried) -> tuple[EngineTensor, ...]:
    """With their types: for dynamic sizes 8.6 does not tell them, and the library takes no others."""
    return tuple(
        replace(tensor, dtype=found.types.get(tensor.name, found.usual))
        if tensor.dtype == UNKNOWN
        else tensor
        for tensor in tensors
    )


def with_library(
    manifest: EngineManifest, library: PluginLibrary, lowered: ir.Model, *, asked: str, accumulate: str
) -> EngineManifest:
    """A manifest that says which library the engine needs, and which caches it writes in place.

    Args:
        manifest: What it says already.
        library: The library.
        lowered: The graph that the engine was built from.
        asked: What `--attention` was asked for.
        accumulate: How the projections sum up.
    """
    in_place = cache_form(lowered).in_place
    told = [f"caches in place: bind {out} to the memory of {source}" for out, source in in_place.items()]
    return msgspec.structs.replace(
        manifest,
        attention={"asked": asked, "chosen": "plugin", "accumulate": accumulate},
        plugins=[library.record()],
        in_place=in_place,
        notes=[*manifest.notes, *told],
    )
