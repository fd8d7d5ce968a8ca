"""The mask cases: what each graph holds, and that they can stand side by side."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from attention_models import random_feeds
from rtx_engines import build_rtx

from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.lower import DIALECTS, lower
from mha_deploy.graph.plugin_node import is_plugin_attention
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.runtime import open_runner
from mha_deploy.validation.conformance import CASES, MaskCase, MaskInput, case_model, combine

FP16, FP32 = PRECISIONS["fp16"], PRECISIONS["fp32"]
BY_NAME = {case.name: case for case in CASES}


def names(values: list[ir.Value]) -> list[str]:
    return [value.name or "" for value in values]


# -- one case ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=list(PRECISIONS))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_graph_has_the_attributes_of_the_case(case: MaskCase, precision) -> None:
    model = case_model(case, precision)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    (facts,) = attention_nodes(model)
    assert facts.name == case.name
    assert (facts.B, facts.S, facts.T, facts.Hq, facts.Hkv, facts.D, facts.Dv) == (
        *(case.B, case.S, case.T, case.Hq, case.Hkv),
        *(case.D, case.D),
    )
    assert (facts.dtype, facts.rank) == (precision.name, 3)
    assert facts.is_causal == case.is_causal
    assert facts.scale == pytest.approx(case.scale)
    assert facts.mask == ("none" if case.mask is None else "bool" if case.mask.kind == "bool" else "float")
    assert facts.mask_dtype == {"none": None, "bool": "bool", "float": precision.name}[facts.mask]
    assert facts.mask_dims == case.shapes.get("mask")


def test_every_question_is_asked() -> None:
    assert len(BY_NAME) == len(CASES)
    assert all(case.about for case in CASES)
    causal = [case for case in CASES if case.is_causal and case.mask is None and not case.diagnostic]
    assert {np.sign(case.S - case.T) for case in causal} == {-1, 0, 1}
    masks = {(case.is_causal, case.mask.pattern, case.mask.kind) for case in CASES if case.mask}
    assert masks >= {
        (False, "lower-right", "bool"),
        *((causal, "scattered", kind) for causal in (False, True) for kind in ("bool", "bias")),
        *((False, "fully-masked", kind) for kind in ("bool", "-inf", "sentinel")),
        (False, "scattered", "sentinel"),
        (False, "padding", "bool"),
        (True, "left-padding", "bool"),
    }
    assert any(case.mask and case.Hq > case.Hkv > 1 for case in CASES)
    broadcast = {case.mask.axes for case in CASES if case.mask and case.mask.axes != "B Hq S T"}
    assert broadcast >= {"B 1 1 T", "S T", "B 1 S T", "1 Hq S T"}
    assert [case.name for case in CASES if case.diagnostic] == ["own-causal"]


def test_the_lower_right_corner_is_a_mask_and_not_the_attribute() -> None:
    case = BY_NAME["lower-right"]
    assert not case.is_causal
    assert case.S < case.T


def test_every_name_in_a_graph_begins_with_the_cases() -> None:
    for case in CASES:
        model = case_model(case, FP16)
        found = names([*model.graph.inputs, *model.graph.outputs])
        roles = ["q", "k", "v", *(["mask"] if case.mask else []), "y"]
        assert found == [f"{case.name}.{role}" for role in roles]


# -- side by side ----------------------------------------------------------------------------------------


@pytest.mark.sweep(1)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_cases_can_be_combined_before_and_after_lowering(dialect: str) -> None:
    precision = FP16 if dialect == "plugin" else FP32
    lowered = [lower(case_model(case, precision), dialect) for case in CASES]
    model = combine(lowered)
    onnx.checker.check_model(ir.to_proto(model), full_check=dialect not in ("contrib", "plugin"))
    assert len(list(model.graph)) == sum(len(list(each.graph)) for each in lowered)
    assert names(model.graph.inputs) == [name for each in lowered for name in names(each.graph.inputs)]
    assert names(model.graph.outputs) == [case.tensor("y") for case in CASES]
    assert dict(model.opset_imports) == dict(lowered[0].opset_imports)
    assert model.ir_version == lowered[0].ir_version
    afterwards = lower(combine([case_model(case, precision) for case in CASES]), dialect)
    # The plugin's lowering computes what several attentions share only once.
    counted = is_plugin_attention if dialect == "plugin" else lambda node: True
    assert len(list(filter(counted, afterwards.graph))) == len(list(filter(counted, model.graph)))


def test_a_case_gives_the_same_numbers_in_company() -> None:
    models = [lower(case_model(case, FP32), "primitives") for case in CASES[::4]]
    feeds = [random_feeds(model, {}, seed) for seed, model in enumerate(models)]
    with open_runner("ort-cpu", combine(models)) as runner:
        together = runner.run({name: array for each in feeds for name, array in each.items()})
    for model, given in zip(models, feeds, strict=True):
        with open_runner("ort-cpu", model) as runner:
            for name, wanted in runner.run(given).items():
                np.testing.assert_allclose(together[name], wanted, rtol=1e-5, atol=1e-6)


def test_the_models_are_not_changed() -> None:
    models = [case_model(case, FP16) for case in CASES]
    before = [ir.to_proto(model).SerializeToString() for model in models]
    combine(models)
    assert [ir.to_proto(model).SerializeToString() for model in models] == before


def test_a_mask_may_have_any_axes() -> None:
    case = MaskCase(name="odd", about="", S=3, T=5, Hq=4, mask=MaskInput(pattern="scattered", axes="Hq 1 T"))
    assert case.shapes["mask"] == (4, 1, 5)
    assert "mask" not in MaskCase(name="none", about="").shapes


# -- TensorRT-RTX, which builds without a GPU ------------------------------------------------------------


@pytest.mark.slow  # what is lowered is built in test_rtx_builds.py
@pytest.mark.parametrize("dialect", ["trt", "primitives"])
def test_tensorrt_rtx_takes_and_fuses_every_case(dialect: str) -> None:
    pytest.importorskip("tensorrt_rtx")
    model = combine([lower(case_model(case, FP16), dialect) for case in CASES])
    built = build_rtx(model, targets="8.9")
    assert sum(kernel.is_fused_attention for kernel in built.kernels["log"]) == len(CASES)
