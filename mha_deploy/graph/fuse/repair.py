"""Nodes that an exporter wrote, in the canonical form: heads, rotary embedding, shared weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mha_deploy.graph.attention_node import MASK, NONPAD_KV_SEQLEN, PAST_KEY, AttentionNode, read_attention
from mha_deploy.graph.fuse.masks import Masking, Masks, Place, decide_masking, spans
from mha_deploy.graph.fuse.scores import Bias, Fill, Operand, Term, unwrap
from mha_deploy.graph.fuse.values import NotFused, Size, dtype_of, sizes_of
from mha_deploy.graph.fuse.verify import Boundary, mask_stops
from mha_deploy.graph.fuse.write import rejoined
from mha_deploy.graph.ir import NodeBuilder, input_at, is_op

# -- Bring an `Attention` node that the exporter wrote into the canonical form ---------------------

_SCORES = ("b", "h", "s", "t")
_KEYS, _VALUES = ("b", "h", "t", "d"), ("b", "h", "t", "e")


@dataclass(frozen=True, kw_only=True)
class Repaired:
    """A plainer node, built beside the graph."""

    result: ir.Value  # what stands for the result
    before: tuple[ir.Value | None, ...]  # the inputs of the old node
    boundary: Boundary  # what is drawn to compare the two
    changes: list[str]  # what is different, in words


def repaired_attention(node: ir.Node, builder: NodeBuilder, masks: Masks) -> Repaired | None:
    """A simpler `Attention` node that computes the same; None where there is nothing to simplify."""
    old = read_attention(node)
    if old.rank != 4 or _has_more(node):
        return None
    inputs, attributes = list(node.inputs), dict(node.attributes)
    stops = [value for value in inputs[:MASK] if value is not None]
    changes = list[str]()
    shared = _shared_heads(node, old)
    if shared is not None:
        for at, each, order in zip((1, 2), shared, (_KEYS, _VALUES), strict=True):
            inputs[at] = rejoined(each.value, each.axes, order, each.sizes, builder)
        stops[1:] = [each.value for each in shared]
        changes.append(f"K and V are not repeated: {shared[0].dim('h')} heads for {old.Hq}")
    masking = _simpler_masking(node, old)
    if masking is not None and (q := inputs[0]) is not None and (k := inputs[1]) is not None:
        place = Place(order=_SCORES, sizes={}, rows=(q, k), builder=builder)
        inputs[MASK] = masks.write(masking, place, dtype_of(q), _lengths(node), node.graph).mask
        if masking.causal:
            attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
        changes += _mask_words(masking, old)
    if not changes:
        return None
    while inputs and inputs[-1] is None:
        inputs.pop()
    (result,) = builder.node("Attention", inputs, name=builder.prefix)
    new = result.producer()
    if new is not None:
        new.name, new.version = node.name, node.version
        new.attributes.update(attributes)
        new.metadata_props.update(node.metadata_props)
    mask = input_at(node, MASK)
    masked = [mask] if masking is None else [term.value for term in masking.terms]
    drawn = mask_stops(each for each in masked if each is not None) | dict.fromkeys(stops, 1.0)
    boundary = Boundary(
        stops=frozenset(drawn),
        dims={},
        spread={str(value.name): amount for value, amount in drawn.items() if amount is not None},
    )
    return Repaired(result=result, before=tuple(node.inputs), boundary=boundary, changes=changes)


def _has_more(node: ir.Node) -> bool:
    given = any(input_at(node, at) is not None for at in range(PAST_KEY, NONPAD_KV_SEQLEN + 1))
    used = [value for value in node.outputs[1:] if value.uses() or value.is_graph_output()]
    return given or bool(used)


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


def _lengths(node: ir.Node) -> tuple[Size, Size]:
    q, k = (sizes_of(value) for value in node.inputs[:2])
    return (q or [None] * 4)[2], (k or [None] * 4)[2]


def _simpler_masking(node: ir.Node, old: AttentionNode) -> Masking | None:
    """What the mask becomes; None where it stays."""
    q, mask = input_at(node, 0), input_at(node, MASK)
    if q is None or mask is None or mask.shape is None or old.mask not in ("bool", "float"):
        return None
    term: Term = Bias(value=mask, factor=1.0, axes=_SCORES)
    if old.mask == "bool":
        term = Fill(value=mask, shown=True, fill=-float("inf"), axes=_SCORES)
    sizes = _lengths(node)
    fixed = [
        (each, size) for each, size in zip(mask.shape[-2:], sizes, strict=False) if isinstance(each, int)
    ]
    if any(each != 1 and isinstance(size, int) and each != size for each, size in fixed):
        return None  # a mask of fewer keys than there are, which masks the others
    try:
        masking = decide_masking([term], dtype=dtype_of(q), sizes=sizes, guarded=False, order=_SCORES[-2:])
    except NotFused:
        return None
    return None if masking.terms == (term,) and spans(masking.terms, sizes) else masking


def _mask_words(masking: Masking, old: AttentionNode) -> list[str]:
    words = []
    if masking.causal and not old.is_causal:
        words.append("the causal triangle is the attribute")
    if masking.kind == "none":
        words.append("no mask is left")
    elif old.mask == "float" and masking.kind == "bool":
        words.append("the mask is boolean")
    return words or ["the mask is written as one of queries and keys"]


# -- Repair rotary embeddings whose tables have one row for a batch of several ---------------------

_COS, _SIN, _POSITIONS = 1, 2, 3


def repair_rotary(node: ir.Node, builder: NodeBuilder) -> list[str]:
    """Copy the tables of a `RotaryEmbedding` over the batch, if there is but one.

    Returns:
        What was changed, in words.
    """
    x, cos, sin = (input_at(node, at) for at in (0, _COS, _SIN))
    if x is None or cos is None or sin is None or input_at(node, _POSITIONS) is not None:
        return []
    batch = sizes_of(x)
    if batch is None or batch[0] == 1 or not all(_is_single(table) for table in (cos, sin)):
        return []
    rows = builder.size(x, 0)
    for at, table in ((_COS, cos), (_SIN, sin)):
        node.replace_input_with(at, builder.expand(table, rows, 1, 1, name="table"))
    if node.graph is not None:
        node.graph.insert_before(node, builder.live_nodes(each for each in node.inputs if each is not None))
    return ["the tables are copied over the batch"]


def _is_single(table: ir.Value) -> bool:
    dims = sizes_of(table)
    return dims is not None and len(dims) == 3 and dims[0] == 1


# -- Keep a weight once that an embedding and an output projection share ---------------------------


def share_tied_weights(model: ir.Model) -> tuple[str, ...]:
    """Replace every transposed copy of an embedding table by a Transpose of the table, in the model itself.

    Only constants with the transposed shape of a table are read, and compared number by number.

    Args:
        model: The model; it is changed.

    Returns:
        The names of the constants that are gone.
    """
    graph, gone = model.graph, list[str]()
    constants = [value for value in graph.initializers.values() if value.const_value is not None]
    tables = [
        value
        for value in constants
        if any(is_op(use.node, "Gather") and use.idx == 0 for use in value.uses())
        and len(_shape_of(value)) == 2
    ]
    for table in tables:
        for copy in constants:
            alike = copy.dtype == table.dtype and _shape_of(copy) == _shape_of(table)[::-1]
            own = copy is not table and not copy.is_graph_output() and not copy.is_graph_input()
            if not alike or not own or str(copy.name) in gone or not _is_transposed(copy, table):
                continue
            name = f"{copy.name}/transposed"
            node = ir.node("Transpose", [table], {"perm": [1, 0]}, name=name)
            new = node.outputs[0]
            new.name, new.type, new.shape = name, copy.type, copy.shape
            copy.replace_all_uses_with(new)
            graph.insert_before(graph[0], node)
            del graph.initializers[str(copy.name)]
            gone.append(str(copy.name))
    return tuple(gone)


def _shape_of(value: ir.Value) -> tuple[object, ...]:
    return () if value.const_value is None else tuple(value.const_value.shape)


def _is_transposed(value: ir.Value, table: ir.Value) -> bool:
    if value.const_value is None or table.const_value is None:
        return False
    one, other = value.const_value.numpy(), table.const_value.numpy().T
    # A row tells most others apart, without going through all of them.
    return np.array_equal(one[:1], other[:1]) and np.array_equal(one, other)
