"""Reading what TensorRT prints: the inspector's JSON of three schemas, and the records of the build log."""

from __future__ import annotations

import json

import pytest
from inspector_texts import INSPECTOR_8, INSPECTOR_10, INSPECTOR_11

from mha_deploy.runtime.tensorrt.kernels import (
    dtype_of,
    kernels_from_inspector,
    kernels_from_log,
    kernels_from_plan,
    onnx_nodes_of,
)
from mha_deploy.runtime.tensorrt.versions import EngineError


def test_the_schema_of_8_6():
    reformat, gemm, region = kernels_from_inspector(json.dumps(INSPECTOR_8))
    assert [tensor.dtype for tensor in reformat.tensors] == ["fp32", "fp16"]
    assert gemm.onnx_nodes == ("proj_q0", "bias_q0")
    assert gemm.is_gemm
    assert gemm.inputs[0].shape == (8, 128, 768)
    assert region.is_opaque
    assert region.onnx_nodes == ()
    assert region.outputs[0].dtype == "?"


def test_the_schema_of_10():
    shape, first, second = kernels_from_inspector(json.dumps(INSPECTOR_10))
    assert first.is_fused_attention
    assert not shape.is_fused_attention
    assert first.onnx_nodes == ("/a/sum", "/a/softmax", "/a/scores")
    assert {tensor.dtype for tensor in first.tensors} == {"fp16"}
    assert (shape.profile, first.profile, second.profile) == (0, 0, 1)


def test_the_schema_of_11():
    (kernel,) = kernels_from_inspector(json.dumps(INSPECTOR_11))
    assert kernel.is_fused_attention
    assert kernel.onnx_nodes == ("att0",)
    assert kernel.inputs[0].dtype == "bf16"
    assert kernel.outputs[0].shape == (-1, 1, 32)


def test_names_joined_by_a_bare_control_character_are_read():
    text = json.dumps(INSPECTOR_10).replace("/a/sum][", "/a/sum]\x1f[")
    assert kernels_from_inspector(text)[1].onnx_nodes == ("/a/sum", "/a/softmax", "/a/scores")


def test_an_engine_without_details_has_only_names():
    kernels = kernels_from_inspector(json.dumps({"Layers": ["att0/scores + att0/softmax"], "Bindings": []}))
    assert kernels[0].onnx_nodes == ("att0/scores", "att0/softmax")
    assert kernels[0].tensors == ()


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"Layer": []}'])
def test_what_is_not_the_inspectors_is_refused(text):
    with pytest.raises(EngineError, match="inspector"):
        kernels_from_inspector(text)


# One line per layer, as RTX 1.7 prints them into its verbose log.
BLOCK = (
    "Layers:\n"
    "Name: proj_v0 [profile 1]+proj_q0 [profile 1]_myl1_1, LayerType: gemm, Inputs: [ { Name: x [profile 1], "
    "Dimensions: [-1,128], Strides: [128,1], StrideOrder: [1,0], Datatype: Half, Format: (Linear) Row major "
    "linear format }], Constants: [ { Name: __mye12_dconst_myl1, Dimensions: [3,128,128], Strides: "
    "[16384,128,1], StrideOrder: [2,1,0], Datatype: Half, Format: (Linear) Row major linear format }, "
    "{ Name: __mye5641proj_v0_alpha_myl1, Dimensions: [1], Strides: [1], StrideOrder: [0], Datatype: Float, "
    "Format: (Linear) Row major linear format }], Outputs: [ { Name: __mye5_myl1, Dimensions: [3,-1,128], "
    "Strides: [-1,128,1], StrideOrder: [2,1,0], Datatype: Half, Format: (Linear) Row major linear format }], "
    "TacticName: __myelin_CASK_STUB, StreamId: 0, Metadata: [ONNX Layer: proj_v0]\x1f[ONNX Layer: proj_q0]\n"
    "Name: _gemm_mha_v2_myl1_9, LayerType: kgen, Inputs: [ { Name: __mye5_myl1, Dimensions: [-1,-1,32], "
    "Strides: [32,-1,1], StrideOrder: [1,2,0], Datatype: Half, Format: (Arbitrary) Format with stride order "
    "= [1,2,0] }], Constants: [], Outputs: [ { Name: y, Dimensions: [-1,-1,32], Strides: [32,-1,1], "
    "StrideOrder: [1,2,0], Datatype: Half, Format: (Arbitrary) Format with stride order = [1,2,0] }], "
    "TacticName: _gemm_mha_v2_0x4b9d7d46, StreamId: 0, Metadata: [ONNX Layer: att0]\n"
    "\nI/O Tensors:\n Name: x, IOMode: Input, DataType: Half\n"
)

# The joined field of 10.x, on a line.
BLOCK_10 = (
    "Engine Layer Information:\nLayers:\n"
    "Name: _gemm_mha_v2_myl0_1, LayerType: kgen, Inputs: [ { Name: q, Location: Device, Dimensions: "
    "[2,4,16,32], Format/Datatype: Half }], Outputs: [ { Name: y, Location: Device, Dimensions: [2,4,16,32], "
    "Format/Datatype: Half }], TacticName: _gemm_mha_v2_0xff, StreamId: 0, Metadata: [ONNX Layer: att0]\n"
)

LINES_8 = (
    "Engine Layer Information:\n"
    "Layer(Reformat): Reformatting CopyNode for Input Tensor 0 to proj, Tactic: 0x00000000000003e8, "
    "x (Float[8,128,768]) -> Reformatted Input Tensor 0 to proj (Half[8,128,768])\n"
    "Layer(Myelin): {ForeignNode[att0/transpose...att0/sum]}, Tactic: 0x0000000000000000, "
    "q (Half[-1,12:8,64]), k [profile 1] (Half[-1,12,64]) -> y (Half[-1,768])\n"
)


def test_the_layer_block_of_the_log():
    gemm, fused = kernels_from_log(["noise", BLOCK, "more noise"])
    assert gemm.onnx_nodes == ("proj_v0", "proj_q0")
    assert [tensor.name for tensor in gemm.inputs] == ["x [profile 1]"]
    assert [tensor.dtype for tensor in gemm.constants] == ["fp16", "fp32"]
    assert gemm.outputs[0].shape == (3, -1, 128)
    assert fused.tactic == "_gemm_mha_v2_0x4b9d7d46"
    assert fused.onnx_nodes == ("att0",)
    # The fused kernel carries no mark: what its region reads does.
    assert (gemm.profile, fused.profile) == (1, 1)


def test_the_layer_block_of_10():
    (kernel,) = kernels_from_log([BLOCK_10])
    assert kernel.is_fused_attention
    assert [(tensor.name, tensor.dtype, tensor.shape) for tensor in kernel.tensors] == [
        ("q", "fp16", (2, 4, 16, 32)),
        ("y", "fp16", (2, 4, 16, 32)),
    ]


def test_the_layer_lines_of_8_6():
    reformat, region = kernels_from_log([LINES_8])
    assert [(tensor.name, tensor.dtype) for tensor in reformat.tensors] == [
        ("x", "fp32"),
        ("Reformatted Input Tensor 0 to proj", "fp16"),
    ]
    assert region.is_opaque
    assert [tensor.name for tensor in region.inputs] == ["q", "k [profile 1]"]
    assert region.inputs[0].shape == (-1, 12, 64)
    assert (reformat.profile, region.profile) == (0, 1)


def test_the_last_block_counts_and_none_is_none():
    first = BLOCK.replace("_gemm_mha_v2", "_gemv_mha_v1")
    assert kernels_from_log([first, BLOCK])[1].tactic.startswith("_gemm")
    assert kernels_from_log(["Layers are merged", "no block here"]) == []


@pytest.mark.parametrize("plan", [b"", b"\x00" * 64, b"header {\n", b"header {\n\nmain {\n"])
def test_bytes_without_a_program_tell_no_kernels(plan):
    assert kernels_from_plan(plan) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Half", "fp16"),
        ("Row major linear FP16 format (kLINEAR)", "fp16"),
        ("Channel major FP16 format where channel % 4 == 0", "fp16"),
        ("BFloat16", "bf16"),
        ("Row major linear BF16 format", "bf16"),
        ("bf16", "bf16"),
        ("Float", "fp32"),
        ("Row major linear FP32", "fp32"),
        ("Int64", "int64"),
        ("UInt8", "uint8"),
        ("Thirty-two wide channel vectorized row major Int8 format", "int8"),
        ("Bool", "bool"),
        ("N/A due to dynamic shapes", "?"),
        ("", "?"),
    ],
)
def test_types_in_every_spelling(text, expected):
    assert dtype_of(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[ONNX Layer: a]\x1f[ONNX Layer: b]", ("a", "b")),
        ("[ONNX Layer: a][ONNX Layer: b]", ("a", "b")),
        ("[ONNX Layer: a]\x1e[ONNX Layer: a]", ("a",)),
        ("[ONNX Layer: x[0]/y]", ("x[0]/y",)),
        ("", ()),
        ("[ONNX Layer: conv]__gemm_from_conv1x1\x1f[ONNX Layer: norm]", ("conv", "norm")),
    ],
)
def test_node_names_in_metadata(text, expected):
    assert onnx_nodes_of(text) == expected
