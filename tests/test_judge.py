"""Mistakes that no mutation of the self-test makes: each fails, and the verdict names its place."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

import mha_deploy as md
from mha_deploy.graph.attention_node import is_attention
from mha_deploy.graph.file import load_graph, save_graph
from mha_deploy.graph.lower import lower
from mha_deploy.judge import judge_case
from mha_deploy.options import ValidateOptions
from mha_deploy.runtime import open_runner
from mha_deploy.validation.run import draw_cases
from mha_deploy.validation.self_test import parity_from_runner

D = 16  # of the heads of every small layer


def weight(graph, name, change):
    value = graph.initializers[name]
    array = value.const_value.numpy().copy()
    value.const_value = ir.tensor(np.ascontiguousarray(change(array)).astype(array.dtype), name=name)


def of_head(head, change):
    """Change the channels of one head in the last axis of a weight."""

    def changed(array):
        channels = np.s_[..., head * D : (head + 1) * D]
        array[channels] = change(array[channels])
        return array

    return changed


def of_queries(graph, change):
    weight(graph, "q.weight.T", change)
    weight(graph, "q.bias", change)


def other_rotary_base(graph):
    for name, of in (("lifted_tensor_0", np.cos), ("lifted_tensor_1", np.sin)):
        weight(
            graph,
            name,
            lambda table, of=of: of(
                np.arange(len(table))[:, None] / 500_000 ** (np.arange(table.shape[1]) / table.shape[1])
            ),
        )


def interleaved_rotary_in_one_head(graph):
    """Scores do not change with the order of the channels, but the rotation pairs others."""
    order = [*range(0, 12, 2), *range(1, 12, 2), *range(12, D)]
    for name, head in (("q", 1), ("k", 0)):
        for each in (f"{name}.weight.T", f"{name}.bias"):
            weight(graph, each, of_head(head, lambda channels: channels[..., order]))


def other_groups(graph):
    """Query heads use the key/value head of their neighbor."""
    of_queries(graph, lambda array: np.roll(array, D, -1))
    weight(graph, "o.weight.T", lambda array: np.roll(array, D, 0))


def rolled_lengths(graph):
    """Every batch element has the padding of the next one."""
    lengths = next(value for value in graph.inputs if value.name == "key_lengths")
    users = list(lengths.uses())
    zero, one, end = (ir.val(f"at_{i}", const_value=ir.tensor([i], name=f"at_{i}")) for i in (0, 1, 2**40))
    for value in (zero, one, end):
        graph.initializers[value.name] = value
    parts = [ir.node("Slice", [lengths, *part, zero]) for part in ((one, end), (zero, one))]
    both = ir.node("Concat", [part.outputs[0] for part in parts], {"axis": 0})
    for user in users:
        user.node.replace_input_with(user.idx, both.outputs[0])
    graph.insert_before(next(iter(graph)), [*parts, both])


def through_bf16(position):
    def plant(graph):
        """An input of the attention, or with None its output, goes through BF16."""
        node = next(node for node in graph if is_attention(node))
        value = node.outputs[0] if position is None else node.inputs[position]
        users = list(value.uses())
        down = ir.node("Cast", [value], {"to": ir.DataType.BFLOAT16})
        up = ir.node("Cast", [down.outputs[0]], {"to": ir.DataType.FLOAT16})
        for user in users:
            user.node.replace_input_with(user.idx, up.outputs[0])
        graph.insert_after(value.producer(), [down, up])

    return plant


def rows_of_head(factor, onto=None):
    """The output projection of head 1, scaled; or moved onto another head."""

    def plant(graph):
        def changed(array):
            rows = array.reshape(-1, D, array.shape[1])
            if onto is not None:
                rows[onto] += rows[1]
            rows[1] *= factor
            return array

        weight(graph, "o.weight.T", changed)

    return plant


def keys_and_values_swapped(graph):
    """In head 1."""
    for kind in ("weight.T", "bias"):
        key, value = (graph.initializers[f"{name}.{kind}"].const_value.numpy() for name in "kv")
        for name, other in (("k", value), ("v", key)):
            channels = other[..., D : 2 * D]
            weight(graph, f"{name}.{kind}", of_head(1, lambda _, channels=channels: channels))


def late_positions_repeat(graph):
    for name in ("lifted_tensor_0", "lifted_tensor_1"):
        weight(graph, name, lambda table: np.concatenate([table[:40], table[39:-1]]))


MISTAKES = {
    "one head off by 3 %": ("tiny-rope", rows_of_head(1.03), "head 1"),
    "one head is another's": ("tiny-rope", rows_of_head(0.0, onto=0), "head 1"),
    "scale 1/d in one head": ("tiny-rope", lambda g: of_queries(g, of_head(2, lambda q: q / 4)), "head 2"),
    "another rotary base": ("tiny-rope", other_rotary_base, ""),
    "interleaved rotary in one head": ("tiny-rope", interleaved_rotary_in_one_head, ""),
    "groups shifted by a head": ("tiny-gqa", other_groups, ""),
    "mask of another batch element": ("tiny-padding", rolled_lengths, "batch element"),
    "keys and values of a head swapped": ("tiny-mha", keys_and_values_swapped, "head 1"),
    "positions repeat from 40 on": ("tiny-rope", late_positions_repeat, ""),
    "window a key narrower": ("tiny-window", lambda g: weight(g, "val_9", lambda width: width - 1), ""),
    "window a key wider": ("tiny-window", lambda g: weight(g, "val_9", lambda width: width + 1), ""),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(each, marks=pytest.mark.slow if name == "tiny-window" else ())  # its only bundle
        for each, (name, *_) in MISTAKES.items()
    ],
)
def test_a_planted_mistake_fails_the_golden_cases(bundles, tmp_path, mistake):
    name, plant, place = MISTAKES[mistake]
    model = load_graph(bundles(name).model_path).clone()
    plant(model.graph)
    save_graph(model, tmp_path / "wrong.onnx")
    report = md.check_parity(bundles(name), tmp_path / "wrong.onnx")
    problems = [verdict.problem for verdict in report.verdicts if verdict.is_wrong]
    assert problems
    assert any(place in problem for problem in problems), problems


def in_int8(axis):
    """Quantized by the largest number of each channel, or of all."""

    def changed(array):
        wide = array.astype(np.float64)
        scale = np.abs(wide).max(axis, keepdims=True) / 127
        return np.round(wide / scale) * scale

    return changed


COARSE = {
    "queries and keys": through_bf16(1),
    "values": through_bf16(2),
    "heads": through_bf16(None),
    "q.weight": lambda g: weight(g, "q.weight.T", lambda array: array.astype(ml_dtypes.bfloat16)),
}


def coarse_weights(graph):
    """The softmax weights of a lowered graph go through BF16."""
    (softmax,) = (node for node in graph if node.op_type == "Softmax")
    users = list(softmax.outputs[0].uses())
    down = ir.node("Cast", [softmax.outputs[0]], {"to": ir.DataType.BFLOAT16})
    up = ir.node("Cast", [down.outputs[0]], {"to": ir.DataType.FLOAT16})
    for user in users:
        user.node.replace_input_with(user.idx, up.outputs[0])
    graph.insert_after(softmax, [down, up])


FEW_NUMBERS = {
    "softmax weights in BF16": coarse_weights,
    "v.weight in INT8, a scale for each channel": lambda g: weight(g, "v.weight.T", in_int8(0)),
    "v.weight in INT8, one scale": lambda g: weight(g, "v.weight.T", in_int8(None)),
}


@pytest.mark.parametrize("accumulate", ["fp32", "fp16"])
def test_coarse_parts_of_the_smallest_layer_are_named(bundles, accumulate):
    """Its usual sizes have too few numbers to tell some of them from chance: more batch elements have."""
    bundle = bundles("tiny-mha")
    drawn, _ = draw_cases(bundle, ValidateOptions(sweep=False), lambda step: None)
    (case,) = (case for case in drawn["probe"] if case.suspects)
    precision = replace(bundle.manifest.precision, accumulate=accumulate)
    for part, plant in {"": lambda graph: None, **FEW_NUMBERS}.items():
        model = lower(load_graph(bundle.model_path), "primitives")
        plant(model.graph)
        with open_runner("ort-cpu", model) as runner:
            (verdict,) = judge_case(case, runner.run(case.inputs), precision)
        assert verdict.passed is (part == "")
        assert part in (verdict.problem or "")


@pytest.fixture(scope="module")
def coarse_cases(bundles):
    drawn, _ = draw_cases(bundles("tiny-rope"), ValidateOptions(sweep=False), lambda step: None)
    return [case for case in drawn["probe"] if case.suspects]


@pytest.mark.parametrize("part", COARSE)
def test_a_part_of_attention_in_bf16_is_named(bundles, coarse_cases, part):
    bundle = bundles("tiny-rope")
    model = load_graph(bundle.model_path).clone()
    COARSE[part](model.graph)
    with open_runner("ort-cpu", model) as runner:
        report = parity_from_runner(runner, bundle, coarse_cases)
    assert any(f"{part} in BF16" in (verdict.problem or "") for verdict in report.verdicts)


def test_scores_in_bf16_are_named_of_kernels_that_accumulate_in_fp16_too(bundles, coarse_cases):
    """Their budget is wide enough for the error itself."""
    bundle, (case,) = bundles("tiny-rope"), coarse_cases
    model = lower(load_graph(bundle.model_path), "primitives")
    (softmax,) = (node for node in model.graph if node.op_type == "Softmax")
    down = ir.node("Cast", [softmax.inputs[0]], {"to": ir.DataType.BFLOAT16})
    up = ir.node("Cast", [down.outputs[0]], {"to": ir.DataType.FLOAT16})
    softmax.replace_input_with(0, up.outputs[0])
    model.graph.insert_before(softmax, [down, up])
    precision = replace(bundle.manifest.precision, accumulate="fp16")
    with open_runner("ort-cpu", model) as runner:
        (verdict,) = judge_case(case, runner.run(case.inputs), precision)
    assert "scores in BF16" in verdict.problem


def test_outputs_in_bf16_are_named(bundles, coarse_cases):
    (case,) = coarse_cases
    bundle = bundles("tiny-rope")
    got = case.oracle["output"].astype(ml_dtypes.bfloat16).astype(np.float16)
    (verdict,) = judge_case(case, {"output": got}, bundle.manifest.precision)
    assert "outputs in BF16" in verdict.problem


@pytest.mark.slow
def test_large_tokens_are_among_the_decoded_ones(bundles):
    report = md.validate(bundles("tiny-dynamic"), latency=False).to_dict()
    assert [(run["trace"], run["outcome"]) for run in report["decode"]] == [
        ("steps", "passed"),
        ("probe-steps", "passed"),
    ]
