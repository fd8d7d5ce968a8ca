"""Architectures of whole families, written out from their papers: one block each, plain tensors in and out.

`FAMILIES` maps a name to its family, its module, its inputs as shapes of named and fixed sizes, and how many
attentions it computes. `WHY` says which of those no ONNX `Attention` node computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

E, H, D = 64, 4, 16
Size = int | str


@dataclass(frozen=True, kw_only=True)
class Made:
    """One architecture."""

    family: str
    module: Callable[[], nn.Module]
    inputs: dict[str, tuple[Size, ...]]  # `int:` before a name are indices, `mask:` true for what is seen
    attentions: int = 1


FAMILIES: dict[str, Made] = {}
WHY: dict[str, tuple[int, str]] = {}  # how many are not expressible, and why


def written(
    name: str, family: str, attentions: int = 1, **inputs: tuple[Size, ...]
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Put a module into the families."""

    def put(module: type[nn.Module]) -> type[nn.Module]:
        given = inputs or {"x": ("B", "S", E)}
        FAMILIES[name] = Made(family=family, module=module, inputs=given, attentions=attentions)
        return module

    return put


def split(x: Tensor, heads: int = H) -> Tensor:
    """`[..., S, heads * D]` as `[..., heads, S, D]`."""
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


def merge(x: Tensor) -> Tensor:
    """The way back."""
    return x.transpose(-2, -3).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Softmax attention, written out."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores if bias is None else scores + bias
    return scores.softmax(-1) @ v


def rotary(x: Tensor, base: float = 10000.0) -> Tensor:
    """Rotated halves by position."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2], device=x.device)[:, None].float()
    angles = angles * base ** (-torch.arange(half, device=x.device).float() / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    one, other = x[..., :half], x[..., half:]
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)


class Projected(nn.Module):
    """Projections to Q, K and V, and one of the result."""

    def __init__(self, width: int = E, keys: int = H):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (
            nn.Linear(width, H * D),
            nn.Linear(width, keys * D),
            nn.Linear(width, keys * D),
        )
        self.out = nn.Linear(H * D, width)

    def heads(self, x: Tensor, source: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Q of one, K and V of the same or of another."""
        source = x if source is None else source
        keys = self.k.out_features // D
        return split(self.q(x)), split(self.k(source), keys), split(self.v(source), keys)


# -- Pair bias: protein structure --------------------------------------------------------------------


@written("alphafold-msa-row", "pair bias", msa=("B", "T", "S", E), pair=("B", "S", "S", 16))
class MsaRow(Projected):
    def __init__(self):
        super().__init__()
        self.bias, self.gate = nn.Linear(16, H, bias=False), nn.Linear(E, E)

    def forward(self, msa, pair):
        x = self.norm(msa)
        bias = self.bias(pair).permute(0, 3, 1, 2)[:, None]
        y = merge(attend(*self.heads(x), bias))
        return msa + self.out(torch.sigmoid(self.gate(x)) * y)


@written("alphafold-msa-column", "pair bias", msa=("B", "T", "S", E))
class MsaColumn(Projected):
    def forward(self, msa):
        x = self.norm(msa).transpose(1, 2)
        return msa + self.out(merge(attend(*self.heads(x)))).transpose(1, 2)


@written("alphafold-triangle", "pair bias", 2, pair=("B", "S", "S", E))
class Triangle(nn.Module):
    """Around the starting node, then around the ending node."""

    def __init__(self):
        super().__init__()
        self.sides = nn.ModuleList(Projected() for _ in range(2))
        self.bias = nn.ModuleList(nn.Linear(E, H, bias=False) for _ in range(2))

    def forward(self, pair):
        for side, bias in zip(self.sides, self.bias, strict=True):
            x = side.norm(pair)
            y = merge(attend(*side.heads(x), bias(x).permute(0, 3, 1, 2)[:, None]))
            pair = (pair + side.out(y)).transpose(1, 2)
        return pair


@written(
    "alphafold3-pairformer", "pair bias", single=("B", "S", E), pair=("B", "S", "S", 16), seen=("B", "S")
)
class Pairformer(Projected):
    def __init__(self):
        super().__init__()
        self.bias = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, H, bias=False))

    def forward(self, single, pair, seen):
        x = self.norm(single)
        far = (1.0 - seen.to(x.dtype))[:, None, None, :] * -10000.0
        return single + self.out(merge(attend(*self.heads(x), self.bias(pair).permute(0, 3, 1, 2) + far)))


@written("invariant-point-attention", "pair bias", single=("B", "S", E), points=("B", "S", H, 3))
class InvariantPoints(Projected):
    def forward(self, single, points):
        x = self.norm(single)
        apart = points[:, :, None] - points[:, None]  # [B, S, S, H, 3]
        bias = -0.5 * apart.square().sum(-1).permute(0, 3, 1, 2)
        return single + self.out(merge(attend(*self.heads(x), bias)))


@written("esmfold-axial", "pair bias", 2, pair=("B", "S", "T", E))
class Axial(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.columns = Projected(), Projected()

    def forward(self, pair):
        pair = pair + self.rows.out(merge(attend(*self.rows.heads(self.rows.norm(pair)))))
        other = pair.transpose(1, 2)
        other = other + self.columns.out(merge(attend(*self.columns.heads(self.columns.norm(other)))))
        return other.transpose(1, 2)


# -- Windows -----------------------------------------------------------------------------------------


@written("window-padded", "windows with padding", x=("B", E, 10, 10))
class WindowPadded(Projected):
    """Windows of 4 x 4 over 10 x 10 patches: padded to 12 x 12."""

    def forward(self, x):
        tokens = F.pad(x.permute(0, 2, 3, 1), (0, 0, 0, 2, 0, 2))
        windows = tokens.reshape(-1, 3, 4, 3, 4, E).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, E)
        y = self.out(merge(attend(*self.heads(self.norm(windows)))))
        y = y.reshape(-1, 3, 3, 4, 4, E).permute(0, 1, 3, 2, 4, 5).reshape(-1, 12, 12, E)
        return x + y[:, :10, :10].permute(0, 3, 1, 2)


@written("window-padded-masked", "windows with padding", x=("B", 30, E))
class WindowMasked(Projected):
    """Windows of 8 over 30 tokens; what was padded is masked."""

    def forward(self, x):
        windows = F.pad(x, (0, 0, 0, 2)).reshape(-1, 4, 8, E)
        seen = (torch.arange(32, device=x.device) < 30).reshape(1, 4, 1, 1, 8)
        q, k, v = self.heads(self.norm(windows))
        scores = (q @ k.transpose(-1, -2) * D**-0.5).masked_fill(~seen, torch.finfo(x.dtype).min)
        y = self.out(merge(scores.softmax(-1) @ v))
        return x + y.reshape(-1, 32, E)[:, :30]


@written("block-grid-attention", "windows with padding", 2, x=("B", 8, 8, E))
class BlockGrid(nn.Module):
    """MaxViT: in blocks, then over the grid of blocks."""

    def __init__(self):
        super().__init__()
        self.block, self.grid = Projected(), Projected()

    def forward(self, x):
        tiles = x.reshape(-1, 2, 4, 2, 4, E)
        for part, order in ((self.block, (0, 1, 3, 2, 4, 5)), (self.grid, (0, 2, 4, 1, 3, 5))):
            given = tiles.permute(order)
            flat = given.reshape(given.shape[0], given.shape[1] * given.shape[2], -1, E)
            y = part.out(merge(attend(*part.heads(part.norm(flat))))).reshape(given.shape)
            tiles = tiles + y.permute([order.index(at) for at in range(6)])
        return tiles.reshape(-1, 8, 8, E)


@written("longformer-chunks", "windows with padding", x=("B", 32, E))
class Chunks(Projected):
    """Chunks of 8 that see themselves and the chunk before."""

    def forward(self, x):
        q, k, v = (t.reshape(-1, 4, 8, E) for t in (self.q(x), self.k(x), self.v(x)))
        k, v = (torch.cat((F.pad(t[:, :-1], (0, 0, 0, 0, 1, 0)), t), 2) for t in (k, v))
        at = torch.arange(4, device=x.device)[:, None, None]
        seen = (at > 0) | (torch.arange(16, device=x.device) >= 8)
        bias = torch.where(seen, 0.0, -1e4).to(x.dtype)[None, :, None]
        return x + self.out(merge(attend(split(q), split(k), split(v), bias)).reshape(-1, 32, E))


@written("sam-decomposed-positions", "windows with padding", x=("B", 4, 4, E))
class Decomposed(Projected):
    """Relative positions by height and width, as in SAM and MViTv2."""

    def __init__(self):
        super().__init__()
        self.tall, self.wide = nn.Parameter(torch.randn(4, 4, D)), nn.Parameter(torch.randn(4, 4, D))

    def forward(self, x):
        q, k, v = self.heads(self.norm(x).flatten(1, 2))
        grid = q.unflatten(2, (4, 4))
        tall = torch.einsum("bnhwd,hkd->bnhwk", grid, self.tall)[..., None]
        wide = torch.einsum("bnhwd,wkd->bnhwk", grid, self.wide)[..., None, :]
        scores = (q * D**-0.5) @ k.transpose(-1, -2)
        scores = (scores.unflatten(2, (4, 4)).unflatten(-1, (4, 4)) + tall + wide).flatten(2, 3).flatten(3)
        return x + self.out(merge(scores.softmax(-1) @ v)).unflatten(1, (4, 4))


# -- Video -------------------------------------------------------------------------------------------


@written("timesformer-divided", "factorized video", 2, video=("B", "T", 9, E))
class Divided(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.space = Projected(), Projected()

    def forward(self, video):
        x = video.transpose(1, 2)
        x = x + self.time.out(merge(attend(*self.time.heads(self.time.norm(x)))))
        x = x.transpose(1, 2)
        return x + self.space.out(merge(attend(*self.space.heads(self.space.norm(x)))))


@written("vivit-factorized-heads", "factorized video", 2, video=("B", "T", 9, E))
class HalfHeads(Projected):
    """Half of the heads over space, the others over time."""

    def forward(self, video):
        q, k, v = (t.unflatten(-1, (H, D)) for t in (self.q(video), self.k(video), self.v(video)))
        space = attend(*(t[..., : H // 2, :].transpose(2, 3) for t in (q, k, v))).transpose(2, 3)
        time = attend(*(t[..., H // 2 :, :].permute(0, 2, 3, 1, 4) for t in (q, k, v))).permute(0, 3, 1, 2, 4)
        return video + self.out(torch.cat((space, time), 3).flatten(3))


@written("video-tubelets-joint", "factorized video", video=("B", 3, 4, 16, 16))
class Tubelets(Projected):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv3d(3, E, (2, 8, 8), (2, 8, 8))

    def forward(self, video):
        x = self.patches(video).flatten(2).transpose(1, 2)
        return x + self.out(merge(attend(*self.heads(self.norm(x)))))


@written("animatediff-motion", "factorized video", video=("B", "T", E, 4, 4))
class Motion(Projected):
    """A temporal layer between spatial ones: every pixel is a sequence of frames."""

    def forward(self, video):
        x = video.permute(0, 3, 4, 1, 2)
        y = self.out(merge(attend(*self.heads(rotary(self.norm(x))))))
        return video + y.permute(0, 3, 4, 1, 2)


# -- Diffusion transformers --------------------------------------------------------------------------


class Joint(nn.Module):
    """Text and image, each with its own projections, in one attention."""

    def __init__(self, normed: bool = False, rotated: bool = False):
        super().__init__()
        self.text, self.image = Projected(), Projected()
        self.norms = nn.ModuleList(nn.RMSNorm(D) for _ in range(2)) if normed else None
        self.rotated = rotated

    def forward(self, image, text):
        parts = zip(
            self.text.heads(self.text.norm(text)), self.image.heads(self.image.norm(image)), strict=True
        )
        q, k, v = (torch.cat(pair, 2) for pair in parts)
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        if self.rotated:
            q, k = rotary(q), rotary(k)
        y = merge(F.scaled_dot_product_attention(q, k, v))
        count = text.shape[1]
        return image + self.image.out(y[:, count:]) + text.mean(1, keepdim=True) + self.text.out(y[:, :1])


BOTH: dict[str, tuple[Size, ...]] = {"image": ("B", 16, E), "text": ("B", "T", E)}
FAMILIES["mmdit-joint"] = Made(family="diffusion transformer", module=Joint, inputs=BOTH)
FAMILIES["mmdit-joint-qk-norm"] = Made(
    family="diffusion transformer", module=lambda: Joint(normed=True), inputs=BOTH
)
FAMILIES["flux-joint-rotary"] = Made(
    family="diffusion transformer", module=lambda: Joint(normed=True, rotated=True), inputs=BOTH
)


@written("dit-adaln-zero", "diffusion transformer", x=("B", "S", E), condition=("B", E))
class AdaLn(Projected):
    def __init__(self):
        super().__init__()
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(E, 3 * E))

    def forward(self, x, condition):
        shift, scale, gate = self.modulation(condition)[:, None].chunk(3, -1)
        y = F.layer_norm(x, (E,)) * (1 + scale) + shift
        return x + gate * self.out(merge(attend(*self.heads(y))))


@written("flux-single-stream", "diffusion transformer")
class SingleStream(nn.Module):
    """Attention and MLP side by side, from one projection."""

    def __init__(self):
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(E), nn.Linear(E, 5 * E), nn.Linear(3 * E, E)
        self.norms = nn.ModuleList(nn.RMSNorm(D) for _ in range(2))

    def forward(self, x):
        qkv, inner = self.first(self.norm(x)).split((3 * E, 2 * E), -1)
        q, k, v = map(split, qkv.chunk(3, -1))
        y = merge(attend(rotary(self.norms[0](q)), rotary(self.norms[1](k)), v))
        return x + self.last(torch.cat((y, F.gelu(inner, approximate="tanh")), -1))


@written("lumina-next-dit", "diffusion transformer", 2, x=("B", "S", E), text=("B", "T", E))
class NextDit(nn.Module):
    """Grouped heads, norms before and after, and gated cross-attention to the text."""

    def __init__(self):
        super().__init__()
        self.own, self.cross, self.after = Projected(keys=2), Projected(keys=2), nn.RMSNorm(E)
        self.gate = nn.Parameter(torch.randn(1, H, 1, 1))

    def forward(self, x, text):
        q, k, v = self.own.heads(self.own.norm(x))
        k, v = (split_groups(t) for t in (k, v))
        y = attend(rotary(q), rotary(k), v)
        qt, kt, vt = self.cross.heads(x, text)
        y = y + torch.tanh(self.gate) * attend(qt, split_groups(kt), split_groups(vt))
        return x + self.after(self.own.out(merge(y)))


def split_groups(x: Tensor) -> Tensor:
    """Repeat the heads of keys or values."""
    return x.repeat_interleave(H // x.shape[1], 1)


@written("uvit-long-skip", "diffusion transformer", 2, x=("B", "S", E), time=("B", E))
class LongSkip(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.join = Projected(), Projected(), nn.Linear(2 * E, E)

    def forward(self, x, time):
        x = torch.cat((time[:, None], x), 1)
        first = x + self.first.out(merge(attend(*self.first.heads(self.first.norm(x)))))
        x = self.join(torch.cat((first, x), -1))
        return (x + self.last.out(merge(attend(*self.last.heads(self.last.norm(x))))))[:, 1:]


# -- Audio -------------------------------------------------------------------------------------------


@written("audio-codec-bottleneck", "audio codec", sound=("B", 1, 256))
class Codec(Projected):
    """Strided convolutions, causal attention within a window, and the way back."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv1d(1, 16, 8, 4, 2), nn.ELU(), nn.Conv1d(16, E, 8, 4, 2))
        self.up = nn.Sequential(
            nn.ConvTranspose1d(E, 16, 8, 4, 2), nn.ELU(), nn.ConvTranspose1d(16, 1, 8, 4, 2)
        )

    def forward(self, sound):
        x = self.down(sound).transpose(1, 2)
        at = torch.arange(x.shape[1], device=x.device)
        apart = at[:, None] - at
        seen = (apart >= 0) & (apart < 6)
        q, k, v = self.heads(self.norm(x))
        y = F.scaled_dot_product_attention(rotary(q), rotary(k), v, attn_mask=seen)
        return self.up((x + self.out(merge(y))).transpose(1, 2))


@written("audio-codec-quantized", "audio codec", codes=("B", "S", 1))
class Quantized(Projected):
    """The nearest entry of a codebook, then a decoder."""

    def __init__(self):
        super().__init__()
        self.given, self.book = nn.Linear(1, E), nn.Embedding(12, E)

    def forward(self, codes):
        x = self.given(codes)
        near = (x @ self.book.weight.t()).softmax(-1) @ self.book.weight
        return near + self.out(merge(attend(*self.heads(self.norm(near)))))


@written("conformer-relative", "audio codec", x=("B", "S", E), seen=("B", "S"))
class Conformer(Projected):
    """Transformer-XL's positions, shifted; weights of padding are set to 0 behind the softmax (ESPnet)."""

    def __init__(self):
        super().__init__()
        self.u, self.w = nn.Parameter(torch.randn(H, 1, D)), nn.Parameter(torch.randn(H, 1, D))
        self.position = nn.Linear(E, H * D, bias=False)

    def forward(self, x, seen):
        q, k, v = self.heads(self.norm(x))
        count = x.shape[1]
        steps = torch.arange(E, device=x.device).float() / E
        distances = torch.arange(count - 1, -count, -1, device=x.device)[:, None].float()
        p = split(self.position(torch.sin(distances * 10000.0**-steps).to(x.dtype)))
        shifted = (q + self.w) @ p.transpose(-1, -2)
        at = torch.arange(count, device=x.device)
        index = (at - at[:, None] + count - 1).expand(shifted.shape[0], H, -1, -1)
        scores = ((q + self.u) @ k.transpose(-1, -2) + shifted.gather(-1, index)) * D**-0.5
        hidden = seen[:, None, None, :] == 0
        weights = scores.masked_fill(hidden, torch.finfo(x.dtype).min).softmax(-1).masked_fill(hidden, 0.0)
        return x + self.out(merge(weights @ v))


@written("e-branchformer", "audio codec")
class Branches(Projected):
    """Attention beside a gated convolution, joined by another."""

    def __init__(self):
        super().__init__()
        self.wide, self.gate = nn.Linear(E, 2 * E), nn.Conv1d(E, E, 3, padding=1, groups=E)
        self.join = nn.Conv1d(2 * E, 2 * E, 3, padding=1, groups=2 * E)
        self.last = nn.Linear(2 * E, E)

    def forward(self, x):
        one = self.out(merge(attend(*self.heads(self.norm(x)))))
        a, b = F.gelu(self.wide(x)).chunk(2, -1)
        two = a * self.gate(b.transpose(1, 2)).transpose(1, 2)
        both = torch.cat((one, two), -1)
        return x + self.last(both + self.join(both.transpose(1, 2)).transpose(1, 2))


@written("vits-windowed-relative", "audio codec", x=("B", "S", E))
class Vits(Projected):
    """A bias of clipped distances, with one table for all heads."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, D))

    def forward(self, x):
        q, k, v = self.heads(self.norm(x))
        at = torch.arange(x.shape[1], device=x.device)
        near = self.table[(at - at[:, None]).clamp(-4, 4) + 4]
        bias = torch.einsum("bhsd,std->bhst", q, near) * D**-0.5
        return x + self.out(merge(attend(q, k, v, bias)))


# -- Time series -------------------------------------------------------------------------------------


@written("patchtst", "time series", series=("B", 48, 5))
class PatchTst(Projected):
    """Every channel by itself, in patches."""

    def __init__(self):
        super().__init__()
        self.patch, self.last = nn.Linear(8, E), nn.Linear(12 * E, 6)

    def forward(self, series):
        x = self.patch(F.pad(series.transpose(1, 2), (0, 4)).unfold(-1, 8, 4))[:, :, :12]
        y = x + self.out(merge(attend(*self.heads(self.norm(x)))))
        return self.last(y.flatten(2)).transpose(1, 2)


@written("itransformer", "time series", series=("B", 24, "S"))
class Inverted(Projected):
    """Variates are the tokens."""

    def __init__(self):
        super().__init__()
        self.given, self.last = nn.Linear(24, E), nn.Linear(E, 12)

    def forward(self, series):
        mean, spread = series.mean(1, keepdim=True), series.std(1, keepdim=True) + 1e-3
        x = self.given(((series - mean) / spread).transpose(1, 2))
        y = x + self.out(merge(attend(*self.heads(self.norm(x)))))
        return self.last(y).transpose(1, 2) * spread + mean


@written("temporal-fusion", "time series")
class TemporalFusion(nn.Module):
    """One value head that all query heads share; the mean of the heads."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(E, size) for size in (E, E, D, E))
        self.last = nn.Linear(D, E)

    def forward(self, x):
        q, k, v = split(self.q(x)), split(self.k(x)), self.v(x)[:, None]
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(-1, -2) * D**-0.5).masked_fill(hidden, -1e4)
        return x + self.last((scores.softmax(-1) @ v).mean(1))


@written("crossformer-router", "time series", 3, series=("B", 6, "S", E))
class Router(nn.Module):
    """Over time, then over variates by way of a few routers."""

    def __init__(self):
        super().__init__()
        self.time, self.send, self.receive = Projected(), Projected(), Projected()
        self.routers = nn.Parameter(torch.randn(3, E))

    def forward(self, series):
        x = series.transpose(1, 2)  # [B, variates, time, E]
        x = (x + self.time.out(merge(attend(*self.time.heads(x))))).transpose(1, 2)
        given = self.routers.expand(x.shape[0], x.shape[1], -1, -1)
        sent = self.send.out(merge(attend(*self.send.heads(given, x))))
        return x + self.receive.out(merge(attend(*self.receive.heads(x, sent))))


@written("moirai-any-variate", "time series", x=("B", "S", E), variate=("B", "S"))
class AnyVariate(Projected):
    """A bias for the same variate and another for all others, by head."""

    def __init__(self):
        super().__init__()
        self.same, self.other = nn.Parameter(torch.randn(H, 1, 1)), nn.Parameter(torch.randn(H, 1, 1))

    def forward(self, x, variate):
        alike = (variate[:, :, None] == variate[:, None, :])[:, None].to(x.dtype)
        bias = alike * self.same + (1 - alike) * self.other
        q, k, v = self.heads(self.norm(x))
        return x + self.out(merge(attend(rotary(q), rotary(k), v, bias)))


# -- Graphs and sets ---------------------------------------------------------------------------------


@written("graphormer", "graph transformer", x=("B", "S", E), hops=("B", "S", "S"))
class Graphormer(Projected):
    def __init__(self):
        super().__init__()
        self.spatial = nn.Embedding(4, H)

    def forward(self, x, hops):
        bias = self.spatial(hops).permute(0, 3, 1, 2)
        return x + self.out(merge(attend(*self.heads(self.norm(x)), bias)))


@written("graph-transformer-edges", "graph transformer", x=("B", "S", E), edges=("B", "S", "S"))
class Edges(Projected):
    """Neighbors only; a node without any sees itself."""

    def forward(self, x, edges):
        own = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        q, k, v = self.heads(self.norm(x))
        scores = q @ k.transpose(-1, -2) / D**0.5
        scores = torch.where(((edges > 0) | own)[:, None], scores, torch.finfo(x.dtype).min)
        return x + self.out(merge(scores.softmax(-1) @ v))


@written("graph-attention-additive", "graph transformer", x=("B", "S", E), edges=("B", "S", "S"))
class Additive(Projected):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(H, D)), nn.Parameter(torch.randn(H, D))

    def forward(self, x, edges):
        h = split(self.v(self.norm(x)))
        scores = (h * self.one[:, None]).sum(-1)[..., None] + (h * self.other[:, None]).sum(-1)[..., None, :]
        own = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        scores = F.leaky_relu(scores, 0.2).masked_fill(~((edges > 0) | own)[:, None], -1e4)
        return x + self.out(merge(scores.softmax(-1) @ h))


WHY["graph-attention-additive"] = (1, "its scores are a sum of two numbers after a LeakyReLU, not a matmul")


@written("set-transformer", "graph transformer", 2)
class SetTransformer(nn.Module):
    """Through a few learned points, and back."""

    def __init__(self):
        super().__init__()
        self.into, self.back, self.points = Projected(), Projected(), nn.Parameter(torch.randn(1, 6, E))

    def forward(self, x):
        points = self.points.expand(x.shape[0], -1, -1)
        inner = points + self.into.out(merge(attend(*self.into.heads(points, x))))
        return x + self.back.out(merge(attend(*self.back.heads(x, inner))))


@written("slot-attention", "graph transformer", x=("B", "S", E))
class Slots(Projected):
    def __init__(self):
        super().__init__()
        self.slots = nn.Parameter(torch.randn(1, 5, E))

    def forward(self, x):
        q, k, v = self.heads(self.slots.expand(x.shape[0], -1, -1), self.norm(x))
        weights = (q @ k.transpose(-1, -2) * D**-0.5).softmax(-2) + 1e-3
        return self.out(merge((weights / weights.sum(-1, keepdim=True)) @ v))


WHY["slot-attention"] = (1, "the softmax is over the queries, which compete for the keys")


# -- State-space hybrids and linear attention ----------------------------------------------------------


class Decayed(Projected):
    """The state of a linear recurrence with a decay for each head, in its quadratic form."""

    def forward(self, x):
        q, k, v = self.heads(x)
        at = torch.arange(x.shape[1], device=x.device)
        apart = (at[:, None] - at).clamp(min=0).to(x.dtype)
        decay = (1 - 2.0 ** -(torch.arange(H, device=x.device) + 3.0)).to(x.dtype)[:, None, None]
        kept = decay**apart * (at[:, None] >= at).to(x.dtype)
        return x + self.out(merge((q @ k.transpose(-1, -2) * D**-0.5 * kept) @ v))


@written("hybrid-state-space", "state-space hybrid", 2)
class Hybrid(nn.Module):
    """A state-space layer, and one of attention."""

    def __init__(self):
        super().__init__()
        self.state, self.full = Decayed(), Projected()

    def forward(self, x):
        x = self.state(x)
        q, k, v = self.full.heads(self.full.norm(x))
        return x + self.full.out(merge(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


@written("hybrid-parallel-heads", "state-space hybrid", 2)
class ParallelHeads(nn.Module):
    """Attention and state beside each other (Hymba, Falcon-H1): the mean of both, normed."""

    def __init__(self):
        super().__init__()
        self.state, self.full = Decayed(), Projected()
        self.norms = nn.ModuleList(nn.RMSNorm(E) for _ in range(2))

    def forward(self, x):
        q, k, v = self.full.heads(self.full.norm(x))
        y = self.full.out(merge(F.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True)))
        return x + 0.5 * (self.norms[0](y) + self.norms[1](self.state(x)))


for _hybrid in ("hybrid-state-space", "hybrid-parallel-heads"):
    WHY[_hybrid] = (1, "a state-space layer has no softmax, which ONNX's Attention always has")


@written("hybrid-gated-convolution", "state-space hybrid")
class GatedConvolution(nn.Module):
    """A short causal convolution between two gates, then local attention of one key head."""

    def __init__(self):
        super().__init__()
        self.gates, self.short = nn.Linear(E, 3 * E), nn.Conv1d(E, E, 4, groups=E)
        self.local = Projected(keys=1)

    def forward(self, x):
        b, c, given = self.gates(x).chunk(3, -1)
        x = x + c * self.short(F.pad((b * given).transpose(1, 2), (3, 0))).transpose(1, 2)
        at = torch.arange(x.shape[1], device=x.device)
        seen = (at[:, None] >= at) & (at[:, None] - at < 5)
        q, k, v = self.local.heads(self.local.norm(x))
        scores = (q @ k.transpose(-1, -2) * D**-0.5).masked_fill(~seen, torch.finfo(x.dtype).min)
        return x + self.local.out(merge(scores.softmax(-1) @ v))


@written("linformer", "state-space hybrid", x=("B", 24, E))
class Linformer(Projected):
    """Keys and values are projected to fewer."""

    def __init__(self):
        super().__init__()
        self.fewer = nn.Linear(24, 6, bias=False)

    def forward(self, x):
        q, k, v = self.heads(self.norm(x))
        k, v = (self.fewer(t.transpose(-1, -2)).transpose(-1, -2) for t in (k, v))
        return x + self.out(merge(attend(q, k, v)))


@written("retnet", "state-space hybrid")
class RetNet(Decayed):
    pass


WHY["retnet"] = (1, "retention has no softmax, which ONNX's Attention always has")


# -- Other forms of attention ------------------------------------------------------------------------


@written("mla-absorbed", "decoder")
class Latent(nn.Module):
    """DeepSeek's latent attention, one latent for all heads, in the layout of its own code."""

    def __init__(self):
        super().__init__()
        self.q, self.latent, self.rope = nn.Linear(E, H * 24), nn.Linear(E, 32), nn.Linear(E, 8)
        self.up, self.down = nn.Parameter(torch.randn(H, 16, 32) / 4), nn.Parameter(torch.randn(H, D, 32) / 4)
        self.out = nn.Linear(H * D, E)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (H, 24))
        plain = torch.einsum("bshd,hdc->bshc", q[..., :16], self.up)
        latent = self.latent(x)
        turned = rotary(q[..., 16:].transpose(1, 2)).transpose(1, 2)
        scores = torch.einsum("bshc,btc->bsht", plain, latent)
        scores = scores + torch.einsum("bshr,btr->bsht", turned, rotary(self.rope(x)))
        at = torch.arange(x.shape[1], device=x.device)
        hidden = (at > at[:, None])[None, :, None]
        weights = (scores * 24**-0.5).masked_fill(hidden, torch.finfo(x.dtype).min).softmax(-1)
        y = torch.einsum("bsht,btc->bshc", weights, latent)
        return x + self.out(torch.einsum("bshc,hdc->bshd", y, self.down).flatten(2))


@written("gated-attention", "decoder")
class Gated(Projected):
    """A sigmoid of the input on the result of every head (Qwen3-Next), with partial rotary positions."""

    def __init__(self):
        super().__init__()
        self.gate, self.norms = nn.Linear(E, E), nn.ModuleList(nn.RMSNorm(D) for _ in range(2))

    def forward(self, x):
        q, k, v = self.heads(self.norm(x))
        q, k = (norm(t) for norm, t in zip(self.norms, (q, k), strict=True))
        q, k = (torch.cat((rotary(t[..., :8]), t[..., 8:]), -1) for t in (q, k))
        y = merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.out(y * torch.sigmoid(self.gate(x)))


@written("cosine-attention", "vision", x=("B", 25, E))
class Cosine(Projected):
    """Normed queries and keys, and a learned temperature of each head that is bounded."""

    def __init__(self):
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.full((H, 1, 1), 2.0)), nn.Parameter(torch.randn(H, 25, 25))

    def forward(self, x):
        q, k, v = self.heads(self.norm(x))
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2)
        scores = scores * self.scale.clamp(max=4.6052).exp() + 16 * torch.sigmoid(self.bias)
        return x + self.out(merge(scores.softmax(-1) @ v))


@written("alibi-folded-heads", "decoder")
class Folded(Projected):
    """fairseq: heads are part of the batch."""

    def forward(self, x):
        q, k, v = (t.flatten(0, 1) for t in self.heads(self.norm(x)))
        at = torch.arange(x.shape[1], device=x.device)
        slopes = 2.0 ** -(torch.arange(H, device=x.device) + 1.0)
        bias = -(at[:, None] - at).abs() * slopes[:, None, None]
        bias = bias.masked_fill(at > at[:, None], -1e4).to(x.dtype).repeat(x.shape[0], 1, 1)
        weights = (torch.bmm(q, k.transpose(1, 2)) * D**-0.5 + bias).softmax(-1)
        return x + self.out(merge(torch.bmm(weights, v).unflatten(0, (-1, H))))


@written("channel-attention", "vision", x=("B", E, 8, 8))
class Channels(nn.Module):
    """Restormer: between channels, over all pixels, with a temperature for each head."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Conv2d(E, 3 * E, 1), nn.Conv2d(E, E, 1)
        self.temperature = nn.Parameter(torch.ones(H, 1, 1))

    def forward(self, x):
        q, k, v = (t.flatten(2).unflatten(1, (H, -1)) for t in self.qkv(x).chunk(3, 1))
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2) * self.temperature
        return x + self.out((scores.softmax(-1) @ v).flatten(1, 2).unflatten(-1, (8, 8)))


@written("transformer-xl-memory", "decoder", x=("B", "S", E), memory=("B", "T", E))
class Memory(Projected):
    """The tokens of the segment before are keys and values as well."""

    def forward(self, x, memory):
        q, k, v = self.heads(self.norm(x), torch.cat((memory, self.norm(x)), 1))
        count, before = x.shape[1], memory.shape[1]
        at = torch.arange(count, device=x.device)[:, None] + before
        hidden = torch.arange(before + count, device=x.device) > at
        scores = (q @ k.transpose(-1, -2) * D**-0.5).masked_fill(hidden, -1e4)
        return x + self.out(merge(scores.softmax(-1) @ v))


@written("perceiver-resampler", "multimodal", x=("B", "S", E))
class Resampler(Projected):
    """Flamingo: latents see the input and themselves."""

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 6, E))

    def forward(self, x):
        latents = self.latents.expand(x.shape[0], -1, -1)
        y = attend(*self.heads(latents, torch.cat((self.norm(x), latents), 1)))
        return latents + self.out(merge(y))


@written("q-former", "multimodal", 2, x=("B", "T", E))
class QFormer(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.cross, self.queries = Projected(), Projected(), nn.Parameter(torch.randn(1, 6, E))

    def forward(self, x):
        y = self.queries.expand(x.shape[0], -1, -1)
        y = y + self.own.out(merge(attend(*self.own.heads(self.own.norm(y)))))
        return y + self.cross.out(merge(attend(*self.cross.heads(self.cross.norm(y), x))))


@written("gated-cross-attention", "multimodal", x=("B", "S", E), media=("B", "T", E))
class GatedCross(Projected):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(1))

    def forward(self, x, media):
        return x + torch.tanh(self.gate) * self.out(merge(attend(*self.heads(self.norm(x), media))))


@written("autoint-fields", "recommendation", fields=("B", 12))
class Fields(Projected):
    """Attention between the features of one row."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, E)

    def forward(self, fields):
        x = self.table(fields)
        return F.relu(self.out(merge(attend(*self.heads(x)))) + x).flatten(1)


@written("sasrec", "recommendation", items=("B", "S"))
class SasRec(Projected):
    """Clicked items, the latest first to be predicted; padding is item 0."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, E)

    def forward(self, items):
        x = self.table(items) * E**0.5
        at = torch.arange(items.shape[1], device=items.device)
        seen = (at[:, None] >= at) & ((items != 0)[:, None, None] | (at[:, None] == at))
        q, k, v = self.heads(self.norm(x))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return (x + self.out(merge(y))) @ self.table.weight.t()


@written(
    "decision-transformer", "decoder", states=("B", "S", 8), actions=("B", "S", 3), returns=("B", "S", 1)
)
class Decisions(Projected):
    """Returns, states and actions take turns as tokens."""

    def __init__(self):
        super().__init__()
        self.given = nn.ModuleList(nn.Linear(size, E) for size in (1, 8, 3))

    def forward(self, states, actions, returns):
        parts = zip(self.given, (returns, states, actions), strict=True)
        x = torch.stack([layer(part) for layer, part in parts], 2).flatten(1, 2)
        q, k, v = self.heads(self.norm(x))
        y = x + self.out(merge(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return y.unflatten(1, (-1, 3))[:, :, 1]


@written("exponentials-over-their-sum", "text encoder")
class Exponentials(Projected):
    """The sum of the weights is divided by behind V, as kernels do."""

    def forward(self, x):
        q, k, v = self.heads(self.norm(x))
        scores = q @ k.transpose(-1, -2) * D**-0.5
        powers = (scores - scores.amax(-1, keepdim=True)).exp()
        return x + self.out(merge((powers @ v) / powers.sum(-1, keepdim=True)))


@written("synthesizer", "text encoder", x=("B", 16, E))
class Synthesizer(Projected):
    """Scores that one token alone decides."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Sequential(nn.Linear(E, E), nn.ReLU(), nn.Linear(E, 16))

    def forward(self, x):
        return x + self.out(self.scores(self.norm(x)).softmax(-1) @ self.v(x))


WHY["synthesizer"] = (1, "its scores are the result of an MLP, not a matmul with keys")


@written("performer", "text encoder")
class Performer(Projected):
    """Positive features in the place of the softmax."""

    def forward(self, x):
        q, k, v = self.heads(self.norm(x))
        q, k = F.relu(q) + 1e-2, F.relu(k) + 1e-2
        total = q @ k.sum(-2, keepdim=True).transpose(-1, -2)
        return x + self.out(merge((q @ (k.transpose(-1, -2) @ v)) / total))


WHY["performer"] = (1, "linear attention has no softmax, which ONNX's Attention always has")


@written("pointer-network", "text encoder", query=("B", E), x=("B", "S", E), seen=("B", "S"))
class Pointer(Projected):
    """One query, which has no axis of its own."""

    def forward(self, query, x, seen):
        scores = (self.k(x) @ self.q(query)[:, :, None])[:, :, 0] * E**-0.5
        weights = scores.masked_fill(seen == 0, torch.finfo(x.dtype).min).softmax(-1)
        return self.out((weights[:, None] @ self.v(x))[:, 0])
