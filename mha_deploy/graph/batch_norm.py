"""Fold BatchNormalization into the weights of the convolution or Gemm before it."""

from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir

from mha_deploy.graph.ir import constant, input_at, is_op, made_by, new_initializer, replace_value


def fold_batch_norms(model: ir.Model) -> None:
    """Fold every norm of constants behind a convolution or Gemm, in FP64: weights are rounded once.

    In FP16 arithmetic, whole channels would be off by more than all other rounding leaves there.
    """
    for norm in list(model.graph):
        node = made_by(norm.inputs[0], "Conv", "ConvTranspose", "Gemm") if _is_norm(norm) else None
        if node is not None and len(node.outputs[0].uses()) == 1 and not node.outputs[0].is_graph_output():
            _fold(model.graph, node, norm)


def _is_norm(node: ir.Node) -> bool:
    return is_op(node, "BatchNormalization") and not node.attributes.get_int("training_mode", 0)


def _fold(graph: ir.Graph, node: ir.Node, norm: ir.Node) -> None:
    weight, bias = input_at(node, 1), input_at(node, 2)
    read = [each for each in (*norm.inputs[1:], weight, bias) if each is not None]
    numbers = [tensor.numpy().astype(np.float64) for each in read if (tensor := constant(each)) is not None]
    if weight is None or weight.dtype is None or len(numbers) < len(read):
        return
    gamma, beta, mean, variance, weights, *biases = numbers
    if any(each.shape != gamma.shape for each in biases):
        return
    factor = gamma / np.sqrt(variance + norm.attributes.get_float("epsilon", 1e-5))
    offset = biases[0] * node.attributes.get_float("beta", 1.0) if biases else 0.0
    node.attributes.pop("beta", None)  # of a Gemm: it is part of the bias now
    folded = weights * _along_outputs(factor, weights, node), (offset - mean) * factor + beta
    names = weight.name or "weight", (bias.name if bias is not None else None) or f"{weight.name}_bias"
    replace_value(norm.outputs[0], node.outputs[0])
    graph.remove(norm, safe=True)
    node.resize_inputs(3)
    for at in (1, 2):
        node.replace_input_with(at, None)
    for each in read:
        if not each.uses() and each.is_initializer() and not each.is_graph_output():
            graph.initializers.pop(each.name or "", None)
    for at, (name, array) in enumerate(zip(names, folded, strict=True), 1):
        own = (f"{name}_folded_{number}" for number in itertools.count(1))  # others read its weight
        free = next(each for each in itertools.chain([name], own) if each not in graph.initializers)
        node.replace_input_with(at, new_initializer(graph, free, array.astype(weight.dtype.numpy())))


def _along_outputs(factor: np.ndarray, weights: np.ndarray, node: ir.Node) -> np.ndarray:
    """A number for each output channel, as it multiplies the weights."""
    if node.op_type == "Gemm":
        return factor[:, None] if node.attributes.get_int("transB", 0) else factor
    kernel = (1,) * (weights.ndim - 2)
    if node.op_type == "Conv":
        return factor.reshape(-1, 1, *kernel)
    groups = node.attributes.get_int("group", 1)  # the weights are [inputs, outputs of a group, kernel]
    return factor.reshape(groups, -1, *kernel).repeat(len(weights) // groups, 0)
