"""Errors a user can act on: what happened, what was got, what to try."""

from __future__ import annotations

import difflib
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXIT_PASSED = 0
EXIT_VERDICT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_BACKEND_UNAVAILABLE = 3


class DeployError(Exception):
    """The input cannot be used as it is.

    Args:
        what: What happened, in one sentence.
        got: The value that caused it, as the user would recognise it.
        hint: What to do about it.
    """

    exit_code = EXIT_BAD_INPUT

    def __init__(self, what: str, *, got: object = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.got = None if got is None else str(got)
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.what]
        if self.got is not None:
            lines.append(f"  got: {self.got}")
        if self.hint is not None:
            lines.append(f"  try: {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross from child processes, whatever arguments their classes take.
        return _restored, (type(self), self.args, self.__dict__)

    @property
    def in_one_line(self) -> str:
        """What happened and what was got, for a table."""
        return self.what if self.got is None else f"{self.what} {' '.join(self.got.split())}"


def _restored(kind: type[DeployError], args: tuple[Any, ...], state: dict[str, Any]) -> DeployError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class SpecError(DeployError):
    """A model spec does not describe an attention layer."""


class BundleError(DeployError):
    """A bundle is missing, incomplete, altered, or of another format."""


class ExportError(DeployError):
    """The module cannot be exported as the canonical graph."""


class BackendUnavailable(DeployError):
    """The runtime that was asked for is not installed or cannot run here."""

    exit_code = EXIT_BACKEND_UNAVAILABLE


@contextmanager
def needed(what: str, extra: str) -> Iterator[None]:
    """Imports of what an extra of this package installs; an error of a missing one says how to install it."""
    try:
        yield
    except ImportError as error:
        hint = f'pip install "mha-deploy[{extra}]"'
        raise BackendUnavailable(what, got=error, hint=hint) from error


@contextmanager
def exit_as_error() -> Iterator[None]:
    """Make `sys.exit()` in the code of a user's model an error: its code must not read as a verdict.

    Also a decorator, for functions that call such code. The error names the line.
    """
    try:
        yield
    except SystemExit as stop:
        got, hint = f"{place_of_error(stop)}: sys.exit({stop.code!r})", "raise an exception there, or return"
        raise ExportError("The model's code ended the program.", got=got, hint=hint) from stop


def place_of_error(error: BaseException, otherwise: str = "an unknown place") -> str:
    """The last line of the user's own code on the way to an error, as `file.py:12`."""
    ours = str(Path(__file__).parent)
    libraries = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    frames = traceback.extract_tb(error.__traceback__)
    others = [frame for frame in frames if not frame.filename.startswith((ours, "<"))]
    # A model may itself be installed as a library.
    own = [frame for frame in others if not frame.filename.startswith(libraries)] or others
    return f"{own[-1].filename}:{own[-1].lineno}" if own else otherwise


def nearest(word: str, known: Iterable[str]) -> str:
    """Name the known word that was probably meant, or list them all."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"one of: {', '.join(known)}"
