from __future__ import annotations

from dataclasses import replace
from typing import Any

import onnx_ir as ir
import pytest
from attention_models import attention

from mha_deploy.engine.lowered import unfused_for
from mha_deploy.errors import DeployError
from mha_deploy.graph.attention_node import AttentionNode, attention_nodes
from mha_deploy.graph.lower import lower
from mha_deploy.graph.rules import (
    _ATTENTIONS,
    _OPERATORS,
    RULES,
    SEVERITIES,
    Target,
    judge,
    target_from,
)
from mha_deploy.model.spec import Axis
from mha_deploy.runtime.tensorrt.versions import NotFusedError

Q, K = ("B", 8, "S", 64), ("B", 8, "S", 64)
CROSS, GROUPED = ("B", 8, "T", 64), ("B", 2, "S", 64)
WIDTHS = ("B", "S", "W"), ("B", "S", "W")
RTX = target_from("tensorrt-rtx", "1.7.1")
TRT_11, TRT_10, TRT_8 = (target_from("tensorrt", version) for version in ("11.4.0", "10.14.1", "8.6.1"))


def node(*dims: Any, dtype: str = "fp16", **features: Any) -> AttentionNode:
    return attention_nodes(model(*dims, dtype=dtype, **features))[0]


def model(*dims: Any, dtype: str = "fp16", **features: Any) -> ir.Model:
    return attention(*(dims or (Q, K)), dtype=dtype, **features)


def rules(found: AttentionNode, target: Target) -> dict[str, str]:
    return {finding.rule: finding.severity for finding in judge([found], target)[0].findings}


def with_size(D: int | str) -> tuple[Any, ...]:
    return ("B", 8, "S", D), ("B", 8, "S", D)


@pytest.mark.parametrize("target", [RTX, TRT_11, TRT_10])
def test_plain_attention_is_taken_and_fused(target: Target) -> None:
    (answer,) = judge([node(is_causal=1)], target)
    assert (answer.findings, answer.supported, answer.fused) == ((), True, True)


@pytest.mark.parametrize(
    ("rule", "severity", "found"),
    [
        ("past", "refused", node(past="P")),
        ("present", "refused", node(present=True)),
        ("qk-output", "refused", node(weights=True)),
        ("softcap", "refused", node(softcap=30.0)),
        ("softcap-unfused", "not-fused", node(softcap=30.0)),
        ("softmax-precision", "refused", node(softmax_precision=1)),
        ("v-head-size", "refused", node(Q, K, ("B", 8, "S", 32))),
        ("mask-and-causal", "refused", node(mask=("fp16", ("S", "S")), is_causal=1)),
        ("mask-dtype", "refused", node(mask=("fp32", ("S", "S")))),
        ("short-mask", "refused", node((1, 8, 4, 64), (1, 8, 6, 64), mask=("fp16", (4, 5)))),
        ("nonpad-kv-seqlen", "wrong-answer", node(lengths=True)),
        ("window", "wrong-answer", node(opset=25, left_window_size=8)),
        ("bool-mask", "note", node(mask=("bool", ("S", "S")))),
        ("fully-masked-query", "note", node(mask=("fp16", ("S", "S")))),
        ("causal-upper-left", "note", node(Q, CROSS, is_causal=1)),
        ("heads-of-an-axis", "refused", node(*with_size("N"))),
        ("heads-of-an-axis", "refused", node(Q, K, ("B", 8, "S", "N"))),
        ("heads-of-an-axis", "refused", node(*WIDTHS, q_num_heads=8, kv_num_heads=8)),
        ("head-size-range", "not-fused", node(*with_size(8))),
        ("head-size-range", "not-fused", node(*with_size(512))),
        ("head-size-padded", "note", node(*with_size(100))),
        ("fp32", "not-fused", node(dtype="fp32")),
    ],
)
def test_rule_speaks_of_its_node_only(rule: str, severity: str, found: AttentionNode) -> None:
    assert rules(found, RTX)[rule] == severity
    assert rules(found, TRT_11)[rule] == severity
    assert rule not in rules(node(), RTX)


def test_weights_as_output_prevent_fusion_only_of_matmuls() -> None:
    assert rules(node(weights=True), TRT_8)["qk-output-unfused"] == "not-fused"
    assert "qk-output-unfused" not in rules(node(weights=True), RTX)


def test_single_query_has_wider_limits() -> None:
    assert "fp32" not in rules(node(("B", 8, 1, 64), CROSS, dtype="fp32"), RTX)
    assert "head-size-range" not in rules(node(("B", 8, 1, 8), ("B", 8, "T", 8)), RTX)


@pytest.mark.parametrize(
    ("heads", "smallest", "fused"), [(1, 3, False), (1, 4, True), (2, 1, False), (2, 2, True)]
)
def test_a_single_query_has_a_kernel_for_four_heads_of_all_batch_elements(
    heads: int, smallest: int, fused: bool
) -> None:
    few = node(("B", heads, 1, 64), ("B", heads, "T", 64))
    target = replace(RTX, profiles=[{"B": Axis(min=smallest, opt=8, max=16)}])
    (answer,) = judge([few], target)
    assert (answer.fused, answer.fused_after_lowering) == (fused, True)
    assert judge([few], TRT_11)[0].fused, "measured on TensorRT-RTX only"


def test_8_6_fuses_a_float_mask_that_is_an_input_and_none_that_nodes_compute() -> None:
    found = model(mask=("fp16", ("B", 1, "S", "S")))
    at = next(each for each in found.graph if each.op_type == "Attention")
    for op_type, computed in (("Identity", False), ("Neg", True)):
        between = ir.node(op_type, [at.inputs[3]])
        between.outputs[0].dtype, between.outputs[0].shape = at.inputs[3].dtype, at.inputs[3].shape
        at.replace_input_with(3, between.outputs[0])
        found.graph.insert_before(at, between)
        (read,) = attention_nodes(found)
        assert ("computed-mask" in rules(read, TRT_8)) == computed
        assert "computed-mask" not in rules(read, TRT_10)


def test_versions_bound_the_rules() -> None:
    assert rules(node(), TRT_8)["no-attention-operator"] == "refused"
    assert "no-attention-operator" in rules(node(), target_from("tensorrt", "10.13"))
    assert "no-attention-operator" not in rules(node(), TRT_10)
    assert "causal-alignment-unknown" in rules(node(Q, CROSS, is_causal=1), TRT_10)
    assert "causal-alignment-unknown" not in rules(node(Q, CROSS, is_causal=1), TRT_11)
    assert rules(node(*with_size(100)), TRT_8)["head-size-multiple"] == "not-fused"
    assert rules(node(dtype="bf16"), TRT_8)["bf16-version"] == "refused"
    assert rules(node(Q, GROUPED), TRT_8)["grouped-heads"] == "note"
    assert rules(node(is_causal=1), TRT_8)["computed-mask"] == "not-fused"
    assert rules(node(mask=("bool", ("B", 1, 1, "S"))), TRT_8)["computed-mask"] == "not-fused"
    assert "computed-mask" not in rules(node(mask=("fp16", ("B", 1, "S", "S"))), TRT_8)
    assert "computed-mask" not in rules(node(is_causal=1), TRT_10)
    assert "grouped-heads" not in rules(node(Q, GROUPED), TRT_10)
    # Windows and lengths become plain matmuls on 8.6: nothing is ignored there.
    assert "window" not in rules(node(opset=25, left_window_size=8), TRT_8)


def test_a_target_without_version_is_the_newest() -> None:
    assert rules(node(past="P"), Target(backend="tensorrt")) == rules(node(past="P"), TRT_11)


@pytest.mark.parametrize(
    ("backend", "capability", "dtype", "rule"),
    [
        ("tensorrt", "7.0", "fp16", "compute-capability"),
        ("tensorrt-rtx", "9.0", "fp16", "rtx-gpu"),
        ("tensorrt-rtx", "10.0", "fp16", "rtx-gpu"),
        ("tensorrt-rtx", "7.5", "bf16", "bf16-gpu"),
        ("tensorrt", "7.5", "bf16", "bf16-gpu"),
    ],
)
def test_compute_capability(backend: str, capability: str, dtype: str, rule: str) -> None:
    target = target_from(backend, compute_capability=capability)
    assert rule in rules(node(dtype=dtype), target)


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.6", "8.9", "12.0", "12.1"])
def test_rtx_gpus(capability: str) -> None:
    assert rules(node(), target_from("tensorrt-rtx", compute_capability=capability)) == {}


CURABLE = {
    "past": {"past": "P", "present": True, "is_causal": 1},
    "mask-and-causal": {"mask": ("fp32", ("S", "S")), "is_causal": 1},
    "lengths": {"lengths": True, "is_causal": 1},
    "window": {"opset": 25, "left_window_size": 8},
    "bool": {"mask": ("bool", ("B", 1, 1, "S"))},
    "softcap": {"softcap": 30.0},
    "weights": {"weights": True},
}


@pytest.mark.parametrize("name", CURABLE)
@pytest.mark.parametrize("target", [RTX, TRT_11, TRT_10])
def test_what_a_lowering_is_reported_to_cure_is_cured(name: str, target: Target) -> None:
    canonical = model(**CURABLE[name])
    (before,) = judge(attention_nodes(canonical), target)
    assert before.supported_after_lowering
    after = judge(attention_nodes(lower(canonical, "trt", **before.options)), target)
    assert all(answer.supported for answer in after)
    assert {finding.severity for answer in after for finding in answer.findings} <= {"note"}
    assert bool(after) == before.fused_after_lowering  # what cannot be fused is no Attention node any more


def test_value_head_size_is_cured_by_padding() -> None:
    canonical = model(Q, K, ("B", 8, "S", 32))
    (before,) = judge(attention_nodes(canonical), RTX)
    assert (before.supported, before.fused_after_lowering, before.options) == (
        False,
        True,
        {"pad_heads": True},
    )
    assert judge(attention_nodes(lower(canonical, "trt", **before.options)), RTX)[0].fused


def test_old_tensorrt_is_cured_by_primitives() -> None:
    (answer,) = judge([node()], TRT_8)
    assert (answer.supported, answer.supported_after_lowering, answer.fused_after_lowering) == (
        False,
        True,
        True,
    )
    assert answer.findings[0].cured_by == "primitives lowering"


@pytest.mark.parametrize(("dtype", "is_known"), [("fp32", True), ("fp16", False)])
def test_a_failed_build_advises_no_type_or_head_size_that_is_right(dtype: str, is_known: bool) -> None:
    answers, advice = judge([node(dtype=dtype)], RTX), "use fp16 or bf16 and a head size of 16 to 256"
    with pytest.raises(NotFusedError) as caught, unfused_for(answers):
        raise NotFusedError("Attention has no fused kernel for this target.", got="att", hint=advice)
    assert ("fp32" in str(caught.value.got)) == is_known
    assert "head size" not in caught.value.hint


def test_findings_are_sorted_by_severity_and_have_a_remedy() -> None:
    many = node(dtype="fp32", lengths=True, past=None, softcap=2.0, mask=("bool", ("S", "S")))
    found = judge([many], RTX)[0].findings
    order = [SEVERITIES.index(finding.severity) for finding in found]
    assert order == sorted(order)
    assert all(finding.node == "att" and finding.message and finding.remedy for finding in found)
    assert "{" not in "".join(finding.message for finding in found)


def test_what_is_built_without_a_fused_kernel_names_the_option() -> None:
    (found,) = (each for each in judge([node(softcap=2.0)], RTX)[0].findings if each.cured_by is None)
    assert "--allow-decomposed" in found.remedy


def test_unknown_types_and_shapes_are_reported_as_unknown() -> None:
    bare = model()
    for value in bare.graph.inputs:
        value.shape, value.type = None, None
    assert rules(attention_nodes(bare)[0], RTX)["type-or-head-size-unknown"] == "note"


SOME_VERSIONS = (("tensorrt", "8.6"), ("tensorrt", "10.14"), ("tensorrt", "11.0"), ("tensorrt-rtx", "1.7"))


def test_rules_are_well_formed() -> None:
    # Every rule of the table has its condition in the code, and the other way round.
    assert list(RULES) == [*_OPERATORS, *_ATTENTIONS]
    for name, rule in RULES.items():
        assert rule.severity in SEVERITIES
        assert rule.source or name == "type-or-head-size-unknown"
        assert rule.message
        assert bool(rule.operators) == (name in _OPERATORS)
        assert any(rule.covers(target_from(backend, version)) for backend, version in SOME_VERSIONS)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [(("tensorrtx",), "tensorrt"), (("tensorrt", "ten"), "10.14"), (("tensorrt", None, "8"), "8.9")],
)
def test_bad_targets(arguments: tuple[Any, ...], hint: str) -> None:
    with pytest.raises(DeployError, match=hint):
        target_from(*arguments)
