"""A device in the host's memory, with the methods of `runtime.cuda`: for order and cleanup, not for numbers.

What is queued runs at once, or is kept while the stream records. The fake of TensorRT reads and writes the
same memory, and so can ONNX Runtime on the CPU: the addresses are real.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mha_deploy.runtime.child import isolation
from mha_deploy.runtime.cuda import CudaError, Gpu


@dataclass
class Device:
    """What is alive, and what was done in which order."""

    memory: dict[int, bytearray] = field(default_factory=dict)
    graphs: int = 0
    streams: int = 0
    recording: list[Callable[[], None]] | None = None
    done: list[str] = field(default_factory=list)
    copies_2d: list[tuple] = field(default_factory=list)
    uploaded: int = 0
    fail_on: str = ""
    allocations_left: int = 1000

    def queue(self, name: str, work: Callable[[], None]) -> None:
        if self.recording is not None:
            self.recording.append(work)
        else:
            self.done.append(name)
            work()

    def is_empty(self) -> bool:
        return not self.memory and not self.graphs and not self.streams


DEVICE = Device()


def install(monkeypatch) -> Device:
    """Put the fake in the place of the GPU, fresh."""
    monkeypatch.setattr(isolation, "enabled", False)  # other processes have no fake
    from mha_deploy.runtime import decode_loop, gpu, ort, timing
    from mha_deploy.runtime.tensorrt import engine_runner

    vars(DEVICE).update(vars(Device()))
    fake = Gpu(name="fake", compute_capability="9.0", l2_bytes=64, memory_bytes=1, pci_bus="0")
    monkeypatch.setattr(gpu, "open_gpu", lambda: fake)
    for module in (engine_runner, ort):
        monkeypatch.setattr(module, "Stream", Stream)
    monkeypatch.setattr(decode_loop, "Buffer", Buffer)
    monkeypatch.setattr(timing, "Event", Event)
    monkeypatch.setattr(engine_runner, "capture", capture)
    return DEVICE


def failure(function, status):
    return CudaError(f"{function} failed.", got=status, hint="nvidia-smi")


class Stream:
    def __init__(self, handle=None):
        self.raw = self.handle = 7
        DEVICE.streams += 1

    def synchronize(self):
        if DEVICE.recording is not None:
            raise failure("cudaStreamSynchronize", "cudaErrorStreamCaptureUnsupported")

    def close(self):
        DEVICE.streams -= 1


class Buffer:
    def __init__(self, nbytes):
        if not DEVICE.allocations_left:
            raise failure("cudaMalloc", "cudaErrorMemoryAllocation")
        DEVICE.allocations_left -= 1
        self.nbytes = nbytes
        memory = bytearray(b"\x7e" * max(nbytes, 1))  # whatever was there before
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        DEVICE.memory[self.address] = memory

    def upload(self, array, stream):
        data = array.tobytes()
        assert len(data) == self.nbytes
        DEVICE.uploaded += self.nbytes
        DEVICE.queue("upload", lambda: self._write(data))

    def copy_from(self, other, stream):
        DEVICE.queue("copy", lambda: self._write(DEVICE.memory[other.address]))

    def download(self, shape, dtype, stream):
        DEVICE.done.append("download")
        nbytes = math.prod(shape) * dtype.itemsize
        assert nbytes <= self.nbytes
        return np.frombuffer(bytes(DEVICE.memory[self.address][:nbytes]), dtype).reshape(shape)

    def copy_2d(self, other, copy, stream):
        DEVICE.copies_2d.append((self.address, other.address, copy))
        DEVICE.queue("rows", lambda: self._write_rows(DEVICE.memory[other.address], copy))

    def _write_rows(self, source, copy):
        assert copy.width <= min(copy.target_pitch, copy.source_pitch), "CUDA refuses it"
        for row in range(copy.height):
            read, written = copy.source + row * copy.source_pitch, copy.target + row * copy.target_pitch
            piece = source[read : read + copy.width]
            assert len(piece) == copy.width
            assert written + copy.width <= self.nbytes
            DEVICE.memory[self.address][written : written + copy.width] = piece

    def fill(self, byte, stream):
        DEVICE.queue("fill", lambda: self._write(bytes([byte]) * self.nbytes))

    def free(self):
        del DEVICE.memory[self.address]

    def _write(self, data):
        DEVICE.memory[self.address][: self.nbytes] = data[: self.nbytes]


class Event:
    """A clock by which every moment is 10 µs after the one before."""

    now = 0.0

    def record(self, stream):
        Event.now += 10.0
        self.at = Event.now

    def microseconds_since(self, earlier):
        return self.at - earlier.at

    def close(self):
        pass


class Graph:
    def __init__(self, work):
        self._work, self._test = work, DEVICE.done
        DEVICE.graphs += 1

    def launch(self, stream):
        DEVICE.queue("launch", lambda: [each() for each in self._work])

    def close(self):
        if self._test is DEVICE.done:  # a later test may collect it
            DEVICE.graphs -= 1


def capture(work, stream):
    DEVICE.recording = []
    try:
        work()
        if DEVICE.fail_on == "capture":
            raise failure("cudaStreamEndCapture", "cudaErrorStreamCaptureInvalidated")
        return Graph(DEVICE.recording)
    finally:
        DEVICE.recording = None
