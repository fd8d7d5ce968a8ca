"""A catalog layer to a bundle: canonical graph, golden cases, decode trace."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mha_deploy.bundle.cases import GoldenCase, refuse_polygraphy, write_case, write_polygraphy
from mha_deploy.bundle.folder import MODEL, Bundle, BundleWriter, sha256
from mha_deploy.bundle.manifest import GoldenEntry, Manifest, TraceEntry
from mha_deploy.bundle.traces import DecodeTrace, write_trace
from mha_deploy.environment import versions
from mha_deploy.errors import ExportError, nearest
from mha_deploy.export.canonical import canonical_from_module, choose_opset
from mha_deploy.export.decode_trace import PlannedTrace, TraceCapture, plan_trace
from mha_deploy.export.golden import GoldenCapture, refuse_overflow
from mha_deploy.export.options import DEVICES, ExportOptions, GoldenPlan, plan_golden
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.canonical import check_canonical
from mha_deploy.graph.file import load_graph, save_graph
from mha_deploy.model.precision import Precision, find_precision
from mha_deploy.model.spec import AttentionSpec
from mha_deploy.reference import build_module
from mha_deploy.reference.attention import Attention
from mha_deploy.reference.inputs import fed_to, random_inputs, to_numpy
from mha_deploy.reference.weights import read_weights
from mha_deploy.runtime import available_cpu_backend, open_runner

OnStep = Callable[[str, int, int], None]
_FIXED_STEPS = 5


def bundle_from_spec(
    spec: AttentionSpec,
    target: Path,
    options: ExportOptions | None = None,
    on_step: OnStep = lambda name, number, count: None,
) -> Bundle:
    """Export a layer and everything needed to check it elsewhere.

    Nothing is left at `target` if anything fails.

    Args:
        spec: The layer.
        target: The folder to write.
        options: How to export.
        on_step: Called as each step begins, with its name, its number from 0, and how many there are.
    """
    options = options or ExportOptions()
    precision = find_precision(options.precision)
    if options.polygraphy:
        refuse_polygraphy(spec.cache, precision)
    opset = choose_opset(spec, options.opset)
    plan = plan_golden(spec, options.golden, options.budget)
    trace = plan_trace(spec)
    step = Steps(on_step, _FIXED_STEPS + len(plan.cases) + isinstance(trace, PlannedTrace))
    with BundleWriter(target, overwrite=options.overwrite) as writer:
        step("weights")
        module = _module(spec, precision, options)
        step("ONNX graph")
        checks, attention = _write_model(module, writer.path / MODEL, precision, opset)
        step("run at two shapes")
        checks["dynamic axes"] = _run_at_two_shapes(writer.path / MODEL, module, precision)
        notes = list(plan.notes)
        entries = _write_golden(module, precision, options, plan, writer.path, step)
        traces = _write_trace(module, precision, options.seed, trace, writer.path, notes, step)
        step("hashes")
        return writer.finish(
            Manifest(
                spec=spec,
                precision=precision,
                opset=opset,
                weights=_origin(options),
                attention=attention,
                golden=entries,
                checks=checks,
                versions=versions(),
                notes=notes,
                traces=traces,
            )
        )


class Steps:
    """Counts the steps for whoever shows them."""

    def __init__(self, on_step: OnStep, count: int) -> None:
        self.on_step, self.count, self.number = on_step, count, 0

    def __call__(self, name: str) -> None:
        """Begin the next one."""
        self.on_step(name, self.number, self.count)
        self.number += 1


def _module(spec: AttentionSpec, precision: Precision, options: ExportOptions) -> Attention:
    if options.device not in DEVICES:
        raise ExportError("No such device.", got=options.device, hint=nearest(options.device, DEVICES))
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ExportError("There is no CUDA device.", got=options.device, hint="--device cpu")
    weights = None if options.weights is None else read_weights(options.weights)
    dtype = getattr(torch, precision.torch_name)
    # The eager result is the textbook's: what an engine that does not fuse would round like.
    return build_module(
        spec, seed=options.seed, weights=weights, dtype=dtype, device=options.device, path="plain"
    )


def _write_model(
    module: Attention, path: Path, precision: Precision, opset: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    save_graph(canonical_from_module(module, opset=opset), path)
    gc.collect()  # the exporter's program holds the transposed weights in reference cycles
    checks: dict[str, Any] = {"graph": check_canonical(path, module.spec, precision)}
    return checks, [node.describe() for node in attention_nodes(load_graph(path))]


def _run_at_two_shapes(path: Path, module: Attention, precision: Precision) -> dict[str, Any]:
    """Prove that the dynamic axes are dynamic: run the graph at two sizes and look at what comes out."""
    spec = module.spec
    cases = plan_golden(spec, ("min", "odd")).cases
    with open_runner(available_cpu_backend(precision), path) as runner:
        for case in cases:
            feeds = fed_to(module, random_inputs(spec, case.sizes, seed=0))
            got = runner.run({name: to_numpy(tensor) for name, tensor in feeds.items()})
            for tensor in spec.outputs:
                if got[tensor.name].shape != tensor.shape(case.sizes):
                    raise ExportError(
                        f"Output {tensor.name} does not follow the axes.",
                        got=f"{got[tensor.name].shape} at {case.sizes}",
                    )
        return {"runtime": runner.name, "sizes": [case.sizes for case in cases]}


def _write_golden(
    module: Attention,
    precision: Precision,
    options: ExportOptions,
    plan: GoldenPlan,
    folder: Path,
    step: Steps,
) -> list[GoldenEntry]:
    step("FP64 oracle")
    capture = GoldenCapture(module, precision, options.seed)
    (folder / "golden").mkdir()
    cases: list[GoldenCase] = []
    for planned in plan.cases:
        step(f"golden case {planned.name}")
        case = capture.capture(planned)
        refuse_overflow(case, precision, module)
        write_case(folder / "golden" / f"{case.name}.safetensors", case)
        cases.append(case)
    if options.polygraphy:
        write_polygraphy(folder / "golden" / "polygraphy", cases)
    return [GoldenEntry(name=c.name, file=f"golden/{c.name}.safetensors", sizes=dict(c.sizes)) for c in cases]


def _write_trace(
    module: Attention,
    precision: Precision,
    seed: int,
    planned: PlannedTrace | str,
    folder: Path,
    notes: list[str],
    step: Steps,
) -> list[TraceEntry]:
    """Of a layer with a KV cache: what decoding token by token must give."""
    if isinstance(planned, str):
        notes += [planned] if module.spec.cache != "none" else []
        return []
    step("decode trace")
    trace = TraceCapture(module, precision, seed).capture(
        planned.name, len(planned.prompt), planned.prompt, planned.steps
    )
    return [write_trace_into(folder, trace)]


def write_trace_into(folder: Path, trace: DecodeTrace) -> TraceEntry:
    """Write a trace into the folder of a bundle."""
    file = f"traces/{trace.name}.safetensors"
    (folder / "traces").mkdir()
    write_trace(folder / file, trace)
    return TraceEntry(name=trace.name, file=file)


def _origin(options: ExportOptions) -> str:
    if options.weights is None:
        return f"random, seed {options.seed}"
    return f"{options.weights.name}, sha256 {sha256(options.weights)}"
