"""What makes a function a verb: its options, progress while it works, its result on stdout, its exit code."""

import json as json_text
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import MISSING, Field, dataclass, field
from functools import wraps
from inspect import Parameter, signature, unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin

import click

from mha_deploy import api as md
from mha_deploy.cli.help import Command, choices_of
from mha_deploy.errors import EXIT_VERDICT_FAILED, DeployError, SpecError, place_of_error
from mha_deploy.keywords import alternatives, item_of, types_of
from mha_deploy.options import (
    MOST_SECONDS,
    OF_DEPLOY,
    OF_SERVER,
    OnStep,
    option,
    options_of,
    silent,
)
from mha_deploy.status import Outcome

if TYPE_CHECKING:
    from rich.console import RenderableType

# -- Options from the records of options.py, from functions of the API, and of a verb itself -------

_METAVARS = {str: "NAME", int: "N", float: "X", Path: "PATH", bool: ""}  # a flag takes no value
JSON = option(False, "Print the result as JSON to stdout.")
QUIET = option(False, "Print only the verdict, and no progress.", "-q", "--quiet")
VERBOSE = option(False, "Print every table, including those of what passed.", "-v", "--verbose")


def argument(metavar: str, about: str, default: Any = MISSING) -> Any:
    """A positional argument, beside `option`."""
    metadata = {"about": about, "flags": (), "details": {"metavar": metavar}, "is_argument": True}
    return field(default=default, metadata=metadata)


def about(text: str, *flags: str, **details: Any) -> Any:
    """An option of `options_from`: as `option`, with the default of the function's parameter."""
    return option(MISSING, text, *flags, **details)


def options_from(function: Callable[..., Any], **described: Field[Any]) -> dict[str, Field[Any]]:
    """Parameters of a function of the API as options, with their types and defaults there."""
    parameters, kinds = signature(function).parameters, types_of(unwrap(function))
    for name, each in described.items():
        each.type, default = kinds[name], parameters[name].default
        each.default = MISSING if default is Parameter.empty else default
    return described


CONTROL = options_from(
    md.configure,
    trust_code=about(
        "Run the factory that a bundle names, for fresh cases and PyTorch baselines. This runs code by the "
        "author of the bundle. default: no such code runs",
        "--trust-code",
    ),
    in_process=about(
        "Run ONNX Runtime, TensorRT and PyTorch in this process instead of a child process, for a debugger. "
        "A crash then ends this process.",
        "--in-process",
    ),
    time_limit=about(
        "Seconds after which a call of a runtime or of a model's code, or an evaluation of a graph, counts "
        "as a hang. default: 3600",
        min=1.0,
        max=MOST_SECONDS,
    ),
)
"""How native code and the code of bundles run: what the verbs that run something share."""


@dataclass(frozen=True)
class Result:
    """What a verb found."""

    data: Any  # for `--json`
    lines: Callable[[], Iterable["RenderableType"]]  # for people; made only for them
    outcome: Outcome = Outcome.PASSED  # the verdict, which is the exit code
    save: Callable[[], Path | None] | None = None  # writes the report, once the result is printed
    verdict: "RenderableType | None" = None  # for `--quiet`; default: all lines


@dataclass
class _Detail:
    """How much is printed."""

    quiet: bool = False
    verbose: bool = False


_detail = _Detail()


def is_quiet() -> bool:
    """Whether the verdict alone is requested, and no progress."""
    return _detail.quiet


def is_verbose() -> bool:
    """Whether tables of what passed are requested."""
    return _detail.verbose


def verb(*groups: dict[str, Field[Any]]) -> Callable[[Callable[..., Result | None]], Command]:
    """Make a verb of a function whose parameters have an `option` or an `argument` as their default.

    It gets the options of the groups as keywords, besides. Those of `CONTROL` are applied before it is
    called, and `--json` prints its result for machines; the function gets it only if it has that parameter.
    """

    def decorate(function: Callable[..., Result | None]) -> Command:
        parameters = signature(function).parameters.values()
        own = {each.name: each for each in parameters if each.kind is not Parameter.VAR_KEYWORD}
        kinds = types_of(function)
        known = {name: (kinds[name], each.default) for name, each in own.items()}
        known |= {name: (each.type, each) for group in groups for name, each in group.items()}
        for name, each in (("quiet", QUIET), ("verbose", VERBOSE), ("json", JSON)):
            known.setdefault(name, (bool, each))

        def position(name: str) -> int:
            """Arguments first, then the options of records, the verb's own, and those of all verbs."""
            if "is_argument" in known[name][1].metadata:
                return 0
            return 3 if name in CONTROL or name in ("json", "quiet", "verbose") else 1 + (name in own)

        verb_name = function.__name__.rstrip("_").replace("_", "-")

        @wraps(function)
        def run(**values: Any) -> None:
            context = click.get_current_context()
            given = {name for name in values if _is_given(context, name)}
            values, places = _with_requirements(verb_name, values, known, given)
            try:
                values = {name: _convert(name, known[name][0], value) for name, value in values.items()}
                settings = {name: values.pop(name) for name in CONTROL if name in values}
                if any(settings.values()):
                    md.configure(**settings)
                _detail.quiet, _detail.verbose = values.pop("quiet"), values.pop("verbose")
                json = values["json"] if "json" in own else values.pop("json")
                with _only_results():
                    result = function(**values)
            except DeployError as error:
                _add_places(error, places)
                raise
            except SystemExit as stop:  # an exit code is a verdict: it must not be somebody else's
                got = f"{place_of_error(stop)}: sys.exit({stop.code!r})"
                hint = "raise an exception there, or return"
                raise DeployError("The code of the model ended the program.", got=got, hint=hint) from stop
            except (EOFError, BrokenPipeError) as error:  # Click ends with the code of a failed verdict then
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
            if result is None:
                return
            if json:
                click.echo(json_text.dumps(result.data, indent=2))
            elif _detail.quiet and result.verdict is not None:
                show(result.verdict)
            else:
                show(*result.lines())
            if result.save is not None:
                saved = result.save()
                apart = json or values.get("markdown", False)
                if saved is not None and not (_detail.quiet and not apart):
                    click.echo(f"report: {saved}", err=apart)
            if result.outcome.exit_code:
                raise click.exceptions.Exit(EXIT_VERDICT_FAILED)

        def make_params() -> list[click.Parameter]:
            return [_parameter(verb_name, name, *known[name]) for name in sorted(known, key=position)]

        return Command(verb_name, run, make_params)

    return decorate


def _is_given(context: click.Context, name: str) -> bool:
    """Whether an option is on the command line; else it has its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _with_requirements(
    verb: str, values: dict[str, Any], known: Mapping[str, Any], given: Set[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a verb, with those of the project's file for what the command line does not give.

    And where the file has them, by their names.
    """
    if verb not in ("export", "deploy", "build-engine", "validate", "bench"):
        return values, {}
    from mha_deploy.requirements import find_requirements

    found = find_requirements(Path.cwd())
    if found is None:
        return values, {}
    model = _model_of(values)
    if verb == "validate" and (others := found.unmatched(model)):
        tables = f"{found.path} has no [models.{json_text.dumps(model)}]"
        click.echo(f"note: {tables}, and tables of other models: {others}", err=True)
    result, places = dict(values), dict[str, str]()
    # Those of an engine that is not built, or of a server that there is not, are for other calls.
    unused: tuple[str, ...] = OF_DEPLOY if verb == "deploy" and not values["engine"] else ()
    if verb == "validate":
        if values["self_test"]:
            return values, {}
        unused = OF_SERVER if values["url"] is None else ()
    for name, value in found.options(verb, model).items():
        if name in known and name not in (*given, *unused):
            is_numbers = item_of(known[name][0]) is int
            result[name] = ",".join(map(str, value)) if is_numbers else value
            places[name] = found.place(verb, model, name)
    if "requirements" in known and values.get("requirements") is None:
        result["requirements"] = found
    return result, places


def _add_places(error: DeployError, places: Mapping[str, str]) -> None:
    """Let an error say of every option that it is about, and nobody typed, where in a file it is set."""
    if found := [place for name, place in places.items() if name in error.options]:
        error.got = f"{error.got}; set by {', '.join(found)}" if error.got else f"set by {', '.join(found)}"


def _model_of(values: Mapping[str, Any]) -> str:
    """The name of the model that a verb is about, as far as that is known before it is opened."""
    if isinstance(folder := values.get("bundle"), Path):
        with suppress(DeployError, OSError):
            return str(md.open_bundle(folder, verify=False).manifest.spec.name)
    return Path(str(values.get("model") or "")).stem.rpartition(":")[2]


class Argument(click.Argument):
    """A positional argument with its explanation."""

    help: str | None = None


def _parameter(verb: str, name: str, wanted: Any, field: Field[Any]) -> click.Parameter:
    """The option or argument of a field of some type."""
    flags, about, is_argument = (
        field.metadata["flags"],
        field.metadata["about"],
        "is_argument" in field.metadata,
    )
    default: Any = None if field.default is MISSING else field.default
    item = item_of(wanted)
    known, is_list = {get_origin(each) or each for each in alternatives(wanted)}, item is not None
    kind = next((each for each in (bool, int, float, Path) if known == {each}), str)
    kind = Path if os.PathLike in known else kind
    details = dict(field.metadata["details"])
    bounds = {bound: details.pop(bound, None) for bound in ("min", "max")}
    choices = choices_of(verb, name)
    details.setdefault("metavar", f"[{'|'.join(choices)}]" if choices else _METAVARS[kind])
    if item is int:
        default, is_list = ",".join(map(str, default)), False
    elif is_list:
        kind, default = Path if item is Path else str, None
        about = about if is_argument else "{} Can be repeated.{}{}".format(*about.partition(" default:"))
    details["type"] = {Path: click.Path(path_type=Path), bool: click.BOOL}.get(kind, kind)
    if bounds != {"min": None, "max": None}:
        details["type"] = (click.IntRange if kind is int else click.FloatRange)(**bounds)
    details["required"] = field.default is MISSING
    if not (is_list or field.default is MISSING):
        details["default"] = default
    if is_argument:
        found = Argument([name], nargs=-1 if is_list else 1, **details)
        found.help = about
        return found
    flag = f"--{name.replace('_', '-')}"
    if kind is bool:
        flag = flag if default is False else f"{flag}/--no-{flag[2:]}"
        del details["type"], details["metavar"]
        details["is_flag"] = True
    return click.Option([name, *(flags or (flag,))], multiple=is_list, help=about, **details)


def _convert(name: str, wanted: Any, value: Any) -> Any:
    """What was given as the verb wants it: lists as tuples, `1,8,32` as numbers, all within bounds."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, float) and not math.isfinite(value):
        raise DeployError(f"{flag} needs a finite number.", got=value, hint=f"{flag} 10", options=(name,))
    if type(value) is int and abs(value) >= 2**32:
        raise DeployError(f"{flag} is too large.", got=value, hint=f"{flag} 10", options=(name,))
    item = item_of(wanted)
    if item is None:
        return value
    if item is not int:
        return tuple(value or ())
    parts = [part.strip() for part in value.split(",")] if value else []
    if not all(part.isascii() and part.isdecimal() and len(part) < 7 and int(part) for part in parts):
        what, hint = f"{flag} needs whole numbers below 10⁶.", f"{flag} 1,8,32"
        raise DeployError(what, got=value, hint=hint, options=(name,))
    return tuple(dict.fromkeys(map(int, parts)))


# -- The model that several verbs take -------------------------------------------------------------

BUNDLE = argument("BUNDLE", "The bundle: a folder that `export` or `deploy` wrote.")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model of `export`, `deploy` and `analyze`."""

    model: str = argument(
        "MODEL",
        "A name from `mha-deploy models`, the path of a .toml spec or of an .onnx file, or your own model as "
        "file.py:factory or package.module:factory. Omitted with --hf.",
        "",
    )
    hf: Path | None = option(
        None,
        "A Hugging Face checkpoint in place of MODEL: one attention layer of its config.json, with the "
        "weights.",
        metavar="FOLDER",
    )
    layer: int = option(0, "Layer of the --hf checkpoint.", min=0, max=10**6)
    axis: Sequence[str] = option(
        (),
        "Range of a dynamic axis, such as S=1:128:512 (min:opt:max). default: the model's",
        metavar="NAME=RANGE",
    )
    inputs: Sequence[str] = option(
        (),
        "Values of an input of an ONNX file. default: random, by name and type",
        "--input",
        metavar="NAME=FILE.npy",
    )


MODEL = options_of(ModelOptions) | options_from(
    md.load_model,
    projections=about(
        "Q, K and V projections of a catalog layer: separate, or packed in one GEMM. default: as in the spec"
    ),
    cache=about(
        "KV cache of a catalog layer: none, dynamic (past in, present out) or preallocated. default: as in "
        "the spec"
    ),
)


def pop_model(options: dict[str, Any]) -> md.Model:
    """The model that was named, or the layer of a checkpoint; their options are taken out of the others."""
    model, hf, layer = (options.pop(name) for name in ("model", "hf", "layer"))
    more = {name: options.pop(name) for name in ("cache", "projections") if name in options}
    axes = parse_pairs(options.pop("axis"), "--axis", "S=min:opt:max")
    if (hf is None) == (not model):
        what = "Name a model, or a checkpoint." if hf is None else "--hf takes the place of MODEL."
        hint = "bert-base, file.py:factory or --hf FOLDER --layer 0"
        raise SpecError(what, got=model or "neither", hint=hint)
    if hf is None and layer:
        hint = "--hf FOLDER --layer N, or leave it out"
        raise SpecError("--layer is of a checkpoint.", got=f"--layer {layer}, without --hf", hint=hint)
    if hf is None:
        return md.load_model(model, axes=axes, **more)
    return md.load_checkpoint(hf, layer, prefix=options["prefix"], axes=axes, **more)


def parse_pairs(texts: Sequence[str], option: str, example: str) -> dict[str, str]:
    """The values of an option such as `--axis S=1:8:16` by their names."""
    found = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not (name and separator and value):
            raise SpecError(f"{option} needs a name and a value.", got=text, hint=f"{option} {example}")
        if name in found:
            raise SpecError(f"{option} gives {name} twice.", got=text, hint="give it once")
        found[name] = value
    return found


# -- Results on stdout; progress on stderr: a bar on a terminal, lines in a log --------------------


_results: list[Any] = []  # the stream of results, while what others print goes to stderr


@contextmanager
def _only_results() -> Iterator[None]:
    """Let what the code of a model prints go to stderr: stdout is for results."""
    _results.append(sys.stdout)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = _results.pop()


def result_stream() -> Any:
    """Where results are printed."""
    return _results[-1] if _results else sys.stdout


def show(*lines: "RenderableType") -> None:
    """Print tables with Rich, and plain lines as they are."""
    from rich.console import Console

    stream = result_stream()
    console = Console(file=stream)
    for line in lines:
        if isinstance(line, str):
            click.echo(line, file=stream)
        elif console.is_terminal:
            console.print(line)
        else:  # tables are padded to the width, which nobody wants in a file
            with console.capture() as captured:
                console.print(line)
            for each in captured.get().splitlines():
                click.echo(each.rstrip(), file=stream)


_LONGEST_SILENCE_S = 15.0


@contextmanager
def show_steps(title: str, first: str = "") -> Iterator[OnStep]:
    """Show the steps of a long job; yields what the API calls as `on_step`.

    The `first` one is that of the command line: what takes long before the API reports anything.
    """
    if is_quiet():
        yield silent
        return
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        from rich import progress as bars

        text = bars.TextColumn("{task.description}", markup=False)
        times = bars.TimeElapsedColumn(), bars.TextColumn("left"), bars.TimeRemainingColumn(compact=True)
        with bars.Progress(
            bars.SpinnerColumn(), text, bars.BarColumn(20), *times, console=console, transient=True
        ) as progress:
            task = progress.add_task(title, total=None)
            yield lambda name, number, count: progress.update(
                task, description=f"{title}: {name}", completed=number, total=count or None
            )
        return
    started, shown = time.monotonic(), set[str]()
    printed = started

    def print_step(name: str, number: int, count: int) -> None:
        nonlocal printed
        stage, now = getattr(name, "stage", name), time.monotonic()
        # A log wants the stages, each once, and no long silence.
        if stage in shown and now - printed < _LONGEST_SILENCE_S:
            return
        place = f"{min(number + 1, count)}/{count} " if count else ""
        line = f"{title}: {place}{name if stage in shown else stage} ({now - started:.1f} s)"
        shown.add(stage)
        printed = now
        console.print(line, highlight=False, markup=False)

    if first:
        print_step(first, 0, 0)
    yield print_step
