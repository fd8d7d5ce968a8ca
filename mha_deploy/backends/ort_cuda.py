"""ONNX Runtime with its CUDA provider, as a user would run it: the graph as it is, no TF32.

There are two sessions. One without CUDA graphs serves `run`, at any shape and for every graph; one is opened
for each timing, since ONNX Runtime keeps what it captured for as long as the session lives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_deploy.backends.cache_rows import check_room, total_length, written_in_place
from mha_deploy.backends.cuda import UNWRITTEN, Buffer, Stream, free_memory
from mha_deploy.backends.gpu import GpuRunner, Prepared
from mha_deploy.backends.ort_bound import NO_CAPTURE, BoundRun, cannot_run, captured_if_possible
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
    run_bound,
    session_options,
)
from mha_deploy.backends.runner import Arrays
from mha_deploy.backends.stepper import Launcher
from mha_deploy.errors import DeployError
from mha_deploy.graph.file import graph_of
from mha_deploy.graph.lower import lower
from mha_deploy.graph.lower.cache_form import TOTAL_LENGTH
from mha_deploy.spec_parts import CACHES, LENGTHS

# Changes the layout of nodes on the CPU, has nothing to do on a GPU, and crashes on x86-64 (1.31.1).
CPU_LAYOUT = "NchwcTransformer"

WARM_UP = 2
"""How often a call runs before it is timed, the first time to be captured."""


class OrtCudaRunner(GpuRunner):
    """A graph in ONNX Runtime with the CUDA provider.

    Args:
        model: The graph, with ONNX `Attention` nodes.
        dialect: `onnx` to run it as it is, `contrib` for ONNX Runtime's own attention operators.
        cuda_graph: Whether a timed call is the launch of a CUDA graph, where ONNX Runtime captures it.

    Attributes:
        ort: The package.
        session: The graph, loaded to run without CUDA graphs.
        all_inputs: The inputs of the graph, with the one that callers do not see.
        aliases: For each output that is written in place, the input whose memory it shares.
    """

    def __init__(self, model: Path | ir.Model, *, dialect: str = "onnx", cuda_graph: bool = True) -> None:
        ort = import_onnxruntime(extra="ort-gpu")
        refuse_without_cuda(ort)
        super().__init__()
        self.ort = ort
        self._model = lower(graph_of(model), dialect)
        self._serialized = ir.to_proto(self._model).SerializeToString()
        self.graph = cuda_graph
        self.name = f"ort-cuda{'' if dialect == 'onnx' else f'-{dialect}'} {ort.__version__}"
        self.stream = Stream()
        try:
            self.session = self.open_session(capture=False)
            self.cpu_nodes = nodes_on_cpu(self.session)
            refuse_work_on_cpu(self.cpu_nodes, self._model)
            self.all_inputs, self.outputs = inputs_and_outputs(self.session)
            # Ours to give: it follows from the others.
            self.inputs = {name: info for name, info in self.all_inputs.items() if name != TOTAL_LENGTH}
            self.aliases = written_in_place(self.inputs, self.outputs)
        except BaseException:
            self.close()
            raise

    def open_session(self, *, capture: bool) -> Any:
        """Load the graph once more, to run on the runner's stream.

        Args:
            capture: Whether calls are captured as CUDA graphs.
        """
        # As users run it: every fusion that its CUDA kernels have.
        options = session_options(self.ort, self._model, level="ALL")
        record_placement(options)
        settings = {
            "device_id": "0",
            "user_compute_stream": str(self.stream.handle),
            "use_tf32": "0",
            "enable_cuda_graph": str(int(capture)),
        }
        try:
            # Without enable_fallback=0 the package retries on the CPU when the provider raises.
            session = self.ort.InferenceSession(
                self._serialized,
                options,
                providers=[(CUDA, settings)],
                enable_fallback=0,
                disabled_optimizers=[CPU_LAYOUT],
            )
        except Exception as error:  # ONNX Runtime raises types of its own that share no base
            raise cannot_run(error, capture=capture) from error
        refuse_dropped_provider(self.ort, session)
        return session

    def _run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        check_room(feeds)
        try:
            if self.aliases:
                return self._run_in_place(feeds)
            return run_bound(self.ort, self.session, feeds, self.outputs)
        except DeployError:
            raise
        except Exception as error:
            raise DeployError("ONNX Runtime failed on these inputs.", got=first_line(error)) from error

    def _run_in_place(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """Run with the caches in one place: what stands behind the new rows is then left as it was."""
        slot = _Slot(BoundRun(self.ort, self.session), self.stream, self.aliases)
        likes = {name: feeds[self.aliases.get(name, "x")] for name in self.outputs}
        try:
            slot.bind(self._fed(feeds), likes)
            slot.launch()
            self.stream.synchronize()
            return slot.results()
        finally:
            self.stream.synchronize()
            slot.free()

    def _fed(self, feeds: Arrays) -> Arrays:
        """The inputs, and what follows from them."""
        if TOTAL_LENGTH not in self.all_inputs:
            return feeds
        S, T = feeds["x"].shape[1], feeds[CACHES[0]].shape[2]
        return {**feeds, TOTAL_LENGTH: total_length(feeds[LENGTHS], S, T)}

    def _call_bytes(self, feeds: Arrays, results: Arrays) -> int:
        apart = {name: array for name, array in results.items() if name not in self.aliases}
        return super()._call_bytes(feeds, apart)

    def _launcher(self) -> Launcher:
        from mha_deploy.backends.ort_stepper import OrtLauncher

        return OrtLauncher(self)

    @contextmanager
    def _prepare(self, feeds: Arrays, slots: int) -> Iterator[Prepared]:
        """Slots whose calls are captured; where that cannot be, they are launched, and it is told why."""
        results = self._run(feeds)  # for the shapes of the outputs, which captured calls must know
        before = free_memory()
        with ExitStack() as owned:
            bound, why = captured_if_possible(
                lambda capture: owned.enter_context(self._slots(feeds, results, slots, capture=capture)),
                graph=self.graph,
            )
            yield Prepared(
                launch=lambda slot: bound[slot].launch(),
                results=lambda slot: bound[slot].results(),
                memory_bytes=before - free_memory(),
                why_no_graph=why,
            )

    @contextmanager
    def _slots(self, feeds: Arrays, likes: Arrays, count: int, *, capture: bool) -> Iterator[list[_Slot]]:
        """Slots in a session of their own, warmed up."""
        session = self.open_session(capture=capture)
        bound: list[_Slot] = []
        try:
            for number in range(count):
                run = BoundRun(self.ort, session, graph_id=number + 1 if capture else NO_CAPTURE)
                bound.append(_Slot(run, self.stream, self.aliases))
                bound[-1].bind(self._fed(feeds), likes)
            self._warm_up(bound, capture=capture)
            yield bound
        finally:
            self.stream.synchronize()
            for slot in bound:
                slot.free()
            bound.clear()

    def _warm_up(self, bound: list[_Slot], *, capture: bool) -> None:
        """Run every slot; ONNX Runtime repeats the first run by itself until it has captured it."""
        try:
            for slot in bound:
                for _ in range(WARM_UP):
                    slot.launch()
            self.stream.synchronize()
            for slot in bound:  # what is read later must come from a launch that was timed
                slot.clear_outputs()
        except Exception as error:
            raise cannot_run(error, capture=capture) from error

    def close(self) -> None:
        """Drop the session, and the weights with it; then the stream that it ran on."""
        self.__dict__.pop("session", None)
        self.stream.close()


class _Slot:
    """One copy of the inputs and outputs on the device, and the call that is bound to them.

    Args:
        run: The call.
        stream: Where it goes.
        aliases: For each output that is written in place, the input whose memory it shares.
    """

    def __init__(self, run: BoundRun, stream: Stream, aliases: Mapping[str, str]) -> None:
        self._run, self._stream, self._aliases = run, stream, aliases
        self._inputs: dict[str, Buffer] = {}
        self._outputs: dict[str, tuple[Buffer, np.ndarray]] = {}

    def bind(self, feeds: Arrays, likes: Arrays) -> None:
        """Copy the inputs to the device, and bind outputs that look like `likes`."""
        held = {name: np.ascontiguousarray(feeds[name]) for name in feeds if name != TOTAL_LENGTH}
        for name, array in held.items():
            buffer = self._inputs[name] = Buffer(array.nbytes)
            buffer.upload(array, self._stream)
            self._run.bind_input(name, buffer, array.shape, array.dtype)
        if TOTAL_LENGTH in feeds:
            self._run.bind_host_input(TOTAL_LENGTH, feeds[TOTAL_LENGTH])
        for name, like in likes.items():
            shared = self._aliases.get(name)
            buffer = Buffer(like.nbytes) if shared is None else self._inputs[shared]
            self._outputs[name] = (buffer, like)
            self._run.bind_output(name, buffer, like.shape, like.dtype)
        self.clear_outputs()
        self._stream.synchronize()  # the uploads read from arrays of the host

    def clear_outputs(self) -> None:
        """Overwrite the outputs with what no result can be."""
        for buffer in self._own_outputs():
            buffer.fill(UNWRITTEN, self._stream)

    def _own_outputs(self) -> list[Buffer]:
        return [buffer for name, (buffer, _) in self._outputs.items() if name not in self._aliases]

    def launch(self) -> None:
        """Queue one call."""
        self._run.launch()

    def results(self) -> dict[str, np.ndarray]:
        """What the last call wrote."""
        return {
            name: buffer.download(like.shape, like.dtype, self._stream)
            for name, (buffer, like) in self._outputs.items()
        }

    def free(self) -> None:
        """Give the memory back, after what is bound to it."""
        del self._run
        for buffer in (*self._own_outputs(), *self._inputs.values()):
            buffer.free()
