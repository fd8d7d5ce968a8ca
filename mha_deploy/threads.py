"""NumPy on several cores: parts of a large array side by side, and how many threads its BLAS starts.

OpenBLAS starts its threads for GEMMs of a few microseconds. Where other programs run as well, they wait for
each other many times as long as the GEMM takes. threadpoolctl would do it, too, but sets PyTorch's BLAS along
with NumPy's, and would be one more dependency of every deploy machine.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, wraps
from pathlib import Path
from threading import Thread
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_AT_ONCE = 1 << 18  # numbers of an array that are worked on in one go, within a cache
_NAMES = (
    "scipy_openblas_{}_num_threads64_", "scipy_openblas_{}_num_threads",
    "openblas_{}_num_threads64_", "openblas_{}_num_threads",
)  # fmt: skip


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def for_each_part(work: Callable[[slice], None], shape: tuple[int, ...]) -> None:
    """Do some work on all rows of an array: few of them at once, on all cores."""
    parts = parts_of(shape)
    if len(parts) == 1:
        work(parts[0])
        return
    with ThreadPoolExecutor(cores()) as pool:
        for _ in pool.map(work, parts):
            pass


def side_by_side(work: Callable[[slice], T], count: int) -> list[T]:
    """The results of some work on so many things, as many at once as there are cores."""
    step = -(-count // cores())
    parts = [slice(start, start + step) for start in range(0, count, step)]
    if len(parts) == 1:
        return [work(parts[0])]
    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(work, parts))


def on_a_thread(work: Callable[[], T], *, after: Future[Any] | None = None) -> Future[T]:
    """The result of some work that runs beside this thread; the end of the program does not wait for it.

    It begins when what it comes `after` is done.
    """
    future = Future[T]()

    def run() -> None:
        wait([] if after is None else [after])
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 (it is raised where the result is wanted)
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def parts_of(shape: tuple[int, ...]) -> list[slice]:
    """Some rows of an array after the other."""
    step = max(1, _AT_ONCE // max(math.prod(shape[1:]), 1))
    return [slice(start, start + step) for start in range(0, max(shape[0], 1), step)]


@cache
def _openblas() -> tuple[Callable[[], int], Callable[[int], Any]] | None:
    """What reads and what sets the number of threads of NumPy's OpenBLAS; None where it has another BLAS."""
    try:
        loaded = re.findall(r"(/\S*openblas\S*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    except OSError:
        return None
    for path in sorted(set(loaded), key=lambda each: "numpy" not in each)[:1]:
        library = ctypes.CDLL(path)
        for name in _NAMES:
            if hasattr(library, name.format("get")) and hasattr(library, name.format("set")):
                return getattr(library, name.format("get")), getattr(library, name.format("set"))
    return None


def set_blas_threads(count: int) -> int | None:
    """Let NumPy multiply on so many threads; gives how many it had, None where that is not known."""
    if (found := _openblas()) is None:
        return None
    before = found[0]()
    found[1](count)
    return before


def on_one_thread(run: Callable[P, T]) -> Callable[P, T]:
    """A function during which NumPy multiplies on one thread, in the whole process."""

    @wraps(run)
    def run_so(*args: P.args, **kwargs: P.kwargs) -> T:
        before = set_blas_threads(1)
        try:
            return run(*args, **kwargs)
        finally:
            if before is not None:
                set_blas_threads(before)

    return run_so
