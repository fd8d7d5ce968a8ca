"""Write ONNX Runtime's own matmuls and attentions in ONNX's operators, which the recognizer reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from mha_deploy.graph.fuse.values import equation_of, same_dims, sizes_of
from mha_deploy.graph.ir import (
    NodeBuilder,
    input_at,
    nodes_in,
    output_at,
    prefix_within,
    prefixes_in,
    rank,
    replace_node,
)
from mha_deploy.graph.roles import ORT_DOMAIN

_FUSED_MATMULS = ("FusedMatMul", "TransposeMatMul")  # the second is older
# How a matrix is read, by whether it is transposed, and whether its rows come before the batch.
_LEFT: dict[tuple[int, ...], str] = {(0, 0): "...sd", (1, 0): "...ds", (0, 1): "s...d", (1, 1): "d...s"}
_RIGHT: dict[tuple[int, ...], str] = {(0, 0): "...dt", (1, 0): "...td", (0, 1): "d...t", (1, 1): "t...d"}


def without_fused_matmuls(model: ir.Model) -> list[ir.Node]:
    """Write matmuls as einsums, which need no number of axes, and give those.

    The number is not known before: ONNX's shape inference ends at the operators of others.
    """
    found = list[ir.Node]()
    pending = _own(model, _FUSED_MATMULS)
    prefix = prefix_within("matmul", prefixes_in(model)) if pending else ""
    for node in pending:
        left, right = (
            tuple(bool(node.attributes.get_int(name + side, 0)) for name in ("trans", "transBatch"))
            for side in "AB"
        )
        builder = NodeBuilder(f"{prefix}/{len(found) + 1}")
        equation = f"{_LEFT[left]},{_RIGHT[right]}->...st"
        value = builder.op("Einsum", *node.inputs, equation=equation)
        found.append(builder.nodes[-1])
        alpha, dtype = node.attributes.get_float("alpha", 1.0), node.inputs[0].dtype  # type: ignore[union-attr]
        if alpha != 1.0:
            number = builder.constant(alpha, ir.DataType.FLOAT)
            if dtype != ir.DataType.FLOAT:
                number = builder.op("CastLike", number, node.inputs[0])
            value = builder.op("Mul", value, number)
        replace_node(node, builder, {0: value})
    return found


def _own(model: ir.Model, op_types: Iterable[str]) -> list[ir.Node]:
    return [node for node in nodes_in(model.graph) if node.domain == ORT_DOMAIN and node.op_type in op_types]


def as_matmuls(einsums: Iterable[ir.Node]) -> None:
    """Write them as matmuls, now that their numbers of axes are known."""
    for node in einsums:
        ranks, (texts, _) = [rank(each) for each in node.inputs], equation_of(node)
        if None in ranks or min(filter(None, ranks)) < 2:
            continue
        builder, operands = NodeBuilder(str(node.name)), list[ir.Value]()
        for value, text, count, plain in zip(node.inputs, texts, ranks, (_LEFT, _RIGHT), strict=True):
            if value is not None and count is not None and text != plain[0, 0]:
                places = text.replace("...", "." * (count - 2))
                dots = [at for at, letter in enumerate(places) if letter == "."]
                order, dims = [*dots, *map(places.index, plain[0, 0][-2:])], sizes_of(value) or []
                kind, value = value.type, builder.transpose(value, *order)
                value.type, value.shape = kind, ir.Shape([dims[axis] for axis in order])
            if value is not None:
                operands.append(value)
        replace_node(node, builder, {0: builder.op("MatMul", *operands)})


def without_attentions(model: ir.Model) -> bool:
    """Write attentions out, as matmuls and a softmax, where their inputs say what they compute; if any."""
    pending = _own(model, _WRITTEN_OUT)
    prefix = prefix_within("attention", prefixes_in(model)) if pending else ""
    changed = False
    for at, node in enumerate(pending, 1):
        builder = NodeBuilder(f"{prefix}/{at}")
        results = _WRITTEN_OUT[node.op_type](node, builder)
        if results is None:
            builder.live_nodes(())
            continue
        replace_node(node, builder, dict(enumerate(results)))
        changed = True
    return changed


def _multi_head(node: ir.Node, builder: NodeBuilder) -> Sequence[ir.Value] | None:
    """`MultiHeadAttention` of Q, K and V that are not packed: its result, and all keys and values."""
    operands = [each for each in node.inputs[:3] if each is not None]
    bias, past = input_at(node, 3), [input_at(node, at) for at in (6, 7)]
    widths = [(sizes_of(each) or [None])[-1] for each in operands]
    if any(rank(each) != 3 for each in operands) or len(operands) != 3:
        return None
    if any(input_at(node, at) is not None for at in (8, 9)) or output_at(node, 3) is not None:
        return None
    if bias is not None:
        whole = [each for each in widths if isinstance(each, int)]
        if len(whole) != 3:
            return None
        parts = builder.node("Split", [bias, builder.ints(*whole)], outputs=3, attributes={"axis": 0})
        operands = [builder.op("Add", *pair) for pair in zip(operands, parts, strict=True)]
    return _attend(node, operands, widths[0], past, (input_at(node, 4), input_at(node, 5)), builder)


def _projected(node: ir.Node, builder: NodeBuilder) -> Sequence[ir.Value] | None:
    """`Attention` with its projection: the result, and all keys and values in one tensor."""
    x, weight, bias, past = (input_at(node, at) for at in (0, 1, 2, 4))
    width = (sizes_of(weight) or [None])[-1]
    other = ("do_rotary", "past_present_share_buffer", "rotary_embedding_dim")
    if x is None or weight is None or rank(x) != 3 or not isinstance(width, int):
        return None
    if any(node.attributes.get_int(name, 0) for name in other) or input_at(node, 6) is not None:
        return None
    widths = list(node.attributes.get_ints("qkv_hidden_sizes", ()) or [width // 3] * 3)
    projected = builder.op("MatMul", x, weight)
    projected = projected if bias is None else builder.op("Add", projected, bias)
    parts = builder.node("Split", [projected, builder.ints(*widths)], outputs=3, attributes={"axis": 2})
    both: list[ir.Value | None] = [None, None]
    if past is not None:
        both = [builder.op("Gather", past, builder.constant(at, ir.DataType.INT64), axis=0) for at in (0, 1)]
    found = _attend(node, list(parts), widths[0], both, (input_at(node, 3), input_at(node, 5)), builder)
    if found is None or len(node.outputs) < 2:
        return found and found[:1]
    return found[0], builder.op("Concat", *(builder.unsqueeze(each, 0) for each in found[1:]), axis=0)


_WRITTEN_OUT = {"MultiHeadAttention": _multi_head, "Attention": _projected}


def _attend(
    node: ir.Node,
    operands: Sequence[ir.Value],  # Q, K and V, `[B, S, H * D]`
    width: int | str | None,  # of Q
    past: Sequence[ir.Value | None],  # keys and values, `[B, H, P, D]`
    # zeros and ones of keys, or how many of them are shown, and what is added to scores
    masks: tuple[ir.Value | None, ir.Value | None],
    builder: NodeBuilder,
) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """The result, and all keys and values with those of the past."""
    heads, (padding, added), dtype = node.attributes.get_int("num_heads", 0), masks, node.inputs[0].dtype  # type: ignore[union-attr]
    if not heads or not isinstance(width, int) or width % heads or dtype is None:
        return None
    batch = [(sizes_of(node.inputs[0]) or [None])[0]]
    counted = rank(padding) == 1 and same_dims(sizes_of(padding) or (), batch) and past[0] is None
    if padding is not None and rank(padding) != 2 and not counted:
        return None
    q, k, v = (builder.transpose(builder.reshape(each, 0, 0, heads, -1), 0, 2, 1, 3) for each in operands)
    k, v = (
        each if before is None else builder.op("Concat", before, each, axis=2)
        for before, each in zip(past, (k, v), strict=True)
    )
    scale = node.attributes.get_float("scale", 0.0) or 1.0 / math.sqrt(width // heads)
    scores = builder.op("MatMul", q, builder.transpose(k, 0, 1, 3, 2))
    scores = builder.op("Mul", scores, builder.constant(scale, dtype))
    if padding is not None:
        number = node.attributes.get_float("mask_filter_value", -10000.0) or 0.0
        if counted:
            positions = builder.op(
                "Range", *_range(builder.ints(0), builder.op("Shape", k, start=2, end=3), builder)
            )
            shown = builder.op(
                "Less", positions, builder.unsqueeze(builder.cast(padding, ir.DataType.INT64), 1)
            )
        else:
            zero = builder.constant(0, padding.dtype or ir.DataType.INT32)
            shown = builder.op("Greater", padding, zero)
        bias = builder.op("Where", shown, builder.constant(0.0, dtype), builder.constant(number, dtype))
        scores = builder.op("Add", scores, builder.unsqueeze(bias, 1, 2))
    scores = scores if added is None else builder.op("Add", scores, added)
    if node.attributes.get_int("unidirectional", 0):
        rows, keys = (builder.op("Shape", each, start=2, end=3) for each in (q, k))
        indices = builder.op("Range", *_range(builder.op("Sub", keys, rows), keys, builder))
        future = builder.op("Range", *_range(builder.ints(0), keys, builder))
        shown = builder.op("LessOrEqual", future, builder.unsqueeze(indices, 1))
        scores = builder.op("Where", shown, scores, builder.constant(-math.inf, dtype))
    result = builder.op("MatMul", builder.op("Softmax", scores, axis=-1), v)
    return builder.reshape(builder.transpose(result, 0, 2, 1, 3), 0, 0, -1), k, v


def _range(start: ir.Value, end: ir.Value, builder: NodeBuilder) -> tuple[ir.Value, ...]:
    one = builder.constant(1, ir.DataType.INT64)
    return builder.op("Squeeze", start), builder.op("Squeeze", end), one
