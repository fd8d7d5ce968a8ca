"""Recognise attention in graphs that other people's modules export to, and write it as ONNX's `Attention`.

A softmax whose result comes to a matmul of two computed tensors is a candidate. From it the scores are
followed back to Q and K, and the weights forward to V. What stands between is either said by the node (scale,
masks, causal, softcap, precision, grouped heads) or the candidate stays as it is, and the report says why.
Attention that is no candidate is counted as well (`leftover`): a report is about all attention of a graph.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from mha_deploy.graph.attention_node import is_attention
from mha_deploy.graph.fuse.masks import ROWS_WITHOUT_KEYS, SAFE_SOFTMAX, Masks
from mha_deploy.graph.fuse.pattern import Pattern, leftover_attentions, read_pattern
from mha_deploy.graph.fuse.repair import is_rotary, repair_attention, repair_rotary, share_tied_weights
from mha_deploy.graph.fuse.scores import (
    Multiplier,
    Normalisation,
    Term,
    is_candidate,
    other_weights,
    softmax_at,
)
from mha_deploy.graph.fuse.sizes import name_sizes, product, sizes_of
from mha_deploy.graph.fuse.values import (
    FusedAttention,
    FuseReport,
    NoScores,
    NotExpressible,
    NotFused,
    Repair,
    UnfusedSoftmax,
    module_of,
    place_of,
    raise_opset,
)
from mha_deploy.graph.fuse.verify import Boundary, compare, cut_out, mask_stops
from mha_deploy.graph.fuse.write import write_attention
from mha_deploy.graph.ir import NodeBuilder, infer_shapes, names_in

__all__ = [
    "FuseReport",
    "FusedAttention",
    "NotFused",
    "Repair",
    "UnfusedSoftmax",
    "fuse_attention",
    "share_tied_weights",
]


def fuse_attention(model: ir.Model, *, verify: bool = True) -> tuple[ir.Model, FuseReport]:
    """Write every attention of a model as one `Attention` node, named by the module that it came from.

    Nodes that the exporter fused are brought into the same form: keys and values before they were repeated,
    the causal triangle as the attribute, masks that hide nothing left out.

    Args:
        model: The model, of opset 18 or newer; it is not changed.
        verify: Whether every new node is compared with the nodes that it stands for, on drawn inputs. Where
            they differ, or cannot be compared, the attention stays as it was.

    Returns:
        The new model, of opset 23 or newer, and what became of every candidate. Where nothing was fused, the
        new model is a copy.

    Raises:
        DeployError: The model cannot be written in opset 23.
    """
    failed: dict[int, str] = {}
    checks: dict[str, _Check] | None = {} if verify else None
    while True:
        work = model.clone()
        if work.functions:
            InlinePass()(work)
        infer_shapes(work)
        name_sizes(work)
        fusion = _Fusion(work, failed, checks)
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


@dataclass(frozen=True, kw_only=True)
class _Check:
    """What the comparison of a structure found.

    Args:
        reason: Why it is left as it was; None where both are equal.
        notes: What differs on purpose.
    """

    reason: str | None
    notes: tuple[str, ...] = ()


def _failure(error: Exception) -> str:
    if isinstance(error, _Differs):
        return str(error)
    return f"The recogniser failed on it: {type(error).__name__}: {' '.join(str(error).split())}"


class _Differs(Exception):
    """A node was written, in part or as a whole, and must not be kept."""


class _Fusion:
    """What became of the nodes of a model.

    Args:
        model: The model; it is changed.
        failed: Nodes that are left as they are, by their number in the order of the graph, with the reason.
        checks: The comparisons so far, by structure; None where nothing is compared.
    """

    def __init__(self, model: ir.Model, failed: Mapping[int, str], checks: dict[str, _Check] | None) -> None:
        self._model, self._failed, self._checks = model, failed, checks
        # Every beginning of a name before a slash: new names must not begin like others.
        self._taken = {name[: at.start()] for name in names_in(model) for at in re.finditer("/", name)}
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
        for node in self._model.graph.all_nodes():
            if other_weights(node):
                what = (
                    f"{node.op_type} stands in the place of the softmax; Attention has none but the softmax."
                )
                self._unfused[node] = _left(node, NotExpressible(what))
        order = {node: index for index, node in enumerate(self._model.graph.all_nodes())}
        self._unfused = dict(sorted(self._unfused.items(), key=lambda item: order[item[0]]))

    def _visit(self, node: ir.Node, failed: str | None) -> None:
        """Fuse around a softmax, or repair a node that the exporter fused.

        Args:
            node: The node.
            failed: Why it is left as it is; None where it was not tried.
        """
        softmax = softmax_at(node)
        if softmax is not None and is_candidate(softmax):
            try:
                if failed is not None:
                    raise NotFused(failed)
                self._fuse(softmax)
            except NotFused as refusal:
                self._unfused[node] = _left(node, refusal)
        elif is_attention(node):
            self._keep(node, failed)
        elif is_rotary(node):
            name = node.name or module_of(node)
            if failed is not None:
                self._note(name, [f"left as it was. {failed}"])
            else:
                self._note(name, repair_rotary(node, NodeBuilder(self._free(name))))

    def _fuse(self, softmax: Normalisation) -> None:
        pattern = _read(softmax)
        builder = NodeBuilder(self._free(module_of(softmax.node)))
        record = _record(pattern, builder.prefix)
        if self._checks is None:
            self._write(pattern, builder)
        else:
            notes = self._write_verified(pattern, builder, self._checks)
            record = replace(record, notes=tuple(dict.fromkeys((*record.notes, *notes))), verified=True)
        self._fused.append(record)
        self._layers.append(record.name)

    def _write_verified(
        self, pattern: Pattern, builder: NodeBuilder, checks: dict[str, _Check]
    ) -> tuple[str, ...]:
        """Write an attention, compare it with its original, and return what differs on purpose.

        Raises:
            NotFused: Its structure is known to differ, and nothing was written.
            _Differs: It was written, and differs.
        """
        border = _boundary(pattern)
        old = cut_out(pattern.last.outputs[0], border, checks)
        known = checks.get(old.key)
        if known is not None and known.reason is not None:
            raise NotFused(known.reason)
        if known is None:
            try:
                result = write_attention(pattern, builder, self._masks)
                emptied = compare(old, cut_out(result, border), border, self._model.opset_imports.get("", 1))
                known = _Check(reason=None, notes=(ROWS_WITHOUT_KEYS,) if emptied else ())
            except NotFused as refusal:
                known = _Check(reason=refusal.in_one_line)
            checks[old.key] = known
        else:
            self._write(pattern, builder)
        if known.reason is not None:
            raise _Differs(known.reason)
        return known.notes

    def _write(self, pattern: Pattern, builder: NodeBuilder) -> None:
        """Write an attention; where that is refused half-way, the model is lost."""
        try:
            write_attention(pattern, builder, self._masks)
        except NotFused as refusal:
            raise _Differs(refusal.in_one_line) from refusal

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
            builder = NodeBuilder(self._free(name))
            self._note(node.name, repair_attention(node, builder, self._masks))
        self._already.append(node.name)
        self._layers.append(node.name)

    def _free(self, name: str) -> str:
        """A prefix that no other name has."""
        prefix, count = name, 1
        while prefix in self._taken:
            count += 1
            prefix = f"{name}_{count}"
        self._taken.add(prefix)
        return prefix

    def _note(self, name: str, changes: list[str]) -> None:
        if changes:
            self._repairs.append(Repair(name=name, changes=tuple(changes)))


def _read(softmax: Normalisation) -> Pattern:
    """The attention around a softmax; whatever fails, it is not fused."""
    try:
        return read_pattern(softmax)
    except NotFused:
        raise
    except Exception as error:
        raise NotFused(_failure(error)) from error


def _reason(softmax: ir.Node) -> NotFused:
    """Why a softmax that is certainly part of an attention is no candidate."""
    found = softmax_at(softmax)
    try:
        if found is not None:
            _read(found)
    except NoScores:
        return NotFused("What stands between the matmul of Q and K and the softmax is not recognised.")
    except NotFused as refusal:
        return refusal
    return NotFused("What stands between the softmax and the matmul with V is not recognised.")


def _boundary(pattern: Pattern) -> Boundary:
    """What is drawn to compare an attention with its original: Q, K, V and the masks."""
    letters, operands = pattern.letters, (pattern.q, pattern.k, pattern.v)
    masks = [term.tensor for term in pattern.masking.terms]
    tensors = [*pattern.masking.terms, *pattern.multipliers]
    named = [(each.value, each.axes) for each in operands]
    named += [(_tensor(each), each.axes[-len(_tensor(each).shape or ()) :]) for each in tensors]
    named = [(value, axes) for value, axes in named if value.shape]
    dims = {}
    for value, axes in named:
        known = zip(axes, sizes_of(value) or (), strict=False)
        dims[str(value.name)] = tuple(
            product(pattern.sizes.get(letter) or letter for letter in axis) or axis if size is None else size
            for axis, size in known
        )
    depth = pattern.q.dim(letters.size)
    width = depth if isinstance(depth, int) else 8
    spread = (2.0 / (pattern.scale * math.sqrt(width))) ** 0.5
    return Boundary(
        stops=frozenset((*(each.value for each in operands), *mask_stops(masks))),
        dims=dims,
        spread={
            str(each.value.name): amount for each, amount in zip(operands, (spread, spread, 1.0), strict=True)
        },
        guarded=SAFE_SOFTMAX in pattern.masking.notes,
    )


def _tensor(term: Term | Multiplier) -> ir.Value:
    return term.value if isinstance(term, Multiplier) else term.tensor


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
    return UnfusedSoftmax(
        name=module_of(softmax),
        place=place_of(softmax),
        reason=refusal.in_one_line,
        recognised=isinstance(refusal, NotExpressible),
    )
