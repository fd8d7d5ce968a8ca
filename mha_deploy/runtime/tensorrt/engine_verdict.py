"""Was attention fused, and is the engine in its precision? Decided by the kernels."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, cast

import onnx_ir as ir
from msgspec import Struct
from msgspec.structs import replace

from mha_deploy.graph.ir import SCORES_SUFFIX, beginnings, constant, dims, is_op
from mha_deploy.graph.plugin_node import LINEAR, fp8_values, multiplies_fp8
from mha_deploy.graph.quantize import quantized_gemms
from mha_deploy.graph.roles import MATMULS, MOVES, QUANTIZERS, RANDOM, SOFTMAXES
from mha_deploy.runtime.tensorrt.kernels import FLOATING, UNKNOWN, EngineTensor, Kernel, dtype_of
from mha_deploy.status import EvidenceSource, ReasonKind, Word, means

# -- The answers, and the reasons for them: data that a renderer puts into words -------------------


class FusionStatus(Word):
    """What became of an attention."""

    FUSED = "fused"
    DECOMPOSED = "decomposed"
    UNKNOWN = "unknown"


class PrecisionStatus(Word):
    """Whether an engine is in the requested precision."""

    VERIFIED = "verified"
    # The types of all inputs, weights and outputs are the requested ones. What multiplies them is chosen when
    # the engine is loaded, so the type is not known yet.
    SELECTED_AT_LOAD = "selected at load"
    MIXED = "mixed"
    UNKNOWN = "unknown"


class EngineReason(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reason for a verdict: its kind, its place, what was found there, and what was wanted."""

    kind: Annotated[
        ReasonKind,
        means("what kind of reason, such as `hidden region`, `foreign plugin`, `matmul of no known node`"),
    ]
    place: Annotated[str, means("a kernel, a node or a region")] = ""
    got: Annotated[str, means("what was found there, or what the first of two sources reports")] = ""
    wanted: Annotated[str, means("what was wanted, or what the second source reports")] = ""
    names: Annotated[
        tuple[str, ...], means("the nodes that a kernel names, or the two sources that disagree")
    ] = ()


# -- The types of the nodes in the graph: what a builder changed is not what the graph requests ----

_MATMULS = frozenset({*MATMULS, LINEAR})
_SOFTMAXES = frozenset({*SOFTMAXES, "ReduceLogSumExp"})
_QUANTIZERS = frozenset({*QUANTIZERS, "DynamicQuantizeLinear"})
_DOMAINS = ("", "ai.onnx")

# Numbers that were quantized: of a matmul also UINT8, which elsewhere is an image or a mask.
_QUANTIZED = frozenset({"int8", "int4", "fp8", "fp4"})
_QUANTIZED_OF_MATMUL = _QUANTIZED | {"uint8"}


@dataclass(frozen=True, kw_only=True)
class WrittenTypes:
    """What the graph states of one node: the floating-point and quantized types of its inputs and outputs."""

    reads: frozenset[str]
    writes: frozenset[str]
    is_matmul: bool  # or a convolution, or attention
    is_softmax: bool = False
    is_attention: bool = False
    # All of its inputs are constants, or it multiplies zeros, however many, by one: a builder computes it.
    is_constant: bool = False
    is_custom: bool = False  # not an operator of ONNX
    # Of a matmul, the type from which both its factors are dequantized; of Q/DQ nodes their type.
    quantized: str | None = None
    twin_of: str = ""  # the first node that computes the same from the same inputs: a builder merges the two


Written = Mapping[str, WrittenTypes]
"""The types of the nodes, by TensorRT's names for them, in the order of the graph."""


_LARGE = 2**16  # numbers of a constant that are compared with another one
_PLAIN = frozenset(
    getattr(ir.AttributeType, name) for name in ("INT", "INTS", "FLOAT", "FLOATS", "STRING", "STRINGS")
)


def _twins(model: ir.Model) -> dict[ir.Node, ir.Node]:
    """The nodes that compute what an earlier one does: operator, attributes and inputs are equal."""
    numbers: dict[ir.Value, int] = {}  # equal values have equal numbers
    known: dict[Hashable, int] = {}
    first: dict[Hashable, ir.Node] = {}
    twins: dict[ir.Node, ir.Node] = {}

    def number(value: ir.Value | None) -> int:
        if value is not None and value not in numbers:
            held, key = constant(value), cast(Hashable, value)
            if held is not None and held.size <= _LARGE and held.dtype != ir.DataType.STRING:
                key = (held.dtype, tuple(held.shape), held.tobytes())
            numbers[value] = known.setdefault(key, len(known))
        return -1 if value is None else numbers[value]

    for node in model.graph:
        attributes = node.attributes.values()
        is_plain = all(each.type in _PLAIN and not each.is_ref() for each in attributes)
        if is_op(node, "Identity"):
            numbers[node.outputs[0]] = number(node.inputs[0])
        elif is_plain and node.domain in _DOMAINS and node.op_type not in (*RANDOM, "Constant"):
            # The shapes of two values are equal if their sizes are, whatever the values are.
            sizes = dims(node.inputs[0]) if is_op(node, "Shape") else ()
            inputs = ("sizes", *sizes) if sizes and None not in sizes else tuple(map(number, node.inputs))
            key = (node.op_type, frozenset((each.name, str(each.value)) for each in attributes), inputs)
            if first.setdefault(key, node) is not node:
                twins[node] = first[key]
            for at, value in enumerate(node.outputs):
                numbers[value] = known.setdefault((key, at), len(known))
    return twins


def _unread(model: ir.Model) -> set[ir.Node]:
    """The nodes of whose results at most the sizes are read."""
    found = set[ir.Node]()
    for node in reversed(model.graph):
        uses = [use.node for value in node.outputs for use in value.uses()]
        is_output = any(value.is_graph_output() for value in node.outputs)
        if not is_output and all(is_op(user, "Shape", "Size") or user in found for user in uses):
            found.add(node)
    return found


_KEEP_ZEROS = (*MOVES, "Cast", "Expand", "Slice", "Split", "Tile")


def _is_zeros(node: ir.Node, zeros: Container[ir.Value | None]) -> bool:
    """Whether a node gives nothing but zeros, as many as sizes say: `zeros_like`, and what is made of it.

    TensorRT knows it of zeros alone: a row of other numbers that is repeated is multiplied every time.
    """

    def given(value: ir.Value | None) -> bool:
        held = constant(value)
        is_small = held is not None and held.size <= _LARGE and held.dtype != ir.DataType.STRING
        return value in zeros or bool(is_small and held is not None and not held.numpy().any())

    if is_op(node, "ConstantOfShape"):
        filled = node.attributes.get("value")
        return filled is None or not filled.as_tensor().numpy().any()
    if is_op(node, *_KEEP_ZEROS):
        return given(node.inputs[0])
    return is_op(node, "Add", "Sub", "Concat") and all(map(given, node.inputs))


def written_types(model: ir.Model) -> dict[str, WrittenTypes]:
    """The types of every node of the graph that TensorRT gets; unknown ones are left out.

    So are nodes of whose results only the sizes are read: TensorRT has no kernel for them.
    """
    found: dict[str, WrittenTypes] = {}
    unread = _unread(model)
    constants: set[ir.Value] = set()
    zeros: set[ir.Value | None] = set()
    twins = _twins(model)

    def name_of(node: ir.Node) -> str:
        return node.name or f"node_of_{node.outputs[0].name}"

    def types(node: ir.Node, values: Iterable[ir.Value | None]) -> frozenset[str]:
        known = (value.dtype for value in values if value is not None and value.dtype is not None)
        # A graph that quantizes by itself is not in the precision that it is asked for.
        counted = {*FLOATING, *(() if node.op_type in _QUANTIZERS else _QUANTIZED_OF_MATMUL)}
        return frozenset(dtype_of(dtype.name) for dtype in known).intersection(counted)

    gemms = dict(quantized_gemms(model))

    def quantized(node: ir.Node) -> str | None:
        if multiplies_fp8(node):
            return "fp8"
        at = {"QuantizeLinear": node.outputs, "DequantizeLinear": node.inputs}.get(node.op_type)
        dtype = at[0].dtype if at and at[0] is not None else None
        return gemms.get(str(node.name)) if dtype is None else dtype_of(dtype.name)

    for node in model.graph.all_nodes():
        if not node.outputs or node in unread:
            continue
        inputs = [value for value in node.inputs if value is not None]
        varying = [value for value in inputs if not (value in constants or value.is_initializer())]
        is_constant = not varying
        constants.update(node.outputs if is_constant else ())
        zeros.update(node.outputs if _is_zeros(node, zeros) else ())
        if is_op(node, *MATMULS) and varying and zeros.issuperset(varying):
            is_constant = True
        is_attention = node.op_type.endswith("Attention")
        # A kernel may convert what it computed for a Cast to FP32 that reads it.
        readers = [use.node for value in node.outputs for use in value.uses() if is_op(use.node, "Cast")]
        casts = [each.outputs[0] for each in readers if each.outputs[0].dtype == ir.DataType.FLOAT]
        found[name_of(node)] = WrittenTypes(
            reads=types(node, node.inputs),
            writes=types(node, [*node.outputs, *casts])
            | ({"fp8"} if fp8_values(node) & {*node.outputs} else set()),
            is_matmul=node.op_type in _MATMULS or is_attention,
            is_softmax=node.op_type in _SOFTMAXES,
            is_attention=is_attention,
            is_constant=is_constant,
            is_custom=node.domain not in _DOMAINS,
            quantized=quantized(node),
            twin_of=name_of(twins[node]) if node in twins else "",
        )
    return found


# -- The kernels of one source, by the attention nodes that they compute ---------------------------

Groups = Mapping[str, Sequence[str]]
"""For each attention node, the names of the nodes it was lowered to."""

# The parts of an attention by the names that its lowerings give them, where the graph is not known.
_SCORES = re.compile(r"(?:^|/)scores(?:_\d+)?$", re.IGNORECASE)
_VALUES = re.compile(r"(?:^|/)(?:weighted_values|summed_values|sum)(?:_\d+)?$", re.IGNORECASE)
_WEIGHTS = re.compile(r"(?:^|/)(?:weights|softmax)(?:_\d+)?$", re.IGNORECASE)
# Where values named `<attention>/...` exist already, the lowered node is one level deeper: `prefix_within`.
_LOWERED = re.compile(r"/lowered(?:_\d+)?")


def group_by_attention(names: Sequence[str], attention: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The nodes of a lowered graph that each attention node became: itself, and every `<attention>/...`.

    A node that matches two names belongs to the longer one.
    """
    found: dict[str, list[str]] = {node: [] for node in attention}
    for name in names:
        prefix = name
        while prefix and prefix not in found:
            prefix = prefix.rpartition("/")[0]
        if prefix:
            found[prefix].append(name)
    return {node: tuple(parts) for node, parts in found.items()}


@dataclass(frozen=True, kw_only=True)
class _CoreNodes:
    """The nodes that do the work of one attention: all of it in one node, or its matmuls and softmaxes."""

    whole: frozenset[str]
    scores: frozenset[str]
    values: frozenset[str]
    softmaxes: frozenset[str]

    def is_covered_by(self, names: frozenset[str]) -> bool:
        """Whether a kernel that names these nodes names the whole attention.

        Scores and weighted values: a kernel that has both has the softmax between them. A softmax and one of
        the matmuls is not enough, since the other one may be a GEMM of its own.
        """
        return bool(self.whole & names or (self.scores & names and self.values & names))

    @property
    def names(self) -> frozenset[str]:
        """All of them."""
        return self.whole | self.scores | self.values | self.softmaxes


def _core(node: str, names: Sequence[str], written: Written) -> _CoreNodes:
    """The nodes that do the work, by what the graph states of them, else by their names."""

    def spelled(found: Iterable[str]) -> frozenset[str]:
        # The parser names a node without a name for its first output.
        return frozenset(spelling for name in found for spelling in (name, f"node_of_{name}"))

    known = {name: written[name] for name in names if name in written}
    lowered = {name for name in names if _LOWERED.fullmatch(name.removeprefix(node))}
    is_attention = {name: known[name].is_attention if name in known else name in lowered for name in names}
    whole = [name for name in names if name == node or is_attention[name]]
    softmaxes = [name for name, each in known.items() if each.is_softmax]
    matmuls = [name for name, each in known.items() if each.is_matmul and name not in whole]
    if not (softmaxes and matmuls):
        parts = ([name for name in names if part.search(name)] for part in (_SCORES, _VALUES, _WEIGHTS))
        scores, values, softmaxes = parts
    else:  # in the order of the graph: scores come before the softmax, weighted values behind it
        first = names.index(softmaxes[0])
        scores = [name for name in matmuls if names.index(name) < first or _SCORES.search(name)]
        values = [name for name in matmuls if name not in scores]
    return _CoreNodes(
        whole=spelled(whole), scores=spelled(scores), values=spelled(values), softmaxes=spelled(softmaxes)
    )


class ReportedKernels:
    """The kernels that one source reports for one profile, read once for all attentions."""

    def __init__(self, kernels: Sequence[Kernel], groups: Groups, written: Written | None) -> None:
        self.kernels = kernels
        self.source = kernels[0].source if kernels else None
        self.opaque = next((kernel.name for kernel in kernels if kernel.is_opaque), None)
        # A fused kernel that names no node: it may compute any attention node.
        self.nameless = next((k.label for k in kernels if k.is_fused_attention and not k.onnx_nodes), None)
        # By attention node: the kernels that name a part of it; the fused ones that name all of its core, and
        # a part of it only; the matmuls and softmaxes that compute its core, or a part, apart.
        self.named: dict[str, list[Kernel]] = {node: [] for node in groups}
        self.fused: dict[str, list[Kernel]] = {node: [] for node in groups}
        self.partial: dict[str, list[Kernel]] = {node: [] for node in groups}
        self.own: dict[str, list[Kernel]] = {node: [] for node in groups}
        self.computed: dict[int, str] = {}  # by the identity of a fused kernel, an attention that it computes
        # By the beginnings of the name of a node outside attention, a matmul or softmax that computes it:
        # scores that are an output of the model, which a fused kernel does not return, are computed again.
        self.apart: dict[str, str] = {}
        graph = written or {}
        cores = {node: _core(node, names, graph) for node, names in groups.items()}
        owners: dict[str, set[str]] = defaultdict(set)  # for each name in a kernel, its attentions
        for node, names in groups.items():
            for name in names:
                owners[name].add(node)
                owners[f"node_of_{name}"].add(node)
        strays: dict[str, list[Kernel]] = {"matmul": [], "softmax": []}
        for kernel in kernels:
            nodes = dict.fromkeys(node for name in kernel.onnx_nodes for node in owners.get(name, ()))
            elsewhere = {name for name in kernel.onnx_nodes if name not in owners}
            if kernel.is_matmul or kernel.is_softmax:
                self.apart |= {each: kernel.label for name in elsewhere for each in beginnings(name)}
            for node in nodes:
                self.named[node].append(kernel)
                self._count(kernel, node, cores[node], elsewhere, written)
            if not nodes and not elsewhere and (kernel.is_matmul or kernel.is_softmax):
                strays["softmax" if kernel.is_softmax else "matmul"].append(kernel)
        named = frozenset(name for kernel in kernels for name in kernel.onnx_nodes)
        self.stray = _stray(strays, graph if written is not None else None, owners, named)

    def _count(
        self, kernel: Kernel, node: str, core: _CoreNodes, elsewhere: set[str], written: Written | None
    ) -> None:
        """Put a kernel that names a part of an attention where it belongs."""
        names = frozenset(kernel.onnx_nodes)
        if kernel.is_fused_attention:
            if core.is_covered_by(names):
                self.fused[node].append(kernel)
                self.computed[id(kernel)] = node
            else:
                self.partial[node].append(kernel)
            return
        # It may compute a matmul or softmax outside attention, with the scale of one in its epilogue.
        graph = [written[name] for name in elsewhere if name in written] if written is not None else []
        if kernel.is_softmax and names & (core.whole | core.softmaxes):
            unknown = (name for name in elsewhere if written is None or name not in written)
            is_other = any(each.is_softmax for each in graph) or any(map(_WEIGHTS.search, unknown))
        elif kernel.is_matmul and names & (core.names or names):
            is_other = any(each.is_matmul for each in graph) or (written is None and bool(elsewhere))
        else:
            return
        if not is_other:
            self.own[node].append(kernel)


def _stray(
    strays: Mapping[str, Sequence[Kernel]],
    written: Written | None,
    owners: Mapping[str, set[str]],
    named: frozenset[str],
) -> EngineReason | None:
    """A softmax or matmul of no known node, of which there are more than the graph has outside attention.

    It may compute a part of any attention.
    """
    for kind, what in (
        (ReasonKind.STRAY_SOFTMAX, "softmax"),
        (ReasonKind.STRAY_MATMUL, "matmul"),
    ):
        outside = [
            name
            for name, each in (written or {}).items()
            if name not in owners and name not in named and not each.is_constant
            if (each.is_softmax if what == "softmax" else each.is_matmul)
        ]
        if len(strays[what]) > len(outside):
            return EngineReason(kind=kind, place=strays[what][0].label, got=str(len(strays[what])))
    return None


# -- Is the engine in the requested precision? -----------------------------------------------------

# First match wins: `f32f32_tf32f32_f32` reads FP32 and multiplies TF32, `f16_s16816gemm_f16` is FP16 with
# an FP32 accumulator, and `s1688gemm` with no narrower type in the name is TF32.
# In cuBLAS's names, one letter each for factors, accumulator and result follows: `nvjet_hsh`, `nvjet_tst`.
_NVJET = r"nvjet_(?:sm\d+_)?(?!sm\d)"
_MATH = (
    ("tf32", rf"tf32|tfloat32|{_NVJET}s"),
    ("fp4", r"e2m1|fp4"),
    ("fp8", rf"e4m3|e5m2|fp8|{_NVJET}[qr]"),
    ("int4", r"int4|w4a16|(?<![a-z0-9])[iu]4(?=f16|bf16)"),
    ("int8", rf"i8i(?:8|32)|imma|int8|w8a16|{_NVJET}i"),
    ("bf16", rf"bf16|bfloat16|{_NVJET}t"),
    ("fp16", r"f16f16|fp16|(?<![a-z])h\d{3,5}(?!\d)|(?<![a-z])h(?:gemm|cudnn)|(?<![a-z])f16(?!f)|half"),
    ("fp16", rf"{_NVJET}h"),
    ("tf32", r"s1688(?!\d)"),
    ("fp64", rf"(?<![a-z])d884|(?<![a-z])dgemm|f64|double|{_NVJET}d"),
    ("fp32", r"f32f32|(?<![a-z])s(?:gemm|cudnn)|fp32|simt_s|(?<![a-z0-9])f32(?!f)"),
    ("fp32", r"(?<![a-z0-9_])float(?![a-z0-9])"),
)
_NARROW_SUM = re.compile(rf"f16f16_f16f16_f16|(?<![a-z])h(?:884|1688|16816)(?:gemm|_)|{_NVJET}hh")
# Names that state what a matmul reads and writes in 16 bits, not only what it multiplies:
# `f16f16_f16f32_f32` writes FP16, `f16f16_f32f32_f32` does not, nor `s16816gemm_f16` with no type before it.
_NAMES_ALL_TYPES = re.compile(
    rf"(b?f16)\1_\1f(?:16|32)_|(?:f16|fp16)_[sh]\d+gemm\w*_(?:f16|fp16)|(?<![a-z])h\d+gemm"
    rf"|{_NVJET}(?:h[sh]h|tst)"
)
_FACTOR = re.compile(r"_(alpha|beta)(_myl\d+)?$")
_SELECTED_AT_LOAD = "CASK_STUB"
# A GEMV has no use for tensor cores, so it is computed in the types it reads.
_OF_VECTORS = re.compile(r"gemv", re.IGNORECASE)
# Layers that only store or move data; around plugins, 8.6 does not report their types.
_CARRIER = re.compile(r"^(constant|no_?op|shuffle|reformat|shape_?host_?to_?device)", re.IGNORECASE)
_READS, _WRITES, _COMPUTES = "reads", "writes", "computes"


class Offender(Struct, frozen=True, kw_only=True):
    """Something that is not in the requested precision: a tensor, or the `kernel` by the type in its name."""

    kernel: str
    tactic: str
    what: str
    dtype: str
    onnx_nodes: tuple[str, ...] = ()
    wanted: str = ""  # the type that the graph has there; empty where it is the requested one


class GemmTypes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of the GEMMs outside attention, where the graph quantizes some: each is in one place."""

    kernels: Annotated[int, means("how many kernels compute them, in all profiles together")]
    quantized: Annotated[
        dict[str, int], means("how many have a kernel that reads both operands in eight bits, by type")
    ]
    other_types: Annotated[
        dict[str, str], means("those that the graph quantizes and that run in another type, with that type")
    ]
    unknown: Annotated[
        tuple[str, ...], means("those that the graph quantizes and whose kernels do not show their type")
    ]
    unquantized: Annotated[tuple[str, ...], means("those that the graph does not quantize")]


class PrecisionVerdict(Struct, frozen=True, kw_only=True):
    """Whether an engine is in the requested precision."""

    requested: str  # the types of the graph, as `fp16` or `fp8/fp16`
    status: PrecisionStatus
    counts: dict[str, int]  # of the tensors of each type, and of the kernels with a type in their names
    # Matmuls and attentions with a floating-point type that is not the graph's: another than requested, or
    # FP16 where the graph keeps FP32. Other kernels with another type than requested.
    offenders: tuple[Offender, ...] = ()
    islands: tuple[Offender, ...] = ()
    reasons: tuple[EngineReason, ...] = ()  # why it is mixed or unknown; empty otherwise
    has_untyped: bool = False  # whether a matmul or attention was reported without its types
    written: tuple[Offender, ...] = ()  # matmuls and attentions with another type that the graph requests
    accumulate_in_fp16: tuple[str, ...] = ()  # the kernels that do, by their names
    selected_at_load: tuple[str, ...] = ()  # the matmuls whose kernels are chosen when the engine is loaded
    gemms: GemmTypes | None = None  # where the graph quantizes
    not_quantized: tuple[Offender, ...] = ()  # matmuls that it quantizes, and that run in another type
    # Attentions that the graph quantizes, all of whose kernels read that type, by type.
    quantized_attentions: dict[str, int] = {}

    @property
    def quantized(self) -> dict[str, int]:
        """How many GEMMs outside attention are in eight bits, by type."""
        return {} if self.gemms is None else self.gemms.quantized

    @property
    def unquantized_attentions(self) -> dict[str, str]:
        """Parts of attentions that the graph quantizes and that run in another type, with that type."""
        gemms = {} if self.gemms is None else self.gemms.other_types
        return {each.what: each.dtype for each in self.not_quantized if each.what not in gemms}

    @property
    def ok(self) -> bool:
        """Whether the requested precision is verified."""
        return self.status == PrecisionStatus.VERIFIED

    @property
    def has_requested_types(self) -> bool:
        """Whether all types are the requested ones, as far as that can be known before a load."""
        return self.status in (PrecisionStatus.VERIFIED, PrecisionStatus.SELECTED_AT_LOAD)

    @property
    def is_fp32_as_recorded(self) -> bool:
        """Whether only this is unknown: in which type kernels multiply that read and write FP32."""
        is_unknown = self.status == PrecisionStatus.UNKNOWN and bool(self.reasons)
        return is_unknown and all(map(is_compute_type_of_fp32, self.reasons))


def is_compute_type_of_fp32(reason: EngineReason) -> bool:
    """Whether a reason is that a kernel of FP32 does not record in which type it multiplies."""
    return reason.kind == ReasonKind.COMPUTE_TYPE and reason.wanted == "fp32"


def precision_verdict(
    kernels: Sequence[Kernel],
    precision: str,
    written: Written | None = None,
    attention: Groups | None = None,  # what each was lowered to
) -> PrecisionVerdict:
    """Judge an engine's precision by its kernels, as one source reports them.

    It is `mixed` as soon as one matmul or attention is of another floating-point type than requested and
    `written` in the graph, or narrower than there, or something was quantized; `verified` only where every
    kernel could be judged and every matmul of the graph was reported; `selected at load` where only that is
    missing which the device chooses; else `unknown`.
    """
    generated, missing = _matmuls_by_graph(kernels, written or {})
    heavy = [kernel for kernel in kernels if kernel.is_heavy or id(kernel) in generated]
    light = [kernel for kernel in kernels if not kernel.is_heavy and id(kernel) not in generated]
    # A graph that is of another type throughout is not in the requested precision, though it is written so.
    is_used = any(tensor.dtype == precision for kernel in heavy for tensor in _data(kernel))
    excuses = written if written and is_used else {}
    offenders: list[Offender] = []
    from_graph: list[Offender] = []
    islands: list[Offender] = []
    for kernel in heavy:
        for role, found in _offenders(kernel, precision, _QUANTIZED_OF_MATMUL):
            (from_graph if _is_written(kernel, role, found.dtype, excuses) else offenders).append(found)
    for kernel in light:
        for role, found in _offenders(kernel, precision, _QUANTIZED):
            # What is quantized before a matmul, or behind it, is not in the requested precision either.
            quantized = found.dtype in _QUANTIZED and not (
                _is_written(kernel, role, found.dtype, written or {})
                or _is_moved(kernel, found.dtype, written or {})
            )
            (offenders if quantized else islands).append(found)
    proven, half, open_ = _quantized_matmuls(heavy, written or {})
    offenders += half
    offenders += [found for kernel in heavy for found in _narrowed(kernel, written or {})]
    owners = {name: node for node, names in (attention or {}).items() for name in names}
    inside = {owners[name]: dtype for name, dtype in proven.items() if name in owners}
    for name in {*(each.what for each in half), *(n for n, w in (written or {}).items() if w.quantized)}:
        if name not in proven and (written or {})[name].is_matmul:  # one of its parts is not in eight bits
            inside.pop(owners.get(name, ""), None)
    reason = None if offenders else _why_unknown(kernels, generated, missing, precision, written)
    if reason is None and not offenders and open_:
        reason = EngineReason(kind=ReasonKind.COMPUTE_TYPE, place=open_[0])
    if reason is None and not offenders:  # last: it says that everything else is known
        hiding = (kernel.label for kernel in heavy if _hides_its_type(kernel, precision))
        reasons = (EngineReason(kind=ReasonKind.COMPUTE_TYPE, place=p, wanted=precision) for p in hiding)
        reason = next(reasons, None)
    if offenders:
        found = offenders[0]
        reason = EngineReason(
            kind=ReasonKind.OTHER_TYPE,
            place=found.kernel,
            got=found.dtype,
            wanted=found.wanted or precision,
        )
    later = tuple(kernel.name for kernel in heavy if _SELECTED_AT_LOAD in kernel.tactic)
    known = PrecisionStatus.SELECTED_AT_LOAD if later else PrecisionStatus.VERIFIED
    return PrecisionVerdict(
        requested=_requested(precision, written),
        status=PrecisionStatus.MIXED if offenders else PrecisionStatus.UNKNOWN if reason else known,
        counts=_counts(kernels),
        offenders=tuple(offenders),
        islands=tuple(islands),
        reasons=(reason,) if reason else (),
        has_untyped=any(_is_untyped(kernel) for kernel in heavy if not kernel.is_opaque),
        written=tuple(from_graph),
        accumulate_in_fp16=tuple(k.tactic for k in kernels if _NARROW_SUM.search(k.tactic.lower())),
        selected_at_load=later,
        gemms=_gemm_types(heavy, written or {}, owners, proven, half),
        not_quantized=tuple(half),
        quantized_attentions=dict(Counter(inside.values())),
    )


def _requested(precision: str, written: Written | None) -> str:
    """The types that a graph asks for: `fp16`, or `fp8/fp16` where it quantizes."""
    eight = {node.quantized for node in (written or {}).values() if node.quantized is not None}
    return "/".join([*sorted(eight), precision])


def _quantized_matmuls(
    heavy: Sequence[Kernel], written: Written
) -> tuple[dict[str, str], list[Offender], list[str]]:
    """What became of the matmuls that the graph quantizes: in eight bits, in another type, or not known.

    The kernel decides: both factors are in the type, or one of them and its name says so. A kernel that reads
    only one factor in it may dequantize a weight, and multiply in another type.
    """
    wanted = {n: w.quantized for n, w in written.items() if w.is_matmul and w.quantized is not None}
    proven: dict[str, str] = {}
    half: list[Offender] = []
    open_: dict[str, str] = {}  # by the matmul, a kernel
    for name, dtype in wanted.items():
        for kernel in (each for each in heavy if name in each.onnx_nodes):
            data = [tensor for tensor in _data(kernel) if tensor not in kernel.outputs]
            read, given = [t.dtype for t in data], [t.dtype for t in data if t in kernel.inputs]
            count, named = read.count(dtype), _named_type(kernel)
            if count > 1 or (count and named == dtype):
                proven[name] = dtype
            elif given and dtype not in given and UNKNOWN not in given and named != dtype:
                half.append(_offender(kernel, name, given[0], dtype))
            elif named != dtype:
                open_.setdefault(name, kernel.label)
    others = {*open_, *(each.what for each in half)}  # of another profile, say
    return {name: dtype for name, dtype in proven.items() if name not in others}, half, [*open_.values()]


def _gemm_types(
    heavy: Sequence[Kernel],
    written: Written,
    owners: Mapping[str, str],
    proven: Mapping[str, str],
    half: Sequence[Offender],
) -> GemmTypes | None:
    """Every GEMM outside attention by what became of it; None where the graph quantizes nothing."""
    gemms = {
        name: node
        for name, node in written.items()
        if node.is_matmul and not (node.is_attention or node.is_constant or name in owners)
    }
    if not any(node.quantized for node in gemms.values()):
        return None
    # Of equal GEMMs, which a builder merges, one has a kernel.
    types = {name: proven.get(name) or proven.get(node.twin_of) for name, node in gemms.items()}
    others = {each.what: each.dtype for each in half if each.what in gemms}
    wanted = [name for name, node in gemms.items() if node.quantized]
    return GemmTypes(
        kernels=sum(not gemms.keys().isdisjoint(kernel.onnx_nodes) for kernel in heavy),
        quantized=dict(Counter(dtype for dtype in types.values() if dtype is not None)),
        other_types=others,
        unknown=tuple(name for name in wanted if types[name] is None and name not in others),
        unquantized=tuple(name for name in gemms if name not in wanted),
    )


def _matmuls_by_graph(kernels: Sequence[Kernel], written: Written) -> tuple[set[int], list[str]]:
    """The kernels that compute a matmul by what the graph states of their nodes, and the matmuls without one.

    A matmul may be generated as elementwise multiplications and their sum, which its kernel's name does not
    distinguish from a norm. What no kernel of a profile reports is missing: such a report is not complete.
    Of equal matmuls one kernel is enough.
    Only where the nodes of a kernel are recorded one by one: elsewhere they are parts of the names of layers.
    """
    generated: set[int] = set()
    missing: list[str] = []
    matmuls = [name for name, node in written.items() if node.is_matmul and not node.is_constant]
    for profile in sorted({kernel.profile for kernel in kernels}):
        mine = [kernel for kernel in kernels if kernel.profile == profile]
        reported = {name for kernel in mine if kernel.is_heavy for name in kernel.onnx_nodes}
        left = dict.fromkeys(name for name in matmuls if name not in reported)
        for kernel in mine:
            if kernel.is_heavy or kernel.is_plugin or not (kernel.can_multiply or not kernel.is_small):
                continue
            if names := [name for name in kernel.onnx_nodes if name in left]:
                generated.add(id(kernel))
                reported.update(names)
        if any(kernel.is_traced for kernel in mine):
            computed = {written[name].twin_of or name for name in reported if name in written}
            missing += [name for name in left if (written[name].twin_of or name) not in computed]
    return generated, missing


def math_type(tactic: str) -> str:
    """The type a kernel multiplies in, or `?`: `sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_...` is `fp16`."""
    # `bf16` and `f32f32` are also hexadecimal digits.
    lowered = re.sub(r"0x[0-9a-f]+", "", tactic.lower())
    return next((name for name, pattern in _MATH if re.search(pattern, lowered)), UNKNOWN)


def _data(kernel: Kernel) -> list[EngineTensor]:
    """The tensors with data: not alpha and beta of `alpha * A @ B + beta * C`, which are FP32 by design."""

    def is_factor(tensor: EngineTensor) -> bool:
        single = bool(tensor.shape) and all(size == 1 for size in tensor.shape)  # a folded scale has any name
        return single or (not tensor.shape and bool(_FACTOR.search(tensor.name)))

    multiplies = kernel.is_gemm or kernel.is_convolution
    read = [tensor for tensor in kernel.inputs + kernel.constants if not (multiplies and is_factor(tensor))]
    return [*read, *kernel.outputs]


def _named_type(kernel: Kernel) -> str:
    # Names of generated kernels are made from operators; only those of matmuls and plugins contain types.
    if kernel.multiplies_in != UNKNOWN:
        return kernel.multiplies_in
    named = kernel.is_gemm or kernel.is_convolution or kernel.is_fused_attention or kernel.is_plugin
    return math_type(kernel.tactic) if named else UNKNOWN


def _offenders(kernel: Kernel, precision: str, quantized: frozenset[str]) -> list[tuple[str, Offender]]:
    """What of a kernel is of another type, and whether it is read, written, or what it computes in."""
    written = {tensor.name for tensor in kernel.outputs}
    found = [
        (_WRITES if tensor.name in written else _READS, tensor.name, tensor.dtype) for tensor in _data(kernel)
    ]
    found.append((_COMPUTES, "kernel", _named_type(kernel)))
    counted = {*FLOATING, *quantized}
    return [
        (role, _offender(kernel, what, dtype))
        for role, what, dtype in dict.fromkeys(found)
        # Whole numbers are indices and sizes, unless a matmul or an attention computes in them.
        if dtype != precision and (dtype in counted or (role == _COMPUTES and dtype != UNKNOWN))
    ]


def _offender(kernel: Kernel, what: str, dtype: str, wanted: str = "") -> Offender:
    about: dict[str, Any] = {"kernel": kernel.name, "tactic": kernel.tactic, "onnx_nodes": kernel.onnx_nodes}
    return Offender(what=what, dtype=dtype, wanted=wanted, **about)


def _nodes(kernel: Kernel, written: Written) -> list[WrittenTypes]:
    return [written[name] for name in kernel.onnx_nodes if name in written]


def _is_written(kernel: Kernel, role: str, dtype: str, written: Written) -> bool:
    """Whether a node of the kernel has this type in the graph, at the same place."""
    nodes = _nodes(kernel, written)
    if role == _COMPUTES:
        matmuls = [node for node in nodes if node.is_matmul]
        return bool(matmuls) and all(dtype in node.reads or dtype == node.quantized for node in matmuls)
    return any(dtype in getattr(node, role) or dtype == node.quantized for node in nodes)


def _is_moved(kernel: Kernel, dtype: str, written: Written) -> bool:
    """Whether a kernel moves what the graph quantized before it: without a scale it can quantize nothing."""
    kinds = [
        {each.dtype for each in part} & {*FLOATING, *_QUANTIZED} for part in (_data(kernel), kernel.outputs)
    ]
    is_asked = any(node.quantized == dtype for node in written.values())
    return is_asked and kinds == [{dtype}, {dtype}] and any(each.dtype == dtype for each in kernel.inputs)


def _narrowed(kernel: Kernel, written: Written) -> list[Offender]:
    """The factors in FP16 or BF16 of a matmul that is FP32 in the graph.

    TensorRT-RTX 1.7.1 narrows a matmul between two Casts, unless it was lowered for it (`keep_fp32`).
    What a kernel adds to the result may be narrow: then it reads two wide factors as well. Attention is left
    out: its kernels accumulate in FP32 inside.
    """
    matmuls = [node for node in _nodes(kernel, written) if node.is_matmul]
    if kernel.is_fused_attention or not matmuls or any(node.reads != {"fp32"} for node in matmuls):
        return []
    read = [tensor for tensor in _data(kernel) if tensor not in kernel.outputs]
    narrow = [tensor for tensor in read if tensor.dtype in ("fp16", "bf16")]
    if len(narrow) < 2 or sum(tensor.dtype == "fp32" for tensor in read) > 1:
        return []
    return [_offender(kernel, tensor.name, tensor.dtype, "fp32") for tensor in narrow]


def _why_unknown(
    kernels: Sequence[Kernel],
    generated: set[int],
    missing: Sequence[str],
    precision: str,
    written: Written | None,
) -> EngineReason | None:
    """The first reason why the kernels do not show the precision, where nothing in them is wrong."""
    graph = written or {}
    for kernel in kernels:
        if kernel.is_opaque:
            return EngineReason(kind=ReasonKind.HIDDEN_REGION, place=kernel.name)
    for kernel in kernels:
        nodes = _nodes(kernel, graph)
        is_plain = bool(nodes) and not any(node.is_matmul or node.is_custom for node in nodes)
        if kernel.is_foreign_plugin and not is_plain:
            return EngineReason(kind=ReasonKind.FOREIGN_PLUGIN, place=kernel.label)
        if _is_untyped(kernel) and not _CARRIER.search(kernel.layer_type):
            return EngineReason(kind=ReasonKind.UNTYPED, place=kernel.label)
    if not any(dtype in FLOATING for dtype in _counts(kernels)):
        return EngineReason(kind=ReasonKind.NOTHING_FLOATING, wanted=precision)
    for kernel in kernels:
        if kernel.is_heavy or id(kernel) in generated:
            continue
        nodes = _nodes(kernel, graph)
        # Neither its name nor its nodes exclude that it computes a matmul.
        hidden = not (kernel.is_small or kernel.is_softmax)
        is_open = (not nodes and kernel.can_add_products) if written is None else hidden and not nodes
        if is_open or (hidden and (not nodes or any(node.is_matmul for node in nodes))):
            others = [found.dtype for _, found in _offenders(kernel, precision, _QUANTIZED)]
            if others or (hidden and not kernel.tensors):
                got = others[0] if others else ""
                return EngineReason(
                    kind=ReasonKind.MAY_BE_MATMUL, place=kernel.label, got=got, wanted=precision
                )
    return EngineReason(kind=ReasonKind.MATMUL_NOT_REPORTED, place=missing[0]) if missing else None


def _hides_its_type(kernel: Kernel, precision: str) -> bool:
    """Whether a matmul of FP32 may be computed in fewer bits: tensor cores take no FP32."""
    if precision != "fp32" or kernel.plugin_role or not kernel.is_heavy or kernel.is_opaque:
        return False
    is_reported = _named_type(kernel) != UNKNOWN or _SELECTED_AT_LOAD in kernel.tactic
    return not is_reported and not _OF_VECTORS.search(kernel.tactic or kernel.name)


def _is_untyped(kernel: Kernel) -> bool:
    if any(tensor.dtype == UNKNOWN for tensor in _data(kernel)):
        # 8.6 does not report the types of tensors with dynamic sizes; some matmuls have them in their names.
        return not (kernel.is_gemm and _NAMES_ALL_TYPES.search(kernel.tactic.lower()))
    needs_type = kernel.is_heavy and not kernel.is_opaque
    return needs_type and not kernel.tensors and _named_type(kernel) == UNKNOWN


def _counts(kernels: Iterable[Kernel]) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for kernel in kernels:
        counted.update(tensor.dtype for tensor in _data(kernel))
        counted.update({_named_type(kernel)} - {UNKNOWN})
    return dict(counted.most_common())


# -- Was attention fused? One answer per attention node and profile, with its evidence -------------


class NodeVerdict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine computes one attention node in one optimization profile."""

    node: Annotated[str, means("name of the attention node")]
    profile: Annotated[int, means("the optimization profile, from 0 on")]
    status: Annotated[FusionStatus, means("the verdict")]
    kernels: Annotated[tuple[str, ...], means("the kernels that prove it")] = ()
    reasons: Annotated[
        tuple[EngineReason, ...],
        means("why it is unknown, or how it is known, as in `precision_reasons`; may be empty"),
    ] = ()
    sources: Annotated[
        tuple[EvidenceSource, ...], means("where it was detected: `log`, `plan`, `inspector` or `graph`")
    ] = ()


class Claim(Struct, frozen=True, kw_only=True):
    """What one source reports."""

    source: EvidenceSource
    fusion: FusionStatus | None = None  # None: the precision is claimed
    precision: PrecisionStatus | None = None
    kernels: tuple[str, ...] = ()

    @property
    def status(self) -> FusionStatus | PrecisionStatus:
        """What it claims, of either."""
        return self.fusion or self.precision or FusionStatus.UNKNOWN


class Disagreement(Struct, frozen=True, kw_only=True):
    """What two sources report differently: of an attention in a profile, or of the precision."""

    claims: tuple[Claim, Claim]
    node: str | None = None  # None: the precision
    profile: int = 0


class EngineVerdict(Struct, frozen=True, kw_only=True):
    """Fusion and precision of an engine: one verdict per attention node and profile."""

    nodes: tuple[NodeVerdict, ...]
    precision: PrecisionVerdict
    disagreements: tuple[Disagreement, ...] = ()

    @property
    def fused_count(self) -> tuple[int, int]:
        """How many attention nodes are fused in every profile, of how many."""
        names = {verdict.node for verdict in self.nodes}
        broken = {verdict.node for verdict in self.nodes if verdict.status != FusionStatus.FUSED}
        return len(names - broken), len(names)

    @property
    def all_fused(self) -> bool:
        """Whether every attention node is fused in every profile."""
        fused, count = self.fused_count
        return fused == count > 0


def engine_verdict(
    sources: Mapping[EvidenceSource, Sequence[Kernel]],  # the kernels as each source reports them, or none
    attention: Groups | Iterable[str],  # the nodes, or what each was lowered to
    precision: str,
    *,
    profiles: int = 1,
    written: Written | None = None,  # in the graph the engine was built from, where it is available
) -> EngineVerdict:
    """Judge an engine by everything that is known of its kernels."""
    groups = _groups(attention)
    reported = {name: kernels for name, kernels in sources.items() if kernels}
    found: dict[tuple[int, str], list[NodeVerdict]] = {}
    for kernels in reported.values():
        for verdict in fusion_verdict(kernels, groups, profiles=profiles, written=written):
            found.setdefault((verdict.profile, verdict.node), []).append(verdict)
    count = max([profiles, *(profile + 1 for profile, _ in found)])
    nodes, doubts = [], list[Disagreement]()
    for key in ((profile, node) for profile in range(count) for node in groups):
        verdict, conflict = _merge(found.get(key, ()), *key)
        nodes.append(verdict)
        doubts += conflict
    by_source = {n: precision_verdict(kernels, precision, written, groups) for n, kernels in reported.items()}
    names = {name: {kernel.label for kernel in kernels} for name, kernels in reported.items()}
    judged, conflict = _merge_precision(by_source, names, _requested(precision, written))
    return EngineVerdict(nodes=tuple(nodes), precision=judged, disagreements=(*doubts, *conflict))


def fusion_verdict(
    kernels: Sequence[Kernel],
    attention: Groups | Iterable[str],
    *,
    profiles: int = 1,
    written: Written | None = None,
) -> list[NodeVerdict]:
    """Judge every attention node by the kernels of one source; further profiles only if kernels show them."""
    groups = _groups(attention)
    verdicts = []
    for profile in range(max([profiles, *(kernel.profile + 1 for kernel in kernels)])):
        of_profile = [kernel for kernel in kernels if kernel.profile == profile]
        if of_profile and not any(kernel.onnx_nodes or kernel.is_opaque for kernel in of_profile):
            verdicts += _by_count(of_profile, groups, profile, written)
        else:
            reported = ReportedKernels(of_profile, groups, written)
            verdicts += [_by_name(reported, node, profile) for node in groups]
    return verdicts


def _groups(attention: Groups | Iterable[str]) -> Groups:
    return attention if isinstance(attention, Mapping) else {node: (node,) for node in attention}


def _by_name(reported: ReportedKernels, node: str, profile: int) -> NodeVerdict:
    """Judge a node by the kernels that name it."""
    mine, fused, own = reported.named[node], reported.fused[node], reported.own[node]
    verdict = partial(_verdict, node, profile, reported.source)
    # TensorRT cannot take a plugin apart: what no kernel names is none of its parts.
    by_plugin = any(kernel.plugin_role for kernel in fused)
    if fused and not own and (by_plugin or reported.stray is None):
        again = reported.apart.get(f"{node}{SCORES_SUFFIX}")
        reason = EngineReason(kind=ReasonKind.SCORES_AGAIN, place=again) if again else None
        return verdict(FusionStatus.FUSED, fused, reason)
    # One attention is not computed twice: a fused kernel beside both belongs to something else.
    both = any(kernel.is_matmul for kernel in own) and any(kernel.is_softmax for kernel in own)
    is_clear = not any(kernel.is_opaque for kernel in mine) and reported.nameless is None
    if is_clear and (both if fused or reported.partial[node] else own):
        return verdict(FusionStatus.DECOMPOSED, mine)
    return verdict(FusionStatus.UNKNOWN, (), _why_undecided(reported, node, profile))


def _why_undecided(reported: ReportedKernels, node: str, profile: int) -> EngineReason:
    """Why the kernels show neither that an attention is fused nor that it is not."""
    mine, fused, own = reported.named[node], reported.fused[node], reported.own[node]
    if fused and own:
        return EngineReason(kind=ReasonKind.COMPUTED_APART, place=own[0].label, got=fused[0].label)
    if fused and reported.stray is not None:
        return replace(reported.stray, wanted=fused[0].label)
    if not reported.kernels:
        return EngineReason(kind=ReasonKind.NO_KERNELS, place=str(profile))
    if reported.opaque is not None:
        return EngineReason(kind=ReasonKind.HIDDEN_REGION, place=reported.opaque)
    if reported.nameless is not None:
        return EngineReason(kind=ReasonKind.NAMELESS_FUSED, place=reported.nameless)
    for kernel in mine:
        if kernel.is_foreign_plugin:
            return EngineReason(kind=ReasonKind.FOREIGN_PLUGIN, place=kernel.label)
    for kernel in reported.partial[node]:
        if other := reported.computed.get(id(kernel)):
            return EngineReason(kind=ReasonKind.OTHER_ATTENTION, place=kernel.label, got=other)
        return EngineReason(kind=ReasonKind.PARTIAL_FUSED, place=kernel.label, names=kernel.onnx_nodes)
    if mine:
        return EngineReason(kind=ReasonKind.NO_COMPUTING_KERNEL, place=mine[0].label)
    return EngineReason(kind=ReasonKind.NOT_NAMED, place=node)


def _verdict(
    node: str,
    profile: int,
    source: EvidenceSource | None,
    status: FusionStatus,
    kernels: Sequence[Kernel] = (),
    reason: EngineReason | None = None,
) -> NodeVerdict:
    found = tuple(dict.fromkeys(kernel.label for kernel in kernels))
    reasons = (reason,) if reason else ()
    sources = () if source is None else (source,)
    return NodeVerdict(
        node=node, profile=profile, status=status, kernels=found, reasons=reasons, sources=sources
    )


def _by_count(
    kernels: Sequence[Kernel], groups: Groups, profile: int, written: Written | None
) -> list[NodeVerdict]:
    """Judge all nodes together by kernels of which none names a node.

    The graph states how many matmuls and softmaxes there are outside attention.
    """
    parts = {name for names in groups.values() for name in names}
    outside = [node for name, node in (written or {}).items() if name not in parts and not node.is_constant]
    # One attention may take two launches: over parts of the keys, and to combine their results.
    fused = [kernel for kernel in kernels if kernel.is_fused_attention]
    softmax = [kernel for kernel in kernels if kernel.is_softmax]
    matmul = [kernel for kernel in kernels if kernel.is_matmul]
    strange = [k for k in kernels if not (k.is_heavy or k.is_softmax or k.is_small)]
    status, proof = FusionStatus.UNKNOWN, list[Kernel]()
    counted = partial(EngineReason, got=str(len(fused)), wanted=str(len(groups)))
    reason = counted(kind=ReasonKind.COUNT_DIFFERS)
    if not fused and softmax:
        status, proof = FusionStatus.DECOMPOSED, [*matmul, *softmax]
        reason = counted(kind=ReasonKind.COUNTED, place=softmax[0].label)
    elif len(softmax) > sum(node.is_softmax for node in outside):
        reason = counted(kind=ReasonKind.STRAY_SOFTMAX, place=softmax[0].label)
    elif len(fused) == len(groups) and written is None:
        reason = counted(kind=ReasonKind.NO_GRAPH)
    elif len(matmul) > sum(node.is_matmul for node in outside):
        reason = counted(kind=ReasonKind.STRAY_MATMUL, place=matmul[0].label)
    elif len(fused) == len(groups) and strange:
        reason = counted(kind=ReasonKind.MAY_BE_MATMUL, place=strange[0].label)
    elif len(fused) == len(groups):
        status, proof = FusionStatus.FUSED, fused
        reason = counted(kind=ReasonKind.COUNTED)
    return [_verdict(node, profile, kernels[0].source, status, proof, reason) for node in groups]


def _merge(mine: Sequence[NodeVerdict], profile: int, node: str) -> tuple[NodeVerdict, list[Disagreement]]:
    """The verdict of all sources on one node, and where they contradict each other."""
    known = [verdict for verdict in mine if verdict.status != FusionStatus.UNKNOWN]
    unknown = NodeVerdict(
        node=node,
        profile=profile,
        status=FusionStatus.UNKNOWN,
        reasons=tuple(dict.fromkeys(reason for verdict in mine for reason in verdict.reasons))
        or (EngineReason(kind=ReasonKind.NO_SOURCE),),
        sources=tuple(source for verdict in (known or mine) for source in verdict.sources),
    )
    if not known:
        return unknown, []
    first = known[0]

    def differs(other: NodeVerdict) -> bool:
        # A profiler and the layer records spell a kernel differently, so only these two are compared; names
        # of decomposed kernels differ by source.
        by_both = {*first.sources, *other.sources} == {EvidenceSource.LOG, EvidenceSource.PLAN}
        comparable = by_both and first.status == FusionStatus.FUSED
        return first.status != other.status or (comparable and set(first.kernels) != set(other.kernels))

    kept, other = replace(first, sources=unknown.sources), next(filter(differs, known[1:]), None)
    if other is None:
        return kept, []
    one, two = (Claim(source=v.sources[0], fusion=v.status, kernels=v.kernels) for v in (first, other))
    conflict = Disagreement(node=node, profile=profile, claims=(one, two))
    if first.status == other.status:
        return kept, [conflict]
    reason = EngineReason(
        kind=ReasonKind.SOURCES_DISAGREE,
        place=node,
        names=(str(one.source), str(two.source)),
        got=str(first.status),
        wanted=str(other.status),
    )
    return replace(unknown, reasons=(reason,)), [conflict]


_FROM_WORST = (
    PrecisionStatus.MIXED,
    PrecisionStatus.SELECTED_AT_LOAD,
    PrecisionStatus.VERIFIED,
    PrecisionStatus.UNKNOWN,
)


def _from_worst(verdict: PrecisionVerdict) -> tuple[bool, int]:
    """The place of a verdict among those of all sources; FP32 as far as it is recorded is known, too."""
    is_known = verdict.is_fp32_as_recorded
    return verdict.status != PrecisionStatus.MIXED and not is_known, _FROM_WORST.index(verdict.status)


def _merge_precision(
    verdicts: Mapping[EvidenceSource, PrecisionVerdict],
    names: Mapping[EvidenceSource, set[str]],
    requested: str,
) -> tuple[PrecisionVerdict, list[Disagreement]]:
    """The worst that is known; `unknown` where no source knows, or one reports what no other could judge.

    A plan contains only Myelin's regions, the inspector reports everything but what is inside them: an
    inspector that does not know the type of one of its layers is not overruled by a plan without that layer.
    `names` are those of the kernels that each source reports.
    """
    unknown = PrecisionStatus.UNKNOWN
    ranked = sorted(verdicts.items(), key=lambda item: _from_worst(item[1]))
    if not ranked:
        reasons = (EngineReason(kind=ReasonKind.NO_SOURCE),)
        return PrecisionVerdict(requested=requested, status=unknown, counts={}, reasons=reasons), []
    name, worst = ranked[0][0], _with_eight_bits(ranked[0][1], verdicts.values())
    known = {name: v for name, v in verdicts.items() if v.has_requested_types or v.is_fp32_as_recorded}
    judged = {each for source in known for each in names[source]}
    others = [v for source, v in verdicts.items() if v.status == unknown and source not in known]
    untyped = [v for v in others if _is_unjudged(v, judged)]
    if untyped and name in known:
        return replace(worst, status=unknown, reasons=untyped[0].reasons), []
    doubts = [
        Disagreement(
            claims=(
                Claim(source=name, precision=worst.status),
                Claim(source=other, precision=verdict.status),
            )
        )
        for other, verdict in ranked[1:]
        if worst.status == PrecisionStatus.MIXED and verdict.has_requested_types
    ]
    return worst, doubts


def _with_eight_bits(verdict: PrecisionVerdict, all_: Iterable[PrecisionVerdict]) -> PrecisionVerdict:
    """A verdict with what is in eight bits by the source that knows most: a plan has no types of plugins."""

    def known(each: PrecisionVerdict) -> tuple[int, int]:
        proven = (*each.quantized.values(), *each.quantized_attentions.values())
        return len(each.not_quantized), sum(proven)

    most = max(all_, key=known)
    return replace(
        verdict,
        gemms=most.gemms,
        not_quantized=most.not_quantized,
        quantized_attentions=most.quantized_attentions,
    )


def _is_unjudged(verdict: PrecisionVerdict, judged: set[str]) -> bool:
    """Whether a source reports a kernel that it could not judge, so that no other source excuses it.

    One that may be a matmul is excused by a source that judged it.
    """
    kinds = (ReasonKind.FOREIGN_PLUGIN, ReasonKind.COMPUTE_TYPE, ReasonKind.MAY_BE_MATMUL)
    reasons = [reason for reason in verdict.reasons if reason.kind in kinds]
    is_known = all(each.kind == ReasonKind.MAY_BE_MATMUL and each.place in judged for each in reasons)
    return verdict.has_untyped or not is_known
