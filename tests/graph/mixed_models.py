"""Small float32 models for the tests of mixed precision, with places where numbers can be made large."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
from conformance import run_in_ort
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from mha_deploy.graph.mixed_precision import PrecisionPlan

E, H, F, WORDS = 32, 4, 64, 50
LOWEST = float(np.finfo(np.float32).min)
NOTHING = PrecisionPlan(
    kept=(), inputs=(), outputs=(), clamped=(), nodes=0, attentions=0, margin=1.0, fully_masked={}
)
"""Write everything in FP16."""


class Graph:
    """Nodes and weights of a graph that is being written."""

    def __init__(self, seed=0):
        self.nodes, self.weights = [], {}
        self.random = np.random.default_rng(seed)

    def op(self, op_type, *inputs, name, outputs=1, **attributes):
        names = [name if index == 0 else f"{name}:{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, names, name=name, **attributes))
        return name

    def weight(self, name, array):
        self.weights[name] = np.asarray(array, np.float32)
        return name

    def ints(self, name, *numbers):
        self.weights[name] = np.array(numbers, np.int64)
        return name

    def linear(self, x, name, rows, columns, factor=1.0):
        matrix = self.random.standard_normal((rows, columns)) * rows**-0.5 * factor
        return self.op("MatMul", x, self.weight(f"{name}.weight", matrix), name=name)

    def model(self, inputs, outputs, opset=23):
        graph = helper.make_graph(
            self.nodes,
            "mixed",
            [helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in inputs.items()],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in outputs.items()],
            [numpy_helper.from_array(array, name) for name, array in self.weights.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
        onnx.checker.check_model(model, full_check=True)
        return ir.from_proto(model)


def encoder(factors: Mapping[str, float] | None = None, *, sentinel=None, layers=2):
    """A pre-norm encoder of words.

    Args:
        factors: For a projection such as `0.down`, what to multiply its weights by.
        sentinel: The number with which the mask hides keys; a boolean mask unless given.
        layers: How many.
    """
    g, factors = Graph(), factors or {}
    mask = "keep"
    if sentinel is not None:
        zero, never = g.weight("zero", 0.0), g.weight("never", sentinel)
        mask = g.op("Where", "keep", zero, never, name="mask")
    x = g.op("Gather", g.weight("table", g.random.standard_normal((WORDS, E))), "ids", name="words")
    for index in range(layers):
        x = _layer(g, x, str(index), mask, factors)
    y = _norm(g, x, "last.norm")
    inputs = {"ids": (TensorProto.INT64, ["B", "S"]), "keep": (TensorProto.BOOL, ["B", 1, "S", "S"])}
    return g.model(inputs, {y: ["B", "S", E]})


def _norm(g, x, name):
    return g.op("LayerNormalization", x, g.weight(f"{name}.weight", np.ones(E)), name=name, axis=-1)


def _layer(g, x, name, mask, factors):
    def linear(value, part, rows, columns):
        return g.linear(value, f"{name}.{part}", rows, columns, factors.get(f"{name}.{part}", 1.0))

    inner = _norm(g, x, f"{name}.norm1")
    q, k, v = (linear(inner, part, E, E) for part in ("q", "k", "v"))
    heads = {"q_num_heads": H, "kv_num_heads": H}
    y = g.op("Attention", q, k, v, mask, name=f"{name}.attention", **heads)
    x = g.op("Add", x, linear(y, "o", E, E), name=f"{name}.add1")
    inner = g.op("Relu", linear(_norm(g, x, f"{name}.norm2"), "up", E, F), name=f"{name}.relu")
    return g.op("Add", x, linear(inner, "down", F, E), name=f"{name}.add2")


def feeds(B=2, S=9, seed=0):
    """Words, and a mask that hides the last keys of the second row."""
    random = np.random.default_rng(seed)
    keep = np.ones((B, 1, S, S), bool)
    keep[1:, :, :, S - 3 :] = False
    return {"ids": random.integers(0, WORDS, (B, S)), "keep": keep}


def run(model, arrays):
    """What ONNX Runtime makes of a model as it is, in its own half-precision kernels where it has them."""
    return run_in_ort(ir.to_proto(model), dict(arrays))[0]


def run_as_written(model, arrays):
    """What ONNX's evaluator makes of a model: every result is rounded to its own type, on every processor.

    ONNX Runtime computes FP16 in FP32 where the processor has no FP16, and then nothing overflows.
    """
    with np.errstate(all="ignore"):
        return ReferenceEvaluator(ir.to_proto(model)).run(None, dict(arrays))[0]


def distance(got, wanted):
    """The relative L2 error, infinite where something is not a number."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted)) if np.isfinite(got).all() else np.inf


def kept_in_float32(plan):
    """The nodes, inputs and outputs that a plan does not write in FP16."""
    return [*plan.kept, *plan.inputs, *plan.outputs]
