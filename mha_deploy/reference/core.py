"""Scaled dot-product attention, three ways to compute one function.

    head_i = softmax(cap(Q_i K_iᵀ · scale) + mask) V_i        i = 1 … Hq
    cap(s) = softcap · tanh(s / softcap), or s where there is no softcap

`sdpa`   PyTorch's fused kernel: what the layer runs by default.
`plain`  matmul, softmax, matmul, as a textbook writes it.
`onnx`   one ONNX `Attention` node when exported, instead of what PyTorch would decompose it into.

All three read and write heads side by side, [B, length, heads·D], the layout that leaves and enters the
projections: splitting them is the business of the attention, not of its neighbours.

PyTorch's fused kernel has no softcap: with one, `sdpa` computes what `plain` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mha_deploy.errors import DeployError
from mha_deploy.reference.masks import merge_causal

PATHS = ("sdpa", "plain", "onnx")
_WEIGHTS_AFTER_SOFTMAX = 3  # ONNX Attention's qk_matmul_output_mode


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How the heads are laid out and scored.

    Args:
        Hq: Query heads.
        Hkv: Key/value heads.
        scale: Factor on the scores.
        causal: Whether query s, at position past + s, sees only keys at or before that position.
        weights: Whether the attention weights are asked for.
        window: How many keys a causal query sees, itself included.
        softcap: Bound of the scores.
        past: How many of the keys come before the first query.
        sees_itself: Whether every query sees a key whatever the mask, as one does whose own key is there.
    """

    Hq: int
    Hkv: int
    scale: float
    causal: bool = False
    weights: bool = False
    window: int | None = None
    softcap: float | None = None
    past: int = 0
    sees_itself: bool = False

    @property
    def is_triangle(self) -> bool:
        """Whether the causal mask is the plain one that every runtime knows: no window, no past."""
        return self.causal and self.window is None and self.past == 0

    def hides_nothing(self, S: int, T: int) -> bool:
        """Whether S queries see all T keys: nothing is causal, or one query stands at the last of them."""
        return not self.causal or (S == 1 and self.window is None and self.past + 1 == T)


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
    if path == "plain" or heads.softcap is not None:
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
    """softmax(cap(Q Kᵀ · scale) + mask). [B, Hq, S, D], [B, Hkv, T, D] -> [B, Hq, S, T]."""
    scores = q @ _repeat_kv(k, heads).transpose(-1, -2) * heads.scale
    if heads.softcap is not None:
        scores = heads.softcap * torch.tanh(scores / heads.softcap)
    mask = _with_causal(mask, q.shape[2], k.shape[2], heads, q.device)
    if mask is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    sees_nothing = scores.isneginf().all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(sees_nothing, 0.0)


def _with_causal(mask: Tensor | None, S: int, T: int, heads: Heads, device: torch.device) -> Tensor | None:
    """The given mask, and what causality adds to it."""
    if heads.hides_nothing(S, T):
        return mask
    return merge_causal(mask, S, T, device, heads.past, heads.window)


def _repeat_kv(x: Tensor, heads: Heads) -> Tensor:
    """Give every query head its own copy of the K or V it shares. [B, Hkv, T, D] -> [B, Hq, T, D]."""
    return x if heads.Hq == heads.Hkv else x.repeat_interleave(heads.Hq // heads.Hkv, dim=1)


def _fused_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads: Heads) -> Tensor:
    # PyTorch takes a mask or is_causal, not both, and its is_causal starts in the upper left corner.
    if mask is not None or not heads.is_triangle:
        mask = _with_causal(mask, q.shape[2], k.shape[2], heads, q.device)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None and not heads.hides_nothing(q.shape[2], k.shape[2]),
        scale=heads.scale,
        enable_gqa=heads.Hq != heads.Hkv,
    )
    return out if mask is None or heads.sees_itself else _blank_where_nothing_is_seen(out, mask)


def _blank_where_nothing_is_seen(out: Tensor, mask: Tensor) -> Tensor:
    """Zeros for queries without any key: PyTorch's half-precision CUDA kernels give other numbers there."""
    sees = mask if mask.dtype == torch.bool else ~mask.isneginf()
    return out.masked_fill(~sees.any(-1, keepdim=True), 0.0)


def _attend_onnx(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads: Heads
) -> tuple[Tensor, Tensor | None]:
    is_causal = heads.causal
    if heads.causal and not heads.is_triangle:
        mask, is_causal = _with_causal(mask, q.shape[1], k.shape[1], heads, q.device), False
    if mask is not None:
        # ONNX lets a mask broadcast over the queries; ONNX Runtime's CPU kernel does not.
        mask = mask[None, None] if mask.dim() == 2 else mask
        mask = mask.expand(mask.shape[0], mask.shape[1], q.shape[1], k.shape[1])
    if heads.softcap is not None and (is_causal or mask is not None):
        _refuse_stand_in(heads.softcap)
    out, _, _, weights = torch.onnx.ops.attention(
        q,
        k,
        v,
        mask,
        is_causal=is_causal,
        q_num_heads=heads.Hq,
        kv_num_heads=heads.Hkv,
        scale=heads.scale,
        softcap=heads.softcap or 0.0,
        qk_matmul_output_mode=_WEIGHTS_AFTER_SOFTMAX if heads.weights else 0,
    )
    return out, weights if heads.weights else None


def _refuse_stand_in(softcap: float) -> None:
    """PyTorch's own stand-in for the ONNX node caps after masking, which makes -inf a finite score."""
    if not torch.compiler.is_exporting():
        raise DeployError(
            "PyTorch cannot run the ONNX attention with a softcap and a mask: it caps the mask too.",
            got=f"softcap = {softcap}, path = onnx",
            hint="path plain to compute it; path onnx only exports it",
        )
