"""Queries, keys and values are read where they lie: no Split, no Reshape, no Transpose is left."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from plugin_layers import (
    FP16,
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

SIZES = {"B": 2, "S": 5, "T": 7}
HEADS_3D = {"q_num_heads": 4, "kv_num_heads": 2}
X, Y = {"x": (FP16, ["B", "S", 64])}, {"y": (FP16, ["B", "S", 64])}
WO = {"wo": weights(64, 64, seed=9)}


def projected(*, keys: str = "x") -> ir.Model:
    """Three projections with biases, of one input or of two."""
    inputs = dict(X) if keys == "x" else {**X, keys: (FP16, ["B", "T", 64])}
    nodes = []
    constants = {**WO}
    for seed, (name, source, width) in enumerate([("q", "x", 64), ("k", keys, 32), ("v", keys, 32)]):
        constants |= {f"w{name}": weights(64, width, seed=seed), f"b{name}": weights(width, seed=seed)}
        nodes += [
            node("MatMul", f"{source} w{name}", f"{name}0"),
            node("Add", f"{name}0 b{name}", name),
        ]
    nodes += [node("Attention", "q k v", "h", **HEADS_3D), node("MatMul", "h wo", "y")]
    return model_of(nodes, inputs, Y, constants)


def packed(op: str, **attributes: Any) -> ir.Model:
    """One projection of 128 columns, cut by Split or Slice."""
    constants = {**WO, "w": weights(64, 128), "sizes": np.array([64, 32, 32])}
    constants |= {str(at): np.array([at]) for at in (0, 2, 64, 96, 128)}
    cuts = [node("Split", "p sizes", "q k v", axis=attributes.get("axis", -1))]
    if op == "Slice":
        cuts = [
            node("Slice", f"p {begin} {end} 2", name)
            for name, begin, end in (("q", 0, 64), ("k", 64, 96), ("v", 96, 128))
        ]
    nodes = [
        node("MatMul", "x w", "p"),
        *cuts,
        node("Attention", "q k v", "h", **HEADS_3D),
        node("MatMul", "h wo", "y"),
    ]
    return model_of(nodes, X, Y, constants)


def heads_first(*, extra_reader: bool = False, back: bool = True, mask: list[Any] | None = None) -> ir.Model:
    """Heads first, as most models write attention, and transposed back after it."""
    inputs = X if mask is None else {**X, "mask": (FP16, mask)}
    constants = {**WO, "w": weights(64, 128), "sizes": np.array([64, 32, 32])}
    constants |= {
        "to_q": np.array([0, 0, 4, 16]),
        "to_k": np.array([0, 0, 2, 16]),
        "to_y": np.array([0, 0, 64]),
    }
    nodes = [node("MatMul", "x w", "p"), node("Split", "p sizes", "q k v", axis=-1)]
    for name, shape in (("q", "to_q"), ("k", "to_k"), ("v", "to_k")):
        nodes += [
            node("Reshape", f"{name} {shape}", f"{name}r"),
            node("Transpose", f"{name}r", f"{name}4", perm=[0, 2, 1, 3]),
        ]
    nodes.append(node("Attention", f"q4 k4 v4{'' if mask is None else ' mask'}", "h4", is_causal=1))
    outputs = {"h4": (FP16, ["B", 4, "S", 16])}
    if back:
        nodes += [
            node("Transpose", "h4", "hr", perm=[0, 2, 1, 3]),
            node("Reshape", "hr to_y", "h"),
            node("MatMul", "h wo", "y"),
        ]
        outputs = {**Y, **(outputs if extra_reader else {})}
    return model_of(nodes, inputs, outputs, constants)


def unbound(how: str) -> ir.Model:
    """[B, S, 3, H, D], transposed to [3, B, H, S, D] and unbound, as vision transformers do."""
    constants = {**WO, "w": weights(64, 192), "to": np.array([0, 0, 3, 4, 16]), "to_y": np.array([0, 0, 64])}
    constants |= {str(at): np.array(at) for at in range(3)} | {"first": np.array([0])}
    nodes = [
        node("MatMul", "x w", "p"),
        node("Reshape", "p to", "r"),
        node("Transpose", "r", "t", perm=[2, 0, 3, 1, 4]),
    ]
    if how == "gather":
        nodes += [node("Gather", f"t {at}", name, axis=0) for at, name in enumerate("qkv")]
    elif how == "slice":
        constants |= {f"{at}_": np.array([at]) for at in range(4)}
        nodes += [node("Slice", f"t {at}_ {at + 1}_ first", f"{name}1") for at, name in enumerate("qkv")]
        nodes += [node("Squeeze", f"{name}1 first", name) for name in "qkv"]
    else:
        nodes.append(node("Split", "t", "q1 k1 v1", axis=0, num_outputs=3))
        nodes += [node("Squeeze", f"{name}1 first", name) for name in "qkv"]
    nodes += [
        node("Attention", "q k v", "h4"),
        node("Transpose", "h4", "hr", perm=[0, 2, 1, 3]),
        node("Reshape", "hr to_y", "h"),
        node("MatMul", "h wo", "y"),
    ]
    return model_of(nodes, X, Y, constants)


PACKED_HERE = {"sources": (0, 0, 0), "offsets": (0, 64, 96)}
NOTHING_MOVED = ["MatMul", "MhaDeployAttention", "MatMul"]
MODELS: dict[str, tuple[ir.Model, dict[str, Any], list[str]]] = {
    "packed by us": (projected(), PACKED_HERE, ["MatMul", "Add", *NOTHING_MOVED[1:]]),
    "split": (packed("Split"), PACKED_HERE, NOTHING_MOVED),
    "split along 2": (packed("Split", axis=2), PACKED_HERE, NOTHING_MOVED),
    "slice": (packed("Slice"), PACKED_HERE, NOTHING_MOVED),
    "heads first": (heads_first(), PACKED_HERE, NOTHING_MOVED),
    "gather": (unbound("gather"), {"sources": (0, 0, 0), "offsets": (0, 64, 128)}, NOTHING_MOVED),
    "slices": (unbound("slice"), {"sources": (0, 0, 0), "offsets": (0, 64, 128)}, NOTHING_MOVED),
    "unbind": (unbound("split"), {"sources": (0, 0, 0), "offsets": (0, 64, 128)}, NOTHING_MOVED),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", MODELS)
def test_packed_operands_are_read_in_place(name: str) -> None:
    model, places, left = MODELS[name]
    lowered = lower(model, "plugin")
    assert attributes_of(lowered, "sources", "offsets") == places
    assert operators(lowered) == left
    assert_same(model, lowered, random_inputs(model, SIZES))


def test_keys_and_values_of_another_input_share_an_operand() -> None:
    model = projected(keys="c")
    lowered = lower(model, "plugin")
    assert attributes_of(lowered, "sources", "offsets") == {"sources": (0, 1, 1), "offsets": (0, 0, 32)}
    assert "Split" not in operators(lowered)
    assert_same(model, lowered, random_inputs(model, SIZES))


@pytest.mark.parametrize("mask", [["B", 1, "S", "S"], ["B", 4, "S", "S"]])
def test_transposes_cancel_after_fully_masked_queries_are_zeroed(mask: list[Any]) -> None:
    model = heads_first(mask=mask)
    lowered = lower(model, "plugin")
    # Where heads differ, the small tensor of attending queries is transposed, and nothing else.
    assert operators(lowered).count("Transpose") == (0 if mask[1] == 1 else 1)
    feeds = random_inputs(model, SIZES)
    feeds["mask"][0, 0, 2] = -np.inf
    assert_same(model, lowered, feeds)


def test_heads_first_stay_for_those_who_read_them() -> None:
    both = heads_first(extra_reader=True)
    lowered = lower(both, "plugin")
    assert operators(lowered).count("Transpose") == 1  # of the output; the matmul reads the rows
    (matmul,) = [each for each in lowered.graph if each.op_type == "MatMul" and each.inputs[1].name == "wo"]
    assert matmul.inputs[0] is plugin_node_of(lowered).outputs[0]
    assert_same(both, lowered, random_inputs(both, SIZES))
    alone = heads_first(back=False)
    assert_same(alone, lower(alone, "plugin"), random_inputs(alone, SIZES))


def test_operands_with_heads_first_are_taken_as_they_are() -> None:
    dims = {"q": ["B", 4, "S", 16], "k": ["B", 2, "T", 16], "v": ["B", 2, "T", 24]}
    inputs = {name: (FP16, shape) for name, shape in dims.items()}
    model = model_of([node("Attention", "q k v", "y")], inputs, {"y": (FP16, ["B", 4, "S", 24])})
    lowered = lower(model, "plugin")
    assert [value.name for value in plugin_node_of(lowered).inputs] == ["q", "k", "v"]
    assert attributes_of(lowered, "head_size", "value_size") == {"head_size": 16, "value_size": 24}
    assert_same(model, lowered, random_inputs(model, SIZES))


@pytest.mark.parametrize(("columns", "read"), [(36, False), (40, True)])
def test_kernels_read_sixteen_bytes_at_a_time(columns: int, read: bool) -> None:
    """A part that does not begin, or a row that does not end, at such a place is cut out as before."""
    constants = {"w": weights(64, columns + 48), "sizes": np.array([columns, 16, 16, 16]), **WO}
    nodes = [
        node("MatMul", "x w", "p"),
        node("Split", "p sizes", "rest q k v", axis=-1),
        node("Attention", "q k v", "h", q_num_heads=2, kv_num_heads=2),
    ]
    model = model_of(nodes, X, {"h": (FP16, ["B", "S", 16])}, constants)
    lowered = lower(model, "plugin")
    assert ("Split" not in operators(lowered)) == read
    assert_same(model, lowered, random_inputs(model, SIZES))


def test_a_reshape_that_mixes_batch_and_tokens_is_not_cancelled() -> None:
    constants = {"to": np.array([1, -1, 2, 16]), **WO}
    nodes = [
        node("Reshape", "x to", "r"),
        node("Transpose", "r", "q", perm=[0, 2, 1, 3]),
        node("Attention", "q q q", "y"),
    ]
    inputs = {"x": (FP16, ["B", "S", 32])}
    model = model_of(nodes, inputs, {"y": (FP16, [1, 2, "N", 16])}, constants)
    lowered = lower(model, "plugin")
    assert attributes_of(lowered, "sources") == {"sources": (0, 0, 0)}
    assert plugin_node_of(lowered).inputs[0].name == "q"
    assert_same(model, lowered, random_inputs(model, SIZES))
