"""The request for a build, and its result."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from mha_deploy.errors import nearest
from mha_deploy.runtime.tensorrt.kernels import EngineTensor, Kernel
from mha_deploy.runtime.tensorrt.log import Message
from mha_deploy.runtime.tensorrt.versions import EngineError

# -- Tensors that TensorRT does not support at the largest sizes, from the warnings of a build -----

MOST_ELEMENTS = 2**31 - 1

_WARNING = re.compile(
    r"(?P<tensor>[^\s:]+): tensor volume exceeds \(2\^31\)-1, dimensions are \[(?P<dims>[^]]*)\]"
)
_TOKEN = re.compile(r"[()]|[^\s(),]+")
_OPERATORS: Mapping[str, Callable[[Iterable[int]], int]] = {"*": math.prod, "+": sum}


class LargeTensor(Struct, frozen=True, kw_only=True):
    """A tensor that is too large at some sizes, as the manifest of an engine records it."""

    tensor: str
    dims: str
    """Its dimensions, as TensorRT writes them: `1,8,(* 4 S),S`."""
    axes: dict[str, tuple[str, int]]
    """For each axis, an input and the dimension of it that has the axis' size."""

    def elements(self, shapes: Mapping[str, Sequence[int]]) -> int | None:
        """How many elements it has for inputs of these shapes; None where that is unknown."""
        tokens = _TOKEN.findall(self.dims)[::-1]

        def value(sizes: Mapping[str, int]) -> int:
            token = tokens.pop()
            if token != "(":
                return int(token) if token.isdecimal() else sizes[token]
            combine = _OPERATORS[tokens.pop()]
            terms = []
            while tokens[-1] != ")":
                terms.append(value(sizes))
            tokens.pop()
            return combine(terms)

        found = []
        try:
            sizes = {axis: shapes[name][place] for axis, (name, place) in self.axes.items()}
            while tokens:
                found.append(value(sizes))
        except (KeyError, IndexError):
            return None
        return math.prod(found)

    @property
    def advice(self) -> str:
        """What to do about it."""
        return (
            f"{self.tensor} [{self.dims}] is too large for TensorRT at the largest sizes, and such a call is "
            "refused: build with smaller ones (--profile), or with --attention plugin, which stores no scores"
        )


def large_tensors(texts: Iterable[str], axes: dict[str, tuple[str, int]]) -> tuple[LargeTensor, ...]:
    """The tensors in the warnings of a build, each once; `axes` are those of the graph."""
    matches = (match for text in texts if (match := _WARNING.search(text)))
    found = dict.fromkeys((match["tensor"], match["dims"]) for match in matches)
    return tuple(LargeTensor(tensor=tensor, dims=dims, axes=axes) for tensor, dims in found)


def refuse_large(tensors: Sequence[LargeTensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuse a call for which one of these tensors is too large."""
    for tensor in tensors:
        elements = tensor.elements(shapes)
        if elements is not None and elements > MOST_ELEMENTS:
            raise EngineError(
                "TensorRT does not support a tensor of this size.",
                got=f"{tensor.tensor} with {elements:,} elements, at most {MOST_ELEMENTS:,} are possible",
                hint="smaller sizes, or an engine that was built with --attention plugin",
            )


# -- The request for a build, and its result -------------------------------------------------------

Shape = tuple[int, ...]
Profile = Mapping[str, tuple[Shape, Shape, Shape]]
"""For each input, its smallest, most usual and largest shape."""

HARDWARE_LEVELS = {"ampere-plus": "AMPERE_PLUS", "same-compute-capability": "SAME_COMPUTE_CAPABILITY"}


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """One engine to build.

    Args:
        onnx: Path of the model, or the model itself. A model with external data needs its path.
        backend: `tensorrt` or `tensorrt-rtx`.
        precision: The precision of the graph: `fp16`, `bf16` or `fp32`.
        profiles: Ranges of the input shapes, one mapping per optimisation profile.
        targets: Compute capabilities to compile for (RTX only): `"8.9"`, `"89,120"`, `("8.9", "12.0")`.
        optimization_level: TensorRT's builder optimization level, 0 to 5; None for its default.
        workspace: Most bytes of scratch memory of a kernel; None for no limit.
        timing_cache: Timings of earlier builds on this GPU.
        version_compatible: Build an engine that later versions can load.
        hardware_compatible: `ampere-plus` or `same-compute-capability`: other GPUs it shall run on.
        weight_streaming: Let weights stay on the host.
        refit: `all` or `identical`: weights that can be replaced later.
        allow_decomposed: Let attention without a fused kernel be built from several. A graph in which
            attention is written in primitive operators is always free to decompose.
        precision_constraints: Constrain every layer to the graph's types where TensorRT chooses types by
            itself (8.6; later networks are strongly typed).
    """

    onnx: bytes | str | Path
    backend: str = "tensorrt-rtx"
    precision: str = "fp16"
    profiles: Sequence[Profile] = ()
    targets: str | Sequence[str] = ()
    optimization_level: int | None = None
    workspace: int | None = None
    timing_cache: bytes | None = field(default=None, repr=False)
    version_compatible: bool = False
    hardware_compatible: str | None = None
    weight_streaming: bool = False
    refit: Literal["all", "identical"] | None = None
    allow_decomposed: bool = False
    precision_constraints: bool = False

    def __post_init__(self) -> None:
        for what, value, known in (
            ("precision", self.precision, ("fp16", "bf16", "fp32")),
            ("hardware compatibility", self.hardware_compatible, tuple(HARDWARE_LEVELS)),
            ("refit mode", self.refit, ("all", "identical")),
        ):
            if value is not None and value not in known:
                raise EngineError(f"No such {what}.", got=value, hint=nearest(value, known))
        if self.optimization_level is not None and not 0 <= self.optimization_level <= 5:
            raise EngineError(
                "The optimisation level is out of range.", got=self.optimization_level, hint="0-5"
            )
        if self.workspace is not None and self.workspace <= 0:
            raise EngineError("The workspace must be a positive number of bytes.", got=self.workspace)

    @property
    def target_names(self) -> tuple[str, ...]:
        """The targets as TensorRT-RTX calls them: `SM89`, `SM120`, `CURRENT`."""
        return parse_targets(self.targets)

    def options(self) -> dict[str, Any]:
        """The options as plain data, for a manifest: everything but the model and the cache."""
        others = ("onnx", "backend", "timing_cache")
        return {
            **{name: value for name, value in vars(self).items() if name not in others},
            "profiles": [
                {name: [list(shape) for shape in shapes] for name, shapes in profile.items()}
                for profile in self.profiles
            ],
            "targets": list(self.target_names),
        }


@dataclass(frozen=True, kw_only=True)
class BuiltEngine:
    """An engine, and what the build reported."""

    plan: bytes = field(repr=False)
    seconds: float
    strongly_typed: bool
    """Whether its types are those of the graph."""
    inputs: tuple[EngineTensor, ...]
    outputs: tuple[EngineTensor, ...]
    kernels: Mapping[str, tuple[Kernel, ...]]
    """The engine's kernels as each source reports them: `log`, `plan`, `inspector`."""
    warnings: tuple[Message, ...] = ()
    """TensorRT's warnings, linked to nodes."""
    notes: tuple[str, ...] = ()
    """For the user: a stale timing cache, a source without kernels."""
    large_tensors: tuple[LargeTensor, ...] = ()
    timing_cache: bytes | None = field(default=None, repr=False)
    """Timings to keep for the next build; None where they have no effect."""


def parse_targets(targets: str | Sequence[str]) -> tuple[str, ...]:
    """Compute capabilities as people write them, by TensorRT's names, each once, in the order given.

    `"8.9,12.0"`, `"89 120"`, `("sm_89", "SM120")`, `"current"` become names like `SM89`.
    """
    names = []
    for text in re.split(r"[,;\s]+", targets) if isinstance(targets, str) else targets:
        match = re.fullmatch(r"(?:sm_?)?(?:(\d{1,2})\.(\d)|(\d{2,3}))", text.strip(), re.IGNORECASE)
        if match is not None:
            names.append(f"SM{match[3]}" if match[3] else f"SM{match[1]}{match[2]}")
        elif text.upper() == "CURRENT":
            names.append("CURRENT")
        elif text:
            raise EngineError("This is not a compute capability.", got=text, hint="write it as 8.9 or 89")
    return tuple(dict.fromkeys(names))


def capabilities_of(targets: str | Sequence[str]) -> list[str]:
    """The targets that name a GPU, as compute capabilities: `8.9`, `12.0`."""
    names = [name for name in parse_targets(targets) if name != "CURRENT"]
    return [f"{name[2:-1]}.{name[-1]}" for name in names]
