"""Twins compute the same as the graph, and a builder cannot fuse them."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from attention_models import attention
from rtx_engines import build_rtx

from mha_deploy.bundle.cases import golden_cases
from mha_deploy.engine.build import judge_engine, with_plugin_roles
from mha_deploy.engine.engine import profile_shapes
from mha_deploy.errors import DeployError
from mha_deploy.graph.file import load_graph
from mha_deploy.graph.lower import lower
from mha_deploy.graph.upcast import float32_twin, unfused_twin
from mha_deploy.judge import judge_case
from mha_deploy.runtime import cpu_runtime, open_runner

MODELS = [
    ("tiny-gqa", "fp16"),
    ("tiny-weights", "fp16"),
    ("tiny-head-mix", "fp16"),
    ("tiny-additive-causal", "fp16"),
    ("tiny-gqa", "bf16"),
]
TWINS = [unfused_twin, float32_twin]
EXTRA = {"tiny-head-mix": 4}


def interface(values):
    return [(value.name, value.dtype) for value in values]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("twin_of", TWINS)
@pytest.mark.parametrize(("name", "precision"), MODELS)
def test_a_twin_has_the_interface_of_the_graph_and_the_inside_of_every_attention(
    bundles, name, precision, twin_of
):
    model = load_graph(bundles(name, precision).model_path)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    twin = twin_of(model)
    assert interface(twin.graph.inputs) == interface(model.graph.inputs)
    own = len(model.graph.outputs)
    assert interface(twin.graph.outputs[:own]) == interface(model.graph.outputs)
    inside = [str(value.name).rpartition("/")[2] for value in twin.graph.outputs[own:]]
    assert inside == ["scores", "weights"] * (EXTRA.get(name, 2) // 2)
    float32 = twin_of is float32_twin
    wanted = ir.DataType.FLOAT if float32 else model.graph.inputs[0].dtype
    assert {value.dtype for value in twin.graph.outputs[own:]} == {wanted}
    assert not any(node.op_type == "Attention" for node in twin.graph)
    assert twin.graph.initializers.keys() >= {"q.weight.T"} & model.graph.initializers.keys()
    onnx.checker.check_model(ir.to_proto(twin))
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


@pytest.mark.sweep(2)
@pytest.mark.parametrize("twin_of", TWINS)
@pytest.mark.parametrize(("name", "precision"), MODELS)
def test_a_twin_gives_the_right_answers(bundles, name, precision, twin_of):
    bundle = bundles(name, precision)
    with open_runner(
        cpu_runtime(bundle.manifest.precision), twin_of(load_graph(bundle.model_path))
    ) as runner:
        for case in golden_cases(bundle):
            got = runner.run(case.inputs)
            own = {output: got[output] for output in case.oracle}
            verdicts = judge_case(case, own, bundle.manifest.precision)
            assert [verdict.problem for verdict in verdicts if verdict.is_wrong] == []


def test_scores_and_weights_are_the_named_outputs(bundles):
    bundle = bundles("tiny-weights")
    case = next(case for case in golden_cases(bundle) if case.name == "odd")
    with open_runner("ort-cpu", unfused_twin(load_graph(bundle.model_path))) as runner:
        got = runner.run(case.inputs)
    weights = got["attention/weights"].astype(np.float64)
    assert weights.sum(axis=-1) == pytest.approx(1.0, abs=1e-2)
    assert weights == pytest.approx(case.oracle["weights"], abs=5e-3)
    seen = case.oracle["weights"] > 0
    ratio = np.log(case.oracle["weights"], where=seen, out=np.zeros(seen.shape)) - got["attention/scores"]
    spread = [row[mask].std() for row, mask in zip(ratio.reshape(-1, 37), seen.reshape(-1, 37), strict=True)]
    assert max(spread) < 1e-2, "log of the weights is the scores but for a number per row"


def test_float32_matmuls_keep_the_rounded_weights(bundles):
    model = load_graph(bundles("tiny-gqa").model_path)
    twin = float32_twin(model)
    for name, value in model.graph.initializers.items():
        assert (twin.graph.initializers[name].const_value.numpy() == value.const_value.numpy()).all()
    for node in twin.graph:
        if node.op_type in ("MatMul", "Softmax"):
            assert {value.dtype for value in (*node.inputs, *node.outputs)} == {ir.DataType.FLOAT}


@pytest.mark.parametrize(("mode", "missing"), [(0, "att/weights"), (3, "att/scores")])
def test_an_existing_output_is_not_repeated(mode, missing):
    dims = ("B", 8, "S", 64)
    model = attention(dims, dims, dtype="fp16", weights=True, qk_matmul_output_mode=mode)
    assert [value.name for value in unfused_twin(model).graph.outputs] == ["y", "weights", missing]


def test_a_softmax_precision_of_the_model_is_kept():
    model = attention(("B", 8, "S", 64), ("B", 8, "S", 64), dtype="fp16", softmax_precision=10)
    assert not any(node.op_type == "Cast" for node in unfused_twin(model).graph)


def test_a_graph_without_attention_has_no_twin(bundles):
    with pytest.raises(DeployError, match="cannot be graph outputs"):
        unfused_twin(lower(load_graph(bundles("tiny-gqa").model_path), "primitives"))


# -- in TensorRT-RTX -----------------------------------------------------------------------------


def built(bundle, lowered):
    """The engine of a graph, and the status of each of its attentions."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    manifest = bundle.manifest
    engine = build_rtx(
        lowered,
        precision=manifest.precision.name,
        profiles=[profile_shapes(manifest.spec, manifest.spec.axes)],
        targets="8.9",
    )
    canonical = load_graph(bundle.model_path)
    verdict = judge_engine(with_plugin_roles(engine, lowered), lowered, canonical, manifest.precision.name, 1)
    return engine, [node.status for node in verdict.nodes]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("tiny-gqa", 1), ("tiny-head-mix", 2)])
def test_the_builder_fuses_the_graph_and_cannot_fuse_its_twin(bundles, name, count):
    bundle = bundles(name)
    model = load_graph(bundle.model_path)
    assert built(bundle, lower(model, "trt"))[1] == ["fused"] * count
    assert built(bundle, lower(model, "primitives"))[1] == ["fused"] * count, "the dialect alone is no bar"
    assert built(bundle, unfused_twin(model))[1] == ["decomposed"] * count


def test_the_float32_twin_has_no_fused_kernel(bundles):
    bundle = bundles("tiny-gqa")
    engine, statuses = built(bundle, float32_twin(load_graph(bundle.model_path)))
    assert "fused" not in statuses
    kernels = [kernel for source in engine.kernels.values() for kernel in source]
    assert kernels
    assert not any(kernel.is_fused_attention for kernel in kernels)
