"""Reshapes and transposes behind the plugin's attention that undo each other.

The node gives out rows, `[B, S, Hq·Dv]`. An attention that was written with heads first is followed by a
Reshape and a Transpose to `[B, Hq, S, Dv]`; most models then turn that back at once, and nothing need move.
"""

from __future__ import annotations

import onnx_ir as ir

from mha_deploy.graph.lower.call import same_size
from mha_deploy.graph.lower.plugin_operands import TURN, dims, perm, rank


def cancel_turns(attention: ir.Node) -> None:
    """Let readers of the attention that turn its heads back read what there was before."""
    for rows in _rows_of(attention):
        _cancel_behind(rows)


def _rows_of(attention: ir.Node) -> list[ir.Value]:
    """The rows that the node gives out, and those rows with the empty ones set to zero."""
    rows = attention.outputs[0]
    found, pending = [rows], [rows]
    while pending:
        for use in pending.pop().uses():
            same = use.node.outputs[0]
            if use.node.op_type == "Where" or (use.node.op_type == "Reshape" and use.idx == 0):
                pending.append(same)
                found += [same] if _is_whole_again(rows, same) else []
    return found


def _cancel_behind(rows: ir.Value) -> None:
    for split in _readers(rows, "Reshape"):
        for turn in _readers(split.outputs[0], "Transpose"):
            if perm(turn) != TURN:
                continue
            for back in _readers(turn.outputs[0], "Transpose"):
                if perm(back) == TURN:
                    _take_over(back.outputs[0], split.outputs[0])
        for merge in _readers(split.outputs[0], "Reshape"):
            if _is_whole_again(rows, merge.outputs[0]):
                _take_over(merge.outputs[0], rows)


def _readers(value: ir.Value, op_type: str) -> list[ir.Node]:
    nodes = (use.node for use in value.uses() if use.idx == 0)
    return [node for node in nodes if (node.domain, node.op_type) == ("", op_type)]


def _is_whole_again(rows: ir.Value, merged: ir.Value) -> bool:
    """Whether a reshape of rows gives the rows back: same width, and the same batch or the same length."""
    before, after = dims(rows), dims(merged)
    if rank(merged) != 3 or not same_size(before[2], after[2]):
        return False
    return any(same_size(before[at], after[at]) for at in (0, 1))


def _take_over(old: ir.Value, new: ir.Value) -> None:
    """Let everybody read another value; a graph output keeps its own name, and its own node."""
    if old.is_graph_output():
        return
    old.replace_all_uses_with(new)
