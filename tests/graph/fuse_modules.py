"""Attention as other people write it: one small PyTorch module for each spelling."""

from __future__ import annotations

import inspect
import io
import logging
import math
import warnings
from dataclasses import dataclass

import onnx
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import nn

E, H, D = 32, 4, 8


class Layer(nn.Module):
    """Projections and heads; the spelling is what `attend` makes of them."""

    Hkv = H

    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Linear(E, E), nn.Linear(E, E)
        self.k, self.v = nn.Linear(E, self.Hkv * D), nn.Linear(E, self.Hkv * D)

    def heads(self, x):
        B, S, _ = x.shape
        split = ((self.q, H), (self.k, self.Hkv), (self.v, self.Hkv))
        return [layer(x).view(B, S, count, D).transpose(1, 2) for layer, count in split]

    def forward(self, x, *mask):
        y = self.attend(*self.heads(x), *mask)
        B, _, S, _ = y.shape
        return self.o(y.transpose(1, 2).reshape(B, S, E))


def spelling(attend, **facts):
    """A module class from its `attend`."""
    return type(attend.__name__, (Layer,), {"attend": lambda self, *given: attend(*given), **facts})


# -- scaled_dot_product_attention -----------------------------------------------------------------


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def sdpa_causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_mask(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def sdpa_scale(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=0.5)


def sdpa_gqa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


# -- where the scale stands -------------------------------------------------------------------------


def scale_after(q, k, v):
    return (q @ k.transpose(-2, -1) * D**-0.5).softmax(-1) @ v


def divided(q, k, v):
    return F.softmax(torch.matmul(q, k.transpose(2, 3)) / math.sqrt(D), dim=-1).matmul(v)


def divided_by_tensor(q, k, v):
    return (q @ k.transpose(2, 3) / torch.sqrt(torch.tensor(float(D)))).softmax(3) @ v


def scale_on_q(q, k, v):
    return ((q * D**-0.5) @ k.permute(0, 1, 3, 2)).softmax(-1) @ v


def scale_on_both(q, k, v):
    return ((q * D**-0.25) @ (k * D**-0.25).mT).softmax(-1) @ v


def unscaled(q, k, v):
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def softcapped(q, k, v):
    return (torch.tanh(q @ k.transpose(-1, -2) * D**-0.5 / 2.0) * 2.0).softmax(-1) @ v


def in_float32(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) * D**-0.5, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def cast_to_float32(q, k, v):
    return (q @ k.transpose(-1, -2) * D**-0.5).float().softmax(-1).to(q.dtype) @ v


def dropped(q, k, v):
    return F.dropout((q @ k.transpose(-1, -2) * D**-0.5).softmax(-1), 0.1, training=False) @ v


# -- masks --------------------------------------------------------------------------------------------


def filled(number):
    def filled(q, k, v, mask):
        return (q @ k.transpose(-1, -2) * D**-0.5).masked_fill(mask == 0, number).softmax(-1) @ v

    return filled


def lowest(q, k, v, mask):
    scores = q @ k.transpose(-1, -2) * D**-0.5
    return torch.where(mask, scores, torch.finfo(scores.dtype).min).softmax(-1) @ v


def added(q, k, v, mask):
    return (q @ k.transpose(-1, -2) * D**-0.5 + mask).softmax(-1) @ v


def added_before_scale(q, k, v, mask):
    return ((q @ k.transpose(-1, -2) + mask) / math.sqrt(D)).softmax(-1) @ v


def bert(q, k, v, mask):
    extended = (1.0 - mask[:, None, None, :].to(q.dtype)) * -10000.0
    return (q @ k.transpose(-1, -2) / math.sqrt(D) + extended).softmax(-1) @ v


def padding(q, k, v, mask):
    return (q @ k.transpose(-1, -2) / math.sqrt(D)).masked_fill(mask[:, None, None, :] == 0, -1e9).softmax(
        -1
    ) @ v


def biased_and_filled(q, k, v, mask):
    bias = -torch.arange(k.shape[2], dtype=q.dtype)[None, None, None, :]
    return (q @ k.transpose(-1, -2) * D**-0.5 + bias).masked_fill(~mask, -1e9).softmax(-1) @ v


# -- causal ---------------------------------------------------------------------------------------------


class Subsampled(Layer):
    """Speech: every other frame, of a convolution and of the mask, which hides scores and then weights."""

    def __init__(self):
        super().__init__()
        self.front = nn.Conv1d(E, E, 3, stride=2, padding=1)

    def forward(self, x, mask):
        x, hidden = self.front(x.transpose(1, 2)).transpose(1, 2), mask[:, None, None, ::2] == 0
        B, S, _ = x.shape
        q, k, v = self.heads(x)
        weights = (q @ k.transpose(-1, -2) * D**-0.5).masked_fill(hidden, -1e4).softmax(-1)
        y = weights.masked_fill(hidden, 0.0) @ v
        return self.o(y.transpose(1, 2).reshape(B, S, E))


class TrilBuffer(Layer):
    fill = float("-inf")

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def attend(self, q, k, v):
        S = q.shape[2]
        scores = q @ k.transpose(-1, -2) * D**-0.5
        return scores.masked_fill(self.bias[:, :, :S, :S] == 0, self.fill).softmax(-1) @ v


class TrilBufferFinite(TrilBuffer):
    fill = -1e9


class ShiftedTrilBuffer(TrilBuffer):
    """Each query sees the next key too: a mask, but not the causal one."""

    def __init__(self):
        super().__init__()
        self.bias = torch.tril(torch.ones(64, 64), 1).view(1, 1, 64, 64)


def triu_added(q, k, v):
    S = q.shape[2]
    return (q @ k.transpose(-1, -2) * D**-0.5 + torch.triu(torch.full((S, S), float("-inf")), 1)).softmax(
        -1
    ) @ v


def tril_bool(q, k, v):
    S = q.shape[2]
    seen = torch.tril(torch.ones(S, S, dtype=torch.bool))
    return (q @ k.transpose(-1, -2) * D**-0.5).masked_fill(~seen, torch.finfo(q.dtype).min).softmax(-1) @ v


def positions(q, k, v):
    at = torch.arange(q.shape[2])
    return (q @ k.transpose(-1, -2) * D**-0.5).masked_fill(at[None, :] > at[:, None], float("-inf")).softmax(
        -1
    ) @ v


def window(q, k, v):
    at = torch.arange(q.shape[2])
    far = (at[None, :] > at[:, None]) | (at[:, None] - at[None, :] > 2)
    return (q @ k.transpose(-1, -2) * D**-0.5).masked_fill(far, float("-inf")).softmax(-1) @ v


def causal_and_padding(q, k, v, mask):
    at = torch.arange(q.shape[2])
    scores = (q @ k.transpose(-1, -2) * D**-0.5).masked_fill(mask[:, None, None, :] == 0, -1e9)
    return scores.masked_fill(at[None, :] > at[:, None], float("-inf")).softmax(-1) @ v


def padding_over_causal(q, k, v, mask):
    """The later fill covers the earlier one: a row without keys sees padded keys of the future too."""
    at = torch.arange(q.shape[2])
    scores = (q @ k.transpose(-1, -2) * D**-0.5).masked_fill(at[None, :] > at[:, None], float("-inf"))
    return scores.masked_fill(mask[:, None, None, :] == 0, -1e9).softmax(-1) @ v


def finite_causal_and_padding(q, k, v, mask):
    at = torch.arange(q.shape[2])
    scores = (q @ k.transpose(-1, -2) * D**-0.5).masked_fill(
        at[None, :] > at[:, None], torch.finfo(q.dtype).min
    )
    return scores.masked_fill(mask[:, None, None, :] == 0, torch.finfo(q.dtype).min).softmax(-1) @ v


# -- layouts and heads ------------------------------------------------------------------------------------


def einsum_heads_first(q, k, v):
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * D**-0.5
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


class EinsumLengthFirst(Layer):
    def forward(self, x):
        B, S, _ = x.shape
        q, k, v = (layer(x).view(B, S, H, D) for layer in (self.q, self.k, self.v))
        weights = (torch.einsum("bshd,bthd->bhst", q, k) * D**-0.5).softmax(-1)
        return self.o(torch.einsum("bhst,bthd->bshd", weights, v).reshape(B, S, E))


class Packed(nn.Module):
    """ViT: one projection, reshaped and permuted to q, k and v."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, x):
        B, S, _ = x.shape
        q, k, v = self.qkv(x).reshape(B, S, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
        y = ((q * D**-0.5) @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        return self.o(y.transpose(1, 2).reshape(B, S, E))


class Batched(nn.Module):
    """fairseq: the heads are part of the batch, the matmuls are bmm."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(E, E) for _ in range(4))

    def forward(self, x):
        B, S, _ = x.shape
        q, k, v = (
            layer(x).view(B, S, H, D).transpose(1, 2).reshape(B * H, S, D)
            for layer in (self.q, self.k, self.v)
        )
        y = torch.bmm(torch.softmax(torch.bmm(q * D**-0.5, k.transpose(1, 2)), -1), v)
        return self.o(y.view(B, H, S, D).transpose(1, 2).reshape(B, S, E))


def interleaved(q, k, v):
    k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
    return (q @ k.transpose(-1, -2) * D**-0.5).softmax(-1) @ v


def expanded(q, k, v):
    B, few, S, _ = k.shape
    k, v = (each[:, :, None].expand(B, few, H // few, S, D).reshape(B, H, S, D) for each in (k, v))
    return (q @ k.transpose(-1, -2) * D**-0.5).softmax(-1) @ v


def tiled(q, k, v):
    """Heads 0 1 0 1: not how grouped heads lie, so K and V stay repeated."""
    k, v = (each.repeat(1, 2, 1, 1) for each in (k, v))
    return (q @ k.transpose(-1, -2) * D**-0.5).softmax(-1) @ v


def one_head(q, k, v):
    return (q @ k.transpose(-1, -2) * D**-0.5).softmax(-1) @ v


class Multihead(nn.Module):
    """PyTorch's own module."""

    def __init__(self, **options):
        super().__init__()
        self.attn = nn.MultiheadAttention(E, H, batch_first=True)
        self.options = options

    def forward(self, x, *mask):
        keys = {"key_padding_mask": mask[0] == 0} if mask else {}
        y, weights = self.attn(x, x, x, **self.options, **keys)
        return y if weights is None else (y, weights)


class Stack(nn.Module):
    """Twelve layers, as different modules of one graph."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(spelling(filled(float("-inf")))() for _ in range(12))

    def forward(self, x, mask):
        for layer in self.layers:
            x = x + layer(x, mask)
        return x


# -- inputs and export -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Batch and length of a call."""

    B: int
    S: int


def make_inputs(kind, sizes, *, seed=0, dtype=torch.float32):
    """Inputs of a module; masks have a query without keys, or a row of the batch without keys.

    Args:
        kind: `x`, `half` for x in float16, or `x` with a mask: `bool` and `float` of [B, 1, S, S], `keys` of
            [B, S], `some keys` with at least one in each row.
        sizes: Batch and length.
        seed: Of the random numbers.
        dtype: Type of x, and of a mask of numbers.
    """
    made = _float32_inputs(kind, sizes, seed)
    return tuple(each.to(dtype) if each.dtype == torch.float32 else each for each in made)


def _float32_inputs(kind, sizes, seed):
    random = torch.Generator().manual_seed(seed)
    B, S = sizes.B, sizes.S
    x = torch.randn(B, S, E, generator=random)
    if kind in ("x", "half"):
        return (x.half() if kind == "half" else x,)
    if kind == "float":
        return x, torch.randn(B, 1, S, S, generator=random)
    if kind in ("keys", "some keys"):
        mask = (torch.rand(B, S, generator=random) > 0.4).long()
        mask[:, 0] = 1
        if kind == "keys":
            mask[0] = 0
        return x, mask
    mask = torch.rand(B, 1, S, S, generator=random) > 0.4
    mask[..., 0], mask[0, 0, 1] = True, False
    return x, mask


def _takes_any_number(module):
    """Whether the mask is a `*mask` of `forward`, which the exporter takes as a tuple."""
    return any(
        each.kind is each.VAR_POSITIONAL for each in inspect.signature(module.forward).parameters.values()
    )


def export(module, kind, opset, *, dtype=torch.float32):
    """The module as PyTorch's exporter writes it, with dynamic batch and length."""
    batch, length = torch.export.Dim("B", min=2, max=64), torch.export.Dim("S", min=2, max=64)
    axes = {
        "bool": {0: batch, 2: length, 3: length},
        "float": {0: batch, 2: length, 3: length},
        "keys": {0: batch, 1: length},
        "some keys": {0: batch, 1: length},
    }
    shapes = [{0: batch, 1: length}] + ([axes[kind]] if kind in axes else [])
    if _takes_any_number(module) and kind in axes:
        shapes = [shapes[0], tuple(shapes[1:])]
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            make_inputs(kind, Sizes(3, 7), dtype=dtype),
            dynamo=True,
            opset_version=opset,
            dynamic_shapes=tuple(shapes),
            verbose=False,
        )
    return program.model


def export_by_torchscript(module, kind, opset, *, dtype=torch.float32):
    """The module as PyTorch's older exporter writes it, which takes a tenth of the time."""
    inputs, file = make_inputs(kind, Sizes(3, 7), dtype=dtype), io.BytesIO()
    axes = {"x": {0: "B", 1: "S"}, "mask": {0: "B", 2: "S", 3: "S"}}
    names = ["x", "mask"][: len(inputs)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            tuple(inputs),
            file,
            dynamo=False,
            opset_version=opset,
            input_names=names,
            dynamic_axes={name: axes[name] for name in names},
        )
    return ir.from_proto(onnx.load_from_string(file.getvalue()))
