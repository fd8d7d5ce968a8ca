"""The manifest of a bundle: what it is, what it holds, and what made it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mha_deploy.errors import BundleError
from mha_deploy.model.deployable import ModuleSpec, spec_from_dict
from mha_deploy.model.precision import Precision, find_precision
from mha_deploy.model.spec import AttentionSpec, ModelSpec

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class GoldenEntry:
    """What the manifest says of one golden case; `flops` of a module, as PyTorch counts it."""

    name: str
    file: str
    sizes: Mapping[str, int]
    note: str = ""
    flops: int = 0


@dataclass(frozen=True, kw_only=True)
class TraceEntry:
    """What the manifest says of one decode trace."""

    name: str
    file: str


@dataclass(frozen=True, kw_only=True)
class LayersEntry:
    """What the manifest says of a look inside a module: the result of every attention in one golden case.

    Args:
        case: The golden case whose inputs they belong to.
        file: Where they are.
        values: For every attention node, the value of the graph that was kept.
    """

    case: str
    file: str
    values: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a bundle is.

    Args:
        spec: The layer or the user's module, with the axes it was exported for.
        precision: The types in the graph.
        opset: Version of the default ONNX operator set.
        weights: Where the weights came from, for people: a seed or a file name and its hash.
        attention: The fused attention nodes, as found in the graph.
        golden: The golden cases.
        checks: What the export checked of its own work, and how.
        versions: Versions of everything that took part.
        files: Size and SHA-256 of every file but the manifest.
        notes: What a reader should know, such as golden cases that were left out.
        traces: The decode traces, of a layer with a cache.
        layers: A look inside, of a user's module.
    """

    spec: AttentionSpec | ModuleSpec
    precision: Precision
    opset: int
    weights: str
    attention: list[dict[str, Any]]
    golden: list[GoldenEntry]
    checks: dict[str, Any]
    versions: dict[str, str]
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    traces: list[TraceEntry] = field(default_factory=list)
    layers: LayersEntry | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "format": FORMAT,
            "spec": self.spec.to_dict(),
            "precision": self.precision.name,
            "opset": self.opset,
            "weights": self.weights,
            "attention": self.attention,
            "golden": [vars(entry) for entry in self.golden],
            "traces": [vars(entry) for entry in self.traces],
            **({} if self.layers is None else {"layers": vars(self.layers)}),
            "checks": self.checks,
            "versions": self.versions,
            "files": dict(self.files),
            "notes": self.notes,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Manifest:
        """Read plain data, refusing another format."""
        if data.get("format") != FORMAT:
            raise BundleError(
                "The bundle has another format.",
                got=f"format {data.get('format')!r}",
                hint=f"this version reads format {FORMAT}: export again with it",
            )
        spec = spec_from_dict(data["spec"])
        if not all(isinstance(node, Mapping) for node in data["attention"]) or not data["golden"]:
            raise TypeError("attention nodes or golden cases are missing")
        if not isinstance(data["weights"], str) or type(data["opset"]) is not int:
            raise TypeError("weights must be text, and opset a number")
        return cls(
            spec=spec,
            precision=find_precision(data["precision"]),
            opset=data["opset"],
            weights=data["weights"],
            attention=data["attention"],
            golden=[_golden_entry(entry, spec) for entry in data["golden"]],
            checks=data["checks"],
            versions=data["versions"],
            files={
                name: {"bytes": entry["bytes"], "sha256": entry["sha256"]}
                for name, entry in data["files"].items()
            },
            notes=[str(note) for note in data["notes"]],
            traces=[_trace_entry(entry) for entry in data.get("traces", ())],
            layers=_layers_entry(data.get("layers")),
        )


def _golden_entry(data: Mapping[str, Any], spec: ModelSpec) -> GoldenEntry:
    entry = GoldenEntry(**data)
    if not all(isinstance(text, str) for text in (entry.name, entry.file, entry.note)):
        raise TypeError(f"golden case {data}")
    spec.check_sizes(entry.sizes)
    return entry


def _layers_entry(data: Mapping[str, Any] | None) -> LayersEntry | None:
    if data is None:
        return None
    entry = LayersEntry(**data)
    if not all(isinstance(text, str) for text in (entry.case, entry.file, *entry.values.values())):
        raise TypeError(f"layers {data}")
    return entry


def _trace_entry(data: Mapping[str, Any]) -> TraceEntry:
    entry = TraceEntry(**data)
    if not isinstance(entry.name, str) or not isinstance(entry.file, str):
        raise TypeError(f"trace {data}")
    return entry
