"""Device memory of a stepper: what belongs to one call, and how long it is kept."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from mha_deploy.backends.cache_rows import ROWS, CacheShape
from mha_deploy.backends.cuda import Buffer
from mha_deploy.backends.stepper import DeviceTensor, Launcher, Shape
from mha_deploy.errors import DeployError


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
