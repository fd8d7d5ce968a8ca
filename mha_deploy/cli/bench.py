"""`mha-deploy bench`: latency over batches and lengths, beside the baselines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import mha_deploy as md
from mha_deploy.cli.options import InProcess, Json, TimeLimit, TrustCode, print_json, steps
from mha_deploy.cli.validate import Backends, EngineName, Kernels, Samples, refuse_unwritable
from mha_deploy.errors import EXIT_VERDICT_FAILED
from mha_deploy.validate.options import ValidateOptions

Bundles = Annotated[
    list[Path], typer.Argument(metavar="BUNDLE", help="One or more bundles, with their engines built.")
]
At = Annotated[
    list[str] | None,
    typer.Option(
        "--at",
        metavar="SIZES",
        help="Sizes, as B=8,S=128, or opt, prefill or decode. Can be repeated. "
        "default: a sweep over batches and lengths",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("-o", "--out", help="Folder of bench.json and bench.html. default: the first bundle"),
]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print a Markdown table to stdout.")]


def bench(
    bundles: Bundles,
    at: At = None,
    backend: Backends = None,
    engine: EngineName = None,
    samples: Samples = ValidateOptions.samples,
    kernels: Kernels = False,
    out: Out = None,
    markdown: Markdown = False,
    trust_code: TrustCode = False,
    in_process: InProcess = False,
    time_limit: TimeLimit = None,
    json: Json = False,
) -> None:
    """Time engines, ONNX Runtime and the PyTorch baselines side by side, over batches and lengths."""
    from rich.console import Console

    from mha_deploy.cli.tables import point_renderable

    opened = [md.open_bundle(path) for path in bundles]
    folder = out or opened[0].path
    refuse_unwritable(folder)
    report = md.BenchReport(())
    for bundle in opened:
        name = bundle.manifest.spec.name
        with steps(f"bench {name}") as on_step:
            found = md.bench(
                bundle,
                at=at or (),
                backends=backend or (),
                engine=engine,
                samples=samples,
                kernels=kernels,
                on_step=on_step,
            )
        if not json and not markdown:
            Console().print(name, *map(point_renderable, found.points))
        # Written after every model: a later one may fail, and what was measured must not get lost.
        report = md.BenchReport([*report.records, found])
        page = report.save(folder)
    if json:
        print_json(report.to_dict())
    elif markdown:
        typer.echo(report.to_markdown())
    typer.echo(f"report: {page}", err=json or markdown)
    if not report.passed:
        raise typer.Exit(EXIT_VERDICT_FAILED)
