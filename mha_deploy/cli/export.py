"""`mha-deploy export`: a bundle from a catalog layer, your own model or an ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import mha_deploy as md
from mha_deploy.cli.options import (
    Axes,
    Cache,
    Checkpoint,
    InProcess,
    Inputs,
    Json,
    Layer,
    ModelOrFactory,
    Overwrite,
    Precision,
    Prefix,
    Projections,
    Seed,
    TimeLimit,
    Weights,
    inputs_from_options,
    model_from_options,
    print_json,
    steps,
)
from mha_deploy.options import ExportOptions

if TYPE_CHECKING:
    from mha_deploy.bundle.folder import Bundle

Golden = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CASE",
        help="A golden case: min, opt, odd, ragged or large, with a KV cache prefill or decode, or sizes as "
        "B=2,S=33. Can be repeated. default: those that suit the model",
    ),
]


def export(
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to write.")],
    model: ModelOrFactory = "",
    hf: Checkpoint = None,
    layer: Layer = 0,
    precision: Precision = ExportOptions.precision,
    axis: Axes = None,
    projections: Projections = None,
    cache: Cache = None,
    seed: Seed = 0,
    weights: Weights = None,
    prefix: Prefix = "",
    golden: Golden = None,
    inputs: Inputs = None,
    golden_gflop: Annotated[
        float, typer.Option(help="GFLOP limit of the large golden case.")
    ] = ExportOptions.golden_gflop,
    golden_gib: Annotated[
        float, typer.Option(help="Memory limit of the large golden case, in GiB.")
    ] = ExportOptions.golden_gib,
    golden_mb: Annotated[
        float, typer.Option(help="File size limit of the large golden case, in MB.")
    ] = ExportOptions.golden_mb,
    opset: Annotated[
        int | None, typer.Option(help="ONNX operator set: 23 or 24. default: the lowest that suffices")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Device that computes the golden cases: cpu or cuda.")
    ] = ExportOptions.device,
    polygraphy: Annotated[
        bool, typer.Option("--polygraphy", help="Write the golden cases for `polygraphy run` as well.")
    ] = False,
    overwrite: Overwrite = False,
    in_process: InProcess = False,
    time_limit: TimeLimit = None,
    json: Json = False,
) -> None:
    """Export an attention layer, your own model or an ONNX file to an ONNX bundle with fused attention."""
    source = model_from_options(model, hf, layer, prefix, axis, cache, projections)
    with steps(f"export {source.name}") as on_step:
        bundle = md.export(
            source,
            out,
            precision=precision,
            opset=opset,
            seed=seed,
            weights=weights,
            prefix=prefix,
            golden=golden or (),
            inputs=inputs_from_options(inputs),
            golden_gflop=golden_gflop,
            golden_gib=golden_gib,
            golden_mb=golden_mb,
            device=device,
            overwrite=overwrite,
            polygraphy=polygraphy,
            on_step=on_step,
        )
    if not json:
        print_bundle(bundle)
        return
    _report_removed(bundle)
    print_json({"bundle": str(bundle.path), **bundle.manifest.to_dict()})


def print_bundle(bundle: Bundle) -> None:
    """Print in a few lines what a bundle holds."""
    from rich.console import Console

    from mha_deploy.cli.tables import bundle_renderable

    _report_removed(bundle)
    Console().print(bundle_renderable(bundle))


def _report_removed(bundle: Bundle) -> None:
    if bundle.removed:
        typer.echo(f"removed with the old bundle: {', '.join(bundle.removed)}", err=True)
