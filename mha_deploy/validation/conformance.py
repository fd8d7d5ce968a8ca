"""The conformance table of masks: how does every runtime apply `is_causal`, masks and grouped heads?

Every case is one `Attention` node whose queries, keys, values and mask are graph inputs. All names begin with
the name of the case, so that several cases, lowered or not, can be one model: an engine build takes seconds.

ONNX aligns `is_causal` to the upper left corner: query 0 attends to key 0 only. Without a past there is no
attribute for the lower right corner (the last query attends to the last key). It is written as a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any

import numpy as np
import onnx_ir as ir
from msgspec import Struct

from mha_deploy.engine.build import engine_opener
from mha_deploy.engine.engine import first_gpu
from mha_deploy.engine.lowered import native_dialect
from mha_deploy.environment import can_import
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.ir import NodeBuilder
from mha_deploy.graph.lower import lower
from mha_deploy.graph.rules import REFUSED, WRONG_ANSWER, Target, judge, target_from
from mha_deploy.metrics import Budget, budget_from_samples, measure
from mha_deploy.model.precision import Precision
from mha_deploy.options import OnName, silent
from mha_deploy.rounding import rounded, sample_count
from mha_deploy.runtime import open_runner
from mha_deploy.runtime.cuda import find_gpu
from mha_deploy.runtime.runner import Runner
from mha_deploy.runtime.tensorrt.versions import load
from mha_deploy.status import Outcome, Word, derive, means
from mha_deploy.validation.runtimes import torch_device

SENTINEL = -1e4
"""The finite bias that many models give to masked keys."""

_OPSET, _IR_VERSION = 23, 11
_SHORT, _LONG = 40, 72  # on either side of 64, at which most fused kernels tile the keys
_BLOCKS = 400  # left padding of a third of it is more than 128 keys


@dataclass(frozen=True)
class MaskInput:
    """The mask of a case."""

    pattern: str  # the masked keys: `scattered`, `fully-masked`, `lower-right`, `padding`, `left-padding`
    # `bool`, or an additive mask: 0 with `-inf` or with the `sentinel`; -inf and random numbers (`bias`)
    kind: str = "bool"
    axes: str = "B Hq S T"  # by name, 1 for one that broadcasts


@dataclass(frozen=True)
class MaskCase:
    """One case: its name and what it tests; `diagnostic` for a feature that a lowering may avoid."""

    name: str
    about: str
    mask: MaskInput | None = None
    S: int = _LONG
    T: int = _LONG
    is_causal: bool = False
    Hq: int = 2
    Hkv: int = 2
    B: int = 2
    D: int = 32
    diagnostic: bool = False

    @property
    def scale(self) -> float:
        """The factor on the scores."""
        return float(self.D) ** -0.5

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of `q`, `k`, `v`, and of the `mask` where there is one."""
        key = (self.B, self.T, self.Hkv * self.D)
        shapes: dict[str, tuple[int, ...]] = {"q": (self.B, self.S, self.Hq * self.D), "k": key, "v": key}
        if self.mask is not None:
            axes = self.mask.axes.split()
            shapes["mask"] = tuple(1 if axis == "1" else getattr(self, axis) for axis in axes)
        return shapes

    def tensor(self, role: str) -> str:
        """The name in the graph of `q`, `k`, `v`, `mask` or `y`."""
        # Not a slash: a lowering separates an attention and its parts by that.
        return f"{self.name}.{role}"


_SCATTERED, _ONE_ROW = MaskInput("scattered"), MaskInput("padding", axes="B 1 1 T")
_causal, _wide = partial(MaskCase, is_causal=True), partial(MaskCase, S=_SHORT)

CASES: tuple[MaskCase, ...] = (
    _causal("causal", "is_causal, as many queries as keys"),
    _causal("causal-wide", "is_causal, fewer queries than keys: upper left", S=_SHORT),
    _causal("causal-tall", "is_causal, more queries than keys: upper left", T=_SHORT),
    _wide("lower-right", "the last query attends to the last key, as in decoding: written as a mask",
          MaskInput("lower-right", axes="1 1 S T")),
    _wide("bool-mask", "boolean mask for every head", _SCATTERED),
    _wide("additive-mask", "numbers added to the scores, -inf among them",
          MaskInput("scattered", "bias", "1 Hq S T")),
    _wide("sentinel-mask", "-1e4 for masked keys", MaskInput("scattered", "sentinel")),
    _causal("causal-bool-mask", "is_causal and a boolean mask", _SCATTERED),
    _causal("causal-additive-mask", "is_causal and an additive mask", MaskInput("scattered", "bias")),
    _wide("fully-masked-bool", "queries fully masked by a boolean mask: zeros", MaskInput("fully-masked")),
    _wide("fully-masked-inf", "queries fully masked by -inf: zeros", MaskInput("fully-masked", "-inf")),
    _wide("fully-masked-sentinel", "-1e4 for every key of a query: a shift, which softmax cancels",
          MaskInput("fully-masked", "sentinel")),
    _wide("padding", "every batch element has its own number of keys", MaskInput("padding", axes="B 1 S T")),
    _causal("causal-left-padding", "is_causal and left padding: the first queries are fully masked, zeros",
            MaskInput("left-padding", axes="B 1 S T")),
    _wide("masked-blocks", "every key of the first blocks of 64 or 128 is masked, as by left padding",
          MaskInput("left-padding", axes="B 1 S T"), T=_BLOCKS),
    _wide("masked-blocks-inf", "the same by -inf", MaskInput("left-padding", "-inf", "B 1 S T"), T=_BLOCKS),
    MaskCase("gqa-mask", "grouped heads under a mask for every query head", _SCATTERED, Hq=4),
    _wide("broadcast-queries", "padding mask that broadcasts over the queries", _ONE_ROW),
    _wide("broadcast-2d", "mask of queries and keys only", MaskInput("scattered", axes="S T")),
    _causal("causal-broadcast", "is_causal and a padding mask that broadcasts over the queries", _ONE_ROW),
    _causal("own-causal", "the corner of the runtime's own is_causal when lengths differ; ONNX: upper left",
            S=_SHORT, diagnostic=True),
)  # fmt: skip
"""Every case, in the order of the table."""


def case_model(case: MaskCase, precision: Precision) -> ir.Model:
    """The canonical graph of a case."""
    dtype = ir.DataType.from_numpy(precision.numpy)
    kinds = {"mask": ir.DataType.BOOL} if case.mask is not None and case.mask.kind == "bool" else {}
    inputs = [ir.val(case.tensor(role), kinds.get(role, dtype), shape) for role, shape in case.shapes.items()]
    b = NodeBuilder(case.name)
    given = {"q_num_heads": case.Hq, "kv_num_heads": case.Hkv, "scale": case.scale}
    y = b.op("Attention", *inputs, name=case.name, is_causal=int(case.is_causal), **given)
    y.name, y.type, y.shape = case.tensor("y"), inputs[0].type, inputs[0].shape
    graph = ir.Graph(inputs, [y], nodes=b.nodes, opset_imports={"": _OPSET}, name=case.name)
    return ir.Model(graph, ir_version=_IR_VERSION)


def combine(models: Sequence[ir.Model]) -> ir.Model:
    """Several models of different cases, all lowered alike, as one; the models are not changed."""
    graphs, opsets = [model.clone().graph for model in models], dict[str, int]()
    inputs, outputs = ([v for graph in graphs for v in getattr(graph, x)] for x in ("inputs", "outputs"))
    nodes = [node for graph in graphs for node in graph]
    for graph in graphs:  # a value, and a node, is in one graph
        opsets |= graph.opset_imports
        graph.inputs.clear()
        graph.outputs.clear()
        graph.remove(list(graph))
    graph = ir.Graph(inputs, outputs, nodes=nodes, opset_imports=opsets, name="conformance")
    return ir.Model(graph, ir_version=models[0].ir_version)


# -- A case with numbers, and the ONNX formula in NumPy: exactly, rounded, and as it could be misread --

# FP16 numbers near -1e4 are 8 apart. Smaller queries keep every score below 4, so that the sentinel
# swallows all of them in half precision, or none.
_QUERY_SIZE = 0.75
_VISIBLE_SHARE = 0.6
_MASKED_EVERY = 8

UPPER_LEFT, LOWER_RIGHT, FIRST_ROW, NOWHERE = "upper-left", "lower-right", "first-row", "nowhere"


@dataclass(frozen=True, kw_only=True)
class MaskTrial:
    """One case in one precision; `arrays` are `q`, `k`, `v`, and `mask` where the case has one."""

    case: MaskCase
    precision: Precision
    arrays: Mapping[str, np.ndarray]

    @property
    def as_written(self) -> dict[str, Any]:
        """What ONNX specifies: the mask, and the corner that causal starts from."""
        return {"mask": self.arrays.get("mask"), "causal": UPPER_LEFT if self.case.is_causal else NOWHERE}

    @cached_property
    def exact(self) -> np.ndarray:
        """The result in float64, heads apart: [B, Hq, S, D]."""
        return self.result(**self.as_written)

    @cached_property
    def rounded(self) -> np.ndarray:
        """That of a plain implementation in the trial's precision: accumulated in float32, then rounded."""
        half = self.precision.numpy
        plain = partial(self.result, working=np.float32, step=lambda x: x.astype(half).astype(x.dtype))
        return plain(**self.as_written).astype(half)

    @cached_property
    def samples(self) -> np.ndarray:
        """The formula in float64, every intermediate result rounded at random, several times. [N, ...]."""
        bits, count = self.precision.significand_bits, sample_count(self.exact.size)
        steps = [partial(rounded, bits=bits, seed=seed) for seed in range(1, count + 1)]
        return np.stack([step(self.result(**self.as_written, step=step)) for step in steps])

    @cached_property
    def averaged(self) -> np.ndarray:
        """What every query gets where no key counts more than another: [B, Hq, 1, D], in float64."""
        return self._shared("v", np.float64, interleaved=False).mean(axis=2, keepdims=True)

    @cached_property
    def fully_masked(self) -> np.ndarray:
        """Which queries are fully masked: [B, Hq, S]."""
        return np.all(np.isneginf(self._bias(**self.as_written)), axis=-1)

    @cached_property
    def shifted(self) -> np.ndarray:
        """Which queries have the sentinel for every key: [B, Hq, S]."""
        sentinel = float(np.asarray(SENTINEL, self.precision.numpy))  # bfloat16 has no -10000, but -9984
        return np.all(self._bias(**self.as_written) == sentinel, axis=-1)

    def heads(self, y: np.ndarray) -> np.ndarray:
        """[B, S, Hq·D] to [B, Hq, S, D]."""
        return y.reshape(*y.shape[:2], -1, self.case.D).transpose(0, 2, 1, 3)

    def result(
        self,
        *,
        mask: np.ndarray | None,
        causal: str,
        interleaved: bool = False,
        working: type[np.floating[Any]] = np.float64,
        step: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    ) -> np.ndarray:
        """The formula in a working type, with the mask and the corner of causal that a runtime may read.

        With `FIRST_ROW`, all queries are taken for the first one. Heads are `interleaved` where query head h
        shares key head h mod Hkv, instead of its neighbors' one. `step` rounds every intermediate result.
        """
        q = self.heads(self.arrays["q"].astype(working))
        k, v = (self._shared(role, working, interleaved) for role in "kv")
        scores = step(step(q @ k.swapaxes(-1, -2)) * working(self.case.scale))
        biased = step(scores + self._bias(mask, causal).astype(working))
        top = biased.max(axis=-1, keepdims=True)
        weights = np.exp(biased - np.where(np.isneginf(top), 0.0, top))
        total = weights.sum(axis=-1, keepdims=True)
        return step(step(weights / np.where(total == 0.0, 1.0, total)) @ v)

    def _shared(self, role: str, working: type[np.floating[Any]], interleaved: bool) -> np.ndarray:
        """Keys or values for each query head."""
        heads, group = self.heads(self.arrays[role].astype(working)), self.case.Hq // self.case.Hkv
        return np.concatenate([heads] * group, axis=1) if interleaved else np.repeat(heads, group, axis=1)

    def _bias(self, mask: np.ndarray | None, causal: str) -> np.ndarray:
        """What is added to the scores, as float64 [B, Hq, S, T]."""
        case, mask = self.case, np.zeros(1) if mask is None else mask
        bias = np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask.astype(np.float64)
        bias = np.broadcast_to(bias, (case.B, case.Hq, case.S, case.T))
        queries = np.arange(case.S)[:, None]
        last = {UPPER_LEFT: queries, LOWER_RIGHT: queries + case.T - case.S, FIRST_ROW: 0 * queries}
        return bias if causal == NOWHERE else np.where(np.arange(case.T) <= last[causal], bias, -np.inf)


def draw_trial(case: MaskCase, precision: Precision, seed: int) -> MaskTrial:
    """Draw the inputs of a case; a case has the same numbers whatever other cases there are."""
    rng = np.random.default_rng([seed, *case.name.encode()])
    arrays = {role: rng.standard_normal(shape) for role, shape in case.shapes.items() if role != "mask"}
    arrays["q"] *= _QUERY_SIZE
    if case.mask is not None:
        arrays["mask"] = _draw_mask(case, case.mask, rng)
    rounded = {role: x if x.dtype == bool else x.astype(precision.numpy) for role, x in arrays.items()}
    return MaskTrial(case=case, precision=precision, arrays=rounded)


def _draw_mask(case: MaskCase, mask: MaskInput, rng: np.random.Generator) -> np.ndarray:
    shape, keys, queries = case.shapes["mask"], np.arange(case.T), np.arange(case.S)[:, None]
    # Each batch element after the first is shorter.
    lengths = case.T - np.arange(case.B) * (case.T // (case.B + 1))
    padding = keys < lengths[:, None, None, None]
    # Keys here and there, among them one that is_causal leaves to the query as well.
    scattered = (keys == np.minimum(queries, case.T - 1)) | (rng.random(shape) < _VISIBLE_SHARE)
    patterns = {
        "scattered": scattered,
        "fully-masked": scattered & (queries % _MASKED_EVERY != _MASKED_EVERY - 1),
        "lower-right": keys <= queries + case.T - case.S,
        "padding": padding,
        "left-padding": padding[..., ::-1],
    }
    visible = np.broadcast_to(patterns[mask.pattern], shape)
    if mask.kind == "bool":
        return visible.copy()
    # Halves: among them are zeros, which a runtime could take for False.
    number = np.round(2 * rng.standard_normal(shape)) / 2 if mask.kind == "bias" else 0.0
    return np.where(visible, number, SENTINEL if mask.kind == "sentinel" else -np.inf)


# -- Is an answer what ONNX means, and if not, what was misread? -----------------------------------

Answer = np.ndarray | DeployError
"""What a runtime answers to a trial: the output [B, S, Hq·D], or the error with which it refused."""

_OF_MASKED = "for fully masked queries"


class Conformance(Word):
    """How a runtime treats a mask."""

    CONFORMS = "conforms"
    WRONG = "wrong"
    REFUSED = "refused"
    ABSENT = "absent"  # the runtime is not here


CONFORMS, WRONG, CELL_REFUSED, ABSENT = Conformance
_OUTCOMES = {CONFORMS: Outcome.PASSED, WRONG: Outcome.FAILED}  # the others have no answer


class MaskVerdict(Struct, frozen=True, forbid_unknown_fields=True):
    """How one runtime computes one mask."""

    status: Annotated[Conformance, means("the result")]
    detail: Annotated[str, means("what is wrong, or why it was refused; may be empty")] = ""
    error: Annotated[
        float | None, means("relative L2 against the oracle; null if there were no finite numbers")
    ] = None
    share: Annotated[float | None, means("share of the budget that it uses; null as `error`")] = None


def judge_answer(trial: MaskTrial, answer: Answer) -> MaskVerdict:
    """Compare an answer with the oracle, within the budget of a plain implementation's own error."""
    if isinstance(answer, DeployError):
        return MaskVerdict(CELL_REFUSED, answer.in_one_line)
    shape, dtype = trial.case.shapes["q"], trial.precision.numpy
    if answer.shape != shape:
        return MaskVerdict(WRONG, f"shape {answer.shape}, not {shape}")
    if answer.dtype != dtype:
        return MaskVerdict(WRONG, f"type {answer.dtype}, not {dtype}")
    got = trial.heads(answer.astype(np.float64))
    bad = ~np.isfinite(got).all(axis=-1)
    if bad.any():
        others = (bad & ~trial.fully_masked).any()
        where = f"in {int(bad.sum())} of {bad.size} rows" if others else _OF_MASKED
        return MaskVerdict(WRONG, f"gives {'NaN' if np.isnan(got).any() else 'infinity'} {where}")
    allowed, budget = _allowed(trial)
    for shows, right in allowed.items():
        deviation = measure(got, right)
        if not budget.exceeded_by(deviation):
            return MaskVerdict(CONFORMS, shows, deviation.relative_l2, budget.share_used(deviation))
    deviation = measure(got, trial.exact)
    detail = f"out of budget: {', '.join(budget.exceeded_by(deviation))}"
    misread = (words for words, by in _misreadings(trial, got) if not budget.exceeded_by(measure(got, by)))
    return MaskVerdict(WRONG, next(misread, detail), deviation.relative_l2, budget.share_used(deviation))


def _allowed(trial: MaskTrial) -> tuple[dict[str, np.ndarray], Budget]:
    """The results that are right, by what they show of a runtime, and how far an answer may be from one."""
    exact, plain, shifted, samples = trial.exact, trial.rounded, trial.shifted, trial.samples
    if not shifted.any():
        shows = UPPER_LEFT if trial.case.diagnostic else ""
        return {shows: exact}, budget_from_samples(samples - exact, exact, trial.precision)
    allowed, nearest = {"keeps the scores under -1e4": exact}, exact
    swallowed = np.where(shifted[..., None], trial.averaged, exact)
    if measure(plain, swallowed).relative_l2 < measure(plain, exact).relative_l2:
        # The formula itself, computed in this precision, adds the scores to -1e4 and loses them.
        allowed["averages all keys under -1e4, by rounding"] = nearest = swallowed
    # Random rounding makes anything of scores that are lost under -1e4: there, only the result is rounded.
    bits, lost = trial.precision.significand_bits, shifted & (nearest is not exact)
    samples = samples.copy()
    for seed, sample in enumerate(samples, start=1):
        sample[lost] = nearest[lost] + 2 * (rounded(nearest[lost], bits, seed) - nearest[lost])
    return allowed, budget_from_samples(samples - nearest, nearest, trial.precision)


def _misreadings(trial: MaskTrial, got: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Results of the mistakes that runtimes make, in words."""
    exact, masked, shifted = trial.exact, trial.fully_masked[..., None], trial.shifted[..., None]
    if masked.any():
        yield f"averages all keys {_OF_MASKED}", np.where(masked, trial.averaged, exact)
        yield f"not zeros {_OF_MASKED}", np.where(masked, got, exact)
    if shifted.any():
        yield "gives zeros under -1e4", np.where(shifted, 0.0, exact)
        yield "averages all keys under -1e4", np.where(shifted, trial.averaged, exact)
    case, mask = trial.case, trial.arrays.get("mask")
    wrong: dict[str, dict[str, Any]] = {}
    if case.is_causal:
        wrong["causal starts in the lower right corner"] = {"causal": LOWER_RIGHT}
        wrong["causal is ignored"] = {"causal": NOWHERE}
        wrong["every query attends to the keys of the first one"] = {"causal": FIRST_ROW}
    if mask is not None:
        wrong["the mask is ignored"] = {"mask": None}
    if mask is not None and mask.dtype == bool:
        wrong["the mask is inverted"] = {"mask": ~mask}
        wrong["the boolean mask is added as 0 and 1"] = {"mask": mask.astype(np.float64)}
    elif mask is not None:
        wrong["the additive mask is read as boolean"] = {"mask": mask != 0}
        wrong["only whether the mask is 0 counts"] = {"mask": mask == 0}
    if case.Hq != case.Hkv:
        wrong["query heads use the wrong key heads"] = {"interleaved": True}
    yield from ((words, trial.result(**trial.as_written | reading)) for words, reading in wrong.items())


# -- The runtimes of the table: trials in, answers out ---------------------------------------------

Open = Callable[[ir.Model], Runner]
Column = Callable[[Sequence[MaskTrial]], Mapping[str, Answer]]
"""Answers every trial by the name of its case; raises `BackendUnavailable` where the runtime is not here."""


def graph_column(open_model: Open, dialect: str, target: Target | None = None) -> Column:
    """A runtime that loads lowered graphs: all that the target takes in one model, or else one by one."""

    def run(trials: Sequence[MaskTrial]) -> Mapping[str, Answer]:
        answers, taken = dict[str, Answer](), list[tuple[MaskTrial, ir.Model]]()
        for trial in trials:
            try:
                taken.append((trial, _lower(trial, dialect, target)))
            except DeployError as error:
                answers[trial.case.name] = error
        try:
            return answers | (_run(open_model, taken) if taken else {})
        except DeployError as error:
            _raise_if_absent(open_model, error)
        for each in taken:  # one case that is refused must not hide the others
            try:
                answers |= _run(open_model, [each])
            except DeployError as error:
                _raise_if_absent(open_model, error)
                answers[each[0].case.name] = error
        return answers

    return run


def _lower(trial: MaskTrial, dialect: str, target: Target | None) -> ir.Model:
    """The graph as the target needs it; refused where nothing helps."""
    options: Mapping[str, Any] = {}
    model, is_diagnostic = case_model(trial.case, trial.precision), trial.case.diagnostic
    if target is not None:
        (answer,) = judge(attention_nodes(model), target)
        severe = [each for each in answer.findings if each.severity in (REFUSED, WRONG_ANSWER)]
        if hopeless := [finding for finding in severe if finding.cured_by is None]:
            remedies = "; ".join(each.remedy for each in hopeless)
            raise DeployError(" ".join(each.message for each in hopeless), hint=remedies)
        options = {} if is_diagnostic or dialect != "trt" else answer.options
    lowered = lower(model, dialect, **options)
    if is_diagnostic and not any(node.is_causal for node in attention_nodes(lowered)):
        raise DeployError(
            f"The {dialect} dialect writes causal as a mask: the runtime's own is not used.",
            hint="a dialect that keeps is_causal",
        )
    return lowered


def _run(open_model: Open, taken: Sequence[tuple[MaskTrial, ir.Model]]) -> dict[str, Answer]:
    """Run trials once, as one model."""
    with open_model(combine([model for _, model in taken])) as runner:
        feeds = {trial.case.tensor(role): array for trial, _ in taken for role, array in trial.arrays.items()}
        outputs = runner.run(feeds)
    wanted = {trial.case.name: trial.case.tensor("y") for trial, _ in taken}
    if missing := sorted(set(wanted.values()) - set(outputs)):
        raise DeployError(
            "The runtime left out an output.", got=", ".join(missing), hint="another version of the runtime"
        )
    return {name: outputs[y] for name, y in wanted.items()}


_SIMPLEST = '<ir_version: 8, opset_import: ["": 17]> simplest (float[1] x) => (float[1] y) {y = Identity(x)}'


def _raise_if_absent(open_model: Open, error: DeployError) -> None:
    """Distinguish a runtime that is not here from one without kernels for a graph: open the simplest one."""
    if isinstance(error, BackendUnavailable):
        open_model(ir.from_onnx_text(_SIMPLEST)).close()


# -- The table: one row for each case, one column for each runtime ---------------------------------


class MaskRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How every runtime computes one mask."""

    case: Annotated[str, means("short name of the mask")]
    about: Annotated[str, means("the mask in a few words")]
    diagnostic: Annotated[bool, means("whether the row only shows what a runtime does by itself")]
    cells: Annotated[dict[str, MaskVerdict], means("one for every column, by its name")]


class ConformanceTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How every runtime computes every mask."""

    precision: Annotated[str, means("precision of the graphs")]
    seed: Annotated[int, means("seed of the inputs")]
    outcome: Annotated[
        Outcome, means("failed if a runtime is wrong on a mask; not verified if none computes any")
    ] = Outcome.NOT_VERIFIED
    columns: Annotated[tuple[str, ...], means("the runtimes by name")]
    rows: Annotated[tuple[MaskRow, ...], means("the masks")]

    def __post_init__(self) -> None:
        for index, row in enumerate(self.rows):
            if set(row.cells) != set(self.columns):
                raise ValueError(f"rows[{index}].cells: not one for every column")
        cells = [cell for row in self.rows if not row.diagnostic for cell in row.cells.values()]
        derive(self, outcome=Outcome.of(_OUTCOMES[each.status] for each in cells if each.status in _OUTCOMES))

    @property
    def wrong(self) -> list[tuple[MaskRow, str, MaskVerdict]]:
        """The answers that are wrong, by row and column.

        Diagnostic rows do not count: they show what a runtime does by itself, and what is wrong about that
        is either avoided by its lowering or wrong in another row as well.
        """
        cells = [(row, *cell) for row in self.rows for cell in row.cells.items()]
        return [each for each in cells if each[2].status is WRONG and not each[0].diagnostic]

    @property
    def passed(self) -> bool:
        """Whether there are answers, and none is wrong."""
        return self.outcome is Outcome.PASSED


def conformance_table(
    columns: Mapping[str, Column | str],
    precision: Precision,
    *,
    seed: int = 0,
    cases: Sequence[MaskCase] = CASES,
    on_column: OnName = silent,
) -> ConformanceTable:
    """Run every case in every runtime, and judge the answers.

    A column is a runtime, or why it is not here. `on_column` is called before each.
    """
    trials = [draw_trial(case, precision, seed) for case in cases]
    cells: dict[str, dict[str, MaskVerdict]] = {case.name: {} for case in cases}
    for name, column in columns.items():
        on_column(name)
        try:
            if isinstance(column, str):
                raise BackendUnavailable(column, hint="`mha-deploy doctor` lists what is installed")
            answers = column(trials)
            for trial in trials:
                cells[trial.case.name][name] = judge_answer(trial, answers[trial.case.name])
        except BackendUnavailable as error:
            for row in cells.values():
                row[name] = MaskVerdict(ABSENT, error.in_one_line)
    rows = (
        MaskRow(case=case.name, about=case.about, diagnostic=case.diagnostic, cells=cells[case.name])
        for case in cases
    )
    return ConformanceTable(precision=precision.name, seed=seed, rows=tuple(rows), columns=tuple(columns))


# -- The runtimes of this machine as columns of the table ------------------------------------------


def mask_columns(precision: Precision) -> dict[str, Column | str]:
    """Every runtime of the table, or why it is not here."""
    columns, device = dict[str, Column | str](), torch_device()
    for path, name in {"plain": "eager", "sdpa": "sdpa"}.items():
        if can_import("torch"):
            columns[name if device == "cpu" else f"{name} {device}"] = torch_column(path, device)
        else:
            columns[name] = "PyTorch is not installed"
    for runtime in ("onnx-reference", "ort-cpu", "ort-cuda"):
        columns[runtime] = graph_column(partial(open_runner, runtime), "onnx")
    return {**columns, "tensorrt": _tensorrt_column(precision)}


def torch_column(path: str, device: str = "cpu") -> Column:
    """PyTorch's attention on one device: `plain` (matmul, softmax, matmul), or its `sdpa` kernel."""

    def run(trials: Sequence[MaskTrial]) -> Mapping[str, Answer]:
        from mha_deploy.baselines.torch import attention_alone, check_device

        check_device(device)
        answers: dict[str, Answer] = {}
        for case, arrays in ((trial.case, trial.arrays) for trial in trials):
            sizes: dict[str, Any] = {"Hq": case.Hq, "Hkv": case.Hkv, "scale": case.scale}
            how: dict[str, Any] = {"causal": case.is_causal, "path": path, "device": device}
            try:
                answers[case.name] = attention_alone(arrays, **sizes, **how)
            except DeployError as error:
                answers[case.name] = error
        return answers

    return run


def _tensorrt_column(precision: Precision) -> Column | str:
    """TensorRT on this machine's GPU; TensorRT-RTX does not run on every GPU that it could be built on."""
    if find_gpu() is None:
        return "there is no GPU here to run an engine on"
    try:
        rt = load("tensorrt")
    except BackendUnavailable as error:
        return error.in_one_line
    gpu, release = first_gpu(), ".".join(rt.version.split(".")[:3])
    target = target_from(rt.backend, release, gpu["compute_cap"] if gpu else None)
    return graph_column(engine_opener(rt, precision.name), native_dialect(rt), target)
