"""ONNX's operators by what they do to numbers: the one list, of which every pass takes what it follows.

All are of ONNX's own operator set but for those that say so.
"""

from __future__ import annotations

ORT_DOMAIN = "com.microsoft"
"""The domain of ONNX Runtime's own operator set."""

# -- What only moves numbers -------------------------------------------------------------------------

IN_ORDER = ("Identity", "Reshape", "Squeeze", "Unsqueeze")
"""The same numbers in the same order."""

MOVES = (*IN_ORDER, "Transpose")
"""The same numbers, each once."""

LAYOUT = frozenset(
    {*MOVES, "Flatten", "Expand", "Tile", "Concat", "Slice", "Split", "Gather", "GatherElements", "GatherND"}
    | {"Cast", "ConstantOfShape", "Shape", "Size"}
)
"""What rounds nothing, and has kernels for every type."""

CARRIES = LAYOUT - {"Cast", "ConstantOfShape", "Shape", "Size"}
"""What gives numbers of its inputs, unchanged, perhaps fewer or several times: an error is not its own."""

# -- What accumulates --------------------------------------------------------------------------------

MATMULS = ("MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose")
"""GEMMs of floating-point numbers, besides Attention."""

FUSED_MATMULS = ("FusedMatMul", "TransposeMatMul")
"""Matmuls of ONNX Runtime's own operator set, which is `ORT_DOMAIN`; the second is the older name."""

FUSED_GEMMS = (*FUSED_MATMULS, "FusedConv")
"""The same and convolutions."""

SOFTMAXES = ("Softmax", "LogSoftmax")
NORMS = (
    *("LayerNormalization", "RMSNormalization", "InstanceNormalization", "GroupNormalization"),
    "SimplifiedLayerNormalization",
)
"""The last one is ONNX Runtime's own, but in ONNX's domain."""

# -- What makes truth values of numbers --------------------------------------------------------------

TO_BOOLEAN = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "IsInf")

# -- What makes other numbers ------------------------------------------------------------------------

QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")
RANDOM = (
    *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    *("Bernoulli", "Multinomial"),
)
"""What draws numbers anew in every call."""
