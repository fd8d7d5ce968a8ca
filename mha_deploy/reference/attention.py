"""The attention layer in PyTorch, each step next to its formula: projections, masks, cache, softmax."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha_deploy.errors import DeployError
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.model.spec import refuse_overflow
from mha_deploy.reference.rotary import rotary_tables, rotate

# -- Which keys a query attends to -----------------------------------------------------------------


def padding_mask(key_lengths: Tensor, T: int) -> Tensor:
    """Batch element b attends to its first `key_lengths[b]` keys. [B] -> bool [B, 1, 1, T]."""
    positions = torch.arange(T, dtype=key_lengths.dtype, device=key_lengths.device)
    return positions < key_lengths[:, None, None, None]


def visible_from(positions: Tensor, T: int, window: int | None = None) -> Tensor:
    """A query at position p attends to keys 0..p, or the last `window`. [..., S] -> bool [..., S, T]."""
    keys, queries = torch.arange(T, device=positions.device), positions[..., None]
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)


def causal_mask(S: int, T: int, device: torch.device, past: int = 0, window: int | None = None) -> Tensor:
    """Query s, at position past + s, attends to the keys up to its own position. bool [S, T]."""
    return visible_from(torch.arange(past, past + S, device=device), T, window)


def merge_causal(
    mask: Tensor | None, S: int, T: int, device: torch.device, past: int = 0, window: int | None = None
) -> Tensor:
    """Both masks at once, in the kind of the given one: boolean, or float with -inf."""
    causal = causal_mask(S, T, device, past, window)
    if mask is None:
        return causal
    return mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, float("-inf"))


def alibi_bias(Hq: int, S: int, T: int) -> Tensor:
    """Attention with linear biases: -m_h · |s - t|, with m_h = 2^(-8(h+1)/Hq). float64 [1, Hq, S, T].

    Press et al., "Train Short, Test Long", 2021. The symmetric form, so that it also serves layers that
    attend in both directions; under a causal mask it equals the paper's.
    """
    slopes = 2.0 ** (-8.0 * torch.arange(1, Hq + 1, dtype=torch.float64) / Hq)
    distance = (torch.arange(S)[:, None] - torch.arange(T)[None, :]).abs()
    return -(slopes[:, None, None] * distance)[None]


# -- Scaled dot-product attention, computed by PyTorch, by a textbook, or by an ONNX node ----------

_WEIGHTS_AFTER_SOFTMAX = 3  # ONNX Attention's qk_matmul_output_mode


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How the heads are laid out and scored; the names are those of `AttentionSpec`."""

    Hq: int
    Hkv: int
    scale: float
    causal: bool = False
    weights: bool = False
    window: int | None = None
    softcap: float | None = None
    past: int = 0  # keys before the first query
    attends_to_itself: bool = False  # every query attends to a key whatever the mask: its own is there

    @property
    def is_triangle(self) -> bool:
        """Whether the causal mask is the plain one that every runtime knows: no window, no past."""
        return self.causal and self.window is None and self.past == 0

    @property
    def onnx(self) -> dict[str, Any]:
        """The attributes of an ONNX Attention node."""
        heads = {"q_num_heads": self.Hq, "kv_num_heads": self.Hkv}
        return {**heads, "scale": self.scale, "softcap": self.softcap or 0.0}

    def hides_nothing(self, S: int, T: int) -> bool:
        """Whether S queries attend to all T keys: nothing is causal, or one query is at the last."""
        return not self.causal or (S == 1 and self.window is None and self.past + 1 == T)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads: Heads, path: str = "sdpa"
) -> tuple[Tensor, Tensor | None]:
    """All heads side by side [B, S, Hq·D], and the attention weights [B, Hq, S, T] if requested.

    A fully masked query gives zeros, never NaN. Queries are [B, S, Hq·D], keys and values [B, T, Hkv·D]; a
    boolean or float mask broadcasts to [B, Hq, S, T]. The path is `sdpa`, `plain` or `onnx`.
    """
    if path == "onnx":
        return _attend_onnx(q, k, v, mask, heads)
    q, k, v = split_heads(q, heads.Hq), split_heads(k, heads.Hkv), split_heads(v, heads.Hkv)
    is_fused = path != "plain" and heads.softcap is None
    # PyTorch's fused kernel keeps its weights to itself.
    weights = _attention_weights(q, k, mask, heads) if heads.weights or not is_fused else None
    if is_fused or weights is None:
        return merge_heads(_fused_kernel(q, k, v, mask, heads)), weights
    return merge_heads(weights @ _repeat_kv(v, heads)), weights if heads.weights else None


def split_heads(x: Tensor, H: int) -> Tensor:
    """[B, length, H·D] -> [B, H, length, D]."""
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, length, D] -> [B, length, H·D]."""
    return x.transpose(1, 2).flatten(2)


def _attention_weights(q: Tensor, k: Tensor, mask: Tensor | None, heads: Heads) -> Tensor:
    """softmax(cap(Q Kᵀ · scale) + mask). [B, Hq, S, D], [B, Hkv, T, D] -> [B, Hq, S, T]."""
    scores = q @ _repeat_kv(k, heads).transpose(-1, -2) * heads.scale
    if heads.softcap is not None:
        scores = heads.softcap * torch.tanh(scores / heads.softcap)
    mask = _with_causal(mask, q.shape[2], k.shape[2], heads, q.device)
    if mask is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    fully_masked = scores.isneginf().all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(fully_masked, 0.0)


def _with_causal(mask: Tensor | None, S: int, T: int, heads: Heads, device: torch.device) -> Tensor | None:
    """The given mask, and what causality adds to it."""
    if heads.hides_nothing(S, T):
        return mask
    return merge_causal(mask, S, T, device, heads.past, heads.window)


def _repeat_kv(x: Tensor, heads: Heads) -> Tensor:
    """Give every query head its own copy of the K or V it shares. [B, Hkv, T, D] -> [B, Hq, T, D]."""
    return x if heads.Hq == heads.Hkv else x.repeat_interleave(heads.Hq // heads.Hkv, dim=1)


def _fused_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads: Heads) -> Tensor:
    # PyTorch takes a mask or is_causal, not both, and its is_causal starts in the upper left corner.
    if mask is not None or not heads.is_triangle:
        mask = _with_causal(mask, q.shape[2], k.shape[2], heads, q.device)
    is_causal = mask is None and not heads.hides_nothing(q.shape[2], k.shape[2])
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=heads.scale, enable_gqa=heads.Hq != heads.Hkv
    )
    if mask is None or heads.attends_to_itself:
        return out
    # Fully masked queries: PyTorch's half-precision CUDA kernels give other numbers than zeros.
    attended = mask if mask.dtype == torch.bool else ~mask.isneginf()
    return out.masked_fill(~attended.any(-1, keepdim=True), 0.0)


def _attend_onnx(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads: Heads
) -> tuple[Tensor, Tensor | None]:
    is_causal = heads.causal
    if heads.causal and not heads.is_triangle:
        mask, is_causal = _with_causal(mask, q.shape[1], k.shape[1], heads, q.device), False
    if mask is not None:
        # ONNX lets a mask broadcast over the queries; ONNX Runtime's CPU kernel does not.
        mask = mask[None, None] if mask.dim() == 2 else mask
        mask = mask.expand(mask.shape[0], mask.shape[1], q.shape[1], k.shape[1])
    capped = heads.softcap is not None and (is_causal or mask is not None)
    if capped and not torch.compiler.is_exporting():
        # PyTorch's own stand-in for the ONNX node caps after masking, which makes -inf a finite score.
        what = "PyTorch cannot run the ONNX attention with a softcap and a mask: it caps the mask too."
        hint = "path plain to compute it; path onnx only exports it"
        raise DeployError(what, got=f"softcap = {heads.softcap}, path = onnx", hint=hint)
    options = {**heads.onnx, "qk_matmul_output_mode": _WEIGHTS_AFTER_SOFTMAX if heads.weights else 0}
    out, _, _, weights = torch.onnx.ops.attention(q, k, v, mask, is_causal=is_causal, **options)
    return out, weights if heads.weights else None


# -- Multi-head, grouped-query and multi-query attention -------------------------------------------


class Attention(nn.Module):
    """The layer that a spec describes, by a path of `attend`; variants change what follows the heads."""

    def __init__(self, spec: AttentionSpec, path: str = "sdpa") -> None:
        super().__init__()
        self.spec = spec
        self.path = path
        # Cosines and sines of every position that the axes allow; path `onnx` keeps them in the graph.
        self.rotary: tuple[Tensor, ...] = ()
        E, queries, keys = spec.E, spec.Hq * spec.D, spec.Hkv * spec.D
        if spec.projections == "packed":
            self.qkv = nn.Linear(E, queries + 2 * keys, bias=spec.bias)
        else:
            self.q = nn.Linear(E, queries, bias=spec.bias)
            self.k = nn.Linear(E, keys, bias=spec.bias)
            self.v = nn.Linear(E, keys, bias=spec.bias)
        self._add_output_stage()

    def variation(self, **changes: Any) -> Attention:
        """The same layer on the same weights, with another `path` or `spec`."""
        changed = copy.copy(self)
        changed.__dict__.update(changes)
        return changed

    def _add_output_stage(self) -> None:
        self.o = nn.Linear(self.spec.Hq * self.spec.D, self.spec.E, bias=self.spec.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_lengths: Tensor | None = None,
        attention_bias: Tensor | None = None,
        past_key: Tensor | None = None,
        past_value: Tensor | None = None,
        key_cache: Tensor | None = None,
        value_cache: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """The output [B, S, E], with the attention weights [B, Hq, S, T] if the spec asks for them.

        Self attention takes keys and values from the query [B, S, E], cross attention from key and value
        [B, T, E]. A mask `padding` needs key_lengths, int32 [B], and `additive` an attention_bias
        [1, Hq, S, T]. A `dynamic` cache brings its past [B, Hkv, P, D], a `preallocated` one the buffers
        [B, Hkv, T, D], which are not written to, and how many of their entries are valid, int32 [B]. With a
        cache, the keys and values to bring to the next call follow the output.
        """
        if self.spec.cache != "none" and self.path == "onnx" and not torch.compiler.is_exporting():
            what = "PyTorch cannot run the ONNX nodes of a cache, only export them."
            raise DeployError(what, got="path = onnx", hint="path sdpa or plain to compute the layer")
        if self.spec.cache == "dynamic":
            return self._append(query, *brought(self.spec.name, past_key=past_key, past_value=past_value))
        if self.spec.cache == "preallocated":
            held = {"key_cache": key_cache, "value_cache": value_cache, "lengths": lengths}
            return self._update(query, *brought(self.spec.name, **held))
        heads, weights = self.heads(query, key, value, key_lengths, attention_bias)
        output = self.combine(heads, query)
        return output if weights is None else (output, weights)

    def heads(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_lengths: Tensor | None = None,
        attention_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Everything before the output stage: Concat(head_1 … head_Hq) [B, S, Hq·D], and the weights."""
        q, k, v = self.project(query, key, value)
        if self.spec.rope is not None:
            q, k = self.rotate(q, k, torch.arange(q.shape[1], device=q.device))
        mask = attention_bias if key_lengths is None else padding_mask(key_lengths, k.shape[1])
        return attend(q, k, v, mask, self._layout(causal=self.spec.causal), self.path)

    def _layout(self, *, causal: bool, past: int = 0) -> Heads:
        same = {name: getattr(self.spec, name) for name in ("Hq", "Hkv", "weights", "window", "softcap")}
        return Heads(**same, scale=self.spec.softmax_scale, causal=causal, past=past)

    def project(
        self, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Q [B, S, Hq·D], K and V [B, T, Hkv·D]."""
        if self.spec.projections == "packed":
            queries, keys = self.spec.Hq * self.spec.D, self.spec.Hkv * self.spec.D
            return self.qkv(query).split([queries, keys, keys], dim=-1)
        key, value = (query if given is None else given for given in (key, value))
        return self.q(query), self.k(key), self.v(value)

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rotary embedding of Q [B, S, Hq·D] and K [B, S, Hkv·D] at positions [S] or [B, S], if any."""
        spec, tables = self.spec, self.rotary
        if spec.rope is None:
            return q, k
        if self.path == "onnx":
            # ONNX `RotaryEmbedding` nodes, which look the angles of their positions up in tables.
            dims = spec.rope_dims if spec.rope_dims < spec.D else 0
            options: Any = {"interleaved": spec.rope.interleaved, "rotary_embedding_dim": dims}
            (cos, sin), rotated = tables, torch.onnx.ops.rotary_embedding
            q = rotated(q, cos, sin, positions.expand(q.shape[0], -1), num_heads=spec.Hq, **options)
            k = rotated(k, cos, sin, positions.expand(k.shape[0], -1), num_heads=spec.Hkv, **options)
            return q, k
        if tables and tables[0].device == q.device and tables[0].dtype == q.dtype:
            cos, sin = (table[positions] for table in tables)  # nothing comes from the host
        else:
            cos, sin = rotary_tables(spec.rope, spec.rope_dims, positions, q.dtype)
        return rotate_heads(spec, q, cos, sin), rotate_heads(spec, k, cos, sin)

    def combine(self, heads: Tensor, query: Tensor) -> Tensor:
        """The output stage: Concat(head_1 … head_Hq) W_O. [B, S, Hq·D] -> [B, S, E]."""
        return self.o(heads)

    # -- with a cache --------------------------------------------------------------------------

    def _append(self, query: Tensor, past_key: Tensor, past_value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        past, S = past_key.shape[2], query.shape[1]
        positions = past + torch.arange(S, device=query.device)
        window = self._window_mask(positions, past + S) if self.path == "onnx" else None
        q, k, v = self._rotated(query, positions)
        layout = self._layout(causal=True, past=past)
        if self.path == "onnx":  # one Attention node, which concatenates past and new entries
            given = (q, k, v, window, past_key, past_value)
            heads, keys, values, _ = torch.onnx.ops.attention(*given, is_causal=window is None, **layout.onnx)
        else:
            keys = torch.cat((past_key, split_heads(k, self.spec.Hkv)), dim=2)
            values = torch.cat((past_value, split_heads(v, self.spec.Hkv)), dim=2)
            heads, _ = attend(q, merge_heads(keys), merge_heads(values), None, layout, self.path)
        return self.combine(heads, query), keys, values

    def _update(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        S, T = query.shape[1], key_cache.shape[2]
        # The lengths are data: a traced or compiled layer cannot check them, and its caller must.
        if not torch.compiler.is_compiling() and not lengths.is_meta:
            refuse_overflow(lengths, S, T)
        positions = lengths[:, None] + torch.arange(S, device=query.device)
        q, k, v = self._rotated(query, positions)
        k, v = split_heads(k, self.spec.Hkv), split_heads(v, self.spec.Hkv)
        if self.path == "onnx":
            # Two nodes write the new entries, and an Attention knows how many are valid.
            window, starts = self._window_mask(positions, T), lengths.long()
            keys = _onnx_node("TensorScatter", [key_cache, k, starts], axis=2)
            values = _onnx_node("TensorScatter", [value_cache, v, starts], axis=2)
            inputs = [split_heads(q, self.spec.Hq), keys, values, window, None, None, starts + S]
            options = {"is_causal": int(window is None), "scale": self.spec.softmax_scale}
            options |= {} if self.spec.softcap is None else {"softcap": self.spec.softcap}
            heads = merge_heads(_onnx_node("Attention", inputs, **options))
        else:
            # A copy of the caches with the new entries at their positions.
            index = positions.long()[:, None, :, None].expand_as(k)
            keys, values = key_cache.scatter(2, index, k), value_cache.scatter(2, index, v)
            # Zeros behind the valid entries: a weight of 0 times what memory held, say NaN, is not 0.
            invalid = (torch.arange(T, device=query.device) >= (lengths + S)[:, None])[:, None, :, None]
            valid = [merge_heads(each.masked_fill(invalid, 0.0)) for each in (keys, values)]
            mask = visible_from(positions, T, self.spec.window)[:, None]
            heads, _ = attend(q, valid[0], valid[1], mask, self._layout(causal=False), self.path)
        return self.combine(heads, query), keys, values

    def _rotated(self, query: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V of the new tokens side by side, Q and K at their positions."""
        q, k, v = self.project(query, None, None)
        return *self.rotate(q, k, positions), v

    def _window_mask(self, positions: Tensor, T: int) -> Tensor | None:
        """What a window leaves to see, for an ONNX node: [1|B, 1, S, T]; None where there is no window."""
        if self.spec.window is None:
            return None
        mask = visible_from(positions, T, self.spec.window)
        return mask[None, None] if mask.dim() == 2 else mask[:, None]


def _onnx_node(op_type: str, inputs: list[Any], **attributes: Any) -> Tensor:
    """A node whose output is like its first input, of the first opset with TensorScatter."""
    kind = {"dtype": inputs[0].dtype, "shape": inputs[0].shape}
    return torch.onnx.ops.symbolic(op_type, inputs, attributes, **kind, version=24)


def rotate_heads(spec: AttentionSpec, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotary embedding of heads side by side, [B, S, H·D]."""
    interleaved = spec.rope is not None and spec.rope.interleaved
    return rotate(x.unflatten(-1, (-1, spec.D)), cos, sin, interleaved=interleaved).flatten(-2)


# -- Keys and values that are kept between calls ---------------------------------------------------


def brought(layer: str, **tensors: Tensor | None) -> list[Tensor]:
    """The tensors that a layer with a cache needs; refuse a call that does not bring them."""
    if missing := [name for name, tensor in tensors.items() if tensor is None]:
        got, hint = f"no {', '.join(missing)}", "an empty one has no past, or lengths of 0"
        raise DeployError(f"{layer} has a KV cache, and the call passes none.", got=got, hint=hint)
    return [tensor for tensor in tensors.values() if tensor is not None]
