"""Sparse head activation: every token chooses the heads it listens to.

    G = x W_g ∈ R^Hq
    y = Σ_{i ∈ TopK(G)} softmax(G)_i · head_i W_O^(i)

W_O^(i) is head i's slice of W_O. The sum over heads is the usual output projection of the heads, each
multiplied by its gate and the others by zero. With `renormalise` the chosen gates add up to one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mha_deploy.reference.attention import Attention
from mha_deploy.spec import SparseHeads

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
        options = _options(self)
        logits = _at_least_float32(self.gate(query))
        best, chosen = logits.topk(options.top_k, dim=-1)  # [B, S, top_k]
        # Renormalising softmax(G) over some of its heads is the softmax over those heads alone.
        gates = best.softmax(-1) if options.renormalise else logits.softmax(-1).gather(_HEADS, chosen)
        return torch.zeros_like(logits).scatter(_HEADS, chosen, gates).to(query.dtype)

    def decision_margin(self, query: Tensor) -> Tensor:
        """By how much each token's choice of heads is clear: G_(k) - G_(k+1). [B, S, E] -> [B, S].

        The choice jumps where two gates are equal, so tokens with a small margin test the rounding of
        the gate and not the layer.
        """
        top_k = _options(self).top_k
        logits = self.gate(query)
        if top_k == self.spec.Hq:
            return torch.full(logits.shape[:-1], float("inf"), dtype=logits.dtype, device=logits.device)
        best = logits.topk(top_k + 1, dim=-1).values
        return best[..., -2] - best[..., -1]


def _at_least_float32(logits: Tensor) -> Tensor:
    # Gates are few and decide much: they are compared and normalised in float32, as routers usually are.
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _options(module: Attention) -> SparseHeads:
    options = module.spec.sparse_heads
    if options is None:
        raise TypeError(f"{module.spec.name} is not a sparse-heads spec")
    return options
