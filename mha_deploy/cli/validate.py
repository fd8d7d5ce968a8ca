"""`mha-deploy validate`: is the result right, and how fast is it?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mha_deploy.cli.options import BundleFolder, InProcess, Json, TimeLimit, print_json
from mha_deploy.cli.options import steps as progress
from mha_deploy.errors import EXIT_VERDICT_FAILED
from mha_deploy.validate.options import ValidateOptions

if TYPE_CHECKING:
    from mha_deploy.bundle.folder import Bundle
    from mha_deploy.validate.evaluate import Evaluation
    from mha_deploy.validate.verdict import Report

Backends = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        help="Backend to validate: an engine's name, ort-cuda, ort-cpu, onnx-reference, eager, sdpa-cudnn … "
        "Can be repeated. default: the graph and every engine that can run here, beside PyTorch",
    ),
]
EngineName = Annotated[
    str | None, typer.Option("--engine", help="The one engine to run. default: all of the bundle's")
]
Latency = Annotated[
    bool | None,
    typer.Option("--latency/--no-latency", help="Whether to measure latency. default: where there is a GPU"),
]
Sweep = Annotated[
    bool | None,
    typer.Option(
        "--sweep/--no-sweep",
        help="Whether to run every profile at its corners. default: where an engine runs",
    ),
]
Fresh = Annotated[int, typer.Option(min=0, help="How many random cases to draw besides. Needs PyTorch.")]
Steps = Annotated[
    int,
    typer.Option(min=0, help="Decode steps besides those of the bundle, for a layer with a KV cache."),
]
Prompt = Annotated[int | None, typer.Option(min=1, help="Length of the prompt before --steps.")]
Batch = Annotated[
    int | None, typer.Option(min=1, help="Batch elements of --steps. default: the optimum of the axis B")
]
Conformance = Annotated[bool, typer.Option("--conformance", help="Also test how every runtime treats masks.")]
Samples = Annotated[int, typer.Option(min=100, help="Samples of each timing.")]
Kernels = Annotated[
    bool, typer.Option("--kernels", help="Say which kernels take the time. Needs PyTorch's profiler.")
]
RequireFused = Annotated[
    bool, typer.Option("--require-fused", help="Fail unless every attention of the engines is fused.")
]
Layers = Annotated[
    bool,
    typer.Option(
        "--layers", help="Of your own model: judge the engines attention by attention, in a twin of each."
    ),
]
RequirePrecision = Annotated[
    bool, typer.Option("--require-precision", help="Fail unless the engines are in the graph's precision.")
]
Out = Annotated[
    Path | None,
    typer.Option("-o", "--out", help="Where report.json and report.html go. default: the bundle"),
]
Write = Annotated[bool, typer.Option("--report/--no-report", help="Whether to write the report.")]
SelfTest = Annotated[
    bool,
    typer.Option("--self-test", help="Only mutate the graph, and show that each mutation is detected."),
]


def validate(
    bundle: BundleFolder,
    backend: Backends = None,
    engine: EngineName = None,
    latency: Latency = None,
    sweep: Sweep = None,
    fresh: Fresh = ValidateOptions.fresh,
    steps: Steps = ValidateOptions.steps,
    prompt: Prompt = None,
    batch: Batch = None,
    layers: Layers = False,
    conformance: Conformance = False,
    samples: Samples = ValidateOptions.samples,
    kernels: Kernels = False,
    require_fused: RequireFused = False,
    require_precision: RequirePrecision = False,
    out: Out = None,
    report: Write = True,
    self_test: SelfTest = False,
    in_process: InProcess = False,
    time_limit: TimeLimit = None,
    json: Json = False,
) -> None:
    """Run the graph and the engines of a bundle against the FP64 oracle, and time them beside PyTorch."""
    from mha_deploy.bundle.folder import open_bundle

    _refuse_unheard(steps, prompt, batch, self_test)
    opened = open_bundle(bundle)
    if self_test:
        _self_test(opened, backend, json)
        return
    options = ValidateOptions(
        backends=tuple(backend or ()),
        engine=engine,
        latency=latency,
        sweep=sweep,
        fresh=fresh,
        steps=steps,
        prompt=prompt,
        batch=batch,
        layers=layers,
        conformance=conformance,
        samples=samples,
        kernels=kernels,
        require_fused=require_fused,
        require_precision=require_precision,
    )
    folder = (out or opened.path) if report else None
    if folder is not None:
        refuse_unwritable(folder)
    show_result(validate_with_progress(opened, options), folder, json)


def _refuse_unheard(steps: int, prompt: int | None, batch: int | None, self_test: bool) -> None:
    """Refuse options about fresh tokens where nobody is stepped through any."""
    from mha_deploy.errors import DeployError

    given = {"--steps": steps or None, "--prompt": prompt, "--batch": batch}
    got = " ".join(f"{name} {number}" for name, number in given.items() if number is not None)
    if self_test and got:
        raise DeployError(
            "The self-test steps through no tokens.", got=f"--self-test {got}", hint="one of them at a time"
        )
    if got and not steps:
        raise DeployError(
            "Without --steps there are no tokens that this could be about.", got=got, hint="add --steps 64"
        )


def show_result(result: Report, folder: Path | None, json: bool) -> None:
    """Print a report, write it where there is a folder for it, and exit with its verdict."""
    data = report_to_json(result)
    if json:
        print_json(data)
    else:
        print_report(result)
    if folder is not None:
        write_report_files(data, folder, quiet=json)
    if not result.passed:
        raise typer.Exit(EXIT_VERDICT_FAILED)


def _self_test(bundle: Bundle, backends: list[str] | None, json: bool) -> None:
    from rich.console import Console

    from mha_deploy.cli.tables import self_test_renderable
    from mha_deploy.graph.mutate import mutations
    from mha_deploy.validate.self_test import self_test

    names = mutations()
    with progress(f"self-test {bundle.manifest.spec.name}") as on_step:
        result = self_test(
            bundle,
            backends[0] if backends else None,
            on_mistake=lambda name: on_step(f"mutations: {name}", names.index(name), len(names)),
        )
    if json:
        print_json(result.to_dict())
    else:
        Console().print(self_test_renderable(result))
    if not result.passed:
        raise typer.Exit(EXIT_VERDICT_FAILED)


def validate_with_progress(bundle: Bundle, options: ValidateOptions) -> Report:
    """Validate with progress on stderr."""
    from mha_deploy.api import validate

    with progress(f"validate {bundle.manifest.spec.name}") as on_step:
        return validate(bundle, **vars(options), on_step=on_step).record


def report_to_json(report: Report) -> dict[str, object]:
    """A report as plain data, checked against its own schema."""
    from mha_deploy.report.schema import plain_report

    return plain_report(report.to_dict())


def refuse_unwritable(folder: Path) -> None:
    """Say before a long validation that its report could not be written."""
    from mha_deploy.errors import DeployError

    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise DeployError(
            "The report cannot be written there.", got=folder, hint="-o elsewhere, or --no-report"
        )


def write_report_files(data: dict[str, object], folder: Path, *, quiet: bool = False) -> None:
    """Write the report, and say where."""
    from mha_deploy.report.page import write_report

    _, page = write_report(folder, data)
    typer.echo(f"report: {page}", err=quiet)


def print_report(report: Report) -> None:
    """Print the verdict for people."""
    from rich.console import Console

    from mha_deploy.cli.tables import report_renderable

    Console().print(report_renderable(report))


def print_parity(evaluation: Evaluation) -> None:
    """Print how one runtime was judged."""
    from rich.console import Console

    from mha_deploy.cli.tables import parity_renderable

    Console().print(*map(parity_renderable, evaluation.parity))
