"""The front door: one layer at one set of sizes, in one precision, under the roofline of one GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mha_deploy.analyze.cost import LayerCost, kv_cache_bytes, kv_cache_bytes_per_token, layer_cost
from mha_deploy.analyze.gpus import Gpu, find_gpu
from mha_deploy.analyze.roofline import LayerFloor, roofline_floor
from mha_deploy.analyze.work import key_length
from mha_deploy.precision import find_precision
from mha_deploy.spec import AttentionSpec, Sizes


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
        floor=roofline_floor(cost, figures, precision, tokens=sizes["B"] * sizes["S"]),
        kv_bytes_per_token=kv_cache_bytes_per_token(spec, element),
        kv_bytes=kv_cache_bytes(spec, sizes["B"], key_length(spec, sizes), element),
    )
