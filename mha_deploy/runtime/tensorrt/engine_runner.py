"""Load and run an engine: profiles, execution contexts, buffers, CUDA graphs, the decode loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

import numpy as np

from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.model.spec import CACHES, CACHES_OUT, PAST
from mha_deploy.runtime.cuda import Copy2D, CudaError, Graph, Stream, capture
from mha_deploy.runtime.decode_loop import (
    CallTensors,
    Launcher,
    StepCall,
    cache_copies,
    check_room,
    engine_cache,
    presented_outputs,
    presented_results,
)
from mha_deploy.runtime.gpu import GpuRunner, Prepared
from mha_deploy.runtime.runner import DTYPES, Arrays, Closing, TensorInfo, check_kinds
from mha_deploy.runtime.tensorrt.kernels import LargeTensor, refuse_large
from mha_deploy.runtime.tensorrt.versions import EngineError, Message, TensorRT, collect, errors, logger_for

Shape = tuple[int, ...]
Profile = Mapping[str, tuple[Shape, Shape, Shape]]
"""For each input, its smallest, most usual and largest shape."""

# -- Which optimisation profile takes which shapes -------------------------------------------------


def admitting(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> list[int]:
    """The profiles that take inputs of these shapes, in their order."""

    def within(shape: Shape, low: Shape, high: Shape) -> bool:
        return len(shape) == len(low) and all(map(lambda a, size, b: a <= size <= b, low, shape, high))

    return [
        index
        for index, profile in enumerate(profiles)
        if all(within(shapes[name], low, high) for name, (low, _, high) in profile.items())
    ]


def first_admitting(
    profiles: Sequence[Profile], shapes: Mapping[str, Shape], *, tightest: bool = False
) -> int:
    """The first profile that takes these shapes; without one, the error lists what each takes.

    The `tightest` is that with the smallest ranges instead, as one for single tokens.
    """
    found = admitting(profiles, shapes)
    if not found:
        ranges = "; ".join(f"profile {index}: {describe(each)}" for index, each in enumerate(profiles))
        problem = "No optimisation profile of the engine takes these shapes."
        raise DeployError(problem, got=_in_words(shapes), hint=ranges)
    if not tightest:
        return found[0]
    return min(found, key=lambda index: sum(math.prod(high) for _, _, high in profiles[index].values()))


def refuse_outside(profiles: Sequence[Profile], index: int, shapes: Mapping[str, Shape]) -> None:
    """Refuse a profile that does not exist, or does not take these shapes."""
    if not 0 <= index < len(profiles):
        hint = f"0 to {len(profiles) - 1}"
        raise DeployError("The engine has no such optimisation profile.", got=index, hint=hint)
    if index not in admitting(profiles, shapes):
        problem = f"The optimisation profile {index} does not take these shapes."
        raise DeployError(problem, got=_in_words(shapes), hint=describe(profiles[index]))


def describe(profile: Profile) -> str:
    """The ranges in words: `x 1..4×1..64×128`."""
    return ", ".join(
        f"{name} {'×'.join(str(a) if a == b else f'{a}..{b}' for a, b in zip(low, high, strict=True))}"
        for name, (low, _, high) in profile.items()
    )


def _in_words(shapes: Mapping[str, Shape]) -> str:
    return ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in shapes.items())


# -- The execution contexts that were used last ----------------------------------------------------

Value = TypeVar("Value", bound=Closing)


class Recent(Generic[Value]):
    """Keeps the `most` values used last by profile and shapes, and closes the others.

    Where profiles are not `shared`, each belongs to one context at a time: that of other shapes goes first.
    """

    def __init__(self, most: int, *, shared: bool) -> None:
        self._most, self._shared = most, shared
        self._kept: dict[tuple[int, tuple[tuple[str, Shape], ...]], Value] = {}  # the last used is the last

    def get(self, profile: int, shapes: Mapping[str, Shape], make: Callable[[], Value]) -> Value:
        """The value of a profile and shapes; made where it is missing, after room was made for it."""
        key = (profile, tuple(sorted(shapes.items())))
        if not self._shared:
            for other in [kept for kept in self._kept if kept[0] == profile and kept != key]:
                self._kept.pop(other).close()
        value = self._kept.pop(key, None)
        if value is None:
            while len(self._kept) >= self._most:
                self._kept.pop(next(iter(self._kept))).close()
            value = make()
        self._kept[key] = value
        return value

    def close(self) -> None:
        """Close all values."""
        while self._kept:
            self._kept.pop(next(iter(self._kept))).close()


# -- From a plan to an engine, and its inputs and outputs ------------------------------------------

_ONNX_NAMES = {"HALF": "float16", "BF16": "bfloat16"}  # of the types that ONNX names differently


def load_engine(rt: TensorRT, plan: bytes, *, host_code: bool = False) -> tuple[Any, Any]:
    """Deserialise a plan on the GPU: the engine, and the runtime that it must not outlive.

    `host_code` allows the runtime code in a version-compatible engine. Only for plans of one's own: it is
    executed.
    """
    trt = rt.module
    with collect(rt) as messages:
        try:
            runtime = trt.Runtime(logger_for(rt))
        except (TypeError, RuntimeError) as cause:  # the binding turns a null pointer into TypeError
            problem = f"{rt.title} cannot start its runtime here."
            raise BackendUnavailable(problem, got=cause, hint="mha-deploy doctor") from cause
        if host_code and rt.can.version_compatible:
            runtime.engine_host_code_allowed = True
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            hint = "load it with the version and on the GPU it was built for, or build it again"
            raise EngineError(f"{rt.title} cannot load this engine here.", got=_reasons(messages), hint=hint)
        return engine, runtime


def _reasons(messages: Iterable[Message]) -> str:
    return "; ".join(errors(messages)) or "no reason reported"


def _io_tensors(rt: TensorRT, engine: Any) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
    """The inputs and the outputs of an engine."""
    trt = rt.module
    inputs: dict[str, TensorInfo] = {}
    outputs: dict[str, TensorInfo] = {}
    for name in map(engine.get_tensor_name, range(engine.num_io_tensors)):
        if engine.get_tensor_location(name) == trt.TensorLocation.HOST:
            hint = "export the model so that all of its inputs and outputs are data"
            raise EngineError(f"The tensor {name} holds shapes, and is on the host.", hint=hint)
        kind = engine.get_tensor_dtype(name)
        dtype = DTYPES.get(_ONNX_NAMES.get(kind.name, kind.name.lower()))
        if dtype is None:
            raise EngineError(f"The tensor {name} has a type that is not supported here.", got=kind.name)
        dims = tuple(None if size < 0 else int(size) for size in engine.get_tensor_shape(name))
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        (inputs if is_input else outputs)[name] = TensorInfo(dtype=dtype, dims=dims)
    return inputs, outputs


# -- One call with its shapes fixed: an execution context of its own, buffers, and a CUDA graph ----


class BoundContext(Closing):
    """An execution context of a runner, with a profile for life and the shapes of the inputs.

    `graphs` are recorded calls by the addresses of their tensors. Where a profile belongs to one context at a
    time, the runner's own must be closed first.
    """

    def __init__(self, runner: TensorRTRunner, profile: int, shapes: Mapping[str, Shape]) -> None:
        self.stream, self.aliases = runner.stream, runner.aliases
        self.inputs, self.outputs = runner.inputs, runner.engine_outputs
        self.graphs: dict[tuple[int, ...], Graph] = {}
        self._rt, self._large_tensors = runner.rt, runner.large_tensors
        rt, stream, engine = runner.rt, runner.stream, runner.loaded[0]
        trt = rt.module
        with self._listening(f"cannot prepare profile {profile}"):
            if rt.can.kernel_specialization:
                runtime_config = engine.create_runtime_config()
                # Compile the kernels for these shapes before the first call, not in the background.
                eager = trt.DynamicShapesKernelSpecializationStrategy.EAGER
                runtime_config.dynamic_shapes_kernel_specialization_strategy = eager
                self._context = engine.create_execution_context(runtime_config)
            else:
                self._context = engine.create_execution_context()
            _check(self._context is not None, "no execution context")
            chosen = self._context.set_optimization_profile_async(profile, stream.handle)
            _check(chosen, f"profile {profile}")
            # The switch may copy data on the stream; nothing may be recorded before that is done.
            stream.synchronize()
        try:
            self.reshape(shapes)
        except EngineError:
            # The context owns the profile, which one of other shapes may need next. The error's traceback may
            # not keep it alive either, so no function on the way has it in a local variable.
            self.close()
            raise

    def reshape(self, shapes: Mapping[str, Shape]) -> None:
        """Set the shape of every input. What was recorded before must not be launched again."""
        refuse_large(self._large_tensors, shapes)
        with self._listening("cannot take these shapes"):
            for name, shape in shapes.items():
                _check(self._context.set_input_shape(name, shape), f"{name} {shape}")
            missing = self._context.infer_shapes()
            _check(not missing, f"inputs without a shape: {', '.join(missing)}")
            results = {name: tuple(map(int, self._context.get_tensor_shape(name))) for name in self.outputs}
            for name, shape in results.items():
                _check(min(shape, default=0) >= 0, f"the size of {name} depends on the data: {shape}")
            self.shapes = {**shapes, **results}

    def enqueue(self, addresses: Mapping[str, int]) -> None:
        """Queue one call on the stream."""
        context = self._context
        with self._listening("cannot run this engine"):
            for name, address in addresses.items():
                _check(context.set_tensor_address(name, address), f"the address of {name}")
            _check(context.execute_async_v3(self.stream.handle), "the call")

    def record(self, addresses: Mapping[str, int], then: Callable[[], None] = lambda: None) -> Graph:
        """Record one call, and what `then` queues behind it."""

        def work() -> None:
            self.enqueue(addresses)
            then()

        try:
            with self._listening("cannot be recorded into a CUDA graph"):
                return capture(work, self.stream)
        except EngineError as error:
            problem = f"{self._rt.title} cannot record this call into a CUDA graph."
            hint = "cuda_graph=False runs it without one"
            raise EngineError(problem, got=error.got, hint=hint) from error

    @contextmanager
    def _listening(self, failure: str) -> Iterator[None]:
        """Turn whatever fails inside into one error, with TensorRT's messages meanwhile."""
        with collect(self._rt) as messages:
            try:
                yield
            except EngineError:
                raise
            except (RuntimeError, CudaError) as cause:
                got = f"{' '.join(str(cause).split())}: {_reasons(messages)}"
                raise EngineError(f"{self._rt.title} {failure}.", got=got) from cause

    def close(self) -> None:
        """Destroy the graphs, then the context that they use: TensorRT does so without references to it."""
        for graph in self.graphs.values():
            graph.close()
        self.graphs.clear()
        self._context = None


def _check(done: bool, what: str) -> None:
    """Raise where TensorRT returned a failure without an exception."""
    if not done:
        raise RuntimeError(what)


class Slot(Closing):
    """The tensors of one call, and the graph that computes on them; `owns_context`: it closes its context.

    A launch changes an input that is written in place; launched again, it writes the same again.
    """

    def __init__(self, bound: BoundContext, *, owns_context: bool = False) -> None:
        self.bound = bound
        self._graph: Graph | None = None
        self._copies: Sequence[tuple[str, str, Copy2D]] = ()
        with ExitStack() as owned:
            if owns_context:
                owned.callback(bound.close)
            inputs, outputs = (
                {name: (bound.shapes[name], info.dtype) for name, info in infos.items()}
                for infos in (bound.inputs, bound.outputs)
            )
            self.memory = CallTensors(inputs, outputs, bound.aliases, bound.stream)
            owned.callback(self.memory.close)
            self._owned = owned.pop_all()
        self._addresses = {name: each.buffer.address for name, each in self.memory.tensors.items()}

    def settle(self, *, record: bool, copies: Sequence[tuple[str, str, Copy2D]] = ()) -> None:
        """Run once on the inputs that are here, so that TensorRT does its one-time work; then `record` it.

        `copies` of new KV-cache entries belong to a launch, behind the engine's own work.
        """
        self.memory.clear_outputs()
        self._copies = copies
        self.bound.enqueue(self._addresses)
        self.bound.stream.synchronize()
        if record:
            self._graph = self.bound.record(self._addresses, self._copy_entries)
            self._owned.callback(self._graph.close)
        self.memory.clear_outputs()

    def _copy_entries(self) -> None:
        tensors = self.memory.tensors
        for cache, entries, place in self._copies:
            tensors[cache].buffer.copy_2d(tensors[entries].buffer, place, self.bound.stream)

    def launch(self) -> None:
        """Queue one call, and do not wait."""
        if self._graph is None:
            self.bound.enqueue(self._addresses)
            self._copy_entries()
        else:
            self._graph.launch(self.bound.stream)

    def run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """Upload, launch, download."""
        self.memory.upload(feeds)
        self.memory.clear_outputs()
        self.launch()
        return self.memory.download(self.bound.outputs)

    def results(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """The outputs of the last launch.

        With the caches of the device: entries that were not copied there must not be added here.
        """
        outputs = self.memory.download(self.bound.outputs)
        caches = self.memory.download({cache: None for cache, _, _ in self._copies})
        return presented_results(feeds, outputs, caches)

    def close(self) -> None:
        """Destroy the graph, and free the buffers."""
        self._owned.close()


# -- Run an engine: TensorRT 8.6 to 11 and TensorRT-RTX, without PyTorch ---------------------------


class TensorRTRunner(GpuRunner):
    """An engine on the GPU of this process.

    Args:
        rt: The TensorRT that built it.
        plan: The serialised engine.
        host_code: Allow the runtime code in a version-compatible engine; it is executed.
        cuda_graph: Whether calls are recorded once and launched as a CUDA graph.
        in_place: From each output that a plugin can write into the memory of an input to that input.
        large_tensors: Tensors that TensorRT does not support at the largest sizes: such calls are refused.
        keep: For how many shapes contexts, buffers and graphs are kept; each context has scratch memory for
            the largest shapes of its profile.
    """

    profiles: tuple[Profile, ...]
    engine_outputs: Mapping[str, TensorInfo]  # new KV-cache entries where `outputs` has whole caches
    aliases: Mapping[str, str]  # for each output that is written in place, the input whose memory it shares

    def __init__(
        self,
        rt: TensorRT,
        plan: bytes,
        *,
        host_code: bool = False,
        cuda_graph: bool = True,
        in_place: Mapping[str, str] | None = None,
        large_tensors: Sequence[LargeTensor] = (),
        keep: int = 2,
    ) -> None:
        super().__init__()
        self.rt, self._plan_bytes, self.large_tensors = rt, len(plan), large_tensors
        self.name = f"{rt.backend} {rt.version}"
        self.graph = cuda_graph
        self.loaded = load_engine(rt, plan, host_code=host_code)
        engine = self.loaded[0]
        self.inputs, self.engine_outputs = _io_tensors(rt, engine)
        self.outputs = presented_outputs(self.inputs, self.engine_outputs)
        self.aliases = dict(in_place or {})
        if rt.can.aliased_outputs:
            shared = {name: engine.get_aliased_input_tensor(name) for name in self.engine_outputs}
            self.aliases |= {name: source for name, source in shared.items() if source}
        self.profiles = tuple(
            {name: self._ranges(name, info, index) for name, info in self.inputs.items()}
            for index in range(engine.num_optimization_profiles)
        )
        self._calls: Recent[Slot] = Recent(keep, shared=rt.can.shared_profiles)
        self.stream = Stream()

    def _ranges(self, name: str, info: TensorInfo, profile: int) -> tuple[Shape, Shape, Shape]:
        """The smallest, usual and largest shape of an input in a profile."""
        fixed = tuple(size for size in info.dims if isinstance(size, int))
        if len(fixed) == len(info.dims):  # the profiles need not contain it
            return fixed, fixed, fixed
        engine = self.loaded[0]
        low, usual, high = (
            tuple(map(int, shape)) for shape in engine.get_tensor_profile_shape(name, profile)
        )
        return low, usual, high

    def profiles_for(self, feeds: Arrays) -> list[int]:
        """The optimisation profiles that take these inputs; none where an engine of fixed sizes does not."""
        feeds = self._narrowed(feeds)
        check_kinds(self.inputs, feeds)
        return admitting(self.profiles, _shapes(feeds))

    def checked(self, feeds: Arrays) -> Arrays:
        """The inputs as the engine takes them; refused for other names, types or shapes."""
        return super().checked(self._narrowed(feeds))

    def _narrowed(self, feeds: Arrays) -> Arrays:
        """INT64 inputs as INT32 where the engine takes that: before version 10, the parser narrows them."""
        if self.rt.can.bf16_type:
            return feeds
        narrowed, limits = dict(feeds), np.iinfo(np.int32)
        for name, array in feeds.items():
            if name not in self.inputs or self.inputs[name].dtype != np.int32 or array.dtype != np.int64:
                continue
            if array.size and not (limits.min <= array.min() and array.max() <= limits.max):
                problem = f"Input {name} has numbers beyond INT32, and this engine takes no others."
                raise EngineError(problem, got=f"{array.min()} to {array.max()}")
            narrowed[name] = array.astype(np.int32)
        return narrowed

    def run_in_profile(self, feeds: Arrays, profile: int) -> dict[str, np.ndarray]:
        """Run in a chosen profile."""
        feeds = self.checked(feeds)
        refuse_outside(self.profiles, profile, _shapes(feeds))
        return presented_results(feeds, self._call(feeds, profile).run(feeds))

    def _run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        return presented_results(feeds, self._usual_call(feeds).run(feeds))

    def _call_bytes(self, feeds: Arrays, results: Arrays) -> int:
        return self._usual_call(feeds).memory.nbytes

    def _usual_call(self, feeds: Arrays) -> Slot:
        """The call in the first profile that fits; with a cache in the tightest, as decode loops do."""
        cached = engine_cache(self.inputs, self.engine_outputs) is not None
        return self._call(feeds, first_admitting(self.profiles, _shapes(feeds), tightest=cached))

    def _call(self, feeds: Arrays, profile: int) -> Slot:
        check_room(feeds)
        shapes = _shapes(feeds)

        def new_call() -> Slot:
            slot = Slot(BoundContext(self, profile, shapes), owns_context=True)
            try:
                slot.memory.upload(feeds)
                slot.settle(record=self.graph)
            except BaseException:
                slot.close()
                raise
            return slot

        return self._calls.get(profile, shapes, new_call)

    def _launcher(self) -> TensorRTLauncher:
        self._calls.close()  # where a profile belongs to one context at a time, the decode loop needs it
        return TensorRTLauncher(self)

    @contextmanager
    def _prepare(self, feeds: Arrays, slots: int) -> Iterator[Prepared]:
        """Slots of the profile that `run` takes; nothing else may run on this runner meanwhile."""
        bound = self._usual_call(feeds).bound
        with ExitStack() as owned:
            prepared: list[Slot] = []
            for _ in range(slots):
                slot = Slot(bound)
                owned.callback(slot.close)
                if prepared:
                    slot.memory.copy_inputs(prepared[0].memory)
                else:
                    slot.memory.upload(feeds)
                slot.settle(record=self.graph, copies=cache_copies(feeds, self.engine_outputs))
                prepared.append(slot)
            try:
                yield Prepared(
                    launch=lambda index: prepared[index].launch(),
                    results=lambda index: prepared[index].results(feeds),
                    memory_bytes=self.engine_bytes + sum(slot.memory.nbytes for slot in prepared),
                )
            finally:
                self.stream.synchronize()  # the buffers must not be freed while a call is using them

    @property
    def engine_bytes(self) -> int:
        """Device memory of the scratch of one context, and of the weights, taken from the plan's size."""
        engine = self.loaded[0]
        v2 = self.rt.can.device_memory_v2
        return int(engine.device_memory_size_v2 if v2 else engine.device_memory_size) + self._plan_bytes

    def close(self) -> None:
        """Free the contexts, the buffers, the engine and the stream."""
        self._calls.close()
        self.stream.close()
        vars(self).pop("loaded", None)  # may be closed twice


def _shapes(feeds: Arrays) -> dict[str, Shape]:
    return {name: tuple(array.shape) for name, array in feeds.items()}


# -- TensorRT under a decode loop ------------------------------------------------------------------


class TensorRTLauncher(Launcher):
    """An engine, launched on tensors of a decode loop.

    Its runner must outlive it. Where a profile belongs to one context at a time (8.6), the runner itself
    cannot run in a profile that the launcher uses.
    """

    def __init__(self, runner: TensorRTRunner) -> None:
        self.name, self.stream = runner.name, runner.stream
        self.inputs, self.outputs = runner.inputs, runner.engine_outputs
        self.in_place = [runner.aliases.get(out) for out in CACHES_OUT] == list(CACHES)
        self._runner = runner
        self._contexts: Recent[BoundContext] = Recent(2, shared=runner.rt.can.shared_profiles)

    def most_tokens(self, B: int) -> int | None:
        """The longest call that a profile for B batch elements takes into an empty cache, if any."""
        fitting = [
            profile["x"][2][1]
            for profile in self._runner.profiles
            # The batch is the first dimension of every input of a decode loop.
            if all(low[0] <= B <= high[0] for low, _, high in profile.values())
            and all(profile[name][0][2] == 0 for name in PAST if name in profile)
        ]
        return max(fitting, default=None)

    def launch(self, call: StepCall, *, again: bool) -> None:
        """Queue one call: the graph that was recorded of it, or the call itself, which is then recorded."""
        shapes, addresses = call.shapes(self.inputs), call.addresses
        profile = first_admitting(self._runner.profiles, shapes, tightest=True)
        # One context takes all calls whose shapes change; it has no graphs that would be lost.
        fixed = {} if call.varies else shapes
        bound = self._contexts.get(profile, fixed, lambda: BoundContext(self._runner, profile, shapes))
        if any(bound.shapes[name] != shape for name, shape in shapes.items()):
            bound.reshape(shapes)
        wanted = call.shapes(self.outputs)  # there is memory for no others
        other = {name: bound.shapes[name] for name in wanted if bound.shapes[name] != wanted[name]}
        if other:
            hint = ", ".join(f"{name} {wanted[name]}" for name in other)
            problem = "The engine returns outputs of other shapes than a layer with a cache."
            raise EngineError(problem, got=other, hint=hint)
        key = tuple(addresses.values())
        if key in bound.graphs:
            bound.graphs[key].launch(self.stream)
            return
        bound.enqueue(addresses)
        if again and self._runner.graph and not call.varies:
            self.stream.synchronize()
            bound.graphs[key] = bound.record(addresses)

    def close(self) -> None:
        """Destroy the graphs and the contexts."""
        self._contexts.close()
