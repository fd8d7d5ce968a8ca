"""`mha-deploy doctor`: what is here, and what can it do?"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mha_deploy.cli.options import Json, print_json


def doctor(
    load: Annotated[
        bool,
        typer.Option("--load", help="Import PyTorch and all that takes seconds, to see that it works."),
    ] = False,
    json: Json = False,
) -> None:
    """Show which runtimes and GPUs are here, what each can do, and how to install what is missing."""
    from mha_deploy.environment import examine, report

    facts = report(examine(load=load))
    if json:
        print_json(facts)
    else:
        _print(facts)


def _print(facts: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("runtime", "version", "for", "state"):
        table.add_column(column, overflow="fold")
    for row in facts["runtimes"]:
        table.add_row(row["name"], row["version"] or "-", row["gives"], escape(_state(row)))
    console = Console()
    own = facts["versions"]
    console.print(f"mha-deploy {own['mha-deploy']} on Python {own['python']}", highlight=False)
    console.print(table)
    if any(row["works"] and not row["loaded"] for row in facts["runtimes"]):
        console.print("installed: not imported here; `mha-deploy doctor --load` does", highlight=False)
    for gpu in facts["gpus"]:
        console.print(f"GPU: {', '.join(gpu.values())}", highlight=False)
    if not facts["gpus"]:
        console.print("GPU: none that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves visible")
    for verb, possible in facts["can"].items():
        console.print(f"{verb}: {'yes' if possible else 'no'}")


def _state(row: dict[str, Any]) -> str:
    if row["works"]:
        state = "works" if row["loaded"] else "installed"
        return f"{state} ({row['note']})" if row["note"] else state
    return f"{row['problem'] or 'not installed'}: {row['install']}"
