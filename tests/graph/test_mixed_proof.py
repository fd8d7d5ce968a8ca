"""Mixed precision is needed, is enough, and touches nothing else: shown on models that overflow."""

import math
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from mixed_models import LOWEST, NOTHING, distance, encoder, feeds, kept_in_float32, run, run_as_written

from mha_deploy.graph import mixed_precision
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.mixed_precision import apply_plan, plan_precision
from mha_deploy.runtime import measure_ranges, open_runner

CASES = {"short": feeds(S=5), "long": feeds(S=12, seed=1)}
OTHER = feeds(B=3, S=10, seed=7)


def planned(model, **options):
    return plan_precision(model, measure_ranges(model, CASES), **options)


def checked(model, plan):
    """The mixed graph, after ONNX's checker and its strict shape inference."""
    mixed = apply_plan(model, plan)
    onnx.checker.check_model(ir.to_proto(mixed), full_check=True)
    onnx.shape_inference.infer_shapes(ir.to_proto(mixed), check_type=True, strict_mode=True)
    return mixed


def count(model, op_type):
    return sum(node.op_type == op_type for node in model.graph)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("sentinel", [None, LOWEST, -1e9, -np.inf])
def test_a_healthy_model_is_written_in_fp16_altogether(sentinel):
    model = encoder(sentinel=sentinel)
    plan = planned(model)
    assert not kept_in_float32(plan), plan.lines()
    mixed = checked(model, plan)
    # The mask that both layers share is searched for fully masked queries in float32.
    assert count(mixed, "Cast") == (2 if sentinel is not None and np.isfinite(sentinel) else 0)
    assert {node.dtype for node in attention_nodes(mixed)} == {"fp16"}
    assert all(v.dtype != ir.DataType.FLOAT for v in mixed.graph.initializers.values())
    assert distance(run(mixed, OTHER), run(model, OTHER)) < 3e-3


@pytest.mark.parametrize("sentinel", [LOWEST, -1e9])
def test_fully_masked_queries_do_not_depend_on_the_masks_that_were_measured(sentinel):
    """No key is masked in the only case: the number is known from the graph."""
    model = encoder(sentinel=sentinel, layers=1)
    case = feeds(S=5)
    plan = plan_precision(model, measure_ranges(model, {"all": {**case, "keep": np.ones_like(case["keep"])}}))
    assert not kept_in_float32(plan), plan.lines()
    masked = {**OTHER, "keep": OTHER["keep"].copy()}
    masked["keep"][1] = False
    mixed = checked(model, plan)
    # ONNX Runtime does not absorb the scores in float32's lowest number, the evaluator does.
    assert distance(run(mixed, masked)[1], run_as_written(model, masked)[1]) < 3e-3
    assert distance(run(mixed, OTHER), run(model, OTHER)) < 3e-3


def test_only_an_activation_that_overflows_stays_float32():
    model = encoder({"0.up": 300.0, "0.down": 2000.0})
    plan = planned(model)
    exact = run(model, OTHER)
    assert distance(run_as_written(apply_plan(model, NOTHING), OTHER), exact) > 1
    mixed = checked(model, plan)
    assert distance(run(mixed, OTHER), exact) < 3e-3
    wide = {"0.down", "0.add2", "1.norm1", "1.add1", "1.norm2", "1.add2", "last.norm"}
    assert {each.name for each in plan.kept} == wide
    assert {node.dtype for node in attention_nodes(mixed)} == {"fp16"}
    assert len(attention_nodes(mixed)) == len(attention_nodes(model)) == 2
    # Up: into 0.down, the residual, o and down of layer 1; down: from two norms, and for the output.
    assert count(mixed, "Cast") == 7
    wide_weights = {name for name, v in mixed.graph.initializers.items() if v.dtype == ir.DataType.FLOAT}
    assert wide_weights == {"0.down.weight", "1.norm1.weight", "1.norm2.weight", "last.norm.weight"}


def test_the_plan_names_the_tensor_the_number_and_the_limit():
    down = next(each for each in planned(encoder({"0.up": 300.0, "0.down": 2000.0})).kept)
    assert (down.name, down.op_type, down.precision, down.kind) == ("0.down", "MatMul", "fp32", "overflow")
    assert down.figure > 65504
    assert (
        down.reason
        == f"0.down reaches {down.figure:,.6g}, and FP16 ends at 65,504 (kept in FP32 from 16,376 on)"
    )


def test_scores_that_overflow_keep_only_their_attention_float32():
    model = encoder({"1.q": 150.0, "1.k": 150.0})
    ranges = measure_ranges(model, CASES)
    assert max(ranges.values[name].largest for name in ("1.q", "1.k")) < 1000
    assert ranges.inner["1.attention"] > 65504
    plan = plan_precision(model, ranges)
    assert [(each.name, each.precision) for each in plan.kept] == [("1.attention", "fp32")]
    exact = run(model, OTHER)
    assert distance(run_as_written(apply_plan(model, NOTHING), OTHER), exact) > 0.1
    mixed = checked(model, plan)
    assert [node.dtype for node in attention_nodes(mixed)] == ["fp16", "fp32"]
    assert count(mixed, "Cast") == 4
    with open_runner("ort-cpu", mixed) as runner:
        assert distance(next(iter(runner.run(OTHER).values())), exact) < 5e-2


def test_nodes_that_stay_wide_for_one_reason_are_one_line():
    plan = planned(encoder({"0.up": 300.0, "0.down": 2000.0}))
    alike = [replace(plan.kept[0], name=f"copy-{index}") for index in range(3)]
    lines = replace(plan, kept=(*plan.kept, *alike)).lines()
    assert len(lines) == len(plan.lines())
    assert sum("and 3 more" in line for line in lines) == 1


def test_attention_may_be_kept_in_bfloat16():
    model = encoder({"1.q": 150.0, "1.k": 150.0}, sentinel=LOWEST)
    plan = planned(model, wide="bf16")
    attention = next(each for each in plan.kept if each.op_type == "Attention")
    assert attention.precision == "bf16"
    mixed = checked(model, plan)
    assert [node.dtype for node in attention_nodes(mixed)] == ["fp16", "bf16"]
    with open_runner("onnx-reference", mixed) as runner:
        result = next(iter(runner.run(OTHER).values()))
    assert result.dtype == np.float16
    assert np.isfinite(result).all()


def test_the_mask_of_a_float32_attention_masks_all_scores():
    """-65504 does not mask a score of 100,000: the mask is computed in float32, and clamped for the other."""
    model = encoder({"1.q": 150.0, "1.k": 150.0}, sentinel=LOWEST)
    plan = planned(model)
    assert {each.name: each.kind for each in plan.kept} == {"mask": "mask", "1.attention": "overflow"}
    mixed = checked(model, plan)
    wide, half = (node.inputs[3] for node in reversed([n for n in mixed.graph if n.op_type == "Attention"]))
    assert (wide.dtype, half.dtype) == (ir.DataType.FLOAT, ir.DataType.FLOAT16)
    assert count(mixed, "Max") == 1
    with open_runner("ort-cpu", mixed) as runner:
        assert distance(next(iter(runner.run(OTHER).values())), run(model, OTHER)) < 5e-2


def test_a_sentinel_is_clamped_and_the_plan_reports_it():
    model = encoder(sentinel=LOWEST)
    (clamped,) = planned(model).clamped
    assert (clamped.name, clamped.found, clamped.written) == ("never", LOWEST, -65504.0)
    assert "mask" in clamped.reason
    never = apply_plan(model, planned(model)).graph.initializers["never"].const_value.numpy()
    assert never == np.float16(-65504)


def test_the_margin_decides_what_is_near():
    model = encoder({"0.up": 20.0, "0.down": 20.0})
    room = 65504 / measure_ranges(model, CASES).values["0.down"].largest
    assert "0.down" not in {each.name for each in planned(model, margin=0.9 * room).kept}
    assert "0.down" in {each.name for each in planned(model, margin=1.1 * room).kept}


def test_only_a_norm_whose_squares_overflow_stays_float32():
    model = encoder({"0.up": 20.0, "0.down": 20.0})
    plan = planned(model, margin=1.0)
    assert {each.op_type for each in plan.kept} == {"LayerNormalization"}
    assert "squares" in plan.kept[0].reason


def test_the_model_is_not_changed():
    model = encoder({"0.up": 300.0, "0.down": 2000.0}, sentinel=LOWEST)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    apply_plan(model, planned(model))
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_slices_measure_the_same(monkeypatch):
    """But for the last bits: what ONNX Runtime may fuse depends on which tensors are looked at."""
    model = encoder({"1.q": 150.0, "1.k": 150.0})
    whole = measure_ranges(model, CASES)
    monkeypatch.setattr(mixed_precision, "_SLICE_BYTES", 1)
    sliced = measure_ranges(model, CASES)
    assert sliced.inner == pytest.approx(dict(whole.inner), rel=1e-4)
    assert sliced.values.keys() == whole.values.keys()
    for name, each in whole.values.items():
        # The smallest is a difference of large numbers: it has no digits to speak of.
        found = sliced.values[name]
        assert (found.sentinel, found.smallest < math.inf) == (each.sentinel, each.smallest < math.inf), name
        wanted = pytest.approx((each.largest, each.highest), rel=1e-4, abs=1e-4 * each.largest)
        assert (found.largest, found.highest) == wanted, name
