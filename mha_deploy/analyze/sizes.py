"""Sizes worth trying: lengths that no kernel tiles evenly, and the largest that a limit allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mha_deploy.analyze.cost import kv_cache_bytes, layer_cost
from mha_deploy.analyze.work import key_length
from mha_deploy.model_spec import ModelSpec
from mha_deploy.spec import AttentionSpec, Axis, Sizes

_ODD_LENGTHS = (37, 13, 7, 5, 3)


@dataclass(frozen=True, kw_only=True)
class SizeLimit:
    """What one run of a layer may cost.

    Args:
        gflop: Work in 10⁹ floating-point operations.
        gib: Memory for the oracle's scores, activations and cache.
    """

    gflop: float = 100.0
    gib: float = 4.0

    def __str__(self) -> str:
        return f"{self.gflop:g} GFLOP and {self.gib:g} GiB"

    def allows(self, spec: ModelSpec, sizes: Sizes) -> bool:
        """Whether a layer of these sizes stays below the limit."""
        work, memory = layer_flops(spec, sizes), oracle_bytes(spec, sizes)
        return work <= self.gflop * 1e9 and memory <= self.gib * 2**30


def shrunk(spec: ModelSpec, sizes: Sizes, smallest: Sizes, limit: SizeLimit) -> dict[str, int]:
    """Halve the batch, then the longest axis, until the limit allows the sizes or nothing can shrink."""
    found = dict(sizes)
    while not limit.allows(spec, found):
        shrinkable = [name for name in found if found[name] > smallest[name]]
        if not shrinkable:
            break
        name = "B" if "B" in shrinkable else max(shrinkable, key=lambda axis: found[axis])
        found[name] = max(smallest[name], found[name] // 2)
    return found


def sizes_name(sizes: Sizes) -> str:
    """Sizes as the name of a case or a file: `B2-S33`."""
    return "-".join(f"{axis}{size}" for axis, size in sizes.items())


def odd_sizes(axes: Mapping[str, Axis]) -> dict[str, int]:
    """Lengths that no kernel tiles evenly, and a batch of three where that is allowed."""
    sizes = {
        name: first_allowed(axis, (*_ODD_LENGTHS, (axis.min + 1) | 1, axis.min | 1))
        for name, axis in axes.items()
    }
    return {**sizes, "B": first_allowed(axes["B"], (3,))} if "B" in axes else sizes


def first_allowed(axis: Axis, candidates: Sequence[int]) -> int:
    """The first size that an axis allows, or its usual one."""
    return next((size for size in candidates if axis.min <= size <= axis.max), axis.opt)


def layer_flops(spec: ModelSpec, sizes: Sizes) -> int:
    """The work of a layer at the given sizes; of a module, at most so much."""
    if isinstance(spec, AttentionSpec):
        return layer_cost(spec, sizes, bytes_per_element=1).flops
    return spec.flops_at(sizes)


def oracle_bytes(spec: ModelSpec, sizes: Sizes) -> int:
    """Memory of an FP64 run that keeps scores and weights: an upper bound, fused kernels need less.

    Of a module it is not known: 0.
    """
    if not isinstance(spec, AttentionSpec):
        return 0
    T = key_length(spec, sizes)
    scores = 2 * sizes["B"] * spec.Hq * sizes["S"] * T
    activations = 4 * sizes["B"] * max(sizes["S"], T) * max(spec.E, spec.Hq * spec.D)
    return 8 * (scores + activations) + oracle_cache_bytes(spec, sizes)


def oracle_cache_bytes(spec: ModelSpec, sizes: Sizes) -> int:
    """Memory of the cache of an FP64 run, as it comes in and as it goes out; 0 where there is none."""
    if not isinstance(spec, AttentionSpec) or spec.cache == "none":
        return 0
    return 2 * kv_cache_bytes(spec, sizes["B"], key_length(spec, sizes), bytes_per_element=8)
