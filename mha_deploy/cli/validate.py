"""`mha-deploy validate`: whether the results are right, and the latency."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

import mha_deploy as md
from mha_deploy.cli.options import BundleFolder, InProcess, Json, TimeLimit, TrustCode, print_json
from mha_deploy.cli.options import steps as progress
from mha_deploy.errors import EXIT_VERDICT_FAILED, DeployError
from mha_deploy.options import ValidateOptions

Backends = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="A backend to run: the name of an engine, ort-cuda, ort-cpu, onnx-reference, eager, "
        "sdpa-cudnn … Can be repeated. default: the graph, every engine that can run here, and the PyTorch "
        "baselines",
    ),
]
EngineName = Annotated[
    str | None, typer.Option("--engine", help="Run only this engine. default: all engines of the bundle")
]
Latency = Annotated[
    bool | None,
    typer.Option("--latency/--no-latency", help="Measure latency. default: if there is a GPU"),
]
Sweep = Annotated[
    bool | None,
    typer.Option(
        "--sweep/--no-sweep",
        help="Run every optimization profile at its corners. default: if an engine and PyTorch can run here",
    ),
]
Probe = Annotated[
    bool | None,
    typer.Option(
        "--probe/--no-probe",
        help="Try inputs that make masks, positions and caches visible. default: if PyTorch is installed",
    ),
]
Fresh = Annotated[
    int, typer.Option(min=0, help="Number of random cases besides those of the bundle. Needs PyTorch.")
]
Steps = Annotated[
    int,
    typer.Option(
        min=0, help="Decode steps besides those of the bundle, for a model with a KV cache. Needs PyTorch."
    ),
]
Prompt = Annotated[
    int | None,
    typer.Option(min=1, help="Length of the prompt before --steps. default: the opt value of axis S"),
]
Batch = Annotated[
    int | None, typer.Option(min=1, help="Batch size of --steps. default: the opt value of axis B")
]
Layers = Annotated[
    bool,
    typer.Option(
        "--layers",
        help="For your own model: judge the engines attention by attention as well, in a second build that "
        "returns each attention.",
    ),
]
Conformance = Annotated[
    bool, typer.Option("--conformance", help="Also test the mask semantics of every runtime.")
]
Samples = Annotated[int, typer.Option(min=100, help="Samples of each timing.")]
Kernels = Annotated[
    bool, typer.Option("--kernels", help="List the kernels that take the time. Needs PyTorch's profiler.")
]
RequireFused = Annotated[
    bool, typer.Option("--require-fused", help="Fail unless every attention of the engines is fused.")
]
RequirePrecision = Annotated[
    bool,
    typer.Option(
        "--require-precision", help="Fail unless the engines compute in the precision of the graph."
    ),
]
RequireRun = Annotated[bool, typer.Option("--require-run", help="Fail unless every engine was run.")]
RequireCoverage = Annotated[
    bool,
    typer.Option(
        "--require-coverage", help="Fail unless every engine, profile and axis was run up to its maximum."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("-o", "--out", help="Folder of report.json and report.html. default: the bundle"),
]
Write = Annotated[bool, typer.Option("--report/--no-report", help="Write the report.")]
Url = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Validate through a server: grpc://HOST:PORT or http://HOST:PORT, with /MODEL behind it where "
        "the model has another name than the bundle's.",
    ),
]
Clients = Annotated[
    str, typer.Option(metavar="N,N", help="Of --url: clients that send requests at the same time.")
]
Requests = Annotated[int, typer.Option(min=1, help="Of --url: requests for each number of clients.")]
Timeout = Annotated[
    float, typer.Option(min=0.001, help="Of --url: seconds after which a request counts as unanswered.")
]
SelfTest = Annotated[
    bool,
    typer.Option("--self-test", help="Only mutate the graph, and check that each mutation is detected."),
]


def validate(
    bundle: BundleFolder,
    backend: Backends = None,
    engine: EngineName = None,
    latency: Latency = None,
    sweep: Sweep = None,
    probe: Probe = None,
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
    require_run: RequireRun = False,
    require_coverage: RequireCoverage = False,
    url: Url = None,
    clients: Clients = "1,8,32",
    requests: Requests = 256,
    timeout: Timeout = 30.0,
    out: Out = None,
    report: Write = True,
    self_test: SelfTest = False,
    trust_code: TrustCode = False,
    in_process: InProcess = False,
    time_limit: TimeLimit = None,
    json: Json = False,
) -> None:
    """Run the graph and the engines of a bundle against the FP64 oracle, and time them beside PyTorch."""
    asked = {"--steps": steps or None, "--prompt": prompt, "--batch": batch}
    got = " ".join(f"{name} {number}" for name, number in asked.items() if number is not None)
    if self_test and got:
        raise DeployError(
            "The self-test has no decode steps.", got=f"--self-test {got}", hint="use one of them at a time"
        )
    if self_test and url is not None:
        raise DeployError(
            "The self-test mutates a graph, and a server has its own.",
            got=f"--self-test --url {url}",
            hint="use one of them at a time",
        )
    if got and not steps:
        raise DeployError(
            "--prompt and --batch have no effect without --steps.", got=got, hint="add --steps 64"
        )
    opened = md.open_bundle(bundle)
    if self_test:
        _self_test(opened, backend, json)
        return
    folder = (out or opened.path) if report else None
    if folder is not None:
        refuse_unwritable(folder)
    with progress(f"validate {opened.manifest.spec.name}") as on_step:
        result = md.validate(
            opened,
            backends=backend or (),
            engine=engine,
            latency=latency,
            sweep=sweep,
            probe=probe,
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
            require_run=require_run,
            require_coverage=require_coverage,
            url=url,
            clients=whole_numbers(clients, "--clients"),
            requests=requests,
            timeout_s=timeout,
            on_step=on_step,
        )
    finish(result, folder, result.to_dict() if json else None)


def _self_test(bundle: Any, backends: list[str] | None, json: bool) -> None:
    from rich.console import Console

    from mha_deploy.cli.tables import self_test_renderable

    with progress(f"self-test {bundle.manifest.spec.name}") as on_step:
        result = md.self_test(bundle, backends[0] if backends else None, on_step=on_step)
    if json:
        print_json(result.to_dict())
    else:
        Console().print(self_test_renderable(result))
    if not result.passed:
        raise typer.Exit(EXIT_VERDICT_FAILED)


def finish(report: md.Report, folder: Path | None, data: dict[str, Any] | None) -> None:
    """Print a report, or its data as JSON, write it into a folder, and exit with its verdict."""
    if data is None:
        from rich.console import Console

        from mha_deploy.cli.tables import report_renderable

        Console().print(report_renderable(report.record))
    else:
        print_json(data)
    if folder is not None:
        typer.echo(f"report: {report.save(folder)}", err=data is not None)
    if not report.passed:
        raise typer.Exit(EXIT_VERDICT_FAILED)


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """Read numbers such as `1,8,32`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise DeployError(f"{option} needs whole numbers.", got=text, hint=f"{option} 1,8,32")
    return tuple(dict.fromkeys(map(int, parts)))


def refuse_unwritable(folder: Path) -> None:
    """Refuse, before a long validation, a folder that its report cannot be written to."""
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise DeployError(
            "The report cannot be written there.", got=folder, hint="-o elsewhere, or --no-report"
        )
