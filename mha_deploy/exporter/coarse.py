"""What known mistakes would change in the outputs of a model: coarser arithmetic, and factors a little off.

A part of an attention in BF16, or a weight in INT8, is often within the budget of FP16: its error is eight
times that of rounding there, and everything else rounds, too. But it has a direction that is known in
advance, since the same numbers are rounded alike. So each of these mistakes is computed in FP64, and
what it adds to the outputs of one golden case is stored: an error that contains it is no rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from mha_deploy.bundle.cases import Arrays, GoldenCase, KnownMistake
from mha_deploy.bundle.manifest import UnfusedRecord
from mha_deploy.exporter.file_program import (
    ChangedMode,
    Compute,
    ExactMode,
    FileNode,
    FileProgram,
    FileRounding,
    Inputs,
    Results,
    upcast_operand,
)
from mha_deploy.graph.attention_node import is_attention
from mha_deploy.graph.fuse.leftover import Core, cores_of
from mha_deploy.graph.ir import input_at, is_op, weight_behind
from mha_deploy.graph.lower import lower
from mha_deploy.graph.lower.call import copy_of
from mha_deploy.graph.quantize import is_quantized
from mha_deploy.judge import judge_case
from mha_deploy.metrics import Spread, budget_from_samples, is_telling
from mha_deploy.model.precision import Precision
from mha_deploy.rounding import accumulations

# By right runtimes in `benchmarks/own_sensitivity.py --alarms`, and by the mistakes that it plants.
_SAMPLES = 12  # further roundings, besides those of the case: of the share of a mistake that chance leaves
_MOST, _MOST_BYTES = 256, 1 << 23  # mistakes, and what they take in a file
_LEAST_NUMBERS = 512  # of the outputs: fewer do not distinguish these mistakes from chance
_MOST_SECONDS = 30.0  # of the processor: other work beside an export does not change what it finds
_INT8_MOST = 127
_FACTOR, _OFF = 1.02, "off"
# Of a factor that is 2 % off: a rounded scale, or accumulation that truncates, leaves a tenth of a percent.
_LEAST_FACTOR = 0.05

Change = Callable[[np.ndarray], np.ndarray]
Edits = dict[str, dict[int, Change]]
"""By node, what is done to its inputs, or with -1 to its results."""
_RESULT = -1
# The parts of an attention in primitive operators: which node has it, and where.
_PARTS = {
    "queries": (("q_scaled", 0), ("scores", 0)),
    "keys": (("scores", 1),),
    "scores": (("scores", _RESULT),),
    "biased scores": (("weights", 0),),
    "softmax weights": (("weights", _RESULT),),
    "values": (("weighted_values", 1),),
    "heads": (("weighted_values", _RESULT),),
}


def in_bf16(array: np.ndarray) -> np.ndarray:
    """Numbers rounded to nearest in BF16."""
    return array.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def _in_int8(array: np.ndarray, axes: tuple[int, ...] | None) -> np.ndarray:
    """A weight in INT8, with one scale for what the axes reduce."""
    scale = np.maximum(np.abs(array).max(axis=axes, keepdims=True) / _INT8_MOST, 1e-300)
    return np.asarray(np.round(array / scale) * scale)


def in_fewer_bits(per_channel: tuple[int, ...]) -> dict[str, Change]:
    """What may be done to a weight by mistake; its channels have a scale of their own along these axes."""
    return {
        "in BF16": in_bf16,
        "in INT8, a scale for each channel": partial(_in_int8, axes=per_channel),
        "in INT8, one scale": partial(_in_int8, axes=None),
    }


def _too_large(array: np.ndarray) -> np.ndarray:
    return array * _FACTOR


def _scaled_in_bf16(array: np.ndarray, scale: float) -> np.ndarray:
    """Numbers that were rounded before they were scaled."""
    return in_bf16(array / scale) * scale


def _edited(edits: Mapping[int, Change], compute: Compute, inputs: Inputs) -> Any:
    """The outputs of a node that is edited."""
    outputs = compute(
        *(edits[i](upcast_operand(each)) if i in edits else each for i, each in enumerate(inputs))
    )
    return tuple(map(edits[_RESULT], outputs)) if _RESULT in edits else outputs


@dataclass(frozen=True)
class CoarseMistakes:
    """What mistakes would add to the outputs of a golden case, and in which attentions that is certain."""

    case: str = ""
    suspects: Mapping[str, KnownMistake] = field(default_factory=dict)
    # Attentions whose BF16 arithmetic the outputs show where GEMMs accumulate in a type.
    shown: frozenset[tuple[str, str]] = frozenset()
    applies: frozenset[str] = frozenset()  # attentions that must not compute in BF16


def coarse_mistakes(
    model: ir.Model,
    cases: Sequence[GoldenCase],
    precision: Precision,
    unfused: Sequence[UnfusedRecord] = (),
) -> CoarseMistakes:
    """Compute the mistakes of a graph in FP16; in other precisions, and quantized, there are none to tell.

    BF16 is what BF16 bundles have, its error in an FP32 bundle is far beyond the budget, and a quantized
    model has coarser parts than these. What takes too long, or cannot be evaluated, is not tried.
    """
    halves = [node for node in model.graph.all_nodes() if is_attention(node) and not _is_in_bf16(node)]
    names = frozenset(str(node.name) for node in halves) | {each.name for each in unfused}
    if precision.name != "fp16" or is_quantized(model):
        return CoarseMistakes()
    fitting = [case for case in cases if _LEAST_NUMBERS <= _numbers(case) <= _MOST_BYTES // 16]
    case = next((case for case in fitting if case.name == "opt"), max(fitting, key=_numbers, default=None))
    if case is None:
        return CoarseMistakes(applies=names)
    with suppress(Exception):  # ONNX's evaluator raises types that share no base
        lowered = lower(copy_of(model), "primitives", cache="copy")
        search = _Search(lowered, case, precision, names, cores_of(lowered, unfused))
        for node in (each for each in halves if not _changes_scores(each)):
            search.forget(str(node.name), "biased scores")
        return search.found()
    return CoarseMistakes(applies=names)


def _is_in_bf16(node: ir.Node) -> bool:
    return any(value is not None and value.dtype == ir.DataType.BFLOAT16 for value in node.inputs[:3])


def _changes_scores(node: ir.Node) -> bool:
    """Whether something is added to the scores of an attention, or bounds them; a boolean mask does not."""
    mask, cap = input_at(node, 3), node.attributes.get("softcap")
    return (mask is not None and mask.dtype != ir.DataType.BOOL) or (cap is not None and cap.as_float() != 0)


def _numbers(case: GoldenCase) -> int:
    return sum(array.size for array in case.oracle.values() if array.dtype == np.float64)


class _Search:
    """The mistakes of one graph in one case."""

    def __init__(
        self,
        model: ir.Model,
        case: GoldenCase,
        precision: Precision,
        attentions: frozenset[str],
        cores: Mapping[str, Core],  # of the attentions that were no node
    ) -> None:
        self._deadline = time.process_time() + _MOST_SECONDS
        self._model, self._case, self._precision = model, case, precision
        self._nodes = {str(node.name): node for node in model.graph.all_nodes()}
        known = {name: self._places_of(name, cores.get(name)) for name in sorted(attentions)}
        self._places = {name: found for name, found in known.items() if found}
        self._parts: dict[str, dict[str, Edits]] = {
            name: {part: {node: {at: in_bf16}} for part, (node, at) in places.items()}
            for name, places in self._places.items()
        }
        for name, places in self._places.items():
            scale = self._scale_of(name)
            if scale is not None and np.frexp(scale)[0] not in (0.5, -0.5):  # else it is the same
                node, at = places["scores"]
                change = partial(_scaled_in_bf16, scale=scale)
                unscaled: Edits = {node: {at: change}}
                self._parts[name] = {"scores before their scale": unscaled, **self._parts[name]}
        self._attentions, self._program = attentions, FileProgram(model)

    def _places_of(self, attention: str, core: Core | None) -> dict[str, tuple[str, int]]:
        """Where the parts of an attention are; none of one that is not written in primitive operators."""
        if core is not None:
            nodes = {"q_scaled": None, "scores": core.scores, "weights": core.weights}
            named = {role: node and node.name for role, node in nodes.items()}
            named["weighted_values"] = core.heads and core.heads.name
        found: dict[str, tuple[str, int]] = {}
        for part, places in _PARTS.items():
            for role, at in places:
                node = self._node_of(attention, role) if core is None else named[role]
                if node and part not in found:
                    found[part] = node, core.values if core and part == "values" else at
        return found if core is not None or len(found) == len(_PARTS) else {}

    def forget(self, attention: str, part: str) -> None:
        """Leave a part out that is the same as another."""
        self._parts.get(attention, {}).pop(part, None)

    def _scale_of(self, attention: str) -> float | None:
        """The factor on the queries, where it is a number."""
        value = input_at(self._nodes.get(self._node_of(attention, "q_scaled") or ""), 1)
        factor = None if value is None else ir.convenience.get_const_tensor(value)
        return float(factor.numpy()) if factor is not None and factor.size == 1 else None

    def _node_of(self, attention: str, role: str) -> str | None:
        """The node that lowering made of an attention for a role, directly or in a rewrite of it."""
        found = [
            name for name in self._nodes if name.startswith(f"{attention}/") and name.endswith(f"/{role}")
        ]
        return min(found, key=len, default=None)

    def _mistakes(self) -> Iterator[tuple[str, Edits]]:
        """What they are, and the edits that make them; those of every place at once come first."""
        weights, off = dict(self._weights()), {name: self._factors(name) for name in self._parts}
        kinds_of_parts = dict.fromkeys(part for every in self._parts.values() for part in every)
        for part in kinds_of_parts if len(self._parts) > 1 else ():
            edits = [every[part] for every in self._parts.values() if part in every]
            yield f"{part} in BF16 in every attention", {n: e for each in edits for n, e in each.items()}
        kinds = list(dict.fromkeys(kind for every in weights.values() for kind in every))
        for kind in kinds if len(weights) > 1 else ():
            changes = [(at, every[kind]) for at, every in weights.items()]
            yield f"all weights {kind}", {node: {i: change} for (node, i, _), change in changes}
        for attention, parts in self._parts.items():
            yield f"BF16 arithmetic in {attention}", _together(parts)
            yield from ((f"{kind} in {attention}", edits) for kind, edits in off[attention].items())
            yield from ((f"{part} in BF16 in {attention}", edits) for part, edits in parts.items())
        yield from self._others()
        for kind in kinds:
            for (node, i, weight), every in weights.items():
                yield f"{weight} {kind}", {node: {i: every[kind]}}

    def _others(self) -> Iterator[tuple[str, Edits]]:
        """Softmax, and matmuls without a weight, that are of no attention node: of one that is not fused."""
        known = {node for parts in self._parts.values() for edits in parts.values() for node in edits}
        for name, node in self._nodes.items():
            is_matmul = is_op(node, "MatMul", "Einsum") and not any(map(weight_behind, node.inputs))
            if name in known or not (is_matmul or is_op(node, "Softmax")):
                continue
            for i in range(len(node.inputs)):
                yield f"input {i} of {name} in BF16", {name: {i: in_bf16}}
            yield f"result of {name} in BF16", {name: {_RESULT: in_bf16}}

    def _factors(self, attention: str) -> dict[str, Edits]:
        """An attention whose scale is off, and one whose result is."""
        parts = {f"scale {_OFF}": "keys", f"heads {_OFF}": "heads"}
        found = {kind: self._places[attention].get(part) for kind, part in parts.items()}
        return {kind: {at[0]: {at[1]: _too_large}} for kind, at in found.items() if at is not None}

    def _weights(self) -> Iterator[tuple[tuple[str, int, str], dict[str, Change]]]:
        """The weights of matmuls and convolutions: node, which input, name; and what may be done to them."""
        for name, node in self._nodes.items():
            if not is_op(node, "MatMul", "Gemm", "Conv"):
                continue
            for i, value in enumerate(node.inputs[:2]):
                weight = weight_behind(value)
                if weight is None or weight.dtype == ir.DataType.BFLOAT16 or (i == 0 and is_op(node, "Conv")):
                    continue
                rank = len(weight.shape) if weight.shape is not None else 0
                if rank < 2:
                    continue
                transposed = "transB" in node.attributes and node.attributes["transB"].as_int()
                per_channel: tuple[int, ...] = (-2,) if i == 1 and not transposed else (-1,)
                per_channel = tuple(range(1, rank)) if is_op(node, "Conv") else per_channel
                changes = in_fewer_bits(per_channel) | {_OFF: _too_large}
                yield (name, i, str(weight.name)), changes

    def _run(self, mode: FileRounding) -> Arrays:
        return self._program.run(self._case.inputs, mode)

    def _run_edited(
        self, edits: Edits, precision: Precision | None = None, results: Results = MappingProxyType({})
    ) -> Arrays:
        """The outputs with edits of some nodes."""

        def edited(node: FileNode) -> Callable[[Compute, Inputs], Any] | None:
            return partial(_edited, edits[node.name]) if edits.get(node.name) else None

        return self._run(ChangedMode(edited, precision, seed=1000, results=results))

    def found(self) -> CoarseMistakes:
        """What the mistakes add, where that is distinct from chance; and which attentions show it."""
        before, case, started = ExactMode(), self._case, time.process_time()
        exact = self._run(before)
        outputs = [name for name, true in case.oracle.items() if true.dtype == np.float64]
        kinds = accumulations(self._precision)
        if (time.process_time() - started) * _SAMPLES * len(kinds) > _MOST_SECONDS:
            return CoarseMistakes(applies=self._attentions)
        errors = dict[str, list[Arrays]]()
        for kind in kinds:
            rounding = replace(self._precision, accumulate=kind)
            runs = (self._run(FileRounding(rounding, 100 + seed)) for seed in range(_SAMPLES))
            errors[kind] = [{name: got[name] - exact[name] for name in outputs} for got in runs]
        spreads = {(kind, name): self._spread(kind, name) for kind in kinds for name in outputs}
        suspects, left = dict[str, KnownMistake](), _MOST_BYTES
        for mistake, edits in self._mistakes():
            if time.process_time() > self._deadline or len(suspects) == _MOST or left < 0:
                break
            got = self._run_edited(edits, results=before.results)
            is_factor = any(change is _too_large for each in edits.values() for change in each.values())
            changes, chances = dict[str, np.ndarray](), {kind: dict[str, float]() for kind in kinds}
            for name in outputs:
                change = got[name] - exact[name]
                if not change.any() or not np.isfinite(change).all():
                    continue
                for kind in kinds:
                    more = [each[name] for each in errors[kind]]
                    chance = spreads[kind, name].chance_of(change, more)
                    chances[kind][name] = max(chance, _LEAST_FACTOR if is_factor else 0.0)
                if any(is_telling(chances[kind][name]) for kind in kinds):
                    changes[name], left = change, left - change.size
            if changes:
                known = {kind: {name: each[name] for name in changes} for kind, each in chances.items()}
                suspects[mistake] = KnownMistake(changes, known, _FACTOR - 1 if is_factor else None)
        case, shown = replace(case, suspects=suspects), list[tuple[str, str]]()
        for kind in kinds if suspects else ():
            if not self._is_wrong(case, {}, kind):  # else everything is
                wrong = [name for name, parts in self._parts.items() if self._is_wrong(case, parts, kind)]
                shown += [(name, kind) for name in wrong]
        return CoarseMistakes(case.name, suspects, frozenset(shown), self._attentions)

    def _spread(self, kind: str, name: str) -> Spread:
        baseline, rounding = self._case.baseline(kind), replace(self._precision, accumulate=kind)
        true = self._case.oracle[name]
        spread = budget_from_samples(baseline.samples[name], true, rounding, baseline.branches).spread
        if spread is None:
            raise ValueError(f"{name} has no numbers")
        return spread

    def _is_wrong(self, case: GoldenCase, parts: Mapping[str, Edits], kind: str) -> bool:
        """Whether a model that rounds, with these parts in BF16, is out of budget."""
        rounding = replace(self._precision, accumulate=kind)
        got = self._run_edited(_together(parts), rounding)
        results = {name: got[name].astype(case.eager[name].dtype) for name in case.oracle}
        return any(verdict.is_wrong for verdict in judge_case(case, results, rounding))


def _together(parts: Mapping[str, Edits]) -> Edits:
    """The edits of several parts at once."""
    found: Edits = {}
    for each in parts.values():
        for node, changes in each.items():
            found[node] = found.get(node, {}) | changes
    return found
