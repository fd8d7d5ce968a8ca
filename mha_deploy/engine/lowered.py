"""Which attention an engine gets, native or the plugin's, and the graph that is lowered for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from mha_deploy.bundle.manifest import AttentionNode, Manifest
from mha_deploy.engine.engine import AttentionChoice, first_gpu
from mha_deploy.engine.plugins import refuse_plugins
from mha_deploy.errors import nearest
from mha_deploy.graph import rules
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.file import foreign_domains
from mha_deploy.graph.ir import infer_shapes
from mha_deploy.graph.lower import lower
from mha_deploy.graph.lower.call import LoweringError
from mha_deploy.graph.mixed_precision import KeptKind, is_coarse
from mha_deploy.graph.rules import Eligibility, RuleFinding, Target
from mha_deploy.model.spec import Axis
from mha_deploy.options import EngineOptions
from mha_deploy.runtime.tensorrt.builder import capabilities_of
from mha_deploy.runtime.tensorrt.versions import EngineError, NotFusedError, TensorRT

# -- Which kernels compute attention and projections: TensorRT's own, or the plugin's --------------

NATIVE, PLUGIN, AUTO = "native", "plugin", "auto"
FP32, FP16 = "fp32", "fp16"
ATTENTIONS = (NATIVE, PLUGIN, AUTO)
_SCRATCH_MIB = 32  # scratch memory of every projection of the library, plugins/src/linear.cpp


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One candidate for an engine."""

    attention: str  # native or plugin
    accumulate: str = FP16  # fp32 where the projections are plugin layers

    @property
    def name(self) -> str:
        """`native`, `plugin` or `plugin-fp32`."""
        return f"{self.attention}-{FP32}" if self.accumulate == FP32 else self.attention

    @classmethod
    def of(cls, choice: AttentionChoice) -> Candidate:
        """The candidate that an engine was built from, as its manifest records it."""
        return cls(attention=choice["chosen"], accumulate=choice["accumulate"])

    def applied_to(self, options: EngineOptions) -> EngineOptions:
        """The options that request this candidate alone."""
        return replace(options, attention=self.attention, accumulate=self.accumulate)


def candidates_for(rt: TensorRT, options: EngineOptions, precision: str) -> list[Candidate]:
    """The candidates that the options leave open; where there are several, they have to be timed."""
    for option, value, known in (
        ("attention", options.attention, ATTENTIONS),
        ("accumulate", options.accumulate, (FP32, FP16, AUTO)),
    ):
        if value not in known:
            what, hint = f"No such choice for --{option}.", nearest(value, known)
            raise EngineError(what, got=value, hint=hint, options=(option,))
    if options.attention == PLUGIN and options.allow_decomposed:
        problem, got = "Attention of the plugin is one fused layer.", "--allow-decomposed"
        raise EngineError(problem, got=got, hint="leave it out", options=("attention", "allow_decomposed"))
    if options.attention == NATIVE and options.accumulate == FP32:
        problem, got = "TensorRT chooses by itself how its own matmuls accumulate.", "--attention native"
        hint = "--attention plugin or auto: the plugin library has matmuls that accumulate in FP32"
        got, about = f"--accumulate fp32 with {got}", ("attention", "accumulate")
        raise EngineError(problem, got=got, hint=hint, options=about)
    if options.accumulate == FP32 and (options.workspace_mib or _SCRATCH_MIB) < _SCRATCH_MIB:
        problem = f"The plugin's projections need {_SCRATCH_MIB} MiB of scratch memory."
        got = f"--workspace-mib {options.workspace_mib} with --accumulate fp32"
        hint = f"--workspace-mib {_SCRATCH_MIB} or more, or --accumulate fp16"
        raise EngineError(problem, got=got, hint=hint, options=("accumulate", "workspace_mib"))
    if options.attention == NATIVE:
        return [Candidate(attention=NATIVE)]
    refuse_plugins(rt)
    got = f"a graph in {precision}"
    if precision == "fp32":
        hint = "--attention native, or export in fp16"
        what = "The attention plugin computes in FP16 and BF16."
        raise EngineError(what, got=got, hint=hint, options=("attention",))
    if precision == "bf16" and not rt.can.bf16_type:
        problem = f"{rt.title} has no BF16 for the attention plugin."
        raise EngineError(problem, got=got, hint="export in fp16", options=("attention",))
    accumulate = {FP32: [FP32], FP16: [FP16], AUTO: [FP32, FP16]}[options.accumulate]
    if options.accumulate == AUTO and precision != FP16:
        # BF16 matmuls accumulate in FP32 in every kernel.
        accumulate = [FP16]
    found = [Candidate(attention=PLUGIN, accumulate=each) for each in accumulate]
    if options.attention == AUTO and FP16 in accumulate:  # TensorRT's own matmuls do not guarantee FP32
        return [Candidate(attention=NATIVE), *found]
    return found


# -- A bundle's graph as a TensorRT takes it: the dialect and its options --------------------------


def lower_for(
    rt: TensorRT, model: ir.Model, options: EngineOptions, profiles: Sequence[Mapping[str, Axis]] = ()
) -> tuple[ir.Model, list[Eligibility]]:
    """The graph as a TensorRT takes it, and the eligibility of its attention nodes before the build.

    `profiles` are the axes of those of the engine, where they are known.
    """
    dialect = dialect_for(rt, options)
    if options.gqa is not None and dialect != "primitives":
        taker = "The attention plugin" if dialect == PLUGIN else rt.title
        got = f"--gqa {options.gqa}"
        what, hint = f"{taker} takes grouped heads as they are.", "leave it out"
        raise EngineError(what, got=got, hint=hint, options=("gqa",))
    if dialect == PLUGIN:
        # The library has its own kernel, whatever TensorRT's kernels can fuse.
        _refuse_without_attention(model, hint="--attention native")
        names = {axis for each in profiles for axis in each}
        longest = {name: max(each[name].max for each in profiles if name in each) for name in names}
        return lower(model, dialect, linear=options.accumulate == "fp32", longest=longest), []
    targets = [replace(each, profiles=profiles) for each in targets_of(rt, options)]
    # A graph without attention nodes is built as well; the verdict reports that none was recognized.
    answers = [answer for target in targets for answer in rules.judge(_attentions_of(model), target)]
    _refuse_hopeless(answers)
    if dialect == "primitives":
        exact = not any(target.is_among("tensorrt < 10") for target in targets)
        return lower(model, dialect, gqa=options.gqa or AUTO, shift_masks=exact), answers
    chosen: dict[str, Any] = {"decompose": True} if options.allow_decomposed else {}
    findings = [finding for target in targets for finding in rules.check_operators(model, target)]
    chosen |= rules.operator_options(findings)
    for answer in answers:
        chosen |= {name: value for name, value in answer.options.items() if name != "decompose"}
    return lower(model, dialect, **chosen), answers


@contextmanager
def not_fused(options: EngineOptions) -> Iterator[None]:
    """Attention that TensorRT's own operator cannot express is a verdict: the graph is valid."""
    try:
        yield
    except LoweringError as error:
        if options.attention != NATIVE:
            raise
        raise NotFusedError(error.what, got=error.got, hint=error.hint) from error


def _refuse_hopeless(answers: Sequence[Eligibility]) -> None:
    """Report before a long build that it would fail."""
    for answer in answers:
        hopeless = [
            finding
            for finding in answer.findings
            if finding.cured_by is None and finding.severity in (rules.REFUSED, rules.WRONG_ANSWER)
        ]
        if hopeless:
            problem = f"{answer.target} cannot take the node {answer.node.name}."
            got = "; ".join(finding.message for finding in hopeless)
            raise NotFusedError(problem, got=got, hint="; ".join(finding.remedy for finding in hopeless))


@contextmanager
def unfused_for(answers: Sequence[Eligibility]) -> Iterator[None]:
    """A build without a fused kernel is reported with what the rules know of its nodes, where they do."""
    try:
        yield
    except NotFusedError as error:
        found = [
            (answer.node.name, finding)
            for answer in answers
            for finding in answer.findings
            if finding.cured_by is None and finding.severity == rules.NOT_FUSED
        ]
        applying = {finding.rule for answer in answers for finding in answer.findings}
        if not found and "type-or-head-size-unknown" in applying:
            raise
        if not found:  # so types and head sizes are not why
            hint = "another --profile; or --allow-decomposed, and lose speed"
            raise NotFusedError(error.what, got=error.got, hint=hint) from error
        reasons = dict.fromkeys(f"{name}: {finding.message}" for name, finding in found)
        remedies = dict.fromkeys(finding.remedy for _, finding in found if finding.remedy)
        got, hint = " ".join(reasons), "; ".join(remedies) or error.hint
        raise NotFusedError(error.what, got=got, hint=hint) from error


_OF_RANGE = (KeptKind.OVERFLOW, KeptKind.FLUSHED)  # not so in a type with the range of FP32


def explained(
    answers: Sequence[Eligibility], manifest: Manifest, options: EngineOptions
) -> list[Eligibility]:
    """The answers with what a bundle knows: why an attention is FP32, and what is left to try."""
    plan = manifest.checks.get("mixed precision", {})
    kept, scores = {each["name"]: each for each in plan.get("kept", ())}, plan.get("scores", {})
    own = manifest.precision.name

    def known(found: RuleFinding) -> RuleFinding:
        message, remedy, reason = found.message, rules.RULES[found.rule].remedy, kept.get(found.node)
        if found.rule == "fp32" and reason is not None:
            message += f" --precision auto keeps it so: {reason['reason']}."
            # BF16 has the range of FP32, but fewer digits than FP16.
            is_held = reason["kind"] in _OF_RANGE and found.node in scores
            is_held = is_held and not is_coarse(scores[found.node], "bf16")
            remedy = "export with --precision bf16, which has the range of FP32" if is_held else ""
        elif found.rule == "fp32" and own != "fp32":
            remedy = f"let the model compute it in {own}"
        elif not rules.RULES[found.rule].can_decompose:
            return found
        remedy = rules.remedies_of(found.rule, remedy, is_decomposed=options.allow_decomposed)
        return replace(found, message=message, remedy=remedy)

    return [replace(each, findings=tuple(map(known, each.findings))) for each in answers]


def targets_of(rt: TensorRT, options: EngineOptions) -> list[Target]:
    """The targets of the engine for the check before the build, one for each GPU."""
    release = ".".join(rt.version.split(".")[:3])
    named = capabilities_of(options.targets)
    if named:
        return [rules.target_from(rt.backend, release, capability) for capability in named]
    gpu = None if rt.can.builds_without_gpu else first_gpu()
    return [rules.target_from(rt.backend, release, gpu["compute_cap"] if gpu else None)]


def check_eligibility(model: ir.Model, target: Target) -> list[Eligibility]:
    """Can the target take and fuse every attention of a graph?"""
    refuse_foreign_operators(model)
    _refuse_without_attention(model, hint="export it with mha-deploy")
    # What no lowering cures stops the build of the whole graph, once for each rule.
    around = {
        each.rule: each
        for each in rules.check_operators(model, target)
        if each.cured_by is None and each.severity == rules.REFUSED
    }
    return rules.judge(_attentions_of(model), target, list(around.values()))


def _attentions_of(model: ir.Model) -> list[AttentionNode]:
    """The attention nodes of a graph; sizes of heads that it states by name are inferred, as on lowering."""
    nodes = attention_nodes(model)
    if any(node.has_dynamic_heads for node in nodes):
        nodes = attention_nodes(infer_shapes(model.clone()))
    return nodes


def refuse_foreign_operators(model: ir.Model) -> None:
    """Refuse a graph with operators that no builder should look for: a library of that name would run."""
    if foreign := foreign_domains(model):
        what, got = "The graph has operators that are not part of ONNX.", f"domain {', '.join(foreign)}"
        raise EngineError(what, got=got, hint="export the model with ONNX operators only")


def native_dialect(rt: TensorRT) -> str:
    """How attention is written for this version's parser."""
    return "trt" if rt.can.attention else "primitives"


def dialect_for(rt: TensorRT, options: EngineOptions) -> str:
    """How attention is written as these options ask for it."""
    return PLUGIN if options.attention == PLUGIN else native_dialect(rt)


def _refuse_without_attention(model: ir.Model, *, hint: str) -> None:
    if not attention_nodes(model):
        raise EngineError("The graph has no attention node.", hint=hint)
