"""Small models of the kinds that people deploy, for `sensitivity.py`: a factory each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha_deploy import Deployable, Example

E, H = 128, 4


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Attention with four projections; `past` are keys and values before those of x."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(E, E) for _ in range(4))
        for each in (self.q, self.k):
            nn.init.normal_(each.weight, std=0.15)  # scores of some size: a flat softmax hides mistakes

    def forward(self, x: Tensor, mask: Tensor | None = None, past: Any = None, causal: bool = False) -> Any:
        """The result, and the keys and values with those before."""
        q, k, v = _heads(self.q(x)), _heads(self.k(x)), _heads(self.v(x))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.o(y.transpose(1, 2).flatten(2)), k, v


class Block(nn.Module):
    """Attention and an MLP, each behind a norm; `gate` is the size of what they add."""

    def __init__(self, gate: float = 1.0) -> None:
        super().__init__()
        self.first, self.second, self.attention = nn.LayerNorm(E), nn.LayerNorm(E), Attention()
        self.up, self.down, self.gate = nn.Linear(E, 2 * E), nn.Linear(2 * E, E), gate
        for norm in (self.first, self.second):
            nn.init.normal_(norm.weight, 1.0, 0.2)
            nn.init.normal_(norm.bias, 0.0, 0.2)

    def forward(self, x: Tensor, mask: Tensor | None = None, past: Any = None, causal: bool = False) -> Any:
        """The new residual stream, keys and values."""
        y, k, v = self.attention(self.first(x), mask, past, causal)
        x = x + self.gate * y
        return x + self.gate * self.down(F.gelu(self.up(self.second(x)))), k, v


class Encoder(nn.Module):
    """Blocks over hidden states with a padding mask."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(layers)), nn.LayerNorm(E)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[B, S, E], [B, S] -> [B, S, E]."""
        for block in self.blocks:
            x = block(x, mask[:, None, None, :])[0]
        return self.norm(x)


class Classifier(nn.Module):
    """Blocks over hidden states, of which the first is classified."""

    def __init__(self, classes: int, softmax: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head, self.softmax = nn.LayerNorm(E), nn.Linear(E, classes), softmax

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, E] -> [B, classes]."""
        for block in self.blocks:
            x = block(x)[0]
        y = self.head(self.norm(x)[:, 0])
        return y.softmax(-1) if self.softmax else y


class Residual(nn.Module):
    """Causal blocks that change their residual stream by a thousandth."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(1e-3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, E] -> [B, S, E]."""
        for block in self.blocks:
            x = block(x, causal=True)[0]
        return x


class Experts(nn.Module):
    """Attention, then two of eight experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.gate = nn.LayerNorm(E), Attention(), nn.Linear(E, 8)
        self.experts = nn.ModuleList(nn.Linear(E, E) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, E] -> [B, S, E]."""
        x = x + self.attention(self.norm(x), causal=True)[0]
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        every = torch.stack([expert(x) for expert in self.experts], -2)  # [B, S, 8, E]
        taken = every.gather(-2, chosen[..., None].expand(*chosen.shape, E))
        return x + (weights[..., None] * taken).sum(-2)


class Massive(nn.Module):
    """An encoder whose first token has a massive element, and all of them a large channel."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(1)
        self.register_buffer("channel", 300.0 * (torch.arange(E) == 3))
        self.register_buffer("element", 3000.0 * (torch.arange(E) == 5))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[B, S, E], [B, S] -> [B, S, E]."""
        first = (torch.arange(x.shape[1], device=x.device) == 0)[:, None]
        return self.encoder(x, mask) + self.channel + first * self.element


class Decoder(nn.Module):
    """Two causal blocks with a KV cache."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(E, 64)

    def forward(
        self, x: Tensor, past_key: Tensor, past_value: Tensor, key_1: Tensor, value_1: Tensor
    ) -> dict[str, Tensor]:
        """New tokens [B, S, E] behind cached ones [B, H, P, D]."""
        P, S = past_key.shape[2], x.shape[1]
        at = torch.arange(S, device=x.device)[:, None] + P
        mask = torch.arange(P + S, device=x.device)[None] <= at
        x, k, v = self.blocks[0](x, mask, (past_key, past_value))
        x, k1, v1 = self.blocks[1](x, mask, (key_1, value_1))
        return {"logits": self.head(x), "k": k, "v": v, "k1": k1, "v1": v1}


def _of(module: nn.Module, **more: Any) -> Deployable:
    inputs = {"x": Example(torch.randn(2, 16, E), "B", "S"), **more}
    return Deployable(module=module, inputs=inputs, axes={"B": "1:4:8", "S": "2:33:96"})


def _mask() -> Example:
    return Example(torch.arange(16) < torch.tensor([[16], [11]]), "B", "S")


def vit() -> Deployable:
    """Two layers with a head of ten classes."""
    return _of(Classifier(10, softmax=False))


def two_classes() -> Deployable:
    """Two layers with a softmax over two classes."""
    return _of(Classifier(2, softmax=True))


def residual() -> Deployable:
    """Attention that adds a thousandth."""
    return _of(Residual())


def experts() -> Deployable:
    """A mixture of experts."""
    return _of(Experts())


def massive() -> Deployable:
    """A large channel and a massive element, as language models have them."""
    return _of(Massive(), mask=_mask())


def twelve_layers() -> Deployable:
    """Twelve layers with a padding mask."""
    return _of(Encoder(12), mask=_mask())


def decoder() -> Deployable:
    """Two layers with a KV cache."""
    caches = {"past_key": "k", "past_value": "v", "key_1": "k1", "value_1": "v1"}
    inputs = {"x": Example(torch.randn(2, 5, E), "B", "S")}
    inputs |= {name: Example(torch.randn(2, H, 6, E // H), "B", None, "P") for name in caches}
    axes = {"B": "1:4:8", "S": "1:8:16", "P": "0:24:63"}
    return Deployable(module=Decoder(), inputs=inputs, axes=axes, kv_cache=caches)


def encoder() -> Deployable:
    """Two layers with a padding mask."""
    return _of(Encoder(2), mask=_mask())


def encoder_file(path: Path) -> nn.Module:
    """The module `encoder`, which is written to an ONNX file in FP32."""
    model = encoder()
    module = model.module.eval()
    example = {name: each.tensor for name, each in model.inputs.items()}
    B, S = torch.export.Dim("B", min=1, max=8), torch.export.Dim("S", min=2, max=96)
    shapes = {name: {0: B, 1: S} for name in example}
    torch.onnx.export(module, (), path, kwargs=example, dynamic_shapes=shapes, dynamo=True, verbose=False)
    return module
