"""The types that a graph gives its nodes, to tell what it asks for from what a builder fell back to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from mha_deploy.backends.tensorrt.kernels import FLOATING, dtype_of

_PRODUCTS = frozenset({"MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "MhaDeployLinear"})


@dataclass(frozen=True, kw_only=True)
class WrittenTypes:
    """The floating-point types of one node.

    Args:
        reads: Types of its inputs.
        writes: Types of its outputs.
        is_product: Whether it is a matrix product, a convolution or attention.
    """

    reads: frozenset[str]
    writes: frozenset[str]
    is_product: bool


Written = Mapping[str, WrittenTypes]
"""The types of the nodes, by the names TensorRT knows them by."""


def written_types(model: ir.Model) -> dict[str, WrittenTypes]:
    """Read the types of every node of the graph that is given to TensorRT; what is not stated is left out."""
    return {
        node.name or f"node_of_{node.outputs[0].name}": WrittenTypes(
            reads=_types(node.inputs),
            writes=_types(node.outputs),
            is_product=node.op_type in _PRODUCTS or node.op_type.endswith("Attention"),
        )
        for node in model.graph.all_nodes()
        if node.outputs
    }


def _types(values: Iterable[ir.Value | None]) -> frozenset[str]:
    names = {dtype_of(value.dtype.name) for value in values if value is not None and value.dtype is not None}
    return frozenset(names.intersection(FLOATING))
