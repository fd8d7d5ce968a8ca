"""The runtimes, one file each, opened by name; native ones in a child process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mha_deploy.environment import can_import
from mha_deploy.errors import BackendUnavailable, DeployError, nearest
from mha_deploy.model.precision import Precision
from mha_deploy.runtime.child import ONNX_REFERENCE, ONNX_RUNTIME, isolation, open_isolated
from mha_deploy.runtime.runner import Runner

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir

    from mha_deploy.graph.file import PackedModel
    from mha_deploy.graph.mixed_precision import Cases, PrecisionPlan, Ranges

CPU_RUNNERS, GPU_RUNNERS = ("ort-cpu", "onnx-reference"), ("ort-cuda", "ort-cuda-contrib")
RUNNERS = CPU_RUNNERS + GPU_RUNNERS


def open_runner(runtime: str, model: Path | ir.Model) -> Runner:
    """Load an ONNX graph into the requested runtime."""
    if runtime not in RUNNERS:
        raise DeployError("No such runtime.", got=runtime, hint=nearest(runtime, RUNNERS))
    from mha_deploy.graph.file import packed_model

    is_reference = runtime == "onnx-reference"
    if not is_reference and not can_import("onnxruntime"):
        hint = f'pip install "mha-deploy[{"ort" if runtime == "ort-cpu" else "ort-gpu"}]"'
        raise BackendUnavailable("ONNX Runtime is not installed.", got=runtime, hint=hint)
    family = ONNX_REFERENCE if is_reference else ONNX_RUNTIME
    if isinstance(model, Path) or not isolation.enabled:
        return open_isolated(family, runtime, _open_graph, runtime, model)
    with packed_model(model) as packed:
        return open_isolated(family, runtime, _open_graph, runtime, packed)


def _open_graph(runtime: str, model: Path | ir.Model | PackedModel) -> Runner:
    from mha_deploy.graph.file import PackedModel

    graph = model.unpacked() if isinstance(model, PackedModel) else model
    if runtime == "onnx-reference":
        from mha_deploy.runtime.onnx_reference import OnnxReferenceRunner

        return OnnxReferenceRunner(graph)
    from mha_deploy.runtime.ort import OrtCpuRunner, OrtCudaRunner

    if runtime == "ort-cpu":
        return OrtCpuRunner(graph)
    return OrtCudaRunner(graph, dialect="onnx" if runtime == "ort-cuda" else "contrib")


def cpu_runtime(precision: Precision) -> str:
    """The runtime that checks a graph on a CPU: ONNX Runtime, but it has no bfloat16 kernels."""
    return "onnx-reference" if precision.name == "bf16" else "ort-cpu"


def available_cpu_runtime(precision: Precision) -> str:
    """The same where it is installed, else ONNX's reference evaluator, which always is."""
    return cpu_runtime(precision) if can_import("onnxruntime") else "onnx-reference"


def measure_ranges(model: Path | ir.Model, cases: Cases) -> Ranges:
    """Run a float32 graph in ONNX Runtime, and measure every tensor and what operators hold inside."""
    from mha_deploy.graph.file import graph_of
    from mha_deploy.graph.mixed_precision import measure_ranges_with

    return measure_ranges_with(partial(run_cases, "ort-cpu"), graph_of(model), cases)


def plan_mixed_precision(
    model: Path | ir.Model, cases: Cases, *, limit: float | None = None
) -> PrecisionPlan:
    """Plan mixed precision by what is measured in ONNX Runtime: ranges, and the loss of the mixed graph."""
    from mha_deploy.graph.file import graph_of
    from mha_deploy.graph.precision_loss import plan_by_loss

    return plan_by_loss(partial(run_cases, "ort-cpu"), graph_of(model), cases, limit=limit)


def run_cases(name: str, model: ir.Model, cases: Cases) -> Iterator[Mapping[str, np.ndarray]]:
    """Run a graph in a CPU runtime on every case in turn, and yield the outputs of each."""
    with open_runner(name, model) as runner:
        for feeds in cases.values():
            yield runner.run(feeds)
