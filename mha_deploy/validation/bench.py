"""Time every runtime over batches and lengths; a runtime that is wrong at a size gets no time there."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from mha_deploy.analysis import cost
from mha_deploy.bundle.cases import GoldenCase, golden_cases
from mha_deploy.bundle.folder import Bundle
from mha_deploy.engine.engine import Engine
from mha_deploy.errors import DeployError
from mha_deploy.model.spec import Axis, ModelSpec
from mha_deploy.options import BenchOptions
from mha_deploy.runtime import child
from mha_deploy.runtime.cuda import open_gpu
from mha_deploy.runtime.gpu import measure_throughput
from mha_deploy.runtime.timing import TimingPlan
from mha_deploy.status import Kind, Outcome, Reason
from mha_deploy.text import reason_text
from mha_deploy.validation import evaluate, runtimes
from mha_deploy.validation.evaluate import WRONG, Evaluation, EvaluationPlan, LatencyPoint, OnStep
from mha_deploy.validation.records import (
    BenchRecord,
    ThroughputRecord,
    TimesRecord,
    model_record,
    report_header,
)
from mha_deploy.validation.runtimes import Runtime, RuntimeFinder, Unavailable
from mha_deploy.validation.verdict import engines_in, latency_record

_MOST_STEPS = 6  # a grid has at most this many batches and as many lengths
_ORACLE_CACHE_BYTES = 16 << 30  # what the cache of a grid's point may take in the memory of an FP64 oracle


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
        )


def bench_record(benches: Sequence[ModelBench]) -> BenchRecord:
    """What `bench.json` stores."""
    absent = [(bench.bundle.manifest.spec.name, each) for bench in benches for each in bench.absent]
    notes = tuple(dict.fromkeys(f"{name}: {each.sentence}" for name, each in absent))
    return BenchRecord(**report_header(), models=tuple(bench.record for bench in benches), notes=notes)


def bench_bundle(
    bundle: Bundle, options: BenchOptions | None = None, *, on_step: OnStep = lambda name: None
) -> ModelBench:
    """Time every runtime that can run here; refused without a GPU, or where a requested runtime cannot."""
    options = options or BenchOptions()
    open_gpu()  # what follows takes a while: say now that there is nothing to time on
    finder, spec = RuntimeFinder(bundle, engine=options.engine), bundle.manifest.spec
    if options.backends:
        found = [finder.named(name) for name in dict.fromkeys(options.backends)]
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
    evaluated, rows = evaluate.evaluate_all(found, plan, on_step, strict=bool(options.backends))
    loads = list[ThroughputRecord]()
    for runtime, timed in zip(found, rows, strict=True) if options.streams else ():
        for case in plan.timed:
            about: dict[str, Any] = {"case": case.name, "sizes": dict(case.sizes)}
            row = ThroughputRecord(**about, name=runtime.name, family=runtime.family)
            if refused := timed[case.name].refused:
                loads.append(_refused(row, refused))
                continue
            on_step(f"throughput of {runtime.name}: {case.name}")
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

    spec, wanted = bundle.manifest.spec, dict[Hashable, cost.TimedPoint]()
    asked = [point for text in options.at for point in cost.points_from_text(spec, text)]
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


def bench_points(spec: ModelSpec) -> tuple[cost.TimedPoint, ...]:
    """A grid of batches and lengths to time, powers of two, with the usual points always in it.

    A layer with a cache is timed at its decode step: over batches and past lengths of a dynamic cache, over
    batches alone of a preallocated one, which is full. Cross attention has S and T of the same length where
    both vary. Points whose cache an FP64 oracle has no room for are left out.
    """
    usual = cost.usual_points(spec)
    found = {(point.past, *point.sizes.items()): point for point in usual}
    # The axes that a length is for: those that vary, or all where none does; for a step, the cache's own.
    lengths = [name for name in spec.axes if name != "B"]
    names = [name for name in lengths if spec.axes[name].is_dynamic] or lengths
    names = {"none": names, "dynamic": ["P"]}.get(spec.cache, ["T"])
    axes = [spec.axes[name] for name in names]
    smallest, largest = min(axis.min for axis in axes), max(axis.max for axis in axes)
    for B in _powers(spec.axes["B"]):
        for length in _powers(Axis(min=smallest, opt=axes[0].opt, max=largest)):
            clipped = {name: max(spec.axes[name].min, min(length, spec.axes[name].max)) for name in names}
            sizes = {**usual[-1].sizes, "B": B, **clipped}
            spec.check_sizes(sizes)
            if cost.oracle_cache_bytes(spec, sizes) <= _ORACLE_CACHE_BYTES:
                point = cost.with_full_cache(spec, cost.sizes_name(sizes), sizes)
                found.setdefault((point.past, *point.sizes.items()), point)
    short_first = sorted(found.values(), key=lambda each: ([each.sizes[x] for x in lengths], each.sizes["B"]))
    return tuple(short_first)


def _powers(axis: Axis) -> list[int]:
    """Powers of two in a range, thinned to a few; the usual size where there is none."""
    powers = [2**k for k in range(axis.max.bit_length()) if axis.min <= 2**k <= axis.max] or [axis.opt]
    return cost.spread(powers, _MOST_STEPS)
