"""The keys that queries behind a cache meet, and which of them they see."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mha_deploy.graph.attention_node import AttentionNode, Dim


def by_head(array: np.ndarray, heads: Dim) -> np.ndarray:
    """[B, length, heads·D] or [B, heads, length, D] -> [B, heads, length, D]."""
    if array.ndim == 4 or not isinstance(heads, int):
        return array
    return array.reshape(*array.shape[:2], heads, -1).swapaxes(1, 2)


def valid_only(facts: AttentionNode, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs with zeros behind the valid rows of K and V: what memory holds there means nothing."""
    if not facts.has_nonpad_kv_seqlen:
        return dict(given)
    found = dict(given)
    for role in ("K", "V"):
        rows = by_head(given[role], facts.Hkv)
        valid = np.arange(rows.shape[2]) < given["lengths"].reshape(-1, 1)
        found[role] = np.where(valid[:, None, :, None], rows, rows.dtype.type(0))
    return found


def all_keys(facts: AttentionNode, given: Mapping[str, np.ndarray], k: np.ndarray) -> np.ndarray:
    """The past, where there is one, and the keys of the call. [B, Hkv, T, D]."""
    return np.concatenate((given["past"].astype(k.dtype), k), axis=2) if facts.has_past else k


def visible_keys(facts: AttentionNode, given: Mapping[str, np.ndarray], S: int, T: int) -> np.ndarray | None:
    """What the given mask, causality and the number of valid keys leave to see, as one boolean mask.

    Args:
        facts: What the attention says.
        given: Its inputs as a probe shows them.
        S: Queries.
        T: Keys, past included.

    Returns:
        [1|B, 1, S, T], joined with a given boolean mask; None where there is no cache, so that the node's own
        mask and `is_causal` say everything.
    """
    if not facts.has_past and not facts.has_nonpad_kv_seqlen:
        return None
    ends = given["lengths"].reshape(-1, 1, 1, 1) if facts.has_nonpad_kv_seqlen else np.full((1, 1, 1, 1), T)
    keys, queries = np.arange(T), np.arange(S)[:, None]
    seen = (
        keys <= ends - S + queries if facts.is_causal else np.broadcast_to(keys < ends, (len(ends), 1, S, T))
    )
    mask = given.get("mask")
    return seen if mask is None else seen & mask
