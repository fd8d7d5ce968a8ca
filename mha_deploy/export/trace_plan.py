"""Which tokens a bundle is stepped through: a prompt and as many single tokens as fit, up to a limit."""

from __future__ import annotations

from dataclasses import dataclass

from mha_deploy.spec import AttentionSpec

STEPS = 64
_PROMPT = 24
_ROWS = 3


@dataclass(frozen=True, kw_only=True)
class PlannedTrace:
    """One trace to capture.

    Args:
        name: Its name.
        prompt: Length of the prompt of every row.
        steps: How many single tokens follow.
    """

    name: str
    prompt: tuple[int, ...]
    steps: int


def plan_trace(spec: AttentionSpec, steps: int = STEPS) -> PlannedTrace | str:
    """The trace of a layer with a cache, or why it has none.

    The rows of a static cache get prompts of different lengths. The steps stop where the cache is full.
    """
    if spec.cache == "none":
        return "no trace: the layer has no cache"
    B, S = spec.axes["B"], spec.axes["S"]
    if S.min > 1:
        return "no trace: the layer does not take single tokens"
    if spec.cache == "growing" and spec.axes["P"].min > 0:
        return "no trace: the layer does not begin with an empty cache"
    if spec.room < 2:
        return "no trace: the cache has no room for a second token"
    rows = min(max(_ROWS, B.min), B.max)
    longest = min(_PROMPT, S.max, spec.room // 2)
    prompts = [longest] * rows
    if spec.cache == "static":
        prompts = [max(1, longest // 2**row) for row in range(rows)]
    return PlannedTrace(name="steps", prompt=tuple(prompts), steps=min(steps, spec.room - longest))
