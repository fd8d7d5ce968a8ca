"""How does each runtime really treat masks? One table says it, case by case.

`conformance_table` asks every column the cases of `graph.conformance`. A column is a runtime: `runner_column`
for one that loads a graph, `engine_column` for one that builds an engine, `absent_column` for one that is not
here; PyTorch's own is `baselines.masks.torch_column`, for which PyTorch must be here.
"""

from __future__ import annotations

from mha_deploy.validate.conformance.columns import (
    Column,
    RunColumn,
    absent_column,
    engine_column,
    runner_column,
)
from mha_deploy.validate.conformance.judging import (
    ABSENT,
    CONFORMS,
    REFUSED,
    WRONG,
    Answer,
    Cell,
    judge_answer,
)
from mha_deploy.validate.conformance.table import ConformanceTable, conformance_table
from mha_deploy.validate.conformance.trial import Trial, draw_trial

__all__ = [
    "ABSENT",
    "CONFORMS",
    "REFUSED",
    "WRONG",
    "Answer",
    "Cell",
    "Column",
    "ConformanceTable",
    "RunColumn",
    "Trial",
    "absent_column",
    "conformance_table",
    "draw_trial",
    "engine_column",
    "judge_answer",
    "runner_column",
]
