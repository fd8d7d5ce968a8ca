"""`mha-deploy deploy`: export, build and validate in one command."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mha_deploy.cli.build_engine import (
    Accumulate,
    AllowDecomposed,
    Attention,
    Targets,
    build_with_progress,
    engine_to_dict,
    print_engine,
)
from mha_deploy.cli.export import (
    Weights,
    export_with_progress,
    print_bundle,
    refuse_early,
    source_from_options,
)
from mha_deploy.cli.options import (
    Axes,
    Cache,
    InProcess,
    Json,
    ModelOrFactory,
    Overwrite,
    Precision,
    Projections,
    Seed,
    TimeLimit,
    print_json,
    steps,
)
from mha_deploy.cli.validate import Latency, print_parity, print_report, report_to_json, write_report_files
from mha_deploy.engine.options import EngineOptions
from mha_deploy.errors import EXIT_VERDICT_FAILED, DeployError
from mha_deploy.export.options import ExportOptions
from mha_deploy.validate.options import ValidateOptions

if TYPE_CHECKING:
    from mha_deploy.api import Model
    from mha_deploy.bundle.folder import Bundle
    from mha_deploy.engine.manifest import Engine
    from mha_deploy.validate.evaluate import Evaluation
    from mha_deploy.validate.verdict import Report


def deploy(
    model: ModelOrFactory,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            help="The folder to write. default: bundles/MODEL-PRECISION, with another KV cache than the "
            "model's own bundles/MODEL-CACHE-PRECISION",
        ),
    ] = None,
    precision: Precision = ExportOptions.precision,
    axis: Axes = None,
    projections: Projections = None,
    seed: Seed = 0,
    weights: Weights = None,
    cache: Cache = None,
    backend: Annotated[
        str | None,
        typer.Option(help="tensorrt or tensorrt-rtx. default: the one that fits this machine"),
    ] = None,
    sm: Targets = "",
    allow_decomposed: AllowDecomposed = False,
    attention: Attention = EngineOptions.attention,
    accumulate: Accumulate = EngineOptions.accumulate,
    engine: Annotated[bool, typer.Option(help="Whether to build an engine.")] = True,
    latency: Latency = None,
    overwrite: Overwrite = False,
    in_process: InProcess = False,
    time_limit: TimeLimit = None,
    json: Json = False,
) -> None:
    """Export a model, build an engine, run it against the FP64 oracle and beside PyTorch."""
    source = source_from_options(model, axis, projections, cache)
    settings = EngineOptions(
        backend=backend,
        targets=sm,
        allow_decomposed=allow_decomposed,
        attention=attention,
        accumulate=accumulate,
    )
    target = out or _usual_folder(model, source, precision)
    options = ExportOptions(precision=precision, seed=seed, weights=weights, overwrite=overwrite)
    refuse_early(target, options)
    if engine:
        _refuse_builder(settings, precision)
    from mha_deploy.runtime.child import ONNX_RUNTIME, prepare_child

    prepare_child(ONNX_RUNTIME)  # it imports its runtime while PyTorch exports
    bundle = export_with_progress(source, target, options)
    if not json:  # at once: the engine may yet be refused
        print_bundle(bundle)
    asked = ValidateOptions(
        latency=latency, require_fused=engine and not allow_decomposed, require_precision=engine
    )
    report, built = _build_and_validate(bundle, settings if engine else None, asked, json)
    data = report_to_json(report)
    if json:
        engine_data = None if built is None else engine_to_dict(built)
        print_json({"bundle": str(bundle.path), "validation": data, "engine": engine_data})
    else:
        print_report(report)
    write_report_files(data, bundle.path, quiet=json)
    if not report.passed:
        raise typer.Exit(EXIT_VERDICT_FAILED)


def _usual_folder(model: str, source: Model, precision: str) -> Path:
    """Where a bundle goes by default: a layer with another cache than its own is another layer."""
    from mha_deploy.api import load_model
    from mha_deploy.model.spec import AttentionSpec

    name, spec, own = source.name, source.source, load_model(model).source
    if isinstance(spec, AttentionSpec) and isinstance(own, AttentionSpec) and spec.cache != own.cache:
        name += f"-{spec.cache.replace('none', 'uncached')}"
    return Path("bundles") / f"{name}-{precision}"


def _refuse_builder(settings: EngineOptions, precision: str) -> None:
    """Say before an export that nothing could be built afterwards."""
    from mha_deploy.engine.lowered import PLUGIN, open_candidates
    from mha_deploy.engine.manifest import default_backend
    from mha_deploy.engine.plugins import library_for
    from mha_deploy.runtime.tensorrt.request import parse_targets
    from mha_deploy.runtime.tensorrt.versions import load

    parse_targets(settings.targets)
    rt = load(settings.backend or default_backend())
    # What `auto` finds too wide for FP16 stays wide, and all the rest is FP16.
    asked = open_candidates(rt, settings, "fp16" if precision == "auto" else precision)
    if any(candidate.attention == PLUGIN for candidate in asked):
        library_for(rt.version)


def _build_and_validate(
    bundle: Bundle, settings: EngineOptions | None, options: ValidateOptions, json: bool
) -> tuple[Report, Engine | None]:
    """Judge the graph, build the engine once it is right, judge the engine."""
    from mha_deploy.validate.run import validate_bundle

    built: list[Engine] = []

    def build(graph: Evaluation, settings: EngineOptions) -> None:
        try:
            built.append(build_with_progress(bundle, settings))
        except DeployError:
            if not json:  # the graph was right all the same: that must not get lost
                print_parity(graph)
            raise
        if not json:
            print_engine(built[0])

    with steps(f"validate {bundle.manifest.spec.name}") as on_step:
        report = validate_bundle(
            bundle,
            options,
            build=None if settings is None else partial(build, settings=settings),
            on_step=lambda name: on_step(name, 0, 0),
        )
    return report, built[0] if built else None
