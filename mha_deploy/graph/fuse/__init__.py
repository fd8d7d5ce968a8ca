"""Recognize attention in graphs that other people's modules export to, and write it as ONNX's `Attention`.

A softmax whose result comes to a matmul of two computed tensors is a candidate. From it the scores are
followed back to Q and K, and the weights forward to V. What stands between becomes part of the node (scale,
masks, causal, softcap, precision, grouped heads), or the candidate stays as it is, and the report says why.
Attention that is no candidate is counted as well (`leftover.py`): a report is about all attention of a graph.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import onnx_ir as ir

from mha_deploy.graph.attention_node import is_attention
from mha_deploy.graph.fuse import foreign, rotary, values, write
from mha_deploy.graph.fuse.foreign import in_onnx_operators
from mha_deploy.graph.fuse.leftover import Leftovers
from mha_deploy.graph.fuse.mask_pattern import FULLY_MASKED, Masks
from mha_deploy.graph.fuse.pattern import (
    MAX_NEAR,
    Normalisation,
    Pattern,
    comes_to_matmul,
    read_attention,
    softmax_at,
    unknown_step,
)
from mha_deploy.graph.fuse.spelling import Spelling
from mha_deploy.graph.fuse.values import NoScores, NotExpressible, NotFused, from_old_opset, place_of
from mha_deploy.graph.fuse.verify import (
    EXTREME,
    FACTOR,
    Boundary,
    NewFails,
    NotVerified,
    Region,
    compare,
    mask_stops,
)
from mha_deploy.graph.fuse.write import share_tied_weights
from mha_deploy.graph.head_mixing import head_mixing
from mha_deploy.graph.ir import (
    NodeBuilder,
    beginnings,
    graphs_of,
    is_op,
    names_in,
    node_name,
    nodes_behind,
    nodes_in,
    paused_collections,
    replace_node,
)
from mha_deploy.graph.roles import MATMULS
from mha_deploy.graph.valid import inline_functions, refuse_invalid, sort

__all__ = ["FuseReport", "FusedAttention", "NotFused", "Repair", "UnfusedSoftmax"]
__all__ += ["from_old_opset", "fuse_attention", "in_onnx_operators", "place_of", "share_tied_weights"]

COMPUTED_AGAIN = "the scores are computed once more: the file uses them elsewhere, too"
UNBOUNDED = "scores beyond {:g} are not bounded as in the file"
ROTARY = "the rotary embedding, which the file writes out, is one node"
UNINDEXED = "an indexing that takes all entries in their order is left out"
# What makes Q and K, before any rotary embedding
_BEFORE_ROTARY = (*MATMULS, "Attention", "RotaryEmbedding")
EXPANDED = "Q, K and V are expanded to each other and to the mask: the file does not state equal sizes"


@dataclass(frozen=True, kw_only=True)
class FusedAttention:
    """One attention that is now one `Attention` node."""

    name: str  # name of the new node: the module it came from where the file states it, else its softmax
    place: str | None  # source file and line, where the file states them
    Hq: int  # query heads; 1 where the heads are part of the batch
    Hkv: int  # key/value heads
    D: values.Size  # head size of queries and keys
    scale: float  # factor on the scores, gathered from wherever it stood; Q is negated where it is negative
    mask: str  # `none`, `bool` or `float`
    causal: bool  # whether the triangle became the attribute `is_causal`
    softcap: float = 0.0  # bound of the scores; 0 for none
    weights: bool = False  # whether the weights are an output as well, since the file uses them elsewhere
    notes: tuple[str, ...] = ()  # what differs from the file, and where
    verified: bool = False  # whether it was compared with the original nodes on drawn inputs


@dataclass(frozen=True, kw_only=True)
class UnfusedSoftmax:
    """A normalization between two matmuls that was left as it is."""

    name: str  # the module it came from, else the softmax node
    place: str | None  # source file and line, where the file states them
    reason: str  # why it is not fused
    recognized: bool = False  # whether it was recognized, and ONNX's `Attention` cannot express it
    value: str = ""  # name of the weights, or of what stands in their place


@dataclass(frozen=True, kw_only=True)
class Repair:
    """A node of the exporter's that was brought into the canonical form."""

    name: str  # name of the node in the new model
    changes: tuple[str, ...]  # what was changed, in words


@dataclass(kw_only=True)
class FuseReport:
    """What became of every candidate of a graph."""

    fused: tuple[FusedAttention, ...] = ()  # attentions that are one node now
    unfused: tuple[UnfusedSoftmax, ...] = ()  # candidates that are as they were
    already: tuple[str, ...] = ()  # names, in the new model, of the `Attention` nodes that were there before
    repairs: tuple[Repair, ...] = ()  # what was changed about those, and about nodes around them
    layers: tuple[str, ...] = ()  # names of all `Attention` nodes of the new model in the order of execution

    @property
    def complete(self) -> bool:
        """Whether every candidate was fused."""
        return not self.unfused

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data for JSON."""
        return {"complete": self.complete, **asdict(self)}


def fuse_attention(
    model: ir.Model, *, verify: bool = True, again: Callable[[], ir.Model] | None = None
) -> tuple[ir.Model, FuseReport]:
    """Write every attention of a model as one `Attention` node, named by the module that it came from.

    Nodes that the exporter fused are brought into the same form: keys and values before they were repeated,
    the causal triangle as the attribute, masks that hide nothing left out.

    With `verify`, every new node is compared with the nodes that it stands for, on drawn inputs. Where they
    differ, or cannot be compared, the attention stays as it was. The model has opset 7 or newer and is not
    changed, the new one has 23 or newer; where nothing was fused, that of the model. With `again`, which
    gives the model once more, it is changed: a copy takes as long as other passes.
    """
    with paused_collections():
        copy = model if again is not None else model.clone()
        again = again or model.clone
        work = from_old_opset(inline_functions(copy))
        stated = [(each, each.type, each.shape) for node in nodes_in(work.graph) for each in node.outputs]
        unnamed = values.name_inputs(work)
        named = [each.shape if values.own_names(work) else None for each in work.graph.outputs]
        own = foreign.without_fused_matmuls(work)
        inferred = [values.infer_sizes(work)]
        written_out = foreign.without_attentions(work)
        inferred += [values.infer_sizes(work)] if written_out else []
        stated_results = [each.shape for each in work.graph.outputs]
        fixed = values.fix_sizes(work)
        inferred += [values.infer_sizes(work)] if fixed else []
        foreign.as_matmuls(own)
        fusion = _Fusion(work, verify, inferred)
        fusion.run()
        before: dict[ir.Value, ir.Shape | None] = {**fixed, **unnamed}
        before |= dict.fromkeys(value for each in inferred for value in each.entered)
        if not (fusion.report.fused or fusion.report.repairs or fusion.renamed):
            if work is not copy or own or written_out or fusion.respelled:
                return again(), fusion.report
            for value, kind, shape in stated:  # another copy would take as long as all this
                value.type, value.shape = kind, shape
            for value, shape in before.items():
                value.shape = shape
            return work, fusion.report
        values.raise_opset(work)
        inferred.append(values.infer_sizes(work, only_missing=True))
        write.fold_masks(work)
        for value, own_shape, shape in zip(work.graph.outputs, named, stated_results, strict=True):
            value.shape = own_shape if own_shape is not None else shape if fixed else value.shape
        for value, shape in before.items():
            value.shape = shape
        if any(each.of_run for each in inferred):
            values.forget_sizes_of_run(work)
        return refuse_invalid(work, again, "The graph with its attentions fused"), fusion.report


class _Fusion:
    """What became of the nodes of a model."""

    def __init__(self, model: ir.Model, verify: bool, inferred: Iterable[values.Inferred]) -> None:
        self._model, self._verify = model, verify
        self._of_run = any(each.of_run for each in inferred)  # whether sizes have names that only a run knows
        self._likely = {name: size for each in inferred for name, size in each.likely.items()}
        # Every beginning of a name before a slash: new names must not begin like others.
        given = (each for graph in graphs_of(model) for each in (*graph.inputs, *graph.initializers.values()))
        names = names_in(model) | {str(each.name) for each in given}
        self._prefixes = _Names(each for name in names if "/" in name for each in beginnings(name))
        self._layers = _Names()  # of attentions
        self._masks = Masks()
        # Why a structure is left as it was, or what differs on purpose.
        self._compared: dict[str, NotFused | tuple[str, ...]] = {}
        self._proved = set[ir.Value]()  # where rewrites end that were compared with the file
        self._loose = set[ir.Value]()  # constants that a fused attention read
        self.report, self.renamed = FuseReport(), False
        # What the report gets in the end: a tuple that grows would be copied each time.
        self._fused, self._repairs = list[FusedAttention](), list[Repair]()
        self._already, self._order = list[str](), list[str]()
        self._unindexed = list[str]()  # what is read before an index
        self._read_before_indices()
        self._spelling = Spelling(model, self._free_prefix("respelled"))
        self._obstacle = values.why_opset_stays(model)

    @property
    def respelled(self) -> bool:
        """Whether the nodes of the file were rewritten, even if they are back."""
        return bool(self._spelling or self._unindexed)

    def run(self) -> None:
        """Visit every node, and count what is left."""
        refusals = dict[ir.Node, NotFused]()
        for node in list(nodes_in(self._model.graph)):
            if node.graph is None:
                continue  # it was part of an attention
            if is_attention(node):
                self._simplify(node)
            elif is_op(node, "RotaryEmbedding"):
                name = node.name or values.module_of(node)
                self._note(name, write.repair_rotary(node, NodeBuilder(self._free_prefix(name))))
            elif (softmax := softmax_at(node)) is not None and comes_to_matmul(node.outputs[0]):
                try:
                    self._fuse(softmax)
                except NotFused as error:
                    refusals[node] = error
        write.remove_unused(self._loose, constants=True)
        sort(self._model.graph)  # what uses the weights, or shares the mask, stands before the matmul with V
        left = Leftovers(self._model.graph)
        refusals = {node: each for node, each in refusals.items() if node not in left.features}
        for node, why in left.found.items():
            if isinstance(refusals.get(node), NoScores | None):
                refusals[node] = why or _explain(node)
        refusals = {self._spelling.in_file(node): each for node, each in refusals.items()}
        if self._spelling:
            self._spelling.restore()
            sort(self._model.graph)
        self._write_rotary()
        for name in self._unindexed if self._order else ():
            self._note(name, [UNINDEXED])
        self.report.fused, self.report.repairs = tuple(self._fused), tuple(self._repairs)
        self.report.already, self.report.layers = tuple(self._already), tuple(self._order)
        self.report.unfused = tuple(
            UnfusedSoftmax(
                name=values.module_of(node),
                place=place_of(node),
                reason=head_mixing(node) or refusal.in_one_line,
                recognized=isinstance(refusal, NotExpressible),
                value=node.outputs[0].name or "",
            )
            for node in (nodes_in(self._model.graph) if refusals else ())
            if (refusal := refusals.get(node)) is not None
        )

    def _read_before_indices(self) -> None:
        """Let masks be read before an index that takes all of them in their order.

        It is gone for good, in front of the recognizer: TensorRT 8.6 computed NaN with such an index.
        """
        for node in [each for each in nodes_in(self._model.graph) if is_op(each, "GatherND")]:
            axes, before = write.axes_added_by_index(node), list(node.inputs)
            if axes is None or before[0] is None:
                continue
            # Attention has the name of the module itself.
            builder = NodeBuilder(self._free_prefix(f"{values.module_of(node)}_mask"))
            replace_node(node, builder, {0: builder.unsqueeze(before[0], *axes) if axes else before[0]})
            write.remove_unused(before, constants=True)
            self._unindexed.append(builder.prefix)

    def _fuse(self, softmax: Normalisation) -> None:
        if self._obstacle is not None:
            raise self._obstacle
        with _failures_as_refusals():
            pattern = read_attention(softmax)
            border = _boundary(pattern, self._spelling, self._likely)
        builder = NodeBuilder(self._free_prefix(values.module_of(softmax.node)))
        old = [pattern.last.node.outputs[0], *([pattern.weights.value] if pattern.weights else [])]
        with self._discarded_on_failure(builder):
            new = write.write_attention(pattern, builder, self._masks)
            notes = self._compare(old, new, border, softmax.node.outputs[0])
        self._loose |= write.insert_attention(pattern, builder, new, self._spelling.remember)
        if softmax.node.graph is not None:  # its shape is still read
            softmax.node.name = self._free_prefix(f"{builder.prefix}_of_file")
        wider = any(each.axis != pattern.letters.key for each in pattern.scores.wider)
        more = [EXPANDED] if pattern.batches or wider else []
        more += [COMPUTED_AGAIN] if pattern.scores.elsewhere else []
        more += [UNBOUNDED.format(pattern.scores.bound)] if pattern.scores.bound < math.inf else []
        record = FusedAttention(
            name=builder.prefix,
            place=place_of(pattern.softmax),
            Hq=pattern.heads[0],
            Hkv=pattern.heads[1],
            D=pattern.q.dim(pattern.letters.size),
            scale=pattern.scale,
            mask=pattern.masking.kind,
            causal=pattern.masking.causal,
            softcap=pattern.scores.softcap,
            weights=pattern.weights is not None,
            notes=tuple(dict.fromkeys((*pattern.masking.notes, *more, *notes))),
            verified=self._verify,
        )
        self._fused.append(record)
        self._add_layer(record.name)

    def _compare(
        self,
        old: list[ir.Value],
        new: list[ir.Value],
        border: Boundary,
        weights: ir.Value | None = None,
        *,
        in_file: bool = True,
    ) -> tuple[str, ...]:
        """What new nodes compute differently on purpose; refused where they do not compute the same.

        They are compared with the nodes of the file; where not `in_file`, with the graph as it is. Values
        that only a rewrite has are compared where it ends, once. What else it takes is drawn there, all but
        the weights.
        """
        if not self._verify:
            return ()
        border = replace(border, likely=self._likely)
        results, others = [] if in_file else list(old), dict[ir.Value, float | None]()
        for value in old if in_file else ():
            ends, taken = self._spelling.ends_of(value)
            proved = self._proved.issuperset(ends)
            results += [value] if proved else ends
            others |= {} if proved else {each: 1.0 for each in taken if each is not weights}
        if results != old:
            border = replace(border, drawn={**self._spelling.drawn_in_file(others), **border.drawn})
        # Sizes that a run computes may be far away, or not fit to what is drawn: then they are chosen too.
        trials = [border, replace(border, chosen=True)] if self._of_run else [border]
        try:
            region = Region(results, border, self._spelling, in_file=in_file)
        except NotVerified:
            border, trials = trials[-1], trials[-1:]
            region = Region(results, border, self._spelling, in_file=in_file)
        opset, instead = self._model.opset_imports.get("", 1), dict(zip(old, new, strict=True))
        for each in trials if region.key not in self._compared else ():
            try:
                with _failures_as_refusals():
                    one = region
                    if each is not border:
                        one = Region(results, each, self._spelling, in_file=in_file)
                    other = Region(results, each, self._spelling, in_file=False, instead=instead)
                    filled = compare(one, other, each, opset)
                    self._compared[region.key] = (FULLY_MASKED,) if filled else ()
                    break
            except NotFused as refusal:
                self._compared[region.key] = self._compared.get(region.key, refusal)
                if not isinstance(refusal, NotVerified | NewFails):
                    break
        known = self._compared[region.key]
        if isinstance(known, NotFused):
            raise known
        self._proved.update(results)
        return known

    @contextlib.contextmanager
    def _discarded_on_failure(self, builder: NodeBuilder) -> Iterator[None]:
        """Nodes are built beside the graph; where that fails, nothing of them is left."""
        try:
            with _failures_as_refusals():
                yield
        except NotFused:
            self._masks.forget(builder)
            builder.live_nodes(())
            raise

    def _simplify(self, node: ir.Node) -> None:
        """Name a node by its module, and write it as plainly as it can be."""
        name = self._layers.unused(values.module_of(node))
        self.renamed = self.renamed or node.name not in (name, None, "")
        node.name = name
        self._already.append(name)
        self._add_layer(name)
        builder = NodeBuilder(self._free_prefix(name))
        try:
            with self._discarded_on_failure(builder):
                repaired = write.simplify_attention(node, builder, self._masks)
                if repaired is None:
                    return
                result, border, changes = repaired
                self._compare([node.outputs[0]], [result], border)
        except NotFused as refusal:
            self._note(name, [f"left as it was: {refusal.in_one_line}"])
            return
        before = list(node.inputs)
        replace_node(node, builder, {0: result})
        self._loose |= write.remove_unused(before)
        self._note(name, changes)

    def _write_rotary(self) -> None:
        """Write rotary embedding of queries and keys as one node, the nearest to attention first."""
        columns, tables, loose = rotary.Columns(), rotary.Tables(), set[ir.Value]()
        attentions = [node for node in nodes_in(self._model.graph) if is_attention(node)]
        pending = [each for node in reversed(attentions) for each in node.inputs[:2]]
        seen, written = set[ir.Value](), False
        while pending:
            value = pending.pop()
            node = None if value is None or value in seen else value.producer()
            if value is None or node is None or node.graph is None or is_op(node, *_BEFORE_ROTARY):
                continue
            seen.add(value)
            found = columns.rotary_at(value)
            if found is None:
                pending += node.inputs
                continue
            pending.append(found.x)
            name = f"{values.module_of(node)}_rotary"
            builder = NodeBuilder(self._free_prefix(name))
            try:
                with self._discarded_on_failure(builder):
                    new, shared = rotary.write_rotary(found, builder, tables)
                    self._compare([value], [new], found.border, in_file=False)
            except NotFused as refusal:
                self._note(builder.prefix, [f"left as it was: {refusal.in_one_line}"])
                pending += node.inputs
                continue
            tables, before, written = shared, list(node.inputs), True
            replace_node(node, builder, {0: new})
            loose |= write.remove_unused(before)
            self._note(builder.prefix, [ROTARY])
        if written:
            write.remove_unused(loose, constants=True)
            sort(self._model.graph)

    def _add_layer(self, name: str) -> None:
        self._order.append(name)
        self._layers.taken.add(name)

    def _free_prefix(self, name: str) -> str:
        """A prefix that no other name has."""
        prefix = self._prefixes.unused(name)
        self._prefixes.taken.add(prefix)
        return prefix

    def _note(self, name: str, changes: list[str]) -> None:
        if changes:
            self._repairs.append(Repair(name=name, changes=tuple(changes)))


class _Names:
    """Names that are taken."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.taken, self._next = set(taken), dict[str, int]()

    def unused(self, name: str) -> str:
        """The name, with a number where it is taken; no number is tried twice."""
        if name not in self.taken:
            return name
        while f"{name}_{self._next.setdefault(name, 2)}" in self.taken:
            self._next[name] += 1
        return f"{name}_{self._next[name]}"


@contextlib.contextmanager
def _failures_as_refusals() -> Iterator[None]:
    """Whatever fails inside, the attention is not fused."""
    try:
        yield
    except NotFused:
        raise
    except Exception as error:
        raise NotFused(f"The recognizer failed on it: {values.in_words(error)}") from error


def _explain(node: ir.Node) -> NotFused:
    """Why a softmax that is certainly part of an attention is not fused."""
    softmax = softmax_at(node)
    if softmax is None:
        return NotFused(f"{node.domain}'s {node.op_type} is not ONNX's Softmax.")
    try:
        with _failures_as_refusals():
            read_attention(softmax)
    except NoScores:
        near = itertools.islice(nodes_behind([softmax.source]), MAX_NEAR)
        matmul = next((each for each in near if "MatMul" in each.op_type), None)
        if matmul is not None and not is_op(matmul, "MatMul"):
            who = f"{matmul.domain or 'ONNX'}'s {matmul.op_type}"
            return NotFused(f"{who} computes the scores; only ONNX's MatMul and Einsum are recognized.")
        step = unknown_step(softmax)
        if step is None:
            return NotFused("What stands between the matmul of Q and K and the softmax is not recognized.")
        return NotFused(f"{step.op_type} stands between the scores and the softmax.", got=node_name(step))
    except NotFused as refusal:
        return refusal
    return NotFused("It was not recognized.")


def _boundary(pattern: Pattern, spelling: Spelling, likely: Mapping[values.Size, values.Size]) -> Boundary:
    """What is drawn to compare an attention with its original: Q, K, V and the masks."""
    terms, scores = pattern.masking.terms, pattern.scores
    depth = pattern.q.dim(pattern.letters.size)
    root = math.sqrt(depth if isinstance(depth, int) else 8)
    spread = (2.0 / (abs(pattern.scale) * root)) ** 0.5
    drawn = mask_stops([*(term.value for term in terms), *([scores.sink.value] if scores.sink else [])])
    drawn.pop(pattern.first.node.outputs[0], None)  # a bias may be computed from the scores
    drawn |= {pattern.q.value: spread, pattern.k.value: spread, pattern.v.value: 1.0}
    drawn |= dict.fromkeys((each.value for each in scores.multipliers), FACTOR)
    drawn |= dict.fromkeys(scores.shifts, 1.0)
    dims = dict[ir.Value, tuple[int | str, ...]]()
    for each in (pattern.q, pattern.k, pattern.v, *terms, *scores.multipliers):
        known = [values.likely_size(size, likely) for size in values.sizes_of(each.value) or ()]
        if known and (each.value in drawn or not any(map(values.is_of_run, known))):
            dims[spelling.original(each.value)] = tuple(
                size if size is not None and not values.is_of_run(size) else pattern.size(axis)
                for axis, size in zip(each.axes[-len(known) :], known, strict=True)
            )
    extreme = min(EXTREME, scores.bound / (4.0 * root))  # no two of them are further apart than it
    return Boundary(drawn=spelling.drawn_in_file(drawn), dims=dims, extreme=extreme)
