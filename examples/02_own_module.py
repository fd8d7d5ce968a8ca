"""Your own module: name its dynamic axes, and export the object.

The attention is written out by hand here; the export recognizes it and writes one `Attention` node. Run:

    python examples/02_own_module.py
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import mha_deploy as md


class Block(nn.Module):
    """Pre-norm self attention with a padding mask."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Attend to the keys whose mask is 1."""
        split = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in split)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(mask[:, None, None, :] == 0, float("-inf"))
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


torch.manual_seed(0)
mask = torch.ones(2, 16, dtype=torch.int64)
mask[1, 10:] = 0
bundle = md.export(
    Block(),
    Path(tempfile.mkdtemp()) / "block",
    example_inputs={"x": md.Example(torch.randn(2, 16, 64), "B", "S"), "mask": md.Example(mask, "B", "S")},
    axes={"B": "1:2:4", "S": "1:16:64"},
    precision="fp16",
)
for node in bundle.manifest.attention:
    print("attention:", node["name"], "from", node["place"])
report = md.validate(bundle)
print(f"{report.outcome}: {report.headline}")
