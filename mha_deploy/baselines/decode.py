"""A layer with a cache as a decoder in service runs it: what is timed beside the engines.

The reference layers of `reference.attention` are written to be read: they copy a static cache before they
write to it, blank the rows that are not valid, and move the heads of all rows about. This one computes the
same and copies no row of a cache that it need not (but for the path `plain`, which repeats grouped heads):

`growing`  past and new rows are joined in one copy, which no growing cache can do without.
`static`   new rows are written into the caller's buffers, which are then read as they are, behind a mask that
           the lengths say. What stands behind the valid rows must be finite: a weight of 0 times NaN is NaN.

No call waits for the device, so each of them can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mha_deploy.errors import DeployError
from mha_deploy.reference.attention import Attention
from mha_deploy.reference.cache import given
from mha_deploy.reference.core import Heads, attend, merge_heads, split_heads
from mha_deploy.reference.masks import seen_from
from mha_deploy.reference.rotary import rotate


class DecodeLayer(nn.Module):
    """Steps a layer; its calls take and give what those of the layer do.

    Args:
        layer: The layer, with a cache; its weights are shared.
    """

    def __init__(self, layer: Attention) -> None:
        super().__init__()
        if layer.spec.cache == "none":
            raise DeployError(
                f"{layer.spec.name} has no cache to decode with.", got="cache = none", hint='cache = "static"'
            )
        self.layer = layer

    def forward(
        self,
        query: Tensor,
        past_key: Tensor | None = None,
        past_value: Tensor | None = None,
        key_cache: Tensor | None = None,
        value_cache: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the layer, as `Attention.forward` describes it; but static caches are written to.

        Whether the new tokens fit into a static cache is not looked at: the lengths are on the device.

        Returns:
            The output [B, S, E], and the keys and values to bring to the next call.
        """
        name = self.layer.spec.name
        if self.layer.spec.cache == "growing":
            return self._grow(query, *given(name, past_key=past_key, past_value=past_value))
        tensors = given(name, key_cache=key_cache, value_cache=value_cache, lengths=lengths)
        return self._write(query, *tensors)

    def _grow(self, query: Tensor, past_key: Tensor, past_value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec, S, past = self.layer.spec, query.shape[1], past_key.shape[2]
        q, k, v = self._new_rows(query, slice(past, past + S))
        keys = torch.cat((merge_heads(past_key), k), dim=1)  # [B, P+S, Hkv·D]
        values = torch.cat((merge_heads(past_value), v), dim=1)
        output = self._output(query, q, keys, values, None, past=past)
        return output, split_heads(keys, spec.Hkv), split_heads(values, spec.Hkv)

    def _write(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        spec, S, T = self.layer.spec, query.shape[1], key_cache.shape[2]
        positions = lengths.long()[:, None] + torch.arange(S, device=query.device)
        q, k, v = self._new_rows(query, positions)
        rows = torch.arange(query.shape[0], device=query.device)[:, None]
        for cache, new in ((key_cache, k), (value_cache, v)):
            # An index_put: torch.compile does this one in place, while it copies the buffer for a scatter.
            cache[rows, :, positions] = new.unflatten(-1, (spec.Hkv, spec.D))
        mask = seen_from(positions, T, spec.window)[:, None]
        output = self._output(query, q, merge_heads(key_cache), merge_heads(value_cache), mask)
        return output, key_cache, value_cache

    def _new_rows(self, query: Tensor, positions: slice | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V of the new tokens side by side; the angles of their positions are looked up."""
        spec = self.layer.spec
        q, k, v = self.layer.project(query, None, None)
        if spec.rope is None:
            return q, k, v
        if self.layer.rotary is None:
            raise DeployError("The layer has no rotary tables.", hint="reference.build_module makes them")
        cos, sin = (table[positions] for table in self.layer.rotary)
        q, k = (
            rotate(x.unflatten(-1, (-1, spec.D)), cos, sin, interleaved=spec.rope.interleaved).flatten(-2)
            for x in (q, k)
        )
        return q, k, v

    def _output(
        self, query: Tensor, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, past: int = 0
    ) -> Tensor:
        """Attention and the output stage; without a mask, queries see what `past` and the window leave."""
        spec = self.layer.spec
        layout = Heads(
            Hq=spec.Hq,
            Hkv=spec.Hkv,
            scale=spec.softmax_scale,
            causal=mask is None,
            window=spec.window if mask is None else None,
            softcap=spec.softcap,
            past=past,
            sees_itself=True,
        )
        heads, _ = attend(q, keys, values, mask, layout, self.layer.path)
        return self.layer.combine(heads, query)


def side_by_side(cache: Tensor) -> Tensor:
    """The same cache [B, Hkv, length, D], in memory as [B, length, Hkv, D].

    The heads of a token lie side by side then, as projections write them, and merging them copies nothing;
    every kernel of PyTorch's fused attention reads them so.
    """
    return cache.transpose(1, 2).contiguous().transpose(1, 2)
