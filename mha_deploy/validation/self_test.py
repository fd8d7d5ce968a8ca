"""Mutations of a bundle's own graph: the validation must detect each of them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import onnx_ir as ir
from msgspec import Struct, field, structs

from mha_deploy import judge
from mha_deploy.bundle.cases import GoldenCase, golden_cases
from mha_deploy.bundle.folder import Bundle
from mha_deploy.graph.file import load_graph
from mha_deploy.graph.mutate import IN_CACHES, OF_QUANTIZATION, mutated, mutations
from mha_deploy.judge import OutputVerdict, ParityReport
from mha_deploy.metrics import Budget
from mha_deploy.options import OnName, ValidateOptions, silent
from mha_deploy.runtime import cpu_runtime, open_runner
from mha_deploy.runtime.runner import Runner
from mha_deploy.status import CaseKind, Kind, Outcome, Reason, derive
from mha_deploy.validation.decode import DecodeReport, case_budgets, evaluate_trace, traces_of
from mha_deploy.validation.error_map import output_projection
from mha_deploy.validation.fault import layer_parity
from mha_deploy.validation.run import draw_cases


def parity_from_runner(
    runner: Runner,
    bundle: Bundle,
    cases: Iterable[GoldenCase] | None = None,
    budgets: dict[str, dict[str, Budget]] | None = None,
) -> ParityReport:
    """Run every case, by default the golden ones, and judge what comes out; head by head where that works.

    `budgets` keeps the budgets of the cases by their names, for the next runner.
    """
    precision, verdicts = bundle.manifest.precision, list[OutputVerdict]()
    projection = output_projection(load_graph(bundle.model_path))
    heads = {} if projection is None else projection.to_heads
    for case in golden_cases(bundle) if cases is None else cases:
        if budgets is not None and case.name not in budgets:
            budgets[case.name] = case_budgets(judge.new_entries(case, case.eager)[0], precision, heads)
        known = None if budgets is None else budgets[case.name]
        verdicts += judge.judge_case(case, runner.run(case.inputs), precision, known, heads)
    name = bundle.manifest.spec.name
    return judge.parity_from_verdicts(verdicts, model=name, precision=precision, runtime=runner.name)


# -- Mutations of the bundle's own graph: each of them must fail the validation --------------------


class MutationTrial(Struct, frozen=True, kw_only=True):
    """One mutation of the graph, and whether it was detected."""

    mistake: str  # what was done to the model
    caught: bool  # whether the verdict was a failure
    share: float | None  # the largest share of an error budget it used; None where there was no number


class RightVerdict(Struct, frozen=True, kw_only=True):
    """The verdict on the graph as it is."""

    outcome: Outcome
    share: float | None  # the largest share of an error budget it used

    @property
    def passed(self) -> bool:
        """Whether the graph is right."""
        return self.outcome is Outcome.PASSED


class SelfTest(Struct, frozen=True, kw_only=True):
    """The verdict on the graph as it is, and on every mutation that applies to it."""

    # That of the right model, and of the mutations: each must be caught, and there must be some
    outcome: Outcome = Outcome.NOT_VERIFIED
    right: RightVerdict
    mutations: tuple[MutationTrial, ...] = field(name="mistakes")
    reason: Reason | None = None  # why mutations were not detected, or none applies

    @property
    def missed(self) -> tuple[MutationTrial, ...]:
        """The mutations that were not detected."""
        return tuple(each for each in self.mutations if not each.caught)

    def __post_init__(self) -> None:
        caught = Outcome.of(Outcome.passing(each.caught) for each in self.mutations)
        reason, shares = None, [each.share for each in self.missed if each.share is not None]
        if not self.mutations:
            reason = Reason(kind=Kind.NOTHING_TO_MUTATE)
        elif self.missed and len(shares) == len(self.missed) and max(shares) <= 1:
            numbers = {"missed": len(shares), "of": len(self.mutations), "share": max(shares)}
            reason = Reason(kind=Kind.HIDDEN_BY_ROUNDING, numbers=numbers)
        derive(self, outcome=Outcome.of([self.right.outcome, caught]), reason=reason)

    def __repr__(self) -> str:
        caught = sum(each.caught for each in self.mutations)
        return f"<SelfTest {self.outcome}: {caught}/{len(self.mutations)} mutations detected>"

    @property
    def passed(self) -> bool:
        """Whether the right model passes and every wrong one fails."""
        return self.outcome is Outcome.PASSED


def self_test(bundle: Bundle, runtime: str | None = None, *, on_mutation: OnName = silent) -> SelfTest:
    """Validate the bundle's own graph, then every mutated copy of it.

    On the golden cases and, where PyTorch is installed, on probe inputs; every attention of a module also by
    itself, but not for mistakes of quantization: an engine is judged by its outputs alone; mistakes of a KV
    cache also while decoding the bundle's traces.
    """
    manifest, model = bundle.manifest, load_graph(bundle.model_path)
    drawn, _ = draw_cases(bundle, ValidateOptions(sweep=False), lambda step: None)
    cases, traces = (
        [*golden_cases(bundle), *drawn.get(CaseKind.PROBE, ())],
        traces_of(bundle, ValidateOptions()),
    )

    budgets: dict[str, dict[str, Budget]] = {}
    open_graph = partial(open_runner, runtime or cpu_runtime(manifest.precision))

    def judged(graph: ir.Model, decoding: bool, inside: bool = True) -> ParityReport:
        with open_graph(graph) as runner:
            report = parity_from_runner(runner, bundle, cases, budgets)
            found: list[DecodeReport | ParityReport | None] = [
                evaluate_trace(runner, trace, manifest.spec, manifest.precision)
                for trace in (traces if decoding else ())
            ]
        found.append(layer_parity(bundle, open_graph, model=graph) if inside else None)
        others = [verdict for each in found if each is not None for verdict in each.verdicts]
        return structs.replace(report, verdicts=(*report.verdicts, *others))

    results = []
    for mistake in mutations():  # which of them have no effect is known of catalog layers only
        if (graph := mutated(model, mistake, manifest.spec)) is not None:
            on_mutation(mistake)
            report = judged(graph, mistake in IN_CACHES, inside=mistake not in OF_QUANTIZATION)
            share, caught = judge.largest_share(report.verdicts), report.outcome is Outcome.FAILED
            results.append(MutationTrial(mistake=mistake, caught=caught, share=share))
    right = judged(model, True)
    share = judge.largest_share(right.verdicts)
    return SelfTest(right=RightVerdict(outcome=right.outcome, share=share), mutations=tuple(results))
