"""`mha-deploy matrix`: models × precisions × runtimes × GPUs × options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import mha_deploy as md
from mha_deploy.cli.options import Json
from mha_deploy.errors import EXIT_VERDICT_FAILED

if TYPE_CHECKING:
    from mha_deploy.regression.matrix import MatrixCell, OnCell

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="The plan, a TOML file; see docs/matrix.md.")]
Out = Annotated[
    Path, typer.Option("-o", "--out", help="Folder of results. A second run does only what is missing there.")
]
Jobs = Annotated[
    int | None,
    typer.Option(
        min=1, help="Local processes, this many at a time, instead of Ray. default: Ray, or 1 without it"
    ),
]
Address = Annotated[str | None, typer.Option(help="Address of a Ray cluster. default: Ray on this machine")]
Record = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Add every engine that was built but not run to this file as a line."),
]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the heat map as Markdown to stdout.")]


def matrix(
    plan: PlanFile,
    out: Out = Path("matrix"),
    jobs: Jobs = None,
    address: Address = None,
    markdown: Markdown = False,
    record: Record = None,
    json: Json = False,
) -> None:
    """Build and judge every combination of models, precisions, runtimes, GPUs and options of a plan."""
    from rich.console import Console

    from mha_deploy.cli.tables import rendered

    with _progress() as on_cell:
        found = md.matrix(plan, out, jobs=jobs, address=address, on_cell=on_cell)
    page = found.save(out)
    if record is not None:
        found.record(record)
    if json:
        from mha_deploy.cli.options import print_json

        print_json(found.to_dict())
    elif markdown:
        typer.echo(found.to_markdown())
    else:
        console = Console()
        console.print(rendered(found.tables()[0]))
        for cell in found.cells:
            if cell.status not in ("passed", "built"):
                console.print(
                    f"{cell.model} {cell.precision}, {cell.runtime}: {cell.status}: {cell.why}", markup=False
                )
        console.print(f"{'PASSED' if found.passed else 'FAILED'}  {found.headline}", highlight=False)
    typer.echo(f"report: {page}", err=json or markdown)
    if not found.passed:
        raise typer.Exit(EXIT_VERDICT_FAILED)


@contextmanager
def _progress() -> Iterator[OnCell]:
    """A live table of the cells on a terminal; elsewhere a line for each."""
    from rich.console import Console
    from rich.live import Live

    from mha_deploy.cli.tables import table

    console = Console(stderr=True)
    cells: list[MatrixCell] = []

    def line(cell: MatrixCell, done: int, total: int) -> str:
        again = "" if cell.is_new else ", from an earlier run"
        return f"{done}/{total} {cell.model} {cell.precision}, {cell.runtime}: {cell.summary}{again}"

    if not console.is_terminal:

        def print_line(cell: MatrixCell, done: int, total: int) -> None:
            console.print(line(cell, done, total), highlight=False, markup=False)

        yield print_line
        return
    with Live(console=console, transient=True, refresh_per_second=4) as live:

        def update(cell: MatrixCell, done: int, total: int) -> None:
            cells.append(cell)
            shown = table(f"{done} of {total} cells", "model", "precision", "runtime", "result", "#s")
            for each in cells[-console.height + 6 :]:
                shown.add_row(each.model, each.precision, each.runtime, each.summary, f"{each.seconds:.1f}")
            live.update(shown)

        yield update
