"""Which attentions the outputs of a model show, and which must be judged by their own results.

An attention behind a small residual gate, or before an argmax, may be zero and no output shows it. So each of
them is perturbed in FP64, and what no output shows beyond its budget is remembered in the manifest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from msgspec import structs

from mha_deploy.bundle.cases import GoldenCase
from mha_deploy.bundle.manifest import ObservedRecord, Perturbation, UnfusedRecord
from mha_deploy.bundle.sizes import MASKS, PROBE
from mha_deploy.errors import DeployError
from mha_deploy.exporter.coarse import CoarseMistakes
from mha_deploy.exporter.file_program import (
    ChangedMode,
    Compute,
    ExactMode,
    FileNode,
    FileProgram,
    FileRounding,
    Inputs,
)
from mha_deploy.graph.attention_node import MASK, NONPAD_KV_SEQLEN, QK_OUTPUT, heads_of, is_attention
from mha_deploy.graph.fuse.leftover import cores_of
from mha_deploy.graph.roles import MOVES
from mha_deploy.judge import judge_case
from mha_deploy.model.precision import Precision
from mha_deploy.rounding import accumulations

_SCALE = 1.02
_WEIGHTS = QK_OUTPUT - 1  # of the outputs behind the heads
_LAYOUT = frozenset({*MOVES, "Cast"})
_FACTORS = frozenset({"Mul", "Div"})
_MASKED = -1e3  # so far below the largest score of its query is one that a mask hides
_MOST_SECONDS = 60.0


def attention_values(
    model: ir.Model, is_known: Callable[[str], bool], unfused: Sequence[UnfusedRecord]
) -> dict[str, str]:
    """For every attention, by name, the nearest value behind it that the source computes, too.

    It is the attention's own result, or that in another layout: a fused node may have a Transpose behind it
    that the source did in one step with the matmul. Else it is that times a factor, which the source applied
    to the weights. Attentions without such a value are left out.
    """
    results = {
        str(node.name): heads_of(node)
        for node in filter(is_attention, model.graph.all_nodes())
        if node.name is not None
    }
    results |= {name: core.result for name, core in cores_of(model, unfused).items()}
    found = {}
    for name, result in results.items():
        value = _first_known(result, is_known, _LAYOUT) or _first_known(result, is_known, _LAYOUT | _FACTORS)
        if value is not None:
            found[name] = value
    return found


def _first_known(result: ir.Value, is_known: Callable[[str], bool], through: Collection[str]) -> str | None:
    pending = [result]
    while pending:
        each = pending.pop(0)
        if each.name is not None and is_known(each.name):
            return each.name
        users = [use.node for use in each.uses()]
        pending += [user.outputs[0] for user in users if user.domain == "" and user.op_type in through]
    return None


class _Perturbed:
    """One attention of a graph, perturbed.

    Of one that is no node of the graph, `weights` is the value that has its weights.
    """

    def __init__(self, name: str, kind: Perturbation, weights: str | None) -> None:
        self._name, self._kind, self._weights = name, kind, weights
        self.applied = False

    def change(self, node: FileNode) -> Callable[[Compute, Inputs], Any] | None:
        """How a node is computed instead, if it is one that is perturbed."""
        if self._weights is not None:
            return self._without_node if self._weights in node.outputs else None
        is_changed = (node.operator, node.name) == ("Attention", self._name)
        return partial(self._in_node, node.evaluated) if is_changed else None

    def _in_node(self, node: Any, run: Compute, inputs: Inputs) -> Any:
        self.applied = True
        if self._kind is Perturbation.SCALE:
            return run(inputs[0] * _SCALE, *inputs[1:])
        if self._kind is Perturbation.MASK:
            return self._without_mask(node, run, inputs)
        heads, *others = run(*inputs)
        count = int(node.q_num_heads or 0)
        # Where the weights are an output they may be what the model goes on with.
        if len(others) > _WEIGHTS and others[_WEIGHTS] is not None:
            others[_WEIGHTS] = self._zero(others[_WEIGHTS], count)
        return (self._zero(heads, count), *others)

    def _without_node(self, run: Compute, inputs: Inputs) -> Any:
        """The weights of an attention that is no node: scores come in, by head on the second axis."""
        scores, *others = inputs
        self.applied = True
        if self._kind is Perturbation.SCALE:
            return run(scores * _SCALE, *others)
        if self._kind is Perturbation.MASK:
            # What the scores were before the mask is not known: masked keys get a usual one.
            masked = scores < scores.max(-1, keepdims=True, initial=_MASKED) + _MASKED
            self.applied = bool(masked.any())
            usual = np.where(masked, 0.0, scores).sum(-1, keepdims=True)
            return run(
                np.where(masked, usual / np.maximum((~masked).sum(-1, keepdims=True), 1), scores), *others
            )
        weights, *more = run(*inputs)
        self.applied = self._kind is Perturbation.ZERO or weights.ndim == 4
        return (self._zero(weights, 0), *more)

    def _zero(self, heads: np.ndarray, count: int) -> np.ndarray:
        """The heads, or weights, as zeros: all, or of the first head."""
        changed = np.zeros_like(heads)
        if self._kind is Perturbation.HEAD:
            changed = heads.copy()
            first = (slice(None), 0) if heads.ndim == 4 else (..., slice(heads.shape[-1] // max(count, 1)))
            changed[first] = 0
        return changed

    def _without_mask(self, node: Any, run: Compute, inputs: Inputs) -> Any:
        masks = [i for i in (MASK, NONPAD_KV_SEQLEN) if len(inputs) > i and inputs[i] is not None]
        self.applied = bool(masks or node.is_causal)
        given = tuple(None if i in masks else each for i, each in enumerate(inputs))
        with _attribute(node, "is_causal", 0):
            return run(*given)


@contextmanager
def _attribute(owner: Any, name: str, value: object) -> Any:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _how_little_it_shows(case: GoldenCase) -> tuple[int, int]:
    singles = sum(size == 1 for axis, size in case.sizes.items() if axis != case.batch)
    return singles, sum(array.size for array in case.oracle.values())


_TELLING = (MASKS, PROBE)  # cases that show what the smallest may hide: padded, and with large tokens


_IN_BF16 = {"fp32": Perturbation.BF16, "fp16": Perturbation.BF16_IN_HALF}  # by the type of accumulation


def observe(
    model: ir.Model,
    cases: Iterable[GoldenCase],
    precision: Precision,
    unfused: Sequence[UnfusedRecord] = (),
    coarse: CoarseMistakes = CoarseMistakes(),  # noqa: B008  # a frozen record
) -> list[ObservedRecord]:
    """Which perturbations of every attention the outputs of the model show; `coarse` knows of BF16."""
    found = []
    for record in _observe(model, cases, precision, unfused, (*_TELLING, coarse.case)):
        shown, hidden = list(record.shown), list(record.hidden)
        for kind, perturbation in _IN_BF16.items() if record.name in coarse.applies else ():
            (shown if (record.name, kind) in coarse.shown else hidden).append(perturbation)
        found.append(ObservedRecord(name=record.name, case=record.case, shown=shown, hidden=hidden))
    return found


def _observe(
    model: ir.Model,
    cases: Iterable[GoldenCase],
    precision: Precision,
    unfused: Sequence[UnfusedRecord],
    telling: Collection[str],
) -> list[ObservedRecord]:
    """Perturb every attention of a graph in FP64, and find out which of that the outputs of a case show.

    That is the smallest case; what it hides is tried in `telling` ones, since every runtime is judged on all.
    The graph must compute what is right, else nothing is known of it. What takes too long is not tried.
    """
    weights = {each.name: each.value for each in unfused}
    names = [str(node.name) for node in model.graph.all_nodes() if is_attention(node)] + [*weights]
    kinds = [kind for kind in Perturbation if kind not in _IN_BF16.values()]
    found = {name: ObservedRecord(name=name, case="", shown=[], hidden=kinds) for name in names}
    # With a single query or key there is little to mask, and no score to scale.
    known = sorted(cases, key=_how_little_it_shows)
    if not names or not known:
        return list(found.values())
    judged_as = replace(precision, accumulate=accumulations(precision)[-1])
    deadline, tried = time.monotonic() + _MOST_SECONDS, set[tuple[str, Perturbation]]()

    def is_wrong(case: GoldenCase, mode: FileRounding) -> bool:
        got = {name: x.astype(case.eager[name].dtype) for name, x in program.run(case.inputs, mode).items()}
        return any(verdict.is_wrong for verdict in judge_case(case, got, judged_as))

    with suppress(DeployError, Exception):  # ONNX's evaluator raises types that share no base
        program = FileProgram(model)
        for case in [known[0], *(each for each in known[1:] if each.name in telling)]:
            exact = ExactMode()
            if not any(each.hidden for each in found.values()) or is_wrong(case, exact):
                break
            for name, before in found.items():
                shown, hidden = list(before.shown), list[Perturbation]()
                for kind in before.hidden:
                    if time.monotonic() > deadline:
                        return list(found.values())
                    perturbed = _Perturbed(name, kind, weights.get(name))
                    wrong = is_wrong(case, ChangedMode(perturbed.change, results=exact.results))
                    tried |= {(name, kind)} if perturbed.applied else set()
                    # Else it has no mask, or no call of it; of scores, another case may have masked ones.
                    if perturbed.applied or before.case or name in weights:
                        (shown if wrong and perturbed.applied else hidden).append(kind)
                if shown or hidden:  # else it did not run: it may be in a branch that was not taken
                    found[name] = ObservedRecord(
                        name=name, case=before.case or case.name, shown=shown, hidden=hidden
                    )
        for name in (each for each in weights if any((each, kind) in tried for kind in kinds)):
            left = [kind for kind in found[name].hidden if (name, kind) in tried]
            found[name] = structs.replace(found[name], hidden=left)
    return list(found.values())
