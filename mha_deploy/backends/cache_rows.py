"""What a layer with a cache takes and gives, and where the new rows go. Knows nothing of any runtime.

    rows      key_cache, value_cache, lengths -> key_rows, value_rows     the caller writes the rows
    static    key_cache, value_cache, lengths -> key_cache_out, value_cache_out
    growing   past_key, past_value -> present_key, present_value

A cache is [B, Hkv, T, D]. The S new rows of batch row b go to lengths[b] … lengths[b]+S-1 of every head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from mha_deploy.backends.cuda import RowCopy
from mha_deploy.backends.runner import Arrays, TensorInfo
from mha_deploy.errors import DeployError
from mha_deploy.golden_cache import with_rows
from mha_deploy.spec_parts import CACHES, CACHES_OUT, LENGTHS, PAST, PRESENT

ROWS = ("key_rows", "value_rows")


class CacheForm(Enum):
    """What an engine does with new keys and values: the names of its cache inputs and outputs."""

    ROWS = (CACHES, ROWS)
    STATIC = (CACHES, CACHES_OUT)
    GROWING = (PAST, PRESENT)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names by which keys and values come in."""
        return self.value[0]

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names by which keys and values go out."""
        return self.value[1]


def cache_form(inputs: Iterable[str], outputs: Iterable[str]) -> CacheForm | None:
    """The form that a graph or an engine has; None for one without a cache."""
    taken, given = set(inputs), set(outputs)
    for form in CacheForm:
        if set(form.inputs) <= taken and set(form.outputs) <= given:
            return form
    return None


def written_in_place(inputs: Iterable[str], outputs: Iterable[str]) -> dict[str, str]:
    """For each static cache that goes out, the one that came in, where a runtime takes both in one place."""
    given = set(outputs)
    if cache_form(inputs, given) is CacheForm.STATIC and given == {"output", *CACHES_OUT}:
        return dict(zip(CACHES_OUT, CACHES, strict=True))
    return {}


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """The sizes of a cache, T the rows that it has room for."""

    B: int
    Hkv: int
    T: int
    D: int
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """All of it: [B, Hkv, T, D]."""
        return self.B, self.Hkv, self.T, self.D

    def first(self, length: int) -> tuple[int, int, int, int]:
        """A cache of another length: [B, Hkv, length, D]."""
        return self.B, self.Hkv, length, self.D

    def nbytes(self, length: int) -> int:
        """Size of a cache of this length."""
        return math.prod(self.first(length)) * self.dtype.itemsize


def row_copies(cache: CacheShape, lengths: np.ndarray, S: int) -> list[RowCopy]:
    """How [B, Hkv, S, D] new rows get to their places in the cache.

    Rows of one head lie side by side, so a head is one piece: one copy does where all lengths are equal, and
    otherwise one for each row of the batch.
    """
    number = cache.D * cache.dtype.itemsize
    whole = RowCopy(
        target=int(lengths[0]) * number,
        target_pitch=cache.T * number,
        source=0,
        source_pitch=S * number,
        width=S * number,
        rows=cache.B * cache.Hkv,
    )
    if (lengths == lengths[0]).all():
        return [whole]
    return [
        replace(
            whole,
            target=(b * cache.Hkv * cache.T + int(length)) * number,
            source=b * cache.Hkv * S * number,
            rows=cache.Hkv,
        )
        for b, length in enumerate(lengths)
    ]


@dataclass(frozen=True, kw_only=True)
class CacheCopy:
    """New rows on their way to a cache: the names of both, and the places."""

    cache: str
    rows: str
    place: RowCopy


def cache_copies(feeds: Arrays, outputs: Mapping[str, TensorInfo]) -> list[CacheCopy]:
    """What a call with these inputs leaves to be copied: nothing, unless its outputs are rows."""
    if not set(ROWS) <= set(outputs):
        return []
    B, Hkv, T, D = feeds[CACHES[0]].shape
    shape = CacheShape(B=B, Hkv=Hkv, T=T, D=D, dtype=feeds[CACHES[0]].dtype)
    places = row_copies(shape, feeds[LENGTHS], feeds["x"].shape[1])
    pairs = zip(CACHES, ROWS, strict=True)
    return [CacheCopy(cache=cache, rows=rows, place=place) for cache, rows in pairs for place in places]


def refuse_overflow(lengths: np.ndarray, S: int, T: int) -> None:
    """Refuse new rows that the cache has no room for; padding counts, since it is written, too.

    Raises:
        DeployError: They would be written behind the end.
    """
    if (lengths < 0).any() or (lengths + S > T).any():
        raise DeployError(
            "The new tokens do not fit into the cache.",
            got=f"lengths {lengths.tolist()}, {S} new tokens, {T} rows",
            hint=f"lengths from 0 to {T - S}, or a cache with more rows",
        )


def check_room(feeds: Arrays) -> None:
    """Refuse the inputs of a call that would write behind the end of its static cache.

    Raises:
        DeployError: They would.
    """
    if LENGTHS in feeds and CACHES[0] in feeds:
        refuse_overflow(feeds[LENGTHS], feeds["x"].shape[1], feeds[CACHES[0]].shape[2])


def total_length(lengths: np.ndarray, S: int, T: int) -> np.ndarray:
    """What GroupQueryAttention is told of the longest row: S means a prompt into an empty cache.

    Otherwise it is no more than an upper bound, and T serves every step.
    """
    return np.array(S if S > 1 and not lengths.any() else T, np.int32)


def presented_outputs(
    inputs: Mapping[str, TensorInfo], outputs: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """The outputs as the layer has them: a cache with the new rows in it where an engine gives the rows."""
    presented = {}
    for name, info in outputs.items():
        if name in ROWS:
            at = ROWS.index(name)
            presented[CACHES_OUT[at]] = inputs[CACHES[at]]
        else:
            presented[name] = info
    return presented


def presented_results(feeds: Arrays, results: Arrays, written: Arrays | None = None) -> dict[str, np.ndarray]:
    """The results by the names of `presented_outputs`.

    Args:
        feeds: The inputs of the call.
        results: What the engine gave.
        written: The caches that the call has written the rows into, by the names of the inputs. Into a copy
            of any other they are written here.
    """
    presented, written = dict(results), written or {}
    for cache, rows, out in zip(CACHES, ROWS, CACHES_OUT, strict=True):
        if rows in results:
            new = presented.pop(rows)
            held = written.get(cache)
            presented[out] = with_rows(feeds[cache], new, feeds[LENGTHS]) if held is None else held
    return presented
