"""Repair rotary embeddings that the exporter fused with tables of one row for a batch of several.

ONNX asks for tables of `[B, S, R/2]` where there are no position ids; the exporter keeps the `[1, S, R/2]` of
the module, which only broadcasting made right, and ONNX Runtime refuses the file.
"""

from __future__ import annotations

import onnx_ir as ir

from mha_deploy.graph.attention_node import input_at
from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.fuse.facts import dims_of, is_op

_COS, _SIN, _POSITIONS = 1, 2, 3


def repair_rotary(node: ir.Node, builder: NodeBuilder) -> list[str]:
    """Copy the tables of a `RotaryEmbedding` over the batch, if there is but one.

    Returns:
        What was changed, in words.
    """
    x, cos, sin = (input_at(node, at) for at in (0, _COS, _SIN))
    if x is None or cos is None or sin is None or input_at(node, _POSITIONS) is not None:
        return []
    batch = dims_of(x)
    if batch is None or batch[0] == 1 or not all(_is_single(table) for table in (cos, sin)):
        return []
    rows = builder.size(x, 0)
    for at, table in ((_COS, cos), (_SIN, sin)):
        node.replace_input_with(at, builder.expand(table, rows, 1, 1, name="table"))
    if node.graph is not None:
        node.graph.insert_before(node, builder.live_nodes(each for each in node.inputs if each is not None))
    return ["the tables are copied over the batch"]


def is_rotary(node: ir.Node) -> bool:
    """Whether this is ONNX's own RotaryEmbedding."""
    return is_op(node, "RotaryEmbedding")


def _is_single(table: ir.Value) -> bool:
    dims = dims_of(table)
    return dims is not None and len(dims) == 3 and dims[0] == 1
