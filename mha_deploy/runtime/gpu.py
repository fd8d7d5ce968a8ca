"""Runners on a GPU: a stream, calls timed with inputs on the device, and calls on several streams."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from mha_deploy.errors import DeployError
from mha_deploy.runtime.child import isolation
from mha_deploy.runtime.cuda import Event, Gpu, Stream, open_gpu
from mha_deploy.runtime.runner import Arrays, Runner
from mha_deploy.runtime.timing import Timing, TimingPlan, measure_latency, slots_past_cache

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Calls with inputs on the device, ready to be launched many times."""

    launch: Callable[[int], None]  # queues one call with the inputs of a slot, and does not wait
    results: Callable[[int], dict[str, np.ndarray]]  # waits, and copies the outputs of a slot to the host
    memory_bytes: int | None = None  # of all slots, weights included
    why_no_graph: str | None = None  # where one was requested


class GpuRunner(Runner):
    """A runner on the first GPU that is visible to this process."""

    stream: Stream
    graph: bool = True  # whether a timed call is the launch of a CUDA graph, where it can be one

    def __init__(self) -> None:
        self.gpu: Gpu = open_gpu()
        self.device = self.gpu.name

    @abstractmethod
    def _prepare(self, feeds: Arrays, slots: int) -> AbstractContextManager[Prepared]:
        """Put `slots` copies of the inputs on the device, and record the call for each."""

    def _call_bytes(self, feeds: Arrays, results: Arrays) -> int:
        """Device memory of the inputs and outputs of one call."""
        return sum(array.nbytes for array in (*feeds.values(), *results.values()))

    def watch(self, feeds: Arrays, watcher: Callable[[Callable[[], None], Callable[[], None]], T]) -> T:
        """Call a watcher, such as a profiler, with functions that launch one call and that wait for it."""
        with self._prepare(self.checked(feeds), 1) as prepared:
            return watcher(lambda: prepared.launch(0), self.stream.synchronize)

    def time(self, feeds: Arrays, plan: TimingPlan | None = None) -> Timing:
        """How long one call takes, by the device's own clock, with inputs that are read from memory."""
        feeds = self.checked(feeds)
        results = self.run(feeds)
        moved = self._call_bytes(feeds, results)
        slots = slots_past_cache(moved, self.gpu.l2_bytes)
        with self._prepare(feeds, slots) as prepared:
            why, plan = prepared.why_no_graph, plan or TimingPlan()
            graph = self.graph and why is None
            timing = measure_latency(prepared.launch, slots, self.stream, self.gpu, plan, graph=graph)
            outputs = tuple(prepared.results(slot) for slot in (0, slots - 1))
            # A user has one set of inputs and outputs on the device, not the many that rotate here.
            all_slots = prepared.memory_bytes
            memory = None if all_slots is None else all_slots - (slots - 1) * moved
            return replace(timing, results=outputs, memory_bytes=memory, why_no_graph=why)


# -- Calls per second on several CUDA streams ------------------------------------------------------
# A runner, a host thread and inputs for each: every stream is kept busy by a queue of its own, as an
# inference server does it. Weights are loaded once for each stream.

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
                    raise DeployError(
                        f"{runner.name} has no CUDA streams.",
                        got=runner.device,
                        hint="a runtime that runs on a GPU",
                    )
                lanes.append(runner)
            found.append(_measure(lanes[:count], feeds))
        return tuple(found)


def _measure(lanes: Sequence[GpuRunner], feeds: Arrays) -> Throughput:
    """All streams at the same time, each with a thread that enters what its runtime keeps by thread."""
    lock, calls, clock = threading.Lock(), [_FEWEST], list[float]()
    together = threading.Barrier(len(lanes), lambda: clock.append(time.perf_counter()), timeout=_WAIT_S)

    def work(index: int, runner: GpuRunner) -> tuple[list[float], Arrays]:
        try:
            with ExitStack() as owned:
                with lock:  # capturing graphs and allocating disturb each other
                    given = runner.checked(feeds)
                    prepared: Prepared = owned.enter_context(runner._prepare(given, _SLOTS))
                    if index == 0:  # how many calls take about half a second on one stream
                        _calls_take(_SLOTS, runner, prepared)
                        each = _calls_take(10, runner, prepared) / 10
                        calls[0] = int(min(_MOST, max(_FEWEST, _SECONDS / max(each, 1e-6))))
                together.wait()
                events = [Event() for _ in range(calls[0] + 1)]
                for event in events:
                    owned.callback(event.close)
                together.wait()
                events[0].record(runner.stream)
                for call in range(calls[0]):
                    prepared.launch(call % _SLOTS)
                    events[call + 1].record(runner.stream)
                runner.stream.synchronize()
                together.wait()
                times = [later.microseconds_since(earlier) for earlier, later in pairwise(events)]
                return times, prepared.results((calls[0] - 1) % _SLOTS)
        except BaseException:
            together.abort()  # the others do not wait for this one
            raise

    with ThreadPoolExecutor(len(lanes)) as pool:
        futures = [pool.submit(work, index, runner) for index, runner in enumerate(lanes)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    failed = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (
            failed[0]
            if failed
            else DeployError(
                f"The streams of {lanes[0].name} did not finish in time.",
                hint="fewer streams, or nvidia-smi to see what else runs",
            )
        )
    times, results = zip(*(future.result() for future in futures), strict=True)
    merged = np.concatenate(times)
    return Throughput(
        streams=len(lanes),
        calls=calls[0],
        per_second=len(lanes) * calls[0] / (clock[2] - clock[1]),
        p50_us=float(np.percentile(merged, 50)),
        p99_us=float(np.percentile(merged, 99)),
        results=results,
    )


def _calls_take(count: int, runner: GpuRunner, prepared: Prepared) -> float:
    """Seconds of some calls on one stream, until all are done."""
    started = time.perf_counter()
    for call in range(count):
        prepared.launch(call % _SLOTS)
    runner.stream.synchronize()
    return time.perf_counter() - started
