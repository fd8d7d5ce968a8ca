"""Whether a plan shows what the manifest beside it claims: its kernels, their types, the bundle's weights.

A hash binds a manifest to any file. A plan of TensorRT-RTX holds its kernels in readable text and its weights
as they are, so what the manifest says of fusion and precision is derived from it again, without a GPU. Plans
of TensorRT can only be read by TensorRT: those must be run here before their verdict counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_deploy.backends.tensorrt.kernels import ATTENTION, Kernel
from mha_deploy.backends.tensorrt.onnx_names import members
from mha_deploy.backends.tensorrt.plan import kernels_from_plan
from mha_deploy.backends.tensorrt.precision import precision_verdict
from mha_deploy.backends.tensorrt.verdict import FUSED, UNDECIDED, fusion_verdict
from mha_deploy.backends.tensorrt.written import written_types
from mha_deploy.bundle import MODEL
from mha_deploy.graph.file import load_graph

RTX = "tensorrt-rtx"
_NOT_SHOWN = "the plan does not show what the engine's manifest says: "
# The plans of every version begin so: `ptrt` up to 8.5, `ftrt` from 8.6 on, `vtrt` in TensorRT-RTX.
_MAGIC = b"trt"
# Fewer numbers, or numbers that are alike, are found in any file.
_LEAST_NUMBERS, _LEAST_DIFFERENT = 16, 8
_MATMULS = ("MatMul", "Gemm")


def is_plan(data: bytes) -> bool:
    """Whether a file begins like a plan of TensorRT."""
    return data[1:4] == _MAGIC


def shown_verdict(
    plan: bytes,
    verdict: Mapping[str, Any],
    *,
    backend: str,
    precision: str,
    profiles: int,
    bundle: Path | None = None,
) -> Mapping[str, Any]:
    """The verdict of an engine's manifest, in which everything that its plan does not show is unknown.

    Args:
        plan: The serialised engine.
        verdict: What the manifest says.
        backend: The TensorRT that built it.
        precision: The precision asked for.
        profiles: How many optimisation profiles it has.
        bundle: The bundle that it lies in, if it does.
    """
    nodes = verdict["nodes"]
    if backend != RTX and not any("plan" in node["source"].split("+") for node in nodes):
        return verdict
    # The library's layers do not say what they compute; that a plugin is there is all that can be seen.
    kernels = [
        replace(each, carries=ATTENTION) if each.is_plugin else each for each in kernels_from_plan(plan)
    ]
    graph = None if bundle is None or backend != RTX else load_graph(bundle / MODEL)
    if graph is not None and not (_holds_weights(plan, graph) and _has_their_sizes(kernels, graph)):
        return _all_unknown(verdict, "its weights are not those of the bundle")
    shown = {**verdict, "nodes": _shown_nodes(kernels, nodes, profiles, needed=backend == RTX)}
    if backend == RTX and not _is_in_precision(kernels, verdict["precision"], precision, graph):
        shown["precision"] = _unknown(verdict["precision"], "its kernels are not in that precision")
    return shown


def _shown_nodes(
    kernels: Sequence[Kernel], nodes: Sequence[Mapping[str, Any]], profiles: int, *, needed: bool
) -> list[Mapping[str, Any]]:
    names = sorted({name for kernel in kernels for name in kernel.onnx_nodes})
    found = fusion_verdict(kernels, members(names, {node["node"]: None for node in nodes}), profiles=profiles)
    fused = {(each.node, each.profile): set(each.kernels) for each in found if each.status == FUSED}

    def is_shown(node: Mapping[str, Any]) -> bool:
        if node["status"] != FUSED or not (needed or "plan" in node["source"].split("+")):
            return True
        mine = fused.get((node["node"], node["profile"]))
        return mine is not None and mine.issuperset(node["kernels"])

    return [
        node if is_shown(node) else _unknown(node, "no fused kernel of that name computes it")
        for node in nodes
    ]


def _is_in_precision(
    kernels: Sequence[Kernel], recorded: Mapping[str, Any], precision: str, graph: ir.Model | None
) -> bool:
    if recorded["status"] != f"really-{precision}":
        return True  # nothing is claimed
    if precision_verdict(kernels, precision).ok:
        return True
    # Some of its nodes may be wider because the graph asks for it.
    return graph is not None and precision_verdict(kernels, precision, written_types(graph)).ok


def _holds_weights(plan: bytes, graph: ir.Model) -> bool:
    """Whether any weight of the graph stands in the plan; some are packed together, but never all of them."""
    compared = False
    for needle in _weights(graph):
        compared = True
        if needle in plan:
            return True
    return not compared


def _has_their_sizes(kernels: Sequence[Kernel], graph: ir.Model) -> bool:
    """Whether most matmuls read as many weights as those nodes of the graph that they name.

    A kernel may compute several of them in one, and pad their weights. Of some, the plan names no weights.
    """
    sizes = {
        node.name: value.const_value.size
        for node in graph.graph.all_nodes()
        if node.op_type in _MATMULS
        for value in node.inputs[1:2]
        if value is not None and value.const_value is not None
    }
    fitting = []
    for kernel in kernels:
        read = max((math.prod(each.shape) for each in kernel.constants), default=0)
        named = (
            kernel.is_gemm and bool(kernel.onnx_nodes) and all(name in sizes for name in kernel.onnx_nodes)
        )
        if named and read > 1:
            wanted = sum(sizes[name] for name in kernel.onnx_nodes)
            fitting.append(wanted <= read < 2 * wanted)
    return 2 * sum(fitting) >= len(fitting)


def _weights(graph: ir.Model) -> Iterator[bytes]:
    """The numbers of the weights, small ones first, as they are and transposed."""
    tensors = [
        value.const_value for value in graph.graph.initializers.values() if value.const_value is not None
    ]
    for tensor in sorted(tensors, key=lambda tensor: tensor.nbytes):
        if tensor.size < _LEAST_NUMBERS or not tensor.dtype.is_floating_point():
            continue
        data = tensor.tobytes()
        if len(np.unique(np.frombuffer(data, dtype=np.uint8))) < _LEAST_DIFFERENT:
            continue
        yield data
        if len(tensor.shape) == 2:
            yield np.ascontiguousarray(tensor.numpy().T).tobytes()


def _all_unknown(verdict: Mapping[str, Any], why: str) -> Mapping[str, Any]:
    nodes = [_unknown(node, why) for node in verdict["nodes"]]
    return {**verdict, "nodes": nodes, "precision": _unknown(verdict["precision"], why)}


def _unknown(part: Mapping[str, Any], why: str) -> dict[str, Any]:
    return {**part, "status": UNDECIDED, "reason": _NOT_SHOWN + why}
