"""Attention as it is, checked against the ONNX specification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import CheckerPass

from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.lower.call import AttentionCall
from mha_deploy.graph.lower.errors import LoweringError

DIALECT = "onnx"


@dataclass(frozen=True, kw_only=True)
class OnnxOptions:
    """Nothing to choose."""

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {}


def keep(call: AttentionCall, b: NodeBuilder, options: OnnxOptions) -> dict[int, ir.Value] | None:
    """Leave the node; reading it has already refused what ONNX does not allow."""
    return None


def check_model(model: ir.Model) -> None:
    """Refuse a model that ONNX's own checker refuses."""
    try:
        CheckerPass()(model)
    except (onnx.checker.ValidationError, ir.passes.PassError) as error:
        raise LoweringError(
            "place for an invalid graph",
            node=model.graph.name or "main",
            dialect=DIALECT,
            got=str(error.__cause__ or error).strip().splitlines()[0],
            hint="export it again, or repair the node",
        ) from error
