"""Run an engine: TensorRT 8.6 to 11 and TensorRT-RTX, with nothing from PyTorch.

Only the calls that name their tensors are used; every version has them. Not for several threads at once:
a runner has one stream, and a context serves one call at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from mha_deploy.backends.cache_rows import (
    cache_copies,
    cache_form,
    check_room,
    presented_outputs,
    presented_results,
)
from mha_deploy.backends.cuda import Stream
from mha_deploy.backends.gpu import GpuRunner, Prepared
from mha_deploy.backends.runner import Arrays, TensorInfo, check_kinds
from mha_deploy.backends.tensorrt.bound import BoundCall, BoundContext, Slot
from mha_deploy.backends.tensorrt.loaded import (
    aliased_outputs,
    io_tensors,
    load_engine,
    narrow_integers,
    profile_ranges,
    scratch_bytes,
)
from mha_deploy.backends.tensorrt.ranges import (
    admitting,
    first_admitting,
    refuse_outside,
    tightest_admitting,
)
from mha_deploy.backends.tensorrt.recent import Recent
from mha_deploy.backends.tensorrt.request import Profile, Shape
from mha_deploy.backends.tensorrt.stepper import TensorRTLauncher
from mha_deploy.backends.tensorrt.versions import TensorRT
from mha_deploy.backends.tensorrt.volumes import LargeTensor

_Key = tuple[int, tuple[tuple[str, Shape], ...]]


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
        """The call in the first profile that fits; behind a cache in the tightest, as steppers choose it."""
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
        self.release()  # where a profile belongs to one context at a time, the stepper needs it
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
