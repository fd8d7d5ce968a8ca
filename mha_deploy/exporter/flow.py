"""The flow of every export, whatever the model comes from: graph, checks, golden cases, trace, manifest.

PyTorch is not imported here: an ONNX file becomes a bundle without it.
"""

from __future__ import annotations

import gc
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from msgspec import structs

from mha_deploy.bundle.cases import (
    Arrays,
    DecodeTrace,
    GoldenCase,
    PlannedTrace,
    golden_cases,
    plan_trace,
    read_trace,
    refuse_implausible_case,
    refuse_polygraphy,
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
from mha_deploy.bundle.sizes import (
    MODULE_CASES,
    MaskFill,
    PlannedCase,
    golden_budget,
    golden_names,
    odd_sizes,
    planned_cases,
    refuse_unknown_case,
)
from mha_deploy.environment import versions
from mha_deploy.errors import BundleError, ExportError, NoResult
from mha_deploy.exporter.coarse import CoarseMistakes, coarse_mistakes
from mha_deploy.exporter.observe import observe
from mha_deploy.files import PathPart
from mha_deploy.graph.attention_node import attention_nodes, is_attention, short_dtype
from mha_deploy.graph.canonical import check_canonical, check_graph
from mha_deploy.graph.file import load_graph, save_graph
from mha_deploy.graph.fuse import FuseReport, fuse_attention, place_of
from mha_deploy.graph.fuse.values import largest_tensor, name_gemms
from mha_deploy.graph.ir import Dim, dims
from mha_deploy.graph.mixed_precision import apply_plan
from mha_deploy.graph.quantize import is_quantized, without_quantizers
from mha_deploy.graph.valid import refuse_invalid
from mha_deploy.metrics import relative_error
from mha_deploy.model.precision import PRECISIONS, Precision
from mha_deploy.model.spec import FLOAT, Axes, ModelSpec, ModuleSpec, TensorSpec
from mha_deploy.options import ExportOptions, OnStep
from mha_deploy.output import temporary_folder
from mha_deploy.runtime import plan_mixed_precision
from mha_deploy.runtime.user_code import graph_code


def are_finite(results: Arrays) -> bool:
    """Whether all numbers are: those of a fully masked query inside a model may be NaN, which it replaces."""
    return all(np.isfinite(array).all() for array in results.values() if array.dtype.kind == "f")


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
_LARGE_BYTES = 1 << 26  # of weights: less is not worth a search through all objects of PyTorch
LAYERS_BYTES = 1 << 30  # of the results of all attentions: more are not kept
_KINDS = {name: each.torch_name for name, each in PRECISIONS.items()} | {"fp64": "float64"}


class ExportSource(ABC):
    """A model that becomes a bundle: what differs from one kind of model to another."""

    options: ExportOptions
    precision: Precision  # the types in the graph
    auto: bool = False  # whether its precision is chosen node by node
    opset: int
    cache: str = "none"  # the KV cache of a catalog layer
    planned: Sequence[str] = MODULE_CASES  # the golden cases among its steps
    declares_cache = True  # whether its user declared it: one that was recognized need not be a cache
    spec: ModelSpec  # known once there is a graph, complete once the golden cases are captured
    attentions: int  # how many it computes, fused or not
    places: dict[str, str | None] | None = None  # where in the source code they are, where that is known
    notes: list[str]  # what a reader should know
    unfused: Sequence[UnfusedRecord] = ()  # the attentions that are no node of the graph
    shrunk: Sequence[ShrunkRange] = ()  # the axes that vary less than requested
    checks: Checks  # what the export checked of its own work
    on_step: OnStep
    step_number, steps = 0, 0  # of how many
    is_counted = False  # whether that is known: golden cases depend on the graph
    capture: Any = None  # of a module, the `Capture` of what it computes
    loss: LossRecord | None = None  # of a compressed model

    def step(self, name: str) -> None:
        """Begin the next step."""
        self.on_step(name, self.step_number, self.steps if self.is_counted else 0)
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
        self.notes += self.capture.notes
        return found

    def draw(self, planned: PlannedCase) -> Arrays:
        """The inputs of a case, of a model whose precision is chosen node by node."""
        raise NotImplementedError

    @abstractmethod
    def origin(self) -> str:
        """Where the weights came from."""

    def check(self, path: Path) -> None:
        """Check the graph that was written."""
        self.checks["graph"] = check_canonical(path, self.spec, self.precision)

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
        name_gemms(model)
        return model

    def mixed(self, model: ir.Model, axes: Axes, folder: Path) -> ir.Model:
        """A float32 graph in FP16 where that holds the numbers that are drawn; what is wider is noted."""
        self.step("ranges")
        sizes = {at: {name: getattr(axis, at) for name, axis in axes.items()} for at in ("opt", "min")}
        sizes["odd"] = odd_sizes(axes)
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
        kept = f"{len(plan.kept)} of {plan.nodes} nodes stay" if plan.kept else "no node has to stay"
        head = f"mixed precision: {kept} wider than fp16, by the numbers at {', '.join(drawn)} sizes"
        if plan.worst_loss is not None:
            cost = f"{plan.worst_loss:.2g} against {plan.reference}"
            head += f"; FP16 costs {cost} (relative L2, limit {plan.limit:.2g})"
        more = len(lines) - _PLAN_LINES
        self.notes += [head, *lines[:_PLAN_LINES], *([f"and {more} more: see the manifest"] * (more > 0))]
        return refuse_invalid(apply_plan(model, plan), lambda: model, "The graph in mixed precision")

    def describe(self, model: ir.Model, outputs: Mapping[str, Sequence[Dim]], /, **known: Any) -> None:
        """Make the spec from the graph, whose outputs get their dimensions, and from what else is known."""
        for value in model.graph.outputs:  # shape inference may have written a sum in another order
            value.shape = ir.Shape(outputs[str(value.name)])
        # Where in the source code the attentions are, before that is dropped from the graph.
        self.places = {str(n.name): place_of(n) for n in model.graph.all_nodes() if is_attention(n)}
        tensors = {"inputs": model.graph.inputs, "outputs": model.graph.outputs}
        known |= {name: tuple(map(self._tensor, values)) for name, values in tensors.items()}
        # Of the graph, whose types may be others than those of the module.
        weights = (each.const_value for each in model.graph.initializers.values())
        known["weight_bytes"] = sum(each.nbytes for each in weights if each is not None)
        self.spec = ModuleSpec(**known, attention_count=self.attentions, mixed=self.auto)

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
        if sum(path.stat().st_size for path in folder.iterdir()) >= _LARGE_BYTES:
            gc.collect()  # the exporter's program holds weights in reference cycles
        source.check(folder / MODEL)
        cases, golden = list[GoldenCase](), list[GoldenEntry]()
        names, budget = options.golden or golden_names(source.spec), golden_budget(options)
        if not source.spec.draws_probes:
            budget = replace(budget, numbers=largest_tensor(load_graph(folder / MODEL)))
        source.steps += len(names) - len(options.golden or source.planned)
        source.is_counted = True
        drawn = planned_cases(lambda: source.spec, names, budget, source.notes)
        for planned in chain(drawn, source.sample_cases()):
            source.step(f"golden case {planned.name}")
            name = PathPart(planned.name, "a golden case")
            case, file = _capture(source, planned), f"golden/{name}.safetensors"
            if case is None:
                continue
            write_case(folder / file, case)
            cases.append(case)
            golden.append(
                GoldenEntry(
                    name=case.name,
                    file=file,
                    sizes=dict(case.sizes),
                    source=case.oracle.source,
                    flops=case.flops,
                )
            )
        if not cases:
            raise ExportError("No golden case is left.", got="; ".join(source.notes), hint="--golden opt")
        if options.polygraphy:
            write_polygraphy(folder / "golden" / "polygraphy", cases)
        layers, traces = source.layers(cases, folder), _write_trace(source, folder)
        source.step("what the outputs show")
        coarse, written = CoarseMistakes(), load_graph(folder / MODEL)
        if not source.spec.draws_probes:
            coarse = coarse_mistakes(written, cases, source.precision, source.unfused)
        for index, case in enumerate(cases):
            if case.name == coarse.case and coarse.suspects:
                cases[index] = replace(case, suspects=coarse.suspects)
                write_case(folder / golden[index].file, cases[index])
                outputs = {mistake: list(each.changes) for mistake, each in coarse.suspects.items()}
                excess = {key: each.excess for key, each in coarse.suspects.items() if each.excess}
                golden[index] = structs.replace(golden[index], suspects=outputs, excess=excess)
        observed = observe(written, cases, source.precision, source.unfused, coarse)
        source.step("hashes")
        attention = [node.describe() for node in attention_nodes(written)]
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
    """A golden case; or none, with a note, if the model has no result for its masks or it says nothing.

    The result of eight bits may cancel in one case to less than their steps, and then any would pass.
    """
    try:
        case = replace(source.capture_case(planned), batch=source.spec.batch_name)
        refuse_implausible_case(case, source.precision)
        return case
    except BundleError as error:
        if source.loss is None or source.options.golden or planned.name == "opt":
            raise
        source.notes.append(f"no {planned.name} case: {error.in_one_line}")
        return None
    except NoResult as error:
        if not planned.masks:
            raise
        partly = tuple(mask for mask in planned.masks if mask in (MaskFill.TAIL, MaskFill.HEAD))
        if partly == planned.masks:
            source.notes.append(f"no {planned.name} case: {error.in_one_line}")
            return None
        why = f"the model itself has no finite result for one ({error.got})"
        source.notes.append(f"no fully masked query in the {planned.name} case: {why}")
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
