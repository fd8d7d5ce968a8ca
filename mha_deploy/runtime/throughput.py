"""Calls per second of one model on several CUDA streams: a runner, a host thread and inputs for each.

Every stream is kept busy by a queue of its own, as an inference server does it. Weights are loaded once for
each stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from mha_deploy.errors import DeployError
from mha_deploy.runtime.child import isolation
from mha_deploy.runtime.cuda import Event
from mha_deploy.runtime.gpu import GpuRunner, Prepared
from mha_deploy.runtime.runner import Arrays, Runner

_SECONDS = 0.5
_FEWEST, _MOST = 50, 5000
_SLOTS = 2  # copies of the inputs of each stream
_WAIT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Calls per second on all streams together; percentiles from one call of a stream to its next."""

    streams: int
    calls: int  # on each of them
    per_second: float
    p50_us: float
    p99_us: float
    # The last outputs of every stream.
    results: tuple[Arrays, ...] = field(default=(), repr=False, compare=False)


def measure_throughput(
    opener: Callable[[], Runner], feeds: Arrays, streams: Sequence[int]
) -> tuple[Throughput, ...]:
    """Measure one model on different numbers of streams, each by itself, in the process of its runtime."""
    isolation.enabled = False  # this is the child, or was asked to be
    with ExitStack() as owned:
        lanes: list[GpuRunner] = []
        found = []
        for count in sorted(set(streams)):
            while len(lanes) < count:
                runner = owned.enter_context(opener())
                if not isinstance(runner, GpuRunner):
                    raise DeployError(f"{runner.name} has no CUDA streams.", got=runner.device)
                lanes.append(runner)
            found.append(_measure(lanes[:count], feeds))
        return tuple(found)


def _measure(lanes: Sequence[GpuRunner], feeds: Arrays) -> Throughput:
    """All streams at the same time, each with a thread that enters what its runtime keeps by thread."""
    lock, errors = threading.Lock(), list[BaseException]()
    ready = threading.Barrier(len(lanes) + 1, timeout=_WAIT_S)
    started, done = threading.Event(), threading.Barrier(len(lanes) + 1, timeout=_WAIT_S)
    calls = [_FEWEST]
    times: list[list[float]] = [[] for _ in lanes]
    results: list[Arrays] = [{} for _ in lanes]

    def work(index: int, runner: GpuRunner) -> None:
        try:
            with ExitStack() as owned:
                with lock:  # capturing graphs and allocating disturb each other
                    given = runner.checked(feeds)
                    prepared: Prepared = owned.enter_context(runner._prepare(given, _SLOTS))
                    if index == 0:
                        calls[0] = _calibrated(runner, prepared)
                ready.wait()
                events = [Event() for _ in range(calls[0] + 1)]
                for event in events:
                    owned.callback(event.close)
                started.wait(_WAIT_S)
                events[0].record(runner.stream)
                for call in range(calls[0]):
                    prepared.launch(call % _SLOTS)
                    events[call + 1].record(runner.stream)
                runner.stream.synchronize()
                done.wait()
                pairs = zip(events[1:], events[:-1], strict=True)
                times[index] = [later.microseconds_since(earlier) for later, earlier in pairs]
                results[index] = prepared.results((calls[0] - 1) % _SLOTS)
        except BaseException as error:  # noqa: BLE001 (raised again by the caller)
            errors.append(error)
            ready.abort()
            done.abort()

    threads = [
        threading.Thread(target=work, args=(index, runner), daemon=True) for index, runner in enumerate(lanes)
    ]
    for thread in threads:
        thread.start()
    seconds = 0.0
    try:
        ready.wait()
        begin = time.perf_counter()
        started.set()
        done.wait()
        seconds = time.perf_counter() - begin
    except threading.BrokenBarrierError:
        started.set()
    for thread in threads:
        thread.join(_WAIT_S)
    failed = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if failed or errors or not seconds:
        raise failed[0] if failed else DeployError(f"The streams of {lanes[0].name} did not finish in time.")
    merged = np.concatenate(times)
    return Throughput(
        streams=len(lanes),
        calls=calls[0],
        per_second=len(lanes) * calls[0] / seconds,
        p50_us=float(np.percentile(merged, 50)),
        p99_us=float(np.percentile(merged, 99)),
        results=tuple(results),
    )


def _calibrated(runner: GpuRunner, prepared: Prepared) -> int:
    """How many calls take about half a second on one stream."""
    for call in range(_SLOTS):
        prepared.launch(call)
    runner.stream.synchronize()
    started = time.perf_counter()
    for call in range(10):
        prepared.launch(call % _SLOTS)
    runner.stream.synchronize()
    each = (time.perf_counter() - started) / 10
    return int(min(_MOST, max(_FEWEST, _SECONDS / max(each, 1e-6))))
