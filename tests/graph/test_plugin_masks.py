"""What hides keys, in the plugin's words: causal corners, windows, key lengths, and a bias for the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from attention_models import attention, random_feeds
from conformance import run_in_reference
from onnx import TensorProto
from oracle import attend
from plugin_layers import (
    FP16,
    INT32,
    INT64,
    assert_same,
    attributes_of,
    model_of,
    node,
    operators,
    plugin_node_of,
    random_inputs,
)

from mha_deploy.graph.lower import lower

Q, SELF, CROSS = ("B", 4, "S", 8), ("B", 2, "S", 8), ("B", 2, "T", 8)
SIZES = {"B": 3, "S": 5, "T": 7, "P": 3}
PAST = {"past": "P", "present": True}
NONE, TOP_LEFT, BOTTOM_RIGHT = range(3)
WORDS = ("causal", "left_window", "right_window", "has_bias", "has_key_lengths")


def fp16(*dims: Any, **features: Any) -> ir.Model:
    return attention(*dims, dtype="fp16", opset=25, **features)


# Each with the words the node has for it.
SIGHTS: dict[str, tuple[ir.Model, tuple[int, int, int, int, int]]] = {
    "plain": (fp16(Q, CROSS), (NONE, -1, -1, 0, 0)),
    "causal": (fp16(Q, SELF, is_causal=1), (TOP_LEFT, -1, -1, 0, 0)),
    "causal cross": (fp16(Q, CROSS, is_causal=1), (TOP_LEFT, -1, -1, 0, 0)),
    "causal past": (fp16(Q, SELF, is_causal=1, **PAST), (BOTTOM_RIGHT, -1, -1, 0, 0)),
    # The diagonal lies in neither corner.
    "causal past cross": (fp16(Q, CROSS, is_causal=1, **PAST), (NONE, -1, -1, 1, 0)),
    "lengths": (fp16(Q, CROSS, lengths=True), (NONE, -1, -1, 0, 1)),
    "causal lengths": (fp16(Q, CROSS, lengths=True, is_causal=1), (BOTTOM_RIGHT, -1, -1, 0, 1)),
    "window": (fp16(Q, SELF, left_window_size=2, right_window_size=1), (NONE, 2, 1, 0, 0)),
    "window of causal": (fp16(Q, SELF, left_window_size=2, is_causal=1), (TOP_LEFT, 2, -1, 0, 0)),
    "window to itself": (fp16(Q, SELF, right_window_size=0), (TOP_LEFT, -1, -1, 0, 0)),
    "window past": (
        fp16(Q, SELF, left_window_size=2, is_causal=1, **PAST),
        (BOTTOM_RIGHT, 2, -1, 0, 0),
    ),
    "window to itself past": (
        fp16(Q, SELF, left_window_size=2, right_window_size=0, **PAST),
        (BOTTOM_RIGHT, 2, -1, 0, 0),
    ),
    # Without causal, the plugin counts a window from the upper left corner.
    "both sides past": (
        fp16(Q, SELF, left_window_size=2, right_window_size=1, **PAST),
        (NONE, -1, -1, 1, 0),
    ),
    "one side lengths": (fp16(Q, CROSS, left_window_size=2, lengths=True), (NONE, -1, -1, 1, 0)),
    "mask": (fp16(Q, CROSS, mask=("bool", ("S", "T"))), (NONE, -1, -1, 1, 0)),
    "numbers": (fp16(Q, CROSS, mask=("fp16", ("B", 4, "S", "T"))), (NONE, -1, -1, 1, 0)),
    "wider numbers": (fp16(Q, CROSS, mask=("fp32", ("B", 1, 1, "T"))), (NONE, -1, -1, 1, 1)),
    "causal mask": (
        fp16(Q, SELF, mask=("bool", ("B", 1, "S", "S")), is_causal=1),
        (TOP_LEFT, -1, -1, 1, 0),
    ),
    "mask and lengths": (
        fp16(Q, CROSS, mask=("fp16", (4, "S", "T")), lengths=True, is_causal=1),
        (NONE, -1, -1, 1, 0),
    ),
}


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", SIGHTS)
def test_words_and_numbers(name: str) -> None:
    model, words = SIGHTS[name]
    lowered = lower(model, "plugin")
    assert tuple(attributes_of(lowered, *WORDS).values()) == words
    onnx.checker.check_model(ir.to_proto(lowered))
    feeds = random_feeds(model, SIZES)
    for got, wanted in zip(run_in_reference(ir.to_proto(lowered), feeds), attend(model, feeds), strict=True):
        np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=2e-3, atol=2e-3)


def test_a_bias_has_a_row_for_each_query() -> None:
    one_row = lower(fp16(Q, CROSS, mask=("fp16", ("B", 1, 1, "T"))), "plugin")
    assert operators(one_row).count("Expand") == 1
    every = lower(fp16(Q, CROSS, mask=("fp16", ("B", 1, "S", "T"))), "plugin")
    assert "Expand" not in operators(every)
    assert plugin_node_of(every).inputs[3].name == "mask"


# A bias for the diagonal alone, where every query attends to some key.
NEVER_FULLY_MASKED = {"causal past cross", "both sides past"}


def test_fully_masked_queries_are_zeroed_under_a_bias_only() -> None:
    guarded = {name for name, (model, _) in SIGHTS.items() if "Where" in operators(lower(model, "plugin"))}
    assert guarded == {name for name, (_, words) in SIGHTS.items() if words[3]} - NEVER_FULLY_MASKED


# -- key lengths ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[-3, 0, 99], [7, 1, 2**30]])
def test_lengths_are_kept_within_the_keys(lengths: list[int]) -> None:
    model = fp16(Q, CROSS, lengths=True)
    feeds = {**random_feeds(model, SIZES), "lengths": np.array(lengths)}
    (got,) = run_in_reference(ir.to_proto(lower(model, "plugin")), feeds)
    bounded = {**feeds, "lengths": np.clip(feeds["lengths"], 0, SIZES["T"])}
    np.testing.assert_allclose(got.astype(np.float64), attend(model, bounded)[0], rtol=2e-3, atol=2e-3)


def test_the_node_bounds_lengths_itself_so_they_are_only_cast() -> None:
    lowered = lower(fp16(Q, CROSS, lengths=True), "plugin")
    given = plugin_node_of(lowered).inputs[3]
    assert (given.dtype, given.producer().op_type) == (ir.DataType.INT32, "Cast")
    assert not {"Min", "Max"} & set(operators(lowered))


# -- masks that are key lengths in disguise ------------------------------------------------------

INPUTS = {
    "q": (FP16, ["B", "S", 32]),
    "k": (FP16, ["B", "T", 16]),
    "v": (FP16, ["B", "T", 16]),
}
COUNT = [
    node("Shape", "k", "shape", start=1, end=2),
    node("Squeeze", "shape", "T"),
    node("Range", "0 T 1", "t"),
]
COLUMN = node("Unsqueeze", "lengths 123", "column")  # [B, 1, 1, 1]
SPREAD = [
    node("Shape", "q", "qs", start=1, end=2),
    node("Concat", "one one qs one", "size", axis=0),
    node("Expand", "m size", "mask"),
]
INFINITE = {"zero": np.float16(0), "low": np.float16(-np.inf), "lowest": np.finfo(np.float16).min}

PREFIXES: dict[str, list[onnx.NodeProto]] = {
    "less": [*COUNT, COLUMN, node("Less", "t column", "mask")],
    "greater": [*COUNT, COLUMN, node("Greater", "column t", "mask")],
    "not at least": [*COUNT, COLUMN, node("GreaterOrEqual", "t column", "n"), node("Not", "n", "mask")],
    "not at most": [*COUNT, COLUMN, node("LessOrEqual", "column t", "n"), node("Not", "n", "mask")],
    "expanded": [*COUNT, COLUMN, node("Less", "t column", "m"), *SPREAD],
    "expanded over all": [
        *COUNT[:2],
        node("Cast", "T", "T32", to=INT32),
        node("Range", "0_32 T32 1_32", "t32"),
        node("Cast", "t32", "t", to=INT64),
        COLUMN,
        node("Less", "t column", "m"),
        node("Shape", "q", "batch", start=0, end=1),
        node("Shape", "q", "queries", start=1, end=2),
        node("Concat", "batch one queries shape", "size", axis=0),
        node("Expand", "m size", "mask"),
    ],
    "two axes": [
        *COUNT,
        node("Unsqueeze", "lengths 1_", "column"),
        node("Less", "t column", "m"),
        node("Unsqueeze", "m 12", "mask"),
    ],
    "row of counts": [
        *COUNT,
        node("Unsqueeze", "t 0_", "row"),
        node("Unsqueeze", "lengths 1_", "column"),
        node("Less", "row column", "m"),
        node("Unsqueeze", "m 12", "mask"),
    ],
    "infinite": [*COUNT, COLUMN, node("Less", "t column", "m"), node("Where", "m zero low", "mask")],
    "infinite otherwise": [
        *COUNT,
        COLUMN,
        node("Less", "t column", "n"),
        node("Not", "n", "m"),
        node("Where", "m low zero", "mask"),
    ],
}
OTHERS: dict[str, list[onnx.NodeProto]] = {
    "at most": [*COUNT, COLUMN, node("LessOrEqual", "t column", "mask")],
    "behind": [*COUNT, COLUMN, node("Greater", "t column", "mask")],
    "not less": [*COUNT, COLUMN, node("Less", "t column", "n"), node("Not", "n", "mask")],
    "from one on": [*COUNT[:2], node("Range", "1 T1 1", "t"), COLUMN, node("Less", "t column", "mask")],
    "finite": [*COUNT, COLUMN, node("Less", "t column", "m"), node("Where", "m zero lowest", "mask")],
    "of queries": [
        *COUNT,
        node("Unsqueeze", "per_query 0_3", "column"),
        node("Less", "t column", "mask"),
    ],
}
OTHERS["from one on"].insert(2, node("Add", "T 1", "T1"))


def masked(nodes: list[onnx.NodeProto], dtype: int = INT64, **features: Any) -> ir.Model:
    constants = {
        "0": np.array(0),
        "1": np.array(1),
        "0_32": np.array(0, np.int32),
        "1_32": np.array(1, np.int32),
        "0_": np.array([0]),
        "1_": np.array([1]),
        "12": np.array([1, 2]),
        "0_3": np.array([0, 1, 3]),
        "123": np.array([1, 2, 3]),
        "one": np.array([1]),
        **{name: np.array(number, np.float16) for name, number in INFINITE.items()},
    }
    read = {name for each in nodes for name in each.input}
    inputs = {**INPUTS, "lengths": (dtype, ["B"])}
    if "per_query" in read:
        inputs["per_query"] = (dtype, ["S"])
    attention_node = node("Attention", "q k v mask", "y", q_num_heads=4, kv_num_heads=2, **features)
    used = {name: array for name, array in constants.items() if name in read}
    return model_of([*nodes, attention_node], inputs, {"y": (FP16, ["B", "S", 32])}, used)


def masked_feeds(model: ir.Model, lengths: list[int]) -> dict[str, np.ndarray]:
    feeds = random_feeds(model, SIZES)
    return {**feeds, "lengths": np.array(lengths).astype(feeds["lengths"].dtype)}


def assert_as_matmuls(model: ir.Model, lowered: ir.Model, lengths: list[int]) -> None:
    feeds = masked_feeds(model, lengths)
    (wanted,) = run_in_reference(ir.to_proto(lower(model, "primitives")), feeds)
    (got,) = run_in_reference(ir.to_proto(lowered), feeds)
    np.testing.assert_allclose(got.astype(np.float64), wanted.astype(np.float64), rtol=0, atol=4e-3)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("name", PREFIXES)
def test_a_prefix_mask_becomes_lengths(name: str, causal: int) -> None:
    model = masked(PREFIXES[name], is_causal=causal)
    lowered = lower(model, "plugin")
    assert attributes_of(lowered, "causal", "has_bias", "has_key_lengths") == {
        "causal": TOP_LEFT if causal else NONE,
        "has_bias": 0,
        "has_key_lengths": 1,
    }
    assert not {"Less", "Greater", "Range", "Where", "Expand"} & set(operators(lowered))
    for lengths in ([1, 4, 7], [0, 9, -2]):
        assert_as_matmuls(model, lowered, lengths)


def test_a_range_has_the_length_that_it_counts_to() -> None:
    """ONNX infers another name, with which the mask would be numbers for every query."""
    model = masked(PREFIXES["expanded over all"])
    lowered = lower(model, "plugin")
    assert attributes_of(lowered, "has_bias", "has_key_lengths") == {"has_bias": 0, "has_key_lengths": 1}
    assert_as_matmuls(model, lowered, [1, 4, 7])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_a_prefix_stays_a_mask(name: str) -> None:
    model = masked(OTHERS[name])
    lowered = lower(model, "plugin")
    assert attributes_of(lowered, "has_bias") == {"has_bias": 1}
    assert_as_matmuls(model, lowered, [1, 4, 7])


def test_a_padding_mask_is_computed_once_for_all_layers() -> None:
    heads: dict[str, Any] = {"q_num_heads": 4, "kv_num_heads": 4}
    layers = [
        node("Attention", "x x x mask", "y", **heads),
        node("Attention", "y y y mask", "z", **heads),
        node("Attention", "z z z mask", "last", **heads),
    ]
    shape = (FP16, ["B", "S", 32])
    inputs = {"x": shape, "mask": (TensorProto.BOOL, ["B", 1, 1, "S"])}
    model = model_of(layers, inputs, {"last": shape})
    lowered = lower(model, "plugin")
    attentions = [each for each in lowered.graph if each.op_type == "MhaDeployAttention"]
    assert len({(each.inputs[1], each.inputs[2]) for each in attentions}) == 1
    assert [operators(lowered).count(name) for name in ("Where", "Expand", "Log")] == [1, 1, 1]
    mask = np.array([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]], bool).reshape(3, 1, 1, 5)
    assert_same(model, lowered, random_inputs(model, {"B": 3, "S": 5}, mask=mask))


KEY_MASK = (FP16, ["B", "S", 32])
KEYS = {
    "as it is": [node("Unsqueeze", "keys 12", "mask")],
    "expanded": [
        node("Unsqueeze", "keys 12", "row"),
        node("Shape", "x", "S", start=1, end=2),
        node("Concat", "1 1 S 1", "sizes", axis=0),
        node("Expand", "row sizes", "mask"),
    ],
    "inverted": [
        node("Not", "keys", "hidden"),
        node("Unsqueeze", "hidden 12", "row"),
        node("Where", "row low zero", "mask"),
    ],
}


def causal_with_keys(nodes: list[onnx.NodeProto]) -> ir.Model:
    """Attention with a mask that these nodes make of `keys`."""
    attention = node("Attention", "x x x mask", "y", q_num_heads=4, kv_num_heads=4, is_causal=1)
    constants = {"1": np.array([1]), "12": np.array([1, 2])}
    constants |= {"low": np.array(-np.inf, np.float16), "zero": np.array(0, np.float16)}
    inputs = {"x": KEY_MASK, "keys": (TensorProto.BOOL, ["B", "S"])}
    return model_of([*nodes, attention], inputs, {"y": KEY_MASK}, constants)


@pytest.mark.parametrize("name", KEYS)
def test_a_causal_mask_of_keys_is_read_as_it_is(name: str) -> None:
    """No number for each query is written, and no query is cleared after the node."""
    model = causal_with_keys(KEYS[name])
    lowered = lower(model, "plugin")
    assert attributes_of(lowered, "has_bias", "has_key_mask", "causal") == {
        "has_bias": 0,
        "has_key_mask": 1,
        "causal": TOP_LEFT,
    }
    assert not {"Where", "Expand", "Log"} & set(operators(lowered))
    keys = np.array([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1], [0, 1, 0, 1, 0]], bool)
    assert_same(model, lowered, random_inputs(model, {"B": 4, "S": 5}, keys=keys))


def test_a_mask_of_keys_without_a_diagonal_or_of_one_batch_element_is_a_bias() -> None:
    for batch, causal in (("B", 0), (1, 1)):
        mask = fp16(Q, SELF, mask=("bool", (batch, 1, 1, "S")), is_causal=causal)
        assert attributes_of(lower(mask, "plugin"), "has_bias", "has_key_mask") == {
            "has_bias": 1,
            "has_key_mask": 0,
        }


@pytest.mark.parametrize(("size", "scale"), [(256, 0.0625), (8, 1e-7)])
def test_heads_that_cannot_be_wider_and_tiny_scales_have_a_bias(size: int, scale: float) -> None:
    heads = (("B", 4, "S", size), ("B", 2, "S", size))
    model = fp16(*heads, mask=("bool", ("B", 1, 1, "S")), is_causal=1, scale=scale)
    lowered = lower(model, "plugin")
    assert attributes_of(lowered, "has_bias", "has_key_mask") == {"has_bias": 1, "has_key_mask": 0}
    feeds = random_feeds(model, SIZES)
    (got,) = run_in_reference(ir.to_proto(lowered), feeds)
    np.testing.assert_allclose(got.astype(np.float64), attend(model, feeds)[0], rtol=2e-3, atol=2e-3)


def test_lengths_in_int32_need_no_cast() -> None:
    nodes = [
        node("Shape", "k", "shape", start=1, end=2),
        node("Squeeze", "shape", "T64"),
        node("Range", "0 T64 1", "t64"),
        node("Cast", "lengths", "wide", to=INT64),
        node("Unsqueeze", "wide 123", "column"),
        node("Less", "t64 column", "mask"),
    ]
    lowered = lower(masked(nodes, INT32), "plugin")
    assert plugin_node_of(lowered).inputs[3].name == "lengths"


def test_a_prefix_of_heads_is_not_one_of_batch_elements() -> None:
    """With three axes the first one is that of the heads."""
    nodes = [*COUNT, node("Unsqueeze", "per_head 12", "column"), node("Less", "t column", "mask")]
    # As many batch elements as heads, so that their number does not tell.
    inputs = {name: (kind, [4, *dims[1:]]) for name, (kind, dims) in INPUTS.items()}
    inputs["per_head"] = (INT64, [4])
    constants = {"0": np.array(0), "1": np.array(1), "12": np.array([1, 2])}
    nodes.append(node("Attention", "q k v mask", "y", q_num_heads=4, kv_num_heads=2))
    model = model_of(nodes, inputs, {"y": (FP16, [4, "S", 32])}, constants)
    assert attributes_of(lower(model, "plugin"), "has_bias", "has_key_lengths") == {
        "has_bias": 1,
        "has_key_lengths": 0,
    }


def test_a_prefix_behind_a_past_stays_a_mask_when_causal() -> None:
    """ONNX ends the diagonal at the last key, the plugin at the last valid one."""
    past = {"pk": (FP16, ["B", 2, "P", 8]), "pv": (FP16, ["B", 2, "P", 8])}
    inputs = {**INPUTS, "k": (FP16, ["B", "S", 16]), "v": (FP16, ["B", "S", 16]), **past}
    inputs |= {"lengths": (INT64, ["B"])}
    nodes = [
        node("Shape", "k", "new", start=1, end=2),
        node("Shape", "pk", "old", start=2, end=3),
        node("Add", "new old", "sum"),
        node("Squeeze", "sum", "T"),
        node("Range", "0 T 1", "t"),
        COLUMN,
        node("Less", "t column", "mask"),
    ]
    constants = {"0": np.array(0), "1": np.array(1), "123": np.array([1, 2, 3])}
    for causal, words in ((0, (0, 0, 1)), (1, (2, 1, 0))):
        heads = {"q_num_heads": 4, "kv_num_heads": 2, "is_causal": causal}
        every = [*nodes, node("Attention", "q k v mask pk pv", "y", **heads)]
        model = model_of(every, inputs, {"y": (FP16, ["B", "S", 32])}, constants)
        lowered = lower(model, "plugin")
        assert tuple(attributes_of(lowered, "causal", "has_bias", "has_key_lengths").values()) == words
        assert_as_matmuls(model, lowered, [1, 5, 8])


PER_QUERY = """
<ir_version: 10, opset_import: ["" : 23]>
layer (float16[4,4,32] q, float16[4,6,16] k, float16[4,6,16] v, int64[4] seen) => (float16[4,4,32] y)
<int64[6] t = {0, 1, 2, 3, 4, 5}, int64[4] size = {4, 1, 4, 6}, int64[1] last = {1}>
{
    column = Unsqueeze(seen, last)
    each = Less(t, column)
    mask = Expand(each, size)
    y = Attention<q_num_heads = 4, kv_num_heads = 2>(q, k, v, mask)
}
"""


def test_a_mask_of_queries_is_no_prefix_of_as_many_batch_elements() -> None:
    """Expand aligns axes at the end: the four rows of this mask are queries, and not the batch."""
    lowered = lower(ir.from_proto(onnx.parser.parse_model(PER_QUERY)), "plugin")
    written = plugin_node_of(lowered).attributes
    assert (written.get_int("has_bias"), written.get_int("has_key_lengths")) == (1, 0)
