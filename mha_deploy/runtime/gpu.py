"""Runners on a GPU: a stream, and calls that are timed with inputs already on the device."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from mha_deploy.errors import DeployError
from mha_deploy.runtime.cuda import Gpu, Stream, open_gpu
from mha_deploy.runtime.decode import DecodeLoop, Launcher, open_decode_loop
from mha_deploy.runtime.runner import Arrays, Runner
from mha_deploy.runtime.timing import Timing, TimingPlan, measure_latency, slots_past_cache

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Calls with inputs on the device, ready to be launched many times."""

    launch: Callable[[int], None]
    """Queues one call with the inputs of a slot on the runner's stream, and does not wait."""
    results: Callable[[int], dict[str, np.ndarray]]
    """Waits, and copies the outputs of a slot to the host."""
    memory_bytes: int | None = None  # of all slots, weights included
    why_no_graph: str | None = None  # where one was requested


class GpuRunner(Runner):
    """A runner on the first GPU that is visible to this process."""

    stream: Stream
    graph: bool = True
    """Whether a timed call is the launch of a CUDA graph, where it can be one."""

    def __init__(self) -> None:
        self.can_decode = type(self)._launcher is not GpuRunner._launcher
        self.gpu: Gpu = open_gpu()
        self.device = self.gpu.name

    @abstractmethod
    def _prepare(self, feeds: Arrays, slots: int) -> AbstractContextManager[Prepared]:
        """Put `slots` copies of the inputs on the device, and record the call for each."""

    def _call_bytes(self, feeds: Arrays, results: Arrays) -> int:
        """Device memory of the inputs and outputs of one call."""
        return sum(array.nbytes for array in (*feeds.values(), *results.values()))

    def _launcher(self) -> Launcher:
        """The loaded layer, for a decode loop."""
        raise DeployError(f"{self.name} has no decode loop.", hint="TensorRT or ONNX Runtime")

    def decode_loop(self, *, B: int, T: int | None = None) -> DecodeLoop:
        """A decode loop with a cache on the device, see `open_decode_loop`; close it before the runner."""
        return open_decode_loop(self._launcher(), B=B, T=T)

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
