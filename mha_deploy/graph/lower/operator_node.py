"""Operators beside attention that a dialect has to write in another way: rotary embedding, cache update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.lower.errors import LoweringError


@dataclass(frozen=True, kw_only=True)
class OperatorCall:
    """One node of ONNX's own operator set that is to be lowered.

    Args:
        node: The node.
        dialect: The dialect it is lowered to, for messages.
    """

    node: ir.Node
    dialect: str

    @property
    def name(self) -> str:
        """Name of the node; its output's where it has none."""
        return self.node.name or self.node.outputs[0].name or self.node.op_type

    def refuse(self, feature: str, *, got: object = None, hint: str | None = None) -> LoweringError:
        """The error that says which feature of this node the dialect cannot express."""
        return LoweringError(feature, node=self.name, dialect=self.dialect, got=got, hint=hint)


OperatorRule = Callable[[OperatorCall, NodeBuilder], ir.Value | None]
"""Builds the replacement of one node: its output, or None to leave the node."""

OperatorRules = Mapping[str, OperatorRule]
"""The rules by operator."""


def sizes_of(value: ir.Value | None) -> tuple[int | None, ...] | None:
    """The sizes of a value, None for one that is not fixed; None where even the rank is not known."""
    if value is None or value.shape is None:
        return None
    return tuple(size if isinstance(size, int) else None for size in value.shape)
