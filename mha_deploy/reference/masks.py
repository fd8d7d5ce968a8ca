"""Which keys a query may see.

A boolean mask is True where a query may look; a float mask is added to the scores, -inf where it may
not. All masks broadcast to [B, Hq, S, T].
"""

from __future__ import annotations

import torch
from torch import Tensor


def padding_mask(key_lengths: Tensor, T: int) -> Tensor:
    """Row b may see its first `key_lengths[b]` keys. [B] -> bool [B, 1, 1, T]."""
    positions = torch.arange(T, dtype=key_lengths.dtype, device=key_lengths.device)
    return positions < key_lengths[:, None, None, None]


def seen_from(positions: Tensor, T: int, window: int | None = None) -> Tensor:
    """A query at position p may see keys 0..p, or the last `window` of them. [..., S] -> bool [..., S, T]."""
    keys, queries = torch.arange(T, device=positions.device), positions[..., None]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def causal_mask(S: int, T: int, device: torch.device, past: int = 0, window: int | None = None) -> Tensor:
    """Query s, at position past + s, may see the keys up to its own position. bool [S, T].

    Without a past the diagonal starts in the upper left corner; where the T keys are the past and the S new
    ones, it ends in the lower right.
    """
    return seen_from(torch.arange(past, past + S, device=device), T, window)


def merge_causal(
    mask: Tensor | None, S: int, T: int, device: torch.device, past: int = 0, window: int | None = None
) -> Tensor:
    """Both masks at once, in the kind of the given one: boolean, or float with -inf."""
    causal = causal_mask(S, T, device, past, window)
    if mask is None:
        return causal
    return mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, float("-inf"))


def alibi_bias(Hq: int, S: int, T: int) -> Tensor:
    """Attention with linear biases: -m_h · |s - t|, with m_h = 2^(-8(h+1)/Hq). float64 [1, Hq, S, T].

    Press et al., "Train Short, Test Long", 2021. The symmetric form, so that it also serves layers that
    look both ways; under a causal mask it equals the paper's.
    """
    slopes = 2.0 ** (-8.0 * torch.arange(1, Hq + 1, dtype=torch.float64) / Hq)
    distance = (torch.arange(S)[:, None] - torch.arange(T)[None, :]).abs()
    return -(slopes[:, None, None] * distance)[None]
