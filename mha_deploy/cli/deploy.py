"""`mha-deploy deploy`: the whole way in one command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mha_deploy.cli.build_engine import (
    AllowDecomposed,
    Targets,
    build_with_progress,
    engine_to_dict,
    print_engine,
)
from mha_deploy.cli.export import Weights, export_with_progress, print_bundle
from mha_deploy.cli.options import (
    Axes,
    Json,
    Model,
    Overwrite,
    Precision,
    Projections,
    Seed,
    print_json,
    spec_from_options,
)
from mha_deploy.cli.validate import print_report, validate_with_progress
from mha_deploy.engine.options import EngineOptions
from mha_deploy.errors import EXIT_VERDICT_FAILED
from mha_deploy.export.options import ExportOptions

if TYPE_CHECKING:
    from mha_deploy.engine.record import Engine


def deploy(
    model: Model,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="The folder to write; bundles/MODEL-PRECISION unless given."),
    ] = None,
    precision: Precision = ExportOptions.precision,
    axis: Axes = None,
    projections: Projections = None,
    seed: Seed = 0,
    weights: Weights = None,
    backend: Annotated[
        str | None,
        typer.Option(help="tensorrt or tensorrt-rtx; the one that fits this machine unless given."),
    ] = None,
    sm: Targets = "",
    allow_decomposed: AllowDecomposed = False,
    engine: Annotated[bool, typer.Option(help="Whether to build an engine.")] = True,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Export a model, validate its graph, build an engine, and say whether it is fused: the whole way."""
    spec = spec_from_options(model, axis, projections)
    target = out or Path("bundles") / f"{spec.name}-{precision}"
    options = ExportOptions(precision=precision, seed=seed, weights=weights, overwrite=overwrite)
    bundle = export_with_progress(spec, target, options)
    report = validate_with_progress(bundle, None)
    if not json:  # at once: the engine may yet be refused
        print_bundle(bundle)
        print_report(report)
    # No engine from a graph that is wrong: its verdict would only distract.
    settings = EngineOptions(backend=backend, targets=sm, allow_decomposed=allow_decomposed)
    built = build_with_progress(bundle, settings) if engine and report.passed else None
    if json:
        print_json(
            {
                "bundle": str(bundle.path),
                "validation": report.to_dict(),
                "engine": None if built is None else engine_to_dict(built),
            }
        )
    elif built is not None:
        print_engine(built)
        typer.echo("The engine was built and inspected, but not run.")
    if not report.passed or (built is not None and not _is_as_asked(built, allow_decomposed)):
        raise typer.Exit(EXIT_VERDICT_FAILED)


def _is_as_asked(engine: Engine, allow_decomposed: bool) -> bool:
    fused = engine.manifest.all_fused or allow_decomposed
    return fused and engine.manifest.is_in_precision
