"""Code of a user's model, or a graph: whatever it does is an error that names its line.

One guard is around all of it, and around the evaluation of a user's graph in this process. An exception of
any kind, `sys.exit` and `os._exit` become a `DeployError`. A call that takes longer than the time limit is
interrupted; one that cannot be, and a crash, are reported by the process that watches the command line
(`supervisor.py`), or by the parent of a child process.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.machinery
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from mha_deploy import supervisor
from mha_deploy.environment import is_own_module
from mha_deploy.errors import (
    BundleError,
    DeployError,
    ExportError,
    UserCodeError,
    is_user_error,
    nearest,
    out_of_memory,
    place_of_error,
    text_of_error,
)
from mha_deploy.model.catalog import functions_in
from mha_deploy.model.spec import ModelSpec
from mha_deploy.runtime.child import is_child, isolation
from mha_deploy.supervisor import UserPart, interruptions


class _Ended(BaseException):
    """`os._exit` in the code of a model."""


class _Late(BaseException):
    """The time limit has passed."""


_HINT = "raise an exception there, or return"
_clocks: list[float] = []  # deadlines of the guards around what runs now; 0 for one without


@contextmanager
def user_code(
    where: str = "",
    what: str = "The code of the model failed.",
    *,
    hint: str = "",
    timed: bool = True,
    mixed: bool = False,
    part: UserPart = UserPart.CODE,
) -> Iterator[None]:
    """Run code of a user inside; also a decorator.

    Args:
        where: Which code it is, for a message that knows no line.
        what: What an exception of it means.
        hint: What to do about one.
        timed: Whether the time limit holds for all of it.
        mixed: Whether it is code of this tool that calls such code. Then only exceptions that passed through
            a file of the user's are its errors.
        part: What it is.
    """
    leave = _enter(where, timed, part)
    try:
        yield
    except DeployError:
        raise
    except BaseException as error:
        leave()  # the clock is that of the user's code, not of the report about it
        explained = _explained(error, where, what, hint, timed, mixed, part)
        if explained is None:
            raise
        raise explained from error
    finally:
        leave()


def graph_code(where: str) -> AbstractContextManager[None]:
    """Evaluate a graph of a user inside, within the time limit; what is raised stays as it is."""
    return user_code(where, mixed=True, part=UserPart.GRAPH)


def where_is(function: object) -> str:
    """Where a function is defined, as `file.py:12`; empty where that is not known."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _enter(where: str, timed: bool, part: UserPart) -> Callable[[], None]:
    """Note whose code runs, and start the clock unless it is running; returns what undoes that."""
    limit, pid, exit_now, page = isolation.limit_s, os.getpid(), os._exit, supervisor.page
    before = ("", 0.0, part) if page is None else (page.place, page.deadline, page.part)
    starts = timed and not any(_clocks) and not is_child()  # the parent of a child has a clock for it
    deadline = time.monotonic() + limit if starts else before[1]
    _clocks.append(deadline if starts else 0.0)
    in_main = threading.current_thread() is threading.main_thread()
    alarm = starts and in_main and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL

    has_left, depth = False, sys.getrecursionlimit()

    def ended(status: int = 0) -> NoReturn:
        if os.getpid() != pid:  # a process that it forked
            exit_now(status)
        raise _Ended(status)

    def late(number: int, frame: object) -> None:
        if not has_left:
            raise _Late

    if page is not None:
        page.enter(where or before[0] or "the code of the model", deadline, part)
        if starts:
            faulthandler.dump_traceback_later(limit + 0.5, file=page.stack)
    if alarm:
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, limit)
    os._exit = ended

    def leave() -> None:
        nonlocal has_left
        if os.getpid() != pid:
            exit_now(1)  # a process that it forked and that came back: there is one command line
        if has_left:
            return
        has_left = True
        os._exit = exit_now
        _clocks.pop()
        if sys.getrecursionlimit() < depth:
            sys.setrecursionlimit(depth)
        if alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        if page is not None:
            if starts:
                faulthandler.cancel_dump_traceback_later()
            page.enter(*before)

    return leave


def _explained(
    error: BaseException, where: str, what: str, hint: str, timed: bool, mixed: bool, part: UserPart
) -> BaseException | None:
    """The error that reports what a user's code did; None where it is no error of it."""
    place = place_of_error(error, where or "an unknown place")
    if where and isinstance(error, _Late) and not is_user_error(error):
        place = where  # it is in a library
    if isinstance(error, _Late):
        if not timed:
            return None
        problem = f"{part.value} did not return within {isolation.limit_s:g} s."
        return ExportError(problem, got=place, hint="--time-limit SECONDS, if it needs longer")
    if isinstance(error, _Ended):
        got = f"{place}: os._exit({error.args[0]!r})"
        return ExportError("The code of the model ended the program.", got=got, hint=_HINT)
    if isinstance(error, SystemExit):
        got = f"{place}: sys.exit({error.code!r})"
        return ExportError("The code of the model ended the program.", got=got, hint=_HINT)
    if isinstance(error, KeyboardInterrupt) and not is_child():
        if interruptions.received or not interruptions.are_known:
            return None
    elif mixed and not is_user_error(error):
        return None
    return UserCodeError(what, got=f"{place}: {text_of_error(error)}", hint=hint or _remedy(error))


def _remedy(error: BaseException) -> str:
    """What to try about an exception of a user's code, by its kind."""
    if out_of_memory(error) is not None:
        return "smaller axes (--axis) or a smaller example"
    if isinstance(error, ImportError):
        return "install that module here, or import it only where it is needed"
    if isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError):
        return "a path that does not depend on the working folder: Path(__file__).parent / NAME"
    if isinstance(error, RecursionError):
        return "a loop in place of a function that calls itself"
    return "call it in Python with the same inputs, and correct the line that is named"


# -- Files and functions of a user -------------------------------------------------------------------


def refuse_without_factory(spec: ModelSpec) -> None:
    """Refuse what needs the module of a bundle again, before any work, where nothing here can make it."""
    if not spec.factory:
        what = f"The bundle names no factory that would make the module of {spec.name} again."
        got = spec.summary or "exported from an object in memory"
        raise BundleError(what, got=got, hint="write one, and export path/to/file.py:factory")
    isolation.refuse_untrusted(spec.factory)
    place = spec.factory.rpartition(":")[0]
    if place.endswith(".py") and not Path(place).is_file():
        what = f"The file with the factory of {spec.name} is not here."
        hint = f"run the command in the folder where {place} is"
        raise BundleError(what, got=f"no {place} in {Path.cwd()}", hint=hint)


def import_user_module(place: str) -> ModuleType:
    """The module of a factory: a file, or one that Python finds from here."""
    path, is_file = Path(place), place.endswith(".py")
    folder = str(path.resolve().parent if is_file else Path.cwd())  # where its neighbors are
    _neighbors.add(folder)
    if not is_file:
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # the module is there, and what it imports is not
            hint = "package.module:factory, or path/to/file.py:factory"
            raise ExportError("There is no such module.", got=place, hint=hint) from error
    name = f"_mha_deploy_factory_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path.resolve())
    if not path.is_file() or found is None or found.loader is None:
        raise ExportError("There is no such file.", got=path, hint="path/to/file.py:factory")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    found.loader.exec_module(module)
    return module


class _Neighbors:
    """Finds the modules beside a factory, as a script does, but none that this tool or its libraries import.

    The folder of a factory is not on `sys.path`: a file there whose name is a module of the standard library
    or a dependency would be imported by us, in this process and in our children, in place of it.
    """

    def __init__(self) -> None:
        self.folders: list[str] = []

    def add(self, folder: str) -> None:
        """Look in this folder, and there first."""
        self.folders = [folder, *(each for each in self.folders if each != folder)]
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """The module beside a factory; None for all others, and for the modules in a package."""
        if path is not None or name in sys.stdlib_module_names or name in sys.builtin_module_names:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, self.folders)
        is_folder = found is not None and found.loader is None and found.origin is None
        if found is None or (is_folder and (_is_installed(name) or not _has_modules(found))):
            # A folder without __init__.py is no package where there is one of that name, nor without modules:
            # that of a Triton repository is often called `triton`, which PyTorch looks for.
            return None
        return None if is_own_module(name) else found


def _has_modules(found: importlib.machinery.ModuleSpec) -> bool:
    folders = [Path(each) for each in found.submodule_search_locations or ()]
    endings = (".py", *importlib.machinery.EXTENSION_SUFFIXES)
    inside = (path for folder in folders for path in folder.iterdir())
    return any(path.name.endswith(endings) or (path / "__init__.py").is_file() for path in inside)


def _is_installed(name: str) -> bool:
    return importlib.machinery.PathFinder.find_spec(name) is not None


_neighbors = _Neighbors()


def load_function(reference: str, what: str, example: str) -> Callable[..., object]:
    """The function of `path/to/file.py:name` or `package.module:name`; `what` it is for, in messages."""
    place, _, name = reference.rpartition(":")
    if not place or not name.isidentifier():
        known = [f"{reference}:{each}" for each in functions_in(Path(reference))]
        hint = " or ".join(known) or "path/to/file.py:function"
        raise ExportError(f"This names no function for {what}.", got=reference, hint=hint)
    hint = "import it in Python by itself, and correct what that shows"
    with user_code(place, f"The file of {what} cannot be imported.", hint=hint):
        module = import_user_module(place)
        function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if isfunction(value)]
        hint = nearest(name, known) if known else example
        raise ExportError(f"There is no such function for {what}.", got=reference, hint=hint)
    return function  # type: ignore[no-any-return]
