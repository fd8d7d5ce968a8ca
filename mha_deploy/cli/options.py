"""Arguments, options and progress that the verbs share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

import mha_deploy as md
from mha_deploy.errors import SpecError

# -- Arguments and options that several verbs share ------------------------------------------------

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A name from `mha-deploy models`, or the path of a .toml spec."),
]
ModelOrFactory = Annotated[
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
Prefix = Annotated[
    str,
    typer.Option(
        help="What the tensors of the model begin with in the checkpoint, as model.layers.0.self_attn. "
        "default: found by its names"
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        help="A safetensors file, an index of several or the folder of a checkpoint; for your own model also "
        "a state dict. default: random weights, or your model's own"
    ),
]
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
Precision = Annotated[
    str,
    typer.Option(
        help="Types in the graph: fp16, bf16, fp32 or auto. auto is fp16; in your own model or a float32 "
        ".onnx file with FP32 where fp16 overflows. Other .onnx files keep theirs."
    ),
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
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of random weights and inputs.")]
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
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing bundle.")]


def axes_from_options(axes: Sequence[str] | None) -> dict[str, str]:
    """The ranges of `--axis` by the name of the axis."""
    return _by_name(axes, "--axis", "S=min:opt:max")


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
    axes = axes_from_options(axis)
    if (hf is None) == (not model):
        what = "Name a model, or a checkpoint." if hf is None else "--hf takes the place of MODEL."
        raise SpecError(
            what, got=model or "neither", hint="bert-base, file.py:factory or --hf FOLDER --layer 0"
        )
    if hf is None:
        return md.load_model(model, axes=axes, cache=cache, projections=projections)
    return md.load_checkpoint(hf, layer, prefix=prefix, axes=axes, cache=cache, projections=projections)


def inputs_from_options(inputs: Sequence[str] | None) -> dict[str, str]:
    """The files of `--input` by the name of the input."""
    return _by_name(inputs, "--input", "input_ids=ids.npy")


def _by_name(texts: Sequence[str] | None, option: str, example: str) -> dict[str, str]:
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

OnStep = Callable[[str, int, int], None]


@contextmanager
def steps(title: str) -> Iterator[OnStep]:
    """Show the steps of a long job.

    Yields a function to call as each step begins, with its name, its number from 0, and their count, which
    is 0 where it is not known.
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
            progress.update(task, description=f"{title}: {name}", completed=number, total=count or None)

        yield advance
