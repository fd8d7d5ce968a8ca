"""An ONNX file from elsewhere: fuse its attention, and check that the fused file computes the same.

The file is made here, with PyTorch's exporter and an attention that is written out by hand. Run:

    python examples/04_foreign_onnx.py [MODEL.onnx]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import nn

import mha_deploy as md


class Causal(nn.Module):
    """Causal self attention, written out."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to the past."""
        split = self.qkv(x).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in split)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(-2))


folder = Path(tempfile.mkdtemp())
if len(sys.argv) > 1:
    source = Path(sys.argv[1])
else:
    source = folder / "source.onnx"
    torch.onnx.export(Causal().eval(), (torch.randn(2, 12, 64),), source, dynamo=True, verbose=False)

fused, report = md.fuse(onnx.load(source))
onnx.save(fused, folder / "fused.onnx")
for each in report.fused:
    print(f"fused: {each.name}, {each.Hq} heads of {each.D}, causal: {each.causal}")
for left in report.unfused:
    print(f"not fused: {left.name}: {left.reason}")

with md.open_runner(source) as before, md.open_runner(folder / "fused.onnx") as after:
    random = np.random.default_rng(0)
    feeds = {
        name: random.standard_normal([dim if isinstance(dim, int) else 2 for dim in info.dims]).astype(
            info.dtype
        )
        for name, info in before.inputs.items()
    }
    pairs = zip(before.run(feeds).items(), after.run(feeds).values(), strict=True)
    for (name, old), new in pairs:
        print(f"{name}: largest difference {np.abs(old - new).max():.1e}")
