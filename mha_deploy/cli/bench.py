"""`mha-deploy bench`: how fast is it, at every batch and length, and beside whom?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mha_deploy.cli.options import InProcess, Json, TimeLimit, print_json, steps
from mha_deploy.cli.validate import Backends, EngineName, Kernels, Samples, refuse_unwritable
from mha_deploy.errors import EXIT_VERDICT_FAILED
from mha_deploy.validate.options import ValidateOptions

Bundles = Annotated[list[Path], typer.Argument(help="Bundles, with their engines built.")]
At = Annotated[
    list[str] | None,
    typer.Option(
        "--at", help="Sizes such as B=8,S=128, opt, prefill or decode. Can be repeated. default: a sweep"
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("-o", "--out", help="Where bench.json and bench.html go. default: the first bundle"),
]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print a table for a benchmark record.")]


def bench(
    bundles: Bundles,
    at: At = None,
    backend: Backends = None,
    engine: EngineName = None,
    samples: Samples = ValidateOptions.samples,
    kernels: Kernels = False,
    out: Out = None,
    markdown: Markdown = False,
    in_process: InProcess = False,
    time_limit: TimeLimit = None,
    json: Json = False,
) -> None:
    """Time engines, ONNX Runtime and PyTorch's own ways side by side, over batches and lengths."""
    from rich.console import Console

    from mha_deploy.bundle.folder import open_bundle
    from mha_deploy.cli.tables import point_renderable
    from mha_deploy.report.page import write_bench
    from mha_deploy.report.schema import plain_bench
    from mha_deploy.report.sections import bench_markdown
    from mha_deploy.validate.bench import BenchOptions, bench_bundle, bench_to_dict

    opened = [open_bundle(path) for path in bundles]
    options = BenchOptions(
        at=tuple(at or ()), backends=tuple(backend or ()), engine=engine, samples=samples, kernels=kernels
    )
    folder = out or opened[0].path
    refuse_unwritable(folder)
    results = []
    for bundle in opened:
        name = bundle.manifest.spec.name
        with steps(f"bench {name}") as on_step:
            results.append(bench_bundle(bundle, options, on_step=lambda step: on_step(step, 0, 0)))
        if not json and not markdown:  # one model at a time: the whole may take long
            Console().print(name, *map(point_renderable, results[-1].points))
        # After every model: the whole may take long, and what was measured must not get lost.
        data = plain_bench(bench_to_dict(results))
        _, page = write_bench(folder, data)
    if json:
        print_json(data)
    elif markdown:
        typer.echo(bench_markdown(data))
    typer.echo(f"report: {page}", err=json or markdown)
    if any(result.wrong for result in results):
        raise typer.Exit(EXIT_VERDICT_FAILED)
