"""The interface of every runtime: open it, give it arrays, get arrays or a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import ml_dtypes
import numpy as np

from mha_deploy.errors import DeployError
from mha_deploy.model.spec import Axis, two_sizes

if TYPE_CHECKING:
    from mha_deploy.runtime.timing import Timing, TimingPlan

Arrays = Mapping[str, np.ndarray]
T = TypeVar("T")
Opened = TypeVar("Opened", bound="Closing")

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float": np.dtype(np.float32),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "bool": np.dtype(np.bool_),
}
"""The types of inputs and outputs that every runtime here takes, by ONNX's names for them."""


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Type and dimensions of one input or output; a dynamic dimension is a name or None."""

    dtype: np.dtype
    dims: tuple[int | str | None, ...]

    @classmethod
    def of(cls, name: str, dtype: str, dims: Iterable[Any]) -> TensorInfo:
        """From what a runtime reports: the type by ONNX's name, and a dynamic size also as a negative one."""
        if dtype not in DTYPES:
            raise DeployError(
                f"The tensor {name} has a type that is not supported here.",
                got=dtype,
                hint=f"one of {', '.join(DTYPES)}",
            )
        sizes = (None if isinstance(dim, int) and dim < 0 else dim for dim in dims)
        return cls(dtype=DTYPES[dtype], dims=tuple(sizes))


class Closing:
    """What is closed at the end of a `with` block."""

    def close(self) -> None:
        """Free the resources; most runtimes hold nothing that Python does not free."""

    def __enter__(self: Opened) -> Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Runner(Closing, ABC):
    """A model loaded into one runtime; a context manager that owns the runtime's resources."""

    name: str  # the runtime, with its version
    title: str = ""  # the same without its version; default: the name
    inputs: Mapping[str, TensorInfo]
    outputs: Mapping[str, TensorInfo]
    axes: Mapping[str, Axis] = {}  # of a bundle, the ranges that it was exported for
    # Of a catalog layer, inputs that count valid keys, with the input and the dimension that have them all
    lengths: Mapping[str, tuple[str, int]] = {}
    device: str = "cpu"  # where it computes: `cpu`, or the name of the GPU
    accumulate: str | None = None  # what its GEMMs accumulate in: `fp32` or `fp16`; None: not known
    can_decode: bool = False  # whether it keeps a KV cache on its device and has a `decode_loop`
    # Why a runtime without a time has none, and what has one.
    untimed: str = "checks a graph on the CPU; its time would say nothing about a GPU."
    timed_by = "another --runtime"

    @abstractmethod
    def _run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """Run checked inputs."""

    def run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """Check the inputs against the model, then run it."""
        check_names(self.inputs, feeds)
        self.refuse_sizes(feeds)
        checked = self.checked(feeds)
        try:
            return self._run(checked)
        except DeployError as error:
            dims = {name: info.dims for name, info in self.inputs.items()}
            found = two_sizes(dims, {name: array.shape for name, array in feeds.items()})
            if found is None:
                raise
            axis, got = found
            hint = f"one size of {axis} everywhere"
            raise DeployError(f"Axis {axis} has two sizes.", got=got, hint=hint) from error

    def checked(self, feeds: Arrays) -> Arrays:
        """The inputs as the runtime takes them; refused for other names, types or shapes."""
        check_feeds(self.inputs, feeds)
        return feeds

    def refuse_sizes(self, feeds: Arrays) -> None:
        """Refuse sizes beyond the ranges of the axes, which nothing verified, and keys that are not there."""
        for name, array in feeds.items():
            dims, shape = self.inputs[name].dims if name in self.inputs else (), np.shape(array)
            for dim, size in zip(dims, shape, strict=True) if len(dims) == len(shape) else ():
                axis = self.axes.get(dim) if isinstance(dim, str) else None
                if axis is not None and not axis.min <= size <= axis.max:
                    what, got = f"Axis {dim} does not allow this size.", f"{dim}={size} of input {name}"
                    hint = f"a size from {axis.min} to {axis.max}; or export it with --axis {dim}=min:opt:max"
                    raise DeployError(what, got=got, hint=hint)
        for name, (source, at) in self.lengths.items():
            found, keys = (np.asarray(feeds.get(each, ())) for each in (name, source))
            most = keys.shape[at] if keys.ndim > at else 0
            if most and found.size and not 0 <= found.min() <= found.max() <= most:
                what, got = "A batch element has no such number of keys.", f"{name} {found.tolist()}"
                raise DeployError(what, got=got, hint=f"from 0 to {most}, as input {source} has")

    def time(self, feeds: Arrays, plan: TimingPlan | None = None) -> Timing:
        """How long one call takes with inputs that are on the device already."""
        raise DeployError(f"{self.name} {self.untimed}", got=self.device, hint=self.timed_by)

    def apply(self, function: Callable[..., T], *arguments: Any, step: str = "") -> T:
        """Call a function of a module with the runner and the arguments, in the process of the runtime.

        `step` describes it in the message of a runtime that crashes meanwhile.
        """
        return function(self, *arguments)


@runtime_checkable
class ProfiledRunner(Protocol):
    """A runner whose engine has optimization profiles to choose from."""

    def profiles_for(self, feeds: Arrays) -> list[int]:
        """The profiles that admit these inputs."""

    def run_in_profile(self, feeds: Arrays, profile: int) -> dict[str, np.ndarray]:
        """Run under one of them."""


def check_feeds(inputs: Mapping[str, TensorInfo], feeds: Arrays) -> None:
    """Refuse inputs whose names, types or shapes the model does not take."""
    check_kinds(inputs, feeds)
    for name, info in inputs.items():
        shape = feeds[name].shape
        fixed = [(size, dim) for size, dim in zip(shape, info.dims, strict=False) if isinstance(dim, int)]
        if len(shape) != len(info.dims) or any(size != dim for size, dim in fixed):
            raise DeployError(f"Input {name} has the wrong shape.", got=shape, hint=str(info.dims))


def check_kinds(inputs: Mapping[str, TensorInfo], feeds: Arrays) -> None:
    """Refuse inputs whose names or types the model does not take, whatever their shapes."""
    check_names(inputs, feeds)
    for name, info in inputs.items():
        if feeds[name].dtype != info.dtype:
            raise DeployError(
                f"Input {name} has the wrong type.", got=feeds[name].dtype, hint=str(info.dtype)
            )


def check_names(inputs: Mapping[str, TensorInfo], feeds: Arrays) -> None:
    """Refuse what is not one array for each name of an input, whatever their types."""
    if not isinstance(feeds, Mapping):
        hint = f"a dictionary of arrays by name: {', '.join(sorted(inputs))}"
        raise DeployError("The inputs are not a dictionary.", got=type(feeds).__name__, hint=hint)
    if set(feeds) != set(inputs):
        names = sorted(map(str, feeds))
        raise DeployError("The names of the inputs do not match.", got=names, hint=f"give {sorted(inputs)}")
    for name, info in inputs.items():
        if not isinstance(getattr(feeds[name], "dtype", None), np.dtype):
            got = type(feeds[name]).__name__
            hint = f"numpy.asarray(…, {str(info.dtype)!r}), of a tensor .numpy()"
            raise DeployError(f"Input {name} is not a NumPy array.", got=got, hint=hint)


def error_line(error: BaseException) -> str:
    """The type and the first line of an exception of another library."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:500]


@contextmanager
def foreign_errors(problem: str, line: Callable[[Exception], str] = error_line) -> Iterator[None]:
    """Raise one error of this tool for the exceptions of another library, whose types share no base."""
    try:
        yield
    except DeployError:
        raise
    except Exception as error:
        raise DeployError(
            problem, got=line(error), hint="another --runtime, or --in-process to see where"
        ) from error
