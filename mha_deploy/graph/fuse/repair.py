"""Bring an `Attention` node that the exporter wrote into the canonical form.

PyTorch's exporter writes scaled_dot_product_attention as one node, with what the module put around it: keys
and values repeated for grouped heads, the causal triangle as part of a mask, masks that hide nothing. The
node computes the same without them.
"""

from __future__ import annotations

import onnx_ir as ir

from mha_deploy.graph.attention_node import (
    MASK,
    NONPAD_KV_SEQLEN,
    PAST_KEY,
    AttentionNode,
    input_at,
    read_attention,
)
from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.fuse.facts import dims_of, dtype_of
from mha_deploy.graph.fuse.mask_writer import Masks
from mha_deploy.graph.fuse.masks import Masking, decide_masking, spans
from mha_deploy.graph.fuse.operands import Operand, unwrap
from mha_deploy.graph.fuse.records import NotFused
from mha_deploy.graph.fuse.scores import Bias, Fill, Term
from mha_deploy.graph.fuse.write import laid_out, remove_unused

_SCORES = "bhst"
_KEYS, _VALUES = "bhtd", "bhte"


def repair_attention(node: ir.Node, builder: NodeBuilder, masks: Masks) -> list[str]:
    """Simplify an `Attention` node in its place.

    Args:
        node: The node. One that is not 4-D, or has a past, key lengths or other outputs, stays as it is.
        builder: Holds the new nodes; they are inserted before the node.
        masks: The masks that were written for earlier ones.

    Returns:
        What was changed, in words.
    """
    facts = read_attention(node)
    held = [value for value in node.inputs if value is not None]
    if facts.rank != 4 or _has_more(node):
        return []
    done = [*_share_heads(node, facts, builder), *_simplify_mask(node, facts, builder, masks)]
    if done and node.graph is not None:
        node.graph.insert_before(node, builder.live_nodes(each for each in node.inputs if each is not None))
        remove_unused(held)
    return done


def _has_more(node: ir.Node) -> bool:
    given = any(input_at(node, at) is not None for at in range(PAST_KEY, NONPAD_KV_SEQLEN + 1))
    used = [value for value in node.outputs[1:] if value.uses() or value.is_graph_output()]
    return given or bool(used)


def _share_heads(node: ir.Node, facts: AttentionNode, builder: NodeBuilder) -> list[str]:
    """Take K and V before their heads were repeated."""
    k, v = input_at(node, 1), input_at(node, 2)
    if k is None or v is None or dims_of(k) is None or dims_of(v) is None:
        return []
    one = unwrap(Operand(value=k, letters=_KEYS), wanted=_KEYS, head="h", scaled=False)
    other = unwrap(Operand(value=v, letters=_VALUES), wanted=_VALUES, head="h", scaled=False)
    Hkv = one.dim("h")
    same = one.group == other.group > 1 and isinstance(Hkv, int) and Hkv == other.dim("h")
    if not same or facts.Hq != facts.Hkv or facts.Hq != Hkv * one.group:
        return []
    node.replace_input_with(1, laid_out(one, _KEYS, builder))
    node.replace_input_with(2, laid_out(other, _VALUES, builder))
    return [f"K and V are not repeated: {Hkv} heads for {facts.Hq}"]


def _simplify_mask(node: ir.Node, facts: AttentionNode, builder: NodeBuilder, masks: Masks) -> list[str]:
    q, k, mask = (input_at(node, at) for at in (0, 1, MASK))
    if q is None or k is None or mask is None or facts.mask not in ("bool", "float"):
        return []
    if q.shape is None or k.shape is None or mask.shape is None:
        return []
    term: Term = Bias(value=mask, factor=1.0)
    if facts.mask == "bool":
        term = Fill(condition=mask, shown=True, fill=-float("inf"))
    sizes = (q.shape[2], k.shape[2])
    try:
        masking = decide_masking([term], dtype=dtype_of(q), sizes=sizes, guarded=False)
    except NotFused:
        return []
    if masking.terms == (term,) and spans(masking.terms, sizes):
        return []
    new = masks.write(
        masking,
        builder,
        dtype=dtype_of(q),
        layout=(_SCORES, _SCORES),
        sizes=sizes,
        rows=(q, k),
        graph=node.graph,
    )
    node.replace_input_with(MASK, new.mask)
    if masking.causal:
        node.attributes.add(ir.AttrInt64("is_causal", 1))
    return _mask_words(masking, facts)


def _mask_words(masking: Masking, facts: AttentionNode) -> list[str]:
    words = []
    if masking.causal and not facts.is_causal:
        words.append("the causal triangle is the attribute")
    if masking.kind == "none":
        words.append("no mask is left")
    elif facts.mask == "float" and masking.kind == "bool":
        words.append("the mask is boolean")
    return words or ["the mask is written as one of queries and keys"]
