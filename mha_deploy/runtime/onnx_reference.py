"""ONNX's own reference evaluator: complete, and the only CPU runtime here with bfloat16.

Matmuls, reductions and activations are computed in float32 as on a GPU (see `graph.upcast`). By itself the
evaluator rounds even the softmax scale to the type of the tensors: 0.125 and 0.1256 are the same number in
bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from mha_deploy.graph.file import graph_of, weights_folder
from mha_deploy.graph.ir import reference_evaluator
from mha_deploy.graph.upcast import with_float32_inside
from mha_deploy.runtime.runner import Arrays, Runner, TensorInfo, foreign_errors

if TYPE_CHECKING:
    from onnx.reference import ReferenceEvaluator


_AS_THEY_ARE = (ir.DataType.DOUBLE, ir.DataType.FLOAT)
_LARGE = 1 << 12  # numbers


class OnnxReferenceRunner(Runner):
    """A graph in ONNX's reference evaluator."""

    def __init__(self, model: Path | ir.Model) -> None:
        graph = with_float32_inside(graph_of(model))
        with foreign_errors("The reference evaluator cannot load the graph."):
            self._evaluator = evaluator_of(graph)
        proto = self._evaluator.proto_
        self.title, self.name = "onnx-reference", f"onnx-reference {onnx.__version__}"
        self.inputs = {value.name: _tensor_info(value) for value in proto.graph.input}
        self.outputs = {value.name: _tensor_info(value) for value in proto.graph.output}

    def _run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        names = list(self.outputs)
        # What is not finite is judged, and no warning.
        with foreign_errors("The reference evaluator failed on these inputs."), np.errstate(all="ignore"):
            return dict(zip(names, self._evaluator.run(names, dict(feeds)), strict=True))


def evaluator_of(model: ir.Model, given: Mapping[str, Any] = MappingProxyType({})) -> ReferenceEvaluator:
    """ONNX's reference evaluator of a graph, with its external weights; the graph is used up.

    Large weights are handed over as they are: in a serialized graph there would be two of each. Nodes get
    what is `given` for others.
    """
    held: dict[str, Any] = dict(given)
    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None and tensor.dtype in _AS_THEY_ARE and tensor.size > _LARGE:
            if name not in held:
                held[name] = tensor.numpy()
            del model.graph.initializers[name]
    proto = ir.to_proto(model)
    onnx.load_external_data_for_model(proto, str(weights_folder(model) or "."))
    evaluator = reference_evaluator(proto)
    evaluator.rt_inits_.update(held)
    return evaluator


def _tensor_info(value: onnx.ValueInfoProto) -> TensorInfo:
    tensor = value.type.tensor_type
    dims = (dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in tensor.shape.dim)
    return TensorInfo.of(value.name, onnx.TensorProto.DataType.Name(tensor.elem_type).lower(), dims)
