"""Layers around attention for the tests of the plugin dialect: operands, gates, masks."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from conformance import run_in_reference
from onnx import TensorProto, helper, numpy_helper

from mha_deploy.graph.lower import lower
from mha_deploy.graph.plugin_node import is_plugin_attention

FP16, INT32, INT64 = TensorProto.FLOAT16, TensorProto.INT32, TensorProto.INT64


def model_of(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, list[Any]]],
    outputs: dict[str, tuple[int, list[Any]]],
    constants: dict[str, np.ndarray] | None = None,
    opset: int = 24,
) -> ir.Model:
    """A graph with its shapes inferred."""
    graph = helper.make_graph(
        nodes,
        "layer",
        [helper.make_tensor_value_info(name, *value) for name, value in inputs.items()],
        [helper.make_tensor_value_info(name, *value) for name, value in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)
    onnx.checker.check_model(proto, full_check=True)
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto, data_prop=True))


def node(op_type: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """A node named after its first output; names are separated by spaces, `-` leaves one out."""
    names = [name.replace("-", "") for name in inputs.split()]
    return helper.make_node(op_type, names, outputs.split(), name=f"n_{outputs.split()[0]}", **attributes)


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    """Weights that keep numbers near one."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float16)


def plugin_node_of(model: ir.Model) -> ir.Node:
    """The one attention of a lowered model."""
    (attention,) = [each for each in model.graph.all_nodes() if is_plugin_attention(each)]
    return attention


def attributes_of(model: ir.Model, *names: str) -> dict[str, Any]:
    """Attributes of the one attention of a lowered model."""
    attributes = plugin_node_of(model).attributes
    return {name: attributes[name].value for name in names}


def operators(model: ir.Model) -> list[str]:
    """The operators of the main graph, without constants."""
    return [each.op_type for each in model.graph if each.op_type != "Constant"]


def random_inputs(model: ir.Model, sizes: dict[str, int], **given: np.ndarray) -> dict[str, np.ndarray]:
    """Random numbers for the inputs that are not given."""
    rng = np.random.default_rng(1)
    feeds = {}
    for value in model.graph.inputs:
        shape = [dim if isinstance(dim, int) else sizes[dim.value] for dim in value.shape]
        feeds[value.name] = given.get(value.name, rng.standard_normal(shape).astype(np.float16))
    return feeds


def assert_same(model: ir.Model, lowered: ir.Model, feeds: dict[str, np.ndarray], atol: float = 4e-3) -> None:
    """Both compute the same, but for roundings; the other side is the dialect of matmuls."""
    onnx.checker.check_model(ir.to_proto(lowered))
    wanted = run_in_reference(_plain(model), feeds)
    got = run_in_reference(ir.to_proto(lowered), feeds)
    assert [value.name for value in lowered.graph.outputs] == [value.name for value in model.graph.outputs]
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one.astype(np.float64), other.astype(np.float64), rtol=0, atol=atol)


@functools.lru_cache(maxsize=4)
def _plain(model: ir.Model) -> onnx.ModelProto:
    """The same in matmuls; most models are run several times."""
    return ir.to_proto(lower(model, "primitives", cache="copy"))
