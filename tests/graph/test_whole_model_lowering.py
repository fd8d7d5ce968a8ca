"""Whole models in every dialect: graphs run and compute what they did, engines have every attention fused."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import small_transformers as small
from conformance import run_in_ort, run_in_reference
from onnx import helper
from rtx_engines import build_rtx

from mha_deploy.engine.build import judge_engine, with_plugin_roles
from mha_deploy.graph.attention_node import MASK, attention_nodes
from mha_deploy.graph.ir import NodeBuilder, input_at
from mha_deploy.graph.lower import lower
from mha_deploy.graph.lower.call import LoweringError
from mha_deploy.graph.plugin_node import is_plugin_attention
from mha_deploy.graph.rules import check_operators, group_findings, judge, target_from
from mha_deploy.runtime.tensorrt.engine_verdict import group_by_attention

SIZES = ({"B": 2, "S": 5, "T": 7}, {"B": 3, "S": 11, "T": 4})
QUICK = ("handmade",)
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in small.MODELS]
RANGES = {"B": (1, 2, 4), "S": (2, 16, 48), "T": (1, 16, 48)}
DIALECTS = ("onnx", "trt", "primitives", "contrib")

# Constants of primitives are rounded to FP16, as the graph's own are: √½ of GELU is the coarsest.
TOLERANCE = {"primitives": 5e-4}


def with_a_row_for_every_query(model):
    """Masks as ONNX Runtime takes them: unlike TensorRT, it does not broadcast them over queries."""
    for attention in [node for node in model.graph if node.op_type == "Attention"]:
        mask = input_at(attention, MASK)
        if mask is not None and mask.shape is not None and mask.shape[-2] == 1:
            b = NodeBuilder(f"{attention.name}_mask")
            expanded = b.expand(mask, 1, 1, b.size(attention.inputs[0], 2), 1)
            attention.replace_input_with(MASK, expanded)
            model.graph.insert_before(attention, b.nodes)
    return model


@pytest.fixture(scope="module", params=NAMES)
def whole(request):
    """A model, its graph, and what the graph computes at two sizes, in float32."""
    model = small.fused(request.param)
    wide = ir.to_proto(small.in_float32(model))
    feeds = [small.feeds_of(request.param, sizes, np.float32) for sizes in SIZES]
    return request.param, model, [(each, run_in_ort(wide, each)[0]) for each in feeds]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_computes_the_same(whole, dialect) -> None:
    name, model, cases = whole
    lowered = lower(model, dialect)
    onnx.checker.check_model(ir.to_proto(lowered), full_check=dialect != "contrib")
    lowered = with_a_row_for_every_query(lowered) if dialect == "trt" else lowered
    wide = ir.to_proto(small.in_float32(lowered))
    for feeds, wanted in cases:
        got = run_in_ort(wide, feeds)[0]
        assert np.isfinite(wanted).all()
        assert np.abs(wanted).max() > 1
        np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE.get(dialect, 2e-5))
    # As it is, in half precision, it is taken as well.
    half = run_in_ort(ir.to_proto(lowered), small.feeds_of(name, SIZES[0]))[0]
    assert half.dtype == np.float16
    assert np.abs(half.astype(np.float32) - cases[0][1]).max() < 0.1


@pytest.mark.slow
def test_plugin_computes_the_same_and_reads_packed_projections() -> None:
    """In ONNX's reference evaluator, which has our nodes, but cannot run every model."""
    model = small.fused("handmade")
    lowered = lower(model, "plugin")
    attentions = [node for node in lowered.graph if is_plugin_attention(node)]
    assert [node.attributes["sources"].value for node in attentions] == [(0, 0, 0)] * 2
    exact, wide = (ir.to_proto(small.in_float32(each)) for each in (model, lowered))
    for sizes in SIZES:
        feeds = small.feeds_of("handmade", sizes, np.float32)
        wanted = run_in_ort(exact, feeds)[0]
        np.testing.assert_allclose(run_in_reference(wide, feeds)[0], wanted, rtol=0, atol=2e-5)


def test_masks_and_positions_matter(whole) -> None:
    """What the comparison above would miss if attention did not count for anything."""
    _, model, cases = whole
    broken = small.in_float32(model)
    for node in broken.graph.all_nodes():
        if node.op_type == "Attention":
            node.attributes.add(ir.AttrFloat32("scale", 0.5 * node.attributes["scale"].as_float()))
    got = run_in_ort(ir.to_proto(broken), cases[0][0])[0]
    assert np.abs(got - cases[0][1]).max() > 1e-2


def test_primitives_are_opset_17_throughout(whole) -> None:
    _, model, _ = whole
    lowered = lower(model, "primitives")
    assert lowered.opset_imports == {"": 17}
    for node in lowered.graph.all_nodes():
        assert node.domain == ""
        assert onnx.defs.get_schema(node.op_type, 17, "").since_version <= 17
        assert not {"start", "end"} & set(node.attributes) or node.op_type != "Shape"
    assert not {"Attention", "RMSNormalization", "Gelu"} & {
        node.op_type for node in lowered.graph.all_nodes()
    }


@pytest.mark.parametrize("dialect", ["trt", "primitives", "contrib"])
def test_the_parts_of_every_attention_are_found(whole, dialect) -> None:
    """Also where the recognizer left values of the attention's name, and where names hold dots."""
    _, model, _ = whole
    attentions = [node.name for node in attention_nodes(model)]
    lowered = lower(model, dialect)
    found = group_by_attention([node.name for node in lowered.graph.all_nodes()], attentions)
    operators = {node.name: node.op_type for node in lowered.graph.all_nodes()}
    for parts in found.values():
        kinds = [operators[name] for name in parts]
        whole_node = [kind for kind in kinds if kind.endswith("Attention")]
        assert whole_node if dialect != "primitives" else kinds.count("MatMul") == 2
        assert kinds.count("Softmax") == (dialect == "primitives")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("dialect", ["trt", "primitives"])
def test_every_attention_of_an_engine_is_fused(whole, dialect) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    name, model, _ = whole
    lowered = lower(model, dialect)
    profile = {
        key: tuple(tuple(RANGES.get(axis, (axis,) * 3)[at] for axis in axes) for at in range(3))
        for key, axes in small.MODELS[name].inputs.items()
    }
    built = build_rtx(lowered, profiles=[profile], targets="89")
    verdict = judge_engine(with_plugin_roles(built, lowered), lowered, model, "fp16", 1)
    count = small.MODELS[name].attentions
    assert verdict.fused_count == (count, count)
    assert verdict.precision.has_requested_types, verdict.precision
    assert verdict.disagreements == ()
    assert {node.sources for node in verdict.nodes} == {("log", "plan")}


def test_equal_layers_are_one_finding(whole) -> None:
    _, model, _ = whole
    nodes, target = attention_nodes(model), target_from("tensorrt", "8.6.1")
    about_attention = [finding for answer in judge(nodes, target) for finding in answer.findings]
    findings = [*about_attention, *check_operators(model, target)]
    groups = group_findings(findings)
    assert sum(len(names) for names in groups.values()) == len(findings) > len(groups)
    assert len({(finding.rule, finding.message) for finding in groups}) == len(groups)
    missing = next(names for finding, names in groups.items() if finding.rule == "no-attention-operator")
    assert missing == [node.name for node in nodes]


def test_findings_for_two_targets_are_counted_once() -> None:
    model = small.fused("handmade")
    nodes = attention_nodes(model)
    findings = [
        finding
        for capability in ("8.9", "9.0")
        for answer in judge(nodes, target_from("tensorrt", "8.6.1", capability))
        for finding in answer.findings
    ]
    assert all(len(names) <= len(nodes) for names in group_findings(findings).values())


@pytest.mark.parametrize(
    ("operator", "to", "lacks", "has"),
    [
        ("Hardmax", onnx.TensorProto.FLOAT, ("tensorrt", "8.6.1"), ("tensorrt-rtx", "1.7.1")),
        ("NonZero", onnx.TensorProto.INT64, ("tensorrt-rtx", "1.7.1"), ("tensorrt", "8.6.1")),
    ],
)
def test_an_operator_that_a_target_lacks_is_reported_before_the_build(operator, to, lacks, has) -> None:
    graph = helper.make_graph(
        [helper.make_node(operator, ["x"], ["y"], name="choice")],
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor_value_info("y", to, [2, 3])],
    )
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]))
    (finding,) = check_operators(model, target_from(*lacks))
    assert (finding.node, finding.severity) == ("choice", "refused")
    assert check_operators(model, target_from(*has)) == []


def test_what_cannot_be_lowered_is_named_with_its_operator() -> None:
    model = small.fused("handmade").clone()
    late = ir.node("BitwiseNot", [model.graph.inputs[0]], name="model.flags.not")
    late.outputs[0].name = "flags"
    model.graph.append(late)
    model.graph.outputs.append(late.outputs[0])
    with pytest.raises(LoweringError, match="BitwiseNot in opset 17") as caught:
        lower(model, "primitives")
    assert caught.value.node == "model.flags.not"
