"""How long one call takes on the device.

The calls are queued back to back, so that the device never waits for the host where the host can keep up, and
the clock is the device's own. The inputs rotate through copies that are together larger than the L2 cache: a
model in service reads its inputs from memory. Short calls are timed several to a sample, since an event
between two of them costs about a microsecond itself. Warm-up ends when three rounds agree.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mha_deploy.runtime.cuda import Conditions, Event, Gpu, Stream, read_conditions

Arrays = Mapping[str, np.ndarray]

_SLOTS_MAX = 64
_HOST_LAUNCHES = 20


@dataclass(frozen=True, kw_only=True)
class TimingPlan:
    """How to measure."""

    samples: int = 200  # how many to take; never fewer than 100
    sample_us: float = 100.0  # a sample holds as many calls as fit this time, and at least one
    agree: float = 0.02  # warm-up is over when three rounds' medians differ by no more than this share
    rounds: int = 20  # most rounds of warm-up; after them the timing is taken, and reported as unstable
    load_ms: float = 0.0
    """Load before the warm-up, on the device. A GPU at its power limit lowers its clock some 50 ms after the
    load began: without this, one runtime would be timed before that and another one after it."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The time of one call, in microseconds."""

    samples_us: tuple[float, ...]  # each the mean of `calls_per_sample` calls
    calls_per_sample: int
    slots: int  # copies of the inputs that the calls rotated through
    graph: bool  # whether the calls were launches of a CUDA graph
    stable: bool  # whether warm-up ended with rounds that agreed
    host_us: float  # host time of one launch
    gpu: str
    conditions: Conditions
    memory_bytes: int | None = None  # of the runner, on the device
    why_no_graph: str | None = None  # although one was requested
    # The outputs of the first and the last slot, to judge the timed calls.
    results: tuple[Arrays, ...] = field(default=(), repr=False, compare=False)

    def percentile(self, share: float) -> float:
        """The time that this share of the samples did not exceed."""
        return float(np.percentile(self.samples_us, 100 * share))

    @property
    def p50(self) -> float:
        """The median."""
        return self.percentile(0.5)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        kept = {name: value for name, value in vars(self).items() if name not in ("results", "samples_us")}
        figures = {f"p{int(100 * q)}_us": self.percentile(q) for q in (0.5, 0.9, 0.99)}
        return {**figures, "samples": len(self.samples_us), **kept, "conditions": asdict(self.conditions)}


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """One kernel: how often it runs in one call of the layer, and the device time of those runs together."""

    name: str
    calls: float
    microseconds: float


def slots_past_cache(call_bytes: int, l2_bytes: int) -> int:
    """How many copies of the inputs and outputs of one call are twice as large as the L2 cache."""
    return min(_SLOTS_MAX, max(2, math.ceil(2 * l2_bytes / max(call_bytes, 1))))


def measure_latency(
    launch: Callable[[int], None], slots: int, stream: Stream, gpu: Gpu, plan: TimingPlan, *, graph: bool
) -> Timing:
    """Time `launch`, which queues one call with the inputs of one slot on the stream, and does not wait."""
    clock = _Clock(launch, slots, stream)
    try:
        clock.run(samples=slots, calls=1)  # every slot once
        call_us = max(clock.median_of(10, 1), 0.1)
        calls = max(1, math.ceil(plan.sample_us / call_us))
        for _ in range(math.ceil(plan.load_ms * 1e3 / (20 * calls * call_us))):
            clock.run(20, calls)
        stable = settles(lambda: clock.median_of(20, calls), plan.agree, plan.rounds)
        host_us = clock.host_microseconds()
        samples = clock.run(max(plan.samples, 100), calls, while_busy=lambda: read_conditions(gpu))
        return Timing(
            samples_us=tuple(samples),
            calls_per_sample=calls,
            slots=slots,
            graph=graph,
            stable=stable,
            host_us=host_us,
            gpu=gpu.name,
            conditions=clock.conditions or Conditions(),
        )
    finally:
        clock.close()


def settles(measure: Callable[[], float], agree: float, rounds: int) -> bool:
    """Repeat a measurement until three in a row agree; False if they never did."""
    medians: list[float] = []
    for _ in range(max(rounds, 3)):
        medians.append(measure())
        last = medians[-3:]
        if len(last) == 3 and max(last) - min(last) <= agree * min(last):
            return True
    return False


class _Clock:
    """Times calls between events; the slots rotate from one run to the next."""

    def __init__(self, launch: Callable[[int], None], slots: int, stream: Stream) -> None:
        self._launch, self._slots, self._stream = launch, slots, stream
        self._next = 0
        self._events: list[Event] = []
        self.conditions: Conditions | None = None

    def run(
        self, samples: int, calls: int, while_busy: Callable[[], Conditions] | None = None
    ) -> Sequence[float]:
        """Queue all samples back to back; then wait, and read the events between them."""
        events = self._events
        events += [Event() for _ in range(samples + 1 - len(events))]
        events[0].record(self._stream)
        for sample in range(samples):
            for _ in range(calls):
                self._call()
            events[sample + 1].record(self._stream)
        if while_busy is not None:  # all is queued, and the device is still busy
            self.conditions = while_busy()
        self._stream.synchronize()
        return [events[i + 1].microseconds_since(events[i]) / calls for i in range(samples)]

    def median_of(self, samples: int, calls: int) -> float:
        return float(np.median(self.run(samples, calls)))

    def host_microseconds(self) -> float:
        """Host time of one launch into an empty queue that has room."""
        self._stream.synchronize()
        started = time.perf_counter()
        for _ in range(_HOST_LAUNCHES):
            self._call()
        spent = time.perf_counter() - started
        self._stream.synchronize()
        return spent * 1e6 / _HOST_LAUNCHES

    def _call(self) -> None:
        self._launch(self._next)
        self._next = (self._next + 1) % self._slots

    def close(self) -> None:
        for event in self._events:
            event.close()
