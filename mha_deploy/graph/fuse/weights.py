"""What stands between the softmax and the product with V."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from mha_deploy.graph.fuse.facts import array_of, holds, is_op, scalar_of
from mha_deploy.graph.fuse.origin import place_of
from mha_deploy.graph.fuse.products import is_product
from mha_deploy.graph.fuse.records import NotFused

# What a candidate's weights may pass on the way to the product: more than can be fused, so that it is named.
_PASSED = frozenset(
    {"Cast", "Identity", "Dropout", "Where", "Mul", "Div", "Transpose", "Reshape", "Slice", "Squeeze"}
    | {"Unsqueeze", "Expand", "Gather"}
)
_MAX_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The way from the softmax to the product with V.

    Args:
        value: The weights as the product takes them.
        product: The node of the product.
        position: Which of its operands they are.
        guarded: Whether NaN is replaced by 0, as PyTorch's own attention does for rows without keys.
    """

    value: ir.Value
    product: ir.Node
    position: int
    guarded: bool


def is_candidate(softmax: ir.Node) -> bool:
    """Whether the result of a softmax comes to a product of two computed tensors."""
    pending = [(softmax.outputs[0], 0)]
    while pending:
        value, steps = pending.pop()
        for node, _ in value.uses():
            if is_product(node):
                return True
            if node.domain == "" and node.op_type in _PASSED and steps < _MAX_STEPS:
                pending.append((node.outputs[0], steps + 1))
    return False


def read_weights(softmax: ir.Node) -> Weights:
    """Walk from a softmax to the product with V.

    Raises:
        NotFused: The weights are used elsewhere too, or changed on the way.
    """
    value, guarded = softmax.outputs[0], False
    passed = list[ir.Value]()
    for _ in range(_MAX_STEPS):
        after = _after_guard(value)
        if after is not None:
            value, guarded = after, True
            continue
        node, position = _only_use(value)
        if is_product(node):
            _check_casts(value, passed)
            return Weights(value=value, product=node, position=position, guarded=guarded)
        _check_passed(node)
        passed.append(value)
        value = node.outputs[0]
    raise NotFused("The way from the softmax to the product with V is too long.")


def _only_use(value: ir.Value) -> tuple[ir.Node, int]:
    if value.is_graph_output():
        raise NotFused("The attention weights are an output of the graph.", got=value.name)
    uses = list(value.uses())
    if len(uses) != 1:
        others = [node for node, _ in uses if not is_product(node)]
        named = ", ".join(f"{node.op_type} at {place_of(node) or node.name}" for node in others)
        raise NotFused("The attention weights are used elsewhere too.", got=named or f"{len(uses)} products")
    return uses[0].node, uses[0].idx


def _check_passed(node: ir.Node) -> None:
    if is_op(node, "Dropout"):
        training = array_of(node.inputs[2]) if len(node.inputs) > 2 else None
        if len(node.inputs) > 2 and node.inputs[2] is not None and (training is None or bool(training.any())):
            raise NotFused("Dropout of the weights is active: export the module in eval mode.", got=node.name)
    elif not is_op(node, "Cast", "Identity"):
        raise NotFused(f"{node.op_type} stands between the softmax and the product with V.", got=node.name)


def _check_casts(value: ir.Value, passed: list[ir.Value]) -> None:
    """The weights may be rounded once, to the type that the product takes: so does Attention."""
    lossy = [each.dtype for each in passed if not holds(each.dtype, value.dtype)]
    if lossy:
        raise NotFused("The attention weights are rounded on the way to V.", got=", ".join(map(str, lossy)))


def _after_guard(value: ir.Value) -> ir.Value | None:
    """The result of `Where(IsNaN(weights), 0, weights)`, if that is what becomes of the weights."""
    uses = [node for node, _ in value.uses()]
    if len(uses) != 2 or value.is_graph_output():
        return None
    check = next((node for node in uses if is_op(node, "IsNaN")), None)
    choice = next((node for node in uses if is_op(node, "Where")), None)
    if check is None or choice is None or len(check.outputs[0].uses()) != 1:
        return None
    right = choice.inputs[0] is check.outputs[0] and scalar_of(choice.inputs[1]) == 0.0
    return choice.outputs[0] if right and choice.inputs[2] is value else None
