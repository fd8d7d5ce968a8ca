"""The node of the attention plugin, and its reference operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from onnx.reference.op_run import OpRun

# -- What the nodes of our TensorRT plugin are called: the lowering writes these names, engines ----

OP_TYPE: Final = "MhaDeployAttention"
LINEAR: Final = "MhaDeployLinear"
DOMAIN: Final = "mha_deploy"
VERSION: Final = "1"
"""The version of both nodes: their attributes, inputs and meaning. Another meaning is another version."""

VERSION_ATTRIBUTE: Final = "plugin_version"
NAMESPACE_ATTRIBUTE: Final = "plugin_namespace"

NONE, TOP_LEFT, BOTTOM_RIGHT = range(3)
"""Values of the attribute `causal`: where the diagonal ends at which a query stops to see keys."""

NO_WINDOW: Final = -1
"""The value of `left_window` and `right_window` that leaves a side open."""


def is_plugin_attention(node: ir.Node) -> bool:
    """Whether a node is one whole attention of the plugin."""
    return (node.domain, node.op_type) == (DOMAIN, OP_TYPE)


def lookup_attributes() -> dict[str, Any]:
    """The attributes by which TensorRT finds the plugin of a node."""
    return {VERSION_ATTRIBUTE: VERSION, NAMESPACE_ATTRIBUTE: DOMAIN}


# -- The plugin's nodes in numpy, so that a model lowered to them runs without a GPU, slowly -------


class MhaDeployAttention(OpRun):
    """One whole attention."""

    op_domain = DOMAIN

    def _run(self, *inputs: np.ndarray, **attributes: Any) -> tuple[np.ndarray, ...]:
        given = Given(inputs, attributes)
        q, k, v = (given.heads(which) for which in range(3))
        if not given.past:
            return (_attend(given, q, k, v, given.key_counts(k.shape[2])),)
        states = [_append(past, new, given.starts) for past, new in zip(given.past, (k, v), strict=True)]
        keys, values = (state.astype(np.float64) for state in states)
        counts = given.starts + q.shape[2]
        return (_attend(given, q, keys, values, counts), *states)


class MhaDeployLinear(OpRun):
    """One projection."""

    op_domain = DOMAIN

    def _run(
        self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None, **attributes: Any
    ) -> tuple[np.ndarray]:
        y = x.astype(np.float64) @ weight.astype(np.float64)
        if attributes["has_bias"] != (bias is not None):
            raise ValueError("has_bias does not say whether there is a bias.")
        return ((y if bias is None else y + bias.astype(np.float64)).astype(x.dtype),)


REFERENCE_OPERATORS: list[type[OpRun]] = [MhaDeployAttention, MhaDeployLinear]
"""What ONNX's reference evaluator needs to run a model with the plugin's nodes."""


class Given:
    """The inputs of one node by their meaning.

    Args:
        inputs: In the node's order, without those that it has not.
        attributes: The node's.
    """

    def __init__(self, inputs: Sequence[np.ndarray], attributes: dict[str, Any]) -> None:
        self.attributes = attributes
        rest: Iterator[np.ndarray] = iter(inputs)
        self.operands = [next(rest) for _ in range(1 + max(attributes["sources"]))]
        self.bias = next(rest) if attributes["has_bias"] else None
        self.key_lengths = next(rest) if attributes["has_key_lengths"] else None
        self.gates = next(rest) if attributes["has_gates"] else None
        self.past = [next(rest), next(rest)] if attributes["has_cache"] else []
        self.starts = next(rest) if attributes["has_cache"] else np.zeros(0, np.int32)
        if next(rest, None) is not None:
            raise ValueError("The node has more inputs than its attributes say.")
        for counts in (self.key_lengths, self.starts):
            if counts is not None and counts.dtype != np.int32:
                raise ValueError(f"Lengths and starts are int32, not {counts.dtype}.")

    def heads(self, which: int) -> np.ndarray:
        """Queries, keys or values as `[B, H, L, D]`, in float64."""
        count = self.attributes["query_heads" if which == 0 else "key_heads"]
        size = self.attributes["value_size" if which == 2 else "head_size"]
        operand = self.operands[self.attributes["sources"][which]]
        offset = self.attributes["offsets"][which]
        wide = operand.astype(np.float64)
        if operand.ndim == 4:
            if operand.shape[1::2] != (count, size) or offset:
                raise ValueError(f"Operand {operand.shape} is not [B, {count}, L, {size}] at offset 0.")
            return wide
        if offset + count * size > operand.shape[2]:
            raise ValueError(f"A row of {operand.shape} has no {count} heads of {size} from {offset} on.")
        rows = wide[:, :, offset : offset + count * size]
        return rows.reshape(*rows.shape[:2], count, size).transpose(0, 2, 1, 3)

    def key_counts(self, T: int) -> np.ndarray:
        """How many keys each batch row has."""
        if self.key_lengths is None:
            return np.full(self.operands[0].shape[0], T)
        return np.clip(self.key_lengths, 0, T)


def _append(past: np.ndarray, new: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The cache with the new rows in it."""
    S, present = new.shape[2], past.copy()
    for b, start in enumerate(starts):
        if start < 0 or start + S > past.shape[2]:
            raise ValueError(f"A cache of {past.shape[2]} rows has no room for {S} behind {start}.")
        present[b, :, start : start + S] = new[b].astype(past.dtype)
    return present


def _attend(given: Given, q: np.ndarray, k: np.ndarray, v: np.ndarray, counts: np.ndarray) -> np.ndarray:
    attributes, (B, H, S, _) = given.attributes, q.shape
    group = H // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = attributes["scale"] * np.einsum("bhsd,bhtd->bhst", q, k)
    if given.bias is not None:
        _check_bias(given.bias, scores.shape)
        scores = scores + given.bias.astype(np.float64)
    seen = np.stack([_seen(attributes, S, k.shape[2], int(count)) for count in counts])
    weights = _softmax(np.where(seen[:, None], scores, -np.inf))
    # What nobody sees may be NaN here; the plugin wants finite numbers there.
    some = np.any(seen, axis=1).reshape(B, 1, -1, 1)
    y = np.einsum("bhst,bhtd->bshd", weights, np.where(some, v, 0.0))
    if given.gates is not None:
        y = y * given.gates.astype(np.float64)[..., None]
    return y.reshape(B, S, -1).astype(given.operands[0].dtype)


def _check_bias(bias: np.ndarray, shape: tuple[int, ...]) -> None:
    fits = bias.ndim == 4 and bias.shape[2:] == shape[2:]
    if not fits or any(size not in (1, whole) for size, whole in zip(bias.shape[:2], shape[:2], strict=True)):
        raise ValueError(f"A bias is [B or 1, Hq or 1, S, T] of {shape}, not {bias.shape}.")


def _seen(attributes: dict[str, Any], S: int, T: int, count: int) -> np.ndarray:
    """True where query i sees key j, `[S, T]`, in a batch row of so many keys."""
    causal, left, right = (attributes[name] for name in ("causal", "left_window", "right_window"))
    key, own = np.arange(T)[None, :], np.arange(S)[:, None]
    if causal == BOTTOM_RIGHT:
        own = own + count - S
    seen = np.broadcast_to(key < count, (S, T))
    if causal != NONE:
        seen = seen & (key <= own)
    if left >= 0:
        seen = seen & (key >= own - left)
    if right >= 0:
        seen = seen & (key <= own + right)
    return seen


def _softmax(scores: np.ndarray) -> np.ndarray:
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isneginf(top), 0.0, top))
    total = weights.sum(axis=-1, keepdims=True)
    return np.asarray(weights / np.where(total == 0, 1.0, total))
