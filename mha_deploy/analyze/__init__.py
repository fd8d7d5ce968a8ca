"""What a layer costs before it is built: closed-form counts, the roofline, and how alike its heads are.

Importing this package needs neither torch, matplotlib nor rich. `similarity` (torch and matplotlib inside
its functions), `inputs` and `render` (rich) are imported by whoever needs them.
"""

from __future__ import annotations

from mha_deploy.analyze.cost import (
    LayerCost,
    StageCost,
    kv_cache_bytes,
    kv_cache_bytes_per_token,
    layer_cost,
    parameter_count,
)
from mha_deploy.analyze.roofline import (
    Analysis,
    Gpu,
    LayerFloor,
    StageFloor,
    analyze,
    find_gpu,
    gpu_names,
    roofline_bound,
)

__all__ = [
    "Analysis",
    "Gpu",
    "LayerCost",
    "LayerFloor",
    "StageCost",
    "StageFloor",
    "analyze",
    "find_gpu",
    "gpu_names",
    "kv_cache_bytes",
    "kv_cache_bytes_per_token",
    "layer_cost",
    "parameter_count",
    "roofline_bound",
]
