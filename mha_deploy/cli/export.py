"""`mha-deploy export`: from a spec to a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mha_deploy.cli.options import (
    Axes,
    Cache,
    Json,
    Model,
    Overwrite,
    Precision,
    Projections,
    Seed,
    print_json,
    spec_from_options,
)
from mha_deploy.cli.progress import steps
from mha_deploy.errors import BackendUnavailable
from mha_deploy.export.golden_plan import GoldenBudget
from mha_deploy.export.options import ExportOptions
from mha_deploy.spec import AttentionSpec

if TYPE_CHECKING:
    from mha_deploy.bundle import Bundle

Weights = Annotated[Path | None, typer.Option(help="A safetensors file of weights, instead of random ones.")]
Golden = Annotated[
    list[str] | None,
    typer.Option(
        help="A golden case: min, opt, odd, ragged, large, with a cache prefill and decode, "
        "or sizes as B=2,S=33. Can be repeated."
    ),
]


def export(
    model: Model,
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
    opset: Annotated[
        int | None, typer.Option(help="ONNX operator set: 23 or 24; the first that suffices unless given.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where golden cases are computed: cpu or cuda.")
    ] = ExportOptions.device,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Turn a PyTorch attention layer into an ONNX bundle with one fused node and golden cases."""
    options = ExportOptions(
        precision=precision,
        opset=opset,
        seed=seed,
        weights=weights,
        golden=tuple(golden or ()),
        budget=GoldenBudget(gflop=golden_gflop, gib=golden_gib),
        device=device,
        overwrite=overwrite,
    )
    bundle = export_with_progress(spec_from_options(model, axis, projections, cache), out, options)
    if json:
        print_json({"bundle": str(bundle.path), **bundle.manifest.to_dict()})
    else:
        print_bundle(bundle)


def export_with_progress(spec: AttentionSpec, out: Path, options: ExportOptions) -> Bundle:
    """Export with progress on stderr."""
    try:
        from mha_deploy.export.exporter import bundle_from_spec
    except ImportError as error:
        raise BackendUnavailable(
            "Exporting needs PyTorch and its ONNX exporter.",
            got=error,
            hint='pip install "mha-deploy[export]"',
        ) from error
    with steps(f"export {spec.name}") as on_step:
        return bundle_from_spec(spec, out, options, on_step)


def print_bundle(bundle: Bundle) -> None:
    """Say in a few lines what a bundle holds."""
    from rich.console import Console

    from mha_deploy.cli.tables import bundle_renderable

    Console().print(bundle_renderable(bundle))
