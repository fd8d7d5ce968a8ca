"""Take a boolean mask apart: the conditions that all must hold, without those that always do."""

from __future__ import annotations

import onnx_ir as ir

from mha_deploy.graph.fuse.facts import adds_leading_ones, is_op
from mha_deploy.graph.fuse.triangle import triangle_of

_MAX_PARTS = 64  # more than any model needs; bounds the walk in a hostile file

Condition = tuple[ir.Value, bool]
"""A boolean tensor, and the value of it that shows a key."""


def conditions_of(condition: ir.Value, shown: bool) -> list[Condition]:
    """The conditions that together show a key, those that always hold left out.

    A copy over more rows (Expand) is taken before copying: a mask is broadcast anyway.

    Args:
        condition: A boolean tensor.
        shown: The value of it that shows a key.
    """
    found: list[Condition] = []
    pending: list[Condition] = [(condition, shown)]
    while pending and len(found) + len(pending) < _MAX_PARTS:
        value, shown = pending.pop()
        inner = _inner(value, shown)
        if inner is not None:
            pending.extend(reversed(inner))
        elif not _always(value, shown) and (value, shown) not in found:
            found.append((value, shown))
    return found + pending


def _inner(value: ir.Value, shown: bool) -> list[Condition] | None:
    """What a condition consists of; None for one that is not made of others."""
    node = value.producer()
    inputs = [] if node is None else [each for each in node.inputs if each is not None]
    if node is None or not inputs or len(inputs) < len(node.inputs):
        return None
    if is_op(node, "Not"):
        return [(inputs[0], not shown)]
    if is_op(node, "And" if shown else "Or"):
        return [(each, shown) for each in inputs]
    if is_op(node, "Identity", "Expand") or adds_leading_ones(node):
        return [(inputs[0], shown)]
    return None


def _always(value: ir.Value, shown: bool) -> bool:
    """Whether a condition shows every key."""
    found = triangle_of(value)
    return found is not None and bool(found.seen) == shown == bool(found.hidden)
