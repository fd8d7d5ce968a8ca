"""The decode loop on a device: a layer that keeps its KV cache there from one call to the next."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from types import TracebackType

import numpy as np

from mha_deploy.bundle.cases import with_rows
from mha_deploy.errors import DeployError
from mha_deploy.graph.lower.cache import TOTAL_LENGTH
from mha_deploy.model.spec import CACHES, CACHES_OUT, LENGTHS, PAST, PRESENT
from mha_deploy.runtime.cuda import UNWRITTEN, Buffer, Gpu, RowCopy, Stream
from mha_deploy.runtime.runner import Arrays, TensorInfo, check_feeds
from mha_deploy.runtime.timing import Timing, TimingPlan, measure_latency

# -- What a layer with a cache takes and gives, and where the new rows go. Knows nothing of any ----

ROWS = ("key_rows", "value_rows")


class CacheForm(Enum):
    """What an engine does with new keys and values: the names of its cache inputs and outputs."""

    ROWS = (CACHES, ROWS)
    STATIC = (CACHES, CACHES_OUT)
    GROWING = (PAST, PRESENT)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names by which keys and values come in."""
        return self.value[0]

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names by which keys and values go out."""
        return self.value[1]


def cache_form(inputs: Iterable[str], outputs: Iterable[str]) -> CacheForm | None:
    """The form that a graph or an engine has; None for one without a cache."""
    taken, given = set(inputs), set(outputs)
    for form in CacheForm:
        if set(form.inputs) <= taken and set(form.outputs) <= given:
            return form
    return None


def written_in_place(inputs: Iterable[str], outputs: Iterable[str]) -> dict[str, str]:
    """For each static cache that goes out, the one that came in, where a runtime takes both in one place."""
    given = set(outputs)
    if cache_form(inputs, given) is CacheForm.STATIC and given == {"output", *CACHES_OUT}:
        return dict(zip(CACHES_OUT, CACHES, strict=True))
    return {}


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """The sizes of a cache, T the rows that it has room for."""

    B: int
    Hkv: int
    T: int
    D: int
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """All of it: [B, Hkv, T, D]."""
        return self.B, self.Hkv, self.T, self.D

    def first(self, length: int) -> tuple[int, int, int, int]:
        """A cache of another length: [B, Hkv, length, D]."""
        return self.B, self.Hkv, length, self.D

    def nbytes(self, length: int) -> int:
        """Size of a cache of this length."""
        return math.prod(self.first(length)) * self.dtype.itemsize


def row_copies(cache: CacheShape, lengths: np.ndarray, S: int) -> list[RowCopy]:
    """How [B, Hkv, S, D] new rows get to their places in the cache.

    Rows of one head lie side by side, so a head is one piece: one copy does where all lengths are equal, and
    otherwise one for each row of the batch.
    """
    number = cache.D * cache.dtype.itemsize
    whole = RowCopy(
        target=int(lengths[0]) * number,
        target_pitch=cache.T * number,
        source=0,
        source_pitch=S * number,
        width=S * number,
        rows=cache.B * cache.Hkv,
    )
    if (lengths == lengths[0]).all():
        return [whole]
    return [
        replace(
            whole,
            target=(b * cache.Hkv * cache.T + int(length)) * number,
            source=b * cache.Hkv * S * number,
            rows=cache.Hkv,
        )
        for b, length in enumerate(lengths)
    ]


@dataclass(frozen=True, kw_only=True)
class CacheCopy:
    """New rows on their way to a cache: the names of both, and the places."""

    cache: str
    rows: str
    place: RowCopy


def cache_copies(feeds: Arrays, outputs: Mapping[str, TensorInfo]) -> list[CacheCopy]:
    """What a call with these inputs leaves to be copied: nothing, unless its outputs are rows."""
    if not set(ROWS) <= set(outputs):
        return []
    B, Hkv, T, D = feeds[CACHES[0]].shape
    shape = CacheShape(B=B, Hkv=Hkv, T=T, D=D, dtype=feeds[CACHES[0]].dtype)
    places = row_copies(shape, feeds[LENGTHS], feeds["x"].shape[1])
    pairs = zip(CACHES, ROWS, strict=True)
    return [CacheCopy(cache=cache, rows=rows, place=place) for cache, rows in pairs for place in places]


def refuse_overflow(lengths: np.ndarray, S: int, T: int) -> None:
    """Refuse new rows that the cache has no room for; padding counts, since it is written, too.

    Raises:
        DeployError: They would be written behind the end.
    """
    if (lengths < 0).any() or (lengths + S > T).any():
        raise DeployError(
            "The new tokens do not fit into the cache.",
            got=f"lengths {lengths.tolist()}, {S} new tokens, {T} rows",
            hint=f"lengths from 0 to {T - S}, or a cache with more rows",
        )


def check_room(feeds: Arrays) -> None:
    """Refuse the inputs of a call that would write behind the end of its static cache.

    Raises:
        DeployError: They would.
    """
    if LENGTHS in feeds and CACHES[0] in feeds:
        refuse_overflow(feeds[LENGTHS], feeds["x"].shape[1], feeds[CACHES[0]].shape[2])


def total_length(lengths: np.ndarray, S: int, T: int) -> np.ndarray:
    """What GroupQueryAttention is told of the longest row: S means a prompt into an empty cache.

    Otherwise it is no more than an upper bound, and T serves every step.
    """
    return np.array(S if S > 1 and not lengths.any() else T, np.int32)


def presented_outputs(
    inputs: Mapping[str, TensorInfo], outputs: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """The outputs as the layer has them: a cache with the new rows in it where an engine gives the rows."""
    presented = {}
    for name, info in outputs.items():
        if name in ROWS:
            at = ROWS.index(name)
            presented[CACHES_OUT[at]] = inputs[CACHES[at]]
        else:
            presented[name] = info
    return presented


def presented_results(feeds: Arrays, results: Arrays, written: Arrays | None = None) -> dict[str, np.ndarray]:
    """The results by the names of `presented_outputs`.

    Args:
        feeds: The inputs of the call.
        results: What the engine gave.
        written: The caches that the call has written the rows into, by the names of the inputs. Into a copy
            of any other they are written here.
    """
    presented, written = dict(results), written or {}
    for cache, rows, out in zip(CACHES, ROWS, CACHES_OUT, strict=True):
        if rows in results:
            new = presented.pop(rows)
            held = written.get(cache)
            presented[out] = with_rows(feeds[cache], new, feeds[LENGTHS]) if held is None else held
    return presented


# -- Step through tokens with a cache that stays on the device -------------------------------------

Shape = tuple[int, ...]


class DecodeLoop(ABC):
    """A layer and the cache that it generates with; a context manager that holds the device's memory.

    Attributes:
        name: The backend, with its version.
        lengths: How many tokens each row of the batch has seen, int32 [B]; none at first.
        most_tokens: How many tokens of a row one call may bring; None where only the cache bounds them.
    """

    name: str
    lengths: np.ndarray
    most_tokens: int | None = None

    @abstractmethod
    def feed(self, x: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
        """Run the layer on S new tokens of every row, and keep their keys and values.

        Args:
            x: [B, S, E].
            counts: How many of the S tokens of each row are real, int32 [B], padding behind them; all unless
                given. The lengths advance by it. Padding needs room in the cache, too.

        Returns:
            The output [B, S, E]; what stands at padded tokens means nothing.

        Raises:
            DeployError: The tokens do not fit.
        """

    @abstractmethod
    def cache(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of keys and values, [B, Hkv, T, D]; of a growing cache [B, Hkv, length, D]."""

    @abstractmethod
    def time_step(self, length: int, plan: TimingPlan | None = None) -> Timing:
        """How long one new token of every row takes, all rows being `length` tokens long before it.

        By the device's own clock. Included: the whole layer, and what it takes to get the new keys and values
        into the cache. Not included: anything that comes from or goes to the host, since token and lengths
        are on the device before the clock starts; and the choice of the next token. The call is a CUDA graph
        where the form allows it: a static cache has one shape for all steps; a growing one has another at
        every step, and its calls are launched one by one.

        The calls share one cache, so weights and a cache that fit the second-level cache of the GPU come from
        there; from the size on where they do not, they come from memory, as in service. The token is the one
        fed last, zeros before the first; the cache is taken as it is, and left so. (The memory of a growing
        one is read as if it had that length: as many bytes, other numbers.)
        """

    @abstractmethod
    def close(self) -> None:
        """Give the device's memory back."""

    def __enter__(self) -> DecodeLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True)
class DeviceTensor:
    """An array on the device, at the start of its buffer, which may be larger."""

    buffer: Buffer
    shape: Shape
    dtype: np.dtype

    def download(self, stream: Stream) -> np.ndarray:
        """Wait, and copy it to the host."""
        return self.buffer.download(self.shape, self.dtype, stream)


@dataclass(frozen=True, kw_only=True)
class StepCall:
    """One call: every input and output, and where it is.

    Args:
        tensors: What is on the device, by name.
        on_host: The inputs that the runtime reads on the host.
        varies: Whether the next call has other shapes.
    """

    tensors: Mapping[str, DeviceTensor]
    on_host: Mapping[str, np.ndarray] = field(default_factory=dict)
    varies: bool = False

    def shapes(self, names: Iterable[str]) -> dict[str, Shape]:
        """The shapes of some of the tensors."""
        return {name: self.tensors[name].shape for name in names}

    @property
    def addresses(self) -> dict[str, int]:
        """Where the tensors are."""
        return {name: tensor.buffer.address for name, tensor in self.tensors.items()}


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """A call that is ready to be launched many times.

    Args:
        launch: Queues it, and does not wait.
        why_no_graph: Why it is no CUDA graph although it should be one.
    """

    launch: Callable[[], None]
    why_no_graph: str | None = None


class Launcher(ABC):
    """A loaded layer, seen as something that is launched on tensors of the caller's.

    Attributes:
        name: The backend, with its version.
        gpu: The GPU.
        stream: Where the calls go.
        graph: Whether a call that is repeated is a CUDA graph, where it can be one.
        inputs: All that the layer takes.
        outputs: What it gives.
        in_place: Whether a static cache that goes out is the memory of the one that came in.
        engine_bytes: Device memory besides the tensors, where that is known.
    """

    name: str
    gpu: Gpu
    stream: Stream
    graph: bool
    inputs: Mapping[str, TensorInfo]
    outputs: Mapping[str, TensorInfo]
    in_place: bool
    engine_bytes: int | None = None

    def most_tokens(self, B: int) -> int | None:
        """How many tokens of each of B rows one call may bring; None where nothing here bounds them."""
        return None

    @abstractmethod
    def launch(self, call: StepCall, *, again: bool) -> None:
        """Queue one call, and do not wait.

        Args:
            call: The call.
            again: Whether the same tensors will come again: the runtime may record the call for then.
        """

    @abstractmethod
    def repeated(
        self, call: StepCall, then: Callable[[], None], *, graph: bool
    ) -> AbstractContextManager[Repeated]:
        """Make a call ready to be launched many times; it has run when the block begins.

        Args:
            call: The call.
            then: Queues what belongs behind it.
            graph: Whether both should be one CUDA graph.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what the calls needed; the layer stays loaded."""


# -- Device memory of a decode loop: what belongs to one call, and how long it is kept -----------------


class Memory:
    """Tensors that live and die together.

    Attributes:
        nbytes: Their size.
    """

    def __init__(self) -> None:
        self._owned = ExitStack()
        self.nbytes = 0

    def tensor(self, shape: Shape, dtype: np.dtype) -> DeviceTensor:
        """A new tensor; what it holds is not defined."""
        buffer = Buffer(math.prod(shape) * dtype.itemsize)
        self._owned.callback(buffer.free)
        self.nbytes += buffer.nbytes
        return DeviceTensor(buffer=buffer, shape=shape, dtype=dtype)

    def close(self) -> None:
        """Free them all."""
        self._owned.close()


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What a call with S new tokens needs besides the cache.

    Args:
        memory: Its tensors.
        x: The tokens, zeros at first.
        output: What becomes of them.
        rows: New keys and values, where the layer gives them by themselves.
    """

    memory: Memory
    x: DeviceTensor
    output: DeviceTensor
    rows: tuple[DeviceTensor, ...]

    @property
    def S(self) -> int:
        """How many tokens there are."""
        return self.x.shape[1]


class Frames:
    """The frames in use: that of single tokens stays, any other goes when the next one is made.

    Args:
        launcher: The layer.
        cache: The sizes of its cache.
    """

    def __init__(self, launcher: Launcher, cache: CacheShape) -> None:
        self._launcher, self._cache = launcher, cache
        self._frames: dict[int, Frame] = {}
        self._x, self._output = launcher.inputs["x"], launcher.outputs["output"]
        E = self._x.dims[2]
        if not isinstance(E, int):
            raise DeployError("The width of the layer is not fixed.", got=self._x.dims)
        self._E = E

    def get(self, S: int) -> Frame:
        """The frame of a call with S new tokens."""
        if S not in self._frames:
            for other in [other for other in self._frames if other != 1]:
                self._frames.pop(other).memory.close()
            self._frames[S] = self._new(S)
        return self._frames[S]

    def _new(self, S: int) -> Frame:
        memory, cache = Memory(), self._cache
        shape = (cache.B, S, self._E)
        try:
            x = memory.tensor(shape, self._x.dtype)
            x.buffer.fill(0, self._launcher.stream)
            output = memory.tensor(shape, self._output.dtype)
            given = [name for name in ROWS if name in self._launcher.outputs]
            rows = tuple(memory.tensor(cache.first(S), cache.dtype) for _ in given)
            return Frame(memory=memory, x=x, output=output, rows=rows)
        except BaseException:
            memory.close()
            raise

    def close(self) -> None:
        """Free them all."""
        for frame in self._frames.values():
            frame.memory.close()
        self._frames.clear()


# -- The decode loops on a device: what is in memory, and how the new rows come into the cache ---------

Pair = tuple[DeviceTensor, DeviceTensor]

_VARIES = "a growing cache has another shape at every step"


class DeviceDecodeLoop(DecodeLoop):
    """What all forms share.

    Args:
        launcher: The layer.
        cache: The sizes of its cache.
    """

    has_spare = False
    """Whether there is a second cache that the calls write."""
    varies = False
    """Whether every call has other shapes."""

    def __init__(self, launcher: Launcher, cache: CacheShape) -> None:
        self.name, self.most_tokens = launcher.name, launcher.most_tokens(cache.B)
        self.lengths = np.zeros(cache.B, np.int32)
        self._launcher, self._cache, self._stream = launcher, cache, launcher.stream
        self._memory, self._frames = Memory(), Frames(launcher, cache)
        try:
            self._held = self._new_cache()
            self._spare = self._new_cache() if self.has_spare else self._held
            self._lengths = self._memory.tensor((cache.B,), np.dtype(np.int32))
        except BaseException:
            self._memory.close()
            raise

    def _new_cache(self) -> Pair:
        keys, values = (self._memory.tensor(self._cache.shape, self._cache.dtype) for _ in range(2))
        for tensor in (keys, values):
            tensor.buffer.fill(0, self._stream)
        return keys, values

    def feed(self, x: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
        """Run the layer on new tokens: they and the lengths go to the device, the output comes back."""
        check_feeds({"x": self._launcher.inputs["x"]}, {"x": x})
        B, S = x.shape[:2]
        if B != self._cache.B or not S:
            raise DeployError("The tokens have another shape.", got=x.shape, hint=f"{self._cache.B} rows")
        advance = self._checked_counts(counts, S)
        refuse_overflow(self.lengths, S, self._cache.T)
        frame, tokens = self._frames.get(S), np.ascontiguousarray(x)
        frame.x.buffer.upload(tokens, self._stream)
        self._upload_lengths(self.lengths)
        for tensor in (frame.output, *frame.rows):
            tensor.buffer.fill(UNWRITTEN, self._stream)
        self._launcher.launch(self._call(frame, self.lengths), again=S == 1)
        self._keep(frame, self.lengths)
        output = frame.output.download(self._stream)
        self._advanced()
        self.lengths = self.lengths + advance
        return output

    def _checked_counts(self, counts: np.ndarray | None, S: int) -> np.ndarray:
        if counts is None:
            return np.full(self._cache.B, S, np.int32)
        if counts.shape != (self._cache.B,) or (counts < 0).any() or (counts > S).any():
            raise DeployError("The counts are not those of these tokens.", got=counts, hint=f"0 to {S} a row")
        return counts.astype(np.int32)

    def _upload_lengths(self, lengths: np.ndarray) -> None:
        if LENGTHS in self._launcher.inputs:
            self._lengths.buffer.upload(lengths, self._stream)

    def _call(self, frame: Frame, lengths: np.ndarray) -> StepCall:
        tensors = {"x": frame.x, "output": frame.output, **self._cache_tensors(frame, lengths)}
        on_host = {}
        if TOTAL_LENGTH in self._launcher.inputs:
            on_host[TOTAL_LENGTH] = total_length(lengths, frame.S, self._cache.T)
        return StepCall(tensors=tensors, on_host=on_host, varies=self.varies)

    def _cache_tensors(self, frame: Frame, lengths: np.ndarray) -> dict[str, DeviceTensor]:
        """The cache as it goes in and comes out of a call at these lengths."""
        inputs = {LENGTHS: self._lengths, **dict(zip(CACHES, self._held, strict=True))}
        return {**inputs, **dict(zip(CACHES_OUT, self._spare, strict=True))}

    def _keep(self, frame: Frame, lengths: np.ndarray) -> None:
        """Queue what gets the new rows into the cache."""

    def _advanced(self) -> None:
        """The call is done: what it wrote is the cache now."""
        self._held, self._spare = self._spare, self._held

    def cache(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of the keys and values, all T rows."""
        keys, values = (tensor.download(self._stream) for tensor in self._held)
        return keys, values

    def time_step(self, length: int, plan: TimingPlan | None = None) -> Timing:
        """How long one new token of every row takes; see `DecodeLoop.time_step`."""
        lengths = np.full(self._cache.B, length, np.int32)
        refuse_overflow(lengths, 1, self._cache.T)
        frame, launcher = self._frames.get(1), self._launcher
        wanted = launcher.graph and not self.varies
        call = self._call(frame, lengths)
        with self._undisturbed(lengths):
            self._upload_lengths(lengths)
            with launcher.repeated(call, lambda: self._keep(frame, lengths), graph=wanted) as repeated:
                why = repeated.why_no_graph
                frame.output.buffer.fill(UNWRITTEN, self._stream)
                timing = measure_latency(
                    lambda slot: repeated.launch(),
                    1,
                    self._stream,
                    launcher.gpu,
                    plan or TimingPlan(),
                    graph=wanted and why is None,
                )
                output = frame.output.download(self._stream)
        if launcher.graph and self.varies:
            why = _VARIES
        memory = self._memory_bytes(frame)
        return replace(timing, results=({"output": output},), memory_bytes=memory, why_no_graph=why)

    @contextmanager
    def _undisturbed(self, lengths: np.ndarray) -> Iterator[None]:
        """Put the rows back that calls at these equal lengths overwrite, also where one of them fails."""
        (copy,) = row_copies(self._cache, lengths, 1)
        memory = Memory()
        try:
            saved = [memory.tensor(self._cache.first(1), self._cache.dtype) for _ in self._held]
            for safe, tensor in zip(saved, self._held, strict=True):
                safe.buffer.copy_rows(tensor.buffer, copy.back(), self._stream)
            try:
                yield
            finally:
                for safe, tensor in zip(saved, self._held, strict=True):
                    tensor.buffer.copy_rows(safe.buffer, copy, self._stream)
        finally:
            self._stream.synchronize()
            memory.close()

    def _memory_bytes(self, frame: Frame) -> int | None:
        """Caches, the tensors of a call with one token, and the engine."""
        engine = self._launcher.engine_bytes
        return None if engine is None else engine + self._memory.nbytes + frame.memory.nbytes

    def close(self) -> None:
        """Free the graphs, then the memory that they compute on; the layer stays loaded."""
        self._stream.synchronize()
        self._launcher.close()
        self._frames.close()
        self._memory.close()


class InPlaceDecodeLoop(DeviceDecodeLoop):
    """The layer writes into the cache: what comes out is what went in."""


class CopyingDecodeLoop(DeviceDecodeLoop):
    """The layer writes another cache."""

    has_spare = True


class EntriesDecodeLoop(DeviceDecodeLoop):
    """The layer gives the new rows: they go to their places behind the call."""

    def _cache_tensors(self, frame: Frame, lengths: np.ndarray) -> dict[str, DeviceTensor]:
        inputs = {LENGTHS: self._lengths, **dict(zip(CACHES, self._held, strict=True))}
        return {**inputs, **dict(zip(ROWS, frame.rows, strict=True))}

    def _keep(self, frame: Frame, lengths: np.ndarray) -> None:
        for tensor, rows in zip(self._held, frame.rows, strict=True):
            for copy in row_copies(self._cache, lengths, frame.S):
                tensor.buffer.copy_rows(rows.buffer, copy, self._stream)


class DynamicDecodeLoop(DeviceDecodeLoop):
    """Each call reads the past of one pair of buffers, and writes past and new rows into the other."""

    has_spare = True
    varies = True

    def _checked_counts(self, counts: np.ndarray | None, S: int) -> np.ndarray:
        advance = super()._checked_counts(counts, S)
        if (advance != S).any():
            raise DeployError(
                "The rows of a growing cache have one length.",
                got=f"counts {advance.tolist()}",
                hint=f"{S} each",
            )
        return advance

    def _cache_tensors(self, frame: Frame, lengths: np.ndarray) -> dict[str, DeviceTensor]:
        past = int(lengths[0])
        inputs = {name: self._cut(tensor, past) for name, tensor in zip(PAST, self._held, strict=True)}
        outputs = zip(PRESENT, self._spare, strict=True)
        return {**inputs, **{name: self._cut(tensor, past + frame.S) for name, tensor in outputs}}

    def _cut(self, tensor: DeviceTensor, length: int) -> DeviceTensor:
        """The start of a buffer as a cache of another length."""
        return replace(tensor, shape=self._cache.first(length))

    def cache(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of the keys and values, as many rows as there are."""
        length = int(self.lengths[0])
        keys, values = (self._cut(tensor, length).download(self._stream) for tensor in self._held)
        return keys, values

    @contextmanager
    def _undisturbed(self, lengths: np.ndarray) -> Iterator[None]:
        """Nothing to put back: the calls write the spare buffers."""
        yield


# -- Which loop a loaded layer gets, by the form of its cache; and layers that get none ---------


def open_decode_loop(launcher: Launcher, *, B: int, T: int | None = None) -> DecodeLoop:
    """Step through tokens with a loaded layer; the launcher is closed with the decode loop.

    Args:
        launcher: The layer.
        B: Rows of the batch.
        T: Rows of a growing cache at its longest. A static cache has rows of its own.

    Raises:
        DeployError: The layer has no cache, or other inputs besides, or another size.
    """
    with ExitStack() as owned:
        owned.callback(launcher.close)
        form = cache_form(launcher.inputs, launcher.outputs)
        if form is None:
            raise DeployError("This layer has no cache to step with.", got=sorted(launcher.outputs))
        _refuse_other_tensors(launcher, form)
        loop = _kind(form, launcher)(launcher, _cache_shape(launcher, form, B, T))
        owned.pop_all()
        return loop


def _kind(form: CacheForm, launcher: Launcher) -> type[DeviceDecodeLoop]:
    if form is CacheForm.STATIC:
        return InPlaceDecodeLoop if launcher.in_place else CopyingDecodeLoop
    return EntriesDecodeLoop if form is CacheForm.ROWS else DynamicDecodeLoop


def _refuse_other_tensors(launcher: Launcher, form: CacheForm) -> None:
    lengths = () if form is CacheForm.GROWING else (LENGTHS,)
    wanted = {"x", "output", *lengths, *form.inputs, *form.outputs}
    other = wanted ^ ({*launcher.inputs, *launcher.outputs} - {TOTAL_LENGTH})
    if other:
        raise DeployError(
            "The layer has other inputs and outputs than one that is stepped through.", got=sorted(other)
        )
    tensors = {**launcher.inputs, **launcher.outputs}
    kinds = {name: str(tensors[name].dtype) for name in (*form.inputs, *form.outputs)}
    if len(set(kinds.values())) > 1:
        raise DeployError("Keys and values come in and go out in different types.", got=kinds)


def _cache_shape(launcher: Launcher, form: CacheForm, B: int, T: int | None) -> CacheShape:
    info = launcher.inputs[form.inputs[0]]
    batch, Hkv, rows, D = info.dims
    T = T if T is not None or not isinstance(rows, int) else rows
    if T is None:
        raise DeployError("How long the cache may grow is not said.", got="T = None", hint="T, its rows")
    for size, dim in ((B, batch), (T, rows)):
        if isinstance(dim, int) and size != dim:
            raise DeployError(
                "The layer has a cache of another size.", got=f"B={B}, T={T}", hint=str(info.dims)
            )
    if not isinstance(Hkv, int) or not isinstance(D, int) or B < 1:
        raise DeployError("The cache has no fixed heads, or no rows.", got=f"B={B}, {info.dims}")
    return CacheShape(B=B, Hkv=Hkv, T=T, D=D, dtype=info.dtype)
