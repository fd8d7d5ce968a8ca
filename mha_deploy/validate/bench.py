"""Time everyone over batches and lengths. No time without a right answer, at every single size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mha_deploy.analyze.sizes import sizes_name
from mha_deploy.backends.cuda import open_gpu
from mha_deploy.bundle import Bundle
from mha_deploy.engine.record import Engine
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.golden import GoldenCase, golden_cases
from mha_deploy.spec import AttentionSpec
from mha_deploy.validate.examine import Exam, Examination, examine, refused_rows
from mha_deploy.validate.latency import WRONG_ANSWER, LatencyPoint, LatencyRow, latency_point
from mha_deploy.validate.options import ValidateOptions
from mha_deploy.validate.participants import TENSORRT, Absent, Casting, Participant
from mha_deploy.validate.profile import kernel_times
from mha_deploy.validate.report import engines_to_dict, frame, latency_to_dict, model_to_dict
from mha_deploy.validate.sweep import bench_points
from mha_deploy.versions import can_import

OnStep = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to time.

    Args:
        at: Sizes such as `B=8,S=128`, or `opt`; a sweep over batches and lengths unless given.
        backends: Who takes part, by name; everyone that can run here unless given.
        engine: Name of the one engine to run; all of the bundle's unless given.
        samples: Samples of each timing.
        kernels: Whether to say which kernels take the time.
        seed: Seed of the inputs.
    """

    at: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    engine: str | None = None
    samples: int = ValidateOptions.samples
    kernels: bool = False
    seed: int = 1


@dataclass(frozen=True, kw_only=True)
class ModelBench:
    """The times of one bundle.

    Args:
        bundle: What was timed.
        engines: Its engines.
        examinations: Everyone who could be opened.
        absent: Who could not take part, and why.
        points: The times, one point for every set of sizes.
    """

    bundle: Bundle
    engines: tuple[Engine, ...]
    examinations: tuple[Examination, ...]
    absent: tuple[Absent, ...]
    points: tuple[LatencyPoint, ...]

    @property
    def wrong(self) -> bool:
        """Whether an engine gave a wrong answer anywhere."""
        rows = [row for point in self.points for row in point.rows if row.family == TENSORRT]
        return any(row.refused is not None and row.refused.startswith(WRONG_ANSWER) for row in rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; see docs/report.md."""
        return {
            "model": model_to_dict(self.bundle),
            "engines": engines_to_dict(self.engines, self.absent, self.examinations),
            "latency": latency_to_dict(self.points),
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
    """Time everyone who can take part.

    Raises:
        BackendUnavailable: There is no GPU, or somebody who was asked for by name cannot run here.
    """
    options = options or BenchOptions()
    open_gpu()  # what follows takes a while: say now that there is nothing to time on
    casting = Casting(bundle, engine=options.engine)
    participants = _participants(casting, options)
    on_step("cases and their FP64 oracle")
    cases = _cases(bundle, options)
    exam = Exam(
        spec=bundle.manifest.spec,
        precision=bundle.manifest.precision,
        cases={},
        timed=cases,
        samples=options.samples,
        kernels=kernel_times if options.kernels else None,
    )
    examined, rows = _time_everyone(participants, exam, options, on_step)
    return ModelBench(
        bundle=bundle,
        engines=tuple(casting.engines),
        examinations=tuple(examined),
        absent=tuple(casting.absent),
        points=points_from_rows(cases, rows, bundle),
    )


def points_from_rows(
    cases: Sequence[GoldenCase], rows: Sequence[Mapping[str, LatencyRow]], bundle: Bundle
) -> tuple[LatencyPoint, ...]:
    """One point for every case: the rows that everyone has for it."""
    manifest = bundle.manifest
    return tuple(
        latency_point(case, [each[case.name] for each in rows], manifest.spec, manifest.precision)
        for case in cases
    )


def _time_everyone(
    participants: Sequence[Participant], exam: Exam, options: BenchOptions, on_step: OnStep
) -> tuple[list[Examination], list[dict[str, LatencyRow]]]:
    examined: list[Examination] = []
    rows: list[dict[str, LatencyRow]] = []
    for participant in participants:
        try:
            examined.append(examine(participant, exam, on_step))
            rows.append(examined[-1].rows)
        except DeployError as error:
            if options.backends:
                raise
            rows.append(refused_rows(participant, error.in_one_line, exam.timed))
    return examined, rows


def _participants(casting: Casting, options: BenchOptions) -> list[Participant]:
    if options.backends:
        return [casting.named(name) for name in dict.fromkeys(options.backends)]
    return [*casting.baselines(), casting.named("ort-cuda"), *casting.running_engines()]


def _cases(bundle: Bundle, options: BenchOptions) -> list[GoldenCase]:
    """The cases to time: golden ones where the sizes are theirs, fresh ones for all others."""
    spec = bundle.manifest.spec
    golden = list(golden_cases(bundle))
    known = {_key(case.sizes): case for case in golden if case.name != "ragged"}
    wanted = _wanted(spec, options.at)
    if all(_key(sizes) in known for sizes in wanted):
        return [known[_key(sizes)] for sizes in wanted]
    draw = _fresh(bundle, options.seed)
    return [known.get(_key(sizes)) or replace(draw(sizes), name=sizes_name(sizes)) for sizes in wanted]


def _wanted(spec: AttentionSpec, at: Sequence[str]) -> list[Mapping[str, int]]:
    if not at:
        return [point.sizes for point in bench_points(spec)]
    return [spec.sizes("opt") if text == "opt" else spec.parse_sizes(text) for text in at]


def _key(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(sizes.items()))


def _fresh(bundle: Bundle, seed: int) -> Callable[[Mapping[str, int]], GoldenCase]:
    if not can_import("torch"):
        raise BackendUnavailable(
            "Only PyTorch can tell what is true at sizes that have no golden case.",
            got="PyTorch is not installed",
            hint='--at opt, or pip install "mha-deploy[export]"',
        )
    from mha_deploy.baselines.fresh import FreshCases

    fresh = FreshCases(bundle, device="cuda")
    return lambda sizes: fresh.case(sizes, seed=seed)
