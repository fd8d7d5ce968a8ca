"""A layer that generates, in every dialect: both kinds of cache, published cases, engines of two profiles."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from conformance import run_in_ort
from decode_graphs import (
    DECODE,
    ENGINE,
    KINDS,
    LAYERS,
    PREFILL,
    evaluate,
    expected,
    needs_rtx,
    reference,
    shapes,
)
from decode_models import Layer, dynamic, feeds, fixed
from onnx import TensorProto, helper
from onnx.backend.test.case.node import _NodeTestCases
from onnx.backend.test.runner import Runner
from rtx_engines import build_rtx

from mha_deploy.engine.build import judge_engine, with_plugin_roles
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.lower import lower
from mha_deploy.graph.lower.call import LoweringError
from mha_deploy.graph.rules import check_operators, judge, operator_options, target_from

with warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)
    import onnx.backend.test.case.node.tensorscatter

RTX = target_from("tensorrt-rtx", "1.7.1", "8.9")

# -- the whole layer against ONNX's reference ------------------------------------------------------

LOWERINGS: list[tuple[str, dict[str, Any]]] = [
    ("onnx", {}),
    ("trt", {"decompose": True}),
    ("trt", {"decompose": True, "decode_primitives": True}),
    ("primitives", {}),
    ("primitives", {"cache": "copy"}),
    ("primitives", {"gqa": "broadcast"}),
    ("primitives", {"gqa": "repeat"}),
]


def ort_has_no_kernel(model: ir.Model, inputs: dict[str, np.ndarray]) -> bool:
    """GroupQueryAttention takes several new tokens behind a past for one batch element only."""
    B, S, _ = inputs["x"].shape
    grouped = any(node.op_type == "GroupQueryAttention" for node in model.graph)
    return grouped and min(B, S) > 1 and inputs["past_key"].shape[2] > 0


@pytest.mark.sweep(10)
@pytest.mark.parametrize(("dialect", "options"), LOWERINGS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_layer_computes_the_same(name: str, kind: str, dialect: str, options: dict[str, Any]) -> None:
    model, calls = expected(name, kind)
    lowered = lower(model, dialect, **options)
    for inputs, outputs in calls:
        if not ort_has_no_kernel(lowered, inputs):
            for got, wanted in zip(evaluate(lowered, inputs), outputs, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("dialect", "options"), LOWERINGS[1:])
@pytest.mark.parametrize("kind", KINDS)
def test_token_by_token_is_the_same_as_all_at_once(kind: str, dialect: str, options: dict[str, Any]) -> None:
    layer = Layer()
    model = KINDS[kind](layer)
    lowered = lower(model, dialect, **options)
    whole = feeds(model, layer, starts=[0], S=8)
    states = [name for name in whole if "key" in name or "value" in name]
    outputs, kept = [], {name: whole[name] for name in states}
    for begin, end in ((0, 5), (5, 6), (6, 7), (7, 8)):
        step = feeds(model, layer, starts=[begin], S=end - begin, P=begin)
        y, *new = evaluate(lowered, {**step, **kept, "x": whole["x"][:, begin:end]})
        kept = dict(zip(states, new, strict=True))
        outputs.append(y)
    wanted = reference(model, whole)
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), wanted[0], rtol=2e-5, atol=2e-6)
    for name, state in zip(states, wanted[1:], strict=True):
        np.testing.assert_allclose(kept[name], state, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_values_are_not_repeated_and_reach_opset_17(kind: str) -> None:
    lowered = lower(KINDS[kind](Layer()), "primitives", cache="copy")
    assert lowered.opset_imports[""] == 17
    onnx.checker.check_model(ir.to_proto(lowered), full_check=True)
    (scores,) = [node for node in lowered.graph if node.name == "att/scores"]
    assert scores.inputs[1].shape[1] == 2


# -- TensorScatter -------------------------------------------------------------------------------

SCATTER_CASES = {case.name: case for case in _NodeTestCases if case.name.startswith("test_tensorscatter")}
NOT_IN_PLACE = {
    "test_tensorscatter_circular": "circular TensorScatter",
    "test_tensorscatter_3d": "TensorScatter other than along axis 2 of [B, H, T, D]",
}


def test_all_published_scatter_cases_are_here() -> None:
    assert len(SCATTER_CASES) >= 3


@pytest.mark.parametrize(
    ("dialect", "options"),
    [("onnx", {}), ("trt", {}), ("trt", {"decode_primitives": True}), ("primitives", {}), ("contrib", {})],
)
@pytest.mark.parametrize("name", SCATTER_CASES)
def test_published_scatter_case(name: str, dialect: str, options: dict[str, Any]) -> None:
    case = SCATTER_CASES[name]
    if (dialect, options) == ("trt", {}) and name in NOT_IN_PLACE:
        with pytest.raises(LoweringError) as caught:
            lower(ir.from_proto(case.model), dialect)
        assert caught.value.feature == NOT_IN_PLACE[name]
        return
    lowered = ir.to_proto(lower(ir.from_proto(case.model), dialect, **options))
    names = [value.name for value in case.model.graph.input]
    for inputs, outputs in case.data_sets:
        got = run_in_ort(lowered, dict(zip(names, inputs, strict=True)))
        Runner.assert_similar_outputs(outputs, got, case.rtol, case.atol)


def scatter(
    cache: tuple[int | str, ...] = (2, 4, 16, 32),
    *,
    kind: int = TensorProto.FLOAT16,
    axis: int = -2,
    computed: bool = False,
    inner: bool = False,
    start: bool = True,
    S: int | str = 1,
    **attributes: Any,
) -> ir.Model:
    """A graph of one TensorScatter named `update`; the cache computed, or the result inside, if asked."""
    new = list(cache)
    new[axis] = S
    nodes = [helper.make_node("Add", ["past", "past"], ["cache"])] if computed else []
    inputs = ["cache" if computed else "past", "new", *(["start"] if start else [])]
    nodes.append(helper.make_node("TensorScatter", inputs, ["out"], name="update", axis=axis, **attributes))
    nodes += [helper.make_node("Add", ["out", "out"], ["y"])] if inner else []
    values = [helper.make_tensor_value_info(n, kind, d) for n, d in (("past", cache), ("new", new))]
    if start:
        values.append(helper.make_tensor_value_info("start", TensorProto.INT64, [cache[0]]))
    outputs = [helper.make_tensor_value_info("y" if inner else "out", kind, cache)]
    graph = helper.make_graph(nodes, "g", values, outputs)
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11))


OBSTACLES = {
    "circular": scatter(mode="circular"),
    "axis": scatter((2, 16, 4, 32), axis=1),
    "rank": scatter((2, 16, 32)),
    "type": scatter(kind=TensorProto.INT32),
    "computed cache": scatter(computed=True),
    "inner result": scatter(inner=True),
}


@needs_rtx
@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", OBSTACLES)
def test_what_tensorrt_refuses_is_refused_by_name_and_cured(name: str) -> None:
    from rtx_probe import Refused, build

    model = OBSTACLES[name]
    (finding,) = check_operators(model, RTX)
    assert (finding.node, finding.rule, finding.severity) == ("update", "cache-update", "refused")
    with pytest.raises(Refused):
        build(model)
    with pytest.raises(LoweringError, match="graph input") as caught:
        lower(model, "trt")
    assert caught.value.feature in finding.message
    assert build(lower(model, "trt", **operator_options([finding]))).unused_inputs == ()


@needs_rtx
@pytest.mark.parametrize("model", [scatter(), scatter(start=False), scatter(S=3)])
def test_what_tensorrt_takes_stays(model: ir.Model) -> None:
    from rtx_probe import build

    (finding,) = check_operators(model, RTX)
    assert (finding.rule, finding.severity) == ("cache-in-place", "note")
    lowered = lower(model, "trt")
    assert [node.op_type for node in lowered.graph] == ["TensorScatter"]
    assert build(lowered).unused_inputs == ()


def test_a_cache_of_dynamic_length_is_named() -> None:
    with pytest.raises(LoweringError, match="dynamic length"):
        lower(scatter((2, 4, "T", 32)), "trt")


@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize("axis", [1, 2, 3])
def test_scatter_at_dynamic_shapes(axis: int, mode: str) -> None:
    dims: list[int | str] = ["B", 3, 3, 3]
    dims[axis] = "T"
    model = scatter(tuple(dims), kind=TensorProto.FLOAT, axis=axis, S="S", mode=mode)
    lowered = ir.to_proto(lower(model, "primitives"))
    rng = np.random.default_rng(0)
    for B, S, T in ((2, 1, 5), (3, 4, 6)):
        shapes = [[B if d == "B" else n if d == "T" else d for d in dims] for n in (T, S)]
        past, new = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
        start = rng.integers(0, 3 * T if mode == "circular" else T - S + 1, B)
        inputs = {"past": past, "new": new, "start": start}
        np.testing.assert_array_equal(run_in_ort(lowered, inputs)[0], reference(model, inputs)[0])


@pytest.mark.parametrize(
    ("version", "rule"),
    [
        ("8.6.1", "no-decode-operator-primitives"),
        ("10.14.1", "no-decode-operator"),
        ("10.15", "cache-in-place"),
    ],
)
def test_versions_with_and_without_the_operators(version: str, rule: str) -> None:
    assert [f.rule for f in check_operators(scatter(), target_from("tensorrt", version))] == [rule]


@pytest.mark.parametrize(
    ("model", "computed"),
    [
        (dynamic(Layer(dtype="fp16")), True),
        (dynamic(Layer(dtype="fp16", S=1)), False),
        (fixed(Layer(dtype="fp16", S=1)), True),
        (dynamic(Layer(dtype="fp16", attention={})), False),
    ],
)
def test_8_6_reports_whether_a_mask_is_computed(model: ir.Model, computed: bool) -> None:
    (answer,) = judge(attention_nodes(model), target_from("tensorrt", "8.6.1"))
    assert ("computed-mask" in {finding.rule for finding in answer.findings}) == computed
    assert any(node.name == "att/mask_bias" for node in lower(model, "primitives").graph) == computed


# -- engines -------------------------------------------------------------------------------------


@pytest.mark.sweep(1)
@needs_rtx
@pytest.mark.parametrize(
    ("dialect", "options"),
    [("trt", {}), ("trt", {"decode_primitives": True}), ("primitives", {"cache": "copy"})],
)
@pytest.mark.parametrize("kind", KINDS)
def test_one_engine_is_fused_for_prompt_and_token(kind: str, dialect: str, options: dict[str, Any]) -> None:
    model = KINDS[kind](ENGINE)
    assert all(answer.fused_after_lowering for answer in judge(attention_nodes(model), RTX))
    lowered = lower(model, dialect, **options)
    profiles = [shapes(lowered, sizes) for sizes in (PREFILL, DECODE)]
    built = build_rtx(lowered, profiles=profiles, targets="8.9")
    verdict = judge_engine(with_plugin_roles(built, lowered), lowered, model, "fp16", len(profiles))
    assert [(node.profile, node.status) for node in verdict.nodes] == [(0, "fused"), (1, "fused")]
    fused = {(k.profile, k.name.split("_myl")[0]) for k in built.kernels["log"] if k.is_fused_attention}
    # Folded heads are several rows of one head, also for one token.
    token = "_gemm_mha_v2" if dialect == "primitives" else "_gemv_mha_v1"
    assert fused == {(0, "_gemm_mha_v2"), (1, token)}
    assert not [message for message in built.warnings if "Unused Input" in message]


@needs_rtx
def test_one_token_with_key_lengths_is_one_kernel() -> None:
    from rtx_probe import build

    lowered = lower(fixed(replace(ENGINE, S=1)), "trt")
    built = build(lowered, shapes(lowered, DECODE))
    assert [name.split("_myl")[0] for name in built.fused] == ["_gemv_mha_v1"]
    assert built.unused_inputs == ()
