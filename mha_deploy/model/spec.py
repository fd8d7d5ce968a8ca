"""What an attention layer is: heads, masks, named axes, rotary embedding, KV cache; and its rules."""

from __future__ import annotations

import ast
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from operator import add, floordiv, mod, mul, sub
from typing import Any, TypeVar

from mha_deploy.errors import SpecError, nearest

# -- The parts that a spec is made of: axes, tensors, and the options of single features -----------

_LARGEST_SIZE, _MOST_HEADS = 2**31 - 1, 1 << 16

FLOAT = "float"  # a tensor kind: whatever precision the export asks for
INT32 = "int32"

# Keys and values of a cache, as they come in and as they go out.
PAST, PRESENT = ("past_key", "past_value"), ("present_key", "present_value")
CACHES, CACHES_OUT = ("key_cache", "value_cache"), ("key_cache_out", "value_cache_out")
CACHE_TENSORS = {"dynamic": (PAST, PRESENT), "preallocated": (CACHES, CACHES_OUT)}
LENGTHS = "lengths"  # of a preallocated cache: its valid rows

Dim = str | int  # an axis, an expression of axes and numbers such as "P+S", or a number
Sizes = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The range of one named axis: the smallest, the usual and the largest size."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        # An axis does not know its name: which one may be 0 is decided in `spec_rules`.
        if not all(type(size) is int and size >= 0 for size in (self.min, self.opt, self.max)):
            raise SpecError(
                "An axis needs three whole numbers of at least 1; only P, the past, may be 0.",
                got=self,
                hint="for example 1:128:512",
            )
        if self.max > _LARGEST_SIZE:
            raise SpecError(f"An axis has at most {_LARGEST_SIZE} entries.", got=self)
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
    def parse(cls, text: str, *, name: str = "") -> Axis:
        """Read `min:opt:max`, or one number for a fixed size; `name` says which axis, if it may be 0."""
        try:
            sizes = [int(part) for part in text.split(":")]
        except ValueError as error:
            raise SpecError("An axis range is not made of numbers.", got=text, hint="min:opt:max") from error
        if len(sizes) == 1:
            sizes *= 3
        if len(sizes) != 3:
            raise SpecError("An axis range has the wrong number of parts.", got=text, hint="min:opt:max")
        axis = cls(min=sizes[0], opt=sizes[1], max=sizes[2])
        check_axis(name, axis)
        return axis


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One named input or output: its kind (`float` or `int32`) and its dimensions."""

    name: str
    kind: str
    dims: tuple[Dim, ...]

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Replace axis names by the given sizes, and compute sums and other expressions."""
        return tuple(dim if isinstance(dim, int) else size_of(dim, sizes) for dim in self.dims)


_OPERATORS = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.FloorDiv: floordiv, ast.Mod: mod}


def size_of(dim: str, sizes: Sizes) -> int:
    """The value of a dimension such as `P+S` or `(L - 5)//8 + 1`.

    Raises:
        KeyError: An axis has no size.
        SpecError: It is no expression of whole numbers, axes, and `+ - * // %`.
    """

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return int(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            return sizes[node.id]
        raise SpecError("A dimension is no expression of axes and whole numbers.", got=dim)

    try:
        return value(ast.parse(dim, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, ZeroDivisionError) as error:
        raise SpecError("A dimension is no expression of axes and whole numbers.", got=dim) from error


def simplified(dim: Dim, fixed: Sizes) -> Dim:
    """Write fixed axes as their numbers: `P+S` with S = 1 is `P+1`, with both fixed it is a number."""
    if isinstance(dim, int):
        return dim
    parts = dim.split("+")
    names = [part for part in parts if part not in fixed]
    number = sum(fixed[part] for part in parts if part in fixed)
    if not names:
        return number
    return "+".join([*names, str(number)] if number else names)


@dataclass(frozen=True, kw_only=True)
class SparseHeads:
    """Options of the sparse-head variant: each token uses its `top_k` highest-gated heads."""

    top_k: int
    renormalise: bool = False


@dataclass(frozen=True, kw_only=True)
class GroupedMlp:
    """Options of the grouped variant.

    Args:
        groups: Number of groups; the heads of one interact through a linear layer, those of two do not.
        hidden: Width of the MLP that mixes the groups.
    """

    groups: int
    hidden: int


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding: pairs of numbers are rotated by an angle that grows with the position.

    Args:
        base: Base of the geometric row of frequencies.
        dims: How many numbers of a head are rotated, its first ones; default: all D.
        interleaved: Whether the pairs are neighbours, (0, 1), (2, 3), …; otherwise they are (j, j + dims/2).
        scaling: How the frequencies are stretched for longer contexts: `none`, `linear`, `ntk` or `llama3`.
        factor: How much they are stretched.
        low_freq_factor: For `llama3`: wavelengths above original_length / low_freq_factor get all of it.
        high_freq_factor: For `llama3`: wavelengths below original_length / high_freq_factor stay.
        original_length: For `llama3`: the context length of the training before it was stretched.
    """

    base: float = 10000.0
    dims: int | None = None
    interleaved: bool = False
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


OPTIONS = {"sparse_heads": SparseHeads, "grouped_mlp": GroupedMlp, "rope": Rope}


def axes_from(data: Any) -> dict[str, Axis]:
    """Read the `[axes]` table."""
    if not isinstance(data, Mapping):
        raise SpecError("axes must be a table.", got=data, hint="B = { min = 1, opt = 8, max = 32 }")
    return {name: _axis_from(name, value) for name, value in data.items()}


def axes_with_cache(axes: Mapping[str, Axis], cache: str, room: int) -> dict[str, Axis]:
    """The axes of a layer for another cache: its calls and its sequences stay as long as they were.

    Args:
        axes: The axes with the cache that it has.
        cache: The other one; without any, one call brings the whole sequence.
        room: How many tokens the calls of the layer may bring one by one.
    """
    S = axes["S"]
    length = max(S.max, room)
    added = {
        "none": {"S": replace(S, max=length)},
        "dynamic": {"P": Axis(min=0, opt=min(S.opt, length - 1), max=length - 1)},
        "preallocated": {"T": Axis(min=length, opt=length, max=length)},
    }
    return {"B": axes["B"], "S": S, **added[cache]}


def _axis_from(name: str, value: Any) -> Axis:
    if isinstance(value, int) and not isinstance(value, bool):
        return Axis(min=value, opt=value, max=value)
    if not isinstance(value, Mapping):
        raise SpecError(
            f"Axis {name} is not a range.", got=value, hint=f"{name} = {{ min = 1, opt = 8, max = 32 }}"
        )
    return record_from(f"axis {name}", Axis, value)


# -- The KV cache of a model: what one call leaves for the next ------------------------------------


@dataclass(frozen=True, kw_only=True)
class CachedTensor:
    """One tensor of a KV cache.

    Args:
        name: Its name in decode traces and verdicts.
        input: The input of a call.
        output: The output that takes its place in the next call.
        axis: The dimension along which the tokens lie.
    """

    name: str
    input: str
    output: str
    axis: int


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """How a model decodes: which tensors are cached, and how the other tensors follow the tokens.

    Args:
        tensors: The cached tensors.
        new: The axis of new tokens.
        past: The axis of tokens in the cache; None for a preallocated cache.
        room: How many tokens all calls together may bring.
        by_token: For each other input with an entry for each new token, that dimension.
        by_context: For each other input that covers all tokens so far, such as a mask, that dimension.
        outputs: For each output by token, the dimension of the tokens.
    """

    tensors: tuple[CachedTensor, ...]
    new: str
    past: str | None
    room: int
    by_token: Mapping[str, int]
    by_context: Mapping[str, int]
    outputs: Mapping[str, int]

    @property
    def is_preallocated(self) -> bool:
        """Whether the cache has all its entries from the start, of which `lengths` are valid."""
        return self.past is None

    def call_sizes(self, spec: ModelSpec, B: int, S: int, past: int) -> dict[str, int]:
        """The size of every axis in a call with S new tokens behind `past` ones."""
        sizes = {**spec.sizes("opt"), self.new: S}
        if "B" in sizes:
            sizes["B"] = B
        return {**sizes, **({"T": spec.axes["T"].max} if self.past is None else {self.past: past})}


# -- What every command needs to know of a model: its name, its axes and its tensors ---------------

_Spec = TypeVar("_Spec", bound="ModelSpec")


class ModelSpec(ABC):
    """The outside of a model.

    It is the single source of input shapes, dynamic ONNX dimensions, TensorRT profiles and golden shapes.
    """

    name: str
    summary: str
    axes: Mapping[str, Axis]
    cache: str
    window: int | None
    mixed: bool = False
    weight_bytes: int = 0

    @property
    def layer(self) -> AttentionSpec | None:
        """The catalog layer that it is; None for a user's module."""
        return None

    @property
    @abstractmethod
    def kind(self) -> str:
        """What it is, in a word."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs, in the order of the graph."""

    @property
    @abstractmethod
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs, in the order of the graph."""

    @property
    @abstractmethod
    def attention_count(self) -> int:
        """How many fused attention nodes the exported graph must have."""

    @property
    @abstractmethod
    def kv_cache(self) -> KVCache | None:
        """How it decodes; None for a model without a KV cache."""

    def flops_at(self, sizes: Sizes) -> int:
        """At most the work of one call, where that does not follow from a layer's form."""
        raise NotImplementedError

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""

    def sizes(self, bound: str) -> dict[str, int]:
        """The size of every axis at `min`, `opt` or `max`."""
        return {name: getattr(axis, bound) for name, axis in self.axes.items()}

    def with_axes(self: _Spec, changed: Mapping[str, Axis]) -> _Spec:
        """The same model over other axis ranges."""
        for name in changed:
            if name not in self.axes:
                raise SpecError(f"{self.name} has no axis {name!r}.", got=name, hint=nearest(name, self.axes))
        return replace(self, axes={**self.axes, **changed})  # type: ignore[type-var]

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


# -- What an attention layer is: its heads, its masks, and its named axes --------------------------


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(ModelSpec):
    """One attention layer, complete enough to build, export, profile and test it.

    Args:
        name: Name of the model, as in `models/<name>.toml`.
        Hq: Query heads.
        Hkv: Key/value heads: Hq for multi-head, fewer for grouped-query, 1 for multi-query.
        D: Head size; default: E / Hq.
        E: Model width.
        axes: Sizes of B and S; of T for cross attention and a preallocated cache; of P for a dynamic cache.
        summary: One line for people.
        variant: What happens to the heads after attention; one of `VARIANTS`.
        attends: `self` or `cross`.
        bias: Whether the projections have a bias.
        mask: `none`, `padding` (from per-row key lengths) or `additive` (a float bias on the scores).
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor on the scores; default: 1/sqrt(D).
        weights: Whether the attention weights are a second output.
        projections: `separate` q, k, v matrices or one `packed` matrix.
        sparse_heads: Options, for that variant only.
        grouped_mlp: Options, for that variant only.
        rope: Rotary position embedding of queries and keys, if any.
        window: How many keys a query sees, itself included; default: all before it.
        softcap: Bound of the scores: s becomes softcap · tanh(s / softcap), before any mask.
        cache: `none`, `dynamic` (past keys and values come in, longer ones go out) or `preallocated` (buffers
            of T entries, of which the first `lengths[b]` are valid before the call).
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
        check_spec(self)

    @property
    def layer(self) -> AttentionSpec:
        """The catalog layer that it is."""
        return self

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
        """What counts the keys: T, S where the layer attends to itself, or P+S behind a dynamic cache."""
        if self.cache == "dynamic":
            return "P+S"
        return "T" if self.is_cross or self.cache == "preallocated" else "S"

    @property
    def longest(self) -> int:
        """How many positions a sequence may have, all calls together."""
        most = self.sizes("max")
        if self.cache == "preallocated":
            return most["T"]
        return most["S"] + most.get("P", 0)

    @property
    def room(self) -> int:
        """How many tokens all calls together may bring, the last of them alone."""
        most = self.sizes("max")
        return (
            most["P"] + 1 if self.cache == "dynamic" else most["T" if self.cache == "preallocated" else "S"]
        )

    @property
    def kv_cache(self) -> KVCache | None:
        """How it decodes; None for a layer without a KV cache."""
        if self.cache == "none":
            return None
        takes, gives = CACHE_TENSORS[self.cache]
        return KVCache(
            tensors=tuple(
                CachedTensor(name=name, input=taken, output=given, axis=2)
                for name, taken, given in zip(("key", "value"), takes, gives, strict=True)
            ),
            new="S",
            past="P" if self.cache == "dynamic" else None,
            room=self.room,
            by_token={"x": 1},
            by_context={},
            outputs={"output": 1},
        )

    @property
    def rope_dims(self) -> int:
        """How many numbers of a head the rotary embedding rotates: 0 without one."""
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
        if self.cache == "dynamic":
            tensors += self._cache_tensors(PAST, length="P")
        if self.cache == "preallocated":
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
        if self.cache == "dynamic":
            tensors += self._cache_tensors(PRESENT, length="P+S")
        if self.cache == "preallocated":
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
            cache: `none`, `dynamic`, which takes any past that one more token fits behind, or `preallocated`.
        """
        check_cache_kind(cache)
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
        refuse_unknown("the spec", data, _FIELDS)
        require("the spec", data, ("name", "Hq", "E", "axes"))
        whole_number("Hq", data["Hq"])
        whole_number("E", data["E"])
        data.setdefault("Hkv", data["Hq"])
        if "D" not in data:
            data["D"] = head_size(data["E"], data["Hq"])
        data["axes"] = axes_from(data["axes"])
        for key, options in OPTIONS.items():
            if key in data:
                data[key] = record_from(key, options, data[key])
        return cls(**data)


_FIELDS = tuple(item.name for item in fields(AttentionSpec))


# -- The rules a spec must keep, each refused with what to change ----------------------------------

ATTENDS = ("self", "cross")
MASKS = ("none", "padding", "additive")
PROJECTIONS = ("separate", "packed")
VARIANTS = ("attention", "sparse-heads", "grouped-mlp", "head-mix")
CACHE_KINDS = ("none", "dynamic", "preallocated")
SCALINGS = ("none", "linear", "ntk", "llama3")
_CACHE_AXES: dict[str, tuple[str, ...]] = {"none": (), "dynamic": ("P",), "preallocated": ("T",)}
_MAY_BE_EMPTY = ("P",)
_AXIS_HINTS = {
    "T": 'self attention has T = S: leave T out, or set attends = "cross"',
    "P": 'only a dynamic cache has a past: leave P out, or set cache = "dynamic"',
}


def check_spec(spec: AttentionSpec) -> None:
    """Refuse a spec that does not describe an attention layer."""
    _check_types(spec)
    _check_choices(spec)
    _check_heads(spec)
    if spec.cache != "none":  # before the axes: a layer that can have no cache needs none of its axes
        _check_cache(spec)
    _check_axes(spec)
    _check_combinations(spec)
    _check_variant_options(spec)
    _check_scores(spec)
    if spec.rope is not None:
        _check_rope(spec, spec.rope)
    if spec.cache == "preallocated":
        _check_capacity(spec.axes["S"], spec.axes["T"])


def _check_types(spec: AttentionSpec) -> None:
    for name in ("Hq", "Hkv", "D", "E"):
        whole_number(name, getattr(spec, name))
    for name in ("name", "summary"):
        if not isinstance(getattr(spec, name), str):
            raise SpecError(f"{name} must be text.", got=getattr(spec, name), hint=f'{name} = "..."')
    for name in ("bias", "causal", "weights"):
        _true_or_false(name, getattr(spec, name))
    if spec.scale is not None and not _is_above(0, spec.scale):
        raise SpecError("scale must be a positive number.", got=spec.scale, hint="leave it out for 1/sqrt(D)")
    if spec.softcap is not None and not _is_above(0, spec.softcap):
        raise SpecError("softcap must be a positive number.", got=spec.softcap, hint="leave it out for none")
    if spec.window is not None:
        whole_number("window", spec.window)


def _check_choices(spec: AttentionSpec) -> None:
    choices = {
        "variant": VARIANTS,
        "attends": ATTENDS,
        "mask": MASKS,
        "projections": PROJECTIONS,
        "cache": CACHE_KINDS,
    }
    for name, known in choices.items():
        _one_of(name, getattr(spec, name), known)


def _check_heads(spec: AttentionSpec) -> None:
    if spec.Hq % spec.Hkv:
        raise SpecError(
            "The query heads cannot be shared evenly: Hq must be a multiple of Hkv.",
            got=f"Hq={spec.Hq}, Hkv={spec.Hkv}",
            hint=f"Hkv from {_divisors(spec.Hq)}",
        )


def _check_axes(spec: AttentionSpec) -> None:
    wanted = ("B", "S", "T") if spec.is_cross else ("B", "S", *_CACHE_AXES[spec.cache])
    for name in spec.axes:
        if name not in wanted:
            hint = _AXIS_HINTS.get(name) or nearest(name, wanted)
            raise SpecError(f"Axis {name!r} does not belong here.", got=name, hint=hint)
    require("[axes]", spec.axes, wanted)
    for name, axis in spec.axes.items():
        check_axis(name, axis)


def check_cache_kind(cache: str) -> None:
    """Refuse a cache of no known kind."""
    _one_of("cache", cache, CACHE_KINDS)


def check_axis(name: str, axis: Axis) -> None:
    """Refuse an axis of size 0, unless it is one that may be empty: a cache begins with no past."""
    if axis.min < 1 and name not in _MAY_BE_EMPTY:
        raise SpecError(
            "An axis needs three whole numbers of at least 1.",
            got=f"{name} = {axis}" if name else axis,
            hint="for example 1:128:512",
        )


def _check_combinations(spec: AttentionSpec) -> None:
    if spec.is_cross and spec.causal:
        raise SpecError(
            "Causal cross attention has no single meaning: the diagonal can start at either corner.",
            got='attends = "cross", causal = true',
            hint='causal = false with mask = "additive" and the mask you mean as attention_bias',
        )
    if spec.is_cross and spec.projections == "packed":
        raise SpecError(
            "Packed projections read one input, and cross attention has three.",
            got='attends = "cross", projections = "packed"',
            hint='projections = "separate"',
        )


def _check_variant_options(spec: AttentionSpec) -> None:
    for variant, options in (("sparse-heads", spec.sparse_heads), ("grouped-mlp", spec.grouped_mlp)):
        table = variant.replace("-", "_")
        if spec.variant == variant and options is None:
            raise SpecError(f"The variant {variant} needs its options.", hint=f"add a [{table}] table")
        if spec.variant != variant and options is not None:
            raise SpecError(
                f"[{table}] belongs to another variant.",
                got=spec.variant,
                hint=f'variant = "{variant}", or drop it',
            )
    if spec.sparse_heads is not None:
        whole_number("top_k", spec.sparse_heads.top_k)
        _true_or_false("renormalise", spec.sparse_heads.renormalise)
        if spec.sparse_heads.top_k > spec.Hq:
            raise SpecError(
                "top_k is more than all heads.", got=spec.sparse_heads.top_k, hint=f"1 to {spec.Hq}"
            )
    if spec.grouped_mlp is not None:
        whole_number("hidden", spec.grouped_mlp.hidden)
        whole_number("groups", spec.grouped_mlp.groups)
        if spec.Hq % spec.grouped_mlp.groups:
            raise SpecError(
                "The heads cannot be grouped evenly.",
                got=f"{spec.grouped_mlp.groups} groups of {spec.Hq} heads",
                hint=f"groups from {_divisors(spec.Hq)}",
            )


def _check_scores(spec: AttentionSpec) -> None:
    if spec.window is not None and not spec.causal:
        raise SpecError(
            "A window counts keys back from the query, and this layer also looks ahead.",
            got=f"window = {spec.window}, causal = false",
            hint="causal = true",
        )


def _check_rope(spec: AttentionSpec, rope: Rope) -> None:
    if spec.is_cross:
        raise SpecError(
            "Rotary embedding needs queries and keys on one line of positions.",
            got='attends = "cross"',
            hint='attends = "self", or drop [rope]',
        )
    _true_or_false("interleaved", rope.interleaved)
    _one_of("scaling", rope.scaling, SCALINGS)
    dims = spec.rope_dims
    whole_number("dims", dims)
    if dims % 2 or dims > spec.D:
        raise SpecError(
            "Rotary embedding rotates pairs inside a head: dims must be even and at most D.",
            got=f"dims={dims}, D={spec.D}",
            hint=f"an even number up to {spec.D}",
        )
    if not _is_above(1, rope.base):
        raise SpecError("base must be a number above 1.", got=rope.base, hint="base = 10000.0")
    _check_scaling(rope, dims)


def _check_scaling(rope: Rope, dims: int) -> None:
    if not (_is_above(1, rope.factor) or rope.factor == 1):
        raise SpecError("factor must be a number of at least 1.", got=rope.factor, hint="factor = 8.0")
    if rope.scaling == "none" and rope.factor != 1:
        raise SpecError(
            "A factor without a scaling does nothing.",
            got=f"factor = {rope.factor}",
            hint="scaling = " + ", ".join(SCALINGS[1:]),
        )
    if rope.scaling == "ntk" and dims < 4:
        raise SpecError("NTK scaling needs two pairs or more.", got=f"dims={dims}", hint="dims of at least 4")
    whole_number("original_length", rope.original_length)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    if not (_is_above(0, low) and _is_above(low, high)):
        raise SpecError(
            "The frequency factors must satisfy 0 < low_freq_factor < high_freq_factor.",
            got=f"{low}, {high}",
            hint="1.0 and 4.0, as Llama 3.1 has them",
        )


def _check_cache(spec: AttentionSpec) -> None:
    cached = f'cache = "{spec.cache}"'
    wanted: dict[str, object] = {"attends": "self", "causal": True, "variant": "attention", "mask": "none"}
    why = {"mask": " (the lengths of a preallocated cache are the padding)"}
    for name, value in {**wanted, "weights": False}.items():
        if getattr(spec, name) != value:
            raise SpecError(
                f"A cache does not go with this {name}.",
                got=f"{cached}, {name} = {_toml(getattr(spec, name))}",
                hint=f"{name} = {_toml(value)}{why.get(name, '')}",
            )


def _check_capacity(S: Axis, T: Axis) -> None:
    if T.is_dynamic:
        raise SpecError(
            "The capacity of a preallocated cache must be one number.", got=f"T = {T}", hint=f"T = {T.max}"
        )
    if S.max > T.max:
        raise SpecError(
            "One call may bring more tokens than the cache has rows.",
            got=f"S up to {S.max}, T = {T.max}",
            hint=f"S up to {T.max}, or a larger T",
        )


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SpecError(f"{name} is not a known one.", got=value, hint=nearest(str(value), known))


def _true_or_false(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise SpecError(f"{name} is neither true nor false.", got=value, hint=f"{name} = true")


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _is_above(bound: float, value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > bound  # type: ignore[arg-type, operator]


def whole_number(name: str, value: object) -> None:
    """Refuse anything but a whole number from 1 to what a tensor can have."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(f"{name} must be a whole number of at least 1.", got=value)
    most = _MOST_HEADS if name in ("Hq", "Hkv") else _LARGEST_SIZE
    if value > most:
        raise SpecError(f"{name} must be at most {most}.", got=value)


def head_size(E: int, Hq: int) -> int:
    """The head size that the model width implies."""
    if E % Hq:
        raise SpecError(
            "The model width does not split into the heads, and no head size is given.",
            got=f"E={E}, Hq={Hq}",
            hint="add D = <head size>",
        )
    return E // Hq


def refuse_unknown(where: str, data: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Refuse a key that means nothing, naming the nearest one that does."""
    for key in data:
        if key not in known:
            raise SpecError(f"Unknown key in {where}.", got=key, hint=nearest(key, known))


def require(where: str, data: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    """Refuse data without these keys."""
    missing = [key for key in keys if key not in data]
    if missing:
        raise SpecError(f"{where} lacks {', '.join(missing)}.", got=f"keys {', '.join(data) or 'none'}")


def record_from(where: str, record: Any, data: Any) -> Any:
    """Read a table into a dataclass, refusing keys it does not have."""
    if not isinstance(data, Mapping):
        raise SpecError(f"{where} must be a table.", got=data)
    known = tuple(item.name for item in fields(record))
    refuse_unknown(where, data, known)
    try:
        return record(**data)
    except TypeError as error:
        raise SpecError(
            f"{where} is incomplete.", got=dict(data), hint=f"keys: {', '.join(known)}"
        ) from error
