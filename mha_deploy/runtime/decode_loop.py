"""The decode loop on a device: a layer that keeps its KV cache there from one call to the next."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

import numpy as np

from mha_deploy.bundle.cases import with_entries
from mha_deploy.errors import DeployError
from mha_deploy.graph.lower.cache import TOTAL_LENGTH
from mha_deploy.model.spec import CACHES, CACHES_OUT, LENGTHS, PAST, PRESENT, refuse_overflow
from mha_deploy.runtime.cuda import UNWRITTEN, Buffer, Copy2D, Stream
from mha_deploy.runtime.gpu import GpuRunner
from mha_deploy.runtime.runner import Arrays, Closing, TensorInfo, check_feeds

# -- The forms of a KV cache, and where new entries go ---------------------------------------------

ENTRIES = ("key_entries", "value_entries")


class EngineCache(Enum):
    """What an engine does with new keys and values: the names of its cache inputs and outputs."""

    ENTRIES = (CACHES, ENTRIES)  # a preallocated cache, of which the engine returns the new entries only
    PREALLOCATED = (CACHES, CACHES_OUT)
    DYNAMIC = (PAST, PRESENT)

    def __init__(self, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        self.inputs, self.outputs = inputs, outputs


def engine_cache(inputs: Iterable[str], outputs: Iterable[str]) -> EngineCache | None:
    """The form of the cache of a graph or an engine; None without a cache."""
    taken, returned = set(inputs), set(outputs)
    for form in EngineCache:
        if taken.issuperset(form.inputs) and returned.issuperset(form.outputs):
            return form
    return None


def written_in_place(inputs: Iterable[str], outputs: Iterable[str]) -> dict[str, str]:
    """From each output of a preallocated cache to its input, for runtimes that bind both to one buffer."""
    returned = set(outputs)
    if engine_cache(inputs, returned) is EngineCache.PREALLOCATED and returned == {"output", *CACHES_OUT}:
        return dict(zip(CACHES_OUT, CACHES, strict=True))
    return {}


class CacheShape(NamedTuple):
    """The sizes of a cache with room for T entries, and its type."""

    B: int
    Hkv: int
    T: int
    D: int
    dtype: np.dtype

    def first(self, length: int) -> tuple[int, int, int, int]:
        """The shape of a cache of another length: [B, Hkv, length, D]."""
        return self.B, self.Hkv, length, self.D


def entry_copies(cache: CacheShape, lengths: np.ndarray, S: int) -> list[Copy2D]:
    """How [B, Hkv, S, D] new entries get to their places; one copy serves batch elements of equal lengths."""
    entry = cache.D * cache.dtype.itemsize
    together = bool((lengths == lengths[0]).all())
    return [
        Copy2D(
            target=(b * cache.Hkv * cache.T + int(length)) * entry,
            target_pitch=cache.T * entry,
            source=b * cache.Hkv * S * entry,
            source_pitch=S * entry,
            width=S * entry,
            height=cache.Hkv * (cache.B if together else 1),
        )
        for b, length in enumerate(lengths[:1] if together else lengths)
    ]


def cache_copies(feeds: Arrays, outputs: Iterable[str]) -> list[tuple[str, str, Copy2D]]:
    """The copies that a call needs behind it: cache, new entries and places. None for other forms."""
    if not set(ENTRIES) <= set(outputs):
        return []
    B, Hkv, T, D = feeds[CACHES[0]].shape
    shape = CacheShape(B, Hkv, T, D, feeds[CACHES[0]].dtype)
    places = entry_copies(shape, feeds[LENGTHS], feeds["x"].shape[1])
    return [(cache, new, place) for cache, new in zip(CACHES, ENTRIES, strict=True) for place in places]


def check_room(feeds: Arrays) -> None:
    """Refuse the inputs of a call that would write behind the end of its preallocated cache."""
    if {"x", LENGTHS, CACHES[0]} <= feeds.keys():
        refuse_overflow(feeds[LENGTHS], feeds["x"].shape[1], feeds[CACHES[0]].shape[2])


def total_length(lengths: np.ndarray, S: int, T: int) -> np.ndarray:
    """The total length for GroupQueryAttention: S for a prompt into an empty cache, else an upper bound."""
    return np.array(S if S > 1 and not lengths.any() else T, np.int32)


def presented_outputs(
    inputs: Mapping[str, TensorInfo], outputs: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """The outputs of the layer: whole caches where an engine returns only the new entries."""
    presented = dict(outputs)
    for cache, new, out in zip(CACHES, ENTRIES, CACHES_OUT, strict=True):
        if presented.pop(new, None) is not None:
            presented[out] = inputs[cache]
    return presented


def presented_results(feeds: Arrays, results: Arrays, written: Arrays | None = None) -> dict[str, np.ndarray]:
    """The results of an engine by the names of `presented_outputs`.

    New entries are written into a copy of their cache, but for those that were `written` on the device.
    """
    presented, written = dict(results), written or {}
    for cache, new, out in zip(CACHES, ENTRIES, CACHES_OUT, strict=True):
        if new in results:
            entries = presented.pop(new)
            whole = written.get(cache)
            presented[out] = with_entries(feeds[cache], entries, feeds[LENGTHS]) if whole is None else whole
    return presented


# -- One call on tensors of the device, and a runtime that launches it -----------------------------

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DeviceTensor:
    """An array on the device, at the start of its buffer, which may be larger."""

    buffer: Buffer
    shape: Shape
    dtype: np.dtype

    def download(self, stream: Stream) -> np.ndarray:
        """Wait, and copy it to the host."""
        return self.buffer.download(self.shape, self.dtype, stream)


class CallTensors(Closing):
    """The inputs and outputs of one call, freed together; by `aliases`, an output is an input's memory."""

    def __init__(
        self,
        inputs: Mapping[str, tuple[Shape, np.dtype]],
        outputs: Mapping[str, tuple[Shape, np.dtype]],
        aliases: Mapping[str, str],
        stream: Stream,
    ) -> None:
        self._inputs, self._stream, self.nbytes = tuple(inputs), stream, 0
        self._own_outputs = [name for name in outputs if name not in aliases]
        self.tensors: dict[str, DeviceTensor] = {}
        with ExitStack() as owned:
            for name, (shape, dtype) in (*inputs.items(), *outputs.items()):
                if name in aliases and name in outputs:
                    buffer = self.tensors[aliases[name]].buffer
                else:
                    buffer = Buffer(math.prod(shape) * dtype.itemsize)
                    owned.callback(buffer.free)
                    self.nbytes += buffer.nbytes
                self.tensors[name] = DeviceTensor(buffer=buffer, shape=shape, dtype=dtype)
            self._owned = owned.pop_all()

    def close(self) -> None:
        """Free the memory."""
        self._owned.close()

    def upload(self, feeds: Arrays) -> None:
        """Copy the inputs to the device, and wait for it."""
        arrays = {name: np.ascontiguousarray(feeds[name]) for name in self._inputs}
        for name, array in arrays.items():
            self.tensors[name].buffer.upload(array, self._stream)
        self._stream.synchronize()

    def copy_inputs(self, other: CallTensors) -> None:
        """Take the inputs of another call."""
        for name in self._inputs:
            self.tensors[name].buffer.copy_from(other.tensors[name].buffer, self._stream)

    def clear_outputs(self) -> None:
        """Overwrite the outputs with what no result can be."""
        for name in self._own_outputs:
            self.tensors[name].buffer.fill(UNWRITTEN, self._stream)

    def download(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Wait, and copy tensors to the host."""
        self._stream.synchronize()
        return {name: self.tensors[name].download(self._stream) for name in names}


@dataclass(frozen=True, kw_only=True)
class StepCall:
    """One call: every input and output on the device, and the inputs that the runtime reads on the host."""

    tensors: Mapping[str, DeviceTensor]
    on_host: Mapping[str, np.ndarray] = field(default_factory=dict)
    varies: bool = False  # whether the next call has other shapes


class DecodingRunner(GpuRunner):
    """A runner that is launched on tensors of a decode loop, too."""

    engine_inputs: Mapping[str, TensorInfo]  # with those that are computed here
    engine_outputs: Mapping[str, TensorInfo]  # new KV-cache entries where `outputs` has whole caches
    aliases: Mapping[str, str]  # for each output that is written in place, the input whose memory it shares
    can_decode = True

    def most_tokens(self, B: int) -> int | None:
        """How many tokens of each of B batch elements one call takes; None: as many as the cache."""
        return None

    @abstractmethod
    def launch(self, call: StepCall, *, again: bool) -> None:
        """Queue one call, and do not wait; with `again` the same tensors will come again."""

    @abstractmethod
    def release(self) -> None:
        """Free what the launches needed; the layer stays loaded."""

    def decode_loop(self, *, B: int, T: int | None = None) -> DeviceLoop:
        """The decode loop of the loaded layer for B batch elements; close it before the runner.

        T is the most entries of a dynamic cache; a preallocated cache has its own number. A layer without a
        cache, with other inputs besides, or of another size is refused.
        """
        tensors = {**self.engine_inputs, **self.engine_outputs}
        form = engine_cache(self.engine_inputs, self.engine_outputs)
        if form is None:
            raise DeployError(
                "This layer has no cache to decode with.",
                got=sorted(self.engine_outputs),
                hint="a model with a KV cache",
            )
        lengths = () if form is EngineCache.DYNAMIC else (LENGTHS,)
        expected = {"x", "output", *lengths, *form.inputs, *form.outputs}
        other = expected ^ ({*tensors} - {TOTAL_LENGTH})
        if other:
            raise DeployError(
                "The inputs and outputs are not those of a decode loop.",
                got=sorted(other),
                hint="a model with one input and its KV cache",
            )
        E = tensors["x"].dims[2]
        if not isinstance(E, int):
            raise DeployError(
                "The width of the layer is not fixed.",
                got=tensors["x"].dims,
                hint="export it with a fixed width",
            )
        dtypes = {name: str(tensors[name].dtype) for name in (*form.inputs, *form.outputs)}
        if len(set(dtypes.values())) > 1:
            raise DeployError(
                "Keys and values come in and go out in different types.", got=dtypes, hint="export it again"
            )
        info = tensors[form.inputs[0]]
        batch, Hkv, entries, D = info.dims
        T = entries if T is None and isinstance(entries, int) else T
        if T is None:
            problem = "The maximum length of the dynamic KV cache is missing."
            raise DeployError(problem, got="T = None", hint="give T")
        if any(isinstance(dim, int) and size != dim for size, dim in ((B, batch), (T, entries))):
            got = f"B={B}, T={T}"
            raise DeployError("The layer has a cache of another size.", got=got, hint=str(info.dims))
        if not isinstance(Hkv, int) or not isinstance(D, int) or B < 1:
            got = f"B={B}, {info.dims}"
            raise DeployError(
                "The cache has no fixed heads, or no batch elements.",
                got=got,
                hint="export it again with fixed heads",
            )
        return DeviceLoop(self, form, CacheShape(B, Hkv, T, D, info.dtype), E)


class DeviceLoop(Closing):
    """A layer and the KV cache that it generates with, on the device; a context manager.

    One pair of buffers holds a cache that is updated in place. A layer that writes another cache gets a
    second pair, and they are swapped after every call; so are those of a dynamic cache, which grows in them.
    """

    name: str  # the runtime, with its version
    lengths: np.ndarray  # tokens of each batch element so far, int32 [B]
    most_tokens: int | None  # of a batch element in one call; None where only the cache limits them

    def __init__(self, runner: DecodingRunner, form: EngineCache, cache: CacheShape, E: int) -> None:
        self.name, self.most_tokens = runner.name, runner.most_tokens(cache.B)
        self.lengths = np.zeros(cache.B, np.int32)
        self._varies = form is EngineCache.DYNAMIC
        self._runner, self._form, self._cache, self._E = runner, form, cache, E
        self._stream = runner.stream
        self._frames: dict[int, CallTensors] = {}
        in_place = [runner.aliases.get(out) for out in CACHES_OUT] == list(CACHES)
        swapped = self._varies or (form is EngineCache.PREALLOCATED and not in_place)
        whole, numbers = (cache.first(cache.T), cache.dtype), range(1 + swapped)
        caches = {f"{name} {number}": whole for number in numbers for name in CACHES}
        lengths = {LENGTHS: ((cache.B,), np.dtype(np.int32))}
        self._memory = CallTensors({**caches, **lengths}, {}, {}, self._stream)
        tensors = self._memory.tensors
        pairs = [tuple(tensors[f"{name} {number}"] for name in CACHES) for number in numbers]
        self._held, self._spare = pairs[0], pairs[-1]
        self._lengths = tensors[LENGTHS]
        try:
            for name in caches:
                tensors[name].buffer.fill(0, self._stream)
        except BaseException:
            self._memory.close()
            raise

    def feed(self, x: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
        """Run the layer on new tokens [B, S, E], keep their keys and values, and return the output.

        `counts`, int32 [B], are the real tokens of each batch element, before its padding; default: all. The
        lengths advance by it. Padding needs room in the cache, too, and its output is undefined.
        """
        check_feeds({"x": self._runner.engine_inputs["x"]}, {"x": x})
        B, S = x.shape[:2]
        if B != self._cache.B or not S:
            hint = f"{self._cache.B} batch elements, each with at least one token"
            raise DeployError("The tokens have the wrong shape.", got=x.shape, hint=hint)
        advance = np.full(B, S, np.int32) if counts is None else counts.astype(np.int32)
        if advance.shape != (B,) or (advance < 0).any() or (advance > S).any():
            hint = f"0 to {S} per batch element"
            raise DeployError("The counts do not match the tokens.", got=counts, hint=hint)
        if self._varies and (advance != S).any():
            problem, got = "The batch elements of a dynamic KV cache have one length.", advance.tolist()
            raise DeployError(problem, got=f"counts {got}", hint=f"{S} each")
        refuse_overflow(self.lengths, S, self._cache.T)
        frame, tokens = self._frame(S), np.ascontiguousarray(x)
        frame.tensors["x"].buffer.upload(tokens, self._stream)
        if LENGTHS in self._runner.engine_inputs:
            self._lengths.buffer.upload(self.lengths, self._stream)
        frame.clear_outputs()
        self._runner.launch(self._call(frame, S), again=S == 1)
        if self._form is EngineCache.ENTRIES:
            for tensor, entries in zip(self._held, ENTRIES, strict=True):
                for copy in entry_copies(self._cache, self.lengths, S):
                    tensor.buffer.copy_2d(frame.tensors[entries].buffer, copy, self._stream)
        output = frame.tensors["output"].download(self._stream)
        self._held, self._spare = self._spare, self._held
        self.lengths = self.lengths + advance
        return output

    def _frame(self, S: int) -> CallTensors:
        """The tensors of a call with S tokens besides the cache; those of single tokens are kept."""
        if S not in self._frames:
            for other in [other for other in self._frames if other != 1]:
                self._frames.pop(other).close()
            shape: Shape = (self._cache.B, S, self._E)
            outputs = {"output": (shape, self._runner.engine_outputs["output"].dtype)}
            if self._form is EngineCache.ENTRIES:
                outputs |= {name: (self._cache.first(S), self._cache.dtype) for name in ENTRIES}
            inputs = {"x": (shape, self._runner.engine_inputs["x"].dtype)}
            frame = self._frames[S] = CallTensors(inputs, outputs, {}, self._stream)
            frame.tensors["x"].buffer.fill(0, self._stream)
        return self._frames[S]

    def _call(self, frame: CallTensors, S: int) -> StepCall:
        """The next call: the tokens, and the cache as it goes in and comes out."""
        past, tensors = int(self.lengths[0]), dict(frame.tensors)
        read, written = self._held, self._spare
        if self._varies:
            read, written = self._cut(read, past), self._cut(written, past + S)
        else:
            tensors[LENGTHS] = self._lengths
        tensors |= zip(self._form.inputs, read, strict=True)
        if self._form is not EngineCache.ENTRIES:
            tensors |= zip(self._form.outputs, written, strict=True)
        on_host = {}
        if TOTAL_LENGTH in self._runner.engine_inputs:
            on_host[TOTAL_LENGTH] = total_length(self.lengths, S, self._cache.T)
        return StepCall(tensors=tensors, on_host=on_host, varies=self._varies)

    def _cut(self, tensors: Iterable[DeviceTensor], length: int) -> tuple[DeviceTensor, ...]:
        """The first entries of the buffers, as caches of that length."""
        return tuple(replace(tensor, shape=self._cache.first(length)) for tensor in tensors)

    def cache(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of keys and values, [B, Hkv, T, D]; of a dynamic cache [B, Hkv, length, D]."""
        held = self._cut(self._held, int(self.lengths[0]) if self._varies else self._cache.T)
        keys, values = (tensor.download(self._stream) for tensor in held)
        return keys, values

    def close(self) -> None:
        """Free the graphs, then the memory that they compute on; the layer stays loaded."""
        self._stream.synchronize()
        self._runner.release()
        for frame in self._frames.values():
            frame.close()
        self._frames.clear()
        self._memory.close()
