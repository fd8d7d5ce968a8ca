"""Projections as nodes of the plugin."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from conformance import lower_for_reference, run_in_reference
from plugin_layers import FP16, assert_same, model_of, node, operators, random_inputs, weights

from mha_deploy.graph.lower import lower

SIZES = {"B": 2, "S": 5}
SHAPE = (FP16, ["B", "S", 32])


def layer(*, bias: np.ndarray | None = None) -> ir.Model:
    """Attention between its projections, and a feed-forward part behind them."""
    constants = {name: weights(32, 32, seed=seed) for seed, name in enumerate("qkvo")}
    constants |= {"up": weights(32, 48), "down": weights(48, 32), "b": weights(32) if bias is None else bias}
    nodes = [node("MatMul", f"x {name}", f"x{name}") for name in "qkv"]
    nodes += [
        node("Attention", "xq xk xv", "h", q_num_heads=2, kv_num_heads=2),
        node("MatMul", "h o", "p"),
        node("Add", "b p", "z"),
        node("MatMul", "z up", "u"),
        node("Relu", "u", "a"),
        node("MatMul", "a down", "d"),
        node("Add", "d x", "y"),
    ]
    return model_of(nodes, {"x": SHAPE}, {"y": SHAPE}, constants)


def linears(model: ir.Model) -> list[ir.Node]:
    return [each for each in model.graph if each.op_type == "MhaDeployLinear"]


def test_projections_stay_matmuls_by_default() -> None:
    assert not linears(lower(layer(), "plugin"))


def test_every_matmul_with_constant_weights() -> None:
    model = layer()
    lowered = lower(model, "plugin", linear=True)
    assert len(linears(lowered)) == 4
    assert "MatMul" not in operators(lowered)
    used = {each.inputs[1].name for each in linears(lowered)}
    matrices = {value.name for value in lowered.graph.initializers.values() if len(value.shape or ()) == 2}
    assert matrices == used  # transposed, and the original ones are gone
    assert_same(model, lowered, random_inputs(model, SIZES), atol=8e-3)


def test_attributes_and_bias() -> None:
    packed, projection, *_ = linears(lower(layer(), "plugin", linear=True))
    for each, bias in ((packed, 0), (projection, 1)):
        assert {name: attribute.value for name, attribute in each.attributes.items()} == {
            "has_bias": bias,
            "transposed": 1,
            "quantized": 0,
            "plugin_version": "1",
            "plugin_namespace": "mha_deploy",
        }
        assert len(each.inputs) == 2 + bias
        assert each.inputs[1].const_value is not None
    assert projection.inputs[2].name == "b"
    assert [str(each.outputs[0].shape) for each in (packed, projection)] == ["[B,S,96]", "[B,S,32]"]


def test_a_bias_of_one_number_stays_an_add() -> None:
    model = layer(bias=np.array([0.5], np.float16))
    lowered = lower(model, "plugin", linear=True)
    assert [each.attributes["has_bias"].value for each in linears(lowered)] == [0, 0, 0, 0]
    assert operators(lowered).count("Add") == 2
    assert_same(model, lowered, random_inputs(model, SIZES), atol=8e-3)


def test_projections_accumulate_without_rounding() -> None:
    """2048 + 1 is 2048 in FP16: what is summed there loses every further one."""
    width = 4096
    model = model_of(
        [
            node("MatMul", "x w", "p"),
            node("Attention", "p p p", "y", q_num_heads=1, kv_num_heads=1),
        ],
        {"x": (FP16, ["B", "S", width])},
        {"y": (FP16, ["B", "S", 8])},
        {"w": np.ones((width, 8), np.float16)},
    )
    lowered = lower(model, "plugin", linear=True)
    (y,) = run_in_reference(ir.to_proto(lowered), {"x": np.ones((1, 1, width), np.float16)})
    assert np.all(y == width)


def test_matmuls_of_other_types_stay() -> None:
    constants = {"w": np.ones((8, 8), np.float32)}
    nodes = [
        node("Attention", "q q q", "h", q_num_heads=1, kv_num_heads=1),
        node("Cast", "h", "wide", to=1),
        node("MatMul", "wide w", "y"),
    ]
    model = model_of(nodes, {"q": (FP16, ["B", "S", 8])}, {"y": (1, ["B", "S", 8])}, constants)
    assert operators(lower(model, "plugin", linear=True)).count("MatMul") == 1
    assert linears(lower_for_reference(model, "plugin", linear=True))
