"""The table of masks: the published conformance cases in every runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from mha_deploy.engine.lowered import dialect_of
from mha_deploy.engine.manifest import first_gpu
from mha_deploy.engine.run import engine_opener
from mha_deploy.environment import can_import
from mha_deploy.errors import BackendUnavailable, DeployError, nearest
from mha_deploy.graph.attention_node import attention_nodes
from mha_deploy.graph.conformance_cases import CASES, SENTINEL, Case, MaskInput, case_model, combined
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

# -- A case with numbers: inputs from a seed, rounded to the precision under test ------------------

# FP16 numbers near -1e4 are 8 apart. Smaller queries keep every score below 4, so that the sentinel
# swallows all of them in half precision, or none.
_QUERY_SIZE = 0.75
_SEEN_SHARE = 0.6
_CLOSED_EVERY = 8


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One case in one precision.

    Args:
        case: The case.
        precision: Its precision.
        arrays: `q`, `k`, `v`, and `mask` where the case has one.
    """

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
    widths = {"q": (case.S, case.Hq), "k": (case.T, case.Hkv), "v": (case.T, case.Hkv)}
    arrays = {
        role: rng.standard_normal((case.B, length, heads * case.D))
        for role, (length, heads) in widths.items()
    }
    arrays["q"] *= _QUERY_SIZE
    if case.mask is not None:
        arrays["mask"] = _mask(case, case.mask, rng)
    rounded = {role: x if x.dtype == bool else x.astype(precision.numpy) for role, x in arrays.items()}
    return Trial(case=case, precision=precision, arrays=rounded)


def _mask(case: Case, mask: MaskInput, rng: np.random.Generator) -> np.ndarray:
    if mask.pattern not in _PATTERNS:
        raise DeployError("No such mask pattern.", got=mask.pattern, hint=nearest(mask.pattern, _PATTERNS))
    shape = case.mask_shape
    seen = np.broadcast_to(_PATTERNS[mask.pattern](case, shape, rng), shape)
    if mask.is_bool:
        return seen.copy()
    # Halves: among them are zeros, which a runtime could take for False.
    number = np.round(2 * rng.standard_normal(shape)) / 2 if mask.kind == "bias" else 0.0
    return np.where(seen, number, SENTINEL if mask.kind == "sentinel" else -np.inf)


def _scattered(case: Case, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Keys here and there, among them one that is_causal leaves to the query as well."""
    own = np.arange(case.T) == np.minimum(np.arange(case.S), case.T - 1)[:, None]
    return own | (rng.random(shape) < _SEEN_SHARE)


def _fully_masked(case: Case, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """The same, but some queries see no key at all."""
    closed = np.arange(case.S)[:, None] % _CLOSED_EVERY == _CLOSED_EVERY - 1
    return _scattered(case, shape, rng) & ~closed


def _lower_right(case: Case, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return np.arange(case.T) <= np.arange(case.S)[:, None] + case.T - case.S


def _padding(case: Case, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """The first row of the batch is full, each other one shorter."""
    lengths = case.T - np.arange(case.B) * (case.T // (case.B + 1))
    return np.arange(case.T) < lengths[:, None, None, None]


def _left_padding(case: Case, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return _padding(case, shape, rng)[..., ::-1]


_PATTERNS = {
    "scattered": _scattered,
    "fully-masked": _fully_masked,
    "lower-right": _lower_right,
    "padding": _padding,
    "left-padding": _left_padding,
}


# -- The ONNX formula in NumPy: exactly, in the precision under test, and as it could be misrea ----

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
    """What ONNX says."""
    return Reading(mask=trial.arrays.get("mask"), causal=UPPER_LEFT if trial.case.is_causal else NOWHERE)


def exact_result(trial: Trial, reading: Reading | None = None) -> np.ndarray:
    """The result in float64, heads apart: [B, Hq, S, D]."""
    return _formula(trial, reading or reading_as_written(trial), np.dtype(np.float64), lambda x: x)


def rounded_result(trial: Trial) -> np.ndarray:
    """The result of a plain implementation in the trial's precision: float32 sums, every step rounded."""
    half = trial.precision.numpy
    result = _formula(
        trial, reading_as_written(trial), np.dtype(np.float32), lambda x: x.astype(half).astype(x.dtype)
    )
    return result.astype(half)


def averaged_result(trial: Trial) -> np.ndarray:
    """What every query gets where no key counts more than another: [B, Hq, 1, D], in float64."""
    return _heads(trial, "v", np.dtype(np.float64), interleaved=False).mean(axis=2, keepdims=True)


def fully_masked_queries(trial: Trial) -> np.ndarray:
    """Which queries see no key: [B, Hq, S]."""
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
    return step(step(_softmax(biased)) @ v)


def _heads(trial: Trial, role: str, working: np.dtype, interleaved: bool) -> np.ndarray:
    """Keys or values for each query head."""
    heads, group = split_heads(trial, trial.arrays[role].astype(working)), trial.case.Hq // trial.case.Hkv
    return np.concatenate([heads] * group, axis=1) if interleaved else np.repeat(heads, group, axis=1)


def _bias(trial: Trial, reading: Reading) -> np.ndarray:
    """What is added to the scores, as float64 [B, Hq, S, T]."""
    case, mask = trial.case, reading.mask
    if mask is None:
        mask = np.zeros(1)
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


def _softmax(scores: np.ndarray) -> np.ndarray:
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(top), 0.0, top))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total == 0.0, 1.0, total)


# -- Is an answer what ONNX means, and if not, what was misread? -----------------------------------

Answer = np.ndarray | DeployError
"""What a runtime says to a trial: the output [B, S, Hq·D], or the error with which it refused."""

CONFORMS, WRONG, CELL_REFUSED, ABSENT = "conforms", "wrong", "refused", "absent"
_UNSEEN = "where no key is seen"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """How one runtime treats one case.

    Args:
        status: `conforms`, `wrong`, `refused`, or `absent` where the runtime is not here.
        detail: What is wrong, why it was refused, or what else is worth saying.
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


@dataclass(frozen=True, kw_only=True)
class _Right:
    """A result that ONNX allows, and what it shows of the runtime that gives it."""

    result: np.ndarray
    shows: str = ""


def judge_answer(trial: Trial, answer: Answer) -> Cell:
    """Compare an answer with the oracle, within the budget of a plain implementation's own error."""
    if isinstance(answer, DeployError):
        return Cell(status=CELL_REFUSED, detail=answer.in_one_line)
    problem = _problem_of_form(trial, answer)
    if problem is not None:
        return Cell(status=WRONG, detail=problem)
    got = split_heads(trial, answer.astype(np.float64))
    if not np.isfinite(got).all():
        return Cell(status=WRONG, detail=_not_finite(trial, got))
    rights, budget = _allowed(trial)
    for right in rights:
        deviation = measure(got, right.result)
        if not budget.exceeded_by(deviation):
            share = budget.share_used(deviation)
            return Cell(status=CONFORMS, detail=right.shows, error=deviation.relative_l2, share=share)
    deviation = measure(got, rights[0].result)
    share = budget.share_used(deviation)
    return Cell(status=WRONG, detail=_misread(trial, got, budget), error=deviation.relative_l2, share=share)


def _problem_of_form(trial: Trial, answer: np.ndarray) -> str | None:
    case, dtype = trial.case, trial.precision.numpy
    shape = (case.B, case.S, case.Hq * case.D)
    if answer.shape != shape:
        return f"shape {answer.shape}, not {shape}"
    return f"type {answer.dtype}, not {dtype}" if answer.dtype != dtype else None


# -- what is allowed -------------------------------------------------------------------------------


def _allowed(trial: Trial) -> tuple[list[_Right], Budget]:
    """The results that are right, the exact one first, and how far an answer may be from one."""
    exact, plain = exact_result(trial), rounded_result(trial)
    rights = [_Right(result=exact, shows=UPPER_LEFT if trial.case.diagnostic else "")]
    nearest = exact
    shifted = shifted_queries(trial)
    if shifted.any():
        rights = [_Right(result=exact, shows="keeps the scores under -1e4")]
        swallowed = np.where(shifted[..., None], averaged_result(trial), exact)
        if measure(plain, swallowed).relative_l2 < measure(plain, exact).relative_l2:
            # The formula itself, computed in this precision, adds the scores to -1e4 and loses them.
            rights.append(_Right(result=swallowed, shows="averages all keys under -1e4, by rounding"))
            nearest = swallowed
    return rights, budget_from_eager(plain, nearest, trial.precision)


# -- what went wrong -------------------------------------------------------------------------------


def _not_finite(trial: Trial, got: np.ndarray) -> str:
    bad = ~np.isfinite(got).all(axis=-1)
    word = "NaN" if np.isnan(got).any() else "infinity"
    if not (bad & ~fully_masked_queries(trial)).any():
        return f"gives {word} {_UNSEEN}"
    return f"gives {word} in {int(bad.sum())} of {bad.size} rows"


def _misread(trial: Trial, got: np.ndarray, budget: Budget) -> str:
    """The misreading that explains the answer, else which measures are over the budget."""
    for words, result in _misreadings(trial, got):
        if not budget.exceeded_by(measure(got, result)):
            return words
    return f"out of budget: {', '.join(budget.exceeded_by(measure(got, exact_result(trial))))}"


def _misreadings(trial: Trial, got: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Results of the mistakes that runtimes make, in words."""
    exact, closed, shifted = exact_result(trial), fully_masked_queries(trial), shifted_queries(trial)
    if closed.any():
        yield f"averages all keys {_UNSEEN}", np.where(closed[..., None], averaged_result(trial), exact)
        yield f"not zeros {_UNSEEN}", np.where(closed[..., None], got, exact)
    if shifted.any():
        yield "gives zeros under -1e4", np.where(shifted[..., None], 0.0, exact)
        yield "averages all keys under -1e4", np.where(shifted[..., None], averaged_result(trial), exact)
    for words, reading in _wrong_readings(trial):
        yield words, exact_result(trial, reading)


def _wrong_readings(trial: Trial) -> Iterator[tuple[str, Reading]]:
    case, right, mask = trial.case, reading_as_written(trial), trial.arrays.get("mask")
    if case.is_causal:
        yield "causal starts in the lower right corner", replace(right, causal=LOWER_RIGHT)
        yield "causal is ignored", replace(right, causal=NOWHERE)
        yield "every query sees what the first one sees", replace(right, causal=FIRST_ROW)
    if mask is not None:
        yield "the mask is ignored", replace(right, mask=None)
    if mask is not None and mask.dtype == bool:
        yield "the mask is read upside down", replace(right, mask=~mask)
        yield "the boolean mask is added as 0 and 1", replace(right, mask=mask.astype(np.float64))
    elif mask is not None:
        yield "the additive mask is read as boolean", replace(right, mask=mask != 0)
        yield "only whether the mask is 0 counts", replace(right, mask=mask == 0)
    if case.Hq != case.Hkv:
        yield "query heads use the wrong key heads", replace(right, interleaved=True)


# -- The runtimes of the table, behind one seam: trials in, answers out ----------------------------

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
    """A runtime that runs one case after the other.

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
        target: The target whose rules say beforehand whether it takes a case.
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


# -- The table: one row for each case, one column for each runtime ---------------------------------


@dataclass(frozen=True, kw_only=True)
class ConformanceTable:
    """How every runtime treats every case.

    Args:
        precision: Name of the precision.
        seed: Seed of the inputs.
        rows: The cases.
        columns: The runtimes by name.
        cells: The verdicts, by case name and then by column.
    """

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
        return not any(
            cell.status == WRONG
            for case in self.rows
            if not case.diagnostic
            for cell in self.cells[case.name].values()
        )

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
    columns: Sequence[Column],
    precision: Precision,
    *,
    seed: int = 0,
    cases: Sequence[Case] = CASES,
    on_column: Callable[[str], None] = lambda name: None,
) -> ConformanceTable:
    """Ask every runtime every case, and judge the answers.

    Args:
        columns: The runtimes.
        precision: The precision of the graphs.
        seed: Seed of the inputs.
        cases: The rows.
        on_column: Called with the name of each column before it is run.
    """
    names = tuple(column.name for column in columns)
    if len(set(names)) != len(names):
        raise DeployError("Two columns have the same name.", got=", ".join(names))
    trials = [draw_trial(case, precision, seed) for case in cases]
    cells: dict[str, dict[str, Cell]] = {case.name: {} for case in cases}
    for column in columns:
        on_column(column.name)
        for name, cell in _cells_of(column, trials).items():
            cells[name][column.name] = cell
    return ConformanceTable(
        precision=precision.name, seed=seed, rows=tuple(cases), columns=names, cells=cells
    )


def _cells_of(column: Column, trials: Sequence[Trial]) -> dict[str, Cell]:
    try:
        answers = column.run(trials)
    except BackendUnavailable as error:
        return {trial.case.name: Cell(status=ABSENT, detail=error.in_one_line) for trial in trials}
    return {trial.case.name: judge_answer(trial, answers[trial.case.name]) for trial in trials}


# -- The runtimes of this machine as columns of the table of masks ---------------------------------


def mask_columns(precision: Precision) -> list[Column]:
    """Every runtime of the table, available here or not."""
    return [
        *_torch_columns(),
        runner_column("onnx-reference", partial(open_runner, "onnx-reference"), "onnx"),
        runner_column("ort-cpu", partial(open_runner, "ort-cpu"), "onnx"),
        runner_column("ort-cuda", partial(open_runner, "ort-cuda"), "onnx"),
        _tensorrt_column(precision),
    ]


def _torch_columns() -> list[Column]:
    if not can_import("torch"):
        return [absent_column(name, "PyTorch is not installed") for name in TORCH_PATHS.values()]
    return [torch_column(path, torch_device()) for path in TORCH_PATHS]


TORCH_PATHS = {"plain": "eager", "sdpa": "sdpa"}
"""How the reference layer computes attention, and the name of its column."""


def torch_column(path: str, device: str = "cpu") -> Column:
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
            try:
                answers[case.name] = attention_alone(
                    trial.arrays,
                    Hq=case.Hq,
                    Hkv=case.Hkv,
                    scale=case.scale,
                    causal=case.is_causal,
                    path=path,
                    device=device,
                )
            except DeployError as error:
                answers[case.name] = error
        return answers

    name = TORCH_PATHS[path]
    return RunColumn(name=name if device == "cpu" else f"{name} {device}", run=run)


def _tensorrt_column(precision: Precision) -> Column:
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
