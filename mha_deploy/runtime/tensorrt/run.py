"""Run an engine: profiles, execution contexts, buffers, CUDA graphs, the decode loop."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from mha_deploy.errors import DeployError
from mha_deploy.model.spec import CACHES, CACHES_OUT, PAST
from mha_deploy.runtime.cuda import UNWRITTEN, Buffer, Copy2D, CudaError, Graph, Stream, capture
from mha_deploy.runtime.decode import (
    Launcher,
    Repeated,
    StepCall,
    cache_copies,
    cache_form,
    check_room,
    presented_outputs,
    presented_results,
)
from mha_deploy.runtime.gpu import GpuRunner, Prepared
from mha_deploy.runtime.runner import Arrays, TensorInfo, check_kinds
from mha_deploy.runtime.tensorrt.loader import (
    aliased_outputs,
    io_tensors,
    load_engine,
    narrow_integers,
    profile_ranges,
    reasons,
    scratch_bytes,
)
from mha_deploy.runtime.tensorrt.log import collect
from mha_deploy.runtime.tensorrt.request import LargeTensor, Profile, Shape, refuse_large
from mha_deploy.runtime.tensorrt.versions import EngineError, TensorRT

# -- Which optimisation profile takes which shapes. Knows nothing of TensorRT ----------------------


def admitting(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> list[int]:
    """The profiles that take these shapes, in their order.

    Args:
        profiles: Smallest, usual and largest shape of every input, for each profile.
        shapes: The shape of every input.
    """
    return [index for index, profile in enumerate(profiles) if admits(profile, shapes)]


def admits(profile: Profile, shapes: Mapping[str, Shape]) -> bool:
    """Whether every input's shape is within the profile's range."""
    return all(_within(shapes[name], low, high) for name, (low, _, high) in profile.items())


def _within(shape: Shape, low: Shape, high: Shape) -> bool:
    return len(shape) == len(low) and all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True))


def first_admitting(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> int:
    """The first profile that takes these shapes.

    Raises:
        DeployError: None does; the error lists what each takes.
    """
    found = admitting(profiles, shapes)
    if not found:
        raise DeployError(
            "No optimisation profile of the engine takes these shapes.",
            got=_say(shapes),
            hint="; ".join(f"profile {index}: {describe(each)}" for index, each in enumerate(profiles)),
        )
    return found[0]


def tightest_admitting(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> int:
    """Of the profiles that take these shapes the one with the least room, as one for single tokens has.

    Raises:
        DeployError: None does.
    """
    first_admitting(profiles, shapes)
    return min(
        admitting(profiles, shapes),
        key=lambda index: sum(math.prod(high) for _, _, high in profiles[index].values()),
    )


def refuse_outside(profiles: Sequence[Profile], index: int, shapes: Mapping[str, Shape]) -> None:
    """Check that one profile exists and takes these shapes.

    Raises:
        DeployError: It does not.
    """
    if not 0 <= index < len(profiles):
        raise DeployError(
            "The engine has no such optimisation profile.", got=index, hint=f"0 to {len(profiles) - 1}"
        )
    if not admits(profiles[index], shapes):
        raise DeployError(
            f"The optimisation profile {index} does not take these shapes.",
            got=_say(shapes),
            hint=describe(profiles[index]),
        )


def describe(profile: Profile) -> str:
    """The ranges in words: `x 1..4×1..64×128`."""
    return ", ".join(
        f"{name} {'×'.join(_span(a, b) for a, b in zip(low, high, strict=True))}"
        for name, (low, _, high) in profile.items()
    )


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}..{high}"


def _say(shapes: Mapping[str, Shape]) -> str:
    return ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in shapes.items())


# -- The things used last, and no more of them than there is room for ------------------------------


class Closeable(Protocol):
    """What gives its resources back when it is closed."""

    def close(self) -> None:
        """Give them back."""


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value", bound=Closeable)


class Recent(Generic[Key, Value]):
    """Keeps the values used last; closes what it lets go.

    Args:
        most: How many to keep.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value of a key; made if it is not here, after room was made for it."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        while len(self._kept) >= self._most:
            self._let_go(next(iter(self._kept)))
        value = self._kept[key] = make()
        return value

    def drop(self, unwanted: Callable[[Key], bool]) -> None:
        """Let go of the values whose keys are unwanted."""
        for key in [key for key in self._kept if unwanted(key)]:
            self._let_go(key)

    def close(self) -> None:
        """Let go of everything."""
        self.drop(lambda key: True)

    def __len__(self) -> int:
        return len(self._kept)

    def _let_go(self, key: Key) -> None:
        self._kept.pop(key).close()


# -- One call with its shapes fixed: an execution context of its own, buffers, and a CUDA graph ----


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
                    f"{self._rt.title} {failure}.", got=f"{' '.join(str(cause).split())}: {reasons(messages)}"
                ) from cause

    def close(self) -> None:
        """Destroy the context: TensorRT does so when nobody refers to it."""
        self._context = None


class _Refused(Exception):
    """TensorRT returned a failure without an exception."""


def _check(done: bool, what: str) -> None:
    if not done:
        raise _Refused(what)


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
        self._copies: Sequence[tuple[str, str, Copy2D]] = ()
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

    def settle(self, *, record: bool, copies: Sequence[tuple[str, str, Copy2D]] = ()) -> None:
        """Run once on the inputs that are here, so that TensorRT does what it does only once; then record.

        Args:
            record: Whether later launches are those of a CUDA graph.
            copies: The copies of new KV-cache entries that belong to a launch, behind the engine's own work.
        """
        self.clear_outputs()
        self._copies = copies
        self._bound.enqueue(self._addresses)
        self._bound.stream.synchronize()
        if record:
            self._graph = self._bound.record(self._addresses, self._copy_entries)
            self._owned.callback(self._graph.close)
        self.clear_outputs()

    def _copy_entries(self) -> None:
        for cache, entries, place in self._copies:
            self._buffers[cache].copy_2d(self._buffers[entries], place, self._bound.stream)

    def clear_outputs(self) -> None:
        """Overwrite the outputs with what no result can be."""
        for name in self._bound.outputs:
            if name not in self._bound.aliases:
                self._buffers[name].fill(UNWRITTEN, self._bound.stream)

    def launch(self) -> None:
        """Queue one call, and do not wait."""
        if self._graph is None:
            self._bound.enqueue(self._addresses)
            self._copy_entries()
        else:
            self._graph.launch(self._bound.stream)

    def download(self) -> dict[str, np.ndarray]:
        """Wait, and copy the outputs to the host."""
        return self._downloaded(self._bound.outputs)

    def download_caches(self) -> dict[str, np.ndarray]:
        """Wait, and copy the caches into which launches copy new entries to the host."""
        written = {cache: self._bound.inputs[cache] for cache, _, _ in self._copies}
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


# -- Run an engine: TensorRT 8.6 to 11 and TensorRT-RTX, with nothing from PyTorch -----------------


class TensorRTRunner(GpuRunner):
    """An engine on the GPU of this process.

    Args:
        rt: The TensorRT that built it.
        plan: The serialised engine.
        host_code: Allow the runtime code that a version-compatible engine carries; it is executed.
        cuda_graph: Whether calls are recorded once and launched as a CUDA graph.
        in_place: From each output that a plugin can write into the memory of an input to that input.
        large_tensors: What TensorRT cannot hold at the largest sizes; calls that need it are refused.
        keep: For how many shapes contexts, buffers and graphs are kept; each context has scratch memory for
            the largest shapes of its profile.

    Raises:
        BackendUnavailable: There is no GPU, or TensorRT cannot start.
        EngineError: The engine cannot be loaded here.
    """

    profiles: tuple[Profile, ...]
    """What each optimisation profile takes: smallest, usual and largest shape of every input."""
    engine_outputs: Mapping[str, TensorInfo]
    """What the engine itself gives: `outputs`, but new rows where those are caches with the rows in them."""
    aliases: Mapping[str, str]
    """For each output that is written in place, the input whose memory it shares."""

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
        self._rt, self._plan_bytes, self._large_tensors = rt, len(plan), large_tensors
        self.name = f"{rt.backend} {rt.version}"
        self.graph = cuda_graph
        self._loaded = load_engine(rt, plan, host_code=host_code)
        engine = self._loaded.engine
        self.inputs, self.engine_outputs = io_tensors(rt, engine)
        self.outputs = presented_outputs(self.inputs, self.engine_outputs)
        self.aliases = {**(in_place or {}), **aliased_outputs(rt, engine, self.engine_outputs)}
        self.profiles = profile_ranges(engine, self.inputs)
        self._calls: Recent[_Key, BoundCall] = Recent(keep)
        self.stream = Stream()

    def profiles_for(self, feeds: Arrays) -> list[int]:
        """The optimisation profiles that take these inputs; none where an engine of fixed sizes does not."""
        fed = self._narrowed(feeds)
        check_kinds(self.inputs, fed)
        return admitting(self.profiles, _shapes(fed))

    def checked(self, feeds: Arrays) -> Arrays:
        """The inputs as the engine takes them; refused where their names, types or shapes are others."""
        return super().checked(self._narrowed(feeds))

    def _narrowed(self, feeds: Arrays) -> Arrays:
        """Before version 10, the parser narrows INT64 to INT32."""
        return feeds if self._rt.can.int64 else narrow_integers(feeds, self.inputs)

    def run_in_profile(self, feeds: Arrays, profile: int) -> dict[str, np.ndarray]:
        """Run in a profile of one's own choice.

        Raises:
            DeployError: The profile does not take these inputs.
        """
        feeds = self.checked(feeds)
        refuse_outside(self.profiles, profile, _shapes(feeds))
        return presented_results(feeds, self._call(feeds, profile).run(feeds))

    def _run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        return presented_results(feeds, self._usual_call(feeds).run(feeds))

    def _call_bytes(self, feeds: Arrays, results: Arrays) -> int:
        return self._usual_call(feeds).nbytes

    def _usual_call(self, feeds: Arrays) -> BoundCall:
        """The call in the first profile that fits; behind a cache in the tightest, as decode loops do."""
        cached = cache_form(self.inputs, self.engine_outputs) is not None
        choose = tightest_admitting if cached else first_admitting
        return self._call(feeds, choose(self.profiles, _shapes(feeds)))

    def _call(self, feeds: Arrays, profile: int) -> BoundCall:
        check_room(feeds)
        key = (profile, tuple(sorted(_shapes(feeds).items())))
        if not self._rt.can.shared_profiles:
            # Here a profile belongs to one context at a time, so the other shapes' has to go first.
            self._calls.drop(lambda kept: kept[0] == profile and kept != key)
        return self._calls.get(key, lambda: self._bind(feeds, profile))

    def _bind(self, feeds: Arrays, profile: int) -> BoundCall:
        return BoundCall(self.bind(_shapes(feeds), profile), feeds, record=self.graph)

    def bind(self, shapes: Mapping[str, Shape], profile: int) -> BoundContext:
        """A context of the caller's own, who closes it.

        Where a profile belongs to one context at a time, `release` those of this runner first.
        """
        return BoundContext(
            self._rt,
            self._loaded.engine,
            self.stream,
            profile=profile,
            shapes=shapes,
            inputs=self.inputs,
            outputs=self.engine_outputs,
            aliases=self.aliases,
            large_tensors=self._large_tensors,
        )

    def _launcher(self) -> TensorRTLauncher:
        self.release()  # where a profile belongs to one context at a time, the decode loop needs it
        return TensorRTLauncher(self, self._rt)

    def release(self) -> None:
        """Free the contexts and buffers that are kept for the next calls."""
        self._calls.close()

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
                    slot.copy_inputs(prepared[0])
                else:
                    slot.upload(feeds)
                slot.settle(record=self.graph, copies=cache_copies(feeds, self.engine_outputs))
                prepared.append(slot)
            try:
                yield Prepared(
                    launch=lambda index: prepared[index].launch(),
                    results=lambda index: _timed_results(feeds, prepared[index]),
                    memory_bytes=self._memory_bytes(prepared),
                )
            finally:
                self.stream.synchronize()  # the buffers must not go while a call is using them

    def _memory_bytes(self, slots: list[Slot]) -> int:
        """The engine, and the buffers of all calls."""
        return self.engine_bytes + sum(slot.nbytes for slot in slots)

    @property
    def engine_bytes(self) -> int:
        """Device memory of the scratch of one context, and the plan, whose size stands for the weights."""
        return scratch_bytes(self._rt, self._loaded.engine) + self._plan_bytes

    def close(self) -> None:
        """Free the contexts, the buffers, the engine and the stream."""
        self._calls.close()
        self.stream.close()
        vars(self).pop("_loaded", None)  # may be closed twice


def _timed_results(feeds: Arrays, slot: Slot) -> dict[str, np.ndarray]:
    """The results, with the caches of the device: rows that were not copied must not be put there here."""
    return presented_results(feeds, slot.download(), slot.download_caches())


def _shapes(feeds: Arrays) -> dict[str, Shape]:
    return {name: tuple(array.shape) for name, array in feeds.items()}


# -- TensorRT under a decode loop: contexts for the shapes of the steps, graphs for the steps that  ----

_Key = tuple[int, tuple[tuple[str, Shape], ...]]


class TensorRTLauncher(Launcher):
    """An engine, launched on tensors of the caller's.

    Where a profile belongs to one context at a time (8.6), the runner itself cannot run in a profile that the
    launcher uses.

    Args:
        runner: The loaded engine; it must outlive the launcher.
        rt: Its TensorRT.
    """

    def __init__(self, runner: TensorRTRunner, rt: TensorRT) -> None:
        self.name, self.gpu, self.stream = runner.name, runner.gpu, runner.stream
        self.graph, self.engine_bytes = runner.graph, runner.engine_bytes
        self.inputs, self.outputs = runner.inputs, runner.engine_outputs
        self.in_place = {out: runner.aliases.get(out) for out in CACHES_OUT} == dict(
            zip(CACHES_OUT, CACHES, strict=True)
        )
        self._runner, self._rt = runner, rt
        self._contexts: Recent[_Key, _StepContext] = Recent(2)

    def most_tokens(self, B: int) -> int | None:
        """The longest call that a profile for so many rows takes into an empty cache; None without one."""
        fitting = [profile for profile in self._runner.profiles if _begins(profile, B)]
        return max((profile["x"][2][1] for profile in fitting), default=None)

    def launch(self, call: StepCall, *, again: bool) -> None:
        """Queue one call: the graph that was recorded of it, or the call itself, which is then recorded."""
        step = self._context(call)
        graph = step.graph_of(call)
        if graph is not None:
            graph.launch(self.stream)
            return
        step.bound.enqueue(call.addresses)
        if again and self.graph and not call.varies:
            self.stream.synchronize()
            step.record(call)

    @contextmanager
    def repeated(self, call: StepCall, then: Callable[[], None], *, graph: bool) -> Iterator[Repeated]:
        """Run a call once, so that TensorRT does what it does only once; then record it, if asked to."""
        bound, addresses = self._context(call).bound, call.addresses

        def work() -> None:
            bound.enqueue(addresses)
            then()

        work()
        self.stream.synchronize()
        if not graph:
            yield Repeated(launch=work)
            return
        recorded = bound.record(addresses, then)
        try:
            yield Repeated(launch=lambda: recorded.launch(self.stream))
        finally:
            self.stream.synchronize()
            recorded.close()

    def _context(self, call: StepCall) -> _StepContext:
        shapes = call.shapes(self.inputs)
        profile = tightest_admitting(self._runner.profiles, shapes)
        # A context of calls whose shapes change takes them all; it has no graphs that would be lost.
        key = (profile, () if call.varies else tuple(sorted(shapes.items())))
        if not self._rt.can.shared_profiles:
            self._contexts.drop(lambda kept: kept[0] == profile and kept != key)
        found = self._contexts.get(key, lambda: _StepContext(self._runner.bind(shapes, profile)))
        found.fit(shapes)
        self._refuse_other_outputs(found.bound.shapes, call)
        return found

    def _refuse_other_outputs(self, shapes: Mapping[str, Shape], call: StepCall) -> None:
        """What the engine will write must be what there is memory for."""
        wanted = call.shapes(self.outputs)
        other = {name: shapes[name] for name in self.outputs if shapes[name] != wanted[name]}
        if other:
            raise EngineError(
                "The engine gives outputs of other shapes than a layer with a cache.",
                got=other,
                hint=", ".join(f"{name} {wanted[name]}" for name in other),
            )

    def close(self) -> None:
        """Destroy the graphs and the contexts."""
        self._contexts.close()


def _begins(profile: Profile, B: int) -> bool:
    """Whether a profile takes B rows that have no past; every input of a decode loop has the rows first."""
    takes_rows = all(low[0] <= B <= high[0] for low, _, high in profile.values())
    return takes_rows and all(profile[name][0][2] == 0 for name in PAST if name in profile)


class _StepContext:
    """A context, and the graphs that were recorded of its calls."""

    def __init__(self, bound: BoundContext) -> None:
        self.bound = bound
        self._graphs: dict[tuple[int, ...], Graph] = {}

    def fit(self, shapes: Mapping[str, Shape]) -> None:
        """Take other shapes."""
        if any(self.bound.shapes[name] != shape for name, shape in shapes.items()):
            self.bound.reshape(shapes)

    def graph_of(self, call: StepCall) -> Graph | None:
        """The graph that computes on these tensors, if there is one."""
        return self._graphs.get(tuple(call.addresses.values()))

    def record(self, call: StepCall) -> None:
        """Record a call that has run."""
        self._graphs[tuple(call.addresses.values())] = self.bound.record(call.addresses)

    def close(self) -> None:
        """Destroy the graphs, then the context that they use."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self.bound.close()
