"""Attention as it is, checked against the ONNX specification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import CheckerPass

from mha_deploy.graph.attention_node import AttentionNode, attention_nodes
from mha_deploy.graph.lower.call import LoweringError, copy_of

DIALECT = "onnx"


@dataclass(frozen=True, kw_only=True)
class OnnxOptions:
    """Nothing to choose."""

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {}


def checked_copy(model: ir.Model) -> ir.Model:
    """A copy with its shapes inferred; refused where ONNX does not allow it.

    Unlike the other dialects this one needs no shapes: what the graph does not state is left to the runtime.
    """
    copy = copy_of(model)
    for node in attention_nodes(copy):
        _check_node(node)
    try:
        CheckerPass()(copy)
    except (onnx.checker.ValidationError, ir.passes.PassError) as error:
        raise LoweringError(
            "place for an invalid graph",
            node=model.graph.name or "main",
            dialect=DIALECT,
            got=str(error.__cause__ or error).strip().splitlines()[0],
            hint="export it again, or repair the node",
        ) from error
    return copy


def _check_node(node: AttentionNode) -> None:
    """Refuse what the specification forbids and the checker does not see."""
    problem = None
    if isinstance(node.Hq, int) and isinstance(node.Hkv, int) and node.Hq % node.Hkv:
        problem = "uneven head groups"
    elif node.has_past and node.has_nonpad_kv_seqlen:
        problem = "nonpad_kv_seqlen together with past_key"
    if problem is not None:
        raise LoweringError(problem, node=node.name, dialect=DIALECT, hint="export it again")
