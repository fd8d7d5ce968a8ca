"""The roofline bound of a layer on a GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mha_deploy.errors import DeployError, nearest
from mha_deploy.model.layer import AttentionSpec, key_length, kv_cache_bytes_per_token, layer_cost
from mha_deploy.model.precision import find_precision
from mha_deploy.model.spec import LayerCost, Lengths, Sizes, StageCost

_FIGURES = Path(__file__).resolve().parent / "gpus.toml"


@dataclass(frozen=True, kw_only=True)
class GpuPeaks:
    """Peak figures of one GPU: dense tensor-core rates with FP32 accumulation, FP32 without TF32, memory.

    Rates are in 10^12 FLOP/s, the bandwidth in 10^9 bytes/s. `source` says where the figures come from, and
    `aliases` are other names of the same GPU.
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
def known_gpus() -> tuple[GpuPeaks, ...]:
    """All GPUs of the table, in its order."""
    import msgspec

    table = msgspec.toml.decode(_FIGURES.read_bytes())
    return tuple(msgspec.convert({"name": name, **each}, GpuPeaks) for name, each in table.items())


def gpu_names() -> list[str]:
    """The short names, as they are written on a command line."""
    return [gpu.name.lower().replace(" ", "-") for gpu in known_gpus()]


def find_peaks(name: str) -> GpuPeaks:
    """Look a GPU up by name or alias; case, spaces and dashes do not matter."""

    def letters(text: str) -> str:
        return re.sub(r"[\s_-]+", "", text).lower()

    for gpu in known_gpus():
        if letters(name) in map(letters, (gpu.name, *gpu.aliases)):
            return gpu
    typed = name.strip().lower().replace(" ", "-")
    raise DeployError("There are no peak figures for this GPU.", got=name, hint=nearest(typed, gpu_names()))


def parse_peaks(text: str) -> GpuPeaks:
    """The figures of a GPU that is not in the table, as `TFLOPS:GB/s`."""
    parts = text.split(":")
    try:
        tflops, bandwidth = (float(part) for part in parts)
        if not (0 < tflops < 1e9 and 0 < bandwidth < 1e9):
            raise ValueError
    except ValueError as error:
        hint = "the dense rate in TFLOP/s and the memory bandwidth in GB/s, such as 362:864"
        raise DeployError("The peak figures are not two numbers.", got=text, hint=hint) from error
    return GpuPeaks(
        name=f"{tflops:g} TFLOP/s, {bandwidth:g} GB/s",
        compute_capability="",
        source="as given",
        fp16_tflops=tflops,
        bf16_tflops=tflops,
        fp32_tflops=tflops,
        memory_gb_per_s=bandwidth,
    )


# -- The roofline bound: the least time that FLOPs and bytes need ----------------------------------


@dataclass(frozen=True, kw_only=True)
class StageBound:
    """The roofline bound of one stage: the time for its arithmetic, and for its memory traffic."""

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
        return "compute" if self.compute_seconds >= self.memory_seconds else "memory"


def roofline_bound(cost: LayerCost, gpu: GpuPeaks, precision: str) -> tuple[StageBound, ...]:
    """The roofline bound of every stage on a GPU; the stages run one after the other."""
    peak = gpu.peak_flops(precision)
    return tuple(
        StageBound(cost=stage, compute_seconds=stage.flops / peak, memory_seconds=stage.bytes / gpu.bandwidth)
        for stage in cost.stages
    )


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The cost and the roofline bound of some stages at some sizes on a GPU."""

    sizes: Mapping[str, int]
    precision: str
    gpu: GpuPeaks
    cost: LayerCost
    bound: tuple[StageBound, ...]

    @property
    def seconds(self) -> float:
        """The bound of all stages together."""
        return sum(stage.seconds for stage in self.bound)

    @property
    def shown(self) -> str:
        """What was analyzed and the bound, in a few words."""
        sizes = ",".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"{self.precision} on {self.gpu.name} at {sizes}: at least {1e6 * self.seconds:.3g} µs"

    def plain(self) -> dict[str, Any]:
        """Plain data for JSON; times in seconds, sizes in bytes."""
        gpu, stages = self.gpu, []
        peaks = {"peak_flops": gpu.peak_flops(self.precision), "bandwidth": gpu.bandwidth}
        for each in self.bound:
            bounds = {"bound_seconds": each.seconds, "bound_by": each.bound_by}
            stages.append({**vars(each.cost), "intensity": each.cost.intensity, **bounds})
        counts = {name: getattr(self.cost, name) for name in ("parameters", "flops", "bytes", "intensity")}
        return {
            "sizes": dict(self.sizes),
            "precision": self.precision,
            "gpu": {"name": gpu.name, **peaks, "source": gpu.source},
            "stages": stages,
            "total": {**counts, "bound_seconds": self.seconds},
        }


@dataclass(frozen=True, kw_only=True)
class Analysis(Roofline):
    """The roofline of a layer, stage by stage."""

    spec: AttentionSpec

    def __repr__(self) -> str:
        return f"<Analysis {self.spec.name} {self.shown}>"

    @property
    def tokens_per_second(self) -> float:
        """Query tokens per second at the bound."""
        return self.sizes["B"] * self.sizes["S"] / self.seconds

    @property
    def kv_bytes_per_token(self) -> int:
        """KV-cache bytes of one token."""
        return kv_cache_bytes_per_token(self.spec, find_precision(self.precision).bytes)

    @property
    def kv_bytes(self) -> int:
        """KV-cache bytes at these sizes."""
        return self.sizes["B"] * key_length(self.spec, self.sizes) * self.kv_bytes_per_token

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; times in seconds, sizes in bytes."""
        spec, plain = self.spec, self.plain()
        plain["gpu"]["compute_capability"] = self.gpu.compute_capability
        plain["total"]["tokens_per_second"] = self.tokens_per_second
        return {
            "model": spec.name,
            "kind": spec.kind,
            "variant": spec.variant,
            **plain,
            "kv_cache": {"bytes_per_token": self.kv_bytes_per_token, "bytes": self.kv_bytes},
        }


def analyze_layer(
    spec: AttentionSpec, sizes: Sizes, precision: str, gpu: str | GpuPeaks, *, lengths: Lengths = None
) -> Analysis:
    """Count the FLOPs and bytes of a layer and its roofline bound; nothing is run.

    `gpu` is a name from `gpu_names()`, or the figures of another GPU.
    """
    gpu = gpu if isinstance(gpu, GpuPeaks) else find_peaks(gpu)
    cost = layer_cost(spec, sizes, find_precision(precision).bytes, lengths=lengths)
    bound = roofline_bound(cost, gpu, precision)
    return Analysis(spec=spec, sizes=dict(sizes), precision=precision, gpu=gpu, cost=cost, bound=bound)
