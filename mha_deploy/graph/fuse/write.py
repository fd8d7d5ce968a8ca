"""Write a recognised attention as one node, and remove what only the old nodes needed."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from mha_deploy.graph.fuse.masks import GUARDED, HEAD_AXIS, Masks, Place, transposed
from mha_deploy.graph.fuse.pattern import Pattern
from mha_deploy.graph.fuse.scores import Axes, Sink
from mha_deploy.graph.fuse.sizes import product
from mha_deploy.graph.fuse.values import NotFused, Size, dtype_of, sizes_of
from mha_deploy.graph.ir import NodeBuilder, replace_node, replace_value

_WEIGHTS = 3  # qk_matmul_output_mode: the result of the softmax


def write_attention(pattern: Pattern, builder: NodeBuilder, masks: Masks) -> list[ir.Value]:
    """Build the `Attention` node of the builder's prefix beside the graph.

    Returns:
        What stands for the result, and for the weights where they are used.
    """
    letters, weights = pattern.letters, pattern.weights
    dtype = dtype_of(pattern.q.value)
    scores = letters.order(letters.query, letters.key)
    orders = (
        (letters.query, letters.size),
        (letters.key, letters.size),
        (letters.key, letters.value_size),
    )
    q, k, v = (
        rejoined(each.value, each.axes, letters.order(*order), each.sizes, builder)
        for each, order in zip((pattern.q, pattern.k, pattern.v), orders, strict=True)
    )
    q, k, v = _broadcast(pattern, (q, k, v), builder)
    place = Place(order=scores, sizes=pattern.sizes, rows=(q, k), builder=builder)
    lengths = pattern.q.dim(letters.query), pattern.k.dim(letters.key)
    mask, zero = masks.write(pattern.masking, place, dtype, lengths, pattern.last.graph)
    if pattern.sink is not None:
        mask = _with_sink(pattern.sink, mask, place, dtype)
    if letters.head is None:
        q, k, v = (builder.unsqueeze(each, HEAD_AXIS) for each in (q, k, v))
    if pattern.sink is not None:
        # A key of zeros has the appended score, and a value of zeros drops its weight.
        pads = builder.ints(0, 0, 0, 0, 0, 0, pattern.sink.count, 0)
        k, v = (builder.op("Pad", each, pads, name="with_sink") for each in (k, v))
    for each in pattern.multipliers:
        # The same for all keys, so it can as well be applied to Q.
        factor = place.regrouped(each.value, each.axes)
        if each.value.dtype != dtype:
            factor = builder.op("Cast", factor, to=int(dtype))
        q = builder.op("Div" if each.divides else "Mul", q, factor, name="scaled_q")
    if zero is not None:
        q = builder.op("Where", zero, builder.constant(0.0, dtype), q, name="zeroed_q")
    scale = pattern.scale
    if dtype == ir.DataType.DOUBLE:
        # The attribute is a float32.
        q, scale = builder.op("Mul", q, builder.constant(scale, ir.DataType.DOUBLE), name="scaled_q"), 1.0
    outputs = builder.node(
        "Attention",
        [q, k, v] if mask is None else [q, k, v, mask],
        outputs=1 if weights is None else 4,
        name=builder.prefix,
        attributes={
            "scale": scale,
            "is_causal": int(pattern.masking.causal),
            "softcap": pattern.softcap or None,
            "softmax_precision": None if pattern.softmax_dtype is None else int(pattern.softmax_dtype),
            "qk_matmul_output_mode": None if weights is None else _WEIGHTS,
        },
    )
    attention = outputs[0].producer()
    if attention is not None:
        attention.metadata_props.update(pattern.softmax.metadata_props)
    results = [(outputs[0], letters.order(letters.query, letters.value_size), pattern.out)]
    if weights is not None:
        outputs[1].name = outputs[2].name = ""  # present keys and values are not used
        results.append((outputs[3], scores, weights.axes))
    found = list[ir.Value]()
    for value, order, wanted in results:
        if letters.head is None:
            value = builder.op("Squeeze", value, builder.ints(HEAD_AXIS))
        if dtype == ir.DataType.DOUBLE and GUARDED in pattern.masking.notes:
            # Kernels give 0 for a fully masked query; float64 has none, and its definition gives NaN.
            value = builder.op("Where", builder.op("IsNaN", value), builder.constant(0.0, dtype), value)
        found.append(rejoined(value, order, wanted, pattern.sizes, builder))
    return found


def _with_sink(sink: Sink, mask: ir.Value | None, place: Place, dtype: ir.DataType) -> ir.Value:
    """A mask with the appended scores behind those of the keys."""
    builder, (q, k) = place.builder, place.rows
    if mask is None:
        zero = builder.unsqueeze(builder.constant(0.0, dtype), 0, 1, 2, 3)
        mask = builder.expand(zero, 1, 1, builder.size(q, -2), builder.size(k, -2))
    own = place.regrouped(sink.value, sink.axes)
    if sink.value.dtype != dtype:
        own = builder.op("Cast", own, to=int(dtype))
    one = builder.ints(1)
    heads = builder.op("Concat", builder.op("Shape", own, start=0, end=2), one, one, axis=0, name="shape")
    mask = builder.op("Expand", mask, heads)
    queries = builder.op("Concat", builder.op("Shape", mask, start=0, end=3), one, axis=0, name="shape")
    return builder.op("Concat", mask, builder.op("Expand", own, queries), axis=-1, name="mask")


def _broadcast(
    pattern: Pattern, operands: tuple[ir.Value, ir.Value, ir.Value], builder: NodeBuilder
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Q, K and V with the batch and the lengths that they and the masks have together."""
    q, k, v = operands
    more = [1] * (2 if pattern.letters.head is None else 3)
    batches = [(value, 0) for value in operands if pattern.batches]
    batches += [(each.value, each.at) for each in pattern.wider if each.axis in pattern.letters.batch]
    for value, at in batches:
        size = builder.size(value, at)
        q, k, v = (each if each is value else builder.expand(each, size, *more) for each in (q, k, v))
    for each in pattern.wider:
        if each.axis == pattern.letters.query:
            q = builder.expand(q, *more[1:], builder.size(each.value, each.at), 1)
    if pattern.lengths:
        k = builder.expand(k, *more[1:], builder.size(v, -2), 1)
    return q, k, v


def insert_attention(pattern: Pattern, builder: NodeBuilder, results: list[ir.Value]) -> None:
    """Put the built nodes into the graph, and remove what only the old ones needed."""
    operands = [value for value in pattern.last.inputs if value is not None]
    replace_node(pattern.last, builder, {0: results[0]}, keep=results[1:])
    remove_unused(operands)
    if pattern.weights is not None:
        old = pattern.weights.value
        replace_value(old, results[1])
        remove_unused([old])


def rejoined(
    value: ir.Value, axes: Axes, order: Axes, sizes: Mapping[str, Size], builder: NodeBuilder
) -> ir.Value:
    """A value with its axes joined in another way and in another order."""
    if set(axes) == set(order):
        return transposed(value, axes, order, builder)
    dims = sizes_of(value) or [None] * len(axes)
    own = {axis: size for axis, size in zip(axes, dims, strict=True) if len(axis) == 1}
    known = {letter: own.get(letter, sizes.get(letter)) for letter in "".join(axes)}
    apart = tuple("".join(axes))
    value = _reshaped(value, axes, apart, known, builder)
    value = transposed(value, apart, tuple("".join(order)), builder)
    return _reshaped(value, tuple("".join(order)), order, known, builder)


def _reshaped(
    value: ir.Value, axes: Axes, wanted: Axes, sizes: Mapping[str, Size], builder: NodeBuilder
) -> ir.Value:
    if axes == wanted:
        return value
    dims = [product(sizes[letter] for letter in axis) for axis in wanted]
    given = list[int | ir.Value]()
    for axis, size in zip(wanted, dims, strict=True):
        if isinstance(size, int):
            given.append(size)
        elif sum(not isinstance(each, int) for each in dims) == 1 or axis not in axes:
            given.append(-1)
        else:
            given.append(builder.op("Shape", value, start=axes.index(axis), end=axes.index(axis) + 1))
    if given.count(-1) > 1:
        raise NotFused("Several sizes of Q, K or V are not known.", got=dims)
    result = builder.reshape(value, *given)
    result.shape = ir.Shape(dims)
    if value.dtype is not None:
        result.dtype = value.dtype
    return result


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
