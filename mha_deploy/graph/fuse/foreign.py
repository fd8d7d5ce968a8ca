"""Write ONNX Runtime's own operators in ONNX's, for the recognizer, the FP64 reference and TensorRT."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import onnx
import onnx_ir as ir

from mha_deploy.errors import DeployError
from mha_deploy.graph.fuse.values import equation_of, infer_sizes, name_inputs, same_dims, sizes_of
from mha_deploy.graph.ir import (
    HALVES,
    NodeBuilder,
    input_at,
    nodes_in,
    output_at,
    prefix_within,
    prefixes_in,
    rank,
    replace_node,
)
from mha_deploy.graph.roles import FUSED_MATMULS, ORT_DOMAIN
from mha_deploy.model.masking import ABSORBS_FLOAT32

_FLOATS = (*HALVES, ir.DataType.FLOAT)
_Writer = Callable[[ir.Node, NodeBuilder], Sequence[ir.Value | None] | None]
"""Writes a node: its results by position, None where one has no use; None where it cannot be written."""

# How a matrix is read, by whether it is transposed, and whether its rows come before the batch.
_LEFT: dict[tuple[int, ...], str] = {(0, 0): "...sd", (1, 0): "...ds", (0, 1): "s...d", (1, 1): "d...s"}
_RIGHT: dict[tuple[int, ...], str] = {(0, 0): "...dt", (1, 0): "...td", (0, 1): "d...t", (1, 1): "t...d"}


def without_fused_matmuls(model: ir.Model) -> list[ir.Node]:
    """Write matmuls as einsums, which need no number of axes, and give those.

    The number is not known before: ONNX's shape inference ends at the operators of others.
    """
    found = list[ir.Node]()
    pending = _own(model, FUSED_MATMULS)
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


def in_onnx_operators(model: ir.Model) -> ir.Model:
    """The model in ONNX's operators alone, of opset 18 or newer; the model itself where it has no others.

    Refused are operators of ONNX Runtime's own that are not written out, or not as they are used.
    """
    if not _not_of_onnx(model):
        return model
    work = model.clone()
    stated = {place: value.shape for place, value in _results(work)}
    unnamed = name_inputs(work)
    einsums = without_fused_matmuls(work)
    infer_sizes(work)
    without_attentions(work)
    _write_out(work, _AROUND_ATTENTION, "written")
    as_matmuls(einsums)
    if left := Counter(node.op_type for node in _not_of_onnx(work)):
        raise DeployError(
            "Some operators of ONNX Runtime's own, or uses of them, cannot be written in ONNX's.",
            got=", ".join(f"{count} {name}" for name, count in sorted(left.items())),
            hint="the file that ONNX Runtime's optimizer was given, or what it writes without these fusions",
        )
    for place, value in _results(work):
        value.shape = stated.get(place)  # inferred sizes may have names that only this pass knows
    for value, shape in unnamed.items():
        value.shape = shape
    work.opset_imports.pop(ORT_DOMAIN, None)
    return work


def _results(model: ir.Model) -> Iterator[tuple[tuple[int, str | None], ir.Value]]:
    """What nodes compute, with its name and a number for the graph that it is in."""
    for node in nodes_in(model.graph):
        yield from (((id(node.graph), value.name), value) for value in node.outputs)


def _not_of_onnx(model: ir.Model) -> list[ir.Node]:
    """The nodes of ONNX Runtime's domains; it has some of its operators in that of ONNX, too."""
    return [
        node
        for node in nodes_in(model.graph)
        if node.domain.split(".")[:2] == ORT_DOMAIN.split(".")
        or (node.domain == "" and not onnx.defs.has(node.op_type))
    ]


def without_attentions(model: ir.Model) -> bool:
    """Write attentions out, as matmuls and a softmax, where their inputs say what they compute; if any."""
    return _write_out(model, _ATTENTIONS, "attention")


def _write_out(model: ir.Model, writers: Mapping[str, _Writer], name: str) -> bool:
    pending = _own(model, writers)
    prefix = prefix_within(name, prefixes_in(model)) if pending else ""
    changed = False
    for at, node in enumerate(pending, 1):
        builder = NodeBuilder(f"{prefix}/{at}")
        made = dict(enumerate(writers[node.op_type](node, builder) or ()))
        results = {at: value for at, value in made.items() if value is not None}
        needed = {at for at, each in enumerate(node.outputs) if each.uses() or each.is_graph_output()}
        if not results or not needed <= results.keys():
            builder.live_nodes(())
            continue
        replace_node(node, builder, results)
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
    lengths = [(sizes_of(each) or [None, None])[1:2] for each in operands[:2]]
    if node.attributes.get_int("unidirectional", 0) and not same_dims(*lengths):
        return None  # runtimes differ in which keys come after a query
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


_ATTENTIONS: Mapping[str, _Writer] = {"MultiHeadAttention": _multi_head, "Attention": _projected}


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
    if padding is not None and rank(padding) not in (2, 3) and not counted:
        return None
    hidden = node.attributes.get_float("mask_filter_value", -10000.0)
    # ONNX Runtime adds it in FP32: FP16 cannot hold all such numbers, and those that it holds absorb scores.
    kind = ir.DataType.FLOAT if padding is not None and dtype in HALVES else dtype
    added = added if added is None or kind == dtype else builder.cast(added, kind)
    q, k, v = (builder.transpose(builder.reshape(each, 0, 0, heads, -1), 0, 2, 1, 3) for each in operands)
    k, v = (
        each if before is None else builder.op("Concat", before, each, axis=2)
        for before, each in zip(past, (k, v), strict=True)
    )
    scale = node.attributes.get_float("scale", 0.0) or 1.0 / math.sqrt(width // heads)
    scores = builder.op("MatMul", q, builder.transpose(k, 0, 1, 3, 2))
    scores = builder.op("Mul", scores, builder.constant(scale, dtype))
    scores = scores if kind == dtype else builder.cast(scores, kind)
    if padding is not None:
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
        bias = builder.op("Where", shown, builder.constant(0.0, kind), builder.constant(hidden, kind))
        bias = builder.unsqueeze(bias, *((1,) if rank(padding) == 3 else (1, 2)))
        scores = builder.op("Add", scores, bias)
    scores = scores if added is None else builder.op("Add", scores, added)
    if node.attributes.get_int("unidirectional", 0):
        rows, keys = (builder.op("Shape", each, start=2, end=3) for each in (q, k))
        indices = builder.op("Range", *_range(builder.op("Sub", keys, rows), keys, builder))
        columns = builder.op("Range", *_range(builder.ints(0), keys, builder))
        shown = builder.op("LessOrEqual", columns, builder.unsqueeze(indices, 1))
        # Where all keys up to a query are padding, so low a number hides them as much as those after it.
        future = float(kind.min) if padding is not None and hidden <= ABSORBS_FLOAT32 else -math.inf
        scores = builder.op("Where", shown, scores, builder.constant(future, kind))
    weights = builder.op("Softmax", scores, axis=-1)
    result = builder.op("MatMul", weights if kind == dtype else builder.cast(weights, dtype), v)
    return builder.reshape(builder.transpose(result, 0, 2, 1, 3), 0, 0, -1), k, v


def _range(start: ir.Value, end: ir.Value, builder: NodeBuilder) -> tuple[ir.Value, ...]:
    one = builder.constant(1, ir.DataType.INT64)
    return builder.op("Squeeze", start), builder.op("Squeeze", end), one


# -- Around attention: norms, activations and embeddings -------------------------------------------


def _type_of(value: ir.Value | None) -> ir.DataType | None:
    return None if value is None or value.dtype not in _FLOATS else value.dtype


def _normalized(node: ir.Node, x: ir.Value, at: int, builder: NodeBuilder) -> ir.Value:
    """A LayerNormalization over the last axis, whose scale and bias are inputs of the node from `at` on."""
    factors = [each for each in (input_at(node, at), input_at(node, at + 1)) if each is not None]
    return builder.op("LayerNormalization", x, *factors, epsilon=_epsilon(node))


def _epsilon(node: ir.Node) -> float:
    return node.attributes.get_float("epsilon", 1e-12)


def _skip_norm(node: ir.Node, builder: NodeBuilder) -> Sequence[ir.Value | None]:
    """`SkipLayerNormalization`: the norm of a sum, and the sum."""
    summed = _sum_of(node, (0, 1, 4), builder)
    return _normalized(node, summed, 2, builder), None, None, summed


def _skip_rms_norm(node: ir.Node, builder: NodeBuilder) -> Sequence[ir.Value | None] | None:
    """`SkipSimplifiedLayerNormalization`: the same without a mean, in FP32."""
    summed, dtype = _sum_of(node, (0, 1, 3), builder), _type_of(input_at(node, 0))
    if dtype is None:
        return None
    wide = summed if dtype == ir.DataType.FLOAT else builder.cast(summed, ir.DataType.FLOAT)
    square = builder.op("ReduceMean", builder.op("Mul", wide, wide), builder.ints(-1))
    root = builder.op("Sqrt", builder.op("Add", square, builder.constant(_epsilon(node), ir.DataType.FLOAT)))
    normal = builder.op("Div", wide, root)
    normal = normal if dtype == ir.DataType.FLOAT else builder.cast(normal, dtype)
    return builder.op("Mul", normal, node.inputs[2]), None, None, summed


def _sum_of(node: ir.Node, places: Iterable[int], builder: NodeBuilder) -> ir.Value:
    first, *others = (each for at in places if (each := input_at(node, at)) is not None)
    for each in others:
        first = builder.op("Add", first, each)
    return first


def _embedding(node: ir.Node, builder: NodeBuilder) -> Sequence[ir.Value | None] | None:
    """`EmbedLayerNormalization`: the norm, how many tokens each batch element has, and the sum."""
    ids, segments, words, places, kinds = (input_at(node, at) for at in range(5))
    mask, positions = input_at(node, 7), input_at(node, 8)
    if (segments is None) != (kinds is None) or ids is None or words is None:
        return None
    if positions is None:
        length = builder.op("Shape", ids, start=1, end=2)
        positions = builder.op("Range", *_range(builder.ints(0), length, builder))
    summed = builder.op("Add", builder.op("Gather", words, ids), builder.op("Gather", places, positions))
    if segments is not None:
        summed = builder.op("Add", summed, builder.op("Gather", kinds, segments))
    if mask is None:
        batch = builder.op("Shape", ids, start=0, end=1)
        count = builder.op("Expand", builder.constant(0, ir.DataType.INT32), batch)
    else:
        ones = builder.op("Equal", mask, builder.constant(1, ir.DataType.INT32))
        ones = builder.op("Cast", ones, to=int(ir.DataType.INT32))
        count = builder.op("ReduceSum", ones, builder.ints(1), keepdims=0)
    return _normalized(node, summed, 5, builder), count, summed


def _gelu(node: ir.Node, builder: NodeBuilder) -> Sequence[ir.Value] | None:
    """`Gelu` and `BiasGelu`, by the error function."""
    x, dtype = _sum_of(node, (0, 1), builder), _type_of(input_at(node, 0))
    if dtype is None:
        return None
    inner = builder.op("Erf", builder.op("Mul", x, builder.constant(math.sqrt(0.5), dtype)))
    return (_gated(x, inner, dtype, builder),)


def _fast_gelu(node: ir.Node, builder: NodeBuilder) -> Sequence[ir.Value] | None:
    """`FastGelu`, by the tanh; it may have a bias."""
    x, dtype = _sum_of(node, (0, 1), builder), _type_of(input_at(node, 0))
    if dtype is None:
        return None
    cubic, linear = (builder.constant(each, dtype) for each in (0.044715, 1.0))
    inner = builder.op("Add", builder.op("Mul", builder.op("Mul", x, x), cubic), linear)
    inner = builder.op("Mul", builder.op("Mul", x, builder.constant(math.sqrt(2 / math.pi), dtype)), inner)
    return (_gated(x, builder.op("Tanh", inner), dtype, builder),)


def _gated(x: ir.Value, inner: ir.Value, dtype: ir.DataType, builder: NodeBuilder) -> ir.Value:
    half = builder.op("Mul", x, builder.constant(0.5, dtype))
    return builder.op("Mul", half, builder.op("Add", inner, builder.constant(1.0, dtype)))


def _quick_gelu(node: ir.Node, builder: NodeBuilder) -> Sequence[ir.Value] | None:
    """`QuickGelu`: x times a sigmoid."""
    x, alpha = input_at(node, 0), node.attributes.get_float("alpha", 1.702)
    dtype = _type_of(x)
    if x is None or dtype is None:
        return None
    inner = builder.op("Mul", x, builder.constant(alpha, dtype))
    return (builder.op("Mul", x, builder.op("Sigmoid", inner)),)


_AROUND_ATTENTION: Mapping[str, _Writer] = {
    "BiasGelu": _gelu,
    "EmbedLayerNormalization": _embedding,
    "FastGelu": _fast_gelu,
    "Gelu": _gelu,
    "QuickGelu": _quick_gelu,
    "SkipLayerNormalization": _skip_norm,
    "SkipSimplifiedLayerNormalization": _skip_rms_norm,
}
