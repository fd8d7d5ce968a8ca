"""The flow of every export, whatever the model comes from: graph, checks, golden cases, trace, manifest.

PyTorch is not imported here: an ONNX file becomes a bundle without it.
"""

from __future__ import annotations

import enum
import gc
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from msgspec import structs

from mha_deploy.analysis import cost
from mha_deploy.bundle.cases import (
    Arrays,
    DecodeTrace,
    GoldenCase,
    PlannedTrace,
    golden_cases,
    plan_trace,
    read_trace,
    refuse_implausible,
    refuse_polygraphy,
    stored_bytes,
    write_case,
    write_polygraphy,
    write_trace,
)
from mha_deploy.bundle.folder import MODEL, Bundle, BundleWriter
from mha_deploy.bundle.manifest import (
    Checks,
    GoldenEntry,
    LayersEntry,
    LossRecord,
    Manifest,
    ShrunkRange,
    TraceEntry,
    UnfusedRecord,
)
from mha_deploy.environment import versions
from mha_deploy.errors import ExportError, NoResult, SpecError, nearest
from mha_deploy.exporter.coarse import CoarseMistakes, coarse_mistakes
from mha_deploy.exporter.observe import observe
from mha_deploy.files import PathPart
from mha_deploy.graph.attention_node import attention_nodes, is_attention, short_dtype
from mha_deploy.graph.canonical import check_graph, check_module
from mha_deploy.graph.file import load_graph, save_graph
from mha_deploy.graph.fuse import FuseReport, fuse_attention, place_of
from mha_deploy.graph.ir import Dim, dims
from mha_deploy.graph.mixed_precision import apply_plan
from mha_deploy.graph.quantize import is_quantized, without_quantizers
from mha_deploy.graph.valid import refuse_invalid
from mha_deploy.metrics import relative_error
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import FLOAT, Axes, ModelSpec, Sizes, TensorSpec
from mha_deploy.options import ExportOptions, OnStep
from mha_deploy.output import temporary_folder
from mha_deploy.runtime import plan_mixed_precision
from mha_deploy.runtime.user_code import graph_code

# -- Which golden cases an export gets: the corners of the axes, within a budget -------------------

MASK_OF_ONE = "mask-of-one"
RANDOM_SIZES = ("random-1", "random-2")
CASES = ("min", "opt", "odd", "ragged", "large")
CACHE_CASES = ("min", "prefill", "decode", "odd", "ragged", "large", cost.LONG_PAST)
MODULE_CASES = ("opt", "min", "odd", "large")  # opt first: its work bounds that of the others
ALL_CASES = (*CASES, *CACHE_CASES, cost.PROBE, *RANDOM_SIZES, cost.MASKS, MASK_OF_ONE)
_RAGGED_BATCH = 4
_RAGGED_LENGTH = 24
# A key this many times as large dominates the heads in which it is attended: whether a query attends to it,
# and at which position, shows in the output at any length. Among random keys it is one of thousands.
LOUDNESS = 4.0
_CACHE_BYTES = 1 << 30  # of the FP64 oracle's


@dataclass(frozen=True, kw_only=True)
class PlannedCase:
    """One case to capture."""

    name: str
    sizes: dict[str, int]
    ragged: bool = False  # whether the batch elements have lengths of their own, the extreme ones included
    past: int | None = None  # valid entries of a preallocated cache in every batch element; None: drawn
    probe: bool = False  # whether some tokens are large: what a mask hides wrongly shows then
    # What the boolean masks of a user's model are, by batch element, in turn
    masks: tuple[MaskFill, ...] = ()
    given: Mapping[str, np.ndarray] | None = None  # inputs of a user's own, where they are not drawn

    def change(self, name: str, array: np.ndarray, dims: Sequence[Dim]) -> np.ndarray:
        """An input of a user's model, as this case has it: with large tokens, or as a mask."""
        if self.masks and dims and is_mask(name, array.dtype.name):
            kept = [mask.of(array.shape[-1]) for mask in self.masks]
            if array.ndim == 1:
                return kept[0].astype(array.dtype)
            made = [np.broadcast_to(kept[b % len(kept)], row.shape) for b, row in enumerate(array)]
            return np.array(made, array.dtype).reshape(array.shape)
        at = {3: 1, 4: 2}.get(array.ndim)  # hidden states [B, S, E]; keys and values [B, Hkv, P, D]
        if not self.probe or array.dtype.kind not in "fV" or at is None or not isinstance(dims[at], str):
            return array
        loud, length = array.copy(), array.shape[at]
        edges = sorted({each for each in (0, (length - 1) // 2, length - 1) if each >= 0})
        loud[(slice(None),) * at + (edges,)] *= np.asarray(LOUDNESS, array.dtype)
        return loud


class MaskFill(enum.Enum):
    """A boolean mask over positions, whichever of its two values hides them."""

    TAIL = "the second half"
    HEAD = "the first half"
    NONE = "none"
    ALL = "all"

    def of(self, length: int) -> np.ndarray:
        """Whether each position is kept."""
        at = np.arange(length)
        kept = {MaskFill.TAIL: at < -(-length // 2), MaskFill.HEAD: at >= length // 2, MaskFill.NONE: at >= 0}
        return kept.get(self, at < 0)


def is_mask(name: str, kind: str) -> bool:
    """Whether an input of a user's model is a mask over positions: boolean, or integers of such a name."""
    return kind == "bool" or ("mask" in name.lower() and kind.startswith(("int", "uint")))


@dataclass(frozen=True, kw_only=True)
class GoldenBudget(cost.SizeLimit):
    """What the large case may cost; the others are as large as the spec says."""

    mb: float = 25.0  # on disk, in 10⁶ bytes; as much as the opt case takes is always allowed

    def __str__(self) -> str:
        return f"{self.gflop:g} GFLOP, {self.gib:g} GiB and {self.mb:g} MB on disk"

    def allows(self, spec: ModelSpec, sizes: Sizes) -> bool:
        """Whether a case of these sizes stays below the limit."""
        room = max(self.mb * 1e6, stored_bytes(spec, spec.sizes("opt")))
        return super().allows(spec, sizes) and stored_bytes(spec, sizes) <= room


def golden_budget(options: ExportOptions) -> GoldenBudget:
    """The limit of the large case that was requested."""
    return GoldenBudget(gflop=options.golden_gflop, gib=options.golden_gib, mb=options.golden_mb)


@dataclass(frozen=True, kw_only=True)
class GoldenPlan:
    """The cases to capture, and why others were left out."""

    cases: tuple[PlannedCase, ...]
    notes: tuple[str, ...] = ()


def plan_golden(
    spec: ModelSpec, wanted: Sequence[str] = (), budget: GoldenBudget | None = None
) -> GoldenPlan:
    """Choose the cases: those wanted by name, or by sizes such as `B=2,S=33`; default: all that suit."""
    notes: list[str] = []
    cases = tuple(planned_cases(lambda: spec, wanted or golden_names(spec), budget or GoldenBudget(), notes))
    if not cases:
        known = ", ".join(golden_names(spec))
        raise SpecError(f"No golden case is left for {spec.name}.", got=", ".join(wanted), hint=known)
    return GoldenPlan(cases=cases, notes=tuple(notes))


def golden_names(spec: ModelSpec) -> tuple[str, ...]:
    """The cases that a model may have, by name."""
    if spec.layer is None:
        masked = any(each.dims and is_mask(each.name, each.kind) for each in spec.inputs)
        return (
            *MODULE_CASES,
            cost.PROBE,
            *(RANDOM_SIZES if cost.has_inside(spec.axes) else ()),
            *((cost.MASKS, MASK_OF_ONE) if masked else ()),
            *((cost.LONG_PAST,) if spec.cached else ()),
            *(("ragged",) if (cache := spec.kv_cache) is not None and cache.is_ragged else ()),
        )
    return CASES if spec.cache == "none" else CACHE_CASES


def refuse_unknown_case(name: str, known: Sequence[str] = ALL_CASES) -> None:
    """Refuse a case that is neither known by name nor given by its sizes."""
    if "=" not in name and name not in known and name != "opt":
        hint = f"{nearest(name, known)} Or sizes, such as B=2,S=33."
        raise SpecError("No such golden case.", got=name, hint=hint)


def planned_cases(
    model: Callable[[], ModelSpec], names: Sequence[str], budget: GoldenBudget, notes: list[str]
) -> Iterator[PlannedCase]:
    """Each case that suits a model, whose cost may be known only once others ran; notes get the others."""
    cases: list[PlannedCase] = []
    for name in names:
        spec = model()
        found = _plan_one(spec, name, budget)
        if isinstance(found, str):
            notes.append(f"no {name} case: {found}")
        elif any(replace(found, name=other.name) == other for other in cases):
            notes.append(f"no {found.name} case: its sizes are those of another")
        else:
            cases.append(found)
            largest = spec.sizes("max")
            less = [f"{axis} = {most}" for axis, most in largest.items() if found.sizes[axis] < most]
            if name == cost.LONG_PAST and spec.kv_cache is not None:
                less = [each for each in less if each.startswith(f"{spec.kv_cache.past} = ")]
            if name in ("large", cost.LONG_PAST) and less:
                text = ",".join(f"{axis}={size}" for axis, size in found.sizes.items())
                notes.append(f"the {name} case has {text}: the axes allow {', '.join(less)}, beyond {budget}")
            yield found


def _plan_one(spec: ModelSpec, name: str, budget: GoldenBudget) -> PlannedCase | str:
    """One case, or why there is none."""
    if "=" in name:
        sizes = spec.parse_sizes(name)
        return PlannedCase(name=cost.sizes_name(sizes), sizes=sizes)
    refuse_unknown_case(name, (*golden_names(spec), cost.PROBE))
    if name in RANDOM_SIZES:
        dice = random.Random(f"{spec.seed} {name}")
        return PlannedCase(name=name, sizes=cost.random_sizes(spec, spec.axes, dice))
    if name in (cost.MASKS, MASK_OF_ONE):
        sizes = {axis: cost.first_allowed(each, (_RAGGED_LENGTH,)) for axis, each in spec.axes.items()}
        batch = _RAGGED_BATCH if name == cost.MASKS else 1
        first = {str(tensor.dims[0]) for tensor in spec.inputs if tensor.dims} & {*spec.axes}
        sizes |= {axis: cost.first_allowed(spec.axes[axis], (batch,)) for axis in first}
        masks = tuple(MaskFill) if name == cost.MASKS else (MaskFill.HEAD,)
        return PlannedCase(name=name, sizes=sizes, masks=masks)
    if name == cost.PROBE:
        return PlannedCase(name=name, sizes=spec.sizes("opt"), probe=True)
    if name in ("min", "opt"):
        # The least that a dynamic cache holds is nothing, too.
        cache = spec.kv_cache if name == "min" else None
        past = 0 if cache is not None and cache.is_preallocated else None
        return PlannedCase(name=name, sizes=spec.sizes(name), past=past)
    if name == "odd":
        return PlannedCase(name=name, sizes=_with_small_batch(spec, cost.odd_sizes(spec.axes)))
    if name == "ragged":
        return _ragged_case(spec)
    if name == "large":
        if spec.layer is None and not spec.flops:
            return "its cost is not known without the case opt before it"
        sizes, usual = cost.shrunk(spec, spec.sizes("max"), spec.sizes("min"), budget), spec.sizes("opt")
        if all(sizes[axis] <= usual[axis] for axis in sizes):
            return f"nothing larger than opt fits {budget}"
        return PlannedCase(name=name, sizes=sizes)
    if name == cost.LONG_PAST:
        found = cost.long_past(spec, spec.axes, budget)
        if not found:
            return "the model has no KV cache"
        if not budget.allows(spec, found[0].sizes):
            return f"no past as long as the optimum fits {budget}"
        return PlannedCase(name=name, sizes=dict(found[0].sizes), past=found[0].past)
    # A prompt into an empty cache, or the token that fills it: as timed.
    for point in cost.usual_points(spec):
        if point.name == name:
            return PlannedCase(name=name, sizes=dict(point.sizes), past=point.past)
    single = "the layer takes single tokens only"
    return single if spec.axes["S"].max == 1 else "its usual call is the shortest"


def _ragged_case(spec: ModelSpec) -> PlannedCase | str:
    cache = spec.kv_cache if spec.layer is None or spec.cache == "preallocated" else None
    padded = spec.layer is not None and spec.layer.mask == "padding"
    if not padded and (cache is None or not cache.is_ragged):
        return "the layer takes no lengths"
    sizes = {name: cost.first_allowed(axis, (_RAGGED_LENGTH,)) for name, axis in spec.axes.items()}
    sizes["B"] = max(spec.axes["B"].min, min(_RAGGED_BATCH, spec.axes["B"].max))
    if cache is not None:  # lengths differ by what the new tokens leave free
        new = cache.new
        sizes[new] = max(spec.axes[new].min, min(sizes[new], cache.room // 2))
        if sizes[new] == cache.room:
            return "new tokens leave no room for lengths in the cache"
    return PlannedCase(name="ragged", sizes=_with_small_batch(spec, sizes), ragged=True)


def _with_small_batch(spec: ModelSpec, sizes: dict[str, int]) -> dict[str, int]:
    """A smaller batch where the caches would make up most of a bundle."""
    while cost.oracle_cache_bytes(spec, sizes) > _CACHE_BYTES and sizes["B"] > spec.axes["B"].min:
        sizes = {**sizes, "B": sizes["B"] - 1}
    return sizes


def check_plausible(case: GoldenCase, precision: Precision) -> None:
    """Refuse a golden case whose eager result is further from the oracle than rounding explains."""
    refuse_implausible(f"golden case {case.name}", case.oracle, case.eager, precision, case.baselines)


def refuse_large_error(where: str, got: Arrays, oracle: Arrays, most: float, what: str, hint: str) -> None:
    """Refuse results with a relative error above `most`."""
    for name, expected in oracle.items():
        if expected.dtype.kind == "f" and not np.isfinite(expected).all():
            what, place = "The model's own result is not finite.", f"output {name} of {where}"
            raise NoResult(what, got=place, hint=hint, about_types=True)
        far, is_finite = f"shape {got[name].shape}, not {expected.shape}", True
        if got[name].shape == expected.shape:
            off = relative_error(got[name], expected)
            if off <= most:
                continue
            is_finite = math.isfinite(off)
            far = f"relative error {off:.2g}" if is_finite else "NaN or infinite values"
        problem = f"output {name} of {where}: {far}"
        raise ExportError(what, got=problem, hint=hint, about_types=not is_finite)


# -- The steps of an export, and what differs from one kind of model to another ---------------------

_PLAN_LINES = 12
_KINDS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}


class ExportSource(ABC):
    """A model that becomes a bundle: what differs from one kind of model to another."""

    options: ExportOptions
    precision: Precision  # the types in the graph
    auto: bool = False  # whether its precision is chosen node by node
    opset: int
    cache: str = "none"  # the KV cache of a catalog layer
    declares_cache = True  # whether its user said so: one that was recognized need not be a cache
    spec: ModelSpec  # known once there is a graph, complete once the golden cases are captured
    attentions: int  # how many it computes, fused or not
    places: dict[str, str | None] | None = None  # where in the source code they are, where that is known
    notes: list[str]  # what a reader should know
    unfused: Sequence[UnfusedRecord] = ()  # the attentions that are no node of the graph
    shrunk: Sequence[ShrunkRange] = ()  # the axes that vary less than requested
    checks: Checks  # what the export checked of its own work
    on_step: OnStep
    step_number, steps = 0, 0  # of how many
    capture: Any = None  # of a module, the `Capture` of what it computes
    loss: LossRecord | None = None  # of a compressed model

    def step(self, name: str) -> None:
        """Begin the next step."""
        self.on_step(name, self.step_number, self.steps)
        self.step_number += 1

    @abstractmethod
    def graph(self, folder: Path) -> ir.Model:
        """The canonical graph; `folder` is where large files may lie meanwhile."""

    def sample_cases(self) -> Iterable[PlannedCase]:
        """Cases of samples of a user's own."""
        return ()

    def capture_case(self, planned: PlannedCase) -> GoldenCase:
        """One golden case."""
        return self.capture.capture(planned)

    def trace(self, planned: PlannedTrace) -> DecodeTrace:
        """What decoding must give, of a model with a KV cache."""
        found: DecodeTrace = self.capture.trace(self.spec, planned)
        return found

    def draw(self, planned: PlannedCase) -> Arrays:
        """The inputs of a case, of a model whose precision is chosen node by node."""
        raise NotImplementedError

    @abstractmethod
    def origin(self) -> str:
        """Where the weights came from."""

    def check(self, path: Path) -> None:
        """Check the graph that was written."""
        self.checks["graph"] = check_module(path, self.spec, self.precision)

    def layers(self, cases: list[GoldenCase], folder: Path) -> LayersEntry | None:
        """The expected result of every attention in one golden case, where that is known."""
        return None

    def close(self) -> None:  # noqa: B027 (only some open any)
        """Close the sessions that were opened for golden cases."""

    # -- of a model whose attentions are recognized in its graph -------------------------------

    def fuse(self, original: ir.Model) -> ir.Model:
        """The graph with its attentions fused; what is not is noted."""
        with graph_code(f"graph {original.graph.name or 'without a name'}"):
            model, found = fuse_attention(original)
        self.attentions = len(found.fused) + len(found.already) + len(found.unfused)
        self.unfused = [
            UnfusedRecord(name=name, reason=each.reason, place=each.place, value=each.value)
            for name, each in zip(_names_of(found), found.unfused, strict=True)
        ]
        self.notes += [
            f"{each.name} is not fused: {each.reason}" + (f" ({each.place})" if each.place else "")
            for each in found.unfused
        ]
        return model

    def mixed(self, model: ir.Model, axes: Axes, folder: Path) -> ir.Model:
        """A float32 graph in FP16 where that holds the numbers that are drawn; what is wider is noted."""
        self.step("ranges")
        sizes = {at: {name: getattr(axis, at) for name, axis in axes.items()} for at in ("opt", "min")}
        sizes["odd"] = cost.odd_sizes(axes)
        drawn = {name: self.draw(PlannedCase(name=name, sizes=at)) for name, at in sizes.items()}
        with temporary_folder(folder / "float32") as scratch:
            # Rounding to FP16 moves numbers across the levels of a grid, whichever node does it: what FP16
            # costs is measured without the grid.
            save_graph(without_quantizers(model) if is_quantized(model) else model, scratch / MODEL)
            wide = load_graph(scratch / MODEL)  # large weights are read from disk, slice by slice
            plan = plan_mixed_precision(wide, drawn)
        # Lists, as they are read back: a manifest equals the one in its file.
        plain = {name: list(each) if isinstance(each, tuple) else each for name, each in asdict(plan).items()}
        self.checks["mixed precision"] = plain
        lines = plan.lines()
        head = f"mixed precision: {len(plan.kept)} of {plan.nodes} nodes are wider than fp16"
        if plan.worst_loss is not None:
            head += f"; loss {plan.worst_loss:.2g} of the float32 model (limit {plan.limit:.2g})"
        more = len(lines) - _PLAN_LINES
        self.notes += [head, *lines[:_PLAN_LINES], *([f"and {more} more: see the manifest"] * (more > 0))]
        return refuse_invalid(apply_plan(model, plan), model, "The graph in mixed precision")

    def describe(self, model: ir.Model, outputs: Mapping[str, Sequence[Dim]], /, **known: Any) -> None:
        """Make the spec from the graph, whose outputs get their dimensions, and from what else is known."""
        for value in model.graph.outputs:  # shape inference may have written a sum in another order
            value.shape = ir.Shape(outputs[str(value.name)])
        # Where in the source code the attentions are, before that is dropped from the graph.
        self.places = {str(n.name): place_of(n) for n in model.graph.all_nodes() if is_attention(n)}
        tensors = {"inputs": model.graph.inputs, "outputs": model.graph.outputs}
        known |= {name: tuple(map(self._tensor, values)) for name, values in tensors.items()}
        self.spec = ModelSpec(**known, attention_count=self.attentions, mixed=self.auto)

    def _tensor(self, value: ir.Value) -> TensorSpec:
        sizes = (None,) if value.shape is None else dims(value)
        if None in sizes:
            what = f"A size of output {value.name} is not an expression of axes and numbers."
            raise ExportError(what, got=sizes, hint="return it in a shape that follows the axes")
        kind = self.kind_of(short_dtype(value.dtype) or "unknown")
        return TensorSpec(name=str(value.name), kind=kind, dims=sizes)  # type: ignore[arg-type]

    def kind_of(self, dtype: str) -> str:
        """What a spec calls a type: that of the precision, or another one."""
        return FLOAT if dtype == self.precision.name else _KINDS.get(dtype, dtype)


def _names_of(report: FuseReport) -> list[str]:
    """A name for every attention that is not fused, which no other attention has."""
    found = list[str]()
    for each in report.unfused:
        numbered = (each.name if number == 1 else f"{each.name}_{number}" for number in count(1))
        found.append(next(name for name in numbered if name not in (*report.layers, *found)))
    return found


def export_bundle(source: ExportSource, target: Path, on_step: OnStep) -> Bundle:
    """Write the bundle of a model; nothing is left at `target` if anything fails."""
    options, source.on_step = source.options, on_step
    for name in options.golden:
        refuse_unknown_case(name)  # before the work begins
    if options.polygraphy:
        refuse_polygraphy(source.cache, source.precision)
    with closing(source), BundleWriter(target, overwrite=options.overwrite) as writer:
        folder = writer.path
        save_graph(source.graph(folder), folder / MODEL)
        gc.collect()  # the exporter's program holds weights in reference cycles
        source.check(folder / MODEL)
        cases, golden = list[GoldenCase](), list[GoldenEntry]()
        names, budget = options.golden or golden_names(source.spec), golden_budget(options)
        if source.spec.layer is None:
            source.steps += len(names) - len(options.golden or MODULE_CASES)
        drawn = planned_cases(lambda: source.spec, names, budget, source.notes)
        for planned in chain(drawn, source.sample_cases()):
            source.step(f"golden case {planned.name}")
            name = PathPart(planned.name, "a golden case")
            case, file = _capture(source, planned), f"golden/{name}.safetensors"
            if case is None:
                continue
            check_plausible(case, source.precision)
            write_case(folder / file, case)
            cases.append(case)
            about: dict[str, Any] = {"source": case.oracle.source, "flops": case.flops}
            golden.append(GoldenEntry(name=case.name, file=file, sizes=dict(case.sizes), **about))
        if not cases:
            raise ExportError("No golden case is left.", got="; ".join(source.notes), hint="--golden opt")
        if options.polygraphy:
            write_polygraphy(folder / "golden" / "polygraphy", cases)
        layers, traces = source.layers(cases, folder), _write_trace(source, folder)
        source.step("what the outputs show")
        coarse = CoarseMistakes()
        if source.spec.layer is None:  # of catalog layers they are computed with the cases of a validation
            coarse = coarse_mistakes(load_graph(folder / MODEL), cases, source.precision, source.unfused)
        for index, case in enumerate(cases):
            if case.name == coarse.case and coarse.suspects:
                cases[index] = replace(case, suspects=coarse.suspects)
                write_case(folder / golden[index].file, cases[index])
                outputs = {mistake: list(each.changes) for mistake, each in coarse.suspects.items()}
                golden[index] = structs.replace(golden[index], suspects=outputs)
        observed = observe(load_graph(folder / MODEL), cases, source.precision, source.unfused, coarse)
        source.step("hashes")
        attention = [node.describe() for node in attention_nodes(load_graph(folder / MODEL))]
        if source.places is not None:
            attention = [node | {"place": source.places.get(node["name"])} for node in attention]
        return writer.finish(
            Manifest(
                spec=source.spec,
                precision=source.precision,
                opset=source.opset,
                weights=source.origin(),
                attention=attention,
                unfused=list(source.unfused),
                shrunk=list(source.shrunk),
                golden=golden,
                checks=source.checks,
                versions=versions(),
                notes=source.notes,
                traces=traces,
                layers=layers,
                observed=observed,
                loss=source.loss,
            ),
            check=_read_all,
        )


def _capture(source: ExportSource, planned: PlannedCase) -> GoldenCase | None:
    """A golden case; one of masks is left out, with a note, where the model itself has no result for them."""
    try:
        return source.capture_case(planned)
    except NoResult as error:
        if not planned.masks:
            raise
        partly = tuple(mask for mask in planned.masks if mask in (MaskFill.TAIL, MaskFill.HEAD))
        if partly == planned.masks:
            source.notes.append(f"no {planned.name} case: {error.in_one_line}")
            return None
        source.notes.append(f"the {planned.name} case has no full masks: {error.in_one_line}")
        return _capture(source, replace(planned, masks=partly))


def _read_all(bundle: Bundle) -> None:
    """Read a bundle as validation does: its graph, golden cases and traces."""
    check_graph(bundle)
    for _ in golden_cases(bundle):
        pass
    for entry in bundle.manifest.traces:
        read_trace(bundle.file(entry.file), bundle.manifest.spec, bundle.manifest.precision, entry.source)


def _write_trace(source: ExportSource, folder: Path) -> list[TraceEntry]:
    """Of a model with a KV cache: what decoding token by token must give."""
    if source.spec.kv_cache is None:
        return []
    source.step("decode trace")
    planned = plan_trace(source.spec)
    if isinstance(planned, str):
        source.notes.append(planned)
        return []
    try:
        trace = source.trace(planned)
    except ExportError as error:
        if source.declares_cache:
            raise
        source.notes.append(f"no trace: {error.in_one_line}")
        return []
    file = f"traces/{trace.name}.safetensors"
    write_trace(folder / file, trace)
    return [TraceEntry(name=trace.name, file=file, source=trace.oracle.source)]
