"""`mha-deploy compare`: what an upgrade made worse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import mha_deploy as md
from mha_deploy.cli.options import Json
from mha_deploy.errors import EXIT_VERDICT_FAILED

_SOURCE = "a report.json, bench.json or matrix.json, a bundle, or an .engine file"
Old = Annotated[str, typer.Argument(metavar="OLD", help=f"The old result: {_SOURCE}.")]
New = Annotated[
    str,
    typer.Argument(
        metavar="NEW", help="The new result, of the same kind. matrix.json#NAME: one runtime of it."
    ),
]
MaxError = Annotated[
    float, typer.Option(min=0.0, help="Growth of an error that is a regression, as a share of its budget.")
]
MaxLatency = Annotated[
    float,
    typer.Option(
        min=0.0, help="Growth of a p50 that is a regression, as a share of it; less than its spread never is."
    ),
]
MaxSize = Annotated[
    float, typer.Option(min=0.0, help="Growth of an engine or of memory that is a regression, as a share.")
]
MaxBuildTime = Annotated[
    float,
    typer.Option(
        min=0.0, help="Growth of a build time that is a regression, as a share; at least 10 seconds."
    ),
]
AllowLessCoverage = Annotated[
    bool, typer.Option("--allow-less-coverage", help="Report what is no longer measured, but do not fail.")
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Fail if a latency is inconclusive, because the GPU was throttled.")
]
Everything = Annotated[bool, typer.Option("--all", help="List what is the same as well.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown for a pull request to stdout.")]
JUnit = Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with both sides.")]


def compare(
    old: Old,
    new: New,
    max_error: MaxError = 0.1,
    max_latency: MaxLatency = 0.05,
    max_size: MaxSize = 0.1,
    max_build_time: MaxBuildTime = 0.5,
    allow_less_coverage: AllowLessCoverage = False,
    strict: Strict = False,
    everything: Everything = False,
    markdown: Markdown = False,
    junit: JUnit = None,
    html: Html = None,
    json: Json = False,
) -> None:
    """Compare two reports, bundles or engines, and fail if something got worse."""
    from rich.console import Console

    found = md.compare(
        old,
        new,
        error=max_error,
        latency=max_latency,
        size=max_size,
        build_time=max_build_time,
        coverage=not allow_less_coverage,
        strict=strict,
    )
    for path, save in ((junit, found.save_junit), (html, found.save_html)):
        if path is not None:
            save(path)
    if json:
        typer.echo(found.to_json())
    elif markdown:
        typer.echo(found.to_markdown())
    else:
        from mha_deploy.cli.tables import rendered

        console, table = Console(), found.table(everything=everything)
        for group in table.groups:
            console.print(f"[bold]{group.title}[/bold]", rendered(replace(table, groups=[group])))
        console.print(f"{'PASSED' if found.passed else 'FAILED'}  {found.headline}", highlight=False)
    if not found.passed:
        raise typer.Exit(EXIT_VERDICT_FAILED)
