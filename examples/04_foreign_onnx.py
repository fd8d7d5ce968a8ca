"""An ONNX file from elsewhere: fuse its attention, make a bundle of it, and validate it in FP16.

The file is made here, with PyTorch's exporter and an attention that is written out by hand. Run:

    python examples/04_foreign_onnx.py [MODEL.onnx]
"""

import sys
import tempfile
from pathlib import Path

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

# Each new node is compared with the original before it is kept.
_, fusion = md.fuse(onnx.load(source))
for each in fusion.fused:
    print(f"fused: {each.name}, {each.Hq} heads of {each.D}, causal: {each.causal}")
for left in fusion.unfused:
    print(f"not fused: {left.name}: {left.reason}")

# The same file as a bundle in FP16: inputs are drawn, and the file in FP64 is the reference.
bundle = md.import_onnx(source, folder / "bundle")
report = md.validate(bundle)
print(f"{report.outcome}: {report.headline}")
