"""How much an engine differs from build to build: TensorRT chooses kernels by timing them.

Every build starts without the timings of earlier ones. The last one is kept, and is then built once more from
its own timings: with them a build is to be reproducible.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from mha_deploy.bundle.cases import golden_cases
from mha_deploy.bundle.folder import Bundle
from mha_deploy.engine.build import engine_from_bundle
from mha_deploy.engine.choose import timed_cases
from mha_deploy.engine.manifest import Engine, RebuildRecord, default_backend, engine_path, write_engine
from mha_deploy.engine.run import open_engine_runner, reasons_not_to_run
from mha_deploy.errors import BundleError, DeployError
from mha_deploy.metrics import judge_case
from mha_deploy.options import EngineOptions
from mha_deploy.runtime.tensorrt.versions import load

OnProgress = Callable[[str, int, int], None]


def rebuilt_engine(
    bundle: Bundle, options: EngineOptions, builds: int, on_progress: OnProgress | None = None
) -> Engine:
    """Build an engine several times; the last one is kept, and its manifest records how much they differ.

    Args:
        bundle: The bundle.
        options: How to build.
        builds: How many builds, at least 2.
        on_progress: Called as each build and its steps begin.

    Raises:
        DeployError: It cannot be built, or `builds` is below 2.
    """
    if builds < 2:
        raise DeployError("Builds can be compared from two on.", got=builds, hint="--repeat 3")
    rt = load(options.backend or default_backend())
    path = engine_path(bundle.path, options.name or rt.backend)
    if path.exists() and not options.overwrite:
        raise BundleError("There is an engine of that name.", got=path, hint="another --name, or --overwrite")
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".trying-", dir=path.parent) as folder:

        def build(name: str, *, timing_cache: bool) -> Engine:
            if on_progress is not None:
                on_progress(f"build {name}", 0, 0)
            settings = replace(options, timing_cache=timing_cache, overwrite=True)
            return engine_from_bundle(bundle, settings, on_progress, path=Path(folder) / f"{name}.engine")

        built = [build(f"{number + 1} of {builds}", timing_cache=False) for number in range(builds)]
        cached = build("from the timing cache", timing_cache=True) if rt.can.timing_cache else None
        errors, times = _measured(built, bundle, on_progress)
        record = RebuildRecord(
            builds=builds,
            identical=len({each.manifest.engine_sha256 for each in built}) == 1,
            differing=differing_kernels(built),
            fused=[list(each.manifest.fused_count) for each in built],
            seconds=[each.manifest.seconds for each in built],
            engine_bytes=[each.manifest.engine_bytes for each in built],
            errors=errors,
            times_us=times,
            timing_cache=None if cached is None else not differing_kernels([built[-1], cached]),
        )
        kept = built[-1]
        manifest = msgspec.structs.replace(kept.manifest, rebuilds=record)
        return write_engine(path, kept.path.read_bytes(), manifest)


def differing_kernels(engines: Sequence[Engine]) -> list[dict[str, Any]]:
    """The ONNX nodes whose kernels are not the same in every build, with the kernels of each build."""
    found: dict[tuple[int, str], list[list[str]]] = {}
    for index, engine in enumerate(engines):
        for kernel in engine.manifest.kernels:
            key = (kernel["profile"], ", ".join(sorted(kernel["nodes"])) or kernel["name"])
            builds = found.setdefault(key, [[] for _ in engines])
            builds[index].append(kernel["tactic"] or kernel["name"])
    return [
        {"nodes": nodes, "profile": profile, "kernels": builds}
        for (profile, nodes), builds in found.items()
        if any(each != builds[0] for each in builds)
    ]


def _measured(
    engines: Sequence[Engine], bundle: Bundle, on_progress: OnProgress | None
) -> tuple[dict[str, list[float | None]], dict[str, list[float]]]:
    """Shares of the error budget, and times, of every build; nothing where the engines cannot run here."""
    errors: dict[str, list[float | None]] = {}
    times: dict[str, list[float]] = {}
    if reasons_not_to_run(engines[0]):
        return errors, times
    for number, engine in enumerate(engines):
        if on_progress is not None:
            on_progress("run and time", number, len(engines))
        with open_engine_runner(engine) as runner:
            timed = [case.name for case in timed_cases(golden_cases(bundle), [runner])]
            for case in golden_cases(bundle):
                if not runner.profiles_for(case.inputs):  # type: ignore[attr-defined]
                    continue
                for verdict in judge_case(case, runner.run(case.inputs), bundle.manifest.precision):
                    errors.setdefault(f"{case.name}/{verdict.output}", []).append(verdict.share)
                if case.name in timed:
                    times.setdefault(case.name, []).append(runner.time(case.inputs).p50)
    return errors, times


def rebuild_summary(record: RebuildRecord) -> list[str]:
    """How much the builds differ, in sentences."""
    lines = [f"{record['builds']} builds: {'identical plans' if record['identical'] else 'plans differ'}"]
    lines += [
        f"{each['nodes']}: " + " / ".join(dict.fromkeys(" + ".join(kernels) for kernels in each["kernels"]))
        for each in record["differing"]
    ]
    if len({tuple(each) for each in record["fused"]}) > 1:
        lines.append("fused: " + ", ".join(f"{fused}/{count}" for fused, count in record["fused"]))
    spans: dict[str, tuple[str, Sequence[float]]] = {
        "build time": ("s", record["seconds"]),
        "engine size": ("bytes", record["engine_bytes"]),
        **{f"latency of {name}": ("µs", times) for name, times in record["times_us"].items()},
    }
    lines += [
        f"{name}: {min(values):,.6g} to {max(values):,.6g} {unit}" for name, (unit, values) in spans.items()
    ]
    for name, shares in record["errors"].items():
        known = [share for share in shares if share is not None]
        if known:
            lines.append(f"error of {name}: {min(known):.0%} to {max(known):.0%} of the budget")
    if record["timing_cache"] is not None:
        same = "the same kernels" if record["timing_cache"] else "other kernels"
        lines.append(f"built again from the timing cache: {same}")
    return lines
