"""Small whole models as people deploy them: Hugging Face's, PyTorch's own, and one written by hand.

Each factory takes the attention implementation (`sdpa` or `eager`; PyTorch's own models have one only) and
gives a `Whole`: `module, inputs, dims = bert("eager")`. The module takes and returns plain tensors. Rows of
the batch have different lengths wherever the model takes a padding mask.
"""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

B, S, PAST, SOURCE = 2, 7, 5, 9
"""Batch, length, cached rows and source length of the example inputs."""
MAX = 64
"""The longest sequence that the models take."""
SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": MAX,
}


class Whole(NamedTuple):
    """A whole model.

    Args:
        module: It takes the inputs in their order, and returns one tensor.
        inputs: Example inputs by name.
        dims: The names of the dynamic axes of each input.
    """

    module: nn.Module
    inputs: dict[str, torch.Tensor]
    dims: dict[str, dict[int, str]]


class Wrapped(nn.Module):
    """A Hugging Face model with plain tensors for inputs, and one output by name."""

    def __init__(self, model: nn.Module, output: str = "last_hidden_state", **options: Any) -> None:
        super().__init__()
        self.model, self.output, self.options = model, output, options


class Tokens(Wrapped):
    def forward(self, input_ids, attention_mask):
        done = self.model(input_ids=input_ids, attention_mask=attention_mask, **self.options)
        return getattr(done, self.output)


class Images(Wrapped):
    def forward(self, pixel_values):
        return getattr(self.model(pixel_values=pixel_values, **self.options), self.output)


class Audio(Wrapped):
    def forward(self, input_features):
        return getattr(self.model(input_features, **self.options), self.output)


class AudioToText(Wrapped):
    def forward(self, input_features, decoder_input_ids):
        done = self.model(input_features=input_features, decoder_input_ids=decoder_input_ids, **self.options)
        return getattr(done, self.output)


class TextToText(Wrapped):
    def forward(self, input_ids, attention_mask, decoder_input_ids):
        done = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            **self.options,
        )
        return getattr(done, self.output)


# -- inputs -------------------------------------------------------------------------------------------------


def tokens(rows: int = B, length: int = S, *, seed: int = 0, left: bool = False) -> dict[str, torch.Tensor]:
    """Token ids and a padding mask: the first row is whole, the others are shorter.

    Args:
        rows: Batch.
        length: Longest row.
        seed: Of the random numbers.
        left: Whether padding stands before the tokens, as for generating.
    """
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, SMALL["vocab_size"], (rows, length), generator=random)
    mask = torch.ones(rows, length, dtype=torch.int64)
    for row in range(1, rows):
        gone = 1 + (row - 1) % max(length - 1, 1)
        mask[row, slice(None, gone) if left else slice(length - gone, None)] = 0
    return {"input_ids": ids, "attention_mask": mask}


TOKEN_DIMS = {"input_ids": {0: "B", 1: "S"}, "attention_mask": {0: "B", 1: "S"}}


def resized(whole: Whole, sizes: dict[str, int], *, seed: int = 1) -> dict[str, torch.Tensor]:
    """Inputs of other sizes: ids and features drawn anew, masks with rows of different length.

    Args:
        whole: The model.
        sizes: The size of each dynamic axis by name.
        seed: Of the random numbers.
    """
    random = torch.Generator().manual_seed(seed)
    made = {}
    for name, example in whole.inputs.items():
        shape = list(example.shape)
        for axis, dim in whole.dims.get(name, {}).items():
            shape[axis] = sizes[dim]
        if "mask" in name:
            made[name] = _mask_like(example, shape)
        elif example.is_floating_point():
            made[name] = torch.randn(shape, generator=random).to(example.dtype)
        else:
            made[name] = torch.randint(0, SMALL["vocab_size"], shape, generator=random)
    return made


def _mask_like(example: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """A mask of [rows, length] with the sense of the example, whose first row is whole."""
    whole = example[0, 0].item()
    mask = torch.full(shape, whole, dtype=example.dtype)
    other = (not whole) if example.dtype == torch.bool else 0
    starts = bool((example[:, 0] != whole).any())
    for row in range(1, shape[0]):
        gone = 1 + (row - 1) % max(shape[1] - 1, 1)
        mask[row, slice(None, gone) if starts else slice(shape[1] - gone, None)] = other
    return mask


# -- Hugging Face -------------------------------------------------------------------------------------------


def _built(name: str, config: str, attention: str, gain: float = 3.0, **facts: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, config)(**facts)
    model = getattr(transformers, name)._from_config(made, attn_implementation=attention)
    _spread(model, gain)
    return model.eval()


def _spread(model: nn.Module, gain: float) -> None:
    """Larger weights than a fresh model has: attention is then far from uniform, and mistakes show."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in name and "relative" not in name:
                weight.mul_(gain)
            elif "relative" in name:
                weight.normal_(0.0, 1.0)


def bert(attention: str = "sdpa") -> Whole:
    """An encoder with a padding mask."""
    facts = {**SMALL, "intermediate_size": 96, "max_position_embeddings": MAX}
    model = _built("BertModel", "BertConfig", attention, **facts)
    return Whole(Tokens(model), tokens(), TOKEN_DIMS)


def gpt2(attention: str = "sdpa") -> Whole:
    """A causal decoder with learned positions; its logits, so that the tied embedding is used twice."""
    facts = {"vocab_size": 99, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": MAX}
    facts |= {"bos_token_id": 1, "eos_token_id": 2}
    model = _built("GPT2LMHeadModel", "GPT2Config", attention, **facts)
    return Whole(Tokens(model, "logits", use_cache=False), tokens(), TOKEN_DIMS)


def llama(attention: str = "sdpa") -> Whole:
    """Rotary embedding, grouped heads."""
    model = _built("LlamaModel", "LlamaConfig", attention, **GROUPED)
    return Whole(Tokens(model, use_cache=False), tokens(), TOKEN_DIMS)


def qwen2(attention: str = "sdpa") -> Whole:
    """LLaMA with biases on Q, K and V."""
    model = _built("Qwen2Model", "Qwen2Config", attention, **GROUPED)
    return Whole(Tokens(model, use_cache=False), tokens(), TOKEN_DIMS)


def qwen3(attention: str = "sdpa") -> Whole:
    """Norms on Q and K, and a head size that does not follow from the width."""
    model = _built("Qwen3Model", "Qwen3Config", attention, **GROUPED, head_dim=32)
    return Whole(Tokens(model, use_cache=False), tokens(), TOKEN_DIMS)


def mistral(attention: str = "sdpa") -> Whole:
    """A sliding window of four keys, shorter than the sequence."""
    model = _built("MistralModel", "MistralConfig", attention, **GROUPED, sliding_window=4)
    return Whole(Tokens(model, use_cache=False), tokens(), TOKEN_DIMS)


def mistral_full(attention: str = "sdpa") -> Whole:
    """Without a window."""
    model = _built("MistralModel", "MistralConfig", attention, **GROUPED, sliding_window=None)
    return Whole(Tokens(model, use_cache=False), tokens(), TOKEN_DIMS)


def t5(attention: str = "sdpa") -> Whole:
    """Encoder and decoder with relative biases, and scores without a scale."""
    facts = {"vocab_size": 99, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    # Its scores have no scale: they are far apart as they are.
    model = _built("T5Model", "T5Config", attention, gain=1.0, **facts)
    inputs = {**tokens(length=SOURCE), "decoder_input_ids": tokens(seed=1)["input_ids"]}
    dims = {
        "input_ids": {0: "B", 1: "T"},
        "attention_mask": {0: "B", 1: "T"},
        "decoder_input_ids": {0: "B", 1: "S"},
    }
    return Whole(TextToText(model, use_cache=False), inputs, dims)


_WHISPER: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "num_mel_bins": 8,
    "max_source_positions": 15,
    "max_target_positions": MAX,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def _features() -> torch.Tensor:
    # Whisper takes windows of one length only.
    return torch.randn(B, 8, 30, generator=torch.Generator().manual_seed(0))


def whisper_encoder(attention: str = "sdpa") -> Whole:
    """Convolutions and an encoder without masks."""
    model = _built("WhisperModel", "WhisperConfig", attention, **_WHISPER).get_encoder()
    return Whole(Audio(model), {"input_features": _features()}, {"input_features": {0: "B"}})


def whisper(attention: str = "sdpa") -> Whole:
    """Encoder and decoder with cross attention."""
    model = _built("WhisperModel", "WhisperConfig", attention, **_WHISPER)
    inputs = {"input_features": _features(), "decoder_input_ids": tokens()["input_ids"]}
    dims = {"input_features": {0: "B"}, "decoder_input_ids": {0: "B", 1: "S"}}
    return Whole(AudioToText(model, use_cache=False), inputs, dims)


def vit(attention: str = "sdpa") -> Whole:
    """Images in patches; only the batch is dynamic."""
    facts = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    model = _built(
        "ViTModel", "ViTConfig", attention, **facts, intermediate_size=96, image_size=16, patch_size=4
    )
    pixels = torch.randn(B, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return Whole(Images(model), {"pixel_values": pixels}, {"pixel_values": {0: "B"}})


class LlamaStep(nn.Module):
    """One call behind a cache: its keys and values come in and go out as plain tensors, layer by layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids, past_key_0, past_value_0, past_key_1, past_value_1):
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        for layer, (key, value) in enumerate(((past_key_0, past_value_0), (past_key_1, past_value_1))):
            cache.update(key, value, layer)
        done = self.model(input_ids=input_ids, past_key_values=cache, use_cache=True)
        kept = [each for layer in cache.layers for each in (layer.keys, layer.values)]
        return done.last_hidden_state, *kept


def llama_step(attention: str = "sdpa") -> Whole:
    """A decoder behind PAST cached rows. Its outputs are the hidden state and the longer cache."""
    model = _built("LlamaModel", "LlamaConfig", attention, **GROUPED)
    random = torch.Generator().manual_seed(0)
    names = [f"past_{kind}_{layer}" for layer in (0, 1) for kind in ("key", "value")]
    inputs = {"input_ids": tokens(length=3)["input_ids"]}
    inputs |= {name: torch.randn(B, 2, PAST, 16, generator=random) for name in names}
    dims = {"input_ids": {0: "B", 1: "S"}, **{name: {0: "B", 2: "P"} for name in names}}
    return Whole(LlamaStep(model), inputs, dims)


# -- PyTorch's own, and by hand -----------------------------------------------------------------------------


class Encoder(nn.Module):
    """nn.TransformerEncoder with a padding mask, True where there is no key."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x, padding_mask):
        return self.encoder(x, src_key_padding_mask=padding_mask)


def transformer_encoder(attention: str = "sdpa") -> Whole:
    """nn.TransformerEncoder; its attention has one implementation only."""
    torch.manual_seed(0)
    module = Encoder().eval()
    x = torch.randn(B, S, 64, generator=torch.Generator().manual_seed(0))
    inputs = {"x": x, "padding_mask": tokens()["attention_mask"] == 0}
    return Whole(module, inputs, {"x": {0: "B", 1: "S"}, "padding_mask": {0: "B", 1: "S"}})


class EncoderDecoder(nn.Module):
    """nn.Transformer: the decoder is causal and looks at the source."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(64, 4, 2, 2, 96, batch_first=True)

    def forward(self, source, target):
        length = target.shape[1]
        causal = torch.triu(torch.full((length, length), -math.inf, dtype=target.dtype), diagonal=1)
        # The flag spares a look at the numbers of the mask, which cannot be exported.
        return self.transformer(source, target, tgt_mask=causal, tgt_is_causal=True)


def transformer(attention: str = "sdpa") -> Whole:
    """nn.Transformer; its attention has one implementation only."""
    torch.manual_seed(0)
    module = EncoderDecoder().eval()
    random = torch.Generator().manual_seed(0)
    inputs = {
        "source": torch.randn(B, SOURCE, 64, generator=random),
        "target": torch.randn(B, S, 64, generator=random),
    }
    return Whole(module, inputs, {"source": {0: "B", 1: "T"}, "target": {0: "B", 1: "S"}})


class Block(nn.Module):
    """One layer as people write it by hand: fused QKV, causal, a norm before each part."""

    def __init__(self, width: int, heads: int, attention: str) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width))

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.attention == "sdpa":
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            causal = torch.ones(length, length, dtype=torch.bool).tril()
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
            y = scores.masked_fill(~causal, -math.inf).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(x)


class Stack(nn.Module):
    """Token embedding, blocks, and the same embedding as the output projection."""

    def __init__(self, layers: int, attention: str, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, width)
        self.layers = nn.ModuleList(Block(width, 4, attention) for _ in range(layers))
        self.head = nn.Linear(width, 99, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def by_hand(attention: str = "sdpa", layers: int = 3) -> Whole:
    """A stack of layers that no library wrote, with tied embeddings."""
    torch.manual_seed(0)
    module = Stack(layers, attention).eval()
    return Whole(module, {"input_ids": tokens()["input_ids"]}, {"input_ids": {0: "B", 1: "S"}})


# -- the list -----------------------------------------------------------------------------------------------

MODELS: dict[str, Callable[..., Whole]] = {
    "bert": bert,
    "gpt2": gpt2,
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mistral": mistral,
    "mistral-full": mistral_full,
    "t5": t5,
    "whisper-encoder": whisper_encoder,
    "whisper": whisper,
    "vit": vit,
    "llama-step": llama_step,
    "transformer-encoder": transformer_encoder,
    "transformer": transformer,
    "by-hand": by_hand,
}
ATTENTIONS = {name: 2 for name in MODELS} | {"t5": 6, "whisper": 6, "transformer": 6, "by-hand": 3}
"""How many attentions each model has."""
ONE_WAY = frozenset({"transformer-encoder", "transformer"})
"""Models whose attention has one implementation only."""


def in_half(whole: Whole) -> Whole:
    """The model and its inputs in float16."""
    inputs = {name: each.half() if each.is_floating_point() else each for name, each in whole.inputs.items()}
    return Whole(whole.module.half(), inputs, whole.dims)


def exported(whole: Whole, opset: int = 23) -> Any:
    """The model as PyTorch's exporter writes it, every axis of `dims` dynamic: an `ir.Model`."""
    named = {name for dims in whole.dims.values() for name in dims.values()}
    # Half of the positions are for the past.
    longest = MAX // 2 if "P" in named else MAX
    axes = {name: torch.export.Dim(name, min=2, max=longest) for name in named}
    names = list(inspect.signature(whole.module.forward).parameters)
    shapes = tuple({at: axes[dim] for at, dim in whole.dims.get(name, {}).items()} for name in names)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    # With gradients T5 cannot be exported: its bias is learned, and takes another path through PyTorch.
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            whole.module,
            tuple(whole.inputs[name] for name in names),
            dynamo=True,
            opset_version=opset,
            dynamic_shapes=shapes,
            verbose=False,
        )
    return program.model
