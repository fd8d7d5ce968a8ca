"""Errors a user can act on: what happened, what was got, what to try."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

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

    @property
    def in_one_line(self) -> str:
        """What happened and what was got, for a table."""
        return self.what if self.got is None else f"{self.what} {' '.join(self.got.split())}"


class SpecError(DeployError):
    """A model spec does not describe an attention layer."""


class BundleError(DeployError):
    """A bundle is missing, incomplete, altered, or of another format."""


class ExportError(DeployError):
    """The module cannot be turned into the canonical graph."""


class BackendUnavailable(DeployError):
    """The runtime that was asked for is not installed or cannot run here."""

    exit_code = EXIT_BACKEND_UNAVAILABLE


def nearest(word: str, known: Iterable[str]) -> str:
    """Name the known word that was probably meant, or list them all."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"one of: {', '.join(known)}"
