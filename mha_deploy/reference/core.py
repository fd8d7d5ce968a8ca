"""Scaled dot-product attention, three ways to compute one function.

    head_i = softmax(Q_i K_iᵀ · scale + mask) V_i        i = 1 … Hq

`sdpa`   PyTorch's fused kernel: what the layer runs by default.
`plain`  matmul, softmax, matmul, as a textbook writes it.
`onnx`   one ONNX `Attention` node when exported, instead of what PyTorch would decompose it into.

All three read and write heads side by side, [B, length, heads·D], the layout that leaves and enters the
projections: splitting them is the business of the attention, not of its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mha_deploy.reference.masks import merge_causal

PATHS = ("sdpa", "plain", "onnx")
_WEIGHTS_AFTER_SOFTMAX = 3  # ONNX Attention's qk_matmul_output_mode


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How the heads are laid out and scored."""

    Hq: int
    Hkv: int
    scale: float
    causal: bool = False
    weights: bool = False


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads: Heads, path: str = "sdpa"
) -> tuple[Tensor, Tensor | None]:
    """Compute all heads.

    Args:
        q: Queries [B, S, Hq·D].
        k: Keys [B, T, Hkv·D].
        v: Values [B, T, Hkv·D].
        mask: Boolean or float mask that broadcasts to [B, Hq, S, T].
        heads: How the heads are laid out and scored.
        path: One of `PATHS`.

    Returns:
        The heads side by side [B, S, Hq·D], and the attention weights [B, Hq, S, T] if asked for.
        A query that may see no key at all gives zeros, never NaN.
    """
    if path == "onnx":
        return _attend_onnx(q, k, v, mask, heads)
    q, k, v = split_heads(q, heads.Hq), split_heads(k, heads.Hkv), split_heads(v, heads.Hkv)
    if path == "plain":
        weights = _attention_weights(q, k, mask, heads)
        out = weights @ _repeat_kv(v, heads)
        return merge_heads(out), weights if heads.weights else None
    out = _fused_kernel(q, k, v, mask, heads)  # which keeps its weights to itself
    return merge_heads(out), _attention_weights(q, k, mask, heads) if heads.weights else None


def split_heads(x: Tensor, H: int) -> Tensor:
    """[B, length, H·D] -> [B, H, length, D]."""
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, length, D] -> [B, length, H·D]."""
    return x.transpose(1, 2).flatten(2)


def _attention_weights(q: Tensor, k: Tensor, mask: Tensor | None, heads: Heads) -> Tensor:
    """softmax(Q Kᵀ · scale + mask). [B, Hq, S, D], [B, Hkv, T, D] -> [B, Hq, S, T]."""
    scores = q @ _repeat_kv(k, heads).transpose(-1, -2) * heads.scale
    S, T = scores.shape[-2:]
    if heads.causal:
        mask = merge_causal(mask, S, T, q.device)
    if mask is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    sees_nothing = scores.isneginf().all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(sees_nothing, 0.0)


def _repeat_kv(x: Tensor, heads: Heads) -> Tensor:
    """Give every query head its own copy of the K or V it shares. [B, Hkv, T, D] -> [B, Hq, T, D]."""
    return x if heads.Hq == heads.Hkv else x.repeat_interleave(heads.Hq // heads.Hkv, dim=1)


def _fused_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads: Heads) -> Tensor:
    # PyTorch takes a mask or is_causal, not both.
    if heads.causal and mask is not None:
        mask = merge_causal(mask, q.shape[2], k.shape[2], q.device)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=heads.causal and mask is None,
        scale=heads.scale,
        enable_gqa=heads.Hq != heads.Hkv,
    )
    return out if mask is None else _blank_where_nothing_is_seen(out, mask)


def _blank_where_nothing_is_seen(out: Tensor, mask: Tensor) -> Tensor:
    """Zeros for queries without any key: PyTorch's half-precision CUDA kernels give other numbers there."""
    sees = mask if mask.dtype == torch.bool else ~mask.isneginf()
    return out.masked_fill(~sees.any(-1, keepdim=True), 0.0)


def _attend_onnx(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads: Heads
) -> tuple[Tensor, Tensor | None]:
    if mask is not None:
        # ONNX lets a mask broadcast over the queries; ONNX Runtime's CPU kernel does not.
        mask = mask.expand(mask.shape[0], mask.shape[1], q.shape[1], k.shape[1])
    out, _, _, weights = torch.onnx.ops.attention(
        q,
        k,
        v,
        mask,
        is_causal=heads.causal,
        q_num_heads=heads.Hq,
        kv_num_heads=heads.Hkv,
        scale=heads.scale,
        qk_matmul_output_mode=_WEIGHTS_AFTER_SOFTMAX if heads.weights else 0,
    )
    return out, weights if heads.weights else None
