"""Recognise attention in graphs that other people's modules export to, and write it as ONNX's `Attention`.

A softmax whose result comes to a matmul of two computed tensors is a candidate. From it the scores are
followed back to Q and K, and the weights forward to V. What stands between is either said by the node (scale,
masks, causal, softcap, precision, grouped heads) or the candidate stays as it is, and the report says why.
Attention that is no candidate is counted as well (`leftover`): a report is about all attention of a graph.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from mha_deploy.graph.attention_node import is_attention
from mha_deploy.graph.fuse.masks import Masks
from mha_deploy.graph.fuse.pattern import Pattern, leftover_attentions, read_pattern
from mha_deploy.graph.fuse.repair import is_rotary, repair_attention, repair_rotary, share_tied_weights
from mha_deploy.graph.fuse.scores import is_candidate
from mha_deploy.graph.fuse.values import (
    FusedAttention,
    FuseReport,
    NoScores,
    NotFused,
    Repair,
    UnfusedSoftmax,
    is_op,
    module_of,
    place_of,
    raise_opset,
)
from mha_deploy.graph.fuse.write import write_attention
from mha_deploy.graph.ir import NodeBuilder, free_prefix, infer_shapes, names_in

__all__ = [
    "FuseReport",
    "FusedAttention",
    "NotFused",
    "Repair",
    "UnfusedSoftmax",
    "fuse_attention",
    "share_tied_weights",
]


def fuse_attention(model: ir.Model) -> tuple[ir.Model, FuseReport]:
    """Write every attention of a model as one `Attention` node, named by the module that it came from.

    Nodes that the exporter fused are brought into the same form: keys and values before they were repeated,
    the causal triangle as the attribute, masks that hide nothing left out.

    Args:
        model: The model, of opset 18 or newer; it is not changed.

    Returns:
        The new model, of opset 23 or newer, and what became of every candidate. Where nothing was fused, the
        new model is a copy.

    Raises:
        DeployError: The model cannot be written in opset 23.
    """
    failed: dict[int, str] = {}
    while True:
        work = model.clone()
        if work.functions:
            InlinePass()(work)
        infer_shapes(work)
        fusion = _Fusion(work, failed)
        try:
            fusion.run()
        except _HalfWritten as half:
            failed[half.index] = half.reason  # the copy is lost: once more, without that node
            continue
        if not fusion.changed:
            return model.clone(), fusion.report()
        return infer_shapes(raise_opset(work)), fusion.report()


class _HalfWritten(Exception):
    """A node could not be written, and the model may be neither the old nor the new one.

    Args:
        index: Number of the node in the order of the graph.
        error: What failed.
    """

    def __init__(self, index: int, error: Exception) -> None:
        super().__init__(index)
        self.index, self.reason = index, _failure(error)


def _failure(error: Exception) -> str:
    return f"The recogniser failed on it: {type(error).__name__}: {' '.join(str(error).split())}"


class _Fusion:
    """What became of the nodes of a model.

    Args:
        model: The model; it is changed.
        failed: Nodes that are left as they are, by their number in the order of the graph, with the reason.
    """

    def __init__(self, model: ir.Model, failed: Mapping[int, str]) -> None:
        self._model, self._failed = model, failed
        self._taken = names_in(model)
        self._masks = Masks()
        self._fused: list[FusedAttention] = []
        self._unfused: dict[ir.Node, UnfusedSoftmax] = {}
        self._already: list[str] = []
        self._repairs: list[Repair] = []
        self._layers: list[str] = []
        self._renamed = False

    @property
    def changed(self) -> bool:
        """Whether the model is another than before."""
        return bool(self._fused or self._repairs or self._renamed)

    def report(self) -> FuseReport:
        """What was found."""
        return FuseReport(
            fused=tuple(self._fused),
            unfused=tuple(self._unfused.values()),
            already=tuple(self._already),
            repairs=tuple(self._repairs),
            layers=tuple(self._layers),
        )

    def run(self) -> None:
        """Visit every node, and count what is left."""
        for index, node in enumerate(list(self._model.graph.all_nodes())):
            if node.graph is None:
                continue  # it was part of an attention
            try:
                self._visit(node, self._failed.get(index))
            except Exception as error:
                raise _HalfWritten(index, error) from error
        for softmax in leftover_attentions(self._model.graph):
            if softmax not in self._unfused:
                self._unfused[softmax] = _left(softmax, _reason(softmax))
        order = {node: index for index, node in enumerate(self._model.graph.all_nodes())}
        self._unfused = dict(sorted(self._unfused.items(), key=lambda item: order[item[0]]))

    def _visit(self, node: ir.Node, failed: str | None) -> None:
        """Fuse around a softmax, or repair a node that the exporter fused.

        Args:
            node: The node.
            failed: Why it is left as it is; None where it was not tried.
        """
        if is_op(node, "Softmax") and is_candidate(node):
            try:
                if failed is not None:
                    raise NotFused(failed)
                self._fuse(node)
            except NotFused as refusal:
                self._unfused[node] = _left(node, refusal.in_one_line)
        elif is_attention(node):
            self._keep(node, failed)
        elif is_rotary(node):
            name = node.name or module_of(node)
            if failed is not None:
                self._note(name, [f"left as it was. {failed}"])
            else:
                self._note(name, repair_rotary(node, NodeBuilder(free_prefix(name, self._taken))))

    def _fuse(self, softmax: ir.Node) -> None:
        pattern = _read(softmax)
        builder = NodeBuilder(free_prefix(module_of(softmax), self._taken))
        record = _record(pattern, builder.prefix)
        write_attention(pattern, builder, self._masks)
        self._fused.append(record)
        self._layers.append(record.name)

    def _keep(self, node: ir.Node, failed: str | None) -> None:
        """Name a node by its module, and write it as plainly as it can be."""
        name, count = module_of(node), 1
        while name in self._layers:
            count += 1
            name = f"{module_of(node)}_{count}"
        self._renamed = self._renamed or node.name not in (name, None, "")
        node.name = name
        if failed is not None:
            self._note(node.name, [f"left as it was. {failed}"])
        else:
            builder = NodeBuilder(free_prefix(name, self._taken))
            self._note(node.name, repair_attention(node, builder, self._masks))
        self._already.append(node.name)
        self._layers.append(node.name)

    def _note(self, name: str, changes: list[str]) -> None:
        if changes:
            self._repairs.append(Repair(name=name, changes=tuple(changes)))


def _read(softmax: ir.Node) -> Pattern:
    """The attention around a softmax; whatever fails, it is not fused."""
    try:
        return read_pattern(softmax)
    except NotFused:
        raise
    except Exception as error:
        raise NotFused(_failure(error)) from error


def _reason(softmax: ir.Node) -> str:
    """Why a softmax that is certainly part of an attention is no candidate."""
    try:
        _read(softmax)
    except NoScores:
        return "What stands between the matmul of Q and K and the softmax is not recognised."
    except NotFused as refusal:
        return refusal.in_one_line
    return "What stands between the softmax and the matmul with V is not recognised."


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


def _left(softmax: ir.Node, reason: str) -> UnfusedSoftmax:
    return UnfusedSoftmax(name=module_of(softmax), place=place_of(softmax), reason=reason)
