"""ONNX Runtime, on the CPU.

It checks the graph, so products are summed in float32 as on a GPU (see `graph.widen`); how ONNX Runtime's own
half-precision CPU kernels would round is not the question here. Nor is what its optimisers do: the level is
BASIC, so the nodes that are checked are those of the graph. At level ALL, ONNX Runtime 1.24 to 1.31 on x86-64
crashes where a transposed FP16 tensor meets a weight (MatmulTransposeFusion leaves a node without a schema,
NchwcTransformer dereferences it).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from mha_deploy.backends.ort_session import (
    first_line,
    import_onnxruntime,
    inputs_and_outputs,
    session_options,
)
from mha_deploy.backends.runner import Arrays, Runner
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.graph.file import graph_of
from mha_deploy.graph.widen import with_float32_products


class OrtCpuRunner(Runner):
    """A graph in ONNX Runtime with the CPU provider and no other."""

    def __init__(self, model: Path | ir.Model) -> None:
        ort = import_onnxruntime(extra="ort")
        graph = graph_of(model)
        widened = ir.to_proto(with_float32_products(graph)).SerializeToString()
        options = session_options(ort, graph, level="BASIC")
        try:
            self._session = ort.InferenceSession(widened, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime raises types of its own that share no base
            raise _explain(error) from error
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


def _explain(error: Exception) -> DeployError:
    if "NOT_IMPLEMENTED" in str(error):
        return _no_bfloat16(first_line(error))
    return DeployError("ONNX Runtime cannot load the graph.", got=first_line(error))


def _no_bfloat16(got: str) -> BackendUnavailable:
    return BackendUnavailable(
        "ONNX Runtime has no CPU kernel for a node of this graph.",
        got=got,
        hint="--backend onnx-reference (ONNX Runtime's CPU kernels have no bfloat16)",
    )
