"""Your own decoder with a preallocated KV cache, here a ring buffer: every decode step is judged.

The module writes its cache in place, and need not return it. Run:

    python examples/06_own_cache.py
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import mha_deploy as md

WIDTH, HEADS, ENTRIES = 64, 4, 8


class Decoder(nn.Module):
    """One layer that remembers the last tokens: the oldest entries of its cache are overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(100, WIDTH), nn.Embedding(256, WIDTH)
        self.qkv, self.logits = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 100)

    def forward(self, ids: torch.Tensor, at: torch.Tensor, keys: torch.Tensor, values: torch.Tensor):
        """The logits of the new tokens, which are at the positions `at`."""
        x = self.tokens(ids) + self.places(at)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        keys[:, :, at % ENTRIES], values[:, :, at % ENTRIES] = k, v
        held = at[-1] - (at[-1] - torch.arange(ENTRIES, device=at.device)) % ENTRIES  # who is where
        mask = (held >= 0) & (held <= at[:, None])
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.logits(x + y.transpose(1, 2).flatten(-2))


torch.manual_seed(0)
cache = md.Example(torch.randn(2, HEADS, ENTRIES, WIDTH // HEADS), "B", None, "T")
model = md.Deployable(
    module=Decoder(),
    inputs={
        "ids": md.Example(torch.randint(0, 100, (2, 4)), "B", "S"),
        "at": md.Example(torch.arange(4), "S"),
        "keys": cache,
        "values": cache,
    },
    axes={"B": "1:2:4", "S": "1:4:8", "T": str(ENTRIES)},
    kv_cache={"keys": "new_keys", "values": "new_values"},  # what goes out replaces what came in
    positions="at",
    longest=256,  # tokens of a sequence; a cache that keeps all of them needs no `longest`
    outputs=("logits",),
    name="ring",
)
bundle = md.export(model, Path(tempfile.mkdtemp()) / model.name, precision="fp16", golden=("opt", "min"))
report = md.validate(bundle)
print(f"{report.outcome}: {report.headline}")
for trace in report.record.decode:
    print(f"{trace.runtime}: {trace.steps} steps, {trace.failed} of {trace.judged} results wrong")
