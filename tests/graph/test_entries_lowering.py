"""A cache that is read in place: only the new rows come out, and whoever runs the model writes them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from decode_graphs import (
    DECODE,
    ENGINE,
    LAYERS,
    PREFILL,
    evaluate,
    needs_rtx,
    reference,
    shapes,
)
from decode_models import Layer, dynamic, feeds, fixed
from rtx_engines import build_rtx

from mha_deploy.engine.build import judge_engine, with_plugin_roles
from mha_deploy.graph.lower import lower
from mha_deploy.graph.lower.cache import ENTRIES_NOTE, noted_caches
from mha_deploy.graph.rules import check_operators, target_from

CACHES = ("key_cache", "value_cache")


def readers(model: ir.Model, name: str) -> list[str]:
    (value,) = [value for value in model.graph.inputs if value.name == name]
    return [use.node.op_type for use in value.uses()]


def entries(model: ir.Model) -> dict[str, str]:
    """From each output of new entries to its cache."""
    return noted_caches(model, ENTRIES_NOTE)


# -- the form ------------------------------------------------------------------------------------


def test_new_entries_replace_the_caches_as_outputs() -> None:
    lowered = lower(fixed(Layer()), "primitives")
    assert [value.name for value in lowered.graph.outputs] == ["y", "key_entries", "value_entries"]
    assert [str(value.shape) for value in lowered.graph.outputs[1:]] == ["[B,2,S,8]"] * 2
    saved = ir.from_proto(onnx.ModelProto.FromString(ir.to_proto(lowered).SerializeToString()))
    assert entries(saved) == dict(zip(("key_entries", "value_entries"), CACHES, strict=True))


def test_other_caches_are_copied() -> None:
    assert not entries(lower(dynamic(Layer()), "primitives"))
    copied = lower(fixed(Layer()), "primitives", cache="copy")
    assert not entries(copied)
    assert readers(copied, "key_cache") == ["ScatterND"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("layer", [Layer(), Layer(Hkv=4), Layer(S=1)])
def test_only_one_matmul_reads_a_cache(layer: Layer) -> None:
    lowered = lower(fixed(layer), "primitives")
    for name in CACHES:
        assert set(readers(lowered, name)) - {"Shape"} == {"MatMul"}


def test_graph_is_one_that_8_6_parses() -> None:
    lowered = lower(fixed(Layer()), "primitives")
    assert lowered.opset_imports[""] == 17
    onnx.checker.check_model(ir.to_proto(lowered), full_check=True)
    for node in lowered.graph:
        assert not {"start", "end"} & set(node.attributes)
        assert node.op_type != "Squeeze" or len(node.inputs) == 2
        assert node.op_type != "Expand" or node.inputs[0].dtype != ir.DataType.BOOL


def test_one_token_hides_nothing_among_the_new() -> None:
    masks = [node.name for node in lower(fixed(Layer(S=1)), "primitives").graph if node.op_type == "Where"]
    assert masks == ["att/mask_bias"]


def test_another_value_of_that_name_is_renamed() -> None:
    model = fixed(Layer())
    next(node for node in model.graph if node.name == "k_split").outputs[0].name = "key_entries"
    lowered = lower(model, "primitives")
    names = [value.name for node in lowered.graph for value in node.outputs]
    assert lowered.graph.outputs[1].name == "key_entries"
    assert len(names) == len(set(names))
    inputs = feeds(model, Layer(), starts=[2, 5], S=3)
    for got, wanted in zip(evaluate(lowered, inputs), reference(model, inputs), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


# -- the numbers ---------------------------------------------------------------------------------


def test_cache_entries_beyond_the_valid_ones_do_not_matter() -> None:
    model, layer, starts = fixed(Layer()), Layer(), [0, 5, 8]
    inputs = feeds(model, layer, starts=starts, S=2)
    lowered = lower(model, "primitives")
    y, *_ = evaluate(lowered, inputs)
    for name in CACHES:
        inputs[name] = inputs[name].copy()
        for b, begin in enumerate(starts):
            inputs[name][b, :, begin:] = 1e4
    np.testing.assert_array_equal(evaluate(lowered, inputs)[0], y)
    inputs["key_cache"][1, :, 4] = 3.0
    assert not np.allclose(evaluate(lowered, inputs)[0][1], y[1])


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["grouped", "one-token", "window", "softcap"])
def test_ragged_batch_elements_step_by_step(name: str) -> None:
    layer, starts = LAYERS[name], np.array([0, 3, 6])
    model = fixed(layer)
    lowered = lower(model, "primitives")
    states = {key: feeds(model, layer, starts=[0, 3, 6], S=1)[key] for key in CACHES}
    wanted = dict(states)
    for step in range(4):
        token = feeds(model, layer, starts=list(starts + step), S=1, P=step)
        y, *new = evaluate(lowered, {**token, **states})
        y_wanted, *new_wanted = reference(model, {**token, **wanted})
        np.testing.assert_allclose(y, y_wanted, rtol=2e-5, atol=2e-6)
        states, wanted = (dict(zip(states, each, strict=True)) for each in (new, new_wanted))
    for key in states:
        np.testing.assert_allclose(states[key], wanted[key], rtol=2e-5, atol=2e-6)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("gqa", ["fold", "broadcast", "repeat"])
def test_a_mask_broadcasts_over_the_queries(gqa: str) -> None:
    layer = Layer(attention={}, mask=True, mask_rows=1)
    model = fixed(layer)
    lowered = lower(model, "primitives", gqa=gqa)
    inputs = feeds(model, layer, starts=[4, 4], S=3, P=4)
    for got, wanted in zip(evaluate(lowered, inputs), reference(model, inputs), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


def test_a_query_without_keys_gets_zeros() -> None:
    layer = LAYERS["masked"]
    model = fixed(layer)
    inputs = feeds(model, layer, starts=[4, 4], S=3, P=4)
    inputs["mask"][..., 1, :] = False
    y, *_ = evaluate(lower(model, "primitives"), inputs)
    assert not y[:, 1].any()
    assert y[:, 0].any()


def test_half_precision_hides_as_well() -> None:
    layer = Layer(dtype="fp16")
    model = fixed(layer)
    inputs = feeds(model, layer, starts=[0, 5, 8], S=3)
    copied, *_ = evaluate(lower(model, "primitives", cache="copy"), inputs)
    y, *_ = evaluate(lower(model, "primitives"), inputs)
    np.testing.assert_allclose(y.astype(np.float32), copied.astype(np.float32), rtol=1e-2, atol=2e-3)


# -- what is not this pattern --------------------------------------------------------------------


def node_named(model: ir.Model, name: str) -> ir.Node:
    (found,) = [node for node in model.graph if node.name == name]
    return found


def other_starts(model: ir.Model) -> None:
    other = ir.node("Neg", [node_named(model, "write").outputs[0]], name="other")
    model.graph.insert_after(node_named(model, "write"), other)
    node_named(model, "value_update").replace_input_with(2, other.outputs[0])


def other_ends(model: ir.Model) -> None:
    node_named(model, "ends").replace_input_with(1, node_named(model, "write").outputs[0])


def keys_read_twice(model: ir.Model) -> None:
    more = ir.node("Identity", [node_named(model, "key_update").outputs[0]], name="more")
    model.graph.insert_after(node_named(model, "key_update"), more)
    model.graph.outputs.append(more.outputs[0])
    more.outputs[0].name, more.outputs[0].type = "more", model.graph.outputs[1].type


def circular(model: ir.Model) -> None:
    node_named(model, "key_update").attributes.add(ir.AttrString("mode", "circular"))


def other_axis(model: ir.Model) -> None:
    node_named(model, "S_new").attributes.add(ir.AttrInt64("start", 0))
    node_named(model, "S_new").attributes.add(ir.AttrInt64("end", 1))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("change", [other_starts, other_ends, other_axis, keys_read_twice, circular])
def test_another_pattern_is_copied(change: Callable[[ir.Model], None]) -> None:
    model = fixed(Layer())
    change(model)
    copied = lower(model, "primitives")
    assert not entries(copied)
    assert readers(copied, "key_cache") == ["ScatterND"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("spelling", ["gather", "constant", "swapped", "two casts"])
def test_the_pattern_as_other_exporters_write_it(spelling: str) -> None:
    model = fixed(Layer(S=1) if spelling == "constant" else Layer())
    ends, S_new = node_named(model, "ends"), node_named(model, "S_new")
    if spelling == "gather":
        for name in ("start", "end"):
            S_new.attributes.pop(name)
        at = ir.node("Constant", [], {"value": ir.tensor([1])})
        size = ir.node("Gather", [S_new.outputs[0], at.outputs[0]])
        model.graph.insert_after(S_new, [at, size])
        ends.replace_input_with(1, size.outputs[0])
    elif spelling == "constant":
        one = ir.node("Constant", [], {"value": ir.tensor(1)})
        model.graph.insert_after(S_new, one)
        ends.replace_input_with(1, one.outputs[0])
    elif spelling == "swapped":
        write, size = ends.inputs
        ends.replace_input_with(0, size)
        ends.replace_input_with(1, write)
    else:
        lengths = node_named(model, "write").inputs[0]
        again = ir.node("Cast", [lengths], {"to": int(ir.DataType.INT64)})
        model.graph.insert_after(node_named(model, "write"), again)
        ends.replace_input_with(0, again.outputs[0])
    assert entries(lower(model, "primitives"))


# -- engines -------------------------------------------------------------------------------------


def test_8_6_reports_that_new_entries_are_the_output() -> None:
    findings = check_operators(fixed(Layer()), target_from("tensorrt", "8.6.1"))
    notes = [(finding.node, finding.message) for finding in findings if finding.rule == "cache-entries"]
    assert [node for node, _ in notes] == ["key_update", "value_update"]
    assert "key_entries replaces key_cache_out" in notes[0][1]
    later = check_operators(fixed(Layer()), target_from("tensorrt", "10.15"))
    assert "cache-entries" not in {finding.rule for finding in later}


@pytest.mark.slow
@needs_rtx
def test_one_engine_serves_prompt_and_token() -> None:
    model = fixed(ENGINE)
    lowered = lower(model, "primitives")
    profiles = [shapes(lowered, sizes) for sizes in (PREFILL, DECODE)]
    built = build_rtx(lowered, profiles=profiles, targets="8.9")
    verdict = judge_engine(with_plugin_roles(built, lowered), lowered, model, "fp16", len(profiles))
    # Two matmuls that meet in one softmax are no attention to the builder.
    assert [(node.profile, node.status) for node in verdict.nodes] == [(0, "decomposed"), (1, "decomposed")]
    assert not [message for message in built.warnings if "Unused Input" in message]


@needs_rtx
def test_a_token_needs_no_transposed_copy_of_the_cache() -> None:
    from rtx_probe import build

    lowered = lower(fixed(ENGINE), "primitives")
    kernels = build(lowered, shapes(lowered, DECODE)).kernels
    assert not [kernel for kernel in kernels if kernel.startswith("__myl_Tran_")]
