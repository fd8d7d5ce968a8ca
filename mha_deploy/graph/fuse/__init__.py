"""Recognise attention in graphs that other people's modules export to, and write it as ONNX's `Attention`.

A softmax whose result comes to a product of two computed tensors is a candidate. From it the scores are
followed back to Q and K, and the weights forward to V. What stands between is either said by the node (scale,
masks, causal, softcap, precision, grouped heads) or the candidate stays as it is, and the report says why.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.fuse.facts import is_op
from mha_deploy.graph.fuse.opset import raise_opset
from mha_deploy.graph.fuse.origin import module_of, place_of
from mha_deploy.graph.fuse.pattern import Pattern, read_pattern
from mha_deploy.graph.fuse.records import FusedAttention, FuseReport, NotFused, UnfusedSoftmax
from mha_deploy.graph.fuse.weights import is_candidate
from mha_deploy.graph.fuse.write import write_attention
from mha_deploy.graph.lower.rewrite import free_prefix, infer_shapes, names_in

__all__ = ["FuseReport", "FusedAttention", "NotFused", "UnfusedSoftmax", "fuse_attention"]


def fuse_attention(model: ir.Model) -> tuple[ir.Model, FuseReport]:
    """Write every attention of a model as one `Attention` node.

    Args:
        model: The model, of opset 18 or newer; it is not changed.

    Returns:
        The new model, of opset 23 or newer, and what became of every candidate. Where nothing was fused, the
        new model is a copy.

    Raises:
        DeployError: The model cannot be written in opset 23.
    """
    already = tuple(node.name for node in attention_nodes(model))
    work = model.clone()
    if work.functions:
        InlinePass()(work)
    infer_shapes(work)
    fused: list[FusedAttention] = []
    unfused: list[UnfusedSoftmax] = []
    taken = names_in(work)
    for softmax in [node for node in work.graph.all_nodes() if is_op(node, "Softmax")]:
        if is_candidate(softmax):
            try:
                fused.append(_fuse(softmax, taken))
            except NotFused as refusal:
                unfused.append(_left(softmax, refusal))
    report = FuseReport(fused=tuple(fused), unfused=tuple(unfused), already=already)
    if not fused:
        return model.clone(), report
    return infer_shapes(raise_opset(work)), report


def _fuse(softmax: ir.Node, taken: set[str]) -> FusedAttention:
    pattern = read_pattern(softmax)
    builder = NodeBuilder(free_prefix(module_of(softmax), taken))
    record = _record(pattern, builder.prefix)
    write_attention(pattern, builder)
    return record


def _record(pattern: Pattern, name: str) -> FusedAttention:
    size = pattern.q.dim(pattern.letters.size)
    return FusedAttention(
        name=name,
        place=place_of(pattern.softmax),
        Hq=pattern.Hq,
        Hkv=pattern.Hkv,
        D=size if isinstance(size, int) else size.value,
        scale=pattern.scale,
        mask=pattern.masking.kind,
        causal=pattern.masking.causal,
        softcap=pattern.softcap,
        notes=pattern.masking.notes,
    )


def _left(softmax: ir.Node, refusal: NotFused) -> UnfusedSoftmax:
    return UnfusedSoftmax(name=module_of(softmax), place=place_of(softmax), reason=refusal.in_one_line)
