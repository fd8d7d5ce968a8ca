"""The manifest of a bundle: what it is, what it holds, and what made it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

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

Count = Annotated[int, Meta(ge=0)]
Dim = int | str | None


class FileEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size and hash of a file of the bundle."""

    bytes: Count
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class _Attention(TypedDict):
    name: str
    graph: str
    opset: int | None
    rank: int | None
    dtype: str | None
    B: Dim
    S: Dim
    T: Dim
    Hq: Dim
    Hkv: Dim
    D: Dim
    Dv: Dim
    scale: float | None
    is_causal: bool
    mask: str
    mask_dtype: str | None
    mask_dims: list[Dim] | None
    has_past: bool
    past_length: Dim
    has_present: bool
    has_nonpad_kv_seqlen: bool
    qk_output_mode: int | None
    softcap: float
    softmax_precision: str | None
    left_window: int
    right_window: int
    kind: str | None
    softmax_scale: float | None


class AttentionRecord(_Attention, total=False):
    """An `Attention` node as `graph.attention_node` reads it; of a module also its line of source."""

    place: str | None


class GoldenEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A golden case; `flops` of a module, as PyTorch counts it."""

    name: str
    file: str
    sizes: dict[str, Count]
    note: str = ""
    flops: Count = 0


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


Checks = TypedDict(
    "Checks",
    {"graph": list[str], "dynamic axes": dict[str, Any], "mixed precision": dict[str, Any]},
    total=False,
)
"""What the export checked of its own work; `mixed precision` is the plan of `--precision auto`."""


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
    opset: Annotated[int, Meta(ge=1, le=1000)]
    weights: str
    attention: list[AttentionRecord]
    golden: Annotated[list[GoldenEntry], Meta(min_length=1)]
    traces: list[TraceEntry] = field(default_factory=list)
    layers: LayersEntry | None = None
    checks: Checks
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
        for entries in (read.golden, read.traces):
            names = [each.name for each in entries]
            if len(set(names)) < len(names):
                raise msgspec.ValidationError(f"Expected distinct names, got {names}")
        return msgspec.structs.replace(read, spec=spec, precision=find_precision(read.precision))  # type: ignore[arg-type]
