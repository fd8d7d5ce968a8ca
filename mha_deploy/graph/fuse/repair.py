"""Nodes that an exporter wrote, in the canonical form: heads, rotary embedding, shared weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mha_deploy.graph.attention_node import MASK, NONPAD_KV_SEQLEN, PAST_KEY, AttentionNode, read_attention
from mha_deploy.graph.fuse.masks import Masking, Masks, decide_masking, spans
from mha_deploy.graph.fuse.scores import Bias, Fill, Operand, Term, unwrap
from mha_deploy.graph.fuse.values import NotFused, dims_of, dtype_of
from mha_deploy.graph.fuse.verify import Boundary, mask_stops
from mha_deploy.graph.fuse.write import laid_out
from mha_deploy.graph.ir import NodeBuilder, input_at, is_op

# -- Bring an `Attention` node that the exporter wrote into the canonical form ---------------------

_SCORES = ("b", "h", "s", "t")
_KEYS, _VALUES = ("b", "h", "t", "d"), ("b", "h", "t", "e")


@dataclass(frozen=True, kw_only=True)
class Repaired:
    """A plainer node, built beside the graph.

    Args:
        result: What stands for the result.
        before: The inputs of the old node.
        boundary: What is drawn to compare the two.
        changes: What is different, in words.
    """

    result: ir.Value
    before: tuple[ir.Value | None, ...]
    boundary: Boundary
    changes: list[str]


def repaired_attention(node: ir.Node, builder: NodeBuilder, masks: Masks) -> Repaired | None:
    """A simpler `Attention` node that computes the same; None where there is nothing to simplify.

    Args:
        node: The node. One that is not 4-D, or has a past, key lengths or other outputs, stays as it is.
        builder: Holds the new nodes.
        masks: The masks that were written for earlier ones.
    """
    facts = read_attention(node)
    if facts.rank != 4 or _has_more(node):
        return None
    inputs, attributes = list(node.inputs), dict(node.attributes)
    stops = [value for value in inputs[:MASK] if value is not None]
    changes = list[str]()
    shared = _shared_heads(node, facts)
    if shared is not None:
        inputs[1] = laid_out(shared[0], _KEYS, builder)
        inputs[2] = laid_out(shared[1], _VALUES, builder)
        stops[1:] = [each.value for each in shared]
        changes.append(f"K and V are not repeated: {shared[0].dim('h')} heads for {facts.Hq}")
    masking = _simpler_masking(node, facts)
    if masking is not None and (q := inputs[0]) is not None and (k := inputs[1]) is not None:
        inputs[MASK] = masks.write(
            masking,
            builder,
            dtype=dtype_of(q),
            order=_SCORES,
            sizes=_lengths(node),
            letters={},
            rows=(q, k),
            graph=node.graph,
        ).mask
        if masking.causal:
            attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
        changes += _mask_words(masking, facts)
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
    masked = [mask] if masking is None else [term.tensor for term in masking.terms]
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


def _shared_heads(node: ir.Node, facts: AttentionNode) -> tuple[Operand, Operand] | None:
    """K and V before their heads were repeated."""
    k, v = input_at(node, 1), input_at(node, 2)
    if k is None or v is None or dims_of(k) is None or dims_of(v) is None:
        return None
    one = unwrap(Operand(value=k, axes=_KEYS), wanted=_KEYS, head="h", scaled=False)
    other = unwrap(Operand(value=v, axes=_VALUES), wanted=_VALUES, head="h", scaled=False)
    Hkv = one.dim("h")
    same = one.group == other.group > 1 and isinstance(Hkv, int) and Hkv == other.dim("h")
    return (one, other) if same and facts.Hq == facts.Hkv == Hkv * one.group else None


def _lengths(node: ir.Node) -> tuple[int | ir.SymbolicDim, int | ir.SymbolicDim]:
    q, k = (dims_of(value) if value is not None else None for value in node.inputs[:2])
    return (q or (ir.SymbolicDim(None),) * 4)[2], (k or (ir.SymbolicDim(None),) * 4)[2]


def _simpler_masking(node: ir.Node, facts: AttentionNode) -> Masking | None:
    """What the mask becomes; None where it stays."""
    q, mask = input_at(node, 0), input_at(node, MASK)
    if q is None or mask is None or mask.shape is None or facts.mask not in ("bool", "float"):
        return None
    term: Term = Bias(value=mask, factor=1.0, axes=_SCORES)
    if facts.mask == "bool":
        term = Fill(condition=mask, shown=True, fill=-float("inf"), axes=_SCORES)
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


def _mask_words(masking: Masking, facts: AttentionNode) -> list[str]:
    words = []
    if masking.causal and not facts.is_causal:
        words.append("the causal triangle is the attribute")
    if masking.kind == "none":
        words.append("no mask is left")
    elif facts.mask == "float" and masking.kind == "bool":
        words.append("the mask is boolean")
    return words or ["the mask is written as one of queries and keys"]


# -- Repair rotary embeddings that the exporter fused with tables of one row for a batch of sev ----

_COS, _SIN, _POSITIONS = 1, 2, 3


def repair_rotary(node: ir.Node, builder: NodeBuilder) -> list[str]:
    """Copy the tables of a `RotaryEmbedding` over the batch, if there is but one.

    Returns:
        What was changed, in words.
    """
    x, cos, sin = (input_at(node, at) for at in (0, _COS, _SIN))
    if x is None or cos is None or sin is None or input_at(node, _POSITIONS) is not None:
        return []
    batch = dims_of(x)
    if batch is None or batch[0] == 1 or not all(_is_single(table) for table in (cos, sin)):
        return []
    rows = builder.size(x, 0)
    for at, table in ((_COS, cos), (_SIN, sin)):
        node.replace_input_with(at, builder.expand(table, rows, 1, 1, name="table"))
    if node.graph is not None:
        node.graph.insert_before(node, builder.live_nodes(each for each in node.inputs if each is not None))
    return ["the tables are copied over the batch"]


def _is_single(table: ir.Value) -> bool:
    dims = dims_of(table)
    return dims is not None and len(dims) == 3 and dims[0] == 1


# -- Keep a weight once that an embedding and an output projection share ---------------------------


def share_tied_weights(model: ir.Model) -> tuple[str, ...]:
    """Replace every turned copy of an embedding table by a Transpose of the table, in the model itself.

    Only constants with the turned shape of a table are read, and compared number by number.

    Args:
        model: The model; it is changed.

    Returns:
        The names of the constants that are gone.
    """
    gone = []
    for table in list(_tables(model.graph)):
        for copy in _turned_copies(model.graph, table):
            _replace(model.graph, table, copy)
            gone.append(str(copy.name))
    return tuple(gone)


def _tables(graph: ir.Graph) -> Iterator[ir.Value]:
    for value in graph.initializers.values():
        looked_up = any(is_op(use.node, "Gather") and use.idx == 0 for use in value.uses())
        if looked_up and value.const_value is not None and len(value.const_value.shape) == 2:
            yield value


def _turned_copies(graph: ir.Graph, table: ir.Value) -> list[ir.Value]:
    shape, dtype = tuple(reversed(_shape_of(table))), table.dtype
    return [
        value
        for value in graph.initializers.values()
        if value is not table
        and value.dtype == dtype
        and _shape_of(value) == shape
        and not value.is_graph_output()
        and not value.is_graph_input()
        and _is_turned(value, table)
    ]


def _shape_of(value: ir.Value) -> tuple[object, ...]:
    return () if value.const_value is None else tuple(value.const_value.shape)


def _is_turned(value: ir.Value, table: ir.Value) -> bool:
    if value.const_value is None or table.const_value is None:
        return False
    one, other = value.const_value.numpy(), table.const_value.numpy().T
    # A row tells most others apart, without going through all of them.
    return np.array_equal(one[:1], other[:1]) and np.array_equal(one, other)


def _replace(graph: ir.Graph, table: ir.Value, copy: ir.Value) -> None:
    node = ir.node("Transpose", [table], {"perm": [1, 0]}, name=f"{copy.name}/turned")
    turned = node.outputs[0]
    turned.name, turned.type, turned.shape = f"{copy.name}/turned", copy.type, copy.shape
    copy.replace_all_uses_with(turned)
    graph.insert_before(graph[0], node)
    del graph.initializers[str(copy.name)]
