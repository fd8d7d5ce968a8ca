"""ONNX Runtime on the CPU, and with its CUDA provider as a user would run it: the graph as it is, no TF32."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import resource
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.graph.file import graph_of, weights_folder
from mha_deploy.graph.ir import constant, infer_shapes, is_op, nodes_behind, rank
from mha_deploy.graph.lower import lower
from mha_deploy.graph.lower.cache import TOTAL_LENGTH
from mha_deploy.graph.upcast import with_float32_inside
from mha_deploy.model.spec import CACHES, LENGTHS
from mha_deploy.runtime.cuda import Stream, free_memory
from mha_deploy.runtime.decode_loop import (
    CallTensors,
    DecodingRunner,
    StepCall,
    check_room,
    total_length,
    written_in_place,
)
from mha_deploy.runtime.gpu import Prepared
from mha_deploy.runtime.runner import Arrays, Runner, TensorInfo, foreign_errors

# -- Sessions of ONNX Runtime, and arrays through them ---------------------------------------------

_EXTERNAL_DATA_FOLDER = "session.model_external_initializers_file_folder_path"
_SILENT = 4  # errors are raised as exceptions as well


def import_onnxruntime() -> Any:
    """The package `onnxruntime`. Its own logger warns of devices that its plugins do not register."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(_SILENT)  # sessions have another
    return onnxruntime


def session_options(ort: Any, graph: ir.Model, *, level: str) -> Any:
    """Options of a session that finds the graph's weights and writes no log; `level` is `BASIC` or `ALL`."""
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.log_severity_level = _SILENT
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        # Each thread reserves memory, and a session that cannot start all of them may wait for ever.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
    folder = weights_folder(graph)
    if folder is not None:
        options.add_session_config_entry(_EXTERNAL_DATA_FOLDER, str(folder.resolve()))
    return options


def inputs_and_outputs(session: Any) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
    """The inputs and outputs of a session."""

    def info(tensor: Any) -> TensorInfo:
        return TensorInfo.of(tensor.name, tensor.type.removeprefix("tensor(").removesuffix(")"), tensor.shape)

    inputs, outputs = session.get_inputs(), session.get_outputs()
    return {each.name: info(each) for each in inputs}, {each.name: info(each) for each in outputs}


def run_bound(ort: Any, session: Any, feeds: Arrays, outputs: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Run arrays of any type and get arrays: `session.run` itself has no bfloat16."""
    binding = session.io_binding()
    arrays = {name: np.ascontiguousarray(array) for name, array in feeds.items()}  # values do not own them
    for name, array in arrays.items():
        value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
            array, int(ir.DataType.from_numpy(array.dtype))
        )
        binding.bind_ortvalue_input(name, value)
    for name in outputs:
        binding.bind_output(name)  # to memory of the host
    binding.synchronize_inputs()
    session.run_with_iobinding(binding)
    binding.synchronize_outputs()
    results = {}
    for (name, info), value in zip(outputs.items(), binding.get_outputs(), strict=True):
        # By its bytes: ONNX Runtime converts no bfloat16 to NumPy.
        content = bytearray(ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes()))
        results[name] = np.frombuffer(content, info.dtype).reshape(value.shape())
    return results


def first_line(error: BaseException) -> str:
    """The first line of an error, without the C++ signature in front of its message."""
    line = str(error).strip().partition("\n")[0]
    return line.rpartition(" was false. ")[2] or line


# Gives out the quantized number of an output that a Transpose before a QuantizeLinear reads as well (1.31.1).
MOVES_TRANSPOSES = "TransposeOptimizer"
# They make one node, which cannot be loaded, of a norm with nodes in FP16 and in FP32 (1.31.1).
FUSE_NORMS = ("LayerNormFusion", "LayerNormFusionL1")

_NO_KERNEL = "ONNX Runtime has no CPU kernel for a node of this graph."
_NO_BFLOAT16 = "--runtime onnx-reference (ONNX Runtime's CPU kernels have no bfloat16)"


class OrtCpuRunner(Runner):
    """A graph in ONNX Runtime with the CPU provider and no other.

    At level BASIC: the graph is judged, not ONNX Runtime's fusions, and level ALL crashes on some graphs.
    """

    def __init__(self, model: Path | ir.Model) -> None:
        ort = import_onnxruntime()
        graph = graph_of(model)
        upcast = ir.to_proto(with_float32_inside(graph)).SerializeToString()
        options = session_options(ort, graph, level="BASIC")
        # It is not timed: threads that spin between calls take the cores from everything else.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = ort.InferenceSession(
                upcast,
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=[MOVES_TRANSPOSES, *FUSE_NORMS],
            )
        except Exception as error:  # ONNX Runtime raises types of its own that share no base
            if isinstance(error, ort.capi.onnxruntime_pybind11_state.NotImplemented):
                raise BackendUnavailable(_NO_KERNEL, got=first_line(error), hint=_NO_BFLOAT16) from error
            raise DeployError(
                "ONNX Runtime cannot load the graph.",
                got=first_line(error),
                hint="--runtime onnx-reference, or another version of ONNX Runtime",
            ) from error
        self.title, self.name = "ort-cpu", f"ort-cpu {ort.__version__}"
        self.inputs, self.outputs = inputs_and_outputs(self._session)
        if any(info.dtype.name == "bfloat16" for info in (*self.inputs.values(), *self.outputs.values())):
            raise BackendUnavailable(_NO_KERNEL, got="an input or output of the graph", hint=_NO_BFLOAT16)

    def _run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        names = list(self.outputs)
        with foreign_errors("ONNX Runtime failed on these inputs.", first_line):
            return dict(zip(names, self._session.run(names, dict(feeds)), strict=True))

    def close(self) -> None:
        """Drop the session, and the weights with it."""
        vars(self).pop("_session", None)  # may be closed twice


# -- One call of ONNX Runtime whose inputs and outputs are bound to memory of the device -----------

NO_CAPTURE = -1  # an id that ONNX Runtime never captures; 0 is its own

# ONNX Runtime's errors where it does not capture: a session with copies between the devices or with control
# flow (two wordings), an operator or option that does not support it, a capture that never ends; and CUDA's
# own error for a kernel that waits or allocates meanwhile.
_REFUSALS = (
    *("cannot use the graph capture feature", "cannot use the cuda graph feature"),
    *("not supported when graph capture is enabled", "graph capture did not complete"),
    *("not permitted when stream is capturing", "failed due to a previous error during capture"),
)


class GraphRefused(DeployError):
    """A graph that ONNX Runtime may run, but not as a CUDA graph."""


class BoundRun:
    """A call that is bound to memory; `graph_id` is its number in a session that captures."""

    def __init__(
        self, ort: Any, session: Any, call: StepCall, outputs: Collection[str], *, graph_id: int = NO_CAPTURE
    ) -> None:
        self._session, self._call = session, call  # the binding does not own the arrays of the host
        self._binding = session.io_binding()
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._options.add_run_config_entry("gpu_graph_id", str(graph_id))
        for name, array in call.on_host.items():
            self._binding.bind_cpu_input(name, array)
        for name, tensor in call.tensors.items():  # an output may be where an input is
            bind = self._binding.bind_output if name in outputs else self._binding.bind_input
            shape, address = list(tensor.shape), tensor.buffer.address
            bind(name, DEVICE, 0, int(ir.DataType.from_numpy(tensor.dtype)), shape, address)

    def launch(self) -> None:
        """Queue one call."""
        self._session.run_with_iobinding(self._binding, self._options)


def cannot_run(error: Exception, *, capture: bool) -> DeployError:
    """An exception of ONNX Runtime as an error of this tool; `capture`: a CUDA graph was requested."""
    if isinstance(error, DeployError):
        return error
    if capture and any(refusal in str(error).lower() for refusal in _REFUSALS):
        what, hint = "ONNX Runtime cannot run this graph as a CUDA graph.", "it is timed without one"
        return GraphRefused(what, got=first_line(error), hint=hint)
    return DeployError(
        "ONNX Runtime's CUDA provider cannot run the graph.",
        got=first_line(error),
        hint="--runtime ort-cpu, or another version of ONNX Runtime",
    )


# -- Which nodes ONNX Runtime runs on the CPU, and whether it may ----------------------------------

CUDA, DEVICE = "CUDAExecutionProvider", "cuda"
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


def refuse_without_cuda(ort: Any) -> None:
    """Refuse an ONNX Runtime without a CUDA provider: the CPU package, or one that it has overwritten."""
    preload = getattr(ort, "preload_dlls", None)  # finds the CUDA and cuDNN that pip installed
    if preload is not None:
        with contextlib.redirect_stdout(io.StringIO()):  # the loader reports the same failures
            preload()
    providers = ort.get_available_providers()
    if CUDA in providers:
        return
    if (Path(ort.__file__).parent / "capi" / _LIBRARIES[-1]).exists():
        raise dropped_provider(ort)
    problem = f"ONNX Runtime {ort.__version__} has no CUDA provider: it is the package for CPUs."
    hint = 'pip uninstall onnxruntime, then pip install "mha-deploy[ort-gpu]"'
    raise BackendUnavailable(problem, got=", ".join(providers), hint=hint)


def dropped_provider(ort: Any) -> BackendUnavailable:
    """The error of a provider whose libraries do not load; the reason, which ONNX Runtime does not report."""
    why = "its libraries load; the GPU or the driver may be too old for it"
    if os.environ.get(_UNAVAILABLE):  # set by the package itself; loading past it can crash
        why = f"{_UNAVAILABLE} is set: its CUDA libraries were not found"
    else:
        try:
            for library in _LIBRARIES:
                ctypes.CDLL(str(Path(ort.__file__).parent / "capi" / library))
        except OSError as error:
            why = str(error)
    problem = "ONNX Runtime dropped its CUDA provider, and would run on the CPU."
    hint = f"install the CUDA and cuDNN that ONNX Runtime {ort.__version__} was built for"
    return BackendUnavailable(problem, got=why, hint=hint)


def nodes_on_cpu(session: Any) -> list[tuple[str, str]]:
    """Operators and names of the nodes that a session runs on the CPU, where ONNX Runtime reports it."""
    assignment = getattr(session, "get_provider_graph_assignment_info", None)
    if assignment is None:
        problem = "This ONNX Runtime does not report which nodes run on the CPU."
        raise BackendUnavailable(problem, hint="onnxruntime-gpu>=1.24")
    parts = [part for part in assignment() if part.ep_name == _CPU]
    return [(node.op_type, node.name) for part in parts for node in part.get_nodes()]


def refuse_work_on_cpu(nodes: Iterable[tuple[str, str]], graph: ir.Model) -> None:
    """Refuse nodes on the CPU that do more than compute shapes and single numbers, and name them."""
    # A node that ONNX Runtime made itself is not in our graph: its operator decides.
    made = {node.name: node.outputs for node in graph.graph}
    types = {name: [output.dtype for output in outputs if output.dtype] for name, outputs in made.items()}
    work = [
        (operator, name)
        for operator, name in nodes
        if operator not in _SHAPE_OPERATORS or any(t.is_floating_point() for t in types.get(name, ()))
    ]
    if work:
        infer_shapes(graph)
        work = [each for each in work if not all(map(_is_of_shapes, made.get(each[1], [None])))]
    if work:
        problem = "ONNX Runtime would run nodes on the CPU: its CUDA provider has no kernels for them."
        got = ", ".join(f"{operator} {name}".strip() for operator, name in work)
        raise DeployError(problem, got=got, hint="another precision, another dialect, or --runtime ort-cpu")


def _is_of_shapes(value: ir.Value | None) -> bool:
    """Whether it is computed from shapes and constants alone, and no longer than a shape.

    As the root of a head size, which older exporters compute. ONNX does not infer that this is one number
    where it does not infer the rank before.
    """
    if value is None or rank(value) not in (0, 1):
        return False
    for node in nodes_behind([value], lambda node: () if is_op(node, *_SHAPES) else node.inputs):
        given = [each for each in node.inputs if each is not None and each.producer() is None]
        if is_op(node, *_LONGER) or (
            not is_op(node, *_SHAPES) and any(constant(each) is None for each in given)
        ):
            return False
    return value.producer() is not None


_SHAPES, _LONGER = ("Shape", "Size"), ("Range", "ConstantOfShape", "Expand", "Tile")


# Changes the layout of nodes on the CPU, does nothing on a GPU, and crashes on x86-64 (1.31.1).
CPU_LAYOUT = "NchwcTransformer"

WARM_UP = 2  # how often a call runs before it is timed, the first time to be captured


class OrtCudaRunner(DecodingRunner):
    """A graph in ONNX Runtime with the CUDA provider.

    The dialect `onnx` runs it as it is, `contrib` with ONNX Runtime's own attention operators. With
    `cuda_graph`, timed calls are launches of a CUDA graph, where ONNX Runtime captures it. The output of a
    preallocated cache is bound to the memory of its input: GroupQueryAttention and TensorScatter then write
    the new entries and nothing else.
    """

    _running: BoundRun | None = None  # the last call of a decode loop

    def __init__(self, model: Path | ir.Model, *, dialect: str = "onnx", cuda_graph: bool = True) -> None:
        ort = import_onnxruntime()
        refuse_without_cuda(ort)
        super().__init__()
        self.ort = ort
        self._model = lower(graph_of(model), dialect)
        self._serialized = ir.to_proto(self._model).SerializeToString()
        self.graph = cuda_graph
        self.title = f"ort-cuda{'' if dialect == 'onnx' else f'-{dialect}'}"
        self.name = f"{self.title} {ort.__version__}"
        self.stream = Stream()
        try:
            self.session = self.open_session(capture=False)
            refuse_work_on_cpu(nodes_on_cpu(self.session), self._model)
            self.engine_inputs, self.outputs = inputs_and_outputs(self.session)
            self.engine_outputs = self.outputs
            self.inputs = {name: info for name, info in self.engine_inputs.items() if name != TOTAL_LENGTH}
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
        if CUDA not in session.get_providers():
            raise dropped_provider(self.ort)
        return session

    def _run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        check_room(feeds)
        with foreign_errors("ONNX Runtime failed on these inputs.", first_line):
            if not self.aliases:
                return run_bound(self.ort, self.session, feeds, self.outputs)
            # Each cache output in the memory of its input: later entries stay as they were.
            likes = {name: feeds[self.aliases.get(name, "x")] for name in self.outputs}
            with self._bound(self.session, feeds, likes, NO_CAPTURE) as (memory, run):
                run.launch()
                self.stream.synchronize()
                return memory.download(self.outputs)

    @contextmanager
    def _bound(
        self, session: Any, feeds: Arrays, likes: Arrays, graph_id: int
    ) -> Iterator[tuple[CallTensors, BoundRun]]:
        """A call on the device with these inputs, and outputs with the shapes and types of `likes`."""
        on_host = {}
        if TOTAL_LENGTH in self.engine_inputs:
            S, T = feeds["x"].shape[1], feeds[CACHES[0]].shape[2]
            on_host[TOTAL_LENGTH] = total_length(feeds[LENGTHS], S, T)
        inputs, outputs = (
            {name: (array.shape, array.dtype) for name, array in arrays.items()} for arrays in (feeds, likes)
        )
        memory = CallTensors(inputs, outputs, self.aliases, self.stream)
        try:
            memory.upload(feeds)
            memory.clear_outputs()
            call = StepCall(tensors=memory.tensors, on_host=on_host)
            yield memory, BoundRun(self.ort, session, call, self.outputs, graph_id=graph_id)
        finally:
            self.stream.synchronize()
            memory.close()

    def _call_bytes(self, feeds: Arrays, results: Arrays) -> int:
        apart = {name: array for name, array in results.items() if name not in self.aliases}
        return super()._call_bytes(feeds, apart)

    def launch(self, call: StepCall, *, again: bool) -> None:
        """Queue one call of a decode loop."""
        with foreign_errors("ONNX Runtime failed on these tokens.", first_line):
            self._running = BoundRun(self.ort, self.session, call, self.outputs)
            self._running.launch()

    def release(self) -> None:
        """Release the last call."""
        self._running = None

    @contextmanager
    def _prepare(self, feeds: Arrays, slots: int) -> Iterator[Prepared]:
        """Slots whose calls are captured; else they are launched one by one, and the reason is reported."""
        results = self._run(feeds)  # for the shapes of the outputs, which captured calls must know
        before = free_memory()
        with ExitStack() as owned:
            why: str | None = None
            calls: list[tuple[CallTensors, BoundRun]] = []
            for capture in (True, False) if self.graph else (False,):
                try:
                    calls = owned.enter_context(self._slots(feeds, results, slots, capture=capture))
                    break
                except GraphRefused as error:
                    why = str(error.got)
            yield Prepared(
                launch=lambda slot: calls[slot][1].launch(),
                results=lambda slot: calls[slot][0].download(self.outputs),
                memory_bytes=before - free_memory(),
                why_no_graph=why,
            )

    @contextmanager
    def _slots(
        self, feeds: Arrays, likes: Arrays, count: int, *, capture: bool
    ) -> Iterator[list[tuple[CallTensors, BoundRun]]]:
        """Calls in a session of their own, warmed up."""
        session = self.open_session(capture=capture)
        with ExitStack() as owned:
            bound = [
                owned.enter_context(self._bound(session, feeds, likes, number + 1 if capture else NO_CAPTURE))
                for number in range(count)
            ]
            try:
                try:
                    # ONNX Runtime repeats the first run by itself until it has captured it.
                    for _, run in bound:
                        for _ in range(WARM_UP):
                            run.launch()
                    self.stream.synchronize()
                except Exception as error:
                    raise cannot_run(error, capture=capture) from error
                for memory, _ in bound:  # results must come from a launch that was timed
                    memory.clear_outputs()
                yield bound
            finally:
                self.stream.synchronize()
                bound.clear()  # before the memory that the calls are bound to

    def close(self) -> None:
        """Drop the session, and the weights with it; then the stream that it ran on."""
        self.__dict__.pop("session", None)
        self.stream.close()
