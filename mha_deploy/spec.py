"""What an attention layer is: its heads, its masks, and its named axes.

`AttentionSpec` is the single source of input shapes, dynamic ONNX dimensions, TensorRT profiles and
golden shapes. The whole project writes shapes in one alphabet:

    B    batch                      Hq   query heads
    S    query length               Hkv  key/value heads
    T    key length                 D    head size
    E    model width

Self attention has T = S, so its only axes are B and S.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import mha_deploy.spec_rules as rules
from mha_deploy.errors import SpecError, nearest

FLOAT = "float"  # a tensor kind: whatever precision the export asks for
INT32 = "int32"

Dim = str | int
Sizes = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The range of one named axis: the smallest, the usual and the largest size."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not all(type(size) is int and size >= 1 for size in (self.min, self.opt, self.max)):
            raise SpecError(
                "An axis needs three whole numbers of at least 1.", got=self, hint="for example 1:128:512"
            )
        if not self.min <= self.opt <= self.max:
            raise SpecError(
                "An axis must satisfy min <= opt <= max.", got=self, hint=f"sort them: {self._sorted()}"
            )

    def __str__(self) -> str:
        return f"{self.min}:{self.opt}:{self.max}"

    def _sorted(self) -> str:
        return ":".join(str(size) for size in sorted((self.min, self.opt, self.max)))

    @property
    def is_dynamic(self) -> bool:
        """Whether more than one size is allowed."""
        return self.min != self.max

    @classmethod
    def parse(cls, text: str) -> Axis:
        """Read `min:opt:max`, or one number for a fixed size."""
        try:
            sizes = [int(part) for part in text.split(":")]
        except ValueError as error:
            raise SpecError("An axis range is not made of numbers.", got=text, hint="min:opt:max") from error
        if len(sizes) == 1:
            sizes *= 3
        if len(sizes) != 3:
            raise SpecError("An axis range has the wrong number of parts.", got=text, hint="min:opt:max")
        return cls(min=sizes[0], opt=sizes[1], max=sizes[2])


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One named input or output: its kind (`float` or `int32`) and its dimensions."""

    name: str
    kind: str
    dims: tuple[Dim, ...]

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Replace axis names by the given sizes."""
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.dims)


@dataclass(frozen=True, kw_only=True)
class SparseHeads:
    """Options of the sparse-head variant: each token uses its `top_k` highest-gated heads."""

    top_k: int
    renormalise: bool = False


@dataclass(frozen=True, kw_only=True)
class GroupedMlp:
    """Options of the grouped variant: `groups` of heads, mixed by an MLP of width `hidden`."""

    groups: int
    hidden: int


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One attention layer, complete enough to build, export, profile and test it.

    Args:
        name: Name of the model, as in `models/<name>.toml`.
        Hq: Query heads.
        Hkv: Key/value heads: Hq for multi-head, fewer for grouped-query, 1 for multi-query.
        D: Head size; E / Hq unless given.
        E: Model width.
        axes: Sizes of B and S, and of T for cross attention.
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
        """The axis that counts keys: T, or S where the layer attends to itself."""
        return "T" if self.is_cross else "S"

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
        return tuple(tensors)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs of the layer, in the order of the graph."""
        tensors = [TensorSpec(name="output", kind=FLOAT, dims=self._dims("B", "S", self.E))]
        if self.weights:
            dims = self._dims("B", self.Hq, "S", self.key_axis)
            tensors.append(TensorSpec(name="weights", kind=FLOAT, dims=dims))
        return tuple(tensors)

    def _dims(self, *dims: Dim) -> tuple[Dim, ...]:
        """Write a fixed axis as its number: only what varies is a named dimension."""
        fixed = {name: axis.min for name, axis in self.axes.items() if not axis.is_dynamic}
        return tuple(fixed.get(dim, dim) if isinstance(dim, str) else dim for dim in dims)

    def sizes(self, bound: str) -> dict[str, int]:
        """The size of every axis at `min`, `opt` or `max`."""
        return {name: getattr(axis, bound) for name, axis in self.axes.items()}

    # -- changes -------------------------------------------------------------------------------

    def with_axes(self, changed: Mapping[str, Axis]) -> AttentionSpec:
        """The same layer over other axis ranges."""
        for name in changed:
            if name not in self.axes:
                raise SpecError(f"{self.name} has no axis {name!r}.", got=name, hint=nearest(name, self.axes))
        return replace(self, axes={**self.axes, **changed})

    def parse_sizes(self, text: str) -> dict[str, int]:
        """Read sizes such as `B=2,S=33`: one for every axis, inside its range."""
        try:
            pairs = [part.split("=") for part in text.split(",")]
            sizes = {axis.strip(): int(size) for axis, size in pairs}
        except ValueError as error:
            example = ",".join(f"{name}={axis.opt}" for name, axis in self.axes.items())
            raise SpecError("Sizes cannot be read.", got=text, hint=f"such as {example}") from error
        self.check_sizes(sizes)
        return sizes

    def check_sizes(self, sizes: Sizes) -> None:
        """Refuse sizes that are missing, unknown or outside the axes."""
        if set(sizes) != set(self.axes):
            raise SpecError(
                f"{self.name} needs a size for each of its axes {', '.join(self.axes)}.", got=dict(sizes)
            )
        for name, axis in self.axes.items():
            if not axis.min <= sizes[name] <= axis.max:
                raise SpecError(
                    f"Axis {name} of {self.name} does not allow this size.",
                    got=f"{name}={sizes[name]}",
                    hint=f"a size from {axis.min} to {axis.max}, or widen it with --axis {name}=min:opt:max",
                )

    # -- reading and writing -------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain data, readable back with `from_dict`."""
        data = asdict(self)
        data["axes"] = {name: asdict(axis) for name, axis in self.axes.items()}
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
        data["axes"] = _axes_from(data["axes"])
        for key, options in (("sparse_heads", SparseHeads), ("grouped_mlp", GroupedMlp)):
            if key in data:
                data[key] = rules.record_from(key, options, data[key])
        return cls(**data)


_FIELDS = tuple(item.name for item in fields(AttentionSpec))


def _axes_from(data: Any) -> dict[str, Axis]:
    if not isinstance(data, Mapping):
        raise SpecError("axes must be a table.", got=data, hint="B = { min = 1, opt = 8, max = 32 }")
    return {name: _axis_from(name, value) for name, value in data.items()}


def _axis_from(name: str, value: Any) -> Axis:
    if isinstance(value, int) and not isinstance(value, bool):
        return Axis(min=value, opt=value, max=value)
    if not isinstance(value, Mapping):
        raise SpecError(
            f"Axis {name} is not a range.", got=value, hint=f"{name} = {{ min = 1, opt = 8, max = 32 }}"
        )
    return rules.record_from(f"axis {name}", Axis, value)
