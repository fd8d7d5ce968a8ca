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
    """One thing that was run instead of the engine."""

    name: str  # what it was
    passed: bool | None  # whether every failing case is right there; None where it could not be tried
    share: float | None = None  # the largest share of the budget used; None where there is no number
    problem: str | None = None  # the first thing that was wrong, or why it could not be tried


@dataclass(frozen=True, kw_only=True)
class FaultReport:
    """What is at fault, how that is known, and the trials that show it."""

    at_fault: str
    explanation: str
    trials: tuple[Trial, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; what could not be tried says so in its name, and has not passed."""
        trials = [
            {
                "name": each.name if each.passed is not None else f"{each.name}, {each.problem}",
                "passed": bool(each.passed),
                "share": each.share,
            }
            for each in self.trials
        ]
        return {"at_fault": self.at_fault, "explanation": self.explanation, "trials": trials}


def attribute_fault(
    bundle: Bundle, failing_cases: Sequence[GoldenCase], open_twin: OpenTwin, accumulate: str = "fp32"
) -> FaultReport:
    """Find out what an engine's wrong answers come from.

    Args:
        bundle: The bundle the engine was built from.
        failing_cases: The cases it is wrong on.
        open_twin: Builds a graph in the engine's runtime as the engine was built, and opens it. Twins have
            more outputs than the model, and the last ones of the float32 twin are float32.
        accumulate: The type that the engine's GEMMs accumulate in.
    """
    precision = replace(bundle.manifest.precision, accumulate=accumulate)
    model, trusted, name = load_graph(bundle.model_path), available_cpu_backend(precision), precision.name
    trials: list[Trial] = []

    def passes(what: str, open_: Callable[[], Runner]) -> bool | None:
        """Run the failing cases in something else than the engine; None where that cannot be tried."""
        step, verdicts = "built", list[OutputVerdict]()
        try:
            with open_() as runner:
                step = "run"
                for case in failing_cases:
                    got = runner.run(case.inputs)
                    own = {output: got[output] for output in got if output in case.oracle}  # a twin has more
                    verdicts += judge_case(case, own, precision)
        except DeployError as error:
            problem = f"could not be {step}: {' '.join(str(error).split())}"
            trials.append(Trial(name=what, passed=None, problem=problem))
            return None
        wrong = next((f"{v.case}/{v.output}: {v.problem}" for v in verdicts if v.is_wrong), None)
        share = max((math.inf if v.share is None else v.share for v in verdicts), default=math.inf)
        finite = share if math.isfinite(share) else None
        trials.append(Trial(name=what, passed=wrong is None, share=finite, problem=wrong))
        return wrong is None

    at_fault = UNKNOWN
    graph = passes(f"the graph in {trusted}", lambda: open_runner(trusted, model))
    if graph is False:
        at_fault = GRAPH
    elif unfused := passes(f"unfused twin, {name}", lambda: open_twin(unfused_twin(model))):
        at_fault = FUSION
    else:
        exact: bool | None = unfused  # in float32 the two twins are one
        if name != "fp32":
            exact = passes("unfused twin, fp32", lambda: open_twin(float32_twin(model)))
        if exact is True and unfused is False:
            at_fault = PRECISION
        elif exact is False and graph is True:  # neither fusion nor precision is left in it
            at_fault = LOWERING
    missing = "; ".join(f"{trial.name} {trial.problem}" for trial in trials if trial.passed is None)
    explanation = _EXPLANATIONS.get(at_fault, f"A trial that would have shown it is missing: {missing}.")
    return FaultReport(at_fault=at_fault, explanation=explanation, trials=tuple(trials))


def graph_at_fault(backend: str, share: float | None) -> FaultReport:
    """What a graph that is wrong in a trusted runtime proves by itself."""
    trial = Trial(name=f"the graph in {backend}", passed=False, share=share)
    return FaultReport(at_fault=GRAPH, explanation=_EXPLANATIONS[GRAPH], trials=(trial,))
