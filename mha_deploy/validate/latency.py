"""Latency: one time for every right answer, beside the roofline bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mha_deploy.analyze.cost import LayerCost, StageCost, cost_of, layer_cost
from mha_deploy.analyze.roofline import find_gpu as find_peaks
from mha_deploy.analyze.roofline import roofline_bound
from mha_deploy.bundle.cases import GoldenCase
from mha_deploy.bundle.folder import Bundle
from mha_deploy.errors import DeployError
from mha_deploy.metrics import judge_case, same_bits
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import ModelSpec
from mha_deploy.runtime.runner import Runner
from mha_deploy.runtime.timing import KernelTime, Timing, TimingPlan
from mha_deploy.validate.runtimes import PYTORCH

EAGER = "eager"
WRONG_ANSWER = "wrong answer"


@dataclass(frozen=True, kw_only=True)
class LatencyRow:
    """The time of one runtime at one point, or why it has none."""

    name: str  # the runtime
    backend: str  # the runner's own name, with its version
    family: str  # whose it is
    timing: Timing | None = None  # the time
    refused: str | None = None  # why there is no time
    kernels: tuple[KernelTime, ...] = ()  # the kernels that take the time, longest first, where requested


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The least time that the work needs on this GPU, from its datasheet."""

    gpu: str  # the short name of the GPU
    bound_us: float  # least time, stage after stage
    bound: str  # what sets most of it: `compute` or `memory`
    tflops_peak: float  # peak rate at this precision
    gb_per_s_peak: float  # peak memory bandwidth


@dataclass(frozen=True, kw_only=True)
class LatencyPoint:
    """Every runtime at one set of sizes."""

    case: str  # name of the case that was timed
    sizes: Mapping[str, int]  # its axis sizes
    flops: int  # work of one call
    bytes: int  # least traffic of one call
    roofline: Roofline | None  # None for a GPU without figures
    rows: tuple[LatencyRow, ...]  # one for every runtime
    # The most entries of a preallocated KV cache that are valid before the call; None for other layers
    past: int | None = None
    # Tokens that one decode step brings, one for every batch element; None for other calls
    decoded: int | None = None

    @property
    def best_pytorch(self) -> LatencyRow | None:
        """The fastest of PyTorch's baselines."""
        timed = [row for row in self.rows if row.family == PYTORCH and row.timing]
        return min(timed, key=lambda row: row.timing.p50 if row.timing else 0.0, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; see docs/report.md."""
        rows = [
            {
                **{name: getattr(row, name) for name in ("name", "backend", "family", "refused")},
                "timing": None if row.timing is None else row.timing.to_dict(),
                **self.figures(row),
                "kernels": [vars(kernel) for kernel in row.kernels],
            }
            for row in self.rows
        ]
        plain = {name: getattr(self, name) for name in ("case", "sizes", "past", "flops", "bytes")}
        return {**plain, "roofline": None if self.roofline is None else vars(self.roofline), "rows": rows}

    def figures(self, row: LatencyRow) -> dict[str, float | None]:
        """What the time of a row means: speed-ups, rates, and its share of the roofline."""
        time = None if row.timing is None else row.timing.p50
        eager = next((each for each in self.rows if each.name == EAGER), None)

        def speedup_over(other: LatencyRow | None) -> float | None:
            """How many times faster it is than another, if both were timed on one device."""
            if other is None or other.timing is None or row.timing is None:
                return None
            return other.timing.p50 / row.timing.p50 if other.timing.gpu == row.timing.gpu else None

        return {
            "speedup_over_eager": speedup_over(eager),
            "speedup_over_best_pytorch": speedup_over(self.best_pytorch),
            "tflops": time and self.flops / time / 1e6,
            "gb_per_s": time and self.bytes / time / 1e3,
            "tokens_per_s": time and self.decoded and self.decoded / time * 1e6,
            "roofline_share": self.roofline.bound_us / time if time and self.roofline else None,
        }


@dataclass(frozen=True, kw_only=True)
class LoadPoint:
    """How a server did under the load of some clients."""

    clients: int  # how many clients sent requests at the same time
    requests: int  # requests that were to be answered
    latencies_ms: tuple[float, ...]  # the time of every answer, as the client sees it
    # How many requests failed, by kind: `error`, `timeout`, `unreachable`, `not sent`
    errors: Mapping[str, int]
    first_error: str | None  # the first of them, in words
    seconds: float  # from the first request to the last answer
    judged: int  # outputs that were judged
    wrong: int  # outputs that were wrong

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; see docs/report.md."""
        answered, shares = len(self.latencies_ms), (50, 90, 99)
        times = np.percentile(self.latencies_ms, shares).tolist() if answered else [None] * 3
        return {
            "clients": self.clients,
            "requests": self.requests,
            "answered": answered,
            "errors": dict(self.errors),
            "first_error": self.first_error,
            "per_second": answered / self.seconds if self.seconds > 0 else None,
            **{f"p{share}_ms": time for share, time in zip(shares, times, strict=True)},
            "judged": self.judged,
            "wrong": self.wrong,
        }


def latency_points(
    cases: Sequence[GoldenCase], rows: Sequence[Mapping[str, LatencyRow]], bundle: Bundle
) -> tuple[LatencyPoint, ...]:
    """One point for every case: the rows of all runtimes."""
    spec, precision = bundle.manifest.spec, bundle.manifest.precision
    return tuple(latency_point(case, [each[case.name] for each in rows], spec, precision) for case in cases)


def latency_point(
    case: GoldenCase, rows: Sequence[LatencyRow], spec: ModelSpec, precision: Precision
) -> LatencyPoint:
    """Put the rows of one case together with what the work needs at least.

    The work behind a preallocated cache is that of the case's own lengths.
    """
    lengths = case.inputs["lengths"].tolist() if spec.cache == "preallocated" else None
    if spec.layer is not None:
        cost = layer_cost(spec.layer, case.sizes, precision.bytes, lengths=lengths)
    else:  # all that PyTorch counts, with every weight read once
        moved = sum(array.nbytes for array in (*case.inputs.values(), *case.eager.values()))
        moved += spec.weight_bytes
        whole = StageCost(name=spec.name, growth="", parameters=0, flops=case.flops, bytes=moved)
        cost = cost_of(whole)
    gpus = {row.timing.gpu for row in rows if row.timing}
    return LatencyPoint(
        case=case.name,
        sizes=case.sizes,
        flops=cost.flops,
        bytes=cost.bytes,
        roofline=_roofline(cost, case.sizes, precision, gpus.pop()) if len(gpus) == 1 else None,
        rows=tuple(rows),
        past=None if lengths is None else max(lengths),
        decoded=case.sizes["B"] if spec.cache != "none" and case.sizes["S"] == 1 else None,
    )


def _roofline(cost: LayerCost, sizes: Mapping[str, int], precision: Precision, gpu: str) -> Roofline | None:
    try:
        peaks = find_peaks(gpu)
    except DeployError:  # its datasheet is not known
        return None
    least = roofline_bound(cost, peaks, precision.name, tokens=sizes.get("B", 1) * sizes.get("S", 1))
    shares: dict[str, float] = {}
    for stage in least.stages:
        shares[stage.bound_by] = shares.get(stage.bound_by, 0.0) + stage.seconds
    return Roofline(
        gpu=peaks.name,
        bound_us=least.seconds * 1e6,
        bound=max(shares, key=lambda name: shares[name]),
        tflops_peak=peaks.peak_flops(precision.name) / 1e12,
        gb_per_s_peak=peaks.memory_gb_per_s,
    )


def time_case(
    runner: Runner,
    case: GoldenCase,
    precision: Precision,
    row: LatencyRow,
    *,
    timing: TimingPlan,
    kernels: Callable[[Runner, GoldenCase], tuple[KernelTime, ...]] | None = None,
) -> LatencyRow:
    """Time a runner on a case, if its answer is right before and after."""
    try:
        first = runner.run(case.inputs)
        if problem := problem_of(case, [first], precision):
            return replace(row, refused=f"{WRONG_ANSWER}: {problem}")
        timed = runner.time(case.inputs, timing)
        # Most kernels repeat their results, and judging gigabytes of cache takes long.
        others = [result for result in timed.results if not same_bits(result, first)]
        if problem := problem_of(case, others, precision):
            return replace(row, refused=f"{WRONG_ANSWER} while it was timed: {problem}")
    except DeployError as error:
        return replace(row, refused=error.in_one_line)
    row = replace(row, timing=replace(timed, results=()))  # judged: caches among them may be gigabytes
    try:
        return replace(row, kernels=kernels(runner, case)) if kernels else row
    except DeployError:  # no profiler here: the time stands without its kernels
        return row


def problem_of(case: GoldenCase, results: Sequence[Mapping[str, Any]], precision: Precision) -> str | None:
    """The first wrong output among several results of a case."""
    verdicts = (verdict for result in results for verdict in judge_case(case, result, precision))
    return next((f"{each.output}: {each.problem}" for each in verdicts if each.is_wrong), None)
