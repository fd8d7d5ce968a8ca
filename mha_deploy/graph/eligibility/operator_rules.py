"""What TensorRT makes of the operators around attention.

`RotaryEmbedding`, `TensorScatter` and `RMSNormalization` came with attention, and parsers know them from some
version on. They are no attention nodes, so they are judged from the graph itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from mha_deploy.graph.attention_node import is_attention
from mha_deploy.graph.eligibility.records import (
    BEFORE_10,
    BEFORE_ATTENTION,
    NOTE,
    REFUSED,
    RTX,
    SEEN_RTX,
    SEVERITIES,
    TENSORRT,
    Finding,
    Target,
    Versions,
)
from mha_deploy.graph.lower import norms, rotary, scatter
from mha_deploy.graph.lower.cache_form import rows_name
from mha_deploy.graph.lower.cache_pattern import CachedAttention, read_cache

_WITHOUT_OPERATORS = Versions(product=TENSORRT, since=(10, 14), before=(10, 15))
_WITH_OPERATORS = (Versions(product=TENSORRT, since=(10, 15)), RTX)

_CHANGELOG = "TensorRT OSS CHANGELOG, 10.15"
_OPERATORS_OF_86 = "onnx-tensorrt 8.6-GA, docs/operators.md"
_LATE = frozenset({rotary.OP_TYPE, scatter.OP_TYPE, norms.OP_TYPE})
_SCATTER = frozenset({scatter.OP_TYPE})


# Operators of opset 17 that the parser of 8.6 does not have, as its list of operators says.
_NOT_IN_86 = frozenset(
    {
        "Bernoulli",
        "BitShift",
        "BlackmanWindow",
        "Compress",
        "ConcatFromSequence",
        "ConvInteger",
        "DFT",
        "Det",
        "DynamicQuantizeLinear",
        "HammingWindow",
        "HannWindow",
        "Hardmax",
        "MatMulInteger",
        "MaxRoiPool",
        "MaxUnpool",
        "MelWeightMatrix",
        "Multinomial",
        "QLinearConv",
        "QLinearMatMul",
        "STFT",
        "SequenceAt",
        "SequenceConstruct",
        "SequenceInsert",
        "SplitToSequence",
        "Unique",
    }
)


@dataclass(frozen=True, kw_only=True)
class OperatorRule:
    """One thing a target does not take of an operator, or asks for.

    Args:
        id: Short name.
        severity: `refused` or `note`.
        operators: The operators it speaks of.
        holds: The versions it was seen in.
        applies: What it found in a node, in words; None where it does not speak of it.
        remedy: What to change.
        cured_by: The lowering after which it no longer applies.
        needs: Options of that lowering that have to be turned on for it.
        source: Where it was seen.
    """

    id: str
    severity: str
    operators: frozenset[str]
    holds: tuple[Versions, ...]
    applies: Callable[[ir.Node], str | None]
    remedy: str
    source: str
    cured_by: str | None = None
    needs: tuple[str, ...] = ()


def check_operators(model: ir.Model, target: Target) -> list[Finding]:
    """Everything the rules say about the operators around attention, the worst first for each node."""
    return [finding for node in model.graph.all_nodes() for finding in _findings(node, target)]


def operator_options(findings: Sequence[Finding]) -> dict[str, bool]:
    """The options of the lowering that have to be turned on to cure what it can cure."""
    return {name: True for finding in findings for name in finding.needs}


def _findings(node: ir.Node, target: Target) -> list[Finding]:
    found = []
    for rule in OPERATOR_RULES:
        covered = any(versions.covers(target) for versions in rule.holds)
        if node.domain != "" or node.op_type not in rule.operators or not covered:
            continue
        message = rule.applies(node)
        if message is not None:
            found.append(_finding(rule, node, message))
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _finding(rule: OperatorRule, node: ir.Node, message: str) -> Finding:
    return Finding(
        node=node.name or node.outputs[0].name or node.op_type,
        rule=rule.id,
        severity=rule.severity,
        message=message,
        remedy=rule.remedy,
        source=rule.source,
        cured_by=rule.cured_by,
        needs=rule.needs,
    )


def _missing(node: ir.Node) -> str:
    return f"The parser has no {node.op_type} before TensorRT 10.15."


def _not_in_86(node: ir.Node) -> str:
    return f"The parser of TensorRT 8.6 has no {node.op_type}."


def _sums_integers(node: ir.Node) -> str | None:
    x = node.inputs[0]
    if x is None or x.dtype is None or x.dtype.is_floating_point():
        return None
    return "CumSum becomes a loop, and its documentation lists no integers."


def _not_in_place(node: ir.Node) -> str | None:
    obstacle = scatter.obstacle_to_update_in_place(node)
    return None if obstacle is None else f"There is no {obstacle.feature} ({obstacle.got})."


def _in_place(node: ir.Node) -> str | None:
    if scatter.obstacle_to_update_in_place(node) is not None:
        return None
    cache = node.inputs[0]
    return f"The cache is updated in place: {cache.name if cache else ''} and {node.outputs[0].name} are one."


def _as_rows(node: ir.Node) -> str | None:
    """Whether the primitives lowering gives out the new rows of this cache alone."""
    readers = [use.node for use in node.outputs[0].uses() if is_attention(use.node)]
    if not any(isinstance(read_cache(reader), CachedAttention) for reader in readers):
        return None
    name = str(node.outputs[0].name)
    return f"The cache is read in place and not given out: {rows_name(name)} stands for {name}."


OPERATOR_RULES: tuple[OperatorRule, ...] = (
    OperatorRule(
        id="no-decode-operator-primitives",
        severity=REFUSED,
        operators=_LATE,
        holds=(BEFORE_ATTENTION,),
        applies=_missing,
        remedy="write it in primitive operators",
        cured_by="primitives lowering",
        source=_CHANGELOG,
    ),
    OperatorRule(
        id="no-decode-operator",
        severity=REFUSED,
        operators=_LATE,
        holds=(_WITHOUT_OPERATORS,),
        applies=_missing,
        remedy="write it in primitive operators",
        cured_by="trt lowering",
        needs=("decode_primitives",),
        source=_CHANGELOG,
    ),
    OperatorRule(
        id="no-operator",
        severity=REFUSED,
        operators=_NOT_IN_86,
        holds=(BEFORE_10,),
        applies=_not_in_86,
        remedy="compute it before or after the engine, or write the model without it",
        source=_OPERATORS_OF_86,
    ),
    OperatorRule(
        id="integer-cumsum",
        severity=NOTE,
        operators=frozenset({"CumSum"}),
        holds=(BEFORE_10,),
        applies=_sums_integers,
        remedy="give the model its attention mask: Transformers looks for packed sequences only without one",
        source=_OPERATORS_OF_86,
    ),
    OperatorRule(
        id="cache-update",
        severity=REFUSED,
        operators=_SCATTER,
        holds=_WITH_OPERATORS,
        applies=_not_in_place,
        remedy="give the cache as a graph input [B, H, T, D] of fixed T and return it, or write it out",
        cured_by="trt lowering",
        needs=("decode_primitives",),
        source=f"{SEEN_RTX}: messages of its parser and builder",
    ),
    OperatorRule(
        id="cache-in-place",
        severity=NOTE,
        operators=_SCATTER,
        holds=_WITH_OPERATORS,
        applies=_in_place,
        remedy="bind input and output to the same memory",
        source="TensorRT operator documentation, KVCacheUpdate",
    ),
    OperatorRule(
        id="cache-rows",
        severity=NOTE,
        operators=_SCATTER,
        holds=(BEFORE_ATTENTION,),
        applies=_as_rows,
        remedy="write the rows into the cache after each call, or lower with cache=copy",
        source="primitives lowering",
    ),
)
"""Everything that is known, in the order it is reported within one severity."""
