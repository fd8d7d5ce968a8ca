"""The command line: each verb parses, calls the public API, prints, and gives an exit code.

    0  passed          2  bad input             70   a bug in this tool
    1  verdict failed  3  backend unavailable   130  interrupted; 128 + the number of another signal

Everything heavier than the standard library is imported by the verb that needs it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TextIO

import typer

from mha_deploy.cli import verbs
from mha_deploy.errors import EXIT_BAD_INPUT, DeployError, exit_as_error
from mha_deploy.files import check_name
from mha_deploy.text import printable

EXIT_INTERNAL_ERROR = 70
EXIT_INTERRUPTED = 130
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

app = typer.Typer(
    name="mha-deploy",
    help="Take attention from PyTorch to TensorRT, and verify the result.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (
    verbs.deploy, verbs.export, verbs.fuse, verbs.check, verbs.build_engine, verbs.validate, verbs.bisect,
    verbs.bench, verbs.compare, verbs.matrix, verbs.package, verbs.inspect, verbs.models, verbs.analyze,
    verbs.doctor,
):  # fmt: skip
    app.command()(exit_as_error()(verb))  # exit codes are verdicts: sys.exit in a user's model is an error
app.add_typer(verbs.plugins, name="plugins")


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version.", is_eager=True)) -> None:
    if version:
        from mha_deploy import __version__

        typer.echo(f"mha-deploy {__version__}")
        raise typer.Exit()


class _Ending(NamedTuple):
    """How the command line ended: its exit code and, where there is no result, the error."""

    code: int
    error: DeployError | None = None
    is_printed: bool = False  # whether the error is on stderr already


def main() -> None:
    """Run the command line; an error that a user can act on is printed without a traceback.

    With `--json` stdout is JSON on every outcome: where there is no result, an object with the key `error`.
    """
    with _signals_as_interrupts() as received, _guarded_streams() as stdout:
        code, error, is_printed = _run_app()
        if code == EXIT_INTERRUPTED:  # Ctrl-C, also as Typer reports it, or another signal
            code = 128 + received[0] if received else code
            error, is_printed = DeployError("terminated" if received else "interrupted"), True
            typer.echo(error.what, err=True)
        if error and not is_printed:
            typer.echo(f"error: {error}", err=True)
        if error and "--json" in sys.argv[1:] and not stdout.has_text:
            shown = {"what": error.what, "got": error.got, "hint": error.hint, "exit_code": code}
            typer.echo(json.dumps({"error": shown}, indent=2))
    sys.exit(code)


def _run_app() -> _Ending:
    """Run the verb that the arguments name; whatever it raises is an ending."""
    try:
        for argument in sys.argv[1:]:
            check_name(argument)
        app(standalone_mode=True)
    except DeployError as error:
        return _Ending(error.exit_code, error)
    except OSError as error:
        return _Ending(EXIT_BAD_INPUT, DeployError("The operating system reported an error.", got=error))
    except KeyboardInterrupt:
        return _Ending(EXIT_INTERRUPTED)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        if code != EXIT_BAD_INPUT:
            return _Ending(code)
        usage = getattr(stop.__context__, "message", None)  # Typer has printed it
        problem = DeployError("The command line is not valid.", got=usage, hint="--help")
        return _Ending(code, problem, is_printed=True)
    except BaseException as error:  # noqa: BLE001 (a bug of this tool: its exit code is not a verdict)
        if _is_out_of_memory(error):
            return _Ending(EXIT_BAD_INPUT, DeployError("There is too little memory.", got=str(error) or None))
        traceback.print_exception(error)
        got, hint = f"{type(error).__name__}: {error}", "report it with the traceback"
        return _Ending(EXIT_INTERNAL_ERROR, DeployError("This is a bug in mha-deploy.", got=got, hint=hint))
    return _Ending(0)


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether Python or PyTorch, which has no type of its own for it on a CPU, could not allocate memory."""
    is_torch = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    return isinstance(error, MemoryError) or is_torch


# What Rich writes to a terminal: styles and movements of the cursor.
_STYLES = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z]|\r)")
_PLAIN = str.maketrans(
    {"–": "-", "−": "-", "×": "x", "µ": "u", "…": "...", "·": ".", "→": "->", "√": "sqrt "}
)


class _Guarded:
    """A stream without control characters of names and messages, in any encoding, also when its reader left.

    It has no `buffer`: nothing is written past it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.has_text = stream, False
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self.errors = "replace"

    def write(self, text: str) -> int:
        parts = _STYLES.split(text) if self.isatty() else [text]  # every second one is a style
        text = "".join(part if i % 2 else printable(part) for i, part in enumerate(parts))
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError:
            text = text.translate(_PLAIN).encode(self.encoding, "replace").decode(self.encoding)
        self.has_text = self.has_text or bool(text)
        with self._reader_may_leave():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._reader_may_leave():
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @contextmanager
    def _reader_may_leave(self) -> Iterator[None]:
        """Write the rest to nowhere then: a reader that stops early is no error."""
        try:
            yield
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


@contextmanager
def _guarded_streams() -> Iterator[_Guarded]:
    """Print through guarded streams meanwhile; yields stdout."""
    before: tuple[Any, Any] = sys.stdout, sys.stderr
    stdout = _Guarded(sys.stdout)
    sys.stdout, sys.stderr = stdout, _Guarded(sys.stderr)  # type: ignore[assignment]
    try:
        yield stdout
        stdout.flush()
    finally:
        sys.stdout, sys.stderr = before


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

    # A signal that already has a handler, or is ignored as under `nohup`, is left alone.
    own = [each for each in _ENDING_SIGNALS if signal.getsignal(each) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        own = []  # only the main thread may handle signals
    for each in own:
        signal.signal(each, interrupt)
    try:
        yield received
    finally:
        for each in own:
            signal.signal(each, signal.SIG_DFL)
