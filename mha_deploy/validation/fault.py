"""What is wrong, and where: the part of an engine that is at fault, and the first attention and node.

A model may be right as a whole while one of its attentions is off. What PyTorch computed there in FP64 is in
the bundle, by the name of the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, NamedTuple

import numpy as np
import onnx_ir as ir
from msgspec import Struct, structs

from mha_deploy import judge, metrics
from mha_deploy.bundle.cases import (
    GoldenCase,
    Reference,
    baseline_names,
    read_arrays,
    read_case,
    refuse_implausible,
    refuse_infinite,
    unpack_baselines,
)
from mha_deploy.bundle.folder import Bundle
from mha_deploy.bundle.manifest import Source
from mha_deploy.engine.build import twin_opener
from mha_deploy.environment import can_import
from mha_deploy.errors import BackendUnavailable, BundleError, DeployError
from mha_deploy.graph.file import load_graph, value_named, with_outputs
from mha_deploy.graph.ir import infer_shapes, input_at, is_op, nodes_behind
from mha_deploy.graph.lower.call import LoweringError
from mha_deploy.graph.roles import CARRIES
from mha_deploy.graph.upcast import float32_twin, unfused_twin
from mha_deploy.graph.weights import WeightSearch, search_weights
from mha_deploy.judge import Accumulation, OutputVerdict, ParityReport
from mha_deploy.model.precision import Precision
from mha_deploy.options import OnName, OnStep, Step, silent, uncounted
from mha_deploy.runtime import RUNNERS, available_cpu_runtime, open_runner
from mha_deploy.runtime.runner import Arrays, Runner
from mha_deploy.runtime.user_code import refuse_without_factory
from mha_deploy.status import CaseKind, Kind, Outcome, Reason, Word, derive, means
from mha_deploy.text import reason_text
from mha_deploy.validation.decode import admits
from mha_deploy.validation.runtimes import RuntimeFinder
from mha_deploy.validation.subjects import Fit, FittedRunner, Names, fit

OpenModel = Callable[[ir.Model], Runner]

# -- An engine is wrong: is the graph, the fusion, the precision or the lowering at fault? -----------
#
#    the graph in a trusted runtime   wrong   the graph
#    its unfused twin                 right   the fused kernel, or how attention is written for it
#    its unfused float32 twin         right   the precision
#                                     wrong   the lowering, or the runtime
#
# Each trial is run on the failing cases only, and the first conclusive one is the last.


class AtFault(Word):
    """What an engine's wrong answers come from."""

    GRAPH = "graph"
    FUSION = "fusion"
    PRECISION = "precision"
    LOWERING = "lowering"
    UNKNOWN = "unknown"


GRAPH, FUSION, PRECISION, LOWERING, UNKNOWN = AtFault

_EXPLANATIONS = {
    GRAPH: "The bundle's own graph gives wrong results in a trusted runtime.",
    FUSION: "In the same precision the engine is right when attention is not fused: the fused kernel is "
    "wrong, or the form in which attention is written for it.",
    PRECISION: "Without fusion the engine is wrong as well; with attention in float32 it is right.",
    LOWERING: "The graph is right, but the engine is wrong even without fusion and in float32: the lowering "
    "or the runtime is at fault.",
}


class FaultTrial(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that was run in place of the engine."""

    name: Annotated[str, means("what was run")]
    outcome: Annotated[
        Outcome,
        means("whether every failing case is right there; `not verified` if it could not be tried"),
    ]
    share: Annotated[float | None, means("share of the budget it used; null if not finite")] = None
    reason: Annotated[
        Reason | None, means("why it could not be tried: `did not build` or `did not run`; null if it was")
    ] = None


class FaultReport(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is at fault, and the trials that show it."""

    at_fault: Annotated[AtFault, means("what is at fault")]
    explanation: Annotated[str, means("how that is known")]
    trials: Annotated[tuple[FaultTrial, ...], means("the trials that show it")]


def attribute_fault(
    bundle: Bundle, failing_cases: Sequence[GoldenCase], open_twin: OpenModel, accumulate: str = "fp32"
) -> FaultReport:
    """Find out what an engine's wrong answers come from; `accumulate` is the type of its GEMMs.

    `open_twin` builds a graph in the engine's runtime as the engine was built, and opens it. Twins have more
    outputs than the model, and the last ones of the float32 twin are float32.
    """
    precision = replace(bundle.manifest.precision, accumulate=accumulate)
    model, trusted, name = load_graph(bundle.model_path), available_cpu_runtime(precision), precision.name
    trials, missing = list[FaultTrial](), list[str]()

    def passes(what: str, open_: Callable[[], Runner]) -> bool | None:
        """Run the failing cases in something else than the engine; None where that cannot be tried."""
        step, verdicts = Kind.DID_NOT_BUILD, list[OutputVerdict]()
        try:
            with open_() as runner:
                step = Kind.DID_NOT_RUN
                for case in failing_cases:
                    got = runner.run(case.inputs)
                    own = {output: got[output] for output in got if output in case.oracle}  # a twin has more
                    verdicts += judge.judge_case(case, own, precision)
        except DeployError as error:
            reason = Reason(kind=step, got=error.in_one_line)
            trials.append(FaultTrial(name=what, outcome=Outcome.NOT_VERIFIED, reason=reason))
            missing.append(f"{what} {reason_text(reason)}")
            return None
        passed = not any(verdict.is_wrong for verdict in verdicts)
        outcome, share = Outcome.passing(passed), judge.largest_share(verdicts)
        trials.append(FaultTrial(name=what, outcome=outcome, share=share))
        return passed

    at_fault = UNKNOWN
    graph = passes(f"the graph in {trusted}", lambda: open_runner(trusted, model))
    if graph is False:
        at_fault = GRAPH
    elif unfused := passes(f"unfused engine, {name}", lambda: open_twin(unfused_twin(model))):
        at_fault = FUSION
    else:
        exact: bool | None = unfused  # in float32 the two twins are one
        if name != "fp32":
            exact = passes("unfused engine, fp32", lambda: open_twin(float32_twin(model)))
        if exact is True and unfused is False:
            at_fault = PRECISION
        elif exact is False and graph is True:  # neither fusion nor precision is left in it
            at_fault = LOWERING
    unknown = f"The cause is not known, because a trial is missing: {'; '.join(missing)}."
    explanation = _EXPLANATIONS.get(at_fault, unknown)
    return FaultReport(at_fault=at_fault, explanation=explanation, trials=tuple(trials))


def graph_at_fault(runtime: str, share: float | None) -> FaultReport:
    """What a graph that is wrong in a trusted runtime proves by itself."""
    trial = FaultTrial(name=f"the graph in {runtime}", outcome=Outcome.FAILED, share=share)
    return FaultReport(at_fault=GRAPH, explanation=_EXPLANATIONS[GRAPH], trials=(trial,))


ReferenceValues = Callable[[Sequence[str]], Arrays]
"""Gives what values of the graph must be, by their names; those it does not know are left out."""

_FLOATS = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT})

# -- Every attention by itself ---------------------------------------------------------------------


def layers_case(bundle: Bundle) -> GoldenCase | None:
    """The golden case that is known inside, if any: its results are those of the attentions, by node name."""
    entry = bundle.manifest.layers
    if entry is None:
        return None
    golden = next((each for each in bundle.manifest.golden if each.name == entry.case), None)
    if golden is None:
        raise BundleError("The manifest names no such golden case.", got=entry.case, hint="export again")
    names = {f"{group}/{value}" for group in ("oracle", "eager") for value in entry.values.values()}
    precision, values = bundle.manifest.precision, sorted(set(entry.values.values()))
    arrays = read_arrays(bundle.file(entry.file), names | baseline_names(values, precision))
    oracle, eager = (
        {node: arrays[f"{group}/{value}"] for node, value in entry.values.items()}
        for group in ("oracle", "eager")
    )
    refuse_infinite(entry.file, (*oracle.items(), *eager.items()))
    exact = {value: arrays[f"oracle/{value}"] for value in values}
    baselines = {
        kind: replace(each, samples={node: each.samples[value] for node, value in entry.values.items()})
        for kind, each in unpack_baselines(entry.file, arrays, exact, precision).items()
    }
    refuse_implausible(entry.file, oracle, eager, precision, baselines)
    reference = Reference(oracle, entry.source)
    return replace(
        read_case(bundle, golden),
        name=CaseKind.LAYERS.value,
        oracle=reference,
        eager=eager,
        baselines=baselines,
    )


def layer_parity(
    bundle: Bundle,
    open_model: OpenModel,
    accumulation: Accumulation = Accumulation(),  # noqa: B008  # a frozen record
    model: ir.Model | None = None,
    engine: str | None = None,
) -> ParityReport | None:
    """Judge every attention of a module in a runtime; None where the bundle does not know them.

    With a `model`, those of a graph with the names of the bundle's; `engine` is the one that is judged.
    """
    case, entry, precision = layers_case(bundle), bundle.manifest.layers, bundle.manifest.precision
    if case is None or entry is None:
        return None
    with open_model(with_outputs(model or load_graph(bundle.model_path), entry.values.values())) as runner:
        got = runner.run(case.inputs)
    by_node = {node: got[value] for node, value in entry.values.items() if value in got}
    return judge.parity_from_verdicts(
        _judge_layers(case, by_node, replace(precision, accumulate=accumulation.type)),
        model=bundle.manifest.spec.name,
        precision=precision,
        runtime=runner.name,
        engine=engine,
        cases=CaseKind.LAYERS,
        accumulation=accumulation,
    )


def _judge_layers(case: GoldenCase, got: Arrays, precision: Precision) -> list[OutputVerdict]:
    """The verdicts on the attentions that are there, in the order in which they run."""
    there = [node for node in case.oracle if node in got]
    oracle = case.oracle.map(lambda every: {node: every[node] for node in there})
    verdicts = judge.judge_case(replace(case, oracle=oracle), got, precision)
    return sorted(verdicts, key=lambda verdict: there.index(verdict.output))


# -- The first attention that leaves its oracle, and then the first node ---------------------------


class Suspect(Struct, frozen=True, kw_only=True):
    """A node that may be at fault."""

    node: str  # its name; without one, its operator and its result
    operator: str  # what it does
    value: str  # its result
    problem: str | None  # what is wrong with the result
    # A node behind it, whose result was compared: all that lies between only moves numbers
    shown_at: str | None = None
    # What it reads, or an unseen node before it, and is not what the bundle's graph has by that name
    constants: tuple[str, ...] = ()
    # Of another graph, further nodes from which on no value is that of the bundle
    others: tuple[str, ...] = ()
    # Whether the fault may also be behind it: in another graph, which may compute the same by other steps
    is_start: bool = False


class OutputReason(Struct, frozen=True, kw_only=True):
    """What is wrong with an output, or why it is not verified."""

    case: str  # name of the case
    output: str  # name of the output, or of the attention
    reason: Reason


class Bisection(Struct, frozen=True, kw_only=True):
    """Where a model goes wrong."""

    outcome: Outcome = Outcome.PASSED  # failed where an output is wrong; see `unverified` for the third
    model: str  # name of the model
    runtime: str
    case: str  # the golden case that was looked into
    # What is wrong with the whole; None where nothing is, and then nothing was looked for
    wrong: OutputReason | None = None
    # Outputs of which a case shows neither that they are right nor that they are wrong, and why
    unverified: tuple[OutputReason, ...] = ()
    attentions: int  # how many attentions can be compared
    last_right: str | None = None  # the last attention that is right, if any is
    first_wrong: str | None = None  # the first that is wrong, if any is
    first_node: Suspect | None = None  # the first node whose result is wrong
    # Nodes before it whose results the reference or the runtime does not have: it may be one of them. Those
    # that read changed constants are first, those that compute no floats last; the nearest before others
    unseen: tuple[str, ...] = ()
    runs: int  # how often the runtime was built or opened, the whole model included
    reference: str = ""  # what the values inside were compared with
    # Why no node is named: the reference is the graph that is judged; None where it is independent
    doubt: Reason | None = None
    # Why values inside were not compared with the user's module; None where they were, or there is none
    module_unused: Reason | None = None
    # Weights of the bundle that another graph does not have, and its own of which the bundle has only a part
    missing_weights: tuple[str, ...] = ()
    changed_weights: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        is_open = self.wrong is None and bool(self.unverified)
        derive(self, outcome=Outcome.NOT_VERIFIED if is_open else Outcome.passing(self.wrong is None))


def bisect(
    bundle: Bundle,
    runtime: str | None,
    on_step: OnStep,
    graph: Path | None = None,
    names: Names = MappingProxyType({}),
) -> Bisection:
    """Find where a runtime, by default the first engine that runs here, leaves the oracle.

    With `graph`, another export of the model is looked into, in a runtime of graphs; `names` are those of its
    inputs and outputs in the bundle.
    """
    finder = RuntimeFinder(bundle)
    if names and graph is None:
        what, got = "Names are mapped only for another graph.", [f"{by}={to}" for by, to in names.items()]
        raise DeployError(what, got=", ".join(got), hint="--graph FILE.onnx")
    if graph is not None and runtime not in (None, *RUNNERS):
        what = "Another graph is run by a runtime, not by an engine."
        raise DeployError(what, got=runtime, hint=", ".join(RUNNERS))
    running = [] if runtime in RUNNERS or graph is not None else finder.running_engines()
    if runtime is None and not running:
        runtime = finder.graphs()[0].name
    open_model: OpenModel
    if runtime in RUNNERS:
        name, open_model = str(runtime), partial(open_runner, str(runtime))
    else:
        found = running[0] if runtime is None else finder.named(runtime)
        if found.engine is None:
            what = "Only an engine or a graph runtime can be bisected."
            raise DeployError(what, got=runtime, hint=", ".join(RUNNERS))
        name, open_model = found.name, twin_opener(found.engine, bundle)

    def reference(case: GoldenCase) -> TrustedValues:
        on_step("reference", 0, 0)
        return reference_for(bundle, case, name, uncounted(on_step))

    return bisect_bundle(bundle, name, open_model, reference, uncounted(on_step), graph, names)


def bisect_bundle(
    bundle: Bundle,
    runtime: str,
    open_model: OpenModel,
    reference_of: Callable[[GoldenCase], TrustedValues],
    on_step: OnName = silent,
    graph: Path | None = None,
    names: Names = MappingProxyType({}),
) -> Bisection:
    """Find where a runtime leaves the oracle: the first golden case that is wrong, its attentions, its nodes.

    Where the reference for values inside may be wrong itself, the nodes are left out.
    """
    search, name = _FaultSearch(bundle, open_model, on_step, graph, names), bundle.manifest.spec.name
    wrong = search.whole()
    count, case = len(search.values), search.case.name
    found = Bisection(model=name, runtime=runtime, case=case, attentions=count, runs=search.runs)
    last_right, first = None, None
    # A runtime of graphs gives out every attention of the same graph; an engine would have to be built again.
    if wrong is None and graph is None and runtime in RUNNERS:
        last_right, first = search.hidden()
        wrong = first
    if wrong is None:
        return structs.replace(found, runs=search.runs, unverified=tuple(search.unverified))
    reference = reference_of(search.case)
    if first is None:
        last_right, first = search.attentions(reference, wrong)
    bad = search.inside(wrong.name) if first is None else search.values[first.name]
    good = [] if last_right is None else [search.values[last_right]]
    node, unseen = None, list[str]()
    if reference.doubt is None:
        node, unseen = search.nodes(bad, good, first or wrong, reference.values)
    weights = WeightSearch() if graph is None else search_weights(search.own, search.model)
    return structs.replace(
        found,
        missing_weights=weights.missing,
        changed_weights=weights.changed,
        wrong=wrong.found,
        attentions=len(search.values),
        last_right=last_right,
        first_wrong=first.name if first else None,
        first_node=node,
        unseen=tuple(unseen),
        runs=search.runs,
        reference=reference.title,
        doubt=reference.doubt,
        module_unused=reference.module_unused,
    )


def case_to_bisect(bundle: Bundle) -> GoldenCase:
    """The golden case that is looked into first: the one whose attentions are known, or the usual one."""
    layers, golden = bundle.manifest.layers, bundle.manifest.golden
    wanted = layers.case if layers else "opt"
    return read_case(bundle, next((entry for entry in golden if entry.name == wanted), golden[0]))


def _title(node: ir.Node) -> str:
    """What a node is called; a file need not name its nodes."""
    return node.name or " ".join([node.op_type, *(str(value.name) for value in node.outputs[:1])])


def _mask_nodes(model: ir.Model) -> set[ir.Node]:
    """The nodes that the masks of attentions are computed by; not those that only give a size."""
    masks = [input_at(node, 3) for node in model.graph if is_op(node, "Attention")]
    return set(_numbers_behind(masks))


class _WrongValue(NamedTuple):
    """An output or an attention that is wrong."""

    name: str
    problem: str | None
    limit: float | None  # the largest relative error that would be right
    found: OutputReason | None = None  # the same as data, where an oracle judged it


def _wrong_value(case: str, verdict: OutputVerdict) -> _WrongValue:
    """What is wrong with an output, or an attention, of a case."""
    (found,), limit = _with_reasons(case, [verdict]), (verdict.budget or {}).get("relative_l2")
    return _WrongValue(verdict.output, verdict.problem, limit, found)


def _with_reasons(case: str, verdicts: Iterable[OutputVerdict]) -> list[OutputReason]:
    """Those of the outputs of a case that did not pass."""
    return [
        OutputReason(case=case, output=each.output, reason=each.reason)
        for each in verdicts
        if each.reason is not None
    ]


class _FaultSearch:
    """One search."""

    def __init__(
        self,
        bundle: Bundle,
        open_model: OpenModel,
        on_step: OnName,
        graph: Path | None,
        names: Names,
    ) -> None:
        self.precision, self.open_model, self.on_step = bundle.manifest.precision, open_model, on_step
        own = load_graph(bundle.model_path)
        self.model, self.layers = own if graph is None else load_graph(graph), layers_case(bundle)
        for model in (own, self.model):
            if any(value.dtype is None for node in model.graph for value in node.outputs):
                infer_shapes(model)  # a file need not state types, and only floats are compared
        self.own = own
        self.masks = _mask_nodes(self.model)
        self.bundle, self.case, self.runs = bundle, case_to_bisect(bundle), 0
        self.graph_name = "" if graph is None else graph.name
        self.names = names
        self.fit: Fit | None = None  # of another graph, once it was opened
        self.unverified = list[OutputReason]()  # outputs that are neither right nor wrong
        entry = bundle.manifest.layers
        # Of another graph, attentions can be compared that have the same name.
        theirs = {str(value.name) for node in self.model.graph for value in node.outputs}
        self.values = {k: v for k, v in entry.values.items() if v in theirs} if entry else {}
        self.types = {v: self.layers.eager[k].dtype for k, v in self.values.items()} if self.layers else {}

    def _open(self, values: Sequence[str] = ()) -> Runner:
        """The model in the runtime, with more values given out; another graph as a validation takes it."""
        runner = self.open_model(with_outputs(self.model, values))
        if not self.graph_name:
            return runner
        with ExitStack() as owned:
            owned.callback(runner.close)
            if self.fit is None:
                self.fit = fit(runner, self.graph_name, self.bundle.manifest.spec, self.precision, self.names)
            owned.pop_all()
        types = {value: self.types.get(value, runner.outputs[value].dtype) for value in values}
        outputs = {**{value: value for value in values}, **self.fit.outputs}
        how = replace(self.fit, outputs=outputs, types={**types, **self.fit.types})
        return FittedRunner(runner, self.graph_name, how, self.names)

    def inside(self, output: str) -> str:
        """The name of an output in the graph."""
        return output if self.fit is None else self.fit.outputs[output]

    def whole(self) -> _WrongValue | None:
        """The first wrong output of the first case that is wrong, which is then the case of the search."""
        others = (entry for entry in self.bundle.manifest.golden if entry.name != self.case.name)
        with self._open() as runner:
            self.runs += 1
            for case in chain([self.case], map(partial(read_case, self.bundle), others)):
                if case is not self.case and not admits(runner, case.inputs):
                    continue
                self.on_step(Step("case", case.name))
                judged = judge.judge_case(case, runner.run(case.inputs), self.precision)
                open_ = [each for each in judged if each.outcome is Outcome.NOT_VERIFIED]
                self.unverified += _with_reasons(case.name, open_)
                if (wrong := next((each for each in judged if each.is_wrong), None)) is not None:
                    if case is not self.case:  # the bundle does not have the attentions of others
                        self.case, self.layers = case, None
                    return _wrong_value(case.name, wrong)
        return None

    def run(self, values: Sequence[str]) -> dict[str, np.ndarray]:
        """The outputs of the model in the runtime, with more values given out."""
        with self._open(values) as runner:
            self.runs += 1
            return runner.run(self.case.inputs)

    def value(self, name: str) -> np.ndarray | None:
        """A value in the runtime; None where the lowering has none, as the operand of a plugin's FP8 GEMM."""
        try:
            return self.run((name,))[name]
        except LoweringError:
            return None

    def hidden(self) -> tuple[str | None, _WrongValue | None]:
        """The same where every output is right: an attention may be wrong, and no output show it."""
        if self.layers is None or not self.values:
            return None, None
        self.on_step(Step("attention", f"all {len(self.values)}"))
        got = self.run(list(self.values.values()))
        by_node = {name: got[value] for name, value in self.values.items()}
        last_right = None
        for verdict in _judge_layers(self.layers, by_node, self.precision):
            if verdict.is_wrong:
                return last_right, _wrong_value(self.case.name, verdict)
            last_right = verdict.output
        return None, None

    def attentions(
        self, reference: TrustedValues, whole: _WrongValue
    ) -> tuple[str | None, _WrongValue | None]:
        """The last attention that is right, and the first that is wrong."""
        wanted, limit = dict[str, np.ndarray](), whole.limit
        if self.layers is None:  # the values of this case are not in the bundle
            wanted = {} if reference.doubt else dict(reference.values(list(self.values.values())))
            self.values = {name: value for name, value in self.values.items() if value in wanted}

        def wrong(name: str, got: np.ndarray) -> _WrongValue | None:
            if self.layers is None:
                problem = _problem(got, wanted[self.values[name]].astype(np.float64), limit)
                return None if problem is None else _WrongValue(name, problem, limit)
            (found,) = _judge_layers(self.layers, {name: got}, self.precision)
            return _wrong_value(self.case.name, found) if found.is_wrong else None

        last_right, first_wrong, untried = None, None, list(self.values)
        made = {name: value_named(self.model.graph, value) for name, value in self.values.items()}
        while untried:
            name = untried[(len(untried) - 1) // 2]
            self.on_step(Step("attention", name))
            untried.remove(name)
            if (got := self.value(self.values[name])) is None:
                continue
            # An encoder comes before a decoder's first attention, which does not read it.
            behind = {value for node in nodes_behind([made[name]]) for value in node.outputs}
            is_wrong = (found := wrong(name, got)) is not None
            first_wrong, last_right = (found, last_right) if is_wrong else (first_wrong, name)
            untried = [each for each in untried if (made[each] in behind) is is_wrong]
        return last_right, first_wrong

    def nodes(
        self, bad: str, good: Sequence[str], wrong: _WrongValue, reference: ReferenceValues
    ) -> tuple[Suspect | None, list[str]]:
        """Halve what lies between values that are right and one that is wrong."""
        graph = self.model.graph
        cleared = set(_numbers_behind(value_named(graph, name) for name in good))
        within = set(nodes_behind([value_named(graph, bad)])) - cleared
        suspects = [node for node in graph if node in within]
        if self.graph_name:
            return self._differences(suspects, wrong, reference)
        results = {node: str(node.outputs[0].name) for node in suspects if node.outputs}
        wanted = reference([name for node, name in results.items() if node.outputs[0].dtype in _FLOATS])
        problems = {suspects[-1]: wrong.problem} if suspects else {}
        untried = [node for node in suspects[:-1] if results.get(node) in wanted]
        while untried:
            node = untried[len(untried) // 2]
            self.on_step(Step("value", results[node]))
            if (got := self.value(results[node])) is None:
                untried.remove(node)
                continue
            want = wanted[results[node]].astype(np.float64)
            found = _problem(got, want, wrong.limit, is_mask=node in self.masks)
            inside = set(nodes_behind(node.outputs[:1]))
            if found is not None:
                problems[node] = found
            suspects = [each for each in suspects if (each in inside) is (found is not None)]
            untried = [each for each in untried if each in suspects and each not in problems]
        shown = next((node for node in suspects if node in problems), None)
        path = [] if shown is None else self._carried(shown, within, wanted)
        end = value_named(graph, bad) if shown is None else shown.outputs[0]
        near = {node: at for at, node in enumerate(nodes_behind([end]))}
        others = [node for node in suspects if node not in problems and node not in path]
        others.sort(key=lambda node: near.get(node, len(near)))
        others.sort(key=lambda node: (not self._changed([node]), node.outputs[0].dtype not in _FLOATS))
        unseen = [_title(node) for node in others]
        if shown is None:
            return None, unseen
        node = path[-1]
        return Suspect(
            node=_title(node),
            operator=node.op_type,
            value=results[node],
            problem=problems[shown],
            shown_at=None if node is shown else _title(shown),
            constants=self._changed([*others, *path]),
        ), unseen

    def _differences(
        self, suspects: Sequence[ir.Node], wrong: _WrongValue, reference: ReferenceValues
    ) -> tuple[Suspect | None, list[str]]:
        """Where another graph begins to differ; its values have other names, and may be others by intention.

        A value is right where some value of the bundle's graph has its numbers, with an error like those of
        others. What a right value is computed from is right as well, and so is what only moves right numbers.
        """
        floats = [node for node in suspects if node.outputs and node.outputs[0].dtype in _FLOATS]
        right, off = self._right_and_off(self._errors(floats, reference), wrong.limit or _ALIKE)
        cleared = set(_numbers_behind(node.outputs[0] for node in right))
        moved = set[ir.Node]()
        for node in suspects:
            data = node.inputs if node.op_type == "Concat" else node.inputs[:1]
            makers = [value.producer() for value in data if value is not None]
            if node.op_type in CARRIES and all(each is None or each in cleared | moved for each in makers):
                moved.add(node)
        known = (cleared - off) | moved
        counted = _fed_nodes(self.model.graph) | {node for node in floats if not _is_number(node)}
        starts = _starts([
            node for node in floats if node in counted - known and node.op_type != "Constant"
        ])  # fmt: skip
        if not starts:  # no value is further off than those it is computed from
            return None, []
        first, *others = starts
        before = nodes_behind(first.inputs, lambda node: () if node in right else node.inputs)
        unseen = [node for node in before if node in suspects and node not in right]
        unseen.sort(key=lambda node: not self._changed([node]))
        return Suspect(
            node=_title(first),
            operator=first.op_type,
            value=str(first.outputs[0].name),
            problem=wrong.problem if first is suspects[-1] else None,
            constants=self._changed([first, *unseen]),
            others=tuple(map(_title, others)),
            is_start=first is not suspects[-1],
        ), [_title(node) for node in unseen]

    def _errors(self, nodes: Sequence[ir.Node], reference: ReferenceValues) -> dict[ir.Node, float]:
        """The relative error of each result against the nearest value of the bundle's graph."""
        names = [str(v.name) for node in self.own.graph for v in node.outputs if v.dtype in _FLOATS]
        known, errors = _Numbers(reference(names)), dict[ir.Node, float]()
        for start in range(0, len(nodes), _VALUES_AT_ONCE):
            some = nodes[start : start + _VALUES_AT_ONCE]
            self.on_step(Step("values", f"{start} of {len(nodes)}"))
            found = self.run([str(node.outputs[0].name) for node in some])
            for node in some:
                errors[node] = known.error_of(found[str(node.outputs[0].name)], is_mask=node in self.masks)
        return errors

    def _right_and_off(
        self, errors: Mapping[ir.Node, float], limit: float
    ) -> tuple[Set[ir.Node], Set[ir.Node]]:
        """The nodes whose results are right, and those with an error of their own.

        The latter have a counterpart, and are much further off than what they are computed from. A residual
        stream may hide that behind them.
        """
        usual = max(self.precision.roundoff, _FLOAT32_GEMM)
        right, off = dict[ir.Node, float](), set[ir.Node]()
        for node, error in errors.items():
            makers = [value.producer() for value in node.inputs if value is not None]
            made = max([usual, *(right[each] for each in makers if each in right)])
            if error <= min(limit, _JUMP * made):
                right[node] = error
            elif _SURE * made < error < _NEAR and node.op_type not in CARRIES:
                off.add(node)
        return right.keys(), off

    def _changed(self, nodes: Sequence[ir.Node]) -> tuple[str, ...]:
        """The constants that these nodes read, with other numbers than those of the bundle's graph."""
        found = dict[str, None]()
        for value in chain.from_iterable(node.inputs for node in nodes):
            own = None if value is None else self.own.graph.initializers.get(str(value.name))
            if value is None or own is None or value.const_value is None or own.const_value is None:
                continue
            got, want = value.const_value.numpy(), own.const_value.numpy()
            floats = {value.dtype, own.dtype} <= _FLOATS
            if floats and got.itemsize != want.itemsize:  # of a file in another precision
                narrow = min(got.dtype, want.dtype, key=lambda dtype: dtype.itemsize)
                got, want = got.astype(narrow), want.astype(narrow)
            # By chance, an exporter gives one name to different things.
            if got.shape == want.shape and got.dtype == want.dtype and got.tobytes() != want.tobytes():
                found[str(value.name)] = None
        return tuple(found)

    def _carried(
        self, node: ir.Node, within: Set[ir.Node], wanted: Mapping[str, np.ndarray]
    ) -> list[ir.Node]:
        """A node, and those before it that its wrong numbers come from, if it only moves numbers."""
        path, errors = [node], dict[str, float]()

        def error(value: ir.Value) -> float:
            """The largest error of a value, which moving never makes larger; infinite where not known."""
            name = str(value.name)
            if name not in wanted:
                return np.inf
            if name not in errors:
                got, want = self.value(name), wanted[name].astype(np.float64)
                off = np.array(np.inf) if got is None else np.abs(got.astype(np.float64) - want)
                errors[name] = float(np.nan_to_num(off, nan=np.inf).max(initial=0.0))
            return errors[name]

        while node.op_type in CARRIES:
            data = node.inputs if node.op_type == "Concat" else node.inputs[:1]  # others are sizes and places
            makers = {
                made: error(value)
                for value in data
                if value is not None and (made := value.producer()) is not None and made in within
            }
            source = max(makers, key=lambda made: makers[made], default=None)
            own = node.outputs[0]
            if source is None or (str(own.name) in wanted and makers[source] < error(own)):
                break
            node = source
            path.append(node)
        return path


def _problem(got: np.ndarray, want: np.ndarray, limit: float | None, *, is_mask: bool = False) -> str | None:
    """What is wrong with a value; None where it is right."""
    if got.shape != want.shape:
        return f"shape {got.shape}, not {want.shape}"
    # Next to numbers that hide keys, the others of a mask would not count; how large those are is no matter.
    got = got.astype(np.float64)
    alike = ~np.isfinite(want) & ((got == want) | (np.isnan(got) & np.isnan(want)))
    counted = ~(alike | (_hides(got) & _hides(want) if is_mask else False))
    got, want = got[counted], want[counted]
    if not np.isfinite(got).all():
        return None if not np.isfinite(want).all() else "values are NaN or infinite"
    # Of the shape of an error only its size carries over from one value to another.
    off = metrics.measure(got, want).relative_l2
    return f"relative error {off:.2g}" if limit is None or off > limit else None


def _numbers_behind(values: Iterable[ir.Value | None]) -> Iterator[ir.Node]:
    """The nodes whose numbers values are computed from; of others, they only have a size."""
    return nodes_behind(values, lambda node: () if is_op(node, "Shape", "Size") else node.inputs)


def _fed_nodes(graph: ir.Graph) -> set[ir.Node]:
    """The nodes that the numbers of an input reach."""
    found, inputs = set[ir.Node](), {value for value in graph.inputs if not value.is_initializer()}
    for node in graph:
        read = (value for value in node.inputs if value is not None)
        is_fed = any(value in inputs or value.producer() in found for value in read)
        if is_fed and not is_op(node, "Shape", "Size"):
            found.add(node)
    return found


def _is_number(node: ir.Node) -> bool:
    """Whether a node gives one number, as the scale of scores that follows from a size does."""
    shape = node.outputs[0].shape
    return shape is not None and all(size == 1 for size in shape)


def _starts(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """Those of some nodes that come from no other of them, without what an earlier one explains."""
    behind = {node: set(nodes_behind(node.inputs)) for node in nodes}
    found = list[ir.Node]()
    for node in nodes:
        readers = [use.node for use in node.outputs[0].uses()]
        explained = found and all(each in behind and not behind[each].isdisjoint(found) for each in readers)
        if behind[node].isdisjoint(nodes) and not explained:
            found.append(node)
    return found


_VALUES_AT_ONCE = 32
_SAMPLED = 1024  # numbers of a value
_ALIKE = 0.01  # the largest relative error of equal values, where the wrong output has no budget
_FLOAT32_GEMM = 2.0**-22  # the usual relative error of one in float32
_JUMP, _SURE = 4.0, 8.0  # times the error of what a value is computed from: more is its own, or surely so
_NEAR = 0.1  # the largest relative error of a value that has a counterpart


class _Numbers:
    """The values inside a model, to be found by their numbers, whatever their shape is."""

    def __init__(self, values: Mapping[str, np.ndarray]) -> None:
        self._by_size: dict[int, list[tuple[float, np.ndarray]]] = {}
        for each in values.values():
            self._by_size.setdefault(each.size, []).append((_norm(each), each))

    def error_of(self, array: np.ndarray, *, is_mask: bool = False) -> float:
        """The relative error of an array, in its order, against the value that is nearest to it."""
        size, best, few = _norm(array), math.inf, max(1, array.size // _SAMPLED)
        for norm, value in self._by_size.get(array.size, ()):
            if abs(size - norm) > _ALIKE * norm:
                continue
            error = 0.0
            for step in (few, 1):  # some numbers first: values of one size are many
                if error < _NEAR:
                    got, want = (each.ravel()[::step].astype(np.float64) for each in (array, value))
                    error = _relative(got, want, is_mask=is_mask)
            best = min(best, error)
        return best


def _relative(got: np.ndarray, want: np.ndarray, *, is_mask: bool) -> float:
    """The relative error of numbers; numbers of a mask that hide a key in both are alike."""
    if (np.isfinite(got) != np.isfinite(want)).any():
        return math.inf
    counted = np.isfinite(want)
    if is_mask:
        counted &= ~(_hides(got) & _hides(want))
    got, want = got[counted], want[counted]
    return _norm(got - want) / max(_norm(want), 1e-300)


def _norm(array: np.ndarray) -> float:
    """The size of an array, but for numbers that are not finite."""
    flat = array.ravel().astype(np.float32, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.dot(flat, flat))
    if not math.isfinite(total):
        wide = flat.astype(np.float64)
        wide = wide[np.isfinite(wide)]
        total = float(np.dot(wide, wide))
    return math.sqrt(total)


_HIDES = 64.0  # a softmax leaves nothing of a number that is so much below another


def _hides(mask: np.ndarray) -> np.ndarray:
    """Where the numbers of a mask hide a key."""
    most = mask.max(initial=-np.inf, where=np.isfinite(mask))
    return mask <= min(most, 0.0) - _HIDES


# -- Expected values inside a model, from a trusted source -----------------------------------------

_OTHER = {"ort-cpu": "onnx-reference", "onnx-reference": "ort-cpu"}


class TrustedValues(NamedTuple):
    """The most trusted source of values inside a model that there is."""

    values: ReferenceValues
    title: str
    doubt: Reason | None = None  # why it may be wrong itself
    module_unused: Reason | None = None  # why it is not the user's module


def reference_for(bundle: Bundle, case: GoldenCase, runtime: str, on_step: OnName = silent) -> TrustedValues:
    """The most trusted source of values inside a model, and its name.

    Of a user's module it is its program in FP64, where PyTorch and the factory are here; values that are not
    in the program, such as a matmul without its bias, are those of the graph if its outputs are right.
    Otherwise it is the bundle's own graph on a CPU, in another runtime than the one that is doubted. Where
    that graph is itself wrong on the case, a fault in it is in both, and cannot be found.
    """
    trusted = available_cpu_runtime(bundle.manifest.precision)
    trusted = _OTHER.get(trusted, trusted) if trusted == runtime else trusted
    title, unused = f"the graph in {trusted}", None

    def in_graph(names: Sequence[str]) -> Arrays:
        with open_runner(trusted, with_outputs(load_graph(bundle.model_path), names)) as runner:
            got = runner.run(case.inputs)
        return {name: got[name] for name in names}

    @cache
    def graph_is_wrong() -> bool:
        with open_runner(trusted, bundle.model_path) as runner:
            verdicts = judge.judge_case(case, runner.run(case.inputs), bundle.manifest.precision)
        return any(verdict.is_wrong for verdict in verdicts)

    if any(entry.source is Source.PROGRAM for entry in bundle.manifest.golden):
        try:
            refuse_without_factory(bundle.manifest.spec)
            if not can_import("torch"):
                what, hint = "PyTorch is not installed here.", "run this where PyTorch is"
                raise BackendUnavailable(what, hint=hint)
            from mha_deploy.baselines.fresh import ProgramValues

            program = ProgramValues(bundle)
        except DeployError as error:  # the graph must do
            unused = Reason(kind=Kind.MODULE_NOT_USED, got=error.in_one_line, wanted=error.hint)
            on_step(reason_text(unused))
        else:

            def values(names: Sequence[str]) -> Arrays:
                found = program.at(case, names)
                rest = [name for name in names if name not in found]
                return {**found, **in_graph(rest)} if rest and not graph_is_wrong() else found

            return TrustedValues(values, "the module's program in FP64")
    doubt = Reason(kind=Kind.REFERENCE_IS_SUBJECT, got=title) if graph_is_wrong() else None
    return TrustedValues(in_graph, title, doubt, unused)
