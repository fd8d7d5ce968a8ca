"""Decoders of a user's own with preallocated KV caches, in the forms in which people write them."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from mha_deploy.model.deployable import Deployable, Example

VOCABULARY, WIDTH, HEADS, KV_HEADS, SIZE = 40, 64, 4, 2, 16


class CachedDecoder(nn.Module):
    """One layer of grouped attention behind embeddings; what a subclass writes decides where keys go."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(128, WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * KV_HEADS * SIZE)
        self.out, self.logits = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def heads(self, ids, at):
        x = self.tokens(ids) + self.places(at)
        k, v = self.kv(x).unflatten(-1, (2, KV_HEADS, SIZE)).permute(2, 0, 3, 1, 4)
        return x, self.q(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2), k, v

    def attend(self, x, q, k, v, mask):
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.logits(x + self.out(y.transpose(1, 2).flatten(-2)))


class InPlace(CachedDecoder):
    """Changes its cache in place, and returns the logits alone."""

    def forward(self, ids, cache_position, keys, values):
        x, q, k, v = self.heads(ids, cache_position)
        keys[:, :, cache_position], values[:, :, cache_position] = k, v
        mask = torch.arange(keys.shape[2], device=ids.device) <= cache_position[:, None]
        return self.attend(x, q, keys, values, mask)


class WithoutMask(CachedDecoder):
    """A mistake: reads entries that no token wrote."""

    def forward(self, ids, cache_position, keys, values):
        x, q, k, v = self.heads(ids, cache_position)
        keys[:, :, cache_position], values[:, :, cache_position] = k, v
        return self.attend(x, q, keys, values, None)


class WithoutCached(CachedDecoder):
    """A mistake: the mask begins again at every call."""

    def forward(self, ids, cache_position, keys, values):
        x, q, k, v = self.heads(ids, cache_position)
        keys[:, :, cache_position], values[:, :, cache_position] = k, v
        at = torch.arange(ids.shape[1], device=ids.device)
        return self.attend(x, q, keys, values, torch.arange(keys.shape[2], device=ids.device) <= at[:, None])


class Ragged(CachedDecoder):
    """Every batch element has a length of its own."""

    def forward(self, ids, lengths, keys, values):
        at = lengths[:, None] + torch.arange(ids.shape[1], device=ids.device)
        x, q, k, v = self.heads(ids, at)
        index = at[:, None, :, None].expand_as(k).long()
        k, v = keys.scatter(2, index, k), values.scatter(2, index, v)
        mask = torch.arange(k.shape[2], device=ids.device) <= at[:, None, :, None]
        return self.attend(x, q, k, v, mask), k, v


class Ring(CachedDecoder):
    """A ring buffer: the oldest entries are overwritten."""

    def forward(self, ids, cache_position, keys, values):
        x, q, k, v = self.heads(ids, cache_position)
        size = keys.shape[2]
        k, v = (c.index_copy(2, cache_position % size, new) for c, new in ((keys, k), (values, v)))
        held = cache_position[-1] - (cache_position[-1] - torch.arange(size, device=ids.device)) % size
        mask = (held >= 0) & (held <= cache_position[:, None])
        return {"logits": self.attend(x, q, k, v, mask), "keys_out": k, "values_out": v}


class Window(CachedDecoder):
    """Keeps the last tokens, the newest at the end."""

    def forward(self, ids, past, keys, values):
        S, size = ids.shape[1], keys.shape[2]
        at = torch.arange(S, device=ids.device) + past
        x, q, k, v = self.heads(ids, at)
        k, v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        held = torch.arange(size + S, device=ids.device) + past - size
        mask = (held >= 0) & (held <= at[:, None]) & (held > at[:, None] - size)
        return {"logits": self.attend(x, q, k, v, mask), "keys_out": k[:, :, S:], "values_out": v[:, :, S:]}


def deployable(module, entries=24, *, by="cache_position", longest=0, tokens="1:4:12", **options):
    """A decoder with the examples of its inputs."""
    torch.manual_seed(0)
    places = {
        "cache_position": Example(torch.arange(5), "S"),
        "lengths": Example(torch.arange(2, dtype=torch.int32), "B"),
        "past": Example(torch.tensor([3])),
    }
    cache = Example(torch.randn(2, KV_HEADS, entries, SIZE), "B", None, "T")
    return Deployable(
        module=module,
        inputs={
            "ids": Example(torch.randint(0, VOCABULARY, (2, 5)), "B", "S"),
            by: places[by],
            "keys": cache,
            "values": cache,
        },
        axes={"B": "1:2:4", "S": tokens, "T": str(entries)},
        kv_cache={"keys": "keys_out", "values": "values_out"},
        positions=by,
        longest=longest,
        **options,
    )


def in_place():
    return deployable(InPlace())


def without_mask():
    return deployable(WithoutMask())


def without_cached():
    return deployable(WithoutCached())


def ragged():
    return deployable(Ragged(), by="lengths", outputs=("logits", "keys_out", "values_out"))


def ring():
    return deployable(Ring(), 8, longest=64, tokens="1:4:8")


def window():
    return deployable(Window(), 8, by="past", longest=64)


FORMS = {"in_place": in_place, "ragged": ragged, "ring": ring, "window": window}


class SmallValues(CachedDecoder):
    """Another size for values than for keys, and values that change little."""

    def forward(self, ids, cache_position, keys, values):
        x, q, k, v = self.heads(ids, cache_position)
        k, v = keys.index_copy(2, cache_position, k), values.index_copy(2, cache_position, v[..., :8] / 16)
        mask = torch.arange(k.shape[2], device=ids.device) <= cache_position[:, None]
        y = F.scaled_dot_product_attention(q, k, F.pad(v, (0, 8)), attn_mask=mask, enable_gqa=True)
        logits = self.logits(x + self.out(y.transpose(1, 2).flatten(-2)))
        return {"logits": logits, "keys_out": k, "values_out": v}


def forgotten_values():
    """A mistake: kv_cache does not name the values, which have other axes than the keys."""
    made = deployable(SmallValues(), tokens="1:4:8")
    values = Example(torch.randn(2, KV_HEADS, 24, 8) / 16, "B", None, "T")
    return replace(made, inputs={**made.inputs, "values": values}, kv_cache={"keys": "keys_out"})
