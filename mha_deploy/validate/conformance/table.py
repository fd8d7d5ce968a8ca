"""The table: one row for each case, one column for each runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.graph.conformance import CASES, Case
from mha_deploy.precision import Precision
from mha_deploy.validate.conformance.columns import Column
from mha_deploy.validate.conformance.judging import ABSENT, WRONG, Cell, judge_answer
from mha_deploy.validate.conformance.trial import Trial, draw_trial


@dataclass(frozen=True, kw_only=True)
class ConformanceTable:
    """How every runtime treats every case.

    Args:
        precision: Name of the precision.
        seed: Seed of the inputs.
        rows: The cases.
        columns: The runtimes by name.
        cells: The verdicts, by case name and then by column.
    """

    precision: str
    seed: int
    rows: tuple[Case, ...]
    columns: tuple[str, ...]
    cells: Mapping[str, Mapping[str, Cell]]

    @property
    def passed(self) -> bool:
        """Whether no answer is wrong.

        Diagnostic rows do not count: they show what a runtime does by itself, and what is wrong about that
        is either avoided by its lowering or wrong in another row as well.
        """
        return not any(
            cell.status == WRONG
            for case in self.rows
            if not case.diagnostic
            for cell in self.cells[case.name].values()
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "precision": self.precision,
            "seed": self.seed,
            "passed": self.passed,
            "columns": list(self.columns),
            "rows": [
                {
                    "case": case.name,
                    "about": case.about,
                    "diagnostic": case.diagnostic,
                    "cells": {name: asdict(cell) for name, cell in self.cells[case.name].items()},
                }
                for case in self.rows
            ],
        }


def conformance_table(
    columns: Sequence[Column],
    precision: Precision,
    *,
    seed: int = 0,
    cases: Sequence[Case] = CASES,
    on_column: Callable[[str], None] = lambda name: None,
) -> ConformanceTable:
    """Ask every runtime every case, and judge the answers.

    Args:
        columns: The runtimes.
        precision: The precision of the graphs.
        seed: Seed of the inputs.
        cases: The rows.
        on_column: Called with the name of each column before it is asked.
    """
    names = tuple(column.name for column in columns)
    if len(set(names)) != len(names):
        raise DeployError("Two columns have the same name.", got=", ".join(names))
    trials = [draw_trial(case, precision, seed) for case in cases]
    cells: dict[str, dict[str, Cell]] = {case.name: {} for case in cases}
    for column in columns:
        on_column(column.name)
        for name, cell in _cells_of(column, trials).items():
            cells[name][column.name] = cell
    return ConformanceTable(
        precision=precision.name, seed=seed, rows=tuple(cases), columns=names, cells=cells
    )


def _cells_of(column: Column, trials: Sequence[Trial]) -> dict[str, Cell]:
    try:
        answers = column.run(trials)
    except BackendUnavailable as error:
        return {trial.case.name: Cell(status=ABSENT, detail=error.in_one_line) for trial in trials}
    return {trial.case.name: judge_answer(trial, answers[trial.case.name]) for trial in trials}
