from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from attention_models import random_feeds
from conformance import run_in_ort
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from mha_deploy.graph.lower import lower
from mha_deploy.graph.lower.to_plugin import pack_in_place

DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


def layer(
    *, bias: str = "qkv", cross: bool = False, D: int = 16, Hq: int = 4, Hkv: int = 2, dtype: str = "fp32"
) -> ir.Model:
    """Projections, attention and output projection; `bias` names the projections that have one."""
    rng, E, kind = np.random.default_rng(0), 24, DTYPES[dtype]
    widths = {"q": Hq * D, "k": Hkv * D, "v": Hkv * D}
    nodes, weights = [], {}
    for name, width in widths.items():
        source = "context" if cross and name != "q" else "x"
        weights[f"w{name}"] = (rng.standard_normal((E, width)) / 5).astype(kind)
        nodes.append(
            helper.make_node("MatMul", [source, f"w{name}"], [f"{name}_product"], name=f"{name}_proj")
        )
        if name in bias:
            weights[f"b{name}"] = rng.standard_normal(width).astype(kind)
            nodes.append(
                helper.make_node("Add", [f"b{name}", f"{name}_product"], [name], name=f"{name}_bias")
            )
        else:
            nodes[-1].output[0] = name
    nodes.append(
        helper.make_node("Attention", ["q", "k", "v"], ["a"], name="att", q_num_heads=Hq, kv_num_heads=Hkv)
    )
    weights["wo"] = (rng.standard_normal((Hq * D, E)) / 5).astype(kind)
    nodes.append(helper.make_node("MatMul", ["a", "wo"], ["y"], name="out_proj"))
    tensor_type = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    inputs = [helper.make_tensor_value_info("x", tensor_type, ["B", "S", E])]
    if cross:
        inputs.append(helper.make_tensor_value_info("context", tensor_type, ["B", "T", E]))
    graph = helper.make_graph(
        nodes,
        "layer",
        inputs,
        [helper.make_tensor_value_info("y", tensor_type, ["B", "S", E])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    return ir.from_proto(model)


def run(model: ir.Model) -> np.ndarray:
    feeds = random_feeds(model, {"B": 2, "S": 5, "T": 7})
    return ReferenceEvaluator(ir.to_proto(model)).run(None, feeds)[0]


def pack_projections(model: ir.Model) -> ir.Model:
    packed = model.clone()
    pack_in_place(packed)
    return packed


def count(model: ir.Model, op_type: str) -> int:
    return sum(node.op_type == op_type for node in model.graph)


@pytest.mark.parametrize("bias", ["qkv", "", "qv"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_changes_no_number(bias: str, dtype: str) -> None:
    model = layer(bias=bias, dtype=dtype)
    packed = pack_projections(model)
    assert (count(packed, "MatMul"), count(packed, "Split"), count(packed, "Add")) == (2, 1, 1 if bias else 0)
    tolerance = 1e-6 if dtype == "fp32" else 0  # the runtime may sum a wider matmul in another order
    np.testing.assert_allclose(
        run(packed).astype(np.float32), run(model).astype(np.float32), rtol=tolerance, atol=tolerance
    )


def test_packed_weights_replace_the_three() -> None:
    packed = pack_projections(layer())
    assert set(packed.graph.initializers) == {"att_qkv_weight", "att_qkv_bias", "wo"}
    assert packed.graph.initializers["att_qkv_weight"].shape == [24, 128]


def test_cross_attention_packs_keys_and_values() -> None:
    model = layer(cross=True)
    packed = pack_projections(model)
    assert (count(packed, "MatMul"), count(packed, "Split")) == (3, 1)
    np.testing.assert_allclose(run(packed), run(model), rtol=1e-6, atol=1e-6)


def test_packing_does_not_touch_its_input() -> None:
    model = layer()
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    pack_projections(model)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_nothing_to_pack_twice() -> None:
    packed = pack_projections(layer())
    assert count(pack_projections(packed), "MatMul") == 2


def test_weights_that_others_read_stay() -> None:
    model = layer()
    model.graph.outputs.append(next(n for n in model.graph if n.name == "k_proj").outputs[0])
    packed = pack_projections(model)
    assert [value.name for value in packed.graph.outputs] == ["y", "k_product"]
    assert "bk" in packed.graph.initializers  # its matmul is an output, so its bias is added outside


@pytest.mark.parametrize("dialect", ["onnx", "trt", "primitives", "contrib"])
def test_pack_and_lower_together(dialect: str) -> None:
    model = layer(D=8)
    feeds = random_feeds(model, {"B": 2, "S": 5})
    lowered = lower(pack_projections(model), dialect)
    (got,) = run_in_ort(ir.to_proto(lowered), feeds)
    np.testing.assert_allclose(got, run_in_ort(ir.to_proto(model), feeds)[0], rtol=1e-5, atol=1e-5)


def test_an_unrelated_matmul_of_the_same_input_is_kept() -> None:
    model = ir.to_proto(layer())
    model.graph.node.append(helper.make_node("MatMul", ["x", "wg"], ["gate"], name="gate_proj"))
    model.graph.initializer.append(numpy_helper.from_array(np.ones((24, 4), np.float32), "wg"))
    model.graph.output.append(helper.make_tensor_value_info("gate", TensorProto.FLOAT, ["B", "S", 4]))
    packed = pack_projections(ir.from_proto(model))
    assert "wg" in packed.graph.initializers
