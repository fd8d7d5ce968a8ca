"""How to validate: everything a user can choose, with its default written once."""

from __future__ import annotations

from dataclasses import dataclass

REPORT_FORMAT = 2
"""The format of report.json; readers refuse any other."""


@dataclass(frozen=True, kw_only=True)
class ValidateOptions:
    """What to examine.

    Args:
        backends: The runtimes, by name; default: all that can run here.
        engine: Name of the one engine to run; default: all of the bundle's.
        latency: Whether to time; None for "where there is a GPU".
        sweep: Whether to try every profile at its corners, with fresh inputs; None for "where an engine runs
            and PyTorch can compute the expected results".
        probe: Whether to try inputs that make masks, positions and caches visible; None for "where PyTorch
            can compute the expected results".
        fresh: How many fresh random cases to draw besides.
        steps: How many tokens to step through besides the bundle's own, for a layer with a cache.
        prompt: Length of the prompt before them; default: the usual one.
        batch: Their batch elements; default: the optimum of the axis B.
        layers: Whether an engine's attentions are judged one by one, too, in a twin that gives them out.
        conformance: Whether to put the table of masks together.
        samples: Samples of each timing.
        kernels: Whether to say which kernels take the time.
        require_fused: Whether an engine with decomposed attention fails.
        require_precision: Whether an engine in another precision than the graph's fails.
        require_run: Whether an engine that did not run fails.
        require_coverage: Whether sizes, profiles and engines that were not run fail.
        seed: Seed of fresh inputs.
    """

    backends: tuple[str, ...] = ()
    engine: str | None = None
    latency: bool | None = None
    sweep: bool | None = None
    probe: bool | None = None
    fresh: int = 0
    steps: int = 0
    prompt: int | None = None
    batch: int | None = None
    layers: bool = False
    conformance: bool = False
    samples: int = 200
    kernels: bool = False
    require_fused: bool = False
    require_precision: bool = False
    require_run: bool = False
    require_coverage: bool = False
    seed: int = 1
