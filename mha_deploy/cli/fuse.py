"""`mha-deploy fuse`: write the attention of any ONNX file as ONNX's own `Attention` node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import mha_deploy as md
from mha_deploy.cli.arguments import Json, print_json
from mha_deploy.errors import EXIT_VERDICT_FAILED, DeployError

if TYPE_CHECKING:
    import onnx_ir as ir


def fuse(
    source: Annotated[Path, typer.Argument(metavar="IN.onnx", help="An ONNX file, of opset 13 or newer.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT.onnx", help="The file to write.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file that is there already.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Compare every new node with the original on drawn inputs, and keep only equal ones.",
        ),
    ] = True,
    json: Json = False,
) -> None:
    """Write the attention of an ONNX file as single Attention nodes; list what is not fused, and why."""
    from mha_deploy.graph.file import load_graph, weight_files

    if output.exists() and not output.is_file():
        raise DeployError("The output is not a file.", got=output)
    if output.exists() and not overwrite:
        raise DeployError("The output is there already.", got=output, hint="--overwrite")
    # The weights of the source may be read until the new file is whole.
    if output.exists() and source.exists() and output.samefile(source):
        raise DeployError("The output is the input.", got=output, hint="write to another file")
    if not output.absolute().parent.is_dir():
        raise DeployError("The folder of the output does not exist.", got=output.parent)
    original = load_graph(source)
    # Large weights go to a file beside the graph, which must not take the place of another's.
    beside, needed = output.with_name(f"{output.name}.data"), weight_files(original)
    for path in (output, beside):
        if path.resolve() in needed:
            raise DeployError(
                "The output could replace weights of the input.", got=path, hint="write elsewhere"
            )
    if beside.exists() and not overwrite:
        raise DeployError("The file for the weights is there already.", got=beside, hint="--overwrite")
    model, report = md.fuse(original, verify=verify)
    _save_graph(model, output)
    if json:
        print_json({"file": str(output), **report.to_dict()})
    else:
        from rich.console import Console

        from mha_deploy.cli.tables import fuse_renderable

        Console().print(fuse_renderable(report))
    if not report.complete:
        raise typer.Exit(EXIT_VERDICT_FAILED)


def _save_graph(model: ir.Model, output: Path) -> None:
    """Write beside the place and rename, all files or none; the graph last: it must not lack its weights."""
    from mha_deploy.bundle.commit import temporary_folder
    from mha_deploy.graph.file import save_graph

    home = output.absolute().parent
    with temporary_folder(home / output.name) as folder:
        new, old = folder / "new", folder / "old"
        new.mkdir()
        old.mkdir()
        save_graph(model, new / output.name)
        parts = sorted((path.name for path in new.iterdir()), key=lambda name: name == output.name)
        placed = list[str]()
        try:
            if len(parts) > 1:  # an old graph must not be found beside new weights
                for name in (each for each in reversed(parts) if (home / each).exists()):
                    (home / name).replace(old / name)
            for name in parts:
                (new / name).replace(home / name)
                placed.append(name)
        except BaseException:
            for name in placed:
                (home / name).unlink()
            for name in (each for each in parts if (old / each).exists()):
                (old / name).replace(home / name)
            raise
