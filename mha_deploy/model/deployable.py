"""What can be exported besides a catalog layer: a user's module with examples of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from mha_deploy.errors import SpecError
from mha_deploy.model import spec as rules
from mha_deploy.model.spec import (
    FLOAT,
    AttentionSpec,
    Axis,
    CachedTensor,
    Dim,
    KVCache,
    ModelSpec,
    Sizes,
    TensorSpec,
    axes_from,
)

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn  # noqa: TID251 (types only)

    Draw = Callable[[tuple[int, ...], Generator], Tensor]


# -- What a factory gives to `mha-deploy export file.py:factory`: a module, and examples of its ----


@dataclass(frozen=True, init=False)
class Example:
    """One input: a tensor that the module takes, and names for the dimensions that vary.

    Args:
        tensor: An example; its values say what others look like. Floating-point tensors are rounded to the
            precision of the export.
        axes: A name for each leading dimension, such as "B" or a sum as "P+S"; None for a fixed one. Those
            that are not named are fixed.
        draw: Makes the input at another shape, where the example does not show how: it gets the shape and a
            seeded generator. By default, floats are drawn with the example's mean and deviation, and
            integers, booleans and masks of large or infinite floats are cut from the example or repeat it.
    """

    tensor: Tensor
    axes: tuple[str | None, ...]
    draw: Draw | None

    def __init__(self, tensor: Tensor, *axes: str | None, draw: Draw | None = None) -> None:
        object.__setattr__(self, "tensor", tensor)
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "draw", draw)


@dataclass(frozen=True, kw_only=True)
class Deployable:
    """A module and everything that its export cannot guess.

    Args:
        module: The module; it is exported in evaluation mode.
        inputs: An example of every input, by the name of the parameter of `forward`.
        axes: The sizes of every named axis: `min:opt:max` as text, three numbers, or an `Axis`. Name the
            batch B: rows of a batch are then also tried in other places.
        outputs: Names of the outputs, where `forward` does not name them.
        kv_cache: For a decoder: each input that holds cached keys or values, and the output that takes its
            place in the next call, such as {"past_key": "present_key"}. The input has an axis of its own for
            the cached tokens, such as P, and the output its sum with that of the new ones, P+S. Decoding is
            then validated token by token.
        name: Name of the model; default: the factory's.
        summary: One line for people.
    """

    module: nn.Module
    inputs: Mapping[str, Example]
    axes: Mapping[str, str | tuple[int, int, int] | Axis] = field(default_factory=dict)
    outputs: Sequence[str] = ()
    kv_cache: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    summary: str = ""


# -- The interface of a user's own module, as it was exported --------------------------------------

LARGEST_ACTIVATION = 1e4
"""Floats beyond it are meant to hide something: a mask, whose numbers are neither drawn nor negated."""

KINDS = (FLOAT, "float32", "float64", "int32", "int64", "bool")
"""What a tensor may hold; `float` is whatever precision the export asks for."""


_OPTIONAL = ("seed", "weights_file", "weights_prefix", "mixed", "cached", "summary")


@dataclass(frozen=True, kw_only=True)
class ModuleSpec(ModelSpec):
    """A user's module, as it was exported.

    Args:
        name: Name of the model.
        factory: What makes it, as `file.py:factory` or `package.module:factory`; empty where it was exported
            from an object in memory.
        axes: The named sizes; B is the batch where there is one.
        tensors_in: Its inputs.
        tensors_out: Its outputs.
        attentions: How many attentions it computes, fused or not.
        flops: Work of one call at the usual sizes, as PyTorch counts it.
        weight_bytes: Memory of its weights.
        state_sha256: Hash of its weights and buffers before they were rounded.
        seed: PyTorch's seed while the factory ran.
        weights_file: The file or checkpoint that its weights were read from, where one was given.
        weights_prefix: What their names begin with there.
        mixed: Whether its precision was chosen node by node.
        cached: Each input of a KV cache, and the output that takes its place in the next call.
        summary: One line for people.
    """

    name: str
    factory: str
    axes: Mapping[str, Axis]
    tensors_in: tuple[TensorSpec, ...]
    tensors_out: tuple[TensorSpec, ...]
    attentions: int
    flops: int
    weight_bytes: int
    state_sha256: str
    seed: int = 0
    weights_file: str | None = None
    weights_prefix: str = ""
    mixed: bool = False
    cached: Mapping[str, str] = field(default_factory=dict)
    summary: str = ""

    cache = "none"  # its cache tensors are inputs and outputs like any other
    window = None  # its masks are in the graph

    def __post_init__(self) -> None:
        for name in ("name", "factory", "state_sha256", "summary", "weights_prefix"):
            if not isinstance(getattr(self, name), str):
                raise SpecError(f"{name} must be text.", got=getattr(self, name))
        for name in ("attentions", "flops", "weight_bytes", "seed"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise SpecError(f"{name} must be a whole number.", got=getattr(self, name))
        if (
            not (self.weights_file is None or isinstance(self.weights_file, str))
            or type(self.mixed) is not bool
        ):
            raise SpecError("weights_file or mixed has another type.", got=(self.weights_file, self.mixed))
        if not isinstance(self.cached, Mapping):
            raise SpecError("cached must be a table.", got=self.cached)
        names = [{tensor.name for tensor in each} for each in (self.tensors_in, self.tensors_out)]
        if not (set(self.cached) <= names[0] and set(self.cached.values()) <= names[1]):
            raise SpecError("The KV cache names tensors that are not there.", got=dict(self.cached))
        for tensor in (*self.tensors_in, *self.tensors_out):
            if tensor.kind not in KINDS:
                raise SpecError(
                    f"Tensor {tensor.name} has no such kind.", got=tensor.kind, hint=", ".join(KINDS)
                )
        for name, axis in self.axes.items():
            rules.check_axis(name, axis)

    @property
    def kind(self) -> str:
        """What it is, in a word."""
        return "module"

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs, in the order of the graph."""
        return self.tensors_in

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs, in the order of the graph."""
        return self.tensors_out

    @property
    def attention_count(self) -> int:
        """How many fused attention nodes the exported graph must have."""
        return self.attentions

    @property
    def kv_cache(self) -> KVCache | None:
        """How it decodes; None for a module without a KV cache.

        Raises:
            SpecError: The cached tensors do not grow by the new tokens.
        """
        if not self.cached:
            return None
        given = {tensor.name: tensor.dims for tensor in self.tensors_in}
        made = {tensor.name: tensor.dims for tensor in self.tensors_out}
        found = {name: _growing_axis(name, given[name], made[self.cached[name]]) for name in self.cached}
        (_, past, new), *others = found.values()
        if any(each[1:] != (past, new) for each in others):
            raise SpecError("The tensors of the KV cache do not grow along the same axes.", got=found)
        total = {f"{past}+{new}", f"{new}+{past}"}
        loose = {name: dims for name, dims in given.items() if name not in self.cached}
        return KVCache(
            tensors=tuple(
                CachedTensor(name=name, input=name, output=self.cached[name], axis=axis)
                for name, (axis, _, _) in found.items()
            ),
            new=new,
            past=past,
            # The reference is one call with all tokens, so the axis of new tokens bounds them, too.
            room=min(self.axes[past].max + 1, self.axes[new].max),
            by_token={name: dims.index(new) for name, dims in loose.items() if new in dims},
            by_context={
                name: next(i for i, dim in enumerate(dims) if dim in total)
                for name, dims in loose.items()
                if total & {dim for dim in dims if isinstance(dim, str)}
            },
            outputs={
                name: dims.index(new)
                for name, dims in made.items()
                if new in dims and name not in self.cached.values()
            },
        )

    def flops_at(self, sizes: Sizes) -> int:
        """At most the work at other sizes: it grows with every axis, and attention with one of them twice."""
        ratios = [sizes[name] / max(axis.opt, 1) for name, axis in self.axes.items()]
        lengths = [sizes[name] / max(axis.opt, 1) for name, axis in self.axes.items() if name != "B"]
        growth = 1.0
        for ratio in ratios:
            growth *= ratio
        return int(self.flops * growth * max([1.0, *lengths]))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, readable back with `from_dict`."""
        return {**asdict(self), "axes": {name: asdict(axis) for name, axis in self.axes.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModuleSpec:
        """Read a spec from plain data, refusing what it does not know."""
        known = tuple(item.name for item in fields(cls))
        rules.refuse_unknown("the spec", data, known)
        rules.require("the spec", data, tuple(name for name in known if name not in _OPTIONAL))
        tensors = {
            key: tuple(_tensor_from(each) for each in data[key]) for key in ("tensors_in", "tensors_out")
        }
        return cls(**{**data, "axes": axes_from(data["axes"]), **tensors})


def _growing_axis(name: str, taken: tuple[Dim, ...], given: tuple[Dim, ...]) -> tuple[int, str, str]:
    """Along which dimension a cached tensor grows, the axis of the past, and that of the new tokens."""
    for axis, (before, after) in enumerate(zip(taken, given, strict=False)):
        if isinstance(before, str) and isinstance(after, str) and before != after:
            parts = after.split("+")
            if before in parts and len(parts) == 2 and not any(part.isdigit() for part in parts):
                parts.remove(before)
                return axis, before, parts[0]
    raise SpecError(
        f"The KV cache {name} does not grow by the new tokens.",
        got=f"{taken} in, {given} out",
        hint="an axis such as P in the input, and P+S in the output",
    )


def _tensor_from(data: Any) -> TensorSpec:
    tensor = rules.record_from("a tensor", TensorSpec, data)
    return TensorSpec(name=tensor.name, kind=tensor.kind, dims=tuple(tensor.dims))


def spec_from_dict(data: Mapping[str, Any]) -> AttentionSpec | ModuleSpec:
    """Read the spec of a bundle: of a reference layer, or of a user's module."""
    return ModuleSpec.from_dict(data) if "factory" in data else AttentionSpec.from_dict(data)
