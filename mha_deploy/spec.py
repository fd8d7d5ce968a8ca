"""What an attention layer is: its heads, its masks, and its named axes.

`AttentionSpec` is the single source of input shapes, dynamic ONNX dimensions, TensorRT profiles and
golden shapes. The whole project writes shapes in one alphabet:

    B    batch                      Hq   query heads
    S    query length               Hkv  key/value heads
    T    key length, or rows of a   D    head size
         static cache               E    model width
    P    past length

Self attention has T = S, so its only axes are B and S. A cache adds one: P, the tokens that a growing cache
holds before the call, or T, the fixed number of rows of a static one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import mha_deploy.spec_rules as rules
from mha_deploy.model_spec import ModelSpec
from mha_deploy.spec_parts import (
    CACHES,
    CACHES_OUT,
    FLOAT,
    INT32,
    LENGTHS,
    OPTIONS,
    PAST,
    PRESENT,
    Axis,
    Dim,
    GroupedMlp,
    Rope,
    Sizes,
    SparseHeads,
    TensorSpec,
    axes_from,
    axes_with_cache,
    simplified,
)

__all__ = [
    "FLOAT",
    "INT32",
    "AttentionSpec",
    "Axis",
    "Dim",
    "GroupedMlp",
    "Rope",
    "Sizes",
    "SparseHeads",
    "TensorSpec",
]


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(ModelSpec):
    """One attention layer, complete enough to build, export, profile and test it.

    Args:
        name: Name of the model, as in `models/<name>.toml`.
        Hq: Query heads.
        Hkv: Key/value heads: Hq for multi-head, fewer for grouped-query, 1 for multi-query.
        D: Head size; E / Hq unless given.
        E: Model width.
        axes: Sizes of B and S; of T for cross attention and a static cache; of P for a growing cache.
        summary: One line for people.
        variant: What happens to the heads after attention; one of `spec_rules.VARIANTS`.
        attends: `self` or `cross`.
        bias: Whether the projections have a bias.
        mask: `none`, `padding` (from per-row key lengths) or `additive` (a float bias on the scores).
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor on the scores; 1/sqrt(D) unless given.
        weights: Whether the attention weights are a second output.
        projections: `separate` q, k, v matrices or one `packed` matrix.
        sparse_heads: Options, for that variant only.
        grouped_mlp: Options, for that variant only.
        rope: Rotary position embedding of queries and keys, if any.
        window: How many keys a query sees, itself included; all before it unless given.
        softcap: Bound of the scores: s becomes softcap · tanh(s / softcap), before any mask.
        cache: `none`, `growing` (past keys and values come in, longer ones go out) or `static` (buffers of
            T rows, of which the first `lengths[b]` are valid before the call).
    """

    name: str
    Hq: int
    Hkv: int
    D: int
    E: int
    axes: Mapping[str, Axis]
    summary: str = ""
    variant: str = "attention"
    attends: str = "self"
    bias: bool = True
    mask: str = "none"
    causal: bool = False
    scale: float | None = None
    weights: bool = False
    projections: str = "separate"
    sparse_heads: SparseHeads | None = None
    grouped_mlp: GroupedMlp | None = None
    rope: Rope | None = None
    window: int | None = None
    softcap: float | None = None
    cache: str = "none"

    def __post_init__(self) -> None:
        rules.check_spec(self)

    # -- derived facts -------------------------------------------------------------------------

    @property
    def is_cross(self) -> bool:
        """Whether keys and values come from another sequence than the queries."""
        return self.attends == "cross"

    @property
    def kind(self) -> str:
        """The head layout by its usual name."""
        if self.Hkv == self.Hq:
            return "MHA"
        return "MQA" if self.Hkv == 1 else "GQA"

    @property
    def softmax_scale(self) -> float:
        """The factor on the scores that the layer really uses."""
        return 1.0 / math.sqrt(self.D) if self.scale is None else self.scale

    @property
    def attention_count(self) -> int:
        """How many fused attention nodes the exported graph must have."""
        return 2 if self.variant == "head-mix" else 1

    @property
    def key_axis(self) -> str:
        """What counts the keys: T, S where the layer attends to itself, or P+S behind a growing cache."""
        if self.cache == "growing":
            return "P+S"
        return "T" if self.is_cross or self.cache == "static" else "S"

    @property
    def longest(self) -> int:
        """How many positions a sequence may have, all calls together."""
        most = self.sizes("max")
        if self.cache == "static":
            return most["T"]
        return most["S"] + most.get("P", 0)

    @property
    def room(self) -> int:
        """How many tokens all calls together may bring, the last of them alone."""
        most = self.sizes("max")
        return most["P"] + 1 if self.cache == "growing" else most["T" if self.cache == "static" else "S"]

    @property
    def rope_dims(self) -> int:
        """How many numbers of a head the rotary embedding turns: 0 without one."""
        if self.rope is None:
            return 0
        return self.D if self.rope.dims is None else self.rope.dims

    # -- tensors -------------------------------------------------------------------------------

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs of the layer, in the order of the graph."""
        tensors = [
            TensorSpec(name="query" if self.is_cross else "x", kind=FLOAT, dims=self._dims("B", "S", self.E))
        ]
        if self.is_cross:
            tensors += [
                TensorSpec(name=name, kind=FLOAT, dims=self._dims("B", "T", self.E))
                for name in ("key", "value")
            ]
        if self.mask == "padding":
            tensors.append(TensorSpec(name="key_lengths", kind=INT32, dims=self._dims("B")))
        if self.mask == "additive":
            dims = self._dims(1, self.Hq, "S", self.key_axis)
            tensors.append(TensorSpec(name="attention_bias", kind=FLOAT, dims=dims))
        if self.cache == "growing":
            tensors += self._cache_tensors(PAST, length="P")
        if self.cache == "static":
            tensors += self._cache_tensors(CACHES, length="T")
            tensors.append(TensorSpec(name=LENGTHS, kind=INT32, dims=self._dims("B")))
        return tuple(tensors)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs of the layer, in the order of the graph."""
        tensors = [TensorSpec(name="output", kind=FLOAT, dims=self._dims("B", "S", self.E))]
        if self.weights:
            dims = self._dims("B", self.Hq, "S", self.key_axis)
            tensors.append(TensorSpec(name="weights", kind=FLOAT, dims=dims))
        if self.cache == "growing":
            tensors += self._cache_tensors(PRESENT, length="P+S")
        if self.cache == "static":
            tensors += self._cache_tensors(CACHES_OUT, length="T")
        return tuple(tensors)

    def _cache_tensors(self, names: tuple[str, ...], *, length: str) -> list[TensorSpec]:
        dims = self._dims("B", self.Hkv, length, self.D)
        return [TensorSpec(name=name, kind=FLOAT, dims=dims) for name in names]

    def _dims(self, *dims: Dim) -> tuple[Dim, ...]:
        """Write a fixed axis as its number: only what varies is a named dimension."""
        fixed = {name: axis.min for name, axis in self.axes.items() if not axis.is_dynamic}
        return tuple(simplified(dim, fixed) for dim in dims)

    # -- changes -------------------------------------------------------------------------------

    def without_cache(self) -> AttentionSpec:
        """The same layer over whole sequences, of all positions that its calls can reach: their oracle."""
        if self.cache == "none":
            return self
        axes = {"B": self.axes["B"], "S": replace(self.axes["S"], max=self.longest)}
        return replace(self, cache="none", axes=axes)

    def with_cache(self, cache: str) -> AttentionSpec:
        """The same layer with another cache, for sequences as long as its own.

        Args:
            cache: `none`, `growing`, which takes any past that one more token fits behind, or `static`.
        """
        rules.check_cache_kind(cache)
        if cache == self.cache:
            return self
        return replace(self, cache=cache, axes=axes_with_cache(self.axes, cache, self.room))

    # -- reading and writing -------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain data, readable back with `from_dict`."""
        data = asdict(self)
        data["axes"] = {name: asdict(axis) for name, axis in self.axes.items()}
        if self.rope is not None:
            data["rope"] = {key: value for key, value in data["rope"].items() if value is not None}
        if self.cache == "none":  # as it was written before there were caches
            del data["cache"]
        return {key: value for key, value in data.items() if value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttentionSpec:
        """Read a spec from plain data, refusing what it does not know."""
        data = dict(data)
        rules.refuse_unknown("the spec", data, _FIELDS)
        rules.require("the spec", data, ("name", "Hq", "E", "axes"))
        rules.whole_number("Hq", data["Hq"])
        rules.whole_number("E", data["E"])
        data.setdefault("Hkv", data["Hq"])
        if "D" not in data:
            data["D"] = rules.head_size(data["E"], data["Hq"])
        data["axes"] = axes_from(data["axes"])
        for key, options in OPTIONS.items():
            if key in data:
                data[key] = rules.record_from(key, options, data[key])
        return cls(**data)


_FIELDS = tuple(item.name for item in fields(AttentionSpec))
