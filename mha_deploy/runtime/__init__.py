"""The runtimes, one file each, opened by name; native ones in a child process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mha_deploy.environment import can_import
from mha_deploy.errors import BackendUnavailable, DeployError, nearest
from mha_deploy.model.precision import Precision
from mha_deploy.runtime.child import ONNX_RUNTIME, isolation, open_isolated
from mha_deploy.runtime.runner import Runner

if TYPE_CHECKING:
    import onnx_ir as ir

    from mha_deploy.graph.file import PackedModel

CPU_RUNNERS = ("ort-cpu", "onnx-reference")
GPU_RUNNERS = ("ort-cuda", "ort-cuda-contrib")
RUNNERS = CPU_RUNNERS + GPU_RUNNERS


def open_runner(backend: str, model: Path | ir.Model) -> Runner:
    """Load an ONNX graph into the requested runtime.

    Raises:
        BackendUnavailable: It is not installed, or cannot run here.
        DeployError: There is no such runtime, or it refuses the graph.
    """
    if backend == "ort-cpu" or backend in GPU_RUNNERS:
        from mha_deploy.graph.file import PackedModel

        if not can_import("onnxruntime"):
            extra = "ort" if backend == "ort-cpu" else "ort-gpu"
            raise BackendUnavailable(
                "ONNX Runtime is not installed.", got=backend, hint=f'pip install "mha-deploy[{extra}]"'
            )
        packed = model if isinstance(model, Path) or not isolation.enabled else PackedModel.of(model)
        return open_isolated(ONNX_RUNTIME, backend, _open_onnxruntime, backend, packed)
    if backend == "onnx-reference":
        from mha_deploy.runtime.onnx_reference import OnnxReferenceRunner

        return OnnxReferenceRunner(model)
    raise DeployError("No such backend.", got=backend, hint=nearest(backend, RUNNERS))


def _open_onnxruntime(backend: str, model: Path | ir.Model | PackedModel) -> Runner:
    from mha_deploy.graph.file import PackedModel

    graph = model.unpacked() if isinstance(model, PackedModel) else model
    if backend == "ort-cpu":
        from mha_deploy.runtime.ort import OrtCpuRunner

        return OrtCpuRunner(graph)
    from mha_deploy.runtime.ort_cuda import OrtCudaRunner

    return OrtCudaRunner(graph, dialect="onnx" if backend == "ort-cuda" else "contrib")


def cpu_backend(precision: Precision) -> str:
    """The runtime that checks a graph on a CPU: ONNX Runtime, but it has no bfloat16 kernels."""
    return "onnx-reference" if precision.name == "bf16" else "ort-cpu"


def available_cpu_backend(precision: Precision) -> str:
    """The same where it is installed, else ONNX's reference evaluator, which always is."""
    return cpu_backend(precision) if can_import("onnxruntime") else "onnx-reference"
