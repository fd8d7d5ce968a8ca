"""Rotary position embedding.

    (a, b) at position p  ->  (a cos pθ_j − b sin pθ_j,  a sin pθ_j + b cos pθ_j)        j = 0 … dims/2 − 1
    θ_j = base^(−2j/dims)

Queries and keys are rotated alike, so that their matmul depends only on the distance of the two positions.
The pair (a, b) is (x_j, x_{j+dims/2}), or (x_2j, x_{2j+1}) where the spec says interleaved. What is behind
the first `dims` numbers of a head stays as it is.

Su et al., "RoFormer", 2021. The frequencies are stretched for contexts longer than those of the training:

    linear   θ_j / factor                                              Chen et al., 2023
    ntk      base · factor^(dims/(dims−2)) in place of base            "NTK-aware", bloc97, 2023
    llama3   by wavelength λ_j = 2π/θ_j, over L = original_length      Llama 3.1, 2024
             λ_j < L/high: θ_j      λ_j > L/low: θ_j/factor
             between: (1−s) θ_j/factor + s θ_j,  s = (L/λ_j − low)/(high − low)

**Rounding.** Angles, cosines and sines are computed in float64 and rounded once, to the precision of the
layer; the matmuls are taken in that precision. ONNX's `RotaryEmbedding` does the same with the tables that
it is given. So do Hugging Face's layers, but with float32 angles: off by up to 5e-4 within 8192 positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mha_deploy.model.layer import Rope


def frequencies(rope: Rope, dims: int) -> Tensor:
    """The angle per position of every pair: θ_j, after scaling. float64 [dims/2]."""
    base = rope.base
    if rope.scaling == "ntk":
        base = base * rope.factor ** (dims / (dims - 2))
    theta = base ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    if rope.scaling != "llama3":
        return theta / rope.factor if rope.scaling == "linear" else theta
    # Short waves stay, long ones are stretched, and between them one passes into the other.
    low, high = rope.low_freq_factor, rope.high_freq_factor
    periods = rope.original_length * theta / (2 * math.pi)  # L/λ: how often a pair rotates in L positions
    kept = ((periods - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * theta / rope.factor + kept * theta


def rotary_tables(rope: Rope, dims: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The cosines and sines of pθ_j, rounded once. [..., S] -> two of [..., S, dims/2]."""
    angles = positions[..., None].double() * frequencies(rope, dims).to(positions.device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the pairs of every head [B, S, H, D]; cos and sin are [B, S, dims/2], or [S, dims/2] for all."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # the same for every head
    rotated, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, dim=-1)
    pair = (a * cos - b * sin, a * sin + b * cos)
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((rotated, rest), dim=-1)
