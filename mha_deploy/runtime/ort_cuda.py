"""ONNX Runtime with its CUDA provider, as a user would run it: the graph as it is, no TF32."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import onnx_ir as ir

from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.graph.file import graph_of
from mha_deploy.graph.lower import lower
from mha_deploy.graph.lower.cache import TOTAL_LENGTH
from mha_deploy.model.spec import CACHES, LENGTHS
from mha_deploy.runtime.cuda import UNWRITTEN, Buffer, Stream, free_memory
from mha_deploy.runtime.decode import Launcher, Repeated, StepCall, check_room, total_length, written_in_place
from mha_deploy.runtime.gpu import GpuRunner, Prepared
from mha_deploy.runtime.ort import (
    first_line,
    import_onnxruntime,
    inputs_and_outputs,
    onnx_type,
    run_bound,
    session_options,
)
from mha_deploy.runtime.runner import Arrays

# -- One call of ONNX Runtime whose inputs and outputs are bound to memory of the device -----------

NO_CAPTURE = -1  # an id that ONNX Runtime never captures; 0 is its own

# ONNX Runtime's errors where it does not capture: a session with copies between the devices or with control
# flow (two wordings), an operator or option that does not support it, a capture that never ends; and CUDA's
# own error for a kernel that waits or allocates meanwhile.
_REFUSALS = (
    "cannot use the graph capture feature",
    "cannot use the cuda graph feature",
    "not supported when graph capture is enabled",
    "graph capture did not complete",
    "not permitted when stream is capturing",
    "failed due to a previous error during capture",
)

Made = TypeVar("Made")


class NotCapturable(DeployError):
    """A graph that ONNX Runtime may run, but not as a CUDA graph."""


class BoundRun:
    """A call that is bound to memory; `graph_id` is its number in a session that captures."""

    def __init__(self, ort: Any, session: Any, *, graph_id: int = NO_CAPTURE) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._options.add_run_config_entry("gpu_graph_id", str(graph_id))
        self._on_host: list[np.ndarray] = []

    def bind_input(self, name: str, buffer: Buffer, shape: tuple[int, ...], dtype: np.dtype) -> None:
        """Read an input from the device."""
        self._binding.bind_input(name, *_place_of(buffer, shape, dtype))

    def bind_host_input(self, name: str, array: np.ndarray) -> None:
        """Read an input from the host."""
        self._on_host.append(array)  # the binding does not own it
        self._binding.bind_cpu_input(name, array)

    def bind_output(self, name: str, buffer: Buffer, shape: tuple[int, ...], dtype: np.dtype) -> None:
        """Write an output to the device; it may be where an input is."""
        self._binding.bind_output(name, *_place_of(buffer, shape, dtype))

    def launch(self) -> None:
        """Queue one call."""
        self._session.run_with_iobinding(self._binding, self._options)


def _place_of(
    buffer: Buffer, shape: tuple[int, ...], dtype: np.dtype
) -> tuple[str, int, int, list[int], int]:
    """Device, its number, type, shape and address, in the order in which bindings take them."""
    return "cuda", 0, onnx_type(dtype), list(shape), buffer.address


def cannot_run(error: Exception, *, capture: bool) -> DeployError:
    """An exception of ONNX Runtime as an error of this tool; its own types share no base.

    Args:
        error: The exception.
        capture: Whether a CUDA graph was to be captured.
    """
    if isinstance(error, DeployError):
        return error
    if capture and any(refusal in str(error).lower() for refusal in _REFUSALS):
        return NotCapturable("ONNX Runtime cannot run this graph as a CUDA graph.", got=first_line(error))
    return DeployError("ONNX Runtime's CUDA provider cannot run the graph.", got=first_line(error))


def captured_if_possible(make: Callable[[bool], Made], *, graph: bool) -> tuple[Made, str | None]:
    """Make calls that are CUDA graphs, or plain ones, and why, where ONNX Runtime does not capture them."""
    why = None
    if graph:
        try:
            return make(True), None
        except NotCapturable as error:
            why = str(error.got)
    # Not inside `except`: the traceback would keep the session that failed, and its memory, alive.
    return make(False), why


# -- Which nodes ONNX Runtime runs on the CPU, and whether it may ----------------------------------

CUDA = "CUDAExecutionProvider"
_CPU = "CPUExecutionProvider"
RECORD_PLACEMENT = "session.record_ep_graph_assignment_info"
_UNAVAILABLE = "ORT_CUDA_UNAVAILABLE"
_LIBRARIES = ("libonnxruntime_providers_shared.so", "libonnxruntime_providers_cuda.so")
_SHAPE_OPERATORS = frozenset(
    {
        *("Constant", "ConstantOfShape", "Identity", "Range", "Shape", "Size"),
        *("Cast", "Concat", "Expand", "Gather", "Reshape", "Slice", "Split", "Squeeze", "Unsqueeze"),
        *("Add", "Div", "Equal", "Max", "Min", "Mul", "ReduceProd", "Sub", "Where"),
    }
)


class PlacedNode(NamedTuple):
    """A node by its operator and its name in the graph that runs."""

    op_type: str
    name: str


def refuse_without_cuda(ort: Any) -> None:
    """Refuse an ONNX Runtime without a CUDA provider.

    Raises:
        BackendUnavailable: The CPU package is installed, or has overwritten the GPU package.
    """
    preload = getattr(ort, "preload_dlls", None)  # finds the CUDA and cuDNN that pip installed
    if preload is not None:
        with contextlib.redirect_stdout(io.StringIO()):  # the loader reports the same failures
            preload()
    providers = ort.get_available_providers()
    if CUDA in providers:
        return
    if (_libraries_of(ort) / _LIBRARIES[-1]).exists():
        raise _dropped(ort)
    raise BackendUnavailable(
        f"ONNX Runtime {ort.__version__} has no CUDA provider: it is the package for CPUs.",
        got=", ".join(providers),
        hint='pip uninstall onnxruntime, then pip install "mha-deploy[ort-gpu]"',
    )


def refuse_dropped_provider(ort: Any, session: Any) -> None:
    """Refuse a session that ONNX Runtime made without the requested provider.

    Raises:
        BackendUnavailable: The provider's libraries do not load; the reason is the loader's own.
    """
    if CUDA not in session.get_providers():
        raise _dropped(ort)


def _dropped(ort: Any) -> BackendUnavailable:
    return BackendUnavailable(
        "ONNX Runtime dropped its CUDA provider, and would run on the CPU.",
        got=why_libraries_do_not_load(_libraries_of(ort)),
        hint=f"install the CUDA and cuDNN that ONNX Runtime {ort.__version__} was built for",
    )


def _libraries_of(ort: Any) -> Path:
    return Path(ort.__file__).parent / "capi"


def why_libraries_do_not_load(folder: Path) -> str:
    """Why the provider's libraries do not load, which ONNX Runtime does not report."""
    if os.environ.get(_UNAVAILABLE):  # set by the package itself; loading past it can crash
        return f"{_UNAVAILABLE} is set: its CUDA libraries were not found"
    for library in _LIBRARIES:
        try:
            ctypes.CDLL(str(folder / library))
        except OSError as error:
            return str(error)
    return "its libraries load; the GPU or the driver may be too old for it"


def nodes_on_cpu(session: Any) -> tuple[PlacedNode, ...]:
    """The nodes that a session runs on the CPU.

    Raises:
        BackendUnavailable: This version of ONNX Runtime does not report it.
    """
    assignment = getattr(session, "get_provider_graph_assignment_info", None)
    if assignment is None:
        raise BackendUnavailable(
            "This ONNX Runtime does not report which nodes run on the CPU.", hint="onnxruntime-gpu>=1.24"
        )
    parts = [part for part in assignment() if part.ep_name == _CPU]
    return tuple(PlacedNode(node.op_type, node.name) for part in parts for node in part.get_nodes())


def refuse_work_on_cpu(nodes: tuple[PlacedNode, ...], graph: ir.Model) -> None:
    """Refuse nodes on the CPU that do more than compute shapes.

    Raises:
        DeployError: Names those nodes.
    """
    by_name = {node.name: node for node in graph.graph}
    work = [placed for placed in nodes if not _computes_shapes(placed, by_name.get(placed.name))]
    if work:
        raise DeployError(
            "ONNX Runtime would run nodes on the CPU: its CUDA provider has no kernels for them.",
            got=", ".join(f"{placed.op_type} {placed.name}".strip() for placed in work),
            hint="another precision, another dialect, or --backend ort-cpu",
        )


def _computes_shapes(placed: PlacedNode, node: ir.Node | None) -> bool:
    if placed.op_type not in _SHAPE_OPERATORS:
        return False
    # A node that ONNX Runtime made itself is not in our graph: its operator decides.
    outputs = [] if node is None else node.outputs
    return not any(output.dtype is not None and output.dtype.is_floating_point() for output in outputs)


# -- The runner ------------------------------------------------------------------------------------

# Changes the layout of nodes on the CPU, does nothing on a GPU, and crashes on x86-64 (1.31.1).
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
        all_inputs: The inputs of the graph, with the one that is computed here.
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
            # Computed here from the others.
            self.inputs = {name: info for name, info in self.all_inputs.items() if name != TOTAL_LENGTH}
            self.aliases = written_in_place(self.inputs, self.outputs)
        except BaseException:
            self.close()
            raise

    def open_session(self, *, capture: bool) -> Any:
        """Load the graph once more, to run on the runner's stream; `capture` makes calls CUDA graphs."""
        # As users run it: every fusion that its CUDA kernels have.
        options = session_options(self.ort, self._model, level="ALL")
        options.add_session_config_entry(RECORD_PLACEMENT, "1")
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
        """Run with each cache output in the memory of its input: later entries stay as they were."""
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
        """The inputs, with the one that is computed from them."""
        if TOTAL_LENGTH not in self.all_inputs:
            return feeds
        S, T = feeds["x"].shape[1], feeds[CACHES[0]].shape[2]
        return {**feeds, TOTAL_LENGTH: total_length(feeds[LENGTHS], S, T)}

    def _call_bytes(self, feeds: Arrays, results: Arrays) -> int:
        apart = {name: array for name, array in results.items() if name not in self.aliases}
        return super()._call_bytes(feeds, apart)

    def _launcher(self) -> Launcher:
        return OrtLauncher(self)

    @contextmanager
    def _prepare(self, feeds: Arrays, slots: int) -> Iterator[Prepared]:
        """Slots whose calls are captured; else they are launched one by one, and the reason is reported."""
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
            try:
                # ONNX Runtime repeats the first run by itself until it has captured it.
                for slot in bound:
                    for _ in range(WARM_UP):
                        slot.launch()
                self.stream.synchronize()
            except Exception as error:
                raise cannot_run(error, capture=capture) from error
            for slot in bound:  # results must come from a launch that was timed
                slot.clear_outputs()
            yield bound
        finally:
            self.stream.synchronize()
            for slot in bound:
                slot.free()
            bound.clear()

    def close(self) -> None:
        """Drop the session, and the weights with it; then the stream that it ran on."""
        self.__dict__.pop("session", None)
        self.stream.close()


class _Slot:
    """One copy of the inputs and outputs on the device, and the call that is bound to them."""

    def __init__(self, run: BoundRun, stream: Stream, aliases: Mapping[str, str]) -> None:
        self._run, self._stream, self._aliases = run, stream, aliases
        self._inputs: dict[str, Buffer] = {}
        self._outputs: dict[str, tuple[Buffer, np.ndarray]] = {}

    def bind(self, feeds: Arrays, likes: Arrays) -> None:
        """Copy the inputs to the device, and bind outputs with the shapes and types of `likes`."""
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
        """The outputs of the last call."""
        return {
            name: buffer.download(like.shape, like.dtype, self._stream)
            for name, (buffer, like) in self._outputs.items()
        }

    def free(self) -> None:
        """Free the memory, after the call that is bound to it."""
        del self._run
        for buffer in (*self._own_outputs(), *self._inputs.values()):
            buffer.free()


# -- ONNX Runtime under a decode loop --------------------------------------------------------------


class OrtLauncher(Launcher):
    """A graph in ONNX Runtime, launched on tensors of a decode loop; its runner must outlive it.

    The output of a preallocated cache is bound to the memory of its input: GroupQueryAttention and
    TensorScatter then write the new entries and nothing else.
    """

    def __init__(self, runner: OrtCudaRunner) -> None:
        self.name, self.gpu, self.stream = runner.name, runner.gpu, runner.stream
        self.graph, self.in_place = runner.graph, bool(runner.aliases)
        self.inputs, self.outputs = runner.all_inputs, runner.outputs
        self._runner = runner
        self._running: BoundRun | None = None

    def launch(self, call: StepCall, *, again: bool) -> None:
        """Queue one call."""
        try:
            self._running = self._bound(self._runner.session, call, NO_CAPTURE)
            self._running.launch()
        except Exception as error:  # ONNX Runtime raises types of its own that share no base
            raise DeployError("ONNX Runtime failed on these tokens.", got=first_line(error)) from error

    @contextmanager
    def repeated(self, call: StepCall, then: Callable[[], None], *, graph: bool) -> Iterator[Repeated]:
        """Capture a call in a session of its own; nothing has to be done behind it, so `then` is left out."""
        run, why = captured_if_possible(lambda capture: self._warm(call, capture=capture), graph=graph)
        try:
            yield Repeated(launch=run.launch, why_no_graph=why)
        finally:
            self.stream.synchronize()

    def _warm(self, call: StepCall, *, capture: bool) -> BoundRun:
        """A call in a session of its own that has run."""
        try:
            session = self._runner.open_session(capture=capture)
            run = self._bound(session, call, 1 if capture else NO_CAPTURE)
            for _ in range(WARM_UP):
                run.launch()
            self.stream.synchronize()
        except Exception as error:
            raise cannot_run(error, capture=capture) from error
        return run

    def _bound(self, session: Any, call: StepCall, graph_id: int) -> BoundRun:
        run = BoundRun(self._runner.ort, session, graph_id=graph_id)
        for name, array in call.on_host.items():
            run.bind_host_input(name, array)
        for name, tensor in call.tensors.items():
            bind = run.bind_output if name in self.outputs else run.bind_input
            bind(name, tensor.buffer, tensor.shape, tensor.dtype)
        return run

    def close(self) -> None:
        """Release the last call."""
        self._running = None
