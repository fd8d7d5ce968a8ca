"""The projections of an attention in one plain form, whatever moves their columns to the heads.

Between a projection and attention, and between attention and the output projection, modules such as
`nn.MultiheadAttention` reshape, transpose, split and select. What they do with each number is found by
running the graph on the numbers' own positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from mha_deploy.bundle.cases import Arrays
from mha_deploy.exporter.file_program import Compute, FileNode, FileProgram, FileRounding, Inputs
from mha_deploy.graph import attention_node as an
from mha_deploy.graph.attention_node import read_attention
from mha_deploy.graph.ir import (
    NodeBuilder,
    constant,
    infer_shapes,
    input_at,
    is_op,
    made_by,
    new_initializer,
    rank,
)
from mha_deploy.graph.roles import MOVES

_MOVES = (*MOVES, "Gather", "Split", "Slice", "Flatten")


@dataclass(frozen=True)
class _Gemm:
    """A GEMM with a constant weight, and the node that has its result, with the bias."""

    node: ir.Node
    last: ir.Node
    weight: np.ndarray  # [in, out]
    bias: np.ndarray | None


def _gemm_at(node: ir.Node | None) -> _Gemm | None:
    last = node
    bias = None
    if node is not None and is_op(node, "Add"):
        sides = [(constant(a), b) for a, b in zip(node.inputs, reversed(node.inputs), strict=True)]
        fits = [(tensor, other) for tensor, other in sides if tensor is not None and len(tensor.shape) == 1]
        if not fits or fits[0][0] is None:
            return None
        bias, node = fits[0][0].numpy(), made_by(fits[0][1], "MatMul")
    weight = constant(input_at(node, 1))
    if node is None or last is None or not is_op(node, "MatMul", "Gemm") or weight is None:
        return None
    if len(weight.shape) != 2 or any(
        node.attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta")
    ):
        return None
    if node.attributes.get_int("transA", 0):
        return None
    if is_op(node, "Gemm") and input_at(node, 2) is not None:
        held = constant(input_at(node, 2))
        if held is None or len(held.shape) != 1:
            return None
        bias = held.numpy()
    array = weight.numpy().T if node.attributes.get_int("transB", 0) else weight.numpy()
    return _Gemm(node, last, array, bias)


def _before(value: ir.Value | None) -> _Gemm | None:
    """The projection that a value comes from, through moves alone."""
    while (move := made_by(value, *_MOVES)) is not None:
        value = move.inputs[0]
    return None if value is None else _gemm_at(value.producer())


def _behind(value: ir.Value) -> _Gemm | None:
    """The output projection that a value goes to, through moves alone."""
    while True:
        users = [use.node for use in value.uses()]
        if len(users) != 1 or value.is_graph_output():
            return None
        if is_op(users[0], "MatMul", "Gemm") and users[0].inputs[0] is value:
            return _gemm_at(users[0])
        if not is_op(users[0], *_MOVES):
            return None
        value = users[0].outputs[0]


class _Positions(FileRounding):
    """Computes a graph with positions in place of some numbers, and notes where they arrive."""

    def __init__(self, begins: set[str], ends: set[str]) -> None:
        super().__init__()
        self._begins, self._ends = begins, ends
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.arrived: dict[str, tuple[Any, ...]] = {}

    def call(self, node: FileNode, run: Compute, inputs: Inputs) -> Any:
        """The outputs of one node."""
        name = node.name
        if name in self._ends:
            self.arrived[name] = inputs
        outputs = super().call(node, run, inputs)
        if name not in self._begins:
            return outputs
        self.shapes[name] = outputs[0].shape
        positions = np.arange(outputs[0].size, dtype=np.float64).reshape(outputs[0].shape)
        return (positions, *outputs[1:])


def in_plain_form(model: ir.Model, names: list[str], inputs: Arrays) -> ir.Model:
    """A copy in which these attentions have separate projections, a Reshape and a Transpose around them.

    Those that do not allow it stay as they are. In `inputs` there must be as many batch elements as no other
    axis has.
    """
    copy = infer_shapes(model.clone())
    nodes = {str(node.name): node for node in copy.graph if str(node.name) in names}
    parts: dict[str, tuple[list[_Gemm], _Gemm]] = {}
    for name, node in nodes.items():
        before = [_before(input_at(node, at)) for at in (an.Q, an.K, an.V)]
        behind = _behind(node.outputs[0])
        known = [each for each in before if each is not None]
        if behind is not None and len(known) == 3 and read_attention(node).rank == 4:
            parts[name] = known, behind
    begins = {str(each.last.name) for known, _ in parts.values() for each in known} | set(parts)
    ends = {str(behind.node.name) for _, behind in parts.values()} | set(parts)
    mode = _Positions(begins, ends)
    FileProgram(copy).run(inputs, mode)
    for name, (known, behind) in parts.items():
        _rewrite(copy, nodes[name], known, behind, mode)
    RemoveUnusedNodesPass()(copy)
    return infer_shapes(copy)


def _columns(array: Any, shape: tuple[int, ...]) -> tuple[np.ndarray, bool] | None:
    """Of positions [B, H, S, D] in a tensor [B, S, C] or [S, B, C]: the columns [H, D], and which it is."""
    B, _, S, _ = array.shape
    whole = np.asarray(array, np.int64)
    rows, columns = whole // shape[-1], whole % shape[-1]
    found = columns[0, :, 0]
    if len(shape) != 3 or B == S or B < 2 or not (columns == found[None, :, None]).all():
        return None
    for first, order in ((True, np.arange(B)[:, None] * S + np.arange(S)), (False, None)):
        order = np.arange(B)[:, None] + np.arange(S) * B if order is None else order
        if (rows == order[:, None, :, None]).all() and shape[:2] == ((B, S) if first else (S, B)):
            return found, first
    return None


def _rewrite(model: ir.Model, node: ir.Node, known: list[_Gemm], behind: _Gemm, mode: _Positions) -> None:
    """Write the projections of one attention anew, if the positions of their numbers allow it."""
    name, arrived = str(node.name), mode.arrived[str(node.name)]
    places = [_columns(arrived[at], mode.shapes[str(known[at].last.name)]) for at in (an.Q, an.K, an.V)]
    given, shape = mode.arrived[str(behind.node.name)][0], mode.shapes[name]
    B, H, S, D = shape
    # What arrives at the output projection, as positions in the heads.
    flat = np.asarray(given, np.int64).reshape(-1, given.shape[-1])
    at = np.stack(np.unravel_index(flat, shape), -1)  # [rows, columns, (b, h, s, d)]
    heads, rows = at[0, :, 1] * D + at[0, :, 3], at[:, 0, 0] * S + at[:, 0, 2]
    alike = (at[..., 1] * D + at[..., 3] == heads).all() and (
        at[..., 0] * S + at[..., 2] == rows[:, None]
    ).all()
    first = bool((rows == np.arange(B * S)).all())
    second = bool((rows == (np.arange(B)[None] * S + np.arange(S)[:, None]).reshape(-1)).all())
    if None in places or not alike or not (first or second) or B == S:
        return
    b, made = NodeBuilder(f"{name}/plain"), []
    for (columns, is_first), each in zip(filter(None, places), known, strict=True):
        source, dtype = each.node.inputs[0], each.node.inputs[0].dtype if each.node.inputs[0] else None
        if source is None or dtype is None or rank(source) != 3:
            return
        source = source if is_first else b.transpose(source, 1, 0, 2)
        order = columns.reshape(-1)
        held = [each.weight[:, order], None if each.bias is None else each.bias[order]]
        tensors = [None if x is None else _initializer(model, b, x) for x in held]
        value = b.op("MatMul", source, tensors[0])
        value = value if tensors[1] is None else b.op("Add", value, tensors[1])
        made.append(b.transpose(b.reshape(value, 0, 0, *columns.shape), 0, 2, 1, 3))
    model.graph.insert_before(node, b.nodes)
    for position, value in enumerate(made):
        old = input_at(node, position)
        value.type = None if old is None else old.type
        node.replace_input_with(position, value)
    b, inverse = NodeBuilder(f"{name}/plain_output"), np.argsort(heads)
    joined = b.reshape(b.transpose(node.outputs[0], 0, 2, 1, 3), 0, 0, H * D)
    value = b.op("MatMul", joined, _initializer(model, b, behind.weight[inverse]))
    if is_op(behind.node, "Gemm") and behind.bias is not None:
        value = b.op("Add", value, _initializer(model, b, behind.bias))
    value = value if first else b.transpose(value, 1, 0, 2)
    if given.ndim == 2:
        value = b.reshape(value, -1, behind.weight.shape[1])
    result = behind.node.outputs[0]
    value.type, value.shape = result.type, result.shape
    result.replace_all_uses_with(value, replace_graph_outputs=True)
    value.name, result.name = result.name, f"{result.name}_before"
    model.graph.insert_before(behind.node, b.nodes)


def _initializer(model: ir.Model, b: NodeBuilder, array: np.ndarray) -> ir.Value:
    name = f"{b.prefix}/held_{len(model.graph.initializers)}"
    return new_initializer(model.graph, name, np.ascontiguousarray(array))
