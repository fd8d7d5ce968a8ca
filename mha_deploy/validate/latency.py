"""Latency: one time for every right answer, beside the roofline bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mha_deploy.analyze.cost import LayerCost, StageCost, layer_cost
from mha_deploy.analyze.roofline import Gpu as PeakFigures
from mha_deploy.analyze.roofline import find_gpu as find_peaks
from mha_deploy.analyze.roofline import roofline_bound
from mha_deploy.bundle.cases import GoldenCase
from mha_deploy.errors import DeployError
from mha_deploy.metrics import judge_case
from mha_deploy.model.precision import Precision
from mha_deploy.model.spec import ModelSpec
from mha_deploy.runtime.runner import Runner
from mha_deploy.runtime.timing import KernelTime, Timing, TimingPlan
from mha_deploy.validate.runtimes import PYTORCH

EAGER = "eager"
WRONG_ANSWER = "wrong answer"


@dataclass(frozen=True, kw_only=True)
class LatencyRow:
    """The time of one runtime at one point, or why it has none.

    Args:
        name: The runtime.
        backend: The runner's own name, with its version.
        family: Whose it is.
        timing: The time.
        refused: Why there is no time.
        kernels: The kernels that take the time, longest first, where requested.
    """

    name: str
    backend: str
    family: str
    timing: Timing | None = None
    refused: str | None = None
    kernels: tuple[KernelTime, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The least time that the work needs on this GPU, from its datasheet.

    Args:
        gpu: The short name of the GPU.
        bound_us: Least time, stage after stage.
        bound: What sets most of it: `compute` or `memory`.
        tflops_peak: Peak rate at this precision.
        gb_per_s_peak: Peak memory bandwidth.
    """

    gpu: str
    bound_us: float
    bound: str
    tflops_peak: float
    gb_per_s_peak: float


@dataclass(frozen=True, kw_only=True)
class LatencyPoint:
    """Every runtime at one set of sizes.

    Args:
        case: Name of the case that was timed.
        sizes: Its axis sizes.
        flops: Work of one call.
        bytes: Least traffic of one call.
        roofline: The floor; None for a GPU without figures.
        rows: One for every runtime.
        past: The most rows of a preallocated cache that are valid before the call; None for other layers.
        decoded: Tokens that one decode step brings, one for every row of the batch; None for other calls.
    """

    case: str
    sizes: Mapping[str, int]
    flops: int
    bytes: int
    roofline: Roofline | None
    rows: tuple[LatencyRow, ...]
    past: int | None = None
    decoded: int | None = None

    @property
    def best_pytorch(self) -> LatencyRow | None:
        """The fastest of PyTorch's ways."""
        timed = [row for row in self.rows if row.family == PYTORCH and row.timing]
        return min(timed, key=lambda row: row.timing.p50 if row.timing else 0.0, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; see docs/report.md."""
        return {
            "case": self.case,
            "sizes": dict(self.sizes),
            "past": self.past,
            "flops": self.flops,
            "bytes": self.bytes,
            "roofline": None if self.roofline is None else vars(self.roofline),
            "rows": [self._row_to_dict(row) for row in self.rows],
        }

    def _row_to_dict(self, row: LatencyRow) -> dict[str, Any]:
        return {
            "name": row.name,
            "backend": row.backend,
            "family": row.family,
            "refused": row.refused,
            "timing": None if row.timing is None else row.timing.to_dict(),
            **self.figures(row),
            "kernels": [vars(kernel) for kernel in row.kernels],
        }

    def figures(self, row: LatencyRow) -> dict[str, float | None]:
        """What the time of a row means: speed-ups, rates, and its share of the roofline."""
        if row.timing is None:
            names = (
                "speedup_over_eager",
                "speedup_over_best_pytorch",
                "tflops",
                "gb_per_s",
                "tokens_per_s",
                "roofline_share",
            )
            return dict.fromkeys(names)
        time, best = row.timing.p50, self.best_pytorch
        eager = next((other for other in self.rows if other.name == EAGER), None)
        return {
            "speedup_over_eager": _ratio(eager, row),
            "speedup_over_best_pytorch": _ratio(best, row),
            "tflops": self.flops / time / 1e6,
            "gb_per_s": self.bytes / time / 1e3,
            "tokens_per_s": None if self.decoded is None else self.decoded / time * 1e6,
            "roofline_share": None if self.roofline is None else self.roofline.bound_us / time,
        }


def _ratio(other: LatencyRow | None, row: LatencyRow) -> float | None:
    """How many times faster a row is than another, if both were timed on one device."""
    if other is None or other.timing is None or row.timing is None or other.timing.gpu != row.timing.gpu:
        return None
    return other.timing.p50 / row.timing.p50


def latency_point(
    case: GoldenCase, rows: Sequence[LatencyRow], spec: ModelSpec, precision: Precision
) -> LatencyPoint:
    """Put the rows of one case together with what the work needs at least.

    The work behind a preallocated cache is that of the case's own lengths.
    """
    lengths = case.inputs["lengths"].tolist() if spec.cache == "preallocated" else None
    cost = _cost(case, spec, precision, lengths)
    gpus = {row.timing.gpu for row in rows if row.timing}
    peaks = _peaks(gpus.pop()) if len(gpus) == 1 else None
    return LatencyPoint(
        case=case.name,
        sizes=case.sizes,
        flops=cost.flops,
        bytes=cost.bytes,
        roofline=None if peaks is None else _roofline(cost, case.sizes, precision, peaks),
        rows=tuple(rows),
        past=None if lengths is None else max(lengths),
        decoded=case.sizes["B"] if spec.cache != "none" and case.sizes["S"] == 1 else None,
    )


def _cost(
    case: GoldenCase, spec: ModelSpec, precision: Precision, lengths: list[int] | None
) -> LayerCost:
    """What a call must do; of a module, all that PyTorch counts, with every weight read once."""
    if spec.layer is not None:
        return layer_cost(spec.layer, case.sizes, precision.bytes, lengths=lengths)
    moved = sum(array.nbytes for array in (*case.inputs.values(), *case.eager.values()))
    whole = StageCost(
        name=spec.name, growth="", parameters=0, flops=case.flops, bytes=spec.weight_bytes + moved
    )
    return LayerCost(stages=(whole,))


def _peaks(gpu: str) -> PeakFigures | None:
    try:
        return find_peaks(gpu)
    except DeployError:
        return None


def _roofline(
    cost: LayerCost, sizes: Mapping[str, int], precision: Precision, peaks: PeakFigures
) -> Roofline:
    floor = roofline_bound(cost, peaks, precision.name, tokens=sizes.get("B", 1) * sizes.get("S", 1))
    shares: dict[str, float] = {}
    for stage in floor.stages:
        shares[stage.bound_by] = shares.get(stage.bound_by, 0.0) + stage.seconds
    return Roofline(
        gpu=peaks.name,
        bound_us=floor.seconds * 1e6,
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
    samples: int,
    kernels: Callable[[Runner, GoldenCase], tuple[KernelTime, ...]] | None = None,
) -> LatencyRow:
    """Time a runner on a case, if its answer is right before and after.

    Args:
        runner: Who is timed.
        case: With what.
        precision: Sets the error budget.
        row: The row to complete.
        samples: How many samples.
        kernels: Reports which kernels take the time; None where not requested.
    """
    try:
        problem = problem_of(case, [runner.run(case.inputs)], precision)
        if problem is not None:
            return replace(row, refused=f"{WRONG_ANSWER}: {problem}")
        timing = runner.time(case.inputs, TimingPlan(samples=samples))
        problem = problem_of(case, timing.results, precision)
        if problem is not None:
            return replace(row, refused=f"{WRONG_ANSWER} while it was timed: {problem}")
    except DeployError as error:
        return replace(row, refused=error.in_one_line)
    timed = replace(row, timing=replace(timing, results=()))  # judged: caches among them may be gigabytes
    try:
        return replace(timed, kernels=kernels(runner, case)) if kernels else timed
    except DeployError:  # no profiler here: the time stands without its kernels
        return timed


def problem_of(case: GoldenCase, results: Sequence[Mapping[str, Any]], precision: Precision) -> str | None:
    """The first wrong output among several results of a case."""
    for result in results:
        for verdict in judge_case(case, result, precision):
            if verdict.is_wrong:
                return f"{verdict.output}: {verdict.problem}"
    return None
