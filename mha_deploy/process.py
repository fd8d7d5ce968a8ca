"""How this tool starts interpreters and programs: nothing is taken from the working folder.

Python looks for modules in the working folder first (`-c`, `-m`, an empty entry of `PYTHONPATH`), a shell's
`PATH` may name it, and so may the loader's `LD_LIBRARY_PATH`. Whoever unpacks a bundle and looks at it there
would run what the bundle brings. So every interpreter of this tool is started here, and every program too.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import LazyLoader
from types import ModuleType
from typing import Any

# Lists of folders in which an empty or a relative entry is the working folder or a part of it.
_PATHS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
# Where this package is. It is trusted: its code is what runs.
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def variables(**more: str) -> dict[str, str]:
    """The environment variables of what is started: lists of folders without empty and relative entries.

    `PYTHONSAFEPATH` is for what a started program starts: the interpreters of this tool read no `PYTHON…`.
    """
    found = {**os.environ, "PYTHONSAFEPATH": "1", **more}
    for name in _PATHS:
        if name in found:
            found[name] = os.pathsep.join(_absolute(found[name]))
    return found


def _absolute(folders: str) -> list[str]:
    return [each for each in folders.split(os.pathsep) if os.path.isabs(each)]


def forget_working_folder() -> None:
    """Take out of `sys.path` what empty and relative entries of `PYTHONPATH` became, and empty ones.

    For the command line alone: the path of a program that imports this package is its own.
    """
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.environ.get("PYTHONPATH") else []
    kept = {os.path.abspath(each) for each in entries if os.path.isabs(each)} | {_ROOT}
    found = {os.path.abspath(each) for each in entries if not os.path.isabs(each)} - kept
    sys.path[:] = [each for each in sys.path if os.path.isabs(each) and os.path.abspath(each) not in found]


# Libraries that another imports and that few commands use. SymPy, of ONNX's IR, takes a third of a second.
# The module of ONNX's IR uses it while it is imported; under another name SymPy would just be loaded.
_DEFERRED = frozenset({"sympy", "onnx_ir._symbolic_shapes"})


class _Deferred:
    """Finds those modules as others are found, and lets each run when something of it is first used."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name not in _DEFERRED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


def defer_imports() -> None:
    """Import large libraries that few commands use when they are used; for processes of this tool alone."""
    sys.meta_path.insert(0, _Deferred)  # type: ignore[arg-type]


def find_program(name: str | os.PathLike[str]) -> str | None:
    """The path of a program on `PATH`, and never one of the working folder that only its name gives."""
    named = os.fspath(name)
    if os.path.dirname(named):
        return shutil.which(named)  # somebody chose this very file
    return shutil.which(named, path=os.pathsep.join(_absolute(os.environ.get("PATH", os.defpath))))


# -- Interpreters ----------------------------------------------------------------------------------

# `-I` reads no variable of Python's and no folder but those of the installation, also in Python 3.10, which
# has no `-P`. What else is on the path is handed over, before the first import that could look there.
_START = """\
import sys
first, user = {first!r}, {user!r}
if user and sys.prefix == sys.base_prefix:
    import site
    site.addsitedir(site.getusersitepackages())
sys.path[:] = [*first, *(each for each in sys.path if each not in first)]
del first, user
"""
_MODULE = "import runpy\nrunpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"


def python_command(
    *arguments: object,
    code: str = "",
    module: str = "",
    executable: str | None = None,
    path: Sequence[str] = (),
) -> list[str]:
    """The command of an interpreter that runs some code, or a module as a program.

    Args:
        arguments: `sys.argv[1:]` there.
        code: What it runs.
        module: Or the module, such as `pip`.
        executable: Another interpreter than this one. It has its own packages, and the absolute entries of
            `PYTHONPATH`; this one's has the path of this process.
        path: Folders that come first on its path.
    """
    # By its name: the interpreter of another environment may be a link to the same file.
    own = executable is None or os.path.abspath(executable) == os.path.abspath(sys.executable)
    here = [*sys.path, _ROOT] if own else _absolute(os.environ.get("PYTHONPATH", ""))
    first = list(dict.fromkeys(each for each in (*path, *here) if os.path.isabs(each)))
    user = not own and site.ENABLE_USER_SITE is not False
    start = _START.format(first=first, user=user) + (_MODULE.format(module=module) if module else code)
    flags = [f"-W{each}" for each in sys.warnoptions] + ["-B"] * sys.flags.dont_write_bytecode
    flags += ["-Xutf8"] * sys.flags.utf8_mode
    return [executable or sys.executable, "-I", *flags, "-c", start, *map(str, arguments)]


# -- Starting --------------------------------------------------------------------------------------


def start(command: Sequence[str], *, more: Mapping[str, str] | None = None, **options: Any) -> Any:
    """`subprocess.Popen` of a command whose program is not of the working folder; `more` are variables."""
    return subprocess.Popen(_found(command), env=variables(**(more or {})), **options)


def run(command: Sequence[str], **options: Any) -> Any:
    """`subprocess.run` of such a command."""
    return subprocess.run(_found(command), env=variables(), **options)


def _found(command: Sequence[str]) -> list[str]:
    program = find_program(command[0])
    if program is None:
        raise FileNotFoundError(f"no program {command[0]} on PATH")
    return [program, *command[1:]]
