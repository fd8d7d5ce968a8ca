"""Graphs of attention written node by node, and what the fused ones compute."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from mha_deploy.graph.fuse import fuse_attention

B, H, S, D = 2, 4, 6, 8


class Hand:
    """A graph, node by node; q, k and v are `[B, H, S, D]` unless it gives its own."""

    def __init__(self, shape=(B, H, S, D)):
        self.nodes, self.constants = [], []
        self.inputs = {name: (TensorProto.FLOAT, shape) for name in "qkv"}

    def op(self, op_type, *inputs, **attributes):
        name = f"{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [name], name=name, **attributes))
        return name

    def const(self, numbers, dtype=np.float32):
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(numbers, dtype), name))
        return name

    def ints(self, *numbers):
        return self.const(numbers, np.int64)

    def input(self, name, shape, dtype=TensorProto.FLOAT):
        self.inputs[name] = (dtype, shape)
        return name

    def cast(self, value, *types):
        for dtype in types:
            value = self.op("Cast", value, to=dtype)
        return value

    def scores(self):
        return self.op("MatMul", "q", self.op("Transpose", "k", perm=[0, 1, 3, 2]))

    def attend(self, scores):
        """Softmax and matmul with V, from the scores on."""
        return self.op("MatMul", self.op("Softmax", scores), "v")

    def model(self, *outputs):
        """The model with these results."""
        named = [self.op("Identity", each) for each in outputs]
        graph = helper.make_graph(
            self.nodes,
            "g",
            [helper.make_tensor_value_info(name, *about) for name, about in self.inputs.items()],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 4) for name in named],
            self.constants,
        )
        domains = {"": 23} | {node.domain: 1 for node in self.nodes if node.domain}
        opsets = [helper.make_opsetid(*each) for each in domains.items()]
        made = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        onnx.checker.check_model(made, full_check=True)
        return made


def fused(model):
    """The fused model as a proto, and the report."""
    new, report = fuse_attention(ir.from_proto(model))
    return ir.to_proto(new), report


def session_of(model):
    """A model of onnx or onnx_ir in ONNX Runtime, without its optimizations."""
    proto = model if isinstance(model, onnx.ModelProto) else ir.to_proto(model)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])


def run(model, feeds):
    """The results for arrays or tensors, by name or in the order of the inputs."""
    session = session_of(model)
    names = [each.name for each in session.get_inputs()]
    given = feeds if isinstance(feeds, dict) else dict(zip(names, feeds, strict=True))
    return session.run(None, {name: np.asarray(given[name]) for name in names})


def random_feeds(model, seed=0):
    """Numbers for every input; booleans show most keys, the first always."""
    random = np.random.default_rng(seed)
    feeds = {}
    for each in model.graph.input:
        shape = [dim.dim_value or 5 for dim in each.type.tensor_type.shape.dim]
        if each.type.tensor_type.elem_type == TensorProto.BOOL:
            feeds[each.name] = random.random(shape) < 0.7
            feeds[each.name][..., 0] = True
        else:
            feeds[each.name] = random.standard_normal(shape).astype(np.float32)
    return feeds


def check_same(model):
    """Fuse a model, compare the results of both, and return the report."""
    new, report = fused(model)
    feeds = random_feeds(model)
    for want, got in zip(run(model, feeds), run(new, feeds), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)
    return report
