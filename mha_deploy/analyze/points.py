"""Where a layer is timed when nobody says: its usual sizes, or the two kinds of call of one with a cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mha_deploy.analyze.sizes import sizes_name
from mha_deploy.errors import SpecError, nearest
from mha_deploy.model_spec import ModelSpec

PREFILL, DECODE, USUAL = "prefill", "decode", "opt"


@dataclass(frozen=True, kw_only=True)
class TimedPoint:
    """One set of sizes to time a layer at.

    Args:
        name: What is special about it, or its sizes.
        sizes: The size of every axis.
        past: How many rows of a static cache are valid before the call, in every row of the batch: its
            lengths are data and no axis. None for other layers.
    """

    name: str
    sizes: Mapping[str, int]
    past: int | None = None


def usual_points(spec: ModelSpec) -> tuple[TimedPoint, ...]:
    """The usual sizes of a layer; with a cache, of its prefill and of its decode step.

    `prefill` brings the usual number of tokens to a cache that holds as few as it can. `decode` brings as few
    as the layer takes, usually one, behind the usual past; a static cache is full then, the worst case.
    Where the usual number of tokens is the least, there is only `decode`.
    """
    usual, least = spec.sizes("opt"), spec.sizes("min")
    if spec.cache == "none":
        return (TimedPoint(name=USUAL, sizes=usual),)
    empty = {"P": least["P"]} if spec.cache == "growing" else {}
    prefill = TimedPoint(name=PREFILL, sizes={**usual, **empty}, past=0 if spec.cache == "static" else None)
    decode = with_full_cache(spec, DECODE, {**usual, "S": least["S"]})
    return (prefill, decode) if usual["S"] > least["S"] else (decode,)


def with_full_cache(spec: ModelSpec, name: str, sizes: Mapping[str, int]) -> TimedPoint:
    """A point whose static cache, where there is one, is full once the new tokens are in it."""
    past = sizes["T"] - sizes["S"] if spec.cache == "static" else None
    return TimedPoint(name=name, sizes=dict(sizes), past=past)


def points_from_text(spec: ModelSpec, text: str) -> tuple[TimedPoint, ...]:
    """Read `opt`, for all of `usual_points`; `prefill` or `decode`; or sizes such as `B=8,S=1,P=2048`.

    Raises:
        SpecError: The text is none of them, or the sizes are outside the axes.
    """
    usual = usual_points(spec)
    if text == USUAL:
        return usual
    named = tuple(point for point in usual if point.name == text)
    if named:
        return named
    if "=" not in text and spec.cache != "none":
        names = (USUAL, *(point.name for point in usual))
        raise SpecError(
            f"{spec.name} is not timed at such a point.",
            got=text,
            hint=f"{nearest(text, names)} Or sizes, as B=1,S=1.",
        )
    sizes = spec.parse_sizes(text)
    return (with_full_cache(spec, sizes_name(sizes), sizes),)
