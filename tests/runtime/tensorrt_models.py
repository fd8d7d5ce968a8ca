"""Small ONNX models with attention in them, and what the TensorRT tests share."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from bundle_edit import copy_of
from onnx import TensorProto, helper, numpy_helper

from mha_deploy.bundle.folder import open_bundle
from mha_deploy.engine.build import engine_from_bundle
from mha_deploy.engine.engine import default_backend, open_engine, parse_ranges, reasons_not_to_run
from mha_deploy.errors import BackendUnavailable
from mha_deploy.options import EngineOptions
from mha_deploy.runtime.cuda import find_gpu

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt_rtx is not installed"
)

TYPES = {
    "fp16": (TensorProto.FLOAT16, np.float16),
    "bf16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16),
    "fp32": (TensorProto.FLOAT, np.float32),
}


def attention(
    precision: str = "fp16",
    *,
    B: int | str = 2,
    Hq: int = 4,
    Hkv: int = 4,
    S: int | str = 16,
    D: int = 32,
    mask: str | None = None,
    name: str = "att0",
    opset: int = 23,
    nonpad: bool = False,
    **attributes: float,
) -> bytes:
    """One `Attention` node on 4-D inputs q, k, v."""
    dtype = TYPES[precision][0]
    inputs = [_value(n, dtype, [B, heads, S, D]) for n, heads in (("q", Hq), ("k", Hkv), ("v", Hkv))]
    names = ["q", "k", "v"]
    if mask is not None:
        inputs.append(_value("mask", TensorProto.BOOL if mask == "bool" else dtype, [B, 1, S, S]))
        names.append("mask")
    if nonpad:
        inputs.append(_value("valid", TensorProto.INT64, [B]))
        names += [""] * (6 - len(names)) + ["valid"]
    node = helper.make_node("Attention", names, ["y"], name=name, **attributes)
    return _model([node], inputs, [_value("y", dtype, [B, Hq, S, D])], opset=opset)


def layer(
    precision: str = "fp16",
    *,
    E: int = 128,
    H: int = 4,
    Hkv: int | None = None,
    D: int = 32,
    count: int = 1,
    name: str = "att",
    causal: bool = False,
) -> onnx.ModelProto:
    """Projections around 3-D attention, `count` layers deep, with dynamic batch and length."""
    dtype, numpy_type = TYPES[precision]
    kv = H if Hkv is None else Hkv
    rng = np.random.default_rng(0)
    nodes, weights, x = [], [], "x"
    for i in range(count):
        sizes = {"q": (E, H * D), "k": (E, kv * D), "v": (E, kv * D), "o": (H * D, E)}
        for key, size in sizes.items():
            weight = (rng.standard_normal(size) * 0.05).astype(numpy_type)
            weights.append(numpy_helper.from_array(weight, f"w{key}{i}"))
        for key in "qkv":
            nodes.append(helper.make_node("MatMul", [x, f"w{key}{i}"], [f"{key}{i}"], name=f"proj_{key}{i}"))
        nodes.append(
            helper.make_node(
                "Attention",
                [f"q{i}", f"k{i}", f"v{i}"],
                [f"a{i}"],
                name=f"{name}{i}",
                q_num_heads=H,
                kv_num_heads=kv,
                is_causal=int(causal),
            )
        )
        y = "y" if i == count - 1 else f"y{i}"
        nodes.append(helper.make_node("MatMul", [f"a{i}", f"wo{i}"], [y], name=f"proj_o{i}"))
        x = y
    shape = ["B", "S", E]
    data = _model(nodes, [_value("x", dtype, shape)], [_value("y", dtype, shape)], weights)
    return onnx.load_model_from_string(data)


def primitives(precision: str = "fp16", *, D: int = 32, prefix: str = "att0") -> bytes:
    """Attention in primitive operators, as it is lowered for versions without an attention layer."""
    dtype, numpy_type = TYPES[precision]
    shape = [2, 4, 16, D]
    scale = numpy_helper.from_array(np.array(D**-0.5).astype(numpy_type), "scale")
    nodes = [
        helper.make_node("Mul", ["q", "scale"], ["qs"], name=f"{prefix}/scale"),
        helper.make_node("Transpose", ["k"], ["kt"], name=f"{prefix}/transpose", perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["qs", "kt"], ["scores"], name=f"{prefix}/scores"),
        helper.make_node("Softmax", ["scores"], ["weights"], name=f"{prefix}/softmax", axis=-1),
        helper.make_node("MatMul", ["weights", "v"], ["y"], name=f"{prefix}/sum"),
    ]
    inputs = [_value(name, dtype, shape) for name in "qkv"]
    return _model(nodes, inputs, [_value("y", dtype, shape)], [scale])


def profile(*, S: tuple[int, int, int] = (1, 16, 64), E: int = 128) -> dict:
    """A profile for `layer`: batch 1 to 4, length as asked."""
    low, opt, high = S
    return {"x": ((1, low, E), (2, opt, E), (4, high, E))}


def _value(name: str, dtype: int, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def _model(nodes, inputs, outputs, weights=(), *, opset: int = 23) -> bytes:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, list(weights))
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()


def engine_on_gpu(workshop, bundle, *profiles):
    """A copy of a bundle and its engine, built once by the TensorRT that is here; skipped without a GPU."""
    if find_gpu() is None:
        pytest.skip("cuda-bindings see no GPU")
    try:
        backend = default_backend()
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    spec = bundle.manifest.spec

    def build(folder):
        ranges = [parse_ranges(text, spec) for text in profiles]
        options = EngineOptions(backend=backend, profiles=ranges, allow_decomposed=True)
        return str(engine_from_bundle(open_bundle(copy_of(bundle, folder / "bundle")), options).path)

    folder, path = workshop.thing(f"{spec.name}-on-gpu", build)
    engine = open_engine(Path(path))
    if reasons := reasons_not_to_run(engine):
        pytest.skip("; ".join(reasons))
    return open_bundle(folder / "bundle"), engine
