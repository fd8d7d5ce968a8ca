"""An attention layer of the catalog: what it is, the rules that it must keep, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

from mha_deploy.errors import SpecError, nearest
from mha_deploy.model.spec import (
    CACHE_TENSORS,
    CACHES,
    FLOAT,
    INT32,
    LENGTHS,
    PAST,
    Axes,
    Axis,
    CachedTensor,
    Dim,
    KVCache,
    LayerCost,
    Lengths,
    ModelSpec,
    Sizes,
    StageCost,
    TensorSpec,
    axes_from,
    check_axis,
    cost_of,
    has_room,
    record_from,
    refuse,
    refuse_unknown,
    require,
    whole_number,
)


@dataclass(frozen=True, kw_only=True)
class SparseHeads:
    """Options of the sparse-head variant: each token uses its `top_k` highest-gated heads."""

    top_k: int
    renormalise: bool = False


@dataclass(frozen=True, kw_only=True)
class GroupedMlp:
    """Options of the grouped variant."""

    groups: int  # number of groups; the heads of one interact through a linear layer, those of two do not
    hidden: int  # width of the MLP that mixes the groups


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding: pairs of numbers are rotated by an angle that grows with the position."""

    base: float = 10000.0  # base of the geometric series of frequencies
    dims: int | None = None  # how many numbers of a head are rotated, its first ones; default: all D
    interleaved: bool = False  # whether pairs are neighbors, (0, 1), (2, 3), …; or else (j, j + dims/2)
    scaling: str = "none"  # how frequencies are stretched for longer contexts; one of `SCALINGS`
    factor: float = 1.0  # how much they are stretched
    low_freq_factor: float = 1.0  # for `llama3`: wavelengths above original_length / it get all of that
    high_freq_factor: float = 4.0  # for `llama3`: wavelengths below original_length / it stay
    original_length: int = 8192  # for `llama3`: the context length of the training before it was stretched


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(ModelSpec):
    """One attention layer, complete enough to build, export, profile and test it."""

    name: str  # name of the model, as in `models/<name>.toml`
    Hq: int  # query heads
    Hkv: int  # key/value heads: Hq for multi-head, fewer for grouped-query, 1 for multi-query
    D: int  # head size; default: E / Hq
    E: int  # model width
    axes: Axes  # B, S; T for cross attention and a preallocated cache, P for a dynamic one
    summary: str = ""  # one line for people
    variant: str = "attention"  # what happens to the heads after attention; one of `VARIANTS`
    attends: str = "self"  # `self` or `cross`
    bias: bool = True  # whether the projections have a bias
    mask: str = "none"  # `none`, `padding` (from key lengths) or `additive` (a float bias on the scores)
    causal: bool = False  # whether a query attends only to keys at or before its own position
    scale: float | None = None  # factor on the scores; default: 1/sqrt(D)
    weights: bool = False  # whether the attention weights are a second output
    projections: str = "separate"  # `separate` q, k, v matrices or one `packed` matrix
    sparse_heads: SparseHeads | None = None  # options, for that variant only
    grouped_mlp: GroupedMlp | None = None  # options, for that variant only
    rope: Rope | None = None  # rotary position embedding of queries and keys, if any
    window: int | None = None  # how many keys a query attends to, itself included; default: all before it
    softcap: float | None = None  # bounds scores: s becomes softcap · tanh(s / softcap), before any mask
    # `none`, `dynamic` (past keys and values come in, longer ones go out) or `preallocated` (buffers of T
    # entries, of which the first `lengths[b]` are valid before the call).
    cache: str = "none"

    def __post_init__(self) -> None:
        check_spec(self)

    draws_probes = True

    @property
    def is_cross(self) -> bool:
        """Whether keys and values come from another sequence than the queries."""
        return self.attends == "cross"

    @property
    def kind(self) -> Literal["MHA", "GQA", "MQA"]:
        """The head layout by its usual name."""
        return "MHA" if self.Hkv == self.Hq else "MQA" if self.Hkv == 1 else "GQA"

    @property
    def softmax_scale(self) -> float:
        """The factor on the scores that the layer really uses."""
        return 1.0 / math.sqrt(self.D) if self.scale is None else self.scale

    @property
    def rope_dims(self) -> int:
        """How many numbers of a head the rotary embedding rotates: 0 without one."""
        return 0 if self.rope is None else self.D if self.rope.dims is None else self.rope.dims

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
        return most["T"] if self.cache == "preallocated" else most["S"] + most.get("P", 0)

    @property
    def room(self) -> int:
        """How many tokens all calls together may bring, the last of them alone."""
        most = self.sizes("max")
        if self.cache == "dynamic":
            return most["P"] + 1
        return most["T" if self.cache == "preallocated" else "S"]

    @property
    def kv_cache(self) -> KVCache | None:
        """How it decodes; None for a layer without a KV cache."""
        if self.cache == "none":
            return None
        return KVCache(
            tensors=tuple(
                CachedTensor(name=name, input=taken, output=made, axis=2)
                for name, taken, made in zip(("key", "value"), *CACHE_TENSORS[self.cache], strict=True)
            ),
            new="S",
            past="P" if self.cache == "dynamic" else None,
            room=self.room,
            by_token={"x": 1},
            by_context={},
            outputs={"output": 1},
            positions=tuple(tensor for tensor in self.inputs if tensor.name == LENGTHS),
            by_element=self.cache == "preallocated",
            entry_axes=("T",) if self.cache == "preallocated" else (),
        )

    @property
    def is_padded(self) -> bool:
        """Whether an input has the lengths of the keys."""
        return self.mask == "padding"

    @property
    def source(self) -> AttentionSpec:
        """Itself: a layer is made of its spec."""
        return self

    # -- cost -----------------------------------------------------------------------------------

    def flops_at(self, sizes: Sizes) -> int:
        """The work of a call at these sizes."""
        return layer_cost(self, sizes, bytes_per_element=1).flops

    def call_cost(
        self, sizes: Sizes, width: int, *, lengths: Lengths = None, flops: int = 0, moved: int = 0
    ) -> LayerCost:
        """What a call costs, stage by stage in closed form."""
        return layer_cost(self, sizes, width, lengths=lengths)

    def oracle_bytes(self, sizes: Sizes) -> int:
        """Memory of an FP64 run that keeps scores and weights: an upper bound, fused kernels need less."""
        T = key_length(self, sizes)
        scores = 2 * sizes["B"] * self.Hq * sizes["S"] * T
        activations = 4 * sizes["B"] * max(sizes["S"], T) * max(self.E, self.Hq * self.D)
        return 8 * (scores + activations) + self.oracle_cache_bytes(sizes)

    def oracle_cache_bytes(self, sizes: Sizes) -> int:
        """Memory of the KV cache of an FP64 run, input and output; 0 without one."""
        if self.cache == "none":
            return 0
        return 2 * sizes["B"] * key_length(self, sizes) * kv_cache_bytes_per_token(self, 8)

    def check_past(self, sizes: Sizes, past: int | None) -> None:
        """Refuse a number of valid entries that its preallocated KV cache does not have."""
        if past is not None:
            past_keys(self, sizes, [past] * sizes["B"])  # raises where they do not fit

    # -- tensors -------------------------------------------------------------------------------

    @cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs of the layer, in the order of the graph."""
        if self.is_cross:
            tensors = [self._tensor("query", "B", "S", self.E)]
            tensors += [self._tensor(name, "B", "T", self.E) for name in ("key", "value")]
        else:
            tensors = [self._tensor("x", "B", "S", self.E)]
        if self.mask == "padding":
            tensors.append(self._tensor("key_lengths", "B", kind=INT32))
        if self.mask == "additive":
            tensors.append(self._tensor("attention_bias", 1, self.Hq, "S", self.key_axis))
        if self.cache == "dynamic":
            tensors += [self._tensor(name, "B", self.Hkv, "P", self.D) for name in PAST]
        if self.cache == "preallocated":
            tensors += [self._tensor(name, "B", self.Hkv, "T", self.D) for name in CACHES]
            tensors.append(self._tensor(LENGTHS, "B", kind=INT32))
        return tuple(tensors)

    @property
    def lengths(self) -> dict[str, tuple[str, int]]:
        """Inputs that count valid keys, with the input and the dimension that have them all."""
        is_counted = self.mask == "padding" and self.cache == "none"
        return {"key_lengths": ("key" if self.is_cross else "x", 1)} if is_counted else {}

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs of the layer, in the order of the graph."""
        tensors = [self._tensor("output", "B", "S", self.E)]
        if self.weights:
            tensors.append(self._tensor("weights", "B", self.Hq, "S", self.key_axis))
        if self.cache != "none":
            names = CACHE_TENSORS[self.cache][1]
            tensors += [self._tensor(name, "B", self.Hkv, self.key_axis, self.D) for name in names]
        return tuple(tensors)

    def _tensor(self, name: str, *dims: Dim, kind: str = FLOAT) -> TensorSpec:
        """A tensor whose fixed axes are numbers: `P+S` with S = 1 is `P+1`, with both fixed a number."""
        fixed = {axis: sizes.min for axis, sizes in self.axes.items() if not sizes.is_dynamic}
        found: list[Dim] = []
        for dim in dims:
            parts = str(dim).split("+")
            varying = [part for part in parts if part in self.axes and part not in fixed]
            number = sum(fixed[part] if part in fixed else int(part) for part in parts if part not in varying)
            found.append("+".join([*varying, *([str(number)] if number else [])]) if varying else number)
        return TensorSpec(name=name, kind=kind, dims=tuple(found))

    # -- changes -------------------------------------------------------------------------------

    def without_cache(self) -> AttentionSpec:
        """The same layer over whole sequences, of all positions that its calls can reach: their oracle."""
        if self.cache == "none":
            return self
        axes = {"B": self.axes["B"], "S": replace(self.axes["S"], max=self.longest)}
        return replace(self, cache="none", axes=axes)

    def with_cache(self, cache: str) -> AttentionSpec:
        """The same layer with another of `CACHE_KINDS`: calls and sequences stay as long as they were.

        A dynamic cache takes any past that one more token fits behind.
        """
        _one_of("cache", cache, CACHE_KINDS)
        if cache == self.cache:
            return self
        S = self.axes["S"]
        length = max(S.max, self.room)
        added = {
            "none": {"S": replace(S, max=length)},
            "dynamic": {"P": Axis(min=0, opt=min(S.opt, length - 1), max=length - 1)},
            "preallocated": {"T": Axis(min=length, opt=length, max=length)},
        }
        return replace(self, cache=cache, axes={"B": self.axes["B"], "S": S, **added[cache]})

    # -- reading and writing -------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain data, readable back with `from_dict`."""
        data = asdict(self, dict_factory=lambda pairs: {key: each for key, each in pairs if each is not None})
        if self.cache == "none":  # as it was written before there were caches
            del data["cache"]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttentionSpec:
        """Read a spec from plain data, refusing what it does not know."""
        data = dict(data)
        refuse_unknown("the spec", data, tuple(item.name for item in fields(cls)))
        require("the spec", data, ("name", "Hq", "E", "axes"))
        whole_number("Hq", data["Hq"])
        whole_number("E", data["E"])
        data.setdefault("Hkv", data["Hq"])
        if "D" not in data:
            what = "The model width does not split into the heads, and no head size is given."
            got = f"E={data['E']}, Hq={data['Hq']}"
            refuse(data["E"] % data["Hq"] != 0, what, got, "add D = <head size>")
            data["D"] = data["E"] // data["Hq"]
        data["axes"] = axes_from(data["axes"])
        for key, options in (("sparse_heads", SparseHeads), ("grouped_mlp", GroupedMlp), ("rope", Rope)):
            if key in data:
                data[key] = record_from(key, options, data[key])
        return cls(**data)


# -- The rules a layer must keep, each refused with what to change ---------------------------------

VARIANTS = ("attention", "sparse-heads", "grouped-mlp", "head-mix")
ATTENDS = ("self", "cross")
MASKS = ("none", "padding", "additive")
PROJECTIONS = ("separate", "packed")
CACHE_KINDS = ("none", "dynamic", "preallocated")
SCALINGS = ("none", "linear", "ntk", "llama3")
_CHOICES = dict(variant=VARIANTS, attends=ATTENDS, mask=MASKS, projections=PROJECTIONS, cache=CACHE_KINDS)
_CACHE_AXES: dict[str, tuple[str, ...]] = {"none": (), "dynamic": ("P",), "preallocated": ("T",)}
_AXIS_HINTS = {
    "T": 'self attention has T = S: leave T out, or set attends = "cross" or cache = "preallocated"',
    "P": 'only a dynamic cache has a past: leave P out, or set cache = "dynamic"',
}
# What a layer with a cache must be.
_CACHED = {"attends": "self", "causal": True, "variant": "attention", "mask": "none", "weights": False}


def check_spec(spec: AttentionSpec) -> None:
    """Refuse a spec that does not describe an attention layer."""
    Hq, cross = spec.Hq, 'attends = "cross"'
    for name in ("Hq", "Hkv", "D", "E"):
        whole_number(name, getattr(spec, name))
    for name in ("name", "summary"):
        text = getattr(spec, name)
        refuse(not isinstance(text, str), f"{name} must be text.", text, f'{name} = "..."')
    for name in ("bias", "causal", "weights"):
        _true_or_false(name, getattr(spec, name))
    for name, default in (("scale", "1/sqrt(D)"), ("softcap", "none")):
        number, hint = getattr(spec, name), f"leave it out for {default}"
        wrong = number is not None and not _is_above(0, number)
        refuse(wrong, f"{name} must be a positive number.", number, hint)
    if spec.window is not None:
        whole_number("window", spec.window)
    for name, known in _CHOICES.items():
        _one_of(name, getattr(spec, name), known)
    what = "The query heads cannot be shared evenly: Hq must be a multiple of Hkv."
    refuse(Hq % spec.Hkv != 0, what, f"Hq={Hq}, Hkv={spec.Hkv}", f"Hkv from {_divisors(Hq)}")
    if spec.cache != "none":  # before the axes: a layer that can have no cache needs none of its axes
        why = {"mask": " (the lengths of a preallocated cache are the padding)"}
        for name, value in _CACHED.items():
            got = f'cache = "{spec.cache}", {name} = {_toml(getattr(spec, name))}'
            hint = f"{name} = {_toml(value)} in a layer file{why.get(name, '')}"
            refuse(getattr(spec, name) != value, f"A cache does not go with this {name}.", got, hint)
    wanted = ("B", "S", "T") if spec.is_cross else ("B", "S", *_CACHE_AXES[spec.cache])
    for name in spec.axes:
        hint = _AXIS_HINTS.get(name) or nearest(name, wanted)
        refuse(name not in wanted, f"Axis {name!r} does not belong here.", name, hint)
    require("[axes]", spec.axes, wanted)
    for name, axis in spec.axes.items():
        check_axis(name, axis)
    what = "Causal cross attention has no single meaning: the diagonal can start at either corner."
    hint = 'causal = false with mask = "additive" and the mask you mean as attention_bias'
    refuse(spec.is_cross and spec.causal, what, f"{cross}, causal = true", hint)
    what = "Packed projections read one input, and cross attention has three."
    wrong, got = spec.is_cross and spec.projections == "packed", f'{cross}, projections = "packed"'
    refuse(wrong, what, got, 'projections = "separate"')
    _check_variant(spec)
    what = "A window counts keys back from the query, and this layer also looks ahead."
    wrong = spec.window is not None and not spec.causal
    refuse(wrong, what, f"window = {spec.window}, causal = false", "causal = true")
    if spec.rope is not None:
        what = "Rotary embedding needs queries and keys on one line of positions."
        refuse(spec.is_cross, what, cross, 'attends = "self", or drop [rope]')
        _check_rope(spec.rope, spec.rope_dims, spec.D)
    if spec.cache == "preallocated":
        S, T = spec.axes["S"], spec.axes["T"]
        what = "The capacity of a preallocated cache must be one number."
        refuse(T.is_dynamic, what, f"T = {T}", f"T = {T.max}")
        what = "One call may bring more tokens than the cache has entries."
        got, hint = f"S up to {S.max}, T = {T.max}", f"S up to {T.max}, or a larger T"
        refuse(S.max > T.max, what, got, hint)


def _check_variant(spec: AttentionSpec) -> None:
    sparse, grouped, Hq = spec.sparse_heads, spec.grouped_mlp, spec.Hq
    for variant, options in (("sparse-heads", sparse), ("grouped-mlp", grouped)):
        table, is_this = variant.replace("-", "_"), spec.variant == variant
        what, hint = f"The variant {variant} needs its options.", f"add a [{table}] table"
        refuse(is_this and options is None, what, hint=hint)
        what, hint = f"[{table}] belongs to another variant.", f'variant = "{variant}", or drop it'
        refuse(not is_this and options is not None, what, spec.variant, hint)
    if sparse is not None:
        whole_number("top_k", sparse.top_k)
        _true_or_false("renormalise", sparse.renormalise)
        refuse(sparse.top_k > Hq, "top_k is more than all heads.", sparse.top_k, f"1 to {Hq}")
    if grouped is not None:
        whole_number("hidden", grouped.hidden)
        whole_number("groups", grouped.groups)
        what, got = "The heads cannot be grouped evenly.", f"{grouped.groups} groups of {Hq} heads"
        refuse(Hq % grouped.groups != 0, what, got, f"groups from {_divisors(Hq)}")


def _check_rope(rope: Rope, dims: int, D: int) -> None:
    _true_or_false("interleaved", rope.interleaved)
    _one_of("scaling", rope.scaling, SCALINGS)
    whole_number("dims", dims)
    what = "Rotary embedding rotates pairs inside a head: dims must be even and at most D."
    refuse(dims % 2 != 0 or dims > D, what, f"dims={dims}, D={D}", f"an even number up to {D}")
    refuse(not _is_above(1, rope.base), "base must be a number above 1.", rope.base, "base = 10000.0")
    wrong = not (_is_above(1, rope.factor) or rope.factor == 1)
    refuse(wrong, "factor must be a number of at least 1.", rope.factor, "factor = 8.0")
    wrong, hint = rope.scaling == "none" and rope.factor != 1, f"scaling = {', '.join(SCALINGS[1:])}"
    refuse(wrong, "A factor without a scaling does nothing.", f"factor = {rope.factor}", hint)
    wrong = rope.scaling == "ntk" and dims < 4
    refuse(wrong, "NTK scaling needs two pairs or more.", f"dims={dims}", "dims of at least 4")
    whole_number("original_length", rope.original_length)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    what = "The frequency factors must satisfy 0 < low_freq_factor < high_freq_factor."
    wrong = not (_is_above(0, low) and _is_above(low, high))
    refuse(wrong, what, f"{low}, {high}", "1.0 and 4.0, as Llama 3.1 has them")


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SpecError(f"{name} has an unknown value.", got=value, hint=nearest(str(value), known))


def _true_or_false(name: str, value: object) -> None:
    refuse(not isinstance(value, bool), f"{name} is neither true nor false.", value, f"{name} = true")


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _is_above(bound: float, value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > bound  # type: ignore[arg-type, operator]


# -- What a layer costs, in closed form ----


def key_length(spec: AttentionSpec, sizes: Sizes) -> int:
    """Keys of a batch element, the entries of a preallocated KV cache that are not valid included."""
    return sum(sizes[axis] for axis in spec.key_axis.split("+"))


def past_keys(spec: AttentionSpec, sizes: Sizes, lengths: Lengths = None) -> list[int]:
    """The keys before the new tokens, of every batch element: none without a KV cache.

    Lengths are refused where they do not suit the layer or its sizes.
    """
    if lengths is None:
        past = key_length(spec, sizes) - sizes["S"] if spec.cache != "none" else 0
        return [past] * sizes["B"]
    found = [int(length) for length in lengths]
    if spec.cache != "preallocated" or len(found) != sizes["B"]:
        got = f"{len(found)} lengths, cache = {spec.cache}, B = {sizes['B']}"
        raise SpecError(
            "Only a preallocated KV cache has lengths, one for every batch element.",
            got=got,
            hint="leave the lengths out",
        )
    S, T = sizes["S"], sizes["T"]
    if not all(has_room(length, S, T) for length in found):
        what = "The new tokens do not fit into the KV cache."
        raise SpecError(what, got=f"lengths {found}", hint=f"0 to {T - S}")
    return found


def layer_cost(
    spec: AttentionSpec, sizes: Sizes, bytes_per_element: int, *, lengths: Lengths = None
) -> LayerCost:
    """The cost of a layer at one set of sizes, inside its axes.

    `bytes_per_element` is 2 for FP16 and BF16, 4 for FP32; weights and activations alike.
    """
    spec.check_sizes(sizes)
    B, S, T = sizes["B"], sizes["S"], key_length(spec, sizes)
    counter = _StageCounter(spec, B, S, T, past_keys(spec, sizes, lengths), bytes_per_element)
    return cost_of(counter.projections(), counter.attention(), *counter.after_attention())


class _StageCounter:
    """Counts the parameters, FLOPs and bytes of every stage of a layer at one set of sizes."""

    def __init__(
        self, spec: AttentionSpec, B: int, S: int, T: int, past: Sequence[int], bytes_per_element: int
    ) -> None:
        self.spec, self.B, self.S, self.T, self.past = spec, B, S, T, past
        self.bytes_per_element = bytes_per_element
        self.width, self.kv_width = spec.Hq * spec.D, 2 * spec.Hkv * spec.D  # of queries; of keys and values
        self.tokens = B * S
        self.heads = self.tokens * self.width  # elements of the query heads, and of their outputs
        self.projected = B * (S if spec.cache != "none" else T)  # keys that are not in the KV cache already

    def projections(self) -> StageCost:
        """Queries, keys and values as one stage: self attention reads x once, however it is packed."""
        spec, outputs = self.spec, self.width + self.kv_width
        read = self.tokens + (2 * self.projected if spec.is_cross else 0)
        return self._stage(
            "projections",
            "(S+T)·E²" if spec.is_cross else "S·E²",
            parameters=spec.E * outputs + (outputs if spec.bias else 0),
            flops=2 * spec.E * (self.tokens * self.width + self.projected * self.kv_width),
            elements=read * spec.E + self.heads + self.projected * self.kv_width,
        )

    def attention(self) -> StageCost:
        """Scores and weighted values: two matmuls of D multiply-adds per pair and query head."""
        spec, S, T = self.spec, self.S, self.T
        # A window leaves out the oldest keys of a KV cache.
        most = T if spec.window is None else spec.window - 1
        attended = self.projected + sum(min(each, most) for each in self.past)
        elements = 2 * self.heads + attended * self.kv_width
        if spec.mask == "additive":
            elements += spec.Hq * _pairs(spec, S, T, 0)
        if spec.weights:
            elements += self.B * spec.Hq * S * T
        growth = "S²·E" if spec.key_axis == "S" else "S·T·E"
        has_lengths = spec.mask == "padding" or spec.cache == "preallocated"
        return self._stage(
            "attention",
            growth if spec.window is None else "S·E",  # a window is a constant
            flops=4 * spec.D * spec.Hq * sum(_pairs(spec, S, T, each) for each in self.past),
            elements=elements,
            other=4 * self.B if has_lengths else 0,  # int32
        )

    def after_attention(self) -> list[StageCost]:
        """The output projection, and what a variant has besides or in its place."""
        spec, width, heads = self.spec, self.width, self.heads
        E, Hq, D = spec.E, spec.Hq, spec.D
        output = self._linear("output", "S·E²", width, E)
        if spec.variant == "sparse-heads":
            # A gate per head from the layer's input; unused heads are computed and then masked.
            gate = self._linear("head gate", "S·E·Hq", E, Hq, bias=False)
            return [gate, replace(output, bytes=output.bytes + self.tokens * Hq * self.bytes_per_element)]
        if spec.grouped_mlp is not None:
            # A linear layer within each group, and two of an MLP in place of the output projection.
            hidden, groups = spec.grouped_mlp.hidden, spec.grouped_mlp.groups
            return [
                self._linear(
                    "linear within groups", "S·E²/groups", width // groups, width // groups, n=groups
                ),
                self._linear("MLP in", "S·E·hidden", width, hidden),
                self._linear("MLP out", "S·E·hidden", hidden, E),
            ]
        if spec.variant == "head-mix":
            # A second attention inside each token: its Hq heads are the sequence, and share D x D matrices.
            parameters = 3 * (D * D + (D if spec.bias else 0))
            mix = self._stage("mix projections", "S·E·D", 3 * 2 * heads * D, 4 * heads, parameters)
            return [mix, self._stage("mix attention", "S·E·Hq", 4 * heads * Hq, 4 * heads), output]
        return [output]

    def _stage(
        self, name: str, growth: str, flops: int, elements: int, parameters: int = 0, other: int = 0
    ) -> StageCost:
        """A stage from its counts; `other` is bytes that do not depend on the precision."""
        total = (parameters + elements) * self.bytes_per_element + other
        return StageCost(name=name, growth=growth, parameters=parameters, flops=flops, bytes=total)

    def _linear(
        self, name: str, growth: str, inputs: int, outputs: int, *, bias: bool | None = None, n: int = 1
    ) -> StageCost:
        """Linear layers on n parts of every token, which read and write all of them."""
        has_bias = self.spec.bias if bias is None else bias
        weights = n * (inputs * outputs + (outputs if has_bias else 0))
        flops, elements = 2 * self.tokens * n * inputs * outputs, self.tokens * n * (inputs + outputs)
        return self._stage(name, growth, flops, elements, weights)


def _pairs(spec: AttentionSpec, S: int, T: int, past: int) -> int:
    """(query, key) pairs of one head in one batch element.

    A causal query attends to the past, and to the new keys up to its own: past + 1, past + 2, …, or as
    many as its window has.
    """
    if not spec.causal:
        return S * T
    window = past + S if spec.window is None else spec.window
    within = min(max(window - past, 0), S)  # queries whose window is not full
    return within * past + within * (within + 1) // 2 + (S - within) * window


def parameter_count(spec: AttentionSpec) -> int:
    """The learned numbers of the layer; they do not depend on the sizes."""
    return layer_cost(spec, spec.sizes("min"), 1).parameters


def kv_cache_bytes_per_token(spec: AttentionSpec, bytes_per_element: int) -> int:
    """KV-cache bytes of one token in one layer: a key and a value for each key/value head."""
    return 2 * spec.Hkv * spec.D * bytes_per_element
