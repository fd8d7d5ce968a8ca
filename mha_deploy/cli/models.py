"""`mha-deploy models`: the catalog of layers."""

from __future__ import annotations

from typing import Annotated

import typer

import mha_deploy as md
from mha_deploy.cli.options import Json, print_json


def models(
    every: Annotated[bool, typer.Option("--all", help="Include the small layers of the tests.")] = False,
    json: Json = False,
) -> None:
    """List the catalog of layers with their heads, parameters and KV-cache bytes per token."""
    from mha_deploy.cli.tables import model_row, models_renderable

    specs = md.models(tiny=every)
    if json:
        print_json([model_row(spec) for spec in specs])
        return
    from rich.console import Console

    Console().print(models_renderable(specs))
