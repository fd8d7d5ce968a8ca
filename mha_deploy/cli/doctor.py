"""`mha-deploy doctor`: the runtimes and GPUs of this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import mha_deploy as md
from mha_deploy.cli.options import Json, print_json

_STRANGERS = (
    "bundles from others: files, graph and oracle are checked; code that a bundle names or contains runs "
    "only with --trust-code; TensorRT loads plans in a child process, so build engines yourself "
    "(docs/security.md)"
)


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
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("runtime", "version", "for", "state"):
        table.add_column(column, overflow="fold")
    for each in found["runtimes"]:
        table.add_row(each["name"], each["version"] or "-", each["gives"], escape(_state(each)))
    console = Console()
    own = found["versions"]
    console.print(f"mha-deploy {own['mha-deploy']} on Python {own['python']}", highlight=False)
    console.print(table)
    if any(each["works"] and not each["loaded"] for each in found["runtimes"]):
        console.print(
            "installed: found, not imported; `mha-deploy doctor --load` imports it", highlight=False
        )
    for gpu in found["gpus"]:
        console.print(f"GPU: {', '.join(gpu.values())}", highlight=False)
    if not found["gpus"]:
        console.print("GPU: none reported by nvidia-smi")
    for verb, possible in found["can"].items():
        console.print(f"{verb}: {'yes' if possible else 'no'}")
    console.print(_STRANGERS, highlight=False)


def _state(runtime: dict[str, Any]) -> str:
    if runtime["works"]:
        state = "works" if runtime["loaded"] else "installed"
        return f"{state} ({runtime['note']})" if runtime["note"] else state
    return f"{runtime['problem'] or 'not installed'}: {runtime['install']}"
