"""`mha-deploy bisect`: the first attention, and the first node, whose result is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

import mha_deploy as md
from mha_deploy.cli.options import BundleFolder, InProcess, Json, TimeLimit, TrustCode, print_json, steps
from mha_deploy.errors import EXIT_VERDICT_FAILED
from mha_deploy.text import plural

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mha_deploy.validate.bisect import Bisection


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
        from rich.console import Console

        Console().print(_renderable(found))
    if found.wrong is not None:
        raise typer.Exit(EXIT_VERDICT_FAILED)


def _renderable(found: Bisection) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    runs = plural(found.runs, "run")
    where = f"{found.model} on {found.backend}, case {found.case}, {runs}, against {found.reference}"
    if found.wrong is None:
        head = f"PASSED  the outputs of case {found.case} are right: nothing to bisect"
        return Group(Text(head, style="bold green"), Text(where))
    lines = [f"wrong output: {found.wrong}"]
    if found.attentions:
        before = (
            f"the last right one is {found.last_right}" if found.last_right else "there is none before it"
        )
        first = found.first_wrong or "none: the fault is behind the last attention"
        lines.append(f"first wrong attention of {found.attentions}: {first} ({before})")
    node = found.first_node
    if node is not None:
        lines.append(f"first wrong node: {node.operator} {node.node}, value {node.value}: {node.problem}")
    if found.unseen:
        names = ", ".join(found.unseen[:4]) + (", …" if len(found.unseen) > 4 else "")
        lines.append(f"nodes before it that the reference has no values for: {len(found.unseen)} ({names})")
    name = "at an unknown node" if node is None else f"first at {node.node}"
    return Group(*map(Text, lines), Text(f"FAILED  {name}", style="bold red"), Text(where))
