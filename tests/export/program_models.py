"""Small whole models with plain tensors in and out, for the tests of exported programs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mha_deploy.model.spec import Axis

B, S = Axis(min=1, opt=2, max=8), Axis(min=1, opt=7, max=32)
AXES = {"B": B, "S": S}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}


@dataclass(frozen=True)
class Example:
    """A module, an example of its inputs, and their axes."""

    module: nn.Module
    inputs: dict
    dims: dict
    axes: dict = field(default_factory=lambda: AXES)


class Wrapped(nn.Module):
    """A Hugging Face model that takes token numbers and a padding mask, and returns its last states."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        options = {} if self.model.config.model_type in ("bert", "t5") else {"use_cache": False}
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **options).last_hidden_state


class Attention(nn.Module):
    """One attention by hand, with a softmax in float32."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x, mask):
        B, S, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(B, S, 3, 4, 8).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / 8**0.5
        scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(x.dtype).min)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype)
        weights = F.dropout(weights, 0.1, training=self.training)
        return x + self.o((weights @ v).transpose(1, 2).reshape(B, S, 32))


class Stack(nn.Module):
    """Two attentions by hand."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x, mask):
        for layer in self.layers:
            x = layer(x, mask)
        return x


def by_hand():
    torch.manual_seed(0)
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    dims = {"x": ("B", "S", None), "mask": ("B", "S")}
    return Example(Stack(), {"x": torch.randn(2, 7, 32), "mask": mask}, dims)


def hugging_face(name, attention):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    few = {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
    makers = {
        "bert": (transformers.BertConfig, transformers.BertModel, {**SMALL, "intermediate_size": 48}),
        "llama": (transformers.LlamaConfig, transformers.LlamaModel, {**SMALL, **few}),
        "gpt2": (
            transformers.GPT2Config,
            transformers.GPT2Model,
            {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 64},
        ),
        "t5": (
            transformers.T5Config,
            transformers.T5EncoderModel,
            {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 50},
        ),
    }
    config, model, sizes = makers[name]
    made = model(config(**sizes, attn_implementation=attention))
    for norm in made.modules():  # as trained ones: their weights are not all 1
        if type(norm).__name__.endswith("Norm") and norm.weight is not None:
            nn.init.normal_(norm.weight, 1.0, 0.2)
    tokens = torch.randint(0, 50, (2, 7))
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    dims = dict.fromkeys(("input_ids", "attention_mask"), ("B", "S"))
    return Example(Wrapped(made), {"input_ids": tokens, "attention_mask": mask}, dims)


@functools.cache
def example(name, attention="sdpa"):
    return by_hand() if name == "by hand" else hugging_face(name, attention)
