"""Run an engine: TensorRT 8.6 to 11 and TensorRT-RTX, with nothing from PyTorch.

Only the calls that name their tensors are used; every version has them. Not for several threads at once:
a runner has one stream, and a context serves one call at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from mha_deploy.backends.cuda import Stream
from mha_deploy.backends.gpu import GpuRunner, Prepared
from mha_deploy.backends.runner import Arrays, check_feeds
from mha_deploy.backends.tensorrt.bound import BoundCall, BoundContext, Slot
from mha_deploy.backends.tensorrt.loaded import io_tensors, load_engine, profile_ranges, scratch_bytes
from mha_deploy.backends.tensorrt.ranges import admitting, first_admitting, refuse_outside
from mha_deploy.backends.tensorrt.recent import Recent
from mha_deploy.backends.tensorrt.request import Profile, Shape
from mha_deploy.backends.tensorrt.versions import TensorRT

_Key = tuple[int, tuple[tuple[str, Shape], ...]]


class TensorRTRunner(GpuRunner):
    """An engine on the GPU of this process.

    Args:
        rt: The TensorRT that built it.
        plan: The serialised engine.
        host_code: Allow the runtime code that a version-compatible engine carries; it is executed.
        cuda_graph: Whether calls are recorded once and launched as a CUDA graph.
        keep: For how many shapes contexts, buffers and graphs are kept; each context has scratch memory for
            the largest shapes of its profile.

    Raises:
        BackendUnavailable: There is no GPU, or TensorRT cannot start.
        EngineError: The engine cannot be loaded here.
    """

    profiles: tuple[Profile, ...]
    """What each optimisation profile takes: smallest, usual and largest shape of every input."""

    def __init__(
        self,
        rt: TensorRT,
        plan: bytes,
        *,
        host_code: bool = False,
        cuda_graph: bool = True,
        keep: int = 2,
    ) -> None:
        super().__init__()
        self._rt, self._plan_bytes = rt, len(plan)
        self.name = f"{rt.backend} {rt.version}"
        self.graph = cuda_graph
        self._loaded = load_engine(rt, plan, host_code=host_code)
        engine = self._loaded.engine
        self.inputs, self.outputs = io_tensors(rt, engine)
        self.profiles = profile_ranges(engine, self.inputs)
        self._calls: Recent[_Key, BoundCall] = Recent(keep)
        self.stream = Stream()

    def profiles_for(self, feeds: Arrays) -> list[int]:
        """The optimisation profiles that take these inputs."""
        check_feeds(self.inputs, feeds)
        return admitting(self.profiles, _shapes(feeds))

    def run_in_profile(self, feeds: Arrays, profile: int) -> dict[str, np.ndarray]:
        """Run in a profile of one's own choice.

        Raises:
            DeployError: The profile does not take these inputs.
        """
        check_feeds(self.inputs, feeds)
        refuse_outside(self.profiles, profile, _shapes(feeds))
        return self._call(feeds, profile).run(feeds)

    def _run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        return self._call(feeds, first_admitting(self.profiles, _shapes(feeds))).run(feeds)

    def _call(self, feeds: Arrays, profile: int) -> BoundCall:
        key = (profile, tuple(sorted(_shapes(feeds).items())))
        if not self._rt.can.shared_profiles:
            # Here a profile belongs to one context at a time, so the other shapes' has to go first.
            self._calls.drop(lambda kept: kept[0] == profile and kept != key)
        return self._calls.get(key, lambda: self._bind(feeds, profile))

    def _bind(self, feeds: Arrays, profile: int) -> BoundCall:
        bound = BoundContext(
            self._rt,
            self._loaded.engine,
            self.stream,
            profile=profile,
            shapes=_shapes(feeds),
            inputs=self.inputs,
            outputs=self.outputs,
        )
        return BoundCall(bound, feeds, record=self.graph)

    @contextmanager
    def _prepare(self, feeds: Arrays, slots: int) -> Iterator[Prepared]:
        """Slots of the first profile that fits; nothing else may run on this runner meanwhile."""
        profile = first_admitting(self.profiles, _shapes(feeds))
        bound = self._call(feeds, profile).bound
        with ExitStack() as owned:
            prepared: list[Slot] = []
            for _ in range(slots):
                slot = Slot(bound)
                owned.callback(slot.close)
                if prepared:
                    slot.copy_inputs(prepared[0])
                else:
                    slot.upload(feeds)
                slot.settle(record=self.graph)
                prepared.append(slot)
            try:
                yield Prepared(
                    launch=lambda index: prepared[index].launch(),
                    results=lambda index: prepared[index].download(),
                    memory_bytes=self._memory_bytes(prepared),
                )
            finally:
                self.stream.synchronize()  # the buffers must not go while a call is using them

    def _memory_bytes(self, slots: list[Slot]) -> int:
        """Scratch memory, the buffers of all calls, and the plan, whose size stands for the weights."""
        buffers = sum(slot.nbytes for slot in slots)
        return scratch_bytes(self._rt, self._loaded.engine) + self._plan_bytes + buffers

    def close(self) -> None:
        """Free the contexts, the buffers, the engine and the stream."""
        self._calls.close()
        self.stream.close()
        vars(self).pop("_loaded", None)  # may be closed twice


def _shapes(feeds: Arrays) -> dict[str, Shape]:
    return {name: tuple(array.shape) for name, array in feeds.items()}
