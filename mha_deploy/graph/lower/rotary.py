"""RotaryEmbedding in primitive operators, and as ONNX Runtime's own.

Each pair (a, b) of a head turns by the angle of its position: (a·cos − b·sin, a·sin + b·cos). A pair is
either two neighbours (`interleaved`) or one number from each half.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from mha_deploy.graph.attention_node import input_at
from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.lower.masks import count_up
from mha_deploy.graph.lower.operator_node import OperatorCall, sizes_of

OP_TYPE = "RotaryEmbedding"


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """What a RotaryEmbedding node says.

    Args:
        x: `[B, H, S, D]` or `[B, S, H·D]`.
        cos: Cosines: `[positions, R/2]`, or `[B, S, R/2]` without position ids.
        sin: Sines, of the same shape.
        positions: `[B, S]`, the row of each token in the two tables; None where they are spread out already.
        rank: 3 or 4, that of x.
        heads: H.
        size: D.
        turned: R, how many numbers of a head are turned; the rest stays.
        interleaved: Whether a pair is two neighbours.
    """

    x: ir.Value
    cos: ir.Value
    sin: ir.Value
    positions: ir.Value | None
    rank: int
    heads: int
    size: int
    turned: int
    interleaved: bool


def rotary_to_primitives(call: OperatorCall, b: NodeBuilder) -> ir.Value:
    """Write a RotaryEmbedding with products and sums."""
    rotary = _read(call)
    x = rotary.x if rotary.rank == 4 else b.reshape(rotary.x, 0, 0, rotary.heads, rotary.size)
    cos, sin = (_table(b, rotary, table) for table in (rotary.cos, rotary.sin))
    one, other, rest = _pairs(b, rotary, x)
    turned = (
        b.op("Sub", b.op("Mul", one, cos), b.op("Mul", other, sin)),
        b.op("Add", b.op("Mul", one, sin), b.op("Mul", other, cos)),
    )
    parts = [_interleave(b, rotary, *turned)] if rotary.interleaved else [*turned]
    parts += [] if rest is None else [rest]
    y = parts[0] if len(parts) == 1 else b.op("Concat", *parts, axis=3, name="turned")
    return y if rotary.rank == 4 else b.reshape(y, 0, 0, rotary.heads * rotary.size, name="merged")


def rotary_to_contrib(call: OperatorCall, b: NodeBuilder) -> ir.Value:
    """Write a RotaryEmbedding as the com.microsoft operator, which always looks positions up in a table."""
    rotary = _read(call)
    cos, sin, positions = rotary.cos, rotary.sin, rotary.positions
    if positions is None:
        cos, sin = (b.reshape(table, -1, rotary.turned // 2) for table in (cos, sin))
        positions = _rows_in_order(b, rotary)
    attributes = {
        "interleaved": int(rotary.interleaved),
        "num_heads": rotary.heads,
        "rotary_embedding_dim": rotary.turned if rotary.turned < rotary.size else None,
    }
    inputs = [rotary.x, positions, cos, sin]
    return b.node(OP_TYPE, inputs, domain="com.microsoft", name=b.prefix, attributes=attributes)[0]


def _read(call: OperatorCall) -> Rotary:
    x, cos, sin = (input_at(call.node, at) for at in range(3))
    dims = sizes_of(x)
    if x is None or cos is None or sin is None or dims is None or len(dims) not in (3, 4):
        raise call.refuse("rotary embedding of unknown rank", got=dims, hint="state the shape of the input")
    heads = dims[1] if len(dims) == 4 else call.node.attributes.get_int("num_heads", 0)
    width = dims[-1]
    if not heads or width is None:
        hint = "state the heads and the head size; num_heads for a 3-D input"
        raise call.refuse("rotary embedding without a fixed head size", got=dims, hint=hint)
    size = width if len(dims) == 4 else width // heads
    turned = call.node.attributes.get_int("rotary_embedding_dim", 0) or size
    if turned % 2 or turned > size or (len(dims) == 3 and width % heads):
        raise call.refuse("rotary embedding of this size", got=f"{turned} of {dims}, {heads} heads")
    return Rotary(
        x=x,
        cos=cos,
        sin=sin,
        positions=input_at(call.node, 3),
        rank=len(dims),
        heads=heads,
        size=size,
        turned=turned,
        interleaved=call.node.attributes.get_int("interleaved", 0) == 1,
    )


def _table(b: NodeBuilder, rotary: Rotary, table: ir.Value) -> ir.Value:
    """The cosines or sines of each token, with an axis of one where x has its heads."""
    if rotary.positions is not None:
        table = b.op("Gather", table, rotary.positions, axis=0, name="angles")
    return b.unsqueeze(table, 1 if rotary.rank == 4 else 2)


def _pairs(b: NodeBuilder, rotary: Rotary, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value | None]:
    """First and second number of each pair, and what is not turned."""
    half, rest = rotary.turned // 2, rotary.size - rotary.turned
    if not rotary.interleaved:
        sizes = (half, half, rest) if rest else (half, half)
        parts = b.node("Split", [x, b.ints(*sizes)], outputs=len(sizes), attributes={"axis": 3})
        return parts[0], parts[1], parts[2] if rest else None
    one, other = (_every(b, x, start, rotary.turned, 2) for start in (0, 1))
    return one, other, _every(b, x, rotary.turned, rotary.size, 1) if rest else None


def _every(b: NodeBuilder, x: ir.Value, start: int, end: int, step: int) -> ir.Value:
    return b.op("Slice", x, b.ints(start), b.ints(end), b.ints(3), b.ints(step))


def _interleave(b: NodeBuilder, rotary: Rotary, one: ir.Value, other: ir.Value) -> ir.Value:
    pairs = b.op("Concat", b.unsqueeze(one, 4), b.unsqueeze(other, 4), axis=4)
    return b.reshape(pairs, 0, 0, 0, rotary.turned, name="interleaved")


def _rows_in_order(b: NodeBuilder, rotary: Rotary) -> ir.Value:
    """`[B, S]`, counting through all tokens: the rows of a table that was `[B, S, ·]`."""
    B, S = b.size(rotary.x, 0), b.size(rotary.x, 2 if rotary.rank == 4 else 1)
    if isinstance(B, int) and isinstance(S, int):
        return b.reshape(b.ints(*range(B * S)), B, S)
    tokens = b.op("Mul", b.as_tensor(B), b.as_tensor(S), name="tokens")
    return b.reshape(count_up(b, tokens), B, S, name="rows")
