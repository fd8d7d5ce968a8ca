"""Progress on stderr: a bar for people, lines for logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnStep = Callable[[str, int, int], None]


@contextmanager
def steps(title: str) -> Iterator[OnStep]:
    """Show the steps of a long job.

    Yields a function to call as each step begins, with its name, its number from 0, and their
    count; a count of 0 where nobody knows how many there are.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with _bar(console, title) as on_step:
            yield on_step
        return
    started, last = time.monotonic(), ""

    def print_step(name: str, number: int, count: int) -> None:
        nonlocal last
        if name == last:  # a builder tells every step of a phase: a log wants the phases
            return
        last = name
        elapsed = time.monotonic() - started
        place = f"{min(number + 1, count)}/{count} " if count else ""
        line = f"{title}: {place}{name} ({elapsed:.1f} s)"
        console.print(line, highlight=False, markup=False)

    yield print_step


@contextmanager
def _bar(console: object, title: str) -> Iterator[OnStep]:
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), text, BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:  # type: ignore[arg-type]
        task = progress.add_task(title, total=None)

        def advance(name: str, number: int, count: int) -> None:
            # A bar without a total only shows that something goes on.
            progress.update(task, description=f"{title}: {name}", completed=number, total=count or None)

        yield advance
