"""The command line: each verb parses, calls the public API, prints, and gives an exit code.

    0  passed          2  bad input             70   a bug in this tool
    1  verdict failed  3  backend unavailable   130  interrupted; 128 + the number of another signal

Everything heavier than the standard library is imported by the verb that needs it.
"""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import typer

from mha_deploy.cli.analyze import analyze
from mha_deploy.cli.bench import bench
from mha_deploy.cli.bisect import bisect
from mha_deploy.cli.build_engine import build_engine
from mha_deploy.cli.check import check
from mha_deploy.cli.compare import compare
from mha_deploy.cli.deploy import deploy
from mha_deploy.cli.doctor import doctor
from mha_deploy.cli.export import export
from mha_deploy.cli.fuse import fuse
from mha_deploy.cli.inspect import inspect
from mha_deploy.cli.matrix import matrix
from mha_deploy.cli.models import models
from mha_deploy.cli.package import package
from mha_deploy.cli.plugins import plugins
from mha_deploy.cli.validate import validate
from mha_deploy.errors import EXIT_BAD_INPUT, DeployError, exit_as_error

EXIT_INTERNAL_ERROR = 70
EXIT_INTERRUPTED = 130
_ENDING_SIGNALS = ("SIGTERM", "SIGHUP")

app = typer.Typer(
    name="mha-deploy",
    help="Take attention from PyTorch to TensorRT, and verify the result.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (
    deploy,
    export,
    fuse,
    check,
    build_engine,
    validate,
    bisect,
    bench,
    compare,
    matrix,
    package,
    inspect,
    models,
    analyze,
    doctor,
):
    app.command()(exit_as_error()(verb))  # exit codes are verdicts: sys.exit in a user's model is an error
app.add_typer(plugins, name="plugins")


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version.", is_eager=True)) -> None:
    if version:
        from mha_deploy import __version__

        typer.echo(f"mha-deploy {__version__}")
        raise typer.Exit()


def main() -> None:
    """Run the command line; an error that a user can act on is printed without a traceback."""
    with _signals_as_interrupts() as ended_by:
        try:
            app(standalone_mode=True)
        except DeployError as error:
            typer.echo(f"error: {error}", err=True)
            sys.exit(error.exit_code)
        except OSError as error:
            typer.echo(f"error: The operating system reported an error.\n  got: {error}", err=True)
            sys.exit(EXIT_BAD_INPUT)
        except KeyboardInterrupt:
            _exit_interrupted(ended_by)
        except SystemExit as stop:
            if stop.code == EXIT_INTERRUPTED:  # what Typer makes of Ctrl-C
                _exit_interrupted(ended_by)
            raise
        except BaseException:  # noqa: BLE001 (a bug of this tool: its exit code must not read as a verdict)
            traceback.print_exc()
            typer.echo(
                "error: This is a bug in mha-deploy.\n  try: report it with the traceback above", err=True
            )
            sys.exit(EXIT_INTERNAL_ERROR)


@contextmanager
def _signals_as_interrupts() -> Iterator[list[int]]:
    """Treat signals that end a program like Ctrl-C, so that what is half written is removed.

    Yields the signals that were received. A second one ends the program at once.
    """
    received: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt

    known = [getattr(signal, name) for name in _ENDING_SIGNALS if hasattr(signal, name)]
    # A signal that somebody else handles, or ignores as `nohup` does, stays theirs.
    own = [each for each in known if signal.getsignal(each) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        own = []  # only the main thread may handle signals
    for each in own:
        signal.signal(each, interrupt)
    try:
        yield received
    finally:
        for each in own:
            signal.signal(each, signal.SIG_DFL)


def _exit_interrupted(ended_by: Sequence[int]) -> NoReturn:
    typer.echo("terminated" if ended_by else "interrupted", err=True)
    sys.exit(128 + ended_by[0] if ended_by else EXIT_INTERRUPTED)
