"""Errors a user can act on: what happened, what was got, what to try."""

from __future__ import annotations

import difflib
import errno
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

EXIT_PASSED = 0
EXIT_VERDICT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_BACKEND_UNAVAILABLE = 3
EXIT_INTERNAL_ERROR = 70
EXIT_INTERRUPTED = 130


class _Text:
    """A part of an error: written with the options of the command line, read in the reader's language."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, error: DeployError, owner: type) -> Any:
        text = getattr(error, self._name)
        return text if text is None or DeployError.is_typed else DeployError.in_python(text)

    def __set__(self, error: DeployError, text: str | None) -> None:
        setattr(error, self._name, text)


class DeployError(Exception):
    """The input cannot be used as it is.

    Args:
        what: What happened, in one sentence.
        got: The value that caused it, as the user would recognize it.
        hint: What to do about it. No error is without: one is given, or the class has one.
        options: The names of the options that it is about: a file of requirements may have set them.
    """

    exit_code = EXIT_BAD_INPUT
    usual_hint = ""
    in_python: ClassVar[Callable[[str], str]] = staticmethod(str)
    """Text with the keywords of Python, not the options of the command line; `api.py` sets it."""
    is_typed: ClassVar[bool] = False
    """Whether the reader is at the command line, and types options."""
    what, got, hint = _Text(), _Text(), _Text()

    def __init__(self, what: str, *, got: object = None, hint: str = "", options: Iterable[str] = ()) -> None:
        if not (hint or self.usual_hint):
            raise TypeError(f"an error without a hint: {what}")
        super().__init__(what)
        self.what = what
        self.got = None if got is None else str(got)
        self.hint = hint or self.usual_hint
        self.options = frozenset(options)

    def __str__(self) -> str:
        got = () if self.got is None else (f"  got: {self.got}",)
        return "\n".join((self.what, *got, f"  try: {self.hint}"))

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
    """The module cannot be exported as the canonical graph.

    Args:
        what: As in `DeployError`.
        got: As in `DeployError`.
        hint: As in `DeployError`.
        about_types: Whether types or ranges of its numbers are at fault, and the hint does not say so.
        more: As in `DeployError`.
    """

    def __init__(self, what: str, *, about_types: bool = False, **more: Any) -> None:
        super().__init__(what, **more)
        self.about_types = about_types


class UserCodeError(ExportError):
    """The code of a user's model raised an error, which is the cause of this one."""


class LossExceeded(DeployError):
    """A model cannot be compressed within the loss that its user allows."""

    exit_code = EXIT_VERDICT_FAILED


class ValidationFailed(DeployError):
    """What would go on with a bundle is refused, since its last validation failed."""

    exit_code = EXIT_VERDICT_FAILED


class NoResult(ExportError):
    """A user's model itself gives no finite result on some inputs."""


class BackendUnavailable(DeployError):
    """The runtime that was requested is not installed or cannot run here."""

    exit_code = EXIT_BACKEND_UNAVAILABLE
    usual_hint = "`mha-deploy doctor` shows what is installed here"


@contextmanager
def needed(what: str, extra: str) -> Iterator[None]:
    """Imports of what an extra of this package installs; an error of a missing one says how to install it."""
    try:
        yield
    except ImportError as error:
        hint = f'pip install "mha-deploy[{extra}]"'
        raise BackendUnavailable(what, got=error, hint=hint) from error


def place_of_error(error: BaseException, otherwise: str = "an unknown place") -> str:
    """The last line of the user's own code on the way to an error, as `file.py:12`."""
    own, others = _frames(error)
    # A model may itself be installed as a library.
    last = (own or others)[-1:]
    return f"{last[0].filename}:{last[0].lineno}" if last else otherwise


def is_user_error(error: BaseException) -> bool:
    """Whether an error passed through a file of the user's."""
    return bool(_frames(error)[0])


def _frames(error: BaseException) -> tuple[list[traceback.FrameSummary], list[traceback.FrameSummary]]:
    """The frames of a user's files on the way to an error, and those of all that is not of this package."""
    ours = f"{Path(__file__).parent}{os.sep}"
    frames = traceback.extract_tb(error.__traceback__)
    others = [each for each in frames if not each.filename.startswith((ours, "<"))]
    own = {file for file in {each.filename for each in others} if not _is_of_a_library(file)}
    return [each for each in others if each.filename in own], others


def _is_of_a_library(file: str) -> bool:
    """Whether a file came with Python or with a package, wherever that was installed."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    if file.startswith(tuple(f"{folder}{os.sep}" for folder in folders)):
        return True
    if any(f"{os.sep}{name}{os.sep}" in file for name in ("site-packages", "dist-packages")):
        return True
    for entry in map(os.path.abspath, sys.path):  # as after `pip install --target`
        inside = file.removeprefix(f"{entry}{os.sep}")
        if inside != file and inside.split(os.sep)[0] in _names_installed(entry):
            return True
    return False


@cache
def _names_installed(folder: str) -> frozenset[str]:
    """The files and folders that packages put into a folder, by the lists that they keep there."""
    from importlib.metadata import distributions

    lists = (each.read_text("RECORD") or "" for each in distributions(path=[folder]))
    return frozenset(line.split(",")[0].split("/")[0] for text in lists for line in text.splitlines())


def text_of_error(error: BaseException) -> str:
    """The kind and the text of an exception, whose own text may fail or be that of an allocator."""
    if (text := out_of_memory(error)) is not None:
        return text
    try:
        text = str(error)
    except BaseException as failure:  # noqa: BLE001 (a user's class)
        text = f"(its text fails with {type(failure).__name__})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_ALLOCATOR = re.compile(
    r"can't allocate memory|not enough memory|CUDA out of memory|std::bad_alloc|failed to map segment"
)
_TRIED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(\w+)")


def out_of_memory(error: BaseException) -> str | None:
    """How much memory an allocation of Python's or PyTorch's wanted, in words; None for any other error."""
    if not isinstance(error, MemoryError | RuntimeError | ImportError):
        return None
    text = str(error)
    if not isinstance(error, MemoryError) and not _ALLOCATOR.search(text):
        return None
    tried = _TRIED.search(text)
    if tried and tried[2] == "bytes":
        return f"out of memory: {int(float(tried[1])) / 1e9:,.1f} GB were needed at once"
    if tried:
        return f"out of memory: {tried[1]} {tried[2]} were needed at once"
    return f"out of memory: {text.splitlines()[0][:200]}" if text else "out of memory"


_REMEDIES = {
    "free some space there, or write to another disk": ("ENOSPC", "EDQUOT", "EFBIG"),
    "a folder that you may write to": ("EACCES", "EPERM", "EROFS"),
    "a shorter name": ("ENAMETOOLONG",),
    "remove the link that leads to itself": ("ELOOP",),
    "a path of which every part but the last is a folder": ("ENOTDIR", "EISDIR"),
    "make the folder first": ("ENOENT",),
    "close some files, or a higher `ulimit -n`": ("EMFILE", "ENFILE"),
}
_REMEDY_OF = {getattr(errno, name): hint for hint, names in _REMEDIES.items() for name in names}


def write_remedy(error: OSError, otherwise: str = "a file on a local disk") -> str:
    """What to try where the system refused to write, by its reason."""
    return _REMEDY_OF.get(error.errno or 0, otherwise)


def nearest(word: str, known: Iterable[str], then: str = "") -> str:
    """Name the known word that was probably meant, and list them all where they are few or none is near.

    `then` is a sentence that follows.
    """
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    every = f"one of: {', '.join(known)}"
    listed = f"{every}. {then}" if then else every
    if not close:
        return listed
    return f"did you mean {close[0]!r}? {listed if len(known) <= 8 else then}".rstrip()
