"""A grouped attention layer that generates, as canonical graphs with the two kinds of cache.

`dynamic`: past_key and past_value come in, present_key and present_value go out, longer by S.
`fixed`: TensorScatter writes the new keys into a cache of M slots, behind the `lengths[b]` valid ones of each
batch element.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from mha_deploy.graph.lower.cache import ENTRIES_NOTE, noted_caches

_DTYPES = {"fp16": (TensorProto.FLOAT16, np.float16), "fp32": (TensorProto.FLOAT, np.float32)}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Sizes of the layer; M is the number of positions, and of the slots of a fixed cache.

    A mask has a row for each query, unless `mask_rows` says otherwise.
    """

    E: int = 32
    Hq: int = 4
    Hkv: int = 2
    D: int = 8
    M: int = 12
    S: int | str = "S"
    T: int | str | None = None
    dtype: str = "fp32"
    rotary: dict[str, Any] = field(default_factory=dict)
    attention: dict[str, Any] = field(default_factory=lambda: {"is_causal": 1})
    opset: int = 24
    mask: bool = False
    mask_rows: int | None = None

    @property
    def rotated(self) -> int:
        return self.rotary.get("rotary_embedding_dim", self.D)


def dynamic(layer: Layer) -> ir.Model:
    """3-D throughout, as the projections leave it."""
    nodes = [
        *_projections(),
        _rotary(layer, "q", "q_rotated", num_heads=layer.Hq),
        _rotary(layer, "k", "k_rotated", num_heads=layer.Hkv),
        _attention(
            layer,
            ["q_rotated", "k_rotated", "v", _mask(layer), "past_key", "past_value"],
            ["heads", "present_key", "present_value"],
            q_num_heads=layer.Hq,
            kv_num_heads=layer.Hkv,
        ),
        helper.make_node("MatMul", ["heads", "wo"], ["y"], name="out"),
    ]
    past = ["B", layer.Hkv, "P", layer.D]
    present = ["B", layer.Hkv, "P_plus_S", layer.D]
    states = {"present_key": present, "present_value": present}
    inputs = {"past_key": past, "past_value": past, "mask": [layer.mask_rows or layer.S, "P_plus_S"]}
    return _model(layer, nodes, inputs, states)


def fixed(layer: Layer) -> ir.Model:
    """4-D from the heads on, as the cache is."""
    nodes = [*_projections(), *_lengths()]
    for name in "qkv":
        nodes += [
            helper.make_node("Reshape", [name, f"{name}_shape"], [f"{name}_rows"], name=f"{name}_split"),
            helper.make_node(
                "Transpose", [f"{name}_rows"], [f"{name}4"], name=f"{name}_transpose", perm=[0, 2, 1, 3]
            ),
        ]
    nodes += [
        _rotary(layer, "q4", "q_rotated"),
        _rotary(layer, "k4", "k_rotated"),
        helper.make_node(
            "TensorScatter", ["key_cache", "k_rotated", "write"], ["key_cache_out"], name="key_update"
        ),
        helper.make_node(
            "TensorScatter", ["value_cache", "v4", "write"], ["value_cache_out"], name="value_update"
        ),
        _attention(
            layer, ["q_rotated", "key_cache_out", "value_cache_out", _mask(layer), "", "", "ends"], ["heads"]
        ),
        helper.make_node("Transpose", ["heads"], ["rows"], name="merge_transpose", perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["rows", "y_shape"], ["merged"], name="merge"),
        helper.make_node("MatMul", ["merged", "wo"], ["y"], name="out"),
    ]
    cache = ["B", layer.Hkv, layer.T or layer.M, layer.D]
    mask = ["B", 1, layer.mask_rows or layer.S, layer.T or layer.M]
    inputs = {"key_cache": cache, "value_cache": cache, "lengths": ["B"], "mask": mask}
    return _model(layer, nodes, inputs, {"key_cache_out": cache, "value_cache_out": cache})


def feeds(model: ir.Model, layer: Layer, *, starts: list[int], S: int, P: int = 0) -> dict[str, np.ndarray]:
    """Random inputs for S new tokens after `starts` tokens in each batch element and a past of length P."""
    rng, B = np.random.default_rng(len(starts) + 10 * S + 100 * P), len(starts)
    sizes = {"B": B, "S": S, "P": P, "P_plus_S": P + S, "M": layer.M}
    begin = np.array(starts, np.int64)
    given = {"lengths": begin.astype(np.int32), "positions": begin[:, None] + np.arange(S)}
    out = {}
    for value in model.graph.inputs:
        shape = [dim if isinstance(dim, int) else sizes[dim.value] for dim in value.shape]
        numbers = rng.standard_normal(shape).astype(_DTYPES[layer.dtype][1])
        numbers = numbers < 0.5 if value.name == "mask" else numbers
        out[value.name] = given.get(value.name, numbers)
    return out


def with_whole_states(
    model: ir.Model, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]
) -> list[np.ndarray]:
    """The outputs with whole caches: rows that were given out alone are written into them."""
    whole, caches = [], noted_caches(model, ENTRIES_NOTE)
    for name, array in outputs.items():
        past = inputs.get(caches.get(name, ""))
        if past is not None:
            rows, array = array, past.copy()
            for b, begin in enumerate(inputs["lengths"]):
                array[b, :, begin : begin + rows.shape[2]] = rows[b]
        whole.append(array)
    return whole


def _mask(layer: Layer) -> str:
    return "mask" if layer.mask else ""


def _projections() -> list[onnx.NodeProto]:
    return [helper.make_node("MatMul", ["x", f"w{n}"], [n], name=f"{n}.matmul") for n in "qkv"]


def _lengths() -> list[onnx.NodeProto]:
    """Where the new keys go, and how many are valid then."""
    return [
        helper.make_node("Cast", ["lengths"], ["write"], name="write", to=TensorProto.INT64),
        helper.make_node("Shape", ["x"], ["S_new"], name="S_new", start=1, end=2),
        helper.make_node("Add", ["write", "S_new"], ["ends"], name="ends"),
    ]


def _rotary(layer: Layer, x: str, y: str, **attributes: Any) -> onnx.NodeProto:
    inputs = [x, "cos", "sin", "positions"]
    return helper.make_node("RotaryEmbedding", inputs, [y], name=f"{y}.rotary", **layer.rotary, **attributes)


def _attention(layer: Layer, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node("Attention", inputs, outputs, name="att", **layer.attention, **attributes)


def _model(
    layer: Layer, nodes: list[onnx.NodeProto], more: dict[str, Any], states: dict[str, Any]
) -> ir.Model:
    kind = _DTYPES[layer.dtype][0]
    inputs = {"x": ["B", layer.S, layer.E], "positions": ["B", layer.S], **more}
    if not layer.mask:
        inputs.pop("mask")
    outputs = {"y": inputs["x"], **states}
    kinds = {"positions": TensorProto.INT64, "lengths": TensorProto.INT32, "mask": TensorProto.BOOL}
    graph = helper.make_graph(
        nodes,
        "layer",
        [helper.make_tensor_value_info(name, kinds.get(name, kind), dims) for name, dims in inputs.items()],
        [helper.make_tensor_value_info(name, kind, dims) for name, dims in outputs.items()],
        _constants(layer),
    )
    opsets = [helper.make_opsetid("", layer.opset)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto, data_prop=True))


def _constants(layer: Layer) -> list[onnx.TensorProto]:
    rng, E = np.random.default_rng(0), layer.E
    widths = {"q": layer.Hq * layer.D, "k": layer.Hkv * layer.D, "v": layer.Hkv * layer.D}
    arrays = {f"w{name}": rng.standard_normal((E, width)) / E**0.5 for name, width in widths.items()}
    arrays["wo"] = rng.standard_normal((layer.Hq * layer.D, E)) / E**0.5
    half = layer.rotated // 2
    angles = np.arange(layer.M)[:, None] * 10000.0 ** (-np.arange(half) / half)
    arrays |= {"cos": np.cos(angles), "sin": np.sin(angles)}
    constants = {name: array.astype(_DTYPES[layer.dtype][1]) for name, array in arrays.items()}
    for name, heads in (("q", layer.Hq), ("k", layer.Hkv), ("v", layer.Hkv)):
        constants[f"{name}_shape"] = np.array([0, 0, heads, layer.D])
    constants["y_shape"] = np.array([0, 0, layer.Hq * layer.D])
    return [numpy_helper.from_array(array, name) for name, array in constants.items()]
