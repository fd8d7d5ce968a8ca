"""Time every runtime over batches and lengths; a runtime that is wrong at a size gets no time there."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from mha_deploy.bundle.cases import GoldenCase, golden_cases
from mha_deploy.bundle.folder import Bundle
from mha_deploy.bundle.sizes import TimedPoint, bench_points, points_from_text
from mha_deploy.engine.engine import Engine
from mha_deploy.errors import DeployError
from mha_deploy.options import BenchOptions, OnName, Step, silent
from mha_deploy.runtime import child
from mha_deploy.runtime.cuda import open_gpu
from mha_deploy.runtime.gpu import measure_throughput
from mha_deploy.runtime.timing import TimingPlan
from mha_deploy.status import Kind, Outcome, Reason
from mha_deploy.text import reason_text
from mha_deploy.validation import evaluate, runtimes
from mha_deploy.validation.evaluate import WRONG, Evaluation, EvaluationPlan, LatencyPoint
from mha_deploy.validation.records import (
    BenchRecord,
    ThroughputRecord,
    TimesRecord,
    model_record,
    report_header,
)
from mha_deploy.validation.runtimes import Runtime, RuntimeFinder, Unavailable
from mha_deploy.validation.verdict import engines_in, latency_record


@dataclass(frozen=True, kw_only=True)
class ModelBench:
    """The times of one bundle."""

    bundle: Bundle  # what was timed
    engines: tuple[Engine, ...]  # its engines
    evaluations: tuple[Evaluation, ...]  # every runtime that could be opened
    absent: tuple[Unavailable, ...]  # the runtimes that were skipped, and why
    points: tuple[LatencyPoint, ...]  # the times, one point for every set of sizes
    throughput: tuple[ThroughputRecord, ...] = ()  # calls per second on several streams, where requested

    @property
    def wrong(self) -> bool:
        """Whether an engine gave a wrong answer anywhere."""
        rows = [row for point in self.points for row in point.rows if row.family == runtimes.TENSORRT]
        loads = [row for row in self.throughput if row.family == runtimes.TENSORRT]
        reasons = [*(row.refused for row in rows), *(row.reason for row in loads)]
        return any(reason.kind in WRONG for reason in reasons if reason is not None)

    @property
    def outcome(self) -> Outcome:
        """Failed where an engine gave a wrong answer; not verified where none was timed."""
        rows: list[Any] = [row for point in self.points for row in point.rows]
        timed = [row for row in rows if row.family == runtimes.TENSORRT and row.timing is not None]
        return Outcome.FAILED if self.wrong else Outcome.PASSED if timed else Outcome.NOT_VERIFIED

    @property
    def record(self) -> TimesRecord:
        """What a benchmark stores."""
        return TimesRecord(
            model=model_record(self.bundle),
            engines=engines_in(self.engines, self.absent, self.evaluations),
            latency=latency_record(self.points),
            throughput=self.throughput,
            absent=self.absent,
        )


def bench_record(benches: Sequence[ModelBench]) -> BenchRecord:
    """What `bench.json` stores."""
    return BenchRecord(**report_header(), models=tuple(bench.record for bench in benches))


def bench_bundle(
    bundle: Bundle, options: BenchOptions | None = None, *, on_step: OnName = silent
) -> ModelBench:
    """Time every runtime that can run here; refused without a GPU, or where a requested runtime cannot."""
    options = options or BenchOptions()
    open_gpu()  # what follows takes a while: say now that there is nothing to time on
    finder, spec = RuntimeFinder(bundle, engine=options.engine), bundle.manifest.spec
    if options.runtimes:
        found = [finder.named(name) for name in dict.fromkeys(options.runtimes)]
    else:  # behind a cache, ONNX Runtime's own attention operator is the one that people run
        cuda = ("ort-cuda",) if spec.cache == "none" else ("ort-cuda", "ort-cuda-contrib")
        found = [*finder.baselines(), *map(finder.named, cuda), *finder.running_engines()]
    on_step("cases and their FP64 oracle")
    plan = EvaluationPlan(
        spec=spec,
        precision=bundle.manifest.precision,
        cases={},
        timed=_cases(bundle, options),
        timing=TimingPlan(samples=options.samples, load_ms=500),
        kernels=options.kernels,
    )
    evaluated, rows = evaluate.evaluate_all(found, plan, on_step, strict=bool(options.runtimes))
    loads = list[ThroughputRecord]()
    for runtime, timed in zip(found, rows, strict=True) if options.streams else ():
        for case in plan.timed:
            row = ThroughputRecord(
                case=case.name, sizes=dict(case.sizes), name=runtime.name, family=runtime.family
            )
            if refused := timed[case.name].refused:
                loads.append(_refused(row, refused))
                continue
            on_step(Step(f"throughput of {runtime.name}", case.name))
            loads += _on_streams(runtime, row, case, plan, options.streams)
    return ModelBench(
        bundle=bundle,
        engines=tuple(finder.engines),
        evaluations=tuple(evaluated),
        absent=tuple(finder.absent),
        points=evaluate.latency_points(plan.timed, rows, bundle),
        throughput=tuple(loads),
    )


def _refused(row: ThroughputRecord, reason: Reason) -> ThroughputRecord:
    return structs.replace(row, reason=reason, refused=reason_text(reason))


def _on_streams(
    runtime: Runtime, row: ThroughputRecord, case: GoldenCase, plan: EvaluationPlan, streams: Sequence[int]
) -> Iterator[ThroughputRecord]:
    """A runtime that was right by itself, on several streams; judged again under that load."""
    family = child.PYTORCH if runtime.family == runtimes.PYTORCH else runtime.family
    call = (measure_throughput, runtime.open, dict(case.inputs), tuple(streams))
    try:  # in one child process: streams of several processes would alternate on the GPU
        step = f"running on {max(streams)} streams"
        found = child.call_isolated(family, *call, title=runtime.name, step=step)
    except DeployError as error:
        yield _refused(row, Reason(kind=Kind.NOT_TIMED, got=error.in_one_line))
        return
    for each in found:
        if problem := evaluate.problem_of(case, each.results, plan.precision):
            numbers = {"streams": each.streams}
            yield _refused(row, Reason(kind=Kind.WRONG_ON_STREAMS, got=problem, numbers=numbers))
        else:
            names = ("streams", "per_second", "p50_us", "p99_us")
            yield structs.replace(row, **{name: getattr(each, name) for name in names})


def _cases(bundle: Bundle, options: BenchOptions) -> list[GoldenCase]:
    """The cases to time, each once: golden ones where the sizes and lengths are theirs, else fresh ones."""

    def key(sizes: Mapping[str, int], lengths: Iterable[int]) -> Hashable:
        return tuple(sorted(sizes.items())), tuple(map(int, lengths))

    spec, wanted = bundle.manifest.spec, dict[Hashable, TimedPoint]()
    asked = [point for text in options.at for point in points_from_text(spec, text)]
    for point in asked if options.at else bench_points(spec):
        lengths = () if point.past is None else (point.past,) * point.sizes["B"]
        wanted.setdefault(key(point.sizes, lengths), point)
    golden = [case for case in golden_cases(bundle) if case.name != "ragged"]
    known = {key(case.sizes, case.inputs.get("lengths", ())): case for case in golden}
    if not wanted.keys() <= known.keys():
        hint = f"--at opt, or {runtimes.INSTALL}"
        runtimes.refuse_without_torch("at sizes that have no golden case", hint=hint)
        from mha_deploy.baselines.fresh import FreshCases

        fresh = FreshCases(bundle, device="cuda")
        for place, point in wanted.items():
            if place not in known:
                drawn = fresh.case(point.sizes, seed=options.seed, past=point.past)
                known[place] = replace(drawn, name=point.name)
    return [known[place] for place in wanted]
