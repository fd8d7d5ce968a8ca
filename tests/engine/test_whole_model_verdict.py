"""Verdicts on engines of many attentions and several types: each node by its own kernel, and quickly."""

import sys
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from rtx_engines import build_rtx

from mha_deploy.engine.build import judge_engine
from mha_deploy.graph.ir import constant, infer_shapes
from mha_deploy.graph.lower import lower
from mha_deploy.runtime.tensorrt.engine_verdict import (
    WrittenTypes,
    engine_verdict,
    fusion_verdict,
    group_by_attention,
    precision_verdict,
    written_types,
)
from mha_deploy.runtime.tensorrt.kernels import EngineTensor, Kernel
from mha_deploy.status import ReasonKind

MHA = "_gemm_mha_v2_0x2e86b3c2d45288c25fdbfc4664620464"


def tensor(name, dtype="fp16", *shape):
    return EngineTensor(name=name, dtype=dtype, shape=shape or (-1, 64))


def matmul(name, dtype="fp16", *, nodes=None, reads=None, layer_type="gemm"):
    return Kernel(
        name=name,
        layer_type=layer_type,
        tactic="__myelin_CASK_STUB",
        onnx_nodes=tuple(nodes or (name,)),
        inputs=(tensor("a", reads or dtype),),
        constants=(tensor("w", reads or dtype, 64, 64), tensor("alpha", "fp32", 1)),
        outputs=(tensor("b", dtype),),
        source="log",
    )


def attention(*nodes, profile=0, source="log"):
    x = (tensor("q"), tensor("o"))
    return Kernel(
        name="_gemm_mha_v2_myl0_1",
        layer_type="kgen",
        tactic=MHA,
        onnx_nodes=nodes,
        inputs=x[:1],
        outputs=x[1:],
        profile=profile,
        source=source,
    )


def written(dtype, writes=None, *, is_matmul=True):
    types = frozenset({dtype}), frozenset({writes or dtype})
    return WrittenTypes(reads=types[0], writes=types[1], is_matmul=is_matmul)


# -- precision: what the graph says, and what fell back --------------------------------------------


def test_a_matmul_that_the_graph_keeps_in_fp32_is_no_fallback() -> None:
    kernels = [matmul("mm"), matmul("angles", "fp32")]
    types = {"mm": written("fp16"), "angles": written("fp32")}
    assert precision_verdict(kernels, "fp16").status == "mixed"
    verdict = precision_verdict(kernels, "fp16", types)
    assert verdict.status == "selected at load"
    assert {found.kernel for found in verdict.written} == {"angles"}


def test_a_matmul_that_is_fp16_in_the_graph_and_fp32_in_the_engine_fell_back() -> None:
    types = {"mm": written("fp16"), "other": written("fp16"), "norm": written("fp32", is_matmul=False)}
    verdict = precision_verdict([matmul("mm"), matmul("other", "fp32")], "fp16", types)
    assert verdict.status == "mixed"
    assert {found.kernel for found in verdict.offenders} == {"other"}
    assert verdict.written == ()


def test_arithmetic_is_judged_by_the_matmuls_alone() -> None:
    """A cast beside a matmul explains a wide tensor, and never a wide multiplication."""
    wide = matmul("mm", "fp32", nodes=("mm", "cast"), reads="fp16")
    types = {"mm": written("fp16"), "cast": written("fp16", "fp32", is_matmul=False)}
    assert precision_verdict([matmul("other"), wide], "fp16", types).has_requested_types
    slow = replace(wide, tactic="sm80_xmma_gemm_f32f32_f32f32_f32_tn_n")
    assert precision_verdict([matmul("other"), slow], "fp16", types).status == "mixed"


def test_a_graph_in_fp32_throughout_is_not_what_was_requested() -> None:
    assert precision_verdict([matmul("mm", "fp32")], "fp16", {"mm": written("fp32")}).status == "mixed"


@pytest.mark.parametrize("layer_type", ["correlation", "corrltn", "CaskConvolution", "deconv"])
def test_a_convolution_is_a_matmul(layer_type) -> None:
    assert precision_verdict([matmul("patches", layer_type=layer_type)], "fp16").has_requested_types
    verdict = precision_verdict([matmul("patches", "fp32", layer_type=layer_type)], "fp16")
    assert verdict.status == "mixed"
    assert not verdict.islands


def test_types_are_read_from_the_graph_that_is_built(mixed_graph) -> None:
    types = written_types(mixed_graph)
    assert types["narrow"] == written("fp16")
    assert types["wide"] == written("fp32")
    assert types["up"] == written("fp16", "fp32", is_matmul=False)


def test_an_engine_with_a_layer_kept_in_fp32_is_as_requested(mixed_graph) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    lowered = lower(mixed_graph, "trt")
    profile = {"x": ((1, 2, 64), (2, 16, 64), (4, 32, 64))}
    built = build_rtx(lowered, profiles=[profile], targets="89")
    verdict = judge_engine(built, lowered, mixed_graph, "fp16", 1)
    assert verdict.all_fused
    assert verdict.precision.status == "selected at load", verdict.precision
    assert any("wide" in found.onnx_nodes for found in verdict.precision.written)
    # The same engine from a graph that is FP16 throughout would have fallen back.
    assert engine_verdict(built.kernels, ["att"], "fp16").precision.status == "mixed"


def test_a_matmul_in_fp32_between_casts_stays_in_fp32(sandwich) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    lowered = lower(sandwich, "trt")
    types = written_types(lowered)
    verdict = engine_verdict(build_rtx(lowered, targets="89").kernels, [], "fp16", written=types).precision
    narrow = {name for found in verdict.offenders if found.dtype == "fp16" for name in found.onnx_nodes}
    assert "wide" not in narrow
    # If this fails, TensorRT has learnt to keep such matmuls, and need not be asked to.
    types = written_types(sandwich)
    verdict = engine_verdict(build_rtx(sandwich, targets="89").kernels, [], "fp16", written=types).precision
    assert verdict.status == "mixed"
    assert {"wide"} <= {name for found in verdict.offenders for name in found.onnx_nodes}
    assert {found.wanted for found in verdict.offenders} == {"fp32"}


def test_what_keeps_a_matmul_in_fp32_changes_no_number(sandwich) -> None:
    """Signs of zero, infinities and NaN among them."""
    numbers = np.zeros((4, 16, 64), np.float16)
    numbers[0, :, 0], numbers[1, 0] = [-0.0, np.inf, *np.linspace(-9, 9, 13), np.nan], -0.0
    kept = next(node for node in lower(sandwich, "trt").graph if node.op_type == "Add")
    added = constant(kept.inputs[1]).numpy()
    wide = numbers.astype(np.float32)
    assert (wide + added).tobytes() == wide.tobytes()


def test_a_matmul_that_stays_wide_is_not_narrowed() -> None:
    kernels, types = (
        [matmul("mm"), matmul("wide", "fp32")],
        {"mm": written("fp16"), "wide": written("fp32")},
    )
    assert precision_verdict(kernels, "fp16", types).has_requested_types
    narrow = precision_verdict([matmul("mm"), matmul("wide")], "fp16", types)
    assert narrow.status == "mixed"
    assert len(narrow.offenders) == 2
    # A bias and a residual in FP16 behind factors in FP32.
    wide = matmul("wide", "fp32", nodes=("wide", "add"))
    wide = replace(
        wide, inputs=(*wide.inputs, tensor("residual")), constants=(*wide.constants, tensor("bias"))
    )
    types["add"] = written("fp16", is_matmul=False)
    assert precision_verdict([matmul("mm"), wide], "fp16", types).has_requested_types


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, "selected at load"),
        # Another input, constant, attribute or operator; and numbers that are drawn anew.
        ({"size": ["other"]}, "unknown"),
        ({"f1": [1.0, 0.75, 0.25, 0.125]}, "unknown"),
        ({"equation": "j,i->ji"}, "unknown"),
        ({"made": ("Identity", "Neg")}, "unknown"),
        ({"made": ("RandomUniformLike", "RandomUniformLike")}, "unknown"),
    ],
)
def test_one_kernel_is_enough_for_two_equal_matmuls(changes, status) -> None:
    """The table of rotary positions in each of two layers: TensorRT merges them, and names one."""
    types = written_types(positions_of_two_layers(**changes))
    kernels = [replace(each, is_traced=True) for each in (matmul("mm"), matmul("outer_0", "fp32"))]
    assert precision_verdict(kernels, "fp16", types).status == status
    (without,) = precision_verdict(kernels[:1], "fp16", types).reasons
    assert without.kind == ReasonKind.MATMUL_NOT_REPORTED


def positions_of_two_layers(
    *, size=("S",), f1=(1.0, 0.5, 0.25, 0.125), equation="i,j->ij", made=("Identity", "Identity")
) -> ir.Model:
    """The sizes come from two values of one shape, and the frequencies are two equal constants."""
    node, nodes = helper.make_node, []
    for at, form in enumerate(("i,j->ij", equation)):
        nodes += [
            node("Shape", [f"x{at}"], [f"shape{at}"], name=f"shape_{at}"),
            node("Squeeze", [f"shape{at}"], [f"size{at}"], name=f"size_{at}"),
            node("Range", ["zero", f"size{at}", "one"], [f"whole{at}"], name=f"range_{at}"),
            node("Cast", [f"whole{at}"], [f"p{at}"], name=f"cast_{at}", to=TensorProto.FLOAT),
            node(made[at], [f"p{at}"], [f"q{at}"], name=f"made_{at}"),
            node("Einsum", [f"q{at}", f"f{at}"], [f"y{at}"], name=f"outer_{at}", equation=form),
        ]
    nodes.append(node("MatMul", ["h", "h"], ["y"], name="mm"))
    constants = {"zero": 0, "one": 1, "f0": np.array([1.0, 0.5, 0.25, 0.125], np.float32)}
    constants["f1"] = np.array(f1, np.float32)
    info = helper.make_tensor_value_info
    ends = [info("x0", TensorProto.FLOAT, ["S"]), info("x1", TensorProto.FLOAT, [*size])]
    outputs = [info(name, TensorProto.FLOAT, None) for name in ("y0", "y1")]
    half = [info(name, TensorProto.FLOAT16, [4, 4]) for name in ("h", "y")]
    held = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", [*ends, half[0]], [*outputs, half[1]], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return infer_shapes(ir.from_proto(model))


@pytest.fixture(scope="module")
def sandwich():
    """A matmul in FP32 between two Casts, with weights that FP16 cannot hold."""
    nodes = [
        helper.make_node("Cast", ["x"], ["x32"], name="up", to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x32", "w"], ["y32"], name="wide"),
        helper.make_node("Cast", ["y32"], ["y"], name="down", to=TensorProto.FLOAT16),
    ]
    weight = numpy_helper.from_array(np.full((64, 64), 1e5, np.float32), "w")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [4, 16, 64]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    return infer_shapes(ir.from_proto(model))


@pytest.fixture(scope="module")
def mixed_graph():
    """Attention in FP16, and behind it a matmul that is kept in FP32."""
    rng = np.random.default_rng(1)
    weights = {
        "w0": rng.standard_normal((64, 192)).astype(np.float16),
        "w1": rng.standard_normal((64, 256)).astype(np.float32),
        "shift": rng.standard_normal(64).astype(np.float32),
        "parts": np.array([64, 64, 64]),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["qkv"], name="narrow"),
        helper.make_node("Split", ["qkv", "parts"], ["q", "k", "v"], name="split", axis=-1),
        helper.make_node(
            "Attention", ["q", "k", "v"], ["o"], name="att", q_num_heads=4, kv_num_heads=4, is_causal=1
        ),
        helper.make_node("Cast", ["o"], ["o32"], name="up", to=TensorProto.FLOAT),
        helper.make_node("Add", ["o32", "shift"], ["moved"], name="shifted"),
        helper.make_node("MatMul", ["moved", "w1"], ["y32"], name="wide"),
        helper.make_node("Cast", ["y32"], ["y"], name="down", to=TensorProto.FLOAT16),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["B", "S", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, ["B", "S", 256])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.checker.check_model(model)
    return infer_shapes(ir.from_proto(model))


# -- fusion: many attentions -----------------------------------------------------------------------


def test_a_kernel_proves_the_attention_it_computes_and_not_one_whose_mask_it_names() -> None:
    groups = {
        name: tuple(f"{name}/{part}" for part in ("mask_bias", "scores", "weights", "sum")) for name in "ab"
    }
    mine = attention("b/scores", "b/weights", "b/sum", "a/mask_bias")
    parts = [matmul("a/scores"), Kernel(name="__myl_MaxrSubExpSum", onnx_nodes=("a/weights",), source="log")]
    first, second = fusion_verdict([mine, *parts], groups)
    assert (first.node, first.status) == ("a", "decomposed")
    assert (second.node, second.status) == ("b", "fused")
    (lonely, _) = fusion_verdict([mine], groups)
    assert lonely.status == "unknown"
    assert [(reason.kind, reason.got) for reason in lonely.reasons] == [(ReasonKind.OTHER_ATTENTION, "b")]


def test_parts_belong_to_the_longest_name() -> None:
    names = ["block/attn/lowered/scores", "block/attn", "block/attn_1/scores", "block/scores", "other"]
    assert group_by_attention(names, ["block", "block/attn", "block/attn_1"]) == {
        "block": ("block/scores",),
        "block/attn": ("block/attn/lowered/scores", "block/attn"),
        "block/attn_1": ("block/attn_1/scores",),
    }


def steps_to_judge(layers):
    """How many lines of Python run: that is the same on every machine, however busy."""
    names = [f"model.layers.{at}/attn" for at in range(layers)]
    groups = {name: (f"{name}/scores", f"{name}/weighted_values") for name in names}
    kernels = [
        kernel
        for name in names
        for kernel in (
            *(matmul(f"{name}_mm_{at}") for at in range(8)),
            attention(f"{name}/scores", f"{name}/weighted_values"),
        )
    ]
    steps = 0

    def count(frame, event, argument):
        nonlocal steps
        steps += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        verdicts = fusion_verdict(kernels, groups)
        parts = group_by_attention([part for group in groups.values() for part in group], names)
    finally:
        sys.settrace(before)
    assert parts == groups
    assert [verdict.status for verdict in verdicts] == ["fused"] * layers
    return steps


def test_the_work_grows_with_the_number_of_attentions_and_not_with_its_square() -> None:
    assert steps_to_judge(200) < 20 * steps_to_judge(20)
