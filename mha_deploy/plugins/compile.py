"""From source to a library in its folder: CMake in a temporary folder, then one rename."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mha_deploy.plugins.headers import Found
from mha_deploy.plugins.library import PREFIX, PluginError, PluginLibrary, read_library
from mha_deploy.plugins.source import source_folder

OnStep = Callable[[str, int, int], None]

_LINES_TOLD = 30
_MACHINE = slice(18, 20)  # of an ELF header: what processor the file is for
# Ninja counts steps, Make tells a share.
_PROGRESS = re.compile(r"^\[\s*(?:(\d+)/(\d+)|(\d+)%)\]")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A library that was built.

    Args:
        path: Where it lies.
        library: What it says of itself; None where it is for another kind of machine than this.
    """

    path: Path
    library: PluginLibrary | None


def compile_library(
    parts: Sequence[Found], out: Path, architectures: str = "", on_step: OnStep = lambda *step: None
) -> Compiled:
    """Compile the library, and put it into a folder once it is whole.

    Args:
        parts: The headers and the compiler, as they were found.
        out: The folder it goes to.
        architectures: GPUs to compile kernels for, as `80;90`; CMake's own list unless given.
        on_step: Called with a step, its number and their count as each begins.

    Raises:
        PluginError: Something that is needed is missing, or the compiler fails.
    """
    cmake = shutil.which("cmake")
    if cmake is None:
        raise PluginError("CMake is missing.", got="no cmake on PATH", hint="pip install cmake")
    source = source_folder()
    if not (source / "CMakeLists.txt").is_file():
        raise PluginError("The source of the plugin library is not here.", got=source, hint="reinstall it")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=out) as folder:
        _configure(cmake, source, Path(folder), parts, architectures, on_step)
        jobs = str(os.cpu_count() or 1)
        _run([cmake, "--build", folder, "--target", "plugins", "--parallel", jobs], "compile", on_step)
        return _moved(Path(folder), out)


def _configure(
    cmake: str, source: Path, folder: Path, parts: Sequence[Found], architectures: str, on_step: OnStep
) -> None:
    command = [cmake, "-S", str(source), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release"]
    if shutil.which("ninja"):
        command += ["-G", "Ninja"]
    for found in parts:
        folders = ";".join(str(path.resolve()) for path in found.paths)
        command.append(f"-D{found.part.variable}={folders}")
    if architectures:
        command.append(f"-DCUDA_ARCHITECTURES={architectures}")
    _run(command, "configure", on_step)


def _run(command: Sequence[str], step: str, on_step: OnStep) -> None:
    """Run a command, telling its progress; of a failure the last lines are kept."""
    on_step(step, 0, 0)
    last: deque[str] = deque(maxlen=_LINES_TOLD)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        for line in process.stdout or ():
            last.append(line.rstrip())
            match = _PROGRESS.match(line)
            if match is not None:
                on_step(step, int(match[1] or match[3]), int(match[2] or 100))
    if process.returncode != 0:
        told = "\n    ".join(line for line in last if line)
        raise PluginError(
            f"The plugin library could not be built: {step} ended with {process.returncode}.",
            got=f"its last lines are\n    {told}",
            hint="mha-deploy plugins build --help names the headers and compilers that can be chosen",
        )


def _moved(folder: Path, out: Path) -> Compiled:
    built = sorted(folder.glob(f"{PREFIX}*.so"))
    if len(built) != 1:
        raise PluginError(
            "The build gave no library.",
            got=", ".join(path.name for path in built) or "none",
            hint="mha-deploy plugins build again, with an empty --out",
        )
    native = _is_for_this_machine(built[0])
    if native:
        read_library(built[0])  # one that cannot be loaded must not take the place of one that can
    path = out / built[0].name
    os.replace(built[0], path)
    return Compiled(path=path, library=read_library(path) if native else None)


def _is_for_this_machine(path: Path) -> bool:
    """Whether a library is for the kind of processor that Python runs on: compilers can be for another."""
    with path.open("rb") as ours, open(sys.executable, "rb") as python:
        return ours.read(20)[_MACHINE] == python.read(20)[_MACHINE]
