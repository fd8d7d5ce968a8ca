"""What a factory gives to `mha-deploy export file.py:factory`: a module, with examples of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn  # noqa: TID251 (types only)

    from mha_deploy.model.spec import Axis

    Draw = Callable[[tuple[int, ...], Generator], Tensor]


LARGEST_ACTIVATION = 1e4
"""Floats beyond it are meant to hide something: a mask, whose numbers are neither drawn nor negated."""


@dataclass(frozen=True, init=False)
class Example:
    """One input: a tensor that the module takes, and names for the dimensions that vary.

    Args:
        tensor: An example; its values say what others look like. Floating-point tensors are rounded to the
            precision of the export.
        axes: A name for each leading dimension, such as "B", a sum as "P+S", or a multiple as "2*H"; None for
            a fixed one. Those that are not named are fixed.
        draw: Makes the input at another shape, where the example does not show how: it gets the shape and a
            seeded generator. By default, floats are drawn with the example's mean and deviation, and
            integers, booleans and masks of large or infinite floats are sliced from the example or repeat it.
    """

    tensor: Tensor
    axes: tuple[str | None, ...]
    draw: Draw | None

    def __init__(self, tensor: Tensor, *axes: str | None, draw: Draw | None = None) -> None:
        object.__setattr__(self, "tensor", tensor)
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "draw", draw)


@dataclass(frozen=True, kw_only=True)
class Deployable:
    """A module and everything that its export cannot guess.

    Args:
        module: The module; it is exported in evaluation mode.
        inputs: An example of every input, by the name of the parameter of `forward`.
        axes: The sizes of every named axis: `min:opt:max` as text, three numbers, or an `Axis`. Name the
            batch B: batch elements are then also tried in other places.
        outputs: Names of the outputs, where `forward` does not name them.
        kv_cache: For a decoder: each input that holds cached keys or values, and the output that takes its
            place in the next call, such as {"past_key": "present_key"}. Decoding is then validated token by
            token. In a dynamic cache the input has an axis of its own for the cached tokens, such as P, and
            the output its sum with that of the new ones, P+S. A preallocated one goes out in the shape that
            it came in, or is changed in place and not returned; name the axis of its entries, such as T.
        positions: The input, or inputs, of whole numbers that place the new tokens, such as "cache_position".
            With the axis of the new tokens it holds the position of each, without it the number of tokens
            before them; with the axis B of every batch element by itself. A preallocated cache needs one.
        longest: How many tokens a sequence may have with a preallocated cache; default: as many as it has
            entries. More for a ring buffer, or a cache that keeps the last tokens of a sliding window.
        samples: Samples of your own, of which the first sixteen are golden cases of the bundle besides those
            that are drawn: dictionaries of arrays or tensors by input, a function that returns them, or the
            path of a file or folder as `validate --data` takes it. A precision of eight bits is calibrated on
            all of them.
        name: Name of the model; default: the factory's.
        summary: One line for people.
    """

    module: nn.Module
    inputs: Mapping[str, Example]
    axes: Mapping[str, str | tuple[int, int, int] | Axis] = field(default_factory=dict)
    outputs: Sequence[str] = ()
    kv_cache: Mapping[str, str] = field(default_factory=dict)
    positions: str | Sequence[str] = ()
    longest: int = 0
    samples: Any = ()
    name: str = ""
    summary: str = ""

    def __post_init__(self) -> None:
        """None is the default of what may be left out."""
        for each in fields(self):
            if getattr(self, each.name) is None and each.default is not MISSING:
                object.__setattr__(self, each.name, each.default)
            elif getattr(self, each.name) is None and each.default_factory is not MISSING:
                object.__setattr__(self, each.name, each.default_factory())
