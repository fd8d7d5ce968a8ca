"""The commit step of a finished folder or file: it takes its place whole, or what is there stays.

Only what this tool wrote is ever replaced. A folder that holds anything else is refused, and so is one that
appeared while the new one was made, unless the user requested to overwrite. A lock on the folder makes
writers wait for each other, and what a killed process left is removed by the next one.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mha_deploy.errors import BundleError
from mha_deploy.files import read_regular

_MANIFEST = "manifest.json"
_TOOL = "mha-deploy"
_SHOWN = 5
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
# What is left when the tool is killed while it writes into a bundle.
_PARTIAL = re.compile(r"\.lowered-\w+|\.trying-\w+|\..+\.partial-\w+")
_TIMING_CACHE = re.compile(r"engines/timing-.+\.cache")
# A younger temporary folder may be one that its process has not locked yet.
_STALE_AFTER_S = 60.0
_PATIENCE_S = 600.0
_ENGINE_KEYS = {"backend", "bundle_sha256", "engine_sha256", "verdict"}


def refuse_occupied(place: Path, *, overwrite: bool) -> tuple[str, ...]:
    """Refuse a place that may not be written; gives the engines and reports that would go with its bundle."""
    if not os.path.lexists(place):
        return ()
    if not overwrite:
        raise BundleError("The output folder exists.", got=place, hint="another -o, or --overwrite")
    if place.is_dir() and not any(place.iterdir()):
        return ()
    manifest = _read_own_manifest(place)
    if manifest is None:
        got, hint = f"{place}, without a {_MANIFEST} of {_TOOL}", "another -o, or remove it yourself"
        raise BundleError("The folder is not a bundle, and only a bundle is overwritten.", got=got, hint=hint)
    extras, foreign = _contents(place, manifest)
    if foreign:
        more = f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
        problem = f"The folder holds files that {_TOOL} did not write; they would be lost."
        got = f"{', '.join(foreign[:_SHOWN])}{more} in {place}"
        raise BundleError(problem, got=got, hint="move them elsewhere, or another -o")
    return extras


def commit_folder(new: Path, place: Path, *, overwrite: bool) -> tuple[str, ...]:
    """Put a finished folder in its place, in one step where the system has one.

    Where a bundle is replaced, the old one is afterwards at `new`, for the caller to remove. Gives the
    engines and reports that went with it.
    """
    try:
        os.rename(new, place)  # fails where there is anything but an empty folder
        return ()
    except OSError as error:
        if error.errno not in _OCCUPIED:
            raise
        if not overwrite:
            problem = "Another program wrote the output folder in the meantime; it was left as it is."
            raise BundleError(problem, got=place, hint="another -o, or --overwrite") from error
    with lock_folder(place):
        gone = refuse_occupied(place, overwrite=True)
        _swap(new, place)
        # The old folder is at `new` now. What came into it since the check must not go with it.
        manifest = _read_own_manifest(new)
        extras, foreign = ((), (new.name,)) if manifest is None else _contents(new, manifest)
        if foreign or set(extras) - set(gone):
            _swap(new, place)
            problem = "Another program wrote into the output folder in the meantime; it was left as it is."
            raise BundleError(problem, got=place, hint="try again, or another -o")
    return gone


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Wait until no other process of this tool writes to a folder, and keep them waiting meanwhile."""
    handle, deadline = os.open(folder, os.O_RDONLY | os.O_CLOEXEC), time.monotonic() + _PATIENCE_S
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise BundleError("Another process is writing there.", got=folder) from error
                time.sleep(0.02)
                continue
            except OSError:  # some network disks have no locks
                pass
            break
        yield
    finally:
        os.close(handle)


@contextmanager
def temporary_folder(place: Path) -> Iterator[Path]:
    """A locked folder beside a place, removed in the end; those of processes that were killed go first."""
    collect_stale(place)
    folder = Path(tempfile.mkdtemp(prefix=f".{place.name}.partial-", dir=place.parent))
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def collect_stale(place: Path) -> None:
    """Remove what killed processes left beside a place; a bundle that one of them moved aside comes back."""
    for folder in place.parent.glob(f".{glob.escape(place.name)}.*-*"):
        kind = folder.name.removeprefix(f".{place.name}.").split("-")[0]
        if kind not in ("partial", "old") or folder.is_symlink() or not folder.is_dir():
            continue
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < _STALE_AFTER_S:
                continue
            handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
                if kind == "old" and (folder / "bundle").is_dir() and not os.path.lexists(place):
                    os.rename(folder / "bundle", place)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def exchange(one: Path, other: Path) -> bool:
    """Let two folders change places in one step; False where the system or the disk has no such step."""
    import ctypes

    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    done = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    if done == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _swap(new: Path, place: Path) -> None:
    """Let a new folder and the old one change places; in two steps, the old one comes back if one fails."""
    if exchange(new, place):
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{place.name}.old-", dir=place.parent))
    old = aside / "bundle"
    try:
        os.rename(place, old)
        os.rename(new, place)
        os.rename(old, new)
    except BaseException:
        if old.exists() and not place.exists():
            os.rename(old, place)
        raise
    finally:
        with suppress(OSError):  # not empty only if nothing could be put back: then it must stay
            aside.rmdir()


# -- files -------------------------------------------------------------------------------------


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, in a folder that is made if need be, and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_file(path, data) as temporary:
        os.replace(temporary, path)


@contextmanager
def temporary_file(path: Path, data: bytes) -> Iterator[Path]:
    """The data in a temporary file beside its place; removed unless it is renamed."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.partial-", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        temporary.chmod(0o644)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def refuse_foreign(folder: Path, name: str) -> None:
    """Refuse to replace a report, as JSON or as a page, that this tool did not write."""
    for path in (folder / f"{name}.json", folder / f"{name}.html"):
        if os.path.lexists(path) and not _is_extra(folder, path.name):
            problem = f"A file of that name is there, which {_TOOL} did not write."
            raise BundleError(problem, got=path, hint="move it elsewhere, or another -o")


# -- what is ours ------------------------------------------------------------------------------


def _read_own_manifest(folder: Path) -> Mapping[str, Any] | None:
    """The manifest of a bundle, of any format that this tool ever wrote; None where there is none."""
    data = _read_json(folder / _MANIFEST)
    if data is None or type(data.get("format")) is not int or not isinstance(data.get("files"), Mapping):
        return None
    versions = data.get("versions")
    return data if isinstance(versions, Mapping) and _TOOL in versions else None


def _contents(folder: Path, manifest: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is beside the files of a bundle: engines and reports, and what the tool did not write."""

    def fail(error: OSError) -> None:
        raise error

    found = set[str]()  # everything that is no folder, links included
    for parent, folders, files in os.walk(folder, onerror=fail):
        linked = [name for name in folders if Path(parent, name).is_symlink()]
        found |= {Path(parent, name).relative_to(folder).as_posix() for name in (*files, *linked)}
    others = sorted(found - {_MANIFEST, *manifest["files"]})
    extras = tuple(name for name in others if _is_extra(folder, name))
    return extras, tuple(name for name in others if name not in extras)


def _is_extra(folder: Path, name: str) -> bool:
    """Whether a file is an engine or a report of this tool, or what is left of one."""
    path = folder / name
    if path.is_symlink():
        return False
    if any(_PARTIAL.fullmatch(part) for part in name.split("/")) or _TIMING_CACHE.fullmatch(name):
        return True
    data = _read_json(path.with_suffix(".json"))
    if data is None:
        return False
    if re.fullmatch(r"engines/[^/]+\.(engine|json)", name):
        return data.keys() >= _ENGINE_KEYS
    tool = data.get("tool")
    is_ours = isinstance(tool, Mapping) and tool.get("name") == _TOOL
    return is_ours and re.fullmatch(r"(report|bench)\.(json|html)", name) is not None


def _read_json(path: Path) -> Mapping[str, Any] | None:
    """The object in a JSON file; None where there is none."""
    try:
        data = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, Mapping) else None
