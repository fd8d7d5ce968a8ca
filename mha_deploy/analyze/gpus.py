"""What GPUs can do at most, from `gpus.toml`."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mha_deploy.errors import DeployError, nearest
from mha_deploy.precision import find_precision

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
