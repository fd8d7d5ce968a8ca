"""Everything a validation found, and the verdict that follows from it."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mha_deploy import __version__
from mha_deploy.backends.cuda import find_gpu
from mha_deploy.backends.nvml import driver_version
from mha_deploy.bundle import MANIFEST, Bundle, sha256
from mha_deploy.engine.machine import where_built
from mha_deploy.engine.record import Engine
from mha_deploy.engine.told import attention_told, libraries_told
from mha_deploy.report.schema import FORMAT
from mha_deploy.validate.blame import Blame
from mha_deploy.validate.conformance import ConformanceTable
from mha_deploy.validate.examine import Examination
from mha_deploy.validate.fp16_range import RangeReport
from mha_deploy.validate.latency import LatencyPoint
from mha_deploy.validate.participants import Absent
from mha_deploy.versions import RUN_PACKAGES, versions


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One sentence of the verdict.

    Args:
        level: `failure`, `warning` or `note`.
        section: The part of the report that has the evidence.
        text: The sentence.
    """

    level: str
    section: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """A validation.

    Args:
        bundle: What was validated.
        examinations: Everyone who took part.
        absent: Who could not, and why.
        engines: The engines of the bundle.
        points: Latencies.
        ranges: How near FP16's limit the attention comes.
        conformance: The table of masks, where it was asked for.
        blame: What is at fault, where an engine is wrong.
        findings: The verdict's sentences.
        headline: The verdict in one line.
        notes: What a reader should know besides.
    """

    bundle: Bundle
    examinations: tuple[Examination, ...]
    absent: tuple[Absent, ...]
    engines: tuple[Engine, ...]
    points: tuple[LatencyPoint, ...]
    ranges: RangeReport | None
    conformance: ConformanceTable | None
    blame: Blame | None
    findings: tuple[Finding, ...]
    headline: str
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether something was checked and nothing failed."""
        checked = any(examination.parity for examination in self.examinations)
        return checked and not any(finding.level == "failure" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; see docs/report.md."""
        return {
            **frame(),
            "verdict": {
                "passed": self.passed,
                "headline": self.headline,
                "findings": [asdict(finding) for finding in self.findings],
            },
            "model": model_to_dict(self.bundle),
            "parity": [report.to_dict() for each in self.examinations for report in each.parity],
            "heatmaps": [heat.to_dict() for each in self.examinations for heat in each.heatmaps],
            "decode": [report.to_dict() for each in self.examinations for report in each.stepping],
            "invariance": [check.to_dict() for each in self.examinations for check in each.invariance],
            "conformance": None if self.conformance is None else self.conformance.to_dict(),
            "range": None if self.ranges is None else self.ranges.to_dict(),
            "blame": None if self.blame is None else self.blame.to_dict(),
            "engines": engines_to_dict(self.engines, self.absent, self.examinations),
            "latency": latency_to_dict(self.points),
            "notes": [
                *(f"{absent.name} did not take part: {absent.reason}" for absent in self.absent),
                *self.notes,
            ],
        }


def frame() -> dict[str, Any]:
    """What every report begins with: the tool, the time, and the machine."""
    gpu = find_gpu()
    shown = ("name", "compute_capability", "l2_bytes", "memory_bytes")
    return {
        "format": FORMAT,
        "tool": {"name": "mha-deploy", "version": __version__},
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": {
            "gpu": None if gpu is None else {name: getattr(gpu, name) for name in shown},
            "driver": driver_version(),
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
    engines: Sequence[Engine], absent: Sequence[Absent], examinations: Sequence[Examination]
) -> list[dict[str, Any]]:
    """The engines, and whether they were run."""
    reasons = {each.name: each.reason for each in absent}
    ran = {each.participant.name for each in examinations if each.participant.engine is not None}
    return [_engine_to_dict(engine, engine.path.stem in ran, reasons) for engine in engines]


def _engine_to_dict(engine: Engine, ran: bool, reasons: dict[str, str]) -> dict[str, Any]:
    manifest, name = engine.manifest, engine.path.stem
    nodes = [
        {key: node.get(key) for key in ("node", "profile", "status", "kernels", "reason", "source")}
        for node in manifest.verdict["nodes"]
    ]
    return {
        "name": name,
        "backend": manifest.backend,
        "version": manifest.version,
        "precision": manifest.precision,
        "built": where_built(manifest),
        "ran": ran,
        "why_not": None if ran else reasons.get(name, "nobody asked for it"),
        "fused": list(manifest.fused_count),
        "precision_status": manifest.verdict["precision"]["status"],
        "nodes": nodes,
        "seconds": manifest.seconds,
        "engine_bytes": manifest.engine_bytes,
        "profiles": [dict(profile) for profile in manifest.profiles],
        "attention": attention_told(manifest),
        "plugins": libraries_told(manifest),
        "profile_names": [manifest.profile_name(index) for index in range(len(manifest.profiles))],
    }


def latency_to_dict(points: Sequence[LatencyPoint]) -> dict[str, Any] | None:
    """The latencies, and the GPU they were measured on."""
    if not points:
        return None
    gpus = {row.timing.gpu for point in points for row in point.rows if row.timing}
    return {"gpu": ", ".join(sorted(gpus)) or None, "points": [point.to_dict() for point in points]}
