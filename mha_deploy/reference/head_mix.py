"""HeadMix: attention over heads.

The Hq head outputs of one token are a sequence of length Hq. Learnt projections of them, shared by all
heads, give the q, k and v of a second attention across that sequence:

    H'  = softmax(H W_q (H W_k)ᵀ / √D) H W_v        H = [head_1; …; head_Hq] ∈ R^{Hq×D}
    y   = Concat(H'_1 … H'_Hq) W_O
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from mha_deploy.reference.attention import Attention
from mha_deploy.reference.core import Heads, attend


class HeadMixAttention(Attention):
    """Attention followed by a single-headed attention across the heads of each token."""

    def _add_output_stage(self) -> None:
        super()._add_output_stage()
        D, bias = self.spec.D, self.spec.bias
        self.mix_q = nn.Linear(D, D, bias=bias)
        self.mix_k = nn.Linear(D, D, bias=bias)
        self.mix_v = nn.Linear(D, D, bias=bias)

    def combine(self, heads: Tensor, query: Tensor) -> Tensor:
        """Mix the heads of each token, then project. [B, S, Hq·D] -> [B, S, E]."""
        spec = self.spec
        tokens = heads.reshape(-1, spec.Hq, spec.D)  # [B·S, Hq, D]: every token is a batch row
        layout = Heads(Hq=1, Hkv=1, scale=1.0 / math.sqrt(spec.D))
        mixed, _ = attend(self.mix_q(tokens), self.mix_k(tokens), self.mix_v(tokens), None, layout, self.path)
        return self.o(mixed.reshape(heads.shape))
