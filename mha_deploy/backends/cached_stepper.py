"""The steppers on a device: what is in memory, and how the new rows come into the cache.

    rows      the layer gives the new rows, and they are copied to their places
    in place  the layer writes them into the cache that it was given
    copied    the layer writes a second cache, which is the first one of the next step
    growing   the same, and the second cache is longer

A cache begins empty, and full of zeros: what is masked out is still multiplied by 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from mha_deploy.backends.cache_rows import ROWS, CacheShape, refuse_overflow, row_copies, total_length
from mha_deploy.backends.cuda import UNWRITTEN
from mha_deploy.backends.runner import check_feeds
from mha_deploy.backends.step_memory import Frame, Frames, Memory
from mha_deploy.backends.stepper import DeviceTensor, Launcher, StepCall, Stepper
from mha_deploy.backends.timing import Timing, TimingPlan, measure_latency
from mha_deploy.errors import DeployError
from mha_deploy.graph.lower.cache_form import TOTAL_LENGTH
from mha_deploy.spec_parts import CACHES, CACHES_OUT, LENGTHS, PAST, PRESENT

Pair = tuple[DeviceTensor, DeviceTensor]

_VARIES = "a growing cache has another shape at every step"


class CachedStepper(Stepper):
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
        """How long one new token of every row takes; see `Stepper.time_step`."""
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


class InPlaceStepper(CachedStepper):
    """The layer writes into the cache: what comes out is what went in."""


class CopiedStepper(CachedStepper):
    """The layer writes another cache."""

    has_spare = True


class RowsStepper(CachedStepper):
    """The layer gives the new rows: they go to their places behind the call."""

    def _cache_tensors(self, frame: Frame, lengths: np.ndarray) -> dict[str, DeviceTensor]:
        inputs = {LENGTHS: self._lengths, **dict(zip(CACHES, self._held, strict=True))}
        return {**inputs, **dict(zip(ROWS, frame.rows, strict=True))}

    def _keep(self, frame: Frame, lengths: np.ndarray) -> None:
        for tensor, rows in zip(self._held, frame.rows, strict=True):
            for copy in row_copies(self._cache, lengths, frame.S):
                tensor.buffer.copy_rows(rows.buffer, copy, self._stream)


class GrowingStepper(CachedStepper):
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
