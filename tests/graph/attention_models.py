"""Small attention models for the tests of this folder."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper

_TYPES = {
    "fp16": onnx.TensorProto.FLOAT16,
    "bf16": onnx.TensorProto.BFLOAT16,
    "fp32": onnx.TensorProto.FLOAT,
    "fp64": onnx.TensorProto.DOUBLE,
    "bool": onnx.TensorProto.BOOL,
    "int64": onnx.TensorProto.INT64,
    "int32": onnx.TensorProto.INT32,
}

Dims = tuple[int | str, ...]


def attention(
    q: Dims,
    k: Dims,
    v: Dims | None = None,
    *,
    dtype: str = "fp32",
    mask: tuple[str, Dims] | None = None,
    past: int | str | None = None,
    lengths: bool = False,
    present: bool = False,
    weights: bool = False,
    opset: int = 24,
    **attributes: Any,
) -> ir.Model:
    """A graph of one Attention node named `att`; 4-D inputs q, k, v unless the dims say otherwise."""
    v = v or k
    inputs = {"q": (dtype, q), "k": (dtype, k), "v": (dtype, v)}
    names = ["q", "k", "v", "", "", "", ""]
    if mask is not None:
        inputs["mask"], names[3] = mask, "mask"
    if past is not None:
        heads, size = attributes.get("kv_num_heads", k[1]), _head_size(k, attributes)
        value_size = _head_size(v, attributes)
        inputs["past_key"], names[4] = (dtype, (k[0], heads, past, size)), "past_key"
        inputs["past_value"], names[5] = (dtype, (k[0], heads, past, value_size)), "past_value"
    if lengths:
        inputs["lengths"], names[6] = ("int64", (q[0],)), "lengths"
    outputs = ["y", *(["present_key", "present_value"] if present else [])]
    if weights:
        outputs = [*outputs, *[""] * (3 - len(outputs)), "weights"]
    while not names[-1]:
        names.pop()
    node = helper.make_node("Attention", names, outputs, name="att", **attributes)
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, _TYPES[kind], dims) for name, (kind, dims) in inputs.items()],
        [helper.make_tensor_value_info(name, _TYPES[dtype], None) for name in outputs if name],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    for value in model.graph.outputs:
        # A total of two dynamic lengths has no name, but the rank is known.
        value.shape = value.shape if value.shape is not None else ir.Shape([None] * 4)
    return model


def _head_size(dims: Dims, attributes: dict[str, Any]) -> int:
    last = dims[-1]
    if not isinstance(last, int):
        raise TypeError(f"the last axis must be a number: {dims}")
    return last if len(dims) == 4 else last // attributes["kv_num_heads"]


def random_feeds(model: ir.Model, sizes: dict[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs at the given sizes of the dynamic axes; boolean masks keep some keys in each row."""
    rng = np.random.default_rng(seed)
    feeds = {}
    for value in model.graph.inputs:
        shape = tuple(dim if isinstance(dim, int) else sizes[dim.value] for dim in value.shape)
        if value.dtype == ir.DataType.BOOL:
            feeds[value.name] = rng.random(shape) > 0.3
            feeds[value.name][..., 0] = True
        elif value.dtype == ir.DataType.INT64:
            feeds[value.name] = rng.integers(1, sizes.get("T", 4), shape)
        else:
            feeds[value.name] = rng.standard_normal(shape).astype(value.dtype.numpy())
    return feeds
