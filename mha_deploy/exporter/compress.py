"""A model in eight bits: calibration, what each GEMM costs, which ones are quantized, and the loss of it all.

The original is an ONNX graph. The quantized model is that graph with Q/DQ nodes: a file, and the source of a
bundle like any other, whose FP64 evaluation is its reference. What differs between the two files in FP64 is
the *loss*, which a user may limit; what differs between a runtime and the quantized file is an *error*.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from msgspec.structs import replace as changed

from mha_deploy.bundle.cases import Arrays
from mha_deploy.bundle.folder import SOURCE, Bundle, sha256
from mha_deploy.bundle.manifest import LossLayer, LossMetric, LossOutput, LossPoint, LossRecord, ShrunkRange
from mha_deploy.bundle.samples import Sample, as_taken
from mha_deploy.bundle.sizes import PlannedCase
from mha_deploy.errors import DeployError, ExportError, LossExceeded, nearest
from mha_deploy.exporter.file_program import ChangedMode, Compute, ExactMode, FileNode, FileProgram, Inputs
from mha_deploy.exporter.flow import export_bundle
from mha_deploy.exporter.onnx_import import OnnxSource
from mha_deploy.graph.file import save_graph
from mha_deploy.graph.fuse import fuse_attention
from mha_deploy.graph.fuse.values import raise_opset, why_opset_stays
from mha_deploy.graph.ir import infer_shapes
from mha_deploy.graph.mixed_precision import FP16_MAX, MARGIN
from mha_deploy.graph.quantize import (
    AttentionLayer,
    EightBits,
    GemmLayer,
    OtherGemm,
    attention_layers,
    find_format,
    fp16_scale,
    gemm_layers,
    named_nodes,
    other_gemms,
    with_plain_weights,
    with_quantized,
    with_weights_apart,
)
from mha_deploy.metrics import AgreementCounts, count_agreement, joined_agreement
from mha_deploy.model.precision import Precision, find_precision
from mha_deploy.model.spec import Axes, ModelSpec, sizes_beyond
from mha_deploy.options import AUTO, ExportOptions, OnName, OnStep, Step, silent
from mha_deploy.output import copy_file, scratch_folder
from mha_deploy.runtime.user_code import graph_code
from mha_deploy.runtime.user_data import Metric, open_samples
from mha_deploy.text import beyond_text, plural

Part = GemmLayer | AttentionLayer
"""What can be quantized, or stay as it is."""

WEIGHT_SCALES = ("channel", "tensor")
CALIBRATIONS = ("max", "percentile", "mse")
_BINS = 2048
_PERCENTILE = 0.9999
_CLIPS = np.linspace(0.3, 1.0, 36)  # of the largest magnitude, which are tried for the least square error
_DRAWN = 8  # samples, where the user has none
FEW = 4  # samples on which single GEMMs are tried
_MOST_RESULTS = 1 << 29  # bytes of results that are kept of them
_SECONDS = 120.0  # that this may take
_MOST = 1e6  # of a loss: what is not finite
_LOUD = 300.0  # the SQNR of what differs by less than FP64 shows


# -- The model that is compressed, and the samples it is compressed by ------------------------------


@dataclass(frozen=True, kw_only=True)
class Original:
    """The model as its user has it: an ONNX graph, and how its inputs are drawn."""

    name: str
    model: ir.Model
    spec: ModelSpec  # with its inputs and axes
    precision: Precision  # of the graph
    draw: Callable[[PlannedCase], Arrays]  # inputs in the types of the graph
    origin: str  # where its weights come from
    chosen: frozenset[str]  # the axes whose ranges are settled: of a file, those that the user gave
    samples: Any = None  # of the user
    shrunk: tuple[ShrunkRange, ...] = ()  # the axes that vary less than requested
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The samples of a compression, which are read several times."""

    original: Original
    given: Any  # the user's data; None: drawn
    limit: int = 0
    offset: int | None = None  # 0 or 1: every other sample, from there on
    # Those beyond the axes, and the sizes that are
    outside: dict[str, dict[str, int]] = field(default_factory=dict)

    def split(self) -> tuple[Samples, Samples, bool]:
        """Those to choose by, those that were held out for the loss, and whether these are others."""
        if sum(1 for _ in islice(self, 2)) < 2:
            return self, self, False
        return replace(self, offset=0), replace(self, offset=1), True

    @property
    def title(self) -> str:
        """Where they come from."""
        return "drawn inputs" if self.given is None else open_samples(self.given, self.original.spec)[0]

    def __iter__(self) -> Iterator[Sample]:
        """Each within the axes, in the types of the original graph."""
        return self._all() if self.offset is None else islice(self._all(), self.offset, None, 2)

    def _all(self) -> Iterator[Sample]:
        spec, precision = self.original.spec, self.original.precision
        if self.given is None:
            for number in range(self.limit or _DRAWN):
                planned = PlannedCase(name=f"sample {number}", sizes=spec.sizes("opt"))
                yield Sample(name=planned.name, inputs=self.original.draw(planned), sizes=planned.sizes)
            return
        _, samples, _ = open_samples(self.given, spec)
        found = False
        for sample in islice(samples, self.limit or None):
            taken = as_taken(sample, spec, precision)
            if beyond := sizes_beyond(taken.sizes, spec.axes):
                self.outside[taken.name] = beyond
                continue
            found = True
            yield taken
        if not found:
            what = "The data has no sample within the axes of the model."
            first = islice(self.outside.items(), 3)
            parts = (f"{name}: {beyond_text(sizes, spec.axes)}" for name, sizes in first)
            got = "; ".join([self.title, *parts])
            hint = "samples; an iterator that is used up gives none"
            if self.outside:
                hint = "samples of these sizes, in one file along an axis of their own; or a wider --axis"
            raise DeployError(what, got=got, hint=hint)


# -- Calibration ------------------------------------------------------------------------------------


class Magnitudes:
    """How large the numbers of a tensor are, over all samples: a histogram that grows with them."""

    def __init__(self) -> None:
        self.largest = 0.0
        self._top = 0.0
        self._counts = np.zeros(_BINS)

    def add(self, array: np.ndarray) -> None:
        """Count the numbers of one sample."""
        sizes = np.abs(array[np.isfinite(array)]).reshape(-1)
        if not sizes.size:
            return
        most = float(sizes.max())
        self.largest = max(self.largest, most)
        if self._top == 0.0:
            self._top = most
        if self._top == 0.0:
            return
        while self._top < most:  # twice as wide: two bins become one
            self._counts = np.concatenate((self._counts.reshape(-1, 2).sum(1), np.zeros(_BINS // 2)))
            self._top *= 2
        self._counts += np.histogram(sizes, bins=_BINS, range=(0.0, self._top))[0]

    def range(self, method: str, format: EightBits) -> float:
        """The largest magnitude that the grid is to hold."""
        if method == "max" or not self._counts.sum():
            return self.largest
        edges = np.linspace(0.0, self._top, _BINS + 1)
        if method == "percentile":
            below = np.cumsum(self._counts) / self._counts.sum()
            return min(self.largest, float(edges[1 + int(np.searchsorted(below, _PERCENTILE))]))
        centers = (edges[1:] + edges[:-1]) / 2

        def error(clip: float) -> float:
            scale = float(fp16_scale(self.largest * clip / format.largest))
            return float((self._counts * np.square(format.rounded(centers, scale) - centers)).sum())

        return self.largest * min(map(float, _CLIPS), key=error)


def calibrate(
    original: Original,
    layers: Sequence[Part],
    samples: Samples,
    format: EightBits,
    method: str,
    on_sample: OnName,
) -> tuple[dict[str, float], dict[str, float]]:
    """The scales of what GEMMs and attentions read, by its name, from one pass over the samples.

    And the parts that read or write numbers beyond FP16, by name with the largest: there, FP16 is not what
    eight bits are dequantized to.
    """
    inputs = {tensor.name for tensor in original.spec.inputs}
    wanted = sorted({name for each in layers for name in (*each.activations, each.output)})
    program = FileProgram(original.model, [name for name in wanted if name not in inputs])
    found = {name: Magnitudes() for name in wanted}
    for sample in samples:
        on_sample(Step("calibration", sample.name))
        values = {**sample.inputs, **program.run(sample.inputs, sample=sample.name)}
        for name, magnitudes in found.items():
            magnitudes.add(np.asarray(values[name], np.float64))
    read = sorted({name for each in layers for name in each.activations})
    ranges = {name: found[name].range(method, format) for name in read}
    scales = {name: float(fp16_scale(most / format.largest)) for name, most in ranges.items()}
    reached = {x.name: max(found[name].largest for name in (*x.activations, x.output)) for x in layers}
    return scales, {name: most for name, most in reached.items() if most > FP16_MAX / MARGIN}


# -- Loss -------------------------------------------------------------------------------------------


class LossSums:
    """The squares of a tensor and of what is added to it, over all samples."""

    def __init__(self) -> None:
        self.signal = self.noise = 0.0
        self.same = self.count = 0
        self.is_whole = False  # indices, tokens, booleans

    def add(self, true: np.ndarray, got: np.ndarray) -> None:
        """Add one sample."""
        if true.dtype.kind != "f":
            self.is_whole = True
            self.same += int((true == got).sum())
            self.count += true.size
            return
        counts = np.isfinite(true)
        error = np.where(counts, got - np.where(counts, true, 0.0), 0.0)
        self.noise += float(np.square(error).sum()) if np.isfinite(error).all() else math.inf
        self.signal += float(np.square(np.where(counts, true, 0.0)).sum())
        self.count += true.size

    @property
    def relative(self) -> float:
        """The relative L2 of all samples."""
        if not self.noise:
            return 0.0
        return min(_MOST, math.sqrt(self.noise / self.signal)) if self.signal else _MOST

    @property
    def sqnr_db(self) -> float | None:
        """The same in dB; None where nothing was added."""
        loss = self.relative
        return None if loss <= 10 ** (-_LOUD / 20) else -20.0 * math.log10(loss)

    @property
    def loss(self) -> float:
        """In one number: relative L2, or the share of whole numbers that differ."""
        return 1.0 - self.same / max(self.count, 1) if self.is_whole else self.relative


def worst_loss(pairs: Iterable[tuple[Arrays, Arrays]]) -> float:
    """The loss of the output that loses most, over pairs of right outputs and those that were got."""
    sums: dict[str, LossSums] = {}
    for true, got in pairs:
        for name, array in true.items():
            sums.setdefault(name, LossSums()).add(array, got[name])
    return max((each.loss for each in sums.values()), default=0.0)


_Change = Callable[[Inputs], Inputs]
_CHANGED = ("MatMul", "Gemm", "Attention")


class Trials:
    """What quantizing some parts costs, on a few samples: the original graph is run with them rounded."""

    def __init__(
        self,
        original: Original,
        layers: Sequence[Part],
        scales: Mapping[str, float],
        format: EightBits,
        samples: Samples,
    ) -> None:
        apart = [each.name for each in layers if isinstance(each, AttentionLayer)]
        self._program = FileProgram(with_weights_apart(original.model, apart) if apart else original.model)
        self._samples = list(islice(samples, FEW))
        runs = [ExactMode(_MOST_RESULTS // FEW) for _ in self._samples]
        pairs = zip(self._samples, runs, strict=True)
        self._true = [self._program.run(each.inputs, run, sample=each.name) for each, run in pairs]
        self._results = [run.results for run in runs]
        self._change = {each.name: _changes(each, scales, format) for each in layers}

    def loss(self, names: Sequence[str]) -> float:
        """The loss with these parts quantized and no others."""
        changed = {node: change for name in names for node, change in self._change[name].items()}

        def quantized(node: FileNode) -> Callable[[Compute, Inputs], Any] | None:
            change = changed.get(node.name) if node.operator in _CHANGED else None
            return None if change is None else lambda compute, inputs: compute(*change(inputs))

        runs = zip(self._samples, self._true, self._results, strict=True)
        return worst_loss(
            (true, self._program.run(sample.inputs, ChangedMode(quantized, results=results)))
            for sample, true, results in runs
        )


def _changes(layer: Part, scales: Mapping[str, float], format: EightBits) -> dict[str, _Change]:
    """What the nodes of a part read, once it is quantized."""
    if isinstance(layer, GemmLayer):
        scale, weight = scales[layer.activation], layer.quantized_weight(format)
        return {layer.name: lambda inputs: (format.rounded(inputs[0], scale), weight.wide(), *inputs[2:])}
    q, k, v = (scales[name] for name in layer.activations)
    unit = float(fp16_scale(1.0 / format.largest))
    return {
        layer.name: lambda x: (format.rounded(x[0], q), format.rounded(x[1], k), *x[2:]),
        layer.matmul: lambda x: (format.rounded(x[0], unit), format.rounded(x[1], v)),
    }


def measure_loss(
    original: ir.Model,
    compressed: ir.Model,
    samples: Samples,
    layers: Mapping[str, str],  # the name of the value behind each part, by the name of the part
    metric: Metric | None = None,
    on_sample: OnName = silent,
) -> tuple[list[LossOutput], dict[str, tuple[float, float | None]], LossMetric | None, int]:
    """Both models in FP64 on all samples: every output, every part, the user's metric, and their count."""
    kept = sorted(set(layers.values()))
    programs = [FileProgram(each, kept) for each in (original, compressed)]
    outputs = [str(value.name) for value in original.graph.outputs]
    sums = {name: LossSums() for name in (*outputs, *kept)}
    counts: dict[str, list[AgreementCounts]] = {name: [] for name in outputs if "logit" in name.lower()}
    figures, read = list[tuple[float, float]](), 0
    for sample in samples:
        read += 1
        on_sample(Step("loss", sample.name))
        true, got = (program.run(sample.inputs, sample=sample.name) for program in programs)
        for name, each in sums.items():
            each.add(true[name], got[name])
        for name, agreeing in counts.items():
            agreeing.append(count_agreement(true[name], got[name]))
        if metric is not None:
            figures.append((metric(true, sample), metric(got, sample)))
    found = []
    for name in outputs:
        each, agreed = sums[name], joined_agreement(counts.get(name, ()))
        found.append(
            LossOutput(
                name=name,
                relative_l2=None if each.is_whole else each.relative,
                sqnr_db=None if each.is_whole else each.sqnr_db,
                top1=agreed.top1 if agreed else 1.0 - each.loss if each.is_whole else None,
                kl=None if agreed is None else _MOST if agreed.kl is None else min(agreed.kl, _MOST),
            )
        )
    inside = {part: (sums[value].relative, sums[value].sqnr_db) for part, value in layers.items()}
    judged = None
    if metric is not None and figures:
        means = np.mean(figures, axis=0)
        judged = LossMetric(name=metric.name, original=float(means[0]), compressed=float(means[1]))
    return found, inside, judged, read


# -- Which GEMMs are quantized ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Compression:
    """A quantized model, and what it lost."""

    model: ir.Model
    record: LossRecord
    wide: Mapping[str, float] = field(default_factory=dict)  # parts beyond FP16, and what they reach


def quantize(original: Original, options: ExportOptions, on_step: OnName = silent) -> Compression:
    """The model in eight bits: as many of its parts as the loss that is allowed permits."""
    format, limit = find_format(options.precision), options.max_loss
    if options.weight_scales not in WEIGHT_SCALES:
        hint = nearest(options.weight_scales, WEIGHT_SCALES)
        what, got = "No such kind of weight scales.", options.weight_scales
        raise DeployError(what, got=got, hint=hint, options=("weight_scales",))
    format = replace(format, per_tensor=options.weight_scales == "tensor")
    if options.calibration not in CALIBRATIONS:
        hint = nearest(options.calibration, CALIBRATIONS)
        what, got = "No such calibration.", options.calibration
        raise DeployError(what, got=got, hint=hint, options=("calibration",))
    metric = None if options.metric is None else Metric(options.metric)
    with graph_code(f"graph {original.name}"):
        fused = fuse_attention(original.model)[0] if options.quantize_attention else original.model
    original = replace(original, model=prepared(fused))
    attentions = attention_layers(original.model) if options.quantize_attention else []
    layers: list[Part] = [*gemm_layers(original.model), *attentions]
    if options.quantize_attention and not attentions:
        what, hint = "The model has no attention that can be quantized.", "leave --quantize-attention out"
        hint = f"{hint}; a KV cache or weights as an output"
        raise ExportError(what, got=original.name, hint=hint, options=("quantize_attention",))
    if not layers:
        what, hint = "The model has no GEMM that can be quantized.", "--precision fp16 or auto"
        hint = f"{hint}; a GEMM with a constant weight"
        raise ExportError(what, got=original.name, hint=hint, options=("precision",))
    parts = [*layers, *other_gemms(original.model)]
    given = options.data if options.data is not None else original.samples
    samples = Samples(original=original, given=given, limit=options.data_limit)
    with graph_code(f"graph {original.name}"):
        chosen_by, held_out, is_held_out = samples.split()
        scales, wide = calibrate(original, layers, chosen_by, format, options.calibration, on_step)
        if wide and len(wide) == len(layers):
            raise ExportError(
                "Every GEMM of the model reads or writes numbers beyond FP16.",
                got="; ".join(f"{name} reaches {most:,.6g}" for name, most in islice(wide.items(), 3)),
                hint="--precision auto, which keeps them in FP32",
            )
        layers = [each for each in layers if each.name not in wide]
        trials, began = Trials(original, layers, scales, format, chosen_by), time.monotonic()
        alone: dict[str, float | None] = {}
        for each in layers:
            on_step(Step("sensitivity", each.name))
            late = time.monotonic() - began > _SECONDS
            alone[each.name] = None if late else trials.loss([each.name])
        ranked = _ranked(layers, alone)
        kept, points = _search(trials, parts, ranked, limit, on_step)
        del trials  # its weights in FP64, before two other models are
        places = {each.name: each.output for each in parts}
        while True:  # what a few samples allow, others may not
            model = with_quantized(original.model, format, scales, [*wide, *kept], attentions)
            outputs, inside, judged, count = measure_loss(
                original.model, model, held_out, places, metric, on_step
            )
            record = LossRecord(
                what=format.name,
                calibration=options.calibration,
                data=samples.title,
                samples=count,
                outside=dict(samples.outside),
                held_out=is_held_out,
                outputs=outputs,
                layers=[
                    LossLayer(
                        name=each.name,
                        is_compressed=each.name in alone and each.name not in kept,
                        relative_l2=inside[each.name][0],
                        sqnr_db=inside[each.name][1],
                        alone=alone.get(each.name),
                    )
                    for each in parts
                ],
                limit=limit,
                metric=judged,
            )
            points[len(kept)] = changed(_point(parts, ranked[len(kept) :], record.worst), is_chosen=True)
            if limit is None or record.worst <= limit:
                break
            points[len(kept)] = _point(parts, ranked[len(kept) :], record.worst)
            kept = ranked[: len(kept) + 1]
            if len(kept) == len(layers):
                raise _exceeded(record, alone)
    search = [points[number] for number in sorted(points)] if limit is not None else []
    return Compression(model=model, record=changed(record, search=search), wide=wide)


def prepared(model: ir.Model) -> ir.Model:
    """A copy with names for all nodes, types for all values, and an operator set that has Q/DQ in FP16."""
    copy = named_nodes(model.clone())
    if why_opset_stays(copy) is None:
        raise_opset(copy)
    return infer_shapes(with_plain_weights(copy))


def _ranked(layers: Sequence[Part], alone: Mapping[str, float | None]) -> list[str]:
    """The parts, the most sensitive first; one that was not tried counts as such."""
    cost = {name: math.inf if loss is None else loss for name, loss in alone.items()}
    return sorted((each.name for each in layers), key=lambda name: -cost[name])


def _point(parts: Sequence[Part | OtherGemm], chosen: Sequence[str], loss: float) -> LossPoint:
    share = sum(each.size for each in parts if each.name in chosen) / max(sum(x.size for x in parts), 1)
    return LossPoint(compressed=len(chosen), share=share, loss=loss)


def _search(
    trials: Trials,
    parts: Sequence[Part | OtherGemm],
    ranked: Sequence[str],
    limit: float | None,
    on_step: OnName,
) -> tuple[list[str], dict[int, LossPoint]]:
    """The fewest of the most sensitive parts that stay as they are, by halving; and every choice tried."""
    if limit is None:
        return [], {}
    points = dict[int, LossPoint]()

    def fits(count: int) -> bool:
        on_step(Step("search", f"{len(ranked) - count} of {len(parts)} parts"))
        chosen = ranked[count:]
        points[count] = _point(parts, chosen, trials.loss(chosen))
        return points[count].loss <= limit

    low, high = 0, len(ranked) - 1  # one part at least
    while low < high:
        middle = 0 if not points else (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return list(ranked[:low]), points


def _exceeded(record: LossRecord, alone: Mapping[str, float | None]) -> LossExceeded:
    least = min((loss, name) for name, loss in alone.items() if loss is not None)
    return LossExceeded(
        f"Nothing can be quantized to {record.what} within the allowed loss.",
        got=f"{least[1]} alone costs {least[0]:.2g}, limit {record.limit:g}",
        hint="a larger --max-loss, --calibration mse, more --data, or --precision fp16",
    )


# -- An ONNX file as the original -------------------------------------------------------------------


def original_from_onnx(
    path: Path, options: ExportOptions, axes: Axes, inputs: Mapping[str, np.ndarray]
) -> Original:
    """An ONNX file, to be compressed."""
    source = OnnxSource(path, replace(options, precision=AUTO), axes, inputs)
    if source.auto:  # the types are those of the file
        source.precision = find_precision("fp32")
    source.run_at_sizes()  # refused before it is calibrated
    source.close()
    for value in source.original.graph.inputs:  # the compressed file has the same axes
        value.shape = ir.Shape(source.dims[str(value.name)])
    return Original(
        name=source.title,
        model=source.original,
        spec=source.as_taken(),
        precision=source.precision,
        draw=source.draw,
        origin=f"{path.name}, SHA-256 {sha256(path)}",
        chosen=frozenset(axes),
        notes=tuple(source.notes),
    )


# -- The bundle of a compressed model ---------------------------------------------------------------


class CompressedSource(OnnxSource):
    """A compressed model: its own file is the source, and its inputs are those of the original."""

    def __init__(self, path: Path, options: ExportOptions, original: Original, made: Compression) -> None:
        super().__init__(path, replace(options, precision=AUTO), {}, {})
        spec, record = original.spec, made.record
        self.axes = {name: spec.axes.get(name, axis) for name, axis in self.axes.items()}
        self.chosen = original.chosen
        self._before, self.loss = original, record
        self.title, self.summary = original.name, f"{original.name}, compressed: {record.what}"
        self.notes += original.notes
        self.shrunk = original.shrunk
        if record.outside:
            name, sizes = next(iter(record.outside.items()))
            count = plural(len(record.outside), "sample")
            beyond = beyond_text(sizes, spec.axes)
            self.notes.append(f"{count} of {record.data} beyond the axes, not used: {name} has {beyond}")
        if made.wide:
            most = f"{max(made.wide.values()):,.6g}"
            self.notes.append(f"not quantized: {', '.join(made.wide)}, numbers beyond FP16 (up to {most})")

    def graph(self, folder: Path) -> ir.Model:
        """The graph; the file that it is made of becomes a part of the bundle."""
        for file in self.path.parent.glob(f"{self.path.name}*"):  # weights may be beside it
            copy_file(file, folder / file.name)
        model = super().graph(folder)
        if self._before.spec.kv_cache is not None and self.spec.kv_cache is None:
            self.notes.append("the KV cache was not recognized: decoding token by token is not validated")
        return model

    draws_numbers = False  # those of the original

    def draw(self, planned: PlannedCase, scale: float = 1.0) -> dict[str, np.ndarray]:
        """The inputs of the original, whatever the scale."""
        types = self.file_types()
        # Fixed sizes are no axes here.
        usual = {name: axis.opt for name, axis in self._before.spec.axes.items()}
        planned = replace(planned, sizes={**usual, **planned.sizes})
        drawn = dict(self._before.draw(planned))
        call_of = cache(lambda call: self._before.draw(replace(planned, name=f"{planned.name} {call}")))
        for name, array in drawn.items():
            for axis, dim in enumerate(self.dims[name]):
                size = planned.sizes.get(str(dim), 1)
                if array.shape[axis] == 1 < size:  # the original takes one token in a call
                    drawn[name] = np.concatenate([call_of(call)[name] for call in range(size)], axis)
        return {name: array.astype(types[name]) for name, array in drawn.items()}

    def origin(self) -> str:
        """Where the weights came from, before they were compressed."""
        return self._before.origin


def compressed_bundle(
    original: Original,
    compression: Compression,
    target: Path,
    options: ExportOptions,
    on_step: OnStep,
) -> Bundle:
    """Export a compressed model; its source is in the bundle."""
    with scratch_folder() as folder:
        path = folder / SOURCE
        save_graph(compression.model, path)
        return export_bundle(CompressedSource(path, options, original, compression), target, on_step)
