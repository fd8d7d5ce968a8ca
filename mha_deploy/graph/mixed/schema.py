"""Which types an operator takes and gives, by ONNX's own description of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import onnx
import onnx_ir as ir

FLOAT = ir.DataType.FLOAT
_ONNX_NAMES = {
    ir.DataType.FLOAT16: "tensor(float16)",
    ir.DataType.BFLOAT16: "tensor(bfloat16)",
    FLOAT: "tensor(float)",
}


class Slots:
    """What type each float32 input and output of a node takes when the node is to compute in another type.

    Args:
        opsets: The operator sets of the model.
    """

    def __init__(self, opsets: Mapping[str, int]) -> None:
        self._opsets = opsets

    def input_type(self, node: ir.Node, position: int, wanted: ir.DataType) -> ir.DataType:
        """The wanted type, or float32 where the operator does not take it there."""
        return self._type_at(node, "inputs", position, wanted)

    def output_type(self, node: ir.Node, position: int, wanted: ir.DataType) -> ir.DataType:
        """The wanted type, or float32 where the operator does not give it there."""
        return self._type_at(node, "outputs", position, wanted)

    def _type_at(self, node: ir.Node, side: str, position: int, wanted: ir.DataType) -> ir.DataType:
        schema = _schema(node.op_type, node.domain, self._opsets.get(node.domain, 1))
        slots = () if schema is None else getattr(schema, side)
        if not slots:
            return FLOAT
        slot = slots[min(position, len(slots) - 1)]  # the last one may stand for any number of tensors
        return wanted if _ONNX_NAMES[wanted] in slot.types else FLOAT


@cache
def _schema(op_type: str, domain: str, version: int) -> Any:
    """ONNX's description of an operator; None for one that is not ONNX's."""
    try:
        return onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None
