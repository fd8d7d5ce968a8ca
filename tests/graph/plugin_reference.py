"""The plugin's nodes in NumPy, so that ONNX's reference evaluator runs a lowered model without a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from onnx.reference.op_run import OpRun

from mha_deploy.graph.plugin_node import (
    BOTTOM_RIGHT,
    COPY,
    DOMAIN,
    FP8_ONLY,
    FP8_STEP,
    FROM_STARTS,
    GELU,
    GELU_TANH,
    GIVEN,
    LAYER_NORM,
    NONE,
    NOT_FP8,
    PER_TOKEN,
    RMS_NORM,
    NodeSizes,
    why_refused,
)


class MhaDeployAttention(OpRun):
    """One whole attention."""

    op_domain = DOMAIN

    def _run(self, *inputs: np.ndarray, **attributes: Any) -> tuple[np.ndarray, ...]:
        node = NodeInputs(inputs, attributes)
        q, k, v = (node.heads(which) for which in range(3))
        S, T = q.shape[2], k.shape[2]
        if attributes["rotary"]:
            q, k = (node.rotated(heads) for heads in (q, k))
        if attributes["fp8"]:
            scales = (attributes[f"{name}_scale"] for name in ("query", "key", "value"))
            q, k, v = (_on_grid(x, scale) * scale for x, scale in zip((q, k, v), scales, strict=True))
        if not node.past:
            lengths = np.full(len(q), T) if node.key_lengths is None else np.clip(node.key_lengths, 0, T)
            return _outputs(node, _attend(node, q, k, v, lengths))
        states = []
        for past, new in zip(node.past, (k, v), strict=True):
            present = past.copy()
            for b, start in enumerate(node.starts):
                if start < 0 or start + S > past.shape[2]:
                    raise ValueError(f"A cache of {past.shape[2]} entries has no room for {S} after {start}.")
                present[b, :, start : start + S] = new[b].astype(past.dtype)
            states.append(present)
        keys, values = (state.astype(np.float64) for state in states)
        return _outputs(node, _attend(node, q, keys, values, node.starts + S), *states)


class MhaDeployLinear(OpRun):
    """One projection."""

    op_domain = DOMAIN

    def _run(
        self, x: np.ndarray, weight: np.ndarray, *others: np.ndarray, **attributes: Any
    ) -> tuple[np.ndarray]:
        quantized, dtype = attributes["quantized"], x.dtype
        if len(others) != attributes["has_bias"] + bool(quantized):
            raise ValueError("The attributes do not agree with the inputs.")
        factor: np.ndarray | float = 1.0
        if quantized:
            x, weight, dtype = (
                *(each.view(ml_dtypes.float8_e4m3fn) for each in (x, weight)),
                np.dtype(np.float16),
            )
            if x.shape[-1] % FP8_STEP or len(weight) % FP8_STEP or not attributes["transposed"]:
                raise ValueError(f"The plugin has no GEMM in FP8 of {x.shape} and {weight.shape}.")
            if others[-1].dtype != np.float32 or len(others[-1]) != (len(weight) if quantized == 2 else 1):
                raise ValueError(f"The plugin wants other scales than {others[-1].shape}.")
            factor = others[-1].astype(np.float64)
        wide = weight.astype(np.float64)
        y = x.astype(np.float64) @ (wide.T if attributes["transposed"] else wide) * factor
        return ((y + others[0].astype(np.float64) if attributes["has_bias"] else y).astype(dtype),)


class MhaDeployNormActivation(OpRun):
    """Residual and normalization, or an activation."""

    op_domain = DOMAIN

    def _run(self, x: np.ndarray, *others: np.ndarray, **attributes: Any) -> tuple[np.ndarray, ...]:
        y, *sums = self._computed(x, *others, **attributes)
        kept = [y.astype(x.dtype), *(each.astype(x.dtype) for each in sums)][: 1 + attributes["keeps_sum"]]
        if attributes["fp8"] == NOT_FP8:
            return tuple(kept)
        clipped = np.clip(y / attributes["fp8_scale"], -448, 448)
        words = clipped.astype(ml_dtypes.float8_e4m3fn).view(np.int32)
        return (words, *kept[1:]) if attributes["fp8"] == FP8_ONLY else (*kept, words)

    @staticmethod
    def _computed(x: np.ndarray, *others: np.ndarray, **attributes: Any) -> tuple[np.ndarray, ...]:
        rest, wide, operation = iter(others), x.astype(np.float64), attributes["operation"]
        second = next(rest).astype(np.float64) if attributes["has_second"] else None
        if attributes["packed"]:
            wide, second = np.split(wide, 2, axis=-1)
        if operation <= RMS_NORM:
            total = wide if second is None else wide + second
            centred = total - (total.mean(-1, keepdims=True) if operation == LAYER_NORM else 0.0)
            y = centred / np.sqrt(np.mean(centred**2, -1, keepdims=True) + attributes["epsilon"])
            y = y * next(rest).astype(np.float64)
            y = y + next(rest).astype(np.float64) if attributes["has_bias"] else y
            return y, total
        if operation == GELU:
            y = 0.5 * wide * (1 + np.vectorize(math.erf, otypes=[np.float64])(wide / math.sqrt(2)))
        elif operation == GELU_TANH:
            y = 0.5 * wide * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
        else:
            y = wide if operation == COPY else wide / (1 + np.exp(-wide))
        return (y if second is None else y * second,)


REFERENCE_OPERATORS: list[type[OpRun]] = [MhaDeployAttention, MhaDeployLinear, MhaDeployNormActivation]
"""The operators for ONNX's reference evaluator."""


class NodeInputs:
    """The inputs of one attention node by name, from their order and the attributes."""

    def __init__(self, inputs: Sequence[np.ndarray], attributes: dict[str, Any]) -> None:
        self.attributes = attributes
        rest: Iterator[np.ndarray] = iter(inputs)
        self.operands = [next(rest) for _ in range(1 + max(attributes["sources"]))]
        self.bias = next(rest) if attributes["has_bias"] else None
        self.key_lengths = next(rest) if attributes["has_key_lengths"] else None
        self.key_mask = next(rest) if attributes["has_key_mask"] else None
        self.gates = next(rest) if attributes["has_gates"] else None
        self.past = [next(rest), next(rest)] if attributes["has_cache"] else []
        self.starts = next(rest) if attributes["has_cache"] else np.zeros(0, np.int32)
        self.tables = [next(rest), next(rest)] if attributes["rotary"] else []
        given = attributes["rotary"] and attributes["rotary_positions"] == GIVEN
        self.positions = next(rest) if given else None
        if next(rest, None) is not None:
            raise ValueError("The node has more inputs than its attributes state.")
        self._refuse_as_the_plugin_does()
        for counts in (self.key_lengths, self.key_mask, self.starts, self.positions):
            if counts is not None and counts.dtype != np.int32:
                raise ValueError(f"Lengths and starts are int32, not {counts.dtype}.")

    def _refuse_as_the_plugin_does(self) -> None:
        """By the rules that are compared with the plugin's own, and by the sizes of the other inputs.

        Tests use head sizes for which there are no kernels.
        """
        own, (B, R) = self.attributes, (len(self.operands[0]), self.attributes["rotary_size"])
        per_token = own["rotary_positions"] == PER_TOKEN
        rows = 0
        if self.tables:
            rows = math.prod(self.tables[0].shape[: 1 + per_token])
        T = self.past[0].shape[2] if self.past else 0
        bias = () if self.bias is None else self.bias.shape
        sizes = NodeSizes(tuple(each.shape for each in self.operands), bias, T, rows)
        if (reason := why_refused(own, sizes, aligned=1)) is not None:
            raise ValueError(f"The plugin refuses {reason}: {own}, {sizes}")
        S = sizes.rows(own, 0)
        wanted = {
            "key_lengths": (self.key_lengths, (B,)),
            "key_mask": (self.key_mask, (B, sizes.keys(own))),
            "starts": (self.starts if self.past else None, (B,)),
            "gates": (self.gates, (B, S, own["query_heads"])),
            "positions": (self.positions, (B, S)),
        }
        for at, (past, size) in enumerate(zip(self.past, ("head_size", "value_size"), strict=False)):
            wanted[f"past {at}"] = (past, (B, own["key_heads"], T, own[size]))
        for at, table in enumerate(self.tables):
            wanted[f"table {at}"] = (table, (B, S, R // 2) if per_token else (rows, R // 2))
        for name, (given, shape) in wanted.items():
            if given is not None and given.shape != shape:
                raise ValueError(f"The plugin wants {name} of {shape}, not {given.shape}.")

    def heads(self, which: int) -> np.ndarray:
        """Queries, keys or values as `[B, H, L, D]`, in float64."""
        count = self.attributes["query_heads" if which == 0 else "key_heads"]
        size = self.attributes["value_size" if which == 2 else "head_size"]
        operand = self.operands[self.attributes["sources"][which]].astype(np.float64)
        offset = self.attributes["offsets"][which]
        if operand.ndim == 4:
            if operand.shape[1::2] != (count, size) or offset:
                raise ValueError(f"Operand {operand.shape} is not [B, {count}, L, {size}] at offset 0.")
            return operand
        if offset + count * size > operand.shape[2]:
            raise ValueError(f"Operand {operand.shape} has no {count} heads of {size} from {offset} on.")
        part = operand[:, :, offset : offset + count * size]
        return part.reshape(*part.shape[:2], count, size).transpose(0, 2, 1, 3)

    def rotated(self, x: np.ndarray) -> np.ndarray:
        """Queries or keys `[B, H, S, D]` after the rotary embedding, rounded to the type of the operands."""
        (B, _, S, _), own, R = x.shape, self.attributes, self.attributes["rotary_size"]
        rows = np.broadcast_to(np.arange(S), (B, S))
        if own["rotary_positions"] == FROM_STARTS:
            rows = rows + self.starts[:, None]
        elif own["rotary_positions"] == PER_TOKEN:
            rows = np.arange(B * S).reshape(B, S)
        elif self.positions is not None:
            rows = self.positions
        cos, sin = (table.astype(np.float64).reshape(-1, R // 2)[rows][:, None] for table in self.tables)
        pairs = (x[..., :R:2], x[..., 1:R:2]) if own["rotary"] == 2 else np.split(x[..., :R], 2, axis=-1)
        a, b = pairs[0] * cos - pairs[1] * sin, pairs[0] * sin + pairs[1] * cos
        if own["rotary"] == 2:
            first = np.stack((a, b), -1).reshape(*a.shape[:-1], R)
        else:
            first = np.concatenate((a, b), -1)
        y = np.concatenate((first, x[..., R:]), -1)
        return y.astype(self.operands[0].dtype).astype(np.float64)


def _attend(node: NodeInputs, q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    attributes, (B, H, S, _), T = node.attributes, q.shape, k.shape[2]
    k, v = (np.repeat(x, H // k.shape[1], axis=1) for x in (k, v))
    scores = attributes["scale"] * np.einsum("bhsd,bhtd->bhst", q, k)
    if node.bias is not None:
        shape = node.bias.shape
        if len(shape) != 4 or shape[2:] != (S, T) or shape[0] not in (1, B) or shape[1] not in (1, H):
            raise ValueError(f"A bias is [B or 1, Hq or 1, S, T] of {scores.shape}, not {shape}.")
        scores = scores + node.bias.astype(np.float64)
    visible = np.stack([_visible(attributes, S, T, int(length)) for length in lengths])
    if node.key_mask is not None:
        visible = visible & (node.key_mask != 0)[:, None]
    scores = np.where(visible[:, None], scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isneginf(top), 0.0, top))
    total = weights.sum(axis=-1, keepdims=True)
    if attributes["fp8"]:  # before they are divided by their sum, as the kernel does
        weights = _on_grid(weights, attributes["weights_scale"]) * attributes["weights_scale"]
    weights = weights / np.where(total == 0, 1.0, total)
    # Values that no query attends to may be NaN here; the plugin requires finite numbers there.
    used = np.any(visible, axis=1).reshape(B, 1, -1, 1)
    y = np.einsum("bhst,bhtd->bshd", weights, np.where(used, v, 0.0))
    if node.gates is not None:
        y = y * node.gates.astype(np.float64)[..., None]
    if attributes["fp8"]:
        narrow = _on_grid(y.reshape(B, S, -1), attributes["output_scale"])
        return narrow.astype(ml_dtypes.float8_e4m3fn).view(np.int32)
    return y.reshape(B, S, -1).astype(node.operands[0].dtype)


def _outputs(node: NodeInputs, y: np.ndarray, *states: np.ndarray) -> tuple[np.ndarray, ...]:
    """The outputs of an attention, with its result in FP8 as the last one where that is asked for."""
    if not node.attributes["fp8_copy"]:
        return (y, *states)
    narrow = _on_grid(y.astype(np.float64), node.attributes["output_scale"])
    return (y, *states, narrow.astype(ml_dtypes.float8_e4m3fn).view(np.int32))


def _on_grid(x: np.ndarray, scale: float) -> np.ndarray:
    """Numbers divided by a scale and rounded to FP8."""
    return np.clip(x / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def _visible(attributes: dict[str, Any], S: int, T: int, length: int) -> np.ndarray:
    """True where query i attends to key j, `[S, T]`, in a batch element with so many keys."""
    causal, left, right = (attributes[name] for name in ("causal", "left_window", "right_window"))
    key, own = np.arange(T)[None, :], np.arange(S)[:, None]
    if causal == BOTTOM_RIGHT:
        own = own + length - S
    visible = np.broadcast_to(key < length, (S, T))
    if causal != NONE:
        visible = visible & (key <= own)
    if left >= 0:
        visible = visible & (key >= own - left)
    if right >= 0:
        visible = visible & (key <= own + right)
    return visible
