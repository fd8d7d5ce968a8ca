"""Lowered graphs really build with TensorRT-RTX and are fused, and the eligibility rules foretell it."""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir
import pytest
from attention_models import attention
from rtx_engines import build_rtx
from rtx_probe import Refused, Shapes, build

from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.lower import lower
from mha_deploy.graph.rules import judge, target_from

RTX = target_from("tensorrt-rtx", "1.7.1", "8.9")
Q, SELF, CROSS = ("B", 8, "S", 64), ("B", 8, "S", 64), ("B", 8, "T", 64)
GROUPED = ("B", 2, "S", 64)
SIZES = {"B": (1, 2, 4), "S": (1, 128, 512), "T": (1, 128, 512), "P": (1, 128, 512)}


def profile(model: ir.Model) -> dict[str, Shapes]:
    """Smallest, usual and largest shape of each input."""
    shapes = {}
    for value in model.graph.inputs:
        dims = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
        shapes[value.name] = tuple(
            tuple(dim if isinstance(dim, int) else SIZES[dim][at] for dim in dims) for at in range(3)
        )
    return {name: dims for name, dims in shapes.items() if dims[0] != dims[2]}  # type: ignore[misc]


FUSED: list[tuple[str, dict[str, Any], tuple[Any, ...], dict[str, Any]]] = [
    ("trt", {}, (Q, CROSS), {}),
    ("trt", {}, (Q, CROSS), {"mask": ("bool", ("B", 1, 1, "T"))}),
    ("trt", {}, (Q, GROUPED), {"mask": ("fp32", ("B", 1, 1, "S")), "is_causal": 1}),
    ("trt", {}, (Q, GROUPED), {"past": "P", "present": True, "is_causal": 1}),
    ("trt", {}, (("B", 8, 1, 64), ("B", 2, 1, 64)), {"past": "P", "present": True, "is_causal": 1}),
    ("trt", {}, (Q, GROUPED), {"lengths": True, "is_causal": 1}),
    ("trt", {}, (Q, SELF), {"opset": 25, "left_window_size": 64, "is_causal": 1}),
    ("trt", {}, (Q, SELF), {"softmax_precision": 1}),
    ("trt", {}, (Q, GROUPED), {"softmax_precision": 1, "mask": ("fp16", ("B", 1, "S", "S"))}),
    ("trt", {}, (Q, GROUPED), {"softmax_precision": 1, "past": "P", "is_causal": 1}),
    ("trt", {"pad_heads": True}, (Q, CROSS, ("B", 8, "T", 32)), {}),
    ("primitives", {}, (Q, SELF), {"is_causal": 1}),
    ("primitives", {}, (Q, CROSS), {"mask": ("bool", ("B", 1, 1, "T"))}),
    ("primitives", {}, (Q, CROSS), {"mask": ("fp16", ("B", 1, "S", "T"))}),
    ("primitives", {"gqa": "fold"}, (Q, GROUPED), {"is_causal": 1}),
    ("primitives", {"gqa": "repeat"}, (Q, GROUPED), {"is_causal": 1}),
    ("contrib", {}, (Q, SELF), {"is_causal": 1}),
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("dialect", "options", "dims", "features"), FUSED)
def test_builds_and_fuses(
    dialect: str, options: dict[str, Any], dims: tuple[Any, ...], features: dict[str, Any]
) -> None:
    lowered = lower(attention(*dims, dtype="fp16", **features), dialect, **options)
    built = build(lowered, profile(lowered))
    assert len(built.fused) == 1
    assert built.unused_inputs == ()


ONE = {"mask": ("bool", ("B", 1, 1, "T"))}, {"mask": ("fp32", (3, 1, "T"))}, {"past": "P", "is_causal": 1}


@pytest.mark.parametrize(("heads", "features"), [(1, {}), (1, ONE[0]), (3, ONE[1]), (2, ONE[2])])
def test_a_single_query_of_few_heads_is_fused(heads: int, features: dict[str, Any]) -> None:
    """As a pooling over the history of a user is: its kernel needs four heads over all batch elements."""
    dims = ("B", heads, 1, 64), ("B", 1 if heads == 2 else heads, 1 if "past" in features else "T", 64)
    model = attention(*dims, dtype="fp16", **features)
    (answer,) = judge(attention_nodes(model), RTX)
    assert (answer.fused, answer.fused_after_lowering) == (False, True)
    unchanged, lowered = lower(model, "trt"), lower(model, "trt", **answer.options)
    with pytest.raises(Refused):
        build(unchanged, profile(unchanged))
    assert len(build(lowered, profile(lowered)).fused) == 1


def test_a_boolean_mask_is_added_and_does_not_become_a_list_of_blocks() -> None:
    lowered = lower(attention(Q, CROSS, dtype="fp16", mask=("bool", ("B", 1, 1, "T"))), "trt")
    built = build(lowered, profile(lowered))
    assert not [name for name in built.kernels if "Cums" in name or "Scat" in name], built.kernels


def test_a_flip_along_a_computed_size_keeps_it() -> None:
    text = """<ir_version: 10, opset_import: ["" : 23]> g (float[B, S] x) => (float[B, L] y)
    <int64[1] first = {0}, int64[1] last = {-1}, int64[1] lowest = {-9223372036854775808}>
    { fewer = Slice (x, first, last, last)
      flipped = Slice (fewer, last, lowest, last, last)
      y = Add (flipped, fewer) }"""
    model = lower(ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))), "trt")
    build(model, profile(model))


def test_decomposed_softcap_builds_without_a_fused_kernel() -> None:
    lowered = lower(attention(Q, SELF, dtype="fp16", softcap=30.0), "trt", decompose=True)
    assert build(lowered, profile(lowered)).fused == ()


def test_lengths_left_in_the_graph_are_ignored_by_the_parser() -> None:
    # The reason for the wrong-answer rule: it builds, it is fused, and an input is not used.
    model = attention(Q, CROSS, dtype="fp16", lengths=True)
    built = build(model, profile(model))
    assert built.unused_inputs
    assert not judge(attention_nodes(model), RTX)[0].supported


AS_IT_IS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((Q, CROSS), {}),
    ((Q, CROSS), {"is_causal": 1}),
    ((Q, CROSS), {"mask": ("bool", ("S", "T"))}),
    ((Q, CROSS), {"mask": ("fp32", ("S", "T"))}),
    ((Q, CROSS), {"mask": ("fp16", ("S", "T")), "is_causal": 1}),
    ((Q, SELF), {"past": "P"}),
    ((Q, SELF), {"softcap": 30.0}),
    ((Q, SELF), {"softmax_precision": 1}),
    ((Q, SELF), {"weights": True}),
    ((Q, SELF), {"dtype": "fp32"}),
    ((Q, CROSS, ("B", 8, "T", 32)), {}),
    ((("B", 8, "S", 8), ("B", 8, "T", 8)), {}),
    ((("B", 8, "S", 100), ("B", 8, "T", 100)), {}),
    ((("B", 8, "S", 512), ("B", 8, "T", 512)), {}),
]


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("dims", "features"), AS_IT_IS)
def test_rules_foretell_what_the_builder_does(dims: tuple[Any, ...], features: dict[str, Any]) -> None:
    model = attention(*dims, **{"dtype": "fp16", **features})
    (answer,) = judge(attention_nodes(model), RTX)
    try:
        fused = bool(build(model, profile(model)).fused)
    except Refused:
        fused = False
    assert fused == answer.fused


UPCAST: list[tuple[str, dict[str, Any]]] = [
    ("q", {}), ("kv", {}), ("qkv", {"mask": ("fp32", ("S", "T"))}), ("qkv", {}),
]  # fmt: skip
"""What the builder crashes at, refuses or, the last, fuses in FP16, were it not lowered."""


@pytest.mark.parametrize(("upcast", "features"), UPCAST)
def test_attention_in_fp32_builds_where_an_operand_is_upcast(upcast: str, features: dict[str, Any]) -> None:
    model = attention(Q, CROSS, dtype="fp32", **features)
    for value in [value for value in model.graph.inputs if value.name in upcast]:
        cast = ir.node("Cast", [value], {"to": int(ir.DataType.FLOAT)})
        value.replace_all_uses_with(cast.outputs[0])
        cast.replace_input_with(0, value)
        value.type = ir.TensorType(ir.DataType.FLOAT16)
        cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), value.shape
        model.graph.insert_before(model.graph[0], cast)
    options = {"profiles": [profile(model)], "targets": "89", "allow_decomposed": True}
    answer = judge(attention_nodes(model), RTX)[0]
    assert not answer.supported
    assert answer.supported_after_lowering
    kernels = build_rtx(lower(model, "trt"), **options).kernels["log"]
    assert kernels
    assert not any(kernel.is_fused_attention for kernel in kernels)
