"""The manifest of a bundle: what it is, what it holds, and what made it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from mha_deploy.errors import BundleError
from mha_deploy.model.deployable import spec_from_dict
from mha_deploy.model.precision import find_precision

if TYPE_CHECKING:
    from mha_deploy.model.deployable import ModuleSpec
    from mha_deploy.model.precision import Precision
    from mha_deploy.model.spec import AttentionSpec

    Spec = AttentionSpec | ModuleSpec
else:  # msgspec reads the types on disk; `from_dict` makes the objects
    Spec, Precision = dict[str, Any], str

FORMAT = 2


class FileEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size and hash of a file of the bundle."""

    bytes: int
    sha256: str


class GoldenEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A golden case; `flops` of a module, as PyTorch counts it."""

    name: str
    file: str
    sizes: dict[str, int]
    note: str = ""
    flops: int = 0


class TraceEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decode trace."""

    name: str
    file: str


class LayersEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of every attention of a module in one golden case.

    Args:
        case: The golden case whose inputs they belong to.
        file: The arrays.
        values: For every attention node, the value of the graph that was kept.
    """

    case: str
    file: str
    values: dict[str, str]


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
        traces: The decode traces of a layer with a KV cache.
        layers: The results inside a user's module.
        format: Version of the bundle format.
    """

    format: int = FORMAT
    spec: Spec
    precision: Precision
    opset: int
    weights: str
    attention: list[dict[str, Any]]
    golden: Annotated[list[GoldenEntry], Meta(min_length=1)]
    traces: list[TraceEntry] = field(default_factory=list)
    layers: LayersEntry | None = None
    checks: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, FileEntry] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain = {"spec": self.spec.to_dict(), "precision": self.precision.name}
        return msgspec.to_builtins({**msgspec.structs.asdict(self), **plain})

    @classmethod
    def from_dict(cls, data: object) -> Manifest:
        """Read plain data.

        Raises:
            BundleError: The bundle has another format.
            msgspec.ValidationError: A field is missing, unknown or of the wrong type.
        """
        if isinstance(data, Mapping):
            if (found := data.get("format")) != FORMAT:
                raise BundleError(
                    "The bundle has another format.",
                    got=f"format {found!r}",
                    hint=f"this version reads format {FORMAT}: export again with it",
                )
            if missing := [name for name in cls.__struct_fields__ if name not in data]:
                raise msgspec.ValidationError(f"Object missing required field `{missing[0]}`")
        read = msgspec.convert(data, cls)
        spec = spec_from_dict(read.spec)  # type: ignore[arg-type]  # still as on disk
        for entry in read.golden:
            spec.check_sizes(entry.sizes)
        return msgspec.structs.replace(read, spec=spec, precision=find_precision(read.precision))  # type: ignore[arg-type]
