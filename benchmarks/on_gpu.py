"""What benchmarks on a GPU share: bundles made side by side, a line for each result, and a table of all."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def parser_of(description: str | None, *, jobs: int, limit: float) -> argparse.ArgumentParser:
    """The arguments that all of them have."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=jobs)
    parser.add_argument("--limit", type=float, default=limit, help="seconds after which nothing more begins")
    return parser


def bundle_folder(folder: Path, name: str, kind: str) -> Path:
    """Where the bundle of a row in one precision is."""
    return folder / f"{name}-{kind.replace(', ', '-').replace(' ', '-')}"


def processes(count: int, **options: Any) -> ProcessPoolExecutor:
    """Processes that share nothing with this one."""
    return ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), **options)


def side_by_side(
    pool: ProcessPoolExecutor, step: Callable[..., None], todo: Iterable[tuple[Any, ...]]
) -> Iterator[tuple[tuple[Any, ...], BaseException | None]]:
    """A step with each of these arguments, and what it raised, in the order in which they end."""
    running = {pool.submit(step, *each): each for each in todo}
    for done in as_completed(running):
        yield running[done], done.exception()


@dataclass
class Results:
    """A line of `NAME.jsonl` for each result as soon as it is there, and `NAME.md`, the table of them."""

    folder: Path
    name: str
    table: Callable[[list[Line]], str]
    limit: float
    lines: list[Line] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.started

    def add(self, found: list[Line]) -> list[Line]:
        """Write lines."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lines.extend(found)
        with (self.folder / f"{self.name}.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(each) + "\n" for each in found)
        (self.folder / f"{self.name}.md").write_text(self.table(self.lines), encoding="utf-8")
        return found

    def measure(self, about: Line, work: Callable[..., list[Line] | None], *arguments: Any) -> list[Line]:
        """Write the lines of some work, or one that says what it is about and why there are none."""
        if self.seconds > self.limit:
            return self.add([{**about, "error": "not measured: the limit was reached"}])
        try:
            return self.add(work(*arguments) or [])
        except Exception as error:  # noqa: BLE001 - the others are measured all the same
            return self.add([{**about, "error": getattr(error, "in_one_line", repr(error))}])
