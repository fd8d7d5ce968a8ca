"""The FP64 oracle at sizes whose scores do not fit memory at once.

PyTorch has no fused FP64 attention on a GPU: it keeps all B·Hq·S·T scores. Batch rows do not know of each
other, nor do queries: the layer is run some batch rows at a time, and its attention some queries at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mha_deploy.analyze.sizes import oracle_bytes
from mha_deploy.export.eager import run_module
from mha_deploy.reference.attention import Attention
from mha_deploy.reference.masks import causal_mask

_COPIES_OF_SCORES = 3  # before the softmax, after it, and one in between


def run_in_blocks(module: Attention, arguments: dict[str, Tensor], limit_bytes: int) -> tuple[Tensor, ...]:
    """Run a layer as `export.eager.run_module` does, within a bound on memory.

    Args:
        module: The layer.
        arguments: Its inputs, by the names of `Attention.forward`.
        limit_bytes: Memory for scores and activations of one block; one query of one batch row always runs.

    Returns:
        The outputs, on the CPU.
    """
    batch = arguments["query"].shape[0]
    rows = max(1, limit_bytes // _bytes_per_row(module, arguments))
    blocks = []
    for start in range(0, batch, rows):
        taken = _batch_rows(arguments, slice(start, start + rows))
        with QueriesInBlocks(limit_bytes):
            blocks.append([output.cpu() for output in run_module(module, taken)])
    return tuple(torch.cat(parts) for parts in zip(*blocks, strict=True))


def _bytes_per_row(module: Attention, arguments: dict[str, Tensor]) -> int:
    spec = module.spec
    sizes = {"B": 1, "S": arguments["query"].shape[1]}
    if spec.cache == "growing":
        sizes["P"] = arguments["past_key"].shape[2]
    elif spec.cache == "static":
        sizes["T"] = arguments["key_cache"].shape[2]
    elif spec.is_cross:
        sizes["T"] = arguments["key"].shape[1]
    return oracle_bytes(spec, sizes)


def _batch_rows(arguments: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    return {
        name: tensor if name == "attention_bias" else tensor[rows]  # which all rows share
        for name, tensor in arguments.items()
    }


class QueriesInBlocks(TorchFunctionMode):
    """Compute PyTorch's attention some queries at a time, where its scores would exceed a bound."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self._limit_bytes = limit_bytes

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._attention(*args, **kwargs)

    def _attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        S, T = q.shape[-2], k.shape[-2]
        bytes_per_query = _COPIES_OF_SCORES * q.element_size() * q.shape[0] * q.shape[1] * T
        rows = max(1, self._limit_bytes // bytes_per_query)
        if rows >= S:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=attn_mask, is_causal=is_causal, **options
            )
        mask = causal_mask(S, T, q.device) if is_causal else attn_mask
        blocks = []
        for start in range(0, S, rows):
            queries = slice(start, start + rows)
            visible = mask if mask is None or mask.shape[-2] == 1 else mask[..., queries, :]
            blocks.append(
                F.scaled_dot_product_attention(q[..., queries, :], k, v, attn_mask=visible, **options)
            )
        return torch.cat(blocks, dim=-2)
