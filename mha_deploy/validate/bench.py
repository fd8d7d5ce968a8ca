"""Time every runtime over batches and lengths; a runtime that is wrong at a size gets no time there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mha_deploy.analyze.cost import TimedPoint, points_from_text
from mha_deploy.bundle.cases import GoldenCase, golden_cases
from mha_deploy.bundle.folder import Bundle
from mha_deploy.engine.manifest import Engine
from mha_deploy.errors import DeployError
from mha_deploy.model.spec import ModelSpec
from mha_deploy.options import BenchOptions
from mha_deploy.runtime import child
from mha_deploy.runtime.child import isolation
from mha_deploy.runtime.cuda import open_gpu
from mha_deploy.runtime.runner import Arrays
from mha_deploy.runtime.throughput import Throughput, measure_throughput
from mha_deploy.validate.evaluate import Evaluation, EvaluationPlan, evaluate, refused_rows
from mha_deploy.validate.latency import WRONG_ANSWER, LatencyPoint, LatencyRow, latency_point, problem_of
from mha_deploy.validate.runtimes import (
    INSTALL,
    ONNX_RUNTIME,
    PYTORCH,
    TENSORRT,
    Runtime,
    RuntimeFinder,
    Unavailable,
    kernel_times,
    refuse_without_torch,
)
from mha_deploy.validate.sweep import bench_points
from mha_deploy.validate.verdict import engines_to_dict, frame, latency_to_dict, model_to_dict

OnStep = Callable[[str], None]
Key = tuple[tuple[tuple[str, int], ...], tuple[int, ...]]  # sizes, and the lengths of a preallocated cache


@dataclass(frozen=True, kw_only=True)
class ThroughputRow:
    """Calls per second of one runtime at one size, or why there are none."""

    case: str
    sizes: Mapping[str, int]
    name: str
    family: str
    measured: Throughput | None = None
    refused: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; see docs/report.md."""
        names = ("streams", "per_second", "p50_us", "p99_us")
        return {
            **{name: getattr(self, name) for name in ("case", "name", "family", "refused")},
            "sizes": dict(self.sizes),
            **{name: getattr(self.measured, name, None) for name in names},
        }


@dataclass(frozen=True, kw_only=True)
class ModelBench:
    """The times of one bundle.

    Args:
        bundle: What was timed.
        engines: Its engines.
        evaluations: Every runtime that could be opened.
        absent: Who could not take part, and why.
        points: The times, one point for every set of sizes.
        throughput: Calls per second on several streams, where requested.
    """

    bundle: Bundle
    engines: tuple[Engine, ...]
    evaluations: tuple[Evaluation, ...]
    absent: tuple[Unavailable, ...]
    points: tuple[LatencyPoint, ...]
    throughput: tuple[ThroughputRow, ...] = ()

    @property
    def wrong(self) -> bool:
        """Whether an engine gave a wrong answer anywhere."""
        timed = [row for point in self.points for row in point.rows]
        rows: list[LatencyRow | ThroughputRow] = [*timed, *self.throughput]
        refused = [row.refused for row in rows if row.family == TENSORRT and row.refused is not None]
        return any(reason.startswith(WRONG_ANSWER) for reason in refused)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; see docs/report.md."""
        return {
            "model": model_to_dict(self.bundle),
            "engines": engines_to_dict(self.engines, self.absent, self.evaluations),
            "latency": latency_to_dict(self.points),
            "throughput": [row.to_dict() for row in self.throughput],
        }


def bench_to_dict(benches: Sequence[ModelBench]) -> dict[str, Any]:
    """Plain data for JSON; see docs/report.md."""
    absent = dict.fromkeys(
        f"{bench.bundle.manifest.spec.name}: {each.name} did not take part: {each.reason}"
        for bench in benches
        for each in bench.absent
    )
    return {**frame(), "models": [bench.to_dict() for bench in benches], "notes": list(absent)}


def bench_bundle(
    bundle: Bundle, options: BenchOptions | None = None, *, on_step: OnStep = lambda name: None
) -> ModelBench:
    """Time every runtime that can run here.

    Raises:
        BackendUnavailable: There is no GPU, or a runtime that was requested by name cannot run here.
    """
    options = options or BenchOptions()
    open_gpu()  # what follows takes a while: say now that there is nothing to time on
    finder = RuntimeFinder(bundle, engine=options.engine)
    runtimes = _participants(finder, options)
    on_step("cases and their FP64 oracle")
    cases = _cases(bundle, options)
    plan = EvaluationPlan(
        spec=bundle.manifest.spec,
        precision=bundle.manifest.precision,
        cases={},
        timed=cases,
        samples=options.samples,
        kernels=kernel_times if options.kernels else None,
    )
    evaluated, rows = _time_everyone(runtimes, plan, options, on_step)
    return ModelBench(
        bundle=bundle,
        engines=tuple(finder.engines),
        evaluations=tuple(evaluated),
        absent=tuple(finder.absent),
        points=points_from_rows(cases, rows, bundle),
        throughput=tuple(_throughput(runtimes, rows, plan, options, on_step)),
    )


def _throughput(
    runtimes: Sequence[Runtime],
    rows: Sequence[Mapping[str, LatencyRow]],
    plan: EvaluationPlan,
    options: BenchOptions,
    on_step: OnStep,
) -> Iterator[ThroughputRow]:
    """Every runtime that was right by itself, on several streams; judged again under that load."""
    if not options.streams:
        return
    for runtime, timed in zip(runtimes, rows, strict=True):
        for case in plan.timed:
            row = ThroughputRow(case=case.name, sizes=case.sizes, name=runtime.name, family=runtime.family)
            if timed[case.name].refused is not None:
                yield replace(row, refused=timed[case.name].refused)
                continue
            on_step(f"throughput of {runtime.name}: {case.name}")
            try:
                found = measured_apart(runtime, case.inputs, options.streams)
            except DeployError as error:
                yield replace(row, refused=error.in_one_line)
                continue
            for each in found:
                problem = problem_of(case, each.results, plan.precision)
                if problem is not None:
                    reason = f"{WRONG_ANSWER} on {each.streams} streams: {problem}"
                    yield replace(row, refused=reason)
                else:
                    yield replace(row, measured=replace(each, results=()))


def measured_apart(runtime: Runtime, feeds: Arrays, streams: Sequence[int]) -> tuple[Throughput, ...]:
    """Measure in one child process: the streams of several processes would take turns on the GPU."""
    if not isolation.enabled:
        return measure_throughput(runtime.open, feeds, streams)
    family = {PYTORCH: child.PYTORCH, ONNX_RUNTIME: child.ONNX_RUNTIME}.get(runtime.family, child.TENSORRT)
    step = f"running on {max(streams)} streams"
    call = (measure_throughput, runtime.open, dict(feeds), tuple(streams))
    return child.call_isolated(family, *call, title=runtime.name, step=step)


def points_from_rows(
    cases: Sequence[GoldenCase], rows: Sequence[Mapping[str, LatencyRow]], bundle: Bundle
) -> tuple[LatencyPoint, ...]:
    """One point for every case: the rows of all runtimes."""
    manifest = bundle.manifest
    return tuple(
        latency_point(case, [each[case.name] for each in rows], manifest.spec, manifest.precision)
        for case in cases
    )


def _time_everyone(
    runtimes: Sequence[Runtime], plan: EvaluationPlan, options: BenchOptions, on_step: OnStep
) -> tuple[list[Evaluation], list[dict[str, LatencyRow]]]:
    evaluated: list[Evaluation] = []
    rows: list[dict[str, LatencyRow]] = []
    for runtime in runtimes:
        try:
            evaluated.append(evaluate(runtime, plan, on_step))
            rows.append(evaluated[-1].rows)
        except DeployError as error:
            if options.backends:
                raise
            rows.append(refused_rows(runtime, error.in_one_line, plan.timed))
    return evaluated, rows


def _participants(finder: RuntimeFinder, options: BenchOptions) -> list[Runtime]:
    if options.backends:
        return [finder.named(name) for name in dict.fromkeys(options.backends)]
    # Behind a cache, ONNX Runtime's own attention operator is the one that people run.
    cached = finder.bundle.manifest.spec.cache != "none"
    runtimes = ("ort-cuda", "ort-cuda-contrib") if cached else ("ort-cuda",)
    return [*finder.baselines(), *map(finder.named, runtimes), *finder.running_engines()]


def _cases(bundle: Bundle, options: BenchOptions) -> list[GoldenCase]:
    """The cases to time: golden ones where the sizes and lengths are theirs, fresh ones for all others."""
    known = {_key_of(case): case for case in golden_cases(bundle) if case.name != "ragged"}
    wanted = _wanted(bundle.manifest.spec, options.at)
    if all(_key(point) in known for point in wanted):
        return [known[_key(point)] for point in wanted]
    draw = _fresh(bundle, options.seed)
    return [known.get(_key(point)) or replace(draw(point), name=point.name) for point in wanted]


def _wanted(spec: ModelSpec, at: Sequence[str]) -> list[TimedPoint]:
    """The points to time, each once, under the first name that it was requested by."""
    points = [point for text in at for point in points_from_text(spec, text)] if at else bench_points(spec)
    found: dict[Key, TimedPoint] = {}
    for point in points:
        found.setdefault(_key(point), point)
    return list(found.values())


def _key(point: TimedPoint) -> Key:
    lengths = () if point.past is None else (point.past,) * point.sizes["B"]
    return tuple(sorted(point.sizes.items())), lengths


def _key_of(case: GoldenCase) -> Key:
    lengths = tuple(int(length) for length in case.inputs.get("lengths", ()))
    return tuple(sorted(case.sizes.items())), lengths


def _fresh(bundle: Bundle, seed: int) -> Callable[[TimedPoint], GoldenCase]:
    refuse_without_torch("at sizes that have no golden case", hint=f"--at opt, or {INSTALL}")
    from mha_deploy.baselines.fresh import fresh_cases

    fresh = fresh_cases(bundle, device="cuda")
    return lambda point: fresh.case(point.sizes, seed=seed, past=point.past)
