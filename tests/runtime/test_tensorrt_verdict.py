"""The verdict: reported only where a kernel proves it, and unknown with a reason everywhere else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from inspector_texts import INSPECTOR_8, INSPECTOR_10, INSPECTOR_11
from msgspec import to_builtins

from mha_deploy.runtime.tensorrt.engine_verdict import (
    WrittenTypes,
    engine_verdict,
    fusion_verdict,
    math_type,
    precision_verdict,
)
from mha_deploy.runtime.tensorrt.kernels import (
    EngineTensor,
    Kernel,
    kernels_from_inspector,
    kernels_from_plan,
)
from mha_deploy.status import ReasonKind
from mha_deploy.text import engine_reason_text

FUSED = Kernel(
    name="_gemm_mha_v2_myl0_1",
    layer_type="kgen",
    tactic="_gemm_mha_v2_0xbf16",
    onnx_nodes=("att0",),
    inputs=(EngineTensor(name="q", dtype="fp16"),),
    outputs=(EngineTensor(name="y", dtype="fp16"),),
    source="log",
)
SCORES = Kernel(name="__fc1_myl0_1", layer_type="gemm", onnx_nodes=("att0",), source="log")
SOFTMAX = Kernel(
    name="__myl_MaxrSubExpSumDivMul_myl0_2", layer_type="kgen", onnx_nodes=("att0",), source="log"
)
MOVE = Kernel(name="__myl_TranReshMove_myl0_3", layer_type="kgen", onnx_nodes=("att0",), source="log")


def statuses(kernels, nodes=("att0",), **options):
    return [verdict.status for verdict in fusion_verdict(kernels, nodes, **options)]


def kinds(verdict):
    return [reason.kind for reason in verdict.reasons]


HALF = frozenset({"fp16"})
MATMUL = WrittenTypes(reads=HALF, writes=HALF, is_matmul=True)
SMALL = WrittenTypes(reads=HALF, writes=HALF, is_matmul=False)
A_SOFTMAX = WrittenTypes(reads=HALF, writes=HALF, is_matmul=False, is_softmax=True)
PROJECTIONS = {"qkv": MATMUL, "o": MATMUL}  # all matmuls of a graph outside attention


# -- by the kernels' own words --------------------------------------------------------------------------


def test_a_fused_kernel_that_names_the_node_proves_it():
    (verdict,) = fusion_verdict([MOVE, FUSED], ["att0"])
    assert (verdict.status, verdict.kernels) == ("fused", ("_gemm_mha_v2_0xbf16",))


def test_a_matmul_and_a_softmax_of_its_own_prove_the_contrary():
    (verdict,) = fusion_verdict([SCORES, SOFTMAX, MOVE], ["att0"])
    assert verdict.status == "decomposed"
    assert len(verdict.kernels) == 3


def test_a_move_proves_nothing():
    (verdict,) = fusion_verdict([MOVE], ["att0"])
    assert verdict.status == "unknown"
    assert kinds(verdict) == [ReasonKind.NO_COMPUTING_KERNEL]


def test_a_fused_kernel_that_names_no_node_makes_decomposed_unsure():
    nobody = Kernel(name="_gemm_mha_v2_myl0_7", layer_type="kgen", tactic="_gemm_mha_v2_0xaa", source="log")
    (verdict,) = fusion_verdict([SCORES, nobody], ["att0"])
    assert verdict.status == "unknown"
    assert kinds(verdict) == [ReasonKind.NAMELESS_FUSED]


def test_one_kernel_for_two_nodes_fuses_both():
    both = Kernel(name="k", layer_type="kgen", tactic="_gemm_mha_v2_0x1", onnx_nodes=("att0", "att1"))
    assert statuses([both], ("att0", "att1")) == ["fused", "fused"]


def test_a_plugin_that_is_the_node_proves_nothing():
    plugin = Kernel(name="att0", layer_type="PluginV2", onnx_nodes=("att0",))
    assert statuses([plugin]) == ["unknown"]


@pytest.mark.parametrize("layer_type", ["gemm", "MatrixMultiply", "kgen"])
def test_a_node_named_like_a_kernel_is_no_proof(layer_type):
    named = Kernel(
        name="fmha_mha_myl0_2", layer_type=layer_type, onnx_nodes=("mha",), tactic="__myelin_CASK_STUB"
    )
    assert statuses([named], ("mha",)) != ["fused"]


def test_a_matmul_named_like_a_fused_kernel_is_a_matmul():
    named = Kernel(
        name="_gemm_mha_v2_myl0_2", layer_type="gemm", onnx_nodes=("x",), tactic="__myelin_CASK_STUB"
    )
    assert statuses([named], ("x",)) == ["decomposed"]


def test_a_profile_that_no_source_reports_is_unknown():
    verdicts = fusion_verdict([FUSED], ["att0"], profiles=2)
    assert [(verdict.profile, verdict.status) for verdict in verdicts] == [(0, "fused"), (1, "unknown")]
    assert [(reason.kind, reason.place) for reason in verdicts[1].reasons] == [(ReasonKind.NO_KERNELS, "1")]


def test_no_kernels_at_all_is_unknown():
    assert statuses([]) == ["unknown"]


# -- through the inspector ------------------------------------------------------------------------------


def test_8_6_hides_the_region_and_so_the_answer():
    kernels = kernels_from_inspector(json.dumps(INSPECTOR_8))
    groups = {"att0": ("att0/transpose", "att0/scores", "att0/softmax", "att0/sum")}
    (verdict,) = fusion_verdict(kernels, groups)
    assert verdict.status == "unknown"
    assert [(reason.kind, reason.place) for reason in verdict.reasons] == [
        (ReasonKind.HIDDEN_REGION, "{ForeignNode[att0/transpose...att0/sum]}")
    ]


def test_8_6_with_attention_outside_the_region_is_decomposed():
    text = json.dumps(INSPECTOR_8).replace("proj_q0 + bias_q0", "att0/scores")
    (verdict,) = fusion_verdict(kernels_from_inspector(text), {"att0": ("att0/scores", "att0/softmax")})
    assert verdict.status == "decomposed"


def test_10_names_the_fused_nodes_in_each_profile():
    kernels = kernels_from_inspector(json.dumps(INSPECTOR_10))
    groups = {"a": ("/a/scores", "/a/softmax", "/a/sum")}
    assert statuses(kernels, groups, profiles=2) == ["fused", "fused"]


def test_11_names_the_fused_node():
    assert statuses(kernels_from_inspector(json.dumps(INSPECTOR_11))) == ["fused"]


# -- by what a profiler saw -----------------------------------------------------------------------------

GEMM = "sm90_xmma_gemm_f16f16_f16f16_f16_tn_n_tilesize128x128x64_cga1x1x1"
TF32 = "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x16_stage4"


def nameless(tactics, source="inspector"):
    """Kernels that name no node, once per launch."""
    return [Kernel(name=tactic, tactic=tactic, source=source) for tactic in tactics]


BERT = [GEMM, "__myl_bb0_3_ResTraResTra", "__myl_bb0_4_mha0", GEMM]
LLAMA = [TF32, TF32, "__myl_bb0_7_MulAddMaxSubExpSumDiv", TF32, GEMM]


def test_as_many_fused_kernels_as_nodes_is_fused():
    (verdict,) = fusion_verdict(nameless(BERT), ["att0"], written=PROJECTIONS)
    assert (verdict.status, verdict.kernels) == ("fused", ("__myl_bb0_4_mha0",))
    assert [(reason.kind, reason.got, reason.wanted) for reason in verdict.reasons] == [
        (ReasonKind.COUNTED, "1", "1")
    ]


def test_a_count_without_the_graph_proves_nothing():
    """The two GEMMs may be scores and weighted values of the attention, beside a fused kernel of another."""
    (verdict,) = fusion_verdict(nameless(BERT), ["att0"])
    assert (verdict.status, kinds(verdict)) == ("unknown", [ReasonKind.NO_GRAPH])
    (verdict,) = fusion_verdict(nameless(BERT), ["att0"], written={"o": MATMUL})
    assert (verdict.status, kinds(verdict)) == ("unknown", [ReasonKind.STRAY_MATMUL])
    for name, kind in (
        ("masked_exp_normalise", ReasonKind.STRAY_SOFTMAX),
        ("cunn_SOFTMAXForward", ReasonKind.STRAY_SOFTMAX),
        ("__myl_bb0_7_MulSofMul", ReasonKind.STRAY_SOFTMAX),
        ("somebodys_kernel_17", ReasonKind.MAY_BE_MATMUL),
    ):
        (verdict,) = fusion_verdict(nameless([*BERT, name]), ["att0"], written=PROJECTIONS)
        assert (verdict.status, kinds(verdict)) == ("unknown", [kind])


@pytest.mark.parametrize(
    ("tactic", "fused"),
    [
        ("__myl_bb0_4_mha0", True),
        ("__myl_bb0_4_TraMulmha0", True),
        ("_gemm_mha_v2_0x12", True),
        ("_gemv_mha_v1_0x12_vec", True),
        ("fmha_v2_flash_attention_fp16_S_64_sm90", True),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", True),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64>, cute::Copy_Atom>", True),
        ("__myl_bb0_7_MulAddMaxSubExpSumDiv", False),
        (GEMM, False),
        ("permutationKernelPLC3", False),
    ],
)
def test_kernel_names_that_mean_fused_attention(tactic, fused):
    assert nameless([tactic])[0].is_fused_attention is fused


def test_none_and_a_softmax_of_its_own_is_decomposed():
    (verdict,) = fusion_verdict(nameless(LLAMA), ["att0"])
    assert verdict.status == "decomposed"
    assert "__myl_bb0_7_MulAddMaxSubExpSumDiv" in verdict.kernels


@pytest.mark.parametrize("names", [[GEMM], [*BERT, *BERT], [*BERT, "__myl_MaxSubExpSum"] * 3])
def test_a_count_that_does_not_fit_is_unknown(names):
    assert statuses(nameless(names), ("att0",)) == ["unknown"]


def test_another_source_settles_what_the_inspector_hides():
    sources = {
        "inspector": kernels_from_inspector(json.dumps(INSPECTOR_8)),
        "plan": nameless(BERT, "plan"),
    }
    verdict = engine_verdict(sources, {"att0": ("att0/softmax",)}, "fp16", written=PROJECTIONS)
    assert verdict.nodes[0].status == "fused"
    assert verdict.nodes[0].sources == ("plan",)
    assert verdict.disagreements == ()


# -- two sources ----------------------------------------------------------------------------------------


def test_sources_that_contradict_each_other_leave_it_unknown():
    verdict = engine_verdict({"log": [FUSED], "inspector": nameless(LLAMA)}, ["att0"], "fp16")
    assert verdict.nodes[0].status == "unknown"
    assert [(each.source, each.status) for each in verdict.disagreements[0].claims] == [
        ("log", "fused"),
        ("inspector", "decomposed"),
    ]
    assert kinds(verdict.nodes[0]) == [ReasonKind.SOURCES_DISAGREE]
    (reason,) = verdict.nodes[0].reasons
    assert (reason.names, reason.got, reason.wanted) == (("log", "inspector"), "fused", "decomposed")
    assert not verdict.all_fused


def test_sources_that_disagree_on_precision_say_so_and_the_worse_holds():
    verdict = engine_verdict({"log": [FUSED], "inspector": nameless(LLAMA)}, ["att0"], "fp16")
    assert verdict.precision.status == "mixed"
    assert verdict.disagreements[-1].node is None
    assert verdict.disagreements[-1].claims[0].source == "inspector"


@pytest.mark.parametrize("first", ["log", "plan"])
def test_one_source_that_knows_what_is_in_eight_bits_is_enough(first):
    """A plan has no types of plugins, and finds nothing wrong: it comes before the log, or behind it."""
    narrow = tuple(EngineTensor(name=name, dtype="fp8", shape=(4, 4)) for name in "xw")
    matmul = replace(FUSED, name="p", tactic="", layer_type="gemm", onnx_nodes=("p",), inputs=narrow)
    written = WrittenTypes(
        reads=frozenset({"fp8"}), writes=frozenset({"fp16"}), is_matmul=True, quantized="fp8"
    )
    sources = {"log": [FUSED, matmul], "plan": [replace(FUSED, source="plan")]}
    ordered = {name: sources[name] for name in sorted(sources, reverse=first == "plan")}
    verdict = engine_verdict(ordered, ["att0"], "fp16", written={"p": written})
    assert verdict.precision.ok
    assert verdict.precision.quantized == {"fp8": 1}


def test_a_matmul_is_in_eight_bits_where_it_is_in_every_profile():
    narrow = tuple(EngineTensor(name=name, dtype="fp8", shape=(4, 4)) for name in "xw")
    matmul = replace(FUSED, name="p", tactic="", layer_type="gemm", onnx_nodes=("p",), inputs=narrow)
    hidden = replace(matmul, inputs=(narrow[0], replace(narrow[1], dtype="?")), profile=1)
    written = WrittenTypes(
        reads=frozenset({"fp8"}), writes=frozenset({"fp16"}), is_matmul=True, quantized="fp8"
    )
    gemms = [precision_verdict(each, "fp16", {"p": written}).gemms for each in ([matmul], [matmul, hidden])]
    assert [(each.quantized, each.unknown) for each in gemms] == [({"fp8": 1}, ()), ({}, ("p",))]


@pytest.mark.parametrize(("others", "status"), [((), "unknown"), (("a_kernel",), "verified")])
def test_a_source_without_a_kernel_does_not_excuse_that_it_may_be_a_matmul(others, status):
    matmul = replace(SCORES, inputs=FUSED.inputs, outputs=FUSED.outputs, tactic="sm80_xmma_gemm_f16f16_f16")
    other = Kernel(name="a_kernel", layer_type="kgen", outputs=(EngineTensor(name="z", dtype="fp32"),))
    half = replace(other, outputs=FUSED.outputs)
    plan = [matmul, *(replace(half, name=name) for name in others)]
    alone = engine_verdict({"inspector": [matmul, other]}, (), "fp16").precision
    both = engine_verdict({"inspector": [matmul, other], "plan": plan}, (), "fp16").precision
    assert kinds(alone) == [ReasonKind.MAY_BE_MATMUL]
    assert both.status == status


def test_without_sources_everything_is_unknown():
    verdict = engine_verdict({"log": [], "plan": []}, ["att0"], "fp16", profiles=2)
    assert [node.status for node in verdict.nodes] == ["unknown", "unknown"]
    assert verdict.precision.status == "unknown"
    assert verdict.fused_count == (0, 1)


def test_no_attention_at_all_is_not_all_fused():
    assert not engine_verdict({"log": [FUSED]}, [], "fp16").all_fused


# -- precision ------------------------------------------------------------------------------------------


def test_tf32_matmuls_for_an_fp16_graph_are_found():
    verdict = precision_verdict(nameless(LLAMA), "fp16")
    assert verdict.status == "mixed"
    assert verdict.counts == {"tf32": 3, "fp16": 1}
    assert {offender.dtype for offender in verdict.offenders} == {"tf32"}
    assert not verdict.ok


def test_fp16_matmuls_are_verified_fp16_and_their_accumulation_is_noted():
    verdict = precision_verdict(nameless([GEMM, GEMM]), "fp16")
    assert verdict.status == "verified"
    assert verdict.accumulate_in_fp16 == (GEMM, GEMM)
    assert verdict.selected_at_load == ()


def test_a_hash_is_not_a_type():
    assert FUSED.tactic.endswith("bf16")
    assert precision_verdict([FUSED], "fp16").status == "verified"


def test_a_float_tensor_of_a_matmul_makes_the_engine_mixed():
    wide = Kernel(name="k", layer_type="gemm", outputs=(EngineTensor(name="t", dtype="fp32"),))
    verdict = precision_verdict([FUSED, wide], "fp16")
    assert verdict.status == "mixed"
    assert [(offender.kernel, offender.what) for offender in verdict.offenders] == [("k", "t")]


def test_a_float_matmul_that_myelin_generates_is_found():
    wide = Kernel(
        name="__myl_FcAdd_myl0_1",
        layer_type="runtime_fusion",
        outputs=(EngineTensor(name="t", dtype="fp32"),),
    )
    assert precision_verdict([FUSED, wide], "fp16").status == "mixed"


def test_a_float_tensor_of_a_small_kernel_is_an_island():
    wide = replace(MOVE, outputs=(EngineTensor(name="t", dtype="fp32"),))
    verdict = precision_verdict([FUSED, wide], "fp16")
    assert verdict.status == "verified"
    assert verdict.offenders == ()
    assert [(island.kernel, island.what) for island in verdict.islands] == [(MOVE.name, "t")]


def test_factors_of_a_matmul_are_not_data_but_weights_are():
    half = EngineTensor(name="x", dtype="fp16", shape=(4, 4))
    factor = EngineTensor(name="c", dtype="fp32", shape=(1,))
    weight = EngineTensor(name="w", dtype="fp32", shape=(4, 4))
    matmul = Kernel(name="g", layer_type="gemm", inputs=(half,), constants=(factor,), outputs=(half,))
    assert precision_verdict([matmul], "fp16").ok
    matmul = Kernel(name="g", layer_type="gemm", inputs=(half,), constants=(weight,), outputs=(half,))
    assert precision_verdict([matmul], "fp16").status == "mixed"
    scaling = Kernel(name="k", layer_type="kgen", inputs=(half, factor), outputs=(half,))
    assert len(precision_verdict([scaling], "fp16").islands) == 1


def test_whole_numbers_are_no_offence():
    shape = Kernel(name="s", layer_type="cast", outputs=(EngineTensor(name="n", dtype="int64"),))
    assert precision_verdict([FUSED, shape], "fp16").ok
    assert precision_verdict([shape], "fp16").status == "unknown"


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4"])
def test_a_matmul_with_quantized_weights_is_not_in_fp16(dtype):
    """Its name and its other tensors may well be."""
    half, weights = EngineTensor(name="x", dtype="fp16"), EngineTensor(name="w", dtype=dtype)
    matmul = Kernel(
        name="__fc1_myl0_1", layer_type="gemm", tactic="sm80_xmma_gemm_f16f16_f16f32_f32_tn_n",
        inputs=(half,), outputs=(half,), constants=(weights,), source="log",
    )  # fmt: skip
    verdict = precision_verdict([FUSED, matmul], "fp16")
    assert verdict.status == "mixed"
    assert [(found.what, found.dtype) for found in verdict.offenders] == [("w", dtype)]


def test_what_is_hidden_or_not_reported_is_unknown_unless_something_is_wrong_already():
    hidden = Kernel(name="{ForeignNode[a...b]}", layer_type="Myelin")
    untold = Kernel(name="k", inputs=(EngineTensor(name="t"),))
    wrong = Kernel(name="w", layer_type="gemm", inputs=(EngineTensor(name="t", dtype="fp32"),))
    assert precision_verdict([FUSED, hidden], "fp16").status == "unknown"
    assert precision_verdict([FUSED, untold], "fp16").status == "unknown"
    assert precision_verdict([FUSED, hidden, wrong], "fp16").status == "mixed"
    carried = Kernel(name="weight", layer_type="Constant", outputs=(EngineTensor(name="t"),))
    assert precision_verdict([FUSED, carried], "fp16").status == "verified"
    matmul = Kernel(name="p", tactic="sm90_xmma_gemm_f16f16_f16f16_f16_tn_n", inputs=untold.inputs)
    assert precision_verdict([FUSED, matmul], "fp16").status == "verified"
    for name in ("cutlass_80_tensorop_f16_s16816gemm_f16_64x64", "cutlass_tensorop_h16816gemm_64x64"):
        assert precision_verdict([FUSED, replace(matmul, tactic=name)], "fp16").status == "verified"
    for name in ("some_gemm", "cutlass_80_tensorop_s16816gemm_f16_64x64", "xmma_gemm_f16f16_f32f32_f32_tn_n"):
        assert precision_verdict([FUSED, replace(matmul, tactic=name)], "fp16").status == "unknown"
    wide = replace(matmul, tactic="sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n")
    assert precision_verdict([FUSED, wide], "fp16").status == "mixed"
    assert precision_verdict(nameless(["strange_gemm"]), "fp16").status == "unknown"


def test_the_inspector_of_8_6_finds_the_fp32_input():
    verdict = precision_verdict(kernels_from_inspector(json.dumps(INSPECTOR_8)), "fp16")
    assert verdict.islands[0].what == "x"
    assert verdict.islands[0].dtype == "fp32"


@pytest.mark.parametrize(
    ("tactic", "expected"),
    [
        ("sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize64x64x32", "fp16"),
        ("sm90_xmma_gemm_f16f16_f16f16_f16_tn_n_tilesize128x128x64", "fp16"),
        ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "bf16"),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x16", "tf32"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_simt", "fp32"),
        ("cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4", "tf32"),
        ("cutlass_80_tensorop_f16_s16816gemm_relu_f16_128x64_64x3_tn_align8", "fp16"),
        ("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn", "fp16"),
        ("volta_h884gemm_128x64_ldg8_nn_v1", "fp16"),
        ("ampere_h16816gemm_64x64_ldg8_stages_64x5_tn", "fp16"),
        ("ampere_sgemm_32x128_tn", "fp32"),
        ("sm80_xmma_gemm_i8i8_i8i32_f32_tn_n", "int8"),
        ("sm80_xmma_gemm_i8i32_i8i32_f32_tn_n", "int8"),
        ("sm90_gemm_u4f16_f16f32_f32_tn_n", "int4"),
        ("sm100_gemm_e2m1e2m1_f16f32_f32_tn_n", "fp4"),
        ("__myelin_CASK_STUB", "?"),
        ("_gemm_mha_v2_0xf16f16bf16f32f32", "?"),
    ],
)
def test_types_in_kernel_names(tactic, expected):
    assert math_type(tactic) == expected


# -- plugins: the graph says what they carry ------------------------------------------------------------

PLUGIN = Kernel(
    name="attention",
    layer_type="PluginV2",
    tactic="0x0000000000000000",
    onnx_nodes=("attention",),
    inputs=(EngineTensor(name="qkv", dtype="fp16"), EngineTensor(name="lengths", dtype="int32")),
    outputs=(EngineTensor(name="y", dtype="fp16"),),
    source="inspector",
)


@pytest.mark.parametrize("kind", ["PluginV2", "PluginV3", "plugin", "custom_layer"])
def test_a_plugin_layer_that_carries_an_attention_is_fused(kind):
    (unsaid,) = fusion_verdict([replace(PLUGIN, layer_type=kind)], ["attention"])
    assert unsaid.status == "unknown"
    (verdict,) = fusion_verdict([replace(PLUGIN, layer_type=kind, plugin_role="attention")], ["attention"])
    assert (verdict.status, verdict.kernels) == ("fused", ("attention (plugin)",))


def test_a_plugin_is_judged_by_the_types_it_reads_and_writes():
    carrier = replace(PLUGIN, plugin_role="attention")
    assert precision_verdict([carrier], "fp16").status == "verified"
    wide = replace(carrier, outputs=(EngineTensor(name="y", dtype="fp32"),))
    assert precision_verdict([wide], "fp16").status == "mixed"
    matmul = replace(wide, plugin_role="matmul")
    assert precision_verdict([matmul], "fp16").offenders[0].what == "y"


# -- constructed to mislead: what looks fused or FP16 and is not ----------------------------------------


def kernel(name, *nodes, tactic="", layer_type="kgen", **others):
    return Kernel(name=name, tactic=tactic, onnx_nodes=nodes, layer_type=layer_type, source="log", **others)


def gemm(*nodes):
    return kernel("mm", *nodes, tactic="sm90_xmma_gemm_f16f16_f16f32_f32", layer_type="gemm")


def exp_sum(*nodes):
    return kernel("__myl_MaxrSubExpSumDiv_myl0_3", *nodes)


def mha(*nodes):
    return kernel("_gemm_mha_v2_myl0_7", *nodes, tactic="_gemm_mha_v2_0x12")


SPLIT = ["fmha_v2_flash_attention_fp16_splitkv_sm90", "fmha_v2_flash_attention_fp16_combine_sm90"]
DECOMPOSED = [GEMM, "softmax_warp_forward", GEMM]


@pytest.mark.parametrize(
    ("names", "nodes", "status"),
    [
        ([*SPLIT, *DECOMPOSED], ("a", "b"), "unknown"),
        ([SPLIT[0], SPLIT[0], *DECOMPOSED], ("a", "b"), "unknown"),  # two launches of one attention
        ([SPLIT[0], *DECOMPOSED], ("a",), "unknown"),  # the fused one may be of another attention
        ([*SPLIT, *SPLIT], ("a", "b"), "fused"),
        (SPLIT, ("a", "b"), "unknown"),
        (SPLIT, ("a",), "fused"),
        (DECOMPOSED, ("a", "b"), "decomposed"),
    ],
)
def test_launches_are_counted_per_attention(names, nodes, status):
    assert set(statuses(nameless(names), nodes, written=PROJECTIONS)) == {status}


def test_a_softmax_of_the_graph_itself_is_no_softmax_of_an_attention():
    kernels = {"inspector": nameless([*SPLIT, "softmax_warp_forward", GEMM])}
    router = {"router": A_SOFTMAX, **PROJECTIONS}
    assert engine_verdict(kernels, ["a"], "fp16", written=router).all_fused
    part = {"a/weights": A_SOFTMAX, **PROJECTIONS}
    assert not engine_verdict(kernels, {"a": ("a/weights",)}, "fp16", written=part).all_fused
    assert not engine_verdict(kernels, ["a"], "fp16").all_fused


TWO = {"a": ("a", "a/mask", "a/expand"), "b": ("b",)}
DEEPER = {"a": ("a/bias", "a/lowered", "a/lowered/fully_masked_to_zero"), "b": ("b/bias", "b/lowered_2")}
PARTS = {name: tuple(f"{name}/{part}" for part in ("mask", "scores", "weights", "sum")) for name in "ab"}


@pytest.mark.parametrize(
    ("groups", "kernels", "found"),
    [
        # Ties: the kernel computes the attention whose core it names.
        (TWO, [gemm("a"), exp_sum("a"), gemm("a"), mha("b", "a/mask")], ["decomposed", "fused"]),
        (TWO, [gemm("a"), exp_sum("a"), gemm("a"), mha("b", "a/mask", "a/expand")], ["decomposed", "fused"]),
        (TWO, [mha("a/mask", "b")], ["unknown", "fused"]),
        (TWO, [mha("a/mask", "a/expand")], ["unknown", "unknown"]),
        (PARTS, [mha("a/mask", "b/mask")], ["unknown", "unknown"]),
        (PARTS, [mha("b/scores", "b/weights", "b/sum", "a/scores")], ["unknown", "fused"]),
        (PARTS, [mha("a/scores", "a/weights", "a/sum"), exp_sum("b/weights")], ["fused", "decomposed"]),
        # A lowered node has a deeper name where the graph has values of the attention's name already.
        (DEEPER, [mha("a/lowered"), mha("b/lowered_2")], ["fused", "fused"]),
        (DEEPER, [mha("a/bias"), mha("a/lowered/fully_masked_to_zero", "b/bias")], ["unknown", "unknown"]),
        # A part of an attention is not the whole of it: the rest is computed somewhere else.
        (
            PARTS,
            [mha("a/scores", "a/weights"), mha("a/sum"), exp_sum("b/weights")],
            ["unknown", "decomposed"],
        ),
        # GEMM and softmax kernels of the same node.
        (TWO, [mha("a"), gemm("a"), exp_sum("a"), mha("b")], ["decomposed", "fused"]),
        (TWO, [mha("a"), gemm("a"), mha("b"), exp_sum("b")], ["unknown", "unknown"]),
        (PARTS, [mha("a/scores"), gemm("a/sum"), mha("b/sum")], ["unknown", "unknown"]),
        (PARTS, [mha("a/scores", "a/sum"), gemm("a/sum"), mha("b/sum", "b/scores")], ["unknown", "fused"]),
        # A softmax in several kernels.
        (
            PARTS,
            [mha("a/scores"), kernel("__myl_SubExp_myl0_2", "a/weights"), mha("b/sum", "b/scores")],
            ["unknown", "fused"],
        ),
        # A projection with the scale of an attention in its epilogue.
        (TWO, [gemm("proj", "a"), mha("a"), gemm("b", "out"), mha("b")], ["fused", "fused"]),
    ],
)
def test_the_core_of_an_attention_decides(groups, kernels, found):
    assert statuses(kernels, groups) == found


def test_a_stray_name_does_not_outweigh_gemm_and_softmax():
    groups = {"a": ("a/norm", "a/scores", "a/weights", "a/weighted_values")}
    norm = kernel("x", "a/norm", tactic="cross_mha_norm_kernel")
    assert statuses([norm], groups) == ["unknown"]
    for tactic in (norm.tactic, "mha_transpose_qkv", "fmha_permute", "mha_copy_cache"):
        assert statuses([kernel("x", *groups["a"], tactic=tactic)], groups) == ["unknown"]
    parts = [gemm("a/scores"), exp_sum("a/weights"), gemm("a/weighted_values")]
    assert statuses([norm, *parts], groups) == ["decomposed"]


@pytest.mark.parametrize(
    ("softmaxes", "named", "status"),
    [((), (), "unknown"), (("router",), (), "fused"), (("router",), ("router",), "unknown")],
)
def test_a_softmax_that_names_no_node_must_be_one_of_the_graph(softmaxes, named, status):
    """Beside a fused kernel: it is a softmax outside attention that no other kernel names, or unknown."""
    types = WrittenTypes(reads=frozenset(), writes=frozenset(), is_matmul=False, is_softmax=True)
    others = [replace(SOFTMAX, onnx_nodes=(name,)) for name in named]
    (verdict,) = fusion_verdict(
        [FUSED, replace(SOFTMAX, onnx_nodes=()), *others],
        ["att0"],
        written=dict.fromkeys(softmaxes, types),
    )
    assert verdict.status == status
    assert kinds(verdict) == ([] if status == "fused" else [ReasonKind.STRAY_SOFTMAX])


@pytest.mark.parametrize("node", ["_gemm_mha_v2", "_gemv_mha_v1"])
def test_layers_named_after_a_node_are_no_kernels(node):
    layers = [f"{node}/{part}" for part in ("scores", "weights", "weighted_values")]
    kernels = kernels_from_inspector(json.dumps({"Layers": layers}))
    assert statuses(kernels, {node: tuple(layers)}) == ["unknown"]
    assert statuses(kernels_from_inspector(json.dumps({"Layers": [node]})), (node,)) == ["unknown"]


def plan(line):
    return kernels_from_plan(f"header {{\n}}\nmain {{\n  {line}\n}}\n".encode())


def test_a_node_name_in_a_plan_is_not_read_as_a_field():
    line = (
        'function={ name="__myl_Add" layers="[ONNX Layer: A/kernel=fmha_x]" fqn=__myl_Add_k '
        "input={ } output={ } }"
    )
    (found,) = plan(line)
    assert (found.tactic, found.onnx_nodes, found.is_fused_attention) == (
        "__myl_Add_k",
        ("A/kernel=fmha_x",),
        False,
    )
    (found,) = plan('function={ name="f" layers="[ONNX Layer: a\\"b]" fqn=z input={ } output={ } }')
    assert found.onnx_nodes == ('a"b',)


@pytest.mark.parametrize("shape", [(-1, -1), (-1,), (1, -1), (8, 8)])
@pytest.mark.parametrize("name", ["a", "x_alpha"])
def test_only_single_numbers_are_factors(shape, name):
    wide = EngineTensor(name=name, dtype="fp32", shape=shape)
    half = EngineTensor(name="c", dtype="fp16", shape=(8, 8))
    matmul = Kernel(name="g", layer_type="gemm", tactic="x_gemm", inputs=(wide, half), outputs=(half,))
    assert precision_verdict([matmul], "fp16").status == "mixed"
    factor = replace(matmul, inputs=(replace(wide, shape=(1, 1)), half))
    assert precision_verdict([factor], "fp16").ok


def test_what_fp32_multiplies_in_hides_nothing_that_another_source_does_not_know():
    hiding = inspected(whole(**IN_FP32))
    assert engine_verdict({"log": hiding, "plan": hiding}, ["p"], "fp32").precision.is_fp32_as_recorded
    plugin = replace(hiding[0], name="other", layer_type="PluginV3", tactic="", source="inspector")
    for sources in ({"log": hiding, "inspector": [plugin]}, {"inspector": [plugin], "log": hiding}):
        precision = engine_verdict(sources, ["p"], "fp32").precision
        assert (precision.status, precision.is_fp32_as_recorded) == ("unknown", False)


FMHA16 = "fmha_v2_flash_attention_fp16_S_128_sm90"


@pytest.mark.parametrize(
    ("names", "status"),
    [
        (["nvjet_sss_128x64_64x4_2x1_v_bz_TNT", FMHA16], "mixed"),
        (["nvjet_tst_64x8_64x16_4x1_v_bz_TNT", FMHA16], "mixed"),
        (["nvjet_sm90_qqtst_64x8_v_bz_TNT", FMHA16], "mixed"),
        (["nvjet_hsh_64x8_64x16_4x1_v_bz_TNT", FMHA16], "verified"),
        (["nvjet_sm90_hsh_64x8_v_bz_TNT", FMHA16], "verified"),
        (["cutlass_80_tensorop_s1688_tn_align4", FMHA16], "mixed"),
        (["cutlass_80_tensorop_s16816_tn_align8", FMHA16], "unknown"),
        (["cutlass_80_simt_sgemm_128x64_8x5_nn_align1", FMHA16], "mixed"),
        (["ampere_scudnn_128x64_relu_interior_nn_v1", FMHA16], "mixed"),
        (["volta_dgemm_64x64_nn", FMHA16], "mixed"),
        (["fmha_cutlassF_f32_aligned_64x64_rf_sm80"], "mixed"),
        (["fmha_v2_flash_attention_int8_S_64_sm90", GEMM], "mixed"),
        (["sm80_xmma_gemm_i8i8_i8i32_f32_tn_n", FMHA16], "mixed"),
        (["fmha_cutlassF_f32_aligned_64x64_rf_sm80", GEMM], "mixed"),
        (["fmha_cutlassF_f16_aligned_64x64_rf_sm80", GEMM], "verified"),
        (["fmha_cutlassF_bf16_aligned_64x64_rf_sm80", GEMM], "mixed"),
        (["void flash_fwd_kernel<Traits<64, cutlass::bfloat16_t>>", GEMM], "mixed"),
        (["_gemm_mha_v2_0x12", GEMM], "unknown"),
        (["somebodys_kernel_17", GEMM], "unknown"),
        (["triton_mm_3", GEMM], "unknown"),
        (["__myl_bb0_3_ResTraXyz", GEMM], "unknown"),
        (["__myl_bb0_3_ResTraFcAdd", GEMM], "unknown"),
        (["__myl_bb0_3_ResTraMulAdd", "genericReformat::copyPackedKernel", GEMM], "verified"),
    ],
)
def test_a_kernel_of_unknown_type_or_purpose_is_not_fp16(names, status):
    verdict = precision_verdict(nameless(names), "fp16")
    assert verdict.status == status
    assert bool(verdict.reasons) == (status != "verified")


@pytest.mark.parametrize(
    ("name", "layer_type", "status"),
    [
        ("__mye_MatMulFp32", "kgen", "mixed"),
        ("__myl_ReshGemmAdd_myl0_4", "kgen", "mixed"),
        ("__mye_Xyz", "kgen", "unknown"),
        ("k", "kgen", "unknown"),
        ("__myl_XyzAdd_myl0_2", "runtime_fusion", "unknown"),
        ("somebodys", "PluginV3", "unknown"),
        ("__myl_CastMulAdd_myl0_2", "kgen", "verified"),
        ("/layer/Erf", "erf", "verified"),
    ],
)
def test_a_generated_kernel_in_fp32_is_judged_by_its_name(name, layer_type, status):
    wide = EngineTensor(name="c", dtype="fp32", shape=(8, 8))
    generated = kernel(name, "n", layer_type=layer_type, inputs=(wide,), outputs=(wide,))
    assert precision_verdict([FUSED, generated], "fp16").status == status
    # The graph shows that none of its nodes is a matmul.
    fp16 = frozenset({"fp16"})
    small = {"n": WrittenTypes(reads=fp16, writes=fp16, is_matmul=False)}
    clear = precision_verdict([FUSED, generated], "fp16", small).status
    assert clear == ("mixed" if status == "mixed" else "verified")


# -- what only looks like evidence, as the inspector reports it ------------------------------------------

F16 = "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_cga1x1x1_kernel_trt"
CORE = ("att0/scores", "att0/softmax", "att0/weighted_values")
SC, SM, WV = CORE
GROUP = {"att0": (*CORE, "att0/scale")}
GRAPH = {SC: MATMUL, "att0/scale": SMALL, SM: A_SOFTMAX, WV: MATMUL, "proj": MATMUL, "copy": SMALL}


def reported(name, *nodes, tactic="", kind="kgen", reads=("Half",), writes=("Half",), weights=()):
    """A layer as the inspector reports it."""
    tensors = [
        [
            {"Name": f"{name}_{role}{at}", "Dimensions": [8, 16], "Datatype": dtype}
            for at, dtype in enumerate(types)
        ]
        for role, types in (("i", reads), ("o", writes), ("c", weights))
    ]
    layer = dict(zip(("Inputs", "Outputs", "Constants"), tensors, strict=True))
    layer |= {"Name": name, "LayerType": kind, "TacticName": tactic}
    return layer | {"Metadata": "\x1e".join(f"[ONNX Layer: {node}]" for node in nodes)}


def inspected(*layers):
    return kernels_from_inspector(json.dumps({"Layers": layers}))


PROJ = reported("__fc1", "proj", tactic=F16, kind="gemm")
NAMED_GEMM = reported("__fc2", SC, tactic=F16, kind="gemm")
NAMELESS_GEMM = reported("__fc_myl0_4", tactic=F16, kind="gemm")
NAMELESS_SOFTMAX = reported("__myl_MaxrSubExpSum_myl0_5", tactic="__myl_MaxrSubExpSum_0x1")
OTHER_SOFTMAX = reported("__myl_MulSoftCast_myl0_5", tactic="__myl_MulSoftCast_0x1")
AGAIN = reported("__myl_MaxrSubExpSum_myl0_5", SM, "copy")
MHA_KERNEL = "_gemm_mha_v2_0x12ab"


def whole(tactic=MHA_KERNEL, nodes=CORE, **others):
    return reported("_gemm_mha_v2_myl0_3", *nodes, tactic=tactic, **others)


@pytest.mark.parametrize(
    "tactic",
    [
        "fmha_prepare_cu_seqlens", "prepare_mha_mask_kernel", "fmha_pack_qkv_kernel", "fmha_reduction_kernel",
        "flash_fwd_splitkv_combine_kernel", "sdpa_bias_expand_kernel", "mha_rope_update_kv_cache",
        "fmha_v2_mask_packing", "flash_attn_varlen_get_seqlens", "flash_fwd_acme", "_gemm_mha_v2_qk_only",
        "fmha_v2_flash_attention_fp16_combine_sm90", "fmha_v2_fp16_mask_pack_sm90", "acme_sdpa_fp16",
        "flash_bwd_kernel", "my_mha", "mha0", "cudnn_generated_sdpa_bias",
    ],
)  # fmt: skip
@pytest.mark.parametrize("nodes", [CORE, (SC, SM), (SC,)])
def test_a_kernel_that_is_named_after_attention_is_no_attention(tactic, nodes):
    """Whatever it names, and whether the real kernels are reported or not."""
    layer = reported("k0", *nodes, tactic=tactic)
    for others in ((), (NAMELESS_GEMM, NAMELESS_SOFTMAX, NAMELESS_GEMM), (NAMELESS_GEMM, OTHER_SOFTMAX)):
        assert statuses(inspected(layer, *others, PROJ), GROUP, written=GRAPH) != ["fused"]
    assert statuses(nameless([tactic]), GROUP, written=GRAPH) != ["fused"]


@pytest.mark.parametrize(
    ("layers", "status", "kind"),
    [
        ([whole()], "fused", None),
        ([whole(nodes=(SC, WV))], "fused", None),  # the softmax is between them
        ([whole(nodes=(SC, SM))], "unknown", ReasonKind.PARTIAL_FUSED),
        ([whole(nodes=(SM, WV))], "unknown", ReasonKind.PARTIAL_FUSED),
        ([whole(nodes=(SC,)), NAMELESS_GEMM], "unknown", ReasonKind.PARTIAL_FUSED),
        ([whole(), NAMELESS_GEMM], "unknown", ReasonKind.STRAY_MATMUL),
        ([whole(), NAMELESS_SOFTMAX], "unknown", ReasonKind.STRAY_SOFTMAX),
        ([whole(), OTHER_SOFTMAX], "unknown", ReasonKind.STRAY_SOFTMAX),
        # The scores are computed again, for another output of the model.
        ([whole(), AGAIN], "unknown", ReasonKind.COMPUTED_APART),
        ([whole(), NAMED_GEMM, AGAIN], "decomposed", None),
        ([whole(kind="PluginV3", tactic="flash_fwd_acme")], "unknown", ReasonKind.FOREIGN_PLUGIN),
        ([whole(kind="PluginV3")], "unknown", ReasonKind.FOREIGN_PLUGIN),
        ([reported("_gemm_softmax_myl0_3", SC, SM, tactic="_gemm_softmax_v1_0x1")], "decomposed", None),
    ],
)
def test_a_fused_kernel_has_both_matmuls_and_nothing_else_computes_a_part(layers, status, kind):
    (verdict,) = fusion_verdict(inspected(*layers, PROJ), GROUP, written=GRAPH)
    assert (verdict.status, kinds(verdict)) == (status, [kind] if kind else [])


def test_a_reason_lists_the_nodes_that_a_fused_kernel_names():
    (verdict,) = fusion_verdict(inspected(whole(nodes=(SC, SM)), PROJ), GROUP, written=GRAPH)
    (reason,) = verdict.reasons
    assert (reason.kind, reason.names, reason.got) == (ReasonKind.PARTIAL_FUSED, (SC, SM), "")
    text = engine_reason_text(to_builtins(reason))
    assert SC in text
    assert SM in text


@pytest.mark.parametrize("prefix", ["a_scores", "a_scores/lowered"])
def test_scores_that_are_an_output_besides_are_reported(prefix):
    """As the lowering writes them: a fused node, and scores and softmax beside it."""
    graph = {
        "a": replace(MATMUL, is_attention=True),
        f"{prefix}/scores": MATMUL,
        f"{prefix}/weights": A_SOFTMAX,
    }
    again = [
        reported("mm", f"{prefix}/scores", tactic=F16, kind="gemm"),
        reported("__myl_MaxrSubExpSum_myl0_5", f"{prefix}/weights", "a"),
    ]
    (verdict,) = fusion_verdict(inspected(whole(nodes=("a",)), *again), ["a"], written=graph)
    assert (verdict.status, kinds(verdict)) == ("fused", [ReasonKind.SCORES_AGAIN])


STUB = "__myelin_CASK_STUB"
IN_FP32 = {"reads": ("Float",), "writes": ("Float",)}


@pytest.mark.parametrize(
    ("layers", "precision", "graph", "status", "kind"),
    [
        ([PROJ], "fp16", None, "verified", None),
        # Foreign plugins: nobody knows what they compute.
        ([PROJ, reported("acme", "p", kind="PluginV3")], "fp16", None, "unknown", ReasonKind.FOREIGN_PLUGIN),
        (
            [PROJ, reported("acme", "p", kind="PluginV3")], "fp16", {"p": MATMUL}, "unknown",
            ReasonKind.FOREIGN_PLUGIN,
        ),
        (
            [PROJ, reported("acme", "p", kind="PluginV3")], "fp16", {"p": replace(SMALL, is_custom=True)},
            "unknown", ReasonKind.FOREIGN_PLUGIN,
        ),
        ([PROJ, reported("acme", "p", kind="PluginV3")], "fp16", {"p": SMALL}, "verified", None),
        ([PROJ, reported("acme", "p", tactic="w4a16_gemm", kind="PluginV3")], "fp16", None, "mixed", None),
        # Quantized numbers, in all matmuls and in what is before them.
        ([reported("__myl_FcAdd_myl0_3", "proj", weights=("Int8",))], "fp16", None, "mixed", None),
        ([PROJ, reported("__myl_QuanDequMatm_myl0_3", "p", weights=("Int4",))], "fp16", None, "mixed", None),
        ([PROJ, reported("__myl_CastMul_myl0_3", reads=("Int8",))], "fp16", None, "mixed", None),
        ([PROJ, reported("__myl_DequMul_myl0_3", reads=("FP8",))], "fp16", None, "mixed", None),
        ([PROJ, reported("__myl_Quan_myl0_3", writes=("Int8",))], "fp16", {"proj": MATMUL}, "mixed", None),
        # What the graph quantized before may be moved, but not become narrower.
        (
            [PROJ, reported("__myl_Tran_myl0_3", reads=("Int8",), writes=("Int8",))], "fp16",
            {"proj": MATMUL, "quantize": replace(SMALL, quantized="int8")}, "verified", None,
        ),
        (
            [PROJ, reported("__myl_MulMin_myl0_3", reads=("Half", "Int8"), writes=("Int8",))], "fp16",
            {"proj": MATMUL, "quantize": replace(SMALL, quantized="int8")}, "mixed", None,
        ),
        (
            [PROJ, reported("__myl_Tran_myl0_3", reads=("Int8",), writes=("Int8",))], "fp16",
            {"proj": MATMUL}, "mixed", None,
        ),
        # A mask that the graph reads in INT8 is no quantized number.
        (
            [PROJ, reported("__myl_Cast_myl0_3", "cast", reads=("Int8",))], "fp16",
            {"proj": MATMUL, "cast": replace(SMALL, reads=frozenset({"int8"}))}, "verified", None,
        ),
        # A matmul by what the graph says, however its kernel is named.
        (
            [PROJ, reported("__myl_MulSum_myl0_2", "p", **IN_FP32)], "fp16", {"proj": MATMUL, "p": MATMUL},
            "mixed", None,
        ),
        (
            [PROJ, reported("__myl_MulRedu_myl0_2", "p", reads=("BFloat16",))], "fp16",
            {"proj": MATMUL, "p": MATMUL}, "mixed", None,
        ),
        (
            [PROJ, reported("__myl_MulSum_myl0_2", "norm", **IN_FP32)], "fp16",
            {"proj": MATMUL, "norm": SMALL}, "verified", None,
        ),
        (
            [PROJ, reported("__myl_MulSum_myl0_2", **IN_FP32)], "fp16", None, "unknown",
            ReasonKind.MAY_BE_MATMUL,
        ),
        ([PROJ, reported("__myl_DotMulAdd_myl0_2", **IN_FP32)], "fp16", None, "mixed", None),
        ([PROJ, reported("e", "e", kind="einsum", **IN_FP32)], "fp16", None, "mixed", None),
        # What is not reported is not verified.
        (
            [PROJ], "fp16", {"proj": MATMUL, "other": MATMUL}, "unknown", ReasonKind.MATMUL_NOT_REPORTED,
        ),
        (
            [PROJ, reported("__myl_TranMove_myl0_2", "other")], "fp16", {"proj": MATMUL, "other": MATMUL},
            "unknown", ReasonKind.MATMUL_NOT_REPORTED,
        ),
        ([PROJ], "fp16", {"proj": MATMUL, "folded": replace(MATMUL, is_constant=True)}, "verified", None),
        # Kernels that are selected later, and kernels of FP32 that may use tensor cores.
        ([reported("fc", "proj", tactic=STUB, kind="gemm")], "fp16", None, "selected at load", None),
        (
            [reported("f", "p", tactic=STUB, kind="gemm", **IN_FP32)], "fp32", None, "selected at load", None,
        ),
        ([whole(**IN_FP32)], "fp32", None, "unknown", ReasonKind.COMPUTE_TYPE),
        (  # which is known of it only where nothing else is unknown
            [whole(**IN_FP32)], "fp32", {"other": MATMUL}, "unknown", ReasonKind.MATMUL_NOT_REPORTED,
        ),
        ([whole("_gemv_mha_v1_0x12_vec", **IN_FP32)], "fp32", None, "verified", None),
        ([whole("_gemm_mha_v2_e4m3_0x1")], "fp16", None, "mixed", None),
    ],
)  # fmt: skip
def test_the_precision_of_what_only_looks_right(layers, precision, graph, status, kind):
    verdict = precision_verdict(inspected(*layers), precision, graph)
    kind = ReasonKind.OTHER_TYPE if status == "mixed" else kind
    assert (verdict.status, kinds(verdict)) == (status, [kind] if kind else [])
    assert verdict.ok == (status == "verified")
    assert verdict.has_requested_types == (status in ("verified", "selected at load"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_attention_of_8_6_is_fp16_whatever_was_requested(precision):
    gemm = {"fp32": "ampere_sgemm_32x128_tn", "bf16": "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn"}[precision]
    kernels = nameless([gemm, "__myl_bb0_4_mha0"])
    assert precision_verdict(kernels, precision).status == "unknown"
