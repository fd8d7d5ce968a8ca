"""Attention behind a cache, as the ONNX nodes that an export writes.

    growing   Attention(Q, K, V, past_key, past_value)  ->  heads, present_key, present_value
    static    TensorScatter(cache, new rows, lengths)   ->  the cache with the new rows, for keys and values
              Attention(Q, keys, values, nonpad_kv_seqlen = lengths + S)

`is_causal` of either node counts from the first new key: query i sees what was there before, and the new keys
up to its own. A window has no attribute in these operator sets and becomes a mask.

PyTorch has stand-ins for these nodes that compute something else (its causal mask starts in the upper left
corner), so they can be exported and not run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mha_deploy.errors import DeployError
from mha_deploy.reference.core import Heads, merge_heads, split_heads

_OPSET = 24  # the first with TensorScatter and nonpad_kv_seqlen


def attend_growing(
    q: Tensor, k: Tensor, v: Tensor, past: tuple[Tensor, Tensor], mask: Tensor | None, heads: Heads
) -> tuple[Tensor, Tensor, Tensor]:
    """One Attention node that joins the past and the new rows.

    Args:
        q: Queries [B, S, Hq·D].
        k: New keys [B, S, Hkv·D].
        v: New values [B, S, Hkv·D].
        past: Earlier keys and values, [B, Hkv, P, D] each.
        mask: What hides keys, [S, P+S]; None for nothing but what is ahead.
        heads: How the heads are laid out and scored.

    Returns:
        The heads side by side [B, S, Hq·D], and all keys and values, [B, Hkv, P+S, D].
    """
    _refuse_to_run()
    out, keys, values, _ = torch.onnx.ops.attention(
        q,
        k,
        v,
        mask,
        *past,
        is_causal=mask is None,
        q_num_heads=heads.Hq,
        kv_num_heads=heads.Hkv,
        scale=heads.scale,
        softcap=heads.softcap or 0.0,
    )
    return out, keys, values


def attend_static(
    q: Tensor,
    new: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    lengths: Tensor,
    mask: Tensor | None,
    heads: Heads,
) -> tuple[Tensor, Tensor, Tensor]:
    """Two TensorScatter nodes that write the new rows, and an Attention that knows how many are valid.

    Args:
        q: Queries [B, S, Hq·D].
        new: New keys and values, [B, Hkv, S, D] each.
        caches: The buffers, [B, Hkv, T, D] each.
        lengths: Valid rows before this call, int32 [B].
        mask: What hides keys, [B, 1, S, T]; None for nothing but what is ahead.
        heads: How the heads are laid out and scored.

    Returns:
        The heads side by side [B, S, Hq·D], and the buffers with the new rows in them.
    """
    _refuse_to_run()
    starts = lengths.long()
    keys, values = (
        _node("TensorScatter", [cache, rows, starts], {"axis": 2}, like=cache)
        for cache, rows in zip(caches, new, strict=True)
    )
    attributes: dict[str, Any] = {"is_causal": int(mask is None), "scale": heads.scale}
    if heads.softcap is not None:
        attributes["softcap"] = heads.softcap
    queries = split_heads(q, heads.Hq)
    inputs = [queries, keys, values, mask, None, None, starts + q.shape[1]]
    return merge_heads(_node("Attention", inputs, attributes, like=queries)), keys, values


def _node(op_type: str, inputs: list[Tensor | None], attributes: dict[str, Any], *, like: Tensor) -> Tensor:
    """One node of ONNX's own operators, whose output has the type and shape of `like`."""
    return torch.onnx.ops.symbolic(
        op_type, inputs, attributes, dtype=like.dtype, shape=like.shape, version=_OPSET
    )


def _refuse_to_run() -> None:
    if not torch.compiler.is_exporting():
        raise DeployError(
            "PyTorch cannot run the ONNX nodes of a cache, only export them.",
            got="path = onnx",
            hint="path sdpa or plain to compute the layer",
        )
