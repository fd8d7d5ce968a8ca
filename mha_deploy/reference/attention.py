"""Multi-head, grouped-query and multi-query attention.

    head_i = softmax(Q_i K_iᵀ / √D) V_i        Q = x W_Q,  K = x W_K,  V = x W_V
    y      = Concat(head_1 … head_Hq) W_O

Hkv = Hq is multi-head attention. With fewer, Hq/Hkv neighbouring query heads share one K and V:
grouped-query attention, or multi-query attention where Hkv = 1.
"""

from __future__ import annotations

from torch import Tensor, nn

from mha_deploy.reference.core import Heads, attend
from mha_deploy.reference.masks import padding_mask
from mha_deploy.spec import AttentionSpec


class Attention(nn.Module):
    """The layer that a spec describes; the variants change what follows the heads.

    Args:
        spec: The layer.
        path: How attention is computed; see `reference.core`.
    """

    def __init__(self, spec: AttentionSpec, path: str = "sdpa") -> None:
        super().__init__()
        self.spec = spec
        self.path = path
        E, queries, keys = spec.E, spec.Hq * spec.D, spec.Hkv * spec.D
        if spec.projections == "packed":
            self.qkv = nn.Linear(E, queries + 2 * keys, bias=spec.bias)
        else:
            self.q = nn.Linear(E, queries, bias=spec.bias)
            self.k = nn.Linear(E, keys, bias=spec.bias)
            self.v = nn.Linear(E, keys, bias=spec.bias)
        self._add_output_stage()

    def _add_output_stage(self) -> None:
        self.o = nn.Linear(self.spec.Hq * self.spec.D, self.spec.E, bias=self.spec.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_lengths: Tensor | None = None,
        attention_bias: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the layer.

        Args:
            query: [B, S, E]; self attention takes its keys and values from it too.
            key: [B, T, E], for cross attention.
            value: [B, T, E], for cross attention.
            key_lengths: int32 [B], where the spec's mask is `padding`.
            attention_bias: [1, Hq, S, T], where the spec's mask is `additive`.

        Returns:
            The output [B, S, E], with the attention weights [B, Hq, S, T] if the spec asks for them.
        """
        heads, weights = self.heads(query, key, value, key_lengths, attention_bias)
        output = self.combine(heads, query)
        return output if weights is None else (output, weights)

    def heads(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_lengths: Tensor | None = None,
        attention_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Everything before the output stage: Concat(head_1 … head_Hq) [B, S, Hq·D], and the weights."""
        q, k, v = self.project(query, key, value)
        mask = attention_bias if key_lengths is None else padding_mask(key_lengths, k.shape[1])
        spec = self.spec
        layout = Heads(
            Hq=spec.Hq, Hkv=spec.Hkv, scale=spec.softmax_scale, causal=spec.causal, weights=spec.weights
        )
        return attend(q, k, v, mask, layout, self.path)

    def project(
        self, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Q [B, S, Hq·D], K and V [B, T, Hkv·D]."""
        if self.spec.projections == "packed":
            queries, keys = self.spec.Hq * self.spec.D, self.spec.Hkv * self.spec.D
            q, k, v = self.qkv(query).split([queries, keys, keys], dim=-1)
            return q, k, v
        key = query if key is None else key
        value = query if value is None else value
        return self.q(query), self.k(key), self.v(value)

    def combine(self, heads: Tensor, query: Tensor) -> Tensor:
        """The output stage: Concat(head_1 … head_Hq) W_O. [B, S, Hq·D] -> [B, S, E]."""
        return self.o(heads)
