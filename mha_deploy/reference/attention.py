"""Multi-head, grouped-query and multi-query attention.

    head_i = softmax(Q_i K_iᵀ / √D) V_i        Q = x W_Q,  K = x W_K,  V = x W_V
    y      = Concat(head_1 … head_Hq) W_O

Hkv = Hq is multi-head attention. With fewer, Hq/Hkv neighbouring query heads share one K and V:
grouped-query attention, or multi-query attention where Hkv = 1.

A rotary embedding turns Q and K by their positions before they meet (`reference.rotary`). With a cache, the
K and V of earlier calls come before those of this one (`reference.cache`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mha_deploy.errors import DeployError
from mha_deploy.reference.cache import append_rows, check_room, given, valid_rows, write_rows
from mha_deploy.reference.core import Heads, attend, merge_heads, split_heads
from mha_deploy.reference.masks import padding_mask, seen_from
from mha_deploy.reference.onnx_cache import attend_growing, attend_static
from mha_deploy.reference.rotary import rotary_tables, rotate
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
        # Cosines and sines of every position that the axes allow; path `onnx` keeps them in the graph.
        self.rotary: tuple[Tensor, Tensor] | None = None
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
        past_key: Tensor | None = None,
        past_value: Tensor | None = None,
        key_cache: Tensor | None = None,
        value_cache: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute the layer.

        Args:
            query: [B, S, E]; self attention takes its keys and values from it too.
            key: [B, T, E], for cross attention.
            value: [B, T, E], for cross attention.
            key_lengths: int32 [B], where the spec's mask is `padding`.
            attention_bias: [1, Hq, S, T], where the spec's mask is `additive`.
            past_key: [B, Hkv, P, D], where the spec's cache is `growing`.
            past_value: The same shape.
            key_cache: [B, Hkv, T, D], where the spec's cache is `static`; it is not written to.
            value_cache: The same shape.
            lengths: int32 [B], how many rows of a static cache are valid before this call.

        Returns:
            The output [B, S, E], with the attention weights [B, Hq, S, T] if the spec asks for them, or with
            the keys and values to bring to the next call.
        """
        if self.spec.cache == "growing":
            return self._grow(query, past_key, past_value)
        if self.spec.cache == "static":
            return self._step(query, key_cache, value_cache, lengths, in_place=False)
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
        if self.spec.rope is not None:
            q, k = self.turn(q, k, torch.arange(q.shape[1], device=q.device))
        mask = attention_bias if key_lengths is None else padding_mask(key_lengths, k.shape[1])
        return attend(q, k, v, mask, self._layout(causal=self.spec.causal), self.path)

    def _layout(self, *, causal: bool, past: int = 0) -> Heads:
        spec = self.spec
        return Heads(
            Hq=spec.Hq,
            Hkv=spec.Hkv,
            scale=spec.softmax_scale,
            causal=causal,
            weights=spec.weights,
            window=spec.window,
            softcap=spec.softcap,
            past=past,
        )

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

    def turn(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rotary embedding of Q [B, S, Hq·D] and K [B, S, Hkv·D] at positions [S] or [B, S], if any."""
        spec = self.spec
        if spec.rope is None:
            return q, k
        if self.path == "onnx":
            return self._turn_onnx(q, spec.Hq, positions), self._turn_onnx(k, spec.Hkv, positions)
        if self.rotary is not None and self.rotary[0].device == q.device:
            cos, sin = (table[positions] for table in self.rotary)  # nothing comes from the host
        else:
            cos, sin = rotary_tables(spec.rope, spec.rope_dims, positions, q.dtype)
        q, k = (
            rotate(x.unflatten(-1, (-1, spec.D)), cos, sin, interleaved=spec.rope.interleaved).flatten(-2)
            for x in (q, k)
        )
        return q, k

    def _turn_onnx(self, x: Tensor, H: int, positions: Tensor) -> Tensor:
        """One ONNX `RotaryEmbedding` node, which looks the angles of its positions up in tables."""
        rope = self.spec.rope
        if rope is None or self.rotary is None:
            raise DeployError("The layer has no rotary tables.", hint="build_module(spec, path='onnx')")
        return torch.onnx.ops.rotary_embedding(
            x,
            *self.rotary,
            positions.expand(x.shape[0], -1),
            interleaved=rope.interleaved,
            num_heads=H,
            rotary_embedding_dim=self.spec.rope_dims if self.spec.rope_dims < self.spec.D else 0,
        )

    def combine(self, heads: Tensor, query: Tensor) -> Tensor:
        """The output stage: Concat(head_1 … head_Hq) W_O. [B, S, Hq·D] -> [B, S, E]."""
        return self.o(heads)

    # -- with a cache --------------------------------------------------------------------------

    def step_(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor) -> Tensor:
        """The layer with a static cache, writing the new rows into the caller's buffers.

        The lengths stay as they are: the caller knows how many of the S tokens were padding.
        """
        if self.spec.cache != "static":
            raise DeployError(
                "Only a static cache is written in place.", got=self.spec.cache, hint='cache = "static"'
            )
        return self._step(query, key_cache, value_cache, lengths, in_place=True)[0]

    def _grow(
        self, query: Tensor, past_key: Tensor | None, past_value: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        past_key, past_value = given(self.spec.name, past_key=past_key, past_value=past_value)
        past = past_key.shape[2]
        positions = past + torch.arange(query.shape[1], device=query.device)
        layout = self._layout(causal=True, past=past)
        if self.path == "onnx":
            mask = self._window_mask(positions, past + query.shape[1])
            tensors = self._turned(query, positions)
            heads, keys, values = attend_growing(*tensors, (past_key, past_value), mask, layout)
            return self.combine(heads, query), keys, values
        q, k, v = self._new_rows(query, positions)
        keys, values = append_rows(past_key, k), append_rows(past_value, v)
        heads, _ = attend(q, merge_heads(keys), merge_heads(values), None, layout, self.path)
        return self.combine(heads, query), keys, values

    def _step(
        self,
        query: Tensor,
        key_cache: Tensor | None,
        value_cache: Tensor | None,
        lengths: Tensor | None,
        *,
        in_place: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        key_cache, value_cache, lengths = given(
            self.spec.name, key_cache=key_cache, value_cache=value_cache, lengths=lengths
        )
        S, T = query.shape[1], key_cache.shape[2]
        check_room(lengths, S, T)
        positions = lengths[:, None] + torch.arange(S, device=query.device)
        q, k, v = self._new_rows(query, positions)
        if self.path == "onnx":
            window = self._window_mask(positions, T)
            layout = self._layout(causal=True)
            heads, keys, values = attend_static(q, (k, v), (key_cache, value_cache), lengths, window, layout)
            return self.combine(heads, query), keys, values
        keys = write_rows(key_cache, k, positions, in_place=in_place)
        values = write_rows(value_cache, v, positions, in_place=in_place)
        valid = [merge_heads(valid_rows(rows, lengths + S)) for rows in (keys, values)]
        mask = seen_from(positions, T, self.spec.window)[:, None]
        heads, _ = attend(q, valid[0], valid[1], mask, self._layout(causal=False), self.path)
        return self.combine(heads, query), keys, values

    def _new_rows(self, query: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q side by side [B, S, Hq·D]; K and V as a cache holds them [B, Hkv, S, D]."""
        q, k, v = self._turned(query, positions)
        return q, split_heads(k, self.spec.Hkv), split_heads(v, self.spec.Hkv)

    def _turned(self, query: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V of the new tokens side by side, Q and K at their positions."""
        q, k, v = self.project(query, None, None)
        return *self.turn(q, k, positions), v

    def _window_mask(self, positions: Tensor, T: int) -> Tensor | None:
        """What a window leaves to see, for an ONNX node: [1|B, 1, S, T]; None where there is no window."""
        if self.spec.window is None:
            return None
        mask = seen_from(positions, T, self.spec.window)
        return mask[None, None] if mask.dim() == 2 else mask[:, None]
