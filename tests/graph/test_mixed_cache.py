"""Mixed precision of layers that generate: past keys count, rows that are not valid do not."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from decode_models import Layer, dynamic, feeds, fixed
from mixed_models import distance, kept_in_float32

from mha_deploy.graph.mixed_precision import apply_plan, plan_precision
from mha_deploy.runtime import measure_ranges, open_runner

FORMS = {"dynamic": (dynamic, "past_key", 5), "fixed": (fixed, "key_cache", 0)}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("form", FORMS)
def test_a_healthy_cache_is_fp16_in_and_out(form):
    make, _, past = FORMS[form]
    layer = Layer()
    model = make(layer)
    arrays = feeds(model, layer, starts=[5, 5], S=3, P=past)
    plan = plan_precision(model, measure_ranges(model, {"case": arrays}))
    assert not kept_in_float32(plan), plan.lines()
    mixed = apply_plan(model, plan)
    onnx.checker.check_model(ir.to_proto(mixed), full_check=True)
    assert {v.dtype for v in mixed.graph.outputs} == {ir.DataType.FLOAT16}
    half = {v.name: arrays[v.name].astype(v.dtype.numpy()) for v in mixed.graph.inputs}
    with open_runner("ort-cpu", mixed) as runner, open_runner("ort-cpu", model) as exact:
        results, wanted = runner.run(half), exact.run(arrays)
    assert all(distance(results[name], wanted[name]) < 3e-3 for name in wanted)


@pytest.mark.parametrize("form", FORMS)
def test_scores_with_the_keys_of_the_cache_count(form):
    make, keys, past = FORMS[form]
    layer = Layer()
    model = make(layer)
    arrays = feeds(model, layer, starts=[5, 5], S=3, P=past)
    arrays["x"] *= 10
    arrays[keys][:, :, 2] = 3e4  # fits, where it is not multiplied
    plan = plan_precision(model, measure_ranges(model, {"case": arrays}), margin=1.5)
    assert [(each.name, each.kind) for each in plan.kept] == [("att", "overflow")]
    assert "scores" in plan.kept[0].reason
    mixed = apply_plan(model, plan)
    onnx.checker.check_model(ir.to_proto(mixed), full_check=True)
    assert {v.dtype for v in mixed.graph.outputs} == {ir.DataType.FLOAT16}


def test_cache_entries_beyond_the_valid_ones_do_not_count():
    layer = Layer()
    model = fixed(layer)
    arrays = feeds(model, layer, starts=[5, 5], S=3)
    inner = measure_ranges(model, {"case": arrays}).inner["att"]
    arrays["key_cache"][:, :, 9:] = 1e9
    assert measure_ranges(model, {"case": arrays}).inner["att"] == inner
    arrays["key_cache"][:, :, 3] = 1e9
    assert measure_ranges(model, {"case": arrays}).inner["att"] > 1e8


def test_the_score_is_that_of_the_specification():
    layer = Layer()
    model = dynamic(layer)
    arrays = feeds(model, layer, starts=[5, 5], S=3, P=5)
    weights = {name: v.const_value.numpy() for name, v in model.graph.initializers.items()}
    unrotated = {**arrays, "positions": np.zeros_like(arrays["positions"])}  # position 0 rotates nothing
    inner = measure_ranges(model, {"case": unrotated}).inner["att"]
    q = (arrays["x"] @ weights["wq"]).reshape(2, 3, 4, 8).transpose(0, 2, 1, 3)
    k = (arrays["x"] @ weights["wk"]).reshape(2, 3, 2, 8).transpose(0, 2, 1, 3)
    k = np.repeat(np.concatenate([arrays["past_key"], k], axis=2), 2, axis=1)
    assert inner == pytest.approx(np.abs(q @ k.swapaxes(-1, -2)).max() * 8**-0.5, rel=1e-5)
