"""ONNX Runtime, on the CPU.

It checks the graph, so products are summed in float32 as on a GPU (see `graph.widen`); how ONNX Runtime's own
half-precision CPU kernels would round is not the question here.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir

from mha_deploy.backends.runner import Arrays, Runner, TensorInfo
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.graph.file import graph_of, weights_folder
from mha_deploy.graph.widen import with_float32_products

_EXTERNAL_DATA_FOLDER = "session.model_external_initializers_file_folder_path"
_TYPES = {
    "tensor(float16)": np.dtype(np.float16),
    "tensor(bfloat16)": np.dtype(ml_dtypes.bfloat16),
    "tensor(float)": np.dtype(np.float32),
    "tensor(int32)": np.dtype(np.int32),
    "tensor(int64)": np.dtype(np.int64),
    "tensor(bool)": np.dtype(np.bool_),
}


class OrtCpuRunner(Runner):
    """A graph in ONNX Runtime with the CPU provider and no other."""

    def __init__(self, model: Path | ir.Model) -> None:
        try:
            import onnxruntime as ort
        except ImportError as error:
            raise BackendUnavailable(
                "ONNX Runtime is not installed.", got=error, hint='pip install "mha-deploy[ort]"'
            ) from error
        graph = graph_of(model)
        folder = weights_folder(graph)
        options = ort.SessionOptions()
        options.log_severity_level = 3  # errors: they come back as exceptions as well
        if folder is not None:
            options.add_session_config_entry(_EXTERNAL_DATA_FOLDER, str(folder.resolve()))
        widened = ir.to_proto(with_float32_products(graph)).SerializeToString()
        try:
            self._session = ort.InferenceSession(widened, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime raises types of its own that share no base
            raise _explain(error) from error
        self.name = f"ort-cpu {ort.__version__}"
        self.inputs = {info.name: _tensor_info(info) for info in self._session.get_inputs()}
        self.outputs = {info.name: _tensor_info(info) for info in self._session.get_outputs()}

    def _run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        names = list(self.outputs)
        try:
            return dict(zip(names, self._session.run(names, dict(feeds)), strict=True))
        except Exception as error:
            raise DeployError("ONNX Runtime failed on these inputs.", got=_first_line(error)) from error

    def close(self) -> None:
        """Drop the session, and the weights with it."""
        del self._session


def _explain(error: Exception) -> DeployError:
    if "NOT_IMPLEMENTED" in str(error):
        return BackendUnavailable(
            "ONNX Runtime has no CPU kernel for a node of this graph.",
            got=_first_line(error),
            hint="--backend onnx-reference (ONNX Runtime's CPU kernels have no bfloat16)",
        )
    return DeployError("ONNX Runtime cannot load the graph.", got=_first_line(error))


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _tensor_info(info: object) -> TensorInfo:
    kind = _TYPES.get(info.type)  # type: ignore[attr-defined]
    if kind is None:
        raise DeployError("A tensor of the graph has a type that is not supported here.", got=info)
    return TensorInfo(dtype=kind, dims=tuple(info.shape))  # type: ignore[attr-defined]
