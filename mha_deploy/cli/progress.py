"""Progress on stderr: a bar for people, lines for logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnStep = Callable[[str, int, int], None]


@contextmanager
def steps(title: str) -> Iterator[OnStep]:
    """Show the steps of a long job.

    Yields a function to call as each step begins, with its name, its number from 0, and their count.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with _bar(console, title) as on_step:
            yield on_step
        return
    started = time.monotonic()

    def print_step(name: str, number: int, count: int) -> None:
        elapsed = time.monotonic() - started
        console.print(f"{title}: {number + 1}/{count} {name} ({elapsed:.1f} s)", highlight=False)

    yield print_step


@contextmanager
def _bar(console: object, title: str) -> Iterator[OnStep]:
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:  # type: ignore[arg-type]
        task = progress.add_task(title, total=None)

        def advance(name: str, number: int, count: int) -> None:
            progress.update(task, description=f"{title}: {name}", completed=number, total=count)

        yield advance
