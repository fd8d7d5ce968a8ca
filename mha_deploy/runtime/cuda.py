"""The GPU without PyTorch: buffers, streams, events, graphs, clocks."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Struct

from mha_deploy.environment import gpus_are_hidden
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.status import means

# -- Buffers, streams, events and graphs, through NVIDIA's `cuda-bindings` -------------------------

UNWRITTEN = 0xFF
"""As every byte: NaN in every float type, -1 in every integer. An output that was not written fails."""


class CudaError(DeployError):
    """A call to the CUDA runtime failed."""


class OldDriver(CudaError):
    """There is no driver, or it is older than the CUDA runtime."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The GPU in use: the first that is visible to CUDA in this process."""

    name: str
    compute_capability: str  # for example 9.0
    l2_bytes: int
    memory_bytes: int
    pci_bus: str  # its address, by which NVML finds it


@cache
def _runtime() -> Any:
    try:
        from cuda.bindings import runtime
    except (ImportError, OSError) as error:
        problem, hint = "NVIDIA's cuda-bindings are not installed.", 'pip install "mha-deploy[cuda]"'
        raise BackendUnavailable(problem, got=error, hint=hint) from error
    return runtime


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _call(function: str, *arguments: Any) -> Any:
    """Call the CUDA runtime, or the driver by its prefix; raises for its status, and returns the rest."""
    api = _runtime() if function.startswith("cuda") else _driver()
    status, *results = getattr(api, function)(*arguments)
    if int(status) != 0:
        name = getattr(status, "name", status)
        raise (OldDriver if name == "cudaErrorInsufficientDriver" else CudaError)(
            f"{function} failed.",
            got=name,
            hint="nvidia-smi shows the state of the GPU and its memory",
        )
    return results[0] if len(results) == 1 else tuple(results) or None


@cache
def open_gpu() -> Gpu:
    """The GPU; refused without bindings, driver or GPU."""
    problem, hint = "There is no CUDA GPU to run on.", "mha-deploy doctor"
    if gpus_are_hidden():
        got = f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r}"
        hint = "unset CUDA_VISIBLE_DEVICES, or set it to the index of a GPU"
        raise BackendUnavailable(problem, got=got, hint=hint)
    needed = "a machine with an NVIDIA GPU and its driver"
    try:
        if sys.platform == "linux":  # before the bindings: without a driver they are of no use
            ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BackendUnavailable(problem, got="no NVIDIA driver (libcuda.so.1)", hint=needed) from error
    try:
        count = _call("cudaGetDeviceCount")
    except CudaError as error:
        if isinstance(error, OldDriver):
            hint = needed
            if Path("/proc/driver/nvidia").exists():
                hint = "a newer NVIDIA driver, or cuda-bindings 12 where the driver is older than CUDA 13"
        raise BackendUnavailable(problem, got=error.got, hint=hint) from error
    if not count:
        raise BackendUnavailable(problem, got="0 devices", hint=hint)
    _call("cudaSetDevice", 0)
    properties = _call("cudaGetDeviceProperties", 0)
    name = properties.name
    return Gpu(
        name=(name.decode() if isinstance(name, bytes) else str(name)).rstrip("\0"),
        compute_capability=f"{properties.major}.{properties.minor}",
        l2_bytes=int(properties.l2CacheSize),
        memory_bytes=int(properties.totalGlobalMem),
        pci_bus=f"{properties.pciDomainID:08x}:{properties.pciBusID:02x}:{properties.pciDeviceID:02x}.0",
    )


def find_gpu() -> Gpu | None:
    """The GPU; None where `open_gpu` refuses."""
    try:
        return open_gpu()
    except BackendUnavailable:
        return None


def free_memory() -> int:
    """Bytes of free device memory."""
    return int(_call("cudaMemGetInfo")[0])


@dataclass(frozen=True, kw_only=True)
class Copy2D:
    """A 2D copy between two buffers: `height` pieces of `width` bytes. Offsets and pitches are in bytes."""

    target: int
    target_pitch: int
    source: int
    source_pitch: int
    width: int
    height: int


class Buffer:
    """Device memory; an empty buffer has an address, too."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = int(_call("cudaMalloc", max(nbytes, 1)))

    def upload(self, array: np.ndarray, stream: Stream) -> None:
        """Copy an array to the device; the array must live until the stream has done so."""
        if array.nbytes != self.nbytes or not array.flags.c_contiguous:
            got = f"{array.nbytes} of {self.nbytes} bytes"
            raise CudaError(
                "The array does not fit the buffer.", got=got, hint="arrays of the shape that was prepared"
            )
        _copy(self.address, array.ctypes.data, self.nbytes, "HostToDevice", stream)

    def copy_from(self, other: Buffer, stream: Stream) -> None:
        """Copy another buffer of the same size."""
        _copy(self.address, other.address, self.nbytes, "DeviceToDevice", stream)

    def copy_2d(self, other: Buffer, copy: Copy2D, stream: Stream) -> None:
        """Copy pieces of another buffer into this one."""
        target, source = self.address + copy.target, other.address + copy.source
        places = (target, copy.target_pitch, source, copy.source_pitch)
        kind = _runtime().cudaMemcpyKind.cudaMemcpyDeviceToDevice
        _call("cudaMemcpy2DAsync", *places, copy.width, copy.height, kind, stream.raw)

    def download(self, shape: tuple[int, ...], dtype: np.dtype, stream: Stream) -> np.ndarray:
        """Copy the beginning of the buffer to a new array, and wait for it."""
        array = np.empty(shape, dtype)
        _copy(array.ctypes.data, self.address, array.nbytes, "DeviceToHost", stream)
        stream.synchronize()
        return array

    def fill(self, byte: int, stream: Stream) -> None:
        """Set every byte."""
        if self.nbytes:
            _call("cudaMemsetAsync", self.address, byte, self.nbytes, stream.raw)

    def free(self) -> None:
        """Free the memory."""
        if self.address:
            address, self.address = self.address, 0
            _call("cudaFree", address)


def _copy(target: int, source: int, nbytes: int, direction: str, stream: Stream) -> None:
    if nbytes:
        kind = getattr(_runtime().cudaMemcpyKind, f"cudaMemcpy{direction}")
        _call("cudaMemcpyAsync", target, source, nbytes, kind, stream.raw)


class Stream:
    """A stream of our own, or another library's by its handle."""

    def __init__(self, handle: int | None = None) -> None:
        self._is_ours = handle is None
        if handle is None:
            self.raw = _call("cudaStreamCreateWithFlags", _runtime().cudaStreamNonBlocking)
        else:
            self.raw = _runtime().cudaStream_t(handle)
        self.handle = int(self.raw)

    def synchronize(self) -> None:
        """Wait until all queued work is done."""
        _call("cudaStreamSynchronize", self.raw)

    def close(self) -> None:
        """Destroy the stream, if it is ours."""
        if self._is_ours:
            self._is_ours = False
            _call("cudaStreamDestroy", self.raw)


class Event:
    """A CUDA event with timing."""

    def __init__(self) -> None:
        self._raw = _call("cudaEventCreate")

    def record(self, stream: Stream) -> None:
        """Mark the time when the work queued so far is done."""
        _call("cudaEventRecord", self._raw, stream.raw)

    def microseconds_since(self, earlier: Event) -> float:
        """Device time between two events that have passed."""
        return float(_call("cudaEventElapsedTime", earlier._raw, self._raw)) * 1000.0

    def close(self) -> None:
        """Destroy the event."""
        _call("cudaEventDestroy", self._raw)


class Graph:
    """A CUDA graph, ready to be launched; `recorded` are the graphs it was made of, destroyed with it."""

    def __init__(self, executable: Any, recorded: Sequence[Any] = ()) -> None:
        self._executable = executable
        self._recorded = recorded
        # Bound once: a launch is the only call on the fast path.
        self._launch = _runtime().cudaGraphLaunch

    def launch(self, stream: Stream) -> None:
        """Queue the recorded work."""
        (status,) = self._launch(self._executable, stream.raw)
        if int(status) != 0:
            raise CudaError(
                "cudaGraphLaunch failed.",
                got=getattr(status, "name", status),
                hint="nvidia-smi shows the state of the GPU and its memory",
            )

    def close(self) -> None:
        """Destroy the graph."""
        _call("cudaGraphExecDestroy", self._executable)
        for graph in self._recorded:
            _call("cudaGraphDestroy", graph)


def capture(work: Callable[[], None], stream: Stream) -> Graph:
    """Record what `work` queues on a stream, without running it, and make it ready to be launched."""
    mode = _runtime().cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    _call("cudaStreamBeginCapture", stream.raw, mode)
    try:
        work()
    except BaseException:
        # Leave the stream usable; the first error is the one to report.
        _runtime().cudaStreamEndCapture(stream.raw)
        _runtime().cudaGetLastError()  # a library that asks for it next would take it for its own
        raise
    try:
        graphs = [_call("cudaStreamEndCapture", stream.raw)]
    except CudaError:
        _runtime().cudaGetLastError()
        raise
    try:
        if (copied := _copy_graph(graphs[0])) is not None:
            graphs.append(copied)
        return Graph(_call("cudaGraphInstantiate", graphs[-1], 0), graphs)
    except BaseException:
        for graph in graphs:
            _call("cudaGraphDestroy", graph)
        raise


def _copy_graph(recorded: Any) -> Any:
    """The nodes of a recorded graph in a new one; None where a node is of a kind that cannot be copied.

    A graph that TensorRT records carries more than its nodes, and the driver follows each of its launches:
    with about 32 in flight, in some processes with any, the launching thread sleeps until one has ended. What
    is carried may own what the nodes use, so the recorded graph has to live as long as the new one.
    """
    old, new = _driver().CUgraph(int(recorded)), _call("cuGraphCreate", 0)
    nodes = _call("cuGraphGetNodes", old, _call("cuGraphGetNodes", old)[1])[0]
    copies: dict[int, Any] = {}
    try:
        for node in nodes:
            kind = _call("cuGraphNodeGetType", node).name.removeprefix("CU_GRAPH_NODE_TYPE_").title()
            if kind not in ("Kernel", "Memset", "Memcpy"):
                raise CudaError("The node cannot be copied.", got=kind, hint="another runtime, or one stream")
            context = () if kind == "Kernel" else (_call("cuCtxGetCurrent"),)
            parameters = _call(f"cuGraph{kind}NodeGetParams", node)
            copy = _call(f"cuGraphAdd{kind}Node", new, [], 0, parameters, *context)
            if kind == "Kernel":
                _call("cuGraphKernelNodeCopyAttributes", copy, node)
            copies[int(node)] = copy
        *edges, count = _call("cuGraphGetEdges", old, _call("cuGraphGetEdges", old)[-1])
        if count:
            ends = ([copies[int(node)] for node in side] for side in edges[:2])
            _call("cuGraphAddDependencies", new, *ends, *edges[2:], count)
    except CudaError:
        _call("cuGraphDestroy", new)
        return None
    return _runtime().cudaGraph_t(int(new))


# -- The state of the GPU during a measurement: clocks, temperature, power, throttling --------------

# Bits of NVML's clock event reasons that mean "slower than it could be".
_HELD_BACK = {
    "power cap": "nvmlClocksEventReasonSwPowerCap",
    "hardware slowdown": "nvmlClocksThrottleReasonHwSlowdown",
    "thermal (software)": "nvmlClocksEventReasonSwThermalSlowdown",
    "thermal (hardware)": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "power brake": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
}


class Conditions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of the GPU as NVML reports it."""

    sm_mhz: Annotated[
        float | None, means("clock of the multiprocessors, MHz; null if NVML did not report it")
    ] = None
    sm_mhz_max: Annotated[float | None, means("the highest clock of the GPU, MHz; null as above")] = None
    memory_mhz: Annotated[float | None, means("clock of the memory, MHz; null as above")] = None
    temperature_c: Annotated[float | None, means("temperature of the GPU, °C; null as above")] = None
    power_w: Annotated[float | None, means("power drawn, W; null as above")] = None
    throttled_by: Annotated[tuple[str, ...], means("why the clocks were below the maximum")] = ()


def read_conditions(gpu: Gpu) -> Conditions:
    """The state of the GPU from NVML; without NVML all is unknown, since timing works without."""
    pynvml = _nvml()
    try:
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(gpu.pci_bus.encode())
    except Exception:  # noqa: BLE001 (no NVML, or not this GPU: each raises its own)
        return Conditions()

    def query(name: str, *arguments: Any) -> Any:
        try:
            return getattr(pynvml, name)(handle, *arguments)
        except (AttributeError, pynvml.NVMLError):  # older versions of the package lack some functions
            return None

    power = query("nvmlDeviceGetPowerUsage")
    names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
    reasons = next(filter(None, map(query, names)), 0)  # by the older name, too
    return Conditions(
        sm_mhz=query("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
        sm_mhz_max=query("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM),
        memory_mhz=query("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM),
        temperature_c=query("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
        power_w=None if power is None else power / 1000.0,
        throttled_by=tuple(why for why, bit in _HELD_BACK.items() if reasons & getattr(pynvml, bit, 0)),
    )


@cache
def _nvml() -> Any:
    """NVML, ready to be called; None without it."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 (no package, no library, no driver: each raises its own)
        return None
    return pynvml
