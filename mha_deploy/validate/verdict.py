"""From what was found to the verdict: its sentences, its headline, and the report."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec

from mha_deploy import __version__
from mha_deploy.bundle.folder import MANIFEST, Bundle, sha256
from mha_deploy.bundle.manifest import Manifest
from mha_deploy.engine.engine import Engine, attention_summary, libraries_summary, where_built
from mha_deploy.environment import RUN_PACKAGES, gpus, versions
from mha_deploy.judge import OutputVerdict
from mha_deploy.model.spec import Axis
from mha_deploy.options import ValidateOptions
from mha_deploy.runtime.cuda import find_gpu
from mha_deploy.status import Outcome
from mha_deploy.text import Language, group_by, hint_for, plural, summarize_names, without_numbers
from mha_deploy.validate.conformance import ConformanceTable
from mha_deploy.validate.evaluate import Evaluation, LatencyPoint
from mha_deploy.validate.fault import LAYERS, FaultReport
from mha_deploy.validate.fp16_range import RangeReport
from mha_deploy.validate.runtimes import TENSORRT, Unavailable

NOT_VERIFIED = Outcome.NOT_VERIFIED
REPORT_FORMAT = 3
"""The format of report.json; readers refuse any other."""


@dataclass(frozen=True)
class Finding:
    """One sentence of the verdict."""

    level: str  # `failure`, `warning` or `note`
    section: str  # the part of the report that has the evidence
    text: str  # the sentence


@dataclass(frozen=True, kw_only=True)
class ValidationRecord:
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
    serving: tuple[Mapping[str, Any], ...] = ()  # how a server did under load, as in report.json
    findings: tuple[Finding, ...] = ()  # the verdict's sentences
    headline: str = ""  # the verdict in one line
    not_verified: tuple[str, ...] = ()  # what was not run: engines, profiles, sizes

    @property
    def outcome(self) -> str:
        """`passed`, `failed`, or `not verified` where the bundle has engines and none of them was run."""
        ran = any(each.runtime.family in (TENSORRT, "server") and each.parity for each in self.evaluations)
        if not self.passed:
            return "failed"
        return NOT_VERIFIED if self.engines and not ran else "passed"

    @property
    def passed(self) -> bool:
        """Whether something was checked and nothing failed."""
        checked = any(evaluation.parity for evaluation in self.evaluations)
        return checked and not any(finding.level == "failure" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; see docs/report.md."""
        return {
            **report_header(),
            "verdict": {
                "passed": self.passed,
                "outcome": self.outcome,
                "headline": self.headline,
                "not_verified": list(self.not_verified),
                "findings": [asdict(finding) for finding in self.findings],
            },
            "model": model_to_dict(self.bundle),
            "parity": [report.to_dict() for each in self.evaluations for report in each.parity],
            "heatmaps": [heat.to_dict() for each in self.evaluations for heat in each.heatmaps],
            "decode": [report.to_dict() for each in self.evaluations for report in each.decode_reports],
            "invariance": [asdict(check) for each in self.evaluations for check in each.invariance],
            "conformance": self.conformance and self.conformance.to_dict(),
            "range": self.ranges and self.ranges.to_dict(),
            "fault": self.fault and self.fault.to_dict(),
            "engines": engines_to_dict(self.engines, self.absent, self.evaluations),
            "latency": latency_to_dict(self.points),
            "serving": list(self.serving),
            "notes": [*(each.sentence for each in self.absent), *self.notes],
        }


def report_header() -> dict[str, Any]:
    """What every report begins with: the tool, the time, and the machine."""
    gpu = find_gpu()
    shown = ("name", "compute_capability", "l2_bytes", "memory_bytes")
    return {
        "format": REPORT_FORMAT,
        "tool": {"name": "mha-deploy", "version": __version__},
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": {
            "gpu": None if gpu is None else {name: getattr(gpu, name) for name in shown},
            "driver": next((each.get("driver_version") for each in gpus()), None),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "versions": versions(RUN_PACKAGES),
        },
    }


def model_to_dict(bundle: Bundle) -> dict[str, Any]:
    """What was validated."""
    manifest = bundle.manifest
    return {
        "name": manifest.spec.name,
        "summary": manifest.spec.summary,
        "kind": manifest.spec.kind,
        "precision": manifest.precision.name,
        "spec": manifest.spec.to_dict(),
        "bundle": bundle.path.resolve().name,
        "bundle_sha256": sha256(bundle.path / MANIFEST),
        "weights": manifest.weights,
    }


def engines_to_dict(
    engines: Sequence[Engine], absent: Sequence[Unavailable], evaluations: Sequence[Evaluation]
) -> list[dict[str, Any]]:
    """The engines, and whether they were run."""
    reasons = {each.name: each.reason for each in absent}
    ran = {each.runtime.name for each in evaluations if each.runtime.engine is not None}
    plain = ("backend", "version", "precision", "seconds", "engine_bytes", "rebuilds", "profiles")
    return [
        {
            "name": name,
            **{each: getattr(manifest, each) for each in plain},
            "built": where_built(manifest),
            "ran": name in ran,
            "why_not": None if name in ran else reasons.get(name, "not requested"),
            "fused": list(manifest.fused_count),
            "precision_status": manifest.verdict.precision.status.value,
            "precision_reasons": msgspec.to_builtins(manifest.verdict.precision.reasons),
            "nodes": msgspec.to_builtins(manifest.verdict.nodes),
            "attention": attention_summary(manifest),
            "plugins": libraries_summary(manifest),
            "profile_names": [manifest.profile_name(index) for index in range(len(manifest.profiles))],
        }
        for name, manifest in (
            # Of an engine that was not run, only what its plan shows.
            (engine.path.stem, engine.manifest if engine.path.stem in ran else engine.shown)
            for engine in engines
        )
    ]


def latency_to_dict(points: Sequence[LatencyPoint]) -> dict[str, Any] | None:
    """The latencies, and the GPU they were measured on."""
    if not points:
        return None
    gpus = {row.timing.gpu for point in points for row in point.rows if row.timing}
    return {"gpu": ", ".join(sorted(gpus)) or None, "points": [point.to_dict() for point in points]}


# -- From what was found to what it means: the sentences of the verdict, and its headline ----------

FAILURE, WARNING, NOTE = LEVELS = "failure", "warning", "note"
_SHOWN_MISSING = 3  # sizes in the headline


def conclude(
    report: ValidationRecord,
    judged: Sequence[Evaluation],
    options: ValidateOptions,
    broken: Sequence[Unavailable] = (),
) -> ValidationRecord:
    """The report with its verdict: the findings, failures first, and the headline."""
    found, missing = [*findings(report, options, broken)], tuple[tuple[str, str], ...]()
    if not report.serving:  # which sizes and nodes a server has is its own
        manifest = report.bundle.manifest
        missing = find_uncovered(judged, report.engines, manifest.spec.axes)
        found = [*unfused_findings(manifest, options), *found, *coverage_findings(missing, options)]
    ranked = tuple(sorted(found, key=lambda finding: LEVELS.index(finding.level)))
    report = replace(report, findings=ranked, not_verified=tuple(text for _, text in missing))
    return replace(report, headline=_headline(report, judged, missing))


def findings(
    report: ValidationRecord, options: ValidateOptions, broken: Sequence[Unavailable] = ()
) -> Iterator[Finding]:
    """Everything in a report that is worth a sentence."""
    yield from _about_runtimes(report.evaluations)
    for gone in broken:
        text = f"{gone.name} fits this machine and failed to run the model: {gone.reason}"
        yield Finding(FAILURE, "engine", text)
    yield from _about_engines(report, [each for each in report.absent if each not in broken], options)
    for each in (each for each in report.evaluations if each.outside):
        text = f"{each.label} was not run on {', '.join(each.outside)}: outside its profiles"
        if not each.parity:
            text = f"{each.label} was compared with nothing: every case is outside its profiles"
        yield Finding(NOTE if each.parity else FAILURE, "engine", text)
    if (fault := report.fault) is not None:
        yield Finding(NOTE, "parity", f"at fault: {fault.at_fault}. {fault.explanation}")
    yield from _about_range(report.ranges)
    for case, column, cell in report.conformance.wrong if report.conformance is not None else ():
        yield Finding(WARNING, "conformance", f"{column} is wrong on masks: {case.name}, {cell.detail}")
    yield from _about_latency(report.points)
    for point in report.serving:
        yield from _about_load(point, options)


def unfused_findings(manifest: Manifest, options: ValidateOptions) -> Iterator[Finding]:
    """Attentions of a user's module that are no attention node in the graph, so no runtime can fuse them."""
    fused, of = len(manifest.attention), manifest.spec.attention_count
    if fused >= of:
        return
    reasons = [f"{each.name}: {each.reason}" for each in manifest.unfused]
    why = f" ({summarize_names(reasons, joint=', ')})" if reasons else ""
    text = f"{fused} of {of} attentions are one node in the graph{why}"
    yield Finding(FAILURE if options.require_fused else WARNING, "fusion", text)


def find_uncovered(
    evaluations: Sequence[Evaluation], engines: Sequence[Engine], axes: Mapping[str, Axis]
) -> tuple[tuple[str, str], ...]:
    """What no runtime was judged on: kind (`run` or `coverage`) and a few words."""
    judged = [each for each in evaluations if each.parity]
    ran = [each for each in judged if each.runtime.engine is not None]
    not_run = (each for each in engines if all(each is not other.runtime.engine for other in ran))
    found = [("run", f"engine {each.path.stem}") for each in not_run]
    for each in ran or judged:
        sizes = [verdict.sizes for verdict in each.verdicts if verdict.passed]
        if each.not_decoded_because is not None:
            found.append(("coverage", f"decode steps in {each.runtime.name}"))
        engine = each.runtime.engine
        ranges = [axes] if engine is None else engine.manifest.ranges
        for index, profile in enumerate(ranges):
            name = f"profile {index} of {each.runtime.name}"
            ran_there = [one for one in sizes if are_within(one, profile)]
            if not ran_there:
                found.append(("coverage", name))
                continue
            place = f" in {name}" if len(ranges) > 1 else ""
            for axis, limits in profile.items():
                largest = max((one[axis] for one in ran_there if axis in one), default=limits.max)
                if largest < limits.max:
                    found.append(("coverage", f"{axis} above {largest} (up to {limits.max}){place}"))
    return tuple(dict.fromkeys(found))


def are_within(sizes: Mapping[str, int], axes: Mapping[str, Axis]) -> bool:
    """Whether sizes are within the ranges of a profile."""
    return all(axes[name].min <= size <= axes[name].max for name, size in sizes.items() if name in axes)


def coverage_findings(missing: Sequence[tuple[str, str]], options: ValidateOptions) -> Iterator[Finding]:
    """What was not run, as a failure where it was required."""
    required = {"run": options.require_run or options.require_coverage, "coverage": options.require_coverage}
    for kind, is_required in required.items():
        if words := [text for each, text in missing if each == kind]:
            text = f"{NOT_VERIFIED}, since not run: {'; '.join(words)}"
            yield Finding(FAILURE if is_required else NOTE, "coverage", text)


def _headline(
    report: ValidationRecord, evaluations: Sequence[Evaluation], missing: Sequence[tuple[str, str]]
) -> str:
    """The verdict in one line: is it right, is it fused, is it in its precision, is it fast."""
    if failures := [finding.text for finding in report.findings if finding.level == FAILURE]:
        return failures[0] if len(failures) == 1 else f"{failures[0]} (and {len(failures) - 1} more)"
    judged = [each for each in evaluations if each.parity]
    if not judged:
        return "nothing was checked"
    ran = [each for each in judged if each.runtime.engine is not None]
    parts = ["; ".join(_outputs(each) for each in ran or judged)]
    not_run = [each for each in report.engines if all(each is not other.runtime.engine for other in ran)]
    if report.engines and not ran:
        parts[0] = f"the graph is right ({parts[0]})"
        names = ", ".join(engine.path.stem for engine in not_run)
        parts.append(f"engine {names} built and inspected, NOT RUN")
    if not report.engines:  # an engine counts the attentions itself
        parts += [finding.text for finding in report.findings if finding.section == "fusion"]
    for engine in [each.runtime.engine for each in ran] or not_run:
        if engine is not None and not ran and not engine.is_confirmed:
            parts.append("fusion and precision not verified")
        elif engine is not None:
            parts += [engine.manifest.fusion_summary, engine.manifest.precision_summary]
    for point in report.points[:1]:
        rows = [row for row in point.rows if row.name == (ran or judged)[0].runtime.name]
        for p50, row in ((row.timing.p50, row) for row in rows if row.timing):
            parts.append(f"{p50:.1f} µs")
            ratio, best = point.figures(row)["speedup_over_best_pytorch"], point.best_pytorch
            if ratio is not None and best is not None:
                parts.append(f"{ratio:.2f} × the speed of the best PyTorch ({best.name})")
    sizes = [text for kind, text in missing if kind == "coverage"]
    more = f" and {len(sizes) - _SHOWN_MISSING} more" if len(sizes) > _SHOWN_MISSING else ""
    parts += [f"{NOT_VERIFIED}: {', '.join(sizes[:_SHOWN_MISSING])}{more}"] if sizes else []
    return ", ".join(parts)


def _outputs(evaluation: Evaluation) -> str:
    outputs, attentions = (
        [v.passed for r in evaluation.parity if (r.cases == LAYERS) is inside for v in r.verdicts]
        for inside in (False, True)
    )
    text = f"{evaluation.label}: {sum(outputs)}/{len(outputs)} outputs within budget"
    if attentions:
        text += f", {sum(attentions)}/{len(attentions)} attentions right"
    if evaluation.not_decoded_because is not None:
        return f"{text}, not decoded"
    steps = sum(report.steps for report in evaluation.decode_reports)
    return f"{text}, right at all {steps} decode steps" if steps else text


def _about_runtimes(evaluations: Sequence[Evaluation]) -> Iterator[Finding]:
    """Wrong outputs, decode steps and batch slots."""

    def shown(verdict: OutputVerdict) -> str:
        hint = verdict.reason and hint_for(verdict.reason.kind, Language.COMMAND_LINE)
        return f"{verdict.case}/{verdict.output}: {verdict.problem}{f'; {hint}' if hint else ''}"

    for each in evaluations:
        for report in each.parity:
            what = "attentions" if report.cases == LAYERS else "outputs"
            for status in ("wrong", NOT_VERIFIED):
                failed = [v for v in report.verdicts if not v.passed and v.is_wrong is (status == "wrong")]
                if failed:
                    text = f"{each.label} is {status} on {len(failed)} of {len(report.verdicts)} {what}"
                    yield Finding(FAILURE, "parity", f"{text} ({report.cases}; {shown(failed[0])})")
    for each in evaluations:
        if each.not_decoded_because is not None:
            yield Finding(WARNING, "decode", f"{each.label} decoded no tokens: {each.not_decoded_because}")
        for decoded in each.decode_reports:
            if not decoded.passed:
                first = max(decoded.failures, key=lambda failure: failure.is_wrong)
                status = "decodes wrongly" if first.is_wrong else f"is {NOT_VERIFIED} when decoding"
                yield Finding(FAILURE, "decode", f"{each.label} {status} ({shown(first)})")
    for each in evaluations:
        for check in each.invariance:
            if not check.passed:
                text = f"{each.label}: {check.check} changes the answer ({check.case}, {check.problem})"
                yield Finding(FAILURE, "invariance", text)


def _about_engines(
    report: ValidationRecord, absent: Sequence[Unavailable], options: ValidateOptions
) -> Iterator[Finding]:
    engines, required = report.engines, options.require_fused or options.require_precision
    if not engines and required:
        yield Finding(FAILURE, "fusion", "the bundle has no engine that could be fused or in its precision")
    for name, manifest in ((engine.path.stem, engine.manifest) for engine in engines):
        if not manifest.all_fused:
            level = FAILURE if options.require_fused else WARNING
            yield Finding(level, "fusion", f"engine {name}: {manifest.fusion_summary}")
        if not manifest.is_in_precision:
            level = FAILURE if options.require_precision else WARNING
            # What the device chooses cannot be known before the engine is loaded.
            level = NOTE if manifest.has_requested_types else level
            yield Finding(level, "precision", f"engine {name}: {manifest.precision_summary}")
        if narrowed := manifest.verdict.precision.narrowed:  # which may overflow
            text = f"engine {name} multiplies {len(narrowed)} matmuls in fewer bits than the graph"
            yield Finding(WARNING, "precision", text)
        for each in absent:
            if each.name == name:
                text = f"engine {name} was built and inspected, but not run: {each.reason}"
                yield Finding(NOTE, "engine", text)
    for engine in engines:  # of which nothing is known but what their manifests claim
        ran = any(each.runtime.engine is engine and each.parity for each in report.evaluations)
        if not ran and not engine.is_confirmed:
            why = "it did not run here, and only TensorRT can read its plan"
            text = f"fusion and precision of engine {engine.path.stem} are not verified: {why}"
            yield Finding(FAILURE if required else WARNING, "fusion", text)


def _about_range(ranges: RangeReport | None) -> Iterator[Finding]:
    """One sentence for all attentions of which the same is true, in the words of the first.

    Where only the numbers differ, the one with the least headroom comes first.
    """
    if ranges is None:
        return
    found = [
        (node, each.status, f"{each.what}; {'; '.join(each.advice)}")
        for node in ranges.nodes
        for each in node.findings
        if each.status != "ok"
    ]
    # What FP16 could not hold is no trouble for a model in another precision.
    level = WARNING if ranges.precision == "fp16" else NOTE
    for alike in group_by(found, lambda each: (each[1], without_numbers(each[2]))):
        if len({text for _, _, text in alike}) > 1:
            alike.sort(key=lambda each: each[0].headroom)
        yield Finding(
            level, "range", f"{summarize_names([node.node for node, _, _ in alike])}: {alike[0][2]}"
        )


def _about_latency(points: Sequence[LatencyPoint]) -> Iterator[Finding]:
    for point in points:
        best, place = point.best_pytorch, ", ".join(f"{axis}={size}" for axis, size in point.sizes.items())
        for row in point.rows:
            ratio = point.figures(row)["speedup_over_best_pytorch"]
            if row.family == TENSORRT and ratio is not None and ratio < 1 and best is not None:
                text = f"{row.name} is {1 / ratio:.2f} × slower than {best.name} at {place}"
                yield Finding(WARNING, "latency", text)
            if row.timing is not None and not row.timing.stable:
                yield Finding(WARNING, "latency", f"the time of {row.name} at {place} did not settle")


def _about_load(point: Mapping[str, Any], options: ValidateOptions) -> Iterator[Finding]:
    """What a server under load shows besides wrong results."""
    failed, clients, requests = dict(point["errors"]), plural(point["clients"], "client"), point["requests"]
    unsent = failed.pop("not sent", 0)
    if failed:
        counts = ", ".join(f"{count} {kind}" for kind, count in failed.items())
        left = f"; {unsent} were not sent any more" if unsent else ""
        text = f"{clients}: {sum(failed.values())} of {requests} requests failed ({counts}){left}"
        yield Finding(FAILURE, "serving", f"{text}: {point['first_error']}")
    elif unsent:
        answered = f"{point['answered']} of {requests} requests"
        text = f"{clients}: the limit of {options.limit_s:g} s was reached after {answered}"
        yield Finding(WARNING, "serving", text)
