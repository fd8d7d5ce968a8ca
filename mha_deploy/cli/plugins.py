"""`mha-deploy plugins`: build the plugin library, and list the ones on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import mha_deploy as md
from mha_deploy.cli.options import Json, print_json, steps
from mha_deploy.errors import EXIT_VERDICT_FAILED

plugins = typer.Typer(
    name="plugins",
    help="Build the plugin library of fused attention for TensorRT, and list the ones on this machine.",
    no_args_is_help=True,
)

Include = Annotated[Path | None, typer.Option(help="Folder of its header files. default: searched for")]
Backend = Annotated[str, typer.Option(help="tensorrt or tensorrt-rtx.")]


@plugins.command()
def build(
    tensorrt_include: Include = None,
    cudnn_include: Include = None,
    cudnn_frontend_include: Include = None,
    cuda_include: Include = None,
    nvcc: Annotated[Path | None, typer.Option(help="The CUDA compiler. default: searched for")] = None,
    arch: Annotated[
        str,
        typer.Option(help="GPU architectures to compile for, as 80,90. default: those that nvcc supports"),
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write. default: $MHA_DEPLOY_PLUGINS, or the cache folder"),
    ] = None,
    json: Json = False,
) -> None:
    """Compile the plugin library against the TensorRT headers of this machine."""
    parts = md.find_plugin_parts(
        tensorrt_include=tensorrt_include,
        cudnn_include=cudnn_include,
        cudnn_frontend_include=cudnn_frontend_include,
        cuda_include=cuda_include,
        nvcc=nvcc,
    )
    if not json:
        from rich.console import Console
        from rich.markup import escape

        from mha_deploy.cli.tables import table

        rows = table()
        for column in ("needs", "version", "found by", "in"):
            rows.add_column(column, overflow="fold")
        for found in parts:
            folders = "\n".join(str(path) for path in found.paths)
            rows.add_row(found.part.title, found.version or "-", escape(found.by), escape(folders))
        Console().print(rows)
    with steps("build the plugin library") as on_step:
        made = md.build_plugins(parts, out=out, architectures=arch, on_step=on_step)
    library = made.library
    if json:
        listed = {
            found.part.key: {
                "paths": [str(path) for path in found.paths],
                "by": found.by,
                "version": found.version,
            }
            for found in parts
        }
        described = None if library is None else library.to_dict()
        print_json({"path": str(made.path), "found": listed, "library": described})
        return
    typer.echo(f"built {made.path}")
    if library is None:
        typer.echo("The library is for another platform than this machine, and was not loaded here.")


@plugins.command("list")
def list_(json: Json = False) -> None:
    """List the plugin libraries of this machine, and which of them fits the installed TensorRT."""
    found = md.plugins()
    if json:
        print_json(found)
        return
    if not found["libraries"]:
        typer.echo(f"no plugin library in {', '.join(found['places'])}\nbuild one: mha-deploy plugins build")
    for library in found["libraries"]:
        typer.echo(library["path"])
        if library["problem"]:
            typer.echo(f"  cannot be used: {library['problem']}")
            continue
        here = library["tensorrt_here"]
        fits = "fits" if library["fits"] else "does not fit"
        fits = f"{fits} TensorRT {here} here" if here else "TensorRT is not installed here"
        names = ", ".join(f"{each['name']} {each['version']}" for each in library["plugins"])
        architectures = ", ".join(library["architectures"])
        typer.echo(f"  version {library['version']}, sha256 {library['sha256'][:16]}")
        typer.echo(f"  for TensorRT {library['tensorrt']} ({library['interface']}); {fits}")
        typer.echo(f"  plugins {names}")
        typer.echo(f"  GPU architectures {architectures}; cudnn-frontend {library['cudnn_frontend']}")


@plugins.command()
def where(backend: Backend = "tensorrt") -> None:
    """Print the path of the library that would be loaded. Exits with 1 if there is none."""
    from mha_deploy.engine.plugins import PluginError

    try:
        path = md.find_plugin(backend).path
    except PluginError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_VERDICT_FAILED) from error
    typer.echo(str(path))
