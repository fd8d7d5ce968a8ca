"""Grouped heads without repeated keys: the two matmuls of attention over groups."""

from __future__ import annotations

from typing import Protocol

import onnx_ir as ir

from mha_deploy.graph.ir import NodeBuilder, Size
from mha_deploy.graph.lower.call import AttentionCall
from mha_deploy.graph.lower.masks import Mask

# -- Three ways to let groups of query heads share a key/value head in plain matmuls -------


class GroupForm(Protocol):
    """How queries, keys and bias are laid out for the matmuls, and how a result comes back."""

    def query(self, b: NodeBuilder, call: AttentionCall, q: ir.Value) -> ir.Value:
        """`[B, Hq, S, D]` to the form's layout."""

    def keys(
        self, b: NodeBuilder, call: AttentionCall, x: ir.Value, rows: int | None, columns: int | None
    ) -> ir.Value:
        """`[B, Hkv, rows, columns]`, turned keys or values, to the form's layout; None is the size T."""

    def bias(
        self, b: NodeBuilder, call: AttentionCall, mask: Mask, bias: ir.Value, S: Size, T: Size
    ) -> ir.Value:
        """`[1|B, 1|Hq, 1|S, T]` to the form's layout."""

    def restore(self, b: NodeBuilder, call: AttentionCall, x: ir.Value, last: Size) -> ir.Value:
        """A result, whose last axis has size `last`, back to `[B, Hq, S, last]`."""


class Ungrouped:
    """Every query head has its own key/value head: nothing to do."""

    def query(self, b: NodeBuilder, call: AttentionCall, q: ir.Value) -> ir.Value:
        """The queries as they are."""
        return q

    def keys(
        self, b: NodeBuilder, call: AttentionCall, x: ir.Value, rows: int | None, columns: int | None
    ) -> ir.Value:
        """The keys or values as they are."""
        return x

    def bias(
        self, b: NodeBuilder, call: AttentionCall, mask: Mask, bias: ir.Value, S: Size, T: Size
    ) -> ir.Value:
        """The bias as it is."""
        return bias

    def restore(self, b: NodeBuilder, call: AttentionCall, x: ir.Value, last: Size) -> ir.Value:
        """The result as it is."""
        return x


class Repeat(Ungrouped):
    """Keys and values copied for each query head of a group."""

    def keys(
        self, b: NodeBuilder, call: AttentionCall, x: ir.Value, rows: int | None, columns: int | None
    ) -> ir.Value:
        """`[B, Hkv, ·, ·]` to `[B, Hq, ·, ·]`."""
        copies = b.expand(b.unsqueeze(x, 2), 1, 1, call.group, 1, 1)
        return b.reshape(copies, 0, call.Hq, rows or -1, columns or -1, name="repeated")


class Fold:
    """The query heads of a group as more rows of one head."""

    def query(self, b: NodeBuilder, call: AttentionCall, q: ir.Value) -> ir.Value:
        """`[B, Hq, S, D]` to `[B, Hkv, G·S, D]`: heads of a group lie side by side, so nothing moves."""
        return b.reshape(q, 0, call.Hkv, -1, call.D, name="q_folded")

    def keys(
        self, b: NodeBuilder, call: AttentionCall, x: ir.Value, rows: int | None, columns: int | None
    ) -> ir.Value:
        """The keys or values as they are."""
        return x

    def bias(
        self, b: NodeBuilder, call: AttentionCall, mask: Mask, bias: ir.Value, S: Size, T: Size
    ) -> ir.Value:
        """Repeat the rows for each head of a group, unless one row serves all."""
        if mask.heads == 1 and mask.one_row:
            return bias
        copies, heads = (call.group, 1) if mask.heads == 1 else (call.Hq, call.Hkv)
        rows = b.expand(bias, 1, copies, S, 1)
        return b.reshape(rows, 0, heads, -1, T, name="bias_folded")

    def restore(self, b: NodeBuilder, call: AttentionCall, x: ir.Value, last: Size) -> ir.Value:
        """`[B, Hkv, G·S, ·]` to `[B, Hq, S, ·]`."""
        return b.reshape(x, 0, call.Hq, -1, last, name="unfolded")


class Broadcast:
    """The group as an axis of its own, over which keys and values are broadcast."""

    def query(self, b: NodeBuilder, call: AttentionCall, q: ir.Value) -> ir.Value:
        """`[B, Hq, S, D]` to `[B, Hkv, G, S, D]`."""
        return b.reshape(q, 0, call.Hkv, call.group, -1, call.D, name="q_grouped")

    def keys(
        self, b: NodeBuilder, call: AttentionCall, x: ir.Value, rows: int | None, columns: int | None
    ) -> ir.Value:
        """`[B, Hkv, ·, ·]` to `[B, Hkv, 1, ·, ·]`."""
        return b.unsqueeze(x, 2)

    def bias(
        self, b: NodeBuilder, call: AttentionCall, mask: Mask, bias: ir.Value, S: Size, T: Size
    ) -> ir.Value:
        """`[·, 1|Hq, ·, T]` to `[·, 1|Hkv, 1|G, ·, T]`."""
        if mask.heads == 1:
            return b.unsqueeze(bias, 1)
        return b.reshape(bias, 0, call.Hkv, call.group, -1, T, name="bias_grouped")

    def restore(self, b: NodeBuilder, call: AttentionCall, x: ir.Value, last: Size) -> ir.Value:
        """`[B, Hkv, G, S, ·]` to `[B, Hq, S, ·]`."""
        return b.reshape(x, 0, call.Hq, -1, last, name="ungrouped")


GROUP_FORMS: dict[str, GroupForm] = {"fold": Fold(), "broadcast": Broadcast(), "repeat": Repeat()}
"""The ways to share heads, by the name of the option."""

AUTO = "auto"
GROUP_CHOICES = (AUTO, *GROUP_FORMS)


def group_form(call: AttentionCall, name: str) -> GroupForm:
    """The form to use for this attention: none where the heads are not shared.

    `auto` folds. Not so with a single key/value head: TensorRT 8.6 builds the folded form of it, and the
    engine fails at some sizes and is wrong at others.
    """
    if call.group == 1:
        return Ungrouped()
    if name == AUTO:
        name = "repeat" if call.Hkv == 1 else "fold"
    return GROUP_FORMS[name]


# -- The steps of attention in matmuls, shared by the forms with and without a cache be ----


def scale_query(b: NodeBuilder, call: AttentionCall, q: ir.Value) -> ir.Value:
    """The queries times the scale."""
    return q if call.scale == 1.0 else b.op("Mul", q, b.constant(call.scale, call.dtype), name="q_scaled")


def scores_of(b: NodeBuilder, call: AttentionCall, form: GroupForm, q: ir.Value, k: ir.Value) -> ir.Value:
    """Q·Kᵀ.

    Args:
        b: Builder of the new nodes.
        call: The attention.
        form: How grouped heads are laid out.
        q: Scaled queries in the layout of the form.
        k: Keys `[B, Hkv, ·, D]`.
    """
    keys = b.transpose(k, 0, 1, 3, 2, name="k_transposed")
    return b.op("MatMul", q, form.keys(b, call, keys, call.D, None), name="scores")


def turned_scores_of(
    b: NodeBuilder, call: AttentionCall, form: GroupForm, q: ir.Value, k: ir.Value
) -> ir.Value:
    """The same scores as K·Qᵀ, turned: keys that come from memory are read as they lie there.

    TensorRT-RTX 1.7.1 writes a turned copy of a whole cache before Q·Kᵀ, and none here.
    """
    perm = (0, 1, 2, 4, 3) if isinstance(form, Broadcast) else (0, 1, 3, 2)
    query = b.transpose(q, *perm, name="q_transposed")
    matmul = b.op("MatMul", form.keys(b, call, k, None, call.D), query, name="scores")
    return b.transpose(matmul, *perm, name="scores_turned")


def softcap(b: NodeBuilder, call: AttentionCall, scores: ir.Value) -> ir.Value:
    """Bound the scores: softcap · tanh(scores / softcap)."""
    if call.facts.softcap <= 0:
        return scores
    cap = b.constant(call.facts.softcap, call.dtype)
    return b.op("Mul", b.op("Tanh", b.op("Div", scores, cap)), cap, name="scores_capped")


def softmax(b: NodeBuilder, call: AttentionCall, scores: ir.Value) -> ir.Value:
    """Softmax over the keys, in the precision the node asks for."""
    precision = call.node.attributes.get_int("softmax_precision", None)
    if precision is None or precision == call.dtype:
        return b.op("Softmax", scores, axis=-1, name="weights")
    wide = b.op("Cast", scores, to=precision)
    return b.op("Cast", b.op("Softmax", wide, axis=-1), to=int(call.dtype), name="weights")


def weighted_values(
    b: NodeBuilder, call: AttentionCall, form: GroupForm, weights: ir.Value, v: ir.Value
) -> ir.Value:
    """The weights times values `[B, Hkv, ·, Dv]`."""
    return b.op("MatMul", weights, form.keys(b, call, v, None, call.Dv), name="weighted_values")
