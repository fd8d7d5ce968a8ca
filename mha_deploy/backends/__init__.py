"""The runtimes, one file each, opened by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mha_deploy.backends.runner import Runner
from mha_deploy.errors import DeployError, nearest
from mha_deploy.precision import Precision
from mha_deploy.versions import can_import

if TYPE_CHECKING:
    import onnx_ir as ir

CPU_RUNNERS = ("ort-cpu", "onnx-reference")
GPU_RUNNERS = ("ort-cuda", "ort-cuda-contrib")
RUNNERS = CPU_RUNNERS + GPU_RUNNERS


def open_runner(backend: str, model: Path | ir.Model) -> Runner:
    """Load an ONNX graph into the runtime that was asked for, or say why that cannot be."""
    if backend == "ort-cpu":
        from mha_deploy.backends.ort import OrtCpuRunner

        return OrtCpuRunner(model)
    if backend == "onnx-reference":
        from mha_deploy.backends.onnx_reference import OnnxReferenceRunner

        return OnnxReferenceRunner(model)
    if backend in GPU_RUNNERS:
        from mha_deploy.backends.ort_cuda import OrtCudaRunner

        return OrtCudaRunner(model, dialect="onnx" if backend == "ort-cuda" else "contrib")
    raise DeployError("No such backend.", got=backend, hint=nearest(backend, RUNNERS))


def cpu_backend(precision: Precision) -> str:
    """The runtime that checks a graph on a CPU: ONNX Runtime, but for the bfloat16 it has no kernels for."""
    return "onnx-reference" if precision.name == "bf16" else "ort-cpu"


def available_cpu_backend(precision: Precision) -> str:
    """The same where it is installed, else ONNX's reference evaluator, which always is."""
    chosen = cpu_backend(precision)
    installed = can_import("onnxruntime")
    return chosen if installed or chosen != "ort-cpu" else "onnx-reference"
