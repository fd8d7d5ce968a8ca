"""TensorRT's own attention operator, for what ONNX's cannot tell its parser (TensorRT 11, TensorRT-RTX).

The operator knows the lower right corner and the number of valid keys of each batch row, so no mask of
queries by keys has to be made. It does not scale: the queries are scaled before it.
"""

from __future__ import annotations

import onnx_ir as ir

from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.lower.call import AttentionCall, Heads
from mha_deploy.graph.lower.masks import zero_closed_rows

OP_TYPE, DOMAIN = "TRT_Attention", "trt"

# Position of the key lengths, as TensorRT-RTX 1.7.1 reads them: behind the mask and the query lengths.
_KEY_LENGTHS = 5


def fits_native(call: AttentionCall) -> bool:
    """Whether the operator is known to mean the same as the node."""
    facts = call.facts
    if call.mask is not None or facts.has_window or facts.has_qk_output or facts.softmax_precision:
        return False
    if call.Dv != call.D:
        return False
    if call.lengths is not None:
        # Which corner goes with key lengths is not documented; a single query is the last one anyway.
        return not facts.is_causal or facts.S == 1
    return facts.has_past and facts.is_causal and call.is_square and facts.S != 1


def native_attention(b: NodeBuilder, call: AttentionCall, heads: Heads, empty_rows: str) -> ir.Value:
    """Write one attention with it; the 4-D result.

    Args:
        b: Builder of the new nodes.
        call: An attention that fits.
        heads: Its queries, keys and values, past included.
        empty_rows: `zero` or `ignore`, for batch rows without a key.
    """
    q = b.op("Mul", heads.q, b.constant(call.scale, call.dtype), name="q_scaled")
    inputs: list[ir.Value | None] = [q, heads.k, heads.v]
    kind = "lower_right"
    if call.lengths is not None:
        kind = "none"
        lengths = b.op("Cast", call.lengths, to=int(ir.DataType.INT32), name="key_lengths")
        inputs += [None] * (_KEY_LENGTHS - len(inputs)) + [lengths]
    y = b.node(OP_TYPE, inputs, domain=DOMAIN, name=b.prefix, attributes={"causal_kind": kind})[0]
    return zero_closed_rows(b, call, _open_rows(b, call, empty_rows), y)


def _open_rows(b: NodeBuilder, call: AttentionCall, empty_rows: str) -> ir.Value | None:
    if call.lengths is None or empty_rows == "ignore":
        return None
    rows = b.op("Greater", call.lengths, b.ints(0))
    return b.reshape(rows, -1, 1, 1, 1, name="row_is_open")
