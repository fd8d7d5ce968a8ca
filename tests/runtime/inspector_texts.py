"""What the engine inspectors of several TensorRT report."""

from __future__ import annotations


def tensor(name, dims, **more):
    return {"Name": name, "Dimensions": dims, **more}


def of_8(name, dtype="Row major linear FP16 format"):
    return tensor(name, [8, 128, 768], Location="Device", **{"Format/Datatype": dtype})


def half(name, *dims):
    return tensor(name, list(dims), **{"Format/Datatype": "Half"})


# TensorRT 8.6: type and layout in one field, Myelin as one opaque layer, borders as names.
INSPECTOR_8 = {
    "Layers": [
        {
            "Name": "Reformatting CopyNode for Input Tensor 0 to proj_q0",
            "LayerType": "Reformat",
            "Inputs": [of_8("x", "Row major linear FP32")],
            "Outputs": [of_8("Reformatted Input Tensor 0 to proj_q0")],
            "ParameterType": "Reformat",
            "Origin": "REFORMAT",
            "TacticValue": "0x00000000000003e8",
        },
        {
            "Name": "proj_q0 + bias_q0",
            "LayerType": "MatrixMultiply",
            "Inputs": [of_8("Reformatted Input Tensor 0 to proj_q0")],
            "Outputs": [of_8("q0")],
            "ParameterType": "MatrixMultiply",
            "TacticName": "sm80_xmma_gemm_f16f16_f16f16_f16_tn_n_tilesize64x64x32_stage6_warpsize2x2x1",
            "TacticValue": "0x0000000000020318",
        },
        {
            "Name": "{ForeignNode[att0/transpose...att0/sum]}",
            "LayerType": "Myelin",
            "Inputs": [of_8("q0")],
            "Outputs": [of_8("y", "N/A due to dynamic shapes")],
            "TacticValue": "0x0000000000000000",
        },
    ],
    "Bindings": ["x", "y"],
}

# TensorRT 10.x: the same fields, but the kernels inside Myelin are listed, with metadata.
FUSED_10 = {
    "LayerType": "kgen",
    "TacticName": "_gemm_mha_v2_0xbcebb264ff01c4c4f8078856729f8b7e",
    "StreamId": 0,
}

INSPECTOR_10 = {
    "Layers": [
        {
            "Name": "__mye1744_0_myl0_0",
            "LayerType": "shape_call",
            **{"Inputs": [], "Outputs": [], "TacticName": "", "StreamId": 0, "Metadata": ""},
        },
        {
            "Name": "_gemm_mha_v2_myl0_4",
            "Inputs": [half("__mye12_myl0", 96, 128, 64), half("__mye13_myl0", 96, 64, 128)],
            "Outputs": [half("__mye14_myl0", 96, 128, 64)],
            "Metadata": "[ONNX Layer: /a/sum][ONNX Layer: /a/softmax][ONNX Layer: /a/scores]",
            **FUSED_10,
        },
        {
            "Name": "_gemm_mha_v2_myl1_4",
            "Inputs": [half("x [profile 1]", -1, 64)],
            "Outputs": [],
            "Metadata": "[ONNX Layer: /a/scores][ONNX Layer: /a/softmax][ONNX Layer: /a/sum]",
            **FUSED_10,
        },
    ],
    "Bindings": ["x", "y", "x [profile 1]", "y [profile 1]"],
}

# TensorRT 11.x and RTX: type and layout apart, borders as records.
LINEAR = {"Datatype": "BFloat16", "Format": "(Linear) Row major linear format"}

STRIDED = {"Datatype": "BFloat16", "Format": "(Arbitrary) Format with stride order = [1,2,0]"}

RANGE_11 = {"MinShape": [1, 1, 128], "OptShape": [2, 1, 128], "MaxShape": [4, 1, 128]}

INSPECTOR_11 = {
    "Layers": [
        {
            "Name": "_gemv_mha_v1_myl0_6",
            "LayerType": "kgen",
            "Inputs": [tensor("__mye5970_myl0", [-1, 4, 1, 32], Strides=[128, 32, 32, 1], **LINEAR)],
            "Constants": [],
            "Outputs": [tensor("__mye6133_myl0", [-1, 1, 32], Strides=[32, -1, 1], **STRIDED)],
            "TacticName": "_gemv_mha_v1_0x811d89f1f696d64c85d4ee3a10fceeaf_vec",
            "StreamId": 0,
            "Metadata": "[ONNX Layer: att0]",
        }
    ],
    "I/O Tensors": [
        tensor(
            "x", [-1, -1, 128], IOMode="Input", DataType="BFloat16", Location="Device", ProfileInfo=[RANGE_11]
        )
    ],
    "Engine Metadata": {"Multi-Device": "Disabled"},
}
