"""Grouped heads with an MLP in place of the output projection.

    Group_j = Concat(head_i : i in group j)        j = 1 … g
    y       = MLP(Concat(Group_1 … Group_g))       MLP(z) = GELU(z W_1) W_2

The groups are neighbouring heads, so Concat(Group_1 … Group_g) is Concat(head_1 … head_Hq): the MLP is
dense, and it is what mixes between the groups.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from mha_deploy.reference.attention import Attention


class GroupedMlpAttention(Attention):
    """Attention whose groups of heads are mixed by a two-layer MLP."""

    def _add_output_stage(self) -> None:
        spec, options = self.spec, self.spec.grouped_mlp
        if options is None:
            raise TypeError(f"{spec.name} is not a grouped-mlp spec")
        self.mlp_in = nn.Linear(spec.Hq * spec.D, options.hidden, bias=spec.bias)
        self.mlp_out = nn.Linear(options.hidden, spec.E, bias=spec.bias)

    def combine(self, heads: Tensor, query: Tensor) -> Tensor:
        """MLP(Concat(Group_1 … Group_g)). [B, S, Hq·D] -> [B, S, E]."""
        return self.mlp_out(F.gelu(self.mlp_in(heads)))
