"""Twins of a graph that compute the same in another way: what differs between them is at fault.

A fused kernel keeps scores and weights to itself. A twin that gives both out as graph outputs cannot be
fused, and a twin whose attention is in float32 cannot overflow or round in half precision.
"""

from __future__ import annotations

import onnx_ir as ir

from mha_deploy.errors import DeployError
from mha_deploy.graph.attention_node import is_attention
from mha_deploy.graph.lower import lower
from mha_deploy.graph.lower.rewrite import copy_of
from mha_deploy.graph.upcast import with_float32_products

_GIVEN_OUT = ("scores", "weights")
_SOFTMAX_PRECISION = "softmax_precision"


def unfused_twin(model: ir.Model) -> ir.Model:
    """A copy in primitive operators that also gives out the scores and weights of every attention.

    Its own outputs come first, as they were. Matmuls, scores and weights have the types of the model; the
    sums of the softmax are in float32, as in every fused kernel.

    Raises:
        LoweringError: An attention cannot be written in primitive operators.
        DeployError: An attention is not in the main graph, so that nothing of it can be given out.
    """
    copy = copy_of(model)
    before = {node.name for node in copy.graph.all_nodes()}
    attentions = [node for node in copy.graph.all_nodes() if is_attention(node)]
    for node in attentions:
        if _SOFTMAX_PRECISION not in node.attributes:
            node.attributes[_SOFTMAX_PRECISION] = ir.AttrInt64(_SOFTMAX_PRECISION, int(ir.DataType.FLOAT))
    twin = lower(copy, "primitives", cache="copy")  # the outputs stay as they are
    inner = [
        node.outputs[0]
        for node in twin.graph
        if node.name not in before and str(node.name).rpartition("/")[2] in _GIVEN_OUT
    ]
    if not attentions or len(inner) != len(_GIVEN_OUT) * len(attentions):
        raise DeployError(
            "The inside of an attention cannot be given out.", got=f"{len(attentions)} attentions"
        )
    twin.graph.outputs.extend(value for value in inner if not value.is_graph_output())
    return twin


def float32_twin(model: ir.Model) -> ir.Model:
    """The unfused twin with matmuls and softmax in float32: same weights, inputs and outputs.

    The weights are those of the model, rounded as they are, and the results of the projections are rounded
    to the model's type. Between queries, keys and values and the heads nothing is.
    """
    return unfused_twin(with_float32_products(model))
