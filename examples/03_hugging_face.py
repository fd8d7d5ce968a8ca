"""A Hugging Face model: wrap it so that tensors go in and come out, then export it like your own.

A small BERT with random weights, so that nothing is downloaded; `BertModel.from_pretrained(...)` gives a
real one. Run:

    python examples/03_hugging_face.py
"""

import tempfile
from pathlib import Path

import torch
from torch import nn
from transformers import BertConfig, BertModel

import mha_deploy as md


class Encoder(nn.Module):
    """Token ids and padding mask in, hidden states out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The hidden states of the last layer."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


torch.manual_seed(0)
config = BertConfig(
    vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
)
mask = torch.ones(2, 16, dtype=torch.int64)
mask[1, 10:] = 0
model = md.Deployable(
    module=Encoder(BertModel(config)),
    inputs={
        "input_ids": md.Example(torch.randint(0, 100, (2, 16)), "B", "S"),
        "attention_mask": md.Example(mask, "B", "S"),
    },
    axes={"B": "1:2:4", "S": "2:16:64"},
    outputs=("hidden",),
    name="small-bert",
)
bundle = md.export(model, Path(tempfile.mkdtemp()) / model.name, precision="fp16")
print(f"{model.name}: {len(bundle.manifest.attention)} attentions fused")
for found in md.check(bundle, target="tensorrt", version="10.14"):
    print(f"{found.node.name}: {'fused' if found.fused_after_lowering else 'not fused'} by TensorRT 10.14")
report = md.validate(bundle)
print(f"{report.outcome}: {report.headline}")
