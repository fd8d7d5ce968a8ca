"""RotaryEmbedding in every dialect: ONNX's published cases, dynamic shapes, and real builds."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from attention_models import random_feeds
from conformance import run_in_ort
from onnx import TensorProto, helper
from onnx.backend.test.case.node import _NodeTestCases
from onnx.backend.test.runner import Runner
from onnx.reference import ReferenceEvaluator

from mha_deploy.graph.lower import lower
from mha_deploy.graph.lower.call import LoweringError
from mha_deploy.graph.plugin_node import GIVEN
from mha_deploy.graph.rules import check_operators, operator_options, target_from

with warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)
    import onnx.backend.test.case.node.rotaryembedding

CASES = {
    case.name: case
    for case in _NodeTestCases
    if case.name.startswith("test_rotary_embedding") and not case.name.endswith("_expanded")
}
LOWERINGS: list[tuple[str, dict[str, Any]]] = [
    ("onnx", {}),
    ("trt", {}),
    ("trt", {"decode_primitives": True}),
    ("primitives", {}),
    ("contrib", {}),
]


def rotary(
    x: tuple[int | str, ...],
    *,
    positions: bool = True,
    turned: int = 8,
    kind: int = TensorProto.FLOAT,
    **attributes: Any,
) -> ir.Model:
    """A graph of one RotaryEmbedding named `rope`, with dynamic axes."""
    S = x[1] if len(x) == 3 else x[2]
    table = (20, turned // 2) if positions else (x[0], S, turned // 2)
    inputs = {"x": (kind, x), "cos": (kind, table), "sin": (kind, table)}
    if positions:
        inputs["positions"] = (TensorProto.INT64, (x[0], S))
    node = helper.make_node("RotaryEmbedding", list(inputs), ["y"], name="rope", **attributes)
    values = [helper.make_tensor_value_info(name, *value) for name, value in inputs.items()]
    graph = helper.make_graph([node], "g", values, [helper.make_tensor_value_info("y", kind, x)])
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11))


MODELS = {
    "4d": rotary(("B", 4, "S", 8)),
    "4d-partial": rotary(("B", 4, "S", 12), rotary_embedding_dim=8),
    "4d-interleaved-partial": rotary(("B", 4, "S", 12), rotary_embedding_dim=8, interleaved=1),
    "3d": rotary(("B", "S", 32), num_heads=4),
    "3d-interleaved": rotary(("B", "S", 32), num_heads=4, interleaved=1),
    "3d-partial": rotary(("B", "S", 48), num_heads=4, rotary_embedding_dim=8),
    "4d-spread": rotary(("B", 4, "S", 8), positions=False),
    "3d-spread": rotary(("B", "S", 32), num_heads=4, positions=False),
    "3d-spread-partial": rotary(
        ("B", "S", 48), num_heads=4, positions=False, rotary_embedding_dim=8, interleaved=1
    ),
}


def test_all_published_cases_are_here() -> None:
    assert len(CASES) >= 8


@pytest.mark.parametrize(("dialect", "options"), LOWERINGS)
@pytest.mark.parametrize("name", CASES)
def test_published_case(name: str, dialect: str, options: dict[str, Any]) -> None:
    case = CASES[name]
    lowered = ir.to_proto(lower(ir.from_proto(case.model), dialect, **options))
    names = [value.name for value in case.model.graph.input]
    for inputs, outputs in case.data_sets:
        got = run_in_ort(lowered, dict(zip(names, inputs, strict=True)))
        Runner.assert_similar_outputs(outputs, got, case.rtol, case.atol)


@pytest.mark.sweep(15)
@pytest.mark.parametrize(("dialect", "options"), LOWERINGS)
@pytest.mark.parametrize("name", MODELS)
def test_computes_the_same_at_dynamic_shapes(name: str, dialect: str, options: dict[str, Any]) -> None:
    model = MODELS[name]
    lowered = lower(model, dialect, **options)
    for sizes in ({"B": 2, "S": 5}, {"B": 3, "S": 1}, {"B": 1, "S": 7}):
        feeds = random_feeds(model, {**sizes, "T": 20})
        wanted = ReferenceEvaluator(ir.to_proto(model)).run(None, feeds)[0]
        np.testing.assert_allclose(run_in_ort(ir.to_proto(lowered), feeds)[0], wanted, rtol=1e-5, atol=1e-6)


def test_half_precision_rounds_as_the_definition_does() -> None:
    model = rotary(("B", 4, "S", 8), kind=TensorProto.FLOAT16)
    feeds = random_feeds(model, {"B": 2, "S": 5, "T": 20})
    got, wanted = (
        ReferenceEvaluator(ir.to_proto(m)).run(None, feeds)[0] for m in (lower(model, "primitives"), model)
    )
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", MODELS)
def test_primitives_are_older_than_the_operator(name: str) -> None:
    lowered = lower(MODELS[name], "primitives")
    assert lowered.opset_imports[""] == 17
    assert all(node.name.startswith("rope/") for node in lowered.graph)
    onnx.checker.check_model(ir.to_proto(lowered), full_check=True)


def test_each_dialect_has_its_own_operator() -> None:
    model = MODELS["3d"]
    found = {
        dialect: [(n.domain, n.op_type) for n in lower(model, dialect).graph]
        for dialect in ("trt", "contrib")
    }
    assert found["trt"] == [("", "RotaryEmbedding")]
    assert found["contrib"] == [("com.microsoft", "RotaryEmbedding")]


def test_inside_a_function_it_is_inlined() -> None:
    inner = helper.make_node("RotaryEmbedding", ["x", "c", "s", "p"], ["y"], name="inner")
    imports = [helper.make_opsetid("", 23), helper.make_opsetid("local", 1)]
    function = helper.make_function("local", "F", ["x", "c", "s", "p"], ["y"], [inner], imports[:1])
    outer = ir.to_proto(MODELS["4d"])
    call = helper.make_node("F", ["x", "cos", "sin", "positions"], ["y"], domain="local")
    graph = helper.make_graph([call], "main", outer.graph.input, outer.graph.output)
    proto = helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=11)
    lowered = lower(ir.from_proto(proto), "primitives")
    assert not any(node.op_type in ("F", "RotaryEmbedding") for node in lowered.graph)


@pytest.mark.parametrize("dialect", ["primitives", "contrib"])
@pytest.mark.parametrize(
    ("model", "feature"),
    [
        (rotary(("B", "H", "S", 8)), "rotary embedding without a fixed head size"),
        (rotary(("B", "S", 32)), "rotary embedding without a fixed head size"),
        (rotary(("B", 4, "S", 8), rotary_embedding_dim=7), "rotary embedding of this size"),
    ],
)
def test_refusal_names_feature_and_node(dialect: str, model: ir.Model, feature: str) -> None:
    with pytest.raises(LoweringError) as caught:
        lower(model, dialect)
    assert (caught.value.feature, caught.value.node) == (feature, "rope")


@pytest.mark.parametrize(
    ("matmul", "version", "cured_by", "options"),
    [
        ("tensorrt", "8.6.1", "primitives lowering", {}),
        ("tensorrt", "10.14.1", "trt lowering", {"decode_primitives": True}),
    ],
)
def test_targets_without_the_operator(
    matmul: str, version: str, cured_by: str, options: dict[str, bool]
) -> None:
    findings = check_operators(MODELS["4d"], target_from(matmul, version))
    assert [(f.node, f.severity, f.cured_by) for f in findings] == [("rope", "refused", cured_by)]
    assert operator_options(findings) == options


@pytest.mark.parametrize(("matmul", "version"), [("tensorrt", "10.15"), ("tensorrt-rtx", "1.7.1")])
def test_targets_with_the_operator(matmul: str, version: str) -> None:
    assert check_operators(MODELS["4d"], target_from(matmul, version)) == []


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("dialect", "options"), LOWERINGS[1:4])
def test_rtx_takes_every_published_case(dialect: str, options: dict[str, Any]) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    from rtx_probe import build

    for case in CASES.values():
        built = build(lower(ir.from_proto(case.model), dialect, **options))
        assert (len(built.kernels), built.unused_inputs) == (1, ()), case.name


def test_positions_of_unknown_rank_are_given_to_the_plugin() -> None:
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["": 23]>
        g (float16[2,S,64] q, float16[2,S,64] k, float16[2,S,64] v, int64[n] shape, int64[1,S] ids,
           float16[128,8] cos, float16[128,8] sin) => (float16[2,S,64] y) {
          p = Expand(ids, shape)
          a = RotaryEmbedding<num_heads=4>(q, cos, sin, p)
          b = RotaryEmbedding<num_heads=4>(k, cos, sin, p)
          y = Attention<q_num_heads=4, kv_num_heads=4>(a, b, v)
        }"""
    )
    (node,) = (each for each in lower(model, "plugin").graph if each.domain == "mha_deploy")
    assert node.attributes.get_int("rotary_positions") == GIVEN
