"""`mha-deploy export`: from a spec to a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
    axes_from_options,
    print_json,
    steps,
)
from mha_deploy.errors import DeployError
from mha_deploy.export.options import AUTO, ExportOptions, GoldenBudget

if TYPE_CHECKING:
    from mha_deploy.api import Model
    from mha_deploy.bundle.folder import Bundle

Weights = Annotated[
    Path | None,
    typer.Option(help="A safetensors file, or for your own model a state dict, instead of random weights."),
]
Golden = Annotated[
    list[str] | None,
    typer.Option(
        help="A golden case: min, opt, odd, ragged, large, with a KV cache prefill and decode, "
        "or sizes as B=2,S=33. Can be repeated."
    ),
]


def export(
    model: ModelOrFactory,
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to write.")],
    precision: Precision = ExportOptions.precision,
    axis: Axes = None,
    projections: Projections = None,
    cache: Cache = None,
    seed: Seed = 0,
    weights: Weights = None,
    golden: Golden = None,
    golden_gflop: Annotated[
        float, typer.Option(help="Work limit of the large golden case.")
    ] = GoldenBudget.gflop,
    golden_gib: Annotated[
        float, typer.Option(help="Memory limit of the large golden case.")
    ] = GoldenBudget.gib,
    golden_mb: Annotated[
        float, typer.Option(help="Limit on disk of the large golden case.")
    ] = GoldenBudget.mb,
    opset: Annotated[
        int | None, typer.Option(help="ONNX operator set: 23 or 24. default: the first that suffices")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where golden cases are computed: cpu or cuda.")
    ] = ExportOptions.device,
    polygraphy: Annotated[
        bool, typer.Option(help="Write the golden cases for `polygraphy run` too.")
    ] = False,
    overwrite: Overwrite = False,
    in_process: InProcess = False,
    time_limit: TimeLimit = None,
    json: Json = False,
) -> None:
    """Turn a PyTorch attention layer, or your own model, into an ONNX bundle with fused attention."""
    options = ExportOptions(
        precision=precision,
        opset=opset,
        seed=seed,
        weights=weights,
        golden=tuple(golden or ()),
        budget=GoldenBudget(gflop=golden_gflop, gib=golden_gib, mb=golden_mb),
        device=device,
        overwrite=overwrite,
        polygraphy=polygraphy,
    )
    bundle = export_with_progress(source_from_options(model, axis, projections, cache), out, options)
    if json:
        print_json({"bundle": str(bundle.path), **bundle.manifest.to_dict()})
    else:
        print_bundle(bundle)


def source_from_options(
    model: str, axes: Sequence[str] | None, projections: str | None, cache: str | None
) -> Model:
    """The model to export, with the changes from the command line."""
    from mha_deploy.api import load_model
    from mha_deploy.model.catalog import is_factory

    for option, given in (("--projections", projections), ("--cache", cache)):
        if given is not None and is_factory(model):
            raise DeployError(
                "Your own model is exported as it is written.", got=f"{option} {given}", hint="leave it out"
            )
    return load_model(model, axes=axes_from_options(axes), projections=projections, cache=cache)


def refuse_early(out: Path, options: ExportOptions) -> None:
    """Refuse what needs no library to be refused: a folder that is there, a precision that is not."""
    from mha_deploy.bundle.commit import refuse_occupied
    from mha_deploy.model.precision import find_precision

    refuse_occupied(out.resolve(), overwrite=options.overwrite)
    if options.precision != AUTO:
        find_precision(options.precision)


def export_with_progress(source: Model, out: Path, options: ExportOptions) -> Bundle:
    """Export with progress on stderr."""
    from mha_deploy.api import export

    refuse_early(out, options)
    with steps(f"export {source.name}") as on_step:
        bundle = export(source, out, **vars(options), on_step=on_step)
    if bundle.removed:
        typer.echo(f"removed with the old bundle: {', '.join(bundle.removed)}", err=True)
    return bundle


def print_bundle(bundle: Bundle) -> None:
    """Say in a few lines what a bundle holds."""
    from rich.console import Console

    from mha_deploy.cli.tables import bundle_renderable

    Console().print(bundle_renderable(bundle))
