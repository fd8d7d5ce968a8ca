"""Where ONNX Runtime puts the nodes of a graph, and whether it may.

ONNX Runtime gives to the CPU what its CUDA provider has no kernel for, without a word. It also keeps there,
on purpose, the few numbers that shapes are computed from (`GetCpuPreferredNodes` in its source): that is its
way to run the graph, and allowed. Anything else on the CPU would be another program than the one asked for.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from mha_deploy.errors import BackendUnavailable, DeployError

CUDA = "CUDAExecutionProvider"
_CPU = "CPUExecutionProvider"
_RECORD = "session.record_ep_graph_assignment_info"
_UNAVAILABLE = "ORT_CUDA_UNAVAILABLE"
_LIBRARIES = ("libonnxruntime_providers_shared.so", "libonnxruntime_providers_cuda.so")
_SHAPE_OPERATORS = frozenset(
    {
        *("Constant", "ConstantOfShape", "Identity", "Range", "Shape", "Size"),
        *("Cast", "Concat", "Expand", "Gather", "Reshape", "Slice", "Split", "Squeeze", "Unsqueeze"),
        *("Add", "Div", "Equal", "Max", "Min", "Mul", "ReduceProd", "Sub", "Where"),
    }
)


@dataclass(frozen=True, kw_only=True)
class PlacedNode:
    """A node, and what it is called in the graph that runs."""

    op_type: str
    name: str

    def __str__(self) -> str:
        return f"{self.op_type} {self.name}".strip()


def refuse_without_cuda(ort: Any) -> None:
    """Refuse an ONNX Runtime that has no CUDA provider to offer.

    Raises:
        BackendUnavailable: The CPU package is installed, or lies over the GPU package.
    """
    _preload_libraries(ort)
    providers = ort.get_available_providers()
    if CUDA in providers:
        return
    if (_libraries_of(ort) / _LIBRARIES[-1]).exists():
        raise _dropped(ort)
    raise BackendUnavailable(
        f"ONNX Runtime {ort.__version__} has no CUDA provider: it is the package for CPUs.",
        got=", ".join(providers),
        hint='pip uninstall onnxruntime, then pip install "mha-deploy[ort-gpu]"',
    )


def _preload_libraries(ort: Any) -> None:
    """Let ONNX Runtime find the CUDA and cuDNN that pip installed; what it prints of it, the loader tells."""
    preload = getattr(ort, "preload_dlls", None)
    if preload is not None:
        with contextlib.redirect_stdout(io.StringIO()):
            preload()


def refuse_dropped_provider(ort: Any, session: Any) -> None:
    """Refuse a session that ONNX Runtime made without the provider it was asked for.

    Raises:
        BackendUnavailable: The provider's libraries do not load; the reason is the loader's own.
    """
    if CUDA not in session.get_providers():
        raise _dropped(ort)


def _dropped(ort: Any) -> BackendUnavailable:
    return BackendUnavailable(
        "ONNX Runtime dropped its CUDA provider, and would run on the CPU.",
        got=why_libraries_do_not_load(_libraries_of(ort)),
        hint=f"install the CUDA and cuDNN that ONNX Runtime {ort.__version__} was built for",
    )


def _libraries_of(ort: Any) -> Path:
    return Path(ort.__file__).parent / "capi"


def why_libraries_do_not_load(folder: Path) -> str:
    """What the loader says of the provider's libraries: ONNX Runtime keeps it to itself."""
    if os.environ.get(_UNAVAILABLE):  # set by the package itself; loading past it can crash
        return f"{_UNAVAILABLE} is set: its CUDA libraries were not found"
    for library in _LIBRARIES:
        try:
            ctypes.CDLL(str(folder / library))
        except OSError as error:
            return str(error)
    return "its libraries load; the GPU or the driver may be too old for it"


def record_placement(options: Any) -> None:
    """Ask a session that is to be made to remember where it puts the nodes."""
    options.add_session_config_entry(_RECORD, "1")


def nodes_on_cpu(session: Any) -> tuple[PlacedNode, ...]:
    """The nodes that a session runs on the CPU.

    Raises:
        BackendUnavailable: This version of ONNX Runtime does not tell.
    """
    ask = getattr(session, "get_provider_graph_assignment_info", None)
    if ask is None:
        raise BackendUnavailable(
            "This ONNX Runtime does not tell which nodes run on the CPU.", hint="onnxruntime-gpu>=1.24"
        )
    parts = [part for part in ask() if part.ep_name == _CPU]
    return tuple(
        PlacedNode(op_type=node.op_type, name=node.name) for part in parts for node in part.get_nodes()
    )


def refuse_work_on_cpu(nodes: tuple[PlacedNode, ...], graph: ir.Model) -> None:
    """Refuse nodes on the CPU that do more than compute shapes.

    Raises:
        DeployError: Names those nodes.
    """
    by_name = {node.name: node for node in graph.graph}
    work = [placed for placed in nodes if not _computes_shapes(placed, by_name.get(placed.name))]
    if work:
        raise DeployError(
            "ONNX Runtime would run nodes on the CPU: its CUDA provider has no kernels for them.",
            got=", ".join(map(str, work)),
            hint="another precision, another dialect, or --backend ort-cpu",
        )


def _computes_shapes(placed: PlacedNode, node: ir.Node | None) -> bool:
    if placed.op_type not in _SHAPE_OPERATORS:
        return False
    # A node that ONNX Runtime made itself is not in our graph: its operator must do.
    outputs = [] if node is None else node.outputs
    return not any(output.dtype is not None and output.dtype.is_floating_point() for output in outputs)
