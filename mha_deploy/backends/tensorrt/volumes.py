"""Tensors that TensorRT said, while it built an engine, it cannot hold at the largest sizes.

It builds the engine all the same. TensorRT 8.6 then ended the process when 32 heads were to attend over 8192
tokens, whose scores have 2^31 elements. So such a call is refused before TensorRT sees its sizes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mha_deploy.backends.tensorrt.errors import EngineError

MOST_ELEMENTS = 2**31 - 1

_TOLD = re.compile(
    r"(?P<tensor>[^\s:]+): tensor volume exceeds \(2\^31\)-1, dimensions are \[(?P<dims>[^]]*)\]"
)
_TOKEN = re.compile(r"[()]|[^\s(),]+")
_OPERATORS: Mapping[str, Callable[[Iterable[int]], int]] = {"*": math.prod, "+": sum}


@dataclass(frozen=True, kw_only=True)
class LargeTensor:
    """A tensor that is too large at some sizes.

    Args:
        tensor: Its name.
        dims: Its dimensions, in TensorRT's words: `1,8,(* 4 S),S`.
        axes: For each axis, an input and the dimension of it that is the axis' size.
    """

    tensor: str
    dims: str
    axes: Mapping[str, tuple[str, int]]

    def elements(self, shapes: Mapping[str, Sequence[int]]) -> int | None:
        """How many elements it has where the inputs have these shapes; None where that cannot be told."""
        tokens = _TOKEN.findall(self.dims)[::-1]
        found = []
        try:
            sizes = {axis: shapes[name][place] for axis, (name, place) in self.axes.items()}
            while tokens:
                found.append(_value(tokens, sizes))
        except (KeyError, IndexError):
            return None
        return math.prod(found)

    def as_dict(self) -> dict[str, Any]:
        """As the manifest of an engine has it."""
        axes = {axis: list(place) for axis, place in self.axes.items()}
        return {"tensor": self.tensor, "dims": self.dims, "axes": axes}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LargeTensor:
        """From the manifest of an engine."""
        axes = {str(axis): (str(name), int(place)) for axis, (name, place) in data["axes"].items()}
        return cls(tensor=str(data["tensor"]), dims=str(data["dims"]), axes=axes)

    @property
    def advice(self) -> str:
        """What to do about it."""
        return (
            f"{self.tensor} [{self.dims}] is too large for TensorRT at the largest sizes, and such a call is "
            "refused: build with smaller ones (--profile), or where there is the plugin library with "
            "--attention plugin, which keeps no scores"
        )


def large_tensors(texts: Iterable[str], axes: Mapping[str, tuple[str, int]]) -> tuple[LargeTensor, ...]:
    """The tensors that a build complained of, each once.

    Args:
        texts: What TensorRT said.
        axes: For each axis of the graph, an input and the dimension that has its name.
    """
    found = (match for text in texts if (match := _TOLD.search(text)))
    told = dict.fromkeys((match["tensor"], match["dims"]) for match in found)
    return tuple(LargeTensor(tensor=tensor, dims=dims, axes=axes) for tensor, dims in told)


def refuse_large(tensors: Sequence[LargeTensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuse a call for which TensorRT would have to hold one of these tensors whole.

    Raises:
        EngineError: It would.
    """
    for tensor in tensors:
        elements = tensor.elements(shapes)
        if elements is not None and elements > MOST_ELEMENTS:
            raise EngineError(
                "TensorRT cannot hold a tensor of this size.",
                got=f"{tensor.tensor} with {elements:,} elements, at most {MOST_ELEMENTS:,} are possible",
                hint="smaller sizes, or an engine that was built with --attention plugin",
            )


def _value(tokens: list[str], sizes: Mapping[str, int]) -> int:
    token = tokens.pop()
    if token != "(":
        return int(token) if token.isdecimal() else sizes[token]
    combine = _OPERATORS[tokens.pop()]
    terms = []
    while tokens[-1] != ")":
        terms.append(_value(tokens, sizes))
    tokens.pop()
    return combine(terms)
