"""`mha-deploy plugins`: build the plugin library, and see which ones are here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mha_deploy.cli.options import Json, print_json, steps
from mha_deploy.errors import EXIT_VERDICT_FAILED

if TYPE_CHECKING:
    from mha_deploy.engine.plugins import Candidate, Found

plugins = typer.Typer(
    name="plugins",
    help="Build the library of fused attention for TensorRT, and see which ones are here.",
    no_args_is_help=True,
)

Include = Annotated[Path | None, typer.Option(help="Folder of its headers. default: searched for")]
Backend = Annotated[str, typer.Option(help="tensorrt or tensorrt-rtx.")]


@plugins.command()
def build(
    tensorrt_include: Include = None,
    cudnn_include: Include = None,
    cudnn_frontend_include: Include = None,
    cuda_include: Include = None,
    nvcc: Annotated[Path | None, typer.Option(help="The CUDA compiler. default: searched for")] = None,
    arch: Annotated[str, typer.Option(help="GPUs to compile for, as 80,90. default: the usual ones")] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder it goes to. default: MHA_DEPLOY_PLUGINS or the cache folder"),
    ] = None,
    json: Json = False,
) -> None:
    """Compile the plugin library against the TensorRT headers of this machine."""
    from mha_deploy.engine.plugins import build_folder, compile_library, find_nvcc, find_parts

    given = {
        "tensorrt_include": tensorrt_include,
        "cudnn_include": cudnn_include,
        "cudnn_frontend_include": cudnn_frontend_include,
        "cuda_include": cuda_include,
    }
    parts = [*find_parts(given), find_nvcc(nvcc)]
    if not json:
        _print_parts(parts)
    with steps("build the plugin library") as on_step:
        made = compile_library(parts, out or build_folder(), arch.replace(",", ";"), on_step)
    library = made.library
    if json:
        print_json(
            {
                "path": str(made.path),
                "found": {found.part.key: _part(found) for found in parts},
                "library": None if library is None else library.to_dict(),
            }
        )
        return
    typer.echo(f"built {made.path}")
    if library is None:
        typer.echo("It is for another kind of machine than this, and was not tried here.")


@plugins.command("list")
def list_(json: Json = False) -> None:
    """Show the plugin libraries of this machine, and which of them fits the TensorRT here."""
    from mha_deploy.engine.plugins import candidates, places

    found = [{"path": str(each.path), **_facts(each)} for each in candidates()]
    if json:
        print_json({"places": [str(place) for place in places()], "libraries": found})
        return
    looked = ", ".join(str(place) for place in places())
    if not found:
        typer.echo(f"no plugin library in {looked}\nbuild one with: mha-deploy plugins build")
    for facts in found:
        typer.echo(facts["path"])
        for line in _lines(facts):
            typer.echo(f"  {line}")


@plugins.command()
def where(backend: Backend = "tensorrt") -> None:
    """Print the path of the library that would be loaded; exit with 1 where there is none."""
    from mha_deploy.engine.plugins import PluginError, library_for, refuse_plugins
    from mha_deploy.runtime.tensorrt.versions import load

    rt = load(backend)
    try:
        refuse_plugins(rt)
        path = library_for(rt.version).path
    except PluginError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_VERDICT_FAILED) from error
    typer.echo(str(path))


def _print_parts(parts: list[Found]) -> None:
    from rich.console import Console
    from rich.markup import escape

    from mha_deploy.cli.tables import table

    rows = table()
    for column in ("needs", "version", "found by", "in"):
        rows.add_column(column, overflow="fold")
    for found in parts:
        rows.add_row(
            found.part.title,
            found.version or "-",
            escape(found.by),
            escape("\n".join(str(path) for path in found.paths)),
        )
    Console().print(rows)


def _part(found: Found) -> dict[str, Any]:
    return {"paths": [str(path) for path in found.paths], "by": found.by, "version": found.version}


def _facts(candidate: Candidate) -> dict[str, Any]:
    library = candidate.library
    if library is None:
        return {"problem": candidate.problem, "fits": False}
    here = _tensorrt_here()
    fits = here is not None and here.split(".")[0] == library.tensorrt_major
    return {**library.to_dict(), "problem": None, "tensorrt_here": here, "fits": fits}


def _tensorrt_here() -> str | None:
    """The version of the TensorRT on this machine, without importing it."""
    from mha_deploy.environment import RUNTIMES, installed_version

    packages = next(runtime.packages for runtime in RUNTIMES if runtime.module == "tensorrt")
    return next((version for version in map(installed_version, packages) if version), None)


def _lines(facts: dict[str, Any]) -> list[str]:
    if facts["problem"]:
        return [f"cannot be used: {facts['problem']}"]
    here = facts["tensorrt_here"]
    fits = "fits" if facts["fits"] else "does not fit"
    return [
        f"version {facts['version']}, sha256 {facts['sha256'][:16]}",
        f"for TensorRT {facts['tensorrt']} ({facts['interface']}); "
        + (f"{fits} TensorRT {here} here" if here else "TensorRT is not installed here"),
        f"plugins {', '.join(each['name'] + ' ' + each['version'] for each in facts['plugins'])}",
        f"GPU architectures {', '.join(facts['architectures'])}; cudnn-frontend {facts['cudnn_frontend']}",
    ]
