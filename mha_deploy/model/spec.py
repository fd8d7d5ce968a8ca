"""What a bundle knows of its model, and what an attention layer of the catalog is; with the rules of both."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from operator import add, floordiv, mod, mul, sub
from typing import Any, Literal, TypeVar

from mha_deploy.errors import DeployError, SpecError, nearest

# -- The parts that a spec is made of: axes, tensors, KV cache -------------------------------------

_LARGEST_SIZE, _MOST_HEADS = 2**31 - 1, 1 << 16

FLOAT = "float"  # a tensor kind: whatever precision the export asks for
INT32 = "int32"
KINDS = (FLOAT, "float32", "float64", INT32, "int64", "bool")

# Keys and values of a cache, as they come in and as they go out.
PAST, PRESENT = ("past_key", "past_value"), ("present_key", "present_value")
CACHES, CACHES_OUT = ("key_cache", "value_cache"), ("key_cache_out", "value_cache_out")
CACHE_TENSORS = {"dynamic": (PAST, PRESENT), "preallocated": (CACHES, CACHES_OUT)}
LENGTHS = "lengths"  # of a preallocated cache: its valid entries

Dim = str | int  # an axis, an expression of axes and numbers such as "P+S", or a number
Sizes = Mapping[str, int]


def _refuse(wrong: bool, what: str, got: object = None, hint: str = "see `mha-deploy models`") -> None:
    if wrong:
        raise SpecError(what, got=got, hint=hint)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The range of one named axis: the smallest, the usual and the largest size."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        sizes = (self.min, self.opt, self.max)
        what = "An axis needs three whole numbers of at least 1; only P, the past, may be 0."
        wrong = not all(type(size) is int and size >= 0 for size in sizes)
        _refuse(wrong, what, self, "for example 1:128:512")
        _refuse(
            self.max > _LARGEST_SIZE, f"An axis has at most {_LARGEST_SIZE} entries.", self, "a smaller max"
        )
        wrong, hint = sorted(sizes) != [*sizes], f"sort them: {':'.join(map(str, sorted(sizes)))}"
        _refuse(wrong, "An axis must satisfy min <= opt <= max.", self, hint)

    def __str__(self) -> str:
        return f"{self.min}:{self.opt}:{self.max}"

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
        sizes = sizes * 3 if len(sizes) == 1 else sizes
        _refuse(len(sizes) != 3, "An axis range has the wrong number of parts.", text, "min:opt:max")
        axis = cls(min=sizes[0], opt=sizes[1], max=sizes[2])
        check_axis(name, axis)
        return axis


Axes = Mapping[str, Axis]


def are_within(sizes: Sizes, axes: Axes) -> bool:
    """Whether sizes are within the ranges of a model or of a profile."""
    return all(axes[name].min <= size <= axes[name].max for name, size in sizes.items() if name in axes)


def check_axis(name: str, axis: Axis) -> None:
    """Refuse an axis of size 0, unless it is the past: a KV cache begins empty."""
    what, got = "An axis needs three whole numbers of at least 1.", f"{name} = {axis}" if name else axis
    hint = "for example 1:128:512; the axis of a KV cache may begin at 0, and is called P or past…"
    _refuse(axis.min < 1 and not is_past(name), what, got, hint)


def is_past(name: str) -> bool:
    """Whether an axis is called as that of the tokens in a KV cache: P, or as files name it."""
    return name == "P" or name.lower().startswith("past")


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One named input or output: its kind, one of `KINDS`, and its dimensions."""

    name: str
    kind: str
    dims: tuple[Dim, ...]

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Replace axis names by the given sizes, and compute sums and other expressions."""
        return tuple(dim if isinstance(dim, int) else size_of(dim, sizes) for dim in self.dims)


_OPERATORS = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.FloorDiv: floordiv, ast.Mod: mod}


def size_of(dim: str, sizes: Sizes) -> int:
    """The value of a dimension such as `P+S` or `(L - 5)//8 + 1`; a KeyError for an axis without a size."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return int(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            return sizes[node.id]
        raise SpecError(
            "A dimension is not an expression of axes and whole numbers.",
            got=dim,
            hint="a number, a name such as S, or a sum such as P+S",
        )

    try:
        return value(ast.parse(dim, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, ZeroDivisionError) as error:
        raise SpecError(
            "A dimension is not an expression of axes and whole numbers.",
            got=dim,
            hint="a number, a name such as S, or a sum such as P+S",
        ) from error


@dataclass(frozen=True, kw_only=True)
class CachedTensor:
    """One tensor of a KV cache."""

    name: str  # its name in decode traces and verdicts
    input: str  # the input of a call
    output: str  # the output that takes its place in the next call
    axis: int  # the dimension along which the tokens lie
    # Whether token i of a sequence is entry i; else, as in a ring buffer, only its maker knows where it is.
    in_order: bool = True
    entries: int = 0  # how many a preallocated one has, where that is known


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """How a model decodes: which tensors are cached, and how the other tensors follow the tokens."""

    tensors: tuple[CachedTensor, ...]  # the cached tensors
    new: str  # the axis of new tokens
    past: str | None  # the axis of tokens in the cache; None for a preallocated cache
    room: int  # how many tokens all calls together may bring
    by_token: Mapping[str, int]  # for each other input with an entry for each new token, that dimension
    by_context: Mapping[str, int]  # for each that covers all tokens so far, such as a mask, that dimension
    outputs: Mapping[str, int]  # for each output by token, the dimension of the tokens
    positions: tuple[TensorSpec, ...] = ()  # the inputs that place the new tokens
    by_element: bool = False  # whether they do so for every batch element by itself

    @property
    def is_preallocated(self) -> bool:
        """Whether the cache has all its entries from the start."""
        return self.past is None

    @property
    def is_ragged(self) -> bool:
        """Whether the batch elements may have different lengths."""
        return self.is_preallocated and self.by_element and self.is_in_order

    @property
    def is_in_order(self) -> bool:
        """Whether token i of a sequence is entry i of every cached tensor."""
        return all(each.in_order for each in self.tensors)

    def call_sizes(self, spec: ModelSpec, B: int, S: int, past: int) -> dict[str, int]:
        """The size of every axis in a call with S new tokens behind `past` ones."""
        sizes = {**spec.sizes("opt"), self.new: S}
        if "B" in sizes:
            sizes["B"] = B
        if self.past is None:
            return {**sizes, **({"T": spec.axes["T"].max} if "T" in spec.axes else {})}
        return {**sizes, self.past: past}


def refuse_overflow(lengths: Any, S: int, T: int) -> None:
    """Refuse new entries behind `lengths`, an array or a tensor, where a cache of T has no room for them."""
    if (lengths < 0).any() or (lengths + S > T).any():
        got = f"lengths {lengths.tolist()}, {S} new tokens, {T} entries"
        hint = f"lengths from 0 to {T - S}, or a cache with more entries"
        raise DeployError("The new tokens do not fit into the cache.", got=got, hint=hint)


# -- What a bundle knows of its model --------------------------------------------------------------

_Spec = TypeVar("_Spec", bound="NamedAxes")


class NamedAxes:
    """A model over named axes: sizes inside their ranges."""

    name: str
    axes: Axes

    def sizes(self, bound: str) -> dict[str, int]:
        """The size of every axis at `min`, `opt` or `max`."""
        return {name: getattr(axis, bound) for name, axis in self.axes.items()}

    def with_axes(self: _Spec, changed: Axes) -> _Spec:
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
        _refuse(len(sizes) < len(pairs), "Sizes give an axis twice.", text, "one size for each axis")
        self.check_sizes(sizes)
        return sizes

    def check_sizes(self, sizes: Sizes) -> None:
        """Refuse sizes that are missing, unknown or outside the axes."""
        what = f"{self.name} needs a size for each of its axes {', '.join(self.axes)}."
        _refuse(set(sizes) != set(self.axes), what, dict(sizes), hint="a size for every axis, and no other")
        for name, axis in self.axes.items():
            what = f"Axis {name} of {self.name} does not allow this size."
            hint = f"a size from {axis.min} to {axis.max}, or another range: --axis {name}=min:opt:max"
            _refuse(not axis.min <= sizes[name] <= axis.max, what, f"{name}={sizes[name]}", hint)


@dataclass(frozen=True, kw_only=True)
class ModelSpec(NamedAxes):
    """A model as it was exported: a catalog layer, a user's module, or an ONNX file.

    It is the single source of input shapes, dynamic ONNX dimensions, TensorRT profiles and golden shapes.
    """

    name: str  # name of the model
    axes: Axes  # the named sizes; B is the batch where there is one
    inputs: tuple[TensorSpec, ...]  # the inputs, in the order of the graph
    outputs: tuple[TensorSpec, ...]  # the outputs, in the order of the graph
    attention_count: int  # how many attentions it computes, fused or not
    summary: str = ""  # one line for people
    layer: AttentionSpec | None = None  # the catalog layer that it is, if any; all else follows from it
    factory: str = ""  # `file.py:factory` or `package.module:factory`, where one makes the module
    # From each input of a module's KV cache to the output that takes its place in the next call.
    cached: Mapping[str, str] = field(default_factory=dict)
    entries: Mapping[str, int] = field(default_factory=dict)  # of a preallocated one, where its entries lie
    positions: tuple[str, ...] = ()  # the inputs that place new tokens behind those in the cache
    longest: int = 0  # how many tokens a sequence may have; 0: as many as the cache has entries
    flops: int = 0  # work of one call of a module at the usual sizes, as PyTorch counts it
    weight_bytes: int = 0  # memory of its weights
    state_sha256: str = ""  # of weights and buffers before they were rounded; of an ONNX file, its own
    seed: int = 0  # PyTorch's seed while the factory ran
    weights_file: str | None = None  # the file or checkpoint of its weights, where one was given
    weights_prefix: str = ""  # what their names begin with there
    mixed: bool = False  # whether its precision was chosen node by node

    def __post_init__(self) -> None:
        for name in ("attention_count", "flops", "weight_bytes", "seed", "longest"):
            number = getattr(self, name)
            _refuse(
                number < 0, f"{ON_DISK.get(name, name)} must be a whole number.", number, hint="0 or more"
            )
        taken, made = ({tensor.name for tensor in each} for each in (self.inputs, self.outputs))
        missing = not (taken >= set(self.cached) and made >= set(self.cached.values()))
        _refuse(
            missing,
            "The KV cache names tensors that do not exist.",
            dict(self.cached),
            hint="names of inputs and outputs of the model",
        )
        placing = {tensor.name: tensor for tensor in self.inputs if tensor.name in self.positions}
        wrong = len(placing) < len(self.positions) or not {*self.entries} <= {*self.cached}
        wrong = wrong or any(tensor.kind not in (INT32, "int64") for tensor in placing.values())
        _refuse(wrong, "The inputs named by positions do not exist.", self.positions, "whole numbers")
        ranks = {tensor.name: len(tensor.dims) for tensor in self.inputs}
        wrong = any(not 0 <= axis < ranks[name] for name, axis in self.entries.items())
        _refuse(wrong, "The KV cache has no such dimension.", dict(self.entries), "one of its dimensions")
        for tensor in (*self.inputs, *self.outputs):
            what = f"Tensor {tensor.name} has no such kind."
            _refuse(tensor.kind not in KINDS, what, tensor.kind, ", ".join(KINDS))
        for name, axis in self.axes.items():
            check_axis(name, axis)

    def with_axes(self, changed: Axes) -> ModelSpec:
        """The same model over other axis ranges."""
        return super().with_axes(changed) if self.layer is None else self.layer.with_axes(changed).model

    @property
    def kind(self) -> Literal["MHA", "GQA", "MQA", "module"]:
        """What it is, in a word: the head layout of a catalog layer, or a module."""
        return "module" if self.layer is None else self.layer.kind

    @property
    def cache(self) -> str:
        """The KV cache that a catalog layer was given; a module's is among its inputs and outputs."""
        return "none" if self.layer is None else self.layer.cache

    @property
    def kv_cache(self) -> KVCache | None:
        """How it decodes; None for a model without a KV cache."""
        if self.layer is not None:
            return self.layer.kv_cache
        if not self.cached:
            return None
        taken, made = ({tensor.name: tensor.dims for tensor in each} for each in (self.inputs, self.outputs))
        placed = tuple(tensor for tensor in self.inputs if tensor.name in self.positions)

        def along(tensors: Mapping[str, tuple[Dim, ...]], *wanted: str) -> dict[str, int]:
            """The dimension of every other tensor that is one of the wanted."""
            others = {name: dims for name, dims in tensors.items() if name not in cached}
            at = {name: [i for i, dim in enumerate(dims) if dim in wanted] for name, dims in others.items()}
            return {name: positions[0] for name, positions in at.items() if positions}

        cached = {*self.cached, *self.cached.values(), *self.positions}
        if all(taken[name] == made[other] for name, other in self.cached.items()):
            new, sizes = new_token_axis(taken, self.cached, self.positions, self.axes), self.sizes("max")
            shapes = {tensor.name: tensor.shape(sizes) for tensor in self.inputs}
            room = {name: shapes[name][axis] for name, axis in self.entries.items()}
            what = "It is not known how many tokens the preallocated KV cache has room for."
            hint = 'name the axis of its entries, Example(cache, "B", None, "T"), or give longest='
            _refuse(bool(self.positions) and not (room or self.longest), what, dict(self.cached), hint)
            longest = self.longest or min(room.values(), default=_LARGEST_SIZE)
            what, got = "One call may bring more tokens than fit.", f"{new} up to {self.axes[new].max}"
            _refuse(self.axes[new].max > longest, what, got, f"{new} up to {longest}, or a larger cache")
            return KVCache(
                tensors=tuple(
                    CachedTensor(
                        name=name,
                        input=name,
                        output=other,
                        axis=self.entries.get(name, 0),
                        in_order=room.get(name, 0) >= longest,
                        entries=room.get(name, 0),
                    )
                    for name, other in self.cached.items()
                ),
                new=new,
                past=None,
                room=longest,
                by_token=along(taken, new),
                by_context={},
                outputs=along(made, new),
                positions=placed,
                by_element=bool(placed) and all(self._has_batch(tensor) for tensor in placed),
            )
        found = {name: _growing_axis(name, taken[name], made[self.cached[name]]) for name in self.cached}
        (_, past, new), *others = found.values()
        what = "The tensors of the KV cache do not grow along the same axes."
        _refuse(
            any(each[1:] != (past, new) for each in others),
            what,
            found,
            hint="the same axes for every cached input",
        )
        return KVCache(
            tensors=tuple(
                CachedTensor(name=name, input=name, output=self.cached[name], axis=axis)
                for name, (axis, _, _) in found.items()
            ),
            new=new,
            past=past,
            room=self.axes[past].max + 1,  # a last token behind a full past
            by_token=along(taken, new),
            by_context=along(taken, f"{past}+{new}", f"{new}+{past}"),
            outputs=along(made, new),
            positions=placed,
        )

    def _has_batch(self, tensor: TensorSpec) -> bool:
        """Whether an input has an entry for every batch element; a fixed axis is a number in the graph."""
        batch = self.axes.get("B")
        fixed = None if batch is None or batch.is_dynamic else batch.min
        return "B" in tensor.dims or (fixed is not None and tensor.dims[:1] == (fixed,))

    def flops_at(self, sizes: Sizes) -> int:
        """At most the work of a module at other sizes: it grows with every axis, attention with one twice."""
        ratios = {name: sizes[name] / max(axis.opt, 1) for name, axis in self.axes.items()}
        longest = max([1.0, *(ratio for name, ratio in ratios.items() if name != "B")])
        return int(self.flops * math.prod(ratios.values()) * longest)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a manifest; of a catalog layer as in `models/*.toml`."""
        if self.layer is not None:
            return self.layer.to_dict()
        return {ON_DISK.get(key, key): value for key, value in asdict(self).items() if key != "layer"}


# The names of these fields in a manifest.
ON_DISK = {"inputs": "tensors_in", "outputs": "tensors_out", "attention_count": "attentions"}


def new_token_axis(
    dims: Mapping[str, tuple[Dim, ...]], cached: Iterable[str], positions: Iterable[str], axes: Axes
) -> str:
    """The axis of the new tokens: of the inputs that place them, or of those that are not cached."""
    held = {dim for name in cached for dim in dims[name]}
    for names in (tuple(positions), tuple(name for name in dims if name not in cached)):
        found = {str(dim) for name in names for dim in dims[name] if dim in axes and dim not in held}
        found.discard("B")
        if len(found) == 1 or "S" in found:
            return "S" if "S" in found else found.pop()
    what, hint = "No input has an axis of new tokens.", "an input with an axis such as S, which varies"
    raise SpecError(what, got=dict(dims), hint=hint)


def _growing_axis(name: str, taken: tuple[Dim, ...], made: tuple[Dim, ...]) -> tuple[int, str, str]:
    """Along which dimension a cached tensor grows, the axis of the past, and that of the new tokens."""
    for axis, (before, after) in enumerate(zip(taken, made, strict=False)):
        parts = str(after).split("+")
        if before in parts and len(parts) == 2 and not any(part.isdecimal() for part in parts):
            parts.remove(str(before))
            return axis, str(before), parts[0]
    got, hint = f"{taken} in, {made} out", "an axis such as P in the input, and P+S in the output"
    hint += "; or the same shape in and out, and positions= for a preallocated one"
    raise SpecError(f"The KV cache {name} does not grow by the new tokens.", got=got, hint=hint)


# -- An attention layer of the catalog -------------------------------------------------------------


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
class AttentionSpec(NamedAxes):
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

    @property
    def model(self) -> ModelSpec:
        """The layer as a model to export: what a bundle knows of it."""
        same = ("name", "summary", "axes", "inputs", "outputs", "attention_count")
        return ModelSpec(**{name: getattr(self, name) for name in same}, layer=self)

    @property
    def layer(self) -> AttentionSpec:
        """Itself: what takes the spec of a model also takes that of a layer alone."""
        return self

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
        )

    # -- tensors -------------------------------------------------------------------------------

    @property
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
            _refuse(data["E"] % data["Hq"] != 0, what, got, "add D = <head size>")
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
    "T": 'self attention has T = S: leave T out, or set attends = "cross"',
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
        _refuse(not isinstance(text, str), f"{name} must be text.", text, f'{name} = "..."')
    for name in ("bias", "causal", "weights"):
        _true_or_false(name, getattr(spec, name))
    for name, default in (("scale", "1/sqrt(D)"), ("softcap", "none")):
        number, hint = getattr(spec, name), f"leave it out for {default}"
        wrong = number is not None and not _is_above(0, number)
        _refuse(wrong, f"{name} must be a positive number.", number, hint)
    if spec.window is not None:
        whole_number("window", spec.window)
    for name, known in _CHOICES.items():
        _one_of(name, getattr(spec, name), known)
    what = "The query heads cannot be shared evenly: Hq must be a multiple of Hkv."
    _refuse(Hq % spec.Hkv != 0, what, f"Hq={Hq}, Hkv={spec.Hkv}", f"Hkv from {_divisors(Hq)}")
    if spec.cache != "none":  # before the axes: a layer that can have no cache needs none of its axes
        why = {"mask": " (the lengths of a preallocated cache are the padding)"}
        for name, value in _CACHED.items():
            got = f'cache = "{spec.cache}", {name} = {_toml(getattr(spec, name))}'
            hint = f"{name} = {_toml(value)}{why.get(name, '')}"
            _refuse(getattr(spec, name) != value, f"A cache does not go with this {name}.", got, hint)
    wanted = ("B", "S", "T") if spec.is_cross else ("B", "S", *_CACHE_AXES[spec.cache])
    for name in spec.axes:
        hint = _AXIS_HINTS.get(name) or nearest(name, wanted)
        _refuse(name not in wanted, f"Axis {name!r} does not belong here.", name, hint)
    require("[axes]", spec.axes, wanted)
    for name, axis in spec.axes.items():
        check_axis(name, axis)
    what = "Causal cross attention has no single meaning: the diagonal can start at either corner."
    hint = 'causal = false with mask = "additive" and the mask you mean as attention_bias'
    _refuse(spec.is_cross and spec.causal, what, f"{cross}, causal = true", hint)
    what = "Packed projections read one input, and cross attention has three."
    wrong, got = spec.is_cross and spec.projections == "packed", f'{cross}, projections = "packed"'
    _refuse(wrong, what, got, 'projections = "separate"')
    _check_variant(spec)
    what = "A window counts keys back from the query, and this layer also looks ahead."
    wrong = spec.window is not None and not spec.causal
    _refuse(wrong, what, f"window = {spec.window}, causal = false", "causal = true")
    if spec.rope is not None:
        what = "Rotary embedding needs queries and keys on one line of positions."
        _refuse(spec.is_cross, what, cross, 'attends = "self", or drop [rope]')
        _check_rope(spec.rope, spec.rope_dims, spec.D)
    if spec.cache == "preallocated":
        S, T = spec.axes["S"], spec.axes["T"]
        what = "The capacity of a preallocated cache must be one number."
        _refuse(T.is_dynamic, what, f"T = {T}", f"T = {T.max}")
        what = "One call may bring more tokens than the cache has entries."
        got, hint = f"S up to {S.max}, T = {T.max}", f"S up to {T.max}, or a larger T"
        _refuse(S.max > T.max, what, got, hint)


def _check_variant(spec: AttentionSpec) -> None:
    sparse, grouped, Hq = spec.sparse_heads, spec.grouped_mlp, spec.Hq
    for variant, options in (("sparse-heads", sparse), ("grouped-mlp", grouped)):
        table, is_this = variant.replace("-", "_"), spec.variant == variant
        what, hint = f"The variant {variant} needs its options.", f"add a [{table}] table"
        _refuse(is_this and options is None, what, hint=hint)
        what, hint = f"[{table}] belongs to another variant.", f'variant = "{variant}", or drop it'
        _refuse(not is_this and options is not None, what, spec.variant, hint)
    if sparse is not None:
        whole_number("top_k", sparse.top_k)
        _true_or_false("renormalise", sparse.renormalise)
        _refuse(sparse.top_k > Hq, "top_k is more than all heads.", sparse.top_k, f"1 to {Hq}")
    if grouped is not None:
        whole_number("hidden", grouped.hidden)
        whole_number("groups", grouped.groups)
        what, got = "The heads cannot be grouped evenly.", f"{grouped.groups} groups of {Hq} heads"
        _refuse(Hq % grouped.groups != 0, what, got, f"groups from {_divisors(Hq)}")


def _check_rope(rope: Rope, dims: int, D: int) -> None:
    _true_or_false("interleaved", rope.interleaved)
    _one_of("scaling", rope.scaling, SCALINGS)
    whole_number("dims", dims)
    what = "Rotary embedding rotates pairs inside a head: dims must be even and at most D."
    _refuse(dims % 2 != 0 or dims > D, what, f"dims={dims}, D={D}", f"an even number up to {D}")
    _refuse(not _is_above(1, rope.base), "base must be a number above 1.", rope.base, "base = 10000.0")
    wrong = not (_is_above(1, rope.factor) or rope.factor == 1)
    _refuse(wrong, "factor must be a number of at least 1.", rope.factor, "factor = 8.0")
    wrong, hint = rope.scaling == "none" and rope.factor != 1, f"scaling = {', '.join(SCALINGS[1:])}"
    _refuse(wrong, "A factor without a scaling does nothing.", f"factor = {rope.factor}", hint)
    wrong = rope.scaling == "ntk" and dims < 4
    _refuse(wrong, "NTK scaling needs two pairs or more.", f"dims={dims}", "dims of at least 4")
    whole_number("original_length", rope.original_length)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    what = "The frequency factors must satisfy 0 < low_freq_factor < high_freq_factor."
    wrong = not (_is_above(0, low) and _is_above(low, high))
    _refuse(wrong, what, f"{low}, {high}", "1.0 and 4.0, as Llama 3.1 has them")


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SpecError(f"{name} is not a known one.", got=value, hint=nearest(str(value), known))


def _true_or_false(name: str, value: object) -> None:
    _refuse(not isinstance(value, bool), f"{name} is neither true nor false.", value, f"{name} = true")


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _is_above(bound: float, value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > bound  # type: ignore[arg-type, operator]


def whole_number(name: str, value: object) -> None:
    """Refuse anything but a whole number from 1 to what a tensor can have."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(f"{name} must be a whole number of at least 1.", got=value, hint="1 or more")
    most = _MOST_HEADS if name in ("Hq", "Hkv") else _LARGEST_SIZE
    _refuse(value > most, f"{name} must be at most {most}.", value, hint="a smaller number")


# -- Reading tables --------------------------------------------------------------------------------


def axes_from(data: Any) -> dict[str, Axis]:
    """Read the `[axes]` table: ranges, or single numbers."""
    if not isinstance(data, Mapping):
        raise SpecError("axes must be a table.", got=data, hint="B = { min = 1, opt = 8, max = 32 }")
    axes = {}
    for name, value in data.items():
        if type(value) is int:
            axes[name] = Axis(min=value, opt=value, max=value)
        elif isinstance(value, Mapping):
            axes[name] = record_from(f"axis {name}", Axis, value)
        else:
            example = f"{name} = {{ min = 1, opt = 8, max = 32 }}"
            raise SpecError(f"Axis {name} is not a range.", got=value, hint=example)
    return axes


def refuse_unknown(where: str, data: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Refuse a key that means nothing, naming the nearest one that does."""
    for key in data:
        if key not in known:
            raise SpecError(f"Unknown key in {where}.", got=key, hint=nearest(key, known))


def require(where: str, data: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    """Refuse data without these keys."""
    if missing := [key for key in keys if key not in data]:
        raise SpecError(
            f"{where} lacks {', '.join(missing)}.", got=f"keys {', '.join(data) or 'none'}", hint="add them"
        )


def record_from(where: str, record: Any, data: Any) -> Any:
    """Read a table into a dataclass, refusing keys it does not have."""
    if not isinstance(data, Mapping):
        raise SpecError(f"{where} must be a table.", got=data, hint="a table of keys and values")
    known = tuple(item.name for item in fields(record))
    refuse_unknown(where, data, known)
    try:
        return record(**data)
    except TypeError as error:
        hint = f"keys: {', '.join(known)}"
        raise SpecError(f"{where} is incomplete.", got=dict(data), hint=hint) from error
