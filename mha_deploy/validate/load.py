"""Load on a server: clients that send requests at the same time, and what came back."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mha_deploy.errors import DeployError
from mha_deploy.metrics import OutputVerdict
from mha_deploy.options import ValidateOptions
from mha_deploy.runtime.kserve import UNREACHABLE
from mha_deploy.runtime.runner import Arrays

_KEPT_BYTES = 256 << 20  # results that are kept to be judged, of one number of clients


@dataclass(frozen=True, kw_only=True)
class LoadPoint:
    """How a server did under the load of some clients."""

    clients: int  # how many clients sent requests at the same time
    requests: int  # requests that were to be answered
    latencies_ms: tuple[float, ...]  # the time of every answer, as the client sees it
    # How many requests failed, by kind: `error`, `timeout`, `unreachable`, `not sent`
    errors: Mapping[str, int]
    first_error: str | None  # the first of them, in words
    seconds: float  # from the first request to the last answer
    judged: int  # outputs that were judged
    wrong: int  # outputs that were wrong

    def percentile(self, share: float) -> float | None:
        """The time that this share of the answers did not exceed."""
        return float(np.percentile(self.latencies_ms, 100 * share)) if self.latencies_ms else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; see docs/report.md."""
        answered = len(self.latencies_ms)
        return {
            "clients": self.clients,
            "requests": self.requests,
            "answered": answered,
            "errors": dict(self.errors),
            "first_error": self.first_error,
            "per_second": answered / self.seconds if self.seconds > 0 else None,
            **{f"p{int(100 * q)}_ms": self.percentile(q) for q in (0.5, 0.9, 0.99)},
            "judged": self.judged,
            "wrong": self.wrong,
        }


@dataclass
class Unit:
    """What one client sends: a batch element of a case, or a whole sequence."""

    of: Any
    place: int
    parts: int
    requests: int
    send: Callable[[Part], None]


@dataclass
class Part:
    """What came back of a unit: outputs and times of every request, up to the first that failed."""

    outputs: list[Arrays] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    error: DeployError | None = None
    is_kept: bool = True

    def request(self, call: Callable[[], Arrays]) -> None:
        """Send one, and keep its answer and its time."""
        started = time.perf_counter()
        outputs = call()
        self.seconds.append(time.perf_counter() - started)
        self.outputs.append(outputs)


class Load:
    """Some clients that send the same units over and over, up to a number of requests."""

    def __init__(
        self,
        options: ValidateOptions,
        clients: int,
        units: Sequence[Unit],
        on_step: Callable[[int, int], None],
    ) -> None:
        self.options, self.clients, self._units, self._on_step = options, clients, units, on_step
        each = sum(unit.requests for unit in units)
        rounds = max(1, -(-options.requests // each))
        longest = max(unit.requests for unit in units)
        if longest > 1:  # sequences: enough of them to keep every client busy
            rounds = max(rounds, -(-clients // len(units)))
        # In a fixed, shuffled order: neighbours in a dynamic batch come from different cases.
        self._work = [(round, index) for round in range(rounds) for index in range(len(units))]
        random.Random(clients).shuffle(self._work)
        self.requests = rounds * each
        self._next, self._lock, self._gone = 0, threading.Lock(), threading.Event()
        self._parts: dict[tuple[int, int], Part] = {}
        self.seconds, self._kept = 0.0, 0

    @property
    def is_gone(self) -> bool:
        """Whether the server could no longer be reached."""
        return self._gone.is_set()

    def run(self) -> None:
        """Send everything, or until the server is gone or the time is over."""
        started = time.perf_counter()
        until = time.monotonic() + self.options.limit_s
        with ThreadPoolExecutor(self.clients) as pool:
            jobs = [pool.submit(self._client, until) for _ in range(self.clients)]
            for job in jobs:
                job.result()
        self.seconds = time.perf_counter() - started

    def _client(self, until: float) -> None:
        while not self._gone.is_set() and time.monotonic() < until:
            with self._lock:
                if self._next == len(self._work):
                    return
                at, self._next = self._next, self._next + 1
                self._on_step(at, len(self._work))
            place = self._work[at]
            part = self._parts[place] = Part()
            try:
                self._units[place[1]].send(part)
            except DeployError as error:
                part.error = error
                if getattr(error, "kind", "") == UNREACHABLE:
                    self._gone.set()
            with self._lock:
                if place[0] and self._kept > _KEPT_BYTES:
                    part.outputs, part.is_kept = [], False
                self._kept += sum(array.nbytes for each in part.outputs for array in each.values())

    def results(self) -> Iterator[tuple[Any, list[Part]]]:
        """Every case and trace of which all parts were sent and kept."""
        found: dict[tuple[int, int], list[Part]] = {}
        for (round, index), part in sorted(self._parts.items()):
            found.setdefault((round, index - self._units[index].place), []).append(part)
        for (_, first), parts in found.items():
            if len(parts) == self._units[first].parts and all(part.is_kept for part in parts):
                yield self._units[first].of, parts

    def point(self, verdicts: Sequence[OutputVerdict]) -> LoadPoint:
        """The figures."""
        parts = self._parts.values()
        errors = [part.error for part in parts if part.error is not None]
        kinds = Counter(getattr(error, "kind", "error") for error in errors)
        latencies = tuple(1e3 * seconds for part in parts for seconds in part.seconds)
        unsent = self.requests - len(latencies) - sum(kinds.values())
        if unsent:
            kinds["not sent"] = unsent
        return LoadPoint(
            clients=self.clients,
            requests=self.requests,
            latencies_ms=latencies,
            errors=dict(kinds),
            first_error=errors[0].in_one_line if errors else None,
            seconds=self.seconds,
            judged=len(verdicts),
            wrong=sum(verdict.is_wrong for verdict in verdicts),
        )
