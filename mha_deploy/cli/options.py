"""Arguments, options and progress that the verbs share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mha_deploy.errors import SpecError
from mha_deploy.model.spec import AttentionSpec, Axis

# -- Arguments and options that several verbs share ------------------------------------------------

Model = Annotated[str, typer.Argument(help="A name from `mha-deploy models`, or a path to a .toml spec.")]
ModelOrFactory = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name from `mha-deploy models`, a path to a .toml spec, or your own model: file.py:factory or "
        "package.module:factory.",
    ),
]
BundleFolder = Annotated[Path, typer.Argument(help="A bundle: the folder that `export` wrote.")]
Precision = Annotated[
    str,
    typer.Option(
        help="Types in the graph: fp16, bf16 or fp32; auto for your own model: fp16, what overflows upcast."
    ),
]
Axes = Annotated[
    list[str] | None,
    typer.Option("--axis", help="Another range for an axis, as S=min:opt:max. Can be repeated."),
]
Projections = Annotated[str | None, typer.Option(help="separate or packed. default: the spec's own")]
Cache = Annotated[
    str | None,
    typer.Option(
        help="KV cache: none, growing (dynamic: past in, present out) or static (preallocated). "
        "default: the spec's own"
    ),
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the random weights and inputs.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
InProcess = Annotated[
    bool,
    typer.Option(
        "--in-process",
        callback=lambda value: _isolated("enabled", not value) if value else value,
        help="Run ONNX Runtime, TensorRT and PyTorch in this process, for a debugger: a crash then ends it.",
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        min=1.0,
        callback=lambda value: _isolated("limit_s", value) if value is not None else value,
        help="Seconds after which a call of a runtime counts as hung. default: 3600",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a bundle that is there already.")]


def spec_from_options(
    model: str,
    axes: Sequence[str] | None = None,
    projections: str | None = None,
    cache: str | None = None,
) -> AttentionSpec:
    """The spec that a user asked for, with the changes from the command line."""
    from mha_deploy.model.catalog import find_spec

    spec = find_spec(model)
    spec = spec if cache is None else spec.with_cache(cache)
    spec = spec.with_axes(axes_from_options(axes))
    return spec if projections is None else replace(spec, projections=projections)


def axes_from_options(axes: Sequence[str] | None) -> dict[str, Axis]:
    """The axis ranges that a user asked for."""
    return dict(_parse_axis(text) for text in axes or ())


def _parse_axis(text: str) -> tuple[str, Axis]:
    name, separator, sizes = text.partition("=")
    if not separator:
        raise SpecError("An axis option has no range.", got=text, hint="--axis S=min:opt:max")
    return name, Axis.parse(sizes, name=name)


def _isolated(setting: str, value: Any) -> Any:
    """Set how native code is run; see `backends.child`."""
    from mha_deploy.runtime.child import isolation

    setattr(isolation, setting, value)
    return value


def print_json(data: Any) -> None:
    """Print a result for machines."""
    typer.echo(json.dumps(data, indent=2))


# -- Progress on stderr: a bar for people, lines for logs ------------------------------------------

OnStep = Callable[[str, int, int], None]


@contextmanager
def steps(title: str) -> Iterator[OnStep]:
    """Show the steps of a long job.

    Yields a function to call as each step begins, with its name, its number from 0, and their
    count; a count of 0 where nobody knows how many there are.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with _bar(console, title) as on_step:
            yield on_step
        return
    started, shown = time.monotonic(), set[str]()

    def print_step(name: str, number: int, count: int) -> None:
        name = name.partition(": ")[0]  # "stage: detail"; a log wants the stages, each once
        if name in shown:
            return
        shown.add(name)
        elapsed = time.monotonic() - started
        place = f"{min(number + 1, count)}/{count} " if count else ""
        line = f"{title}: {place}{name} ({elapsed:.1f} s)"
        console.print(line, highlight=False, markup=False)

    yield print_step


@contextmanager
def _bar(console: object, title: str) -> Iterator[OnStep]:
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), text, BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:  # type: ignore[arg-type]
        task = progress.add_task(title, total=None)

        def advance(name: str, number: int, count: int) -> None:
            # A bar without a total only shows that something goes on.
            progress.update(task, description=f"{title}: {name}", completed=number, total=count or None)

        yield advance
