"""`mha-deploy bisect`: which attention, and which node, is the first that is wrong?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from mha_deploy.cli.options import BundleFolder, InProcess, Json, OnStep, TimeLimit, print_json, steps
from mha_deploy.errors import EXIT_VERDICT_FAILED

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mha_deploy.bundle.folder import Bundle
    from mha_deploy.validate.bisect import Bisection
    from mha_deploy.validate.layers import OpenModel


def bisect(
    bundle: BundleFolder,
    backend: Annotated[
        str | None,
        typer.Option(help="A runtime or the name of an engine. default: the first engine that runs here"),
    ] = None,
    in_process: InProcess = False,
    time_limit: TimeLimit = None,
    json: Json = False,
) -> None:
    """Find the first attention, and then the first node, at which an engine or runtime leaves the oracle."""
    from mha_deploy.bundle.folder import open_bundle
    from mha_deploy.validate.bisect import bisect_bundle, bisected_case, reference_for

    opened = open_bundle(bundle)
    name, open_model = _doubted(opened, backend)
    with steps(f"bisect {opened.manifest.spec.name}") as show:
        on_step = partial(_shown, show)
        on_step("what is true inside")
        reference, trusted = reference_for(opened, bisected_case(opened), name)
        found = bisect_bundle(opened, name, open_model, reference, on_step)
    if json:
        print_json({**found.to_dict(), "reference": trusted})
    else:
        from rich.console import Console

        Console().print(_renderable(found, trusted))
    if found.wrong is not None:
        raise typer.Exit(EXIT_VERDICT_FAILED)


def _shown(show: OnStep, name: str) -> None:
    show(name, 0, 0)  # nobody knows how many there will be


def _doubted(bundle: Bundle, backend: str | None) -> tuple[str, OpenModel]:
    """The runtime that is looked into, and how it opens a variation of the graph."""
    from mha_deploy.engine.build import twin_opener
    from mha_deploy.errors import DeployError
    from mha_deploy.runtime import RUNNERS, open_runner
    from mha_deploy.validate.runtimes import RuntimeFinder

    finder = RuntimeFinder(bundle)
    running = [] if backend in RUNNERS else finder.running_engines()
    if backend is None and not running:
        backend = finder.graphs()[0].name
    if backend in RUNNERS:
        return str(backend), partial(open_runner, str(backend))
    runtime = running[0] if backend is None else finder.named(backend)
    if runtime.engine is None:
        raise DeployError("Only engines and graphs can be looked into.", got=backend, hint=", ".join(RUNNERS))
    return runtime.name, twin_opener(runtime.engine, bundle)


def _renderable(found: Bisection, trusted: str) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    where = f"{found.model} on {found.backend}, case {found.case}, {found.runs} runs, against {trusted}"
    if found.wrong is None:
        return Group(
            Text(f"RIGHT  nothing to look for in case {found.case}", style="bold green"), Text(where)
        )
    lines = [f"the whole is wrong: {found.wrong}"]
    if found.attentions:
        before = f"after {found.last_right}, which is right" if found.last_right else "no attention before it"
        first = found.first_wrong or "none: all are right, and what comes behind them is not"
        lines.append(f"first wrong attention of {found.attentions}: {first} ({before})")
    node = found.first_node
    if node is not None:
        lines.append(
            f"first wrong node: {node.operator} {node.node}, its result {node.value}: {node.problem}"
        )
    if found.unseen:
        lines.append(
            f"nobody knows what {len(found.unseen)} nodes before it must give: {_some(found.unseen)}"
        )
    name = node.node if node is not None else "a node that nobody can tell"
    return Group(*map(Text, lines), Text(f"WRONG  first at {name}", style="bold red"), Text(where))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
