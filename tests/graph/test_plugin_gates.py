"""Factors on the heads of each token go into the attention node, so that heads with 0 need no work."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from plugin_layers import (
    FP16,
    INT64,
    assert_same,
    attributes_of,
    model_of,
    node,
    operators,
    plugin_node_of,
    random_inputs,
    weights,
)

from mha_deploy.graph.lower import lower

SIZES = {"B": 2, "S": 5}
HEADS = 4


def gated(
    *,
    D: int = 32,
    factor: str = "gates axis",
    dims: tuple[Any, ...] = ("B", "S", HEADS),
    mask: bool = False,
    second_reader: bool = False,
    heads_first: bool = False,
    **attributes: Any,
) -> ir.Model:
    """An attention, its heads apart, a factor for each, and the heads together again."""
    width = HEADS * D
    inputs = {name: (FP16, ["B", "S", width]) for name in "qkv"} | {"gates": (FP16, list(dims))}
    constants = {
        "apart": np.array([0, 0, HEADS, D]),
        "axis": np.array([-1]),
        "again": np.array([0, 0, width]),
    }
    constants["w"] = weights(width, 16)
    operands, heads = "q k v", {"q_num_heads": HEADS, "kv_num_heads": HEADS}
    nodes, outputs = [], {"y": (FP16, ["B", "S", 16])}
    if heads_first:
        for name in "qkv":
            nodes += [node("Reshape", f"{name} apart", f"{name}r")]
            nodes += [node("Transpose", f"{name}r", f"{name}4", perm=[0, 2, 1, 3])]
        operands, heads = "q4 k4 v4", {}
    if mask:
        inputs["mask"] = (FP16, ["S", "S"])
        operands += " mask"
    nodes.append(node("Attention", operands, "h0" if heads_first else "h", **heads, **attributes))
    apart = (
        node("Transpose", "h0", "r", perm=[0, 2, 1, 3]) if heads_first else node("Reshape", "h apart", "r")
    )
    # The factor is made behind the attention, as models do.
    nodes += [apart, node("Unsqueeze", factor, "f"), node("Mul", "r f", "g"), node("Reshape", "g again", "s")]
    nodes.append(node("MatMul", "s w", "y"))
    if second_reader:
        nodes.append(node("Relu", "h", "other"))
        outputs["other"] = (FP16, ["B", "S", width])
    return model_of(nodes, inputs, outputs, constants, opset=25)


def sparse_gates() -> np.ndarray:
    rng = np.random.default_rng(3)
    gates = rng.standard_normal((2, 5, HEADS)).astype(np.float16)
    gates[rng.random(gates.shape) < 0.5] = 0
    return gates


TAKEN: dict[str, ir.Model] = {
    "plain": gated(),
    "causal": gated(is_causal=1),
    "wide": gated(D=128),
    "heads first": gated(heads_first=True),
}
LEFT: dict[str, ir.Model] = {
    "head size without a kernel": gated(D=48),
    "bias": gated(mask=True),
    "window": gated(left_window_size=2),
    "one for all tokens": gated(dims=(1, 1, HEADS)),
    "another reader": gated(second_reader=True),
}


@pytest.mark.parametrize("name", TAKEN)
def test_gates_go_into_the_node(name: str) -> None:
    model = TAKEN[name]
    lowered = lower(model, "plugin")
    assert attributes_of(lowered, "has_gates") == {"has_gates": 1}
    assert plugin_node_of(lowered).inputs[-1].name == "gates"
    assert operators(lowered) == ["MhaDeployAttention", "MatMul"]
    assert_same(model, lowered, random_inputs(model, SIZES, gates=sparse_gates()))


@pytest.mark.parametrize("name", LEFT)
def test_other_factors_stay_mul_nodes(name: str) -> None:
    model = LEFT[name]
    lowered = lower(model, "plugin")
    assert attributes_of(lowered, "has_gates") == {"has_gates": 0}
    assert "Mul" in operators(lowered)
    assert_same(model, lowered, random_inputs(model, SIZES))


def test_gates_that_depend_on_the_attention_stay_mul_nodes() -> None:
    constants = {"apart": np.array([0, 0, HEADS, 32]), "axis": np.array([-1]), "again": np.array([0, 0, 128])}
    heads = {"q_num_heads": HEADS, "kv_num_heads": HEADS}
    nodes = [
        node("Attention", "q q q", "h", **heads),
        node("Reshape", "h apart", "r"),
        node("ReduceMax", "r axis", "f", keepdims=1),
        node("Mul", "r f", "g"),
        node("Reshape", "g again", "y"),
    ]
    shape = (FP16, ["B", "S", 128])
    model = model_of(nodes, {"q": shape}, {"y": shape}, constants)
    lowered = lower(model, "plugin")
    assert attributes_of(lowered, "has_gates") == {"has_gates": 0}
    assert_same(model, lowered, random_inputs(model, SIZES), atol=2e-2)


def test_gates_with_four_axes_lose_the_last() -> None:
    nodes = [
        node("Attention", "q q q", "h", q_num_heads=HEADS, kv_num_heads=HEADS),
        node("Reshape", "h apart", "r"),
        node("Mul", "f r", "g"),
        node("Reshape", "g again", "y"),
    ]
    shape = (FP16, ["B", "S", 128])
    inputs = {"q": shape, "f": (FP16, ["B", "S", HEADS, 1])}
    constants = {"apart": np.array([0, 0, HEADS, 32]), "again": np.array([0, 0, 128])}
    model = model_of(nodes, inputs, {"y": shape}, constants)
    lowered = lower(model, "plugin")
    assert attributes_of(lowered, "has_gates") == {"has_gates": 1}
    assert [len(value.shape) for value in plugin_node_of(lowered).inputs] == [3, 3]
    assert_same(model, lowered, random_inputs(model, SIZES, f=sparse_gates()[..., None]))


def test_gates_behind_key_lengths_come_last() -> None:
    constants = {"axis": np.array([-1]), "again": np.array([0, 0, 128])}
    nodes = [
        node("Attention", "q q q - - - lengths", "h4"),
        node("Transpose", "h4", "r", perm=[0, 2, 1, 3]),
        node("Unsqueeze", "gates axis", "f"),
        node("Mul", "r f", "g"),
        node("Reshape", "g again", "y"),
    ]
    inputs = {
        "q": (FP16, ["B", HEADS, "S", 32]),
        "lengths": (INT64, ["B"]),
        "gates": (FP16, ["B", "S", HEADS]),
    }
    model = model_of(nodes, inputs, {"y": (FP16, ["B", "S", 128])}, constants)
    lowered = lower(model, "plugin")
    assert attributes_of(lowered, "has_gates", "has_key_lengths") == {"has_gates": 1, "has_key_lengths": 1}
    feeds = random_inputs(model, SIZES, lengths=np.array([5, 2]), gates=sparse_gates())
    assert_same(model, lowered, feeds)
