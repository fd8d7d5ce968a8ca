"""`mha-deploy check`: whether a target supports and fuses every attention, before a build."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

import mha_deploy as md
from mha_deploy.cli.options import BundleFolder, Json, print_json
from mha_deploy.errors import EXIT_VERDICT_FAILED

if TYPE_CHECKING:
    from mha_deploy.graph.rules import Eligibility


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
        print_json([_to_dict(answer) for answer in answers])
    else:
        from rich.console import Console

        from mha_deploy.cli.tables import eligibility_renderable

        Console().print(eligibility_renderable(answers))
    if not all(answer.fused_when_lowered for answer in answers):
        raise typer.Exit(EXIT_VERDICT_FAILED)


def _to_dict(answer: Eligibility) -> dict[str, object]:
    return {
        "node": answer.node.name,
        "target": str(answer.target),
        "taken": answer.taken,
        "fused": answer.fused,
        "taken_when_lowered": answer.taken_when_lowered,
        "fused_when_lowered": answer.fused_when_lowered,
        "findings": [asdict(finding) for finding in answer.findings],
    }
