"""ONNX Runtime with its CUDA provider, as a user would run it: the graph as it is, no TF32.

There are two sessions. One without CUDA graphs serves `run`, at any shape and for every graph; one is opened
for each timing, since ONNX Runtime keeps what it captured for as long as the session lives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_deploy.backends.cuda import Buffer, Stream, free_memory
from mha_deploy.backends.gpu import GpuRunner, Prepared
from mha_deploy.backends.ort_placement import (
    CUDA,
    nodes_on_cpu,
    record_placement,
    refuse_dropped_provider,
    refuse_without_cuda,
    refuse_work_on_cpu,
)
from mha_deploy.backends.ort_session import (
    first_line,
    import_onnxruntime,
    inputs_and_outputs,
    onnx_type,
    run_bound,
    session_options,
)
from mha_deploy.backends.runner import Arrays
from mha_deploy.errors import DeployError
from mha_deploy.graph.file import graph_of
from mha_deploy.graph.lower import lower

_NO_CAPTURE = -1  # an id that ONNX Runtime never captures; 0 is its own
_NEVER_WRITTEN = 0xFF  # as every byte of an output: NaN, or -1
_WARM_UP = 2


class OrtCudaRunner(GpuRunner):
    """A graph in ONNX Runtime with the CUDA provider.

    Args:
        model: The graph, with ONNX `Attention` nodes.
        dialect: `onnx` to run it as it is, `contrib` for ONNX Runtime's own attention operators.
        cuda_graph: Whether a timed call is the launch of a CUDA graph.
    """

    def __init__(self, model: Path | ir.Model, *, dialect: str = "onnx", cuda_graph: bool = True) -> None:
        ort = import_onnxruntime(extra="ort-gpu")
        refuse_without_cuda(ort)
        super().__init__()
        self._ort = ort
        self._model = lower(graph_of(model), dialect)
        self._serialized = ir.to_proto(self._model).SerializeToString()
        self.graph = cuda_graph
        self.name = f"ort-cuda{'' if dialect == 'onnx' else f'-{dialect}'} {ort.__version__}"
        self.stream = Stream()
        try:
            self._session = self._open_session(capture=False)
            self.cpu_nodes = nodes_on_cpu(self._session)
            refuse_work_on_cpu(self.cpu_nodes, self._model)
            self.inputs, self.outputs = inputs_and_outputs(self._session)
        except BaseException:
            self.close()
            raise

    def _open_session(self, *, capture: bool) -> Any:
        options = session_options(self._ort, self._model)
        record_placement(options)
        settings = {
            "device_id": "0",
            "user_compute_stream": str(self.stream.handle),
            "use_tf32": "0",
            "enable_cuda_graph": str(int(capture)),
        }
        try:
            # Without enable_fallback=0 the package retries on the CPU when the provider raises.
            session = self._ort.InferenceSession(
                self._serialized, options, providers=[(CUDA, settings)], enable_fallback=0
            )
        except Exception as error:  # ONNX Runtime raises types of its own that share no base
            raise _cannot_open(error, capture) from error
        refuse_dropped_provider(self._ort, session)
        return session

    def _run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        try:
            return run_bound(self._ort, self._session, feeds, self.outputs)
        except Exception as error:
            raise DeployError("ONNX Runtime failed on these inputs.", got=first_line(error)) from error

    @contextmanager
    def _prepare(self, feeds: Arrays, slots: int) -> Iterator[Prepared]:
        results = self._run(feeds)  # for the shapes of the outputs, which captured calls must know
        before = free_memory()
        session = self._open_session(capture=self.graph)
        bound: list[_Slot] = []
        try:
            for number in range(slots):
                bound.append(_Slot(self._ort, session, self.stream))
                bound[-1].bind(feeds, results, graph_id=number + 1 if self.graph else _NO_CAPTURE)
            self._warm_up(bound)
            yield Prepared(
                launch=lambda slot: bound[slot].launch(),
                results=lambda slot: bound[slot].results(),
                memory_bytes=before - free_memory(),
            )
        finally:
            self.stream.synchronize()
            for slot in bound:
                slot.free()
            bound.clear()

    def _warm_up(self, bound: list[_Slot]) -> None:
        """Run every slot; ONNX Runtime repeats the first run by itself until it has captured it."""
        try:
            for slot in bound:
                for _ in range(_WARM_UP):
                    slot.launch()
            self.stream.synchronize()
            for slot in bound:  # what is read later must come from a launch that was timed
                slot.clear_outputs()
        except Exception as error:
            raise _cannot_open(error, capture=self.graph) from error

    def close(self) -> None:
        """Drop the session, and the weights with it; then the stream that it ran on."""
        self.__dict__.pop("_session", None)
        self.stream.close()


class _Slot:
    """One copy of the inputs and outputs on the device, and the call that is bound to them."""

    def __init__(self, ort: Any, session: Any, stream: Stream) -> None:
        self._session, self._stream = session, stream
        self._binding = session.io_binding()
        self._options = ort.RunOptions()
        self._buffers: list[Buffer] = []
        self._outputs: dict[str, tuple[Buffer, np.ndarray]] = {}

    def bind(self, feeds: Arrays, results: Arrays, *, graph_id: int) -> None:
        """Copy the inputs to the device, and bind outputs of the shapes of `results`."""
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._options.add_run_config_entry("gpu_graph_id", str(graph_id))
        for name, array in feeds.items():
            contiguous = np.ascontiguousarray(array)
            buffer = self._allocate(contiguous)
            buffer.upload(contiguous, self._stream)
            self._binding.bind_input(name, *_place_of(buffer, contiguous))
        for name, array in results.items():
            buffer = self._allocate(array)
            buffer.fill(_NEVER_WRITTEN, self._stream)
            self._binding.bind_output(name, *_place_of(buffer, array))
            self._outputs[name] = (buffer, array)
        self._stream.synchronize()  # the uploads read from arrays of the host

    def _allocate(self, array: np.ndarray) -> Buffer:
        self._buffers.append(Buffer(array.nbytes))
        return self._buffers[-1]

    def clear_outputs(self) -> None:
        """Overwrite the outputs with what no result can be."""
        for buffer, _ in self._outputs.values():
            buffer.fill(_NEVER_WRITTEN, self._stream)

    def launch(self) -> None:
        """Queue one call."""
        self._session.run_with_iobinding(self._binding, self._options)

    def results(self) -> dict[str, np.ndarray]:
        """What the last call wrote."""
        return {
            name: buffer.download(like.shape, like.dtype, self._stream)
            for name, (buffer, like) in self._outputs.items()
        }

    def free(self) -> None:
        """Give the memory back, after what is bound to it."""
        del self._binding, self._session
        for buffer in self._buffers:
            buffer.free()


def _place_of(buffer: Buffer, array: np.ndarray) -> tuple[str, int, int, list[int], int]:
    """Device, its number, type, shape and address, in the order in which bindings take them."""
    return "cuda", 0, onnx_type(array.dtype), list(array.shape), buffer.address


def _cannot_open(error: Exception, capture: bool) -> DeployError:
    if isinstance(error, DeployError):
        return error
    if capture:
        return DeployError(
            "ONNX Runtime cannot run this graph as a CUDA graph.",
            got=first_line(error),
            hint="cuda_graph=False, to time calls that are launched one kernel at a time",
        )
    return DeployError("ONNX Runtime's CUDA provider cannot run the graph.", got=first_line(error))
