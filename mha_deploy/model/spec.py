"""What a bundle knows of its model: one interface for catalog layers, users' modules and ONNX files."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from operator import add, floordiv, mod, mul, sub
from typing import TYPE_CHECKING, Any, Literal, TypeVar

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


def refuse(wrong: bool, what: str, got: object = None, hint: str = "see `mha-deploy models`") -> None:
    """Raise a SpecError where something is wrong."""
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
        refuse(wrong, what, self, "for example 1:128:512")
        refuse(
            self.max > _LARGEST_SIZE, f"An axis has at most {_LARGEST_SIZE} entries.", self, "a smaller max"
        )
        wrong, hint = sorted(sizes) != [*sizes], f"sort them: {':'.join(map(str, sorted(sizes)))}"
        refuse(wrong, "An axis must satisfy min <= opt <= max.", self, hint)

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
        refuse(len(sizes) != 3, "An axis range has the wrong number of parts.", text, "min:opt:max")
        axis = cls(min=sizes[0], opt=sizes[1], max=sizes[2])
        check_axis(name, axis)
        return axis


Axes = Mapping[str, Axis]


def are_within(sizes: Sizes, axes: Axes) -> bool:
    """Whether sizes are within the ranges of a model or of a profile."""
    return all(axes[name].min <= size <= axes[name].max for name, size in sizes.items() if name in axes)


def sizes_beyond(sizes: Sizes, axes: Axes) -> dict[str, int]:
    """The sizes that are not within their axes."""
    return {name: size for name, size in sizes.items() if not are_within({name: size}, axes)}


def two_sizes(
    dims: Mapping[str, Sequence[Any]], shapes: Mapping[str, Sequence[int]]
) -> tuple[str, str] | None:
    """An axis with one size in one tensor and another in the next, and these sizes; None if there is none.

    Both arguments are by tensor; an axis is a dimension with a name.
    """
    first: dict[str, tuple[int, str]] = {}
    for tensor, named in dims.items():
        for axis, size in zip(named, shapes[tensor], strict=False):
            before, other = first.setdefault(axis, (size, tensor)) if isinstance(axis, str) else (size, "")
            if before != size:
                return axis, f"{before} in {other}, {size} in {tensor}"
    return None


def check_axis(name: str, axis: Axis) -> None:
    """Refuse an axis of size 0, unless it is the past: a KV cache begins empty."""
    what, got = "An axis needs three whole numbers of at least 1.", f"{name} = {axis}" if name else axis
    hint = "for example 1:128:512; the axis of a KV cache may begin at 0, and is called P or past…"
    refuse(axis.min < 1 and not is_past(name), what, got, hint)


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
_OPERATORS |= {ast.Div: lambda number, other: Fraction(number) / other}


def size_of(dim: str, sizes: Sizes) -> int:
    """The value of a dimension such as `P+S`, `(L - 5)//8 + 1` or `floor(T/4 + 3/4)`.

    A KeyError for an axis without a size.
    """

    def value(node: ast.AST) -> int | Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "floor" and len(node.args) == 1:
            return math.floor(value(node.args[0]))
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
        size = value(ast.parse(dim, mode="eval").body)
        if size != int(size):
            raise ValueError(size)
        return int(size)
    except (SyntaxError, ValueError, RecursionError, ZeroDivisionError) as error:
        raise SpecError(
            "A dimension is not an expression of axes and whole numbers.",
            got=dim,
            hint="a number, a name such as S, or a sum such as P+S",
        ) from error


_MULTIPLE = re.compile(r"([1-9]\d{0,3})\*([^\W\d]\w*)")


def terms_of(dim: str) -> list[str]:
    """The terms of a sum: P and S of `P+S`; those of `2*h` are h and h."""
    multiples = ((part, _MULTIPLE.fullmatch(part)) for part in dim.split("+"))
    return [term for part, found in multiples for term in ([found[2]] * int(found[1]) if found else [part])]


def sum_of(terms: Iterable[str]) -> str:
    """The sum of some terms, in their order, and equal ones as one: `P+S`, `2*h`."""
    return "+".join(f"{times}*{term}" if times > 1 else term for term, times in Counter(terms).items())


def axes_in(dim: Dim) -> set[str]:
    """The names in a dimension, such as P and S in `P+S`."""
    return set(re.findall(r"[^\W\d]\w*", str(dim)))


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
    entry_axes: tuple[str, ...] = ()  # those that a preallocated cache has its entries along

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
        if spec.batch is not None:
            sizes[spec.batch] = B
        if self.past is None:
            return {**sizes, **{name: spec.axes[name].max for name in self.entry_axes}}
        return {**sizes, self.past: past}

    def room_at(self, sizes: Sizes) -> int:
        """How many tokens a preallocated cache of these sizes has room for."""
        # One that does not keep its tokens in order, as a ring buffer, takes more than it has entries.
        return min([self.room, *(sizes[name] for name in self.entry_axes if self.is_in_order)])


def has_room(lengths: Any, S: int, T: int) -> Any:
    """Whether S new entries fit behind so many valid ones of a cache of T; of a number or an array."""
    return (lengths >= 0) & (lengths <= T - S)


def refuse_overflow(lengths: Any, S: int, T: int) -> None:
    """Refuse new entries behind `lengths`, an array or a tensor, where a cache of T has no room for them."""
    if not has_room(lengths, S, T).all():
        got = f"lengths {lengths.tolist()}, {S} new tokens, {T} entries"
        hint = f"lengths from 0 to {T - S}, or a cache with more entries"
        raise DeployError("The new tokens do not fit into the cache.", got=got, hint=hint)


# -- What a call costs ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """The cost of one stage.

    `growth` is the order of its FLOPs per batch element, in the symbols of the spec. `parameters` are learned
    numbers, biases included; `flops` count 2 per multiply-add; `bytes` are weights, inputs and outputs, each
    moved once.
    """

    name: str
    growth: str
    parameters: int
    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs per byte moved."""
        return self.flops / self.bytes


@dataclass(frozen=True, kw_only=True)
class LayerCost(StageCost):
    """The cost of a layer at one set of sizes, stage by stage in the order of execution.

    What one stage passes to the next is written and read again.
    """

    stages: tuple[StageCost, ...]


def cost_of(*stages: StageCost) -> LayerCost:
    """The cost of stages that run one after the other."""
    summed = ("parameters", "flops", "bytes")
    counts = {name: sum(getattr(stage, name) for stage in stages) for name in summed}
    return LayerCost(name="layer", growth="", stages=stages, **counts)


Lengths = Sequence[int] | None
"""The valid entries of a preallocated KV cache before the call, by batch element; default: full after it."""


# -- What a bundle knows of its model --------------------------------------------------------------

_Spec = TypeVar("_Spec", bound="NamedAxes")


class NamedAxes:
    """A model over named axes: sizes inside their ranges."""

    name: str
    axes: Axes

    def sizes(self, bound: str) -> dict[str, int]:
        """The size of every axis at `min`, `opt` or `max`."""
        return {name: getattr(axis, bound) for name, axis in self.axes.items()}

    @property
    def batch(self) -> str | None:
        """The axis of batch elements that do not know of each other, where that is known."""
        return "B" if "B" in self.axes else None

    @property
    def batch_name(self) -> str:
        """The axis of the batch; its usual name where there is none, or none that is known."""
        return self.batch or "B"

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
        refuse(len(sizes) < len(pairs), "Sizes give an axis twice.", text, "one size for each axis")
        self.check_sizes(sizes)
        return sizes

    def check_sizes(self, sizes: Sizes) -> None:
        """Refuse sizes that are missing, unknown or outside the axes."""
        what = f"{self.name} needs a size for each of its axes {', '.join(self.axes)}."
        refuse(set(sizes) != set(self.axes), what, dict(sizes), hint="a size for every axis, and no other")
        for name, axis in self.axes.items():
            what = f"Axis {name} of {self.name} does not allow this size."
            hint = f"a size from {axis.min} to {axis.max}, or another range: --axis {name}=min:opt:max"
            refuse(not axis.min <= sizes[name] <= axis.max, what, f"{name}={sizes[name]}", hint)


class ModelSpec(NamedAxes):
    """A model as it was exported: a catalog layer (`AttentionSpec`), or a user's module (`ModuleSpec`).

    It is the single source of input shapes, dynamic ONNX dimensions, TensorRT profiles and golden shapes.
    """

    summary: str  # one line for people
    cache: str = "none"  # the KV cache that a layer was given; a module's is among its inputs and outputs
    window: int | None = None  # how many keys a query attends to, where that is known
    # Whether its probes are drawn by every validation, since its module is made of the graph's own weights;
    # of other models they are among the golden cases, for want of the factory elsewhere.
    draws_probes: bool = False
    factory: str = ""  # `file.py:factory` or `package.module:factory`, where one makes the module
    seed: int = 0  # PyTorch's seed while the factory ran
    weights_file: str | None = None  # the file or checkpoint of its weights, where one was given
    weights_prefix: str = ""  # what their names begin with there
    weight_bytes: int = 0  # memory of the weights of a module
    state_sha256: str = ""  # of weights and buffers before they were rounded; of an ONNX file, its own
    mixed: bool = False  # whether its precision was chosen node by node

    if TYPE_CHECKING:  # what both kinds of models have: as fields, or computed

        @property
        def inputs(self) -> tuple[TensorSpec, ...]:
            """The inputs, in the order of the graph."""

        @property
        def outputs(self) -> tuple[TensorSpec, ...]:
            """The outputs, in the order of the graph."""

        @property
        def attention_count(self) -> int:
            """How many attentions it computes, fused or not."""

        @property
        def kind(self) -> Literal["MHA", "GQA", "MQA", "module"]:
            """What it is, in a word: the head layout of a catalog layer, or a module."""

        @property
        def kv_cache(self) -> KVCache | None:
            """How it decodes; None for a model without a KV cache."""

        def flops_at(self, sizes: Sizes) -> int:
            """At most the work of a call at these sizes."""

        def call_cost(
            self, sizes: Sizes, width: int, *, lengths: Lengths = None, flops: int = 0, moved: int = 0
        ) -> LayerCost:
            """What a call costs, with numbers of `width` bytes.

            `flops` were counted and `moved` bytes are inputs and outputs: for a model without closed forms.
            """

    @property
    def is_padded(self) -> bool:
        """Whether an input has the lengths of the keys."""
        return False

    @property
    def has_known_cost(self) -> bool:
        """Whether the work of a call is known before one ran."""
        return True

    def oracle_bytes(self, sizes: Sizes) -> int:
        """Memory of an FP64 run that keeps scores and weights, an upper bound; 0 where it is not known."""
        return 0

    def oracle_cache_bytes(self, sizes: Sizes) -> int:
        """Memory of the KV cache of an FP64 run, input and output; 0 where it is not known."""
        return 0

    @property
    def source(self) -> Any:
        """What makes the model again, as a user would name it; None where only a file with weights does."""
        return self.factory or None

    def check_past(self, sizes: Sizes, past: int | None) -> None:
        """Refuse a number of valid entries that a preallocated KV cache does not have."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a manifest."""
        return {ON_DISK.get(key, key): value for key, value in asdict(self).items()}  # type: ignore[call-overload]

    @property
    def leading(self) -> str | None:
        """The axis that comes first in every output and in some input, and in no other place."""
        first = {tensor.dims[:1] for tensor in self.outputs}
        (name,) = next(iter(first)) if len(first) == 1 and () not in first else (None,)
        if not isinstance(name, str) or name not in self.axes:
            return None
        tensors = (*self.inputs, *self.outputs)
        elsewhere = (name in axes_in(dim) for tensor in tensors for dim in tensor.dims[1:])
        taken = any(tensor.dims[:1] == (name,) for tensor in self.inputs)
        return name if taken and not any(elsewhere) else None


@dataclass(frozen=True, kw_only=True)
class ModuleSpec(ModelSpec):
    """A user's module or an ONNX file, as it was exported."""

    name: str  # name of the model
    axes: Axes  # the named sizes; B is the batch where there is one
    inputs: tuple[TensorSpec, ...]  # the inputs, in the order of the graph
    outputs: tuple[TensorSpec, ...]  # the outputs, in the order of the graph
    attention_count: int  # how many attentions it computes, fused or not
    summary: str = ""  # one line for people
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
            refuse(number < 0, f"{ON_DISK.get(name, name)} must be a whole number.", number, hint="0 or more")
        taken, made = ({tensor.name for tensor in each} for each in (self.inputs, self.outputs))
        for kind, named, known in (("input", self.cached, taken), ("output", self.cached.values(), made)):
            if absent := next((name for name in named if name not in known), None):
                what = f"The KV cache names an {kind} that the model does not have."
                raise SpecError(what, got=absent, hint=nearest(absent, known))
        placing = {tensor.name: tensor for tensor in self.inputs if tensor.name in self.positions}
        wrong = len(placing) < len(self.positions) or not {*self.entries} <= {*self.cached}
        wrong = wrong or any(tensor.kind not in (INT32, "int64") for tensor in placing.values())
        refuse(wrong, "The inputs named by positions do not exist.", self.positions, "whole numbers")
        ranks = {tensor.name: len(tensor.dims) for tensor in self.inputs}
        wrong = any(not 0 <= axis < ranks[name] for name, axis in self.entries.items())
        refuse(wrong, "The KV cache has no such dimension.", dict(self.entries), "one of its dimensions")
        for tensor in (*self.inputs, *self.outputs):
            what = f"Tensor {tensor.name} has no such kind."
            refuse(tensor.kind not in KINDS, what, tensor.kind, ", ".join(KINDS))
        for name, axis in self.axes.items():
            check_axis(name, axis)

    @property
    def kind(self) -> Literal["module"]:
        """A module."""
        return "module"

    @property
    def has_known_cost(self) -> bool:
        """Whether PyTorch counted the work of a call."""
        return self.flops > 0

    @property
    def kv_cache(self) -> KVCache | None:
        """How it decodes; None for a model without a KV cache."""
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
            refuse(bool(self.positions) and not (room or self.longest), what, dict(self.cached), hint)
            longest = self.longest or min(room.values(), default=_LARGEST_SIZE)
            what, got = "One call may bring more tokens than fit.", f"{new} up to {self.axes[new].max}"
            refuse(self.axes[new].max > longest, what, got, f"{new} up to {longest}, or a larger cache")
            by_token, by_output = along(taken, new), along(made, new)
            following = [each for each in self.inputs if each.name in by_token]
            following += [each for each in self.outputs if each.name in by_output]
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
                by_token=by_token,
                by_context={},
                outputs=by_output,
                positions=placed,
                by_element=bool(placed) and all(self._has_batch(tensor) for tensor in (*placed, *following)),
                entry_axes=tuple(
                    sorted({str(taken[name][at]) for name, at in self.entries.items()} & {*self.axes})
                ),
            )
        found = {name: _growing_axis(name, taken[name], made[self.cached[name]]) for name in self.cached}
        (_, past, new), *others = found.values()
        what = "The tensors of the KV cache do not grow along the same axes."
        refuse(
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

    @property
    def batch(self) -> str | None:
        """The axis of batch elements that do not know of each other, where that is known.

        It is called B, or it is `leading` and named as one, or there is a KV cache, of sequences.
        """
        name = self.leading
        is_known = name is not None and (bool(self.cached) or _BATCH_NAME.match(name) is not None)
        return super().batch or (name if is_known else None)

    def _has_batch(self, tensor: TensorSpec) -> bool:
        """Whether an input has an entry for every batch element; a fixed axis is a number in the graph."""
        batch = self.axes.get("B")
        fixed = None if batch is None or batch.is_dynamic else batch.min
        return "B" in tensor.dims or (fixed is not None and tensor.dims[:1] == (fixed,))

    def flops_at(self, sizes: Sizes) -> int:
        """At most the work of a module at other sizes: it grows with every axis, attention with tokens twice.

        Axes that only come together in an input, such as height and width, may count tokens together.
        """
        ratios = {name: sizes[name] / max(axis.opt, 1) for name, axis in self.axes.items()}
        tokens = {frozenset(map(str, each.dims)) & ratios.keys() - {self.batch} for each in self.inputs}
        apart = [each for each in tokens if not any(other < each for other in tokens if other)]
        apart += [frozenset({name}) for name in ratios.keys() - {self.batch}]
        longest = max([1.0, *(math.prod(max(ratios[name], 1.0) for name in each) for each in apart)])
        return int(self.flops * math.prod(ratios.values()) * longest)

    def call_cost(
        self, sizes: Sizes, width: int, *, lengths: Lengths = None, flops: int = 0, moved: int = 0
    ) -> LayerCost:
        """All that PyTorch counts, with every weight read once."""
        moved += self.weight_bytes
        return cost_of(StageCost(name=self.name, growth="", parameters=0, flops=flops, bytes=moved))


_BATCH_NAME = re.compile(r"(?i)(n|bs|b|.*batch.*)$")

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


def whole_number(name: str, value: object) -> None:
    """Refuse anything but a whole number from 1 to what a tensor can have."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(f"{name} must be a whole number of at least 1.", got=value, hint="1 or more")
    most = _MOST_HEADS if name in ("Hq", "Hkv") else _LARGEST_SIZE
    refuse(value > most, f"{name} must be at most {most}.", value, hint="a smaller number")
