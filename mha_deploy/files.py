"""Read files that anybody may have written: regular files only, of bounded size, depth and content."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mha_deploy.errors import DeployError
from mha_deploy.text import printable

MANIFEST = "manifest.json"
"""The file that makes a folder a bundle."""

# A manifest of the largest models has a few megabytes.
LARGEST_TEXT = 64 << 20
_DEEPEST, _LONGEST, _LARGEST_NUMBER = 32, 1 << 20, 2**63


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; a pipe or a device is an OSError and does not block."""
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "A zero byte in the name", repr(str(path)))
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        return os.fdopen(handle, "rb")
    except OSError:
        os.close(handle)
        raise


def read_regular(path: Path, limit: int = LARGEST_TEXT) -> bytes:
    """The content of a regular file; a larger one than the limit is an OSError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"Larger than {limit:,} bytes", str(path))
        return file.read(size)  # with a large limit, read(limit) would allocate that much


def hint_for_missing(path: Path, hint: str, is_meant: Callable[[Path], bool] = lambda each: True) -> str:
    """What to try where there is no such path: one beside it that was probably meant, or what is needed."""
    with suppress(OSError, ValueError):  # a name that no file can have
        names = [each.name for each in path.parent.iterdir() if is_meant(each)]
        if near := get_close_matches(path.name, names, n=1):
            return f"did you mean {path.with_name(near[0])}? Or {hint}"
    return hint


def check_name(name: str) -> None:
    """Refuse the name of a file that is not UTF-8: runtimes and the formats of our files do not take it."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        shown = name.encode("utf-8", "backslashreplace").decode()
        raise DeployError("The name is not valid UTF-8.", got=shown, hint="rename it") from error


def refuse_missing_data(path: Path, hint: str) -> None:
    """Refuse a file or folder of samples that is not there."""
    check_name(str(path))
    if not os.path.exists(path):  # false for a name that no file can have
        raise DeployError("There is no such data.", got=path, hint=hint_for_missing(path, hint))


def file_name(text: str) -> str:
    """Text as the name of a file or folder: ASCII letters, digits, dashes, underscores and dots."""
    shown = "".join(each if each.isascii() and (each.isalnum() or each in "-_.") else "-" for each in text)
    return shown[:100].strip(".-") or "x"


class PathPart(str):
    """A name that is one part of a path: of a model, an engine, a case, a cell.

    Raises:
        DeployError: It could leave its folder, be taken for an option, not be a file everywhere, or be shown
            as something else.
    """

    __slots__ = ()

    def __new__(cls, name: str, what: str = "a file") -> PathPart:
        """Check a name, and write it in Unicode's composed form."""
        composed = unicodedata.normalize("NFC", name)
        if wrong := _why_no_part(composed):
            hint = f"letters, digits, dashes and dots, without {wrong}" if wrong != "a name" else wrong
            raise DeployError(f"This cannot be the name of {what}.", got=name, hint=hint)
        return super().__new__(cls, composed)


# Room for what is added to a name: an ending, a hash, the mark of a temporary file.
_LONGEST_PART = 200
_RESERVED = {
    "con",
    "prn",
    "aux",
    "nul",
    *(f"{port}{number}" for port in ("com", "lpt") for number in range(10)),
}


def _why_no_part(name: str) -> str | None:
    """What is wrong with a name as one part of a path, as what it should be without."""
    if not name or name.strip(".") == "":
        return "a name"
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "bytes that are not UTF-8"
    refused = {
        "a separator": re.search(r"[/\\:]", name),
        "control characters": printable(name) != name or not name.isprintable(),
        "a dash, dot, tilde or space at the beginning": name[0] in "-.~" or name[0].isspace(),
        "a dot or space at the end": name[-1] == "." or name[-1].isspace(),
        f"more than {_LONGEST_PART} bytes": size > _LONGEST_PART,
        "a name that systems reserve": name.split(".")[0].lower() in _RESERVED,
    }
    return next((wrong for wrong, found in refused.items() if found), None)


def read_json(path: Path) -> Any:
    """The plain data in a JSON file.

    Raises:
        OSError: It is no regular file, or too large.
        ValueError, msgspec.DecodeError, RecursionError: It is no JSON, or an object has a field twice.
    """
    import msgspec

    content = read_regular(path)
    data = msgspec.json.decode(content)  # first: it refuses what `json` takes, such as NaN
    refuse_duplicates(content)
    return data


def refuse_duplicates(content: bytes) -> None:
    """Refuse JSON in which an object has a field twice: every reader takes another one of them."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        if len(dict(pairs)) < len(pairs):
            (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"Object has the field `{printable(name)[:80]}` more than once")

    json.loads(content, object_pairs_hook=check)


def check_plain(data: Any, at: str = "$", depth: int = 0) -> None:
    """Refuse plain data that no writer of ours makes.

    Raises:
        ValueError: A text has control characters, a number has more than 64 bits or is not finite, or
            something is too long or nested too deeply; the message begins like msgspec's.
    """
    if depth > _DEEPEST:
        raise ValueError(f"Nested too deeply - at `{at}`")
    if isinstance(data, Mapping):
        for key, value in data.items():
            check_plain(str(key), f"{at}.{printable(str(key))[:80]}", depth)
            check_plain(value, f"{at}.{str(key)[:80]}", depth + 1)
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            check_plain(value, f"{at}[{index}]", depth + 1)
    elif isinstance(data, str) and (len(data) > _LONGEST or printable(data) != data):
        what = "a text of 1 MiB or more" if len(data) > _LONGEST else f"control characters in {data[:80]!r}"
        raise ValueError(f"Expected plain text, got {what} - at `{at}`")
    elif isinstance(data, int) and abs(data) >= _LARGEST_NUMBER:
        raise ValueError(f"Expected a number of at most 64 bits - at `{at}`")
    elif isinstance(data, float) and not math.isfinite(data):
        raise ValueError(f"Expected a finite number, got {data} - at `{at}`")


class Problem(NamedTuple):
    """What msgspec refuses."""

    what: str  # in its words
    place: str  # as `files.model`; empty for the whole
    unknown: str | None  # the field that its object does not have
    strange: str | None  # the text that is none of those allowed

    @property
    def table(self) -> str:
        """The outermost field of the place."""
        return re.split(r"[.\[]", self.place)[0]


def problem_in(error: Exception) -> Problem:
    """What msgspec refuses, and where: it has all of it as one text only."""
    what, _, place = str(error).partition(" - at `$")
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", what, re.DOTALL)
    strange = re.fullmatch(r"Invalid enum value '(.*)'", what, re.DOTALL)
    return Problem(what, place.strip(".`"), unknown and unknown[1], strange and strange[1])


def as_plain(value: Any) -> Any:
    """Data or a record as JSON can hold it; a number that is not finite becomes null.

    A name from a file system may hold bytes that are no text; they are spelled out, since no UTF-8 file can
    hold them.
    """
    if hasattr(value, "__struct_fields__"):
        from msgspec import to_builtins

        return as_plain(to_builtins(value))
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if hasattr(value, "tolist"):  # of NumPy
        return as_plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {as_plain(str(key)): as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    return value
