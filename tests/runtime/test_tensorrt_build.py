"""Real engines by TensorRT-RTX, which compiles without a GPU: what fuses, what does not, what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import onnx
import pytest
from rtx_engines import build_rtx
from tensorrt_models import attention, layer, needs_rtx, primitives, profile

from mha_deploy.errors import EXIT_VERDICT_FAILED, BackendUnavailable
from mha_deploy.options import EngineOptions
from mha_deploy.runtime.tensorrt.builder import BuildRequest, build_engine, inspect_kernels
from mha_deploy.runtime.tensorrt.engine_verdict import engine_verdict, group_by_attention
from mha_deploy.runtime.tensorrt.kernels import kernels_from_plan
from mha_deploy.runtime.tensorrt.versions import EngineError, load
from mha_deploy.status import ReasonKind

pytestmark = needs_rtx


BUILT = {}


def build(model: bytes | onnx.ModelProto, **options):
    """An engine, built once for all tests."""
    data = model if isinstance(model, bytes) else model.SerializeToString()
    key = (data, repr(sorted(options.items())))
    if key not in BUILT:
        BUILT[key] = build_rtx(data, **options)
    return BUILT[key]


def judge(model: bytes | onnx.ModelProto, nodes=("att0",), **options):
    built = build(model, **options)
    profiles = max(1, len(options.get("profiles", ())))
    return engine_verdict(built.kernels, nodes, options.get("precision", "fp16"), profiles=profiles)


# -- what fuses -----------------------------------------------------------------------------------------

FUSED = {
    "mha-4d": (attention(), {}),
    "gqa-4d": (attention(Hkv=2), {}),
    "mqa-4d": (attention(Hkv=1), {}),
    "causal": (attention(is_causal=1), {}),
    "gqa-causal": (attention(Hkv=2, is_causal=1), {}),
    "float-mask": (attention(mask="float"), {}),
    "bool-mask": (attention(mask="bool"), {}),
    "scale": (attention(scale=0.05), {}),
    "bf16": (attention("bf16"), {"precision": "bf16"}),
    "layer": (layer(), {"profiles": [profile()]}),
    "layer-gqa-causal": (layer(Hkv=2, causal=True), {"profiles": [profile()]}),
    "layer-bf16": (layer("bf16"), {"precision": "bf16", "profiles": [profile()]}),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("target", ["8.9", "12.0"])
@pytest.mark.parametrize("case", FUSED)
def test_attention_is_fused_and_in_the_precision_requested(case, target):
    model, options = FUSED[case]
    verdict = judge(model, targets=target, **options)
    assert verdict.fused_count == (1, 1)
    assert [node.sources for node in verdict.nodes] == [("log", "plan")]
    assert verdict.nodes[0].kernels[0].startswith("_gemm_mha_v2_0x")
    assert verdict.precision.has_requested_types, verdict.precision
    assert verdict.precision.counts[options.get("precision", "fp16")] > 0
    assert verdict.disagreements == ()


def test_a_node_that_is_not_there_is_unknown_not_fused():
    verdict = judge(layer(), ("att0", "att7"), profiles=[profile()], targets="8.9,12.0")
    assert [node.status for node in verdict.nodes] == ["fused", "unknown"]
    assert {reason.kind for reason in verdict.nodes[1].reasons} == {ReasonKind.NOT_NAMED}


def test_each_profile_has_its_own_kernel():
    verdict = judge(layer(), profiles=[profile(S=(1, 1, 1)), profile()], targets="8.9")
    assert [(node.profile, node.status) for node in verdict.nodes] == [(0, "fused"), (1, "fused")]
    assert verdict.nodes[0].kernels[0].startswith("_gemv_mha_v1")
    assert verdict.nodes[1].kernels[0].startswith("_gemm_mha_v2")
    assert verdict.fused_count == (1, 1)


def test_primitives_fuse_too_and_are_found_by_their_prefix():
    model = primitives()
    groups = group_by_attention(
        [node.name for node in onnx.load_model_from_string(model).graph.node], ["att0"]
    )
    assert len(groups["att0"]) == 5
    assert judge(model, groups).fused_count == (1, 1)
    assert judge(primitives(D=512), groups).nodes[0].status == "decomposed"


def test_a_node_without_a_name_is_found_by_its_output():
    model = onnx.load_model_from_string(attention())
    model.graph.node[0].name = ""
    assert judge(model, ["y"]).all_fused


@pytest.mark.sweep(1)
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["mha", "_gemm_mha_v2", "fmha_v2", "a] b, LayerType: kgen"])
def test_a_misleading_node_name_makes_no_fusion(name):
    verdict = judge(layer(name=name, H=1, D=512), (f"{name}0",), profiles=[profile()], allow_decomposed=True)
    assert verdict.nodes[0].status == "decomposed", verdict.nodes[0]


# -- what does not --------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "model", [attention(D=512), attention(D=8), attention("fp32")], ids=["D512", "D8", "fp32"]
)
def test_attention_without_a_fused_kernel_fails_clearly(model):
    with pytest.raises(EngineError, match="no fused kernel for this target") as caught:
        build(model, targets="8.9")
    assert caught.value.got == "node att0"
    assert "allow_decomposed=True" in caught.value.hint
    assert caught.value.exit_code == EXIT_VERDICT_FAILED


@pytest.mark.parametrize(
    ("model", "precision"), [(attention(D=512), "fp16"), (attention("fp32"), "fp32")], ids=["D512", "fp32"]
)
def test_allowed_to_decompose_it_is_reported_with_its_kernels(model, precision):
    verdict = judge(model, precision=precision, allow_decomposed=True, targets="8.9")
    (node,) = verdict.nodes
    assert node.status == "decomposed"
    assert sum(kernel.startswith("__fc") for kernel in node.kernels) == 2
    assert any("MaxrSubExp" in kernel for kernel in node.kernels)
    assert verdict.precision.status == "selected at load"
    assert len(verdict.precision.selected_at_load) == 2
    assert not verdict.all_fused


def test_an_fp32_engine_is_not_verified_fp16():
    verdict = judge(attention("fp32"), precision="fp16", allow_decomposed=True)
    assert verdict.precision.status == "mixed"
    assert {offender.dtype for offender in verdict.precision.offenders} == {"fp32"}
    assert verdict.precision.offenders[0].onnx_nodes == ("att0",)


def test_an_fp32_island_in_an_fp16_graph_is_reported_as_one():
    model = onnx.load_model_from_string(attention())
    model.graph.node[0].output[0] = "half"
    to_float = onnx.helper.make_node("Cast", ["half"], ["wide"], name="up", to=onnx.TensorProto.FLOAT)
    model.graph.node.extend([to_float, onnx.helper.make_node("Exp", ["wide"], ["y"], name="exp")])
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    verdict = judge(model)
    assert verdict.all_fused
    assert verdict.precision.status == "verified"
    assert [island.what for island in verdict.precision.islands] == ["y"]


# -- what is refused ------------------------------------------------------------------------------------


def test_an_input_that_the_parser_ignores_is_an_error():
    with pytest.raises(EngineError, match="would ignore a part of the graph") as caught:
        build(attention(opset=24, nonpad=True))
    assert caught.value.got == "node att0: Unused Input: valid"


def test_an_input_that_no_node_reads_is_none():
    model = onnx.load_model_from_string(attention())
    model.graph.input.add().CopyFrom(model.graph.input[0])
    model.graph.input[-1].name = "ignored"
    assert judge(model).all_fused


@pytest.mark.parametrize(
    ("model", "reason"),
    [(attention(softcap=5.0), "softcap"), (attention(mask="bool", is_causal=1), "mask")],
    ids=["softcap", "mask+causal"],
)
def test_a_parser_error_names_the_node(model, reason):
    with pytest.raises(EngineError, match="refuses the graph") as caught:
        build(model)
    assert "node att0: Attention: " in caught.value.got
    assert reason in caught.value.got


@pytest.mark.parametrize("data", [b"garbage" * 9, b"\x08"], ids=["garbage", "cut"])
def test_what_is_not_onnx_is_refused(data):
    with pytest.raises(EngineError, match="not an ONNX model"):
        build(data)


def test_an_empty_model_is_refused():
    # TensorRT's own parser takes zero bytes for a valid model.
    with pytest.raises(EngineError, match="no nodes"):
        build(b"")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(EngineError, match="cannot be read"):
        build_engine(load("tensorrt-rtx"), BuildRequest(onnx=tmp_path / "none.onnx"))


def test_a_hopper_target_is_refused_with_the_known_ones():
    with pytest.raises(EngineError, match="cannot compile for this compute capability") as caught:
        build(attention(), targets="9.0")
    assert caught.value.got == "SM90"
    assert "8.9, 12.0" in caught.value.hint


def test_bf16_for_turing_says_what_to_leave_out():
    with pytest.raises(EngineError, match="no hardware for a type") as caught:
        build(attention("bf16"), precision="bf16", targets="7.5,8.9")
    assert "sm75" in caught.value.got


def test_replaceable_weights_need_a_gpu_and_say_so():
    with pytest.raises(BackendUnavailable, match="finds no GPU"):
        build(layer(), profiles=[profile()], refit="all")


@pytest.mark.parametrize("plan", [b"", b"not a plan" * 50], ids=["empty", "garbage"])
def test_what_is_no_plan_cannot_be_loaded(plan):
    with pytest.raises(EngineError, match="cannot load this engine here") as caught:
        inspect_kernels(load("tensorrt-rtx"), plan)
    assert caught.value.got


# -- profiles -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profiles", "message"),
    [
        ([], "needs a profile"),
        ([{"X": profile()["x"]}], "does not name the inputs"),
        ([{**profile(), "more": ((1,), (1,), (1,))}], "does not name the inputs"),
        ([{"x": ((1, 1, 128), (2, 99, 128), (4, 64, 128))}], "does not fit"),
        ([{"x": ((1, 1, 64), (2, 16, 64), (4, 64, 64))}], "does not fit"),
        ([{"x": ((1, 1), (2, 16), (4, 64))}], "does not fit"),
        ([{"x": ((1, 1, 128), (2, 16, 128))}], "does not fit"),
    ],
)
def test_a_profile_that_does_not_fit_is_refused_before_the_build(profiles, message):
    with pytest.raises(EngineError, match=message):
        build(layer(), profiles=profiles)


def test_every_dynamic_input_needs_its_range():
    shapes = ((1, 4, 16, 32), (2, 4, 16, 32), (4, 4, 16, 32))
    with pytest.raises(EngineError, match="does not name the inputs") as caught:
        build(attention(B="B"), profiles=[{"q": shapes, "v": shapes}])
    assert caught.value.got == "unknown [], missing ['k']"
    assert judge(attention(B="B"), profiles=[{name: shapes for name in "qkv"}]).all_fused


# -- what comes back ------------------------------------------------------------------------------------


def test_a_model_with_external_data_is_built_from_its_path(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(layer(), path, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    built = build_engine(load("tensorrt-rtx"), BuildRequest(onnx=path, profiles=[profile()]))
    assert engine_verdict(built.kernels, ["att0"], "fp16").all_fused


def test_the_engine_says_what_it_is():
    built = build(layer(), profiles=[profile()], targets="8.9,12.0")
    assert built.strongly_typed
    assert built.seconds > 0
    assert built.timing_cache is None
    targets = re.findall(rb"accelerators=\{([^}]*)\}", built.plan)
    assert {name for found in targets for name in found.decode().split()} == {"sm89", "sm120"}
    assert built.notes == ()
    assert b"tf32=0" in built.plan


def test_log_and_plan_tell_the_same_kernels():
    built = build(layer(count=2), profiles=[profile(S=(1, 1, 1)), profile()], targets="8.9")
    for source in ("log", "plan"):
        assert built.kernels[source], source
    reported = {
        source: sorted((k.profile, k.tactic, k.onnx_nodes) for k in built.kernels[source] if k.tactic)
        for source in ("log", "plan")
    }
    assert reported["log"] == reported["plan"]
    for source in ("log", "plan"):
        fused = [kernel for kernel in built.kernels[source] if kernel.is_fused_attention]
        matmuls = [kernel for kernel in built.kernels[source] if kernel.is_gemm]
        # After queries, keys and values, the plan lists sizes that the log leaves out.
        assert {tuple(t.dtype for t in kernel.inputs[:3]) for kernel in fused} == {("fp16",) * 3}
        assert {tuple(t.dtype for t in kernel.inputs) for kernel in matmuls} == {("fp16",)}
        assert {kernel.constants[0].dtype for kernel in matmuls} == {"fp16"}


def test_a_plan_that_was_swapped_disagrees_with_its_log():
    fused = build(attention(D=32), targets="8.9")
    other = build(attention(D=512), targets="8.9", allow_decomposed=True)
    sources = {"log": fused.kernels["log"], "plan": other.kernels["plan"]}
    verdict = engine_verdict(sources, ["att0"], "fp16")
    assert verdict.nodes[0].status == "unknown"
    assert [(claim.source, claim.status) for claim in verdict.disagreements[0].claims] == [
        ("log", "fused"),
        ("plan", "decomposed"),
    ]


def test_another_fused_kernel_in_the_plan_is_a_disagreement():
    one, other = build(attention()), build(attention(is_causal=1))
    verdict = engine_verdict({"log": one.kernels["log"], "plan": other.kernels["plan"]}, ["att0"], "fp16")
    assert verdict.nodes[0].status == "fused"
    assert len(verdict.disagreements) == 1


def test_a_plan_alone_is_enough_for_a_verdict():
    plan = build(layer(), profiles=[profile(S=(1, 1, 1)), profile()], targets="8.9").plan
    verdict = engine_verdict({"plan": kernels_from_plan(plan)}, ["att0"], "fp16", profiles=2)
    assert [node.kernels[0][:12] for node in verdict.nodes] == ["_gemv_mha_v1", "_gemm_mha_v2"]
    assert verdict.precision.status == "selected at load"


def test_a_truncated_plan_is_never_called_fused():
    plan = build(attention()).plan
    cut = plan[: plan.index(b"\nmain {")]
    verdict = engine_verdict({"plan": kernels_from_plan(cut)}, ["att0"], "fp16")
    assert verdict.nodes[0].status == "unknown"
    assert verdict.precision.status == "unknown"


def test_the_verdict_is_plain_data():
    assert msgspec.to_builtins(judge(attention()))["nodes"][0]["status"] == "fused"


def test_the_options_are_plain_data():
    options = EngineOptions(targets="8.9", refit="all", workspace_mib=4)
    request = BuildRequest(onnx=Path("model.onnx"), profiles=[profile()], options=options)
    recorded = json.loads(json.dumps(request.record()))
    assert recorded["targets"] == ["SM89"]
    assert recorded["profiles"][0]["x"][0] == [1, 1, 128]
    assert (recorded["refit"], recorded["workspace_mib"], recorded["precision"]) == ("all", 4, "fp16")


# -- progress and cancelling ----------------------------------------------------------------------------


def test_progress_is_defined_by_phase():
    reported = []
    build_rtx(attention(), lambda *event: reported.append(event))
    assert reported[0][1] == 0
    assert all(0 <= done <= steps for _, done, steps in reported)
    assert len({phase for phase, _, _ in reported}) > 2
    assert reported[-1][1] == reported[-1][2]


def test_an_exception_in_the_callback_cancels_the_build():
    reported = []

    def stop(*event):
        reported.append(event)
        if len(reported) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_rtx(attention(), stop)
    assert len(reported) == 3
    assert judge(attention()).all_fused


# -- the neighbors -------------------------------------------------------------------------------------


POLYGRAPHY = """
import re, sys
from polygraphy.backend.trt import EngineBytesFromNetwork, NetworkFromOnnxPath, Profile
from polygraphy.backend.tensorrt_rtx import CreateConfigRTX
shapes = ((1, 1, 128), (2, 16, 128), (4, 64, 128))
config = CreateConfigRTX(compute_capabilities=[(8, 9)], profiles=[Profile().add("x", *shapes)])
plan = bytes(EngineBytesFromNetwork(NetworkFromOnnxPath(sys.argv[1]), config=config)())
print(sorted(set(re.findall(rb"_gemm_mha_v2_0x[0-9a-f]+", plan)))[0].decode())
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("polygraphy") is None, reason="polygraphy is not installed")
def test_polygraphy_builds_the_same_kernel(tmp_path: Path):
    path = tmp_path / "model.onnx"
    onnx.save(layer(), path)
    environment = {**os.environ, "POLYGRAPHY_USE_TENSORRT_RTX": "1"}
    command = [sys.executable, "-c", POLYGRAPHY, str(path)]
    theirs = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    ours = judge(layer(), profiles=[profile()], targets="8.9").nodes[0].kernels[0]
    assert theirs.splitlines()[-1] == ours
