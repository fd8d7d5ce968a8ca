"""The roofline: the least time that the FLOPs and bytes of a stage need on a GPU.

This is a floor, not a prediction. Each stage takes at least as long as its FLOPs need at the peak rate, and
at least as long as its bytes need at full memory bandwidth. Launches, the softmax, imperfect tiles and clocks
below the boost clock come on top. Only one thing can beat it: operands that stay in cache from one stage, or
from one repetition of a benchmark, to the next, and so never cross the memory bus they are charged to.
"""

from __future__ import annotations

from dataclasses import dataclass

from mha_deploy.analyze.cost import LayerCost
from mha_deploy.analyze.gpus import Gpu
from mha_deploy.analyze.work import StageCost

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


def roofline_floor(cost: LayerCost, gpu: Gpu, precision: str, tokens: int) -> LayerFloor:
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
