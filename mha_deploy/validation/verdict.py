"""From what was found to the verdict: its sentences, its headline, and the report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, NamedTuple

import msgspec

from mha_deploy.bundle.folder import MANIFEST, Bundle, sha256
from mha_deploy.bundle.manifest import LossRecord, Manifest, ObservedRecord
from mha_deploy.bundle.samples import Sample
from mha_deploy.engine.engine import Engine, precision_summary
from mha_deploy.errors import DeployError
from mha_deploy.judge import OutputVerdict, ParityReport
from mha_deploy.model.spec import Axis, are_within
from mha_deploy.options import ValidateOptions
from mha_deploy.requirements import REQUIRED, Demands, Requirement, demands_of
from mha_deploy.runtime.tensorrt.engine_verdict import (
    EngineReason,
    FusionStatus,
    NodeVerdict,
    PrecisionStatus,
    PrecisionVerdict,
)
from mha_deploy.status import (
    CaseKind,
    Finding,
    Gap,
    Kind,
    Outcome,
    Place,
    Reason,
    ReasonKind,
    Section,
    Severity,
)
from mha_deploy.text import absent_text, engine_reason_text, finding_text, gap_text, group_by, plural
from mha_deploy.validation.conformance import ConformanceTable
from mha_deploy.validation.data import DataRecord
from mha_deploy.validation.evaluate import Evaluation, LatencyPoint
from mha_deploy.validation.fault import FaultReport
from mha_deploy.validation.fp16_range import NodeRange, RangeFinding, RangeKind, RangeReport, RangeStatus
from mha_deploy.validation.records import (
    NOT_SENT,
    EngineRecord,
    LatencyRecord,
    ReportRecord,
    ServingRecord,
    VerdictRecord,
    engine_records,
    model_record,
    report_header,
)
from mha_deploy.validation.runtimes import PYTORCH, SERVER, TENSORRT, Unavailable
from mha_deploy.validation.subjects import SubjectRecord


@dataclass(frozen=True, kw_only=True)
class Validation:
    """A validation."""

    bundle: Bundle  # what was validated
    evaluations: tuple[Evaluation, ...] = ()  # every runtime that took part
    absent: tuple[Unavailable, ...] = ()  # the runtimes that could not, and why
    engines: tuple[Engine, ...] = ()  # the engines of the bundle
    points: tuple[LatencyPoint, ...] = ()  # latencies
    ranges: RangeReport | None = None  # how near FP16's limit the attention comes
    conformance: ConformanceTable | None = None  # the table of masks, where requested
    fault: FaultReport | None = None  # what is at fault, where an engine is wrong
    notes: tuple[str, ...] = ()  # what a reader should know besides
    serving: tuple[ServingRecord, ...] = ()  # how a server did under load
    served_sha256: str | None = None  # of the manifest of the bundle that it serves, where it says so
    gone: tuple[str, ...] = ()  # engines that were built from the bundle and are no longer there
    not_built: DeployError | None = None  # why there is no engine, where one was to be built
    foreign: tuple[str, ...] = ()  # plans among the engines that were not built from the bundle
    requirements: tuple[Requirement, ...] = ()  # what the user demands besides, and what was found
    data: DataRecord | None = None  # what came of the user's own samples
    kept: Mapping[str, Sample] = field(default_factory=dict)  # the worst of them, by the name of a file
    subjects: tuple[SubjectRecord, ...] = ()  # what was judged in place of the bundle's graph and engines
    max_loss: float | None = None  # the limit of the loss, where it is not the bundle's own
    findings: tuple[Finding, ...] = ()  # what is wrong, not covered, or worth knowing
    headline: str = ""  # the verdict in one line
    not_verified: tuple[Gap, ...] = ()  # what was not run: engines, profiles, sizes

    @property
    def outcome(self) -> Outcome:
        """That of everything that was judged; not verified where the bundle had engines and none was run.

        What was found once counts, also where the evidence of it is no longer part of the record.
        """
        judged = [each for each in self.evaluations if each.parity]
        parts = [each.outcome for each in self.evaluations if each.parity or each.decode_reports]
        parts += [Outcome.FAILED for each in self.findings if each.level is Severity.FAILURE]
        parts += [Outcome.NOT_VERIFIED for each in self.findings if each.kind in _UNVERIFIED]
        expected = (
            self.engines
            or self.gone
            or self.foreign
            or any(gap.kind is Kind.NOT_RUN for gap in self.not_verified)
        )
        if any(gap.kind is Kind.ATTENTION_NOT_OBSERVED for gap in self.not_verified):
            parts.append(Outcome.NOT_VERIFIED)
        if not judged or (expected and not any(_is_deployed(each) for each in judged)):
            parts.append(Outcome.NOT_VERIFIED)
        parts += [] if self.data is None else [self.data.outcome]
        return Outcome.of(parts)

    @property
    def passed(self) -> bool:
        """Whether the outcome is `passed`."""
        return self.outcome is Outcome.PASSED

    @property
    def loss(self) -> LossRecord | None:
        """That of the bundle, with the limit that it was judged by."""
        loss = self.bundle.manifest.loss
        if loss is None or self.max_loss is None:
            return loss
        return msgspec.structs.replace(loss, limit=self.max_loss)

    @property
    def record(self) -> ReportRecord:
        """What a report stores."""
        return ReportRecord(
            **report_header(),
            verdict=VerdictRecord(
                outcome=self.outcome,
                headline=self.headline,
                not_verified=self.not_verified,
                findings=self.findings,
            ),
            model=model_record(self.bundle),
            parity=tuple(report for each in self.evaluations for report in each.parity),
            heatmaps=tuple(heat for each in self.evaluations for heat in each.heatmaps),
            decode=tuple(report.record for each in self.evaluations for report in each.decode_reports),
            invariance=tuple(check for each in self.evaluations for check in each.invariance),
            runtimes={name: title for each in self.evaluations for name, title in each.titles.items()},
            conformance=self.conformance,
            range=self.ranges,
            fault=self.fault,
            engines=engines_in(self.engines, self.absent, self.evaluations),
            latency=latency_record(self.points),
            subjects=self.subjects,
            requirements=self.requirements,
            data=self.data,
            loss=self.loss,
            serving=self.serving,
            absent=self.absent,
            notes=self.notes,
        )


def engines_in(
    engines: Sequence[Engine], absent: Sequence[Unavailable], evaluations: Sequence[Evaluation]
) -> tuple[EngineRecord, ...]:
    """The engines, and whether they were run."""
    # An engine in a lean runtime is run under another name than its own.
    ran = {name for each in evaluations if (name := each.runtime.engine_name) is not None}
    return engine_records(engines, ran, {each.name: each.reason for each in absent})


def latency_record(points: Sequence[LatencyPoint]) -> LatencyRecord | None:
    """The latencies, and the GPU they were measured on."""
    if not points:
        return None
    gpus = {row.timing.gpu for point in points for row in point.rows if row.timing}
    return LatencyRecord(gpu=", ".join(sorted(gpus)) or None, points=tuple(point.record for point in points))


# -- From what was found to what it means: the sentences of the verdict, and its headline ----------

_SHOWN_MISSING = 3  # sizes in the headline
_UNVERIFIED = frozenset(
    {
        Kind.UNVERIFIED_OUTPUTS,
        Kind.UNVERIFIED_DECODING,
        Kind.DEMAND_NOT_CHECKED,
        Kind.DATA_OUTSIDE,
        Kind.DATA_NOT_VERIFIED,
    }
)


def _is_deployed(evaluation: Evaluation) -> bool:
    """Whether what was run is what is deployed: an engine or a server."""
    return evaluation.runtime.family in (TENSORRT, SERVER)


def _is_probed(evaluation: Evaluation) -> bool:
    """Whether a runtime was judged on large tokens; imports have a golden case for it."""
    golden = (case.name for case in evaluation.cases.get(CaseKind.GOLDEN, ()))
    return bool(evaluation.cases.get(CaseKind.PROBE)) or "probe" in golden


def _found(level: Severity, section: Section, kind: Kind, **about: Any) -> Finding:
    """A finding with its sentence; what is required is a failure."""
    level = Severity.FAILURE if about.get("required_by") else level
    place = Place(**{name: about.pop(name) for name in Place.__struct_fields__ if name in about})
    finding = Finding(level=level, section=section, kind=kind, place=place, **about)
    return msgspec.structs.replace(finding, text=finding_text(finding))


def _demanded(options: ValidateOptions, *names: str) -> tuple[str, ...]:
    """Those of these requirements that there are."""
    return tuple(name for name in names if getattr(options, name))


def conclude(
    report: Validation,
    judged: Sequence[Evaluation],
    options: ValidateOptions,
    broken: Sequence[Unavailable] = (),
) -> Validation:
    """The report with its verdict: the findings, failures first, and the headline."""
    demands = demands_of(options.requirements, report.bundle.manifest.spec.name)
    flags: dict[str, Any] = {name: getattr(options, name) or getattr(demands, name) for name in REQUIRED}
    options = replace(options, **flags)
    required = tuple(_requirements(report, judged, demands))
    report = replace(report, requirements=required, max_loss=options.max_loss)
    found, manifest = [*findings(report, options, broken)], report.bundle.manifest
    gone = (*report.gone, *report.foreign)
    missing = find_uncovered(judged, report.engines, manifest.spec.axes, gone, manifest.observed)
    if report.serving:  # which sizes and nodes a server has is its own
        is_asked = options.require_coverage
        missing = tuple(each for each in missing if is_asked or each.kind is Kind.ATTENTION_NOT_OBSERVED)
        missing = (*(shrunk_gaps(manifest) if is_asked else ()), *missing)
    else:
        missing = (*shrunk_gaps(manifest), *missing)
        more = [each.name for each in report.subjects if each.not_judged]
        gaps = [Gap(kind=Kind.OUTPUTS_NOT_JUDGED, name=name) for name in more]
        if options.probe is not False and judged and not any(_is_probed(each) for each in judged):
            gaps.append(Gap(kind=Kind.PROBES_NOT_RUN))
        missing += tuple(msgspec.structs.replace(gap, text=gap_text(gap)) for gap in gaps)
        found = [
            *shrunk_findings(manifest),
            *(() if report.subjects else unfused_findings(manifest, options)),
            *found,
        ]
    found += coverage_findings(missing, options)
    ranked = tuple(sorted(found, key=lambda finding: list(Severity).index(finding.level)))
    report = replace(report, findings=ranked, not_verified=missing)
    headline, named = _headline(report, judged, missing)
    ranked = tuple(msgspec.structs.replace(each, in_headline=each in named) for each in ranked)
    return replace(report, findings=ranked, headline=headline)


def findings(
    report: Validation, options: ValidateOptions, broken: Sequence[Unavailable] = ()
) -> Iterator[Finding]:
    """Everything in a report that is worth a sentence."""
    served = report.served_sha256
    if served is not None and served != (own := sha256(report.bundle.path / MANIFEST)):
        names = (served, own)
        yield _found(Severity.FAILURE, Section.SERVING, Kind.OTHER_BUNDLE, names=names)
    yield from _about_runtimes(report.evaluations, options)
    for gone in broken:
        about: dict[str, Any] = {"runner": gone.name, "detail": gone.reason}
        yield _found(Severity.FAILURE, Section.ENGINE, Kind.RUNTIME_FAILED, **about)
    yield from _about_engines(report, [each for each in report.absent if each not in broken], options)
    for each in (each for each in report.evaluations if each.outside):
        level = Severity.NOTE if each.parity else Severity.FAILURE
        about = {"runner": each.label, "names": each.outside, "numbers": {"judged": len(each.parity)}}
        yield _found(level, Section.ENGINE, Kind.OUTSIDE_PROFILES, **about)
    if (fault := report.fault) is not None:
        about = {"names": (fault.at_fault,), "detail": fault.explanation}
        yield _found(Severity.NOTE, Section.PARITY, Kind.FAULT, **about)
    yield from _about_range(report.ranges)
    for row, column, cell in report.conformance.wrong if report.conformance is not None else ():
        about = {"runner": column, "check": row.case, "detail": cell.detail}
        yield _found(Severity.WARNING, Section.CONFORMANCE, Kind.WRONG_MASK, **about)
    yield from _about_latency(report.points)
    for points in group_by(report.serving, lambda point: (point.first_error, *point.errors)):
        yield from _about_load(points, options)
    if report.data is not None:
        yield from _about_data(report.data, report.bundle.manifest.spec.axes)
    yield from loss_findings(report.bundle.manifest, options)
    for demand in report.requirements:
        if demand.outcome is not Outcome.PASSED:
            kind, level = Kind.DEMAND_NOT_CHECKED, Severity.WARNING
            if demand.outcome is Outcome.FAILED:
                kind, level = Kind.DEMAND_NOT_MET, Severity.FAILURE
            numbers = {"wanted": demand.wanted, **({} if demand.got is None else {"got": demand.got})}
            about = {"names": (demand.name,), "numbers": numbers, **msgspec.structs.asdict(demand.place)}
            about |= {"required_by": (demand.name,)} if level is Severity.FAILURE else {}
            yield _found(level, Section.REQUIREMENTS, kind, **about)


class _Figure(NamedTuple):
    """One figure that a requirement limits."""

    place: Place
    figure: float | None  # more is worse; None where nothing was measured, or there is no number
    is_wrong: bool = False


def _requirements(
    report: Validation, judged: Sequence[Evaluation], demands: Demands
) -> Iterator[Requirement]:
    """What is demanded in numbers, and the worst that was found; what was not measured is not verified."""
    kinds = (
        ("max_budget_share", _shares(report, judged), 1),
        ("max_latency_p99", _latencies(report), 1),
        ("top1_agreement", _disagreements(report), -1),
    )
    for name, found, sign in kinds:
        if (wanted := getattr(demands, name)) is not None:
            worst = _worst(found, sign * wanted)
            got = None if worst is None or worst.figure is None else sign * worst.figure
            if worst is None or (got is None and not worst.is_wrong):
                outcome = Outcome.NOT_VERIFIED
            else:
                outcome = Outcome.passing(worst.figure is not None and worst.figure <= sign * wanted)
            place = Place() if worst is None else worst.place
            yield Requirement(name=name, wanted=wanted, got=got, outcome=outcome, place=place)


def _worst(found: Iterable[_Figure], limit: float) -> _Figure | None:
    """The figure that decides: of an output that is wrong without one, or beyond the limit, or missing."""

    def badness(each: _Figure) -> tuple[bool, bool, float]:
        beyond = each.figure is not None and each.figure > limit
        return each.figure is None and each.is_wrong, beyond, _or_infinite(each.figure)

    return max(found, key=badness, default=None)


def _shares(report: Validation, judged: Sequence[Evaluation]) -> Iterator[_Figure]:
    """The shares of the budget that outputs use, and the worst samples of the user's data."""
    for each in judged:
        for verdict in each.verdicts:
            place = Place(runner=each.label, case=verdict.case, output=verdict.output)
            yield _Figure(place, verdict.share, verdict.is_wrong)
    for runtime in () if report.data is None else report.data.runtimes:
        for sample in runtime.worst:
            place = Place(runner=runtime.name, case=sample.sample, output=sample.output)
            yield _Figure(place, sample.share, sample.outcome is Outcome.FAILED)


def _latencies(report: Validation) -> Iterator[_Figure]:
    """The 99th percentiles of engines."""
    for point in report.points:
        for row in point.rows:
            if row.family == TENSORRT:
                place = Place(engine=row.name, case=point.case)
                yield _Figure(place, None if row.timing is None else row.timing.percentile(0.99))


def _disagreements(report: Validation) -> Iterator[_Figure]:
    """How far logits are from agreeing on the user's data."""
    for runtime in () if report.data is None else report.data.runtimes:
        for output in runtime.outputs:
            if output.agreement is not None:
                yield _Figure(Place(runner=runtime.name, output=output.name), -output.agreement.top1)


def unfused_findings(manifest: Manifest, options: ValidateOptions) -> Iterator[Finding]:
    """Attentions of a user's module that are no attention node in the graph, so no runtime can fuse them."""
    fused, of = len(manifest.attention), manifest.spec.attention_count
    if fused >= of:
        return
    reasons = tuple(f"{each.name}: {each.reason}" for each in manifest.unfused)
    about: dict[str, Any] = {"names": reasons, "numbers": {"fused": fused, "of": of}}
    about["required_by"] = _demanded(options, "require_fused")
    yield _found(Severity.WARNING, Section.FUSION, Kind.GRAPH_NOT_FUSED, **about)


def loss_findings(manifest: Manifest, options: ValidateOptions) -> Iterator[Finding]:
    """A compressed model that differs more from its original than its user allows."""
    loss = manifest.loss
    if loss is None:
        if options.max_loss is not None:
            what, hint = "The model is not compressed, so it has no loss.", "leave --max-loss out"
            raise DeployError(what, got=manifest.spec.name, hint=hint, options=("max_loss",))
        return
    limit = loss.limit if options.max_loss is None else options.max_loss
    if limit is not None and loss.worst > limit:
        worst = max(loss.outputs, key=lambda each: each.relative_l2 or 0.0)
        about: dict[str, Any] = {"names": (worst.name,), "numbers": {"loss": loss.worst, "limit": limit}}
        yield _found(Severity.FAILURE, Section.LOSS, Kind.LOSS, detail=loss.what, **about)


def shrunk_findings(manifest: Manifest) -> Iterator[Finding]:
    """Axes of the bundle that vary less than was requested of the export."""
    for each in manifest.shrunk:
        numbers = {"requested_min": each.requested_min, "requested_max": each.requested_max}
        about: dict[str, Any] = {"numbers": {**numbers, "min": each.min, "max": each.max}}
        about |= {"names": (each.axis,), "detail": each.reason}
        yield _found(Severity.WARNING, Section.COVERAGE, Kind.RANGE_SHRUNK, **about)


def shrunk_gaps(manifest: Manifest) -> Iterator[Gap]:
    """The sizes that were requested of the export, and that the bundle does not have."""
    for each in manifest.shrunk:
        below, above = (each.requested_min, each.min - 1), (each.max + 1, each.requested_max)
        for end, (least, most) in zip(_ENDS, (below, above), strict=True):
            if least <= most:
                about: dict[str, Any] = {"axis": each.axis, "end": end, "least": least, "most": most}
                gap = Gap(kind=Kind.SIZES_NOT_COVERED, **about)
                yield msgspec.structs.replace(gap, text=gap_text(gap))


def find_uncovered(
    evaluations: Sequence[Evaluation],
    engines: Sequence[Engine],
    axes: Mapping[str, Axis],
    gone: Sequence[str] = (),
    observed: Sequence[ObservedRecord] = (),
) -> tuple[Gap, ...]:
    """What no runtime was judged on; `observed` says of which attentions that is their own results."""
    judged = [each for each in evaluations if each.parity]
    ran = [each for each in judged if each.runtime.engine is not None]
    not_run = [each.path.stem for each in engines if all(each is not other.runtime.engine for other in ran)]
    found = [Gap(kind=Kind.NOT_RUN, name=name) for name in (*not_run, *gone)]
    for each in ran or judged:
        name = each.runtime.name
        # What is wrong was judged all the same; what shows nothing, or did not run, was not.
        sizes = [one.sizes for one in each.verdicts if one.passed or (one.is_wrong and one.ran)]
        if each.not_decoded_because is not None:
            found.append(Gap(kind=Kind.STEPS_NOT_COVERED, name=name))
        inside = {
            v.output for report in each.parity if report.cases is CaseKind.LAYERS for v in report.verdicts
        }
        kinds = {report.accumulation.type for report in each.parity}
        hidden = [one for one in observed if any(map(one.is_hidden, kinds)) and one.name not in inside]
        found += [
            Gap(
                kind=Kind.ATTENTION_NOT_OBSERVED,
                name=name,
                attention=one.name,
                hidden=tuple(mistake.value for mistake in one.hidden) if one.case else (),
            )
            for one in hidden
        ]
        engine = each.runtime.engine
        ranges = [axes] if engine is None else engine.manifest.ranges
        for index, profile in enumerate(ranges):
            ran_there = [one for one in sizes if are_within(one, profile)]
            if not ran_there:
                profile_index = None if engine is None else index
                found.append(Gap(kind=Kind.PROFILE_NOT_COVERED, name=name, profile=profile_index))
                continue
            place: dict[str, Any] = {"name": name, "profile": index} if len(ranges) > 1 else {}
            found += [Gap(kind=Kind.SIZES_NOT_COVERED, **span, **place) for span in _gaps(ran_there, profile)]
    return tuple(msgspec.structs.replace(gap, text=gap_text(gap)) for gap in dict.fromkeys(found))


_ENDS = ("min", "max")


def _gaps(ran: Sequence[Mapping[str, int]], profile: Mapping[str, Axis]) -> Iterator[dict[str, Any]]:
    """The sizes of a profile that were not run: at the ends of every axis, and where the ends of two meet.

    An end of an axis is covered by a point that has this size. Two ends are covered by one point that has
    both: what ran at each of them says nothing of both at once. Of combinations that did not run, the most
    that reach to the corner are named.
    """
    away = {
        (name, end): [abs(one[name] - getattr(axis, end)) for one in ran]
        for name, axis in profile.items()
        for end in _ENDS
        if axis.is_dynamic and all(name in one for one in ran)
    }

    def span(at: tuple[str, str], count: int) -> tuple[int, int]:
        axis = profile[at[0]]
        return (axis.min, axis.min + count - 1) if at[1] == "min" else (axis.max - count + 1, axis.max)

    nearest = {at: min(distances) for at, distances in away.items()}
    for at in reversed(away):
        if nearest[at]:
            least, most = span(at, nearest[at])
            yield {"axis": at[0], "end": at[1], "least": least, "most": most}
    for at, other in combinations(away, 2):
        if at[0] == other[0]:
            continue
        # So many sizes from this end, with as many from the other as nothing ran at.
        points, empty = list(zip(away[at], away[other], strict=True)), list[tuple[int, int]]()
        for count in {*away[at], profile[at[0]].max - profile[at[0]].min + 1}:
            beside = min((there for here, there in points if here < count), default=0)
            if count > nearest[at] and beside > nearest[other]:
                empty.append((count, beside))
        if empty:
            count, beside = max(empty, key=lambda each: (each[0] * each[1], each))
            (least, most), (other_least, other_most) = span(at, count), span(other, beside)
            first = {"axis": at[0], "end": at[1], "least": least, "most": most}
            second = {"axis": other[0], "end": other[1], "least": other_least, "most": other_most}
            yield {**first, **{f"other_{name}": value for name, value in second.items()}}


def coverage_findings(missing: Sequence[Gap], options: ValidateOptions) -> Iterator[Finding]:
    """What was not run, as a failure where it was required."""
    required = {
        Kind.NOT_RUN: _demanded(options, "require_run", "require_coverage"),
        Kind.NOT_COVERED: _demanded(options, "require_coverage"),
    }
    for kind, required_by in required.items():
        names = tuple(gap.text for gap in missing if (gap.kind is Kind.NOT_RUN) is (kind is Kind.NOT_RUN))
        if names:
            unseen = kind is Kind.NOT_COVERED and any(
                gap.kind is Kind.ATTENTION_NOT_OBSERVED for gap in missing
            )
            reason = Reason(kind=Kind.ATTENTION_NOT_OBSERVED) if unseen else None
            about: dict[str, Any] = {"names": names, "reason": reason, "required_by": required_by}
            yield _found(Severity.NOTE, Section.COVERAGE, kind, **about)


def _headline(
    report: Validation, evaluations: Sequence[Evaluation], missing: Sequence[Gap]
) -> tuple[str, list[Finding]]:
    """The verdict in one line: is it right, is it fused, is it in its precision, is it fast.

    With the finding that it is, or the notes that it holds.
    """
    failures = [each for each in report.findings if each.level is Severity.FAILURE]
    if first := failures or [each for each in report.findings if each.kind in _UNVERIFIED]:
        shown = first[: 2 if len(first) == 2 else 1]
        more = f" (and {len(first) - 1} more)" if len(first) > 2 else ""
        return f"{'; '.join(each.text for each in shown)}{more}", shown
    judged = [each for each in evaluations if each.parity]
    if not judged:
        skipped = "; ".join(absent_text(each.name, each.reason) for each in report.absent)
        return f"nothing was checked{f': {skipped}' if skipped else ''}", []
    ran = [each for each in judged if each.runtime.engine is not None]
    parts = ["; ".join(_outputs(each) for each in ran or judged)]
    not_run = [each for each in report.engines if all(each is not other.runtime.engine for other in ran)]
    if not any(map(_is_deployed, judged)) and not report.serving and not report.subjects:
        if any(each.runtime.family != PYTORCH for each in judged):
            parts[0] = f"the graph is right ({parts[0]})"
        names = ", ".join(engine.path.stem for engine in not_run)
        parts += [f"engine {names} built and inspected, NOT RUN"] if names else []
        parts += [f"engine {', '.join(report.gone)} NOT HERE"] if report.gone else []
        parts += [f"foreign engine {', '.join(report.foreign)} NOT RUN"] if report.foreign else []
        parts += [] if names or report.gone or report.foreign else ["no engine was run"]
    if not report.engines and not report.subjects:  # an engine counts the attentions itself
        parts += [finding.text for finding in report.findings if finding.section is Section.FUSION]
    if (loss := report.bundle.manifest.loss) is not None:
        parts.append(f"loss of {loss.what} {loss.worst:.2g}")
    named = list[tuple[Kind, str | None]]()  # which notes, by kind and engine
    for engine in [each.runtime.engine for each in ran] or not_run:
        if engine is not None and not ran and not engine.is_confirmed:
            parts.append("fusion and precision not verified")
        elif engine is not None:
            parts += [engine.manifest.fusion_summary, engine.manifest.precision_summary]
            named.append((Kind.ENGINE_PRECISION, engine.path.stem))
    for point in report.points[:1]:
        rows = [row for row in point.rows if row.name == (ran or judged)[0].runtime.name]
        for p50, row in ((row.timing.p50, row) for row in rows if row.timing):
            parts.append(f"{p50:.1f} µs")
            ratio, best = point.figures(row)["speedup_over_best_pytorch"], point.best_pytorch
            if ratio is not None and best is not None:
                parts.append(f"{ratio:.2f} × the speed of the best PyTorch ({best.name})")
    sizes = [gap.text for gap in missing if gap.kind is not Kind.NOT_RUN]
    if len(sizes) > _SHOWN_MISSING:
        # What was requested, and what leaves the verdict open, is named.
        shrunk = list(shrunk_gaps(report.bundle.manifest))
        listed = [gap.text for gap in missing if gap in shrunk]
        listed += [gap.text for gap in missing if gap.kind is Kind.ATTENTION_NOT_OBSERVED][:_SHOWN_MISSING]
        others = len(sizes) - len(listed)
        items = [plural(others, "more item" if listed else "item")] if others else []
        parts.append(f"not covered: {', '.join(listed + items)}")
    elif sizes:
        parts.append(f"not covered: {', '.join(sizes)}")
        if all(gap.kind is not Kind.ATTENTION_NOT_OBSERVED for gap in missing):  # the note has what to try
            named.append((Kind.NOT_COVERED, None))
    notes = (each for each in report.findings if each.level is Severity.NOTE)
    return ", ".join(parts), [each for each in notes if (each.kind, each.place.engine) in named]


def _outputs(evaluation: Evaluation) -> str:
    outputs, attentions = (
        [v.passed for r in evaluation.parity if (r.cases is CaseKind.LAYERS) is inside for v in r.verdicts]
        for inside in (False, True)
    )
    text = f"{evaluation.label}: {sum(outputs)}/{len(outputs)} outputs within budget"
    if attentions:
        text += f", {sum(attentions)}/{plural(len(attentions), 'attention')} right"
    if evaluation.not_decoded_because is not None:
        return f"{text}, not decoded"
    steps = sum(report.steps for report in evaluation.decode_reports)
    return f"{text}, right at all {steps} decode steps" if steps else text


def _about_runtimes(evaluations: Sequence[Evaluation], options: ValidateOptions) -> Iterator[Finding]:
    """Wrong outputs, decode steps and batch slots."""
    levels = {Outcome.FAILED: Severity.FAILURE, Outcome.NOT_VERIFIED: Severity.WARNING}
    required = {Outcome.NOT_VERIFIED: _demanded(options, "require_run", "require_coverage")}

    def at(verdict: OutputVerdict) -> dict[str, Any]:
        return {"case": verdict.case, "output": verdict.output, "reason": verdict.reason}

    outputs = {Outcome.FAILED: Kind.WRONG_OUTPUTS, Outcome.NOT_VERIFIED: Kind.UNVERIFIED_OUTPUTS}
    decoding = {Outcome.FAILED: Kind.WRONG_DECODING, Outcome.NOT_VERIFIED: Kind.UNVERIFIED_DECODING}
    for each in evaluations:
        worst_first = [
            (report, outcome, sorted(failed, key=_share, reverse=True))
            for report in each.parity
            for outcome in outputs
            if (failed := [verdict for verdict in report.verdicts if verdict.outcome is outcome])
        ]
        for alike in group_by(worst_first, lambda one: (one[1], *_place(one[0], one[2][0]))):
            (_, outcome, (worst, *_)), reports = alike[0], [report for report, *_ in alike]
            numbers: dict[str, float] = {
                "failed": sum(len(failed) for *_, failed in alike),
                "judged": sum(len(report.verdicts) for report in reports),
            }
            if not_run := sum(not verdict.ran for *_, failed in alike for verdict in failed):
                numbers["not_run"] = not_run
            if math.isfinite(_share(worst)):
                numbers["share"] = _share(worst)
            cases = tuple(dict.fromkeys(report.cases for report in reports))
            about = {"runner": each.label, "cases": cases, "numbers": numbers}
            about["required_by"] = required.get(outcome, ())
            yield _found(levels[outcome], Section.PARITY, outputs[outcome], **about, **at(worst))
    for each in evaluations:
        if each.not_decoded_because is not None:
            about = {"runner": each.label, "detail": each.not_decoded_because}
            yield _found(Severity.WARNING, Section.DECODE, Kind.NOT_DECODED, **about)
        for decoded in each.decode_reports:
            if not decoded.passed:
                kind, first = decoding[decoded.outcome], dict[str, Any]()
                if decoded.failures:
                    first = at(max(decoded.failures, key=lambda failure: failure.is_wrong))
                about = {**first, "runner": each.label, "required_by": required.get(decoded.outcome, ())}
                yield _found(levels[decoded.outcome], Section.DECODE, kind, **about)
    for each in evaluations:
        for check in each.invariance:
            if check.outcome is Outcome.FAILED:
                about = {"runner": each.label, "check": check.check, "case": check.case}
                detail = check.problem or ""
                yield _found(Severity.FAILURE, Section.INVARIANCE, Kind.NOT_INVARIANT, detail=detail, **about)


def _or_infinite(figure: float | None) -> float:
    """A figure; where there is no number, it is worse than any."""
    return math.inf if figure is None else figure


def _share(verdict: OutputVerdict) -> float:
    return _or_infinite(verdict.share)


def _place(report: ParityReport, worst: OutputVerdict) -> tuple[object, ...]:
    """What all reports of one sentence share: where the worst output is, and what is wrong there."""
    why = None if worst.reason is None else worst.reason.kind
    return report.cases is CaseKind.LAYERS, worst.case, worst.output, why


def _about_engines(
    report: Validation, absent: Sequence[Unavailable], options: ValidateOptions
) -> Iterator[Finding]:
    engines = report.engines
    yield from _about_subjects(report, options)
    for name in report.foreign:
        yield _found(Severity.WARNING, Section.ENGINE, Kind.FOREIGN_ENGINE, engine=name)
    asks = _demanded(options, "require_fused", "require_precision")
    asks += () if report.serving or report.gone else _demanded(options, "require_run")
    if (error := report.not_built) is not None:
        detail = f"{error.in_one_line}; try: {error.hint}"
        yield _found(Severity.FAILURE, Section.ENGINE, Kind.ENGINE_NOT_BUILT, detail=detail)
    elif not engines and asks and not report.subjects:
        detail = " and ".join(f"--{name.replace('_', '-')}" for name in asks)
        yield _found(Severity.FAILURE, Section.FUSION, Kind.NO_ENGINE, detail=detail, required_by=asks)
    for name in report.gone:
        yield _found(Severity.WARNING, Section.ENGINE, Kind.ENGINE_GONE, engine=name)
    for name, manifest in ((engine.path.stem, engine.manifest) for engine in engines):
        if not manifest.all_fused:
            detail = f"{manifest.fusion_summary}{_why_unknown(manifest.verdict.nodes)}"
            about: dict[str, Any] = {"engine": name, "detail": detail}
            about["required_by"] = _demanded(options, "require_fused")
            yield _found(Severity.WARNING, Section.FUSION, Kind.ENGINE_NOT_FUSED, **about)
        if not manifest.verdict.precision.ok:
            about = {"engine": name, "detail": manifest.precision_summary}
            # What the device chooses cannot be known before the engine is loaded.
            level = Severity.NOTE if manifest.has_requested_types else Severity.WARNING
            if level is Severity.WARNING:
                about |= _precision_demanded(options, manifest.verdict.precision)
            yield _found(level, Section.PRECISION, Kind.ENGINE_PRECISION, **about)
        for each in absent:
            if each.name == name:
                about = {"engine": name, "detail": each.reason}
                yield _found(Severity.NOTE, Section.ENGINE, Kind.ENGINE_NOT_RUN, **about)
    for engine in engines:  # of which nothing is known but what their manifests claim
        ran = any(each.runtime.engine is engine and each.parity for each in report.evaluations)
        if not ran and not engine.is_confirmed:
            about = {"engine": engine.path.stem}
            about["required_by"] = _demanded(options, "require_fused", "require_precision")
            yield _found(Severity.WARNING, Section.FUSION, Kind.ENGINE_NOT_CONFIRMED, **about)


def _precision_demanded(options: ValidateOptions, found: PrecisionVerdict) -> dict[str, Any]:
    """What requires another precision than was found; and why it is unknown, where that is no fault."""
    required = _demanded(options, "require_precision")
    if found.is_fp32_as_recorded:
        return {"required_by": required, "reason": Reason(kind=Kind.TYPE_NOT_RECORDED)}
    return {"required_by": required or ("require_precision",) * options.require_recorded_types}


def _why_unknown(nodes: Sequence[NodeVerdict]) -> str:
    """Why it is not known whether attentions are fused: the first reason; empty where all is known."""
    unknown = (node for node in nodes if node.status is FusionStatus.UNKNOWN)
    first = next((reason for node in unknown for reason in node.reasons), None)
    return "" if first is None else f": {engine_reason_text(msgspec.to_builtins(first))}"


def _about_subjects(report: Validation, options: ValidateOptions) -> Iterator[Finding]:
    """What was judged in place of the bundle's own: outputs, fusion and precision."""
    for each in report.subjects:
        if each.not_judged:
            about: dict[str, Any] = {"runner": each.name, "names": each.not_judged}
            yield _found(Severity.NOTE, Section.PARITY, Kind.OUTPUTS_NOT_JUDGED, **about)
        for found in each.attention:
            detail = f"{found.attribute} is {found.subject}, in the bundle {found.bundle}"
            about = {"runner": each.name, "names": found.nodes, "detail": detail}
            yield _found(Severity.NOTE, Section.PARITY, Kind.ATTENTION_CHANGED, **about)
        for kind, names in (
            (Kind.OTHER_WEIGHTS, each.missing_weights),
            (Kind.WEIGHTS_CHANGED, each.changed_weights),
        ):
            if names:
                about = {"runner": each.name, "names": names, "numbers": {"weights": each.weights}}
                yield _found(Severity.WARNING, Section.PARITY, kind, **about)
        fusion = FusionStatus.UNKNOWN if each.plan is None else each.plan.fusion
        precision = PrecisionStatus.UNKNOWN if each.plan is None else each.plan.precision
        if fusion is not FusionStatus.FUSED and (each.plan is not None or options.require_fused):
            level = Severity.NOTE if fusion is FusionStatus.UNKNOWN else Severity.WARNING
            counted = 0 if each.plan is None else each.plan.fused_kernels
            wanted = report.bundle.manifest.spec.attention_count
            about = {"engine": each.name, "numbers": {"fused_kernels": counted, "attentions": wanted}}
            about["required_by"] = _demanded(options, "require_fused")
            detail = f"fusion: {fusion} ({counted} fused kernels, {wanted} attentions)"
            yield _found(level, Section.FUSION, Kind.ENGINE_NOT_FUSED, detail=detail, **about)
        verified = (PrecisionStatus.VERIFIED, PrecisionStatus.SELECTED_AT_LOAD)
        if precision not in verified and (each.plan is not None or options.require_precision):
            level = Severity.NOTE if precision is PrecisionStatus.UNKNOWN else Severity.WARNING
            no_kernels = (EngineReason(kind=ReasonKind.NO_SOURCE),)
            reasons = no_kernels if each.plan is None else each.plan.precision_reasons
            detail = precision_summary(
                precision, report.bundle.manifest.requested_types, reasons=msgspec.to_builtins(reasons)
            )
            about = {"engine": each.name, "detail": detail}
            about["required_by"] = _demanded(options, "require_precision")
            yield _found(level, Section.PRECISION, Kind.ENGINE_PRECISION, **about)


def _about_data(data: DataRecord, axes: Mapping[str, Axis]) -> Iterator[Finding]:
    """Samples of the user's own that are wrong, show nothing, or were not run."""
    if data.outside:
        numbers = {"outside": len(data.outside), "samples": data.samples}
        spans = ((name, axes[name], *span) for name, span in data.sizes.items() if name in axes)
        beyond = [f"{n} is {low}–{high}" for n, axis, low, high in spans if low < axis.min or high > axis.max]
        ranges = ", ".join(f"{name} {axis.min}–{axis.max}" for name, axis in axes.items())
        where = f"the axes of the bundle, {ranges}: in the data, {', '.join(beyond)}"
        about: dict[str, Any] = {"numbers": numbers, "detail": where}
        yield _found(Severity.WARNING, Section.DATA, Kind.DATA_OUTSIDE, **about)
    for each in data.runtimes:
        if each.outside:
            numbers = {"outside": len(each.outside), "samples": data.samples}
            about = {"numbers": numbers, "detail": f"the profiles of {each.name}"}
            yield _found(Severity.WARNING, Section.DATA, Kind.DATA_OUTSIDE, **about)
        worst = next((one for one in each.worst if one.outcome is not Outcome.PASSED), None)
        place = (
            {} if worst is None else {"case": worst.sample, "output": worst.output, "reason": worst.reason}
        )
        if each.failed:
            about = {"runner": each.name, "numbers": {"failed": each.failed, "samples": each.samples}}
            yield _found(Severity.FAILURE, Section.DATA, Kind.WRONG_ON_DATA, **about, **place)
        elif each.not_verified or each.unseen or not (each.samples or data.outside or each.outside):
            numbers = {"failed": each.not_verified, "samples": each.samples}
            about = {"runner": each.name, "numbers": numbers, "names": each.unseen}
            yield _found(Severity.WARNING, Section.DATA, Kind.DATA_NOT_VERIFIED, **about, **place)


def _about_range(ranges: RangeReport | None) -> Iterator[Finding]:
    """One sentence for all attentions of which the same is true, in the words of the first.

    Where only the numbers differ, the one with the least headroom comes first.
    """
    if ranges is None:
        return
    found = [
        (node, each) for node in ranges.nodes for each in node.findings if each.status is not RangeStatus.OK
    ]

    def same(each: tuple[NodeRange, RangeFinding]) -> tuple[object, ...]:
        """What is the same for all attentions of one line: everything but the numbers."""
        return each[1].status, each[1].kind, each[1].name, *each[1].numbers

    for alike in group_by(found, same):
        if any(each.numbers != alike[0][1].numbers for _, each in alike):
            alike.sort(key=lambda each: math.inf if each[0].headroom is None else each[0].headroom)
        first = alike[0][1]
        about: dict[str, Any] = {"detail": "; ".join((first.what, *first.advice))}
        about["names"] = tuple(node.node for node, _ in alike)
        # What FP16 could not hold is no trouble for a model in another precision.
        is_own = ranges.precision == "fp16" or first.kind is RangeKind.SCORE_STEPS
        level = Severity.WARNING if is_own else Severity.NOTE
        yield _found(level, Section.RANGE, Kind.FP16_RANGE, **about)


def _about_latency(points: Sequence[LatencyPoint]) -> Iterator[Finding]:
    for point in points:
        best = point.best_pytorch
        for row in point.rows:
            about: dict[str, Any] = {"runner": row.name, "sizes": dict(point.sizes)}
            ratio = point.figures(row)["speedup_over_best_pytorch"]
            if row.family == TENSORRT and ratio is not None and ratio < 1 and best is not None:
                slower: dict[str, Any] = {"names": (best.name,), "numbers": {"ratio": 1 / ratio}}
                yield _found(Severity.WARNING, Section.LATENCY, Kind.SLOWER, **about, **slower)
            if row.timing is not None and not row.timing.stable:
                yield _found(Severity.WARNING, Section.LATENCY, Kind.NOT_SETTLED, **about)


def _about_load(points: Sequence[ServingRecord], options: ValidateOptions) -> Iterator[Finding]:
    """What a server under load shows besides wrong results, at all numbers of clients that show the same."""
    failed = Counter[str]()
    for point in points:
        failed.update(point.errors)
    numbers: dict[str, float] = {"requests": sum(point.requests for point in points)}
    numbers |= {"answered": sum(point.answered for point in points), "unsent": failed.pop(NOT_SENT, 0)}
    numbers |= {"failed": sum(failed.values()), "limit_s": options.limit_s}
    about: dict[str, Any] = {"numbers": {**numbers, **failed}, "detail": points[0].first_error or ""}
    about |= {"clients": tuple(point.clients for point in points), "names": tuple(failed)}
    if failed:
        yield _found(Severity.FAILURE, Section.SERVING, Kind.REQUESTS_FAILED, **about)
    elif numbers["unsent"]:
        yield _found(Severity.WARNING, Section.SERVING, Kind.REQUESTS_NOT_SENT, **about)
