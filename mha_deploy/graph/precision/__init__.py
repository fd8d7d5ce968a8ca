"""Write a float32 graph in FP16, and keep wider only what FP16 cannot hold.

    ranges = measure_ranges(model, cases)        # mha_deploy.runtime.ranges: runs the graph
    plan = plan_precision(model, ranges)         # which nodes stay wider, and why
    mixed = apply_plan(model, plan)              # the graph, with Casts at the borders only

Attention stays one `Attention` node, whatever its type.
"""

from __future__ import annotations

from mha_deploy.graph.precision.plan import MARGIN, plan_precision
from mha_deploy.graph.precision.ranges import (
    Clamped,
    KeptNode,
    KeptTensor,
    PrecisionPlan,
    RangeMeter,
    Ranges,
    ValueRange,
)
from mha_deploy.graph.precision.write import apply_plan

__all__ = [
    "MARGIN",
    "Clamped",
    "KeptNode",
    "KeptTensor",
    "PrecisionPlan",
    "RangeMeter",
    "Ranges",
    "ValueRange",
    "apply_plan",
    "plan_precision",
]
