"""A user's own model, and factories that do not meet the contract."""

import math
import os
import random

import torch
import torch.nn.functional as F
from torch import nn

from mha_deploy.model.deployable import Deployable, Example


class HandWritten(nn.Module):
    """Self attention as people write it, with a padding mask and -inf."""

    def __init__(self, E=64, Hq=4):
        super().__init__()
        self.Hq, self.qkv, self.out = Hq, nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, x, mask):
        B, S, E = x.shape
        q, k, v = (t.view(B, S, self.Hq, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(E // self.Hq)
        scores = scores.masked_fill(mask[:, None, None, :] == 0, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, S, E))


class Block(nn.Module):
    def __init__(self, E=64):
        super().__init__()
        self.attention, self.before, self.after = HandWritten(E), nn.LayerNorm(E), nn.LayerNorm(E)
        self.mlp = nn.Sequential(nn.Linear(E, 2 * E), nn.GELU(), nn.Linear(2 * E, E))

    def forward(self, x, mask):
        x = x + self.attention(self.before(x), mask)
        return x + self.mlp(self.after(x)) if self.mlp else x


class Encoder(nn.Module):
    """Some layers over tokens."""

    def __init__(self, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, tokens, mask):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return {"hidden": x, "pooled": x.mean(1)}


def examples():
    tokens = torch.arange(24).reshape(3, 8)
    mask = torch.ones(3, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    mask[2, 3:] = 0
    return {"tokens": Example(tokens, "B", "S"), "mask": Example(mask, "B", "S")}


def _encoder(layers, summary=""):
    axes = {"B": "1:4:8", "S": (1, 32, 64)}
    return Deployable(module=Encoder(layers), inputs=examples(), axes=axes, summary=summary)


def encoder():
    """Three layers; but for the first they have no MLP and no norm: an export is quicker."""
    made = _encoder(3, "three layers")
    for block in made.module.blocks[1:]:
        block.before, block.after = nn.Identity(), None
        block.mlp = None
    return made


def one_layer():
    return _encoder(1)


class Unfusable(Encoder):
    """The second of its attentions has a softmax over something else than the scores alone."""

    def __init__(self):
        super().__init__(2)
        self.blocks[1].attention = _Gated()


class _Gated(HandWritten):
    def forward(self, x, mask):
        B, S, E = x.shape
        q, k, v = (t.view(B, S, self.Hq, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = torch.sin(q @ k.transpose(-2, -1))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, S, E))


class _Talking(HandWritten):
    """A GEMM mixes the heads between the softmax and the matmul with V."""

    def __init__(self, E=64, Hq=4):
        super().__init__(E, Hq)
        self.mix = nn.Linear(Hq, Hq, bias=False)

    def forward(self, x, mask):
        B, S, E = x.shape
        q, k, v = (t.view(B, S, self.Hq, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
        weights = self.mix(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.out((weights @ v).transpose(1, 2).reshape(B, S, E))


def talking():
    """One attention of two is one with talking heads."""
    made = unfusable()
    made.module.blocks[1].attention = _Talking()
    for block in made.module.blocks:  # without the rest, an export takes half the time
        block.after = block.mlp = None
    return made


def only_talking():
    """No attention can be one node."""
    made = talking()
    for block in made.module.blocks:
        block.attention = _Talking()
    return made


def unfusable():
    return Deployable(module=Unfusable(), inputs=examples(), axes={"B": "1:4:8", "S": "1:32:64"})


def forgetful():
    """Other weights each time."""
    made = _encoder(1)
    with torch.no_grad():
        made.module.embedding.weight += random.SystemRandom().random()
    return made


class Windowed(nn.Module):
    """Attention to the latest `window` tokens."""

    def __init__(self, window):
        super().__init__()
        self.window = window

    def forward(self, x):
        at = torch.arange(x.shape[1])
        seen = (at <= at[:, None]) & (at > at[:, None] - self.window)
        heads = x[:, None]
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=seen)[:, 0]


def rewritten():
    """Code that the environment changes, and with it what longer sequences give."""
    window = int(os.environ.get("OWN_MODELS_WINDOW", "4"))
    return Deployable(
        module=Windowed(window),
        inputs={"x": Example(torch.randn(2, 6, 16), "B", "S")},
        axes={"B": "1:2:4", "S": "1:6:12"},
    )


def fails():
    raise ZeroDivisionError("no model today")


def needs_arguments(size):
    return encoder()


def gives_a_module():
    return Encoder()


def no_inputs():
    return Deployable(module=Encoder(), inputs={})


def not_a_module():
    return Deployable(module=print, inputs=examples(), axes={"B": "1:4:8", "S": "1:32:64"})


def no_example():
    return Deployable(
        module=Encoder(), inputs={**examples(), "mask": torch.ones(3, 8)}, axes={"B": "1", "S": "1"}
    )


def unknown_axis():
    return Deployable(module=Encoder(), inputs=examples(), axes={"B": "1:4:8", "T": "1:32:64"})


def unused_axis():
    return Deployable(module=Encoder(), inputs=examples(), axes={"B": "1:4:8", "S": "1:32:64", "T": "1:2:3"})


def two_sizes():
    other = {**examples(), "mask": Example(torch.ones(3, 9, dtype=torch.int64), "B", "S")}
    return Deployable(module=Encoder(), inputs=other, axes={"B": "1:4:8", "S": "1:32:64"})


def too_many_names():
    other = {**examples(), "mask": Example(torch.ones(3, 8, dtype=torch.int64), "B", "S", "S")}
    return Deployable(module=Encoder(), inputs=other, axes={"B": "1:4:8", "S": "1:32:64"})


def unknown_input():
    return Deployable(
        module=Encoder(),
        inputs={**examples(), "masks": examples()["mask"]},
        axes={"B": "1:4:8", "S": "1:32:64"},
    )


def unnamed_inputs():
    class Passes(Encoder):
        def forward(self, *given):
            return super().forward(*given)

    return Deployable(module=Passes(), inputs=examples(), axes={"B": "1:4:8", "S": "1:32:64"})


def missing_input():
    given = {"tokens": examples()["tokens"]}
    return Deployable(module=Encoder(), inputs=given, axes={"B": "1:4:8", "S": "1:32:64"})


def bad_range():
    return Deployable(module=Encoder(), inputs=examples(), axes={"B": "1:4:8", "S": 64})


def overflowing():
    """Two layers; the MLP of the second reaches beyond what FP16 can hold, and comes back."""
    made = _encoder(2)
    first, _, last = made.module.blocks[1].mlp
    with torch.no_grad():
        first.weight *= 2e5
        last.weight /= 2e5
    return made


# -- a decoder with a KV cache ---------------------------------------------------------------------


class DecoderBlock(nn.Module):
    """Causal attention behind cached keys and values."""

    def __init__(self, E=32, Hq=2):
        super().__init__()
        self.Hq, self.qkv, self.out, self.norm = Hq, nn.Linear(E, 3 * E), nn.Linear(E, E), nn.LayerNorm(E)

    def forward(self, x, past_key, past_value, mask):
        B, S, E = x.shape
        q, k, v = (t.view(B, S, self.Hq, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(attended.transpose(1, 2).reshape(B, S, E)), k, v


class Decoder(nn.Module):
    """Two blocks with a dynamic KV cache.

    `offset` False forgets that tokens are behind the cached ones, and so does `attended` in the mask.
    """

    def __init__(self, *, offset=True, by_token=True, attended=True):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 32), nn.Embedding(64, 32)
        self.blocks, self.head = nn.ModuleList(DecoderBlock() for _ in range(2)), nn.Linear(32, 50)
        self.offset, self.by_token, self.attended = offset, by_token, attended

    def forward(self, ids, past_key, past_value, past_key_1, past_value_1):
        P, S = past_key.shape[2], ids.shape[1]
        at = torch.arange(S, device=ids.device) + P
        mask = torch.arange(P + S, device=ids.device)[None, :] <= (at if self.attended else at - P)[:, None]
        x = self.tokens(ids) + self.positions(at if self.offset else at - P)
        x, key, value = self.blocks[0](x, past_key, past_value, mask)
        x, key_1, value_1 = self.blocks[1](x, past_key_1, past_value_1, mask)
        logits = self.head(x if self.by_token else x[:, -1])
        return {
            "logits": logits,
            "present_key": key,
            "present_value": value,
            "present_key_1": key_1,
            "present_value_1": value_1,
        }


CACHED = {
    "past_key": "present_key",
    "past_value": "present_value",
    "past_key_1": "present_key_1",
    "past_value_1": "present_value_1",
}


def decoder(kv_cache=CACHED, axes=None, **options):
    torch.manual_seed(0)
    inputs = {"ids": Example(torch.randint(0, 50, (2, 5)), "B", "S")}
    inputs |= {name: Example(torch.randn(2, 2, 6, 16), "B", None, "P") for name in CACHED}
    return Deployable(
        module=Decoder(**options),
        inputs=inputs,
        axes={"B": "1:2:4", "S": "1:8:32", "P": "0:8:31", **(axes or {})},
        kv_cache=kv_cache,
    )


def decoder_without_offset():
    return decoder(offset=False)


def decoder_without_cached_keys():
    """The mask hides most cached tokens; the prompt is as long as the longest call."""
    return decoder(axes={"S": "1:4:8"}, attended=False)


def decoder_of_the_last_token():
    return decoder(by_token=False)


def decoder_that_is_never_empty():
    return decoder(axes={"P": "1:8:31"})


def decoder_of_an_unknown_output():
    return decoder({**CACHED, "past_key": "key"})


def decoder_of_half_a_cache():
    return decoder({name: output for name, output in CACHED.items() if not name.endswith("_1")})


def decoder_of_an_unknown_input():
    return decoder({"key": "present_key"})


def decoder_whose_cache_does_not_grow():
    return decoder({**CACHED, "past_key": "logits"})
