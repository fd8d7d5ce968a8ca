"""Two results of one model, an old and a new one: what got worse, what got better, what only changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import msgspec
from msgspec import Struct, structs

from mha_deploy.bundle.folder import MANIFEST, Bundle, open_bundle
from mha_deploy.bundle.manifest import LossRecord
from mha_deploy.engine.engine import Engine, engines_of, open_engine
from mha_deploy.errors import BundleError, DeployError, nearest
from mha_deploy.files import as_plain, hint_for_missing, read_json
from mha_deploy.judge import ParityReport
from mha_deploy.model.spec import Axis, axes_from
from mha_deploy.options import Limits
from mha_deploy.output import IsOurs, is_junit, is_page, write_files
from mha_deploy.report import SavableResult
from mha_deploy.report.page import JUnitTest, junit, sections_page
from mha_deploy.report.table import Cell, Group, RawRow, Table, markdown, markdown_text, table
from mha_deploy.runtime.tensorrt.engine_verdict import FusionStatus, PrecisionStatus
from mha_deploy.status import CaseKind, CellStatus, Gap, Kind, Outcome, Variation, Word
from mha_deploy.text import (
    NOTHING,
    budget_share,
    gap_text,
    group_by,
    plural,
    runtime_text,
    short,
    size,
    sizes_text,
    summarize_names,
    types_text,
)
from mha_deploy.validation.conformance import Conformance, ConformanceTable
from mha_deploy.validation.decode import DecodeRecord
from mha_deploy.validation.fp16_range import RangeReport, RangeStatus
from mha_deploy.validation.invariance import InvarianceCheck
from mha_deploy.validation.records import (
    REPORT_FILE,
    REPORT_FORMAT,
    EngineRecord,
    EnvironmentRecord,
    LatencyRecord,
    LatencyRowRecord,
    ModelRecord,
    ServingRecord,
    ThroughputRecord,
    VerdictRecord,
    engine_records,
    model_record,
    report_header,
)
from mha_deploy.validation.subjects import SubjectRecord

# -- What is compared: the sections of a report that a result has, and what a bundle holds ----------


class Contents(Struct, frozen=True, kw_only=True):
    """What a bundle holds."""

    cases: list[str]  # golden cases and traces
    attention: int  # how many attention nodes its graph has
    graph_bytes: int


class ModelResult(Struct, frozen=True, kw_only=True):
    """What is known of one model, from a report, benchmark, bundle, engine or cell of a matrix."""

    name: str
    precision: str
    model: ModelRecord | None = None
    place: str = ""  # of a cell: its runtime, GPU and options
    cell: CellStatus | None = None  # what became of a cell
    contents: Contents | None = None  # of a bundle
    # Sections of reports and benchmarks; None where the result has none
    verdict: VerdictRecord | None = None
    environment: EnvironmentRecord | None = None
    parity: tuple[ParityReport, ...] | None = None
    decode: tuple[DecodeRecord, ...] | None = None
    invariance: tuple[InvarianceCheck, ...] | None = None
    runtimes: dict[str, str] | None = None
    conformance: ConformanceTable | None = None
    range: RangeReport | None = None
    engines: tuple[EngineRecord, ...] | None = None
    subjects: tuple[SubjectRecord, ...] | None = None
    latency: LatencyRecord | None = None
    serving: tuple[ServingRecord, ...] | None = None
    throughput: tuple[ThroughputRecord, ...] | None = None
    loss: LossRecord | None = None

    @property
    def quantized(self) -> str | None:
        """The type of eight bits that its GEMMs are quantized to; None where they are not."""
        return None if self.model is None else self.model.quantized

    @property
    def types(self) -> str:
        """Its precision, with the type that its GEMMs are quantized to."""
        return types_text(self.precision, self.quantized)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a comparison, a result for every model: report, benchmark, bundle, engine or matrix."""

    name: str
    kind: str
    results: tuple[ModelResult, ...]
    created: str = ""


BENCH_FILE, MATRIX_FILE = "bench.json", "matrix.json"
_ACCEPTED = "report.json, bench.json, matrix.json, a bundle's folder, or an .engine file"


def read_side(source: Any) -> Side:
    """Read one side: a path (`matrix.json#NAME` for one runtime), a bundle, an engine, or a report's data."""
    if isinstance(source, Bundle):
        return _from_bundle(source)
    if isinstance(source, Engine):
        manifest, engines = source.manifest, engine_records([source])
        result = ModelResult(name=manifest.model, precision=manifest.precision, engines=engines)
        return Side(name=str(source.path), kind="engine", results=(result,))
    if hasattr(source, "to_dict"):
        source = source.to_dict()
    if isinstance(source, Mapping):
        return _from_data(as_plain(source), "memory", "")
    name, _, runtime = str(source).partition("#")
    path = Path(name)
    if path.is_dir():
        found = [each for each in (MANIFEST, REPORT_FILE, BENCH_FILE, MATRIX_FILE) if (path / each).is_file()]
        if found[:1] == [MANIFEST]:
            return _from_bundle(open_bundle(path))
        if not found:
            raise DeployError("The folder has no result of mha-deploy.", got=path, hint=_ACCEPTED)
        path = path / found[0]
    if path.suffix == ".engine":
        return read_side(open_engine(path))
    try:
        data = read_json(path)
    except FileNotFoundError as failure:
        is_unwritten = path.name == REPORT_FILE and (path.parent / MANIFEST).is_file()
        hint = f"mha-deploy validate {path.parent} writes it, in Python the report's save()"
        hint = hint if is_unwritten else hint_for_missing(path, _ACCEPTED)
        raise DeployError("There is no such file.", got=path, hint=hint) from failure
    except (OSError, ValueError, msgspec.DecodeError, RecursionError) as failure:
        raise DeployError("This cannot be compared.", got=f"{path}: {failure}", hint=_ACCEPTED) from failure
    return _from_data(data, str(source), runtime)


def _from_data(data: Any, name: str, runtime: str) -> Side:
    if isinstance(data, Mapping) and isinstance(data.get("validation"), Mapping):
        data = data["validation"]  # what `deploy --json` prints
    kinds = {"cells": "matrix", "models": "benchmark", "parity": "report"}
    kind = next((kinds[key] for key in kinds if isinstance(data, Mapping) and key in data), None)
    if kind is None:
        raise DeployError("This is not a result of mha-deploy.", got=name, hint=_ACCEPTED)
    if data.get("format", REPORT_FORMAT) != REPORT_FORMAT:
        got, hint = (
            f"{name}: format {data['format']!r}, not {REPORT_FORMAT}",
            "make it again with this version",
        )
        raise DeployError(f"The {kind} was written by another version of this tool.", got=got, hint=hint)
    try:
        found: list[Mapping[str, Any]] = _cells(data["cells"], runtime) if kind == "matrix" else [data]
        if kind == "benchmark":
            found = [{"environment": data.get("environment"), **entry} for entry in data["models"]]
        if kind != "matrix":
            found = [{**each, **{key: each["model"][key] for key in ("name", "precision")}} for each in found]
        results = tuple(_with_shown_status(msgspec.convert(each, ModelResult)) for each in found)
        created = msgspec.convert(data.get("created", ""), str)
    except (msgspec.ValidationError, TypeError, AttributeError, KeyError) as failure:
        problem, hint = f"The {kind} does not follow its format.", "docs/report.md, matrix.md"
        raise DeployError(problem, got=f"{name}: {failure}", hint=hint) from failure
    if runtime and not results:
        known = {str(cell.get("runtime", "")) for cell in data["cells"]} if kind == "matrix" else set[str]()
        raise DeployError("No cell has this runtime.", got=name, hint=nearest(runtime, known))
    return Side(name=name, kind=kind, results=results, created=created)


def _with_shown_status(result: ModelResult) -> ModelResult:
    """A cell of a matrix whose status and outcome are never better than what its report shows."""
    if result.cell is None:
        return result
    parts = [verdict.outcome for run in result.parity or () for verdict in run.verdicts]
    parts += [decoded.outcome for decoded in result.decode or ()]
    # An engine that was not built has no report, and one that was not run has no verdict.
    verdict, shown = result.verdict, Outcome.NOT_VERIFIED if result.engines else Outcome.FAILED
    if verdict is not None:
        verdict = structs.replace(verdict, outcome=Outcome.of([verdict.outcome, *parts]))
        shown = verdict.outcome if result.engines else shown
    stated = result.cell.outcome
    cell = result.cell if Outcome.of([stated, shown]) is stated else CellStatus(shown.value)
    return structs.replace(result, verdict=verdict, cell=cell)


def _cells(cells: Sequence[Mapping[str, Any]], runtime: str) -> list[Mapping[str, Any]]:
    """The cells of a matrix; without the name of the runtime where only one runtime is compared."""
    found: list[Mapping[str, Any]] = []
    for cell in cells:
        if runtime and cell["runtime"] != runtime:
            continue
        places = [] if runtime else [cell["runtime"]]
        places += [each for each in (cell["gpu"], cell["options"]) if each]
        known = {"place": ", ".join(places), "cell": cell["status"], "name": cell["model"]}
        found.append({**(cell["report"] or {}), **known, "precision": cell["precision"]})
    return found


def _from_bundle(bundle: Bundle) -> Side:
    manifest, created = bundle.manifest, ""
    model, found = model_record(bundle), dict[str, Any]()
    ran: dict[tuple[Any, ...], bool] = {}

    def identity(engine: EngineRecord) -> tuple[Any, ...]:
        return engine.name, engine.engine_bytes, engine.seconds

    for path in (bundle.path / BENCH_FILE, bundle.path / REPORT_FILE):
        for side in [read_side(path)] if path.is_file() else []:
            # A report of an earlier bundle in this folder says nothing on this one.
            for earlier in side.results:
                if earlier.model is None or earlier.model.bundle_sha256 != model.bundle_sha256:
                    continue
                found |= {key: part for key, part in msgspec.structs.asdict(earlier).items() if part}
                ran |= {identity(each): each.ran for each in earlier.engines or ()}
                created = side.created
    found["engines"] = tuple(  # one that was built again after the report did not run
        structs.replace(each, ran=ran.get(identity(each), False))
        for each in engine_records(engines_of(bundle.path))
    )
    cases = [f"golden case {case.name}" for case in manifest.golden]
    found["contents"] = Contents(
        cases=[*cases, *(f"trace {trace.name}" for trace in manifest.traces)],
        attention=len(manifest.attention),
        graph_bytes=sum(entry.bytes for name, entry in manifest.files.items() if "model.onnx" in name),
    )
    found.setdefault("loss", manifest.loss)  # that of the report has the limit that it was judged by
    about = {"model": model, "name": model.name, "precision": model.precision}
    result = ModelResult(**{**found, **about})
    return Side(name=str(bundle.path), kind="bundle", results=(result,), created=created)


# -- Measurements: everything that is compared, each under a key that both sides share -------------

SECTIONS = (
    "verdict", "coverage", "fusion", "precision", "error", "decode", "loss", "invariance", "conformance",
    "range", "latency", "size", "build time", "environment",
)  # fmt: skip


class Level(Word):
    """What a change means."""

    REGRESSION = "regression"
    NOT_COMPARABLE = "not comparable"  # both were measured, but not of the same thing
    INCONCLUSIVE = "inconclusive"  # worse, and it may be noise
    CHANGED = "changed"
    IMPROVEMENT = "improvement"
    SAME = "same"


REGRESSION, NOT_COMPARABLE, INCONCLUSIVE, CHANGED, IMPROVEMENT, SAME = Level

# Statuses by rank: what falls is worse.
_RANKS: Mapping[str, Mapping[str, int]] = {
    "verdict": {
        CellStatus.PASSED: 3,
        CellStatus.NOT_VERIFIED: 2,
        CellStatus.FAILED: 1,
        CellStatus.REFUSED: 1,
        CellStatus.CRASHED: 0,
        CellStatus.UNAVAILABLE: 0,
    },
    "fusion": {FusionStatus.FUSED: 2, FusionStatus.UNKNOWN: 1, FusionStatus.DECOMPOSED: 0},
    "precision": {
        PrecisionStatus.VERIFIED: 3,
        PrecisionStatus.SELECTED_AT_LOAD: 2,
        PrecisionStatus.UNKNOWN: 1,
        PrecisionStatus.MIXED: 0,
    },
    "conformance": {
        Conformance.CONFORMS: 2,
        Conformance.REFUSED: 1,
        Conformance.ABSENT: 1,
        Conformance.WRONG: 0,
    },
    "range": {RangeStatus.OK: 2, RangeStatus.NEAR: 1, RangeStatus.OVERFLOWS: 0},
    "coverage": {"ran": 1, "not run": 0},
}
# What ranks higher by less evidence alone is no improvement.
_LESS_KNOWN: Collection[tuple[str, str]] = {
    (Outcome.FAILED, Outcome.NOT_VERIFIED),
    (FusionStatus.DECOMPOSED, FusionStatus.UNKNOWN),
    (PrecisionStatus.MIXED, PrecisionStatus.UNKNOWN),
    (Conformance.WRONG, Conformance.ABSENT),
}
# What an error may grow by, in shares of the budget; between different weights it differs by more by chance,
# most of all for an output of few numbers.
_ERROR_GROWTH, _OF_OTHER_WEIGHTS = 0.1, 0.5
# A median that grew by this share of the old one is never the same, whatever the spread.
_LARGE = 0.5
# How many times the limit a tail may grow before it is inconclusive, and before it is a regression: p99 of
# 200 samples is the second largest of them.
_TAILS = {"p90": (1.0, 5.0), "p99": (5.0, 10.0)}
# Sections in which a missing figure is no less coverage: a model that is not compressed has no loss.
_FIGURES = ("environment", "size", "build time", "loss")


@dataclass(frozen=True)
class Measurement:
    """One thing that is compared."""

    kind: str  # `status`, `share`, `loss`, `growth`, `tail`, `sizes`, `counts` by name, `range` or `text`
    owner: str  # its runtime or engine; one that is missing as a whole is reported once
    value: Any
    shown: str
    noise: float = 0.0  # how much it varies between rebuilds or samples, in its own unit
    outcome: Outcome = Outcome.PASSED  # of a share
    sizes: Mapping[str, int] = field(default_factory=dict)  # what a share was measured at
    errors: Mapping[str, float] = field(default_factory=dict)  # of a share: what was measured, by name
    budget: Mapping[str, float] = field(default_factory=dict)  # of a share: the limits of these
    limit: float | None = None  # of a loss
    doubt: str = ""  # why the value is not reliable; of a status: the kernels behind it
    cases: str = ""  # the kind of cases that it was measured on, or what was varied in them


@dataclass(frozen=True)
class Change:
    """One row of a comparison: `section` is one of `SECTIONS`, `why` is what the `level` follows from."""

    section: str
    subject: str
    level: Level
    old: str
    new: str
    why: str = ""
    model: str = ""


Measurements = dict[tuple[str, str], Measurement]  # by section and subject
Measured = Iterator[tuple[str, str, Measurement]]


@dataclass(frozen=True, kw_only=True)
class _Owners:
    """What the results of one side belong to: a runtime, or an engine where a side has several of one."""

    titles: Mapping[str, str]  # of runtimes, without their versions, which an upgrade changes
    names: Mapping[str, str]  # of engines on the other side
    several: frozenset[str]  # the titles of runtimes of which several engines were judged

    def engine(self, name: str) -> str:
        """The name of an engine on the other side, if it is known by another one there."""
        return self.names.get(name, name)

    def title(self, runtime: str) -> str:
        """The name of a runtime without its version."""
        return self.titles.get(runtime, runtime)

    def of(self, result: _OfRuntime) -> str:
        """The owner of a result: two engines of one TensorRT differ by name only."""
        title, engine = self.title(result.runtime), result.engine and self.engine(result.engine)
        if engine is None or title not in self.several or engine == title:
            return runtime_text(title, getattr(result, "clients", None))  # a server has no engine here
        return f"{engine} ({title})"


class _OfRuntime(Protocol):
    """What a report has for every runtime and engine."""

    @property
    def runtime(self) -> str: ...
    @property
    def engine(self) -> str | None: ...


def _judged(result: ModelResult) -> tuple[_OfRuntime, ...]:
    return *(result.parity or ()), *(result.decode or ()), *(result.invariance or ())


def _owners(old: ModelResult, new: ModelResult, names: Mapping[str, str]) -> tuple[_Owners, _Owners]:
    """Those of both sides; `names` are the old ones of the new engines."""
    sides, engines = [], dict[str, set[str]]()
    for result, renamed in ((old, {}), (new, names)):
        side = _Owners(titles=result.runtimes or {}, names=renamed, several=frozenset())
        for each in _judged(result):
            if each.engine is not None:
                engines.setdefault(side.title(each.runtime), set()).add(side.engine(each.engine))
        sides.append(side)
    several = frozenset(title for title, found in engines.items() if len(found) > 1)
    one, two = (replace(side, several=several) for side in sides)
    return one, two


def measurements(result: ModelResult, owners: _Owners) -> Measurements:
    """Everything of a result that can be compared."""
    found: Measurements = {}
    for section, subject, item in _measure(result, owners):
        key, count = (section, subject), 1
        while key in found:  # two files that were judged in one runtime have the same name in a report
            count += 1
            key = (section, f"{subject} ({count})")
        found[key] = item
    return found


def _measure(result: ModelResult, owners: _Owners) -> Measured:
    engines, names = result.engines or (), owners.names
    rebuilds = {each.name: each.rebuilds for each in engines}
    yield from _measure_verdict(result)
    yield from _measure_errors(result, owners, rebuilds)
    yield from _measure_decoding(result, owners)
    if result.loss is not None:
        loss = result.loss.worst
        item = Measurement("loss", _MODEL, loss, f"{loss:.2g}", limit=result.loss.limit)
        yield "loss", "loss", item
    yield from _measure_checks(result, owners)
    for engine in engines:
        yield from _measure_engine(engine, owners.engine(engine.name))
    yield from _measure_latency(result, names, rebuilds)
    yield from _measure_load(result, names)
    yield from _measure_contents(result)
    for subject, value in _environment(result, owners):
        if value:
            yield "environment", subject, _as_measurement("text", "", value)
    for attribute, value in _spec(result).items():
        if attribute != "axes" and (shown := _words(value)):
            yield "environment", f"model: {attribute}", _as_measurement("text", _MODEL, shown)


def _measure_verdict(result: ModelResult) -> Measured:
    if result.cell:
        yield "verdict", "cell", _as_measurement("status", "", result.cell)
    if result.verdict:
        yield "verdict", "validation", _as_measurement("status", "", result.verdict.outcome)


def _measure_errors(result: ModelResult, owners: _Owners, rebuilds: Mapping[str, Any]) -> Measured:
    """The error of every output, and the sizes that it was measured at."""
    for run in result.parity or ():
        owner, of_engine = owners.of(run), rebuilds.get(run.engine or "")
        for each in run.verdicts or ():
            noise = _rebuild_span(of_engine, "errors", each.case, each.output)
            share = replace(_share(owner, each, noise), cases=run.cases)
            yield "error", f"{owner}, {run.cases}: {each.case}/{each.output}", share
        for case, sizes in {each.case: each.sizes for each in run.verdicts or () if each.sizes}.items():
            extent = Measurement("sizes", owner, sizes, sizes_text(sizes), cases=run.cases)
            yield "coverage", f"{owner}, {run.cases}: sizes of {case}", extent


def _measure_decoding(result: ModelResult, owners: _Owners) -> Measured:
    for decoded in result.decode or ():
        owner = owners.of(decoded)
        trace = f"{owner}: {decoded.trace}"
        yield "decode", trace, _share(owner, decoded)
        yield "coverage", f"{trace}, decode steps", _count(owner, decoded.steps)
        prompt = decoded.prompt or ()
        tokens = {"longest": max(prompt, default=0), "all": sum(prompt)}
        shown = f"{tokens['all']}, {tokens['longest']} in the longest"
        yield "coverage", f"{trace}, tokens of prompts", Measurement("counts", owner, tokens, shown)


# What tells the checks of one case apart, besides the batch size.
_VARIED = {
    Variation.SLOTS: ", other slots",
    Variation.NEIGHBORS: ", other neighbors",
    Variation.BATCH: ",",
    Variation.PROFILES: "",
}


def _measure_checks(result: ModelResult, owners: _Owners) -> Measured:
    """Batch invariance, the semantics of masks, and the range of FP16."""
    for check in result.invariance or ():
        if check.variation is not None:  # else there was nothing to measure
            owner, sizes = owners.of(check), {} if check.batch is None else {"batch": check.batch}
            subject = f"{owner}: {check.check} {check.case}{_VARIED[check.variation]}"
            subject += "" if check.other_batch is None else f" {check.other_batch}"
            share = replace(_share(owner, check), sizes=sizes, cases=check.variation)
            yield "invariance", subject, share
    for mask in result.conformance.rows if result.conformance else ():
        for owner, cell in () if mask.diagnostic else mask.cells.items():
            yield "conformance", f"{owner}: {mask.case}", _as_measurement("status", owner, cell.status)
    for node in result.range.nodes if result.range else ():
        yield "range", node.node or "", _as_measurement("status", "FP16 range", node.status)


def _measure_latency(result: ModelResult, names: Mapping[str, str], rebuilds: Mapping[str, Any]) -> Measured:
    for point in result.latency.points if result.latency else ():
        place = sizes_text(point.sizes) + ("" if point.past is None else f", past {point.past}")
        for row in point.rows:
            name = names.get(row.name, row.name)
            noise = _rebuild_span(rebuilds.get(row.name), "times_us", point.case)
            yield "latency", f"{name} at {place}", _time(name, row, noise)
            yield from (("latency", f"{name} at {place}, {tail}", each) for tail, each in _tails(name, row))
            if row.timing is not None and row.timing.memory_bytes:
                yield "size", f"{name} at {place}, memory", _bytes(name, row.timing.memory_bytes)


def _measure_contents(result: ModelResult) -> Measured:
    """What is in a bundle, and the ranges of its axes."""
    if result.contents:
        for case in result.contents.cases:
            yield "coverage", case, Measurement("text", "bundle", case, "present")
        yield "fusion", "attention nodes in the graph", _count("bundle", result.contents.attention)
        yield "size", "graph", _bytes("bundle", result.contents.graph_bytes)
    axes = _spec(result).get("axes")
    for axis, sizes in (axes if isinstance(axes, dict) else {}).items():
        shown = ":".join(map(str, sizes.values())) if isinstance(sizes, dict) else str(sizes)
        yield "coverage", f"axis {axis}", _range(_MODEL, shown, partial(_axis, axis, sizes))


def _measure_load(result: ModelResult, names: Mapping[str, str]) -> Measured:
    """Requests of many clients to a server, and calls on several streams."""
    for load in result.serving or ():
        owner, place = "server", f"server, {plural(load.clients, 'client')}"
        answered, share = f"{load.answered} of {load.requests}", load.answered / max(load.requests, 1)
        yield "error", f"{place}: answers", _count(owner, share, answered)
        yield "coverage", f"{place}: requests", _count(owner, load.requests)
        yield "error", f"{place}: wrong", _count(owner, -load.wrong, str(load.wrong))
        if load.p50_ms is not None:
            shown, spread = f"{short(load.p50_ms)} ms", (load.p90_ms or load.p50_ms) - load.p50_ms
            waited = Measurement("growth", owner, 1e3 * load.p50_ms, shown, noise=1e3 * spread)
            yield "latency", place, waited
    for calls in result.throughput or ():
        owner = names.get(calls.name, calls.name)
        place = f"{owner} at {sizes_text(calls.sizes)}, {plural(calls.streams or 1, 'stream')}"
        shown = f"{short(calls.per_second)} calls/s" if calls.per_second else "not timed"
        each_us = 1e6 / calls.per_second if calls.per_second else None
        yield "latency", place, Measurement("growth", owner, each_us, shown)


def _measure_engine(engine: EngineRecord, name: str) -> Measured:
    owner = f"engine {name}"
    for node in engine.nodes or ():
        profile = "" if node.profile is None else f", profile {node.profile}"
        fusion = replace(_as_measurement("status", owner, node.status), doubt="\n".join(node.kernels or ()))
        yield "fusion", f"{name}: {node.node or ''}{profile}", fusion
    if engine.fused:
        yield "fusion", f"{name}: attentions that are fused", _count(owner, engine.fused[0])
        others = engine.fused[-1] - engine.fused[0]
        yield "fusion", f"{name}: attentions that are not fused", _count(owner, -others, str(others))
    yield "precision", f"{name}: verified", _as_measurement("status", owner, engine.precision_status)
    yield "precision", f"{name}: requested", _as_measurement("text", owner, engine.precision)
    yield "coverage", f"{name}: run", _as_measurement("status", owner, "ran" if engine.ran else "not run")
    for index, ranges in enumerate(engine.profiles or ()):
        for axis, span in ranges.items():
            read = partial(Axis.parse, span, name=axis)
            yield "coverage", f"{name}: profile {index}, axis {axis}", _range(owner, span, read)
    if engine.engine_bytes is not None:
        noise = _rebuild_span(engine.rebuilds, "engine_bytes")
        yield "size", f"{name}: engine", _bytes(owner, engine.engine_bytes, noise)
    if engine.seconds is not None:
        shown, noise = f"{short(engine.seconds)} s", _rebuild_span(engine.rebuilds, "seconds")
        yield "build time", name, Measurement("growth", owner, engine.seconds, shown, noise)


_MODEL = "model"  # the owner of its attributes


def _environment(result: ModelResult, owners: _Owners) -> Iterator[tuple[str, str]]:
    yield "weights", result.model.weights if result.model else ""
    yield "bundle", result.model.bundle_sha256[:12] if result.model else ""
    if (loss := result.loss) is not None:
        yield "loss: limit", "none" if loss.limit is None else f"{loss.limit:g}"
        held_out = ", held out from calibration" if loss.held_out else ""
        yield "loss: measured on", f"{plural(loss.samples, 'sample')} of {loss.data}{held_out}"
    for engine in result.engines or ():
        name = owners.engine(engine.name)
        yield f"{name}: built by", f"{engine.backend} {engine.version}"
        yield f"{name}: attention", engine.attention or ""
        yield f"{name}: plugins", ", ".join(engine.plugins or ())
    # A budget for accumulation in FP16 is wider: the same error is then judged less strictly.
    kinds = {owners.of(run): run.accumulation.type for run in result.parity or ()}
    for owner, kind in kinds.items():
        yield f"{owner}: accumulates in", kind
    here = result.environment
    if here is not None:
        yield "GPU", here.gpu.name if here.gpu else "none"
        yield "driver", here.driver or "none"
        yield "platform", here.platform or ""
        yield from (here.versions or {}).items()


def _spec(result: ModelResult) -> Mapping[str, Any]:
    return result.model.spec if result.model else {}


def _as_measurement(kind: str, owner: str, value: Any) -> Measurement:
    return Measurement(kind, owner, value, str(value))


def _count(owner: str, count: float, shown: str = "") -> Measurement:
    """A number of which more is better."""
    return Measurement("counts", owner, {"": count}, shown or str(count))


def _axis(name: str, sizes: Any) -> Axis:
    """An axis as a specification has it."""
    return axes_from({name: sizes})[name]


def _range(owner: str, shown: str, read: Callable[[], Axis]) -> Measurement:
    """The range of an axis; its value is None where it cannot be read."""
    try:
        return Measurement("range", owner, read(), shown)
    except DeployError:
        return Measurement("range", owner, None, shown)


def _bytes(owner: str, count: int, noise: float = 0.0) -> Measurement:
    return Measurement("growth", owner, count, size(count), noise)


def _share(owner: str, found: Any, noise: float = 0.0) -> Measurement:
    """The largest share of the budget that a result uses: the recorded one, or that of its errors."""
    deviation, budget = getattr(found, "deviation", None), getattr(found, "budget", None) or {}
    errors, limits = (
        {key: n for key, n in each.items() if isinstance(n, int | float) and n > 0}
        for each in ({} if deviation is None else vars(deviation), budget)
    )
    shares = [found.share, *(errors[key] / limits[key] for key in limits if key in errors)]
    used = max((share for share in shares if share is not None), default=None)
    return Measurement(
        "share",
        owner,
        used,
        _used_text(used, found.outcome),
        noise,
        found.outcome,
        errors=errors,
        budget=limits,
        sizes=getattr(found, "sizes", None) or {},
    )


def _used_text(used: float | None, outcome: Outcome, of: str = "") -> str:
    text = "no finite number" if used is None else f"{budget_share(used)}{of}"
    return {Outcome.FAILED: f"wrong ({text})", Outcome.NOT_VERIFIED: "not verified"}.get(outcome, text)


def _time(owner: str, row: LatencyRowRecord, rebuild_noise: float) -> Measurement:
    timing = row.timing
    if timing is None:
        return Measurement("growth", owner, None, f"not timed: {row.refused or 'no reason was given'}")
    throttled = ", ".join((timing.conditions and timing.conditions.throttled_by) or ())
    doubts = [f"throttled by {throttled}"] if throttled else []
    doubts += ["the time did not settle"] if timing.stable is False else []
    noise = max(timing.p90_us - timing.p50_us, rebuild_noise)
    shown = f"{short(timing.p50_us)} µs{', no CUDA graph' if timing.graph is False else ''}"
    return Measurement("growth", owner, timing.p50_us, shown, noise, doubt="; ".join(doubts))


def _tails(owner: str, row: LatencyRowRecord) -> Iterator[tuple[str, Measurement]]:
    """p90 and p99, each with the spread of the samples above p90."""
    timing = row.timing
    if timing is not None:
        spread = (timing.p99_us or timing.p90_us) - timing.p90_us
        for tail in _TAILS:
            if (value := getattr(timing, f"{tail}_us")) is not None:
                kind: dict[str, Any] = {"noise": spread, "doubt": _time(owner, row, 0.0).doubt or ""}
                values = tail, value, timing.p50_us
                yield tail, Measurement("tail", owner, values, f"{short(value)} µs", **kind)


def _rebuild_span(rebuilds: Any, figure: str, *of: str) -> float:
    """How much a figure of an engine, or that of one case or output, differs from build to build."""
    found = getattr(rebuilds, figure, None) or ()
    for name in of:
        found = found.get(name, ()) if found else ()
    values = [value for value in found if value is not None]
    return max(values) - min(values) if values else 0.0


# -- The rules -------------------------------------------------------------------------------------


def _judge(
    section: str, old: Measurement, new: Measurement, limits: Limits, are_other_weights: bool = False
) -> tuple[Level, str]:
    """The level of a change, and why."""
    if old.kind == "share":
        return _judge_share(old, new, limits, are_other_weights)
    if old.kind == "loss":
        return _judge_loss(old, new, limits)
    if old.kind == "tail":
        return _judge_tail(old, new, limits)
    if old.kind == "sizes":
        return (SAME, "") if old.value == new.value else (NOT_COMPARABLE, "other sizes")
    if old.kind == "growth":
        return _judge_growth(section, old, new, limits)
    if old.kind == "counts":  # one of them that is smaller is not made up for by another
        levels = {_direction(count, new.value.get(name, 0)) for name, count in old.value.items()}
        return next((level for level in (REGRESSION, IMPROVEMENT) if level in levels), SAME), ""
    if old.kind == "status":
        level = _direction(*(_RANKS[section].get(each.value, 1) for each in (old, new)))
        if level == IMPROVEMENT and (old.value, new.value) in _LESS_KNOWN:
            return CHANGED, "not known now"
        if level == SAME and old.doubt != new.doubt:
            return CHANGED, "other kernels"
        return level, "fusion lost" if level == REGRESSION and section == "fusion" else ""
    if old.kind == "range":
        return _judge_range(old, new)
    if old.value == new.value:
        return SAME, ""
    return (REGRESSION, "another precision was requested") if section == "precision" else (CHANGED, "")


def _judge_alone(section: str, new: Measurement) -> tuple[Level, str]:
    """The level of something that only the new side has: good where it is right, else a regression."""
    if section in _FIGURES or new.kind in ("text", "tail") or (section == "latency" and new.value is None):
        return CHANGED, "new"
    is_worst = new.kind == "status" and section != "coverage" and _RANKS[section].get(new.value) == 0
    has_failed = section == "verdict" and new.value == Outcome.FAILED
    if new.outcome is not Outcome.PASSED or is_worst or has_failed:
        return REGRESSION, "new, and not right"
    if new.kind == "status" and _RANKS[section].get(new.value) != max(_RANKS[section].values()):
        return CHANGED, "new"
    return IMPROVEMENT, "new"


def _direction(old: float, new: float) -> Level:
    return SAME if new == old else IMPROVEMENT if new > old else REGRESSION


def _under_old_budget(old: Measurement, new: Measurement) -> Measurement:
    """The new share as one of the old budget: with a wider one, a larger error takes a smaller share.

    Of other sizes, or with another outcome, it stays that of the budget that it was judged by.
    """
    shared = old.budget.keys() & new.errors.keys() if old.budget != new.budget else ()
    if (old.outcome, old.sizes) != (new.outcome, new.sizes) or new.value is None or not shared:
        return new
    # Errors of slices are in units of the rounding there: of two precisions, these are no common units.
    plain = [key for key in shared if not key.startswith("local")]
    ratios = [new.budget.get(key, 0.0) / old.budget[key] for key in plain if old.budget[key]]
    if plain and not all(0.5 < ratio < 2.0 for ratio in ratios):
        shared = set(plain)
    used = max(new.errors[key] / old.budget[key] for key in shared)
    return replace(new, value=used, shown=_used_text(used, new.outcome, " of the old budget"))


def _judge_share(
    old: Measurement, new: Measurement, limits: Limits, are_other_weights: bool
) -> tuple[Level, str]:
    if old.sizes != new.sizes and new.outcome is old.outcome:
        return NOT_COMPARABLE, "other sizes"
    if old.outcome is not new.outcome:
        what = {Outcome.FAILED: "out of budget", Outcome.NOT_VERIFIED: "no longer verified"}
        level = _direction(*(_RANKS["verdict"][each.outcome] for each in (old, new)))
        if (old.outcome, new.outcome) in _LESS_KNOWN:
            return CHANGED, "not known now"
        return level, what[new.outcome] if level is REGRESSION else ""
    if bool(old.errors) != bool(new.errors):
        return (IMPROVEMENT, "") if new.errors else (REGRESSION, "no error was measured")
    if old.value is None or new.value is None:
        return (SAME, "") if old.value is None else (CHANGED, "no error was measured")
    growth, noise = new.value - old.value, max(old.noise, new.noise)
    most = _ERROR_GROWTH if limits.error is None else limits.error
    if abs(growth) <= max(most, noise):
        return SAME, f"within the {budget_share(noise)} of rebuilds" if growth > most else ""
    if are_other_weights and limits.error is None and abs(growth) <= _OF_OTHER_WEIGHTS:
        return CHANGED, "other weights"
    return (IMPROVEMENT, "") if growth < 0 else (REGRESSION, f"grown by {budget_share(growth)} of the budget")


def _judge_loss(old: Measurement, new: Measurement, limits: Limits) -> tuple[Level, str]:
    """The loss is intended: its growth is worse only beyond the limit that the user gave the old side."""
    growth, limit = new.value - old.value, old.limit
    is_beyond = limit is not None and new.value > limit
    why = f"over the old limit of {limit:g}" if is_beyond else ""
    if limit is not None and old.value <= limit < new.value:
        return REGRESSION, why
    most = _ERROR_GROWTH if limits.error is None else limits.error
    if abs(growth) <= most * (old.value if limit is None else limit):
        return SAME, ""
    return (IMPROVEMENT, "") if growth < 0 else (REGRESSION if is_beyond else CHANGED, why)


def _judge_growth(section: str, old: Measurement, new: Measurement, limits: Limits) -> tuple[Level, str]:
    """A latency, a size or a build time: beyond its limit, and beyond what varies by itself."""
    if old.value is None or new.value is None:
        return _direction(old.value is not None, new.value is not None), ""
    growth, noise = new.value - old.value, max(old.noise, new.noise)
    share = {"latency": limits.latency, "build time": limits.build_time}.get(section, limits.size)
    least = share * min(old.value, new.value)
    if section == "build time":
        least = max(least, limits.build_seconds)
    is_large = section == "latency" and growth > _LARGE * old.value
    if section == "latency" and not is_large and max(least, old.noise) < growth <= new.noise:
        return INCONCLUSIVE, f"only within its new spread of {short(new.noise)} µs"
    if is_large and growth <= old.noise:
        return INCONCLUSIVE, f"within the old spread of {short(old.noise)} µs, but large"
    if not is_large and abs(growth) <= max(least, noise):
        is_noisy = section == "latency" and growth > least
        return SAME, f"within the measured spread of {short(noise)} µs" if is_noisy else ""
    ratio = new.value / old.value if old.value else float("inf")
    why = f"{ratio:.2f} times the old {'latency' if section == 'latency' else 'one'}"
    if growth < 0:
        return IMPROVEMENT, why
    doubts = [f"{name}: {each.doubt}" for name, each in (("old", old), ("new", new)) if each.doubt]
    return (INCONCLUSIVE, f"{why}; {'; '.join(doubts)}") if doubts else (REGRESSION, why)


def _judge_tail(old: Measurement, new: Measurement, limits: Limits) -> tuple[Level, str]:
    """A tail of the samples: it varies more than their median, which is judged alone where it changed."""
    (tail, before, middle), (_, after, new_middle) = old.value, new.value
    if abs(new_middle - middle) > limits.latency * min(middle, new_middle):
        return SAME, ""
    growth = after - before
    unclear, worse = (factor * limits.latency * before for factor in _TAILS[tail])
    # The spread of the larger side contains what it grew by: it explains nothing.
    if abs(growth) <= max(unclear, old.noise if growth > 0 else new.noise):
        return SAME, ""
    why = f"{after / before:.2f} times the old {tail}"
    if growth < 0:
        return IMPROVEMENT, why
    doubts = "; ".join(each.doubt for each in (old, new) if each.doubt)
    return (INCONCLUSIVE, f"{why}; {doubts}".strip("; ")) if doubts or growth <= worse else (REGRESSION, why)


def _judge_range(old: Measurement, new: Measurement) -> tuple[Level, str]:
    before, after = old.value, new.value
    if before == after and old.shown == new.shown:
        return SAME, ""
    if before is None or after is None:
        level = _direction(before is not None, after is not None)
        return (CHANGED, "") if level == SAME else (level, "no range" if level == REGRESSION else "")
    if after.min > before.min or after.max < before.max:
        return REGRESSION, "a narrower range"
    return (IMPROVEMENT if (after.min, after.max) != (before.min, before.max) else CHANGED), ""


# -- The comparison --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Comparison(SavableResult):
    """What changed between two sides; `changes` has everything that was compared, what is the same too."""

    old: Side
    new: Side
    changes: tuple[Change, ...]
    limits: Limits = field(default_factory=Limits)

    @property
    def regressions(self) -> tuple[Change, ...]:
        """What got worse; with `strict` also what is inconclusive."""
        worse = (REGRESSION, INCONCLUSIVE) if self.limits.strict else (REGRESSION,)
        return tuple(change for change in self.changes if change.level in worse)

    @property
    def not_comparable(self) -> tuple[Change, ...]:
        """What was measured on both sides, but not of the same model, precision, sizes or GPU."""
        return tuple(change for change in self.changes if change.level is NOT_COMPARABLE)

    @property
    def unlike(self) -> frozenset[str]:
        """The names under which two different models were compared."""
        found = (each for each in self.not_comparable if each.section == "environment")
        return frozenset(each.model for each in found if each.subject == "model")

    @property
    def outcome(self) -> Outcome:
        """Failed where something got worse; not verified where something cannot be measured or compared."""
        if self.regressions:
            return Outcome.FAILED
        unclear = any(change.level in (NOT_COMPARABLE, INCONCLUSIVE) for change in self.changes)
        return Outcome.NOT_VERIFIED if unclear or not self.changes else Outcome.PASSED

    @property
    def passed(self) -> bool:
        """Whether everything could be compared, and nothing got worse."""
        return self.outcome is Outcome.PASSED

    @property
    def headline(self) -> str:
        """The result in one line."""
        counts = {level: sum(change.level == level for change in self.changes) for level in _LEVELS}
        words = [plural(counts[REGRESSION], "regression") if counts[REGRESSION] else "no regression"]
        if found := [change for change in self.not_comparable if change.section == "environment"]:
            others = dict.fromkeys(f"another {each.subject} ({each.old} → {each.new})" for each in found)
            words.insert(0, f"not comparable: {', '.join(others)}")
        elif counts[NOT_COMPARABLE]:
            words.insert(0, f"{counts[NOT_COMPARABLE]} not comparable (other sizes)")
        words += [f"{counts[level]} {level}" for level in (INCONCLUSIVE, CHANGED) if counts[level]]
        words += [plural(counts[IMPROVEMENT], "improvement")] if counts[IMPROVEMENT] else []
        return ", ".join([*words, f"{counts[SAME]} the same"])

    def __repr__(self) -> str:
        return f"<Comparison {self.outcome}: {self.headline}>"

    def _stored(self) -> dict[str, Any]:
        """See docs/compare.md."""
        data = {**report_header(), "outcome": self.outcome, "headline": self.headline}
        del data["environment"]
        for key, side in (("old", self.old), ("new", self.new)):
            data[key] = {"name": side.name, "kind": side.kind, "created": side.created}
        changes = [vars(change) for change in self.changes]
        return {**data, "limits": vars(self.limits), "changes": changes}

    def table(self, *, everything: bool = False) -> Table:
        """What changed, regressions before everything; with `everything` also what is the same.

        What makes the two sides incomparable comes even before those: regressions may follow from it.
        Of two models, what else differs is listed only with `everything`.
        """
        several = len({change.model for change in self.changes}) > 1
        others = [change for change in self.not_comparable if change.section == "environment"]
        unlike = self.unlike
        ordered = sorted(
            self.changes, key=lambda change: (change not in others, SECTIONS.index(change.section))
        )
        listed = [
            change
            for change in ordered
            if everything
            or change in others
            or change.level == REGRESSION
            or (change.level != SAME and change.model not in unlike)
        ]
        levels = dict.fromkeys([NOT_COMPARABLE, *_LEVELS] if others else _LEVELS)
        rows: dict[Level, list[RawRow]] = {level: [] for level in levels}
        for alike in group_by(listed, lambda change: replace(change, model="")):
            change, models = alike[0], [each.model for each in alike]
            level = Cell(text=change.level, status=_LEVELS[change.level])
            place = [summarize_names(models)] if several else []
            values = (change.subject, level, change.old, change.new, change.why)
            rows[change.level].append((*place, change.section, *values))
        groups = [Group(title=_TITLES[level], rows=each) for level, each in rows.items() if each]
        headings = (*(["model"] if several else []), "section", "what", "verdict", "old", "new", "why")
        return table(f"{self.old.name} → {self.new.name}", headings, groups=groups)

    def to_markdown(self) -> str:
        """A comment for a pull request: the headline, and a table for each level, regressions first."""
        word = self.outcome.upper() if self.outcome is Outcome.FAILED else self.outcome
        names = f"{markdown_text(self.old.name)} → {markdown_text(self.new.name)}"
        parts = [f"### mha-deploy compare: {word}", f"{self.headline} ({names})"]
        whole = self.table()
        for group in whole.groups:
            parts += [f"**{group.title}**", markdown(replace(whole, groups=[group]))]
        return "\n\n".join(part.strip() for part in parts) + "\n"

    def to_junit(self) -> str:
        """JUnit XML: a test case for everything that was compared, a failure for every regression."""
        worse, results = self.regressions, []
        for change in self.changes:
            is_unclear = change.level in (INCONCLUSIVE, NOT_COMPARABLE)
            outcome = Outcome.NOT_VERIFIED if is_unclear else Outcome.PASSED
            outcome = Outcome.FAILED if change in worse else outcome
            words = f"{change.old} → {change.new}{': ' if change.why else ''}{change.why}"
            results.append(JUnitTest((change.model, change.section), change.subject, outcome, words))
        return junit("compare", results)

    def to_html(self) -> str:
        """A page with both sides beside each other."""
        sides = []
        for side in (self.old, self.new):
            verdict = side.results[0].verdict if side.results else None
            sides.append((side.name, side.kind, side.created, verdict and verdict.headline))
        heads = ("source", "kind", "written", "verdict")
        both = table("The two sides", ("", "old", "new"), zip(heads, *sides, strict=True), css="compact")
        parts: dict[str, list[Any]] = {}
        for group in (whole := self.table(everything=True)).groups:
            shown = replace(whole, title=group.title, groups=[replace(group, title="")])
            count = plural(len(group.rows), "row")
            fold = {"name": "", "caption": count, "table": shown}
            parts[group.title] = [("fold", fold) if group.title == _TITLES[SAME] else ("table", shown)]
        same = parts.pop(_TITLES[SAME], None)
        parts |= {both.title: [("table", both)], **({} if same is None else {_TITLES[SAME]: same})}
        title = f"Comparison: {' and '.join(_told_apart(self.old.name, self.new.name))}"
        data = {**self.to_dict(), "environment": as_plain(report_header()["environment"])}
        return sections_page(data, title, parts)

    def inputs(self) -> tuple[str, ...]:
        """The files and folders of both sides."""
        names = (self.old.name, self.new.name)
        return tuple({*names, *(name.partition("#")[0] for name in names)})

    def save_files(
        self, *, html: Path | None = None, junit: Path | None = None, overwrite: bool = False
    ) -> None:
        """Write the page and the JUnit XML, both or none; `overwrite` replaces files of others, too."""
        files: dict[Path, tuple[bytes, IsOurs]] = {}
        if junit is not None:
            files[junit] = self.to_junit().encode("utf-8"), is_junit
        if html is not None:
            if html in files:
                raise DeployError(
                    "Two outputs are the same file.", got=html, hint="another name for one of them"
                )
            files[html] = self.to_html().encode("utf-8"), is_page
        write_files(files, overwrite=overwrite, inputs=self.inputs())


def _told_apart(*names: str) -> list[str]:
    """Paths by their last parts, so many that they differ."""
    parts = [Path(name).parts for name in names]
    longest = max(map(len, parts))
    count = next((n for n in range(1, longest) if len({each[-n:] for each in parts}) == len(parts)), longest)
    return [str(Path(*each[-count:])) for each in parts]


_LEVELS = {
    REGRESSION: "bad",
    NOT_COMPARABLE: "doubt",
    INCONCLUSIVE: "doubt",
    CHANGED: "doubt",
    IMPROVEMENT: "good",
    SAME: "none",
}

_TITLES = {
    REGRESSION: "Regressions",
    NOT_COMPARABLE: "Not comparable",
    INCONCLUSIVE: "Inconclusive",
    CHANGED: "Changed",
    IMPROVEMENT: "Improvements",
    SAME: "The same",
}


def compare(old: Any, new: Any, limits: Limits | None = None) -> Comparison:
    """Compare two sides of one kind."""
    limits = limits or Limits()
    for each in fields(limits):
        value = getattr(limits, each.name)
        if value is not None and not isinstance(value, bool) and not value >= 0:
            raise DeployError("A threshold cannot be negative.", got=f"{each.name} {value}", hint="0 or more")
    before, after = read_side(old), read_side(new)
    if before.kind != after.kind:
        got = f"{before.name} is a {before.kind}, {after.name} is a {after.kind}"
        hint = "two reports, two benchmarks, two bundles, two engines or two matrices"
        inside = [Path(side.name) / REPORT_FILE for side in (before, after) if side.kind == "bundle"]
        if "report" in (before.kind, after.kind) and inside and inside[0].is_file():
            hint = f"two reports; the report of the bundle is {inside[0]}"
        raise DeployError("Only two results of the same kind can be compared.", got=got, hint=hint)
    changes: list[Change] = []
    for first, second in _pairs(before.results, after.results):
        if first is not None and second is not None:
            found = _changes(first, second, limits)
        elif first is not None:
            level = REGRESSION if limits.coverage else CHANGED
            found = [Change("coverage", "model", level, "present", "absent", _GONE)]
        else:
            found = _new_alone(second) if second is not None else []
        either: Any = first or second
        name = f"{either.name} {either.types}"
        name = f"{name}, {either.place}" if either.place else name
        changes += [replace(change, model=name) for change in found]
    if not changes:
        raise BundleError("Nothing can be compared.", got=f"{before.name}, {after.name}", hint=_ACCEPTED)
    return Comparison(old=before, new=after, changes=tuple(changes), limits=limits)


def _new_alone(result: ModelResult) -> list[Change]:
    """What a result is that only the new side has: no improvement unless it is right."""
    owners, _ = _owners(result, result, {})
    judged = [(*key, item, *_judge_alone(key[0], item)) for key, item in measurements(result, owners).items()]
    wrong = [
        Change(section, subject, REGRESSION, NOTHING, item.shown, why)
        for section, subject, item, its, why in judged
        if its is REGRESSION
    ]
    level = CHANGED if wrong else IMPROVEMENT
    return [Change("coverage", "model", level, "absent", "present", "new"), *wrong]


_GONE = "no longer measured"
_NO_REPORT = "no report: validate it first"


def _not_the_same(old: ModelResult, new: ModelResult) -> dict[str, tuple[str, str]]:
    """What makes two results incomparable: another model, precision or GPU, with both values."""
    found = {}
    models, (one, two) = [each.name for each in (old, new)], [_spec(each) for each in (old, new)]
    own = (one.keys() & two.keys()) - _OF_NO_MODEL
    if old.types != new.types:
        found["precision"] = old.types, new.types
    # Of a quantized model the weights are others, and it is described by its graph.
    is_quantized = any(each.quantized for each in (old, new)) and bool(found)
    if models[0] != models[1]:
        found["model"] = models[0], models[1]
    elif not is_quantized and (differing := sorted(key for key in own if one[key] != two[key])):
        if one.get("summary") != two.get("summary"):
            differing = ["summary", *differing]
        found["model"] = _attributes(one, two, differing), _attributes(two, one, differing)
    gpus = [_gpu_of(each) for each in (old, new)]
    if all(gpus) and gpus[0] != gpus[1]:
        found["GPU"] = gpus[0], gpus[1]
    return found


def _weights_of(result: ModelResult) -> str:
    """What tells the weights of a model from others: their hash, or of a layer where they came from."""
    return str(_spec(result).get("state_sha256") or (result.model.weights if result.model else ""))


# Attributes that make no other model: those that are compared by themselves, and where its weights came from,
# which are listed as changed.
_OF_NO_MODEL = frozenset(
    {"axes", "name", "summary", "factory", "weight_bytes", "cache"}
    | {"weights_file", "weights_prefix", "state_sha256", "seed"}
)


def _attributes(spec: Mapping[str, Any], other: Mapping[str, Any], names: Sequence[str]) -> str:
    """Attributes of a model, for a reader; of tensors those that the other model does not have."""
    words = []
    for name in names:
        value, theirs = spec.get(name), other.get(name)
        if _are_records(value) and _are_records(theirs):
            value = [each for each in value if each not in theirs]
        text = _words(value)
        words.append(text if name == "summary" else f"{name} {text or NOTHING}")
    return ", ".join(filter(None, words))


def _are_records(value: Any) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    return isinstance(value, list | tuple) and all(isinstance(each, Mapping) for each in value)


def _words(value: Any) -> str:
    """The value of an attribute: lists and records of them without the marks of a programming language."""
    if isinstance(value, Mapping):
        values = {key: _words(each) for key, each in value.items() if each not in (None, "")}
        named = [values.pop("name")] if "name" in values else []
        return " ".join([*named, *(f"{key} {each}" for key, each in values.items())])
    if _are_records(value):
        return "; ".join(map(_words, value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_words, value))}]"
    return "" if value is None else str(value)


def _gpu_of(result: ModelResult) -> str:
    """The GPU that times were measured on, or else the one of the machine; empty without one."""
    timed = result.latency.gpu if result.latency else None
    here = result.environment.gpu if result.environment else None
    return timed or (here.name if here else "")


def _depends_on(other: Mapping[str, Any]) -> frozenset[str]:
    """The sections that say nothing where these differ: on another GPU only times and memory."""
    if other.keys() & {"model", "precision"}:
        return frozenset(SECTIONS) - {"environment", "verdict"}
    return frozenset({"latency", "build time", "size"} if other else ())


def _gap_changes(old: ModelResult, new: ModelResult, names: Mapping[str, str]) -> Iterator[Change]:
    """What is not verified, thing by thing: how much it is says nothing."""
    if old.verdict is None or new.verdict is None:  # nothing was judged there, whatever is missing
        return
    gaps: list[dict[Any, Gap]] = []
    for result, renamed in ((old, {}), (new, names)):
        each = (structs.replace(gap, name=renamed.get(gap.name, gap.name)) for gap in _gaps(result))
        gaps.append({gap.identity: gap for gap in each})
    ran = {names.get(each.name, each.name) for each in new.engines or () if each.ran}
    known = {each.name for each in old.engines or ()}
    added = [gap for gap in gaps[1].values() if not any(map(gap.is_within, gaps[0].values()))]
    resized = _resized(old, new)
    for key in dict.fromkeys([*gaps[0], *gaps[1]]):
        before, after = gaps[0].get(key), gaps[1].get(key)
        shown = [NOTHING if gap is None else gap_text(gap) for gap in (before, after)]
        subject = f"not verified: {shown[0] if after is None else shown[1]}"
        about = before or after
        if before != after and about is not None and resized & about.spans.keys():
            yield Change("coverage", subject, NOT_COMPARABLE, shown[0], shown[1], "other axes")
        elif before != after and about is not None and about.spans and old.types != new.types:
            # Which sizes are run depends on the probes, and these on the precision.
            yield Change("coverage", subject, NOT_COMPARABLE, shown[0], shown[1], "another precision")
        elif before is None and after is not None and after.kind is Kind.NOT_RUN and after.name not in known:
            yield Change("coverage", subject, CHANGED, shown[0], shown[1], "it is new, and was not run")
        elif before is None:
            level, why = REGRESSION, "not verified any more"
            if after not in added:
                level, why = CHANGED, "part of what was not verified"
            yield Change("coverage", subject, level, shown[0], shown[1], why)
        elif after is None and before.kind is Kind.NOT_RUN and before.name not in ran:
            yield Change("coverage", subject, CHANGED, shown[0], shown[1], "it was not run")
        elif after is None:
            left = [gap for gap in added if gap.meets(before)]
            level, why = (CHANGED, f"part of it is in {gap_text(left[0])}") if left else (IMPROVEMENT, "")
            yield Change("coverage", subject, level, shown[0], shown[1], why)
        else:
            level = _direction(*(-gap.extent for gap in (before, after)))
            if level is not REGRESSION and after in added and after.spans != before.spans:
                level = CHANGED
            yield Change("coverage", subject, level, *shown)


def _resized(old: ModelResult, new: ModelResult) -> set[str]:
    """The axes of both whose ranges are not the same: which of their sizes are run depends on the range."""
    found = [_spec(each).get("axes") for each in (old, new)]
    one, two = (axes if isinstance(axes, Mapping) else {} for axes in found)
    return {axis for axis in one.keys() & two.keys() if one[axis] != two[axis]}


def _old_names(old: ModelResult, new: ModelResult) -> dict[str, str]:
    """The old names of engines and of what was judged in their place, whatever they are called now.

    It is the only one of its kind on both sides: a file also by the runtime that ran it.
    """
    sides = []
    for result in (old, new):
        kinds: dict[Any, list[str]] = {"": [each.name for each in result.engines or ()]}
        for subject in result.subjects or ():
            runtime = (result.runtimes or {}).get(subject.runtime, subject.runtime)
            kinds.setdefault((subject.kind, runtime), []).append(subject.name)
        sides.append(kinds)
    pairs = [(names, sides[1].get(kind, [])) for kind, names in sides[0].items()]
    return {theirs[0]: names[0] for names, theirs in pairs if len(names) == len(theirs) == 1}


def _with_old_names(old: ModelResult, new: ModelResult) -> ModelResult:
    """The new result with attentions named as in the old one: an exporter may call them otherwise.

    Those of one name belong together; of the others the first and the first, in the order of the graph, where
    both sides have as many.
    """
    known = [_attentions(each) for each in (old, new)]
    left, right = ([name for name in known[i] if name not in known[1 - i]] for i in (0, 1))
    if not left or len(left) != len(right):
        return new
    names = dict(zip(right, left, strict=True))

    def renamed(nodes: Any) -> Any:
        return nodes and [structs.replace(each, node=names.get(each.node, each.node)) for each in nodes]

    runs = [
        run
        if run.cases is not CaseKind.LAYERS
        else structs.replace(
            run,
            verdicts=[structs.replace(v, output=names.get(v.output, v.output)) for v in run.verdicts or ()],
        )
        for run in new.parity or ()
    ]
    engines = [structs.replace(each, nodes=renamed(each.nodes)) for each in new.engines or ()]
    ranges = new.range and structs.replace(new.range, nodes=renamed(new.range.nodes))
    gaps = [
        structs.replace(gap, attention=names.get(gap.attention or "", gap.attention)) for gap in _gaps(new)
    ]
    verdict = new.verdict and structs.replace(new.verdict, not_verified=gaps)
    return structs.replace(new, parity=runs, engines=engines, range=ranges, verdict=verdict)


def _gaps(result: ModelResult) -> Sequence[Gap]:
    return (result.verdict.not_verified if result.verdict else None) or ()


def _attentions(result: ModelResult) -> list[str]:
    """The names of all attentions, in the order of the graph."""
    nodes = [node.node for engine in result.engines or () for node in engine.nodes or ()]
    nodes += [node.node for node in result.range.nodes] if result.range else []
    inside = [run for run in result.parity or () if run.cases is CaseKind.LAYERS]
    nodes += [verdict.output for run in inside for verdict in run.verdicts or ()]
    nodes += [gap.attention or "" for gap in _gaps(result)]
    return list(dict.fromkeys(filter(None, nodes)))


def _pairs(
    old: Sequence[ModelResult], new: Sequence[ModelResult]
) -> Iterator[tuple[ModelResult | None, ModelResult | None]]:
    """Results of the same model, precision and place; then of the same model and place; then the only two."""
    left, right = list(old), list(new)
    if len(left) == len(right) == 1:
        yield left[0], right[0]
        return

    def exact(each: ModelResult) -> tuple[str, ...]:
        return each.name, each.types, each.place

    for key in (exact, lambda each: (each.name, each.place)):
        for first in list(left):
            alike = [each for each in right if key(each) == key(first)]
            if len(alike) == 1:
                yield first, alike[0]
                left.remove(first)
                right.remove(alike[0])
    yield from ((first, None) for first in left)
    yield from ((None, second) for second in right)


def _changes(old: ModelResult, new: ModelResult, limits: Limits) -> list[Change]:
    names = _old_names(old, new)
    engines: list[Any] = [each.engines or () for each in (old, new)]
    new = _with_old_names(old, new)
    of_old, of_new = _owners(old, new, names)
    before, after = measurements(old, of_old), measurements(new, of_new)
    found = [*_gap_changes(old, new, names)]
    other = _not_the_same(old, new)
    is_other = old.name != new.name  # all attributes of which differ
    are_other_weights = _weights_of(old) != _weights_of(new)

    def is_skipped(section: str, item: Measurement) -> bool:
        return is_other and section == "environment" and item.owner == _MODEL

    found += [Change("environment", what, NOT_COMPARABLE, *values) for what, values in other.items()]
    gone = sorted(
        {each.name for each in engines[0]} - {names.get(each.name, each.name) for each in engines[1]}
    )
    owners = {item.owner for item in after.values()}
    measured = {(item.owner, item.cases) for item in after.values()}
    # Which cases are drawn depends on the axes, and which probes there are on the precision.
    redrawn = {"fresh": "drawn for other axes"} if _resized(old, new) else {}
    redrawn |= {"probe": "another precision"} if "precision" in other else {}
    # So do the batch sizes that a case is run in; whether it is run in several profiles is up to these.
    varied: dict[str, tuple[Level, str]] = {Variation.PROFILES: (CHANGED, "other profiles")}
    varied |= {Variation.BATCH: (NOT_COMPARABLE, "other axes")} if _resized(old, new) else {}
    checked = {of_new.of(check) for check in new.invariance or ()}
    reported = set[str]()
    for (section, subject), first in before.items():
        second = after.get((section, subject))
        if second is not None:
            second = _under_old_budget(first, second)
            level, why = _judge(section, first, second, limits, are_other_weights)
            if level is not SAME and section in _depends_on(other):
                level, why = NOT_COMPARABLE, f"another {next(iter(other))}"
            elif section == "verdict" and level is IMPROVEMENT and gone:
                level, why = CHANGED, f"engine {', '.join(gone)} is gone"
            elif is_skipped(section, first) or (section == "environment" and subject in other):
                continue
            found.append(Change(section, subject, level, first.shown, second.shown, why))
        elif first.kind == "tail" or is_skipped(section, first):  # the median is missing, too
            continue
        elif section in _FIGURES:
            found.append(Change(section, subject, CHANGED, first.shown, NOTHING))
        elif first.cases in redrawn and (first.owner, first.cases) in measured:
            why = redrawn[first.cases]
            found.append(Change(section, subject, NOT_COMPARABLE, first.shown, NOTHING, why))
        elif first.cases in varied and first.owner in checked:
            level, why = varied[first.cases]
            found.append(Change(section, subject, level, first.shown, NOTHING, why))
        elif not first.owner or first.owner in owners:
            why = _NO_REPORT if section == "verdict" and new.verdict is None else _GONE
            found.append(Change("coverage", f"{section}: {subject}", REGRESSION, first.shown, NOTHING, why))
        elif first.owner not in reported:
            reported.add(first.owner)
            found.append(Change("coverage", first.owner, REGRESSION, "present", "absent", _GONE))
    for (section, subject), item in after.items():
        if (section, subject) not in before and not is_skipped(section, item):
            level, why = _judge_alone(section, item)
            found.append(Change(section, subject, level, NOTHING, item.shown, why))
    if is_other:  # neither has the axes, cases and gaps of the other
        why, unrated = "another model", _depends_on(other)
        found = [
            replace(each, level=NOT_COMPARABLE, why=why)
            if each.section in unrated and each.level is not SAME
            else each
            for each in found
        ]
    if not limits.coverage:
        found = [
            replace(each, level=CHANGED) if (each.section, each.level) == ("coverage", REGRESSION) else each
            for each in found
        ]
    return found
