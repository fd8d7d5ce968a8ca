"""A preallocated cache that the plugin's node writes, and a dynamic one that is joined in front of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from conformance import run_in_reference
from decode_models import Layer, dynamic, feeds, fixed
from plugin_layers import assert_same, attributes_of, operators, plugin_node_of

from mha_deploy.graph.lower import lower
from mha_deploy.graph.lower.cache import ENTRIES_NOTE, IN_PLACE_NOTE, noted_caches

CALLS = [([0, 0], 3), ([2, 5], 3), ([4, 1], 1), ([9, 11], 1)]


def layer(**features: Any) -> Layer:
    return Layer(dtype="fp16", **features)


def test_the_node_writes_the_cache() -> None:
    lowered = lower(fixed(layer()), "plugin")
    node = plugin_node_of(lowered)
    assert attributes_of(lowered, "causal", "has_cache", "has_key_lengths", "has_bias") == {
        "causal": 2,
        "has_cache": 1,
        "has_key_lengths": 0,
        "has_bias": 0,
    }
    assert [value.name for value in node.inputs[-3:]] == ["key_cache", "value_cache", "lengths"]
    assert [value.name for value in node.outputs[1:]] == ["key_cache_out", "value_cache_out"]
    assert [value.is_graph_output() for value in node.outputs[1:]] == [True, True]
    assert not {"ScatterND", "TensorScatter"} & set(operators(lowered))


def test_whole_caches_go_out() -> None:
    model = fixed(layer())
    lowered = lower(model, "plugin")
    for before, after in zip(model.graph.outputs, lowered.graph.outputs, strict=True):
        assert (before.name, before.dtype, str(before.shape)) == (after.name, after.dtype, str(after.shape))
    saved = ir.from_proto(onnx.ModelProto.FromString(ir.to_proto(lowered).SerializeToString()))
    in_place = {"key_cache_out": "key_cache", "value_cache_out": "value_cache"}
    assert noted_caches(saved, IN_PLACE_NOTE) == in_place
    assert not noted_caches(saved, ENTRIES_NOTE)


def test_new_values_are_read_where_the_projection_left_them() -> None:
    lowered = lower(fixed(layer()), "plugin")
    # Queries and keys are rotated in between; the values are columns 48 … 63 of the projection.
    assert attributes_of(lowered, "sources", "offsets") == {"sources": (0, 1, 2), "offsets": (0, 0, 48)}
    assert [len(value.shape) for value in plugin_node_of(lowered).inputs[:3]] == [4, 4, 3]


LAYERS: dict[str, Layer] = {
    "grouped": layer(),
    "one for each": layer(Hkv=4),
    "one for all": layer(Hkv=1),
    "one token": layer(S=1),
    "bidirectional": layer(attention={}),
    "window": layer(attention={"is_causal": 1, "left_window_size": 2}, opset=25),
    "mask": layer(mask=True),
    "mask of one row": layer(mask=True, mask_rows=1),
}


CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in LAYERS),
    ("grouped", {"linear": True}),
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_preallocated_cache_step_by_step(name: str, options: dict[str, Any]) -> None:
    sizes = LAYERS[name]
    model = fixed(sizes)
    lowered = lower(model, "plugin", **options)
    assert attributes_of(lowered, "has_cache") == {"has_cache": 1}
    for starts, S in CALLS:
        if sizes.S in ("S", S):
            assert_same(model, lowered, feeds(model, sizes, starts=starts, S=S), atol=8e-3)


@pytest.mark.parametrize(("kind", "rotary"), [(1, {}), (2, {"interleaved": 1, "rotary_embedding_dim": 8})])
def test_rotary_embedding_inside_the_node(kind: int, rotary: dict[str, int]) -> None:
    sizes = layer(D=16, rotary=rotary)
    model = fixed(sizes)
    lowered = lower(model, "plugin")
    words = {"rotary": kind, "rotary_size": sizes.rotated}
    assert attributes_of(lowered, *words) == words
    assert "RotaryEmbedding" not in operators(lowered)
    assert_same(model, lowered, feeds(model, sizes, starts=[2, 5], S=3), atol=8e-3)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["grouped", "one token", "bidirectional", "window", "mask"])
def test_dynamic_cache_step_by_step(name: str) -> None:
    sizes = LAYERS[name]
    model = dynamic(sizes)
    lowered = lower(model, "plugin")
    causal = sizes.attention.get("is_causal", 0)
    assert attributes_of(lowered, "causal", "has_cache") == {"causal": 2 * causal, "has_cache": 0}
    keys = plugin_node_of(lowered).inputs[1:3]
    assert [value.name for value in keys] == ["present_key", "present_value"]
    for P, S in ((0, 3), (4, 3), (5, 1)):
        if sizes.S in ("S", S):
            assert_same(model, lowered, feeds(model, sizes, starts=[P, P], S=S, P=P), atol=8e-3)


def test_a_cache_with_a_window_on_both_sides_is_copied() -> None:
    """The plugin counts such a window from the upper left corner, where a cache has old tokens."""
    model = fixed(layer(attention={"left_window_size": 2, "right_window_size": 1}, opset=25))
    lowered = lower(model, "plugin")
    assert attributes_of(lowered, "has_cache", "has_bias") == {"has_cache": 0, "has_bias": 1}
    assert_same(model, lowered, feeds(model, layer(), starts=[2, 5], S=3), atol=8e-3)


def test_a_cache_with_another_reader_is_copied_and_counted_by_lengths() -> None:
    model = fixed(layer())
    (update,) = [node for node in model.graph if node.name == "key_update"]
    reader = ir.node("Identity", [update.outputs[0]], name="reader")
    reader.outputs[0].name, reader.outputs[0].dtype = "seen", ir.DataType.FLOAT16
    reader.outputs[0].shape = update.outputs[0].shape
    model.graph.append(reader)
    model.graph.outputs.append(reader.outputs[0])
    lowered = lower(model, "plugin")
    assert not noted_caches(lowered, IN_PLACE_NOTE)
    assert operators(lowered).count("ScatterND") == 2
    assert attributes_of(lowered, "causal", "has_key_lengths") == {"causal": 2, "has_key_lengths": 1}
    assert_same(model, lowered, feeds(model, layer(), starts=[2, 5], S=3), atol=8e-3)


def test_entries_of_several_calls_accumulate_in_the_cache() -> None:
    """Three calls, each with the caches that the one before gave out."""
    model, sizes = fixed(layer()), layer()
    lowered = ir.to_proto(lower(model, "plugin"))
    plain = ir.to_proto(lower(model, "primitives", cache="copy"))
    states: dict[int, list[np.ndarray]] = {}
    for starts, S in (([0, 0], 3), ([3, 3], 1), ([4, 4], 2)):
        for which, graph in enumerate((lowered, plain)):
            given = feeds(model, sizes, starts=starts, S=S)
            if which in states:
                given |= dict(zip(("key_cache", "value_cache"), states[which], strict=True))
            else:
                given |= {name: np.zeros_like(given[name]) for name in ("key_cache", "value_cache")}
            y, *states[which] = run_in_reference(graph, given)
            if which == 0:
                first = y
        np.testing.assert_allclose(first.astype(np.float64), y.astype(np.float64), rtol=0, atol=8e-3)
        np.testing.assert_array_equal(states[0], states[1])
