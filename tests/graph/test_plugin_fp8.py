"""GEMMs in FP8 as nodes of the plugin: words of four numbers, which the kernel before them writes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from conformance import run_in_reference
from plugin_layers import FP16, model_of, node, operators, random_inputs, weights

import mha_deploy as md
from mha_deploy.engine.build import judge_engine, with_plugin_roles
from mha_deploy.exporter.file_program import FileProgram, FileRounding
from mha_deploy.exporter.samples import sample_case
from mha_deploy.graph.ir import new_initializer
from mha_deploy.graph.lower import LoweringError, lower
from mha_deploy.graph.plugin_node import COPY, FP8_BESIDES, FP8_ONLY, PER_OUTPUT, PER_TENSOR
from mha_deploy.graph.quantize import (
    FORMATS,
    attention_layers,
    gemm_layers,
    named_nodes,
    quantized_gemms,
    with_quantized,
)
from mha_deploy.model.precision import PRECISIONS
from mha_deploy.runtime.tensorrt.builder import BuiltEngine
from mha_deploy.runtime.tensorrt.engine_verdict import PrecisionVerdict
from mha_deploy.runtime.tensorrt.kernels import kernels_from_inspector

SHAPE = (FP16, ["B", "S", 64])
FP8 = FORMATS["fp8"]


def block() -> ir.Model:
    """A norm before attention with its projections, one before a feed-forward part, and residuals."""
    nodes = [
        node("LayerNormalization", "x scale bias", "n", axis=-1),
        *(node("MatMul", f"n w{name}", f"x{name}") for name in "qkv"),
        node("Attention", "xq xk xv", "h", q_num_heads=4, kv_num_heads=2),
        node("MatMul", "h wo", "p"),
        node("Add", "p bias", "z"),
        node("Add", "z x", "sum"),
        node("LayerNormalization", "sum scale bias", "m", axis=-1),
        node("MatMul", "m up", "u"),
        node("Gelu", "u", "g", approximate="tanh"),
        node("MatMul", "g down", "d"),
        node("Add", "d m", "y"),
    ]
    constants = {
        f"w{name}": weights(64, size, seed=at)
        for at, (name, size) in enumerate(zip("qkvo", (64, 32, 32, 64), strict=True))
    }
    constants |= {"up": weights(64, 128), "down": weights(128, 64), "bias": weights(64, 1)[:, 0]}
    constants["scale"] = constants["bias"] + np.float16(1)
    return named_nodes(model_of(nodes, {"x": SHAPE}, {"y": SHAPE}, constants))


def quantized(model: ir.Model, *, per_tensor: bool = False, kept: Any = ()) -> ir.Model:
    scales = {each.activation: 0.01 for each in gemm_layers(model)}
    return with_quantized(model, replace(FP8, per_tensor=per_tensor), scales, kept)


def own(model: ir.Model, op_type: str) -> list[dict[str, Any]]:
    return [
        {name: attribute.value for name, attribute in each.attributes.items()}
        for each in model.graph
        if each.op_type == op_type
    ]


def relative(model: ir.Model, lowered: ir.Model, inputs: dict[str, np.ndarray] | None = None) -> float:
    """How far a lowered graph is from the graph in FP64."""
    given = random_inputs(model, {"B": 2, "S": 5}) if inputs is None else inputs
    (want,) = FileProgram(model).run(given).values()
    (got,) = run_in_reference(ir.to_proto(lowered), given)
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))


# A value near the middle of two neighbors may fall on either, which changes it by up to 6 %.
NEAR = 0.016


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("per_tensor", [False, True])
def test_all_gemms_are_the_plugins_and_right(linear: bool, per_tensor: bool) -> None:
    model = quantized(block(), per_tensor=per_tensor)
    lowered = lower(model, "plugin", linear=linear)
    assert not {"MatMul", "QuantizeLinear", "DequantizeLinear"} & set(operators(lowered))
    wanted = PER_TENSOR if per_tensor else PER_OUTPUT
    gemms = own(lowered, "MhaDeployLinear")
    assert [each["quantized"] for each in gemms] == [wanted] * 4  # Q, K and V are one
    assert sorted(dict(quantized_gemms(lowered)).values()) == ["fp8"] * 4
    assert relative(model, lowered) < NEAR < relative(model, lower(block(), "plugin"))


@pytest.mark.parametrize("per_tensor", [False, True])
def test_numbers_that_fp8_has_are_multiplied_exactly(per_tensor: bool) -> None:
    nodes = [node("MatMul", "x w", "p"), node("Add", "p b", "y")]
    constants = {"w": weights(64, 32), "b": weights(32)}
    wanted = {"y": (FP16, ["B", "S", 32])}
    model = quantized(named_nodes(model_of(nodes, {"x": SHAPE}, wanted, constants)), per_tensor=per_tensor)
    drawn = random_inputs(model, {"B": 2, "S": 5})["x"].astype(np.float64)
    scale = float(np.float16(0.01))
    assert relative(model, lower(model, "plugin"), {"x": FP8.rounded(drawn, scale).astype(np.float16)}) < 4e-4


def test_the_kernel_before_a_gemm_writes_fp8() -> None:
    lowered = lower(quantized(block()), "plugin")
    made = [(each["operation"], each["fp8"]) for each in own(lowered, "MhaDeployNormActivation")]
    # The second norm is read by a residual, too.
    assert made == [(0, FP8_ONLY), (0, FP8_BESIDES), (3, FP8_ONLY)]
    (attention,) = own(lowered, "MhaDeployAttention")
    assert (attention["fp8"], attention["fp8_copy"]) == (0, 1)
    assert attention["output_scale"] == pytest.approx(0.01, rel=1e-3)
    assert not [each for each in lowered.graph.initializers.values() if each.dtype == FP8.type]


def test_gemms_that_stay_in_fp16_are_not_the_plugins_unless_asked() -> None:
    model = block()
    kept = [each.name for each in gemm_layers(model)][:4]  # the projections of attention
    mixed = quantized(model, kept=kept)
    assert operators(lower(mixed, "plugin")).count("MatMul") == 2
    lowered = lower(mixed, "plugin", linear=True)
    assert [each["quantized"] for each in own(lowered, "MhaDeployLinear")] == [0, 0, PER_OUTPUT, PER_OUTPUT]
    assert relative(mixed, lowered) < NEAR


def test_two_scales_of_one_tensor_are_two_tensors() -> None:
    model = block()
    copy = quantized(model)
    up = next(each for each in copy.graph if each.outputs[0].name == "u")
    down = up.inputs[0].producer().inputs[0].producer()
    other = new_initializer(copy.graph, "other", np.array(0.02, np.float16))
    for each in (down, up.inputs[0].producer()):
        each.replace_input_with(1, other)
    assert relative(copy, lower(copy, "plugin")) < NEAR


@pytest.mark.parametrize("size", [24, 40])
def test_sizes_without_a_kernel_are_refused(size: int) -> None:
    nodes = [
        *(node("MatMul", f"x w{name}", f"x{name}") for name in "qkv"),
        node("Attention", "xq xk xv", "h", q_num_heads=4, kv_num_heads=4),
        node("MatMul", "h up", "y"),
    ]
    constants = {f"w{name}": weights(64, 64, seed=at) for at, name in enumerate("qkv")}
    constants["up"] = weights(64, size)
    model = named_nodes(model_of(nodes, {"x": SHAPE}, {"y": (FP16, ["B", "S", size])}, constants))
    with pytest.raises(LoweringError, match="FP8") as caught:
        lower(quantized(model), "plugin")
    assert str(size) in caught.value.got
    kept = [each.name for each in gemm_layers(model) if each.weight.shape[1] == size]
    assert "QuantizeLinear" not in operators(lower(quantized(model, kept=kept), "plugin"))


def test_a_check_and_the_refusal_of_the_native_lowering_name_the_plugin(tmp_path) -> None:
    model = quantized(block())
    ir.save(model, tmp_path / "model.onnx")
    (old,), (new,) = (md.check(tmp_path / "model.onnx", "tensorrt", version) for version in ("8.6", "11.0"))
    assert "fp8-gemm" in {each.rule for each in old.findings}
    assert not old.supported_after_lowering
    assert "fp8-gemm" not in {each.rule for each in new.findings}
    with pytest.raises(LoweringError) as caught:
        lower(model, "primitives")
    assert 'attention="plugin"' in caught.value.hint


@pytest.mark.parametrize("target", ["tensorrt", "tensorrt-rtx"])
def test_a_check_refuses_gemms_in_fp8_on_a_gpu_without_it(tmp_path, target) -> None:
    for name, model in (("fp8", quantized(block())), ("fp16", block())):
        ir.save(model, tmp_path / f"{name}.onnx")
    for sm, taken in {"8.0": False, "8.6": False, "8.9": True, "12.0": True}.items():
        (found,) = md.check(tmp_path / "fp8.onnx", target, sm=sm)
        assert found.supported_after_lowering == taken, found.findings
        (plain,) = md.check(tmp_path / "fp16.onnx", target, sm=sm)
        assert plain.supported_after_lowering


# -- Attention, too ---------------------------------------------------------------------------------

SCALES = {"xq": 0.008, "xk": 0.009, "xv": 0.01, "h": 0.006}


def attended(model: ir.Model, kept: Any = ()) -> ir.Model:
    layers = attention_layers(model)
    scales = {each.activation: 0.01 for each in gemm_layers(model)} | SCALES
    return with_quantized(model, FP8, scales, kept, layers)


def test_attention_in_fp8_is_one_node_that_writes_what_the_projection_reads() -> None:
    model = attended(block())
    lowered = lower(model, "plugin", linear=True)
    assert not {"MatMul", "QuantizeLinear", "DequantizeLinear"} & set(operators(lowered))
    (found,) = own(lowered, "MhaDeployAttention")
    written = [found[f"{name}_scale"] for name in ("query", "key", "value", "output")]
    assert written == [float(np.float16(scale)) for scale in SCALES.values()]
    assert found["fp8"] == 1
    assert found["weights_scale"] == pytest.approx(1 / 448, rel=2e-3)
    assert COPY not in [each["operation"] for each in own(lowered, "MhaDeployNormActivation")]
    # The kernel rounds its weights before it divides them by their sum.
    assert relative(model, lowered) < 0.05 < relative(model, lower(block(), "plugin"))


def test_samples_of_rounding_show_weights_that_are_rounded_before_their_sum() -> None:
    plain = block()
    kept = [each.name for each in gemm_layers(plain) if each.activation != "h"]
    model = attended(plain, kept)
    program, inputs = FileProgram(model), random_inputs(model, {"B": 2, "S": 200})
    (exact,) = program.run(inputs).values()

    def apart(given: np.ndarray) -> float:
        return float(np.linalg.norm(given.astype(np.float64) - exact) / np.linalg.norm(exact))

    def sample(seed: int) -> np.ndarray:
        return next(iter(program.run(inputs, FileRounding(PRECISIONS["fp16"], seed)).values()))

    (kernel,) = run_in_reference(ir.to_proto(lower(model, "plugin", linear=True)), inputs)
    samples = [apart(sample(seed)) for seed in range(1, 5)]
    assert 0.8 * min(samples) < apart(kernel) < 1.2 * max(samples)


def test_levels_that_many_samples_change_are_not_all_changed_at_once() -> None:
    model = attended(block())
    program, inputs = FileProgram(model), random_inputs(model, {"B": 1, "S": 40})
    exact, baselines, _ = sample_case(
        FileRounding, PRECISIONS["fp16"], lambda mode: program.run(inputs, mode)
    )
    found = baselines["fp32"]
    sizes = [float(np.linalg.norm(each) / np.linalg.norm(exact["y"])) for each in found.samples["y"]]
    assert found.branches == 2
    assert max(sizes[-2:]) < 2 * max(sizes[:-2])


@pytest.mark.parametrize("told", [False, True])
def test_the_verdict_of_attention_in_fp8_is_what_its_kernel_read(told: bool) -> None:
    model = attended(block())
    lowered = lower(model, "plugin", linear=True)
    found = precision_of(lowered, model, told=told, in_fp8=True)
    assert (found.quantized, found.quantized_attentions) == ({"fp8": 4}, {"fp8": 1})
    assert (found.offenders, found.not_quantized) == ((), ())
    other = precision_of(lowered, model, told=told)  # the kernel for these sizes reads FP16
    assert (other.quantized, other.quantized_attentions) == ({"fp8": 4}, {})
    (wrong,) = other.not_quantized
    assert wrong.dtype == "fp16"
    assert not other.ok


def test_attention_in_fp8_without_a_gemm_in_fp8_behind_it_is_refused() -> None:
    model = block()
    (last,) = [each.name for each in gemm_layers(model) if each.activation == "h"]
    with pytest.raises(LoweringError, match="attention in FP8"):
        lower(attended(model, kept=[last]), "plugin")


def test_attention_in_int8_is_refused() -> None:
    model = block()
    scales = {each.activation: 0.05 for each in gemm_layers(model)} | SCALES
    with pytest.raises(LoweringError, match="attention in int8"):
        lower(with_quantized(model, FORMATS["int8"], scales, (), attention_layers(model)), "plugin")


TOLD = {ir.DataType.FLOAT16: "FP16", ir.DataType.INT32: "INT32", ir.DataType.FLOAT: "FP32"}


def layers_of(lowered: ir.Model, *, told: bool) -> str:
    """What the inspector of TensorRT 8.6 says of such an engine: constants have names of its own."""
    layers = []
    for each in lowered.graph:
        tensors = {
            key: [
                {
                    "Name": f"(Unnamed Layer* {at}) [Constant]_output"
                    if value.is_initializer()
                    else value.name,
                    "Dimensions": [-1],
                    "Format/Datatype": f"Row major linear {TOLD[value.dtype]} format (kLINEAR)"
                    if told
                    else "N/A due to dynamic shapes",
                }
                for at, value in enumerate(values)
            ]
            for key, values in (("Inputs", each.inputs), ("Outputs", each.outputs))
        }
        kind = "PluginV2" if each.domain else "PointWiseV2"
        layers.append(
            {"Name": each.name, "LayerType": kind, "Metadata": f"[ONNX Layer: {each.name}]", **tensors}
        )
    return json.dumps({"Layers": layers, "Bindings": []})


def precision_of(
    lowered: ir.Model, canonical: ir.Model, *, told: bool, in_fp8: bool = False
) -> PrecisionVerdict:
    kernels = {"inspector": tuple(kernels_from_inspector(layers_of(lowered, told=told)))}
    built = BuiltEngine(plan=b"", seconds=0.0, strongly_typed=False, kernels=kernels)
    return judge_engine(with_plugin_roles(built, lowered, in_fp8), lowered, canonical, "fp16", 1).precision


def test_the_verdict_of_an_engine_names_gemms_in_fp8() -> None:
    model, plain = quantized(block()), block()
    lowered = lower(model, "plugin", linear=True)
    for told in (False, True):
        found = precision_of(lowered, model, told=told)
        assert found.quantized == {"fp8": 4}
        assert (found.offenders, found.not_quantized) == ((), ())
        assert found.ok == told  # the last sum is TensorRT's own, and its types are not told
        assert precision_of(lower(plain, "plugin", linear=True), plain, told=told).quantized == {}
