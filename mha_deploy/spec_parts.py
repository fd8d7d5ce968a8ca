"""The parts that a spec is made of: axes, tensors, and the options of single features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import mha_deploy.spec_rules as rules
from mha_deploy.errors import SpecError

FLOAT = "float"  # a tensor kind: whatever precision the export asks for
INT32 = "int32"

# Keys and values of a cache, as they come in and as they go out.
PAST, PRESENT = ("past_key", "past_value"), ("present_key", "present_value")
CACHES, CACHES_OUT = ("key_cache", "value_cache"), ("key_cache_out", "value_cache_out")
CACHE_TENSORS = {"growing": (PAST, PRESENT), "static": (CACHES, CACHES_OUT)}
LENGTHS = "lengths"  # of a static cache: its valid rows

Dim = str | int  # an axis, a sum of axes and numbers such as "P+S", or a number
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
        rules.check_axis(name, axis)
        return axis


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One named input or output: its kind (`float` or `int32`) and its dimensions."""

    name: str
    kind: str
    dims: tuple[Dim, ...]

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Replace axis names by the given sizes, and add up sums."""
        return tuple(_size_of(dim, sizes) for dim in self.dims)


def _size_of(dim: Dim, sizes: Sizes) -> int:
    parts = dim.split("+") if isinstance(dim, str) else (dim,)
    return sum(int(part) if str(part).isdigit() else sizes[str(part)] for part in parts)


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
    """Options of the grouped variant: `groups` of heads, mixed by an MLP of width `hidden`."""

    groups: int
    hidden: int


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding: pairs of numbers are turned by an angle that grows with the position.

    Args:
        base: Base of the geometric row of frequencies.
        dims: How many numbers of a head are turned, its first ones; all D unless given.
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
        "growing": {"P": Axis(min=0, opt=min(S.opt, length - 1), max=length - 1)},
        "static": {"T": Axis(min=length, opt=length, max=length)},
    }
    return {"B": axes["B"], "S": S, **added[cache]}


def _axis_from(name: str, value: Any) -> Axis:
    if isinstance(value, int) and not isinstance(value, bool):
        return Axis(min=value, opt=value, max=value)
    if not isinstance(value, Mapping):
        raise SpecError(
            f"Axis {name} is not a range.", got=value, hint=f"{name} = {{ min = 1, opt = 8, max = 32 }}"
        )
    return rules.record_from(f"axis {name}", Axis, value)
