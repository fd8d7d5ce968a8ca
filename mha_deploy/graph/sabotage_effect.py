"""Mistakes that change nothing within the axes of a layer: what no validator can catch, or needs to."""

from __future__ import annotations

from dataclasses import dataclass

from mha_deploy.spec import AttentionSpec


def without_effect(spec: AttentionSpec) -> frozenset[str]:
    """The names of the mistakes that leave a layer right at every size that its axes allow."""
    reach = _reach(spec)
    needs = {
        # The softmax of one score is 1, whatever the score.
        "scale off by 0.5 %": reach.seen > 1,
        "scale missing": reach.seen > 1,
        "softcap dropped": reach.seen > 1,
        "groups interleaved": reach.seen > 1,
        "mask dropped": _mask_hides(spec, reach),
        "mask off by one": reach.keys > 1 and _mask_hides(spec, reach),
        # The last token of a call has no future.
        "causal dropped": reach.new > 1,
        "causal off by one": reach.new > 1,
        "past forgotten": reach.past > 0,
        "cache off by one": reach.past > (1 if spec.cache == "growing" else 0),
        # Keys are seen in the cache as well as in the scores. At position 0 nothing is turned.
        "rotary dropped": reach.keys > 1 and (reach.seen > 1 or spec.cache != "none"),
        "rotary off by one": reach.keys > 1 and (reach.seen > 1 or spec.cache != "none"),
    }
    return frozenset(mistake for mistake, shows in needs.items() if not shows)


@dataclass(frozen=True, kw_only=True)
class _Reach:
    """How far the calls of a layer reach.

    Args:
        new: The most tokens of one call.
        past: The most tokens before them.
        keys: The most keys that there are.
        seen: The most keys that one query sees.
    """

    new: int
    past: int
    keys: int
    seen: int


def _reach(spec: AttentionSpec) -> _Reach:
    most, least = spec.sizes("max"), spec.sizes("min")
    past, keys = 0, most["T"] if spec.is_cross else most["S"]
    if spec.cache == "growing":
        past, keys = most["P"], most["P"] + most["S"]
    if spec.cache == "static":
        past, keys = most["T"] - least["S"], most["T"]
    return _Reach(new=most["S"], past=past, keys=keys, seen=min(spec.window or keys, keys))


def _mask_hides(spec: AttentionSpec, reach: _Reach) -> bool:
    """Whether a mask hides a key of some query; one of a window hides the future, too."""
    if spec.mask == "padding":
        return True  # a row may have no key at all
    if spec.mask == "additive":
        return reach.seen > 1
    return reach.new > 1 or reach.seen < reach.keys
