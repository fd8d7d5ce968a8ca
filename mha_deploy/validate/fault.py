"""An engine is wrong: is the graph, the fusion, the precision or the lowering at fault?

    the graph in a trusted runtime   wrong   the graph
    its unfused twin                 right   the fused kernel, or how attention is written for it
    its unfused float32 twin         right   the precision
                                     wrong   the lowering, or the runtime

Each trial is run on the failing cases only, and the first conclusive one is the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from mha_deploy.bundle.cases import GoldenCase
from mha_deploy.bundle.folder import Bundle
from mha_deploy.errors import DeployError
from mha_deploy.graph.file import load_graph
from mha_deploy.graph.upcast import float32_twin, unfused_twin
from mha_deploy.metrics import OutputVerdict, judge_case
from mha_deploy.model.precision import Precision
from mha_deploy.runtime import available_cpu_backend, open_runner
from mha_deploy.runtime.runner import Runner

OpenTwin = Callable[[ir.Model], Runner]

GRAPH, FUSION, PRECISION, LOWERING, UNKNOWN = "graph", "fusion", "precision", "lowering", "unknown"

_EXPLANATIONS = {
    GRAPH: "The bundle's own graph is wrong in a runtime that is trusted.",
    FUSION: "In the same precision it is right once nothing can be fused: the fused kernel is wrong, or how "
    "attention is written for it.",
    PRECISION: "Unfused it is wrong as well, and right once attention is computed in float32.",
    LOWERING: "The graph is right, and not even its unfused float32 twin is: the lowering or the runtime.",
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One thing that was run instead of the engine.

    Args:
        name: What it was.
        passed: Whether every failing case is right there; None where it could not be tried.
        share: The largest share of the budget used; None where there is no number.
        problem: The first thing that was wrong, or why it could not be tried.
    """

    name: str
    passed: bool | None
    share: float | None = None
    problem: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; what could not be tried says so in its name, and has not passed."""
        name = self.name if self.passed is not None else f"{self.name}, {self.problem}"
        return {"name": name, "passed": bool(self.passed), "share": self.share}


@dataclass(frozen=True, kw_only=True)
class FaultReport:
    """What is at fault, how that is known, and the trials that show it."""

    at_fault: str
    explanation: str
    trials: tuple[Trial, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        trials = [trial.to_dict() for trial in self.trials]
        return {"at_fault": self.at_fault, "explanation": self.explanation, "trials": trials}


def attribute_fault(
    bundle: Bundle,
    failing_cases: Sequence[GoldenCase],
    open_twin: OpenTwin,
    accumulate: str = "fp32",
) -> FaultReport:
    """Find out what an engine's wrong answers come from.

    Args:
        bundle: The bundle the engine was built from.
        failing_cases: The cases it is wrong on.
        open_twin: Builds a graph in the engine's runtime as the engine was built, and opens it. Twins have
            more outputs than the model, and the last ones of the float32 twin are float32.
        accumulate: The type that the engine's GEMMs accumulate in.
    """
    if not failing_cases:
        raise DeployError("There is nothing to fault anybody for: no case fails.")
    precision = replace(bundle.manifest.precision, accumulate=accumulate)
    return _Attribution(load_graph(bundle.model_path), precision, failing_cases, open_twin).attribute()


def graph_at_fault(backend: str, share: float | None) -> FaultReport:
    """What a graph that is wrong in a trusted runtime proves by itself.

    Args:
        backend: The runtime.
        share: The largest share of the budget it used.
    """
    trial = Trial(name=f"the graph in {backend}", passed=False, share=share)
    return FaultReport(at_fault=GRAPH, explanation=_EXPLANATIONS[GRAPH], trials=(trial,))


class _Attribution:
    """The trials of one engine, in the order in which they are conclusive."""

    def __init__(
        self, model: ir.Model, precision: Precision, cases: Sequence[GoldenCase], open_twin: OpenTwin
    ) -> None:
        self.model, self.precision, self.cases, self.open_twin = model, precision, cases, open_twin
        self.trials: list[Trial] = []

    def attribute(self) -> FaultReport:
        trusted = available_cpu_backend(self.precision)
        graph = self._tried(f"the graph in {trusted}", lambda: open_runner(trusted, self.model))
        if graph is False:
            return self._verdict(GRAPH)
        name = self.precision.name
        unfused = self._tried(f"unfused twin, {name}", lambda: self.open_twin(unfused_twin(self.model)))
        if unfused is True:
            return self._verdict(FUSION)
        # In float32 the two twins are one.
        exact = unfused if name == "fp32" else self._tried_in_float32()
        if exact is True and unfused is False:
            return self._verdict(PRECISION)
        # Neither fusion nor precision is left in a float32 twin that is wrong.
        if exact is False and graph is True:
            return self._verdict(LOWERING)
        return self._verdict(UNKNOWN)

    def _tried_in_float32(self) -> bool | None:
        return self._tried("unfused twin, fp32", lambda: self.open_twin(float32_twin(self.model)))

    def _tried(self, name: str, open_: Callable[[], Runner]) -> bool | None:
        """Run one trial and keep it; None where it could not be run."""
        try:
            runner = open_()
        except DeployError as error:
            return self._keep(Trial(name=name, passed=None, problem=f"could not be built: {_line(error)}"))
        with runner:
            try:
                verdicts = [verdict for case in self.cases for verdict in self._judged(runner, case)]
            except DeployError as error:
                return self._keep(Trial(name=name, passed=None, problem=f"could not be run: {_line(error)}"))
        wrong = next((verdict for verdict in verdicts if verdict.is_wrong), None)
        problem = None if wrong is None else f"{wrong.case}/{wrong.output}: {wrong.problem}"
        return self._keep(Trial(name=name, passed=wrong is None, share=_share(verdicts), problem=problem))

    def _judged(self, runner: Runner, case: GoldenCase) -> list[OutputVerdict]:
        got = runner.run(case.inputs)
        own = {name: array for name, array in got.items() if name in case.oracle}  # a twin has more
        return judge_case(case, own, self.precision)

    def _keep(self, trial: Trial) -> bool | None:
        self.trials.append(trial)
        return trial.passed

    def _verdict(self, at_fault: str) -> FaultReport:
        explanation = _EXPLANATIONS.get(at_fault) or self._why_unknown()
        return FaultReport(at_fault=at_fault, explanation=explanation, trials=tuple(self.trials))

    def _why_unknown(self) -> str:
        missing = [f"{trial.name} {trial.problem}" for trial in self.trials if trial.passed is None]
        return f"A trial that would have shown it is missing: {'; '.join(missing)}."


def _share(verdicts: Sequence[OutputVerdict]) -> float | None:
    shares = [math.inf if verdict.share is None else verdict.share for verdict in verdicts]
    return max(shares) if shares and math.isfinite(max(shares)) else None


def _line(error: DeployError) -> str:
    return " ".join(str(error).split())
