"""Variants of the attention layer: mixed heads, grouped heads with an MLP, sparse heads."""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha_deploy.model.layer import GroupedMlp, SparseHeads
from mha_deploy.reference.attention import Attention, Heads, attend

# -- Grouped heads: a linear layer in each group, then an MLP over the groups -----------------------


class GroupedMlpAttention(Attention):
    """Attention whose heads interact within their group; a two-layer MLP then mixes the groups.

    Every group has a full linear layer of its own over its heads: together they are one block-diagonal
    matrix, and no head of another group enters before the MLP. The MLP replaces the output projection.
    """

    def _add_output_stage(self) -> None:
        spec, options = self.spec, cast(GroupedMlp, self.spec.grouped_mlp)
        width = spec.Hq // options.groups * spec.D
        self.groups = nn.ModuleList(nn.Linear(width, width, bias=spec.bias) for _ in range(options.groups))
        self.mlp_in = nn.Linear(spec.Hq * spec.D, options.hidden, bias=spec.bias)
        self.mlp_out = nn.Linear(options.hidden, spec.E, bias=spec.bias)

    def combine(self, heads: Tensor, query: Tensor) -> Tensor:
        """MLP(Concat(G_1 … G_g)), where G_i = Concat(heads of group i) W_i. [B, S, Hq·D] -> [B, S, E]."""
        parts = heads.chunk(len(self.groups), dim=-1)  # g times [B, S, Hq·D / g]
        mixed = torch.cat([linear(part) for linear, part in zip(self.groups, parts, strict=True)], dim=-1)
        return self.mlp_out(F.gelu(self.mlp_in(mixed)))


# -- HeadMix: attention over heads -----------------------------------------------------------------


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
        tokens = heads.reshape(-1, spec.Hq, spec.D)  # [B·S, Hq, D]: every token is a batch element
        layout = Heads(Hq=1, Hkv=1, scale=1.0 / math.sqrt(spec.D))
        mixed, _ = attend(self.mix_q(tokens), self.mix_k(tokens), self.mix_v(tokens), None, layout, self.path)
        return self.o(mixed.reshape(heads.shape))


# -- Sparse head activation: every token chooses the heads it listens to ---------------------------

_HEADS = 2  # the axis of Hq in [B, S, Hq], counted from the front: ONNX's evaluator gathers on no other


class SparseHeadAttention(Attention):
    """Attention with a learnt gate that keeps `top_k` heads per token."""

    def _add_output_stage(self) -> None:
        super()._add_output_stage()
        self.gate = nn.Linear(self.spec.E, self.spec.Hq, bias=False)

    def combine(self, heads: Tensor, query: Tensor) -> Tensor:
        """Weigh each head by its gate, then project. [B, S, Hq·D], [B, S, E] -> [B, S, E]."""
        gates = self.gates(query)
        by_head = heads.unflatten(-1, (self.spec.Hq, -1))  # [B, S, Hq, D]
        return self.o((by_head * gates.unsqueeze(-1)).flatten(2))

    def gates(self, query: Tensor) -> Tensor:
        """softmax(G) on the chosen heads and zero elsewhere. [B, S, E] -> [B, S, Hq]."""
        options = cast(SparseHeads, self.spec.sparse_heads)
        logits = self.gate(query)
        # Gates are few and decide much: they are compared and normalized in float32, as routers usually are.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        best, chosen = logits.topk(options.top_k, dim=-1)  # [B, S, top_k]
        # Renormalising softmax(G) over some of its heads is the softmax over those heads alone.
        gates = best.softmax(-1) if options.renormalise else logits.softmax(-1).gather(_HEADS, chosen)
        return torch.zeros_like(logits).scatter(_HEADS, chosen, gates).to(query.dtype)

    def decision_margin(self, query: Tensor) -> Tensor:
        """By how much each token's choice of heads is clear: G_(k) - G_(k+1). [B, S, E] -> [B, S].

        The choice jumps where two gates are equal, so tokens with a small margin test the rounding of
        the gate and not the layer. The margin itself is computed in FP64.
        """
        top_k = cast(SparseHeads, self.spec.sparse_heads).top_k
        logits = F.linear(query.double(), self.gate.weight.double())
        if top_k == self.spec.Hq:
            return torch.full(logits.shape[:-1], float("inf"), dtype=logits.dtype, device=logits.device)
        best = logits.topk(top_k + 1, dim=-1).values
        return best[..., -2] - best[..., -1]
