"""`mha-deploy deploy`: the whole way in one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
from mha_deploy.errors import EXIT_VERDICT_FAILED
from mha_deploy.export.options import ExportOptions


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
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Export a model and validate the bundle on this machine."""
    spec = spec_from_options(model, axis, projections)
    target = out or Path("bundles") / f"{spec.name}-{precision}"
    options = ExportOptions(precision=precision, seed=seed, weights=weights, overwrite=overwrite)
    bundle = export_with_progress(spec, target, options)
    report = validate_with_progress(bundle, None)
    if json:
        print_json({"bundle": str(bundle.path), "validation": report.to_dict()})
    else:
        print_bundle(bundle)
        print_report(report)
    if not report.passed:
        raise typer.Exit(EXIT_VERDICT_FAILED)
