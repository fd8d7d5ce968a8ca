"""Can this bundle tell a wrong model from a right one? Make the mistakes, and see each one caught."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mha_deploy.bundle import Bundle
from mha_deploy.golden import golden_cases
from mha_deploy.graph.file import load_graph
from mha_deploy.graph.sabotage import sabotaged, sabotages
from mha_deploy.spec import AttentionSpec
from mha_deploy.validate.graph import graph_parity
from mha_deploy.validate.parity import ParityReport


@dataclass(frozen=True, kw_only=True)
class Catch:
    """One deliberate mistake, and whether the golden cases give it away.

    Args:
        mistake: What was done to the model.
        caught: Whether the verdict was a failure.
        share: The largest share of an error budget it used; infinite where there was no number to compare.
    """

    mistake: str
    caught: bool
    share: float


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """The right model's own share of the budget, and every mistake that could be made."""

    right: ParityReport
    catches: tuple[Catch, ...]

    @property
    def passed(self) -> bool:
        """Whether the right model passes and every wrong one fails."""
        return self.right.passed and bool(self.catches) and all(catch.caught for catch in self.catches)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; an infinite share is null."""
        return {
            "passed": self.passed,
            "right": {"passed": self.right.passed, "share": _finite(budget_share(self.right))},
            "mistakes": [
                {"mistake": catch.mistake, "caught": catch.caught, "share": _finite(catch.share)}
                for catch in self.catches
            ],
        }


def _finite(share: float) -> float | None:
    return share if math.isfinite(share) else None  # JSON has no infinity


def self_test(
    bundle: Bundle,
    backend: str | None = None,
    *,
    on_mistake: Callable[[str], None] = lambda name: None,
) -> SelfTest:
    """Validate the bundle's own graph, then every sabotaged copy of it."""
    model, cases = load_graph(bundle.model_path), list(golden_cases(bundle))
    # What has no effect is known of our own layers only.
    spec = bundle.manifest.spec if isinstance(bundle.manifest.spec, AttentionSpec) else None
    catches = []
    for mistake in sabotages():
        wrong = sabotaged(model, mistake, spec)
        if wrong is not None:
            on_mistake(mistake)
            report = graph_parity(bundle, backend, model=wrong, cases=cases)
            catches.append(Catch(mistake=mistake, caught=not report.passed, share=budget_share(report)))
    right = graph_parity(bundle, backend, model=model, cases=cases)
    return SelfTest(right=right, catches=tuple(catches))


def budget_share(report: ParityReport) -> float:
    """The largest share of a budget that any output used; infinite where one had no number to compare."""
    shares = [
        verdict.budget.share_used(verdict.deviation) if verdict.budget and verdict.deviation else float("inf")
        for verdict in report.verdicts
    ]
    return max(shares, default=float("inf"))
