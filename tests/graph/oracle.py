"""Attention by its definition, in float64: slow, short, and independent of the lowerings.

ONNX's reference evaluator is not used as the judge because it misplaces the causal mask when the given mask
is broadcast over queries (onnx 1.23.2).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from mha_deploy.graph.attention_node import AttentionNode, attention_nodes

_ROLES = ("q", "k", "v", "mask", "past_key", "past_value", "lengths")


def attend(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs of a model that is one Attention node."""
    (facts,) = attention_nodes(model)
    (node,) = list(model.graph)
    given = {role: feeds[x.name] for role, x in zip(_ROLES, node.inputs, strict=False) if x is not None}
    q, k, v = _heads(facts, given)
    capped = raw = facts.softmax_scale * np.einsum("bhsd,bhtd->bhst", q, _per_query_head(facts, k))
    if facts.softcap:
        capped = facts.softcap * np.tanh(raw / facts.softcap)
    bias = _bias(facts, given, q, k)
    weights = _softmax(capped + bias)
    y = weights @ _per_query_head(facts, v)
    if facts.rank == 3:
        y = y.transpose(0, 2, 1, 3).reshape(*y.shape[:1], y.shape[2], y.shape[1] * y.shape[3])
    stages = (raw, capped, capped + bias, weights)
    outputs = (y, k, v, stages[facts.qk_output_mode or 0])
    return [array for array, output in zip(outputs, node.outputs, strict=False) if output.name]


def _heads(facts: AttentionNode, given: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    q, k, v = (given[role].astype(np.float64) for role in "qkv")
    if facts.rank == 3:
        counts = (facts.Hq, facts.Hkv, facts.Hkv)
        q, k, v = (
            x.reshape(*x.shape[:2], count, x.shape[2] // count).transpose(0, 2, 1, 3)
            for x, count in zip((q, k, v), counts, strict=True)
        )
    if facts.has_past:
        k = np.concatenate([given["past_key"].astype(np.float64), k], axis=2)
        v = np.concatenate([given["past_value"].astype(np.float64), v], axis=2)
    return q, k, v


def _per_query_head(facts: AttentionNode, x: np.ndarray) -> np.ndarray:
    return np.repeat(x, facts.group or 1, axis=1)


def _bias(facts: AttentionNode, given: dict[str, np.ndarray], q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """One number for each batch element, head, query and key, found one at a time."""
    (B, H, S, _), T = q.shape, k.shape[2]
    mask = _full_mask(given.get("mask"), (B, H, S, T))
    lengths = given.get("lengths", np.full(B, T))
    bias = np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask
    for b, i, j in np.ndindex(B, S, T):
        offset = (
            T - k_new(facts, given) if facts.has_past else int(lengths[b]) - S if "lengths" in given else 0
        )
        p = i + offset
        hidden = (
            (facts.is_causal and j > p)
            or (facts.left_window >= 0 and j < p - facts.left_window)
            or (facts.right_window >= 0 and j > p + facts.right_window)
            or j >= lengths[b]
        )
        if hidden:
            bias[b, :, i, j] = -np.inf
    return bias


def k_new(facts: AttentionNode, given: dict[str, np.ndarray]) -> int:
    """How many keys are new."""
    return given["k"].shape[1 if facts.rank == 3 else 2]


def _full_mask(mask: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    if mask is None:
        return np.ones(shape, bool)
    mask = mask if mask.dtype == bool else mask.astype(np.float64)
    missing = shape[-1] - mask.shape[-1]
    fill = False if mask.dtype == bool else -np.inf
    padded = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)], constant_values=fill)
    return np.broadcast_to(padded, shape).copy()


def _softmax(scores: np.ndarray) -> np.ndarray:
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isneginf(top), 0.0, top))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total == 0, 1.0, total)
