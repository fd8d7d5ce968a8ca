"""The command line: each verb parses, calls the public API, prints, and gives an exit code.

    0  passed          2  bad input             70   a bug in this tool
    1  verdict failed  3  backend unavailable   130  interrupted; 128 + the number of another signal

Everything heavier than the standard library is imported by the verb that needs it.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TextIO

import click

from mha_deploy import environment, supervisor
from mha_deploy.cli import verbs
from mha_deploy.cli.help import CommandGroup
from mha_deploy.errors import (
    EXIT_BAD_INPUT,
    EXIT_INTERNAL_ERROR,
    EXIT_INTERRUPTED,
    DeployError,
    out_of_memory,
)
from mha_deploy.files import check_name
from mha_deploy.supervisor import interruptions
from mha_deploy.text import printable

# The sizes of a layer, which are in its spec.
_SIZES = (
    "--heads", "--num-heads", "--kv-heads", "--num-kv-heads", "--head-dim", "--head-size", "--hidden-size",
    "--embed-dim", "--d-model", "--width", "--dim",
)  # fmt: skip
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_SAME_SIGNAL_S = 0.5


def _print_version(context: click.Context, option: click.Parameter, value: bool) -> None:
    if value:
        from mha_deploy import __version__

        click.echo(f"mha-deploy {__version__}")
        raise click.exceptions.Exit()


app = CommandGroup(
    "mha-deploy",
    help="Take attention from PyTorch to TensorRT, and verify the result.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    params=[
        click.Option(
            ["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
            help="Print the version.",
        )
    ],
)  # fmt: skip
for verb in (
    verbs.deploy, verbs.export, verbs.prune, verbs.fuse, verbs.check, verbs.build_engine, verbs.refit,
    verbs.validate, verbs.bisect, verbs.bench, verbs.compare, verbs.matrix, verbs.package, verbs.plugins,
    verbs.inspect, verbs.models, verbs.analyze, verbs.doctor, verbs.init, verbs.completion,
):  # fmt: skip
    app.add(verb)


class _Ending(NamedTuple):
    """How the command line ended: its exit code and, where there is no result, the error."""

    code: int
    error: DeployError | None = None
    is_printed: bool = False  # whether the error is on stderr already


def main() -> None:
    """Run the command line; an error that a user can act on is printed without a traceback.

    With `--json` stdout is JSON on every outcome: where there is no result, an object with the key `error`.
    """
    with _errors_with_options(), _signals_as_interrupts() as received, _guarded_streams() as stdout:
        code, error, is_printed = _run_app()
        # Ctrl-C or another signal. An import of native code raises another error.
        if code == EXIT_INTERRUPTED or (code != 0 and received):
            number = received[0] if received else signal.SIGINT
            code = 128 + number
            word = "interrupted" if number == signal.SIGINT else "terminated"
            error, is_printed = (
                DeployError(word, hint="run the command again; no partial output is left"),
                True,
            )
            click.echo(word, err=True)
        if error and not is_printed:
            click.echo(f"error: {error}", err=True)
        if error and "--json" in sys.argv[1:] and not stdout.has_text:
            shown = {"what": error.what, "got": error.got, "hint": error.hint, "exit_code": code}
            click.echo(json.dumps({"error": shown}, indent=2))
        stdout.flush()
        if stdout.problem is not None and not error:
            # Without its result a verdict is of no use.
            hint = "free some space there, or write elsewhere"
            error = DeployError("The result cannot be written to stdout.", got=stdout.problem, hint=hint)
            code = EXIT_BAD_INPUT
            click.echo(f"error: {error}", err=True)
    sys.exit(code)


@contextmanager
def _errors_with_options() -> Iterator[None]:
    """Errors name the options of the command line meanwhile, not the keywords of Python."""
    before, DeployError.is_typed = DeployError.is_typed, True
    try:
        yield
    finally:
        DeployError.is_typed = before


def _run_app() -> _Ending:
    """Run the verb that the arguments name; whatever it raises is an ending."""
    try:
        for argument in sys.argv[1:]:
            check_name(argument)
        environment.command_line.extend(("mha-deploy", *sys.argv[1:]))
        with app.make_context("mha-deploy", sys.argv[1:]) as context:
            app.invoke(context)
        return _Ending(0)
    except click.exceptions.Exit as stop:
        return _Ending(stop.exit_code)
    except DeployError as error:
        return _Ending(error.exit_code, error)
    except OSError as error:
        return _Ending(
            EXIT_BAD_INPUT,
            DeployError(
                "The operating system reported an error.",
                got=error,
                hint="check the path, its permissions and the space on the disk",
            ),
        )
    except click.ClickException as error:
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # from 8.2 on
            error.show()
            return _Ending(EXIT_BAD_INPUT)
        return _Ending(EXIT_BAD_INPUT, _usage_error(error))
    except KeyboardInterrupt:
        return _Ending(EXIT_INTERRUPTED)
    except SystemExit as stop:
        return _Ending(stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1)
    except BaseException as error:  # noqa: BLE001 (a bug of this tool: its exit code is not a verdict)
        if (needed := out_of_memory(error)) is not None:
            hint = "smaller axes (--axis), a smaller model, or a machine with more memory"
            return _Ending(EXIT_BAD_INPUT, DeployError("Out of memory.", got=needed, hint=hint))
        if interruptions.received:
            return _Ending(EXIT_INTERRUPTED)
        traceback.print_exception(error)
        got, hint = f"{type(error).__name__}: {error}", "report it with the traceback"
        return _Ending(EXIT_INTERNAL_ERROR, DeployError("This is a bug in mha-deploy.", got=got, hint=hint))
    finally:
        environment.command_line.clear()


def _usage_error(error: click.ClickException) -> DeployError:
    """What is wrong with the command line, and what was probably meant."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "mha-deploy"
    verb, got = path.partition(" ")[2], error.format_message()
    hint = f"{path} --help-all" if verb else f"{path} --help"
    if isinstance(error, click.NoSuchOption):
        got = error.message
        known = [name for each in context.command.params for name in each.opts] if context is not None else []
        # Two options that begin alike are alike; `--h` and `--help` are not.
        close = difflib.get_close_matches(error.option_name, known, n=1, cutoff=0.75)
        hint = f"{close[0]}, or {hint} for every option" if close else f"{hint} lists every option"
        if verb in ("export", "deploy", "analyze") and error.option_name in _SIZES:
            hint = "a .toml file in place of the name, with Hq, Hkv, D, E and the axes: a layer spec"
    return DeployError("The command line is not valid.", got=got, hint=hint)


# What Rich writes to a terminal: styles and movements of the cursor.
_STYLES = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z]|\r)")
_PLAIN = str.maketrans(
    {"–": "-", "−": "-", "×": "x", "µ": "u", "…": "...", "·": ".", "→": "->", "√": "sqrt "}
)


class _Guarded:
    """A stream without control characters of names and messages, in any encoding, that may be absent or fail.

    What cannot be written is dropped, and noted as its `problem` where that is not a reader that left. It has
    no `buffer`: nothing is written past it.
    """

    def __init__(
        self, stream: TextIO | None, elsewhere: _Guarded | None = None, *, is_own: bool = False
    ) -> None:
        self._is_own = is_own or stream is None
        self._stream = stream if stream is not None else open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        self._elsewhere = elsewhere  # for what other threads print: they are not ours
        self.has_text, self.problem, self._is_at_start = False, None, True
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self.errors = "replace"

    problem: OSError | None

    def write(self, text: str) -> int:
        if self._elsewhere is not None and threading.current_thread() is not threading.main_thread():
            return self._elsewhere.write(text)
        if self.isatty():
            parts = _STYLES.split(text)  # every second one is a style
            text = "".join(part if i % 2 else printable(part) for i, part in enumerate(parts))
        else:
            text = printable(self._as_lines(text))
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError:
            text = text.translate(_PLAIN).encode(self.encoding, "replace").decode(self.encoding)
        if text and self._elsewhere is not None and not self.has_text and supervisor.page is not None:
            supervisor.page.note_output()
        self.has_text = self.has_text or bool(text)
        with self._may_fail():
            self._stream.write(text)
        return len(text)

    def _as_lines(self, text: str) -> str:
        """Text without styles; what a progress bar writes over itself on a terminal are lines."""
        text = _STYLES.sub(lambda found: found[0] if found[0] == "\r" else "", text)
        text = re.sub(r"\r*\n|\r+", "\n", text.lstrip("\r") if self._is_at_start else text)
        self._is_at_start = text.endswith("\n") if text else self._is_at_start
        return text

    def flush(self) -> None:
        with self._may_fail():
            self._stream.flush()

    def close(self) -> None:
        """Close a stream that was opened for this one."""
        if self._is_own:
            with suppress(OSError, ValueError):
                self._stream.close()

    def isatty(self) -> bool:
        with suppress(OSError, ValueError):
            return self._stream.isatty()
        return False

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    @contextmanager
    def _may_fail(self) -> Iterator[None]:
        """Write the rest to nowhere then: a reader that stops early is no error, and a full disk is one."""
        try:
            yield
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
                self.problem = self.problem or error
            with suppress(OSError, ValueError, AttributeError):  # a stream without a descriptor
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


@contextmanager
def _guarded_streams() -> Iterator[_Guarded]:
    """Print through guarded streams meanwhile; yields stdout, which only results reach.

    What user code and native libraries print to descriptor 1, now or later, goes to stderr.
    """
    before: tuple[Any, Any] = sys.stdout, sys.stderr
    stderr = _Guarded(sys.stderr)
    private = _private_stdout()
    stdout = _Guarded(private, stderr, is_own=private is not sys.stdout)
    sys.stdout, sys.stderr = stdout, stderr  # type: ignore[assignment]
    try:
        yield stdout
    finally:
        stdout.flush()
        stderr.flush()
        sys.stdout, sys.stderr = before
        stdout.close()
        stderr.close()


def _private_stdout() -> TextIO | None:
    """A stream on a duplicate of descriptor 1, which becomes stderr; the present one where it is no file."""
    stream = sys.stdout
    try:
        if stream is None or stream.fileno() != 1:
            return stream
        stream.flush()
        private = os.dup(1)
        os.dup2(2, 1)
    except (OSError, ValueError, AttributeError):
        return stream
    return open(private, "w", encoding=stream.encoding, errors="replace", newline=None)


@contextmanager
def _signals_as_interrupts() -> Iterator[list[int]]:
    """Treat signals that end a program like Ctrl-C, so that what is half written is removed.

    Yields the signals that were received. A second one ends the program at once; one that comes with the
    first, to the group of processes and through the process that watches this one, is the same.
    """
    received, begin = interruptions.received, 0.0
    received.clear()

    def interrupt(number: int, frame: object) -> None:
        nonlocal begin
        if received and time.monotonic() - begin < _SAME_SIGNAL_S:
            return
        if received:  # children end with this process
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        begin = time.monotonic()
        received.append(number)
        raise KeyboardInterrupt

    # A signal that already has a handler, or is ignored as under `nohup`, is left alone.
    usual = (signal.SIG_DFL, signal.default_int_handler)
    before = {each: signal.getsignal(each) for each in _ENDING_SIGNALS if signal.getsignal(each) in usual}
    if threading.current_thread() is not threading.main_thread():
        before = {}  # only the main thread may handle signals
    for each in before:
        signal.signal(each, interrupt)
    interruptions.are_known = signal.SIGINT in before
    try:
        yield received
    finally:
        interruptions.are_known = False
        for each, handler in before.items():
            signal.signal(each, handler)
