"""The flow of every export, whatever the model comes from: graph, checks, golden cases, trace, manifest.

PyTorch is not imported here: an ONNX file becomes a bundle without it.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import onnx_ir as ir

from mha_deploy.bundle.cases import (
    GoldenCase,
    refuse_implausible,
    refuse_polygraphy,
    write_case,
    write_polygraphy,
)
from mha_deploy.bundle.folder import MODEL, Bundle, BundleWriter
from mha_deploy.bundle.manifest import Checks, GoldenEntry, LayersEntry, Manifest, TraceEntry
from mha_deploy.bundle.traces import DecodeTrace, PlannedTrace, plan_trace, write_trace
from mha_deploy.environment import versions
from mha_deploy.errors import ExportError
from mha_deploy.export.plan import PlannedCase, golden_budget, planned_cases, refuse_unknown_case
from mha_deploy.graph.attention_node import attention_nodes, is_attention, short_dtype
from mha_deploy.graph.canonical import check_module
from mha_deploy.graph.file import load_graph, save_graph
from mha_deploy.graph.fuse import fuse_attention, place_of
from mha_deploy.graph.precision import PrecisionPlan
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import FLOAT, Dim, ModelSpec, TensorSpec
from mha_deploy.options import ExportOptions

OnStep = Callable[[str, int, int], None]

_PLAN_LINES = 12
_KINDS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}


class Steps:
    """Counts the steps of an export."""

    def __init__(self, on_step: OnStep, count: int) -> None:
        self.on_step, self.count, self.number = on_step, count, 0

    def __call__(self, name: str) -> None:
        """Begin the next one."""
        self.on_step(name, self.number, self.count)
        self.number += 1


class Source(ABC):
    """A model that becomes a bundle: what differs from one kind of model to another."""

    options: ExportOptions
    precision: Precision  # the types in the graph
    auto: bool = False  # whether its precision is chosen node by node
    opset: int
    cache: str = "none"  # the KV cache of a catalog layer
    golden: tuple[str, ...]  # the golden cases by default
    spec: ModelSpec  # known once there is a graph, complete once the golden cases are captured
    attentions: int  # how many it computes, fused or not
    places: dict[str, str | None] | None = None  # where in the source code they are, where that is known
    notes: list[str]  # what a reader should know
    checks: Checks  # what the export checked of its own work
    steps: int

    @abstractmethod
    def graph(self, folder: Path, step: Steps) -> ir.Model:
        """The canonical graph; `folder` is where large files may lie meanwhile."""

    @abstractmethod
    def captured(self, planned: PlannedCase) -> GoldenCase:
        """One golden case."""

    def trace(self, planned: PlannedTrace) -> DecodeTrace:
        """The decode trace of a model with a KV cache."""
        raise ExportError("The model has no declared KV cache.", got=planned.name)

    @abstractmethod
    def origin(self) -> str:
        """Where the weights came from."""

    def check(self, path: Path, step: Steps) -> None:
        """Check the graph that was written."""
        self.checks["graph"] = check_module(path, self.spec, self.precision)

    def layers(self, cases: list[GoldenCase], folder: Path, step: Steps) -> LayersEntry | None:
        """The expected result of every attention in one golden case, where that is known."""
        return None

    def close(self) -> None:  # noqa: B027 (only some open any)
        """Close the sessions that were opened for golden cases."""

    # -- of a model whose attentions are recognised in its graph -------------------------------

    def fused(self, original: ir.Model) -> ir.Model:
        """The graph with its attentions fused; what is not is noted."""
        model, found = fuse_attention(original)
        self.attentions = len(found.fused) + len(found.already) + len(found.unfused)
        self.notes += [
            f"{each.name} is not fused: {each.reason}" + (f" ({each.place})" if each.place else "")
            for each in found.unfused
        ]
        return model

    def note_precision(self, plan: PrecisionPlan) -> None:
        """Note what a mixed graph keeps wider than FP16."""
        self.checks["mixed precision"] = plan.describe()
        lines = plan.lines()
        head = f"mixed precision: {len(plan.kept)} of {plan.nodes} nodes are wider than fp16"
        more = len(lines) - _PLAN_LINES
        self.notes += [head, *lines[:_PLAN_LINES], *([f"and {more} more: see the manifest"] * (more > 0))]

    def note_places(self, model: ir.Model) -> None:
        """Keep where in the source code the attentions are, before that is dropped from the graph."""
        self.places = {str(n.name): place_of(n) for n in model.graph.all_nodes() if is_attention(n)}

    def tensor(self, value: ir.Value, dims: tuple[Dim, ...]) -> TensorSpec:
        """An input or output of the graph."""
        kind = short_dtype(value.dtype) or "unknown"
        kind = FLOAT if kind == self.precision.name else _KINDS.get(kind, kind)
        return TensorSpec(name=str(value.name), kind=kind, dims=dims)


def export_bundle(source: Source, target: Path, on_step: OnStep) -> Bundle:
    """Write the bundle of a model; nothing is left at `target` if anything fails."""
    options, step = source.options, Steps(on_step, source.steps)
    for name in options.golden:
        refuse_unknown_case(name)  # before the work begins
    if options.polygraphy:
        refuse_polygraphy(source.cache, source.precision)
    with closing(source), BundleWriter(target, overwrite=options.overwrite) as writer:
        folder = writer.path
        save_graph(source.graph(folder, step), folder / MODEL)
        gc.collect()  # the exporter's program holds weights in reference cycles
        source.check(folder / MODEL, step)
        (folder / "golden").mkdir()
        cases = []
        names, budget = options.golden or source.golden, golden_budget(options)
        for planned in planned_cases(lambda: source.spec, names, budget, source.notes):
            step(f"golden case {planned.name}")
            case = source.captured(planned)
            refuse_implausible(f"golden case {case.name}", case.oracle, case.eager, source.precision)
            write_case(folder / "golden" / f"{case.name}.safetensors", case)
            cases.append(case)
        if not cases:
            raise ExportError("No golden case is left.", got="; ".join(source.notes), hint="--golden opt")
        if options.polygraphy:
            write_polygraphy(folder / "golden" / "polygraphy", cases)
        layers = source.layers(cases, folder, step)
        traces = _write_trace(source, folder, step)
        step("hashes")
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
                golden=[
                    GoldenEntry(
                        name=c.name, file=f"golden/{c.name}.safetensors", sizes=c.sizes, flops=c.flops
                    )
                    for c in cases
                ],
                checks=source.checks,
                versions=versions(),
                notes=source.notes,
                traces=traces,
                layers=layers,
            )
        )


def _write_trace(source: Source, folder: Path, step: Steps) -> list[TraceEntry]:
    """Of a model with a KV cache: what decoding token by token must give."""
    if source.spec.kv_cache is None:
        return []
    step("decode trace")
    planned = plan_trace(source.spec)
    if isinstance(planned, str):
        source.notes.append(planned)
        return []
    trace = source.trace(planned)
    file = f"traces/{trace.name}.safetensors"
    (folder / "traces").mkdir()
    write_trace(folder / file, trace)
    return [TraceEntry(name=trace.name, file=file)]
