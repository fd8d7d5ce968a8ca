"""`mha-deploy package`: a bundle as a model of a Triton repository."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import mha_deploy as md
from mha_deploy.cli.options import BundleFolder, Json, print_json


def package(
    bundle: BundleFolder,
    triton: Annotated[
        Path, typer.Option("--triton", metavar="REPOSITORY", help="The model repository to write or extend.")
    ],
    variant: Annotated[
        str,
        typer.Option(
            help="python: Triton's Python backend with a runtime of mha-deploy. tensorrt_plan: Triton's own "
            "TensorRT backend."
        ),
    ] = "python",
    backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="An engine to serve; can be repeated, one for each kind of GPU. Or for python one runtime: "
            "ort-cuda, ort-cpu … default: the engines that run here, else ONNX Runtime",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model. default: the bundle's")] = None,
    max_batch: Annotated[
        int | None, typer.Option(min=1, help="Largest dynamic batch. default: the largest that fits")
    ] = None,
    instances: Annotated[int, typer.Option(min=1, help="Copies of the model on each device.")] = 1,
    queue_delay_us: Annotated[
        int, typer.Option(min=0, help="Microseconds that a request may wait for others to share its batch.")
    ] = 100,
    sequences: Annotated[
        int, typer.Option(min=1, help="Sequences that a model with a KV cache decodes at a time.")
    ] = 8,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a packaged model.")] = False,
    json: Json = False,
) -> None:
    """Write a bundle into a Triton model repository."""
    found = md.package(
        bundle,
        triton,
        variant=variant,
        backends=backend or (),
        name=name,
        max_batch=max_batch,
        instances=instances,
        queue_delay_us=queue_delay_us,
        sequences=sequences,
        overwrite=overwrite,
    )
    if json:
        print_json({**vars(found), "path": str(found.path)})
        return
    batch = f"batches up to {found.max_batch}" if found.max_batch else "no batching"
    typer.echo(f"{found.path}: {found.variant}, run by {', '.join(found.backends)}, {batch}")
    for file in found.files:
        typer.echo(f"  {file}")
    typer.echo(f"start: {found.command} (the whole line is in README.md)")
