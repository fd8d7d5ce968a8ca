"""`mha-deploy validate`: is the result right?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mha_deploy.cli.options import BundleFolder, Json, print_json
from mha_deploy.cli.progress import steps
from mha_deploy.errors import EXIT_VERDICT_FAILED

if TYPE_CHECKING:
    from mha_deploy.bundle import Bundle
    from mha_deploy.validate.parity import ParityReport

Backend = Annotated[
    str | None,
    typer.Option(help="ort-cpu or onnx-reference; unless given, the one that has kernels for the precision."),
]


SelfTest = Annotated[
    bool,
    typer.Option(
        "--self-test", help="Also make deliberate mistakes in the graph, and show that each is caught."
    ),
]


def validate(
    bundle: BundleFolder, backend: Backend = None, self_test: SelfTest = False, json: Json = False
) -> None:
    """Run every golden case of a bundle and compare it with the FP64 oracle. Needs no PyTorch."""
    from mha_deploy.bundle import open_bundle

    opened = open_bundle(bundle)
    if self_test:
        _self_test(opened, backend, json)
        return
    report = validate_with_progress(opened, backend)
    if json:
        print_json(report.to_dict())
    else:
        print_report(report)
    if not report.passed:
        raise typer.Exit(EXIT_VERDICT_FAILED)


def _self_test(bundle: Bundle, backend: str | None, json: bool) -> None:
    from rich.console import Console

    from mha_deploy.cli.tables import self_test_renderable
    from mha_deploy.graph.sabotage import sabotages
    from mha_deploy.validate.self_test import self_test

    names = sabotages()
    with steps(f"self-test {bundle.manifest.spec.name}") as on_step:
        result = self_test(
            bundle, backend, on_mistake=lambda name: on_step(name, names.index(name), len(names))
        )
    if json:
        print_json(result.to_dict())
    else:
        Console().print(self_test_renderable(result))
    if not result.passed:
        raise typer.Exit(EXIT_VERDICT_FAILED)


def validate_with_progress(bundle: Bundle, backend: str | None) -> ParityReport:
    """Validate with progress on stderr."""
    from mha_deploy.validate import validate_bundle

    names = [entry.name for entry in bundle.manifest.golden]
    with steps(f"validate {bundle.manifest.spec.name}") as on_step:
        return validate_bundle(
            bundle, backend, on_case=lambda name: on_step(name, names.index(name), len(names))
        )


def print_report(report: ParityReport) -> None:
    """Print the verdict for people."""
    from rich.console import Console

    from mha_deploy.cli.tables import parity_renderable

    Console().print(parity_renderable(report))
