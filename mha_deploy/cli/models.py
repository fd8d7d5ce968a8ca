"""`mha-deploy models`: the table of specs."""

from __future__ import annotations

from typing import Annotated

import typer

from mha_deploy.cli.options import Json, print_json


def models(
    every: Annotated[bool, typer.Option("--all", help="List the tiny test sizes too.")] = False,
    json: Json = False,
) -> None:
    """List the known models with their heads, parameters and KV-cache bytes per token."""
    from mha_deploy.cli.tables import model_row, models_renderable
    from mha_deploy.model.catalog import catalog_names, find_spec

    specs = [find_spec(name) for name in catalog_names() if every or not name.startswith("tiny-")]
    if json:
        print_json([model_row(spec) for spec in specs])
        return
    from rich.console import Console

    Console().print(models_renderable(specs))
