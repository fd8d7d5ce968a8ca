"""The cost of fusing grows with the number of nodes, and verification has a bound: counted, not timed."""

import sys
import tracemalloc

import numpy as np
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from mha_deploy.graph.fuse import fuse_attention

X = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", "S", 8])


def model_of(nodes, output, *weights):
    """A model of nodes that are given as operator, inputs, output and attributes."""
    made = [helper.make_node(op, given, [out], name=out, **more) for op, given, out, more in nodes]
    outputs = [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["B", "S", None])]
    graph = helper.make_graph(made, "graph", [X], outputs, list(weights))
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10))


def chain(count, *op_types):
    """Operators behind a matmul of two computed tensors."""
    nodes = [("Transpose", ["x"], "t", {"perm": [0, 2, 1]}), ("MatMul", ["x", "t"], "n0", {})]
    nodes += [(op_types[i % len(op_types)], [f"n{i}"], f"n{i + 1}", {}) for i in range(count)]
    return model_of(nodes, f"n{count}")


def branches(count):
    """Softmaxes of which each reads another step of one chain of steps that are not recognized."""
    nodes = [("Transpose", ["x"], "t", {"perm": [0, 2, 1]}), ("MatMul", ["x", "t"], "n0", {})]
    for i in range(count):
        nodes.append(("Sin", [f"n{i}"], f"n{i + 1}", {}))
        nodes.append(("Softmax", [f"n{i + 1}"], f"s{i}", {}))
        nodes.append(("MatMul", [f"s{i}", "x"], f"y{i}", {}))
    nodes.append(("Sum", [f"y{i}" for i in range(count)], "y", {}))
    return model_of(nodes, "y")


def peak_of(model):
    """The bytes at the worst moment."""
    tracemalloc.start()
    try:
        fuse_attention(model)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def calls_of(model):
    """How many functions of Python are called."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        fuse_attention(model)
    finally:
        sys.setprofile(None)
    return calls


def test_the_memory_grows_with_the_nodes():
    fuse_attention(chain(10, "Relu", "Tanh"))  # what is loaded once
    assert peak_of(chain(800, "Relu", "Tanh")) < 6 * peak_of(chain(200, "Relu", "Tanh"))


def test_the_work_grows_with_the_nodes():
    fuse_attention(branches(10))
    assert calls_of(branches(240)) < 6 * calls_of(branches(60))


def triangle(size):
    """Attention whose mask is cut out of a triangle that is made of constants."""
    nodes = [
        ("Transpose", ["x"], "t", {"perm": [0, 2, 1]}),
        ("MatMul", ["x", "t"], "scores", {}),
        ("ConstantOfShape", ["size"], "ones", {"value": numpy_helper.from_array(np.ones(1, np.float32))}),
        ("Trilu", ["ones"], "lower", {"upper": 0}),
        ("Cast", ["lower"], "shown", {"to": TensorProto.BOOL}),
        ("Shape", ["x"], "end", {"start": 1, "end": 2}),
        ("Concat", ["end", "end"], "ends", {"axis": 0}),
        ("Slice", ["shown", "zeros", "ends"], "mask", {}),
        ("Where", ["mask", "scores", "never"], "masked", {}),
        ("Softmax", ["masked"], "weights", {}),
        ("MatMul", ["weights", "x"], "y", {}),
    ]
    sizes = numpy_helper.from_array(np.array([size, size]), "size")
    zeros = numpy_helper.from_array(np.zeros(2, np.int64), "zeros")
    return model_of(nodes, "y", sizes, zeros, numpy_helper.from_array(np.float32(-np.inf), "never"))


def test_a_mask_of_constants_is_computed_once(monkeypatch):
    sizes = []
    original = np.tril
    monkeypatch.setattr(np, "tril", lambda array, *given: sizes.append(array.size) or original(array, *given))
    _, report = fuse_attention(triangle(700))
    assert report.fused[0].verified
    assert sizes.count(700 * 700) <= 2  # one in the original, one in what stands for it


def test_a_mask_of_too_many_constants_is_verified_with_fewer(monkeypatch):
    """1.6 billion numbers, of which a few rows and columns are used, are not computed."""
    sizes = []
    original = np.tril
    monkeypatch.setattr(np, "tril", lambda array, *given: sizes.append(array.size) or original(array, *given))
    _, report = fuse_attention(triangle(40_000))
    assert [(each.causal, each.verified) for each in report.fused] == [(True, True)]
    assert 0 < max(sizes) < 2**20
