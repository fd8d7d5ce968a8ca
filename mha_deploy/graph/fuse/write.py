"""Write a recognized attention as one node, and bring nodes that an exporter wrote into the same form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from mha_deploy.graph.attention_node import (
    MASK,
    NONPAD_KV_SEQLEN,
    OF_WEIGHTS,
    PAST_KEY,
    AttentionNode,
    read_attention,
)
from mha_deploy.graph.fuse.mask_pattern import (
    HEAD_AXIS,
    Axes,
    Bias,
    Fill,
    Masking,
    Masks,
    ScorePlace,
    Sources,
    Term,
    decide_masking,
    has_lowest,
    rejoined,
    spans,
)
from mha_deploy.graph.fuse.pattern import Operand, Pattern, Sink, unwrap
from mha_deploy.graph.fuse.values import NotFused, Size, folded, known_numbers, sizes_of
from mha_deploy.graph.fuse.verify import Boundary, mask_stops
from mha_deploy.graph.ir import (
    NodeBuilder,
    constant,
    counts_up,
    dims,
    input_at,
    is_op,
    made_by,
    new_initializer,
    nodes_behind,
    prefix_within,
    prefixes_in,
    replace_node,
    replace_value,
    same_size,
)

_MOST_IN_MASK = 2**22  # numbers of a mask that becomes a constant


def write_attention(pattern: Pattern, builder: NodeBuilder, masks: Masks) -> list[ir.Value]:
    """Build the `Attention` node beside the graph: its result, and the weights where they are used."""
    letters, weights = pattern.letters, pattern.weights
    dtype = pattern.q.value.dtype or ir.DataType.FLOAT
    scores = letters.order(letters.query, letters.key)
    q, k, v = (
        rejoined(
            *_spread(pattern, each, builder), letters.order(*order), each.sizes, builder, pattern.sources
        )
        for each, order in (
            (pattern.q, (letters.query, letters.size)),
            (pattern.k, (letters.key, letters.size)),
            (pattern.v, (letters.key, letters.value_size)),
        )
    )
    q, k, v = _broadcast(pattern, (q, k, v), builder)
    place = ScorePlace(
        order=scores, sizes=pattern.q.sizes, rows=(q, k), builder=builder, sources=pattern.sources
    )
    sink = pattern.scores.sink
    masking = pattern.masking
    mask, zero, shown = masks.write(masking, place, dtype, pattern.sizes, pattern.last.node.graph)
    if sink is not None:
        mask = _with_sink(sink, mask, place, dtype)
    if letters.head is None:
        q, k, v = (builder.unsqueeze(each, HEAD_AXIS) for each in (q, k, v))
    for each in pattern.scores.multipliers:
        # The same for all keys or for all queries, so it can as well be applied to Q or K.
        factor, step = (
            builder.cast(place.aligned(each.value, each.axes), dtype),
            "Div" if each.divides else "Mul",
        )
        if each.of_keys:
            k = builder.op(step, k, builder.transpose(factor, 0, 1, 3, 2), name="scaled_k")
        else:
            q = builder.op(step, q, factor, name="scaled_q")
    nothing = builder.constant(0.0, dtype)
    if shown is not None:
        k = builder.op("Where", builder.transpose(shown, 0, 1, 3, 2), k, nothing, name="zeroed_k")
    if masking.filled == "twice":
        zeros = builder.op("Expand", nothing, builder.op("Shape", k))
        k, v = (builder.op("Concat", *pair, axis=-2, name="with_filled") for pair in ((k, zeros), (v, v)))
    if sink is not None:
        # A key of zeros has the appended score, and a value of zeros drops its weight.
        pads = builder.ints(0, 0, 0, 0, 0, 0, sink.count, 0)
        k, v = (builder.op("Pad", each, pads, name="with_sink") for each in (k, v))
    if zero is not None:
        q = builder.op("Where", zero, nothing, q, name="zeroed_q")
    scale = abs(pattern.scale)
    if pattern.scale < 0:  # Attention takes the root of the attribute
        q = builder.op("Neg", q, name="negated_q")
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
            "is_causal": int(masking.causal),
            "softcap": pattern.scores.softcap or None,
            "softmax_precision": None if pattern.softmax_dtype is None else int(pattern.softmax_dtype),
            "qk_matmul_output_mode": None if weights is None else OF_WEIGHTS,
        },
    )
    builder.nodes[-1].metadata_props.update(pattern.softmax.metadata_props)
    results = [(outputs[0], letters.order(letters.query, letters.value_size), pattern.last.out)]
    if weights is not None:
        outputs[1].name = outputs[2].name = ""  # present keys and values are not used
        used = outputs[3]
        if masking.filled == "twice":  # of a key and of the one of zeros in its place
            halves = builder.node("Split", [used], outputs=2, attributes={"axis": -1, "num_outputs": 2})
            used = builder.op("Add", *halves, name="weights")
        results.append((used, scores, weights.axes))
    found = list[ir.Value]()
    for value, order, wanted in results:
        if letters.head is None:
            value = builder.op("Squeeze", value, builder.ints(HEAD_AXIS))
        value.type = ir.TensorType(dtype)
        if dtype == ir.DataType.DOUBLE and pattern.guarded:
            # Kernels give 0 for a fully masked query; float64 has none, and its definition gives NaN.
            value = builder.op("Where", builder.op("IsNaN", value), builder.constant(0.0, dtype), value)
        found.append(rejoined(value, order, wanted, pattern.q.sizes, builder, pattern.sources))
    return found


def _with_sink(sink: Sink, mask: ir.Value | None, place: ScorePlace, dtype: ir.DataType) -> ir.Value:
    """A mask with the appended scores behind those of the keys."""
    builder, (q, k) = place.builder, place.rows
    if mask is None:
        zero = builder.unsqueeze(builder.constant(0.0, dtype), 0, 1, 2, 3)
        mask = builder.expand(zero, 1, 1, builder.size(q, -2), builder.size(k, -2))
    own, one = builder.cast(place.aligned(sink.value, sink.axes), dtype), builder.ints(1)
    heads = builder.op("Concat", builder.op("Shape", own, start=0, end=2), one, one, axis=0, name="shape")
    mask = builder.op("Expand", mask, heads)
    queries = builder.op("Concat", builder.op("Shape", mask, start=0, end=3), one, axis=0, name="shape")
    return builder.op("Concat", mask, builder.op("Expand", own, queries), axis=-1, name="mask")


def _spread(pattern: Pattern, operand: Operand, builder: NodeBuilder) -> tuple[ir.Value, Axes]:
    """Q, K or V copied along the axes of a batch of several that only the others have, and its axes.

    The same for one head of K that V has more of, or the other way around, and for one of Q.
    """
    letters, value, axes = pattern.letters, operand.value, operand.axes
    operands = (pattern.q, pattern.k, pattern.v)
    broadcast = [
        letter
        for letter in letters.batch
        if operand.dim(letter) == 1 and any(each.dim(letter) != 1 for each in operands)
    ]
    broadcast = broadcast if len(letters.batch) > 1 else []
    count = pattern.heads[0 if operand is pattern.q else 1]
    if letters.head is not None and operand.dim(letters.head) == 1 != count:
        broadcast.append(letters.head)
    if not broadcast:
        return value, axes
    if missing := tuple(letter for letter in broadcast if letter not in "".join(axes)):
        value, kind, dims = builder.unsqueeze(value, *range(len(missing))), value.type, sizes_of(value) or []
        value.type, value.shape, axes = kind, ir.Shape([*(1 for _ in missing), *dims]), (*missing, *axes)
    sizes = [1 if axis not in broadcast else pattern.sources.size(axis, builder) for axis in axes]
    dims = [
        pattern.q.sizes.get(axis) if axis in broadcast else size
        for axis, size in zip(axes, sizes_of(value) or [None] * len(axes), strict=True)
    ]
    if letters.head in broadcast:
        sizes[axes.index(letters.head)] = dims[axes.index(letters.head)] = count
    if None in sizes:
        raise NotFused("Q, K, V and the mask have different batches.", got=", ".join(broadcast))
    result = builder.expand(value, *(size for size in sizes if size is not None))
    result.type, result.shape = value.type, ir.Shape(dims)
    return result, axes


def _broadcast(
    pattern: Pattern, operands: tuple[ir.Value, ir.Value, ir.Value], builder: NodeBuilder
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Q, K and V with the batch and the lengths that they and the masks have together."""
    q, k, v = operands
    more = [1] * (2 if pattern.letters.head is None else 3)
    batches = [(value, 0) for value in operands if pattern.batches and len(pattern.letters.batch) == 1]
    batches += [(each.value, each.at) for each in pattern.scores.wider if each.axis in pattern.letters.batch]
    for value, at in batches:
        size = builder.size(value, at)
        q, k, v = (each if each is value else builder.expand(each, size, *more) for each in (q, k, v))
    for each in pattern.scores.wider:
        if each.axis == pattern.letters.query:
            q = builder.expand(q, *more[1:], builder.size(each.value, each.at), 1)
        elif each.axis == pattern.letters.key and is_op(pattern.last.node, "Einsum"):
            # An einsum copies a single key and value to as many as the mask has.
            size = builder.size(each.value, each.at)
            k, v = (builder.expand(value, *more[1:], size, 1) for value in (k, v))
    if pattern.lengths:
        k = builder.expand(k, *more[1:], builder.size(v, -2), 1)
    return q, k, v


def insert_attention(
    pattern: Pattern, builder: NodeBuilder, results: list[ir.Value], before: Callable[[ir.Node], None]
) -> set[ir.Value]:
    """Put the built nodes into the graph, and remove what only the old ones needed; see `remove_unused`."""
    operands = list(pattern.last.node.inputs)
    replace_node(pattern.last.node, builder, {0: results[0]}, keep=results[1:])
    left = remove_unused(operands, before=before)
    if pattern.weights is not None:
        replace_value(pattern.weights.value, results[1])
        left |= remove_unused([pattern.weights.value], before=before)
    return left


def remove_unused(
    values: Iterable[ir.Value | None],
    *,
    constants: bool = False,
    before: Callable[[ir.Node], None] | None = None,
) -> set[ir.Value]:
    """Remove the nodes that led only to these values, and with `constants` those as well.

    Else the constants are returned: they are removed in the end, since all layers of a model may share one,
    and each time onnx_ir would list all uses that are left. `before` is called with each node.
    """
    pending, left = list(values), set[ir.Value]()
    while pending:
        value = pending.pop()
        if value is not None and not constants and constant(value) is not None:
            left.add(value)
            continue
        if value is None or value.uses() or value.is_graph_output() or value.is_graph_input():
            continue
        node = value.producer()
        if node is None:
            if value.graph is not None and value.name is not None and value.is_initializer():
                del value.graph.initializers[value.name]
        elif node.graph is not None and not any(out.uses() or out.is_graph_output() for out in node.outputs):
            pending.extend(node.inputs)
            if before is not None:
                before(node)
            node.graph.remove(node, safe=True)
    return left


# -- Bring an `Attention` node that the exporter wrote into the canonical form ---------------------

_SCORES = ("b", "h", "s", "t")
_KEYS, _VALUES = ("b", "h", "t", "d"), ("b", "h", "t", "e")


def simplify_attention(
    node: ir.Node, builder: NodeBuilder, masks: Masks
) -> tuple[ir.Value, Boundary, list[str]] | None:
    """A simpler `Attention` node that computes the same, built beside the graph; None where there is none.

    With its result come what is drawn to compare the two, and what is different, in words.
    """
    old = read_attention(node)
    more = any(input_at(node, at) is not None for at in range(PAST_KEY, NONPAD_KV_SEQLEN + 1))
    if old.rank != 4 or more or any(each.uses() or each.is_graph_output() for each in node.outputs[1:]):
        return None
    inputs, attributes = list(node.inputs), dict(node.attributes)
    stops, changes = [value for value in inputs[:MASK] if value is not None], list[str]()
    if (shared := _shared_heads(node, old)) is not None:
        for at, each, order in zip((1, 2), shared, (_KEYS, _VALUES), strict=True):
            inputs[at] = rejoined(each.value, each.axes, order, each.sizes, builder, Sources())
        stops[1:] = [each.value for each in shared]
        changes.append(f"K and V are not repeated: {shared[0].dim('h')} heads for {old.Hq}")
    (q, k), mask = inputs[:2], input_at(node, MASK)
    lengths = (sizes_of(q) or [None] * 4)[2], (sizes_of(node.inputs[1]) or [None] * 4)[2]
    dtype = (q and q.dtype) or ir.DataType.FLOAT
    masking = _simpler_masking(mask, old, dtype, lengths)
    if masking is not None and q is not None and k is not None:
        place = ScorePlace(order=_SCORES, sizes={}, rows=(q, k), builder=builder, sources=Sources())
        inputs[MASK] = masks.write(masking, place, dtype, lengths, node.graph)[0]
        words = list[str]()
        if masking.causal:
            attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
            words += [] if old.is_causal else ["the causal triangle is the attribute"]
        if masking.kind == "none":
            words.append("no mask is left")
        elif old.mask == "float" and masking.kind == "bool":
            words.append("the mask is boolean")
        elif masking.kind == "float" and has_lowest(mask):
            words.append("the lowest number in the mask is the next one: ONNX Runtime takes it for -inf")
        changes += words or ["the mask is written as one of queries and keys"]
    if not changes:
        return None
    while inputs and inputs[-1] is None:
        inputs.pop()
    (result,) = builder.node("Attention", inputs, name=builder.prefix)
    new = builder.nodes[-1]
    new.name, new.version = node.name, node.version
    new.attributes.update(attributes)
    new.metadata_props.update(node.metadata_props)
    masked = [mask] if masking is None else [term.value for term in masking.terms]
    drawn = mask_stops(each for each in masked if each is not None) | dict.fromkeys(stops, 1.0)
    return result, Boundary(drawn=drawn, dims={}), changes


def _shared_heads(node: ir.Node, old: AttentionNode) -> tuple[Operand, Operand] | None:
    """K and V before their heads were repeated."""
    k, v = input_at(node, 1), input_at(node, 2)
    if k is None or v is None or sizes_of(k) is None or sizes_of(v) is None:
        return None
    one = unwrap(Operand(value=k, axes=_KEYS), wanted=_KEYS, head="h", scaled=False)
    other = unwrap(Operand(value=v, axes=_VALUES), wanted=_VALUES, head="h", scaled=False)
    Hkv, group = one.dim("h"), one.group
    if not isinstance(Hkv, int) or Hkv != other.dim("h") or not group == other.group > 1:
        return None
    return (one, other) if old.Hq == old.Hkv == Hkv * group else None


def _simpler_masking(
    mask: ir.Value | None, old: AttentionNode, dtype: ir.DataType, sizes: tuple[Size, Size]
) -> Masking | None:
    """What the mask becomes; None where it stays."""
    if mask is None or mask.shape is None or old.mask not in ("bool", "float"):
        return None
    term: Term = Bias(value=mask, factor=1.0, axes=_SCORES)
    if old.mask == "bool":
        term = Fill(value=mask, shown=True, fill=-float("inf"), axes=_SCORES)
    pairs = list(zip(mask.shape[-2:], sizes, strict=False))
    if any(isinstance(each, int) and isinstance(size, int) and each not in (1, size) for each, size in pairs):
        return None  # a mask of fewer keys than there are, which masks the others
    try:
        masking = decide_masking([term], dtype=dtype, sizes=sizes, guarded=False, order=_SCORES[-2:])
    except NotFused:
        return None
    # A mask that needs other queries beside it is no simpler.
    if not (masking.even or masking.exact or (masking.terms == (term,) and spans(masking.terms, sizes))):
        return masking
    if dtype == ir.DataType.FLOAT16 or not has_lowest(mask):
        return None
    return Masking(causal=False, terms=(term,), kind="float", notes=())


def repair_rotary(node: ir.Node, builder: NodeBuilder) -> list[str]:
    """Copy the tables of a `RotaryEmbedding` over the batch, if there is but one: what was changed."""
    x, tables = input_at(node, 0), {at: input_at(node, at) for at in (1, 2)}
    batch = sizes_of(x)
    if x is None or batch is None or batch[0] == 1 or input_at(node, 3) is not None:  # 3: the positions
        return []
    shapes = [sizes_of(table) or [] for table in tables.values()]
    if any(len(shape) != 3 or shape[0] != 1 for shape in shapes):
        return []
    rows = builder.size(x, 0)
    for at, table in tables.items():
        if table is not None:
            node.replace_input_with(at, builder.expand(table, rows, 1, 1, name="table"))
    if node.graph is not None:
        node.graph.insert_before(node, builder.live_nodes(each for each in node.inputs if each is not None))
    return ["the tables are copied over the batch"]


def axes_added_by_index(node: ir.Node) -> list[int] | None:
    """The axes of size 1 that a GatherND adds, where it takes a whole tensor in its order; else None.

    `transformers` reads a padding mask as `mask[b, k]` for all batch elements and keys.
    """
    indices, sizes, shape = made_by(input_at(node, 1), "Concat"), dims(node.inputs[0]), dims(node.outputs[0])
    if indices is None or not sizes or node.attributes.get_int("batch_dims", 0) != 0:
        return None
    if len(indices.inputs) != len(sizes) or indices.attributes.get_int("axis", 0) not in (-1, len(shape)):
        return None
    kept = list[int]()  # the axis of the result for each of the source
    for size, each in zip(sizes, indices.inputs, strict=True):
        index = input_at(made_by(each, "Unsqueeze"), 0)
        axis = next((at for at in range(len(shape)) if at not in kept and same_size(shape[at], size)), None)
        whole = len(dims(index)) == len(shape) and all(map(same_size, dims(index), shape))
        if axis is None or axis < max(kept, default=0) or not whole:
            return None
        if size != 1 and not counts_up(index, axis=axis - len(shape)):
            return None
        kept.append(axis)
    added = [at for at in range(len(shape)) if at not in kept]
    return added if all(shape[at] == 1 for at in added) else None


def share_tied_weights(model: ir.Model) -> None:
    """Replace every transposed copy of an embedding table by a Transpose of the table, in the model itself.

    Only constants with the transposed shape of a table are read, and compared number by number.
    """
    graph = model.graph
    constants = {
        value: tensor for value in graph.initializers.values() if (tensor := value.const_value) is not None
    }
    for table, numbers in constants.items():
        looked_up = any(is_op(use.node, "Gather") and use.idx == 0 for use in table.uses())
        for copy, tensor in constants.items() if looked_up and len(numbers.shape) == 2 else ():
            alike = copy.dtype == table.dtype and tuple(tensor.shape) == tuple(numbers.shape)[::-1]
            own = copy is not table and not copy.is_graph_output() and not copy.is_graph_input()
            if not alike or not own or not copy.is_initializer():
                continue
            one, other = tensor.numpy(), numbers.numpy().T
            # A row tells most others apart, without going through all of them.
            if not np.array_equal(one[:1], other[:1]) or not np.array_equal(one, other):
                continue
            name = f"{copy.name}/transposed"
            node = ir.node("Transpose", [table], {"perm": [1, 0]}, name=name)
            new = node.outputs[0]
            new.name, new.type, new.shape = name, copy.type, copy.shape
            copy.replace_all_uses_with(new)
            graph.insert_before(graph[0], node)
            del graph.initializers[str(copy.name)]


# -- Masks that follow from constants ---------------------------------------------------------------


def fold_masks(model: ir.Model) -> None:
    """Make masks constants that follow from constants and from known sizes.

    TorchScript's exporter computes the sizes of a table of relative positions from those of an input, and
    TensorRT-RTX has no fused kernel for a mask that is computed, though from constants alone.
    """
    masks = [input_at(node, MASK) for node in model.graph if is_op(node, "Attention")]
    made = [each for each in dict.fromkeys(masks) if each is not None and _is_fixed(each)]
    if not made:
        return
    known, opset, taken = known_numbers(model), model.opset_imports.get("", 0), prefixes_in(model)
    found = [(mask, numbers) for mask in made if (numbers := folded(mask, known, opset)) is not None]
    for mask, numbers in found:
        name = f"{prefix_within(str(mask.name), taken)}/folded"
        replace_value(mask, new_initializer(model.graph, name, numbers, mask.dtype))
    if found:
        RemoveUnusedNodesPass()(model)


def _is_fixed(mask: ir.Value) -> bool:
    """Whether a mask of known sizes is computed, and from no input but for sizes."""
    sizes, node = sizes_of(mask) or [None], mask.producer()
    if node is None or is_op(node, "Constant") or not all(isinstance(each, int) for each in sizes):
        return False
    behind = list(nodes_behind([mask], lambda node: () if is_op(node, "Shape") else node.inputs))
    given = {each for node in behind if not is_op(node, "Shape") for each in node.inputs if each is not None}
    is_small = math.prod(map(int, sizes)) <= _MOST_IN_MASK  # type: ignore[arg-type]
    return is_small and all(each.producer() is not None or constant(each) is not None for each in given)
