"""What the ONNX Runtime backends share: how a graph becomes a session, and arrays go through it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from mha_deploy.backends.runner import Arrays, TensorInfo
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.graph.file import weights_folder

_EXTERNAL_DATA_FOLDER = "session.model_external_initializers_file_folder_path"
_SILENT = 4  # errors come back as exceptions: nobody needs them twice
_TYPES = {
    "tensor(float16)": np.dtype(np.float16),
    "tensor(bfloat16)": np.dtype(ml_dtypes.bfloat16),
    "tensor(float)": np.dtype(np.float32),
    "tensor(int32)": np.dtype(np.int32),
    "tensor(int64)": np.dtype(np.int64),
    "tensor(bool)": np.dtype(np.bool_),
}


def import_onnxruntime(extra: str) -> Any:
    """The package `onnxruntime`, or which extra of this one installs it."""
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendUnavailable(
            "ONNX Runtime is not installed.", got=error, hint=f'pip install "mha-deploy[{extra}]"'
        ) from error
    # The package's own logger warns of devices that its plugins do not register; sessions have another.
    onnxruntime.set_default_logger_severity(_SILENT)
    return onnxruntime


def session_options(ort: Any, graph: ir.Model, *, level: str) -> Any:
    """Options of a session that knows where the graph keeps its weights and writes no log.

    Args:
        ort: The package.
        graph: The graph.
        level: What ONNX Runtime may rewrite: `BASIC` or `ALL`.
    """
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.log_severity_level = _SILENT
    folder = weights_folder(graph)
    if folder is not None:
        options.add_session_config_entry(_EXTERNAL_DATA_FOLDER, str(folder.resolve()))
    return options


def inputs_and_outputs(session: Any) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
    """What goes into a session and what comes out."""
    return _tensor_infos(session.get_inputs()), _tensor_infos(session.get_outputs())


def _tensor_infos(tensors: Any) -> dict[str, TensorInfo]:
    return {tensor.name: _tensor_info(tensor) for tensor in tensors}


def _tensor_info(tensor: Any) -> TensorInfo:
    kind = _TYPES.get(tensor.type)
    if kind is None:
        raise DeployError("A tensor of the graph has a type that is not supported here.", got=tensor)
    return TensorInfo(dtype=kind, dims=tuple(tensor.shape))


def run_bound(ort: Any, session: Any, feeds: Arrays, outputs: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Run arrays of any type and get arrays: `session.run` itself has no bfloat16."""
    binding = session.io_binding()
    held = {name: np.ascontiguousarray(array) for name, array in feeds.items()}  # the values do not own them
    for name, array in held.items():
        value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, onnx_type(array.dtype))
        binding.bind_ortvalue_input(name, value)
    for name in outputs:
        binding.bind_output(name)  # to memory of the host
    binding.synchronize_inputs()
    session.run_with_iobinding(binding)
    binding.synchronize_outputs()
    values = zip(outputs.items(), binding.get_outputs(), strict=True)
    return {name: _array_of(value, info.dtype) for (name, info), value in values}


def onnx_type(dtype: np.dtype) -> int:
    """The number that ONNX gives a type."""
    return int(ir.DataType.from_numpy(dtype))


def _array_of(value: Any, dtype: np.dtype) -> np.ndarray:
    """A copy of a value on the host, by its bytes: ONNX Runtime makes no NumPy array of bfloat16."""
    content = bytearray(ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes()))
    return np.frombuffer(content, dtype).reshape(value.shape())


def first_line(error: BaseException) -> str:
    """The line of an error that says what happened, without the signature of the C++ that noticed."""
    line = str(error).strip().partition("\n")[0]
    _, separator, told = line.rpartition(" was false. ")
    return told if separator and told else line
