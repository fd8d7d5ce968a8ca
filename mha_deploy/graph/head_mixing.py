"""Why attention with talking heads is not fused: a projection across heads, before or behind its softmax.

`graph/fuse/` names the first node that it cannot read, which may be a Transpose beside the projection.
Nothing here changes what is fused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import onnx_ir as ir

from mha_deploy.graph.ir import is_op, node_name, nodes_behind, weight_behind
from mha_deploy.graph.roles import CARRIES, MATMULS

# What scores and weights pass besides: scale, mask, bias, types, dropout.
_PASSED = (*CARRIES, "Cast", "Add", "Sub", "Mul", "Div", "Where", "Dropout", "Clip", "Max", "Min")
_MOST_STEPS = 32


def head_mixing(softmax: ir.Node) -> str | None:
    """Which projections across heads there are around a softmax, in words; None where there are none."""
    if not is_op(softmax, "Softmax", "Div"):  # or exponentials over their sum
        return None
    shape = softmax.outputs[0].shape
    if shape is not None and len(shape) != 4:
        return None
    heads = shape[1] if shape is not None and isinstance(shape[1], int) else None
    sides = {"before": _before(softmax), "behind": _behind(softmax)}
    places = [
        f"{node.op_type} {node_name(node)} {side} the softmax"
        for side, nodes in sides.items()
        for node in nodes
        if _mixes(node, heads)
    ]
    if not places:
        return None
    return f"The heads are mixed, and Attention computes each by itself. {', '.join(places)}"


def _before(softmax: ir.Node) -> Iterator[ir.Node]:
    """The nodes that the scores pass, the nearest first, and those with which that ends."""
    passed = nodes_behind(
        softmax.inputs[:1], lambda node: node.inputs if is_op(node, *_PASSED) or _is_projection(node) else ()
    )
    return itertools.islice(passed, _MOST_STEPS)


def _behind(softmax: ir.Node) -> Iterator[ir.Node]:
    """The nodes that the weights pass up to the matmul with V, and that one."""
    pending, seen = [softmax], {softmax}
    for node in pending:  # it grows
        for user in (use.node for value in node.outputs for use in value.uses()):
            if user not in seen and len(seen) < _MOST_STEPS:
                seen.add(user)
                yield user
                pending += [user] if is_op(user, *_PASSED) else []


def _is_projection(node: ir.Node) -> bool:
    return is_op(node, *MATMULS) and any(weight_behind(value) is not None for value in node.inputs)


def _mixes(node: ir.Node, heads: int | None) -> bool:
    """Whether a node is a projection from all heads to as many; None: the file does not state how many."""
    if not _is_projection(node) or node.attributes.get_int("group", 1) != 1:
        return False
    weights = [weight for value in node.inputs if (weight := weight_behind(value)) is not None]
    sizes = [[size for size in weight.shape or () if size != 1] for weight in weights]
    return any(len(each) == 2 and each[0] == each[1] and heads in (None, each[0]) for each in sizes)
