"""The runtimes, one file each, opened by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from mha_deploy.backends.runner import Runner
from mha_deploy.errors import DeployError, nearest
from mha_deploy.precision import Precision

if TYPE_CHECKING:
    import onnx_ir as ir

RUNNERS = ("ort-cpu", "onnx-reference")


def open_runner(backend: str, model: Path | ir.Model) -> Runner:
    """Load an ONNX graph into the runtime that was asked for, or say why that cannot be."""
    if backend == "ort-cpu":
        from mha_deploy.backends.ort import OrtCpuRunner

        return OrtCpuRunner(model)
    if backend == "onnx-reference":
        from mha_deploy.backends.onnx_reference import OnnxReferenceRunner

        return OnnxReferenceRunner(model)
    raise DeployError("No such backend.", got=backend, hint=nearest(backend, RUNNERS))


def cpu_backend(precision: Precision) -> str:
    """The runtime that checks a graph on a CPU: ONNX Runtime, but for the bfloat16 it has no kernels for."""
    return "onnx-reference" if precision.name == "bf16" else "ort-cpu"


def available_cpu_backend(precision: Precision) -> str:
    """The same where it is installed, else ONNX's reference evaluator, which always is."""
    chosen = cpu_backend(precision)
    installed = importlib.util.find_spec("onnxruntime") is not None
    return chosen if installed or chosen != "ort-cpu" else "onnx-reference"
