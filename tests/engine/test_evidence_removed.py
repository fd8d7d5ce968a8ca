"""Less evidence is never a better verdict: kernels and parts of the plan are taken from real engines."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from rtx_engines import build_rtx

import mha_deploy as md
from mha_deploy.engine.build import engine_from_bundle
from mha_deploy.engine.engine import default_profiles, open_engine, profile_shapes
from mha_deploy.engine.lowered import lower_for
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.file import load_graph
from mha_deploy.options import EngineOptions
from mha_deploy.runtime.tensorrt.engine_verdict import (
    FusionStatus,
    PrecisionStatus,
    engine_verdict,
    group_by_attention,
    precision_verdict,
    written_types,
)
from mha_deploy.runtime.tensorrt.kernels import kernels_from_plan
from mha_deploy.runtime.tensorrt.versions import load

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")

RANKS = {
    PrecisionStatus.VERIFIED: 2,
    PrecisionStatus.SELECTED_AT_LOAD: 1,
    PrecisionStatus.MIXED: 0,
    PrecisionStatus.UNKNOWN: 0,
}
# Two profiles, attention that is not fused, and scores that are computed twice.
ENGINES = ["tiny-dynamic", "tiny-softcap", "tiny-weights"]
ROUNDS = 60


def score(verdict):
    """What is good in a verdict: the attentions that are fused, and how much is known of the precision."""
    fused = {(node.node, node.profile) for node in verdict.nodes if node.status == FusionStatus.FUSED}
    return fused, RANKS[verdict.precision.status]


@pytest.fixture(scope="module", params=ENGINES)
def evidence(request, bundles):
    """A real engine, and a function that judges what is left of its evidence."""
    bundle = bundles(request.param)
    spec, rt = bundle.manifest.spec, load("tensorrt-rtx")
    canonical = load_graph(bundle.model_path)
    options = EngineOptions(backend="tensorrt-rtx", targets="8.9", allow_decomposed=True)
    lowered, _ = lower_for(rt, canonical, options)
    profiles = [profile_shapes(spec, ranges) for ranges in default_profiles(spec)]
    built = build_rtx(lowered, profiles=profiles, targets="8.9", allow_decomposed=True)
    written = written_types(lowered)
    names = [node.name or "" for node in lowered.graph.all_nodes()]
    groups = group_by_attention(names, [node.name for node in attention_nodes(canonical)])

    def judge(kernels, precision="fp16", types=written):
        return engine_verdict(kernels, groups, precision, profiles=len(profiles), written=types)

    return built, judge, written


def assert_never_better(before, after):
    (fused, rank), (fused_after, rank_after) = score(before), score(after)
    assert fused_after <= fused, after.nodes
    assert rank_after <= rank, after.precision


def some(kernels, rng):
    return tuple(kernel for kernel in kernels if rng.random() < 0.8)


@pytest.mark.sweep(1)
def test_kernels_are_taken_away(evidence):
    built, judge, written = evidence
    # Besides the real verdict, one in which a projection has fallen back to another type.
    narrow = next(name for name, node in written.items() if node.is_matmul and not node.is_attention)

    def fallen_back(kernel):
        wide = tuple(replace(tensor, dtype="fp32") for tensor in kernel.outputs)
        return replace(kernel, outputs=wide) if narrow in kernel.onnx_nodes else kernel

    wide = {source: tuple(map(fallen_back, kernels)) for source, kernels in built.kernels.items()}
    assert score(judge(built.kernels))[1] == 1
    assert judge(wide).precision.status == PrecisionStatus.MIXED
    for seed in range(ROUNDS):
        for kernels in (built.kernels, wide):
            rng = random.Random(seed)
            left = {source: some(found, rng) for source, found in kernels.items()}
            assert_never_better(judge(kernels), judge(left))
            same = random.Random(seed)
            alike = {kernel.name: same.random() < 0.8 for kernel in kernels["log"]}
            left = {s: tuple(k for k in found if alike.get(k.name, True)) for s, found in kernels.items()}
            assert_never_better(judge(kernels), judge(left))


@pytest.mark.sweep(1)
def test_parts_of_a_plan_are_taken_away(evidence):
    built, judge, _ = evidence
    before = judge({"plan": kernels_from_plan(built.plan)})
    assert score(before)[1] == 1
    lines = [match.span() for match in re.finditer(rb"\n  \w+=\{ name=[^\n]*", built.plan)]
    assert len(lines) > 4
    for seed in range(ROUNDS):
        rng = random.Random(seed)
        plan = bytearray(built.plan)
        for start, end in reversed(lines):
            if rng.random() < 0.2:
                del plan[start:end]
        if seed % 3 == 0:
            del plan[rng.randrange(len(plan)) :]
        assert_never_better(before, judge({"plan": kernels_from_plan(bytes(plan))}))


def test_an_engine_that_is_opened_again_has_its_verdict(bundles, tmp_path):
    """From its plan and the graph of its bundle, not from what its manifest claims."""
    bundle = bundles("tiny-weights")
    options = EngineOptions(backend="tensorrt-rtx", targets="8.9", overwrite=True)
    engine = engine_from_bundle(bundle, options)
    assert open_engine(engine.path).manifest.verdict == engine.manifest.verdict


@pytest.mark.slow
def test_an_engine_whose_only_weights_are_packed_has_its_verdict(tmp_path):
    """TensorRT stores a packed projection in another order of its columns."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["qkv"]),
        helper.make_node("Split", ["qkv"], ["q", "k", "v"], axis=-1, num_outputs=3),
        helper.make_node("Attention", ["q", "k", "v"], ["y"], softcap=30.0, q_num_heads=4, kv_num_heads=4),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["B", "S", 128]) for name in "xy"]
    weight = np.random.default_rng(0).standard_normal((128, 384)).astype(np.float16) / 8
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [numpy_helper.from_array(weight, "w")])
    imports = [helper.make_opsetid("", 23)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=10), tmp_path / "packed.onnx")
    bundle = md.export(tmp_path / "packed.onnx", tmp_path / "bundle", golden=("opt",))
    options = EngineOptions(backend="tensorrt-rtx", targets="8.9", allow_decomposed=True)
    engine = engine_from_bundle(bundle, options)
    assert engine.manifest.has_requested_types
    assert open_engine(engine.path).manifest.verdict == engine.manifest.verdict


SIZES_ALONE = """<ir_version: 10, opset_import: ["": 23]>
sizes (float16[B, 8] x, float16[8, 8] w) => (float16[B, 8] y) {
    unread = MatMul(x, w)
    scaled = Mul(unread, unread)
    shape = Shape(scaled)
    read = MatMul(x, w)
    y = Expand(read, shape)
}"""


def test_a_matmul_of_which_only_the_sizes_are_read_needs_no_kernel():
    types = written_types(ir.from_onnx_text(SIZES_ALONE))
    assert [name for name, each in types.items() if each.is_matmul] == ["node_of_read"]


def zeros_times(factor, number=0.0):
    """The target of a first decoder layer, `zeros_like` of its queries, is multiplied by `factor`."""
    node, rng = helper.make_node, np.random.default_rng(0)
    nodes = [
        node("Shape", ["x"], ["size"], name="size"),
        node("Expand", ["number", "size"], ["target"], name="target"),
        node("Transpose", ["x"], ["turned"], name="turned", perm=[0, 2, 1]),
        node("MatMul", ["target", factor], ["none"], name="none"),
        node("MatMul", ["x", "w"], ["some"], name="some"),
        node("Add", ["none", "bias"], ["row"], name="row"),
        node("ReduceMean", ["row"], ["mean"], name="mean", axes=[-1]),
        node("Add", ["mean", "some"], ["y"], name="y"),
    ]
    held = {
        "number": np.array(number, np.float16),
        "w": rng.standard_normal((64, 64)).astype(np.float16),
        "bias": rng.standard_normal(64 if factor == "w" else 1).astype(np.float16),
    }
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["B", "S", 64]) for name in "xy"]
    constants = [numpy_helper.from_array(value, name) for name, value in held.items()]
    used = nodes if factor == "turned" else [each for each in nodes if each.name != "turned"]
    graph = helper.make_graph(used, "g", ends[:1], ends[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    ("factor", "number", "status"),
    [("w", 0.0, "selected at load"), ("w", 0.5, "unknown"), ("turned", 0.0, "unknown")],
)
def test_a_product_of_zeros_and_a_weight_needs_no_kernel(factor, number, status):
    """TensorRT writes zeros for it; a product of other numbers, or with those of an input, is evidence."""
    model = zeros_times(factor, number)
    built = build_rtx(model, profiles=[{"x": ((1, 4, 64), (2, 20, 64), (4, 40, 64))}])
    types = written_types(ir.from_proto(model))

    def status_without(node):
        left = [kernel for kernel in built.kernels["log"] if node not in kernel.onnx_nodes]
        return precision_verdict(left, "fp16", types).status

    assert status_without("none") == status
    assert status_without("some") == "unknown"
    if factor == "w":
        assert status_without("") == "selected at load"


def test_a_node_writes_what_a_cast_behind_it_converts_to():
    """A kernel computes both, and reports the result of the Cast alone."""
    text = """<ir_version: 10, opset_import: ["": 23]>
    g (float16[B, 8] x, float16[8, 8] w) => (float[B, 8] y, float16[B, 8] z)
        <float16[B, 8] m, float[B, 8] wide> {
        m = MatMul(x, w)
        wide = Cast<to = 1>(m)
        y = Sqrt(wide)
        z = Relu(m)
    }"""
    model = ir.from_onnx_text(text)
    (matmul,) = (each for each in written_types(model).values() if each.is_matmul)
    assert matmul.writes == {"fp16", "fp32"}
    assert matmul.reads == {"fp16"}
