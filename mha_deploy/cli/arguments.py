"""Arguments, options and progress that the verbs share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import Field, fields
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

import mha_deploy as md
from mha_deploy.errors import DeployError, SpecError

# -- Options from the records of options.py --------------------------------------------------------

_KINDS: dict[str, Any] = {"str": str, "int": int, "float": float, "bool": bool, "Path": Path}


def takes(record: type, *names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb an option for every field of a record, or for the named ones.

    The verb gets them as keywords of their names. They come after its arguments and before its own options,
    which are keyword-only parameters.
    """

    def with_options(verb: Callable[..., None]) -> Callable[..., None]:
        options = [each for each in fields(record) if (each.name in names if names else each.metadata)]
        own = signature(verb)
        hints = get_type_hints(verb, include_extras=True)
        given = [
            each.replace(annotation=hints.get(each.name, each.annotation))
            for each in own.parameters.values()
            if each.kind is not Parameter.VAR_KEYWORD
        ]
        places = [place for place, each in enumerate(given) if each.kind is Parameter.KEYWORD_ONLY]
        first = places[0] if places else len(given)
        given[first:first] = map(_parameter, options)

        @wraps(verb)
        def called(**values: Any) -> None:
            verb(**values | {each.name: _value(each, values[each.name]) for each in options})

        called.__signature__ = own.replace(parameters=given)  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in given}
        return called

    return with_options


def _parameter(field: Field[Any]) -> Parameter:
    """The parameter of a verb that Typer makes an option of."""
    default: Any = field.default
    text, flags, about = str(field.type), field.metadata["flags"], field.metadata["about"]
    kind: Any
    if text == "Sequence[int]":
        kind, default = str, ",".join(map(str, default))
    elif text.startswith("Sequence"):
        kind, default = list[str] | None, None
        about = "{} Can be repeated.{}{}".format(*about.partition(" default:"))
    else:
        kind = _KINDS[text.removesuffix(" | None")]
        kind = kind | None if text.endswith(" | None") else kind
    if text == "bool" and not default:
        flags = flags or (f"--{field.name.replace('_', '-')}",)  # there is no need for --no-…
    option = typer.Option(*flags, help=about, **field.metadata["details"])
    annotation = Annotated[kind, option]
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _value(field: Field[Any], value: Any) -> Any:
    """What was given as the record wants it: lists as tuples, `1,8,32` as numbers."""
    if not str(field.type).startswith("Sequence"):
        return value
    if field.type != "Sequence[int]":
        return tuple(value or ())
    parts = [part.strip() for part in value.split(",")] if value else []
    if not all(part.isdecimal() and int(part) for part in parts):
        option = f"--{field.name}"
        raise DeployError(f"{option} needs whole numbers.", got=value, hint=f"{option} 1,8,32")
    return tuple(dict.fromkeys(map(int, parts)))


# -- Arguments and options of several verbs --------------------------------------------------------

Model = Annotated[
    str,
    typer.Argument(
        metavar="[MODEL]",
        help="A name from `mha-deploy models`, the path of a .toml spec or of an .onnx file, or your own "
        "model as file.py:factory or package.module:factory. None with --hf.",
    ),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        "--hf",
        metavar="FOLDER",
        help="A Hugging Face checkpoint in place of MODEL: one attention layer, by its config.json, with its "
        "weights.",
    ),
]
Layer = Annotated[int, typer.Option(min=0, help="Layer of the --hf checkpoint.")]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME=FILE.npy",
        help="An input of an ONNX file. Can be repeated. default: drawn by its name and type",
    ),
]
BundleFolder = Annotated[
    Path, typer.Argument(metavar="BUNDLE", help="The bundle: a folder that `export` or `deploy` wrote.")
]
Axes = Annotated[
    list[str] | None,
    typer.Option(
        "--axis",
        metavar="NAME=RANGE",
        help="Range of a dynamic axis, as S=min:opt:max. Can be repeated. default: the model's own",
    ),
]
Projections = Annotated[
    str | None,
    typer.Option(help="Q, K and V projections: separate or packed in one GEMM. default: the spec's own"),
]
Cache = Annotated[
    str | None,
    typer.Option(
        help="KV cache: none, dynamic (past in, present out) or preallocated. default: the spec's own"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON to stdout.")]
InProcess = Annotated[
    bool,
    typer.Option(
        "--in-process",
        callback=lambda value: value and md.configure(in_process=value),
        help="Run ONNX Runtime, TensorRT and PyTorch in this process instead of a child process, for a "
        "debugger. A crash then ends this process.",
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        min=1.0,
        callback=lambda value: value and md.configure(time_limit=value),
        help="Seconds after which a call of a runtime counts as hung. default: 3600",
    ),
]
TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        callback=lambda value: value and md.configure(trust_code=value),
        help="Run the factory that the bundle names, for fresh cases and PyTorch baselines: it is code of "
        "whoever made the bundle.",
    ),
]


def model_from_options(
    model: str,
    hf: Path | None,
    layer: int,
    prefix: str,
    axis: Sequence[str] | None,
    cache: str | None = None,
    projections: str | None = None,
) -> md.Model:
    """The model that was named, or the layer of a checkpoint."""
    axes = by_name(axis, "--axis", "S=min:opt:max")
    if (hf is None) == (not model):
        what = "Name a model, or a checkpoint." if hf is None else "--hf takes the place of MODEL."
        raise SpecError(
            what, got=model or "neither", hint="bert-base, file.py:factory or --hf FOLDER --layer 0"
        )
    if hf is None:
        return md.load_model(model, axes=axes, cache=cache, projections=projections)
    return md.load_checkpoint(hf, layer, prefix=prefix, axes=axes, cache=cache, projections=projections)


def by_name(texts: Sequence[str] | None, option: str, example: str) -> dict[str, str]:
    """The values of an option such as `--axis S=1:8:16` by their names."""
    found = {}
    for text in texts or ():
        name, separator, value = text.partition("=")
        if not (name and separator and value):
            raise SpecError(f"{option} needs a name and a value.", got=text, hint=f"{option} {example}")
        found[name] = value
    return found


def print_json(data: Any) -> None:
    """Print a result for machines."""
    typer.echo(json.dumps(data, indent=2))


# -- Progress on stderr: a bar on a terminal, lines in a log ---------------------------------------


@contextmanager
def steps(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show the steps of a long job.

    Yields a function to call as each step begins, with its name, its number from 0, and their count, which
    is 0 where it is not known.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        text = TextColumn("{task.description}", markup=False)
        with Progress(
            SpinnerColumn(), text, BarColumn(), TimeElapsedColumn(), console=console, transient=True
        ) as progress:
            task = progress.add_task(title, total=None)
            yield lambda name, number, count: progress.update(
                task, description=f"{title}: {name}", completed=number, total=count or None
            )
        return
    started, shown = time.monotonic(), set[str]()

    def print_step(name: str, number: int, count: int) -> None:
        name = name.partition(": ")[0]  # "stage: detail"; a log wants the stages, each once
        if name in shown:
            return
        shown.add(name)
        place = f"{min(number + 1, count)}/{count} " if count else ""
        line = f"{title}: {place}{name} ({time.monotonic() - started:.1f} s)"
        console.print(line, highlight=False, markup=False)

    yield print_step
