"""The roofline bound of a layer on a GPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mha_deploy.analyze.cost import (
    LayerCost,
    StageCost,
    key_length,
    kv_cache_bytes,
    kv_cache_bytes_per_token,
    layer_cost,
)
from mha_deploy.errors import DeployError, nearest
from mha_deploy.model.precision import find_precision
from mha_deploy.model.spec import AttentionSpec, Sizes

# -- What GPUs can do at most, from `gpus.toml` ----------------------------------------------------

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FIGURES = Path(__file__).resolve().parent / "gpus.toml"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Peak figures of one GPU: dense tensor-core rates with FP32 accumulation, plain FP32, memory.

    Args:
        name: The short name.
        fp16_tflops: Dense FP16 rate in 10^12 FLOP/s.
        bf16_tflops: Dense BF16 rate in 10^12 FLOP/s.
        fp32_tflops: FP32 rate without TF32, in 10^12 FLOP/s.
        memory_gb_per_s: Memory bandwidth in 10^9 bytes/s.
        compute_capability: As CUDA counts it, for example `9.0`.
        source: Where the figures come from.
        aliases: Other names of the same GPU.
    """

    name: str
    fp16_tflops: float
    bf16_tflops: float
    fp32_tflops: float
    memory_gb_per_s: float
    compute_capability: str
    source: str
    aliases: tuple[str, ...] = ()

    def peak_flops(self, precision: str) -> float:
        """FLOP/s at `fp16`, `bf16` or `fp32`."""
        return float(getattr(self, f"{find_precision(precision).name}_tflops")) * 1e12

    @property
    def bandwidth(self) -> float:
        """Memory bandwidth in bytes/s."""
        return self.memory_gb_per_s * 1e9


@cache
def known_gpus() -> tuple[Gpu, ...]:
    """All GPUs of the table, in its order."""
    table = tomllib.loads(_FIGURES.read_text(encoding="utf-8"))
    return tuple(
        Gpu(name=name, **{**figures, "aliases": tuple(figures["aliases"])}) for name, figures in table.items()
    )


def gpu_names() -> list[str]:
    """The short names, as they are written on a command line."""
    return [gpu.name.lower().replace(" ", "-") for gpu in known_gpus()]


def find_gpu(name: str) -> Gpu:
    """Look a GPU up by name or alias; case, spaces and dashes do not matter."""
    wanted = _letters(name)
    for gpu in known_gpus():
        if wanted in {_letters(known) for known in (gpu.name, *gpu.aliases)}:
            return gpu
    typed = name.strip().lower().replace(" ", "-")
    raise DeployError("No figures for that GPU.", got=name, hint=nearest(typed, gpu_names()))


def _letters(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name).lower()


# -- The roofline: the least time that the FLOPs and bytes of a stage need on a GPU ----------------

COMPUTE = "compute"
MEMORY = "memory"


@dataclass(frozen=True, kw_only=True)
class StageFloor:
    """The least time of one stage, and what sets it."""

    cost: StageCost
    compute_seconds: float
    memory_seconds: float

    @property
    def seconds(self) -> float:
        """The longer of both: arithmetic and traffic overlap at best."""
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def bound_by(self) -> str:
        """`compute` or `memory`."""
        return COMPUTE if self.compute_seconds >= self.memory_seconds else MEMORY


@dataclass(frozen=True, kw_only=True)
class LayerFloor:
    """The least time of a layer whose stages run one after the other."""

    stages: tuple[StageFloor, ...]
    tokens: int

    @property
    def seconds(self) -> float:
        """The sum over the stages."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def tokens_per_second(self) -> float:
        """Query tokens per second at the floor: the most that this layer allows."""
        return self.tokens / self.seconds


def roofline_bound(cost: LayerCost, gpu: Gpu, precision: str, tokens: int) -> LayerFloor:
    """Place every stage under the roofline of a GPU.

    Args:
        cost: The layer, counted with the bytes of that precision.
        gpu: Its peak figures.
        precision: `fp16`, `bf16` or `fp32`.
        tokens: Query tokens of one run, B times S.
    """
    peak = gpu.peak_flops(precision)
    stages = tuple(
        StageFloor(cost=stage, compute_seconds=stage.flops / peak, memory_seconds=stage.bytes / gpu.bandwidth)
        for stage in cost.stages
    )
    return LayerFloor(stages=stages, tokens=tokens)


# -- The front door: one layer at one set of sizes, in one precision, under the roofline of one ----


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What a layer costs and the least time it takes.

    Args:
        spec: The layer.
        sizes: The sizes it was counted at.
        precision: `fp16`, `bf16` or `fp32`.
        gpu: The GPU whose peak figures were used.
        cost: Parameters, FLOPs and bytes per stage.
        floor: Least time per stage.
        kv_bytes_per_token: Key/value cache of one token in this layer.
        kv_bytes: Key/value cache of this layer at these sizes.
    """

    spec: AttentionSpec
    sizes: Mapping[str, int]
    precision: str
    gpu: Gpu
    cost: LayerCost
    floor: LayerFloor
    kv_bytes_per_token: int
    kv_bytes: int


def analyze(
    spec: AttentionSpec,
    sizes: Sizes,
    precision: str,
    gpu: str | Gpu,
    *,
    lengths: Sequence[int] | None = None,
) -> Analysis:
    """Count a layer and place it under a roofline; nothing is run.

    Args:
        spec: The layer.
        sizes: A size for each of its axes.
        precision: `fp16`, `bf16` or `fp32`.
        gpu: A name from `gpu_names()`, or the figures of another GPU, for example measured ones.
        lengths: Valid rows of a static cache before the call; it is full after it unless given.
    """
    figures = gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
    element = find_precision(precision).bytes
    cost = layer_cost(spec, sizes, element, lengths=lengths)
    return Analysis(
        spec=spec,
        sizes=dict(sizes),
        precision=precision,
        gpu=figures,
        cost=cost,
        floor=roofline_bound(cost, figures, precision, tokens=sizes["B"] * sizes["S"]),
        kv_bytes_per_token=kv_cache_bytes_per_token(spec, element),
        kv_bytes=kv_cache_bytes(spec, sizes["B"], key_length(spec, sizes), element),
    )
