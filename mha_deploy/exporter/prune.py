"""Fewer heads: which ones a model can do without on the user's data, and the model without them.

A head is removed with its slices of the Q, K, V and output projections: GEMMs and attention become smaller.
What it contributed is taken over by the remaining head that is most like it, as far as a factor can: of two
equal heads one goes without loss. Where several query heads share a key/value head they go together.

Key/value heads can also be pooled: those that are most alike become their mean, which query heads share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from mha_deploy.bundle.manifest import LossLayer, LossPoint, LossRecord, largest_loss
from mha_deploy.bundle.sizes import PlannedCase
from mha_deploy.errors import DeployError, ExportError, LossExceeded
from mha_deploy.exporter.compress import (
    FEW,
    Compression,
    Original,
    Samples,
    measure_loss,
    prepared,
    worst_loss,
)
from mha_deploy.exporter.file_program import Compute, FileNode, FileProgram, FileRounding, Inputs
from mha_deploy.exporter.flow import refuse_large_error
from mha_deploy.exporter.head_layout import in_plain_form
from mha_deploy.graph import attention_node as an
from mha_deploy.graph.attention_node import is_attention, read_attention
from mha_deploy.graph.fuse import fuse_attention
from mha_deploy.graph.ir import (
    NodeBuilder,
    constant,
    dims,
    infer_shapes,
    input_at,
    input_with,
    is_op,
    made_by,
    new_initializer,
    nodes_behind,
    part_of,
    perm,
    prefix_within,
    prefixes_in,
    rank,
    replace_node,
)
from mha_deploy.graph.mixed_precision import TYPE_BLIND
from mha_deploy.options import OnName, Step, silent
from mha_deploy.runtime.user_code import graph_code
from mha_deploy.runtime.user_data import Metric
from mha_deploy.text import part_title

AUTO_HEADS = "auto"
KV_HEADS = "kv-heads"
_SAME = 1e-4  # new weights are rounded to the type of the graph
_HINT = "Q, K and V from GEMMs with constant weights, [B, S, heads * size], and one output projection"


# -- The heads of a graph ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _HeadColumns:
    """Columns of a GEMM that become queries, keys or values."""

    source: ir.Value
    weight: np.ndarray  # [in, heads * size]
    bias: np.ndarray | None
    rotary: ir.Node | None
    entry: ir.Value | None = None  # where they are [B, heads, S, size] first, if they are


@dataclass(frozen=True)
class _PrunableHeads:
    """An attention whose heads can be removed."""

    name: str
    node: ir.Node
    Hq: int
    Hkv: int
    projections: tuple[_HeadColumns, _HeadColumns, _HeadColumns]
    output: ir.Node  # the GEMM behind it
    output_weight: np.ndarray

    @property
    def group(self) -> int:
        """How many query heads go together."""
        return self.Hq // self.Hkv


_CACHE_HINT = "prune the model without its cache, then write the smaller one with a cache"


def _refused(node: ir.Node, why: str, hint: str = "") -> ExportError:
    return ExportError(f"The heads of {node.name} cannot be removed.", got=why, hint=hint or _HINT)


def _heads_of(node: ir.Node) -> _PrunableHeads:
    """Read an attention and its projections, or say what prevents that."""
    found = read_attention(node)
    if found.has_past or found.has_present or found.has_nonpad_kv_seqlen:
        raise _refused(node, "a KV cache, whose shape would change", _CACHE_HINT)
    if found.rank not in (3, 4) or not isinstance(found.Hq, int) or not isinstance(found.Hkv, int):
        raise _refused(node, f"inputs of rank {found.rank}")
    if found.has_qk_output:
        raise _refused(node, "its weights are an output")
    mask = input_at(node, an.MASK)
    if mask is not None and (rank(mask) or 0) > 2 and dims(mask)[-3] not in (1, None):
        raise _refused(node, "a mask for each head")
    result = node.outputs[0] if found.rank == 3 else _joined(node)
    uses = _users(result)
    weight = constant(input_at(uses[0], 1)) if len(uses) == 1 and uses[0].op_type == "MatMul" else None
    if weight is None or len(weight.shape) != 2 or result.is_graph_output():
        raise _refused(node, f"after it is {', '.join(each.op_type for each in uses) or 'an output'}")
    read = _projection if found.rank == 3 else _split_projection
    parts = [read(node, input_at(node, at)) for at in (an.Q, an.K, an.V)]
    return _PrunableHeads(
        str(node.name), node, found.Hq, found.Hkv, (parts[0], parts[1], parts[2]), uses[0], weight.numpy()
    )


_SPLIT = (0, 2, 1, 3)  # [B, S, heads, size] to [B, heads, S, size], and back
# What treats all heads alike, such as a rotary embedding that is written out.
_ALIKE = frozenset({"RotaryEmbedding", "Add", "Mul", "Sub", "Neg", "Slice", "Split", "Concat", "Cast"})
_ALIKE |= {"Identity", "RMSNormalization", "LayerNormalization"}


def _users(value: ir.Value) -> list[ir.Node]:
    """What reads the numbers of a value; its sizes are those of a Reshape that is written anew."""
    return [use.node for use in value.uses() if use.node.op_type not in TYPE_BLIND]


def _drop_views(model: ir.Model) -> ir.Model:
    """Drop what changes nothing: Identity, which exporters write for equal weights, and such a Reshape."""
    for node in model.graph:
        if node.op_type not in ("Identity", "Reshape") or node.outputs[0].is_graph_output():
            continue
        source, before, after = node.inputs[0], dims(node.inputs[0]), dims(node.outputs[0])
        is_same = node.op_type == "Identity" or (before and None not in before and before == after)
        if source is not None and is_same:
            node.outputs[0].replace_all_uses_with(source)
    return model


def _read_sizes_from_inputs(model: ir.Model) -> ir.Model:
    """Read sizes from inputs that have them by name: no GEMM is left for its sizes, as those of a mask."""
    taken = prefixes_in(model)
    for node in list(model.graph):
        wanted = _sizes_read(node)
        found = [input_with(model.graph, size) for size in wanted.flat]
        places = [each for each in found if each is not None]
        if not places or len(places) < len(found):
            continue
        b = NodeBuilder(prefix_within(str(node.name), taken))
        sizes = [b.size(*place) for place in places]
        value = b.shape_of(*sizes) if len(sizes) > 1 else b.as_tensor(sizes[0])
        replace_node(node, b, {0: value if wanted.ndim else b.op("Squeeze", value)})
    return model


_NO_SIZES = np.array([], object)


def _sizes_read(node: ir.Node) -> np.ndarray:
    """The sizes of a computed tensor that a node gives, of all axes or of some; empty for another node."""
    shape = node if is_op(node, "Shape") else made_by(input_at(node, 0), "Shape")
    source = input_at(shape, 0)
    if shape is None or source is None or source.is_graph_input():
        return _NO_SIZES
    begin, end = shape.attributes.get_int("start", 0), shape.attributes.get_int("end", None)
    sizes = np.array(dims(source)[begin:end], object)
    if node is shape:
        return sizes
    indices = constant(input_at(node, 1)) if is_op(node, "Gather") else None
    if indices is not None and len(sizes):
        return np.asarray(sizes.take(indices.numpy()), object)
    part = part_of(node.outputs[0]) if is_op(node, "Slice") else None
    return _NO_SIZES if part is None or part.end is None else sizes[part.begin : part.end]


def _joined(node: ir.Node) -> ir.Value:
    """The result of an attention of rank 4 as [B, S, heads * size]."""
    value = node.outputs[0]
    for kind in ("Transpose", "Reshape"):
        users = _users(value)
        if len(users) != 1 or users[0].op_type != kind or value.is_graph_output():
            raise _refused(node, f"after it is {', '.join(each.op_type for each in users) or 'an output'}")
        if kind == "Transpose" and perm(users[0]) != _SPLIT:
            raise _refused(node, f"{kind} {users[0].name} after it")
        value = users[0].outputs[0]
    return value


def _split_projection(node: ir.Node, value: ir.Value | None) -> _HeadColumns:
    """A projection whose heads are an axis of their own before attention."""

    def follow(each: ir.Node) -> list[ir.Value | None]:
        return list(each.inputs) if each.domain == "" and each.op_type in _ALIKE else []

    behind = list(nodes_behind([value], follow))
    if any(x is not None and x.is_graph_input() and rank(x) == 4 for each in behind for x in each.inputs):
        raise _refused(node, "a KV cache, whose shape would change")
    for each in behind:
        reshape = made_by(each.inputs[0], "Reshape") if each.op_type == "Transpose" else None
        if reshape is not None and perm(each) == _SPLIT and not each.outputs[0].is_graph_output():
            return replace(_projection(node, reshape.inputs[0]), entry=each.outputs[0])
    raise _refused(node, "heads that are not split by Reshape and Transpose")


def _projection(node: ir.Node, value: ir.Value | None) -> _HeadColumns:
    rotary = made_by(value, "RotaryEmbedding")
    value = value if rotary is None else rotary.inputs[0]
    value, factor = _scaled(value)
    columns, split = slice(None), made_by(value, "Split")
    if split is not None and value is not None:
        sizes = [dims(each)[-1] for each in split.outputs]
        last = split.attributes.get_int("axis", 0) in (-1, (rank(split.inputs[0]) or 0) - 1)
        if not last or not all(isinstance(each, int) for each in sizes):
            raise _refused(node, f"{split.op_type} {split.name} of unknown sizes")
        at = list(split.outputs).index(value)
        ends = np.cumsum([0, *sizes])  # type: ignore[list-item]
        columns, value = slice(int(ends[at]), int(ends[at + 1])), split.inputs[0]
    bias = None
    if (add := made_by(value, "Add")) is not None:
        held = [(constant(each), other) for each, other in zip(add.inputs, reversed(add.inputs), strict=True)]
        fits = [(tensor, other) for tensor, other in held if tensor is not None and len(tensor.shape) == 1]
        if not fits or fits[0][0] is None:
            raise _refused(node, f"{add.op_type} {add.name} before it")
        bias, value = _times(factor, fits[0][0].numpy()[columns]), fits[0][1]
    matmul = made_by(value, "MatMul")
    weight = constant(input_at(matmul, 1))
    if matmul is None or weight is None or len(weight.shape) != 2 or matmul.inputs[0] is None:
        before = None if value is None else value.producer()
        got = "an input of the model" if before is None else f"{before.op_type} {before.name} before it"
        raise _refused(node, got)
    return _HeadColumns(matmul.inputs[0], _times(factor, weight.numpy()[:, columns]), bias, rotary)


def _scaled(value: ir.Value | None) -> tuple[ir.Value | None, float]:
    """What is multiplied by one number, and the number: Whisper and BART scale their queries so."""
    mul = made_by(value, "Mul")
    for at, number in enumerate([constant(each) for each in mul.inputs] if mul is not None else ()):
        if mul is not None and number is not None and number.size == 1:
            return mul.inputs[1 - at], float(number.numpy().item())
    return value, 1.0


def _times(factor: float, array: np.ndarray) -> np.ndarray:
    return (array * factor).astype(array.dtype)


# -- The loss of removing heads ---------------------------------------------------------------------

Unit = tuple[str, int]
"""An attention by its name, and one of its key/value heads, with the query heads that share it."""


class _Gram(FileRounding):
    """Computes a graph in FP64 and adds up how alike the results of the heads of each attention are."""

    def __init__(self, heads: Mapping[str, _PrunableHeads], sums: dict[str, np.ndarray]) -> None:
        super().__init__()
        self._heads, self._sums = heads, sums

    def call(self, node: FileNode, run: Compute, inputs: Inputs) -> Any:
        """The outputs of one node."""
        outputs = super().call(node, run, inputs)
        if node.operator == "Attention" and (each := self._heads.get(node.name)) is not None:
            flat = _by_unit(outputs[0], each.Hkv).reshape(each.Hkv, -1)
            self._sums[each.name] = self._sums.get(each.name, 0.0) + flat @ flat.T
        return outputs


def _by_unit(array: np.ndarray, count: int) -> np.ndarray:
    """[B, S, heads * size] or [B, heads, S, size], with the key/value heads as the first axis."""
    if array.ndim == 4:
        return np.moveaxis(array.reshape(len(array), count, -1, *array.shape[2:]), 1, 0)
    return np.moveaxis(array.reshape(*array.shape[:-1], count, -1), -2, 0)


def _from_units(units: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.moveaxis(units, 0, 1 if len(shape) == 4 else -2).reshape(shape)


class _Removed(FileRounding):
    """Computes a graph in FP64 with some heads replaced by what others make of them."""

    def __init__(
        self, heads: Mapping[str, _PrunableHeads], partners: Mapping[str, Mapping[int, tuple[int, float]]]
    ) -> None:
        super().__init__()
        self._heads, self._partners = heads, partners

    def call(self, node: FileNode, run: Compute, inputs: Inputs) -> Any:
        """The outputs of one node."""
        outputs = super().call(node, run, inputs)
        partners = self._partners.get(node.name) if node.operator == "Attention" else None
        if not partners:
            return outputs
        units = _by_unit(outputs[0], self._heads[node.name].Hkv).copy()
        for unit, (partner, factor) in partners.items():
            units[unit] = factor * units[partner]
        return (_from_units(units, outputs[0].shape), *outputs[1:])


def _partners(
    gram: Mapping[str, np.ndarray], removed: Sequence[Unit]
) -> dict[str, dict[int, tuple[int, float]]]:
    """For every head that goes, the most alike of those that stay, and the factor that fits best."""
    found: dict[str, dict[int, tuple[int, float]]] = {}
    for name, unit in removed:
        products, gone = gram[name], {other for where, other in removed if where == name}
        kept = [other for other in range(len(products)) if other not in gone and products[other, other] > 0]
        best = max(kept, key=lambda other: products[unit, other] ** 2 / products[other, other], default=None)
        factor = 0.0 if best is None else float(products[unit, best] / products[best, best])
        found.setdefault(name, {})[unit] = (best or 0, factor)
    return found


# -- Which heads go ---------------------------------------------------------------------------------


def refuse_heads(
    found: Mapping[str, tuple[int, int]], *, heads: int | str | None = None, kv_heads: int | None = None
) -> None:
    """Refuse numbers of heads that attentions with so many (Hq, Hkv) cannot have, or have already."""
    if heads == AUTO_HEADS:
        return
    wanted, kind = (int(heads or 0), "heads") if kv_heads is None else (kv_heads, "key/value heads")
    for name, (query_heads, shared) in found.items():
        counts = range(1, shared + 1)
        if kv_heads is None:
            known = [query_heads // shared * count for count in counts]
        else:
            known = [count for count in counts if shared % count == 0]
        if wanted not in known:
            hint = f"one of {', '.join(map(str, known))}"
            raise DeployError(f"{name} cannot have so many {kind}.", got=wanted, hint=hint)
    if all(wanted == own[0 if kv_heads is None else 1] for own in found.values()):
        what = f"Every attention has so many {kind} already: the model would stay as it is."
        hint = f"fewer {kind}, or `mha-deploy export` for the model as it is"
        raise DeployError(what, got=wanted, hint=hint)


def prune(
    original: Original,
    heads: int | str,
    *,
    max_loss: float | None = None,
    data: Any = None,
    data_limit: int = 0,
    metric: Any = None,
    on_step: OnName = silent,
) -> Compression:
    """The model with so many query heads in each attention, or with as few as the loss permits."""
    figure = None if metric is None else Metric(metric)
    with graph_code(f"graph {original.name}"):
        original, found, samples = _opened(original, data, data_limit)
        refuse_heads(_counts(found), heads=heads)
        chosen_by, held_out, is_held_out = samples.split()
        program, gram = FileProgram(original.model), dict[str, np.ndarray]()
        few = list(islice(chosen_by, FEW))
        for sample in chosen_by:
            on_step(Step("heads", sample.name))
            program.run(sample.inputs, _Gram(found, gram), sample=sample.name)
        true = [program.run(sample.inputs, sample=sample.name) for sample in few]

        def loss(removed: Sequence[Unit]) -> float:
            partners = _partners(gram, removed)
            got = (program.run(sample.inputs, _Removed(found, partners)) for sample in few)
            return worst_loss(zip(true, got, strict=True))

        alone: dict[Unit, float] = {}
        for name, each in found.items():
            on_step(Step("sensitivity", name))
            alone |= {(name, unit): loss([(name, unit)]) for unit in range(each.Hkv)}
        order = sorted(alone, key=lambda unit: alone[unit])
        points: list[LossPoint] = []
        if heads == AUTO_HEADS:
            removed = _fewest(found, order, loss, float(max_loss or 0.0), points, gram)
        else:
            removed = _down_to(found, order, int(heads), gram)
        while True:  # what a few samples allow, others may not
            partners = _partners(gram, removed)
            model = _without(original.model, partners)
            outputs, _, judged, count = measure_loss(original.model, model, held_out, {}, figure, on_step)
            worst = largest_loss(outputs)
            if heads != AUTO_HEADS or not removed or max_loss is None or worst <= max_loss:
                break
            removed = removed[: min(len(removed) - 1, int(len(removed) * max_loss / worst))]
        if heads == AUTO_HEADS:
            chosen = LossPoint(
                compressed=len(removed), share=len(removed) / len(order), loss=worst, is_chosen=True
            )
            others = (each for each in points if each.compressed != len(removed))
            points = sorted([*others, chosen], key=lambda each: -each.compressed)
        smaller = FileProgram(model)
        for sample in few:  # the graph must be what was tried
            wanted = program.run(sample.inputs, _Removed(found, partners))
            got = smaller.run(sample.inputs)
            what = "The graph with fewer heads does not compute what was tried."
            refuse_large_error(sample.name, got, wanted, _SAME, what, "report this, with the model")
    record = LossRecord(
        what="heads",
        data=samples.title,
        samples=count,
        outside=dict(samples.outside),
        held_out=is_held_out,
        metric=judged,
        outputs=outputs,
        layers=[
            LossLayer(
                name=unit[0],
                heads=_heads_in(unit, found),
                is_compressed=unit in removed,
                relative_l2=None,
                sqnr_db=None,
                alone=alone[unit],
            )
            for unit in alone
        ],
        limit=max_loss,
        search=points,
    )
    if max_loss is not None and (record.worst > max_loss or not removed):
        least = part_title(order[0][0], _heads_in(order[0], found))
        raise LossExceeded(
            "No head can be removed within the allowed loss."
            if heads == AUTO_HEADS
            else "Removing this many heads exceeds the allowed loss.",
            got=f"{record.worst:.2g}, limit {max_loss:g}"
            if removed
            else f"{least} alone: {alone[order[0]]:.2g}, limit {max_loss:g}",
            hint="a larger --max-loss" if heads == AUTO_HEADS else "a larger --max-loss, or more heads",
        )
    return Compression(model=model, record=record)


def _opened(original: Original, data: Any, limit: int) -> tuple[Original, dict[str, _PrunableHeads], Samples]:
    """The model with fused attention, all its attentions with their projections, and its samples."""
    if original.spec.kv_cache is not None:
        raise ExportError(
            "The heads of a model with a KV cache cannot be removed.", got=original.name, hint=_CACHE_HINT
        )
    fused, _ = fuse_attention(original.model)
    model = _read_sizes_from_inputs(_drop_views(prepared(fused)))
    original = replace(original, model=_in_plain_form(original, model))
    found = {str(n.name): _heads_of(n) for n in original.model.graph if is_attention(n)}
    if not found:
        what = "No attention of the model is one Attention node."
        hint = "`mha-deploy fuse` lists what is not fused, and why"
        raise ExportError(what, got=original.name, hint=hint)
    given = original.samples if data is None else data
    return original, found, Samples(original=original, given=given, limit=limit)


def _in_plain_form(original: Original, model: ir.Model) -> ir.Model:
    """The model with the projections of its attentions where they are looked for, if that can be."""
    others = []
    for node in filter(is_attention, model.graph):
        try:
            _heads_of(node)
        except ExportError:
            others.append(str(node.name))
    if not others:
        return model
    axes = original.spec.axes.items()
    sizes = {name: min(axis.max, max(axis.min, 2 + at)) for at, (name, axis) in enumerate(axes)}
    inputs = original.draw(PlannedCase(name="layout", sizes=sizes))
    plain = in_plain_form(model, others, inputs)
    got, wanted = (FileProgram(each).run(inputs) for each in (plain, model))
    what = "The graph with separate projections does not compute the same."
    refuse_large_error("layout", got, wanted, _SAME, what, "report this, with the model")
    return plain


def _counts(found: Mapping[str, _PrunableHeads]) -> dict[str, tuple[int, int]]:
    return {name: (each.Hq, each.Hkv) for name, each in found.items()}


def _heads_in(unit: Unit, found: Mapping[str, _PrunableHeads]) -> tuple[int, int]:
    """The first and the last head of those that share a key/value head: they go together."""
    name, number = unit
    size = found[name].Hq // found[name].Hkv
    return number * size, (number + 1) * size - 1


def _allowed(found: Mapping[str, _PrunableHeads], removed: Sequence[Unit], unit: Unit) -> bool:
    """Whether another head of this attention may go: one stays."""
    return sum(name == unit[0] for name, _ in removed) < found[unit[0]].Hkv - 1


def _greedy(
    found: Mapping[str, _PrunableHeads], order: Sequence[Unit], gram: Mapping[str, np.ndarray]
) -> list[Unit]:
    """The order in which heads go: the cheapest first, and none that another one has just taken over from."""
    left, removed = list(order), list[Unit]()
    postponed: list[Unit] = []
    while left:
        unit = left.pop(0)
        taken = {
            (name, partner) for name, each in _partners(gram, removed).items() for partner, _ in each.values()
        }
        if unit in taken and unit not in postponed:
            postponed.append(unit)
            left.append(unit)
        elif _allowed(found, removed, unit):
            removed.append(unit)
    return removed


def _down_to(
    found: Mapping[str, _PrunableHeads], order: Sequence[Unit], heads: int, gram: Mapping[str, np.ndarray]
) -> list[Unit]:
    """The heads that go so that each attention has so many query heads."""
    removed: list[Unit] = []
    for name, each in found.items():
        own = [unit for unit in order if unit[0] == name]
        removed += _greedy(found, own, gram)[: each.Hkv - heads // each.group]
    return removed


def _fewest(
    found: Mapping[str, _PrunableHeads],
    order: Sequence[Unit],
    loss: Callable[[Sequence[Unit]], float],
    limit: float,
    points: list[LossPoint],
    gram: Mapping[str, np.ndarray],
) -> list[Unit]:
    """As many heads as can go, by halving."""
    sequence, low = _greedy(found, order, gram), 0
    high = len(sequence)
    while low < high:
        middle = math.ceil((low + high) / 2)
        cost = loss(sequence[:middle])
        points.append(LossPoint(compressed=middle, share=middle / len(order), loss=cost))
        low, high = (middle, high) if cost <= limit else (low, middle - 1)
    return sequence[:low]


# -- Key/value heads that several query heads share --------------------------------------------------


def pool(
    original: Original,
    kv_heads: int,
    *,
    max_loss: float | None = None,
    data: Any = None,
    data_limit: int = 0,
    metric: Any = None,
    on_step: OnName = silent,
) -> Compression:
    """The model with so many key/value heads in each attention: the most alike are pooled by their mean."""
    figure = None if metric is None else Metric(metric)
    with graph_code(f"graph {original.name}"):
        original, found, samples = _opened(original, data, data_limit)
        refuse_heads(_counts(found), kv_heads=kv_heads)
        chosen_by, held_out, is_held_out = samples.split()
        few, program = list(islice(chosen_by, FEW)), FileProgram(original.model)
        true = [program.run(sample.inputs, sample=sample.name) for sample in few]
        alone: dict[str, float] = {}
        for name in found:
            on_step(Step("sensitivity", name))
            tried = FileProgram(_pooled(original.model, [name], kv_heads))
            alone[name] = worst_loss(zip(true, (tried.run(each.inputs) for each in few), strict=True))
        model = _pooled(original.model, list(found), kv_heads)
        outputs, _, judged, count = measure_loss(original.model, model, held_out, {}, figure, on_step)
    layers = [
        LossLayer(
            name=name, is_compressed=each.Hkv > kv_heads, relative_l2=None, sqnr_db=None, alone=alone[name]
        )
        for name, each in found.items()
    ]
    record = LossRecord(
        what=KV_HEADS,
        data=samples.title,
        samples=count,
        outside=dict(samples.outside),
        held_out=is_held_out,
        metric=judged,
        outputs=outputs,
        layers=layers,
        limit=max_loss,
    )
    if max_loss is not None and record.worst > max_loss:
        what = "Pooling to so few key/value heads costs more than is allowed."
        got = f"{record.worst:.2g}, limit {max_loss:g}"
        raise LossExceeded(what, got=got, hint="a larger --max-loss, or more key/value heads")
    return Compression(model=model, record=record)


def _pooled(model: ir.Model, names: Sequence[str], count: int) -> ir.Model:
    """A copy in which these attentions have so many key/value heads, and query heads in a new order."""
    copy = model.clone()
    nodes = {str(node.name): node for node in copy.graph}
    for name in names:
        heads = _heads_of(nodes[name])
        groups = _alike(heads, count)
        order = [unit for group in groups for unit in group]

        rows = heads.output_weight.reshape(heads.Hkv, -1, heads.output_weight.shape[-1])
        _write(copy, heads, partial(_means, groups, order), (heads.Hq, count, count), rows[order])
    return _cleaned(copy)


def _means(groups: list[list[int]], order: list[int], array: np.ndarray, at: int) -> np.ndarray:
    """Queries in the order of the groups; the mean of the keys or values of each group."""
    if at == an.Q:
        return array[..., order, :]
    return np.stack([array[..., group, :].astype(np.float64).mean(-2) for group in groups], axis=-2)


def _alike(heads: _PrunableHeads, count: int) -> list[list[int]]:
    """The key/value heads in groups of equal size.

    Each group begins with the first that is left, and takes those whose keys and values are nearest to it.
    """
    columns = []
    for part in heads.projections[1:]:
        array = part.weight.astype(np.float64)
        array = array if part.bias is None else np.vstack((array, part.bias))
        split = array.reshape(len(array), heads.Hkv, -1)
        size = max(float(np.linalg.norm(array)), 1e-30)
        columns.append(np.moveaxis(split, 1, 0).reshape(heads.Hkv, -1) / size)
    places, left, groups = np.concatenate(columns, axis=1), list(range(heads.Hkv)), list[list[int]]()
    while left:
        first = left[0]
        near = sorted(left, key=lambda unit: float(np.linalg.norm(places[unit] - places[first])))
        group = sorted(near[: heads.Hkv // count])
        groups.append(group)
        left = [unit for unit in left if unit not in group]
    return groups


# -- The graph without them -------------------------------------------------------------------------


def _without(model: ir.Model, partners: Mapping[str, Mapping[int, tuple[int, float]]]) -> ir.Model:
    """A copy with smaller projections; what goes is added to the output projection of its partner."""
    copy = model.clone()
    nodes = {str(node.name): node for node in copy.graph}
    for name, gone in partners.items():
        node = nodes[name]
        heads = _heads_of(node)
        kept = [unit for unit in range(heads.Hkv) if unit not in gone]
        rows = heads.output_weight.reshape(heads.Hkv, -1, heads.output_weight.shape[-1]).copy()
        for unit, (partner, factor) in gone.items():
            rows[partner] += (factor * rows[unit].astype(np.float64)).astype(rows.dtype)
        counts = (heads.group * len(kept), len(kept), len(kept))
        _write(copy, heads, partial(_those, kept), counts, rows[kept])
    return _cleaned(copy)


def _those(kept: list[int], array: np.ndarray, at: int) -> np.ndarray:
    return array[..., kept, :]


_Choose = Callable[[np.ndarray, int], np.ndarray]
"""From an array [..., key/value heads, columns of each] of a projection, and which it is, to the new one."""


def _write(
    copy: ir.Model, heads: _PrunableHeads, choose: _Choose, counts: tuple[int, int, int], rows: np.ndarray
) -> None:
    """Give an attention other projections, with so many heads each, and other output rows."""
    node, name = heads.node, heads.name
    for at, part, count in zip((an.Q, an.K, an.V), heads.projections, counts, strict=True):
        weight = _chosen(part.weight, heads.Hkv, at, choose)
        bias = None if part.bias is None else _chosen(part.bias, heads.Hkv, at, choose)
        made = _projected(copy.graph, node, replace(part, weight=weight, bias=bias), at, count)
        if part.entry is None:
            node.replace_input_with(at, made)
        else:
            part.entry.replace_all_uses_with(made)
    held = np.ascontiguousarray(rows.reshape(-1, rows.shape[-1]))
    heads.output.replace_input_with(1, new_initializer(copy.graph, f"{name}/output_weight", held))
    if heads.projections[0].entry is not None:
        join = input_at(heads.output, 0)
        reshape = None if join is None else join.producer()
        if reshape is not None:
            sizes = np.array([0, 0, len(held)], np.int64)
            reshape.replace_input_with(1, new_initializer(copy.graph, f"{name}/joined", sizes))
            reshape.attributes.pop("allowzero", None)
    else:
        for key, number in (("q_num_heads", counts[0]), ("kv_num_heads", counts[1])):
            node.attributes[key] = ir.AttrInt64(key, number)


def _chosen(array: np.ndarray, units: int, at: int, choose: _Choose) -> np.ndarray:
    """Columns of a projection by their key/value heads, as they are chosen."""
    found = choose(array.reshape(*array.shape[:-1], units, -1), at)
    return found.reshape(*found.shape[:-2], -1).astype(array.dtype)


def _cleaned(copy: ir.Model) -> ir.Model:
    """Without what is not used any more, and with sizes that fit."""
    RemoveUnusedNodesPass()(copy)
    for each in copy.graph:  # sizes with the heads in them are inferred anew
        for value in each.outputs:
            value.shape = value.shape if value.is_graph_output() else None
    for value in list(copy.graph.initializers.values()):
        if not value.uses() and not value.is_graph_output():
            del copy.graph.initializers[str(value.name)]
    return infer_shapes(copy)


def _projected(graph: ir.Graph, node: ir.Node, part: _HeadColumns, at: int, count: int) -> ir.Value:
    """The nodes of a projection of so many heads."""
    name, weight = f"{node.name}/{'qkv'[at]}", part.weight
    held = new_initializer(graph, f"{name}_weight", np.ascontiguousarray(weight))
    made = [ir.node("MatMul", [part.source, held], name=f"{name}_matmul")]
    if part.bias is not None:
        bias = new_initializer(graph, f"{name}_bias", np.ascontiguousarray(part.bias))
        made.append(ir.node("Add", [made[-1].outputs[0], bias], name=f"{name}_add"))
    if part.rotary is not None:
        rest = list(part.rotary.inputs)[1:]
        attributes = [a for a in part.rotary.attributes.values() if a.name != "num_heads"]
        rotary = ir.node("RotaryEmbedding", [made[-1].outputs[0], *rest], name=f"{name}_rotary")
        for attribute in (*attributes, ir.AttrInt64("num_heads", count)):
            rotary.attributes[attribute.name] = attribute
        made.append(rotary)
    if part.entry is not None:
        sizes = np.array([0, 0, count, weight.shape[1] // count], np.int64)
        shape = new_initializer(graph, f"{name}_shape", sizes)
        made.append(ir.node("Reshape", [made[-1].outputs[0], shape], name=f"{name}_reshape"))
        made.append(
            ir.node("Transpose", [made[-1].outputs[0]], attributes={"perm": _SPLIT}, name=f"{name}_transpose")
        )
    for each in made:
        each.outputs[0].name = f"{each.name}_y"
        each.outputs[0].type = part.source.type
    first = node if part.entry is None else part.entry.producer()
    graph.insert_before(first or node, made)
    return made[-1].outputs[0]
