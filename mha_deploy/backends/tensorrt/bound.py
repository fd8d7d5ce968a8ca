"""One call with its shapes fixed: an execution context of its own, buffers, and a CUDA graph.

A recorded graph holds what the context was when it was recorded, so a context keeps its profile and its
shapes for as long as there are graphs. Only the addresses may change: `Slot`s with buffers of their own
share a context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from mha_deploy.backends.cache_rows import CacheCopy
from mha_deploy.backends.cuda import UNWRITTEN, Buffer, CudaError, Graph, Stream, capture
from mha_deploy.backends.runner import Arrays, TensorInfo
from mha_deploy.backends.tensorrt.errors import EngineError
from mha_deploy.backends.tensorrt.loaded import reasons
from mha_deploy.backends.tensorrt.log import collect
from mha_deploy.backends.tensorrt.request import Shape
from mha_deploy.backends.tensorrt.versions import TensorRT
from mha_deploy.backends.tensorrt.volumes import LargeTensor, refuse_large


class BoundContext:
    """An execution context whose profile and input shapes are set.

    Args:
        rt: The TensorRT that built the engine.
        engine: The engine.
        stream: Where its calls go.
        profile: The optimisation profile, for life.
        shapes: The shape of every input.
        inputs: What goes in.
        outputs: What comes out.
        aliases: For each output that is written in place, the input whose memory it shares.
        large_tensors: What TensorRT cannot hold at the largest sizes.
    """

    def __init__(
        self,
        rt: TensorRT,
        engine: Any,
        stream: Stream,
        *,
        profile: int,
        shapes: Mapping[str, Shape],
        inputs: Mapping[str, TensorInfo],
        outputs: Mapping[str, TensorInfo],
        aliases: Mapping[str, str] | None = None,
        large_tensors: Sequence[LargeTensor] = (),
    ) -> None:
        self.stream = stream
        self.inputs, self.outputs, self.aliases = inputs, outputs, dict(aliases or {})
        self._rt, self._large_tensors = rt, large_tensors
        with self._listening(f"cannot prepare profile {profile}"):
            self._context = _create_context(rt, engine)
            _check(self._context is not None, "no execution context")
            chosen = self._context.set_optimization_profile_async(profile, stream.handle)
            _check(chosen, f"profile {profile}")
            # The switch may copy data on the stream; nothing may be recorded before that is done.
            stream.synchronize()
        try:
            self.reshape(shapes)
        except EngineError:
            # It holds the profile, which a context of other shapes may need next. Nor must the error hold it,
            # so no function on the way keeps it in a variable of its own.
            self.close()
            raise

    def reshape(self, shapes: Mapping[str, Shape]) -> None:
        """Set the shape of every input. What was recorded before must not be launched again.

        Raises:
            EngineError: TensorRT refuses.
        """
        refuse_large(self._large_tensors, shapes)
        with self._listening("cannot take these shapes"):
            for name, shape in shapes.items():
                _check(self._context.set_input_shape(name, shape), f"{name} {shape}")
            self.shapes = {**shapes, **self._output_shapes()}

    def _output_shapes(self) -> dict[str, Shape]:
        missing = self._context.infer_shapes()
        _check(not missing, f"inputs without a shape: {', '.join(missing)}")
        shapes = {name: tuple(map(int, self._context.get_tensor_shape(name))) for name in self.outputs}
        for name, shape in shapes.items():
            _check(min(shape, default=0) >= 0, f"the size of {name} depends on the data: {shape}")
        return shapes

    def enqueue(self, addresses: Mapping[str, int]) -> None:
        """Queue one call on the stream.

        Raises:
            EngineError: TensorRT refuses.
        """
        context = self._context
        with self._listening("cannot run this engine"):
            for name, address in addresses.items():
                _check(context.set_tensor_address(name, address), f"the address of {name}")
            _check(context.execute_async_v3(self.stream.handle), "the call")

    def record(self, addresses: Mapping[str, int], then: Callable[[], None] | None = None) -> Graph:
        """Record one call, and what `then` queues behind it.

        Raises:
            EngineError: It does something that a CUDA graph cannot hold.
        """

        def work() -> None:
            self.enqueue(addresses)
            if then is not None:
                then()

        try:
            with self._listening("cannot be recorded into a CUDA graph"):
                return capture(work, self.stream)
        except EngineError as error:
            raise EngineError(
                f"{self._rt.title} cannot record this call into a CUDA graph.",
                got=error.got,
                hint="cuda_graph=False runs it without one",
            ) from error

    @contextmanager
    def _listening(self, failure: str) -> Iterator[None]:
        """Turn whatever fails inside into one error with what TensorRT said meanwhile."""
        with collect(self._rt) as messages:
            try:
                yield
            except EngineError:
                raise
            except (_Refused, RuntimeError, CudaError) as cause:
                raise EngineError(
                    f"{self._rt.title} {failure}.", got=f"{_one_line(cause)}: {reasons(messages)}"
                ) from cause

    def close(self) -> None:
        """Destroy the context: TensorRT does so when nobody refers to it."""
        self._context = None


class _Refused(Exception):
    """TensorRT returned a failure without an exception."""


def _check(done: bool, what: str) -> None:
    if not done:
        raise _Refused(what)


def _one_line(cause: Exception) -> str:
    return " ".join(str(cause).split())


def _create_context(rt: TensorRT, engine: Any) -> Any:
    trt = rt.module
    if not rt.can.kernel_specialization:
        return engine.create_execution_context()
    runtime_config = engine.create_runtime_config()
    # Kernels for the shapes at hand are compiled before the first call, not behind its back.
    eager = trt.DynamicShapesKernelSpecializationStrategy.EAGER
    runtime_config.dynamic_shapes_kernel_specialization_strategy = eager
    return engine.create_execution_context(runtime_config)


class Slot:
    """The buffers of one call, and the graph that computes on them.

    An output that is written in place is the buffer of its input. It is never cleared, and a launch changes
    that input; launched again, it writes the same again.

    Args:
        bound: The context that computes.

    Attributes:
        nbytes: Device memory of the buffers.
    """

    def __init__(self, bound: BoundContext) -> None:
        self._bound = bound
        self._graph: Graph | None = None
        self._copies: tuple[CacheCopy, ...] = ()
        with ExitStack() as owned:
            self._buffers = {
                name: self._allocate(owned, name, info)
                for name, info in {**bound.inputs, **bound.outputs}.items()
                if name not in bound.aliases
            }
            self.nbytes = sum(buffer.nbytes for buffer in self._buffers.values())
            self._buffers |= {name: self._buffers[shared] for name, shared in bound.aliases.items()}
            self._owned = owned.pop_all()
        self._addresses = {name: buffer.address for name, buffer in self._buffers.items()}

    def _allocate(self, owned: ExitStack, name: str, info: TensorInfo) -> Buffer:
        buffer = Buffer(math.prod(self._bound.shapes[name]) * info.dtype.itemsize)
        owned.callback(buffer.free)
        return buffer

    def upload(self, feeds: Arrays) -> None:
        """Copy the inputs to the device, and wait for it."""
        stream = self._bound.stream
        arrays = {name: np.ascontiguousarray(feeds[name]) for name in self._bound.inputs}
        for name, array in arrays.items():
            self._buffers[name].upload(array, stream)
        stream.synchronize()

    def copy_inputs(self, other: Slot) -> None:
        """Take the inputs of another slot."""
        for name in self._bound.inputs:
            self._buffers[name].copy_from(other._buffers[name], self._bound.stream)

    def settle(self, *, record: bool, copies: Sequence[CacheCopy] = ()) -> None:
        """Run once on the inputs that are here, so that TensorRT does what it does only once; then record.

        Args:
            record: Whether later launches are those of a CUDA graph.
            copies: What belongs to a launch behind the engine's own work: new rows on their way to a cache.
        """
        self.clear_outputs()
        self._copies = tuple(copies)
        self._bound.enqueue(self._addresses)
        self._bound.stream.synchronize()
        if record:
            self._graph = self._bound.record(self._addresses, self._copy_rows)
            self._owned.callback(self._graph.close)
        self.clear_outputs()

    def _copy_rows(self) -> None:
        for copy in self._copies:
            rows = self._buffers[copy.rows]
            self._buffers[copy.cache].copy_rows(rows, copy.place, self._bound.stream)

    def clear_outputs(self) -> None:
        """Overwrite the outputs with what no result can be."""
        for name in self._bound.outputs:
            if name not in self._bound.aliases:
                self._buffers[name].fill(UNWRITTEN, self._bound.stream)

    def launch(self) -> None:
        """Queue one call, and do not wait."""
        if self._graph is None:
            self._bound.enqueue(self._addresses)
            self._copy_rows()
        else:
            self._graph.launch(self._bound.stream)

    def download(self) -> dict[str, np.ndarray]:
        """Wait, and copy the outputs to the host."""
        return self._downloaded(self._bound.outputs)

    def download_caches(self) -> dict[str, np.ndarray]:
        """Wait, and copy the caches that launches copy rows into to the host."""
        written = {copy.cache: self._bound.inputs[copy.cache] for copy in self._copies}
        return self._downloaded(written)

    def _downloaded(self, tensors: Mapping[str, TensorInfo]) -> dict[str, np.ndarray]:
        bound = self._bound
        bound.stream.synchronize()
        return {
            name: self._buffers[name].download(bound.shapes[name], info.dtype, bound.stream)
            for name, info in tensors.items()
        }

    def close(self) -> None:
        """Destroy the graph and free the buffers."""
        self._owned.close()


class BoundCall:
    """A context and one slot, for calls that come one by one."""

    def __init__(self, bound: BoundContext, feeds: Arrays, *, record: bool) -> None:
        with ExitStack() as owned:
            owned.callback(bound.close)
            self.bound = bound
            self._slot = Slot(bound)
            self.nbytes = self._slot.nbytes
            owned.callback(self._slot.close)
            self._slot.upload(feeds)
            self._slot.settle(record=record)
            self._owned = owned.pop_all()

    def run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """Upload, launch, download."""
        self._slot.upload(feeds)
        self._slot.clear_outputs()
        self._slot.launch()
        return self._slot.download()

    def close(self) -> None:
        """Free everything."""
        self._owned.close()
