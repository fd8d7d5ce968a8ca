"""A bundle's graph as a TensorRT takes it: which dialect, with what options, and what stands against it."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from mha_deploy.backends.tensorrt import EngineError, TensorRT, capabilities_of
from mha_deploy.engine.attention import PLUGIN
from mha_deploy.engine.machine import first_gpu
from mha_deploy.engine.options import EngineOptions
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.eligibility import (
    Eligibility,
    Target,
    check_operators,
    judge,
    operator_options,
    target_from,
)
from mha_deploy.graph.eligibility.records import REFUSED, WRONG_ANSWER, Finding
from mha_deploy.graph.lower import lower


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
