"""`mha-deploy inspect`: what is in a bundle, an engine or an ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import mha_deploy as md
from mha_deploy.cli.options import Json, print_json


def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A bundle, an .engine file or an .onnx file.")],
    json: Json = False,
) -> None:
    """Show what is in a bundle, an engine or an ONNX file, and check its hashes."""
    from rich.console import Console

    from mha_deploy.cli.build_engine import engine_to_dict
    from mha_deploy.cli.tables import (
        attention_renderable,
        bundle_renderable,
        engine_renderable,
        fit_renderable,
    )

    found = md.inspect(path)
    if found.bundle is not None:
        if json:
            print_json({"bundle": str(path), "hashes": "match", **found.bundle.manifest.to_dict()})
            return
        Console().print(bundle_renderable(found.bundle, details=True))
        for engine in found.engines:
            manifest = engine.manifest
            fused = manifest.fusion_summary + ("" if engine.is_shown else " (not verified)")
            typer.echo(f"engine {engine.path}: {manifest.backend} {manifest.version}, {fused}")
    elif found.engines:
        (engine,) = found.engines
        if json:
            data = {"misfits": list(found.misfits), "shown": engine.is_shown}
            print_json(engine_to_dict(engine) | data)
            return
        Console().print(engine_renderable(engine, details=True), fit_renderable(found.misfits))
        if not engine.is_shown:
            typer.echo("The verdict is that of the build: only TensorRT can read this plan.")
    elif json:
        print_json({"file": str(path), "attention": list(found.attention)})
    else:
        Console().print(attention_renderable(found.attention))
