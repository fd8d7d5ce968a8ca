"""The verbs: each parses its options, calls the public API, prints, and gives an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from mha_deploy.cli.arguments import (
    Axes,
    BundleFolder,
    Cache,
    Checkpoint,
    InProcess,
    Inputs,
    Json,
    Layer,
    Model,
    Projections,
    TimeLimit,
    TrustCode,
    by_name,
    model_from_options,
    print_json,
    steps,
    takes,
)
from mha_deploy.errors import EXIT_VERDICT_FAILED, DeployError
from mha_deploy.options import (
    AUTO,
    BenchOptions,
    EngineOptions,
    ExportOptions,
    Limits,
    PackageOptions,
    ValidateOptions,
)

import mha_deploy as md

if TYPE_CHECKING:
    from mha_deploy.bundle.folder import Bundle
    from mha_deploy.engine.engine import Engine
    from mha_deploy.regression.matrix import MatrixCell
    from rich.console import RenderableType


def _show(*parts: RenderableType) -> None:
    from rich.console import Console

    Console().print(*parts)


def _exit_unless(passed: bool) -> None:
    if not passed:
        raise typer.Exit(EXIT_VERDICT_FAILED)


# -- From a model to a bundle ----------------------------------------------------------------------


@takes(ExportOptions)
def export(
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to write.")],
    model: Model = "",
    hf: Checkpoint = None,
    layer: Layer = 0,
    axis: Axes = None,
    projections: Projections = None,
    cache: Cache = None,
    *,
    inputs: Inputs = None,
    in_process: InProcess = False,
    time_limit: TimeLimit = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Export an attention layer, your own model or an ONNX file to an ONNX bundle with fused attention."""
    source = model_from_options(model, hf, layer, options["prefix"], axis, cache, projections)
    files = by_name(inputs, "--input", "input_ids=ids.npy")
    with steps(f"export {source.name}") as on_step:
        bundle = md.export(source, out, inputs=files, on_step=on_step, **options)
    if not json:
        _print_bundle(bundle)
        return
    _report_removed(bundle)
    print_json({"bundle": str(bundle.path), **bundle.manifest.to_dict()})


def _print_bundle(bundle: Bundle) -> None:
    from mha_deploy.cli.tables import bundle_renderable

    _report_removed(bundle)
    _show(bundle_renderable(bundle))


def _report_removed(bundle: Bundle) -> None:
    if bundle.removed:
        typer.echo(f"removed with the old bundle: {', '.join(bundle.removed)}", err=True)


@takes(EngineOptions, "backend", "targets", "allow_decomposed", "attention", "accumulate")
@takes(ExportOptions, "precision", "seed", "weights", "prefix", "overwrite")
def deploy(
    model: Model = "",
    hf: Checkpoint = None,
    layer: Layer = 0,
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            help="The folder to write. default: bundles/MODEL-PRECISION, or bundles/MODEL-CACHE-PRECISION "
            "with a --cache that is not the spec's own",
        ),
    ] = None,
    axis: Axes = None,
    projections: Projections = None,
    cache: Cache = None,
    inputs: Inputs = None,
    engine: Annotated[bool, typer.Option(help="Whether to build an engine.")] = True,
    latency: Annotated[
        bool | None,
        typer.Option("--latency/--no-latency", help="Measure latency. default: if there is a GPU"),
    ] = None,
    candidates: Annotated[
        bool | None,
        typer.Option(
            "--candidates/--no-candidates",
            help="With --precision auto: build FP16, BF16, FP16 with FP32 where it overflows, and the "
            "plugin's accumulations, compare error, latency and fusion, and keep the best. default: if "
            "--precision auto is given, and there is a GPU",
        ),
    ] = None,
    in_process: InProcess = False,
    time_limit: TimeLimit = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Export a model, build an engine, and validate it against the FP64 oracle and beside PyTorch."""
    source = model_from_options(model, hf, layer, options["prefix"], axis, cache, projections)
    name, precision, reached = source.name, options["precision"], list[Any]()
    changed = "" if cache is None else getattr(source.source, "cache", "")
    own = "none" if hf is not None else getattr(md.load_model(model).source, "cache", "")
    if changed and changed != own:
        name += f"-{changed.replace('none', 'uncached')}"
    # A catalog layer has no weights of its own that could overflow: `auto` is FP16 there.
    written = "fp16" if precision == AUTO and hasattr(source.source, "Hq") else precision
    files = by_name(inputs, "--input", "input_ids=ids.npy")
    try:
        with steps(f"deploy {source.name}") as on_step:
            done = md.deploy(
                source,
                out or Path("bundles") / f"{name}-{written}",
                inputs=files,
                engine=engine,
                latency=latency,
                candidates=candidates,
                on_step=on_step,
                on_result=reached.append,
                **options,
            )
    except DeployError:
        if reached and not json:  # the bundle is written and its graph may be verified: print that first
            from mha_deploy.cli.tables import parity_renderable

            _print_bundle(reached[0])
            for graph in reached[1:2]:
                _show(*map(parity_renderable, graph.parity))
        raise
    data: dict[str, Any] | None = None
    if json:
        engine_data = None if done.engine is None else engine_to_dict(done.engine)
        validation = done.report.to_dict()
        data = {"bundle": str(done.bundle.path), "validation": validation, "engine": engine_data}
        if done.chosen is not None:
            data["candidates"] = [vars(trial) for trial in done.candidates]
            data["chosen"] = {"name": done.chosen.name, "why": done.why}
    else:
        from mha_deploy.cli.tables import engine_renderable, rendered

        if (tried := done.candidates_table()) is not None and done.chosen is not None:
            _show(rendered(tried))
            typer.echo(f"chosen: {done.chosen.name}: {done.why}")
        _print_bundle(done.bundle)
        if done.engine is not None:
            _show(engine_renderable(done.engine))
    _finish(done.report, done.bundle.path, data)


# -- Engines and serving ---------------------------------------------------------------------------


def check(
    bundle: BundleFolder,
    target: Annotated[str, typer.Option(help="tensorrt or tensorrt-rtx.")] = "tensorrt-rtx",
    version: Annotated[
        str | None, typer.Option(help="Version of the target, as 8.6 or 10.14. default: the newest known")
    ] = None,
    sm: Annotated[
        str, typer.Option(help="Compute capabilities of the GPUs, as 9.0 or 89,120. default: any")
    ] = "",
    json: Json = False,
) -> None:
    """Report for every attention node whether a target supports and fuses it, and if not, why."""
    answers = md.check(bundle, target, version, sm=sm)
    if json:
        verdicts = ("taken", "fused", "taken_when_lowered", "fused_when_lowered")
        print_json(
            [
                {
                    "node": answer.node.name,
                    "target": str(answer.target),
                    **{name: getattr(answer, name) for name in verdicts},
                    "findings": [asdict(finding) for finding in answer.findings],
                }
                for answer in answers
            ]
        )
    else:
        from mha_deploy.cli.tables import eligibility_renderable

        _show(eligibility_renderable(answers))
    _exit_unless(all(answer.fused_when_lowered for answer in answers))


@takes(EngineOptions)
def build_engine(
    bundle: BundleFolder,
    *,
    repeat: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of builds. From 2 on, each starts without kernel timings, and what differs between "
            "them is reported: kernels, sizes, and on a GPU errors and latencies. The last one is kept.",
        ),
    ] = 1,
    require_fused: Annotated[
        bool, typer.Option("--require-fused", help="Exit with 1 unless every attention is fused.")
    ] = False,
    require_precision: Annotated[
        bool,
        typer.Option(
            "--require-precision", help="Exit with 1 unless the engine is in the graph's precision."
        ),
    ] = False,
    in_process: InProcess = False,
    time_limit: TimeLimit = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Build a TensorRT engine from a bundle, and verify that it is fused and in the requested precision."""
    opened = md.open_bundle(bundle)
    with steps(f"build {opened.manifest.spec.name}") as on_step:
        on_step("lower, parse and build", 0, 0)
        engine = md.build_engine(opened, repeat=repeat, on_step=on_step, **options)
    if json:
        print_json(engine_to_dict(engine))
    else:
        from mha_deploy.cli.tables import engine_renderable

        _show(engine_renderable(engine))
    _exit_unless(engine.manifest.all_fused or not require_fused)
    _exit_unless(engine.manifest.is_in_precision or not require_precision)


def engine_to_dict(engine: Engine) -> dict[str, Any]:
    """An engine's manifest for machines."""
    from msgspec import to_builtins

    return {"engine": str(engine.path), **to_builtins(engine.manifest)}


@takes(PackageOptions)
def package(
    bundle: BundleFolder,
    *,
    triton: Annotated[
        Path, typer.Option("--triton", metavar="REPOSITORY", help="The model repository to write or extend.")
    ],
    json: Json = False,
    **options: Any,
) -> None:
    """Write a bundle into a Triton model repository."""
    found = md.package(bundle, triton, **options)
    if json:
        print_json({**vars(found), "path": str(found.path)})
        return
    batch = f"batches up to {found.max_batch}" if found.max_batch else "no batching"
    typer.echo(f"{found.path}: {found.variant}, run by {', '.join(found.backends)}, {batch}")
    for file in found.files:
        typer.echo(f"  {file}")
    typer.echo(f"start: {found.command} (the whole line is in README.md)")


plugins = typer.Typer(
    name="plugins",
    help="Build the plugin library of fused attention for TensorRT, and list the ones on this machine.",
    no_args_is_help=True,
)
Include = Annotated[Path | None, typer.Option(help="Folder of its header files. default: searched for")]


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
        from mha_deploy.cli.tables import parts_renderable

        _show(parts_renderable(parts))
    with steps("build the plugin library") as on_step:
        made = md.build_plugins(parts, out=out, architectures=arch, on_step=on_step)
    if json:
        listed = {
            found.part.key: {
                "paths": [str(path) for path in found.paths],
                "by": found.by,
                "version": found.version,
            }
            for found in parts
        }
        described = None if made.library is None else made.library.to_dict()
        print_json({"path": str(made.path), "found": listed, "library": described})
        return
    typer.echo(f"built {made.path}")
    if made.library is None:
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
def where(backend: Annotated[str, typer.Option(help="tensorrt or tensorrt-rtx.")] = "tensorrt") -> None:
    """Print the path of the library that would be loaded. Exits with 1 if there is none."""
    from mha_deploy.engine.plugins import PluginError

    try:
        path = md.find_plugin(backend).path
    except PluginError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_VERDICT_FAILED) from error
    typer.echo(str(path))


# -- Verdicts and times ----------------------------------------------------------------------------


@takes(ValidateOptions)
def validate(
    bundle: BundleFolder,
    *,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Folder of report.json and report.html. default: the bundle"),
    ] = None,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write the report.")] = True,
    self_test: Annotated[
        bool,
        typer.Option("--self-test", help="Only mutate the graph, and check that each mutation is detected."),
    ] = False,
    trust_code: TrustCode = False,
    in_process: InProcess = False,
    time_limit: TimeLimit = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Run the graph and the engines of a bundle against the FP64 oracle, and time them beside PyTorch."""
    asked = {f"--{name}": options[name] or None for name in ("steps", "prompt", "batch")}
    got = " ".join(f"{name} {number}" for name, number in asked.items() if number is not None)
    if self_test and got:
        raise DeployError(
            "The self-test has no decode steps.", got=f"--self-test {got}", hint="use one of them at a time"
        )
    if self_test and options["url"] is not None:
        raise DeployError(
            "The self-test mutates a graph, and a server has its own.",
            got=f"--self-test --url {options['url']}",
            hint="use one of them at a time",
        )
    if got and not options["steps"]:
        raise DeployError(
            "--prompt and --batch have no effect without --steps.", got=got, hint="add --steps 64"
        )
    opened = md.open_bundle(bundle)
    name = opened.manifest.spec.name
    if self_test:
        from mha_deploy.cli.tables import self_test_renderable

        with steps(f"self-test {name}") as on_step:
            tested = md.self_test(opened, next(iter(options["backends"]), None), on_step=on_step)
        if json:
            print_json(tested.to_dict())
        else:
            _show(self_test_renderable(tested))
        _exit_unless(tested.passed)
        return
    folder = (out or opened.path) if report else None
    if folder is not None:
        _refuse_unwritable(folder)
    with steps(f"validate {name}") as on_step:
        result = md.validate(opened, on_step=on_step, **options)
    _finish(result, folder, result.to_dict() if json else None)


def _finish(report: md.Report, folder: Path | None, data: dict[str, Any] | None) -> None:
    """Print a report, or its data as JSON, write it into a folder, and exit with its verdict."""
    if data is None:
        from mha_deploy.cli.tables import report_renderable

        _show(report_renderable(report.record))
    else:
        print_json(data)
    if folder is not None:
        typer.echo(f"report: {report.save(folder)}", err=data is not None)
    _exit_unless(report.passed)


def _refuse_unwritable(folder: Path) -> None:
    """Refuse, before a long validation, a folder that its report cannot be written to."""
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise DeployError(
            "The report cannot be written there.", got=folder, hint="-o elsewhere, or --no-report"
        )


def bisect(
    bundle: BundleFolder,
    backend: Annotated[
        str | None,
        typer.Option(
            help="A runtime, or the name of an engine. default: the first engine that runs here, else a CPU "
            "runtime"
        ),
    ] = None,
    trust_code: TrustCode = False,
    in_process: InProcess = False,
    time_limit: TimeLimit = None,
    json: Json = False,
) -> None:
    """Find the first attention, and then the first node, at which an engine or runtime deviates."""
    opened = md.open_bundle(bundle)
    with steps(f"bisect {opened.manifest.spec.name}") as on_step:
        found = md.bisect(opened, backend, on_step=on_step)
    if json:
        print_json(found.to_dict())
    else:
        from mha_deploy.cli.tables import bisection_renderable

        _show(bisection_renderable(found))
    _exit_unless(found.wrong is None)


@takes(BenchOptions)
def bench(
    bundles: Annotated[
        list[Path] | None,
        typer.Argument(metavar="BUNDLE", help="One or more bundles, with their engines built."),
    ] = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Folder of bench.json and bench.html. default: the first bundle"),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table to stdout.")] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Add every measurement to this file as a line of JSON: samples, hashes, conditions.",
        ),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(min=1, help="Measure in this many processes, one after the other. Needs --record."),
    ] = 1,
    replay: Annotated[
        str | None,
        typer.Option(
            "--replay",
            metavar="FILE:LINE",
            help="Measure a line of a record again, and exit with 1 unless both agree. BUNDLE, default: the "
            "folder that was recorded.",
        ),
    ] = None,
    trust_code: TrustCode = False,
    in_process: InProcess = False,
    time_limit: TimeLimit = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Time engines, ONNX Runtime and the PyTorch baselines side by side, over batches and lengths."""
    if replay is not None:
        _replay(replay, bundles)
        return
    if not bundles:
        raise DeployError("A bundle is needed.", hint="mha-deploy bench BUNDLE, or --replay FILE:LINE")
    if processes > 1:
        _in_processes(processes, record)
        return
    from mha_deploy.cli.tables import point_renderable, throughput_renderable

    # A wrong folder is reported before anything is read; `md.bench` looks for a GPU before it hashes.
    names = {path: md.open_bundle(path, verify=False).manifest.spec.name for path in bundles}
    folder = out or bundles[0]
    _refuse_unwritable(folder)
    report = md.BenchReport(())
    for path, name in names.items():
        with steps(f"bench {name}") as on_step:
            found = md.bench(path, on_step=on_step, **options)
        if not json and not markdown:
            _show(name, *map(point_renderable, found.points))
            if found.throughput:
                _show(throughput_renderable(found.throughput))
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
    _exit_unless(report.passed)


def _replay(line: str, bundles: list[Path] | None) -> None:
    found = md.replay(line, bundles[0] if bundles else None)
    recorded, measured = found.recorded, found.measured
    typer.echo(f"{recorded.model} {recorded.precision}, {recorded.runtime}: {found.status}: {found.why}")
    for name, version in measured.versions.items():
        if (old := recorded.versions.get(name, "none")) != version:
            typer.echo(f"{name}: {old} then, {version} now")
    _exit_unless(found.passed)


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


# -- Upgrades --------------------------------------------------------------------------------------


@takes(Limits)
def compare(
    old: Annotated[
        str,
        typer.Argument(
            metavar="OLD",
            help="The old result: a report.json, bench.json or matrix.json, a bundle, or an .engine file.",
        ),
    ],
    new: Annotated[
        str,
        typer.Argument(
            metavar="NEW", help="The new result, of the same kind. matrix.json#NAME: one runtime of it."
        ),
    ],
    *,
    everything: Annotated[bool, typer.Option("--all", help="List what is the same as well.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown for a pull request to stdout.")
    ] = False,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with both sides.")
    ] = None,
    json: Json = False,
    **limits: Any,
) -> None:
    """Compare two reports, bundles or engines, and fail if something got worse."""
    found = md.compare(old, new, **limits)
    for path, save in ((junit, found.save_junit), (html, found.save_html)):
        if path is not None:
            save(path)
    if json:
        typer.echo(found.to_json())
    elif markdown:
        typer.echo(found.to_markdown())
    else:
        from mha_deploy.cli.tables import rendered

        table = found.table(everything=everything)
        for group in table.groups:
            _show(f"[bold]{group.title}[/bold]", rendered(replace(table, groups=[group])))
        typer.echo(f"{'PASSED' if found.passed else 'FAILED'}  {found.headline}")
    _exit_unless(found.passed)


def matrix(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan, a TOML file; see docs/matrix.md.")],
    out: Annotated[
        Path,
        typer.Option("-o", "--out", help="Folder of results. A second run does only what is missing there."),
    ] = Path("matrix"),
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Local processes, this many at a time, instead of Ray. default: Ray, or 1 without it"
        ),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster. default: Ray on this machine")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the heat map as Markdown to stdout.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Add every engine that was built but not run to this file as a line."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Build and judge every combination of models, precisions, runtimes, GPUs and options of a plan."""
    with _cells() as on_cell:
        found = md.matrix(plan, out, jobs=jobs, address=address, on_cell=on_cell)
    page = found.save(out)
    if record is not None:
        found.record(record)
    if json:
        print_json(found.to_dict())
    elif markdown:
        typer.echo(found.to_markdown())
    else:
        from mha_deploy.cli.tables import rendered

        _show(rendered(found.tables()[0]))
        for cell in found.cells:
            if cell.status not in ("passed", "built"):
                typer.echo(f"{cell.model} {cell.precision}, {cell.runtime}: {cell.status}: {cell.why}")
        typer.echo(f"{'PASSED' if found.passed else 'FAILED'}  {found.headline}")
    typer.echo(f"report: {page}", err=json or markdown)
    _exit_unless(found.passed)


@contextmanager
def _cells() -> Iterator[Callable[[MatrixCell, int, int], None]]:
    """Show the cells as they are done: a live table on a terminal, elsewhere a line for each."""
    from rich.console import Console
    from rich.live import Live

    from mha_deploy.cli.tables import cells_renderable

    console = Console(stderr=True)
    cells: list[MatrixCell] = []

    def print_line(cell: MatrixCell, done: int, total: int) -> None:
        again = "" if cell.is_new else ", from an earlier run"
        line = f"{done}/{total} {cell.model} {cell.precision}, {cell.runtime}: {cell.summary}{again}"
        console.print(line, highlight=False, markup=False)

    if not console.is_terminal:
        yield print_line
        return
    with Live(console=console, transient=True, refresh_per_second=4) as live:

        def update(cell: MatrixCell, done: int, total: int) -> None:
            cells.append(cell)
            live.update(cells_renderable(cells[-console.height + 6 :], f"{done} of {total} cells"))

        yield update


# -- What is known without running anything --------------------------------------------------------


def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A bundle, an .engine file or an .onnx file.")],
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Compare the manifest of a bundle with its graph as well, as every other verb does.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Show what is in a bundle, an engine or an ONNX file, and check its hashes."""
    found = md.inspect(path, verify=verify)
    if json:
        if found.bundle is not None:
            graph = "matches" if verify else "not compared"
            data = {"bundle": str(path), "hashes": "match", "graph": graph}
            print_json(data | found.bundle.manifest.to_dict())
        elif found.engines:
            (engine,) = found.engines
            here = {"misfits": list(found.misfits), "shown": engine.is_shown}
            print_json(engine_to_dict(engine) | here)
        else:
            print_json({"file": str(path), "attention": list(found.attention)})
        return
    from mha_deploy.cli.tables import attention_renderable, bundle_renderable, engine_renderable

    if found.bundle is not None:
        _show(bundle_renderable(found.bundle, details=True))
        for engine in found.engines:
            manifest = engine.manifest
            fused = manifest.fusion_summary + ("" if engine.is_shown else " (not verified)")
            typer.echo(f"engine {engine.path}: {manifest.backend} {manifest.version}, {fused}")
        if not verify:
            typer.echo("The hashes match. The manifest was not compared with the graph: --verify does that.")
    elif found.engines:
        (engine,) = found.engines
        _show(engine_renderable(engine, details=True))
        fits = "It can run on this machine."
        if found.misfits:
            fits = f"It cannot run on this machine: {'; '.join(found.misfits)}."
        typer.echo(fits)
        if not engine.is_shown:
            typer.echo("The verdict is that of the build: only TensorRT can read this plan.")
    else:
        _show(attention_renderable(found.attention))


def models(
    every: Annotated[bool, typer.Option("--all", help="Include the small layers of the tests.")] = False,
    json: Json = False,
) -> None:
    """List the catalog of layers with their heads, parameters and KV-cache bytes per token."""
    from mha_deploy.cli.tables import model_row, models_renderable

    rows = [model_row(spec) for spec in md.models(tiny=every)]
    if json:
        print_json(rows)
    else:
        _show(models_renderable(rows))


@takes(ExportOptions, "weights", "prefix", "seed")
def analyze(
    model: Model = "",
    hf: Checkpoint = None,
    layer: Layer = 0,
    gpu: Annotated[
        str,
        typer.Option(help="GPU whose peak figures are used: h200, h100, a100, rtx-4090, rtx-5090 or orin."),
    ] = "h200",
    precision: Annotated[
        str, typer.Option(help="Precision of weights and activations: fp16, bf16 or fp32.")
    ] = "fp16",
    at: Annotated[
        str | None,
        typer.Option(
            help="Sizes, as B=1,S=2048, or of a layer with a KV cache prefill or decode. "
            "default: the optimum of every axis; with a KV cache, the decode step"
        ),
    ] = None,
    axis: Axes = None,
    heads: Annotated[
        Path | None,
        typer.Option(
            help="Compare the heads as well, and write a heatmap to this PNG file. Needs PyTorch. Your own "
            "model is analyzed by this alone."
        ),
    ] = None,
    attention: Annotated[
        str | None, typer.Option(help="The attention of your own model for --heads. default: the first")
    ] = None,
    *,
    inputs: Annotated[
        Path | None, typer.Option(help="An .npz file of inputs for --heads. default: random inputs")
    ] = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Count parameters, FLOPs and bytes per stage, and the roofline bound. Nothing is run without --heads."""
    if inputs is not None and heads is None:
        raise DeployError("--inputs is only used with --heads.", got=inputs, hint="add --heads FILE.png")
    source = model_from_options(model, hf, layer, options["prefix"], axis)
    analysis = similarity = None
    if hasattr(source.source, "Hq") or heads is None:
        analysis = md.analyze(source, gpu=gpu, precision=precision, at=at)
    if heads is not None:
        similarity = md.compare_heads(source, at=at, inputs=inputs, attention=attention, **options)
        name = f" {similarity.attention}" if similarity.attention else ""
        similarity.save_png(heads, title=f"{source.name}{name}: similarity of heads")
    if json:
        found = {} if analysis is None else analysis.to_dict()
        print_json(found | ({} if similarity is None else {"heads": similarity.to_dict()}))
        return
    from mha_deploy.cli.tables import analysis_renderable, similarity_renderable

    if analysis is not None:
        _show(analysis_renderable(analysis))
    if similarity is not None:
        _show(similarity_renderable(similarity))
        typer.echo(f"Heatmap: {heads}")


def doctor(
    load: Annotated[
        bool,
        typer.Option(
            "--load",
            help="Import PyTorch, ONNX, onnxscript and matplotlib as well, to check that they work. "
            "default: they are only looked up, since importing them takes seconds",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Show which runtimes and GPUs this machine has, what each is for, and how to install the rest."""
    found = md.doctor(load=load)
    if json:
        print_json(found)
        return
    from mha_deploy.cli.tables import runtimes_renderable

    own = found["versions"]
    typer.echo(f"mha-deploy {own['mha-deploy']} on Python {own['python']}")
    _show(runtimes_renderable(found["runtimes"]))
    if any(each["works"] and not each["loaded"] for each in found["runtimes"]):
        typer.echo("installed: found, not imported; `mha-deploy doctor --load` imports it")
    for gpu in found["gpus"]:
        typer.echo(f"GPU: {', '.join(gpu.values())}")
    if not found["gpus"]:
        typer.echo("GPU: none reported by nvidia-smi")
    for verb, possible in found["can"].items():
        typer.echo(f"{verb}: {'yes' if possible else 'no'}")
    typer.echo(
        "bundles from others: files, graph and oracle are checked; code that a bundle names or contains runs "
        "only with --trust-code; TensorRT loads plans in a child process, so build engines yourself "
        "(docs/security.md)"
    )
