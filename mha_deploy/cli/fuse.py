"""`mha-deploy fuse`: write the attention of any ONNX file as ONNX's own `Attention` node."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mha_deploy.cli.options import Json, print_json
from mha_deploy.errors import EXIT_VERDICT_FAILED, DeployError
from mha_deploy.text import named, together, without_numbers

if TYPE_CHECKING:
    import onnx_ir as ir
    from rich.console import RenderableType

    from mha_deploy.graph.fuse.values import FuseReport, Repair


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
    from mha_deploy.api import fuse
    from mha_deploy.graph.file import load_graph

    _check_output(source, output, overwrite)
    original = load_graph(source)
    _check_weights(original, output, overwrite)
    model, report = fuse(original, verify=verify)
    _save(model, output)
    if json:
        print_json({"file": str(output), **report.to_dict()})
    else:
        from rich.console import Console

        Console().print(_renderable(report))
    if not report.complete:
        raise typer.Exit(EXIT_VERDICT_FAILED)


def _check_output(source: Path, output: Path, overwrite: bool) -> None:
    if output.exists() and not output.is_file():
        raise DeployError("The output is not a file.", got=output)
    if output.exists() and not overwrite:
        raise DeployError("The output is there already.", got=output, hint="--overwrite")
    # The weights of the source may be read until the new file is whole.
    if output.exists() and source.exists() and output.samefile(source):
        raise DeployError("The output is the input.", got=output, hint="write to another file")
    if not output.absolute().parent.is_dir():
        raise DeployError("The folder of the output does not exist.", got=output.parent)


def _check_weights(original: ir.Model, output: Path, overwrite: bool) -> None:
    """Large weights go to a file beside the graph, which must not take the place of another's."""
    from mha_deploy.graph.file import weight_files

    beside = output.with_name(f"{output.name}.data")
    needed = weight_files(original)
    for path in (output, beside):
        if path.resolve() in needed:
            raise DeployError(
                "The output could replace weights of the input.", got=path, hint="write elsewhere"
            )
    if beside.exists() and not overwrite:
        raise DeployError("The file for the weights is there already.", got=beside, hint="--overwrite")


def _save(model: ir.Model, output: Path) -> None:
    """Write beside the place and rename: the graph comes last, so that it never lacks its weights."""
    from mha_deploy.bundle.commit import temporary_folder
    from mha_deploy.graph.file import save_graph

    home = output.absolute().parent
    with temporary_folder(home / output.name) as folder:
        new, old = folder / "new", folder / "old"
        new.mkdir()
        old.mkdir()
        save_graph(model, new / output.name)
        parts = sorted((path.name for path in new.iterdir()), key=lambda name: name == output.name)
        _rename(parts, new, home, old)


def _rename(parts: Sequence[str], new: Path, home: Path, old: Path) -> None:
    """Put files in their places, all of them or none.

    Args:
        parts: Their names, the graph last.
        new: The folder that they are in.
        home: The folder that they go to.
        old: An empty folder, for files that are replaced.
    """
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


def _renderable(report: FuseReport) -> RenderableType:
    from rich.console import Group
    from rich.markup import escape
    from rich.text import Text

    from mha_deploy.cli.tables import table

    rows = table(expand=True)
    for column in ("attention", "Hq/Hkv×D", "scale", "mask"):
        rows.add_column(column, overflow="fold")
    rows.add_column("result", overflow="fold", ratio=1)
    for each in report.fused:
        mask = " + ".join(["causal"] * each.causal + [each.mask] * (each.mask != "none")) or "none"
        said = "; ".join(("fused", *["weights are an output too"] * each.weights, *each.notes))
        rows.add_row(
            escape(each.name), f"{each.Hq}/{each.Hkv}×{each.D}", f"{each.scale:.4g}", mask, escape(said)
        )
    for left in report.unfused:
        where = f" ({left.place})" if left.place else ""
        what = "not expressible" if left.recognised else "not recognised"
        rows.add_row(escape(left.name), "", "", "", escape(f"not fused, {what}: {left.reason}{where}"))
    for name in report.already:
        rows.add_row(escape(name), "", "", "", "was an Attention node already")
    repairs = [Text(_repair(same)) for same in together(report.repairs, _kind_of_repair)]
    count, known = len(report.fused), sum(each.recognised for each in report.unfused)
    total = (
        f"{count} fused, {known} recognised but not expressible, {len(report.unfused) - known} not recognised"
    )
    total += f", {len(report.already)} were Attention already" if report.already else ""
    if count:
        checked = sum(each.verified for each in report.fused)
        total += f"; {checked} of {count} verified against the original on drawn inputs"
    return Group(*([rows] if rows.row_count else []), *repairs, Text(total))


def _kind_of_repair(repair: Repair) -> Hashable:
    return without_numbers(repair.name), repair.changes


def _repair(alike: Sequence[Repair]) -> str:
    """What was changed about nodes of the exporter's, once for those of equal layers."""
    return f"changed: {named([repair.name for repair in alike])}: {'; '.join(alike[0].changes)}"
