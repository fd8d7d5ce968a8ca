"""From a model to a verdict: export, engine and validation in one call, and the choice among precisions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mha_deploy.bundle.folder import Bundle, open_bundle
from mha_deploy.engine.build import (
    BUILDING,
    Trial,
    engine_from_bundle,
    refitted_engine,
    refuse_fixed_weights,
    run_trials,
)
from mha_deploy.engine.engine import Engine, default_backend, reasons_not_to_run
from mha_deploy.engine.lowered import NATIVE, PLUGIN, candidates_for
from mha_deploy.engine.plugins import PluginError, library_for
from mha_deploy.environment import gpus
from mha_deploy.errors import BackendUnavailable, DeployError
from mha_deploy.exporter.entry import OF_EIGHT_BITS, export_model
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.model.precision import EIGHT_BITS
from mha_deploy.model.source import Model, find_model, is_onnx_file
from mha_deploy.options import AUTO, EngineOptions, ExportOptions, OnStep, ValidateOptions, silent, uncounted
from mha_deploy.output import temporary_folder
from mha_deploy.report.table import Cell, RawRow, Table, number, share_cell, table
from mha_deploy.results import Report
from mha_deploy.runtime.child import isolation
from mha_deploy.runtime.tensorrt.builder import parse_targets
from mha_deploy.runtime.tensorrt.versions import EngineError, NotFusedError, TensorRT, load
from mha_deploy.status import Outcome
from mha_deploy.text import error as error_text
from mha_deploy.validation.run import validate_bundle
from mha_deploy.validation.verdict import Validation

NEAR = 1.05
"""Latencies within this factor of the fastest count as equal; the smaller error decides."""


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """One candidate for the precision and its result."""

    name: str  # the precision, what is quantized, and the accumulation of the plugin where it is used
    precision: str
    refused: str = ""  # why; empty where it is right, or only not verified
    unverified: str = ""  # why nothing shows that it is right; empty where that is shown
    share: float | None = None  # largest share of its error budget
    error: float | None = None  # largest relative L2 error against the FP64 oracle
    loss: float | None = None  # of eight bits
    p50: float | None = None  # of the first point that was timed, µs
    fused: tuple[int, int] | None = None  # attentions that are fused, of how many
    ran: bool = False  # else the errors are those of its graph

    @property
    def unfused(self) -> int:
        """How many attentions are not fused."""
        return 0 if self.fused is None else self.fused[1] - self.fused[0]

    @property
    def cost(self) -> tuple[int, float, float]:
        """What is given up for speed, the gravest first: fused attentions, then loss, then exactness."""
        return self.unfused, self.loss or 0.0, self.error or 0.0

    def beats(self, other: TrialRecord) -> bool:
        """Whether it is nowhere worse than another candidate, and better in something."""
        mine, theirs = ((*each.cost, each.p50 or 0.0) for each in (self, other))
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What `deploy` made.

    Args:
        bundle: The bundle.
        engine: The engine in it; None where none was requested, or it could not be built.
        report: The validation of both.
        candidates: The precisions that were tried, where they were compared.
        chosen: The candidate that was kept.
        why: Why it was chosen.
    """

    bundle: Bundle
    engine: Engine | None
    report: Report
    candidates: tuple[TrialRecord, ...] = ()
    chosen: TrialRecord | None = None
    why: str = ""

    def __repr__(self) -> str:
        return f"<Deployment {self.bundle!r}, {self.engine!r}, {self.report!r}>"

    def candidates_table(self) -> Table | None:
        """The precisions that were tried, as a table; None where none were compared."""
        return None if self.chosen is None else candidates_table(self.candidates, self.chosen)


def deploy_model(
    model: Model,
    out: Path,
    export: ExportOptions,
    engine: EngineOptions | None,
    *,
    inputs: Mapping[str, Any],
    latency: bool | None,
    requirements: Any,
    candidates: bool | None,
    on_step: OnStep,
    on_result: Callable[[Any], None],
) -> Deployment:
    """Export a model, build an engine unless its graph is wrong, and validate both; see `md.deploy`."""
    if candidates and (export.precision not in (AUTO, *EIGHT_BITS) or engine is None):
        what, got = "Candidates are engines in several precisions.", f"precision {export.precision}"
        got += "" if engine else ", no engine"
        raise DeployError(what, got=got, hint=f"precision auto, {' or '.join(EIGHT_BITS)}, with an engine")
    if candidates and export.precision in EIGHT_BITS and not gpus():
        what, hint = "Candidates in eight bits are compared by latency.", "a GPU, or leave candidates out"
        raise BackendUnavailable(what, got="no GPU", hint=hint)
    tried: dict[str, Any] = {}
    if engine is not None:
        _refuse_builder(model, engine, export.precision)
        if candidates is None and export.precision == AUTO:
            candidates = bool(gpus())
        if candidates:
            given: dict[str, Any] = {"inputs": inputs, "latency": latency, "on_step": on_step}
            export, engine, tried = _best_candidate(model, out, export, engine, **given)
    bundle = export_model(model, out, export, inputs, on_step)
    on_result(bundle)
    built: list[Engine] = []

    def build(graph: Any) -> None:
        on_result(graph)
        on_step(BUILDING, 0, 0)
        built.append(engine_from_bundle(bundle, engine, on_step))
        on_result(built[0])

    judged = ValidateOptions(
        latency=latency,
        require_fused=engine is not None and not engine.allow_decomposed,
        require_recorded_types=engine is not None,
        requirements=requirements,
    )
    steps: dict[str, Any] = {"build": build if engine else None, "on_step": uncounted(on_step)}
    report = Report(validate_bundle(bundle, judged, **steps))
    return Deployment(bundle=bundle, engine=next(iter(built), None), report=report, **tried)


def refit_bundle(
    engine: Engine,
    weights: Path,
    out: Path,
    options: ExportOptions,
    *,
    latency: bool | None,
    on_step: OnStep,
) -> Deployment:
    """Export the model of an engine with other weights, and put them into the engine; see `md.refit`."""
    old = open_bundle(engine.path.resolve().parent.parent)
    refuse_fixed_weights(engine)  # before the export
    spec = old.manifest.spec
    options = replace(options, precision=AUTO if spec.mixed else old.manifest.precision.name)
    ranges = {name: str(axis) for name, axis in spec.axes.items()}
    source = spec.source or (str(weights) if is_onnx_file(str(weights)) else None)
    if source is None:
        problem = f"{spec.name} has no factory, so it cannot get other weights."
        raise DeployError(problem, got=weights, hint="--weights model.onnx, the file with other weights")
    if spec.factory:
        isolation.refuse_untrusted(spec.factory)
    model = find_model(source, axes=ranges)
    if model.onnx_file is None:
        options = replace(options, **model.weight_options(weights, options.prefix))
    bundle = export_model(model, out, options, {}, on_step)
    on_step("replace the weights of the engine", 0, 0)
    made = refitted_engine(engine, old, bundle)
    judged = ValidateOptions(latency=latency)
    report = validate_bundle(bundle, judged, on_step=uncounted(on_step))
    return Deployment(bundle=bundle, engine=made, report=Report(report))


def _refuse_builder(model: Model, options: EngineOptions, precision: str) -> None:
    """Raise before an export what would prevent the build after it."""
    parse_targets(options.targets)
    softcap = model.source.softcap if isinstance(model.source, AttentionSpec) else None
    if softcap and not options.allow_decomposed:
        hint = "--allow-decomposed writes it as matmuls: slower, not fused"
        raise NotFusedError("softcap is not supported by any fused kernel.", got=softcap, hint=hint)
    rt = load(options.backend or default_backend())
    if precision == "bf16" and not rt.can.bf16_type:
        what, got, hint = f"{rt.title} has no BF16.", "--precision bf16", "--precision fp16"
        raise EngineError(what, got=got, hint=hint, options=("precision",))
    # In your own model, an attention with a single query may be fused: only its graph shows that.
    is_layer = isinstance(model.source, AttentionSpec) and model.source.axes["S"].max > 1
    if is_layer and precision == "fp32" and options.attention == NATIVE and not options.allow_decomposed:
        problem = f"{rt.title} has no fused kernel for attention in FP32."
        hint = (
            "--precision fp16 or bf16; --allow-decomposed writes it as matmuls: slower, not fused; "
            "--no-engine validates the graph alone"
        )
        raise NotFusedError(problem, got="--precision fp32", hint=hint, options=("precision",))
    # `auto` is FP16 but for what overflows.
    candidates = candidates_for(rt, options, "fp16" if precision in (AUTO, *EIGHT_BITS) else precision)
    if any(candidate.attention == PLUGIN for candidate in candidates):
        library_for(rt.version)


# -- The choice among precisions -------------------------------------------------------------------


def _best_candidate(
    model: Model,
    out: Path,
    export: ExportOptions,
    engine: EngineOptions,
    *,
    inputs: Mapping[str, Any],
    latency: bool | None,
    on_step: OnStep,
) -> tuple[ExportOptions, EngineOptions, dict[str, Any]]:
    """Export, build and judge every candidate: the options of the best one, and all of them."""
    rt = load(engine.backend or default_backend())
    engine = _with_plugin_attention(rt, engine)
    found, options = list[TrialRecord](), dict[str, tuple[ExportOptions, EngineOptions]]()
    with temporary_folder(Path(os.path.realpath(out))) as folder:
        for shown, settings in _exports_to_try(model, rt, export).items():
            precision = settings.precision
            try:
                on_step(f"candidate {shown}", len(found), 0)
                bundle = export_model(model, folder / shown, settings, inputs, silent)
            except DeployError as error:
                found.append(TrialRecord(name=shown, precision=precision, refused=error.in_one_line))
                continue
            trials = list[Trial]()
            for candidate in candidates_for(rt, engine, bundle.manifest.precision.name):
                name = shown if candidate.name == "native" else f"{shown}, {candidate.name}"
                applied = candidate.applied_to(engine)
                options[name] = settings, applied
                trials.append(Trial(name=name, options=replace(applied, name=candidate.name)))

            def build(trial: Trial, bundle: Bundle = bundle) -> Engine:
                on_step(f"candidate {trial.name}", len(found), 0)
                return engine_from_bundle(bundle, trial.options)

            def judge(built: Sequence[Trial], bundle: Bundle = bundle, precision: str = precision) -> None:
                judged = validate_bundle(bundle, ValidateOptions(latency=latency, sweep=False))
                loss = None if bundle.manifest.loss is None else bundle.manifest.loss.worst
                for trial in built:
                    trial.judged = replace(judged_trial(trial, precision, judged), loss=loss)

            run_trials(trials, build, judge, raises=())
            for each in trials:
                refused = TrialRecord(name=each.name, precision=precision, refused=each.refused)
                found.append(each.judged or refused)
    best, why = choose(found)
    return *options[best.name], {"candidates": tuple(found), "chosen": best, "why": why}


def _with_plugin_attention(rt: TensorRT, options: EngineOptions) -> EngineOptions:
    """The plugin's attention as a candidate, too, where its library is here and no other was requested."""
    if options.attention == "native" and options.accumulate == AUTO and rt.can.plugins:
        with suppress(PluginError):  # without the library there are only TensorRT's own kernels
            library_for(rt.version)
            return replace(options, attention=AUTO)
    return options


def _exports_to_try(model: Model, rt: TensorRT, export: ExportOptions) -> dict[str, ExportOptions]:
    """The options of the candidates, by name.

    An ONNX file has its types, and a catalog layer nothing to mix. Eight bits are compared with none: with
    each kind of scales, and with attention in eight bits, too.
    """
    if export.precision in EIGHT_BITS:
        unset: dict[str, Any] = {
            each.name: each.default for each in fields(export) if each.name in OF_EIGHT_BITS
        }
        one_scale = replace(export, weight_scales="tensor", quantize_attention=False)
        return {
            "16 bits": replace(export, precision=AUTO, **unset),
            export.precision: replace(one_scale, weight_scales="channel"),
            f"{export.precision}, one scale": one_scale,
            f"{export.precision}, one scale, attention": replace(one_scale, quantize_attention=True),
        }
    if model.onnx_file is not None:
        return {"mixed": export}
    narrow = ["fp16", "bf16"] if rt.can.bf16_type else ["fp16"]
    tried = {name: replace(export, precision=name) for name in narrow}
    return tried if model.is_layer else {**tried, "mixed": export}


def judged_trial(trial: Trial, precision: str, report: Validation) -> TrialRecord:
    """The result of a candidate whose engine was built, from the validation of its bundle."""
    engine, found = trial.built, report.evaluations
    stem = engine.path.stem
    mine = [each for each in found if each.runtime.engine is not None and each.runtime.name == stem]
    judged, refused, unverified = mine or [each for each in found if each.runtime.engine is None], "", ""
    if not mine and not reasons_not_to_run(engine):
        refused = "the engine fits this machine and did not run"
    elif any(each.outcome is Outcome.FAILED for each in judged):
        refused = "wrong results"
    elif not judged or not all(each.is_right for each in judged):
        unverified = "nothing shows that its results are right"
    rows = [row for point in report.points for row in point.rows if row.name == stem]
    verdicts = [verdict for each in judged for run in each.parity for verdict in run.verdicts]
    errors = [verdict.deviation.relative_l2 for verdict in verdicts if verdict.deviation is not None]
    return TrialRecord(
        name=trial.name,
        precision=precision,
        refused=refused,
        unverified=unverified,
        share=max((each.share for each in judged if each.share is not None), default=None),
        error=max(errors, default=None),
        p50=next((row.timing.p50 for row in rows if row.timing is not None), None),
        fused=engine.manifest.fused_count,
        ran=bool(mine),
    )


def choose(trials: Sequence[TrialRecord]) -> tuple[TrialRecord, str]:
    """The candidate to keep, and why: one that is not verified only where none is right."""
    right = [trial for trial in trials if not trial.refused]
    right = [trial for trial in right if not trial.unverified] or right
    if not right:
        got = "; ".join(f"{trial.name}: {trial.refused}" for trial in trials) or "no candidate"
        hint = "--precision fp32, or `mha-deploy bisect` on one of them"
        raise DeployError("No candidate is right.", got=got, hint=hint)
    quickest = min((trial.p50 for trial in right if trial.p50 is not None), default=None)
    smallest = "smallest loss" if any(trial.loss for trial in right) else "smallest error"
    near, why = right, f"no latency was measured: the most fused, then the {smallest}"
    if quickest is not None:
        near = [trial for trial in right if trial.p50 is not None and trial.p50 <= NEAR * quickest]
        alike = f"the {smallest} of {len(near)} candidates within {NEAR - 1:.0%} of the fastest"
        why = alike if len(near) > 1 else "the fastest"
    return min(near, key=lambda trial: trial.cost), why


def candidates_table(trials: Sequence[TrialRecord], chosen: TrialRecord) -> Table:
    """Every candidate: fusion, error and latency; which are on the Pareto front, and which was chosen."""
    right, lossy = (
        [trial for trial in trials if not (trial.refused or trial.unverified)],
        any(trial.loss for trial in trials),
    )
    rows: list[RawRow] = []
    for trial in trials:
        front = trial in right and not any(other.beats(trial) for other in right)
        status = Cell(text="right", status="good")
        if trial.refused:
            status = Cell(text="refused", status="bad", note=trial.refused)
        elif trial.unverified:
            status = Cell(text="not verified", status="doubt", note=trial.unverified)
        elif not trial.ran:
            status = Cell(text="graph right, not run", status="doubt")
        name = Cell(text=trial.name, status="best" if trial == chosen else "")
        fused = None if trial.fused is None else f"{trial.fused[0]}/{trial.fused[1]}"
        cells = [number(trial.error, error_text), share_cell(trial.share, failed=bool(trial.refused))]
        cells += [number(trial.loss, error_text)] if lossy else []
        why = "yes" if trial == chosen else trial.refused or trial.unverified
        rows.append((name, status, fused, *cells, number(trial.p50), "yes" if front else None, why))
    loss = ("#loss",) if lossy else ()
    figures = ("fused", "#relative L2", "#budget used|used", *loss, "#p50 µs", "Pareto", "chosen")
    return table("Candidates for the precision", ("candidate", "verdict", *figures), rows)
