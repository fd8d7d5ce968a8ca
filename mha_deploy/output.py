"""The one way to write: an output takes its place whole, or what is there stays.

Only what this tool wrote is ever replaced without a request, and of folders nothing else at all. An output is
a regular file or a folder, inside the folder that was named, and never an input of the same command. It is
made under a temporary name beside its place, flushed to the disk and renamed. A lock makes writers wait for
each other. Temporary names contain their own proof, so what a killed process left is known, and is removed by
the next one. `tests/test_output.py` refuses other ways to write in the source.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from mha_deploy.errors import BundleError, DeployError, write_remedy
from mha_deploy.files import MANIFEST, check_name, open_regular, read_regular

TOOL = "mha-deploy"
GENERATOR = f'<meta name="generator" content="{TOOL}'
"""In the head of every page of this tool."""

_SHOWN = 5
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
_NO_FLAGS = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
_AT_FDCWD, _RENAME_NOREPLACE, _RENAME_EXCHANGE = -100, 1, 2
_PATIENCE_S = 600.0
_ENGINE_KEYS = {"backend", "bundle_sha256", "engine_sha256", "verdict"}
# The plans of every version begin so: `ptrt` up to 8.5, `ftrt` from 8.6 on, `vtrt` in TensorRT-RTX.
PLAN_MAGIC = b"trt"
# Pages and images are never read, so one in a folder that is an input may be replaced.
_NEVER_READ = {".html", ".xml", ".png"}

IsOurs = Callable[[Path], bool]
"""Whether a regular file was written by this tool."""


# -- Files -----------------------------------------------------------------------------------------


def check_file(
    path: Path,
    is_ours: IsOurs,
    *,
    overwrite: bool = False,
    inputs: Iterable[str | os.PathLike[str]] = (),
    within: Path | None = None,
) -> Path:
    """Refuse a file that may not be written; gives its real place, behind all links.

    Args:
        path: The file.
        is_ours: How a file of this kind is known as ours.
        overwrite: Whether any other regular file may be replaced, too.
        inputs: The files and folders that the same command reads: none of them is ever replaced.
        within: The folder that the user named, where the name of the file is ours: it may not be left.
    """
    check_name(str(path))
    if "\0" in str(path):
        raise DeployError(
            "The name of the output has a zero byte.", got=repr(str(path)), hint="a name without it"
        )
    real = Path(os.path.realpath(path))
    if within is not None and not real.is_relative_to(os.path.realpath(within)):
        problem = "A link leads out of the folder, and nothing is written outside of it."
        raise DeployError(problem, got=f"{path}, which is {real}", hint="remove the link, or another folder")
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        if os.path.islink(path):
            hint = "remove the link, or name the file itself"
            raise DeployError("The output is a link to nothing.", got=path, hint=hint) from error
        return real
    except OSError as error:
        raise DeployError("The output cannot be written.", got=error, hint=write_remedy(error)) from error
    if not stat.S_ISREG(found.st_mode):
        is_folder = stat.S_ISDIR(found.st_mode)
        hint = f"a file in it: {path / 'NAME'}" if is_folder else "the name of a file, or one that is free"
        raise DeployError("The output is not a regular file.", got=path, hint=hint)
    if source := _input_at(found, inputs):
        raise DeployError(
            "Output and input are the same file.", got=f"{path}, {source}", hint="a name that no input has"
        )
    if not overwrite and not is_ours(real):
        unknown = "" if is_ours is is_nobodys else f", which {TOOL} did not write"
        problem = f"The output already exists{unknown}."
        raise DeployError(problem, got=path, hint="move it elsewhere, another name, or --overwrite")
    return real


def _input_at(found: os.stat_result, inputs: Iterable[str | os.PathLike[str]]) -> str | None:
    """The input that is this very file, whatever its names are."""
    for source in inputs:
        paths: Iterable[Path] = [Path(source)]
        if os.path.isdir(source):
            files = (Path(parent, name) for parent, _, names in os.walk(source) for name in names)
            paths = (path for path in files if path.suffix not in _NEVER_READ)
        for path in paths:
            with suppress(OSError, ValueError):
                if os.path.samestat(path.stat(), found):
                    return str(path)
    return None


def write_file(path: Path, data: bytes, is_ours: IsOurs, **rules: Any) -> Path:
    """Write a file whole, in a folder that is made if need be; `rules` are those of `check_file`."""
    write_files({path: (data, is_ours)}, **rules)
    return path


def write_files(files: Mapping[Path, tuple[bytes, IsOurs]], **rules: Any) -> None:
    """Write several files; all of them are checked, and are on the disk, before the first is replaced."""
    places = {path: check_file(path, is_ours, **rules) for path, (_, is_ours) in files.items()}
    if len(set(places.values())) < len(places):
        hint = "another name for one of them"
        raise DeployError("Two outputs are the same file.", got=next(iter(places)), hint=hint)
    try:
        with ExitStack() as owned:
            new = {}
            for path, real in places.items():
                owned.enter_context(_folder_for(real))
                collect_stale(real)
                new[path] = owned.enter_context(temporary_file(real, files[path][0]))
            for path, real in places.items():
                if not _rename_to_free(new[path], real):
                    check_file(path, files[path][1], **rules)  # it may have come meanwhile
                    os.replace(new[path], real)
                _flush_folder(real.parent)
    except OSError as error:
        got, hint = f"{', '.join(map(str, files))}: {error}", write_remedy(error)
        raise DeployError("The output cannot be written.", got=got, hint=hint) from error


def append_file(path: Path, data: bytes, check: Callable[[Path], object]) -> None:
    """Add to the end of a file that `check` accepts, as a whole: a kill leaves the old or the new one."""
    real = check_file(path, lambda _: True)
    try:
        with _folder_for(real), lock_folder(real.parent):
            before = b""
            if real.exists():
                check(real)
                before = read_regular(real, 1 << 40)  # it grows for as long as there is something to add
                before += b"\n" if before and not before.endswith(b"\n") else b""
            collect_stale(real)
            with temporary_file(real, before + data) as temporary:
                os.replace(temporary, real)
            _flush_folder(real.parent)
    except OSError as error:
        raise DeployError(
            "The file cannot be written.", got=f"{path}: {error}", hint=write_remedy(error)
        ) from error


def write_unit(first: Path, data: bytes, second: Path, text: bytes) -> None:
    """Write two files as one unit: both are complete on the disk before the first of two renames.

    A process that is killed between them leaves the second under its temporary name: see `partial_files`.
    """
    stale = [*partial_files(first), *partial_files(second)]  # of processes that were killed: the others wait
    with temporary_file(first, data) as new_first, temporary_file(second, text) as new_second:
        os.replace(new_first, first)
        os.replace(new_second, second)
        _flush_folder(first.parent)
    for each in stale:
        each.unlink(missing_ok=True)


def partial_files(path: Path) -> list[Path]:
    """Files that were to become this one."""
    return [each for each, kind in _temporaries(path) if kind == "partial" and each.is_file()]


def put_file(path: Path, data: bytes) -> None:
    """Write a file of a folder that is still temporary, and no output yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o644), "wb") as file:
        file.write(data)


def copy_file(source: Path, path: Path) -> None:
    """Copy a regular file into a folder that is still temporary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_regular(source) as old, path.open("xb") as new:
        shutil.copyfileobj(old, new, 1 << 22)


# -- Whether a file is ours ------------------------------------------------------------------------


def is_nobodys(path: Path) -> bool:
    """No file of this kind is known as ours: it is replaced only on request."""
    return False


def is_result(path: Path) -> bool:
    """Whether this is a result of this tool as JSON, whole or truncated."""
    data = _read_json(path)
    if data is None:
        return _head(path).replace(b" ", b"").replace(b"\n", b"").startswith(_RESULT_HEAD)
    tool = data.get("tool")
    return isinstance(tool, Mapping) and tool.get("name") == TOOL


_RESULT_HEAD = b'{"tool":{"name":"mha-deploy"'


def is_page(path: Path) -> bool:
    """Whether this is a page of this tool."""
    return GENERATOR.encode() in _head(path)


def is_junit(path: Path) -> bool:
    """Whether this is JUnit XML of this tool."""
    return re.search(rb'<testsuite name="mha-deploy [a-z]+"', _head(path)) is not None


def is_image(path: Path) -> bool:
    """Whether this is an image of this tool, by its own text chunk."""
    head = _head(path)
    return head.startswith(b"\x89PNG\r\n") and b"tEXtSoftware\0mha-deploy" in head


def is_sample(path: Path) -> bool:
    """Whether this is a sample that was kept to be run again, by the text in its header."""
    return b'"tool":"mha-deploy"' in _head(path)[8:256]


def is_engine_manifest(path: Path) -> bool:
    """Whether this is the manifest of an engine, whole or truncated."""
    data = _read_json(path)
    return data.keys() >= _ENGINE_KEYS if data is not None else _head(path).startswith(b'{\n  "backend": ')


def is_engine(path: Path) -> bool:
    """Whether this is a plan of TensorRT, or has the manifest of one beside it."""
    return _head(path)[1:4] == PLAN_MAGIC or is_engine_manifest(path.with_suffix(".json"))


def _head(path: Path) -> bytes:
    """The beginning of a regular file; empty where there is none."""
    with suppress(OSError), open_regular(path) as file:
        return file.read(1 << 16)
    return b""


def _read_json(path: Path) -> Mapping[str, Any] | None:
    """The object in a JSON file; None where there is none."""
    try:
        data = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, Mapping) else None


# -- Timings of kernels: bytes of TensorRT behind a line that makes them known as ours --------------

_TIMINGS = b"mha-deploy timing cache "


def write_timings(path: Path, data: bytes, within: Path) -> None:
    """Keep the timing cache of a build."""
    head = _TIMINGS + hashlib.sha256(data).hexdigest().encode() + b"\n"
    write_file(path, head + data, _is_timings, within=within)


def read_timings(path: Path) -> bytes | None:
    """The timing cache of an earlier build; None where there is none that is whole and ours."""
    try:
        head, _, data = read_regular(path, 1 << 30).partition(b"\n")
    except OSError:
        return None
    return data if head == _TIMINGS + hashlib.sha256(data).hexdigest().encode() else None


def _is_timings(path: Path) -> bool:
    return _head(path).startswith(_TIMINGS)


# -- Folders ---------------------------------------------------------------------------------------


def refuse_occupied(place: Path, *, overwrite: bool) -> tuple[str, ...]:
    """Refuse a place that may not be written; gives the engines and reports that would go with its bundle."""
    if not os.path.lexists(place):
        return ()
    if not overwrite:
        raise BundleError("The output folder exists.", got=place, hint="another -o, or --overwrite")
    if place.is_dir() and not _entries(place):
        return ()
    manifest = _read_own_manifest(place)
    if manifest is None:
        got, hint = f"{place}, without a {MANIFEST} of {TOOL}", "another -o, or remove it yourself"
        raise BundleError("The folder is not a bundle, and only a bundle is overwritten.", got=got, hint=hint)
    extras, foreign = _contents(place, manifest)
    if foreign:
        problem = f"The folder holds files that {TOOL} did not write; they would be lost."
        got = f"{names_of(foreign)} in {place}"
        raise BundleError(problem, got=got, hint="move them elsewhere, or another -o")
    return extras


def refuse_inside(place: Path, inputs: Iterable[str | Path]) -> None:
    """Refuse to replace a folder that holds an input of the same command."""
    for source in inputs:
        if os.path.exists(source) and Path(os.path.realpath(source)).is_relative_to(place):
            hint = "another -o, or copy it elsewhere"
            raise BundleError("The output folder holds the input.", got=source, hint=hint)


def commit_folder(new: Path, place: Path, *, overwrite: bool) -> tuple[str, ...]:
    """Put a finished bundle in its place, in one step where the system has one.

    Where a bundle is replaced, the old one is afterwards at `new`, for the caller to remove. Gives the
    engines and reports that went with it.
    """
    _flush_tree(new)
    if new.parent == place:  # a mount point cannot be renamed: its content is exchanged
        gone = refuse_occupied(place, overwrite=overwrite)
        _exchange_entries(new, place)
        return gone
    if rename_to_free(new, place):
        return ()
    if not overwrite:
        problem = "Another program wrote the output folder in the meantime; it was left as it is."
        raise BundleError(problem, got=place, hint="another -o, or --overwrite")
    with lock_folder(place):
        gone = refuse_occupied(place, overwrite=True)
        _swap(new, place)
        # The old folder is at `new` now. What came into it since the check must not go with it.
        manifest = _read_own_manifest(new)
        extras, foreign = ((), (new.name,)) if manifest is None else _contents(new, manifest)
        if foreign or set(extras) - set(gone):
            _swap(new, place)
            problem = (
                "Another program wrote into the output folder in the meantime; the folder was left as it is."
            )
            raise BundleError(problem, got=place, hint="try again, or another -o")
    _flush_folder(place.parent)
    return gone


def rename_to_free(new: Path, place: Path) -> bool:
    """Rename a folder to a place that is free or an empty folder; False where there is anything else."""
    try:
        os.rename(new, place)
    except OSError as error:
        if error.errno not in _OCCUPIED:
            raise
        return False
    _flush_folder(place.parent)
    return True


def replace_keeping(new: Path, place: Path, replaced: Callable[[Path], set[str]]) -> None:
    """Replace a folder, and keep what is in it besides the `replaced` files: the new one gets links to it.

    The old one is afterwards at `new`, for the caller to remove.
    """
    _flush_tree(new)
    with lock_folder(place):
        kept = _tree(place) - replaced(place)
        for name in sorted(kept):
            _link(place / name, new / name)
        _swap(new, place)
        if _tree(new) - replaced(new) != kept:
            _swap(new, place)
            problem = "Another program wrote into the folder in the meantime; the folder was left as it is."
            raise DeployError(problem, got=place, hint="try again")
    _flush_folder(place.parent)


def _link(old: Path, new: Path) -> None:
    """Let a file of a folder also be in another one; where the disk has no links, as a copy."""
    if os.path.lexists(new):
        return
    if old.is_dir() and not old.is_symlink():
        new.mkdir(parents=True)
        return
    new.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:
        shutil.copy2(old, new, follow_symlinks=False)


def commit_files(new: Path, place: Path) -> None:
    """Put all files of a folder beside a place: the one of its name last, which needs the others.

    A process that is killed on the way leaves the old ones in `old`, from where they come back.
    """
    home, old, placed = place.parent, new.parent / "old", list[str]()
    _flush_tree(new)
    names = sorted((path.name for path in new.iterdir()), key=lambda name: name == place.name)
    old.mkdir()
    try:
        if len(names) > 1:  # an old graph must not be found beside new weights
            for name in (each for each in reversed(names) if (home / each).exists()):
                os.replace(home / name, old / name)
        for name in names:
            os.replace(new / name, home / name)
            placed.append(name)
    except BaseException:
        for name in placed:
            (home / name).unlink()
        for path in old.iterdir():
            os.replace(path, home / path.name)
        raise
    _flush_folder(home)


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
                    hint = "wait for it, or end it"
                    raise BundleError("Another process is writing there.", got=folder, hint=hint) from error
                time.sleep(0.02)
                continue
            except OSError:  # some network disks have no locks
                pass
            break
        yield
    finally:
        os.close(handle)


def check_folder(folder: Path, within: Path) -> None:
    """Refuse a folder of ours inside one that was named, where a link leads out of that, or no folder is."""
    if Path(os.path.realpath(folder)) != Path(os.path.realpath(within)) / folder.relative_to(within):
        problem = "A link leads out of the folder, and nothing is written outside of it."
        raise BundleError(problem, got=folder, hint=f"remove the link {folder}")
    if folder.exists() and not folder.is_dir():
        raise BundleError("A file is in the place of a folder.", got=folder, hint="move it elsewhere")


def make_folder(folder: Path, within: Path) -> None:
    """Make a folder that `check_folder` accepts."""
    check_folder(folder, within)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BundleError("The folder cannot be created.", got=error, hint="move what is there") from error


# -- Temporary names -------------------------------------------------------------------------------


def temporary_name(place: Path, kind: str = "partial") -> Path:
    """A name beside a place that only this tool makes: half of it follows from the other half."""
    draw = os.urandom(5).hex()
    return _home(place) / f".{_stem(place)}.{kind}-{draw}{_proof(draw)}"


def _proof(draw: str) -> str:
    return hashlib.sha256(f"temporary of {TOOL}: {draw}".encode()).hexdigest()[:10]


def _stem(place: Path) -> str:
    name = place.name or "root"
    return name if len(os.fsencode(name)) <= 200 else hashlib.sha256(os.fsencode(name)).hexdigest()[:40]


def _home(place: Path) -> Path:
    """The folder on whose disk a place is: a mount point has its temporary folders inside."""
    return place if is_mount(place) else place.parent


def is_mount(place: Path) -> bool:
    """Whether something is mounted at a place, also of the same disk: it cannot be renamed."""
    if os.path.ismount(place):
        return True
    with suppress(OSError):
        found = os.path.realpath(place).replace("\\", r"\134").replace(" ", r"\040")
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        return any(line.split(" ")[4] == found for line in text.splitlines())
    return False


def is_temporary(name: str) -> bool:
    """Whether a name was made by `temporary_name`."""
    match = re.fullmatch(r"\..+\.(?:partial|old)-([0-9a-f]{10})([0-9a-f]{10})", name, re.DOTALL)
    return match is not None and _proof(match[1]) == match[2]


def _temporaries(place: Path) -> list[tuple[Path, str]]:
    """The temporary files and folders of a place, with their kind."""
    begin, home = f".{_stem(place)}.", _home(place)
    try:
        names = [name for name in os.listdir(home) if name.startswith(begin) and is_temporary(name)]
    except OSError:
        return []
    rest = [(name, name.removeprefix(begin).split("-")[0]) for name in sorted(names)]
    return [(home / name, kind) for name, kind in rest if kind in ("partial", "old")]


def _entries(place: Path) -> list[str]:
    return [name for name in os.listdir(place) if not is_temporary(name) and name != "lost+found"]


@contextmanager
def temporary_folder(place: Path, mode: int = 0o755) -> Iterator[Path]:
    """A locked folder beside a place, removed in the end; those of processes that were killed go first."""
    with ExitStack() as owned:
        owned.enter_context(_folder_for(place))
        collect_stale(place)
        while True:
            folder = temporary_name(place)
            folder.mkdir(mode)
            if (handle := _locked(folder)) is not None:
                break
        owned.callback(os.close, handle)
        owned.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


@contextmanager
def _folder_for(place: Path) -> Iterator[None]:
    """Make the folder of an output; what was made for it and is empty in the end is removed again."""
    made = [each for each in place.parents if not each.exists()]
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # one that holds the output is not empty
            for folder in made:
                folder.rmdir()


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for what is no output, among the temporary files of the system."""
    with temporary_folder(Path(tempfile.gettempdir()) / f"{TOOL}-{os.getuid()}", 0o700) as folder:
        yield folder


@contextmanager
def temporary_file(path: Path, data: bytes) -> Iterator[Path]:
    """The data in a temporary file beside its place; removed unless it is renamed."""
    while True:
        temporary = temporary_name(path)
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_still(temporary, handle):
            break
        os.close(handle)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(handle, stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644)
            os.fsync(handle)
            yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _locked(folder: Path) -> int | None:
    """A handle that locks a new folder; None where another process took it for a stale one first."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if _is_still(folder, handle):
        return handle
    os.close(handle)
    return None


def _is_still(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def collect_stale(place: Path) -> None:
    """Remove what killed processes left beside a place; what one of them moved aside comes back.

    A process locks what it has made and then looks whether it is still there, so no clock is asked.
    """
    for path, kind in _temporaries(place):
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
                if not stat.S_ISDIR(os.fstat(handle).st_mode):
                    path.unlink()
                    continue
                if kind == "old" and (path / "bundle").is_dir() and not os.path.lexists(place):
                    os.rename(path / "bundle", place)
                if kind == "partial" and (path / "old").is_dir():
                    _restore(path / "old", place)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)


def _restore(old: Path, place: Path) -> None:
    """Bring back what was moved aside, unless what was to replace it is complete."""
    if (old / place.name).exists() and not os.path.lexists(place):  # files: `commit_files`
        for path in sorted(old.iterdir(), key=lambda path: path.name == place.name):
            os.replace(path, place.parent / path.name)
    elif (old / MANIFEST).exists() and not os.path.lexists(place / MANIFEST):  # a mount point
        for path in sorted(old.iterdir(), key=lambda path: path.name == MANIFEST):
            if path.is_dir() and (place / path.name).is_dir():
                shutil.rmtree(place / path.name)
            os.replace(path, place / path.name)


# -- Renames, and what makes them last -------------------------------------------------------------


def exchange(one: Path, other: Path) -> bool:
    """Let two folders change places in one step; False where the system or the disk has no such step."""
    return _rename_with(one, other, _RENAME_EXCHANGE)


def _rename_with(one: Path, other: Path, flags: int) -> bool:
    """Rename as `renameat2` does; False where the system or the disk does not know these flags."""
    import ctypes

    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    done = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), flags)
    if done == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_FLAGS:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _rename_to_free(one: Path, other: Path) -> bool:
    """Rename a file to a place where nothing is; False where something is, or that cannot be asked for."""
    try:
        return _rename_with(one, other, _RENAME_NOREPLACE)
    except FileExistsError:
        return False


def _swap(new: Path, place: Path) -> None:
    """Let a new folder and the old one change places; in two steps, the old one comes back if one fails."""
    if exchange(new, place):
        return
    aside = temporary_name(place, "old")
    aside.mkdir()
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


def _exchange_entries(new: Path, place: Path) -> None:
    """Fill a mount point with the content of a folder in it; the manifest leaves first and comes last."""
    old, names = new / "old", [each.name for each in new.iterdir() if each.name != MANIFEST]
    old.mkdir()
    moved, placed = list[str](), list[str]()
    there = sorted(_entries(place), key=lambda name: name != MANIFEST)
    try:
        for name in there:
            os.rename(place / name, old / name)
            moved.append(name)
        for name in [*names, MANIFEST]:
            os.rename(new / name, place / name)
            placed.append(name)
    except BaseException:
        for name in reversed(placed):
            os.rename(place / name, new / name)
        for name in reversed(moved):
            os.rename(old / name, place / name)
        raise
    _flush_folder(place)


def _flush_tree(folder: Path) -> None:
    """Let everything in a folder reach the disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            if stat.S_ISREG(os.lstat(path).st_mode):
                _flush(path)
        _flush(parent)


def _flush_folder(folder: Path) -> None:
    with suppress(OSError):  # some disks cannot flush a folder
        _flush(folder)


def _flush(path: str | Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- What a folder holds ---------------------------------------------------------------------------


def _tree(folder: Path) -> set[str]:
    """Everything in a folder by its relative name: files, links and empty folders."""

    def fail(error: OSError) -> None:
        raise error

    found = set[str]()
    for parent, folders, files in os.walk(folder, onerror=fail):
        empty = [] if folders or files or parent == str(folder) else ["."]
        linked = [name for name in folders if Path(parent, name).is_symlink()]
        found |= {Path(parent, name).relative_to(folder).as_posix() for name in (*files, *linked, *empty)}
    return found


def _read_own_manifest(folder: Path) -> Mapping[str, Any] | None:
    """The manifest of a bundle, of any format that this tool ever wrote; None where there is none."""
    data = _read_json(folder / MANIFEST)
    if data is None or type(data.get("format")) is not int or not isinstance(data.get("files"), Mapping):
        return None
    versions = data.get("versions")
    return data if isinstance(versions, Mapping) and TOOL in versions else None


def _contents(folder: Path, manifest: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is beside the files of a bundle: engines and reports, and what the tool did not write."""
    found = {name for name in _tree(folder) if not _is_folder(folder / name)}
    others = sorted(found - {MANIFEST, *manifest["files"]})
    extras = tuple(name for name in others if _is_extra(folder, name))
    foreign = tuple(name for name in others if name not in extras)
    return tuple(name for name in extras if name != "engines.json"), foreign  # every bundle has that list


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_extra(folder: Path, name: str) -> bool:
    """Whether a file is an engine or a report of this tool, or what is left of one."""
    path = folder / name
    if path.is_symlink() or not path.is_file():
        return False
    if any(map(is_temporary, name.split("/"))):
        return True
    if re.fullmatch(r"engines/timing-[^/]+\.cache", name):
        return _is_timings(path)
    if re.fullmatch(r"engines/[^/]+\.(engine|json)", name):
        return (_read_json(path.with_suffix(".json")) or {}).keys() >= _ENGINE_KEYS
    name = re.sub(r"^reports/[^/]+/", "", name)  # of what was judged in place of the bundle's own
    if re.fullmatch(r"worst/[^/]+\.safetensors", name):
        return is_sample(path)
    if match := re.fullmatch(r"(?:report|bench)\.(json|html)|engines\.json|data\.jsonl", name):
        return is_page(path) if match[1] == "html" else is_result(path)
    return False


def names_of(files: Sequence[str]) -> str:
    """A few of many names, as text."""
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return ", ".join(files[:_SHOWN]) + more
