"""RMSNormalization in primitive operators, for parsers that came before it."""

from __future__ import annotations

import onnx_ir as ir

from mha_deploy.graph.attention_node import input_at
from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.lower.operator_node import OperatorCall

OP_TYPE = "RMSNormalization"


def rms_norm_to_primitives(call: OperatorCall, b: NodeBuilder) -> ir.Value:
    """Divide x by √(mean x² + ε), in float32 unless the node says otherwise, and multiply by the scale.

    As the specification writes it: the quotient is rounded to the type of x before it is scaled.
    """
    x, scale = input_at(call.node, 0), input_at(call.node, 1)
    if x is None or scale is None or x.dtype is None or scale.dtype is None:
        raise call.refuse("normalisation of unknown type", hint="state the types of x and scale in the graph")
    attributes = call.node.attributes
    wide = ir.DataType(attributes.get_int("stash_type", int(ir.DataType.FLOAT)))
    data = b.cast(x, wide)
    mean = b.op(
        "ReduceMean", b.op("Mul", data, data), b.ints(*_axes(call, x)), keepdims=1, name="mean_square"
    )
    epsilon = b.constant(attributes.get_float("epsilon", 1e-5), wide)
    normal = b.op("Div", data, b.op("Sqrt", b.op("Add", mean, epsilon)), name="normalised")
    normal.dtype = wide
    rounded = b.cast(normal, x.dtype)
    rounded.dtype = x.dtype
    return b.op("Mul", b.cast(rounded, scale.dtype), scale, name="rms_norm")


def _axes(call: OperatorCall, x: ir.Value) -> range:
    """From `axis` to the last one, counted from the end: so the rank is needed only where axis is not."""
    axis = call.node.attributes.get_int("axis", -1)
    if axis >= 0:
        if x.shape is None:
            raise call.refuse(
                "normalisation of unknown rank", got=f"axis {axis}", hint="state the shape of x"
            )
        axis -= len(x.shape)
    return range(axis, 0)
