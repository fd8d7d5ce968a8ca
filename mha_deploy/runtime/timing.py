"""How long one call takes on the device.

The calls are queued back to back, so that the device never waits for the host where the host can keep up, and
the clock is the device's own. The inputs rotate through copies that are together larger than the L2 cache: a
model in service reads its inputs from memory. Short calls are timed several to a sample, since an event
between two of them costs about a microsecond itself. Warm-up ends when three rounds agree.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from mha_deploy.runtime.cuda import Conditions, Event, Gpu, Stream, read_conditions
from mha_deploy.status import means

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

    @property
    def record(self) -> TimingRecord:
        """What a report stores: percentiles in place of the samples."""
        p50, p90, p99 = (self.percentile(share) for share in (0.5, 0.9, 0.99))
        kept = {name: getattr(self, name) for name in TimingRecord.__struct_fields__ if hasattr(self, name)}
        return TimingRecord(p50_us=p50, p90_us=p90, p99_us=p99, samples=len(self.samples_us), **kept)


Time = Annotated[float, Meta(gt=0)]


class TimingRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of one call, as a report stores it."""

    p50_us: Annotated[Time, means("median time of one call, µs")]
    p90_us: Annotated[Time, means("time that 90 % of the samples did not exceed, µs")]
    p99_us: Annotated[Time, means("time that 99 % of the samples did not exceed, µs")]
    samples: Annotated[int, means("how many samples")]
    calls_per_sample: Annotated[int, means("calls in one sample; a sample is their mean")]
    slots: Annotated[int, means("copies of the inputs that the calls rotated through")]
    graph: Annotated[bool, means("whether the calls were launches of a CUDA graph")]
    why_no_graph: Annotated[
        str | None,
        means("why they were not launches of a CUDA graph although they should have been; null otherwise"),
    ]
    stable: Annotated[bool, means("whether the last warm-up rounds agreed")]
    host_us: Annotated[float | None, means("host time of one launch, µs; null if it was not measured")]
    gpu: Annotated[str, means("the GPU")]
    conditions: Annotated[Conditions, means("clocks, temperature and power while it ran")]
    memory_bytes: Annotated[
        int | None, means("device memory allocated for it, bytes; null if that is not known")
    ]


class KernelTime(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel: how often it runs in one call of the layer, and the device time of those runs together."""

    name: Annotated[str, means("name of the kernel")]
    calls: Annotated[float, means("how often one call launches it")]
    microseconds: Annotated[float, means("its time in one call, µs")]


def slots_past_cache(call_bytes: int, l2_bytes: int) -> int:
    """How many copies of the inputs and outputs of one call are twice as large as the L2 cache."""
    return min(_SLOTS_MAX, max(2, math.ceil(2 * l2_bytes / max(call_bytes, 1))))


def measure_latency(
    launch: Callable[[int], None], slots: int, stream: Stream, gpu: Gpu, plan: TimingPlan, *, graph: bool
) -> Timing:
    """Time `launch`, which queues one call with the inputs of one slot on the stream, and does not wait."""
    events: list[Event] = []
    rotation = cycle(range(slots))  # from one run to the next as well
    conditions: list[Conditions] = []

    def queue(calls: int) -> None:
        for _ in range(calls):
            launch(next(rotation))

    def run(samples: int, calls: int, while_busy: Callable[[], None] = lambda: None) -> list[float]:
        """Queue all samples back to back; then wait, and read the events between them."""
        events.extend(Event() for _ in range(samples + 1 - len(events)))
        events[0].record(stream)
        for sample in range(samples):
            queue(calls)
            events[sample + 1].record(stream)
        while_busy()  # all is queued, and the device is still busy
        stream.synchronize()
        return [b.microseconds_since(a) / calls for a, b in pairwise(events[: samples + 1])]

    try:
        run(slots, 1)  # every slot once
        call_us = max(float(np.median(run(10, 1))), 0.1)
        calls = max(1, math.ceil(plan.sample_us / call_us))
        for _ in range(math.ceil(plan.load_ms * 1e3 / (20 * calls * call_us))):
            run(20, calls)
        stable = settles(lambda: float(np.median(run(20, calls))), plan.agree, plan.rounds)
        stream.synchronize()
        started = time.perf_counter()
        queue(_HOST_LAUNCHES)  # into an empty queue that has room
        host_us = (time.perf_counter() - started) * 1e6 / _HOST_LAUNCHES
        stream.synchronize()
        samples = run(max(plan.samples, 100), calls, lambda: conditions.append(read_conditions(gpu)))
        return Timing(
            samples_us=tuple(samples),
            calls_per_sample=calls,
            slots=slots,
            graph=graph,
            stable=stable,
            host_us=host_us,
            gpu=gpu.name,
            conditions=conditions[0],
        )
    finally:
        for event in events:
            event.close()


def settles(measure: Callable[[], float], agree: float, rounds: int) -> bool:
    """Repeat a measurement until three in a row agree; False if they never did."""
    medians: list[float] = []
    for _ in range(max(rounds, 3)):
        medians.append(measure())
        last = medians[-3:]
        if len(last) == 3 and max(last) - min(last) <= agree * min(last):
            return True
    return False
