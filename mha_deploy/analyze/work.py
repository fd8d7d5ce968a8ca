"""The work of a layer at one set of sizes: how many tokens, keys, and pairs of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mha_deploy.errors import SpecError
from mha_deploy.spec import AttentionSpec, Sizes


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """The cost of one stage.

    Args:
        name: What the stage does.
        growth: The order of its FLOPs per batch row, in the project's alphabet.
        parameters: Learned numbers, biases included.
        flops: Floating point operations, 2 per multiply-add.
        bytes: Weights, inputs and outputs, each moved once.
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
class Work:
    """A layer at one set of sizes: what every stage is counted from.

    Args:
        spec: The layer.
        B: Rows of the batch.
        S: New tokens of each.
        T: Keys of each.
        past: How many keys come before the new tokens, in every row of the batch.
        bytes_per_element: Of weights and activations.
    """

    spec: AttentionSpec
    B: int
    S: int
    T: int
    past: Sequence[int]
    bytes_per_element: int

    @property
    def rows(self) -> int:
        """Query tokens."""
        return self.B * self.S

    @property
    def head_elements(self) -> int:
        """Elements of the query heads, and of the head outputs."""
        return self.rows * self.spec.Hq * self.spec.D

    @property
    def kv_rows(self) -> int:
        """Rows of keys that are projected: all of them, but for those that a cache has already."""
        return self.B * (self.S if self.spec.cache != "none" else self.T)

    @property
    def kv_rows_seen(self) -> int:
        """Rows of keys that some query sees: a window leaves out the oldest of a cache."""
        reach = self.T if self.spec.window is None else self.spec.window - 1
        return self.kv_rows + sum(min(past, reach) for past in self.past)

    def kv_elements(self, rows: int) -> int:
        """Elements of the keys and values of that many rows together."""
        return 2 * rows * self.spec.Hkv * self.spec.D

    def pairs(self, past: int) -> int:
        """(query, key) pairs of one head in one batch row.

        A causal query sees what was there before, and the new keys up to its own: past + 1, past + 2, …, or
        as many as its window has.
        """
        if not self.spec.causal:
            return self.S * self.T
        window = past + self.S if self.spec.window is None else self.spec.window
        within = min(max(window - past, 0), self.S)  # queries whose window is not full
        return within * past + within * (within + 1) // 2 + (self.S - within) * window

    @property
    def all_pairs(self) -> int:
        """(query, key) pairs of one head in all batch rows."""
        return sum(self.pairs(past) for past in self.past)

    def stage(
        self, name: str, growth: str, *, parameters: int = 0, flops: int, elements: int, other: int = 0
    ) -> StageCost:
        """Turn counted elements into bytes; `other` is bytes that do not follow the precision."""
        total = (parameters + elements) * self.bytes_per_element + other
        return StageCost(name=name, growth=growth, parameters=parameters, flops=flops, bytes=total)


def key_length(spec: AttentionSpec, sizes: Sizes) -> int:
    """How many keys a row of the batch has, the rows of a static cache that are not valid included."""
    return sum(sizes[axis] for axis in spec.key_axis.split("+"))


def past_rows(spec: AttentionSpec, sizes: Sizes, lengths: Sequence[int] | None = None) -> list[int]:
    """The keys before the new tokens, in every row of the batch: none without a cache.

    Args:
        spec: The layer.
        sizes: A size for each of its axes.
        lengths: Valid rows of a static cache before the call; it is full after it unless given.

    Raises:
        SpecError: The lengths do not suit the layer or its sizes.
    """
    if lengths is not None:
        return _checked(spec, sizes, lengths)
    past = key_length(spec, sizes) - sizes["S"] if spec.cache != "none" else 0
    return [past] * sizes["B"]


def _checked(spec: AttentionSpec, sizes: Sizes, lengths: Sequence[int]) -> list[int]:
    found = [int(length) for length in lengths]
    if spec.cache != "static" or len(found) != sizes["B"]:
        raise SpecError(
            "Only a static cache has lengths, one for every row of the batch.",
            got=f"{len(found)} lengths, cache = {spec.cache}, B = {sizes['B']}",
        )
    room = sizes["T"] - sizes["S"]
    if not all(0 <= length <= room for length in found):
        raise SpecError(
            "The new tokens do not fit into the cache.", got=f"lengths {found}", hint=f"0 to {room}"
        )
    return found
