"""The first attention, and the first node, that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_deploy.bundle.cases import GoldenCase, read_case
from mha_deploy.bundle.folder import Bundle
from mha_deploy.environment import can_import
from mha_deploy.errors import DeployError
from mha_deploy.graph.file import cone, load_graph, value_named, with_outputs
from mha_deploy.metrics import Budget, OutputVerdict, judge_case, measure
from mha_deploy.runtime import available_cpu_backend, open_runner
from mha_deploy.validate.layers import OpenModel, judge_layers, layers_case

# -- Which part of a model is wrong? The first attention that leaves its oracle, and then the f ----

Reference = Callable[[Sequence[str]], Mapping[str, np.ndarray]]
"""Gives what values of the graph must be, by their names; those it does not know are left out."""

_FLOATS = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT})


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A node that may be at fault.

    Args:
        node: Its name.
        operator: What it does.
        value: Its result.
        problem: What is wrong with the result.
    """

    node: str
    operator: str
    value: str
    problem: str | None


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """Where a model goes wrong.

    Args:
        model: Name of the model.
        backend: The runtime.
        case: The golden case that was looked at.
        wrong: What is wrong with the whole; None where it is right, and then nothing was looked for.
        attentions: How many attentions the bundle knows.
        last_right: The last attention that is right, if any is.
        first_wrong: The first that is wrong, if any is.
        first_node: The first node whose result is wrong.
        unseen: Nodes before it of whose results the reference knows nothing: it may be one of them.
        runs: How often the runtime was built or opened, the whole model included.
        reference: What the values inside were compared with.
    """

    model: str
    backend: str
    case: str
    wrong: str | None
    attentions: int
    last_right: str | None
    first_wrong: str | None
    first_node: Suspect | None
    unseen: tuple[str, ...]
    runs: int
    reference: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def bisect_bundle(
    bundle: Bundle,
    backend: str,
    open_model: OpenModel,
    reference: Reference,
    on_step: Callable[[str], None] = lambda name: None,
) -> Bisection:
    """Find where a runtime leaves the oracle.

    Args:
        bundle: The bundle; of a user's module the attentions are looked at first.
        backend: Name of the runtime.
        open_model: Opens a variation of the bundle's graph in it.
        reference: What values inside must be.
        on_step: Called with what is looked at next.
    """
    return _Search(bundle, backend, open_model, reference, on_step).result()


def bisected_case(bundle: Bundle) -> GoldenCase:
    """The golden case that is looked into: the one whose attentions are known, or the usual one."""
    layers, golden = bundle.manifest.layers, bundle.manifest.golden
    wanted = layers.case if layers else "opt"
    return read_case(bundle, next((entry for entry in golden if entry.name == wanted), golden[0]))


class _Search:
    """One search."""

    def __init__(
        self,
        bundle: Bundle,
        backend: str,
        open_model: OpenModel,
        reference: Reference,
        on_step: Callable[[str], None],
    ) -> None:
        self.bundle, self.backend, self.open_model = bundle, backend, open_model
        self.reference, self.on_step = reference, on_step
        self.model, self.layers = load_graph(bundle.model_path), layers_case(bundle)
        self.case, self.runs = bisected_case(bundle), 0
        entry = bundle.manifest.layers
        self.values = dict(entry.values) if entry else {}

    def result(self) -> Bisection:
        """The whole model, its attentions, then its nodes."""
        whole = self._first_wrong(judge_case(self.case, self._run(()), self.bundle.manifest.precision))
        if whole is None:
            return self._found(None, None, None, None, ())
        last_right, first = self._attentions()
        bad = self.values[first.output] if first is not None else whole.output
        budget = (first or whole).budget
        good = [] if last_right is None else [self.values[last_right]]
        node, unseen = self._nodes(bad, good, budget, (first or whole).problem)
        wrong = f"{whole.output}: {whole.problem}"
        return self._found(wrong, last_right, first.output if first else None, node, unseen)

    def _found(
        self,
        wrong: str | None,
        last_right: str | None,
        first: str | None,
        node: Suspect | None,
        unseen: Sequence[str],
    ) -> Bisection:
        return Bisection(
            model=self.bundle.manifest.spec.name,
            backend=self.backend,
            case=self.case.name,
            wrong=wrong,
            attentions=len(self.values),
            last_right=last_right,
            first_wrong=first,
            first_node=node,
            unseen=tuple(unseen),
            runs=self.runs,
        )

    # -- attentions ----------------------------------------------------------------------------

    def _attentions(self) -> tuple[str | None, OutputVerdict | None]:
        """The last attention that is right, and the verdict on the first that is wrong."""
        names = list(self.values)
        right, wrong, verdict = -1, len(names), None
        while wrong - right > 1:
            middle = (right + wrong) // 2
            found = self._judged_attention(names[middle])
            if not found.is_wrong:
                right = middle
            else:
                wrong, verdict = middle, found
        return (names[right] if right >= 0 else None), verdict

    def _judged_attention(self, name: str) -> OutputVerdict:
        self.on_step(f"attention: {name}")
        if self.layers is None:
            raise DeployError("The bundle knows no attention by itself.", got=name)
        (verdict,) = judge_layers(self.layers, self._run((self.values[name],)), self.bundle, only=name)
        return verdict

    # -- nodes ---------------------------------------------------------------------------------

    def _nodes(
        self, bad: str, good: Sequence[str], budget: Budget | None, problem: str | None
    ) -> tuple[Suspect | None, list[str]]:
        """Halve what lies between values that are right and one that is wrong."""
        graph = self.model.graph
        cleared = cone([value_named(graph, name) for name in good])
        within = cone([value_named(graph, bad)]) - cleared
        suspects = [node for node in graph if node in within]
        wanted = self.reference([str(node.outputs[0].name) for node in suspects if _is_float(node)])
        known = {node for node in suspects if str(node.outputs[0].name) in wanted}
        problems = {suspects[-1]: problem} if suspects else {}
        untried = [node for node in suspects[:-1] if node in known]
        while untried:
            node = untried[len(untried) // 2]
            found = self._problem(str(node.outputs[0].name), wanted, budget)
            inside = cone(node.outputs[:1])
            if found is None:
                suspects = [each for each in suspects if each not in inside]
            else:
                problems[node] = found
                suspects = [each for each in suspects if each in inside]
            untried = [each for each in untried if each in suspects and each not in problems]
        wrong = [node for node in suspects if node in problems]
        unseen = [str(node.name) for node in suspects if node not in problems]
        return (_suspect(wrong[0], problems[wrong[0]]) if wrong else None), unseen

    def _problem(self, name: str, wanted: Mapping[str, np.ndarray], budget: Budget | None) -> str | None:
        """What is wrong with a value; None where it is right."""
        self.on_step(f"value: {name}")
        got, want = self._run((name,))[name], wanted[name].astype(np.float64)
        if got.shape != want.shape:
            return f"shape {got.shape}, not {want.shape}"
        if not np.isfinite(got.astype(np.float64)).all():
            return None if not np.isfinite(want).all() else "values are NaN or infinite"
        # Of the shape of an error only its size carries over from one value to another.
        off = measure(got, want).relative_l2
        return f"off by {off:.2g} of its size" if budget is None or off > budget.relative_l2 else None

    # -- running -------------------------------------------------------------------------------

    def _run(self, values: Sequence[str]) -> dict[str, np.ndarray]:
        """The outputs of the model in the runtime, with one more value given out."""
        self.runs += 1
        with self.open_model(with_outputs(self.model, values) if values else self.model) as runner:
            return runner.run(self.case.inputs)

    @staticmethod
    def _first_wrong(verdicts: Sequence[OutputVerdict]) -> OutputVerdict | None:
        return next((verdict for verdict in verdicts if verdict.is_wrong), None)


def _is_float(node: ir.Node) -> bool:
    return bool(node.outputs) and node.outputs[0].dtype in _FLOATS


def _suspect(node: ir.Node, problem: str | None) -> Suspect:
    return Suspect(
        node=str(node.name), operator=node.op_type, value=str(node.outputs[0].name), problem=problem
    )


# -- Expected values inside a model, from a trusted source -----------------------------------------

_OTHER = {"ort-cpu": "onnx-reference", "onnx-reference": "ort-cpu"}


def reference_for(bundle: Bundle, case: GoldenCase, backend: str) -> tuple[Reference, str]:
    """The most trusted source of values inside a model, and its name.

    Of a user's module it is its program in FP64, where PyTorch and the factory are here. Otherwise it is the
    bundle's own graph on a CPU, in another runtime than the one that is doubted.

    Args:
        bundle: The bundle.
        case: The golden case whose values are wanted.
        backend: The runtime that is doubted.
    """
    spec = bundle.manifest.spec
    if spec.layer is None and can_import("torch"):
        try:
            return _program(bundle, case), "the module's program in FP64"
        except DeployError:  # its factory is not here: the graph must do
            pass
    trusted = available_cpu_backend(bundle.manifest.precision)
    trusted = _OTHER.get(trusted, trusted) if trusted == backend else trusted
    return _graph(bundle, case, trusted), f"the graph in {trusted}"


def _program(bundle: Bundle, case: GoldenCase) -> Reference:
    from mha_deploy.baselines.fresh import ProgramValues

    program = ProgramValues(bundle)
    return lambda names: program.at(case, names)


def _graph(bundle: Bundle, case: GoldenCase, backend: str) -> Reference:
    def values(names: Sequence[str]) -> Mapping[str, np.ndarray]:
        model = load_graph(bundle.model_path)
        with open_runner(backend, with_outputs(model, names)) as runner:
            got = runner.run(case.inputs)
        return {name: got[name] for name in names}

    return values
