"""The conformance table of masks: how does every runtime apply `is_causal`, masks and grouped heads?

Every case is one `Attention` node whose queries, keys, values and mask are graph inputs. All names begin with
the name of the case, so that several cases, lowered or not, can be one model: an engine build takes seconds.

ONNX aligns `is_causal` to the upper left corner: query 0 attends to key 0 only. Without a past there is no
attribute for the lower right corner (the last query attends to the last key). It is written as a mask.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_deploy.engine.lowered import dialect_of
from mha_deploy.engine.manifest import first_gpu
from mha_deploy.engine.run import engine_opener
from mha_deploy.environment import can_import
from mha_deploy.errors import BackendUnavailable, DeployError, nearest
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.ir import NodeBuilder
from mha_deploy.graph.lower import lower
from mha_deploy.graph.rules import REFUSED, WRONG_ANSWER, Target, judge, target_from
from mha_deploy.metrics import Budget, budget_from_eager, measure
from mha_deploy.model.precision import Precision
from mha_deploy.runtime import open_runner
from mha_deploy.runtime.cuda import find_gpu
from mha_deploy.runtime.runner import Runner
from mha_deploy.runtime.tensorrt.versions import load
from mha_deploy.validate.runtimes import torch_device

# -- The cases -------------------------------------------------------------------------------------

SENTINEL = -1e4
"""The finite bias that many models give to masked keys."""

_OPSET, _IR_VERSION = 23, 11
_SHORT, _LONG = 40, 72  # on either side of 64, at which most fused kernels cut the keys
_BLOCKS = 400  # left padding of a third of it is more than 128 keys


@dataclass(frozen=True)
class MaskInput:
    """The mask of a case.

    Args:
        pattern: Which keys are masked: `scattered`, `fully-masked`, `lower-right`, `padding`, `left-padding`.
        kind: `bool`; `-inf` or `sentinel`, an additive mask with that number and 0; or `bias`, an additive
            mask with -inf and random numbers.
        axes: Its axes by name, 1 for one that broadcasts.
    """

    pattern: str
    kind: str = "bool"
    axes: str = "B Hq S T"

    @property
    def is_bool(self) -> bool:
        """Whether the mask is boolean; others are added to the scores."""
        return self.kind == "bool"


@dataclass(frozen=True)
class Case:
    """One case: its name and what it tests; `diagnostic` for a feature that a lowering may avoid."""

    name: str
    about: str
    S: int = _LONG
    T: int = _LONG
    is_causal: bool = False
    mask: MaskInput | None = None
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
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """The shapes of `q`, `k` and `v`."""
        key = (self.B, self.T, self.Hkv * self.D)
        return {"q": (self.B, self.S, self.Hq * self.D), "k": key, "v": key}

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """The shape of the mask; empty where there is none."""
        axes = self.mask.axes.split() if self.mask is not None else []
        return tuple(1 if axis == "1" else getattr(self, axis) for axis in axes)

    def tensor(self, role: str) -> str:
        """The name in the graph of `q`, `k`, `v`, `mask` or `y`."""
        # Not a slash: a lowering separates an attention and its parts by that.
        return f"{self.name}.{role}"


_SCATTERED, _MASKED_QUERIES = MaskInput("scattered"), MaskInput("fully-masked")
_BY_LENGTH, _ON_THE_LEFT = MaskInput("padding", axes="B 1 S T"), MaskInput("left-padding", axes="B 1 S T")
_ONE_ROW = MaskInput("padding", axes="B 1 1 T")

CASES: tuple[Case, ...] = (
    Case("causal", "is_causal, as many queries as keys", is_causal=True),
    Case("causal-wide", "is_causal, fewer queries than keys: upper left", S=_SHORT, is_causal=True),
    Case("causal-tall", "is_causal, more queries than keys: upper left", T=_SHORT, is_causal=True),
    Case(
        "lower-right",
        "the last query attends to the last key, as in decoding: written as a mask",
        S=_SHORT,
        mask=MaskInput("lower-right", axes="1 1 S T"),
    ),
    Case("bool-mask", "boolean mask for every head", S=_SHORT, mask=_SCATTERED),
    Case(
        "additive-mask",
        "numbers added to the scores, -inf among them",
        S=_SHORT,
        mask=MaskInput("scattered", "bias", "1 Hq S T"),
    ),
    Case("sentinel-mask", "-1e4 for masked keys", S=_SHORT, mask=replace(_SCATTERED, kind="sentinel")),
    Case("causal-bool-mask", "is_causal and a boolean mask", is_causal=True, mask=_SCATTERED),
    Case(
        "causal-additive-mask",
        "is_causal and an additive mask",
        is_causal=True,
        mask=replace(_SCATTERED, kind="bias"),
    ),
    Case(
        "fully-masked-bool", "queries fully masked by a boolean mask: zeros", S=_SHORT, mask=_MASKED_QUERIES
    ),
    Case(
        "fully-masked-inf",
        "queries fully masked by -inf: zeros",
        S=_SHORT,
        mask=replace(_MASKED_QUERIES, kind="-inf"),
    ),
    Case(
        "fully-masked-sentinel",
        "-1e4 for every key of a query: a shift, which softmax cancels",
        S=_SHORT,
        mask=replace(_MASKED_QUERIES, kind="sentinel"),
    ),
    Case("padding", "every batch element has its own number of keys", S=_SHORT, mask=_BY_LENGTH),
    Case(
        "causal-left-padding",
        "is_causal and left padding: the first queries are fully masked, zeros",
        is_causal=True,
        mask=_ON_THE_LEFT,
    ),
    Case(
        "masked-blocks",
        "every key of the first blocks of 64 or 128 is masked, as by left padding",
        S=_SHORT,
        T=_BLOCKS,
        mask=_ON_THE_LEFT,
    ),
    Case("masked-blocks-inf", "the same by -inf", _SHORT, _BLOCKS, mask=replace(_ON_THE_LEFT, kind="-inf")),
    Case("gqa-mask", "grouped heads under a mask for every query head", Hq=4, mask=_SCATTERED),
    Case("broadcast-queries", "padding mask that broadcasts over the queries", S=_SHORT, mask=_ONE_ROW),
    Case("broadcast-2d", "mask of queries and keys only", S=_SHORT, mask=replace(_SCATTERED, axes="S T")),
    Case(
        "causal-broadcast",
        "is_causal and a padding mask that broadcasts over the queries",
        is_causal=True,
        mask=_ONE_ROW,
    ),
    Case(
        "own-causal",
        "the corner of the runtime's own is_causal when lengths differ; ONNX: upper left",
        S=_SHORT,
        is_causal=True,
        diagnostic=True,
    ),
)
"""Every case, in the order of the table."""


def case_model(case: Case, precision: Precision) -> ir.Model:
    """The canonical graph of a case."""
    dtype = ir.DataType.from_numpy(precision.numpy)
    inputs = [ir.val(case.tensor(role), dtype, shape) for role, shape in case.shapes.items()]
    if case.mask is not None:
        kind = ir.DataType.BOOL if case.mask.is_bool else dtype
        inputs.append(ir.val(case.tensor("mask"), kind, case.mask_shape))
    b = NodeBuilder(case.name)
    heads = {"q_num_heads": case.Hq, "kv_num_heads": case.Hkv}
    causal = int(case.is_causal)
    y = b.op("Attention", *inputs, name=case.name, is_causal=causal, **heads, scale=case.scale)
    y.name, y.type, y.shape = case.tensor("y"), inputs[0].type, inputs[0].shape
    graph = ir.Graph(inputs, [y], nodes=b.nodes, opset_imports={"": _OPSET}, name=case.name)
    return ir.Model(graph, ir_version=_IR_VERSION)


def combined(models: Sequence[ir.Model]) -> ir.Model:
    """Several models of cases, as they are or lowered, as one; the models are not changed.

    Raises:
        DeployError: They share a name, or have different operator sets.
    """
    inputs: list[ir.Value] = []
    outputs: list[ir.Value] = []
    nodes: list[ir.Node] = []
    opsets: dict[str, int] = {}
    for model in models:
        graph = model.clone().graph
        for domain, version in graph.opset_imports.items():
            if opsets.setdefault(domain, version) != version:
                raise DeployError(
                    "Models with different operator sets cannot be combined.",
                    got=f"{domain or 'onnx'} {opsets[domain]} and {version}",
                )
        nodes += list(graph)
        inputs += list(graph.inputs)
        outputs += list(graph.outputs)
        graph.inputs.clear()
        graph.outputs.clear()
        graph.remove(list(graph))
    values = [*inputs, *(value for node in nodes for value in node.outputs)]
    shared = [str(name) for name, count in Counter(value.name for value in values).items() if count > 1]
    if shared:
        raise DeployError("Models that share names cannot be combined.", got=", ".join(shared))
    graph = ir.Graph(inputs, outputs, nodes=nodes, opset_imports=opsets, name="conformance")
    return ir.Model(graph, ir_version=min(model.ir_version for model in models))


# -- A case with numbers: inputs from a seed, rounded to the precision under test ------------------

# FP16 numbers near -1e4 are 8 apart. Smaller queries keep every score below 4, so that the sentinel
# swallows all of them in half precision, or none.
_QUERY_SIZE = 0.75
_VISIBLE_SHARE = 0.6
_MASKED_EVERY = 8


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One case in one precision; `arrays` are `q`, `k`, `v`, and `mask` where the case has one."""

    case: Case
    precision: Precision
    arrays: Mapping[str, np.ndarray]

    @property
    def model(self) -> ir.Model:
        """The canonical graph."""
        return case_model(self.case, self.precision)

    @property
    def feeds(self) -> dict[str, np.ndarray]:
        """The inputs under the names they have in the graph."""
        return {self.case.tensor(role): array for role, array in self.arrays.items()}


def draw_trial(case: Case, precision: Precision, seed: int) -> Trial:
    """Draw the inputs of a case; a case has the same numbers whatever other cases there are."""
    rng = np.random.default_rng([seed, *case.name.encode()])
    arrays = {role: rng.standard_normal(shape) for role, shape in case.shapes.items()}
    arrays["q"] *= _QUERY_SIZE
    if case.mask is not None:
        arrays["mask"] = _drawn_mask(case, case.mask, rng)
    rounded = {role: x if x.dtype == bool else x.astype(precision.numpy) for role, x in arrays.items()}
    return Trial(case=case, precision=precision, arrays=rounded)


def _drawn_mask(case: Case, mask: MaskInput, rng: np.random.Generator) -> np.ndarray:
    shape, keys, queries = case.mask_shape, np.arange(case.T), np.arange(case.S)[:, None]
    # Each batch element after the first is shorter.
    lengths = case.T - np.arange(case.B) * (case.T // (case.B + 1))
    padding = keys < lengths[:, None, None, None]

    def scattered() -> np.ndarray:
        """Keys here and there, among them one that is_causal leaves to the query as well."""
        return (keys == np.minimum(queries, case.T - 1)) | (rng.random(shape) < _VISIBLE_SHARE)

    patterns: dict[str, Callable[[], np.ndarray]] = {
        "scattered": scattered,
        "fully-masked": lambda: scattered() & (queries % _MASKED_EVERY != _MASKED_EVERY - 1),
        "lower-right": lambda: keys <= queries + case.T - case.S,
        "padding": lambda: padding,
        "left-padding": lambda: padding[..., ::-1],
    }
    if mask.pattern not in patterns:
        raise DeployError("No such mask pattern.", got=mask.pattern, hint=nearest(mask.pattern, patterns))
    visible = np.broadcast_to(patterns[mask.pattern](), shape)
    if mask.is_bool:
        return visible.copy()
    # Halves: among them are zeros, which a runtime could take for False.
    number = np.round(2 * rng.standard_normal(shape)) / 2 if mask.kind == "bias" else 0.0
    return np.where(visible, number, SENTINEL if mask.kind == "sentinel" else -np.inf)


# -- The ONNX formula in NumPy: exactly, in the precision under test, and as it could be misread ---

UPPER_LEFT, LOWER_RIGHT, FIRST_ROW, NOWHERE = "upper-left", "lower-right", "first-row", "nowhere"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a runtime may take a trial for.

    Args:
        mask: The mask it reads; None for none.
        causal: The corner that causal starts from, `upper-left` or `lower-right`; `first-row` where all
            queries are taken for the first one; `nowhere`.
        interleaved: Whether query head h shares key head h mod Hkv, instead of its neighbours' one.
    """

    mask: np.ndarray | None
    causal: str
    interleaved: bool = False


def reading_as_written(trial: Trial) -> Reading:
    """What ONNX specifies."""
    return Reading(mask=trial.arrays.get("mask"), causal=UPPER_LEFT if trial.case.is_causal else NOWHERE)


def exact_result(trial: Trial, reading: Reading | None = None) -> np.ndarray:
    """The result in float64, heads apart: [B, Hq, S, D]."""
    return _formula(trial, reading or reading_as_written(trial), np.dtype(np.float64), lambda x: x)


def rounded_result(trial: Trial) -> np.ndarray:
    """The result of a plain implementation in the trial's precision: accumulated in float32, then rounded."""
    half = trial.precision.numpy
    result = _formula(
        trial, reading_as_written(trial), np.dtype(np.float32), lambda x: x.astype(half).astype(x.dtype)
    )
    return result.astype(half)


def averaged_result(trial: Trial) -> np.ndarray:
    """What every query gets where no key counts more than another: [B, Hq, 1, D], in float64."""
    return _heads(trial, "v", np.dtype(np.float64), interleaved=False).mean(axis=2, keepdims=True)


def fully_masked_queries(trial: Trial) -> np.ndarray:
    """Which queries are fully masked: [B, Hq, S]."""
    return np.all(np.isneginf(_bias(trial, reading_as_written(trial))), axis=-1)


def shifted_queries(trial: Trial) -> np.ndarray:
    """Which queries have the sentinel for every key: [B, Hq, S]."""
    sentinel = float(np.asarray(SENTINEL, trial.precision.numpy))  # bfloat16 has no -10000, but -9984
    return np.all(_bias(trial, reading_as_written(trial)) == sentinel, axis=-1)


def split_heads(trial: Trial, y: np.ndarray) -> np.ndarray:
    """[B, S, Hq·D] to [B, Hq, S, D]."""
    return y.reshape(*y.shape[:2], -1, trial.case.D).transpose(0, 2, 1, 3)


def _formula(
    trial: Trial, reading: Reading, working: np.dtype, step: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    q = split_heads(trial, trial.arrays["q"].astype(working))
    k, v = (_heads(trial, role, working, reading.interleaved) for role in "kv")
    scores = step(step(q @ k.swapaxes(-1, -2)) * working.type(trial.case.scale))
    biased = step(scores + _bias(trial, reading).astype(working))
    top = biased.max(axis=-1, keepdims=True)
    weights = np.exp(biased - np.where(np.isneginf(top), 0.0, top))
    total = weights.sum(axis=-1, keepdims=True)
    return step(step(weights / np.where(total == 0.0, 1.0, total)) @ v)


def _heads(trial: Trial, role: str, working: np.dtype, interleaved: bool) -> np.ndarray:
    """Keys or values for each query head."""
    heads, group = split_heads(trial, trial.arrays[role].astype(working)), trial.case.Hq // trial.case.Hkv
    return np.concatenate([heads] * group, axis=1) if interleaved else np.repeat(heads, group, axis=1)


def _bias(trial: Trial, reading: Reading) -> np.ndarray:
    """What is added to the scores, as float64 [B, Hq, S, T]."""
    case, mask = trial.case, np.zeros(1) if reading.mask is None else reading.mask
    bias = np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask.astype(np.float64)
    bias = np.broadcast_to(bias, (case.B, case.Hq, case.S, case.T))
    if reading.causal == NOWHERE:
        return bias
    last = np.arange(case.S)[:, None]
    if reading.causal == LOWER_RIGHT:
        last = last + case.T - case.S
    elif reading.causal == FIRST_ROW:
        last = np.zeros_like(last)
    return np.where(np.arange(case.T) <= last, bias, -np.inf)


# -- Is an answer what ONNX means, and if not, what was misread? -----------------------------------

Answer = np.ndarray | DeployError
"""What a runtime answers to a trial: the output [B, S, Hq·D], or the error with which it refused."""

CONFORMS, WRONG, CELL_REFUSED, ABSENT = "conforms", "wrong", "refused", "absent"
_MASKED = "for fully masked queries"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """How one runtime treats one case.

    Args:
        status: `conforms`, `wrong`, `refused`, or `absent` where the runtime is not here.
        detail: What is wrong, why it was refused, or what else is worth reporting.
        error: ‖y − o‖ / ‖o‖ against the oracle, where there are finite numbers to compare.
        share: The largest share of the error budget that was used; over 1 is wrong.
    """

    status: str
    detail: str = ""
    error: float | None = None
    share: float | None = None

    def __str__(self) -> str:
        error = "" if self.status != WRONG or self.error is None else f" ({self.error:.2g})"
        return f"{self.status}{error}" + (f": {self.detail}" if self.detail else "")


def judge_answer(trial: Trial, answer: Answer) -> Cell:
    """Compare an answer with the oracle, within the budget of a plain implementation's own error."""
    if isinstance(answer, DeployError):
        return Cell(status=CELL_REFUSED, detail=answer.in_one_line)
    shape, dtype = trial.case.shapes["q"], trial.precision.numpy
    if answer.shape != shape:
        return Cell(status=WRONG, detail=f"shape {answer.shape}, not {shape}")
    if answer.dtype != dtype:
        return Cell(status=WRONG, detail=f"type {answer.dtype}, not {dtype}")
    got = split_heads(trial, answer.astype(np.float64))
    bad = ~np.isfinite(got).all(axis=-1)
    if bad.any():
        others = (bad & ~fully_masked_queries(trial)).any()
        where = f"in {int(bad.sum())} of {bad.size} rows" if others else _MASKED
        return Cell(status=WRONG, detail=f"gives {'NaN' if np.isnan(got).any() else 'infinity'} {where}")
    allowed, budget = _allowed(trial)
    for shows, right in allowed.items():
        deviation = measure(got, right)
        if not budget.exceeded_by(deviation):
            share = budget.share_used(deviation)
            return Cell(status=CONFORMS, detail=shows, error=deviation.relative_l2, share=share)
    deviation = measure(got, exact_result(trial))
    misread = (
        words for words, wrong in _misreadings(trial, got) if not budget.exceeded_by(measure(got, wrong))
    )
    detail = next(misread, None) or f"out of budget: {', '.join(budget.exceeded_by(deviation))}"
    share = budget.share_used(deviation)
    return Cell(status=WRONG, detail=detail, error=deviation.relative_l2, share=share)


def _allowed(trial: Trial) -> tuple[dict[str, np.ndarray], Budget]:
    """The results that are right, by what they show of a runtime, and how far an answer may be from one."""
    exact, plain, shifted = exact_result(trial), rounded_result(trial), shifted_queries(trial)
    if not shifted.any():
        shows = UPPER_LEFT if trial.case.diagnostic else ""
        return {shows: exact}, budget_from_eager(plain, exact, trial.precision)
    allowed, nearest = {"keeps the scores under -1e4": exact}, exact
    swallowed = np.where(shifted[..., None], averaged_result(trial), exact)
    if measure(plain, swallowed).relative_l2 < measure(plain, exact).relative_l2:
        # The formula itself, computed in this precision, adds the scores to -1e4 and loses them.
        allowed["averages all keys under -1e4, by rounding"] = nearest = swallowed
    return allowed, budget_from_eager(plain, nearest, trial.precision)


def _misreadings(trial: Trial, got: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Results of the mistakes that runtimes make, in words."""
    exact, masked, shifted = exact_result(trial), fully_masked_queries(trial), shifted_queries(trial)
    if masked.any():
        yield f"averages all keys {_MASKED}", np.where(masked[..., None], averaged_result(trial), exact)
        yield f"not zeros {_MASKED}", np.where(masked[..., None], got, exact)
    if shifted.any():
        yield "gives zeros under -1e4", np.where(shifted[..., None], 0.0, exact)
        yield "averages all keys under -1e4", np.where(shifted[..., None], averaged_result(trial), exact)
    case, right, mask = trial.case, reading_as_written(trial), trial.arrays.get("mask")
    wrong: dict[str, Reading] = {}
    if case.is_causal:
        wrong["causal starts in the lower right corner"] = replace(right, causal=LOWER_RIGHT)
        wrong["causal is ignored"] = replace(right, causal=NOWHERE)
        wrong["every query attends to the keys of the first one"] = replace(right, causal=FIRST_ROW)
    if mask is not None:
        wrong["the mask is ignored"] = replace(right, mask=None)
    if mask is not None and mask.dtype == bool:
        wrong["the mask is read upside down"] = replace(right, mask=~mask)
        wrong["the boolean mask is added as 0 and 1"] = replace(right, mask=mask.astype(np.float64))
    elif mask is not None:
        wrong["the additive mask is read as boolean"] = replace(right, mask=mask != 0)
        wrong["only whether the mask is 0 counts"] = replace(right, mask=mask == 0)
    if case.Hq != case.Hkv:
        wrong["query heads use the wrong key heads"] = replace(right, interleaved=True)
    yield from ((words, exact_result(trial, reading)) for words, reading in wrong.items())


# -- The runtimes of the table: trials in, answers out ---------------------------------------------

Open = Callable[[ir.Model], Runner]


@dataclass(frozen=True, kw_only=True)
class RunColumn:
    """One runtime; `run` answers every trial by the name of its case.

    It raises `BackendUnavailable` where the runtime is not here.
    """

    name: str
    run: Callable[[Sequence[Trial]], Mapping[str, Answer]]


def absent_column(name: str, why: str) -> RunColumn:
    """A runtime that is known not to be here."""

    def run(trials: Sequence[Trial]) -> Mapping[str, Answer]:
        raise BackendUnavailable(why)

    return RunColumn(name=name, run=run)


def runner_column(name: str, open_model: Open, dialect: str, **options: Any) -> RunColumn:
    """A runtime that loads lowered graphs, and runs one case after the other."""

    def answer(trial: Trial) -> Answer:
        try:
            return _run(open_model, _lowered(trial, dialect, options), [trial])[trial.case.name]
        except DeployError as error:
            _raise_if_absent(open_model, error)
            return error

    return RunColumn(name=name, run=lambda trials: {trial.case.name: answer(trial) for trial in trials})


def engine_column(
    name: str, build_and_open: Open, *, target: Target, dialect: str, **options: Any
) -> RunColumn:
    """A runtime whose builds are slow: the cases that its target takes are one engine, which runs once."""

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
        if not taken:
            return answers
        try:
            return answers | _run(build_and_open, combined(list(models.values())), taken)
        except DeployError as error:
            _raise_if_absent(build_and_open, error)
        for trial in taken:  # one case that is refused must not hide the others
            try:
                answers |= _run(build_and_open, models[trial.case.name], [trial])
            except DeployError as error:
                answers[trial.case.name] = error
        return answers

    return RunColumn(name=name, run=run)


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


def _run(open_model: Open, model: ir.Model, trials: Sequence[Trial]) -> dict[str, Answer]:
    """Open a model that holds these trials, and run it once."""
    feeds = {name: array for trial in trials for name, array in trial.feeds.items()}
    with open_model(model) as runner:
        outputs = runner.run(feeds)
    missing = sorted({trial.case.tensor("y") for trial in trials} - set(outputs))
    if missing:
        raise DeployError("The runtime left out an output.", got=", ".join(missing))
    return {trial.case.name: outputs[trial.case.tensor("y")] for trial in trials}


def _raise_if_absent(open_model: Open, error: DeployError) -> None:
    """Distinguish a runtime that is not here from one without kernels for a graph: open the simplest one."""
    if isinstance(error, BackendUnavailable):
        x = ir.val("x", ir.DataType.FLOAT, [1])
        b = NodeBuilder("simplest")
        y = b.op("Identity", x)
        y.type, y.shape = x.type, x.shape
        graph = ir.Graph([x], [y], nodes=b.nodes, opset_imports={"": 17})
        open_model(ir.Model(graph, ir_version=8)).close()


# -- The table: one row for each case, one column for each runtime ---------------------------------


@dataclass(frozen=True, kw_only=True)
class ConformanceTable:
    """How every runtime treats every case; `cells` are by case name, then by column."""

    precision: str
    seed: int
    rows: tuple[Case, ...]
    columns: tuple[str, ...]
    cells: Mapping[str, Mapping[str, Cell]]

    @property
    def passed(self) -> bool:
        """Whether no answer is wrong.

        Diagnostic rows do not count: they show what a runtime does by itself, and what is wrong about that
        is either avoided by its lowering or wrong in another row as well.
        """
        judged = (self.cells[case.name].values() for case in self.rows if not case.diagnostic)
        return not any(cell.status == WRONG for cells in judged for cell in cells)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "precision": self.precision,
            "seed": self.seed,
            "passed": self.passed,
            "columns": list(self.columns),
            "rows": [
                {
                    "case": case.name,
                    "about": case.about,
                    "diagnostic": case.diagnostic,
                    "cells": {name: asdict(cell) for name, cell in self.cells[case.name].items()},
                }
                for case in self.rows
            ],
        }


def conformance_table(
    columns: Sequence[RunColumn],
    precision: Precision,
    *,
    seed: int = 0,
    cases: Sequence[Case] = CASES,
    on_column: Callable[[str], None] = lambda name: None,
) -> ConformanceTable:
    """Run every case in every runtime, and judge the answers; `on_column` is called before each runtime."""
    names = tuple(column.name for column in columns)
    if len(set(names)) != len(names):
        raise DeployError("Two columns have the same name.", got=", ".join(names))
    trials = [draw_trial(case, precision, seed) for case in cases]
    cells: dict[str, dict[str, Cell]] = {case.name: {} for case in cases}
    for column in columns:
        on_column(column.name)
        try:
            answers = column.run(trials)
            found = {trial.case.name: judge_answer(trial, answers[trial.case.name]) for trial in trials}
        except BackendUnavailable as error:
            found = dict.fromkeys(cells, Cell(status=ABSENT, detail=error.in_one_line))
        for name, cell in found.items():
            cells[name][column.name] = cell
    return ConformanceTable(
        precision=precision.name, seed=seed, rows=tuple(cases), columns=names, cells=cells
    )


# -- The runtimes of this machine as columns of the table ------------------------------------------

TORCH_PATHS = {"plain": "eager", "sdpa": "sdpa"}
"""How the reference layer computes attention, and the name of its column."""


def mask_columns(precision: Precision) -> list[RunColumn]:
    """Every runtime of the table, available here or not."""
    if can_import("torch"):
        columns = [torch_column(path, torch_device()) for path in TORCH_PATHS]
    else:
        columns = [absent_column(name, "PyTorch is not installed") for name in TORCH_PATHS.values()]
    for backend in ("onnx-reference", "ort-cpu", "ort-cuda"):
        columns.append(runner_column(backend, partial(open_runner, backend), "onnx"))
    return [*columns, _tensorrt_column(precision)]


def torch_column(path: str, device: str = "cpu") -> RunColumn:
    """PyTorch's own attention on one device.

    Args:
        path: `plain` for matmul, softmax, matmul; `sdpa` for PyTorch's own kernel.
        device: `cpu`, or `cuda` where there is one.

    Raises:
        DeployError: There is no such path.
    """
    if path not in TORCH_PATHS:
        raise DeployError("No such path to compute attention.", got=path, hint=nearest(path, TORCH_PATHS))

    def run(trials: Sequence[Trial]) -> Mapping[str, Answer]:
        from mha_deploy.baselines.torch import attention_alone, check_device

        check_device(device)
        answers: dict[str, Answer] = {}
        for trial in trials:
            case = trial.case
            sizes: dict[str, Any] = {
                "Hq": case.Hq,
                "Hkv": case.Hkv,
                "scale": case.scale,
                "causal": case.is_causal,
            }
            try:
                answers[case.name] = attention_alone(trial.arrays, **sizes, path=path, device=device)
            except DeployError as error:
                answers[case.name] = error
        return answers

    name = TORCH_PATHS[path]
    return RunColumn(name=name if device == "cpu" else f"{name} {device}", run=run)


def _tensorrt_column(precision: Precision) -> RunColumn:
    """TensorRT on this machine's GPU; TensorRT-RTX does not run on every GPU that it could be built on."""
    if find_gpu() is None:
        return absent_column("tensorrt", "there is no GPU here to run an engine on")
    try:
        rt = load("tensorrt")
    except BackendUnavailable as error:
        return absent_column("tensorrt", error.in_one_line)
    gpu = first_gpu()
    release = ".".join(rt.version.split(".")[:3])
    target = target_from(rt.backend, release, gpu["compute_cap"] if gpu else None)
    opener = engine_opener(rt, precision.name)
    return engine_column("tensorrt", opener, target=target, dialect=dialect_of(rt))
