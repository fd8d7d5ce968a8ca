"""`mha-deploy export`: from a spec to a bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    is_factory,
    print_json,
    spec_from_options,
    steps,
)
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.export.options import ExportOptions, GoldenBudget
from mha_deploy.model.spec import AttentionSpec, Axis

if TYPE_CHECKING:
    from mha_deploy.bundle.folder import Bundle

Weights = Annotated[
    Path | None,
    typer.Option(help="A safetensors file, or for your own model a state dict, instead of random weights."),
]
Golden = Annotated[
    list[str] | None,
    typer.Option(
        help="A golden case: min, opt, odd, ragged, large, with a cache prefill and decode, "
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
        int | None, typer.Option(help="ONNX operator set: 23 or 24; the first that suffices unless given.")
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


@dataclass(frozen=True, kw_only=True)
class Factory:
    """A user's own model, as it was named on the command line.

    Args:
        reference: `file.py:factory` or `package.module:factory`.
        axes: Ranges in place of the factory's own.
    """

    reference: str
    axes: Mapping[str, Axis]

    @property
    def name(self) -> str:
        """The factory's own name."""
        return self.reference.rpartition(":")[2].replace("_", "-")


def source_from_options(
    model: str, axes: Sequence[str] | None, projections: str | None, cache: str | None
) -> AttentionSpec | Factory:
    """What is to be exported: a spec, or what a user's factory gives."""
    if not is_factory(model):
        return spec_from_options(model, axes, projections, cache)
    for option, given in (("--projections", projections), ("--cache", cache)):
        if given is not None:
            raise DeployError(
                "Your own model is exported as it is written.", got=f"{option} {given}", hint="leave it out"
            )
    return Factory(reference=model, axes=axes_from_options(axes))


def export_with_progress(source: AttentionSpec | Factory, out: Path, options: ExportOptions) -> Bundle:
    """Export with progress on stderr."""
    try:
        from mha_deploy.export.exporter import bundle_from_spec
        from mha_deploy.export.module_exporter import bundle_from_factory
    except ImportError as error:
        raise BackendUnavailable(
            "Exporting needs PyTorch and its ONNX exporter.",
            got=error,
            hint='pip install "mha-deploy[export]"',
        ) from error
    with steps(f"export {source.name}") as on_step:
        if isinstance(source, Factory):
            bundle = bundle_from_factory(source.reference, out, options, axes=source.axes, on_step=on_step)
        else:
            bundle = bundle_from_spec(source, out, options, on_step)
    if bundle.removed:
        typer.echo(f"removed with the old bundle: {', '.join(bundle.removed)}", err=True)
    return bundle


def print_bundle(bundle: Bundle) -> None:
    """Say in a few lines what a bundle holds."""
    from rich.console import Console

    from mha_deploy.cli.tables import bundle_renderable

    Console().print(bundle_renderable(bundle))
