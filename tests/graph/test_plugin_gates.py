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
    chosen: int = 1,
    dims: tuple[Any, ...] = ("B", "S", HEADS),
    mask: bool = False,
    second_reader: bool = False,
    heads_first: bool = False,
    **attributes: Any,
) -> ir.Model:
    """An attention, its heads apart, a factor for those that a token chose, and the heads together again."""
    width = HEADS * D
    inputs = {name: (FP16, ["B", "S", width]) for name in "qkv"} | {"gates": (FP16, list(dims))}
    constants = {
        "apart": np.array([0, 0, HEADS, D]),
        "axis": np.array([-1]),
        "again": np.array([0, 0, width]),
        "zero": np.array(0, np.float16),
        "count": np.array([chosen]),
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
    nodes += [
        *choice(),
        apart,
        node("Unsqueeze", "kept axis", "f"),
        node("Mul", "r f", "g"),
        node("Reshape", "g again", "s"),
    ]
    nodes.append(node("MatMul", "s w", "y"))
    if second_reader:
        nodes.append(node("Relu", "h", "other"))
        outputs["other"] = (FP16, ["B", "S", width])
    return model_of(nodes, inputs, outputs, constants, opset=25)


def choice(gates: str = "gates") -> list[Any]:
    """The largest k of the gates; the others become zero."""
    return [
        node("TopK", f"{gates} count", "best which", axis=-1),
        node("Mul", f"{gates} zero", "none"),
        node("ScatterElements", "none which best", "kept", axis=-1),
    ]


TAKEN: dict[str, ir.Model] = {
    "plain": gated(),
    "causal": gated(is_causal=1),
    "half of the heads": gated(chosen=2),
    "a quarter of wide heads": gated(D=128),
    "heads first": gated(heads_first=True),
}
LEFT: dict[str, ir.Model] = {
    "head size without a kernel": gated(D=48),
    "three quarters of the heads": gated(chosen=3),
    "half of wide heads": gated(D=128, chosen=2),
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
    assert plugin_node_of(lowered).inputs[-1].name == "kept"
    assert operators(lowered) == ["TopK", "Mul", "ScatterElements", "MhaDeployAttention", "MatMul"]
    assert_same(model, lowered, random_inputs(model, SIZES))


@pytest.mark.sweep(4)
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
        *choice(),
        node("Attention", "q q q", "h", q_num_heads=HEADS, kv_num_heads=HEADS),
        node("Reshape", "h apart", "r"),
        node("Reshape", "kept four", "f"),
        node("Mul", "f r", "g"),
        node("Reshape", "g again", "y"),
    ]
    shape = (FP16, ["B", "S", 128])
    inputs = {"q": shape, "gates": (FP16, ["B", "S", HEADS])}
    constants = {"apart": np.array([0, 0, HEADS, 32]), "again": np.array([0, 0, 128])}
    constants |= {"count": np.array([1]), "zero": np.array(0, np.float16), "four": np.array([0, 0, HEADS, 1])}
    model = model_of(nodes, inputs, {"y": shape}, constants)
    lowered = lower(model, "plugin")
    assert attributes_of(lowered, "has_gates") == {"has_gates": 1}
    assert [len(value.shape) for value in plugin_node_of(lowered).inputs] == [3, 3]
    assert_same(model, lowered, random_inputs(model, SIZES))


def test_where_the_number_of_heads_is_unknown_all_are_computed() -> None:
    nodes = [
        node("Attention", "q q q", "h", q_num_heads=HEADS, kv_num_heads=HEADS),
        node("Reshape", "h apart", "r"),
        node("Mul", "f r", "g"),
        node("Reshape", "g again", "y"),
    ]
    shape = (FP16, ["B", "S", 128])
    constants = {"apart": np.array([0, 0, HEADS, 32]), "again": np.array([0, 0, 128])}
    model = model_of(nodes, {"q": shape, "f": (FP16, ["B", "S", HEADS, 1])}, {"y": shape}, constants)
    lowered = lower(model, "plugin")
    assert attributes_of(lowered, "has_gates") == {"has_gates": 0}
    assert_same(model, lowered, random_inputs(model, SIZES))


def test_gates_behind_key_lengths_come_last() -> None:
    constants = {"axis": np.array([-1]), "again": np.array([0, 0, 128])}
    constants |= {"count": np.array([2]), "zero": np.array(0, np.float16)}
    nodes = [
        *choice(),
        node("Attention", "q q q - - - lengths", "h4"),
        node("Transpose", "h4", "r", perm=[0, 2, 1, 3]),
        node("Unsqueeze", "kept axis", "f"),
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
    feeds = random_inputs(model, SIZES, lengths=np.array([5, 2]))
    assert_same(model, lowered, feeds)
