from __future__ import annotations

import json

import onnx
import onnx_ir as ir
import pytest
from attention_models import attention
from onnx import helper

from mha_deploy.graph.attention_node import AttentionNode, attention_nodes


def read(model: ir.Model) -> AttentionNode:
    (node,) = attention_nodes(model)
    return node


def test_reads_4d() -> None:
    node = read(attention(("B", 8, "S", 64), ("B", 2, "T", 64), ("B", 2, "T", 32), dtype="fp16", is_causal=1))
    assert (node.name, node.opset, node.rank, node.dtype) == ("att", 24, 4, "fp16")
    assert (node.B, node.S, node.T, node.Hq, node.Hkv, node.D, node.Dv) == ("B", "S", "T", 8, 2, 64, 32)
    assert (node.kind, node.group, node.is_causal, node.mask) == ("GQA", 4, True, "none")
    assert node.scale is None
    assert node.softmax_scale == 0.125


def test_reads_3d_heads_from_attributes() -> None:
    dims = ("B", "S", 512)
    node = read(attention(dims, ("B", "T", 128), q_num_heads=8, kv_num_heads=2, scale=0.5))
    assert (node.rank, node.S, node.T, node.Hq, node.Hkv, node.D, node.Dv) == (3, "S", "T", 8, 2, 64, 64)
    assert (node.scale, node.softmax_scale) == (0.5, 0.5)


def test_reads_optional_inputs_and_outputs() -> None:
    model = attention(
        (2, 4, 3, 8), (2, 4, 3, 8), past="P", present=True, weights=True, qk_matmul_output_mode=3, softcap=2.0
    )
    node = read(model)
    assert (node.has_past, node.past_length, node.has_present) == (True, "P", True)
    assert (node.has_qk_output, node.qk_output_mode, node.softcap) == (True, 3, 2.0)
    assert not node.has_nonpad_kv_seqlen


def test_reads_omitted_inputs_between_others() -> None:
    node = read(attention((2, 4, 3, 8), (2, 4, 6, 8), lengths=True))
    assert node.has_nonpad_kv_seqlen
    assert (node.has_past, node.mask, node.has_present, node.qk_output_mode) == (False, "none", False, None)


def test_reads_an_unnamed_output_in_the_middle_as_left_out() -> None:
    node = read(attention((2, 4, 3, 8), (2, 4, 6, 8), weights=True))
    assert (node.has_present, node.qk_output_mode) == (False, 0)


@pytest.mark.parametrize(("kind", "mask"), [("bool", "bool"), ("fp32", "float"), ("int64", "int")])
def test_reads_the_mask(kind: str, mask: str) -> None:
    node = read(attention((2, 4, 3, 8), (2, 4, 6, 8), mask=(kind, ("S", 6))))
    assert (node.mask, node.mask_dtype, node.mask_dims) == (mask, kind, ("S", 6))


def test_reads_window_and_softmax_precision() -> None:
    node = read(attention((2, 4, 3, 8), (2, 4, 3, 8), opset=25, left_window_size=2, softmax_precision=1))
    assert (node.has_window, node.left_window, node.right_window) == (True, 2, -1)
    assert node.softmax_precision == "fp32"


def test_what_the_file_does_not_state_is_none() -> None:
    model = attention((2, 4, 3, 8), (2, 4, 3, 8))
    for value in model.graph.inputs:
        value.shape, value.type = None, None
    node = read(model)
    assert [node.rank, node.dtype, node.B, node.S, node.Hq, node.D, node.softmax_scale] == [None] * 7


def test_description_is_json() -> None:
    described = read(attention(("B", 8, "S", 64), ("B", 8, "T", 64), mask=("bool", ("S", "T")))).describe()
    assert json.loads(json.dumps(described))["mask_dims"] == ["S", "T"]
    assert (described["kind"], described["softmax_scale"]) == ("MHA", 0.125)


def test_finds_attention_in_functions_and_ignores_other_domains() -> None:
    inner = helper.make_node("Attention", ["q", "k", "v"], ["y"], name="inner")
    imports = [helper.make_opsetid("", 23), helper.make_opsetid("local", 1)]
    function = helper.make_function("local", "Wrapped", ["q", "k", "v"], ["y"], [inner], imports[:1])
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 2, 3, 8]) for name in "qkvy"]
    call = helper.make_node("Wrapped", ["q", "k", "v"], ["y"], domain="local")
    other = helper.make_node("Attention", ["q", "k", "v"], ["unused"], domain="com.microsoft", num_heads=2)
    graph = helper.make_graph([call, other], "main", values[:3], values[3:])
    model = ir.from_proto(helper.make_model(graph, opset_imports=imports, functions=[function]))
    (node,) = attention_nodes(model)
    assert (node.name, node.graph, node.rank) == ("inner", "Wrapped", None)
