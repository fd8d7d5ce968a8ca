"""The manifest of a bundle: what it is, what it holds, and what made it."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from dataclasses import field as dataclass_field
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, get_type_hints

import msgspec
from msgspec import Meta, Struct, field

from mha_deploy.errors import BundleError, DeployError
from mha_deploy.files import PathPart
from mha_deploy.model.layer import AttentionSpec
from mha_deploy.model.precision import EIGHT_BITS, find_precision
from mha_deploy.model.spec import ON_DISK, ModelSpec, ModuleSpec, axes_from, refuse_unknown, require
from mha_deploy.status import means
from mha_deploy.text import types_text

if TYPE_CHECKING:
    from mha_deploy.model.precision import Precision

    Spec = ModelSpec
else:  # msgspec reads the types on disk; `from_dict` makes the objects
    Spec, Precision = dict[str, Any], str

FORMAT = 3

Count = Annotated[int, Meta(ge=0)]
Dim = int | str | None
"""A dimension: a number, the name of a dynamic axis, or None where the graph does not state it."""
GENERATED = "unk__"
"""Begins ONNX's names for dimensions that it does not know."""


class FileEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size and hash of a file of the bundle."""

    bytes: Count
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True)
class AttentionNode:
    """One `Attention` node of an ONNX graph."""

    name: str  # name of the node; its first output's name where it has none
    graph: str  # name of its graph or function
    opset: int | None  # version of the ONNX operator set it is written in
    rank: int | None  # 3 for `[B, S, Hq·D]`, 4 for `[B, Hq, S, D]`
    dtype: str | None  # type of Q, K and V: `fp16`, `bf16`, `fp32` or `fp64`
    B: Dim  # batch
    S: Dim  # query length
    T: Dim  # length of the K input, without the past
    Hq: Dim  # query heads
    Hkv: Dim  # key/value heads
    D: Dim  # head size of queries and keys
    Dv: Dim  # head size of values
    scale: float | None  # factor on the scores as written; None for the default
    is_causal: bool  # whether a query attends only to keys up to its own position
    mask: str  # `none`, `bool`, `float`, `int`, or `unknown` where the graph does not state its type
    mask_dtype: str | None  # type of the mask, by its short name
    mask_dims: tuple[Dim, ...] | None  # dimensions of the mask
    has_past: bool  # whether past keys and values are inputs
    past_length: Dim  # length of the past
    has_present: bool  # whether the concatenated keys or values are outputs
    has_nonpad_kv_seqlen: bool  # whether each batch element has its own number of valid keys
    # Which stage of the scores is the fourth output, 0 to 3; None where it is not used
    qk_output_mode: int | None
    softcap: float  # bound of the scores; 0 for none
    softmax_precision: str | None  # type the softmax is computed in; None for the default
    left_window: int  # how many earlier keys a query attends to; -1 for all
    right_window: int  # how many later keys a query attends to; -1 for all
    # The type that Q and K are dequantized from, `int8` or `fp8`; None where they are not quantized
    quantized: str | None = None
    # Whether its weights are quantized as well, and what becomes of the heads
    quantizes_weights: bool = False
    quantizes_output: bool = False
    # Whether nodes of the graph compute the numbers of the mask
    computes_mask: bool = dataclass_field(default=False, metadata={"stored": False})
    # How many of Q, K and V are FP16 or BF16, upcast to FP32
    upcasts: int = dataclass_field(default=0, metadata={"stored": False})

    @property
    def kind(self) -> str | None:
        """The head layout by its usual name, where the heads are known."""
        if self.group is None:
            return None
        return "MHA" if self.Hq == self.Hkv else "MQA" if self.Hkv == 1 else "GQA"

    @property
    def group(self) -> int | None:
        """How many query heads share one key/value head."""
        if not isinstance(self.Hq, int) or not isinstance(self.Hkv, int):
            return None
        return self.Hq // self.Hkv

    @property
    def has_dynamic_heads(self) -> bool:
        """Whether the number or the size of the heads is that of a dynamic axis."""
        sizes = (self.Hq, self.Hkv, self.D, self.Dv)
        return any(isinstance(size, str) and GENERATED not in size for size in sizes)

    @property
    def softmax_scale(self) -> float | None:
        """The factor on the scores: the written one; default: 1/sqrt(D)."""
        if self.scale is not None:
            return self.scale
        return 1.0 / math.sqrt(self.D) if isinstance(self.D, int) else None

    @property
    def has_qk_output(self) -> bool:
        """Whether the scores or weights are an output."""
        return self.qk_output_mode is not None

    @property
    def shows_scores(self) -> bool:
        """Whether they are an output for something else than to be quantized and multiplied with V."""
        return self.has_qk_output and not self.quantizes_weights

    @property
    def has_window(self) -> bool:
        """Whether a query attends only to a window of keys."""
        return self.left_window >= 0 or self.right_window >= 0

    @property
    def mask_may_be_short(self) -> bool:
        """Whether the mask may have fewer columns than there are keys; the others are then masked."""
        if not self.mask_dims:
            return False
        columns, past, new = self.mask_dims[-1], self.past_length if self.has_past else 0, self.T
        if isinstance(columns, int) and isinstance(past, int) and isinstance(new, int):
            return columns < past + new
        if (self.opset or 24) < 24:
            return False  # it has no short masks
        if columns is None or str(columns).startswith(GENERATED):
            # Not stated: it was computed to fit, unless the keys are a cache of which only a part is valid.
            return self.has_nonpad_kv_seqlen
        totals = (f"{past} + {new}", f"{new} + {past}") if self.has_past else (new,)
        return columns not in totals

    def describe(self) -> dict[str, Any]:
        """The record as plain data for JSON, with the derived values.

        What only a check reads from the graph is not stored: manifests of earlier versions do not have it.
        """
        derived = {"kind": self.kind, "softmax_scale": self.softmax_scale}
        return {name: value for name, value in asdict(self).items() if name in _stored()} | derived


def _stored() -> set[str]:
    """The fields of an `AttentionNode` that a manifest has."""
    return {each.name for each in fields(AttentionNode) if each.metadata.get("stored", True)}


if TYPE_CHECKING:
    AttentionRecord = dict[str, Any]
else:
    _WRITTEN = {name: hint for name, hint in get_type_hints(AttentionNode).items() if name in _stored()}

    class AttentionRecord(
        TypedDict("_Attention", {**_WRITTEN, "kind": str | None, "softmax_scale": float | None}),
        total=False,
    ):
        """What `AttentionNode.describe` writes; of a module also its line of source."""

        place: str | None


class Source(enum.Enum):
    """What computed a reference: the user's own model, never the graph, engine or server under test."""

    LAYER = "layer"  # a catalog layer, in PyTorch
    PROGRAM = "program"  # the exported program of a user's module
    FILE = "file"  # the user's ONNX file, as it was given


class GoldenEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A golden case; `flops` of a module, as PyTorch counts it."""

    name: str
    file: str
    sizes: dict[str, Count]
    source: Source  # what its reference and its baselines come from
    note: str = ""
    flops: Count = 0
    suspects: dict[str, list[str]] = field(default_factory=dict)  # mistakes, and the outputs they change
    excess: dict[str, float] = field(default_factory=dict)  # mistakes that are a factor, and how far from 1


class TraceEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decode trace."""

    name: str
    file: str
    source: Source


class LayersEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of every attention of a module in one golden case."""

    case: str  # the golden case whose inputs they belong to
    file: str  # the arrays
    source: Source
    values: dict[str, str]  # for every attention node, the value of the graph that was kept


Checks = TypedDict(
    "Checks",
    {"graph": list[str], "dynamic axes": dict[str, Any], "mixed precision": dict[str, Any]},
    total=False,
)
"""What the export checked of its own work; `mixed precision` is the plan of `--precision auto`."""


class Perturbation(enum.Enum):
    """What is done to an attention, to find out whether the outputs of its model show it."""

    ZERO = "zero"
    HEAD = "one head zero"
    MASK = "mask dropped"
    SCALE = "scale off by 2 %"
    BF16 = "BF16 arithmetic"
    BF16_IN_HALF = "BF16 arithmetic where GEMMs accumulate in FP16"


class ObservedRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which perturbations of an attention the outputs of a golden case show, beyond their budgets."""

    name: str  # the attention node
    case: str  # the golden case; empty where it was not tried
    shown: list[Perturbation]
    hidden: list[Perturbation]  # for these its own result must be judged

    def is_hidden(self, accumulate: str) -> bool:
        """Whether its own result must be judged in a runtime whose GEMMs accumulate in a type."""
        return any(kind is not Perturbation.BF16_IN_HALF or accumulate == "fp16" for kind in self.hidden)


class UnfusedRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An attention that is not one node of the graph."""

    name: str  # the module it came from, else the softmax node
    reason: str  # why it could not be written as one node
    place: str | None = None  # source file and line, where they are known
    value: str = ""  # the value of the graph that has its weights, or what stands in their place


class ShrunkRange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An axis that could not vary as requested: the bundle is for fewer sizes."""

    axis: str
    requested_min: Count
    requested_max: Count
    min: Count  # of the bundle
    max: Count
    reason: str  # why


class LossOutput(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The distance of an output of a compressed model from the original output, in FP64, over all samples."""

    name: Annotated[str, means("name of the output")]
    relative_l2: Annotated[
        float | None, means("‖compressed − original‖ / ‖original‖ over all samples; null for integers")
    ]
    sqnr_db: Annotated[
        float | None, means("the same as a signal-to-noise ratio, dB; null if nothing differs")
    ]
    top1: Annotated[
        float | None,
        means(
            "for logits: share of positions with the same top-1; for integers: share of equal values; "
            "otherwise null"
        ),
    ] = None
    kl: Annotated[
        float | None,
        means("for logits: mean Kullback-Leibler divergence from the original, nats; otherwise null"),
    ] = None


class LossLayer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One part of a model that may be compressed."""

    name: Annotated[str, means("the GEMM, or the attention")]
    heads: Annotated[
        tuple[int, int] | None,
        means("the first and the last head of an attention that go together; null for another part"),
    ] = None
    is_compressed: Annotated[bool, means("whether it is compressed")]
    relative_l2: Annotated[
        float | None,
        means("relative L2 between its own result and that of the original; null if it was removed"),
    ]
    sqnr_db: Annotated[float | None, means("the same in dB; null if nothing differs")]
    alone: Annotated[
        float | None,
        means("the loss of the outputs with only this part compressed; null if it was not tried"),
    ]


class LossPoint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step of the search: how many parts were compressed, and at what loss."""

    compressed: Annotated[Count, means("parts that were compressed")]
    share: Annotated[float, means("their share of the weights of all parts")]
    loss: Annotated[float, means("the loss of that choice")]
    is_chosen: Annotated[bool, means("whether it was exported")] = False


class LossMetric(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The user's own metric: its mean over the samples, both models in FP64."""

    name: Annotated[str, means("the function")]
    original: Annotated[float, means("its mean for the original")]
    compressed: Annotated[float, means("its mean for the compressed model")]


class LossRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was compressed, and the intended difference from the original model, both in FP64."""

    what: Annotated[str, means("what was compressed: `int8`, `fp8`, `heads` or `kv-heads`")]
    calibration: Annotated[
        str, means("how the ranges of activations were found; empty if there are none")
    ] = ""
    data: Annotated[str, means("where the samples came from")]
    samples: Annotated[Count, means("samples that the loss was measured on")]
    outside: Annotated[
        dict[str, dict[str, Count]],
        means("the samples outside the axes, which were not used: of each, the sizes that are, by axis"),
    ] = field(default_factory=dict)
    held_out: Annotated[
        bool,
        means("whether these samples were held out from calibration and ranking; a limit holds on both sets"),
    ] = False
    outputs: Annotated[list[LossOutput], means("one for every output")]
    layers: Annotated[
        list[LossLayer], means("one for every part that was tried, and for every other GEMM with a weight")
    ]
    search: Annotated[
        list[LossPoint], means("the choices that were tried to meet a limit; empty without a limit")
    ] = field(default_factory=list)
    limit: Annotated[float | None, means("the largest loss that the user allows; null without a limit")] = (
        None
    )
    metric: Annotated[LossMetric | None, means("the user's own metric; null if there is none")] = None

    @property
    def worst(self) -> float:
        """The loss in one number."""
        return largest_loss(self.outputs)


def largest_loss(outputs: Iterable[LossOutput]) -> float:
    """The largest relative L2 of an output, or share of whole numbers."""
    known = ((each.relative_l2, each.top1 or 0.0) for each in outputs)
    return max((1.0 - same if l2 is None else l2 for l2, same in known), default=0.0)


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a bundle is."""

    format: int = FORMAT  # version of the bundle format
    spec: Spec  # the layer or the user's module, with the axes it was exported for
    precision: Precision  # the types in the graph
    opset: Annotated[int, Meta(ge=1, le=1000)]  # version of the default ONNX operator set
    weights: str  # where the weights came from, for people: a seed or a file name and its hash
    attention: list[AttentionRecord]  # the fused attention nodes, as found in the graph
    # The attentions that are no node of the graph
    unfused: list[UnfusedRecord] = field(default_factory=list)
    shrunk: list[ShrunkRange] = field(default_factory=list)  # the axes that vary less than requested
    golden: Annotated[list[GoldenEntry], Meta(min_length=1)]  # the golden cases
    traces: list[TraceEntry] = field(default_factory=list)  # the decode traces of a layer with a KV cache
    layers: LayersEntry | None = None  # the results inside a user's module
    observed: list[ObservedRecord]  # of every attention node, what the outputs show
    loss: LossRecord | None = None  # of a compressed model: what differs from the original, by intention
    checks: Checks  # what the export checked of its own work, and how
    versions: dict[str, str]  # versions of everything that took part
    # Size and SHA-256 of every file but the manifest
    files: dict[str, FileEntry] = field(default_factory=dict)
    lists_engines: bool = True  # whether `engines.json` has what was built from it; once it was not written
    # What a reader should know, such as golden cases that were left out
    notes: list[str] = field(default_factory=list)

    @property
    def quantized(self) -> str | None:
        """The type of eight bits that GEMMs were quantized to; None where they were not."""
        return self.loss.what if self.loss is not None and self.loss.what in EIGHT_BITS else None

    @property
    def requested_types(self) -> str:
        """The precision; `fp8/fp16` where GEMMs were quantized."""
        return types_text(self.precision.name, self.quantized)

    @property
    def judged_by_outputs(self) -> list[str]:
        """The attentions of a module whose own results are not stored; none of a catalog layer."""
        if self.spec.draws_probes:
            return []
        stored = {} if self.layers is None else self.layers.values
        return [each.name for each in self.observed if each.name not in stored]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain = {"spec": self.spec.to_dict(), "precision": self.precision.name}
        return msgspec.to_builtins({**msgspec.structs.asdict(self), **plain})

    @classmethod
    def from_dict(cls, data: object) -> Manifest:
        """Read plain data."""
        if isinstance(data, Mapping):
            if (found := data.get("format")) != FORMAT:
                got, hint = f"format {found!r}", f"this version reads format {FORMAT}: export again with it"
                raise BundleError("The format of the bundle is not supported.", got=got, hint=hint)
            data = {"lists_engines": False, **data}
            if missing := [name for name in cls.__struct_fields__ if name not in data]:
                raise msgspec.ValidationError(f"Object missing required field `{missing[0]}`")
        read = msgspec.convert(data, cls)
        spec = _spec_from(read.spec)  # type: ignore[arg-type]  # still as on disk
        for entry in read.golden:
            spec.check_sizes(entry.sizes)
        for entries in (read.golden, read.traces):
            try:
                names = [PathPart(each.name, "a case") for each in entries]
            except DeployError as error:
                raise msgspec.ValidationError(error.in_one_line) from error
            if len(set(names)) < len(names):
                raise msgspec.ValidationError(f"Expected distinct names, got {names}")
        return msgspec.structs.replace(read, spec=spec, precision=find_precision(read.precision))  # type: ignore[arg-type]


_REQUIRED = (
    *("name", "factory", "axes", "tensors_in", "tensors_out", "attentions"),
    *("flops", "weight_bytes", "state_sha256"),
)


def _spec_from(data: Mapping[str, Any]) -> ModelSpec:
    """Read what `to_dict` of a spec wrote, refusing what it does not know."""
    if "factory" not in data:
        return AttentionSpec.from_dict(data)
    names = {ON_DISK.get(item.name, item.name): item.name for item in fields(ModuleSpec)}
    refuse_unknown("the spec", data, tuple(names))
    require("the spec", data, _REQUIRED)
    for tensor in (*data["tensors_in"], *data["tensors_out"]):
        refuse_unknown("a tensor", tensor, ("name", "kind", "dims"))
    plain = {names[key]: value for key, value in data.items()}
    return msgspec.convert({**plain, "axes": axes_from(data["axes"])}, ModuleSpec)
