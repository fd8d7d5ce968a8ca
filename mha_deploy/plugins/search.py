"""The plugin libraries of this machine, and the one that fits a TensorRT."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mha_deploy.plugins.library import PREFIX, PluginError, PluginLibrary, major, read_library
from mha_deploy.plugins.source import ENVIRONMENT, cache_folder, named_place


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A file that should be a library.

    Args:
        path: The file.
        library: What it is; None where it cannot be used.
        problem: Why it cannot; empty where it can.
    """

    path: Path
    library: PluginLibrary | None = None
    problem: str = ""


def places() -> list[Path]:
    """Where libraries are looked for, the first first."""
    named = named_place()
    return [*([] if named is None else [named]), cache_folder()]


def candidates() -> list[Candidate]:
    """Every library of this machine, in the order in which they are looked for."""
    return [_candidate(path) for path in _files()]


def library_for(version: str) -> PluginLibrary:
    """The library that a TensorRT can load: the first that was compiled for its major version.

    Args:
        version: Version of the TensorRT.

    Raises:
        PluginError: There is none; the error says what is there instead.
    """
    seen = []
    for path in _files():
        # A library of another TensorRT is named so, and need not be started to be passed over.
        if path.name.startswith(PREFIX) and path.stem != f"{PREFIX}{major(version)}":
            seen.append(str(path))
            continue
        library = read_library(path)
        if library.tensorrt_major == major(version):
            return library
        seen.append(f"{path} (TensorRT {library.tensorrt})")
    looked = ", ".join(str(place) for place in places())
    raise PluginError(
        f"There is no plugin library for TensorRT {major(version)} here.",
        got=f"looked in {looked}" + (f"; found {', '.join(seen)}" if seen else ""),
        hint=f"build it with `mha-deploy plugins build`, or name one in {ENVIRONMENT}",
    )


def library_needed(record: Mapping[str, Any], version: str) -> PluginLibrary:
    """The library that an engine needs, as its manifest tells.

    Args:
        record: An entry of the manifest's `plugins`.
        version: Version of the TensorRT that shall load it.

    Raises:
        PluginError: There is none, or one of another version.
    """
    library = library_for(version)
    if library.version != record["version"]:
        raise PluginError(
            "The engine needs another version of the plugin library.",
            got=f"{library.path} is {library.version}, the engine was built with {record['version']}",
            hint="build the engine again, or install the mha-deploy that built it",
        )
    missing = [each for each in record["plugins"] if not library.brings(each["name"], each["version"])]
    if missing:
        raise PluginError(
            "The plugin library lacks what the engine needs.",
            got=", ".join(f"{each['name']} version {each['version']}" for each in missing),
            hint="build the engine again",
        )
    return library


def differs(record: Mapping[str, Any], library: PluginLibrary) -> str | None:
    """What to note where a library is of the right version, and still another file."""
    if library.sha256 == record["sha256"]:
        return None
    return (
        f"the plugin library here is another build of version {library.version} "
        f"({library.sha256[:12]}, the engine was built with {record['sha256'][:12]})"
    )


def _files() -> Iterator[Path]:
    for place in places():
        if place.is_dir():
            yield from sorted(place.glob(f"{PREFIX}*.so"))
        elif place.is_file() or place.suffix == ".so":
            # A file that somebody named is looked at even where it is not there: that is their answer.
            yield place


def _candidate(path: Path) -> Candidate:
    try:
        return Candidate(path=path, library=read_library(path))
    except PluginError as error:
        return Candidate(path=path, problem=error.in_one_line)


def why_missing(records: Sequence[Mapping[str, Any]], version: str) -> list[str]:
    """Why what an engine needs cannot be loaded here; empty where it can."""
    reasons = []
    for record in records:
        try:
            library_needed(record, version)
        except PluginError as error:
            reasons.append(error.in_one_line)
    return reasons


def other_builds(records: Sequence[Mapping[str, Any]], version: str) -> list[str]:
    """What to note of the libraries here that an engine can use, and was not built with."""
    notes = []
    for record in records:
        with contextlib.suppress(PluginError):  # `why_missing` tells of those
            notes.append(differs(record, library_needed(record, version)))
    return [note for note in notes if note is not None]
