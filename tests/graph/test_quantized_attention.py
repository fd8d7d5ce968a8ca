"""Attention in eight bits: Q, K, V and the weights on a grid, in every form that a target gets."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.lower import lower
from mha_deploy.graph.quantize import (
    attention_layers,
    find_format,
    named_nodes,
    quantized_gemms,
    with_quantized,
    without_quantizers,
)
from mha_deploy.graph.rules import judge, target_from
from mha_deploy.model.spec import Axis
from mha_deploy.runtime.tensorrt.engine_verdict import group_by_attention, precision_verdict, written_types
from mha_deploy.runtime.tensorrt.kernels import EngineTensor, Kernel

HQ, D, S = 4, 16, 8
SCALES = {"q": 0.02, "k": 0.03, "v": 0.025}


def attention(*, rank=4, Hkv=HQ, mask=False, causal=0, size=D, kind=TensorProto.FLOAT):
    """A graph with one attention."""
    widths = {"q": HQ, "k": Hkv, "v": Hkv}
    shapes = {n: ["B", H, "S", size] if rank == 4 else ["B", "S", H * size] for n, H in widths.items()}
    inputs = [helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()]
    if mask:
        inputs.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, ["B", 1, "S", "S"]))
    heads = {"q_num_heads": HQ, "kv_num_heads": Hkv} if rank == 3 else {}
    names = [each.name for each in inputs]
    node = helper.make_node("Attention", names, ["y"], name="att", is_causal=causal, **heads)
    output = helper.make_tensor_value_info("y", kind, shapes["q"])
    graph = helper.make_graph([node], "g", inputs, [output])
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10))


def quantized(name, **options):
    model = attention(**options)
    return with_quantized(model, find_format(name), SCALES, (), attention_layers(model))


def feeds(*, rank=4, Hkv=HQ, mask=False, **_):
    dice = np.random.default_rng(3)
    found = {n: dice.normal(size=(2, H, S, D)).astype("f") for n, H in (("q", HQ), ("k", Hkv), ("v", Hkv))}
    if rank == 3:
        found = {name: x.swapaxes(1, 2).reshape(2, S, -1) for name, x in found.items()}
    if mask:
        found["mask"] = dice.random((2, 1, S, S)) < 0.6
        found["mask"][0, 0, 2] = False  # a fully masked query
    return found


def by_hand(name, given, *, rank=4, Hkv=HQ, mask=False, causal=0, **_):
    """The same in plain NumPy."""
    format = find_format(name)
    split = {"q": HQ, "k": Hkv, "v": Hkv}
    parts = []
    for role, H in split.items():
        x = given[role].astype(np.float64)
        x = x.reshape(2, S, H, -1).swapaxes(1, 2) if rank == 3 else x
        parts.append(format.rounded(x, SCALES[role]).repeat(HQ // H, 1))
    q, k, v = parts
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(D)
    visible = given["mask"] if mask else np.ones((S, S), bool)
    visible = visible & np.tri(S, dtype=bool) if causal else visible
    scores = np.where(visible, scores, -np.inf)
    with np.errstate(invalid="ignore"):
        weights = np.nan_to_num(np.exp(scores - scores.max(-1, keepdims=True)))
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    y = format.rounded(weights, float(np.float16(1 / format.largest))) @ v
    return y.swapaxes(1, 2).reshape(2, S, -1) if rank == 3 else y


FORMS = {
    "plain": {},
    "side by side": {"rank": 3},
    "grouped": {"Hkv": 2, "causal": 1},
    "masked": {"mask": True},
    "all": {"rank": 3, "Hkv": 2, "mask": True, "causal": 1},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_canonical_graph_and_its_matmuls_compute_the_quantized_attention(name, form):
    options = FORMS[form]
    model, given = quantized(name, **options), feeds(**options)
    true = by_hand(name, given, **options)
    (node,) = attention_nodes(model)
    assert (node.quantized, node.quantizes_weights) == (name, True)
    for graph in (
        model,
        lower(model, "primitives", opset=None),
        lower(model, "trt", quantized_primitives=True),
    ):
        (got,) = ReferenceEvaluator(ir.to_proto(graph)).run(None, given)
        # A number at a boundary of the grid may go either way.
        assert np.linalg.norm(got - true) <= 0.01 * np.linalg.norm(true)
    kinds = dict(quantized_gemms(lower(model, "primitives", opset=None)))
    assert len(kinds) == 2
    assert set(kinds.values()) == {name}


def test_the_operator_takes_the_place_of_attention_and_its_quantizers():
    graph = lower(quantized("fp8", rank=3, Hkv=2, causal=1), "trt").graph
    kinds = [node.op_type for node in graph]
    (node,) = [node for node in graph if node.op_type == "TRT_QuantizedAttention"]
    assert not {"Attention", "Softmax", "MatMul"} & set(kinds)
    assert [value.producer().op_type for value in node.inputs[:3]] == ["DequantizeLinear"] * 3
    assert node.inputs[4].const_value.numpy() == pytest.approx(1 / 448, rel=1e-3)
    assert node.attributes["is_causal"].value == 1
    assert node.attributes["scale"].value == pytest.approx(D**-0.5)
    assert kinds.count("QuantizeLinear") == 3


def test_an_older_opset_has_its_scales_in_float32():
    graph = lower(quantized("int8"), "primitives", opset=17)
    assert graph.opset_imports[""] == 17
    assert [node.op_type for node in graph.graph].count("QuantizeLinear") == 4


def rules_of(model, *, backend="tensorrt-rtx", version=None, gpu="8.9", S="32:64:128"):
    target = target_from(backend, version, gpu)
    target = type(target)(**{**vars(target), "profiles": [{"S": Axis.parse(S, name="S")}]})
    (answer,) = judge(attention_nodes(model), target)
    return {each.rule for each in answer.findings}, answer


@pytest.mark.parametrize(
    ("name", "form", "target", "rule"),
    [
        ("fp8", {}, {"S": "31:64:128"}, "fp8-few-queries"),
        ("fp8", {}, {"S": "1:64:128"}, "fp8-few-queries"),
        ("fp8", {}, {"gpu": "8.6"}, "fp8-gpu"),
        ("fp8", {"size": 320}, {}, "fp8-head-size"),
        ("fp8", {}, {"backend": "tensorrt", "version": "8.6"}, "fp8-version"),
        ("fp8", {}, {"backend": "tensorrt", "version": "10.15"}, "fp8-operator"),
        ("int8", {"size": 48}, {}, "int8-limits"),
        ("int8", {}, {"S": "32:64:513"}, "int8-limits"),
        ("int8", {}, {}, "int8-output"),
    ],
)
def test_every_limit_is_known_before_the_build(name, form, target, rule):
    assert rule in rules_of(quantized(name, **form), **target)[0]


def test_what_is_within_the_limits_is_fused():
    for S in ("32:64:128", "1:1:1"):
        found, answer = rules_of(quantized("fp8", kind=TensorProto.FLOAT16), S=S)
        assert answer.fused_after_lowering, found


def test_other_quantizers_are_told_apart():
    """Q/DQ before attention alone: a kernel reads FP16."""
    model = quantized("fp8")
    node = next(node for node in model.graph if node.op_type == "Attention")
    matmul = next(node for node in model.graph if node.op_type == "MatMul")
    matmul.replace_input_with(0, node.outputs[3])
    assert "weights-unquantized" in rules_of(model)[0]
    assert dict(quantized_gemms(model))["att"] == "fp8"


@pytest.mark.parametrize(
    ("reads", "status", "attentions"),
    [("fp8", "verified", {"fp8": 1}), ("fp16", "mixed", {}), ("int8", "mixed", {})],
)
def test_the_verdict_on_attention_is_what_its_kernel_reads(reads, status, attentions):
    lowered = lower(quantized("fp8", kind=TensorProto.FLOAT16), "trt")
    names = [str(node.name) for node in lowered.graph]
    groups = group_by_attention(names, ["att"])
    (operator,) = [str(n.name) for n in lowered.graph if n.op_type == "TRT_QuantizedAttention"]
    kernel = Kernel(
        name="_gemm_mha_v2_myl0_4",
        layer_type="kgen",
        inputs=tuple(EngineTensor(name=f"{name}8", dtype=reads) for name in "qkv"),
        outputs=(EngineTensor(name="y", dtype="fp16"),),
        onnx_nodes=(operator,),
        source="log",
    )
    found = precision_verdict([kernel], "fp16", written_types(lowered), groups)
    assert found.status == status
    assert found.quantized_attentions == attentions
    assert [each.dtype for each in found.not_quantized] == ([] if attentions else [reads])


def test_a_name_that_two_nodes_have_is_not_given_to_a_third():
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["": 21]>
        g (float[2,2] x, float[2,2] w) => (float[2,2] a, float[2,2] b, float[2,2] c) {
          a = MatMul(x, w)
          b = MatMul(w, x)
          c = MatMul(x, x)
        }"""
    )
    for node, name in zip(model.graph, ("c", "n", "n"), strict=True):
        node.name = name
    assert [node.name for node in named_nodes(model).graph] == ["c", "n", "c_2"]


@pytest.mark.parametrize(
    ("scale", "zero", "left"),
    [
        ("other", "z", ["QuantizeLinear", "DequantizeLinear"]),
        ("s", "", ["Identity"]),
        ("s", "z", ["Identity"]),
    ],
)
def test_without_quantizers_another_scale_stays_a_factor(scale, zero, left):
    model = ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[4] x) => (float[4] y) <float s = {{0.5}}, float other = {{1.0}}, int8 z = {{0}}> {{
          q = QuantizeLinear(x, s, z)
          y = DequantizeLinear(q, {scale}{f", {zero}" if zero else ""})
        }}"""
    )
    assert [node.op_type for node in without_quantizers(model).graph] == left


def test_a_node_of_the_models_own_that_reads_v_keeps_it_whatever_its_name():
    model = attention()
    (node,) = model.graph
    v = node.inputs[2]
    own = ir.node("Sub", [node.inputs[0], v], name="att/own")
    own.outputs[0].name, own.outputs[0].type, own.outputs[0].shape = "z", v.type, v.shape
    model.graph.append(own)
    model.graph.outputs.append(own.outputs[0])
    given = feeds()
    made = with_quantized(model, find_format("int8"), SCALES, (), attention_layers(model))
    (z,) = ReferenceEvaluator(ir.to_proto(made)).run(["z"], given)
    assert np.array_equal(z, given["q"] - given["v"])
