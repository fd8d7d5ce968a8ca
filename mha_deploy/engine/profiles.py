"""The optimisation profiles of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mha_deploy.errors import SpecError
from mha_deploy.model.spec import Axis, ModelSpec

Ranges = Mapping[str, Axis]

_USUAL_BATCH = 8

BACKENDS = ("tensorrt", "tensorrt-rtx")


def parse_ranges(text: str, spec: ModelSpec) -> Ranges:
    """Read one profile such as `B=1:8:32,S=1:128:512`; axes that are left out keep the spec's range."""
    ranges: dict[str, Axis] = {}
    for part in text.split(","):
        name, separator, sizes = part.strip().partition("=")
        if not separator:
            raise SpecError("A profile has no range for an axis.", got=part, hint="B=1:8:32,S=1:128:512")
        ranges[name] = Axis.parse(sizes, name=name)
    for name, axis in ranges.items():
        allowed = spec.axes.get(name)
        if allowed is not None and not (allowed.min <= axis.min and axis.max <= allowed.max):
            raise SpecError(
                f"The graph was exported for {name} from {allowed.min} to {allowed.max}.",
                got=f"{name}={axis}",
                hint="a range inside it, or export again with --axis",
            )
    return spec.with_axes(ranges).axes


def default_profiles(spec: ModelSpec, *, one: bool = False) -> list[Ranges]:
    """The spec's own ranges; a layer with a cache gets one profile for prompts and one for single tokens.

    Both share `one` profile where this TensorRT cannot prepare the second one.
    """
    if spec.cache == "none":
        return [spec.axes]
    if one:
        # TensorRT 8.6 built a layer with a cache wrongly for every other batch when both its usual batch and
        # its usual number of tokens were 1.
        B = spec.axes["B"]
        return [spec.axes if B.opt > 1 else {**spec.axes, "B": replace(B, opt=min(B.max, _USUAL_BATCH))}]
    S = spec.axes["S"]
    if S.min > 1 or S.max == 1:
        return [spec.axes]
    prompt, token = dict(spec.axes), {**spec.axes, "S": Axis(min=1, opt=1, max=1)}
    if "P" in spec.axes:
        prompt["P"] = replace(spec.axes["P"], opt=spec.axes["P"].min)
    return [prompt, token]


def profile_names(spec: ModelSpec, profiles: Sequence[Ranges]) -> list[str]:
    """Names of the profiles: `prefill` and `decode` where one is for single tokens alone, else numbers."""
    names = ["decode" if spec.cache != "none" and each["S"].max == 1 else "prefill" for each in profiles]
    if "decode" not in names:
        return [str(index) for index in range(len(profiles))]
    return [
        name if names.count(name) == 1 else f"{name}-{names[:index].count(name)}"
        for index, name in enumerate(names)
    ]


def profile_shapes(
    spec: ModelSpec, ranges: Ranges
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """The smallest, usual and largest shape of every input."""
    bounds = [
        {name: getattr(axis, bound) for name, axis in ranges.items()} for bound in ("min", "opt", "max")
    ]
    return {
        tensor.name: (tensor.shape(bounds[0]), tensor.shape(bounds[1]), tensor.shape(bounds[2]))
        for tensor in spec.inputs
    }
