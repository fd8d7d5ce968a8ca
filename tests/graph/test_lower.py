from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from attention_models import attention, random_feeds
from conformance import lower_for_reference, run_in_ort, run_in_reference
from onnx import helper
from onnx.reference import ReferenceEvaluator
from oracle import attend

from mha_deploy.engine.lowered import lower_for
from mha_deploy.errors import DeployError
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.lower import DIALECTS, lower
from mha_deploy.graph.lower.call import LoweringError
from mha_deploy.options import EngineOptions

Q4, K4, G4 = ("B", 4, "S", 8), ("B", 4, "T", 8), ("B", 2, "T", 8)
SELF_K, SELF_G = ("B", 4, "S", 8), ("B", 2, "S", 8)
Q3, K3, G3 = ("B", "S", 32), ("B", "T", 32), ("B", "T", 16)
HEADS = {"q_num_heads": 4, "kv_num_heads": 4}
GROUPED = {"q_num_heads": 4, "kv_num_heads": 2}

# Each with dynamic axes everywhere; `contrib` takes those that ONNX Runtime's own operators have.
MODELS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "plain": ((Q4, K4), {}),
    "3d": ((Q3, K3), HEADS),
    "3d-value-size": ((Q3, K3, ("B", "T", 64)), HEADS),
    "scale": ((Q4, K4), {"scale": 0.3}),
    "causal": ((Q4, SELF_K), {"is_causal": 1}),
    "causal-cross": ((Q4, K4), {"is_causal": 1}),
    "grouped": ((Q4, G4), {}),
    "grouped-causal": ((Q4, SELF_G), {"is_causal": 1}),
    "grouped-3d": ((Q3, G3), GROUPED),
    "multi-query": ((Q4, ("B", 1, "T", 8)), {}),
    "mask-1d": ((Q4, K4), {"mask": ("bool", ("T",))}),
    "mask-2d": ((Q4, K4), {"mask": ("fp32", ("S", "T"))}),
    "mask-whole-numbers": ((Q4, K4), {"mask": ("int64", ("S", "T"))}),
    "mask-3d": ((Q4, K4), {"mask": ("fp32", (4, "S", "T"))}),
    "mask-padding": ((Q4, K4), {"mask": ("bool", ("B", 1, 1, "T"))}),
    "mask-heads": ((Q4, G4), {"mask": ("bool", ("B", 4, "S", "T"))}),
    "mask-one-query": ((Q4, G4), {"mask": ("fp32", ("B", 4, 1, "T"))}),
    "mask-causal": ((Q4, G4), {"mask": ("fp32", ("B", 1, 1, "T")), "is_causal": 1}),
    "mask-3d-inputs": ((Q3, G3), {"mask": ("bool", ("B", 4, "S", "T")), **GROUPED}),
    "past": ((Q4, SELF_K), {"past": "P", "present": True}),
    "past-causal": ((Q4, SELF_G), {"past": "P", "present": True, "is_causal": 1}),
    "past-value-size": ((Q4, SELF_K, ("B", 4, "S", 16)), {"past": "P", "present": True, "is_causal": 1}),
    "past-grouped-value-size": ((Q4, SELF_G, ("B", 2, "S", 16)), {"past": "P", "is_causal": 1}),
    "past-cross": ((Q4, K4), {"past": "P", "present": True, "is_causal": 1}),
    "past-3d": ((Q3, ("B", "S", 32)), {"past": "P", "present": True, "is_causal": 1, **HEADS}),
    "present-without-past": ((Q4, K4), {"present": True}),
    "lengths": ((Q4, G4), {"lengths": True}),
    "lengths-causal": ((Q4, G4), {"lengths": True, "is_causal": 1}),
    "lengths-short-mask": ((Q4, K4), {"lengths": True, "mask": ("bool", ("S", "M"))}),
    "window": ((Q4, SELF_K), {"opset": 25, "left_window_size": 2, "right_window_size": 1}),
    "window-causal": ((Q4, SELF_G), {"opset": 25, "left_window_size": 1, "is_causal": 1}),
    "window-past": (
        (Q4, SELF_G),
        {"opset": 25, "left_window_size": 3, "is_causal": 1, "past": "P", "present": True},
    ),
    "softcap": ((Q4, SELF_G), {"softcap": 1.5, "is_causal": 1}),
    "weights": ((Q4, G4), {"weights": True, "qk_matmul_output_mode": 3, "mask": ("bool", ("S", "T"))}),
    "scores": ((Q4, G4), {"weights": True, "qk_matmul_output_mode": 2, "is_causal": 1}),
    "softmax-precision": ((Q4, K4), {"softmax_precision": 1}),
}
SIZES = [{"B": 2, "S": 3, "T": 6, "P": 2, "M": 5}, {"B": 1, "S": 7, "T": 11, "P": 5, "M": 9}]
LOWERINGS: list[tuple[str, dict[str, Any]]] = [
    ("trt", {"pad_heads": True, "decompose": True}),
    ("primitives", {"gqa": "fold"}),
    ("primitives", {"gqa": "broadcast"}),
    ("primitives", {"gqa": "repeat"}),
    ("contrib", {}),
    ("plugin", {}),
]
MISSING = {"contrib": ("weights", "scores"), "plugin": ("weights", "scores", "softcap")}


def reference(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    return ReferenceEvaluator(ir.to_proto(model)).run(None, feeds)


def evaluate(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Run a lowered model: in ONNX Runtime where the model is not left with an Attention it cannot run."""
    if attention_nodes(model):
        return reference(model, feeds)
    if any(node.domain == "mha_deploy" for node in model.graph):
        return run_in_reference(ir.to_proto(model), feeds)
    return run_in_ort(ir.to_proto(model), feeds)


@pytest.mark.sweep(20)
@pytest.mark.parametrize(("dialect", "options"), LOWERINGS)
@pytest.mark.parametrize("name", MODELS)
def test_computes_the_same_at_two_shapes(name: str, dialect: str, options: dict[str, Any]) -> None:
    dims, features = MODELS[name]
    model = attention(*dims, **features)
    try:
        lowered = lower_for_reference(model, dialect, **options)
    except LoweringError as error:
        assert name in MISSING[dialect]
        pytest.skip(f"{dialect} refuses {error.feature}")
    for sizes in SIZES:
        feeds = random_feeds(model, sizes)
        for got, wanted in zip(evaluate(lowered, feeds), attend(model, feeds), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_input_model_is_not_changed(dialect: str) -> None:
    model = attention(Q4, SELF_K, mask=("bool", ("S", "S")), is_causal=1)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    lowered = lower_for_reference(model, dialect)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
    assert lowered is not model


@pytest.mark.parametrize("dialect", DIALECTS)
def test_inputs_and_outputs_keep_names_and_types(dialect: str) -> None:
    model = attention(Q4, SELF_K, past="P", present=True, is_causal=1)
    lowered = lower_for_reference(model, dialect)
    for before, after in (
        (model.graph.inputs, lowered.graph.inputs),
        (model.graph.outputs, lowered.graph.outputs),
    ):
        assert [(v.name, v.dtype) for v in before] == [(v.name, v.dtype) for v in after]
    assert [str(v.shape) for v in lowered.graph.inputs] == [str(v.shape) for v in model.graph.inputs]
    onnx.checker.check_model(ir.to_proto(lowered))


def empty_row_feeds(model: ir.Model, *, kind: str) -> dict[str, np.ndarray]:
    feeds = random_feeds(model, SIZES[0])
    feeds["mask"][..., 1, :] = False if kind == "bool" else -np.inf
    return feeds


@pytest.mark.sweep(6)
@pytest.mark.parametrize("kind", ["bool", "fp32"])
@pytest.mark.parametrize("mask_dims", [("S", "T"), ("B", 4, "S", "T")])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_fully_masked_query_has_output_zero(dialect: str, kind: str, mask_dims: tuple[Any, ...]) -> None:
    model = attention(Q4, K4, mask=(kind, mask_dims))
    feeds = empty_row_feeds(model, kind=kind)
    lowered = lower_for_reference(model, dialect)
    (y,) = run_in_ort(ir.to_proto(lowered), feeds) if dialect != "plugin" else evaluate(lowered, feeds)
    assert np.all(y[:, :, 1] == 0)
    assert np.all(np.isfinite(y))
    np.testing.assert_allclose(y, attend(model, feeds)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_batch_element_without_keys_has_output_zero(dialect: str) -> None:
    model = attention(Q4, K4, lengths=True)
    feeds = random_feeds(model, SIZES[0])
    feeds["lengths"] = np.array([0, 4])
    (y,) = evaluate(lower_for_reference(model, dialect), feeds)
    assert np.all(y[0] == 0)
    np.testing.assert_allclose(y, attend(model, feeds)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keys", [SELF_K, SELF_G])
@pytest.mark.parametrize("dialect", ["trt", "primitives", "contrib", "plugin"])
def test_lowest_number_in_a_mask_does_not_open_hidden_keys(dialect: str, keys: tuple[Any, ...]) -> None:
    # Left padding as transformers write it: the first keys hold the lowest number, not -inf. A query that
    # sees only such keys attends to them evenly, and never to the keys that causality hides.
    model = attention(Q4, keys, mask=("fp32", ("B", 1, 1, "S")), is_causal=1)
    feeds = random_feeds(model, SIZES[0])
    feeds["mask"][:] = 0
    feeds["mask"][..., :2] = np.finfo(np.float32).min
    (y,) = evaluate(lower_for_reference(model, dialect), feeds)
    np.testing.assert_allclose(y, attend(model, feeds)[0], rtol=1e-5, atol=1e-6)


def test_a_float32_mask_saturates_in_fp16_and_keeps_infinity() -> None:
    model = attention((1, 1, 2, 8), (1, 1, 3, 8), dtype="fp16", mask=("fp32", (2, 3)))
    feeds = random_feeds(model, {})
    low = np.finfo(np.float32).min
    feeds["mask"] = np.array([[low, low, -np.inf], [0, 1, -np.inf]], np.float32)
    (y,) = reference(lower(model, "trt"), feeds)
    v = feeds["v"].astype(np.float32)
    assert np.all(np.isfinite(y))
    # Row 0: both visible scores are the lowest number, the third key stays hidden.
    np.testing.assert_allclose(y[0, 0, 0], v[0, 0, :2].mean(axis=0), atol=2e-3)


FP16_DIALECTS = [
    ("trt", {}),
    ("primitives", {}),
    ("trt", {"decompose": True}),
    ("contrib", {}),
    ("plugin", {}),
]


@pytest.mark.parametrize(("dialect", "options"), FP16_DIALECTS)
@pytest.mark.parametrize("masked_score", [0.0, 38400.0])
def test_a_visible_key_of_the_lowest_score_wins_over_masked_ones(
    dialect: str, options: dict[str, Any], masked_score: float
) -> None:
    # No finite number of FP16 is below every score by more than a masked score may be above it.
    softcap = {"softcap": 60000.0} if "decompose" in options else {}
    model = attention((1, 1, 2, 8), (1, 1, 3, 8), dtype="fp16", mask=("bool", (2, 3)), scale=1.0, **softcap)
    feeds = random_feeds(model, {})
    feeds["q"][:], feeds["k"][:], feeds["mask"][:] = -60, 80, [True, True, False]
    feeds["k"][0, 0, 2] = -masked_score / 480
    feeds["v"][0, 0, 2] = 1000
    (y,) = evaluate(lower_for_reference(model, dialect, **options), feeds)
    np.testing.assert_allclose(y[0, 0], np.broadcast_to(feeds["v"][0, 0, :2].mean(axis=0), (2, 8)), atol=2e-3)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("gqa", ["fold", "broadcast", "repeat"])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("lowest", [-65504.0, -40000.0, 65504.0])
def test_an_fp16_mask_of_one_large_number_is_a_shift(lowest: float, causal: int, gqa: str) -> None:
    dims = (1, 4, 3, 8), (1, 2, 3, 8)
    model = attention(*dims, dtype="fp16", mask=("fp16", (3, 3)), is_causal=causal)
    feeds = random_feeds(model, {})
    feeds["q"] *= 30  # scores beyond the distance of two numbers at 65504
    feeds["mask"][1] = lowest
    feeds["mask"][2, 0] = lowest
    (y,) = reference(lower(model, "primitives", gqa=gqa), feeds)
    np.testing.assert_allclose(y, attend(model, feeds)[0], atol=3e-2)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("kind", ["bool", "fp32"])
@pytest.mark.parametrize("dialect", ["trt", "primitives", "contrib", "plugin"])
@pytest.mark.parametrize("past", [None, "P"])
def test_a_short_mask_of_its_own_axis_hides_the_keys_beyond_it(
    dialect: str, kind: str, past: str | None
) -> None:
    model = attention(Q4, SELF_K, mask=(kind, ("B", 1, "S", "M")), past=past)
    lowered = lower_for_reference(model, dialect)
    for M in (3, 5 if past else 3, 4 if past else 2):  # as long as the keys, and shorter
        feeds = random_feeds(model, {"B": 2, "S": 3, "P": 2, "M": M})
        np.testing.assert_allclose(evaluate(lowered, feeds)[0], attend(model, feeds)[0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("version", "is_input"), [("8.6.1", True), ("10.3.0", False)])
def test_a_mask_stays_an_input_where_only_that_is_fused(version: str, is_input: bool) -> None:
    can = SimpleNamespace(attention=False, builds_without_gpu=True)
    rt = SimpleNamespace(backend="tensorrt", version=version, title=f"TensorRT {version}", can=can)
    model = attention(Q4, K4, dtype="fp16", mask=("fp16", ("B", 1, "S", "T")))
    lowered, _ = lower_for(rt, model, EngineOptions())
    (added,) = [node for node in lowered.graph if node.name == "att/scores_biased"]
    assert (added.inputs[1] in list(lowered.graph.inputs)) is is_input


@pytest.mark.parametrize("kind", ["fp32", "int64"])
@pytest.mark.parametrize("dialect", ["trt", "primitives", "contrib", "plugin"])
def test_a_mask_beyond_fp16_is_shifted_by_its_visible_keys(dialect: str, kind: str) -> None:
    model = attention((1, 2, 3, 8), (1, 2, 3, 8), dtype="fp16", mask=(kind, (3, 3)), is_causal=1)
    feeds = random_feeds(model, {})
    feeds["mask"] = np.array([[0, 10**6, 0], [-(10**6), -(10**6), 10**6], [10**6, 10**6 + 64, 0]])
    feeds["mask"] = feeds["mask"].astype("float32" if kind == "fp32" else kind)
    (y,) = evaluate(lower_for_reference(model, dialect), feeds)
    np.testing.assert_allclose(y, attend(model, feeds)[0], atol=4e-3)


def test_a_mask_of_opset_23_is_never_short() -> None:
    model = attention(Q4, SELF_K, mask=("bool", ("B", 1, "S", "M")), past="P", opset=23)
    assert not [node for node in lower(model, "trt").graph if node.op_type == "Pad"]


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (3, 3)])
@pytest.mark.parametrize("mask", [None, ("bool", ("B", 1, 1, "T")), ("fp32", ("B", "Hq", 1, "T"))])
@pytest.mark.parametrize("Dv", [8, 4, 16])
def test_heads_of_a_single_query_that_are_computed_several_times(
    heads: tuple[int, int], mask: tuple[str, Any] | None, Dv: int
) -> None:
    Hq, Hkv = heads
    own = mask and (mask[0], tuple(Hq if size == "Hq" else size for size in mask[1]))
    model = attention(("B", Hq, 1, 8), ("B", Hkv, "T", 8), ("B", Hkv, "T", Dv), mask=own)
    feeds = random_feeds(model, SIZES[0])
    lowered = lower_for_reference(model, "trt", repeat_heads=True, pad_heads=True)
    assert attention_nodes(lowered)[0].Hq in (4, 6)
    np.testing.assert_allclose(evaluate(lowered, feeds)[0], attend(model, feeds)[0], rtol=2e-5, atol=2e-6)


def test_one_new_token_needs_no_mask() -> None:
    model = attention(("B", 4, 1, 8), ("B", 2, 1, 8), past="P", present=True, is_causal=1)
    (node,) = attention_nodes(lower(model, "trt"))
    assert (node.mask, node.is_causal, node.has_past) == ("none", False, False)


def test_trt_leaves_alone_what_the_parser_takes() -> None:
    model = attention(Q3, K3, is_causal=1, **HEADS)
    lowered = lower(model, "trt")
    assert [node.op_type for node in lowered.graph] == ["Attention"]


def test_node_keeps_its_name_and_helpers_carry_it() -> None:
    model = attention(Q4, G4, mask=("bool", ("S", "T")), is_causal=1)
    names = {node.op_type: node.name for node in lower(model, "trt").graph}
    assert names["Attention"] == "att"
    assert all(node.name.startswith("att/") for node in lower(model, "primitives").graph)
    (contrib,) = [node for node in lower(attention(Q4, SELF_G), "contrib").graph if node.domain]
    assert (contrib.op_type, contrib.name) == ("GroupQueryAttention", "att")


def two_attentions() -> ir.Model:
    nodes = [
        helper.make_node("Attention", ["q", "k", "v", "m"], ["h"], name="same"),
        helper.make_node("Attention", ["h", "k", "v", "m"], ["y"], name="same"),
    ]
    dims = {"q": [1, 2, 3, 8], "k": [1, 2, 3, 8], "v": [1, 2, 3, 8], "m": [3, 3], "y": None}
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, d) for name, d in dims.items()]
    graph = helper.make_graph(nodes, "two", values[:4], values[4:])
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11))


@pytest.mark.parametrize("dialect", ["trt", "primitives", "contrib", "plugin"])
def test_two_nodes_of_one_name(dialect: str) -> None:
    model = two_attentions()
    feeds = random_feeds(model, {})
    lowered = lower_for_reference(model, dialect)
    names = [value.name for node in lowered.graph for value in node.outputs if value.name]
    assert len(names) == len(set(names))
    np.testing.assert_allclose(evaluate(lowered, feeds)[0], reference(model, feeds)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dialect", ["trt", "primitives", "contrib", "plugin"])
def test_attention_inside_a_branch(dialect: str) -> None:
    def branch(name: str, causal: int) -> onnx.GraphProto:
        node = helper.make_node("Attention", ["q", "k", "v", "m"], [name], name=name, is_causal=causal)
        return helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, 1, None)])

    dims = {"q": [1, 2, 3, 8], "k": [1, 2, 3, 8], "v": [1, 2, 3, 8], "m": [3, 3]}
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, d) for name, d in dims.items()]
    values.append(helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, []))
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch("a", 1), else_branch=branch("b", 0))
    graph = helper.make_graph([node], "if", values, [helper.make_tensor_value_info("y", 1, [1, 2, 3, 8])])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    lowered = ir.to_proto(lower_for_reference(ir.from_proto(proto), dialect))
    run = run_in_reference if dialect == "plugin" else run_in_ort
    feeds = random_feeds(two_attentions(), {})
    for condition in (True, False):
        both = {**feeds, "c": np.array(condition)}
        wanted = ReferenceEvaluator(proto).run(None, both)
        np.testing.assert_allclose(run(lowered, both)[0], wanted[0], rtol=1e-5, atol=1e-6)


def test_attention_inside_a_function_is_inlined() -> None:
    inner = helper.make_node("Attention", ["q", "k", "v"], ["y"], name="inner")
    inner.attribute.append(
        onnx.AttributeProto(name="is_causal", type=onnx.AttributeProto.INT, ref_attr_name="causal")
    )
    imports = [helper.make_opsetid("", 23), helper.make_opsetid("local", 1)]
    function = helper.make_function("local", "F", ["q", "k", "v"], ["y"], [inner], imports[:1], ["causal"])
    values = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [1, 2, 3, 8]) for n in "qkvy"]
    call = helper.make_node("F", ["q", "k", "v"], ["y"], domain="local", causal=1)
    graph = helper.make_graph([call], "main", values[:3], values[3:])
    model = ir.from_proto(
        helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=11)
    )
    feeds = random_feeds(model, {})
    got = run_in_ort(ir.to_proto(lower(model, "primitives")), feeds)
    np.testing.assert_allclose(got[0], reference(model, feeds)[0], rtol=1e-5, atol=1e-6)


REFUSALS: list[tuple[str, str, ir.Model, str]] = [
    ("trt", "softcap", attention(Q4, K4, softcap=2.0), "decomposed"),
    ("trt", "V head size other than K's", attention(Q4, K4, ("B", 4, "T", 16)), "zeros"),
    ("contrib", "attention weights as output", attention(Q4, K4, weights=True), "dialect onnx"),
    ("contrib", "scale of 0", attention(Q4, K4, scale=0.0), "dialect onnx"),
    ("primitives", "negative scale or softcap", attention(Q4, K4, scale=-1.0), "-1"),
    ("contrib", "softcap with other key than query length", attention(Q4, K4, softcap=2.0), "onnx"),
    ("primitives", "mask with a single key column", attention(Q4, K4, mask=("bool", ("S", 1))), "expand"),
    ("trt", "mask for another number of heads", attention(Q4, G4, mask=("bool", (2, "S", "T"))), "1 or 4"),
    ("plugin", "types other than fp16 and bf16", attention(Q4, K4), "fp16"),
    ("plugin", "softcap", attention(Q4, K4, dtype="fp16", softcap=2.0), "primitives"),
    ("plugin", "attention weights as output", attention(Q4, K4, weights=True), "primitives"),
    (
        "plugin",
        "head size that is not a multiple of 8",
        attention(Q4, K4, ("B", 4, "T", 12), dtype="fp16"),
        "pad the heads",
    ),
    (
        "plugin",
        "head size above 256",
        attention(("B", 4, "S", 264), ("B", 4, "T", 264), dtype="fp16"),
        "primitives",
    ),
    ("plugin", "fp64", attention(Q4, K4, dtype="fp16", softmax_precision=11), "fp16"),
    ("primitives", "uneven head groups", attention(("B", 3, "S", 8), ("B", 2, "T", 8)), "Hq"),
]


@pytest.mark.parametrize(("dialect", "feature", "model", "hint"), REFUSALS)
def test_refusal_names_feature_node_and_remedy(
    dialect: str, feature: str, model: ir.Model, hint: str
) -> None:
    with pytest.raises(LoweringError, match="att") as caught:
        lower(model, dialect)
    assert (caught.value.feature, caught.value.node) == (feature, "att")
    assert f"{dialect} dialect" in caught.value.what
    assert hint in str(caught.value)


def test_unknown_shapes_are_refused() -> None:
    model = attention(Q4, K4)
    for value in model.graph.inputs:
        value.shape = None
    with pytest.raises(LoweringError, match="rank"):
        lower(model, "primitives")


def test_onnx_dialect_refuses_an_invalid_graph() -> None:
    model = attention(Q4, K4)
    next(iter(model.graph)).attributes.add(ir.AttrInt64("no_such_attribute", 1))
    with pytest.raises(LoweringError, match="no_such_attribute"):
        lower(model, "onnx")


@pytest.mark.parametrize(
    ("dialect", "options", "hint"),
    [
        ("tensorrt", {}, "trt"),
        ("trt", {"pad_head": True}, "pad_heads"),
        ("primitives", {"gqa": "foldd"}, "fold"),
    ],
)
def test_unknown_dialect_and_options_name_the_nearest(
    dialect: str, options: dict[str, Any], hint: str
) -> None:
    with pytest.raises(DeployError, match=hint):
        lower(attention(Q4, K4), dialect, **options)


@pytest.mark.parametrize("shift_masks", [True, False])
def test_a_query_under_the_lowest_number_of_fp16_averages_its_keys(shift_masks: bool) -> None:
    model = attention(("B", 2, "S", 8), ("B", 2, "T", 8), dtype="fp16", mask=("fp16", ("B", 1, "S", "T")))
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((1, 2, 4, 8)).astype(np.float16) for name in "qkv"}
    # Scores about -70 and below: with -65504 they are beyond FP16.
    feeds["q"], feeds["k"] = np.full_like(feeds["q"], 5), np.full_like(feeds["k"], -5)
    feeds["mask"] = np.zeros((1, 1, 4, 4), np.float16)
    feeds["mask"][..., 1, :] = -65504  # every key
    feeds["mask"][..., 2, :] = [-65504, -np.inf, -65504, -np.inf]
    feeds["mask"][..., 3, :] = -np.inf
    lowered = lower(model, "primitives", shift_masks=shift_masks)
    with np.errstate(all="ignore"):
        (y,) = ReferenceEvaluator(ir.to_proto(lowered)).run(None, feeds)
    values = feeds["v"].astype(np.float64)
    for query, keys in ((0, range(4)), (1, range(4)), (2, (0, 2))):
        np.testing.assert_allclose(y[:, :, query], values[:, :, list(keys)].mean(axis=2), atol=2e-3)
    assert not y[:, :, 3].any()


def test_weights_of_a_length_that_has_a_name_are_not_empty() -> None:
    """ONNX infers a length of 0 for them, which no runtime accepts beside a mask of fixed length."""
    model = attention(Q4, K4, mask=("bool", (6,)), weights=True, qk_matmul_output_mode=0, opset=23)
    for value in model.graph.outputs:
        value.shape = ir.Shape([None] * len(value.shape))
    feeds = random_feeds(model, SIZES[0])
    wanted = run_in_reference(ir.to_proto(model), feeds)
    for got, want in zip(run_in_ort(ir.to_proto(lower(model, "primitives")), feeds), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
