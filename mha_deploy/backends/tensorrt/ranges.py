"""Which optimisation profile takes which shapes. Knows nothing of TensorRT."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mha_deploy.backends.tensorrt.request import Profile, Shape
from mha_deploy.errors import DeployError


def admitting(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> list[int]:
    """The profiles that take these shapes, in their order.

    Args:
        profiles: Smallest, usual and largest shape of every input, for each profile.
        shapes: The shape of every input.
    """
    return [index for index, profile in enumerate(profiles) if admits(profile, shapes)]


def admits(profile: Profile, shapes: Mapping[str, Shape]) -> bool:
    """Whether every input's shape is within the profile's range."""
    return all(_within(shapes[name], low, high) for name, (low, _, high) in profile.items())


def _within(shape: Shape, low: Shape, high: Shape) -> bool:
    return len(shape) == len(low) and all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True))


def first_admitting(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> int:
    """The first profile that takes these shapes.

    Raises:
        DeployError: None does; the error lists what each takes.
    """
    found = admitting(profiles, shapes)
    if not found:
        raise DeployError(
            "No optimisation profile of the engine takes these shapes.",
            got=_say(shapes),
            hint="; ".join(f"profile {index}: {describe(each)}" for index, each in enumerate(profiles)),
        )
    return found[0]


def tightest_admitting(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> int:
    """Of the profiles that take these shapes the one with the least room, as one for single tokens has.

    Raises:
        DeployError: None does.
    """
    first_admitting(profiles, shapes)
    return min(admitting(profiles, shapes), key=lambda index: _room(profiles[index]))


def _room(profile: Profile) -> int:
    return sum(math.prod(high) for _, _, high in profile.values())


def refuse_outside(profiles: Sequence[Profile], index: int, shapes: Mapping[str, Shape]) -> None:
    """Check that one profile exists and takes these shapes.

    Raises:
        DeployError: It does not.
    """
    if not 0 <= index < len(profiles):
        raise DeployError(
            "The engine has no such optimisation profile.", got=index, hint=f"0 to {len(profiles) - 1}"
        )
    if not admits(profiles[index], shapes):
        raise DeployError(
            f"The optimisation profile {index} does not take these shapes.",
            got=_say(shapes),
            hint=describe(profiles[index]),
        )


def describe(profile: Profile) -> str:
    """The ranges in words: `x 1..4×1..64×128`."""
    return ", ".join(
        f"{name} {'×'.join(_span(a, b) for a, b in zip(low, high, strict=True))}"
        for name, (low, _, high) in profile.items()
    )


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}..{high}"


def _say(shapes: Mapping[str, Shape]) -> str:
    return ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in shapes.items())
