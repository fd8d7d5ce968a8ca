"""The errors of single steps: what they may be, whether they grow, and what it all comes to.

What a cache holds is rounded once and read many times: the error should grow no more than the module's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from mha_deploy.golden import GoldenCase
from mha_deploy.precision import Precision
from mha_deploy.validate.budget import Budget, budget_from_eager
from mha_deploy.validate.parity import OutputVerdict

Errors = Sequence[float | None]

_SHARE = 10  # a tenth of the steps at either end
_SHOWN_FAILURES = 8
_NEIGHBOURS = 8  # steps on either side whose budgets a step may use


class StepBudgets:
    """What the error of each step may be.

    A step has one token a row. The module's own error there is one draw from few numbers, by chance a small
    one at some of a thousand steps. So a step may use the budgets of the steps around it.

    Args:
        cases: One for each step, in order.
        precision: Their precision.
    """

    def __init__(self, cases: Iterable[GoldenCase], precision: Precision) -> None:
        self._each = [
            budget_from_eager(case.eager["output"], case.oracle["output"], precision) for case in cases
        ]

    def around(self, step: int) -> Budget:
        """The largest budgets near a step, counted from 1, measure by measure."""
        near = self._each[max(0, step - 1 - _NEIGHBOURS) : step + _NEIGHBOURS]
        return Budget(**{name: max(getattr(budget, name) for budget in near) for name in vars(near[0])})


@dataclass(frozen=True, kw_only=True)
class SteppingReport:
    """The verdict on decoding in one runtime.

    Args:
        model: Name of the model.
        precision: Its precision.
        backend: The runtime, with its version.
        trace: Name of the trace.
        prompt: Length of the prompt of every row.
        steps: How many single tokens were to follow.
        verdicts: One for the prefill, one for every step that was run, and two for the cache at the end; more
            where the lengths went wrong.
        first_failed: The step that failed first, 0 for the prefill; None where none did. The cache may still
            be wrong.
        errors: Relative L2 of the output of every step, None where it could not be measured.
        eager_errors: The module's own.
    """

    model: str
    precision: str
    backend: str
    trace: str
    prompt: tuple[int, ...]
    steps: int
    verdicts: tuple[OutputVerdict, ...]
    first_failed: int | None
    errors: tuple[float | None, ...]
    eager_errors: tuple[float | None, ...]

    @property
    def passed(self) -> bool:
        """Whether every step was run, and all of it is right."""
        return len(self.errors) == self.steps and all(verdict.passed for verdict in self.verdicts)

    @property
    def failures(self) -> list[OutputVerdict]:
        """What is wrong, in the order of the steps."""
        return [verdict for verdict in self.verdicts if not verdict.passed]

    @property
    def share(self) -> float | None:
        """The largest share of a budget that an error used."""
        return max((verdict.share for verdict in self.verdicts if verdict.share is not None), default=None)

    @property
    def growth(self) -> float | None:
        """How much larger the error is in the last tenth of the steps than in the first."""
        return growth_of(self.errors)

    @property
    def eager_growth(self) -> float | None:
        """The same of the module itself: outputs that shrink from step to step make relative errors grow."""
        return growth_of(self.eager_errors)

    @property
    def table(self) -> list[tuple[int, float | None]]:
        """Steps 1, 2, 4, 8, … and the last one, with their errors."""
        return at_doublings(self.errors)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: of the verdicts only the first failures, there may be thousands."""
        plain = ("model", "precision", "backend", "trace", "passed", "prompt", "steps", "first_failed")
        figures = ("share", "errors", "eager_errors", "growth", "eager_growth", "table")
        return {
            **{name: getattr(self, name) for name in (*plain, *figures)},
            "judged": len(self.verdicts),
            "failed": len(self.failures),
            "failures": [verdict.to_dict() for verdict in self.failures[:_SHOWN_FAILURES]],
        }


def growth_of(errors: Errors) -> float | None:
    """The median error of the last tenth of the steps over that of the first; a tenth is at least one step.

    None for a single step, and where a tenth has nothing that could be measured, or the first one no error.
    """
    if len(errors) < 2:
        return None
    tenth = max(1, len(errors) // _SHARE)
    first, last = _median(errors[:tenth]), _median(errors[-tenth:])
    return last / first if first and last is not None else None


def _median(errors: Errors) -> float | None:
    known = [error for error in errors if error is not None]
    return median(known) if known else None


def at_doublings(errors: Errors) -> list[tuple[int, float | None]]:
    """The errors of steps 1, 2, 4, 8, … and of the last one, for a table."""
    steps = [2**k for k in range(len(errors).bit_length())]
    return [(step, errors[step - 1]) for step in sorted({*steps, len(errors)} - {0}) if step <= len(errors)]
