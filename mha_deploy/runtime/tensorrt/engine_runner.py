"""Load and run an engine: profiles, execution contexts, buffers, CUDA graphs, the decode loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

import numpy as np

from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.model.spec import PAST
from mha_deploy.runtime import decode_loop as loops
from mha_deploy.runtime.cuda import Copy2D, CudaError, Graph, Stream, capture
from mha_deploy.runtime.decode_loop import CallTensors, DecodingRunner, DeviceLoop, StepCall
from mha_deploy.runtime.gpu import Prepared
from mha_deploy.runtime.runner import Arrays, Closing, TensorInfo, check_kinds
from mha_deploy.runtime.tensorrt.kernels import LargeTensor, refuse_large
from mha_deploy.runtime.tensorrt.versions import (
    LEAN,
    EngineError,
    Message,
    TensorRT,
    collect,
    errors,
    lean_runtime_hint,
    logger_for,
)

Shape = tuple[int, ...]
Profile = Mapping[str, tuple[Shape, Shape, Shape]]
"""For each input, its smallest, most usual and largest shape."""

# -- Which optimization profile takes which shapes -------------------------------------------------


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
    profiles: Sequence[Profile],
    shapes: Mapping[str, Shape],
    *,
    tightest: bool = False,
    only: int | None = None,
) -> int:
    """The first profile that takes these shapes, or the `tightest`: with the smallest ranges."""
    found = [index for index in admitting(profiles, shapes) if only in (None, index)]
    if not found:
        ranges = "; ".join(f"profile {index}: {describe(each)}" for index, each in enumerate(profiles))
        which = "No optimization profile" if only is None else f"No optimization profile {only}"
        got = ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in shapes.items())
        raise DeployError(f"{which} of the engine takes these shapes.", got=got, hint=ranges)
    if not tightest:
        return found[0]
    return min(found, key=lambda index: sum(math.prod(high) for _, _, high in profiles[index].values()))


def describe(profile: Profile) -> str:
    """The ranges in words: `x 1..4×1..64×128`."""
    return ", ".join(
        f"{name} {'×'.join(str(a) if a == b else f'{a}..{b}' for a, b in zip(low, high, strict=True))}"
        for name, (low, _, high) in profile.items()
    )


# -- The execution contexts that were used last ----------------------------------------------------

Value = TypeVar("Value", bound=Closing)


class Recent(Generic[Value]):
    """Keeps the `most` values used last, and but for `shared` profiles one of each; closes the others."""

    def __init__(self, most: int, *, shared: bool) -> None:
        self._most, self._shared = most, shared
        self._kept: dict[tuple[int, tuple[tuple[str, Shape], ...]], Value] = {}  # the last used is the last

    def get(self, profile: int, shapes: Mapping[str, Shape], make: Callable[[], Value]) -> Value:
        """The value of a profile and shapes; made where it is missing, after others were closed for it."""
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
    """Deserialize a plan on the GPU: the engine, and the runtime that it must not outlive.

    `host_code` lets the code in a version-compatible engine run: only for plans of one's own.
    """
    trt = rt.module
    with collect(rt) as messages:
        try:
            runtime = trt.Runtime(logger_for(rt))
        except (TypeError, RuntimeError) as cause:  # the binding makes a TypeError of a null pointer
            problem = f"{rt.title} cannot start its runtime here."
            raise BackendUnavailable(problem, got=cause, hint="mha-deploy doctor") from cause
        if host_code and rt.can.version_compatible:
            runtime.engine_host_code_allowed = True
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            hint = "load it with the version and on the GPU it was built for, or build it again"
            got = _reasons(messages)
            hint = lean_runtime_hint(rt, got) or hint
            raise EngineError(f"{rt.title} cannot load this engine here.", got=got, hint=hint)
        return engine, runtime


def _reasons(messages: Iterable[Message]) -> str:
    return "; ".join(errors(messages)) or "no reason reported"


def _io_tensors(rt: TensorRT, engine: Any) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
    """The inputs and the outputs of an engine."""
    trt = rt.module
    inputs: dict[str, TensorInfo] = {}
    outputs: dict[str, TensorInfo] = {}
    reports_places = hasattr(trt, "TensorLocation")  # the lean runtime of 8.6 does not, in Python
    for name in map(engine.get_tensor_name, range(engine.num_io_tensors)):
        if reports_places and engine.get_tensor_location(name) == trt.TensorLocation.HOST:
            hint = "export the model so that all of its inputs and outputs are data"
            raise EngineError(f"The tensor {name} holds shapes, and is on the host.", hint=hint)
        kind = engine.get_tensor_dtype(name)
        dtype = _ONNX_NAMES.get(kind.name, kind.name.lower())
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        info = TensorInfo.of(name, dtype, map(int, engine.get_tensor_shape(name)))
        (inputs if is_input else outputs)[name] = info
    return inputs, outputs


# -- One call with its shapes fixed: an execution context of its own, buffers, and a CUDA graph ----


class NotCapturable(EngineError):
    """A call that cannot be recorded into a CUDA graph; it can be run without one."""


class BoundContext(Closing):
    """An execution context with a profile for life; `graphs` are calls by the addresses of their tensors."""

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
            raise NotCapturable(problem, got=error.got, hint="it is launched without one") from error

    @contextmanager
    def _listening(self, failure: str) -> Iterator[None]:
        """Raise one error for whatever fails inside, with TensorRT's messages meanwhile."""
        with collect(self._rt) as messages:
            try:
                yield
            except EngineError:
                raise
            except (RuntimeError, CudaError) as cause:
                got = f"{' '.join(str(cause).split())}: {_reasons(messages)}"
                raise EngineError(
                    f"{self._rt.title} {failure}.",
                    got=got,
                    hint="another --profile, or another version of TensorRT",
                ) from cause

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
    """The tensors of one call, and the graph that computes on them; `owns_context`: it closes its context."""

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
        """Run once, for TensorRT's one-time work, and record; `copies` of new cache entries end a launch."""
        self.memory.clear_outputs()
        self._copies = copies
        self.bound.enqueue(self._addresses)
        self.bound.stream.synchronize()
        try:
            if record:
                self._graph = self.bound.record(self._addresses, self._copy_entries)
                self._owned.callback(self._graph.close)
        finally:
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
        """The outputs of the last launch, with the caches of the device: nothing is copied here."""
        outputs = self.memory.download(self.bound.outputs)
        caches = self.memory.download({cache: None for cache, _, _ in self._copies})
        return loops.presented_results(feeds, outputs, caches)

    def close(self) -> None:
        """Destroy the graph, and free the buffers."""
        self._owned.close()


# -- Run an engine: TensorRT 8.6 to 11 and TensorRT-RTX, without PyTorch ---------------------------


class TensorRTRunner(DecodingRunner):
    """An engine on the GPU of this process, by the TensorRT that built it."""

    profiles: tuple[Profile, ...]

    def __init__(
        self,
        rt: TensorRT,
        plan: bytes,
        *,
        host_code: bool = False,  # see `load_engine`
        cuda_graph: bool = True,  # calls are recorded once and launched as a CUDA graph
        in_place: Mapping[str, str] | None = None,  # outputs that a plugin can write into an input's memory
        large_tensors: Sequence[LargeTensor] = (),  # not supported at some sizes: such calls are refused
        keep: int = 2,  # for how many shapes; each context has scratch memory for the largest of its profile
    ) -> None:
        super().__init__()
        self.rt, self._plan_bytes, self.large_tensors = rt, len(plan), large_tensors
        self.title, self.name = rt.backend, f"{rt.backend} {rt.version}"
        self.graph = cuda_graph
        self.why_no_graph: str | None = (
            None  # where a call could not be recorded: all run without a graph then
        )
        self.loaded = load_engine(rt, plan, host_code=host_code)
        engine = self.loaded[0]
        self.inputs, self.engine_outputs = _io_tensors(rt, engine)
        self.engine_inputs = self.inputs
        self.outputs = loops.presented_outputs(self.inputs, self.engine_outputs)
        self.aliases = dict(in_place or {})
        if rt.can.aliased_outputs:
            shared = {name: engine.get_aliased_input_tensor(name) for name in self.engine_outputs}
            self.aliases |= {name: source for name, source in shared.items() if source}
        self.profiles = tuple(
            {name: self._ranges(name, info, index) for name, info in self.inputs.items()}
            for index in range(engine.num_optimization_profiles)
        )
        # A lean runtime runs the plan of another version, whose contexts may own their profiles.
        share = rt.can.shared_profiles and rt.backend not in LEAN
        self._calls: Recent[Slot] = Recent(keep, shared=share)
        self._steps: Recent[BoundContext] = Recent(2, shared=share)  # of a decode loop
        self.stream = Stream()

    def _ranges(self, name: str, info: TensorInfo, profile: int) -> tuple[Shape, Shape, Shape]:
        """The smallest, usual and largest shape of an input in a profile."""
        fixed = tuple(size for size in info.dims if isinstance(size, int))
        if len(fixed) == len(info.dims):  # the profiles need not contain it
            return fixed, fixed, fixed
        engine = self.loaded[0]
        low, usual, high = engine.get_tensor_profile_shape(name, profile)
        return tuple(low), tuple(usual), tuple(high)

    def profiles_for(self, feeds: Arrays) -> list[int]:
        """The optimization profiles that take these inputs; none where an engine of fixed sizes does not."""
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
                raise EngineError(
                    problem, got=f"{array.min()} to {array.max()}", hint="values within the profile"
                )
            narrowed[name] = array.astype(np.int32)
        return narrowed

    def run_in_profile(self, feeds: Arrays, profile: int) -> dict[str, np.ndarray]:
        """Run in a chosen profile."""
        feeds = self.checked(feeds)
        first_admitting(self.profiles, _shapes(feeds), only=profile)
        return loops.presented_results(feeds, self._call(feeds, profile).run(feeds))

    def _run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        return loops.presented_results(feeds, self._usual_call(feeds).run(feeds))

    def _call_bytes(self, feeds: Arrays, results: Arrays) -> int:
        return self._usual_call(feeds).memory.nbytes

    def _usual_call(self, feeds: Arrays) -> Slot:
        """The call in the first profile that fits; with a cache in the tightest, as decode loops do."""
        cached = loops.engine_cache(self.inputs, self.engine_outputs) is not None
        return self._call(feeds, first_admitting(self.profiles, _shapes(feeds), tightest=cached))

    def _call(self, feeds: Arrays, profile: int) -> Slot:
        loops.check_room(feeds)
        shapes = _shapes(feeds)

        def new_call() -> Slot:
            with ExitStack() as owned:
                slot = owned.enter_context(Slot(BoundContext(self, profile, shapes), owns_context=True))
                slot.memory.upload(feeds)
                self._settle(slot)
                owned.pop_all()
                return slot

        return self._calls.get(profile, shapes, new_call)

    def _settle(self, slot: Slot, copies: Sequence[tuple[str, str, Copy2D]] = ()) -> None:
        """Make a call ready to be launched; one that cannot be recorded is launched as it is."""
        try:
            slot.settle(record=self.graph and self.why_no_graph is None, copies=copies)
        except NotCapturable as error:
            self.why_no_graph = str(error.got)
            slot.settle(record=False, copies=copies)  # once more: what was queued meanwhile did not run

    def decode_loop(self, *, B: int, T: int | None = None) -> DeviceLoop:
        """See `DecodingRunner`. On 8.6, the runner itself cannot run in a profile that the loop uses."""
        self._calls.close()
        return super().decode_loop(B=B, T=T)

    def most_tokens(self, B: int) -> int | None:
        """The longest call that a profile for B batch elements takes into an empty cache, if any."""
        fitting = [
            profile["x"][2][1]
            for profile in self.profiles
            # The batch is the first dimension of every input of a decode loop.
            if all(low[0] <= B <= high[0] for low, _, high in profile.values())
            and all(profile[name][0][2] == 0 for name in PAST if name in profile)
        ]
        return max(fitting, default=None)

    def launch(self, call: StepCall, *, again: bool) -> None:
        """Queue one call: the graph that was recorded of it, or the call itself, which is then recorded."""
        shapes = {name: call.tensors[name].shape for name in self.engine_inputs}
        addresses = {name: tensor.buffer.address for name, tensor in call.tensors.items()}
        profile = first_admitting(self.profiles, shapes, tightest=True)
        # One context takes all calls whose shapes change; it has no graphs that would be lost.
        fixed = {} if call.varies else shapes
        bound = self._steps.get(profile, fixed, lambda: BoundContext(self, profile, shapes))
        if any(bound.shapes[name] != shape for name, shape in shapes.items()):
            bound.reshape(shapes)
        wanted = {name: call.tensors[name].shape for name in self.engine_outputs}  # the memory that is there
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
        if again and self.graph and not call.varies and self.why_no_graph is None:
            self.stream.synchronize()
            try:
                bound.graphs[key] = bound.record(addresses)
            except NotCapturable as error:
                self.why_no_graph = str(error.got)

    def release(self) -> None:
        """Destroy the graphs and the contexts of a decode loop."""
        self._steps.close()

    @contextmanager
    def _prepare(self, feeds: Arrays, slots: int) -> Iterator[Prepared]:
        """Slots of the profile that `run` takes; nothing else may run on this runner meanwhile."""
        bound = self._usual_call(feeds).bound
        with ExitStack() as owned:
            prepared = [owned.enter_context(Slot(bound)) for _ in range(slots)]
            prepared[0].memory.upload(feeds)
            for slot in prepared:
                if slot is not prepared[0]:
                    slot.memory.copy_inputs(prepared[0].memory)
                self._settle(slot, copies=loops.cache_copies(feeds, self.engine_outputs))
            try:
                yield Prepared(
                    launch=lambda index: prepared[index].launch(),
                    results=lambda index: prepared[index].results(feeds),
                    memory_bytes=self.engine_bytes + sum(slot.memory.nbytes for slot in prepared),
                    why_no_graph=self.why_no_graph,
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
