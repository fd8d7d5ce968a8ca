"""Keys and values that are kept between calls, so that a new token costs one row instead of all of them.

A cache holds keys after the rotary embedding, [B, Hkv, length, D]. Query i of a call with S new tokens stands
at position past + i and sees the keys up to there.

`growing`  the past comes in, past and new rows go out: [B, Hkv, P, D] -> [B, Hkv, P+S, D]. All rows of the
           batch have the same past.
`static`   buffers of T rows; row b of the batch is valid up to `lengths[b]`, and its new rows go to
           lengths[b] … lengths[b] + S − 1. Rows of the batch may have different lengths. What stands behind
           the valid rows changes nothing, whatever it is; in an exported graph it must be finite.

A batch of prompts of different lengths is padded on the right: the rows that padding writes are behind the
valid ones, and the next call overwrites them. They must fit into the buffer all the same, and be finite.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mha_deploy.errors import DeployError

if TYPE_CHECKING:
    from mha_deploy.reference.attention import Attention


def append_rows(past: Tensor, new: Tensor) -> Tensor:
    """The past, then the new rows. [B, Hkv, P, D], [B, Hkv, S, D] -> [B, Hkv, P+S, D]."""
    return torch.cat((past, new), dim=2)


def write_rows(cache: Tensor, new: Tensor, positions: Tensor, *, in_place: bool = False) -> Tensor:
    """Put new rows at their positions.

    Args:
        cache: [B, Hkv, T, D].
        new: [B, Hkv, S, D].
        positions: Where they go in each row of the batch, [B, S].
        in_place: Whether to write into `cache` itself; otherwise it is left alone.
    """
    index = positions.long()[:, None, :, None].expand_as(new)
    return cache.scatter_(2, index, new) if in_place else cache.scatter(2, index, new)


def valid_rows(cache: Tensor, ends: Tensor) -> Tensor:
    """The cache with zeros from `ends[b]` on: a weight of 0 times what memory held, say NaN, is not 0."""
    rows = torch.arange(cache.shape[2], device=cache.device)
    return cache.masked_fill((rows >= ends[:, None])[:, None, :, None], 0.0)


def check_room(lengths: Tensor, S: int, T: int) -> None:
    """Refuse to write behind the end of a static cache.

    The lengths are data: a traced or compiled layer cannot look at them, and whoever runs it must.
    """
    if torch.compiler.is_compiling() or lengths.is_meta:
        return
    if bool((lengths < 0).any()) or bool((lengths + S > T).any()):
        raise DeployError(
            "The new tokens do not fit into the cache.",
            got=f"lengths {lengths.tolist()}, {S} new tokens, {T} rows",
            hint=f"lengths from 0 to {T - S}, or a cache with more rows",
        )


def given(layer: str, **tensors: Tensor | None) -> list[Tensor]:
    """The tensors that a layer with a cache needs; refuse a call that does not bring them."""
    missing = [name for name, tensor in tensors.items() if tensor is None]
    if missing:
        raise DeployError(
            f"{layer} keeps a cache, and the call brings none.",
            got=f"no {', '.join(missing)}",
            hint="reference.cache.Decoder makes an empty one",
        )
    return [tensor for tensor in tensors.values() if tensor is not None]


class Decoder:
    """Feeds a layer new tokens and keeps its cache.

    Args:
        module: A layer whose spec has a cache.
        B: Rows of the batch.

    Attributes:
        keys: The cached keys.
        values: The cached values.
        lengths: How many tokens each row has seen, int32 [B].
    """

    def __init__(self, module: Attention, B: int) -> None:
        spec, parameter = module.spec, next(module.parameters())
        if spec.cache == "none":
            raise DeployError(
                f"{spec.name} has no cache to decode with.", got="cache = none", hint='cache = "growing"'
            )
        self.module = module
        rows = spec.axes["T"].max if spec.cache == "static" else 0
        self.keys = parameter.new_zeros(B, spec.Hkv, rows, spec.D)
        self.values = torch.zeros_like(self.keys)
        self.lengths = torch.zeros(B, dtype=torch.int32, device=parameter.device)

    def feed(self, x: Tensor, counts: Tensor | None = None) -> Tensor:
        """Run the layer on S new tokens of every row.

        Args:
            x: [B, S, E].
            counts: How many of the S tokens of each row are real, [B], padding behind them; all unless given.
                Static caches only.

        Returns:
            The output [B, S, E]; what stands at padded tokens means nothing.
        """
        if self.module.spec.cache == "static":
            held = {"key_cache": self.keys, "value_cache": self.values, "lengths": self.lengths}
        elif counts is None:
            held = {"past_key": self.keys, "past_value": self.values}
        else:
            raise DeployError(
                "The rows of a growing cache have one length.", got="counts", hint='cache = "static"'
            )
        output, self.keys, self.values = self.module(x, **held)
        self.lengths = self.lengths + (x.shape[1] if counts is None else counts.to(self.lengths))
        return output


def decode_in_chunks(module: Attention, x: Tensor, sizes: Iterable[int]) -> tuple[Tensor, Decoder]:
    """Feed x [B, length, E] from an empty cache, in chunks of these sizes.

    Returns:
        The outputs one behind the other, [B, length, E], and the decoder with the cache at the end.
    """
    decoder = Decoder(module, x.shape[0])
    return torch.cat([decoder.feed(chunk) for chunk in x.split(list(sizes), dim=1)], dim=1), decoder
