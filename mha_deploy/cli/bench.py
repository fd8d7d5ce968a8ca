"""`mha-deploy bench`: latency over batches and lengths, beside the baselines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

import mha_deploy as md
from mha_deploy.cli.options import InProcess, Json, TimeLimit, TrustCode, print_json, steps
from mha_deploy.cli.validate import Backends, EngineName, Kernels, Samples, refuse_unwritable, whole_numbers
from mha_deploy.errors import EXIT_VERDICT_FAILED, DeployError
from mha_deploy.options import ValidateOptions

Bundles = Annotated[
    list[Path] | None,
    typer.Argument(metavar="BUNDLE", help="One or more bundles, with their engines built."),
]
Record = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Add every measurement to this file as a line of JSON: samples, hashes, conditions.",
    ),
]
Processes = Annotated[
    int, typer.Option(min=1, help="Measure in this many processes, one after the other. Needs --record.")
]
ReplayLine = Annotated[
    str | None,
    typer.Option(
        "--replay",
        metavar="FILE:LINE",
        help="Measure a line of a record again, and exit with 1 unless both agree. BUNDLE, default: the "
        "folder that was recorded.",
    ),
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
Streams = Annotated[
    str,
    typer.Option(
        metavar="N,N",
        help="Numbers of CUDA streams, as 1,2,4,8: measure calls per second on so many, too.",
    ),
]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print a Markdown table to stdout.")]


def bench(
    bundles: Bundles = None,
    at: At = None,
    backend: Backends = None,
    engine: EngineName = None,
    samples: Samples = ValidateOptions.samples,
    kernels: Kernels = False,
    streams: Streams = "",
    out: Out = None,
    markdown: Markdown = False,
    record: Record = None,
    processes: Processes = 1,
    replay: ReplayLine = None,
    trust_code: TrustCode = False,
    in_process: InProcess = False,
    time_limit: TimeLimit = None,
    json: Json = False,
) -> None:
    """Time engines, ONNX Runtime and the PyTorch baselines side by side, over batches and lengths."""
    from rich.console import Console

    from mha_deploy.cli.tables import point_renderable, throughput_renderable

    if replay is not None:
        _replay(replay, bundles)
        return
    if not bundles:
        raise DeployError("A bundle is needed.", hint="mha-deploy bench BUNDLE, or --replay FILE:LINE")
    if processes > 1:
        _in_processes(processes, record)
        return
    # A wrong folder is reported before anything is read; `md.bench` looks for a GPU before it hashes.
    names = {path: md.open_bundle(path, verify=False).manifest.spec.name for path in bundles}
    counts = whole_numbers(streams, "--streams") if streams else ()
    folder = out or bundles[0]
    refuse_unwritable(folder)
    report = md.BenchReport(())
    for path, name in names.items():
        with steps(f"bench {name}") as on_step:
            found = md.bench(
                path,
                at=at or (),
                backends=backend or (),
                engine=engine,
                samples=samples,
                kernels=kernels,
                streams=counts,
                on_step=on_step,
            )
        if not json and not markdown:
            Console().print(name, *map(point_renderable, found.points))
            if found.throughput:
                Console().print(throughput_renderable(found.throughput))
        # Written after every model: a later one may fail, and what was measured must not get lost.
        report = md.BenchReport([*report.records, found])
        page = report.save(folder)
        if record is not None:
            md.BenchReport([found]).record(record)
    if json:
        print_json(report.to_dict())
    elif markdown:
        typer.echo(report.to_markdown())
    typer.echo(f"report: {page}", err=json or markdown)
    if not report.passed:
        raise typer.Exit(EXIT_VERDICT_FAILED)


def _replay(line: str, bundles: list[Path] | None) -> None:
    found = md.replay(line, bundles[0] if bundles else None)
    recorded, measured = found.recorded, found.measured
    typer.echo(f"{recorded.model} {recorded.precision}, {recorded.runtime}: {found.status}: {found.why}")
    changed = {
        name: (recorded.versions.get(name, "none"), version)
        for name, version in measured.versions.items()
        if recorded.versions.get(name) != version
    }
    for name, (old, new) in changed.items():
        typer.echo(f"{name}: {old} then, {new} now")
    if not found.passed:
        raise typer.Exit(EXIT_VERDICT_FAILED)


def _in_processes(processes: int, record: Path | None) -> None:
    """Run this command again in fresh processes: clocks, caches and tactics start anew in each."""
    if record is None:
        raise DeployError(
            "Several processes need a file to write to.", got="--processes", hint="--record FILE"
        )
    arguments = [*sys.argv[1:], "--processes", "1"]  # the last one counts
    for _ in range(processes):
        done = subprocess.run([sys.executable, "-m", "mha_deploy", *arguments])
        if done.returncode:
            raise typer.Exit(done.returncode)
