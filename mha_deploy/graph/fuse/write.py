"""Write a recognised attention as one node, and remove what only the old nodes needed."""

from __future__ import annotations

import onnx_ir as ir

from mha_deploy.graph.fuse.masks import Masks, Written, turned
from mha_deploy.graph.fuse.pattern import Pattern
from mha_deploy.graph.fuse.scores import Operand
from mha_deploy.graph.fuse.values import dtype_of
from mha_deploy.graph.ir import NodeBuilder, replace_node

_HEAD_AXIS = 1


def write_attention(pattern: Pattern, builder: NodeBuilder, masks: Masks) -> ir.Value:
    """Replace the nodes of an attention by one `Attention` node of the builder's prefix.

    Args:
        pattern: The attention.
        builder: Holds the new nodes.
        masks: The masks that were written for earlier ones.

    Returns:
        What stands for the result now.
    """
    letters = pattern.letters
    q = laid_out(pattern.q, letters.order(letters.query, letters.size), builder)
    k = laid_out(pattern.k, letters.order(letters.key, letters.size), builder)
    v = laid_out(pattern.v, letters.order(letters.key, letters.value_size), builder)
    mask, zero = _mask(pattern, builder, masks, q, k)
    if letters.head is None:
        q, k, v = (builder.unsqueeze(each, _HEAD_AXIS) for each in (q, k, v))
    if zero is not None:
        q = builder.op("Where", zero, builder.constant(0.0, dtype_of(pattern.q.value)), q, name="open_q")
    (result,) = builder.node(
        "Attention",
        [q, k, v] if mask is None else [q, k, v, mask],
        name=builder.prefix,
        attributes={
            "scale": pattern.scale,
            "is_causal": int(pattern.masking.causal),
            "softcap": pattern.softcap or None,
            "softmax_precision": None if pattern.softmax_dtype is None else int(pattern.softmax_dtype),
        },
    )
    attention = result.producer()
    if attention is not None:
        attention.metadata_props.update(pattern.softmax.metadata_props)
    if letters.head is None:
        result = builder.op("Squeeze", result, builder.ints(_HEAD_AXIS))
    result = turned(result, letters.order(letters.query, letters.value_size), pattern.out, builder)
    operands = [value for value in pattern.last.inputs if value is not None]
    name = pattern.last.outputs[0].name
    replace_node(pattern.last, builder, {0: result})
    remove_unused(operands)
    return next(value for node in builder.nodes for value in node.outputs if value.name == name)


def laid_out(operand: Operand, order: str, builder: NodeBuilder) -> ir.Value:
    """An operand with its axes in the order that Attention wants."""
    return turned(operand.value, operand.letters, order, builder)


def _mask(pattern: Pattern, builder: NodeBuilder, masks: Masks, q: ir.Value, k: ir.Value) -> Written:
    """The mask as `[B or 1, Hq or 1, S, T]`, spelled out over queries and keys as ONNX Runtime needs it."""
    letters = pattern.letters
    sizes = (pattern.q.dim(letters.query), pattern.k.dim(letters.key))
    layout = (pattern.scores, letters.order(letters.query, letters.key))
    return masks.write(
        pattern.masking,
        builder,
        dtype=dtype_of(q),
        layout=layout,
        sizes=sizes,
        rows=(q, k),
        graph=pattern.last.graph,
    )


def remove_unused(values: list[ir.Value]) -> None:
    """Remove the nodes and constants that led only to these values."""
    pending = list(values)
    while pending:
        value = pending.pop()
        if value.uses() or value.is_graph_output() or value.is_graph_input():
            continue
        node = value.producer()
        if node is None:
            if value.graph is not None and value.name is not None and value.is_initializer():
                del value.graph.initializers[value.name]
        elif node.graph is not None and not any(out.uses() or out.is_graph_output() for out in node.outputs):
            pending.extend(each for each in node.inputs if each is not None)
            node.graph.remove(node, safe=True)
