"""Several candidates for an engine: each is built, judged and timed beside the others, and one is kept.

The cases are the bundle's golden cases of the usual sizes, as many as the profiles admit. The engines are
loaded together and timed alternately, twice, so that a change of the clocks affects all of them; the better
of both times counts. A candidate that cannot be built or whose outputs are wrong is refused, and the
manifest records why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from mha_deploy.bundle.cases import GoldenCase, golden_cases
from mha_deploy.bundle.commit import temporary_folder
from mha_deploy.bundle.folder import Bundle
from mha_deploy.engine.lowered import FP16, FP32, NATIVE, PLUGIN, Candidate
from mha_deploy.engine.manifest import Engine, write_engine
from mha_deploy.engine.plugins import PluginError
from mha_deploy.engine.run import open_engine_runner
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.metrics import judge_case
from mha_deploy.model.precision import Precision
from mha_deploy.options import EngineOptions
from mha_deploy.runtime.cuda import open_gpu
from mha_deploy.runtime.runner import Runner
from mha_deploy.runtime.tensorrt.versions import EngineError

Build = Callable[[Path, EngineOptions], Engine]

_TIMED = ("opt", "prefill", "decode")
_ROUNDS = 2

DEARER = 1.05
"""How much more time FP32 accumulation may take before TensorRT's own matmuls are used instead."""


@dataclass
class Trial:
    """One candidate, and its result.

    Args:
        candidate: The candidate.
        engine: The engine; None where it could not be built.
        refused: Why it is refused; empty as long as it is not.
        times: Microseconds of each case.
    """

    candidate: Candidate
    engine: Engine | None = None
    refused: str = ""
    times: dict[str, float] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Whether it was built, and its outputs were right in every case."""
        return not self.refused and bool(self.times)

    @property
    def microseconds(self) -> float:
        """The geometric mean over the cases: each has the same weight, however long it is."""
        return math.exp(sum(math.log(time) for time in self.times.values()) / len(self.times))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the manifest."""
        return {
            "attention": self.candidate.attention,
            "accumulate": self.candidate.accumulate,
            "us": round(self.microseconds, 3) if self.is_right else None,
            "cases": {name: round(time, 3) for name, time in self.times.items()},
            "refused": self.refused,
        }


def fastest_engine(
    bundle: Bundle, options: EngineOptions, path: Path, candidates: Sequence[Candidate], build: Build
) -> Engine:
    """Build every candidate in a temporary folder, time them, and keep one at the path.

    Args:
        bundle: The bundle.
        options: The requested options.
        path: Where the engine goes.
        candidates: The candidates.
        build: Builds one of them at a path.

    Raises:
        BackendUnavailable: Nothing can be timed here.
        EngineError: No candidate is right.
        PluginError: The plugin library is missing or does not fit.
    """
    try:
        open_gpu()
    except BackendUnavailable as error:
        raise BackendUnavailable(
            "The faster candidate has to be measured, and there is no GPU to measure on.",
            got=f"--attention {options.attention} --accumulate {options.accumulate}: {error.in_one_line}",
            hint="name one candidate: --attention plugin --accumulate fp32, or --attention native",
        ) from error
    path.parent.mkdir(exist_ok=True)
    with temporary_folder(path.parent / "trying") as folder:
        trials = [
            _built(candidate, folder / "engines" / f"{candidate.name}.engine", options, build)
            for candidate in candidates
        ]
        _time(trials, bundle)
        best = chosen(trials)
        if best.engine is None:
            raise EngineError("The chosen engine is missing.", hint="build it again")
        manifest = msgspec.structs.replace(best.engine.manifest, attention=record(trials, best, options))
        plan = best.engine.path.read_bytes()
        return write_engine(path, plan, manifest, overwrite=options.overwrite)


def chosen(trials: Sequence[Trial]) -> Trial:
    """The trial to keep.

    Of the plugin's, the one that accumulates in FP32 unless it takes more than `DEARER` times the other's
    time; of that one and the native one, the faster.

    Raises:
        EngineError: None of them is right.
    """
    right = {trial.candidate.name: trial for trial in trials if trial.is_right}
    wide = right.get(Candidate(attention=PLUGIN, accumulate=FP32).name)
    narrow = right.get(Candidate(attention=PLUGIN, accumulate=FP16).name)
    plugin = wide or narrow
    if wide and narrow and wide.microseconds > DEARER * narrow.microseconds:
        plugin = narrow
    native = right.get(NATIVE)
    found = [trial for trial in (native, plugin) if trial is not None]
    if not found:
        raise EngineError(
            "No candidate for this engine is right.",
            got="; ".join(f"{trial.candidate.name}: {trial.refused}" for trial in trials),
            hint="see the reason of each; --attention native builds without timing",
        )
    return min(found, key=lambda trial: trial.microseconds)


def record(trials: Sequence[Trial], best: Trial, options: EngineOptions) -> dict[str, Any]:
    """The choice as the manifest records it. The plugin's time is that of its better candidate."""
    times: dict[str, float | None] = {
        kind: min(
            (t.microseconds for t in trials if t.candidate.attention == kind and t.is_right), default=None
        )
        for kind in (NATIVE, PLUGIN)
    }
    if best.candidate.attention == PLUGIN:
        times[PLUGIN] = best.microseconds
    native, plugin = times[NATIVE], times[PLUGIN]
    return {
        "requested": options.attention,
        "chosen": best.candidate.attention,
        "accumulate": best.candidate.accumulate,
        "native_us": _rounded(native),
        "plugin_us": _rounded(plugin),
        "ratio": _rounded(native / plugin) if native and plugin else None,
        "tried": [trial.to_dict() for trial in trials],
    }


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else round(figure, 3)


def _built(candidate: Candidate, path: Path, options: EngineOptions, build: Build) -> Trial:
    try:
        return Trial(candidate=candidate, engine=build(path, candidate.applied_to(options)))
    except (PluginError, BackendUnavailable):
        raise  # not specific to this candidate, and to be fixed by the user
    except DeployError as error:
        return Trial(candidate=candidate, refused=error.in_one_line)


def _time(trials: Sequence[Trial], bundle: Bundle) -> None:
    with ExitStack() as owned:
        running: list[tuple[Trial, Runner]] = []
        for trial in trials:
            if trial.engine is None:
                continue
            try:
                runner = open_engine_runner(trial.engine)
            except BackendUnavailable:
                raise  # not specific to this candidate
            except DeployError as error:
                trial.refused = error.in_one_line
                continue
            owned.callback(runner.close)
            running.append((trial, runner))
        if not running:
            return
        for case in timed_cases(golden_cases(bundle), [runner for _, runner in running]):
            for trial, runner in running * _ROUNDS:
                if not trial.refused:
                    _time_one(trial, runner, case, _judged_in(bundle.manifest.precision, trial.candidate))


def timed_cases(cases: Iterable[GoldenCase], runners: Sequence[Any]) -> list[GoldenCase]:
    """The usual cases that all engines admit, or else the first case that they do."""
    admitted = [case for case in cases if all(runner.profiles_for(case.inputs) for runner in runners)]
    if not admitted:
        raise EngineError(
            "No golden case of the bundle is within the profiles, so nothing can be timed.",
            hint="wider profiles, or name one candidate with --attention and --accumulate",
        )
    return [case for case in admitted if case.name in _TIMED] or admitted[:1]


def _judged_in(precision: Precision, candidate: Candidate) -> Precision:
    """The precision with the type that the candidate's projections accumulate in."""
    return replace(precision, accumulate=candidate.accumulate if precision.name == FP16 else FP32)


def _time_one(trial: Trial, runner: Runner, case: GoldenCase, precision: Precision) -> None:
    try:
        results = [runner.run(case.inputs)]
        timing = runner.time(case.inputs)
    except DeployError as error:
        trial.refused = f"{case.name}: {error.in_one_line}"
        return
    for result in (*results, *timing.results):
        for verdict in judge_case(case, result, precision):
            if verdict.is_wrong:
                trial.refused = f"wrong output in {case.name}, {verdict.output}: {verdict.problem}"
                return
    trial.times[case.name] = min(timing.p50, trial.times.get(case.name, math.inf))
