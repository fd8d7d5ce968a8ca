"""Step through tokens with a cache that stays on the device.

A `Stepper` owns keys and values; a step brings new tokens and takes their outputs. How a call is launched is
the runtime's business, behind `Launcher`; what is kept from one call to the next is `cached_stepper`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np

from mha_deploy.backends.cuda import Buffer, Gpu, Stream
from mha_deploy.backends.runner import TensorInfo
from mha_deploy.backends.timing import Timing, TimingPlan

Shape = tuple[int, ...]


class Stepper(ABC):
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

    def __enter__(self) -> Stepper:
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
