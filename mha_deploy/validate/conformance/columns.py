"""The runtimes of the table, behind one seam: trials in, answers out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import onnx_ir as ir

from mha_deploy.backends.runner import Runner
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.build import NodeBuilder
from mha_deploy.graph.conformance import combined
from mha_deploy.graph.eligibility import Target, judge
from mha_deploy.graph.eligibility.records import REFUSED, WRONG_ANSWER
from mha_deploy.graph.lower import lower
from mha_deploy.validate.conformance.judging import Answer
from mha_deploy.validate.conformance.trial import Trial

Open = Callable[[ir.Model], Runner]
Run = Callable[[Sequence[Trial]], Mapping[str, Answer]]


class Column(Protocol):
    """One runtime."""

    @property
    def name(self) -> str:
        """Its name at the head of the column."""

    @property
    def run(self) -> Run:
        """Answers every trial by the name of its case; raises `BackendUnavailable` where it is not here."""


@dataclass(frozen=True, kw_only=True)
class RunColumn:
    """A runtime as a name and a function."""

    name: str
    run: Run


def absent_column(name: str, why: str) -> Column:
    """A runtime that is known not to be here."""

    def run(trials: Sequence[Trial]) -> Mapping[str, Answer]:
        raise BackendUnavailable(why)

    return RunColumn(name=name, run=run)


def runner_column(name: str, open_model: Open, dialect: str, **options: Any) -> Column:
    """A runtime that is asked one case after the other.

    Args:
        name: The head of the column.
        open_model: Loads a lowered graph into the runtime.
        dialect: The dialect the runtime reads.
        **options: Options of the dialect.
    """

    def answer(trial: Trial) -> Answer:
        try:
            model = _lowered(trial, dialect, options)
            return _run(open_model, model, [trial])[trial.case.name]
        except DeployError as error:
            _raise_if_absent(open_model, error)
            return error

    return RunColumn(name=name, run=lambda trials: {trial.case.name: answer(trial) for trial in trials})


def engine_column(name: str, build_and_open: Open, *, target: Target, dialect: str, **options: Any) -> Column:
    """A runtime whose builds are slow: the cases it takes are built as one engine and run once.

    Args:
        name: The head of the column.
        build_and_open: Builds an engine of a lowered graph and loads it.
        target: What is asked beforehand whether it takes a case.
        dialect: The dialect its parser reads.
        **options: Options of the dialect.
    """

    def run(trials: Sequence[Trial]) -> Mapping[str, Answer]:
        answers: dict[str, Answer] = {}
        models: dict[str, ir.Model] = {}
        for trial in trials:
            try:
                needed = _options_for(trial, target, dialect)
                models[trial.case.name] = _lowered(trial, dialect, {**needed, **options})
            except DeployError as error:
                answers[trial.case.name] = error
        taken = [trial for trial in trials if trial.case.name in models]
        return answers | _together_or_alone(build_and_open, models, taken)

    return RunColumn(name=name, run=run)


# -- graphs ----------------------------------------------------------------------------------------


def _lowered(trial: Trial, dialect: str, options: Mapping[str, Any]) -> ir.Model:
    lowered = lower(trial.model, dialect, **options)
    if trial.case.diagnostic and not any(node.is_causal for node in attention_nodes(lowered)):
        raise DeployError(f"The {dialect} dialect writes causal as a mask: the runtime's own is not used.")
    return lowered


def _options_for(trial: Trial, target: Target, dialect: str) -> dict[str, Any]:
    """The options of the lowering that this target needs; refused where nothing helps."""
    (answer,) = judge(attention_nodes(trial.model), target)
    hopeless = [
        finding
        for finding in answer.findings
        if finding.cured_by is None and finding.severity in (REFUSED, WRONG_ANSWER)
    ]
    if hopeless:
        raise DeployError(
            " ".join(finding.message for finding in hopeless),
            hint="; ".join(finding.remedy for finding in hopeless),
        )
    return {} if trial.case.diagnostic or dialect != "trt" else dict(answer.options)


# -- runs ------------------------------------------------------------------------------------------


def _run(open_model: Open, model: ir.Model, trials: Sequence[Trial]) -> dict[str, Answer]:
    """Open a model that holds these trials, and run it once."""
    feeds = {name: array for trial in trials for name, array in trial.feeds.items()}
    with open_model(model) as runner:
        outputs = runner.run(feeds)
    missing = sorted({trial.case.tensor("y") for trial in trials} - set(outputs))
    if missing:
        raise DeployError("The runtime left out an output.", got=", ".join(missing))
    return {trial.case.name: outputs[trial.case.tensor("y")] for trial in trials}


def _together_or_alone(
    build_and_open: Open, models: Mapping[str, ir.Model], trials: Sequence[Trial]
) -> dict[str, Answer]:
    if not trials:
        return {}
    try:
        return _run(build_and_open, combined([models[trial.case.name] for trial in trials]), trials)
    except DeployError as error:
        _raise_if_absent(build_and_open, error)
    # One case that is refused must not hide the others.
    return {trial.case.name: _alone(build_and_open, models[trial.case.name], trial) for trial in trials}


def _alone(build_and_open: Open, model: ir.Model, trial: Trial) -> Answer:
    try:
        return _run(build_and_open, model, [trial])[trial.case.name]
    except DeployError as error:
        return error


def _raise_if_absent(open_model: Open, error: DeployError) -> None:
    """Tell a runtime that is not here from one that has no kernels for a graph: ask it for the simplest."""
    if isinstance(error, BackendUnavailable):
        open_model(_simplest_model()).close()


def _simplest_model() -> ir.Model:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1]))
    builder = NodeBuilder("simplest")
    y = builder.op("Identity", x)
    y.type, y.shape = x.type, x.shape
    return ir.Model(ir.Graph([x], [y], nodes=builder.nodes, opset_imports={"": 17}), ir_version=8)
