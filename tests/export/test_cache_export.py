"""Layers that generate, exported: which nodes, which shapes, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

import mha_deploy as md
from mha_deploy.bundle.cases import golden_cases
from mha_deploy.bundle.sizes import plan_golden
from mha_deploy.errors import ExportError, SpecError
from mha_deploy.exporter.exporter import canonical_from_module, choose_opset
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.canonical import check_canonical
from mha_deploy.graph.file import load_graph
from mha_deploy.model.catalog import find_spec
from mha_deploy.model.precision import find_precision
from mha_deploy.model.spec import Axis
from mha_deploy.reference import build_module
from mha_deploy.reference.inputs import random_inputs
from mha_deploy.runtime import open_runner

CACHED = ("tiny-dynamic", "tiny-preallocated", "tiny-window")


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.fixture(scope="module", params=CACHED[:2])
def bundle(request, bundles):
    return bundles(request.param)


def test_a_dynamic_cache_is_the_past_and_present_of_attention(bundles):
    model = load_graph(bundles("tiny-dynamic").model_path)
    (attention,) = attention_nodes(model)
    assert (attention.has_past, attention.has_present, attention.is_causal) == (True, True, True)
    assert (attention.Hq, attention.Hkv, attention.mask) == (4, 2, "none")
    assert operators(model).count("RotaryEmbedding") == 2
    assert [str(value.shape) for value in model.graph.outputs[1:]] == ["[B,2,P+S,16]"] * 2


def test_a_preallocated_cache_is_written_by_scatter_and_counted_by_lengths(bundles):
    model = load_graph(bundles("tiny-preallocated").model_path)
    (attention,) = attention_nodes(model)
    assert (attention.has_nonpad_kv_seqlen, attention.has_past, attention.is_causal) == (True, False, True)
    scatters = [node for node in model.graph if node.op_type == "TensorScatter"]
    assert [node.name for node in scatters] == ["key_cache.update", "value_cache.update"]
    assert [node.outputs[0].name for node in scatters] == ["key_cache_out", "value_cache_out"]
    assert bundles("tiny-preallocated").manifest.opset == 24


def test_a_window_is_a_mask_and_a_softcap_an_attribute():
    spec = replace(find_spec("tiny-window"), softcap=10.0)
    (attention,) = attention_nodes(canonical_from_module(build_module(spec)))
    assert (attention.mask, attention.is_causal, attention.has_past) == ("bool", False, True)
    assert attention.softcap == 10.0


def test_golden_cases_hold_a_prompt_and_a_token(bundle):
    cases = {case.name: case for case in golden_cases(bundle)}
    assert {"min", "prefill", "decode", "odd"} <= set(cases)
    assert cases["decode"].sizes["S"] == 1
    spec = bundle.manifest.spec
    for case in cases.values():
        for tensor in spec.outputs:
            assert case.oracle[tensor.name].shape == tensor.shape(case.sizes)
    if spec.cache == "preallocated":
        assert not cases["prefill"].inputs["lengths"].any()
        assert {0, spec.axes["T"].max - cases["ragged"].sizes["S"]} <= set(cases["ragged"].inputs["lengths"])
    else:
        assert cases["prefill"].inputs["past_key"].shape[2] == 0


def test_old_entries_come_out_as_they_went_in(bundle):
    spec = bundle.manifest.spec
    case = next(case for case in golden_cases(bundle) if case.name == "decode")
    if spec.cache == "dynamic":
        P = case.sizes["P"]
        np.testing.assert_array_equal(case.eager["present_key"][:, :, :P], case.inputs["past_key"])
        return
    for row, length in enumerate(case.inputs["lengths"]):
        before, after = case.inputs["key_cache"][row], case.eager["key_cache_out"][row]
        np.testing.assert_array_equal(np.delete(after, length, axis=1), np.delete(before, length, axis=1))
        assert (after[:, length] != before[:, length]).any()


def test_lengths_leave_room_for_the_new_tokens():
    spec = find_spec("tiny-preallocated")
    for seed in range(20):
        lengths = random_inputs(spec, {"B": 4, "S": 40, "T": 64}, seed, ragged=seed % 2 == 0)["lengths"]
        assert lengths.min() >= 0
        assert lengths.max() <= 24


@pytest.mark.parametrize("ragged", [True, False])
def test_a_full_call_begins_with_an_empty_cache(ragged):
    lengths = random_inputs(find_spec("tiny-preallocated"), {"B": 4, "S": 64, "T": 64}, 0, ragged=ragged)[
        "lengths"
    ]
    assert lengths.tolist() == [0, 0, 0, 0]


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("name", "ranges"),
    [
        ("tiny-preallocated", {"T": "24", "S": "1:16:24"}),
        ("tiny-preallocated", {"T": "1", "S": "1"}),
        ("tiny-dynamic", {"P": "0:0:1", "S": "1"}),
        # These three are exported for tests/validate/test_self_test.py too, and right there.
        pytest.param("tiny-preallocated", {"T": "64", "S": "64"}, marks=pytest.mark.slow),
        pytest.param("tiny-dynamic", {"P": "0:1:1"}, marks=pytest.mark.slow),
        pytest.param("tiny-dynamic", {"P": "0"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_cache_of_the_narrowest_axes_can_be_exported(tmp_path, name, ranges):
    spec = find_spec(name)
    spec = spec.with_axes({axis: Axis.parse(text, name=axis) for axis, text in ranges.items()})
    bundle = md.export(spec, tmp_path / "bundle", precision="fp32")
    with open_runner("ort-cpu", bundle.model_path) as runner:
        for case in golden_cases(bundle):
            got = runner.run(case.inputs)
            np.testing.assert_allclose(got["output"], case.oracle["output"], atol=1e-5)


def test_a_failed_export_says_what_began_it(monkeypatch):
    module = build_module(find_spec("tiny-dynamic"))

    def turn(*given):
        raise NotImplementedError("turning is not to be had\nand this is why")

    monkeypatch.setattr(module, "rotate", turn)
    with pytest.raises(ExportError, match="could not export tiny-dynamic") as caught:
        canonical_from_module(module)
    assert "got: NotImplementedError: turning is not to be had\n" in f"{caught.value}\n"


def test_the_reference_evaluator_agrees(bundle):
    with open_runner("onnx-reference", bundle.model_path) as runner:
        for case in golden_cases(bundle):
            got = runner.run(case.inputs)
            for name, oracle in case.oracle.items():
                np.testing.assert_allclose(got[name].astype(float), oracle, atol=0.02)


def test_the_operator_set_is_the_first_that_suffices():
    assert [choose_opset(find_spec(name), None) for name in CACHED] == [23, 24, 23]
    assert choose_opset(find_spec("tiny-dynamic"), 24) == 24
    with pytest.raises(ExportError, match="TensorScatter") as caught:
        choose_opset(find_spec("tiny-preallocated"), 23)
    assert caught.value.hint == "opset=24"


def test_the_check_of_the_graph_tells_one_cache_from_another(bundles):
    dynamic, path, fp16 = (
        find_spec("tiny-dynamic"),
        bundles("tiny-dynamic").model_path,
        find_precision("fp16"),
    )
    check_canonical(path, dynamic, fp16)
    with pytest.raises(ExportError, match="cache of the kind preallocated"):
        check_canonical(path, dynamic.with_cache("preallocated"), fp16)
    with pytest.raises(ExportError, match="0 RotaryEmbedding"):
        check_canonical(path, replace(dynamic, rope=None), fp16)


def test_any_causal_layer_can_be_given_a_cache():
    llama = find_spec("llama-3-8b")
    dynamic, static = llama.with_cache("dynamic"), llama.with_cache("preallocated")
    assert (str(dynamic.axes["P"]), str(static.axes["T"])) == ("0:2048:8191", "8192:8192:8192")
    assert (llama.longest, dynamic.longest, static.longest) == (8192, 8191 + 8192, 8192)
    assert dynamic.with_cache("dynamic") is dynamic
    assert static.with_cache("none").cache == "none"
    with pytest.raises(SpecError, match="unknown value"):
        llama.with_cache("grown")
    with pytest.raises(SpecError, match="A cache does not go with"):
        find_spec("bert-base").with_cache("dynamic")


def test_prefill_and_decode_are_cases_of_a_cache_only():
    with pytest.raises(SpecError, match="No such golden case"):
        plan_golden(find_spec("tiny-gqa"), ("prefill",))
