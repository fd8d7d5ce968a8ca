"""The operators around attention: norms, rotary embedding, KV-cache update, flips, masked writes."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from mha_deploy.graph.ir import (
    NodeBuilder,
    constant_ints,
    constant_number,
    dim,
    dims,
    input_at,
    made_by,
    rank,
)
from mha_deploy.graph.lower.call import LoweringError
from mha_deploy.graph.roles import ORT_DOMAIN

# -- RMSNormalization in primitive operators, for older parsers ------------------------------------

RMS_NORM = "RMSNormalization"


def rms_norm_to_primitives(node: ir.Node, b: NodeBuilder) -> ir.Value:
    """Divide x by √(mean x² + ε) in the stash type (default: float32), and multiply by the scale.

    As in the specification, the quotient is rounded to the type of x before it is scaled.
    """
    x, scale = input_at(node, 0), input_at(node, 1)
    if x is None or scale is None or x.dtype is None or scale.dtype is None:
        hint = "state the types of x and scale in the graph"
        raise LoweringError("normalization of unknown type", node, hint=hint)
    attributes = node.attributes
    wide = ir.DataType(attributes.get_int("stash_type", int(ir.DataType.FLOAT)))
    data = b.cast(x, wide)
    # From `axis` to the last one, counted from the end; a negative axis needs no rank.
    axis = attributes.get_int("axis", -1)
    if axis >= 0 and x.shape is None:
        got, hint = f"axis {axis}", "state the shape of x"
        raise LoweringError("normalization of unknown rank", node, got=got, hint=hint)
    axes = b.ints(*range(axis if axis < 0 else axis - len(x.shape or ()), 0))
    mean = b.op("ReduceMean", b.op("Mul", data, data), axes, keepdims=1, name="mean_square")
    epsilon = b.constant(attributes.get_float("epsilon", 1e-5), wide)
    normal = b.op("Div", data, b.op("Sqrt", b.op("Add", mean, epsilon)), name="normalised")
    normal.dtype = wide
    rounded = b.cast(normal, x.dtype)
    rounded.dtype = x.dtype
    return b.op("Mul", b.cast(rounded, scale.dtype), scale, name="rms_norm")


# -- RotaryEmbedding in primitive operators, and as ONNX Runtime's own -----------------------------

ROTARY = "RotaryEmbedding"


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """The inputs and attributes of a RotaryEmbedding node.

    `x` is `[B, heads, S, size]` or `[B, S, heads·size]`. `cos` and `sin` are `[positions, rotated/2]`, and
    `positions`, `[B, S]`, the table row of each token; or, without it, `[B, S, rotated/2]`, and `[1, S, ·]`
    where all batch elements have the same. So many elements of a head are rotated, the rest stays. Where it
    is `interleaved`, a pair is two adjacent elements.
    """

    x: ir.Value
    cos: ir.Value
    sin: ir.Value
    positions: ir.Value | None
    rank: int
    heads: int
    size: int
    rotated: int
    interleaved: bool


def rotary_to_primitives(node: ir.Node, b: NodeBuilder) -> ir.Value:
    """Write a RotaryEmbedding with elementwise multiplications and additions."""
    rotary = read_rotary(node)
    R, D, ids = rotary.rotated, rotary.size, rotary.positions
    x = rotary.x if rotary.rank == 4 else b.reshape(rotary.x, 0, 0, rotary.heads, D)

    def angles(table: ir.Value) -> ir.Value:  # with an axis of size 1 for the heads
        rows = table if ids is None else b.op("Gather", table, ids, axis=0, name="angles")
        return b.unsqueeze(rows, 1 if rotary.rank == 4 else 2)

    cos, sin = angles(rotary.cos), angles(rotary.sin)
    # `rest` are the elements that are not rotated.
    if rotary.interleaved:
        slices = [(0, R, 2), (1, R, 2), *([(R, D, 1)] if D > R else [])]
        one, other, *rest = (b.op("Slice", x, *map(b.ints, (i, end, 3, step))) for i, end, step in slices)
    else:
        sizes = (R // 2, R // 2, D - R) if D > R else (R // 2, R // 2)
        one, other, *rest = b.node("Split", [x, b.ints(*sizes)], outputs=len(sizes), attributes={"axis": 3})
    rotated = [
        b.op("Sub", b.op("Mul", one, cos), b.op("Mul", other, sin)),
        b.op("Add", b.op("Mul", one, sin), b.op("Mul", other, cos)),
    ]
    if rotary.interleaved:
        pairs = b.op("Concat", *(b.unsqueeze(each, 4) for each in rotated), axis=4)
        rotated = [b.reshape(pairs, 0, 0, 0, R, name="interleaved")]
    parts = [*rotated, *rest]
    y = parts[0] if len(parts) == 1 else b.op("Concat", *parts, axis=3, name="rotated")
    return y if rotary.rank == 4 else b.reshape(y, 0, 0, rotary.heads * D, name="merged")


def rotary_to_contrib(node: ir.Node, b: NodeBuilder) -> ir.Value:
    """Write a RotaryEmbedding as the com.microsoft operator, which always looks positions up in a table."""
    rotary = read_rotary(node)
    cos, sin, positions = rotary.cos, rotary.sin, rotary.positions
    if positions is None:
        # The tables are [B, S, ·]: their rows in order.
        cos, sin = (b.reshape(table, -1, rotary.rotated // 2) for table in (cos, sin))
    if positions is None and dim(rotary.cos, 0) == 1:
        positions = b.ints(0)  # of the first token
    elif positions is None:
        B, S = b.size(rotary.x, 0), b.size(rotary.x, 2 if rotary.rank == 4 else 1)
        if isinstance(B, int) and isinstance(S, int):
            positions = b.reshape(b.ints(*range(B * S)), B, S)
        else:
            tokens = b.op("Mul", b.as_tensor(B), b.as_tensor(S), name="tokens")
            positions = b.reshape(b.count_up(tokens), B, S, name="rows")
    attributes: dict[str, int | None] = {"interleaved": int(rotary.interleaved), "num_heads": rotary.heads}
    attributes["rotary_embedding_dim"] = rotary.rotated if rotary.rotated < rotary.size else None
    inputs = [rotary.x, positions, cos, sin]
    return b.node(ROTARY, inputs, domain=ORT_DOMAIN, name=b.prefix, attributes=attributes)[0]


def read_rotary(node: ir.Node) -> Rotary:
    """The inputs and attributes of a node; refused where its sizes are not known."""
    x, cos, sin = (input_at(node, at) for at in range(3))
    shape = dims(x)
    if x is None or cos is None or sin is None or len(shape) not in (3, 4):
        hint = "state the shape of the input"
        raise LoweringError("rotary embedding of unknown rank", node, got=shape, hint=hint)
    heads = shape[1] if len(shape) == 4 else node.attributes.get_int("num_heads", 0)
    width = shape[-1]
    if not isinstance(heads, int) or not heads or not isinstance(width, int):
        hint = "state the heads and the head size; num_heads for a 3-D input"
        raise LoweringError("rotary embedding without a fixed head size", node, got=shape, hint=hint)
    size = width if len(shape) == 4 else width // heads
    R = node.attributes.get_int("rotary_embedding_dim", 0) or size
    if R % 2 or size < R or (len(shape) == 3 and width % heads):
        raise LoweringError(
            "rotary embedding of this size",
            node,
            got=f"{R} of {shape}, {heads} heads",
            hint="--attention native, or another target",
        )
    ids, pairs = input_at(node, 3), node.attributes.get_int("interleaved", 0) == 1
    before = [input_at(made_by(table, "Expand"), 0) for table in (cos, sin)]
    if ids is None and all(rank(each) == 3 and dim(each, 0) == 1 for each in before):
        cos, sin = (each or table for each, table in zip(before, (cos, sin), strict=True))
    sizes = {"rank": len(shape), "heads": heads, "size": size, "rotated": R}
    return Rotary(x=x, cos=cos, sin=sin, positions=ids, interleaved=pairs, **sizes)


# -- TensorScatter, the update of a preallocated KV cache ------------------------------------------

SCATTER = "TensorScatter"


def obstacle_to_update_in_place(node: ir.Node) -> tuple[str, object] | None:
    """Why a TensorScatter cannot be TensorRT's cache update: the feature, and what was found; else None."""
    cache, result = input_at(node, 0), node.outputs[0]
    if _is_circular(node):
        return "circular TensorScatter", "mode=circular"
    if cache is None or not cache.is_graph_input():
        return "TensorScatter into a cache that is not a graph input", cache and cache.name
    if rank(cache) != 4 or _axis(node, 4) != 2:
        return "TensorScatter other than along axis 2 of [B, H, T, D]", dims(cache)
    if cache.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        return "TensorScatter of this type", cache.dtype
    if not isinstance(dim(cache, 2), int):
        return "TensorScatter into a cache of dynamic length", str(cache.shape)
    if not result.is_graph_output():
        return "TensorScatter whose result is not a graph output", result.name
    return None


def keep_scatter(node: ir.Node, b: NodeBuilder) -> None:
    """Keep the node for TensorRT's parser, or refuse it with the reason."""
    obstacle = obstacle_to_update_in_place(node)
    if obstacle is not None:
        hint = "a cache that is a graph input [B, H, T, D] of fixed T, and its result a graph output"
        raise LoweringError(obstacle[0], node, got=obstacle[1], hint=hint)


def scatter_to_primitives(node: ir.Node, b: NodeBuilder) -> ir.Value:
    """Write a TensorScatter as a ScatterND with explicit indices."""
    cache, update, starts = (input_at(node, at) for at in range(3))
    if cache is None or update is None or update.shape is None:
        raise LoweringError("TensorScatter of unknown rank", node, hint="state the shape of the update")
    axis = _axis(node, len(update.shape))

    def along(at: int) -> ir.Value:
        """0, 1, 2 … along one axis of the indices, which have one axis more than the leading ones."""
        return b.reshape(b.count_up(b.size(update, at)), *(-1 if i == at else 1 for i in range(axis + 2)))

    slots = along(axis)
    if starts is not None:
        slots = b.op("Add", slots, b.reshape(starts, -1, *[1] * (axis + 1)), name="slot")
    if _is_circular(node):
        # The remainder, by an integer division: Mod is not in every parser.
        length = b.as_tensor(b.size(cache, axis))
        whole = b.op("Mul", b.op("Div", slots, length), length)
        slots = b.op("Sub", slots, whole, name="wrapped")
    # One index for each axis up to the sequence; whole head vectors follow, so there are few indices.
    lead = b.shape_of(*(b.size(update, at) for at in range(axis + 1)), 1)
    planes = [*map(along, range(axis)), slots]
    index = b.op("Concat", *(b.op("Expand", plane, lead) for plane in planes), axis=axis + 1, name="index")
    return b.op("ScatterND", cache, index, update, name="updated")


def _is_circular(node: ir.Node) -> bool:
    return node.attributes.get_string("mode", "linear") == "circular"


def _axis(node: ir.Node, rank: int) -> int:
    return (node.attributes.get_int("axis", -2) or 0) % rank


# -- Slice, as PyTorch writes a flip ---------------------------------------------------------------

_LOWEST = -(2**63)


def slice_to_first(node: ir.Node, b: NodeBuilder) -> ir.Value | None:
    """Write a Slice back to the first entry with another end: at the lowest number TensorRT-RTX overflows."""
    ends = constant_ints(node, 2)
    if ends is None or _LOWEST not in ends:
        return None
    others = b.ints(*(max(end, _LOWEST + 1) for end in ends))
    return b.op("Slice", *node.inputs[:2], others, *node.inputs[3:], name="flipped")


# -- Reshape to sizes that are computed ------------------------------------------------------------


def reshape_to_known_sizes(node: ir.Node, b: NodeBuilder) -> ir.Value | None:
    """Write the sizes that follow as numbers: TensorRT asks for head sizes, and does not compute them all.

    The others must be those of the input at the same place.
    """
    source, sizes = dims(node.inputs[0]), dims(node.outputs[0])
    kept = [size is not None and source[at : at + 1] == (size,) for at, size in enumerate(sizes)]
    numbers = [size if isinstance(size, int) else 0 for size in sizes]
    is_known = all(number or same for number, same in zip(numbers, kept, strict=True))
    if constant_ints(node, 1) is not None or not is_known or not any(numbers) or 0 in sizes:
        return None
    return b.op("Reshape", node.inputs[0], b.ints(*numbers), name="sized")


# -- ScatterND, as PyTorch writes `x[mask] = number` -----------------------------------------------


def write_where_true(node: ir.Node, b: NodeBuilder) -> ir.Value | None:
    """Write one number where a mask is true by a selection, not at a list of places of unknown length."""
    if (found := _masked_write(node)) is None:
        return None
    mask, number = found
    mask = mask if mask.dtype == ir.DataType.BOOL else b.cast(mask, ir.DataType.BOOL)
    return b.op("Where", mask, b.reshape(number, 1), node.inputs[0], name="written")


def _masked_write(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """The mask and the number of a ScatterND to all places where a mask of the same sizes is true."""
    data, places, number = (input_at(node, at) for at in range(3))
    turned = made_by(places, "Transpose")
    found = None if turned is None else made_by(turned.inputs[0], "NonZero")
    mask = None if found is None else found.inputs[0]
    while (copied := made_by(number, "Expand", "Reshape", "Unsqueeze")) is not None:
        number = copied.inputs[0]
    if turned is None or mask is None or number is None or constant_number(number) is None:
        return None
    plain = node.attributes.get_string("reduction", "none") == "none"
    in_order = tuple(turned.attributes.get_ints("perm", (1, 0))) == (1, 0)
    sizes = dims(data) if data is not None else ()
    return (mask, number) if plain and in_order and None not in sizes and sizes == dims(mask) else None


def is_list_of_places(node: ir.Node) -> bool:
    """Whether a NonZero has other uses than those of `write_where_true`."""
    users = [use.node for value in node.outputs for use in value.uses()]
    writes = [use.node for turned in users for value in turned.outputs for use in value.uses()]
    return not writes or any(_masked_write(each) is None for each in writes)


INDEXING_RULES = {"Slice": slice_to_first, "ScatterND": write_where_true}
"""How the forms of indexing are written that TensorRT-RTX gets wrong or refuses."""
