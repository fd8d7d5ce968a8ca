"""Whole published models in small sizes: made from a config, exported with PyTorch's exporter, fused."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import warnings
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from mha_deploy.graph.fuse import fuse_attention

TOKENS, WIDTH, DEPTH = 96, 128, 2


class Plain(nn.Module):
    """A model with plain tensors in and out."""

    def __init__(self, model, **fixed):
        super().__init__()
        self.model, self.fixed = model, fixed


class Tokens(Plain):
    def forward(self, input_ids):
        return self.model(input_ids=input_ids, use_cache=False).last_hidden_state


class Padded(Plain):
    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **self.fixed).last_hidden_state


class Pixels(Plain):
    def forward(self, pixel_values):
        return self.model(pixel_values=pixel_values).last_hidden_state


class TwoTexts(Plain):
    def forward(self, input_ids, decoder_input_ids):
        return self.model(
            input_ids=input_ids, decoder_input_ids=decoder_input_ids, use_cache=False
        ).last_hidden_state


class Speech(Plain):
    def forward(self, input_features, decoder_input_ids):
        return self.model(
            input_features=input_features, decoder_input_ids=decoder_input_ids, use_cache=False
        ).last_hidden_state


class HandmadeLayer(nn.Module):
    """Attention in plain matmuls with a bias by distance, and a sum of squares in float32."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, bias):
        wide = x.float()
        normal = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.gain
        q, k, v = self.qkv(normal).unflatten(-1, (3, 8, WIDTH // 8)).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) * 0.25 + bias, -1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


class Handmade(nn.Module):
    """A stack of layers that share one bias, as T5 has it."""

    def __init__(self):
        super().__init__()
        self.tokens, self.distances = nn.Embedding(TOKENS, WIDTH), nn.Embedding(64, 8)
        self.layers = nn.ModuleList(HandmadeLayer() for _ in range(DEPTH))

    def forward(self, input_ids):
        place = torch.arange(input_ids.shape[1])
        bias = self.distances((place[:, None] - place[None]).abs()).permute(2, 0, 1)[None]
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = layer(x, bias)
        return x


@dataclass(frozen=True, kw_only=True)
class Small:
    """One model: how it is made, and its inputs by name: sizes, and the highest number (None for real ones).

    Args:
        wrapper: The class that gives it plain inputs.
        family: Its name in Transformers: `Bert` stands for `BertConfig` and `BertModel`; empty for our own.
        config: Its config.
        inputs: Axes of each input; a letter is a dynamic one.
        attentions: How many attentions it has.
        fixed: More arguments of its call.
        attention: How Transformers computes it.
    """

    wrapper: type
    family: str
    config: dict
    inputs: dict
    attentions: int = DEPTH
    fixed: dict | None = None
    attention: str = "sdpa"


def llama_like(**more):
    return {
        "vocab_size": TOKENS,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        **more,
    }


def bert_like(**more):
    return {
        "vocab_size": TOKENS,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 8,
        "max_position_embeddings": 64,
        **more,
    }


_GPT2 = {"vocab_size": TOKENS, "n_embd": WIDTH, "n_layer": DEPTH, "n_head": 8, "n_positions": 64}
_T5 = {
    "vocab_size": TOKENS,
    "d_model": WIDTH,
    "d_kv": 16,
    "d_ff": 2 * WIDTH,
    "num_layers": DEPTH,
    "num_heads": 8,
}
_WHISPER = {
    "vocab_size": TOKENS,
    "d_model": WIDTH,
    "encoder_layers": DEPTH,
    "decoder_layers": DEPTH,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "num_mel_bins": 16,
    "max_source_positions": 24,
    "max_target_positions": 64,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
_VIT = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 8,
    "image_size": 32,
    "patch_size": 8,
}
_TEXT = {"input_ids": ("B", "S")}
_MASKED = {"input_ids": ("B", "S"), "attention_mask": ("B", "S")}

MODELS = {
    "bert": Small(wrapper=Padded, family="Bert", config=bert_like(), inputs=_MASKED),
    "gpt2": Small(wrapper=Tokens, family="GPT2", config=_GPT2, inputs=_TEXT),
    "llama": Small(wrapper=Tokens, family="Llama", config=llama_like(), inputs=_TEXT),
    "llama-padded": Small(
        wrapper=Padded, family="Llama", config=llama_like(), inputs=_MASKED, fixed={"use_cache": False}
    ),
    "qwen2": Small(wrapper=Tokens, family="Qwen2", config=llama_like(), inputs=_TEXT),
    "qwen3": Small(wrapper=Tokens, family="Qwen3", config=llama_like(head_dim=16), inputs=_TEXT),
    "mistral": Small(wrapper=Tokens, family="Mistral", config=llama_like(sliding_window=6), inputs=_TEXT),
    "t5": Small(
        wrapper=TwoTexts,
        family="T5",
        config=_T5,
        inputs={"input_ids": ("B", "T"), "decoder_input_ids": ("B", "S")},
        attentions=3 * DEPTH,
        attention="eager",
    ),
    "whisper": Small(
        wrapper=Speech,
        family="Whisper",
        config=_WHISPER,
        inputs={"input_features": ("B", 16, 48), "decoder_input_ids": ("B", "S")},
        attentions=3 * DEPTH,
    ),
    "handmade": Small(wrapper=Handmade, family="", config={}, inputs=_TEXT),
    "vit": Small(wrapper=Pixels, family="ViT", config=_VIT, inputs={"pixel_values": ("B", 3, 32, 32)}),
}


def module_of(name, dtype=torch.float16, attention="sdpa"):
    """A small model with weights that are large enough to make attention sharp."""
    small = MODELS[name]
    torch.manual_seed(7)
    if small.family:
        transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
        config = getattr(transformers, f"{small.family}Config")(**small.config)
        model = getattr(transformers, f"{small.family}Model")
        inner = model._from_config(config, attn_implementation=attention)
        module = small.wrapper(inner, **(small.fixed or {}))
    else:
        module = small.wrapper()
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.08)
            elif torch.count_nonzero(weight) == 0:
                weight.normal_(std=0.02)
    return module.to(dtype).eval()


def feeds_of(name, sizes, dtype=np.float16, seed=3):
    """Inputs of the given sizes; the tail of the second row of a padded batch is padding."""
    rng = np.random.default_rng(seed)
    feeds = {}
    for key, axes in MODELS[name].inputs.items():
        shape = tuple(sizes.get(axis, axis) for axis in axes)
        if key.endswith("ids"):
            feeds[key] = rng.integers(2, TOKENS, shape, dtype=np.int64)
        elif key == "attention_mask":
            feeds[key] = np.ones(shape, np.int64)
            feeds[key][1:, shape[1] // 2 :] = 0
        else:
            feeds[key] = rng.standard_normal(shape).astype(dtype)
    return feeds


def export(name, dtype=torch.float16, attention="sdpa", opset=23):
    """The exported graph, as PyTorch writes it."""
    module, small = module_of(name, dtype, attention), MODELS[name]
    kind = np.float16 if dtype == torch.float16 else np.float32
    given = {key: torch.from_numpy(x) for key, x in feeds_of(name, {"B": 2, "S": 5, "T": 7}, kind).items()}
    letters = {letter: torch.export.Dim(letter, max=64) for letter in "BST"}
    axes = {
        key: {at: letters[axis] for at, axis in enumerate(dims) if isinstance(axis, str)}
        for key, dims in small.inputs.items()
    }
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            (),
            kwargs=given,
            dynamo=True,
            opset_version=opset,
            dynamic_shapes=axes,
            verbose=False,
        )
    logging.disable(logging.NOTSET)
    return program.model


@functools.cache
def fused(name, dtype=torch.float16):
    """The exported graph with every attention in one node; made once, so do not change it."""
    model, report = fuse_attention(export(name, dtype, MODELS[name].attention))
    found = len(report.fused) + len(report.already)
    assert found == MODELS[name].attentions, report
    return model


def in_float32(model):
    """A copy of a half-precision graph with float32 everywhere: the same formulas, with little rounding."""
    copy = ir.from_proto(ir.to_proto(model))
    half, single = ir.DataType.FLOAT16, ir.DataType.FLOAT
    for value in copy.graph.initializers.values():
        if value.const_value is not None and value.const_value.dtype == half:
            value.const_value = ir.Tensor(value.const_value.numpy().astype(np.float32), name=value.name)
    for node in copy.graph.all_nodes():
        for key, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype == half:
                tensor = ir.Tensor(attribute.value.numpy().astype(np.float32))
                node.attributes.add(ir.AttrTensor(key, tensor))
            elif key == "to" and attribute.value == half:
                node.attributes.add(ir.AttrInt64(key, int(single)))
    values = [out for node in copy.graph.all_nodes() for out in node.outputs]
    for value in [*values, *copy.graph.inputs, *copy.graph.initializers.values()]:
        if value.dtype == half:
            value.type = ir.TensorType(single)
    return copy
