"""ONNX Runtime on the CPU, and what its sessions share."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.graph.file import graph_of, weights_folder
from mha_deploy.graph.upcast import with_float32_inside
from mha_deploy.runtime.runner import DTYPES, Arrays, Runner, TensorInfo

# -- Sessions of ONNX Runtime, and arrays through them ---------------------------------------------

_EXTERNAL_DATA_FOLDER = "session.model_external_initializers_file_folder_path"
_SILENT = 4  # errors are raised as exceptions as well


def import_onnxruntime() -> Any:
    """The package `onnxruntime`. Its own logger warns of devices that its plugins do not register."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(_SILENT)  # sessions have another
    return onnxruntime


def session_options(ort: Any, graph: ir.Model, *, level: str) -> Any:
    """Options of a session that finds the graph's weights and writes no log; `level` is `BASIC` or `ALL`."""
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.log_severity_level = _SILENT
    folder = weights_folder(graph)
    if folder is not None:
        options.add_session_config_entry(_EXTERNAL_DATA_FOLDER, str(folder.resolve()))
    return options


def inputs_and_outputs(session: Any) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
    """The inputs and outputs of a session."""
    inputs: dict[str, TensorInfo] = {}
    outputs: dict[str, TensorInfo] = {}
    for tensors, infos in ((session.get_inputs(), inputs), (session.get_outputs(), outputs)):
        for tensor in tensors:
            dtype = DTYPES.get(tensor.type.removeprefix("tensor(").removesuffix(")"))
            if dtype is None:
                raise DeployError("A tensor of the graph has a type that is not supported here.", got=tensor)
            infos[tensor.name] = TensorInfo(dtype=dtype, dims=tuple(tensor.shape))
    return inputs, outputs


def run_bound(ort: Any, session: Any, feeds: Arrays, outputs: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Run arrays of any type and get arrays: `session.run` itself has no bfloat16."""
    binding = session.io_binding()
    arrays = {name: np.ascontiguousarray(array) for name, array in feeds.items()}  # values do not own them
    for name, array in arrays.items():
        value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, onnx_type(array.dtype))
        binding.bind_ortvalue_input(name, value)
    for name in outputs:
        binding.bind_output(name)  # to memory of the host
    binding.synchronize_inputs()
    session.run_with_iobinding(binding)
    binding.synchronize_outputs()
    results = {}
    for (name, info), value in zip(outputs.items(), binding.get_outputs(), strict=True):
        # By its bytes: ONNX Runtime converts no bfloat16 to NumPy.
        content = bytearray(ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes()))
        results[name] = np.frombuffer(content, info.dtype).reshape(value.shape())
    return results


def onnx_type(dtype: np.dtype) -> int:
    """The number of a type in ONNX."""
    return int(ir.DataType.from_numpy(dtype))


def first_line(error: BaseException) -> str:
    """The first line of an error, without the C++ signature in front of its message."""
    line = str(error).strip().partition("\n")[0]
    return line.rpartition(" was false. ")[2] or line


# -- ONNX Runtime, on the CPU ----------------------------------------------------------------------


class OrtCpuRunner(Runner):
    """A graph in ONNX Runtime with the CPU provider and no other."""

    def __init__(self, model: Path | ir.Model) -> None:
        ort = import_onnxruntime()
        graph = graph_of(model)
        upcast = ir.to_proto(with_float32_inside(graph)).SerializeToString()
        options = session_options(ort, graph, level="BASIC")
        # It is not timed: threads that spin between calls take the cores from everything else.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = ort.InferenceSession(upcast, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime raises types of its own that share no base
            if "NOT_IMPLEMENTED" in str(error):
                raise _no_bfloat16(first_line(error)) from error
            raise DeployError("ONNX Runtime cannot load the graph.", got=first_line(error)) from error
        self.name = f"ort-cpu {ort.__version__}"
        self.inputs, self.outputs = inputs_and_outputs(self._session)
        if any(info.dtype.name == "bfloat16" for info in (*self.inputs.values(), *self.outputs.values())):
            raise _no_bfloat16("an input or output of the graph")

    def _run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        names = list(self.outputs)
        try:
            return dict(zip(names, self._session.run(names, dict(feeds)), strict=True))
        except Exception as error:
            raise DeployError("ONNX Runtime failed on these inputs.", got=first_line(error)) from error

    def close(self) -> None:
        """Drop the session, and the weights with it."""
        del self._session


def _no_bfloat16(got: str) -> BackendUnavailable:
    return BackendUnavailable(
        "ONNX Runtime has no CPU kernel for a node of this graph.",
        got=got,
        hint="--backend onnx-reference (ONNX Runtime's CPU kernels have no bfloat16)",
    )
